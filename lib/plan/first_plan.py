"""The plan that a run starts with."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import numpy as np

from lib.config import read_file
from lib.config.schema import Config
from lib.data import tokenizer
from lib.data.batch_shapes import padded_lengths
from lib.distributed.world import World
from lib.errors import UserError
from lib.model.partition import FAMILIES, apportion, model_shape_of
from lib.model.token_stream import length_multiple
from lib.plan import calibration, memory_ceilings
from lib.plan.calibration import HostCalibration
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.divide_work import plan_sharded
from lib.plan.memory import MemoryModel, Rows
from lib.plan.memory_trace import Training
from lib.plan.plan_warnings import advised
from lib.plan.run_facts import RankHost, RunFacts
from lib.plan.run_plan import plan_run
from lib.plan.uncalibrated_hosts import needs_rates
from lib.system import hardware, model_folder, network
from lib.system.out_of_memory import Limit

Rates = Mapping[str, Sequence[float]]  # GFLOP/s of every rank's matrix products, by host


def first_plan(
    config: Config,
    world: World,
    hosts: list[str],
    lengths: np.ndarray,
    rows: Rows | None = None,
    resumed: Path | None = None,
    typical: Rows | None = None,
) -> ClusterPlan:
    """The plan that a run starts with, and what is likely to be a mistake in it (lib/plan/plan_warnings.py).

    Each rank reads its own host's calibration, and all exchange them.

    Args:
        lengths: int [n], of the training data's rows, as Dataset.lengths.
        rows: the largest of them, for the memory model.
        resumed: the folder of a run that goes on: where it ended for want of memory, its host remembers that first.
        typical: rows of mean sizes, for the times and the traffic of a pipeline.

    Raises:
        AgreedError: a calibration is corrupt, a host too small, or settings do not fit the world.
    """
    warning = ""
    if config.strategy in ("sharded", "pipelined") and world.size == 1:
        config, warning = _on_one_rank(config, resumed is not None)
    plan = advised(config, _first_plan(config, world, hosts, lengths, rows, resumed, typical))
    world.require_equal("plan", json.dumps(plan.decisions()))  # unlike plans would lose rows, or train them twice
    return replace(plan, warnings=(warning, *plan.warnings)) if warning else plan


def _on_one_rank(config: Config, is_resumed: bool) -> tuple[Config, str]:
    """The settings of a divided run where one rank holds all, and a warning of what that leaves out.

    Raises:
        UserError: plan.shares is of several ranks, and this is no run of them that goes on.
    """
    sizes, shares, warning = config.plan.micro_batch_sizes, config.plan.shares, ""
    if shares is not None and len(shares) > 1:
        warning = f"plan.shares {list(shares)} has {len(shares)} numbers, but there is 1 rank, which holds all"
        if not is_resumed:
            raise UserError(f"{warning}; leave it out, or start {len(shares)} ranks (mpirun -n {len(shares)})")
    alone = {"shares": None, "micro_batch_sizes": sizes and sizes[:1]}
    return config.model_copy(update={"plan": config.plan.model_copy(update=alone)}), warning


def _first_plan(
    config: Config,
    world: World,
    hosts: list[str],
    lengths: np.ndarray,
    rows: Rows | None,
    resumed: Path | None,
    typical: Rows | None,
) -> ClusterPlan:
    with world.agreeing("reading the calibration"):
        own = calibration.own_calibration(Path(config.plan.calibration_dir), hosts, world.rank)
        calibration.use_quantised_products(own.quantised_products if own else ())
        folder = model_folder.resolve(config.model.path, config.model.revision)
        shape = block_shape = None
        if config.strategy in ("auto", "sharded", "pipelined") and world.size > 1:
            stored, dtype = tokenizer.stored_config(config.model), model_dtype(config)
            with contextlib.suppress(
                *([UserError] if config.strategy != "sharded" else [])
            ):  # whoever asks is told why
                shape = model_shape_of(stored, dtype)
            if config.strategy != "sharded":
                with contextlib.suppress(*([UserError] if config.strategy != "pipelined" else [])):
                    block_shape = model_shape_of(stored, dtype, to_divide=False)
        padded = padded_lengths(lengths, length_multiple(config.data))
        key = calibration.curve_key(config, folder, round(float(padded.mean())))
    # Unlike devices pad unlike: rank 0's lengths are the ones that all plan with.
    own_facts = {
        "key": key.model_dump(),
        "longest": int(padded.max()),
        "rows": rows and asdict(rows),
        "typical": typical and asdict(typical),
    }
    agreed = json.loads(world.broadcast_text(json.dumps(own_facts)))
    key = calibration.CurveKey(**agreed["key"])
    warning, limit = "", memory_limit(config, hosts, world)
    with world.agreeing("reading the calibration"):
        if (
            resumed is not None
            and (killed := memory_ceilings.killed_before(resumed, hosts[world.rank], network.host_name())) is not None
        ):
            memory = memory_ceilings.HostCeilings(Path(config.plan.calibration_dir), hosts, world.rank, key)
            warning = memory.take_over(killed, resumed)
            own = calibration.own_calibration(memory.folder, hosts, world.rank)
    warnings = [*world.gather_text(crowded_host(hosts, world.rank), "ranks and cores of every host")]
    own = memory_ceilings.bounded(own, key, limit.size_bytes if limit.is_configured else None)
    warnings += world.gather_text(warning, "what ended for want of memory")
    left, moved_at = _left_blocks(config, world, hosts, resumed)
    rates = _rates_before(world, resumed)
    ranks = _gather_hosts(world, hosts, own, limit)
    with world.agreeing("planning"):
        versions, published = hardware.versions(), list(calibration.read_published().values())
        calibrations = [rank.calibration for rank in ranks]
        if needs_rates(hosts, calibrations, key):
            rates = _matmul_rates(world, hosts, rates)
            ranks = [replace(rank, gflops=gflops) for rank, gflops in zip(ranks, _of_ranks(rates, hosts), strict=True)]
        facts = RunFacts(
            key=key,
            longest=agreed["longest"],
            backend=world.backend,
            versions=versions,
            published=published,
            dataset_size=len(lengths),
            shape=shape,
            block_shape=block_shape,
            memory_model=_memory_model(config, agreed["rows"]),
            typical_rows=Rows(**agreed["typical"]) if agreed["typical"] else None,
            left_blocks=left,
            moved_at=moved_at,
        )
        plan = plan_run(config, ranks, facts)
        plan = replace(
            plan, key=key, matmul_gflops=rates, warnings=(*dict.fromkeys(filter(None, warnings)), *plan.warnings)
        )
        return memory_ceilings.applied(plan, calibrations, config.model.may_turn_on_checkpointing)


def crowded_host(hosts: Sequence[str], rank: int) -> str:
    """A warning where more ranks compute on this rank's host than it has cores; from the first of them alone."""
    host, cores = hosts[rank], os.cpu_count() or 1
    count = hosts.count(host)
    if count <= cores or hosts.index(host) != rank or hardware.mlx_device()[0] != "cpu":
        return ""
    return (
        f"{host}: {count} ranks compute on {cores} cores and wait for each other's; start at most {cores} there "
        f"(mpirun -n {cores}, or fewer slots in the host file)"
    )


