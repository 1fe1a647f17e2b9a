"""CUDA's kernels, compiled ahead: what the parts of a step have in common with the whole."""

import contextlib
import dataclasses
import io
import pickle
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import train
from lib.config import load
from lib.data.batch import collate
from lib.data.dataset import Example, load_dataset
from lib.distributed.world import World
from lib.model.stream_trial import cannot_share_prompts
from lib.training import cuda_kernels, losses
from lib.training.optimizers import make_optimizer
from lib.training.step import Step
from tests import tiny


def fused(*arrays: object) -> set[str]:
    """The kernels that MLX would compile for these arrays, by their operations."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, *(array for _, array in tree_flatten(list(arrays)) if isinstance(array, mx.array)))
    return set(re.findall(r'label ?="(Compiled[^"]*)"', drawn.getvalue()))


@pytest.mark.parametrize("words", [[], ["train.loss=sft"], ["model.dtype=bfloat16", "train.loss=ipo"]], ids=str)
def test_the_parts_of_a_step_have_every_kernel_of_the_whole(tmp_path, monkeypatch, words: list[str]) -> None:
    model_words = [f"model.path={tiny.model_folder(tmp_path)}", "data.train=-", "train.compile=true"]
    settings = load.load(None, [*model_words, *words])
    count = 1 if settings.train.loss == "sft" else 2
    tokens = [np.arange(20 + n, dtype=np.int32) for n in range(count + 1)]
    cuts = ((20, 30), (11, 21))
    rows = [Example(i, tokens[0][:a], tuple(each[:b] for each in tokens[1:])) for i, (a, b) in enumerate(cuts)]

    @contextlib.contextmanager
    def evaluated() -> Iterator[set[str]]:
        """The kernels of what is evaluated meanwhile: it is looked at instead, as it would be compiled here."""
        seen: set[str] = set()
        with monkeypatch.context() as patched:
            patched.setattr(mx, "eval", lambda *arrays: seen.update(fused(*arrays)))
            patched.setattr(mx, "async_eval", lambda *arrays: seen.update(fused(*arrays)))
            yield seen

    with evaluated() as of_parts:
        for part in cuda_kernels.PARTS:
            cuda_kernels.compile_part(part, settings.model, settings.train, settings.data, rows)

    monkeypatch.setattr(cuda_kernels, "BLOCKS", 4)  # their number does not count
    model = cuda_kernels.small_model(settings.model, 0)
    assert cannot_share_prompts(model) is None
    step = Step(model, make_optimizer(settings.train), settings.train, World())
    model.train()
    batch = collate(rows, 16, True)
    reference = np.full((len(batch.rows), count), -10.0, np.float32) if losses.needs_reference(settings.train) else None
    with evaluated() as whole:  # as a step does it
        gradients, sums = step.gradients(batch, reference, None)
        whole |= fused(sums, gradients)
        of_gradients = set(whole)
        mean, squares = step.update.mean(gradients, sums[1:2].squeeze())
        step.update.take(mean, mx.sqrt(step.world.sum_of_all(squares)), 0.001)
    assert of_gradients and of_gradients < whole <= of_parts


@pytest.fixture
def on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that would compile kernels: the folder where MLX would keep them. A part says that it ran."""
    folder = tmp_path / "of mlx" / "kernels"
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(folder))
    monkeypatch.setattr(cuda_kernels, "device", lambda: "cuda")
    monkeypatch.setattr(cuda_kernels, "is_compiled", lambda *_: True)
    return folder


def compiled_once(
    tmp_path: Path, words: Sequence[str] = (), rank: int = 0, hosts: Sequence[str] = ("one",), rows: int | None = 4
) -> list[str]:
    """What a rank is told while it loads its model."""
    model, data = tiny.model_folder(tmp_path / "model"), tmp_path / "train.jsonl"
    tiny.write_jsonl(data, tiny.pairs(rows or 4))
    settings, told = load.load(None, [f"model.path={model}", f"data.train={data}", *words]), list[str]()
    known = None if rows is None else load_dataset(str(data), settings.data, "preference", None)  # else they stream
    world = dataclasses.replace(World(), rank=rank, size=len(hosts))
    with cuda_kernels.compiled(settings.model, settings.train, settings.data, known, world, hosts, told.append):
        pass
    return told


def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """What the processes of the parts do instead."""
    monkeypatch.setattr(sys, "executable", str(tiny.script(tmp_path / "python", does)))


