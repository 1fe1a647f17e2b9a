"""Every setting of Tandem, once: its name, type, default, limits and meaning, in one frozen tree."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator


def _no_truth_value(value: Any) -> Any:
    """Python takes true for 1, and YAML reads `yes` and `on` as true."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("should be letters, digits, dots, - and _, and begin with a letter or digit")
    return value


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"no regular expression: {error}") from None
    return pattern


Integer = Annotated[int, BeforeValidator(_no_truth_value)]
Float = Annotated[float, BeforeValidator(_no_truth_value)]
# Nothing that is counted comes near these limits; beyond them libraries overflow, or memory ends.
Positive = Annotated[Integer, Field(gt=0, lt=2**53)]
Natural = Annotated[Integer, Field(ge=0, lt=2**53)]
Size = Annotated[Integer, Field(gt=0, le=2**20)]  # of a batch, or of an array's side
Fraction = Annotated[Float, Field(ge=0, le=1)]
NonNegative = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[Float, Field(gt=0, le=1e8)]  # three years: no clock overflows
Pattern = Annotated[str, AfterValidator(_compiles)]  # a regular expression
Gigabytes = Annotated[Float, Field(gt=0, le=1e6)]


class Section(BaseModel):
    """Settings that belong together: frozen, without unknown names, each with its meaning behind it."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


# ---- The run, the model and the data ----


class RunSettings(Section):
    """Where a run keeps its files."""

    dir: str = "runs"
    """Folder that holds all runs."""
    name: Annotated[str, AfterValidator(_name)] | None = None
    """The run's folder inside run.dir; by default the configuration's name and the time."""
    pages: bool = True
    """Leave curves.png, report.html and a model card in the run's folder (lib.dashboard --export RUN does later)."""
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where rank 0's figures go besides the run's own logs, e.g. [tensorboard]; each needs its package."""


class ModelSettings(Section):
    """What is trained, and what it is compared with."""

    path: str
    """Local folder or hub name of the model, as mlx-lm loads it; quantised models give QLoRA."""
    reference: str = "initial"
    """Reference policy: `initial` (the policy as training starts), or another model's path."""
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
    rank_pattern: dict[Pattern, Size] = Field(default_factory=dict)
    """Ranks of layers whose names end as a regular expression says, e.g. {o_proj: 16, "layers.[0-3].mlp.*": 4}."""
    alpha_pattern: dict[Pattern, PositiveFloat] = Field(default_factory=dict)
    """The same of model.alpha."""
    dropout: Annotated[Fraction, Field(lt=1)] = 0.0
    """Dropout on the adapter's input."""
    keys: tuple[str, ...] | None = None
    """Linear layers that get adapters, e.g. [self_attn.q_proj]; by default all of the blocks but routers."""
    adapt_embeddings: bool = False
    """Give the embedding and the head adapters as well; of tied ones, one for both. For method=lora."""
    blocks: Positive | tuple[int | str, ...] | None = None
    """Train only the last n blocks, or those of a list that counts from 0, e.g. [0-3, 28-31]; by default all."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights; by default as stored, on CPUs with enough memory float32. What is trained is float32."""
    gradient_checkpointing: bool | None = None
    """Recompute each block in the backward pass: less memory, a third more time. Default: where a pair needs it."""
    shard_vocabulary: bool = False
    """With strategy=sharded: divide the embedding and the head as well; no rank then holds all logits."""
    attention_window: Positive | None = None
    """Tokens that each token attends to, itself included; by default all before it. mlx-lm itself does not know it."""
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
            first, _, last = str(part).partition("-")
            if not re.fullmatch(r"\d{1,4}(-\d{1,4})?", str(part)) or int(last or first) < int(first):
                raise ValueError(f"{part!r} is neither a block's number, from 0 on, nor a range like 4-7")
        if not parts:
            raise ValueError("[] trains nothing; leave it out for all blocks")
        return parts

    def __hash__(self) -> int:  # which mappings have none of
        return hash(self.model_dump_json())

    @property
    def may_turn_on_checkpointing(self) -> bool:
        """Whether a plan may turn gradient checkpointing on: with dropout it is refused."""
        return self.gradient_checkpointing is None and not self.dropout


