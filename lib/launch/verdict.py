"""A verdict on this machine: what works, what does not and how fast it is, in ten minutes, as one page to send.

    make verdict                             MODEL=FOLDER: also that model's tokens/s; HOSTS=hostfile: over them
    python -m lib.launch.verdict             the same: [--model FOLDER] [--hosts FILE] [--folder OF_THE_PAGE]
    python -m lib.launch.verdict attention   a process of its own, which alone ends where the GPU fails
    python -m lib.launch.verdict remove DIR  what was trained for the verdict, on every host

Every part is a command of the project in a process of its own; a part that fails stops none of the others. Nothing is
sent anywhere, and the page names no host, user, path or address. The last line of output is one JSON object. Exit
status: 0 if everything worked, 1 if something did not.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
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
from collections.abc import Callable, Iterator, Sequence
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
FOLDER = "verdict-"  # begins the name of the folder of what is trained
LIMIT_SECONDS = {False: 590.0, True: 890.0}  # of all parts together; with other hosts
TESTS = ("tests/test_losses.py", "tests/test_step.py", "tests/test_forward.py", "tests/test_long_rows.py")
SHAPES = ((128, 4, 256), (256, 4, 256), (128, 4, 512))  # hidden size, blocks, tokens of a sequence
MICRO_BATCH = 4  # the largest that is calibrated
WEIGHTS_DIFFER = 2e-2  # of their norm, at most, after RING_STEPS of Adam, which enlarges what rounding changes
LOSS_DIFFERS = 1e-3
RING_STEPS = 6
ATTENTION = (1, 8, 4096, 64)  # sequences, heads, positions, numbers of a head
ATTENTION_DIFFERS = {"float32": 1e-4, "bfloat16": 2e-2}
KNOWN_TOKENS = 2048
SHARED_STEPS, PAIRS_OF_A_RANK = 30, 8  # by which planned and equal shares are compared
CABLE_SECONDS = 60.0  # that a person has to pull it, and again for the others to go on
# Published tokens/s of LoRA on one row of 2,048 tokens: (type, hidden size, blocks, bits): figure, its source.
KNOWN: dict[tuple[object, ...], str] = {
    ("qwen3", 4096, 36, 4): "97.8 on an M1 Max by mlx-train-perf's README (Qwen3-8B-4bit)"
}


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
        common = [
            f"run.dir={self.folder}",
            f"run.name={name}",
            "run.pages=false",
            f"plan.calibration_dir={self.folder}/none",
        ]
        launch = [*self.launch_words(), "--", "train.py"] if ranks else ["train.py"]
        self.python(*launch, *common, *words)
        summary: dict[str, Any] = json.loads((self.folder / name / "summary.json").read_text(encoding="utf-8"))
        return summary

    def launch_words(self) -> list[str]:
        """Starts a rank on every host."""
        if self.hosts:
            return ["launch", "--hostfile", str(self.hosts.absolute())]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = min(probe.getsockname()[1], 64_000)
        return ["launch", "--hosts", "localhost:2", "--no-preflight", "--starting-port", str(port)]

    def steps_of(self, name: str) -> list[dict[str, Any]]:
        """The records of a run's steps."""
        log = self.folder / name / "logs/rank-000.jsonl"
        return [record for record in read_records(log) if record["kind"] == "step"]


# ---- The parts: each gives its line, or raises UserError or LeftOut


def doctor(trials: Trials) -> str:
    """Whether training can run here, and the rate of matrix products."""
    lines = trials.python("-m", "lib.launch.preflight", limit_seconds=120).strip().splitlines()
    failed = [" ".join(line.split()) for line in lines if re.match(r"  \S+ +failed", line)]
    rate = re.search(r"[\d,]+ GFLOP/s", "\n".join(lines))
    if failed:
        raise UserError("; ".join(failed))
    return f"{lines[-1]}; {rate[0] if rate else 'no rate'} of matrix products"


def wired_limit(_: Trials) -> str:
    """How much of its memory a Mac's GPU may hold."""
    if not os_commands.is_mac():
        raise LeftOut("not a Mac")
    device, facts = hardware.mlx_device()
    if device != "metal":
        raise UserError("MLX does not use this Mac's GPU")
    limit, memory = facts["max_recommended_working_set_size"], hardware.host_memory_bytes() or 0
    by = os_commands.sysctl("iogpu.wired_limit_mb") or "unknown"
    return f"{limit / 1e9:.1f} GB of {memory / 1e9:.1f} GB, {limit / max(memory, 1):.0%}; iogpu.wired_limit_mb={by}"


