"""A verdict on this machine: what works, what does not and how fast it is, in ten minutes, as one page to send.

    make verdict                             MODEL=FOLDER: also that model's tokens/s; HOSTS=hostfile: over them
    python -m lib.launch.verdict             the same: [--model FOLDER] [--hosts FILE] [--folder OF_THE_PAGE]
    python -m lib.launch.verdict attention   a process of its own, which alone ends where the GPU fails

Every part is a command of the project in a process of its own; a part that fails stops none of the others. Nothing is
sent anywhere, and the page names no host, user, path or address. The last line of output is one JSON object. Exit
status: 0 if everything worked, 1 if something did not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lib.config.command_line import Parser
from lib.environment import ROOT
from lib.errors import UserError
from lib.launch import hostfile, preflight
from lib.model.partition import model_shape_of
from lib.plan.memory import MemoryModel, Rows, Training
from lib.system import hardware, mpi_and_blas, network, os_commands, terminal
from lib.system.records import read_records

WIDTH = 110  # of the page
LIMIT_SECONDS = {False: 590.0, True: 890.0}  # of all parts together; with other hosts
TESTS = ("tests/test_losses.py", "tests/test_step.py", "tests/test_forward.py", "tests/test_long_rows.py")
SHAPES = ((128, 4, 256), (256, 4, 256), (128, 4, 512))  # hidden size, blocks, tokens of a sequence
MICRO_BATCH = 4  # the largest that is calibrated
WEIGHTS_DIFFER = 2e-2  # of their norm, at most, after RING_STEPS of Adam, which enlarges what rounding changes
LOSS_DIFFERS = 1e-3
RING_STEPS = 6
ATTENTION = (1, 8, 4096, 64)  # sequences, heads, positions, numbers of a head
ROW_TOKENS = 2048  # of a row of the published figure
SHARED_STEPS, PAIRS_OF_A_RANK = 30, 8  # by which planned and equal shares are compared
CABLE_SECONDS = 60.0  # that a person has to pull it, and again for the others to go on
WAYS = {"synchronous": "a copy", "sharded": "a part of every layer", "pipelined": "some of the layers"}
SEVERAL = "wants other machines: make verdict HOSTS=hostfile"
START_SECONDS = 150.0  # for the first steps of that
PUBLISHED = "published: 97.8 of Qwen3-8B-4bit on an M1 Max, by mlx-train-perf's README"


class LeftOut(Exception):
    """A part that does not apply here; the message says why."""


@dataclass(frozen=True)
class Trials:
    """What all parts share. hosts: a host file, or None: two ranks on this machine."""

    folder: Path
    model: Path | None = None
    hosts: Path | None = None
    began: float = field(default_factory=time.monotonic)

    def python(self, *words: str, limit_seconds: float = 300.0) -> str:
        """The output of a command of the project. Raises UserError: it failed, and why in one line."""
        limit = min(limit_seconds, LIMIT_SECONDS[self.hosts is not None] - (time.monotonic() - self.began))
        if limit < 5:
            raise LeftOut("the time was over")
        done, why = preflight.run_python(words, limit)
        if done.status != 0:
            raise UserError(f"not done within {limit:.0f} s" if done.status is None else why or f"status {done.status}")
        return done.output

    def train(self, name: str, *words: str, ranks: bool = False) -> dict[str, Any]:
        """The summary of a run of train.py, of the quickstart unless words say otherwise."""
        launch = [*self.launch_words(), "--"] if ranks else []
        common = [f"run.dir={self.folder}", f"run.name={name}", f"plan.calibration_dir={self.folder}/none"]
        self.python(*launch, "train.py", *common, "run.pages=false", *words)
        return json.loads((self.folder / name / "summary.json").read_text(encoding="utf-8"))

    def launch_words(self) -> list[str]:
        """Starts a rank on every host."""
        if self.hosts:
            return ["launch", "--hostfile", str(self.hosts.absolute())]
        return preflight.two_ranks_here()

    def steps_of(self, name: str) -> list[dict[str, Any]]:
        """The records of a run's steps."""
        log = self.folder / name / "logs/rank-000.jsonl"
        return [record for record in read_records(log) if record["kind"] == "step"]


# ---- The parts: each gives its line, or raises UserError or LeftOut


Part = tuple[str, Callable[[Trials], str]]


def doctor(_: Trials) -> str:
    """Whether training can run here, and the rate of matrix products."""
    findings = preflight.findings_of(preflight.Request(), preflight.OF_DOCTOR)
    return f"training can run here; {of_findings(findings, 'compute')} of matrix products"


