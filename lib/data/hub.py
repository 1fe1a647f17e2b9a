"""Data sets of the Hugging Face hub, or of a local folder of the same layout, as files on this disk.

hf://OWNER/NAME, hf://OWNER/NAME?config=C&split=S&revision=R&rows=N, hf:///local/folder?split=S. The repository's
README.md may name configurations and their files (huggingface.co/docs/hub/datasets-manual-configuration); otherwise a
configuration is a folder, and words in the names of files and folders say of which split they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote

from lib.config.read_file import front_matter
from lib.config.settings import DataSettings
from lib.data import record_files
from lib.data.record_files import ENDINGS
from lib.data.record_formats import Unusable
from lib.errors import UserError, in_one_line
from lib.system import files

PREFIX = "hf://"
SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
CONVERTED = "refs/convert/parquet"  # where the hub keeps what it has made of data sets in other forms
NO_RECORDS = {"dataset_infos.json", "dataset_info.json", "state.json", "config.json"}


class Split(NamedTuple):
    """The files of a data set's split."""

    files: list[str]  # their names within the repository
    path_of: Callable[[str], Path]  # a file on this disk, fetched where it is missing
    url_of: Callable[[str], str]  # its name for HfFileSystem, or its path


def fetch(source: str, settings: DataSettings, tell: Callable[[str], None]) -> list[Path]:
    """The files of a data set's split on this disk, fetched where they are missing; of ?rows=N the first N records.

    Raises UserError: no such data set, configuration or split; the message names what there is.
    """
    with _reaching(source):
        split, options = _open_split(source)
        tell(f"fetching {source}: {len(split.files):,} files")
        paths = [*map(split.path_of, split.files)]
        if "rows" not in options:
            return paths
        key = f"{source} {[(str(path), path.stat().st_mtime_ns) for path in paths]}"
        kept = Path(settings.cache_dir) / f"hub-{hashlib.sha256(key.encode()).hexdigest()[:24]}.jsonl"
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            lines = ((path, line) for path in paths for line in record_files.read(str(path)))
            with files.replacing(kept) as file:
                for path, (number, record) in itertools.islice(lines, int(options["rows"])):
                    if isinstance(record, Unusable):
                        raise UserError(f"{path}:{number}: {record}")
                    file.write(json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n")
        return [kept]


@contextlib.contextmanager
def _reaching(source: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    except Exception as error:  # not found, not allowed, offline: a dozen unrelated types
        raise UserError(f"{source}: cannot be opened: {in_one_line(error)}; what was fetched is kept") from None


def _open_split(source: str) -> tuple[Split, dict[str, str]]:
    """The split that a source names, and its options. Raises UserError: an option that is none, or as `fetch`."""
    name, _, query = source.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - {"config", "split", "revision", "rows"})
    if not name or unknown or not re.fullmatch(r"[1-9][0-9]{0,17}", options.get("rows", "1")):
        known = "hf://OWNER/NAME?config=C&split=S&revision=R&rows=N"
        raise UserError(f"{', '.join(unknown) or 'name or rows'}: a data set is {known}")
    if name.startswith(("/", ".", "~")):
        root = Path(name).expanduser().absolute()
        if not root.is_dir():
            raise UserError(f"there is no folder {name}")
        names = sorted(file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file())
        split = Split(names, root.joinpath, lambda file: str(root / file))
    else:
        split = _open_hub(name, options.get("revision"))
        if "revision" not in options and not any(map(is_data, split.files)):
            split = _open_hub(name, CONVERTED)
    card = "README.md"
    text = split.path_of(card).read_text(encoding="utf-8", errors="replace") if card in split.files else ""
    chosen = _files_of_split(split.files, text, options.get("config"), options.get("split", "train"))
    return split._replace(files=chosen), options


def _open_hub(name: str, revision: str | None) -> Split:
    """All files of a data set on the hub, by its commit: a download that goes on later has the same files."""
    from huggingface_hub import HfApi, hf_hub_download

    commit = HfApi().repo_info(name, revision=revision, repo_type="dataset").sha or ""
    return Split(
        sorted(HfApi().list_repo_files(name, revision=commit, repo_type="dataset")),
        lambda file: Path(hf_hub_download(name, file, revision=commit, repo_type="dataset")),
        lambda file: f"datasets/{name}@{quote(commit, safe='')}/{file}",
    )


# ---- Parquet that is read a row group at a time


@contextlib.contextmanager
def opened_parquet(source: str, url: str) -> Iterator[Any]:
    """A file of `parquet_files`, read by ranges."""
    import pyarrow.parquet
    from huggingface_hub import HfFileSystem

    open_file: Any = HfFileSystem().open if url.startswith("datasets/") else open
    with _reaching(source), open_file(url, "rb") as file:
        yield pyarrow.parquet.ParquetFile(file)


def parquet_files(source: str) -> dict[str, str]:
    """Names and places of a split's parquet files, not fetched, or of those that the hub has made of other files.

    None where there are none, or rows=N takes a few. Raises UserError: as `fetch`.
    """
    from huggingface_hub.errors import HfHubHTTPError

    with _reaching(source):
        split, options = _open_split(source)
        is_parquet, is_local = all(file.endswith(".parquet") for file in split.files), source[len(PREFIX)] in "/.~"
        if "rows" in options or not is_parquet and ("revision" in options or is_local):
            return {}
        if not is_parquet:
            folder = f"{options.get('config', 'default')}/{options.get('split', 'train')}/"
            try:  # CONFIG/SPLIT/0000.parquet
                split = _open_hub(source.removeprefix(PREFIX).partition("?")[0], CONVERTED)
            except HfHubHTTPError:
                return {}
            split = split._replace(files=[file for file in split.files if file.startswith(folder)])
    return {file: split.url_of(file) for file in split.files}


# ---- Which files


def _files_of_split(names: Sequence[str], card: str, config: str | None, split: str) -> list[str]:
    """The files of a configuration's split, by names and README.md. Raises UserError: it names what there is."""
    known = front_matter(card)
    entries = known.get("configs") if isinstance(known, dict) else None
    named = {str(e.get("config_name")): e for e in entries or () if isinstance(e, dict) and e.get("data_files")}
    if named and (config is None or config in named):
        return _of_card(names, named, config, split)
    data = [name for name in names if is_data(name)]
    if config is not None:
        folders = sorted({name.partition("/")[0] for name in data if "/" in name})
        data = [name for name in data if name.startswith(f"{config}/")]
        if not data:
            raise UserError(f"no config {config!r}; there are {', '.join([*named, *folders]) or 'none'}")
    if not data:
        raise UserError(f"no file of it ends with {', '.join(ENDINGS)}")
    splits = {name: split_of(name) for name in data}
    if not any(splits.values()):  # no name says anything: all of it is for training
        splits = dict.fromkeys(data, "train")
    found = [name for name in data if splits[name] == split]
    if not found:
        raise UserError(f"no split {split!r}; there are {', '.join(dict.fromkeys(filter(None, splits.values())))}")
    return found


def _of_card(names: Sequence[str], named: dict[str, dict[str, Any]], config: str | None, split: str) -> list[str]:
    """The files that a configuration of the README.md gives a split."""
    from fsspec.utils import glob_translate

    default = [name for name, entry in named.items() if entry.get("default") or name == "default"]
    if config is None and not default and len(named) > 1:
        raise UserError(f"name one of its configurations with ?config=: {', '.join(named)}")
    entry = named[config or (default or list(named))[0]]
    given, folder = entry["data_files"], str(entry.get("data_dir") or "").strip("/")
    is_by_split = isinstance(given, list) and all(isinstance(part, dict) for part in given)
    parts = {str(part.get("split", "train")): part.get("path") for part in given} if is_by_split else {"train": given}
    if split not in parts:
        raise UserError(f"no split {split!r}; there are {', '.join(parts)}")
    patterns = parts[split] if isinstance(parts[split], list) else [parts[split]]
    wanted = [re.compile(glob_translate(f"{folder}/{pattern}".lstrip("/"))) for pattern in patterns]
    found = [name for name in names if any(pattern.fullmatch(name) for pattern in wanted)]
    if not found or not all(map(is_data, found)):
        shown = ", ".join(map(str, found or patterns))
        raise UserError(f"split {split!r} is {shown}; only {', '.join(ENDINGS)} are read")
    return found


def is_data(name: str) -> bool:
    """Whether a file's name within its folder is that of records."""
    *_, last = parts = name.split("/")
    return name.endswith(ENDINGS) and not any(part.startswith(".") for part in parts) and last not in NO_RECORDS


def split_of(name: str) -> str | None:
    """The split that a file's name or a folder says, the innermost first: `data/train-00000-of-00002.parquet`."""
    for part in reversed(name.split("/")):
        words = set(re.split(r"[^a-z0-9]+|(?<=[a-z])(?=[0-9])", part.lower()))
        if split := next((split for split, known in SPLIT_WORDS.items() if words & known), None):
            return split
    return None
