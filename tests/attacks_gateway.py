"""What a stranger, or somebody with a key, does to a gateway: each holds where a good client is answered beside it.

As tests/attacks.py: an attack gives why it fell, or nothing where the gateway held. The first attack of a process starts
the gateway, which ends with the process, however that does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2

from lib.serve import api_keys
from lib.serve.openai_requests import JSON, Limits, RequestError
from lib.serve.readers import Readers
from lib.serve.request_reading import Told
from tests import hostile
from tests.attacks_models import BOMB, DOUBLES, LOOPS, QUICKSTART, WAITS, put, splitting
from tests.hostile import chat, head
from tests.served import Served, certificate, command_of, finished_run, served

Attack = Callable[[Path], str | None]  # in the folder of `prepare`; why it fell
READ_SECONDS = 2.0
WORDS = [f"serve.read_seconds={READ_SECONDS}", "serve.max_queue=16", "serve.drain_seconds=0"]
REQUESTS = 3  # of the good client
GUARDS: list[subprocess.Popen[bytes]] = []  # each ends a gateway
SECONDS = 60.0  # for all of them


def prepare(folder: Path) -> Path:
    """A folder with a finished run, two keys, and a certificate."""
    finished_run(folder)
    for name in ("good", "hostile"):
        (folder / name).write_text(api_keys.make(name, folder / "keys"))
    certificate(folder)
    return folder


@functools.cache
def gateway(folder: Path, tls: bool = False) -> Served:
    """The gateway that is attacked."""
    words = [f"serve.tls_certificate={folder}/certificate.pem", f"serve.tls_key={folder}/key.pem"] if tls else []
    one = Served("--run", folder / "tiny", f"serve.keys={folder}/keys", *WORDS, *words)
    # Its input ends with this process, also where that is killed.
    kill = ["sh", "-c", 'read -r _; kill -9 "$0"', str(one.process.pid)]
    GUARDS.append(subprocess.Popen(kill, stdin=subprocess.PIPE, start_new_session=True))
    return one.until_up(1)


def end() -> None:
    """Ends all gateways."""
    while GUARDS:
        GUARDS.pop().communicate()
    gateway.cache_clear()


def _key(folder: Path, name: str) -> str:
    return (folder / name).read_text()


def _good(folder: Path, one: Served) -> str | None:
    """Why a good client is not served, by a backend that nobody had to take out."""
    address = one.address.replace("127.0.0.1", "localhost")
    try:
        answered = hostile.good(address, _key(folder, "good"), REQUESTS, SECONDS, certificate_of(folder))
    except (httpx2.HTTPError, AssertionError) as error:
        return f"a good client is not answered: {error!r}"
    if len(answered) < REQUESTS:
        return f"a good client had {len(answered)} of {REQUESTS} answers in {SECONDS:g} s"
    failed = one.of("backend", state="failed") + one.of("backend", state="dead")
    return f"the backend was lost: {failed}" if failed else None


def certificate_of(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=f"{folder}/certificate.pem")


def beside(name: str) -> Attack:
    """A hostile client of tests/hostile.py, and a good one beside it."""

    def attack(folder: Path) -> str | None:
        one = gateway(folder, "TLS" in name)
        attacking = hostile.start(name, one.address, _key(folder, "hostile"), 2 * SECONDS)
        try:
            time.sleep(0.7)
            return _good(folder, one)
        finally:
            attacking.kill()
            attacking.wait()

    return attack


def _where(one: Served) -> tuple[str, int]:
    host, _, port = one.address.rpartition("/")[2].rpartition(":")
    return host, int(port)


def _connect(one: Served) -> socket.socket:
    return socket.create_connection(_where(one), timeout=20)


def heard(one: Served, *sent: bytes) -> bytes:
    """What a gateway says to raw bytes, until it closes; `open` at the end where it does not."""
    answer = b""
    with _connect(one) as connection:
        connection.settimeout(3 * READ_SECONDS + 5)
        with contextlib.suppress(OSError):  # it is closed while we send
            for part in sent:
                connection.sendall(part)
        try:
            while block := connection.recv(65536):
                answer += block
        except TimeoutError:
            return answer + b"open"
        except OSError:
            pass
    return answer


def raw(status: int | None, *parts: bytes, key: bool = False, or_nothing: bool = False) -> Attack:
    """Bytes that get one answer, of this status, or none, and a closed connection."""

    def attack(folder: Path) -> str | None:
        one = gateway(folder)
        name = _key(folder, "hostile").encode() if key else b""
        answer = heard(one, *(part.replace(b"KEY", name) for part in parts))
        said = re.findall(rb"HTTP/1\.1 (\d+)", answer)
        expected = [] if status is None or (or_nothing and not said) else [str(status).encode()]
        if said != expected or answer.endswith(b"open"):
            return f"it said {answer[-300:]!r}"
        return _good(folder, one)

    return attack


def refused(status: int, body: bytes) -> Attack:
    """A body with a valid key."""

    def attack(folder: Path) -> str | None:
        one = gateway(folder)
        headers = {"Authorization": f"Bearer {_key(folder, 'hostile')}", "content-type": "application/json"}
        answer = httpx2.post(one.address + hostile.PATH, content=body, headers=headers, timeout=SECONDS)
        if answer.status_code != status:
            return f"status {answer.status_code}: {answer.text[:300]}"
        return _good(folder, one)

    return attack


def abandoned_slots(folder: Path) -> str | None:
    """More requests than the backend has slots, which run for long and which nobody waits for, leave none behind."""
    one = gateway(folder)
    body = chat(max_tokens=2000, logprobs=True)
    for _ in range(40):
        with _connect(one) as connection:
            connection.sendall(head(_key(folder, "hostile"), f"Content-Length: {len(body)}") + body)
    try:
        one.wait(lambda: _metric(folder, one, "tandem_backend_in_flight") == 0, 30)
    except AssertionError:
        return f"{_metric(folder, one, 'tandem_backend_in_flight'):g} slots are still taken"
    return _good(folder, one)


def _metric(folder: Path, one: Served, name: str) -> float:
    headers = {"Authorization": f"Bearer {_key(folder, 'good')}"}
    text = httpx2.get(f"{one.address}/metrics", headers=headers, timeout=SECONDS).text
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))
    )


def full_queue(folder: Path) -> str | None:
    """One key takes every place there is, and the next request of another key is answered."""
    one = gateway(folder)
    body = chat(max_tokens=300)
    request = head(_key(folder, "hostile"), f"Content-Length: {len(body)}") + body
    open_ones = [_connect(one) for _ in range(80)]
    try:
        for connection in open_ones:
            connection.sendall(request)
        return _good(folder, one)
    finally:
        for connection in open_ones:
            connection.close()


def half_sent_bodies(folder: Path) -> str | None:
    """One key takes every place with bodies that do not go on."""
    one = gateway(folder)
    open_ones = [_connect(one) for _ in range(80)]
    try:
        for connection in open_ones:
            connection.sendall(head(_key(folder, "hostile"), "Content-Length: 5000") + b"{")
        return _good(folder, one)
    finally:
        for connection in open_ones:
            connection.close()


def revoked(folder: Path) -> str | None:
    """The last key of the file is taken out: it opens nothing any more."""
    path = folder / "few-keys"
    path.unlink(missing_ok=True)
    key = api_keys.make("last", path)
    one = Served("--model", folder / "model", f"serve.keys={path}")
    try:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=one.address, headers=headers) as client:
            if client.get("/v1/models").status_code != 200:
                return "the key did not open before"
            path.write_text("")
            one.process.send_signal(signal.SIGHUP)
            one.wait(lambda: one.of("keys"), 30)
            status = client.get("/v1/models").status_code
        return None if status == 401 else f"a revoked key gets {status}"
    finally:
        one.process.kill()


def other_user(folder: Path) -> str | None:
    """Another user of the machine looks for the backend's socket, and for its secret on command lines."""
    one = gateway(folder)
    sockets: list[Path] = []
    for place in Path(tempfile.gettempdir()).glob("tandem-*"):
        with contextlib.suppress(OSError):  # some other gateway's has just ended
            sockets += [path for path in place.iterdir() if path.is_socket()]
    if not sockets:
        return "no socket was found"
    for path in sockets:
        with contextlib.suppress(FileNotFoundError):
            if path.parent.stat().st_mode & 0o077:
                return f"others may enter {path.parent}"
        if os.geteuid() == 0:  # become somebody else
            done = subprocess.run(["ls", path], user=65534, cwd="/", capture_output=True)
            if done.returncode == 0:
                return f"another user reached {path}"
    told = [
        str(path.parent)
        for path in sockets
        if any(str(path) in " ".join(command_of(pid)) for pid in one.backend_pids())
    ]
    return f"a command line says {told}" if told else _good(folder, one)


