"""Every parser of files and requests, and what hypothesis throws at it: each ends well, or with one clear line.

Inputs are made of the words and shapes that a parser knows, then bent: random trees of YAML and JSON, files of ours with
bytes changed. tests/test_parsers.py tries a few of each, benchmarks/fuzz_parsers.py as many as ten minutes take.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from lib.config import load
from lib.config.help import known_settings
from lib.config.schema import Config, DataSettings
from lib.dashboard import run_report
from lib.data import dataset, record_files
from lib.data.index import keys_of
from lib.data.record_formats import RecordKind, Unusable
from lib.errors import UserError, shown
from lib.launch import hostfile
from lib.serve import api_keys, openai_requests
from lib.training import find_checkpoint
from lib.training.checkpoint import MANIFEST, STATE, file_sha256

ODD_TEXTS = (
    "\ud800",
    "\0",
    "\x1b[31m",
    "\r# x",
    "1e999",
    "<<",
    "*a",
    "&a x",
    "!!int x",
    "2026-13-45",
    "9" * 5000,
    "{",
    "",
)
KINDS: tuple[RecordKind, ...] = ("preference", "unpaired", "sft", "prompt")
COLUMNS = [
    "prompt",
    "chosen",
    "rejected",
    "completion",
    "messages",
    "text",
    "label",
    "system",
    "tools",
    "prompt_ids",
    "chosen_ids",
    "rejected_ids",
]
COLUMNS += [
    "completion_ids",
    "chat_template_kwargs",
    "conversations",
    "instruction",
    "output",
    "role",
    "content",
    "from",
    "value",
    "weight",
]


class Parser(NamedTuple):
    """How a parser is fed.

    Args:
        inputs: bytes of a file, or of a request.
        parse: reads them in a folder of its own; a UserError, Unusable or RequestError is how it should refuse.
    """

    inputs: st.SearchStrategy[bytes]
    parse: Callable[[bytes, Path], object]


def trees(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """JSON values with keys of these."""
    texts = st.one_of(st.text(max_size=20), st.sampled_from(ODD_TEXTS))
    leaves = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), texts, st.sampled_from([10**400, -(2**63), 2**64])
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=5)),
        max_leaves=12,
    )


def bent(data: bytes) -> st.SearchStrategy[bytes]:
    """The same bytes with some changed, cut off or put in."""
    places = st.integers(0, max(len(data) - 1, 0))
    change = st.tuples(places, st.binary(max_size=4), st.integers(0, 4))

    def apply(changes: list[tuple[int, bytes, int]]) -> bytes:
        out = data
        for place, new, gone in changes:
            out = out[:place] + new + out[place + gone :]
        return out

    return st.lists(change, min_size=1, max_size=6).map(apply)


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _config(data: bytes, folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_bytes(data)
    load.dump(load.load(path))


def _words(data: bytes, folder: Path) -> None:
    base = {"model": {"path": "m"}, "data": {"train": "d"}}
    load.dump(load.load(None, [data.decode("utf-8", "surrogateescape")], base))


def _records(file: Path) -> None:
    for kind in KINDS:
        for _, record in record_files.read(str(file), DATA):
            for row in [] if isinstance(record, Unusable) else dataset.parse_rows(record, DATA, kind):
                if not isinstance(row, Unusable):
                    keys_of(row)


def _json_lines(data: bytes, folder: Path) -> None:
    (folder / "data.jsonl").write_bytes(data)
    _records(folder / "data.jsonl")


def _parquet(data: bytes, folder: Path) -> None:
    (folder / "data.parquet").write_bytes(data)
    _records(folder / "data.parquet")


def _hosts(data: bytes, folder: Path) -> None:
    (folder / "hosts").write_bytes(data)
    hostfile.read(folder / "hosts")


def _keys(data: bytes, folder: Path) -> None:
    (folder / "keys").write_bytes(data)
    api_keys.read(folder / "keys").owner("sk-" + data.decode(errors="surrogateescape"))


def _chat(data: bytes, folder: Path) -> None:
    for kind in ("chat", "text"):
        try:
            request = openai_requests.parse(kind, data)
        except openai_requests.RequestError as refusal:
            assert refusal.body
            continue
        json.dumps(request.upstream()).encode()


def _checkpoint(data: bytes, folder: Path) -> None:
    """A state that somebody changed, with a manifest that says that it is right."""
    path = folder / "step-00000001"
    path.mkdir()
    for name in (STATE, "optimizer.safetensors", "adapters.safetensors"):
        (path / name).write_bytes(data)
    hashes = {file.name: file_sha256(file) for file in path.iterdir()}
    (path / MANIFEST).write_text(json.dumps(hashes))
    find_checkpoint.fault_of(path)
    (path / MANIFEST).write_bytes(data)
    find_checkpoint.fault_of(path)


def _records_of_a_run(data: bytes, folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-000.jsonl").write_bytes(START + data + b"\n")
    (folder / "summary.json").write_bytes(data)
    (folder / "adapters.safetensors").touch()
    run_report.write(folder)


DATA = DataSettings(train="x")
STATE_OF_A_RUN = {
    "data_digest": "x",
    "step": 1,
    "rounds": {"shares": [1], "speeds": [1.0]},
    "schedule": {},
    "resumes": [[1]],
}
START = as_json({"kind": "start", "time": 1.0, "rank": 0, "host": "a", "step": 0, "config": {}}) + b"\n"
SUMMARY = {
    "model": "m",
    "pairs_per_second": 1.0,
    "cost": {"cost": 1, "energy_kwh": 1},
    "checkpoint": {"which": "best", "step": 1},
}
CONFIG = yaml.safe_dump(Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}}).model_dump(mode="json"))
ROWS = [
    {"prompt": "a", "chosen": "b", "rejected": "c", "messages": [{"role": "user", "content": "x"}], "label": True},
    {"prompt": "d", "chosen": "e", "rejected": "f", "messages": [{"role": "user", "content": "y"}], "label": None},
]


def table() -> bytes:
    """A small file of parquet."""
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), out)
    return out.getvalue()


SETTINGS = st.one_of(
    st.sampled_from(sorted({part for key in known_settings() for part in key.split(".")})), st.text(max_size=5)
)
NAMES = st.one_of(st.sampled_from(COLUMNS), st.text(max_size=5), st.sampled_from(ODD_TEXTS))
REQUEST = [
    "model",
    "messages",
    "prompt",
    "role",
    "content",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "tools",
    "stop",
    "n",
    "stream",
    "logprobs",
    "max_tokens",
]
STATE_NAMES = st.sampled_from([*STATE_OF_A_RUN, "best_step", "before", "parts", "rewards", "x"])
RECORD_NAMES = st.sampled_from(
    [*SUMMARY, *["kind", "time", "rank", "host", "step", "loss", "samples", "plan", "text", "config", "cost"]]
)

PARSERS: dict[str, Parser] = {
    "YAML": Parser(
        st.one_of(trees(SETTINGS).map(lambda tree: yaml.dump(tree).encode(errors="replace")), bent(CONFIG.encode())),
        _config,
    ),
    "words": Parser(
        st.builds(
            lambda key, value: f"{key}={value}".encode("utf-8", "replace"),
            st.sampled_from(known_settings()),
            st.one_of(trees(SETTINGS).map(json.dumps), st.text(max_size=20), st.sampled_from(ODD_TEXTS)),
        ),
        _words,
    ),
    "JSON lines": Parser(
        st.one_of(
            st.lists(st.dictionaries(NAMES, trees(NAMES), max_size=4), max_size=4).map(
                lambda rows: b"\n".join(map(as_json, rows))
            ),
            bent(b"\n".join(map(as_json, ROWS))),
        ),
        _json_lines,
    ),
    "parquet": Parser(bent(table()), _parquet),
    "host files": Parser(
        st.one_of(
            bent(b"mac-a slots=2\nmac-b:10.0.0.1 # x\n"),
            st.binary(max_size=60),
            trees(NAMES).map(as_json),
            bent(as_json([{"ssh": "mac-a", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en1"]}])),
        ),
        _hosts,
    ),
    "keys": Parser(bent(b"alice sha256:" + b"a" * 64 + b"\nbob sha256:" + b"b" * 64 + b"\n"), _keys),
    "chat bodies": Parser(
        st.one_of(
            st.dictionaries(st.sampled_from(REQUEST), trees(st.sampled_from(REQUEST)), max_size=6).map(as_json),
            bent(as_json({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3})),
        ),
        _chat,
    ),
    "records": Parser(
        st.one_of(
            trees(RECORD_NAMES).map(as_json),
            bent(as_json(SUMMARY)),
            st.dictionaries(st.sampled_from(list(SUMMARY)), trees(RECORD_NAMES), max_size=4).map(as_json),
        ),
        _records_of_a_run,
    ),
    "checkpoints": Parser(
        st.one_of(
            bent(as_json(STATE_OF_A_RUN)),
            trees(STATE_NAMES).map(as_json),
            st.dictionaries(STATE_NAMES, trees(STATE_NAMES), max_size=5).map(
                lambda changed: as_json(STATE_OF_A_RUN | changed)
            ),
        ),
        _checkpoint,
    ),
}


def fuzz(parser: Parser, examples: int, take: Callable[[bytes], None], seed: int | None = None) -> None:
    """Has hypothesis make so many inputs of a parser, and gives each to `take`; by default the same in every run."""

    @settings(
        max_examples=examples,
        derandomize=seed is None,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        take(data.draw(parser.inputs))

    (attack if seed is None else seeded(seed)(attack))()


def refuses_or_reads(parser: Parser, data: bytes, folder: Path) -> None:
    """Has a parser read its input, in an empty folder.

    Raises:
        Exception: whatever it lets through that is no clear line.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        parser.parse(data, folder)
    except UserError as refusal:
        assert str(refusal) == shown(str(refusal)), repr(str(refusal))
        str(refusal).encode()
