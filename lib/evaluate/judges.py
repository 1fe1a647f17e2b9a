"""Judges, which score completions: a check of the answer, a function, a command, a served model, a reward model.

A judge takes questions and returns a score for each completion of each, the higher the better; NaN: it has none.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Context, Decimal, localcontext
from functools import partial
from importlib.machinery import PathFinder
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from mlx_lm.utils import load_tokenizer as load_words

from lib.config import read_file
from lib.config.settings import REWARD_MODEL, Config, DataSettings, EvaluateSettings
from lib.data.prompts import Prompts, prompt_of
from lib.data.record_formats import ANSWER, answer_text
from lib.data.sources import Records
from lib.data.tokenizer import Tokenizer, Vocabulary
from lib.errors import UserError
from lib.evaluate import judge_process
from lib.evaluate.sampler import in_batches
from lib.model.load import bounded
from lib.model.token_stream import length_multiple
from lib.system import files, os_commands
from lib.system.model_folder import resolve, why_unreadable

CHECKS = (None, "exact", "number")  # None: by evaluate.answer_pattern
BROUGHT = ("regex", "json_schema")  # functions of judge_process
SERVERS = ("http://", "https://")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:function
IMPORTABLE = "give module:function, importable from this folder"
JUDGES = "a judge is exact, number, regex, json_schema, reward:PATH, MODULE:FUNCTION, an http address, or a command"
DIGITS = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)"  # 1,200 and 1,00,000; "3,4" has 3 and 4
DECIMAL = rf"(?:{DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
NUMBER = rf"(?<![\d.])((?:(?<![\w)])[-+])?{DECIMAL})(?:/({DECIMAL}))?"  # "10-5" has 10 and 5; "3/4" is one
START_SECONDS, END_SECONDS = 60.0, 5.0  # of the process of a function: until it is imported, and until it has ended
NO_VERDICT = "the judge gave no verdict"


@dataclass(frozen=True)
class Question:
    """A prompt with the completions to score. place: file:line; record: of the prompt, with its `answer`."""

    place: str
    prompt: Any
    completions: Sequence[str]
    record: Mapping[str, Any]

    def line(self) -> str:
        """JSON, as functions and commands read it."""
        return json.dumps({name: value for name, value in vars(self).items() if name != "place"}, default=str)


def question_of(row: int, texts: Sequence[str], records: Records, data: DataSettings, tokenizer: Tokenizer) -> Question:
    """What a judge is asked about some answers to a row's prompt."""
    record = records[row]
    return Question(records.location(row), prompt_of(record, data, tokenizer), texts, record)


class Judge:
    """Scores completions. looks_at_order: whether the order of completions may change the scores."""

    looks_at_order = False
    tried: Question | None = None  # that it scored, where others may be at fault themselves

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        """A score for each completion of each question."""
        raise NotImplementedError

    def require_scores(self, question: Question) -> None:
        """Makes sure that the judge answers, before answers are sampled for it; most need no trial."""


# ---- Checks of the record's answer


def extract(pattern: str, text: str) -> str | None:
    """The first group (the whole, where there is none) of the pattern's last match, or None."""
    *_, last = None, *re.finditer(pattern, text, re.MULTILINE)
    return None if last is None else str(last[1] if last.re.groups else last[0]).strip()


def same_number(text: str, answer: str) -> bool:
    """Whether the last number of a text is the answer's, however it is written: 1,200 and 1200.0 are equal."""
    return number_of(text) is not None and number_of(text) == number_of(answer)


def number_of(text: str) -> Decimal | None:
    """The last number of a text, a fraction to 50 digits; None where there is none, or none that is finite."""
    *_, last = ("", ""), *re.findall(NUMBER, text.replace("\N{MINUS SIGN}", "-"))
    with localcontext(Context(prec=50, traps=[])):  # without traps what is no number is NaN
        number, below = (Decimal(part.replace(",", "")) for part in last)
        number = number / below if last[1] else number
    return number if number.is_finite() else None


class Checker(Judge):
    """1 for a right answer, 0 for a wrong one: completions are compared with the record's `answer`."""

    def __init__(self, is_right: Callable[[str, str], bool]):
        self.is_right = is_right

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        return [[float(self.is_right(text, self._answer(q))) for text in q.completions] for q in questions]

    def _answer(self, question: Question) -> str:
        if (answer := answer_text(question.record)) is None:
            columns = f"(columns: {', '.join(question.record)}); add it, or set evaluate.judge"
            raise UserError(f"{question.place}: no {ANSWER!r} to check completions by {columns}")
        return answer


# ---- Functions and commands


