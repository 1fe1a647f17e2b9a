"""The pool of backends: places for requests, slots of the backends, and who gets them next.

A request takes a place before its body is read, and has it to its end. Where all are taken, the owner who has most
requests without a backend loses the newest of them, or is the one who is refused: nobody fills the queue for others.

A request takes a slot of a backend and gives it back. Where several owners ask it counts as several of its owner's if
it is long: its prompt until that is read, and its answer, as long as this owner's longest was of late, to its end. What
is read for one makes all others slower, and so does a token behind many. It goes to the backend
that should finish it first by the measured speeds, so backends of unequal speed get unequal parts, among those that
have memory for it beside what they hold. Of those that wait,
the owner with the fewest requests under way is next, and of several the one who got a slot longest ago. While several
owners ask, each has at most a quarter of the slots, for what one runs makes all others slower; and who asks alone
leaves a quarter free for the next, who would have to wait for an answer's end. A request that its client left counts as
its owner's for a second more: its prompt was read for nobody, and the next is read anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

WINDOW_SECONDS = 1.0  # of work, between two measurements of a backend's speed
SMOOTHING = 0.3  # weight of the newest
SLOWEST = 1e-3  # tokens a second, of a backend that did nothing in a whole window
RECENT_SECONDS = 60.0  # after its last request that was not refused, for which an owner counts as one who asks
CHARGED_SECONDS = 1.0  # for which a request that its client left counts as its owner's, after its slot is free
SLOT_TOKENS = 1024  # of prompt and answer: with each as many it counts as one slot more of its owner's
FIRST_TOKENS = 4096  # expected of the answers of an owner of whom nothing is known
HALVING_SECONDS = 30.0  # in which half of what is expected of an owner's answers is forgotten
REMEMBERED = 4096  # owners
PART = 4  # a quarter of the slots, of one owner where several ask, and kept free where one of several does


class QueueFull(Exception):
    """There is no place; `retry_seconds`: when there should be one."""

    def __init__(self, retry_seconds: int):
        super().__init__(retry_seconds)
        self.retry_seconds = retry_seconds


@dataclass(eq=False)
class Backend:
    """One server: where it is, what it is doing, and its measured speed."""

    name: str
    capacity: int  # requests at once
    room_tokens: int | None = None  # of all its requests, as `fits` counts them; None: not known
    url: str = ""
    secret: str = ""
    is_up: bool = False
    held: list[int] = field(default_factory=list)  # tokens of each request on it, prompt and answer, at most
    restarts: int = 0
    tokens_per_second: float | None = None  # of all its requests together, while it had any
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    _since: float = 0.0
    _busy_seconds: float = 0.0
    _tokens: int = 0

    @property
    def in_flight(self) -> int:
        return len(self.held)

    def count(self, tokens: int, now: float) -> None:
        """Counts tokens that it generated, and the time since the last call."""
        if self.in_flight:
            self._busy_seconds += now - self._since
            self._tokens += tokens
        self._since = now
        if self._busy_seconds >= WINDOW_SECONDS:
            newest = self._tokens / self._busy_seconds
            before = newest if self.tokens_per_second is None else self.tokens_per_second
            self.tokens_per_second = before + SMOOTHING * (newest - before)
            self._busy_seconds, self._tokens = 0.0, 0


def choose(backends: Sequence[Backend], tokens: int = 0) -> Backend | None:
    """The backend with a free slot that has the least before it: requests in flight, the new one included, over speed.

    One that was never measured counts as the fastest, so that it is.

    Args:
        tokens: of the request, prompt and answer, for which there has to be memory.
    """
    fastest = max((backend.tokens_per_second or 0.0 for backend in backends), default=0.0)

    def cost(backend: Backend) -> tuple[float, int, bool]:
        speed = fastest if backend.tokens_per_second is None else backend.tokens_per_second
        return (backend.in_flight + 1) / max(speed, SLOWEST), backend.in_flight, backend.tokens_per_second is not None

    free = [one for one in backends if one.is_up and one.in_flight < one.capacity]
    return min((one for one in free if fits(one.room_tokens, one.held, tokens)), key=cost, default=None)


def fits(room_tokens: int | None, held: Sequence[int], tokens: int) -> bool:
    """Whether a request of so many tokens has room beside those that a backend holds; alone it has.

    They are rows of one batch, and each is as long as the longest (lib/serve/memory_room.py).

    Args:
        room_tokens: of all rows together; None: not known.
        held: tokens of each of the others, prompt and answer.
    """
    return room_tokens is None or not held or (len(held) + 1) * max(*held, tokens) <= room_tokens


def slots_of(tokens: int) -> int:
    """The slots that a request of so many tokens counts as, of its owner's."""
    return 1 + tokens // SLOT_TOKENS


