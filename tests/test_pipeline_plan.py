"""Where a model is cut into stages, and what a pipelined step is predicted to take: against all cuts, and by hand."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config.load import load
from lib.distributed.world import World
from lib.errors import UserError
from lib.model.partition import model_shape_of
from lib.plan.calibration import BatchCurve, Link
from lib.plan.cluster_plan import ClusterPlan, whole_bytes
from lib.plan.memory import MemoryModel, Rows, metal_limit_bytes
from lib.plan.memory_trace import Training
from lib.plan.pipeline_costs import ASSUMED_LINK, block_weights
from lib.plan.pipeline_cuts import Cut, CutCosts, Keeps, best_cut, cut_at, most_blocks
from lib.plan.pipeline_plan import known_or_alike
from lib.plan.pipeline_replan import moved_cut, moved_plan
from lib.plan.pipeline_schedule import Hop, bound_seconds, depths, operations, step_seconds
from lib.plan.plan_warnings import advised
from lib.plan.run_facts import RankHost, RunFacts
from lib.plan.run_plan import plan_run
from lib.system import hardware
from lib.system.hardware import Device
from tests import tiny
from tests.test_plan import LLAMA_8B
from tests.test_replan import KEY, calibrated

LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}
LLAMA_70B |= {"num_attention_heads": 64, "num_key_value_heads": 8}
MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
ROWS = Rows(prompt=512, seen=1024, tokens=1536, scored=1024)
GB = 10**9

seconds = st.floats(0.01, 4.0)


# ---- The schedule


@given(st.integers(1, 6), st.integers(1, 12))
def test_a_stage_does_every_pass_once_and_keeps_no_more_than_it_may(in_flight: int, micro_batches: int) -> None:
    order = operations(in_flight, micro_batches)
    for is_forward in (True, False):
        assert [index for forward, index in order if forward == is_forward] == list(range(micro_batches))
    under_way = list(itertools.accumulate(1 if forward else -1 for forward, _ in order))
    assert max(under_way) == min(in_flight, micro_batches) and min(under_way) == 0


def test_the_schedule_by_hand() -> None:
    """Two stages, two micro-batches: forward 1 and 2 s, backward 2 and 4 s.

    Stage 0 runs F0 0-1, F1 1-2; stage 1 F0 1-3, B0 3-7, F1 7-9, B1 9-13; stage 0 B0 7-9, B1 13-15.
    """
    assert step_seconds([1, 2], [2, 4], [Hop()], depths(2), 2) == 15
    # A message of 1 s, and 0.5 s on its way: F0 arrives at 2.5, F1 at 3.5, B0 at 10, B1 (made at 14.5) at 16.
    assert step_seconds([1, 2], [2, 4], [Hop(1, 0.5)], depths(2), 2) == 18
    assert step_seconds([3], [5], [], depths(1), 4) == 32, "one stage works without a break"


@given(st.lists(st.tuples(seconds, st.floats(1, 3)), min_size=1, max_size=5), st.integers(1, 20))
def test_without_links_a_step_lies_between_its_bounds_and_equal_stages_reach_them(
    stages: list[tuple[float, float]], micro_batches: int
) -> None:
    """Backward takes as long as forward, or longer. No stage ends later for another one that is faster."""
    forward, backward = zip(*((ahead, ahead * times) for ahead, times in stages), strict=True)
    hops, in_flight = [Hop()] * (len(stages) - 1), depths(len(stages))
    played = step_seconds(forward, backward, hops, in_flight, micro_batches)
    totals = [ahead + back for ahead, back in zip(forward, backward, strict=True)]
    assert max(micro_batches * max(totals), sum(totals)) <= played * (1 + 1e-9)
    assert played <= (micro_batches + len(stages) - 1) * (max(forward) + max(backward)) * (1 + 1e-9)
    equal = [1.0] * len(stages), [2.0] * len(stages), hops, in_flight, micro_batches
    assert step_seconds(*equal) == bound_seconds(*equal) == 3 * (micro_batches + len(stages) - 1)


def test_more_micro_batches_in_flight_hide_a_slow_link() -> None:
    equal: tuple[Any, ...] = ([1.0, 1.0], [1.0, 1.0], [Hop(0.8)])
    usual, deeper = (step_seconds(*equal, depths(2, more), 32) for more in (0, 2))
    assert usual > 1.3 * 64 and deeper < 1.1 * 64


# ---- The cut


def problem(
    block_seconds: Sequence[float],
    blocks: int,
    micro_batches: int = 8,
    *,
    head: float = 0.0,
    room: Sequence[float] | None = None,
    kept: float = 0.0,
    hop: Hop | None = None,
    ends: tuple[float, float] = (0.0, 0.0),
    may_checkpoint: bool = True,
) -> CutCosts:
    """Equal blocks of one byte; a host takes 1 : 2 of its seconds a block forward and backward."""
    hosts = len(block_seconds)
    counts = np.arange(blocks + 1.0)
    forward = np.outer(block_seconds, counts) / 3
    own = np.tile(counts, (hosts, 1))
    last = np.eye(hosts)[-1] * np.array(block_seconds) * head / 3
    return CutCosts(
        forward_seconds=forward,
        backward_seconds=2 * forward,
        held_bytes=own,
        kept_bytes=kept * own,
        inputs_bytes=kept / 10 * own,
        end_forward_seconds=last,
        end_backward_seconds=2 * last,
        end_bytes=np.eye(hosts)[0] * ends[0] + np.eye(hosts)[-1] * ends[1],
        block_bytes=np.full(hosts, kept),
        may_checkpoint=may_checkpoint,
        must_checkpoint=False,
        input_bytes=kept / 10,
        room_bytes=np.array(room if room is not None else [np.inf] * hosts, dtype=float),
        hops=(hop or Hop(),) * (hosts - 1),
        in_flight=depths(hosts),
        micro_batches=micro_batches,
    )


def exhaustive(costs: CutCosts) -> Cut | None:
    cuts = [
        cut_at(costs, np.diff([0, *ends, costs.blocks]).tolist())
        for ends in itertools.combinations(range(1, costs.blocks), costs.hosts - 1)
    ]
    return min((cut for cut in cuts if cut.fits), key=lambda cut: cut.step_seconds, default=None)


@st.composite
def problems(draw: st.DrawFn) -> CutCosts:
    hosts = draw(st.integers(2, 4))
    blocks = draw(st.integers(hosts, 11))
    room = st.lists(st.floats(0.5, 2.5 * blocks), min_size=hosts, max_size=hosts)
    return problem(
        draw(st.lists(seconds, min_size=hosts, max_size=hosts)),
        blocks,
        draw(st.integers(1, 24)),
        head=draw(st.floats(0, 4)),
        room=draw(st.none() | room),
        kept=draw(st.sampled_from([0.0, 0.2, 1.0])),
        hop=draw(st.builds(Hop, st.sampled_from([0.0, 0.1, 2.0]), st.sampled_from([0.0, 0.5]))),
        ends=draw(st.tuples(st.floats(0, 2), st.floats(0, 4))),
        may_checkpoint=draw(st.booleans()),
    )


@given(problems())
def test_the_best_cut_is_within_two_percent_of_all_cuts(costs: CutCosts) -> None:
    best, found = exhaustive(costs), best_cut(costs)
    assert (best is None) == (found is None)
    if best is not None and found is not None:
        assert found.fits and sum(found.blocks) == costs.blocks and min(found.blocks) > 0
        assert found.step_seconds <= 1.02 * best.step_seconds


@given(st.lists(seconds, min_size=2, max_size=2), st.integers(2, 30), st.integers(1, 20), st.integers(0, 1))
@pytest.mark.long
def test_a_faster_host_never_gets_fewer_blocks(
    speeds: list[float], blocks: int, micro_batches: int, faster: int
) -> None:
    before = best_cut(problem(speeds, blocks, micro_batches))
    speeds[faster] /= 2
    after = best_cut(problem(speeds, blocks, micro_batches))
    assert before is not None and after is not None and after.blocks[faster] >= before.blocks[faster]


def test_cuts_by_hand() -> None:
    def blocks(*arguments: Any, **more: Any) -> tuple[int, ...]:
        cut = best_cut(problem(*arguments, **more))
        assert cut is not None
        return cut.blocks

    assert blocks([1, 1], 8) == (4, 4)
    assert blocks([1, 3], 8, 64) == (6, 2)
    assert blocks([1, 1], 8, 64, head=2) == (5, 3), "a head is worth two blocks"
    assert blocks([1, 4], 10, 64, head=3) == (9, 1), "even one block is too much beside the head, but a stage has one"
    assert blocks([1, 1, 1], 3) == (1, 1, 1), "one block a rank"
    assert blocks([1, 1], 8, room=[3.5, 9]) == (3, 5)
    assert blocks([1, 1], 8, ends=(2.0, 0.0), room=[4.5, 9]) == (2, 6), "the embedding's bytes count"
    assert blocks([1, 1], 8, ends=(0.0, 2.0), room=[9, 4.5]) == (6, 2), "and the head's"
    many = best_cut(problem([1 + rank % 3 for rank in range(16)], 1000, 64))
    assert many is not None and sum(many.blocks) == 1000
    assert many.step_seconds < 1.02 * (64 + 15) * 1000 / sum(1 / (1 + rank % 3) for rank in range(16))


def test_a_stage_keeps_as_much_as_memory_allows() -> None:
    """Four blocks each of 1 byte, activations 1 byte a block and micro-batch, two in flight on the first host."""

    def first(room: float, may_checkpoint: bool = True) -> tuple[Keeps, float]:
        cut = cut_at(problem([3, 3], 8, kept=1.0, room=[room, 99], may_checkpoint=may_checkpoint), (4, 4))
        return cut.keeps[0], cut.forward_seconds[0] + cut.backward_seconds[0]

    assert first(4 + 8.1) == (Keeps.ACTIVATIONS, 12)
    assert first(4 + 7.9) == (Keeps.BLOCK_INPUTS, 16), "a forward pass more"
    assert first(4 + 7.9, may_checkpoint=False) == (Keeps.INPUT, 16)
    must = replace(problem([3, 3], 8, kept=1.0), must_checkpoint=True)
    assert cut_at(must, (4, 4)).keeps == (Keeps.BLOCK_INPUTS, Keeps.BLOCK_INPUTS)
    last = cut_at(problem([3, 3], 8, kept=1.0, room=[99, 4.1], may_checkpoint=False), (4, 4))
    assert not last.fits and last.keeps[1] == Keeps.ACTIVATIONS, "the last stage has nothing to make again"


def test_what_no_cut_holds() -> None:
    assert best_cut(problem([1, 1], 8, room=[3.5, 3.5])) is None
    assert most_blocks(problem([1, 1], 8, room=[3.5, 3.5])) == [3, 3]
    assert best_cut(problem([1, 1], 8, room=[99, 0.5])) is None, "a stage without a block"
    assert best_cut(problem([1, 1, 1], 2)) is None, "more hosts than blocks"


# ---- The plan


def planned(
    memory_gb: Sequence[float | None],
    gflops: Sequence[float | None],
    *words: str,
    stored: dict[str, Any] = LLAMA_8B,
    link: Link | None = ASSUMED_LINK,
    curve: BatchCurve | Sequence[BatchCurve | None] | None = None,
    devices: Sequence[Device] = ("metal",) * 9,
    **facts: Any,
) -> ClusterPlan:
    """Of hosts a, b, ...: their memory, and the rate of their matrix products, or a curve of all or of each."""
    config = load(None, ["model.path=-", "data.train=-", "train.global_batch_size=32", *words])
    hosts = []
    for rank, (memory, rate) in enumerate(zip(memory_gb, gflops, strict=True)):
        own = curve[rank] if isinstance(curve, Sequence) else curve
        one = calibrated(chr(ord("a") + rank), {1: 1.0, 2: 1.0}).model_copy(
            update={"curves": (own,) if own else (), "gflops": rate, "links": (link,) if link else ()}
        )
        size = memory and int(memory * GB)
        hosts.append(RankHost(one.machine.host, one, device=devices[rank], memory_bytes=size))
    shape = model_shape_of(stored)
    known: dict[str, Any] = {
        "shape": shape,
        "block_shape": shape,
        "memory_model": MemoryModel(shape, Training(method=config.model.method), ROWS),
        "typical_rows": ROWS,
    }
    return plan_run(config, hosts, RunFacts(KEY, longest=1024, backend="ring", **{**known, **facts}))


def test_a_pipelined_plan_by_hand() -> None:
    """8B on two equal hosts: the head's 525 M weights at 1,024 of 1,536 tokens are worth 1.6 blocks of 218 M."""
    plan = planned([128, 128], [1e4, 1e4], "strategy=pipelined", "plan.micro_batch_sizes=[1]")
    assert plan.strategy == "pipelined" and plan.blocks == (17, 15) and plan.shares == [32]
    assert plan.reason.startswith("pipelined, as strategy has it") and plan.micro_batch_sizes == [(1,) * 32]
    shape = model_shape_of(LLAMA_8B)
    rate = 1e13 / (1 + 64 / 1536)
    forward = 2 * 17 * block_weights(shape, False) * 1536 / rate
    first, last = plan.stages
    assert first.forward_seconds == pytest.approx(forward) and first.backward_seconds == pytest.approx(forward)
    head = 2 * 128256 * 4096 * 1024 / rate
    assert last.forward_seconds == pytest.approx(forward * 15 / 17 + head)
    assert first.weight_bytes == pytest.approx(2 * (17 * block_weights(shape, False) + 128256 * 4096), rel=1e-3)
    chosen = plan.predictions[0]
    assert chosen.strategy == "pipelined, 17 + 15 blocks" and chosen.chosen
    # Two tokens' worth of bytes for every number: forward and back over one cut, half of it from either end.
    assert chosen.bytes_per_step == pytest.approx(32 * 1536 * 4096 * 2)
    assert 32 * 2 * forward < (chosen.step_seconds or 0) < 1.05 * 33 * 2 * forward
    rows = plan.rows()
    assert rows[0]["blocks"] == "1-17 (17)" and rows[1]["blocks"] == "18-32 (15)"
    assert [stage.in_flight for stage in plan.stages] == [3, 1], "one more than usual saves half of the bubble"
    kept = json.loads(json.dumps(plan.to_dict()))
    assert kept["blocks"] == [17, 15] and kept["stages"][1]["first_block"] == 17


