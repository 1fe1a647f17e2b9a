"""What somebody else's patterns and templates may take: so many seconds and bytes, and then one clear line."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import threading

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from lib.data import template_process
from lib.data.text_tokens import TextTokens
from lib.data.tokenizer_rules import Rule, grows
from lib.errors import UserError
from lib.evaluate.judges import extract
from lib.system import limits, patterns
from tests.tiny import ROOT

TEXTS = ["", "It is 12.", "a\nb \n\n", "1,200 of 3\u2028x", "ä\ud800é", "x" * 5000, "\r\n \t"]
PATTERNS = [r"([^\s].*?)\s*$", r"(\d+)\.", r"\d+", r"(a)|(b)", r"^", r"(?i)IT", r"\s(\S+)$"]


def test_the_worker_finds_what_re_finds() -> None:
    for pattern in PATTERNS:
        for text in TEXTS:
            matches = list(re.finditer(pattern, text, re.MULTILINE))
            wanted = matches[-1].group(min(1, matches[-1].re.groups)) if matches else None
            assert patterns.last_match(pattern, text) == wanted, (pattern, text)
            assert patterns.is_match(pattern, text) == (re.fullmatch(pattern, text) is not None)


def test_a_group_that_took_no_part_is_no_answer() -> None:
    assert extract("(a)|b", "ab") is None and extract("(a)|b", "ba") == "a"


def test_a_search_without_end_ends_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.3)
    with pytest.raises(UserError, match=r"'\(a\+\)\+\$' takes more than 0.3 s on a text of 41 letters"):
        patterns.last_match("(a+)+$", "a" * 40 + "b")
    with pytest.raises(UserError, match="is no regular expression: .*unterminated"):
        patterns.last_match("(", "a")
    monkeypatch.setattr(patterns, "SECONDS", 60.0)
    assert patterns.last_match("(a+)$", "aab a") == "a"


def test_a_call_that_takes_too_long_is_left_behind() -> None:
    released = threading.Event()
    with pytest.raises(UserError, match=r"it takes more than 0.1 s"):
        limits.within(0.1, "it", released.wait)
    released.set()
    assert limits.within(60, "it", lambda: 45) == 45
    with pytest.raises(KeyError):
        limits.within(60, "it", lambda: {}[1])


@pytest.mark.skipif(sys.platform != "linux", reason="macOS limits no addresses")
def test_memory_is_limited() -> None:
    code = "from lib.system import limits\nlimits.limit_memory(2**28)\nbytearray(2**30)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "MemoryError" in done.stderr


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\ud800"}]


def test_templates_are_rendered_as_transformers_does() -> None:
    text = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ tools|tojson }}{% endfor %}{{ x }}"
    )
    given = {
        "tools": [{"type": "function", "ä": 1.5}],
        "x": datetime.date(2026, 1, 2),
        "return_assistant_tokens_mask": True,
    }
    theirs, marked = render_jinja_template([MESSAGES, MESSAGES[:1]], chat_template=text, **given)
    ours = template_process.render([MESSAGES, MESSAGES[:1]], text, **given)
    assert ours == (theirs, [[list(pair) for pair in of_chat] for of_chat in marked])
    many = [[{"role": "user", "content": "x" * 3_000_000}]] * 4  # which are asked for one after the other
    assert template_process.render(many, "{{ messages[0].content|length }}") == (["3000000"] * 4, [])
    template_process.pin_date("{{ strftime_now('%Y-%m-%d') }}", datetime.date(2001, 2, 3))
    assert template_process.render([MESSAGES], "{{ strftime_now('%Y-%m-%d') }}")[0] == ["2001-02-03"]


def test_a_template_that_waits_for_certain_messages_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python cannot be interrupted, and in memory: it is the process that has limits, and not the template."""
    waits = "{%% if messages|length > 1 %%}{{ %s }}{%% endif %%}x"
    assert template_process.render([MESSAGES[:1]], waits % "(messages|length + 9) ** (10 ** 10)")[0] == ["x"]
    monkeypatch.setattr(template_process, "RENDER_SECONDS", 0.3)
    with pytest.raises(UserError, match="the chat template, on 1 conversation, takes more than 0.3 s"):
        template_process.render([MESSAGES], waits % "(messages|length + 9) ** (10 ** 10)")
    monkeypatch.undo()
    if sys.platform == "linux":
        with pytest.raises(
            UserError, match="the chat template, on 1 conversation, takes more than 1,073,741,824 bytes"
        ):
            template_process.render([MESSAGES], waits % "'x'.ljust(10**10)")
    with pytest.raises(template_process.Refused, match="no such turn"):
        template_process.render([MESSAGES], waits % "raise_exception('no such turn')")
    with pytest.raises(template_process.NoTemplate):
        template_process.render([MESSAGES], "{% for %}")


def test_a_tokenizer_that_gives_up_is_said() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokens = TextTokens(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokens.ids(["a"]) == [[0]]
    with pytest.raises(
        UserError, match="gives up on one of 1 texts, of which the first begins with 'aaaaa.*retry-limit"
    ):
        tokens.ids(["a" * 60 + "!"])


@pytest.mark.parametrize(
    ("rules", "does"),
    [
        ([Rule(" ", "▁"), Rule("a", "b" * 100)], False),
        ([Rule("a", "b" * 101)], True),
        ([Rule("a", "aa")] * 6, False),
        ([Rule("a", "aa")] * 7, True),
        ([Rule(None, "x" * 60)] * 2, True),
        ([Rule("", "xyz")] * 4, True),
    ],
)
def test_rules_that_make_a_long_text_of_a_letter_are_found(rules: list[Rule], does: bool) -> None:
    assert grows(rules, "a") == does
