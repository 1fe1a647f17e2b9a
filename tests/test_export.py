"""Exports: each form holds the run's model, chat template and end of turn; what cannot be written is refused in a line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub.errors import HfHubHTTPError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.lora import LoRALinear

from lib.errors import UserError
from lib.export import card, command, fuse, gguf, ollama, peft, trained_run
from lib.export.gguf import tokenizer_of
from lib.export.trained_run import ChatForm, TrainedRun, open_run
from lib.model import adapters, peft_adapters
from lib.model import load as models
from tests import chat_models, exported, tiny

PEFT = Path(__file__).parent / "peft"
DORA = {"model.method": "dora"}
MIXTRAL = {"model.keys": "[self_attn.q_proj,block_sparse_moe.switch_mlp.up_proj]"}
PATTERNS = {"model.rank": 4, "model.rank_pattern": '{"o_proj": 2, "layers.1.*": 3}', "model.blocks": "[0-1]"}
PATTERNS |= {"model.alpha": 6, "model.alpha_pattern": "{down_proj: 5}", "model.adapt_embeddings": "true"}
# Family, the base's options, the run's settings.
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, last block": ("llama", {}, {"model.blocks": 1, "model.scale": 0.7}),
    "llama, patterns": ("llama", {}, PATTERNS),
    "llama, 4-bit dora": ("llama-biased", {"bits": 4}, DORA),
    "qwen2, tied dora": ("qwen2-tied", {}, DORA),
    "qwen3, tied embeddings": ("qwen3-tied", {}, {"model.adapt_embeddings": "true"}),
    "gemma3, 4-bit": ("gemma3_text", {"bits": 4}, {}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "mixtral, as converted": ("mixtral", {"as_converted": True}, MIXTRAL),
}


def opened(folder: Path, name: str = "llama, last block", **changes: Any) -> TrainedRun:
    family, base, settings = RUNS[name]
    run = exported.run_of(folder / "run", exported.base_model(folder / "base", family, **base), **settings, **changes)
    return open_run(run, "final", [], 6, lambda text: None)


@pytest.fixture
def run(tmp_path: Path) -> TrainedRun:
    return opened(tmp_path)


def export(run: TrainedRun, *words: str) -> tuple[int, Path]:
    return command.main([str(run.folder), *words]), run.folder / "export"


def refused(run: Path, words: str, why: str, capsys: pytest.CaptureFixture[str], status: int = 2) -> None:
    """The command ends with one line that says why."""
    assert command.main([str(run), *words.split()]) == status
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1, error


def proof_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / command.FACTS).read_text())["proof"]
    return found


@pytest.mark.parametrize("name", RUNS)
def test_every_form_has_the_runs_log_probabilities(name: str, tmp_path) -> None:
    run = opened(tmp_path, name)
    for form in ("mlx", "fused", "peft"):
        status, folder = export(run, "--to", form)
        assert status == 0, form
        found = proof_of(folder / form)
        assert found["difference"] <= 1e-4 < found["trained_difference"] or (form == "fused" and run.is_quantised)
    if run.is_quantised:
        status, folder = export(run, "--to", "fused", "--dequantize", "--out", str(tmp_path / "plain"))
        assert status == 0 and proof_of(tmp_path / "plain")["difference"] <= trained_run.LIMIT
        assert "quantization" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize("name", ["llama, patterns", "qwen3_moe", "qwen2, tied dora", "qwen3, tied embeddings"])
def test_an_exported_peft_adapter_starts_a_run_with_the_same_model(name: str, tmp_path) -> None:
    run = opened(tmp_path, name)
    folder = export(run, "--to", "peft")[1] / "peft"
    settings = run.settings.model.model_copy(update={"adapter": str(folder)})
    model = models.load(settings, 0)
    adapters.make_trainable(model, settings, 0)
    found = trained_run.model_logps(model, run.rows)
    assert trained_run.largest_difference(found, trained_run.model_logps(run.model(), run.rows)) <= trained_run.LIMIT


def test_what_four_bits_cannot_hold_is_not_written_in_four_bits(tmp_path, capsys) -> None:
    """A small adapter over MXFP4 experts: rounding undoes it."""
    keys = "[self_attn.q_proj,mlp.experts.up_proj,mlp.experts.down_proj]"
    base = exported.base_model(tmp_path / "base", "gpt_oss", bits=4, mode="mxfp4")
    folder = exported.run_of(tmp_path / "run", base, **{"model.keys": keys, "model.scale": 0.002})
    assert command.main([str(folder), "--to", "fused"]) == 1
    assert "what was learned would be lost; take --dequantize" in capsys.readouterr().err
    assert command.main([str(folder), "--to", "fused", "--dequantize", "--type", "f32"]) == 0
    refused(folder, "--to peft", "how PEFT names the experts of this family is not known", capsys)


def test_a_full_run_is_its_model(tmp_path, capsys) -> None:
    base = exported.base_model(tmp_path / "base", "qwen3", dtype="bfloat16")
    run = exported.run_of(tmp_path / "run", base, **{"model.method": "full"})
    assert command.main([str(run), "--to", "fused"]) == 0
    assert command.main([str(run), "--to", "gguf"]) == 0
    capsys.readouterr()
    refused(run, "--to peft", "method=full", capsys)


# ---- PEFT's own files, recorded with peft 0.21


LORA = {"model.rank": 2, "model.scale": 1.5, "model.keys": "[self_attn.q_proj,self_attn.v_proj,self_attn.o_proj]"}
WANTED = {
    "llama-lora": LORA,
    "llama-dora": LORA | DORA,
    "llama-rslora": {"model.rank": 3, "model.scale": 3**0.5, "model.keys": "[self_attn.q_proj,mlp.down_proj]"},
    "llama-patterns": {
        "model.rank": 2,
        "model.alpha": 4,
        "model.keys": "[self_attn.q_proj,self_attn.v_proj,mlp.down_proj]",
        "model.rank_pattern": "{down_proj: 1, layers.1.self_attn.q_proj: 3}",
        "model.alpha_pattern": "{down_proj: 6}",
    },
}


def sequences() -> list[np.ndarray]:
    return [np.array([*pair["prompt_ids"], *pair["chosen_ids"]], np.int32) for pair in tiny.pairs(6, seed=4)]


@pytest.mark.parametrize("name", WANTED)
def test_adapters_that_peft_trained_have_its_log_probabilities(name: str, tmp_path) -> None:
    base = exported.base_model(tmp_path / "base", "llama")
    settings = exported.settings_of(tmp_path, base, **WANTED[name], **{"model.adapter": PEFT / name}).model
    model = models.load(settings, 0)
    adapters.make_trainable(model, settings, 0)
    expected = [np.array(row, np.float32) for row in json.loads((PEFT / name / "logps.json").read_text())]
    assert trained_run.largest_difference(trained_run.model_logps(model, sequences()), expected) <= trained_run.LIMIT
    with pytest.raises(UserError, match="was made with other settings; add model") as error:
        other = settings.model_copy(update={"keys": None, "rank": 8, "method": "lora"})
        adapters.make_trainable(models.load(other, 0), other, 0)
    assert all(word.partition("=")[0] in str(error.value) for word in ("model.keys", "model.rank"))


@pytest.mark.parametrize("name", WANTED)
def test_pefts_arrays_come_out_again_with_the_same_bytes(name: str) -> None:
    theirs = dict(mx.load(str(PEFT / name / "adapter_model.safetensors")))
    again = peft_adapters.peft_arrays(peft_adapters.our_arrays(theirs, "here"))
    assert again.keys() == theirs.keys()
    assert all(np.array(again[name]).tobytes() == np.array(theirs[name]).tobytes() for name in theirs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] .*; merge it with peft's merge_and_unload"),
        ({"lora_bias": None, "bias": "all"}, "bias=all"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"r": 4}, "has rank 2, but adapter_config.json says 4"),
    ],
)
def test_what_of_peft_has_no_counterpart_is_named(change: dict[str, Any], words: str, tmp_path) -> None:
    shutil.copytree(PEFT / "llama-lora", tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(UserError, match=words):
        peft_adapters.read(tmp_path / "adapter", "model.adapter")


@pytest.mark.parametrize(
    "spelling",
    [
        (".weight", ".default.weight"),
        (".weight", ".a-b.weight"),
        (".weight", ""),
        (".lora_A.", ".lora_down."),
        ("base_model.model.model.", "base_model.model.llm.model."),
        ("model.layers.", "model.model.layers."),
        ("model.layers.", "model.language_model.layers."),
        ("base_model.", "module._orig_mod.base_model."),
        (".self_attn.", "._checkpoint_wrapped_module.self_attn."),
    ],
)
def test_pefts_other_spellings_are_matched(spelling: tuple[str, str], tmp_path) -> None:
    shutil.copytree(PEFT / "llama-lora", tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    arrays = {name.replace(*spelling): array for name, array in mx.load(str(weights)).items()}
    mx.save_safetensors(str(weights), arrays)
    model = models.load(models.ModelSettings(path=str(exported.base_model(tmp_path / "base", "llama"))), 0)
    plain, other = (peft_adapters.read(path, "model.adapter") for path in (PEFT / "llama-lora", tmp_path / "adapter"))
    assert peft_adapters.with_names_of(model, other).arrays.keys() == plain.arrays.keys()
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(UserError, match="cannot be read"):
        peft_adapters.read(tmp_path / "adapter", "model.adapter")
    weights.rename(weights.with_name("adapter_model.bin"))
    with pytest.raises(UserError, match="pickle, .* where torch is: python3 -c "):
        peft_adapters.read(tmp_path / "adapter", "model.adapter")


# ---- Chat template and end of turn

MINE = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
MINE += "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"


@pytest.fixture
def with_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a run of a model with a tokenizer and its chat template, or another one."""

    def made(name: str, template: str | None = None, **changes: Any) -> Path:
        tokenizer = chat_models.tokenizer_of(name, template)
        shape = exported.SHAPE | {"vocab_size": 1500, "eos_token_id": tokenizer.eos_token_id}
        monkeypatch.setattr(exported, "SHAPE", shape)
        base = exported.base_model(tmp_path / "base", "llama")
        tokenizer.save_pretrained(base)
        return exported.run_of(tmp_path / "run", base, **changes)

    return made


