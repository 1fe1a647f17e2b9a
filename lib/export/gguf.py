"""One GGUF file, for llama.cpp and what is built on it: the whole model, its tokenizer and its chat template.

gguf's own writer and name maps write it. Here are the facts of llama.cpp that differ from mlx-lm's models: names, the
order of rows, norms, ropes; and the splitters of texts, whose names follow from tokenizer.json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import rope_utils

from lib.errors import Stopped, UserError
from lib.export.fuse import fused_model
from lib.export.trained_run import ChatForm, ExportOptions, Reading, TrainedRun, WeightType, model_logps
from lib.system.model_folder import context_tokens

TYPES: dict[mx.Dtype, WeightType] = {mx.float32: "f32", mx.bfloat16: "bf16", mx.float16: "f16"}
FILE = "model.gguf"
F32 = GGMLQuantizationType.F32
DEFAULT_CONTEXT = 2048  # where config.json has no max_position_embeddings
ALL = "full_attention"


class Family(NamedTuple):
    """How a family of mlx-lm's models is stored in GGUF."""

    architecture: str  # its name in GGUF
    # llama.cpp rotates neighbouring values of a head, mlx-lm the two halves: the rows of q and k are reordered.
    pairs_neighbours: bool = False
    needs_head: bool = False  # llama.cpp does not take the embedding for the head
    norm_offset: float = 0.0  # mlx-lm's norms add this to their weight, llama.cpp's do not
    norm_topk_prob: bool | None = None  # what llama.cpp does with the shares of experts
    heads_of: int = 0  # at so many blocks llama.cpp scales Gemma's attention by hidden size over heads


_LLAMA, _GEMMA3 = Family("LLAMA", pairs_neighbours=True), Family("GEMMA3", norm_offset=1.0, heads_of=62)
FAMILIES = {  # by mlx-lm's model_type
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Family("QWEN2"),
    "qwen2_moe": Family("QWEN2MOE", needs_head=True, norm_topk_prob=False),
    "qwen3": Family("QWEN3"),
    "qwen3_moe": Family("QWEN3MOE", norm_topk_prob=True),
    "gemma": Family("GEMMA", norm_offset=1.0),
    "gemma2": Family("GEMMA2", norm_offset=1.0, heads_of=46),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Family("PHI3"),
    "olmo2": Family("OLMO2", needs_head=True),
    "granite": Family("GRANITE", pairs_neighbours=True),
    "smollm3": Family("SMOLLM3", pairs_neighbours=True),
}
# What GGUF's writer calls the arguments of mlx-lm's models; a family has those that its arguments have.
PARAMETERS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_freq_base",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope_freq_base_swa",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
SPACE = "▁"  # what SentencePiece writes for a space
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")  # by their names in transformers, and in GGUF's writer
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def check(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError for a family, a parameter or a tokenizer that GGUF or llama.cpp does not have."""
    if options.dequantize:
        raise UserError("--dequantize is for --to fused; GGUF has its own types: --type q8_0")
    model, family, args = _fused(run)  # not evaluated: only names and shapes of its weights are read
    list(tensors(model, family, "f32"))
    tokenizer = tokenizer_of(run.chat_form(), run.settings.model.path)
    if tokenizer is not None and len(tokenizer.tokens) > args.vocab_size:
        raise UserError(f"--to gguf: the tokenizer of {run.base} has more tokens than the model has embeddings")


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes model.gguf, weight by weight: adapters fused in float32, then rounded once. Raises UserError: a rope."""
    (model, family, args), tokenizer = _fused(run), tokenizer_of(run.chat_form(), run.settings.model.path)
    type = options.type or TYPES.get(text_model(run.stored_base()).model.norm.weight.dtype, "bf16")
    writer = GGUFWriter(folder / FILE, MODEL_ARCH_NAMES[MODEL_ARCH[family.architecture]])
    # "phi-3" in its name tells llama.cpp that special tokens swallow the space behind them.
    strips = tokenizer is not None and tokenizer.strips_right
    writer.add_name(f"{'Phi-3 ' * strips}{run.base.name} {run.folder.resolve().name}")
    _write_parameters(writer, model, family, run)
    writer.add_file_type(LlamaFileType["ALL_F32" if type == "f32" else f"MOSTLY_{type.upper()}"])
    writer.add_quantization_version(2)  # of the layout of quantised blocks: GGML_QNT_VERSION
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        tokenizer.write(writer, args.vocab_size)
    factors, parameters = frequency_factors(model), dict(tree_flatten(model.parameters()))
    listed = [*((name, "", each.shape, F32) for name, each in factors.items()), *tensors(model, family, type)]
    model.clear()
    for name, _, shape, stored in listed:
        block, size = GGML_QUANT_SIZES[stored]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), math.prod(shape) // block * size, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, source, shape, stored in listed:
        values = np.array(parameters.pop(source).astype(mx.float32)) if source else factors[name]
        values = laid_out(source, values, family, args).reshape(shape)
        writer.write_tensor_data(quantize(np.ascontiguousarray(values), stored))
    writer.close()


