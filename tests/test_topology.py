"""What each backend asks of the hosts, and launches on imitated Macs: jaccl's files, mixed systems, restarts."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib.launch.rank_faults import Fault, RankState
from lib.launch.rank_processes import processes_of
from lib.launch.supervisor import holders_of_newest, is_led_by_another
from lib.launch.world_state import WorldState

from lib.errors import UserError
from lib.launch import command, hostfile, options, supervisor, topology
from lib.launch.hostfile import Host
from lib.launch.job import Job
from tests import macs
from tests.cluster import Host as Machine
from tests.test_launch import nothing_left, python, tagged, wait_for
from tests.test_recovery import LIMIT, Watched
from tests.tiny import ROOT


def mesh(count: int) -> list[dict[str, Any]]:
    """A host file's entries: the device from one host to another has the names of both."""
    names = "abcdefgh"[:count]
    return [
        {
            "ssh": f"host-{one}",
            "ips": [f"10.77.0.{i + 1}"],
            "rdma": [None if one == other else f"rdma_{one}{other}" for other in names],
        }
        for i, one in enumerate(names)
    ]


def ring(count: int, cables: int = 1) -> list[dict[str, Any]]:
    """The same without cables but to either neighbour."""
    entries = mesh(count)
    for i, entry in enumerate(entries):
        for j, device in enumerate(entry["rdma"]):
            near = (i - j) % count in (1, count - 1)
            several = [f"{device}{n}" for n in range(cables)]
            entry["rdma"][j] = None if not near else device if cables == 1 else several
    return entries


def hosts_of(entries: list[dict[str, Any]]) -> tuple[Host, ...]:
    return hostfile.parse(json.dumps(entries), "here").hosts


# ---- Who reaches whom


def test_only_neighbours_connect_in_a_ring() -> None:
    assert topology.pairs_of("ring", 1) == []
    assert topology.pairs_of("ring", 3) == [(0, 1), (1, 2), (2, 0)]
    assert topology.pairs_of("jaccl", 3) == topology.pairs_of("jaccl-ring", 3) == [(1, 0), (2, 0)]
    assert len(topology.pairs_of("mpi", 4)) == 12


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.sampled_from([*range(n * n)])))))
def test_the_largest_ring_whoever_reaches_whom(world: tuple[int, set[int]]) -> None:
    count, edges = world
    reached = {(i, j): "x" for i, j in itertools.permutations(range(count), 2) if i * count + j in edges}

    def is_ring(places: Sequence[int]) -> bool:
        following = [*places[1:], places[0]]
        return len(places) == 1 or all(pair in reached for pair in zip(places, following, strict=True))

    places = topology.largest_ring(count, reached)
    assert is_ring(places) and places == sorted(set(places))
    larger = (some for size in range(len(places) + 1, count + 1) for some in itertools.combinations(range(count), size))
    assert not any(is_ring(some) for some in larger)
    everyone = dict.fromkeys(itertools.permutations(range(count), 2), "x")
    assert topology.largest_ring(count, everyone) == list(range(count))


def test_a_ring_of_cables_needs_no_others_and_one_who_is_cut_off_is_left_out() -> None:
    cables = {(0, 1): "x", (1, 2): "x", (2, 3): "x", (3, 0): "x"}
    assert topology.largest_ring(4, cables) == [0, 1, 2, 3]
    for others in ((0, 1, 3), (1, 2, 3)):  # the first host may be the one
        named = dict.fromkeys(itertools.permutations(others, 2), "y")
        assert topology.largest_ring(4, named) == list(others)
    a, b, c = (Host(name) for name in "abc")
    assert [host.name for host in topology.in_ring_order(b, (a, b, c))] == ["b", "c", "a"]
    # One that was away is back, and would be rank 0, with older checkpoints than those that trained.
    assert [host.name for host in topology.led_by((b, c), (a, b, c))] == ["b", "c", "a"]
    assert topology.led_by((c,), (a, b)) == (a, b) and topology.led_by((c,), ()) == ()