def test_every_form_carries_the_template_and_the_end_of_turn_that_were_trained(
    with_tokenizer: Callable[..., Path], tmp_path
) -> None:
    """ChatML on a base whose own end is another token, by data.chat_template=FILE."""
    from gguf import GGUFReader
    from mlx_lm.tokenizer_utils import load

    (tmp_path / "mine.jinja").write_text(MINE)
    run = with_tokenizer("Qwen-Qwen2.5-7B-Instruct", **{"data.chat_template": tmp_path / "mine.jinja"})
    base = tmp_path / "base"
    tokenizer = load(base)
    fuse.change_json(base / "config.json", {"eos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>")})
    fuse.change_json(base / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for form in ("mlx", "fused", "peft", "gguf", "ollama"):
        assert command.main([str(run), "--to", form]) == 0, form
    folder, cards = run / "export", {}
    for form in ("mlx", "fused", "peft"):
        assert (folder / form / "chat_template.jinja").read_text() == MINE
        cards[form] = (folder / form / "README.md").read_text()
        assert "chat template is that of training" in cards[form]
    assert "    mlx-lm has it as it was trained by: python -m lib.export RUN --to fused" in cards["mlx"]
    assert "    mlx_lm.generate --model FOLDER --prompt ..." in cards["fused"]
    files = [folder / f"fused/{name}_config.json" for name in ("generation", "tokenizer")]
    generation, stored = (json.loads(file.read_text()) for file in files)
    assert end in generation["eos_token_id"] and stored["eos_token"] == "<|im_end|>"
    messages = [{"role": "user", "content": "Hi"}]
    text = load(folder / "fused").apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user: Hi<|im_end|><|im_start|>assistant: "
    reader = GGUFReader(folder / "gguf" / "model.gguf")
    assert reader.get_field("tokenizer.chat_template").contents() == MINE
    fields = [reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    assert end in [field.contents() for field in fields if field is not None]
    assert 'PARAMETER stop """<|im_end|>"""' in (folder / "ollama" / "Modelfile").read_text()


def test_the_end_of_turn_is_the_files_where_the_model_names_several_ends(
    with_tokenizer: Callable[..., Path], tmp_path
) -> None:
    """Phi's generation_config.json has <|assistant|> before <|end|>; llama.cpp ends answers at eos and eot alone."""
    from gguf import GGUFReader

    name = "microsoft-Phi-3.5-mini-instruct"
    run, ids = with_tokenizer(name), chat_models.tokenizer_of(name).convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    fuse.change_json(tmp_path / "base" / "generation_config.json", {"eos_token_id": ids})
    assert command.main([str(run), "--to", "gguf"]) == 0
    eot = GGUFReader(run / "export/gguf/model.gguf").get_field("tokenizer.ggml.eot_token_id")
    assert eot is not None and eot.contents() == ids[1]


def test_an_exported_template_renders_without_arguments_as_the_run_did(
    with_tokenizer: Callable[..., Path], tmp_path
) -> None:
    """Without thinking, as training put it, though the template's own default is another; with an argument as asked."""
    from transformers import AutoTokenizer

    run = with_tokenizer("Qwen-Qwen3-0.6B")
    assert command.main([str(run), "--to", "fused"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(run / "export/fused")
    asked: dict[str, Any] = {"conversation": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True}
    texts = [tokenizer.apply_chat_template(**asked, tokenize=False, **own) for own in ({}, {"enable_thinking": True})]
    assert [text.partition("assistant\n")[2] for text in texts] == ["<think>\n\n</think>\n\n", ""]


# ---- GGUF and Ollama

MAPPED = [name for name, shape in exported.FAMILIES.items() if shape["model_type"] in gguf.FAMILIES]


@pytest.mark.parametrize("family", MAPPED)
def test_a_run_of_every_family_is_proven_to_be_in_its_file(family: str, tmp_path) -> None:
    run = exported.run_of(tmp_path / "run", exported.base_model(tmp_path / "base", family))
    assert command.main([str(run), "--to", "gguf", "--out", str(tmp_path / "out")]) == 0
    found = proof_of(tmp_path / "out")
    assert found["difference"] <= 1e-4 < 0.1 < found["trained_difference"], found


def test_types_round_the_weights_and_nothing_else(tmp_path, capsys) -> None:
    from gguf import GGUFReader

    run = exported.run_of(tmp_path / "run", exported.base_model(tmp_path / "base", "llama", bits=4))
    moved = {}
    for kind in ("f32", "bf16", "f16", "q8_0"):
        assert command.main([str(run), "--to", "gguf", "--type", kind, "--out", str(tmp_path / kind)]) == 0
        moved[kind] = proof_of(tmp_path / kind)["difference"]
        tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / kind / "model.gguf").tensors}
        assert tensors["blk.0.attn_q.weight"].tensor_type.name == kind.upper()
        assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert moved["f32"] < 1e-4 < moved["f16"] < moved["bf16"], moved
    capsys.readouterr()
    refused(run, f"--to gguf --dequantize --out {tmp_path}/x", "--type q8_0", capsys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2", **exported.FAMILIES["gemma2"], "query_pre_attn_scalar": 20}, "query_pre_attn_scalar is 20"),
        ({"model_type": "llama", "layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 4}, "attend to a window"),
        ({**exported.FAMILIES["qwen3_moe"], "norm_topk_prob": False}, "norm_topk_prob is not true"),
        ({**exported.FAMILIES["qwen3_moe"], "mlp_only_layers": [1]}, "have no experts"),
        ({"model_type": "olmo2", "tie_word_embeddings": True}, "its head is its embedding"),
        (exported.FAMILIES["gpt_oss"], "of the family gpt_oss; there are gemma, gemma2"),
    ],
)  # fmt: skip
def test_what_gguf_cannot_say_is_refused_before_a_weight_is_written(
    changes: dict[str, Any], words: str, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(exported.FAMILIES, "changed", changes)
    base = exported.base_model(tmp_path / "base", "changed")
    run = exported.run_of(tmp_path / "run", base, **{"model.keys": "[self_attn.q_proj]"})
    refused(run, "--to gguf", words, capsys)
    assert not (run / "export").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda stored: stored["model"].update(type="Unigram", vocab=[["a", 0.0]], unk_id=0), "is a Unigram"),
        (lambda stored: stored.update(normalizer={"type": "Lowercase"}), "by Lowercase"),
        (lambda stored: stored["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="[a-z]+"), "by [a-z]+"),
        (lambda stored: stored.update(pre_tokenizer={"type": "Whitespace"}), "by Whitespace"),
        (lambda stored: stored["model"].update(ignore_merges=True), "whole words that are tokens"),
    ],
)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_named(change: Any, words: str) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    stored = json.loads(chat_models.tokenizer_of("Qwen-Qwen3-0.6B").backend_tokenizer.to_str())
    change(stored)
    if stored["model"]["type"] == "Unigram":
        stored["model"] = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}
        stored["added_tokens"] = []
    changed = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(stored)))
    with pytest.raises(UserError, match=re.escape(words)):
        tokenizer_of(ChatForm(TokenizerWrapper(changed), None, {}, [0]), "here")


