"""Who may stay connected: counted from the first packet on, by address, and the longest idle one makes room.

A connection is idle while nobody works for it: before its TLS handshake, its headers or its body's end, between two
requests, and after a refusal. So where there are too many, a new one takes the place of an idle one: where its address
has too many, of that address, else of any. Those over which no key came yet and those over which one did have half of
the idle ones each: a flood without a key, from however many addresses, closes none of the others beyond that, and no
key keeps so many that new ones are closed before they can ask. Of those without a key, in turn, half are such as said
nothing yet, and half such as did: new ones that say nothing close none in the middle of its handshake. Of the half that
has more it is the longest idle one: of the address that has most, beyond as many as keys came from there at the time;
or of the key that has most.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lib.system.network import network_of

REFUSAL_SECONDS = 0.05  # between two refusals, or answers that take no place, of the same key or address
STRANGERS_SECONDS = 0.01  # the same of all addresses together: one seldom gets as many
AT_ONCE = 50  # that do not wait
LONGEST_DELAY_SECONDS = 2.0
PROBE_DELAY_SECONDS = 0.5  # at most, of an answer to a load balancer's probe, which gives up after a second or more
REMEMBERED = 4096  # keys and addresses
SILENT = " "  # idle in the place of an owner: nothing came over it yet; no key has such a name


@dataclass(eq=False)
class Connection:
    """One connection, from its first packet to its last."""

    address: str
    close: Callable[[], object] = lambda: None  # at once, whatever is on its way
    owner: str = SILENT  # of the key that came over it; of none yet: empty, once anything did
    idle_as: str | None = None  # the owner with whose idle ones it counts; None: somebody works for it
    turn: int = 0  # when it became idle, as a number that grows
    is_over: bool = False


@dataclass(eq=False)
class _Address:
    """The connections of one address; of the idle ones by owner, the longest idle first."""

    count: int = 0
    known: int = 0  # of them, those over which a key came
    idle: dict[str, OrderedDict[Connection, None]] = field(default_factory=dict)


class Connections:
    """All connections of a gateway.

    Args:
        most: in all.
        most_of_address: of one address.
    """

    def __init__(self, most: int, most_of_address: int):
        self.most, self.most_of_address = most, most_of_address
        self.count = 0
        self._turns = itertools.count()
        self._addresses: dict[str, _Address] = {}

    def is_full(self, address: str) -> bool:
        """Whether a new one from there takes the place of another one, or has none."""
        here = self._addresses.get(network_of(address))
        return self.count >= self.most or (here is not None and here.count >= self.most_of_address)

    def take(self, address: str) -> Connection | None:
        """A new connection, idle at first, for which another one may be closed; None where all are at work."""
        address = network_of(address)
        here = self._addresses.get(address)
        if here is not None and here.count >= self.most_of_address and not self._make_room([here]):
            return None
        if self.count >= self.most and not self._make_room(self._addresses.values()):
            return None
        connection = Connection(address)
        self.count += 1
        here = self._addresses.setdefault(address, _Address())
        here.count += 1
        self.is_idle(connection)
        return connection

    def is_idle(self, connection: Connection) -> None:
        """Notes that nobody works for it, from now on."""
        if not connection.is_over:
            self.is_busy(connection)
            connection.idle_as, connection.turn = connection.owner, next(self._turns)
            self._addresses[connection.address].idle.setdefault(connection.owner, OrderedDict())[connection] = None

    def hear(self, connection: Connection) -> None:
        """Notes that something came over it, of nobody who is known."""
        self.recognise(connection, "")
        self.is_idle(connection)

    def recognise(self, connection: Connection, owner: str) -> None:
        """Notes whose key came over it."""
        if not connection.is_over:
            self._addresses[connection.address].known += _is_known(owner) - _is_known(connection.owner)
        connection.owner = owner

    def is_busy(self, connection: Connection) -> None:
        """Notes that somebody works for it."""
        if connection.idle_as is None:
            return
        idle = self._addresses[connection.address].idle
        del idle[connection.idle_as][connection]
        if not idle[connection.idle_as]:
            del idle[connection.idle_as]
        connection.idle_as = None

    def leave(self, connection: Connection) -> None:
        """Notes that it is over; once more changes nothing."""
        if connection.is_over:
            return
        self.is_busy(connection)
        connection.is_over = True
        here = self._addresses[connection.address]
        self.count -= 1
        here.count -= 1
        here.known -= _is_known(connection.owner)
        if not here.count:
            del self._addresses[connection.address]

    def _make_room(self, places: Iterable[_Address]) -> bool:
        """Closes the longest idle connection of these addresses: without a key, or of the key that has most."""
        strangers: dict[str, list[tuple[bool, OrderedDict[Connection, None]]]] = {SILENT: [], "": []}
        known: dict[str, list[OrderedDict[Connection, None]]] = {}
        for here in places:
            for owner, ones in here.idle.items():
                if _is_known(owner):
                    known.setdefault(owner, []).append(ones)
                else:
                    strangers[owner].append((len(ones) > here.known, ones))
        counts = {owner: sum(map(len, groups)) for owner, groups in known.items()}
        unknown = {owner: sum(len(ones) for _, ones in groups) for owner, groups in strangers.items()}
        if sum(counts.values()) > sum(unknown.values()):
            fullest = known[max(counts, key=lambda owner: counts[owner])]
        else:
            more = strangers[max(unknown, key=lambda owner: unknown[owner])]
            first = max(((has_more, len(ones)) for has_more, ones in more), default=None)
            fullest = [ones for has_more, ones in more if (has_more, len(ones)) == first]
        if not fullest:
            return False
        longest = min((next(iter(ones)) for ones in fullest), key=lambda one: one.turn)
        self.leave(longest)
        longest.close()
        return True


def _is_known(owner: str) -> bool:
    return owner not in ("", SILENT)


class Pace:
    """How fast refusals go out, and answers that take no place: the first at once, and then each later than the one
    before, so that who asks for nothing else is as slow as that, over each of its connections.

    Args:
        longest_seconds: that one waits.
    """

    def __init__(self, longest_seconds: float = LONGEST_DELAY_SECONDS, clock: Callable[[], float] = time.monotonic):
        self._longest, self._clock = longest_seconds, clock
        self._free_at: OrderedDict[str, float] = OrderedDict()  # by who it is; in the past: some are still free

    def delay_seconds(self, who: str, seconds: float = REFUSAL_SECONDS) -> float:
        """How long the next refusal has to wait. seconds: between two of them."""
        now = self._clock()
        free_at = max(self._free_at.pop(who, 0.0), now - AT_ONCE * seconds) + seconds
        self._free_at[who] = min(free_at, now + self._longest)
        while len(self._free_at) > REMEMBERED:
            self._free_at.popitem(last=False)
        return max(0.0, self._free_at[who] - now)
