"""What lm-evaluation-harness is told: its requests, imitated by the one field that is looked at, against plain forward passes.

The package itself is not installed for tests: it takes 0.7 GB.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lib.config.settings import Config
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate import command as evaluate
from lib.evaluate import harness
from lib.evaluate.harness import HarnessModel, longest_input, rolling_windows
from lib.evaluate.score_file import StoredModel
from tests import chat_models, rounding, tiny
from tests.tiny import ROOT

MODEL = ROOT / "configs/quickstart/model"
STORED = {"model": {"path": str(MODEL)}, "data": {"train": "-"}, "evaluate": {"batch_size": 2}, "train": {"seed": 3}}
SETTINGS = Config.model_validate(STORED)
PAIRS = [
    ("Add 928 and 428.", " 8+8=16, 2+2+1=5, 9+4=13, 928 + 428 = 1356"),
    ("Add 928 and 428.", " 8+8=16, 2+2=4"),
    ("What is 1 + 1?", " 2"),
    ("Add 928 and 428.", " no"),
    ("What is 770 + 452? ", "0+2=2"),  # the space belongs to what follows
    ("", "What is 3 + 4?"),
    ("What is 1 + 1?", " 2"),  # asked twice
    ("   ", "Add"),
]


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    """As lm_eval.api.instance.Instance has them."""
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return StoredModel(SETTINGS, None).load(World()).model


def adapter_of(model: nn.Module, folder: Path, world: World | None = None) -> HarnessModel:
    return HarnessModel(model, StoredModel(SETTINGS, None), world or World(), folder / "kept", "digest")


@pytest.fixture
def adapter(model: nn.Module, tmp_path: Path) -> HarnessModel:
    return adapter_of(model, tmp_path)


def plain_logps(model: nn.Module, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """By one forward pass over the whole row."""
    ids = [*context, *continuation]
    logits = model(mx.array([ids[:-1]]))[0, len(context) - 1 :].astype(mx.float32)
    logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    targets = mx.array(continuation)
    chosen = mx.take_along_axis(logps, targets[:, None], axis=-1)
    return float(chosen.sum()), bool((mx.argmax(logits, axis=-1) == targets).all())


def limit_of(model: nn.Module, logps: list[float]) -> float:
    """How far apart two computations of these may be: products of weights, and sums of exponentials over the vocabulary."""
    return rounding.roundoff(rounding.longest_sum(model)) * max(1.0, max(map(abs, logps))) * len(model.layers)


def test_continuations_are_scored_as_by_plain_forward_passes(model: nn.Module, adapter: HarnessModel) -> None:
    scored = adapter.loglikelihood(requests(*PAIRS))
    expected = [plain_logps(model, *adapter.encode_pair(*pair)) for pair in PAIRS]
    logps = [logp for logp, _ in expected]
    np.testing.assert_allclose([logp for logp, _ in scored], logps, atol=limit_of(model, logps))
    assert [is_greedy for _, is_greedy in scored] == [is_greedy for _, is_greedy in expected]
    assert scored[2] == scored[6]


def test_a_pair_is_cut_where_its_text_is(adapter: HarnessModel) -> None:
    for context, continuation in PAIRS:
        first, second = adapter.encode_pair(context, continuation)
        whole = adapter.encode(context + continuation, opens=None if context else False)
        assert [*first, *second] in (whole, [adapter.start_id, *whole]) and second
    assert adapter.encode_pair("a ", "b") == adapter.encode_pair("a", " b")


def test_texts_are_scored_in_windows_that_predict_every_token_once(model: nn.Module, adapter: HarnessModel) -> None:
    text = " ".join(f"Add {i} and {i * 7}." for i in range(60))
    ids = adapter.encode(text)
    assert len(ids) > 2 * adapter.longest == 2 * 256
    (scored,) = adapter.loglikelihood_rolling(requests((text,)))
    logps = [plain_logps(model, *window)[0] for window in rolling_windows(ids, adapter.start_id, adapter.longest)]
    assert scored == pytest.approx(sum(logps), abs=limit_of(model, logps) * len(logps))


def greedy(model: nn.Module, adapter: HarnessModel, prompt: str, count: int) -> str:
    """By one forward pass a token."""
    ids = adapter.encode(prompt)
    begin = len(ids)
    while len(ids) < begin + count:
        token = int(mx.argmax(model(mx.array([ids]))[0, -1]))
        if token == adapter.inner.eos_token_id:
            break
        ids.append(token)
    return str(adapter.inner.decode(ids[begin:], skip_special_tokens=True))


def test_answers_are_greedy_and_end_before_the_first_stop_text(model: nn.Module, adapter: HarnessModel) -> None:
    prompts = ["What is 297 + 670? ", "Add 797 and 370. ", "Add 9 and 9. "]
    whole = [greedy(model, adapter, prompt, 24) for prompt in prompts]
    options: list[dict[str, Any]] = [{"until": ["\n\n"]}, {"until": whole[1][4:6]}, {"until": ["", "~"]}]
    asked = [(prompt, {**each, "max_gen_toks": 24}) for prompt, each in zip(prompts, options, strict=True)]
    written = adapter.generate_until(requests(*asked))
    assert written == [whole[0], whole[1][: whole[1].index(whole[1][4:6])], whole[2]]
    (short,) = adapter.generate_until(requests((prompts[0], {"until": [], "max_new_tokens": 3, "do_sample": False})))
    assert short == greedy(model, adapter, prompts[0], 3)


def test_without_a_chat_answers_end_where_the_harness_says(tmp_path) -> None:
    """The template's end of a turn is no end of a task's plain text."""
    tokenizer = chat_models.tokenizer_of("Qwen-Qwen2.5-7B-Instruct")
    tokenizer.eos_token = "<|endoftext|>"
    folder = tiny.model_folder(tmp_path / "model", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    settings = Config.model_validate({"model": {"path": str(folder), "random_init": True}, "data": {"train": "-"}})
    subject, end = StoredModel(settings, None), tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain = HarnessModel(subject.load(World()).model, subject, World(), tmp_path / "kept", "digest")
    assert end not in plain.tokenizer.eos_token_ids
    plain.encoder.stop_generation()  # as with --chat
    assert end in plain.tokenizer.eos_token_ids


def test_a_task_that_wants_more_than_the_model_sees_is_refused(adapter: HarnessModel) -> None:
    with pytest.raises(UserError, match="a task wants 256 tokens of a model that sees 256; set max_gen_toks"):
        adapter.generate_until(requests(("a", {"until": []})))
    assert longest_input(SETTINGS.model) == 256


def test_what_is_finished_is_not_asked_again(model: nn.Module, tmp_path, monkeypatch) -> None:
    first = adapter_of(model, tmp_path).loglikelihood(requests(*PAIRS))
    monkeypatch.setattr(HarnessModel, "score", None)
    assert adapter_of(model, tmp_path).loglikelihood(requests(*PAIRS)) == first


@pytest.mark.mpi(min_size=2, max_size=2)
def test_two_ranks_answer_as_one(world, model: nn.Module, tmp_path) -> None:
    alone = adapter_of(model, tmp_path / "alone").loglikelihood(requests(*PAIRS))
    adapter = adapter_of(model, Path(world.broadcast_text(str(tmp_path))) / "together", world)
    assert adapter.loglikelihood(requests(*PAIRS)) == alone
    assert adapter.generate_until(requests(("Add 1 and 2.", {"max_gen_toks": 4}))) is not None


def test_chats_are_rendered_as_in_training_and_refusals_are_reported(adapter: HarnessModel, tmp_path) -> None:
    asked, half = {"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "1+"}
    assert adapter.apply_chat_template([asked]) == "<|user|>Add 1 and 2.<|end|><|assistant|>"
    assert adapter.apply_chat_template([asked, half], add_generation_prompt=False).endswith("<|assistant|>1+")
    (tmp_path / "own.jinja").write_text("{{ raise_exception('one turn only') }}")
    own = SETTINGS.data.model_copy(update={"chat_template": str(tmp_path / "own.jinja")})
    adapter.settings = SETTINGS.model_copy(update={"data": own})
    with pytest.raises(UserError, match="--chat: the chat template refuses a task's conversation: one turn only"):
        adapter.apply_chat_template([asked])


def test_without_the_package_the_command_says_what_to_install(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(harness, "PACKAGE", "lm_eval_that_is_not_there")
    words = ["--model", str(MODEL), "--tasks", "x", "--out", str(tmp_path / "out.json")]
    assert evaluate.main(words) == 2
    said = capsys.readouterr().err
    assert "--tasks needs the package" in said and "-m pip install -c constraints.txt" in said
    assert len(said.splitlines()) == 1 and not list(tmp_path.iterdir())
