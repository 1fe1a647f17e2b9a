"""Whether training can run: on this machine (the doctor), or on all hosts of a job (./launch --preflight-only).

    python -m lib.launch.preflight [--json]        make doctor: a page to attach to a report; it names no user
    python -m lib.launch.preflight host            ./launch starts this on every host; then it measures links
    python -m lib.launch.preflight sum RANKS       a rank of the last check: all ranks add up a number

Exit status of the doctor: 0 if training can run here, 1 if something that it needs is broken.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import itertools
import json
import math
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from lib.config import command_line, train_arguments
from lib.data.sources import weights_of
from lib.distributed import connection
from lib.distributed.connection import Channel, Listener, connect
from lib.environment import ROOT
from lib.errors import UserError, shown
from lib.launch import checks, hostfile, ssh
from lib.launch.checks import LIMIT_SECONDS, Finding, Request
from lib.launch.hostfile import Host
from lib.launch.job import RDMA_BACKENDS, Job, ports_of
from lib.launch.launcher import Quiet, Start, is_local
from lib.system import hardware, mpi_and_blas, network, os_commands, terminal

ANSWER = "tandem-preflight"
ROUND_TRIPS = 20
MOST_LINK_BYTES = 2**24
LINK_SECONDS = 3.0
SUM_SECONDS = 15.0
DOCTOR_SECONDS = 150.0
STYLES = {"ok": "green", "note": "bold magenta", "failed": "bold red"}


@dataclass(frozen=True)
class Limits:
    """What a link has to reach, and the words after ./launch, which remedies repeat."""

    bytes_per_second: float
    round_trip_seconds: float
    typed: Sequence[str]

    def again(self, *options: str) -> str:
        """The launcher's command line, with further options."""
        cut = list(self.typed).index("--") if "--" in self.typed else len(self.typed)
        return shlex.join(["./launch", *self.typed[:cut], *options, *self.typed[cut:]])


def run(job: Job, limits: Limits, as_json: bool) -> bool:
    """Checks every host and prints the findings; returns whether all may start.

    Raises:
        UserError: the configuration is wrong.
    """
    began = time.perf_counter()
    findings = examine(job, request_of(job), limits)
    passed, seconds = not any(one.status == "failed" for one in findings), time.perf_counter() - began
    if as_json:
        print(json.dumps({"passed": passed, "seconds": seconds, "findings": [asdict(one) for one in findings]}))
    else:
        show(findings, f"preflight of {len(job.hosts)} host{'s' * (len(job.hosts) != 1)}, {seconds:.1f} s")
    return passed


def request_of(job: Job) -> Request:
    """What the run's configuration needs of every host; of a command that is not train.py little is known.

    Raises:
        UserError: the configuration is wrong.
    """
    own = Request(directory=job.directory, project=checks.project_digests(), packages=checks.packages())
    if Path(job.command[0]).name != "train.py":
        return replace(own, run_dir=None, calibration_dir=None)
    with contextlib.chdir(ROOT):
        options = train_arguments.parse(list(job.command[1:]), None)
        config = train_arguments.read_config(options)
        models = [config.model.path, *([] if config.model.reference == "initial" else [config.model.reference])]
        is_local_model = {path: Path(path).exists() or path.startswith((".", "/", "~")) for path in models}
        sources = [name for name in weights_of(config.data.train) if not glob.has_magic(name) and "://" not in name]
        file = None if options.resume else options.config or train_arguments.QUICKSTART
        named = [file, *sources, config.data.valid, config.evaluate.answers, config.model.adapter]
        paths = [str(path) for path in named if path] + [path for path, is_one in is_local_model.items() if is_one]
        weights = (one for path in paths for one in Path(path).expanduser().glob("*.safetensors"))
        return replace(
            own,
            run_dir=config.run.dir,
            calibration_dir=config.plan.calibration_dir,
            require_calibration=config.plan.require_calibration,
            method=config.model.method,
            is_divisible=config.strategy in ("auto", "sharded", "pipelined") and job.size > 1,
            checkpoints=config.checkpoint.keep + 1,
            model_bytes=sum(one.stat().st_size for one in weights),
            files={path: checks.digest(Path(path)) for path in dict.fromkeys(paths)},
            models=[path for path, is_one in is_local_model.items() if not is_one],
        )


