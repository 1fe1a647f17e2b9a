"""The records that a command goes through: those of --data, or by default the run's held-out ones."""

from __future__ import annotations

import itertools

import numpy as np

from lib.config.schema import Config
from lib.data import sources
from lib.data.record_formats import RecordKind
from lib.data.sources import Records
from lib.errors import UserError
from lib.evaluate.batch_inference import open_rows
from lib.system.terminal import Terminal


def open_asked(named: str | None, settings: Config, kind: RecordKind, say: Terminal) -> Records:
    """named: what --data says. kind: what the command reads of a record.

    Raises:
        UserError: nothing is named, and the run has nothing held out that could be read so; or as `open_records`.
    """
    source, data = named or settings.data.valid, settings.data
    if source is not None:
        return open_rows(str(source), data, kind, say)
    trained_as: RecordKind = "prompt" if settings.rollouts.rounds else settings.record_kind
    if not data.holdout or trained_as == "group":
        raise UserError("the run has no held-out records (data.valid, data.holdout); name a file with --data")
    if kind not in (trained_as, "prompt"):
        raise UserError("a run of rounds has held-out prompts alone; name a file with --data")
    return _held_out(settings, trained_as, kind, say)


def _held_out(settings: Config, trained_as: RecordKind, kind: RecordKind, say: Terminal) -> Records:
    """What data.holdout keeps of data.train, by the hashes that training goes by, which are of records of its kind."""
    data, weights = settings.data, sources.weights_of(settings.data.train)
    of_sources = [sources.files_of(one, data, say.line) for one in weights]
    files = list(itertools.chain(*of_sources))
    records = sources.open_records(files, data, trained_as, say.line)
    ends = [records.starts[end] for end in itertools.accumulate(map(len, of_sources))]
    rows = sources.chosen_rows(records, ends, list(weights.values()), data, held_out=True)
    if not len(rows):
        raise UserError(f"{' + '.join(weights)}: no row is held out (data.holdout={data.holdout:g}); give --data")
    if kind == trained_as:
        return records.only(rows)
    lines, others = records.lines_of_files(rows), sources.open_records(files, data, kind, say.line)
    kept = [np.isin(index.entries["line"], own) for index, own in zip(others.indices, lines, strict=True)]
    return others.only(np.flatnonzero(np.concatenate(kept)))
