"""Options of every trainer: dataclasses read from a YAML recipe and the command line, checked where they are declared.

A recipe gives defaults, the command line overrides them; without `--config` the recipe that fits the target's size is
taken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoConfig, HfArgumentParser, TrainingArguments

from draft_heads.data.chat_template import CHAT_TEMPLATE_HELP
from draft_heads.data.config_file import read_config
from draft_heads.data.options import add_flags, dtype_named, option, option_names
from draft_heads.heads.config import HeadConfig

RECIPES = Path(__file__).resolve().parent.parent / "configs"
_SIZES = ((50e6, "tiny"), (10e9, "vicuna-7b"), (20e9, "vicuna-13b"), (float("inf"), "vicuna-33b"))


@dataclass
class RunOptions:
    """What to train on."""

    target: str = option("", "the frozen target: a folder or a hub id")
    dataset: list[str] = option([], "what scripts/distill.py wrote with this target; one folder or several")
    target_adapter: str | None = option(None, "PEFT adapter merged into the target")
    chat_template: str | None = option(None, CHAT_TEMPLATE_HELP)
    target_dtype: str = option("auto", "auto (float32 on CPU, the checkpoint's on GPU), float32, bfloat16, …")
    max_length: int = option(0, "tokens of a row; longer ones are cut; 0: the dataset's longest")
    packing: bool = option(False, "put several conversations into one row")
    held_out: int = option(64, "rows kept for evaluation, never trained on")
    simulate_rows: int = option(32, "held-out rows that simulated beta walks along; 0 turns it off")
    simulate_nodes: int = option(32, "node budget of simulated beta")
    threads: int = option(0, "torch threads per process; 0 leaves them alone")

    def __post_init__(self) -> None:
        if self.held_out < 1:
            raise ValueError(f"--held_out must be at least 1 row; got {self.held_out}")
        if self.max_length < 0 or 0 < self.max_length < 8:
            raise ValueError(f"--max_length must be 0 (the dataset's own) or at least 8; got {self.max_length}")
        if self.simulate_nodes < 1:
            raise ValueError(f"--simulate_nodes must be at least 1; got {self.simulate_nodes}")
        dtype_named("--target_dtype", self.target_dtype)


@dataclass
class HeadTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with the few things a head's training adds."""

    max_minutes: float = option(
        0.0, "wall minutes at which the schedule ends, learning rate included; 0: by epochs or steps"
    )
    clip: str = option("norm", "norm (max_grad_norm bounds the norm) or value (every entry)")
    head_optimizer: str = option(
        "adamw",
        "adamw (--optim of transformers), muon (for weight matrices; not with --deepspeed); auto: muon where it works",
    )
    overwrite: bool = option(False, "delete what an earlier run left in --output_dir")

    def __post_init__(self) -> None:
        if self.clip not in ("norm", "value"):
            raise ValueError(f"--clip must be norm or value; got {self.clip!r}")
        if self.clip == "value" and self.deepspeed:
            raise ValueError(
                "--clip value cannot be used with --deepspeed, which clips by norm only; drop one of the two"
            )
        if self.head_optimizer == "auto":
            self.head_optimizer = "adamw" if self.deepspeed else "muon"
        if self.head_optimizer not in ("adamw", "muon"):
            raise ValueError(f"--head_optimizer must be adamw, muon or auto; got {self.head_optimizer!r}")
        if self.head_optimizer == "muon" and self.deepspeed:
            raise ValueError(
                "--head_optimizer muon cannot be used with --deepspeed, whose ZeRO stages flatten the matrices it "
                "needs; add --head_optimizer adamw, with a learning rate for it"
            )
        if self.max_minutes < 0:
            raise ValueError(f"--max_minutes must be 0 or more; got {self.max_minutes}")
        self.remove_unused_columns = False
        self.label_names = []
        on_cpu = not torch.accelerator.is_available()
        if on_cpu and not self.deepspeed:
            self.use_cpu = True
        elif on_cpu and "LOCAL_RANK" in os.environ:  # with DeepSpeed on CPU accelerate picks no backend, so name gloo
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
            del os.environ["ACCELERATE_USE_DEEPSPEED"]
            self.accelerator_config = {"use_configured_state": True}
        super().__post_init__()


def parse_options(head_config: type[HeadConfig], arguments: list[str] | None = None) -> tuple[Any, Any, Any]:
    """(RunOptions, head settings, HeadTrainingArguments) from the command line and a recipe.

    Raises SystemExit with a sentence for anything invalid. Head settings are the fields that `head_config` adds to
    `HeadConfig`; sizes come from the target and are not options.
    """
    parser = HfArgumentParser((RunOptions, HeadTrainingArguments))  # type: ignore[arg-type]
    group = parser.add_argument_group(f"{head_config.kind} head")
    add_flags(group, head_config)
    parser.add_argument("--config", default=None, help="recipe of defaults; without it the one that fits the target")
    try:
        known, _ = parser.parse_known_args(arguments)
        if not known.target:
            raise ValueError("--target must name a folder or a hub id; got nothing; e.g. --target data/tiny_target")
        recipe = Path(known.config) if known.config else recipe_for(head_config.kind, known.target)
        parser.set_defaults(**read_config(recipe, parser))
        run, training, rest = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
        if not run.dataset:
            raise ValueError("--dataset must name a folder written by scripts/distill.py; got nothing")
        head = {name: getattr(rest, name) for name in option_names(head_config)}
        head_config(**head)  # validated here, before anything is loaded
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return run, head, training


def recipe_for(kind: str, target: str) -> Path:
    """The recipe of a head for a target of this size, from its config alone."""
    parameters = estimated_parameters(AutoConfig.from_pretrained(target))
    size = next(name for bound, name in _SIZES if parameters < bound)
    if "llama-2" in target.lower() and size != "tiny":
        size = "llama2-chat-7b" if size == "vicuna-7b" else "llama2-chat-13b"
    return RECIPES / kind / f"{size}.yaml"


SHAPES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "33b": {"hidden_size": 6656, "intermediate_size": 17920, "num_hidden_layers": 60, "num_attention_heads": 52},
}
"""Llama shapes with a vocabulary of 32,000."""


def estimated_parameters(config: Any) -> float:
    """Parameters of a decoder from its sizes: embeddings, attention and MLP of every layer."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"--target must be a decoder-only causal LM; got an encoder-decoder model ({config.model_type}); pick "
            "another target"
        )
    config = config.get_text_config(decoder=True)
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return 2 * config.vocab_size * hidden + config.num_hidden_layers * (4 * hidden**2 + 3 * hidden * inner)
