"""Options of every trainer: dataclasses read from a YAML recipe and the command line, checked where they are declared.

A recipe gives defaults, the command line overrides them. Without `--config` the recipe of the target's size class is
taken; a paper's own is taken by its name only.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import read_config

import torch
from transformers import AutoConfig, AutoModel

from draft_heads.configs.options import THREADS_HELP, dtype_named, option
from draft_heads.data.text.chat_template import CHAT_TEMPLATE_HELP, load_tokenizer
from draft_heads.train.inherited import OPTIMIZERS, refused
from draft_heads.train.length import ENDLESS_EPOCHS
from draft_heads.train.zero_config import check_build_locks, check_launcher, zero_config

RECIPES = Path(__file__).resolve().parent.parent / "configs"
CONFIG_HELP = "recipe of defaults: a YAML file or a bundled name; without it that of the target's size class"
# Fewer parameters than the bound, about the geometric mean of the sizes that two classes are named after.
SIZE_CLASSES = ((50e6, "tiny"), (3e9, "1b"), (11e9, "8b"), (22e9, "14b"), (48e9, "32b"), (float("inf"), "70b"))


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
    packing: bool = option(False, "put several conversations into one row")
    held_out: int = option(64, "rows kept for evaluation, never trained on")
    simulate_rows: int = option(32, "held-out rows that simulated beta walks along; 0 turns it off")
    simulate_nodes: int = option(32, "node budget of simulated beta")
    threads: int = option(0, THREADS_HELP)

    def __post_init__(self) -> None:
        if self.held_out < 1:
            raise ValueError(f"--held_out must be at least 1 row; got {self.held_out}")
        if self.max_length < 0 or 0 < self.max_length < 8:
            raise ValueError(f"--max_length must be 0 (the dataset's own) or at least 8; got {self.max_length}")
        if self.simulate_rows < 0:
            raise ValueError(f"--simulate_rows must be at least 0 rows; got {self.simulate_rows}")
        if self.simulate_nodes < 1:
            raise ValueError(f"--simulate_nodes must be at least 1; got {self.simulate_nodes}")
        if self.target_device not in (None, "auto"):
            raise ValueError(f"--target_device must be auto, or left out; got {self.target_device}")
        if self.target_device and self.shard_target:
            raise ValueError("--target_device auto is for one process, --shard_target for several; got both; drop one")
        dtype_named("--target_dtype", self.target_dtype)


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
        if self.clip not in ("norm", "value"):
            raise ValueError(f"--clip must be norm or value; got {self.clip!r}")
        if self.clip == "value" and self.deepspeed:
            raise ValueError(
                "--clip value cannot be used with --deepspeed, which clips by norm only; drop one of the two"
            )
        if self.head_optimizer == "auto":
            self.head_optimizer = "adamw" if self.deepspeed or self.optim != OPTIMIZERS[0] else "muon"
        if self.head_optimizer not in ("adamw", "muon"):
            raise ValueError(f"--head_optimizer must be adamw, muon or auto; got {self.head_optimizer!r}")
        if self.head_optimizer == "muon" and self.deepspeed:
            raise ValueError(
                "--head_optimizer muon cannot be used with --deepspeed, whose ZeRO stages flatten the matrices it "
                "needs; add --head_optimizer adamw, with a learning rate for it"
            )
        for f in fields(self):
            if getattr(self, f.name) != f.default and (reason := refused(f.name, getattr(self, f.name))):
                raise ValueError(reason)
        if self.optim not in OPTIMIZERS:
            raise ValueError(f"--optim must be one of {', '.join(OPTIMIZERS)}; got {self.optim}")
        rates = ("learning_rate", "max_grad_norm", "weight_decay", "adam_epsilon", "warmup_steps")
        for name in ("max_minutes", "patience", *rates, "dataloader_num_workers"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"--{name} must be 0 or more; got {getattr(self, name)}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 0 and below 1; got {getattr(self, name)}")
        for name in ("save_steps", "eval_steps", "logging_steps"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"--{name} must be above 0; got {getattr(self, name)}")
        for name in ("seed", "data_seed"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < 2**32:
                raise ValueError(f"--{name} must be at least 0 and below 2^32; got {getattr(self, name)}")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1; got {getattr(self, name)}")
        fractions = [
            name for name in ("save_steps", "eval_steps", "logging_steps") if 0 < (getattr(self, name) or 0) < 1
        ]
        if self.max_minutes and fractions:
            raise ValueError(
                f"--{fractions[0]} must be a number of steps with --max_minutes, whose number of steps is not known; "
                f"got {getattr(self, fractions[0])}"
            )
        if (limit := self.save_total_limit) is not None and (limit == 1 or limit < 0):
            raise ValueError(
                f"--save_total_limit must be at least 2, got {limit}: should the newest checkpoint be damaged, the one "
                "before it is needed; raise it"
            )
        if self.patience and self.eval_strategy == "no":
            raise ValueError(
                f"--patience {self.patience} counts evaluations, got --eval_strategy no; pass --eval_strategy steps "
                "or drop --patience"
            )
        if self.patience:
            self.load_best_model_at_end = True
            self.metric_for_best_model = self.metric_for_best_model or "eval_loss"
            self.save_strategy, self.save_steps = self.eval_strategy, self.eval_steps or self.logging_steps
        if self.max_minutes:
            if self.max_steps > 0:
                raise ValueError(
                    f"a run ends by time or by steps; got --max_minutes {self.max_minutes:g} and --max_steps "
                    f"{self.max_steps}; drop one of the two"
                )
            self.num_train_epochs = ENDLESS_EPOCHS
        accelerator: dict[str, Any] = {}
        check_launcher(self)
        self.zero_config: dict[str, Any] | None = None
        if (given := self.deepspeed) is not None:
            self.zero_config, lines = zero_config(given, self)
            check_build_locks()
            if lines and os.environ.get("RANK", "0") == "0":
                print("\n".join(lines), flush=True)
            self.deepspeed = self.zero_config
        self.remove_unused_columns = False
        self.logging_nan_inf_filter = (
            False  # the host would wait for every step; losses are checked where they are logged
        )
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # every parameter has a gradient in every step
        self.label_names = []  # type: ignore[var-annotated]
        on_cpu = not torch.accelerator.is_available()
        if on_cpu and not self.deepspeed:
            self.use_cpu = True
        elif on_cpu and "LOCAL_RANK" in os.environ:  # with DeepSpeed on CPU accelerate picks no backend, so name gloo
            from accelerate import PartialState

            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
            del os.environ["ACCELERATE_USE_DEEPSPEED"]
            accelerator["use_configured_state"] = True
        self.accelerator_config = accelerator
        super().__post_init__()  # type: ignore[misc]
        self.deepspeed = given
        if self.fp16 and on_cpu:
            raise ValueError("--fp16 needs a GPU and torch sees none; leave it out, or pass --bf16")
        from transformers.integrations import get_available_reporting_integrations

        here = get_available_reporting_integrations()
        if missing := set(self.report_to) - {*here, "kubeflow"}:  # which transformers adds itself
            raise ValueError(
                f"--report_to must be none or one of {', '.join(here)}, which are installed here; got "
                f"{', '.join(sorted(missing))}"
            )
        if self.tokens_per_batch:
            self.accelerator_config.even_batches = False  # their numbers of rows differ
        if self.n_gpu > 1:
            self._n_gpu = 1  # a head under DataParallel would be slower than on one GPU; launchers start processes


def recipe_defaults(
    kind: str, known: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[dict[str, Any], str, bool]:
    """The defaults of the recipe that --config names or the target's size class has, a line that says which, and
    whether it is a bundled one.

    The chat template of a bundled recipe is for tokenizers that have none, its draft vocabulary for larger ones.
    """
    config = None
    if known.config:
        recipe, taken = find_recipe(kind, known.config)
    else:
        config = AutoConfig.from_pretrained(known.target)
        recipe, taken = recipe_for(kind, config)
    defaults = read_config(recipe, parser)
    if recipe.parent != RECIPES / kind:
        return defaults, taken, False
    if size := defaults.get("draft_vocab_size"):
        config = config or AutoConfig.from_pretrained(known.target)
        if size >= config.get_text_config(decoder=True).vocab_size:
            del defaults["draft_vocab_size"]
    if (template := defaults.get("chat_template")) and not known.chat_template:
        if load_tokenizer(known.target).chat_template:
            del defaults["chat_template"]
            taken += f"; its chat template {template} is left out, the tokenizer has its own"
        else:
            taken += f"; chat template {template}, as the tokenizer has none"
    return defaults, taken, True


def recipe_for(kind: str, config: Any) -> tuple[Path, str]:
    """The recipe of a head for a target's size class, from its config alone, and a line that says why."""
    parameters = count_parameters(config)
    recipe = recipe_for_size(kind, parameters)
    size = f"{parameters / 1e9:.1f} B" if parameters > 1e9 else f"{parameters / 1e6:.1f} M"
    return recipe, f"{kind}/{recipe.stem}, by the {size} parameters of the target's config"