# ---- Asking the hosts


class HostProcess:
    """The preflight's process on a host, which answers a question a line."""

    def __init__(self, job: Job, host: Host):
        """Starts it.

        Raises:
            OSError: there is no such program.
        """
        self.host = host
        own = [job.python, "-m", "lib.launch.preflight", "host"]
        words = own if is_local(job, host) else ssh.remote_command(job, host, "lib.launch.preflight host")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, start_new_session=True
        )

    def ask(self, limit_seconds: float, **question: Any) -> dict[str, Any]:
        """Its answer, or {"error": why}. After the limit it is killed."""
        timer = threading.Timer(limit_seconds, self._process.kill)
        timer.start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:  # a login shell may print something before
                with contextlib.suppress(ValueError):
                    answer = json.loads(line[line.find("{") :])
                    if ANSWER in answer:
                        return dict(answer[ANSWER])
        except OSError:
            pass
        finally:
            timer.cancel()
        return {"error": self.last_words() or f"no answer within {limit_seconds:g} s"}

    def last_words(self) -> str:
        """Ends the process; returns the last line of its standard error."""
        self._process.kill()
        errors = self._process.communicate()[1].strip().splitlines()
        return errors[-1] if errors else ""

    @property
    def status(self) -> int | None:
        return self._process.poll()


def examine(job: Job, request: Request, limits: Limits) -> list[Finding]:
    """All checks on all hosts."""
    requests = _requests(job, request, limits)
    try:
        processes = [HostProcess(job, host) for host in job.hosts]
    except OSError as error:
        raise UserError(f"{error.filename} does not start on this machine: {error.strerror}") from None
    try:
        with ThreadPoolExecutor(len(job.hosts)) as pool:
            ask = lambda pair: pair[0].ask(ssh.CONNECT_SECONDS + LIMIT_SECONDS + 5, **asdict(pair[1]))  # noqa: E731
            sent = time.time()
            answers = list(pool.map(ask, zip(processes, requests, strict=True)))
        findings, reached, systems = list[Finding](), list[HostProcess](), dict[str, str]()
        for process, answer in zip(processes, answers, strict=True):
            if "error" in answer:
                findings.append(why_no_answer(job, process.host, answer["error"], process.status, request.origin))
                continue
            reached.append(process)
            systems[process.host.name] = answer["system"]
            findings += [Finding(**one) for one in answer["findings"]]
            findings += _clock(process.host, answer, sent)
        findings += [_system(job, name, systems, limits) for name in systems]
        if len(reached) > 1:
            findings += link_findings(_measure_links(job, reached), limits)
    finally:
        for process in processes:
            process.last_words()
    if not any(one.status == "failed" for one in findings):
        findings += sum_over_ranks(job, limits)
    return findings


def _requests(job: Job, request: Request, limits: Limits) -> list[Request]:
    """What each host is checked for."""
    ports = ports_of(job)
    others = [host.name for host in job.hosts[1:]] if job.backend == "mpi" else []
    other_port = limits.again("--starting-port", str(job.starting_port + 1000))
    requests = []
    for index, host in enumerate(job.hosts):
        listed = [one for entry in host.rdma for one in (entry if isinstance(entry, list) else [entry]) if one]
        requests.append(
            replace(
                request,
                host=host.name,
                slots=host.slots,
                ports=ports[host.name],
                addresses=host.addresses,
                other_port=other_port,
                ssh_to=others if index == 0 else [],
                devices=listed if job.backend in RDMA_BACKENDS else [],
            )
        )
    return requests


def why_no_answer(job: Job, host: Host, error: str, status: int | None, origin: str) -> Finding:
    """The finding for a host that gave no answer, from its last error line and its exit status."""
    request = Request(host=host.name, directory=job.directory, origin=origin)
    if checks.NOT_PERMITTED.search(error):
        return replace(checks.unreadable(request, job.directory, error), check="project", host=host.name)
    if "cd:" in error or "can't cd" in error:
        copy = ssh.project_copy_command(host, job.directory, origin)
        return Finding("failed", f"{job.directory} is not there", copy, "", "project", host.name)
    if status in (1, 2, 126, 127):  # not ssh's own status
        return Finding("failed", error, request.there("make setup"), "", "packages", host.name)
    return Finding("failed", error, *ssh.ssh_remedy(host.name, error, os_commands.is_mac()), "ssh", host.name)


