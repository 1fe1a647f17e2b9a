"""Commands start without what only texts need, and texts find it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lib import late_imports
from lib.late_imports import LATE, LateModule, LateName
from tests.tiny import ROOT

RUN = """
import sys
from lib.evaluate import evaluator
from lib.rollouts import rounds
from lib.training import loop
loaded = [name for name in sys.argv[1:] if name in sys.modules]
assert not loaded, loaded
"""
TEXT = """
from pathlib import Path
from mlx_lm import generate, utils
tokenizer = utils.load_tokenizer(Path("configs/quickstart/model"))
assert tokenizer.decode(tokenizer.encode("1+2=")) == "1+2="
import mlx_lm.tokenizer_utils, transformers
assert type(tokenizer) is mlx_lm.tokenizer_utils.TokenizerWrapper
assert isinstance(tokenizer, utils.TokenizerWrapper) and not isinstance("text", utils.TokenizerWrapper)
assert isinstance(tokenizer._tokenizer, transformers.PreTrainedTokenizerBase)
assert transformers.AutoTokenizer.__module__.startswith("transformers.")
import huggingface_hub
assert utils.snapshot_download._real() is huggingface_hub.snapshot_download
"""


def test_a_run_starts_without_what_only_texts_need_and_a_text_finds_it() -> None:
    done = subprocess.run([sys.executable, "-c", RUN + TEXT, *LATE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stand_in_is_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = LateModule("decimal")
    monkeypatch.setitem(LATE, "decimal", ("Decimal",))
    import decimal

    monkeypatch.setitem(sys.modules, "decimal", module)
    late = module.Decimal
    assert isinstance(late, LateName) and sys.modules["decimal"] is module
    assert module.ROUND_UP == decimal.ROUND_UP and sys.modules["decimal"] is not module
    real = sys.modules["decimal"].Decimal
    assert late("0.1") == real("0.1") and type(late("0.1")) is real and late.from_float(0.5) == real("0.5")
    assert isinstance(real(1), late) and not isinstance(1, late) and issubclass(real, late)
    assert issubclass(type("Own", (real,), {}), late) and (late | None).__args__[0] is late
    assert (None | late).__args__[1] is late

    class Own(late):  # type: ignore[misc,valid-type]
        """As mlx-lm inherits from a tokenizer."""

    assert Own.__mro__[1] is real


def test_what_is_imported_already_or_meanwhile_has_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    import decimal

    monkeypatch.setattr(late_imports, "LATE", dict.fromkeys(("decimal", "of_texts", "of_downloads"), ("Name",)))
    with late_imports._stand_ins():
        assert sys.modules["decimal"] is decimal and isinstance(sys.modules["of_texts"], LateModule)
        monkeypatch.setitem(sys.modules, "of_downloads", decimal)  # the real one took the place
    assert sys.modules["decimal"] is sys.modules["of_downloads"] is decimal and "of_texts" not in sys.modules
