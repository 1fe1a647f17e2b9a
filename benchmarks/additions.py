"""The task of the quickstart and of the rounds: two numbers are added column by column, with or without what is carried."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ANSWER = re.compile(r"= (\d+)$")


class Problem(NamedTuple):
    wording: str
    a: int
    b: int

    @property
    def prompt(self) -> str:
        return self.wording.format(self.a, self.b)

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    def work_out(self, carry: bool) -> str:
        """The sum column by column from the units; tens go into the next column only with `carry`."""
        steps, digits, column, carried = [], "", 0, 0
        for x, y in zip(reversed(str(self.a)), reversed(str(self.b)), strict=True):
            column = int(x) + int(y) + carried
            steps.append(f"{x}+{y}{'+1' if carried else ''}={column}, ")
            digits = f"{column % 10}{digits}"
            carried = column // 10 if carry else 0
        return f"{''.join(steps)}{self.a} + {self.b} = {'1' if column > 9 else ''}{digits}"

    def is_right(self, completion: str) -> bool:
        found = ANSWER.search(completion)
        return found is not None and found[1] == self.answer


def draw_problems(rng: random.Random, wordings: Mapping[str, float], digits: int) -> Iterator[Problem]:
    """Endless problems with the wordings in turn; no two numbers meet twice, in either order."""
    seen = set()
    in_turn = itertools.cycle(wordings)
    least, most = 10 ** (digits - 1), 10**digits - 1
    while True:
        problem = Problem(next(in_turn), rng.randint(least, most), rng.randint(least, most))
        if (numbers := frozenset((problem.a, problem.b))) not in seen:
            seen.add(numbers)
            yield problem


def write_jsonl(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
