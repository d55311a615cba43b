"""Which of transformers' TrainingArguments are flags of the trainers: each is read, refused by name, or not offered.

A field that a later version of transformers adds is not offered until it is listed here; a test names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

READ: dict[str, str] = {
    "output_dir": "the run's folder",
    "per_device_train_batch_size": "batches of rows",
    "num_train_epochs": "the run's end",
    "max_steps": "the run's end",
    "learning_rate": "optimizer",
    "lr_scheduler_type": "schedule",
    "lr_scheduler_kwargs": "schedule",
    "warmup_steps": "schedule",
    "optim": "optimizer",
    "weight_decay": "optimizer",
    "adam_beta1": "optimizer",
    "adam_beta2": "optimizer",
    "adam_epsilon": "optimizer",
    "gradient_accumulation_steps": "the training loop",
    "max_grad_norm": "clipping",
    "bf16": "precision",
    "fp16": "precision",
    "tf32": "precision",
    "torch_compile": "accelerate, when it wraps the head",
    "torch_compile_backend": "accelerate, when it wraps the head",
    "torch_compile_mode": "accelerate, when it wraps the head",
    "torch_empty_cache_steps": "the training loop",
    "logging_strategy": "the log",
    "logging_steps": "the log",
    "logging_first_step": "the log",
    "log_level": "the log",
    "log_level_replica": "the log",
    "disable_tqdm": "progress",
    "report_to": "TensorBoard and its like",
    "run_name": "what --report_to names the run",
    "eval_strategy": "when to evaluate",
    "eval_steps": "when to evaluate",
    "eval_delay": "when to evaluate",
    "eval_on_start": "when to evaluate",
    "per_device_eval_batch_size": "evaluation",
    "save_strategy": "checkpoints",
    "save_steps": "checkpoints",
    "save_total_limit": "checkpoints",
    "load_best_model_at_end": "the checkpoint to export",
    "metric_for_best_model": "the checkpoint to export",
    "full_determinism": "random numbers",
    "seed": "random numbers",
    "data_seed": "the order of rows",
    "use_cpu": "the device",
    "dataloader_drop_last": "batches of rows",
    "dataloader_num_workers": "the data loader",
    "dataloader_pin_memory": "the data loader",
    "dataloader_persistent_workers": "the data loader",
    "dataloader_prefetch_factor": "the data loader",
    "dataloader_multiprocessing_context": "the data loader",
    "dataloader_in_order": "the data loader",
    "ddp_find_unused_parameters": "several processes",
    "ddp_bucket_cap_mb": "several processes",
    "ddp_broadcast_buffers": "several processes",
    "ddp_static_graph": "several processes",
    "ddp_backend": "several processes",
    "ddp_timeout": "several processes",
    "deepspeed": "several processes",
    "local_rank": "DeepSpeed's launcher passes it",
}
"""The flags, and what reads them."""

_CHECKPOINTING = (
    "is not for heads, whose losses recompute their logits already; lower --tokens_per_batch, "
    "--per_device_train_batch_size or --anchors instead"
)
_FULL_EVAL = "is not read: a head is evaluated in the precision that it is trained in (--bf16)"
_SHARDS = "is not for heads: --deepspeed shards a head (configs/deepspeed), --shard_target the target"
_COMMAND = "is not read: a trainer always trains, evaluates and exports"
REFUSED: dict[str, str] = {
    "gradient_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing_kwargs": _CHECKPOINTING,
    "activation_checkpointing": _CHECKPOINTING,
    "activation_checkpointing_kwargs": _CHECKPOINTING,
    "resume_from_checkpoint": "is not read: the same command resumes from the newest checkpoint of its --output_dir",
    "save_only_model": "leaves the optimizer out of checkpoints, and a resumed run would begin its schedule again",
    "ignore_data_skip": "would train a resumed run on rows that it has seen; a resumed run goes on where it stopped",
    "auto_find_batch_size": "would change the batch that was asked for; lower --tokens_per_batch or "
    "--per_device_train_batch_size instead",
    "label_smoothing_factor": "is not read: a head's loss has no smoothed labels",
    "neftune_noise_alpha": "adds noise to embeddings that are trained; a head reads those of the frozen target",
    "bf16_full_eval": _FULL_EVAL,
    "fp16_full_eval": _FULL_EVAL,
    "train_sampling_strategy": "is not read: rows come in random order, or by length with --tokens_per_batch",
    "greater_is_better": "is not read: it follows from --metric_for_best_model (of a loss, less is better)",
    "fsdp": _SHARDS,
    "fsdp_config": _SHARDS,
    "accelerator_config": "would decide a second time what flags decide: batches, accumulation and seeds",
    "parallelism_config": _SHARDS,
    "optim_args": "is for optimizers that need other packages",
    "optim_target_modules": "is for optimizers that need other packages",
    "use_liger_kernel": "is for language models; a head's losses are fused already",
    "enable_jit_checkpoint": "is not needed: SIGTERM saves a checkpoint already",
    "push_to_hub": "uploads whole runs; scripts/export.py and `load_head(…).push_to_hub(…)` upload the head",
    "do_train": _COMMAND,
    "do_eval": _COMMAND,
    "do_predict": _COMMAND,
}
"""Known to users of transformers, and of no effect or a harmful one here: the reason is the answer to the flag."""

NOT_OFFERED = {
    *("average_tokens_across_devices", "batch_eval_metrics", "debug", "eval_accumulation_steps"),
    *("eval_do_concat_batches", "eval_use_gather_object", "hub_always_push", "hub_model_id", "hub_private_repo"),
    *("hub_revision", "hub_strategy", "hub_token", "include_for_metrics", "include_num_input_tokens_seen"),
    *("label_names", "length_column_name", "liger_kernel_config", "log_on_each_node", "logging_nan_inf_filter"),
    *("prediction_loss_only", "project", "remove_unused_columns", "restore_callback_states_from_checkpoint"),
    *("save_on_each_node", "skip_memory_metrics", "trackio_bucket_id", "trackio_space_id"),
    *("trackio_static_space_id", "use_cache"),
}
"""Unknown flags: nothing on the way of a head's training reads them, or the trainer sets them itself."""

OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "adagrad", "rmsprop", "sgd")
"""Those of transformers that need no other package and update any head."""


def _plain(value: Any) -> str:
    """`adamw_torch` for the text and for transformers' enumeration."""
    return str(getattr(value, "value", value))


_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
Entry = tuple[tuple[str, ...], str, Callable[[Any], bool], str]


def _by_steps(what: str) -> Entry:
    """--eval_steps and its like beside a strategy that counts none; of --patience, which says itself that it does not
    read --save_steps, not."""

    def counts_none(values: Any) -> bool:
        strategy = _plain(getattr(values, f"{what}_strategy"))
        return strategy != "steps" and not (what == "save" and values.patience)

    why = f"it counts no steps; leave it out, or pass --{what}_strategy steps"
    return (f"{what}_steps",), f"{what}_strategy", counts_none, why


NO_EFFECT: tuple[Entry, ...] = (
    (("optim",), "head_optimizer", lambda v: v.head_optimizer == "muon", "Muon is the optimizer; drop one of the two"),
    (
        _ADAM,
        "optim",
        lambda v: v.head_optimizer == "adamw" and "adam" not in _plain(v.optim),
        "it has none; leave it out, or take --optim adamw_torch",
    ),
    (
        ("per_device_train_batch_size", "dataloader_drop_last"),
        "tokens_per_batch",
        lambda v: v.tokens_per_batch > 0,
        "batches hold every row and are filled by tokens; leave it out, or set --tokens_per_batch 0",
    ),
    (
        ("eval_steps", "eval_delay"),
        "eval_strategy",
        lambda v: _plain(v.eval_strategy) == "no",
        "nothing is evaluated before the end; leave it out, or pass --eval_strategy steps",
    ),
    (
        ("save_strategy",),
        "patience",
        lambda v: v.patience > 0,
        "it saves at every evaluation; leave it out, or set --eval_strategy",
    ),
    *(_by_steps(what) for what in ("eval", "save", "logging")),
    (
        ("warmup_steps",),
        "lr_scheduler_type",
        lambda v: (
            v.warmup_steps > 0
            and not v.max_minutes  # whose schedule warms up to whatever follows
            and _plain(v.lr_scheduler_type) in ("constant", "reduce_lr_on_plateau", "greedy")
        ),
        "it has no warm-up; leave it out, or take constant_with_warmup or another",
    ),
    (
        ("lr_scheduler_kwargs",),
        "lr_scheduler_type",
        lambda v: bool(v.lr_scheduler_kwargs) and _plain(v.lr_scheduler_type).startswith("constant"),
        "it has no settings of its own; leave it out",
    ),
    (
        ("metric_for_best_model",),
        "load_best_model_at_end",
        lambda v: (
            not (
                v.load_best_model_at_end
                or _plain(v.save_strategy) == "best"
                or _plain(v.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy")
            )
        ),
        "the last checkpoint is exported, whatever is best; add --patience N or --load_best_model_at_end true",
    ),
    (
        ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context"),
        "dataloader_num_workers",
        lambda v: v.dataloader_num_workers == 0,
        "there are no workers; leave it out, or pass --dataloader_num_workers 2",
    ),
)
"""(flags, the option that takes their effect away, whether it does so, why and what to do)."""

_ONE_OFFSET = "one offset has no other to be weighed against; leave it out"
OF_HEADS: tuple[Entry, ...] = (
    (("decay",), "labels", lambda v: getattr(v, "labels", 0) == 1, _ONE_OFFSET),
    (("decay",), "heads", lambda v: getattr(v, "heads", 0) == 1, _ONE_OFFSET),
    (("decay",), "passes", lambda v: getattr(v, "passes", 0) == 1, _ONE_OFFSET),
    (
        ("order",),
        "encoder",
        lambda v: getattr(v, "encoder", "kgram") != "kgram",
        "it reads one token at a time; leave it out, or take --encoder kgram",
    ),
)
OF_RUNS: tuple[Entry, ...] = (
    (
        ("simulate_nodes",),
        "simulate_rows",
        lambda v: v.simulate_rows == 0,
        "nothing is simulated; leave it out, or raise --simulate_rows",
    ),
)
"""The same for options of heads, and for `RunOptions`."""


def refused(name: str, value: Any = None) -> str | None:
    """The sentence that answers a flag of transformers that is refused; None for any other name."""
    if (reason := REFUSED.get(name)) is None:
        return None
    got = "" if value is None else f"; got {value}"
    return f"--{name} {reason}{got}; leave it out"


def check_effects(values: Any, table: tuple[Entry, ...], given: set[str], written: set[str]) -> None:
    """ValueError for the first flag that was asked for and that another option makes ineffective.

    given: names on the command line; written: those in the user's own --config. What the command line sets may take
    the effect of a line of the file away.
    """
    for names, other, takes_effect_away, why in table:
        for name in names:
            asked = name in given or (name in written and other in written and other not in given)
            if asked and takes_effect_away(values):
                raise ValueError(
                    f"--{name} {_plain(getattr(values, name))} has no effect with --{other} "
                    f"{_plain(getattr(values, other))}: {why}"
                )
