"""Independent, synchronous, sharded or pipelined? What `strategy=auto` takes for models of some sizes, and what each way would give.

    python benchmarks/decide.py                                       an M4 Max of 128 GB and an M3 Ultra of 512 GB
    python benchmarks/decide.py --links tb5:1e-5:1e10 lan:5e-4:1.2e8  other links: name:latency in s:bytes/s

On paper: the planner (lib/plan/run_plan.py) is real; a host's speed is what its published matmul rate would make of a model's weights
(4 operations a weight and token for LoRA: forward, and backward to the inputs; 6 for full training), and a link's time latency +
bytes / bandwidth, both of them invented. So the columns compare ways to run a model, and promise no times. Pairs of two completions
of 1,024 tokens, LoRA of rank 8 on every layer unless it says full, a global batch of 64. Of a pipeline, the blocks of each host stand
beside its speed; activations are counted by the memory model (lib/plan/memory.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib.config import load  # noqa: E402
from lib.errors import UserError  # noqa: E402
from lib.model import partition  # noqa: E402
from lib.plan.calibration import BatchCurve, CurveKey, HostCalibration, Link, read_published  # noqa: E402
from lib.plan.plan import ClusterPlan  # noqa: E402
from lib.plan.memory import MemoryModel, Rows, metal_limit_bytes  # noqa: E402
from lib.plan.memory_trace import Training  # noqa: E402
from lib.plan.run_facts import RankHost, RunFacts  # noqa: E402
from lib.plan.run_plan import plan_run  # noqa: E402

HOSTS = ("m4-max", "m3-ultra")
TOKENS, BATCH, RANK, DATASET = 1024, 64, 8, 10_000
WAYS = ("independent", "synchronous", "sharded", "pipelined")
LINKS = ("thunderbolt-rdma:2e-5:8e9", "ethernet-10g:3e-4:1.1e9", "ethernet-1g:5e-4:1.1e8")
COMMON = {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_key_value_heads": 8, "head_dim": 128}
Q4 = {"quantization": {"group_size": 64, "bits": 4}}


def dense(hidden: int, blocks: int, heads: int, columns: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": columns, "vocab_size": vocabulary, "model_type": "llama", **COMMON, **more}


MODELS = {
    "1B bf16, full": dense(2048, 16, 32, 8192, 128256, head_dim=64),
    "8B bf16": dense(4096, 32, 32, 14336, 128256),
    "32B bf16": dense(5120, 64, 64, 25600, 151936),
    "70B 4-bit": dense(8192, 80, 64, 28672, 128256, **Q4),
    "70B bf16": dense(8192, 80, 64, 28672, 128256),
    "405B 4-bit": dense(16384, 126, 128, 53248, 128256, **Q4),
    "405B bf16": dense(16384, 126, 128, 53248, 128256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=LINKS, help="name:latency in seconds:bytes a second")
    parser.add_argument("--quick", action="store_true", help="no difference: all of it takes a second")
    parser.add_argument("--seed", type=int, default=0, help="no difference: nothing is random")
    options = parser.parse_args()
    rows = [decided(name, stored, link) for name, stored in MODELS.items() for link in options.links]
    table = Table(title="m4-max (128 GB) and m3-ultra (512 GB), predicted pairs/s (MB that each sends a step)")
    for column in ("model", "link", "auto takes", "steps a round", *WAYS, "synchronous loses"):
        table.add_column(column, justify="left" if column in ("model", "link", "auto takes") else "right")
    for row in rows:
        cells = [
            "-" if row[way] is None else f"{row[way]['pairs_per_second']:.3g} ({row[way]['megabytes']:.3g})"
            for way in WAYS
        ]
        cost = "-" if row["sync_cost"] is None else f"{row['sync_cost']:.1%}"
        every = "-" if row["steps_per_round"] is None else str(row["steps_per_round"])
        table.add_row(row["model"], row["link"], row["taken"], every, *cells, cost)
    Console(width=190).print(table)
    print(json.dumps({"hosts": HOSTS, "rows": rows}))


def decided(name: str, stored: dict[str, Any], link: str) -> dict[str, Any]:
    """The planner's choice for one model on one link, and what it predicts of each way."""
    link_name, latency, bandwidth = link.split(":")
    shape = partition.model_shape_of(stored)
    method = "full" if name.endswith("full") else "lora"
    key = CurveKey(model=name, method=method, dtype="bfloat16", sequence_length=TOKENS)
    published = read_published()
    calibrations = [calibrated(published[host], shape, key, float(latency), float(bandwidth)) for host in HOSTS]
    settings = load.load(
        None, ["model.path=-", "data.train=-", f"train.global_batch_size={BATCH}", f"model.method={method}"]
    )
    found: dict[str, Any] = {"model": name, "link": link_name, "sync_cost": None}
    found |= dict.fromkeys((*WAYS, "steps_per_round"))
    hosts = [
        RankHost(name, one, device="metal", memory_bytes=metal_limit_bytes(one.machine.memory_bytes))
        for name, one in zip(HOSTS, calibrations, strict=True)
    ]
    training = Training(method=method, rank=RANK, shared_prompts=False)
    facts = RunFacts(
        key,
        longest=TOKENS,
        backend="ring",
        dataset_size=DATASET,
        shape=shape,
        block_shape=shape,
        memory_model=MemoryModel(shape, training, Rows(0, TOKENS, 2 * TOKENS, 2 * TOKENS)),
    )
    try:
        plan = plan_run(settings, hosts, facts)
    except UserError as error:
        return {**found, "taken": "nothing: too large", "error": str(error)}
    ways = {**predicted(plan), "steps_per_round": plan.steps_per_round}
    return {**found, **ways, "taken": plan.strategy, "reason": plan.reason}


def calibrated(
    published: HostCalibration, shape: partition.ModelShape, key: CurveKey, latency: float, bandwidth: float
) -> HostCalibration:
    """A host as its matmul rate would have it."""
    assert published.gflops is not None
    weights = shape.divided_parameters + shape.vocabulary * shape.hidden_size
    rate = published.gflops * 1e9 / ((6 if key.method == "full" else 4) * weights * 2 * TOKENS)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ins_and_outs = 4 * shape.hidden_size + 2 * (queries + keys) + 3 * (shape.hidden_size + shape.mlp_columns)
    trained = weights if key.method == "full" else RANK * ins_and_outs * shape.blocks
    curve = BatchCurve.from_rates({1: rate, 8: rate}).model_copy(update={"key": key, "gradient_bytes": 4 * trained})
    link = Link(backend="ring", latency_seconds=latency, bandwidth_bytes_per_second=bandwidth)
    return published.model_copy(update={"curves": (curve,), "links": (link,)})


def predicted(plan: ClusterPlan) -> dict[str, Any]:
    """Speed and traffic by the first word of each way; of several the first."""
    ways: dict[str, Any] = {}
    for way in reversed(plan.predictions):
        if way.step_seconds is not None and len(way.hosts) > 1:
            ways[way.strategy.partition(",")[0]] = {
                "pairs_per_second": plan.global_batch_size / way.step_seconds,
                "megabytes": (way.bytes_per_step or 0.0) / 1e6,
                "as": way.strategy,
            }
    if "synchronous" in ways and "independent" in ways:
        together, apart = (1 / ways[name]["pairs_per_second"] for name in ("synchronous", "independent"))
        ways["sync_cost"] = 1 - apart / together
    return ways


if __name__ == "__main__":
    main()
