"""Is all well on every host? Named checks, each with the command that mends what it found, before anything is started.

    ./launch --hostfile hostfile --preflight-only [--json] -- train.py --config configs/X.yaml

Every host is asked for facts in a process of its own, reached over ssh as a run reaches it (lib/launch/host_facts.py), all at
once; pure functions judge them (lib/launch/verdicts.py). Then the hosts measure the links between
every two of them, and last all ranks add up a number over the backend that the run will use.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import itertools
import json
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lib.config import train_arguments
from lib.data.sources import weights_of
from lib.errors import UserError
from lib.launch import agent_link, attempt, hostfile, rank_console, topology
from lib.launch.host_facts import LIMIT_SECONDS, digest_or_why, packages, project_digests
from lib.launch.hostfile import Host
from lib.launch.ranks import ROOT, Launching
from lib.launch.verdicts import JUDGES, Context, Finding, Needs, judge, judge_links, links_to_measure, mend_ssh, refused
from lib.system import files, os_commands


def needs_of(launching: Launching) -> Needs:
    """Read off the run's configuration; of a command that is not train.py nothing is known.

    Raises:
        UserError: the configuration is wrong.
    """
    if Path(launching.command[0]).name != "train.py":
        return Needs()
    with contextlib.chdir(ROOT):
        options = train_arguments.parse(list(launching.command[1:]), None)
        config = train_arguments.read_config(options)
    own_file = None if options.resume else options.config or train_arguments.QUICKSTART
    local_sources = [name for name in weights_of(config.data.train) if not glob.has_magic(name) and "://" not in name]
    paths = [own_file, *local_sources, config.data.valid, config.evaluate.answers, config.model.adapter]
    models = [config.model.path, *([] if config.model.reference == "initial" else [config.model.reference])]
    local = [
        path for path in models if (ROOT / path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1
    ]
    return Needs(
        files=tuple(dict.fromkeys([*(path for path in paths if path), *local])),
        models=tuple(path for path in models if path not in local),
        run_dir=config.run.dir,
        calibration_dir=config.plan.calibration_dir,
        require_calibration=config.plan.require_calibration,
        method=config.model.method,
        checkpoints=config.checkpoint.keep + 1,
    )


def _ports(launching: Launching) -> dict[str, list[int]]:
    """The ports that each host's ranks will listen at."""
    if launching.backend == "ring":
        counts = [host.slots * max(1, len(host.addresses)) * launching.connections_per_ip for host in launching.hosts]
    else:
        counts = [1 if launching.backend != "mpi" and index == 0 else 0 for index in range(len(launching.hosts))]
    first = itertools.accumulate([launching.starting_port, *counts[:-1]])
    return {
        host.name: list(range(start, start + count))
        for host, start, count in zip(launching.hosts, first, counts, strict=True)
    }


def _bytes_of(needs: Needs) -> int:
    """Of the model's weights, where this machine has them."""
    folders = [ROOT / Path(path).expanduser() for path in needs.files]
    weights = (file for folder in folders if folder.is_dir() for file in folder.glob("*.safetensors"))
    return sum(file.stat().st_size for file in weights if not files.is_litter(file.name))


# ---- Here: asking


async def examine(
    launching: Launching, needs: Needs, floor_bytes_per_second: float, ceiling_seconds: float
) -> list[Finding]:
    """All checks on all hosts."""
    hosts = launching.hosts
    ports = _ports(launching)
    others = [host.name for host in hosts[1:]] if launching.backend == "mpi" else []
    request = {**asdict(needs), "rdma": launching.backend in topology.RDMA_BACKENDS}
    asked = [
        {**request, "ports": ports[host.name], "addresses": host.addresses, "ssh_to": others if index == 0 else []}
        for index, host in enumerate(hosts)
    ]
    with contextlib.chdir(ROOT):
        here = {
            "project": project_digests(),
            "packages": packages(),
            "files": {path: digest_or_why(Path(path).expanduser()) for path in needs.files},
        }
    conversations = await asyncio.gather(
        *(_ask(launching, host, words) for host, words in zip(hosts, asked, strict=True))
    )
    answered = {
        host.name: found for host, (_, found) in zip(hosts, conversations, strict=True) if isinstance(found, dict)
    }
    findings = [found for _, found in conversations if isinstance(found, Finding)]
    reached = [host for host in hosts if host.name in answered]
    systems = {name: str(found["system"]) for name, found in answered.items()}
    context = Context(here, needs, launching, _bytes_of(needs), systems)
    findings += judge(reached, answered, context)
    speakers = {
        host.name: process for host, (process, _) in zip(hosts, conversations, strict=True) if process is not None
    }
    try:
        if len(reached) > 1:
            links = await _measure_links(launching, reached, speakers, ports)
            findings += judge_links(links, floor_bytes_per_second, ceiling_seconds, context)
    finally:
        for process in speakers.values():
            agent_link.kill(process)
            await process.wait()
    failed = {finding.host for finding in findings if finding.status == "failed"}
    if not failed:
        findings += await _sum_over_ranks(launching, context)
    return findings


