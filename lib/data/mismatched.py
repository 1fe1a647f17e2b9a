"""Completions of other prompts, which KTO compares a policy with its reference on (arXiv:2402.01306, section 4.1).

Which row gets whose completion is decided by the data set alone. So a row has the same one in every batch, on every
rank and in every epoch, and its reference log-probability is computed once, like that of its own completion.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lib.data.dataset import Dataset, pack
from lib.errors import UserError


def partners(prompt_keys: np.ndarray) -> np.ndarray:
    """For each row the one whose completion it gets: int64 [n], always of another prompt.

    All rows are put into an order drawn from their number; each gets the next row in it, cyclically, that has another
    prompt. So, where prompts do not repeat, every completion is taken once.

    prompt_keys: [n], equal for rows of the same prompt, and for no others.

    Raises:
        ValueError: all rows have the same prompt.
    """
    count = len(prompt_keys)
    draws = np.random.Philox(np.random.SeedSequence([count])).random_raw(count)
    order = np.argsort(draws, kind="stable")
    keys = prompt_keys[order]
    first_of_runs = np.flatnonzero(keys != np.roll(keys, 1))  # cyclically: a run may go on at the beginning
    if not len(first_of_runs):
        raise ValueError("all rows have the same prompt")
    following = np.searchsorted(first_of_runs, np.arange(count), side="right") % len(first_of_runs)
    result = np.empty(count, np.int64)
    result[order] = order[first_of_runs[following]]
    return result


def same_prompt(name: str) -> UserError:
    """What `partners` cannot do, for people."""
    return UserError(
        f"{name}: train.loss=kto compares every completion with those of other prompts, and all rows have the same "
        "prompt; add rows of another, or take train.loss=bco"
    )


def fitted(prompt: np.ndarray, completion: np.ndarray, max_length: int) -> np.ndarray:
    """Another prompt's completion behind a prompt: cut at its end to data.max_length, the prompt stays whole."""
    return completion[: max_length - len(prompt)]


def with_mismatched(dataset: Dataset, max_length: int) -> Dataset:
    """The data set with another prompt's completion as the last one of each row.

    Raises:
        UserError: all rows have the same prompt.
    """
    numbers: dict[bytes, int] = {}
    rows = list(dataset)
    keys = np.array([numbers.setdefault(row.prompt_ids.tobytes(), len(numbers)) for row in rows])
    try:
        others = partners(keys)
    except ValueError:
        raise same_prompt(dataset.path) from None
    pieces = []
    for row, other in zip(rows, others.tolist(), strict=True):
        pieces += [*row.stored, fitted(row.prompt_ids, rows[other].stored[1], max_length)]
    packed = pack(dataset.kind, pieces, dataset.labels)
    return replace(dataset, **packed._asdict(), has_mismatched=True)
