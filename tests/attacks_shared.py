"""A machine that is shared, and files that are given on: what another user made first, and what links and names lead to.

Each line an attack, as in tests/attacks.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from lib.config.plain_yaml import CARD_BYTES
from lib.data import tokenizer
from lib.data.hub_files import Repository
from lib.distributed import ring_sockets
from lib.errors import UserError
from lib.evaluate.work_journal import Journal
from lib.launch import discovery
from lib.launch.rank_console import Console
from lib.model import adapter_files
from lib.system import compiled_code
from lib.system.os_commands import Completed
from lib.telemetry.log_tail import Copy
from tests.attacks import OBEYED, Attack, copy_of_run, of_words, refused, run_of, set_in
from tests.attacks_models import pipe, put
from tests.attacks_runs import VICTIM, in_place_of, of_folder, of_hosts, refusal_of

ANOTHER_USER = 65534
HUGE = 10**400


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A folder in the place of /tmp, which everybody may write to."""
    before, shared = os.environ.get("TMPDIR"), folder / "tmp"
    shared.mkdir(exist_ok=True)
    shared.chmod(0o1777)
    try:
        os.environ["TMPDIR"], tempfile.tempdir = str(shared), None
        yield shared
    finally:
        os.environ.pop("TMPDIR")
        os.environ |= {} if before is None else {"TMPDIR": before}
        tempfile.tempdir = None


def of_code(make: Callable[[Path], None]) -> Attack:
    """Somebody else may write where MLX would load code from: MLX looks elsewhere, in a folder of one's own."""

    def attack(folder: Path) -> str | None:
        with temporary_folder(Path(tempfile.mkdtemp(dir=folder))) as shared:
            make(shared)
            compiled_code.keep_private()
            used = Path(tempfile.gettempdir())
            if used == shared or used.stat().st_uid != os.getuid() or used.stat().st_mode & 0o077:
                return f"MLX takes code from {used}"
            compiled_code.keep_private()
            return None if Path(tempfile.gettempdir()) == used else "each process compiles anew"

    return attack


def anothers(path: Path) -> None:
    """Another user's folder; where this test may give none away, one that others may write to."""
    path.mkdir(parents=True)
    path.chmod(0o755 if os.getuid() == 0 else 0o777)
    if os.getuid() == 0:
        os.chown(path, ANOTHER_USER, ANOTHER_USER)


def open_inside(shared: Path) -> None:
    """One's own folder, in which another one was open to all."""
    (shared / "mlx/0.1").mkdir(parents=True)
    (shared / "mlx/0.1").chmod(0o777)


def both_taken(shared: Path) -> None:
    anothers(shared / "mlx")
    anothers(shared / f"tandem-{os.getuid()}")