def test_both_ends_hold_a_tied_embedding() -> None:
    untied, tied = (
        planned([64, 64], [1e4, 1e4], "strategy=pipelined", stored=LLAMA_8B | {"tie_word_embeddings": is_tied})
        for is_tied in (False, True)
    )
    assert [stage.weight_bytes for stage in tied.stages] == [stage.weight_bytes for stage in untied.stages]
    assert tied.blocks == untied.blocks


@pytest.mark.parametrize("more", [{}, {"quantization": {"group_size": 64, "bits": 4}}, MOE])
def test_stages_hold_the_whole_model(more: dict[str, Any]) -> None:
    """Untied, so that nothing is held twice."""
    stored = LLAMA_8B | more
    plan = planned([128, 128, 128], [1e4, 2e4, 1e4], "strategy=pipelined", stored=stored)
    config = load(None, ["model.path=-", "data.train=-"])
    assert sum(stage.weight_bytes for stage in plan.stages) == pytest.approx(
        whole_bytes(config, model_shape_of(stored)), rel=1e-6
    )
    assert plan.blocks[1] > max(plan.blocks[0], plan.blocks[2])
    assert plan.predicted_step_seconds == plan.predictions[0].step_seconds


def test_full_training_counts_gradients_and_moments_at_both_ends() -> None:
    plan = planned([200, 200], [1e4, 1e4], "strategy=pipelined", "model.method=full", "plan.shares=[16,16]")
    weights = 16 * block_weights(model_shape_of(LLAMA_8B), False) + 128256 * 4096
    for stage in plan.stages:  # a gradient, two moments, and the float32 of weights that are stored in 2 bytes
        assert stage.training_bytes == pytest.approx((4 + 8 + 2) * weights, rel=0.01)


