"""Running out of memory: how MLX and the kernel report it, a limit of our own, and work tried again in smaller pieces.

Only the standard library is imported at the top: the launcher's agent uses this module, too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lib.system import files
from lib.system.network import host_name

T = TypeVar("T")
R = TypeVar("R")
# MLX's allocators (mlx/backend/*/allocator.cpp), its CUDA checks, Metal's command buffers, C++'s own.
TEXTS = re.compile(
    r"\[malloc\] Unable to allocate|\[metal::malloc\] Attempting to allocate|failed: out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|Insufficient Memory"
    r"|kIOGPUCommandBufferCallbackErrorOutOfMemory|std::bad_alloc"
)
# mlx/distributed/ring/ring.cpp; jaccl/rdma.h. Open MPI and NCCL end the process themselves.
LOST = re.compile(r"\[ring\] connection to a peer was lost|\[jaccl\] (Send|Recv) failed")
# A primitive or a device, "[METAL] Command buffer ...", and CUDA's checks, "cudaGraphLaunch(...) failed: ...".
OWN = re.compile(r"\[[\w:]+\] |cu\w+.* failed: ")
NOTICED = "lost the connection to another rank"  # by which the launcher knows a rank that ended because of it
REMEDY = (
    "a smaller evaluate.batch_size or data.max_length, model.gradient_checkpointing=true, model.method=lora or a "
    "quantised model takes less, and strategy=sharded divides the model"
)
THREAD = "attempts"


class OutOfMemory(Exception):
    """Memory ran out, and what was being computed is freed. ranks: the workers that it happened to, where all know of
    it and the work can be done again. needed_bytes: what each of them held at most, as far as known."""

    def __init__(self, message: str, ranks: Sequence[int] = (), needed_bytes: Sequence[int] = ()):
        super().__init__(message)
        self.ranks, self.needed_bytes = tuple(ranks), tuple(needed_bytes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of MLX says that memory ran out. std::bad_alloc becomes a MemoryError."""
    return isinstance(error, MemoryError | OutOfMemory) or (
        isinstance(error, RuntimeError) and TEXTS.search(str(error)) is not None
    )


def failure_text(error: BaseException, rank: int | None) -> str | None:
    """What happened where MLX raises in the middle of its work, and what helps; None for an error that is not MLX's.
    rank: of several."""
    text = str(error).partition("\n")[0]
    if is_out_of_memory(error):
        what = f"memory ran out: {error}; {REMEDY}"
    elif isinstance(error, RuntimeError) and LOST.match(text):
        what = f"{NOTICED}, which ended or was cut off ({text})"
    elif isinstance(error, RuntimeError) and OWN.match(text):
        what = f"MLX failed: {text}"
    else:
        return None
    return what if rank is None else f"rank {rank} on {host_name()}: {what}"


