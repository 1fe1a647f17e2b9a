"""Training data larger than memory: rows are read and tokenised when their turn comes.

The seeded order and the division among ranks need every row's length before any is tokenised. So lengths are estimated
from characters and a seeded sample, in whole numbers, so that all hosts get the same. Only padding and the balance of
ranks depend on them: each row is trained exactly once an epoch.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from lib.config.settings import DataSettings
from lib.data import hub, record_files, sources
from lib.data.dataset import Dataset, Example, Pieces, Sized, Tokenisation, load_dataset, partners, with_mismatched
from lib.data.record_formats import JSON, Columns, RecordKind, Unusable, Unwanted, rows_of, unread_columns
from lib.data.sources import Records, Tell
from lib.data.tokenizer import Tokenizer, Vocabulary, limits_of
from lib.errors import UserError
from lib.system import files

SAMPLE_ROWS = 256  # that are tokenised to know how many tokens a character makes
UNPACKED = {".gz": 4, ".parquet": 4}  # what is unpacked takes about so many times the room


def open_training(
    settings: DataSettings,
    kind: RecordKind,
    tokenizer: Tokenizer | None,
    *,
    tell: Tell,
    mismatched: bool = False,
    **vocabulary: Unpack[Vocabulary],
) -> Dataset | StreamedDataset:
    """data.train without what is held out: in memory, or, from 64 MB on (data.streaming), as it is needed.

    mismatched: whether each row gets another prompt's completion, too. Raises UserError: as `load_dataset`; of a
    streamed data set, for faults that show without tokens or in a sample.
    """
    settings = with_splits(settings, tell)
    tokenisation, held_out = Tokenisation.of(settings, kind, tokenizer, vocabulary), False if settings.holdout else None
    limits, longest_row = tokenisation.limits, tokenisation.limits.row_tokens(settings.max_length)
    if settings.streaming and isinstance(settings.train, str) and settings.train.startswith(hub.PREFIX):
        is_simple = not (settings.holdout or settings.deduplicate or mismatched or kind == "unpaired")
        if is_simple and (remote := hub.parquet_files(settings.train)):
            groups = RowGroups(settings.train, remote, settings, kind, tell)
            return StreamedDataset(settings.train, groups, np.arange(len(groups)), tokenisation)
        tell(f"{settings.train}: the whole set is fetched first; only pairs and answers in parquet stream from the hub")
    tell_unread(settings, kind, tell)
    data: Dataset | StreamedDataset
    if not _is_streamed(settings, tell):
        data = load_dataset(settings.train, settings, kind, tokenizer, held_out=held_out, tell=tell, **vocabulary)
    elif longest_row < settings.max_length:
        raise UserError(
            f"data.max_length={settings.max_length} is more than the {limits.positions} positions of the model's "
            f"table, and streamed rows are read only when they are trained; set data.max_length={limits.positions}"
        )
    else:
        records, rows = sources.open_sources(settings.train, settings, kind, held_out, tell)
        name = " + ".join(sources.weights_of(settings.train))
        data = StreamedDataset(name, records, rows, tokenisation, mismatched)
        tokenisation.tell_notes(tell)
    longest, context = int(data.lengths.max()), vocabulary.get("context")
    if context is not None and longest > context:
        tell(
            f"rows have up to {longest:,} tokens, {longest / context:.1f} times the model's max_position_embeddings of "
            f"{context:,}; it was not made for them: set data.max_length={context}"
        )
    return with_mismatched(data, longest_row) if isinstance(data, Dataset) and mismatched else data


def with_splits(settings: DataSettings, tell: Tell = lambda text: None) -> DataSettings:
    """The settings with the files of data.train=DIR whose names say train, valid or test.

    Train is trained, or what has no such name; valid is held out, unless settings say what is; the rest is left.
    """
    folder = Path(settings.train) if isinstance(settings.train, str) and "://" not in settings.train else None
    if folder is None or not folder.is_dir():
        return settings
    splits = {
        path: hub.split_of(path.relative_to(folder).as_posix()) for path in sources.files_of(str(folder), settings)
    }
    named = {name: [path for path in splits if splits[path] == name] for name in ("train", None, "validation")}
    train, valid = named["train"] or named[None], named["validation"]
    if not train or len(train) == len(splits):
        return settings
    start = os.path.commonprefix([*map(str, valid)])
    is_told = settings.valid is not None or settings.holdout
    if is_told or [path for path in splits if str(path).startswith(start)] != valid:
        valid = []
    together = start.rstrip("/") if len(valid) == 1 or start.endswith("/") else f"{glob.escape(start)}*"
    left = [path for path in splits if path not in (*train, *valid)]
    uses = ((train, "trained"), (valid, "held out"), (left, "left"))
    parts = [f"{', '.join(str(path.relative_to(folder)) for path in paths)} is {use}" for paths, use in uses if paths]
    tell(f"{settings.train}: {', '.join(parts)}")
    changes: dict[str, object] = {"train": str(train[0]) if len(train) == 1 else dict.fromkeys(map(str, train), 1.0)}
    return settings.model_copy(update=changes | ({"valid": together} if valid else {}))


def tell_unread(settings: DataSettings, kind: RecordKind, tell: Tell) -> None:
    """Names the columns that nothing reads, by the first 64 records of each file."""
    unread: dict[str, None] = {}
    for source in sources.weights_of(settings.train):
        for file in sources.files_of(source, settings, tell):
            for _, record in itertools.islice(record_files.read(str(file)), 64):
                names = [] if isinstance(record, Unusable) else unread_columns(record, settings, kind)
                unread |= dict.fromkeys(names)
    if unread:
        listed = ", ".join(unread)
        tell(f"columns that nothing reads: {listed}; data.ignore=[{listed}] says that this is meant")


def open_held_out(
    settings: DataSettings,
    kind: RecordKind,
    tokenizer: Tokenizer | None,
    *,
    tell: Tell,
    mismatched: bool = False,
    **vocabulary: Unpack[Vocabulary],
) -> Dataset | None:
    """data.valid, or what data.holdout keeps of data.train, in memory; None without. Raises as `load_dataset`."""
    settings = with_splits(settings)
    if settings.valid is None and not settings.holdout:
        return None
    if settings.valid and not re.search(r"[*?\[]|://", settings.valid) and not Path(settings.valid).exists():
        raise UserError(
            f"data.valid={settings.valid} does not exist (looked from {Path.cwd()}); name held-out "
            "records, or hold a part of data.train out with data.valid=null data.holdout=0.05"
        )
    path, held_out = (settings.train, True) if settings.valid is None else (settings.valid, None)
    dataset = load_dataset(path, settings, kind, tokenizer, held_out=held_out, tell=tell, **vocabulary)
    longest_row = limits_of(vocabulary).row_tokens(settings.max_length)
    return with_mismatched(dataset, longest_row) if mismatched else dataset


def _is_streamed(settings: DataSettings, tell: Tell) -> bool:
    """Whether data.train is read as it is needed."""
    if settings.streaming is not None:
        return settings.streaming
    paths = [path for source in sources.weights_of(settings.train) for path in sources.files_of(source, settings, tell)]
    return sum(path.stat().st_size * UNPACKED.get(path.suffix, 1) for path in paths) >= sources.STREAMED_BYTES


class RowGroups:
    """Parquet files of a hub data set as records, fetched to data.cache_dir a row group at a time.

    Rows of one group stand together in an epoch's order; all rows count as long as a sample of the first group.
    """

    unusable: tuple[str, ...] = ()
    unusable_count = 0

    def __init__(self, source: str, urls: dict[str, str], settings: DataSettings, kind: RecordKind, tell: Tell):
        self.source, self.cache = source, Path(settings.cache_dir)
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
        first = rows_of(self[0], settings, kind)[0]
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
        path = self.cache / f"hub-{hashlib.sha256(self.digests[number].encode()).hexdigest()[:24]}.parquet"
        with sources.locked(path.with_suffix(".lock"), print, f"fetches {url}"):
            if not path.exists():
                with hub.opened_parquet(self.source, url) as table, files.replacing(path) as kept:
                    pyarrow.parquet.write_table(table.read_row_group(group), kept)
        return [record for _, record in record_files.read_parquet(path)]


class StreamedDataset(Sized):
    """Rows of indexed records; each is read, tokenised, truncated and checked when it is asked for.

    rows: int64 [n], the record of each row. Raises UserError: no tokenizer; a bad row in the sample.
    """

    is_estimated = True

    def __init__(
        self,
        path: str,
        records: Records | RowGroups,
        rows: np.ndarray,
        tokenisation: Tokenisation,
        mismatched: bool = False,
    ):
        settings, kind, encoder, limits = tokenisation
        self.path, self.kind, self.columns = path, kind, records.formats
        self.records, self.rows, self.tokenisation, self.max_length = records, rows, tokenisation, settings.max_length
        self.labels = records.column("label")[rows] > 0 if kind == "unpaired" else None
        self.has_mismatched = False  # not until rows are known by themselves
        self._left_out: set[int] = set()
        self.skipped, self.skipped_count = [*records.unusable][: sources.NAMED], records.unusable_count
        self.unwanted_count = 0  # Rows that a filter by length has left out so far
        self.segments = records.segments
        drawn_from = np.uint64(len(rows) if self.segments is None else self.segments[1])
        draws = np.random.Philox(np.random.SeedSequence([len(rows)])).random_raw(SAMPLE_ROWS)
        sample = np.unique(draws % drawn_from).astype(np.int64)
        examples = self.examples(sample.tolist())
        if not examples:
            why = "".join(f": {text}" for text in self.skipped[-1:])
            raise UserError(f"{path}: none of {len(sample)} rows drawn can be used{why}")
        tokens = np.array([[len(e.prompt_ids), *map(len, e.completions)] for e in examples], np.int64)
        sampled = self._characters(rows[[e.row for e in examples]])
        self._pieces = _estimated(self._characters(rows), tokens.sum(axis=0), sampled.sum(axis=0), self.max_length)
        if mismatched:  # every row gets another prompt's completion
            self._prompt_keys = records.column("prompt_key")[rows]
            self._partners = partners(self._prompt_keys, path)
            theirs = np.minimum(self._pieces[self._partners, 1], self.max_length - self._pieces[:, 0])
            self._pieces = np.column_stack([self._pieces, theirs]).astype(np.int32)
            self.has_mismatched = True
        whole = tokens[:, 0] + tokens[:, 1:].max(axis=1)
        self.truncated_count = int((whole == self.max_length).sum()) * len(rows) // len(examples)
        what = [kind, settings.max_length, settings.shortest, settings.longest, limits.vocab_size]
        made_by = [what, Columns.of(settings), None if encoder is None else encoder.fingerprint()]
        digest = hashlib.sha256(repr(made_by).encode() + " ".join(records.digests).encode())
        digest.update(rows.astype("<i8", copy=False).tobytes() + tokens.astype("<i8").tobytes())
        if self.labels is not None:
            digest.update(self.labels.tobytes() + b"mismatched" * mismatched)
        self.digest = digest.hexdigest()

    def _characters(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [n, 1 + K]: characters of the pieces of some records."""
        pieces = self.records.column("pieces")[numbers, : 1 + self.completions_per_example]
        return pieces.astype(np.int64)

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

        Raises UserError: a row cannot be used, unless data.skip_invalid; a file has changed.
        """
        pieces = self._pieces_of(rows)
        usable = [row for row in rows if row in pieces]
        if self.has_mismatched:
            theirs = self._completions_beside(usable)
            for row in set(usable):
                pieces[row] = [*pieces[row], theirs[row][: self.max_length - len(pieces[row][0])]]
        labels = self.labels
        return [Example.of(row, pieces[row], None if labels is None else bool(labels[row])) for row in usable]

    def _completions_beside(self, rows: Sequence[int]) -> dict[int, np.ndarray]:
        """Another prompt's completion for each row; where its row is left out, that of the row after it."""
        others, found = {row: int(self._partners[row]) for row in rows}, dict[int, Pieces]()
        for _ in range(len(self)):
            found |= self._pieces_of([other for other in others.values() if other not in found])
            keys = self._prompt_keys
            lost = [row for row, other in others.items() if other not in found or keys[row] == keys[other]]
            if not lost:
                break
            others |= {row: int(self._partners[others[row]]) for row in lost}
        return {row: found[other][1] for row, other in others.items()}

    def _pieces_of(self, rows: Sequence[int]) -> dict[int, Pieces]:
        """Some rows' prompts and own completions, without those left out: these are counted and named, once."""
        wanted, found = list(dict.fromkeys(rows)), dict[int, Pieces]()
        results = self.tokenisation.rows(self.records, self.rows[wanted])
        for row, (place, result) in zip(wanted, results, strict=True):
            if not isinstance(result, Unusable):
                found[row] = result[0]
                continue
            name, number = f"{place}: {result}", int(self.rows[row])
            if not isinstance(result, Unwanted) and not self.tokenisation.settings.skip_invalid:
                raise UserError(
                    f"{name}; fix the file, or leave such rows out with data.skip_invalid=true (python -m lib.data "
                    "--inspect finds all of them beforehand)"
                )
            if number not in self._left_out:  # else another row asked for its completion
                self._left_out.add(number)
                self.unwanted_count += isinstance(result, Unwanted)
                self.skipped_count += not isinstance(result, Unwanted)
                if not isinstance(result, Unwanted):
                    self.skipped = [*self.skipped[: sources.NAMED - 1], name]
        return found


def _estimated(characters: np.ndarray, tokens: np.ndarray, of_characters: np.ndarray, max_length: int) -> np.ndarray:
    """Tokens of every row's pieces after truncation, by proportion: int32 [n, 1 + K].

    characters: int64 [n, 1 + K]. tokens, of_characters: int64 [1 + K], what a sample came to.
    """
    estimated = np.maximum(characters * tokens // np.maximum(of_characters, 1), 1)
    estimated[:, 0][characters[:, 0] == 0] = 0
    prompt, longest = estimated[:, 0], estimated[:, 1:].max(axis=1)
    over = prompt + longest > max_length
    kept = np.maximum(max_length - longest, np.minimum(prompt, max(1, max_length // 4)))
    estimated[over, 0] = np.minimum(kept, prompt)[over]
    estimated[over, 1:] = np.minimum(estimated[over, 1:], max_length - estimated[over, :1])
    estimated[:, 1:] = np.maximum(estimated[:, 1:], 2)  # a text's first token is not scored
    return estimated.astype(np.int32)
