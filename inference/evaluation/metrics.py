"""From answered turns to the rows of `report.json`: beta, gamma, time shares, losslessness, scores.

Suffixes: B bootstrap samples, Q questions, K sums of a question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from draft_heads.inference.evaluation.decoded import TurnRecord
from draft_heads.inference.evaluation.evaluate import TRANSFORMERS, VANILLA, Evaluation
from draft_heads.inference.evaluation.lossless import LosslessCounts
from draft_heads.inference.evaluation.scores import mean_scores

BOOTSTRAP_SAMPLES = 2000
OUTPUT_SPAN = 128
TIME_KEYS = ("draft", "verify", "accept", "other")


def shown_name(row: Mapping[str, Any]) -> str:
    """A row's drafter as reports name it: with its kind where the name does not hold it, and LOSSY where its answers
    are not the target's.

    `medusa (ctc)` for a CTC head under that name, `ctc_raw` for one whose name holds the kind, `ctc (LOSSY)` under
    typical acceptance.
    """
    name, kind = row["drafter"], row.get("kind") or ""
    notes = [] if all(part in name for part in kind.split("+")) else [kind]
    notes += ["LOSSY"] if row.get("lossy") else []
    return f"{name} ({', '.join(notes)})" if notes else str(name)


def shown_names(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Drafter → its `shown_name`, of a report's rows."""
    return {row["drafter"]: shown_name(row) for row in results}


def result_rows(evaluation: Evaluation, seed: int) -> list[dict[str, Any]]:
    """One row per benchmark and drafter (category None), and one for each category or column of the benchmark."""
    rows, plain = [], plain_loop(evaluation)
    for benchmark in evaluation.benchmarks:
        own = [record for record in evaluation.records if record.benchmark == benchmark.name]
        for category in dict.fromkeys([None, *(question.group for question in benchmark.questions)]):
            questions = [q for q in benchmark.questions if category in (None, q.group)]
            by_drafter: dict[str, list[TurnRecord]] = {drafter: [] for drafter in evaluation.drafters}
            for record in own:
                if category in (None, benchmark.questions[record.question].group):
                    by_drafter[record.drafter].append(record)
            baselines = by_drafter.get(plain, []), by_drafter.get(TRANSFORMERS, [])
            for drafter, records in by_drafter.items():
                row: dict[str, Any] = {"benchmark": benchmark.name, "category": category, "drafter": drafter}
                row |= {"kind": evaluation.kinds.get(drafter), "lossy": drafter in evaluation.lossy}
                row |= result_row(records, *baselines, questions, seed)
                rows.append(row | {"accepted_by_source": accepted_by_source(records, evaluation.sources.get(drafter))})
    return rows


def plain_loop(evaluation: Evaluation) -> str:
    """The baseline of gamma: `vanilla`, or `transformers` where it ran and took fewer seconds per token in all."""
    taken = {}
    for drafter in {VANILLA, TRANSFORMERS} & set(evaluation.drafters):
        answers = [record.generation for record in evaluation.records if record.drafter == drafter]
        seconds, tokens = sum(one.seconds.get("total", 0.0) for one in answers), sum(len(one.tokens) for one in answers)
        taken[drafter] = seconds / tokens if tokens else float("inf")
    return TRANSFORMERS if taken.get(TRANSFORMERS, float("inf")) < taken.get(VANILLA, float("inf")) else VANILLA


