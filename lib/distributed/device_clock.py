"""The time by the clock of the device that computes: the host need not wait to know it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import mlx.core as mx

READ = """
unsigned long long now;
asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
nanoseconds[0] = now;
"""


def now() -> mx.array:
    """Nanoseconds, uint64 [1], once everything is done that was begun on the default stream before: being computed.

    Only CUDA lets a program read such a clock; elsewhere the host waits, and reads its own.
    """
    if not mx.cuda.is_available():
        mx.synchronize()
        return mx.array([time.perf_counter_ns()], mx.uint64)
    read, nothing = _kernel()
    (nanoseconds,) = read(
        inputs=[nothing], output_shapes=[(1,)], output_dtypes=[mx.uint64], grid=(1, 1, 1), threadgroup=(1, 1, 1)
    )
    mx.async_eval(nanoseconds)  # a graph by itself: within one, kernels that share no array may run in any order
    return nanoseconds


@functools.cache
def _kernel() -> tuple[Callable[..., list[mx.array]], mx.array]:
    nothing = mx.zeros(1)
    mx.eval(nothing)
    return mx.fast.cuda_kernel("device_clock", ["nothing"], ["nanoseconds"], READ), nothing
