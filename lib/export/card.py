"""The README.md of an export, which the Hugging Face hub reads: what it is, how to use it, how it was made."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from lib.config import read_file
from lib.errors import shown
from lib.export.trained_run import TrainedRun

CARD = "README.md"
# By form: the hub's name of the library, how it is related to its base model, and how one uses it.
USES = {
    "mlx": ("mlx", "adapter", "mlx_lm.generate --model {base} --adapter-path FOLDER{options} --prompt ..."),
    "fused": ("mlx", "finetune", "mlx_lm.generate --model FOLDER{options} --prompt ..."),
    "peft": ("peft", "adapter", 'peft.PeftModel.from_pretrained(base_model, "FOLDER")'),
    "gguf": ("gguf", "quantized", "llama-cli -m FOLDER/model.gguf"),
    "ollama": ("gguf", "quantized", "ollama create NAME -f FOLDER/Modelfile"),
}
FIGURES = ("loss", "reward_accuracy", "reward_margin", "exact_match_before", "exact_match_after", "steps", "pairs")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def write(run: TrainedRun, folder: Path, to: str, proven: str) -> None:
    """Writes the card into an export's folder; no path of this machine and no row of data is in it."""
    from huggingface_hub import ModelCardData

    (library, relation, use), settings, train = USES[to], run.settings, run.settings.train
    names = [train.loss] if isinstance(train.loss, str) else list(train.loss)
    sources = [settings.data.train] if isinstance(settings.data.train, str) else list(settings.data.train)
    base, is_on_hub = base_of(settings.model.path)
    tags = ["tandem", *names, settings.model.method]
    data = ModelCardData(library_name=library, pipeline_tag="text-generation", tags=tags)
    if is_on_hub:  # the hub refuses a path
        data["base_model"], data["base_model_relation"] = base, relation
    objective = "SFT" if names == ["sft"] else f"{' + '.join(names)} loss, beta {train.beta}"
    options = run.generate_options(folder if to == "fused" else run.base)
    if options is None and to == "mlx":  # mlx-lm would take the base's chat template, or cannot load it
        use = "mlx-lm has it as it was trained by: python -m lib.export RUN --to fused"
    use = use.format(base=shown(base), options=f" {shlex.join(options or ())}".rstrip())
    summary = run.folder / "summary.json"
    stored = read_file.read_object(summary, "the run's") if summary.exists() else {}
    figures = {name: stored[name] for name in FIGURES if isinstance(stored.get(name), int | float)}
    lines = [
        f"---\n{data.to_yaml()}\n---\n\n# {_code(run.folder.resolve().name)}\n",
        f"{_code(base)}, trained by Tandem ({settings.model.method}, {objective}); {run.checkpoint}.\n",
        f"    {use}\n",
        "## How it was made\n",
        f"- data: {', '.join(_code(each if each.startswith('hf://') else Path(each).name) for each in sources)}",
        f"- learning rate {train.learning_rate}, seed {train.seed}",
        *(f"- {name.replace('_', ' ')}: {value:.4g}" for name, value in figures.items()),
        *["- the chat template is that of training: chat_template.jinja"] * (folder / "chat_template.jinja").exists(),
        f"- {proven}\n",
    ]
    (folder / CARD).write_text("\n".join(lines), encoding="utf-8")


def base_of(path: str) -> tuple[str, bool]:
    """What the base model is called, and whether that is its name on the hub."""
    is_on_hub = HUB_NAME.fullmatch(path) is not None and not Path(path).exists()
    return (path if is_on_hub else Path(path).name), is_on_hub


def _code(name: str) -> str:
    """A name that Markdown takes for nothing else."""
    return "`" + " ".join(shown(name).split()).replace("`", "'") + "`"
