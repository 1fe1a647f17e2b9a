"""A host's name in a run: fixed once by the launcher, the same for every rank over ring and mpirun, and one for each machine."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lib.launch.agent_link import Link
from lib.launch.attempt import Attempt, HostNames
from lib.launch.patience import Punctuality
from lib.launch.rank_console import Quiet

from lib.distributed import world
from lib.distributed.world import World
from lib.launch import attempt, ssh
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.system import network
from tests.cluster import Host as Machine
from tests.tiny import ROOT

ASKS = "from lib.system import network; import socket; print('name', network.host_name(), socket.gethostname())"


@pytest.mark.parametrize("backend", ["ring", "mpi"], ids=["ring", "mpirun"])  # a bare "mpi" is a mark
def test_every_rank_keeps_the_name_that_its_host_had_when_the_launch_began(
    three_hosts: list[Machine], backend: str
) -> None:
    """Each rank renames its host first, as a network does with a Mac."""
    words = ["--hosts", "host-a:1,host-b:1", "--backend", backend, "--no-preflight"]
    renames = ["sh", "-c", 'hostname cafe-17; exec "$@"', "sh", sys.executable, "-c", ASKS]
    try:
        done = three_hosts[0].run([sys.executable, ROOT / "launch", *words, "--", *renames])
    finally:
        for host in three_hosts[:2]:
            assert host.run(["hostname", host.name]).returncode == 0
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition("name ")[2] for line in done.stdout.splitlines() if "name " in line)
    assert said == ["host-a cafe-17", "host-b cafe-17"]


def test_a_name_that_changes_while_a_run_lasts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network.own_name.cache_clear()
    first = network.own_name()
    monkeypatch.setattr(network.socket, "gethostname", lambda: "dhcp-17.cafe.example")
    assert network.own_name() == first, "a process is asked once"
    network.own_name.cache_clear()
    assert network.own_name() == "dhcp-17"
    monkeypatch.setenv(network.HOST, first)
    assert network.host_name() == network.host_name() == first, "a rank has it from its launcher"
    network.own_name.cache_clear()


class FakeLink:
    """A host's agent that takes everything."""

    is_local, closed = False, False

    def __init__(self, host: Host, machine: str, identity: str):
        self.name, self.machine, self.identity = host.name, machine, identity
        self.sent: list[dict[str, Any]] = []
        self.punctuality = Punctuality(1.0, 0.0)

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})

    def drop(self) -> None:
        return


def test_the_launcher_tells_two_machines_of_one_name_apart() -> None:
    hosts = (Host("10.0.0.1"), Host("10.0.0.2"), Host("10.0.0.3"))
    job = Job(hosts, "nccl", ("train.py",))
    identities = [("MacBook-Pro", "1111aaaa"), ("MacBook-Pro", "2222bbbb"), ("studio", "3333cccc")]
    links = {host.name: FakeLink(host, *identity) for host, identity in zip(hosts, identities, strict=True)}

    async def start() -> None:
        await Attempt(job, Quiet([]), links=links).start_ranks()  # type: ignore[arg-type]

    asyncio.run(start())
    names = [link.sent[0]["host"] for link in links.values()]
    assert names == ["MacBook-Pro-1111", "MacBook-Pro-2222", "studio"]


def test_a_host_that_speaks_gets_the_time_that_its_agent_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """To give a large model's memory back takes seconds after SIGKILL. Who says nothing is not waited for as long."""
    for name, seconds in (("END_ANSWER_SECONDS", 0.2), ("KILLED_SECONDS", 1.0), ("LAST_WORDS_SECONDS", 0.5)):
        monkeypatch.setattr(attempt, name, seconds)
    monkeypatch.setattr(attempt.topology, "end_seconds", lambda backend, is_fault: 0.1)
    slow, dead = Host("10.0.0.1"), Host("10.0.0.2")
    links = {host.name: FakeLink(host, host.name, host.name) for host in (slow, dead)}

    async def end() -> float:
        one = Attempt(Job((slow, dead), "nccl", ("train.py",)), Quiet([]), links=links)  # type: ignore[arg-type]
        await one.start_ranks()

        async def speak() -> None:
            for _ in range(20):
                await asyncio.sleep(0.05)
                links[slow.name].punctuality.note(time.monotonic())
            one.world.ended[slow.name].set()

        speaking, began = asyncio.ensure_future(speak()), time.monotonic()
        await one._end(signal.SIGTERM, asyncio.Queue(), is_fault=True)
        assert list(links) == [slow.name], "it is wanted for the next start"
        await speaking
        gone = {dead.name: FakeLink(dead, "", "")}
        only_dead = Attempt(Job((dead,), "nccl", ("train.py",)), Quiet([]), links=gone)  # type: ignore[arg-type]
        await only_dead.start_ranks()
        gone[dead.name].punctuality.last, began = began - 100.0, time.monotonic()
        await only_dead._end(signal.SIGTERM, asyncio.Queue(), is_fault=True)
        return time.monotonic() - began

    assert asyncio.run(end()) < 0.1 + 0.2 + 0.5, "no more than what it had to answer"


def test_a_name_stays_through_restarts_whoever_is_away_and_whatever_the_network_does() -> None:
    """Calibrations, logs and what is known of memory are found by it."""

    def link(host: str, machine: str, identity: str) -> Link:
        return FakeLink(Host(host), machine, identity)  # type: ignore[return-value]

    a, b, c = link("a", "mac", "1111aaaa"), link("b", "mac", "2222bbbb"), link("c", "studio", "3333cccc")
    names = HostNames()
    assert names.name_of_each([a, b]) == ["mac-1111", "mac-2222"]
    assert names.name_of_each([b]) == ["mac-2222"], "without the other it keeps its digits"
    assert names.name_of_each([link("b", "dhcp-17", "2222bbbb"), c, a]) == ["mac-2222", "studio", "mac-1111"]
    late = HostNames()
    assert [late.name_of_each(each) for each in ([a], [a, b])] == [["mac"], ["mac", "mac-2222"]]
    both = HostNames()
    assert both.name_of_each([a, link("a-by-cable", "mac", "1111aaaa")]) == ["mac", "mac"], "one machine, two addresses"


def test_ranks_that_nobody_launched_tell_two_machines_of_one_name_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [["mac", "aaaa1111"], ["mac", "bbbb2222"], ["mac", "aaaa1111"]]
    monkeypatch.setattr(World, "gather_text", lambda self, text, what: [json.dumps(one) for one in told])
    assert world.host_names(World()) == ["mac-aaaa", "mac-bbbb", "mac-aaaa"]
    monkeypatch.undo()
    assert world.host_names(World()) == [network.host_name()], "alone one is who one is"
    identity = Path("/etc/machine-id")
    assert not identity.exists() or identity.read_text().strip() not in network.machine_id()
    assert ssh.is_this_machine(Host(network.own_name()))
