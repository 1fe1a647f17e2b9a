"""A loaded model goes in, this rank's part of it comes out: tensor parallelism for unequal ranks.

A block's attention and its MLP each begin with layers that are divided by their outputs (q, k, v; gate, up) and end
with one that is divided by its inputs (o; down), as in Megatron-LM (arXiv:1909.08053, section 3). One sum at the end,
and one of the gradients at the beginning, make of the parts what the whole would have computed. Within, an array that a
rank holds whole (LoRA's A in front of a divided B, norms of heads, routers) gets a part of its gradient on each rank,
and these are summed; outside, every rank computes the same.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from lib.errors import UserError
from lib.model.layout import PositionsPart, Ranks, VocabularyPart, layout_of
from lib.model.lora_layers import DoRA, TokenDropout
from lib.model.partition import Division, Part, bounds
from lib.model.patches import with_methods

STORED = ("weight", "scales", "biases")


def shard(model: nn.Module, division: Division, ranks: Ranks) -> tuple[dict[str, Part], set[str]]:
    """Leaves this rank's part of a model, which may be loaded lazily, and makes the ranks compute together. Returns how
    parameters are divided, by name; and the whole ones of whose gradient every rank makes a part. Raises UserError: a
    cut through a quantisation group."""
    names = {id(module): name for name, module in model.named_modules()}
    parts: dict[str, Part] = {}
    partial: set[str] = set()
    if division.vocabulary:  # first, because these are read whole: there is still room
        parts |= _divide_vocabulary(model, names, division, ranks)
    else:
        layout_of(model).positions = PositionsPart(ranks, division.weights)
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        heads, kv_heads, held = attention.n_heads, attention.n_kv_heads, division.kv_heads[ranks.rank]
        head_dim = attention.k_proj.get("linear", attention.k_proj).weight.shape[-2] // kv_heads
        queries = bounds(division.kv_heads, heads // kv_heads * head_dim)
        keys = bounds(division.kv_heads, head_dim)
        attention.n_heads, attention.n_kv_heads = heads // kv_heads * held, held
        inner = "switch_mlp" if "switch_mlp" in mlp else ""
        columns = bounds(division.expert_columns if inner else division.mlp_columns)
        for module, part_of_it, outputs, last, ends in (
            (attention, "", {"q_proj": queries, "k_proj": keys, "v_proj": keys}, "o_proj", queries),
            (mlp, inner, {"gate_proj": columns, "up_proj": columns}, "down_proj", columns),
        ):
            holder, prefix = (module[part_of_it], f"{part_of_it}.") if part_of_it else (module, "")
            divided = _parts(holder[last], f"{prefix}{last}", ends, by_inputs=True)
            for name, ends_of_outputs in outputs.items():
                divided |= _parts(holder[name], f"{prefix}{name}", ends_of_outputs)
            path = names[id(module)]
            parts |= {f"{path}.{name}": part for name, part in divided.items()}
            partial |= {f"{path}.{name}" for name, _ in tree_flatten(module.parameters()) if name not in divided}
            for name, part in divided.items():
                _keep(module, name, part, ranks.rank)
            holder[last] = _joined_inputs(holder[last], ends, ranks)
        if inner:
            # Ranks on different machines round a token's scores differently: they agree on its experts.
            mlp.gate = with_methods(mlp.gate, __call__=lambda call: lambda self, x: ranks.agree_forward(call(self, x)))
        layer.self_attn, layer.mlp = _summed(attention, ranks), _summed(mlp, ranks)
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)
    mx.clear_cache()
    return parts, partial


def _parts(linear: nn.Module, prefix: str, ends: tuple[int, ...], by_inputs: bool = False) -> dict[str, Part]:
    """How a linear layer is divided, by its outputs (A stays whole) or inputs (B stays whole, rank 0 adds the bias)."""
    parts = {}
    for name, array in tree_flatten(linear.parameters()):
        leaf, path, width = name.rpartition(".")[2], f"{prefix}.{name}", array.shape[-1]
        has_experts = array.ndim == 3  # then lora_a is [expert, rank, in], and lora_b [expert, out, rank]
        if not by_inputs and (leaf in STORED or (leaf == "lora_b" and has_experts)):
            parts[path] = Part(-2, ends)
        elif not by_inputs and leaf in ("bias", "lora_b", "m"):
            parts[path] = Part(-1, ends)
        elif by_inputs and leaf in STORED:  # of quantised layers the width is less than the inputs
            if any(end * width % ends[-1] for end in ends):
                raise UserError(f"strategy=sharded: {list(ends)} would cut through a quantisation group of {prefix}")
            parts[path] = Part(-1, tuple(end * width // ends[-1] for end in ends))
        elif by_inputs and leaf == "bias":
            parts[path] = Part(-1, (0, *[width] * (len(ends) - 1)))
        elif by_inputs and leaf == "lora_a":
            parts[path] = Part(-1 if has_experts else -2, ends)
    return parts


def _keep(module: nn.Module, name: str, part: Part, rank: int) -> None:
    """Puts the rank's part of a parameter in its place, or takes the parameter away where the part is empty."""
    *path, leaf = name.split(".")
    for step in path:
        module = module[step]
    if part.size(rank) == 0:
        del module[leaf]
    else:
        module[leaf] = mx.contiguous(part.of(module[leaf], rank))  # so that the whole can be freed
        mx.eval(module[leaf])


def _divide_vocabulary(model: nn.Module, names: dict[int, str], division: Division, ranks: Ranks) -> dict[str, Part]:
    """Leaves this rank its tokens' rows of the embedding and the head."""
    rows, parts = bounds(division.vocabulary), {}
    embedding, head = model.model.embed_tokens, model.get("lm_head")
    for table in (embedding,) if head is None else (embedding, head):
        name = names[id(table)]
        if not isinstance(table, nn.Embedding | nn.QuantizedEmbedding | nn.Linear | nn.QuantizedLinear):
            raise UserError(
                f"model.shard_vocabulary cannot divide {name}, which has an adapter; take it from model.keys"
            )
        for leaf, _ in tree_flatten(table.parameters()):
            parts[f"{name}.{leaf}"] = Part(-2, rows)
            _keep(table, leaf, parts[f"{name}.{leaf}"], ranks.rank)
    part = layout_of(model).vocabulary = VocabularyPart(ranks, rows)
    embed = lambda call: lambda self, tokens: part.embed(lambda local: call(self, local), tokens)  # noqa: E731
    logits = lambda call: lambda self, x: part.logits(call(self, x))  # noqa: E731
    model.model.embed_tokens = with_methods(embedding, __call__=embed, as_linear=logits)
    if head is not None:
        model.lm_head = with_methods(head, __call__=logits)
    return parts


def _summed(module: nn.Module, ranks: Ranks) -> nn.Module:
    def summed(plain: Any) -> Any:
        return lambda self, x, *args, **options: ranks.sum_forward(plain(self, ranks.sum_backward(x), *args, **options))

    return with_methods(module, __call__=summed)


def _joined_inputs(linear: nn.Module, ends: tuple[int, ...], ranks: Ranks) -> nn.Module:
    """An adapted layer where a rank sees some of the inputs only."""
    if isinstance(dropout := linear.get("dropout"), TokenDropout):  # ranks together drop what one machine would
        dropout._size, dropout._part = ends[-1], slice(*ends[ranks.rank : ranks.rank + 2])
    if not isinstance(linear, DoRA):
        return linear

    def of_whole_rows(squares: Any) -> Any:
        return lambda self, after: mx.stop_gradient(ranks.sum_forward(squares(self, after)))

    return with_methods(linear, squares=of_whole_rows)
