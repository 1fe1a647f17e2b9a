"""Inputs for parsers that are nearly right: trees, texts and lines of real files with a few things changed.

Random bytes end at a parser's first line. What is changed here stays of the form that the parser knows, so it is read to
where its meaning is looked at.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st


class Raw(NamedTuple):
    """A piece of JSON that json.dumps would not write."""

    text: str


ODD_TEXTS = (
    *("\ud800", "\0", "\x1b[31m", "\r# x", "1e999", "<<", "*a", "&a x", "!!int x", "2026-13-45", "9" * 5000, "{", ""),
    *(
        "\u202eabc",
        "a\nb",
        "../../etc/passwd",
        "%s%n",
        "{{ x }}",
        "nan",
        "-0",
        "null",
        "True",
        " ",
        "ſ",
        "🦜" * 40,
        "a" * 3000,
    ),
)
ODD_RAWS = (
    Raw("9" * 5000),
    Raw("-" + "9" * 400),
    Raw("1e999"),
    Raw("NaN"),
    Raw("-Infinity"),
    Raw("1" + "0" * 300 + ".5"),
    Raw("[" * 3000 + "]" * 3000),
    Raw('{"a":' * 3000 + "1" + "}" * 3000),
    Raw('{"a": 1, "a": 2}'),
    Raw('"\\ud800"'),
    Raw('"\\u0000"'),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**31 - 1, 2**53 + 1, 2**63, 2**64, -(2**63)),
    *([], {}, [None], [[]], {"": ""}, [1, "a", None, {}]),
    *ODD_TEXTS,
    *ODD_RAWS,
)
Path = tuple[int | str, ...]


def json_text(tree: Any) -> bytes:
    """A tree as JSON, with its raw pieces as they are."""
    if isinstance(tree, Raw):
        return tree.text.encode()
    if isinstance(tree, dict):
        return b"{" + b", ".join(json.dumps(str(k)).encode() + b": " + json_text(v) for k, v in tree.items()) + b"}"
    if isinstance(tree, list):
        return b"[" + b", ".join(map(json_text, tree)) + b"]"
    return json.dumps(tree).encode()


def json_lines(rows: Sequence[Any]) -> bytes:
    return b"\n".join(map(json_text, rows)) + b"\n"


def paths(tree: Any, here: Path = ()) -> Iterator[Path]:
    """Where a tree has values, itself included."""
    yield here
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if type(tree) is list else ()
    for key, value in items:
        yield from paths(value, (*here, key))


def at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def changed(trees: Sequence[Any], keys: Sequence[str] = (), values: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """One of some trees with one to four things changed in it.

    A value is replaced by an odd one or by a part of another tree, taken away, repeated, or put into a list or an object;
    a key gets another's name. keys, values: further ones that mean something.
    """
    every_key = sorted(
        {key for tree in trees for path in paths(tree) for key in path if isinstance(key, str)} | {*keys}
    )
    names = st.one_of(st.sampled_from(every_key or ["a"]), st.sampled_from(ODD_TEXTS))
    parts = [at(tree, path) for tree in trees for path in paths(tree)]
    new = st.one_of(
        st.sampled_from([*values, *ODD_VALUES]),
        st.sampled_from(parts),
        st.sampled_from([*values, *parts]),
        st.integers(-3, 2**20),
        st.floats(),
        st.text(max_size=12),
    )

    @st.composite
    def strategy(draw: Callable[..., Any]) -> Any:
        root = [copy.deepcopy(draw(st.sampled_from(trees)))]  # so that the tree itself has a place, too
        for _ in range(draw(st.integers(1, 4))):
            places = [path for path in paths(root) if path]
            if not places:
                break
            *above, key = draw(st.sampled_from(places))
            holder = at(root, tuple(above))
            _change(draw, holder, key, new, names)
        return root[0] if root else None

    return strategy()


def _change(draw: Callable[..., Any], holder: Any, key: Any, new: Any, names: Any) -> None:
    what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "repeat", "rename", "wrap", "add"]))
    if what == "replace":
        holder[key] = copy.deepcopy(draw(new))
    elif what == "remove":
        del holder[key]
    elif what == "wrap":
        holder[key] = draw(st.sampled_from([[holder[key]], {"a": holder[key]}, [holder[key], holder[key]]]))
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key] if what == "repeat" else draw(new)))
    elif what == "rename":
        holder[draw(names)] = holder.pop(key)
    else:
        holder[draw(names)] = copy.deepcopy(holder[key] if what == "repeat" else draw(new))


def bent(data: bytes, words: Sequence[bytes] = ()) -> st.SearchStrategy[bytes]:
    """The same bytes with some changed, cut off or put in. words: that mean something to the parser."""
    places = st.integers(0, max(len(data) - 1, 0))
    news = st.one_of(st.binary(max_size=4), *([st.sampled_from(words)] if words else []))
    change = st.tuples(places, news, st.integers(0, 4))

    def apply(changes: list[tuple[int, bytes, int]]) -> bytes:
        out = data
        for place, new, gone in changes:
            out = out[:place] + new + out[place + gone :]
        return out

    return st.lists(change, min_size=1, max_size=6).map(apply)


def lines_changed(text: str, words: Sequence[str] = ()) -> st.SearchStrategy[bytes]:
    """A text with some of its lines taken away, repeated, moved, indented, or with a word of theirs replaced."""
    lines = text.splitlines()
    new_words = st.sampled_from([*(words or ["a"]), *ODD_TEXTS])
    number = st.integers(0, max(len(lines) - 1, 0))
    change = st.tuples(st.sampled_from(["remove", "repeat", "move", "indent", "word", "word", "word"]), number, number)

    @st.composite
    def strategy(draw: Callable[..., Any]) -> bytes:
        out = list(lines)
        for what, one, other in draw(st.lists(change, min_size=1, max_size=5)):
            if not out:
                break
            one, other = one % len(out), other % len(out)
            if what == "remove":
                del out[one]
            elif what == "repeat":
                out.insert(other, out[one])
            elif what == "move":
                out.insert(other, out.pop(one))
            elif what == "indent":
                out[one] = " " * draw(st.integers(0, 6)) + out[one].lstrip()
            else:
                own = out[one].split(" ")
                own[draw(st.integers(0, len(own) - 1))] = draw(new_words)
                out[one] = " ".join(own)
        return "\n".join(out).encode("utf-8", "surrogatepass")

    return strategy()
