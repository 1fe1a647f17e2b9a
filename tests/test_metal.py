"""What is particular to a Mac's GPU, on an imitated one: its displays, its watchdog, its wired memory."""

from __future__ import annotations

import importlib
import io
import os
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import train
from lib.config import train_arguments
from lib.config.metal_settings import MetalSettings
from lib.config.schema import Config
from lib.data import micro_batches
from lib.data.collate import collate
from lib.data.dataset import load_dataset
from lib.distributed.world import World
from lib.model import load as models
from lib.system import hardware, metal, mpi_and_blas
from lib.system.metal import Pace
from lib.training import reference_model
from tests import macs, tiny
from tests.tiny import ROOT

LIT = macs.profile(("Color LCD", True), ("DELL U2722DE", False))
DARK = macs.profile(("Color LCD", False))


# ---- Displays


def test_a_display_is_lit_if_it_is_online_and_not_asleep() -> None:
    assert metal.lit(LIT) == ["Color LCD"] and metal.lit(DARK) == metal.lit(macs.profile()) == []
    offline = LIT.replace('"spdisplays_online": "spdisplays_yes"', '"spdisplays_online": "spdisplays_no"')
    assert metal.lit(offline) == []
    assert [metal.lit(text) for text in ("", "[]", "{}", "no JSON", '{"SPDisplaysDataType": 3}')] == [[]] * 5


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    displays: str,
    told: list[str],
    asked_of_pmset: str | None,
) -> None:
    calls = macs.is_mac(monkeypatch, tmp_path, displays)
    settings = MetalSettings.model_validate({"display": setting})
    assert metal.attend_displays(settings, is_first_here=True, only_look=False) == told
    assert (calls.read_text() if calls.exists() else None) == asked_of_pmset
    calls.unlink(missing_ok=True)
    (tmp_path / "system_profiler.output").write_text(displays)
    assert metal.attend_displays(settings, is_first_here=False, only_look=False) == [], "another rank does it"
    lit = [] if setting == "ignore" else metal.lit(displays)
    assert metal.attend_displays(settings, is_first_here=True, only_look=True) == lit
    assert not calls.exists(), "a dry run changes nothing"


def test_a_display_that_does_not_sleep_and_tools_that_fail_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    macs.is_mac(monkeypatch, tmp_path, LIT)
    macs.tool(tmp_path, "pmset", status=1)  # and the display stays on
    assert metal.attend_displays(MetalSettings(display="sleep"), True, False) == ["Color LCD"]
    macs.tool(tmp_path, "system_profiler", LIT, status=1)
    assert metal.lit_displays() == []
    (tmp_path / "system_profiler").unlink()
    assert metal.lit_displays() == []
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    macs.tool(tmp_path, "system_profiler", LIT)
    assert metal.lit_displays() == [] and not metal.sleep_displays(), "a program of that name on another system"


def test_every_host_with_a_lit_display_is_named_in_one_line() -> None:
    told = metal.advice(["mac-a", "box", "mac-b"], [["Color LCD"], [], ["LG", "DELL"]])
    assert told and "\n" not in told and "(mac-a: Color LCD; mac-b: LG, DELL)" in told and "metal.display=sleep" in told
    assert metal.advice(["mac-a", "mac-a"], [[], []]) is None
    both = metal.advice(["mac-a", "mac-a"], [["Color LCD"], []])
    assert both and "mac-a: Color LCD" in both, "of two ranks of a host the first one looks"


# ---- What comes before MLX


