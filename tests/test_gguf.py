"""--to gguf, --to ollama: files that llama.cpp and Ollama read as the run's model, and what they cannot say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map_with_path
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model

from lib.config.schema import DataSettings
from lib.data.chat_template import ChatTemplate
from lib.errors import UserError
from lib.export import chat_shape, command, gguf_families, gguf_file, gguf_reader, go_template, mlx_reader, ollama
from lib.export.gguf_read_tokens import GgufTokens
from lib.export.gguf_tokenizer import facts_of, name_with, write_tokenizer
from tests import chat_models, exported

# What these families have besides those of tests/exported.py: what is easily forgotten.
SHAPE = exported.SHAPE | {"head_dim": 8}
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "neighbours already": {"model_type": "llama", "rope_traditional": True},
    "yarn": {
        "model_type": "qwen2",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 32,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 1.5, 2.0, 3.0],
        },
    },
    "a part of each head": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "a window": exported.FAMILIES["gemma3_text"]
    | {
        "hidden_size": 96,  # whose root bfloat16 does not hold
        "sliding_window": 5,
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 1000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "a part of the blocks": {"model_type": "smollm3", "num_hidden_layers": 5},
    "multipliers": {
        "model_type": "granite",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "norms behind": {"model_type": "olmo2"},
    "a shared expert": {
        "model_type": "qwen2_moe",
        **{key: value for key, value in exported.EXPERTS.items() if key in ("num_experts", "num_experts_per_tok")},
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
    },
}


def run_of(folder: Path, family: str = "llama", **changes: Any) -> Path:
    return exported.run_of(folder / "run", exported.base_model(folder / "base", family), **changes)


def export(run: Path, *words: str) -> int:
    return command.main([str(run), *words])


def proof_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / command.FACTS).read_text())["proof"]
    return found


MAPPED = [name for name, shape in exported.FAMILIES.items() if shape["model_type"] in gguf_families.FAMILIES]


@pytest.mark.parametrize("family", MAPPED)
def test_a_run_of_every_family_is_proven_to_be_in_its_file(family: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, family)
    assert export(run, "--to", "gguf", "--out", str(tmp_path / "out")) == 0
    proof = proof_of(tmp_path / "out")
    assert proof["difference"] <= 1e-4 < 0.1 < proof["trained_difference"], proof


@pytest.mark.parametrize("method", ["dora", "full"])
def test_whatever_was_trained_is_in_the_file(method: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, "qwen2", **{"model.method": method})
    assert export(run, "--to", "gguf", "--out", str(tmp_path / "out")) == 0


def test_types_round_the_weights_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gguf import GGUFReader

    base = exported.base_model(tmp_path / "base", "llama", bits=4)
    run = exported.run_of(tmp_path / "run", base)
    moved = {}
    for kind in ("f32", "bf16", "f16", "q8_0"):
        assert export(run, "--to", "gguf", "--type", kind, "--out", str(tmp_path / kind)) == 0
        moved[kind] = proof_of(tmp_path / kind)["rounding_difference"]
        tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / kind / gguf_file.FILE).tensors}
        assert tensors["blk.0.attn_q.weight"].tensor_type.name == kind.upper()
        assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert moved["f32"] < 1e-4 < moved["f16"] < moved["bf16"], moved
    assert export(run, "--to", "gguf", "--dequantize", "--out", str(tmp_path / "x")) == 2
    assert "--type q8_0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ROPES)
def test_llama_cpp_computes_what_mlx_lm_does(name: str, tmp_path: Path) -> None:
    config = SHAPE | ROPES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = load_model(tmp_path, lazy=True, strict=False)
    random = np.random.RandomState(3)
    drawn = tree_map_with_path(
        lambda name, array: mx.array(exported.drawn(array.shape, name, random)), model.parameters()
    )
    model.update(drawn)
    rows = [random.randint(0, 48, length).astype(np.int32) for length in (40, 2)]
    stored = gguf_file.rounded_model(model.eval(), "f32", name)
    expected = [mlx_reader._row_logps(stored, ids) for ids in rows]
    model.update(drawn)
    gguf_file.write_gguf(tmp_path / "model.gguf", model, config, None, "f32", name)
    found = gguf_reader.logps(tmp_path / "model.gguf", rows)
    assert max(np.abs(a - b).max() for a, b in zip(expected, found, strict=True)) < 1e-4


def test_a_wrong_layout_is_seen_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    monkeypatch.setattr(gguf_families, "neighbouring_pairs", lambda weight, heads: weight)
    assert export(run, "--to", "gguf") == 1
    assert "Nothing was written" in capsys.readouterr().err
    assert not (run / "export").exists() or not any((run / "export").iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2", **exported.FAMILIES["gemma2"], "query_pre_attn_scalar": 20}, "query_pre_attn_scalar is 20"),
        ({"model_type": "llama", "layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 4}, "attend to a window"),
        ({**exported.FAMILIES["qwen3_moe"], "norm_topk_prob": False}, "norm_topk_prob is not true"),
        ({**exported.FAMILIES["qwen3_moe"], "mlp_only_layers": [1]}, "have no experts"),
        ({"model_type": "olmo2", "tie_word_embeddings": True}, "its head is its embedding"),
        (exported.FAMILIES["gpt_oss"], "of the family gpt_oss, which has no mapping to GGUF here; there are gemma, gemma2"),
    ],
)  # fmt: skip
def test_what_gguf_cannot_say_is_refused_before_a_weight_is_written(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(exported.FAMILIES, "changed", changes)
    run = run_of(tmp_path, "changed", **{"model.keys": "[self_attn.q_proj]"})
    assert export(run, "--to", "gguf") == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error
    assert not (run / "export").exists()


# ---- Tokenizers

TEXTS = (
    "Hello, world! It's 12345 o'clock, and I'LL   go\n\n\n home.\t\tТест 漢字 🦊",
    " a",
    "  two",
    "\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "Ünï̈côdé ½ ² x1y2",
)


def vocabulary_file(path: Path, tokenizer: Any) -> GgufTokens:
    """A file with a tokenizer alone, as a run's export has it."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    facts = facts_of(TokenizerWrapper(tokenizer), tokenizer.chat_template, "here")
    writer.add_name(name_with(facts, "a model"))
    write_tokenizer(writer, facts, facts.size + 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return GgufTokens(gguf_reader.GgufModel(path))


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct"])
def test_a_tokenizer_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    tokenizer = chat_models.tokenizer_of(name)
    tokens = vocabulary_file(tmp_path / "v.gguf", tokenizer)
    chat = [{"role": role, "content": f"{role} \n 12"} for role in ("user", "assistant", "user")]
    for text in (*TEXTS, tokenizer.apply_chat_template(chat, tokenize=False)):
        assert tokens(text) == tokenizer.encode(text, add_special_tokens=False), text


def test_special_tokens_keep_their_kind_and_place(tmp_path: Path) -> None:
    tokenizer = chat_models.tokenizer_of("Qwen-Qwen3-0.6B")
    tokens = vocabulary_file(tmp_path / "v.gguf", tokenizer)
    field = tokens.model.field
    assert field("tokenizer.ggml.pre") == "qwen2" and field("tokenizer.ggml.model") == "gpt2"
    assert field("tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    assert field("tokenizer.chat_template") == tokenizer.chat_template
    names, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    assert names[-3:] == [f"[PAD{len(names) - n}]" for n in (3, 2, 1)] and set(kinds[-3:]) == {5}
    by_name = dict(zip(names, kinds, strict=True))
    assert by_name["<|im_end|>"] == 3 and by_name["<think>"] == 4 and by_name["a"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda stored: stored["model"].update(type="Unigram", vocab=[["a", 0.0]], unk_id=0), "is a Unigram"),
        (lambda stored: stored.update(normalizer={"type": "Lowercase"}), "changes texts (Lowercase)"),
        (lambda stored: stored["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="[a-z]+"), "by [a-z]+"),
        (lambda stored: stored.update(pre_tokenizer={"type": "Whitespace"}), "splits texts in a way"),
        (lambda stored: stored["model"].update(ignore_merges=True), "takes a whole word"),
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
        facts_of(TokenizerWrapper(changed), None, "here")


@pytest.fixture
def with_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a run of a model with a tokenizer and its chat template, or another one."""

    def made(name: str, template: str | None = None) -> Path:
        tokenizer = chat_models.tokenizer_of(name, template)
        monkeypatch.setattr(
            exported, "SHAPE", exported.SHAPE | {"vocab_size": 1500, "eos_token_id": tokenizer.eos_token_id}
        )
        base = exported.base_model(tmp_path / "base", "llama")
        tokenizer.save_pretrained(base)
        return exported.run_of(tmp_path / "run", base)

    return made


def test_a_tokenizer_that_reads_otherwise_in_the_file_is_seen(
    with_tokenizer: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_tokenizer("Qwen-Qwen3-0.6B")
    monkeypatch.setattr(GgufTokens, "__call__", lambda self, text: [1, 2, 3])
    assert export(run, "--to", "gguf") == 1
    assert "gives other tokens" in capsys.readouterr().err


# ---- Ollama

ROLES = {"S": "system", "U": "user", "A": "assistant"}
NO_SHAPE = ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use",)  # takes no conversation without tools


@pytest.mark.parametrize("name", sorted(chat_models.registry().keys() - set(NO_SHAPE)))
def test_the_go_template_renders_as_the_models_own(name: str) -> None:
    tokenizer = chat_models.tokenizer_of(name)
    render = ollama.rendering(tokenizer, ChatTemplate(tokenizer, DataSettings(train="-")))
    shape = chat_shape.shape_of(render, "")
    for roles in ("U", "UAU", "UAUAUAU", *(["SU", "SUAUAU"] if shape.system_goes else [])):
        messages = [{"role": ROLES[role], "content": f"{role}{{{{ {i} }}}}{{"} for i, role in enumerate(roles)]
        found = go_template.render(shape.go_template(), chat_shape.as_values(messages))
        assert found == render(messages, True), roles


COMMAND = re.compile(
    r'\s*(?:#[^\n]*\n|(?P<name>[A-Za-z]+)[ \t]+(?:(?P<key>\w+)[ \t]+)?("""(?P<text>.*?)"""|(?P<word>\S+))\n)', re.DOTALL
)


def commands_of(text: str) -> list[tuple[str, str | None, str]]:
    """The commands of a Modelfile by its grammar: name, a parameter's key, value."""
    found, at = [], 0
    while text[at:].strip():
        match = COMMAND.match(text, at)
        assert match is not None, text[at:]
        at = match.end()
        if match["name"]:
            assert match["name"].lower() in ("from", "template", "parameter", "system", "license", "adapter", "message")
            found.append((match["name"], match["key"], match["word"] if match["text"] is None else match["text"]))
    return found


def test_a_modelfile_says_model_template_and_ends(with_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    run = with_tokenizer("Qwen-Qwen2.5-7B-Instruct")
    assert export(run, "--to", "ollama", "--out", str(tmp_path / "out")) == 0
    (source, template, stop) = commands_of((tmp_path / "out" / "Modelfile").read_text())
    assert source == ("FROM", None, f"./{gguf_file.FILE}") and (tmp_path / "out" / gguf_file.FILE).is_file()
    assert stop == ("PARAMETER", "stop", "<|im_end|>")
    tokenizer = chat_models.tokenizer_of("Qwen-Qwen2.5-7B-Instruct")
    messages = [{"role": "user", "content": "Hi"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert go_template.render(template[2], chat_shape.as_values(messages)) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "change from turn to turn"),
        ("{{ messages[0].content }}", "leaves out messages"),
        ("{{ raise_exception('no') }}", "does not take a conversation"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\u200b{% endfor %}", "U+200B"),
        ('{% for m in messages %}<{{ m.role }}>{{ m.content }}"""{% endfor %}', "three quotation marks"),
    ],
)
def test_a_template_without_a_shape_is_refused(
    template: str, words: str, with_tokenizer: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(with_tokenizer("Qwen-Qwen3-0.6B", template), "--to", "ollama") == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error


def test_bos_is_not_written_twice() -> None:
    """Where the tokenizer opens every text with BOS, the template must not."""
    llama2 = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
    )
    import jinja2

    render = lambda messages, answer: jinja2.Template(llama2).render(messages=messages)  # noqa: E731
    shape = chat_shape.shape_of(render, "<s>")
    two = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    assert "<s>" + go_template.render(shape.go_template(), chat_shape.as_values(two)) == render(two, True)


@pytest.mark.parametrize(
    "broken", ["{{ if .System }}", "{{ end }}", "{{ .System", "{{ template }}", "{{ eq (len .Messages }}"]
)
def test_a_go_template_that_is_none_is_refused(broken: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        go_template.render(broken, {"System": "s", "Messages": []})
