"""A data set in memory: records ➜ examples, which are the token ids of a prompt and of its completions.

The prompt is what inference sends, token for token, and a completion is what the model appends to it
(lib/data/chat.py). Tokens that are not learnt are kept as -1 - id, wherever pieces are stored.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lib.config.settings import DataSettings
from lib.data import sources
from lib.data.encode import Encoder, truncate
from lib.data.record_formats import Columns, Record, RecordKind, Tokens, Unusable, Unwanted, rows_of
from lib.data.tokenizer import NO_LIMITS, Tokenizer, Vocabulary, require_own
from lib.errors import UserError
from lib.system import os_commands

THREADS, CHUNK = 4, 256  # that tokenise, and records in memory as text


@dataclass(frozen=True, eq=False)
class Example:
    """One training example, tokenised."""

    row: int  # Its index in the data set, the same in every run over the same file and settings
    prompt_ids: np.ndarray  # int32 [P]; of plain text the tokens alone that the tokenizer opens a text with
    completions: tuple[np.ndarray, ...]
    """int32 [C_k] each, end token included; (chosen, rejected); a mismatched one last."""
    label: bool | None = None  # Of unpaired feedback: whether the completion is desirable
    learnt: tuple[np.ndarray, ...] | None = None  # bool [C_k] each: the tokens that are trained on; None for all
    # Of a group (lib/data/groups.py):
    rewards: np.ndarray | None = None  # float32 [K]; NaN for a completion that is left out
    completion_lengths: np.ndarray | None = None  # float32 [K]: tokens, masked ones too; 0 for one that is left out
    reward_deviation: float | None = None  # that of all rewards of the data set
    sampling_logps: tuple[np.ndarray, ...] | None = None  # float32 [C_k] each, under the policy that sampled it

    @classmethod
    def of(cls, row: int, pieces: Sequence[np.ndarray], label: bool | None = None) -> Example:
        """From stored pieces: a prompt and its completions, in which -1 - id is a token that is not learnt."""
        prompt, *completions = pieces
        learnt = tuple(piece >= 0 for piece in completions)
        if all(mask.all() for mask in learnt):
            return cls(row, prompt, tuple(completions), label)
        ids = tuple(np.where(mask, piece, ~piece) for mask, piece in zip(learnt, completions, strict=True))
        return cls(row, prompt, ids, label, learnt)

    @property
    def masks(self) -> list[np.ndarray]:
        """bool [C_k] each: the tokens that are trained on."""
        return [*self.learnt] if self.learnt else [np.ones(len(ids), bool) for ids in self.completions]

    @property
    def stored(self) -> list[np.ndarray]:
        """The pieces that it is made of."""
        both = zip(self.masks, self.completions, strict=True)
        return [self.prompt_ids, *(np.where(mask, ids, ~ids) for mask, ids in both)]

    @property
    def scored_indices(self) -> list[np.ndarray]:
        """int64 [tokens] each: where in a completion its scored tokens are; a text's first is not (see collate)."""
        first = int(not len(self.prompt_ids))
        return [np.flatnonzero(mask[first:]) + first for mask in self.masks]


