"""The server as its clients and its enemies know it: real backends, the real openai client, raw sockets."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from lib.serve import api_keys, command
from lib.serve.backend_process import _digest_of_fused
from tests import tiny
from tests.cluster import Host
from tests.forked import free_port
from tests.served import NEVER_ENDS, QUESTION, Served, certificate, command_of, finished_run, load, outcomes, served
from tests.tiny import ROOT

if TYPE_CHECKING:
    import openai  # imported by those who use it: it takes seconds, and all of pytest's workers read this file

LIMITS = ["serve.concurrency=4", "serve.max_queue=8", "serve.read_seconds=3", "serve.max_body_bytes=20000"]
LIMITS += ["serve.max_prompt_tokens=1000", "serve.max_tokens=5000", "serve.drain_seconds=0.5"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def key(run: Path) -> str:
    return api_keys.make("alice", run / "keys")


@pytest.fixture(scope="module")
def gateway(run: Path, key: str) -> Iterator[Served]:
    """Two backends on this machine, under two of its names."""
    (run / "hostfile").write_text("localhost:1\n127.0.0.1:1\n")
    with served(
        "--run",
        run,
        f"serve.keys={run}/keys",
        f"serve.hostfile={run}/hostfile",
        *LIMITS,
        f"serve.feedback={run}/feedback.jsonl",
    ) as one:
        yield one.until_up(2)


@pytest.fixture
def client(gateway: Served, key: str) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{gateway.address}/v1", api_key=key, max_retries=0, timeout=60)


def metric(gateway: Served, key: str, name: str) -> float:
    """A metric's value, summed over its labels."""
    request = urllib.request.Request(f"{gateway.address}/metrics", headers={"Authorization": f"Bearer {key}"})
    text = urllib.request.urlopen(request, timeout=60).read().decode()
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def post(gateway: Served, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, Any], Any]:
    """The status, headers and JSON of an answer to raw bytes."""
    url = f"{gateway.address}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    return answer.status, dict(answer.headers), json.loads(answer.read())


def connect(gateway: Served) -> socket.socket:
    host, _, port = gateway.address.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer_of(run: Path, with_adapter: bool = True) -> str:
    """Twelve tokens by mlx-lm itself, in this process."""
    from mlx_lm import generate
    from mlx_lm import load as load_model

    model, tokenizer = load_model(str(run.parent / "model"), adapter_path=str(run) if with_adapter else None)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    return str(generate(model, tokenizer, prompt, max_tokens=12))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_labels_a_completion_and_the_row_trains(
    gateway: Served, client: openai.OpenAI, key: str, run: Path, stream: bool
) -> None:
    file = run / "feedback.jsonl"
    before = file.read_text().splitlines()
    asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "temperature": 0}
    if stream:
        events = list(client.chat.completions.create(**asked, stream=True))
        id, text = events[0].id, "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    else:
        whole = client.chat.completions.create(**asked)
        id, text = whole.id, str(whole.choices[0].message.content)

    def send(body: dict[str, Any], key: str) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx2.post(f"{gateway.address}/v1/feedback", json=body, headers=headers, timeout=60)

    assert send({"id": id, "label": stream}, "wrong").status_code == 401
    assert send({"id": "chatcmpl-none", "label": True}, key).status_code == 404
    assert send({"id": id, "label": "yes"}, key).status_code == 400
    assert send({"id": id, "label": stream, "text": "x" * 5000}, key).status_code == 413
    answer = send({"id": id, "label": stream}, key)
    assert answer.status_code == 200 and answer.json() == {"object": "feedback", "id": id, "label": stream}
    [line] = file.read_text().splitlines()[len(before) :]
    row = json.loads(line)
    assert (row["prompt"], row["completion"], row["label"]) == (QUESTION, text, stream)
    gateway.wait(lambda: gateway.of("request", path="/v1/feedback", status=200, label=stream), 20)
    assert text not in str(gateway.records)
    assert metric(gateway, key, "tandem_labels_total") >= 1


