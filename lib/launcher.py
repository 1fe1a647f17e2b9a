"""Hosts and a command ➜ ranks that are started, watched, ended and started again.

    ./launch --hostfile hostfile -- train.py --config configs/X.yaml train.beta=0.2
    ./launch --hosts mac-a,mac-b --backend mpi --max-restarts 3 -- train.py
    ./launch --hostfile hostfile --preflight-only --json             is all well? starts nothing
    ./launch --hostfile hostfile --role secondary -- train.py        without ssh: by hand, on each machine
    ./launch --emit hostfile > hostfile                              the machines that answer over ssh

Before a start every host is checked (lib/preflight.py); lib/ranks.py starts all ranks once and watches them, here they
are started again.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import difflib
import functools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib import command, discovery, hostfile, jobfile, preflight, ranks, reach, rendezvous, terminal, topology
from lib import config as settings
from lib.config import UserError
from lib.hostfile import Host, Hosts
from lib.ranks import ROOT, Attempt, Console, Launching, Link, Outcome, as_command, connect, is_this_machine, resumed

ANSWER_SECONDS = 3.0  # for a host that has to show that it is there
PATIENCE_SECONDS = 900.0  # while none of the hosts answers
QUICK_STARTS = 2  # in a row without a new checkpoint, before others wait
LONGEST_PAUSE_SECONDS = 30.0
MAC_RESTARTS = 3  # by default where a host is a Mac: a lit display may end a rank there at any time (lib/metal.py)
LOOK_OUT_SECONDS = 1.0  # between looks for a host that is missing

ROLES = ("primary", "secondary")

# Names that people set and that nothing reads, with what does what they hope for.
FOLKLORE = {
    "MLX_METAL_PREALLOCATE": "MLX allocates as it needs; nothing to set",
    "MLX_MAX_MEMORY_GB": "MLX limits memory by mx.set_memory_limit; lower train.global_batch_size or plan.micro_batch_sizes",
    "MLX_LOCAL_RANK": "the launcher sets MLX_RANK",
    "MLX_GLOBAL_RANK": "the launcher sets MLX_RANK",
}


# ---- From the first start to the last


def pause_seconds(fruitless: int) -> float:
    """Before another start, after so many in a row that brought no checkpoint: none at first, then 1, 2, 4 ... 30 s."""
    late = min(fruitless, 100) - QUICK_STARTS
    return min(2.0**late, LONGEST_PAUSE_SECONDS) if late >= 0 else 0.0


def usual_restarts(systems: Iterable[str]) -> int:
    """How often a run is started again where nobody said it: some times if one of the hosts' systems is a Mac's."""
    return MAC_RESTARTS if "Darwin" in systems else 0


async def supervise(
    launching: Launching,
    console: Console,
    max_restarts: int | None = 0,
    restart_with: str = "all",
    here: Host | None = None,
) -> int:
    """Runs the command to its end, starting it again as often as it may be; returns the exit status.

    max_restarts: None for what suits the hosts' systems.
    """
    interrupts: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    # Under nohup the training is meant to outlive its terminal.
    hangups = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    for number in (signal.SIGINT, signal.SIGTERM, *hangups):
        loop.add_signal_handler(number, interrupts.put_nowait, int(number))
    links: dict[str, Link] = {}  # an agent that is there need not be reached again
    attempt = Attempt(launching, console, here, links, None if max_restarts is None else max_restarts > 0)
    _hand_on_input(loop, lambda: attempt)
    everyone, hosts, run, starts, restarts, fruitless = launching.hosts, launching.hosts, None, 1, 0, 0
    try:
        while True:
            missing = tuple(host for host in everyone if host not in hosts)
            looking = asyncio.ensure_future(_look_out(attempt, missing, everyone)) if missing else None
            outcome = await attempt.go(interrupts)
            if max_restarts is None and attempt.systems:  # all hosts were there once
                max_restarts = usual_restarts(attempt.systems.values())
            if looking is not None:
                looking.cancel()
                await asyncio.wait([looking])
            run = outcome.run or run
            if outcome.interrupted or (outcome.status == 0 and not outcome.rejoined):
                return outcome.status
            broken = time.monotonic()
            if not outcome.rejoined:
                if outcome.status == 2 or restarts >= (max_restarts or 0):  # 2: the user's input is wrong, and stays so
                    return outcome.status
                restarts += 1
                fruitless = 0 if attempt.checkpoint is not None else fruitless + 1
                with contextlib.suppress(TimeoutError):
                    interrupt = await asyncio.wait_for(interrupts.get(), pause_seconds(fruitless))
                    return 128 + interrupt
            # Those that were there first: the checkpoints of the others may be older.
            in_order = (*hosts, *(host for host in everyone if host not in hosts))
            if launching.backend in ("ring", "jaccl-ring"):
                in_order = topology.in_ring_order(hosts[0], everyone)
            patience_seconds = PATIENCE_SECONDS if run else 0.0  # without a run there is nothing to lose
            hosts = await _answering(launching, links, in_order, restart_with == "all", patience_seconds, interrupts)
            is_rdma = len(hosts) > 1 and launching.backend in topology.RDMA_BACKENDS
            if is_rdma and (wanted := topology.rdma_fault(launching.backend, hosts)) is not None:
                console.note(f"{launching.backend} wants {wanted}: waiting for all hosts")
                hosts = await _answering(launching, links, in_order, True, patience_seconds, interrupts)
            placed = await _placed(launching, links, hosts, everyone, outcome)
            hosts = tuple(host for host in hosts if host.name in {one.name for one in placed})
            if not interrupts.empty():
                return 128 + interrupts.get_nowait()
            if not hosts:
                console.note("no host answers; " + (f"go on later by --resume {run}" if run else "nothing was saved"))
                return outcome.status
            starts += 1
            without = [host.name for host in everyone if host not in hosts]
            command = resumed(launching.command, run, hosts == everyone) if run else launching.command
            console.note(
                f"start {starts}, {time.monotonic() - broken:.1f} s later, on {len(hosts)} of {len(everyone)} hosts"
                + (f" (without {', '.join(without)})" if without else "")
                + (f", from the last checkpoint of {run}" if run else "")
            )
            again = replace(launching, hosts=placed, command=command)
            attempt = Attempt(again, console, links=links, spares=restarts < (max_restarts or 0))
    finally:
        await asyncio.gather(*(link.close() for link in links.values()))


async def _reach(launching: Launching, links: dict[str, Link], host: Host) -> bool:
    """Whether a host answers; its agent then is among the links."""
    if host.name not in links or links[host.name].closed:
        if host.name in links:
            links[host.name].drop()
        try:
            links[host.name] = await asyncio.wait_for(connect(launching, host), ANSWER_SECONDS)
        except (TimeoutError, ConnectionError):
            links.pop(host.name, None)
    return host.name in links


async def _answering(
    launching: Launching,
    links: dict[str, Link],
    hosts: tuple[Host, ...],
    all_of_them: bool,
    patience_seconds: float,
    interrupts: asyncio.Queue[int],
) -> tuple[Host, ...]:
    """The hosts that answer, in their order; where all are wanted, waits until they do (or for an interrupt).

    Where none does, it may be the network of this machine: they are asked again, for as long as patience lasts.
    """
    connected = tuple(host for host in hosts if host.name in links and not links[host.name].closed)
    if connected and not all_of_them:  # a host that does not answer at once is taken in when it is back
        return connected
    deadline = time.monotonic() + patience_seconds
    while True:
        answered = await asyncio.gather(*(_reach(launching, links, host) for host in hosts))
        enough = all(answered) if all_of_them else any(answered) or time.monotonic() > deadline
        if enough or not interrupts.empty():
            return tuple(host for host, there in zip(hosts, answered, strict=True) if there)
        await asyncio.sleep(1)


async def _placed(
    launching: Launching, links: dict[str, Link], hosts: tuple[Host, ...], everyone: tuple[Host, ...], outcome: Outcome
) -> tuple[Host, ...]:
    """Those of the hosts that reach each other, where that is in doubt; each at an address that suits its neighbours.

    In a ring of cables a host's address is known to the one before it alone: it needs another for another neighbour.
    """
    if outcome.reached is not None and {host.name for host in outcome.reached} <= {host.name for host in hosts}:
        return outcome.reached
    is_cut = outcome.reached is not None or (outcome.fault is not None and outcome.fault.kind in ("wedged", "late"))
    is_moved = launching.backend == "ring" and hosts != everyone and any(host.addresses for host in hosts)
    if len(hosts) < 2 or not (is_cut or is_moved):
        return hosts
    return await reach.reach_each_other(launching, links, hosts) or hosts


async def _look_out(attempt: Attempt, missing: tuple[Host, ...], everyone: tuple[Host, ...]) -> None:
    """Says when one of the missing hosts could take part again, with processes that are ready for it."""
    while not attempt.back.is_set():
        await asyncio.sleep(LOOK_OUT_SECONDS)
        for host in missing:
            known = attempt.links.get(host.name)  # its ports were closed, its agent and what that keeps ready are there
            try:
                link = known if known and not known.closed else await connect(attempt.launching, host)
            except ConnectionError:
                continue
            try:
                if await _could_join(attempt, link, host, everyone):
                    attempt.links[host.name] = link
                    attempt.back.set()
            finally:
                if attempt.links.get(host.name) is not link:
                    await link.close()


async def _could_join(attempt: Attempt, link: Link, host: Host, everyone: tuple[Host, ...]) -> bool:
    """Whether a host takes connections at the run's ports, too, from one that trains; then it gets its processes ready."""
    launching, training = attempt.launching, {one.name for one in attempt.launching.hosts}
    before = [one.name for one in reversed(topology.in_ring_order(host, everyone)) if one.name in training]
    asking = attempt.links.get(before[0] if launching.backend == "ring" else launching.hosts[0].name)
    port = launching.starting_port + launching.size  # beyond those where ranks listen now
    try:
        await link.ask("listen", ANSWER_SECONDS, port=port)
        if asking is None or asking.closed:
            return False
        if await reach.first_address(asking, host, launching.hosts, port, reach.PROBE_SECONDS) is None:
            return False
    except ConnectionError:
        return False
    if attempt.run is not None:
        await ranks.prepared(launching, link, host, attempt.run)
    return not link.closed


