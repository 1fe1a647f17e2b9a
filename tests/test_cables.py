"""Three hosts in a ring of cables, each known to its neighbours alone, as Macs that are joined by Thunderbolt."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.system.records import read_records
from tests.cluster import Host, cables
from tests.test_launch import nothing_left, wait_for
from tests.test_recovery import LIMIT, Watched, steps, train_words
from tests.tiny import ROOT


@pytest.fixture
def host_file(fresh_hosts: list[Host], tmp_path: Path) -> Iterator[Path]:
    """As mlx.distributed_config writes it: each host has the address that faces the one before it."""
    with cables(fresh_hosts) as facing:
        hosts = [{"ssh": host.name, "ips": [ip]} for host, ip in zip(fresh_hosts, facing, strict=True)]
        path = tmp_path / "ring.json"
        path.write_text(json.dumps({"backend": "ring", "envs": [], "hosts": hosts}))
        yield path


def starts(host: Host) -> list[dict[str, Any]]:
    log = host.outside / "runs/run/logs/rank-000.jsonl"
    return [record for record in read_records(log) if record["kind"] == "start"]


def launch_words(host_file: Path, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "launch"), "--hostfile", str(host_file), *options, "--"]


def test_no_host_but_the_one_before_reaches_an_address(fresh_hosts: list[Host]) -> None:
    with cables(fresh_hosts) as facing:
        for place, host in enumerate(fresh_hosts):
            for other in range(3):
                code = (
                    f"import socket; s = socket.socket(); s.settimeout(1); print(s.connect_ex(('{facing[other]}', 9)))"
                )
                number = int(host.run([sys.executable, "-c", code]).stdout)
                assert (number == 111) == (other in (place, (place + 1) % 3)), "refused by a host that is reached"


@pytest.mark.long
def test_a_ring_of_cables_is_checked_and_trains_and_without_a_host_its_neighbours_go_on(
    fresh_hosts: list[Host], host_file: Path, tmp_path: Path
) -> None:
    """By the network between them: no address of the file joins the two that are left in this direction; their names do.

    Who is back gets its cable again.
    """
    a, b, _ = fresh_hosts
    words = train_words(tmp_path, a.disk / "runs", 3000, data__cache_dir=a.disk / "runs/.data")
    options = ["--min-mbit", "1", "--max-restarts", "1", "--silent-seconds", f"{LIMIT:g}"]
    launch = Watched(a, [*launch_words(host_file, *options), *words])
    try:
        launch.until(r"host-c, links: to host-a: [\d,]+ Mbit/s")  # the ring's end, too
        wait_for(lambda: len(steps(a, 0)) >= 7, 60)
        b.unplug()
        launch.until(r"launch: start 2.* on 2 of 3 hosts \(without host-b\)")
        before = len(steps(a, 0))
        wait_for(lambda: len(steps(a, 0)) > before + 7, 60)
        b.plug_in()
        launch.until("on 3 of 3 hosts")
        wait_for(lambda: len([start for start in starts(a) if len(start["plan"]["ranks"]) == 3]) == 2, 60)
        before = len(steps(a, 0))
        wait_for(lambda: len(steps(a, 0)) > before + 7, 60)
        assert [len(start["plan"]["ranks"]) for start in starts(a)] == [3, 2, 3]
        names = [rank["host"] for rank in starts(a)[-1]["plan"]["ranks"]]
        assert names == ["host-a", "host-b", "host-c"], "each beside those to whom its cables lead"
    finally:
        b.plug_in()
        a.signal(next(pid for pid, line in a.processes().items() if f"{ROOT}/launch" in line), signal.SIGINT)
        launch.end()
    wait_for(lambda: nothing_left(fresh_hosts), 10)
