"""What somebody else's files and words do to Tandem: each line an attack, which holds where one clear line refuses it.

tests/test_attacks.py tries them in one process; benchmarks/attack.py each in a process of its own, with a limit on time
and memory. An attack gives why it fell, or nothing where the program held.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pyarrow
import pyarrow.parquet
import yaml

import train
from lib.config.help import accepts, settings
from lib.dashboard import command as dashboard
from lib.dashboard import run_report
from lib.evaluate import command as evaluate
from lib.export import command as export
from lib.launch import host_ranks
from lib.model import adapter_files
from lib.serve import api_keys
from lib.serve import command as server
from lib.system import files, terminal
from lib.training.checkpoint import MANIFEST, STATE, file_sha256
from tests import tiny

Attack = Callable[[Path], str | None]  # in the folder of `prepare`; why it fell
MAINS: dict[str, Callable[[list[str]], int]] = {
    "train.py": train.main,
    "lib.evaluate": evaluate.main,
    "lib.server": server.main,
    "lib.export": export.main,
    "lib.dashboard": dashboard.main,
}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]")  # by a terminal; said here anew
HALF = "\ud800"  # of a surrogate pair
BIG = 5_400_000  # letters: 1,024 rows of them are 5.5 GB


def prepare(folder: Path) -> Path:
    """A folder with a model, data and a finished run, runs/done, which attacks copy before they change it."""
    words = tiny.settings(folder, run__name="done", train__steps=2, checkpoint__every=1, evaluate__samples=0)
    tiny.train(folder, words)
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "pipe.parquet")
    return folder


def run_of(program: str, words: list[str]) -> tuple[int, str, str]:
    """Exit status, standard output and error of a program in this process; a traceback is status 1."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = MAINS[program](words)
    except Exception as error:
        return 1, out.getvalue(), f"Traceback: {type(error).__name__}: {error}"
    return status, out.getvalue(), err.getvalue()


def refused(program: str, words: list[str], told: str = "") -> str | None:
    """Why a command was not refused by one clear line and exit status 2."""
    status, _, errors = run_of(program, words)
    lines = [line for line in errors.splitlines() if line and not line.startswith("warning: ")]
    if status != 2 or len(lines) != 1 or not lines[0].startswith("error: ") or told not in lines[0]:
        return f"status {status}: {errors[-300:]}"
    return "what a terminal obeys is in the message" if OBEYED.search(lines[0]) else None


def training(folder: Path, *words: str) -> list[str]:
    runs = ["run.name=attacked", f"run.dir={folder / 'attacked'}", "train.steps=1", "evaluate.samples=0"]
    return [*tiny.settings(folder), *runs, "--config", str(tiny.config_file(folder)), *words]


def of_words(*words: str, told: str = "") -> Attack:
    """Words of train.py; {d} is the folder."""

    def attack(folder: Path) -> str | None:
        shutil.rmtree(folder / "attacked", ignore_errors=True)
        return refused("train.py", training(folder, *(word.replace("{d}", str(folder)) for word in words)), told)

    return attack


def of_config(text: str, told: str = "") -> Attack:
    def attack(folder: Path) -> str | None:
        (folder / "attack.yaml").write_text(text)
        return refused("train.py", ["--config", str(folder / "attack.yaml")], told)

    return attack


def of_rows(rows: list[Any], *words: str) -> Attack:
    """Rows of JSON lines, as data.train."""

    def attack(folder: Path) -> str | None:
        tiny.write_jsonl(folder / "attack.jsonl", rows)
        return of_words(f"data.train={folder / 'attack.jsonl'}", *words)(folder)

    return attack


def of_table(table: Callable[[], pyarrow.Table]) -> Attack:
    """A file of parquet, as data.train: it may be read where it fits, within little memory."""

    def attack(folder: Path) -> str | None:
        path = folder / "attack.parquet"
        pyarrow.parquet.write_table(table(), path, compression="zstd", dictionary_pagesize_limit=2**30)
        return of_words(f"data.train={path}")(folder)

    return attack


