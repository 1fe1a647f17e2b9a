"""Lives that begin within milliseconds: forks of a process that has imported what our commands import.

    python -m tests.forked     tells its process id; for each line of its input, a life as JSON, that one's and its status

Such a life is a process of its own; who kills it is the kernel. With its siblings it has in common what imports leave, e.g.
the seed of hashes, so tests/kills.py begins some lives as programs. Several ranks talk over MLX's ring, below a process that
does what a launcher does: where one of them ends with an error, it ends the others. Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TypedDict

from tests import dies  # not tests.tiny: it brings MLX, and lib.system.mpi_and_blas has to be first

ROOT = Path(__file__).resolve().parent.parent
NOTICE_SECONDS = 1.0  # in which a rank may notice by itself that another one is gone
END_SECONDS = 10.0  # from SIGTERM to SIGKILL
DIES_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG


class Request(TypedDict):
    """A life: the words of its command, a death for each rank, the file that it writes to, and its variables."""

    words: list[str]
    deaths: list[str]
    output: str
    environment: dict[str, str]


class Forks:
    """The process that forks; it has one life at a time.

    Args:
        folder: for its files.
    """

    def __init__(self, folder: Path):
        command = [sys.executable, "-m", "tests.forked"]
        self._errors = (folder / "forked.said").open("w")
        one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a fork has none of its others
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=one_thread, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._number()  # its own, once it has imported everything: no life is to take so long

    def begin(
        self, words: list[str], deaths: Sequence[dies.Death], output: Path, environment: dict[str, str]
    ) -> ForkedLife:
        told = [death.to_json() for death in deaths]
        request = Request(words=words, deaths=told, output=str(output), environment=environment)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return ForkedLife(self._number(), self._process.stdout)

    def _number(self) -> int:
        """The process id that comes next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self._errors.name}: {Path(self._errors.name).read_text()[-2000:]}"
        return int(line)

    def close(self) -> None:
        self._process.communicate()  # the end of its input is its end
        self._errors.close()


class ForkedLife:
    """A life as its parent sees it: what tests/kills.py needs of subprocess.Popen."""

    def __init__(self, pid: int, told: IO[bytes]):
        self.pid = pid
        self._status: Future[int] = Future()
        threading.Thread(target=lambda: self._status.set_result(int(told.readline())), daemon=True).start()

    @property
    def returncode(self) -> int | None:
        return self._status.result() if self._status.done() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._status.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(["fork"], timeout or 0.0) from None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


# ---- In the process that forks


def main() -> None:
    """Imports everything, and forks for every line."""
    import_all()
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    assert threads == 1, f"{threads} threads, of which a fork has one"
    gc.freeze()
    told = os.dup(1)
    os.dup2(2, 1)
    os.write(told, b"%d\n" % os.getpid())
    while line := _line():
        pid = os.fork()
        if pid == 0:
            os.close(told)
            _live(json.loads(line))
        os.write(told, b"%d\n" % pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(told, b"%d\n" % status)


def import_all() -> None:
    """What train.py, lib.evaluate, lib.export and lib.server import on their way."""
    from lib.system import mpi_and_blas

    mpi_and_blas.prepare()
    import mlx_lm.models.llama
    import mlx_lm.tokenizer_utils  # noqa: F401

    from lib.evaluate import command as evaluate_command  # noqa: F401
    from lib.evaluate import evaluator, function_judge, win_rate  # noqa: F401
    from lib.export import command as export_command  # noqa: F401
    from lib.report import run_report  # noqa: F401
    from lib.rollouts import rounds  # noqa: F401
    from lib.serve import command as serve_command  # noqa: F401
    from lib.training import loop, preload, reference_model, report, resume, step_retries, summary  # noqa: F401


def _line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        letter = os.read(0, 1)
        if not letter:
            return b""
        line += letter
    return line


def _live(request: Request) -> None:
    """This process becomes the life."""
    os.setsid()  # its group tells who belongs to it
    os.environ.update(request["environment"])
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    deaths = [dies.Death.of_json(text) for text in request["deaths"]]
    if len(deaths) == 1:
        _become(request["words"], deaths[0])
    os._exit(_launch(request["words"], deaths, Path(f"{request['output']}.ring.json")))


def free_port() -> int:
    """A port that nobody has, below those that the kernel gives to whoever connects: it stays free."""
    while True:
        port = random.SystemRandom().randint(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _become(words: list[str], death: dies.Death) -> None:
    """Runs a command to its end, as Python does it for a program."""
    status = 1
    try:
        dies.run(death, words)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _launch(words: list[str], deaths: Sequence[dies.Death], ring: Path) -> int:
    """The ranks of a life over MLX's ring; the status of the first that failed."""
    ring.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in deaths]))
    ranks, launcher = set(), os.getpid()
    for rank, death in enumerate(deaths):
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != launcher:  # which was killed before that
                os._exit(1)
            os.environ |= {"MLX_HOSTFILE": str(ring), "MLX_RANK": str(rank)}
            _become(words, death)
        ranks.add(pid)
    first, failed_at, sent = 0, 0.0, 0
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ranks.discard(pid)
            if status and not first:
                first, failed_at = os.waitstatus_to_exitcode(status), time.monotonic()
            continue
        late = time.monotonic() - failed_at if first else 0.0
        number = 0 if late < NOTICE_SECONDS else signal.SIGTERM if late < END_SECONDS else signal.SIGKILL
        if number != sent:
            sent = number
            for rank in ranks:
                os.kill(rank, number)
        time.sleep(0.005)
    return first if first >= 0 else 128 - first  # as a shell tells a signal


if __name__ == "__main__":
    main()
