"""Every parser of files and requests, and what hypothesis throws at it: each ends well, or with one clear line.

Inputs are real files of each kind with a few things changed (tests/mutations.py), random trees of the words that a parser
knows, and bent bytes. tests/test_parsers.py tries a few of each, benchmarks/fuzz_parsers.py as many as ten minutes take.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from lib.config import load
from lib.config.help import known_settings
from lib.config.rollout_settings import RolloutSettings
from lib.config.schema import DataSettings
from lib.dashboard import charts, rounds, run_report
from lib.dashboard.figures import figures
from lib.dashboard.history import RunHistory
from lib.data import dataset, hub_datasets, hub_files, record_files, sources
from lib.data.groups import load_groups
from lib.data.index import index, keys_of
from lib.data.model_limits import ModelLimits
from lib.data.record_formats import RecordKind, Unusable
from lib.errors import UserError, shown
from lib.evaluate.work_journal import Journal
from lib.launch import hostfile
from lib.rollouts import collect
from lib.rollouts import rounds as rollout_rounds
from lib.serve import api_keys, feedback, openai_requests
from lib.training import find_checkpoint
from lib.training.checkpoint import MANIFEST, STATE, file_sha256
from tests import seeds
from tests.mutations import ODD_TEXTS, bent, changed, json_lines, json_text, lines_changed
from tests.test_formats import FORMATS

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
        modules: files of lib/ that are its code.
    """

    inputs: st.SearchStrategy[bytes]
    parse: Callable[[bytes, Path], object]
    modules: tuple[str, ...]


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


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


# ---- Settings


