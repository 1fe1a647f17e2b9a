"""The facts that a plan rests on (lib/plan), exchanged between the ranks; and the plan that a run starts with."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lib.config.settings import Config, ModelSettings, PlanSettings
from lib.data import tokenizer
from lib.data.batch_shapes import padded_lengths
from lib.data.dataset import Dataset
from lib.data.prompts import Prompts
from lib.data.streaming import StreamedDataset
from lib.distributed.world import World
from lib.errors import UserError
from lib.model import adapter_files
from lib.model.partition import FAMILIES, ModelShape, apportion, model_shape_of
from lib.model.token_stream import length_multiple
from lib.plan import calibration
from lib.plan.calibration import CurveKey, HostCalibration, nearest_curve
from lib.plan.facts import PlanFacts, RankHost
from lib.plan.memory import ADAM, OPTIMIZERS, MemoryModel, Rows, Training
from lib.plan.pipeline import configured_blocks
from lib.plan.plan import ClusterPlan, advised
from lib.plan.sharded import plan_sharded
from lib.plan.strategy import plan
from lib.system import hardware, model_folder
from lib.system.out_of_memory import Limit

RATES = "every rank's matrix-product rate"


def plan_run(
    config: Config,
    world: World,
    hosts: Sequence[str],
    data: Dataset | StreamedDataset | Prompts,
    resumed: Path | None = None,
) -> ClusterPlan:
    """The plan that a run starts with, the same on all ranks, with what is likely to be a mistake in it. data: its
    training rows. resumed: a run that goes on."""
    if config.strategy in ("sharded", "pipelined") and world.size == 1:
        config = config.model_copy(update={"plan": _alone(config.plan, resumed is not None)})
    stored: dict[str, Any] = {}  # the run's plan.json on rank 0's disk
    if resumed is not None and world.rank == 0:
        with contextlib.suppress(OSError, ValueError):
            stored = json.loads((resumed / "plan.json").read_text(encoding="utf-8"))
    before, rates = world.broadcast_value([stored.get("ranks") or [], stored.get("matmul_gflops") or {}])
    # Every rank's threads: as when the run started that goes on, else as is faster now.
    host = hosts[world.rank]
    threads = next((rank.get("blas_threads") for rank in before if rank["host"] == host), None)
    threads = hardware.choose_threads(threads, hosts.count(host) == 1, config.plan.replan)
    every = world.gather_values(threads, "every rank's threads")
    crowded = world.gather_text(_crowded(hosts, world.rank, threads), "ranks and cores of every host")
    facts, rates = _gather_facts(config, world, hosts, data, rates)
    with world.agreeing("planning"):
        first = advised(config.plan, config.train, config.strategy, plan(facts))
        ranks = [replace(rank, blas_threads=count) for rank, count in zip(first.ranks, every, strict=True)]
        earlier = [tuple(rank["micro_batch_sizes"]) for rank in before]  # as a trial chose them
        if config.plan.micro_batch_sizes is None and list(map(sum, earlier)) == [rank.share for rank in ranks]:
            for i, (rank, sizes) in enumerate(zip(ranks, earlier, strict=True)):
                if max(sizes, default=0) < max(rank.micro_batch_sizes, default=0):
                    ranks[i] = replace(rank, micro_batch_sizes=sizes)
        warnings = (*first.warnings, *filter(None, crowded))
        basis = replace(first.basis, matmul_gflops=rates)
        first = replace(first, basis=basis, ranks=tuple(ranks), warnings=warnings)
    world.require_equal("plan", json.dumps(first.decisions()))  # unlike plans would lose rows, or train them twice
    return first


def _crowded(hosts: Sequence[str], rank: int, threads: int | None) -> str:
    """A warning where this host's ranks compute with more threads than it has cores; from the first of them alone."""
    ranks, cores, given = hosts.count(hosts[rank]), os.cpu_count() or 1, os.environ.get("OPENBLAS_NUM_THREADS", "")
    threads = threads or int(given if given.isdigit() else 1)
    if ranks * threads <= cores or hosts.index(hosts[rank]) != rank or hardware.mlx_device()[0] != "cpu":
        return ""
    remedy = "start fewer" if threads == 1 else "export OPENBLAS_NUM_THREADS=1"
    return f"{hosts[rank]}: {ranks} ranks of {threads} threads compute on {cores} cores and slow each other; {remedy}"