def of_findings(findings: Sequence[preflight.Finding], check: str) -> str:
    """What a check found. Raises UserError: one of them failed, with the remedy."""
    failed = [f"{one.check}: {one.message}: {one.remedy} ({one.note})" for one in findings if one.status == "failed"]
    if failed:
        raise UserError("; ".join(failed))
    return "; ".join(one.message for one in findings if one.check == check)


def numerics(trials: Trials) -> str:
    """Losses, gradients, shared prompts and long rows against float64."""
    output = trials.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *TESTS)
    return f"{output.split(' passed')[0].split()[-1]} tests of losses and gradients pass, most of them against float64"


def quickstart(trials: Trials) -> str:
    """As make train runs it, and its peak of memory beside the plan's."""
    summary = trials.train("quickstart", "evaluate.samples=0")
    before, after = summary["exact_match_before"], summary["exact_match_after"]
    text = f"a small model learns to add, by DPO: {before:.1%} of its answers are right before, {after:.1%} after "
    text += f"(97.3% is usual), {summary['pairs_per_second']:.1f} pairs/s"
    if not after > before + 0.2:
        raise UserError(f"{text}: it did not learn")
    rank = json.loads((trials.folder / "quickstart/plan.json").read_text(encoding="utf-8"))["ranks"][0]
    peak = max(step["peak_memory_bytes"] for step in trials.steps_of("quickstart"))
    return f"{text}; {of_formula(peak, rank['planned_bytes'])}"


def of_formula(peak: int, planned: int) -> str:
    """A peak of memory beside the formula's. Raises UserError: a plan would not have foreseen it."""
    text = f"peak memory {terminal.size_text(peak)}, planned {terminal.size_text(planned)}"
    if peak > 1.25 * planned:
        raise UserError(f"{text}: more than a plan allows for")
    return text