def numerics(trials: Trials) -> str:
    """Losses, gradients, shared prompts and long rows against float64."""
    output = trials.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *TESTS)
    return output.strip().splitlines()[-1].strip("= ") + " (losses and gradients beside float64)"


def quickstart(trials: Trials) -> str:
    """As make train runs it."""
    found = trials.train("quickstart", "evaluate.samples=0")
    before, after = found["exact_match_before"], found["exact_match_after"]
    text = f"exact match {before:.1%} before ➜ {after:.1%} after, {found['wall_seconds']:.0f} s, "
    text += f"{found['pairs_per_second']:.1f} pairs/s"
    if not after > before + 0.2:
        raise UserError(f"{text}: it did not learn; 52.7 % ➜ 97.3 % is usual")
    return text


def memory(trials: Trials) -> str:
    """The quickstart's peak, and that of the plan's formula."""
    rank = json.loads((trials.folder / "quickstart/plan.json").read_text(encoding="utf-8"))["ranks"][0]
    peak = max(step["peak_memory_bytes"] for step in trials.steps_of("quickstart"))
    return f"quickstart: {of_formula(peak, rank['planned_bytes'])}"


def of_formula(peak: int, planned: int) -> str:
    """A peak of memory beside the formula's. Raises UserError: a plan would not have foreseen it."""
    text = f"peak {terminal.size_text(peak)}, by the formula {terminal.size_text(planned)} ({peak / planned:.2f})"
    if peak > 1.25 * planned:
        raise UserError(f"{text}: more than the formula allows")
    return text


def curve_of(trials: Trials, hidden: int, blocks: int, tokens: int) -> str:
    """The calibration of a small Llama: its speed, and its peak of memory by the formula."""
    shape = {"model_type": "llama", "hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": 8}
    shape |= {"num_key_value_heads": 4, "intermediate_size": 3 * hidden, "vocab_size": 8192, "rms_norm_eps": 1e-5}
    folder = trials.folder / f"model-{hidden}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    words = ["--quick", "--largest", str(MICRO_BATCH), "--length", str(tokens), f"--folder={trials.folder}/curves"]
    words += [f"model.path={folder}", "model.random_init=true", f"data.max_length={tokens}", "evaluate.answers=null"]
    found = json.loads(trials.python("benchmarks/calibrate.py", *words, limit_seconds=120).splitlines()[-1])
    half = tokens // 2
    rows = Rows(tokens + 1 - half, tokens + 1, tokens + 1 + half, 2 * half)
    device, point = found["device"], max(found["points"], key=lambda one: one["batch_size"])
    planned = MemoryModel(model_shape_of(shape, "float32" if device == "cpu" else None), Training(), rows)
    speed = f"{found['pairs_per_second']:.3g} pairs/s in micro-batches of {found['optimal_batch_size']}"
    peak = of_formula(point["peak_memory_bytes"], planned.bytes(point["batch_size"], device).total)
    return f"Llama of {blocks} blocks of {hidden}, {tokens:,} tokens: {speed}; of {point['batch_size']}: {peak}"


def link(trials: Trials) -> str:
    """The time of sums over the ranks of a ring, once every host was checked."""
    done, why = preflight.run_python([*trials.launch_words(), "--preflight-only", "--json", "--", "train.py"], 90)
    if not done.output.startswith("{"):
        raise UserError(why)
    findings = json.loads(done.output)["findings"]
    if failed := [f"{one['check']}: {one['message']}" for one in findings if one["status"] == "failed"]:
        raise UserError("; ".join(failed))
    return "; ".join(one["message"] for one in findings if one["check"] == "links")


