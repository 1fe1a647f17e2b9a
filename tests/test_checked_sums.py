"""What ranks tell each other of their messages: as much of it as there is, and in little room."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from lib.distributed import checked_sums
from lib.distributed.checked_sums import CheckedSums
from lib.distributed.peer_messages import PeerMessages
from lib.distributed.world import World
from tests.attacks_network import channels, compared


@pytest.mark.parametrize("size", [2, 3])
def test_texts_longer_than_what_the_system_buffers_go_round(size: int) -> None:
    links = [channels() for _ in range(size)]  # from each rank to the next
    for channel in (end for link in links for end in link):
        channel.connection.settimeout(30)
    texts = [bytes([rank]) * 2**23 for rank in range(size)]
    got: dict[int, list[bytes]] = {}

    def run(rank: int) -> None:
        got[rank] = PeerMessages(rank, size, links[rank - 1][1], links[rank][0]).gather(texts[rank])

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == dict.fromkeys(range(size), texts)


@pytest.mark.parametrize("size", [2, 3])
def test_small_arrays_of_rank_0_travel_as_messages_bit_for_bit(size: int) -> None:
    numbers = [np.array([np.nan, -0.0, 1e-45], np.float32), np.array(7, np.uint8), np.zeros((0, 2), np.float16)]
    got: dict[int, list[bytes]] = {}

    def broadcast(checks: CheckedSums, rank: int) -> None:
        world = World(rank, size, checks=checks)  # without a group, in which nothing can be summed
        own = [mx.array(each if rank == 0 else np.ones_like(each)) for each in numbers]
        got[rank] = [np.array(array).tobytes() for array in world.broadcast(own)]

    assert compared(broadcast, size) == [""] * size
    assert got == dict.fromkeys(range(size), [each.tobytes() for each in numbers])


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 1000])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_small_sums_travel_as_messages_and_are_the_same_bits_on_all_ranks(size: int, count: int, dtype: type) -> None:
    rng = np.random.default_rng(count)
    numbers = [(rng.standard_normal(count) * 10 ** rng.uniform(-3, 3, count) * 100).astype(dtype) for _ in range(size)]
    got: dict[int, np.ndarray] = {}

    def add(checks: CheckedSums, rank: int) -> None:
        world = World(rank, size, checks=checks)  # without a group, in which nothing can be summed
        got[rank] = np.array(world.all_sum(mx.array(numbers[rank]).reshape(1, -1), "a test")).reshape(-1)

    assert compared(add, size) == [""] * size
    assert len({each.tobytes() for each in got.values()}) == 1
    exact = np.sum(numbers, axis=0, dtype=np.float64)
    bound = (size - 1) * np.finfo(np.float32).eps / 2 * np.sum(np.abs(numbers), axis=0, dtype=np.float64)
    assert got[0].dtype == dtype and (np.abs(got[0] - exact) <= (bound if dtype is np.float32 else 0)).all()


def test_small_sums_keep_what_is_not_finite() -> None:
    got: dict[int, list[float]] = {}

    def add(checks: CheckedSums, rank: int) -> None:
        own = mx.array([[float("nan"), float("inf"), float("inf"), 3e38][place] for place in range(4)])
        other = mx.array([1.0, 1.0, -float("inf"), 3e38])
        got[rank] = World(rank, 2, checks=checks).all_sum(other if rank else own, "a test").tolist()

    assert compared(add, 2) == ["", ""]
    assert str(got[0]) == str(got[1]) == "[nan, inf, nan, inf]"


@pytest.mark.parametrize("size", [2, 3])
def test_small_gathers_travel_as_messages_bit_for_bit(size: int) -> None:
    numbers = [[np.array([np.nan, -0.0, rank], np.float32), np.full((2, 2), rank, np.uint8)] for rank in range(size)]
    got: dict[int, list[list[bytes]]] = {}

    def gather(checks: CheckedSums, rank: int) -> None:
        own = [mx.array(each) for each in numbers[rank]]
        gathered = World(rank, size, checks=checks).gather_arrays(own, "a test")
        got[rank] = [[np.array(array).tobytes() for array in theirs] for theirs in gathered]

    assert compared(gather, size) == [""] * size
    assert got == dict.fromkeys(range(size), [[each.tobytes() for each in theirs] for theirs in numbers])


@pytest.mark.parametrize("changed", [None, 70, 999])
def test_notes_of_many_messages_take_little_room_and_one_that_was_changed_is_seen(changed: int | None) -> None:
    count, arrays = 1000, [mx.array([1.0]), mx.array([1.5])]
    mx.eval(arrays)
    left: list[int] = []

    def note(checks: CheckedSums, rank: int) -> None:
        for number in range(1, count + 1):
            if rank == 0:
                checks.note_sent(arrays[0], number, 1)
            elif number != count:  # the last one is on its way yet
                checks.note_received(arrays[number == changed], number, 0)
        (noted,) = checks.messages["received" if rank else "sent"].values()
        assert len(noted) == -(-count // checked_sums.FOLDED)
        checks.compare()
        if rank == 1:
            checks.note_received(arrays[0], count, 0)
        checks.compare()
        left.append(sum(len(groups) for way in checks.messages.values() for groups in way.values()))  # type: ignore[attr-defined]

    ends = compared(note)
    assert all("rank 1 on" in end and "than rank 0 sent" in end for end in ends) if changed else ends == ["", ""]
    assert left == ([] if changed else [1, 1])
