"""What a model's config and code say of its attention: types of layers, sliding window, longest text."""

from __future__ import annotations

import inspect
import logging
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from draft_heads.data.common.pretrained import rope_settings

logger = logging.getLogger(__name__)


def check_decoder_only(config: Any, name: str) -> None:
    """ValueError for an encoder-decoder model."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"the target must be a decoder-only causal LM; {name or config.model_type} is an encoder-decoder model "
            f"({config.model_type}); pick another target"
        )


@dataclass(frozen=True)
class Architecture:
    """How a decoder attends.

    layer_types    "full_attention" or "sliding_attention" of every layer
    window         tokens that a sliding layer sees, its own included; None: no layer slides
    by_layer_type  the decoder takes a mask for each type of layer, not one for all
    max_positions  how many tokens fit, prompt and answer together
    """

    layer_types: list[str]
    window: int | None
    by_layer_type: bool
    max_positions: int

    @classmethod
    def of(cls, config: Any, decoder: Any, name: str) -> Architecture:
        """From the text config of a model and its decoder; ValueError for other types of layers.

        The log says where texts must end early, because a model would treat longer ones in another way.
        """
        layer_types = list(getattr(config, "layer_types", None) or ())
        kinds = {*layer_types, *(getattr(config, "attention_layers", None) or ())}  # GPT-Neo's: "global" and "local"
        if unknown := sorted(kinds - {"full_attention", "sliding_attention", "global"}):
            raise ValueError(
                f"the target must be a decoder with full or sliding-window attention; {name} has layers of type "
                f"{', '.join(unknown)}; pick another target"
            )
        keep, positions = getattr(config, "keep_window_size", None), _positions(config, name)
        if keep is not None and keep < positions:  # Doge's; our masks are longer than a text
            raise ValueError(
                f"a target must attend to the same keys whatever the length of its mask; {name} drops some of one "
                f"longer than keep_window_size, {keep} of {positions}; pick another target"
            )
        read = "use_sliding_window" in _code(config) + _code(decoder)
        uses_window = not read or getattr(config, "use_sliding_window", True) is not False
        if uses_window and layer_types and not _varies(config) and getattr(config, "sliding_window", None):
            code = _code(decoder)
            if "layer_type" not in code and ("sliding_window" in code or "sliding_attention" in layer_types):
                layer_types = []  # Mistral's and Mixtral's layers all slide, and Llama's none, whatever a config says
        by_layer_type = "sliding_attention" in layer_types
        slides = by_layer_type if layer_types else uses_window
        window = _window(config, name) if slides else None
        if window and not layer_types and "sliding_window" not in _code(decoder):
            positions, window = min(positions, window), None
            logger.info(
                f"{name} has a sliding_window that its attention ignores and the cache of `generate` does not: "
                f"texts end at {positions} tokens; remove it from config.json for longer ones"
            )
        everywhere = "full_attention" if window is None else "sliding_attention"
        return cls(layer_types or [everywhere] * config.num_hidden_layers, window, by_layer_type, positions)


def _code(part: Any) -> str:
    """The files that define the class of a decoder or config and those that it inherits from, of the model's own;
    nothing for a class without a file, as a notebook's."""
    found = ""
    for one in takewhile(lambda one: one not in (PreTrainedModel, PretrainedConfig, nn.Module), type(part).__mro__):
        with suppress(OSError, TypeError):
            found += Path(inspect.getfile(one)).read_text(encoding="utf-8")
    return found


def _varies(config: Any) -> bool:
    """Whether layers have windows of their own."""
    return "sliding_window" in (getattr(config, "per_layer_attributes", None) or ())


def _window(config: Any, name: str) -> int | None:
    """The one window of all sliding layers, None for none; ValueError where layers have windows of their own."""
    window: Any = None
    if _varies(config):
        window = [getattr(layer, "sliding_window", None) for layer in config.per_layer_config]
    else:
        window = getattr(config, "sliding_window", None)
    if window is not None and not isinstance(window, int):
        raise ValueError(
            f"the sliding layers of a target must have one window, given as one number; {name} has sliding_window "
            f"{window}; pick another target"
        )
    return window


def _positions(config: Any, name: str) -> int:
    """`max_position_embeddings`, or as many as YaRN stretches the original ones to, where a config says fewer; of
    long-rope models the length at which rotary frequencies change, because those of a longer text are others at every
    position and cached keys keep the old ones."""
    positions = int(getattr(config, "max_position_embeddings", 2**31))
    for rope in rope_settings(config):
        if rope.get("rope_type") == "yarn" and (original := rope.get("original_max_position_embeddings")):
            positions = max(positions, int(original * (rope.get("factor") or 1)))  # none: as far as the positions go
        if rope.get("rope_type") in ("linear", "dynamic") and (rope.get("factor") or 1) > 1:
            logger.info(f"{name} has {positions} positions: texts end there, also where its rotary factor reaches on")
        if rope.get("rope_type") == "longrope":
            positions = min(positions, int(rope["original_max_position_embeddings"]))
            logger.info(f"{name} has other rotary frequencies after {positions} tokens: texts end there")
    return positions
