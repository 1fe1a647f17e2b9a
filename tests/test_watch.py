"""Faults at their limits, and in which words they are told; tests/test_launch.py tells them apart, tests/test_recovery.py meets them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.launch.rank_faults import (
    Fault,
    HostState,
    RankState,
    common_wait_seconds,
    cut_between,
    diagnose,
    exit_status,
    stragglers,
)


def found(ranks: list[RankState], hosts: list[HostState] | None = None) -> Fault | None:
    """At 100 s, with limits of 10 s for silence and 30 s for a wait."""
    seen = {host.name: host for host in hosts or [HostState("a", 100.0), HostState("b", 100.0)]}
    return diagnose(100.0, seen, ranks, silent_seconds=10, wedged_seconds=30)


def test_a_limit_is_a_fault_only_beyond_it() -> None:
    ranks = [RankState(0, "a", beats=True), RankState(1, "b", beats=True)]
    for heard, kind in ((90.0, None), (89.9, "silent")):
        fault = found(ranks, [HostState("a", 100.0), HostState("b", heard)])
        assert (fault and fault.kind) == kind
    for since, kind in ((90.0, None), (89.9, "stopped")):
        fault = found([ranks[0], RankState(1, "b", stopped_since=since)])
        assert (fault and fault.kind) == kind
    for since, kind in ((70.0, None), (69.9, "late")):
        fault = found([RankState(0, "a", waiting="the sum", waiting_since=since, beats=True), ranks[1]])
        assert (fault and fault.kind) == kind


@pytest.mark.parametrize(
    ("rank", "status", "told"),
    [
        (1, -9, "rank 1 on b was ended by SIGKILL"),
        (1, 139, "rank 1 on b was ended by SIGSEGV"),
        (1, 3, "rank 1 on b ended with status 3"),
        (1, 128, "rank 1 on b ended with status 128"),
        (-1, 213, "mpirun on b ended with status 213"),
    ],
)
def test_a_death_is_told_as_it_was(rank: int, status: int, told: str) -> None:
    fault = found([RankState(0, "a"), RankState(rank, "b", status=status)])
    assert fault == Fault("died", told, ("b",))


def test_every_death_is_told_and_every_host_of_one_blamed() -> None:
    fault = found([RankState(0, "a", status=7), RankState(1, "b", status=-9), RankState(2, "c")])
    assert fault and fault.kind == "died" and set(fault.hosts) == {"a", "b"}
    assert fault.message == "rank 0 on a ended with status 7; rank 1 on b was ended by SIGKILL"


def test_who_only_lost_another_rank_is_not_told_of() -> None:
    noticed = RankState(0, "a", status=1, lost_another=True)
    assert found([noticed, RankState(1, "b", status=1, cause="why")]) == Fault(
        "died", "rank 1 on b ended with status 1; rank 1 on b: why", ("b",)
    )
    assert found([noticed]) == Fault("died", "rank 0 on a ended with status 1", ("a",)), "nobody else is known of yet"


def test_a_host_is_told_with_its_ranks_and_the_surest_fault_first() -> None:
    silent, closed = HostState("b", 80.0), HostState("b", 80.0, closed=True)
    ranks = [RankState(0, "a"), RankState(1, "b", stopped_since=0.0), RankState(2, "b")]
    lost, said = found(ranks, [HostState("a", 100.0), closed]), found(ranks, [HostState("a", 100.0), silent])
    assert lost and lost.message.startswith("the connection to b ended (rank 1, 2)") and lost.hosts == ("b",)
    assert said and said.message.startswith("b (rank 1, 2) has said nothing for 20.0 s")
    assert said.kind == "silent", "before the rank that stands still"
    done = [RankState(0, "a"), RankState(1, "b", status=0), RankState(2, "b", status=0)]
    assert found(done, [HostState("a", 100.0), closed]) is None, "nobody of it is left to wait for"


def test_a_wait_is_told_by_the_rank_that_waits_longest() -> None:
    waits = [RankState(i, "ab"[i], waiting="x", waiting_since=since, beats=True) for i, since in ((0, 95.0), (1, 60.0))]
    fault = found(waits)
    assert fault and fault.kind == "wedged" and "40.0 s for x" in fault.message and fault.hosts == ("a", "b")
    late = found([*waits, RankState(3, "c", beats=True), RankState(2, "a", beats=True), RankState(4, "c", status=0)])
    assert late and late.kind == "late" and late.hosts == ("a", "c")
    assert late.message.startswith("rank 1 on b has waited for 40.0 s for x: rank 3 on c, rank 2 on a did not come")
    # Who does not tell what it does may be anything but ours: it is not blamed.
    wedged = found([*waits, RankState(2, "c")])
    assert wedged and wedged.kind == "wedged"
    waits[0].waiting = "y"
    differing = found(waits)
    assert differing and "different things (x; y)" in differing.message


def test_stragglers_are_those_for_whom_another_waits() -> None:
    waiting = RankState(0, "a", waiting="x", waiting_since=80.0, beats=True)
    late, mute, done = RankState(1, "b", beats=True), RankState(2, "b"), RankState(3, "b", status=0, beats=True)
    everyone = [waiting, late, mute, done]
    assert stragglers(100.0, everyone, 19.9) == [late]
    assert stragglers(100.0, everyone, 20.0) == [] == stragglers(100.0, [late, mute], 0.0)
    ended = RankState(4, "a", status=0, waiting="x", waiting_since=0.0)
    assert stragglers(100.0, [late, ended], 20.0) == [], "who has ended waits no more"


def test_all_wait_only_as_long_as_the_last_that_came() -> None:
    waits = [RankState(i, "a", waiting="x", waiting_since=since) for i, since in ((0, 80.0), (1, 95.0))]
    assert common_wait_seconds(100.0, waits) == 5.0
    done, working = RankState(2, "b", status=0, waiting_since=99.0), RankState(3, "b", waiting_since=0.0)
    assert common_wait_seconds(100.0, [*waits, done]) == 5.0
    assert common_wait_seconds(100.0, [*waits, working]) == 0.0 == common_wait_seconds(100.0, [done])
    fault = cut_between(["a", "b", "c"], ["b"], 5.0)
    assert fault.kind == "wedged" and fault.hosts == ("b",)
    assert fault.message.startswith("all ranks have waited for 5.0 s, and b and a, c do not reach each other")


@given(
    st.lists(st.tuples(st.integers(-1, 5), st.sampled_from([None, 0]), st.floats(0, 200), st.booleans()), max_size=6)
)
def test_more_patience_never_finds_more(world: list[tuple[int, int | None, float, bool]]) -> None:
    ranks = [
        RankState(rank, f"h{rank % 3}", status=status, waiting="x" if waits else None, waiting_since=since, beats=True)
        for rank, status, since, waits in world
    ]
    hosts = {f"h{i}": HostState(f"h{i}", 100.0 + 10 * i) for i in range(3)}
    kinds = [diagnose(200.0, hosts, ranks, limit, limit) is not None for limit in (1, 30, 90, 300)]
    assert kinds == sorted(kinds, reverse=True)


def test_exit_statuses_are_a_shells() -> None:
    assert [exit_status(status) for status in (0, 1, 255, -1, -9)] == [0, 1, 255, 129, 137]
