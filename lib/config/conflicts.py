"""Settings that do not go together: each rule is a condition and the line that it is refused with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Rule = tuple[object, str]  # refused where the first is true
OF_GROUPS = ("loss_type", "advantages", "ratio", "epsilon", "epsilon_high", "temperature", "max_completion_length")
OF_ADAPTERS = ("alpha", "use_rslora", "rank_pattern", "alpha_pattern", "adapt_embeddings")
MATRIX_OPTIMIZERS = ("adafactor", "muon", "adamw_8bit")  # they look at whole matrices


def first_conflict(config: Any) -> str | None:
    """Why the settings of a lib.config.settings.Config do not go together; None where they do."""
    sections = (_of_adapters, _of_losses, _of_references, _of_groups, _of_data, _of_rounds, _of_ranks)
    return next((message for rules in sections for is_conflict, message in rules(config) if is_conflict), None)


def _is_changed(section: Any, name: str) -> bool:
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def _of_adapters(config: Any) -> Iterator[Rule]:
    model, method, merge = config.model, config.model.method, config.independent.merge
    scale = (
        f"model.alpha={model.alpha} and model.scale={model.scale:g} give the adapters' factor; leave one of them out"
    )
    yield model.alpha is not None and _is_changed(model, "scale"), scale
    for name in ("use_rslora", "alpha_pattern"):
        needs = f"model.{name} needs model.alpha, e.g. model.alpha={model.scale * model.rank:g}"
        yield getattr(model, name) and model.alpha is None, needs
    useless = "is for adapters, and model.method=full has none; leave it out"
    for name in OF_ADAPTERS:
        yield method == "full" and getattr(model, name), f"model.{name} {useless}"
    yield method == "full" and config.train.loraplus_lr_ratio is not None, f"train.loraplus_lr_ratio {useless}"
    yield method == "dora" and model.adapt_embeddings, "model.adapt_embeddings is for model.method=lora, not dora"
    both = "model.adapt_embeddings adapts what model.shard_vocabulary divides; leave one of them out"
    yield model.adapt_embeddings and model.shard_vocabulary, both
    means = f"independent.merge={merge} is for model.method=lora, not {method}; take average or outer"
    yield merge in ("stack", "svd") and method != "lora", means
    masks = (
        "model.dropout with model.gradient_checkpointing would give wrong gradients: a recomputed block draws another "
    )
    yield model.dropout and model.gradient_checkpointing, masks + "mask; set one of them to 0 or false"


def _of_losses(config: Any) -> Iterator[Rule]:
    train, weights = config.train, config.train.loss_weights
    is_sum = not isinstance(train.loss, str)
    shown = f"train.loss=[{','.join(train.loss)}]" if is_sum else f"train.loss={train.loss}"
    counts = f"train.loss_weights has {len(weights or ())} numbers, {shown} {len(train.loss)} losses; give one each"
    yield is_sum and weights is not None and len(weights) != len(train.loss), counts
    terms, name = {term for term, _ in train.loss_terms}, train.loss_name
    yield weights is not None and not is_sum, f"train.loss_weights weigh a sum of losses, and {shown} is one loss alone"
    yield is_sum and terms <= {"sft"}, f"{shown} has no preference loss; SFT alone is train.loss=sft"
    yield is_sum and len(terms) < len(train.loss), f"{shown} has a loss twice; train.loss_weights weighs each"
    smoothed = f"train.label_smoothing is for the losses sigmoid and robust, not {name}; leave it at 0"
    yield train.label_smoothing and not terms & {"sigmoid", "robust"}, smoothed
    added = f"train.rpo_alpha adds an SFT term to a preference loss, but train.loss is {name}; leave it at 0"
    yield train.rpo_alpha and (train.record_kind != "preference" or "sft" in terms), added
    weighted = f"train.use_weighting is for losses of pairs, not {name}; leave it out"
    yield train.use_weighting and train.record_kind != "preference", weighted
    labels = f"train.desirable_weight and train.undesirable_weight are for the losses kto and bco, not {name}"
    yield train.record_kind != "unpaired" and (train.desirable_weight, train.undesirable_weight) != (1, 1), labels
    scaled = f"train.learning_rate_scaling={train.learning_rate_scaling} needs train.learning_rate_batch_size, "
    scaled += "the global batch that the learning rate was chosen for"
    yield train.learning_rate_scaling != "none" and train.learning_rate_batch_size is None, scaled


def _of_references(config: Any) -> Iterator[Rule]:
    train, model, alpha = config.train, config.model, config.train.reference_mixup_alpha
    needs = "train.reference_mixup_alpha needs train.reference_sync_steps, e.g. 512"
    yield alpha is not None and train.reference_sync_steps is None, needs
    if config.reference_sync_steps is None:
        return
    moves = (
        "rollouts.reference_every" if config.rollouts.rounds else "train.reference_sync_steps"
    ) + " moves the reference"
    is_free = {term for term, _ in train.loss_terms} <= {"simpo", "orpo", "cpo", "sft"}
    is_free = is_free or (train.record_kind == "group" and train.beta == 0)
    none = f"{moves}, and the loss {train.loss_name} has none (train.beta={train.beta:g}); leave it out"
    yield train.reference_sync_steps and is_free, none
    other = f"{moves} along with the policy, but model.reference={model.reference} is another model; leave one out"
    yield model.reference != "initial", other
    yield config.strategy == "independent", f"{moves} and is not for strategy=independent; take synchronous"
    mixes = f"train.reference_mixup_alpha={alpha} mixes weights, and a mean of adapters' factors is no mean of their "
    mixes += "products; take 1, or model.method=full"
    yield model.method != "full" and alpha is not None and alpha < 1, mixes


def _of_groups(config: Any) -> Iterator[Rule]:
    train, data = config.train, config.data
    is_group = train.record_kind == "group"
    yield not is_group and train.beta == 0, f"train.beta=0 is for grpo alone, not {train.loss_name}; take more than 0"
    for name in OF_GROUPS:
        of_groups = f"train.{name} is for train.loss=grpo, not {train.loss_name}; leave it out"
        yield not is_group and _is_changed(train, name), of_groups
    both = "train.loss_type=dr_grpo and train.max_completion_length belong together; give both or neither"
    yield (train.loss_type == "dr_grpo") != (train.max_completion_length is not None), both
    from_file = is_group and not config.rollouts.rounds  # another policy's completions are no measure of this one
    for name in ("valid", "holdout", "streaming"):
        why = "whose groups are read whole" if name == "streaming" else "which has no held-out loss"
        not_for = f"data.{name} is not for train.loss=grpo, {why}; leave it out, and give questions to evaluate.answers"
        yield from_file and getattr(data, name), not_for


def _of_data(config: Any) -> Iterator[Rule]:
    data, train = config.data, config.train
    place = f"data.valid={data.valid} takes the place of what data.holdout={data.holdout:g} keeps from training; "
    yield data.holdout and data.valid is not None, place + "leave one of them out (data.valid=null, data.holdout=0)"
    needs = "train.patience compares held-out losses: it needs evaluate.every, and data.valid or data.holdout"
    yield train.patience and (config.evaluate.every is None or not (data.valid or data.holdout)), needs
    apart = "train.patience with independent.merge=none: every rank has a held-out loss of its own; leave it out"
    yield train.patience and config.independent.merge == "none", apart


def _of_rounds(config: Any) -> Iterator[Rule]:
    rollouts, train, merge = config.rollouts, config.train, config.independent.merge
    margin = "rollouts.pairs=margin needs rollouts.margin, the least difference of scores, e.g. 0.5"
    yield rollouts.pairs == "margin" and not rollouts.margin, margin
    yield "" in rollouts.stop, "rollouts.stop has an empty text, at which every answer would end; leave it out"
    if not rollouts.rounds:
        return
    loss = f"rollouts.rounds makes pairs or groups of answers, which train.loss={train.loss_name} does not take; "
    yield train.record_kind not in ("preference", "group"), loss + "take a preference loss, e.g. sigmoid, or grpo"
    steps = "a run has rollouts.rounds times rollouts.steps of them"
    for name, is_given, why in (
        ("train.steps", train.steps is not None, steps),
        ("train.epochs", train.epochs != 1, steps),
        ("train.patience", train.patience, "rollouts.tolerance and rollouts.after_undone end a run"),
        ("train.reference_sync_steps", train.reference_sync_steps, "rollouts.reference_every moves the reference"),
        ("evaluate.every", config.evaluate.every, "every round ends with an evaluation"),
        ("data.streaming", config.data.streaming, "prompts are kept in memory"),
    ):
        yield is_given, f"{name} is not for rounds: {why}; leave it out"
    heat, most = rollouts.temperature, rollouts.max_tokens
    same = f"train.temperature={train.temperature:g} has to be rollouts.temperature={heat:g}, at which the answers are "
    yield train.record_kind == "group" and train.temperature != heat, f"{same}drawn; set train.temperature={heat:g}"
    equal = "rollouts.filter_groups is for train.loss=grpo: answers of equal scores make no pair; leave it out"
    yield rollouts.filter_groups and train.record_kind != "group", equal
    longest = f"train.max_completion_length={train.max_completion_length} has to be rollouts.max_tokens={most}"
    yield train.max_completion_length not in (None, most), longest
    sampled = f"independent.merge={merge} is not for rounds, where all ranks sample from one adapter of one rank; "
    yield merge in ("none", "stack"), sampled + "take average or svd"
    parts = "strategy=sharded is not for rounds: ranks draw with whole models, or pipelined; take pipelined"
    yield config.strategy == "sharded", parts
    judge = rollouts.judge or config.evaluate.judge or ""
    busy = f"rollouts.overlap=true has answers judged while the ranks learn, and {judge} needs the same devices; "
    busy += "leave rollouts.overlap out, or serve that model and name its address"
    yield rollouts.overlap and judge.startswith("reward:"), busy


def _of_ranks(config: Any) -> Iterator[Rule]:
    strategy, train, batch = config.strategy, config.train, config.train.global_batch_size
    shares, sizes, compression = config.plan.shares, config.plan.micro_batch_sizes, config.sync.compression
    if strategy in ("sharded", "pipelined"):
        every = f"plan.shares {list(shares or ())}: with strategy={strategy} every rank has a part; leave the rank out"
        yield 0 in (shares or ()), every
        same = f"with strategy={strategy} all ranks run the same batches; give one size"
        yield len(set(sizes or ())) > 1, f"plan.micro_batch_sizes {list(sizes or ())}: {same}"
    elif shares is not None:
        sums = f"plan.shares {list(shares)} sum to {sum(shares)}, but train.global_batch_size is {batch}"
        yield sum(shares) != batch, f"{sums}; make them equal"
        counts = f"plan.shares has {len(shares)} numbers and plan.micro_batch_sizes {len(sizes or ())}"
        yield sizes is not None and len(sizes) != len(shares), f"{counts}; give one a rank"
    vocabulary = f"model.shard_vocabulary is for strategy=sharded, not {strategy}, which divides no vocabulary"
    yield strategy != "sharded" and config.model.shard_vocabulary, vocabulary
    activations = "sync.compression=topk is not for activations: with strategy=pipelined take bf16 or int8"
    yield strategy == "pipelined" and compression == "topk", activations
    exact = f"sync.compression={compression} is not for strategy=sharded, whose activations have to be exact; "
    yield strategy == "sharded" and compression != "none", exact + "leave it at none"
    whole = f"train.optimizer={train.optimizer} looks at whole matrices, which no rank of strategy=sharded has; "
    yield strategy == "sharded" and train.optimizer in MATRIX_OPTIMIZERS, whole + "take adamw"
