"""The recipe of a run: chosen by --config or by the target's size, fitted to the target, printed and kept."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from textwrap import fill
from typing import Any

from draft_heads.configs.command_line import config_values, read_config

from transformers import AutoConfig

from draft_heads.configs.recipes import (
    SHAPES,
    Source,
    format_sources,
    merge_sources,
    recipe_names,
    recipe_shape,
    recipe_sources,
    size_class,
)
from draft_heads.data.common.model_sizes import count_parameters
from draft_heads.data.common.pretrained import load_config
from draft_heads.data.common.processes import trains_on_gpu
from draft_heads.inference.target.loading import target_tokenizer
from draft_heads.train.memory import ASSUMED_LENGTH, training_memory

_NOT_OF_A_RECIPE = ("config", "print_recipe", "overwrite", "local_rank")


def add_recipe_flags(group: Any) -> None:
    """--config and --print_recipe."""
    recipe = "recipe of defaults: a YAML file or a bundled name; without it that of the target's size class"
    printed = "print the recipe, where each setting is from and the memory that it takes, and exit"
    group.add_argument("--config", help=recipe)
    group.add_argument("--print_recipe", action="store_true", default=False, help=printed)


@dataclass
class Recipe:
    """Defaults of a run. `line` says which recipe it is and why; `target_config` is the target's, or a stand-in."""

    kind: str
    line: str
    sources: list[Source]  # as they are written
    settings: dict[str, Any]  # converted as flags are
    name: str = ""  # of a bundled recipe; "": a user's own file
    target: str = ""
    target_config: Any = None

    @property
    def bundled(self) -> bool:
        """Whether it is none of a user's own file."""
        return bool(self.name)

    def take_base_rate(self) -> float:
        """The learning rate that follows from the head's base, for AdamW, in place of one that is written for Muon."""
        self.sources = recipe_sources(self.kind, self.name, written_rate=False)
        return float(merge_sources(self.sources)["learning_rate"])

    def text(self, used: Collection[str], given: Mapping[str, Any]) -> str:
        """YAML of the settings among `used`, and of the flags `given` over them, with where each is from."""
        flags = {name: _plain(value) for name, value in given.items() if name not in _NOT_OF_A_RECIPE}
        sources = [(where, {k: v for k, v in found.items() if k in used}) for where, found in self.sources]
        return f"# {self.line}\n\n{format_sources([*sources, ('command line', flags)])}"

    def memory(self, used: Mapping[str, Any], given: Mapping[str, Any]) -> str:
        """A comment about what training by those settings takes."""
        settings = {**used, **given}
        shared = 8 if settings.get("shard_target") else 1
        memory = training_memory(self.target_config, self.kind, settings, shared)
        alone = training_memory(self.target_config, self.kind, settings)["zero0"]
        stages = " / ".join(f"{memory[f'zero{stage}']:.0f}" for stage in range(4))
        where = "whole on every GPU" if shared == 1 else "split among the 8, but for what heads read"
        held = f"{memory['target']:.0f} GiB, is {where}"
        length = "" if settings.get("max_length") else f", rows of {ASSUMED_LENGTH} tokens"
        text = (
            f"Memory for {self.target or 'a Llama of about this size'}: {alone:.0f} GiB on 1 GPU; {stages} "
            f"GiB on each of 8 at ZeRO 0 / 1 / 2 / 3 (the target in bfloat16, {held}{length})"
        )
        return fill(text, 120, initial_indent="# ", subsequent_indent="# ")


def with_fitted(text: str, fitted: Mapping[str, Any], why: str) -> str:
    """The YAML of a recipe with intervals that were fitted to a run in place of its own, and a comment why."""
    for name, value in fitted.items():
        line = f"{name}: {value}  # {why}"
        text, found = re.subn(rf"^{name}: .*$", line, text, flags=re.MULTILINE)
        text += "" if found else f"\n{line}\n"
    return text


def _plain(value: Any) -> Any:
    """A flag's value as YAML and --config have it."""
    if isinstance(value, Enum):
        return value.value
    return json.dumps(value) if isinstance(value, dict) else value


