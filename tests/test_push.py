"""--push: the real huggingface_hub library against a stand-in of the hub's interface, cut off, refused and resumed."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.errors import UserError
from lib.export import card, command, push_checks
from tests import exported
from tests.tiny import ROOT

TOKEN = "hf_" + "Good" * 9
LARGE = ("a.safetensors", "b.safetensors")


class Hub(http.server.BaseHTTPRequestHandler):
    """The parts of the hub's HTTP interface that a push takes."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        hub = self.server
        blobs = [{"rfilename": name, "size": len(content)} for name, content in hub.files.items()]
        if not hub.exists:
            self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        else:
            self.answer(200, {"id": "ann/model", "sha": "5" * 40, "private": hub.private, "siblings": blobs})

    def do_PUT(self) -> None:
        hub, sha = self.server, self.path.rpartition("/")[2]
        if hub.holds(f"PUT {len(hub.uploads)}"):
            self.rfile.read(1)  # and no more: whoever sends is killed meanwhile
            return
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(content).hexdigest() == sha
        hub.uploads.append(sha)
        hub.blobs[sha] = content
        self.answer(200, {})

    def do_POST(self) -> None:
        hub, path = self.server, urllib.parse.urlparse(self.path).path
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        refusal = next((status for part, status in hub.refusals.items() if part in path), None)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."})
        elif refusal is not None:
            self.answer(
                refusal, {"error": {402: "Storage quota exceeded", 403: "You don't have the rights"}.get(refusal, "No")}
            )
        elif path.endswith("/repos/create"):
            status = 409 if hub.exists else 200
            hub.private = hub.private or (not hub.exists and json.loads(sent).get("visibility") == "private")
            hub.exists = True
            self.answer(status, {"url": f"{hub.address}/ann/model"})
        elif path.endswith("/validate-yaml"):
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"] in LARGE else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(sent)["files"]
            ]
            self.answer(200, {"files": modes})
        elif path.endswith("/objects/batch"):
            objects = [
                each
                | (
                    {}
                    if each["oid"] in hub.blobs
                    else {"actions": {"upload": {"href": f"{hub.address}/store/{each['oid']}"}}}
                )
                for each in json.loads(sent)["objects"]
            ]
            self.answer(200, {"objects": objects})
        elif "/commit/" in path:
            if hub.holds("commit"):
                return
            for line in map(json.loads, sent.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.blobs[value["oid"]]
            hub.commits += 1
            self.answer(200, {"success": True, "commitOid": "6" * 40, "commitUrl": f"{hub.address}/ann/model/commit/6"})
        else:
            raise AssertionError(path)

    def answer(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class HubServer(http.server.ThreadingHTTPServer):
    """What the hub has: a repository, its files, and blobs that no commit has named yet."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.exists = self.private = False
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.commits = 0
        self.refusals: dict[str, int] = {}
        self.hold_at = ""
        self.held = threading.Event()
        self.released = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def holds(self, place: str) -> bool:
        """Whether a request stops here, for whoever sent it to be killed; returns once that is done."""
        if place != self.hold_at:
            return False
        self.held.set()
        self.released.wait(60)
        return True

    def handle_error(self, *_: Any) -> None:
        """Nothing: senders are killed on purpose."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        for name, value in {"ENDPOINT": server.address, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An export's folder with two large files."""
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / command.FACTS).write_text("{}\n")
    (folder / "README.md").write_text("---\nlibrary_name: mlx\n---\n# Card\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "config.json").write_text('{"eos_token": "</s>"}\n')
    (folder / ".DS_Store").write_bytes(b"Finder's")
    for number, name in enumerate(LARGE):
        (folder / name).write_bytes(bytes([number]) * 100_000)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.path.read_bytes() for file in push_checks.files_to_send(folder)}


def test_a_push_that_was_killed_twice_ends_complete(hub: HubServer, export: Path) -> None:
    """Killed while the second file was on its way, then while the commit was."""
    known = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    code = "import sys; from lib.export.push import push; from lib.system.terminal import Voice; from pathlib import Path\n"
    code += "push(Path(sys.argv[1]), 'ann/model', True, Voice())"
    for hub.hold_at in ("PUT 1", "commit"):
        hub.held.clear()
        hub.released.clear()
        pushing = subprocess.Popen(
            [sys.executable, "-c", code, str(export)], cwd=ROOT, env={**os.environ, **known}, stdout=subprocess.DEVNULL
        )
        assert hub.held.wait(60)
        pushing.kill()
        pushing.wait(30)
        hub.released.set()
        assert hub.files == {}, "a part of an export was to be seen"
    hub.hold_at = ""
    assert command.main([str(export), "--push", "ann/model", "--private"]) == 0
    assert hub.files == contents(export) and hub.commits == 1 and hub.private
    assert len(hub.uploads) == len(set(hub.uploads)) == 2, "a file was sent twice"


def test_a_run_is_exported_with_its_card_and_pushed(hub: HubServer, tmp_path: Path) -> None:
    base = exported.base_model(tmp_path / "base", "llama")
    run = exported.run_of(tmp_path / "run", base)
    words = [str(run), "--push", "ann/model"]
    hub.refusals = {"/commit/": 507}
    assert command.main(words) == 1
    hub.refusals = {}
    assert command.main(words) == 0  # what was written before is taken
    target = run / "export" / "mlx"
    stored = json.loads((target / "tandem_export.json").read_text())
    (target / "tandem_export.json").write_text(json.dumps({**stored, "proof": None}))
    assert command.main(words) == 2  # written with --no-proof, and a proof is wanted
    assert command.main([*words, "--no-proof"]) == 0
    (target / "tandem_export.json").write_text(json.dumps(stored, indent=2) + "\n")
    assert command.main(words) == 0
    assert hub.files == contents(target) and "adapters.safetensors" in hub.files
    text = hub.files[card.CARD].decode()
    assert "library_name: mlx" in text and "valid.jsonl" in text and str(tmp_path) not in text
    (run / "adapters.safetensors").write_bytes((run / "adapters.safetensors").read_bytes() + b"\0")
    assert command.main(words) == 2  # trained further: the export is of another model


def test_a_dry_run_lists_files_and_sends_nothing(
    hub: HubServer, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(export), "--push", "ann/model", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "a.safetensors" in said and "100,000 bytes" in said and "5 files" in said and ".DS_Store" not in said
    assert not hub.exists


@pytest.mark.parametrize(
    ("refusals", "status", "words"),
    [
        ({"/repos/create": 403}, 2, "write access"),
        ({"/objects/batch": 402}, 1, "has no room for it (402"),
        ({"/preupload/": 413}, 1, "has no room for it (413"),
        ({"/commit/": 507}, 1, "has no room for it (507"),
        ({"/commit/": 418}, 1, "answers 418"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    refusals: dict[str, int], status: int, words: str, hub: HubServer, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refusals = refusals
    assert command.main([str(export), "--push", "ann/model"]) == status
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error


def test_wrong_tokens_names_and_networks_are_one_line(
    hub: HubServer, export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def push(name: str, *words: str) -> tuple[int, str]:
        status, error = command.main([str(export), "--push", name, *words]), capsys.readouterr().err
        assert error.count("\n") == 1, error
        return status, error

    assert push("ann/mo del")[0] == push("ann/")[0] == push("model")[0] == push("a/b/c")[0] == 2
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    status, error = push("ann/model")
    assert status == 2 and "hf auth login" in error
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.exists = True
    status, error = push("ann/model", "--private")
    assert status == 2 and "is public already" in error and hub.commits == 0
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        status, error = push("ann/model")
    assert status == 1 and f"{address} cannot be reached" in error and str(export) in error


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (".env", "A=1", "a secret by its name"),
        ("sub/id_ed25519", "x", "a secret by its name"),
        ("server.pem", "x", "a secret by its name"),
        ("token", "x", "a secret by its name"),
        (
            "tokenizer_config.json",
            '{\n"auth": "hf_' + "a" * 34 + '"}',
            "tokenizer_config.json:2 holds a Hugging Face token",
        ),
        ("modeling.py", "key = 'sk-proj-" + "a1" * 20 + "'", "holds an API key"),
        ("notes.txt", "-----BEGIN OPENSSH PRIVATE KEY-----", "holds a private key"),
        ("train.jsonl", "{}", "is data by its name"),
        ("logs/rank-000.jsonl.gz", "x", "is data by its name"),
        ("rows.json", '[{"prompt": "a"}]', "is a list of records"),
    ],
)
def test_secrets_and_data_stay(
    name: str, content: str, words: str, hub: HubServer, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (export / name).parent.mkdir(exist_ok=True)
    (export / name).write_text(content)
    for extra in ([], ["--dry-run"]):
        assert command.main([str(export), "--push", "ann/model", *extra]) == 2
        error = capsys.readouterr().err
        assert words in error and (len(content) < 9 or content not in error), error
    assert not hub.exists


def test_a_link_out_of_the_export_stays(export: Path, tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("mine")
    (export / "public.txt").symlink_to(tmp_path / "private.txt")
    with pytest.raises(UserError, match="is a link"):
        push_checks.files_to_send(export)


def test_words_that_do_not_go_together(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([str(export)], [str(export), "--dry-run"], [str(export), "--to", "mlx", "--push", "ann/model"]):
        assert command.main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1
