"""How much of a step each host does: from measured curves to shares and micro-batches.

Host i takes tau_i(b) seconds for a micro-batch of b pairs, t_i(n) = min over b of t_i(n - b) + tau_i(b) for n pairs,
and o_i for the update. Shares minimise max t_i(n_i) + o_i over sum n_i = B: the slowest rank ends the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from lib.data.order import divide_rows
from lib.errors import UserError
from lib.plan.calibration import MEMORY_HEADROOM, BatchCurve

DEFAULT_MICRO_BATCH_SIZE = 8  # where nothing is measured
TIDY_TOLERANCE = 0.01  # of the step's time, given up for micro-batches of one size


class TooLarge(UserError):
    """A host's memory does not hold the model and one pair, which need so many bytes."""

    def __init__(self, host: str, pairs: int, needed_bytes: int | None, limit_bytes: int | None):
        self.needed_bytes = needed_bytes or 0
        needs = "one pair needs" if pairs == 1 else f"{pairs} pairs need"
        super().__init__(
            f"host {host}: {needs} {self.needed_bytes / 1e9:.2f} GB, but it has {(limit_bytes or 0) / 1e9:.2f} GB less "
            f"{MEMORY_HEADROOM:.0%} headroom"
        )


def distribute_work(total_examples: int, ratios: Sequence[float]) -> list[int]:
    """Shares in proportion to `ratios`, rounded by largest remainder; they sum to total_examples."""
    return [*map(int, divide_rows(total_examples, ratios))]


def check_count(setting: str, numbers: Sequence[int] | None, world_size: int) -> None:
    """Raises UserError where a setting has not one number a rank."""
    if numbers is not None and len(numbers) != world_size:
        counts = f"has {len(numbers)} numbers, but there are {world_size} ranks"
        raise UserError(f"{setting} {list(numbers)} {counts}; give one a rank")


def split_evenly_sized(share: int, micro_batch_size: int) -> tuple[int, ...]:
    """Micro-batches of one size, and the rest: 20 pairs by 8 are 8, 8, 4."""
    whole, rest = divmod(share, micro_batch_size)
    return (micro_batch_size,) * whole + ((rest,) if rest else ())


def taus(curve: BatchCurve, most: int | None = None) -> np.ndarray:
    """tau(1..most), by default of all sizes that fit, or one where none does: float64 [M]."""
    return curve.seconds(np.arange(1, (most or curve.max_batch_size or 1) + 1))


def solo_pairs_per_second(curve: BatchCurve) -> float:
    """R = max over b of b / tau(b), within memory."""
    tau = taus(curve)
    return float((np.arange(1, len(tau) + 1) / tau).max())


def step_times(tau: np.ndarray, pairs: int) -> np.ndarray:
    """t(n) for n = 0..pairs, float64 [K, pairs + 1], from tau(1..M), [K, M]; inf marks what does not fit."""
    times = np.zeros((tau.shape[0], pairs + 1))
    for n in range(1, pairs + 1):
        most = min(n, tau.shape[1])
        times[:, n] = (times[:, n - most : n][:, ::-1] + tau[:, :most]).min(axis=1)
    return times


def fastest_micro_batches(curve: BatchCurve, share: int) -> tuple[int, ...]:
    """The micro-batches that attain t(share), the largest first; of equally fast ones, the largest sizes."""
    tau, batches = taus(curve), list[int]()
    times = step_times(tau[None], share)[0]
    while rest := share - sum(batches):
        most = min(rest, len(tau))
        candidates = times[rest - most : rest][::-1] + tau[:most]
        batches.append(int(np.flatnonzero(candidates <= times[rest] * (1 + 1e-12))[-1]) + 1)
    return tuple(sorted(batches, reverse=True))


def best_shares(
    hosts: Sequence[str],
    curves: Sequence[BatchCurve],
    global_batch_size: int,
    sync_seconds: float = 0.0,
    micro_batch_sizes: Sequence[int] | None = None,
) -> tuple[list[int], str]:
    """The shares of the shortest step, and why: all hosts together, or the best one alone, without a sync."""
    kinds = _Kinds(curves, micro_batch_sizes or [None] * len(curves), global_batch_size)
    shares, shortest = kinds.divide()
    seconds, alone = kinds.seconds(shares), kinds.times[:, -1]
    if alone.min() <= seconds + sync_seconds:
        best = int(np.flatnonzero(kinds.of_rank == alone.argmin())[0])
        others = listed([f"{host} (rank {rank})" for rank, host in enumerate(hosts) if rank != best])
        times = f"{hosts[best]} alone takes {alone.min():.4g} s a step, together they take {seconds + sync_seconds:.4g}"
        reason = f"leave out {others}: {times} s; a larger train.global_batch_size may help"
        return [global_batch_size * (rank == best) for rank in range(len(hosts))], reason
    above = f"; in whole micro-batches of one size a host, {seconds / shortest - 1:.1%} above the least"
    return shares.tolist(), "shares from the hosts' curves" + above * (seconds > shortest * (1 + 1e-9))


class _Kinds:
    """Hosts grouped by equal curves, and how long each of K kinds takes for 0..pairs pairs."""

    def __init__(self, curves: Sequence[BatchCurve], sizes: Sequence[int | None], pairs: int) -> None:
        kinds: dict[Hashable, int] = {}  # the first rank of each
        pairwise = enumerate(zip(curves, sizes, strict=True))
        firsts = [  # by all that the planner sees of a curve
            kinds.setdefault((c.points, c.max_batch_size, c.step_overhead_seconds, size), rank)
            for rank, (c, size) in pairwise
        ]
        ranks, self.of_rank, self.counts = np.unique(firsts, return_inverse=True, return_counts=True)
        self.pairs, self.curves, self.fixed = pairs, [curves[rank] for rank in ranks], [sizes[rank] for rank in ranks]
        tau = [taus(curve, size) for curve, size in zip(self.curves, self.fixed, strict=True)]
        self.tau = np.full((len(tau), max(map(len, tau))), np.inf)
        for kind, of_kind in enumerate(tau):
            self.tau[kind, : len(of_kind)] = of_kind
        self.times = step_times(self.tau, pairs)  # t(0..pairs) + o, float64 [K, pairs + 1]
        for kind, size in enumerate(self.fixed):
            if size:  # whole micro-batches of that size, and the rest
                whole, rest = np.divmod(np.arange(pairs + 1), size)
                self.times[kind] = whole * tau[kind][size - 1] + np.concatenate([[0.0], tau[kind]])[rest]
        self.times += np.array([[curve.step_overhead_seconds] for curve in self.curves])

    def seconds(self, shares: np.ndarray) -> float:
        """max t_i(n_i) + o_i."""
        return float(self.times[self.of_rank, shares].max())

    def divide(self) -> tuple[np.ndarray, float]:
        """argmin of max t_i(n_i) over sum n_i = pairs, up to TIDY_TOLERANCE: int [ranks]; and the least time."""
        rising = np.minimum.accumulate(self.times[:, ::-1], axis=1)[:, ::-1]  # a noisy curve may fall
        moments = rising[:, 1:].ravel()  # each one pair more of all hosts of a kind
        order = np.argsort(moments)
        done = np.cumsum(np.repeat(self.counts, self.pairs)[order])
        last = moments[order[np.searchsorted(done, self.pairs)]]
        # Each host's capacity just before the last moment, then one more pair each in turn, by rank.
        before, within = (np.maximum(fit.sum(axis=1) - 1, 0) for fit in (rising < last, rising <= last))
        shares, room = before[self.of_rank], (within - before)[self.of_rank]
        while left := self.pairs - int(shares.sum()):
            takers = np.flatnonzero(room)[:left]
            shares[takers] += 1
            room[takers] -= 1
        seconds = self.seconds(shares)
        tidy = self._tidy_shares(seconds)
        return (shares if tidy is None else tidy), seconds

    def _tidy_shares(self, seconds: float) -> np.ndarray | None:
        """Shares of whole micro-batches, one measured size a host, if some fit within the tolerance. They rest on
        measured times and not on interpolated ones, and each host compiles one shape."""
        tidy = np.full(self.times.shape, np.inf)
        for kind, (curve, fixed) in enumerate(zip(self.curves, self.fixed, strict=True)):
            sizes = [point.batch_size for point in curve.points if point.batch_size <= curve.max_batch_size]
            for size in [fixed] if fixed else sizes:
                count = np.arange(self.pairs // size + 1)
                times = count * self.tau[kind, size - 1] + curve.step_overhead_seconds
                tidy[kind, count * size] = np.minimum(tidy[kind, count * size], times)
        is_near = (tidy >= seconds * (1 - 1e-9)) & (tidy <= seconds * (1 + TIDY_TOLERANCE))
        for moment in np.unique(tidy[is_near]):
            shares = np.array([np.flatnonzero(of_kind <= moment)[-1] for of_kind in tidy])
            if shares @ self.counts == self.pairs:
                return shares[self.of_rank]
        return None


def listed(names: Sequence[str], most: int = 8) -> str:
    """The names, or the first of very many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