# ---- What clients want -------------------------------------------------------------------------------------------------


def test_the_openai_client_gets_chat_completions_streams_and_models(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.model == "tiny" and whole.usage.completion_tokens <= 30 and whole.usage.prompt_tokens == 14
    events = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert {event.model for event in events} == {"tiny"} and events[-1].usage.total_tokens == whole.usage.total_tokens
    pieces = [event.choices[0].delta.content or "" for event in events[:-1]]
    assert len(pieces) > 3 and "".join(pieces) == whole.choices[0].message.content
    plain = list(client.chat.completions.create(**asked, stream=True))
    assert all(event.choices and event.usage is None for event in plain)
    text = client.completions.create(model="tiny", prompt="Add 1", max_tokens=5, logit_bias=NEVER_ENDS)
    assert text.choices[0].finish_reason == "length" and text.choices[0].text and text.object == "text_completion"
    streamed = client.completions.create(model="tiny", prompt="Add 1", max_tokens=5, stream=True, temperature=0)
    assert "".join(event.choices[0].text for event in streamed)
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    scored = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert len(scored.choices[0].logprobs.content) == scored.usage.completion_tokens


def test_it_is_the_runs_adapter_that_answers(client: openai.OpenAI, run: Path) -> None:
    asked = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=12, temperature=0, seed=1)
    assert asked.choices[0].message.content == answer_of(run) != answer_of(run, with_adapter=False)


def test_a_request_keeps_its_id_and_leaves_a_record(gateway: Served, key: str) -> None:
    for given, is_kept in (("trace-1.a_B", True), ("x" * 65, False), ('"}\x7f', False)):
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": given}
        body = json.dumps({"messages": QUESTION, "max_tokens": 2, "logit_bias": NEVER_ENDS}).encode()
        status, told, _ = post(gateway, body, headers)
        assert status == 200 and (told["x-request-id"] == given) == is_kept
        gateway.wait(lambda told=told: gateway.of("request", request_id=told["x-request-id"]))
        [record] = gateway.of("request", request_id=told["x-request-id"])
        assert record["key"] == "alice" and record["completion_tokens"] == 2 and record["status"] == 200
        line = json.dumps(record)
        assert not any(text in line for text in (key, "Add", "797 and", "and 370"))  # 797 alone may be part of an id


def test_health_readiness_and_metrics(gateway: Served, key: str, client: openai.OpenAI) -> None:
    for path in ("/healthz", "/readyz"):
        assert urllib.request.urlopen(gateway.address + path, timeout=60).status == 200
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{gateway.address}/metrics", timeout=60)
    counts = []
    for _ in range(2):  # a key has a count from its first answer on
        client.completions.create(model="tiny", prompt="Add 1", max_tokens=7, logit_bias=NEVER_ENDS)
        counts.append(metric(gateway, key, "tandem_tokens_total"))
    assert counts[1] == counts[0] + 7 + 3
    assert metric(gateway, key, "tandem_backend_up") == 2


def test_what_waits_is_bounded(gateway: Served, key: str) -> None:
    done = outcomes(load(gateway.address, "--key", key, "--streams=32", "--requests=32", "--max-tokens=40"))
    refused = [one for one in done if one["error"]]
    assert len(done) == 32 and 0 < len(refused) <= 32 - 2 * 4 - 8
    assert all(one["status"] == 429 and int(one["retry_after"]) >= 1 for one in refused)


# ---- What enemies try --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", "Basic {}", "Bearer {}x", "bearer\t{}", "Bearer é"]
)
def test_no_key_no_answer(gateway: Served, key: str, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.format(key)}
    before = metric(gateway, key, "tandem_queue_seconds_count")
    status, told, answer = post(gateway, b"{not json", headers)  # judged before the body
    assert status == 401 and answer["error"]["code"] == "invalid_api_key" and told["www-authenticate"] == "Bearer"
    assert metric(gateway, key, "tandem_queue_seconds_count") == before


