"""What to type instead of a name from another trainer or an earlier version: the end of the error message.

lib/config/foreign_names.txt has the names. None is accepted as a setting: each has one name, in lib/config/settings.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

WORDS: dict[str, tuple[str, str]] = {}  # a foreign name ➜ the word to type, with {} for its value, and what differs
NOTHING: dict[str, str] = {}  # a foreign name ➜ why there is nothing to set
VALUES: dict[tuple[str, str], str] = {}  # a setting and a foreign value ➜ the value here
REMOVED: dict[str, str] = {}  # a setting of an earlier version ➜ what to do instead


def _read_table() -> None:
    for line in Path(__file__).with_name("foreign_names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        word, _, rest = line.partition(" < ")
        names, _, note = rest.partition(" | ")
        key, _, text = word.partition(": ")
        for name in names.split():
            if key == "removed":
                REMOVED[name] = text
            elif text and "=" not in key:
                VALUES[key, name] = text
            elif word == "-":
                NOTHING[name] = note
            else:
                WORDS[name] = word, note


_read_table()


def normalised(name: str) -> str:
    """A name as the table has it: --Batch-Size, train.batch_size ➜ batch_size."""
    return name.lstrip("-").replace("-", "_").rpartition(".")[2].lower()


def of_setting(key: str, known: Sequence[str]) -> str:
    """What follows "unknown setting KEY": the setting that is meant, or those that there are."""
    if key in REMOVED:
        return f", which an earlier version had; {REMOVED[key]}"
    name = normalised(key)
    if name in WORDS:
        word, note = WORDS[name]
        setting = word.partition("=")[0] if "{" in word or "..." in word else word
        return f"; did you mean {setting}?" + (f" ({note})" if note else "")
    if name in NOTHING:
        return f"; leave it out: {NOTHING[name]}"
    section = key.rpartition(".")[0]
    sections = list(dict.fromkeys(k.partition(".")[0] for k in known))
    if not section and (near := difflib.get_close_matches(key, sections, n=1, cutoff=0.75)):
        return f"; did you mean {near[0]}?"
    if close := _closest(key, known):
        return f"; did you mean {close}?"
    siblings = [k.rpartition(".")[2] for k in known if section and k.startswith(f"{section}.")]
    return f"; {section} has {', '.join(siblings)}" if siblings else "; --help lists the settings"


def of_option(option: str, value: str | None, known: Sequence[str], options: Sequence[str]) -> str:
    """What follows an option that does not exist: the word, or the option, that is meant.

    Args:
        option: as typed, e.g. "--batch-size".
        value: what was typed behind it, where that can be a value.
        known: names of the settings that this program takes as key=value; empty where it takes none.
        options: of this program.
    """
    if close := difflib.get_close_matches(option, options, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    if not known:
        return ""
    key, shown, name = option.lstrip("-").replace("-", "_"), "..." if value is None else value, normalised(option)
    leaves = [k for k in known if k.rpartition(".")[2] == name]
    if key not in known and name in WORDS:
        word, note = WORDS[name]
        return f"here it is {word.replace('{}', shown)}" + (f" ({note})" if note else "")
    if name in NOTHING:
        return f"leave it out: {NOTHING[name]}"
    setting = key if key in known else leaves[0] if leaves else _closest(key, known)
    return f"settings are words without dashes: {setting or 'train.beta'}={shown if setting else 0.2}"


def of_value(key: str, value: object) -> str:
    """What follows a value that a setting does not have: what it is called here."""
    meant = VALUES.get((key, str(value).lower()))
    return f"; here: {meant}" if meant else ""


def _closest(key: str, known: Sequence[str]) -> str | None:
    """The setting whose name is nearest: of the same section, by its initials, or under another section."""
    section, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if section and k.startswith(f"{section}.")}
    leaves = {k.rpartition(".")[2]: k for k in reversed(known)}
    initials = {"".join(word[0] for word in name.split("_")): k for name, k in siblings.items()}
    if leaf in initials or leaf in leaves:
        return initials.get(leaf) or leaves[leaf]
    for names, name, cutoff in ((siblings, leaf, 0.6), (dict.fromkeys(known), key, 0.6), (leaves, leaf, 0.7)):
        if (close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff)) and not (siblings and name == key):
            return names[close[0]] or close[0]
    return None