@dataclass(frozen=True)
class Limit:
    """What MLX may hold in this process: plan.memory_limit_gb (is_configured), or what the machine has before it swaps
    (which a single pair may exceed)."""

    size_bytes: int | None = None
    is_configured: bool = False

    def watching(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The micro-batches, with a check of the limit after each, whose peak is known when the next one is taken."""
        for batch in batches:
            yield batch
            self.check(len(batch[0].rows))

    def check(self, pairs: int) -> None:
        """Holds the peak so far against the limit. Raises OutOfMemory: a micro-batch of so many pairs took more."""
        import mlx.core as mx

        peak = mx.get_peak_memory()
        if self.size_bytes and peak > self.size_bytes and (self.is_configured or pairs > 1):
            name = "plan.memory_limit_gb" if self.is_configured else "this machine's limit"
            took = f"a micro-batch of {pairs} took {peak / 1e9:.4g} GB"
            raise OutOfMemory(f"{took}, {name} is {self.size_bytes / 1e9:.4g} GB")


def attempt(work: Callable[[], T]) -> T:
    """What the work returns. Where memory runs out, all that the work held is freed, for another attempt. CUDA's
    runtime keeps a failed allocation as its thread's last error, which MLX never clears: there the work is done in a
    thread that can be given up, and what goes in and comes out has to be evaluated. Raises OutOfMemory: without a
    traceback, whose frames would keep the arrays."""
    is_inside = threading.current_thread().name.startswith(THREAD) or not _is_cuda()
    result, failure = _tried(work) if is_inside else _in_thread(work)
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def _is_cuda() -> bool:
    import mlx.core as mx

    return mx.default_device() == mx.gpu and not mx.metal.is_available()


_workers: list[queue.SimpleQueue[Callable[[], None]]] = []  # the one that is in use


def _serve(work: queue.SimpleQueue[Callable[[], None]]) -> None:
    """Of a thread that never ends: MLX's own would end with it, and take the process along (seen on an H200)."""
    while True:
        work.get()()


def _in_thread(work: Callable[[], T]) -> tuple[T | None, OutOfMemory | None]:
    """The work in a thread that goes on from attempt to attempt (it keeps what it compiled), until one fails."""
    import mlx.core as mx

    future: Future[tuple[T | None, OutOfMemory | None]] = Future()

    def with_random_state() -> T:  # an array that is not evaluated belongs to the thread that made it
        result = work()
        mx.eval(mx.random.state)
        return result

    def settle() -> None:
        try:
            future.set_result(_tried(with_random_state))
        except BaseException as error:
            future.set_exception(error)

    if not _workers:
        _workers.append(queue.SimpleQueue())
        threading.Thread(target=_serve, args=(_workers[0],), name=THREAD, daemon=True).start()
    mx.eval(mx.random.state)
    _workers[0].put(settle)
    result, failure = future.result()
    if failure is not None:
        _workers.pop()
    return result, failure


def _tried(work: Callable[[], T]) -> tuple[T | None, OutOfMemory | None]:
    try:
        return work(), None
    except (OutOfMemory, RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        details = getattr(error, "ranks", ()), getattr(error, "needed_bytes", ())
        failure = OutOfMemory(str(error) or "std::bad_alloc", *details)
    release()
    return None, failure


def release() -> None:
    """Waits for what is under way, and frees what is no longer referred to."""
    import mlx.core as mx

    with contextlib.suppress(RuntimeError):  # it clears the error that Metal's stream kept
        mx.synchronize()
    gc.collect()
    mx.clear_cache()


def in_pieces(rows: Sequence[T], work: Callable[[Sequence[T]], R], can_halve: bool = True) -> list[tuple[int, R]]:
    """The work's results for consecutive pieces of the rows, each with its first row's index; one piece, if that fits.
    can_halve: False where other ranks run the same forward pass, and would not know. Raises OutOfMemory: one row."""
    done: list[tuple[int, R]] = []
    start, size = 0, len(rows)
    while piece := rows[start : start + size]:
        try:
            done.append((start, attempt(lambda piece=piece: work(piece))))  # type: ignore[misc]
            start += len(piece)
        except OutOfMemory as error:
            if len(piece) == 1 or not can_halve:
                raise OutOfMemory(f"{error}; that was a batch of {len(piece)}") from None
            size = (len(piece) + 1) // 2
    return done


def kernel_kills() -> dict[str, int]:
    """How many processes the kernel's out-of-memory killer has ended: since this boot, and of this control group. Empty
    on macOS, which does not count."""
    counts: dict[str, int] = {}
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").partition("0::")[2].strip()
        for file in (Path("/proc/vmstat"), Path(f"/sys/fs/cgroup{group}/memory.events")):
            if match := re.search(r"^oom_kill (\d+)$", file.read_text(encoding="utf-8"), re.MULTILINE):
                counts[f"{file} {boot}"] = int(match[1])
    return counts


class MicroBatchLimit:
    """The largest micro-batch that this host's memory holds, as a file of the run's folder. The kernel's out-of-memory
    killer and Metal end a process without an exception. So a size is written down before it is first tried, and a start
    that finds it unfinished halves it; on Linux only where the kernel has killed since."""

    def __init__(self, path: Path):
        # limit: pairs in a micro-batch at most. recomputes: even one pair takes gradient checkpointing.
        self.path = path
        self.stored: dict[str, Any] = {"fits": 0, "tried": 0, "limit": None, "recomputes": False}
        with contextlib.suppress(OSError, ValueError):
            self.stored |= json.loads(path.read_text(encoding="utf-8"))
        tried = self.stored["tried"]
        if tried > self.stored["fits"] and self.stored["kills"] != kernel_kills():
            self.record(max(1, tried // 2), self.recomputes or tried == 1)

    @property
    def size(self) -> int | None:
        """Pairs in a micro-batch at most; None without a limit."""
        return self.stored["limit"]

    @property
    def recomputes(self) -> bool:
        """Whether even one pair takes gradient checkpointing."""
        return bool(self.stored["recomputes"])

    def begin(self, size: int) -> None:
        """Notes that micro-batches of this size are tried, if they never were."""
        if size > self.stored["fits"]:
            self._write(tried=size, kills=kernel_kills())

    def end(self, size: int) -> None:
        """Notes that they fit."""
        if size > self.stored["fits"]:
            self._write(fits=size)

    def record(self, limit: int, recomputes: bool) -> None:
        """Notes that no more than these micro-batches fit."""
        self._write(tried=0, limit=limit, recomputes=recomputes, fits=min(limit, self.stored["fits"]))

    def _write(self, **fields: object) -> None:
        self.stored |= fields
        if self.path.parent.is_dir():
            files.write_atomically(self.path, json.dumps(self.stored) + "\n")
