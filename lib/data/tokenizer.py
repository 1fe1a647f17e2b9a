"""The tokenizer of a model's folder, and the ids that the model knows."""

from __future__ import annotations

import json
from pathlib import Path

from mlx_lm.utils import load_tokenizer

from lib.config import schema
from lib.data.record_formats import JSON
from lib.data.text_tokens import Tokenizer
from lib.data.tokenize import Vocabulary
from lib.errors import UserError
from lib.system.model_folder import resolve


def load_tokenizer_of(settings: schema.ModelSettings) -> Tokenizer | None:
    """mlx-lm's tokenizer of the model's folder, or None where there is none.

    Raises:
        UserError: there are tokenizer files, but they cannot be loaded.
    """
    folder = resolve(settings.path, settings.revision)
    if not any(
        (folder / name).exists()
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
    ):
        return None
    try:
        return load_tokenizer(
            folder, {"trust_remote_code": settings.trust_remote_code}, eos_token_ids=sorted(end_ids_of(folder)) or None
        )
    except Exception as error:  # transformers raises whatever its parser met
        raise UserError(
            f"model.path {settings.path}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}"
        ) from None


def end_ids_of(folder: Path) -> set[int]:
    """Tokens at which generation stops, by config.json and generation_config.json: either may name some alone."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            stored = json.loads((folder / name).read_text())
            text = stored.get("text_config") or {}
            for ids in (stored.get("eos_token_id"), text.get("eos_token_id")):
                found |= {ids} if isinstance(ids, int) else set(ids or ())
    return found


def vocabulary(settings: schema.ModelSettings) -> Vocabulary:
    """From the model's config.json; of several eos_token_ids the first."""
    stored = stored_config(settings)
    text = {**stored, **stored.get("text_config", {})}  # models that also see pictures keep these one level down
    end = text.get("eos_token_id")
    return {"vocab_size": text.get("vocab_size"), "eos_token_id": end[0] if isinstance(end, list) else end}


def stored_config(settings: schema.ModelSettings) -> JSON:
    """The model's config.json."""
    stored: JSON = json.loads((resolve(settings.path, settings.revision) / "config.json").read_text())
    return stored
