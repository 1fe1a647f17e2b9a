"""Where a model lies: a folder, or a hub name that is fetched first. No MLX here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lib.config import read_file
from lib.errors import UserError, in_one_line

# The files of an adapter, as mlx-lm names them.
ADAPTER_WEIGHTS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"  # PEFT's, whose configuration has the same name
LFS_POINTER = b"version https://git-lfs"
# What is read whole, most of it by transformers, and how many bytes it may have; models' tokenizers have 30 million.
READ_WHOLE = re.compile(r".*\.(json|jinja|model)|(merges|vocab)\.txt")
LARGEST_FILE, LARGEST_TOKENIZER = 2**26, 2**28
NUMBERS = ("rope_theta", "rms_norm_eps", "layer_norm_eps")
NEEDED = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "num_layers", "n_layer", "n_layers")  # 1
COUNTS, SIZES = ("num_", "n_", "d_"), ("vocab_size", "hidden_size", "intermediate_size", "_dim")
CONTEXT = ("n_positions", "max_position_embeddings", "n_ctx")
LARGEST_SIZE = 2**24
MOST_BLOCKS = 2**12
MOST_BITS = 16  # of a quantised number


def adapter_weights(folder: Path) -> Path:
    """The file with the arrays of an adapter, mlx-lm's or PEFT's."""
    return folder / (PEFT_WEIGHTS if (folder / PEFT_WEIGHTS).is_file() else ADAPTER_WEIGHTS)


def why_unreadable(folder: Path, error: BaseException) -> str:
    """Why a model's files cannot be loaded, from what mlx-lm or transformers says, in one line."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER):
            return f"{path.name} is Git LFS's pointer to the file, not the file; run `git lfs pull` in the folder"
    return in_one_line(error)


def resolve(path: str, revision: str | None = None) -> Path:
    """The model's local folder; a hub name is fetched first.

    Raises:
        UserError: neither a folder with a config.json nor a model that the hub has; a file of it that is read whole is
            too large, or is no file.
    """
    folder = Path(path)
    if not folder.exists():
        if path.count("/") != 1 or path.startswith((".", "/", "~")):
            raise UserError(f"model.path {path}: no such folder (a hub name is of the form owner/name)")
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(
                    path,
                    revision=revision,
                    allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"],
                )
            )
        except Exception as error:  # the hub client raises a dozen unrelated types: not found, gated, offline
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"model.path {path}: no such folder here, and the hub did not give it: {reason}") from None
    if folder.is_file():
        raise UserError(f"model.path {path} is a file; give the folder that holds the model's config.json and weights")
    if not (folder / "config.json").is_file():
        raise UserError(
            f"model.path {path}: the folder has no config.json; give a model folder as mlx-lm or transformers saves it"
        )
    for file in folder.iterdir():
        limit_bytes = LARGEST_TOKENIZER if file.name == "tokenizer.json" else LARGEST_FILE
        read_file.require_regular(file, "model.path", limit_bytes if READ_WHOLE.fullmatch(file.name) else None)
    config = read_file.read_object(folder / "config.json", "model.path", LARGEST_FILE)
    if (fault := _absurd(config)) is not None:
        raise UserError(f"model.path {path}: its config.json has {fault}; copy the model again")
    return folder


def _absurd(config: dict[str, Any]) -> str | None:
    """What no model has, in words: sizes that would take all memory before a weight is read, text for a number."""
    text, packed = config.get("text_config"), config.get("quantization") or {}
    if not isinstance(text or {}, dict):
        return "a text_config that is none"
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return f"architectures={str(names)[:30]}, which is no list of names"
    if not isinstance(packed, dict) or any(packed.get(name, 1) in (0, None) for name in ("group_size", "bits")):
        return "a quantization that is none"
    if isinstance(bits := packed.get("bits"), int) and not 0 < bits <= MOST_BITS:
        return f"a quantization to {bits} bits"
    for name, value in [*config.items(), *(text.items() if isinstance(text, dict) else ())]:
        if name in (*NUMBERS, "vocab_size") and isinstance(value, str | list | dict):
            return f"{name}={str(value)[:30]!r}, which is no number"
        is_count = name.startswith(COUNTS)
        if isinstance(value, int) and (is_count or name.endswith(SIZES)):
            most = MOST_BLOCKS if is_count and "layer" in name else LARGEST_SIZE
            least = 1 if name in NEEDED else -1
            if not least <= value <= most:  # -1: none, in some configurations
                return f"{name}={str(value)[:30]}, which may be {least} to {most:,}"
    return None


def context_tokens(config: dict[str, Any]) -> int | None:
    """How many tokens a model can see at once, by its config.json; None where it does not say."""
    text = config.get("text_config")
    known = {**config, **(text if isinstance(text, dict) else {})}
    return next((int(known[name]) for name in CONTEXT if isinstance(known.get(name), int) and known[name] > 0), None)


def end_ids(folder: Path) -> set[int]:
    """Tokens at which generation stops, by config.json and generation_config.json: either may name some alone."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            stored = read_file.read_object(folder / name, "model.path")
            for part in (stored, stored.get("text_config") or {}):
                ids = part.get("eos_token_id") if isinstance(part, dict) else None
                listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
                if not all(isinstance(id, int) for id in listed):
                    raise UserError(
                        f"model.path {folder}: eos_token_id of its {name} is no token's id, or a list of them"
                    )
                found |= set(listed)
    return found
