"""How a model is divided among ranks: KV heads with their query heads, MLP columns, and what each part weighs.

Pure numbers, from a model's config.json: the plan is made before any weight is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lib.errors import UserError

FAMILIES = ("llama", "ministral3", "mistral", "qwen2", "qwen3", "qwen3_moe")  # tensor_parallel.py can divide these
TIED = ("llama", "mistral", "ministral3", "qwen2")  # their head is the embedding, where config.json does not say
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of their number
OTHER_NAMES = {  # of dimensions, in older families' config.json
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), "num_attention_heads"),
    **dict.fromkeys(("n_embd", "d_model", "hidden_dim", "model_dim"), "hidden_size"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_transformer_layers"), "num_hidden_layers"),
    **dict.fromkeys(("n_inner", "ffn_hidden_size", "ff_intermediate_size", "block_ff_dim"), "intermediate_size"),
}
PIECE = 256  # tokens, by which lib/model/recurrences.py goes through a sequence
TIDY_COLUMNS = 64  # GPUs are slow on other widths; taken where it leaves a rank this many parts to choose from
CHOICES = 16


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model, as its config.json has them."""

    blocks: int
    expert_blocks: int  # those of them whose MLP is a mixture of experts
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_columns: int
    expert_columns: int  # of each expert; 0 without experts
    experts: int
    vocabulary: int
    is_tied: bool
    group_size: int  # of the quantisation; 1 without
    weight_bytes: float  # of one weight of a linear layer, scales included
    other_bytes: int  # of one number that is not quantised
    experts_per_token: int = 0
    attention_blocks: int | None = None  # None: all
    recurrent_blocks: int = 0  # a block may have both
    recurrent_columns: int = 0  # of a recurrence's projections
    scanned_numbers: int = 0  # of Mamba, for each token of a piece: states, or what its heads see of the piece


@dataclass(frozen=True)
class Division:
    """What every rank keeps: one number a rank, or nothing where the model has no such part."""

    kv_heads: tuple[int, ...]
    mlp_columns: tuple[int, ...]
    expert_columns: tuple[int, ...] = ()
    vocabulary: tuple[int, ...] = ()  # rows of the embedding and the head; empty: every rank keeps all
    weights: tuple[float, ...] = ()  # that it was made from

    @property
    def is_even(self) -> bool:
        """Whether all ranks have parts of the same shapes, and as many of the head's positions."""
        counts = (self.kv_heads, self.mlp_columns, self.expert_columns, self.vocabulary, self.weights)
        return all(len(set(of_ranks)) <= 1 for of_ranks in counts)


