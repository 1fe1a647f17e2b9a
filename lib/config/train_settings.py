"""The settings of the optimisation: losses, batch, rates, optimizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from lib.config.section import Fraction, Natural, NonNegative, Positive, PositiveFloat, Section, Size

PreferenceLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "ipo",
    "hinge",
    "dpop",
    "sppo",
    "apo_zero",
    "apo_down",
    "bco_pair",
    "simpo",
    "orpo",
    "cpo",
]
UnpairedLoss = Literal["kto", "bco"]
GroupLoss = Literal["grpo"]
REFERENCE_FREE_LOSSES: frozenset[PreferenceLoss] = frozenset({"simpo", "orpo", "cpo"})
LossTerm = Literal[PreferenceLoss, "sft"]  # of a sum of losses
Loss = Literal["sft", PreferenceLoss, UnpairedLoss, GroupLoss] | tuple[LossTerm, ...]


class TrainSettings(Section):
    """The optimisation."""

    loss: Loss = "sigmoid"
    """`sft`, a preference loss, `kto` or `bco` for completions with a label each, `grpo` for groups of a policy's own
    completions with a reward each, or a sum of preference losses and sft, e.g. [sigmoid, bco_pair, sft];
    docs/options.md has each one's paper."""
    loss_weights: tuple[PositiveFloat, ...] | None = None
    """Weights of a sum of losses, e.g. [0.8, 0.2, 1.0]; by default 1 each."""
    use_weighting: bool = False
    """Weight each pair by how likely the policy itself is to write it (WPO); held-out losses are not weighted."""
    reference_sync_steps: Positive | None = None
    """TR-DPO: every so many steps the reference follows the policy; by default it never moves. Held-out figures stay
    relative to the reference as training starts."""
    reference_mixup_alpha: Annotated[Fraction, Field(gt=0)] | None = None
    """How far it goes: alpha times the policy plus (1 - alpha) times itself. By default 0.6 with model.method=full; of
    adapters, whose mean is none of the weights, all the way: 1."""
    beta: NonNegative = 0.1
    """Strength of the preference (DPO's beta; the weight of the odds ratio in orpo; of the divergence from the
    reference in grpo, where 0 asks for no reference)."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable completions in kto and bco. Rows times weight should be about equal for both labels, so that
    the rarer one counts."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of undesirable completions in kto and bco."""
    label_smoothing: Annotated[Fraction, Field(lt=0.5)] = 0.0
    """Probability that a pair's label is flipped (cDPO with sigmoid; robust)."""
    rpo_alpha: NonNegative = 0.0
    """Weight of an SFT term on the chosen completion, added to any preference loss."""
    simpo_gamma: NonNegative = 0.5
    """Target reward margin of simpo."""
    dpop_lambda: NonNegative = 50.0
    """Penalty of dpop when the chosen completion becomes less likely than under the reference."""
    cpo_alpha: NonNegative = 1.0
    """Weight of the likelihood term of cpo."""
    loss_type: Literal["grpo", "dr_grpo", "bnpo", "dapo"] | None = None
    """What grpo divides the loss of all tokens by: each completion's length, then their number (grpo, the default); the
    number times train.max_completion_length (dr_grpo); the number of tokens of the step (bnpo, dapo)."""
    advantages: Literal["standardized", "batch_standardized", "centered", "leave_one_out"] = "standardized"
    """What grpo makes of a completion's reward: less the mean of its group, divided by their deviation (standardized),
    by that of all groups of the round or file (batch_standardized), or not (centered, Dr. GRPO); less the mean of the
    others (leave_one_out, RLOO)."""
    ratio: Literal["token", "geometric_mean", "completion"] = "token"
    """What of grpo is compared with the sampling policy, and clipped: each token, the geometric mean of a completion's
    tokens (GSPO), or the completion as a whole (RLOO)."""
    epsilon: Annotated[Fraction, Field(gt=0, lt=1)] = 0.2
    """Of grpo: a ratio to the sampling policy below 1 - epsilon, or above 1 + train.epsilon_high, is clipped."""
    epsilon_high: PositiveFloat | None = None
    """The upper side; by default train.epsilon, e.g. 0.28 in DAPO."""
    temperature: PositiveFloat = 1.0
    """Of grpo: the temperature that the completions were sampled with."""
    max_completion_length: Positive | None = None
    """Of loss_type=dr_grpo: the most tokens that a completion could have had."""
    epochs: Positive = 1
    """Passes over the training records; train.steps overrules it."""
    steps: Positive | None = None
    """Optimizer steps."""
    patience: Positive | None = None
    """End the run after so many evaluations in a row without a lower held-out loss; by default it takes all its steps.
    Needs evaluate.every and held-out data."""
    global_batch_size: Size = 16
    """Pairs (rows, where records are no pairs) of one optimizer step, over all ranks."""
    learning_rate: PositiveFloat = 5e-5
    """Peak learning rate."""
    loraplus_lr_ratio: PositiveFloat | None = None
    """LoRA+: the learning rate of the adapters' B over that of all else, e.g. 16."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_steps: Natural = 0
    """Steps over which the learning rate rises from zero."""
    final_learning_rate: NonNegative = 0.0
    """Learning rate at the last step (linear, cosine)."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """What the learning rates are multiplied by where train.global_batch_size is another than the one that they were
    chosen for."""
    learning_rate_batch_size: Positive | None = None
    """The global batch that the learning rates were chosen for; a plan never changes the batch, so only you do. Where a
    word on the command line does: the file's."""
    optimizer: Literal[
        "adamw", "adam", "sgd", "adafactor", "lion", "muon", "rmsprop", "adagrad", "adamax", "adadelta", "adamw_8bit"
    ] = "adamw"
    """Optimizer of MLX, by name; `adamw_8bit` keeps its two moments in 8 bits a number."""
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer, e.g. {betas: [0.9, 0.95]}."""
    neftune_noise_alpha: PositiveFloat | None = None
    """NEFTune: noise of this size on the embeddings of training sequences, e.g. 5."""
    weight_decay: NonNegative = 0.0
    """Weight decay, for the optimizers that know it."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the gradient's global norm to this; null for never."""
    seed: Natural = 0
    """Decides everything random: adapters, data order, dropout, sampling."""
    max_skipped_steps: Natural = 5
    """Non-finite updates in a row that are skipped before the run stops."""
    compile: bool | None = None
    """Compile the step. By default on a GPU; of a sharded model only where NCCL connects equal parts."""
    max_traces: Positive = 16
    """Of a compiled step: most shapes of its micro-batches. Each is traced once, about a second for 16 blocks; fewer
    cost more padding."""

    @property
    def record_kind(self) -> Literal["preference", "unpaired", "sft", "group"]:
        """What a record of the data is."""
        if self.loss == "sft":
            return "sft"
        if self.loss in get_args(GroupLoss):
            return "group"
        return "unpaired" if self.loss in get_args(UnpairedLoss) else "preference"

    @property
    def loss_terms(self) -> tuple[tuple[str, float], ...]:
        """The losses that are added up, often one, with their weights."""
        if isinstance(self.loss, str):
            return ((self.loss, 1.0),)
        return tuple(zip(self.loss, self.loss_weights or (1.0,) * len(self.loss), strict=True))

    @property
    def loss_name(self) -> str:
        """The loss as a person reads it."""
        return " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in self.loss_terms)

    @model_validator(mode="after")
    def _settings_agree(self) -> TrainSettings:
        if self.learning_rate_scaling != "none" and self.learning_rate_batch_size is None:
            raise ValueError(
                f"train.learning_rate_scaling={self.learning_rate_scaling} needs train.learning_rate_batch_size, "
                "the global batch that the learning rate was chosen for"
            )
        self._sum_is_possible()
        self._groups_are_possible()
        terms = [name for name, _ in self.loss_terms]
        if self.label_smoothing and not {"sigmoid", "robust"} & {*terms}:
            raise ValueError(
                f"train.label_smoothing is for the losses sigmoid and robust, not {self.loss_name}; leave it at 0"
            )
        if self.rpo_alpha and (self.record_kind != "preference" or "sft" in terms):
            raise ValueError(
                f"train.rpo_alpha adds an SFT term to a preference loss, but train.loss is {self.loss_name}; "
                "leave it at 0"
            )
        if self.use_weighting and self.record_kind != "preference":
            raise ValueError(f"train.use_weighting is for losses of pairs, not {self.loss_name}; leave it out")
        if self.reference_mixup_alpha is not None and self.reference_sync_steps is None:
            raise ValueError("train.reference_mixup_alpha needs train.reference_sync_steps, e.g. 512")
        if self.reference_sync_steps is not None and not set(terms) - REFERENCE_FREE_LOSSES - {"sft"}:
            raise ValueError(
                f"train.reference_sync_steps moves the reference, and the loss {self.loss_name} has none; leave it out"
            )
        if self.record_kind != "unpaired" and (self.desirable_weight, self.undesirable_weight) != (1, 1):
            raise ValueError(
                "train.desirable_weight and train.undesirable_weight are for the losses kto and bco, "
                f"not {self.loss_name}; leave them at 1"
            )
        return self

    def _groups_are_possible(self) -> None:
        if self.record_kind != "group":
            if self.beta == 0:
                raise ValueError(f"train.beta=0 is for grpo alone, not {self.loss_name}; give a number above 0")
            of_groups = ("loss_type", "advantages", "ratio", "epsilon", "epsilon_high", "temperature")
            for name in (*of_groups, "max_completion_length"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"train.{name} is for train.loss=grpo, not {self.loss_name}; leave it out")
            return
        if self.beta == 0 and self.reference_sync_steps is not None:
            raise ValueError("train.reference_sync_steps moves the reference, and train.beta=0 asks for none")
        if (self.loss_type == "dr_grpo") != (self.max_completion_length is not None):
            raise ValueError(
                "train.loss_type=dr_grpo and train.max_completion_length belong together: "
                "it divides by the most tokens that a completion could have had, e.g. 256; give both or neither"
            )

    def _sum_is_possible(self) -> None:
        if isinstance(self.loss, str):
            if self.loss_weights is not None:
                raise ValueError(
                    f"train.loss_weights weigh a sum of losses, e.g. train.loss=[{self.loss},sft], "
                    f"and train.loss is {self.loss} alone; leave them out"
                )
            return
        shown = f"train.loss=[{','.join(self.loss)}]"
        if not set(self.loss) - {"sft"}:
            raise ValueError(f"{shown} has no preference loss; SFT alone is train.loss=sft")
        if len(set(self.loss)) < len(self.loss):
            raise ValueError(f"{shown} has a loss twice; train.loss_weights weighs each")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss):
            raise ValueError(
                f"train.loss_weights has {len(self.loss_weights)} numbers, {shown} {len(self.loss)} losses; "
                "give one each"
            )