def test_a_pipeline_of_a_model_that_fits_is_warned_of() -> None:
    config = load(None, ["model.path=-", "data.train=-", "strategy=pipelined", "train.global_batch_size=32"])
    roomy, tight = (planned([size, size], [1e4, 1e4], "strategy=pipelined") for size in (128, 20))
    assert "the whole model takes 16.4 GB and the smallest host has 128 GB" in advised(config, roomy).warnings[-1]
    assert not any("strategy=auto" in warning for warning in advised(config, tight).warnings)


def test_shares_are_blocks() -> None:
    words = ("strategy=pipelined", "plan.shares=[30,2]")
    plan = planned([128, 128], [1e4, 1e4], *words)
    assert plan.blocks == (30, 2) and "blocks as plan.shares has them" in plan.reason
    tight = planned([8, 128], [1e4, 1e4], *words)
    assert any("host a: its 30 blocks need" in warning for warning in tight.warnings), "as configured, with a warning"
    for shares, why in (
        ("[30,1]", r"sum to 31, but the model has 32 blocks"),
        ("[16,8,8]", r"has 3 numbers, but there are 2 ranks"),
        ("[32,0]", r"every rank keeps a part"),
    ):
        with pytest.raises(UserError, match=why):
            planned([128, 128], [1e4, 1e4], "strategy=pipelined", f"plan.shares={shares}")
    with pytest.raises(UserError, match="4 ranks, but the model has only 3 blocks; use fewer ranks"):
        planned([64] * 4, [1e4] * 4, "strategy=pipelined", stored=LLAMA_8B | {"num_hidden_layers": 3})
    with pytest.raises(UserError, match="all ranks run the same batches"):
        planned([64] * 2, [1e4] * 2, "strategy=pipelined", "plan.micro_batch_sizes=[1,2]")


