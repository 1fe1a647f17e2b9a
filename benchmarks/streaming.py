"""A million preference rows, 800 MB: made, indexed, read in shuffled order, trained, killed and gone on with.

    python benchmarks/streaming.py [--quick] [--rows N] [--seed S] [--folder DIR]

What it measures: the index (once); from an index to the first batch; memory above the model's, over that and 200 further
batches; records read in shuffled order, from the text and from the kept tokens; and a run of three unequal ranks that is
killed (SIGKILL to all) and gone on with by two, whose rows have to be those of the seeded order, each once.

Measured on two cores that others used, too; a million rows, 899 MB, four minutes in all:

    index    21.7 s: every record parsed, checked and hashed; no memory
    read     opened after 1.0 s, first batch of 64 after 1.3 s; 170 MB above the model's (111 MB without pages of files)
             129,000 records/s of text, 197,000 rows/s of kept tokens, 3,050 rows/s tokenised anew (one core)
             estimated lengths are 1.001 of the real ones; where the step is compiled, choosing its shapes makes the first
             batch 3.9 s: 15 shapes in 200 batches of 64, 4 % padding
    resume   killed after step 12 of three ranks of 40 + 16 + 8, gone on from step 10 by two of 44 + 20: every row as ordered
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib import environment

environment.enter()

import numpy as np

BATCH = 64


def write_rows(path: Path, rows: int, seed: int) -> None:
    """Preference records of about 800 bytes, of ragged lengths, no two the same."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwyp"))
    words = ["".join(rng.choice(letters, n)) for n in rng.integers(2, 9, 3000)]
    phrases = [" ".join(words[i] for i in rng.integers(0, 3000, n)) for n in rng.integers(4, 90, 40_000)]
    with path.open("w") as file:
        for start in range(0, rows, 10_000):
            picks = rng.integers(0, len(phrases), (min(10_000, rows - start), 3)).tolist()
            file.writelines(
                json.dumps(
                    {"prompt": f"{start + i}: {phrases[p]}?", "chosen": phrases[c] + ".", "rejected": phrases[r] + "!"}
                )
                + "\n"
                for i, (p, c, r) in enumerate(picks)
            )


