"""What a run has read of its data, kept on the disk: the next start reads it there, tokenised.

Where no answer is shown, it then needs no tokenizer: to import transformers, to load it, to render the rows and to
tokenise them takes two thirds of a rank's CPU time until its first step, and more of larger files.

A file of data.cache_dir has the arrays and, as JSON, all else. Its name is a hash of the settings and of every file
that was read, by size, times and inode. The cache may have come with somebody else's run, so that all is checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from pydantic import TypeAdapter
from rich.text import Span, Text

from lib.config.schema import Config
from lib.data import hub_datasets, sources
from lib.data import tokenizer as tokenizer_module
from lib.data.answer_questions import Question
from lib.data.dataset import Dataset, digest_of
from lib.data.model_limits import LARGEST_ID, ModelLimits
from lib.data.record_formats import RecordKind
from lib.data.streaming import is_streamed
from lib.data.tokenize import limits_of
from lib.environment import ROOT
from lib.system import files
from lib.training.inputs import Inputs
from lib.training.known_tokens import vocabulary

MAKERS = ("transformers", "tokenizers", "mlx-lm", "jinja2")  # of tokens, by their versions
CODE = ROOT / "lib/data"  # as well
KEPT_FILES = 16  # in a cache: of so many settings and states of files
MOST_BYTES = 2**31
WHAT = "inputs"  # the name of the JSON


@dataclass(frozen=True)
class Rows:
    """A `Dataset` without its arrays."""

    path: str
    kind: RecordKind
    columns: str
    truncated_count: int
    skipped: list[str]
    digest: str
    unwanted_count: int
    has_mismatched: bool


@dataclass(frozen=True)
class Shown:
    """A rich text."""

    plain: str
    style: str
    spans: list[tuple[int, int, str]]


@dataclass(frozen=True)
class Kept:
    """`Inputs` without arrays and tokenizer."""

    data: Rows
    valid: Rows | None
    questions: list[Question]
    messages: list[str]
    first_row: Shown | None


_KEPT = TypeAdapter(Kept)


def may_keep(config: Config) -> bool:
    """Whether what a run with these settings reads can be kept: rows in memory, of files that are here.

    Raises:
        UserError: there are no such files.
    """
    of_rows = not config.rollouts.rounds and config.record_kind != "group"
    trained = sources.weights_of(config.data.train)
    are_here = not any(source.startswith(hub_datasets.PREFIX) for source in (*trained, *_held_out(config)))
    return of_rows and are_here and not is_streamed(config.data)


def _held_out(config: Config) -> dict[str, float]:
    return {} if config.data.valid is None else sources.weights_of(config.data.valid)


def path_of(config: Config, state: str) -> Path:
    """The file of these inputs.

    state: the settings that decide what is read, and what tells each file from what it was.
    """
    versions = [importlib.metadata.version(name) for name in MAKERS]
    code = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(CODE.glob("*.py"))]
    key = hashlib.sha256(repr((versions, code, config.record_kind, state)).encode()).hexdigest()
    return Path(config.data.cache_dir) / f"inputs-{key[:24]}.safetensors"


# ---- Written -------------------------------------------------------------------------------------------------------


def keep(path: Path, inputs: Inputs) -> None:
    """Writes what was read, if the disk has room; of several ranks of a host one does.

    Without a tokenizer nothing is gained, and nothing kept.

    Raises:
        UserError: a file in the cache is a link, or not our own (`files.open_own`).
    """
    if inputs.tokenizer is None or not isinstance(inputs.data, Dataset):
        return
    valid, row = inputs.valid, inputs.first_row
    shown = (
        None if row is None else Shown(row.plain, str(row.style), [(s.start, s.end, str(s.style)) for s in row.spans])
    )
    kept = Kept(
        _described(inputs.data),
        None if valid is None else _described(valid),
        inputs.questions,
        list(inputs.messages),
        shown,
    )
    arrays = _arrays("data", inputs.data) | ({} if valid is None else _arrays("valid", valid))
    if sum(array.nbytes for array in arrays.values()) > MOST_BYTES:
        return
    with contextlib.suppress(OSError):  # a full disk, or one that is only read
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.open_own(path.with_name("inputs.lock")) as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(path, {name: mx.array(array) for name, array in arrays.items()}, _KEPT.dump_json(kept).decode())


def _write(path: Path, arrays: dict[str, mx.array], text: str) -> None:
    unfinished = path.with_name(".inputs-unfinished.safetensors")
    unfinished.unlink(missing_ok=True)  # of a process that was killed; or somebody's link, to a file of yours
    try:
        mx.save_safetensors(str(unfinished), arrays, {WHAT: text})
    except RuntimeError:  # what MLX raises where the disk is full
        unfinished.unlink(missing_ok=True)
        return
    unfinished.replace(path)
    kept = sorted(path.parent.glob("inputs-*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    for old in kept[:-KEPT_FILES]:
        old.unlink()


def _described(data: Dataset) -> Rows:
    return Rows(**{field.name: getattr(data, field.name) for field in dataclasses.fields(Rows)})


def _arrays(name: str, data: Dataset) -> dict[str, np.ndarray]:
    arrays = {f"{name}.tokens": data.tokens, f"{name}.bounds": data.bounds}
    return arrays if data.labels is None else {**arrays, f"{name}.labels": data.labels}


# ---- Read ----------------------------------------------------------------------------------------------------------


def read(path: Path, config: Config) -> Inputs | None:
    """What is kept there; None where nothing is, or part of it is lost, or somebody wrote something else.

    Raises:
        UserError: the file is a link, or not our own (`files.open_own`); as `vocabulary`.
    """
    try:
        with files.open_own(path, os.O_RDONLY) as file:
            is_large = os.fstat(file.fileno()).st_size > 2 * MOST_BYTES
    except OSError:
        return None
    if is_large:
        return None
    try:
        loaded, texts = mx.load(str(path), return_metadata=True)
        kept = _KEPT.validate_json(texts[WHAT], strict=True)
        arrays = {name: np.array(array) for name, array in loaded.items()}
        os.utime(path)  # those that are used stay longest
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return None
    has_valid = config.data.valid is not None or config.data.holdout > 0
    if (kept.valid is not None, bool(kept.questions)) != (has_valid, config.evaluate.answers is not None):
        return None
    limits = limits_of(vocabulary(config.model))
    try:
        data = _data(kept.data, arrays, "data", config, limits)
        valid = None if kept.valid is None else _data(kept.valid, arrays, "valid", config, limits)
        for question in kept.questions:
            limits.check_ids([question.prompt_ids])
            limits.check_answer(len(question.prompt_ids), config.evaluate.max_tokens, "evaluate.max_tokens")
            if min(question.prompt_ids, default=-1) < 0:
                return None
    except (ValueError, KeyError):
        return None
    row = kept.first_row
    return Inputs(
        lambda: tokenizer_module.load_tokenizer_of(config.model),
        data,
        valid,
        kept.questions,
        tuple(kept.messages),
        None if row is None else Text(row.plain, row.style, spans=[Span(*span) for span in row.spans]),
        limits=limits,
    )


def _data(rows: Rows, arrays: dict[str, np.ndarray], name: str, config: Config, limits: ModelLimits) -> Dataset:
    """A data set of the arrays of that name.

    Raises:
        ValueError, KeyError: they are none; ids or lengths are beyond the limits.
    """
    tokens, bounds, labels = arrays[f"{name}.tokens"], arrays[f"{name}.bounds"], arrays.get(f"{name}.labels")
    if (tokens.dtype, tokens.ndim, bounds.dtype, bounds.ndim) != (np.int32, 1, np.int64, 1) or len(bounds) < 2:
        raise ValueError("arrays of other kinds")
    if (rows.kind, labels is not None) != (config.record_kind, rows.kind == "unpaired"):
        raise ValueError("rows of another kind")
    if bounds[0] != 0 or bounds[-1] != len(tokens) or (bounds[1:] < bounds[:-1]).any():
        raise ValueError("pieces of no text")
    data = Dataset(**dataclasses.asdict(rows), tokens=tokens, bounds=bounds, labels=labels)
    if len(data.bounds) != len(data) * (1 + data.completions_per_example) + 1:
        raise ValueError("half a row")
    if labels is not None and (labels.dtype, labels.shape) != (np.bool_, (len(data),)):
        raise ValueError("labels of other rows")
    largest = int(np.where(tokens < 0, ~tokens, tokens).max(initial=0))
    if largest >= min(limits.vocab_size or LARGEST_ID, LARGEST_ID):
        raise ValueError("tokens that the model does not know")
    is_prompt = np.arange(len(bounds) - 1) % (1 + data.completions_per_example) == 0
    if (tokens[np.repeat(is_prompt, np.diff(bounds))] < 0).any():  # only a completion's are marked as not learnt
        raise ValueError("tokens below zero")
    if data.lengths.max() > limits.row_tokens(config.data.max_length) or data.trained[2].min() < 1:
        raise ValueError("rows that are too long, or of nothing that is learnt")
    if data.digest != digest_of(rows.kind, tokens, bounds, labels):
        raise ValueError("damaged")
    return data
