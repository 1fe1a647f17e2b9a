"""benchmarks/calibrate.py: with an invented probe, and once for real."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibrate, links
from lib.errors import UserError
from lib.plan.calibration import BatchCurve, HardwareCalibrator, Transfer, read_calibration
from lib.system import hardware
from tests import tiny

ONCE = 0.05  # seconds of a step besides its micro-batches
INVENTED = """
import json, os, signal, sys
request = json.loads(sys.argv[1])
with open({log!r}, "a") as log:
    log.write(request["kind"] + " " + str(request.get("batch_size")) + "\\n")
if request["kind"] == "machine":
    answer = {{"gflops": 100.0, "memory_bytes_per_second": 1e10}}
elif request["kind"] == "rounds":
    answer = {{"rounds": {{n: [{once} + 0.01 + 0.002 * n] * 3 for n in request["sizes"]}}, "peak_memory_bytes": 1}}
else:
    size = request["batch_size"]
    if size in {killed}:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds = {{n: [{once} + n * (0.01 + 0.002 * size)] * 3 for n in request["micro_batches"]}}
    answer = {{"seconds": seconds, "peak_memory_bytes": 10**6 * (1 + size), "gradient_bytes": 64}}
print(json.dumps(answer))
"""


class Run:
    """The command with an invented probe."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.log, self.folder, self.capsys = folder / "asked", folder / "calibration", capsys
        self.script = folder / "probe.py"
        self.words = ["--config", str(tiny.config_file(folder)), *tiny.settings(folder), "--largest", "16"]
        monkeypatch.setattr(calibrate, "PROBE", self.script)
        self.probe()

    def probe(self, killed: tuple[int, ...] = ()) -> None:
        self.script.write_text(INVENTED.format(log=str(self.log), killed=killed, once=ONCE))

    def __call__(self, *words: str) -> tuple[int, dict[str, Any], list[str], str]:
        """Status, the last line, what was asked, and standard error."""
        self.log.write_text("")
        status = calibrate.main([*self.words, *words])
        captured = self.capsys.readouterr()
        lines = captured.out.strip().splitlines()
        result = json.loads(lines[-1]) if status == 0 and lines else {}
        return status, result, self.log.read_text().split("\n")[:-1], captured.err


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, monkeypatch, capsys)


def test_a_killed_probe_costs_one_point(run: Run) -> None:
    run.probe(killed=(4,))
    status, result, asked, _ = run("--length", "64")
    assert status == 0 and [one for one in asked if one.startswith("step")] == [
        f"step {size}" for size in (1, 2, 4, 8, 16)
    ]
    assert [point["batch_size"] for point in result["points"]] == [1, 2, 8, 16]
    stored = read_calibration(Path(result["file"]))
    curve = stored.curves[0]
    assert curve.note == "micro-batch of 4: killed by signal 9" and stored.gflops == 100.0
    assert curve.step_overhead_seconds == pytest.approx(ONCE)
    assert curve.points[0].seconds_median == pytest.approx(0.012)
    for field in ("device_name", "optimal_batch_size", "gflops", "pairs_per_second", "memory_bytes", "links"):
        assert field in result


def test_too_few_points_are_one_clear_line(run: Run) -> None:
    run.probe(killed=(1, 2))
    status, _, _, error = run("--length", "64")
    assert status == 2 and "2 batch sizes, and 0 could be measured" in error.splitlines()[-1]
    assert not list(run.folder.glob("[!.]*.json"))


def test_only_what_is_stale_is_measured_again(run: Run, monkeypatch) -> None:
    status, first, asked, _ = run("--quick")
    assert status == 0 and first["measured"] == len(asked) == 7  # five sizes, rounds, the machine
    assert run("--quick")[1]["measured"] == 0
    assert len(run("--quick", "--refresh")[2]) == 7
    assert [one.split()[0] for one in run("--quick", "model.method=full")[2]] == ["step"] * 5 + ["rounds"]
    assert "step 2" in run()[2], "a quick curve is not thorough"
    assert run("--quick")[2] == []
    monkeypatch.setattr(hardware, "versions", lambda: {"mlx": "99"})
    assert len(run("--quick")[2]) == 7


