"""Host files: every form gives the same hosts, and whatever is wrong gives one clear line and runs nothing."""

import json
from dataclasses import replace

import pytest

from lib.errors import UserError
from lib.launch import hostfile, ssh
from lib.launch import rank_commands as jobs
from lib.launch.hostfile import Host, Hosts, parse
from lib.launch.rank_commands import Job
from tests.tiny import ROOT

TWO = (Host("mac-a", 1), Host("root@10.0.0.2", 3, ("10.0.0.2",)))


def test_every_form_gives_the_same_hosts() -> None:
    texts = ["mac-a:1\nroot@10.0.0.2:3", "# two\n\n  mac-a # one\r\nroot@10.0.0.2 slots=3\n"]
    entries = [{"ssh": "mac-a"}, {"ssh": "root@10.0.0.2", "slots": 3}]
    for text in [*texts, json.dumps(entries), json.dumps({"hosts": entries}), hostfile.to_text(TWO)]:
        assert parse(text, "here") == Hosts(TWO), text
    assert hostfile.from_words("mac-a,root@10.0.0.2:3") == Hosts(TWO)


def test_mlx_own_file_keeps_addresses_devices_backend_and_variables() -> None:
    entries = [{"ssh": "a", "ips": ["10.0.0.1", "10.0.1.1"], "rdma": [None, "rdma_en5"]}]
    entries.append({"ssh": "b", "ips": [], "rdma": ["rdma_en5", None]})
    file = {"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1", "NCCL_IB_HCA=b=c d"], "hosts": entries}
    found = parse(json.dumps(file), "here")
    assert found.hosts[0] == Host("a", 1, ("10.0.0.1", "10.0.1.1"), (None, "rdma_en5"))
    assert found.backend == "jaccl" and found.environment == {"MLX_METAL_FAST_SYNCH": "1", "NCCL_IB_HCA": "b=c d"}
    job = Job(found.hosts, "jaccl", ("train.py",))
    assert jobs.rank_commands(job)[1].environment["MLX_JACCL_COORDINATOR"] == "10.0.0.1:32323"
    alone = jobs.rank_commands(replace(job, hosts=(found.hosts[0], replace(found.hosts[1], index=0))))
    assert alone[0].files["hosts.json"] == '[[null, null], ["rdma_en5", "rdma_en5"]]', "columns go by the file's order"


def test_hosts_may_differ_in_user_port_paths_and_variables() -> None:
    line = 'mac-b user=ada port=2222 directory="/Users/ada/t x" map=/data:/Users/ada/d env=OMP_NUM_THREADS=2'
    entry = {"ssh": "mac-b", "user": "ada", "port": 2222, "directory": "/Users/ada/t x", "map": ["/data:/Users/ada/d"]}
    entry["env"] = ["OMP_NUM_THREADS=2"]
    assert parse(line, "here") == parse(json.dumps([entry]), "here")
    there = parse(line, "here").hosts[0]
    job = Job((Host("a"), there), "ring", ("train.py", f"data.train={ROOT}/x", "data.valid=[/data/a,/database]"))
    assert ssh.remote_command(job, there, "m")[-4:-1] == ["Port=2222", "--", "ada@mac-b"]
    assert (
        "cd '/Users/ada/t x' && exec '/Users/ada/t x/.venv/bin/python' -m m" in ssh.remote_command(job, there, "m")[-1]
    )
    first, second = jobs.rank_commands(replace(job, backend="nccl", hosts=(Host("10.0.0.1"), there)))
    assert first.command[1:] == job.command and second.environment["OMP_NUM_THREADS"] == "2"
    assert second.command[2:] == ("data.train=/Users/ada/t x/x", "data.valid=[/Users/ada/d/a,/database]")


def test_the_example_is_one() -> None:
    assert [host.slots for host in hostfile.read(ROOT / "hostfile.example").hosts] == [1, 1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# nothing\n\n", "names no host"),
        ("a\nb\na slots=2", "names a twice.*slots"),
        ("a slots=0", "line 1: slots '0'.*greater than or equal to 1"),
        ("a b", "line 1: 'a b' is neither"),
        ("a max_slots=2", "max_slots '2': Unexpected.*the keys are ssh, ips, rdma, slots, user, port"),
        ("fe80::1 slots=2", "IPv6"),
        ("[::1]:2", "IPv6"),
        ("-oProxyCommand=touch${IFS}owned:1", "no host's name"),
        ("a directory=here", "whole path"),
        ('a directory="/x y', "is neither"),
        ("a python=/bin/sh", "'/bin/sh': not the whole path of a Python"),
        ("a map=/x", "HERE:THERE"),
        ("a env=LD_PRELOAD=x", "not a NAME=VALUE that a host file may set"),
        ('[{"ssh": "a", "ports": 22}]', "host 0: ports 22: Unexpected keyword argument; the keys are ssh"),
        ('["a"]', "hosts.0 'a': Input should be an object"),
        ('[{"ssh": "a", "ips": ["fe80::1"]}]', "Expected 4 octets"),
        ('{"backend": "gloo", "hosts": [{"ssh": "a"}]}', "backend 'gloo': Input should be 'ring'"),
        ('{"envs": ["PYTHONPATH=/tmp/x y"], "hosts": [{"ssh": "a"}]}', "PYTHONPATH.* --env NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_one_line(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        parse(text, "host file x")
    line = str(error.value)
    assert "\n" not in line and "\x1b" not in line and len(line) < 300 and line.startswith("host file x")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, told in ((tmp_path / "none", "No such file"), (tmp_path / "binary", "not UTF-8 text")):
        with pytest.raises(UserError, match=told):
            hostfile.read(path)


def test_a_name_that_does_not_resolve_is_one_line() -> None:
    assert hostfile.address(Host("a", addresses=("10.0.0.7", "10.1.0.7"))) == "10.0.0.7"
    assert hostfile.address(Host("localhost")) == "127.0.0.1"
    with pytest.raises(UserError, match="no-such-host.invalid does not resolve.*ips") as error:
        hostfile.address(Host("me@no-such-host.invalid"))
    assert "\n" not in str(error.value)
