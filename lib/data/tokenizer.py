"""The tokenizer of a model's folder, and the ids that the model knows."""

from __future__ import annotations

import json
import logging

from mlx_lm.utils import load_tokenizer

from lib.config import schema
from lib.data.record_formats import JSON
from lib.data.text_tokens import Tokenizer
from lib.data.tokenize import Vocabulary
from lib.data.tokenizer_rules import require_bounded
from lib.errors import UserError, shown
from lib.system.model_folder import end_ids, resolve, why_unreadable


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
    require_bounded(folder)
    _have_logs_shown()
    try:
        return load_tokenizer(
            folder, {"trust_remote_code": settings.trust_remote_code}, eos_token_ids=sorted(end_ids(folder)) or None
        )
    except Exception as error:  # transformers raises whatever its parser met
        raise UserError(
            f"model.path {settings.path}: its tokenizer cannot be loaded: {why_unreadable(folder, error)}"
        ) from None


def _have_logs_shown() -> None:
    """Has transformers tell what it found in a folder, which may be anybody's, as text."""
    from transformers.utils import logging as of_transformers  # here: a rank whose data is kept needs no tokenizer

    for handler in of_transformers.get_logger("transformers").handlers:
        handler.addFilter(_as_text)  # a second time it changes nothing


def _as_text(record: logging.LogRecord) -> bool:
    """Has a line of a log shown by a terminal, not obeyed."""
    record.msg, record.args = shown(record.getMessage()), None
    return True


def vocabulary(settings: schema.ModelSettings) -> Vocabulary:
    """From the model's config.json; of several eos_token_ids the first."""
    stored = stored_config(settings)
    text = {**stored, **(stored.get("text_config") or {})}  # models that also see pictures keep these one level down
    end = text.get("eos_token_id")
    return {
        "vocab_size": text.get("vocab_size"),
        "eos_token_id": next(iter(end), None) if isinstance(end, list) else end,
    }


def stored_config(settings: schema.ModelSettings) -> JSON:
    """The model's config.json."""
    stored: JSON = json.loads((resolve(settings.path, settings.revision) / "config.json").read_text(encoding="utf-8"))
    return stored
