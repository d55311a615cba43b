"""Small random models and heads the inference tests share."""

import torch

from heads.base import target_sizes
from heads.checkpoint import head_classes
from scripts.lossless_matrix import RANDOM_TARGETS, load_target, make_prompts, untrained_head

__all__ = ["RANDOM_TARGETS", "load_target", "make_head", "make_prompts", "untrained_head"]


def make_head(target, kind="ctc", seed=1, scale=0.05, **settings):
    """An untrained head, disturbed so that all its parts matter."""
    torch.manual_seed(seed)
    head_type, config = head_classes(kind)
    head = head_type(config(**target_sizes(target.config), **settings))
    for parameter in head.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    return head.to(target.dtype)
