"""The rules that every draft tree keeps."""

import torch

from draft_heads.inference.tree import DraftTree


def check_tree(tree: DraftTree) -> None:
    """ValueError unless each text's tree is topologically ordered and candidate siblings differ in their token."""
    columns = torch.stack([tree.tokens, tree.parents, tree.candidate.long()], dim=-1)  # [B, M, 3] or [M, 3]
    for nodes in columns if columns.dim() > 2 else [columns]:
        seen: set[tuple[int, int]] = set()
        for index, (token, parent, candidate) in enumerate(nodes.tolist()):
            if not -1 <= parent < index:
                raise ValueError(f"a node's parent must come before it: node {index} has parent {parent}")
            if candidate and (parent, token) in seen:
                raise ValueError(f"siblings must differ: node {index} repeats token {token} under parent {parent}")
            if candidate:
                seen.add((parent, token))


def only(tree: DraftTree) -> DraftTree:
    """The tree of the only text, whose tensors are [M]."""
    assert len(tree.tokens) == 1
    return tree.map(lambda x: x[0])