def unread_answers(folder: Path) -> str | None:
    """Streams that nobody reads hold no more than their slots."""
    one = gateway(folder)
    body = chat(max_tokens=2000, stream=True)
    open_ones = [_connect(one) for _ in range(16)]
    try:
        for connection in open_ones:
            connection.sendall(head(_key(folder, "hostile"), f"Content-Length: {len(body)}") + body)
        return _good(folder, one)
    finally:
        for connection in open_ones:
            connection.close()


def slow_headers(folder: Path) -> str | None:
    """200 connections that send their headers byte by byte are closed in time."""
    one = gateway(folder)
    over = threading.Event()

    def trickle() -> None:
        with _connect(one) as connection:
            connection.settimeout(0.05)
            begins = time.monotonic()
            for letter in head(None) * 100:
                try:
                    connection.sendall(bytes([letter]))
                    if connection.recv(1) == b"":
                        return
                except TimeoutError:
                    continue
                except OSError:
                    return
                finally:
                    if time.monotonic() - begins > 10 * READ_SECONDS:
                        over.set()

    threads = [threading.Thread(target=trickle) for _ in range(20)]
    for thread in threads:
        thread.start()
    why = _good(folder, one)
    for thread in threads:
        thread.join()
    return "a slow one was not closed" if over.is_set() else why