def recipe_for_size(kind: str, parameters: int) -> Path:
    """The recipe of the size class; a mixture of experts counts whole, because its memory decides what fits."""
    return RECIPES / kind / f"{next(name for bound, name in SIZE_CLASSES if parameters < bound)}.yaml"


def find_recipe(kind: str, name_or_path: str) -> tuple[Path, str]:
    """The recipe that --config names: a file, or a bundled one of this head."""
    path, bundled = Path(name_or_path), RECIPES / kind / f"{name_or_path}.yaml"
    if path.is_file():
        return path, str(path)
    if bundled.is_file():
        return bundled, f"{kind}/{name_or_path}"
    names = ", ".join(sorted(recipe.stem for recipe in (RECIPES / kind).glob("*.yaml")))
    raise ValueError(
        f"--config {name_or_path} is neither a file nor a bundled recipe; pass a YAML file or one of {names}"
    )


_COLUMNS = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
SHAPES = {
    name: dict(zip(_COLUMNS.split(), sizes))
    for name, sizes in {
        "1b": (2048, 8192, 16, 32, 8, 64, 128256),
        "7b": (4096, 11008, 32, 32, 32, 128, 32000),
        "8b": (4096, 12288, 36, 32, 8, 128, 151936),
        "13b": (5120, 13824, 40, 40, 40, 128, 32000),
        "14b": (5120, 17408, 40, 40, 8, 128, 151936),
        "32b": (5120, 25600, 64, 64, 8, 128, 151936),
        "33b": (6656, 17920, 60, 52, 52, 128, 32000),
        "70b": (8192, 28672, 80, 64, 8, 128, 128256),
    }.items()
}
"""Llama shapes: those of the papers' targets (7b, 13b, 33b) and one of today's for each size class."""

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Operations a second of GPUs by what their names contain: dense, bfloat16."""


def peak_flops(device: torch.device) -> float | None:
    """Of a GPU that `PEAK_FLOPS` knows."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def count_parameters(config: Any) -> int:
    """Parameters of the decoder that a config describes, every expert counted; made without memory."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"--target must be a decoder-only causal LM; got an encoder-decoder model ({config.model_type}); pick "
            "another target"
        )
    text = config.get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            decoder = AutoModel.from_config(text)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the size of --target ({config.model_type}) cannot be read from its config ({reason}); name a recipe with "
            f"--config, one of {', '.join(name for _, name in SIZE_CLASSES)}"
        ) from error
    tied = getattr(text, "tie_word_embeddings", config.tie_word_embeddings)
    return sum(p.numel() for p in decoder.parameters()) + (0 if tied else text.vocab_size * text.hidden_size)
