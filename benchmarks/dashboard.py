"""How soon a run of a million records is seen, and what the dashboard holds then.

    python benchmarks/dashboard.py                  1,000,000 records of four ranks; writes about 0.8 GB, needs Chromium
    python benchmarks/dashboard.py --quick          50,000

The dashboard is started as a user starts it, and opened in a real Chromium: the seconds are from the start of its process
to a curve on the page. Its memory is the resident set at the end, when all has been read.

Two cores (x86-64, Linux), 864 MB of logs in the page cache: listens after 0.42 s, curves on the page after 2.5 s, every
record read after 31 s (at half of one core, by intent), 134 MB held at most.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib import environment

environment.enter()

from tests import chromium

RANKS = 4
IS_DRAWN = "(document.querySelector('#graph-loss .js-plotly-plot')?.data?.[0]?.x?.length ?? 0) > 100"


def write_run(folder: Path, records: int, rng: random.Random) -> int:
    """Logs as train.py writes them; returns their bytes."""
    (folder / "logs").mkdir(parents=True)
    steps, begun = records // RANKS, time.time() - records
    for rank in range(RANKS):
        common = {"rank": rank, "host": f"host-{rank}"}
        with (folder / "logs" / f"rank-{rank:03d}.jsonl").open("w") as file:
            file.write(json.dumps({"kind": "start", "time": begun, **common, "steps": steps}) + "\n")
            for step in range(1, steps + 1):
                entry = {"kind": "step", "time": begun + step, **common, "step": step, "pairs": 16}
                entry |= {"step_seconds": 0.9 + rng.random() / 10, "pairs_per_second": 17.0 + rng.random()}
                entry |= {"loss": 0.69 * 0.99999**step + 0.1 * rng.random(), "kl": rng.random()}
                entry |= {
                    "reward_chosen": rng.random(),
                    "reward_rejected": -rng.random(),
                    "reward_margin": rng.random(),
                }
                entry |= {"reward_accuracy": rng.randrange(17) / 16, "tokens": 4096, "padded_tokens": 4480}
                entry |= {"tokens_per_second": 4400 + rng.random(), "grad_norm": rng.random(), "learning_rate": 4.8e-5}
                entry |= {
                    "skipped": False,
                    "compute_seconds": 0.8 + rng.random() / 10,
                    "sync_seconds": rng.random() / 20,
                }
                entry |= {
                    "wait_seconds": rng.random() / 30,
                    "peak_memory_bytes": 12_341_234_123,
                    "bytes_sent": 12_341_234,
                }
                entry |= {"traces": 12, "epoch": 0, "rows": [rng.randrange(10**6) for _ in range(16)]}
                file.write(json.dumps(entry) + "\n")
    return sum(path.stat().st_size for path in folder.rglob("*.jsonl"))


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(found[1]) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if reason := chromium.unavailable():
        sys.exit(f"error: {reason}")
    records = 50_000 if options.quick else 1_000_000
    with tempfile.TemporaryDirectory() as place, chromium.chromium() as page:
        size = write_run(Path(place) / "run", records, random.Random(options.seed))
        command = [sys.executable, "-m", "lib.dashboard", str(Path(place) / "run"), "--port", "0"]
        started = time.perf_counter()
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = re.findall(r"http://\S+", server.stdout.readline())[0]
            listening = time.perf_counter() - started
            page.open(address)
            while not page.run(IS_DRAWN):
                time.sleep(0.02)
            seen = time.perf_counter() - started
            while "reading" in page.text("#state"):
                time.sleep(0.2)
            read = time.perf_counter() - started
            time.sleep(2)
            figures = {"records": records, "log_bytes": size, "listening_seconds": listening, "seen_seconds": seen}
            figures |= {"read_seconds": read, "resident_bytes": resident_bytes(server.pid)}
            figures |= {"peak_bytes": peak_bytes(server.pid)}
        finally:
            server.terminate()
            server.wait(10)
    print(f"{records:,} records, {size / 1e6:,.0f} MB of logs")
    print(f"listens after {listening:.2f} s, curves on the page after {seen:.2f} s, all read after {read:.1f} s")
    print(f"holds {figures['resident_bytes'] / 1e6:.0f} MB, at most {figures['peak_bytes'] / 1e6:.0f} MB")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
