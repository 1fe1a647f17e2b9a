"""A run that can be served, its server in a process of its own, and load on it."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from tests.tiny import ROOT

QUESTION = [{"role": "user", "content": "Add 797 and 370."}]
NEVER_ENDS = {"4": -100.0}  # a logit bias that keeps the quickstart's model from saying that it is done


def model_for_long_answers(folder: Path) -> Path:
    """The quickstart's model, whose configuration allows long answers."""
    shutil.copytree(ROOT / "configs/quickstart/model", folder / "model", dirs_exist_ok=True)
    stored = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(stored | {"max_position_embeddings": 100_000}))
    return folder / "model"


def finished_run(folder: Path) -> Path:
    """A run of a few steps on the quickstart's model."""
    from tests import tiny

    model_for_long_answers(folder)
    lines = (ROOT / "configs/quickstart/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:8]))
    words = {
        "model.path": folder / "model",
        "data.train": folder / "train.jsonl",
        "data.valid": "null",
        "evaluate.answers": "null",
        "evaluate.samples": 0,
        "train.steps": 2,
        "train.global_batch_size": 4,
        "train.schedule": "constant",
        "train.learning_rate": 0.03,  # so much that the adapter is heard in the answers
        "run.dir": folder,
        "run.name": "tiny",
        "plan.calibration_dir": folder,
    }
    tiny.train(folder, ["--config", str(ROOT / "configs/quickstart.yaml"), *(f"{k}={v}" for k, v in words.items())])
    return folder / "tiny"


class Served:
    """`python -m lib.server` as a user starts it, and the records that it writes."""

    def __init__(self, *words: str | Path):
        command = [sys.executable, "-m", "lib.server", *map(str, words), "serve.port=0"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.records: list[dict[str, Any]] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.wait(lambda: self.records or self.process.poll() is not None)
        self.address = str(self.records[0]["address"]) if self.records else ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.records.append(json.loads(line))

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """The records of a kind, with these values."""
        return [record for record in list(self.records) if record["kind"] == kind and fields.items() <= record.items()]

    def until_up(self) -> Self:
        self.wait(lambda: self.of("up"))
        return self

    def wait(self, condition: Callable[[], Any], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.records[-10:]
            time.sleep(0.02)

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 120.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(seconds)
        self.reader.join(5)
        return status


@contextlib.contextmanager
def served(*words: str | Path) -> Iterator[Served]:
    """A server for as long as it is needed."""
    server = Served(*words)
    try:
        yield server.until_up()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def load(address: str, streams: int, requests: int, max_tokens: int = 40, key: str = "none") -> list[dict[str, Any]]:
    """What became of each of `requests` requests, `streams` at once: those of the real `openai` client, no retries."""
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=300)
    asked = {"model": "tiny", "messages": QUESTION, "max_tokens": max_tokens, "temperature": 0, "stream": True}

    def answer(number: int) -> dict[str, Any]:
        since, outcome = time.monotonic(), dict[str, Any]({"error": None})
        try:
            events = client.chat.completions.create(**asked, logit_bias=NEVER_ENDS)  # type: ignore[call-overload]
            if (reason := [event.choices[0].finish_reason for event in events][-1]) != "length":
                outcome["error"] = f"the answer broke off: {reason}"
        except openai.APIStatusError as error:
            outcome = {"error": error.message, "status": error.status_code}
            outcome["retry_after"] = error.response.headers.get("retry-after")
        except Exception as error:
            outcome["error"] = f"{type(error).__name__}: {error} ({error.__cause__!r})"
        return outcome | {"seconds": time.monotonic() - since}

    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(answer, range(requests)))
