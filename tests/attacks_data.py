"""Data sets of somebody else, and patterns that never end: each line an attack, as in tests/attacks.py."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from lib.data import parquet_pages
from tests import tiny
from tests.attacks import PAIR, Attack, of_rows, of_words, refused, run_of, training
from tests.attacks_models import huge, link_to, pipe, put

PIECE = bytes(2**20)
LONG = "x" * 5_000_000
SFT = "train.loss=sft"
NOISE = 200_000  # letters of a column that has room for a bomb of the same size


def of_bytes(name: str, content: bytes | Callable[[Path], None], *words: str) -> Attack:
    """A file of these bytes, as data.train."""

    def attack(folder: Path) -> str | None:
        path = folder / name
        path.unlink(missing_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content)
        try:
            return of_words(f"data.train={path}", *words)(folder)
        finally:
            path.unlink(missing_ok=True)

    return attack


def zipped(size: int, piece: bytes = PIECE) -> Callable[[Path], None]:
    """So many bytes in a thousandth of them."""

    def write(path: Path) -> None:
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(size // len(piece)):
                file.write(piece)

    return write


def of_table(make: Callable[[], pyarrow.Table], **options: Any) -> Attack:
    """A file of parquet, as data.train."""

    def write(path: Path) -> None:
        pyarrow.parquet.write_table(make(), path, **{"compression": "zstd", **options})

    return of_bytes("attack.parquet", write)


def pairs_of(prompt: Any, count: int) -> pyarrow.Table:
    return pyarrow.table({"prompt": prompt, "chosen": ["a"] * count, "rejected": ["b"] * count})


def false_histograms(path: Path) -> None:
    """A schema that says that no row lacks a value, over histograms of those that do: Arrow's exception ends its process."""
    pyarrow.parquet.write_table(pairs_of(["x"], 1), path)
    optional, required = b"\x25\x02\x18", b"\x25\x00\x18"  # the field repetition_type, before a name
    path.write_bytes(path.read_bytes().replace(optional, required))


def nested_once() -> pyarrow.Table:
    """A chat's content that is kept once, and repeated in a thousand rows."""
    content = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1024, pyarrow.int32()), pyarrow.array([LONG]))
    roles = pyarrow.array(["user"] * 1024)
    offsets = pyarrow.array(range(1025), pyarrow.int32())
    turns = pyarrow.StructArray.from_arrays([roles, content], ["role", "content"])
    return pairs_of(pyarrow.ListArray.from_arrays(offsets, turns), 1024)


