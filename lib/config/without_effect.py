"""Settings that a run was given and that its other settings leave without effect: it says so, and trains."""

from __future__ import annotations

from collections.abc import Iterator

from lib.config.settings import Config


def without_effect(config: Config, strategy: str, ranks: int) -> list[str]:
    """A line for each reason that leaves settings without effect which are not at their defaults.

    Args:
        strategy: what strategy=auto came to.
        ranks: of the run; one alone leaves open what others would do with settings for several.
    """
    lines = []
    for section, names, reason in _idle(config, strategy, ranks):
        given = getattr(config, section)
        fields = type(given).model_fields
        changed = [name for name in names or fields if getattr(given, name) != fields[name].get_default()]
        if changed:
            shown = ", ".join(f"{section}.{name}={getattr(given, name)}" for name in changed)
            lines.append(f"without effect: {shown}; {reason}")
    return lines


def _idle(config: Config, strategy: str, ranks: int) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """A section, settings of it (or all) that nothing reads now, and why."""
    train = config.train
    if config.model.method == "full":
        yield "model", ("rank", "scale", "dropout", "keys"), "model.method=full trains no adapters"
    if train.loss == "sft":
        yield "train", ("beta",), "train.loss=sft compares nothing with a reference"
    for loss, name in (("simpo", "simpo_gamma"), ("dpop", "dpop_lambda"), ("cpo", "cpo_alpha")):
        if loss not in dict(train.loss_terms):
            yield "train", (name,), f"it belongs to the loss {loss}, not {train.loss_name}"
    if train.schedule == "constant":
        yield "train", ("final_learning_rate",), "train.schedule=constant ends where it began"
    if train.steps is not None:
        yield "train", ("epochs",), f"train.steps={train.steps} overrules it"
    if train.record_kind != "sft":
        yield "data", ("learn",), f"it belongs to train.loss=sft, not {train.loss_name}"
    if not config.rollouts.rounds:
        yield "rollouts", (), "rollouts.rounds is 0"
    if config.sync.compression != "topk":
        yield "sync", ("topk_fraction",), f"it belongs to sync.compression=topk, not {config.sync.compression}"
    if strategy != "independent" and ranks > 1:
        yield "independent", (), f"strategy={strategy} merges nothing"
    elif config.independent.merge != "outer":
        yield "independent", ("outer_learning_rate", "outer_momentum"), "they belong to independent.merge=outer"