def curve_of(trials: Trials, shape: tuple[int, int, int]) -> str:
    """The calibration of a small Llama: its speed, and its peak of memory by the formula."""
    hidden, blocks, tokens = shape
    # MLX's rotary kernel for CUDA wants heads of 32 numbers or more, where each row of a batch is one token.
    config = {"model_type": "llama", "hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 3 * hidden, "vocab_size": 8192, "rms_norm_eps": 1e-5}
    folder = trials.folder / f"model-{hidden}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = ["--quick", "--largest", str(MICRO_BATCH), "--length", str(tokens), f"--folder={trials.folder}/curves"]
    words += [f"model.path={folder}", "model.random_init=true", f"data.max_length={tokens}", "evaluate.answers=null"]
    measured = json.loads(trials.python("benchmarks/calibrate.py", *words, limit_seconds=120).splitlines()[-1])
    rate, best, half = measured["pairs_per_second"], measured["optimal_batch_size"], tokens // 2
    rows = Rows(tokens + 1 - half, tokens + 1, tokens + 1 + half, 2 * half)
    device, point = measured["device"], max(measured["points"], key=lambda one: one["batch_size"])
    planned = MemoryModel(model_shape_of(config, "float32" if device == "cpu" else None), Training(), rows)
    speed = f"{rate:.3g} pairs/s ({3 * half * rate:,.0f} tokens/s) at batch size {best}"
    peak = of_formula(point["peak_memory_bytes"], planned.bytes(point["batch_size"], device).total)
    model = f"Llama of {blocks} layers, hidden size {hidden}, prompts and answers of {half} tokens"
    return f"{model}: {speed}; at batch size {point['batch_size']}: {peak}"


def link(trials: Trials) -> str:
    """The time of sums over the ranks of a ring, once every host was checked."""
    done, why = preflight.run_python([*trials.launch_words(), "--preflight-only", "--json", "--", "train.py"], 90)
    if not done.output.startswith("{"):
        raise UserError(why)
    findings = [preflight.Finding(**one) for one in json.loads(done.output)["findings"]]
    return re.sub(r"to \S+: (\w+) over [^:]*: ", r"\1, ", of_findings(findings, "links")) + " a message"


def shares(trials: Trials) -> str:
    """Efficiency: the speed together over the sum of what the hosts do alone, at planned and at equal shares."""
    if trials.hosts is None:
        raise LeftOut(SEVERAL)
    curves = f"{trials.folder}/hosts"
    words = [*trials.launch_words(), "--", "benchmarks/calibrate.py", "--quick", f"--folder={curves}"]
    (line,) = re.findall(r"^\[0 [^]]*\] (\{.*\})$", trials.python(*words), re.MULTILINE)[-1:] or ["{}"]
    hosts = json.loads(line).get("hosts", [])
    if len(hosts) < 2:
        raise UserError("the hosts could not be calibrated together")
    common = [f"train.steps={SHARED_STEPS}", f"train.global_batch_size={PAIRS_OF_A_RANK * len(hosts)}"]
    common += ["evaluate.every=null", "evaluate.samples=0", "evaluate.answers=null", "strategy=synchronous"]
    common += [f"plan.calibration_dir={curves}"]
    alone = [host["pairs_per_second"] for host in hosts]
    text = f"alone {' + '.join(f'{speed:.1f}' for speed in alone)} pairs/s"
    for name, chosen in (("planned", []), ("equal", [f"plan.shares={[PAIRS_OF_A_RANK] * len(hosts)}"])):
        speed = trials.train(f"{name}-shares", *common, *chosen, ranks=True)["pairs_per_second"]
        plan = json.loads((trials.folder / f"{name}-shares/plan.json").read_text(encoding="utf-8"))
        text += f"; {name} shares {plan['shares']}: {speed:.1f} pairs/s, efficiency {speed / sum(alone):.2f}"
    return text


def cable(trials: Trials) -> str:
    """Whether the others go on when a cable is pulled, by a person, while all train."""
    if trials.hosts is None:
        raise LeftOut(SEVERAL)
    words = ["--max-restarts", "1", "--", "train.py", f"run.dir={trials.folder}", "run.name=cable", "run.pages=false"]
    words += ["train.steps=1000000", "checkpoint.every=20", "evaluate.every=null", "evaluate.samples=0"]
    output = trials.folder / "cable.txt"
    with output.open("wb") as stream:
        command = [sys.executable, *trials.launch_words(), *words, "strategy=synchronous"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream)

    def step() -> int:
        with contextlib.suppress(OSError, IndexError):  # of rank 0, which may not have begun
            return int(trials.steps_of("cable")[-1]["step"])
        return 0

    def notes() -> list[str]:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line.removeprefix("launch: ") for line in lines if line.startswith("launch: ")]

    def reached(condition: Callable[[], bool], limit_seconds: float = CABLE_SECONDS) -> bool:
        deadline = time.monotonic() + limit_seconds
        while not condition() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
        return condition()

    try:
        if not reached(lambda: step() >= 25, START_SECONDS):
            raise UserError(f"the hosts did not train within {START_SECONDS:.0f} s")
        print(f"\n>>> Pull the cable of another machine now, within {CABLE_SECONDS:.0f} s.", flush=True)
        restarted = reached(lambda: any(note.startswith("start 2,") for note in notes()))
        last = step()
        if not restarted and reached(lambda: step() > last):
            raise LeftOut(f"no cable was pulled within {CABLE_SECONDS:.0f} s")
        if not restarted:
            raise UserError("the cable was pulled, and the others did not go on")
        went_on = reached(lambda: step() >= last + 20, START_SECONDS)
        print(">>> Put it back.\n", flush=True)
        if not went_on:
            raise UserError("after the cable was pulled no step followed")
        return f"{'; '.join(notes())}; 20 further steps"
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def ring(trials: Trials, strategy: str) -> str:
    """A few steps of ranks together beside those of one rank alone."""
    words = [f"train.steps={RING_STEPS}", "train.global_batch_size=8", "evaluate.every=null", "evaluate.samples=0"]
    words += ["evaluate.answers=null", "data.valid=null", "checkpoint.final=last"]
    if not (trials.folder / "alone/summary.json").exists():
        trials.train("alone", *words)
    summary = trials.train(strategy, *words, f"strategy={strategy}", ranks=True)
    one, other = trials.steps_of("alone"), trials.steps_of(strategy)
    loss = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(one, other, strict=True))
    weights = weights_differ(trials.folder / "alone", trials.folder / strategy)
    text = f"{summary['world_size']} ranks, each with {WAYS[strategy]}, train the model that one rank trains: losses "
    text += f"differ by {loss:.1e}, weights by {weights:.1e} of their norm; {summary['pairs_per_second']:.1f} pairs/s"
    if not (loss < LOSS_DIFFERS and weights < WEIGHTS_DIFFER and summary["world_size"] > 1):
        raise UserError(f"{text}: more than rounding")
    return text


