"""Settings: one definition each, YAML and words fill them, and mistakes are told in one line."""

import re
from pathlib import Path

import pytest
import yaml

from lib.config import help, unknown_names
from lib.config import load as load_module
from lib.config.settings import Config
from lib.errors import UserError
from tests.tiny import ROOT

REQUIRED = ["model.path=m", "data.train=t"]


def load(*words: str) -> Config:
    return load_module.load(None, [*REQUIRED, *words])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_committed_config_is_valid_and_says_only_what_differs(path: Path) -> None:
    loaded = load_module.load(path)
    defaults = {key: default for key, _, default, _ in help.settings()}
    tree = yaml.safe_load(path.read_text())
    given = [f"{section}.{key}" for section, body in tree.items() if isinstance(body, dict) for key in body]
    if path.name == "one-machine.yaml":
        return  # it shows the settings that matter, whatever their defaults
    assert not [key for key in given if load_module._at(loaded, key) == defaults[key]], "these repeat the default"


def test_numbers_that_yaml_reads_as_strings_work() -> None:
    assert load("train.learning_rate=1e-4").train.learning_rate == 1e-4
    assert load("run.name=123").run.name == "123"
    assert load("train.steps=null").train.steps is None
    assert load("plan.shares=[12,4]").plan.shares == (12, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/tmp/train.jsonl #2.jsonl", "/tmp/train.jsonl #2.jsonl"),
        ("one\ntwo\n\nthree", "one\ntwo\n\nthree"),
        ('"a #1\\nb"', "a #1\nb"),
        ("'it''s'", "it's"),
        ("'a' and 'b'", "'a' and 'b'"),
        ("null", None),
    ],
)
def test_a_word_of_a_string_is_its_text(text: str, expected: str | None) -> None:
    assert load(f"evaluate.judge_prompt={text}").evaluate.judge_prompt == expected


def test_a_word_of_a_mapping_may_stand_for_a_string() -> None:
    assert load("data.train={a.jsonl: 2, '#b': 1}").data.train == {"a.jsonl": 2, "#b": 1}
    assert load("data.train=[a]").data.train == "[a]"
    assert load("data.train=/data/part 1: chats.jsonl").data.train == "/data/part 1: chats.jsonl"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("checkpoint.interval_steps=5", "; checkpoint has every, keep, final"),
        ("train.beta=-1", "train.beta=-1: input should be greater than or equal to 0"),
        ("model.dtype=int8", "'float32', 'bfloat16' or 'float16'"),
        ("train.learning_rate_scaling=sqrt", "needs train.learning_rate_batch_size"),
        ("train.steps=5 # for now", "train.steps=5 # for now: YAML reads no further than the # of a comment"),
        ("run.name=../escape", "run.name=../escape: should be letters, digits, dots, - and _"),
        ("cost.watts={a: -3}", "cost.watts={a: -3}: input should be greater than or equal to 0, not -3"),
    ],
)
def test_a_wrong_word_is_one_clear_line(word: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        load(word)
    assert expected in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.loss=grpo data.valid=groups.jsonl", "data.valid is not for train.loss=grpo"),
        ("train.loss=grpo train.loss_type=dr_grpo", "train.max_completion_length belong together"),
        ("train.loss=grpo train.use_weighting=true", "train.use_weighting is for losses of pairs"),
        ("train.beta=0", "train.beta=0 is for grpo alone"),
        ("train.desirable_weight=2", "is for the losses kto and bco, not sigmoid"),
        ("train.loss=kto train.rpo_alpha=1", "train.rpo_alpha adds SFT to a preference loss, which kto is not"),
        ("train.reference_sync_steps=2 strategy=independent", "not for strategy=independent"),
        ("train.reference_sync_steps=2 model.reference=other", "model.reference=other is another model"),
        ("train.reference_sync_steps=2 train.reference_mixup_alpha=0.5", "take 1, or model.method=full"),
        ("train.reference_sync_steps=2 train.loss=[orpo,sft]", "the loss orpo + sft has none"),
        ("train.patience=1 evaluate.every=null", "train.patience"),
        ("checkpoint.best_by=exact_match", "needs evaluate.answers"),
        ("train.patience=1 data.valid=v independent.merge=none strategy=independent", "train.patience"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(words: str, expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)) as error:
        load(*words.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {learning_rat: 1}", "x.yaml:3: unknown setting train.learning_rat; did you mean train.learning_rate?"),
        ("train:\n  beta: strong", "x.yaml:4: train.beta"),
        ("model: {path: n}", "x.yaml:3: model is given twice"),
        ("on: 1", "x.yaml:3: YAML takes the name on for a value (bool); put quotes"),
        ("train.beta: 0.2", ":3: unknown setting train.beta; write train.beta=VALUE, in a file beta: below train:"),
    ],
)
def test_a_wrong_line_of_a_file_is_named(tmp_path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path / "x.yaml", f"model: {{path: m}}\ndata: {{train: t}}\n{text}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a", "not a mapping"),
        ("modle: {path: m}\ndata: {train: t}\n", "x.yaml:1: unknown setting modle; did you mean model?; "),
        ("data: {train: t}\n", "x.yaml: model.path is required; give it in the file or as model.path=..."),
        ("base_model: x\nmicro_batch_size: 2\nlora_r: 8\nsequence_len: 512\n", "did you mean model.path?"),
        ("model: org/name\n", "model is a section, not 'org/name'; write its settings below it"),
    ],
)
def test_a_file_of_another_form_is_refused_in_one_line(tmp_path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path / "x.yaml", text)


