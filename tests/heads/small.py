"""Sizes, text and a lent target small enough to check heads by hand."""

import torch

from draft_heads.heads.base import Rows, TargetView

SIZES = {
    "hidden_size": 32,
    "vocab_size": 61,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "end_token_ids": [0],
}
FINGERPRINT = {"vocab_size": 61, "hidden_size": 32, "tokenizer_hash": "t", "chat_template_hash": "c"}


def disturbed(head_type, config, **settings):
    """An untrained head with all its parts moved away from zero."""
    torch.manual_seed(3)
    head = head_type(config(**{**SIZES, "target_fingerprint": FINGERPRINT, **settings}))
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return head


def lent_target():
    """An embedding and an LM head of random weights."""
    torch.manual_seed(1)
    return TargetView(torch.nn.Embedding(61, 32).requires_grad_(False), torch.randn(61, 32))


def text(rows=1, length=20, seed=0):
    """Random tokens and hidden states."""
    torch.manual_seed(seed)
    ids = torch.randint(1, 61, (rows, length))
    return Rows.of(torch.randn(rows, length, 32), ids)


def loss_of(head, rows, view, mask=None, **more):
    """The training loss of rows whose labels are their own tokens; mask: all the assistant's unless given."""
    mask = torch.ones_like(rows.input_ids, dtype=torch.bool) if mask is None else mask
    return head(rows.hidden, rows.input_ids, rows.input_ids, mask, view, rows.segment_ids, rows.position_ids, **more)