def _config(data: bytes, folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_bytes(data)
    load.dump(load.load(path))


def _words(data: bytes, folder: Path) -> None:
    base = {"model": {"path": "m"}, "data": {"train": "d"}}
    load.dump(load.load(None, data.decode("utf-8", "surrogateescape").split("\x1e"), base))


# ---- Data


def _records(file: Path) -> None:
    for kind in KINDS:
        for _, record in record_files.read(str(file), DATA):
            for row in [] if isinstance(record, Unusable) else dataset.parse_rows(record, DATA, kind):
                if not isinstance(row, Unusable):
                    keys_of(row)


def _json_lines(data: bytes, folder: Path) -> None:
    (folder / "data.jsonl").write_bytes(data)
    _records(folder / "data.jsonl")


def _compressed(data: bytes, folder: Path) -> None:
    (folder / "data.jsonl.gz").write_bytes(data)
    _records(folder / "data.jsonl.gz")


def _parquet(data: bytes, folder: Path) -> None:
    (folder / "data.parquet").write_bytes(data)
    _records(folder / "data.parquet")


def _groups(data: bytes, folder: Path) -> None:
    (folder / "groups.jsonl").write_bytes(data)
    groups = load_groups(DATA.model_copy(update={"train": str(folder / "groups.jsonl")}), ModelLimits(48, 20))
    for example in groups:
        assert all(0 <= token < 48 for piece in (example.prompt_ids, *example.completions) for token in piece.tolist())
        assert example.rewards is not None and not np.isinf(example.rewards).any()


def _cache(data: bytes, folder: Path) -> None:
    """An index and a download that somebody else kept, of files that are as they say."""
    settings = DATA.model_copy(update={"cache_dir": str(folder / "cache")})
    file = folder / "data.jsonl"
    file.write_bytes(json_lines(seeds.IDS))
    index(file, settings, "preference")
    (kept,) = (folder / "cache").glob("index-*/index.json")
    real = json.loads(kept.read_text())
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(told := json.loads(data), dict):
            same = [key for key in ("size", "modified_ns", "changed_ns", "inode") if told.get(key) == seeds.INDEX[key]]
            data = json_text(told | {key: real[key] for key in same})
    kept.write_bytes(data)
    with contextlib.suppress(UserError):
        records = sources.open_records([file], settings, "preference")
        ", ".join([*records.indices[0].formats, *records.indices[0].unusable, records.location(0)])
        assert all(isinstance(records[number], dict) for number in range(len(records)))
    (folder / hub_datasets.STATE).write_bytes(data)
    for shard in hub_datasets._state(folder)["shards"]:
        assert (folder / shard["name"]).parent == folder
    with contextlib.suppress(ValueError, RecursionError):
        hub_files.FileStream(["/a"], open).load_state_dict(json.loads(data))


# ---- Hosts, keys, requests


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
            wanted = openai_requests.backend_request(kind, request, LIMITS, 5)
        except openai_requests.RequestError as refusal:
            assert refusal.body
            continue
        answer = {"role": "assistant", "content": "x"}
        choice = {"message": answer, "text": "x", "finish_reason": "stop"}
        json.dumps(feedback.row_of(wanted, {"id": "1", "choices": [choice]})).encode()


def _labels(data: bytes, folder: Path) -> None:
    try:
        openai_requests.read(feedback.Label, data)
    except openai_requests.RequestError as refusal:
        assert refusal.body
    (folder / "feedback.jsonl").write_bytes(b'{"id": "a"}\n' + data)
    with contextlib.redirect_stderr(io.StringIO()):  # where it says what it takes away
        feedback.open_file(folder / "feedback.jsonl")


# ---- What a run leaves


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
    for which in ("best", "last", "1"):
        try:
            find_checkpoint.find(folder, which)
        except UserError:
            continue


def _log(data: bytes, folder: Path) -> RunHistory:
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-000.jsonl").write_bytes(data)
    run = RunHistory(folder)
    while run.read():
        pass
    return run


def _records_of_a_run(data: bytes, folder: Path) -> None:
    """All that the pages say, without pictures: these take a hundred times as long."""
    from dash import html

    (folder / "summary.json").write_bytes(data)
    run = _log(data, folder)
    now, summary = figures(run, 2.0), run_report._summary(folder / "summary.json")
    for made in (run_report.held_out(run), run_report.facts(run, now, summary), run_report.ranks(now)):
        str(made)
    run_report.samples(run), run_report.environment(run), run_report.model_card(run, now, summary)
    for event in run.events:
        charts.describe(event)
    rounds.section(html, run)


def _pages_of_a_run(data: bytes, folder: Path) -> None:
    _log(START + data, folder)
    (folder / "summary.json").write_bytes(data)
    (folder / "adapters.safetensors").touch()
    run_report.write(folder)


def _round(data: bytes, folder: Path) -> None:
    for name in ("lines.jsonl", collect.SAMPLES):
        (folder / name).write_bytes(data)
    for read in (
        lambda: collect._by_prompt(folder / "lines.jsonl", [0, 1], RolloutSettings(samples=2), ModelLimits(48)),
        lambda: list(collect.lines_of(folder / "lines.jsonl", collect.ScoreLine)),
        lambda: rollout_rounds._figures(folder / "lines.jsonl", rollout_rounds._read(folder / "lines.jsonl")),
        lambda: collect.policy_of(folder),
    ):
        try:
            read()
        except UserError as refusal:
            assert str(refusal) == shown(str(refusal))


def _journal(data: bytes, folder: Path) -> None:
    (folder / "out.jsonl.partial").write_bytes(b'{"key": "k", "chunks": 3}\n' + data)
    journal = Journal(folder / "out.jsonl.partial", "k", 3)
    try:
        if journal.done.all():
            journal.finish(folder / "out.jsonl")
    finally:
        journal.close()


# ---- What they are fed


DATA = DataSettings(train="x")
LIMITS = openai_requests.Limits("m", 100, 50, 48, 64)
START = json_text(seeds.LOG[0]) + b"\n"


def several(rows: list[Any], *more: Any) -> st.SearchStrategy[bytes]:
    """Lines of JSON, in one of which something is changed."""
    broken = st.lists(st.one_of(changed(rows, *more), st.sampled_from(rows)), min_size=1, max_size=5)
    return st.one_of(
        st.builds(lambda odd, at: json_lines([*rows[:at], odd, *rows[at:]]), changed(rows, *more), st.integers(0, 9)),
        broken.map(json_lines),
        changed([rows]).map(lambda tree: json_lines(tree if isinstance(tree, list) else [tree])),
        bent(json_lines(rows), [b"\n", b"\r\n", b"\xff", b"\x00", b"{", b"}", b"\xef\xbb\xbf"]),
    )


def table(rows: list[Any], codec: str = "snappy", **options: Any) -> bytes:
    """A small file of parquet; rows that Arrow cannot take become texts."""
    out = io.BytesIO()
    try:
        made = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(made, out, compression=codec, **options)
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
        out = io.BytesIO()
        texts = [{"prompt": json_text(row).decode("utf-8", "replace")} for row in rows] or [{"prompt": "a"}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), out, compression=codec)
    return out.getvalue()


