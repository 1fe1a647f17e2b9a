"""Clients that want to keep a gateway from serving others, each in a process of its own, and a good one beside them.

    python -m tests.hostile "one key floods" --address http://127.0.0.1:8080 --key KEY --seconds 10

Each goes on for so many seconds, opens anew what is closed, and never waits longer than it has to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import random
import resource
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from tests.served import NEVER_ENDS, QUESTION
from tests.tiny import ROOT

PATH = "/v1/chat/completions"


@functools.cache
def _trusting() -> ssl.SSLContext:
    """One for all: to make one takes longer than a connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@dataclass(frozen=True)
class Target:
    """A gateway, and for how long it is attacked."""

    address: str
    key: str
    ends: float

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.ends

    async def connect(
        self, tls: bool = True, source: str | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """source: this machine's address to come from, another one than it would be."""
        parts = urlsplit(self.address)
        wanted = _trusting() if tls and parts.scheme == "https" else None
        if source is not None:
            return await asyncio.open_connection("127.0.0.1", parts.port, ssl=wanted, local_addr=(source, 0))
        return await asyncio.open_connection(parts.hostname, parts.port, ssl=wanted)

    async def ask(self, body: bytes, leave_seconds: float | None = None) -> bytes:
        """Sends a request over a connection of its own; the beginning of the answer, or nothing where it leaves before."""
        reader, writer = await self.connect()
        try:
            writer.write(head(self.key, f"Content-Length: {len(body)}") + body)
            await writer.drain()
            async with asyncio.timeout(leave_seconds):
                return await reader.read(65536)
        except TimeoutError:
            return b""
        finally:
            writer.transport.abort()


Attack = Callable[[Target], Awaitable[object]]


def head(key: str | None, *lines: str) -> bytes:
    """The headers of a request for a chat completion."""
    given = [f"Authorization: Bearer {key}"] if key else []
    wanted = ["Host: localhost", "Content-Type: application/json", *given, *lines]
    return f"POST {PATH} HTTP/1.1\r\n".encode() + "".join(f"{line}\r\n" for line in wanted).encode() + b"\r\n"


def chat(**words: Any) -> bytes:
    return json.dumps({"messages": QUESTION, "temperature": 0, "logit_bias": NEVER_ENDS} | words).encode()


def at_once(count: int, one: Attack) -> Attack:
    """Several of an attack, again and again."""

    async def forever(target: Target) -> None:
        while not target.is_over:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await one(target)
            await asyncio.sleep(0)

    return lambda target: asyncio.gather(*(forever(target) for _ in range(count)))


async def one_byte_chunks(target: Target) -> None:
    """A body in chunks of one byte, for as long as somebody takes them."""
    _, writer = await target.connect()
    try:
        writer.write(head(None, "Transfer-Encoding: chunked"))
        while not target.is_over:
            writer.write(b"1\r\nx\r\n" * 4000)
            await writer.drain()
    finally:
        writer.transport.abort()


def idle(count: int, first: bytes, tls: bool) -> Attack:
    """Connections that say one thing, or nothing, and stay."""

    async def stay(target: Target) -> None:
        reader, writer = await target.connect(tls)
        try:
            writer.write(first)
            async with asyncio.timeout(max(0.0, target.ends - time.monotonic())):
                while await reader.read(65536):
                    pass
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()
        await asyncio.sleep(1)  # as often as it is closed it comes back, a second later

    return at_once(count, stay)


async def abandon(target: Target) -> None:
    """A request for log-probabilities, which nobody waits for."""
    await target.ask(chat(max_tokens=2000, logprobs=True, top_logprobs=5), leave_seconds=0.2)


def asking(body: bytes) -> Attack:
    async def ask(target: Target) -> None:
        await target.ask(body)

    return ask


def again_and_again(path: str, with_key: bool = False) -> Attack:
    """A request that costs next to nothing, over one connection, as often as it is answered."""

    async def ask(target: Target) -> None:
        reader, writer = await target.connect()
        key = f"Authorization: Bearer {target.key}\r\n" if with_key else ""
        try:
            while not target.is_over:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{key}\r\n".encode())
                if not await reader.read(65536):
                    return
        finally:
            writer.transport.abort()

    return ask


def prompts(tokens: int, stops: int = 0) -> Attack:
    """Prompts of about so many tokens, another one each time; with so many long `stop` strings of their own."""

    async def ask(target: Target) -> None:
        content = "".join(random.choices("abcde", k=tokens))
        stop = {"stop": ["".join(random.choices("abcde é中", k=256)) for _ in range(stops)]} if stops else {}
        await target.ask(chat(max_tokens=1, messages=[{"role": "user", "content": content}], **stop))

    return ask


def to_its_end(**words: Any) -> Attack:
    """A whole answer, which is read."""

    async def ask(target: Target) -> None:
        reader, writer = await target.connect()
        try:
            body = chat(**words)
            writer.write(head(target.key, f"Content-Length: {len(body)}") + body)
            answered = b""
            while b'"usage"' not in answered and (piece := await reader.read(65536)):
                answered = answered[-16:] + piece
        finally:
            writer.transport.abort()

    return ask


def left_at_once(request: Callable[[Target], bytes], tls: bool = False) -> Attack:
    """A connection that ends as soon as its request is sent."""

    async def leave(target: Target) -> None:
        _, writer = await target.connect(tls)
        try:
            writer.write(request(target))
            await writer.drain()
        finally:
            writer.transport.abort()

    return leave


def read_once(request: Callable[[Target], bytes], source: str | None = None, tls: bool = True) -> Attack:
    """A connection that ends with the beginning of its answer. source: the address that it comes from."""

    async def ask(target: Target) -> None:
        reader, writer = await target.connect(tls, source)
        try:
            writer.write(request(target))
            await reader.read(65536)
        finally:
            writer.transport.abort()

    return ask


def _small_chunks(target: Target) -> bytes:
    return head(target.key, "Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 2000


def _hello(target: Target) -> bytes:
    """How a TLS handshake begins: what it costs to send it again is nothing, and to answer it a signature."""
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        _trusting().wrap_bio(ssl.MemoryBIO(), said, server_hostname="localhost").do_handshake()
    return said.read()


def _models(target: Target) -> bytes:
    return f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.key}\r\n\r\n".encode()


def _chat(target: Target) -> bytes:
    body = chat(max_tokens=100)
    return head(target.key, f"Content-Length: {len(body)}") + body


async def own_numbers(target: Target) -> None:
    """A way to draw tokens that nobody has asked for before."""
    numbers = {name: random.uniform(0.1, 0.9) for name in ("temperature", "top_p", "min_p")}
    await target.ask(chat(max_tokens=2, **numbers))


def from_everywhere(count: int, first: bytes, pause_seconds: float) -> Attack:
    """New connections, each from an address of its own, so many of which stay; on Linux every 127.x.y.z is one's own."""
    addresses = (f"127.{a}.{b}.{c}" for a in range(1, 255) for b in range(255) for c in range(1, 255))

    async def come(target: Target) -> None:
        held: list[asyncio.StreamWriter] = []
        try:
            while not target.is_over:
                with contextlib.suppress(OSError):
                    _, writer = await target.connect(source=next(addresses))
                    held.append(writer)
                    writer.write(first)
                if len(held) > count:
                    held.pop(0).transport.abort()
                await asyncio.sleep(pause_seconds)
        finally:
            for writer in held:
                writer.transport.abort()

    return come


KEEP_ALIVE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
WRONG_VALUES = b'{"messages": [%s]}' % b",".join([b"5"] * 499_000)
EMPTY_MESSAGES = json.dumps({"messages": [{"role": "user", "content": ""}] * 8000}).encode()
LONG_TEXT = json.dumps({"messages": [{"role": "user", "content": "12 " * 330_000}]}).encode()
ARGUMENTS = json.dumps({"a": ["x" * 15] * 49_000})
LONG_ARGUMENTS = chat(
    max_tokens=1,
    messages=[
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": ARGUMENTS}}]},
        {"role": "user", "content": "1"},
    ],
)
WRONG_PARTS = {count: json.dumps({"messages": [{"role": "user", "content": [{}] * count}]}) for count in (4000, 49_900)}
HOSTILE: dict[str, Attack] = {
    "one-byte chunks after 401, 1 connection": at_once(1, one_byte_chunks),
    "one-byte chunks after 401, 8 connections": at_once(8, one_byte_chunks),
    "1,024 idle connections": idle(1024, KEEP_ALIVE, tls=True),
    "9,000 TLS handshakes that never come": idle(9000, b"", tls=False),
    "40 requests for logprobs, abandoned": at_once(40, abandon),
    "bodies of 1 MB with 499,000 faults": at_once(4, asking(WRONG_VALUES)),
    "texts of 1 MB": at_once(4, asking(LONG_TEXT)),
    "8,000 empty messages": at_once(4, asking(EMPTY_MESSAGES)),
    "256 connections that ask whether it lives": at_once(256, again_and_again("/healthz")),
    "one key asks for the metrics, 64 connections": at_once(64, again_and_again("/metrics", with_key=True)),
    "8 connections with prompts of 8,000 tokens": at_once(8, prompts(8000)),
    "64 connections with prompts of 480 tokens": at_once(64, prompts(480)),
    "64 connections with prompts of 60 tokens": at_once(64, prompts(45)),
    "64 connections with prompts of 60 tokens and long stops": at_once(64, prompts(45, stops=4)),
    "16 connections with long arguments of tools": at_once(16, asking(LONG_ARGUMENTS)),
    "8 whole answers of 2,000 tokens": at_once(8, to_its_end(max_tokens=2000)),
    "16 answers of 300 tokens with logprobs": at_once(16, to_its_end(max_tokens=300, logprobs=True, top_logprobs=10)),
    "64 bodies with 4,000 wrong parts": at_once(64, asking(WRONG_PARTS[4000].encode())),
    "8 bodies with 49,900 wrong parts": at_once(8, asking(WRONG_PARTS[49_900].encode())),
    "64 connections with what is no HTTP": at_once(64, read_once(lambda _: b"GARBAGE\r\n\r\n")),
    "64 connections with what is no HTTP, left": at_once(64, left_at_once(lambda _: b"GARBAGE\r\n\r\n")),
    "64 connections without a key, left": at_once(64, left_at_once(lambda _: head(None))),
    "64 connections that ask whether it lives, left": at_once(64, left_at_once(lambda _: KEEP_ALIVE)),
    "64 connections that ask for models, left": at_once(64, left_at_once(_models)),
    "64 connections that ask for answers, left": at_once(64, left_at_once(_chat)),
    "32 connections with a TLS handshake each": at_once(32, left_at_once(lambda _: b"", tls=True)),
    "4 connections with numbers of their own": at_once(4, own_numbers),
    "64 connections with one-byte chunks and a key": at_once(64, read_once(_small_chunks)),
    "one key floods": at_once(64, asking(chat(max_tokens=200))),
}
if sys.platform == "linux":
    HOSTILE |= {
        "1,100 silent connections from as many addresses": from_everywhere(1100, b"", 0.005),
        "400 connections with TLS hellos, from another address": at_once(
            400, read_once(_hello, "127.0.0.9", tls=False)
        ),
        "400 connections with what is no HTTP, from another address": at_once(
            400, read_once(lambda _: b"GARBAGE\r\n\r\n", "127.0.0.9")
        ),
        "probes from 400 addresses at a time": from_everywhere(400, KEEP_ALIVE * 50, 0.02),
    }


def start(name: str, address: str, key: str, seconds: float) -> subprocess.Popen[bytes]:
    """An attack in a process of its own."""
    command = [sys.executable, "-m", "tests.hostile", name, "--address", address, "--key", key]
    return subprocess.Popen([*command, f"--seconds={seconds}"], cwd=ROOT)


def good(address: str, key: str, requests: int, seconds: float, trusted: ssl.SSLContext | bool = True) -> list[float]:
    """Seconds of each of a good client's requests, one after the other, every second over a new connection.

    Raises:
        AssertionError: one was not answered.
    """
    found: list[float] = []
    body = json.loads(chat(max_tokens=8))
    headers, ends = {"Authorization": f"Bearer {key}"}, time.monotonic() + seconds
    with httpx2.Client(timeout=60, trust_env=False, verify=trusted) as kept:
        while len(found) < requests and time.monotonic() < ends:
            since = time.perf_counter()
            if len(found) % 2:
                answer = kept.post(address + PATH, json=body, headers=headers)
            else:
                with httpx2.Client(timeout=60, trust_env=False, verify=trusted) as once:
                    answer = once.post(address + PATH, json=body, headers=headers)
            found.append(time.perf_counter() - since)
            assert answer.status_code == 200, answer.text
    return found


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.99))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=HOSTILE)
    parser.add_argument("--address", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (20_000 if most == resource.RLIM_INFINITY else min(20_000, most), most))
    target = Target(options.address, options.key, time.monotonic() + options.seconds)

    async def attack() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.seconds + 1):
                await HOSTILE[options.name](target)

    asyncio.run(attack())


if __name__ == "__main__":
    main()
