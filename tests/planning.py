"""Invented hosts and facts, for the tests of plans."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lib.config.load import load
from lib.config.settings import Config
from lib.model.partition import model_shape_of
from lib.plan.calibration import BatchCurve, CurveKey, HostCalibration, Link, read_published
from lib.plan.facts import PlanFacts, RankHost
from lib.plan.memory import MemoryModel, Rows, Training
from lib.plan.pipeline import CutCosts, Hop, depths
from lib.plan.plan import ClusterPlan
from lib.plan.strategy import plan
from lib.system.hardware import Machine

LLAMA_8B = {"model_type": "llama", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "vocab_size": 128256}
LLAMA_8B |= {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
SHAPE = model_shape_of(LLAMA_8B)  # 16.06 GB of weights
KEY = CurveKey(model="m", method="lora", dtype="float32", sequence_length=128)
ROWS = Rows(prompt=512, seen=1024, tokens=1536, scored=1024)
MEMORY = MemoryModel(SHAPE, Training(), ROWS, ROWS)
LINK = Link(backend="mpi", latency_seconds=1e-3, bandwidth_bytes_per_second=1e8)
M4_MAX, M3_ULTRA = (read_published()[name].curves[0] for name in ("m4-max", "m3-ultra"))


def sections(*words: str) -> Config:
    return load(None, ["model.path=m", "data.train=d", "train.global_batch_size=32", *words])


def calibrated(
    name: str,
    rates: Mapping[int, float],
    key: CurveKey = KEY,
    peaks: Mapping[int, int] | None = None,
    limit: int | None = None,
    links: Sequence[Link] = (),
    **more: Any,
) -> HostCalibration:
    """A host whose pairs/s are known by batch size."""
    curve = BatchCurve.from_rates(rates, peaks, limit)
    curve = curve.model_copy(update={"key": key, "gradient_bytes": 4_000_000, **more})
    machine = Machine(host=name, device_name="chip", device="cpu")
    return HostCalibration(machine=machine, curves=(curve,), links=tuple(links), gflops=1e3)


def facts(hosts: Sequence[RankHost | HostCalibration | None], *words: str, **more: Any) -> PlanFacts:
    names = [getattr(getattr(host, "machine", None), "host", chr(97 + rank)) for rank, host in enumerate(hosts)]
    ranks = [one if isinstance(one, RankHost) else RankHost(name, one) for name, one in zip(names, hosts, strict=True)]
    usual = {"key": KEY, "longest": KEY.sequence_length, "backend": "mpi", "steps": 1000}
    return PlanFacts(sections(*words), ranks, **{**usual, **more})


def planned(hosts: Sequence[RankHost | HostCalibration | None], *words: str, **more: Any) -> ClusterPlan:
    return plan(facts(hosts, *words, **more))


def cut_costs(
    forward: np.ndarray, blocks: int, head: float, room: np.ndarray, hop: Hop, more: tuple[float, int]
) -> CutCosts:
    """Blocks of one byte each, that keep 0.15 for a micro-batch. forward: seconds of a block [p].

    more: the backward pass over the forward pass, and micro-batches a step.
    """
    stages = len(forward)
    end, flying = np.zeros(stages), np.array(depths(stages))
    end[-1] = head
    fixed = np.array([np.full(stages, 0.5), np.full(stages, 0.65), 0.5 + flying * 0.015])
    fixed[2, -1] = np.inf
    each = 1 + np.array([flying * 0.15, flying * 0.015, np.full(stages, 0.15)])
    return CutCosts(blocks, forward, end, more[0], each, fixed, room, (hop,) * (stages - 1), depths(stages), more[1])