def shares(trials: Trials) -> str:
    """Efficiency: the speed together over the sum of what the hosts do alone, at planned and at equal shares."""
    if trials.hosts is None:
        raise LeftOut("no HOSTS=hostfile was given")
    curves = f"{trials.folder}/hosts"
    words = [*trials.launch_words(), "--", "benchmarks/calibrate.py", "--quick", f"--folder={curves}"]
    (line,) = re.findall(r"^\[0 [^]]*\] (\{.*\})$", trials.python(*words), re.MULTILINE)[-1:] or ["{}"]
    hosts = json.loads(line).get("hosts", [])
    if len(hosts) < 2:
        raise UserError("the hosts could not be calibrated together")
    common = [f"train.steps={SHARED_STEPS}", f"train.global_batch_size={PAIRS_OF_A_RANK * len(hosts)}"]
    common += ["evaluate.every=null", "evaluate.samples=0", "evaluate.answers=null", "strategy=synchronous"]
    equal = f"plan.shares={[PAIRS_OF_A_RANK] * len(hosts)}".replace(" ", "")
    alone = [host["pairs_per_second"] for host in hosts]
    devices = [f"{host['device_name']} {speed:.1f}" for host, speed in zip(hosts, alone, strict=True)]
    text = f"alone {' + '.join(devices)} pairs/s"
    for name, chosen in (("planned", []), ("equal", [equal])):
        found = trials.train(f"{name}-shares", *common, *chosen, f"plan.calibration_dir={curves}", ranks=True)
        plan = json.loads((trials.folder / f"{name}-shares/plan.json").read_text(encoding="utf-8"))
        speed, planned = found["pairs_per_second"], " + ".join(map(str, plan["shares"]))
        text += f"; {name} shares {planned}: {speed:.1f} pairs/s, efficiency {speed / sum(alone):.2f}"
    return text


def cable(trials: Trials) -> str:
    """Whether the others go on when a cable is pulled, by a person, while all train."""
    if trials.hosts is None:
        raise LeftOut("no HOSTS=hostfile was given")
    words = ["--", "train.py", f"run.dir={trials.folder}", "run.name=cable", "run.pages=false", "train.steps=1000000"]
    words += ["checkpoint.every=20", "evaluate.every=null", "evaluate.samples=0", "strategy=synchronous"]
    output, record = trials.folder / "cable.txt", trials.folder / "cable/logs/rank-000.jsonl"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *trials.launch_words(), "--max-restarts", "1", *words],
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
        )

    def wait_for(step: int, text: str) -> str | None:
        """The output, once it has a text and rank 0 a step; None: not within the limit."""
        deadline = time.monotonic() + CABLE_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
            steps = trials.steps_of("cable") if record.exists() else []
            said = output.read_text(encoding="utf-8", errors="replace")
            if text in said and steps and steps[-1]["step"] >= step:
                return said
        return None

    try:
        if wait_for(25, "") is None:
            raise UserError("the hosts did not train within a minute")
        print(f"\n>>> Pull the cable of another machine now, within {CABLE_SECONDS:.0f} s.", flush=True)
        if wait_for(0, "launch: start 2,") is None:
            step = trials.steps_of("cable")[-1]["step"]
            if process.poll() is not None or wait_for(step + 1, "") is None:
                raise UserError("the cable was pulled, and the others did not go on")
            raise LeftOut(f"no cable was pulled within {CABLE_SECONDS:.0f} s")
        last = trials.steps_of("cable")[-1]["step"]
        said = wait_for(last + 20, "")
        print(">>> Put it back.\n", flush=True)
        if said is None:
            raise UserError("after the cable was pulled no step followed")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    notes = [line.removeprefix("launch: ") for line in said.splitlines() if line.startswith("launch: ")]
    return f"{'; '.join(notes)}; 20 further steps"


def ring(trials: Trials, strategy: str) -> str:
    """A few steps of ranks together beside those of one rank alone."""
    words = [f"train.steps={RING_STEPS}", "train.global_batch_size=8", "evaluate.every=null", "evaluate.samples=0"]
    words += ["evaluate.answers=null", "data.valid=null", "checkpoint.final=last"]
    if not (trials.folder / "alone/summary.json").exists():
        trials.train("alone", *words)
    found = trials.train(strategy, *words, f"strategy={strategy}", ranks=True)
    one, other = trials.steps_of("alone"), trials.steps_of(strategy)
    loss = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(one, other, strict=True))
    weights = weights_differ(trials.folder / "alone", trials.folder / strategy)
    text = f"{found['world_size']} ranks, {RING_STEPS} steps: losses differ from one rank's by {loss:.1e}, "
    text += f"weights by {weights:.1e} of their norm; {found['pairs_per_second']:.1f} pairs/s"
    if not (loss < LOSS_DIFFERS and weights < WEIGHTS_DIFFER and found["world_size"] > 1):
        raise UserError(f"{text}: more than rounding")
    return text