ROWS = [row for row in [*FORMATS, *seeds.IDS] if isinstance(row, dict)]
TABLES = [table([row], codec) for row, codec in zip(ROWS, seeds.CODECS * len(ROWS), strict=False)]
TABLES += [table(seeds.IDS), table(ROWS[:1] * 40, use_dictionary=False, row_group_size=7, data_page_version="2.0")]
THRIFT = [bytes([first]) for first in (0x00, 0x15, 0x16, 0x18, 0x19, 0x1C, 0x2C, 0x7F, 0x80, 0xFF)]


@st.composite
def parquet(draw: Callable[..., Any]) -> bytes:
    """Tables of changed rows, and files with some bytes changed, mostly in the footer, where everything is said."""
    if draw(st.booleans()):
        rows = draw(st.lists(changed(ROWS), min_size=1, max_size=3))
        return table(
            [row if isinstance(row, dict) else {"prompt": row} for row in rows], draw(st.sampled_from(seeds.CODECS))
        )
    whole = draw(st.sampled_from(TABLES))
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    if draw(st.integers(0, 3)):
        new = draw(bent(whole[footer:-8], THRIFT))
        return whole[:footer] + new + len(new).to_bytes(4, "little") + b"PAR1"
    return draw(bent(whole[:footer], THRIFT)) + whole[footer:]


SETTINGS = st.one_of(
    st.sampled_from(sorted({part for key in known_settings() for part in key.split(".")})), st.text(max_size=5)
)
NAMES = st.one_of(st.sampled_from(COLUMNS), st.text(max_size=5), st.sampled_from(ODD_TEXTS))
VALUES = [value for section in seeds.CONFIG.values() if isinstance(section, dict) for value in section.values()]


def yaml_text(tree: Any) -> bytes:
    try:
        return yaml.dump(tree).encode(errors="replace")
    except (yaml.YAMLError, TypeError, RecursionError):
        return json_text(tree)


WORD = st.builds(
    lambda key, value: f"{key}={value}",
    st.sampled_from(known_settings()),
    st.one_of(
        changed([VALUES]).map(lambda tree: json_text(tree[:1] if isinstance(tree, list) else tree).decode()),
        st.sampled_from(VALUES).map(lambda value: json_text(value).decode()),
        trees(SETTINGS).map(json.dumps),
        st.text(max_size=20),
        st.sampled_from(ODD_TEXTS),
    ),
)