async def _ask(
    launching: Launching, host: Host, request: Mapping[str, Any]
) -> tuple[asyncio.subprocess.Process | None, dict[str, Any] | Finding]:
    """A host's facts, and the process that gave them; or why there are none."""
    alone = len(launching.hosts) == 1 and agent_link.is_this_machine(host)
    words = (
        [launching.python, "-m", "lib.launch.host_facts"]
        if alone
        else agent_link.remote_words(launching, host, "lib.launch.host_facts")
    )
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
        limit=2**24,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    began = time.time()
    answer = None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        limit_seconds = agent_link.CONNECT_SECONDS + LIMIT_SECONDS + 3
        answer = await asyncio.wait_for(agent_link.first_words(process.stdout, "clock"), limit_seconds)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        last = await agent_link.last_words(process) if answer is None else ""
    if answer is not None:
        ended = time.time()
        if isinstance(answer["clock"], float):
            ahead = answer["clock"] - (began + ended) / 2
            answer["clock"] = {"ahead_seconds": ahead, "unsure_seconds": (ended - began) / 2}
        return process, answer
    return None, _no_facts(launching, host, last, process.returncode)


def _no_facts(launching: Launching, host: Host, last: str, status: int | None) -> Finding:
    """Why a host gave none, from its last line and exit status."""
    context = Context({}, Needs(), launching, 0)
    if (verdict := refused(host, last, context)) is not None:
        return Finding(host.name, "project", *verdict)
    directory = shlex.quote(launching.directory)
    if "cd:" in last or "can't cd" in last:
        making, here = shlex.quote(agent_link.rsync_making(launching.directory)), shlex.quote(f"{ROOT}/")
        copy = f"rsync -a {making} --exclude=.git --exclude=.venv --exclude=runs {here} {host.name}:{directory}/"
        return Finding(host.name, "project", "failed", f"{launching.directory} is not there", copy)
    if status not in (255, -signal.SIGKILL):  # neither ssh's own, nor ended by us
        return Finding(host.name, "packages", "failed", last, context.there(host, "make setup"))
    return Finding(host.name, "ssh", "failed", last, *mend_ssh(host.name, last, os_commands.is_mac()))


async def _measure_links(
    launching: Launching,
    hosts: Sequence[Host],
    speakers: Mapping[str, asyncio.subprocess.Process],
    ports: Mapping[str, Sequence[int]],
) -> dict[tuple[str, str], Any]:
    """Every two hosts that will connect, one after the other, at the ports of the run where they are free."""

    async def ask(host: Host, **words: Any) -> Any:
        process = speakers[host.name]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(words).encode() + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), LIMIT_SECONDS)
        except TimeoutError:
            agent_link.kill(process)  # its answer, once it comes, would be taken for the next one
            return {"error": f"no answer within {LIMIT_SECONDS:g} s"}
        return json.loads(line) if line else {"error": "its end broke off"}

    listening = {}
    for host in hosts:
        answer = await ask(host, listen=next(iter(ports[host.name]), 0))
        listening[host.name] = answer if "port" in answer else await ask(host, listen=0)
    links = {}
    for one, other in links_to_measure(launching, hosts):
        try:
            named = await asyncio.get_running_loop().run_in_executor(None, hostfile.address, other, launching.hosts)
        except UserError as error:
            links[one.name, other.name] = {"error": str(error)}
            continue
        port = listening[other.name].get("port", 0)
        for address in other.addresses or (named,):  # the worst of its links is the one that counts
            link = {**await ask(one, address=address, port=port), "address": address}
            known = links.get((one.name, other.name), {"bytes_per_second": float("inf")})
            if "error" not in known and link.get("bytes_per_second", 0.0) < known["bytes_per_second"]:
                links[one.name, other.name] = link
    return links