def weights_differ(one: Path, other: Path) -> float:
    """The largest relative difference of an adapter's array between two runs, by norm."""
    import mlx.core as mx

    loaded = (mx.load(str(run / "adapters.safetensors")) for run in (one, other))
    first, second = ({name: np.array(array) for name, array in arrays.items()} for arrays in loaded)
    norms = {name: max(float(np.linalg.norm(array)), 1e-12) for name, array in first.items()}
    return max(float(np.linalg.norm(first[name] - second[name])) / norms[name] for name in first)


def attention(trials: Trials) -> str:
    """Attention's backward pass by MLX and in blocks that make the scores again."""
    found = json.loads(trials.python("-m", "lib.launch.verdict", "attention", limit_seconds=120).splitlines()[-1])
    (plain, plain_peak), (blocks, blocks_peak) = found["plain"], found["blocks"]
    text = f"{found['dtype']}, {ATTENTION[2]:,} positions: MLX's {plain:.3f} s and {terminal.size_text(plain_peak)}, "
    text += f"ours {blocks:.3f} s and {terminal.size_text(blocks_peak)}; gradients differ by {found['difference']:.1e}"
    if not found["difference"] < ATTENTION_DIFFERS[found["dtype"]]:
        raise UserError(f"{text}: more than rounding")
    return text


