"""Tasks of lm-evaluation-harness (package `lm_eval`), by a run's model on all ranks.

Every rank runs the harness, with the same seeds and so with the same requests, and takes chunks of them from the work
queue. What a chunk comes to depends on the chunk alone, not on the rank that does it. mlx-lm's own class divides
equally among ranks, and has neither windows of long texts nor a task's sampling options.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.config.settings import ModelSettings
from lib.data.batch import collate
from lib.data.chat import ChatTemplate, template_of
from lib.data.dataset import Example
from lib.data.encode import Encoder
from lib.data.record_formats import Unusable
from lib.data.tokenizer import TextTokens, stored_config
from lib.distributed.work_queue import Lines
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate.sampler import GreedySampling, Prompt, Sampler, in_batches
from lib.evaluate.score_file import FileJob, StoredModel, is_on_rank_0, key_of, pull
from lib.model import load
from lib.model.entropies import greedy_logps
from lib.model.token_stream import arrays_of
from lib.system import files
from lib.system.model_folder import context_tokens
from lib.system.terminal import Terminal
from lib.training import reference_model
from lib.training.run_inputs import vocabulary

PACKAGE = "lm_eval"
GENERATED = 256  # most tokens of an answer, where a task does not say
LONGEST = 2048  # tokens, where a model does not say how many it can see
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # what tasks call it


class HarnessModel:
    """The methods of lm_eval.api.model.LM, which it is mixed into where that package is installed: log-probabilities of
    continuations, and answers, by all ranks. folder: where rank 0 keeps what is finished. digest: of the model, so that
    what is finished is taken up by the same one only."""

    def __init__(self, loaded: nn.Module, subject: StoredModel, world: World, folder: Path, digest: str):
        super().__init__()
        settings, self.model, self.world, self.folder, self.digest = subject.settings, loaded, world, folder, digest
        self.settings, self.name, self.tokenizer = settings, subject.name, subject.tokenizer()
        self.multiple, self.shares_prompts, _ = reference_model.layout(loaded, settings.data, world.alone())
        self.longest, self.limits = longest_input(settings.model), vocabulary(settings.model)
        self.encoder = Encoder(self.tokenizer, settings.data, self.limits.eos_token_id)
        self.template, self.inner = self.encoder.template, TextTokens(self.tokenizer).inner
        bos = self.inner.bos_token_id
        self.start_id: int = self.inner.eos_token_id if bos is None else bos
        self.start_text = str(self.inner.decode([self.start_id]))

    @property
    def tokenizer_name(self) -> str:
        """What requests are kept by."""
        return self.name

    # ---- All ranks: results of items, by the work queue

    def ask(self, kind: str, items: Sequence[Any]) -> list[Any]:
        """One result for each item, on every rank. kind: score or write."""
        if not items:
            return []
        key = key_of(kind, items, self.digest)
        path = self.folder / f"{kind}-{key[:16]}.jsonl"
        if not is_on_rank_0(path, self.world):
            job = FileJob(kind, key, len(items), path, self.settings.evaluate.batch_size)
            do = self.score if kind == "score" else self.write
            pull(job, self.world, lambda rows: do([items[row] for row in rows]))
        text = self.world.broadcast_text(path.read_text(encoding="utf-8") if self.world.rank == 0 else "")
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def score(self, items: Sequence[Sequence[Any]]) -> Lines:
        """For each context a line: [log-probability, whether greedy decoding writes it] of every continuation."""
        ids = [[np.array(piece, np.int32) for piece in (context, *others)] for context, others in items]
        examples = [Example.of(row, pieces) for row, pieces in enumerate(ids)]
        results: dict[int, list[tuple[float, bool]]] = {}
        mx.eval(self.model.state)
        for count in {len(pieces) for pieces in ids}:  # a batch has as many continuations in each row
            same = [example for example in examples if len(example.completions) == count - 1]
            lengths = [len(e.prompt_ids) + max(map(len, e.completions)) for e in same]
            scored = in_batches(lengths, self.settings.evaluate.batch_size, partial(self._scored, same))
            results |= zip([example.row for example in same], scored, strict=True)
        return [json.dumps(results[row]) for row in range(len(items))]

    def _scored(self, examples: Sequence[Example], rows: Sequence[int]) -> list[list[tuple[float, bool]]]:
        batch = collate([examples[row] for row in rows], self.multiple, self.shares_prompts)
        logps, are_greedy = (figures.tolist() for figures in greedy_logps(self.model, arrays_of(batch.inputs)))
        return [list(zip(*of_row, strict=True)) for of_row in zip(logps, are_greedy, strict=True)]

    def write(self, items: Sequence[Sequence[Any]]) -> Lines:
        """For each (context, stop texts, most tokens, temperature) its answer, up to the first of its stop texts."""
        seed = (self.settings.train.seed, int(key_of(items)[:8], 16))
        texts: dict[int, str] = {}
        for (until, most, temperature), rows in itertools.groupby(range(len(items)), lambda i: items[i][1:]):
            sampling = GreedySampling(most, 1, temperature, stop=tuple(filter(None, until)))
            prompts = [Prompt(i, items[i][0]) for i in rows]
            samples = Sampler(self.model, self.tokenizer, sampling).sample(prompts, seed)
            texts |= {sample.prompt_id: sample.text for sample in samples}
        return [json.dumps(texts[i], ensure_ascii=False) for i in range(len(items))]

    # ---- What the harness asks

    def loglikelihood(self, requests: Sequence[Any], **_: object) -> list[tuple[float, bool]]:
        """Log-probability of each (context, continuation), and whether greedy decoding would write it."""
        return self._scores([self.encode_pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: object) -> list[float]:
        """Log-probability of each whole text, a long one in windows of all that the model can see."""
        windows = [rolling_windows(self.encode(request.args[0]), self.start_id, self.longest) for request in requests]
        scores = iter(self._scores([window for of_text in windows for window in of_text]))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Of (context, continuation) in token ids. Each context is asked once, the longest first. The beginning of a
        context that is too long is left out: the last token is predicted and not seen."""
        cut, contexts = [], dict[tuple[int, ...], list[tuple[int, ...]]]()
        for context, continuation in pairs:
            if (room := self.longest + 1 - len(continuation)) <= 0:
                raise UserError(f"a continuation of {len(continuation):,} tokens: the model sees {self.longest:,}")
            cut.append((tuple(context[-room:]), tuple(continuation)))
        for seen, predicted in dict.fromkeys(cut):
            if predicted:
                contexts.setdefault(seen, []).append(predicted)
        items = sorted(contexts.items(), key=lambda item: -len(item[0]) - max(map(len, item[1])))
        scores = {
            (seen, predicted): (float(logp), bool(is_greedy))
            for (seen, continuations), scored in zip(items, self.ask("score", items), strict=True)
            for predicted, (logp, is_greedy) in zip(continuations, scored, strict=True)
        }
        return [scores.get(pair, (0.0, True)) for pair in cut]  # of no token at all

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a text and of what follows it: where tokens begin is decided by both together. Spaces at the context's
        end belong to the continuation, as tokenizers have it. After no context the text opens with the model's first
        token."""
        if not context:
            ids = self.encode(continuation, opens=False)
            return ([self.start_id], ids) if ids[:1] != [self.start_id] else (ids[:1], ids[1:])
        whole, length = self.encode(context + continuation), len(self.encode(context.rstrip()))
        return (whole[:length], whole[length:]) if length else ([self.start_id], whole)

    def encode(self, text: str, opens: bool | None = None) -> list[int]:
        """Token ids. opens: with the tokenizer's opening tokens; by default unless the text has them already."""
        if opens is None and self.start_text and text.startswith(self.start_text):
            opens = False
        ids = list(self.inner.encode(text, **({} if opens is None else {"add_special_tokens": opens})))
        try:
            self.limits.check_ids([ids])
        except Unusable as why:
            raise UserError(f"{self.name}: a task's text {text[:60]!r}: {why}") from None
        return ids

    def generate_until(self, requests: Sequence[Any], **_: object) -> list[str]:
        """What the model writes after each context, up to the first stop text."""
        items = [self._generated(*request.args) for request in requests]
        order = sorted(range(len(items)), key=lambda i: -len(items[i][0]))
        texts = dict(zip(order, self.ask("write", [items[index] for index in order]), strict=True))
        return [texts[i] for i in range(len(items))]

    def _generated(self, context: str, options: dict[str, Any]) -> tuple[list[int], list[str], int, float]:
        """An item of `write`; temperature 0 is greedy."""
        most = int(next((options[name] for name in LIMITS if options.get(name) is not None), GENERATED))
        until, draws = options.get("until") or [], options.get("do_sample")
        temperature = float(options.get("temperature") or bool(draws))  # 1 by default, as transformers has it
        if (room := self.longest - most) <= 0:
            raise UserError(f"a task wants {most} tokens of a model that sees {self.longest}; set max_gen_toks")
        ids, stops = self.encode(context)[-room:] or [self.start_id], [until] if isinstance(until, str) else [*until]
        return ids, stops, most, 0.0 if draws is False else temperature

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, as training rendered it (data.chat_template)."""
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        options["continue_final_message"] = not add_generation_prompt
        options |= self.template.arguments_without_answer
        if (stored := template_of(self.settings.data)) is not None:
            options["chat_template"] = stored
        try:
            return str(self.inner.apply_chat_template(chat_history, tokenize=False, **options))
        except Exception as error:  # whatever the template's author chose
            raise UserError(f"--chat: the chat template refuses a task's conversation: {error}") from error

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's text, which the harness keeps with its results."""
        return self.template.text


