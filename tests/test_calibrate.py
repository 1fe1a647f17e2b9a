"""benchmarks/calibrate.py: what is measured again, what a lost probe costs, and a tiny model for real."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from lib.plan.calibrator import HardwareCalibrator, time_now

from benchmarks import calibrate, curves, links, machines
from lib.config import load
from lib.errors import UserError
from lib.model import quantised_products
from lib.model.quantised_products import Product
from lib.plan.calibration import (
    BatchCurve,
    HostCalibration,
    Link,
    Transfer,
    read_calibration,
    read_published,
    use_quantised_products,
)
from lib.system import hardware as machine
from lib.system import mpi_and_blas, os_commands
from tests import tiny

ONCE, PEAK = 0.004, 10**6


def tau(size: int) -> float:
    """Seconds of an invented machine: fastest at 8 pairs."""
    return 0.010 + 0.002 * size + 0.0004 * max(0, size - 8) ** 2


def answer(size: int, counts: list[int]) -> dict[str, Any]:
    seconds = {str(count): [ONCE + count * tau(size)] * 5 for count in counts}
    return {"seconds": seconds, "peak_memory_bytes": PEAK * (1 + size), "gradient_bytes": 4096}


def recorder(lost: dict[int, str]) -> tuple[Callable[[int, list[int]], Any], list[int]]:
    asked: list[int] = []

    def probe(size: int, counts: list[int]) -> Any:
        asked.append(size)
        return lost.get(size) or answer(size, counts)

    return probe, asked


# ---- The climb ---------------------------------------------------------------------------------------------


def test_a_micro_batch_and_what_a_step_costs_once_are_told_apart() -> None:
    probe, asked = recorder({})
    found = calibrate.climb(probe, [1, 2, 4, 8, 16, 32, 64], rounds=2, seconds=10, memory_limit_bytes=None)
    assert found.overhead_seconds == pytest.approx(ONCE)
    for point in found.points():
        assert point.seconds_median == pytest.approx(tau(point.batch_size))
        assert point.pairs_per_second == pytest.approx(point.batch_size / tau(point.batch_size))
    assert asked[:6] == [1, 2, 4, 8, 16, 32]  # 64 would be the third past the knee
    assert asked[6:] == [6, 11, 9, 13]  # on both sides of 8, then of 11


def test_long_steps_are_run_with_one_micro_batch_only() -> None:
    counts = {}

    def probe(size: int, micro_batches: list[int]) -> dict[str, Any]:
        counts[size] = micro_batches
        return answer(size, micro_batches)

    calibrate.climb(probe, [1, 2, 4, 8, 16], rounds=0, seconds=0.4, memory_limit_bytes=None)
    assert counts == {1: [1, 4], 2: [1, 2], 4: [1, 2], 8: [1], 16: [1]}


def test_the_climb_ends_before_memory_does() -> None:
    probe, asked = recorder({})
    found = calibrate.climb(probe, [1, 2, 4, 8, 16], rounds=3, seconds=10, memory_limit_bytes=7 * PEAK)
    assert asked == [1, 2, 4, 3, 5]  # a tenth stays free: 6.3 for 1 + b
    assert found.lost == {8: "would not fit", 6: "would not fit"}


@pytest.mark.parametrize(
    ("lost", "expected"),
    [({4: "killed"}, [1, 2, 4, 8, 16]), ({1: "x"}, [1, 2, 4, 8, 16]), ({4: "x", 8: "x"}, [1, 2, 4, 8])],
)
def test_a_lost_point_is_a_lost_point_and_two_in_a_row_are_the_end(lost: dict[int, str], expected: list[int]) -> None:
    probe, asked = recorder(lost)
    found = calibrate.climb(probe, [1, 2, 4, 8, 16], rounds=0, seconds=10, memory_limit_bytes=None)
    assert asked == expected and found.lost == lost
    assert found.overhead_seconds == pytest.approx(ONCE)  # from whichever size has two numbers


def test_out_of_time_leaves_a_curve() -> None:
    probe, asked = recorder({})
    calibrate.climb(probe, [1, 4, 16], rounds=2, seconds=1, memory_limit_bytes=None, out_of_time=lambda: True)
    assert asked == [1, 4]


# ---- The command -------------------------------------------------------------------------------------------

PRODUCT = {"inputs": 16, "outputs": 32, "experts": 0, "bits": 4, "group_size": 16, "mode": "nvfp4", "dtype": "bfloat16"}
PRODUCTS = [{"product": PRODUCT, "dequantise_from": {"forward": 64, "backward": 8}}]
ANSWERED = json.dumps(PRODUCTS).replace("{", "{{").replace("}", "}}")  # formatted once more
INVENTED = f"""
import json, os, signal, sys
request = json.loads(sys.argv[1])
with open({{log!r}}, "a") as log:
    log.write(request["kind"] + " " + str(request.get("batch_size")) + " by products" * bool(request["products"]) + "\\n")
