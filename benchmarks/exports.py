"""Exports of many model families, each read back: how far the log-probabilities are from the run's.

    python benchmarks/exports.py [--peft PYTHON] [--quick | --only FAMILY ...] [--seed N] [--record]

PYTHON is the interpreter of an environment with peft, transformers and torch. Without it, what only peft can read is left
out. Every case is a tiny model with drawn weights and a drawn adapter; a number is the largest difference of a token's
log-probability in nats: of the reader from what is stored, and in brackets what rounding the weights moved. The limit is
1e-4, or what float32's rounding explains (lib/export/proof.py); a row beyond 1e-4 says that limit, too.

With --peft, also: fused models read by transformers, and adapters that peft itself trained (a few steps of Adam on the
CPU), loaded by model.adapter= and compared; --record keeps some of these in tests/peft.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from lib.system import mpi_and_blas

mpi_and_blas.prepare()

import numpy as np

from lib.errors import Stopped, UserError
from lib.export import base_copy, fused, mlx_adapter, peft_adapter, proof
from lib.export.form import ExportOptions
from lib.export.trained_run import open_run
from lib.model import adapters
from lib.model import load as models
from lib.system import terminal
from tests import exported, tiny

BASES: dict[str, float] = {}  # by family: how far transformers is from mlx-lm for the base models by themselves


def of_transformers(family: str) -> float:
    """What transformers may differ by: as in lib/export/proof.py, where its code for a family is not mlx-lm's."""
    difference = BASES.get(family, 0.0)
    return 4 * difference if difference > proof.LIMIT else proof.LIMIT


# Runs in peft's environment: stdin has a list of jobs {kind, base, adapter, rows, out, ...}; one line of JSON a job.
REFERENCE = """
import json, os, sys, traceback
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, sys.argv[1])
import numpy as np, torch, transformers, peft, peft_reader
from pathlib import Path
def logps_of(model, rows):
    with torch.no_grad():
        found = []
        for ids in rows:
            tokens = torch.tensor([ids])
            logps = torch.log_softmax(model(tokens[:, :-1]).logits[0].float(), dim=-1)
            found.append(logps.gather(1, tokens[0, 1:, None])[:, 0].numpy())
        return found
for job in json.load(sys.stdin):
    rows = json.loads(Path(job["rows"]).read_text())
    try:
        if job["kind"] == "peft":
            peft_reader.main(job["base"], job["adapter"], job["rows"], job["out"])
        else:
            torch.manual_seed(job.get("seed", 0))
            model = transformers.AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32).eval()
            before = logps_of(model, rows)
            if job["kind"] == "train":
                model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **job["config"]))
                parameters = [p for p in model.parameters() if p.requires_grad]
                optimizer = torch.optim.Adam(parameters, lr=2e-2)
                for _ in range(job["steps"]):
                    optimizer.zero_grad()
                    sum(model(input_ids=(t := torch.tensor([ids])), labels=t).loss for ids in rows).backward()
                    optimizer.step()
                model.eval()
                model.save_pretrained(job["adapter"], save_embedding_layers=False)
            found = logps_of(model.eval(), rows)
            named = {f"row{i}": x for i, x in enumerate(found)} | {f"base{i}": x for i, x in enumerate(before)}
            np.savez(job["out"], **named)
        print(json.dumps({"ok": True}), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}), flush=True)
"""