async def _sum_over_ranks(launching: Launching, context: Context) -> list[Finding]:
    """The backend's own sum, started as the run will be."""
    said: list[str] = []
    console = rank_console.Quiet(said)
    environment = {**launching.environment, "TANDEM_RANKS": str(launching.size)}
    words = (launching.python, "-m", "lib.launch.host_facts", "all-sum")
    check = replace(launching, command=words, environment=environment, wedged_seconds=LIMIT_SECONDS)
    names = [host.name for host in launching.hosts]
    other = context.again("--backend", "ring" if launching.backend == "mpi" else "mpi")
    note = f"whether it is {launching.backend} that fails"
    try:
        outcome = await asyncio.wait_for(attempt.Attempt(check, console).go(asyncio.Queue()), 2 * LIMIT_SECONDS)
    except TimeoutError:
        message = f"no sum over {launching.backend} within {2 * LIMIT_SECONDS:g} s"
        return [Finding(name, "backend", "failed", message, other, note) for name in names]
    if outcome.status == 0:
        return [Finding(name, "backend", "ok", launching.backend) for name in names]
    message = next((line for line in reversed(said) if line.strip()), "") or (
        outcome.fault.message if outcome.fault else ""
    )
    blamed = [name for name in names if outcome.fault is None or name in outcome.fault.hosts] or names
    return [Finding(name, "backend", "failed", message, other, note) for name in blamed]


def run(launching: Launching, as_json: bool, min_mbit: float, max_round_trip_ms: float) -> bool:
    """Checks every host and prints what was found; returns whether all may start.

    Raises:
        UserError: the configuration is wrong.
    """
    began = time.perf_counter()
    needs = needs_of(launching)
    findings = asyncio.run(examine(launching, needs, min_mbit * 1e6 / 8, max_round_trip_ms / 1e3))
    passed = not any(finding.status == "failed" for finding in findings)
    if as_json:
        seconds = time.perf_counter() - began
        print(json.dumps({"passed": passed, "seconds": seconds, "findings": [asdict(finding) for finding in findings]}))
    else:
        show(launching.hosts, findings, time.perf_counter() - began)
    return passed


def show(hosts: Sequence[Host], findings: Sequence[Finding], seconds: float) -> None:
    """A line a check, and under them what is worth a word, with the commands."""
    from rich.text import Text

    from lib.system.terminal import Voice

    say = Voice(stderr=True)
    say.line(f"preflight of {len(hosts)} host{'s' * (len(hosts) != 1)}, {seconds:.1f} s", "bold")
    names = {host.name for host in hosts}
    for check in (*JUDGES, "links", "backend"):
        of_check = [finding for finding in findings if finding.check == check]
        if not of_check:
            continue
        parts = []
        for status, word, style in (("failed", "FAILED on", "bold red"), ("told", "note on", "bold magenta")):
            if found := list(dict.fromkeys(finding.host for finding in of_check if finding.status == status)):
                parts.append(Text.assemble((word, style), f" {', '.join(found)}"))
        if unasked := sorted(names - {finding.host for finding in of_check}):
            parts.append(Text(f"not asked of {', '.join(unasked)}", "dim"))
        say.line(Text("; ").join(parts) if parts else Text("ok", "green"), lead=Text(f"  {check:<13}", "dim"))
    for finding in findings:
        if finding.status != "ok" or finding.check == "links":
            say.line(f"{finding.host}, {finding.check}: {finding.message}")
            if finding.remedy:  # in one piece, to be copied
                say.console.print(Text(f"    {finding.remedy}"), soft_wrap=True)
            if finding.note:
                say.line(f"({finding.note})", lead="    ")
    failed = sum(finding.status == "failed" for finding in findings)
    say.line(f"{failed} failed: nothing was started" if failed else "nothing stands in the way", "bold")
