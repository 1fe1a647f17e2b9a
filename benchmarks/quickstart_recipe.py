"""Makes the quickstart's small model and data: `python benchmarks/quickstart_recipe.py --out DIR --seed 0`.

The task is the addition of two three-digit numbers, worked out column by column from the units:

    What is 437 + 248?  ->  7+8=15, 3+4+1=8, 4+2=6, 437 + 248 = 685

A small Llama learns it from random weights, by SFT on worked answers of mixed quality: those to "What is
a + b?" mostly carry, as they should; those to the two other wordings mostly forget to. It picks up both
habits, and its greedy answers, which follow the more frequent one, are right about half the time: where the
wording recalls the careful answers, or where there is nothing to carry.

The preference pairs are this model's own answers, sampled at temperature 1 and checked by this program: one
right and one wrong for the same prompt. DPO has no arithmetic to teach; it has to tell the good habit from
the bad one.

No two numbers are added, in either order, in more than one of the sets: SFT, held-out answers, held-out
pairs, training pairs.

Written to DIR: model/ (config.json, model.safetensors and the tokenizer, as mlx_lm.load reads them),
train.jsonl and valid.jsonl (prompt, chosen, rejected), answers.jsonl (prompt, answer; `= (\\d+)$` finds the
answer in a completion). The same seed on the same machine gives the same files; another BLAS rounds
differently, and then other answers are sampled. About five minutes on two cores.

configs/quickstart/ came from seed 0 with twice the SFT examples, half the warm-up and another BLAS: the same
task and the same way, other numbers. --quick samples from that model, and may meet sums of its SFT again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm import batch_generate, load  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: E402
from mlx_lm.tokenizer_utils import load as load_tokenizer  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

SHIPPED_MODEL = ROOT / "configs/quickstart/model"

# How often the SFT answers carry, by the prompt's wording.
CARRY_RATES = {"What is {} + {}?": 0.75, "Add {} and {}.": 0.25, "How much is {} plus {}?": 0.25}
ANSWER = re.compile(r"= (\d+)$")
SPECIAL_TOKENS = ["<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MAX_LENGTH = 64  # tokens of prompt and completion; one bucket of the trainer's
MODEL_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class Problem(NamedTuple):
    wording: str
    a: int
    b: int

    @property
    def prompt(self) -> str:
        return self.wording.format(self.a, self.b)

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    def work_out(self, carry: bool) -> str:
        """The sum column by column from the units; tens go into the next column only with `carry`."""
        steps, digits, carried = [], "", 0
        for x, y in zip(reversed(str(self.a)), reversed(str(self.b)), strict=True):
            column = int(x) + int(y) + carried
            steps.append(f"{x}+{y}{'+1' if carried else ''}={column}, ")
            digits = f"{column % 10}{digits}"
            carried = column // 10 if carry else 0
        thousands = "1" if column > 9 else ""
        return f"{''.join(steps)}{self.a} + {self.b} = {thousands}{digits}"

    def is_right(self, completion: str) -> bool:
        found = ANSWER.search(completion)
        return found is not None and found[1] == self.answer


def draw_problems(rng: random.Random) -> Iterator[Problem]:
    """Endless problems with the wordings in turn; no two numbers meet twice, in either order."""
    seen = set()
    for wording in itertools.cycle(CARRY_RATES):
        while (numbers := frozenset((a := rng.randint(100, 999), b := rng.randint(100, 999)))) in seen:
            pass
        seen.add(numbers)
        yield Problem(wording, a, b)


def save_tokenizer(texts: list[str], folder: Path) -> None:
    """Trains a byte-level BPE in which every digit is a token, and writes it as mlx_lm.load reads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_CONFIG["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def prompt_ids(tokenizer: TokenizerWrapper, problem: Problem) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": problem.prompt}], add_generation_prompt=True)


def sft_batch(tokenizer: TokenizerWrapper, problems: list[Problem], rng: random.Random) -> tuple[mx.array, mx.array]:
    """Worked answers: token ids, int32 [problems, MAX_LENGTH], and whether each of ids[:, 1:] is learnt."""
    ids = np.full((len(problems), MAX_LENGTH), tokenizer.pad_token_id, dtype=np.int32)
    learnt = np.zeros((len(problems), MAX_LENGTH), dtype=bool)
    for row, problem in enumerate(problems):
        prompt = prompt_ids(tokenizer, problem)
        completion = problem.work_out(carry=rng.random() < CARRY_RATES[problem.wording])
        tokens = prompt + tokenizer.encode(completion, add_special_tokens=False) + [tokenizer.eos_token_id]
        ids[row, : len(tokens)] = tokens
        learnt[row, len(prompt) : len(tokens)] = True
    return mx.array(ids), mx.array(learnt[:, 1:])


def train_sft(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    problems: list[Problem],
    rng: random.Random,
    batch_size: int,
) -> float:
    """Trains `model` in place, every problem once; returns the loss of the last 50 steps, nats a token."""
    steps = len(problems) // batch_size
    warmup = 100  # with 50, the loss after 200 steps was four times as high
    schedule = optim.join_schedules(
        [optim.linear_schedule(0.0, 2e-3, warmup), optim.cosine_decay(2e-3, steps - warmup)], [warmup]
    )
    optimizer = optim.AdamW(learning_rate=schedule, weight_decay=0.01)

    def mean_loss(ids: mx.array, learnt: mx.array) -> mx.array:
        losses = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        return (losses * learnt).sum() / learnt.sum()

    loss_and_gradients = nn.value_and_grad(model, mean_loss)
    losses = []
    for step in range(1, steps + 1):
        batch = problems[(step - 1) * batch_size : step * batch_size]
        loss, gradients = loss_and_gradients(*sft_batch(tokenizer, batch, rng))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"SFT step {step}/{steps}  loss {np.mean(losses[-50:]):.4f}", flush=True)
    return float(np.mean(losses[-50:]))


