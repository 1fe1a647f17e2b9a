"""The check of all hosts before a start: named checks, each with the command that fixes what it found.

    ./launch --hostfile hostfile --preflight-only [--json] -- train.py --config configs/X.yaml

Every host is asked for facts (lib/launch/host_facts.py) by a process that is reached over ssh as a run's agent is, all
at once; pure functions turn them into findings (lib/launch/preflight_verdicts.py). Then the hosts measure the links
between them (lib/launch/link_probe.py), and last all ranks add up a number over the backend
(lib/launch/sum_check.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.text import Text

from lib.errors import UserError, shown
from lib.launch import attempt, hostfile, rank_console, remote_process, ssh, topology
from lib.launch.agent_messages import Message
from lib.launch.host_facts import LIMIT_SECONDS, digest_or_why, packages, project_digests
from lib.launch.hostfile import Host
from lib.launch.job import ROOT, Job, ports_of
from lib.launch.link_probe import LinkReport
from lib.launch.preflight_verdicts import (
    FACT_CHECKS,
    Context,
    Finding,
    OwnFacts,
    findings_of,
    link_findings,
    links_to_measure,
    refused,
)
from lib.launch.run_needs import Needs, model_bytes, needs_of
from lib.system import os_commands
from lib.system.terminal import Terminal

Process = asyncio.subprocess.Process


def run(job: Job, as_json: bool, min_mbit: float, max_round_trip_ms: float) -> bool:
    """Checks every host and prints the findings; returns whether all may start.

    Raises:
        UserError: the configuration is wrong.
    """
    began = time.perf_counter()
    needs = needs_of(job)
    findings = asyncio.run(examine(job, needs, min_mbit * 1e6 / 8, max_round_trip_ms / 1e3))
    passed = not any(finding.status == "failed" for finding in findings)
    if as_json:
        seconds = time.perf_counter() - began
        print(json.dumps({"passed": passed, "seconds": seconds, "findings": [asdict(finding) for finding in findings]}))
    else:
        show(job.hosts, findings, time.perf_counter() - began)
    return passed


# ---- Asking the hosts


async def examine(job: Job, needs: Needs, floor_bytes_per_second: float, ceiling_seconds: float) -> list[Finding]:
    """All checks on all hosts."""
    hosts, ports = job.hosts, ports_of(job)
    requests = _requests(job, needs, ports)
    here = _own_facts(needs)
    answers = await asyncio.gather(
        *(ask_facts(job, host, request) for host, request in zip(hosts, requests, strict=True))
    )
    findings = [answer for _, answer in answers if isinstance(answer, Finding)]
    facts = {host.name: answer for host, (_, answer) in zip(hosts, answers, strict=True) if isinstance(answer, dict)}
    reached = [host for host in hosts if host.name in facts]
    systems = {name: str(of_host["system"]) for name, of_host in facts.items()}
    context = Context(here, needs, job, model_bytes(needs), systems)
    findings += findings_of(reached, facts, context)
    processes = {host.name: process for host, (process, _) in zip(hosts, answers, strict=True) if process is not None}
    try:
        if len(reached) > 1:
            links = await _measure_links(job, reached, processes, ports)
            findings += link_findings(links, floor_bytes_per_second, ceiling_seconds, context)
    finally:
        for process in processes.values():
            remote_process.kill(process)
            await process.wait()
    if not any(finding.status == "failed" for finding in findings):
        findings += await _sum_over_ranks(job, context)
    return findings


def _requests(job: Job, needs: Needs, ports: Mapping[str, Sequence[int]]) -> list[dict[str, object]]:
    """What each host is asked for. mpirun starts from the first host, which has to reach the others by ssh."""
    others = [host.name for host in job.hosts[1:]] if job.backend == "mpi" else []
    common = {**asdict(needs), "rdma": job.backend in topology.RDMA_BACKENDS}
    return [
        {**common, "ports": ports[host.name], "addresses": host.addresses, "ssh_to": others if index == 0 else []}
        for index, host in enumerate(job.hosts)
    ]


def _own_facts(needs: Needs) -> OwnFacts:
    with contextlib.chdir(ROOT):
        return {
            "project": project_digests(),
            "packages": packages(),
            "files": {path: digest_or_why(Path(path).expanduser()) for path in needs.files},
        }


async def ask_facts(job: Job, host: Host, request: Mapping[str, object]) -> tuple[Process | None, Message | Finding]:
    """A host's facts, and the process that gave them; or why there are none."""
    module = "lib.launch.host_facts"
    is_alone = len(job.hosts) == 1 and ssh.is_this_machine(host)
    process = await remote_process.start(
        [job.python, "-m", module] if is_alone else ssh.remote_command(job, host, module)
    )
    assert process.stdin is not None and process.stdout is not None
    began = time.time()
    answer = None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        limit_seconds = ssh.CONNECT_SECONDS + LIMIT_SECONDS + 3
        async with asyncio.timeout(limit_seconds):
            answer = await remote_process.first_object(process.stdout, "clock")
    except (TimeoutError, ConnectionError):
        pass
    finally:
        error = await remote_process.last_error_line(process) if answer is None else ""
    if answer is not None:
        ended = time.time()
        if isinstance(answer["clock"], float):
            ahead = answer["clock"] - (began + ended) / 2
            answer["clock"] = {"ahead_seconds": ahead, "unsure_seconds": (ended - began) / 2}
        return process, answer
    return None, why_no_facts(job, host, error, process.returncode)


