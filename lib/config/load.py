"""The configuration from a YAML file and key=value overrides; what a resumed run may change."""

from __future__ import annotations

import copy
import functools
import hashlib
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lib.config import read_file, unknown_names
from lib.config.help import known_settings, setting_types, type_parts
from lib.config.settings import Column, Config, TrainSettings
from lib.errors import UserError

# What a resumed run may change: how it is spread, watched and ended, never what it has been learning.
CHANGEABLE = (
    "plan. cost. sync. checkpoint. evaluate. serve. metal. run. strategy train.patience train.steps train.epochs "
    "train.compile train.max_traces train.max_skipped_steps model.gradient_checkpointing model.trust_remote_code "
    "model.shard_vocabulary model.keys data.skip_invalid data.cache_dir"
)
RESUMABLE = tuple(CHANGEABLE.split())
STARTED_RUNS = Path("~/.config/tandem/started-runs").expanduser()
MOST_FAULTS = 3  # that one line names
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's, where PyYAML was built with it: five times as fast
Tree = dict[str, Any]  # a section and its settings as YAML has them, not yet checked


def load(path: Path | str | None, overrides: Sequence[str] = (), base: Tree | None = None) -> Config:
    """The configuration of a YAML file (or `base`, a tree of settings) and `key=value` words; or UserError."""
    tree, origins = (copy.deepcopy(base or {}), {}) if path is None else _read_yaml(Path(path))
    sections = {key.partition(".")[0] for key in known_settings() if "." in key}
    tree = {key: {} if value is None and key in sections else value for key, value in tree.items()}  # left empty: null
    if path is not None:
        _keep_batch_of_learning_rate(tree, overrides)
    for word in overrides:
        key, sign, text = word.partition("=")
        if not sign or not key or not text:
            blanks = "write key=value in one word without blanks, e.g. train.beta=0.2, and key=null for none"
            raise UserError(f"argument {word!r} is not of the form key=value; {blanks}")
        if key not in known_settings():
            raise UserError(f"{word}: unknown setting {key}{unknown_names.hint_for_setting(key)}")
        parent, _, leaf = key.rpartition(".")
        section = tree.setdefault(parent, {}) if parent else tree
        if isinstance(section, dict):  # else the file has a value for it, which is refused below
            section[leaf] = _parse_value(key, text)
        origins[key] = word
    return _validated(tree, origins, path)


def with_strategy(config: Config, strategy: str) -> Config:
    """The same with another strategy; raises UserError: a setting that this does not allow."""
    return _validated({**config.model_dump(), "strategy": strategy}, {}, None)


def _validated(tree: Tree, origins: dict[str, str], path: Path | str | None) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        # Of a setting that may be one of several types, each type complains: the one that came furthest is meant.
        furthest: dict[tuple[int | str, ...], ErrorDetails] = {}
        for fault in sorted(error.errors(), key=lambda fault: -len(fault["loc"])):
            furthest.setdefault(fault["loc"][:2], fault)
        faults = sorted(furthest.values(), key=lambda fault: fault["type"] == "missing")  # missing, as it is misspelt
        more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
        said = [_explain(fault, origins, path) for fault in faults[:MOST_FAULTS]]
        raise UserError("; ".join([*said, *more])) from None


def _keep_batch_of_learning_rate(tree: Tree, overrides: Sequence[str]) -> None:
    """Where words change the file's global batch and leave its learning rate, that was chosen for the file's batch."""
    changed, train = {word.partition("=")[0] for word in overrides}, tree.setdefault("train", {})
    of_rate = {"train.learning_rate", "train.learning_rate_batch_size"}
    if "train.global_batch_size" in changed and not changed & of_rate and isinstance(train, dict):
        batch = train.get("global_batch_size", TrainSettings().global_batch_size)
        if train.get("learning_rate_batch_size") is None and isinstance(batch, int):
            train["learning_rate_batch_size"] = batch


def of_trial(config: Config, folder: str) -> Config:
    """The configuration of a trial: three steps in a folder of its own, and nothing but steps."""
    changes: dict[str, dict[str, object]] = {
        "run": {"dir": folder, "name": "trial", "pages": False, "sinks": ()},
        "train": {"steps": 3},
        "data": {"valid": None, "holdout": 0.0},
        "evaluate": {"every": None, "answers": None, "samples": 0},
        "checkpoint": {"every": None},
    }
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)


def resume(path: Path, overrides: list[str]) -> Config:
    """A run's own config.yaml, with the few changes that it may take on its way; UserError where it is another one."""
    before, after = of_run(path), of_run(path, overrides)
    for key in known_settings():
        if _at(before, key) != _at(after, key) and not key.startswith(RESUMABLE):
            was = f"the run was started with {_at(before, key)} and cannot change it"
            raise UserError(f"{key}={_at(after, key)}: {was}; start a new run instead")
    return after


def of_run(path: Path, overrides: Sequence[str] = ()) -> Config:
    """A run's own config.yaml with what the words overrule. Settings that only earlier versions had are left out."""
    tree, _ = _read_yaml(path)
    if (tree.get("rollouts") or {}).get("pairs") == "best_worst":
        tree["rollouts"]["margin"] = 0.0  # as it is written now
    for section, name in (key.split(".") for key in unknown_names.REMOVED):
        stored = tree.get(section)
        value = stored.pop(name, name) if isinstance(stored, dict) else name
        if value != name and name in get_args(Column):  # an earlier version's data.prompt=question
            tree[section].setdefault("columns", {})[name] = value
    config = load(None, overrides, tree)
    changed = {word.partition("=")[0] for word in overrides}
    code = {key: value for key, value in _code_settings(config).items() if key not in changed}
    if code and not _was_started(path.read_text(encoding="utf-8")):
        words = " ".join(f"{key}={value}" for key, value in code.items())
        why = f"{words} runs code, and this machine did not start that run; if you want it, add {words}"
        raise UserError(f"{path}: {why}")
    return config