def choose_recipe(kind: str, given: Mapping[str, Any], parser: argparse.ArgumentParser) -> Recipe:
    """The recipe that the flags `given` name, or that of their target's size class.

    The chat template of a bundled recipe is for tokenizers that have none, its draft vocabulary for larger ones. Only
    --print_recipe of a bundled recipe needs no target, and has it as it is written; else ValueError without one.
    """
    recipe = named_recipe(kind, given["config"], parser) if "config" in given else None
    target = given.get("target") or (recipe.settings.get("target") if recipe else None)
    if not target:
        if recipe is None or not recipe.bundled or "print_recipe" not in given:
            raise ValueError("--target must name a folder or a hub id; got nothing; e.g. --target data/tiny_target")
        return recipe
    config = load_config(target)  # a sentence, should there be none
    recipe = recipe or sized_recipe(kind, config, parser, has_gpu(given))
    recipe.target, recipe.target_config = target, config
    if recipe.bundled:
        fit_to_target(recipe, given)
    return recipe


def replaced_recipe(recipe: Recipe, parser: argparse.ArgumentParser, gpu: bool) -> Recipe | None:
    """The recipe of the size class that a user's own file stands in place of; None where the size is not known."""
    try:
        replaced = sized_recipe(recipe.kind, recipe.target_config, parser, gpu)
    except ValueError:
        return None
    replaced.target = recipe.target
    fit_to_target(replaced, recipe.settings)
    return replaced


def has_gpu(given: Mapping[str, Any]) -> bool:
    """Whether there is a GPU, which the options do not forbid."""
    return trains_on_gpu() and not given.get("use_cpu")


def named_recipe(kind: str, name_or_path: str, parser: argparse.ArgumentParser) -> Recipe:
    """The recipe that --config names: a file, or a bundled one of this head."""
    path = Path(name_or_path)
    if path.is_file():
        settings = read_config(path, parser)
        written = {key: _plain(value) for key, value in settings.items()}
        return Recipe(kind, str(path), [(str(path), written)], settings)
    if name_or_path not in (names := recipe_names(kind)):
        raise ValueError(
            f"--config {name_or_path} is neither a file nor a bundled recipe; pass a YAML file or one of "
            f"{', '.join(names)}"
        )
    shape = AutoConfig.for_model("llama", **SHAPES[recipe_shape(name_or_path)])
    return _bundled(kind, name_or_path, f"{kind}/{name_or_path}", shape, parser)


def sized_recipe(kind: str, config: Any, parser: argparse.ArgumentParser, gpu: bool = True) -> Recipe:
    """The recipe of a head for a target's size class, from its config alone; gpu: whether there is one."""
    parameters = count_parameters(config)
    size = f"{parameters / 1e9:.1f} B" if parameters > 1e9 else f"{parameters / 1e6:.1f} M"
    name, with_gpu = size_class(parameters, gpu), size_class(parameters)
    line = f"{kind}/{name}, by the {size} parameters of the target's config"
    line += "" if name == with_gpu else f", without a GPU (with one: --config {with_gpu})"
    recipe = _bundled(kind, name, line, config, parser)
    if not gpu and recipe.settings.pop("bf16", False):
        recipe.line += "; it is for a GPU, and none is used here: without its bf16, and slow"
    return recipe


def _bundled(kind: str, name: str, line: str, config: Any, parser: argparse.ArgumentParser) -> Recipe:
    sources = recipe_sources(kind, name)
    settings = config_values(merge_sources(sources), name, parser)
    return Recipe(kind, line, sources, settings, name, target_config=config)


def fit_to_target(recipe: Recipe, given: Mapping[str, Any]) -> None:
    """Leave out a draft vocabulary that the target's does not exceed and a chat template that its tokenizer, or its
    adapter, has.

    given: what was asked for; a chat template among it counts whatever the tokenizer has
    """
    settings = recipe.settings
    if settings.get("draft_vocab_size", 0) >= recipe.target_config.get_text_config(decoder=True).vocab_size:
        del settings["draft_vocab_size"]
    if (template := settings.get("chat_template")) and not given.get("chat_template"):
        if target_tokenizer(recipe.target, None, given.get("target_adapter")).chat_template:
            del settings["chat_template"]
            recipe.line += f"; its chat template {template} is left out, the tokenizer has its own"
        else:
            recipe.line += f"; chat template {template}, as the tokenizer has none"
