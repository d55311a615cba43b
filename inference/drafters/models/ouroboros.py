"""Ouroboros: a draft model that drafts phrase by phrase, lengthened by phrases (https://arxiv.org/abs/2402.13720).

Its four ingredients have a switch each, in the order of the paper's Table 4:

accelerate         lookahead decoding inside the draft model; its N-grams are the phrases (section 3.1)
lengthen           the K newest phrases that begin with the draft's last token are verified after it (3.2)
from_verification  the target's choices at rejected drafts and unused phrases become phrases (3.3)
reuse_history      the phrases of one prompt are kept for the next (3.4)

Without all four it is speculative decoding. Two options go beyond the paper; 0 turns them off. `beside`, part of
lengthen: so many phrases that begin with the base token are verified beside the trunk, in case the draft fails early.
`from_text`, part of from_verification: the n-grams of the text, prompt and answer, become phrases.

Names: d the draft, v the target's choices (v_i in place of d_i, v_1 after the base token), p phrases of P tokens.
"""

from __future__ import annotations

from itertools import groupby, takewhile
from typing import Any, ClassVar

from draft_heads.configs.options import check_whole
from draft_heads.inference.drafters.base import Builder
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.text.base import check_positive, target_choices
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.phrase_pool import Phrase, PhrasePool
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree, TokenTrie

SWITCHES = ("accelerate", "lengthen", "from_verification", "reuse_history", "from_text")


class OuroborosDrafter(DraftModelDrafter):
    """Drafts the draft model's continuation (the trunk) and, after its last token, branches from a pool of phrases."""

    sources = ("ouroboros",)
    reads_choices = True
    kind = "ouroboros"
    options: ClassVar[dict[str, Any]] = {
        **{"gamma": 7, "w": 15, "p": 6, "k": 3, "beside": 3, "max_nodes": 0},
        **dict.fromkeys(SWITCHES, 1),
    }
    tuned_options: ClassVar[dict[str, type]] = dict.fromkeys(("gamma", "w", "p", "k"), int)
    tuned_by = "scripts/tune_ouroboros.py"

    def __init__(
        self,
        model: Target,
        max_nodes: int = 0,
        gamma: int = 7,
        w: int = 15,
        p: int = 6,
        k: int = 3,
        beside: int = 3,
        from_text: int = 1,
        accelerate: int = 1,
        lengthen: int = 1,
        from_verification: int = 1,
        reuse_history: int = 1,
    ) -> None:
        """model: the draft model, on the target's device; gamma: tokens of the trunk at least; w: columns of the draft
        model's window, and most phrases of a first token; p: tokens of a phrase (the paper's β); k: phrases that
        lengthen; beside: phrases below the base token; max_nodes: cuts phrases first, then the trunk, 0: no limit.
        The other options are 0 or 1, see above."""
        switches = (accelerate, lengthen, from_verification, reuse_history, from_text)
        check_positive(gamma=gamma, w=w, k=k)
        for name, value in (("beside", beside), ("max_nodes", max_nodes)):
            check_whole(f"drafter option {name}", value, remedy="leave it out for the default")
        if not all(switch in (0, 1) for switch in switches) or min(beside, max_nodes) < 0:
            raise ValueError(
                f"Ouroboros' switches ({', '.join(SWITCHES)}) are 0 or 1, beside and max_nodes are not negative; "
                f"got {', '.join(map(str, switches))}, {beside} and {max_nodes}"
            )
        self.pool = PhrasePool(p, w)
        trunk = gamma + (p - 1) * accelerate  # the draft model's last forward may give a whole phrase
        needed = trunk + (k + beside) * (p - 1) * lengthen
        nodes = min(needed, max_nodes or needed)
        inner = LookaheadDrafter(model.device, n=p, w=w, pool=self.pool) if accelerate else None
        super().__init__(model, inner, max_nodes=nodes, k=trunk + (p - 1) * lengthen)
        self.max_nodes = nodes
        self.gamma, self.longest = min(gamma, nodes), min(trunk, nodes)
        self.k, self.beside = (k, beside) if lengthen else (0, 0)
        self.from_verification, self.reuse_history, self.from_text = map(bool, switches[2:])
        self.carries_over = self.reuse_history
        self._trunk: list[int] = []
        self._branches: list[tuple[Phrase, list[int]]] = []  # each with the nodes of its tokens but the first
        self._proposed: DraftTree | None = None

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: Any) -> OuroborosDrafter:  # type: ignore[override]
        return cls(build.draft_model(cls.kind, path), **options)

    def start(self) -> None:
        super().start()
        self._proposed = None
        if not self.reuse_history:
            self.pool.clear()

    def read(self, tokens: list[int]) -> None:
        super().read(tokens)
        if self.from_text and self.from_verification:
            length, end = self.pool.length, len(self._text)
            for start in range(max(0, end - len(tokens) - length + 1), end - length + 1):
                self.pool.add(self._text[start : start + length])

    def observe(self, step: VerifiedStep) -> None:
        super().observe(step)
        choices = target_choices(step, self._proposed) if self.from_verification else None
        if choices is not None:
            self._learn(self.readable(choices))

    def propose(self) -> DraftTree:
        """The trunk is the tree's first nodes."""
        self._trunk = self.loop.draft(self._text, self.gamma)[: self.longest]
        trie = TokenTrie(self.max_nodes)
        nodes = trie.add(self._trunk)
        phrases = self.pool.newest(self._trunk[-1], self.k) if nodes else []
        self._branches = [(phrase, trie.add(phrase[1:], nodes[-1])) for phrase in phrases]
        for phrase in self.pool.newest(self._text[-1], self.beside):
            trie.add(phrase[1:])
        self._proposed = self.tree(trie.tokens, trie.parents, [0.0] * len(trie.tokens))
        return self._proposed

    def _learn(self, choices: list[int]) -> None:
        """Add phrases from the target's choices at the base token and at every node."""
        runs = matching_runs(self._trunk, choices)
        if runs is not None:
            for run in runs:
                for start in range(max(1, len(run) - self.pool.length + 1)):
                    self.pool.add(run[start : start + self.pool.length])
            return
        after = [
            (phrase, [choices[len(self._trunk)], *(choices[node + 1] for node in nodes)])
            for phrase, nodes in self._branches
        ]
        agreed = [agreement(phrase, v) for phrase, v in after]
        used = agreed.index(max(agreed)) if any(agreed) else None
        for index, (phrase, v) in reversed(list(enumerate(after))):  # keeps their order in the pool
            if index != used and min(v) >= 0 and len(v) == len(phrase):  # all its nodes were verified
                self.pool.remove(phrase)
                self.pool.add([phrase[0], *v])

    def findings(self) -> dict[str, Any]:
        """Tokens per forward of the draft model, and the number of phrases."""
        return {**super().findings(), "phrases": float(len(self.pool))}  # of now: not added up


def agreement(phrase: Phrase, choices: list[int]) -> int:
    """How many of a phrase's tokens after the first equal the target's choices."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(phrase[1:], choices)))


def matching_runs(draft: list[int], choices: list[int]) -> list[list[int]] | None:
    """The runs d_i = v_i after the first rejected draft; None if every draft is accepted.

    Worked example: d = (a, b, x, c, e, f) and v = (a, b, y, c, e, g): x is rejected, and after it (c, e) is a run.
    """
    agrees = [token == v for token, v in zip(draft, choices)]
    if all(agrees):
        return None
    after = list(zip(draft, agrees))[agrees.index(False) :]
    return [[token for token, _ in run] for same, run in groupby(after, key=lambda pair: pair[1]) if same]