ROLES = {"S": "system", "U": "user", "A": "assistant"}
NO_SHAPE = ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use",)  # takes no conversation without tools


@pytest.mark.parametrize("name", sorted(chat_models.registry().keys() - set(NO_SHAPE)))
def test_the_shape_of_a_chat_template_renders_as_the_models_own(name: str) -> None:
    tokenizer = chat_models.tokenizer_of(name)
    form = ChatForm(tokenizer, tokenizer.chat_template, {"enable_thinking": False}, [])
    shape = ollama.shape_of(form.render)
    for roles in ("U", "UAU", "UAUAUAU", *(["SU", "SUAUAU"] if shape.system_goes else [])):
        messages = [{"role": ROLES[role], "content": f"{role}{{{{ {i} }}}}{{"} for i, role in enumerate(roles)]
        assert shape.text(messages) == form.render(messages), roles


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "change from turn to turn"),
        ("{{ messages[0].content }}", "leaves out messages"),
        ("{{ raise_exception('no') }}", "does not take a conversation"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\u200b{% endfor %}", "control character"),
        ('{% for m in messages %}<{{ m.role }}>{{ m.content }}"""{% endfor %}', "three quotation marks"),
    ],
)
def test_a_template_without_a_shape_is_refused(
    template: str, words: str, with_tokenizer: Callable[..., Path], capsys
) -> None:
    refused(with_tokenizer("Qwen-Qwen3-0.6B", template), "--to ollama", words, capsys)


