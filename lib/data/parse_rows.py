"""One record ➜ the rows that it gives: mostly one."""

from __future__ import annotations

from dataclasses import replace

from lib.config.schema import DataSettings
from lib.data.column_readers import find
from lib.data.parse_records import parse
from lib.data.record_formats import JSON, Chat, Columns, Plain, RecordKind, Tokens


def parse_rows(record: JSON, settings: DataSettings, kind: RecordKind) -> list[Tokens | Plain | Chat]:
    """A record's rows: one; of a pair two, where labels are wanted: chosen is desirable, rejected is not.

    Raises Unusable, as `parse_records.parse`.
    """
    if kind != "unpaired" or not _is_pair(record, settings):
        return [parse(record, settings, kind)]
    pair = parse(record, settings, "preference")
    columns = f"{pair.columns} (each pair gives two rows: chosen is desirable, rejected is not)"
    rows: list[Tokens | Plain | Chat] = []
    for index, label in enumerate((True, False)):
        parts: JSON = {"completions": pair.completions[index : index + 1], "columns": columns, "label": label}
        if isinstance(pair, Chat) and pair.learnt is not None:
            parts["learnt"] = pair.learnt[index : index + 1]
        rows.append(replace(pair, **parts))
    return rows


def _is_pair(record: JSON, settings: DataSettings) -> bool:
    """Whether a record's columns are a pair's, and none is a label."""
    columns, there = Columns.of(settings), frozenset(name for name, value in record.items() if value is not None)
    if "completion_ids" in there or columns.label in there:
        return False
    if there.issuperset(("chosen_ids", "rejected_ids")):
        return True
    return find(there, columns, "unpaired") is None and find(there, columns, "preference") is not None
