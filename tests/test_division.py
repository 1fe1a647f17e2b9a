"""What a model weighs and how it is divided, by hand and by exhaustive search; tests/test_shard.py has the ranks."""

import dataclasses
import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lib.model.partition import Division, Part, apportion, bounds, divide, model_shape_of, rank_bytes

MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 8,
    "num_hidden_layers": 5,
    "intermediate_size": 20,
    "moe_intermediate_size": 6,
    "num_experts": 4,
    "decoder_sparse_step": 2,  # every second block, ...
    "mlp_only_layers": [3],  # ... but not this one: the second block alone
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "vocab_size": 11,
}


def test_the_weights_of_a_mixture_of_experts_by_hand() -> None:
    shape = model_shape_of(MIXTURE)
    assert (shape.blocks, shape.expert_blocks, shape.experts, shape.is_tied) == (5, 1, 4, False)
    assert (shape.mlp_columns, shape.expert_columns, shape.group_size) == (20, 6, 1)
    assert 720 == 5 * 8 * 3 * (2 + 2 + 1 + 1), "of a KV head: two queries, their outputs, a key, a value"
    norms, routers = 8 * (2 * 5 + 1), 8 * 4
    for rank, divided in ((0, 1 * 720 + 12 * 96 + 2 * 96), (1, 1 * 720 + 8 * 96 + 4 * 96)):
        division = Division((1, 1), (12, 8), (2, 4))
        assert rank_bytes(shape, division, rank) == (4 * divided, 4 * (11 * 16 + norms + routers))
        rows = dataclasses.replace(division, vocabulary=(5, 6))
        assert rank_bytes(shape, rows, rank) == (4 * (divided + (5, 6)[rank] * 16), 4 * (norms + routers))
        tied = dataclasses.replace(shape, is_tied=True)
        assert rank_bytes(tied, division, rank)[1] == 4 * (11 * 8 + norms + routers)
    assert rank_bytes(shape, Division((1, 1), (), ()), 0)[0] == 4 * 720


def test_dimensions_that_a_configuration_leaves_out_or_says_in_its_own_way() -> None:
    everywhere = model_shape_of({**MIXTURE, "decoder_sparse_step": None, "mlp_only_layers": None})
    every_third = {**MIXTURE, "num_hidden_layers": 7, "decoder_sparse_step": 3}  # the third and the sixth
    assert [model_shape_of({**every_third, "mlp_only_layers": only}).expert_blocks for only in ([], [5])] == [2, 1]
    assert everywhere.expert_blocks == 5 and everywhere.mlp_columns == 0 and everywhere.expert_columns == 6
    plain = {**MIXTURE, "model_type": "llama", "num_experts": 0}
    dense = model_shape_of({**plain, "num_key_value_heads": None, "head_dim": None})
    assert (dense.kv_heads, dense.head_dim, dense.expert_columns, dense.is_tied) == (4, 2, 0, True)
    assert not model_shape_of({**plain, "tie_word_embeddings": False}).is_tied
    for stored, dtype, number_bytes in (({}, None, 4), ({"torch_dtype": "bfloat16"}, None, 2), ({}, "float16", 2)):
        shape = model_shape_of({**MIXTURE, **stored}, dtype)
        assert shape.weight_bytes == shape.other_bytes == number_bytes
    loaded = model_shape_of({**MIXTURE, "dtype": "bfloat16"}, "float32")  # not as it is stored
    assert loaded.other_bytes == 4
    affine = {"group_size": 32, "bits": 4}
    quantised = model_shape_of({**MIXTURE, "torch_dtype": "bfloat16", "quantization": affine})
    assert (quantised.group_size, quantised.weight_bytes, quantised.other_bytes) == (32, 0.5 + 4 / 32, 2)
    newer = model_shape_of({**MIXTURE, "quantization_config": {**affine, "mode": "mxfp4"}})
    assert newer.weight_bytes == 0.5 + 1 / 32
    mixed = affine | {"layers.0.self_attn.o_proj": {"group_size": 64, "bits": 8}}
    mixed |= {"layers.1.mlp.up_proj": {"group_size": 128}}
    assert model_shape_of({**MIXTURE, "quantization": {**mixed, "layers.0.mlp.down_proj": False}}).group_size == 64


@given(st.integers(1, 5), st.lists(st.floats(0.01, 10), min_size=1, max_size=4), st.integers(0, 6))
def test_parts_are_as_near_to_their_due_as_whole_parts_can_be(unit: int, weights: list[float], more: int) -> None:
    """By least squares, over every way to give everyone one at least."""
    units, ranks = len(weights) + more, len(weights)
    counts = apportion(units * unit, weights, unit)
    assert sum(counts) == units * unit and all(count % unit == 0 and count >= unit for count in counts)
    due = np.array(weights) / sum(weights) * units

    def missed(parts: tuple[int, ...]) -> float:
        return float(np.square(np.array(parts) - due).sum())

    ways = [w for w in itertools.product(range(1, units + 1), repeat=ranks) if sum(w) == units]
    assert missed(tuple(count // unit for count in counts)) <= min(map(missed, ways)) + 1e-6


def test_columns_are_tidy_where_there_are_enough_and_whole_groups_in_any_case() -> None:
    llama = {**MIXTURE, "model_type": "llama", "num_experts": 0}
    for width, weights, expected in (
        (64 * 32, [1, 2], 64),  # sixteen parts of 64 columns for each of two ranks
        (64 * 31, [1, 2], 1),
        (64 * 32, [1, 1, 3], 1),
        (64 * 32 + 1, [1, 2], 1),
    ):
        stored = {**llama, "intermediate_size": width, "num_attention_heads": 4, "num_key_value_heads": 4}
        columns = divide(model_shape_of(stored), weights).mlp_columns
        assert sum(columns) == width and (all(count % 64 == 0 for count in columns) == (expected == 64)), columns
    quantised = {**llama, "intermediate_size": 96, "quantization": {"group_size": 32, "bits": 4}, "head_dim": 32}
    assert all(count % 32 == 0 for count in divide(model_shape_of(quantised), [1, 2]).mlp_columns)
    rows = divide(model_shape_of({**llama, "vocab_size": 64 * 32 * 2}), [1, 3], vocabulary=True).vocabulary
    assert divide(model_shape_of({**llama, "vocab_size": 7}), [3, 4], vocabulary=True).vocabulary == (3, 4)
    assert rows == (1024, 3072) and divide(model_shape_of(llama), [1, 3]).vocabulary == ()


def test_a_part_is_a_slice_of_an_axis_counted_from_the_end() -> None:
    whole = np.arange(2 * 5 * 3).reshape(2, 5, 3)
    assert bounds((2, 6), 4) == (0, 8, 32) and bounds((2, 3)) == (0, 2, 5)
    middle, last = Part(-2, (0, 2, 5)), Part(-1, (0, 1, 3))
    assert [middle.size(rank) for rank in (0, 1)] == [2, 3]
    assert np.array_equal(middle.of(whole, 1), whole[:, 2:5]) and np.array_equal(last.of(whole, 0), whole[..., :1])
    assert middle.shape((2, 2, 3)) == (2, 5, 3) and middle.shape((2, 5, 3), 1) == (2, 3, 3)
    assert last.shape((2, 5, 9), 0) == (2, 5, 1)
