"""What a run reads before it needs the others: read ahead by a process that waits for its work, kept by an earlier
start, or read now.

A standby process (lib/launch/standby.py) knows the command that it will be given, so it reads data and model before.
`inputs` and `policy` then hand these on if they are still what the files say: by settings, and by size, time and inode
of every file. So it is with what is kept on the disk (kept_inputs.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from rich.text import Text

from lib.config import train_arguments
from lib.config.schema import Config
from lib.data import answer_questions, hub_datasets, sources
from lib.data import tokenizer as tokenizer_module
from lib.data.dataset import Dataset
from lib.data.groups import load_groups
from lib.data.prompts import Prompts, open_prompts
from lib.data.record_formats import Unusable
from lib.data.streaming import StreamedDataset, is_streamed, open_held_out, open_training
from lib.data.template_facts import facts_of, picture
from lib.data.text_tokens import Tokenizer
from lib.data.tokenize import Encoder, Vocabulary, limits_of
from lib.errors import UserError
from lib.model import adapters, load, token_stream
from lib.system import hardware, model_folder
from lib.training import judge_checks, kept_inputs, losses
from lib.training.inputs import Inputs
from lib.training.known_tokens import vocabulary

SHOWN_CHARACTERS = 400  # of the first row
ROOM = 10  # a model is read ahead where so many times its bytes are free: beside it another process trains


@dataclass
class Ahead:
    """What was read, and the state of the settings and files that it was made of."""

    state: str
    inputs: Inputs | None
    policy: nn.Module | None


_ahead: Ahead | None = None


def inputs(config: Config, tell: Callable[[str], None], keep: bool = True) -> Inputs:
    """The tokenizer, the data and the questions; read now, unless they were read ahead and are the same still.

    keep: for the next start, where the disk has room.

    Raises:
        UserError: as the functions that read them.
    """
    known = _current(config)
    if known is None or known.inputs is None:
        return _kept_or_read(config, tell, keep)
    for text in known.inputs.messages:
        tell(text)
    return known.inputs


def policy(config: Config, lazy: bool) -> nn.Module:
    """The model as training starts, its trained part chosen; loaded now, unless it was ahead and is the same still.

    Raises:
        UserError: as `load.load` and `adapters.make_trainable`.
    """
    known = _current(config)
    ready = known.policy if known is not None else None
    if known is not None:
        known.policy = None  # it is about to change
    if ready is not None and not lazy:
        return ready
    model = load.load(config.model, config.train.seed, lazy)
    adapters.make_trainable(model, config.model, config.train.seed)
    return model


def read(words: Sequence[str]) -> None:
    """Reads ahead for the run that these words of train.py's would start.

    Raises:
        Exception: whatever is wrong with the run; nothing is kept then, and the run itself will tell.
    """
    global _ahead
    config = train_arguments.read_config(train_arguments.parse(list(words), None))
    hardware.provenance()
    if any(source.startswith(hub_datasets.PREFIX) for source in sources.weights_of(config.data.train)):
        return  # what it is now, only a hub can tell
    state = state_of(config)
    data = None if is_streamed(config.data) and not config.rollouts.rounds else _kept_or_read(config)
    model = None
    free = hardware.free_memory_bytes() if hardware.mlx_device()[0] == "cpu" else None  # a GPU's is not the host's
    if free is not None and config.strategy not in ("sharded", "pipelined"):
        model = load.load(config.model, config.train.seed, lazy=True)
        if is_small(sum(array.nbytes for _, array in tree_flatten(model.parameters())), free):
            adapters.make_trainable(model, config.model, config.train.seed)
            mx.eval(model.parameters())
            token_stream.cannot_share_prompts(model)  # it remembers
        else:
            model = None
    load.fingerprint(config.model, config.train.seed)
    load.reference_fingerprint(config.model, config.train.seed)
    _ahead = Ahead(state, data, model)


def is_small(weights_bytes: int, free_bytes: int) -> bool:
    """Whether a second copy of the weights may lie beside those that train."""
    return ROOM * weights_bytes <= free_bytes


def state_of(config: Config) -> str:
    """The settings that decide what is read, and size, times and inode of every file that it is read from.

    Raises:
        UserError: a file is missing.
    """
    settings = [config.data, config.model, config.evaluate, config.rollouts]
    kept = [part.model_dump(mode="json") for part in settings] + [config.train.loss, config.train.seed]
    stamps = [(str(file), *_stamp(file)) for file in _files(config)]
    return json.dumps([kept, stamps])


def _current(config: Config) -> Ahead | None:
    """What was read ahead; forgotten where it is no longer what the run would read."""
    global _ahead
    if _ahead is not None and _ahead.state != state_of(config):
        _ahead = None
        load.fingerprint.cache_clear()
    return _ahead


def _kept_or_read(config: Config, tell: Callable[[str], None] = lambda text: None, keep: bool = True) -> Inputs:
    """What an earlier start has kept of these settings and files, or what is read now."""
    try:
        state = state_of(config) if kept_inputs.may_keep(config) else None
    except (OSError, UserError):  # a file is missing: who reads it tells
        state = None
    if state is None:
        return _read(config, tell)
    path = kept_inputs.path_of(config, state)
    if (kept := kept_inputs.read(path, config)) is not None:
        for text in kept.messages:
            tell(text)
        return kept
    read = _read(config, tell)
    if keep and _is_still(config, state):
        kept_inputs.keep(path, read)
    return read


def _is_still(config: Config, state: str) -> bool:
    """Whether no file was changed while it was read."""
    try:
        return state_of(config) == state
    except (OSError, UserError):
        return False


def _read(config: Config, tell: Callable[[str], None]) -> Inputs:
    messages: list[str] = []

    def say(text: str) -> None:
        messages.append(text)
        tell(text)

    tokenizer, words = tokenizer_module.load_tokenizer_of(config.model), vocabulary(config.model)
    if tokenizer is not None and (facts := facts_of(Encoder(tokenizer, config.data, words["eos_token_id"]))):
        say(str(facts))
    data: Dataset | StreamedDataset | Prompts
    valid = held_out = None
    if config.rollouts.rounds:
        data, held_out = _prompts(config, tokenizer, words, say)
    elif config.record_kind == "group":
        data = load_groups(config.data, limits_of(words))
    else:
        kind, mismatched = config.record_kind, losses.needs_mismatched(config.train.loss)
        data = open_training(config.data, kind, tokenizer, tell=say, mismatched=mismatched, **words)
        valid = open_held_out(config.data, kind, tokenizer, tell=say, mismatched=mismatched, **words)
    limits = limits_of(words)
    questions = answer_questions.load_questions(config, tokenizer, limits)
    row = _first_row(data, tokenizer)
    read = Inputs(lambda: tokenizer, data, valid, questions, tuple(messages), row, held_out, limits)
    _require_room(config, read)
    return read


def _first_row(data: Dataset | StreamedDataset | Prompts, tokenizer: Tokenizer | None) -> Text | None:
    """A row's text in one line, cut where it is long: to its end, where the answer is."""
    if tokenizer is None or not (examples := data.examples([0])):
        return None
    text = Text("↵").join(picture(examples[0], tokenizer, 0, "green").split("\n", allow_blank=True))
    return Text("... ").append_text(text[-SHOWN_CHARACTERS:]) if len(text) > SHOWN_CHARACTERS else text


