"""Folders and hub ids of models: what is neither is refused in a sentence before anything loads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

MAY_BE_MISSING = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
"""For transformers' `cached_file`: None for a file that a folder or a model of the hub lacks."""

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def check_folder_or_hub_id(what: str, source: str) -> None:
    """ValueError for a path at which there is no folder: one that no hub id looks like, or whose parent exists."""
    path = Path(source)
    inside = len(path.parts) > 1 and path.parent.is_dir()
    if not path.is_dir() and (inside or path.exists() or not _HUB_ID.fullmatch(source)):
        found = "is a file" if path.exists() else "does not exist"
        if inside and not path.exists() and _HUB_ID.fullmatch(source):
            here = f", and is looked for in the folder {path.parent} here, not on the hub"
            raise ValueError(f"{what} {source} {found}{here}; name one that is in it, or run in another folder")
        raise ValueError(f"{what} {source} {found}; give an existing folder, or a hub id as OWNER/NAME")


def load_config(source: str, what: str = "--target") -> Any:
    """The configuration of a model; ValueError in a sentence if there is none."""
    check_folder_or_hub_id(what, source)
    try:
        return AutoConfig.from_pretrained(source)
    except Exception as error:  # a field that its class cannot use may raise any kind
        reason = " ".join(str(error).split()).split(". ")[0]
        if Path(source).is_dir():
            raise ValueError(
                f"{what} {source} is no model's folder: {reason}; give one with config.json, weights and tokenizer"
            ) from None
        if not isinstance(error, OSError):
            raise ValueError(f"{what} {source} cannot be used: {reason}; name another model") from None
        raise ValueError(f"{what}: there is no folder {source}, and no such model from the hub: {reason}") from None


def model_class(config: Any) -> Any:
    """transformers' class that loads a target: of multimodal models without a causal LM of their own the whole model,
    whose text part decodes."""
    causal = type(config) in AutoModelForCausalLM._model_mapping
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if multimodal and not causal else AutoModelForCausalLM


def layer_sizes(config: Any) -> Any:
    """A decoder's config with the sizes of one of its layers: where they differ (Gemma-4's sliding and full layers have
    other head sizes), the last with full attention.

    Worked example: layers sliding, full, sliding with head sizes 8, 16, 8 give a config whose `head_dim` is 16.
    """
    if not getattr(config, "is_heterogeneous", False):
        return config
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    full = [index for index, layer_type in enumerate(types) if layer_type == "full_attention"]
    return config.per_layer_config[full[-1] if full else -1]


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a model's config: one for all layers, or one per layer type."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
