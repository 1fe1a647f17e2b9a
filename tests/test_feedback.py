"""Labels of completions: which may be given, what is written, what is kept and forgotten."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lib.config import load
from lib.config.serve_settings import ServeSettings
from lib.data.dataset import load_dataset
from lib.data.tokenizer import load_tokenizer_of, vocabulary
from lib.errors import UserError
from lib.serve import command
from lib.serve.backend_pool import Pool
from lib.serve.feedback import Feedback, Label, open_file, row_of
from lib.serve.gateway import Gateway
from lib.serve.openai_requests import JSON, BackendRequest, RequestError, read
from tests.tiny import ROOT

QUICKSTART = ROOT / "configs/quickstart/model"
MESSAGES = [{"role": "user", "content": "Add 1 and 2."}]


def request(kind: Any = "chat", **body: Any) -> BackendRequest:
    asked = {"messages": MESSAGES} if kind == "chat" else {"prompt": "Add 1 and 2."}
    return BackendRequest(kind, json.dumps(asked | body).encode(), False, False, "tiny")


def answer(id: str = "chatcmpl-1", content: str | None = "3", finish_reason: str = "stop", **message: Any) -> JSON:
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": content, **message},
    }
    return {"id": id, "object": "chat.completion", "choices": [choice], "usage": None}


class Clock:
    """Seconds that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(tmp_path: Path, kind: Any = "chat", **settings: Any) -> tuple[Feedback, Clock]:
    clock, path = Clock(), open_file(tmp_path / "feedback.jsonl")
    return Feedback(ServeSettings(feedback=str(path), **settings), path, kind, clock), clock


def label(own: Feedback, id: str, label: bool = True, owner: str = "alice") -> int:
    """The status of a label."""
    try:
        asyncio.run(own.take(owner, Label(id=id, label=label)))
    except RequestError as error:
        return error.status
    return 200


def rows(own: Feedback) -> list[JSON]:
    return [json.loads(line) for line in own.path.read_text().splitlines()]


def test_a_label_writes_one_row_that_its_owner_alone_may_give(tmp_path: Path) -> None:
    own, _ = kept(tmp_path)
    own.remember("alice", request(), answer())
    assert label(own, "chatcmpl-1", owner="bob") == 404 and label(own, "chatcmpl-2") == 404 and rows(own) == []
    assert label(own, "chatcmpl-1") == 200 and label(own, "chatcmpl-1") == 200, "the same label once more is fine"
    assert label(own, "chatcmpl-1", False) == 409
    [row] = rows(own)
    assert row.pop("time") > 1e9
    assert row == {
        "id": "chatcmpl-1",
        "model": "tiny",
        "finish_reason": "stop",
        "prompt": MESSAGES,
        "completion": "3",
        "label": True,
    }
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o600
    assert own.recent["chatcmpl-1"].row == b"", "its text is forgotten"


def test_what_training_would_see_in_other_tokens_cannot_be_labelled(tmp_path: Path) -> None:
    own, _ = kept(tmp_path)
    own.remember("alice", request(), answer("cut", finish_reason="length"))
    own.remember("alice", request(), answer("empty", content=None))
    text = {"id": "text", "choices": [{"finish_reason": "stop", "text": "3"}]}
    own.remember("alice", request("text"), text)
    assert [label(own, id) for id in ("cut", "empty", "text")] == [404] * 3
    own, _ = kept(tmp_path, "text")
    own.remember("alice", request("text"), text)
    assert label(own, "text", False) == 200 and rows(own)[-1]["prompt"] == "Add 1 and 2."


def test_calls_and_reasoning_are_a_message_as_templates_know_it() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = row_of(request(tools=tools), answer(content=None, tool_calls=calls, reasoning="hm"))
    assert row is not None and row["tools"] == tools
    assert row["completion"] == [{"role": "assistant", "tool_calls": calls, "reasoning_content": "hm"}]


