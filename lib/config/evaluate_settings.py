"""The settings of evaluation: in a run, and by `python -m lib.evaluate`."""

from __future__ import annotations

from lib.config.section import Natural, Positive, PositiveFloat, Section


class EvaluateSettings(Section):
    """Held-out evaluation."""

    every: Positive | None = None
    """Steps between evaluations; by default only at the start and the end."""
    batch_size: Positive = 16
    """Pairs per forward pass, here and in the reference pass."""
    answers: str | None = None
    """Records with a `prompt` and an `answer`: greedy generations are scored by exact match."""
    answer_pattern: str = r"([^\s].*?)\s*$"
    """Regular expression; its last match's first group in the generated text is compared with the answer."""
    answers_limit: Positive = 512
    """Most answers checked."""
    samples: Natural = 3
    """Held-out prompts whose greedy continuation is shown."""
    max_tokens: Positive = 128
    """Longest generation."""
    completions: Positive = 4
    """Completions that --score=samples and --make-pairs draw for each prompt."""
    temperature: PositiveFloat = 1.0
    """Temperature that they are drawn at."""
    judge: str | None = None
    """Command of --make-pairs that reads {"prompt", "completions", "record"} a line and writes a list of scores a line;
    by default an answer is right or wrong (evaluate.answer_pattern)."""
