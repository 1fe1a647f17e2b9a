"""A run's model card: the README.md of its folder, as the Hugging Face hub reads it."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

from lib.errors import shown
from lib.report import charts
from lib.report.history import RunHistory, figures

CARD, CURVES, REPORT = "README.md", "curves.png", "report.html"
ON_CARD = ("Held out", "Figures", "Samples before and after", "How it was made")  # sections of the model card


def model_card(run: RunHistory) -> str:
    """The adapter's README.md, with the metadata that the Hugging Face hub reads."""
    from huggingface_hub import ModelCardData

    now, model, train = figures(run, time.time()), run.config.get("model") or {}, run.config.get("train") or {}
    base, loss = str(run.stored_summary.get("model") or model.get("path")), train.get("loss")
    is_hub_name = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", base)) and not Path(base).exists()
    data = ModelCardData(
        base_model=base if is_hub_name else None,  # the hub refuses a path
        library_name="mlx",
        pipeline_tag="text-generation",
        tags=["mlx", "tandem", *["dpo"] * (loss == "sigmoid"), *["preference"] * (loss != "sft")],
    )
    method = {"lora": "A LoRA adapter", "dora": "A DoRA adapter"}.get(str(model.get("method")), "All weights")
    shown_base = f"[{base}](https://huggingface.co/{base})" if is_hub_name else f"`{_as_text(base)}`"
    trained = f"preference-trained with the {loss} loss (beta {train.get('beta')})"
    trained = "fine-tuned (SFT)" if loss == "sft" else trained
    hosts = _as_text(", ".join(dict.fromkeys(rank["host"] for rank in now.summary["ranks"])))
    options = run.stored_summary.get("generate_options", [])
    words = ["mlx_lm", "generate", "--model", " ".join(base.split()), "--adapter-path", ".", "--prompt", "..."]
    words = ["lib.export", ".", "--to", "fused"] if options is None else [*words, *options]  # with its chat template
    command = shown(f"python -m {shlex.join(words)}")
    parts = [f"---\n{data.to_yaml()}\n---", f"# {_as_text(run.name)}"]
    parts += [f"{method} of {shown_base}, {trained} by Tandem on {hosts}.", f"![metrics]({CURVES})", f"    {command}"]
    for section in charts.sections_of([run], now):
        if section.title in ON_CARD:
            rows = [[_as_text(cell) for cell in row] for row in section.rows]
            head = section.head or [""] * len(rows[0]) if rows else []
            lines = [head, ["---"] * len(head), *rows] if rows else []
            parts += [f"## {section.title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
            parts += ["\n".join(f"    {shown(line)}" for line in text.splitlines()) for text in section.texts]
    parts.append(f"Plan: {_as_text(now.plan.get('reason') or 'none')}. `{REPORT}` has all curves, ranks and settings.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _as_text(text: str) -> str:
    """A text as one line of Markdown, without markup of its own."""
    return re.sub(r"([\\`*<>\[\]|])", r"\\\1", shown(" ".join(text.split())))
