"""What a report must say of drafters that carry something from question to question (`Drafter.carries_over`).

Their β, or their speed, depends on how the questions were split, by kills, processes and sequences decoded together,
as each drafter begins with nothing, and on questions that were asked before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.evaluation.decoded import TurnRecord


def carried_over(
    drafters: Mapping[str, Sequence[Drafter]], records: Sequence[TurnRecord], runs: int = 1
) -> dict[str, dict[str, Any]]:
    """Name → how often a drafter that carries something over began with nothing, and which turns came twice.

    drafters         name → its copies that answered in each run
    runs             of the program that the answers come from: one for each process, and for each resume of it
    returns          {"runs", "drafters_per_run", "repeated_turns": {benchmark: turns whose prompt and answer had come
                     before}}; no repeated turns of one that keeps no text
    """
    found = {}
    for name, alike in drafters.items():
        if not alike[0].carries_over:
            continue
        repeated: dict[str, int] = {}
        seen = set()
        keeps_text = any(one.carries_over and one.keeps_text for one in alike[0].members())
        for record in records if keeps_text else ():
            if record.drafter == name:
                text = record.prompt, tuple(record.generation.tokens)
                repeated[record.benchmark] = repeated.get(record.benchmark, 0) + (text in seen)
                seen.add(text)
        copies = len(alike) * (alike[0].slots if alike[0].kind == "hybrid" else 1)  # a head has one table for all slots
        found[name] = {"runs": runs, "drafters_per_run": copies, "repeated_turns": repeated}
    return found


def notes(carried: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence or two for the drafters in `carried_over`; those of which the same is true share theirs."""
    sharing = dict[tuple[str, str], list[str]]()
    for name, facts in carried.items():
        runs, alike = facts["runs"], facts["drafters_per_run"]
        split = f"{runs} runs or processes, {alike} sequences at a time"
        begun = f"{runs * alike} copies of it shared the questions, each beginning with nothing ({split})"
        if runs * alike == 1:
            begun = "one drafter answered all questions in order"
        again = {benchmark: count for benchmark, count in facts["repeated_turns"].items() if count}
        counts = ", ".join(f"{benchmark} {count}" for benchmark, count in again.items())
        whose = "whose β is that of a known text" + " for a copy that had answered them" * (runs * alike > 1)
        known = f" Turns that had been asked and answered before, {whose}: {counts}."
        sharing.setdefault((begun, known * bool(again)), []).append(name)
    sentences = []
    for (begun, known), names in sharing.items():
        who = f"{names[0]} learns" if len(names) == 1 else f"{', '.join(names)}: each learns"
        why = "from question to question, so its β or its speed depends on those before"
        sentences.append(f"{who} {why}: here {begun}.{known}")
    return sentences
