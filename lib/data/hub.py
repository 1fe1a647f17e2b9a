"""Which files of a data set's repository are a configuration's split, and their records one after the other.

A repository is one of the Hugging Face hub, or a local folder of the same layout. Its README.md may name
configurations and their files (huggingface.co/docs/hub/datasets-manual-configuration); otherwise a configuration is a
folder, and words in the names of files and folders say of which split they are.
"""

from __future__ import annotations

import codecs
import fnmatch
import gzip
import hashlib
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Protocol, cast
from urllib.parse import parse_qsl

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # which pydantic reads on Python 3.11

from lib.config import read_file
from lib.config.plain_yaml import front_matter
from lib.config.settings import DataSettings
from lib.data import record_files
from lib.data.record_files import read_parquet
from lib.data.record_formats import JSON, LINE_BYTES, Unusable
from lib.errors import UserError
from lib.system import files

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
PIECE_BYTES = 2**20  # of a file that is one list
BETWEEN = re.compile(r"[\s,]*")  # two of its records


class Repository:
    """The files of a data set.

    Args:
        where: a local folder, or a data set's name on the hub.
        revision: of the hub's data set; by default its newest.

    Raises:
        OSError, ValueError, huggingface_hub's errors: it cannot be read.
    """

    def __init__(self, where: str, revision: str | None):
        self.root: str = where
        self._any_commit: str | None = None  # how the paths of all commits begin
        self._open: Callable[[str], IO[bytes]] = _open_local
        if is_local(where):
            names = [file.relative_to(where).as_posix() for file in Path(where).rglob("*") if file.is_file()]
        else:
            from huggingface_hub import HfApi, HfFileSystem
            from huggingface_hub.hf_api import RepoFile

            hub = HfApi()
            # By its commit, so that a download which goes on later has the same files.
            commit = hub.repo_info(where, revision=revision, repo_type="dataset").sha
            tree = hub.list_repo_tree(where, recursive=True, revision=commit, repo_type="dataset")
            names = [file.path for file in tree if isinstance(file, RepoFile)]
            self._any_commit = f"datasets/{where}@"
            self.root = f"{self._any_commit}{commit}"
            files = HfFileSystem()
            self._open = lambda path: cast(IO[bytes], files.open(path, "rb"))
        self.names = sorted(names)

    def card(self) -> str:
        """The beginning of its README.md, in which its front matter is; empty where it has none."""
        if CARD not in self.names:
            return ""
        with self._open(f"{self.root}/{CARD}") as file:
            return file.read(2**20).decode(errors="replace")  # the last character may be cut

    def stream(self, names: Sequence[str]) -> FileStream:
        return FileStream([f"{self.root}/{name}" for name in names], self._open, self._any_commit)


def _open_local(path: str) -> IO[bytes]:
    return Path(path).open("rb")


def is_local(where: str) -> bool:
    return where.startswith(("/", ".", "~"))


def open_stream(source: str, where: str, options: dict[str, str]) -> FileStream:
    """The records of a split.

    options: config, split (by default train) and revision. Raises UserError, which names what there is instead.
    """
    where = str(Path(where).expanduser()) if is_local(where) else where
    if is_local(where) and not Path(where).is_dir():
        raise UserError(f"{source}: there is no folder {where}")
    try:
        repository = Repository(where, options.get("revision"))
        if not any(map(_is_data, repository.names)) and not is_local(where) and "revision" not in options:
            repository = Repository(where, CONVERTED)
        card = repository.card()
    except Exception as error:  # not found, not allowed, offline: a dozen unrelated types
        raise UserError(f"{source}: cannot be opened: {reason(error)}") from None
    try:
        names = files_of_split(repository.names, card, options.get("config"), options.get("split", "train"))
    except ValueError as why:
        raise UserError(f"{source}: {why}") from None
    return repository.stream(names)


def reason(error: Exception) -> str:
    """An error's first line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


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
        by_split.setdefault(_split_of(name) or "", []).append(name)
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


def _split_of(name: str) -> str | None:
    """The split that a file's name or a folder says, the innermost first: `data/train-00000-of-00002.parquet`."""
    for part in reversed(name.split("/")):
        words = re.split(r"[^a-z0-9]+|(?<=[a-z])(?=[0-9])", part.lower())
        for split, known in SPLIT_WORDS.items():
            if set(words) & set(known):
                return split
    return None


# ---- Their records


class Position(TypedDict):
    """Up to where the records of files were taken."""

    paths: list[str]
    file: Annotated[int, Field(ge=0)]
    row: Annotated[int, Field(ge=0)]


_POSITION = TypeAdapter(Position)


