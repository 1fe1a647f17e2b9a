"""hf://...: which files are a split, and the real huggingface_hub library against a stand-in of the hub's interface."""

import contextlib
import gzip
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lib.data import hub, record_files, sources
from lib.errors import UserError
from tests.tiny import ROOT

SHA = "5" * 40
CONVERTED_SHA = "c" * 40


def pair(i: int) -> dict[str, str]:
    return {"prompt": f"What is {i} + 1?", "chosen": f"{i + 1}", "rejected": "No."}


PAIRS = [pair(i) for i in range(40)]


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def json_lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows: list[Any]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, row_group_size=4)
    return buffer.getvalue()


# What repositories look like: files by their names, and the rows of a split as the source's options ask for it.
REPOSITORIES: dict[str, tuple[dict[str, bytes], dict[str, list[Any]]]] = {
    "parquet": (
        {
            "data/train-00000-of-00002.parquet": parquet(PAIRS[:20]),
            "data/train-00001-of-00002.parquet": parquet(PAIRS[20:]),
            "data/test-00000-of-00001.parquet": parquet(PAIRS[:3]),
            "README.md": b"# No front matter",
        },
        {"": PAIRS, "?split=test": PAIRS[:3], "?rows=5": PAIRS[:5]},
    ),
    "folders": (
        {
            "harmless-base/train.jsonl.gz": gzip.compress(json_lines(PAIRS[:10])),
            "harmless-base/test.jsonl.gz": gzip.compress(json_lines(PAIRS[10:12])),
            "helpful-base/train.jsonl.gz": gzip.compress(json_lines(PAIRS[20:30])),
            "red-team-attempts/red_team_attempts.jsonl.gz": gzip.compress(json_lines([{"transcript": "x"}])),
        },
        {
            "": PAIRS[:10] + PAIRS[20:30],
            "?config=helpful-base": PAIRS[20:30],
            "?config=harmless-base&split=test": PAIRS[10:12],
        },
    ),
    "card": (
        {
            "README.md": b"---\nlicense: mit\nconfigs:\n- config_name: one\n  data_files:\n  - split: train\n    path: one/*.jsonl\n"
            b"  - split: hidden\n    path: [extra/b.jsonl, extra/c.jsonl]\n- config_name: two\n  default: true\n  data_dir: two\n"
            b"  data_files: '**'\n---\n# Text",
            "one/a.jsonl": json_lines(PAIRS[:2]),
            "one/deep/a.jsonl": json_lines(PAIRS[:1]),
            "extra/b.jsonl": json_lines(PAIRS[2:4]),
            "extra/c.jsonl": json_lines(PAIRS[4:5]),
            "two/x/d.jsonl": json_lines(PAIRS[5:8]),
        },
        {"": PAIRS[5:8], "?config=one": PAIRS[:2], "?config=one&split=hidden": PAIRS[2:5], "?config=two": PAIRS[5:8]},
    ),
    "list": (
        {"alpaca_data.json": json.dumps(PAIRS, indent=1).encode(), "dataset_infos.json": b"{}"},
        {"": PAIRS, "?split=train&rows=40": PAIRS},
    ),
}
IDS = [{"prompt_ids": [5, i], "chosen_ids": [7, i], "rejected_ids": [8, i]} for i in range(40)]
REPOSITORIES["ids"] = ({f"data/train-{i}.parquet": parquet(IDS[20 * i : 20 * i + 20]) for i in range(2)}, {"": IDS})
# JSON lines of which the hub has made parquet on a branch of its own.
REPOSITORIES["lines"] = ({"train.jsonl": json_lines(IDS)}, {"": IDS})
CONVERTED = {f"default/train/{i:04}.parquet": parquet(IDS[20 * i : 20 * i + 20]) for i in range(2)}
WRONG = [
    (
        "parquet?split=validation",
        "no split 'validation'; there are train, test|no split 'validation'; there are test, train",
    ),
    ("parquet?config=nope", "no config 'nope'; there are data"),
    ("card?config=nope", "no config 'nope'; there are one, two, extra"),
    ("card?split=hidden", "no split 'hidden'; there are train"),
    ("nowhere", "cannot be opened: |there is no folder"),
]


