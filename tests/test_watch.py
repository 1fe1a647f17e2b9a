"""Faults at their limits, and in which words they are told; tests/test_launch.py tells them apart, tests/test_recovery.py meets them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib.launch.agent_link import Link
from lib.launch.agent_messages import Beat
from lib.launch.attempt import Attempt, Outcome
from lib.launch.patience import Load, Punctuality, silence_limit, work_limit
from lib.launch.rank_console import Console
from lib.launch.rank_faults import (
    Fault,
    HostState,
    RankState,
    Sign,
    common_wait_seconds,
    cut_between,
    cut_links,
    cut_off,
    diagnose,
    exit_status,
    holders_of_newer,
    stragglers,
)
from lib.launch.supervisor import Unfit, is_hopeless
from lib.launch.world_state import WorldState

from lib.distributed import heartbeat
from lib.launch import reachable_hosts
from lib.launch.hostfile import Host
from lib.launch.job import Job

RANKS = ((0, "a"), (1, "b"))


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


# ---- Limits that follow the load (lib/launch/patience.py)


def heard(lateness: list[float], every_seconds: float = 0.5) -> Punctuality:
    """A host whose messages came so late one after the other, up to 100 s."""
    moments = [100.0 - sum(every_seconds + late for late in lateness[place:]) for place in range(len(lateness) + 1)]
    punctuality = Punctuality(every_seconds, moments[0])
    for moment in moments[1:]:
        punctuality.note(moment)
    return punctuality


def test_a_punctual_host_has_the_users_limit_and_a_late_one_more() -> None:
    assert silence_limit(10.0, heard([0.0] * 50).usual_lateness(100.0)) == 10.0
    assert silence_limit(10.0, heard([-0.4, 0.04] * 25).usual_lateness(100.0)) == 10.0, "by less than anybody sees"
    assert silence_limit(10.0, heard([0.0, 2.0, 3.0, 1.5, 0.0]).usual_lateness(100.0)) == pytest.approx(14.5)
    assert silence_limit(10.0, 1000.0) == 50.0, "a host that dies slowly is given up as well"


def test_one_or_two_long_silences_are_no_load() -> None:
    """A cable that was out for a while must not make the next loss be noticed later."""
    assert heard([0.0] * 30 + [9.0, 8.0] + [0.0] * 30).usual_lateness(100.0) == 0.0


def test_lateness_is_forgotten_after_a_minute() -> None:
    punctuality = heard([2.0, 2.0, 2.0])
    assert punctuality.usual_lateness(100.0) == 2.0 and punctuality.usual_lateness(150.0) == 2.0
    assert punctuality.usual_lateness(165.1) == 0.0


def test_who_did_not_look_blames_nobody() -> None:
    punctuality = heard([0.0] * 5)
    punctuality.excuse(30.0)  # a laptop's lid was closed for so long
    punctuality.note(130.2)
    assert punctuality.usual_lateness(131.0) == 0.0


def test_work_may_take_as_much_longer_as_more_processes_want_a_core() -> None:
    assert [work_limit(30.0, load) for load in (0.0, 1.0, 2.5, 1000.0)] == [30.0, 30.0, 75.0, 300.0]


@given(st.lists(st.floats(0, 5), max_size=20), st.floats(0, 5), st.floats(1, 100))
def test_more_lateness_never_makes_a_limit_shorter(lateness: list[float], more: float, limit: float) -> None:
    before, after = (heard(one, 0.5).usual_lateness(100.0) for one in (lateness, [*lateness, more]))
    assert limit <= silence_limit(limit, before) <= silence_limit(limit, max(before, after)) <= 5 * limit


def test_a_busy_host_is_given_up_later_and_a_dead_one_beside_it_in_time() -> None:
    busy, idle = HostState("a", 88.0, usual_lateness=1.0, load=4.0), HostState("b", 88.0)
    ranks = [RankState(0, "a", beats=True), RankState(1, "b", beats=True)]
    fault = found(ranks, [busy, idle])
    assert fault and fault.kind == "silent" and fault.hosts == ("b",)
    assert found(ranks, [busy, HostState("b", 100.0)]) is None
    assert found(ranks, [HostState("a", 86.9, usual_lateness=1.0), HostState("b", 100.0)]) is not None
    passing = [RankState(0, "a", beats=True, passing="the step", passing_since=50.0), ranks[1]]
    assert found(passing, [HostState("a", 100.0, load=2.0), HostState("b", 100.0)]) is None
    hung = found(passing)
    assert hung and hung.kind == "hung"


def test_load_is_how_many_want_a_core() -> None:
    load = Load()
    assert 0 <= load.look() < 1000 and load.cores >= 1


# ---- What the systems of hosts know of each other, whatever their processes do


def test_a_host_whose_system_answers_is_not_silent_yet() -> None:
    """Its agent gets no core, or what it says waits on a slow link behind what its rank sends."""
    ranks = [RankState(0, "a", beats=True), RankState(1, "b", beats=True)]
    assert found(ranks, [HostState("a", 100.0), HostState("b", 80.0, last_sign=99.0)]) is None
    gone = found(ranks, [HostState("a", 100.0), HostState("b", 80.0, last_sign=89.0)])
    assert gone and gone.kind == "silent" and gone.hosts == ("b",)
    stopped = found(ranks, [HostState("a", 100.0), HostState("b", 49.0, last_sign=99.0)])
    assert stopped and stopped.kind == "silent", "nobody would end its ranks"
    far = HostState("b", 80.0, last_sign=89.0, round_trip_seconds=1.5)
    assert found(ranks, [HostState("a", 100.0), far]) is None, "its answer is under way"
    far.last_message = 49.0
    assert found(ranks, [HostState("a", 100.0), far]) is not None


def test_words_that_a_slow_link_keeps_back_get_time_also_where_silence_gets_little() -> None:
    ranks = [RankState(0, "a", beats=True), RankState(1, "b", beats=True)]
    for last_message, kind in ((51.0, None), (49.0, "silent")):
        hosts = {"a": HostState("a", 100.0), "b": HostState("b", last_message, last_sign=99.5)}
        fault = diagnose(100.0, hosts, ranks, silent_seconds=1, wedged_seconds=30)
        assert (fault and fault.kind) == kind


def heard_of(rank: int, host: str, **signs: Sign) -> RankState:
    """What a rank's host knows of others, by their ranks: `r1=...`."""
    heard = {int(name[1:]): sign for name, sign in signs.items()}
    return RankState(rank, host, beats=True, heard=heard, heard_at=100.0)