def environment_of(folder: Path, *words: str, **environment: str) -> str:
    """AGX_RELAX_CDM_CTXSTORE_TIMEOUT as MLX finds it in a process of train.py's on an imitated Mac."""
    python = macs.interpreter(folder, folder)
    show = (
        "import importlib.abc, os, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'mlx.core':\n"
        "            print('found', os.environ.get('AGX_RELAX_CDM_CTXSTORE_TIMEOUT'), flush=True); os._exit(0)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import train; train.main(sys.argv[1:])\n"
    )
    free = {name: value for name, value in os.environ.items() if name != metal.WATCHDOG_RELAXED}
    done = subprocess.run(
        [python, "-c", show, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, env=free | environment
    )
    assert done.stdout.startswith("found "), done.stderr
    return done.stdout.split()[1]


def test_the_watchdog_is_relaxed_before_mlx_comes_in_unless_that_is_not_wanted(tmp_path: Path) -> None:
    assert environment_of(tmp_path) == "1"
    assert environment_of(tmp_path, "metal.relax_watchdog=false") == "None"
    assert environment_of(tmp_path, AGX_RELAX_CDM_CTXSTORE_TIMEOUT="0") == "0", "the user's own"
    assert environment_of(tmp_path, "no.such.setting=1") == "1", "told later, by all ranks as one"


def test_on_linux_nothing_is_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(metal.WATCHDOG_RELAXED, raising=False)
    mpi_and_blas.prepare()
    assert metal.WATCHDOG_RELAXED not in os.environ
    assert metal.relaxes(train_arguments.parse(["metal.relax_watchdog=false"], None)), "and nothing is read for it"


# ---- Wired memory


def test_memory_is_wired_where_the_model_takes_half_of_it() -> None:
    size = 128 * 2**30
    decided = [metal.wires("auto", part * size // 100, size) for part in (0, 12, 49, 50, 90)]
    assert decided == [False, False, False, True, True]
    assert metal.wires("always", 0, None) and not metal.wires("never", size, size)
    assert not metal.wires("auto", size, None), "where nobody tells the memory"


def test_wired_or_not_holds_for_generation_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits: list[int] = []
    facts = {"max_recommended_working_set_size": 96 * 2**30}
    monkeypatch.setattr("lib.system.metal.uses_metal", lambda: True)
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 128 * 2**30)
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: limits.append(limit) or 0)
    monkeypatch.setattr(mx, "device_info", lambda: facts)
    generate, utils, server = (importlib.import_module(f"mlx_lm.{name}") for name in ("generate", "utils", "server"))
    for module in (generate, utils, server):  # given back after the test
        monkeypatch.setattr(module, "maybe_set_recommended_wired_limit", utils.maybe_set_recommended_wired_limit)
    config = Config.model_validate(
        {"model": {"path": str(tiny.model_folder(tmp_path)), "random_init": True}, "data": {"train": "none"}}
    )
    model = models.load(config.model, 0)
    assert metal.keep_wired("auto", 100 * 2**30) and limits == [96 * 2**30]
    with generate.wired_limit(model):
        assert limits.pop() == 96 * 2**30, "mlx-lm's own, while memory is wired anyhow"
    limits.clear()
    assert not metal.keep_wired("auto", 16 * 2**30) and limits == [0]
    with generate.wired_limit(model):
        pass
    assert server.maybe_set_recommended_wired_limit() is None  # as its main() does
    assert limits == [0], "mlx-lm would wire all that there is"


def test_a_backend_follows_the_runs_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mlx_lm import server

    from lib.serve import backend_process
    from lib.serve import command as serve_command

    folder, asked = tiny.model_folder(tmp_path), []
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    config = Config.model_validate(
        {"model": {"path": str(folder)}, "data": {"train": "none"}, "metal": {"wired": "never"}}
    )
    (recipe,) = serve_command.recipes(config, None).values()
    assert recipe is not None
    monkeypatch.setattr(metal, "keep_wired", lambda setting, size: asked.append((setting, size)))
    monkeypatch.setattr(backend_process, "_end_with_input", lambda path: None)
    monkeypatch.setattr(backend_process.os, "_exit", lambda status: None)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"secret": "secret", "socket": "/nowhere/backend"}\n'))
    monkeypatch.setattr("sys.argv", [])  # as it was, after the test
    monkeypatch.setenv("MLX_MPI_LIBNAME", "")  # likewise: a backend has none, which no test after this one may inherit
    for name in ("main", "run"):
        monkeypatch.setattr(server, name, lambda *_: None)
    backend_process.main([*recipe.words])
    assert asked == [("never", 100)]


def test_a_probe_measures_under_the_setting_that_training_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import probe

    asked: list[tuple[str, int]] = []
    monkeypatch.setattr("lib.system.metal.keep_wired", lambda setting, size: asked.append((setting, size)))
    words = [*tiny.settings(tmp_path), "train.steps=1", "run.name=run", "metal.wired=always"]
    config_words = ["--config", str(tiny.config_file(tmp_path)), *words]
    assert train.main(config_words) == 0
    probe.trainable_model(train_arguments.read_config(train_arguments.parse(config_words, None)))
    assert len(asked) == 2 and asked[0] == asked[1] and asked[0][0] == "always" and asked[0][1] > 0


# ---- How long an evaluation may take


@given(st.integers(1, 512), st.floats(1e-4, 100), st.floats(0.01, 100))
def test_an_evaluation_ends_in_time_or_is_one_row(size: int, seconds: float, limit: float) -> None:
    rows = metal.most_rows(size, seconds, limit)
    assert 1 <= rows <= size and (rows * seconds <= limit or rows == 1)
    assert rows == size or (rows & (rows - 1) == 0 and (2 * rows >= size or 2 * rows * seconds > limit))
    assert metal.most_rows(size, None, limit) == metal.most_rows(size, seconds, None) == size


def test_the_pace_follows_steps_that_compiled_nothing() -> None:
    pace = Pace(2.0, 0.5)
    assert pace.most_rows(16) == 4
    pace.observe(16, 80.0, traces=1)
    assert pace.most_rows(16) == 4, "most of it was compiling"
    pace.observe(16, 4.0, traces=1)
    assert pace.most_rows(16) == 8
    pace.observe(0, 0.0, traces=1)  # a step without rows of this rank
    assert pace.most_rows(16) == 8
    shared = Pace(2.0, 0.5, is_fixed=True)
    shared.observe(16, 4.0, traces=0)
    assert shared.most_rows(16) == 4, "ranks that share a model would part"
    assert Pace().most_rows(16) == 16


