"""./launch --emit hostfile: who is found, who answers, and the file that comes of it."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lib.launch import command as launcher
from lib.launch import discovery, hostfile
from lib.launch.hostfile import Host
from lib.system.os_commands import Completed
from tests import tiny
from tests.cluster import Host as Node
from tests.tiny import ROOT

CONFIG = """
# a comment
Host *
  User me
Host mac-a mac-b !bad *.lab
  HostName 10.0.0.1
host=gpu-box
Host "quoted"
Match host x
Include more.d/*
Include ~/nowhere
"""
AVAHI = """=;eth0;IPv6;mac;_ssh._tcp;local;mac-a.local;fe80::1;22;
=;eth0;IPv4;mac;_ssh._tcp;local;mac-a.invalid;10.0.0.1;22;"txt"
=;broken
"""
BROWSE = """Timestamp     A/R    Flags  if Domain               Service Type         Instance Name
22:04:52.456  Add        3   4 local.               _ssh._tcp.           Anna's Mac Studio
22:04:52.458  Rmv        0   4 local.               _ssh._tcp.           gone
"""
ARP = """? (192.168.1.1) at 0:11:22:33:44:55 on en0 ifscope [ethernet]
? (169.254.12.3) at 36:0:0:0:0:1 on bridge0 ifscope [bridge]
? (169.254.12.4) at (incomplete) on bridge0 ifscope [bridge]
? (169.254.255.255) at ff:ff:ff:ff:ff:ff on bridge0 ifscope [bridge]
? (10.9.0.2) at 02:00:00:00:00:01 [ether] on thunderbolt0
"""


def machine(name: str, gpus: int = 0, **bridge: str) -> dict[str, str]:
    return {"name": name, "gpus": str(gpus), "chip": "chip, 8 GB", **bridge}


def test_names_of_an_ssh_configuration(tmp_path) -> None:
    (tmp_path / "config").write_text(CONFIG)
    (tmp_path / "more.d").mkdir()
    (tmp_path / "more.d" / "one").write_text(f"Host included\nInclude {tmp_path}/config\n")  # in a circle
    names = list(dict.fromkeys(discovery.configured(tmp_path / "config")))
    assert names == ["mac-a", "mac-b", "gpu-box", "quoted", "included"]
    assert discovery.configured(tmp_path / "none") == []


def test_the_file_of_machines_can_be_read() -> None:
    text = discovery.text_of([machine("a"), machine("bb", gpus=4)], {})
    assert hostfile.parse(text, "here").hosts == (Host("a", 1), Host("bb", 4)) and "# chip, 8 GB" in text
    joined = [machine("a", bridge="169.254.0.1"), machine("bb", bridge="169.254.0.2")]
    found = hostfile.parse(discovery.text_of(joined, {}), "here").hosts
    assert found == (Host("a", 1, ("169.254.0.1",)), Host("bb", 1, ("169.254.0.2",)))
    assert "ips" not in discovery.text_of([joined[0], machine("bb")], {}), "one of them is not on the bridge"


DENIED = Completed(255, "", "x\nme@a: Permission denied (publickey).\n")


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (DENIED, "a: me@a: Permission denied .*; ssh-copy-id a$"),
        (Completed(None, "host=a\n", ""), "a: no answer within 10 s$"),
        (Completed(1, "This service allows sftp only\n", ""), "a: no shell that answers; ping"),
    ],
)
def test_who_does_not_answer_is_named_with_the_reason(done: Completed, said: str, monkeypatch) -> None:
    monkeypatch.setattr(discovery.os_commands, "run", lambda words, seconds: done)
    assert re.search(said, discovery.ask_machine("a", "/x", is_here=False)["error"])


def test_tools_are_asked_where_they_are(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, text, more in (("avahi-browse", AVAHI, "; sleep 50"), ("dns-sd", BROWSE, "; sleep 50"), ("arp", ARP, "")):
        (tmp_path / f"{name}.txt").write_text(text)
        tiny.script(tmp_path / name, f"cat {tmp_path}/{name}.txt{more}")
    monkeypatch.setattr(discovery, "BROWSE_SECONDS", 0.7)
    names = discovery.candidates(tmp_path)
    assert names == ["mac-a.invalid", "10.0.0.1", "Annas-Mac-Studio.local", "169.254.12.3", "10.9.0.2"]


def emit(node: Node, home: Path, words: Sequence[str] = ()) -> tuple[int, str, str]:
    path = f"{home}:{os.environ['PATH']}"
    command = ["env", f"HOME={home}", f"PATH={path}", sys.executable, ROOT / "launch", "--emit", "hostfile", *words]
    done = node.run(command, timeout=40)
    return done.returncode, done.stdout, done.stderr


def test_machines_that_answer_become_a_host_file(three_hosts: list[Node], tmp_path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host host-b 10.77.0.2 host-nobody\nHost *\n  User root\n")
    tiny.script(tmp_path / "avahi-browse", "echo '=;eth0;IPv4;c;_ssh._tcp;local;host-c;10.77.0.3;22;'")
    status, text, errors = emit(three_hosts[0], tmp_path)
    assert status == 0, errors
    hosts = hostfile.parse(text, "here").hosts
    assert [host.name for host in hosts] == ["host-a", "host-b", "host-c"], text + errors
    assert "left out: host-nobody: ssh: Could not resolve hostname" in errors and "has no" not in errors
    status, text, errors = emit(three_hosts[0], tmp_path, ["--hosts", "host-c:2,host-a", "--directory", "/nowhere"])
    assert [(host.name, host.slots) for host in hostfile.parse(text, "here").hosts] == [("host-c", 2), ("host-a", 1)]
    assert "host-c has no /nowhere/.venv: ./launch --sync ." in errors
    three_hosts[1].unplug()
    try:
        status, text, errors = emit(three_hosts[0], tmp_path, ["--hosts", "host-b"])
    finally:
        three_hosts[1].plug_in()
    assert (status, text) == (1, "") and errors.splitlines()[-1].startswith("stopped: none of host-b answers"), errors


def test_hosts_as_given_without_asking(capsys) -> None:
    assert launcher.main(["--hosts", "a:2,b", "--emit", "hostfile", "--no-preflight"]) == 0
    assert capsys.readouterr().out == "a slots=2\nb slots=1\n"
    assert launcher.main(["--emit", "hostfile", "--no-preflight"]) == 2
