"""The target's own greedy answers with the states of their texts, from one pass: for `data.labels`.

The tokens are those of `generate(do_sample=False)`, up to numerical ties, with drafts and without: with the
checkpoint's own logits processors, if its generation config asks for any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from draft_heads.data.labels.answers import Answer, in_order
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.labeller import checked_ids
from draft_heads.data.labels.loops import GOES_ON, IncrementalStop, LoopDetector, loop_start
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target

_FINISH: dict[str, Literal["end", "limit", "loop", "overflow"]] = {
    "eos": "end",
    "length": "limit",
    "context": "limit",
    "stop": "loop",
    "overflow": "overflow",
}


class TargetAnswerer:
    """Answers as `data.labels.answers.Answerer`, `batch_size` of them at a time."""

    def __init__(
        self,
        target: Target,
        batch_size: int = 32,
        cut_loops: bool = False,
        drafter: str = "",
        keep_hidden: bool = False,
        target_layers: Sequence[int] = (),
    ) -> None:
        """drafter: drafts the answers, as `evaluate.py --drafters` names it; "": none."""
        self.target, self._cut_loops = target, cut_loops
        self._keep_hidden, self._layers = keep_hidden, tuple(target_layers)
        spec = DrafterSpec.parse(drafter or "vanilla")
        self._engine = BatchEngine(target, build_drafter(spec, target, slots=batch_size))
        self._engine.check_kept_layers(self._layers)

    @classmethod
    def from_options(cls, target: Target, options: DistillOptions) -> TargetAnswerer:
        """Of a distillation."""
        return cls(
            target,
            options.batch_size,
            options.cut_loops,
            options.drafter,
            options.hidden_states is not None,
            options.target_layers,
        )

    def __call__(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        """See `data.labels.answers.Answerer`; ValueError for a token id that the target does not have."""
        # long ones first: what does not fit into memory shows at once, and the last steps are not for one long answer
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        texts = [checked_ids(self.target, prompts[index]) for index in order]
        stop = IncrementalStop(partial(LoopDetector, goes_on=GOES_ON), GOES_ON) if self._cut_loops else None
        settings = GenerationSettings(max(limits, default=1), stop=stop)
        rest = settings, self._keep_hidden, self._layers
        for ended in self._engine.as_completed(texts, [limits[index] for index in order], *rest):
            index, tokens, finish = order[ended.number], ended.answer.tokens, _FINISH[ended.answer.finish_reason]
            if self._cut_loops and finish == "limit" and (start := loop_start(tokens, goes_on=GOES_ON)) is not None:
                tokens, finish = tokens[:start], "loop"
            read = len(prompts[index]) + len(tokens)
            states = (None if x is None else x[:read].cpu() for x in (ended.hidden, ended.aux_hidden))
            yield index, Answer(tokens, finish, True, *states)


def answer_prompts(
    target: Target, prompts: Sequence[list[int]], limits: Sequence[int], batch_size: int, cut_loops: bool = False
) -> list[Answer]:
    """One greedy answer per prompt, in their order; see `TargetAnswerer`."""
    return in_order(TargetAnswerer(target, batch_size, cut_loops), prompts, limits)
