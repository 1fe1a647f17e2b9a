"""An independent reference in float64 and plain numpy: a Llama, log-probabilities one token at a time, and derivatives by differences."""

from collections.abc import Callable

import numpy as np

Weights = dict[str, np.ndarray]


def llama_logits(
    weights: Weights, tokens: list[int], heads: int, kv_heads: int, theta: float = 10000.0, eps: float = 1e-5
) -> np.ndarray:
    """Logits [L, V] of one unpadded sequence; `weights` by mlx-lm's names, adapters already merged in."""
    x = weights["model.embed_tokens.weight"][tokens]
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    length, hidden = x.shape
    head_dim = weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // heads
    causal = np.triu(np.full((length, length), -np.inf), 1)
    for i in range(layers):
        own = f"model.layers.{i}."
        w = {name.removeprefix(own): value for name, value in weights.items() if name.startswith(own)}
        h = _rms_norm(x, w["input_layernorm.weight"], eps)
        q = _rope((h @ w["self_attn.q_proj.weight"].T).reshape(length, heads, head_dim), theta)
        k = _rope((h @ w["self_attn.k_proj.weight"].T).reshape(length, kv_heads, head_dim), theta)
        v = (h @ w["self_attn.v_proj.weight"].T).reshape(length, kv_heads, head_dim)
        outputs = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, group].T / np.sqrt(head_dim) + causal
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            outputs.append(scores / scores.sum(axis=-1, keepdims=True) @ v[:, group])
        x = x + np.concatenate(outputs, axis=-1) @ w["self_attn.o_proj.weight"].T
        h = _rms_norm(x, w["post_attention_layernorm.weight"], eps)
        gate = h @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _rms_norm(x, weights["model.norm.weight"], eps) @ head.T


def completion_logp(weights: Weights, prompt: list[int], completion: list[int], heads: int, kv_heads: int) -> float:
    """log pi(completion | prompt), summed token by token."""
    logits = llama_logits(weights, [*prompt, *completion], heads, kv_heads)
    total = 0.0
    for i, token in enumerate(completion):
        row = logits[len(prompt) + i - 1]
        total += row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
    return float(total)


def wpo_weight(weights: Weights, prompt: list[int], completion: list[int], heads: int, kv_heads: int) -> float:
    """exp of the mean over the completion's tokens of log pi(y_t) - log sum_v pi(v)^2 (arXiv:2406.11827, eq. 2)."""
    logits = llama_logits(weights, [*prompt, *completion], heads, kv_heads)
    aligned = []
    for i, token in enumerate(completion):
        row = np.exp(logits[len(prompt) + i - 1])
        row = row / row.sum()
        aligned.append(np.log(row[token] / (row * row).sum()))
    return float(np.exp(np.mean(aligned)))


def numerical_gradient(f: Callable[[], float | np.ndarray], array: np.ndarray, step: float = 1e-4) -> np.ndarray:
    """df/darray by fourth-order central differences on every coordinate; error about step^4, far below 1e-8.

    Of a function with an array as its value, shape [*array, *value].
    """
    gradient = np.zeros((*array.shape, *np.shape(f())))
    for index in np.ndindex(array.shape):
        kept, values = array[index], []
        for offset in (-2, -1, 1, 2):
            array[index] = kept + offset * step
            values.append(f())
        array[index] = kept
        gradient[index] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
    return gradient


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _rope(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding of x [L, heads, D]: dimension i turns with i + D/2."""
    length, _, dim = x.shape
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
