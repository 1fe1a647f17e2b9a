"""What the server records."""

from __future__ import annotations

from typing import Any

from lib.serve.event_log import MOST_A_SECOND, MOST_TOGETHER, REMEMBERED, SparingLog


def test_what_costs_a_client_nothing_fills_no_disk() -> None:
    now = [0.0]
    records: list[dict[str, Any]] = []
    log = SparingLog(lambda kind, **fields: records.append({"kind": kind, **fields}), lambda: now[0])
    for number in range(1000):
        log("a", "request", number=number)
    log("b", "request", number=-1)
    assert [one["number"] for one in records] == [*range(MOST_A_SECOND), -1]
    assert not any("omitted" in one for one in records)
    now[0] = 1.5
    log("a", "request", number=1000)
    log("a", "request", number=1001)
    assert records[-2:] == [
        {"kind": "request", "number": 1000, "omitted": 1000 - MOST_A_SECOND},
        {"kind": "request", "number": 1001},
    ]
    for number in range(2 * REMEMBERED):
        log(number, "request")
    assert len(log._sorts) == REMEMBERED
    now[0], records[:] = 3.0, []
    for number in range(1000):
        log(f"address {number}", "request", together="all of them", number=number)
    log("c", "request", number=-1)
    assert [one["number"] for one in records] == [*range(MOST_TOGETHER), -1]
