"""How often one model's answers are better than another's: both answer the same prompts, and a judge compares.

The ranks write the answers, each at its own pace; rank 0 asks the judge. What is finished is kept: after a crash the
same command goes on, and asks no judge twice.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lib.data.record_formats import JSON
from lib.data.sources import Records
from lib.distributed.work_queue import Lines
from lib.distributed.world import World
from lib.evaluate.judges import Judge, instructions_of, judge_of, question_of
from lib.evaluate.score_file import CompletionWriter, FileJob, StoredModel, digest_of, is_on_rank_0, key_of, pull
from lib.system import files
from lib.system.records import read_lines
from lib.system.terminal import Terminal

Z95 = 1.959963984540054  # the normal distribution has 95 % within so many standard deviations
COUNTS = ("wins", "losses", "ties", "unclear", "order_decided")


def compare(first: StoredModel, second: StoredModel, records: Records, out: Path, world: World) -> JSON | None:
    """Both models answer the prompts of all records, greedily, and evaluate.judge compares; a line a prompt in `out`.
    Until all is done, both models' answers and the verdicts lie beside `out`, each under a name of its own models, data
    and judge. Returns: On rank 0, the result; elsewhere nothing."""
    settings, evaluate, models = first.settings, first.settings.evaluate, {"answers": first, "against": second}
    with world.agreeing("reading the models"):
        keys = {name: _key(model, digest_of(records)) for name, model in models.items()}
    world.require_equal("model, data or settings", json.dumps(keys))
    parts = {name: out.with_name(f"{out.name}.{name}-{key[:16]}") for name, key in keys.items()}
    comparer: Comparer | None = None
    with world.agreeing("the comparison"):
        if world.rank == 0:
            files.require_absent(out)
            comparer = Comparer(judge_of(settings), records, first)
    for name, model in models.items():
        if not is_on_rank_0(parts[name], world):
            tokenizer, loaded = model.tokenizer(), model.load(world)
            do = CompletionWriter(loaded.model, tokenizer, records, model.settings, None)
            what = f"answers of {model.name}"
            pull(FileJob(what, keys[name], len(records), parts[name], evaluate.batch_size), world, do)
            if warning := do.summary(parts[name], len(records)):
                Terminal(silent=world.rank != 0).line(warning)
    if comparer is None:
        return None
    texts = [[line["completions"][0] for line in read_lines(path)] for path in parts.values()]
    key = key_of("verdicts", keys, evaluate.model_dump(), instructions_of(evaluate, "", ()) or None)
    judged = out.with_name(f"{out.name}.verdicts-{key[:16]}")
    job = FileJob("verdicts", key, len(records), judged, evaluate.batch_size)
    pull(job, world.alone(), lambda rows: comparer.lines(rows, texts))
    judged.replace(out)
    for path in parts.values():
        path.unlink()
    return summarise(read_lines(out), comparer.judge.looks_at_order)


def _key(model: StoredModel, data: str) -> str:
    """Of a model's answers. A change of the judge changes none."""
    evaluate = model.settings.evaluate.model_copy(update={"judge": None, "judge_model": None, "judge_prompt": None})
    unjudged = model._replace(settings=model.settings.model_copy(update={"evaluate": evaluate}))
    return key_of("greedy", unjudged.digest(), data)


class Comparer:
    """Asks a judge about two answers to each prompt. Raises UserError: the first record lacks what a check needs."""

    def __init__(self, judge: Judge, records: Records, model: StoredModel):
        self.judge, self.source = judge, (records, model.settings.data, model.tokenizer())
        if not judge.looks_at_order:  # before any answer is written
            judge([question_of(0, ("", ""), *self.source)])

    def lines(self, rows: range, texts: Sequence[Sequence[str]]) -> Lines:
        """Some prompts with both answers and a verdict. texts: both models' answers to all prompts."""
        questions = {row: question_of(row, (texts[0][row], texts[1][row]), *self.source) for row in rows}
        both = self.judge.looks_at_order
        # Of two equal answers neither is better: no model is asked.
        unequal = {row: q for row, q in questions.items() if not both or q.completions[0] != q.completions[1]}
        orders = {row: [scores] for row, scores in zip(unequal, self.judge([*unequal.values()]), strict=True)}
        if both:
            turned = self.judge([replace(q, completions=q.completions[::-1]) for q in unequal.values()])
            for row, scores in zip(unequal, turned, strict=True):
                orders[row].append(scores[::-1])
        lines = []
        for row, q in questions.items():
            of_row = orders.get(row, [])
            line = {"row": row, "line": self.source[0].line(row), "prompt": q.prompt, "answer": q.completions[0]}
            line |= {"against": q.completions[1], "verdict": verdict(*of_row) if of_row else "tie"}
            finite = [[None if math.isnan(score) else score for score in scores] for scores in of_row]  # as JSON has it
            line |= dict(zip(("scores", "swapped_scores"), [*finite, None, None], strict=False))
            lines.append(json.dumps(line, ensure_ascii=False))
        return lines


def verdict(scores: Sequence[float], swapped: Sequence[float] | None = None) -> str:
    """Who is better: the first answer wins, or loses, only where both orders say so (arXiv:2306.05685, section 3.4).
    scores: of both answers; NaN where the judge gave none. swapped: of the same answers, where the judge saw the second
    one first."""
    gains = [first - second for first, second in filter(None, (scores, swapped))]
    if any(map(math.isnan, gains)):
        return "unclear"
    return "win" if min(gains) > 0 else "loss" if max(gains) < 0 else "tie"


def summarise(lines: Sequence[JSON], looks_at_order: bool) -> JSON:
    """The result, from the first model's side. Prompts without a verdict (`unclear`), and those at which the order of
    the answers decided, count as ties."""
    counts, prompts = Counter(line["verdict"] for line in lines), len(lines)
    rate = (counts["win"] + (counts["tie"] + counts["unclear"]) / 2) / prompts
    ties = [(line["scores"], line["swapped_scores"]) for line in lines if line["verdict"] == "tie"]
    by_order = sum(len({verdict(scores) for scores in each if scores}) > 1 for each in ties)
    figures: JSON = {"prompts": prompts, "wins": counts["win"], "losses": counts["loss"], "ties": counts["tie"]}
    figures |= {"unclear": counts["unclear"], "order_decided": by_order if looks_at_order else None}
    return figures | {"win_rate": rate, "interval": wilson(rate, prompts)}


def wilson(rate: float, count: int) -> tuple[float, float]:
    """The score interval of a rate over so many prompts (Wilson, JASA 22, 1927, p. 209). With ties, which count as a
    half, it is wider than it has to be: of values between 0 and 1 with mean p none have a larger variance than p (1 -
    p), that of wins and losses alone."""
    middle = (rate + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    half = Z95 / (1 + Z95**2 / count) * math.sqrt(rate * (1 - rate) / count + Z95**2 / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def show(say: Terminal, first: str, second: str, result: JSON) -> None:
    """A line for people, and one of JSON."""
    counts = ", ".join(f"{result[name] or 0:,} {name.replace('_', ' ')}" for name in COUNTS)
    rate, low, high = (f"{100 * value:.1f} %" for value in (result["win_rate"], *result["interval"]))
    say.line(f"{first} against {second}, {result['prompts']:,} prompts", "bold")
    say.line(f"win rate {rate} (95 %: {low} to {high}): {counts}")
    say.record({"run": first, "against": second, **result})