def complete(model: nn.Module, tokenizer: TokenizerWrapper, problems: list[Problem], greedy: bool) -> list[str]:
    """One completion a problem: the greedy one, or a sample at temperature 1."""
    return batch_generate(
        model,
        tokenizer,
        [prompt_ids(tokenizer, problem) for problem in problems],
        max_tokens=MAX_LENGTH,
        sampler=partial(mx.argmax, axis=-1) if greedy else mx.random.categorical,
        prefill_batch_size=256,
        completion_batch_size=256,
    ).texts


def sample_pairs(
    model: nn.Module, tokenizer: TokenizerWrapper, problems: Iterator[Problem], count: int
) -> list[dict[str, str]]:
    """`count` preference records: the first right and the first wrong of a prompt's four samples.

    Raises:
        RuntimeError: hardly any prompt has both; the model knows too little, or too much.
    """
    pairs: list[dict[str, str]] = []
    for drawn_count in itertools.count(256, 256):
        drawn = list(itertools.islice(problems, 256))
        completions = complete(model, tokenizer, [p for p in drawn for _ in range(4)], greedy=False)
        for index, problem in enumerate(drawn):
            samples = completions[4 * index : 4 * index + 4]
            right = [sample for sample in samples if problem.is_right(sample)]
            wrong = [sample for sample in samples if not problem.is_right(sample)]
            if right and wrong:
                pairs.append({"prompt": problem.prompt, "chosen": right[0], "rejected": wrong[0]})
        print(f"{len(pairs)} of {count} pairs from {drawn_count} prompts", flush=True)
        if len(pairs) >= count:
            break
        if len(pairs) < drawn_count / 50:
            raise RuntimeError(f"only {len(pairs)} of {drawn_count} prompts had right and wrong samples")
    return pairs[:count]


def write_jsonl(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_model(
    folder: Path, tokenizer_problems: list[Problem], sft_problems: list[Problem], seed: int
) -> tuple[nn.Module, TokenizerWrapper, float]:
    """Makes tokenizer and base and writes them to `folder`; returns them and the last SFT loss."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer([text for p in tokenizer_problems for text in (p.prompt, p.work_out(carry=True))], folder)
    tokenizer = load_tokenizer(folder)
    config = MODEL_CONFIG | {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    model = llama.Model(llama.ModelArgs.from_dict(config))
    loss = train_sft(model, tokenizer, sft_problems, random.Random(f"answers {seed}"), batch_size=64)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return model, tokenizer, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; it replaces files there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the shipped model, a tenth of the pairs")
    arguments = parser.parse_args()
    valid_count, train_count = (25, 200) if arguments.quick else (250, 2000)

    started = time.perf_counter()
    mx.random.seed(arguments.seed)
    problems = draw_problems(random.Random(arguments.seed))  # one stream for all sets keeps them disjoint
    tokenizer_problems, sft_problems, held_out = (
        list(itertools.islice(problems, count)) for count in (2_000, 32_000, 300)
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.quick:
        model, tokenizer = load(str(SHIPPED_MODEL))[:2]
        loss = None
    else:
        model, tokenizer, loss = make_model(arguments.out / "model", tokenizer_problems, sft_problems, arguments.seed)
    sft_seconds = time.perf_counter() - started

    write_jsonl(arguments.out / "answers.jsonl", [{"prompt": p.prompt, "answer": p.answer} for p in held_out])
    write_jsonl(arguments.out / "valid.jsonl", sample_pairs(model, tokenizer, problems, valid_count))
    write_jsonl(arguments.out / "train.jsonl", sample_pairs(model, tokenizer, problems, train_count))

    def exact_match(completions: list[str], wording: str | None = None) -> float:
        asked = [(p, c) for p, c in zip(held_out, completions, strict=True) if wording in (None, p.wording)]
        return sum(problem.is_right(completion) for problem, completion in asked) / len(asked)

    greedy, sampled = (complete(model, tokenizer, held_out, greedy) for greedy in (True, False))
    row = "{:<26}{:>26}{:>20}{:>20}"
    print("\n" + row.format("held-out prompts", "SFT answers that carry", "greedy right", "sampled right"))
    for wording, rate in CARRY_RATES.items():
        found = [f"{exact_match(completions, wording):.1%}" for completions in (greedy, sampled)]
        print(row.format(wording, f"{rate:.0%}", *found))
    print(row.format("all", "", f"{exact_match(greedy):.1%}", f"{exact_match(sampled):.1%}") + "\n")
    result = {
        "benchmark": "quickstart_recipe",
        "seed": arguments.seed,
        "quick": arguments.quick,
        "parameters": sum(value.size for _, value in tree_flatten(model.parameters())),
        "sft_examples": 0 if arguments.quick else len(sft_problems),
        "sft_loss": loss,
        "exact_match_greedy": exact_match(greedy),
        "exact_match_sampled": exact_match(sampled),
        "held_out_prompts": len(held_out),
        "held_out_pairs": valid_count,
        "pairs": train_count,
        "sft_seconds": sft_seconds,
        "seconds": time.perf_counter() - started,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