def _require_room(config: Config, read: Inputs) -> None:
    """Raises UserError where a greedy answer of an evaluation may end beyond the model's table of positions."""
    settings, rows = config.evaluate, read.valid or read.data
    if read.limits.positions is None or read.tokenizer is None:
        return
    asked: list[tuple[str, int]] = []
    if (prompts := read.held_out) is not None:
        count = min(len(prompts), settings.answers_limit)
        asked = [(prompts.location(row), len(prompts.prompt_ids(row))) for row in range(count)]
    elif not read.questions:
        examples = rows.examples(range(min(settings.samples, len(rows))))
        asked = [(f"{rows.path}, row {one.row} (evaluate.samples)", len(one.prompt_ids)) for one in examples]
    for place, tokens in asked:
        try:
            read.limits.check_answer(tokens, settings.max_tokens, "evaluate.max_tokens")
        except Unusable as why:
            raise UserError(f"{place}: {why}") from None


def _prompts(
    config: Config, tokenizer: Tokenizer | None, words: Vocabulary, tell: Callable[[str], None]
) -> tuple[Prompts, Prompts | None]:
    """The prompts of a run of rounds, and those held out: of data.valid, or what data.holdout keeps; None without.

    Raises:
        UserError: there is no tokenizer, a round wants more prompts than there are, there is no such judge, or as
            `open_prompts`.
    """
    if tokenizer is None:
        raise UserError(
            f"rollouts.rounds={config.rollouts.rounds} needs a tokenizer, but model.path {config.model.path} has none"
        )
    data, rollouts = config.data, config.rollouts
    encoder = Encoder(tokenizer, data, words["eos_token_id"])
    encoder.stop_generation()
    completions = rollouts.samples if config.record_kind == "group" else 2

    def opened(source: str | dict[str, float], held_out: bool | None) -> Prompts:
        return open_prompts(source, data, encoder, rollouts, completions, held_out, tell, limits_of(words))

    prompts = opened(data.train, False if data.holdout else None)
    if rollouts.prompts > len(prompts):
        raise UserError(
            f"rollouts.prompts={rollouts.prompts}, but {prompts.path} has {len(prompts)}; "
            f"set rollouts.prompts={len(prompts)}"
        )
    held_out = None
    if data.valid is not None:
        held_out = opened(data.valid, None)
    elif data.holdout:
        held_out = opened(data.train, True)
    _require_judges(config, prompts, held_out)
    return prompts, held_out


def _require_judges(config: Config, prompts: Prompts, held_out: Prompts | None) -> None:
    """Raises UserError where a round's answers, or those to held-out prompts, would find no judge."""
    of_rounds = "evaluate.judge" if config.rollouts.judge is None else "rollouts.judge"
    judge = config.evaluate.judge if config.rollouts.judge is None else config.rollouts.judge
    asked = [(of_rounds, judge, prompts)]
    asked += [] if held_out is None else [("evaluate.judge", config.evaluate.judge, held_out)]
    for setting, name, of_prompts in asked:
        judge_checks.require_judge(config.evaluate, name, setting)
        judge_checks.require_answers(name, setting, of_prompts)


def _files(config: Config) -> Iterator[Path]:
    """Every file of the data, the questions, the model, its adapter and a reference of its own."""
    for source in (*sources.weights_of(config.data.train), *sources.weights_of(config.data.valid or {})):
        yield from sources.files_of(source, config.data)
    if config.evaluate.answers is not None:
        yield Path(config.evaluate.answers)
    if not isinstance(config.data.chat_template, bool):
        yield Path(config.data.chat_template)
    folders = [model_folder.resolve(config.model.path, config.model.revision)]
    if config.model.reference != "initial":
        folders.append(model_folder.resolve(config.model.reference))
    if config.model.adapter is not None:
        folders.append(Path(config.model.adapter))
    for folder in folders:
        yield from sorted(file for file in folder.iterdir() if file.is_file())


def _stamp(file: Path) -> tuple[int, ...]:
    seen = file.stat()
    return seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino
