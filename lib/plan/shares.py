"""Who does how much of a step: pure functions from measured curves to shares and micro-batches.

Host i takes tau_i(b) seconds for a micro-batch of b pairs, and t_i(n) = min over b of t_i(n - b) + tau_i(b)
for n pairs in micro-batches of any sizes, and o_i for what it does besides (the update, ...), whatever n. A
global batch of B pairs is divided to minimise max t_i(n_i) + o_i: the slowest rank ends the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from lib.errors import UserError
from lib.plan.calibration import MEMORY_HEADROOM, BatchCurve

DEFAULT_MICRO_BATCH_SIZE = 8  # where nothing is measured
TIDY_TOLERANCE = 0.01  # of the step's time, given up for micro-batches of one size


class TooLarge(UserError):
    """A host's memory does not hold the model and one pair, which need so many bytes."""

    def __init__(self, message: str, needed_bytes: int):
        super().__init__(message)
        self.needed_bytes = needed_bytes


def check_memory(host: str, curve: BatchCurve) -> None:
    """Whether the host can run the smallest measured micro-batch.

    Raises:
        TooLarge: it cannot; with what it needs and has.
    """
    if curve.max_batch_size == 0:
        smallest = curve.points[0]
        assert smallest.peak_memory_bytes is not None and curve.memory_limit_bytes is not None
        pairs = "one pair needs" if smallest.batch_size == 1 else f"{smallest.batch_size} pairs need"
        raise TooLarge(
            f"host {host}: {pairs} {smallest.peak_memory_bytes / 1e9:.2f} GB, but it has "
            f"{curve.memory_limit_bytes / 1e9:.2f} GB less {MEMORY_HEADROOM:.0%} headroom; try "
            "model.gradient_checkpointing=true or a smaller data.max_length, or leave the host out",
            smallest.peak_memory_bytes,
        )


def equal_shares(global_batch_size: int, world_size: int) -> list[int]:
    """Shares that differ by one pair at most; the first ranks take the remainder."""
    each, more = divmod(global_batch_size, world_size)
    return [each + (rank < more) for rank in range(world_size)]


def distribute_work(total_examples: int, ratios: Sequence[float]) -> list[int]:
    """Shares in proportion to `ratios`, rounded by largest remainder; they sum to total_examples."""
    exact = np.round(total_examples * np.asarray(ratios, dtype=np.float64) / sum(ratios), 9)
    shares = np.floor(exact).astype(int)
    most_cut_first = np.argsort(shares - exact, kind="stable")
    shares[most_cut_first[: total_examples - shares.sum()]] += 1
    return [int(share) for share in shares]


def check_count(setting: str, numbers: Sequence[int], world_size: int) -> None:
    """Whether a setting has one number a rank.

    Raises:
        UserError: it has not.
    """
    if len(numbers) != world_size:
        raise UserError(
            f"{setting} {list(numbers)} has {len(numbers)} numbers, but there are {world_size} ranks; give one a rank"
        )


def split_evenly_sized(share: int, micro_batch_size: int) -> tuple[int, ...]:
    """Micro-batches of one size, and what is left: 20 pairs by 8 are 8, 8, 4."""
    whole, rest = divmod(share, micro_batch_size)
    return (micro_batch_size,) * whole + ((rest,) if rest else ())


def solo_pairs_per_second(curve: BatchCurve) -> float:
    """R = max over b of b / tau(b), within memory."""
    sizes = np.arange(1, curve.max_batch_size + 1)
    return float(np.max(sizes / curve.seconds(sizes)))


def fastest_micro_batches(curve: BatchCurve, share: int) -> tuple[int, ...]:
    """The micro-batches that attain t(share), the largest first; of equally fast ones, the largest sizes."""
    tau = curve.seconds(np.arange(1, curve.max_batch_size + 1))
    times = step_times(tau[None], share)[0]
    batches = []
    rest = share
    while rest:
        most = min(rest, len(tau))
        candidates = times[rest - most : rest][::-1] + tau[:most]
        near_best = np.flatnonzero(candidates <= times[rest] * (1 + 1e-12))
        batches.append(int(near_best[-1]) + 1)
        rest -= batches[-1]
    return tuple(sorted(batches, reverse=True))


