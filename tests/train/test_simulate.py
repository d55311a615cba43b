"""Simulated β: the worked example, and agreement with real decoding on the same prompts."""

import pytest
import torch

from draft_heads.heads.base import Rows
from draft_heads.inference.drafters.heads.ctc import CTCDrafter
from draft_heads.inference.drafters.heads.ctc_search import build_tree
from draft_heads.inference.engine import DecodingEngine
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


@pytest.mark.parametrize("mode", ["prefix", "raw"])
def test_simulated_beta_is_the_decoders_beta(mode):
    target = load_target("llama", torch.float64)
    prompts, settings = make_prompts(target, 6), GenerationSettings(48)
    texts = [
        (p, DecodingEngine(target, CTCDrafter(_head(target), target, 4)).generate(p, settings).tokens) for p in prompts
    ]
    head = trained_head(target, texts, steps=60)
    engine = DecodingEngine(target, CTCDrafter(head, target, 16, mode))
    for prompt, answer in texts:
        row = torch.tensor([prompt + answer])
        positions = torch.arange(row.shape[1])[None]
        segments = torch.ones_like(row)
        hidden, _ = target.forward_rows(row, segments, positions)
        with torch.no_grad():
            frames = head.train_frames(Rows(hidden, row, segments, positions), positions, target.view())
            log_probs = head.frame_log_probs(frames, target.view())[0]
        simulated = walk(row[0], len(prompt), row.shape[1], lambda n, lp=log_probs: build_tree(lp[n], 16, mode))
        decoded = engine.generate(prompt, settings)
        assert simulated == (len(decoded.tokens), decoded.target_steps)


def _head(target):
    from draft_heads.scripts.checks.lossless_matrix import untrained_head

    return untrained_head(target).to(target.dtype)
