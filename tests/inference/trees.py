"""The rules that every draft tree keeps."""

from draft_heads.inference.tree import DraftTree


def check_tree(tree: DraftTree) -> None:
    """Raise ValueError unless the tree is topologically ordered and candidate siblings differ in their token."""
    seen: set[tuple[int, int]] = set()
    for index, (token, parent, candidate) in enumerate(
        zip(tree.tokens.tolist(), tree.parents.tolist(), tree.candidate.tolist())
    ):
        if not -1 <= parent < index:
            raise ValueError(f"a node's parent must come before it: node {index} has parent {parent}")
        if candidate and (parent, token) in seen:
            raise ValueError(f"siblings must differ: node {index} repeats token {token} under parent {parent}")
        if candidate:
            seen.add((parent, token))