def test_the_estimate_is_the_models_products_at_this_machines_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metal, "RATE_WIDTH", 64)  # a CPU takes seconds for what a Mac's GPU does in one thousandth
    metal.matmul_rate.cache_clear()
    assert metal.expected_seconds(10**9, 100, 2.0, 1e12) == pytest.approx(2e9 * 100 * 2 / 0.6e12)
    settings = {"model": {"path": str(tiny.model_folder(tmp_path)), "random_init": True}, "data": {"train": "none"}}
    config = Config.model_validate(settings)
    model = models.load(config.model, 0)
    assert metal.pace(config, model, 100.0, metal.FORWARD, World()).limit_seconds is None, "there is no Metal here"
    monkeypatch.setattr("lib.system.metal.uses_metal", lambda: True)
    pace = metal.pace(config, model, 100.0, metal.FORWARD, World())
    assert pace.limit_seconds == 2.0 and pace.seconds_per_row and 0 < pace.seconds_per_row < 1
    twice = metal.pace(config, model, 100.0, metal.training_passes("lora", False), World())
    assert twice.seconds_per_row == pytest.approx(2 * pace.seconds_per_row)
    passes = [metal.training_passes(method, again) for method in ("lora", "dora", "full") for again in (False, True)]
    assert passes == [2, 3, 2, 3, 3, 4]
    metal.matmul_rate.cache_clear()
    never = config.model_copy(update={"metal": MetalSettings(evaluation_seconds=None)})
    assert metal.pace(never, model, 100.0, metal.FORWARD, World()).limit_seconds is None


def test_ranks_that_share_a_model_evaluate_as_many_rows(tmp_path: Path) -> None:
    """A Mac beside a Linux box: the box, which has no limit of its own, follows."""
    config = Config.model_validate({"model": {"path": "none"}, "data": {"train": "none"}})
    shared = SimpleNamespace(size=2, workers=SimpleNamespace(size=1), gather_text=lambda text, what: [text, "0.9"])
    pace = metal.pace(config, None, 100.0, metal.FORWARD, shared)
    assert (pace.seconds_per_row, pace.limit_seconds, pace.is_fixed) == (0.9, 2.0, True)


@pytest.mark.parametrize("strategy", ["synchronous", "independent"])
def test_pieces_train_what_whole_micro_batches_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    sizes: dict[str, list[int]] = {}
    words = [*tiny.settings(tmp_path), "train.steps=4", f"strategy={strategy}", "plan.micro_batch_sizes=[8]"]
    words = ["--config", str(tiny.config_file(tmp_path)), *words]
    real = micro_batches.collate_trained
    for name, pace in (("whole", Pace()), ("pieces", Pace(1.0, 0.5, is_fixed=True))):
        sizes[name] = []
        monkeypatch.setattr(metal, "pace", lambda *_, pace=pace: pace)
        seen = sizes[name]
        monkeypatch.setattr(
            micro_batches, "collate_trained", lambda rows, *more, seen=seen: seen.append(len(rows)) or real(rows, *more)
        )
        assert train.main([*words, f"run.name={name}"]) == 0
    assert max(sizes["whole"]) == 8 and max(sizes["pieces"]) == 2
    assert tiny.difference(tmp_path / "runs/whole", tmp_path / "runs/pieces") <= 1e-5


def test_the_reference_pass_is_evaluated_in_pieces_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--config", str(tiny.config_file(tmp_path)), *tiny.settings(tmp_path), "run.name=run"]
    config = train_arguments.read_config(train_arguments.parse(words, None))
    model = models.load(config.model, 0)
    data = load_dataset(config.data.train, config.data, "preference", None, eos_token_id=1, vocab_size=48)
    sizes: dict[str, list[int]] = {}
    found = {}
    for name, pace in (("whole", Pace()), ("pieces", Pace(1.0, 0.5, is_fixed=True))):
        seen = sizes.setdefault(name, [])
        monkeypatch.setattr(metal, "pace", lambda *_, pace=pace: pace)
        monkeypatch.setattr(
            reference_model, "collate", lambda rows, *more, seen=seen: seen.append(len(rows)) or collate(rows, *more)
        )
        found[name] = reference_model.dataset_logps(model, data, World(), [1], config)
    assert max(sizes["whole"]) == 16 and max(sizes["pieces"]) == 2
    np.testing.assert_allclose(found["pieces"], found["whole"], rtol=1e-5)


def test_a_run_says_that_a_display_is_lit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    macs.is_mac(monkeypatch, tmp_path / "bin", LIT)
    monkeypatch.setattr("lib.training.divided_world.metal.keep_wired", lambda setting, size: False)
    words = ["--config", str(tiny.config_file(tmp_path)), *tiny.settings(tmp_path), "--dry-run"]
    assert train.main(words) == 0
    assert "Color LCD" in capsys.readouterr().out
