"""Data sets of the Hugging Face hub, or of a local folder of the same layout, as files on this disk.

hf://OWNER/NAME, hf://OWNER/NAME?config=C&split=S&revision=R&rows=N, hf:///local/folder?split=S. huggingface_hub fetches
the files of the split into its own cache, each once, and goes on where a download broke off. The repository's README.md
may name configurations and their files (huggingface.co/docs/hub/datasets-manual-configuration); otherwise a
configuration is a folder, and words in the names of files and folders say of which split they are.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from lib.config.read_file import front_matter
from lib.config.settings import DataSettings
from lib.data import record_files
from lib.data.record_formats import JSON, Unusable
from lib.errors import UserError, in_one_line
from lib.system import files

PREFIX = "hf://"
ENDINGS = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".parquet")
# A split by the words that name it in files and folders.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# Where the hub keeps what it has made of data sets that come in other forms: CONFIG/SPLIT/0000.parquet.
CONVERTED = "refs/convert/parquet"
CARD = "README.md"


def fetch(source: str, settings: DataSettings, tell: Callable[[str], None]) -> list[Path]:
    """The files of a data set's split on this disk, fetched where they are missing.

    With ?rows=N, and of files that are one JSON list, the records are written as JSON lines to data.cache_dir.

    Raises:
        UserError: no such data set, configuration or split; the message names what there is.
    """
    name, options = parse(source)
    is_local = name.startswith(("/", ".", "~"))
    open_repository = _open_folder if is_local else _open_hub
    try:
        names, path_of = open_repository(name, options.get("revision"))
        card = path_of(CARD).read_text(encoding="utf-8", errors="replace") if CARD in names else ""
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    except Exception as error:  # not found, not allowed, offline: a dozen unrelated types
        raise UserError(f"{source}: cannot be opened: {in_one_line(error)}") from None
    try:
        chosen = files_of_split(names, card, options.get("config"), options.get("split", "train"))
    except ValueError as why:
        raise UserError(f"{source}: {why}") from None
    if not is_local:
        tell(f"fetching {source}: {len(chosen):,} files")
    cache = Path(settings.cache_dir)
    try:
        if "rows" in options:
            records = itertools.islice(_records(map(path_of, chosen)), int(options["rows"]))
            return [_written(records, cache, f"{source} {[path_of(chosen[0]).stat().st_mtime_ns]}")]
        return [_as_lines(path_of(file), cache) for file in chosen]
    except UserError:
        raise
    except Exception as error:  # what a network can do
        raise UserError(f"{source}: the download broke off ({in_one_line(error)}); start again, it goes on") from None


def parse(source: str) -> tuple[str, dict[str, str]]:
    """The data set's name or folder, and the options after the question mark.

    Raises:
        UserError: an option that is none.
    """
    name, _, query = source.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - {"config", "split", "revision", "rows"})
    rows = options.get("rows", "1")
    if not name or unknown or not (rows.isascii() and rows.isdecimal() and 0 < int(rows) < 10**18):
        what = f"no option {', '.join(unknown)}" if unknown else "no name" if not name else "rows is no number"
        raise UserError(f"{source}: {what}; a data set is hf://OWNER/NAME?config=C&split=S&revision=R&rows=N")
    return name, options


def _open_folder(name: str, revision: str | None) -> tuple[list[str], Callable[[str], Path]]:
    """The names of a local folder's files, and the path of each."""
    root = Path(name).expanduser().absolute()
    if not root.is_dir():
        raise UserError(f"there is no folder {name}")
    return sorted(file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()), root.joinpath


def _open_hub(name: str, revision: str | None) -> tuple[list[str], Callable[[str], Path]]:
    """The names of a data set's files on the hub, and the path of each, once it is fetched."""
    from huggingface_hub import HfApi, hf_hub_download

    hub = HfApi()
    commit, names = revision, list[str]()
    for branch in (revision, CONVERTED) if revision is None else (revision,):
        # By its commit: a download that goes on later has the same files.
        commit = hub.repo_info(name, revision=branch, repo_type="dataset").sha
        names = sorted(hub.list_repo_files(name, revision=commit, repo_type="dataset"))
        if any(map(_is_data, names)):
            break
    return names, lambda file: Path(hf_hub_download(name, file, revision=commit, repo_type="dataset"))


def _records(paths: Iterator[Path]) -> Iterator[JSON]:
    """The records of files, one after the other. Raises UserError for a line that is no record."""
    for path in paths:
        if (listed := _list_in(path)) is not None:
            yield from listed
            continue
        for line, record in record_files.read(str(path), DataSettings(train="-"), "prompt"):
            if isinstance(record, Unusable):
                raise UserError(f"{path}:{line}: {record}")
            yield record


def _as_lines(path: Path, cache: Path) -> Path:
    """The file, or JSON lines made of a file that is one JSON list."""
    listed = _list_in(path)
    return path if listed is None else _written(iter(listed), cache, f"{path} {path.stat().st_mtime_ns}")


