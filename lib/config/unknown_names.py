"""What to type instead of a name from another trainer or version (lib/config/unknown_names.txt), or a mistyped one.

None is accepted as a setting: each has one name, in settings.py.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path

from lib.config.help import known_settings

WORDS: dict[str, tuple[str, str]] = {}  # a foreign name ➜ the word to type, with {} for its value, and what differs
NOTHING: dict[str, str] = {}  # a foreign name ➜ why there is nothing to set
VALUES: dict[tuple[str, str], str] = {}  # a setting and a foreign value ➜ the value here
REMOVED: dict[str, str] = {}  # a setting of an earlier version ➜ what to do instead

for _line in Path(__file__).with_name("unknown_names.txt").read_text(encoding="utf-8").splitlines():
    _word, _, _rest = _line.partition(" < ")
    _names, _, _note = _rest.partition(" | ")
    _key, _, _text = _word.partition(": ")
    for _name in _names.split() if not _line.startswith("#") else ():
        if _key == "removed":
            REMOVED[_name] = _text
        elif _text and "=" not in _key:
            VALUES[_key, _name] = _text
        elif _word == "-":
            NOTHING[_name] = _note
        else:
            WORDS[_name] = _word, _note


def normalised(name: str) -> str:
    """A name as the table has it: --Batch-Size, train.batch_size ➜ batch_size."""
    return name.lstrip("-").replace("-", "_").rpartition(".")[2].lower()


def hint_for_setting(key: str) -> str:
    """What follows "unknown setting KEY": the setting that is meant, or those that there are."""
    known, (section, _, leaf) = known_settings(), key.rpartition(".")
    if key in known:
        return f"; write {key}=VALUE, in a file {leaf}: below {section}:"
    if key in REMOVED:
        return f", which an earlier version had; {REMOVED[key]}"
    if (name := normalised(key)) in WORDS:
        word, note = WORDS[name]
        setting = word.partition("=")[0] if "{" in word or "..." in word else word
        return f"; did you mean {setting}?" + (f" ({note})" if note else "")
    if name in NOTHING:
        return f"; leave it out: {NOTHING[name]}"
    if close := closest(key, [*known, *{k.partition(".")[0] for k in known}]):
        return f"; did you mean {close}?"
    siblings = [k.rpartition(".")[2] for k in known if section and k.startswith(f"{section}.")]
    return f"; {section} has {', '.join(siblings)}" if siblings else "; --help lists the settings"


def closest(key: str, known: Sequence[str]) -> str | None:
    """The setting whose name is nearest: in the same section, as a whole, or under any section."""
    section, _, leaf = key.rpartition(".")
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    if leaf in leaves and leaves[leaf] != key:
        return leaves[leaf]
    siblings = {name.removeprefix(f"{section}."): name for name in known if section and name.startswith(f"{section}.")}
    whole = {} if siblings else {name: name for name in known}
    for names, name in ((siblings, leaf), (whole, key), (leaves, leaf)):
        if close := difflib.get_close_matches(name, names, n=1, cutoff=0.65):
            return names[close[0]]
    return None