def test_kernels_are_compiled_once_for_a_kind_of_model_and_loss(on_cuda: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cuda_kernels, "PARTS", {"update": cuda_kernels.update})
    python(tmp_path, monkeypatch, 'sleep 0.3; cd "$MLX_PTX_CACHE_DIR"; cat > $3.ptx; pwd > $3.txt; touch $3.cu')
    (told,) = compiled_once(tmp_path)
    assert "compiling CUDA kernels" in told
    _, train, _, rows = pickle.loads((on_cuda / "update.ptx").read_bytes())
    assert train.loss == "sigmoid" and len(rows) == 2
    assert (on_cuda / "update.txt").read_text().strip() != str(on_cuda), "where it cannot be found by halves"
    assert len(list(on_cuda.iterdir())) == 3  # and what says that it is done
    assert compiled_once(tmp_path) == [] and len(compiled_once(tmp_path, ["train.loss=ipo"], rows=1)) == 1


def test_the_first_rank_of_each_host_compiles_where_rows_are_known(on_cuda: Path, tmp_path, monkeypatch) -> None:
    python(tmp_path, monkeypatch, "exit 0")
    assert compiled_once(tmp_path, rows=None) == compiled_once(tmp_path, rank=1, hosts="aa") == []
    assert compiled_once(tmp_path, rank=2, hosts="abb") == [] and not on_cuda.exists()
    assert len(compiled_once(tmp_path, rank=1, hosts="ab")) == 1
    with monkeypatch.context() as patched:
        patched.setattr(cuda_kernels, "device", lambda: "metal")
        assert compiled_once(tmp_path, ["train.loss=ipo"]) == []
    monkeypatch.setattr(cuda_kernels, "is_compiled", lambda *_: False)
    assert compiled_once(tmp_path, ["train.loss=ipo"]) == []


def test_kernels_are_compiled_anew_for_what_their_code_depends_on(tmp_path, monkeypatch) -> None:
    def digest(*words: str, **stored: object) -> str:
        model = tiny.model_folder(tmp_path, **stored)
        settings = load.load(None, [f"model.path={model}", "data.train=-", *words])
        return cuda_kernels._digest(settings.model, settings.train)

    same = digest()
    assert {same} == {
        digest("train.learning_rate=1e-3", "train.global_batch_size=64", "train.seed=3", "run.name=x"),
        digest("train.steps=7", "train.schedule=linear", "train.warmup_steps=3", "train.max_traces=4"),
        digest(hidden_size=64, num_hidden_layers=7, vocab_size=100),
    }
    others = [digest(model_type="qwen2"), digest(quantization={"bits": 4, "group_size": 32})]
    others += [digest(f"model.{word}") for word in ("dtype=float16", "method=full", "gradient_checkpointing=true")]
    others += [digest(f"train.{word}") for word in ("loss=ipo", "optimizer=lion", "weight_decay=0.5", "beta=0.3")]
    others.append(digest("train.label_smoothing=0.1"))
    grpo = ["train.loss=grpo", "rollouts.rounds=1", "rollouts.judge=length"]
    others += [digest(*grpo, *more) for more in ([], ["train.loss_type=dapo"], ["train.ratio=completion"])]
    others += [digest("model.scale=7"), digest("model.dropout=0.1")]
    others += [digest("train.max_grad_norm=null"), digest("train.optimizer_options={betas: [0.8, 0.9]}")]
    monkeypatch.setattr(mx, "__version__", "0")
    assert len({same, *others, digest()}) == 2 + len(others)


def test_the_small_model_is_of_the_kind_of_the_whole_one(tmp_path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 9, "vocab_size": 5000}
    stored = shape | {"quantization": {"bits": 4, "group_size": 32}, "torch_dtype": "float16"}
    folder = tiny.model_folder(tmp_path, **stored)
    for words, dtype in (([], mx.float16), (["model.dtype=bfloat16"], mx.bfloat16)):
        model = cuda_kernels.small_model(load.load(None, [f"model.path={folder}", "data.train=-", *words]).model, 0)
        linear, rows = model.layers[1].self_attn.q_proj.linear, len(model.model.embed_tokens.weight)
        assert (linear.bits, linear.group_size, linear.scales.dtype) == (4, 32, dtype)
        assert (len(model.layers), rows) == (cuda_kernels.BLOCKS, cuda_kernels.VOCABULARY)
    few = cuda_kernels._with_few_blocks({"text_config": {"num_hidden_layers": 24, "full_attention_interval": 4}})
    assert few["text_config"]["num_hidden_layers"] == 4, "of Qwen3.5 the fourth block attends"


def test_the_first_step_waits_for_the_kernels(tmp_path, monkeypatch) -> None:
    events, take = list[str](), Step.__call__

    @contextlib.contextmanager
    def compiled(*_: object) -> Iterator[None]:
        events.append("begin")
        yield
        events.append("end")

    monkeypatch.setattr(cuda_kernels, "compiled", compiled)
    monkeypatch.setattr(Step, "__call__", lambda *words: events.append("step") or take(*words))
    words = [*tiny.settings(tmp_path, train__steps=1), "--config", str(tiny.config_file(tmp_path))]
    assert train.main(words) == 0
    assert events == ["begin", "end", "step"]
