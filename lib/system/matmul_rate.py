"""How fast this process multiplies matrices, measured in under a second. It compares hosts without a calibration."""

from __future__ import annotations

import time

import mlx.core as mx

WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
CHAIN = 4  # products in one evaluation, so that starting it weighs little
REPEATS = 4  # of the largest width, at least


def quick_gflops(seconds: float = 0.3) -> float:
    """GFLOP/s of the device's fast type, on matrices as large as the time allows.

    The mean over the time, not the best product: a host that others use, or that is throttled, is as fast as it is now.
    """
    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    spent, rate = 0.0, 0.0
    for width in WIDTHS:
        operations = 2 * width**3 * CHAIN
        if rate and 2 * REPEATS * operations / rate > seconds - spent:
            break
        a, b = (mx.random.normal((width, width), scale=width**-0.5).astype(dtype) for _ in range(2))
        # Compiles, and finds the caches cold. It is not counted: CUDA's libraries load for a second, and a host that
        # was left with small matrices for that had a hundredth of the rate of the same one whose libraries were there.
        _multiply(a, b)
        started = time.perf_counter()
        _multiply(a, b)
        took = time.perf_counter() - started
        spent, rate = spent + took, operations / took
    started, count = time.perf_counter(), 0
    while count < REPEATS or spent + time.perf_counter() - started < seconds:
        _multiply(a, b)
        count += 1
    return count * 2 * a.shape[0] ** 3 * CHAIN / (time.perf_counter() - started) / 1e9


def _multiply(a: mx.array, b: mx.array) -> None:
    for _ in range(CHAIN):
        a = a @ b
    mx.eval(a)
