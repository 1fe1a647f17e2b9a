"""What there is in a data set before anything is trained on it.

Counts, lengths, duplicates, pairs that look wrong, what each format was recognised as with an example, and, given a
model, three rows as it sees them.

    python -m lib.data --inspect FILES [--model M] [--picture lengths.png] [key=value ...]
    python -m lib.data --tokens OUT.jsonl --model M FILES [key=value ...]

FILES are what data.train takes. Without --model nothing is tokenised: lengths are characters then.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from lib.config import command_line, help, load
from lib.config.settings import Config, DataSettings
from lib.data import sources
from lib.data.chat import OPENED_THINKING, ChatTemplate, Conversation
from lib.data.dataset import Example, Pieces, Record, load_dataset, parse_record, tokenised
from lib.data.record_formats import JSON, Chat, Message, RecordKind, Unusable, Unwanted
from lib.data.sources import Records
from lib.data.streaming import tell_unread, with_splits
from lib.data.tokenize import Encoder
from lib.data.tokenizer import NO_LIMITS, ModelLimits, Tokenizer, Vocabulary, limits_of, load_tokenizer_of, vocabulary
from lib.errors import UserError
from lib.system import mpi_and_blas
from lib.system.files import require_absent
from lib.system.terminal import Terminal

WORDS = {name: f"qZ7{name}Z7q" for name in ("system", "thinking", "tool", "call", "first", "second")}


@dataclass(frozen=True)
class TemplateFacts:
    """What becomes of the parts of a chat."""

    system: str
    thinking: str
    tools: str
    history: str
    end: str

    def __str__(self) -> str:
        return (
            f"chat template: system prompts {self.system}; thinking {self.thinking}; tools {self.tools}; "
            f"earlier turns {self.history}; turns end with {self.end}"
        )


def facts_of(encoder: Encoder) -> TemplateFacts | None:
    """What the encoder's template does; None where it uses none."""
    template = encoder.template
    if not template.is_used:
        return None
    return TemplateFacts(
        "open the first question" if template.refuses_system else "have a turn of their own",
        _thinking(template),
        _tools(template),
        _history(template),
        " or ".join(encoder.tokenizer.decode([token]) for token in sorted(encoder.end_ids)),
    )


def _text(template: ChatTemplate, messages: list[Message], is_prompt: bool, tools: Any = None, **given: Any) -> str:
    """The rendering; nothing where it is refused."""
    arguments: JSON = {**template.arguments_without_answer, **given}
    (text,) = template.texts([Conversation(messages, tools, arguments)], is_prompt)
    return "" if isinstance(text, Unusable) else text


def _said(role: str, name: str, **fields: Any) -> Message:
    return {"role": role, "content": WORDS[name], **fields}  # type: ignore[typeddict-item]


def _thinking(template: ChatTemplate) -> str:
    question = _said("user", "first")
    thought = _said("assistant", "second", reasoning_content=WORDS["thinking"])
    off, on = (_text(template, [question], True, enable_thinking=thinks) for thinks in (False, True))
    is_kept = WORDS["thinking"] in _text(template, [question, thought], False, enable_thinking=True)
    if OPENED_THINKING.search(off):
        return "always opened by the prompt"
    if off != on:
        return "off, unless an answer thinks or data.chat_template_kwargs.enable_thinking=true"
    return "kept where an answer has it" if is_kept else "unknown to it"