def read(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    """The log-probabilities by GGUFReader's arrays. Raises Stopped: another chat template or end of turn."""
    reader, (model, family, args) = GGUFReader(folder / FILE), _fused(run)
    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    stored, restored = {tensor.name: tensor for tensor in reader.tensors}, []
    for name, source, shape, _ in tensors(model, family, "f32"):
        values = dequantize(stored[name].data, stored[name].tensor_type).astype(np.float32).reshape(shape)
        values = laid_out(source, values, family, args, is_undone=True)
        restored.append((source, mx.array(values.reshape(shapes[source]))))
    model.update(tree_unflatten(restored))
    if (chat := run.chat_form()) is not None:
        names = ("tokenizer.chat_template", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        fields = [reader.get_field(name) for name in names]
        template, *ends = [None if field is None else field.contents() for field in fields]
        if template != chat.template or chat.end_ids[0] not in ends:
            raise Stopped(f"--to gguf: the file has another chat template than training, or ends at {ends} alone")
    is_rounded = any(tensor.tensor_type != F32 for tensor in reader.tensors)
    return Reading("gguf's reader", model_logps(model, run.rows), is_rounded)


def tensors(
    model: nn.Module, family: Family, type: WeightType
) -> Iterator[tuple[str, str, tuple[int, ...], GGMLQuantizationType]]:
    """Every tensor: name, the model's parameter, shape, stored type. Raises UserError: GGUF has no such parameter."""
    names = get_tensor_name_map(MODEL_ARCH[family.architecture], text_model(model).args.num_hidden_layers)
    for source, array in tree_flatten(model.parameters()):
        # The maps know the transformers library's names, and the first Mixtral's.
        plain = source.removeprefix("language_model.").replace(".switch_mlp.", ".experts.")
        if match := re.fullmatch(r"model\.(.*)\.block_sparse_moe\.experts\.(\w+)\.weight", plain):
            plain = f"{match[1]}.feed_forward.experts.{MIXTRAL[match[2]]}.weight"
        if (name := names.get_name(plain, try_suffixes=(".weight", ".bias"))) is None:
            raise UserError(f"--to gguf: GGUF's {family.architecture.lower()} has no {source}; take --to fused")
        shape = (array.size,) if "ffn_gate_inp_shexp" in name else array.shape  # one row, which is a vector there
        stored = GGMLQuantizationType[type.upper()]
        if len(shape) == 1 or "ffn_gate_inp" in name:  # a router is small, and decides much
            stored = F32
        elif type == "q8_0" and shape[-1] % 32:
            stored = GGMLQuantizationType.F16
        yield name, source, shape, stored


def _fused(run: TrainedRun) -> tuple[nn.Module, Family, Any]:
    """The trained model, not evaluated, its family and arguments. Raises UserError: llama.cpp does not have it so."""
    model, path = fused_model(run), run.settings.model.path
    if (family := FAMILIES.get(model.model_type)) is None:
        raise UserError(
            f"--to gguf: {path} is of the family {model.model_type}; there are {', '.join(sorted(FAMILIES))}. Others: "
            "--to fused --dequantize, then llama.cpp's `python convert_hf_to_gguf.py FOLDER`"
        )
    args = text_model(model).args
    if (problem := _problem(family, args)) is not None:
        raise UserError(f"--to gguf: {path}: {problem}, and GGUF cannot say so; take --to fused")
    return model, family, args


def text_model(model: nn.Module) -> nn.Module:
    """The part of a model that reads text: of one that also sees pictures its language model."""
    return getattr(model, "language_model", model)


def _problem(family: Family, args: Any) -> str | None:
    """What llama.cpp computes otherwise for a model of this family."""
    if family.architecture in ("LLAMA", "SMOLLM3") and {*(getattr(args, "layer_types", None) or [ALL])} != {ALL}:
        return "some of its blocks attend to a window"
    if family.needs_head and args.tie_word_embeddings:
        return "its head is its embedding"
    if family.heads_of:
        is_largest, scalar = args.num_hidden_layers == family.heads_of, args.query_pre_attn_scalar
        size = args.hidden_size // args.num_attention_heads if is_largest else args.head_dim
        return None if scalar == size else f"query_pre_attn_scalar is {scalar:g}, not {size}"
    if (norms := family.norm_topk_prob) is not None:
        if getattr(args, "mlp_only_layers", None) or getattr(args, "decoder_sparse_step", 1) != 1:
            return "some of its blocks have no experts"
        return None if getattr(args, "norm_topk_prob", norms) == norms else f"norm_topk_prob is not {norms}".lower()
    if family.architecture == "SMOLLM3":
        every_fourth = [int((block + 1) % 4 != 0) for block in range(args.num_hidden_layers)]
        return None if list(args.no_rope_layers) == every_fourth else "blocks other than every fourth have no rope"
    return None


def laid_out(name: str, weight: np.ndarray, family: Family, args: Any, is_undone: bool = False) -> np.ndarray:
    """A weight as llama.cpp wants it, float32: q and k in its order, a norm's offset added. is_undone: the way back."""
    if name.endswith("norm.weight"):
        return weight + np.float32(-family.norm_offset if is_undone else family.norm_offset)
    heads = args.num_attention_heads * (".q_proj." in name) + args.num_key_value_heads * (".k_proj." in name)
    if not heads or not family.pairs_neighbours or getattr(args, "rope_traditional", False):
        return weight
    return neighbouring_pairs(weight, heads, is_undone)


def neighbouring_pairs(weight: np.ndarray, heads: int, is_undone: bool = False) -> np.ndarray:
    """The rows of every head reordered, so that values i and i + d/2, which a rope rotates together, are neighbours."""
    pairs = (heads, -1, 2) if is_undone else (heads, 2, -1)
    return weight.reshape(*pairs, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write_parameters(writer: GGUFWriter, model: nn.Module, family: Family, run: TrainedRun) -> None:
    """Writes sizes, norms, rope and experts, and what only the family has."""
    args, config = text_model(model).args, run.base_config
    head_size = int(getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads)
    context = context_tokens(config) or DEFAULT_CONTEXT
    writer.add_context_length(context)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    for name, key in PARAMETERS.items():
        if (value := getattr(args, name, None)) is not None:
            getattr(writer, f"add_{key}")(value)
    if family.architecture == "GEMMA2":
        # mlx-lm's Gemma 2 attends to everything. llama.cpp's attends to 4,096 tokens in every other block, unless it
        # is given a window: the longest context, which no text is longer than.
        writer.add_sliding_window(context)
    if (pattern := getattr(args, "sliding_window_pattern", 1)) > 1:
        writer.add_sliding_window(args.sliding_window)
        writer.add_sliding_window_pattern([(block + 1) % pattern != 0 for block in range(args.num_hidden_layers)])
    _write_rope(writer, model, args, family)


def _rope(model: nn.Module) -> nn.Module:
    """The rope of the blocks that attend to everything, of which those that attend to a window may differ."""
    attention = [layer.self_attn for layer in text_model(model).layers]
    ropes = [each.rope for each in sorted(attention, key=lambda each: bool(getattr(each, "is_sliding", False)))]
    return next(rope for rope in ropes if isinstance(rope, nn.RoPE) or type(rope).__module__ == rope_utils.__name__)


def _write_rope(writer: GGUFWriter, model: nn.Module, args: Any, family: Family) -> None:
    """Writes the model's own rope layers. Raises UserError: llama.cpp does not scale so for this family."""
    rope = _rope(model)
    writer.add_rope_dimension_count(rope.dim if isinstance(rope, rope_utils.SuScaledRoPE) else rope.dims)
    if isinstance(rope, nn.RoPE):
        if rope.scale != 1.0:
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(1.0 / rope.scale)
    elif isinstance(rope, rope_utils.Llama3RoPE) and family.architecture in ("LLAMA", "GRANITE"):
        pass  # a tensor: frequency_factors
    elif isinstance(rope, rope_utils.SuScaledRoPE) and family.architecture == "PHI3":
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(rope._scale)
    elif isinstance(rope, rope_utils.YarnRoPE):  # arXiv:2309.00071
        scaling, factor = args.rope_scaling, float(args.rope_scaling["factor"])
        if not math.isclose(rope.mscale, 0.1 * math.log(factor) + 1.0, rel_tol=1e-6):
            raise UserError("--to gguf: the rope's mscale is not YaRN's own, and GGUF cannot say so; take --to fused")
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.get("original_max_position_embeddings", 4096))
        writer.add_rope_scaling_yarn_beta_fast(scaling.get("beta_fast", 32))
        writer.add_rope_scaling_yarn_beta_slow(scaling.get("beta_slow", 1))
    else:
        raise UserError(f"--to gguf: llama.cpp has no {type(rope).__name__} for {family.architecture}; take --to fused")


def frequency_factors(model: nn.Module) -> dict[str, np.ndarray]:
    """What a rope's frequencies are divided by, float32 [dimensions / 2], by the tensor's name in GGUF. mlx-lm scales a
    "longrope" by its long factors at any length, so the file has these for both."""
    rope, theta = _rope(model), float(text_model(model).args.rope_theta)
    if not isinstance(rope, rope_utils.Llama3RoPE | rope_utils.SuScaledRoPE):
        return {}
    is_long = isinstance(rope, rope_utils.SuScaledRoPE)
    dimensions = rope.dim if is_long else rope.dims
    plain = theta ** (np.arange(0, dimensions, 2) / dimensions)
    factors = (np.array(rope._freqs, np.float64) / plain).astype(np.float32)
    names = ("rope_factors_long.weight", "rope_factors_short.weight") if is_long else ("rope_freqs.weight",)
    return dict.fromkeys(names, factors)


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer as GGUF stores it."""

    tokens: list[tuple[str, int]]  # every token's text and gguf.TokenType, by id
    merges: list[str]  # pairs in their order, "left right" each
    is_sentencepiece: bool  # BPE by scores ("llama"), not byte-level BPE by merges ("gpt2")
    pre: str  # llama.cpp's name of the splitter
    ids: dict[str, int]  # of special tokens by their names in GGUF: bos, eos, eot ...
    adds: dict[str, bool]  # whether a text gets bos and eos, and begins with a space
    strips_right: bool  # special tokens swallow the white space behind them
    chat_template: str | None

    def write(self, writer: GGUFWriter, vocab_size: int) -> None:
        """Writes it for embeddings of `vocab_size` tokens; those without a token are named [PAD17] and unused."""
        unused = [(f"[PAD{index}]", int(TokenType.UNUSED)) for index in range(len(self.tokens), vocab_size)]
        texts, types = zip(*self.tokens, *unused, strict=True)
        writer.add_tokenizer_model("llama" if self.is_sentencepiece else "gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(texts))
        writer.add_token_types(list(types))
        if self.is_sentencepiece:  # of two possible merges llama.cpp makes that of the higher score: the earlier one
            order = {merge.replace(" ", ""): index for index, merge in reversed([*enumerate(self.merges)])}
            scores = [-float(order.get(text, len(self.merges))) for text, _ in self.tokens]
            writer.add_token_scores(scores + [0.0] * len(unused))
        else:
            writer.add_token_merges(self.merges)
        for name, index in self.ids.items():
            getattr(writer, f"add_{name}_token_id")(index)
        for name, is_added in self.adds.items():
            getattr(writer, f"add_add_{name}")(is_added)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def tokenizer_of(chat: ChatForm | None, where: str) -> GgufTokenizer | None:
    """A tokenizer with the template and the end of turn of training. Raises UserError: llama.cpp has no such one."""
    if chat is None:
        return None
    wrapper: Any = chat.tokenizer  # of mlx-lm, which cannot be called; the tokenizer inside it can
    tokenizer = wrapper if callable(wrapper) else wrapper._tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"--to gguf: {where}: its tokenizer has no tokenizer.json, which GGUF's tokens come from")
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = stored["model"], {token["id"]: token for token in stored["added_tokens"]}
    if model["type"] != "BPE":
        raise UserError(f"--to gguf: {where}: its tokenizer is a {model['type']}; GGUF takes BPE here")
    ids = {name: index for name in SPECIAL if (index := getattr(tokenizer, f"{name}_token_id", None)) is not None}
    if further := [index for index in chat.end_ids if index != ids.get("eos")]:
        ids["eot"] = further[0]
    opened, is_sentencepiece = tokenizer("a")["input_ids"], bool(model.get("byte_fallback"))
    adds = {
        "bos_token": "bos" in ids and opened[:1] == [ids["bos"]],
        "eos_token": "eos" in ids and opened[-1:] == [ids["eos"]],
    }
    if is_sentencepiece:
        adds["space_prefix"] = _adds_space(stored, chat.template)
    return GgufTokenizer(
        tokens=_tokens(model, added, is_sentencepiece),
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        is_sentencepiece=is_sentencepiece,
        pre="default" if is_sentencepiece else _pre(stored, where),
        ids=ids,
        adds=adds,
        strips_right=any(token["rstrip"] for token in added.values()),
        chat_template=chat.template,
    )


def _tokens(
    model: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]], is_sentencepiece: bool
) -> list[tuple[str, int]]:
    """Every token's text and type, by id; ids that have none are unused."""
    texts = {index: text for text, index in model["vocab"].items()}
    texts |= {index: token["content"] for index, token in added.items()}
    tokens = []
    for index in range(max(texts) + 1):
        text, kind = texts.get(index, f"[PAD{index}]"), TokenType.NORMAL
        if index not in texts:
            kind = TokenType.UNUSED
        elif index in added and is_sentencepiece and text == model.get("unk_token"):
            kind = TokenType.UNKNOWN
        elif index in added:
            kind = TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
        elif is_sentencepiece and re.fullmatch("<0x[0-9A-F]{2}>", text):
            kind = TokenType.BYTE
        # A token that a user added is compared with the text itself, in which a space is a space.
        tokens.append((text.replace(SPACE, " ") if kind == TokenType.USER_DEFINED else text, int(kind)))
    return tokens


def _adds_space(stored: Mapping[str, Any], chat_template: str | None) -> bool:
    """Whether llama.cpp is to put a space before a text and behind special tokens. It cannot do so before the first
    word of a text alone; with a chat template texts begin with a special token, so that there is no such word."""
    for step in _steps(stored.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            return bool(scheme == "always" or (scheme == "first" and chat_template is None))
    return any(step["type"] == "Prepend" for step in _steps(stored.get("normalizer"), "normalizers"))


def _steps(stored: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The parts of a normaliser or splitter, one after another."""
    if stored is None:
        return []
    return [part for each in stored[key] for part in _steps(each, key)] if stored["type"] == "Sequence" else [stored]


def _pre(stored: Mapping[str, Any], where: str) -> str:
    """llama.cpp's name of a byte-level BPE's splitter. Raises UserError: it has none that splits so."""
    changes = {step["type"] for step in _steps(stored.get("normalizer"), "normalizers")} - {"NFC"}
    patterns: list[str] = []
    for step in _steps(stored.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            patterns += [GPT2] if step["use_regex"] else []
        elif step["type"] == "Digits" and step["individual_digits"]:
            patterns.append(r"\p{N}")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and "Regex" in step["pattern"]:
            patterns.append(step["pattern"]["Regex"])
        else:
            patterns.append(step["type"])
    takes_words = bool(stored["model"]["ignore_merges"])
    name = SPLITTERS.get((tuple(patterns), takes_words))
    if name is None or changes:
        how = [*sorted(changes), *patterns, *["whole words that are tokens"] * takes_words]
        raise UserError(f"--to gguf: {where}: llama.cpp knows no tokenizer that splits texts by {', then '.join(how)}")
    return name


# What the tokenizers library's ByteLevel(use_regex=true) splits by, GPT-2's.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _END
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = "|".join(_CASED) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
_GPT4O = "|".join(f"{each}{_CONTRACTIONS}?" for each in _CASED) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
# tiktoken's own spelling of GPT-4's, with possessive quantifiers: it splits the same texts.
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _END,
)
# llama.cpp's names (llama-vocab.cpp; the best known, where several mean the same) by what splits a text, each pattern
# what the one before has left, and whether a whole word that is a token is taken without a look at merges.
SPLITTERS: dict[tuple[tuple[str, ...], bool], str] = {
    ((_GPT4,), True): "llama-bpe",
    ((_CL100K,), True): "llama-bpe",
    ((_GPT4,), False): "dbrx",
    ((_CL100K,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((GPT2,), False): "gpt-2",
    ((r"\p{N}", GPT2), False): "smollm",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), False): "gpt-4o",
    (_DEEPSEEK_V3, False): "deepseek-v3",
}
