"""Names from other trainers are refused with ours in the same line."""

import re

import pytest

from lib.config import command_line, help, unknown_names
from lib.config import load as load_module
from lib.errors import UserError
from tests.test_config import load
from tests.tiny import ROOT

KNOWN = help.known_settings()


def said_of(*words: str) -> str:
    """What train.py says of these words."""
    with pytest.raises(UserError) as error:
        load_module.load(ROOT / command_line.QUICKSTART, command_line.train_options(list(words), "").overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_hint_leads_to_a_setting() -> None:
    for name, (word, _) in unknown_names.WORDS.items():
        setting = word.partition("=")[0]
        assert setting in KNOWN or setting == "--resume RUN", f"{name}: {word}"
        assert name == unknown_names.normalised(name) and name not in unknown_names.NOTHING
        assert name not in KNOWN, f"{name} is a setting"
    assert len(unknown_names.WORDS) > 150


def test_words_that_hints_give_are_accepted() -> None:
    for word, _ in set(unknown_names.WORDS.values()):
        if "{" not in word and "..." not in word and "=" in word:
            load(word)
    notes = [*unknown_names.NOTHING.values(), *(note for _, note in unknown_names.WORDS.values())]
    assert {*re.findall(r"\b[a-z]{3,}\.[a-z_]+\b", " ".join(notes))} <= {*KNOWN}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--batch-size=8", "train.global_batch_size? "),
        ("--lr 1e-4 train.beta=0.2", "train.learning_rate?"),
        ("--resume_from_checkpoint runs/a", "--resume RUN"),
        ("--nproc_per_node 2", "./launch --hosts mac-a:1,mac-b:1"),
        ("--frobnicate", "train.beta=0.2"),
        ("train.gradient_accumulation_steps=4", "leave it out: it follows from train.global_batch_size"),
        ("train.beta: 0.2", "write key=value in one word without blanks"),
        ("train.beta=", "write key=value in one word without blanks"),
        ("train.loss=sppo_hard", "not 'sppo_hard'; here: sppo"),
        ("train.loss=[sigmoid,bco]", "not 'bco'; here: in a sum, bco_pair"),
        ("=", "not of the form key=value"),
    ],
)
def test_the_line_that_refuses_a_name_has_ours(words: str, hint: str) -> None:
    assert hint in said_of(*words.split())


def test_the_rest_of_the_quickstart_is_named_where_a_model_of_ones_own_is_trained() -> None:
    texts = ("model.path=M evaluate.answers=null", "train.beta=0.2", "--config C.yaml data.train=F")
    rest, *nothing = (command_line.quickstart_rest(command_line.train_options(words.split(), "")) for words in texts)
    assert "data.max_length=64" in rest and ".answers=" not in rest and not any(nothing)
