"""A training step of a head at the shape of Llama-3.1-8B, on the meta device: what it needs, and that it needs no host.

`tests/test_every_head.py` takes such a step with every head. Nothing is computed; shapes are. A mask that selects rows
keeps all of them here, so memory is an upper bound.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from draft_heads.configs.recipes import load_recipe
from draft_heads.heads import cross_entropy, ctc_loss, label_context
from draft_heads.heads.base import DraftHead, Rows, TargetView
from draft_heads.heads.checkpoint import head_classes, new_head, recipe_settings
from draft_heads.heads.windows import Windows
from tests.meta import MetaOnly, NoHostValues

LENGTH, VOCABULARY = 4096, 128256
LLAMA_8B = SimpleNamespace(
    hidden_size=4096,
    num_hidden_layers=32,
    vocab_size=VOCABULARY,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
)


def attention_that_writes_no_scores(visible, anchors, per_anchor, left, right=None):
    """The shapes of FlexAttention on a GPU."""

    def attend(queries, keys, values):
        halves = zip(left, (keys, values) if right is None else right)
        keys, values = (torch.cat(both, dim=2) for both in halves)
        return queries + keys.sum() + values.sum()

    return attend


def causal_attention_that_writes_no_scores(segment_ids):
    return lambda queries, keys, values: queries + keys.sum() + values.sum()


def step(kind, monkeypatch, **changes):
    """(head, peak bytes of forward and backward above weights and inputs) with the recipe of 8B targets."""
    recipe = load_recipe(kind, "8b") | changes
    module = sys.modules[head_classes(kind)[0].__module__]
    for name, fake in (
        ("anchor_attention", attention_that_writes_no_scores),
        ("causal_attention", causal_attention_that_writes_no_scores),
    ):
        monkeypatch.setattr(module, name, fake, raising=False)
    for losses in (cross_entropy, ctc_loss, label_context):
        monkeypatch.setattr(losses, "logits_bytes", lambda states: 2**30)  # as on a GPU
    with torch.device("meta"):
        head = new_head(kind, LLAMA_8B, **recipe_settings(kind, recipe)).bfloat16().train()
        classes, count, offsets = head.config.classes, recipe["anchors"], head.config.offsets
        embedding = torch.nn.Embedding(VOCABULARY, 4096, dtype=torch.bfloat16).requires_grad_(False)
        view = TargetView(embedding, torch.empty(classes, 4096, dtype=torch.bfloat16))
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
        read = len(head.config.target_layers)
        aux_hidden = torch.empty(1, LENGTH, read * 4096, dtype=torch.bfloat16) if read else None
        rows = Rows.of(torch.empty(1, LENGTH, 4096, dtype=torch.bfloat16), ids, aux_hidden=aux_hidden)
        several = torch.zeros(1, count, dtype=torch.long)
        valid = torch.ones(1, count, dtype=torch.bool)
        windows = Windows(several, valid, torch.zeros(1, count, offsets, dtype=torch.long), several, valid)
    used = MetaOnly()
    with NoHostValues(masks_keep_all=True), used:
        loss = head.window_loss(rows, windows, view)
        loss.total.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in head.parameters())
    return head, used.peak


@pytest.mark.parametrize(
    "mistake",
    [
        lambda windows: int(windows.lengths.max()),
        lambda windows: windows.labels.tolist(),
        lambda windows: bool(windows.valid.all()),
        lambda windows: windows.lengths + torch.arange(windows.lengths.shape[1]),
        lambda windows: torch.zeros(3) + 1,
    ],
    ids=["int of a tensor", "a list of a tensor", "a question to the host", "arange without device", "a CPU tensor"],
)
def test_what_would_wait_for_the_gpu_or_leave_it_is_caught(mistake, monkeypatch):
    own = DraftHead.window_loss

    def mistaken(head, rows, windows, view):
        mistake(windows)
        return own(head, rows, windows, view)

    monkeypatch.setattr(DraftHead, "window_loss", mistaken)
    with pytest.raises((AssertionError, RuntimeError)):
        step("medusa", monkeypatch)
