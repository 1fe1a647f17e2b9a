"""Whether training can run: on this machine (the doctor), or on all hosts of a job (./launch --preflight-only).

    python -m lib.launch.preflight [--json]        make doctor: a page to attach to a report
    python -m lib.launch.preflight host            ./launch starts this on every host, with a request as its input
    python -m lib.launch.preflight sum RANKS       a rank of the trial: all add up a number and measure their links

Exit status of the doctor: 0 if training can run here, 1 if something that it needs is broken.
"""

from __future__ import annotations

import contextlib
import glob
import json
import queue
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from lib.config import command_line, train_arguments
from lib.data.sources import weights_of
from lib.environment import ROOT
from lib.errors import UserError, shown
from lib.launch import checks, ssh
from lib.launch.checks import Finding, Needs, Request
from lib.launch.hostfile import Host
from lib.launch.job import RDMA_BACKENDS, Job, ports_of
from lib.launch.launcher import Console, Start, is_local
from lib.system import hardware, mpi_and_blas, network, os_commands, terminal

if TYPE_CHECKING:
    from lib.distributed.world import World

ANSWER, LINKS = "tandem-preflight ", "tandem-links "  # before what is for this program among a host's or rank's lines
ROUND_TRIPS = 20
LINK_BYTES = 2**20  # 0.1 s at 100 Mbit/s
SLOW_BYTES_PER_SECOND, SLOW_SECONDS = 12.5e6, 0.05
TRIAL_SECONDS = 15.0
LIMIT_SECONDS = 30.0  # of a host's checks
STYLES = {"ok": "green", "note": "bold magenta", "failed": "bold red"}


def again(typed: Sequence[str], *options: str) -> str:
    """The launcher's command line, with further options. typed: the words after ./launch."""
    cut = list(typed).index("--") if "--" in typed else len(typed)
    return shlex.join(["./launch", *typed[:cut], *options, *typed[cut:]])


def run(job: Job, typed: Sequence[str], as_json: bool) -> bool:
    """Checks every host and prints the findings; returns whether the job can start. typed: as `again` has it.

    Raises UserError: the configuration is wrong.
    """
    began = time.perf_counter()
    findings = examine(job, needs_of(job), typed)
    failed, seconds = sum(one.status == "failed" for one in findings), time.perf_counter() - began
    if as_json:
        print(json.dumps({"passed": not failed, "seconds": seconds, "findings": [asdict(one) for one in findings]}))
    else:
        title = f"preflight of {len(job.hosts)} host{'s' * (len(job.hosts) != 1)}, {seconds:.1f} s"
        verdict = f"{failed} failed: nothing was started" if failed else "nothing stands in the way"
        show(findings, title, verdict, terminal.Terminal(stderr=True))
    return not failed


def needs_of(job: Job) -> Needs:
    """What the run's configuration needs of every host; of a command that is not train.py little is known.

    Raises UserError: the configuration is wrong.
    """
    if Path(job.command[0]).name != "train.py":
        return Needs(run_dir=None)
    with contextlib.chdir(ROOT):
        options = train_arguments.parse(list(job.command[1:]), None)
        config = train_arguments.read_config(options)
        models = [path for path in (config.model.path, config.model.reference) if path != "initial"]
        local = [path for path in models if Path(path).exists() or path.startswith((".", "/", "~"))]
        sources = [name for name in weights_of(config.data.train) if not glob.has_magic(name) and "://" not in name]
        file = None if options.resume else options.config or train_arguments.QUICKSTART
        named = [file, *sources, config.data.valid, config.evaluate.answers, config.model.adapter, *local]
        digests = {path: checks.digest(Path(path)) for path in dict.fromkeys(str(path) for path in named if path)}
        weights = [file.stat().st_size for path in local for file in Path(path).expanduser().glob("*.safetensors")]
    share = 3 if config.model.method == "full" else 0.15  # of the weights' size that a checkpoint has
    disk = sum(weights) * share * (config.checkpoint.keep + 1) + 2**26
    return Needs(run_dir=config.run.dir, weight_bytes=sum(weights), disk_bytes=disk, files=digests)


# ---- Asking the hosts


def examine(job: Job, needs: Needs, typed: Sequence[str]) -> list[Finding]:
    """All checks on all hosts, then a trial of the backend. RDMA that fails is a note: ./launch goes on over ring."""
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        answers = pool.map(lambda host: ask_host(job, host, request_of(job, host, needs, typed)), job.hosts)
        findings = [one for of_host in answers for one in of_host]
    if any(one.status == "failed" for one in findings):
        return findings
    trial = try_backend(job, typed)
    if job.backend in RDMA_BACKENDS:
        trial = [replace(one, status="note", remedy="", note="ring is taken") if one.remedy else one for one in trial]
    return findings + trial