def weights_differ(one: Path, other: Path) -> float:
    """The largest relative difference of an adapter's array between two runs, by norm."""
    import mlx.core as mx

    first, second = (dict(mx.load(str(run / "adapters.safetensors"))) for run in (one, other))
    pairs = [(np.array(first[name]), np.array(second[name])) for name in first]
    return max(float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(a)), 1e-12) for a, b in pairs)


def attention(trials: Trials) -> str:
    """Attention's backward pass by MLX and in blocks that make the scores again."""
    return trials.python("-m", "lib.launch.verdict", "attention", limit_seconds=120).splitlines()[-1]


def compare_attention() -> str:
    """Times both, forward and backward. Raises UserError: their gradients differ by more than rounding."""
    mpi_and_blas.prepare()
    import mlx.core as mx

    from lib.model import long_attention

    long_attention.has_backward_kernel = lambda *_: False  # type: ignore[assignment]  # or ours is MLX's kernel again
    dtype = mx.float32 if hardware.mlx_device()[0] == "cpu" else mx.bfloat16
    inputs = [mx.random.normal(ATTENTION, key=mx.random.key(seed)).astype(dtype) for seed in range(4)]
    options, gradients = {"scale": ATTENTION[3] ** -0.5}, list[list[mx.array]]()
    by_mlx = functools.partial(mx.fast.scaled_dot_product_attention, mask="causal", **options)
    text = f"{str(dtype).rpartition('.')[2]}, {ATTENTION[2]:,} positions, forward and backward, Tandem's in blocks: "
    for name, way in (("MLX's", by_mlx), ("Tandem's", functools.partial(long_attention.causal_attention, **options))):
        seconds = []
        mx.reset_peak_memory()
        for _ in range(3):  # the first compiles
            began = time.perf_counter()
            gradients.append(mx.vjp(way, inputs[:3], inputs[3:])[1])
            mx.eval(gradients[-1])
            seconds.append(time.perf_counter() - began)
        text += f"{name} {min(seconds[1:]):.3f} s and {terminal.size_text(mx.get_peak_memory())}, "
    pairs = [(a.astype(mx.float32), b.astype(mx.float32)) for a, b in zip(gradients[0], gradients[-1], strict=True)]
    difference = max((mx.linalg.norm(a - b) / mx.linalg.norm(a)).item() for a, b in pairs)
    text += f"gradients differ by {difference:.1e}"
    if not difference < (1e-4 if dtype == mx.float32 else 2e-2):
        raise UserError(f"{text}: more than rounding")
    return text


def published_figure(trials: Trials) -> str:
    """Tokens/s of LoRA on single rows of a model that is here, beside a published figure."""
    if trials.model is None:
        raise LeftOut("wants a model: make verdict MODEL=folder")
    stored = json.loads((trials.model / "config.json").read_text(encoding="utf-8"))
    shape = model_shape_of(stored, to_divide=False)
    ids = np.random.default_rng(0).integers(2, shape.vocabulary, (4, ROW_TOKENS)).tolist()
    rows = "".join(json.dumps({"prompt_ids": row[:1], "completion_ids": row[1:]}) + "\n" for row in ids)
    (trials.folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    words = [f"model.path={trials.model.absolute()}", f"data.train={trials.folder}/rows.jsonl", "data.valid=null"]
    words += ["evaluate.answers=null", "evaluate.every=null", "train.loss=sft", "train.steps=3"]
    trials.train("published", *words, "train.global_batch_size=1", f"data.max_length={ROW_TOKENS}")
    rate = ROW_TOKENS / statistics.median(step["step_seconds"] for step in trials.steps_of("published")[1:])
    model = f"{stored['model_type']} of {shape.blocks} blocks of {shape.hidden_size}, {8 * shape.weight_bytes:.3g} bits"
    return f"{model}, LoRA, rows of {ROW_TOKENS:,}: {rate:.1f} tokens/s; {PUBLISHED}"


def parts() -> list[Part]:
    """Name and part, in the page's order."""
    rings: list[Part] = [(f"ring, {way}", functools.partial(ring, strategy=way)) for way in WAYS]
    curves: list[Part] = [("speed", functools.partial(curve_of, shape=shape)) for shape in SHAPES]
    of_one: list[Part] = [("doctor", doctor), ("quickstart", quickstart), ("numerics", numerics)]
    of_one += [("attention", attention), ("published figure", published_figure)]
    return [*of_one, ("link", link), *rings, ("shares", shares), ("cable", cable), *curves]


# ---- The page


def without_names(text: str, names: Sequence[str]) -> str:
    """A line of a program without these names of hosts, users and folders, and without paths and addresses."""
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "NAME", text)
    text = re.sub(r"(?<![\w.])(~|NAME)?(/[\w.@+~-]+)+/?", "PATH", text)
    ipv4, ipv6 = r"\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b", r"\b([0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{0,4}\b"
    return re.sub(rf"{ipv4}|{ipv6}|\S+@\S+", "ADDRESS", text)


