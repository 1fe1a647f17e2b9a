"""Messages between ranks arrive whatever MLX's backend can do: both ways at once, one at a time, or only together."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lib.distributed.links import Links, PairLinks, links_of
from lib.distributed.world import World, neighbour_pairs
from lib.model import pipeline_stage
from lib.training.divided_world import pipelined
from tests.test_pipeline import CUTS, DPO, SFT, assert_equals_whole, folder_of

mpi = pytest.mark.mpi(min_size=2)


@dataclass(frozen=True)
class OneAtATime(World):
    """Ranks as JACCL joins them, imitated over MPI: a message begins when both are there, each neighbour has one queue.

    A message is an all_gather of the two. So if both ends sent at the same time, both would get nothing.
    """

    pairs: dict[int, World] = field(default_factory=dict)
    queues: dict[int, Any] = field(default_factory=dict)

    def send(self, array: mx.array, rank: int, stream: Any) -> mx.array:
        self.traffic.bytes_sent += array.nbytes
        return self._gathered(array, rank, stream)

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, rank: int, stream: Any) -> mx.array:
        gathered = self._gathered(mx.zeros(shape, dtype), rank, stream)
        return mx.split(gathered, 2, stream=stream)[1 - self.pairs[rank].rank]

    def _gathered(self, array: mx.array, rank: int, stream: Any) -> mx.array:
        assert self.queues.setdefault(rank, stream) == stream, "sends and receives in two threads"
        return replace(self.pairs[rank], stream=stream).gather_lazily(array)


def one_at_a_time(world: World) -> Links:
    known = {name: getattr(world, name) for name in ("rank", "size", "group", "stream", "traffic")}
    return Links(OneAtATime(**known, timeout_seconds=20, backend="jaccl", pairs=neighbour_pairs(world)))


def gathering_pairs(world: World) -> Links:
    links = links_of(replace(world, backend="nccl"))
    assert isinstance(links, PairLinks)
    return links


KINDS: dict[str, Callable[[World], Links]] = {"mpi": links_of, "jaccl": one_at_a_time, "nccl": gathering_pairs}


@pytest.fixture(scope="module")
def links(request: pytest.FixtureRequest, world: World) -> Links:
    return KINDS[request.param](world)


def message(sender: int, receiver: int, number: int) -> np.ndarray:
    draw = np.random.default_rng([sender, receiver, number])
    columns = 40_000 if number == 2 else 5  # small ones, and a large one
    return draw.normal(size=(3 + number, columns)).astype(np.float32)


@mpi
@pytest.mark.parametrize("links", KINDS, indirect=True)
def test_messages_go_round_and_bytes_are_counted(world, links: Links) -> None:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    bytes_before = world.traffic.bytes_sent
    for number in range(4):
        mine = mx.array(message(world.rank, after, number))
        if world.rank == 0:
            links.send(mine, after, "a message")
        got = links.receive(message(before, world.rank, number).shape, mx.float32, before, "a message")
        if world.rank != 0:
            links.send(mine, after, "a message")
        assert np.array_equal(got, message(before, world.rank, number))
    links.finish("all messages")
    expected = sum(message(world.rank, after, number).nbytes for number in range(4))
    assert world.traffic.bytes_sent - bytes_before == expected
    assert links.waited_seconds > 0


@mpi
@pytest.mark.parametrize("links", KINDS, indirect=True)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.int8], ids=str)
def test_two_ranks_exchange(world, links: Links, dtype: mx.Dtype) -> None:
    if world.rank in (0, world.size - 1):
        other = world.size - 1 - world.rank
        theirs = links.exchange(mx.full((2, 3), world.rank + 1, dtype), other, "an exchange")
        assert mx.array_equal(theirs, mx.full((2, 3), other + 1, dtype))
    links.finish("an exchange")


@mpi
@pytest.mark.parametrize("recomputes", [False, True], ids=["keeps", "recomputes"])
@pytest.mark.parametrize("kind", ["jaccl", "nccl"])
@pytest.mark.long("nccl-*", "jaccl-recomputes", ranks=3)
@pytest.mark.long("nccl-recomputes", "jaccl-keeps", ranks=2)
def test_stages_compute_what_the_whole_computes_over_any_links(
    world, folder, kind: str, recomputes: bool, monkeypatch
) -> None:
    def cut(world: World, model: Any, blocks: Sequence[int]) -> Any:
        links = KINDS[kind](world)
        return pipelined(world, blocks, pipeline_stage.cut(model, blocks, world.rank, links), links)

    monkeypatch.setattr("tests.test_pipeline.cut", cut)
    path = folder_of(world, folder, "llama-tied-biased")
    method = "full" if recomputes else "lora"  # full training sums what the first and the last rank both train
    assert_equals_whole(world, path, CUTS[world.size][0], SFT if recomputes else DPO, recomputes, method=method)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_wait_names_the_rank_and_the_host_that_is_waited_for(world, monkeypatch) -> None:
    links, waits = Links(world, hosts=("m4-max", "m3-ultra")), []
    deadline = type(links.ranks).deadline

    def noted(ranks: World, what: str, times: int = 1) -> contextlib.AbstractContextManager[None]:
        waits.append(what)
        return deadline(ranks, what, times)

    monkeypatch.setattr(World, "deadline", noted)
    links.exchange(mx.ones(3), 1 - world.rank, "the gradients")
    links.finish("the end of a step")
    peer = ("rank 1 on m3-ultra", "rank 0 on m4-max")[world.rank]
    assert waits == [f"the gradients from {peer}", f"the end of a step: {peer} does not take what it was sent"]
    monkeypatch.undo()
