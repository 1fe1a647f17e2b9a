"""Who may stay connected, and how fast refusals go out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.serve.connections import (
    AT_ONCE,
    LONGEST_DELAY_SECONDS,
    PROBE_DELAY_SECONDS,
    Connection,
    Connections,
    Pace,
)
from lib.system.network import network_of


def taken(connections: Connections, closed: list[str], name: str, address: str = "a") -> Connection:
    one = connections.take(address)
    assert one is not None
    one.close = lambda: closed.append(name)
    return one


def test_a_new_connection_takes_the_place_of_the_longest_idle_stranger() -> None:
    connections, closed = Connections(4, 4), list[str]()
    known, busy, first, second = (taken(connections, closed, name) for name in ("known", "busy", "first", "second"))
    connections.recognise(known, "alice")
    connections.is_idle(known)
    connections.is_busy(busy)
    connections.is_idle(first)  # again, and so the youngest
    for number in range(5):
        taken(connections, closed, str(number))
    assert closed == ["second", "first", "0", "1", "2"] and connections.count == 4
    assert second.is_over and not known.is_over and not busy.is_over


def test_somebody_with_a_key_goes_last_and_who_is_served_stays() -> None:
    connections, closed = Connections(2, 2), list[str]()
    for name in ("known", "other"):
        one = taken(connections, closed, name)
        connections.recognise(one, "alice")
        connections.is_idle(one)
    taken(connections, closed, "stranger")
    taken(connections, closed, "stranger again")
    assert closed == ["known", "stranger"]
    connections, closed = Connections(2, 2), []
    for name in ("a", "b"):
        connections.is_busy(taken(connections, closed, name))
    assert connections.take("c") is None and not closed and connections.count == 2


def test_who_says_nothing_closes_none_in_the_middle_of_its_handshake() -> None:
    connections, closed = Connections(8, 8), list[str]()
    for name in ("handshake", "another"):
        connections.hear(taken(connections, closed, name))
    for number in range(50):
        taken(connections, closed, str(number))
    assert closed == [str(number) for number in range(44)] and connections.count == 8
    for number in range(50):
        connections.hear(taken(connections, closed, f"talks {number}"))
    assert closed[44:48] == ["44", "45", "46", "handshake"], "until they have more than half of the places"


def test_no_key_keeps_so_many_that_a_newcomer_is_closed_before_it_asks() -> None:
    """New ones get half of its places, from the keys that have most of them."""
    connections, closed = Connections(200, 100), list[str]()
    for owner in ("alice", *["greedy"] * 50, *["greedier"] * 49):
        one = taken(connections, closed, owner)
        connections.recognise(one, owner)
        connections.is_idle(one)
    for number in range(80):
        taken(connections, closed, f"new {number}")
    assert sorted(closed[:50]) == ["greedier"] * 24 + ["greedy"] * 26
    assert closed[50:] == [f"new {number}" for number in range(30)]  # the longest idle of their own half


def test_an_address_has_its_part_and_who_has_most_makes_room() -> None:
    connections, closed = Connections(10, 6), list[str]()
    for number in range(9):
        taken(connections, closed, f"a{number}")
    assert closed == ["a0", "a1", "a2"]
    for number in range(4):
        taken(connections, closed, f"b{number}", "b")
    taken(connections, closed, "c", "c")
    assert closed[3:] == ["a3"] and connections.count == 10
    # The IPv6 addresses of one customer are one address.
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1%eth0") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1" and network_of("") == ""
    # Neighbours on a link are many machines of one network.
    assert network_of("fe80::1%eth0") == "fe80::1" != network_of("fe80::2%eth0") and network_of("::1") == "::1"


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("tibrlh"), st.integers(0, 30)), max_size=80))
def test_every_connection_is_counted_once_whatever_happens(acts: list[tuple[str, int]]) -> None:
    connections, all_of_them = Connections(6, 4), list[Connection]()

    def known(one: Connection) -> None:
        connections.recognise(one, "alice")

    for act, number in acts:
        if act == "t":
            one = connections.take("abc"[number % 3])
            all_of_them += [one] if one else []
        elif all_of_them:
            one = all_of_them[number % len(all_of_them)]
            acts_of = {"i": connections.is_idle, "b": connections.is_busy, "l": connections.leave, "r": known}
            (acts_of | {"h": connections.hear})[act](one)
        there = [one for one in all_of_them if not one.is_over]
        assert connections.count == len(there) <= 6
        assert all(sum(one.address == address for one in there) <= 4 for address in "abc")
        for address, here in connections._addresses.items():
            assert here.known == sum(one.address == address and one.owner == "alice" for one in there)
    for one in all_of_them:
        connections.leave(one)
    assert connections.count == 0 and not connections._addresses


def test_refusals_come_at_once_and_then_one_after_the_other() -> None:
    now: list[Any] = [100.0]
    pace = Pace(clock=lambda: now[0])
    delays = [pace.delay_seconds("a") for _ in range(AT_ONCE + 100)]
    assert delays[:AT_ONCE] == [0.0] * AT_ONCE and delays[AT_ONCE] == pytest.approx(0.05)
    assert max(delays) == LONGEST_DELAY_SECONDS and delays == sorted(delays)
    assert pace.delay_seconds("b") == 0.0
    now[0] += 60.0
    assert pace.delay_seconds("a") == 0.0


def test_a_load_balancer_is_answered_whoever_else_asks_from_its_address() -> None:
    """A probe a second at once; beside a flood from the same address within what a probe waits."""
    now: list[Any] = [100.0]
    probes, flooded = (Pace(PROBE_DELAY_SECONDS, lambda: now[0]) for _ in range(2))
    for _ in range(100):
        now[0] += 1.0
        assert probes.delay_seconds("10.0.0.1") == 0.0
        assert max(flooded.delay_seconds("10.0.0.1") for _ in range(200)) <= PROBE_DELAY_SECONDS


def test_silent_connections_from_many_addresses_close_none_over_which_a_key_came() -> None:
    """Each from an address of its own, and more of them than there are places: one takes another's."""
    connections, closed = Connections(20, 20), list[str]()
    for number in range(4):
        known = taken(connections, closed, f"known {number}", "home")
        connections.recognise(known, "alice")
        connections.is_idle(known)
    for number in range(100):
        taken(connections, closed, f"stranger {number}", f"10.0.0.{number}")
    assert not [name for name in closed if name.startswith("known")] and len(closed) == 84
    assert closed[:2] == ["stranger 0", "stranger 1"], "the longest idle first"
    newcomer = taken(connections, closed, "new at home", "home")
    for number in range(200):
        taken(connections, closed, f"stranger {number}", f"10.0.1.{number}")
    assert not newcomer.is_over, "a key comes from there"
    for number in range(20):
        taken(connections, closed, f"silent at home {number}", "home")
    fresh = taken(connections, closed, "fresh", "elsewhere")
    taken(connections, closed, "one more", "somewhere")
    assert not fresh.is_over
    assert sum("at home" in name for name in closed) >= 16, "for as many as keys come from there, and no more"