def _alone(settings: PlanSettings, is_resumed: bool) -> PlanSettings:
    """The settings of a divided model that one rank has whole."""
    sizes, shares = settings.micro_batch_sizes, settings.shares or ()
    if len(shares) > 1 and not is_resumed:
        remedy = f"leave it out, or start {len(shares)} ranks (mpirun -n {len(shares)})"
        raise UserError(f"plan.shares {list(shares)} has {len(shares)} numbers, but there is 1 rank; {remedy}")
    return settings.model_copy(update={"shares": None, "micro_batch_sizes": sizes and sizes[:1]})


def _gather_facts(
    config: Config,
    world: World,
    hosts: Sequence[str],
    data: Dataset | StreamedDataset | Prompts,
    rates: dict[str, list[float]],
) -> tuple[PlanFacts, Mapping[str, Sequence[float]]]:
    """What a plan depends on, the same on all ranks; and the matrix-product rates by host that were measured for it.
    rates: those of a run that goes on, which divides the work as before."""
    with world.agreeing("reading the calibration"):
        rank_calibration = calibration.read_of_rank(Path(config.plan.calibration_dir), hosts, world.rank)
        divided = config.strategy if world.size > 1 else ""
        block_shape = _shape(config.model, False, divided == "pipelined")
        shape = _shape(config.model, True, divided == "sharded")
        multiple, folder = length_multiple(config.data), model_folder.resolve(config.model.path, config.model.revision)
        padded = padded_lengths(data.lengths, multiple)
        key = calibration.curve_key(config.model, config.record_kind, folder, round(float(padded.mean())))
    # Unlike devices pad unlike: rank 0's lengths are the ones that all plan with. Rows: the largest, for memory; and of
    # mean sizes, for the times of divided models.
    rows = [asdict(rows_of(*data.trained, multiple)) for rows_of in (Rows.of, Rows.mean)]
    stored_key, longest, rows = world.broadcast_value([key.model_dump(), int(padded.max()), rows])
    key, (largest, typical) = CurveKey(**stored_key), (Rows(**some) for some in rows)
    limit = memory_limit(config.plan, hosts, world)
    if limit.is_configured and rank_calibration is not None:
        rank_calibration = _within(rank_calibration, limit.size_bytes)
    ranks, usual = _gather_hosts(world, hosts, rank_calibration, limit), None
    if None not in [host.calibration and nearest_curve(host.calibration.curves, key) for host in ranks]:
        rates = {}
    elif len(set(hosts)) == 1:
        rates, usual = {}, statistics.fmean(world.gather_values(hardware.gflops(), RATES))
    else:
        if any(len(rates.get(host, ())) != hosts.count(host) for host in hosts):
            rates = {host: [] for host in hosts}
            for host, rate in zip(hosts, world.gather_values(hardware.quick_gflops(), RATES), strict=True):
                rates[host].append(rate)
        ranks = [replace(rank, gflops=rates[rank.name][hosts[:i].count(rank.name)]) for i, rank in enumerate(ranks)]
    memory = None
    if block_shape is not None:
        shares = config.data.shared_prompts and tokenizer.stored_config(config.model).get("model_type") in FAMILIES
        training = _training(config.model, config.train.optimizer, block_shape.blocks)
        training = replace(training, moving_reference=config.reference_sync_steps is not None, shared_prompts=shares)
        memory = MemoryModel(block_shape, training, largest, typical)
    facts = PlanFacts(
        settings=config,
        hosts=ranks,
        key=key,
        longest=longest,
        backend=world.backend,
        steps=config.steps_over(len(data.lengths)),
        published=list(calibration.read_published().values()),
        shape=shape,
        memory=memory,
        usual_gflops=usual,
    )
    return facts, rates


