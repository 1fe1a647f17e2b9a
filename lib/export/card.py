"""The README.md of an export: what it is, how to use it, how it was made. The hub reads its first lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from lib.config import read_file
from lib.errors import UserError, shown
from lib.export.trained_run import TrainedRun

CARD = "README.md"
# By form: the hub's name of the library, how it is related to its base model, and how one uses it.
USES = {
    "mlx": ("mlx", "adapter", "mlx_lm.generate --model {base} --adapter-path FOLDER --prompt ..."),
    "fused": ("mlx", "finetune", "mlx_lm.generate --model FOLDER --prompt ..."),
    "peft": ("peft", "adapter", 'peft.PeftModel.from_pretrained(base_model, "FOLDER")'),
    "gguf": ("gguf", "quantized", "llama-cli -m FOLDER/model.gguf"),
    "ollama": ("gguf", "quantized", "ollama create NAME -f FOLDER/Modelfile"),
}
FIGURES = ("loss", "reward_accuracy", "reward_margin", "exact_match_before", "exact_match_after", "steps", "pairs")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
PLAIN = re.compile(r"(?!.*www\.)[^\W_][\w./-]*", re.IGNORECASE)  # Markdown has no other use for it


def write(run: TrainedRun, folder: Path, to: str, proven: str | None) -> None:
    """Writes the card into an export's folder; no path of this machine and no row of data is in it."""
    (folder / CARD).write_text(model_card(run, folder, to, proven), encoding="utf-8")


def model_card(run: TrainedRun, folder: Path, to: str, proven: str | None) -> str:
    """Its text.

    Args:
        folder: the export's.
        to: the form.
        proven: the line of the proof.
    """
    from huggingface_hub import ModelCardData

    library, relation, use = USES[to]
    settings = run.settings
    losses = settings.train.loss
    names = [losses] if isinstance(losses, str) else list(losses)
    base, is_on_hub = base_of(settings.model.path)
    data = ModelCardData(
        base_model=base if is_on_hub else None,  # the hub refuses a path
        library_name=library,
        pipeline_tag="text-generation",
        tags=["tandem", *names, settings.model.method],
    )
    if is_on_hub:
        data["base_model_relation"] = relation
    loss = "SFT" if names == ["sft"] else f"{' + '.join(names)} loss, beta {settings.train.beta}"
    lines = [
        f"---\n{data.to_yaml()}\n---\n\n# {_as_text(run.folder.resolve().name)}\n",
        f"{_as_text(base)}, trained by Tandem ({settings.model.method}, {loss}); {run.checkpoint}.\n",
        f"    {use.format(base=_in_one_line(base))}\n",
        "## How it was made\n",
        f"- data: {', '.join(_as_text(_source(each)) for each in _sources(settings.data.train))}",
        f"- learning rate {settings.train.learning_rate}, seed {settings.train.seed}",
        *(f"- {name.replace('_', ' ')}: {value:.4g}" for name, value in _figures(run.folder).items()),
        "- the chat template is that of training: chat_template.jinja" * (folder / "chat_template.jinja").exists(),
        f"- {proven}" * (proven is not None),
    ]
    return "\n".join(line for line in lines if line) + "\n"


def base_of(path: str) -> tuple[str, bool]:
    """What the base model is called, and whether that is its name on the hub."""
    is_on_hub = HUB_NAME.fullmatch(path) is not None and not Path(path).exists()
    return (path if is_on_hub else Path(path).name), is_on_hub


def _sources(train: str | Mapping[str, float]) -> list[str]:
    """The sources of training rows: one, or several with weights."""
    return [train] if isinstance(train, str) else list(train)


def _source(source: str) -> str:
    """A source without the folders of this machine."""
    return source if source.startswith("hf://") else Path(source).name


def _figures(folder: Path) -> dict[str, float]:
    """Figures of summary.json; none where the run has not ended."""
    try:
        stored = read_file.read_object(folder / "summary.json", "the run's")
    except (OSError, UserError):
        return {}
    return {name: stored[name] for name in FIGURES if _is_figure(stored.get(name))}


def _is_figure(value: object) -> bool:
    """Whether it is a number that can be written in a few digits; a whole one of JSON may have hundreds."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**15)


def _as_text(name: str) -> str:
    """A name that may be somebody else's, as text of the card: what Markdown could take for something else is code."""
    text = _in_one_line(name)
    return text if PLAIN.fullmatch(text) else "`" + text.replace("`", "'") + "`"


def _in_one_line(name: str) -> str:
    return " ".join(shown(name).split())