def longest_input(model: ModelSettings) -> int:
    """How many tokens the model can see at once, by its config.json and its table of positions."""
    limits = context_tokens(stored_config(model)), load.table_sizes(model).positions
    return min((tokens for tokens in limits if tokens is not None), default=LONGEST)


def rolling_windows(ids: list[int], start_id: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """A text as (context, continuation) pairs that predict each token once, with all the context that fits."""
    windows = []
    for begin in range(0, len(ids), longest):
        end = min(begin + longest, len(ids))
        windows.append((ids[end - longest - 1 : begin] if begin else [start_id], ids[begin:end]))
    return windows


def evaluate_tasks(subject: StoredModel, options: argparse.Namespace, world: World, say: Terminal) -> None:
    """--tasks: what the harness finds of a model, as lm_eval.simple_evaluate returns it, in the file --out. What is
    finished is kept beside it until then."""
    names = re.findall(r"[^,\s]+", options.tasks)
    out = Path(options.out or options.home / f"tasks-{'-'.join(names).replace('/', '-')}.json")
    partial_results = out.with_name(f"{out.name}.partial")
    with world.agreeing("reading the model"):
        if options.tasks_folder is not None and not Path(options.tasks_folder).is_dir():
            raise UserError(f"--tasks-folder {options.tasks_folder}: no such folder")
        files.require_absent(out)
        if importlib.util.find_spec(PACKAGE) is None:
            install = f".venv/bin/python -m pip install -c constraints.txt {PACKAGE}"
            raise UserError(f"--tasks needs the package {PACKAGE}; run {install}")
        if options.chat and not ChatTemplate(subject.tokenizer(), subject.settings.data).is_used:
            path = subject.settings.model.path
            raise UserError(f"--chat: {path} has no chat template; give data.chat_template=FILE")
        digest = subject.digest()
    world.require_equal("model or settings", digest)
    results = _run_harness((subject.load(world).model, subject, world, partial_results, digest), names, options)
    with world.agreeing(f"writing {out}"):
        if world.rank == 0:
            files.write_atomically(out, json.dumps(results, indent=2, default=str) + "\n")
            shutil.rmtree(partial_results, ignore_errors=True)
    metrics = {
        task: {name: value for name, value in of_task.items() if isinstance(value, int | float)}
        for task, of_task in results["results"].items()
    }
    rows = [(task, name, f"{value:.4f}") for task, values in metrics.items() for name, value in values.items()]
    say.table(f"{subject.name} on tasks of lm-evaluation-harness", ["task", "metric", "value"], rows, 2)
    say.line(f"{out}: all results")
    say.record({"run": subject.name, "tasks": metrics})


def _run_harness(parts: tuple[Any, ...], names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """What lm_eval finds of the tasks. parts: of HarnessModel."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    model: Any = type("Adapter", (HarnessModel, LM), {})(*parts)  # the harness takes what is an LM of its own
    with model.world.agreeing("loading the tasks"):
        manager = TaskManager(include_path=options.tasks_folder)
        if unknown := [task for task in names if not manager.match_tasks([task])]:
            place = options.tasks_folder or f"{PACKAGE}; --tasks-folder DIR adds your own"
            raise UserError(f"--tasks {','.join(unknown)}: no such task in {place}")
        try:
            manager.load(names)
        except Exception as error:  # whatever a task's file or its data are wrong with
            last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise UserError(f"--tasks {','.join(names)}: cannot be loaded: {last}") from error
    if options.chat:
        model.encoder.stop_generation()  # other texts end where the harness says
    arguments = {"num_fewshot": options.shots, "limit": options.limit, "apply_chat_template": options.chat}
    with model.world.agreeing("the tasks"):
        results: dict[str, Any] = simple_evaluate(
            model=model, tasks=names, log_samples=False, task_manager=manager, **arguments
        )
    return results
