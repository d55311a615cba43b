"""One target step: tree → masked forward → accepted path → commit. Used by the engines and by draft models alike.

Shapes: B sequences, M nodes of a tree, R = M+1 rows of the target's forward (row 0 = base token), H hidden,
A = max_depth+1 accepted rows at most, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draft_heads.inference.generation import Clock
from draft_heads.inference.processors import TextProcessors
from draft_heads.inference.sampling import Sampling
from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree, ancestor_rows, depths
from draft_heads.inference.verify import Accept, accept_exact


def select_layers(states: Tensor, layers: Sequence[int], wanted: Sequence[int]) -> Tensor | None:
    """[…, k·H] of the k `wanted` layers, from the states of `layers` side by side; None for none."""
    if not wanted:
        return None
    each = dict(zip(layers, states.chunk(len(layers), dim=-1)))
    return torch.cat([each[layer] for layer in wanted], dim=-1)


@dataclass(frozen=True)
class VerifiedStep:
    """What one target step committed: the tokens that it added to the target's cache, and the token after each.

    On the device, of fixed sizes: only the first `count` of a text's A rows are committed, the others repeat the last
    of them.

    tokens       [B, A] int64, newly committed tokens in order (the prompt after the prefill; afterwards the old base
                 token followed by the accepted drafts)
    next_tokens  [B, A] int64, the token after each; after the last committed one this is the next base token
    hidden       [B, A, H], the target's hidden state at each of them, as the LM head reads it
    count        [B] int64, at least 1; 0 for a slot without a text
    choices      [B, R] int64, the target's own choice at every row of the forward, −1 at a node that a hybrid's merged
                 tree left out; None after the prefill
    source       [B, A] int64, which drafter proposed the token after each (`DraftTree.source`); −1: the target itself;
                 None after the prefill
    tree         the trees that were verified; None after the prefill
    aux_hidden   [B, A, k·H], the outputs of the drafter's `target_layers` side by side, like `hidden`; None for none

    Two lists hold what the host has already read of each text, for drafters that draft there; else they are None:

    new_tokens     what it added to the text: accepted drafts and the new base token; first the prompt, too
    read_choices   `choices`, if the drafter reads them
    """

    tokens: Tensor
    next_tokens: Tensor
    hidden: Tensor
    count: Tensor
    choices: Tensor | None = None
    source: Tensor | None = None
    tree: DraftTree | None = None
    aux_hidden: Tensor | None = None
    new_tokens: list[list[int]] | None = None
    read_choices: list[list[int]] | None = None

    @classmethod
    def of_prompt(cls, prompt: Tensor, hidden: Tensor, base: Tensor, aux_hidden: Tensor | None = None) -> VerifiedStep:
        """After the prefill of one text's `prompt [n]`: hidden [n, H], base [1] the target's own next token."""
        next_tokens = torch.cat([prompt[1:], base])[None]
        aux_hidden = None if aux_hidden is None else aux_hidden[None]
        return cls(prompt[None], next_tokens, hidden[None], torch.full_like(base, len(prompt)), aux_hidden=aux_hidden)

    def map(self, change: Callable[[Tensor], Tensor]) -> VerifiedStep:
        """The same step with `change` applied to every tensor."""
        return VerifiedStep(
            tokens=change(self.tokens),
            next_tokens=change(self.next_tokens),
            hidden=change(self.hidden),
            count=change(self.count),
            choices=None if self.choices is None else change(self.choices),
            source=None if self.source is None else change(self.source),
            tree=None if self.tree is None else self.tree.map(change),
            aux_hidden=None if self.aux_hidden is None else change(self.aux_hidden),
        )

    def tensors(self) -> list[Tensor]:
        """All of them, the tree's included."""
        own = [self.tokens, self.next_tokens, self.hidden, self.count, self.choices, self.source, self.aux_hidden]
        return [x for x in own if x is not None] + ([] if self.tree is None else self.tree.tensors())

    def of_text(self, index: int, tree: DraftTree | None) -> VerifiedStep:
        """The step of one of B texts, whose own tree is `tree`, without padding rows."""
        own, new, read = slice(index, index + 1), self.new_tokens, self.read_choices
        step = replace(self, tree=None).map(lambda x: x[own])
        return replace(
            step,
            tree=tree,
            choices=None if step.choices is None or tree is None else step.choices[:, : 1 + len(tree)],
            new_tokens=None if new is None else new[own],
            read_choices=None if read is None else read[own],
        )

    @property
    def base(self) -> Tensor:
        """[B] int64, the target's own next token after the last committed one."""
        return self.next_tokens[..., -1]