def test_old_and_many_completions_are_forgotten(tmp_path: Path) -> None:
    own, clock = kept(tmp_path, feedback_seconds=10, feedback_bytes=20_000)
    own.remember("alice", request(), answer("old"))
    clock.now = 9.9
    assert label(own, "old", owner="bob") == 404 and "old" in own.recent
    clock.now = 10.1
    assert label(own, "old") == 404 and not own.recent and own.held_bytes.total() == 0
    for i in range(300):
        own.remember("alice", request(), answer(f"id-{i}", "x" * 100 * (i % 7)))
        assert own.held_bytes.total() == sum(one.bytes for one in own.recent.values()) <= 20_000
    assert list(own.recent)[-1] == "id-299" and 5 < len(own.recent) < 20
    own.remember("alice", request(), answer("too large", "x" * 30_000))
    assert not own.recent and not own.held and not own.held_bytes


def test_a_key_with_many_completions_has_its_own_forgotten(tmp_path: Path) -> None:
    own, _ = kept(tmp_path, feedback_bytes=20_000)
    own.remember("bob", request(), answer("bob's"))
    for i in range(300):
        own.remember("alice", request(), answer(f"id-{i}", "x" * 300))
    assert label(own, "bob's", owner="bob") == 200 and label(own, "id-299") == 200 and label(own, "id-0") == 404


def test_a_keys_labels_add_so_many_bytes_a_minute(tmp_path: Path) -> None:
    own, clock = kept(tmp_path, feedback_bytes_per_minute=3000)
    for i in range(3):
        own.remember("alice", request(), answer(str(i), "x" * 2000))
    own.remember("bob", request(), answer("bob's", "x" * 9000))
    assert label(own, "0") == 200
    with pytest.raises(RequestError, match="feedback_bytes_per_minute=3000") as error:
        asyncio.run(own.take("alice", Label(id="1", label=True)))
    assert (error.value.status, error.value.retry_seconds) == (429, 60)
    assert label(own, "0") == 200, "it is written already"
    assert label(own, "bob's", owner="bob") == 200, "one alone may be larger"
    clock.now = 60.5
    assert [label(own, "1"), label(own, "2")] == [200, 429] and len(rows(own)) == 3


def test_a_key_gives_so_many_labels_a_minute_and_no_other_key_waits_for_it(tmp_path: Path) -> None:
    own, clock = kept(tmp_path, feedback_per_minute=3)
    for owner in ("alice", "bob"):
        own.remember(owner, request(), answer(owner))
    assert [label(own, "unknown") for _ in range(3)] == [404] * 3, "guesses count"
    with pytest.raises(RequestError) as error:
        asyncio.run(own.take("alice", Label(id="alice", label=True)))
    assert (error.value.status, error.value.retry_seconds) == (429, 60)
    assert label(own, "bob", owner="bob") == 200
    clock.now = 60.0
    assert label(own, "alice") == 200


def test_labels_at_the_same_time_write_one_row_and_a_full_disk_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, _ = kept(tmp_path)
    own.remember("alice", request(), answer())

    async def both(first: bool, second: bool) -> list[Any]:
        own.writing = asyncio.Lock()
        labels = (Label(id="chatcmpl-1", label=value) for value in (first, second))
        return await asyncio.gather(*(own.take("alice", one) for one in labels), return_exceptions=True)

    write = os.write
    with monkeypatch.context() as patch:  # a few bytes, then none
        patch.setattr(os, "write", lambda descriptor, raw: write(descriptor, raw[:7]) if len(raw) > 20 else full())

        def full() -> int:
            raise OSError(28, "No space left on device")

        refused = asyncio.run(both(True, True))
    assert [error.status for error in refused] == [503, 503] and own.path.read_bytes() == b""
    first, second = asyncio.run(both(True, False))
    assert first is None and second.status == 409 and [row["label"] for row in rows(own)] == [True]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"id": "a", "label": "yes"}', "invalid_value"),
        (b'{"id": "a", "label": 1}', "invalid_value"),
        (b'{"id": "a", "label": null}', "invalid_value"),
        (b'{"id": "a"}', "missing_parameter"),
        (b'{"id": "", "label": true}', "invalid_value"),
        (b'{"id": "a", "label": true, "text": "b"}', "unknown_parameter"),
        (b'{"id": "' + b"a" * 201 + b'", "label": true}', "invalid_value"),
        (b"[]", "invalid_json"),
        (b'{"id": ', "invalid_json"),
        (b"\xff", "invalid_json"),
    ],
)
def test_what_is_no_label_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(RequestError) as error:
        read(Label, body)
    assert (error.value.status, error.value.code) == (400, code)


