"""A local model that scores answers: a sequence classifier, or a language model that is asked whether they are good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from mlx_lm.utils import load_tokenizer as load_words

from lib.config import read_file
from lib.config.evaluate_settings import REWARD_MODEL
from lib.config.schema import Config
from lib.data.record_formats import Unusable
from lib.data.tokenizer import ModelLimits
from lib.errors import UserError
from lib.evaluate.judges import Question
from lib.evaluate.model_judge import filled_in, instructions_of, text_of
from lib.model.lookup_tables import bounded
from lib.model.token_stream import length_multiple
from lib.system import files
from lib.system.model_folder import resolve, why_unreadable

CLASSIFIER = "ForSequenceClassification"  # how the architectures of such models end
ASKING = """Here are a question and an answer to it.

<question>
{prompt}
</question>

<answer>
{answer}
</answer>

Is the answer correct and helpful? Say Yes or No, and nothing else."""


class RewardModel:
    """Scores each answer by itself, in batches of evaluate.batch_size.

    A classifier (its config.json names an architecture ...ForSequenceClassification, with one label) sees the chat of
    prompt and answer, as transformers' own would: the score is its head's output at the last token. Any other model is
    asked by evaluate.judge_prompt, and the score is log p(Yes) - log p(No) for its first token.

    Raises:
        UserError: there is no such model, or no tokenizer, or it has several labels.
    """

    looks_at_order = False

    def __init__(self, settings: Config):
        path = str(settings.evaluate.judge).removeprefix(REWARD_MODEL)
        self.name, self.batch_size = f"evaluate.judge={settings.evaluate.judge}", settings.evaluate.batch_size
        try:
            folder = resolve(path)
        except UserError as error:
            raise UserError(f"{self.name}: {str(error).removeprefix('model.path ')}") from None
        self.multiple = length_multiple(settings.data)
        stored = read_file.read_object(folder / "config.json", self.name)
        self.is_classifier = any(name.endswith(CLASSIFIER) for name in stored.get("architectures") or ())
        try:
            self.tokenizer: Any = load_words(folder, {"trust_remote_code": False})
            # A classifier has no head over the vocabulary; of tied embeddings none is made.
            own = {"tie_word_embeddings": True} if self.is_classifier else {}
            self.model, _ = load_model(folder, strict=not self.is_classifier, model_config=own)
        except Exception as error:  # mlx-lm and transformers raise whatever they met
            raise UserError(f"{self.name}: cannot be loaded: {why_unreadable(folder, error)}") from None
        self.limits = ModelLimits(*bounded(self.model))
        self.model.eval()
        self.instructions = "" if self.is_classifier else instructions_of(settings, ASKING, ("{prompt}", "{answer}"))
        self.head = _score_head(folder, self.name) if self.is_classifier else self._answers_head()

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        asked = [self._fitting(question, text) for question in questions for text in question.completions]
        scores = np.zeros(len(asked))
        order = np.argsort([len(ids) for ids in asked], kind="stable").tolist()
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            scores[rows] = self._batch([asked[row] for row in rows])
        ends = np.cumsum([len(question.completions) for question in questions])
        return [part.tolist() for part in np.split(scores, ends)[:-1]]

    def _batch(self, rows: list[list[int]]) -> np.ndarray:
        """float32 [n]: the score at each row's last token. What is behind it is padding, which nothing before sees."""
        longest = -(-max(map(len, rows)) // self.multiple) * self.multiple
        tokens = mx.array([row + [0] * (longest - len(row)) for row in rows])
        last = mx.array([len(row) - 1 for row in rows])[:, None, None]
        outputs = self.model.model(tokens) if self.is_classifier else self.model(tokens)
        at_end = mx.take_along_axis(outputs, last, axis=1)[:, 0].astype(mx.float32)
        return np.array(at_end @ self.head)

    def _fitting(self, question: Question, text: str) -> list[int]:
        """The tokens whose last one is scored.

        Raises:
            UserError: more than the model has positions for, or ids that it does not know.
        """
        ids = self._ids(question, text)
        try:
            self.limits.check_ids([ids])
            self.limits.check_row(len(ids) + 1, "leave the prompt out, or take another model")
        except Unusable as why:
            raise UserError(f"{self.name}: {question.place}: {why}") from None
        return ids

    def _ids(self, question: Question, text: str) -> list[int]:
        if self.is_classifier:
            prompt = question.prompt
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            return self._chat([*turns, {"role": "assistant", "content": text}], add_generation_prompt=False)
        content = filled_in(self.instructions, {"{prompt}": text_of(question.prompt), "{answer}": text})
        return self._chat([{"role": "user", "content": content}], add_generation_prompt=True)

    def _chat(self, turns: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
        has_no_template = getattr(self.tokenizer, "chat_template", None) is None
        if has_no_template:
            text = "\n\n".join(str(turn["content"]) for turn in turns) + "\n" * add_generation_prompt
        else:
            try:
                options = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
                text = str(self.tokenizer.apply_chat_template(turns, **options))
            except Exception as error:
                raise UserError(f"{self.name}: its chat template refuses a question: {error}") from None
        return list(self.tokenizer.encode(text, add_special_tokens=has_no_template))

    def _answers_head(self) -> mx.array:
        """float32 [vocabulary]: what makes log p(Yes) - log p(No) of logits."""
        yes, no = (self.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))
        if yes == no:
            raise UserError(f"{self.name}: its tokenizer begins Yes and No with the same token; take another model")
        size = self.model(mx.array([[yes]])).shape[-1]
        return mx.zeros(size).at[mx.array([yes, no])].add(mx.array([1.0, -1.0]))


def _score_head(folder: Path, name: str) -> mx.array:
    """float32 [hidden]: a classifier's head of one label."""
    for file in sorted(folder.glob("*.safetensors")):
        if files.is_litter(file.name):
            continue
        weights = mx.load(str(file))
        assert isinstance(weights, dict)
        for key in ("score.weight", "classifier.weight"):
            if key in weights:
                head = weights[key].astype(mx.float32)
                if (labels := head.shape[0] if head.ndim == 2 else 0) != 1:
                    raise UserError(f"{name}: has {labels} labels; a reward model has one")
                mx.eval(head)
                return head[0]
    raise UserError(f"{name}: no score.weight in its files, which a sequence classifier has")
