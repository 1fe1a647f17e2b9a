"""What the models of a run can look up: policy and reference see the same rows, so the smaller of two tables counts."""

from __future__ import annotations

from lib.config.schema import ModelSettings
from lib.data import tokenizer
from lib.data.tokenize import Vocabulary
from lib.model import load


def vocabulary(settings: ModelSettings) -> Vocabulary:
    """The ids and positions that both models know, by their tables and by config.json, and the policy's end token.

    Raises:
        UserError: as `load.load`.
    """
    known = tokenizer.vocabulary(settings)
    models = [settings] if settings.reference == "initial" else [settings, load.reference_settings(settings)]
    sizes = [load.table_sizes(model) for model in models]
    ids = [size for size in (known["vocab_size"], *(tables.tokens for tables in sizes)) if size is not None]
    positions = [tables.positions for tables in sizes if tables.positions is not None]
    return {
        "eos_token_id": known["eos_token_id"],
        "vocab_size": min(ids, default=None),
        "positions": min(positions, default=None),
    }
