"""Recipes by rule: the defaults of a training run, merged from a few files of this folder.

A recipe is one of a size class (`8b`), of a paper's target (`vicuna-7b`), or of a head's own (`paper` of ctc). Merged,
later ones over earlier ones:

    common.yaml
    sizes.yaml or papers.yaml   the entry of the recipe's name
    HEAD.yaml                   its settings; those below `sizes` or `papers`; those below the recipe's name

A head's own recipes, below `recipes` in HEAD.yaml, are complete: only common.yaml is under them. Where no learning rate
is written it is `base_learning_rate`, for a size class times 4096 / hidden size of the class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from draft_heads.configs.yaml_files import read_yaml

RECIPES = Path(__file__).resolve().parent
SIZE_CLASSES = ((50e6, "tiny"), (3e9, "1b"), (11e9, "8b"), (22e9, "14b"), (48e9, "32b"), (float("inf"), "70b"))
"""Fewer parameters than the bound, about the geometric mean of the sizes that two classes are named after."""

_CPU = "-cpu"
_COLUMNS = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
SHAPES = {
    name: dict(zip(_COLUMNS.split(), sizes))
    for name, sizes in {
        "tiny": (128, 320, 12, 4, 2, 32, 1024),
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
"""Llama shapes: of the embedded target (tiny), of the papers' targets (7b, 13b, 33b), one of today's per size class."""

Source = tuple[str, dict[str, Any]]
"""Where settings are written, and the settings."""


def size_class(parameters: float, gpu: bool = True) -> str:
    """The class of a target; a mixture of experts counts whole, because its memory decides what fits.

    gpu: False for the class's form for machines without one, where it has such a form
    """
    name = next(name for bound, name in SIZE_CLASSES if parameters < bound)
    return name if gpu or name + _CPU not in _read("sizes") else name + _CPU


def recipe_shape(name: str) -> str:
    """Which of `SHAPES` a recipe is for: `8b` for 8b, `1b` for 1b-cpu, `13b` for vicuna-13b, `7b` for a head's own."""
    size = name.removesuffix(_CPU).rpartition("-")[2]
    return size if size in SHAPES else "7b"


def recipe_names(kind: str) -> list[str]:
    """The recipes of a head: size classes, papers' targets, its own."""
    return [*_read("sizes"), *_read("papers"), *_read_head(kind).get("recipes", {})]


def load_recipe(kind: str, name: str) -> dict[str, Any]:
    """The settings of a recipe."""
    return merge_sources(recipe_sources(kind, name))


def merge_sources(sources: list[Source]) -> dict[str, Any]:
    """The settings, those of later sources in place of earlier ones."""
    return {key: value for _, settings in sources for key, value in settings.items()}


def recipe_sources(kind: str, name: str, written_rate: bool = True) -> list[Source]:
    """The sources of a recipe, later ones over earlier ones; ValueError lists the names for an unknown one.

    written_rate: False for the learning rate of the base also where another is written, which may be Muon's
    """
    head, file = _read_head(kind), f"{kind}.yaml"
    sources: list[Source] = [("common.yaml", _read("common"))]
    if name in (own := head.get("recipes", {})):
        sources.append((f"{file}, {name}", own[name]))
    else:
        group = next((group for group in ("sizes", "papers") if name in _read(group)), None)
        if group is None:
            raise ValueError(f"the {kind} head has no recipe {name}; pass one of {', '.join(recipe_names(kind))}")
        sources.append((f"{group}.yaml, {name}", _read(group)[name]))
        sources.append((file, {key: value for key, value in head.items() if not isinstance(value, dict)}))
        sources += [(f"{file}, {section}", head.get(section, {})) for section in (group, name)]
    if not written_rate:
        sources = [(where, {k: v for k, v in found.items() if k != "learning_rate"}) for where, found in sources]
    return _with_learning_rate(sources, name)


def _with_learning_rate(sources: list[Source], name: str) -> list[Source]:
    """The sources with the learning rate that follows from the base where none is written, and without the base."""
    settings = merge_sources(sources)
    base = settings["base_learning_rate"]
    sources = [(where, {k: v for k, v in found.items() if k != "base_learning_rate"}) for where, found in sources]
    if "learning_rate" in settings:
        return sources
    if name not in _read("sizes"):
        return [*sources, (f"base_learning_rate {base:g}", {"learning_rate": base})]
    width = SHAPES[recipe_shape(name)]["hidden_size"]
    rate = float(f"{base * 4096 / width:.6g}")  # 2.4e-4, not 2.3999999999999998e-4
    return [*sources, (f"base_learning_rate {base:g} at width 4096, here {width}", {"learning_rate": rate})]


def format_sources(sources: list[Source]) -> str:
    """YAML: each setting once, below a comment that says where it is from."""
    last = {key: index for index, (_, settings) in enumerate(sources) for key in settings}
    parts = []
    for index, (where, settings) in enumerate(sources):
        if left := {key: value for key, value in settings.items() if last[key] == index}:
            parts.append(f"# {where}\n{yaml.safe_dump(left, sort_keys=False, allow_unicode=True, width=120)}")
    return "\n".join(parts)


def _read(name: str) -> dict[str, Any]:
    return read_yaml(RECIPES / f"{name}.yaml") or {}


def _read_head(kind: str) -> dict[str, Any]:
    """A head's settings and sections; ValueError if there is no file, or a section of an unknown name."""
    path = RECIPES / f"{kind}.yaml"
    if not path.is_file():
        raise ValueError(f"the {kind} head has no recipes: {path} is missing; create it, its settings may be empty")
    head = _read(kind)
    valid = ("sizes", "papers", "recipes", *_read("sizes"), *_read("papers"))
    if unknown := [key for key, value in head.items() if isinstance(value, dict) and key not in valid]:
        raise ValueError(f"{path}: unknown section {unknown[0]}; valid are {', '.join(valid)}")
    return head