def ask_host(job: Job, host: Host, request: Request) -> list[Finding]:
    """The findings of a host, or why it gave none."""
    words = [job.python, "-m", "lib.launch.preflight", "host"]
    words = words if is_local(job, host) else ssh.remote_command(job, host, "lib.launch.preflight host")
    seconds = ssh.CONNECT_SECONDS + LIMIT_SECONDS
    done = os_commands.run(words, seconds, ROOT, text=json.dumps(asdict(request)))
    for line in done.output.splitlines():  # a login shell may print something before
        if line.startswith(ANSWER):
            return [Finding(**one) for one in json.loads(line.removeprefix(ANSWER))]
    error = (done.errors.strip().splitlines() or [f"no answer within {seconds:g} s"])[-1]
    if done.status == 127 and words[0] in error:
        raise UserError(f"{error.replace(':', ' does not start on this machine:', 1)}; --python names another")
    check, remedy, note = ssh.remedy(host, error, job.directory_of(host))
    return [Finding("failed", error, remedy, note, check, host.name)]


def request_of(job: Job, host: Host, needs: Needs, typed: Sequence[str]) -> Request:
    """What a host is checked for."""
    paths = {path: job.path_on(host, path) for path in (*needs.files, *filter(None, [needs.run_dir]))}
    return Request(
        host=host.name,
        port=host.port,
        directory=job.directory_of(host),
        slots=host.slots,
        needs=needs,
        paths=paths,
        project=checks.project_digests(),
        packages=checks.packages(),
        ports=ports_of(job)[host.name],
        addresses=host.addresses,
        other_port=again(typed, "--starting-port", str(job.starting_port + 1000)),
    )


def answer() -> None:
    """Checks this host for the request on the standard input, and prints the findings."""
    question = json.loads(sys.stdin.read())
    request = Request(**{**question, "needs": Needs(**question["needs"])})
    findings = checks.examine(request, checks.OF_A_HOST)
    print(f"\n{ANSWER}{json.dumps([asdict(one) for one in findings])}", flush=True)


# ---- The trial: the ranks add up a number and measure their links, started as the run will be


def try_backend(job: Job, typed: Sequence[str]) -> list[Finding]:
    """Whether all ranks can add up a number, and how fast the links between neighbouring hosts are."""
    console, interrupts = Console(lines=[]), queue.SimpleQueue[int]()
    check = replace(job, command=("-m", "lib.launch.preflight", "sum", str(job.size)), wedged_seconds=TRIAL_SECONDS)
    timer = threading.Timer(2 * TRIAL_SECONDS, interrupts.put, [15])
    timer.daemon = True
    timer.start()
    outcome = Start(check, console).run(interrupts)
    timer.cancel()
    names, lines = [host.name for host in job.hosts], [line for line in console.lines or [] if line.strip()]
    if outcome.status == 0:
        links = [Link(*one) for line in lines if line.startswith(LINKS) for one in json.loads(line[len(LINKS) :])]
        works = [Finding("ok", job.backend, check="backend", host=name) for name in names]
        return works + link_findings(job, links)
    fault = outcome.fault.message if outcome.fault else f"no sum within {2 * TRIAL_SECONDS:g} s"
    remedy = again(typed, "--backend", "mpi" if job.backend == "ring" else "ring")
    note = f"whether it is this backend: only ring joins Macs and Linux; is a firewall on at port {job.starting_port}"
    blamed = [name for name in names if outcome.fault is None or name in outcome.fault.hosts] or names
    message = f"{job.backend}: {lines[-1] if lines else fault}"
    return [Finding("failed", message, remedy, note, "backend", name) for name in blamed]


class Link(NamedTuple):
    """A measured link between two neighbouring ranks."""

    rank: int
    other: int
    bytes_per_second: float  # there and back
    round_trip_seconds: float


def link_findings(job: Job, links: Sequence[Link]) -> list[Finding]:
    """Every measured link, as findings of the first host of each."""
    findings, names = [], job.host_names
    addresses = {host.name: " and ".join(host.addresses) for host in job.hosts}
    for link in links:
        other, rate, trip = names[link.other], link.bytes_per_second, link.round_trip_seconds
        at = f" at {addresses[other]}" if addresses[other] not in other else ""
        message = f"to {other}{at}, {job.backend}: {rate * 8 / 1e6:,.0f} Mbit/s, {trip * 1e3:.2f} ms"
        is_slow = rate < SLOW_BYTES_PER_SECOND or trip > SLOW_SECONDS
        note = "slow; better a cable than Wi-Fi" if is_slow else ""
        findings.append(Finding("note" if is_slow else "ok", message, "", note, "links", names[link.rank]))
    return findings