def result_row(
    records: Sequence[TurnRecord],
    plain: Sequence[TurnRecord],
    transformers: Sequence[TurnRecord],
    questions: Sequence[Any],
    seed: int,
) -> dict[str, Any]:
    """The figures of one drafter on one group of questions; ratios without a denominator are None.

    gamma is the speed over the `plain` loop, over_transformers over transformers' own `generate` (None if not run).
    turns + skipped = all turns of the questions: a turn that does not fit the context ends its question. Turns without
    seconds are replayed: they were neither timed nor compared, so those figures are None.
    """
    turns, scores = len(records), mean_scores([record.scores for record in records])
    new_tokens = sum(len(record.generation.tokens) for record in records)
    steps = sum(record.generation.target_steps for record in records)
    decoded = all(record.generation.seconds for record in records)
    seconds = sum(record.generation.seconds["total"] for record in records) if decoded else None
    histogram = accept_length_histogram(records)
    gamma, interval = speedup(records, plain, seed) if decoded else (None, None)
    return {
        "questions": len(questions),
        "turns": turns,
        "skipped": sum(len(question.turns) for question in questions) - turns,
        "new_tokens": new_tokens,
        "target_steps": steps,
        "wall_seconds": seconds,
        "beta": new_tokens / steps if steps else None,
        "beta_ci95": beta_interval(records, seed),
        "gamma": gamma,
        "gamma_ci95": interval,
        "over_transformers": speedup(records, transformers, seed)[0] if decoded else None,
        "tokens_per_second": new_tokens / seconds if seconds else None,
        "lossless": lossless_counts(records).as_dict() if decoded else None,
        "time_share": time_share(records) if decoded else None,
        "accept_length_histogram": histogram,
        "acceptance_by_position": acceptance_by_position(histogram),
        "beta_by_output_position": beta_by_output_position(records),
        "beta_by_context_length": beta_by_context_length(records),
        "beta_by_turn": beta_by_turn(records),
        "score": None if scores["accuracy"] is None else {"accuracy": scores["accuracy"]},
        **{name: value for name, value in scores.items() if name != "accuracy"},
    }


def speedup(
    records: Sequence[TurnRecord], baseline: Sequence[TurnRecord], seed: int
) -> tuple[float | None, list[float] | None]:
    """Baseline seconds per token over the drafter's, on turns both answered, and its 95 % interval.

    The interval is a bootstrap over questions: whole questions are drawn with replacement, baseline and
    drafter together, so that both always answer the same questions.
    """
    drafted = {(record.question, record.turn): record for record in records}
    sums: dict[int, list[float]] = {}
    for base in baseline:
        record = drafted.get((base.question, base.turn))
        if record is None:
            continue
        entry = sums.setdefault(base.question, [0.0] * 4)
        for offset, one in ((0, base), (2, record)):
            entry[offset] += one.generation.seconds["total"]
            entry[offset + 1] += len(one.generation.tokens)
    if not sums:
        return None, None
    sums_Q4 = torch.tensor(list(sums.values()), dtype=torch.float64)
    return float(_speedup(sums_Q4.sum(0))), _interval(_speedup(_bootstrap(sums_Q4, seed)))


def beta_interval(records: Sequence[TurnRecord], seed: int) -> list[float] | None:
    """The 95 % interval of β by bootstrap over questions, as that of γ; None without answers."""
    sums: dict[int, list[int]] = {}
    for record in records:
        entry = sums.setdefault(record.question, [0, 0])
        entry[0] += len(record.generation.tokens)
        entry[1] += record.generation.target_steps
    counted = [entry for entry in sums.values() if entry[1]]
    if not counted:
        return None
    tokens_B, steps_B = _bootstrap(torch.tensor(counted, dtype=torch.float64), seed).unbind(-1)
    return _interval(tokens_B / steps_B)


def _bootstrap(sums_QK: Tensor, seed: int) -> Tensor:
    """[B, K] sums over Q questions that are drawn with replacement from those of `sums_QK [Q, K]`."""
    questions, generator = len(sums_QK), torch.Generator().manual_seed(seed)
    draws_BQ = torch.randint(questions, (BOOTSTRAP_SAMPLES, questions), generator=generator)
    return sums_QK[draws_BQ].sum(1)