# ---- Gateways of their own, without a backend where none is asked for


@contextlib.contextmanager
def bare(folder: Path, *words: str, run: str = "tiny") -> Iterator[Served]:
    """A gateway whose backend is never there."""
    own = ["serve.backends=[http://127.0.0.1:1]", f"serve.keys={folder}/keys", "serve.drain_seconds=0", *words]
    with served("--run", folder / run, *own) as one:
        yield one


def held_connections(sent: bytes) -> Attack:
    """One key takes every connection of its address, where somebody else connects, and asks a little later."""

    def attack(folder: Path) -> str | None:
        few = ["serve.max_connections=32", "serve.max_connections_per_address=16"]
        with bare(folder, *few, f"serve.feedback={folder}/labels") as one, contextlib.ExitStack() as held:
            for _ in range(16):
                connection = held.enter_context(_connect(one))
                connection.sendall(sent.replace(b"KEY", _key(folder, "hostile").encode()))
                if b"{" not in sent:
                    connection.recv(65536)
            time.sleep(0.3)
            good = held.enter_context(_connect(one))
            for _ in range(4):
                held.enter_context(_connect(one))
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                good.sendall(b"%sAuthorization: Bearer %s\r\n\r\n" % (GET, _key(folder, "good").encode()))
                if good.recv(65536).startswith(b"HTTP/1.1 200 "):
                    return None
            return "somebody else is closed before it asks"

    return attack


def preflights(folder: Path) -> str | None:
    """A stranger asks as a browser does, and is answered no faster than a probe."""
    page = "https://a.example"
    asks = f"OPTIONS / HTTP/1.1\r\nHost: a\r\nOrigin: {page}\r\nAccess-Control-Request-Method: POST\r\n\r\n"
    with bare(folder, f"serve.cors_origins=[{page}]") as one, _connect(one) as connection:
        connection.sendall(asks.encode() * 500)
        connection.settimeout(0.2)
        answered, ends = 0, time.monotonic() + 2
        while time.monotonic() < ends:
            with contextlib.suppress(TimeoutError):
                answered += connection.recv(65536).count(b"HTTP/1.1 200 ")
    return None if 50 <= answered < 250 else f"{answered} are answered in two seconds"


