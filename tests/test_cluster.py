"""The cluster of namespaces that launching is tested on: hosts of their own, and nothing left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import CGROUP, Host, Unavailable, cluster, unavailable

LISTEN = "import socket, time; s = socket.create_server(('', 4000)); print('ready'); time.sleep(100)"
COUNT = "import time; end = time.process_time() + 0.2; t = time.time()\nwhile time.process_time() < end: pass\nprint(time.time() - t)"


def test_every_host_is_reached_from_every_host_by_its_name(three_hosts: list[Host]) -> None:
    for host in three_hosts:
        (host.outside / "name").write_text(f"disk of {host.name}")
    for host in three_hosts:
        for other in three_hosts:
            reached = host.run(["ssh", "-o", "BatchMode=yes", other.name, f"hostname; cat {host.disk}/name"])
            assert reached.stdout == f"{other.name}\ndisk of {other.name}", reached.stderr
    for host in three_hosts:
        (host.outside / "name").unlink()


def test_a_host_without_its_cable_is_not_reached_until_it_is_plugged_in(three_hosts: list[Host]) -> None:
    ask = ["ssh", "-o", "ConnectTimeout=20", three_hosts[1].name, "true"]
    three_hosts[1].unplug()
    try:
        assert three_hosts[0].run([*ask[:2], "ConnectTimeout=1", *ask[3:]]).returncode == 255
    finally:
        three_hosts[1].plug_in()
    assert three_hosts[0].run(ask).returncode == 0


def test_a_port_may_be_dead_while_ssh_lives(three_hosts: list[Host]) -> None:
    listener = three_hosts[1].start([sys.executable, "-u", "-c", LISTEN])
    assert listener.stdout is not None and listener.stdout.readline() == "ready\n"
    ask = [sys.executable, "-c", f"import socket; socket.create_connection(('{three_hosts[1].name}', 4000), 1)"]
    assert three_hosts[0].run(ask).returncode == 0
    three_hosts[1].only_ssh()
    try:
        assert three_hosts[0].run(ask).returncode != 0
        assert three_hosts[0].run(["ssh", three_hosts[1].name, "true"]).returncode == 0
    finally:
        three_hosts[1].only_ssh(False)
    assert three_hosts[0].run(ask).returncode == 0
    os.killpg(listener.pid, 9)
    listener.communicate()


def test_processes_are_a_hosts_own(three_hosts: list[Host]) -> None:
    process = three_hosts[0].start(["sleep", "77"])
    deadline = time.monotonic() + 120
    while not (mine := [pid for pid, words in three_hosts[0].processes().items() if words == "sleep 77"]):
        assert time.monotonic() < deadline
    assert "sleep 77" not in three_hosts[1].processes().values()
    three_hosts[0].run(["kill", "-9", str(mine[0])])
    process.wait(120)


def test_nothing_is_left_of_a_cluster_even_after_a_failure() -> None:
    reason = unavailable(quotas=True)
    if reason:
        pytest.skip(f"no cluster of namespaces: {reason}")

    def seen() -> tuple[str, ...]:
        links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout
        groups = sorted(path.name for path in CGROUP.glob(f"tandem-{os.getpid()}-*"))
        return links, Path("/proc/mounts").read_text(), Path("/etc/hosts").read_text(), *groups

    before, started = seen(), []
    with pytest.raises(ZeroDivisionError), cluster(hosts=2, quotas=(None, 0.25), rate="50mbit") as hosts:
        started = [host.start(["sleep", "100"]) for host in hosts]
        slow = float(hosts[1].run([sys.executable, "-c", COUNT]).stdout)
        assert slow > 0.5, "a quarter of a core gives 0.2 s of work in 0.8 s"
        assert "rate 50Mbit" in hosts[0].run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
        folder = hosts[0].outside.parent
        raise ZeroDivisionError
    assert seen() == before and not folder.exists()
    assert all(process.wait(120) != 0 for process in started)


def test_where_it_cannot_be_built_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="root"), cluster():
        pass
