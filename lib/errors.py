"""What ends a command: wrong input, or training that cannot go on; and how text of others is shown in it."""

from __future__ import annotations

# What a terminal would obey instead of showing, and what no encoding has: control characters but tab and line feed,
# marks that turn the direction of writing, halves of surrogate pairs. Each becomes one character: tables stay in line.
_HIDDEN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_HIDDEN |= dict.fromkeys((*range(0x80, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F)), 0xFFFD)
_HIDDEN |= dict.fromkeys((*range(0x2066, 0x206A), *range(0xD800, 0xE000)), 0xFFFD)


def shown(text: str) -> str:
    """Text from outside, of the same length, without what a terminal would obey."""
    return text if text.isascii() and text.isprintable() else text.translate(_HIDDEN)


def in_one_line(error: BaseException, most: int = 240) -> str:
    """What another library's error says, cut to a length: the first of its lines often ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]} ..."


class OneLineError(Exception):
    def __init__(self, message: object = ""):
        super().__init__(shown(str(message)).replace("\n", "␊"))  # a column's name may have one


class UserError(OneLineError, ValueError):
    """The user's input is wrong. The message is one line: what, where, the numbers, the remedy. Exit status 2."""


class Stopped(OneLineError, RuntimeError):
    """Training cannot go on; the message says in one line why and what to do. Exit status 1."""


class AgreedError(UserError):
    """A user's error that every rank knows of and ends with; rank 0 prints it."""
