"""What to type instead of a name from TRL, transformers, mlx-lm, axolotl or torchrun: the end of the error message.

Nothing here is accepted as a setting: each has one name, in lib/config/settings.py. Pure functions; the existing names
are passed in.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

# A foreign name ➜ the word to type here, with {} for its value, and what differs. No word: there is nothing to set.
_RENAMED: dict[str, tuple[str, str]] = {
    "train.global_batch_size={}": (
        "batch_size total_batch_size train_batch_size global_batch",
        "the pairs of one step, over all ranks",
    ),
    "plan.micro_batch_sizes=[{}]": (
        "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size micro_batch_size",
        "the pairs of one forward pass, a number for each rank; train.global_batch_size is those of a step",
    ),
    "evaluate.batch_size={}": ("per_device_eval_batch_size eval_batch_size val_batch_size", ""),
    "train.learning_rate={}": ("lr base_lr max_lr peak_lr", ""),
    "train.final_learning_rate={}": ("min_lr lr_end end_lr", ""),
    "train.schedule={}": ("lr_scheduler_type lr_scheduler lr_schedule scheduler", "constant, linear or cosine"),
    "train.warmup_steps={}": ("warmup num_warmup_steps warm_up_steps", ""),
    "train.warmup_steps=...": (
        "warmup_ratio warmup_fraction",
        "in steps: the ratio times the steps that --dry-run shows",
    ),
    "train.epochs={}": ("num_train_epochs num_epochs n_epochs max_epochs", ""),
    "train.steps={}": ("iters max_steps num_steps max_iters total_steps num_train_steps", ""),
    "train.loss={}": (
        "loss_type loss_fn dpo_loss_type train_mode rl algorithm",
        "sigmoid is DPO; sft, ipo, simpo, ...; a sum is [sigmoid,sft]",
    ),
    "train.use_weighting={}": ("wpo use_wpo", ""),
    "train.reference_sync_steps={}": ("ref_model_sync_steps", "TR-DPO; train.reference_mixup_alpha beside it"),
    "train.reference_sync_steps=512": ("sync_ref_model tr_dpo", "TR-DPO; train.reference_mixup_alpha beside it"),
    "train.reference_mixup_alpha={}": ("ref_model_mixup_alpha", ""),
    "train.loraplus_lr_ratio={}": ("lora_plus_lr_ratio loraplus_ratio loraplus lora_plus", "LoRA+"),
    "train.neftune_noise_alpha={}": ("neftune neftune_alpha noise_alpha", "NEFTune"),
    "train.beta={}": ("dpo_beta pref_beta kl_coef", ""),
    "train.advantages={}": ("scale_rewards advantage_estimator adv_estimator", "of grpo: standardized, centered, ..."),
    "train.epsilon={}": ("clip_range cliprange clip_eps clip_epsilon epsilon_low", "of grpo"),
    "train.epsilon_high={}": ("clip_range_high clip_eps_high clip_ratio_high", "of grpo"),
    "rollouts.samples={}": ("num_generations group_size rollout_n num_return_sequences", "answers to each prompt"),
    "train.label_smoothing={}": ("label_smoothing_factor cdpo_label_smoothing", ""),
    "train.rpo_alpha={}": ("rpo sft_weight pref_ftx", ""),
    "train.simpo_gamma={}": ("gamma simpo_margin", ""),
    "train.optimizer={}": ("optim optimizer_name", "adamw, adam, sgd, ..."),
    "train.optimizer_options={{betas: [...]}}": ("adam_beta1 adam_beta2 adam_epsilon optim_args optimizer_config", ""),
    "train.max_grad_norm={}": ("clip_grad gradient_clip_val grad_clip gradient_clipping max_norm", ""),
    "train.seed={}": ("random_seed data_seed", ""),
    "train.compile={}": ("torch_compile", ""),
    "model.path={}": (
        "model model_name_or_path base_model model_name model_id model_path pretrained_model pretrained",
        "a folder or a hub name",
    ),
    "model.reference={}": ("ref_model reference_model ref_model_path reference_model_path ref_model_name_or_path", ""),
    "model.adapter={}": (
        "resume_adapter_file adapter_file lora_model_dir peft_model",
        "a folder with an adapter: mlx-lm's, or PEFT's",
    ),
    "model.method={}": ("fine_tune_type finetuning_type train_type", "lora, dora or full"),
    "model.method=lora": ("use_peft use_lora lora peft", "which is the default"),
    "model.method=dora": ("use_dora peft_use_dora lora_use_dora", ""),
    "model.rank={}": ("lora_r lora_rank r adapter_rank", ""),
    "model.scale={}": ("lora_scale lora_scaling", "alpha / rank"),
    "model.alpha={}": ("lora_alpha", "the factor is alpha / rank; model.scale is that factor itself"),
    "model.use_rslora={}": ("rslora rs_lora lora_use_rslora", "with model.alpha"),
    "model.rank_pattern={}": ("lora_rank_pattern", ""),
    "model.alpha_pattern={}": ("lora_alpha_pattern", ""),
    "model.adapt_embeddings=true": (
        "modules_to_save lora_modules_to_save additional_target train_embeddings embedding_lr embedding_learning_rate",
        "adapters on the embedding and the head",
    ),
    "model.dropout={}": ("lora_dropout", ""),
    "model.blocks={}": ("lora_layers num_layers num_lora_layers", "the last n blocks; by default all"),
    "model.blocks=[...]": ("layers_to_transform lora_layers_to_transform", "e.g. [0-3, 28-31]"),
    "model.keys={}": ("lora_target_modules target_modules lora_modules lora_keys", "e.g. [self_attn.q_proj]"),
    "model.dtype=bfloat16": ("bf16", ""),
    "model.dtype=float16": ("fp16 half", ""),
    "model.dtype={}": ("torch_dtype precision mixed_precision", "float32, bfloat16 or float16"),
    "model.gradient_checkpointing=true": ("grad_checkpoint activation_checkpointing use_gradient_checkpointing", ""),
    "model.revision={}": ("model_revision", ""),
    "model.path=...": (
        "load_in_4bit load_in_8bit quantize q_bits quantization",
        "of a quantised model; python -m mlx_lm convert -q makes one",
    ),
    "data.train={}": (
        "data dataset dataset_name dataset_path train_file train_data train_dataset datasets data_path train_path",
        "a file, a folder or hf://OWNER/NAME",
    ),
    "data.valid={}": (
        "eval_dataset validation_file valid_file val_data eval_data validation valid_dataset test_datasets val_file",
        "",
    ),
    "data.holdout={}": ("val_set_size eval_split validation_split test_size val_split", ""),
    "data.max_length={}": (
        "max_seq_length max_seq_len sequence_len seq_len seq_length cutoff_len block_size max_prompt_length "
        "model_max_length",
        "tokens of prompt and completion together",
    ),
    "data.prompt={}": ("prompt_column prompt_feature prompt_field", ""),
    "data.chosen={}": ("chosen_column chosen_feature", ""),
    "data.rejected={}": ("rejected_column rejected_feature", ""),
    "data.text={}": ("dataset_text_field text_field text_feature", ""),
    "run.dir={}": (
        "output_dir out_dir save_dir checkpoint_dir logging_dir",
        "the folder of all runs; run.name is one's own",
    ),
    "run.name={}": ("run_name exp_name experiment_name adapter_path save_path", "a folder inside run.dir"),
    "run.log_every={}": ("logging_steps log_interval log_steps steps_per_report log_freq", ""),
    "run.sinks=[wandb]": ("wandb use_wandb wandb_project with_tracking", ""),
    "run.sinks=[{}]": ("report_to log_with tracker", "tensorboard, trackio, wandb"),
    "checkpoint.every={}": ("save_steps save_every save_interval checkpoint_steps saves_per_epoch save_freq", ""),
    "checkpoint.keep={}": ("save_total_limit max_checkpoints", ""),
    "train.patience={}": ("early_stopping_patience early_stopping early_stop", "evaluations in a row"),
    "checkpoint.final=best": (
        "load_best_model_at_end load_best metric_for_best_model",
        "by held-out loss; the default",
    ),
    "rollouts.top_p={}": ("top_p", ""),
    "rollouts.judge={}": ("reward_funcs reward_model", "number, regex, MODULE:FUNCTION, reward:PATH, ..."),
    "evaluate.every={}": ("eval_steps steps_per_eval eval_interval eval_every val_interval evals_per_epoch", ""),
    "evaluate.max_tokens={}": ("max_new_tokens max_completion_length", ""),
    "--resume RUN": ("resume_from_checkpoint resume_from load_checkpoint auto_resume", "the run's folder"),
    "strategy=sharded": ("fsdp deepspeed tensor_parallel tp_size tensor_parallel_size", "where the model fits no host"),
}
_NOTHING: dict[str, str] = {
    "gradient_accumulation_steps grad_accumulation_steps gradient_accumulation accumulate_grad_batches": (
        "it follows from train.global_batch_size and each rank's plan.micro_batch_sizes"
    ),
    "nproc_per_node num_processes num_machines world_size nnodes gpus devices num_gpus nodes": (
        "how many ranks there are is the launcher's: ./launch --hosts mac-a:1,mac-b:1, or mpirun -n 2"
    ),
    "device device_map use_mps mps cpu cuda": (
        "MLX computes on the device that it was installed for: make setup EXTRA=cuda"
    ),
    "precompute_ref_log_probs reference_free": (
        "the reference is computed once and kept, where it pays; simpo, orpo and cpo need none"
    ),
    "dataloader_num_workers remove_unused_columns group_by_length packing num_workers padding_side": (
        "rows are sorted by length and read ahead without it"
    ),
}


# Values that other trainers call otherwise.
_VALUES: dict[str, dict[str, str]] = {
    "train.loss": {
        "dpo": "DPO is sigmoid",
        "cdpo": "cDPO is sigmoid with train.label_smoothing",
        "rdpo": "robust",
        "sppo_hard": "sppo",
        "wpo": "WPO is sigmoid with train.use_weighting=true",
        "mpo": "MPO is train.loss=[sigmoid,bco_pair,sft] train.loss_weights=[0.8,0.2,1.0]",
        "bco": "in a sum, bco_pair",
        "dr_grpo": "Dr. GRPO is grpo with train.loss_type=dr_grpo and train.advantages=centered",
        "dapo": "DAPO is grpo with train.loss_type=dapo and train.epsilon_high=0.28",
        "rloo": "RLOO is grpo with train.advantages=leave_one_out",
    },
    "train.loss_type": {
        name: f"the loss itself is train.loss={name}"
        for name in ("sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down", "bco_pair", "sft", "kto", "simpo")
    },
    "model.dtype": {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
    "model.method": {
        "qlora": "QLoRA is lora with a quantised model.path",
        "sft": "SFT is train.loss=sft",
        "dpo": "DPO is train.loss=sigmoid",
    },
    "strategy": {"ddp": "synchronous", "dp": "synchronous", "fsdp": "sharded", "tp": "sharded", "deepspeed": "sharded"},
    "train.schedule": {"cosine_with_min_lr": "cosine, with train.final_learning_rate", "none": "constant"},
    "train.optimizer": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "paged_adamw_8bit": "adamw_8bit",
        "adam8bit": "adamw_8bit",
        "adamw8bit": "adamw_8bit",
        "adam_8bit": "adamw_8bit",
    },
}
# Settings of earlier versions, and what to do instead.
REMOVED: dict[str, str] = {
    "data.spool_limit_gb": "take fewer rows with hf://OWNER/NAME?rows=N",
    "checkpoint.max_lost_seconds": "take checkpoint.seconds",
    "serve.tls_certificate": "nginx does this: python -m lib.server --emit nginx",
    "serve.tls_key": "nginx does this: python -m lib.server --emit nginx",
    "serve.hostfile": "start a server on each host, with nginx in front: python -m lib.server --emit nginx",
    "serve.backends": "start a server on each host, with nginx in front: python -m lib.server --emit nginx",
    "serve.max_connections": "nginx does this: python -m lib.server --emit nginx",
    "serve.max_connections_per_address": "nginx does this: python -m lib.server --emit nginx",
    "serve.write_seconds": "nginx does this: python -m lib.server --emit nginx",
    "serve.idle_seconds": "nginx does this: python -m lib.server --emit nginx",
    "serve.queue_seconds": "serve.request_seconds counts the wait as well",
    "serve.stall_seconds": "serve.request_seconds ends an answer",
    "serve.start_seconds": "the server ends where the model cannot be loaded",
    "serve.feedback_bytes": "10,000 completions are kept for serve.feedback_seconds",
    "serve.feedback_per_minute": "nginx limits requests",
    "serve.feedback_bytes_per_minute": "nginx limits requests",
    "metal.evaluation_seconds": "put displays to sleep (metal.display=sleep), or give plan.micro_batch_sizes",
    "metal.relax_watchdog": "set AGX_RELAX_CDM_CTXSTORE_TIMEOUT=0 in the environment",
}
WORDS = {name: (word, note) for word, (names, note) in _RENAMED.items() for name in names.split()}
NOTHING = {name: note for names, note in _NOTHING.items() for name in names.split()}


def normalised(name: str) -> str:
    """A name as the tables have it: --Batch-Size, train.batch_size ➜ batch_size."""
    return name.lstrip("-").replace("-", "_").rpartition(".")[2].lower()


def of_setting(key: str, known: Sequence[str]) -> str:
    """What follows "unknown setting KEY": the setting that is meant, or those that there are."""
    if key in REMOVED:
        return f", which an earlier version had; {REMOVED[key]}"
    name = normalised(key)
    if name in WORDS:
        word, note = WORDS[name]
        setting = word.partition("=")[0] if "{" in word or "..." in word else word
        return f"; did you mean {setting}?" + (f" ({note})" if note else "")
    if name in NOTHING:
        return f"; leave it out: {NOTHING[name]}"
    section, _, leaf = key.rpartition(".")
    sections = list(dict.fromkeys(k.partition(".")[0] for k in known))
    if not section and (near := difflib.get_close_matches(key, sections, n=1, cutoff=0.75)):
        return f"; did you mean {near[0]}?"
    siblings = {k.rpartition(".")[2]: k for k in known if section and k.startswith(f"{section}.")}
    if close := _closest(key, known, siblings):
        return f"; did you mean {close}?"
    return f"; {section} has {', '.join(siblings)}" if siblings else "; --help lists the settings"


def of_option(option: str, value: str | None, known: Sequence[str], options: Sequence[str]) -> str:
    """What follows an option that does not exist: the word, or the option, that is meant.

    Args:
        option: as typed, e.g. "--batch-size".
        value: what was typed behind it, where that can be a value.
        known: names of the settings that this program takes as key=value; empty where it takes none.
        options: of this program.
    """
    key, shown = option.lstrip("-").replace("-", "_"), "..." if value is None else value
    if close := difflib.get_close_matches(option, options, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    if not known:
        return ""
    name = normalised(option)
    leaves = [k for k in known if k.rpartition(".")[2] == name]
    if key in known or (name not in WORDS and leaves):
        return f"settings are words without dashes: {key if key in known else leaves[0]}={shown}"
    if name in WORDS:
        word, note = WORDS[name]
        word = word.format(shown)
        return f"here it is {word}" + (f" ({note})" if note else "")
    if name in NOTHING:
        return f"leave it out: {NOTHING[name]}"
    close_setting = _closest(key, known, {})
    return f"settings are words without dashes, e.g. {close_setting or 'train.beta'}={shown if close_setting else 0.2}"


def of_value(key: str, value: object) -> str:
    """What follows a value that a setting does not have: what it is called here."""
    meant = _VALUES.get(key, {}).get(str(value).lower())
    return f"; here: {meant}" if meant else ""


def _closest(key: str, known: Sequence[str], siblings: dict[str, str]) -> str | None:
    """The setting whose name is nearest: of the same section, by its initials, or under another section."""
    section, _, leaf = key.rpartition(".")
    leaves = {k.rpartition(".")[2]: k for k in reversed(known)}
    initials = (
        k for k in known if k.startswith(section) and "".join(w[0] for w in k.rpartition(".")[2].split("_")) == leaf
    )
    close = (
        list(initials)
        or [siblings[name] for name in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)]
        or ([leaves[leaf]] if leaf in leaves else [])
        or ([] if siblings else difflib.get_close_matches(key, known, n=1, cutoff=0.6))
        or [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
    )
    return close[0] if close else None
