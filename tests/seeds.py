"""Real files of each kind, as trees: what tests/parsers.py changes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lib.config.schema import Config
from lib.training.checkpoint import Progress
from tests.chat_rows import TOOLS

CONFIG = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}}).model_dump(mode="json")
SHORT_CONFIGS = [
    {"model": {"path": "m"}, "data": {"train": {"a": 1, "b": 0.5}}, "train": {"loss": "kto", "optimizer": "muon"}},
    {"model": {"path": "m", "keys": ["q_proj"]}, "data": {"train": "d"}, "rollouts": {"rounds": 2, "stop": ["x"]}},
    {"model": {"path": "m"}, "data": {"train": "d"}, "strategy": "independent", "independent": {"merge": "svd"}},
    {"model": {"path": "m"}, "data": {"train": "d"}, "plan": {"shares": [1, 2]}, "run": {"sinks": ["tensorboard"]}},
]
IDS = [
    {"prompt_ids": [3, 4], "chosen_ids": [5, 1], "rejected_ids": [6, 1]},
    {"prompt_ids": [3], "completion_ids": [5, 7, 1], "completion_mask": [0, 1, 1], "label": True},
]
GROUPS = [
    {"prompt_ids": [3, 4], "completion_ids": [[5, 1], [6, 7]], "rewards": [1.0, None], "logps": [[-0.5, -1], [-2, 0]]},
    {"prompt_ids": [3], "completion_ids": [[5], [6], [7]], "rewards": [1, 0.5, 0], "completion_mask": [[1], [0], [1]]},
]
CHATS = [
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "temperature": 0.5, "stop": ["a"]},
    {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "x"}]},
            {"role": "user", "content": "x", "name": "n"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {"3": 5},
        "max_completion_tokens": 4,
        "response_format": {"type": "text"},
    },
    {
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "top_logprobs": 2,
        "n": 1,
        "seed": 3,
        "top_k": 5,
    },
    {"prompt": "x", "max_tokens": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "metadata": {"a": "b"}},
    {"prompt": ["x"], "best_of": 1, "echo": False, "presence_penalty": 1, "frequency_penalty": -1, "user": "u"},
]
HOST_LINES = "mac-a slots=2\nmac-b:3 # x\n\n# a comment\nuser@10.0.0.7\nhost_4.example slots=01\n"
HOSTS = [
    [{"ssh": "mac-a", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en1", ["rdma_en2"]], "slots": 2}, {"ssh": "mac-b"}],
    {"backend": "ring", "envs": ["NCCL_DEBUG=b"], "hosts": [{"ssh": "u@mac-a", "ips": ["10.0.0.1", "10.0.1.1"]}]},
]
KEYS = f"alice sha256:{'a' * 64}\n# x\n\nbob@x sha256:{'b' * 64}\n"
STATE_OF_A_RUN = asdict(
    Progress(
        "x",
        step=1,
        best_step=1,
        best_loss=0.5,
        best_metrics={"loss": 0.5},
        before={"loss": 0.7},
        schedule={"plans": [{"first_step": 1, "shares": [1]}]},
        rounds={"shares": [1], "speeds": [1.0], "are_one": True, "local_steps": [1], "trained": [[1, 1]], "tail": 0},
        resumes=[[1, 1]],
        resume_ids=["a"],
        parts=["x"],
    )
)
SUMMARY = {
    "model": "m",
    "pairs_per_second": 1.0,
    "efficiency": 0.9,
    "early_end": "why",
    "cost": {"cost": 1, "energy_kwh": 1},
    "checkpoint": {"which": "best", "step": 1},
}
WHO = {"time": 1.0, "rank": 0, "host": "a", "step": 1}
PLAN = {
    "strategy": "synchronous",
    "reason": "x",
    "shares": [1],
    "blocks": None,
    "ranks": [{"host": "a", "micro_batch_sizes": [1]}],
    "global_batch_size": 8,
    "predicted_step_seconds": 0.1,
    "predicted_pairs_per_second": 80.0,
    "solo_sum_pairs_per_second": 80.0,
    "calibrated": True,
    "warnings": ["x"],
    "curves": [{"key": {"model": "m", "method": "lora", "dtype": "float32"}, "points": [{"batch_size": 1}]}],
}
ROUND = {
    "round": 1,
    "undone": False,
    "why": ["x"],
    "warnings": ["x"],
    "held_out": {"exact_match": 0.5, "held_out_score": None},
    "answers": {
        "samples": 4,
        "pairs": 1,
        "score": 0.5,
        "accepted": 1.0,
        "duplicates": 0.1,
        "tokens": 3.5,
        "entropy": 1.0,
    },
    "examples": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    "sampling_seconds": 1.0,
    "judging_seconds": 0.1,
    "training_seconds": 2.0,
}
STEP = {
    **{"pairs": 8, "tokens": 100, "loss": 0.5, "kl": 0.1, "reward_accuracy": 0.5, "grad_norm": 1.0},
    **{"learning_rate": 1e-3, "step_seconds": 0.1, "compute_seconds": 0.05, "sync_seconds": 0.01, "wait_seconds": 0.01},
    **{"pairs_per_second": 80.0, "tokens_per_second": 1000.0, "peak_memory_bytes": 10**9, "bytes_sent": 100},
}
CONFIG_RECORD = {"model": {"path": "m"}, "train": {"seed": 0}, "data": {"train": "d"}, "cost": {"currency": "EUR"}}
LOG = [
    {
        "kind": "start",
        **WHO,
        "config": CONFIG_RECORD,
        "plan": PLAN,
        "steps": 4,
        "versions": {"mlx": "1"},
        "commit": "x",
    },
    {
        "kind": "start",
        **WHO,
        "resumed_from_step": 1,
        "resumes": [[1, 1]],
        "resume_ids": ["x"],
        "memory_limit_bytes": 1e9,
    },
    {"kind": "step", **WHO, **STEP},
    {"kind": "step", **WHO, **STEP, "step": 2, "time": 1.5},
    {"kind": "plan", **WHO, **PLAN, "first_step": 2},
    {"kind": "merge", **WHO, "method": "svd", "pairs": [1], "bytes_sent": 10.0, "error": 1e-7, "steps": [1]},
    {"kind": "evaluation", **WHO, "loss": 0.5, "kl": 0.1, "reward_accuracy": 0.5, "exact_match": 0.5},
    {"kind": "checkpoint", **WHO},
    {"kind": "warning", **WHO, "text": "x"},
    {"kind": "samples", **WHO, "samples": [{"prompt": "a", "before": "b", "after": "c"}]},
    {"kind": "round", **WHO, **ROUND},
    {"kind": "network", **WHO, "bytes_per_second": 1.0, "connections": [{"peer": "b", "round_trip_seconds": 0.1}]},
    {"kind": "sensors", **WHO, "temperature_celsius": 50, "power_watts": 20, "speed_limit": 1},
    {"kind": "end", **WHO, "reason": "x", "final_step": 2, "loss": 0.5},
]
SAMPLE = {"round": 1, "prompt_id": 0, "k": 0, "policy": "x", "place": "a:1", "text": "b", "finish": "stop"}
SAMPLE |= {"tokens": [5, 1], "logps": [-0.5, -0.1]}
SAMPLES = [SAMPLE | {"prompt_id": prompt, "k": k} for prompt in (0, 1) for k in (0, 1)]
SCORES = [{"prompt_id": prompt, "k": k, "score": 1.0, "fault": ""} for prompt in (0, 1) for k in (0, 1)]
FIGURES = {
    **{
        "prompts": 2,
        "samples": 4,
        "failed": 0,
        "pairs": 1,
        "score": 0.5,
        "accepted": 0.5,
        "duplicates": 0.0,
        "tokens": 2.0,
    },
    **{"unended": 0.1, "entropy": 0.5, "longer_chosen": None, "chosen_tokens": 2.0, "rejected_tokens": None},
}
VERDICT = {**ROUND, "samples": FIGURES}
JOURNAL = [{"chunk": chunk, "lines": ["a", "b"]} for chunk in (2, 0, 1)]
CODECS = ("none", "snappy", "gzip", "zstd", "lz4", "brotli")
CALIBRATION: dict[str, Any] = {
    "machine": {"host": "a", "device_name": "x", "device": "cpu"},
    "curves": [
        {
            "key": {"model": "m", "method": "lora", "dtype": "float32", "sequence_length": 16},
            "points": [
                {"batch_size": 1, "seconds_median": 0.1, "seconds_spread": 0.01, "peak_memory_bytes": 10**6},
                {"batch_size": 8, "seconds_median": 0.4, "pairs_per_second": 20.0, "peak_memory_bytes": 10**7},
            ],
            "memory_limit_bytes": 10**8,
            "step_overhead_seconds": 0.01,
            "outside_blocks": 0.2,
            "versions": {"mlx": "1"},
        }
    ],
    "gflops": 100.0,
    "links": [
        {
            "backend": "ring",
            "peers": ["a", "b"],
            "latency_seconds": 1e-4,
            "bandwidth_bytes_per_second": 1e9,
            "transfers": [{"bytes": 1024, "seconds_median": 1e-4}],
        }
    ],
    "ceilings": [
        {
            "key": {"model": "m", "method": "lora", "dtype": "float32", "sequence_length": 16},
            "max_pairs": 4,
            "note": "x",
        }
    ],
    "measured_at": "2026-01-01T00:00:00",
}

# ---- What is kept of data

INDEX: dict[str, Any] = {
    **{"file": "data.jsonl", "size": 1, "modified_ns": 2, "changed_ns": 3, "inode": 4, "content": "0" * 64},
    **{"unpacked": False, "bytes": 0, "count": 2, "digest": "0" * 64},
    "formats": {"prompt_ids + chosen_ids + rejected_ids": {"count": 2, "first": 0}},
    **{"unusable": [], "unusable_count": 0},
}
DOWNLOAD: dict[str, Any] = {
    "shards": [{"name": "shard-00000.jsonl", "records": 2, "bytes": 0}],
    "stream": {"paths": ["/a"], "file": 0, "row": 2},
    "done": False,
}
