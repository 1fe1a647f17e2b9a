"""The order in which a stage of a pipeline does its work. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Work = tuple[Literal["forward", "backward"], int]  # of the micro-batch of this number


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Work]:
    """A stage's passes in order: 1F1B (PipeDream-Flush, arXiv:2006.09503, section 2.2).

    Stage s has at most stages - s micro-batches under way at a time, however many there are.
    """
    ahead = min(stages - stage - 1, micro_batches)
    for i in range(ahead):
        yield "forward", i
    for i in range(ahead, micro_batches):
        yield "forward", i
        yield "backward", i - ahead
    for i in range(micro_batches - ahead, micro_batches):
        yield "backward", i
