"""Data sets of the Hugging Face hub, or in a local folder of the same layout, streamed into JSON lines on the disk.

hf://OWNER/NAME, hf://OWNER/NAME?config=C&split=S&revision=R&rows=N, hf:///local/folder?split=S. Shards are written one
after the other, and after each the stream's position: a download that broke off goes on from the last whole shard.
hub_files.py knows which files are a configuration's split.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Protocol
from urllib.parse import parse_qsl

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # which pydantic reads on Python 3.11

from lib.config import read_file
from lib.config.schema import DataSettings
from lib.data.hub_files import is_local, open_stream, reason
from lib.data.record_formats import JSON
from lib.errors import UserError
from lib.system import files

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
    files.make_own(folder)
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
