"""Logits processors that read the text so far, applied to a draft tree: each node has its own path.

transformers' processors run on the host, row by row, and eagerly: a step that has any is not captured and
does not start ahead. Without any, steps run as usual.

Shapes: B slots, R rows of a forward (row 0 = base token), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList

from draft_heads.data.generation_config import own_processors, process_logits
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target

OF_THE_TEXT = (
    transformers.EncoderNoRepeatNGramLogitsProcessor,
    transformers.EncoderRepetitionPenaltyLogitsProcessor,
    transformers.ExponentialDecayLengthPenalty,
    transformers.ForcedBOSTokenLogitsProcessor,
    transformers.ForcedEOSTokenLogitsProcessor,
    transformers.InfNanRemoveLogitsProcessor,
    transformers.LogitNormalization,
    transformers.MinLengthLogitsProcessor,
    transformers.MinNewTokensLengthLogitsProcessor,
    transformers.NoBadWordsLogitsProcessor,
    transformers.NoRepeatNGramLogitsProcessor,
    transformers.PrefixConstrainedLogitsProcessor,
    transformers.RepetitionPenaltyLogitsProcessor,
    transformers.SequenceBiasLogitsProcessor,
    transformers.SuppressTokensAtBeginLogitsProcessor,
    transformers.SuppressTokensLogitsProcessor,
)
"""transformers' processors that depend on the text so far and remember nothing else: a path of a tree is a text."""


def of_the_text(processors: LogitsProcessorList, sequences: int, padding: int) -> LogitsProcessorList:
    """Those of a call of `generate` that can be applied to draft trees; ValueError where texts are padded.

    transformers counts the padding of a batch as text in some of them, and makes one processor for all its rows.
    """
    found = LogitsProcessorList(one for one in processors if type(one) in OF_THE_TEXT)
    if found and (sequences > 1 or padding):
        names = ", ".join(type(one).__name__ for one in found)
        raise ValueError(
            f"processors that read the text ({names}) are supported for one sequence without padding; got {sequences} "
            f"sequences and padding of {padding} tokens; generate them one by one"
        )
    return found


def processors_of(
    target: Target, settings: GenerationSettings, prompt: Sequence[int], limit: int
) -> LogitsProcessorList | None:
    """What changes the logits of an answer to `prompt` of at most `limit` tokens; None for nothing.

    The settings' own processors if they have any, else those of the target's checkpoint.
    """
    if settings.processors is not None:
        return settings.processors or None
    return own_processors(target, prompt, limit, settings.ends(target))


@dataclass(frozen=True)
class TextProcessors:
    """The processors of B slots, None for one without any, their texts, which grow (prompt, answer, base token), and
    the tokens that end an answer."""

    lists: Sequence[LogitsProcessorList | None]
    texts: Sequence[list[int]]
    ends: Sequence[int]

    @classmethod
    def of_slots(
        cls, lists: Sequence[LogitsProcessorList | None], texts: Sequence[list[int]], ends: Sequence[int]
    ) -> TextProcessors | None:
        """None if no slot has any."""
        return cls(lists, texts, ends) if any(lists) else None

    def after_prompt(self, logits: Tensor) -> Tensor:
        """[B, V] float32: `logits [B, V]` of what follows each text, changed."""
        return torch.stack([self._process(slot, [], row) for slot, row in enumerate(logits)])

    def __call__(self, logits: Tensor, tokens: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        """[B, R, V] float32: `logits` of the rows `tokens [B, R]`, which see each other as `sees [B, R, R]` says.

        And [B, R] bool: the rows that may be accepted. A processor that raises an exception at a draft (a function of
        one's own, say, that knows no text so long) has not failed yet: the answer may end before it comes to this
        text. The draft is left out; where the target chooses its token, it is the base token of the next step, if
        there is one, and the exception is raised there, where `generate` raises it.

        In the worked example of `inference.tree`, after the text t: row 3 (z) is changed as what follows t b x z; but
        if what follows t b excludes x, or x ends an answer, no processor is asked of t b x and t b x z: `generate` asks
        none what follows a text that it does not go on from.
        """
        texts, visible = tokens.tolist(), sees.tolist()
        changed, acceptable = logits.float().clone(), torch.ones_like(tokens, dtype=torch.bool)
        for slot in (slot for slot, processors in enumerate(self.lists) if processors is not None):
            excluded = set()
            for row, seen in enumerate(visible[slot]):
                path = [other for other in range(row + 1) if seen[other]]
                token, parent = texts[slot][row], path[-2] if len(path) > 1 else row
                if (
                    token in self.ends
                    or parent in excluded
                    or (parent < row and changed[slot, parent, token] == -torch.inf)
                ):
                    excluded.add(row)
                    continue
                try:
                    changed[slot, row] = self._process(slot, [texts[slot][other] for other in path], logits[slot, row])
                except Exception:  # whatever a caller's own function raises; at the base token it is the answer's error
                    if row == 0:
                        raise
                    excluded.add(row)
                    acceptable[slot, row] = False
        return changed, acceptable

    def _process(self, slot: int, path: list[int], logits: Tensor) -> Tensor:
        """[V] float32: `logits [V]` after a text and a path from its base token on, as `generate` changes them."""
        processors, text = self.lists[slot], self.texts[slot]
        if processors is None:
            return logits.float()
        ids = torch.tensor([text[: len(text) - bool(path)] + path], device=logits.device)
        return process_logits(processors, ids, logits[None])[0]
