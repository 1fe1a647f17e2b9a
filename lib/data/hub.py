"""Data sets of the Hugging Face hub, or of a local folder of the same layout, as files on this disk.

hf://OWNER/NAME, hf://OWNER/NAME?config=C&split=S&revision=R&rows=N, hf:///local/folder?split=S. The repository's
README.md may name configurations and their files (huggingface.co/docs/hub/datasets-manual-configuration); otherwise a
configuration is a folder, and words in the names of files and folders say of which split they are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote

from lib.config.read_file import front_matter
from lib.data import record_files
from lib.data.record_files import ENDINGS
from lib.data.record_formats import Unusable
from lib.errors import UserError, in_one_line
from lib.system import files

PREFIX = "hf://"
SPLIT_WORDS = {
    "train": "train training",
    "validation": "validation validate valid val dev heldout held holdout",
    "test": "test testing eval evaluation",
}
CONVERTED = "refs/convert/parquet"  # where the hub keeps what it has made of data sets in other forms
NO_RECORDS = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json"}


class Split(NamedTuple):
    """The files of a data set's split."""

    files: list[str]  # their names within the repository
    path_of: Callable[[str], Path]  # a file on this disk, fetched where it is missing
    url_of: Callable[[str], str]  # its name for HfFileSystem, or its path


def fetch(address: str, cache_dir: str, tell: Callable[[str], None]) -> list[Path]:
    """The files of a data set's split on this disk, fetched where they are missing; of ?rows=N the first N records.
    Raises UserError: no such data set, configuration or split; the message names what there is."""
    with _reaching(address):
        split, options = _open_split(address)
        tell(f"fetching {address}: {len(split.files):,} files")
        paths = [*map(split.path_of, split.files)]
        if "rows" not in options:
            return paths
        key = f"{address} {[(str(path), path.stat().st_mtime_ns) for path in paths]}"
        first_rows = record_files.cached(cache_dir, "hub", key).with_suffix(".jsonl")
        if not first_rows.exists():
            first_rows.parent.mkdir(parents=True, exist_ok=True)
            lines = ((path, *line) for path in paths for line in record_files.read(str(path)))
            with files.replacing(first_rows) as file:
                for path, number, record in itertools.islice(lines, int(options["rows"])):
                    if isinstance(record, Unusable):
                        raise UserError(f"{path}:{number}: {record}")
                    file.write(json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n")
        return [first_rows]


@contextlib.contextmanager
def _reaching(address: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{address}: {error}") from None
    except Exception as error:  # not found, not allowed, offline: a dozen unrelated types
        raise UserError(f"{address}: cannot be opened: {in_one_line(error)}; what was fetched is kept") from None


def _open_split(address: str) -> tuple[Split, dict[str, str]]:
    """The split that an address names, and its options. Raises UserError: an option that is none, or as `fetch`."""
    name, _, query = address.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - {"config", "split", "revision", "rows"})
    if not name or unknown or not re.fullmatch(r"[1-9][0-9]{0,17}", options.get("rows", "1")):
        form = "hf://OWNER/NAME?config=C&split=S&revision=R&rows=N"
        raise UserError(f"{', '.join(unknown) or 'name or rows'}: a data set is {form}")
    if name[0] in "/.~":
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
    chosen = _chosen(split.files, text, options.get("config"), options.get("split", "train"))
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
def opened_parquet(address: str, url: str) -> Iterator[Any]:
    """A file of `parquet_files`, read by ranges."""
    import pyarrow.parquet
    from huggingface_hub import HfFileSystem

    open_file: Any = HfFileSystem().open if url.startswith("datasets/") else open
    with _reaching(address), open_file(url, "rb") as file:
        yield pyarrow.parquet.ParquetFile(file)


def parquet_files(address: str) -> dict[str, str]:
    """Names and places of a split's parquet files, not fetched, or of those that the hub has made of other files. None
    where there are none, or rows=N takes a few. Raises UserError: as `fetch`."""
    from huggingface_hub.errors import HfHubHTTPError

    with _reaching(address):
        split, options = _open_split(address)
        if not all(file.endswith(".parquet") for file in split.files):
            if "revision" in options or address[len(PREFIX)] in "/.~":
                return {}
            folder = f"{options.get('config', 'default')}/{options.get('split', 'train')}/"
            try:  # CONFIG/SPLIT/0000.parquet
                split = _open_hub(address.removeprefix(PREFIX).partition("?")[0], CONVERTED)
            except HfHubHTTPError:
                return {}
            split = split._replace(files=[file for file in split.files if file.startswith(folder)])
    return {} if "rows" in options else {file: split.url_of(file) for file in split.files}


# ---- Which files


def _chosen(names: Sequence[str], card: str, config: str | None, split: str) -> list[str]:
    """The files of a configuration's split, by names and README.md. Raises UserError: it names what there is."""
    about = front_matter(card)
    entries = about.get("configs") if isinstance(about, dict) else None
    named = {str(e.get("config_name")): e for e in entries or () if isinstance(e, dict) and e.get("data_files")}
    data = [name for name in names if is_data(name)]
    if named and (config is None or config in named):
        default = [name for name, entry in named.items() if entry.get("default") or name == "default"] or [*named]
        if config is None and len(default) > 1 and default == [*named]:
            raise UserError(f"name one of its configurations with ?config=: {', '.join(named)}")
        splits = _splits_of_card(names, named[config or default[0]])
    else:
        folders = dict.fromkeys([*named, *(name.partition("/")[0] for name in data if "/" in name)])
        data = [name for name in data if config is None or name.startswith(f"{config}/")]
        if not data and config is not None:
            raise UserError(f"no config {config!r}; there are {', '.join(folders) or 'none'}")
        splits = dict[str, list[str]]()
        for name in data:
            splits.setdefault(split_of(name) or "", []).append(name)
        unnamed = splits.pop("", [])
        splits = splits or {"train": unnamed}  # no name says anything: all of it is for training
    if split not in splits:
        raise UserError(f"no split {split!r}; there are {', '.join(splits)}")
    if not (chosen := splits[split]) or not all(map(is_data, chosen)):
        raise UserError(
            f"no file of it ends with {', '.join(ENDINGS)}: split {split!r} is {', '.join(chosen) or 'empty'}"
        )
    return chosen


def _splits_of_card(names: Sequence[str], entry: dict[str, Any]) -> dict[str, list[str]]:
    """The files of each split of a configuration of the README.md."""
    from fsspec.utils import glob_translate

    parts, folder = entry["data_files"], str(entry.get("data_dir") or "").strip("/")
    is_by_split = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    splits = {}
    for part in parts if is_by_split else [{"path": parts}]:
        paths = part.get("path")
        patterns = [f"{folder}/{path}".lstrip("/") for path in (paths if isinstance(paths, list) else [paths])]
        wanted = re.compile("|".join(map(glob_translate, patterns)))
        splits[str(part.get("split", "train"))] = [name for name in names if wanted.fullmatch(name)]
    return splits


def is_data(name: str) -> bool:
    """Whether a file's name within its folder is that of records."""
    *_, last = parts = name.split("/")
    return name.endswith(ENDINGS) and not any(part.startswith(".") for part in parts) and last not in NO_RECORDS


def split_of(name: str) -> str | None:
    """The split that a file's name or a folder says, the innermost first: `data/train-00000-of-00002.parquet`."""
    for part in reversed(name.split("/")):
        words = set(re.split(r"[^a-z0-9]+|(?<=[a-z])(?=[0-9])", part.lower()))
        if split := next((split for split, names in SPLIT_WORDS.items() if words & {*names.split()}), None):
            return split
    return None
