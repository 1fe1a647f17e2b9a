"""A picture of what train.py prints at a terminal of 80 columns, as docs/terminal.svg shows the quickstart.

python benchmarks/terminal.py [--columns N] [--output FILE.svg] [-- train.py's words]
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

# rich's frame of a window, without the fonts that it would fetch and without its buttons: \n for a line's end.
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


def left_standing(raw: str) -> str:
    """The lines that are there at the end: of one that was drawn over, what was drawn last."""
    lines: list[str] = []
    for line in raw.split("\n"):
        if taken_back := line.count("\x1b[1A"):
            del lines[-taken_back:]
        lines.append(re.sub(r"\x1b\[[?0-9;]*[a-ln-zA-Z]|\r", "", line.rstrip("\r").rpartition("\x1b[2K")[2]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=80, metavar="N")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "terminal.svg", metavar="FILE.svg")
    parser.add_argument("words", nargs="*", help="after --: of train.py")
    options = parser.parse_args()
    raw = at_terminal([sys.executable, "train.py", *options.words], options.columns)
    console = Console(width=options.columns, record=True, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text("$ make train", "bold"))
    console.print(Text.from_ansi(left_standing(raw).strip("\n")), soft_wrap=True)
    console.print()  # rich's height is that of all lines but the last
    console.save_svg(str(options.output), code_format=FRAME, theme=SVG_EXPORT_THEME, unique_id="tandem")
    print(f"picture: {options.output}")


if __name__ == "__main__":
    main()
