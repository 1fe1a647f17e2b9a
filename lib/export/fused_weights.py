"""An adapter merged into its base model's weights: every trained array lands in one of them, or nothing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from lib.errors import UserError
from lib.export.trained_run import TrainedRun
from lib.model.adapter_files import trainable

QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)
ADAPTED = (LoRALinear, LoRASwitchLinear, LoRAEmbedding, DoRALinear, DoRAEmbedding)


@dataclass(frozen=True)
class AdaptedLayer:
    """One layer with low-rank factors.

    Args:
        name: of the layer, as the base model has it.
        module: mlx-lm's, with the base's layer inside.
        base: that layer.
        magnitude: float32 [out] of DoRA; None of LoRA.
    """

    name: str
    module: nn.Module
    base: nn.Module
    magnitude: mx.array | None

    @property
    def arrays(self) -> list[str]:
        """The names of what was trained of it."""
        return [f"{self.name}.{part}" for part in ("lora_a", "lora_b", *(["m"] if self.magnitude is not None else []))]

    @property
    def rank(self) -> int:
        """Columns of lora_a [in, r]; of experts [E, r, in] rows."""
        return int(self.module.lora_a.shape[1])

    @property
    def change(self) -> mx.array:
        """What is added to the weight: scale B A, float32 [(experts,) out, in]; of embeddings [vocabulary, D]."""
        a, b, scale = self.module.lora_a, self.module.lora_b, self.module.scale
        if isinstance(self.module, LoRASwitchLinear):
            return scale * (b @ a.reshape(b.shape[0], -1, a.shape[-1]))  # [E, out, r] [E, r, in]
        product = a @ b  # a linear's: [in, r] [r, out]
        return scale * (product if isinstance(self.base, nn.Embedding | nn.QuantizedEmbedding) else product.T)

    @property
    def weight(self) -> mx.array:
        """The merged weight, float32: W + scale B A, of DoRA (arXiv:2402.09353, equation 5) with rows of length m."""
        merged = plain_weight(self.base) + self.change
        if self.magnitude is None:
            return merged
        return (self.magnitude / mx.linalg.norm(merged, axis=1))[:, None] * merged


def adapted_layers(model: nn.Module) -> Iterator[AdaptedLayer]:
    """The layers of a model that have low-rank factors.

    Raises:
        UserError: some trained array belongs to none of them; it would be lost.
    """
    left = set(trainable(model))
    for name, module in model.named_modules():
        if isinstance(module, ADAPTED):
            base = module.embedding if isinstance(module, LoRAEmbedding | DoRAEmbedding) else module.linear
            layer = AdaptedLayer(name, module, base, module.get("m"))
            left -= set(layer.arrays)
            yield layer
    if left:
        raise UserError(
            f"{len(left)} trained arrays belong to no layer that can be merged, the first is {min(left)}; "
            "--to mlx keeps them as they are"
        )


def plain_weight(layer: nn.Module) -> mx.array:
    """A layer's weight, float32, dequantised where it is quantised."""
    if not isinstance(layer, QUANTISED):
        return layer.weight.astype(mx.float32)
    return mx.dequantize(
        layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode
    ).astype(mx.float32)


def fused_model(run: TrainedRun) -> nn.Module:
    """The trained model without an adapter: plain layers, float32, not evaluated yet.

    Raises:
        UserError: some trained array would be lost.
    """
    model = _merged(run, plain_layer)
    quantised = {
        name: plain_layer(module, plain_weight(module))
        for name, module in model.named_modules()
        if isinstance(module, QUANTISED)
    }
    model.update_modules(tree_unflatten(list(quantised.items())))
    return model


def requantised_model(run: TrainedRun) -> nn.Module:
    """The trained model without an adapter, whose layers are quantised where the base's are, in the same way.

    Layers that have no adapter keep their bits.

    Raises:
        UserError: some trained array would be lost.
    """

    def layer_of(base: nn.Module, weight: mx.array) -> nn.Module:
        plain = plain_layer(base, weight)
        if not isinstance(base, QUANTISED):
            return plain
        quantised: nn.Module = plain.to_quantized(group_size=base.group_size, bits=base.bits, mode=base.mode)
        return quantised

    return _merged(run, layer_of)


def _merged(run: TrainedRun, layer_of: Callable[[nn.Module, mx.array], nn.Module]) -> nn.Module:
    """The trained model, in which layers with an adapter are those that `layer_of` makes of base and merged weight."""
    model = run.model()
    if run.settings.model.method != "full":
        merged = {layer.name: layer_of(layer.base, layer.weight) for layer in adapted_layers(model)}
        model.update_modules(tree_unflatten(list(merged.items())))
    return model.eval()


def plain_layer(base: nn.Module, weight: mx.array) -> nn.Module:
    """A layer like the base's, without quantisation, with another weight."""
    plain: nn.Module
    if isinstance(base, nn.Embedding | nn.QuantizedEmbedding):
        plain = nn.Embedding(1, 1)
    elif isinstance(base, SwitchLinear | QuantizedSwitchLinear):
        plain = SwitchLinear(1, 1, 1, bias=False)
    else:
        plain = nn.Linear(1, 1, bias=False)
    plain.weight = weight
    if "bias" in base:
        plain.bias = base.bias
    return plain
