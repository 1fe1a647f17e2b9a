"""What ends a command: wrong input, or training that cannot go on."""

from __future__ import annotations


class UserError(ValueError):
    """The user's input is wrong. The message is one line: what, where, the numbers, the remedy. Exit status 2."""


class Stopped(RuntimeError):
    """Training cannot go on; the message says why and what to do. Exit status 1."""


class AgreedError(UserError):
    """A user's error that every rank knows of and ends with; rank 0 prints it."""
