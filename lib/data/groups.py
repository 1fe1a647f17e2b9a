"""Groups: prompts with several completions each, which a policy sampled and something rewarded; for train.loss=grpo.

A record is tokenised, since the log-probabilities belong to tokens:

    {"prompt_ids": [...], "completion_ids": [[...], ...], "rewards": [1.0, null, ...], "logps": [[...], ...]}

`logps` are the sampling policy's, one a token; without them the policy in training counts as the one that sampled. A
completion whose reward is null is left out. With `"completion_mask": [[1, 0, ...], ...]` only tokens with a 1 are
learnt; a completion of which none is still counts, and so does its reward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le, MinLen
from pydantic import BaseModel, Strict, TypeAdapter

from lib.config.settings import DataSettings
from lib.data import record_files, sources
from lib.data.dataset import Dataset, Example, pack
from lib.data.record_formats import JSON, Unusable, checked
from lib.data.tokenizer import Vocabulary
from lib.errors import UserError

COLUMNS = ("prompt_ids", "completion_ids", "rewards")
LARGEST = float(np.finfo(np.float32).max)
Ids = Annotated[list[Annotated[int, Strict(), Ge(0)]], MinLen(1)]
Number = Annotated[float, Ge(-LARGEST), Le(LARGEST)]
Bit = Annotated[int, Ge(0), Le(1)] | bool


class Group(BaseModel, strict=True):
    """A record as its file has it."""

    prompt_ids: Ids
    completion_ids: Annotated[list[Ids], MinLen(1)]
    rewards: list[Number | None]
    logps: list[list[Annotated[Number, Le(1e-4)]]] | None = None  # another sampler may have rounded that of 1
    completion_mask: list[list[Bit]] | None = None


RECORD = TypeAdapter(Group)
LEFT_OUT = ~0  # the one token, which is not learnt, of a completion of which none is


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


def load_groups(settings: DataSettings, limits: Vocabulary, tell: sources.Tell = sources.silent) -> GroupedDataset:
    """The groups of data.train; what a folder holds out is left. Raises UserError: as `load_dataset`."""
    settings = sources.with_splits(settings, tell, holds_out=False)
    groups, skipped, names = list[Group](), list[str](), sources.unweighted(settings.train, "groups of train.loss=grpo")
    name = " + ".join(names)
    for file in (file for source in names for file in sources.files_of(source, settings.cache_dir)):
        for line, record in record_files.read(str(file)):
            try:
                groups.append(_parse(record, settings.max_length, limits))
            except Unusable as why:
                skipped.append(f"{file}:{line}: {why}")
    sources.require_usable(name, skipped, len(skipped), len(groups), settings.skip_invalid)
    if len({group.logps is None for group in groups}) > 1:
        raise UserError(f"{name}: some groups have logps and some have none; give them to all, or to none")
    if not any(map(teaches, groups)):
        raise UserError(
            f"{name}: nothing can be learnt of its {len(groups):,} groups: in each all rewards or completions are "
            "equal, null, masked or one alone; sample several completions of a prompt, and rewards that tell them apart"
        )
    return groups_in_memory(name, groups, skipped)


def teaches(group: Group) -> bool:
    """Whether the completions that have rewards differ, as their rewards do, and tokens of them are learnt."""
    counted = [k for k, reward in enumerate(group.rewards) if reward is not None]
    is_learnt = group.completion_mask is None or any(any(group.completion_mask[k]) for k in counted)
    return is_learnt and all(len({str(of[k]) for k in counted}) > 1 for of in (group.rewards, group.completion_ids))


def _parse(record: JSON | Unusable, max_length: int, limits: Vocabulary) -> Group:
    if isinstance(record, Unusable):
        raise record
    group: Group = checked(RECORD, record, "")
    if len(group.rewards) != len(group.completion_ids):
        raise Unusable(f"{len(group.completion_ids)} completion_ids and {len(group.rewards)} rewards; give one each")
    limits.check_ids([group.prompt_ids, *group.completion_ids])
    sizes = [*map(len, group.completion_ids)]
    tokens = len(group.prompt_ids) + max(sizes)
    if tokens > max_length:
        raise Unusable(
            f"{tokens} tokens are beyond data.max_length={max_length}; raise it: what was sampled is not cut"
        )
    limits.check_row(tokens, "leave it out: what was sampled is not cut")
    for name, lists in (("logps", group.logps), ("completion_mask", group.completion_mask)):
        if lists is not None and [*map(len, lists)] != sizes:
            wanted = f"lists of {', '.join(map(str, sizes))} numbers, one a token of completion_ids"
            raise Unusable(f"{name} has to be {wanted}")
    return group


def groups_in_memory(name: str, groups: list[Group], skipped: list[str]) -> GroupedDataset:
    """A data set of these groups."""
    samples, has_logps = max(len(group.rewards) for group in groups), groups[0].logps is not None
    pieces, flat = list[np.ndarray](), list[np.ndarray]()
    rewards = np.full((len(groups), samples), np.nan, np.float32)
    lengths = np.zeros_like(rewards)
    for row, group in enumerate(groups):
        of_group = [np.array(group.prompt_ids, np.int32)] + [np.array([LEFT_OUT], np.int32)] * samples
        of_tokens = [np.zeros(len(piece), np.float32) for piece in of_group]
        for k, (completion, reward) in enumerate(zip(group.completion_ids, group.rewards, strict=True)):
            if reward is None:
                continue
            rewards[row, k], lengths[row, k] = reward, len(completion)
            ids = np.array(completion, np.int32)
            learnt = np.array(group.completion_mask[k] if group.completion_mask else ids >= 0, bool)
            if learnt.any() or len(ids) == 1:
                of_tokens[k + 1] = np.array(group.logps[k] if group.logps else ids * 0, np.float32)
            if learnt.any():
                of_group[k + 1] = np.where(learnt, ids, ~ids)
        pieces += of_group
        flat += of_tokens
    tokens, bounds, digest = pack("group", pieces, None)
    all_logps = np.concatenate(flat) if has_logps else None
    of_all = hashlib.sha256(digest.encode() + rewards.tobytes() + (b"" if all_logps is None else all_logps.tobytes()))
    present = rewards[~np.isnan(rewards)].astype(np.float64)
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
        deviation=float(present.std(ddof=1)) if len(present) > 1 else 0.0,
        logps=all_logps,
    )


def group_arrays(examples: Sequence[Example], mask: np.ndarray) -> dict[str, Any]:
    """Batch's `rewards` and what else groups have; nothing for other examples."""
    first, arrays = examples[0], dict[str, np.ndarray]()
    for name, filler in (("rewards", np.nan), ("completion_lengths", 0.0)):
        if getattr(first, name) is not None:
            arrays[name] = np.full(mask.shape[:2], filler, np.float32)
            arrays[name][: len(examples)] = [getattr(example, name) for example in examples]
    if first.reward_deviation is not None:
        arrays["reward_deviations"] = np.full(len(mask), first.reward_deviation, np.float32)
    if first.sampling_logps is not None:
        both = [pair for e in examples for pair in zip(e.sampling_logps or (), e.scored_indices, strict=True)]
        arrays["sampling_logps"] = np.zeros(mask.shape, np.float32)
        arrays["sampling_logps"][mask] = np.concatenate([logps[scored] for logps, scored in both])
    return arrays