def _hand_on_input(loop: asyncio.AbstractEventLoop, attempt: Any) -> None:
    """Hands our standard input on to rank 0, a piece at a time; in the background of a terminal there is none."""

    def read() -> None:
        while True:
            try:
                piece = os.read(0, 2**16)
            except OSError:
                piece = b""
            while not attempt().takes_input:
                time.sleep(0.05)
            now, text = attempt(), base64.b64encode(piece).decode() if piece else None
            now.typed.clear()
            loop.call_soon_threadsafe(functools.partial(now.type, text=text))
            if not piece:
                return
            now.typed.wait()

    with contextlib.suppress(OSError):
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            return
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # after Ctrl-Z and bg there is no input, which stops nobody
    threading.Thread(target=read, daemon=True).start()


# ---- The command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: the worst rank's, 2 for wrong input, 1 where preflight fails."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else list(arguments))
        if options.emit == "hostfile" and options.preflight:
            return _emit_hostfile(options)
        launching = _launching(options)
        if options.emit:
            print(_emitted(launching, options.emit), end="")
            return 0
        if launching.directory == str(ROOT):  # elsewhere there may be other files
            _check_command(launching.command)
        if options.sync:
            _sync(launching, options.sync)
        here = _this_host(launching, options.role) if options.role else None
        if here is None and (options.preflight or options.preflight_only):
            passed = preflight.run(launching, options.json, options.min_mbit, options.max_round_trip_ms)
            if options.preflight_only or not passed:
                return 0 if passed else 1
    except UserError as error:
        terminal.error(str(error))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    launching = replace(launching, environment={**_shown(launching), **launching.environment})
    console = Console(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        if here is not None and len(launching.hosts) > 1:
            commands = _by_hand(sys.argv[1:] if arguments is None else arguments)
            port, limit_seconds = launching.starting_port, launching.wedged_seconds
            asyncio.run(rendezvous.gather(launching.hosts, here, port, limit_seconds, commands, console.note))
        return asyncio.run(supervise(launching, console, options.max_restarts, options.restart_with, here))
    except UserError as error:  # an address that does not resolve
        console.note(f"error: {error}")
        return 2
    except rendezvous.Absent as error:
        console.note(str(error))
        return 1
    except KeyboardInterrupt:  # while others are waited for
        return 128 + signal.SIGINT
    finally:
        console.close()


def _by_hand(arguments: Sequence[str]) -> tuple[str, str]:
    """What one types on the primary, and on a secondary: the words of this launch, with the other role."""
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    before, place = words[:cut], next(i for i, word in enumerate(words) if word.partition("=")[0] == "--role")
    del before[place : place + (1 if "=" in words[place] else 2)]
    primary, secondary = (shlex.join(["./launch", "--role", role, *before, *words[cut:]]) for role in ROLES)
    return primary, secondary


def _shown(launching: Launching) -> dict[str, str]:
    """How many columns a rank's line has before it is wrapped: those of our terminal, less the line's tag."""
    width = terminal.Voice().width
    tag = max(len(f"[{launching.size - 1} {host.name}] ") for host in launching.hosts)
    return {} if width is None or width - tag < terminal.NARROW else {"TANDEM_COLUMNS": str(width - tag)}


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = settings.Parser(
        prog="launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.settings_place = "after --, behind train.py"
    add = parser.add_argument
    add("--hostfile", metavar="FILE", type=Path, help="the hosts: NAME:SLOTS or NAME slots=N a line, or MLX's JSON")
    add("--hosts", metavar="A:1,B:1", help="the hosts, here instead of in a file")
    add("--backend", choices=hostfile.BACKENDS, help="default: the host file's, else ring")
    add("--preflight-only", action="store_true", help="check every host, start nothing")
    add(
        "--min-mbit", type=float, default=100.0, metavar="X", help="preflight: the slowest link that will do, in Mbit/s"
    )
    add("--max-round-trip-ms", type=float, default=50.0, metavar="X", help="preflight: the slowest answer that will do")
    add("--json", action="store_true", help="what preflight finds, as JSON")
    add("--no-preflight", dest="preflight", action="store_false", help="start without checking")
    add(
        "--max-restarts",
        type=int,
        metavar="N",
        help=f"after a fault, go on from the last checkpoint so often (default: {MAC_RESTARTS} where a host is a Mac, else 0)",
    )
    add(
        "--restart-with",
        choices=("survivors", "all"),
        default="survivors",
        help="the hosts that answer, or wait for all",
    )
    add(
        "--silent-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="a host that says nothing, or a rank that is stopped, so long is given up",
    )
    add(
        "--wedged-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="so is a wait for other ranks that takes so long",
    )
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for every rank")
    add(
        "--sync",
        action="append",
        default=[],
        metavar="PATH",
        help="first copy this (`.`: the project) to every host, by rsync",
    )
    add(
        "--role",
        choices=ROLES,
        help="without ssh: start this machine's ranks only, the same command on each",
    )
    add("--nice", type=int, metavar="N", help="priority of the ranks; below 0 needs root or sudo")
    add("--connections-per-ip", type=int, default=1, metavar="N", help="connections between neighbours")
    add("--starting-port", type=int, default=32323, metavar="PORT", help="the first port that ranks listen at")
    add("--mpi-arg", action="append", default=[], metavar="WORD", help="a further word for mpirun")
    add(
        "--emit",
        choices=("hostfile", "slurm", "mpijob"),
        help="print a file and start nothing. hostfile: the machines that answer over ssh, those of --hosts or all that "
        "are found (~/.ssh/config, mDNS, Thunderbolt; with --no-preflight nobody is asked); slurm, mpijob: the job",
    )
    add("--directory", help="the project's folder on the hosts (default: as here)")
    add("--python", help="the interpreter on the hosts (default: as here)")
    add("command", nargs="*", help="after --: train.py and its words")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])  # what follows is not ours, whatever it looks like
    if options.command:
        raise UserError(f"{options.command[0]!r}: the command comes after --, e.g. ./launch --hosts a,b -- train.py")
    options.command, options.typed = arguments[cut + 1 :] or ["train.py"], arguments
    searches = options.emit == "hostfile" and options.preflight and options.hostfile is None and options.hosts is None
    if (options.hostfile is None) == (options.hosts is None) and not searches:
        raise UserError("give --hostfile FILE or --hosts A,B (one of them); hostfile.example shows a file")
    for name, least, most in (
        ("max_restarts", 0, 10**6),
        ("connections_per_ip", 1, 16),
        ("starting_port", 1024, 65000),
    ):
        number = getattr(options, name)
        if number is not None and not least <= number <= most:
            raise UserError(f"--{name.replace('_', '-')} {number} is not in {least} to {most}")
    if options.role and options.max_restarts:  # each machine would go on alone
        raise UserError(
            "--max-restarts needs ssh, to start all machines again; with --role start them again by hand, --resume"
        )
    if options.role:
        options.max_restarts = 0
    for name in ("silent_seconds", "wedged_seconds"):
        if not 1 <= getattr(options, name) < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name):g} is not at least 1")
    return options


