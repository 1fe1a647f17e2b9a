"""Every setting of Tandem, once: its name, type, default, limits and meaning.

A configuration is one frozen tree. YAML fills it, `key=value` words override it, `--help` is printed from it,
and the resolved tree is written into the run's folder.
"""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lib.config.evaluate_settings import EvaluateSettings
from lib.config.metal_settings import MetalSettings
from lib.config.rollout_settings import RolloutSettings, why_no_rounds
from lib.config.section import (
    Fraction,
    Gigabytes,
    Natural,
    NonNegative,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
    Size,
)
from lib.config.serve_settings import ServeSettings
from lib.config.train_settings import TrainSettings


class RunSettings(Section):
    """Where a run keeps its files."""

    dir: str = "runs"
    """Folder that holds all runs."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """The run's folder inside run.dir; by default the configuration's name and the time."""
    log_every: Positive = 10
    """Steps between two plain progress lines, where the output is not a terminal."""
    pages: bool = True
    """Leave curves.png, report.html and a model card in the run's folder when it ends; `python -m lib.dashboard
    --export RUN` makes them later."""
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where rank 0's figures go besides the run's own logs, e.g. [tensorboard]; each needs its package."""


class ModelSettings(Section):
    """What is trained, and what it is compared with."""

    path: str
    """Local folder or hub name of the model, as mlx-lm loads it; quantised models give QLoRA."""
    reference: str = "initial"
    """Reference policy: `initial` (the policy as training starts; for a fresh adapter, the model with its adapters
    off), or another model's path."""
    method: Literal["lora", "dora", "full"] = "lora"
    """Train low-rank adapters, weight-decomposed adapters, or every weight."""
    adapter: str | None = None
    """Folder of an adapter to start from: a run, or what mlx-lm or PEFT saved."""
    rank: Size = 8
    """Rank of the adapters."""
    scale: PositiveFloat = 2.0
    """Factor on the adapter's output (alpha / rank in other trainers)."""
    alpha: PositiveFloat | None = None
    """Instead of model.scale: the factor is alpha / rank, of each layer's own rank."""
    use_rslora: bool = False
    """rsLoRA: the factor is model.alpha / sqrt(rank), so that large ranks learn as fast as small ones."""
    rank_pattern: dict[str, Size] = Field(default_factory=dict)
    """Ranks of layers whose names end as a regular expression says, e.g. {o_proj: 16, "layers.[0-3].mlp.*": 4}."""
    alpha_pattern: dict[str, PositiveFloat] = Field(default_factory=dict)
    """The same of model.alpha."""
    dropout: Annotated[Fraction, Field(lt=1)] = 0.0
    """Dropout on the adapter's input."""
    keys: tuple[str, ...] | None = None
    """Linear layers that get adapters, e.g. [self_attn.q_proj]; by default every linear layer of the blocks."""
    adapt_embeddings: bool = False
    """Give the embedding and the head adapters as well; of tied ones, one for both. For method=lora."""
    blocks: Positive | tuple[int | str, ...] | None = None
    """Train only the last n blocks, or those of a list that counts from 0, e.g. [0-3, 28-31]; by default all."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights; by default as stored. What is trained is float32 in any case: adapters, or with method=full
    the weights."""
    gradient_checkpointing: bool | None = None
    """Recompute each block in the backward pass: less memory, about a third more time. Default: where a calibration
    shows that one pair does not fit without."""
    shard_vocabulary: bool = False
    """With strategy=sharded: divide the embedding and the head as well; no rank then holds all logits."""
    attention_window: Positive | None = None
    """Tokens that each token attends to, itself included, in training, reference, evaluation and answers; by default
    all before it. mlx-lm's own commands, given the finished adapter, know nothing of it."""
    random_init: bool = False
    """Take only config.json from model.path and draw the weights from train.seed."""
    revision: str | None = None
    """Revision of a hub model."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model or tokenizer."""

    @field_validator("blocks", mode="before")
    @classmethod
    def _numbers_and_ranges(cls, value: Any) -> Any:
        if not isinstance(value, str | list | tuple):
            return value
        parts = (value,) if isinstance(value, str) else tuple(value)
        for part in parts:
            if not re.fullmatch(r"\d{1,4}(-\d{1,4})?", str(part)):
                raise ValueError(f"{part!r} is neither a block's number, from 0 on, nor a range like 4-7")
        return parts

    def __hash__(self) -> int:  # which mappings have none of
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _adapters_are_possible(self) -> ModelSettings:
        for setting in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, setting):
                try:
                    re.compile(pattern)
                except (re.error, OverflowError, RecursionError) as error:
                    raise ValueError(f"model.{setting}: {pattern!r} is no regular expression: {error}") from None
        if self.alpha is not None and self.scale != type(self).model_fields["scale"].default:
            raise ValueError(
                f"model.alpha={self.alpha:g} gives the adapters' factor, and so does model.scale={self.scale:g}; "
                "leave one of them out"
            )
        if self.alpha is None and (self.use_rslora or self.alpha_pattern):
            named = "use_rslora" if self.use_rslora else "alpha_pattern"
            raise ValueError(f"model.{named} needs model.alpha, e.g. model.alpha={self.scale * self.rank:g}")
        of_adapters = ("alpha", "use_rslora", "rank_pattern", "alpha_pattern", "adapt_embeddings")
        given = [name for name in of_adapters if getattr(self, name)]
        if self.method == "full" and given:
            raise ValueError(f"model.{given[0]} is for adapters, and model.method=full has none; leave it out")
        if self.method == "dora" and self.adapt_embeddings:
            raise ValueError("model.adapt_embeddings is for model.method=lora, not dora")
        if self.adapt_embeddings and self.shard_vocabulary:
            raise ValueError("model.adapt_embeddings adapts what model.shard_vocabulary divides; leave one of them out")
        for part in self.blocks if isinstance(self.blocks, tuple) else ():
            first, _, last = str(part).partition("-")
            if int(last or first) < int(first):
                raise ValueError(f"model.blocks: {part} ends before it begins")
        if self.blocks == ():
            raise ValueError("model.blocks=[] trains nothing; leave it out for all blocks")
        return self

    @property
    def may_turn_on_checkpointing(self) -> bool:
        """Whether a plan may turn gradient checkpointing on: with dropout it is refused."""
        return self.gradient_checkpointing is None and not self.dropout


class DataSettings(Section):
    """The records, their columns, and how they become tokens."""

    train: str | dict[str, PositiveFloat]
    """Training records: a file (.jsonl, .jsonl.gz, .parquet), a folder or glob of them, or hf://OWNER/NAME?split=train;
    or several with weights, {a.jsonl: 2, b.jsonl: 0.5}: how often an epoch takes each row."""
    valid: str | None = None
    """Held-out records, in the same form."""
    holdout: Annotated[Fraction, Field(le=0.5)] = 0.0
    """Part of data.train that is held out in the place of data.valid, by a hash of the prompt: rows that are added move
    no other."""
    deduplicate: bool = False
    """Take records of the same prompt and completions once."""
    shortest: Natural = 0
    """Leave out rows whose longest sequence has fewer tokens, prompt included."""
    longest: Positive | None = None
    """Leave out rows whose longest sequence has more tokens, prompt included; by default they are cut to
    data.max_length."""
    streaming: bool | None = None
    """Read and tokenise rows when their turn comes, for data larger than memory; by default from 64 MB on. Lengths are
    then estimated."""
    cache_dir: str = "runs/.data"
    """Folder for what is made of the data once: indices, unpacked files, tokens. It may become as large as the data."""
    spool_limit_gb: Gigabytes = 100.0
    """Most that is fetched of one remote data set."""
    max_length: Annotated[Natural, Field(ge=2, le=2**24)] = 1024
    """Most tokens of prompt and completion together; longer chats lose middle messages, other rows the beginning
    of their prompt."""
    skip_invalid: bool = False
    """Leave out unusable rows, counted and named, instead of refusing the file."""
    chat_template: Annotated[bool | str, Field(union_mode="left_to_right")] = True
    """Use the tokenizer's chat template where it has one; or that of a file, e.g. template.jinja."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, e.g. {enable_thinking: true}, for training, evaluation and serving; a
    row's own chat_template_kwargs come before them. Unless set, enable_thinking is true where an answer thinks."""
    template_date: datetime.date = datetime.date(2024, 7, 26)
    """The day that chat templates which write one are given, so that a run makes the same tokens tomorrow."""
    prompt: str = "prompt"
    """Column of the prompt."""
    chosen: str = "chosen"
    """Column of the preferred completion."""
    rejected: str = "rejected"
    """Column of the other completion."""
    completion: str = "completion"
    """Column of the completion (SFT)."""
    messages: str = "messages"
    """Column of a conversation (SFT); data.learn says what of it is learnt."""
    text: str = "text"
    """Column of plain text (SFT)."""
    label: str = "label"
    """Column of unpaired feedback: true for a desirable completion, false for another."""
    system: str = "system"
    """Column of a system prompt beside the prompt or the conversation."""
    tools: str = "tools"
    """Column of the tools that the model may call: a list of definitions, or its JSON text."""
    learn: Literal["last", "assistant", "all"] = "last"
    """What SFT learns of a conversation: the assistant's last message, all of the assistant's, or every message.
    Messages with a weight of 0 or 1, as OpenAI's files have them, say it themselves."""
    ignore: tuple[str, ...] = ()
    """Columns, and fields of messages, to leave out on purpose, e.g. [system, label]: one that means something and that
    nothing reads stops the run otherwise."""
    length_multiple: Size | None = None
    """Lengths the model sees are padded to a multiple of this; by default 64 on a GPU, where other lengths are slow,
    and 16 on a CPU."""
    shared_prompts: bool = True
    """Run a prompt once for all its completions, and no padding, where the model's family allows it exactly."""
    length_window: Positive = 32
    """Global batches among which rows are sorted by length; 1 keeps the order fully random."""


class PlanSettings(Section):
    """How a step's work is divided among the ranks."""

    shares: tuple[Natural, ...] | None = None
    """Pairs per rank and step, e.g. [6, 2]; they add up to train.global_batch_size. Default: from the calibration, else
    equal. With strategy=sharded: each rank's weight in the division of the model; with pipelined: each rank's blocks,
    which add up to the model's."""
    micro_batch_sizes: tuple[Size, ...] | None = None
    """Pairs per forward pass, one number a rank. Default: from the calibration, else at most 8."""
    memory_limit_gb: Gigabytes | dict[str, Gigabytes] | None = None
    """What MLX may hold in each rank's process, one number for all or by host, e.g. {m4-max: 96}: a step that takes
    more is taken again in smaller micro-batches. Default: what the machine bears."""
    calibration_dir: str = "calibration"
    """Folder of this host's HOST.json, as `make calibrate` writes it; HOST-0.json, HOST-1.json, ... where several ranks
    share a host."""
    require_calibration: bool = False
    """Refuse to start without a calibration of this model on every host, made with these versions."""
    replan: bool = True
    """Plan again from measured times while running (several ranks, no plan.shares). Timings then decide who trains
    what, and how often independent ranks merge: for the same bits run by run, set plan.shares or turn this off."""
    replan_threshold: PositiveFloat = 0.05
    """Plan again when a step takes this fraction longer than the measured speeds would allow."""
    replan_steps: Positive = 4
    """For so many steps in a row."""
    replan_seconds: NonNegative = 2.0
    """Only where the rest of the run is expected to become so much shorter."""


class CostSettings(Section):
    """What training costs, in any one currency."""

    watts: NonNegative | dict[str, NonNegative] = 0.0
    """Power that a host draws while training: one number for all, or by host, e.g. {m4-max: 120, m3-ultra: 240}."""
    price_per_kwh: NonNegative = 0.0
    """Electricity."""
    rent_per_hour: NonNegative | dict[str, NonNegative] = 0.0
    """Rent of a host: one number for all, or by host."""


class SyncSettings(Section):
    """How ranks talk."""

    timeout_seconds: Seconds = 600.0
    """A rank that waits longer than this for the others ends with a message."""
    compression: Literal["none", "bf16", "int8", "topk"] = "none"
    """How gradients (synchronous) and a round's changes (independent) travel; what int8 and topk leave out is sent
    later (error feedback). With strategy=pipelined: how activations and their gradients travel; what is left out is
    lost, and is the records' `sent_error`."""
    topk_fraction: Annotated[Fraction, Field(gt=0)] = 0.01
    """Part of the values that topk sends, the largest ones; each costs 8 bytes."""


class IndependentSettings(Section):
    """Ranks that train independently, each at its own pace, and are merged at the end of every round."""

    pairs_per_round: Positive | None = None
    """Pairs of a round over all ranks, as whole global batches. Default: merges as often as costs 1 % of the time, at
    least eight times a run; the cost is that of a calibrated link, then as measured, unless plan.replan=false or
    plan.shares keeps timings out."""
    merge: Literal["stack", "svd", "average", "outer", "none"] | None = None
    """How adapters become one: `stack` (exact, of all ranks' rank added up; svd before the last round), `svd` (the best
    of the same rank), `average` (of parameters), `outer` (DiLoCo), `none` (each keeps its own). Default: average; svd
    for LoRA in rounds of pairs_per_round."""
    outer_learning_rate: PositiveFloat = 0.5
    """Of `outer`: how much of the averaged change is taken. In many rounds all changes together count rate / (1 -
    momentum) times: once, by default; seven times with DiLoCo's 0.7 and 0.9, which are for hundreds of rounds."""
    outer_momentum: Annotated[Fraction, Field(lt=1)] = 0.5
    """Of `outer`: Nesterov momentum over the rounds."""


class CheckpointSettings(Section):
    """What is kept on disk while a run goes on."""

    every: Positive | None = None
    """Steps between checkpoints; by default a tenth of the run, at most 100."""
    max_lost_seconds: PositiveFloat | None = None
    """Most seconds of training that a fault may undo: a checkpoint comes before the step that would exceed them. For
    synchronous and sharded ranks; with strategy=auto, replicas are synchronous then."""
    keep: Positive = 3
    """The newest checkpoints that are kept; the best one is kept as well."""
    final: Literal["best", "last"] = "best"
    """What the run's folder holds at the end: the weights of the evaluation with the lowest held-out loss, or the last
    ones. Without held-out data or evaluate.every, and of ranks that are never merged, the last."""


class Config(Section):
    """Tandem's settings."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    data: DataSettings
    train: TrainSettings = TrainSettings()
    rollouts: RolloutSettings = RolloutSettings()
    strategy: Literal["auto", "independent", "synchronous", "sharded", "pipelined"] = "auto"
    """How the machines work together: `synchronous` sums the gradients of every step, `independent` trains on each its
    own pairs and merges now and then, `sharded` gives each a part of every block, `pipelined` gives each some of the
    blocks; `auto`: the faster of these two where the model does not fit every host, else independent (synchronous with
    plan.shares, checkpoint.max_lost_seconds, or a reference that follows). A resumed run keeps its strategy."""
    plan: PlanSettings = PlanSettings()
    cost: CostSettings = CostSettings()
    sync: SyncSettings = SyncSettings()
    independent: IndependentSettings = IndependentSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    metal: MetalSettings = MetalSettings()
    serve: ServeSettings = ServeSettings()

    @model_validator(mode="after")
    def _settings_agree(self) -> Config:
        plan, batch = self.plan, self.train.global_batch_size
        if (self.serve.tls_certificate is None) != (self.serve.tls_key is None):
            raise ValueError("serve.tls_certificate and serve.tls_key belong together; give both or neither")
        has_replicas = self.strategy not in ("sharded", "pipelined")
        if not has_replicas:
            self._parts_are_possible()
        if self.strategy == "sharded":
            self._sharding_is_possible()
        elif self.model.shard_vocabulary:
            raise ValueError(
                f"model.shard_vocabulary is for strategy=sharded, not {self.strategy}, which divides no vocabulary"
            )
        if self.strategy == "independent" and self.checkpoint.max_lost_seconds is not None:
            raise ValueError(
                "checkpoint.max_lost_seconds is not for strategy=independent: "
                "independent ranks are saved at steps of their own; leave it out, and give checkpoint.every"
            )
        if plan.shares is not None and has_replicas and sum(plan.shares) != batch:
            raise ValueError(
                f"plan.shares {list(plan.shares)} sum to {sum(plan.shares)}, "
                f"but train.global_batch_size is {batch}; make them equal"
            )
        if (
            plan.shares is not None
            and has_replicas
            and plan.micro_batch_sizes is not None
            and len(plan.shares) != len(plan.micro_batch_sizes)
        ):
            raise ValueError(
                f"plan.shares has {len(plan.shares)} numbers and plan.micro_batch_sizes "
                f"{len(plan.micro_batch_sizes)}; give one a rank"
            )
        if self.independent.merge in ("stack", "svd") and self.model.method != "lora":
            raise ValueError(
                f"independent.merge={self.independent.merge} is for model.method=lora, not {self.model.method}: "
                + (
                    "DoRA's magnitudes scale whole rows, so no low-rank sum is the mean; "
                    * (self.model.method == "dora")
                )
                + "take average or outer"
            )
        if self.reference_sync_steps is not None:
            self._reference_can_move()
        given = {"evaluate.every": self.evaluate.every is not None, "data.streaming": bool(self.data.streaming)}
        merge, judge = self.independent.merge, self.evaluate.judge
        why_not = why_no_rounds(self.rollouts, self.train, self.strategy, merge, judge, given)
        if self.rollouts.rounds and why_not:
            raise ValueError(why_not)
        if self.data.holdout and self.data.valid is not None:
            raise ValueError(
                f"data.valid={self.data.valid} takes the place of what data.holdout={self.data.holdout:g} keeps from "
                "training; leave one of them out (data.valid=null, data.holdout=0)"
            )
        if self.train.loraplus_lr_ratio is not None and self.model.method == "full":
            raise ValueError("train.loraplus_lr_ratio is for adapters, and model.method=full has none; leave it out")
        if self.model.dropout and self.model.gradient_checkpointing:
            # A block that is recomputed draws another mask: the gradients would belong to another forward pass.
            raise ValueError(
                "model.dropout with model.gradient_checkpointing would give wrong gradients: a recomputed block draws "
                "another mask; set one of them to 0 or false"
            )
        return self

    @model_validator(mode="after")
    def _patience_is_possible(self) -> Config:
        if self.train.patience is None:
            return self
        if self.evaluate.every is None or not (self.data.valid or self.data.holdout):
            raise ValueError(
                "train.patience compares held-out losses as the run goes on: "
                "it needs evaluate.every, and data.valid or data.holdout"
            )
        if self.independent.merge == "none":
            raise ValueError(
                "train.patience with independent.merge=none: every rank has a held-out loss of its own; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_read_whole(self) -> Config:
        """Of train.loss=grpo: completions of a policy that has moved on are no measure of it."""
        if self.record_kind != "group" or self.rollouts.rounds:
            return self
        for name, is_given in (("valid", self.data.valid), ("holdout", self.data.holdout)):
            if is_given:
                raise ValueError(
                    f"data.{name} is not for train.loss=grpo, which has no held-out loss: leave it out, "
                    "and measure answers to the questions of evaluate.answers"
                )
        if self.data.streaming:
            raise ValueError("data.streaming is not for train.loss=grpo, whose groups are read whole; leave it out")
        return self

    def _parts_are_possible(self) -> None:
        """Of sharded and pipelined runs: every rank has a part of one model."""
        if self.plan.shares is not None and 0 in self.plan.shares:
            raise ValueError(
                f"plan.shares {list(self.plan.shares)}: with strategy={self.strategy} every rank keeps a part; "
                "leave the rank out"
            )
        if len(set(self.plan.micro_batch_sizes or ())) > 1:
            raise ValueError(
                f"plan.micro_batch_sizes {list(self.plan.micro_batch_sizes or ())}: "
                f"with strategy={self.strategy} all ranks run the same batches; give one size"
            )
        if self.strategy == "pipelined" and self.sync.compression == "topk":
            raise ValueError("sync.compression=topk is not for activations: with strategy=pipelined take bf16 or int8")

    def _reference_can_move(self) -> None:
        setting = "rollouts.reference_every" if self.rollouts.rounds else "train.reference_sync_steps"
        if self.model.reference != "initial":
            raise ValueError(
                f"{setting} moves the reference along with the policy, "
                f"but model.reference={self.model.reference} is another model; leave one of them out"
            )
        if self.strategy == "independent":
            raise ValueError(
                f"{setting} is not for strategy=independent: each rank would follow itself; take synchronous"
            )
        alpha = self.train.reference_mixup_alpha
        if self.model.method != "full" and alpha is not None and alpha < 1:
            raise ValueError(
                f"train.reference_mixup_alpha={alpha:g} mixes weights, and a mean of adapters' factors is no mean of "
                "their products; take 1, or model.method=full"
            )

    def _sharding_is_possible(self) -> None:
        if self.train.optimizer in ("adafactor", "muon", "adamw_8bit"):
            raise ValueError(
                f"train.optimizer={self.train.optimizer} looks at whole matrices, "
                "which no rank of strategy=sharded has; take adamw"
            )
        if self.sync.compression != "none":
            raise ValueError(
                f"sync.compression={self.sync.compression} is for gradients and merges, "
                "but strategy=sharded exchanges activations, which have to be exact; leave it at none"
            )

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps of a round of rollouts."""
        return self.rollouts.steps or -(-self.rollouts.prompts // self.train.global_batch_size)

    def steps_over(self, rows: int) -> int:
        """Optimizer steps of a run over so many rows."""
        if self.rollouts.rounds:
            return self.rollouts.rounds * self.steps_per_round
        return self.train.steps or self.train.epochs * -(-rows // self.train.global_batch_size)

    @property
    def reference_sync_steps(self) -> int | None:
        """Steps after which the reference follows the policy; None for never."""
        if self.rollouts.rounds and self.rollouts.reference_every is not None:
            return self.rollouts.reference_every * self.steps_per_round
        return self.train.reference_sync_steps

    @property
    def record_kind(self) -> Literal["preference", "unpaired", "sft", "group"]:
        return self.train.record_kind
