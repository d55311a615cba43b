"""Small random models and heads the inference tests share."""

import torch

from heads.base import target_sizes
from heads.ctc import CTCConfig, CTCHead
from scripts.lossless_matrix import RANDOM_TARGETS, load_target, make_prompts, untrained_head

__all__ = ["RANDOM_TARGETS", "load_target", "make_head", "make_prompts", "untrained_head"]


def make_head(target, seed=1, scale=0.05, **settings):
    """An untrained head, disturbed so that its frames and context projections all matter."""
    torch.manual_seed(seed)
    head = CTCHead(CTCConfig(**target_sizes(target.config), **settings))
    for parameter in head.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    return head.to(target.dtype)
