"""What training a head takes in memory, from sizes alone: nothing is loaded."""

from __future__ import annotations

from typing import Any

import torch

from draft_heads.configs.options import option_names
from draft_heads.data.common.model_sizes import count_parameters
from draft_heads.heads.base import DraftHead
from draft_heads.heads.block import DecoderBlock
from draft_heads.heads.checkpoint import head_classes, new_head

ASSUMED_LENGTH = 512
"""Tokens of a row where a recipe leaves them to the dataset."""


def make_head(config: Any, kind: str, settings: dict[str, Any]) -> DraftHead:
    """A head without memory for a target's configuration."""
    with torch.device("meta"):
        return new_head(kind, config.get_text_config(decoder=True), **settings)


def training_memory(config: Any, kind: str, recipe: dict[str, Any], shared: int = 1) -> dict[str, float]:
    """GiB on each GPU by part, and in all by ZeRO stage on 8 GPUs: target, head, activations, zero0 … zero3.

    shared: GPUs that the 8 split the target among (--shard_target): each has its share, embedding and LM head, and two
    layers while they run; 1: it is whole on each

    An estimate: the target in 16 bits; 16 bytes for each parameter of the head (weight and gradient in 16 bits, a
    float32 weight and two Adam moments), of which ZeRO 1 shards 12, ZeRO 2 also the gradients, whose sums it has in
    float32, ZeRO 3 all; at most the activations of one micro-batch, of short conversations with every token an anchor;
    2 GiB for CUDA.
    """
    settings = {key: recipe[key] for key in option_names(head_classes(kind)[1]) if recipe.get(key) is not None}
    if settings.get("draft_vocab_size", 0) >= config.get_text_config(decoder=True).vocab_size:  # as in training
        del settings["draft_vocab_size"]
    if not settings.get("target_layers"):
        settings.pop("target_layers", None)
    head = make_head(config, kind, settings)
    parameters, sizes = sum(p.numel() for p in head.parameters()), head.config
    rows, longest = recipe.get("per_device_train_batch_size", 8), recipe.get("max_length") or ASSUMED_LENGTH
    tokens, anchors = rows * longest, rows * (sizes.anchors or longest)
    if by_tokens := recipe.get("tokens_per_batch"):
        tokens = anchors = by_tokens  # a batch of rows that have no more than `anchors` tokens each
    drafted = anchors * getattr(sizes, "frames", sizes.offsets)
    read = tokens if any(isinstance(module, DecoderBlock) for module in head.modules()) else 0
    forward = tokens * (8 * sizes.hidden_size + 3 * sizes.intermediate_size)  # of one layer of the target at a time
    saved = (read + drafted) * (12 * sizes.hidden_size + 4 * sizes.intermediate_size)  # a block's, for the backward
    parts = {
        "target": 2 * count_parameters(config) / 2**30,
        "head": 16 * parameters / 2**30,
        "activations": 2 * (forward + saved) / 2**30 + 2,
    }
    on_8 = parts["target"] / shared + parts["activations"]
    if shared > 1:
        text = config.get_text_config(decoder=True)
        on_8 += 2 * parts["target"] / text.num_hidden_layers + 2 * 2 * text.vocab_size * text.hidden_size / 2**30
    for stage, (whole, sharded) in enumerate(((16, 0), (4, 12), (2, 16), (0, 18))):
        parts[f"zero{stage}"] = on_8 + (whole + sharded / 8) * parameters / 2**30
    return parts