if request["kind"] == "machine":
    print(json.dumps({{{{"gflops": 100.0, "memory_bytes_per_second": 1e10}}}}))
elif request["kind"] == "passes":
    print(json.dumps({{{{"reference_pairs_per_second": 50.0, "generation_tokens_per_second": 20.0}}}}))
elif request["kind"] == "depths":
    seconds = 0.01 + 0.002 * request["batch_size"]
    few = {{{{n: [{ONCE} / 4 + 0.4375 * n * seconds] * 3 for n in request["micro_batches"]}}}}
    whole = {{{{n: [{ONCE} + n * seconds] * 3 for n in request["micro_batches"]}}}}
    print(json.dumps({{{{"seconds": {{{{4: whole, 1: few}}}}}}}}))
elif request["kind"] == "products":
    print(json.dumps({{{{"products": {ANSWERED}}}}}))
elif request["kind"] == "rounds":
    print(json.dumps({{{{"rounds": {{{{n: [{ONCE} + 0.01 + 0.002 * n] * 3 for n in request["sizes"]}}}}, "peak_memory_bytes": 1}}}}))
else:
    size = request["batch_size"]
    if size in {{killed}}:
        os.kill(os.getpid(), signal.SIGKILL)
    if size in {{broken}}:
        raise MemoryError("no room")
    seconds = {{{{n: [{ONCE} + n * (0.01 + 0.002 * size)] * 3 for n in request["micro_batches"]}}}}
    peak = {PEAK} * (1 + size)
    print(json.dumps({{{{"seconds": seconds, "peak_memory_bytes": peak, "gradient_bytes": 64}}}}))
"""


class Run:
    """The command with an invented probe."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.log, self.out, self.capsys = folder / "asked", folder / "calibration", capsys
        self.script = folder / "probe.py"
        self.words = ["--config", str(tiny.config_file(folder)), *tiny.settings(folder)]
        self.words += ["--folder", str(self.out), "--largest", "16", "--rounds", "0"]
        monkeypatch.setattr(calibrate, "PROBE", self.script)
        self.probe()

    def probe(self, killed: tuple[int, ...] = (), broken: tuple[int, ...] = ()) -> None:
        self.script.write_text(INVENTED.format(log=str(self.log), killed=killed, broken=broken))

    def __call__(self, *words: str) -> tuple[int, dict[str, Any], list[str], str]:
        """Status, the last line, what was asked, and what was complained of."""
        self.log.write_text("")
        status = calibrate.main([*self.words, *words])
        captured = self.capsys.readouterr()
        lines = captured.out.strip().splitlines()
        result = json.loads(lines[-1]) if status == 0 and lines else {}
        return status, result, self.log.read_text().split("\n")[:-1], captured.err


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr(curves, "draw", lambda *_: [])  # pictures, which take longer than all the rest
    return Run(tmp_path, monkeypatch, capsys)


def test_a_killed_probe_costs_one_point(run: Run) -> None:
    run.probe(killed=(4,), broken=(16,))
    status, result, asked, _ = run("--length", "64")
    assert status == 0
    assert [one for one in asked if one.startswith("step")] == [f"step {size}" for size in (1, 2, 4, 8, 16)]
    assert [point["batch_size"] for point in result["points"]] == [1, 2, 8]
    assert result["lost"] == {"4": "killed by signal 9", "16": "MemoryError: no room"}
    stored = read_calibration(Path(result["file"]))
    assert stored.curves[0].note.startswith("micro-batch of 4: killed by signal 9")
    assert stored.curves[0].step_overhead_seconds == pytest.approx(ONCE)
    assert stored.curves[0].outside_blocks == pytest.approx(0.25)  # three of four blocks took 0.5625 of the time away


