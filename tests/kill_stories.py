"""What is killed: training in every strategy, evaluation, exports, a download, a server."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import free_port
from tests.kills import LIFE_SECONDS, Life, Story, digests

from lib.system.records import read_records
from tests import served, tiny

HEADS = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 40}

# ---- Training

TRAINING: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, ["model.dropout=0.1"]),
    "one rank, full": (1, ["model.method=full", "checkpoint.keep=1", "train.optimizer=adamw_8bit"]),
    "synchronous": (2, ["strategy=synchronous", "plan.shares=[5,3]"]),
    "synchronous, int8": (2, ["strategy=synchronous", "plan.shares=[3,5]", "sync.compression=int8"]),
    "independent": (2, ["strategy=independent", "plan.shares=[5,3]", "independent.pairs_per_round=32"]),
    "independent, outer": (
        2,
        ["strategy=independent", "plan.shares=[4,4]", "independent.merge=outer", "independent.pairs_per_round=24"],
    ),
    "sharded": (2, ["strategy=sharded", "plan.shares=[3,1]"]),
    "pipelined": (2, ["strategy=pipelined", "plan.shares=[3,1]"]),
}
FIGURES = ("steps", "pairs", "tokens", "loss", "kl", "reward_margin", "reward_accuracy", "strategy", "world_size")


def training(base: Path, ranks: int, own: list[str]) -> Story:
    """A run of two epochs with checkpoints and evaluations; `base` has its model and data."""
    words = [
        *tiny.settings(base, rows=45),
        "train.steps=12",
        "checkpoint.every=2",
        "evaluate.every=5",
        "run.name=run",
        "plan.replan=false",
        *own,
    ]
    tiny.model_folder(base / "model", **HEADS)
    words += ["--config", str(tiny.config_file(base))]

    def command(folder: Path) -> list[str]:
        if (folder / "run" / "config.yaml").exists():
            return ["train.py", "--resume", str(folder / "run")]
        own = [f"run.dir={folder}", f"data.cache_dir={folder}/cache"]
        return ["train.py", *(word for word in words if not word.startswith("run.dir=")), *own]

    return Story(command, lambda folder: outcome_of_run(folder / "run"), ranks)


def rounds(base: Path, ranks: int, own: list[str]) -> Story:
    """A run of rounds, of which some are undone."""
    words = [*tiny.rounds(base), "run.name=run", *own, "--config", str(tiny.config_file(base))]

    def command(folder: Path) -> list[str]:
        if (folder / "run" / "config.yaml").exists():
            return ["train.py", "--resume", str(folder / "run")]
        own = [f"run.dir={folder}", f"data.cache_dir={folder}/cache"]
        return ["train.py", *(word for word in words if not word.startswith("run.dir=")), *own]

    def outcome(folder: Path) -> dict[str, object]:
        return outcome_of_run(folder / "run") | {"rounds": digests(folder / "run" / "rounds")}

    return Story(command, outcome, ranks)


ROUNDS: dict[str, tuple[int, list[str]]] = {
    "rounds": (1, []),
    "rounds, synchronous": (2, ["strategy=synchronous", "plan.shares=[3,1]"]),
    "rounds, independent": (2, ["strategy=independent", "plan.shares=[3,1]"]),
    "rounds, overlapping": (2, ["strategy=independent", "plan.shares=[3,1]", "rollouts.overlap=true"]),
    "rounds, grpo": (1, ["train.loss=grpo", "train.temperature=1.5"]),
    "rounds, overlap": (2, ["strategy=synchronous", "plan.shares=[3,1]", "rollouts.overlap=true"]),
}


def outcome_of_run(run: Path) -> dict[str, object]:
    """What a run is: its weights, what every rank trained and measured, and that nothing unfinished lies about.

    What was measured at a checkpoint may be measured again after it: with the same result.
    """
    summary = json.loads((run / "summary.json").read_text())
    logs = sorted((run / "logs").glob("rank-*.jsonl"))
    records = {log.name: list(read_records(log)) for log in logs}
    steps = ("step", "loss", "rows", "grad_norm", "tokens")
    return {
        "weights": {name: digest for name, digest in digests(run).items() if name.endswith("adapters.safetensors")},
        "figures": {name: summary.get(name) for name in FIGURES},
        "steps": {
            name: [[record.get(key) for key in steps] for record in each if record["kind"] == "step"]
            for name, each in records.items()
        },
        "evaluations": {
            name: sorted({(record["step"], record.get("loss")) for record in each if record["kind"] == "evaluation"})
            for name, each in records.items()
        },
        "unfinished": sorted(str(path.relative_to(run)) for path in run.rglob("*unfinished*")),
        "checkpoints": sorted(path.name for path in (run / "checkpoints").glob("step-*")),
    }


# ---- Commands that write one file or folder


def of_output(out: str, words: Callable[[Path], list[str]], **own: Any) -> Story:
    """A command that writes `out` in its folder, and refuses to where that is there and nothing else: then it is done."""

    def command(folder: Path) -> list[str] | None:
        is_done = (folder / out).exists() and not any(path.name.startswith(f"{out}.") for path in folder.iterdir())
        return None if is_done else words(folder)

    def outcome(folder: Path) -> dict[str, object]:
        left = sorted(path.name for path in folder.iterdir() if path.name not in (out, "cache"))
        target = folder / out
        return {"left": left, "digests": digests(target) if target.is_dir() else digests(folder).get(out)}

    return Story(command, outcome, **own)


def commands(base: Path, run: Path) -> dict[str, Story]:
    """Stories of a finished run of the quickstart's model. base: gets what they read."""
    quickstart = tiny.ROOT / "configs" / "quickstart"
    pairs = quickstart.joinpath("valid.jsonl").read_text().splitlines()[:24]
    (base / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
    questions = quickstart.joinpath("answers.jsonl").read_text().splitlines()[:24]
    (base / "questions.jsonl").write_text("\n".join(questions) + "\n")
    few = ["evaluate.batch_size=2", "evaluate.max_tokens=6", "data.streaming=null"]

    def in_bulk(kind: str, *words: str, ranks: int = 1) -> Story:
        return of_output(
            "out.jsonl",
            lambda folder: [
                *("lib.evaluate", "--run", str(run), *words, *few),
                *(f"data.cache_dir={folder}/cache", kind, f"{folder}/out.jsonl"),
            ],
            ranks=ranks,
        )

    def export(form: str) -> Story:
        words = ["lib.export", str(run), "--to", form, "--rows", "2", f"data.valid={base}/pairs.jsonl"]
        return of_output("out", lambda folder: [*words, "--out", f"{folder}/out"])

    scores = ["--data", f"{base}/pairs.jsonl", "--score", "rewards"]
    made = ["--data", f"{base}/questions.jsonl", "evaluate.completions=4"]
    return {
        "scores": in_bulk("--out", *scores),
        "scores, two ranks": in_bulk("--out", *scores, ranks=2),
        "make pairs": in_bulk("--make-pairs", *made),
        "against": in_bulk("--out", *made[:2], "--against", "base", "evaluate.judge=number"),
        "export, fused": export("fused"),
        "export, gguf": export("gguf"),
        "export, mlx": export("mlx"),
    }


# ---- A download from a hub

SHARD_BYTES = 1500  # so small that there are many


def hub_files(count: int = 60) -> dict[str, bytes]:
    """The files of a data set of a hub, in three forms."""
    rows = [json.dumps(pair) + "\n" for pair in tiny.pairs(count)]
    return {f"data/train-{part}.jsonl": "".join(rows[part::3]).encode() for part in range(3)}


def download(base: Path, address: str) -> Story:
    """Training on a data set of the hub at an address, which keeps `ann/kills`."""
    words = [word for word in tiny.settings(base) if not word.startswith(("data.train=", "run.dir="))]
    words += ["data.train=hf://ann/kills", "train.steps=2", "run.name=run", "--config", str(tiny.config_file(base))]

    def command(folder: Path) -> list[str]:
        own = [f"data.cache_dir={folder}/cache", f"run.dir={folder}"]
        if (folder / "run" / "config.yaml").exists():
            return ["train.py", "--resume", str(folder / "run"), own[0]]
        return ["train.py", *words, *own]

    def outcome(folder: Path) -> dict[str, object]:
        [shards] = (path for path in (folder / "cache").glob("hub-*") if path.is_dir())  # beside its lock
        return {"shards": digests(shards), "run": outcome_of_run(folder / "run")}

    known = {"HF_ENDPOINT": address, "HF_HOME": str(base / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    no_proxy = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    constants = {"lib.data.hub.SHARD_BYTES": SHARD_BYTES}
    return Story(command, outcome, environment=known | no_proxy, constants=constants)


# ---- A server

ANSWERS = 2  # that a life gives before it is asked to end


def serving(run: Path) -> Story:
    """A server of a finished run: asked, given labels, ended; all lives in a folder have the same port."""

    def port_of(folder: Path) -> int:
        path = folder.with_name(f"{folder.name}.port")
        if not path.exists():
            path.write_text(str(free_port()))
        return int(path.read_text())

    def command(folder: Path) -> list[str]:
        if not (folder / "run").exists():
            shutil.copytree(run, folder / "run")  # by which its processes are known
        words = ["serve.feedback=" + str(folder / "feedback.jsonl"), f"serve.port={port_of(folder)}"]
        return ["lib.server", "--run", str(folder / "run"), *words]

    def drive(folder: Path, process: Life) -> None:
        """Asks, and labels the answer, until the process ends or has answered so often."""
        port, deadline, given = port_of(folder), time.monotonic() + LIFE_SECONDS, 0
        while process.poll() is None and time.monotonic() < deadline:
            try:
                answer = _post(
                    port, "/v1/chat/completions", {"model": "run", "messages": served.QUESTION, "temperature": 0}
                )
                _note(folder, "answers", answer["choices"][0]["message"]["content"])
                _note(folder, "asked", answer["id"])
                _post(port, "/v1/feedback", {"id": answer["id"], "label": True})
                _note(folder, "labelled", answer["id"])
                given += 1
            except (OSError, http.client.HTTPException, ValueError):
                time.sleep(0.05)  # it starts, or is gone
            if given == ANSWERS:
                with_signal = process.poll() is None
                if with_signal:
                    process.send_signal(signal.SIGTERM)
                return

    def fault(folder: Path) -> str | None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port_of(folder)))
            except OSError as error:
                return f"its port is not free: {error}"
        lines = (folder / "feedback.jsonl").read_text().splitlines() if (folder / "feedback.jsonl").exists() else []
        ids = [json.loads(line)["id"] for line in lines]
        lost = set(_noted(folder, "labelled")) - set(ids)
        if lost or len(set(ids)) < len(ids) or set(ids) - set(_noted(folder, "asked")):
            return f"feedback has {ids}, labelled were {_noted(folder, 'labelled')}"
        return None

    def outcome(folder: Path) -> object:
        left = [path.name for path in folder.rglob("*unfinished*")]
        return {"answers": sorted(set(_noted(folder, "answers"))), "left": left}

    return Story(command, outcome, drive=drive, fault=fault)


def _post(port: int, path: str, body: dict[str, Any]) -> Any:
    """The JSON of an answer; ValueError where its status is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"{path}: {answer.status} {content[:200]!r}")
    return json.loads(content)


def _note(folder: Path, name: str, text: str) -> None:
    """Keeps what a client saw, beside the folder."""
    with folder.with_name(f"{folder.name}.{name}").open("a") as file:
        file.write(json.dumps(text) + "\n")


def _noted(folder: Path, name: str) -> list[str]:
    path = folder.with_name(f"{folder.name}.{name}")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---- All of them


def stories(base: Path, hub: str) -> dict[str, Story]:
    """Every story by its name; what they read is made in `base`. hub: address of a stand-in that keeps `ann/kills`."""
    run = served.finished_run(base / "quickstart") if not (base / "quickstart").exists() else base / "quickstart/tiny"
    all_ = {name: training(base / "tiny", *of) for name, of in TRAINING.items()}
    all_ |= {name: rounds(base / "rounds", *of) for name, of in ROUNDS.items()}
    return all_ | commands(base, run) | {"download": download(base / "hub", hub), "serving": serving(run)}