class Sized:
    """What is known of a data set's rows without their tokens, from the sizes of their pieces."""

    kind: RecordKind
    has_mismatched: bool = False  # whether each row has another prompt's completion beside its own
    labels: np.ndarray | None = None  # bool [n], of unpaired feedback: whether a row's completion is desirable
    segments: np.ndarray | None = None  # int64 [m + 1]: bounds of rows that stand together (`epoch_order`)

    @property
    def completions_per_example(self) -> int:
        """K: 2 for preferences, 1 for SFT and labels; one more where rows have a mismatched completion."""
        return (2 if self.kind == "preference" else 1) + self.has_mismatched

    @property
    def trained(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 [n], [n, K'], [n, K']: `prompts`, and `seen` and `scored_tokens` of completions with gradients."""
        count = self.completions_per_example - self.has_mismatched
        return self.prompts, self.seen[:, :count], self.scored_tokens[:, :count]

    @property
    def unit(self) -> str:
        """What rows are called, and of which label they are."""
        if self.labels is None:
            return "pairs" if self.kind == "preference" else "examples"
        desirable = int(self.labels.sum())
        return f"rows ({desirable:,} desirable, {len(self.labels) - desirable:,} undesirable)"

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: positions that the model sees of a row's longest sequence, prompt + completion - 1."""
        return np.asarray(self.seen.max(axis=1))

    @property
    def prompts(self) -> np.ndarray:
        """int64 [n]: tokens of each prompt."""
        return self.pieces[:, 0]

    @property
    def seen(self) -> np.ndarray:
        """int64 [n, K]: positions that the model sees of each sequence."""
        return self.pieces[:, :1] + self.pieces[:, 1:] - 1

    @property
    def scored_tokens(self) -> np.ndarray:
        """int64 [n, K]: completion tokens with a log-probability, or more; a text's first has none (see collate)."""
        return self.pieces[:, 1:] - (self.pieces[:, :1] == 0)

    @property
    def pieces(self) -> np.ndarray:
        """int64 [n, 1 + K]: tokens of each prompt and of its completions."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Dataset(Sized):
    """Examples in memory, in the files' order; index them with the rows of lib/data/order.py."""

    path: str
    kind: RecordKind
    columns: str  # What was read, for people: `prompt + chosen + rejected`
    digest: str  # sha256 over kind, token ids and lengths, in order: covers tokenizer, template, data and truncation
    tokens: np.ndarray
    """int32 [T]: prompt, completions of row 0, prompt, completions of row 1, ...; -1 - id where it is not learnt."""
    bounds: np.ndarray  # int64 [n * (1 + K) + 1]: where each of these pieces begins in `tokens`, and the end
    labels: np.ndarray | None = None
    has_mismatched: bool = False
    truncated_count: int = 0  # Rows that lost tokens to data.max_length
    skipped: Sequence[str] = ()
    """`file:line: why` for records left out (data.skip_invalid), the first ones of each file."""
    skipped_count: int = 0
    unwanted_count: int = 0  # Records that the filters left out: lengths, duplicates

    is_estimated = False

    @property
    def pieces(self) -> np.ndarray:
        return np.diff(self.bounds).reshape(-1, 1 + self.completions_per_example)

    @cached_property
    def scored_tokens(self) -> np.ndarray:
        learnt = np.concatenate([[0], np.cumsum(self.tokens >= 0)])
        counts = np.diff(learnt[self.bounds]).reshape(self.pieces.shape)[:, 1:]
        first = self.tokens[self.bounds[:-1].reshape(self.pieces.shape)[:, 1:]]
        return np.asarray(counts - ((self.pieces[:, :1] == 0) & (first >= 0)))

    def __len__(self) -> int:
        return (len(self.bounds) - 1) // (1 + self.completions_per_example)

    def __getitem__(self, row: int) -> Example:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        width = 1 + self.completions_per_example
        pieces = np.split(self.tokens, self.bounds[row * width : (row + 1) * width + 1])[1:-1]
        return Example.of(int(row), pieces, None if self.labels is None else bool(self.labels[row]))

    def examples(self, rows: Sequence[int]) -> list[Example]:
        """The examples of some rows."""
        return [self[row] for row in rows]


Pieces = list[np.ndarray]
"""int32: the ids of a prompt, and of its completions, in which -1 - id is a token that is not learnt."""


def load_dataset(
    path: str | Mapping[str, float],
    settings: DataSettings,
    kind: RecordKind,
    tokenizer: Tokenizer | None,
    *,
    vocabulary: Vocabulary = NO_LIMITS,
    held_out: bool | None = None,
    tell: Callable[[str], None] = sources.silent,
) -> Dataset:
    """Read, tokenise, truncate and check the records of `path`, or of several sources with their weights. kind: `sft`
    takes the chosen one of pairs. held_out: which side of data.holdout; None for all rows. vocabulary: its eos_token_id
    ends each completion that its template has not ended; ids and rows beyond its sizes are refused. Raises UserError: a
    file cannot be read, is empty, has text without a tokenizer or, without data.skip_invalid, a bad record."""
    tokenisation = Tokenisation.of(settings, kind, tokenizer, vocabulary)
    records, numbers = sources.open_sources(path, settings, kind, held_out, tell)
    dataset = tokenisation.dataset(" + ".join(sources.weights_of(path)), records, numbers)
    tokenisation.tell_notes(tell)
    return dataset


class Tokenisation(NamedTuple):
    """How records become rows of token ids: read, encoded, checked and cut to data.max_length."""

    settings: DataSettings
    kind: RecordKind
    encoder: Encoder | None  # None without a tokenizer
    vocabulary: Vocabulary

    @classmethod
    def of(
        cls, settings: DataSettings, kind: RecordKind, tokenizer: Tokenizer | None, vocabulary: Vocabulary
    ) -> Tokenisation:
        """Raises UserError: see Encoder."""
        encoder = None if tokenizer is None else Encoder(tokenizer, settings, vocabulary.eos_token_id)
        return cls(settings, kind, encoder, vocabulary)

    def tell_notes(self, tell: Callable[[str], None]) -> None:
        """Says what was noticed of texts and template."""
        for note in self.encoder.notes if self.encoder else ():
            tell(note)

    def placed(self, records: Any, numbers: Iterable[int]) -> Iterator[tuple[str, Record | Unusable]]:
        """`file:line` and form of some records by number."""
        columns = Columns.of(self.settings)
        for number in map(int, numbers):
            rows = rows_of(records[number], columns, self.kind)
            place, label = records.location(number), records.label(number)
            form = next((row for row in rows if getattr(row, "label", None) == label), rows[0])
            require_own(form, self.encoder.tokenizer if self.encoder else None, place)
            yield place, form

    def rows(self, records: Any, numbers: Iterable[int]) -> Iterator[tuple[str, tuple[Pieces, bool] | Unusable]]:
        """Of some records by number the place, and ids with whether they were cut; or why there are none."""
        # Half of the time is a fast tokenizer's, which lets other threads run.
        is_fast = self.encoder is not None and self.encoder.tokens.is_fast
        placed = self.placed(records, numbers)
        with ThreadPoolExecutor(min(THREADS, os_commands.own_cores()) if is_fast else 1) as pool:
            while chunk := list(itertools.islice(placed, CHUNK)):
                places, forms = zip(*chunk, strict=True)
                yield from zip(places, pool.map(self._result, places, forms), strict=True)

    def _result(self, place: str, form: Record | Unusable) -> tuple[Pieces, bool] | Unusable:
        if self.encoder is None and not isinstance(form, Tokens | Unusable):
            raise UserError(
                f"{place}: its records are text, and the model has no tokenizer; add one to the model's folder, "
                "or give token ids (prompt_ids, chosen_ids, rejected_ids)"
            )
        try:
            return self._finish(form)
        except Unusable as why:
            return why

    def dataset(self, name: str, records: sources.Records, numbers: np.ndarray) -> Dataset:
        """The records of these numbers, int64 [n], in memory; one may be there twice. Raises as `load_dataset`."""
        wanted = list(dict.fromkeys(numbers.tolist()))
        pieces, skipped, cut, unwanted = dict[int, Pieces](), [*records.unusable], 0, 0
        count = records.unusable_count - len(skipped)  # those without a name
        for number, (place, result) in zip(wanted, self.rows(records, wanted), strict=True):
            if isinstance(result, Unwanted):
                unwanted += 1
            elif isinstance(result, Unusable):
                skipped.append(f"{place}: {result}")
            else:
                pieces[number], is_cut = result
                cut += is_cut
        count += len(skipped)
        sources.require_usable(name, skipped, count, len(pieces) + unwanted, self.settings.skip_invalid)
        if not pieces:
            raise UserError(f"{name}: no row is left, {unwanted:,} are filtered by data.shortest and data.longest")
        rows = [number for number in numbers.tolist() if number in pieces]
        flat = [piece for number in rows for piece in pieces[number]]
        labels = records.column("label")[rows] > 0 if self.kind == "unpaired" else None
        dataset = in_memory(name, self.kind, records.formats, flat, labels)
        return replace(dataset, truncated_count=cut, skipped=skipped, skipped_count=count, unwanted_count=unwanted)

    def _finish(self, record: Record | Unusable) -> tuple[Pieces, bool]:
        """Encode, check and truncate an example: ([prompt, completion, ...] int32, was it cut). Raises Unusable."""
        if isinstance(record, Unusable):
            raise record
        encoder, settings, max_length = self.encoder, self.settings, self.settings.max_length
        encoded: Any = record if encoder is None or isinstance(record, Tokens) else encoder.encoded(record)
        short = encoded
        whole = len(encoded.prompt) + max(map(len, encoded.completions))
        if whole < settings.shortest or whole > (settings.longest or whole):
            raise Unwanted(f"{whole} tokens: data.shortest={settings.shortest}, data.longest={settings.longest}")
        self.vocabulary.check_ids([encoded.prompt, *encoded.completions])
        if not all(encoded.completions):
            raise Unusable("empty completion: the tokenizer makes no tokens of it")
        if whole > max_length and encoder is not None and not isinstance(record, Tokens):
            short = encoder.shorten(record, encoded, max_length)
        if len(short.prompt) > max_length:
            raise Unusable(
                f"the prompt alone has {len(encoded.prompt)} tokens, more than data.max_length={max_length}; raise it"
            )
        bos_token_id = encoder.bos_token_id if encoder else None
        prompt, cut, is_cut = truncate(short.prompt, [*short.completions], max_length, bos_token_id)
        self.vocabulary.check_row(len(prompt) + max(map(len, cut)))
        if len(cut) > 1 and cut[0] == cut[1]:
            raise Unusable(f"chosen and rejected are the same tokens, within data.max_length={max_length}")
        pieces = [np.asarray(piece, np.int32) for piece in (prompt, *cut)]
        for k, mask in enumerate(short.learnt or (), 1):
            is_learnt = np.asarray(mask[: len(pieces[k])], bool)
            if not is_learnt.any():
                raise Unusable(f"no token is learnt of the {max_length} of data.max_length={max_length}; raise it")
            pieces[k] = np.where(is_learnt, pieces[k], ~pieces[k])
        if not all(map(len, Example.of(0, pieces).scored_indices)):  # a mean over none would make the whole step NaN
            raise Unusable("one token and no prompt: nothing comes before it to predict it from")
        return pieces, is_cut or short is not encoded


def in_memory(name: str, kind: RecordKind, columns: str, pieces: Pieces, labels: np.ndarray | None = None) -> Dataset:
    """A data set of these pieces: prompt, completions of row 0, ... labels: bool [n], for unpaired feedback."""
    tokens, bounds, digest = pack(kind, pieces, labels)
    return Dataset(name, kind, columns, digest, tokens, bounds, labels)


def pack(kind: RecordKind, pieces: Pieces, labels: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Pieces one after the other, where each begins, and the digest of it all, in one byte order for all hosts."""
    tokens, bounds = np.concatenate(pieces), np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    digest = hashlib.sha256(kind.encode())
    for array, dtype in ((bounds, "<i8"), (tokens, "<i4")):
        digest.update(array.astype(dtype, copy=False).data)
    digest.update(b"" if labels is None else labels.tobytes())
    return tokens, bounds, digest.hexdigest()


def partners(prompt_keys: np.ndarray, name: str) -> np.ndarray:
    """For each row the one whose completion it gets: int64 [n], always of another prompt. Rows are put into an order
    drawn from their number; each gets the next one, cyclically, that has another prompt. prompt_keys: [n], equal for
    rows of the same prompt. Raises UserError: all rows have the same prompt."""
    count = len(prompt_keys)
    draws = np.random.Philox(np.random.SeedSequence([count])).random_raw(count)
    order = np.argsort(draws, kind="stable")
    keys = prompt_keys[order]
    first_of_runs = np.flatnonzero(keys != np.roll(keys, 1))  # cyclically: a run may go on at the beginning
    if not len(first_of_runs):
        raise UserError(
            f"{name}: train.loss=kto compares every completion with those of other prompts, and all rows have the same "
            "prompt; add rows of another, or take train.loss=bco"
        )
    following = np.searchsorted(first_of_runs, np.arange(count), side="right") % len(first_of_runs)
    result = np.empty(count, np.int64)
    result[order] = order[first_of_runs[following]]
    return result


def with_mismatched(dataset: Dataset, max_length: int) -> Dataset:
    """The data set with another prompt's completion as the last one of each row, cut to max_length."""
    numbers: dict[bytes, int] = {}
    rows = dataset.examples(range(len(dataset)))
    keys = np.array([numbers.setdefault(row.prompt_ids.tobytes(), len(numbers)) for row in rows])
    pieces = []
    for row, other in zip(rows, partners(keys, dataset.path).tolist(), strict=True):
        pieces += [*row.stored, rows[other].stored[1][: max_length - len(row.prompt_ids)]]
    tokens, bounds, digest = pack(dataset.kind, pieces, dataset.labels)
    return replace(dataset, tokens=tokens, bounds=bounds, digest=digest, has_mismatched=True)
