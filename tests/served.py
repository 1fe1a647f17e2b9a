"""A run that can be served, its server in a process of its own, and load on it from another one.

    python -m tests.served --address http://127.0.0.1:8080 --key KEY --streams 200 --requests 400 --max-tokens 40

The load is the real `openai` client's, without retries; the last line tells every request's outcome as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

    def until_up(self) -> Served:
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


def load(address: str, *words: str) -> subprocess.Popen[str]:
    """Starts load on a server from another process."""
    command = [sys.executable, "-m", "tests.served", "--address", address, *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def outcomes(process: subprocess.Popen[str], seconds: float = 120.0) -> list[dict[str, Any]]:
    """What became of every request of a load."""
    found: list[dict[str, Any]] = json.loads(process.communicate(timeout=seconds)[0].splitlines()[-1])
    return found


async def _drive(options: argparse.Namespace) -> list[dict[str, Any]]:
    import httpx2
    import openai

    # No limits of its own: what is slow or lost is the server's.
    http = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None))
    client = openai.AsyncOpenAI(
        base_url=f"{options.address}/v1", api_key=options.key, max_retries=0, timeout=300, http_client=http
    )
    numbers, found = iter(range(options.requests)), []

    async def answer(number: int) -> dict[str, Any]:
        since, finish_reason = time.monotonic(), None
        outcome: dict[str, Any] = {"error": None}
        try:
            events = await client.chat.completions.create(
                model=options.model,
                messages=QUESTION,  # type: ignore[arg-type]
                max_tokens=options.max_tokens,
                temperature=0,
                logit_bias=NEVER_ENDS,
                stream=True,
                extra_headers={"x-request-id": f"load-{number}"},
            )
            async for event in events:
                finish_reason = event.choices[0].finish_reason or finish_reason
            if finish_reason != "length":
                outcome["error"] = f"the answer broke off: {finish_reason}"
        except openai.APIStatusError as error:
            outcome |= {"error": error.message, "status": error.status_code}
            outcome["retry_after"] = error.response.headers.get("retry-after")
        except Exception as error:
            outcome["error"] = f"{type(error).__name__}: {error} ({error.__cause__!r})"
        return outcome | {"seconds": time.monotonic() - since}

    async def stream() -> None:
        for number in numbers:
            found.append(await answer(number))

    await asyncio.gather(*(stream() for _ in range(options.streams)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--key", default="none")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--streams", type=int, default=16, help="at once")
    parser.add_argument("--requests", type=int, default=16, help="in all, at most")
    parser.add_argument("--max-tokens", type=int, default=40)
    print(json.dumps(asyncio.run(_drive(parser.parse_args()))))


if __name__ == "__main__":
    main()
