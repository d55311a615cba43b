"""Drafting from a cut vocabulary: real token ids, trees of a head that never says the rest, the target's answers."""

import functools

import pytest
import torch
from torch import nn

from draft_heads.heads.checkpoint import head_variants
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from tests.inference.models import load_target, make_head
from tests.inference.trees import check_tree

HEADS = [
    ("medusa", {"layers": 1}),
    ("hydra", {"prefix_attention": True}),
    ("chimera", {}),
    ("chimera", {"projection": "shared"}),
    ("ctc", {}),
    ("ctc", {"frames_from": "chain"}),
    ("eagle3", {}),
]
SOME = torch.arange(211)[torch.arange(211) % 3 != 1]  # 140 of 211
RULES = GenerationSettings(40)


def drafting(target, head, steps=4, **options):
    """The trees of a few steps behind a prompt."""
    drafter, trees = drafter_for(head, target, 12, **options), []
    engine = DecodingEngine(target, drafter)
    propose = drafter.propose
    drafter.propose = lambda: trees.append(propose()) or trees[-1]
    engine.generate(list(range(3, 40)), GenerationSettings(steps))
    return trees


def cut_head(target, kind, settings, ids=SOME):
    head = make_head(target, kind, scale=0.4, **settings, draft_vocab_size=len(ids)).eval()
    head.set_draft_vocab(ids)
    return head


def never_saying(head, target, ids):
    """A head of the whole vocabulary that gives all but `ids` no probability."""
    never = torch.full((211,), -torch.inf, dtype=target.dtype).index_fill(0, ids, 0.0)
    if head.config.kind == "chimera" and head.config.projection == "full":
        head_logits = head.head_logits
        head.head_logits = lambda *given: head_logits(*given) + never
    elif hasattr(head, "heads") and head.config.kind != "chimera":
        for each in head.offset_heads:
            each.vocabulary.bias = nn.Parameter(never)
    elif head.config.kind == "eagle3":
        head.lm_head.bias = nn.Parameter(never)
    else:
        target.lm_head.bias = nn.Parameter(never)
    return head


@functools.cache
def uncut_weights(kind, settings, ids):
    """State dict of a whole head, and the same with vocabulary matrices cut to `ids`."""
    target = load_target("llama", torch.float64)
    state = make_head(target, kind, scale=0.4, **dict(settings)).state_dict()
    cut = {name: value[list(ids)] if len(value) == 211 else value for name, value in state.items()}
    return state, cut


@pytest.mark.parametrize("kind,settings", head_variants().values())
def test_a_draft_vocabulary_of_all_tokens_drafts_the_same_trees(kind, settings):
    target = load_target("llama", torch.float64)
    one = drafting(target, cut_head(target, kind, settings, torch.arange(211)))
    other = drafting(target, make_head(target, kind, scale=0.4, **settings).eval())
    assert len(one) == len(other) > 1
    for mine, theirs in zip(one, other):
        assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.parents, theirs.parents)
        assert torch.equal(mine.log_probs, theirs.log_probs)


@pytest.mark.parametrize(
    "kind,settings,options",
    [*((*head, {}) for head in HEADS), ("ctc", {}, {"tree": "raw"}), ("medusa", {}, {"tree": "prefix"})],
)
def test_trees_are_those_of_a_head_that_never_says_the_other_tokens(kind, settings, options):
    state, cut = uncut_weights(kind, tuple(settings.items()), tuple(SOME.tolist()))
    target = load_target("llama", torch.float64)
    head = cut_head(target, kind, settings)
    head.load_state_dict({**cut, "draft_vocab": SOME})
    trees = drafting(target, head, **options)
    masked = load_target("llama", torch.float64)
    whole = make_head(masked, kind, **settings).eval()
    whole.load_state_dict(state)
    drafter = drafter_for(never_saying(whole, masked, SOME), masked, 12, **options)
    engine = DecodingEngine(target, drafter)  # verified by the target itself, which may say anything
    expected, propose = [], drafter.propose
    drafter.propose = lambda: expected.append(propose()) or expected[-1]
    engine.generate(list(range(3, 40)), GenerationSettings(4))
    assert len(trees) == len(expected) > 1
    for mine, theirs in zip(trees, expected):
        check_tree(mine)
        assert set(mine.tokens[0].tolist()) <= set(SOME.tolist()) and int(mine.tokens.max()) > 140
        assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.parents, theirs.parents)
        assert torch.allclose(mine.log_probs, theirs.log_probs, atol=1e-6)