def _left_blocks(
    config: Config, world: World, hosts: Sequence[str], resumed: Path | None
) -> tuple[tuple[int, ...], int | None]:
    """Each rank's blocks in the run that goes on, and after which step its cut was moved; nothing, if it never was."""
    if resumed is None or config.strategy != "pipelined" or config.plan.shares is not None:
        return (), None
    left: tuple[list[int], int | None] = [], None
    if world.rank == 0:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            plan = read_file.read_object(resumed / "plan.json", "the run's")
            if plan["moved_at"] is not None and [rank["host"] for rank in plan["ranks"]] == list(hosts):
                left = [int(count) for count in plan["blocks"]], int(plan["moved_at"])
    blocks, moved_at = json.loads(world.broadcast_text(json.dumps(left)))
    return tuple(blocks), moved_at


def _gather_hosts(
    world: World, hosts: Sequence[str], calibration: HostCalibration | None, limit: Limit
) -> list[RankHost]:
    """What every rank knows of its own host. calibration, limit: this rank's."""
    texts = world.gather_long_text(calibration.model_dump_json() if calibration else "", "every host's calibration")
    memory_bytes = world.gather_text(json.dumps(limit.size_bytes), "every host's memory")
    identity = hardware.identify(hosts[world.rank])
    chips = world.gather_text(identity.device_name, "every host's chip")
    devices = world.gather_text(identity.device, "every host's device")
    return [
        RankHost(
            name=hosts[rank],
            calibration=HostCalibration.model_validate_json(texts[rank]) if texts[rank] else None,
            device_name=chips[rank],
            device=cast(hardware.Device, devices[rank]),
            memory_bytes=json.loads(memory_bytes[rank]),
        )
        for rank in range(len(hosts))
    ]