def _code_settings(config: Config) -> dict[str, Any]:
    """The settings of a run that have code run: a model's own, a function's or a command's."""
    settings = {key: _at(config, key) for key in ("model.trust_remote_code", "evaluate.judge", "rollouts.judge")}
    harmless = re.compile(r"None|False|exact|number|regex|json_schema|(https?://|reward:).*", re.DOTALL)
    return {key: value for key, value in settings.items() if not harmless.fullmatch(str(value))}


def remember(config: Config) -> None:
    """Notes that a user of this machine started a run whose settings have code run: a resume may run it, too."""
    if _code_settings(config) and not _was_started(dump(config)):
        STARTED_RUNS.parent.mkdir(parents=True, exist_ok=True)
        with STARTED_RUNS.open("a", encoding="utf-8") as file:
            file.write(_digest(dump(config)) + "\n")


def _was_started(text: str) -> bool:
    return STARTED_RUNS.exists() and _digest(text) in STARTED_RUNS.read_text(encoding="utf-8").split()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def learning_digest(config: Config) -> str:
    """A digest of what all ranks must agree on: all settings but the paths of files, which may differ among hosts."""
    paths: Any = {"run": ..., "serve": ..., "plan": {"calibration_dir"}, "evaluate": {"answers"}}
    paths |= {"model": {"path", "reference", "adapter"}, "data": {"train", "valid", "cache_dir"}}
    return _digest(config.model_dump_json(exclude=paths))


def dump(config: BaseModel) -> str:
    """The resolved configuration as YAML, every setting included."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=DUMPER, sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path) -> tuple[Tree, dict[str, str]]:
    """The file's tree, and for each dotted key its `file:line`."""
    try:
        node, tree = _parsed(read_file.read_text(path, "config file"))
    except OSError as error:
        why = "is a folder; name a file in it" if path.is_dir() else f"cannot be read: {error.strerror}"
        why = why if path.exists() else "does not exist"
        raise UserError(f"config file {path} {why} (looked from {Path.cwd()}; configs/ has examples)") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: the configuration is empty or not a mapping; configs/ has examples")
    origins: dict[str, str] = {}

    def walk(mapping: Any, prefix: str) -> None:
        for key, value in mapping.value:
            dotted, place = f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}"
            if (kind := key.tag.rpartition(":")[2]) != "str":
                raise UserError(f"{place}: YAML takes the name {key.value} for a value ({kind}); put quotes around it")
            if dotted in origins:
                raise UserError(f"{place}: {dotted} is given twice (first at {origins[dotted]}); keep one")
            origins[dotted] = place
            if isinstance(value, yaml.MappingNode):
                walk(value, f"{dotted}.")

    walk(node, "")
    return tree, origins


def _parsed(text: str) -> tuple[Any, Any]:
    """YAML text as its root node and as a value; yaml.YAMLError, also of a value like 2026-13-45."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (ValueError, OverflowError, AttributeError, LookupError) as error:
        raise yaml.YAMLError(error) from None


def _parse_value(key: str, text: str) -> Any:
    """A word's value as YAML reads it; of a string the text as it is, but for null, quotes around it, and a mapping."""
    parts = type_parts(setting_types()[key])
    is_mapping = text.startswith("{") and text.endswith("}") and any(typing.get_origin(part) is dict for part in parts)
    wants_text = str in parts and not is_mapping
    if wants_text and text[0] not in "'\"":
        return None if text.strip() in ("null", "~") else text
    try:
        node, value = _parsed(text)
    except yaml.YAMLError as error:
        if wants_text:
            return text
        raise UserError(
            f"{key}={text}: {getattr(error, 'problem', error)}; put quotes around texts with ': '"
        ) from None
    if wants_text:
        is_quoted = isinstance(node, yaml.ScalarNode) and node.end_mark.index == len(text)
        return value if is_quoted else text
    if re.search(r"(^|\s)#", text):
        raise UserError(f"{key}={text}: YAML reads no further than the # of a comment; leave it out, or put quotes")
    return value


def _explain(error: ErrorDetails, origins: dict[str, str], path: Path | str | None) -> str:
    """One fault in one line: where the value came from, which setting, what is wrong with it."""
    key, settings = ".".join(map(str, error["loc"])), known_settings()
    # A place inside a list or union: the setting is what the user knows.
    key = next((name for name in settings if key.startswith(f"{name}.")), key)
    place = next((origins[k] for k in (key, key.rpartition(".")[0]) if k in origins), str(path or "settings"))
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown setting {key}{unknown_names.hint_for_setting(key)}"
    if error["type"] == "missing":
        return f"{place}: {key} is required; give it in the file or as {key}=..."
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"{place}: {key} is a section, not {error['input']!r}; write its settings below it"
    message = error["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    if key not in settings:  # settings that do not go together
        return message
    meant = unknown_names.VALUES.get((key, str(error["input"]).lower()))
    here = f"; here: {meant}" if meant else ""
    where = place if place.startswith(f"{key}=") else f"{place}: {key}"
    return f"{where}: {message[0].lower()}{message[1:]}, not {error['input']!r}{here}"


def _at(config: BaseModel, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)