class Hub(http.server.BaseHTTPRequestHandler):
    """The parts of the hub's HTTP interface that reading a public data set takes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        name = next((name for name in REPOSITORIES if f"/ann/{name}" in path), "")
        files = REPOSITORIES[name][0] if name else {}
        sha = SHA
        if "refs/convert/parquet" in path or CONVERTED_SHA in path:
            files, sha, name = CONVERTED, CONVERTED_SHA, name if name == "lines" else ""
        if not name:
            self.send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            content = files[path.partition(f"/resolve/{sha}/")[2]]
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            headers |= {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
            if asked := self.headers.get("Range"):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                part = content[int(first) : int(last) + 1 if last else None]
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
                self.send(206, part, headers)
            else:
                self.send(200, content, headers)
        elif "/tree/" in path or "/paths-info/" in path:
            tree = [{"type": "file", "oid": "0", "size": len(content), "path": file} for file, content in files.items()]
            self.send(200, json.dumps(tree).encode(), {})
        else:
            self.send(200, json.dumps({"id": f"ann/{name}", "sha": sha, "siblings": []}).encode(), {})

    do_HEAD = do_POST = do_GET

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def served() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def python(code: str, address: str, folder: Path, *sources: str) -> list[Any]:
    """The lines of JSON that a process writes which asks the hub at this address."""
    known = {"HF_ENDPOINT": address, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    environment = {**os.environ, **known, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", code, str(folder / "cache"), *sources]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


READ = """
import json, sys
from lib.data import sources, record_files
from lib.errors import UserError
for source in sys.argv[2:]:
    try:
        rows = [record for file in sources.files_of(source, sys.argv[1]) for _, record in record_files.read(str(file))]
    except UserError as error:
        rows = str(error)
    print(json.dumps(rows))
"""


def test_the_real_library_reads_every_layout_from_a_hub(tmp_path) -> None:
    every = [(name, *one) for name, (_, asked) in REPOSITORIES.items() for one in asked.items()]
    asked = [(f"hf://ann/{name}{options}", rows) for name, options, rows in every]
    wrong = [f"hf://ann/{name}" for name, _ in WRONG]
    with served() as address:
        answers = python(READ, address, tmp_path, *[source for source, _ in asked], *wrong)
    for (source, rows), answer in zip(asked, answers, strict=False):
        assert answer == rows, source
    for (name, words), answer in zip(WRONG, answers[len(asked) :], strict=True):
        assert isinstance(answer, str) and any(word in answer for word in words.split("|")), (name, answer)
        assert "\n" not in answer


STREAM = """
import json, sys
from pathlib import Path
from lib.config.settings import DataSettings
from lib.data.order import epoch_order
from lib.data.streaming import open_training
from lib.data.tokenizer import Vocabulary
settings = DataSettings(train=sys.argv[2], cache_dir=sys.argv[1], streaming=True)
data = open_training(settings, "preference", None, tell=lambda text: None)
order = epoch_order(data.lengths, 0, 0, 4, segments=data.segments)
first = [example.prompt_ids.tolist() for example in data.examples(order[:4].tolist())]
fetched = len(list(Path(sys.argv[1]).glob("hub-*.parquet")))
rows = [example.prompt_ids.tolist() for example in data.examples(order.tolist())]
print(json.dumps([first, fetched, rows, order.tolist(), data.digest]))
"""


@pytest.mark.parametrize("name, is_local", [("ids", False), ("ids", True), ("lines", False)])
def test_a_stream_from_a_hub_fetches_what_its_steps_need(tmp_path, name: str, is_local: bool) -> None:
    """Ten row groups of four: the first batch needs one, beside the one whose rows are the sample."""
    source = f"hf://{written(tmp_path / 'ids', REPOSITORIES['ids'][0])}" if is_local else f"hf://ann/{name}"
    with served() as address:  # the second one finds the groups in the cache
        answers = [python(STREAM, address, tmp_path, source)[-1] for _ in range(2)]
    first, fetched, rows, order, _ = answers[0]
    assert fetched <= 2 and first == rows[:4] and sorted(order) == list(range(40))
    assert rows == [IDS[row]["prompt_ids"] for row in order]
    assert [answers[1][i] for i in (0, 2, 3, 4)] == [answers[0][i] for i in (0, 2, 3, 4)]


@pytest.mark.parametrize("name", REPOSITORIES)
def test_a_local_folder_of_the_same_layout_gives_the_same_rows(name: str, tmp_path) -> None:
    files, asked = REPOSITORIES[name]
    written(tmp_path / name, files)
    cache = str(tmp_path / "cache")
    for options, rows in asked.items():
        found = sources.files_of(f"hf://{tmp_path}/{name}{options}", cache)
        assert [record for file in found for _, record in record_files.read(str(file))] == rows
    for wrong, words in WRONG:
        if wrong.startswith(name):
            with pytest.raises(UserError) as error:
                sources.files_of(f"hf://{tmp_path}/{wrong}", cache)
            assert any(word in str(error.value) for word in words.split("|"))


def test_a_broken_line_of_a_hub_is_named(tmp_path) -> None:
    (tmp_path / "train.jsonl").write_bytes(json_lines(PAIRS[:2]) + b"{broken\n")
    (tmp_path / "empty").mkdir()
    for source, why in (
        (f"hf://{tmp_path}?rows=9", "train.jsonl:3: broken JSON"),
        ("hf://x/y?sliter=7", "sliter: a data set is hf://OWNER/NAME"),
        ("hf:///no/where", "there is no folder /no/where"),
        (f"hf://{tmp_path}/empty", "no file of it ends with .jsonl"),
    ):
        with pytest.raises(UserError, match=why):
            hub.fetch(source, str(tmp_path / "cache"), print)
