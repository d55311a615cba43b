"""How large a target is: its parameters, the work of a token, its memory."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from draft_heads.data.common import model_sizes
from draft_heads.inference.target import sharded
from draft_heads.inference.target.target import Target


def parameters(target: Target) -> int:
    """Of the whole model; of one whose weights are packed those of its config, in which they have their shapes."""
    if hasattr(target.model.config, "quantization_config"):
        with suppress(ValueError), sharded.loading(None):  # a model of its config that no ZeRO stage of a head splits
            return model_sizes.count_parameters(target.model.config)
    return sum(sharded.size_of(p) for p in target.model.parameters())


def weights_per_token(target: Target) -> int:
    """Weights that the forward of a token multiplies with: of experts those of one token, and no embedding; of a config
    whose decoder cannot be made alone all weights."""
    with suppress(ValueError), sharded.loading(None):
        return model_sizes.weights_read_per_step(target.model.config)
    return parameters(target)


def bytes_in_memory(target: Target) -> int:
    """What this process holds of the model at once, about: of a split one its share, embedding and LM head, and two
    layers while they run; only what heads read if nothing is run."""
    read = nn.ModuleList([target.embedding, target.lm_head])
    held = nn.ModuleList([target.model, read]) if target.runs else read
    processes = torch.distributed.get_world_size() if target.split else 1
    layers = sharded.two_layers(target.decoder, len(target.layer_types)) if target.split else 0
    each = [
        sharded.size_of(x) * x.element_size() // (processes if sharded.is_split(x) else 1)
        for x in (*held.parameters(), *held.buffers())
    ]
    return sum(each) + layers * target.dtype.itemsize
