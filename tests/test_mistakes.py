"""First commands and mistakes of a new user: one line on standard error that says what and how to go on, and status 2.

Most run in this process, by the same `main` that the command line calls; a few start processes of their own, where
the mistake is the launcher's, the disk's or a port's to notice.
"""

import contextlib
import gzip
import io
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import train
from lib import dashboard
from lib.data import inspect
from lib.evaluate import command as evaluate
from lib.export import command as export
from lib.launch import command as launcher
from lib.serve import cli as server
from lib.system.network import host_name
from tests import tiny
from tests.tiny import ROOT

MAINS: dict[str, Callable[[list[str]], int]] = {
    "train.py": train.main,
    "lib.evaluate": evaluate.main,
    "lib.dashboard": dashboard.main,
    "lib.server": server.main,
    "lib.data": inspect.main,
    "lib.export": export.main,
    "launch": launcher.main,
}
PAIR = '{"prompt_ids": [5], "chosen_ids": [3, 1], "rejected_ids": [4, 1]}\n'
FILES: dict[str, str | bytes] = {
    "empty.jsonl": "",
    "bad.jsonl": PAIR * 3 + '{"prompt": oops}\n' + PAIR,
    "norejected.jsonl": '{"prompt": "a", "chosen": "b"}\n',
    "columns.jsonl": '{"question": "a", "good": "b", "bad": "c"}\n',
    "binary.jsonl": bytes(range(256)) * 9,
    "utf16.jsonl": (PAIR * 8).encode("utf-16"),
    "notgz.jsonl.gz": PAIR * 8,
    "cut.jsonl.gz": gzip.compress(PAIR.encode() * 99)[:40],
    "table.csv": "prompt,chosen,rejected\na,b,c\n",
    "table.tsv": "prompt\tchosen\trejected\na\tb\tc\n",
    "packed.jsonl": gzip.compress(PAIR.encode() * 8),
    "null.jsonl": PAIR.replace("[5]", "null"),
    "list.json": json.dumps([json.loads(PAIR)] * 8),
    "fake.parquet": PAIR,
    "huge.jsonl": "x" * 10_000_000,
    "ids.jsonl": PAIR.replace("[5]", "[99999]"),
    "text.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
    "tab.yaml": "model:\n\tpath: x\n",
    "syntax.yaml": "model: {path: x\n",
    "empty.yaml": "",
    "utf16.yaml": "model: {path: m}\n".encode("utf-16"),
    "section.yaml": "modle: {path: x}\ndata: {train: x}\n",
    "hosts.empty": "",
    "hosts.twice": "mac-a\nmac-a\n",
    "calibration.bad/HOST.json": "{oops",
    "model.cut/config.json": '{"model_type": "lla',
    "model.strange/config.json": '{"model_type": "frob"}',
    "model.pointer/model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n",
    "model.pointer/config.json": json.dumps(tiny.LLAMA),
    "model.none/readme": "",
    "run.empty/logs/readme": "",
    "there.png": "",
}
WORKS = {"no-end.jsonl": (PAIR * 8).rstrip().encode(), "with blank ü.jsonl": PAIR.encode() * 8}
# Program and words ({d}: the folder of the files above), and what the line says.
MISTAKES: list[tuple[str, str, str]] = [
    # Words
    ("train.py", "train.lr=1e-4", r"unknown setting train.lr; did you mean train.learning_rate\?"),
    ("train.py", "--batch-size 8", "did you mean train.global_batch_size"),
    ("train.py", "--dryrun", r"did you mean --dry-run\?"),
    ("train.py", "train.beta = 0.2", "write key=value in one word"),
    ("train.py", "train.steps=many", "should be a valid integer, not 'many'"),
    ("train.py", "train.loss=dpo", "not 'dpo'; here: DPO is sigmoid"),
    ("train.py", "plan.shares=[6,1]", "sum to 7, but train.global_batch_size is 8; make them equal"),
    ("train.py", "plan.shares=[6,2]", "plan.shares .6, 2. has 2 numbers, but there are 1 ranks"),
    ("train.py", "strategy=pipelined plan.shares=[1,1]", "has 2 numbers, but there is 1 rank.*mpirun -n 2"),
    ("train.py", "--config", "--config: expected one argument"),
    # Configurations
    ("train.py", "--config nope.yaml", "config file nope.yaml does not exist .*configs/ has examples"),
    ("train.py", "--config configs", "is a folder; name a file in it"),
    ("train.py", "--config {d}/tab.yaml", r"tab.yaml:2: not valid YAML: found character '\\t'"),
    ("train.py", "--config {d}/syntax.yaml", "syntax.yaml:2: not valid YAML"),
    ("train.py", "--config {d}/empty.yaml", "is empty or not a mapping"),
    ("train.py", "--config {d}/utf16.yaml", "is not UTF-8 text, but UTF-16: iconv -f UTF-16"),
    ("train.py", "--config {d}/section.yaml", r"section.yaml:1: unknown setting modle; did you mean model\?"),
    # Data
    ("train.py", "data.train={d}/none.jsonl", r"none.jsonl does not exist; did you mean .*\?|looked from"),
    ("train.py", "data.train={d}/*.nothing", r"no file \(\*.jsonl"),
    ("train.py", "data.train={d}/empty.jsonl", "is empty: it has no records"),
    ("train.py", "data.train={d}/bad.jsonl", r"bad.jsonl:4: broken JSON at column 12"),
    ("train.py", "data.train={d}/norejected.jsonl", "jsonl:1: no column 'rejected'.*columns={rejected: COLUMN"),
    ("train.py", "data.train={d}/columns.jsonl", "columns: question, good, bad.; .* data.columns={chosen: COLUMN"),
    ("train.py", "data.train={d}/binary.jsonl", "binary.jsonl:1: "),
    ("train.py", "data.train={d}/utf16.jsonl", "utf16.jsonl:1: not valid UTF-8: .* of UTF-16: iconv -f UTF-16"),
    ("train.py", "data.train={d}/notgz.jsonl.gz", "gzip stream .*Not a gzipped file"),
    ("train.py", "data.train={d}/cut.jsonl.gz", "the gzip stream is cut short or damaged"),
    ("train.py", "data.train={d}/packed.jsonl", "packed.jsonl:1: not valid UTF-8: byte 0x8b"),
    ("train.py", "data.train={d}/null.jsonl", "null.jsonl:1: prompt_ids: Input should be a valid list"),
    ("train.py", "data.train={d}/fake.parquet", "not a readable parquet file"),
    ("train.py", "data.train={d}/huge.jsonl", "a line of 10,000,000 bytes.*is a line break missing"),
    ("train.py", "data.train={d}/ids.jsonl", "ids.jsonl:1: token id 99999 is not below the vocabulary's size, 48"),
    ("train.py", "data.train={d}/text.jsonl", "its records are text, and the model has no tokenizer"),
    ("train.py", "data.train={d}/run.empty", r"run.empty: no file \(\*.jsonl"),
    ("train.py", "data.valid={d}/none.jsonl", "none.jsonl does not exist .* out with .*data.holdout=0.05"),
    ("train.py", "data.holdout=0.1", "data.valid takes the place of what data.holdout"),
    # Models
    ("train.py", "model.path={d}/none", "no such folder .a hub name is of the form owner/name"),
    ("train.py", "model.path={d}/model.none", "the folder has no config.json"),
    ("train.py", "model.path={d}/model.cut", "model.path .*model.cut/config.json is not JSON .*copy it again"),
    ("train.py", "model.path={d}/model.strange", "mlx-lm cannot load it: Model type frob not supported"),
    ("train.py", "model.random_init=false model.path={d}/model.pointer", "model.safetensors is Git LFS.*git lfs pull"),
    ("train.py", "model.path={d}/train.jsonl", "is a file; give the folder"),
    ("train.py", "model.random_init=false", "no model.*safetensors in the folder"),
    ("train.py", "model.adapter={d}/none", "model.adapter .*adapters.safetensors cannot be read"),
    ("train.py", "model.keys=[frob]", "no such layer .*its linear layers are mlp.down_proj"),
    ("train.py", "model.blocks=99", "model.blocks=99, but .* has 2 blocks"),
    ("train.py", "model.dropout=0.1 model.gradient_checkpointing=true", "wrong gradients"),
    # Runs
    ("train.py", "run.name=done data.train={d}/bad.jsonl", "already holds a run; go on with it by --resume"),
    ("train.py", "run.dir={d} run.name=model", "model exists and is not a run: it holds config.json; give another"),
    ("train.py", "run.dir={d}/train.jsonl", "Not a directory"),
    ("train.py", "run.dir=/proc/nowhere", "/proc/nowhere: "),
    ("train.py", "plan.calibration_dir={d}/calibration.bad", "json: cannot be read .*line 1.*make calibrate"),
    ("train.py", "--resume {d}/none", "no run there .it has no config.yaml"),
    ("train.py", "--resume {d}/train.jsonl", "no run there .it has no config.yaml"),
    ("train.py", "--resume {d}/runs/done/config.yaml", "no run there"),
    ("train.py", "--resume {d}/run.empty", "no run there .it has no config.yaml"),
    ("train.py", "--resume {d}/runs/done/checkpoints/step-00000001", "of run .*/done; --resume .*/done goes on from"),
    ("train.py", "--resume {d}/link.checkpoint", "a checkpoint of run .*/done; --resume .*/done goes on from its"),
    ("train.py", "--resume {d}/runs/twice train.steps=1", "a run of 1 steps is below .*; give a larger train.steps"),
    ("train.py", "--resume {d}/runs/done run.name=b", "goes on in .*/done; copy the folder, then --resume the copy"),
    ("train.py", "--resume {d}/runs/done run.dir={d}", "goes on in .*/done; copy the folder, then --resume the copy"),
    ("train.py", "--resume {d}/runs/done train.beta=0.5", "the run was started with 0.1 and cannot change it"),
    ("train.py", "--resume {d}/runs/done --config x.yaml", "leave --config out"),
    # The other programs
    ("lib.evaluate", "", "give either --run RUN or --model PATH"),
    ("lib.evaluate", "--model {d}/model", "--model needs --data FILE"),
    ("lib.evaluate", "--model {q} --tasks a --tasks-folder no --out x.json", "--tasks-folder no: no such folder"),
    ("lib.evaluate", "--model {q} --tasks a", "--tasks with --model needs --out OUT"),
    ("lib.evaluate", "--run {d}/none", "--run .*none: no "),
    ("lib.evaluate", "--run {d}/run.half", "no finished run there .adapters.safetensors is missing"),
    ("lib.evaluate", "--run {d}/runs/done --per-pair {d}/ids.jsonl", "ids.jsonl is there already; remove it, or give"),
    ("lib.evaluate", "--run {d}/runs/done --out {d}/o", "--out is for --score, --against and --tasks"),
    ("lib.dashboard", "{d}/none", "none is not a run's folder"),
    ("lib.dashboard", "--export {d}/run.empty", "has no records"),
    ("lib.dashboard", "--runs {d}/runs --port 99999", "--port 99999 is not in 0 to 65535"),
    ("lib.dashboard", "--runs {d}/runs --port {port}", r"cannot listen at 127.*in use\); give another --port"),
    ("lib.server", "", "give either --run RUN or --model PATH"),
    ("lib.server", "--run {d}/none", "no run there"),
    ("lib.server", "--model {d}/none", "no such folder"),
    ("lib.server", "--model {q} serve.port={port}", "Address already in use; serve.port=0 takes a free port"),
    ("lib.server", "--model {q} serve.host=0.0.0.0", "serve.keys"),
    ("lib.server", "--emit nginx", "--emit nginx needs --hosts"),
    ("lib.server", "--emit nginx --hosts a", "not of the form HOST:PORT"),
    ("lib.server", "--model {q} serve.tls_key=x", "nginx does this: python -m lib.server --emit nginx"),
    ("lib.server", "--model {q} serve.keys=/nowhere/keys", "--make-key NAME --keys /nowhere/keys"),
    ("lib.server", "--model {q} serve.host=192.0.2.7", "serve.host=192.0.2.7"),
    ("lib.export", "", "required: RUN$|required: RUN[^,]"),
    ("lib.data", "", "name FILES, e.g. --inspect data.jsonl"),
    ("lib.data", "--inspect {d}/none.jsonl", "none.jsonl does not exist"),
    ("launch", "-- train.py", "give --hostfile FILE or --hosts A,B"),
    ("launch", "--hostfile {d}/none -- train.py", "No such file or directory; hostfile.example shows one"),
    ("launch", "--hostfile {d}/hosts.empty -- train.py", "names no host; one line for each: NAME slots=1"),
    ("launch", "--hostfile {d}/hosts.twice -- train.py", "names mac-a twice"),
    ("launch", "--hosts localhost --backend gloo -- train.py", "invalid choice: 'gloo'.*ring"),
    ("launch", "--hosts localhost:0 -- train.py", "slots .0.: Input should be greater"),
    ("launch", "--hosts localhost --batch-size 8 -- train.py", "after --, behind .*mean train.global_batch_size"),
    ("launch", "--hosts localhost --python /nope -- train.py", "/nope does not start .*No such file"),
    ("launch", "--hosts localhost -- --config a.yaml", "'--config' behind --: name what to start"),
    ("launch", "--hosts localhost -- trian.py", r"trian.py does not exist; did you mean train.py\?"),
    ("launch", "--hosts localhost -- train.py train.lr=1", r"did you mean train.learning_rate\?"),
    ("launch", "--hosts localhost -- train.py --config nope.yaml", "nope.yaml does not exist"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the files, a run that has ended in runs/done, and one that has not in run.half."""
    folder = tmp_path_factory.mktemp("mistakes")
    tiny.train(folder, [*tiny.settings(folder, train__steps=1, evaluate__samples=0), "run.name=done"])
    for name, content in {**FILES, **WORKS}.items():
        path = folder / name.replace("HOST", host_name())
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "link.jsonl").symlink_to("/nowhere")
    shutil.copytree(folder / "runs/done", folder / "runs/twice")
    (folder / "runs/twice/checkpoints/step-00000001").rename(folder / "runs/twice/checkpoints/step-00000002")
    (folder / "link.checkpoint").symlink_to(folder / "runs/done/checkpoints/step-00000001")
    shutil.copytree(folder / "runs/done", folder / "run.half")
    (folder / "run.half/adapters.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def taken_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def words_of(program: str, words: str, folder: Path, port: int = 0) -> list[str]:
    """The command's words; a training gets a tiny model and data, which the words overrule."""
    given = [word.format(d=folder, port=port, q=ROOT / "configs/quickstart/model") for word in words.split()]
    if program != "train.py" or any(word in ("--config", "--resume") for word in given):
        return given
    defaults = [*tiny.settings(folder, train__steps=1, evaluate__samples=0), "--config", str(folder / "test.yaml")]
    return [*defaults, *given]


def said(main: Callable[[list[str]], int], words: list[str]) -> tuple[int, str, str]:
    """Exit status, standard output and error of a program in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return status, out.getvalue(), err.getvalue()


def check(status: int, errors: str, told: str, wanted: int = 2) -> None:
    assert status == wanted, (status, errors)
    assert errors.count("\n") == 1 and errors.startswith("error: ") and "Traceback" not in errors, errors
    assert re.search(told, errors), errors
    assert len(re.sub(r"/\S*/", "", errors)) < 700, "nobody reads so much; folders have other lengths elsewhere"


@pytest.mark.parametrize(("program", "words", "told"), MISTAKES, ids=lambda part: str(part)[:50])
def test_a_mistake_is_one_line(program: str, words: str, told: str, folder, taken_port: int) -> None:
    check(*said(MAINS[program], words_of(program, words, folder, taken_port))[::2], told)


@pytest.mark.parametrize("name", WORKS)
def test_files_as_other_systems_write_them_work(name: str, folder, tmp_path) -> None:
    words = [*words_of("train.py", "", folder), f"data.train={folder / name}", f"run.dir={tmp_path}"]
    assert said(train.main, words)[::2] == (0, "")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_command_is_one_line(monkeypatch, folder) -> None:
    monkeypatch.setattr("lib.config.load.load", interrupted)
    status, _, errors = said(MAINS["lib.data"], ["--inspect", str(folder / "train.jsonl")])
    assert (status, errors) == (130, "stopped: interrupted\n")


def test_a_run_that_was_interrupted_before_it_had_a_folder(monkeypatch, folder) -> None:
    """--resume would find no run."""
    monkeypatch.setattr("lib.training.checkpoint.open_run", interrupted)
    status, _, errors = said(train.main, [*words_of("train.py", "", folder), "run.name=new"])
    assert (status, errors) == (1, "stopped: interrupted; give the same command again\n")
    monkeypatch.undo()
    monkeypatch.setattr("lib.training.run.TrainingRun.record_start", interrupted)
    status, _, errors = said(train.main, [*words_of("train.py", "", folder), "run.name=new"])
    assert (status, errors.split(" with ")[0]) == (1, "stopped: interrupted; go on")
    monkeypatch.undo()
    assert said(train.main, ["--resume", str(folder / "runs/new")])[0] == 0


NAN, PYTORCH = mx.full(64, float("nan")), "for PyTorch .*; take its base, or one that `mlx_lm.convert -q` made"


@pytest.mark.parametrize(
    ("change", "config", "told"),
    [
        ({"model.norm.weight": None}, {}, "cannot load it: Missing 1 parameters: model.norm.weight"),
        ({"model.norm.weight": NAN}, {}, "loss before the first step is nan: its weights, or .* are not finite"),
        *(({"model.norm.scales": mx.zeros(2)}, {"quantization_config": {"quant_method": name}}, f"by {name}, {PYTORCH}")
          for name in ("bitsandbytes", "gptq", "hqq")),
    ],
    ids=["a tensor is missing", "NaN", "bitsandbytes", "gptq", "hqq"],
)  # fmt: skip
def test_a_model_whose_weights_are_wrong(
    change: dict[str, Any], config: dict[str, Any], told: str, folder, tmp_path
) -> None:
    model = tiny.stored_model(tmp_path, **config)
    weights = {**mx.load(str(model / "model.safetensors")), **change}
    weights = {name: array for name, array in weights.items() if array is not None}
    mx.save_safetensors(str(model / "model.safetensors"), weights, {"format": "mlx"})
    words = [*words_of("train.py", "", folder), f"model.path={model}", "model.random_init=false", f"run.dir={tmp_path}"]
    check(*said(train.main, words)[::2], f"model.path .*: .*{told}")


def test_a_host_that_is_not_there() -> None:
    words = ["--hosts", "localhost,no-such-host.invalid", "--no-preflight", "--", "train.py"]
    done = subprocess.run([sys.executable, "launch", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    check(done.returncode, done.stderr, "no-such-host.invalid does not resolve")