def in_peft(python: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each job's answer."""
    command = [python, "-c", REFERENCE, str(ROOT / "lib" / "export")]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(answers) != len(jobs):
        raise SystemExit(f"{python} ended early: {done.stderr[-2000:]}")
    return answers


def read_npz(path: Path, kind: str = "row") -> list[np.ndarray]:
    with np.load(path) as arrays:
        return [arrays[f"{kind}{index}"] for index in range(len(arrays.files) // 2)]


# ---- Out: families, methods, forms


def cases(only: list[str]) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Family, what is special, the base's arguments, and the run's settings."""
    families = list(exported.FAMILIES)
    for family in only or families:
        if family == "gpt_oss":  # its makers' files have another form
            keys = "[self_attn.q_proj,mlp.experts.up_proj,mlp.experts.down_proj]"
            yield family, "lora", {"as_converted": True}, {"model.keys": keys}
            yield family, "lora, mxfp4", {"bits": 4, "mode": "mxfp4"}, {"model.keys": keys}
            continue
        yield family, "lora", {}, {}
        if family not in exported.NO_DORA:
            yield family, "dora", {}, {"model.method": "dora"}
        else:
            keys = "[self_attn.q_proj,self_attn.v_proj]"
            yield family, "dora of attention", {}, {"model.method": "dora", "model.keys": keys}
            yield family, "lora, as converted", {"as_converted": True}, {}
        yield family, "lora, last block", {}, {"model.blocks": 1, "model.scale": 0.7}
        yield family, "lora, 4-bit", {"bits": 4}, {}
        if family not in exported.NO_DORA:
            yield family, "dora, 4-bit", {"bits": 4}, {"model.method": "dora"}
        yield family, "lora, bfloat16", {"dtype": "bfloat16"}, {}
        yield family, "full", {}, {"model.method": "full"}
        yield family, "lora, embeddings", {}, {"model.adapt_embeddings": True}


def forms_of(base: dict[str, Any], settings: dict[str, Any]) -> Iterator[tuple[str, Any, ExportOptions]]:
    if settings.get("model.method") != "full":
        yield "mlx", mlx_adapter, ExportOptions()
    if settings.get("model.method") != "full" and "experts" not in settings.get("model.keys", ""):
        yield "peft", peft_adapter, ExportOptions()
    yield "fused", fused, ExportOptions()
    if "bits" in base:
        yield "dequantized", fused, ExportOptions(dequantize=True)
    elif not base:
        yield "bf16", fused, ExportOptions(type="bf16")


class Case:
    """One run, its exports, and what still has to be read elsewhere."""

    def __init__(self, folder: Path, number: int, seed: int, family: str, what: str, base: dict, settings: dict):
        self.name, self.folder = (family, what), folder / str(number)
        self.base_options, self.settings = base, settings
        path = exported.base_model(self.folder / "base", family, seed=seed, **base)
        run = exported.run_of(self.folder / "run", path, **settings)
        self.run = open_run(run, "final", [], 8, lambda text: None)
        self.found: dict[str, str] = {}
        self.worst = 0.0
        self.failures: list[str] = []
        self.trained = proof.model_logps(self.run.model(), self.run.rows)

    def export(self, peft: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Writes every form and reads it; yields what only another Python can read, as its jobs."""
        rows = self.folder / "rows.json"
        rows.write_text(json.dumps([ids.tolist() for ids in self.run.rows]))
        for name, form, options in forms_of(self.base_options, self.settings):
            target = self.folder / name
            target.mkdir()
            try:
                form.check(self.run, options, False)
                form.write(self.run, target, options)
                out = self.folder / f"{name}.npz"
                if form is peft_adapter:
                    own = self.folder / "for-peft"
                    own.mkdir()
                    base = base_copy.for_transformers(self.run, own)
                    job = {"kind": "peft", "base": base, "adapter": target, "rows": rows, "out": out}
                    if peft:
                        yield name, {key: str(value) for key, value in job.items()}
                else:
                    proven = proof.prove(form, self.run, target, options)
                    self.note(name, proven.difference, proven.rounding_difference, proven.limit)
                    if peft and form is fused and not (self.run.is_quantised and not options.dequantize):
                        if "as_converted" in self.base_options or (
                            "bits" in self.base_options and "experts" in str(self.run.base_config)
                        ):
                            continue  # named as mlx-lm names them
                        job = {"kind": "plain", "base": target, "rows": rows, "out": out}
                        yield f"{name} by transformers", {key: str(value) for key, value in job.items()}
            except (UserError, Stopped) as error:
                self.fail(name, str(error))

    def read(self, name: str, answer: dict[str, Any], out: Path) -> None:
        """Takes what the other Python found."""
        if not answer["ok"]:
            self.fail(name, answer["error"])
            return
        form = name.partition(" ")[0]
        expected = self.trained
        if form in ("bf16", "fused", "dequantized"):
            options = ExportOptions(type="bf16" if form == "bf16" else None, dequantize=form == "dequantized")
            model = fused.stored_model(self.run, options)
            expected = expected if model is None else proof.model_logps(model, self.run.rows)
        if form == "peft":
            base = proof.model_logps(self.run.base_model(), self.run.rows)
            BASES[self.name[0]] = proof.largest_difference(read_npz(out, "base"), base)
        self.note(name, proof.largest_difference(read_npz(out), expected), 0.0, of_transformers(self.name[0]))

    def note(self, name: str, difference: float, rounding: float, limit: float = proof.LIMIT) -> None:
        if limit == proof.LIMIT:
            self.worst = max(self.worst, difference)
        self.found[name] = f"{difference:.0e}" + (f" ({rounding:.0e})" if rounding else "")
        if limit >= difference > proof.LIMIT:
            self.found[name] += f" of {limit:.0e}"
        if not difference <= limit:
            self.failures.append(f"{' '.join(self.name)}, {name}: {difference:.2e}, limit {limit:.1e}")

    def fail(self, name: str, why: str) -> None:
        self.found[name] = "failed"
        self.failures.append(f"{' '.join(self.name)}, {name}: {why}")


# ---- In: adapters that peft trained


TARGETS = {"mixtral": ["q_proj", "v_proj"], "phi3": ["qkv_proj", "o_proj"]}


def peft_adapters(only: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Family, what is special, LoraConfig's arguments."""
    for family in only or exported.FAMILIES:
        if family == "gpt_oss":
            continue
        targets = TARGETS.get(family, ["q_proj", "v_proj", "o_proj"])
        yield family, "lora", {"r": 2, "lora_alpha": 3, "target_modules": targets}
        yield family, "dora", {"r": 2, "lora_alpha": 3, "use_dora": True, "target_modules": targets}
    yield "llama", "all linear", {"r": 5, "lora_alpha": 3, "target_modules": "all-linear"}
    yield "llama", "rsLoRA", {"r": 3, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}
    yield (
        "llama",
        "patterns",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"down_proj": 1, "layers.1.self_attn.q_proj": 3},
            "alpha_pattern": {"down_proj": 6},
        },
    )
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    yield "qwen3_moe", "experts", {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "target_parameters": experts}
    yield (
        "qwen3_moe",
        "experts, patterns",
        {"r": 2, "target_modules": [], "target_parameters": experts, "rank_pattern": {"gate_up_proj": 4}},
    )
    yield "qwen3", "last blocks", {"r": 4, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 2]}


def settings_for(run: Path, base: Path, adapter: Path) -> tuple[Any, str]:
    """Settings under which the adapter loads: those that the error message names, taken word by word."""
    words: dict[str, Any] = {"model.adapter": adapter}
    for _ in range(2):
        settings = exported.settings_of(run, base, **words)
        model = models.load(settings.model, 0)
        try:
            adapters.make_trainable(model, settings.model, 0)
            return model.eval(), ""
        except UserError as error:
            message = str(error)
            if "; add " not in message:
                return None, message
            words |= dict(word.split("=", 1) for word in shlex.split(message.partition("; add ")[2]))
    return None, message


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peft", metavar="PYTHON", help="a Python that has peft, transformers and torch")
    parser.add_argument("--quick", action="store_true", help="three families")
    parser.add_argument("--only", nargs="*", default=[], choices=exported.FAMILIES, help="these families")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="keep adapters that peft saved in tests/peft")
    options = parser.parse_args()
    options.only = options.only or (["llama", "qwen3_moe", "gemma"] if options.quick else [])
    say = terminal.Voice()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        every, pending = [], []
        for number, (family, what, base, settings) in enumerate(cases(options.only)):
            case = Case(folder, number, options.seed, family, what, base, settings)
            pending += [(case, name, job) for name, job in case.export(options.peft is not None)]
            every.append(case)
        if options.peft:
            answers = in_peft(options.peft, [job for _, _, job in pending])
            for (case, name, job), answer in zip(pending, answers, strict=True):
                case.read(name, answer, Path(job["out"]))
        columns = list(dict.fromkeys(name for case in every for name in case.found))
        say.table(
            "Out: difference of a token's log-probability",
            ["family", "adapter", *columns],
            [[*case.name, *(case.found.get(column, "-") for column in columns)] for case in every],
            text_columns=2,
        )
        for family, difference in BASES.items():
            if difference > proof.LIMIT:
                say.line(f"{family}: transformers is {difference:.0e} from mlx-lm for the base model by itself")
        failures = [failure for case in every for failure in case.failures]
        worst_in = None
        if options.peft:
            worst_in, more = show_in(say, folder / "in", options)
            failures += more
        for failure in failures:
            say.labelled("error", failure)
        result = {
            "exports": sum(len(case.found) for case in every),
            "largest_difference_out": max(case.worst for case in every),
            "largest_difference_in": worst_in,
            "failures": len(failures),
        }
        print(json.dumps(result))
    return 1 if failures else 0