def _rates_before(world: World, resumed: Path | None) -> Rates:
    """What was measured when the run started that goes on, as rank 0 has it."""
    if resumed is None:
        return {}
    rates: Rates = {}
    if world.rank == 0:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            stored = read_file.read_object(resumed / "plan.json", "the run's")["matmul_gflops"]
            kept = {host: [float(rate) for rate in of_host] for host, of_host in stored.items()}
            rates = {host: of_host for host, of_host in kept.items() if all(1e-3 < rate < 1e9 for rate in of_host)}
    known: Rates = json.loads(world.broadcast_text(json.dumps(rates)))
    return known


def _matmul_rates(world: World, hosts: Sequence[str], before: Rates) -> Rates:
    """Every host's: those of before where all are known, so that a restart divides the work as it was; else as now.

    Rates of two moments are never mixed: the machines may have been idle at one of them alone.
    """
    if all(len(before.get(host, ())) == hosts.count(host) for host in hosts):
        return before
    measured = world.gather_text(repr(hardware.quick_gflops()), "every rank's matrix-product rate")
    own: dict[str, list[float]] = {}
    for host, rate in zip(hosts, measured, strict=True):
        own.setdefault(host, []).append(float(rate))
    return own


def _of_ranks(rates: Rates, hosts: Sequence[str]) -> list[float]:
    left = {host: list(of_host) for host, of_host in rates.items()}
    return [left[host].pop(0) for host in hosts]


def _memory_model(config: Config, rows: dict[str, int] | None) -> MemoryModel | None:
    """What the memory model knows of a run; None of families whose config.json has other names for its dimensions."""
    if rows is None:
        return None
    stored = tokenizer.stored_config(config.model)
    try:
        shape = model_shape_of(stored, model_dtype(config), to_divide=False)
    except (UserError, ValueError, TypeError):
        return None
    return MemoryModel(
        shape,
        Training.of(config, shape.blocks, config.data.shared_prompts and stored.get("model_type") in FAMILIES),
        Rows(**rows),
    )


def sharded_plan(config: Config, world: World, hosts: list[str]) -> ClusterPlan:
    """The division of a model, from what every host has: memory, and the calibrated rate of its matrix products.

    Raises:
        AgreedError: the model cannot be divided, or not among these hosts.
    """
    with world.agreeing("reading the calibration"):
        own = calibration.own_calibration(Path(config.plan.calibration_dir), hosts, world.rank)
        shape = model_shape_of(tokenizer.stored_config(config.model), model_dtype(config))
        memory = memory_limit(config, hosts, world).size_bytes
    texts = world.gather_text(json.dumps([memory, own.gflops if own else None]), "every host's memory and speed")
    with world.agreeing("planning"):
        ranks = [
            RankHost(host, memory_bytes=memory_bytes, gflops=gflops)
            for host, (memory_bytes, gflops) in zip(hosts, map(json.loads, texts), strict=True)
        ]
        return plan_sharded(config, ranks, shape)


def stage_blocks(config: Config, world: World, hosts: list[str]) -> tuple[int, ...]:
    """Consecutive blocks of each rank, where only forward passes are to be made: as plan.shares says, else by memory.

    Raises:
        AgreedError: there are more ranks than blocks, or plan.shares does not fit.
    """
    limit = memory_limit(config, hosts, world).size_bytes
    memory = [float(text or 0) for text in world.gather_text(str(limit or ""), "every host's memory")]
    with world.agreeing("planning"):
        blocks = model_shape_of(tokenizer.stored_config(config.model), to_divide=False).blocks
        shares = config.plan.shares
        if world.size > blocks:
            raise UserError(
                f"strategy=pipelined: {world.size} ranks, but the model has only {blocks} blocks; use fewer ranks"
            )
        if shares is not None and (len(shares) != world.size or sum(shares) != blocks):
            raise UserError(
                f"plan.shares {list(shares)}: with strategy=pipelined give each of {world.size} ranks its blocks, "
                f"{blocks} in all; or plan.shares=null"
            )
        return shares or apportion(blocks, memory if all(memory) else [1.0] * world.size)


def model_dtype(config: Config) -> str | None:
    """Of the weights, where it is not the stored one."""
    return config.model.dtype or ("float32" if config.model.random_init else None)


def memory_limit(config: Config, hosts: list[str], world: World) -> Limit:
    """What this rank may use."""
    configured = config.plan.memory_limit_gb
    if isinstance(configured, dict):
        configured = configured.get(hosts[world.rank])
    if configured is not None:
        return Limit(round(configured * 1e9), is_configured=True)
    memory = hardware.memory_limit_bytes()
    if memory and hardware.mlx_device()[0] != "cuda":  # there, each rank has a GPU of its own
        memory //= hosts.count(hosts[world.rank])
    return Limit(memory)
