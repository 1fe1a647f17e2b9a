"""Pictures of the dashboard and the report, for the documents and for whoever changes them.

    python benchmarks/screenshots.py runs/NAME --out docs                  dashboard.webp, telephone.webp, report.webp
    python benchmarks/screenshots.py runs/A runs/B --out /tmp/shots --all  each in light and dark, wide and narrow

Needs Chromium. Of a run that goes on the dashboard is shown as it is then. What the pages complain of, what they ask from
elsewhere and how far they reach beyond the window is printed, and should be nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib import environment

environment.enter()

from tests import chromium

WIDE, NARROW = 1400, 390
DRAWN = "document.querySelector('#graph-timeline .js-plotly-plot')?.data?.length ?? 0"


def shoot(page: chromium.Page, address: str, path: Path, width: int, theme: str, drawn: str = "1") -> int:
    """One picture of a page; returns by how many pixels it is too wide."""
    page.resize(width)
    page.theme(theme)
    page.open(address)
    deadline = time.monotonic() + 30
    while not page.run(drawn) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.5)  # what moves has come to rest
    page.screenshot(path)
    return int(page.run("document.documentElement.scrollWidth - window.innerWidth"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--all", action="store_true", help="light and dark, wide and narrow")
    options = parser.parse_args()
    if reason := chromium.unavailable():
        sys.exit(f"error: {reason}")
    options.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lib.dashboard", *map(str, options.runs), "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    looks = [("dashboard", WIDE, "light"), ("telephone", NARROW, "dark"), ("report", WIDE, "light")]
    if options.all:
        ways = [(width, theme) for width in (WIDE, NARROW) for theme in ("light", "dark")]
        looks = [(f"{page}-{width}-{theme}", width, theme) for page in ("dashboard", "report") for width, theme in ways]
    too_wide = {}
    try:
        assert server.stdout is not None
        dashboard = re.findall(r"http://\S+", server.stdout.readline())[0]
        report = (options.runs[0] / "report.html").resolve()
        with chromium.chromium() as page:
            for name, width, theme in looks:
                is_report = name.startswith("report")
                if is_report and not report.exists():
                    continue
                address, drawn = (report.as_uri(), "1") if is_report else (dashboard, DRAWN)
                too_wide[name] = shoot(page, address, options.out / f"{name}.webp", width, theme, drawn)
            page.note()
            own = (dashboard.partition("/?")[0], "file:", "data:", "blob:", "chrome:")
            elsewhere = [url for url in page.requests if not url.startswith(own)]
            print("\n".join(str(options.out / f"{name}.webp") for name in too_wide))
            print(json.dumps({"complaints": page.complaints, "elsewhere": elsewhere, "too_wide_pixels": too_wide}))
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    main()
