"""Quantised layers: dequantised or packed, the same products and gradients; which of them is taken; what is held."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from lib.config.settings import ModelSettings
from lib.data.batch import collate
from lib.model import adapters, logps, lora_layers, quantised, stream_trial, token_stream
from lib.model import load as load_module
from tests.rounding import roundoff
from tests.test_forward import draw
from tests.tiny import stored_model

FORMATS = [("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)]
FORMATS += [("affine", 4, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
INPUTS, OUTPUTS, TOKENS, EXPERTS = 128, 64, 5, 3
ALWAYS, NEVER = 0, 2**62  # tokens from which on weights are dequantised


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes every product the way that is given."""
    yield lambda tokens: monkeypatch.setattr(quantised, "DEQUANTISE_FROM", {quantised.device(): tokens})


def both(function: Callable[[mx.array], mx.array], x: mx.array) -> list[np.ndarray]:
    """What a function gives, and the gradient of a sum of it, in float64."""
    outputs, gradients = mx.vjp(function, [x], [mx.sin(mx.arange(function(x).size)).reshape(function(x).shape)])
    return [np.array(array.astype(mx.float32), np.float64) for array in (*outputs, *gradients)]


def assert_near(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
@pytest.mark.parametrize("chosen", [ALWAYS, NEVER])
def test_every_way_is_the_plain_formula(
    mode: str, bits: int, group_size: int, chosen: int, choose: Callable[[int], None]
) -> None:
    choose(chosen)
    mx.random.seed(bits)
    linear = nn.QuantizedLinear.from_linear(nn.Linear(INPUTS, OUTPUTS), group_size, bits, mode)
    linear.bias = mx.random.normal((OUTPUTS,))
    table = nn.QuantizedEmbedding.from_embedding(nn.Embedding(OUTPUTS, INPUTS), group_size, bits, mode)
    experts = SwitchLinear(INPUTS, OUTPUTS, EXPERTS).to_quantized(group_size, bits, mode)
    model = nn.Sequential(linear, table, experts)
    quantised.use_fast_layers(model)
    linear, table, experts = model.layers

    def weight(layer: nn.Module) -> mx.array:
        biases = layer.get("biases")
        return mx.dequantize(layer.weight, layer.scales, biases, group_size, bits, mode, dtype=mx.float32)

    x = mx.random.normal((TOKENS, 1, INPUTS))
    assert_near(both(linear, x), both(lambda x: x @ weight(linear).T + linear.bias, x))
    assert_near(both(table.as_linear, x), both(lambda x: x @ weight(table).T, x))
    chosen_experts = mx.array([[0, 2], [2, 0], [1, 1], [2, 1], [0, 0]])

    def of_experts(x: mx.array) -> mx.array:
        y = mx.einsum("tki,toi->tko", mx.repeat(x, 2, axis=1), mx.zeros((TOKENS, OUTPUTS, INPUTS)))
        for k in range(2):
            own = mx.take(weight(experts), chosen_experts[:, k], axis=0)
            y[:, k] = (own @ x[:, 0, :, None]).squeeze(-1) + experts.bias[chosen_experts[:, k]]
        return y

    assert_near(both(lambda x: experts(x[:, None], chosen_experts).squeeze(-2), x), both(of_experts, x))
    order = mx.argsort(chosen_experts.flatten())  # as mlx-lm sorts the tokens of a longer input
    rows = mx.take(x, order // 2, axis=0)
    flat = chosen_experts.flatten()[order]
    found = both(lambda x: experts(x, flat, sorted_indices=True), rows)
    own, bias = weight(experts)[flat], experts.bias[flat][:, None]
    assert_near(found, both(lambda x: (own @ x.swapaxes(1, 2)).swapaxes(1, 2) + bias, rows))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_dequantised_products_round_as_plain_ones(dtype: mx.Dtype, choose: Callable[[int], None]) -> None:
    choose(ALWAYS)
    linear = nn.QuantizedLinear.from_linear(nn.Linear(INPUTS, OUTPUTS, bias=False), 64, 4)
    linear.set_dtype(dtype)
    linear = quantised.fast_layer(linear)
    weight = mx.dequantize(linear.weight, linear.scales, linear.biases, 64, 4)
    assert weight.dtype == dtype
    x = mx.random.normal((TOKENS, INPUTS)).astype(dtype)
    for found, wanted in zip(both(linear, x), both(lambda x: x @ weight.T, x), strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("keys", "compiled"),
    [(None, False), (None, True), (["self_attn.q_proj", "mlp.down_proj"], False), (["lm_head"], False)],
)
def test_log_probabilities_and_gradients_of_a_model_are_equal(
    tmp_path, compiled: bool, keys: list[str] | None, choose: Any, monkeypatch
) -> None:
    monkeypatch.setattr(logps, "LOGITS_BYTES", 7 * 48 * 4)  # the head's products are several
    settings = ModelSettings(path=str(stored_model(tmp_path, quantised=True)), keys=keys)
    model = load_module.load(settings, 0)
    adapters.make_trainable(model, settings, 0)
    mx.random.seed(1)
    for part in [part for part in model.modules() if isinstance(part, LoRALinear)]:
        part.lora_b = 0.02 * mx.random.normal(part.lora_b.shape)
    assert stream_trial.cannot_share_prompts(model.train()) is None
    inputs = token_stream.arrays_of(collate(draw(5, 3), 4, True).inputs)

    def loss() -> mx.array:
        return (logps.completion_logps(model, inputs) * mx.array([1.0, -1.0])).sum()

    def computed() -> dict[str, np.ndarray]:
        function = nn.value_and_grad(model, loss)
        state = [model.state]
        value, gradients = (mx.compile(function, inputs=state, outputs=state) if compiled else function)()
        return {"loss": np.array(value), **{name: np.array(a) for name, a in tree_flatten(gradients)}}

    names = [name for name, _ in tree_flatten(model.parameters())]
    choose(NEVER)
    wanted = computed()
    choose(ALWAYS)
    found = computed()
    scored = np.array(logps.completion_logps(model.eval(), inputs))
    choose(NEVER)
    assert np.allclose(scored, np.array(logps.completion_logps(model, inputs)), rtol=1e-5)
    for name, array in wanted.items():
        assert np.linalg.norm(found[name] - array) <= 1e-5 * np.linalg.norm(array) + roundoff(64), name
    assert [name for name, _ in tree_flatten(model.parameters())] == names


def test_dora_is_the_same_and_keeps_no_weights(tmp_path, choose: Callable[[int], None]) -> None:
    settings = ModelSettings(path=str(stored_model(tmp_path, quantised=True)), method="dora")
    model = load_module.load(settings, 0)
    adapters.make_trainable(model, settings, 0)
    layer = model.layers[0].mlp.down_proj
    assert type(layer) is lora_layers.DoRA
    layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)
    layer.linear.bias = mx.random.normal((64,))
    layer.linear.freeze()
    x = mx.random.normal((TOKENS, 64))
    for chosen in (ALWAYS, NEVER):
        choose(chosen)
        assert_near(both(layer, x), both(lambda x: DoRALinear.__call__(layer, x), x))

        def loss(names: dict[str, mx.array], kind: type[DoRALinear]) -> mx.array:
            layer.update(names)
            return mx.sin(kind.__call__(layer, x)).sum()

        given = layer.trainable_parameters()
        ours, theirs = (dict(tree_flatten(mx.grad(loss)(given, kind))) for kind in (lora_layers.DoRA, DoRALinear))
        layer.update(given)
        assert ours.keys() == theirs.keys() == {"m", "lora_a", "lora_b"}
        assert_near(*[[np.array(found[name]) for name in ours] for found in (ours, theirs)])


@pytest.mark.parametrize("compiled", [False, True])
def test_no_more_than_a_few_layers_weights_are_held(compiled: bool, choose: Callable[[int], None]) -> None:
    choose(ALWAYS)
    width = 512

    def peak_bytes(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        nn.quantize(model)
        quantised.use_fast_layers(model)
        x = mx.random.normal((2, width))
        mx.eval(model.parameters(), x)
        gradient = mx.grad(lambda x: model(x).sum())
        gradient = mx.compile(gradient, inputs=model.state) if compiled else gradient
        mx.eval(gradient(x))  # traces
        mx.clear_cache()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        mx.eval(gradient(x))
        return mx.get_peak_memory() - held

    few, many = peak_bytes(24), peak_bytes(72)
    assert many - few < 12 * 4 * width**2, (few, many)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_dora_takes_its_width_from_the_packed_weights(bits: int) -> None:
    model = nn.Sequential(nn.QuantizedLinear(128, 64, False, 64, bits))
    quantised.use_fast_layers(model)
    model.layers[0] = DoRALinear.from_base(model.layers[0], 4)
    lora_layers.use_low_rank_linear(model)
    assert model.layers[0].lora_a.shape == (128, 4) and model(mx.ones((2, 128))).shape == (2, 64)
