"""What the tests of text drafters share: texts with many repetitions, and proposals as paths."""

import random

import torch

from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree
from tests.inference.trees import check_tree, only


def texts(count, length, alphabet=3, seed=0):
    """Random texts over so few tokens that everything occurs again."""
    draw = random.Random(seed)
    return [[draw.randrange(alphabet) for _ in range(draw.randrange(2, length))] for _ in range(count)]


def begin(drafter, text):
    """A text of at least two tokens is the prompt and the base token behind it."""
    prompt = torch.tensor(text[:-1])
    drafter.begin(0, prompt, 1000)
    drafter.observe(VerifiedStep.of_prompt(prompt, torch.empty(len(prompt), 0), torch.tensor(text[-1:])))


def go_on(drafter, base, tokens):
    """A step accepted all but the last of `tokens` behind the base token; the last is the new one."""
    text = torch.tensor([[base, *tokens]])
    count, hidden = torch.tensor([len(tokens)]), torch.empty(1, len(tokens), 0)
    drafter.observe(VerifiedStep(text[:, :-1], text[:, 1:], hidden, count, tree=DraftTree.empty()))


def proposal(drafter):
    """The tree's paths from the base token, checked: node order, siblings, sizes."""
    tree = only(drafter.propose())
    check_tree(tree)
    assert len(tree) <= drafter.max_nodes
    paths = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    assert max(map(len, paths), default=0) <= drafter.max_depth
    assert len(tree.log_probs) == len(tree) and bool((tree.log_probs <= 1e-6).all())
    return paths
