"""Commands start without what only texts need, and texts find it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from lib.late_imports import LATE, LateName
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


OPEN_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
from lib.model import load
import mlx_lm.utils
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (AFTER, HARD), resource.getrlimit(resource.RLIMIT_NOFILE)
assert resource.setrlimit is not mlx_lm.utils.resource.setrlimit
"""


@pytest.mark.parametrize(("soft", "hard", "after"), [(256, 1024, 1024), (256, 8192, 2048), (8192, 8192, 8192)])
def test_an_import_of_mlx_lm_lowers_no_limit_and_asks_for_none_that_is_not_allowed(
    soft: int, hard: int, after: int
) -> None:
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"this system allows fewer than {hard} open files")
    values = {"SOFT": str(soft), "HARD": str(hard), "AFTER": str(after)}
    program = OPEN_FILES
    for name, value in values.items():
        program = program.replace(name, value)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nobody_else_sees_a_stand_in(tmp_path: Path) -> None:
    """As another version of mlx-lm, which takes names that are not late, and what it imports besides."""
    pieces = {
        "mlx_lm/__init__.py": "from . import utils",
        "mlx_lm/utils.py": """
            from huggingface_hub import snapshot_download
            from transformers import PreTrainedTokenizer
            from .tokenizer_utils import load as own_load
            import tracker
            from .tokenizer_utils import Other, load
        """,
        "mlx_lm/tokenizer_utils.py": "from transformers import AutoTokenizer; Other = load = AutoTokenizer",
        "tracker.py": """
            import importlib.util
            import huggingface_hub.utils
            assert importlib.util.find_spec("transformers") and huggingface_hub.__version__
        """,
        "huggingface_hub/__init__.py": "__version__ = '9'; snapshot_download = int",
        "huggingface_hub/utils.py": "",
        "transformers/__init__.py": "import huggingface_hub.utils; AutoTokenizer = PreTrainedTokenizer = str",
    }
    for name, text in pieces.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    program = """
        import lib
        from mlx_lm import utils
        assert [type(one).__name__ for one in (utils.PreTrainedTokenizer, utils.own_load)] == ["LateName", "LateName"]
        assert isinstance("text", utils.PreTrainedTokenizer) and utils.own_load(7) == "7"
        assert utils.load is utils.Other is str and isinstance(5, utils.snapshot_download)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stand_in_is_what_it_stands_for() -> None:
    late: Any = LateName("decimal", "Decimal")
    assert late("0.1") == Decimal("0.1") and type(late("0.1")) is Decimal and late.from_float(0.5) == Decimal("0.5")
    assert isinstance(Decimal(1), late) and not isinstance(1, late) and issubclass(Decimal, late)
    assert issubclass(type("Own", (Decimal,), {}), late) and (late | None).__args__[0] is late

    class Own(late):  # type: ignore[misc]
        """As mlx-lm inherits from a tokenizer."""

    assert Own.__mro__[1] is Decimal