def why_no_facts(job: Job, host: Host, error: str, status: int | None) -> Finding:
    """Why a host gave none, from its last error line and its exit status."""
    own: OwnFacts = {"project": {}, "packages": {}, "files": {}}
    context = Context(own, Needs(), job, 0)
    if (verdict := refused(host, error, context)) is not None:
        return Finding(host.name, "project", *verdict)
    if "cd:" in error or "can't cd" in error:
        copy = ssh.project_copy_command(host, job.directory)
        return Finding(host.name, "project", "failed", f"{job.directory} is not there", copy)
    if status not in (255, -signal.SIGKILL):  # neither ssh's own, nor ended by us
        return Finding(host.name, "packages", "failed", error, context.there(host, "make setup"))
    return Finding(host.name, "ssh", "failed", error, *ssh.ssh_remedy(host.name, error, os_commands.is_mac()))


async def _ask_link(process: Process, question: Mapping[str, object]) -> LinkReport:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            line = await process.stdout.readline()
    except TimeoutError:
        remote_process.kill(process)  # its answer, once it comes, would be taken for the next one
        return {"error": f"no answer within {LIMIT_SECONDS:g} s"}
    answer: LinkReport = json.loads(line) if line else {"error": "its end broke off"}
    return answer


async def _measure_links(
    job: Job, hosts: Sequence[Host], processes: Mapping[str, Process], ports: Mapping[str, Sequence[int]]
) -> dict[tuple[str, str], LinkReport]:
    """Every two hosts that will connect, one pair after the other, at the ports of the run where they are free."""
    listening: dict[str, LinkReport] = {}
    token = secrets.token_hex(32)
    for host in hosts:
        process = processes[host.name]
        answer = await _ask_link(process, {"listen": next(iter(ports[host.name]), 0), "token": token})
        listening[host.name] = answer if "port" in answer else await _ask_link(process, {"listen": 0, "token": token})
    links: dict[tuple[str, str], LinkReport] = {}
    for one, other in links_to_measure(job, hosts):
        try:
            named = await asyncio.get_running_loop().run_in_executor(None, hostfile.address, other, job.hosts)
        except UserError as error:
            links[one.name, other.name] = {"error": str(error)}
            continue
        port = listening[other.name].get("port", 0)
        for address in other.addresses or (named,):  # the worst of its links is the one that counts
            link = await _ask_link(processes[one.name], {"address": address, "port": port, "token": token})
            link["address"] = address
            slowest = links.get((one.name, other.name), {"bytes_per_second": float("inf")})
            if "error" not in slowest and link.get("bytes_per_second", 0.0) < slowest["bytes_per_second"]:
                links[one.name, other.name] = link
    return links


async def _sum_over_ranks(job: Job, context: Context) -> list[Finding]:
    """The backend's own sum, started as the run will be."""
    output: list[str] = []
    console = rank_console.Quiet(output)
    environment = {**job.environment, "TANDEM_RANKS": str(job.size)}
    command = (job.python, "-m", "lib.launch.sum_check")
    check = replace(job, command=command, environment=environment, wedged_seconds=LIMIT_SECONDS)
    names = [host.name for host in job.hosts]
    remedy = context.again("--backend", "ring" if job.backend == "mpi" else "mpi")
    note = f"whether it is {job.backend} that fails"
    try:
        async with asyncio.timeout(2 * LIMIT_SECONDS):
            outcome = await attempt.Attempt(check, console).go(asyncio.Queue())
    except TimeoutError:
        message = f"no sum over {job.backend} within {2 * LIMIT_SECONDS:g} s"
        return [Finding(name, "backend", "failed", message, remedy, note) for name in names]
    if outcome.status == 0:
        return [Finding(name, "backend", "ok", job.backend) for name in names]
    reason = outcome.fault.message if outcome.fault else ""
    message = next((line for line in reversed(output) if line.strip()), "") or reason
    blamed = [name for name in names if outcome.fault is None or name in outcome.fault.hosts] or names
    return [Finding(name, "backend", "failed", message, remedy, note) for name in blamed]


# ---- The page


def show(hosts: Sequence[Host], findings: Sequence[Finding], seconds: float) -> None:
    """Prints a line for each check, and under them the findings with their remedies."""
    say = Terminal(stderr=True)
    say.line(f"preflight of {len(hosts)} host{'s' * (len(hosts) != 1)}, {seconds:.1f} s", "bold")
    names = {host.name for host in hosts}
    for check in (*FACT_CHECKS, "links", "backend"):
        of_check = [finding for finding in findings if finding.check == check]
        if not of_check:
            continue
        parts = []
        for status, word, style in (("failed", "FAILED on", "bold red"), ("told", "note on", "bold magenta")):
            if concerned := list(dict.fromkeys(finding.host for finding in of_check if finding.status == status)):
                parts.append(Text.assemble((word, style), f" {', '.join(concerned)}"))
        if unasked := sorted(names - {finding.host for finding in of_check}):
            parts.append(Text(f"not asked of {', '.join(unasked)}", "dim"))
        say.line(Text("; ").join(parts) if parts else Text("ok", "green"), lead=Text(f"  {check:<13}", "dim"))
    for finding in findings:
        if finding.status != "ok" or finding.check == "links":
            say.line(f"{finding.host}, {finding.check}: {finding.message}")
            if finding.remedy:  # in one piece, to be copied
                say.console.print(Text(f"    {shown(finding.remedy)}"), soft_wrap=True)
            if finding.note:
                say.line(f"({finding.note})", lead="    ")
    failed = sum(finding.status == "failed" for finding in findings)
    say.line(f"{failed} failed: nothing was started" if failed else "nothing stands in the way", "bold")
