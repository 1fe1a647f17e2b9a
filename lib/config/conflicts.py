"""Settings that do not go together are refused, each conflict in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Rule = tuple[object, str]  # refused where the first is true
Misplaced = tuple[object, str, str]  # where the first is true, none of these settings may be given, and why
MATRIX_OPTIMIZERS = ("adafactor", "muon", "adamw_8bit")  # they look at whole matrices
OF_ADAPTERS = "model.alpha model.use_rslora model.rank_pattern model.alpha_pattern model.adapt_embeddings"
OF_ADAPTERS += " train.loraplus_lr_ratio"
OF_GROUPS = "train.loss_type train.advantages train.ratio train.epsilon train.epsilon_high train.temperature"
OF_GROUPS += " train.max_completion_length"


def first_conflict(config: Any) -> str | None:
    """Why the settings of a lib.config.settings.Config do not go together; None where they do."""
    losses, weights = config.train.loss, config.train.loss_weights or ()
    if isinstance(losses, tuple) and len(weights) not in (0, len(losses)):
        return f"train.loss_weights has {len(weights)} numbers, train.loss {len(losses)} losses; give one each"
    for is_misplaced, names, why in _misplaced(config):
        changed = [name for name in names.split() if _is_set(config, *name.split("."))] if is_misplaced else []
        if changed:
            return f"{changed[0]} {why}; leave it out"
    rules = (_of_learning, _of_references, _of_rounds, _of_ranks)
    return next((message for of_part in rules for is_conflict, message in of_part(config) if is_conflict), None)


def _is_set(config: Any, section: str, name: str) -> bool:
    values = getattr(config, section)
    return getattr(values, name) not in (type(values).model_fields[name].get_default(), (), {})


def _misplaced(config: Any) -> Iterator[Misplaced]:
    train, method, kind, strategy = config.train, config.model.method, config.train.record_kind, config.strategy
    terms, name, has_rounds = {term for term, _ in train.loss_terms}, train.loss_name, config.rollouts.rounds > 0
    is_streaming, is_pairs, is_group = bool(config.data.streaming), kind == "preference", kind == "group"
    yield method == "full", OF_ADAPTERS, "is for adapters, and model.method=full has none"
    yield method == "dora", "model.adapt_embeddings", "is for model.method=lora, not dora"
    yield strategy != "sharded", "model.shard_vocabulary", f"is for strategy=sharded, not {strategy}"
    yield isinstance(train.loss, str), "train.loss_weights", f"weighs a sum of losses, and {name} is one alone"
    is_smooth = bool(terms & {"sigmoid", "robust"})
    yield not is_smooth, "train.label_smoothing", f"is for the losses sigmoid and robust, not {name}"
    yield not is_pairs or "sft" in terms, "train.rpo_alpha", f"adds SFT to a preference loss, which {name} is not"
    yield not is_pairs, "train.use_weighting", f"is for losses of pairs, not {name}"
    labels = "train.desirable_weight train.undesirable_weight"
    yield kind != "unpaired", labels, f"is for the losses kto and bco, not {name}"
    yield not is_group, OF_GROUPS, f"is for train.loss=grpo, not {name}"
    from_file = is_group and not has_rounds  # others' completions are no measure of this policy
    held_out = "is not for train.loss=grpo, which has no held-out loss; give questions to evaluate.answers"
    yield from_file, "data.valid data.holdout", held_out
    yield from_file and is_streaming, "data.streaming", "is not for train.loss=grpo, whose groups are read whole"
    steps = "is not for rounds: a run has rollouts.rounds times rollouts.steps of them"
    yield has_rounds, "train.steps train.epochs", steps
    yield has_rounds, "train.patience", "is not for rounds, which rollouts.tolerance guards"
    yield has_rounds, "train.reference_sync_steps", "is not for rounds: rollouts.reference_every moves the reference"
    yield has_rounds, "evaluate.every", "is not for rounds: every round ends with an evaluation"
    yield has_rounds and is_streaming, "data.streaming", "is not for rounds: prompts are kept in memory"
    groups = "is for train.loss=grpo: answers of equal scores make no pair"
    yield has_rounds and not is_group, "rollouts.filter_groups", groups


def _of_learning(config: Any) -> Iterator[Rule]:
    model, train, data, merge = config.model, config.train, config.data, config.independent.merge
    both = "model.alpha and model.scale both scale the adapters; leave one out"
    yield model.alpha is not None and _is_set(config, "model", "scale"), both
    for name in ("use_rslora", "alpha_pattern"):
        needs = f"model.{name} needs model.alpha, e.g. model.alpha={model.scale * model.rank:g}"
        yield getattr(model, name) and model.alpha is None, needs
    both = "model.adapt_embeddings adapts what model.shard_vocabulary divides; leave one of them out"
    yield model.adapt_embeddings and model.shard_vocabulary, both
    means = f"independent.merge={merge} is for model.method=lora, not {model.method}; take average or outer"
    yield merge in ("stack", "svd") and model.method != "lora", means
    masks = "would give wrong gradients: a recomputed block draws another mask; set one of them to 0 or false"
    yield model.dropout and model.gradient_checkpointing, f"model.dropout with model.gradient_checkpointing {masks}"
    is_sum, terms = not isinstance(train.loss, str), {term for term, _ in train.loss_terms}
    yield is_sum and terms <= {"sft"}, "train.loss is a sum without a preference loss; SFT alone is train.loss=sft"
    yield is_sum and len(terms) < len(train.loss), "train.loss has a loss twice; train.loss_weights weighs each"
    yield train.record_kind != "group" and train.beta == 0, f"train.beta=0 is for grpo alone, not {train.loss_name}"
    both = "train.loss_type=dr_grpo and train.max_completion_length belong together; give both or neither"
    yield (train.loss_type == "dr_grpo") != (train.max_completion_length is not None), both
    is_scaled = train.learning_rate_scaling != "none" and train.learning_rate_batch_size is None
    yield is_scaled, "train.learning_rate_scaling needs train.learning_rate_batch_size, which the rate was chosen for"
    both = "data.valid takes the place of what data.holdout keeps from training; leave one of them out "
    yield data.holdout and data.valid is not None, both + "(data.valid=null, data.holdout=0)"
    needs = "train.patience needs evaluate.every, and data.valid, data.holdout or evaluate.answers to compare"
    is_compared = config.evaluate.every and (data.valid or data.holdout or config.evaluate.answers)
    yield train.patience and not is_compared, needs
    is_counted = config.checkpoint.best_by != "exact_match" or config.evaluate.answers
    yield not is_counted, "checkpoint.best_by=exact_match needs evaluate.answers, questions of which it is counted"
    apart = "train.patience with independent.merge=none: every rank has figures of its own; leave it out"
    yield train.patience and merge == "none", apart


def _of_references(config: Any) -> Iterator[Rule]:
    train, model, alpha = config.train, config.model, config.train.reference_mixup_alpha
    needs = "train.reference_mixup_alpha needs train.reference_sync_steps, e.g. 512"
    yield alpha is not None and train.reference_sync_steps is None, needs
    if config.reference_sync_steps is None:
        return
    moves = ("rollouts.reference_every" if config.rollouts.rounds else "train.reference_sync_steps") + " moves the"
    is_free = {term for term, _ in train.loss_terms} <= {"simpo", "orpo", "cpo", "sft"}
    is_free = is_free or (train.record_kind == "group" and train.beta == 0)
    none = f"{moves} reference, and the loss {train.loss_name} has none (train.beta={train.beta:g}); leave it out"
    yield train.reference_sync_steps and is_free, none
    other = f"{moves} reference, but model.reference={model.reference} is another model; leave one out"
    yield model.reference != "initial", other
    apart = f"{moves} reference and is not for strategy=independent; take synchronous"
    yield config.strategy == "independent", apart
    mixes = f"train.reference_mixup_alpha={alpha} mixes weights, and the mean of adapters' factors is no mean of their "
    is_mixed = model.method != "full" and alpha is not None and alpha < 1
    yield is_mixed, mixes + "products; take 1, or model.method=full"


def _of_rounds(config: Any) -> Iterator[Rule]:
    rollouts, train, merge = config.rollouts, config.train, config.independent.merge
    yield "" in rollouts.stop, "rollouts.stop has an empty text, at which every answer would end; leave it out"
    if not rollouts.rounds:
        return
    loss = f"rollouts.rounds makes pairs or groups of answers, which train.loss={train.loss_name} does not take; "
    yield train.record_kind not in ("preference", "group"), loss + "take a preference loss, e.g. sigmoid, or grpo"
    same = f"train.temperature={train.temperature:g} has to be rollouts.temperature={rollouts.temperature:g}"
    yield train.record_kind == "group" and train.temperature != rollouts.temperature, same
    longest = f"train.max_completion_length has to be rollouts.max_tokens={rollouts.max_tokens}"
    yield train.max_completion_length not in (None, rollouts.max_tokens), longest
    sampled = f"independent.merge={merge} is not for rounds, which sample from one adapter; take average or svd"
    yield merge in ("none", "stack"), sampled
    parts = "strategy=sharded is not for rounds: ranks draw with whole models, or pipelined; take pipelined"
    yield config.strategy == "sharded", parts


def _of_ranks(config: Any) -> Iterator[Rule]:
    strategy, optimizer, batch = config.strategy, config.train.optimizer, config.train.global_batch_size
    shares, sizes, compression = config.plan.shares or (), config.plan.micro_batch_sizes or (), config.sync.compression
    is_sharded, is_divided = strategy == "sharded", strategy in ("sharded", "pipelined")
    every = f"plan.shares {list(shares)}: with strategy={strategy} every rank has a part; leave the rank out"
    yield is_divided and 0 in shares, every
    same = f"plan.micro_batch_sizes {list(sizes)}: with strategy={strategy} all ranks run the same; give one size"
    yield is_divided and len(set(sizes)) > 1, same
    sums = f"plan.shares {list(shares)} sum to {sum(shares)}, but train.global_batch_size is {batch}; make them equal"
    yield not is_divided and shares and sum(shares) != batch, sums
    activations = "sync.compression=topk is not for activations: with strategy=pipelined take bf16 or int8"
    yield strategy == "pipelined" and compression == "topk", activations
    exact = f"sync.compression={compression} is not for strategy=sharded, whose activations are exact; take none"
    yield is_sharded and compression != "none", exact
    whole = f"train.optimizer={optimizer} looks at whole matrices, which strategy=sharded divides; take adamw"
    yield is_sharded and optimizer in MATRIX_OPTIMIZERS, whole
