"""Which of transformers' TrainingArguments are flags of the trainers: each is read, refused by name, or not offered.

A field that a later version of transformers adds is not offered until it is added here; a test names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from draft_heads.train.length import saves_what_it_evaluates

_DECIDE = {
    "the run's end": "num_train_epochs max_steps",
    "batches of rows": "per_device_train_batch_size dataloader_drop_last",
    "random numbers": "full_determinism seed data_seed",
    "optimizer": "learning_rate optim weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm",
    "schedule": "lr_scheduler_type lr_scheduler_kwargs warmup_steps",
    "the training loop": "gradient_accumulation_steps",
    "precision": "bf16 fp16 tf32",
    "accelerate, when it wraps the head": "torch_compile torch_compile_backend torch_compile_mode",
    "the checkpoint to export": "load_best_model_at_end metric_for_best_model",
    "the device": "use_cpu",
}
"""Flags that decide what is learned, and what reads them."""

_EVALUATE = {"evaluation": "eval_strategy eval_steps eval_delay eval_on_start", "checkpoints": "save_strategy"}
"""Flags that decide it where the run goes by its evaluations."""

_FREE = {
    "the run's folder": "output_dir",
    "the data loader": "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context",
    "memory": "torch_empty_cache_steps per_device_eval_batch_size",
    "the log": "logging_strategy logging_steps logging_first_step log_level log_level_replica disable_tqdm",
    "TensorBoard and its like": "report_to run_name",
    "checkpoints": "save_steps save_total_limit",
    "several processes": "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
    "ddp_backend ddp_timeout deepspeed local_rank",
}
"""Flags that say where things lie, and how they are done, sent or told: they may change when a run is resumed."""


def _names(readers: Mapping[str, str]) -> frozenset[str]:
    return frozenset(" ".join(readers.values()).split())


DECIDE, EVALUATE, FREE = map(_names, (_DECIDE, _EVALUATE, _FREE))
READ = DECIDE | EVALUATE | FREE
"""The flags. DeepSpeed's launcher passes --local_rank."""

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
    "dataloader_in_order": "is not read: batches come in their order, in which a resumed run skips those it has seen",
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

OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "adagrad", "rmsprop", "sgd")
"""Those of transformers that need no other package and update any head."""


def _plain(value: Any) -> str:
    """`adamw_torch` for the text and for transformers' enumeration."""
    return str(getattr(value, "value", value))


def _reporters(values: Any) -> list[str]:
    """The reporters of --report_to, which is a text until transformers makes a list of it."""
    given = values.report_to
    return [*_NAMING] if given == "all" else [given] if isinstance(given, str) else given


BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow what is evaluated."""


def settled_optimizer(options: Any) -> str:
    """--head_optimizer, with `auto` decided: Muon, unless DeepSpeed or another optimizer was asked for."""
    if options.head_optimizer != "auto":
        return str(options.head_optimizer)
    return "adamw" if options.deepspeed or options.optim != OPTIMIZERS[0] else "muon"


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


def _one_offset(option: str) -> Entry:
    """Weights of a loss by offset, of a head whose offsets this option counts. A CTC head is none: the end of a window
    after its last label is weighed too."""
    why = "one offset has no other to be weighed against; leave it out"
    return ("decay", "accept_weight"), option, lambda v: getattr(v, option, 0) == 1, why


_NAMING = ("wandb", "trackio", "mlflow", "dagshub", "comet_ml", "swanlab")  # reporters that read --run_name

NO_EFFECT: tuple[Entry, ...] = (
    (
        ("head_optimizer",),
        "layers",
        lambda v: getattr(v, "layers", None) == 0 and v.head_optimizer == "muon",
        "it updates matrices, and this head has vocabulary tables alone; leave it out, or pass --head_optimizer adamw",
    ),
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
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "deepspeed",
        lambda v: v.deepspeed is not None,
        "DeepSpeed shares the gradients, not DDP; leave it out, or set the like in the file's zero_optimization",
    ),
    (
        ("ddp_backend",),
        "deepspeed",
        lambda v: v.deepspeed is not None and not v.use_cpu,
        "DeepSpeed opens the connections itself; leave it out",
    ),
    (
        ("eval_steps", "eval_delay"),
        "eval_strategy",
        lambda v: _plain(v.eval_strategy) == "no",
        "nothing is evaluated before the end; leave it out, or pass --eval_strategy steps",
    ),
    (
        ("save_strategy",),
        "eval_strategy",
        lambda v: _plain(v.save_strategy) == "best" and _plain(v.eval_strategy) == "no",
        "nothing is evaluated, so nothing would be saved; leave it out, or pass --eval_strategy steps",
    ),
    (
        ("save_total_limit",),
        "save_strategy",
        lambda v: _plain(v.save_strategy) == "no",
        "no checkpoint is saved; leave it out, or pass --save_strategy steps",
    ),
    (
        ("run_name",),
        "report_to",
        lambda v: not {*_reporters(v)} & {*_NAMING},
        f"runs have names in {', '.join(_NAMING)} alone; leave it out",
    ),
    (
        ("load_best_model_at_end",),
        "eval_strategy",
        lambda v: v.load_best_model_at_end and _plain(v.eval_strategy) == "no",
        "no checkpoint is evaluated, so none is the best; leave it out, or pass --eval_strategy steps",
    ),
    (
        ("load_best_model_at_end",),
        "patience",
        lambda v: v.patience > 0 and not v.load_best_model_at_end,
        "it exports the best checkpoint; drop one of the two",
    ),
    (
        ("load_best_model_at_end",),
        "save_strategy",
        lambda v: _plain(v.save_strategy) == "best" and not v.load_best_model_at_end,
        "what is saved as the best is exported; drop one of the two",
    ),
    (
        ("save_strategy",),
        "patience",
        lambda v: v.patience > 0,
        "it saves at every evaluation; leave it out, or set --eval_strategy",
    ),
    (
        ("save_steps",),
        "load_best_model_at_end",
        lambda v: (
            not v.patience  # which says itself that it does not read --save_steps
            and saves_what_it_evaluates(v)
            and v.save_steps != (v.eval_steps or v.logging_steps)
        ),
        "it saves at every evaluation, of which one is the best; leave it out, or set --eval_steps",
    ),
    *(_by_steps(what) for what in ("eval", "save", "logging")),
    (
        ("warmup_steps",),
        "lr_scheduler_type",
        lambda v: (
            v.warmup_steps > 0
            and not v.max_minutes  # whose schedule warms up to whatever follows
            and _plain(v.lr_scheduler_type) in ("constant", *BY_METRIC)
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
                or _plain(v.lr_scheduler_type) in BY_METRIC
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
    (
        ("packing",),
        "per_device_train_batch_size",
        lambda v: v.packing and not v.tokens_per_batch and v.per_device_train_batch_size == 1,
        "a row takes in conversations of one batch; leave it out, or raise the batch",
    ),
    (("clip",), "max_grad_norm", lambda v: v.max_grad_norm == 0, "0 turns clipping off; leave it out, or raise it"),
    (
        ("simulate_nodes",),
        "simulate_rows",
        lambda v: v.simulate_rows == 0,
        "nothing is simulated; leave it out, or raise --simulate_rows",
    ),
    *(_one_offset(option) for option in ("heads", "passes")),
    (
        ("decay", "accept_weight"),
        "ctc_weight",
        lambda v: getattr(v, "ctc_weight", 1) == 0,
        "labels are weighed in the CTC loss alone; leave it out, or raise --ctc_weight",
    ),
    (
        ("order",),
        "encoder",
        lambda v: getattr(v, "encoder", "kgram") != "kgram",
        "it reads one token at a time; leave it out, or take --encoder kgram",
    ),
)
"""(flags, the option that takes their effect away, whether it does so, why and what to do); options of any head."""


def refused(name: str, value: Any = None) -> str | None:
    """The sentence that answers a flag of transformers that is refused; None for any other name."""
    if (reason := REFUSED.get(name)) is None:
        return None
    got = "" if value is None else f"; got {value}"
    return f"--{name} {reason}{got}; leave it out"


def check_effects(values: Any, asked: Mapping[str, Any]) -> None:
    """ValueError for the first of the options `asked` that another one makes ineffective; values: all of a run."""
    for name, other, why in _ineffective(values, asked):
        if name in asked:
            raise ValueError(
                f"--{name} {_plain(asked[name])} has no effect with --{other} {_plain(getattr(values, other))}: {why}"
            )


def without_effect(values: Any, written: Mapping[str, Any]) -> set[tuple[str, str]]:
    """(an option without effect, the one that takes it away) of settled values; written: those that were not settled,
    in a file or on the command line."""
    return {(name, other) for name, other, _ in _ineffective(values, written)}


def _ineffective(values: Any, written: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(option without effect, the option that takes it away, why and what to do)."""
    for names, other, takes_effect_away, why in NO_EFFECT:
        for name in names:
            as_written = {name: written[name]} if name in written else {}  # it may have been settled otherwise since
            if takes_effect_away(SimpleNamespace(**{**vars(values), **as_written})):
                yield name, other, why