def _clock(host: Host, answer: Mapping[str, Any], sent: float) -> list[Finding]:
    """A note where a host's clock differs: times in the logs will not fit."""
    ahead_seconds = max(answer["clock"] - time.time(), min(0.0, answer["clock"] - sent))
    if abs(ahead_seconds) < 2.0:
        return [Finding("ok", "", "", "", "clock", host.name)]
    command = "sudo sntp -sS time.apple.com" if answer["system"] == "Darwin" else "sudo timedatectl set-ntp true"
    message = f"{ahead_seconds:+.1f} s from this machine's: times in the logs will not fit"
    return [Finding("note", message, f"ssh -t {host.name} {command}", "", "clock", host.name)]


def _system(job: Job, name: str, systems: Mapping[str, str], limits: Limits) -> Finding:
    """A Mac and a Linux machine work together over MLX's ring alone."""
    system, kinds = systems[name], set(systems.values())
    is_wrong = {"nccl": "Darwin" in kinds, "mpi": len(kinds) > 1, "ring": False}.get(job.backend, kinds != {"Darwin"})
    if not is_wrong:
        return Finding("ok", system, "", "", "system", name)
    reasons = {"mpi": "mpirun starts hosts of one system only", "nccl": "it is for NVIDIA GPUs"}
    why = reasons.get(job.backend, "it is RDMA over Thunderbolt between Macs")
    message = f"--backend {job.backend} with hosts of {' and '.join(sorted(kinds))}: {why}"
    return Finding("failed", message, limits.again("--backend", "ring"), "ring joins any machines", "system", name)


# ---- Links


def links_to_measure(job: Job, reached: Sequence[Host]) -> list[tuple[Host, Host]]:
    """The pairs of hosts where the first has to reach the second.

    Where a ring's addresses are given they may be those of the cable between two hosts: MLX's configurator gives each
    Mac of a Thunderbolt ring the address that faces its previous neighbour.
    """
    hosts = job.hosts
    if job.backend != "ring" or not all(host.addresses for host in hosts):
        return list(itertools.combinations(reached, 2))
    pairs = [(host, hosts[(index + 1) % len(hosts)]) for index, host in enumerate(hosts)]
    return [(one, other) for one, other in pairs[: 1 if len(hosts) == 2 else None] if {one, other} <= set(reached)]


def _measure_links(job: Job, processes: Sequence[HostProcess]) -> dict[tuple[str, str], dict[str, Any]]:
    """Every two hosts that will connect, one pair after the other; of several addresses the slowest counts."""
    key, ports = connection.new_key().decode(), ports_of(job)
    named = {process.host.name: process for process in processes}
    listening: dict[str, int] = {}
    for name, process in named.items():
        wanted = next(iter(ports[name]), 0)  # of the run, where a firewall is open
        answers = (process.ask(LIMIT_SECONDS, listen=port, key=key) for port in (wanted, 0))
        listening[name] = next((answer["port"] for answer in answers if "port" in answer), 0)
    links: dict[tuple[str, str], dict[str, Any]] = {}
    for one, other in links_to_measure(job, [process.host for process in processes]):
        try:
            addresses = other.addresses or (hostfile.address(other, job.hosts),)
        except UserError as error:
            links[one.name, other.name] = {"error": str(error)}
            continue
        measured = []
        for address in addresses:
            question = {"measure": address, "port": listening[other.name], "key": key}
            measured.append({**named[one.name].ask(4 * LINK_SECONDS, **question), "address": address})
        links[one.name, other.name] = min(measured, key=lambda link: link.get("bytes_per_second", 0.0))
    return links


