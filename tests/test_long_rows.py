"""Attention in blocks of queries: the same outputs and gradients, and memory that grows with the length alone."""

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.config.settings import ModelSettings
from lib.model import long_attention
from lib.model.load import load
from lib.model.long_attention import LONG, MULTIPLE, SCORE_BYTES, TILE, block_rows, causal_attention, is_fused
from lib.model.stream_trial import cannot_share_prompts
from tests.tiny import model_folder


def drawn(sequences: int, heads: int, kv_heads: int, length: int, positions: int) -> list[mx.array]:
    mx.random.seed(length)
    shapes = [(heads, length), *[(kv_heads, positions)] * 2]
    return [mx.random.normal((sequences, count, n, 8)) for count, n in shapes]


def both(inputs: list[mx.array]) -> list[np.ndarray]:
    """The output, and the gradients of a sum of it."""
    dy = mx.sin(mx.arange(inputs[0].size)).reshape(inputs[0].shape)
    outputs, gradients = mx.vjp(lambda q, k, v: causal_attention(q, k, v, scale=0.35), inputs, [dy])
    return [np.array(array) for array in (*outputs, *gradients)]


@pytest.mark.parametrize("rows", [1, 7, 8, 15])
@pytest.mark.parametrize(("length", "positions"), [(16, 16), (16, 21), (13, 40)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_blocks_give_what_all_at_once_gives(rows: int, length: int, positions: int, kv_heads: int, monkeypatch) -> None:
    wanted = both(inputs := drawn(2, 4, kv_heads, length, positions))
    monkeypatch.setattr("lib.model.long_attention.block_rows", lambda *_: min(rows, length))
    for found, array in zip(both(inputs), wanted, strict=True):
        assert np.linalg.norm(found - array) <= 1e-5 * np.linalg.norm(array)


@settings(max_examples=50)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 40_000), st.integers(0, 10_000), st.sampled_from([2, 4]))
def test_a_blocks_scores_have_a_limit(sequences: int, heads: int, queries: int, before: int, item: int) -> None:
    keys = queries + before
    rows = block_rows(False, sequences, heads, queries, keys, item)
    assert 1 <= rows <= queries and (rows == queries or rows % MULTIPLE == 0)
    assert keys > LONG or rows == queries
    if rows > MULTIPLE and keys > LONG:
        assert rows * sequences * heads * keys * item <= SCORE_BYTES
    blocks = -(-queries // block_rows(True, sequences, heads, queries, keys, item))
    assert blocks == (4 if queries >= 8192 and before <= queries else 1), "more would copy the keys too often"


def test_only_cudnn_keeps_no_scores() -> None:
    assert is_fused("cuda", 64, 2) and is_fused("cuda", 128, 2)
    assert not any(is_fused("cuda", *other) for other in [(256, 2), (100, 2), (64, 4)]) and not is_fused("metal", 64, 2)


@pytest.mark.parametrize(("length", "positions"), [(1, 1), (5, 130), (127, 127), (129, 140)])
def test_whole_tiles_give_what_other_lengths_give(length: int, positions: int, monkeypatch) -> None:
    inputs = drawn(2, 4, 2, length, positions)
    wanted, lengths, kernel = both(inputs), [], mx.fast.scaled_dot_product_attention

    def noted(queries: mx.array, *arrays: mx.array, **options: Any) -> mx.array:
        lengths.append(queries.shape[2])
        return kernel(queries, *arrays, **options)

    monkeypatch.setattr("lib.model.long_attention.is_fused", lambda *_: True)
    monkeypatch.setattr("lib.model.long_attention.device", lambda: "cuda")
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    for found, array in zip(both(inputs), wanted, strict=True):
        assert np.linalg.norm(found - array) <= 1e-5 * np.linalg.norm(array)
    assert [each % TILE for each in lengths] == [0]


@pytest.mark.parametrize(("length", "positions"), [(512, 512), (640, 700), (600, 600)])
def test_a_kernels_blocks_give_what_all_at_once_gives(length: int, positions: int, monkeypatch) -> None:
    inputs, sinks = drawn(2, 4, 2, length, positions), mx.array([0.5, -1.0, 0.0, 2.0])
    wanted, with_sinks = both(inputs), causal_attention(*inputs, scale=0.35, sinks=sinks)
    monkeypatch.setattr("lib.model.long_attention.is_fused", lambda *_: True)
    monkeypatch.setattr("lib.model.long_attention.device", lambda: "cuda")
    monkeypatch.setattr(long_attention, "FUSED_LONG", 512)
    read, kernel = [], mx.fast.scaled_dot_product_attention

    def noted(queries: mx.array, keys: mx.array, *arrays: mx.array, **options: Any) -> mx.array:
        read.append((queries.shape[2], keys.shape[2]))
        return kernel(queries, keys, *arrays, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    for found, array in zip(both(inputs), wanted, strict=True):
        assert np.linalg.norm(found - array) <= 1e-5 * np.linalg.norm(array)
    ends = {512: [128, 256, 384, 512], 600: [256, 512, 640], 640: [256, 512, 640]}[length]
    rows = [end - start for start, end in itertools.pairwise([0, *ends])]
    wanted_reads = [(own, positions - length + end) for own, end in zip(rows, ends, strict=True)]
    assert read == wanted_reads[::-1], "no block reads what it does not see"
    found = causal_attention(*inputs, scale=0.35, sinks=sinks)
    assert mx.linalg.norm(found - with_sinks).item() <= 1e-5 * mx.linalg.norm(with_sinks).item()


def test_a_backward_kernel_that_mlx_reports_is_taken(monkeypatch) -> None:
    inputs = drawn(1, 2, 1, 64, 80)
    wanted = both(inputs)
    shapes = inputs[0].shape, inputs[1].shape, mx.float32
    assert not long_attention.has_backward_kernel(*shapes) or mx.default_device() != mx.cpu
    monkeypatch.setattr(long_attention, "has_backward_kernel", lambda *given: given == shapes)
    monkeypatch.setattr(long_attention, "block_rows", lambda *_: pytest.fail("in blocks"))
    assert all(np.array_equal(a, b) for a, b in zip(both(inputs), wanted, strict=True))


def test_memory_grows_with_the_length_and_not_with_its_square(monkeypatch) -> None:
    monkeypatch.setattr(long_attention, "LONG", 256)
    monkeypatch.setattr(long_attention, "SCORE_BYTES", 2**20)

    def peak_bytes(length: int) -> int:
        inputs = drawn(1, 2, 1, length, length)
        mx.eval(inputs)
        mx.clear_cache()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        gradients = mx.grad(lambda q, k, v: causal_attention(q, k, v, scale=0.35).sum(), argnums=(0, 1, 2))(*inputs)
        mx.eval(gradients)
        return mx.get_peak_memory() - held

    short, middle, long = (peak_bytes(length) for length in (512, 1024, 2048))
    assert long < 2048**2 * 2 * 4, "less than the scores alone"
    assert long - middle < 3 * (middle - short) + 2**22, (short, middle, long)


def test_a_stream_in_whole_tiles_is_still_as_whole_rows(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("lib.model.long_attention.is_fused", lambda *_: True)
    monkeypatch.setattr("lib.model.long_attention.device", lambda: "cuda")
    model = load(ModelSettings(path=str(model_folder(tmp_path)), random_init=True), 0)
    assert cannot_share_prompts(model) is None