def refusal(path: Path, text: str) -> str:
    """What is said of a file with this text."""
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_module.load(path)
    said = str(error.value)
    assert "\n" not in said and len(said.replace(str(path), "x.yaml")) < 500
    return said


def test_a_section_whose_settings_are_all_commented_out_has_its_defaults(tmp_path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("model: {path: m}\ndata: {train: t}\ncheckpoint:\n  # every: 25\ntrain:\n")
    assert load_module.load(path).checkpoint.keep == 3 and load_module.load(path, ["train.beta=0.3"]).train.beta == 0.3


def test_a_dump_loads_as_the_same_settings(tmp_path) -> None:
    before = load("train.beta=0.3", "plan.shares=[10,6]", "train.optimizer_options={betas: [0.9, 0.95]}")
    path = tmp_path / "config.yaml"
    path.write_text(load_module.dump(before))
    assert load_module.load(path) == before


def test_a_resumed_run_may_change_its_spread_but_not_its_learning(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(load_module.dump(load()))
    assert load_module.resume(path, ["plan.shares=[10,6]", "train.epochs=5", "run.pages=false"]).train.epochs == 5
    with pytest.raises(UserError, match="train.beta=0.5: the run was started with 0.1"):
        load_module.resume(path, ["train.beta=0.5"])


def test_a_setting_of_an_earlier_version_is_named_and_an_old_run_goes_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(unknown_names.REMOVED, "serve.wings", "fly by hand")
    with pytest.raises(UserError, match="serve.wings, which an earlier version had; fly by hand"):
        load_module.load(None, ["serve.wings=5"], {"model": {"path": "x"}, "data": {"train": "y"}})
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: x}\ndata: {train: y, prompt: question, chosen: chosen}\nserve: {wings: 5}\n")
    resumed = load_module.resume(path, ["train.epochs=5"])
    assert resumed.train.epochs == 5 and resumed.data.columns == {"prompt": "question"}


def test_code_that_a_run_s_folder_names_runs_only_where_the_run_was_started(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(load_module, "STARTED_RUNS", tmp_path / "home" / "started-runs")
    words = ["evaluate.judge=my_judge:score"]
    config = load_module.load(None, words, {"model": {"path": "x"}, "data": {"train": "y"}})
    path = tmp_path / "config.yaml"
    path.write_text(load_module.dump(config))
    with pytest.raises(UserError, match="evaluate.judge=my_judge:score runs code.*add evaluate.judge=my_judge:score"):
        load_module.of_run(path)
    assert load_module.of_run(path, words) == config
    assert load_module.of_run(path, ["evaluate.judge=number"]).evaluate.judge == "number"
    load_module.remember(config)
    assert load_module.of_run(path) == config
