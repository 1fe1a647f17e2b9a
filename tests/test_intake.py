"""Whose request a backend takes in next, and what its rows cost."""

from __future__ import annotations

from lib.serve.intake import MOST_OWED_SECONDS, Intake


def intake(**waiting: int) -> Intake:
    """Of owners, with so many requests each: "a1", "a2" and so on."""
    made = Intake()
    for owner, count in waiting.items():
        for number in range(1, count + 1):
            made.put(owner, f"{owner}{number}")
    return made


def test_owners_take_turns_whoever_came_first() -> None:
    one = intake(a=3, b=2)
    assert [one.take() for _ in range(6)] == ["a1", "b1", "a2", "b2", "a3", None]
    one.put("b", "b3")
    one.put("c", "c1")
    assert [one.take() for _ in range(3)] == ["c1", "b3", None], "who has never had a turn is first"


def test_who_owes_waits_for_tokens_while_others_are_under_way() -> None:
    one = intake(a=2)
    one.under_way = {1: "a", 2: "b"}
    one.charge(["a"], 0.02)
    assert one.take() is None and not one.is_due
    one.put("b", "b1")
    assert one.take() == "b1", "another owner does not wait for it"
    one.pay(0.015)
    assert not one.is_due
    one.pay(0.015)
    assert one.is_due and one.take() == "a1"


def test_nobody_waits_alone_or_while_nothing_is_under_way() -> None:
    one = intake(a=1)
    one.charge(["a"], 5.0)
    one.under_way = {1: "a", 2: "a"}
    assert one.take() == "a1"
    one = intake(a=1, b=1)
    one.charge(["a", "b"], 5.0)
    assert one.take() == "a1", "nothing is answered: there is nobody to wait for"


def test_what_a_step_took_is_shared_by_its_rows_and_has_a_limit() -> None:
    one = intake(a=1, b=1)
    one.under_way = {1: "a", 2: "b", 3: "c"}
    one.charge(["a", "a", "b"], 0.03)
    one.pay(0.0101)
    assert one.take() == "b1" and not one.is_due
    one.charge(["a"], 1000.0)
    one.pay(MOST_OWED_SECONDS)
    assert one.take() == "a1"