def best_shares(
    hosts: Sequence[str],
    curves: Sequence[BatchCurve],
    global_batch_size: int,
    sync_seconds: float = 0.0,
    micro_batch_sizes: Sequence[int] | None = None,
) -> tuple[list[int], str]:
    """The shares of the shortest step, and why: all hosts together, or the best one alone, without a sync."""
    kinds = _Kinds(curves, micro_batch_sizes)
    shares, seconds, shortest = kinds.divide(global_batch_size)
    together = seconds + sync_seconds
    best_host, alone = kinds.best_alone(global_batch_size)
    if alone <= together:
        others = listed([f"{host} (rank {rank})" for rank, host in enumerate(hosts) if rank != best_host])
        reason = (
            f"leave out {others}: {hosts[best_host]} alone takes {alone:.4g} s a step, together they take "
            f"{together:.4g} s, {sync_seconds:.4g} s of it sync; a larger train.global_batch_size may help"
        )
        return [global_batch_size * (rank == best_host) for rank in range(len(hosts))], reason
    equal = kinds.seconds(equal_shares(global_batch_size, len(hosts))) + sync_seconds
    reason = (
        f"shares from the hosts' curves: {together:.4g} s a step; equal shares {equal:.4g} s, "
        f"the best host alone ({hosts[best_host]}) {alone:.4g} s"
    )
    if seconds > shortest * (1 + 1e-9):
        reason += f"; in whole micro-batches of one size a host, {seconds / shortest - 1:.1%} above the least"
    return shares, reason


def step_times(tau: np.ndarray, pairs: int) -> np.ndarray:
    """t(n) for n = 0..pairs, float64 [K, pairs + 1], from tau(1..M), [K, M]; inf marks what does not fit."""
    times = np.zeros((tau.shape[0], pairs + 1))
    for n in range(1, pairs + 1):
        most = min(n, tau.shape[1])
        times[:, n] = (times[:, n - most : n][:, ::-1] + tau[:, :most]).min(axis=1)
    return times