def test_memory_is_respected_and_its_lack_explained() -> None:
    plan = planned([16, 256], [4e4, 1e4], "strategy=pipelined", stored=LLAMA_70B)
    for stage in plan.stages:
        assert stage.memory_bytes is not None and stage.needed_bytes <= 0.9 * stage.memory_bytes
    assert plan.blocks[0] < 10 and plan.stages[0].gradient_checkpointing, "as much as 16 GB hold, and faster hosts more"
    with pytest.raises(UserError) as told:
        planned([64, 64], [1e4, 1e4], "strategy=pipelined", stored=LLAMA_70B)
    message = str(told.value)
    assert "of 80 blocks the hosts hold" in message and "a 3" in message and "of 64.00 GB" in message
    assert "GB of memory with another host" in message and "\n" not in message
    with pytest.raises(UserError, match="host b: one block with norm and head .* need .* GB, but it has 2.00 GB"):
        planned([64, 2], [1e4, 1e4], "strategy=pipelined")
    with pytest.raises(UserError, match="try model.gradient_checkpointing=true"):
        planned([9, 9], [1e4, 1e4], "strategy=pipelined", "model.gradient_checkpointing=false")


def test_auto_takes_the_faster_way_and_says_what_the_other_would_give() -> None:
    slow, fast = (Link(backend="ring", latency_seconds=1e-5, bandwidth_bytes_per_second=rate) for rate in (1e8, 1e12))
    memory, rates = [160, 14], [1e4, 1e4]
    plan = planned(memory, rates, link=slow)
    assert plan.strategy == "pipelined" and plan.reason.startswith("pipelined, because host b")
    assert plan.divided_instead.startswith("strategy=sharded would give") and "GB a step instead of" in (
        plan.divided_instead
    )
    names = [prediction.strategy.partition(",")[0] for prediction in plan.predictions]
    assert names == ["pipelined", "sharded", "independent"]
    single = planned([18, 18], rates, "train.global_batch_size=1", link=fast)
    assert single.strategy == "sharded", "one pair passes one stage after the other"
    assert single.divided_instead.startswith("strategy=pipelined would give")
    unknown = planned(memory, rates, link=None)
    assert unknown.strategy == "pipelined" and "not calibrated, taken to carry 110 MB/s" in unknown.warnings[-1]
    nobody = planned(memory, [None, None])
    assert nobody.strategy == "pipelined" and nobody.predictions[0].step_seconds is None
    assert "at what speed is unknown" in nobody.divided_instead
    family = planned(memory, rates, shape=None)
    assert family.strategy == "pipelined" and not family.divided_instead, "a family whose blocks nobody can divide"
    assert planned([160, 160], rates).strategy == "independent"
    with pytest.raises(UserError, match=r"nor can it be divided: strategy=pipelined.*; strategy=sharded"):
        planned([9, 2], rates)


