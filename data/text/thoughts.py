"""The thoughts that models write before an answer, by the marks that their chat templates use."""

from __future__ import annotations

import re

MARKS = {
    "<think>": "</think>",  # most families
    "<thought>": "</thought>",  # EXAONE Deep
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "[THINK]": "[/THINK]",  # Mistral
    "<|START_THINKING|>": "<|START_RESPONSE|>",  # Cohere
    "<|channel>thought": "<channel|>",  # Gemma 4
    "◁think▷": "◁/think▷",  # Kimi
    "<|channel|>analysis": "<|channel|>final<|message|>",  # gpt-oss
    "<|begin_of_thought|>": "<|end_of_thought|>",  # Sky-T1, OpenThinker
    "<reasoning>": "</reasoning>",  # Reka Flash 3
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
    "<|think|>": "<|end|><|begin|>assistant<|content|>",  # Solar Open
}
"""What opens a thought → what ends it."""
IN_PROMPTS = {"Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]"}  # Apriel
"""The same of words that open a thought at the end of a prompt only."""
KNOWN_MARKS = frozenset({*MARKS, *MARKS.values(), *IN_PROMPTS})
"""A chat template without these and without a switch for thoughts knows of none."""

_AFTER = (*MARKS, "<|END_RESPONSE|>", "[END FINAL RESPONSE]")  # what follows an answer: a thought, or a mark of its end
_NOT_SHOWN, _ENDS = ("|".join(map(re.escape, marks)) for marks in (_AFTER, [*MARKS.values(), *IN_PROMPTS.values()]))
_ENDS = _ENDS.replace(r"final<\|message\|>", r"final(?: \w+|[ ]?<\|constrain\|>\w+)?<\|message\|>")  # `final json`


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with the mark that opens a thought, which the answer goes on from."""
    return prompt.rstrip().endswith((*MARKS, *IN_PROMPTS))


def empty_thought(prompt: str, written: str, answer: str) -> str | None:
    """What a chat template writes before a recorded answer that has no thought, where that ends one; None else.

    written: its rendering behind the prompt. Example: `</think>\\n\\n` before `4.`, where the prompt opens the thought
    """
    if not answer.strip() or any(mark in answer for mark in KNOWN_MARKS):
        return None
    before, found, _ = written.partition(answer.strip())
    opened = [mark for mark in MARKS if mark in before or prompt.rstrip().endswith(mark)]
    return before if found and any(MARKS[mark] in before for mark in opened) else None


def without_thoughts(answer: str, in_thought: bool = False) -> str:
    """What follows an answer's last thought; of an answer that ends within a thought, what comes before it.

    in_thought: the prompt opens a thought. Example: `b` of `<think>a</think>b` and of `b<think>a`, none of `<think>a`.
    """
    *thoughts, shown = re.split(_ENDS, answer)
    return "" if in_thought and not thoughts else re.split(_NOT_SHOWN, shown)[0]
