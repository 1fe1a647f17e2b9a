"""A Mac's GPU, imitated: lit displays, the watchdog's variable, wired memory."""

import os
import platform
import subprocess
import sys

import mlx.core as mx
import pytest

import train
from lib.system import hardware, metal, mpi_and_blas
from lib.training import divided_world, loop  # noqa: F401  imported before this machine is taken for a Mac
from tests import macs, tiny
from tests.tiny import ROOT

LIT = macs.profile(("Color LCD", True), ("DELL U2722DE", False))
DARK = macs.profile(("Color LCD", False))


@pytest.mark.parametrize(
    ("setting", "displays", "told", "asked_of_pmset"),
    [
        ("advise", LIT, ["Color LCD"], None),
        ("sleep", LIT, [], "displaysleepnow\n"),
        ("sleep", DARK, [], None),
        ("ignore", LIT, [], None),
    ],
)
def test_a_lit_display_is_told_or_put_to_sleep(
    tmp_path, monkeypatch, setting: str, displays: str, told: list[str], asked_of_pmset: str | None
) -> None:
    calls = macs.is_mac(monkeypatch, tmp_path, displays)
    assert metal.attend_displays(setting, is_first_here=True, only_look=False) == told
    assert (calls.read_text() if calls.exists() else None) == asked_of_pmset
    calls.unlink(missing_ok=True)
    (tmp_path / "system_profiler.output").write_text(displays)
    assert metal.attend_displays(setting, is_first_here=False, only_look=False) == [], "another rank does it"
    lit = ["Color LCD"] if setting != "ignore" and displays == LIT else []
    assert metal.attend_displays(setting, is_first_here=True, only_look=True) == lit
    assert not calls.exists(), "a dry run changes nothing"


def test_a_display_that_does_not_sleep_and_tools_that_fail_are_told(tmp_path, monkeypatch) -> None:
    macs.is_mac(monkeypatch, tmp_path, LIT)
    macs.tool(tmp_path, "pmset", status=1)  # and the display stays on
    assert metal.attend_displays("sleep", True, False) == ["Color LCD"]
    macs.tool(tmp_path, "system_profiler", LIT, status=1)
    assert metal.lit_displays() == []
    (tmp_path / "system_profiler").unlink()
    assert metal.lit_displays() == []
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    macs.tool(tmp_path, "system_profiler", LIT)
    assert metal.lit_displays() == [], "a program of that name on another system"


def test_every_host_with_a_lit_display_is_named_in_one_line() -> None:
    told = metal.advice(["mac-a", "box", "mac-b"], [["Color LCD"], [], ["LG", "DELL"]])
    assert told and "\n" not in told and "(mac-a: Color LCD; mac-b: LG, DELL)" in told and "metal.display=sleep" in told
    assert metal.advice(["mac-a", "mac-a"], [[], []]) is None
    both = metal.advice(["mac-a", "mac-a"], [["Color LCD"], []])
    assert both and "mac-a: Color LCD" in both, "of two ranks of a host the first one looks"


def test_the_watchdog_is_relaxed_before_mlx_comes_in_unless_the_user_says_otherwise() -> None:
    code = "import sys; sys.platform = 'darwin'; from lib.system import mpi_and_blas; mpi_and_blas.prepare(); "
    code += f"import os; print(os.environ.get({mpi_and_blas.WATCHDOG_RELAXED!r}))"
    free = {name: value for name, value in os.environ.items() if name != mpi_and_blas.WATCHDOG_RELAXED}
    for environment, expected in (({}, "1"), ({mpi_and_blas.WATCHDOG_RELAXED: "0"}, "0")):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=free | environment)
        assert done.stdout.strip() == expected, done.stderr


def test_the_wired_limit_follows_the_setting(monkeypatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(metal, "uses_metal", lambda: True)
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 128 * 2**30)
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: limits.append(limit) or 0)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 96 * 2**30})
    assert metal.keep_wired(100 * 2**30) and not metal.keep_wired(16 * 2**30)
    assert limits == [96 * 2**30, 0]


def test_a_run_says_that_a_display_is_lit(tmp_path, monkeypatch, capsys) -> None:
    macs.is_mac(monkeypatch, tmp_path / "bin", LIT)
    monkeypatch.setattr(divided_world.metal, "keep_wired", lambda size: False)
    words = ["--config", str(tiny.config_file(tmp_path)), *tiny.settings(tmp_path), "--dry-run"]
    assert train.main(words) == 0
    assert "Color LCD" in capsys.readouterr().out
