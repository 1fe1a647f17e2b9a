"""The ordinary job by Tandem and its peers, whole processes in turn: from the command to the finished adapter.

    python benchmarks/real_job.py --model MODEL --train PAIRS.jsonl --valid PAIRS.jsonl         every program, three epochs
    python benchmarks/real_job.py --model MODEL --train PAIRS.jsonl --valid PAIRS.jsonl --quick          48 pairs, one epoch
    python benchmarks/real_job.py ... --programs tandem trl --here               with the packages of this interpreter

MODEL is a chat model's folder; rows have prompt, chosen and rejected. Each program trains LoRA of rank 16 on all seven
projections: beta 0.1, batches of 16, rate 1e-4, cosine after 5 steps, at most 1,024 tokens, an evaluation each epoch;
nothing else is set for Tandem. TRL computes the reference before training, with micro-batches of 16 on a GPU and of 4 on
a CPU. Environments of the peers are those of benchmarks/peers.py. The last line is one JSON object: seconds of the whole
process, held-out loss and accuracy where a program gives them, and our seconds over each peer's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)
if sys.argv[1:2] == ["--worker"]:
    os.environ["TANDEM_ANY_PYTHON"] = "1"  # TRL's environment has no MLX

from benchmarks.peers import environment, on_cuda  # noqa: E402

RANK, BETA, RATE, BATCH, WARMUP, LENGTH = 16, 0.1, 1e-4, 16, 5, 1024
PROGRAMS = ("tandem", "trl", "trl-compiled", "trl-liger", "mlx-lm-lora")
LIMIT_SECONDS = 3600


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = folder / "train.jsonl"
        lines = options.train.read_text(encoding="utf-8").splitlines(keepends=True)
        train.write_text("".join(lines[: options.rows]), encoding="utf-8")
        (folder / "valid.jsonl").write_bytes(options.valid.read_bytes())
        results = {program: run(program, folder / program, train, options) for program in options.programs}
    mine = results.get("tandem", {}).get("wall_seconds")
    for program, result in results.items():
        ratio = f"{mine / result['wall_seconds']:.2f}" if mine and result["wall_seconds"] else "-"
        shown = {"program": f"{program:14}", "wall": result["wall_seconds"], "ours over it": ratio}
        shown |= {key: result.get(key) for key in ("loss", "accuracy")}
        print("  ".join(f"{key} {value}" for key, value in shown.items()))
    print(json.dumps({"rows": len(lines[: options.rows]), "epochs": options.epochs, "results": results}))


def run(program: str, folder: Path, train: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One program's whole process: its seconds, and what it says of the held-out pairs."""
    peer = program.partition("-")[0] if program.startswith("trl") else program
    python = sys.executable if options.here or peer == "tandem" else environment(peer, options)
    command = COMMANDS[peer](program, folder, train, options)
    began = time.perf_counter()
    done = subprocess.run([python, *command], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    seconds = round(time.perf_counter() - began, 1)
    if done.returncode:
        print(f"{program} ended with {done.returncode}: {done.stderr[-2000:]}")
        return {"wall_seconds": None}
    return {"wall_seconds": seconds, **FIGURES[peer](done.stdout)}


# ---- The programs ----------------------------------------------------------------------------------------------------


def tandem(program: str, folder: Path, train: Path, options: argparse.Namespace) -> list[str]:
    every = -(-options.rows_in(train) // BATCH)
    return [
        "train.py",
        *(f"model.path={options.model}", f"data.train={train}", f"data.valid={train.with_name('valid.jsonl')}"),
        *(f"model.rank={RANK}", f"data.max_length={LENGTH}", f"train.learning_rate={RATE}", "train.loss=sigmoid"),
        *(f"train.global_batch_size={BATCH}", f"train.epochs={options.epochs}", f"train.warmup_steps={WARMUP}"),
        *(f"evaluate.every={every}", f"run.dir={folder}", f"train.seed={options.seed}"),
        *(f"--config={ROOT / 'configs' / 'one-machine.yaml'}", "data.holdout=0"),
        *(["model.dtype=bfloat16"] if on_cuda() else []),
    ]


def trl(program: str, folder: Path, train: Path, options: argparse.Namespace) -> list[str]:
    return [__file__, "--worker", program.partition("-")[2], str(folder), *words_of(train, options)]


def mlx_lm_lora(program: str, folder: Path, train: Path, options: argparse.Namespace) -> list[str]:
    folder.mkdir()
    settings = {"lora_parameters": {"rank": RANK, "scale": 2.0, "dropout": 0.0}}
    (folder / "lora.json").write_text(json.dumps(settings))  # YAML reads JSON
    every = -(-options.rows_in(train) // BATCH)
    return [
        *("-m", "mlx_lm_lora.train", "--train", "--train-mode", "dpo", "-c", str(folder / "lora.json")),
        *("--model", str(options.model), "--data", str(train.parent), "--adapter-path", str(folder / "adapter")),
        *("--batch-size", "4", "--gradient-accumulation-steps", str(BATCH // 4), "--num-layers", "-1"),
        *("--iters", str(4 * every * options.epochs), "--learning-rate", str(RATE), "--beta", str(BETA)),
        *("--max-seq-length", str(LENGTH), "--steps-per-eval", str(4 * every), "--seed", str(options.seed)),
    ]


def words_of(train: Path, options: argparse.Namespace) -> list[str]:
    valid = train.with_name("valid.jsonl")
    return [str(options.model), str(train), str(valid), str(options.epochs), str(options.seed)]


def work_for_trl(kernels: str, folder: str, model: str, train: str, valid: str, epochs: str, seed: str) -> None:
    """Runs in TRL's environment."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    def chats(path: str) -> Dataset:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        return Dataset.from_list(
            [{name: [{"role": role, "content": row[name]}] for name, role in roles.items()} for row in rows]
        )

    is_gpu = torch.cuda.is_available()
    micro = BATCH if is_gpu else 4
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if is_gpu else torch.float32)
    arguments = DPOConfig(
        output_dir=folder,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=2 * micro,
        gradient_accumulation_steps=BATCH // micro,
        num_train_epochs=float(epochs),
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        bf16=is_gpu,
        use_cpu=not is_gpu,
        max_length=LENGTH,
        beta=BETA,
        seed=int(seed),
        gradient_checkpointing=False,
        precompute_ref_log_probs=True,
        torch_compile=kernels == "compiled",
        use_liger_kernel=kernels == "liger",
    )
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    trainer = DPOTrainer(
        model=policy,
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=chats(train),
        eval_dataset=chats(valid),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=modules, task_type="CAUSAL_LM"),
    )
    trainer.train()
    last = next(entry for entry in reversed(trainer.state.log_history) if "eval_loss" in entry)
    trainer.save_model(str(Path(folder) / "adapter"))
    print(json.dumps({"loss": last["eval_loss"], "accuracy": last.get("eval_rewards/accuracies")}))


def figures_of_tandem(output: str) -> dict[str, Any]:
    summary = json.loads(output.splitlines()[-1])
    return {"loss": summary["loss"], "accuracy": summary["reward_accuracy"], "step_seconds": summary["seconds"]}


def figures_of_trl(output: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def figures_of_mlx_lm_lora(output: str) -> dict[str, Any]:
    losses = re.findall(r"Val loss ([0-9.]+)", output)
    return {"loss": float(losses[-1])} if losses else {}


COMMANDS = {"tandem": tandem, "trl": trl, "mlx-lm-lora": mlx_lm_lora}
FIGURES = {"tandem": figures_of_tandem, "trl": figures_of_trl, "mlx-lm-lora": figures_of_mlx_lm_lora}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "train", "valid"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="48 pairs, one epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", action="store_true", help="this interpreter has every program's packages")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers")
    parser.add_argument("--torch", default="torch", help="what pip installs for torch")
    options = parser.parse_args()
    options.rows = 48 if options.quick else None
    options.epochs = 1 if options.quick else options.epochs
    on_gpu = on_cuda()
    options.programs = options.programs or [name for name in PROGRAMS if on_gpu or name != "trl-liger"]
    options.rows_in = lambda path: len(path.read_text(encoding="utf-8").splitlines())
    return options


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work_for_trl(*sys.argv[2:])
    else:
        main()
