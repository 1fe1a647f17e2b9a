"""Training data larger than memory: rows are read and tokenised when their turn comes.

The seeded order and the division among ranks need every row's length before any is tokenised. So lengths are estimated
from characters and a seeded sample, in whole numbers, so that all hosts get the same. Only padding and the balance of
ranks depend on them: each row is trained exactly once an epoch.
"""

from __future__ import annotations

import functools
import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lib.config.settings import DataSettings
from lib.data import hub, record_files, sources
from lib.data.dataset import Dataset, Example, Pieces, Sized, Tokenisation, load_dataset, with_mismatched
from lib.data.record_formats import JSON, Columns, RecordKind, Unusable, Unwanted, rows_of, unread_columns
from lib.data.sources import Records, Tell
from lib.data.tokenizer import NO_LIMITS, Tokenizer, Vocabulary
from lib.errors import UserError
from lib.system import files

Data: TypeAlias = "Dataset | StreamedDataset"
SAMPLE_ROWS = 256  # that are tokenised to know how many tokens a character makes


def open_training(
    settings: DataSettings,
    kind: RecordKind,
    tokenizer: Tokenizer | None,
    *,
    tell: Tell,
    mismatched: bool = False,
    vocabulary: Vocabulary = NO_LIMITS,
) -> Data:
    """data.train without what is held out: in memory, or, from 64 MB on (data.streaming), as it is needed. mismatched:
    whether each row gets another prompt's completion, too. Raises UserError: as `load_dataset`; of a streamed data set,
    for faults that show without tokens or in a sample."""
    settings = sources.with_splits(settings, tell)
    train, tokenisation = settings.train, Tokenisation.of(settings, kind, tokenizer, vocabulary)
    if settings.streaming and isinstance(train, str) and train.startswith(hub.PREFIX):
        is_simple = not (settings.holdout or settings.deduplicate or mismatched or kind == "unpaired")
        if is_simple and (remote := hub.parquet_files(train)):
            groups = RowGroups(train, remote, settings, kind, tell)
            return _told(StreamedDataset(train, groups, np.arange(len(groups)), tokenisation), tokenisation, tell)
        tell(f"{train}: the whole set is fetched first; only pairs and answers in parquet stream from the hub")
    records, rows = sources.open_sources(train, settings, kind, False if settings.holdout else None, tell)
    tell_unread((name for index in records.indices for name in index.unread), tell)
    name, streams = " + ".join(sources.weights_of(train)), settings.streaming
    if streams is None:
        streams = sum(index.stamp[0] for index in records.indices) >= sources.STREAMED_BYTES
    longest_row = vocabulary.row_tokens(settings.max_length)
    data: Data
    if streams and mismatched:
        tell(f"{name}: read whole, not as it is needed: train.loss=kto compares each row with others")
    if mismatched or not streams:
        plain = tokenisation.dataset(name, records, rows)
        data = with_mismatched(plain, longest_row) if mismatched else plain
    elif longest_row < settings.max_length:
        raise UserError(
            f"data.max_length={settings.max_length} is more than the {vocabulary.positions} positions of the model's "
            f"table, and streamed rows are read only when they are trained; set data.max_length={vocabulary.positions}"
        )
    else:
        data = StreamedDataset(name, records, rows, tokenisation)
    return _told(data, tokenisation, tell)


def tell_unread(names: Iterable[str], tell: Tell) -> None:
    """Names the columns that nothing reads, where there are any."""
    if unread := ", ".join(dict.fromkeys(names)):
        tell(f"columns that nothing reads: {unread}; data.ignore=[{unread}] says that this is meant")


def _told(data: Data, tokenisation: Tokenisation, tell: Tell) -> Data:
    """The data set, after what was noticed of its texts, its template and its longest row is said."""
    tokenisation.tell_notes(tell)
    longest, context = int(data.lengths.max()), tokenisation.vocabulary.context
    if context is not None and longest > context:
        tell(
            f"rows have up to {longest:,} tokens, {longest / context:.1f} times the model's max_position_embeddings of "
            f"{context:,}; it was not made for them: set data.max_length={context}"
        )
    return data


