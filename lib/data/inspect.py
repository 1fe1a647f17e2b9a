"""What there is in a data set before anything is trained on it, and the tokens that training would take.

    python -m lib.data --inspect FILES [--model M] [key=value ...]
    python -m lib.data --tokens OUT.jsonl --model M FILES [key=value ...]

FILES are what data.train takes. Without --model nothing is tokenised: lengths are characters then.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.text import Text

from lib.config import command_line, help, load
from lib.config.settings import DataSettings
from lib.data import sources
from lib.data.chat import OPENED_THINKING, SENTINEL
from lib.data.dataset import Example, Tokenisation
from lib.data.encode import Encoder
from lib.data.record_formats import RecordKind
from lib.data.streaming import open_training, tell_unread
from lib.data.tokenizer import Tokenizer, Vocabulary, load_tokenizer_of, vocabulary
from lib.errors import UserError
from lib.system import mpi_and_blas
from lib.system.files import require_absent
from lib.system.terminal import Terminal

_tell = functools.partial(print, file=sys.stderr)
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
NAMED, SHOWN, SHOWN_CHARACTERS = 5, 3, 400  # unusable records; rows; characters of a part


def facts_of(encoder: Encoder) -> str | None:
    """What the encoder's template makes of the parts of a chat; None where it uses none."""
    template = encoder.template
    if not template.is_used:
        return None

    question, text = {"role": "user", "content": "a"}, template.text_of
    off, on = (text([question], True, enable_thinking=thinks) for thinks in (False, True))
    thinking, thought = "unknown to it", {"role": "assistant", "content": "b", "reasoning_content": SENTINEL}
    if OPENED_THINKING.search(off):
        thinking = "always opened by the prompt"
    elif off != on:
        thinking = "off, unless an answer thinks or data.chat_template_kwargs.enable_thinking=true"
    elif SENTINEL in text([question, thought], enable_thinking=True):
        thinking = "kept where an answer has it"
    tool = {"type": "function", "function": {"name": SENTINEL, "description": "d", "parameters": {"type": "object"}}}
    tools = "known" if SENTINEL in text([question], True, [tool]) else "unknown to it"
    is_folded = text([question]) and SENTINEL not in text([{"role": "system", "content": SENTINEL}, question])
    system = "open the first question" if is_folded else "have a turn of their own"
    end = " or ".join(encoder.tokenizer.decode([token]) for token in sorted(encoder.end_ids))
    return f"chat template: system prompts {system}; thinking {thinking}; tools {tools}; turns end with {end}"


def picture(example: Example, tokenizer: Tokenizer, k: int, colour: str) -> Text:
    """A row as the model sees it: the prompt dim, learnt tokens in colour within ⟦⟧, others of the completion plain."""
    text = Text(tokenizer.decode(example.prompt_ids.tolist()), style="dim")
    both = zip(example.masks[k].tolist(), example.completions[k].tolist(), strict=True)
    for is_learnt, part in itertools.groupby(both, key=lambda each: each[0]):
        piece = tokenizer.decode([token for _, token in part])
        text.append(f"⟦{piece}⟧" if is_learnt else piece, style=colour if is_learnt else "not dim")
    return text


# ---- The command


@mpi_and_blas.reported
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    parser = command_line.Parser(prog="python -m lib.data", description=__doc__)
    parser.add_argument("--inspect", metavar="FILES", nargs="+", help="files, folders, globs, hf://...")
    parser.add_argument("--tokens", metavar="OUT.jsonl", help="write each row's token ids as training takes them")
    parser.add_argument("--model", metavar="PATH", help="model whose tokenizer and template are used")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as train.py --help lists them")
    options = parser.parse_intermixed_args(arguments)
    settings_names = {key for key, *_ in help.settings()}
    words = [*(options.inspect or ()), *options.overrides]
    files = [word for word in words if word.partition("=")[0] not in settings_names]
    if not files:
        parser.error("name FILES, e.g. --inspect data.jsonl train.loss=sft")
    base = {"model": {"path": options.model or "-"}, "data": {"train": files[0]}}
    settings = load.load(None, [word for word in words if word not in files], base=base)
    if settings.record_kind == "group":
        raise UserError("groups of train.loss=grpo are tokenised already: train.py --dry-run looks at them")
    tokenizer, about = None, Vocabulary()
    if options.model is not None:
        mpi_and_blas.prepare()
        tokenizer, about = load_tokenizer_of(settings.model), vocabulary(settings.model)
    if options.tokens is not None:
        write_tokens(files, settings.data, settings.record_kind, tokenizer, about, Path(options.tokens))
    else:
        inspect(files, settings.data, settings.record_kind, tokenizer, about)
    return 0


