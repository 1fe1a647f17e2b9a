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
from dataclasses import dataclass
from pathlib import Path
from typing import Any
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
CARD = "README.md"
NO_RECORDS = {"dataset_infos.json", "dataset_info.json", "state.json", "config.json"}


def fetch(source: str, settings: DataSettings, tell: Callable[[str], None]) -> list[Path]:
    """The files of a data set's split on this disk, fetched where they are missing.

    With ?rows=N the first N records, written as JSON lines to data.cache_dir.

    Raises:
        UserError: no such data set, configuration or split; the message names what there is.
    """
    name, options = parse(source)
    with _reaching(source):
        chosen, path_of = _choose(name, options)
        if not _is_local(name):
            tell(f"fetching {source}: {len(chosen):,} files")
        if "rows" in options:
            return [_first_rows(source, [path_of(file) for file in chosen], int(options["rows"]), settings)]
        return [path_of(file) for file in chosen]


@contextlib.contextmanager
def _reaching(source: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    except Exception as error:  # not found, not allowed, offline: a dozen unrelated types
        raise UserError(f"{source}: cannot be opened: {in_one_line(error)}; what was fetched is kept") from None


def _is_local(name: str) -> bool:
    return name.startswith(("/", ".", "~"))


def _choose(name: str, options: dict[str, str]) -> tuple[list[str], Callable[[str], Path]]:
    """The files of a split, and the path of each on this disk."""
    names, path_of = _open_folder(name) if _is_local(name) else _open_hub(name, options.get("revision"))[:2]
    card = path_of(CARD).read_text(encoding="utf-8", errors="replace") if CARD in names else ""
    return files_of_split(names, card, options.get("config"), options.get("split", "train")), path_of


@dataclass(frozen=True)
class RemoteFile:
    """A parquet file of a data set, read by ranges."""

    source: str
    name: str
    url: str  # of HfFileSystem, or a path

    def row_counts(self) -> list[int]:
        """Rows of each row group, from the file's footer."""
        with self._opened() as table:
            return [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]

    def keep(self, group: int, path: Path) -> None:
        """Writes a row group as a parquet file of its own."""
        import pyarrow.parquet

        with self._opened() as table, files.replacing(path) as kept:
            pyarrow.parquet.write_table(table.read_row_group(group), kept)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        import pyarrow.parquet
        from huggingface_hub import HfFileSystem

        with _reaching(self.source):
            remote = HfFileSystem() if self.url.startswith("datasets/") else Path(self.url)
            with remote.open(self.url, "rb") if isinstance(remote, HfFileSystem) else remote.open("rb") as file:
                yield pyarrow.parquet.ParquetFile(file)


def parquet_files(source: str) -> list[RemoteFile]:
    """The files of a data set's split without fetching them; none where they are no parquet, or rows=N takes a few.

    Raises:
        UserError: as `fetch`.
    """
    name, options = parse(source)
    with _reaching(source):
        chosen, path_of = _choose(name, options)
        if "rows" in options or not all(file.endswith(".parquet") for file in chosen):
            return []
        if _is_local(name):
            return [RemoteFile(source, file, str(path_of(file))) for file in chosen]
        commit = _open_hub(name, options.get("revision"))[2]
        return [RemoteFile(source, file, f"datasets/{name}@{quote(commit, safe='')}/{file}") for file in chosen]


def parse(source: str) -> tuple[str, dict[str, str]]:
    """The data set's name or folder, and the options after the question mark.

    Raises:
        UserError: an option that is none.
    """
    name, _, query = source.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - {"config", "split", "revision", "rows"})
    if not name or unknown or not re.fullmatch(r"[1-9][0-9]{0,17}", options.get("rows", "1")):
        raise UserError(
            f"{source}: {', '.join(unknown) or 'name or rows'}: a data set is "
            "hf://OWNER/NAME?config=C&split=S&revision=R&rows=N"
        )
    return name, options


def _open_folder(name: str) -> tuple[list[str], Callable[[str], Path]]:
    """The names of a local folder's files, and the path of each."""
    root = Path(name).expanduser().absolute()
    if not root.is_dir():
        raise UserError(f"there is no folder {name}")
    return sorted(file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()), root.joinpath