def test_a_link_is_cut_where_a_system_calls_in_vain_for_longer_than_its_round_trips_take() -> None:
    def links(sign: Sign, *others: RankState) -> set[frozenset[str]]:
        return cut_links(100.0, [heard_of(0, "a", r1=sign), RankState(1, "b"), *others], limit_seconds=5.0)

    both = {frozenset("ab")}
    assert links(Sign(94.0, 94.0, 0.1, 2)) == both
    assert links(Sign(94.0, 94.0, 0.1, 1)) == set(), "one call may be lost"
    assert links(Sign(96.0, 96.0, 0.1, 2)) == set() == links(Sign(94.0, 94.0, 1.5, 2)), "not for long enough"
    slow = heard_of(2, "c", r1=Sign(99.0, 99.0, 1.5, 0))
    assert links(Sign(94.0, 94.0, 0.1, 2), slow) == set(), "another one knows how slow b is"
    late = heard_of(0, "a", r1=Sign(94.0, 94.0, 0.1, 2))
    late.heard_at = 98.0  # on a slow link: nobody has said what came since
    assert cut_links(100.0, [late, RankState(1, "b")], 5.0) == set()
    late.heard_at = 99.0
    assert cut_links(100.0, [late, RankState(1, "b")], 5.0) == both
    beside = heard_of(0, "a", r1=Sign(0.0, 0.0, 0.0, 9))
    assert cut_links(100.0, [beside, RankState(1, "a")], 5.0) == set(), "on one host"
    beside.status = 0
    assert cut_links(100.0, [beside, RankState(1, "b")], 5.0) == set(), "it has ended"


