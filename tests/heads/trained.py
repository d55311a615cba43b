"""Heads fitted to a small target's own answers, and the steps that training simulates along them."""

import functools

import torch

from draft_heads.heads.base import Rows
from draft_heads.heads.checkpoint import head_classes, head_variants
from draft_heads.inference.generation import GenerationSettings
from draft_heads.scripts.checks.lossless_matrix import trained_head
from draft_heads.train.held_out import replay_answers, replay_drafter
from tests.inference.models import load_target, make_prompts, oracle_of

RULES = GenerationSettings(40)


@functools.cache
def texts():
    """A target in float64 and its own answers."""
    target = load_target("llama", torch.float64)
    oracle = oracle_of("llama", torch.float64, RULES)
    return target, [(prompt, oracle.answer(prompt)) for prompt in make_prompts(target, 2)]


@functools.cache
def trained(name, size):
    """A variant fitted to the answers, so that drafts are accepted; size: of its draft vocabulary, 0 for all."""
    (target, known), (kind, options) = texts(), head_variants()[name]
    layers = head_classes(kind)[1].usual_layers(target.config.num_hidden_layers)
    return trained_head(target, known, 30, kind, **options, target_layers=layers, draft_vocab_size=size)


def simulated(head, target, prompt, answer, nodes):
    """[(new tokens, target steps)] as training measures them along the text."""
    row = torch.tensor([prompt + answer])
    rows = Rows.of(torch.empty(0), row)
    layers = head.config.target_layers
    hidden, aux_hidden = target.forward_rows(row, rows.segment_ids, rows.position_ids, layers)
    batch = {"input_ids": row, "greedy_ids": row, "mask": torch.arange(row.shape[1])[None] >= len(prompt)}
    batch |= {"segment_ids": rows.segment_ids, "position_ids": rows.position_ids, "hidden": hidden}
    batch |= {} if aux_hidden is None else {"aux_hidden": aux_hidden}
    return replay_answers(replay_drafter(head, target, target.view(), nodes), batch)