SHAPES = {
    "rising": {1: 10.0, 2: 18.0, 4: 30.0, 8: 42.0, 16: 48.0},
    "knee": {1: 10.0, 2: 19.0, 4: 34.0, 8: 36.0, 16: 31.0},
    "flat": dict.fromkeys((1, 2, 4, 8, 16), 20.0),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_point_that_breaks_the_shape_is_found(shape: str, size: int) -> None:
    assert not calibrate.doubtful_points(BatchCurve.from_rates(SHAPES[shape]).points)
    bad = BatchCurve.from_rates({**SHAPES[shape], size: SHAPES[shape][size] / 3})
    assert list(calibrate.doubtful_points(bad.points)) == [size]


def test_a_disturbed_point_is_measured_again(run: Run) -> None:
    path = Path(run("--quick")[1]["file"])
    stored = json.loads(path.read_text())
    stored["curves"][0]["points"][2]["seconds_median"] *= 5
    path.write_text(json.dumps(stored))
    _, result, asked, _ = run("--quick")
    assert asked[:5] == [f"step {size}" for size in (1, 2, 4, 8, 16)] and "machine None" not in asked
    assert result["points"][2]["seconds_median"] == pytest.approx(0.018)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--length", "many"], "whole numbers"),
        (["--seconds", "nan"], "above 0"),
        (["--largest", "0"], "--length and --largest at least 2"),
        (["--fast"], "settings are words without dashes"),
        (["model.method=lara"], "model.method"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["model.path=nowhere"], "nowhere"),
    ],
)
def test_a_wrong_word_is_one_clear_line(run: Run, words: list[str], text: str) -> None:
    status, _, _, error = run(*words)
    assert status == 2 and text in error.splitlines()[-1] and error.splitlines()[-1].startswith("error: ")


def test_the_climb_ends_before_memory_does() -> None:
    def probe(size: int, counts: list[int]) -> dict[str, Any]:
        times = {str(count): [0.1 * count * size] for count in counts}
        return {"seconds": times, "peak_memory_bytes": 1000 * size, "weights_bytes": 0}

    found = calibrate.climb(probe, [1, 2, 4, 8, 16], 10.0, 9000)
    assert sorted(found.answers) == [1, 2, 4, 8] and found.lost == {16: "would not fit"}
    assert sorted(calibrate.climb(probe, [1, 4, 16], 10.0, None, lambda: True).answers) == [1, 4]


def test_a_links_time() -> None:
    sizes = {2**10: 1e-4, 2**20: 1.1e-3, 2**24: 1.61e-2}
    link = links.fit([Transfer(bytes=b, seconds_median=s) for b, s in sizes.items()], backend="ring", peers=("a", "b"))
    assert link.latency_seconds == 1e-4 and link.bandwidth_bytes_per_second == pytest.approx(2**24 / 0.016, rel=0.01)
    assert link.seconds(2**20) == pytest.approx(1.1e-3) and link.seconds(2**26) == pytest.approx(0.064, rel=0.02)


def test_the_seeds_name_for_it(monkeypatch) -> None:
    def answered(command: list[str], **_: Any) -> Any:
        assert command[1].endswith("benchmarks/calibrate.py") and "--quick" in command
        return subprocess.CompletedProcess(command, 0, 'text\n{"optimal_batch_size": 8}\n', "")

    monkeypatch.setattr(subprocess, "run", answered)
    assert HardwareCalibrator().calibrate() == {"optimal_batch_size": 8}
    failed = subprocess.CompletedProcess([], 2, "", "error: model.path nowhere\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"^model.path nowhere$"):
        HardwareCalibrator().calibrate()


@pytest.mark.long
def test_a_calibration_of_a_tiny_model(tmp_path) -> None:
    """By short measurements, and not --quick, which ends after a minute however busy the machine is."""
    words = ["--config", str(tiny.config_file(tmp_path)), *tiny.settings(tmp_path), "--folder", str(tmp_path / "found")]
    command = [sys.executable, "benchmarks/calibrate.py", "--seconds", "0.2", "--largest", "2", *words]
    done = subprocess.run(command, cwd=tiny.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stored = read_calibration(Path(json.loads(done.stdout.splitlines()[-1])["file"]))
    assert stored.gflops and stored.curves[0].gradient_bytes