def _tools(template: ChatTemplate) -> str:
    definition = {"name": WORDS["tool"], "description": "d", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": definition}]
    call = {"id": "call12345", "type": "function", "function": {"name": WORDS["call"], "arguments": {}}}
    question: Message = _said("user", "first")
    without: Any = {"role": "assistant", "tool_calls": [call]}
    answers: list[Any] = [without, {**without, "content": ""}]  # each is what some templates want
    is_defined = WORDS["tool"] in _text(template, [question], True, tools)
    is_called = any(WORDS["call"] in _text(template, [question, answer], False, tools) for answer in answers)
    if is_defined and is_called:
        return "known"
    return "defined, but no calls of them" if is_defined else "calls alone" if is_called else "unknown to it"


def _history(template: ChatTemplate) -> str:
    turns = [_said("user", "first"), _said("assistant", "second")]
    thought = [turns[0], _said("assistant", "second", reasoning_content=WORDS["thinking"])]
    later = [*turns, _said("user", "first")]
    short = _text(template, turns, False)
    is_last, is_earlier = (
        WORDS["thinking"] in _text(template, messages, False, enable_thinking=True)
        for messages in (thought, [*thought, *turns])
    )
    if is_last and not is_earlier:
        return "lose their thinking"
    until = short.find(WORDS["second"])
    is_kept = until >= 0 and _text(template, later, False).startswith(short[:until])
    return "stay as they were" if is_kept else "are written differently from the last one"


def picture(example: Example, tokenizer: Tokenizer, k: int, colour: str) -> Text:
    """A row as the model sees it: the prompt dim, learnt tokens in colour within ⟦⟧, others of the completion plain."""
    text = Text(tokenizer.decode(example.prompt_ids.tolist()), style="dim")
    ids = example.completions[k].tolist()
    mask = [True] * len(ids) if example.learnt is None else example.learnt[k].tolist()
    start = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or mask[index] != mask[start]:
            piece = tokenizer.decode(ids[start:index])
            text.append(f"⟦{piece}⟧" if mask[start] else piece, style=colour if mask[start] else "not dim")
            start = index
    return text


PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
NAMED = 5
SHOWN = 3
SHOWN_CHARACTERS = 400
COLOURS = ("green", "red")


@mpi_and_blas.reported
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    parser = command_line.Parser(prog="python -m lib.data", description=__doc__)
    parser.add_argument("--inspect", metavar="FILES", nargs="+", help="files, folders, globs, hf://...")
    parser.add_argument("--tokens", metavar="OUT.jsonl", help="write each row's token ids as training takes them")
    parser.add_argument("--model", metavar="PATH", help="model whose tokenizer and template are used")
    parser.add_argument("--picture", metavar="PNG", help="where the histogram of the lengths goes")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as train.py --help lists them")
    options = parser.parse_intermixed_args(arguments)
    given = [*(options.inspect or ()), *options.overrides]
    files, words = [[word for word in given if _is_setting(word) == is_setting] for is_setting in (False, True)]
    if not files:
        parser.error("name FILES, e.g. --inspect data.jsonl train.loss=sft")
    base = {"model": {"path": options.model or "-"}, "data": {"train": files[0] if files else "-"}}
    settings = load.load(None, words, base=base)
    if options.tokens is not None:
        write_tokens(files, settings, options.model is not None, Path(options.tokens))
    else:
        inspect(files, settings, options.model is not None, options.picture)
    return 0


def _is_setting(word: str) -> bool:
    return word.partition("=")[0] in {key for key, *_ in help.settings()}


def write_tokens(files: Sequence[str], settings: Config, with_model: bool, out: Path) -> None:
    """Writes a line a row: the ids of its prompt and completions, and masks with 1 for each token that is learnt.

    The lines are records that training reads: prompt_ids with chosen_ids and rejected_ids, or with completion_ids.

    Raises:
        UserError: `out` exists, or as `load_dataset`.
    """
    require_absent(out)
    kind, data = settings.record_kind, settings.data
    if kind == "group":
        raise UserError("groups of train.loss=grpo are tokenised already")
    tokenizer, known = None, Vocabulary(eos_token_id=None)
    if with_model:
        mpi_and_blas.prepare()
        tokenizer, known = load_tokenizer_of(settings.model), vocabulary(settings.model)

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    train = files[0] if len(files) == 1 else dict.fromkeys(files, 1.0)
    data, held_out = with_splits(data.model_copy(update={"train": train}), tell), False if data.holdout else None
    tell_unread(data, kind, tell)
    rows = load_dataset(data.train, data, kind, tokenizer, held_out=held_out, tell=tell, **known)
    names = ("chosen", "rejected") if kind == "preference" else ("completion",)
    with out.open("w", encoding="utf-8") as file:
        for row in rows:
            line: dict[str, object] = {"prompt_ids": row.prompt_ids.tolist()}
            for k, name in enumerate(names):
                ids = row.completions[k].tolist()
                line[f"{name}_ids"] = ids
                line[f"{name}_mask"] = [1] * len(ids) if row.learnt is None else row.learnt[k].astype(int).tolist()
            file.write(json.dumps(line if row.label is None else line | {"label": row.label}) + "\n")
    print(f"{out}: {len(rows):,} {rows.unit} from {rows.columns}")


def inspect(files: Sequence[str], settings: Config, with_model: bool, picture: str | None) -> None:
    """Prints the report.

    Raises:
        UserError: there is nothing to read; unusable records are counted and named, and no error here.
    """
    say = Terminal()
    if settings.record_kind == "group":
        raise UserError(
            "groups of train.loss=grpo are looked at by train.py --dry-run; here are records of other losses"
        )
    if picture is not None:
        _require_picture(Path(picture))
    data, kind = settings.data.model_copy(update={"skip_invalid": True}), settings.record_kind

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    paths = [path for source in files for path in sources.files_of(source, data, tell)]
    records = sources.open_records(paths, data, kind, tell)
    tokenizer, encoder, limits = None, None, NO_LIMITS
    if with_model:
        mpi_and_blas.prepare()
        tokenizer, known = load_tokenizer_of(settings.model), vocabulary(settings.model)
        limits = limits_of(known)
        encoder = Encoder(tokenizer, data, known["eos_token_id"]) if tokenizer is not None else None
    unit = "token ids or characters"
    unusable = [name for index in records.indices for name in index.unusable][:NAMED]
    unusable_count = sum(index.unusable_count for index in records.indices)
    completions = 2 if kind == "preference" else 1
    pieces, kept = records.column("pieces")[:, : 1 + completions].astype(np.int64), np.arange(len(records))
    truncated = filtered = 0
    if with_model:
        unit = "tokens"
        result = _tokenised(records, data, kind, encoder, limits)
        pieces, kept, truncated, filtered = result[0], result[1], result[2], result[3]
        unusable, unusable_count = [*unusable, *result[4]][:NAMED], unusable_count + result[5]
    facts = _facts(records, kept, data, kind, unusable_count, truncated, filtered, with_model)
    say.facts(" + ".join(files), facts)
    for name in unusable:
        say.line(f"  {name}", "magenta")
    if not len(kept):
        raise UserError(f"{' + '.join(files)}: no record can be used")
    names = ["prompt", "chosen", "rejected"] if kind == "preference" else ["prompt", "completion"]
    lengths = {name: pieces[:, k] for k, name in enumerate(names)}
    lengths["whole"] = pieces[:, 0] + pieces[:, 1:].max(axis=1)
    _show_percentiles(say, lengths, unit)
    if kind == "preference":
        say.facts("", _sanity(records, kept, pieces, data))
    if picture is not None:
        _draw(Path(picture), lengths, unit, data.max_length if with_model else None)
        say.line(f"histogram: {picture}")
    _show_formats(say, records, data, kind)
    if encoder is not None and (known_facts := facts_of(encoder)):
        say.line(str(known_facts))
    if tokenizer is not None:
        _show_rows(say, records, kept[:SHOWN].tolist(), data, kind, encoder, tokenizer)


def _tokenised(
    records: Records, data: DataSettings, kind: RecordKind, encoder: Encoder | None, limits: ModelLimits
) -> tuple[np.ndarray, np.ndarray, int, int, list[str], int]:
    """Tokens of the pieces before truncation, int64 [n, 1 + K], and their records, int64 [n].

    Then how many rows are truncated, and filtered; the first unusable ones by name, and how many these are.
    """
    whole = data.model_copy(update={"max_length": 2**31 - 1})  # lengths as they are
    sizes, kept, named = np.zeros((len(records), 3), np.int64), np.ones(len(records), bool), list[str]()
    cut = filtered = unusable = 0

    def read() -> Iterator[tuple[str, Any]]:
        return ((str(number), parse_record(records, number, data, kind)) for number in range(len(records)))

    results: Iterator[tuple[str, Any, tuple[Pieces, bool] | Unusable]] = tokenised(read(), whole, encoder, limits)
    for number, (_, _, result) in enumerate(results):
        if isinstance(result, Unwanted):
            kept[number] = False
            filtered += 1
            continue
        if not isinstance(result, Unusable):
            of_row = [*map(len, result[0]), 0][:3]
            if of_row[0] > data.max_length and not (encoder is not None and encoder.template.is_used):
                result = Unusable(
                    f"the prompt alone has {of_row[0]} tokens, more than data.max_length={data.max_length}"
                )
        if isinstance(result, Unusable):
            kept[number] = False
            unusable += 1
            named += [f"{records.location(number)}: {result}"] if len(named) < NAMED else []
            continue
        sizes[number] = of_row
        cut += of_row[0] + max(of_row[1:]) > data.max_length
    rows = np.flatnonzero(kept)
    return sizes[rows][:, : 1 + (2 if kind == "preference" else 1)], rows, cut, filtered, named, unusable


def _facts(
    records: Records,
    kept: np.ndarray,
    data: DataSettings,
    kind: RecordKind,
    unusable: int,
    truncated: int,
    filtered: int,
    with_model: bool,
) -> list[tuple[str, str]]:
    prompts, contents = records.column("prompt_key")[kept], records.column("content_key")[kept]
    distinct = len(np.unique(contents))
    formats = dict.fromkeys(name for index in records.indices for name in index.formats)
    facts = [
        ("files", f"{len(records.indices):,}"),
        ("usable", f"{len(kept):,} {'pairs' if kind == 'preference' else 'examples'} from {'; '.join(formats)}"),
        ("unusable", f"{unusable:,}"),
        ("duplicates", f"{len(kept) - distinct:,} (data.deduplicate)"),
        ("distinct prompts", f"{len(np.unique(prompts)):,}"),
    ]
    if with_model:
        facts.append(("cut", f"{truncated:,} have more than data.max_length={data.max_length} tokens"))
    if filtered:
        facts.append(("filtered", f"{filtered:,} (data.shortest={data.shortest}, data.longest={data.longest})"))
    if data.holdout:
        below = int((prompts < np.uint64(sources.hash_limit(data.holdout))).sum())
        facts.append(("held out", f"{below:,} (data.holdout={data.holdout:g})"))
    return facts


def _show_formats(say: Terminal, records: Records, data: DataSettings, kind: RecordKind) -> None:
    """What the records were recognised as, how many of each, and the first of them as it is read."""
    counts, first = dict[str, int](), dict[str, int]()
    for start, index in zip(records.starts, records.indices, strict=False):
        for name, seen in index.formats.items():
            counts[name] = counts.get(name, 0) + seen["count"]
            first.setdefault(name, start + seen["first"])
    for name, count in counts.items():
        record = parse_record(records, first[name], data, kind)
        say.line("")
        say.line(f"{name}, {count:,} rows, the first: {records.location(first[name])}", "bold")
        for title, text, style in _as_read(record):
            shown = " ".join(text.split())
            shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]} ..."
            say.line(Text(f"  {title}: ").append(shown, style=style))
    say.line("")


