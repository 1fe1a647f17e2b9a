"""The arrays of a batch that is decoded, laid out anew as rows end and others begin: a few shapes, so a few traces."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.data.batch import pad_length
from lib.model.continuations import PromptArrays, RowArrays, prefill

PREFILL_TOKENS = 16384  # of prompts in one pass
POSITIONS = 16  # what prompts are padded to; more where they are long
COLUMNS = 64  # what the rows' own keys and values grow by; more where there are many


class Rectangles:
    """B rows, T columns wide, and the P prompts that they go on from, as lib/model/continuations.py takes them.

    Padding is at the end: rows that nobody reads, prompts that no row has.
    """

    rows: RowArrays
    prompts: PromptArrays

    def __init__(self, model: nn.Module):
        self.model = model
        self.column = 0  # where the next keys and values go
        self.count = 0  # B
        self.groups = np.zeros(0, np.int64)  # of each row that is not padding: its prompt
        self.starts = np.zeros(0, np.int32)  # of these rows: the column of the first token
        self.lengths = np.zeros(0, np.int32)  # of each prompt that is not padding

    def would_shrink(self, live: int) -> bool:
        """Whether a smaller batch has room for so many rows."""
        return live > 0 and _row_count(live) < self.count

    def lay_out(self, kept: Sequence[int], prompts: Sequence[list[int]], samples: int) -> mx.array | None:
        """The kept rows, then `samples` rows for each of some new prompts, whose first tokens `set_tokens` sets.

        Returns:
            The logits behind the new prompts, [prompts, V]; None without any.
        """
        starts = self.starts[kept]
        first = int(starts.min(initial=self.column))  # nobody looks at columns before it
        width, at = self.column - first, mx.array(kept, mx.int32)
        stay, groups = np.unique(self.groups[kept], return_inverse=True)
        new_lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        lengths = np.concatenate([self.lengths[stay], new_lengths])
        new_groups = len(stay) + np.repeat(np.arange(len(prompts)), samples)
        length = pad_length(int(lengths.max()), POSITIONS)
        self.groups = np.concatenate([groups, new_groups])
        self.starts = np.concatenate([starts - first, np.full(len(new_groups), width, np.int32)])
        self.lengths, self.column, self.count = lengths, width, _row_count(len(self.groups))
        logits, new_arrays = self._prefilled(prompts, length) if prompts else (None, [])
        kept_prompts, kept_rows = ([], []) if not len(kept) else (self._prompt_arrays(stay), self._row_arrays(at))
        places, columns = pad_length(len(lengths), 4, 4), pad_length(width + 1, COLUMNS)
        joined = [
            _sized(mx.concatenate([_sized(x, len(x), length) for x in parts]), places, length)
            for parts in zip(*filter(None, (kept_prompts, new_arrays)), strict=True)
        ]
        own = [_sized(x[:, :, first : first + width], self.count, columns) for x in kept_rows] or [
            mx.zeros((self.count, x.shape[1], columns, x.shape[3]), x.dtype) for x in joined
        ]
        blocks = len(joined) // 2
        members, homes = _membership(self.groups, places, self.count)
        self.prompts = {
            "keys": joined[:blocks],
            "values": joined[blocks:],
            "lengths": mx.array(np.pad(lengths, (0, places - len(lengths)), constant_values=1)),
            "members": mx.array(members),
            "homes": mx.array(homes),
            "starts": mx.array(np.pad(self.starts, (0, self.count - len(self.starts)), constant_values=width)),
        }
        new_offsets = mx.array(np.repeat(new_lengths, samples))
        padding = mx.ones(self.count - len(self.groups), mx.int32)
        old_offsets = mx.take(self.rows["offsets"], at) if len(kept) else mx.zeros(0, mx.int32)
        old_tokens = mx.take(self.rows["tokens"], at) if len(kept) else mx.zeros(0, mx.int32)
        self.rows = {
            "tokens": mx.concatenate([old_tokens, mx.zeros_like(new_offsets), padding]),
            "offsets": mx.concatenate([old_offsets, new_offsets, padding]),
            "column": mx.array([width]),
            "keys": own[:blocks],
            "values": own[blocks:],
        }
        return logits

    def set_tokens(self, tokens: mx.array) -> None:
        """The first tokens of the rows that began last: int32 [new rows]."""
        end = len(self.groups)
        self.rows["tokens"] = mx.concatenate(
            [self.rows["tokens"][: end - len(tokens)], tokens, self.rows["tokens"][end:]]
        )

    def widen(self, steps: int) -> None:
        """Makes room for the keys and values of so many more tokens of each row."""
        columns = pad_length(self.column + steps, COLUMNS)
        for name in ("keys", "values"):
            self.rows[name] = [_sized(x, len(x), max(columns, x.shape[2])) for x in self.rows[name]]

    def _prompt_arrays(self, stay: np.ndarray) -> list[mx.array]:
        at = mx.array(stay)
        return [mx.take(x, at, axis=0) for x in (*self.prompts["keys"], *self.prompts["values"])]

    def _row_arrays(self, at: mx.array) -> list[mx.array]:
        return [mx.take(x, at, axis=0) for x in (*self.rows["keys"], *self.rows["values"])]

    def _prefilled(self, prompts: Sequence[list[int]], length: int) -> tuple[mx.array, list[mx.array]]:
        """Logits [prompts, V], and the keys of every block, then its values, [prompts, heads, length, head_dim]."""
        tokens = np.zeros((len(prompts), length), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths, size = np.array([len(prompt) for prompt in prompts], np.int32), max(1, PREFILL_TOKENS // length)
        passes = []
        for start in range(0, len(prompts), size):
            rows = slice(start, start + size)
            logits, keys, values = prefill(self.model, mx.array(tokens[rows]), mx.array(lengths[rows]))
            passes.append([logits, *keys, *values])
            mx.eval(passes[-1])  # one pass's activations at a time
        logits, *arrays = (mx.concatenate(parts) for parts in zip(*passes, strict=True))
        return logits, arrays


def _row_count(rows: int) -> int:
    """B for so many rows."""
    return pad_length(rows, 8, 4)


def _membership(groups: np.ndarray, prompts: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """PromptArrays' `members`, int32 [prompts, W], and `homes`, int32 [rows]. groups: [rows or fewer]."""
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups, minlength=prompts)
    index = np.empty(len(groups), np.int64)  # among the rows of its prompt
    index[order] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    width = int(sizes.max())
    members, homes = np.zeros((prompts, width), np.int32), np.zeros(rows, np.int32)
    members[groups, index] = np.arange(len(groups))
    homes[: len(groups)] = groups * width + index
    return members, homes


def _sized(x: mx.array, count: int, length: int) -> mx.array:
    """[n, heads, l, head_dim] ➜ [count, heads, length, head_dim], cut or filled up with zeros at its ends."""
    x = x[:, :, :length]
    missing = count - x.shape[0], length - x.shape[2]
    return mx.pad(x, [(0, missing[0]), (0, 0), (0, missing[1]), (0, 0)]) if any(missing) else x