# ---- The command


def test_an_export_is_whole_and_says_what_it_is(run: TrainedRun, capsys) -> None:
    (run.folder / "export" / ".fused.unfinished" / "torn-folder").mkdir(parents=True)  # of a process that was killed
    status, folder = export(run, "--to", "fused")
    assert status == 0
    facts = json.loads((folder / "fused" / command.FACTS).read_text())
    assert facts["form"] == "fused" and facts["checkpoint"] == "final" and facts["proof"]["difference"] <= 1e-4
    out = capsys.readouterr().out
    assert "proven: mlx_lm.load gives the log-probabilities of the run" in out
    assert json.loads(out.splitlines()[-1])["proof"] == facts["proof"]
    assert [path.name for path in folder.iterdir()] == ["fused"]
    assert not list((folder / "fused").glob("torn*"))
    refused(run.folder, "--to fused", "exists already; give another folder by --out", capsys)


def test_a_wrong_export_is_not_written(run: TrainedRun, capsys, monkeypatch) -> None:
    in_pairs = gguf.neighbouring_pairs
    with monkeypatch.context() as patches:
        patches.setattr(LoRALinear, "fuse", lambda layer: layer.linear)
        status, folder = export(run, "--to", "fused")
    assert status == 1 and list(folder.iterdir()) == [] and "Nothing was written" in capsys.readouterr().err
    monkeypatch.setattr(gguf, "neighbouring_pairs", lambda w, heads, back: in_pairs(w, heads, True) if back else w)
    assert export(run, "--to", "gguf")[0] == 1 and list(folder.iterdir()) == []
    assert "Nothing was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--to mlx --checkpoint 7", "--checkpoint 7"),
        ("--to mlx --type f16", "leave --type and --dequantize out"),
        ("--to fused --type q8_0", "--type q8_0 is for --to gguf"),
        ("--to fused --rows 0", "--rows 0"),
        ("--to onnx", "invalid choice: 'onnx'"),
        ("--to mlx model.path=/nowhere/at/all", "no such folder"),
        ("--to mlx --push ann/mo/del", "give OWNER/NAME"),
        ("--dry-run", "--to: give the form"),
    ],
)
def test_wrong_input_is_one_line(words: str, message: str, run: TrainedRun, capsys) -> None:
    refused(run.folder, words, message, capsys)
    assert not (run.folder / "export").exists()