def _list_in(path: Path) -> list[JSON] | None:
    """The records of a .json file that is one list; None for any other file."""
    if not path.name.endswith((".json", ".json.gz")):
        return None
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
        if start != "[":
            return None
        file.seek(0)
        try:
            records = json.load(file)
        except ValueError as error:
            raise UserError(f"{path}: broken JSON: {error}") from None
    if not all(isinstance(record, dict) for record in records):
        raise UserError(f"{path}: its list holds something else than objects")
    return list(records)


def _written(records: Iterator[JSON], cache: Path, key: str) -> Path:
    """Records as a file of JSON lines in the cache."""
    path = cache / f"hub-{hashlib.sha256(key.encode()).hexdigest()[:24]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as file:
            file.writelines(json.dumps(r, ensure_ascii=False, default=str).encode() + b"\n" for r in records)
    return path


# ---- Which files


def files_of_split(names: Sequence[str], card: str, config: str | None, split: str) -> list[str]:
    """The files of a configuration's split, by the repository's file names and its README.md.

    Raises ValueError, which names the configurations, splits or files that there are.
    """
    named = {str(entry.get("config_name")): entry for entry in _configurations(card) if entry.get("data_files")}
    if named and (config is None or config in named):
        return _of_card(names, _chosen(named, config), split)
    data = [name for name in names if _is_data(name)]
    if config is not None:
        inside = [name for name in data if name.startswith(f"{config}/")]
        if not inside:
            folders = sorted({name.partition("/")[0] for name in data if "/" in name})
            raise ValueError(f"no config {config!r}; there are {', '.join([*named, *folders]) or 'none'}")
        data = inside
    by_split: dict[str, list[str]] = {}
    for name in data:
        by_split.setdefault(split_of(name) or "", []).append(name)
    if set(by_split) <= {""}:  # no name says anything: all of it is for training
        by_split = {"train": by_split.get("", [])}
    by_split.pop("", None)
    if not by_split.get(split):
        there = ", ".join(name for name, files in by_split.items() if files)
        raise ValueError(
            f"no split {split!r}; there are {there}" if there else f"no file of it ends with {', '.join(ENDINGS)}"
        )
    return by_split[split]


def _configurations(card: str) -> list[dict[str, Any]]:
    """What the front matter of a README.md says of configurations."""
    known = front_matter(card)
    entries = known.get("configs") if isinstance(known, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _chosen(named: dict[str, dict[str, Any]], config: str | None) -> dict[str, Any]:
    """The configuration that is asked for, or the one that is meant where none is."""
    if config is not None:
        return named[config]
    default = [entry for name, entry in named.items() if entry.get("default") or name == "default"]
    if not default and len(named) > 1:
        raise ValueError(f"name one of its configurations with ?config=: {', '.join(named)}")
    return (default or list(named.values()))[0]


def _of_card(names: Sequence[str], entry: dict[str, Any], split: str) -> list[str]:
    """The files that a configuration of the README.md gives a split."""
    given = entry["data_files"]
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        given = [{"split": "train", "path": given}]
    folder = str(entry.get("data_dir") or "").strip("/")
    paths = {str(part.get("split", "train")): part.get("path") for part in given}
    if split not in paths:
        raise ValueError(f"no split {split!r}; there are {', '.join(paths)}")
    patterns = paths[split] if isinstance(paths[split], list) else [paths[split]]
    patterns = [f"{folder}/{pattern}" if folder else str(pattern) for pattern in patterns]
    found = [name for name in names if any(_matches(name, pattern) for pattern in patterns)]
    if unread := [name for name in found if not _is_data(name)]:
        raise ValueError(f"{unread[0]} is not read; only {', '.join(ENDINGS)} are")
    if not found:
        raise ValueError(f"no file is named {', '.join(patterns)}, as its README.md says of split {split!r}")
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether a file fits a glob whose `**` crosses folders and whose `*` does not."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^]]+\])", pattern)
    crossing = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = "".join(
        crossing.get(part) or (fnmatch.translate(part)[4:-3] if part.startswith("[") else re.escape(part))
        for part in parts
    )
    return re.fullmatch(expression, name) is not None


def _is_data(name: str) -> bool:
    return (
        name.endswith(ENDINGS)
        and not any(part.startswith(".") for part in name.split("/"))
        and (name.rpartition("/")[2] not in ("dataset_infos.json", "dataset_info.json", "state.json", "config.json"))
    )


def split_of(name: str) -> str | None:
    """The split that a file's name or a folder says, the innermost first: `data/train-00000-of-00002.parquet`."""
    for part in reversed(name.split("/")):
        words = re.split(r"[^a-z0-9]+|(?<=[a-z])(?=[0-9])", part.lower())
        for split, known in SPLIT_WORDS.items():
            if set(words) & set(known):
                return split
    return None