def test_the_first_host_is_one_whose_disk_has_the_newest_checkpoint() -> None:
    a, b, c = (Host(name) for name in "abc")
    # b is back and has written none yet when a is lost: c, which was there before, goes first, or steps would be undone.
    assert holders_of_newest((a, c), {}, (a, b, c)) == (a, c)
    assert topology.led_by((a, c), (b, c)) == (c, b)
    assert holders_of_newest((a, c), {"a": 40, "b": 40, "c": 40}, (a, b, c)) == (a, b, c)
    assert holders_of_newest((a, c), {"b": 50, "c": 40}, (a, b, c)) == (b,), "the others had not done writing it"
    behind = Fault("behind", "", ("b",))
    assert holders_of_newest((a, c), {}, (a, b, c), behind) == (b,), "as its rank says of its disk"
    assert is_led_by_another(behind, (a, b)) and is_led_by_another(behind, (a,)) and is_led_by_another(behind, ())
    assert not is_led_by_another(behind, (b, a)), "mpirun's own words may keep rank 0 elsewhere: once is enough"
    assert not is_led_by_another(None, (a, b)) and not is_led_by_another(Fault("died", "", ("b",)), (a, b))
    state = WorldState(Job((a, b), "ring", ("train.py",)), None, "/tmp/x")  # type: ignore[arg-type]
    state.ranks = {0: RankState(0, "a", checkpoint=40), 1: RankState(1, "b"), 2: RankState(2, "a", checkpoint=50)}
    assert state.checkpoints() == {"a": 50}


# ---- jaccl


def test_survivors_keep_the_devices_that_lead_to_each_other() -> None:
    a, b, c, d = hosts_of(mesh(4))
    assert topology.rdma_matrix((a, b, c, d))[1] == ["rdma_ba", None, "rdma_bc", "rdma_bd"]
    assert topology.rdma_matrix((a, c, d)) == [
        [None, "rdma_ac", "rdma_ad"],
        ["rdma_ca", None, "rdma_cd"],
        ["rdma_da", "rdma_dc", None],
    ]
    assert topology.rdma_matrix((d, b)) == [[None, "rdma_db"], ["rdma_bd", None]], "in their new order"


def test_jaccl_takes_a_mesh_and_its_ring_one_cable_less() -> None:
    square, double = hosts_of(ring(4)), hosts_of(ring(4, cables=2))
    assert (
        topology.rdma_fault("jaccl", hosts_of(mesh(3))) is topology.rdma_fault("jaccl-ring", hosts_of(mesh(3))) is None
    )
    assert topology.rdma_fault("jaccl-ring", square) is topology.rdma_fault("jaccl-ring", double) is None
    told = topology.rdma_fault("jaccl", square)
    assert told and "host-a to host-c" in told
    told = topology.rdma_fault("jaccl-ring", (square[0], square[1], square[3]))
    assert told and "host-b to host-d" in told, "without one of four hosts the ring is open"
    uneven = ring(3, cables=2)
    uneven[0]["rdma"][1] = uneven[0]["rdma"][1][:1]
    told = topology.rdma_fault("jaccl-ring", hosts_of(uneven))
    assert told and "as many devices" in told and "host-a to host-b: 1" in told
    own = mesh(2)
    own[0]["rdma"][0] = "rdma_aa"
    assert "itself" in str(topology.rdma_fault("jaccl", hosts_of(own)))
    assert "slots=2" in str(topology.rdma_fault("jaccl", (Host("a", 2), Host("b"))))
    assert topology.rdma_fault("jaccl", (Host("a"), Host("b"))), "no devices at all"