@pytest.mark.parametrize("small_gb", [6, 8, 10, 12])
def test_sharded_parts_leave_room_for_the_activations_of_a_pair(small_gb: float) -> None:
    """By the matmul rates the first host would take most of the model, as its memory alone would allow."""
    plan = planned([small_gb, 128], [9e3, 1e3], "strategy=sharded")
    assert plan.division is not None and "as far as memory allows" in plan.reason
    for part in plan.parts:
        assert part.needed_bytes + (part.activation_bytes or 0) <= 0.9 * (part.memory_bytes or 0)
    free = 0.9 * small_gb * GB - plan.parts[0].needed_bytes - (plan.parts[0].activation_bytes or 0)
    assert free < 0.15 * small_gb * GB, "and no more room than that"
    with pytest.raises(UserError, match="2 ranks need .* GB together for weights and one pair's activations"):
        planned([10.3, 10.3], [1e4, 1e4], "strategy=sharded")


def test_the_update_is_part_of_a_predicted_step() -> None:
    """The whole model's takes 0.32 s on either host; that of 24 of 32 blocks is predicted."""
    words = ("strategy=pipelined", "plan.shares=[24,8]", "plan.micro_batch_sizes=[1]")
    curve = BatchCurve.from_rates({1: 2.0, 2: 2.0}).model_copy(update={"key": KEY})
    without, with_update = (
        planned([128, 128], [1e4, 1e4], *words, curve=curve.model_copy(update={"step_overhead_seconds": seconds}))
        for seconds in (0.0, 0.32)
    )
    seconds = [plan.predictions[0].step_seconds or 0.0 for plan in (without, with_update)]
    assert seconds[1] - seconds[0] == pytest.approx(0.24)