def _check_command(words: Sequence[str]) -> None:
    """Says here and once what every rank would say: that a script is missing, or a setting wrong.

    Raises:
        UserError: so.
    """
    script = ROOT / words[0]
    if words[0].endswith(".py") and not script.is_file():
        near = difflib.get_close_matches(words[0], [path.name for path in ROOT.glob("*.py")], n=1)
        raise UserError(f"{script} does not exist" + (f"; did you mean {near[0]}?" if near else ""))
    if script == ROOT / "train.py" and "--help" not in words:
        options = command.parse(list(words[1:]), None)
        if options.resume is None:  # a run may lie on other hosts only
            settings.load(ROOT / (options.config or command.QUICKSTART), options.overrides)


def _emit_hostfile(options: argparse.Namespace) -> int:
    """Prints the host file of the machines that answer; the exit status is 1 where none does."""
    named = _hosts(options).hosts if options.hostfile or options.hosts else ()
    text = discovery.emitted(
        named, options.directory or str(ROOT), lambda line: print(f"launch: {line}", file=sys.stderr, flush=True)
    )
    if text is None:
        terminal.error(f"none of {', '.join(host.name for host in named)} answers; ssh to one of them by hand first")
        return 1
    print(text, end="")
    return 0


def _hosts(options: argparse.Namespace) -> Hosts:
    return hostfile.read(options.hostfile) if options.hostfile else hostfile.from_words(options.hosts)