def add_up(ranks: int) -> int:
    """One rank's part of the trial; returns its exit status. Rank 0 prints the links."""
    launch = mpi_and_blas.launch_environment()
    mpi_and_blas.prepare()
    import mlx.core as mx

    from lib.distributed import world as distributed

    world = distributed.start(launch, timeout_seconds=TRIAL_SECONDS)
    total = world.all_sum(mx.array([2**world.rank % 97, 1], dtype=mx.int32), "the check's sum").tolist()
    if total != [sum(2**rank % 97 for rank in range(ranks)), ranks]:
        print(f"error: the sum over {ranks} ranks is {total}, in a world of {world.size}")
        return 1
    if links := _measured_links(world):
        print(LINKS + json.dumps(links), flush=True)
    return 0


def _measured_links(world: World) -> list[Link]:
    """Rank 0's list of the links between hosts, which ranks measure one after the other."""
    import mlx.core as mx

    from lib.distributed.links import links_of

    if world.size == 1:
        return []
    links, mine = links_of(world), ""

    def seconds_of(size: int, other: int) -> float:
        array = mx.zeros(size, mx.int8)
        mx.eval(array)
        began = time.perf_counter()
        mx.eval(links.exchange(array, other, "the measurement of a link"))
        links.finish("the measurement of a link")
        return time.perf_counter() - began

    for rank in range(1 if world.size == 2 else world.size):
        pair = (rank, (rank + 1) % world.size)
        if world.rank in pair and links.hosts[pair[0]] != links.hosts[pair[1]]:
            other = pair[world.rank == pair[0]]
            trips = sorted(seconds_of(8, other) for _ in range(ROUND_TRIPS))
            seconds = min(seconds_of(LINK_BYTES, other) for _ in range(2))
            link = Link(*pair, 2 * LINK_BYTES / seconds, trips[len(trips) // 2])
            mine = json.dumps(link) if world.rank == pair[0] else mine
        world.gather_text("", "the measurement of another link")
    return [Link(*json.loads(text)) for text in world.gather_text(mine, "the links") if text]


# ---- The page


def show(findings: Sequence[Finding], title: str, verdict: str, say: terminal.Terminal) -> None:
    """Prints a line for each check, or for each host where it found something, with the remedy in one piece."""
    say.line(title, "bold")
    for check in dict.fromkeys(one.check for one in findings):
        of_check = [one for one in findings if one.check == check]
        for one in [one for one in of_check if one.status != "ok" or check == "links"] or of_check[:1]:
            host = one.host if one.status != "ok" or check == "links" else ""
            lead = Text.assemble((f"  {check:<13}", "dim"), (f"{one.status:<8}", STYLES[one.status]))
            say.line(f"{host}: {one.message}" if host else one.message or "-", lead=lead)
            if one.remedy:
                say.console.print(Text(f"    {shown(one.remedy)}"), soft_wrap=True)
            if one.note:
                say.line(f"({one.note})", lead="    ")
    say.line(verdict, "bold")


@mpi_and_blas.reported
def doctor(words: Sequence[str]) -> int:
    """Prints the page of this machine; returns the exit status."""
    parser = command_line.Parser(prog="doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the page as one JSON object")
    options = parser.parse_args(list(words))
    findings = checks.examine(Request(), checks.OF_THIS_MACHINE)
    broken = [one.check for one in findings if one.status == "failed"]
    passed = not set(broken) & set(checks.NEEDED)
    header = {"host": network.own_name(), "os": hardware.operating_system(), "processor": hardware.processor_name()}
    if options.json:
        listed = [{**asdict(one), "needed": one.check in checks.NEEDED} for one in findings]
        print(json.dumps({**header, "can_train": passed, "checks": listed}))
        return 0 if passed else 1
    verdict = "training can run here" if passed else "training cannot run here"
    if passed and broken:
        verdict += f"; on several machines or ranks it needs what failed: {', '.join(broken)}"
    show(findings, f"{header['host']}: {header['processor']}, {header['os']}", verdict, terminal.Terminal())
    return 0 if passed else 1


def main() -> int:
    """What the command line asks for; returns the exit status."""
    words = sys.argv[1:]
    if words == ["host"]:
        answer()
    elif words == ["compute"]:
        print(json.dumps(checks.compute()))
    else:
        return add_up(int(words[1])) if words[:1] == ["sum"] else doctor(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