OF_A_PAIR = BatchCurve.from_rates({1: 2.0, 2: 2.0}).model_copy(update={"key": KEY})  # 0.5 s through the whole model
FIFTH = OF_A_PAIR.model_copy(update={"outside_blocks": 0.2})  # of it is no block's


def blocks_and_rest(*curves: BatchCurve | None, devices: Sequence[Device] = ("metal", "metal")) -> tuple[float, float]:
    """Seconds of a pair on the second of two hosts: in all blocks, and in what is outside of them."""
    words = ("strategy=pipelined", "plan.shares=[24,8]", "plan.micro_batch_sizes=[1]")
    at = planned([128, 128], [1e4, 1e4], *words, curve=curves, devices=devices).cut_costs
    assert at is not None
    blocks, rest = at.forward_seconds + at.backward_seconds, at.end_forward_seconds + at.end_backward_seconds
    assert rest[0] == 0, "the first stage has an embedding, which is looked up"
    return blocks[1][-1], rest[1]


def test_what_is_outside_of_the_blocks_takes_as_long_as_was_measured() -> None:
    assert blocks_and_rest(FIFTH, FIFTH) == pytest.approx((0.4, 0.1))
    by_operations = blocks_and_rest(OF_A_PAIR, OF_A_PAIR)
    assert sum(by_operations) == pytest.approx(0.5) and by_operations[1] < 0.05, "the arithmetic gives the head less"


