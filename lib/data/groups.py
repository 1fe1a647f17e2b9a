"""Groups: prompts with several completions each, which a policy sampled and something rewarded; for train.loss=grpo.

A record is tokenised, since the log-probabilities belong to tokens:

    {"prompt_ids": [...], "completion_ids": [[...], ...], "rewards": [1.0, null, ...], "logps": [[...], ...]}

`logps` are the sampling policy's, one a token; without them the policy in training counts as the one that sampled. A
completion whose reward is null is left out. With `"completion_mask": [[1, 0, ...], ...]` only tokens with a 1 are
learnt; a completion of which none is still counts, and so does its reward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from lib.config.settings import DataSettings
from lib.data import record_files, sources
from lib.data.dataset import Dataset, Example, pack
from lib.data.record_formats import JSON, Unusable, name_of_type
from lib.data.tokenizer import LARGEST_ID, ModelLimits
from lib.errors import UserError

COLUMNS = ("prompt_ids", "completion_ids", "rewards")
LARGEST = float(np.finfo(np.float32).max)
ROUNDED = 1e-4  # what another sampler's log-probability of a certain token may be rounded to
LEFT_OUT = ~0  # the one token, which is not learnt, of a completion of which none is


class Group(NamedTuple):
    """One record."""

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float | None]
    logps: list[list[float]] | None
    mask: list[list[bool]] | None = None  # of the tokens, which are learnt; None for all


@dataclass(frozen=True, eq=False)
class GroupedDataset(Dataset):
    """Groups in memory, all of K completions: smaller ones are filled up with some that are left out."""

    samples: int = 1  # K
    rewards: np.ndarray | None = None  # float32 [n, K]; NaN where there is none
    completion_lengths: np.ndarray | None = None  # float32 [n, K], tokens, masked ones too; 0 without a reward
    deviation: float = 0.0  # Of all rewards, that of a sample, with n - 1; 0 of a single one
    logps: np.ndarray | None = None  # float32, one for each of `tokens`, those of prompts too; None without

    @property
    def completions_per_example(self) -> int:
        return self.samples

    @property
    def unit(self) -> str:
        return f"groups of {self.samples}"

    def __getitem__(self, row: int) -> Example:
        example, first = super().__getitem__(row), row * (1 + self.samples) + 1
        assert self.rewards is not None and self.completion_lengths is not None
        bounds = self.bounds[first : first + self.samples + 1]
        return replace(
            example,
            rewards=self.rewards[row],
            completion_lengths=self.completion_lengths[row],
            reward_deviation=self.deviation,
            sampling_logps=None if self.logps is None else tuple(np.split(self.logps, bounds)[1:-1]),
        )


def load_groups(settings: DataSettings, limits: ModelLimits) -> GroupedDataset:
    """The groups of data.train. Raises UserError: as `load_dataset`."""
    groups, skipped, weights = list[Group](), list[str](), sources.weights_of(settings.train)
    name = " + ".join(weights)
    if any(weight != 1 for weight in weights.values()):
        raise UserError(f"data.train={weights}: groups of train.loss=grpo have no weights; name them without")
    for file in (file for source in weights for file in sources.files_of(source, settings)):
        for line, record in record_files.read(str(file)):
            try:
                groups.append(_parse(record, settings.max_length, limits))
            except Unusable as why:
                skipped.append(f"{file}:{line}: {why}")
    sources.require_usable(name, skipped, len(skipped), len(groups), settings)
    if len({group.logps is None for group in groups}) > 1:
        raise UserError(f"{name}: some groups have logps and some have none; give them to all, or to none")
    if not any(len({r for r in group.rewards if r is not None}) > 1 for group in groups):
        raise UserError(
            f"{name}: nothing can be learnt of its {len(groups):,} groups: in each all rewards are equal, null, or one "
            "alone; sample several completions of a prompt, and rewards that tell them apart"
        )
    return groups_in_memory(name, groups, skipped)


def _parse(record: JSON | Unusable, max_length: int, limits: ModelLimits) -> Group:
    if isinstance(record, Unusable):
        raise record
    for name in COLUMNS:
        if not isinstance(record.get(name), list):
            shown = "there is none" if name not in record else f"it is {name_of_type(record[name])}"
            raise Unusable(f"train.loss=grpo reads groups, which have a list {name!r}, and {shown}")
    prompt, completions, rewards = (record[name] for name in COLUMNS)
    if not completions or len(rewards) != len(completions):
        raise Unusable(f"{len(completions)} completion_ids and {len(rewards)} rewards; give one each")
    limit = limits.vocab_size or LARGEST_ID
    for ids, where in [(prompt, "prompt_ids"), *((ids, f"completion_ids[{k}]") for k, ids in enumerate(completions))]:
        if not isinstance(ids, list) or not ids:
            raise Unusable(f"{where} is {name_of_type(ids) if ids != [] else 'empty'}, not a list of token ids")
        wrong = next((token for token in ids if type(token) is not int or not 0 <= token < limit), None)
        if wrong is not None:
            raise Unusable(f"{where} has {repr(wrong)[:40]}, which is no token id below {limit}")
        end = len(ids) + (len(prompt) if ids is not prompt else 0)
        if end > max_length:
            raise Unusable(f"{where} ends behind data.max_length={max_length}; raise it: what was sampled is not cut")
        limits.check_row(end, "leave it out: what was sampled is not cut")
    for k, reward in enumerate(rewards):
        if reward is not None and not _is_finite(reward):
            raise Unusable(f"rewards[{k}] is {repr(reward)[:40]}, neither a number nor null")
    logps = _of_tokens(record, "logps", completions, lambda logp: _is_finite(logp) and logp <= ROUNDED)
    mask = _of_tokens(record, "completion_mask", completions, lambda bit: bit in (0, 1))
    return Group(prompt, completions, rewards, logps, mask and [[*map(bool, bits)] for bits in mask])


def _of_tokens(
    record: JSON, name: str, completions: list[list[int]], is_valid: Callable[[Any], bool]
) -> list[list[Any]] | None:
    """A list for each completion, with something for each of its tokens."""
    value, sizes = record.get(name), [len(ids) for ids in completions]
    if value is None:
        return None
    if not isinstance(value, list) or [len(v) if isinstance(v, list) else -1 for v in value] != sizes:
        raise Unusable(f"{name} has to be lists of {', '.join(map(str, sizes))} numbers, one a token of completion_ids")
    for k, of_completion in enumerate(value):
        if not all(map(is_valid, of_completion)):
            wanted = "log-probabilities: numbers up to 0" if name == "logps" else "0 and 1"
            raise Unusable(f"{name}[{k}] has something else than {wanted}")
    return value


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def groups_in_memory(name: str, groups: list[Group], skipped: list[str]) -> GroupedDataset:
    """A data set of these groups."""
    samples = max(len(group.completions) for group in groups)
    pieces, logps, has_logps = list[np.ndarray](), list[np.ndarray](), groups[0].logps is not None
    rewards = np.full((len(groups), samples), np.nan, np.float32)
    lengths = np.zeros_like(rewards)
    for row, group in enumerate(groups):
        pieces.append(np.array(group.prompt, np.int32))
        logps.append(np.zeros(len(group.prompt), np.float32))
        for k in range(samples):
            piece, of_piece = np.array([LEFT_OUT], np.int32), np.zeros(1, np.float32)
            reward = group.rewards[k] if k < len(group.rewards) else None
            if reward is not None:
                ids = np.array(group.completions[k], np.int32)
                rewards[row, k], lengths[row, k] = reward, len(ids)
                mask = np.ones(len(ids), bool) if group.mask is None else np.array(group.mask[k])
                if mask.any():
                    piece = np.where(mask, ids, ~ids).astype(np.int32)
                if len(piece) == len(ids):
                    of_piece = np.array(group.logps[k] if group.logps is not None else ids * 0, np.float32)
            pieces.append(piece)
            logps.append(of_piece)
    tokens, bounds, digest = pack("group", pieces, None)
    flat = np.concatenate(logps) if has_logps else None
    of_all = hashlib.sha256(digest.encode() + rewards.tobytes() + (b"" if flat is None else flat.tobytes()))
    known = rewards[~np.isnan(rewards)].astype(np.float64)
    deviation = float(known.std(ddof=1)) if len(known) > 1 else 0.0
    return GroupedDataset(
        name,
        "group",
        " + ".join(COLUMNS + ("logps",) * has_logps),
        of_all.hexdigest(),
        tokens,
        bounds,
        skipped=skipped,
        skipped_count=len(skipped),
        samples=samples,
        rewards=rewards,
        completion_lengths=lengths,
        deviation=deviation,
        logps=flat,
    )