Column = Literal["prompt", "chosen", "rejected", "completion", "messages", "text", "label", "system", "tools"]


class DataSettings(Section):
    """The records, their columns, and how they become tokens."""

    train: str | dict[str, PositiveFloat]
    """Training records: a file (.jsonl, .csv, .parquet ...), a folder or glob, or hf://OWNER/NAME?split=train; or
    several with weights, {a.jsonl: 2, b.jsonl: 0.5}: how often an epoch takes each row."""
    valid: str | None = None
    """Held-out records: a file, a folder or glob, or hf://OWNER/NAME?split=validation."""
    holdout: Annotated[Fraction, Field(le=0.5)] = 0.0
    """Part of data.train that is held out in the place of data.valid, by a hash of the prompt."""
    deduplicate: bool = False
    """Take records of the same prompt and completions once."""
    shortest: Natural = 0
    """Leave out rows whose longest sequence has fewer tokens, prompt included."""
    longest: Positive | None = None
    """Leave out rows whose longest sequence has more tokens; by default they are cut to data.max_length."""
    streaming: bool | None = None
    """Read and tokenise rows when their turn comes, with estimated lengths; by default from 64 MB on."""
    cache_dir: str = "runs/.data"
    """Folder for indices, unpacked files and tokens of the data. It may become as large as the data."""
    max_length: Annotated[Natural, Field(ge=2, le=2**24)] = 1024
    """Most tokens of a row; longer chats lose middle messages, other rows their prompt's beginning."""
    skip_invalid: bool = False
    """Leave out unusable rows, counted and named, instead of refusing the file."""
    chat_template: Annotated[bool | str, Field(union_mode="left_to_right")] = True
    """Use the tokenizer's chat template where it has one; or that of a file, e.g. template.jinja."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, e.g. {enable_thinking: true} (by default where an answer thinks)."""
    template_date: datetime.date = datetime.date(2024, 7, 26)
    """The day that chat templates which write one are given, so that a run makes the same tokens tomorrow."""
    columns: dict[Column, str] = Field(default_factory=dict)
    """Names of columns that are called otherwise, e.g. {prompt: question, completion: answer}; as they are called here:
    prompt, chosen, rejected, completion, messages, text, label, system, tools."""
    learn: Literal["last", "assistant", "all"] = "last"
    """What SFT learns of a conversation, unless messages have weights: the assistant's last one, all its, or all."""
    ignore: tuple[str, ...] = ()
    """Columns, and fields of messages, to leave out: one with content that nothing reads stops the run otherwise."""
    length_multiple: Size | None = None
    """Lengths the model sees are padded to a multiple of this; by default 64 on a GPU and 16 on a CPU."""
    shared_prompts: bool = True
    """Run a prompt once for all its completions, and no padding, where the model's family allows it exactly."""

    def column(self, name: Column) -> str:
        """What a column is called in the records."""
        return self.columns.get(name, name)


# ---- Training and rounds ----

ReferenceLoss = Literal["sigmoid", "sigmoid_norm", "robust", "ipo", "hinge", "dpop", "sppo", "apo_zero", "apo_down"]
ReferenceFreeLoss = Literal["simpo", "orpo", "cpo"]
PreferenceLoss = Literal[ReferenceLoss, "bco_pair", ReferenceFreeLoss]
UnpairedLoss = Literal["kto", "bco"]
REFERENCE_FREE_LOSSES: frozenset[str] = frozenset(get_args(ReferenceFreeLoss))
LossTerm = Literal[PreferenceLoss, "sft"]  # of a sum of losses
Loss = Literal["sft", PreferenceLoss, UnpairedLoss, "grpo"] | tuple[LossTerm, ...]