@pytest.mark.parametrize(("answer", "is_said"), [("{4: whole, 1: few}", False), ("{}", False), ("{4: {}}", True)])
def test_a_model_of_which_no_block_can_be_left_out_is_no_fault(run: Run, answer: str, is_said: bool) -> None:
    run.script.write_text(run.script.read_text().replace("{4: whole, 1: few}", answer))
    assert calibrate.main([*run.words, "--quick"]) == 0
    said = " ".join(run.capsys.readouterr().out.split())
    assert ("what is no block's time could not be measured: its rounds were too few" in said) == is_said


def test_too_few_points_are_one_clear_line(run: Run) -> None:
    run.probe(killed=(1, 2))
    status, _, _, complaint = run()
    assert status == 2 and complaint.count("\n") == 1
    assert "could be measured" in complaint and "micro-batch of 1: killed by signal 9" in complaint
    assert not list(run.out.glob("*.json"))


def test_only_what_is_stale_is_measured_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, first, asked, _ = run("--quick")
    assert (
        status == 0 and first["measured"] == len(asked) == 9
    )  # five sizes, their rounds, passes, fewer blocks, the machine
    assert run("--quick")[1]["measured"] == 0
    assert len(run("--quick", "--refresh")[2]) == 9
    _, _, asked, _ = run("--quick", "model.method=full")  # another curve; the machine is the same
    assert [one.split()[0] for one in asked] == ["step"] * 5 + ["rounds", "passes", "depths"]
    _, thorough, asked, _ = run()  # a quick curve does for quick questions only; the longest row, too
    assert asked.count("step 2") == 2 and thorough["gflops"] == 100.0
    assert run("--quick")[2] == [] == run()[2]
    assert len(read_calibration(Path(first["file"])).curves) == 3
    assert len(run("--max-age-days", "0")[2]) == 2 * (5 + 3) + 1
    monkeypatch.setattr(machine, "versions", lambda: {"mlx": "99"})
    assert len(run("--quick")[2]) == 9


def test_a_quantised_models_products_are_measured_first_and_gone_by(run: Run, tmp_path: Path) -> None:
    path = tiny.model_folder(tmp_path / "packed", quantization={"bits": 4, "group_size": 16, "mode": "nvfp4"})
    words = ("--quick", f"model.path={path}")
    status, result, asked, complaint = run(*words)
    assert status == 0, complaint
    assert asked[0] == "products None" and all(one.endswith(" by products") for one in asked[1:]) and len(asked) == 10
    (stored,) = read_calibration(Path(result["file"])).quantised_products
    assert asdict(stored.product) == PRODUCT and asdict(stored.dequantise_from) == {"forward": 64, "backward": 8}
    assert run(*words)[2] == [] and run("--quick")[2] != []
    assert read_calibration(Path(result["file"])).quantised_products == (stored,), "kept for the next run"
    use_quantised_products([stored])
    assert quantised_products.dequantise_from(stored.product, "metal") == (stored.dequantise_from, True)
    use_quantised_products([])
    assert quantised_products.dequantise_from(stored.product, "metal")[1] is False


def test_a_product_is_measured_until_it_is_decided() -> None:
    from benchmarks import probe

    product = Product(64, 32, 0, 4, 32, "affine", "float32")
    assert probe.break_even(product, 0.0) == quantised_products.dequantise_from(product, "cpu")[0]
    for kind in (product, replace(product, experts=4)):
        found = probe.break_even(kind, 0.3)
        assert all(tokens is None or tokens >= 2 for tokens in (found.forward, found.backward))


def test_what_cannot_be_is_measured_again(run: Run) -> None:
    path = Path(run("--quick")[1]["file"])
    stored = json.loads(path.read_text())
    stored["curves"][0]["points"][2]["seconds_median"] *= 3
    path.write_text(json.dumps(stored))
    _, result, asked, _ = run("--quick")
    assert asked[:5] == [f"step {size}" for size in (1, 2, 4, 8, 16)] and "machine None" not in asked
    assert result["points"][2]["seconds_median"] == pytest.approx(0.018)