PARSERS: dict[str, Parser] = {
    "YAML": Parser(
        st.one_of(
            changed([seeds.CONFIG, *seeds.SHORT_CONFIGS], values=VALUES).map(json_text),
            changed(seeds.SHORT_CONFIGS, list(seeds.CONFIG), VALUES).map(yaml_text),
            lines_changed(
                yaml.safe_dump(seeds.CONFIG), ["*a", "&a", "- x", "!!python/name:os", "|", ">", "{", "x:", "<<:"]
            ),
            trees(SETTINGS).map(yaml_text),
            bent(yaml.safe_dump(seeds.SHORT_CONFIGS[0]).encode()),
        ),
        _config,
        ("config/load.py", "config/plain_yaml.py", "config/read_file.py", "config/schema.py"),
    ),
    "words": Parser(
        st.lists(WORD, min_size=1, max_size=4).map(lambda words: "\x1e".join(words).encode("utf-8", "replace")),
        _words,
        ("config/load.py", "config/hints.py", "config/rollout_settings.py", "config/train_settings.py"),
    ),
    "JSON lines": Parser(
        st.one_of(
            several(ROWS),
            changed(ROWS, COLUMNS).map(lambda row: json_lines([row])),
            changed(ROWS, COLUMNS).map(lambda row: json_lines([row])),
            st.lists(st.dictionaries(NAMES, trees(NAMES), max_size=4), max_size=4).map(
                lambda rows: b"\n".join(map(as_json, rows))
            ),
        ),
        _json_lines,
        (
            *("data/record_files.py", "data/parse_records.py", "data/messages.py"),
            *("data/column_readers.py", "data/known_formats.py"),
        ),
    ),
    "gzip": Parser(
        st.one_of(
            bent(gzip.compress(json_lines(ROWS[:3]))),
            several(ROWS[:3]).map(gzip.compress),
            st.builds(lambda one, other: gzip.compress(one) + gzip.compress(other), *[several(ROWS[:3])] * 2),
        ),
        _compressed,
        ("data/record_files.py",),
    ),
    "parquet": Parser(parquet(), _parquet, ("data/parquet.py", "data/parquet_pages.py")),
    "groups": Parser(
        several(seeds.GROUPS, [], [48, 47, [0.1], -0.5]), _groups, ("data/groups.py", "data/model_limits.py")
    ),
    "caches": Parser(
        st.one_of(
            *(changed([kept]).map(json_text) for kept in (seeds.INDEX, seeds.DOWNLOAD, seeds.DOWNLOAD["stream"])),
            bent(json_text(seeds.INDEX)),
        ),
        _cache,
        ("data/index.py", "data/hub_datasets.py", "config/read_file.py"),
    ),
    "host files": Parser(
        st.one_of(
            lines_changed(
                seeds.HOST_LINES, ["slots=2", "slots=x", "[::1]", "a:b:c", "user@", "@a", "#", "slots=", "1.2.3.4"]
            ),
            changed(seeds.HOSTS).map(json_text),
            bent(seeds.HOST_LINES.encode()),
            bent(json_text(seeds.HOSTS[0])),
            st.binary(max_size=60),
        ),
        _hosts,
        ("launch/hostfile.py", "config/read_file.py"),
    ),
    "keys": Parser(
        st.one_of(lines_changed(seeds.KEYS, ["alice", "sha256:" + "a" * 64, "SHA256:"]), bent(seeds.KEYS.encode())),
        _keys,
        ("serve/api_keys.py", "config/read_file.py"),
    ),
    "chat bodies": Parser(
        st.one_of(changed(seeds.CHATS).map(json_text), bent(json_text(seeds.CHATS[1]))),
        _chat,
        ("serve/openai_requests.py",),
    ),
    "labels": Parser(
        st.one_of(
            changed([{"id": "chatcmpl-1", "label": True}]).map(json_text),
            bent(b'{"id": "a", "label": false}\n{"id": "b", "la'),
            st.just(b'{"id": ' + b"[" * 100_000),
        ),
        _labels,
        ("serve/feedback.py",),
    ),
    "records": Parser(
        st.one_of(several(seeds.LOG), changed([seeds.SUMMARY]).map(json_text)),
        _records_of_a_run,
        (
            *("dashboard/history.py", "dashboard/figures.py", "dashboard/rounds.py", "dashboard/run_report.py"),
            *("dashboard/charts.py", "telemetry/log_tail.py"),
        ),
    ),
    "pages": Parser(
        st.one_of(several(seeds.LOG), changed([seeds.SUMMARY]).map(json_text)),
        _pages_of_a_run,
        ("dashboard/run_report.py", "dashboard/pictures.py", "dashboard/charts.py"),
    ),
    "rounds": Parser(
        st.one_of(several(seeds.SAMPLES), several(seeds.SCORES), changed([seeds.VERDICT]).map(json_text)),
        _round,
        ("rollouts/collect.py",),
    ),
    "journals": Parser(several(seeds.JOURNAL, [], [0, 1, 2, 3, "a"]), _journal, ("evaluate/work_journal.py",)),
    "checkpoints": Parser(
        st.one_of(changed([seeds.STATE_OF_A_RUN]).map(json_text), bent(json_text(seeds.STATE_OF_A_RUN))),
        _checkpoint,
        ("training/find_checkpoint.py", "config/read_file.py"),
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


def refuses_or_reads(parser: Parser, data: bytes, folder: Path) -> bool:
    """Has a parser read its input, in an empty folder; whether it took it.

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
        return False
    return True
