"""A picture of what a command prints at a terminal: docs/plan.svg and docs/terminal.svg.

    python benchmarks/picture.py --output docs/terminal.svg -- .venv/bin/python train.py
    python benchmarks/picture.py --output docs/plan.svg --until "m3-ultra alone" -- .venv/bin/python benchmarks/simulate.py ...

--from and --until name texts of the first and the last line that is shown.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lib import environment

environment.enter()

from rich.console import Console  # noqa: E402
from rich.terminal_theme import SVG_EXPORT_THEME  # noqa: E402
from rich.text import Text  # noqa: E402

# rich's frame of a window, without the fonts that it would fetch and without its buttons.
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
<rect fill="#292929" width="{width}" height="{terminal_height}" rx="8"/>
<g transform="translate(9, 9)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def at_terminal(words: list[str], columns: int) -> str:
    """What a command writes to a terminal of so many columns."""
    os.environ |= {"COLUMNS": str(columns), "TERM": "xterm-256color"}
    written = io.BytesIO()

    def read(descriptor: int) -> bytes:
        piece = os.read(descriptor, 2**16)
        written.write(piece)
        return piece

    status = os.waitstatus_to_exitcode(pty.spawn(words, read))
    if status:
        sys.exit(status)
    return written.getvalue().decode()


def final_lines(raw: str) -> list[str]:
    """The lines that are there at the end: of a line that was drawn over, what was drawn last."""
    lines: list[str] = []
    for line in raw.split("\n"):
        if taken_back := line.count("\x1b[1A"):
            del lines[-taken_back:]
        lines.append(re.sub(r"\x1b\[[?0-9;]*[a-ln-zA-Z]|\r", "", line.rstrip("\r").rpartition("\x1b[2K")[2]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument("--title", default="", help="the command that the picture shows")
    parser.add_argument("--from", dest="first", default="", help="text of the first line")
    parser.add_argument("--until", default="", help="text of the last line")
    parser.add_argument("words", nargs="*", help="after --: the command")
    options = parser.parse_args()
    lines = final_lines(at_terminal(options.words, options.columns))
    first = next((i for i, line in enumerate(lines) if options.first in line), 0)
    last = next(
        (i for i, line in enumerate(lines) if options.until and options.until in line and i >= first), len(lines)
    )
    console = Console(width=options.columns, record=True, file=io.StringIO(), force_terminal=True, highlight=False)
    if options.title:
        console.print(Text(f"$ {options.title}", "bold"))
    console.print(Text.from_ansi("\n".join(lines[first : last + 1]).strip("\n")), soft_wrap=True)
    console.print()  # rich's height is that of all lines but the last
    console.save_svg(str(options.output), code_format=FRAME, theme=SVG_EXPORT_THEME, unique_id="tandem")
    print(f"picture: {options.output}")


if __name__ == "__main__":
    main()