def open_held_out(
    settings: DataSettings,
    kind: RecordKind,
    tokenizer: Tokenizer | None,
    *,
    tell: Tell,
    mismatched: bool = False,
    vocabulary: Vocabulary = NO_LIMITS,
) -> Dataset | None:
    """data.valid, or what data.holdout keeps of data.train, in memory; None without. Raises as `load_dataset`."""
    if settings.valid and not re.search(r"[*?\[]|://", settings.valid) and not Path(settings.valid).exists():
        raise UserError(
            f"data.valid={settings.valid} does not exist (looked from {Path.cwd()}); name held-out "
            "records, or hold a part of data.train out with data.valid=null data.holdout=0.05"
        )
    settings = sources.with_splits(settings)
    if settings.valid is None and not settings.holdout:
        return None
    source, held_out = (settings.train, True) if settings.valid is None else (settings.valid, None)
    dataset = load_dataset(source, settings, kind, tokenizer, vocabulary=vocabulary, held_out=held_out, tell=tell)
    return with_mismatched(dataset, vocabulary.row_tokens(settings.max_length)) if mismatched else dataset


class RowGroups:
    """Parquet files of a hub data set as records, fetched to data.cache_dir a row group at a time. Rows of one group
    stand together in an epoch's order; all rows count as long as a sample of the first group."""

    unusable: tuple[str, ...] = ()
    unusable_count = 0

    def __init__(self, source: str, urls: dict[str, str], settings: DataSettings, kind: RecordKind, tell: Tell):
        self.source, self.cache_dir = source, settings.cache_dir
        self._groups: list[tuple[str, int]] = []
        self.digests, sizes = list[str](), [0]
        for name, url in urls.items():
            with hub.opened_parquet(source, url) as table:
                for group in range(table.metadata.num_row_groups):
                    self._groups.append((url, group))
                    sizes.append(table.metadata.row_group(group).num_rows)
                    self.digests.append(f"{source} {name} {group} {sizes[-1]}")
        self.segments = np.cumsum(sizes)
        self._read = functools.lru_cache(maxsize=4)(self._read_group)
        tell(f"{source}: {len(self):,} rows in {len(self._groups):,} row groups, fetched one after the other")
        columns, record = Columns.of(settings), self[0]
        tell_unread([] if isinstance(record, Unusable) else unread_columns(record, columns, kind), tell)
        first = rows_of(record, columns, kind)[0]
        self.formats = "parquet" if isinstance(first, Unusable) else first.columns

    def __len__(self) -> int:
        return int(self.segments[-1])

    def column(self, name: str) -> np.ndarray:
        """Of `pieces`, [n, 3], one character each: nothing is known of rows that are not fetched."""
        return np.broadcast_to(np.ones(3, np.uint32), (len(self), 3))

    def label(self, number: int) -> None:
        """None: rows with labels are not read so."""

    def location(self, number: int) -> str:
        """Which row of the data set, from 1."""
        return f"{self.source}:{number + 1}"

    def __getitem__(self, number: int) -> JSON | Unusable:
        group = bisect_right(self.segments, number) - 1
        return self._read(group)[number - int(self.segments[group])]

    def _read_group(self, number: int) -> list[JSON | Unusable]:
        import pyarrow.parquet

        url, group = self._groups[number]
        path = record_files.cached(self.cache_dir, "hub", self.digests[number]).with_suffix(".parquet")
        with sources.locked(path, print, f"fetches {url}"):
            if not path.exists():
                with hub.opened_parquet(self.source, url) as table, files.replacing(path) as file:
                    pyarrow.parquet.write_table(table.read_row_group(group), file)
        return [record for _, record in record_files.read_parquet(path)]