def write_model(folder: Path, text: Path) -> None:
    """A tiny Llama, to be drawn from the seed, and a byte-level tokenizer trained on the data's first lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with text.open() as file:
        lines = [value for _ in range(2000) for value in json.loads(next(file)).values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 4096}
    config |= {"tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))


def memory_bytes() -> tuple[int, int]:
    """Of this process: resident in all, and without pages of files."""
    pages = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(pages["VmRSS"].split()[0]) * 1024, int(pages["RssAnon"].split()[0]) * 1024


class Peak:
    """The most memory seen, sampled on a thread while work goes on."""

    def __init__(self) -> None:
        import threading

        self.start, self.most = memory_bytes(), memory_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.most = tuple(map(max, self.most, memory_bytes()))  # type: ignore[assignment]

    def stop(self) -> dict[str, float]:
        self._done.set()
        self._thread.join()
        above = [(most - start) / 1e6 for most, start in zip(self.most, self.start, strict=True)]
        return {"memory_mb": above[0], "own_memory_mb": above[1]}


def words_of(folder: Path) -> list[str]:
    """Settings that all parts have in common."""
    words = [f"model.path={folder}/model", "model.random_init=true", f"data.train={folder}/rows.jsonl"]
    words += ["data.max_length=512", f"data.cache_dir={folder}/cache", f"run.dir={folder}/runs"]
    return [*words, f"train.global_batch_size={BATCH}", "train.steps=40", "model.rank=2"]


def index(folder: Path) -> dict[str, float]:
    """Makes the index."""
    from lib.config import load
    from lib.data.sources import open_records

    settings = load.load(None, words_of(folder)).data
    peak, began = Peak(), time.perf_counter()
    found = open_records([folder / "rows.jsonl"], settings, "preference")
    return {"seconds": time.perf_counter() - began, "rows": len(found), **peak.stop()}


def read(folder: Path, batches: int) -> dict[str, Any]:
    """From an index to the first batch; and what reading in shuffled order comes to."""
    from lib.config import load
    from lib.system import mpi_and_blas

    mpi_and_blas.prepare()
    import mlx.core as mx

    from lib.data import tokenizer as tokenizer_module
    from lib.data.batch import MicroBatches
    from lib.data.order import epoch_order
    from lib.data.streaming import StreamedDataset, open_training
    from lib.model import load as load_module

    settings = load.load(None, words_of(folder))
    model = load_module.load(settings.model, 0)
    tokenizer = tokenizer_module.load_tokenizer_of(settings.model)
    tokenizer.encode("some text")
    mx.eval(model.parameters())
    peak, began = Peak(), time.perf_counter()
    data = open_training(
        settings.data, "preference", tokenizer, tell=print, **tokenizer_module.vocabulary(settings.model)
    )
    assert isinstance(data, StreamedDataset)
    opened = time.perf_counter() - began
    order = epoch_order(data.lengths, 0, 0, BATCH, settings.data.length_window)
    make = MicroBatches(data, None, settings, 16, shared_prompts=True, is_compiled=False)
    make.of(np.split(order[:BATCH], 8), 8)
    result = {"opened_seconds": opened, "first_batch_seconds": time.perf_counter() - began}
    for start in range(BATCH, (1 + batches) * BATCH, BATCH):
        make.of(np.split(order[start : start + BATCH], 8), 8)
    count = batches * BATCH
    seen, tokens = data.lengths[order[: BATCH + count]], 0
    for row in order[: BATCH + count].tolist():
        tokens += int(len(data[row].prompt_ids) + max(map(len, data[row].completions)) - 1)
    result |= peak.stop()
    result["estimated_over_real_tokens"] = float(seen.sum() / tokens)
    shuffled = np.random.default_rng(0).permutation(len(data))[: 4 * count]
    began = time.perf_counter()
    for number in shuffled.tolist():
        data.records[number]
    result["records_per_second"] = len(shuffled) / (time.perf_counter() - began)
    rows = order[: BATCH + count].reshape(-1, BATCH)
    began = time.perf_counter()
    for batch in rows.tolist():
        data.examples(batch)
    result["kept_rows_per_second"] = rows.size / (time.perf_counter() - began)
    unread = order[BATCH + count : 2 * (BATCH + count)].reshape(-1, BATCH)
    began = time.perf_counter()
    for batch in unread.tolist():
        data.examples(batch)
    result["tokenised_rows_per_second"] = unread.size / (time.perf_counter() - began)
    return result


def kill_and_resume(folder: Path) -> dict[str, Any]:
    """Three unequal ranks, killed; two others go on. The rows of every step against the seeded order."""
    from lib.config import load
    from lib.system import mpi_and_blas

    mpi_and_blas.prepare()
    from lib.data import tokenizer as tokenizer_module
    from lib.data.order import epoch_order
    from lib.data.streaming import open_training
    from lib.system.records import read_records

    mpirun = [str(mpi_and_blas.mpirun_path()), "-n"]
    words = [*words_of(folder), "run.name=killed", "checkpoint.every=5"]
    (folder / "run.yaml").write_text("model: {path: overruled}\ndata: {train: overruled}\n")
    script = [sys.executable, str(ROOT / "train.py")]
    first = subprocess.Popen(
        [*mpirun, "3", *script, "--config", str(folder / "run.yaml"), *words, "plan.shares=[40,16,8]"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    run = folder / "runs" / "killed"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and first.poll() is None:
        log = run / "logs" / "rank-000.jsonl"
        if log.exists() and sum('"step"' in line for line in log.read_text().splitlines()) > 12:
            break
        time.sleep(0.05)
    children = subprocess.run(["ps", "-o", "pid=", "-g", str(first.pid)], capture_output=True, text=True).stdout
    for pid in [*map(int, children.split())]:
        os.kill(pid, signal.SIGKILL)
    first.wait()
    subprocess.run([*mpirun, "2", *script, "--resume", str(run), "plan.shares=[44,20]"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    by_step: dict[int, list[int]] = {}
    for log in sorted((run / "logs").glob("rank-*.jsonl")):
        for record in read_records(log):
            if record["kind"] == "step":
                by_step.setdefault(record["step"], []).extend(record["rows"])
    settings = load.load(run / "config.yaml")
    tokenizer = tokenizer_module.load_tokenizer_of(settings.model)
    data = open_training(
        settings.data, "preference", tokenizer, tell=print, **tokenizer_module.vocabulary(settings.model)
    )
    order = epoch_order(data.lengths, settings.train.seed, 0, BATCH, settings.data.length_window)
    expected = {step: sorted(order[(step - 1) * BATCH : step * BATCH].tolist()) for step in range(1, 41)}
    start = [r for r in read_records(run / "logs" / "rank-000.jsonl") if r["kind"] == "start"]
    return {
        "resumed_from_step": start[-1]["resumed_from_step"],
        "steps": len(by_step),
        "rows_exact": {step: sorted(rows) for step, rows in by_step.items()} == expected,
    }


def in_a_process(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part in a process of its own, so that nothing is warm and memory is its own."""
    command = [
        sys.executable,
        __file__,
        "--part",
        part,
        "--folder",
        str(options.folder),
        "--batches",
        str(options.batches),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="rows (a million; --quick: 100,000)")
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", type=int, default=200, help="batches after the first")
    parser.add_argument("--folder", type=Path, help="where to work; rows.jsonl and its index there are taken again")
    parser.add_argument("--part", choices=["index", "read", "resume"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        parts: dict[str, Any] = {
            "index": lambda: index(options.folder),
            "read": lambda: read(options.folder, options.batches),
            "resume": lambda: kill_and_resume(options.folder),
        }
        print(json.dumps(parts[options.part]()))
        return 0
    rows = options.rows or (100_000 if options.quick else 1_000_000)
    with tempfile.TemporaryDirectory() as own:
        options.folder = options.folder or Path(own)
        options.folder.mkdir(parents=True, exist_ok=True)
        path = options.folder / "rows.jsonl"
        if not path.exists():
            write_rows(path, rows, options.seed)
            write_model(options.folder / "model", path)
        results: dict[str, Any] = {"megabytes": path.stat().st_size / 1e6}
        for part in ("index", "read", "resume"):
            results[part] = in_a_process(part, options)
            print(f"{part:8}" + "  ".join(f"{name} {value:,.4g}" for name, value in results[part].items()))
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
