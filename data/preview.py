"""Conversations on the terminal with the tokens that heads are trained on coloured."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draft_heads.data.distill import select_conversations, server_answerer
from draft_heads.data.distill_options import DistillOptions
from draft_heads.data.distiller import Distiller
from draft_heads.data.labeller import Labeller

TRAINED = "black on green"


def preview(target: Labeller, source: str, count: int, options: DistillOptions) -> None:
    """Print the first `count` rows that `distill` would write with `options`; nothing is written."""
    conversations = select_conversations(source, options).dataset
    chosen = conversations.select(range(min(count, len(conversations))))
    console = Console()
    for row in Distiller(target, options, server_answerer(target, options)).rows(chosen):
        console.rule(f"{row.id}: {len(row.ids)} tokens, {sum(row.mask)} trained")
        if row.skipped is not None:
            console.print(f"skipped: {row.skipped}", markup=False)
            continue
        console.print(coloured(target.tokenizer, row.ids, row.mask))
    console.print(Text("trained tokens", style=TRAINED))


def coloured(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool]) -> Text:
    """The text of `ids`, special tokens shown, runs of `mask` in colour."""
    text = Text()
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            run = tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            text.append(str(run), style=TRAINED if mask[start] else "")
            start = end
    return text