def show_in(say: terminal.Voice, folder: Path, options: argparse.Namespace) -> tuple[float, list[str]]:
    """Trains adapters by peft, loads them here, and prints how far apart the log-probabilities are."""
    folder.mkdir()
    rows = folder / "rows.json"
    sequences = [[*pair["prompt_ids"], *pair["chosen_ids"]] for pair in tiny.pairs(6, seed=4)]
    rows.write_text(json.dumps(sequences))
    jobs, about = [], []
    for number, (family, what, peft_config) in enumerate(peft_adapters(options.only)):
        base = exported.base_model(folder / f"base-{number}", family, seed=options.seed)
        adapter, out = folder / f"adapter-{number}", folder / f"{number}.npz"
        paths = {"base": str(base), "adapter": str(adapter), "rows": str(rows), "out": str(out)}
        jobs.append({"kind": "train", "steps": 4, "seed": options.seed, "config": peft_config, **paths})
        about.append((family, what, base, adapter, out))
    answers = in_peft(options.peft, jobs)
    table, failures, worst = [], [], 0.0
    for (family, what, base, adapter, out), answer in zip(about, answers, strict=True):
        shown, difference = "failed", 0.0
        if not answer["ok"]:
            failures.append(f"{family} {what}: {answer['error']}")
        else:
            model, why = settings_for(folder / "run", base, adapter)
            if model is None:
                failures.append(f"{family} {what}: {why}")
            else:
                found = proof.model_logps(model, [np.array(ids, np.int32) for ids in sequences])
                difference = proof.largest_difference(found, read_npz(out))
                shown = f"{difference:.0e}"
                limit = of_transformers(family)
                if not difference <= limit:
                    failures.append(f"{family} {what}: {difference:.2e}, limit {limit:.1e}")
                if limit > proof.LIMIT:
                    shown, difference = f"{shown} (base {BASES[family]:.0e})", 0.0
                if options.record and (family, what) in RECORDED:
                    record(ROOT / "tests" / "peft" / RECORDED[family, what], adapter, out)
        worst = max(worst, difference)
        table.append([family, what, shown])
    say.table("In: adapters that peft trained", ["family", "adapter", "difference"], table, text_columns=2)
    return worst, failures


RECORDED = {
    ("llama", "lora"): "llama-lora",
    ("llama", "dora"): "llama-dora",
    ("llama", "rsLoRA"): "llama-rslora",
    ("llama", "patterns"): "llama-patterns",
}


def record(target: Path, adapter: Path, out: Path) -> None:
    """Keeps what peft saved, and the log-probabilities that it gave."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copyfile(adapter / "adapter_model.safetensors", target / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "base"}, indent=1, sort_keys=True) + "\n"
    )
    (target / "logps.json").write_text(json.dumps([row.tolist() for row in read_npz(out)]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