class TrainSettings(Section):
    """The optimisation."""

    loss: Loss = "sigmoid"
    """`sft`, a preference loss, `kto` or `bco` for labelled completions, `grpo` for scored groups of a policy's own, or
    a sum of preference losses and sft, e.g. [sigmoid, bco_pair, sft]; docs/options.md has each one's paper."""
    loss_weights: tuple[PositiveFloat, ...] | None = None
    """Weights of a sum of losses, e.g. [0.8, 0.2, 1.0]; by default 1 each."""
    use_weighting: bool = False
    """Weight each pair by how likely the policy itself is to write it (WPO); held-out losses are not weighted."""
    reference_sync_steps: Positive | None = None
    """TR-DPO: every so many steps the reference follows the policy; by default it never moves."""
    reference_mixup_alpha: Annotated[Fraction, Field(gt=0)] | None = None
    """How far it goes: alpha policy + (1 - alpha) reference. By default 0.6 with model.method=full, 1 of adapters."""
    beta: NonNegative = 0.1
    """Strength of the preference (DPO's beta; orpo's weight of the odds; grpo's of the divergence, 0: no reference)."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable completions in kto and bco. Rows times weight should be about equal for both labels."""
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
    """What grpo divides the loss by: a completion's length (grpo, the default), train.max_completion_length (dr_grpo),
    or the tokens of the step (bnpo, dapo)."""
    advantages: Literal["standardized", "batch_standardized", "centered", "leave_one_out"] = "standardized"
    """A completion's reward in grpo: less its group's mean, over their deviation (standardized), over that of all
    groups (batch_standardized), or as it is (centered, Dr. GRPO); less the mean of the others (leave_one_out, RLOO)."""
    ratio: Literal["token", "geometric_mean", "completion"] = "token"
    """What grpo compares with the sampling policy and clips: each token, the geometric mean of a completion's tokens
    (GSPO), or the completion as a whole (RLOO)."""
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
    """End the run after so many evaluations in a row without a better figure (checkpoint.best_by); by default never."""
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
    """Scale the learning rates where train.global_batch_size is another than the one that they were chosen for."""
    learning_rate_batch_size: Positive | None = None
    """The global batch that the learning rates were chosen for; the file's, where a word changes it."""
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
    """Of a compiled step: most shapes of its micro-batches, each traced once; fewer cost more padding."""

    @property
    def record_kind(self) -> Literal["preference", "unpaired", "sft", "group"]:
        """What a record of the data is."""
        if self.loss in get_args(UnpairedLoss):
            return "unpaired"
        return "sft" if self.loss == "sft" else "group" if self.loss == "grpo" else "preference"

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


REWARD_MODEL = "reward:"  # a judge that computes where the model does


class EvaluateSettings(Section):
    """Held-out evaluation."""

    every: Positive | None = None
    """Steps between evaluations; by default only at the start and the end."""
    batch_size: Size = 16
    """Pairs per forward pass, here and in the reference pass; requests to a judge's server at a time."""
    answers: str | None = None
    """Records with a `prompt` and an `answer`: greedy generations are scored by exact match."""
    answer_pattern: Pattern = r"([^\s].*?)\s*$"
    """Regular expression; its last match's first group in the generated text is compared with the answer."""
    answers_limit: Positive = 512
    """Most answers checked."""
    samples: Natural = 3
    """Held-out prompts whose greedy continuation is shown."""
    max_tokens: Size = 128
    """Longest generation."""
    judge: str | None = None
    """Who scores completions: `exact` or `number` compare with the record's `answer`, `regex` and `json_schema` take it
    as a pattern or JSON to fit, reward:PATH is a local reward model, MODULE:FUNCTION is called with (prompt,
    completions, record), an http(s) address is an OpenAI-compatible server, anything else a command that reads
    {"prompt", "completions", "record"} a line and writes a list of scores. Default: evaluate.answer_pattern."""
    judge_seconds: Seconds = 10.0
    """Most seconds for one prompt's completions of `regex`, `json_schema` and, in rounds, of MODULE:FUNCTION."""
    judge_model: str | None = None
    """Model of that server; its key is OPENAI_API_KEY of the environment."""
    judge_prompt: str | None = None
    """File with that model's instructions: {prompt}, {first} and {second}, for [[A]], [[B]] or [[C]] (equal); in
    rounds, for --make-pairs and reward:PATH {prompt} and {answer}, for a number, as [[7]], or Yes or No."""


