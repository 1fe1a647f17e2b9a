"""Adapters of experts as peft saves them with transformers 5, whose experts are two parameters of all experts each.

`mlp.experts.gate_up_proj` [E, 2 I, D] and `mlp.experts.down_proj` [E, D, I], adapted by LoraConfig(target_parameters):
peft wraps one around the other, so that their names are `mlp.experts.base_layer` and `mlp.experts`, in either order.
A is [E r, in], expert by expert, and B [out, r E], rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from lib.errors import UserError

OUTER = ".experts"
INNER = ".experts.base_layer"
Factors = dict[str, mx.array]  # lora_a: A, lora_b: B


def is_fused(layer: str) -> bool:
    """Whether a layer of PEFT's file adapts a parameter of all experts."""
    return layer.endswith((OUTER, INNER))


def unfused(
    layers: Mapping[str, Factors], rank_of: Callable[[str], int], where: str
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Our arrays of stacked experts, and of each of our layers the parameter that it was a part of.

    Gate and up projections have one A in PEFT, and a copy each here.

    Args:
        layers: by PEFT's names.
        rank_of: the rank of an adapted parameter, by its full name.

    Raises:
        UserError: only one of the two parameters is adapted, or their shapes do not fit each other.
    """
    arrays: dict[str, mx.array] = {}
    parameters: dict[str, str] = {}
    for block in sorted({layer.removesuffix(".base_layer").removesuffix(OUTER) for layer in layers}):
        inner, outer = layers.get(block + INNER), layers.get(block + OUTER)
        if inner is None or outer is None:
            raise UserError(f"{where}: {block}{OUTER} adapts one of gate_up_proj and down_proj; both or neither fit")
        gate_up, down = (inner, outer) if _are_gate_up_and_down(inner, outer) else (outer, inner)
        if not _are_gate_up_and_down(gate_up, down):
            raise UserError(f"{where}: {block}{OUTER}: its arrays are not those of gate_up_proj and down_proj")
        target = f"{block}.switch_mlp"
        for part, factors, names in (
            ("gate_up_proj", gate_up, ("gate_proj", "up_proj")),
            ("down_proj", down, ("down_proj",)),
        ):
            parameter = f"{block}{OUTER}.{part}"
            a, b = _by_expert(factors, rank_of(parameter))
            for name, own in zip(names, mx.split(b, len(names), axis=1), strict=True):
                arrays |= {f"{target}.{name}.lora_a": a, f"{target}.{name}.lora_b": own}
                parameters[f"{target}.{name}"] = parameter
    return arrays, parameters


def _are_gate_up_and_down(one: Factors, other: Factors) -> bool:
    """[2 I, D] and [D, I], of one expert's weights."""
    (inputs, outputs), (other_inputs, other_outputs) = (
        (factors["lora_a"].shape[1], factors["lora_b"].shape[0]) for factors in (one, other)
    )
    return bool(inputs == other_outputs and outputs == 2 * other_inputs)


def _by_expert(factors: Factors, rank: int) -> tuple[mx.array, mx.array]:
    """A [E, r, in] and B [E, out, r]."""
    a, b = factors["lora_a"], factors["lora_b"]
    return a.reshape(-1, rank, a.shape[1]), b.reshape(b.shape[0], rank, -1).transpose(2, 0, 1)
