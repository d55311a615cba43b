"""Simulated β: the worked example, and agreement with real decoding on the same prompts."""

import pytest
import torch

from draft_heads.heads.base import Rows
from draft_heads.inference.drafters.heads import ctc
from draft_heads.inference.drafters.registry import HEAD_DRAFTERS, drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.tree import DraftTree
from draft_heads.scripts.checks.lossless_matrix import load_target, make_prompts, trained_head
from draft_heads.train.simulate import answers, walk


def chain(tokens):
    return DraftTree.build(torch.tensor(tokens), torch.arange(len(tokens)) - 1)


def test_the_worked_example_takes_three_steps_for_five_tokens():
    row = torch.tensor([9, 9, 1, 2, 3, 4, 5])  # prompt 9 9, answer a b c d E
    drafts = {1: chain([2, 3, 8]), 4: chain([5, 7])}  # behind a (anchor 1), behind d (anchor 4)
    assert walk(row, 2, 7, drafts.__getitem__) == (5, 3)


def test_only_turns_that_are_greedy_throughout_are_walked():
    mask = torch.tensor([0, 1, 1, 0, 1, 1]).bool()
    text, greedy = torch.tensor([9, 1, 2, 9, 3, 4]), torch.tensor([-100, 1, 2, 9, 3, 5])
    assert list(answers(mask, text, greedy)) == [(1, 3)]


@pytest.mark.parametrize(
    "kind,settings,tree",
    [
        ("ctc", {}, "prefix"),
        ("ctc", {}, "raw"),
        ("ctc", {"label_context": 4}, "prefix"),
        ("ctc", {"frames_from": "chain"}, "prefix"),
        ("chimera", {}, "best"),
        ("eagle3", {"target_layers": [1]}, "best"),
        ("hydra", {"prefix_attention": True}, "best"),
        ("medusa", {}, "best"),
    ],
)
def test_simulated_beta_is_the_decoders_beta(monkeypatch, kind, settings, tree):
    target = load_target("llama", torch.float64)
    prompts, rules = make_prompts(target, 4), GenerationSettings(48)
    oracle = Oracle(target, rules)
    texts = [(prompt, oracle.answer(prompt)) for prompt in prompts]
    head = trained_head(target, texts, steps=60, kind=kind, **settings)
    engine = DecodingEngine(target, drafter_for(head, target, 16, tree=tree))
    monkeypatch.setattr(ctc.draft_tree, "__defaults__", (tree,))  # training simulates prefix trees only
    steps = 0
    for prompt, answer in texts:
        row = torch.tensor([prompt + answer])
        positions, segments = torch.arange(row.shape[1])[None], torch.ones_like(row)
        hidden, aux_hidden = target.forward_rows(row, segments, positions, head.config.target_layers)
        with torch.no_grad():
            rows = Rows(hidden, row, segments, positions, aux_hidden)
            propose_at = HEAD_DRAFTERS[kind].propose_from(head, rows, target.view(), 16)
            simulated = walk(row[0], len(prompt), row.shape[1], propose_at)
        decoded = engine.generate(prompt, rules)
        assert simulated == (len(decoded.tokens), decoded.target_steps)
        steps += decoded.target_steps
    assert steps < 0.95 * 4 * 48  # drafts were accepted
