"""What an error that MLX raises in the middle of its work means for a run: one line instead of a traceback."""

from __future__ import annotations

import re

from lib.system import out_of_memory
from lib.system.network import host_name

# mlx/distributed/ring/ring.cpp; jaccl/rdma.h. Open MPI and NCCL end the process themselves.
LOST = re.compile(r"\[ring\] connection to a peer was lost|\[jaccl\] (Send|Recv) failed")
# A primitive or a device: "[Inverse::eval_cpu] ...", "[METAL] Command buffer execution failed: ...", and CUDA's checks,
# "cudaGraphLaunch(...) failed: ...".
OWN = re.compile(r"\[[\w:]+\] |cu\w+.* failed: ")
# By NOTICED the launcher knows a rank that ended because of another one.
FAILED, NOTICED = "MLX failed: ", "lost the connection to another rank"


def advice(error: BaseException, rank: int | None) -> str | None:
    """What happened, and what helps where something does; None for an error that is not MLX's. rank: of several."""
    text = str(error).partition("\n")[0]
    if out_of_memory.is_out_of_memory(error):
        what = out_of_memory.advice(error)
    elif isinstance(error, RuntimeError) and LOST.match(text):
        what = f"{NOTICED}, which ended or was cut off ({text})"
    elif isinstance(error, RuntimeError) and OWN.match(text):
        what = f"{FAILED}{text}"
    else:
        return None
    return what if rank is None else f"rank {rank} on {host_name()}: {what}"