def test_a_file_that_cannot_take_rows_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"serve.feedback=.*cannot be written"):
        open_file(tmp_path / "no" / "file")
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"label": tr')
    with pytest.raises(UserError, match="its last line has no end"):
        open_file(torn)
    assert torn.read_text() == '{"label": tr'


def test_half_a_row_that_a_kill_left_goes_and_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody was told that it is kept; a whole row without its end is somebody's, and is not touched."""
    own, _ = kept(tmp_path)
    own.remember("alice", request(), answer(content="3" * 5000))
    own.remember("alice", request(), answer("chatcmpl-2"))
    assert label(own, "chatcmpl-1") == 200
    first = own.path.read_bytes()
    assert label(own, "chatcmpl-2") == 200
    both = own.path.read_bytes()
    for cut in (len(first) + 8, len(first) + 40, len(both) - 2):
        own.path.write_bytes(both[:cut])
        assert open_file(own.path).read_bytes() == first
        assert f"the last {cut - len(first):,} bytes were half a row" in capsys.readouterr().err
    own.path.write_bytes(both[:-1])
    with pytest.raises(UserError, match="its last line has no end"):
        open_file(own.path)
    assert own.path.read_bytes() == both[:-1]


def test_off_there_is_no_such_address_and_nothing_is_kept() -> None:
    async def read(*_: Any) -> Any:
        raise AssertionError

    gateway = Gateway(ServeSettings(), "tiny", read, Pool([], 0), httpx2.AsyncClient(), None, lambda *a, **b: None)
    assert "/v1/feedback" not in gateway.routes and gateway.feedback is None


def test_a_run_without_its_template_takes_labels_of_texts(tmp_path: Path) -> None:
    base: Any = {"model": {"path": str(QUICKSTART)}, "data": {"train": "none"}}
    assert command.labelled_kind(load.load(None, [], base), QUICKSTART) == "chat"
    assert command.labelled_kind(load.load(None, ["data.chat_template=false"], base), QUICKSTART) == "text"
    assert command.labelled_kind(load.load(None, [], base), tmp_path) == "text"
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert (
        command.labelled_kind(load.load(None, [f"data.chat_template={tmp_path}/own.jinja"], base), tmp_path) == "chat"
    )


def test_rows_train_as_they_are(tmp_path: Path) -> None:
    own, _ = kept(tmp_path)
    for i in range(4):
        prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{i} and 2"}]
        own.remember("alice", request(messages=prompt), answer(f"id-{i}", f"it is {i + 2}"))
        assert label(own, f"id-{i}", i % 2 == 0) == 200
    base: Any = {"model": {"path": str(QUICKSTART)}, "data": {"train": str(own.path)}}
    settings = load.load(None, [], base)
    tokenizer = load_tokenizer_of(settings.model)
    assert tokenizer is not None
    data = load_dataset(str(own.path), settings.data, "unpaired", tokenizer, **vocabulary(settings.model))
    assert data.labels is not None and data.labels.tolist() == [True, False, True, False] and len(data) == 4
    for i, row in enumerate(data):
        prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{i} and 2"}]
        served = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        assert row.prompt_ids.tolist() == list(served), "another prompt than the server's"
        assert tokenizer.decode(row.completions[0].tolist()).startswith(f"it is {i + 2}")