@contextlib.contextmanager
def copy_of_run(folder: Path) -> Iterator[Path]:
    copy = folder / "copies" / "run"
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(folder / "runs/done", copy)
    yield copy


def of_run(program: str, setting: str, value: str, *words: str, also: Mapping[str, str] | None = None) -> Attack:
    """A run's folder whose config.yaml allows what only the user may: nothing of it runs, one line says so.

    also: other settings of it.
    """

    def attack(folder: Path) -> str | None:
        with copy_of_run(folder) as run:
            marker = folder / "code-has-run"
            for place in (run, *(run / "checkpoints").iterdir()):
                for key, text in {**(also or {}), setting: value.format(marker=marker)}.items():
                    set_in(place / "config.yaml", key, text)
                if (place / MANIFEST).exists():
                    agree(place)
            given = [word.format(run=run, d=folder) for word in words]
            fault = refused(program, given, told=f"{setting}=")
            return "its code has run" if marker.exists() else fault

    return attack


def of_template(path: str) -> Attack:
    """A run whose config.yaml names something as its chat template that is no file, served."""

    def attack(folder: Path) -> str | None:
        with copy_of_run(folder) as run:
            set_in(run / "config.yaml", "data.chat_template", path.format(d=folder))
            return refused(
                "lib.server", ["--run", str(run), "serve.port=0", "model.random_init=false"], told="data.chat_template"
            )

    return attack


def set_in(path: Path, setting: str, value: str) -> None:
    """Changes a setting of a config.yaml."""
    stored = yaml.safe_load(path.read_text())
    section, _, name = setting.partition(".")
    stored[section][name] = yaml.safe_load(value)
    path.write_text(yaml.safe_dump(stored))


def agree(checkpoint: Path) -> None:
    """Makes a manifest right again: it shows damage, and proves no author."""
    hashes = {file.name: file_sha256(file) for file in checkpoint.iterdir() if file.name != MANIFEST}
    (checkpoint / MANIFEST).write_text(json.dumps(hashes))


def of_state(change: Callable[[dict[str, Any]], Any]) -> Attack:
    """A state.json that somebody changed, with hashes that agree: the checkpoint before it is taken, or one line said."""

    def attack(folder: Path) -> str | None:
        with copy_of_run(folder) as run:
            newest = max((run / "checkpoints").iterdir())
            (newest / STATE).write_text(json.dumps(change(json.loads((newest / STATE).read_text()))))
            agree(newest)
            status, out, errors = run_of("train.py", ["--resume", str(run), "train.steps=3"])
            if status not in (0, 2) or "Traceback" in errors:
                return f"status {status}: {errors[-300:]}"
            return None if status == 2 or "is damaged" in out else "nothing was said"

    return attack


def of_summary(change: dict[str, Any]) -> Attack:
    """A summary.json that somebody changed, as the pages read it."""

    def attack(folder: Path) -> str | None:
        with copy_of_run(folder) as run:
            stored = json.loads((run / "summary.json").read_text())
            (run / "summary.json").write_text(json.dumps(stored | change))
            status, _, errors = run_of("lib.dashboard", ["--export", str(run)])
            return None if status in (0, 2) and "Traceback" not in errors else f"status {status}: {errors[-300:]}"

    return attack


# ---- Attacks with a story of their own


def resumes_a_link(folder: Path) -> str | None:
    """--resume of a link goes on with the run that it leads to, and makes no other."""
    with copy_of_run(folder) as run:
        link = folder / "a-link"
        link.unlink(missing_ok=True)
        link.symlink_to(run)
        status, _, errors = run_of("train.py", ["--resume", str(link), "train.steps=3"])
        steps = [record["step"] for record in tiny.steps_of(run)]
        return None if (status, steps) == (0, [1, 2, 3]) else f"status {status}, steps {steps}: {errors[-300:]}"