def polled_to_its_end(folder: Path) -> str | None:
    """A stranger polls a gateway that is asked to end."""
    with bare(folder) as one:

        def poll() -> None:
            while one.process.poll() is None:
                with contextlib.suppress(OSError), _connect(one) as connection:
                    connection.sendall(hostile.KEEP_ALIVE)
                    while connection.recv(65536):
                        connection.sendall(hostile.KEEP_ALIVE)

        threads = [threading.Thread(target=poll) for _ in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        try:
            one.stop(seconds=20)
            return None
        except subprocess.TimeoutExpired:
            return "it does not end"
        finally:
            one.process.kill()
            for thread in threads:
                thread.join()


def one_slot(folder: Path) -> str | None:
    """One key fills the queue before the only slot: another key's request waits for an answer or two, not for all."""
    body = chat(max_tokens=200)
    request = head(_key(folder, "hostile"), f"Content-Length: {len(body)}") + body
    words = [f"serve.keys={folder}/keys", "serve.concurrency=1"]
    with served("--run", folder / "tiny", *words) as one, contextlib.ExitStack() as held:
        one.until_up(1)
        for _ in range(40):
            held.enter_context(_connect(one)).sendall(request)
        one.wait(lambda: one.of("request", key="hostile"))
        why = _good(folder, one)
        before = len(one.of("request", key="hostile"))
    return why or (None if before <= 5 * REQUESTS else f"{REQUESTS} requests waited for {before} of another key")


def obeyed_name(folder: Path) -> str | None:
    """A run whose folder is called what a terminal obeys."""
    name = "a\x1b]0;x\x07"
    if not (folder / name).exists():
        shutil.copytree(folder / "tiny", folder / name, ignore=shutil.ignore_patterns("checkpoints"))
    with bare(folder, run=name) as one:
        one.stop()
        assert one.process.stderr is not None
        said = one.process.stderr.read()
    return None if "\x1b" not in said else f"it prints {said!r}"


# ---- What a body may cost where the model is somebody else's


def reader(change: Callable[[Path], None], *bodies: JSON, chat_template: bool = False) -> Attack:
    """Bodies for the process that reads them: each is refused in time, and the next one read.

    change: what somebody made of the model's files.
    """

    def attack(folder: Path) -> str | None:
        model = folder / "evil-model"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(QUICKSTART, model)
        change(model)
        limits = dataclasses.asdict(Limits("tiny", 8192, 100, 4096, 8192))
        own = str(model / "evil.jinja") if chat_template else None
        faults: list[str] = []

        async def story() -> str | None:
            readers = Readers(
                Told(str(model), False, own, {}, limits), lambda kind, **fields: faults.append(str(fields))
            )
            running = asyncio.create_task(readers.run())
            try:
                for body in bodies:
                    try:
                        await readers.read("hostile", "chat", json.dumps(body).encode())
                        return "it was read"
                    except RequestError as error:
                        if error.status != 400:
                            return f"status {error.status}: {error.message}"
                good = await readers.read("good", "text", json.dumps({"prompt": "a"}).encode())
                return None if good.content else "it reads nothing more"
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                await asyncio.sleep(0.5)  # for the ends of its processes, of which nobody hears once the loop is closed

        return asyncio.run(story())

    return attack


def with_pattern(pattern: str) -> Callable[[Path], None]:
    return lambda model: put(model / "tokenizer.json", splitting(pattern))


def with_template(text: str) -> Callable[[Path], None]:
    return lambda model: put(model / "evil.jinja", text)


CHUNKED = head("KEY", "Transfer-Encoding: chunked")
NO_KEY = head(None, "Content-Length: 1000000")
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
WITH_KEY = GET + b"Authorization: Bearer KEY\r\n\r\n"
HALF_LABEL = head("KEY", "Content-Length: 60").replace(hostile.PATH.encode(), b"/v1/feedback") + b"{"
MESSAGE = {"role": "user", "content": "x"}
BESIDE: dict[str, Attack] = {
    **{f"beside: {name}": beside(name) for name in hostile.HOSTILE},
    "abandoned logprobs keep their slots": abandoned_slots,
    "one key fills the queue": full_queue,
    "one key half-sends its bodies": half_sent_bodies,
    "a revoked last key": revoked,
    "another user of the machine": other_user,
    "8,000 empty messages": refused(400, hostile.EMPTY_MESSAGES),
}
WORDS_OF_OTHERS: dict[str, Attack] = {
    "streams that nobody reads": unread_answers,
    "headers byte by byte": slow_headers,
    "a body after a 401": raw(401, NO_KEY, *[b"x" * 1000] * 100),
    "a request behind a 401": raw(401, GET + b"\r\n", GET + b"\r\n"),
    "100 headers": raw(431, GET + b"".join(b"X-%d: y\r\n" % number for number in range(100)) + b"\r\n"),
    "a header of 20 KB": raw(431, GET + b"X: " + b"y" * 20_000 + b"\r\n\r\n"),
    "a line of 20 KB": raw(431, b"GET /" + b"y" * 20_000),
    "two lengths": raw(400, GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"),
    "no HTTP": raw(400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n"),
    "nothing at all": raw(None),
    "chunks of one byte": raw(400, CHUNKED, *[b"1\r\n \r\n" * 5000] * 10, key=True),
    "a chunk's extension of 200 KB": raw(400, CHUNKED, b"1;" + b"x" * 200_000, key=True),
    "a chunk of no number": raw(400, CHUNKED, b"zz\r\n", key=True),
    "a body that stops": raw(408, head("KEY", "Content-Length: 5000") + b"{", key=True),
    "one key holds every connection": held_connections(WITH_KEY),
    "one key half-sends its labels": held_connections(HALF_LABEL),
    "preflights without a pause": preflights,
    "a stranger polls to the end": polled_to_its_end,
    "one key fills the queue of one slot": one_slot,
    "a run's name that a terminal obeys": obeyed_name,
    "a body larger than it says": raw(413, head("KEY", "Content-Length: 2000000"), key=True),
    "requests without an end": raw(401, (GET + b"\r\n") * 5000, or_nothing=True),
    "499,000 faults": refused(400, hostile.WRONG_VALUES),
    "a text of 1 MB": refused(400, hostile.LONG_TEXT),
    "1 MB of brackets": refused(400, b"[" * 900_000),
    "300 deep": refused(400, b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}"),
    "40,000 unknown keys": refused(400, json.dumps({"messages": [MESSAGE], **dict.fromkeys(map(str, range(40_000)))}).encode()),
    "40,000 faulty parts": refused(400, json.dumps({"messages": [MESSAGE | {"content": [5] * 40_000}]}).encode()),
    "10,000 tools": refused(400, json.dumps({"messages": [MESSAGE], "tools": [{"type": "function"}] * 10_000}).encode()),
    "arguments that are no JSON": refused(
        400,
        json.dumps(
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}
        ).encode(),
    ),
}  # fmt: skip

ASKED: JSON = {"messages": [{"role": role, "content": "a" * 60 + "!"} for role in ("user", "assistant", "user")]}
READERS: dict[str, Attack] = {
    "a prompt of no tokens": reader(with_template("{% for message in [] %}{% endfor %}"), ASKED, chat_template=True),
    "a tokenizer's pattern that never ends": reader(with_pattern(BOMB), ASKED, ASKED),
    "a template that doubles a text": reader(with_template(WAITS % DOUBLES), ASKED, ASKED, chat_template=True),
    "a template that loops": reader(with_template(WAITS % (LOOPS * 50)), ASKED, chat_template=True),
    "a template that counts to 10^10^10": reader(
        with_template(WAITS % "{{ (messages|length + 9) ** (10 ** 10) }}"), ASKED, chat_template=True
    ),
}
ATTACKS = {f"gateway: {name}": attack for name, attack in (BESIDE | WORDS_OF_OTHERS).items()}
ATTACKS |= {f"reader: {name}": attack for name, attack in READERS.items()}
