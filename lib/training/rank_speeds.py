"""How fast independent ranks are, as they measure it: shares and micro-batches follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lib.plan.cluster_plan import ClusterPlan
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, distribute_work


@dataclass
class RankReport:
    """What a rank tells the others of its local steps since they synchronised last."""

    max_micro_batch_size: int | None  # that memory leaves
    round_end_seconds: float | None  # of the round before
    rewards: list[float]  # train.loss=bco: sum and count of all rewards so far, as this rank's steps know them
    steps: int = 0
    tokens: int = 0
    timed_tokens: int = 0  # without the first step, which compiles
    timed_seconds: float = 0.0
    stopped: str | None = None  # why training cannot go on
    failed: str | None = None  # a user's error, or a disk's
    skipped_in_row: int = 0  # updates that were not finite, the last ones of this rank


class RankSpeeds:
    """Every rank's speed and share, and the micro-batches that its memory leaves.

    Args:
        follows: whether shares follow the speeds that are measured.
    """

    def __init__(self, plan: ClusterPlan, follows: bool):
        self.follows = follows
        self.shares = plan.shares
        self.micro_batch_sizes = [max(r.micro_batch_sizes, default=DEFAULT_MICRO_BATCH_SIZE) for r in plan.ranks]
        self.max_micro_batch_sizes = [rank.max_micro_batch_size for rank in plan.ranks]  # None: whatever was planned
        predicted = [(rank.share, rank.predicted_compute_seconds) for rank in plan.ranks]
        self.speeds = [share / seconds if seconds else 0.0 for share, seconds in predicted]  # pairs/s; 0 is unknown

    def are_known(self) -> bool:
        """Of all ranks that have work."""
        return all(speed for speed, share in zip(self.speeds, self.shares, strict=True) if share)

    def measure(self, reports: Sequence[RankReport], pairs: Sequence[int]) -> None:
        """New speeds, and shares in proportion to them; in tokens a second, so that longer rows are no slowdown."""
        tokens_a_pair = sum(report.tokens for report in reports) / max(1, sum(pairs))
        for rank, report in enumerate(reports):
            if report.timed_seconds and tokens_a_pair:
                self.speeds[rank] = report.timed_tokens / report.timed_seconds / tokens_a_pair
        if self.follows and self.are_known():
            shares = distribute_work(sum(self.shares), self.speeds)
            for rank, before in enumerate(self.shares):
                if before and not shares[rank]:  # a rank that never works is never measured again
                    shares[rank] += 1
                    shares[shares.index(max(shares))] -= 1
            self.shares = shares

    def limit(self, rank: int, size: int | None) -> None:
        """Keeps a rank's micro-batches to what its memory was seen to leave."""
        if size is not None:
            self.max_micro_batch_sizes[rank] = min(size, self.max_micro_batch_sizes[rank] or size)
            self.micro_batch_sizes[rank] = min(self.micro_batch_sizes[rank], size)