def link_findings(links: Mapping[tuple[str, str], Mapping[str, Any]], limits: Limits) -> list[Finding]:
    """Every measured pair of hosts against the limits, as findings of the first of the pair."""
    findings = []
    for (one, other), link in links.items():
        if "error" in link:
            look = f"ssh {one} ping -c 3 {link.get('address') or other.rpartition('@')[2]}"
            note = "is a firewall on, a cable out"
            findings.append(Finding("failed", f"to {other}: {link['error']}", look, note, "links", one))
            continue
        rate, trip = link["bytes_per_second"], link["round_trip_seconds"]
        message = f"to {other}: {rate * 8 / 1e6:,.0f} Mbit/s, {trip * 1e3:.2f} ms"
        accepted: list[str] = []  # with room for what a link does a minute later
        if rate < limits.bytes_per_second:
            accepted += ["--min-mbit", f"{rate * 8e-6 / 2:.1f}"]
        if trip > limits.round_trip_seconds:
            accepted += ["--max-round-trip-ms", str(math.ceil(trip * 1e3 * 2))]
        if accepted:
            note = "accepts it; better a cable than Wi-Fi"
            findings.append(Finding("failed", message, limits.again(*accepted), note, "links", one))
        else:
            findings.append(Finding("ok", message, "", "", "links", one))
    return findings


def _echo(channel: Channel) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        while (message := channel.receive(None)) is not None:
            channel.send(message)