def tears_an_adapter(folder: Path) -> str | None:
    """An adapter that cannot be written to its end leaves the old one whole."""
    path = folder / "torn" / "adapters.safetensors"
    files.write_atomically(path, "the old one")

    def arrays() -> Iterator[tuple[str, mx.array]]:
        yield "a", mx.zeros(4)
        raise OSError(28, "No space left on device")

    with contextlib.suppress(OSError):
        adapter_files.write_arrays(path, dict.fromkeys("ab", ((4,), mx.float32)), arrays())
    left = sorted(file.name for file in path.parent.iterdir())
    return None if path.read_text() == "the old one" and left == [path.name] else f"it is torn: {left}"


def keeps_finite_checkpoints(folder: Path) -> str | None:
    """Weights that are not finite push out no checkpoint, and become no adapter."""
    run = folder / "attacked" / "attacked"
    shutil.rmtree(run, ignore_errors=True)
    words = training(folder, "train.steps=2", "checkpoint.every=1", "checkpoint.keep=1", "train.schedule=constant")
    words += ["train.optimizer=sgd", "train.learning_rate=1e308", "train.max_grad_norm=null"]
    status, _, errors = run_of("train.py", words)
    for file in run.rglob("*.safetensors"):
        for name, array in mx.load(str(file)).items():
            if not mx.isfinite(array).all():
                return f"{file.relative_to(run)}: {name} is not finite"
    return "it ended well, and cannot" if status == 0 or "Traceback" in errors else None


def marks_up_the_card(folder: Path) -> str | None:
    """Samples and names reach the model card as text."""
    with copy_of_run(folder) as run:
        log = run / "logs" / "rank-000.jsonl"
        sample = {"prompt": "x\r# Owned\x0b<img src=x>\u2028[a](javascript:b)", "before": "\x1b[31m", "after": "b"}
        record = {"kind": "samples", "time": 2e9, "rank": 0, "host": "a", "step": 1, "samples": [sample]}
        log.write_text(log.read_text() + json.dumps(record) + "\n")
        (run / "summary.json").write_text(json.dumps({"model": "m`\n# Owned <script>", "early_end": "a\n# Owned"}))
        run_report.write(run)
        text = (run / "README.md").read_text()
        shown_as_text = [line for line in text.splitlines() if not line.startswith("    ")]
        owned = [line for line in shown_as_text if re.search(r"^# Owned|(?<!\\)<(script|img)|\x1b", line)]
        return f"the card obeys: {owned}" if owned or "\x1b" in text else None


