"""The settings of evaluation: in a run, and by `python -m lib.evaluate`."""

from __future__ import annotations

import re

from pydantic import field_validator

from lib.config.section import Natural, Positive, PositiveFloat, Seconds, Section, Size

REWARD_MODEL = "reward:"  # a judge that computes where the model does


class EvaluateSettings(Section):
    """Held-out evaluation."""

    every: Positive | None = None
    """Steps between evaluations; by default only at the start and the end."""
    batch_size: Size = 16
    """Pairs per forward pass, here and in the reference pass."""
    answers: str | None = None
    """Records with a `prompt` and an `answer`: greedy generations are scored by exact match."""
    answer_pattern: str = r"([^\s].*?)\s*$"
    """Regular expression; its last match's first group in the generated text is compared with the answer."""
    answers_limit: Positive = 512
    """Most answers checked."""
    samples: Natural = 3
    """Held-out prompts whose greedy continuation is shown."""
    max_tokens: Size = 128
    """Longest generation."""
    completions: Size = 4
    """Completions that --score=samples and --make-pairs draw for each prompt."""
    temperature: PositiveFloat = 1.0
    """Temperature that they are drawn at."""
    judge: str | None = None
    """Who scores completions for --make-pairs and --against. By default an answer is right or wrong by
    evaluate.answer_pattern; `exact` compares the whole text with the record's `answer`, `number` the last number in it;
    `regex` and `json_schema` take the answer as what the text has to match, or as JSON to fit. reward:PATH is a local
    reward model: a sequence classifier's score, or how much likelier a language model finds Yes than No when asked
    whether the answer is good.
    MODULE:FUNCTION is called with (prompt, completions, record) and returns a list of scores. An http(s) address is an
    OpenAI-compatible server (http://HOST:8080/v1), whose model compares two answers, or grades each. Anything else is a
    command that reads {"prompt", "completions", "record"} a line and writes a list of scores a line."""
    judge_seconds: Seconds = 10.0
    """Most seconds for one prompt's completions of `regex`, `json_schema` and, in rounds, of MODULE:FUNCTION."""
    judge_model: str | None = None
    """Model of that server; its key is OPENAI_API_KEY of the environment."""
    judge_prompt: str | None = None
    """File with the instructions for that model, in which {prompt}, {first} and {second} are filled in; it has to
    answer with [[A]], [[B]] or [[C]] (equal). In rounds and for --make-pairs, {prompt} and {answer}; it has to answer
    with a number, as [[7]]. For reward:PATH, {prompt} and {answer}; it is asked for Yes or No."""

    @field_validator("answer_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"no regular expression: {error}") from None
        return pattern
