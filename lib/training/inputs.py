"""What a run learns from and is judged by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from rich.text import Text

from lib.data.answer_questions import Question
from lib.data.dataset import Dataset
from lib.data.model_limits import NO_LIMITS, ModelLimits
from lib.data.prompts import Prompts
from lib.data.streaming import StreamedDataset
from lib.data.text_tokens import Tokenizer


@dataclass(frozen=True)
class Inputs:
    """The same on every host."""

    load_tokenizer: Callable[[], Tokenizer | None]
    data: Dataset | StreamedDataset | Prompts
    valid: Dataset | None
    questions: list[Question]
    messages: tuple[str, ...] = ()  # what reading them had to say
    first_row: Text | None = None  # as the model sees it
    held_out: Prompts | None = None  # of a run of rounds
    limits: ModelLimits = NO_LIMITS  # of the policy and the reference

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None where the model has none; loaded when it is first asked for, which takes a second.

        Raises:
            UserError: its files are damaged.
        """
        return self.load_tokenizer()