def obeys_on_the_terminal(folder: Path) -> str | None:
    """What others wrote is shown at the terminal, and not obeyed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        voice = terminal.Voice()
        voice.line("a\x1b[31mb\x9b2J\u202e\x07\ud800")
        voice.table("t\x1b", ["c"], [["\x1b]0;x\x07"]])
        voice.facts("", [("n", "\x1b[2J")])
    text = out.getvalue()
    return None if not OBEYED.search(text) and "a" in text else f"it obeys {text!r}"


def revokes_the_last_key(folder: Path) -> str | None:
    """A key that is taken out of the file is good no more when the keys are read again, though it was the last one."""
    path = folder / "keys"
    path.unlink(missing_ok=True)
    key = api_keys.make("alice", path)
    if api_keys.read(path).owner(key) != "alice":
        return "the key never worked"
    path.write_text("")
    return None if server.keys_again(path).owner(key) is None else "it goes on working"


def takes_the_folder_first(folder: Path) -> str | None:
    """A folder of ours that somebody else made first, or may look into, is not used."""
    for prepare_it in (
        lambda path: path.mkdir(mode=0o777),
        lambda path: path.symlink_to(folder),
        lambda path: path.touch(),
    ):
        path = folder / "tandem-hex"
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        prepare_it(path)
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o777)
        with contextlib.suppress(OSError):
            host_ranks.own_folder(path)
            return f"{path.lstat().st_mode:o} is used"
    path.unlink()
    host_ranks.own_folder(path)
    return None if path.lstat().st_mode & 0o777 == 0o700 else "others may look into it"


def long_rows() -> pyarrow.Table:
    once = pyarrow.array(["x" * BIG])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1024, pyarrow.int32()), once)
    return pyarrow.table({"prompt": column, "chosen": ["a"] * 1024, "rejected": ["b"] * 1024})


def many_values() -> pyarrow.Table:
    offsets = pyarrow.array([0, *[2**20 * (i + 1) for i in range(64)]], pyarrow.int32())
    values = pyarrow.ListArray.from_arrays(offsets, pyarrow.array(memoryview(bytes(2**26)), pyarrow.int8()))
    return pyarrow.table({"prompt_ids": values, "chosen_ids": values, "rejected_ids": values})


TAGGED = ("!!bool maybe", '!!int ""', '!!float ""', "!!timestamp x")  # what PyYAML itself falls over
TRUST = ("model.trust_remote_code", "true")
JUDGE = ("evaluate.judge", "touch {marker}")
RESUME = ("--resume", "{run}")
ROUNDS = {"rollouts.rounds": "1", "train.steps": "null"}
ATTACKS: dict[str, Attack] = {
    # Files that end well
    "resume a link": resumes_a_link,
    "tear the adapter": tears_an_adapter,
    "weights that are not finite": keeps_finite_checkpoints,
    # A run's folder of somebody else
    "trust_remote_code, serve": of_run("lib.server", *TRUST, "--run", "{run}"),
    "trust_remote_code, resume": of_run("train.py", *TRUST, "--resume", "{run}"),
    "trust_remote_code, evaluate": of_run("lib.evaluate", *TRUST, "--run", "{run}"),
    "trust_remote_code, a checkpoint": of_run("lib.evaluate", *TRUST, "--run", "{run}", "--checkpoint", "last"),
    "trust_remote_code, export": of_run("lib.export", *TRUST, "{run}", "--to", "mlx"),
    "trust_remote_code, against": of_run(
        "lib.evaluate", *TRUST, "--run", "{d}/runs/done", "--against", "{run}", "--out", "{d}/o.jsonl"
    ),
    "judge, make-pairs": of_run("lib.evaluate", *JUDGE, "--run", "{run}", "--make-pairs", "{d}/pairs.jsonl"),
    "judge, against": of_run("lib.evaluate", *JUDGE, "--run", "{run}", "--against", "base", "--out", "{d}/o.jsonl"),
    "judge, resumed rounds": of_run("train.py", *JUDGE, "--resume", "{run}", also=ROUNDS),
    "rollouts.judge, a command": of_run("train.py", "rollouts.judge", "touch {marker}", *RESUME, also=ROUNDS),
    "rollouts.judge, a function": of_run("train.py", "rollouts.judge", "os:system", *RESUME, also=ROUNDS),
    "rollouts.judge, a server": of_run("train.py", "rollouts.judge", "http://10.0.0.9/v1", *RESUME, also=ROUNDS),
    "rollouts.judge, a model": of_run("train.py", "rollouts.judge", "reward:{marker}", *RESUME, also=ROUNDS),
    "a template that never ends, serve": of_template("/dev/zero"),
    "a template that is a pipe, serve": of_template("{d}/pipe"),
    "serve.host": of_run("lib.server", "serve.host", "0.0.0.0", "--run", "{run}"),
    "serve.keys": of_run("lib.server", "serve.keys", "/dev/null", "--run", "{run}"),
    "serve.hostfile": of_run("lib.server", "serve.hostfile", "hosts", "--run", "{run}"),
    "serve.backends": of_run("lib.server", "serve.backends", "['http://10.0.0.9:1']", "--run", "{run}"),
    "serve.feedback": of_run("lib.server", "serve.feedback", "{marker}", "--run", "{run}"),
    "serve.cors_origins": of_run("lib.server", "serve.cors_origins", "['*']", "--run", "{run}"),
    # Inputs that take too much
    "5.5 GB from 2 kB of parquet": of_table(long_rows),
    "64 million values of parquet": of_table(many_values),
    "/dev/zero": of_words("data.train=/dev/zero"),
    "a pipe": of_words("data.train={d}/pipe"),
    "a pipe of parquet": of_words("data.train={d}/pipe.parquet"),
    "/dev/zero held out": of_words("data.valid=/dev/zero"),
    "/dev/zero of answers": of_words("evaluate.answers=/dev/zero"),
    "a pipe as model": of_words("model.path={d}/pipe"),
    "a name of 5,000 letters": of_words("data.train=" + "x" * 5000),
    # Texts that do more than they say
    "markup in the card": marks_up_the_card,
    "control characters": obeys_on_the_terminal,
    "control characters in a word": of_words("data.train=\x1b[31mred\x1b]0;x\x07"),
    "control characters in a setting": of_words("\x1b[31mx=3"),
    "control characters in a column": of_rows([{"\x1b[31mprompt": "x"}]),
    # Who may come in
    "a revoked last key": revokes_the_last_key,
    "/tmp/tandem-HEX": takes_the_folder_first,
    # YAML
    "an alias": of_config("model: &m {path: x}\ndata: *m\n"),
    "an alias of itself": of_config("model: &m\n  path: *m\ndata: {train: x}\n"),
    "a file that is its own section": of_config("&r\nmodel: *r\ndata: {train: x}\n"),
    "a billion laughs": of_config(
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    ),
    "3,000 lists deep": of_config("model: " + "[" * 3000 + "]" * 3000),
    "3,000 mappings deep": of_config("model: " + "{a: " * 3000 + "1" + "}" * 3000),
    "a day that is none": of_config("model: {path: 2001-99-99}\ndata: {train: x}\n"),
    "a number that is none": of_config("model: {path: !!int x}\ndata: {train: x}\n"),
    **{
        f"{tag} that is none": of_config(
            f"model: {{path: x}}\ndata: {{train: x}}\ntrain:\n  steps: {tag}\n", told="yaml:4: "
        )
        for tag in TAGGED
    },
    **{f"{tag} in a word": of_words(f"train.steps={tag}", told="train.steps=") for tag in TAGGED},
    "!!timestamp x inside a word": of_words("data.chat_template_kwargs={a: !!timestamp x}"),
    "5,000 digits": of_config("model: {path: x}\ndata: {train: x, max_length: " + "9" * 5000 + "}\n"),
    "a Python object": of_config("model: {path: !!python/object/apply:os.system [id]}\ndata: {train: x}\n"),
    "half a surrogate pair": of_config('model: {path: x}\ndata: {train: "\\ud800"}\n'),
    "a NUL": of_config('model: {path: "a\\0b"}\ndata: {train: x}\n'),
    "a list as key": of_config("? [a, b]\n: 1\nmodel: {path: x}\n"),
    "a config that is a pipe": lambda folder: refused("train.py", ["--config", str(folder / "pipe")]),
    "a config that never ends": lambda folder: refused("train.py", ["--config", "/dev/zero"]),
    # Words
    "betas=3": of_words("train.optimizer_options={betas: 3}"),
    "one beta": of_words("train.optimizer_options={betas: [0.9]}"),
    "betas of letters": of_words("train.optimizer_options={betas: [a, b]}"),
    "betas of 5": of_words("train.optimizer_options={betas: [5, 7]}"),
    "learning_rate as option": of_words("train.optimizer_options={learning_rate: 3}"),
    "eps of letters": of_words("train.optimizer_options={eps: x}"),
    "eps of lists": of_words("train.optimizer_options={eps: [1]}"),
    "a pattern that is none": of_words("evaluate.answer_pattern=("),
    "a rank pattern that is none": of_words("model.rank_pattern={'(': 3}"),
    "a seed of 23 digits": of_words("train.seed=99999999999999999999999"),
    "a seed of 2^64": of_words("train.seed=18446744073709551616"),
    "a batch of 20 digits": of_words("train.global_batch_size=99999999999999999999"),
    "a batch of 2^31": of_words("train.global_batch_size=2147483648"),
    "steps of 20 digits": of_words("train.steps=99999999999999999999"),
    "a multiple of 20 digits": of_words("data.length_multiple=99999999999999999999"),
    "a length of 20 digits": of_words("data.max_length=99999999999999999999"),
    "a rank of 11 digits": of_words("model.rank=99999999999"),
    "memory of 1e300": of_words("plan.memory_limit_gb=1e300"),
    "a wait of 1e300 s": of_words("sync.timeout_seconds=1e300"),
    # Records
    "half a pair as role": of_rows(
        [{"messages": [{"role": HALF, "content": "x"}, {"role": "assistant", "content": "y"}]}], "train.loss=sft"
    ),
    "half a pair as column": of_rows([{HALF: "x"}]),
    "half a pair as field": of_rows(
        [{"messages": [{"role": "user", "content": "x", HALF: 1}, {"role": "assistant", "content": "y"}]}],
        "train.loss=sft",
    ),
    "half a pair inside a field": of_rows(
        [{"messages": [{"role": "user", "content": "x", "n": {"a": HALF}}, {"role": "assistant", "content": "y"}]}],
        "train.loss=sft",
    ),
    "half a pair for the template": of_rows([{**PAIR, "chat_template_kwargs": {HALF: 1}}]),
    # States and summaries
    "a state that is a list": of_state(lambda state: [state]),
    "a state without a step": of_state(lambda state: {k: v for k, v in state.items() if k != "step"} | {"x": 1}),
    "a state of text": of_state(lambda state: state | {"step": "two"}),
    "a state of another step": of_state(lambda state: state | {"step": 10**9}),
    "a negative cursor": of_state(lambda state: state | {"cursor": -5}),
    "an epoch of 400 digits": of_state(lambda state: state | {"epoch": 10**400}),
    "rounds of text": of_state(lambda state: state | {"rounds": {"shares": "x"}}),
    "a schedule of text": of_state(lambda state: state | {"schedule": {**state["schedule"], "plans": "x"}}),
    "a schedule of nothing": of_state(lambda state: state | {"schedule": {**state["schedule"], "plans": []}}),
    "a schedule of steps to come": of_state(
        lambda state: (
            state
            | {
                "schedule": state["schedule"]
                | {"plans": [one | {"first_step": 99} for one in state["schedule"]["plans"]]}
            }
        )
    ),
    "rewards of nothing": of_state(lambda state: state | {"rewards": []}),
    "a best loss without its step": of_state(lambda state: state | {"best_step": None, "best_loss": 0.1}),
    "rounds without shares": of_state(lambda state: state | {"rounds": {"are_one": True}}),
    "rounds of no share": of_state(
        lambda state: state | {"rounds": {"shares": [0], "speeds": [0.0], "round_ends": [1.0], "are_one": True}}
    ),
    "a summary of text": of_summary({"pairs_per_second": "x", "efficiency": [], "cost": 3, "checkpoint": "y"}),
    "a summary of lists": of_summary({"model": ["x"], "early_end": {"a": 1}, "cost": {"cost": "x"}}),
}
ATTACKS |= {
    f"{setting.key} of 20 digits": of_words(f"{setting.key}={10**20}")
    for setting in settings()
    if accepts(setting.annotation, int) and not accepts(setting.annotation, float)
}
ATTACKS |= {
    f"half a surrogate pair as {setting.key}": of_words(f"{setting.key}=a{HALF}")
    for setting in settings()
    if accepts(setting.annotation, str)
}