def print_attention() -> None:
    """Times both ways, forward and backward, and compares their gradients; prints them as JSON."""
    mpi_and_blas.prepare()
    import mlx.core as mx

    from lib.model.long_attention import causal_attention

    dtype = mx.float32 if hardware.mlx_device()[0] == "cpu" else mx.bfloat16
    inputs = [mx.random.normal(ATTENTION, key=mx.random.key(seed)).astype(dtype) for seed in range(4)]
    scale = ATTENTION[3] ** -0.5

    def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, mask="causal", scale=scale)

    def blocks(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return causal_attention(q, k, v, scale=scale)

    answer: dict[str, Any] = {"dtype": str(dtype).rpartition(".")[2]}
    gradients = []
    for name, way in (("plain", plain), ("blocks", blocks)):
        seconds = []
        mx.reset_peak_memory()
        for _ in range(3):  # the first compiles
            began = time.perf_counter()
            found = mx.vjp(way, inputs[:3], inputs[3:])[1]
            mx.eval(found)
            seconds.append(time.perf_counter() - began)
        answer[name] = [min(seconds[1:]), mx.get_peak_memory()]
        gradients.append(found)
    pairs = [(a.astype(mx.float32), b.astype(mx.float32)) for a, b in zip(*gradients, strict=True)]
    answer["difference"] = max((mx.linalg.norm(a - b) / mx.linalg.norm(a)).item() for a, b in pairs)
    print(json.dumps(answer))


def known_figure(trials: Trials) -> str:
    """Tokens/s of LoRA on single rows of a model that is here, beside a published figure."""
    if trials.model is None:
        raise LeftOut("no MODEL=FOLDER was given")
    stored = json.loads((trials.model / "config.json").read_text(encoding="utf-8"))
    stored = {**stored, **stored.get("text_config", {})}
    facts = [stored.get(name) for name in ("model_type", "hidden_size", "num_hidden_layers")]
    bits = (stored.get("quantization") or {}).get("bits")
    random = np.random.default_rng(0)
    ids = random.integers(2, stored["vocab_size"], (4, KNOWN_TOKENS)).tolist()
    rows = "".join(json.dumps({"prompt_ids": row[:1], "completion_ids": row[1:]}) + "\n" for row in ids)
    (trials.folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    words = [f"model.path={trials.model.absolute()}", f"data.train={trials.folder}/rows.jsonl", "data.valid=null"]
    words += ["evaluate.answers=null", "evaluate.every=null", "train.loss=sft", "train.steps=3"]
    words += ["train.global_batch_size=1", f"data.max_length={KNOWN_TOKENS}"]
    trials.train("known", *words)
    rate = KNOWN_TOKENS / statistics.median(step["step_seconds"] for step in trials.steps_of("known")[1:])
    model = f"{facts[0]} of {facts[2]} blocks of {facts[1]}" + (f" in {bits} bits" if bits else "")
    known = f"published: {KNOWN[(*facts, bits)]}" if (*facts, bits) in KNOWN else "no figure is published"
    return f"{model}, LoRA, rows of {KNOWN_TOKENS:,}: {rate:.1f} tokens/s; {known}"


def parts() -> Iterator[tuple[str, Callable[[Trials], str]]]:
    """Name and part, in the page's order."""
    yield from (("doctor", doctor), ("wired limit", wired_limit), ("numerics", numerics))
    yield from (("quickstart", quickstart), ("memory", memory), ("attention", attention), ("link", link))
    ways = ("synchronous", "sharded", "pipelined")
    yield from ((f"ring, {way}", functools.partial(ring, strategy=way)) for way in ways)
    yield from (("shares", shares), ("cable", cable), ("known figure", known_figure))
    for hidden, blocks, tokens in SHAPES:
        part = functools.partial(curve_of, hidden=hidden, blocks=blocks, tokens=tokens)
        yield "calibration", part


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
    folders = [str(ROOT), tempfile.gettempdir(), str(options.model or ""), str(Path.home())]
    found = [network.own_name(), socket.gethostname(), os.environ.get("USER", ""), Path(folders[-1]).name, *folders]
    for host in hostfile.read(options.hosts).hosts if options.hosts else ():
        found += [host.name, host.name.rpartition("@")[2], *host.addresses]
    return found


def machine_lines() -> list[str]:
    """The machine and its versions, without its name."""
    machine = hardware.identify("")
    system = " ".join((machine.os or "").split()[:2]).partition("-")[0]
    cores, size = os_commands.own_cores(), terminal.size_text(machine.memory_bytes or 0)
    commit = os_commands.output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip()
    versions = ", ".join(f"{name} {version}" for name, version in hardware.versions(("mlx", "mlx-lm", "numpy")).items())
    python = ".".join(map(str, sys.version_info[:3]))
    return [
        f"Tandem's verdict on {machine.device_name} ({machine.device}), {cores} cores, {size}, {system}",
        f"{datetime.now(UTC):%d %B %Y}; Tandem {commit or 'without git'}, Python {python}, {versions}",
        "Made by `make verdict`; it names no host, user, path or address.",
    ]


def judge(trials: Trials, names: Sequence[str], say: Callable[[str], None]) -> list[dict[str, str]]:
    """Tries every part and says its line as soon as it is known."""
    rows = []
    for name, part in parts():
        began, status = time.monotonic(), "works"
        try:
            text = without_names(part(trials), names)
        except LeftOut as error:
            status, text = "left out", str(error)
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
        print_attention()
        return 0
    if words[:1] == ["remove"] and len(words) == 2 and Path(words[1]).name.startswith(FOLDER):
        shutil.rmtree(words[1], ignore_errors=True)
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

    for line in (*lines, ""):
        say(line)
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=ROOT / "runs"))  # in the project, which each host has somewhere
    trials = Trials(folder, options.model, options.hosts)
    try:
        rows = judge(trials, names, say)
    finally:
        remove = ["-m", "lib.launch.verdict", "remove", str(folder)]
        if options.hosts:
            preflight.run_python([*trials.launch_words(), "--no-preflight", "--", *remove], 60)
        shutil.rmtree(folder, ignore_errors=True)
    count = {status: sum(row["status"] == status for row in rows) for status in ("works", "fails", "left out")}
    minutes = (time.monotonic() - trials.began) / 60
    say(f"\n{count['works']} work, {count['fails']} fail, {count['left out']} left out; {minutes:.1f} minutes")
    chip = re.sub(r"[^a-z0-9]+", "-", lines[0].partition(" (")[0].partition(" on ")[2].lower()).strip("-")
    file = options.folder / f"verdict-{chip}-{datetime.now(UTC):%Y-%m-%d}.txt"
    file.write_text("\n".join(page) + "\n", encoding="utf-8")
    print(f"\n{file}: attach it to an issue, if you like")
    print(json.dumps({"file": str(file), "rows": rows}))
    return int(count["fails"] > 0)


if __name__ == "__main__":
    sys.exit(main())
