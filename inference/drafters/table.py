"""The table of all drafters and their options: `evaluate.py --list_drafters` prints it, docs/decoding.md holds it."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields

from draft_heads.inference.drafters.heads.base import HeadOptions
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.options import DrafterOptions, TreeOptions
from draft_heads.inference.drafters.registry import DRAFTERS

HEADER = "| drafter | drafts | options and defaults |\n| --- | --- | --- |"
SHARED = {HeadOptions: "all heads", TreeOptions: "all without a `max_nodes` of their own"}
"""Options of several drafters, which have a row of their own, and who takes them."""


def drafters_table() -> str:
    """Markdown: a row for each drafter, then rows for the options that several of them share."""
    rows = []
    for kind, drafter in DRAFTERS.items():
        words = f"`{kind}={drafter.loads}`" if drafter.loads else f"`{kind}`"
        rows.append((words, drafter.title, _options_cell(drafter.options_type)))
    rows.append(("several, joined by `+`", HybridDrafter.title, _options_cell(HybridDrafter.options_type)))
    rows += [(who, "", _options_cell(options_type, shared=True)) for options_type, who in SHARED.items()]
    return "\n".join([HEADER, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _options_cell(options_type: type[DrafterOptions], shared: bool = False) -> str:
    """The options that the row of this type names, but those that it shares, which have a row of their own."""
    bases = [base for base in SHARED if base in options_type.__mro__[int(shared) :]]
    elsewhere = {f.name for base in bases for f in fields(base)}
    cells = [_described(f) for f in fields(options_type) if f.name not in elsewhere]
    if options_type.tuned and not any(base.tuned for base in bases):
        cells.append(f"`tuned=FILE` of {options_type.tuned_by}: {', '.join(options_type.tuned)}")
    return "; ".join(cells)


def _described(f: Field[object]) -> str:
    """`k=7` most tokens of a path."""
    assert f.default is not MISSING
    written = f.name if f.default in ("", None) else f"{f.name}={f.default}"
    others = [f"`{choice}`" for choice in f.metadata.get("choices", ()) if isinstance(choice, str)]
    or_others = f" (or {', '.join(other for other in others if other != f'`{f.default}`')})" if others else ""
    return f"`{written}`{or_others} {f.metadata['help']}"