def test_mlxs_contract_for_jaccls_ring() -> None:
    hosts = hosts_of(ring(4, cables=2))
    work = processes_of(Job(hosts, "jaccl-ring", ("train.py",)), [f"/f{i}" for i in range(4)])
    (process, *_), files = work[2]
    matrix = json.loads(files["hosts.json"])
    assert matrix[0] == [None, ["rdma_ab0", "rdma_ab1"], None, ["rdma_ad0", "rdma_ad1"]]
    names = ("MLX_JACCL_RING", "MLX_JACCL_COORDINATOR", "MLX_IBV_DEVICES", "MLX_RANK")
    assert [process["environment"][name] for name in names] == ["1", "10.77.0.1:32323", "/f2/hosts.json", "2"]
    (process, *_), _ = processes_of(Job(hosts_of(mesh(2)), "jaccl", ("train.py",)), ["/f0", "/f1"])[0]
    assert "MLX_JACCL_RING" not in process["environment"], "its mere presence asks for the ring"


@pytest.mark.parametrize("devices", ["3", '{"a": 1}', '["rdma_en5", 3]', "[]", '"a b"', '""'])
def test_a_device_that_is_none_is_one_line(devices: str) -> None:
    with pytest.raises(UserError, match="host 0: rdma has .* it is null, a device as rdma_en5, or a list of them"):
        hostfile.parse(f'[{{"ssh": "a", "rdma": [null, {devices}]}}, {{"ssh": "b"}}]', "here")


def test_a_file_for_jaccls_ring_is_started_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"backend": "jaccl-ring", "envs": [], "hosts": ring(4)}))
    assert hostfile.read(path).backend == "jaccl-ring"
    job = options.job_of(options.parse(["--hostfile", str(path), "--", "train.py"]))
    assert job.backend == "jaccl-ring" and [host.index for host in job.hosts] == [0, 1, 2, 3]
    assert command.main(["--hostfile", str(path), "--backend", "jaccl", "--"]) == 2
    told = capsys.readouterr().err
    assert "jaccl wants a device towards every other host" in told and told.count("\n") == 1


# ---- Systems


def test_only_a_ring_joins_a_mac_and_a_linux_box() -> None:
    mixed, macs_only, boxes = {"mac": "Darwin", "box": "Linux"}, {"mac": "Darwin"}, {"box": "Linux"}
    for backend, systems in itertools.product(hostfile.BACKENDS, (mixed, macs_only, boxes, {"old": ""})):
        is_fit = {
            "ring": True,
            "mpi": systems is not mixed,
            "nccl": "Darwin" not in systems.values(),
            "jaccl": "Linux" not in systems.values(),
            "jaccl-ring": "Linux" not in systems.values(),
        }[backend]
        told = topology.refusal(backend, systems)
        assert (told is None) == is_fit, (backend, systems)
        assert told is None or ("--backend ring" in told and "\n" not in told)
    told = topology.refusal("mpi", mixed)
    assert told and "mac: macOS; box: Linux" in told


def test_processes_that_hold_rdma_get_time_to_end() -> None:
    for backend in ("ring", "mpi", "nccl"):
        assert topology.end_seconds(backend, True) < topology.end_seconds(backend, False) <= 2
    for backend in topology.RDMA_BACKENDS:
        assert topology.end_seconds(backend, True) >= 10 <= topology.end_seconds(backend, False)


# ---- Launches on imitated Macs


@pytest.fixture
def imitated(fresh_hosts: list[Machine]) -> Iterator[list[Machine]]:
    """The three hosts; at the same place on each, an interpreter that takes host-b and host-c for Macs, host-a for what it is."""
    for host in fresh_hosts:
        (macs.plain_interpreter if host.name == "host-a" else lambda at, of=host: macs.interpreter(at, of.disk))(
            host.outside
        )
    yield fresh_hosts
    for host in fresh_hosts:
        subprocess.run(
            ["rm", "-rf", *(host.outside / name for name in ("python", "bin", "site", "record"))], check=True
        )


def launch_on(names: str, hosts: list[Machine], *options: str) -> list[str]:
    words = [sys.executable, str(ROOT / "launch"), "--hosts", names, "--python", str(hosts[0].disk / "python")]
    return [*words, "--no-preflight", *options, "--"]


def code(text: str, hosts: list[Machine]) -> list[str]:
    return [str(hosts[0].disk / "python"), *python(text)[1:]]