class StreamedDataset(Sized):
    """Rows of indexed records; each is read, tokenised, truncated and checked when it is asked for. rows: int64 [n],
    the record of each row. Raises UserError: no tokenizer; a bad row in the sample."""

    is_estimated = True
    unwanted_count = 0  # Rows that a filter by length has left out so far

    def __init__(self, path: str, records: Records | RowGroups, rows: np.ndarray, tokenisation: Tokenisation):
        self.path, self.kind, self.columns = path, tokenisation.kind, records.formats
        self.records, self.rows, self.tokenisation = records, rows, tokenisation
        self.labels = records.column("label")[rows] > 0 if self.kind == "unpaired" else None
        self._left_out: set[int] = set()
        self.skipped, self.skipped_count = [*records.unusable][: sources.NAMED], records.unusable_count
        self.segments = records.segments
        drawn_from = np.uint64(len(rows) if self.segments is None else self.segments[1])
        draws = np.random.Philox(np.random.SeedSequence([len(rows)])).random_raw(SAMPLE_ROWS)
        sample = np.unique(draws % drawn_from).astype(np.int64)
        examples = self.examples(sample.tolist())
        if not examples:
            why = "".join(f": {text}" for text in self.skipped[-1:])
            raise UserError(f"{path}: none of {len(sample)} rows drawn can be used{why}")
        tokens = np.array([[len(e.prompt_ids), *map(len, e.completions)] for e in examples], np.int64)
        characters = records.column("pieces")[:, : tokens.shape[1]].astype(np.int64)[rows]
        sampled, max_length = characters[[e.row for e in examples]].sum(axis=0), tokenisation.settings.max_length
        self._pieces = _estimated(characters, tokens.sum(axis=0), sampled, max_length)
        cut = (tokens[:, 0] + tokens[:, 1:].max(axis=1) == max_length).sum()
        self.truncated_count = int(cut) * len(rows) // len(examples)
        self.digest = self._digest(tokens)

    def _digest(self, tokens: np.ndarray) -> str:
        """sha256 of all that decides the rows. tokens: int64 [samples, 1 + K], of a sample."""
        settings, kind, encoder, vocabulary = self.tokenisation
        what = [kind, settings.max_length, settings.shortest, settings.longest, vocabulary.vocab_size]
        made_by = [what, Columns.of(settings), None if encoder is None else encoder.fingerprint()]
        digest = hashlib.sha256(repr(made_by).encode() + " ".join(self.records.digests).encode())
        digest.update(self.rows.astype("<i8", copy=False).tobytes() + tokens.astype("<i8").tobytes())
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()

    @property
    def pieces(self) -> np.ndarray:
        return self._pieces

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Example:
        (example,) = self.examples([row])
        return example

    def examples(self, rows: Sequence[int]) -> list[Example]:
        """The examples of some rows, without those that turn out to be unusable or are filtered: counted, and named.
        Raises UserError: a row cannot be used, unless data.skip_invalid; a file has changed."""
        labels = [None if self.labels is None else bool(self.labels[row]) for row in rows]
        each = zip(rows, map(self._read, rows), labels, strict=True)
        return [Example.of(row, pieces, label) for row, pieces, label in each if pieces is not None]

    def _read(self, row: int) -> Pieces | None:
        """A row's prompt and completions; None where it is left out, which is counted and named once."""
        number, skips = int(self.rows[row]), self.tokenisation.settings.skip_invalid
        ((place, result),) = self.tokenisation.rows(self.records, [number])
        if not isinstance(result, Unusable):
            return result[0]
        name, is_unwanted = f"{place}: {result}", isinstance(result, Unwanted)
        if not is_unwanted and not skips:
            raise UserError(
                f"{name}; fix the file, or leave such rows out with data.skip_invalid=true (python -m lib.data "
                "--inspect finds all of them beforehand)"
            )
        if number not in self._left_out:
            self._left_out.add(number)
            self.unwanted_count += is_unwanted
            if not is_unwanted:
                self.skipped_count += 1
                self.skipped = [*self.skipped[: sources.NAMED - 1], name]
        return None


def _estimated(characters: np.ndarray, tokens: np.ndarray, of_characters: np.ndarray, max_length: int) -> np.ndarray:
    """Tokens of every row's pieces after truncation, by proportion: int32 [n, 1 + K]. characters: int64 [n, 1 + K].
    tokens, of_characters: int64 [1 + K], what a sample came to."""
    estimated = np.maximum(characters * tokens // np.maximum(of_characters, 1), 1)
    estimated[:, 0][characters[:, 0] == 0] = 0
    kept = np.minimum(estimated[:, 0], max(1, max_length // 4))
    longest = np.minimum(estimated[:, 1:].max(axis=1), max_length - kept)
    estimated[:, 0] = np.minimum(estimated[:, 0], max_length - longest)
    estimated[:, 1:] = np.minimum(estimated[:, 1:], max_length - estimated[:, :1])
    estimated[:, 1:] = np.maximum(estimated[:, 1:], 2)  # a text's first token is not scored
    return estimated.astype(np.int32)