def repeats_itself(path: Path) -> None:
    """Texts of which each is said to be the one before."""
    piece = pairs_of([LONG] * 8, 8)
    options = {"compression": "zstd", "use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}}
    with pyarrow.parquet.ParquetWriter(path, piece.schema, **options) as writer:
        for _ in range(128):
            for batch in piece.to_batches():
                writer.write_batch(batch)


def false_page(unpacked: int, kind: int = 0, is_hidden: bool = False) -> Callable[[Path], None]:
    """A page that unpacks to so many bytes, where the footer has a small column of noise; in Thrift's compact protocol.

    is_hidden: it says less, and then so much in a field whose number is the same in 16 bits.
    """

    def write(path: Path) -> None:
        noise = os.urandom(NOISE // 2).hex()
        table = pyarrow.table({"prompt": [noise], "chosen": ["a"], "rejected": ["b"]})
        options = {"compression": {"prompt": "zstd", "chosen": "none", "rejected": "none"}, "use_dictionary": False}
        pyarrow.parquet.write_table(table, path, **options, write_statistics=False)
        with pyarrow.parquet.ParquetFile(path) as file:
            column = file.metadata.row_group(0).column(0)
        raw = bytearray(path.read_bytes())
        begin, size = column.data_page_offset, column.total_compressed_size
        bomb = squeezed(unpacked)
        own = b"\x2c\x15\x02\x15\x00\x15\x06\x15\x06\x00" if kind == 0 else b"\x4c\x15\x02\x15\x00\x00"  # one value
        header, packed = b"", 0
        while len(header) + packed != size:  # the header's own length is in it
            packed = size - len(header)
            told = 9 if is_hidden else unpacked
            sizes = b"".join(b"\x15" + varint(2 * value) for value in (kind, told, packed))
            again = b"\x05" + varint(2 * 65534 - 1) + varint(2 * unpacked) if is_hidden else b""
            header = sizes + own + again + b"\x00"
        room = packed - len(bomb) - 8
        chunk = header + bomb + b"\x50\x2a\x4d\x18" + room.to_bytes(4, "little") + bytes(room)  # zstd skips that
        raw[begin : begin + size] = chunk
        path.write_bytes(raw)

    return write


def squeezed(size: int) -> bytes:
    """So many zeros by zstd."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        for _ in range(size // len(PIECE)):
            stream.write(PIECE)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def reads_false_pages(folder: Path) -> str | None:
    """Headers of pages that are none, that never end, or nest, are refused in a moment."""
    for raw in (
        b"\x15",
        b"\x1c" * 100,
        b"\x19\xfc" + b"\xff" * 8 + b"\x7f",
        b"\x19\xf1" + b"\xff" * 8 + b"\x7f",  # 2^63 truths, and 2^63 floating-point numbers
        b"\x19\xf7" + b"\xff" * 8 + b"\x7f",
        b"\x19" * 5000,  # a list of a list ...
        b"\x15" + b"\xff" * 20,
        b"\x1b\x00",
        b"\x15\x00\x05\x02\x02\x00",
        b"\x25\x02\x05" + varint(2 * 65534 - 1) + b"\x04\x00",  # field -65534, in 16 bits the second one again
        b"\x15" + varint(2**33 + 2) + b"\x00",  # in 32 bits one
    ):
        try:
            parquet_pages.struct(raw, 0)
        except (parquet_pages.FalsePage, IndexError):
            continue
        return f"{raw!r} is taken"
    return None


def leads_away(folder: Path) -> str | None:
    """A page that ends behind its column, so that the next ones would not be looked at; and columns at one place."""
    page = b"\x15\x00\x15\x02\x15" + varint(2 * 900) + b"\x2c\x15\x02\x00\x00"
    honest = [parquet_pages.Chunk("a", 0, len(page) + 900, 10, 1), parquet_pages.Chunk("b", 4000, 4010, 10, 1)]
    inside = page.replace(varint(2 * 900), varint(2 * 80))  # a page of another column, in the middle of that one
    content = (page + bytes(500 - len(page)) + inside).ljust(4000, b"\0")
    parquet_pages.HonestPages(io.BytesIO(content), honest).read()
    for chunks in (
        [parquet_pages.Chunk("a", 0, 500, 10, 1)],
        [
            parquet_pages.Chunk("a", 0, len(page) + 900, 10, 1),
            parquet_pages.Chunk("b", 500, 500 + len(inside) + 80, 10, 1),
        ],
    ):
        try:
            parquet_pages.HonestPages(io.BytesIO(content), chunks).read()
        except parquet_pages.FalsePage:
            continue
        return f"{chunks} is taken"
    return None


def of_hub(files: dict[str, bytes], query: str = "", may_run: bool = False) -> Attack:
    """A data set's repository, as a local folder."""

    def attack(folder: Path) -> str | None:
        root = folder / "evil-hub"
        for old in (root, folder / "evil-cache"):
            shutil.rmtree(old, ignore_errors=True)
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        words = [f"data.train=hf://{root}{query}", f"data.cache_dir={folder}/evil-cache"]
        shutil.rmtree(folder / "attacked", ignore_errors=True)
        if may_run and run_of("train.py", training(folder, *words))[0] == 0:
            return None
        return of_words(*words)(folder)

    return attack


def of_card(front: str) -> Attack:
    """The front matter of a README.md of a repository that has one file: it may be read without its card."""
    rows = json.dumps({"prompt_ids": [2], "chosen_ids": [3], "rejected_ids": [4]}).encode()
    return of_hub({"README.md": f"---\n{front}\n---\n".encode(), "b.jsonl": rows}, may_run=True)


def fetches_into_links(folder: Path) -> str | None:
    """A cache that came with a run's folder, with links in the places where a hub's data set is kept."""
    rows = [json.dumps({"prompt_ids": [2], "chosen_ids": [3], "rejected_ids": [4]})] * 9
    root, cache, victim = folder / "evil-hub", folder / "evil-cache", folder / "victim"
    words = [f"data.train=hf://{root}", f"data.cache_dir={cache}"]
    if fault := of_hub({"a.jsonl": "\n".join(rows).encode()}, may_run=True)(folder):
        return fault
    shutil.rmtree(victim, ignore_errors=True)
    victim.mkdir()
    (kept,) = (path for path in cache.glob("hub-*") if path.is_dir())
    for path in list(kept.iterdir()):
        path.unlink()
        (kept / f".{path.name}").symlink_to(victim / "file")
    shutil.rmtree(folder / "attacked", ignore_errors=True)
    status, _, errors = run_of("train.py", training(folder, *words))
    if status != 0 or list(victim.iterdir()):
        return f"status {status}, {list(victim.iterdir())}: {errors[-300:]}"
    shutil.rmtree(kept)
    kept.symlink_to(victim)
    fault = of_words(*words, told="would be written to")(folder)
    return f"it wrote into a folder of yours: {list(victim.iterdir())}" if any(victim.iterdir()) else fault


def of_download(state: Any) -> Attack:
    """A cache that came with a run's folder, whose download says another position than it has: it is made anew."""

    def attack(folder: Path) -> str | None:
        row = json.dumps({"prompt_ids": [2], "chosen_ids": [3], "rejected_ids": [4]})
        if fault := of_hub({"a.jsonl": f"{row}\n".encode() * 9}, may_run=True)(folder):
            return fault
        root, cache = folder / "evil-hub", folder / "evil-cache"
        (kept,) = (path for path in cache.glob("hub-*") if path.is_dir())
        put(kept / "stream.json", state)
        shutil.rmtree(folder / "attacked", ignore_errors=True)
        words = [f"data.train=hf://{root}", f"data.cache_dir={cache}"]
        return None if run_of("train.py", training(folder, *words))[0] == 0 else of_words(*words)(folder)

    return attack


def squeezed_list(folder: Path) -> str | None:
    """A list of 1.5 GB in one file of JSON, in 1.5 MB."""
    sink = io.BytesIO()
    with gzip.GzipFile(fileobj=sink, mode="wb", compresslevel=1) as file:
        file.write(b"[")
        for _ in range(1500):
            file.write(b" " * 2**20)
    return of_hub({"data.json.gz": sink.getvalue()})(folder)


def asks_for_ever(folder: Path) -> str | None:
    """An answer_pattern that never ends ends an evaluation by one line."""
    answers = tiny.write_jsonl(folder / "evil-answers.jsonl", [{"prompt": "Add 1 and 2.", "answer": "3"}] * 4)
    model = tiny.ROOT / "configs/quickstart/model"
    words = [f"model.path={model}", "model.random_init=false", f"evaluate.answers={answers}", "train.steps=1"]
    rows = tiny.write_jsonl(folder / "evil-rows.jsonl", [PAIR] * 8)
    shutil.rmtree(folder / "attacked", ignore_errors=True)
    words += [
        f"data.train={rows}",
        "data.valid=null",
        r"evaluate.answer_pattern=(?:.|.|\s)*!",
        "evaluate.max_tokens=60",
    ]
    return refused("train.py", training(folder, *words), told="regular expression")


def reads_a_long_row(folder: Path) -> str | None:
    """Rows that are longer than a line may be are named, and the others trained on."""
    rows = [json.dumps(PAIR | {"prompt_ids": [2], "chosen_ids": [3], "rejected_ids": [4]})]
    path = tiny.write_jsonl(folder / "long.jsonl", [*rows, '{"prompt": "' + "x" * 9_000_000 + '"}'])
    why = refused("train.py", training(folder, f"data.train={path}"), told="a line of")
    path.unlink()
    return why


def leaves_out_broken_rows(folder: Path) -> str | None:
    """A hundred broken rows are left out where the user says so, and nothing else is."""
    good = [{"prompt_ids": [2], "chosen_ids": [3], "rejected_ids": [4]}] * 8
    path = tiny.write_jsonl(folder / "mixed.jsonl", [*good, *["{" * 1000] * 100])
    words = training(folder, f"data.train={path}", "data.skip_invalid=true")
    shutil.rmtree(folder / "attacked", ignore_errors=True)
    status, _, errors = run_of("train.py", words)
    return None if status == 0 else f"status {status}: {errors[-300:]}"


def chat(content: Any, **more: Any) -> list[Any]:
    """A row with one conversation."""
    return [{"messages": [{"role": "user", "content": content, **more}, {"role": "assistant", "content": "y"}]}]


def shards(name: str) -> dict[str, Any]:
    """What a finished download of one shard says of itself."""
    return {"shards": [{"name": name, "records": 9, "bytes": 9}], "stream": None, "done": True}


IDS = {"prompt_ids": [2, 3], "chosen_ids": [4], "rejected_ids": [5]}

ATTACKS: dict[str, Attack] = {
    # JSON lines
    "data: 100,000 lists deep": of_bytes("deep.jsonl", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
    "data: 100,000 objects deep": of_bytes("deep.jsonl", b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n"),
    "data: an id of 5,000 digits": of_bytes("ids.jsonl", b'{"prompt_ids": [' + b"9" * 5000 + b"]}\n"),
    "data: an id of 2^63": of_rows([IDS | {"chosen_ids": [2**63]}]),
    "data: an id below zero": of_rows([IDS | {"chosen_ids": [-1]}]),
    "data: an id beyond the vocabulary": of_rows([IDS | {"chosen_ids": [48]}]),
    "data: an id that is half": of_rows([IDS | {"chosen_ids": [1.5]}]),
    "data: an id that is true": of_rows([IDS | {"chosen_ids": [True]}]),
    "data: an id that is text": of_rows([IDS | {"chosen_ids": ["4"]}]),
    "data: ids of lists": of_rows([IDS | {"chosen_ids": [[4]]}]),
    "data: no ids": of_rows([IDS | {"chosen_ids": [], "prompt_ids": []}]),
    "data: 1e999": of_bytes("inf.jsonl", b'{"prompt_ids": [1e999], "chosen_ids": [1], "rejected_ids": [2]}\n'),
    "data: no number": of_bytes("nan.jsonl", b'{"prompt_ids": [NaN], "chosen_ids": [1], "rejected_ids": [2]}\n'),
    "data: UTF-16": of_bytes("utf.jsonl", json.dumps(PAIR).encode("utf-16")),
    "data: bytes that are no text": of_bytes("bytes.jsonl", bytes(range(256)) * 100),
    "data: NULs": of_bytes("nul.jsonl", b"\0" * 100_000),
    "data: blank lines alone": of_bytes("blank.jsonl", b"\n" * 1_000_000),
    "data: a line of 9 MB": reads_a_long_row,
    "data: a hundred broken rows": leaves_out_broken_rows,
    "data: a role of a list": of_rows([{"messages": [{"role": ["user"], "content": "x"}]}], SFT),
    "data: a role of 1 MB": of_rows([{"messages": [{"role": "u" * 2**20, "content": "x"}]}], SFT),
    "data: content of numbers": of_rows(chat(3), SFT),
    "data: content of odd parts": of_rows(chat([{"type": "image_url", "image_url": "file:///etc/passwd"}]), SFT),
    "data: calls of text": of_rows(chat("x", tool_calls="evil"), SFT),
    "data: messages of text": of_rows([{"messages": "x"}], SFT),
    "data: messages of nothing": of_rows([{"messages": []}], SFT),
    "data: arguments that are the template's": of_rows([{**PAIR, "chat_template_kwargs": {"tokenize": True}}]),
    "data: arguments that are a list": of_rows([{**PAIR, "chat_template_kwargs": [1]}]),
    "data: a label of text": of_rows([{"prompt": "a", "completion": "b", "label": "maybe"}], "train.loss=kto"),
    "data: a column that a terminal obeys": of_rows([{"\x1b]0;x\x07": 1, "\u202e": 2}]),
    "data: 200,000 columns": of_bytes("wide.jsonl", json.dumps({f"c{i}": i for i in range(200_000)}).encode()),
    # Packed files
    "data: 2 GB of one line in 2 MB of gzip": of_bytes("bomb.jsonl.gz", zipped(2**31)),
    "data: gzip that is none": of_bytes("none.jsonl.gz", b"PK\x03\x04" * 100),
    "data: gzip that is cut": of_bytes("cut.jsonl.gz", gzip.compress(json.dumps(PAIR).encode() * 100)[:40]),
    "data: gzip in gzip": of_bytes("twice.jsonl.gz", gzip.compress(gzip.compress(json.dumps(PAIR).encode()))),
    "data: an archive": of_bytes("a.zip", b"PK\x03\x04" + bytes(100)),
    "data: a list of 1.5 GB in 1.5 MB": squeezed_list,
    # Parquet
    "parquet: a page of 1.9 GB in 60 kB": of_bytes("page.parquet", false_page(1900 * 2**20)),
    "parquet: a dictionary of 1.9 GB in 60 kB": of_bytes("dictionary.parquet", false_page(1900 * 2**20, kind=2)),
    "parquet: histograms of other values": of_bytes("histograms.parquet", false_histograms),
    "parquet: headers that are none": reads_false_pages,
    "parquet: pages that lead away": leads_away,
    "parquet: a page of 1.9 GB by a field twice": of_bytes("twice.parquet", false_page(1900 * 2**20, is_hidden=True)),
    "parquet: a text that repeats the one before": of_bytes("delta.parquet", repeats_itself),
    "parquet: a chat that is kept once": of_table(nested_once, dictionary_pagesize_limit=2**30),
    "parquet: 20 million rows of nothing": of_table(
        lambda: pyarrow.table({name: pyarrow.nulls(20_000_000, pyarrow.string()) for name in PAIR})
    ),
    "parquet: 20,000 columns": of_table(lambda: pyarrow.table({f"c{i}": [1] for i in range(20_000)})),
    "parquet: columns of one name": of_table(
        lambda: pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, ["prompt", "prompt", "chosen"])
    ),
    "parquet: a name that a terminal obeys": of_table(lambda: pyarrow.table({"\x1b[31mprompt\n": ["x"]})),
    "parquet: cut in the middle": of_bytes("cut.parquet", b"PAR1" + bytes(100)),
    "parquet: a footer of 2 GB": of_bytes("footer.parquet", b"PAR1" + bytes(64) + b"\xff\xff\xff\x7fPAR1"),
    "parquet: a footer below zero": of_bytes("footer.parquet", b"PAR1" + bytes(64) + b"\xff\xff\xff\xffPAR1"),
    "parquet: nothing": of_bytes("none.parquet", b""),
    "parquet: a day of the year 200,000": of_table(
        lambda: pyarrow.table({"prompt": pyarrow.array([2**62], pyarrow.timestamp("us")), **{"chosen": ["a"]}})
    ),
    "download: a list": of_download([1]),
    "download: nothing": of_download({}),
    "download: a pipe": of_download(pipe),
    "download: it never ends": of_download(link_to("/dev/zero")),
    "download: 12 GB": of_download(huge),
    "download: shards of numbers": of_download({"shards": [1], "stream": None, "done": True}),
    "download: no shards": of_download({"shards": [], "stream": None, "done": True}),
    "download: a shard that is not there": of_download(shards("shard-00007.jsonl")),
    "download: a shard outside": of_download(shards("../../../../../../etc/passwd")),
    "download: a position of numbers": of_download({"shards": [], "stream": 3, "done": False}),
    "download: a position in another's file": of_download(
        {"shards": [], "stream": {"paths": ["/etc/passwd"], "file": 0, "row": 0}, "done": False}
    ),
    "download: a position below none": of_download(
        {"shards": [], "stream": {"paths": [], "file": -1, "row": -1}, "done": False}
    ),
    # A hub's card
    "card: a billion laughs": of_card(
        "a: &a [x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{f'*{a},' * 9}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True))
    ),
    "card: 3,000 lists deep": of_card("configs: " + "[" * 3000 + "]" * 3000),
    "card: a pattern that never ends": of_card(
        "configs:\n- config_name: a\n  data_files: '" + "**/" * 40 + "*a*a*a*a*a*a*a*a*a*a*b'"
    ),
    "card: a file outside": of_card("configs:\n- config_name: a\n  data_files: ../../../../etc/passwd"),
    "card: a file by its full path": of_card("configs:\n- config_name: a\n  data_files: /etc/passwd"),
    "card: files of numbers": of_card("configs:\n- config_name: a\n  data_files: [{split: train, path: 3}]"),
    "card: brackets that do not close": of_card("configs:\n- config_name: a\n  data_files: '[[[*'"),
    "card: a split that a terminal obeys": of_card(
        'configs:\n- config_name: a\n  data_files: [{split: "\\e[31mx", path: b.jsonl}]'
    ),
    "hub: links where it is kept": fetches_into_links,
    "hub: rows of 10^400": of_hub({"a.jsonl": b"{}"}, "?rows=" + "9" * 400),
    "hub: a configuration outside": of_hub({"a/b.jsonl": b"{}"}, "?config=../.."),
    "hub: no files": of_hub({"README.md": b"---\n---\n"}),
    # Patterns
    "pattern: an answer's that never ends": asks_for_ever,
}