def takes_nothing_from_a_full_disk(folder: Path) -> str | None:
    """Another user's folder, and no room for one's own: one line, and no code of his."""
    with (
        temporary_folder(Path(tempfile.mkdtemp(dir=folder))) as shared,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        anothers(shared / "mlx")
        put(shared / f"tandem-{os.getuid()}", "in its place")
        before = tempfile.mkdtemp
        tempfile.mkdtemp = _no_room
        try:
            compiled_code.keep_private()
        except SystemExit as end:
            return None if end.code == 2 and err.getvalue().count("\n") == 1 else f"status {end.code}: {err.getvalue()}"
        finally:
            tempfile.mkdtemp = before
    return "it goes on"


def _no_room(*_: object, **__: object) -> str:
    raise OSError(28, "No space left on device")


def link_elsewhere(shared: Path) -> None:
    anothers(shared / "theirs")
    (shared / "mlx").symlink_to(shared / "theirs")


def resets_a_ring_socket(folder: Path) -> str | None:
    """A stranger whom MLX's ring took for a neighbour resets his connection: the neighbour gets its place all the same."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((ring_sockets.HOST, 0)))
        stranger = socket.create_connection(server.getsockname())
        accepted = stack.enter_context(server.accept()[0])
        port = server.getsockname()[1]
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
        mine, theirs = map(stack.enter_context, socket.socketpair())
        try:
            ring_sockets._replace([(port, mine)], 0)
        except RuntimeError as error:
            return str(error)
        theirs.sendall(b"a neighbour's")
        os.set_blocking(accepted.fileno(), True)
        return None if os.read(accepted.fileno(), 99) == b"a neighbour's" else "the stranger is still there"


def journal_behind_a_link(folder: Path) -> str | None:
    put(victim := folder / "journal-victim", "")
    (folder / "o.partial").unlink(missing_ok=True)
    (folder / "o.partial").symlink_to(victim)
    told = refusal_of(lambda: Journal(folder / "o.partial", "a key", 3))
    return told or (None if victim.read_text() == "" else "it wrote into the file")


def exports_a_file_of_yours(folder: Path) -> str | None:
    """A model's folder with a link out of it: what it leads to becomes part of no export."""
    secret, link, out = folder / "secret", folder / "model/notes.txt", folder / "fused-export"
    put(secret, VICTIM)
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    try:
        words = [str(folder / "runs/done"), "--to", "fused", "--no-proof", "--out", str(out)]
        return refused("lib.export", words, told="notes.txt is a link to")
    finally:
        link.unlink()


def marks_up_an_exports_card(folder: Path) -> str | None:
    """Names of a run that is somebody else's, in the card of an export: text, in one line."""
    evil = "hf://a/b\n\n# Owned: [x](http://evil.example)\n<img src=http://evil.example/p>\x1b[31m"
    with copy_of_run(folder) as run:
        set_in(run / "config.yaml", "data.train", json.dumps(evil))
        summary = json.loads((run / "summary.json").read_text()) | {"steps": HUGE, "loss": HUGE}
        (run / "summary.json").write_text(json.dumps(summary))
        out = run.parent / "export"
        status, _, errors = run_of("lib.export", [str(run), "--to", "fused", "--no-proof", "--out", str(out)])
        if status:
            return f"status {status}: {errors[-300:]}"
        card = (out / "README.md").read_text()
        lines = card.splitlines()
        owned = [line for line in lines if line.startswith(("# Owned", "<img"))]
        outside = re.sub(r"`[^`]*`", "", card)
        return f"the card obeys: {owned}" if owned or "evil" in outside or OBEYED.search(card) else None


def reads_a_card_of_3_gb(folder: Path) -> str | None:
    (folder / "data-set").mkdir(exist_ok=True)
    with (folder / "data-set/README.md").open("wb") as file:
        file.truncate(3 * 10**9)
    return None if len(Repository(str(folder / "data-set"), None).card()) <= CARD_BYTES else "it read all of it"


def a_scale_of_400_digits(folder: Path) -> str | None:
    try:
        adapter_files._scale_in({"scale": HUGE})
    except ValueError:
        return None
    return "it is taken"


def ranks_text_at_the_launchers_terminal(folder: Path) -> str | None:
    """What a rank prints may be somebody else's; colours stay."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        console = Console(lambda: None)
        console.output(0, "a", "stdout", "x\x1b]52;c;eA==\x07y\x9b2J \x1b[31mred\x1b[0m")
        console.close()
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    return None if not OBEYED.search(text) and "\x1b[31mred" in out.getvalue() else f"it obeys {text!r}"


def text_in_the_launchers_own_lines(folder: Path) -> str | None:
    """What a rank said before it died, or ssh, or another machine's agent."""
    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        console = Console(lambda: None)
        console.note("died: rank 1 on b: \x1b]52;c;eA==\x07y\x9b2J")
        console.close()
    return f"it obeys {out.getvalue()!r}" if OBEYED.search(out.getvalue()) else None


def answers_of_a_strange_machine(folder: Path) -> str | None:
    """A machine that is asked for its facts may answer anything."""
    for answer in (
        "gpus=x\nhost=b\nend=1",
        "end=1",
        "host=b\ngpus=-3\nmemory=\u0663\nend=",
        "chip=\x1b[2J\nhost=b\nend=1",
    ):
        for errors in ("", "\x1b]0;owned\x07\n"):
            run = lambda words, seconds, said=(answer, errors): Completed(0, *said)  # noqa: E731
            told = str(discovery.ask_machine("b", "d", run, False))
            if OBEYED.search(told) or "\\x1b" in told:
                return f"it obeys {told!r}"
    return None


def log_behind_a_link(folder: Path) -> str | None:
    """The launching machine's copies of other hosts' logs, in a run's folder that came from somebody else."""
    victim, logs = folder / "log-victim", folder / "copied" / "logs"
    for number, name in enumerate(("b", "b/rank-001.jsonl", "rank-001.jsonl")):
        shutil.rmtree(logs, ignore_errors=True)
        put(victim / "rank-001.jsonl", VICTIM)
        (logs / name).parent.mkdir(parents=True)
        if name == "rank-001.jsonl":
            pipe(logs / name)
        else:
            (logs / name).symlink_to(victim if name == "b" else victim / "rank-001.jsonl")
        copy = Copy(logs, "b")
        with contextlib.suppress(UserError):
            copy.write(1, 0, b"{}\n")
            if number == 1:  # it took the place of the link, which somebody puts back
                (logs / name).unlink()
                (logs / name).symlink_to(victim / "rank-001.jsonl")
        with contextlib.suppress(UserError, FileNotFoundError):
            copy.write(1, 1, b"{}\n")
        if (victim / "rank-001.jsonl").read_text() != VICTIM or len(list(victim.iterdir())) > 1:
            return f"it wrote behind {name}"
    return None


def log_of_a_library(folder: Path) -> str | None:
    """transformers tells what it found in a model's config.json."""
    tokenizer._have_logs_shown()
    out, log = io.StringIO(), logging.getLogger("transformers")
    own = [one for one in log.handlers if type(one) is logging.StreamHandler]  # pytest may have added some
    streams = [handler.setStream(out) for handler in own]
    try:
        log.getChild("x").error("type %s", "\x1b]0;owned\x07")
    finally:
        for handler, stream in zip(own, streams, strict=True):
            handler.setStream(stream)
    text = out.getvalue()
    return None if "owned" in text and not OBEYED.search(text) else f"it obeys {text!r}"


TENSORBOARD = ("train.py", "--resume", "{run}", "train.steps=3", "run.sinks=[tensorboard]")
ATTACKS: dict[str, Attack] = {
    "code: MLX's folder is another user's": of_code(lambda shared: anothers(shared / "mlx")),
    "code: MLX's folder has one that is open to all": of_code(open_inside),
    "code: a folder of a version is another user's": of_code(lambda shared: anothers(shared / "mlx/0.1")),
    "code: MLX's folder is a link": of_code(link_elsewhere),
    "code: the folder in its place is taken, too": of_code(both_taken),
    "code: no room for another folder": takes_nothing_from_a_full_disk,
    "ring: a stranger's socket is reset": resets_a_ring_socket,
    "run: tensorboard is a link": of_folder(in_place_of("tensorboard", "folder"), *TENSORBOARD),
    "journal: it is a link": journal_behind_a_link,
    "export: a model's file is a link out of it": exports_a_file_of_yours,
    "export: markup in its card": marks_up_an_exports_card,
    "data: a README of 3 GB": reads_a_card_of_3_gb,
    "adapter: a scale of 400 digits": a_scale_of_400_digits,
    "pattern: a rank's, of 11 digits": of_words("model.rank_pattern={'a{99999999999}': 4}"),
    "pattern: an alpha's, of 11 digits": of_words("model.alpha=4", "model.alpha_pattern={'a{99999999999}': 4}"),
    "terminal: a rank's text": ranks_text_at_the_launchers_terminal,
    "terminal: a library's log": log_of_a_library,
    "terminal: what a host said, in the launcher's lines": text_in_the_launchers_own_lines,
    "terminal: facts of a strange machine": answers_of_a_strange_machine,
    "run: copies of logs behind links": log_behind_a_link,
    **{
        f"host: a file that sets {name}": of_hosts({"hosts": [{"ssh": "a"}], "envs": [f"{name}=/tmp/x"]})
        for name in ("PYTHONPATH", "LD_PRELOAD", "MLX_MPI_LIBNAME", "TANDEM_RELAYED", "HF_ENDPOINT", "NCCL_NET_PLUGIN")
    },
}