def test_a_base_that_nobody_has_is_exported_whole_only(tmp_path, capsys) -> None:
    run = tiny.run(tmp_path, train__steps=3, checkpoint__every=1, evaluate__every=1)
    refused(run, "--to mlx", "take --to fused", capsys)
    digests = []
    for which in ("1", "last", "best", "final"):
        assert command.main([str(run), "--to", "fused", "--checkpoint", which, "--out", str(tmp_path / which)]) == 0
        digests.append((tmp_path / which / "model.safetensors").read_bytes())
    assert digests[0] != digests[1] and digests[1] == digests[3] and digests[2] in digests[:2]


# ---- Pure parts


def test_a_quantised_base_names_its_original(tmp_path) -> None:
    run = opened(tmp_path, "gemma3, 4-bit")
    assert peft.original_of(run) == str(run.base)
    (run.base / "README.md").write_text("---\nbase_model: google/gemma-3-1b-it\n---\n# Converted\n")
    assert peft.original_of(run) == "google/gemma-3-1b-it"


# ---- --push


def answered(status: int) -> HfHubHTTPError:
    """What huggingface_hub raises for an answer of the hub."""
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("No", response=response)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock(endpoint="https://hub.example")
    fake.create_repo.return_value = "https://hub.example/ann/model"
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: fake)
    return fake


