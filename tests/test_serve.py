"""The server as its clients know it: a real process, the real openai client, wrong requests, clients that leave."""

import json
import queue
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from lib.config import load as settings
from lib.data.dataset import load_dataset
from lib.data.tokenizer import load_tokenizer_of, vocabulary
from lib.errors import UserError
from lib.plan.calibration import BatchCurve, HostCalibration, read_calibration, write_calibration
from lib.serve import api_keys, cli
from lib.serve.generation import AnswerText, Generation, Generator, Piece, ServedModel
from lib.serve.requests import ChatRequest, RequestError, TextRequest, parse
from tests import chat_models, exported
from tests.served import NEVER_ENDS, QUESTION, Served, finished_run, load, served
from tests.tiny import ROOT

GREEDY: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "temperature": 0}
LIMITS = ["serve.concurrency=4", "serve.max_requests_per_key=12"]
LIMITS += ["serve.max_prompt_tokens=1000", "serve.max_tokens=5000"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def key(run: Path) -> str:
    return api_keys.make("alice", run / "keys")


@pytest.fixture(scope="module")
def server(run: Path, key: str) -> Iterator[Served]:
    words = [f"serve.keys={run}/keys", f"serve.feedback={run}/feedback.jsonl", *LIMITS]
    with served("--run", run, *words) as running:
        yield running


@pytest.fixture
def client(server: Served, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0, timeout=60)


def ask(server: Served, path: str, body: bytes | None, key: str = "") -> tuple[int, bytes]:
    """The status and body of an answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(server.address + path, body, headers), timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    return answer.status, answer.read()


def send(server: Served, key: str, length: int, body: bytes) -> socket.socket:
    """A connection on which the head of a chat completion, and a part of its body, were sent."""
    host, _, port = server.address.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
    return connection


# ---- What clients want


def test_the_openai_client_gets_chat_completions_streams_and_models(client: openai.OpenAI) -> None:
    asked = GREEDY | {"max_tokens": 30}
    whole = client.chat.completions.create(**asked)
    assert whole.model == "tiny" and whole.usage.completion_tokens <= 30 and whole.usage.prompt_tokens == 14
    events = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert events[-1].usage.total_tokens == whole.usage.total_tokens
    pieces = [event.choices[0].delta.content or "" for event in events[:-1]]
    assert len(pieces) > 3 and "".join(pieces) == whole.choices[0].message.content
    assert all(event.choices and event.usage is None for event in client.chat.completions.create(**asked, stream=True))
    text = client.completions.create(model="tiny", prompt="Add 1", max_tokens=5, logit_bias=NEVER_ENDS)
    assert text.choices[0].finish_reason == "length" and text.choices[0].text and text.object == "text_completion"
    streamed = client.completions.create(model="tiny", prompt="Add 1", max_tokens=5, stream=True, temperature=0)
    assert "".join(event.choices[0].text for event in streamed)
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    for stream in (False, True):
        scored = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=stream)
        choices = [event.choices[0] for event in scored] if stream else scored.choices
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert entries and all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
        assert entries[0].top_logprobs[0].token == entries[0].token, "a greedy token is the likeliest one"


def test_it_is_the_runs_adapter_that_answers(client: openai.OpenAI, run: Path) -> None:
    from mlx_lm import generate
    from mlx_lm import load as load_model

    def answer(adapter: str | None) -> str:
        model, tokenizer = load_model(str(run.parent / "model"), adapter_path=adapter)
        prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
        return str(generate(model, tokenizer, prompt, max_tokens=12))

    asked = client.chat.completions.create(**GREEDY, max_tokens=12)
    assert asked.choices[0].message.content == answer(str(run)) != answer(None)


def test_a_seed_gives_the_same_answer_whatever_else_is_answered(client: openai.OpenAI, server: Any, key: str) -> None:
    asked = GREEDY | {"temperature": 1.5, "max_tokens": 20, "seed": 7}
    alone = client.chat.completions.create(**asked).choices[0].message.content
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(load, server.address, 3, 6, key=key)
        assert {client.chat.completions.create(**asked).choices[0].message.content for _ in range(3)} == {alone}
    assert len(beside.result()) == 6
    assert client.chat.completions.create(**asked | {"seed": 8}).choices[0].message.content != alone


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(client: openai.OpenAI) -> None:
    asked = GREEDY | {"max_tokens": 30}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stops = [whole[6:9], "never", "ever", "also", "these", "six"]
    cut = client.chat.completions.create(**asked, stop=stops).choices[0]
    assert cut.message.content == whole[: whole.index(stops[0])] and cut.finish_reason == "stop"
    events = client.chat.completions.create(**asked, stop=stops, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == cut.message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_labels_a_completion_and_the_row_trains(
    server: Served, client: openai.OpenAI, key: str, run: Path, stream: bool
) -> None:
    file = run / "feedback.jsonl"
    before = len(file.read_text().splitlines())
    if stream:
        events = list(client.chat.completions.create(**GREEDY, stream=True))
        id, text = events[0].id, "".join(event.choices[0].delta.content or "" for event in events)
    else:
        whole = client.chat.completions.create(**GREEDY)
        id, text = whole.id, str(whole.choices[0].message.content)

    def label(body: dict[str, Any], key: str) -> int:
        return ask(server, "/v1/feedback", json.dumps(body).encode(), key)[0]

    bob = api_keys.make(f"bob-{stream}".lower(), run / "keys")
    assert label({"id": id, "label": stream}, "wrong") == 401
    assert label({"id": id, "label": stream}, bob) == 404, "another key's completion"
    assert label({"id": "chatcmpl-none", "label": True}, key) == 404 and label({"id": id, "label": "yes"}, key) == 400
    assert label({"id": id, "label": stream}, key) == 200 == label({"id": id, "label": stream}, key)
    assert label({"id": id, "label": not stream}, key) == 409
    [row] = [json.loads(line) for line in file.read_text().splitlines()[before:]]
    assert (row["prompt"], row["completion"], row["label"]) == (QUESTION, text, stream)
    config = settings.load(ROOT / "configs/quickstart-kto.yaml", [f"data.train={file}"])
    model, data = config.model, config.data
    trained = load_dataset(str(file), data, "unpaired", load_tokenizer_of(model), vocabulary=vocabulary(model))
    assert len(trained) == before + 1
    plain = client.completions.create(model="tiny", prompt="Add 1", temperature=0)
    assert label({"id": plain.id, "label": True}, key) == 404, "training would put its prompt through the template"
    cut = client.chat.completions.create(**GREEDY, max_tokens=2, logit_bias=NEVER_ENDS)
    assert label({"id": cut.id, "label": True}, key) == 404, "an answer that was cut would teach to stop there"


def test_health_metrics_and_records(server: Served, key: str, client: openai.OpenAI) -> None:
    if (Path(sys.prefix) / "lib/openblas").exists():  # else MLX brings no reference BLAS here
        assert "/openblas/" in Path(f"/proc/{server.process.pid}/maps").read_text(), "it computes with the fast BLAS"
    assert ask(server, "/healthz", None)[0] == ask(server, "/readyz", None)[0] == 200
    assert ask(server, "/metrics", None)[0] == 401
    seven = {"max_tokens": 7, "logit_bias": NEVER_ENDS, "extra_headers": {"x-request-id": "mine-7"}}
    assert client.completions.create(model="tiny", prompt="Add 1", **seven)._request_id == "mine-7"
    text = ask(server, "/metrics", None, key)[1].decode()
    assert 'tandem_tokens_total{kind="completion"}' in text and "tandem_first_token_seconds_count" in text
    assert 'tandem_requests_total{path="/metrics",status="401"}' in text and "tandem_in_flight" in text
    server.wait(lambda: any(record["tokens"] == 7 for record in server.of("request")))
    line = json.dumps([record for record in server.of("request") if record["tokens"] == 7][-1])
    assert '"owner": "alice"' in line and '"id": "mine-7"' in line and key not in line and "Add" not in line


def test_keys_are_added_and_revoked_while_it_serves(server: Served, run: Path) -> None:
    carol = api_keys.make("carol", run / "keys")
    assert ask(server, "/v1/models", None, carol)[0] == 200
    lines = (run / "keys").read_text().splitlines(keepends=True)
    (run / "keys").write_text("".join(line for line in lines if not line.startswith("carol")))
    assert ask(server, "/v1/models", None, carol)[0] == 401


def test_requests_of_one_key_are_bounded(server: Served, key: str) -> None:
    done = load(server.address, 32, 32, key=key)
    refused = [outcome for outcome in done if outcome["error"]]
    assert len(done) == 32 and 0 < len(refused) <= 20
    assert all(outcome["status"] == 429 and int(outcome["retry_after"]) >= 1 for outcome in refused)


def test_a_client_that_leaves_ends_its_request(server: Served, key: str) -> None:
    for number, stream in enumerate((True, False), 1):
        body = {"messages": QUESTION, "max_tokens": 5000, "logit_bias": NEVER_ENDS, "stream": stream, "temperature": 0}
        text = json.dumps(body).encode()
        with send(server, key, len(text), text) as connection:
            if stream:
                assert connection.recv(1000)
            else:
                server.wait(lambda: b"tandem_in_flight 1.0" in ask(server, "/metrics", None, key)[1])
        server.wait(lambda number=number: len(server.of("request", outcome="cancelled")) == number)
        assert server.of("request", outcome="cancelled")[-1]["tokens"] < 5000
    server.wait(lambda: b"tandem_in_flight 0.0" in ask(server, "/metrics", None, key)[1])


# ---- What is wrong


def asking(content: Any, *more: dict[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, *more]}


WRONG: list[tuple[int, bytes | dict[str, Any], str]] = [
    (400, b"{", "not JSON"),
    (400, asking([{"type": "image_url", "image_url": {}}]), "messages.0.content"),
    (400, asking("a", {"role": "assistant", "content": "b"}), "'assistant'"),
    (404, {"model": "other"}, "'other' does not exist; this server has tiny"),
    (400, {"adapters": "/tmp"}, "adapters is not a parameter"),
    (400, {"logit_bias": {"99999": 1}}, "beyond the vocabulary of 283"),
    (400, {"temperature": "1"}, "temperature"),
    (400, {"max_tokens": 5001}, "at most 5000 are allowed"),
    (400, {"n": 2}, "n: input should be 1"),
    (400, asking("1 " * 3000), "at most 1000"),
    (413, asking("x" * 1_000_001), "the body has more than 1,000,000 bytes"),
]


def test_a_wrong_request_is_one_clear_line(server: Served, key: str) -> None:
    for expected, body, words in WRONG:
        if isinstance(body, dict):
            body = json.dumps({"messages": QUESTION, "max_tokens": 2, **body}).encode()
        status, answer = ask(server, "/v1/chat/completions", body, key)
        error = json.loads(answer)["error"]
        assert status == expected and words in error["message"] and "\n" not in error["message"], error
    status, answer = ask(server, "/v1/completions", json.dumps({"prompt": "1 " * 3000}).encode(), key)
    assert status == 400 and json.loads(answer)["error"]["param"] == "prompt"
    for given in ("", "wrong", f"{key}x"):
        status, answer = ask(server, "/v1/chat/completions", b"{not json", given)
        assert status == 401 and json.loads(answer)["error"]["code"] == "invalid_api_key"


def test_a_body_that_does_not_come_is_given_up(server: Served, key: str) -> None:
    with send(server, key, 50, b"{") as connection:
        assert b" 408 " in connection.recv(1000)


def test_what_clients_echo_of_an_answer_is_taken() -> None:
    echoed = {"role": "assistant", "content": "3", "annotations": [], "refusal": None, "tool_calls": None}
    asked = parse(ChatRequest, json.dumps({"messages": [*QUESTION, echoed, *QUESTION]}).encode())
    assert asked.messages[1].fields() == {"role": "assistant", "content": "3"}
    with pytest.raises(RequestError, match="annotations"):
        parse(ChatRequest, json.dumps({"messages": [echoed | {"annotations": [1]}]}).encode())


# ---- Prompts are rendered as training rows are


def served_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> ServedModel:
    tokenizer = chat_models.tokenizer_of(name)
    shape = exported.SHAPE | {"vocab_size": 1500, "eos_token_id": tokenizer.eos_token_id}
    monkeypatch.setattr(exported, "SHAPE", shape)
    base = exported.base_model(tmp_path / "base", "llama")
    tokenizer.save_pretrained(base)
    loaded = settings.load(None, [], base={"model": {"path": str(base)}, "data": {"train": "none"}})
    return ServedModel(loaded.model, loaded.data, base, None, fuse=False)


TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


def test_an_instruction_is_rendered_or_refused_by_name(tmp_path, monkeypatch) -> None:
    """Qwen 2.5's template drops `developer`, Gemma 2's refuses `system` and drops tools: status 200 without either."""

    def text(model: ServedModel, body: dict[str, Any]) -> str:
        return str(model.tokenizer.decode(model.prompt_ids(parse(ChatRequest, json.dumps(body).encode()))))

    qwen = served_model(tmp_path / "qwen", monkeypatch, "Qwen-Qwen2.5-7B-Instruct")
    gemma = served_model(tmp_path / "gemma", monkeypatch, "google-gemma-2-2b-it")
    for model, role in ((qwen, "developer"), (gemma, "system"), (qwen, "system")):
        assert "Be brief" in text(model, {"messages": [{"role": role, "content": "Be brief."}, *QUESTION]})
    assert "search" in text(qwen, {"messages": QUESTION, "tools": [TOOL]})
    with pytest.raises(UserError, match="tools"):
        text(gemma, {"messages": [{"role": "user", "content": "search for it"}], "tools": [TOOL]})
    qwen.encoder.tokens.__dict__["opening"] = qwen.tokenizer.encode("<|im_start|>")  # BOS stands there once
    for prompt in ("Hi", "<|im_start|>Hi"):
        ids = qwen.prompt_ids(parse(TextRequest, json.dumps({"prompt": prompt}).encode()))
        assert qwen.tokenizer.decode(ids) == "<|im_start|>Hi"


def test_an_answer_without_text_ends_alone(tmp_path, monkeypatch) -> None:
    """mlx-lm's detokenizer raises for a padded vocabulary's id; the other requests are answered."""
    model = served_model(tmp_path, monkeypatch, "Qwen-Qwen2.5-7B-Instruct")
    assert model.tokenizer.convert_tokens_to_ids("<|im_end|>") in model.load()[2], "the end of turn of training"
    generator = Generator(model.load, 4)
    make_piece = AnswerText.piece_of

    def piece_of(answer: AnswerText, response: Any) -> Piece:
        return make_piece(answer, response) if answer.generation.owner == "whole" else 1 / 0  # type: ignore[return-value]

    monkeypatch.setattr(AnswerText, "piece_of", piece_of)
    generator.start()
    answers: dict[str, queue.Queue[Piece]] = {owner: queue.Queue() for owner in ("broken", "whole")}
    for owner, pieces in answers.items():
        generator.submit(Generation(owner, [5, 6, 7], 4, TextRequest(prompt="x"), pieces.put))
    try:
        assert answers["broken"].get(timeout=60).finish_reason == "error"
        while (reason := answers["whole"].get(timeout=60).finish_reason) is None:
            pass
        assert reason in ("length", "stop") and generator.failure is None
    finally:
        generator.close()


def test_tool_calls_and_reasoning_are_told_apart_from_text() -> None:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    texts = ["<think>", "hm", "</think>", "Let me ", "<tool_call>", '{"name": "search", ', '"arguments": {"q": 1}}']
    texts += ["</tool_call>", ""]
    marks = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}
    qwen, parser = chat_models.tokenizer_of("Qwen-Qwen3-0.6B"), lambda text, tools: json.loads(text)
    tokenizer = TokenizerWrapper(qwen, tool_parser=parser, **marks)
    whole = Piece()
    answer = AnswerText(Generation("a", [1, 2], 20, TextRequest(prompt="x"), lambda piece: None), tokenizer)
    for text in texts:
        answer.detokenizer = SimpleNamespace(last_segment=text, add_token=lambda _: None, finalize=lambda: None)
        reason = None if text else "stop"
        whole.add(answer.piece_of(SimpleNamespace(token=0, finish_reason=reason, logprobs=None)))
    assert (whole.reasoning, whole.text, whole.finish_reason) == ("hm", "Let me ", "tool_calls")
    assert [call["function"] for call in whole.tool_calls] == [{"name": "search", "arguments": '{"q": 1}'}]


# ---- The command


def test_a_drain_finishes_what_is_under_way(run: Path) -> None:
    with served("--run", run, *LIMITS) as running, ThreadPoolExecutor() as pool:
        loading = pool.submit(load, running.address, 4, 4, max_tokens=600)
        running.wait(lambda: b"tandem_in_flight 4.0" in ask(running, "/metrics", None)[1])
        assert running.stop(signal.SIGTERM) == 0 and running.of("end")
        assert all(outcome["error"] is None for outcome in loading.result()), loading.result()


CLOSE = """
import mlx_lm
from lib.serve.generation import Generator
generator = Generator(lambda: (*mlx_lm.load("configs/quickstart/model"), [2]), 4)
generator.start()
generator.is_ready.wait()
generator.close()
"""


def test_a_process_that_ends_right_after_its_generator_is_not_aborted() -> None:
    assert subprocess.run([sys.executable, "-c", CLOSE], cwd=ROOT).returncode == 0


def test_nginx_gets_the_speed_of_each_host(tmp_path) -> None:
    machine = read_calibration(ROOT / "calibration/published/m4-max.json").machine
    for host, speed in (("mac-a", 90.0), ("mac-b", 30.0)):
        stored = HostCalibration(machine=machine, curves=(BatchCurve.from_rates({1: speed / 2, 4: speed}),))
        write_calibration(tmp_path / f"{host}.json", stored)
    text = cli.nginx_file(["mac-a:8080", "mac-b:8080", "mac-c:8080"], tmp_path)
    assert "least_conn;" in text and "server mac-a:8080 weight=30;" in text
    assert "server mac-b:8080 weight=10;" in text and "server mac-c:8080 weight=10;" in text


def test_a_wrong_line_among_the_keys_is_named(tmp_path) -> None:
    path = tmp_path / "keys"
    first = api_keys.make("alice", path)
    assert api_keys.KeyFile(path).owner(first) == "alice" and first not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(UserError, match="has a key of that name"):
        api_keys.make("alice", path)
    path.write_text(path.read_text() + "sk-secret\n")
    with pytest.raises(UserError, match="keys:2: not of the form") as error:
        api_keys.read(path)
    assert "sk-secret" not in str(error.value)