class RolloutSettings(Section):
    """Rounds, in which the model answers prompts, a judge scores the answers, and what was better is preferred."""

    rounds: Natural = 0
    """Rounds of the run, for which data.train holds prompts, and what the judge needs; 0: data.train is trained on."""
    prompts: Positive = 256
    """Prompts of one round: each round takes others, until all had their turn."""
    samples: Annotated[Size, Field(ge=2, le=1024)] = 8
    """Answers to each prompt; those of lib.evaluate's --score=samples and --make-pairs, too."""
    steps: Positive | None = None
    """Optimizer steps of one round; by default one for each train.global_batch_size prompts."""
    temperature: PositiveFloat = 1.0
    """Temperature that answers are drawn at."""
    top_p: Annotated[Fraction, Field(gt=0)] = 1.0
    """Draw among the likeliest tokens that have this probability together."""
    max_tokens: Size = 256
    """Longest answer, in tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, e.g. ["\\n\\n"], besides the model's end tokens."""
    batch_size: Size = 64
    """Answers that a rank draws at a time."""
    judge: str | None = None
    """Who scores the answers, as evaluate.judge says; by default evaluate.judge, which scores the held-out ones."""
    margin: NonNegative = 0.0
    """All answers to a prompt make pairs whose scores differ by this or more; 0: its best and its worst one do."""
    filter_groups: bool = False
    """Of grpo: leave out prompts whose answers all have the same score, and so no advantage (DAPO)."""
    mask_truncated: bool = False
    """Learn nothing from answers that rollouts.max_tokens cut; in a group of grpo their scores count."""
    reference_every: Positive | None = None
    """Rounds after which the reference becomes the policy; by default it stays what it was before training."""
    tolerance: NonNegative | None = 0.05
    """A round is undone after which the exact match of evaluate.answers, or the mean score of the held-out prompts, is
    lower than the best so far by more than this; null for never."""


# ---- Machines ----


class PlanSettings(Section):
    """How a step's work is divided among the ranks."""

    shares: tuple[Natural, ...] | None = None
    """Pairs per rank and step, e.g. [6, 2]. Default: from the calibration, else equal. With strategy=sharded: each
    rank's weight in the division of the model; with pipelined: each rank's blocks."""
    micro_batch_sizes: tuple[Size, ...] | None = None
    """Pairs per forward pass, one number a rank. Default: from the calibration, else at most 8."""
    memory_limit_gb: Gigabytes | dict[str, Gigabytes] | None = None
    """What MLX may hold in each rank's process, for all or by host, e.g. {m4-max: 96}. Default: the machine's limit."""
    calibration_dir: str = "calibration"
    """Folder of HOST.json, as `make calibrate` writes it; HOST-0.json, ... where several ranks share a host."""
    require_calibration: bool = False
    """Refuse to start without a calibration of this model on every host."""
    replan: bool = True
    """Plan again from measured times while running, and merge independent ranks as often as they allow. For the same
    bits run by run, turn this off, or set plan.shares."""


class CostSettings(Section):
    """What training costs, in any one currency."""

    watts: NonNegative | dict[str, NonNegative] = 0.0
    """Power that a host draws while training, for all or by host, e.g. {m4-max: 120, m3-ultra: 240}."""
    price_per_kwh: NonNegative = 0.0
    """Electricity."""
    rent_per_hour: NonNegative | dict[str, NonNegative] = 0.0
    """Rent of a host: one number for all, or by host."""


class SyncSettings(Section):
    """How ranks talk."""

    timeout_seconds: Seconds = 600.0
    """A rank that waits longer than this for the others ends with a message."""
    compression: Literal["none", "bf16", "int8", "topk"] = "none"
    """How gradients (synchronous), a round's changes (independent) or activations (pipelined) travel; what int8 and
    topk leave out is sent later, except of activations."""
    topk_fraction: Annotated[Fraction, Field(gt=0)] = 0.01
    """Part of the values that topk sends, the largest ones; each costs 8 bytes."""