def test_points_that_break_the_shape_are_measured_again_beside_their_neighbours() -> None:
    probe, _ = recorder({})
    found = calibrate.climb(probe, [1, 2, 4, 8], rounds=0, seconds=10, memory_limit_bytes=None)
    asked: list[list[int]] = []

    def rounds(sizes: list[int]) -> dict[str, Any]:
        asked.append(sizes)
        disturbed = 4 if len(asked) == 1 else None
        return {"rounds": {size: [(3 if size == disturbed else 1) * (ONCE + tau(size))] * 5 for size in sizes}}

    assert calibrate.remeasure(rounds, found) is None
    assert asked == [[1, 2, 4, 8], [2, 4, 8], [2, 4, 8]]  # of ten rounds half were disturbed
    point = found.points()[2]
    assert point.seconds_median == pytest.approx(tau(4)) and point.seconds_spread == pytest.approx(2 * (ONCE + tau(4)))
    found.rounds.clear()
    asked.clear()
    assert calibrate.remeasure(lambda sizes: "killed", found) == "killed" and not found.rounds


def test_another_machines_file_is_not_taken_up(run: Run) -> None:
    path = Path(run("--quick")[1]["file"])
    stored = json.loads(path.read_text())
    stored["machine"]["device_name"] = "Apple M9"
    path.write_text(json.dumps(stored))
    assert run("--quick")[1]["measured"] == 9
    assert read_calibration(path).machine.device_name != "Apple M9"


def test_a_damaged_file_or_a_wrong_word_is_one_clear_line(run: Run) -> None:
    path = Path(run("--quick")[1]["file"])
    path.write_text("{")
    for words, part in (
        (["--quick"], "not valid JSON"),
        (["--length", "many"], "whole numbers"),
        (["--seconds", "0"], "above 0"),
        (["--largest", "1"], "at least 2"),
        (["--fast"], "settings are words without dashes"),
        (["model.method=lara"], "model.method"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["model.path=nowhere"], "nowhere"),
    ):
        status, _, _, complaint = run(*words)
        assert status == 2 and complaint.startswith("error: ") and complaint.count("\n") == 1, complaint
        assert part in complaint


def test_the_page_holds_all_hosts_and_asks_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, monkeypatch, capsys)
    path = Path(run("--quick")[1]["file"])
    stored = read_calibration(path)
    other = stored.model_copy(update={"machine": stored.machine.model_copy(update={"host": "other-host"})})
    (run.out / "other-host.json").write_text(other.model_dump_json())
    _, result, _, _ = run("--quick")
    page = (run.out / "curves.html").read_text()
    assert str(run.out / "curves.html") in result["pictures"] and (run.out / "curves.png").stat().st_size > 10_000
    assert "<svg" in page and "other-host" in page
    assert not re.search(r"https?:|//|<script|<link|@import|\bsrc=", page)
    assert not re.search(r'url\((?!["\']?#)|href="(?!#)', page)


# ---- For real ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2])
def test_what_no_block_takes_is_measured_where_a_block_can_be_left_out(tmp_path: Path, blocks: int) -> None:
    from benchmarks import probe

    words = tiny.settings(tmp_path, model__path=tiny.model_folder(tmp_path / "few", num_hidden_layers=blocks))
    config = load.load(tiny.config_file(tmp_path), words).model_dump(mode="json")
    request = {"config": config, "seconds": 0.01, "batch_size": 1, "micro_batches": [1, 2], "rows": [[2, 2, 2]]}
    seconds = probe.depths(request)["seconds"]
    assert {count: set(times) for count, times in seconds.items()} == ({1: {1, 2}, 2: {1, 2}} if blocks == 2 else {})


def test_a_share_that_rounds_disagree_on_is_none() -> None:
    measured = calibrate.Measured()

    def share(*wholes: float) -> float | None:
        """Of rounds in which all eight blocks took so long, and two blocks 1 s."""
        few, whole = ({"1": [*once], "3": [3 * one for one in once]} for once in ([1.0] * 9, wholes))
        return measured.outside_blocks({"2": few, "8": whole})

    assert share(3.1, 3.1, 3.1) == pytest.approx(0.3 / 3.1)  # six blocks more take 2.1 s, so two take 0.7
    wide = (2.5, 3.7, 2.5, 3.7, 3.1, 3.1, 2.5, 3.7, 3.1)  # a deviation of 0.08, but in nine rounds: the median's share
    assert share(*wide) == pytest.approx(0.3 / 3.1)
    assert (share(4.3, 4.3, 4.3), share(1.05, 1.05, 1.05), share(0.0, 0.0, 0.0)) == (0.0, 0.9, 0.0)
    assert share(2.55, 3.1, 3.65) is None, "a standard error of 0.044"
    assert share(3.1, 3.1) is None and measured.outside_blocks({}) is None