def own_names(options: argparse.Namespace) -> list[str]:
    """What no page may have. Raises UserError: the host file is wrong."""
    names = [network.own_name(), socket.gethostname(), os.environ.get("USER", ""), Path.home().name]
    names += [str(ROOT), tempfile.gettempdir(), str(options.model or ""), str(Path.home())]
    for host in hostfile.read(options.hosts).hosts if options.hosts else ():
        names += [host.name, host.name.rpartition("@")[2], *host.addresses]
    return names


def machine_lines() -> list[str]:
    """The machine and its versions, without its name."""
    machine = hardware.identify("")
    cores, size = os_commands.own_cores(), terminal.size_text(machine.memory_bytes or 0)
    system, limit = (machine.os or "").partition("-")[0], terminal.size_text(hardware.memory_limit_bytes() or 0)
    commit = os_commands.output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip()
    versions = ", ".join(f"{name} {version}" for name, version in hardware.versions(("mlx", "mlx-lm", "numpy")).items())
    return [
        f"Tandem's verdict on {machine.device_name} ({machine.device}), {cores} cores, {size} ({limit} for MLX)",
        f"{datetime.now(UTC):%d %B %Y}; {system}, Tandem {commit}, Python {platform.python_version()}, {versions}",
        "Tandem trains language models with MLX, above all on pairs of a better and a worse answer (DPO), on one or",
        "several machines. `make verdict` tried its parts here on small models. This page names no host, user or path.",
        "\nstatus    part               result  [seconds that it took]",
    ]


def judge(trials: Trials, names: Sequence[str], say: Callable[[str], None]) -> list[dict[str, str]]:
    """Tries every part and says its line as soon as it is known."""
    rows = []
    for name, part in parts():
        began, status = time.monotonic(), "works"
        try:
            text = without_names(part(trials), names)
        except LeftOut as error:
            status, text = "not tried", str(error)
        except Exception as error:
            status, text = "fails", without_names(str(error) or type(error).__name__, names)
        seconds = time.monotonic() - began
        rows.append({"part": name, "status": status, "text": text})
        text += f"  [{seconds:.0f} s]" if seconds >= 1 else ""
        lead = f"{status:<9} {name:<18} "
        say(textwrap.fill(lead + text, WIDTH, subsequent_indent=" " * len(lead), break_on_hyphens=False))
    return rows


@mpi_and_blas.reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["attention"]:
        print(compare_attention())
        return 0
    parser = Parser(prog="python -m lib.launch.verdict", description=__doc__)
    parser.add_argument("--model", type=Path, help="the folder of a model, for the tokens/s of LoRA")
    parser.add_argument(
        "--hosts", type=Path, help="a host file: links, ring, shares and cable are tried over these hosts"
    )
    parser.add_argument("--folder", type=Path, default=ROOT, help="of the page (default: the project's)")
    options = parser.parse_args(words)
    names, lines = own_names(options), machine_lines()
    page: list[str] = []

    def say(line: str) -> None:
        page.append(line)
        print(line, flush=True)

    for line in lines:
        say(line)
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="verdict-", dir=ROOT / "runs"))  # which each host has somewhere
    trials = Trials(folder, options.model, options.hosts)
    try:
        rows = judge(trials, names, say)
    finally:
        if options.hosts:
            preflight.run_python([*trials.launch_words(), "--no-preflight", "--", "rm", "-rf", str(folder)], 60)
        shutil.rmtree(folder, ignore_errors=True)
    count = Counter(row["status"] for row in rows)
    minutes = (time.monotonic() - trials.began) / 60
    say(f"\n{count['works']} work, {count['fails']} fail, {count['not tried']} not tried; {minutes:.1f} minutes")
    chip = re.sub(r"\W+", "-", hardware.identify("").device_name.lower())
    file = options.folder / f"verdict-{chip}-{datetime.now(UTC):%Y-%m-%d}.txt"
    file.write_text("\n".join(page) + "\n", encoding="utf-8")
    print(f"\n{file}: attach it to an issue, if you like")
    print(json.dumps({"file": str(file), "rows": rows}))
    return int(count["fails"] > 0)


if __name__ == "__main__":
    sys.exit(main())