class IndependentSettings(Section):
    """Ranks that train independently, each at its own pace, and are merged at the end of every round."""

    pairs_per_round: Positive | None = None
    """Pairs of a round over all ranks. Default: merges that cost 1 % of the time, but at least eight a run."""
    merge: Literal["stack", "svd", "average", "outer", "none"] | None = None
    """How adapters become one: `stack` (exact, of all ranks added up; svd before the last round), `svd` (the best of
    the same rank), `average` (the default without pairs_per_round), `outer` (DiLoCo), `none` (each keeps its own)."""
    outer_learning_rate: PositiveFloat = 0.5
    """Of `outer`: how much of the averaged change is taken. All changes together count rate / (1 - momentum) times."""
    outer_momentum: Annotated[Fraction, Field(lt=1)] = 0.5
    """Of `outer`: Nesterov momentum over the rounds."""


class CheckpointSettings(Section):
    """What is kept on disk while a run goes on."""

    every: Positive | None = None
    """Steps between checkpoints; by default they come every 30 s, or as often as takes a twentieth of the time."""
    keep: Positive = 3
    """The newest checkpoints that are kept; the best one is kept as well."""
    final: Literal["best", "last"] = "best"
    """What the run's folder holds at the end: the weights of the best evaluation, or the last ones."""
    best_by: Literal["exact_match", "loss"] | None = None
    """Which figure says what is best: exact_match (the default with evaluate.answers), or the held-out loss."""


class MetalSettings(Section):
    """What is particular to Macs; elsewhere nothing here has an effect."""

    display: Literal["advise", "sleep", "ignore"] = "advise"
    """A display that is on, for whose sake macOS may end GPU work (mlx#3267): say so, put it to sleep, or leave it."""


class ServeSettings(Section):
    """A finished run behind an OpenAI-compatible server, `make serve`."""

    host: str = "127.0.0.1"
    """Address that the server listens on; any but a loopback address needs serve.keys."""
    port: Annotated[Natural, Field(le=65535)] = 8080
    """Port of the server; 0 takes a free one."""
    name: Annotated[str, AfterValidator(lambda value: "/".join(map(_name, value.split("/"))))] | None = None
    """What clients call the model; by default the run's name. No other name is served."""
    keys: str | None = None
    """File of API keys, as `python -m lib.server --make-key NAME` adds them: hashes only. Changes count at once."""
    fuse: bool = False
    """Serve the model with the adapter fused into it, in memory: faster. For plain weights."""
    concurrency: Positive = 32
    """Requests that are decoded at once; more wait."""
    max_requests_per_key: Positive = 64
    """Requests of one key in flight and waiting; more are refused (429)."""
    max_prompt_tokens: Positive = 8192
    """Longest prompt, in tokens as the model sees them: through its chat template, with its tools."""
    max_tokens: Positive = 2048
    """Longest completion, and what a request gets that names no limit."""
    request_seconds: Seconds = 600.0
    """Longest time from a request to the end of its answer."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may call from a browser, e.g. [https://chat.example.org]; by default none."""
    feedback: str | None = None
    """File that gets a line for every completion that a client labels (POST /v1/feedback), for train.loss=kto."""


# ---- The whole ----


class Config(Section):
    """Tandem's settings."""

    run: RunSettings = RunSettings()
    model: ModelSettings = Field(default_factory=dict)  # type: ignore[assignment]  # lacks model.path
    data: DataSettings = Field(default_factory=dict)  # type: ignore[assignment]
    train: TrainSettings = TrainSettings()
    rollouts: RolloutSettings = RolloutSettings()
    strategy: Literal["auto", "independent", "synchronous", "sharded", "pipelined"] = "auto"
    """How the machines work together: `synchronous` sums every step's gradients, `independent` merges what each
    trained, `sharded` gives each a part of every block, `pipelined` some blocks; `auto`: the faster of these two where
    the model does not fit every host, else independent."""
    plan: PlanSettings = PlanSettings()
    cost: CostSettings = CostSettings()
    sync: SyncSettings = SyncSettings()
    independent: IndependentSettings = IndependentSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    metal: MetalSettings = MetalSettings()
    serve: ServeSettings = ServeSettings()

    @model_validator(mode="after")
    def _go_together(self) -> Config:
        if (conflict := first_conflict(self)) is not None:
            raise ValueError(conflict)
        return self

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


# ---- Settings that do not go together ----

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