def _as_read(record: Record | Unusable) -> Iterator[tuple[str, str, str]]:
    """Title, text and style of each part of a record."""
    if isinstance(record, Unusable):
        yield "unusable", str(record), "magenta"
        return
    names = ("chosen", "rejected") if len(record.completions) > 1 else ("completion",)
    if isinstance(record, Chat):
        if record.tools:
            yield "tools", ", ".join(tool["function"]["name"] for tool in record.tools), "dim"
        for message in record.prompt:
            yield message["role"], _shown_message(message), "dim"
        flags = record.learnt or tuple((False,) * (len(answer) - 1) + (True,) for answer in record.completions)
        for name, colour, answer, learnt in zip(names, COLOURS, record.completions, flags, strict=False):
            for message, is_learnt in zip(answer, learnt, strict=True):
                title = name if is_learnt and message["role"] == "assistant" else message["role"]
                yield title, _shown_message(message), colour if is_learnt else "dim"
    else:
        if record.prompt is not None:
            yield "prompt", str(record.prompt), "dim"
        for name, colour, text in zip(names, COLOURS, record.completions, strict=False):
            yield name, str(text), colour
    if record.label is not None:
        yield "label", "desirable" if record.label else "undesirable", "bold"


def _shown_message(message: Message) -> str:
    """A message's content and, where there are any, its tool calls and other fields."""
    others = {name: field for name, field in message.items() if name not in ("role", "content")}
    return " ".join(
        [*filter(None, [message["content"]]), *([json.dumps(others, ensure_ascii=False)] if others else [])]
    )