class NoScores(UserError):
    """What a function returned is no list with a score, or None, for each completion."""


class FunctionJudge(Judge):
    """Calls MODULE:FUNCTION, as (prompt, completions, record) ➜ scores, in a spawned process with a time limit. A
    function that takes too long is killed; the next question starts it again. What it prints goes to standard error.
    name: how the user named the judge, for errors. limit_seconds: for the completions of one question."""

    looks_at_order = True

    def __init__(self, function: str, name: str, limit_seconds: float):
        self.function, self.name, self.limit_seconds = function, name, limit_seconds
        self._process: BaseProcess | None = None
        try:
            self._start()
        except UserError as error:
            raise UserError(f"{name}: {error}; {IMPORTABLE}") from None

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        return list(map(self._scores, questions))

    def require_scores(self, question: Question) -> None:
        try:
            self([question])
            self.tried = question
        except UserError as error:
            if isinstance(error, NoScores):  # any other fault may be about this answer alone
                raise

    def _scores(self, question: Question) -> list[float]:
        try:
            if self._process is None:
                self._start()
            self._pipe.send(question.line())
            answer = self._received(self.limit_seconds)
        except UserError as error:
            raise UserError(f"{self.name}: {question.place}: {error}") from None
        if answer["scores"] is None:
            wanted = f"a list of {len(question.completions)} scores"
            raise NoScores(f"{self.name}: {question.place}: returned {answer['returned']}; it has to be {wanted}")
        return list(answer["scores"])

    def _start(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        arguments = (self.function, self.limit_seconds, theirs)
        self._process = spawning.Process(target=judge_process.serve_function, args=arguments, name="judge")
        self._process.start()
        theirs.close()
        self._end_at_exit = Finalize(self, _kill, [self._process], exitpriority=10)
        self._received(START_SECONDS)

    def _received(self, limit_seconds: float) -> dict[str, Any]:
        """The process's next message. Raises UserError: a fault of the function, or the process's end."""
        assert self._process is not None
        message: dict[str, Any] = {"fault": f"no answer within {limit_seconds:g} s (evaluate.judge_seconds)"}
        is_over = True
        try:
            if self._pipe.poll(limit_seconds):
                is_over, message = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(END_SECONDS)
            message = {"fault": f"its process ended with status {self._process.exitcode}"}
        if is_over:
            self._end_at_exit()
            self._pipe.close()
            self._process = None
        if "fault" in message:
            raise UserError(message["fault"])
        return message


def _kill(process: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()


class CommandJudge(Judge):
    """A command that reads {"prompt", "completions", "record"} a line, and writes a list of scores a line."""

    looks_at_order = True

    def __init__(self, command: str, name: str, timeout_seconds: float):
        self.command, self.name, self.timeout_seconds = shlex.split(command), name, timeout_seconds

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        text = "".join(f"{question.line()}\n" for question in questions)
        done = os_commands.run(self.command, self.timeout_seconds, text=text)
        lines = done.output.splitlines()
        if done.status is None:
            raise UserError(f"{self.name}: no answer within {self.timeout_seconds:g} s (sync.timeout_seconds)")
        if done.status:
            last = (done.errors.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"{self.name}: ended with status {done.status}: {last}")
        if len(lines) != len(questions):
            raise UserError(f"{self.name}: wrote {len(lines)} lines for {len(questions)} questions")
        return [self._scores(line, len(q.completions)) for line, q in zip(lines, questions, strict=True)]

    def _scores(self, line: str, count: int) -> list[float]:
        with contextlib.suppress(ValueError):
            if (scores := judge_process.scores_in(json.loads(line), count)) is not None:
                return scores
        raise UserError(f"{self.name}: wrote {line[:80]!r}, which is no list of {count} scores")


# ---- A model behind an OpenAI-compatible server

ONE = "<question>\n{prompt}\n</question>\n\n<answer>\n{answer}\n</answer>\n\n"
TWO = ONE.replace("answer>", "answer_A>").replace("{answer}", "{first}")
TWO += "<answer_B>\n{second}\n</answer_B>\n\n"
INSTRUCTIONS = f"""Compare two answers to the same question. Judge how correct, helpful and clear they are. Their order
and their length must not matter.

{TWO}Explain in a few sentences. Then end with one of these lines: [[A]] if answer A is better, [[B]] if answer B is
better, [[C]] if they are equally good."""
GRADING = f"""Grade an answer to a question. Judge how correct, helpful and clear it is. Its length must not matter.

{ONE}Explain in a few sentences. Then end with a line with the grade, from 1 (useless) to 10 (perfect), like this:
[[5]]"""
ASKING = f"""Here are a question and an answer to it.

{ONE}Is the answer correct and helpful? Say Yes or No, and nothing else."""
GRADE = r"\[\[(-?\d+(?:\.\d+)?)\]\]"
VERDICTS: dict[str | None, list[float]] = {"A": [1.0, 0.0], "B": [0.0, 1.0], "C": [0.5, 0.5]}
BUSY = (408, 429, 500, 502, 503, 504)  # statuses of a server that is busy, or gone for a moment
UNREACHED = (httpx2.HTTPError, httpx2.InvalidURL)
TRIES = 4
WAIT_SECONDS = 1.0  # before the second try; then 3 and 7


def instructions_of(settings: EvaluateSettings, default: str, places: Sequence[str]) -> str:
    """What a judge model is asked: evaluate.judge_prompt, or the default."""
    path = settings.judge_prompt
    text = default if path is None else read_file.read_text(Path(path), "evaluate.judge_prompt")
    if path is not None and (missing := [place for place in places if place not in text]):
        raise UserError(f"evaluate.judge_prompt={path}: {', '.join(missing)} is missing in it")
    return text


def filled_in(instructions: str, parts: Mapping[str, str]) -> str:
    """The instructions with their places filled in, in one pass: an answer that has "{second}" in it stays as it is."""
    return re.sub("|".join(map(re.escape, parts)), lambda place: parts[place.group()], instructions)


def text_of(prompt: Any) -> str:
    """A prompt as text: messages one after the other, each with its role."""
    return prompt if isinstance(prompt, str) else "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


class JudgeServer(Judge):
    """A model of an OpenAI-compatible server, asked for verdicts on two answers, or for a grade of each. The questions
    are those of MT-bench's judge (arXiv:2306.05685, section 3.1)."""

    def __init__(self, settings: EvaluateSettings, name: str, timeout_seconds: float, grades: bool):
        self.url, self.name, self.timeout_seconds = str(settings.judge).rstrip("/"), name, timeout_seconds
        self.model, self.concurrency = settings.judge_model, settings.batch_size
        self.grades, self.looks_at_order = grades, not grades
        self.places = ("{prompt}", "{answer}") if grades else ("{prompt}", "{first}", "{second}")
        self.instructions = instructions_of(settings, GRADING if grades else INSTRUCTIONS, self.places)

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        """Each answer's grade; or 1 for the better of two and 0 for the other, or 0.5 each; NaN without a verdict."""
        if self.grades:
            grades = iter(self._answers([(text_of(q.prompt), text) for q in questions for text in q.completions]))
            return [[float(extract(GRADE, next(grades)) or math.nan) for _ in q.completions] for q in questions]
        if any(len(question.completions) != 2 for question in questions):
            raise UserError(f"{self.name} compares two answers, for --against")
        answers = self._answers([(text_of(q.prompt), *q.completions) for q in questions])
        return [VERDICTS.get(extract(r"\[\[([ABC])\]\]", text), [math.nan, math.nan]) for text in answers]

    def require_scores(self, question: Question) -> None:
        self([question])

    def _answers(self, values: Sequence[tuple[str, ...]]) -> list[str]:
        """What the model answers to its instructions, their places filled in, some at a time."""
        texts = [filled_in(self.instructions, dict(zip(self.places, each, strict=True))) for each in values]
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with (
            httpx2.Client(timeout=httpx2.Timeout(self.timeout_seconds, connect=20.0), headers=headers) as client,
            ThreadPoolExecutor(self.concurrency) as threads,
        ):
            return list(threads.map(partial(self._answer, client), texts))

    def _answer(self, client: httpx2.Client, text: str) -> str:
        """One answer; a server that is busy, or cannot be reached, is asked again."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0}
        for attempt in range(TRIES):
            time.sleep(WAIT_SECONDS * (2**attempt - 1))
            try:
                response = client.post(f"{self.url}/chat/completions", json=body)
            except UNREACHED as error:
                why = repr(error)
                continue
            why = f"status {response.status_code}: {response.text[:200]!r}"
            if response.status_code not in BUSY:
                break
        else:
            raise UserError(f"{self.name}: {why} (tried {TRIES} times)")
        if response.status_code != 200:
            raise UserError(f"{self.name}: {why}")
        try:
            return str(response.json()["choices"][0]["message"]["content"] or "")
        except (ValueError, KeyError, IndexError, TypeError):
            raise UserError(f"{self.name}: no chat completion, but {response.text[:200]!r}") from None


# ---- A local model

CLASSIFIER = "ForSequenceClassification"  # how the architectures of such models end


class RewardModel(Judge):
    """Scores each answer by itself, in batches of evaluate.batch_size. A classifier (its config.json names an
    architecture ...ForSequenceClassification, with one label) sees the chat of prompt and answer, as transformers' own
    would: the score is its head's output at the last token. Any other model is asked by evaluate.judge_prompt, and the
    score is log p(Yes) - log p(No) for its first token. Rows are padded to `multiple`."""

    def __init__(self, settings: EvaluateSettings, name: str, multiple: int):
        self.name, self.batch_size, self.multiple = name, settings.batch_size, multiple
        folder = resolve(str(settings.judge).removeprefix(REWARD_MODEL))
        stored = read_file.read_object(folder / "config.json", name)
        self.is_classifier = any(each.endswith(CLASSIFIER) for each in stored.get("architectures") or ())
        try:
            self.tokenizer: Any = load_words(folder, {"trust_remote_code": False})
            # A classifier has no head over the vocabulary; of tied embeddings none is made.
            changes = {"tie_word_embeddings": True} if self.is_classifier else {}
            self.model, _ = load_model(folder, strict=not self.is_classifier, model_config=changes)
        except Exception as error:  # mlx-lm and transformers raise whatever they meet
            raise UserError(f"{name}: cannot be loaded: {why_unreadable(folder, error)}") from None
        self.limits = Vocabulary(None, *bounded(self.model))
        self.model.eval()
        self.instructions = "" if self.is_classifier else instructions_of(settings, ASKING, ("{prompt}", "{answer}"))
        self.head = _score_head(folder, name) if self.is_classifier else self._answers_head()

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        rows = [self._row(question, text) for question in questions for text in question.completions]
        lengths = [len(ids) for ids in rows]
        scores = iter(in_batches(lengths, self.batch_size, lambda part: self._batch([rows[i] for i in part])))
        return [[float(next(scores)) for _ in question.completions] for question in questions]

    def _batch(self, rows: list[list[int]]) -> np.ndarray:
        """float32 [n]: the score at each row's last token. Padding comes after it, so the row does not see it."""
        longest = -(-max(map(len, rows)) // self.multiple) * self.multiple
        tokens = mx.array([row + [0] * (longest - len(row)) for row in rows])
        last = mx.array([[[len(row) - 1]] for row in rows])
        outputs = (self.model.model if self.is_classifier else self.model)(tokens)
        at_end = mx.take_along_axis(outputs, last, axis=1)[:, 0].astype(mx.float32)
        return np.array(at_end @ self.head)

    def _row(self, question: Question, text: str) -> list[int]:
        """The tokens whose last one is scored."""
        prompt, asks = question.prompt, not self.is_classifier
        if asks:
            prompt = filled_in(self.instructions, {"{prompt}": text_of(prompt), "{answer}": text})
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        turns += [] if asks else [{"role": "assistant", "content": text}]
        try:
            if getattr(self.tokenizer, "chat_template", None) is None:
                ids = self.tokenizer.encode("\n\n".join(str(turn["content"]) for turn in turns) + "\n" * asks)
            else:
                chat = self.tokenizer.apply_chat_template(turns, add_generation_prompt=asks, tokenize=False)
                ids = self.tokenizer.encode(str(chat), add_special_tokens=False)
            self.limits.check_ids([ids])
            self.limits.check_row(len(ids) + 1, "leave the prompt out, or take another model")
        except Exception as error:  # a row that is too long, or what the template's author chose to raise
            raise UserError(f"{self.name}: {question.place}: {error}") from None
        return ids

    def _answers_head(self) -> mx.array:
        """float32 [vocabulary]: what makes log p(Yes) - log p(No) of logits."""
        yes, no = (self.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))
        if yes == no:
            raise UserError(f"{self.name}: its tokenizer begins Yes and No with the same token; take another model")
        size = self.model(mx.array([[yes]])).shape[-1]
        return mx.zeros(size).at[mx.array([yes, no])].add(mx.array([1.0, -1.0]))


def _score_head(folder: Path, name: str) -> mx.array:
    """float32 [hidden]: a classifier's head of one label."""
    for file in sorted(file for file in folder.glob("*.safetensors") if not files.is_litter(file.name)):
        weights: Any = mx.load(str(file))
        for head in (weights[key] for key in ("score.weight", "classifier.weight") if key in weights):
            if head.ndim != 2 or head.shape[0] != 1:
                raise UserError(f"{name}: has {head.shape[0]} labels; a reward model has one")
            return head[0].astype(mx.float32)
    raise UserError(f"{name}: no score.weight in its files, which a sequence classifier has")


# ---- The judge that a setting names


def require_judges(settings: EvaluateSettings, of_rounds: str | None, data: object, held_out: Prompts | None) -> None:
    """Makes sure that a round's answers, and those to held-out prompts, have a judge. of_rounds: rollouts.judge."""
    first = ("evaluate.judge", settings.judge) if of_rounds is None else ("rollouts.judge", of_rounds)
    for (setting, judge), prompts in ((first, data), (("evaluate.judge", settings.judge), held_out)):
        if not isinstance(prompts, Prompts):
            continue
        require_judge(settings, judge, f"{setting}={judge}")
        is_check = judge in (*CHECKS, *BROUGHT)
        if is_check and all(prompts.records[row].get(ANSWER) is None for row in range(len(prompts))):
            where = f"nor in any other record of {prompts.path}; add it, or set {setting}"
            raise UserError(f"{prompts.records.location(0)}: no {ANSWER!r} to check completions by, {where}")


def require_judge(settings: EvaluateSettings, judge: str | None, name: str) -> None:
    """Makes sure that a judge can be started, before a model is loaded. name: SETTING=JUDGE, for errors."""
    if judge is None or judge in (*CHECKS, *BROUGHT):
        return
    if judge.startswith(REWARD_MODEL):
        try:
            resolve(judge.removeprefix(REWARD_MODEL))
        except UserError as error:
            raise UserError(f"{name}: {str(error).removeprefix('model.path ')}") from None
    elif judge.startswith(SERVERS):
        if settings.judge_model is None:
            raise UserError(f"{name} needs evaluate.judge_model, the name of a model that it serves")
    elif FUNCTION.fullmatch(judge):  # its package is looked for alone: to import it runs its code
        package = re.split("[.:]", judge)[0]
        if package not in sys.modules and PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
            raise UserError(f"{name}: no module {package!r}; {IMPORTABLE}")
    else:
        with contextlib.suppress(ValueError, IndexError):
            if shutil.which(shlex.split(judge)[0]):
                return
        raise UserError(f"{name}: no such command here; {JUDGES}")


def judge_of(settings: Config, setting: str = "evaluate.judge", grades: bool = False) -> Judge:
    """The judge that evaluate.judge names, ready to be asked. grades: of any number of answers, each by itself: else a
    served model compares two. setting: that gave the name, for errors."""
    evaluate, judge, timeout = settings.evaluate, settings.evaluate.judge, settings.sync.timeout_seconds
    name = f"{setting}={judge}"
    require_judge(evaluate, judge, name)
    if judge is None:
        return Checker(lambda text, answer: extract(evaluate.answer_pattern, text) == answer)
    if judge in CHECKS:
        return Checker(same_number if judge == "number" else lambda text, answer: text.strip() == answer)
    if judge.startswith(REWARD_MODEL):
        return RewardModel(evaluate, name, length_multiple(settings.data))
    if judge.startswith(SERVERS):
        return JudgeServer(evaluate, name, timeout, grades)
    if judge in BROUGHT or FUNCTION.fullmatch(judge):
        function = f"lib.evaluate.judge_process:{judge}" if judge in BROUGHT else judge
        return FunctionJudge(function, name, evaluate.judge_seconds)
    return CommandJudge(judge, name, timeout)


# ---- Scores of a round


class Scored(NamedTuple):
    """What a judge makes of one answer: a score, or why there is none."""

    score: float | None
    fault: str = ""


def scores_of(judge: Judge, questions: Sequence[Question]) -> list[list[Scored]]:
    """A score for each completion of each question. Where the judge fails on several questions it is asked for each, on
    one for each of its answers. Raises UserError: it scores no answer, nor the one that it was tried on."""
    scored = _scored(judge, questions)
    each = [answer for of_question in scored for answer in of_question]
    fault = next((answer.fault for answer in each if answer.fault not in ("", NO_VERDICT)), "")
    if fault and all(answer.score is None for answer in each):
        if judge.tried is not None and _scored(judge, [judge.tried])[0][0].score is not None:
            return scored
        raise UserError(f"no answer is scored: {fault}")
    return scored


def _scored(judge: Judge, questions: Sequence[Question]) -> list[list[Scored]]:
    try:
        scores = judge(questions)
    except UserError as error:
        if len(questions) > 1:
            return [_scored(judge, [question])[0] for question in questions]
        if len(questions[0].completions) == 1:
            return [[Scored(None, str(error))]]
        alone = [replace(questions[0], completions=[text]) for text in questions[0].completions]
        return [[_scored(judge, [question])[0][0] for question in alone]]
    missing = Scored(None, NO_VERDICT)
    return [[Scored(score) if math.isfinite(score) else missing for score in of_texts] for of_texts in scores]