def test_a_host_without_that_measurement_has_the_share_of_its_kind() -> None:
    by_operations = blocks_and_rest(OF_A_PAIR, OF_A_PAIR)
    assert blocks_and_rest(FIFTH, OF_A_PAIR) == pytest.approx((0.4, 0.1))
    assert blocks_and_rest(FIFTH, OF_A_PAIR, devices=("cpu", "metal")) == by_operations
    assert known_or_alike([0.1, None, 0.2, None, None], ["cpu", "cpu", "cpu", "metal", None]) == pytest.approx(
        [0.1, 0.15, 0.2, None, None], nan_ok=True
    )
    assert known_or_alike([None, None], ["cpu", "cpu"]) == [None, None] and known_or_alike([], ["cpu"]) == []


def test_one_more_micro_batch_is_in_flight_over_a_link_where_that_costs_nothing() -> None:
    words = ("strategy=pipelined", "plan.shares=[16,16]", "plan.micro_batch_sizes=[1]")
    for link in (None, ASSUMED_LINK):
        assert [stage.in_flight for stage in planned([128, 128], [1e4, 1e4], *words, link=link).stages] == [3, 1]
    tight = planned([14, 128], [1e4, 1e4], words[0], words[2])
    assert all(stage.needed_bytes <= 0.9 * (stage.memory_bytes or 0) for stage in tight.stages)
    crawling = Link(
        backend="ring", latency_seconds=1e-3, bandwidth_bytes_per_second=ASSUMED_LINK.bandwidth_bytes_per_second / 15
    )
    assert planned([128, 128], [1e4, 1e4], *words, link=crawling).stages[0].in_flight > 3


def test_a_link_so_slow_that_nothing_arrives_is_planned_for() -> None:
    crawling = Link(backend="ring", latency_seconds=1.0, bandwidth_bytes_per_second=1.0)
    plan = planned([128, 128], [1e4, 1e4], "strategy=pipelined", link=crawling)
    assert np.isfinite(plan.predictions[0].step_seconds or np.inf) and min(plan.blocks) > 0


def test_compressed_activations_are_planned_as_sent() -> None:
    plain, compressed = (
        planned([128, 128], [1e4, 1e4], "strategy=pipelined", "plan.shares=[16,16]", f"sync.compression={kind}")
        for kind in ("none", "int8")
    )
    ratio = (compressed.predictions[0].bytes_per_step or 0) / (plain.predictions[0].bytes_per_step or 1)
    assert ratio == pytest.approx((1 + 4 / 256) / 2)
    with pytest.raises(UserError, match="topk"):
        load(None, ["model.path=-", "data.train=-", "strategy=pipelined", "sync.compression=topk"])


# ---- Later