HOSTILE: list[tuple[int, bytes | dict[str, Any]]] = [
    (400, b""),
    (400, b"{"),
    (400, b"[]"),
    (400, b"null"),
    (400, b'"x"'),
    (400, b"\xff\xfe"),
    (400, b"[" * 5000),
    (400, b'{"a":' * 3000),
    (400, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    (400, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'),
    (400, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}'),
    (400, {}),
    (400, {"messages": []}),
    (400, {"messages": "x"}),
    (400, {"messages": [{"role": "nobody", "content": "x"}]}),
    (400, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/"}}]}]}),
    (400, {"messages": [{"role": "user", "content": 5}]}),
    (404, {"model": "other"}),
    (404, {"model": "/etc/passwd"}),
    (404, {"model": "x" * 15_000}),
    (400, {"x" * 15_000: 1}),
    (404, {"model": "default_model"}),
    (400, {"model": 5}),
    (400, {"adapters": "/tmp"}),
    (400, {"draft_model": "x"}),
    (400, {"num_draft_tokens": 3}),
    (400, {"role_mapping": {}}),
    (400, {"chat_template_kwargs": {"chat_template": "{% for i in range(9) %}{% endfor %}"}}),
    (400, {"stop": 5}),  # this and some of what follows ends the thread of a bare mlx_lm.server that generates
    (400, {"stop": [5]}),
    (400, {"stop": ""}),
    (400, {"stop": ["a"] * 5}),
    (400, {"top_k": 283, "temperature": 1}),
    (400, {"top_k": -1}),
    (400, {"xtc_probability": 0.5, "xtc_threshold": 0.9}),
    (400, {"logit_bias": {"283": 1}}),
    (400, {"logit_bias": {"-1": 1}}),
    (400, {"logit_bias": {"99999999999999999999": 1}}),
    (400, {"logit_bias": [1]}),
    (400, {"top_logprobs": 99, "logprobs": True}),
    (400, {"temperature": "1"}),
    (400, {"temperature": -1}),
    (400, {"max_tokens": 0}),
    (400, {"max_tokens": 5001}),
    (400, {"max_completion_tokens": 10**30}),
    (400, {"max_tokens": True}),
    (400, {"n": 2}),
    (400, {"seed": -1}),
    (400, {"seed": 1, "temperature": 1}),
    (400, {"top_logprobs": 2}),
    (400, {"seed": 2**64}),
    (400, {"stream": "yes"}),
    (400, {"stream": True, "logprobs": True}),
    (400, {"tools": [{"type": "function", "function": {"name": 5}}]}),
    (400, {"response_format": {"type": "json_object"}}),
    (400, {"messages": [{"role": "user", "content": "1 " * 3000}]}),
    (413, {"messages": [{"role": "user", "content": "x" * 30_000}]}),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_what_is_wrong_never_reaches_a_backend(gateway: Served, key: str, number: int) -> None:
    expected, body = HOSTILE[number]
    if isinstance(body, dict):
        body = json.dumps({"messages": QUESTION, "max_tokens": 2, **body} if body else body).encode()
    before = metric(gateway, key, "tandem_queue_seconds_count")
    status, _, answer = post(gateway, body, {"Authorization": f"Bearer {key}"})
    assert (status, metric(gateway, key, "tandem_queue_seconds_count")) == (expected, before), answer
    assert 0 < len(answer["error"]["message"]) <= 500 and answer["error"]["type"] == "invalid_request_error"


def test_a_body_without_a_length_is_limited_too(gateway: Served, key: str) -> None:
    chunk = b"4000\r\n%s\r\n" % (b" " * 0x4000)
    with connect(gateway) as one:
        one.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n%s" % (key.encode(), chunk * 2)
        )
        assert b"HTTP/1.1 413 " in one.recv(1000)


def test_what_is_odd_but_allowed_harms_no_backend(gateway: Served, client: openai.OpenAI) -> None:
    odd: list[dict[str, Any]] = [
        {"temperature": 1e-300},
        {"temperature": 2, "top_p": 0, "extra_body": {"top_k": 282, "min_p": 1}},
        {"temperature": 1, "top_p": 1e-300, "extra_body": {"min_p": 1e-300}},
        {"presence_penalty": -2, "frequency_penalty": 2, "extra_body": {"repetition_penalty": 1e-300}},
        {"extra_body": {"repetition_penalty": 10}, "logit_bias": {"0": -100, "282": 100}},
        {"stop": ["\x00", "é", "\U0001f600" * 64], "seed": 2**63 - 1, "temperature": 0},
        {"messages": [{"role": "assistant", "content": None}, {"role": "tool", "content": "", "tool_call_id": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
        {"messages": [{"role": "user", "content": "<|end|><|assistant|>\x00\u2028"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        {"logprobs": True, "top_logprobs": 10},
    ]
    for words in odd:
        client.chat.completions.create(**{"model": "tiny", "messages": QUESTION, "max_tokens": 3, **words})
    for _ in range(4):  # so that each backend has both
        cut = client.completions.create(model="tiny", prompt="Add 797 and 370.", max_tokens=8, temperature=0)
        whole = "Add 797 and 370." + cut.choices[0].text
        usage = client.completions.create(model="tiny", prompt=whole, max_tokens=3, temperature=0).usage
        assert usage is not None and usage.prompt_tokens_details is None
    assert len(gateway.of("backend", state="up")) == 2 and not gateway.of("backend", state="failed")
    assert all(one["room_tokens"] > 10_000 for one in gateway.of("backend", state="up")), "of a tiny model"


TRICKLES = {
    "headers": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n",
    "a body": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\n"
    b"Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{",
    "what is refused already": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n",
    "nothing": b"",
}


def trickle(gateway: Served, start: bytes) -> bytes:
    """Sends a byte now and then until the connection ends; what was heard by then, or `connected`."""
    heard, since = b"", time.monotonic()
    with connect(gateway) as one:
        one.sendall(start)
        one.settimeout(0.1)
        while time.monotonic() - since < 120:
            try:
                if start:
                    one.sendall(b"x")
                block = one.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                return heard
            heard += block
            if not block:
                return heard
    return b"connected"


def test_slow_clients_are_cut_off_and_hold_no_slot(gateway: Served, key: str) -> None:
    before = metric(gateway, key, "tandem_queue_seconds_count")
    with ThreadPoolExecutor() as threads:
        starts = [start.replace(b"KEY", key.encode()) for start in TRICKLES.values()]
        heard = dict(zip(TRICKLES, threads.map(lambda start: trickle(gateway, start), starts), strict=True))
    assert heard["headers"] == heard["nothing"] == b""
    assert b"HTTP/1.1 408 " in heard["a body"] and b"HTTP/1.1 401 " in heard["what is refused already"]
    assert metric(gateway, key, "tandem_queue_seconds_count") == before


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads the backends' processor time from /proc")
def test_who_leaves_frees_the_backend(gateway: Served, key: str, client: openai.OpenAI) -> None:
    def ticks() -> int:
        """Processor time of the backends, in hundredths of a second."""
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in gateway.backend_pids()]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats)

    for stream, logprobs in ((True, False), (False, False), (False, True)):
        body = {"messages": QUESTION, "max_tokens": 5000, "logit_bias": NEVER_ENDS, "stream": stream}
        body["logprobs"] = logprobs
        text = json.dumps(body).encode()
        with connect(gateway) as one:
            one.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (key.encode(), len(text), text)
            )
            gateway.wait(lambda: metric(gateway, key, "tandem_backend_in_flight") == 1)
            if stream:
                one.recv(1000)
        gateway.wait(lambda: metric(gateway, key, "tandem_backend_in_flight") == 0, 5)
        gateway.wait(lambda: _is_idle(ticks), 10)
    assert all("gone" in record for record in gateway.of("request", status=499))


def _is_idle(ticks: Any) -> bool:
    before = ticks()
    time.sleep(0.5)
    return bool(ticks() - before < 10)  # generating takes 50 in that time


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads a process's open files from /proc")
def test_a_backend_answers_nobody_but_its_gateway(gateway: Served) -> None:
    """Its socket is in a folder of its user alone, it has no port, and its command line leads nobody there."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    for pid in gateway.backend_pids():
        opened = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
        [path] = [Path(line.split()[7]) for line in lines if f"socket:[{line.split()[6]}]" in opened and "/" in line]
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700 and path.parent.stat().st_uid == os.getuid()
        assert str(path.parent) not in " ".join(command_of(pid))
        listening = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        assert not [fields for fields in listening if fields[3] == "0A" and f"socket:[{fields[9]}]" in opened]
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path))) as stranger:
            for method, address in (("GET", "/health"), ("GET", "/v1/models"), ("DELETE", "/requests/x")):
                assert stranger.request(method, f"http://backend{address}").status_code == 403


def test_no_web_page_may_call(gateway: Served, key: str) -> None:
    request = urllib.request.Request(
        f"{gateway.address}/v1/models", headers={"Authorization": f"Bearer {key}", "Origin": "http://evil.example"}
    )
    assert not [
        name for name in urllib.request.urlopen(request, timeout=60).headers if "access-control" in name.lower()
    ]
    status, _, _ = post(gateway, b"{}", {"Authorization": f"Bearer {key}", "Content-Type": "text/plain"})
    assert status == 415  # what a page may send without asking first


# ---- What breaks -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_killed_backend_costs_no_more_than_what_it_was_saying(gateway: Served, key: str) -> None:
    driving = load(gateway.address, "--key", key, "--streams=8", "--requests=40", "--max-tokens=80", "--whole-every=2")
    seen = len(gateway.records)
    gateway.wait(lambda: len(gateway.records) > seen + 12)
    victim = gateway.backend_pids()[0]
    os.kill(victim, signal.SIGKILL)
    done = outcomes(driving)
    failed = [one for one in done if one["error"]]
    assert len(done) == 40 and len(failed) <= 4  # the slots of one backend
    assert all(one["stream"] and "backend" in one["error"] for one in failed), failed  # whole answers were asked again
    gateway.wait(lambda: len(gateway.of("backend", state="up")) >= 3)
    assert metric(gateway, key, "tandem_backend_up") == 2 and metric(gateway, key, "tandem_backend_restarts") == 1
    assert victim not in gateway.backend_pids()


@contextlib.contextmanager
def door(port: int, target: int) -> Iterator[None]:
    """A port that hands its connections on to another one, and is closed, with all of them, at the end."""
    ends: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", port))

    def pass_on(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := one.recv(65536):
                other.sendall(piece)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                one = listener.accept()[0]
                try:
                    pair = one, socket.create_connection(("127.0.0.1", target), 20)
                except OSError:  # nobody is there (yet)
                    one.close()
                    continue
                ends.extend(pair)
                for each in (pair, pair[::-1]):
                    threading.Thread(target=pass_on, args=each, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        for one in (listener, *ends):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.mark.long
def test_a_server_that_runs_already_is_taken_out_and_back(run: Path) -> None:
    """Twice: first it cannot be reached any more, then it is killed."""
    import openai

    ports = free_port(), free_port()
    where = ["--model", str(run.parent / "model"), "--adapter-path", str(run), "--port", str(ports[1])]
    words = [sys.executable, "-m", "mlx_lm", "server", *where, "--log-level", "ERROR"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with served("--run", run, f"serve.backends=[http://127.0.0.1:{ports[0]}]", "serve.queue_seconds=0.5") as one:
        client = openai.OpenAI(base_url=f"{one.address}/v1", api_key="none", max_retries=0)
        with subprocess.Popen(words, **quiet) as plain:
            for times_up in (1, 2):
                with pytest.raises(openai.InternalServerError, match="no backend was free") as refused:
                    client.completions.create(model="tiny", prompt="1", max_tokens=1)
                assert int(refused.value.response.headers["retry-after"]) >= 1
                with door(*ports):
                    one.until_up(times_up)
                    answer = client.chat.completions.create(
                        model="tiny", messages=QUESTION, max_tokens=12, temperature=0
                    )
                    assert answer.choices[0].message.content == answer_of(run) and answer.model == "tiny"
                    if times_up == 2:
                        plain.kill()
                        one.wait(lambda: len(one.of("backend", state="down")) == 2)
                one.wait(lambda times_up=times_up: len(one.of("backend", state="down")) == times_up)
                with pytest.raises(urllib.error.HTTPError, match="503"):
                    urllib.request.urlopen(f"{one.address}/readyz", timeout=60)


def test_keys_are_read_again_on_request(gateway: Served, run: Path, client: openai.OpenAI) -> None:
    bob = api_keys.make("bob", run / "keys")
    for text, count in (((run / "keys").read_text(), 2), ("rubbish\n", None)):
        (run / "keys").write_text(text)
        seen = len(gateway.of("keys"))
        gateway.process.send_signal(signal.SIGHUP)
        gateway.wait(lambda seen=seen: len(gateway.of("keys")) > seen)
        assert gateway.of("keys")[-1].get("count") == count
        client.with_options(api_key=bob).models.list()


@pytest.mark.long
def test_a_drain_loses_no_request(run: Path) -> None:
    with served("--run", run, "serve.concurrency=4", "serve.drain_seconds=0.5") as one:
        one.until_up(1)
        driving = load(one.address, "--streams=16", "--requests=100000", "--max-tokens=40", "--until-refused")
        one.wait(lambda: len(one.of("request")) > 20)
        pids = one.backend_pids()
        assert one.stop() == 0
        done = outcomes(driving)
        answered = [entry for entry in done if entry["error"] is None]
        late = [entry for entry in done if entry["error"] is not None]
        # Whoever came too late was told so, or found the door closed: nothing was taken and dropped.
        told = [entry for entry in late if entry.get("status") == 503 and entry["retry_after"]]
        closed = [entry for entry in late if "ConnectError" in entry["error"]]
        assert len(answered) > 20
        assert [entry for entry in late if entry not in told + closed] == []
        assert not any(map(command_of, pids))


def test_nothing_survives_a_killed_gateway(run: Path, tmp_path: Path) -> None:
    """And on the way there: TLS, a model without a run, and an adapter that was fused into one."""
    import openai

    trusted, words = certificate(tmp_path)
    with served("--run", run, "serve.fuse=true", "serve.name=fused", *words) as one:
        one.until_up(1)
        port = one.address.rpartition(":")[2]
        http = httpx2.Client(verify=trusted)
        client = openai.OpenAI(base_url=f"https://localhost:{port}/v1", api_key="none", http_client=http)
        told = client.chat.completions.create(model="fused", messages=QUESTION, max_tokens=12, temperature=0)
        assert told.choices[0].message.content == answer_of(run) and list(run.glob("fused-*/model.safetensors"))
        pids = one.backend_pids()
        one.stop(signal.SIGKILL)
        deadline = time.monotonic() + 120
        while any(map(command_of, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_what_was_fused_is_of_one_model_one_adapter_and_its_settings(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(ROOT / "configs/quickstart/model", other)
    adapter = tmp_path / "run"
    shutil.copytree(run, adapter)
    digests = [_digest_of_fused(ROOT / "configs/quickstart/model", adapter), _digest_of_fused(other, adapter)]
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["lora_parameters"]["scale"] *= 2
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    digests.append(_digest_of_fused(other, adapter))
    assert len(set(digests)) == 3


def test_a_quantised_model_is_not_fused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was trained may be less than four bits can say."""
    stored = tiny.stored_model(tmp_path, quantised=True)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"model: {{path: {stored}}}\ndata: {{train: none}}\n")
    (run / "adapters.safetensors").touch()
    assert command.main(["--run", str(run), "serve.fuse=true"]) == 2
    assert "is quantised, and merged weights rounded" in capsys.readouterr().err


@pytest.mark.long
def test_hosts_serve_together_and_open_no_port(run: Path, three_hosts: list[Host]) -> None:
    here, there = three_hosts[:2]
    (run / "hosts").write_text(f"{here.name}:1\n{there.name}:1\n")
    with served("--run", run, f"serve.hostfile={run}/hosts", on=here) as one:
        one.until_up(2, 120)
        done = outcomes(load(one.address, "--streams=8", "--requests=24", "--max-tokens=20", on=here))
        assert [entry["error"] for entry in done] == [None] * 24
        assert {record["backend"] for record in one.of("request")} == {here.name, there.name}
        assert [words for words in there.processes().values() if "lib.serve.backend_process" in words]
        lines = there.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
        listening = {fields[1].rpartition(":")[2] for line in lines if (fields := line.split())[3] == "0A"}
        assert listening <= {f"{22:04X}"}, "something but sshd listens"
        [pid] = [pid for pid, words in here.processes().items() if " -m lib.server" in words]
        here.signal(pid, signal.SIGKILL)
        one.process.wait(120)
        deadline = time.monotonic() + 120
        while any(
            "lib.serve.backend_process" in words for host in (here, there) for words in host.processes().values()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_folders_name_is_shown_and_not_obeyed(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "a\x1b]0;x\x07", ignore=shutil.ignore_patterns("fused-*", "checkpoints"))
    with served("--run", tmp_path / "a\x1b]0;x\x07", "serve.backends=[http://127.0.0.1:1]") as one:
        assert one.stop() == 0 and one.process.stderr is not None
        said = one.process.stderr.read()
    assert "a␛]0;x␇ at http://127.0.0.1:" in said and "\x1b" not in said


ENDED_AT_ITS_START = """
import os, signal, sys
from lib.serve import command
def log(kind, said=command.log, **fields):
    said(kind, **fields)
    if kind == "start":
        os.kill(os.getpid(), signal.SIGTERM)
command.log = log
sys.exit(command.main(sys.argv[1:]))
"""


def test_a_gateway_that_is_ended_as_soon_as_it_says_that_it_serves_ends_well(run: Path) -> None:
    words = ["--run", str(run), "serve.port=0", "serve.backends=[http://127.0.0.1:1]"]
    ended = subprocess.run(
        [sys.executable, "-c", ENDED_AT_ITS_START, *words], cwd=ROOT, capture_output=True, timeout=60
    )
    assert ended.returncode == 0 and json.loads(ended.stdout.splitlines()[-1])["kind"] == "end"


# ---- What is refused before it starts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve.host=0.0.0.0"], "no keys"),
        (["serve.host=::"], "no keys"),
        (["serve.keys=missing"], "--make-key"),
        (["serve.keys=/dev/null"], "is a device"),
        (["serve.prot=1"], "did you mean serve.port"),
        (["serve.port=99999"], "serve.port"),
        (["serve.host=192.0.2.1"], "serve.host=192.0.2.1"),
        (["serve.tls_key=x"], "belong together"),
        (["serve.hostfile=missing"], "missing"),
        (["serve.backends=[http://a:1]", "serve.hostfile=x"], "give one of them"),
        (["serve.backends=[ftp://a]"], "serve.backends"),
        (["serve.tls_key=missing", "serve.tls_certificate=missing"], "serve.tls_certificate=missing"),
        (["model.random_init=true"], "random_init"),
        (["--model", "x"], "either --run RUN or --model PATH"),
        (["serve.port=0"], "either --run RUN or --model PATH"),
    ],
)
def test_a_mistake_is_one_line(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    what = [] if words == ["serve.port=0"] else ["--run", str(run)]
    assert command.main([*what, "serve.port=0", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.long
def test_a_backend_that_cannot_start_ends_the_server(run: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in run.glob("*.*"):
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "adapters.safetensors").write_bytes(b"no weights")
    with served("--run", broken) as one:
        one.process.wait(120)
        assert one.process.returncode == 1 and one.process.stderr is not None
        last = one.process.stderr.read().splitlines()[-1]
        assert last.startswith("error: the backend local does not start")