def _launching(options: argparse.Namespace) -> Launching:
    found = _hosts(options)
    environment = {**found.environment, **hostfile.environment(options.env, "--env")}
    for name in environment.keys() & FOLKLORE.keys():
        print(f"launch: nothing reads {name}: {FOLKLORE[name]}", file=sys.stderr)
    backend = options.backend or found.backend or "ring"
    hosts = found.hosts
    if backend in topology.RDMA_BACKENDS and (wanted := topology.rdma_fault(backend, hosts)) is not None:
        raise UserError(
            f"{backend} wants {wanted}; mlx.distributed_config --over thunderbolt --backend {backend} writes such a host file"
        )
    return Launching(
        hosts,
        backend,
        tuple(options.command),
        environment,
        options.directory or str(ROOT),
        options.python or (f"{options.directory}/.venv/bin/python" if options.directory else sys.executable),
        options.connections_per_ip,
        options.starting_port,
        tuple(options.mpi_arg),
        options.nice,
        options.silent_seconds,
        options.wedged_seconds,
        tuple(options.typed),
    )


def _emitted(launching: Launching, kind: str) -> str:
    """A host file, or a job file for somebody else's scheduler.

    Raises:
        UserError: the scheduler cannot run it.
    """
    if kind == "hostfile":
        return hostfile.to_text(launching.hosts)
    write = {"slurm": jobfile.slurm, "mpijob": jobfile.mpijob}[kind]
    environment = {"PYTHONUNBUFFERED": "1", **launching.environment}
    return write(launching.hosts, as_command(launching), environment, launching.directory, launching.python)