def within_memory(weights: Sequence[float], room: Sequence[float]) -> list[float] | None:
    """Weights under which no rank gets more than its room, a fraction of all; None if all rooms together are too small.

    Those that are full stay full; what is left goes to the others in proportion to their weights.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if all(share <= space for share, space in zip(shares, room, strict=True)):
        return list(weights)
    if sum(room) < 1:
        return None
    full: set[int] = set()
    while True:
        left = 1 - sum(room[rank] for rank in full)
        open_weight = sum(weight for rank, weight in enumerate(weights) if rank not in full)
        shares = [room[r] if r in full else left * weight / open_weight for r, weight in enumerate(weights)]
        over = {rank for rank, share in enumerate(shares) if share > room[rank] * (1 + 1e-12)}
        if not over:
            return shares
        full |= over


class _Kinds:
    """Hosts grouped by equal curves, and the table t(n) of each kind, as long as is needed."""

    def __init__(self, curves: Sequence[BatchCurve], micro_batch_sizes: Sequence[int] | None) -> None:
        sizes: Sequence[int | None] = micro_batch_sizes or [None] * len(curves)
        members = {(curve_identity(curve), size): (curve, size) for curve, size in zip(curves, sizes, strict=True)}
        numbers = {identity: number for number, identity in enumerate(members)}
        kinds = [numbers[curve_identity(curve), size] for curve, size in zip(curves, sizes, strict=True)]
        self.of_rank = np.array(kinds)
        self.counts = np.bincount(self.of_rank)
        self.fixed = [size for _, size in members.values()]
        self.curves = [curve for curve, _ in members.values()]
        widest = max(size or curve.max_batch_size for curve, size in members.values())
        self.tau = np.full((len(members), widest), np.inf)
        for kind, (curve, size) in enumerate(members.values()):
            most = size or curve.max_batch_size
            self.tau[kind, :most] = curve.seconds(np.arange(1, most + 1))
        self.rates = (np.arange(1, widest + 1) / self.tau).max(axis=1)
        self.overheads = np.array([curve.step_overhead_seconds for curve in self.curves])

    def times(self, pairs: int) -> np.ndarray:
        """t(0..pairs) + o of all kinds, float64 [K, pairs + 1]."""
        times = step_times(self.tau, pairs)
        for kind, size in enumerate(self.fixed):
            if size:  # whole micro-batches of that size, and what is left
                tau = np.concatenate([[0.0], self.tau[kind]])
                whole, rest = np.divmod(np.arange(pairs + 1), size)
                times[kind] = whole * tau[size] + tau[rest]
        return times + self.overheads[:, None]

    def seconds(self, shares: Sequence[int] | np.ndarray) -> float:
        """max t_i(n_i) + o_i."""
        return float(self.times(max(shares))[self.of_rank, np.asarray(shares)].max())

    def best_alone(self, pairs: int) -> tuple[int, float]:
        """The rank that does all pairs soonest, and its time."""
        alone = self.times(pairs)[:, -1]
        kind = int(alone.argmin())
        return int(np.flatnonzero(self.of_rank == kind)[0]), float(alone[kind])

    def divide(self, pairs: int) -> tuple[list[int], float, float]:
        """argmin of max t_i(n_i) over sum n_i = pairs, up to TIDY_TOLERANCE; its time, and the least."""
        length = min(pairs, int(2 * pairs * self.rates.max() / (self.rates @ self.counts)) + self.tau.shape[1])
        while True:
            times = self.times(length)
            # The most pairs that a kind can do within T; a noisy curve may fall, so look from the end.
            rising = np.minimum.accumulate(times[:, ::-1], axis=1)[:, ::-1]
            # Beyond the table no host is done before this: t(n) >= n / rate.
            horizon = np.inf if length == pairs else float(((length + 1) / self.rates).min())
            longest = min(float(rising[:, -1].max()), horizon * (1 - 1e-9))
            if _capacity(rising, longest) @ self.counts >= pairs:
                break
            length = min(pairs, 2 * length)
        too_short, enough = 0.0, longest
        while enough - too_short > 1e-12 * enough:
            middle = (too_short + enough) / 2
            if _capacity(rising, middle) @ self.counts >= pairs:
                enough = middle
            else:
                too_short = middle
        shares = self._fill(_capacity(rising, too_short), _capacity(rising, enough), pairs)
        seconds = float(times[self.of_rank, shares].max())
        tidy = self._tidy_shares(seconds, pairs)
        shares = shares if tidy is None else tidy
        return [int(share) for share in shares], self.seconds(shares), seconds

    def _fill(self, base: np.ndarray, most: np.ndarray, pairs: int) -> np.ndarray:
        """Each host's capacity just before the last moment, then one more pair each in turn, by rank."""
        shares, room = base[self.of_rank], (most - base)[self.of_rank]
        left = pairs - int(shares.sum())
        while left:
            takers = np.flatnonzero(room)[:left]
            shares[takers] += 1
            room[takers] -= 1
            left -= len(takers)
        return shares

    def _tidy_shares(self, seconds: float, pairs: int) -> np.ndarray | None:
        """Shares of whole micro-batches, one measured size a host, if some fit within the tolerance.

        They rest on measured times and not on interpolated ones, and each host compiles one shape.
        """
        limit = seconds * (1 + TIDY_TOLERANCE)
        options: list[list[tuple[float, int]]] = []  # of each kind: (time, share)
        for kind, (curve, fixed) in enumerate(zip(self.curves, self.fixed, strict=True)):
            overhead = float(self.overheads[kind])
            best: dict[int, float] = {0: overhead}
            measured = [point.batch_size for point in curve.points if point.batch_size <= curve.max_batch_size]
            for size in [fixed] if fixed else measured:
                tau = self.tau[kind, size - 1]
                most = min(int((limit - overhead) / tau), pairs // size)
                for count in range(max(1, most - 2), most + 1):
                    best[count * size] = min(best.get(count * size, np.inf), count * tau + overhead)
            options.append(sorted((time, share) for share, time in best.items()))
        for moment in sorted({time for some in options for time, _ in some if time >= seconds * (1 - 1e-9)}):
            shares = np.array([max((share for time, share in some if time <= moment), default=0) for some in options])
            if shares @ self.counts == pairs:
                return shares[self.of_rank]
        return None


def _capacity(rising: np.ndarray, seconds: float) -> np.ndarray:
    """The most pairs of each kind that are done within `seconds`: int [K]."""
    within: np.ndarray = np.maximum(np.sum(rising <= seconds, axis=1) - 1, 0)
    return within


def curve_identity(curve: BatchCurve) -> Hashable:
    """What the planner sees of a curve."""
    return (
        curve.max_batch_size,
        curve.step_overhead_seconds,
        tuple((point.batch_size, point.seconds_median) for point in curve.points),
    )


def listed(names: Sequence[str], most: int = 8) -> str:
    """The names, or the first of very many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
