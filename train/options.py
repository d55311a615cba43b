"""Options of every trainer: dataclasses, read from a recipe and the command line, checked where they are declared."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from draft_heads.configs.options import THREADS_HELP, check_whole, dtype_from_name, option
from draft_heads.data.common.processes import trains_on_gpu
from draft_heads.data.text.chat_template import CHAT_TEMPLATE_HELP
from draft_heads.train.inherited import BY_METRIC, OPTIMIZERS, refused, settled_optimizer
from draft_heads.train.length import ENDLESS_EPOCHS, saves_what_it_evaluates
from draft_heads.train.zero_config import check_launcher, zero_config


@dataclass
class RunOptions:
    """What to train on."""

    target: str = option("", "the frozen target: a folder or a hub id")
    dataset: list[str] = option([], "what scripts/distill.py wrote with this target; one folder or several")
    target_adapter: str | None = option(None, "PEFT adapter merged into the target")
    chat_template: str | None = option(None, CHAT_TEMPLATE_HELP)
    target_dtype: str = option("auto", "auto (float32 on CPU, the checkpoint's on GPU), float32, bfloat16, …")
    target_device: str | None = option(None, "auto: the target is spread over all GPUs of one process")
    shard_target: bool = option(
        False, "split the target among the processes (ZeRO-3), whatever --deepspeed says of the head"
    )
    max_length: int = option(0, "tokens of a row; longer ones are cut; 0: the dataset's longest")
    packing: bool = option(False, "put the conversations of a batch, which its size counts, into fewer rows")
    held_out: int = option(64, "rows kept for evaluation, never trained on")
    simulate_rows: int = option(32, "held-out rows that simulated beta walks along; 0 turns it off")
    simulate_nodes: int = option(32, "node budget of simulated beta")
    threads: int = option(0, THREADS_HELP)

    def __post_init__(self) -> None:
        for name, least in (("held_out", 1), ("simulate_rows", 0), ("simulate_nodes", 1)):
            check_whole(f"--{name}", getattr(self, name), least)
        if self.max_length < 0 or 0 < self.max_length < 8:
            raise ValueError(f"--max_length must be 0 (the dataset's own) or at least 8; got {self.max_length}")
        if self.target_device not in (None, "auto"):
            raise ValueError(f"--target_device must be auto, or left out; got {self.target_device}")
        if self.target_device and self.shard_target:
            raise ValueError("--target_device auto is for one process, --shard_target for several; got both; drop one")
        dtype_from_name("--target_dtype", self.target_dtype)


@dataclass
class TrainingOptions:
    """What a head's training adds to transformers' TrainingArguments; `HeadTrainingArguments` are both."""

    max_minutes: float = option(
        0.0,
        "training and its learning-rate schedule end after so many minutes, instead of steps or epochs; 0: no limit",
    )
    clip: str = option("norm", "norm (max_grad_norm bounds the norm) or value (every entry)")
    head_optimizer: str = option(
        "adamw",
        "adamw (--optim of transformers), muon (for weight matrices; not with --deepspeed); auto: muon where it works",
    )
    tokens_per_batch: int = option(
        0, "tokens of a process's batch, padding included, in rows of similar length; 0: per_device_train_batch_size"
    )
    patience: int = option(
        0,
        "evaluations without a better --metric_for_best_model (the held-out loss) that end training; saves at each of "
        "them, in place of --save_steps, and exports the best checkpoint; 0: the last",
    )
    overwrite: bool = option(False, "delete what an earlier run left in --output_dir")

    def __post_init__(self: Any) -> None:
        check_training(self)
        on_cpu, given = not trains_on_gpu(), self.deepspeed
        settle(self)
        self._set_constants()
        self.zero_config: dict[str, Any] | None = None
        if given is not None:
            self.deepspeed = self.zero_config = zero_config(given, self)[0]
        self.use_cpu = self.use_cpu or (on_cpu and not self.deepspeed)
        self.accelerator_config = {"use_configured_state": True} if needs_gloo(given) else {}
        super().__post_init__()  # type: ignore[misc]
        self.deepspeed = given
        check_reporting(self.report_to)
        own = self.lr_scheduler_kwargs or {}
        if self.lr_scheduler_type in BY_METRIC and isinstance(own, dict):
            mode = "max" if self.greater_is_better else "min"
            if own.get("mode", mode) != mode:
                raise ValueError(
                    f"the mode of --lr_scheduler_kwargs follows from --metric_for_best_model, for which it is {mode}; "
                    f"got {own['mode']!r}; leave it out"
                )
            if mode == "max":  # their default is "min"
                self.lr_scheduler_kwargs = {**own, "mode": mode}
        if self.tokens_per_batch:
            self.accelerator_config.even_batches = False  # their numbers of rows differ
        self.idle_gpus = 0
        if (gpus := self.n_gpu) > 1:
            self._n_gpu = 1  # a head under DataParallel would be slower than on one GPU; launchers start processes
            self.idle_gpus = gpus - 1

    def _set_constants(self: Any) -> None:
        """Set what is the same for every head."""
        if self.max_minutes:
            self.num_train_epochs = ENDLESS_EPOCHS
        self.remove_unused_columns = False
        self.logging_nan_inf_filter = False  # it would make the host wait for every step; logged losses are checked
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # every parameter has a gradient in every step
        self.label_names = []  # type: ignore[var-annotated]


def settle(options: Any) -> None:
    """Set the options that follow from others."""
    options.head_optimizer = settled_optimizer(options)
    if options.patience:
        options.load_best_model_at_end = True
        options.save_strategy = options.eval_strategy
    if options.save_strategy == "best":
        options.load_best_model_at_end = True  # a checkpoint is of use to a later run and to the export alone
    if options.patience or options.save_strategy == "best":
        options.metric_for_best_model = options.metric_for_best_model or "eval_loss"
    if saves_what_it_evaluates(options):
        options.save_steps = options.eval_steps or options.logging_steps


def needs_gloo(deepspeed: Any) -> bool:
    """Whether a process of a launcher runs DeepSpeed on a CPU, for which accelerate picks no backend."""
    return deepspeed is not None and not trains_on_gpu() and "LOCAL_RANK" in os.environ


def check_training(options: Any) -> None:
    """ValueError for values of `TrainingOptions` and of transformers' that no run can have.

    Nothing is changed and no process met, so that `parse_options` can check before the processes connect.
    """
    _check_optimizer(options)
    _check_ranges(options)
    _check_intervals(options)
    if options.fp16 and not trains_on_gpu():
        raise ValueError("--fp16 needs a GPU and torch sees none; leave it out, or pass --bf16")
    check_launcher(options)
    if options.deepspeed is not None:
        zero_config(options.deepspeed, options)


def _check_optimizer(options: Any) -> None:
    """Clipping, the optimizer, what DeepSpeed can do of it, and settings of transformers that are not for heads."""
    if options.clip not in ("norm", "value"):
        raise ValueError(f"--clip must be norm or value; got {options.clip!r}")
    if options.clip == "value" and options.deepspeed:
        raise ValueError("--clip value cannot be used with --deepspeed, which clips by norm only; drop one of the two")
    if options.head_optimizer not in ("adamw", "muon", "auto"):
        raise ValueError(f"--head_optimizer must be adamw, muon or auto; got {options.head_optimizer!r}")
    if options.head_optimizer == "muon" and options.deepspeed:
        raise ValueError(
            "--head_optimizer muon cannot be used with --deepspeed, whose ZeRO stages flatten the matrices it "
            "needs; add --head_optimizer adamw, with a learning rate for it"
        )
    for f in fields(options):
        if getattr(options, f.name) != f.default and (reason := refused(f.name, getattr(options, f.name))):
            raise ValueError(reason)
    if options.optim not in OPTIMIZERS:
        raise ValueError(f"--optim must be one of {', '.join(OPTIMIZERS)}; got {options.optim}")


_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_BOUNDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "0 or more",
        lambda value: 0 <= value < math.inf,
        "max_minutes patience learning_rate max_grad_norm weight_decay adam_epsilon warmup_steps "
        "dataloader_num_workers eval_delay",
    ),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, "adam_beta1 adam_beta2"),
    ("above 0", lambda value: 0 < value < math.inf, "save_steps eval_steps logging_steps"),
    ("at least 0 and below 2^32", lambda value: 0 <= value < 2**32, "seed data_seed"),
    (
        "at least 1",
        lambda value: value >= 1,
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps dataloader_prefetch_factor",
    ),
    ("default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs", _MODES.__contains__, "torch_compile_mode"),
)
"""(what a value must be, whether it is, the options)."""


def _check_ranges(options: Any) -> None:
    for bound, holds, names in _BOUNDS:
        for name in names.split():
            if (value := getattr(options, name)) is not None and not holds(value):
                raise ValueError(f"--{name} must be {bound}; got {value}")
    if (limit := options.save_total_limit) is not None and (limit == 1 or limit < 0):
        raise ValueError(
            f"--save_total_limit must be at least 2, got {limit}: should the newest checkpoint be damaged, the one "
            "before it is needed; raise it"
        )


def _check_intervals(options: Any) -> None:
    """Intervals that the end of the run, --patience or the schedule does not admit."""
    for name in ("save_steps", "eval_steps", "logging_steps"):
        if options.max_minutes and 0 < (getattr(options, name) or 0) < 1:
            raise ValueError(
                f"--{name} must be a number of steps with --max_minutes, whose number of steps is not known; "
                f"got {getattr(options, name)}"
            )
    if options.patience and options.eval_strategy == "no":
        raise ValueError(
            f"--patience {options.patience} counts evaluations, got --eval_strategy no; pass --eval_strategy steps "
            "or drop --patience"
        )
    schedule = str(getattr(options.lr_scheduler_type, "value", options.lr_scheduler_type))
    if schedule in BY_METRIC and options.eval_strategy == "no":
        raise ValueError(
            f"--lr_scheduler_type {schedule} follows evaluations, got --eval_strategy no; pass --eval_strategy steps "
            "or another schedule"
        )


def check_reporting(report_to: list[str]) -> None:
    """ValueError for what is not installed here."""
    from transformers.integrations import get_available_reporting_integrations

    here = get_available_reporting_integrations()
    if missing := set(report_to) - {*here, "kubeflow"}:  # which transformers adds itself
        raise ValueError(
            f"--report_to must be none or one of {', '.join(here)}, which are installed here; got "
            f"{', '.join(sorted(missing))}"
        )


PEAK_FLOPS = {"H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H200": 989e12}
PEAK_FLOPS |= {"A100": 312e12}
"""Operations a second of GPUs by what their names contain, the first that fits: dense, bfloat16."""


def peak_flops(device: torch.device) -> float | None:
    """Of a GPU that `PEAK_FLOPS` knows."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