def test_blocks_move_when_a_host_slows_for_good() -> None:
    words = ("strategy=pipelined", "plan.micro_batch_sizes=[1]")
    plan = planned([128, 128], [1e4, 1e4], *words)
    settings = load(None, ["model.path=-", "data.train=-"]).plan
    as_planned = [32 * ((s.forward_seconds or 0) + (s.backward_seconds or 0)) for s in plan.stages]
    slow = [as_planned[0], 2 * as_planned[1]]
    moved = moved_cut(plan, [slow] * 4, settings, 100)
    assert moved is not None and moved.blocks == planned([128, 128], [1e4, 0.5e4], *words).blocks
    assert moved.step_seconds < 0.8 * moved.step_seconds_now
    assert f"blocks {list(moved.blocks)} would take" in moved.reason(plan)
    assert moved_cut(plan, [slow] * 4, settings, 100, move_seconds=1e6) is None, "moving takes longer than it saves"
    assert moved_cut(plan, [as_planned] * 4, settings, 100) is None
    assert moved_cut(plan, [slow, slow, as_planned, slow], settings, 100) is None, "not for good"
    assert moved_cut(plan, [slow] * 3, settings, 100) is None, "too few steps"
    assert moved_cut(plan, [slow] * 4, settings, 0) is None, "nothing is left to save"
    assert moved_cut(plan, [[as_planned[0], 1.04 * as_planned[1]]] * 4, settings, 100) is None, "below the threshold"
    other = moved_plan(plan, moved, 7)
    assert other.blocks == moved.blocks and other.moved_at == 7 and other.to_dict()["blocks"] == moved.blocks
    assert other.predicted_step_seconds == moved.step_seconds, "measured, not as planned"
    assert [stage.first_block for stage in other.stages] == [0, moved.blocks[0]]
    assert (
        moved_cut(
            other, [[s * n / o for s, n, o in zip(slow, other.blocks, plan.blocks, strict=True)]] * 4, settings, 100
        )
        is None
    ), "and it stays"
    tight = planned([14, 128], [1e4, 1e4], *words)
    slower = [seconds * (1 + rank) for rank, seconds in enumerate(as_planned)]
    less_room = moved_cut(tight, [slower] * 4, settings, 100)
    assert less_room is None or less_room.blocks[0] <= most_blocks(tight.cut_costs)[0] if tight.cut_costs else False


MACS = (("m4-max", "Apple M4 Max", 128 * GB, 12956.0), ("m3-ultra", "Apple M3 Ultra", 512 * GB, 4597.0))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.long
def test_two_macs_plan_a_pipeline(
    world: World,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--dry-run of a 70B model on ranks that call themselves an M4 Max and an M3 Ultra; no weights are there."""
    import train as script

    name, chip, size, gflops = MACS[world.rank]
    monkeypatch.setattr("lib.system.hardware.quick_gflops", lambda: gflops)
    mac = hardware.Machine(host=name, device_name=chip, device="metal", memory_bytes=size)
    monkeypatch.setattr(hardware, "identify", lambda host: mac)
    monkeypatch.setattr(hardware, "memory_limit_bytes", lambda: metal_limit_bytes(size))
    monkeypatch.setattr("lib.distributed.world.host_name", lambda: name)
    if world.rank == 0:
        tiny.model_folder(folder / "llama", **LLAMA_70B)
        ids = [{"prompt_ids": [1] * 500, "chosen_ids": [2] * 500, "rejected_ids": [3] * 300}] * 80
        tiny.write_jsonl(folder / "macs.jsonl", ids)
    world.gather_text("written")
    words = [f"model.path={folder / 'llama'}", "model.random_init=true", "model.dtype=bfloat16"]
    words += [f"data.train={folder / 'macs.jsonl'}", "train.global_batch_size=16", "run.name=macs"]
    words += [f"run.dir={folder / 'runs'}", f"data.cache_dir={folder / 'data'}"]
    words += [f"plan.calibration_dir={folder / 'none'}"]
    capsys.readouterr()
    script.train(load(None, words), world, resume=False, dry_run=True)
    script.train(load(None, [*words, "strategy=pipelined", "plan.shares=[30,50]"]), world, resume=False, dry_run=True)
    if world.rank == 0:
        shown = capsys.readouterr().out
        by_plan, by_hand = shown.split("dry run: nothing is trained or written")[:2]
        assert "pipelined, because host m4-max" in by_plan and "strategy=sharded" in by_plan, by_plan
        assert "not calibrated, taken to carry 110 MB/s" in " ".join(by_plan.split()), by_plan
        assert "1-30 (30)" in by_hand and "31-80 (50)" in by_hand, by_hand
        assert not (folder / "runs").exists()
    world.gather_text("checked")