def _interval(values_B: Tensor) -> list[float]:
    """The quantiles between which 95 % of the values are."""
    low, high = torch.quantile(values_B, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return [low, high]


def _speedup(sums: Tensor) -> Tensor:
    """[..., (baseline seconds, baseline tokens, seconds, tokens)] -> [...]."""
    baseline_seconds, baseline_tokens, seconds, tokens = sums.unbind(-1)
    return (baseline_seconds / baseline_tokens) / (seconds / tokens)


def lossless_counts(records: Sequence[TurnRecord]) -> LosslessCounts:
    """Counts of identical, near-tie and unexplained turns, each judged at its first difference."""
    tokens = sum(len(record.generation.tokens) for record in records)
    return LosslessCounts([record.difference for record in records], tokens)


def time_share(records: Sequence[TurnRecord]) -> dict[str, float] | None:
    """Share of the decoding time of each part of a step; sums to 1, None when nothing was decoded."""
    seconds = {key: sum(record.generation.seconds[key] for record in records) for key in TIME_KEYS}
    total = sum(seconds.values())
    return {key: value / total for key, value in seconds.items()} if total else None


def accept_length_histogram(records: Sequence[TurnRecord]) -> list[int]:
    """Entry a = target steps after the prefill that kept a drafted tokens: kept lengths [1, 3, 1, 2] -> [1, 1, 1]."""
    counts = Counter(accepted for record in records for accepted in record.generation.accepted)
    return [counts[accepted] for accepted in range(max(counts, default=-1) + 1)]


def acceptance_by_position(histogram: Sequence[int]) -> dict[str, list[float]]:
    """How often the draft at each position of a step was accepted, up to the last position at which one was.

    unconditional  share of the target steps after the prefill that accepted at least k drafts (vLLM's `per_position`)
    conditional    share of those that accepted k − 1 (EAGLE's n-α)

    Steps that kept 0, 1, 2 drafts, one, two and one of them: [.75, .25] and [.75, .333].
    """
    reached = [sum(histogram[k:]) for k in range(len(histogram))]
    pairs = list(pairwise(reached))
    return {
        "unconditional": [count / reached[0] for _, count in pairs],
        "conditional": [count / before for before, count in pairs],
    }


def beta_by_output_position(records: Sequence[TurnRecord]) -> list[float]:
    """β of the steps that began within each `OUTPUT_SPAN` tokens of the answers."""
    return list(_beta_by((place // OUTPUT_SPAN, length) for _, place, length in _steps(records)).values())


def beta_by_context_length(records: Sequence[TurnRecord]) -> list[dict[str, float]]:
    """β of the steps after the prefill, by the length of the text before them, of which each group begins `from` a
    power of two and ends before the next: [{"from": 128, "beta": 2.1}, {"from": 256, "beta": 1.9}]."""
    later = ((len(record.prompt) + place, length) for record, place, length in _steps(records) if place)
    found = _beta_by((1 << (max(1, text).bit_length() - 1), length) for text, length in later)
    return [{"from": start, "beta": beta} for start, beta in found.items()]


def beta_by_turn(records: Sequence[TurnRecord]) -> list[float]:
    """β of the first, second, … answers of the questions."""
    return list(_beta_by((record.turn, length) for record, _, length in _steps(records)).values())


def _steps(records: Iterable[TurnRecord]) -> Iterator[tuple[TurnRecord, int, int]]:
    """(turn, tokens of its answer before the step, new tokens) of every target step; before the prefill there are 0."""
    for record in records:
        lengths = record.generation.accept_lengths
        for place, length in zip(accumulate(lengths, initial=0), lengths):
            yield record, place, length


def _beta_by(steps: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Group → its new tokens per step, in order; of (group, new tokens) of every step."""
    parts: dict[int, list[int]] = {}
    for group, length in steps:
        parts.setdefault(group, []).append(length)
    return {group: sum(parts[group]) / len(parts[group]) for group in sorted(parts)}


def accepted_by_source(records: Sequence[TurnRecord], names: Sequence[str] | None) -> dict[str, int] | None:
    """How many of the new tokens each source drafted; None for a drafter without sources."""
    if not names:
        return None
    counts = Counter(source for record in records for source in record.generation.sources)
    return {name: counts[source] for source, name in enumerate(names)}