def write_tokens(
    files: Sequence[str],
    data: DataSettings,
    kind: RecordKind,
    tokenizer: Tokenizer | None,
    about: Vocabulary,
    out: Path,
) -> None:
    """Writes a line a row, as training reads it: ids, and masks with 1 for each learnt token. Raises UserError."""
    require_absent(out)
    train = files[0] if len(files) == 1 else dict.fromkeys(files, 1.0)
    data = data.model_copy(update={"train": train, "streaming": False})
    rows = open_training(data, kind, tokenizer, tell=_tell, vocabulary=about)
    names = ("chosen", "rejected") if kind == "preference" else ("completion",)
    with out.open("w", encoding="utf-8") as file:
        for row in rows.examples(range(len(rows))):
            line: dict[str, object] = {"prompt_ids": row.prompt_ids.tolist()}
            for k, name in enumerate(names):
                line[f"{name}_ids"] = row.completions[k].tolist()
                line[f"{name}_mask"] = row.masks[k].astype(int).tolist()
            file.write(json.dumps(line if row.label is None else line | {"label": row.label}) + "\n")
    print(f"{out}: {len(rows):,} {rows.unit} from {rows.columns}")


def inspect(
    files: Sequence[str], data: DataSettings, kind: RecordKind, tokenizer: Tokenizer | None, about: Vocabulary
) -> None:
    """Prints the report. Raises UserError: there is nothing to read; unusable records are counted and named."""
    say, title = Terminal(), " + ".join(files)
    data = data.model_copy(update={"skip_invalid": True})
    paths = [path for source in files for path in sources.files_of(source, data.cache_dir, _tell)]
    records = sources.open_records(paths, data, kind, _tell)
    tokenisation, names, examples = Tokenisation.of(data, kind, tokenizer, about), ["prompt", "completion"], []
    contents = len(np.unique(records.column("content_key")))
    facts = {
        "usable": f"{len(records):,} records from {records.formats}",
        "duplicates": f"{len(records) - contents:,} (data.deduplicate)",
    }
    if kind == "preference":
        names = ["prompt", "chosen", "rejected"]
        _, prompts, counts = np.unique(records.column("prompt_key"), return_inverse=True, return_counts=True)
        pairs = set()
        for number in np.flatnonzero(counts[prompts] > 1).tolist():
            better, worse = (str(records[number].get(data.column(side))) for side in ("chosen", "rejected"))
            pairs.add((int(prompts[number]), better, worse))
        twice = sum((prompt, worse, better) in pairs for prompt, better, worse in pairs) // 2
        facts["contradictions"] = f"{twice:,} pairs are there the other way round, too"
    pieces, unit = records.column("pieces")[:, : len(names)].astype(np.int64), "token ids or characters"
    unusable, count = records.unusable, records.unusable_count
    if tokenizer is not None:
        rows = tokenisation.dataset(title, records, np.arange(len(records)))
        pieces, unit, unusable, count = rows.pieces, "tokens", [*rows.skipped], rows.skipped_count
        facts["trained"] = f"{len(rows):,}, {rows.truncated_count:,} cut to data.max_length={data.max_length} tokens"
        facts["filtered"] = f"{rows.unwanted_count:,} (data.shortest={data.shortest}, data.longest={data.longest})"
        examples = rows.examples(range(min(SHOWN, len(rows))))
    say.facts(title, [*facts.items(), ("unusable", f"{count:,}")])
    for text in unusable[:NAMED]:
        say.line(f"  {text}", "magenta")
    tell_unread((name for index in records.indices for name in index.unread), say.line)
    tokenisation.tell_notes(say.line)
    marks = np.percentile([*pieces.T, pieces[:, 0] + pieces[:, 1:].max(axis=1)], PERCENTILES, axis=1).astype(int).T
    lines = [[name, *map("{:,}".format, of_name)] for name, of_name in zip([*names, "whole"], marks, strict=True)]
    say.table(f"lengths in {unit}, by percentile", ["", *map("{} %".format, PERCENTILES)], lines)
    for start, index in zip(records.starts, records.indices, strict=False):
        for name, (count, number) in index.formats.items():
            say.line(f"{name}, {count:,} rows, the first: {records.location(start + number)}", "bold")
            ((_, record),) = tokenisation.placed(records, [start + number])
            for part in (vars(record)["prompt"], *vars(record)["completions"]):
                say.line(f"  {json.dumps(part, ensure_ascii=False)[:SHOWN_CHARACTERS]}")
    if tokenisation.encoder is not None:
        say.line(facts_of(tokenisation.encoder) or "no chat template")
    for example in examples:
        for k, (name, colour) in enumerate(zip(names[1:], ("green", "red"), strict=False)):
            say.line(Text(f"  {name}: ").append_text(picture(example, tokenizer, k, colour)))
    say.line("the loss is on what stands in ⟦⟧ alone")
