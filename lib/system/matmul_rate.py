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
    began, rate = time.perf_counter(), 0.0
    for width in WIDTHS:
        operations = 2 * width**3 * CHAIN
        left = began + seconds - time.perf_counter()
        if rate and 2 * REPEATS * operations / rate > left:
            break
        a, b = (mx.random.normal((width, width), scale=width**-0.5).astype(dtype) for _ in range(2))
        _multiply(a, b)  # compiles, and finds the caches cold
        started = time.perf_counter()
        _multiply(a, b)
        rate = operations / (time.perf_counter() - started)
    started, count = time.perf_counter(), 0
    while count < REPEATS or time.perf_counter() - began < seconds:
        _multiply(a, b)
        count += 1
    return count * 2 * a.shape[0] ** 3 * CHAIN / (time.perf_counter() - started) / 1e9


def _multiply(a: mx.array, b: mx.array) -> None:
    for _ in range(CHAIN):
        a = a @ b
    mx.eval(a)
