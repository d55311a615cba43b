"""The sizes of a model from its config alone: nothing is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from draft_heads.configs.recipes import SIZE_CLASSES

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "experts_per_token")
"""What configs of mixtures of experts call their number, and how many a token has."""


def _decoder(config: Any) -> nn.Module:
    """The decoder that a config describes, without its LM head and without memory."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"--target must be a decoder-only causal LM; got an encoder-decoder model ({config.model_type}); pick "
            "another target"
        )
    text = config.get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            decoder: nn.Module = AutoModel.from_config(text)
            return decoder
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the size of --target ({config.model_type}) cannot be read from its config ({reason}); name a recipe with "
            f"--config, one of {', '.join(name for _, name in SIZE_CLASSES)}"
        ) from error


def count_parameters(config: Any) -> int:
    """Parameters of the decoder that a model's whole config describes, every expert counted."""
    decoder, text = _decoder(config), config.get_text_config(decoder=True)
    tied = text.tie_word_embeddings if hasattr(text, "tie_word_embeddings") else config.tie_word_embeddings
    return sum(p.numel() for p in decoder.parameters()) + (0 if tied else text.vocab_size * text.hidden_size)


def weights_read_per_step(config: Any) -> int:
    """Weights that a decoding step of the target reads at batch 1: its layers, of experts those of one token, and the
    LM head, but no embedding table.

    Worked example: of 8 experts, 2 for each token, a quarter is read.
    """
    decoder, text = _decoder(config), config.get_text_config(decoder=True)
    experts = next((n for name in EXPERTS if (n := getattr(text, name, None))), 1)
    chosen = next((n for name in EXPERTS_PER_TOKEN if (n := getattr(text, name, None))), experts)
    read, of_experts = text.vocab_size * text.hidden_size, 0
    for name, module in decoder.named_modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        if "experts" in name.split("."):
            of_experts += own
        elif not isinstance(module, nn.Embedding):
            read += own
    return int(read + of_experts * chosen // experts)
