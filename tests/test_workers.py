"""Processes that answer questions: whatever ends one is said as it was, and none outlives who asked."""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import tokenization_utils_base

from lib.data import template_process
from lib.errors import Stopped, UserError
from lib.system import os_commands, patterns, worker_loop, worker_process
from lib.system.worker_process import Ended, NotStarted, WorkerProcess
from tests.tiny import ROOT

WORKER = """
import os, re, signal, subprocess, sys
answers = os.dup(1)
from lib.system import worker_loop
worker_loop.GRACE_SECONDS = 0
def answer(asked):
    what, *given = asked
    if what == "leave":
        print("a letter\\n" * 2000 + "not a letter more", file=sys.stderr)
        os._exit(given[0])
    if what == "die":
        os.kill(os.getpid(), given[0])
    if what == "fill":
        return bytearray(2**62)
    if what == "read":
        return [sys.stdin.read(), subprocess.run(["cat"], stdout=subprocess.PIPE, text=True).stdout]
    if what == "close":
        os.closerange(3, 99)
    if what in ("wait", "close"):
        signal.pause()
    if what == "start":
        given = [subprocess.Popen(["sleep", "100"]).pid]
    if what == "spin":
        open(given[0], "x").close()
        re.match("(a+)+$", "a" * 40 + "b")
    return [os.getpid(), os.getsid(0), *given]
def prepare():
    print("a word on the way", flush=True)
    exec(sys.argv[1])
    return answer
worker_loop.answer_questions(prepare, 1.0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path / "worker.py"


def worker_of(script: Path, start: str = "") -> WorkerProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return WorkerProcess([sys.executable, str(script), start], environment=environment)


def asked(worker: WorkerProcess, *question: Any, seconds: float = 60.0) -> Any:
    return worker.ask(json.dumps(question).encode(), seconds)


def test_how_a_process_ended_is_said_and_the_next_question_has_another_one(script: Path) -> None:
    worker = worker_of(script)
    process, session, *_ = asked(worker, "say")
    assert session == process != os.getsid(0), "Ctrl-C in our terminal would end it"
    with pytest.raises(Ended, match="^its process ended with status 3: not a letter more$") as ended:
        asked(worker, "leave", 3)
    assert not ended.value.lacked_memory
    with pytest.raises(Ended, match="^its process was ended by SIGSEGV$"):
        asked(worker, "die", signal.SIGSEGV)
    with pytest.raises(Ended, match="SIGKILL, perhaps by the system, for want of memory") as ended:
        asked(worker, "die", signal.SIGKILL)
    with pytest.raises(Ended) as ended:
        asked(worker, "fill")
    assert ended.value.lacked_memory
    process, *_ = asked(worker, "say")
    assert asked(worker, "say", seconds=1e8)[0] == process, "as long as a setting may be"
    os.kill(process, signal.SIGKILL)  # while nobody asks
    while _runs(process):
        time.sleep(0.01)
    assert asked(worker, "say", "ä" * 2**20)[2:] == ["ä" * 2**20]


def test_questions_are_for_what_answers_and_not_for_what_it_runs(script: Path) -> None:
    """A judge's function may run a command that reads its standard input to the end."""
    worker = worker_of(script)
    assert asked(worker, "read") == ["", ""] and asked(worker, "say")


def test_what_answers_is_heard_at_once(script: Path) -> None:
    """And not when it ends: it is killed."""
    asking = (
        "import sys; from lib.system.worker_process import WorkerProcess; "
        f"WorkerProcess([sys.executable, {str(script)!r}, 'print(7)'], shows_errors=True).ask(b'[\"say\"]', 60)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", asking], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "a word on the way\n7\n")


def test_a_process_whose_errors_have_no_place_says_so(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(NotStarted, match="No such file or directory: '/nowhere/"):
        asked(worker_of(script), "say")


def test_a_process_that_writes_no_more_is_ended(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "END_SECONDS", 0.05)
    with pytest.raises(Ended, match="SIGKILL"):
        asked(worker_of(script), "close")


def test_what_a_process_started_ends_with_it(script: Path) -> None:
    worker = worker_of(script)
    started = asked(worker, "start")[-1]
    with pytest.raises(TimeoutError):
        asked(worker, "wait", seconds=0.05)
    assert _ends(started)
    started = asked(worker, "start")[-1]
    del worker  # nobody will ask any more
    assert _ends(started)


def test_a_process_that_reads_nothing_ends_the_question_in_time(script: Path) -> None:
    worker = worker_of(script)
    process, *_ = asked(worker, "say")
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        asked(worker, "say", "x" * 2**20, seconds=0.1)
    assert asked(worker, "say")[0] != process


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("os.write(2, b'no room\\n'); os._exit(4)", "its process ended with status 4: no room"),
        ("os.write(answers, b'hello\\n')", "it says 'hello', which is no answer"),
        ("import time; time.sleep(60)", "it is not ready after 0.5 s"),
    ],
)
def test_a_process_that_does_not_start_says_why(
    script: Path, start: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "START_SECONDS", 0.5 if "sleep" in start else 60.0)
    worker = worker_of(script, start)
    for _ in range(2):  # none is left of the first one
        with pytest.raises(NotStarted, match=f"^{said}$"):
            asked(worker, "say", seconds=1.0)
    with pytest.raises(NotStarted, match="No such file or directory"):
        asked(WorkerProcess(["/nowhere/worker"]), "say")


ASKING = """
import json, sys
from lib.system.worker_process import WorkerProcess
worker = WorkerProcess([sys.executable, sys.argv[1], ""])
print(worker.ask(b'["say"]', 60)[0], flush=True)
worker.ask(json.dumps(["spin", sys.argv[2]]).encode(), 60)
"""


