"""One record ➜ the rows that it gives: mostly one."""

from __future__ import annotations

from dataclasses import replace

from lib.config.schema import DataSettings
from lib.data import parse_records
from lib.data.record_formats import JSON, Chat, Plain, RecordKind, Tokens, Unusable


def parse_rows(record: JSON, settings: DataSettings, kind: RecordKind) -> list[Tokens | Plain | Chat]:
    """A record's rows: one; of a pair two, where labels are wanted: chosen is desirable, rejected is not.

    Raises Unusable, as `parse_records.parse`.
    """
    is_labelled = settings.label in record
    if "completion_ids" in record and kind == "preference" and is_labelled:
        raise Unusable("labelled answers are not pairs: train.loss=kto")
    if "completion_ids" in record and kind == "unpaired" and not is_labelled:
        columns = ", ".join(record)
        raise Unusable(f"no column {settings.label!r} (columns: {columns}); name yours with data.label=COLUMN")
    if kind != "unpaired" or not _is_pair(record, settings):
        return [parse_records.parse(record, settings, kind)]
    pair = parse_records.parse(record, settings, "preference")
    columns = f"{pair.columns} (each pair gives two rows: chosen is desirable, rejected is not)"
    rows: list[Tokens | Plain | Chat] = []
    for index, label in enumerate((True, False)):
        parts: JSON = {"completions": pair.completions[index : index + 1], "columns": columns, "label": label}
        if isinstance(pair, Chat) and pair.learnt is not None:
            parts["learnt"] = pair.learnt[index : index + 1]
        rows.append(replace(pair, **parts))
    return rows


def _is_pair(record: JSON, settings: DataSettings) -> bool:
    if "completion_ids" in record:
        return False
    return record.keys() >= {"chosen_ids", "rejected_ids"} or parse_records.is_pair(record, settings)