class Part(NamedTuple):
    """How an array is divided: rank r keeps [bounds[r], bounds[r + 1]) of an axis, which is counted from the end."""

    axis: int
    bounds: tuple[int, ...]

    def size(self, rank: int) -> int:
        """How much of the axis a rank keeps."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def of(self, whole: Any, rank: int) -> Any:
        """A rank's part of an array."""
        return whole[(..., slice(*self.bounds[rank : rank + 2]), *[slice(None)] * (-1 - self.axis))]

    def shape(self, of_any: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """The shape of the whole, or of a rank's part, from that of the whole or any part."""
        shape = list(of_any)
        shape[self.axis] = self.bounds[-1] if rank is None else self.size(rank)
        return tuple(shape)


class Holders(NamedTuple):
    """The ranks that hold an array whole, with Part's methods; the others have nothing of it."""

    ranks: tuple[int, ...]

    def size(self, rank: int) -> int:
        return int(rank in self.ranks)

    def of(self, whole: Any, rank: int) -> Any:
        return whole

    def shape(self, of_any: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        return tuple(of_any)


def model_shape_of(stored: Mapping[str, Any], dtype: str | None = None, to_divide: bool = True) -> ModelShape:
    """The dimensions in a config.json. dtype: of the weights, where it is not the stored one. Raises UserError: a
    dimension is missing, or (to_divide) lib/model/tensor_parallel.py cannot divide the family."""
    stored = {**stored, **stored.get("text_config", {})}  # models that also see pictures keep these one level down
    stored = {**{name: stored[other] for other, name in OTHER_NAMES.items() if stored.get(other)}, **stored}
    family = stored.get("model_type")
    if not to_divide:  # a recurrence has no heads; GPT's MLP is four times as wide by default
        stored = {"num_attention_heads": 1, "intermediate_size": 4 * int(stored.get("hidden_size", 0)), **stored}
    if to_divide and family not in FAMILIES:
        raise UserError(f"strategy=sharded cannot divide a model of type {family}; it knows {', '.join(FAMILIES)}")
    try:
        heads, hidden = int(stored["num_attention_heads"]), int(stored["hidden_size"])
        blocks, experts = int(stored["num_hidden_layers"]), next((int(stored[n]) for n in EXPERTS if stored.get(n)), 0)
        sparse = 0
        if experts:
            only_dense, step = stored.get("mlp_only_layers") or (), int(stored.get("decoder_sparse_step") or 1)
            sparse = sum(i not in only_dense and (i + 1) % step == 0 for i in range(blocks))
        number_bytes = 4 if (dtype or stored.get("torch_dtype") or stored.get("dtype") or "float32") == "float32" else 2
        group_size, weight_bytes = _quantisation(stored, number_bytes)
        return ModelShape(
            blocks=blocks,
            expert_blocks=sparse,
            hidden_size=hidden,
            heads=heads,
            kv_heads=int(stored.get("num_key_value_heads") or heads),
            head_dim=int(stored.get("head_dim") or hidden // heads),
            mlp_columns=int(stored["intermediate_size"]) if sparse < blocks else 0,
            expert_columns=int(stored.get("moe_intermediate_size") or stored["intermediate_size"]) if sparse else 0,
            experts=experts,
            vocabulary=int(stored["vocab_size"]),
            is_tied=bool(stored.get("tie_word_embeddings", family in TIED)),
            group_size=group_size,
            weight_bytes=weight_bytes,
            other_bytes=number_bytes,
            experts_per_token=int(stored.get("num_experts_per_tok") or 0),
            **_recurrence(stored, blocks),
        )
    except KeyError as error:
        raise UserError(f"the model's config.json has no {error.args[0]}") from None


ATTENTION = ("full_attention", "sliding_attention", "attention", "*")  # in lists of blocks' kinds
RECURRENT = ("linear_attention", "conv", "conv_mixer", "mamba", "recurrent", "M")


def _recurrence(stored: Mapping[str, Any], blocks: int) -> dict[str, int]:
    """How many blocks have attention, how many a recurrence, and the width of what the latter projects; or nothing."""

    def size(*names: str) -> int:
        return next((int(stored[name]) for name in names if stored.get(name)), 0)

    of_kimi = stored.get("linear_attn_config") or {}
    heads, hidden = size("mamba_n_heads", "mamba_num_heads"), size("hidden_size")
    inner = heads * size("mamba_d_head", "mamba_head_dim", "hidden_size_per_head") or size("mamba_expand") * hidden
    if stored.get("model_type") in ("mamba", "falcon_mamba", "mamba2"):
        inner = size("num_heads") * size("head_dim") or size("intermediate_size", "d_inner")
    states = size("mamba_n_groups", "n_groups") * size("mamba_d_state", "ssm_state_size", "state_size")
    columns = max(
        2 * size("linear_num_key_heads") * size("linear_key_head_dim")
        + 2 * size("linear_num_value_heads") * size("linear_value_head_dim"),
        6 * int(of_kimi.get("num_heads", 0)) * int(of_kimi.get("head_dim", 0)),
        2 * (inner + states) if inner else 0,
        2 * hidden * bool(size("conv_L_cache")),
        2 * size("lru_width"),
    )
    names = "layer_types", "block_types", "hybrid_override_pattern", "layers_block_type"
    kinds = list(next((stored[name] for name in names if stored.get(name)), ()))
    if not columns:
        return {}
    attention, recurrent = 0, blocks
    if kinds:
        counts = [[kinds[i % len(kinds)] in group for i in range(blocks)] for group in (ATTENTION, RECURRENT)]
        attention, recurrent = map(sum, counts)
    elif of_kimi:
        attention, recurrent = len(of_kimi["full_attn_layers"]), len(of_kimi["kda_layers"])
    elif interval := size("full_attention_interval", "attn_layer_period"):
        attention = blocks // interval
        recurrent = blocks - attention
    elif stored.get("num_key_value_heads"):  # side by side
        attention = blocks
    scanned = PIECE // 2 * (heads or size("num_heads")) if inner else 0
    if stored.get("model_type") in ("mamba", "falcon_mamba", "jamba"):
        scanned = inner * size("state_size", "mamba_d_state")
    of_blocks = {"attention_blocks": attention, "recurrent_blocks": recurrent}
    return of_blocks | {"recurrent_columns": columns, "scanned_numbers": scanned}


def _quantisation(stored: Mapping[str, Any], number_bytes: int) -> tuple[int, float]:
    """The largest group that no cut may split, and the bytes of one weight with its part of the scales."""
    quantisation = stored.get("quantization") or stored.get("quantization_config") or {}
    # Layers may be quantised each in its own way; what matters is where o_proj and down_proj may be cut.
    cut = [q for name, q in quantisation.items() if name.endswith(("o_proj", "down_proj")) and isinstance(q, dict)]
    groups = [int(q["group_size"]) for q in [quantisation, *cut] if "group_size" in q]
    if not (bits := quantisation.get("bits")):
        return max(groups, default=1), number_bytes
    # An affine group has a scale and a bias, the newer kinds one byte of scale.
    return max(groups), bits / 8 + (4 if quantisation.get("mode", "affine") == "affine" else 1) / groups[0]


def divide(shape: ModelShape, weights: Sequence[float], vocabulary: bool = False) -> Division:
    """Divides a model in proportion to positive weights: what rounding whole heads costs a rank, its MLP columns make
    up for. Cuts fall between quantisation groups. vocabulary: divide embedding and head as well. Raises UserError: too
    many ranks."""
    share = np.asarray(weights, dtype=np.float64) / math.fsum(weights)
    unit = shape.group_size // math.gcd(shape.group_size, shape.heads // shape.kv_heads * shape.head_dim)
    kv_heads = apportion(shape.kv_heads, share, unit, "KV heads")
    head, mlp, expert = _parameters(shape)
    total = shape.kv_heads * head + shape.mlp_columns * mlp + shape.expert_columns * expert
    left = np.maximum(share * total - np.array(kv_heads) * float(head), 0)

    def columns(width: int, what: str) -> tuple[int, ...]:
        return apportion(width, left, _tidy_unit(width, shape.group_size, len(share)), what) if width else ()

    rows: tuple[int, ...] = ()
    if vocabulary:
        can_be_even = len(set(weights)) == 1 and shape.vocabulary % len(share) == 0
        unit = 1 if can_be_even else _tidy_unit(shape.vocabulary, 1, len(share))
        rows = apportion(shape.vocabulary, share, unit, "tokens of the vocabulary")
    of_mlp, of_experts = (
        columns(shape.mlp_columns, "MLP columns"),
        columns(shape.expert_columns, "columns of an expert"),
    )
    return Division(kv_heads, of_mlp, of_experts, rows, tuple(map(float, weights)))


def _tidy_unit(width: int, group_size: int, ranks: int) -> int:
    tidy = math.lcm(group_size, TIDY_COLUMNS)
    return tidy if width % tidy == 0 and width // tidy >= CHOICES * ranks else group_size


def apportion(total: int, weights: Sequence[float] | np.ndarray, unit: int = 1, what: str = "parts") -> tuple[int, ...]:
    """Splits `total` in multiples of `unit` by largest remainder, at least 1 each. Raises UserError: too many ranks."""
    units, ranks = total // unit, len(weights)
    if ranks == 1:  # nothing is cut
        return (total,)
    if units < ranks or total % unit:
        only = f"{total} {what}" + (f" in groups of {unit}" if unit > 1 else "")
        raise UserError(f"strategy=sharded: {ranks} ranks, but the model has only {only}; use fewer ranks")
    ratio = np.asarray(weights, dtype=np.float64)
    ratio = ratio / ratio.sum() if ratio.sum() > 0 else np.full(ranks, 1 / ranks)
    exact = np.round(ratio * units, 9)
    counts = np.maximum(np.floor(exact).astype(int), 1)
    while counts.sum() != units:  # one at a time, where it brings a rank closest to its due
        step = 1 if counts.sum() < units else -1
        distance = np.where(counts + step >= 1, step * (counts - exact), np.inf)
        counts[np.argmin(distance)] += step
    return tuple(int(count) * unit for count in counts)


def bounds(counts: Sequence[int], each: int = 1) -> tuple[int, ...]:
    """Where the ranks' parts begin and end: (2, 6) with 4 each are 0, 8, 32."""
    return tuple(each * end for end in itertools.accumulate(counts, initial=0))


def _parameters(shape: ModelShape) -> tuple[int, int, int]:
    """Weights, in all blocks, of a KV head with its query heads, of an MLP column, of a column of every expert."""
    heads = shape.blocks * shape.head_dim * (2 * (shape.heads // shape.kv_heads) + 2)
    columns = 3 * (shape.blocks - shape.expert_blocks), 3 * shape.experts * shape.expert_blocks
    return shape.hidden_size * heads, shape.hidden_size * columns[0], shape.hidden_size * columns[1]


def rank_bytes(shape: ModelShape, division: Division, rank: int) -> tuple[int, int]:
    """Bytes of the weights that a rank holds: those divided, and those that every rank keeps whole."""
    counts = (division.kv_heads, division.mlp_columns, division.expert_columns)
    weights = sum(count[rank] * size for count, size in zip(counts, _parameters(shape), strict=True) if count)
    table = shape.hidden_size * (1 if shape.is_tied else 2) * shape.weight_bytes
    norms = shape.hidden_size * (2 * shape.blocks + 1) * shape.other_bytes
    routers = shape.hidden_size * shape.experts * shape.expert_blocks * shape.weight_bytes
    rows, whole = (division.vocabulary[rank], 0) if division.vocabulary else (0, shape.vocabulary)
    return round(weights * shape.weight_bytes + rows * table), round(whole * table + norms + routers)