def _open_hub(name: str, revision: str | None) -> tuple[list[str], Callable[[str], Path], str]:
    """The names of a data set's files on the hub, the path of each, once it is fetched, and the commit."""
    from huggingface_hub import HfApi, hf_hub_download

    hub = HfApi()
    commit, names = "", list[str]()
    for branch in (revision, CONVERTED) if revision is None else (revision,):
        # By its commit: a download that goes on later has the same files.
        commit = hub.repo_info(name, revision=branch, repo_type="dataset").sha or ""
        names = sorted(hub.list_repo_files(name, revision=commit, repo_type="dataset"))
        if any(map(_is_data, names)):
            break
    return names, lambda file: Path(hf_hub_download(name, file, revision=commit, repo_type="dataset")), commit


def _first_rows(source: str, paths: list[Path], count: int, settings: DataSettings) -> Path:
    key = f"{source} {[(str(path), path.stat().st_mtime_ns) for path in paths]}"
    kept = Path(settings.cache_dir) / f"hub-{hashlib.sha256(key.encode()).hexdigest()[:24]}.jsonl"
    if kept.exists():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = ((path, line) for path in paths for line in record_files.read(str(path), settings, "prompt"))
    with files.replacing(kept) as file:
        for path, (number, record) in itertools.islice(lines, count):
            if isinstance(record, Unusable):
                raise UserError(f"{path}:{number}: {record}")
            file.write(json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n")
    return kept


# ---- Which files


def files_of_split(names: Sequence[str], card: str, config: str | None, split: str) -> list[str]:
    """The files of a configuration's split, by the repository's file names and its README.md.

    Raises:
        UserError: it names the configurations, splits or files that there are.
    """
    known = front_matter(card)
    entries = known.get("configs") if isinstance(known, dict) else None
    named = {str(e.get("config_name")): e for e in entries or () if isinstance(e, dict) and e.get("data_files")}
    if named and (config is None or config in named):
        return _of_card(names, named, config, split)
    data = [name for name in names if _is_data(name)]
    if config is not None:
        folders = sorted({name.partition("/")[0] for name in data if "/" in name})
        data = [name for name in data if name.startswith(f"{config}/")]
        if not data:
            raise UserError(f"no config {config!r}; there are {', '.join([*named, *folders]) or 'none'}")
    splits = {name: split_of(name) for name in data}
    if not any(splits.values()):  # no name says anything: all of it is for training
        splits = dict.fromkeys(data, "train")
    found = [name for name in data if splits[name] == split]
    if not found:
        there = ", ".join(dict.fromkeys(filter(None, splits.values())))
        raise UserError(
            f"no split {split!r}; there are {there}" if there else f"no file of it ends with {', '.join(ENDINGS)}"
        )
    return found


def _of_card(names: Sequence[str], named: dict[str, dict[str, Any]], config: str | None, split: str) -> list[str]:
    """The files that a configuration of the README.md gives a split."""
    default = [name for name, entry in named.items() if entry.get("default") or name == "default"]
    if config is None and not default and len(named) > 1:
        raise UserError(f"name one of its configurations with ?config=: {', '.join(named)}")
    entry = named[config or (default or list(named))[0]]
    given = entry["data_files"]
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        given = [{"split": "train", "path": given}]
    paths = {str(part.get("split", "train")): part.get("path") for part in given}
    if split not in paths:
        raise UserError(f"no split {split!r}; there are {', '.join(paths)}")
    folder = str(entry.get("data_dir") or "").strip("/")
    patterns = paths[split] if isinstance(paths[split], list) else [paths[split]]
    patterns = [f"{folder}/{pattern}" if folder else str(pattern) for pattern in patterns]
    found = [name for name in names if any(_matches(name, pattern) for pattern in patterns)]
    if not found or not all(map(_is_data, found)):
        raise UserError(f"split {split!r} is {', '.join(found or patterns)}; only {', '.join(ENDINGS)} are read")
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether a file fits a glob whose `**` crosses folders and whose `*` does not."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/?|\*|\?|\[[^]]+\])", pattern)
    return re.fullmatch("".join(words.get(p) or (p if p[:1] == "[" else re.escape(p)) for p in parts), name) is not None


def _is_data(name: str) -> bool:
    *_, last = parts = name.split("/")
    return name.endswith(ENDINGS) and not any(part.startswith(".") for part in parts) and last not in NO_RECORDS


def split_of(name: str) -> str | None:
    """The split that a file's name or a folder says, the innermost first: `data/train-00000-of-00002.parquet`."""
    for part in reversed(name.split("/")):
        words = set(re.split(r"[^a-z0-9]+|(?<=[a-z])(?=[0-9])", part.lower()))
        if split := next((split for split, known in SPLIT_WORDS.items() if words & known), None):
            return split
    return None
