"""Whose request a backend takes in next: the owner's who had a turn longest ago, of those who owe no time.

To take a request in costs everybody who is answered meanwhile: its row joins a batch, is read, and leaves it again,
which is more than a token where prompt and answer are short. What the requests of one owner took of that, all owners
have in turn: while others' are under way, that owner's next one waits until tokens took as long. Nobody waits alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

MOST_OWED_SECONDS = 1.0  # by one owner, whatever its requests took
REMEMBERED = 4096  # owners


@dataclass
class Intake:
    """The requests of all owners that wait, what is owed, and whose are under way."""

    under_way: dict[int, str] = field(default_factory=dict)  # owners, by the batch's numbers of their rows
    _waiting: dict[str, deque[Any]] = field(default_factory=dict)  # by owner
    _owed_seconds: dict[str, float] = field(default_factory=dict)
    _turns: dict[str, int] = field(default_factory=dict)  # when each owner had its last one
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def put(self, owner: str, request: Any) -> None:
        """One more waits."""
        self._waiting.setdefault(owner, deque()).append(request)

    @property
    def is_due(self) -> bool:
        """Whether one that waits may be taken in now."""
        return self._next_owner() is not None

    def take(self) -> Any | None:
        """The next request, which waits no more; None where none may be taken in now."""
        owner = self._next_owner()
        if owner is None:
            return None
        self._turns.pop(owner, None)
        self._turns[owner] = next(self._numbers)
        while len(self._turns) > REMEMBERED:
            del self._turns[next(iter(self._turns))]
        request = self._waiting[owner].popleft()
        if not self._waiting[owner]:
            del self._waiting[owner]
        return request

    def _next_owner(self) -> str | None:
        present = {*self.under_way.values(), *self._waiting}
        is_alone = len(present) < 2 or not self.under_way
        may = [owner for owner in self._waiting if is_alone or owner not in self._owed_seconds]
        return min(may, key=lambda owner: self._turns.get(owner, 0), default=None)

    def charge(self, owners: Collection[str], seconds: float) -> None:
        """Notes what the rows of these owners took together; an owner is named once for each row."""
        for owner in owners:
            owed = self._owed_seconds.get(owner, 0.0) + seconds / len(owners)
            self._owed_seconds[owner] = min(MOST_OWED_SECONDS, owed)

    def pay(self, seconds: float) -> None:
        """Takes as much off what every owner owes."""
        owed = {owner: one - seconds for owner, one in self._owed_seconds.items() if one > seconds}
        self._owed_seconds = owed
