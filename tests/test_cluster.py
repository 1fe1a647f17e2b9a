"""The cluster of namespaces that launching is tested on: hosts of their own, and nothing left of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import CGROUP, cluster, unavailable

COUNT = "import time; end = time.process_time() + 0.2; t = time.time()\nwhile time.process_time() < end: pass\nprint(time.time() - t)"


def test_hosts_reach_each_other_and_nothing_is_left_of_a_cluster_even_after_a_failure() -> None:
    if reason := unavailable(quotas=True):
        pytest.skip(f"no cluster of namespaces: {reason}")

    def seen() -> tuple[str, ...]:
        links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout
        groups = sorted(path.name for path in CGROUP.glob(f"tandem-{os.getpid()}-*"))
        return links, Path("/proc/mounts").read_text(), Path("/etc/hosts").read_text(), *groups

    before, started = seen(), []
    with pytest.raises(ZeroDivisionError), cluster(hosts=2, quotas=(None, 0.25), rate="50mbit") as hosts:
        started = [host.start(["sleep", "100"]) for host in hosts]
        (hosts[1].outside / "name").write_text("disk of host-b")
        reached = hosts[0].run(["ssh", "-o", "BatchMode=yes", "host-b", f"hostname; cat {hosts[1].disk}/name"])
        assert reached.stdout == "host-b\ndisk of host-b", reached.stderr
        slow = float(hosts[1].run([sys.executable, "-c", COUNT]).stdout)
        assert slow > 0.5, "a quarter of a core gives 0.2 s of work in 0.8 s"
        assert "rate 50Mbit" in hosts[0].run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
        folder = hosts[0].outside.parent
        raise ZeroDivisionError
    assert seen() == before and not folder.exists()
    assert all(process.wait(120) != 0 for process in started)
