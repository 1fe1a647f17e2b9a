"""Trains on real data from scratch: SFT on GSM8K, DPO on GSM8K's and PandaLM's preference pairs.

    python benchmarks/real_data.py --data ../shared/data        a few minutes on two cores
    python benchmarks/real_data.py --data ../shared/data --quick

A byte-pair tokenizer is trained on the data, and a small random Llama learns from it: not to answer well, which takes a
large model, but to show that real rows go through every stage, that none is dropped unsaid, and that the loss falls. The
folder holds gsm8k/train.jsonl (`question`, `answer`), gsm8k/prefs.jsonl and pandalm/prefs.jsonl (`prompt`, `chosen`,
`rejected`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

import train  # noqa: E402
from lib.system.records import read_records  # noqa: E402
from tests import tiny  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="40 steps each")
    options = parser.parse_args()
    steps = 40 if options.quick else options.steps
    trials = {
        "SFT, GSM8K": (
            options.data / "gsm8k/train.jsonl",
            [
                "train.loss=sft",
                "data.prompt=question",
                "data.completion=answer",
                "train.learning_rate=2e-3",
                "model.method=full",
            ],
        ),
        "DPO, GSM8K pairs": (options.data / "gsm8k/prefs.jsonl", ["train.learning_rate=1e-3"]),
        "DPO, PandaLM pairs": (options.data / "pandalm/prefs.jsonl", ["train.learning_rate=1e-3"]),
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", [path for path, _ in trials.values()])
        for title, (path, words) in trials.items():
            run = title.replace(", ", "-").replace(" ", "-")
            common = [
                f"model.path={model}",
                "model.random_init=true",
                f"data.train={path}",
                "data.max_length=512",
                f"run.dir={folder}/runs",
                f"run.name={run}",
            ]
            common += [
                f"train.steps={steps}",
                "train.global_batch_size=16",
                f"train.seed={options.seed}",
                "evaluate.samples=0",
                "run.log_every=50",
            ]
            if train.main([*common, *words, "--config", str(tiny.config_file(folder))]) != 0:
                sys.exit(f"{title} failed")
            rows.append({"trial": title, **measure(folder / "runs" / run, path)})
    table = Table(title=f"{steps} steps of 16 rows")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    print(json.dumps({"rows": rows}))


def make_model(folder: Path, files: list[Path]) -> Path:
    """A Llama of 2 million parameters by its configuration, and a tokenizer of 4,096 tokens trained on the files' text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = (
        str(value) for file in files for line in file.open(encoding="utf-8") for value in json.loads(line).values()
    )
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tiny.model_folder(
        folder,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        vocab_size=4096,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    return folder


def measure(run: Path, path: Path) -> dict[str, Any]:
    """First and last loss (means of a tenth of the steps), and the rows that were read, trained and padded."""
    records = list(read_records(run / "logs" / "rank-000.jsonl"))
    steps = [record for record in records if record["kind"] == "step"]
    tenth = max(1, len(steps) // 10)
    in_file = sum(1 for line in path.open(encoding="utf-8") if line.strip())
    trained = {row for record in steps for row in record["rows"]}
    mean = lambda part, key: sum(record[key] for record in part) / len(part)  # noqa: E731
    return {
        "rows in file": in_file,
        "rows trained": len(trained),
        "first loss": mean(steps[:tenth], "loss"),
        "last loss": mean(steps[-tenth:], "loss"),
        "last accuracy": mean(steps[-tenth:], "reward_accuracy") if steps[0]["reward_accuracy"] is not None else None,
        "padding": 1 - sum(r["tokens"] for r in steps) / sum(r["padded_tokens"] for r in steps),
        "pairs/s": sum(r["pairs"] for r in steps) / sum(r["step_seconds"] for r in steps),
        "traces": steps[-1]["traces"],
    }


if __name__ == "__main__":
    main()