def _show_percentiles(say: Terminal, lengths: dict[str, np.ndarray], unit: str) -> None:
    rows = []
    for name, values in lengths.items():
        marks = np.percentile(values, PERCENTILES).astype(int)
        rows.append([name, *(f"{mark:,}" for mark in marks.tolist()), f"{values.mean():,.1f}"])
    say.line("")
    say.table(f"lengths in {unit}, by percentile", ["", *(f"{p} %" for p in PERCENTILES), "mean"], rows)
    say.line("")


def _sanity(records: Records, kept: np.ndarray, pieces: np.ndarray, data: DataSettings) -> Iterator[tuple[str, str]]:
    """What makes pairs suspicious: a preference for length, and pairs that contradict each other."""
    longer = float((pieces[:, 1] > pieces[:, 2]).mean())
    note = "; length alone tells them apart, and will be learnt" if abs(longer - 0.5) > 0.25 else ""
    yield (
        "chosen is longer",
        f"{longer:.1%} of pairs, mean {pieces[:, 1].mean():.1f} against {pieces[:, 2].mean():.1f}{note}",
    )
    order = np.argsort(records.column("prompt_key")[kept], kind="stable")
    keys = records.column("prompt_key")[kept][order]
    contrary, looked = 0, 0
    for start, end in itertools.pairwise([0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]):
        if end - start < 2:
            continue
        rows = [records[number] for number in kept[order[start:end]].tolist()[:64]]
        seen = {(str(row.get(data.chosen)), str(row.get(data.rejected))) for row in rows}
        looked += len(rows)
        contrary += sum((rejected, chosen) in seen for chosen, rejected in seen) // 2
    yield "contradictions", f"{contrary:,} pairs are there the other way round, too (of {looked:,} that share a prompt)"


