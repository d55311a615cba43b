"""Builds the draft trees of collapsed candidates from the frames of a CTC head.

Shapes: B texts, T frames, V vocabulary, M nodes of a tree, C labels considered, P alignments.

Every tree is a trie of *collapsed* candidates: a node's position in the text is its depth in the trie, and it sees
exactly its ancestors. Alignments, blanks and repeats leave no trace in it.

`prefix`  the M prefixes of highest Ψ. E[accepted length] of a prefix-closed tree S is Σ_{p∈S} Ψ(p) and a child's Ψ is
          never above its parent's, so these are the best M nodes under the head's own distribution.
`chain`   at each depth the label of highest Ψ after the one before, as most servers draft.
`raw`     the paper's: the most probable alignments, each collapsed (merge repeats, drop blanks), duplicates dropped.
`plain`   no collapse; an alignment counts up to its first blank (Table 2's "Medusa verify").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from draft_heads.heads.prefix_scores import PrefixState, child_scores, empty_prefix, extend, from_entry, runs
from draft_heads.heads.windows import rows_at
from draft_heads.inference.drafters.heads.level_tree import best_indices
from draft_heads.inference.target.host_sync import host_sync_allowed
from draft_heads.inference.tree import DraftTree, TokenTrie

TREE_MODES = ("prefix", "chain", "raw", "plain")


def build_tree(
    log_probs: Tensor,
    max_nodes: int,
    mode: str = "prefix",
    vocabulary: Tensor | None = None,
    bias_of: Callable[[Tensor | None], Tensor] | None = None,
) -> DraftTree:
    """The draft trees of the frames of B anchors, `[B, T, V+1]` (blank last): at most `max_nodes` nodes each.

    vocabulary [V]: the token of each class but the blank; None: the class is the token. bias_of: see `prefix_tree`.
    Raises ValueError for an unknown mode.
    """
    if mode not in TREE_MODES:
        raise ValueError(f"tree must be one of {', '.join(TREE_MODES)}; got {mode!r}")
    if mode in ("prefix", "chain"):
        tree = prefix_tree(log_probs, max_nodes, bias_of=bias_of, chain=mode == "chain")
    else:
        tree = DraftTree.stack([alignment_tree(of_text, max_nodes, mode == "raw") for of_text in log_probs])
    return tree if vocabulary is None else replace(tree, tokens=vocabulary[tree.tokens])


class PlainEmissions:
    """Prefix scores of frames that are independent of each other, for the labels that may matter.

    No prefix has a Ψ above the sum of a label's frame probabilities: the C labels of the largest sums (default 4M + 32)
    do if the next sum is below the M-th best Ψ.
    """

    def __init__(self, log_probs: Tensor, considered: int) -> None:
        """log_probs [B, T, V+1], blank last."""
        probs, blank = log_probs.exp().split([log_probs.shape[-1] - 1, 1], dim=-1)
        self._blank_runs, self.labels = runs(blank[..., 0]), every_label(log_probs)
        if considered < probs.shape[-1]:
            self.labels = probs.sum(1).topk(considered, sorted=False).indices
            probs = probs.gather(2, self.labels[:, None].expand(-1, probs.shape[1], -1))
        self._probs, self._entered = probs, from_entry(probs.mT, probs.mT, self._blank_runs)

    def start(self) -> PrefixState:
        """The empty prefix."""
        return empty_prefix(self._blank_runs)

    def child_scores(self, state: PrefixState) -> Tensor:
        """Ψ [B, M, C] of every child."""
        return child_scores(state, self._probs)

    def extend(self, state: PrefixState, parent: Tensor, column: Tensor) -> PrefixState:
        """The states of the chosen children, whose `column [B, M]` among the C labels is given."""
        return extend(state, parent, column, rows_at(self._entered, column))


def every_label(log_probs: Tensor) -> Tensor:
    """[B, V], all labels of frames `[B, T, V+1]`."""
    texts, _, classes = log_probs.shape
    return torch.arange(classes - 1, device=log_probs.device).expand(texts, -1)


class ContextEmissions:
    """The same where each label adds a bias to the logits after it (`heads.label_context`), for all labels.

    p_t(c | l) = E_tc·F_lc / Z_tl with E = exp z, F = exp bias, Z = E·F: products of small matrices.
    """

    def __init__(self, logits: Tensor, bias_of: Callable[[Tensor | None], Tensor]) -> None:
        """logits [B, T, V+1], blank last; bias_of: of classes [B, M] as the label before, `[B, M, V+1]`; None: of the
        base token, `[B, 1, V+1]`."""
        self.labels = every_label(logits)
        self._frames, self._bias_of = (logits - logits.amax(-1, keepdim=True)).exp(), bias_of
        self._last_level = self._weights(None)  # F [B, M, V+1] and 1 / Z [B, M, T] of the last level's prefixes

    def _weights(self, classes: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = self._bias_of(classes)
        factor = (bias - bias.amax(-1, keepdim=True)).exp()
        return factor, (factor @ self._frames.mT).clamp(min=1e-37).reciprocal()

    def _blank_runs(self) -> Tensor:
        factor, inverse = self._last_level
        return runs(self._frames[:, None, :, -1] * factor[..., -1:] * inverse)  # [B, M, T, T]

    def start(self) -> PrefixState:
        """The empty prefix."""
        return empty_prefix(self._blank_runs()[:, 0])

    def child_scores(self, state: PrefixState) -> Tensor:
        """Ψ [B, M, V] of every child."""
        factor, inverse = self._last_level
        scores = ((state.either * inverse) @ self._frames[..., :-1]) * factor[..., :-1]
        return scores if state.last is None else scores.scatter(-1, state.last[..., None], state.repeated)

    def extend(self, state: PrefixState, parent: Tensor, column: Tensor) -> PrefixState:
        """The states of the chosen children."""
        factor, inverse = self._last_level
        own = self._frames.gather(2, column[:, None].expand(-1, self._frames.shape[1], -1)).mT  # [B, M, T]
        before = factor.flatten(1).gather(1, parent * factor.shape[-1] + column)
        entering = own * before[..., None] * rows_at(inverse, parent)
        self._last_level = factor, inverse = self._weights(column)
        stays = own * factor.gather(2, column[..., None]) * inverse
        return extend(state, parent, column, from_entry(entering, stays, self._blank_runs()))


def prefix_tree(
    log_probs: Tensor,
    max_nodes: int,
    labels_considered: int | None = None,
    bias_of: Callable[[Tensor | None], Tensor] | None = None,
    chain: bool = False,
) -> DraftTree:
    """The `max_nodes` prefixes of highest Ψ over all depths, of each text's frames `[B, T, V+1]`; equal scores: the
    shorter prefix first.

    bias_of: see `ContextEmissions`, which then reads `log_probs` as logits. chain: one prefix a depth.

    The children of a level's nodes are one [M, T]×[T, C] product a text, whose M best are the next level; ancestors
    score at least as high, so no node of the answer is lost.
    """
    emissions: PlainEmissions | ContextEmissions
    if bias_of is None:
        emissions = PlainEmissions(log_probs, labels_considered or 4 * max_nodes + 32)
    else:
        emissions = ContextEmissions(log_probs, bias_of)
    state, considered = emissions.start(), emissions.labels.shape[1]
    beam = -1  # the tree's index of the level's first prefix
    scores: list[Tensor] = []
    columns: list[Tensor] = []
    parents: list[Tensor] = []
    deepest = min(log_probs.shape[1], max_nodes)
    for depth in range(deepest):
        level = emissions.child_scores(state).flatten(1)
        width = 1 if chain else min(max_nodes - depth, level.shape[1])  # a prefix brings `depth` shorter ones along
        best, flat = level.topk(width)
        found = sum(one.shape[1] for one in scores)
        if found >= max_nodes and host_sync_allowed(best.device):
            among_best = best > torch.cat(scores, dim=1).topk(max_nodes).values[:, -1:]  # of the others no child is
            kept = int(among_best.sum(1).amax())
            if not kept:
                break
            best, flat = best[:, :kept], flat[:, :kept]
        parent, column = flat // considered, flat % considered
        scores.append(best)
        columns.append(column)
        parents.append(parent + beam)
        if depth + 1 < deepest:
            state = emissions.extend(state, parent, column)
            beam = found

    all_scores = torch.cat(scores, dim=1)
    labels = emissions.labels.gather(1, torch.cat(columns, dim=1))
    tree = DraftTree.build(labels, torch.cat(parents, dim=1), all_scores.clamp(min=1e-37).log())
    return tree.take(best_indices(all_scores, max_nodes))  # of equals the shorter prefix; parents before children


def best_alignments(log_probs: Tensor, count: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The `count` most probable class sequences built from each frame's `top_k`: ([P, T] classes, [P] log-probs).

    Frames are independent, so the best `count` of the first t frames extend to the best of the first t+1.
    """
    frames, classes = log_probs.shape
    values, indices = log_probs.topk(min(top_k, classes), dim=-1)
    total = values.new_zeros(1)
    paths = indices.new_zeros(1, 0)
    for t in range(frames):
        combined = (total[:, None] + values[t]).flatten()
        total, flat = combined.topk(min(count, combined.numel()))
        choice = indices[t][flat % indices.shape[1]]
        paths = torch.cat([paths[flat // indices.shape[1]], choice[:, None]], dim=1)
    return paths, total


def collapsed(alignment: list[int], blank: int) -> list[int]:
    """Merge adjacent repeats, then drop blanks: `a a ε a b b → a a b`."""
    merged = [c for i, c in enumerate(alignment) if i == 0 or c != alignment[i - 1]]
    return [c for c in merged if c != blank]


def until_blank(alignment: list[int], blank: int) -> list[int]:
    """The alignment up to its first blank, repeats kept."""
    return alignment[: alignment.index(blank)] if blank in alignment else alignment


def alignment_tree(log_probs: Tensor, max_nodes: int, collapse: bool, top_k: int = 10) -> DraftTree:
    """The trie of the candidates of one text's most probable alignments in frames `[T, V+1]`, built on the host until
    it holds `max_nodes` nodes."""
    to_candidate = collapsed if collapse else until_blank
    blank = log_probs.shape[-1] - 1
    paths, totals = best_alignments(log_probs, 8 * max_nodes + 64, top_k)
    trie = TokenTrie(max_nodes)
    scores: list[float] = []
    for alignment, score in zip(paths.tolist(), totals.tolist()):
        trie.add(to_candidate(alignment, blank))
        scores += [score] * (len(trie.tokens) - len(scores))
    return DraftTree.of_lists(trie.tokens, trie.parents, scores, [0] * len(scores), log_probs.device)
