"""The answers of a report token by token: every step's run of accepted tokens, coloured by source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from draft_heads.inference.evaluation.html.charts import COLOURS, name_html, text

Sample = dict[str, Any]

READING = """A vertical line begins each target step. The coloured tokens after it were drafted and accepted; the grey
token that ends the step is the base token, the target's own. ⏎ is a line break, ◌ a token without a text of its own: a
part of a character, or of a channel before the answer."""
HINT = """Select a step (click, or arrow keys and Enter) to see the tree that was drafted for it."""


def answers_view(samples: Sequence[Sample], names: Mapping[str, str], drafter_colours: Mapping[str, int]) -> str:
    """The section's content; `names` are the drafters as reports show them."""
    colours = source_colours(samples, drafter_colours)
    parts = [f'<p class="note">{READING}</p>', f'<p class="note hint">{HINT}</p>']
    benchmark = None
    for index, sample in enumerate(samples):
        if sample["benchmark"] != benchmark:
            benchmark = sample["benchmark"]
            parts.append(f"<h3>{name_html(benchmark)}, question {name_html(sample['question_id'])}</h3>")
            parts.append(f'<p class="question" dir="auto" tabindex="0">{text(sample["question"])}</p>')
        parts.append(sample_html(index, sample, names.get(sample["drafter"], sample["drafter"]), colours))
    content = json.dumps(list(samples), ensure_ascii=False).replace("<", "\\u003c")
    parts.append(
        f'<script type="application/json" id="samples" data-colours="{text(json.dumps(colours))}">{content}</script>'
    )
    return "\n".join(parts)


def source_colours(samples: Sequence[Sample], drafter_colours: Mapping[str, int]) -> dict[str, int]:
    """Source → index of its colour, the same in all samples: that of the drafter with its name, or else one that no
    source has, while there is one."""
    names = list(dict.fromkeys(name for sample in samples for name in sample["source_names"]))
    colours = {name: drafter_colours[name] for name in names if name in drafter_colours}
    free = [index for index in range(COLOURS) if index not in colours.values()] or list(range(COLOURS))
    others = [name for name in names if name not in colours]
    return colours | {name: free[index % len(free)] for index, name in enumerate(others)}


def source_counts(sample: Sample) -> dict[str, int]:
    """How many of the sample's tokens each source drafted; those of the target itself are the `base token`."""
    counts = {name: sample["sources"].count(index) for index, name in enumerate(sample["source_names"])}
    return {**counts, "base token": sum(source < 0 for source in sample["sources"])}


def sample_html(index: int, sample: Sample, name: str, colours: Mapping[str, int]) -> str:
    """One answer: its counts, its tokens in their steps, and room for a tree."""
    tokens, steps = len(sample["texts"]), len(sample["accept_lengths"])
    keys = []
    for source, count in source_counts(sample).items():
        look = f"drafted c{colours[source]}" if source in colours else "own"
        keys.append(
            f'<span class="key {look}">{name_html(source)} <span data-source="{text(source)}">{count}</span></span>'
        )
    beta = f", β {tokens / steps:.2f}" if steps else ""
    facts = f'<span data-count="tokens">{tokens}</span> tokens in <span data-count="steps">{steps}</span> steps{beta}'
    notes = []
    if tokens < sample["answer_tokens"]:
        notes.append(f"The first {tokens} of {sample['answer_tokens']} tokens.")
    if sample["measured_steps"] != steps:
        since = "the drafter has learnt since, or half precision rounded otherwise"
        notes.append(f"The measured run took {sample['measured_steps']} steps for them; {since}.")
    if sample["trees"] is None:
        notes.append("Trees were not recorded.")
    runs = "".join(
        step_html(sample, start, end, colours)
        for start, end in pairwise(accumulate(sample["accept_lengths"], initial=0))
    )
    note = f'<p class="note">{text(" ".join(notes))}</p>' if notes else ""
    return (
        f'<article class="sample" data-sample="{index}"><h4>{name_html(name)}: {facts}</h4>'
        f"<p>{' '.join(keys)}</p>{note}"
        f'<p class="answer" dir="auto">{runs}</p><div class="tree" aria-live="polite" hidden></div></article>'
    )


def step_html(sample: Sample, start: int, end: int, colours: Mapping[str, int]) -> str:
    """The tokens of one step."""
    tokens = []
    for place in range(start, end):
        source, piece = sample["sources"][place], sample["texts"][place]
        look = "own" if source < 0 else f"drafted c{colours[sample['source_names'][source]]}"
        if not piece:
            ended = place == len(sample["texts"]) - 1 == sample["answer_tokens"] - 1
            look += " end" if ended and sample["finish_reason"] == "eos" else " part"
        elif "\n" in piece:
            look += " newline"
        tokens.append(f'<span class="token {look}">{text(piece)}</span>')
    return f'<span class="step">{"".join(tokens)}</span>'
