"""What is asked of a Mac, on an imitated one: names, memory, power, ports, folders, files, and what a host's facts mean."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lib.launch.preflight_verdicts import Context, Finding, findings_of
from lib.launch.run_needs import Needs

from lib.launch import host_facts, hostfile, preflight, preflight_verdicts
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.launch.ssh import ssh_remedy
from lib.system import files, hardware, network
from tests import darwin
from tests.sources import strings
from tests.tiny import ROOT

# ---- Names


def test_a_macs_name_is_the_owners_and_not_the_networks(mac: darwin.Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    for of_the_network in ("jan-mbp.cafe.example", "192-168-1-7.lan"):
        monkeypatch.setattr(socket, "gethostname", lambda name=of_the_network: name)
        darwin.forget_names()
        assert network.own_name() == "Jans-MacBook-Pro"
    mac.says("scutil --get LocalHostName", None)  # "LocalHostName: not set", and status 1
    darwin.forget_names()
    assert network.own_name() == "Jan-s-MacBook-Pro", "a name that a file can have"
    mac.says("scutil --get ComputerName", None)
    darwin.forget_names()
    assert network.own_name() == "192-168-1-7"
    monkeypatch.setenv(network.HOST, "as-the-launcher-said")
    assert network.host_name() == "as-the-launcher-said"


def test_two_macs_of_one_name_are_two(mac: darwin.Mac) -> None:
    first = (network.own_name(), network.machine_id())
    mac.says("ioreg -rd1 -c IOPlatformExpertDevice", darwin.REGISTRY % darwin.UUID.replace("5B", "6C"))
    darwin.forget_names()
    second = (network.own_name(), network.machine_id())
    names = network.distinct_names([first, second, first, ("mac-studio", "77777777")])
    assert names[0] == names[2] != names[1] and names[3] == "mac-studio"
    assert all(re.fullmatch(r"Jans-MacBook-Pro-[0-9a-f]{4}", name) for name in names[:2])
    assert network.distinct_names([first, first]) == ["Jans-MacBook-Pro"] * 2, "two ranks of one Mac are on one host"
    assert darwin.UUID not in first[1]


# ---- Memory and power


def test_free_memory_is_what_vm_stat_has_free(mac: darwin.Mac) -> None:
    assert hardware.host_memory_bytes() == 128 * 2**30
    assert hardware.free_memory_bytes() == darwin.FREE_BYTES < 10 * 2**30
    mac.says("vm_stat", darwin.VM_STAT.replace("16384", "4096"))
    assert hardware.free_memory_bytes() == darwin.FREE_BYTES // 4, "an Intel Mac's pages"
    mac.says("vm_stat", "vm_stat: something else\n")
    assert hardware.free_memory_bytes() is None
    facts = host_facts.facts({**dict.fromkeys(("files", "models", "ports", "addresses", "ssh_to"), []), "run_dir": None,
                              "calibration_dir": None, "rdma": False})  # fmt: skip
    known = {"free_bytes": None, "total_bytes": 128 * 2**30, "has_gpu_memory": False}
    assert facts["memory"] == known and facts["system"] == "Darwin"


def test_power_is_told_in_the_systems_words(mac: darwin.Mac) -> None:
    assert hardware.power() == (False, False, "AC Power, 100%, charged")
    mac.says("pmset -g batt", darwin.ON_BATTERY)
    mac.says("pmset -g", darwin.SETTINGS.format(mode=darwin.LOW.strip()))
    assert hardware.power() == (True, True, "Battery Power, 82%, discharging, Low Power Mode")
    mac.says("pmset -g batt", darwin.NO_BATTERY)
    mac.says("pmset -g", darwin.SETTINGS.format(mode=darwin.HIGH.strip()))
    assert hardware.power() == (False, False, "AC Power"), "a powermode of 2 is the fast one"
    assert hardware.wired_limit_bytes() is None and not hardware.is_translated()
    mac.says("sysctl -n iogpu.wired_limit_mb", "110000\n")
    mac.says("sysctl -n sysctl.proc_translated", "1\n")
    assert hardware.wired_limit_bytes() == 110000 * 2**20 and hardware.is_translated()


def test_linux_tells_its_power_in_files(tmp_path: Path) -> None:
    battery = tmp_path / "BAT0"
    battery.mkdir()
    (battery / "type").write_text("Battery\n")
    (battery / "status").write_text("Discharging\n")
    power = hardware.power(tmp_path)
    assert power is not None and power.on_battery and power.text.startswith("discharging")


# ---- Ports and addresses


class BsdSocket(socket.socket):
    """As on BSD: with SO_REUSEADDR all addresses of a port can be taken where another listens on one of them."""

    def bind(self, address: Any) -> None:
        if address[0] == "" and self.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
            return
        super().bind(address)


def test_a_port_is_taken_where_one_address_is_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.2", 0)) as second:
        ports = [one.getsockname()[1] for one in (listener, second)]
        monkeypatch.setattr(socket, "socket", BsdSocket)
        assert host_facts.taken(ports, ["127.0.0.2"]) == ports
        assert host_facts.taken(ports, ["10.255.255.1"]) == ports[:1], "an address of another host's says nothing"
    assert host_facts.taken(ports, ["127.0.0.2"]) == []


def test_what_a_cable_gave_itself_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["169.254.12.1", "192.168.0.7", "10.0.0.2", "127.0.0.1", "fe80::1%en0"]
    assert network.likeliest_first(found) == ["10.0.0.2", "192.168.0.7", "169.254.12.1", "fe80::1%en0", "127.0.0.1"]
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in found[:2]]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answer)
    assert hostfile.address(Host("mac-b")) == "192.168.0.7"
    own = [one for one in network.own_addresses() if one in found[:2]]
    assert own == ["169.254.12.1", "192.168.0.7"], "the likeliest last"


def test_a_ring_of_cables_is_measured_from_neighbour_to_neighbour() -> None:
    hosts = tuple(Host(name, 1, (f"192.168.0.{4 * index + 2}",)) for index, name in enumerate("abcd"))
    ring = Job(hosts, "ring", ("train.py",))

    def pairs(job: Job, reached: tuple[Host, ...] = hosts) -> list[str]:
        return [one.name + other.name for one, other in preflight_verdicts.links_to_measure(job, reached)]

    assert pairs(ring) == ["ab", "bc", "cd", "da"]
    assert pairs(ring, hosts[:3]) == ["ab", "bc"], "the ring is the whole world's, not that of those who answered"
    assert pairs(replace(ring, hosts=hosts[:2]), hosts[:2]) == ["ab"]
    assert pairs(replace(ring, backend="mpi")) == ["ab", "ac", "ad", "bc", "bd", "cd"]
    named = tuple(replace(host, addresses=()) for host in hosts)
    assert len(pairs(replace(ring, hosts=named), named)) == 6


# ---- Files


def test_what_is_to_last_goes_through_the_drives_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    refuses = False

    def play(descriptor: int, command: int) -> int:
        asked.append(f"{command} of {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        if refuses:
            raise OSError(errno.ENOTSUP, "not on a share")
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", play)
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append("fsync"))
    files.write_atomically(tmp_path / "new/plan.json", "{}\n")
    assert [one.split(".")[0] for one in asked] == ["51 of plan", "51 of new"] and "fsync" not in asked
    assert (tmp_path / "new/plan.json").read_text() == "{}\n" and len(list((tmp_path / "new").iterdir())) == 1
    refuses = True
    files.flush_path(tmp_path / "new/plan.json")
    assert asked[-1] == "fsync"
    for path in [ROOT / "train.py", *(ROOT / "lib").rglob("*.py")]:  # one door
        assert path.name == "files.py" or "fsync(" not in path.read_text(), path


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as failed:
        files.write_atomically(tmp_path / "a", "new")
    assert failed.value.filename == str(tmp_path / "a"), "the user has to know where"
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_what_finder_and_downloads_leave_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    before = host_facts.digest(tmp_path / "m")
    (tmp_path / "m/.DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (tmp_path / "m/._config.json").write_bytes(b"\0\5\26\7")
    (tmp_path / "m/.cache/huggingface").mkdir(parents=True)
    (tmp_path / "m/.cache/huggingface/CACHEDIR.TAG").write_text("x")
    assert host_facts.digest(tmp_path / "m") == before
    (tmp_path / "m/.gitattributes").write_text("x")
    assert host_facts.digest(tmp_path / "m") != before


# ---- Verdicts


def context(job: Job, **changes: Any) -> Context:
    return replace(Context({"files": {}}, Needs(), job, 0), **changes)


def test_a_folder_that_macos_closes_to_ssh_is_named_with_one_that_works() -> None:
    host = Host("mac-b")
    job = Job((host,), "ring", ("train.py",), directory="/Users/jan/Documents/tandem")
    for last in (
        "zsh:cd:1: operation not permitted: /Users/jan/Documents/tandem",
        "/Users/jan/Documents/tandem/.venv/bin/python: can't open file '/Users/jan/Documents/tandem/lib': [Errno 1] Operation not permitted",
        "PermissionError: [Errno 1] Operation not permitted: '/Users/jan/Documents/tandem/lib/__init__.py'",
    ):
        found = preflight.why_no_facts(job, host, last, 1)
        assert found.check == "project" and "macOS keeps Documents" in found.message
        assert " mac-b:/Users/jan/tandem/" in found.remedy and "--directory /Users/jan/tandem" in found.note
        assert "Full disk access" in found.note or "full disk access" in found.note
    away = preflight.why_no_facts(job, host, "zsh:cd:1: no such file or directory: /Users/jan/Documents/tandem", 1)
    assert away.message == "/Users/jan/Documents/tandem is not there"
    model = "/Users/jan/Downloads/llama"
    given = context(job, here={"files": {model: "1"}})
    files_found = _judged("files", {model: {"fault": "Operation not permitted"}}, host, given)
    assert (
        files_found.remedy == "mv /Users/jan/Downloads/llama /Users/jan/llama"
        and "Terminal on mac-b" in files_found.note
    )
    disk = {"folder": "/Users/jan/Desktop/runs", "fault": "Operation not permitted", "free_bytes": 2**40}
    assert "macOS keeps Desktop" in _judged("disk", disk, host, context(job)).message
    slow = _judged(
        "memory", {"error": "PermissionError: [Errno 1] Operation not permitted: '/Users/jan/Desktop/x'"}, host, given
    )
    assert "macOS keeps" in slow.message


def test_unreadable_files_are_told_apart_from_missing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()

    def refuse(self: Path) -> Iterator[Path]:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert host_facts.digest_or_why(tmp_path / "m") == {"fault": "Operation not permitted"}
    assert host_facts.digest_or_why(tmp_path / "none") is None


def _judged(check: str, fact: Any, host: Host, given: Context) -> Finding:
    facts = {name: None for name, _ in preflight_verdicts.FACT_CHECKS.values()}
    facts[preflight_verdicts.FACT_CHECKS[check][0]] = fact
    return next(one for one in findings_of([host], {host.name: facts}, given) if one.check == check)


def test_a_mac_beside_a_linux_box_is_promised_the_ring_alone() -> None:
    hosts = (Host("mac-a"), Host("box"))
    systems = {"mac-a": "Darwin", "box": "Linux"}
    for backend in ("mpi", "jaccl", "nccl", "ring"):
        job = Job(hosts, backend, ("train.py",), typed=("--hosts", "mac-a,box", "--backend", backend))
        found = _judged("system", "Linux", hosts[1], context(job, systems=systems))
        assert (found.status == "ok") == (backend == "ring")
        if backend != "ring":
            assert "Linux in a world of Linux and macOS: only the ring backend is promised" in found.message
            assert found.remedy == f"./launch --hosts mac-a,box --backend {backend} --backend ring"
    alike = context(replace(job, backend="mpi"), systems=dict.fromkeys(systems, "Darwin"))
    assert _judged("system", "Darwin", hosts[0], alike).status == "ok"


def test_remedies_are_the_systems_own() -> None:
    host = Host("mac-a")
    job = Job((host,), "ring", ("train.py",))
    clock = {"ahead_seconds": 60.0, "unsure_seconds": 0.1}
    for system, wanted, foreign in (("Darwin", "sntp -sS", "timedatectl"), ("Linux", "timedatectl", "sntp")):
        given = context(job, systems={"mac-a": system})
        found = _judged("clock", clock, host, given)
        assert wanted in found.remedy and foreign not in found.remedy
        name = _judged("ssh", {"mac-b": "Could not resolve hostname mac-b"}, host, given).remedy
        assert ("dscacheutil -q host -a name mac-b" in name) == (system == "Darwin")
        assert ("getent hosts mac-b" in name) == (system == "Linux")
    assert ssh_remedy("jan@mac-b", "Connection refused")[0] == "nc -z mac-b 22"


# ---- What is typed into hosts' shells

GNU_ONLY = {
    r"--mkpath|--info=|--append-verify|--open-noatime": "openrsync has no such option",
    r"\bsed -i(?! '')|\bstat -c|\bdate -d|\breadlink -f|\btimeout \d|\bnproc\b|\bgrep -P|\bxargs -r|\bsort -V|\bcp -[a-z]*t\b": "GNU's alone",
    r"\bmapfile\b|\breadarray\b|declare -A|\$\{\w+(\^\^|,,)|&>>|\|&": "bash 3.2 has no such thing",
    r"/proc/self/exe|\bfree -[a-z]|\blscpu\b|\bip addr": "Linux's alone",
}


def test_what_hosts_are_told_to_run_is_known_to_bsd() -> None:
    for path in [ROOT / "Makefile", ROOT / "launch", ROOT / "train.py", *sorted((ROOT / "lib").rglob("*.py"))]:
        texts = path.read_text().splitlines() if path.name == "Makefile" else strings(path)
        for text in texts:
            for pattern, why in GNU_ONLY.items():
                assert not re.search(pattern, text), f"{path.name}: {why}: {text.strip()}"


# Of the options that Apple's openrsync takes (apple-oss-distributions/rsync, openrsync/main.c), those that we may want.
OPENRSYNC = {"--archive", "--checksum", "--delete", "--dry-run", "--exclude", "--exclude-from", "--filter", "--include"}
OPENRSYNC |= {
    "--itemize-changes",
    "--partial",
    "--rsh",
    "--rsync-path",
    "--size-only",
    "--stats",
    "--timeout",
    "--update",
}


def test_rsync_is_given_what_apples_openrsync_takes() -> None:
    seen: set[str] = set()
    for path in sorted((ROOT / "lib").rglob("*.py")):
        for text in strings(path):
            if re.search(r"\brsync |--(exclude|delete|rsync-path|checksum)", text):
                seen |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    ours = {"--sync", "--hosts", "--directory", "--hostfile", "--help", "--role", "--no-preflight"}  # ./launch's own
    assert {"--checksum", "--exclude", "--rsync-path"} <= seen and seen - ours <= OPENRSYNC, seen - ours - OPENRSYNC
