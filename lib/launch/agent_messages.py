"""What a launcher and its agents send each other: one JSON object a line, among whatever else a host writes there.

A login shell's greeting, a library's warning, ssh's last line and a line that was cut off by a death come through the
same pipe. None of them ends the reading: what is a message is taken, the rest is handed on as text.

Only the standard library is imported: a host's agent is there in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypedDict

from lib.distributed.heartbeat import Heard, Reached

PING_SECONDS = 1.0  # between two signs of life of the launcher
LINE_BYTES = 2**24  # of one message; a longer line is none
TEXTS, TEXT_CHARACTERS = 20, 300  # of foreign texts that are shown
BEGINNING = '{"kind": "'  # of every message, as `encoded` writes it

Message = dict[str, Any]  # JSON: the fields of a message, which follow from its kind


class RankProcess(TypedDict):
    """A process that an agent starts."""

    rank: int | None  # None: mpirun, which starts the ranks
    command: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Start:
    """The launcher's request to start the ranks of a host."""

    address: str  # of this start: the beginning of the folder's name in which the agent listens
    processes: list[RankProcess]
    files: dict[str, str]  # text by name; the processes read them in that folder
    directory: str  # the project's
    silent_seconds: float  # without a word of the launcher, then the agent ends
    nice: int | None
    awake: bool  # a Mac is kept from sleeping
    sends_logs: bool
    host: str  # the name that every process has for this machine
    end_seconds: float  # from asking a rank to end to killing it


class Hello(TypedDict):
    """An agent's first message."""

    host: str  # what the machine calls itself
    identity: str  # of the machine: two may have one name
    system: str  # Darwin or Linux


class Beat(TypedDict, total=False):
    """What a rank reports twice a second (lib/distributed/heartbeat.py)."""

    rank: int
    pid: int
    waiting: str | None  # what it waits for
    seconds: float  # since that wait began or the last one ended
    passing: str | None  # the pass through the model that it is in
    passing_seconds: float
    passes: int
    ended: bool
    run: str  # folder
    checkpoint: int  # its newest step
    machine: str
    micro_batch_size: int
    gradient_checkpointing: bool
    diverged: str
    newer: Reached
    refused: bool
    heard: dict[str, Heard]  # by rank of a neighbour


def encoded(kind: str, **fields: Any) -> bytes:
    """One message as one line."""
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


def decoded(line: bytes) -> tuple[list[Message], str]:
    """The messages of a line, and what else it holds: "" where it is a message and nothing else.

    A foreign text that does not end its line stands before a message or behind it. Of a message that was cut off
    nothing is left, up to the next one in the line.
    """
    text = line.decode(errors="replace")
    messages: list[Message] = []
    foreign, position = "", 0
    while (start := text.find(BEGINNING, position)) >= 0:
        foreign += text[position:start]
        try:
            message, position = _DECODER.raw_decode(text, start)
            messages.append(message)
        except (ValueError, RecursionError):
            following = text.find(BEGINNING, start + 1)
            position = len(text) if following < 0 else following
    return messages, (foreign + text[position:]).strip()


class ForeignTexts:
    """The first foreign texts of a stream, as they may be shown: short, and without control characters."""

    def __init__(self, limit: int = TEXTS):
        self.left = limit

    def shown(self, text: str) -> str | None:
        """What to show of a text; None after the limit."""
        if not text or self.left == 0:
            return None
        self.left -= 1
        short = text if len(text) <= TEXT_CHARACTERS else f"{text[:TEXT_CHARACTERS]} ..."
        printable = "".join(letter if letter.isprintable() else " " for letter in short)
        return printable if self.left else f"{printable} (more of this kind is not shown)"


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream to its end, the last one without its own end if it has none; lines too long are left out.

    The stream's limit is LINE_BYTES.
    """
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # asyncio has dropped what was read of it; the rest comes as a line
            continue
        except OSError:
            return
        if not line:
            return
        yield line


_DECODER = json.JSONDecoder()