def test_the_share_is_measured_with_the_largest_micro_batch_that_leaves_time_for_three_rounds() -> None:
    """A round takes as long as five micro-batches at most."""
    times = {1: 0.1, 2: 0.15, 4: 0.25, 8: 0.6}
    measured = calibrate.Measured({size: {"seconds": {"1": [once]}} for size, once in times.items()})
    assert [measured.size_in(seconds) for seconds in (0.1, 1.6, 3.7, 3.8)] == [1, 1, 2, 4]
    assert measured.size_in(60.0) == measured.best == 4


@pytest.mark.long
def test_a_quick_calibration_of_a_tiny_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "QUICK_SECONDS", 600.0)  # on a busy machine the last probe comes too late
    words = [
        "--config",
        str(tiny.config_file(tmp_path)),
        "--folder",
        str(tmp_path / "c"),
        *tiny.settings(tmp_path),
    ]
    words += ["--seconds", "0.1", "--rounds", "0", "--largest", "2"]
    assert calibrate.main([*words, "--quick"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    stored = read_calibration(Path(result["file"]))
    (curve,) = stored.curves
    assert [point.batch_size for point in curve.points] == [1, 2] and not result["lost"]
    assert curve.points[0].peak_memory_bytes < curve.points[1].peak_memory_bytes < curve.memory_limit_bytes
    assert curve.step_overhead_seconds >= 0 and curve.gradient_bytes and curve.quick
    assert curve.outside_blocks is None or 0 <= curve.outside_blocks < 1  # None: a busy machine's rounds differ
    assert stored.gflops > 0 and stored.memory_bytes_per_second > 0
    assert curve.reference_pairs_per_second > 0 and curve.generation_tokens_per_second > 0

    # What cannot be would be measured again, and on a busy machine anything is measured.
    file = json.loads(Path(result["file"]).read_text())
    for point in file["curves"][0]["points"]:
        point |= {"seconds_median": 0.01 * (1 + point["batch_size"]), "seconds_spread": 0.0}
    Path(result["file"]).write_text(json.dumps(file))
    hardware = HardwareCalibrator(words[1], words[2:]).calibrate()
    assert hardware["measured"] == 0, "all of it is fresh"
    assert hardware["optimal_batch_size"] in (1, 2)
    assert hardware["gflops"] == stored.gflops and hardware["device"] in ("cpu", "metal", "cuda")
    assert hardware["device_name"] == machine.identify("x").device_name
    with pytest.raises(UserError, match="nowhere"):
        HardwareCalibrator(words[1], [*words[2:], "model.path=nowhere"]).calibrate()


@pytest.mark.mpi(min_size=3)  # two have one link, three have to take turns
@pytest.mark.long
def test_ranks_of_one_host_have_a_file_each_and_their_links(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from lib.distributed import world as world_module
    from lib.system import network

    monkeypatch.setattr(links, "SIZES", [2**10, 2**16])
    world = world_module.start(mpi_and_blas.launch_environment())
    folder = Path(world.broadcast_text(str(tmp_path)))
    mine = folder / f"rank-{world.rank}"
    mine.mkdir()
    run = Run(mine, monkeypatch, capsys)
    run.words[run.words.index("--folder") + 1] = str(folder / "calibration")
    status, result, _, complaint = run("--quick", "--verify", "data.max_length=16")
    assert status == 0, complaint
    hosts = [f"{network.host_name()}-{rank}" for rank in range(world.size)]  # these ranks share a machine
    stored = read_calibration(folder / "calibration" / f"{hosts[world.rank]}.json")
    assert stored.machine.host == hosts[world.rank] and stored.curves[0].slowdown_together >= 1
    sums = [link.peers for link in stored.links if link.operation == "all_sum"]
    pairs = [link.peers for link in stored.links if link.operation == "ping_pong"]
    others = range(1, world.size) if world.rank == 0 else [world.rank]
    assert sums == [tuple(hosts)] and pairs == [(hosts[0], hosts[other]) for other in others]
    if world.rank == 0:
        assert [one["host"] for one in result["hosts"]] == hosts and len(result["splits"]) == 6
        page = (folder / "calibration" / "curves.html").read_text()
        assert all(host in page for host in hosts)
    assert world.gather_text("done") == ["done"] * world.size  # rank 0 has read what the others wrote


# ---- What is made of it ------------------------------------------------------------------------------------


def test_a_links_time() -> None:
    sizes = [(2**10, 1e-4), (2**20, 1.1e-3), (2**26, 6.4e-2)]
    link = links.fit([Transfer(bytes=n, seconds_median=s) for n, s in sizes], backend="mpi")
    assert link.latency_seconds == 1e-4
    assert link.bandwidth_bytes_per_second == pytest.approx((2**26 - 2**10) / (6.4e-2 - 1e-4))
    assert [link.seconds(n) for n, _ in sizes] == pytest.approx([s for _, s in sizes])
    assert link.seconds(2**27) == pytest.approx(1e-4 + 2**27 / link.bandwidth_bytes_per_second)
    # A first message that was disturbed, or a link that takes as long for any: never millions of GB/s.
    for first in (2e-3, 1.1e-3):
        disturbed = links.fit(
            [Transfer(bytes=2**10, seconds_median=first), Transfer(bytes=2**20, seconds_median=1.1e-3)], backend="mpi"
        )
        assert disturbed.bandwidth_bytes_per_second == pytest.approx(2**20 / 1.1e-3)
        assert disturbed.latency_seconds == 1.1e-3
    bare = Link(backend="ring", latency_seconds=1e-3, bandwidth_bytes_per_second=1e9)
    assert bare.seconds(10**6) == pytest.approx(2e-3)


def test_which_machine_for_which_model() -> None:
    published = [read_published()[name] for name in ("m4-max", "m3-ultra")]

    def place(parameters: float, bytes_per_parameter: float = 2.0) -> str | None:
        return machines.machine_for(parameters, published, bytes_per_parameter, overhead=0.1)["machine"]

    assert [place(n * 1e9) for n in (8, 30, 70, 200, 240, 405)] == [
        "m4-max", "m4-max", "m3-ultra", "m3-ultra", "distributed", None,
    ]  # fmt: skip
    assert place(405e9, 0.56) == "m3-ultra" and place(70e9, 0.56) == "m4-max"
    row = machines.machine_for(8e9, published, 2.0, 0.1)
    assert row["fits"] == ["m4-max", "m3-ultra"] and row["together"] == pytest.approx((776 + 278) / 776, rel=1e-3)


def test_hosts_are_compared_on_one_footing_or_not_at_all(tmp_path: Path) -> None:
    published = read_published()["m4-max"]
    curve = BatchCurve.from_rates({1: 5, 2: 8})
    own = HostCalibration(machine=machine.identify("own"), curves=(curve.model_copy(update={"key": KEY}),))
    assert machines.speeds([own, own]) == [8, 8]
    with pytest.raises(UserError, match="nothing compares own, m4-max.*make calibrate"):
        machines.speeds([own, published])
    assert machines.speeds([own.model_copy(update={"gflops": 100.0}), published]) == [100.0, 12956]
    with pytest.raises(UserError, match="--hosts nobody: not known; there are published:m3-ultra"):
        machines.known_hosts("nobody", tmp_path)


KEY = calibrate.CurveKey(model="m", method="lora", dtype="float32", sequence_length=64)


def test_a_page_escapes_what_it_is_given(tmp_path: Path) -> None:
    curve = BatchCurve.from_rates({1: 5, 2: 8}, {1: 10, 2: 20}, 100).model_copy(
        update={"key": KEY, "measured_at": time_now()}
    )
    own = HostCalibration(machine=machine.identify("<b>host</b>"), curves=(curve,))
    curves.draw([own], [], KEY, tmp_path)
    assert "<td>&lt;b&gt;host" in (tmp_path / "curves.html").read_text()


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/user.slice/job/step\n", {}, None),
        ("0::/user.slice/job/step\n", {"user.slice/job/step/memory.max": "max"}, None),
        ("0::/user.slice/job/step\n", {"user.slice/memory.max": 8, "user.slice/job/step/memory.max": "max"}, 8),
        ("0::/user.slice/job\n", {"user.slice/memory.max": 8, "user.slice/job/memory.max": 5}, 5),
        ("0::/user.slice/job\n", {"user.slice/memory.max": 4, "user.slice/job/memory.max": 5}, 4),
        ("0::/\n", {"memory.max": 3}, 3),
        ("4:memory:/docker/abc\n1:cpu:/\n", {"memory/memory.limit_in_bytes": 6}, 6),  # the path is the host's
        ("4:cpu,memory:/a\n", {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/a/memory.limit_in_bytes": 7}, 7),
    ],
)
def test_the_least_limit_of_the_control_groups_around_counts(
    tmp_path: Path, groups: str, limits: dict[str, object], expected: int | None
) -> None:
    assert machine.container_memory_bytes(tmp_path) is None, "where there are none"
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{n}": v for n, v in limits.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n".replace("\n\n", "\n"))
    assert machine.container_memory_bytes(tmp_path) == expected


def test_sensors_of_processors_are_read_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sensor(folder: str, **files: object) -> None:
        (tmp_path / folder).mkdir(parents=True)
        for name, value in files.items():
            (tmp_path / folder / name).write_text(f"{value}\n")

    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.sensors(tmp_path) == {}, "where the system tells nothing"
    sensor("hwmon/hwmon0", name="nvme", temp1_input=88000)
    sensor("hwmon/hwmon1", name="k10temp", temp1_input=61500, temp2_input="", temp3_input=-273000)
    amdgpu = {"power1_average": 50_000_000, "power1_input": 52_000_000, "power2_input": 33_000_000}
    sensor("hwmon/hwmon2", name="amdgpu", temp1_input=55000, **amdgpu)  # the first meter says it twice
    sensor("thermal/thermal_zone0", type="x86_pkg_temp", temp=64000)
    assert machine.sensors(tmp_path) == pytest.approx({"temperature_celsius": 64.0, "power_watts": 83.0})
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho '41, 70.5'; echo '47, [N/A]'\n")
    command.chmod(0o755)
    assert machine.sensors(tmp_path) == pytest.approx({"temperature_celsius": 47.0, "power_watts": 70.5})


def test_this_machine_is_known() -> None:
    here = machine.identify("here")
    assert here.host == "here" and here.device_name and here.os and here.cpu_cores >= 1
    assert 10**8 < here.memory_bytes < 10**14 and 10**8 < machine.memory_limit_bytes() <= 10**14
    assert set(machine.versions()) == {"mlx", "mlx-lm"}


@pytest.mark.parametrize(("registry", "cores"), [('  "gpu-core-count" = 40\n', 40), ("", None)])
def test_a_mac_is_asked_by_its_own_means(monkeypatch: pytest.MonkeyPatch, registry: str, cores: int | None) -> None:
    words = {"ioreg": registry, "hw.memsize": "137438953472\n", "machdep.cpu.brand_string": "Apple M4 Max\n"}

    def output(command: list[str]) -> str:
        return words[command[0] if command[0] == "ioreg" else command[-1]]

    monkeypatch.setattr(os_commands, "output", output)
    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(machine.platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    facts = {"device_name": "Apple M4 Max", "max_recommended_working_set_size": 10**11}
    monkeypatch.setattr(machine, "mlx_device", lambda: ("metal", facts))
    mac = machine.identify("mac")
    assert (mac.device_name, mac.device, mac.gpu_cores, mac.memory_bytes) == (
        "Apple M4 Max",
        "metal",
        cores,
        2**37,
    )
    assert mac.os.startswith("macOS 26.1") and machine.memory_limit_bytes() == 10**11
    assert machine.processor_name() == "Apple M4 Max"


def test_a_cuda_machine_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "mlx_device", lambda: ("cuda", {"device_name": "NVIDIA H200", "total_memory": 10**11}))
    found = machine.identify("box")
    assert (found.device_name, found.memory_bytes, found.gpu_cores) == ("NVIDIA H200", 10**11, None)
    assert machine.memory_limit_bytes() == 10**11


def test_rounds_end_when_the_median_is_certain() -> None:
    """The probe's own clockwork, without a model."""
    from benchmarks.probe import measure

    taken: list[int] = []
    seconds = measure({1: lambda: taken.append(1), 2: lambda: time.sleep(0.01)}, seconds=1)
    assert 2 <= len(seconds[1]) == len(seconds[2]) <= len(taken)
    assert min(seconds[2]) >= 0.01