def _require_picture(picture: Path) -> None:
    """Refuses, before the work, a picture that could not be drawn or would take another file's place."""
    from matplotlib.backend_bases import FigureCanvasBase

    if picture.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(f"--picture {picture}: its name ends in no format of a picture; take .png, .svg or .pdf")
    require_absent(picture)


def _draw(picture: Path, lengths: dict[str, np.ndarray], unit: str, limit: int | None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    top = float(np.percentile(np.concatenate(list(lengths.values())), 99.5))
    for name, values in lengths.items():
        axis.hist(np.minimum(values, top), bins=60, histtype="step", linewidth=1.5, label=name)
    if limit is not None and limit <= top:
        axis.axvline(limit, color="grey", linestyle="--", linewidth=1, label=f"data.max_length={limit}")
    axis.set_xlabel(unit)
    axis.set_ylabel("rows")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


def _show_rows(
    say: Terminal,
    records: Records,
    numbers: Sequence[int],
    data: DataSettings,
    kind: RecordKind,
    encoder: Encoder | None,
    tokenizer: Tokenizer,
) -> None:
    """Rows as the model sees them: what it is given is dim, what it is scored on is coloured, cut ends are left out."""
    read = ((str(number), parse_record(records, number, data, kind)) for number in numbers)
    for number, (_, _, result) in zip(numbers, tokenised(read, data, encoder, NO_LIMITS), strict=True):
        say.line(records.location(number), "bold")
        if isinstance(result, Unusable):
            say.line(f"  {result}", "magenta")
            continue
        example = Example.of(number, result[0])
        names = ("chosen", "rejected") if len(example.completions) > 1 else ("completion",)
        for k, (name, colour) in enumerate(zip(names, ("green", "red"), strict=False)):
            say.line(Text(f"  {name}: ").append_text(picture(example, tokenizer, k, colour)))
    say.line("the loss is on what stands in ⟦⟧ alone")
