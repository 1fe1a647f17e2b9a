"""What ranks exchange over MLX's ring, checked over a channel that nobody between them can forge.

MLX's ring sends plain bytes: who sits on the way between two hosts can change them, for all ranks alike, so that their
weights stay equal and are nobody's. So of every sum each rank notes two numbers: r·x of what it gave, and r·X of what
it got, where r is drawn from the run's secret. Once in a while the ranks tell each other these numbers
(lib/distributed/peer_messages.py). X is the sum of the x, so r·X is the sum of the r·x; who does not know r cannot
change X and keep that. (Freivalds' check, "Probabilistic machines can use less running time", 1977, of a sum.)

What one rank sends another (lib/distributed/links.py) is noted in the same way, as bits, at both ends.

Floats differ by roundings, which are bounded: a sum of n ranks, added hop by hop in a type with unit roundoff u, is off
by (n - 1) u Σ|x| at most in every number, so r·X by (n - 1) u |r| Σ|x| in norms. Integers and bits are exact, modulo
2^64. Of large arrays a sample of blocks is looked at, which follows from the secret too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

import mlx.core as mx
import numpy as np

from lib.distributed.peer_messages import PeerMessages
from lib.errors import Stopped
from lib.system.handshake import derived
from lib.system.network import host_name

BLOCK = 2**16  # values that share a factor of r
SAMPLE = 64  # blocks of an array that are looked at
MESSAGE_SAMPLE = 8  # of what one rank sends another, which is as large as that, and more often
EVERY = 64  # sums between two comparisons
FOLDED = 64  # messages from one rank to another that are compared as one
ROUNDOFF = {mx.float32: 2.0**-24, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}  # the half ones twice: some truncate
SLACK = 2.0**-29  # of a product of 2^24 float64 values
TINY = 2.0**-126  # below it float32 has fewer digits
CHANGED = (
    "somebody, or a faulty machine, changes what goes over the network; connect the hosts by ssh or WireGuard "
    "(docs/security.md)"
)


class Record(TypedDict):
    """What a rank notes of one exchange; of bits `got` has a number for every rank whose bits came."""

    what: str
    gave: float | int
    got: list[float | int]
    bound: NotRequired[float]  # of this rank's part in the rounding; only of floats


class Messages(TypedDict):
    """What a rank notes of messages, by the other rank and the number of a group of FOLDED that follow each other.

    Of a group the messages so far, and the sum of their words modulo 2^64: both ends note them in the same order.
    """

    sent: dict[str, dict[str, list[int]]]
    received: dict[str, dict[str, list[int]]]


@dataclass
class CheckedSums:
    """The exchanges of this rank that were not compared yet. All ranks note and compare the same ones."""

    peers: PeerMessages
    secret: bytes
    count: int = 0
    records: list[Record] = field(default_factory=list)
    messages: Messages = field(default_factory=lambda: Messages(sent={}, received={}))

    def __post_init__(self) -> None:
        self._words = np.frombuffer(_stream(derived(self.secret, "factors within a block"), 8 * BLOCK), np.uint64)
        self._reals = self._words.astype(np.float64) / 2.0**63 - 1.0
        self._squares = np.concatenate([[0.0], np.cumsum(np.square(self._reals))])

    def note_sum(self, what: str, gave: mx.array, got: mx.array) -> None:
        """Notes a sum over all ranks; compares where it is time."""
        factors = self._factors(gave.size, self._exchange)
        if gave.dtype in ROUNDOFF:
            own, norm, length = self._real(gave, factors)
            sum_of_all, _, _ = self._real(got, factors)
            roundoff = (self.peers.size - 1) * ROUNDOFF[gave.dtype] + SLACK
            bound = length * (norm * roundoff + math.sqrt(gave.size) * TINY)
            self._add({"what": what, "gave": own, "got": [sum_of_all], "bound": bound})
        else:
            own_words, all_words = (np.array(array, copy=False).reshape(-1) for array in (gave, got))
            self._add({"what": what, "gave": self._word(own_words, factors), "got": [self._word(all_words, factors)]})

    def note_gather(self, what: str, gave: mx.array, got: mx.array) -> None:
        """Notes that every rank's bits came. gave: uint8 [n], n a multiple of 4; got: uint8 [size n]."""
        each = np.array(got, copy=False).view(np.uint32).reshape(self.peers.size, -1)
        factors = self._factors(each.shape[1], self._exchange)
        own = self._word(np.array(gave, copy=False).view(np.uint32), factors)
        self._add({"what": what, "gave": own, "got": [self._word(theirs, factors) for theirs in each]})

    def note_sent(self, array: mx.array, number: int, rank: int) -> None:
        """Notes the n-th message to another rank, an evaluated array."""
        word = self._word_of_message(array, f"message {number} of rank {self.peers.rank} to rank {rank}")
        _fold(self.messages["sent"].setdefault(str(rank), {}), number, word)

    def note_received(self, array: mx.array, number: int, rank: int) -> None:
        """Notes what came as the n-th message from another rank."""
        word = self._word_of_message(array, f"message {number} of rank {rank} to rank {self.peers.rank}")
        _fold(self.messages["received"].setdefault(str(rank), {}), number, word)

    def compare(self) -> None:
        """Compares all that was noted; messages once both of their ranks have noted as many of a group.

        Raises:
            Stopped: something was changed on its way; names it and the first rank that got it so.
        """
        records, self.records = self.records, []
        mine = json.dumps([host_name(), records, self.messages]).encode()
        every = [json.loads(text) for text in self.peers.gather(mine)]
        for index, record in enumerate(records):
            if (rank := wrong_at([noted[index] if index < len(noted) else None for _, noted, _ in every])) is not None:
                what = f"another result of {record['what']} than the ranks sent"
                raise Stopped(f"rank {rank} on {every[rank][0]} got {what}: {CHANGED}")
        messages = [theirs for _, _, theirs in every]
        if (wrong := wrong_message(messages)) is not None:
            sender, receiver = wrong
            raise Stopped(
                f"rank {receiver} on {every[receiver][0]} got something else than rank {sender} sent: {CHANGED}"
            )
        self.messages = without_compared(messages, self.peers.rank)

    def require_equal(self, what: str, digest: str) -> None:
        """Makes sure that all ranks hold the same.

        Raises:
            Stopped: names the first rank that does not, and its host.
        """
        self.compare()
        held = [json.loads(text) for text in self.peers.gather(json.dumps([host_name(), digest]).encode())]
        for rank, (host, theirs) in enumerate(held):
            if theirs != held[0][1]:
                raise Stopped(different(what, rank, host))

    def _add(self, record: Record) -> None:
        self.records.append(record)
        self.count += 1
        if len(self.records) >= EVERY:
            self.compare()

    @property
    def _exchange(self) -> str:
        """The name of the next exchange of all ranks."""
        return f"exchange {self.count}"

    def _factors(self, size: int, name: str, sample: int = SAMPLE) -> tuple[np.ndarray, np.ndarray]:
        """Of an array: the blocks that are looked at, int [k] ascending, and the factor of each, uint64 [k], odd."""
        blocks = max(1, -(-size // BLOCK))
        key = derived(self.secret, name)
        chosen = np.arange(blocks)
        if blocks > sample:
            drawn = np.frombuffer(_stream(key, 8 * blocks), np.uint64)
            chosen = np.sort(np.argsort(drawn, kind="stable")[:sample])
        return chosen, np.frombuffer(_stream(derived(key, "of blocks"), 8 * len(chosen)), np.uint64) | np.uint64(1)

    def _real(self, array: mx.array, factors: tuple[np.ndarray, np.ndarray]) -> tuple[float, float, float]:
        """r·x, |x| and |r|, over the blocks that are looked at."""
        flat = np.array(array if array.dtype == mx.float32 else array.astype(mx.float32), copy=False).reshape(-1)
        product = square = length = 0.0
        with np.errstate(all="ignore"):  # a step may have numbers that are not finite
            for block, word in zip(*factors, strict=True):
                values = flat[block * BLOCK : (block + 1) * BLOCK].astype(np.float64)
                factor = float(word) / 2.0**63 - 1.0
                product += factor * float(values @ self._reals[: len(values)])
                square += float(values @ values)
                length += factor * factor * float(self._squares[len(values)])
        return product, math.sqrt(square), math.sqrt(length)

    def _word_of_message(self, array: mx.array, name: str) -> int:
        """r·x of an array's bits, in words of 32; it is not copied."""
        bits = np.array(mx.view(mx.reshape(array, (-1,), stream=mx.cpu), mx.uint8, stream=mx.cpu), copy=False)
        words = np.pad(bits, (0, -len(bits) % 4)).view(np.uint32) if len(bits) % 4 else bits.view(np.uint32)
        return self._word(words, self._factors(len(words), name, MESSAGE_SAMPLE))

    def _word(self, values: np.ndarray, factors: tuple[np.ndarray, np.ndarray]) -> int:
        """r·x modulo 2^64, of whole numbers of any type [n]."""
        total = 0
        for block, word in zip(*factors, strict=True):
            part = values[block * BLOCK : (block + 1) * BLOCK].astype(np.uint64)
            total += int(word) * int((part * self._words[: len(part)]).sum(dtype=np.uint64))
        return total % 2**64


def wrong_at(every: Sequence[Record | None]) -> int | None:
    """The first rank that got something else than was given, by every rank's record of one exchange; None: none did.

    Where a number that was given is not finite nothing can be compared, and training leaves that update out by itself.
    """
    records = [record for record in every if record is not None]
    if len(records) < len(every) or len({record["what"] for record in records}) > 1:
        return next(rank for rank, record in enumerate(every) if record is None or record["what"] != records[0]["what"])
    gave = [record["gave"] for record in records]
    if "bound" in records[0]:
        if not all(map(math.isfinite, gave)):
            return None
        wanted, bound = math.fsum(gave), sum(record["bound"] for record in records)
        return next((rank for rank, record in enumerate(records) if not abs(record["got"][0] - wanted) <= bound), None)
    wanted_words = gave if len(records[0]["got"]) == len(records) else [sum(gave) % 2**64]
    return next((rank for rank, record in enumerate(records) if record["got"] != wanted_words), None)


def wrong_message(every: Sequence[Messages]) -> tuple[int, int] | None:
    """Sender and receiver of the first messages that did not come as they were sent, by every rank's notes."""
    for receiver, noted in enumerate(every):
        for sender, came in noted["received"].items():
            sent = every[int(sender)]["sent"].get(str(receiver), {})
            if any(sent[group][0] == came[group][0] and sent[group] != came[group] for group in sent.keys() & came):
                return int(sender), receiver
    return None


def without_compared(every: Sequence[Messages], rank: int) -> Messages:
    """What a rank noted of messages, without the groups that are full at both of their ends."""
    left: Messages = {"sent": {}, "received": {}}
    for way, back in (("sent", "received"), ("received", "sent")):
        for other, noted in every[rank][way].items():  # type: ignore[literal-required]
            theirs = every[int(other)][back].get(str(rank), {})  # type: ignore[literal-required]
            left[way][other] = {  # type: ignore[literal-required]
                group: folded for group, folded in noted.items() if folded[0] < FOLDED or folded != theirs.get(group)
            }
    return left


def _fold(groups: dict[str, list[int]], number: int, word: int) -> None:
    """Adds the word of a message, counted from 1, to those of its group."""
    group = str((number - 1) // FOLDED)
    count, words = groups.get(group, (0, 0))
    groups[group] = [count + 1, (words + word) % 2**64]


def different(what: str, rank: int, host: str) -> str:
    """The line that ends a run whose ranks do not hold the same."""
    return (
        f"rank {rank} on {host} has other {what} than rank 0: somebody, or a faulty machine, changes what ranks hold "
        "or send; check that host, and connect the hosts by ssh or WireGuard (docs/security.md)"
    )


def _stream(key: bytes, count: int) -> bytes:
    return hashlib.shake_256(key).digest(count)