def verify_step(
    target: Target,
    cache: KVCache,
    base: Tensor,
    tree: DraftTree,
    max_depth: int,
    end: Tensor | None = None,
    sampling: Sampling | None = None,
    accept: Accept = accept_exact,
    target_layers: Sequence[int] = (),
    processors: TextProcessors | None = None,
    clock: Clock | None = None,
) -> VerifiedStep:
    """Verify one tree after each of B cached texts, accept a path, commit it to `cache`; copies nothing to the host.

    base       [B] int64, the target's own next token of each sequence
    max_depth  no tree is deeper
    end        [B] int64, the length at which each text must end: nothing deeper is accepted; None: no bound
    target_layers  whose outputs the drafter reads
    processors     what changes the logits by the text; it reads the tokens on the host
    clock          counts what ends with the target's choices as `verify`; the caller counts what follows
    """
    clock = clock or Clock()
    if len(tree) == 0:
        plain = _plain_step(target, cache, base, tree, max_depth, sampling, target_layers, processors)
        clock.lap("verify")
        return plain
    # 1. Verify: one forward over the base token and all nodes gives the target's choice after each.
    sees = ancestor_rows(tree.parents, max_depth)  # [B, R, R]
    depth = depths(sees)  # [B, R]
    if end is not None:
        tree = tree.limit_depth((end - cache.lengths - 1)[:, None], depth[:, 1:])
    rows = torch.cat([base[:, None], tree.tokens], dim=1)  # [B, R]
    hidden, logits, aux_hidden = target.forward_tree(rows, depth, sees, cache, target_layers)
    if processors is not None:
        logits, acceptable = processors(logits, rows, sees)
        tree = replace(tree, candidate=tree.candidate & acceptable[:, 1:])
    chosen = choices(logits, depth + cache.lengths[:, None] + 1, sampling)
    clock.lap("verify")
    # 2. Accept the longest path that the target chose itself; 3. commit it.
    path, count, next_base = accept(tree, chosen, logits, sees, depth, max_depth)
    cache.commit(path, count)

    tokens = rows.gather(1, path)  # [B, A]
    from_last = torch.arange(max_depth + 1, device=path.device) >= count[:, None] - 1
    next_tokens = torch.where(from_last, next_base[:, None], tokens.roll(-1, -1))
    source = torch.cat([torch.full_like(base, -1)[:, None], tree.source], dim=1).gather(1, path)
    source = source.roll(-1, -1).masked_fill(from_last, -1)
    return VerifiedStep(
        tokens=tokens,
        next_tokens=next_tokens,
        hidden=_rows_at(hidden, path),
        count=count,
        choices=chosen,
        source=source,
        tree=tree,
        aux_hidden=None if aux_hidden is None else _rows_at(aux_hidden, path),
    )


def _plain_step(
    target: Target,
    cache: KVCache,
    base: Tensor,
    tree: DraftTree,
    max_depth: int,
    sampling: Sampling | None,
    target_layers: Sequence[int],
    processors: TextProcessors | None,
) -> VerifiedStep:
    """`verify_step` of empty trees in fewer operations: nothing to accept, and nothing to move in the cache."""
    depth = torch.zeros_like(base)[:, None]
    sees = torch.ones_like(depth, dtype=torch.bool)[..., None]
    hidden, logits, aux_hidden = target.forward_tree(base[:, None], depth, sees, cache, target_layers)
    if processors is not None:
        logits, _ = processors(logits, base[:, None], sees)
    chosen = choices(logits, cache.lengths[:, None] + 1, sampling)  # [B, 1]
    count = torch.ones_like(base)
    cache.lengths += count
    fill = [-1, max_depth + 1]
    tokens, next_tokens, source = (x.expand(fill) for x in (base[:, None].clone(), chosen, depth - 1))
    hidden = hidden.expand(*fill, -1)
    aux_hidden = None if aux_hidden is None else aux_hidden.expand(*fill, -1)
    return VerifiedStep(tokens, next_tokens, hidden, count, chosen, source, tree, aux_hidden)


def _rows_at(states: Tensor, path: Tensor) -> Tensor:
    """[B, A, H] of states `[B, R, H]` at rows `path [B, A]`."""
    return states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))


def choices(logits: Tensor, positions: Tensor, sampling: Sampling | None) -> Tensor:
    """[...] int64, the target's own token at absolute `positions [...]`, from `logits [..., V]`."""
    if sampling is None:
        return logits.argmax(-1)
    return sampling.choices(logits.flatten(0, -2), positions.flatten()).view_as(positions)
