"""A model behind an OpenAI-compatible server compares two answers, or grades each."""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from lib.config import read_file
from lib.config.schema import Config
from lib.errors import UserError
from lib.evaluate.judges import Question, extract

INSTRUCTIONS = """Compare two answers to the same question. Judge how correct, helpful and clear they are. Their order
and their length must not matter.

<question>
{prompt}
</question>

<answer_A>
{first}
</answer_A>

<answer_B>
{second}
</answer_B>

Explain in a few sentences. Then end with one of these lines: [[A]] if answer A is better, [[B]] if answer B is better,
[[C]] if they are equally good."""
GRADING = """Grade an answer to a question. Judge how correct, helpful and clear it is. Its length must not matter.

<question>
{prompt}
</question>

<answer>
{answer}
</answer>

Explain in a few sentences. Then end with a line with the grade, from 1 (useless) to 10 (perfect), like this: [[5]]"""
GRADE = r"\[\[(-?\d+(?:\.\d+)?)\]\]"
VERDICTS: dict[str | None, list[float]] = {"A": [1.0, 0.0], "B": [0.0, 1.0], "C": [0.5, 0.5]}
UNCLEAR = [math.nan, math.nan]  # no verdict in what the model answered
PASSING = (408, 429, 500, 502, 503, 504)  # statuses of a server that is busy, or gone for a moment
TRIES = 4
CONNECT_SECONDS = 20.0  # of the first question, whether a server is there
WAIT_SECONDS = 1.0  # before the second try; doubled for each further one


def instructions_of(settings: Config, default: str, places: Sequence[str]) -> str:
    """What a judge model is told: evaluate.judge_prompt, or the default.

    Raises:
        UserError: the file lacks a place.
        OSError: it cannot be read.
    """
    path = settings.evaluate.judge_prompt
    if path is None:
        return default
    text = read_file.read_text(Path(path), "evaluate.judge_prompt")
    if missing := [place for place in places if place not in text]:
        raise UserError(f"evaluate.judge_prompt={path}: {', '.join(missing)} is missing in it")
    return text


def filled_in(instructions: str, parts: Mapping[str, str]) -> str:
    """The instructions with their places filled in, in one pass: an answer that has "{second}" in it stays as it is."""
    return re.sub("|".join(map(re.escape, parts)), lambda found: parts[found.group()], instructions)


class _ServedModel:
    """A model of an OpenAI-compatible server.

    Raises:
        UserError: evaluate.judge_prompt has no place for the answers.
    """

    def __init__(self, settings: Config, default: str, places: Sequence[str]):
        evaluate = settings.evaluate
        self.url, self.timeout_seconds = str(evaluate.judge).rstrip("/"), settings.sync.timeout_seconds
        self.model, self.concurrency = evaluate.judge_model, evaluate.batch_size
        self.name = f"evaluate.judge={self.url}"
        self.instructions = instructions_of(settings, default, places)

    def require_server(self) -> None:
        """Makes sure that somebody listens: a run asks only when the first answers are written.

        Raises:
            UserError: nobody does, or the key is refused.
        """
        try:
            with self._client(min(self.timeout_seconds, CONNECT_SECONDS)) as client:
                status = client.get(f"{self.url}/models").status_code
        except httpx2.HTTPError as error:
            raise UserError(
                f"{self.name}: no server answers ({str(error) or type(error).__name__}); start it"
            ) from None
        if status in (401, 403):
            raise UserError(f"{self.name}: status {status}: it refuses the key (OPENAI_API_KEY of the environment)")

    def _client(self, timeout_seconds: float) -> httpx2.Client:
        key = os.environ.get("OPENAI_API_KEY")
        return httpx2.Client(timeout=timeout_seconds, headers={"Authorization": f"Bearer {key}"} if key else {})

    def answers(self, asked: Sequence[Mapping[str, str]]) -> list[str]:
        """What the model answers to its instructions, filled in, some at a time."""
        with (
            self._client(self.timeout_seconds) as client,
            ThreadPoolExecutor(self.concurrency) as threads,
        ):
            return list(threads.map(lambda parts: self._answer(client, parts), asked))

    def _answer(self, client: httpx2.Client, parts: Mapping[str, str]) -> str:
        message = {"role": "user", "content": filled_in(self.instructions, parts)}
        return self._ask(client, {"model": self.model, "messages": [message], "temperature": 0})

    def _ask(self, client: httpx2.Client, body: dict[str, Any]) -> str:
        """What the model answers; a server that is busy, or cannot be reached, is asked again."""
        for attempt in itertools.count(1):
            try:
                response = client.post(f"{self.url}/chat/completions", json=body)
                if response.status_code == 200:
                    return self._content(response)
                why, may_pass = (
                    f"status {response.status_code}: {response.text[:200]!r}",
                    response.status_code in PASSING,
                )
            except httpx2.HTTPError as error:
                why, may_pass = str(error) or type(error).__name__, True
            if not may_pass or attempt == TRIES:
                raise UserError(f"{self.name}: {why} (tried {attempt} times)")
            time.sleep(WAIT_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("the loop ends by itself")

    def _content(self, response: httpx2.Response) -> str:
        """The text of a chat completion."""
        try:
            return str(response.json()["choices"][0]["message"]["content"] or "")
        except (ValueError, KeyError, IndexError, TypeError):
            raise UserError(f"{self.name}: no chat completion, but {response.text[:200]!r}") from None


class ModelJudge(_ServedModel):
    """Asks for a verdict on two answers, in the form of MT-bench's judge (arXiv:2306.05685, section 3.1).

    Raises:
        UserError: evaluate.judge_prompt has no place for the answers.
    """

    looks_at_order = True

    def __init__(self, settings: Config):
        super().__init__(settings, INSTRUCTIONS, ("{prompt}", "{first}", "{second}"))

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        """1 for the better of two answers and 0 for the other, or 0.5 each; NaN where the model gave no verdict."""
        if any(len(question.completions) != 2 for question in questions):
            raise UserError(f"{self.name} compares two answers, for --against")
        asked = [
            {"{prompt}": text_of(one.prompt), "{first}": one.completions[0], "{second}": one.completions[1]}
            for one in questions
        ]
        return [VERDICTS.get(extract(r"\[\[([ABC])\]\]", text), UNCLEAR) for text in self.answers(asked)]


class ModelGrader(_ServedModel):
    """Asks for a grade of each answer: MT-bench's single answer grading (arXiv:2306.05685, section 3.1).

    Raises:
        UserError: evaluate.judge_prompt has no place for the answer.
    """

    looks_at_order = False

    def __init__(self, settings: Config):
        super().__init__(settings, GRADING, ("{prompt}", "{answer}"))

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        """Each answer's grade; NaN where the model gave none."""
        asked = [
            {"{prompt}": text_of(question.prompt), "{answer}": text}
            for question in questions
            for text in question.completions
        ]
        grades = iter([extract(GRADE, text) for text in self.answers(asked)])
        return [
            [math.nan if (grade := next(grades)) is None else float(grade) for _ in question.completions]
            for question in questions
        ]


def text_of(prompt: Any) -> str:
    """A prompt as text: messages one after the other, each with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