class FileStream:
    """The records of files, in their order, and the position up to which they were taken.

    Args:
        begin: how paths begin of which a position may be, besides these files: of the same repository, another day.
    """

    def __init__(self, paths: Sequence[str], open_file: Callable[[str], IO[bytes]], begin: str | None = None):
        self.paths = list(paths)
        self._open, self._begin = open_file, begin
        self._file = self._row = 0

    def state_dict(self) -> Position:
        return {"paths": self.paths, "file": self._file, "row": self._row}

    def load_state_dict(self, state: object) -> None:
        """Raises ValueError: it is no position in these files; somebody else may have written it."""
        known = _POSITION.validate_python(state, strict=True)
        if known["paths"] != self.paths:
            if self._begin is None or not all(path.startswith(self._begin) for path in known["paths"]):
                raise ValueError("it is of other files")
            self.paths = known["paths"]
        self._file, self._row = known["file"], known["row"]

    def __iter__(self) -> Iterator[JSON]:
        """Raises UserError for a line that is no record."""
        while self._file < len(self.paths):
            path = self.paths[self._file]
            with self._open(path) as file:
                for row, (line, record) in enumerate(_records(path, file)):
                    if row < self._row:
                        continue
                    if isinstance(record, Unusable):
                        raise UserError(f"{path}:{line}: {record}")
                    self._row = row + 1
                    yield record
            self._file, self._row = self._file + 1, 0


def _records(path: str, file: IO[bytes]) -> Iterator[tuple[int, JSON | Unusable]]:
    """Line and record of a file in any of the forms that are read; a .json file may be one list of records."""
    if path.endswith(".parquet"):
        yield from read_parquet(file)
        return
    lines = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else io.BufferedReader(cast(io.RawIOBase, file))
    if path.endswith((".json", ".json.gz")):
        start = lines.read(1)
        while start.isspace():
            start = lines.read(1)
        if start == b"[":
            yield from _records_of_list(cast(IO[bytes], lines))
            return
        lines.seek(0)
    yield from ((line, record) for line, _, _, record in record_files.scan_json_lines(cast(IO[bytes], lines)))


def _records_of_list(stream: IO[bytes]) -> Iterator[tuple[int, JSON | Unusable]]:
    """The records of a list behind its opening bracket; one of them is in memory, and a piece of the file."""
    read, decode = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8")().decode
    text, at, row, ends = "", 0, 1, False
    while True:
        at = cast(re.Match[str], BETWEEN.match(text, at)).end()
        if text[at : at + 1] == "]":
            return
        try:
            record, at = read(text, at)
        except (ValueError, RecursionError) as error:
            if ends or len(text) - at > LINE_BYTES or isinstance(error, RecursionError):
                yield row, Unusable(f"no record of at most {LINE_BYTES:,} bytes: {error}")
                return
            try:
                piece = stream.read(PIECE_BYTES)
                text, at, ends = text[at:] + decode(piece, final=not piece), 0, not piece
            except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as damage:
                yield row, Unusable(f"the file is damaged: {damage}")
                return
            continue
        yield row, record if isinstance(record, dict) else Unusable("no {...}")
        row += 1


PREFIX = "hf://"
SHARD_BYTES = 64 * 2**20
STATE = "stream.json"


class Shard(TypedDict):
    """A whole shard on the disk."""

    name: Annotated[str, Field(pattern=r"^shard-[0-9]{5,}\.jsonl$")]
    records: Annotated[int, Field(ge=0)]
    bytes: Annotated[int, Field(ge=0)]


class State(TypedDict):
    """How far a download is."""

    shards: list[Shard]
    stream: object
    """The stream's own position; None at its beginning."""
    done: bool


_STATE = TypeAdapter(State)


class Stream(Protocol):
    """Records, with a position from which they go on."""

    def __iter__(self) -> Iterator[JSON]: ...
    def state_dict(self) -> object: ...
    def load_state_dict(self, state: object) -> None:
        """Raises ValueError: it is none of this stream's."""
        ...


def folder_of(source: str, settings: DataSettings) -> Path:
    """The folder of a hub data set's shards; of a local folder what the names of their folders begin with."""
    return Path(settings.cache_dir) / f"hub-{hashlib.sha256(_absolute(source).encode()).hexdigest()[:24]}"


def _absolute(source: str) -> str:
    """A source that says the same from any working folder: many runs share one cache."""
    where, mark, query = source.removeprefix(PREFIX).partition("?")
    return f"{PREFIX}{Path(where).expanduser().absolute()}{mark}{query}" if is_local(where) else source