def _sync(launching: Launching, paths: Sequence[str]) -> None:
    """Copies paths to the same place on every other host, whatever is not kept in git or is big left out of `.`.

    Raises:
        UserError: rsync is missing, or fails on a host.
    """
    if shutil.which("rsync") is None:
        raise UserError("--sync needs rsync; install it (apt-get install rsync, brew install rsync)")
    for host in launching.hosts:
        for path in paths:
            source = Path(path).resolve()
            whole = source == ROOT
            target = launching.directory if whole else str(source)
            if is_this_machine(host) and target == str(source):
                continue
            left_out = [".git", ".venv", "runs", "__pycache__", ".*_cache"] if whole else []
            # rsync takes files of one size and second for equal; a model of 100 GB is not read twice for that.
            slash = "/" if source.is_dir() else ""
            words = ["rsync", "-a", ranks.rsync_making(target if slash else str(Path(target).parent))]
            words += [*(["--checksum"] if whole else []), *(f"--exclude={name}" for name in left_out)]
            words += ["-e", shlex.join(ranks.ssh_words(host)[:-2])]
            done = subprocess.run(
                [*words, "--", f"{source}{slash}", f"{host.name}:{target}{slash}"], capture_output=True, text=True
            )
            if done.returncode:
                told = done.stderr.strip().splitlines()
                raise UserError(f"--sync {path}: rsync to {host.name} failed: {told[0] if told else done.returncode}")
        print(f"launch: {', '.join(paths)} copied to {host.name}", file=sys.stderr)


def _this_host(launching: Launching, role: str) -> Host:
    """The host whose ranks are this machine's, where people start each machine by hand.

    Raises:
        UserError: the backend needs a starter, or this machine is not the host that it should be.
    """
    if launching.backend == "mpi":
        raise UserError("--role is for ring, jaccl and nccl: mpirun reaches the other hosts over ssh")
    mine = [host for host in launching.hosts if is_this_machine(host)]
    if len(mine) != 1:
        names = ", ".join(host.name for host in launching.hosts)
        raise UserError(
            f"--role {role}: this machine ({socket.gethostname()}) is {len(mine)} of the hosts {names}, not one"
        )
    if (mine[0] == launching.hosts[0]) != (role == "primary"):
        raise UserError(
            f"--role {role}: the first host, {launching.hosts[0].name}, is the primary; this machine is {mine[0].name}"
        )
    return mine[0]


if __name__ == "__main__":
    sys.exit(main())
