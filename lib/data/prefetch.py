"""Items of an iterable, made in a thread before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(iterable: Iterable[T], depth: int) -> Generator[T, None, None]:
    """The items of `iterable`, up to `depth` of them made in advance by one thread.

    Its exceptions are raised here, in place. The thread ends with the last item, when this generator is
    closed, and with the program; it is never waited for longer than one item takes.
    """
    iterator, end = iter(iterable), object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        pending = deque(pool.submit(next, iterator, end) for _ in range(max(depth, 1)))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