def test_a_mac_and_a_linux_box_are_refused_over_mpirun_and_joined_over_the_ring(imitated: list[Machine]) -> None:
    done = imitated[0].run(
        [*launch_on("host-a,host-b", imitated, "--backend", "mpi"), *code("print('began')", imitated)]
    )
    assert done.returncode == 2 and "began" not in done.stdout
    assert "refused: --backend mpi" in done.stderr and "host-b: macOS; host-a: Linux" in done.stderr
    done = imitated[0].run(
        [*launch_on("host-a,host-b", imitated), *code("import platform; print(platform.system())", imitated)]
    )
    assert done.returncode == 0, done.stderr
    assert tagged(done.stdout) == {"0 host-a": ["Linux"], "1 host-b": ["Darwin"]}


WATCHDOG = (
    "print('libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Command buffer execution "
    "failed: Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)', file=sys.stderr)\n"
    "os.kill(os.getpid(), signal.SIGABRT) if rank else time.sleep(100)"
)


@pytest.mark.long
def test_macs_whose_watchdog_ends_a_rank_are_told_the_remedy_and_started_again(imitated: list[Machine]) -> None:
    done = imitated[0].run([*launch_on("host-b,host-c", imitated), *code(WATCHDOG, imitated)])
    assert done.returncode == 128 + signal.SIGABRT
    assert done.stderr.count("died: rank 1 on host-c was ended by SIGABRT") == 4, done.stderr
    assert (
        "mlx#3267" in done.stderr
        and "pmset displaysleepnow" in done.stderr
        and "metal.evaluation_seconds" in done.stderr
    )
    assert "start 4" in done.stderr and "start 5" not in done.stderr, f"{supervisor.MAC_RESTARTS} restarts by default"
    never = imitated[0].run([*launch_on("host-b", imitated, "--max-restarts", "0"), *code("sys.exit(3)", imitated)])
    assert never.returncode == 3 and "start 2" not in never.stderr
    linux = imitated[0].run([*launch_on("host-a", imitated), *code("sys.exit(3)", imitated)])
    assert linux.returncode == 3 and "start 2" not in linux.stderr


RECORD = """
import json
def say(word):
    open(sys.argv[1], 'a').write(json.dumps(word) + '\\n')
devices = json.load(open(os.environ['MLX_IBV_DEVICES']))
def slowly(*_):
    time.sleep(1.5)
    say('ended by itself')
    sys.exit(1)
signal.signal(signal.SIGTERM, slowly)
say(devices)
time.sleep(100 if len(devices) == 3 else 1)
"""


def test_jaccl_goes_on_with_the_devices_of_those_that_are_left_and_lets_ranks_end(
    imitated: list[Machine], tmp_path: Path
) -> None:
    a, b, c = imitated
    macs.interpreter(a.outside, a.disk)  # all three are Macs
    path, record = tmp_path / "hosts.json", a.disk / "record"
    path.write_text(json.dumps(mesh(3)))
    options = ["--backend", "jaccl", "--silent-seconds", f"{LIMIT:g}", "--no-preflight", "--"]
    words = [
        sys.executable,
        str(ROOT / "launch"),
        "--hostfile",
        str(path),
        "--python",
        str(a.disk / "python"),
        *options,
    ]
    launch = Watched(a, [*words, *code(RECORD, imitated), str(record)])
    try:
        wait_for(lambda: all((host.outside / "record").exists() for host in imitated))
        b.unplug()
        launch.until("launch: silent: host-b")
        launch.until(r"start 2.* on 2 of 3 hosts \(without host-b\)")
        assert launch.end() == 0, launch.notes
    finally:
        b.plug_in()
    everyone = topology.rdma_matrix(hosts_of(mesh(3)))
    for host in (a, c):
        said = [json.loads(line) for line in (host.outside / "record").read_text().splitlines()]
        assert said == [everyone, "ended by itself", [[None, "rdma_ac"], ["rdma_ca", None]]], host.name
    wait_for(lambda: nothing_left(imitated), 40)