def test_a_busy_process_ends_when_who_asked_is_killed(script: Path, tmp_path: Path) -> None:
    environment, busy = {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path / "busy"
    command = [sys.executable, "-c", ASKING, str(script), str(busy)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        while not busy.exists() and parent.poll() is None:
            time.sleep(0.01)
        parent.kill()
    assert busy.exists()
    assert _ends(process)


FORK = """
import os, sys

def runs(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True

from lib.system.worker_process import WorkerProcess
worker = WorkerProcess([sys.executable, sys.argv[1], ""])
ours = worker.ask(b'["say"]', 60)[0]
child = os.fork()
if child == 0:
    own = worker.ask(b'["say"]', 60)[0]
    try:
        worker.ask(b'["wait"]', 0.05)
    except TimeoutError:
        sys.exit(runs(own) or not runs(ours))  # it ends what this process started, and no more
    sys.exit(2)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
assert worker.ask(b'["say"]', 60)[0] == ours
"""


def test_a_fork_has_a_process_of_its_own_and_leaves_its_parents_alone(script: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FORK, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("lib.system.pattern_worker", ["1000"]),
        ("lib.data.template_worker", ["1000"]),
        ("lib.evaluate.function_worker", ["math:sqrt"]),
    ],
)
def test_every_process_has_its_limit_of_time(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(worker_loop, "answer_questions", lambda prepare, seconds: limits.append(seconds))
    monkeypatch.setattr(sys, "argv", [module, *words, "7.5"])
    monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__")
    assert limits == [7.5]


def _ends(process: int) -> bool:
    """Whether a process of somebody's ends, now or within some time."""
    until = time.monotonic() + 30
    while (runs := _runs(process)) and time.monotonic() < until:
        time.sleep(0.02)
    return not runs


def _runs(process: int) -> bool:
    """Whether a process of somebody's is there, and no zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout
    return state.strip() != "" and not state.startswith("Z")


def filtered(command: list[str], limit_seconds: float) -> os_commands.Completed:
    return os_commands.filtered(command, "", limit_seconds, 99)


@pytest.mark.parametrize("run", [os_commands.run, filtered])
def test_ctrl_c_in_the_middle_of_a_start_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    processes = []

    class Interrupted(subprocess.Popen[Any]):
        def __init__(self, *given: Any, **options: Any):
            super().__init__(*given, **options)
            processes.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(subprocess, "Popen", Interrupted)
        run(["sleep", "30"], 60.0)
    assert len(processes) == 1 and not _runs(processes[0])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("run", [os_commands.run, filtered])
def test_a_command_ends_with_ctrl_c_and_what_it_started_too(tmp_path: Path, run: Callable[..., Any]) -> None:
    """Its session is its own, so the terminal tells us alone."""
    note, ended = tmp_path / "process", tmp_path / "ended"
    here = threading.get_ident()

    def interrupt() -> None:
        while not note.exists():
            time.sleep(0.01)
        signal.pthread_kill(here, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(["sh", "-c", f"(sleep 100 && touch {ended}) & echo $! > {note}.new; mv {note}.new {note}; wait"], 60.0)
    assert _ends(int(note.read_text())) and not ended.exists()


def test_why_nothing_is_found_or_rendered_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_searcher", lambda: WorkerProcess(["/nowhere/worker"]))
    monkeypatch.setattr(template_process, "_renderer", patterns._searcher)
    with pytest.raises(Stopped, match="searches for regular expressions does not start: .*No such file"):
        patterns.is_match("a", "a")
    with pytest.raises(Stopped, match="renders chat templates does not start: .*No such file"):
        template_process.render([[]], chat_template="x")
    leaves = [sys.executable, "-c", "print('{}', flush=True); input(); exit(5)"]
    monkeypatch.setattr(patterns, "_searcher", lambda: WorkerProcess(leaves))
    monkeypatch.setattr(template_process, "_renderer", patterns._searcher)
    with pytest.raises(UserError, match="'a' finds nothing in a text of 1 letters: its process ended with status 5"):
        patterns.is_match("a", "a")
    with pytest.raises(UserError, match="on 1 conversation, is not rendered: its process ended with status 5"):
        template_process.render([[]], chat_template="x")


def test_a_command_that_is_killed_is_not_waited_for_by_way_of_what_left_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon that it started may hold its pipes."""
    monkeypatch.setattr(os_commands, "LEFT_SECONDS", 0.1)
    leave = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(20)"
    command = ["sh", "-c", f'"{sys.executable}" -S -E -c "{leave}" & sleep 60']
    ends = (os_commands.run(command, seconds) for seconds in (0.5, 5.0, 50.0))  # until it has left
    done = next(end for end in ends if end.output)
    process = int(done.output)
    assert done.status is None and _runs(process)
    os.kill(process, signal.SIGKILL)


def test_templates_end_with_their_limits_and_never_render_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = template_process._renderer().command[-2:]
    assert limits == [str(template_process.RENDER_BYTES), str(template_process.RENDER_SECONDS)]
    assert template_process._renderer().folder == patterns._searcher().folder == ROOT, "whatever folder we are in"
    monkeypatch.setattr(tokenization_utils_base, template_process.RENDERER, None)  # and so put back
    template_process.install()
    assert tokenization_utils_base.render_jinja_template is template_process.render  # as transformers calls it
    monkeypatch.delattr(tokenization_utils_base, template_process.RENDERER)
    with pytest.raises(Stopped, match=r"transformers \S+ renders chat templates by another name than render_jinja_te"):
        template_process.install()