def fetch(source: str, settings: DataSettings, tell: Callable[[str], None]) -> list[Path]:
    """The shards of a hub's data set on this disk, downloaded where they are missing.

    Those of a local folder are made anew once its files have changed. One process of a host at a time may call this.

    Raises:
        UserError: no such data set, or more than data.spool_limit_gb.
    """
    folder, stream = folder_of(source, settings), None
    name, options = parse(_absolute(source))
    rows = int(options.pop("rows")) if "rows" in options else None
    if is_local(name):
        stream = open_stream(source, name, options)
        cache = Path(settings.cache_dir).absolute()
        stream.paths = [path for path in stream.paths if not Path(path).is_relative_to(cache)]
        folder = folder.with_name(f"{folder.name}-{_stamp(stream.paths)}")
    if not _state(folder)["done"]:
        stream = stream or open_stream(source, name, options)
        tell(f"fetching {source} to {folder}")
        keep(stream, source, folder, settings.spool_limit_gb, rows)
    return [folder / shard["name"] for shard in _state(folder)["shards"]]


def _stamp(paths: Sequence[str]) -> str:
    """What tells files from what they were: their names, sizes and modification times."""
    seen = [(path, (now := Path(path).stat()).st_size, now.st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:12]


def parse(source: str) -> tuple[str, dict[str, str]]:
    """The data set's name or folder, and the options after the question mark.

    Raises:
        UserError: an option that is none.
    """
    name, _, query = source.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - {"config", "split", "revision", "rows"})
    rows = options.get("rows", "1")
    if not name or unknown or not (rows.isascii() and rows.isdecimal() and len(rows) < 18):
        what = f"no option {', '.join(unknown)}" if unknown else "no name" if not name else "rows is no number"
        raise UserError(f"{source}: {what}; a data set is hf://OWNER/NAME?config=C&split=S&revision=R&rows=N")
    return name, options


def keep(stream: Stream, source: str, folder: Path, limit_gb: float, rows: int | None = None) -> None:
    """Writes a stream's records (those that are not there yet) as shards of JSON lines.

    Raises:
        UserError: the limit is reached, or the stream breaks off; what is whole stays. The folder is a link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files.sweep_unfinished(folder / STATE)
    state = _state(folder)
    if state["stream"] is not None:
        try:
            stream.load_state_dict(state["stream"])
        except ValueError as error:
            why = f"holds no position in {source} ({reason(error)}); remove the folder, and all is fetched anew"
            raise UserError(f"{folder / STATE} {why}") from None
    left = None if rows is None else rows - sum(shard["records"] for shard in state["shards"])
    source_records = iter(stream)
    while left is None or left > 0:
        name = f"shard-{len(state['shards']):05d}.jsonl"
        spent = sum(shard["bytes"] for shard in state["shards"])
        count, size = _write_shard(
            folder / name, itertools.islice(source_records, left), source, limit_gb * 1e9 - spent
        )
        if not count:
            break
        state["shards"].append({"name": name, "records": count, "bytes": size})
        state["stream"] = stream.state_dict()
        _write_state(folder, state)
        left = None if left is None else left - count
    if not state["shards"]:
        raise UserError(f"{source} has no records; name another data set or split")
    _write_state(folder, {**state, "done": True})


def _write_shard(path: Path, stream: Iterable[JSON], source: str, room: float) -> tuple[int, int]:
    """One shard, whole or not at all: its records and bytes, 0 where the stream has ended."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.unlink(missing_ok=True)  # of a process that was killed; or somebody's link, to a file of yours
    count = size = 0
    with unfinished.open("xb") as file:
        try:
            for record in stream:
                size += file.write(json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n")
                count += 1
                if size > room:
                    raise UserError(
                        f"{source}: more than data.spool_limit_gb allows to be kept in {path.parent}; "
                        "raise it, or take fewer with ?rows=N"
                    )
                if size >= SHARD_BYTES:
                    break
        except UserError:
            raise
        except Exception as error:  # what a network can do
            raise UserError(
                f"{source}: the stream broke off ({reason(error)}); start again, it goes on there"
            ) from None
        file.flush()
        files.flush(file.fileno())
    if count:
        unfinished.replace(path)
    else:
        unfinished.unlink()
    return count, size


def _state(folder: Path) -> State:
    """How far the download is; at its beginning where a shard is lost, or somebody wrote something else."""
    try:
        state = _STATE.validate_python(read_file.read_object(folder / STATE, "the download's"), strict=True)
        for shard in state["shards"]:
            read_file.require_regular(folder / shard["name"], "the download's")
            if (folder / shard["name"]).stat().st_size != shard["bytes"]:
                raise UserError(f"{folder / shard['name']} is not whole")
        if state["shards"] or not state["done"]:
            return state
    except (OSError, ValueError, UserError):
        pass
    return {"shards": [], "stream": None, "done": False}


def _write_state(folder: Path, state: State) -> None:
    files.write_atomically(folder / STATE, json.dumps(state) + "\n")
