"""Tokens a second of the server at 1, 8 and 32 requests at a time, the quickstart's model.

    python benchmarks/serving.py [--quick] [--seed 0] [--tree OTHER_CHECKOUT]

--tree serves by another checkout instead, for a comparison in turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lib import environment

environment.enter()

from tests import served  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    parser.add_argument("--seed", type=int, default=0, help="accepted, as by every benchmark: answers are greedy")
    parser.add_argument("--tree", type=Path, default=served.ROOT, help="checkout whose server is measured")
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        model = served.model_for_long_answers(Path(folder))
        served.ROOT = options.tree
        server = served.Served("--model", model, "serve.name=tiny")
        server.wait(lambda: server.of("up") or server.of("backend", state="up"))
        served.ROOT = Path(__file__).resolve().parent.parent
        try:
            for streams in (1, 8, 32):
                requests = (4 if options.quick else 16) * max(1, streams // 2)
                for count in (streams, requests):  # the first ones fill caches
                    done = served.load(server.address, streams, count, max_tokens=100)
                    assert all(outcome["error"] is None for outcome in done), done[0]
                seconds = statistics.median(outcome["seconds"] for outcome in done)
                figures[streams] = round(100 * streams / seconds, 1)
                print(f"{streams:>3} at a time  {figures[streams]:>8} tokens/s")
        finally:
            server.stop()
    print(json.dumps({"tokens_per_second": figures}))


if __name__ == "__main__":
    main()
