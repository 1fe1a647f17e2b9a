"""Log-probabilities of a GGUF file in numpy, by nothing but what the file says and how llama.cpp computes it.

It shares no code with mlx-lm's models, so that a name, an order or a size that was written wrongly shows. One block's
weights are in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lib.errors import UserError

Array = np.ndarray

# llama.cpp rotates neighbouring values of a head in these architectures, in the others a head's two halves.
NEIGHBOURS = ("llama", "granite", "smollm3")
GEMMA = ("gemma", "gemma2", "gemma3")
# Blocks whose number is no multiple of this (from 1) attend to a window, where the file has no list of its own.
WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6}
BLOCKS_OF_27B = {"gemma2": 46, "gemma3": 62}


class GgufModel:
    """A file's metadata and tensors.

    Args:
        path: of the file, which stays mapped while this lives.

    Raises:
        UserError: it is no whole GGUF file.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        class WholeReader(GGUFReader):
            """Refuses a length that ends beyond the file; gguf counts up to it, until no memory is left."""

            def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Array:
                if int(offset) + np.dtype(dtype).itemsize * int(count) > self.data.size:
                    raise ValueError("it ends too soon")
                return super()._get(offset, dtype, count, *order, **named)

        try:
            reader = WholeReader(path)
            self.fields = reader.fields
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
            self.architecture = str(self.field("general.architecture"))
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise UserError(f"{path} is no GGUF file that can be read: {type(error).__name__}: {error}") from None

    def field(self, key: str, default: Any = None) -> Any:
        """A value of the file's metadata; `*.key` is one of the architecture."""
        key = key.replace("*", self.architecture) if key.startswith("*") else key
        return self.fields[key].contents() if key in self.fields else default

    def weight(self, name: str) -> Array:
        """A tensor, float32, in numpy's order of axes: [out, in]."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        return dequantize(np.ascontiguousarray(tensor.data), tensor.tensor_type).reshape(shape)

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes and switches, with llama.cpp's defaults."""
        heads, hidden = int(self.field("*.attention.head_count")), int(self.field("*.embedding_length"))
        return Sizes(
            blocks=int(self.field("*.block_count")),
            hidden=hidden,
            heads=heads,
            kv_heads=int(self.field("*.attention.head_count_kv", heads)),
            head=int(self.field("*.attention.key_length", hidden // heads)),
            eps=float(self.field("*.attention.layer_norm_rms_epsilon")),
        )

    def is_windowed(self, block: int) -> bool:
        """Whether a block attends to a window."""
        pattern = self.field("*.attention.sliding_window_pattern", WINDOW_PATTERNS.get(self.architecture))
        if pattern is None or not self.field("*.attention.sliding_window"):
            return False
        return bool(pattern[block]) if isinstance(pattern, list) else (block + 1) % int(pattern) != 0

    def attention_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        sizes = self.sizes
        if BLOCKS_OF_27B.get(self.architecture) == sizes.blocks:
            return float(1 / math.sqrt(sizes.hidden / sizes.heads))
        given = self.field("*.attention.scale") if self.architecture not in GEMMA else None
        return float(given or 1 / math.sqrt(sizes.head))


@dataclass(frozen=True)
class Sizes:
    """Of a model; `head` is the values of one head."""

    blocks: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    eps: float


def logps(path: Path, rows: Sequence[Array]) -> list[Array]:
    """Of every token but the first of each row of ids, float32 [tokens - 1]."""
    model = GgufModel(path)
    inputs = [ids[:-1] for ids in rows]
    ends = np.cumsum([len(ids) for ids in inputs])[:-1]
    embeddings = model.weight("token_embd.weight")
    x = embeddings[np.concatenate(inputs)]
    if model.architecture in GEMMA:
        x = x * np.float32(math.sqrt(model.sizes.hidden))
    x = x * np.float32(model.field("*.embedding_scale", 1.0))
    for block in range(model.sizes.blocks):
        x = _block(Block(model, block), x, ends)
    x = _normalised(x, model.weight("output_norm.weight"), model.sizes.eps)
    head = model.weight("output.weight") if "output.weight" in model.tensors else embeddings
    return [_token_logps(model, states @ head.T, ids[1:]) for states, ids in zip(np.split(x, ends), rows, strict=True)]


def _token_logps(model: GgufModel, logits: Array, ids: Array) -> Array:
    logits = logits / np.float32(model.field("*.logit_scale", 1.0))
    logits = _capped(logits, model.field("*.final_logit_softcapping"))
    most = logits.max(axis=-1, keepdims=True)
    normaliser = most[:, 0] + np.log(np.exp(logits - most).sum(axis=-1, dtype=np.float64))
    return (logits[np.arange(len(ids)), ids] - normaliser).astype(np.float32)


@dataclass(frozen=True)
class Block:
    """One block of a model.

    Args:
        number: from 0.
    """

    model: GgufModel
    number: int

    def has(self, name: str) -> bool:
        return f"blk.{self.number}.{name}" in self.model.tensors

    def __getitem__(self, name: str) -> Array:
        return self.model.weight(f"blk.{self.number}.{name}")

    def linear(self, name: str, x: Array) -> Array:
        """x W^T, plus a bias where there is one."""
        y: Array = x @ self[f"{name}.weight"].T
        return y + self[f"{name}.bias"] if self.has(f"{name}.bias") else y

    def norm(self, name: str, x: Array) -> Array:
        """RMS norm over the last axis; where the block has none of that name, x."""
        if not self.has(f"{name}.weight"):
            return x
        return _normalised(x, self[f"{name}.weight"], self.model.sizes.eps)


def _block(block: Block, x: Array, ends: Array) -> Array:
    """One transformer block on the tokens of all rows, float32 [tokens, hidden]; rows end at `ends`."""
    scale = np.float32(block.model.field("*.residual_scale", 1.0))
    x = x + scale * block.norm("post_attention_norm", _attention(block, block.norm("attn_norm", x), ends))
    return x + scale * block.norm("post_ffw_norm", _feed_forward(block, block.norm("ffn_norm", x)))


def _attention(block: Block, x: Array, ends: Array) -> Array:
    sizes, model = block.model.sizes, block.model
    if block.has("attn_qkv.weight"):
        widths = np.cumsum([sizes.heads, sizes.kv_heads]) * sizes.head
        q, k, v = np.split(block.linear("attn_qkv", x), widths, axis=-1)
    else:
        q, k, v = (block.linear(f"attn_{name}", x) for name in "qkv")
    if model.architecture == "olmo2":  # its norms reach over all heads
        q, k = block.norm("attn_q_norm", q), block.norm("attn_k_norm", k)
    q, k, v = (each.reshape(len(x), -1, sizes.head) for each in (q, k, v))
    if model.architecture != "olmo2":
        q, k = block.norm("attn_q_norm", q), block.norm("attn_k_norm", k)
    rotate = Rope.of(block)
    rows = [
        _row_attention(block, rotate(q), rotate(k), v)
        for q, k, v in zip(np.split(q, ends), np.split(k, ends), np.split(v, ends), strict=True)
    ]
    return block.linear("attn_output", np.concatenate(rows))


def _row_attention(block: Block, q: Array, k: Array, v: Array) -> Array:
    """Causal attention of one row: q [L, heads, head], k and v [L, kv heads, head] ➜ [L, heads x head]."""
    model, length = block.model, len(q)
    groups = model.sizes.heads // model.sizes.kv_heads
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("qhd,khd->hqk", q * np.float32(model.attention_scale()), k)
    scores = _capped(scores, model.field("*.attn_logit_softcapping"))
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = distance >= 0
    if model.is_windowed(block.number):
        seen &= distance < model.field("*.attention.sliding_window")
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)


def _feed_forward(block: Block, x: Array) -> Array:
    if block.has("ffn_gate_inp.weight"):
        return _experts(block, x)
    up = block.linear("ffn_up", x)
    if block.has("ffn_gate.weight"):
        gate = block.linear("ffn_gate", x)
    else:  # Phi-3 has both in one
        gate, up = np.split(up, 2, axis=-1)
    return block.linear("ffn_down", _activation(block.model, gate) * up)


def _experts(block: Block, x: Array) -> Array:
    """A mixture of experts: each token by the few that its router gives most weight."""
    logits = block.linear("ffn_gate_inp", x)
    chances = np.exp(logits - logits.max(axis=-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    used = int(block.model.field("*.expert_used_count"))
    chosen = np.argsort(-chances, axis=-1, kind="stable")[:, :used]
    shares = np.take_along_axis(chances, chosen, axis=-1)
    if block.model.architecture != "qwen2moe":
        shares = shares / shares.sum(axis=-1, keepdims=True)
    gate, up, down = (block[f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
    y = np.zeros_like(x)
    for expert in np.unique(chosen):
        tokens, place = np.nonzero(chosen == expert)
        inner = _activation(block.model, x[tokens] @ gate[expert].T) * (x[tokens] @ up[expert].T)
        y[tokens] += shares[tokens, place, None] * (inner @ down[expert].T)
    if block.has("ffn_gate_inp_shexp.weight"):
        weight = 1 / (1 + np.exp(-(x @ block["ffn_gate_inp_shexp.weight"])))
        inner = _activation(block.model, block.linear("ffn_gate_shexp", x)) * block.linear("ffn_up_shexp", x)
        y += weight[:, None] * block.linear("ffn_down_shexp", inner)
    return y


def _activation(model: GgufModel, x: Array) -> Array:
    """SiLU; of Gemma GELU by its approximation with tanh."""
    if model.architecture in GEMMA:
        return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    return x / (1 + np.exp(-x))


def _normalised(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def _capped(x: Array, cap: float | None) -> Array:
    return np.tanh(x / np.float32(cap)) * np.float32(cap) if cap else x


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one block.

    Args:
        angles: radians a position, float64 [dimensions / 2].
        magnitude: of cosine and sine.
        neighbours: whether values 2i and 2i + 1 are a pair, or i and i + dimensions / 2.
    """

    angles: Array
    magnitude: float
    neighbours: bool

    @classmethod
    def of(cls, block: Block) -> Rope:
        """The rope of a block; of one that has none it turns by nothing."""
        model = block.model
        dimensions = int(model.field("*.rope.dimension_count", model.sizes.head))
        base = float(model.field("*.rope.freq_base", 10000.0))
        stretch = float(model.field("*.rope.scaling.factor", 1.0))
        kind = model.field("*.rope.scaling.type", "none")
        magnitude = float(model.field("*.rope.scaling.attn_factor", 1.0))
        if model.architecture == "gemma3" and model.is_windowed(block.number):
            base, stretch = float(model.field("*.rope.freq_base_swa", 10000.0)), 1.0
        angles = base ** -(np.arange(0, dimensions, 2) / dimensions)
        for name in ("rope_freqs.weight", "rope_factors_short.weight"):
            if name in model.tensors:
                angles = angles / model.weight(name)
        if kind == "yarn":
            angles = _yarn(model, angles, base, stretch)
            magnitude *= 0.1 * math.log(stretch) + 1
        else:
            angles = angles / stretch
        if model.architecture == "smollm3" and (block.number + 1) % 4 == 0:
            angles = np.zeros_like(angles)
        return cls(angles, magnitude, model.architecture in NEIGHBOURS)

    def __call__(self, x: Array) -> Array:
        """Rotates x [L, heads, head] by the position of each; values beyond the dimensions stay."""
        turned = np.arange(len(x))[:, None] * self.angles
        cosine, sine = (
            (np.float64(self.magnitude) * part(turned)).astype(np.float32)[:, None] for part in (np.cos, np.sin)
        )
        half = len(self.angles)
        pairs = (
            (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
            if self.neighbours
            else (slice(0, half), slice(half, 2 * half))
        )
        a, b = x[..., pairs[0]], x[..., pairs[1]]
        y = x.copy()
        y[..., pairs[0]], y[..., pairs[1]] = a * cosine - b * sine, a * sine + b * cosine
        return y


def _yarn(model: GgufModel, angles: Array, base: float, stretch: float) -> Array:
    """YaRN's angles: slow ones stretched, fast ones kept, between them a ramp (arXiv:2309.00071, section 3.2)."""
    dimensions = 2 * len(angles)
    trained = float(model.field("*.rope.scaling.original_context_length"))

    def dimension(turns: float) -> float:
        """Where a pair turns so many times over the trained context."""
        return dimensions * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(0, math.floor(dimension(float(model.field("*.rope.scaling.yarn_beta_fast", 32.0)))))
    high = min(dimensions - 1, math.ceil(dimension(float(model.field("*.rope.scaling.yarn_beta_slow", 1.0)))))
    ramp = 1 - np.clip((np.arange(len(angles)) - low) / max(0.001, high - low), 0, 1)
    return angles / stretch * (1 - ramp) + angles * ramp