@dataclass(eq=False)
class _Waiting:
    number: int
    owner: str
    slots: int
    tokens: int
    admitted: asyncio.Future[Backend]


@dataclass(eq=False)
class Place:
    """A request's place, from its headers to its end."""

    owner: str
    task: asyncio.Task[Any] | None
    has_backend: bool = False
    is_lost: bool = False  # to somebody who had fewer


class Pool:
    """The places and slots of all backends. Everything happens on one event loop."""

    def __init__(self, backends: Sequence[Backend], max_queue: int, clock: Callable[[], float] = time.monotonic):
        self.backends = tuple(backends)
        self.max_queue = max_queue
        self.clock = clock
        self.is_shared = False  # several owners may ask
        self._numbers = itertools.count(1)
        self._waiting: list[_Waiting] = []
        self._in_flight_of: Counter[str] = Counter()  # slots that its requests count as
        self._requests_of: Counter[str] = Counter()
        self._turns: dict[str, int] = {}  # by owner: when it got its last slot
        self._places: dict[Place, None] = {}  # the oldest first
        self._asked_at: dict[str, float] = {}  # by owner
        self._answer_tokens: dict[str, tuple[float, float]] = {}  # by owner: expected, and when
        self._mean_seconds = 1.0  # that a request occupies its slot

    @property
    def queue_length(self) -> int:
        return len(self._waiting)

    @property
    def is_ready(self) -> bool:
        return any(backend.is_up for backend in self.backends)

    @property
    def _slots(self) -> int:
        """Of all backends that are up."""
        return sum(backend.capacity for backend in self.backends if backend.is_up)

    @contextlib.contextmanager
    def place(self, owner: str) -> Iterator[Place]:
        """A place for a request of this task.

        Raises:
            QueueFull: there is none, or it was lost to an owner who has fewer.
        """
        if len(self._places) >= self.max_queue + self._slots:
            self._make_room(owner)
        place = Place(owner, asyncio.current_task())
        self._places[place] = None
        try:
            yield place
        except asyncio.CancelledError:
            if place.is_lost and place.task is not None and place.task.uncancel() == 0:
                raise QueueFull(self.retry_seconds()) from None
            raise
        finally:
            self._places.pop(place, None)

    def _make_room(self, owner: str) -> None:
        """Takes the newest request without a backend from the owner who has most of them.

        Raises:
            QueueFull: nobody has more than this owner would have.
        """
        waiting = [place for place in self._places if not place.has_backend]
        counts = Counter(place.owner for place in waiting)
        greedy, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
        if count <= counts[owner] + 1:
            raise QueueFull(self.retry_seconds())
        victim = next(place for place in reversed(waiting) if place.owner == greedy)
        del self._places[victim]
        victim.is_lost = True
        if victim.task is not None:
            victim.task.cancel()

    async def take(self, owner: str, queue_seconds: float, slots: int = 1, tokens: int = 0) -> Backend:
        """A slot, at once or after waiting for one.

        Args:
            slots: that it counts as, of its owner's (`slots_of`).
            tokens: that it may have, prompt and answer.

        Raises:
            TimeoutError: none became free in queue_seconds.
        """
        self._asked_at[owner] = self.clock()
        one = _Waiting(next(self._numbers), owner, slots, tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._admit_waiting()
        if one.admitted.done():
            return one.admitted.result()
        try:
            async with asyncio.timeout(queue_seconds):
                return await asyncio.shield(one.admitted)
        except BaseException:
            if one.admitted.done():  # admitted at the moment when it gave up
                self.give_back(one.admitted.result(), owner, None, slots=slots, tokens=tokens)
            else:
                self._waiting.remove(one)
                one.admitted.cancel()
                self._admit_waiting()  # there may be room for those behind it
            raise

    def expected_tokens(self, owner: str, most: int) -> int:
        """How long an owner's next answer may become, by those before it. most: that it asks for."""
        if owner not in self._answer_tokens:
            self.has_answered(owner, FIRST_TOKENS)
        tokens, at = self._answer_tokens[owner]
        return min(most, int(tokens * 0.5 ** ((self.clock() - at) / HALVING_SECONDS)))

    def has_answered(self, owner: str, tokens: int) -> None:
        """An answer of so many tokens ended, or was left after as many."""
        now = self.clock()
        before, at = self._answer_tokens.pop(owner, (0.0, now))
        self._answer_tokens[owner] = max(float(tokens), before * 0.5 ** ((now - at) / HALVING_SECONDS)), now
        if len(self._answer_tokens) > REMEMBERED:
            del self._answer_tokens[next(iter(self._answer_tokens))]

    def give_back(
        self,
        backend: Backend,
        owner: str,
        seconds: float | None,
        is_abandoned: bool = False,
        slots: int = 1,
        tokens: int = 0,
    ) -> None:
        """A slot is free again, after `seconds` of work (None: it was never used).

        Args:
            is_abandoned: its answer was for nobody. Where several owners may ask, it is charged for longer.
            slots: that it counted as.
            tokens: that it was taken for.
        """
        backend.count(0, self.clock())
        backend.held.remove(tokens)
        if seconds is not None:
            self._mean_seconds += 0.1 * (seconds - self._mean_seconds)
        if is_abandoned and self.is_shared:
            asyncio.get_running_loop().call_later(CHARGED_SECONDS, self._discharge, owner, slots)
            self._admit_waiting()
        else:
            self._discharge(owner, slots)

    def has_read(self, owner: str, slots: int, left: int = 1) -> None:
        """A prompt is read: its request, which counted as so many slots, counts as those that are left from now on."""
        self._in_flight_of[owner] -= slots - left
        self._admit_waiting()

    def _discharge(self, owner: str, slots: int) -> None:
        """A request that counts as so many slots is this owner's no more."""
        self._asked_at[owner] = self.clock()
        self._in_flight_of[owner] -= slots
        self._requests_of[owner] -= 1
        if not self._requests_of[owner]:
            del self._in_flight_of[owner], self._requests_of[owner]
        self._admit_waiting()

    def set_up(self, backend: Backend, is_up: bool) -> None:
        """Marks a backend as up or down. Requests under way on it notice by themselves."""
        backend.is_up = is_up
        if is_up:
            backend.failed.clear()
            self._admit_waiting()
        else:
            backend.failed.set()

    def retry_seconds(self) -> int:
        """When a request that is refused now should find a place, in whole seconds, 1 to 60."""
        return max(1, min(60, math.ceil((len(self._waiting) + 1) * self._mean_seconds / (self._slots or 1))))

    def _admit_waiting(self) -> None:
        while self._waiting and choose(self.backends) is not None:
            may = {owner for owner in {one.owner for one in self._waiting} if self._may_have(owner)}
            ready = [one for one in self._waiting if one.owner in may]
            if not ready:
                return
            one = min(ready, key=self._turn)
            backend = choose(self.backends, one.tokens)
            if backend is None:  # for want of memory: shorter ones that came later would have it wait for ever
                return
            self._waiting.remove(one)
            self._admit(backend, one)
            one.admitted.set_result(backend)

    def _turn(self, one: _Waiting) -> tuple[int, int, int]:
        """The least comes next. With one slot all have none under way, and only the last turn tells owners apart."""
        return self._in_flight_of[one.owner], self._turns.get(one.owner, 0), one.number

    def _may_have(self, owner: str) -> bool:
        """Whether an owner may have one request more on a backend, whatever that counts as."""
        if not self.is_shared:
            return True
        since = self.clock() - RECENT_SECONDS
        self._asked_at = {one: at for one, at in self._asked_at.items() if at > since or self._in_flight_of[one]}
        part = self._slots // PART
        if len(self._asked_at) < 2:
            return self._requests_of[owner] < self._slots - part
        return self._in_flight_of[owner] < max(1, part)

    def _admit(self, backend: Backend, one: _Waiting) -> None:
        backend.count(0, self.clock())
        backend.held.append(one.tokens)
        self._in_flight_of[one.owner] += one.slots
        self._requests_of[one.owner] += 1
        self._turns[one.owner] = next(self._numbers)