@pytest.fixture
def written_before(tmp_path: Path) -> Path:
    """An export's folder."""
    folder = tmp_path / "export"
    (folder / "sub").mkdir(parents=True)
    (folder / command.FACTS).write_text("{}\n")
    (folder / "sub" / "a.safetensors").write_bytes(bytes(100_000))
    return folder


def test_an_export_is_pushed_whole_with_its_card(hub: MagicMock, run: TrainedRun, written_before: Path, capsys) -> None:
    assert command.main([str(written_before), "--push", "ann/model", "--dry-run"]) == 0
    assert "a.safetensors  100,000 bytes" in capsys.readouterr().out and not hub.method_calls
    status, folder = export(run, "--to", "mlx", "--push", "ann/model", "--private")
    assert status == 0 and hub.create_repo.call_args.kwargs["private"]
    assert hub.upload_folder.call_args.kwargs["folder_path"] == folder / "mlx"
    text = (folder / "mlx" / card.CARD).read_text()
    assert "library_name: mlx" in text and "valid.jsonl" in text and str(run.folder.parent) not in text


@pytest.mark.parametrize(
    ("call", "error", "status", "words"),
    [
        ("create_repo", answered(401), 2, "hf auth login"),
        ("create_repo", answered(403), 2, "write access"),
        ("create_repo", OSError("no route to host"), 1, "no route to host; what was sent stays there"),
        ("upload_folder", answered(507), 1, "the same command goes on"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    call: str, error: Exception, status: int, words: str, hub: MagicMock, written_before: Path, capsys
) -> None:
    getattr(hub, call).side_effect = error
    refused(written_before, "--push ann/model", words, capsys, status)
