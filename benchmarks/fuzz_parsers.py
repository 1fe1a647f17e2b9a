"""Every parser of files and requests against hypothesis: no traceback, and no more memory than its limit.

    python benchmarks/fuzz_parsers.py --minutes 10          ten minutes each; tests/parsers.py and model_parsers.py have them
    python benchmarks/fuzz_parsers.py --quick               six seconds each
    python benchmarks/fuzz_parsers.py --only parquet YAML
    python benchmarks/fuzz_parsers.py --quick --coverage    how much of each parser's code the inputs reach

Each parser runs in a process of its own, which may have so many bytes of address space and no more. `read` are inputs that
were taken, not refused: were it none or all of them, the inputs would be too odd, or not odd enough. The last line is one JSON
object; the exit status is 1 where a parser let an error through.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

EXAMPLES = 200  # between looks at the clock
NOTHING: dict[str, Any] = {"tried": 0, "read": 0, "fell": 1, "memory_bytes": 0, "coverage": None}  # of one that crashed
MEMORY_BYTES = 6 * 2**30  # of addresses; MLX and pyarrow take a third of it for themselves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="for each parser (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="6 seconds each")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these parsers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--coverage", action="store_true", help="of the lines inside of each parser's functions; slower"
    )
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds = 6 if options.quick else 60 * options.minutes
    if options.one:
        return one(options.one, seconds, options.seed, options.coverage)
    from tests.model_parsers import MODEL_PARSERS
    from tests.parsers import PARSERS

    known = PARSERS | MODEL_PARSERS
    if unknown := set(options.only or ()) - known.keys():
        parser.error(f"no parser {', '.join(unknown)}; there are {', '.join(known)}")
    results = []
    for name in options.only or known:
        command = [sys.executable, __file__, "--one", name, "--minutes", str(seconds / 60), "--seed", str(options.seed)]
        command += ["--coverage"] * options.coverage
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300)
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if done.returncode == 0 and lines else dict(NOTHING)
        if done.returncode:
            print(f"its process ended with status {done.returncode}: {lines[-1:]}")
        reached = "" if found["coverage"] is None else f" {found['coverage']:6.1%} of its lines"
        print(
            f"{name:14} {found['tried']:9,} tried {found['read']:9,} read {found['fell']:4} fell "
            f"{found['memory_bytes'] / 1e6:7.0f} MB at most{reached}"
        )
        print(done.stderr[-4000:], end="", flush=True)
        results.append({"parser": name, **found})
    fell = sum(result["fell"] for result in results)
    tried = sum(result["tried"] for result in results)
    print(json.dumps({"tried": tried, "fell": fell, "parsers": results}))
    return 1 if fell else 0


def one(name: str, seconds: float, seed: int, with_coverage: bool) -> int:
    """Fuzzes one parser; prints what it found as JSON."""
    reached = Coverage() if with_coverage else None
    from tests.model_parsers import MODEL_PARSERS
    from tests.parsers import PARSERS, fuzz, refuses_or_reads

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    parser, tried, read, faults = (PARSERS | MODEL_PARSERS)[name], 0, 0, dict[str, str]()
    if reached is not None:
        reached.begin()
    ends, draw = time.monotonic() + seconds, random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:

        def take(content: bytes) -> None:
            nonlocal tried, read
            if time.monotonic() > ends:
                return
            tried += 1
            try:
                read += refuses_or_reads(parser, content, Path(folder) / "one")
            except Exception as error:
                frames = [frame for frame in traceback.extract_tb(error.__traceback__) if str(ROOT) in frame.filename]
                place = f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}: {str(error)[:200]}"
                faults.setdefault(place.partition(": ")[0], f"{place}\n    {content[:300]!r}")

        while time.monotonic() < ends:
            fuzz(parser, EXAMPLES, take, draw.randrange(2**32))
    for fault in faults.values():
        print(fault, file=sys.stderr)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    share = None if reached is None else reached.share(parser.modules)
    print(
        json.dumps(
            NOTHING | {"tried": tried, "read": read, "fell": len(faults), "memory_bytes": memory, "coverage": share}
        )
    )
    return 0


class Coverage:
    """Which lines inside of functions run; those that importing runs do not count."""

    def __init__(self) -> None:
        import coverage

        self.lines = coverage.Coverage(data_file=None, config_file=False, source=[str(ROOT / "lib")])
        self.lines.start()
        self.imported: dict[str, set[int]] = {}

    def begin(self) -> None:
        """Forgets what ran until now."""
        data = self.lines.get_data()
        self.imported = {file: set(data.lines(file) or ()) for file in data.measured_files()}

    def share(self, modules: tuple[str, ...]) -> float:
        """Of the lines of these modules."""
        self.lines.stop()
        data, run, total = self.lines.get_data(), 0, 0
        for module in modules:
            file = str(ROOT / "lib" / module)
            _, statements, _, _, _ = self.lines.analysis2(file)
            inside = set(statements) - self.imported.get(file, set())
            run += len(inside & set(data.lines(file) or ()))
            total += len(inside)
        return run / max(total, 1)


if __name__ == "__main__":
    sys.exit(main())
