"""What travels compressed: round trips, their errors' bounds, and error feedback that loses nothing in the long run."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.config.settings import SyncSettings
from lib.distributed import compression
from lib.distributed.compression import BLOCK, decode, encode
from lib.distributed.world import World

KINDS = ["none", "bf16", "int8", "topk"]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from([(1,), (3, 5), (BLOCK,), (2, BLOCK + 1), (7, 100), (2, 3, 4)]))
    return (rng.normal(size=shape) * 10 ** draw(st.integers(-20, 20))).astype(np.float32)


@settings(max_examples=60)
@given(arrays(), st.floats(0.001, 1))
def test_a_round_trip_is_within_its_bound(array: np.ndarray, fraction: float) -> None:
    for kind in KINDS:
        back = np.array(decode(encode(mx.array(array), kind, fraction), kind, array.shape))
        error = np.abs(back.astype(np.float64) - array)
        assert back.shape == array.shape and back.dtype == np.float32
        if kind == "none":
            assert not error.any()
        elif kind == "bf16":
            assert (error <= np.abs(array) * 2.0**-8).all()
        elif kind == "int8":
            # Half a step of the block's largest value over 127, by block.
            flat = np.pad(np.abs(array).reshape(-1), (0, -array.size % BLOCK)).reshape(-1, BLOCK)
            bound = np.repeat(flat.max(axis=1) / 127 / 2, BLOCK)[: array.size].reshape(array.shape)
            assert (error <= bound * (1 + 1e-5) + 1e-44).all()
        else:
            count = min(array.size, max(1, math.ceil(fraction * array.size)))
            assert np.count_nonzero(back) == count and (back[back != 0] == array[back != 0]).all()
            smallest_sent, rest = np.abs(back[back != 0]).min(), np.abs(array[back == 0])
            assert not rest.size or rest.max() <= smallest_sent


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_nothing_and_what_is_not_finite_is_noticed(kind: str) -> None:
    assert not np.array(decode(encode(mx.zeros((3, 200)), kind, 0.01), kind, (3, 200))).any()
    for value in (float("nan"), float("inf"), -float("inf")):
        broken = mx.ones((3, 200))
        broken[1, 7] = value
        assert not np.isfinite(np.array(decode(encode(broken, kind, 0.01), kind, (3, 200)))).all(), value


def test_bytes_are_what_each_kind_promises() -> None:
    array = mx.random.normal((1000, 1000), key=mx.random.key(1))
    sizes = {kind: sum(part.nbytes for part in encode(array, kind, 0.01)) for kind in KINDS}
    assert sizes["none"] == 4_000_000 and sizes["bf16"] == 2_000_000 and sizes["topk"] == 80_000
    assert 1_000_000 < sizes["int8"] < 1_020_000


@pytest.mark.parametrize("kind", ["int8", "topk"])
def test_error_feedback_sends_in_the_end_all_that_was_asked(kind: str) -> None:
    """The sum of what arrived and what is still left out is the sum of what was to be sent."""
    sync, feedback = SyncSettings(compression=kind, topk_fraction=0.05), {}
    rng, asked, arrived = np.random.default_rng(0), 0.0, 0.0
    for _ in range(200):
        array = rng.normal(loc=0.3, size=(10, 30)).astype(np.float32)
        (received,), feedback = compression.gather(World(), {"w": mx.array(array)}, sync, feedback, "a test")
        asked, arrived = asked + array.astype(np.float64), arrived + np.array(received["w"], np.float64)
    np.testing.assert_allclose(arrived + np.array(feedback["w"]), asked, rtol=1e-4, atol=1e-3)
    assert np.abs(arrived - asked).max() < (0.05 if kind == "int8" else 40)
    # Without feedback topk would never send the small ones: their mean would stay behind by 200 * 0.3.
