"""Twenty SIGKILLs of one run, each resumed: its weights have to be the bits of a run that never was killed.

python benchmarks/kill_resume.py [--quick] [--seed N]    a table, and as the last line one JSON object
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()  # the run that is never killed is in this process: its products are those of the others

from lib.system.terminal import Terminal  # noqa: E402
from tests import tiny  # noqa: E402
from tests.test_kills import play  # noqa: E402

CASES = {"synchronous": [], "independent": ["strategy=independent", "independent.merge=outer"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 kills instead of 20")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills, rows, results = 5 if options.quick else 20, [], []
    for name, words in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder, began = Path(temporary), time.perf_counter()
            words = [*tiny.settings(folder), f"train.steps={5 + 3 * kills}", "checkpoint.every=1", *words]
            tiny.train(folder, [*words, "run.name=whole"])
            killed = play(folder, words, kills, options.seed, prefix=[])
            same = tiny.difference(folder / "runs/whole", folder / "runs/killed") == 0.0
            seconds = time.perf_counter() - began
        rows.append([name, str(killed), "yes" if same else "NO", f"{seconds:.0f} s"])
        results.append({"case": name, "kills": killed, "same_bits": same, "seconds": seconds})
    say = Terminal()
    say.table("runs that are killed and resumed", ["run", "kills", "same bits", "time"], rows)
    print(json.dumps({"seed": options.seed, "results": results}))
    sys.exit(not all(result["same_bits"] for result in results))


if __name__ == "__main__":
    main()