def _within(calibration: HostCalibration, limit_bytes: int | None) -> HostCalibration:
    """With a memory limit that was configured."""
    curves = []
    for curve in calibration.curves:
        least = min(filter(None, (curve.memory_limit_bytes, limit_bytes)), default=None)
        curves.append(curve.model_copy(update={"memory_limit_bytes": least}))
    return calibration.model_copy(update={"curves": tuple(curves)})


def _training(model: ModelSettings, optimizer: str, blocks: int) -> Training:
    """What of the settings decides how much memory a step needs."""
    return Training(
        method=model.method,
        rank=max([model.rank, *model.rank_pattern.values()]),
        blocks=None if model.blocks is None else adapter_files.depth(model, blocks),
        adapts_embeddings=model.adapt_embeddings,
        checkpointing=bool(model.gradient_checkpointing),
        optimizer=OPTIMIZERS.get(optimizer, ADAM),
    )


def memory_limit(settings: PlanSettings, hosts: Sequence[str], world: World) -> Limit:
    """What this rank may use."""
    configured, host = settings.memory_limit_gb, hosts[world.rank]
    if isinstance(configured, dict):
        configured = configured.get(host)
    if configured is not None:
        return Limit(round(configured * 1e9), is_configured=True)
    memory = hardware.memory_limit_bytes()
    has_own_gpu = hardware.mlx_device()[0] == "cuda"
    return Limit(memory if has_own_gpu or not memory else memory // hosts.count(host))


def sharded_plan(config: Config, world: World, hosts: Sequence[str]) -> ClusterPlan:
    """The division of a model for forward passes alone: by memory and calibrated rates; AgreedError where it fails."""
    with world.agreeing("reading the calibration"):
        rank_calibration = calibration.read_of_rank(Path(config.plan.calibration_dir), hosts, world.rank)
        shape = _shape(config.model, True, is_needed=True)
    ranks = _gather_hosts(world, hosts, rank_calibration, memory_limit(config.plan, hosts, world))
    key = CurveKey(model=config.model.path, method=config.model.method, dtype="", sequence_length=1)
    with world.agreeing("planning"):
        return plan_sharded(PlanFacts(config, ranks, key, 1, world.backend, 1, shape=shape))


def stage_blocks(settings: PlanSettings, model: ModelSettings, world: World, hosts: Sequence[str]) -> tuple[int, ...]:
    """Consecutive blocks of each rank for forward passes alone: as plan.shares says, else by memory; AgreedError."""
    memory = world.gather_values(memory_limit(settings, hosts, world).size_bytes, "every host's memory")
    with world.agreeing("planning"):
        blocks = model_shape_of(tokenizer.stored_config(model), to_divide=False).blocks
        configured = configured_blocks(settings.shares, world.size, blocks)
        return configured or apportion(blocks, memory if all(memory) else [1.0] * world.size)


def _shape(model: ModelSettings, to_divide: bool, is_needed: bool) -> ModelShape | None:
    """A model's dimensions; None where its config.json has other names for them, and no setting needs them."""
    dtype = model.dtype or ("float32" if model.random_init else None)
    with contextlib.nullcontext() if is_needed else contextlib.suppress(UserError, ValueError, TypeError):
        return model_shape_of(tokenizer.stored_config(model), dtype, to_divide=to_divide)
    return None


def _gather_hosts(
    world: World, hosts: Sequence[str], rank_calibration: HostCalibration | None, limit: Limit
) -> list[RankHost]:
    """What every rank knows of its own host. rank_calibration, limit: this rank's."""
    stored, identity = rank_calibration and rank_calibration.model_dump_json(), hardware.identify(hosts[world.rank])
    facts = [stored, identity.device_name, identity.device, limit.size_bytes]
    every = world.gather_values(facts, "every host's calibration, chip and memory")
    return [
        RankHost(host, text and HostCalibration.model_validate_json(text), chip, device, memory_bytes=memory_bytes)
        for host, (text, chip, device, memory_bytes) in zip(hosts, every, strict=True)
    ]