def _measure(address: str, port: int, key: bytes) -> dict[str, float]:
    """The link to a listener: the median round trip, and the bytes per second, there and back."""
    channel = connect(address, port, key, LINK_SECONDS)

    def there_and_back(size: int) -> float:
        text, began = "x" * size, time.perf_counter()
        channel.send({"": text})
        if channel.receive(LINK_SECONDS) is None:
            raise ConnectionError(f"{address}:{port} did not answer within {LINK_SECONDS:g} s")
        return time.perf_counter() - began

    try:
        trips = sorted(there_and_back(8) for _ in range(ROUND_TRIPS))
        size = 2**14
        seconds = there_and_back(size)
        while seconds < 0.1 and size < MOST_LINK_BYTES:  # long enough to measure, and never long on a slow link
            size *= 4
            seconds = there_and_back(size)
    finally:
        channel.close()
    return {"round_trip_seconds": trips[len(trips) // 2], "bytes_per_second": 2 * size / seconds}


# ---- The sum


def sum_over_ranks(job: Job, limits: Limits) -> list[Finding]:
    """The backend's own sum, started as the run will be."""
    console, interrupts = Quiet(), queue.SimpleQueue[int]()
    check = replace(job, command=("-m", "lib.launch.preflight", "sum", str(job.size)), wedged_seconds=SUM_SECONDS)
    timer = threading.Timer(2 * SUM_SECONDS, interrupts.put, [15])
    timer.daemon = True
    timer.start()
    try:
        outcome = Start(check, console).run(interrupts)
    finally:
        timer.cancel()
    names = [host.name for host in job.hosts]
    if outcome.status == 0:
        return [Finding("ok", job.backend, "", "", "backend", name) for name in names]
    reason = outcome.fault.message if outcome.fault else f"no sum within {2 * SUM_SECONDS:g} s"
    message = next((line for line in reversed(console.lines) if line.strip()), "") or reason
    remedy, note = limits.again("--backend", "ring" if job.backend == "mpi" else "mpi"), "whether it is this backend"
    blamed = [name for name in names if outcome.fault is None or name in outcome.fault.hosts] or names
    return [Finding("failed", message, remedy, note, "backend", name) for name in blamed]


def add_up(ranks: int) -> int:
    """One rank's part of the sum; returns its exit status."""
    launch = mpi_and_blas.launch_environment()
    mpi_and_blas.prepare()
    import mlx.core as mx

    from lib.distributed import world as distributed

    world = distributed.start(launch, timeout_seconds=SUM_SECONDS)
    if world.size != ranks:
        print(f"error: a world of {world.size} ranks, not {ranks}")
        return 1
    total = world.all_sum(mx.array([2**world.rank % 97, 1], dtype=mx.int32), "the check's sum").tolist()
    if total != [sum(2**rank % 97 for rank in range(ranks)), ranks]:
        print(f"error: the sum over {ranks} ranks is {total}")
        return 1
    return 0


# ---- On a host, and on this machine


def serve() -> None:
    """Answers the preflight: the first line of input asks for all checks, each other one for a link."""
    with contextlib.ExitStack() as listeners:
        for line in sys.stdin:
            question = json.loads(line)
            answer: dict[str, Any]
            try:
                if "listen" in question:
                    key = question["key"].encode()
                    listener = listeners.enter_context(Listener("", question["listen"], key, _echo))
                    answer = {"port": listener.address[1]}
                elif "measure" in question:
                    answer = dict(_measure(question["measure"], question["port"], question["key"].encode()))
                else:
                    findings = checks.examine(Request(**question), checks.OF_A_HOST, LIMIT_SECONDS)
                    system = "Darwin" if os_commands.is_mac() else "Linux"
                    answer = {"findings": [asdict(one) for one in findings], "system": system, "clock": time.time()}
            except (OSError, EOFError, UserError) as error:
                answer = {"error": str(error) or type(error).__name__}
            print(json.dumps({ANSWER: answer}), flush=True)


def show(findings: Sequence[Finding], title: str) -> None:
    """Prints a line for each check, and under them the findings with their remedies."""
    say = terminal.Terminal(stderr=True)
    say.line(title, "bold")
    for check in dict.fromkeys(one.check for one in findings):
        of_check = [one for one in findings if one.check == check]
        parts = [
            Text.assemble((word, STYLES[status]), f" {', '.join(dict.fromkeys(hosts))}")
            for status, word in (("failed", "FAILED on"), ("note", "note on"))
            if (hosts := [one.host for one in of_check if one.status == status])
        ]
        say.line(Text("; ").join(parts) if parts else Text("ok", "green"), lead=Text(f"  {check:<13}", "dim"))
    for one in findings:
        if one.status != "ok" or one.check == "links":
            say.line(f"{one.host}, {one.check}: {one.message}")
            _show_remedy(say, one)
    failed = sum(one.status == "failed" for one in findings)
    say.line(f"{failed} failed: nothing was started" if failed else "nothing stands in the way", "bold")


def _show_remedy(say: terminal.Terminal, one: Finding) -> None:
    if one.status != "ok" and one.remedy:  # in one piece, to be copied
        say.console.print(Text(f"    {shown(one.remedy)}"), soft_wrap=True)
    if one.status != "ok" and one.note:
        say.line(f"({one.note})", lead="    ")


def without_user(text: str) -> str:
    """A text without the user's name: the home folder is ~, and user@ and /Users/NAME lose it."""
    home, user = str(Path.home()), re.escape(getpass.getuser())
    text = text.replace(home, "~") if len(home) > 1 else text
    return re.sub(r"(/Users|/home)/[^/\s'\":]+", "~", re.sub(rf"\b{user}@", "", text))


@mpi_and_blas.reported
def doctor(words: Sequence[str]) -> int:
    """Prints the page of this machine; returns the exit status."""
    parser = command_line.Parser(prog="doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the page as one JSON object")
    options = parser.parse_args(list(words))
    findings = [
        replace(one, **{name: without_user(getattr(one, name)) for name in ("message", "remedy", "note")})
        for one in checks.examine(Request(), checks.OF_THIS_MACHINE, DOCTOR_SECONDS)
    ]
    broken = [one.check for one in findings if one.status == "failed"]
    passed = not set(broken) & set(checks.NEEDED)
    header = {"host": network.own_name(), "os": hardware.operating_system(), "processor": hardware.processor_name()}
    if options.json:
        listed = [{**asdict(one), "needed": one.check in checks.NEEDED} for one in findings]
        print(json.dumps({**header, "can_train": passed, "checks": listed}))
        return 0 if passed else 1
    say = terminal.Terminal()
    say.line(f"{header['host']}: {header['processor']}, {header['os']}", "bold")
    for one in findings:
        say.line(
            one.message or "-",
            lead=Text.assemble((f"  {one.check:<13}", "dim"), (f"{one.status:<8}", STYLES[one.status])),
        )
        _show_remedy(say, one)
    verdict = "training can run here" if passed else "training cannot run here"
    if passed and broken:
        verdict += f"; on several machines or ranks it needs what failed: {', '.join(broken)}"
    say.line(verdict, "bold")
    return 0 if passed else 1


def main() -> int:
    """What the command line asks for; returns the exit status."""
    words = sys.argv[1:]
    if words == ["host"]:
        serve()
        return 0
    if words == ["compute"]:
        print(json.dumps(checks.compute()))
        return 0
    if words[:1] == ["sum"]:
        return add_up(int(words[1]))
    return doctor(words)


if __name__ == "__main__":
    sys.exit(main())
