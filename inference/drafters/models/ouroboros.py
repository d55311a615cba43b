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

from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, ClassVar

from draft_heads.configs.options import option
from draft_heads.inference.drafters.base import Builder
from draft_heads.inference.drafters.models.draft_model import ModelDrafter
from draft_heads.inference.drafters.options import DrafterOptions
from draft_heads.inference.drafters.text.base import target_choices
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.phrase_pool import Phrase, PhrasePool
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree, TokenTrie


@dataclass(frozen=True)
class OuroborosOptions(DrafterOptions):
    tuned: ClassVar[tuple[str, ...]] = ("gamma", "w", "p", "k")
    tuned_by: ClassVar[str] = "scripts/tune_ouroboros.py"

    gamma: int = option(7, "tokens of the draft at least", least=1)
    w: int = option(15, "columns of the draft model's window, and most phrases of a first token", least=1)
    p: int = option(6, "tokens of a phrase, the paper's β", least=2)
    k: int = option(3, "phrases that lengthen the draft", least=1)
    beside: int = option(3, "phrases below the base token (0: the paper)", least=0)
    max_nodes: int = option(0, "cuts phrases first, then the draft (0: no limit)", least=0)
    accelerate: int = option(1, "0: plain steps of the draft model", choices=(0, 1))
    lengthen: int = option(1, "0: verify no phrases", choices=(0, 1))
    from_verification: int = option(1, "0: learn no phrases from the target's choices", choices=(0, 1))
    reuse_history: int = option(1, "0: forget the phrases with the prompt", choices=(0, 1))
    from_text: int = option(1, "0: learn none from the text (the paper)", choices=(0, 1))


class OuroborosDrafter(ModelDrafter):
    """Drafts the draft model's continuation (the trunk) and, after its last token, branches from a pool of phrases."""

    sources = ("ouroboros",)
    reads_choices = True
    kind = "ouroboros"
    title = "a draft model's tokens, drafted and lengthened by phrases"
    options_type = OuroborosOptions
    options: OuroborosOptions

    def __init__(self, model: Target, **options: Any) -> None:
        """model: the draft model, on the target's device; options: see `OuroborosOptions`."""
        self.options = chosen = OuroborosOptions(**options)
        p, pool = chosen.p, PhrasePool(chosen.p, chosen.w)
        trunk = chosen.gamma + (p - 1) * chosen.accelerate  # the draft model's last forward may give a whole phrase
        phrases = (chosen.k + chosen.beside) * chosen.lengthen
        needed = trunk + phrases * (p - 1)
        nodes = min(needed, chosen.max_nodes or needed)
        inner = LookaheadDrafter(model.device, pool, n=p, w=chosen.w) if chosen.accelerate else None
        super().__init__(model, inner, nodes, max_depth=min(trunk + (p - 1) * chosen.lengthen, nodes))
        self.pool = pool
        self.gamma, self.longest = min(chosen.gamma, nodes), min(trunk, nodes)
        self.k, self.beside = (chosen.k, chosen.beside) if chosen.lengthen else (0, 0)
        self.carries_over = bool(chosen.reuse_history)
        self._trunk: list[int] = []
        self._branches: list[tuple[Phrase, list[int]]] = []  # each with the nodes of its tokens but the first
        self._proposed: DraftTree | None = None

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: Any) -> OuroborosDrafter:
        return cls(build.draft_model(cls.kind, path), **options)

    def start(self) -> None:
        super().start()
        self._proposed = None
        if not self.options.reuse_history:
            self.pool.clear()

    def forget(self) -> None:
        self.pool.clear()

    def read(self, tokens: list[int]) -> None:
        super().read(tokens)
        if self.options.from_text and self.options.from_verification:
            length, end = self.pool.length, len(self._text)
            for start in range(max(0, end - len(tokens) - length + 1), end - length + 1):
                self.pool.add(self._text[start : start + length])

    def end(self, slot: int, tokens: list[int]) -> None:
        if self.carries_over:
            self.read(tokens)

    def observe(self, step: VerifiedStep, slot: int | None = None) -> None:
        super().observe(step, slot)
        choices = target_choices(step, self._proposed) if self.options.from_verification else None
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
        """Those of the draft model, and the number of phrases, which a slot that has had no text does not tell."""
        found = super().findings()
        return found | ({"phrases": float(len(self.pool))} if self.loop.forwards else {})  # of now: not added up


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
