"""Where a model lies: a folder, or a hub name that is fetched first. No MLX here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.config import read_file
from lib.errors import UserError, in_one_line

# The files of an adapter, as mlx-lm names them.
ADAPTER_WEIGHTS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"  # PEFT's, whose configuration has the same name
LFS_POINTER = b"version https://git-lfs"
FETCHED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"]  # of a model on the hub
CONTEXT = ("n_positions", "max_position_embeddings", "n_ctx")


def why_unreadable(folder: Path, error: BaseException) -> str:
    """Why a model's files cannot be loaded, from what mlx-lm or transformers says, in one line."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER):
            return f"{path.name} is Git LFS's pointer to the file, not the file; run `git lfs pull` in the folder"
    return in_one_line(error)


def resolve(path: str, revision: str | None = None) -> Path:
    """The model's local folder; a hub name is fetched first. Raises UserError: neither a folder with a config.json nor
    a model that the hub has."""
    folder = Path(path)
    if not folder.exists():
        if path.count("/") != 1 or path.startswith((".", "/", "~")):
            raise UserError(f"model.path {path}: no such folder (a hub name is of the form owner/name)")
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(path, revision=revision, allow_patterns=FETCHED))
        except Exception as error:  # the hub client raises a dozen unrelated types: not found, gated, offline
            why = f"no such folder here, and the hub did not give it: {in_one_line(error)}"
            raise UserError(f"model.path {path}: {why}") from None
    if folder.is_file():
        raise UserError(f"model.path {path} is a file; give the folder that holds the model's config.json and weights")
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path {path}: the folder has no config.json; give one that mlx-lm or transformers saved")
    read_file.read_object(folder / "config.json", "model.path")  # broken, mlx-lm would not say which file
    return folder


def context_tokens(config: dict[str, Any]) -> int | None:
    """How many tokens a model can see at once, by its config.json; None where it does not say."""
    sizes = {**config, **(config.get("text_config") or {})}
    return next((int(sizes[name]) for name in CONTEXT if isinstance(sizes.get(name), int) and sizes[name] > 0), None)


def end_ids(folder: Path) -> set[int]:
    """Tokens at which generation stops, by config.json and generation_config.json: either may name some alone."""
    ids: set[int] = set()
    for path in (folder / "config.json", folder / "generation_config.json"):
        stored = read_file.read_object(path, "model.path") if path.exists() else {}
        for part in (stored, stored.get("text_config") or {}):
            listed = part.get("eos_token_id")
            listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
            if not all(isinstance(id, int) for id in listed):
                raise UserError(f"model.path {folder}: eos_token_id of its {path.name} holds no tokens' ids")
            ids |= set(listed)
    return ids
