"""Many random runs on real ranks (tests/fuzzing.py): no rank is left waiting, and no row lost or trained twice.

    python benchmarks/fuzz.py --cases 60 --worlds 2 3 4      so many runs in each world, and a third as many with a rank that fails
    python benchmarks/fuzz.py --quick                        about a minute

A case draws how the ranks work together, what they train, on how many ragged rows, in which shares, when they evaluate and
save, and how it ends. Cases of one world share their processes; a rank that waits for more than 60 s ends the world with what
it waited for. The runs with a rank that fails have processes of their own: it may write so many kilobytes and no more, wherever
that is, is killed, or meets an exception in a forward, a backward or a reference pass; all have to end. The last line is one JSON
object. 24 cases of two ranks (three and a half minutes on two busy cores) and 9 of four ended well.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib.system import mpi_and_blas  # noqa: E402

LAUNCH = mpi_and_blas.launch_environment()
mpi_and_blas.prepare()

TIMEOUT_SECONDS = 60  # of a wait


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60, help="runs of each world")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--strategy", default=None, help="of all runs (default: drawn)")
    parser.add_argument("--quick", action="store_true", help="12 cases of 2 ranks")
    options = parser.parse_args()
    if options.quick:
        options.cases, options.worlds = 12, [2]
    if LAUNCH.size > 1:
        play_all(range(options.seed, options.seed + options.cases), options.strategy)
        return
    began, ended, failed = time.perf_counter(), Counter[str](), 0
    for ranks in options.worlds:
        words = [str(Path(__file__)), "--cases", str(options.cases), "--seed", str(options.seed)]
        words += ["--strategy", options.strategy] if options.strategy else []
        done = subprocess.run([str(mpi_and_blas.mpirun_path()), "-n", str(ranks), sys.executable, *words])
        if done.returncode:
            sys.exit(
                f"{ranks} ranks: status {done.returncode}; the last line above names the case that did not end well"
            )
        from tests.fuzzing import make_case, one_rank_fails

        cases = [make_case(seed, ranks, options.strategy) for seed in range(options.seed, options.seed + options.cases)]
        ended.update(f"{case.strategy}, {case.end}" for case in cases)
        for seed in range(options.seed, options.seed + options.cases // 3):
            told = one_rank_fails(seed, ranks, options.strategy)
            print(f"{ranks} ranks, one fails, seed {seed}: {told}", flush=True)
            failed += 1
    for name, count in sorted(ended.items()):
        print(f"{count:5d}  {name}")
    seconds = time.perf_counter() - began
    print(
        json.dumps({"cases": sum(ended.values()), "failed_ranks": failed, "worlds": options.worlds, "seconds": seconds})
    )


def play_all(seeds: range, strategy: str | None) -> None:
    """The cases of one world, on this rank."""
    from lib.distributed import world as sync
    from tests.fuzzing import make_case, play

    world = sync.start(LAUNCH, TIMEOUT_SECONDS)
    for seed in seeds:
        case = make_case(seed, world.size, strategy)
        if world.rank == 0:
            print(f"{world.size} ranks, seed {seed}: {case}", flush=True)
        with tempfile.TemporaryDirectory() as mine, contextlib.redirect_stdout(io.StringIO()):
            play(case, world, Path(world.broadcast_text(mine)))


if __name__ == "__main__":
    main()