def test_a_wait_during_which_bytes_move_is_on_a_slow_link_and_ends() -> None:
    """One rank has its last bytes of a merge, and waits for the next thing already, while another gets them."""
    ranks = [RankState(i, "ab"[i], waiting=what, waiting_since=60.0, beats=True) for i, what in enumerate("xy")]
    for data_at, kind in ((69.9, "wedged"), (70.0, None)):
        ranks[1].heard = {0: Sign(100.0, data_at, 1.0, 0)}
        fault = found(ranks)
        assert (fault and fault.kind) == kind


def test_who_is_cut_off_has_most_of_the_links_that_are_cut() -> None:
    def without(*links: str) -> list[str]:
        return cut_off(["a", "b", "c", "d"], {frozenset(link) for link in links})

    assert without() == []
    assert without("ab", "bc") == ["b"] and without("ab", "ad", "ac") == ["a"]
    assert without("ab") == ["b"], "the launcher's own host stays, as the first"
    assert without("ab", "cd") == ["d", "b"]


def test_what_neighbours_tell_of_a_host_counts_as_its_sign_of_life() -> None:
    def world_of(seconds: float, round_trip_seconds: float = 0.1) -> WorldState:
        job = Job((Host("a"), Host("b")), "ring", ("true",), silent_seconds=1.0)
        world = WorldState(job, cast(Console, None), "address")
        for rank, name in RANKS:
            link = SimpleNamespace(name=name, closed=False, punctuality=Punctuality(0.5, 0.0))
            world.add_host(cast(Link, link), [rank])
        world.links["b"].punctuality.last -= 2.0
        beat = {"rank": 0, "waiting": "a sum", "seconds": 0.1, "passing": None, "passing_seconds": 0.0, "passes": 1}
        told = {"1": {"seconds": seconds, "data_seconds": 9.0, "round_trip_seconds": round_trip_seconds, "calls": 0}}
        world._note_beat("a", cast(Beat, {**beat, "heard": told}))
        return world

    assert world_of(0.2).fault() is None and world_of(1.9, 1.0).fault() is None
    assert world_of(1.3).fault() is None, "its link may have become slow a moment ago"
    fault = world_of(1.9).fault()
    assert fault and fault.kind == "silent" and fault.hosts == ("b",)


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_host_that_fell_silent_is_not_waited_for_to_end_its_ranks(
    monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """Two faults at once: a rank died on one host, and the other was cut off."""
    monkeypatch.setattr("lib.launch.attempt.END_ANSWER_SECONDS", 1000.0)

    async def go() -> list[str]:
        attempt = Attempt(Job((Host("a"), Host("b")), "ring", ("true",), silent_seconds=1.0), cast(Console, None))
        world, order = attempt.world, list[str]()
        for rank, name in RANKS:
            link = SimpleNamespace(name=name, closed=False, punctuality=Punctuality(0.5, 0.0))
            world.add_host(cast(Link, link), [rank])
        world.links["b"].punctuality.last -= 5.0 if is_silent else 0.0
        world.ended["a"].set()

        async def end_late() -> None:
            await asyncio.sleep(0.3)
            order.append("b ended")
            world.ended["b"].set()

        if not is_silent:
            ending = asyncio.ensure_future(end_late())
        async with asyncio.timeout(20):
            await attempt._hear_the_end(["a", "b"], 0.5)
        order.append("heard")
        if not is_silent:
            await ending
        return order

    assert asyncio.run(go()) == (["heard"] if is_silent else ["b ended", "heard"])


def test_a_cut_is_told_once_all_hosts_had_time_to_say_what_they_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    job = Job((Host("a"), Host("b"), Host("c")), "ring", ("true",), silent_seconds=1.0)
    attempt = Attempt(job, cast(Console, None))
    ranks = {0: heard_of(0, "a", r1=Sign(97.0, 97.0, 0.1, 2)), 1: RankState(1, "b"), 2: heard_of(2, "c")}
    attempt.world = cast(WorldState, SimpleNamespace(ranks=ranks, hosts=dict.fromkeys("abc")))
    assert attempt._seen_cut(now) is None
    ranks[2].heard = {1: Sign(97.0, 97.0, 0.1, 2)}  # without it either of a and b might be the one
    fault = attempt._seen_cut(now + 0.35)
    assert fault and fault.hosts == ("b",) and attempt.reached == (Host("a"), Host("c"))
    ranks[0].heard, ranks[2].heard = {}, {}
    assert attempt._seen_cut(now + 0.4) is None
    ranks[0].heard = {1: Sign(97.0, 97.0, 0.1, 2)}
    assert attempt._seen_cut(now + 0.5) is None, "they are asked anew"
    for silent_since, blamed in ((98.4, ("a",)), (99.4, ("b",))):  # its other neighbour called a moment before the cut
        attempt.cut_seen = None
        ranks[2].heard = {0: Sign(silent_since, 97.0, 0.1, 2)}
        assert attempt._seen_cut(now) is None
        fault = attempt._seen_cut(now + 0.35)
        assert fault and fault.hosts == blamed


# ---- Faults that another start would meet again


def test_updates_that_are_never_finite_are_told_before_the_deaths_that_follow() -> None:
    why = "5 updates in a row were not finite, the last at step 9"
    fault = found([RankState(0, "a", status=1, diverged=why), RankState(1, "b", status=1, lost_another=True)])
    assert fault == Fault("diverged", f"rank 0 on a: {why}", ("a",))


def test_the_disk_with_most_of_a_run_is_found_and_a_fork_is_left_to_the_user() -> None:
    def ended(*newer: tuple[int, list[str]] | None) -> list[RankState]:
        reached = [one and heartbeat.Reached(step=one[0], resume_ids=one[1]) for one in newer]
        return [RankState(rank, "abc"[rank], status=2, newer=one) for rank, one in enumerate(reached)]

    assert holders_of_newer(ended(None, None)) == ()
    assert holders_of_newer(ended(None, (9, []), (12, []))) == ("c",)
    assert holders_of_newer(ended(None, (12, ["x"]), (12, ["x"]))) == ("b", "c")
    assert holders_of_newer(ended(None, (12, []), (9, ["x"]))) == ("c",), "b's later steps were left"
    assert holders_of_newer(ended(None, (12, ["x"]), (9, ["y"]))) == ()
    fault = found(ended(None, (9, []), (12, [])))
    assert fault is not None and (fault.kind, fault.hosts) == ("behind", ("c",))
    fork = found(ended(None, (12, ["x"]), (9, ["y"])))
    assert fork is not None and fork.kind == "died", "it ends with what the ranks say"


def test_no_start_follows_where_the_last_two_ended_alike() -> None:
    diverged, died = Fault("diverged", "", ("a",)), Fault("died", "", ("a",))
    assert not is_hopeless(diverged, None, False), "a chip may have failed, once"
    assert not is_hopeless(diverged, died, False) and not is_hopeless(died, diverged, False)
    assert not is_hopeless(diverged, diverged, True), "it was trained on between them"
    assert is_hopeless(diverged, diverged, False)


def test_a_launcher_that_was_stopped_itself_takes_nobody_for_silent() -> None:
    """Ctrl-Z, and fg after a minute: what the hosts sent meanwhile is in the pipes, unread."""
    link = SimpleNamespace(name="a", closed=False, punctuality=Punctuality(0.5, 0.0))
    world = WorldState(Job((Host("a"),), "ring", ("true",), silent_seconds=10.0), cast(Console, None), "address")
    world.add_host(cast(Link, link), [0])
    assert world.fault() is None
    world.ranks[0].stopped_since = time.monotonic() - 70.0
    for past in (world, link.punctuality):
        name = "looked" if past is world else "last"
        setattr(past, name, getattr(past, name) - 70.0)
    assert world.fault() is None
    link.punctuality.last -= 70.0  # while the launcher looked
    fault = world.fault()
    assert fault and fault.kind == "silent" and fault.hosts == ("a",)


def test_only_a_host_that_was_taken_back_is_unfit_and_only_beside_others() -> None:
    a, b = Host("a"), Host("b")

    def noted(
        hosts: tuple[Host, ...], before: tuple[Host, ...], status: int = 2, step: int | None = None, refused: str = ""
    ) -> Unfit | None:
        unfit = Unfit()
        ranks = {i: RankState(i, host.name, refused=host.name in refused) for i, host in enumerate(hosts)}
        attempt = SimpleNamespace(
            job=Job(hosts, "ring", ("train.py",)),
            world=SimpleNamespace(checkpoint=step, ranks=ranks),
            console=SimpleNamespace(note=lambda text: None),
        )
        return unfit if unfit.note(Outcome(status), cast(Attempt, attempt), before) else None

    unfit = noted((a, b), (a,))
    assert unfit is not None and 290 < unfit.pause_seconds(b) <= 300 and not unfit.pause_seconds(a)
    links = {name: cast(Link, SimpleNamespace(closed=False)) for name in "ab"}
    assert unfit.without((a, b), links) == (a,)
    assert unfit.without((a, b), {"b": links["b"]}) == (a, b), "better than nobody"
    assert noted((a, b), (a, b)) is None and noted((b,), (a,)) is None, "such a start counts: it may never end"
    assert noted((a, b), (a,), refused="a") is None, "it was there before: another start may end the same"
    unfit = noted((a, b, Host("c")), (a,), refused="c")
    assert unfit is not None and unfit.pause_seconds(Host("c")) and not unfit.pause_seconds(b)
    assert noted((a, b), (a,), status=137) is None and noted((a, b), (a,), step=7) is None


def test_a_wait_without_an_end_is_not_told_while_hosts_are_asked_which_of_them_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy machine: the probe takes longer than what is left of the limit of a wait; its answer names the host."""
    a, b = Host("a"), Host("b")
    endless = Fault("wedged", "all ranks have waited, and it does not end", ("a", "b"))

    async def reached(*_: object) -> tuple[Host, ...]:
        await asyncio.sleep(0.3)
        return (a,)

    async def watched(
        answer: Callable[..., Awaitable[object]], heard: Mapping[str, float] | None = None
    ) -> Fault | None:
        monkeypatch.setattr(reachable_hosts, "reach_each_other", answer)
        attempt = Attempt(Job((a, b), "ring", ("true",), silent_seconds=1.0), cast(Console, None))
        faults = iter([None])  # the first look begins to ask; from then on the wait is beyond its limit
        since = time.monotonic() - 5.0
        waiting = {
            rank: RankState(rank, name, beats=True, waiting="a sum", waiting_since=since) for rank, name in RANKS
        }
        for rank, name in RANKS:
            if heard is not None:  # of the other one
                at = time.monotonic() + heard[name]
                waiting[rank].heard = {1 - rank: Sign(at, at, 0.5, 0)}
        attempt.world = cast(
            WorldState,
            SimpleNamespace(
                is_running=lambda: True,
                fault=lambda: next(faults, endless),
                ranks=waiting,
                hosts=dict.fromkeys("ab"),
                run=None,
                checkpoint=None,
                load=lambda: 1.0,
                usual_lateness=lambda: 0.0,
            ),
        )

        async def told(fault: Fault, interrupts: asyncio.Queue[int]) -> Outcome:
            return Outcome(1, fault)

        monkeypatch.setattr(attempt, "_fail", told)
        return (await attempt._watch(asyncio.Queue())).fault

    cut = asyncio.run(watched(reached))
    assert cut and cut.hosts == ("b",) and "do not reach each other" in cut.message
    assert asyncio.run(watched(reached, {"a": 0.2, "b": 0.2})) is endless, "a slow link, where others came first"
    for heard in ({"a": 0.2, "b": -0.1}, {"a": -0.1, "b": 0.2}, {"a": -0.1, "b": -0.1}):
        cut = asyncio.run(watched(reached, heard))
        assert cut and cut.hosts == ("b",), f"{heard}: heard one way, or not since they were asked"

    async def nothing_known(*_: object) -> None:
        await asyncio.sleep(0.3)

    assert asyncio.run(watched(nothing_known)) is endless  # the probe has an end of its own
