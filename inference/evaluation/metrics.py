"""From answered turns to the rows of `report.json`: beta, gamma, time shares, losslessness, scores.

Suffixes: B bootstrap samples, Q questions, K sums of a question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import mean, median
from typing import Any, Protocol

import torch
from torch import Tensor

from draft_heads.inference.evaluation.decoded import TurnRecord
from draft_heads.inference.evaluation.evaluate import TRANSFORMERS, VANILLA, Evaluation
from draft_heads.inference.evaluation.lossless import LosslessCounts
from draft_heads.inference.evaluation.scores import CUT, mean_scores

BOOTSTRAP_SAMPLES = 2000
OUTPUT_SPAN = 128
TIME_KEYS = ("draft", "verify", "accept", "other")
SLOW = 3
"""Steps of a question that take so many times the median of all were decoded beside other work, it seems."""


class Turn(Protocol):
    """An answer as its figures need it: decoded here (`TurnRecord`), or of an answer file (`AnsweredTurn`).

    question, turn  whose answer it is
    wall_time       seconds; None for a replayed one
    accept_lengths, accepted  as in `Generation`
    by_source       tokens of each source, by its index
    finish_reason   as in `Generation`; "" where it is not known
    """

    @property
    def question(self) -> Hashable: ...
    @property
    def turn(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def new_tokens(self) -> int: ...
    @property
    def target_steps(self) -> int: ...
    @property
    def wall_time(self) -> float | None: ...
    @property
    def accept_lengths(self) -> Sequence[int]: ...
    @property
    def accepted(self) -> Sequence[int]: ...
    @property
    def by_source(self) -> Mapping[int, int]: ...
    @property
    def finish_reason(self) -> str: ...


def shown_name(row: Mapping[str, Any]) -> str:
    """A row's drafter as reports name it: with its kind where the name does not hold it, and LOSSY where its answers
    are not the target's.

    `medusa (ctc)` for a CTC head under that name, `ctc_raw` for one whose name holds the kind, `ctc (LOSSY)` under
    typical acceptance.
    """
    name, kind = row["drafter"], row.get("kind") or ""
    parts = kind.split("+")  # of a hybrid; each as often as it is one
    notes = [] if all(name.count(part) >= parts.count(part) for part in parts) else [kind]
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
                row |= {"max_depth": evaluation.depths.get(drafter)}
                row |= result_row(records, *baselines, questions, evaluation.sources.get(drafter), seed)
                row |= {"verify_cost": verify_cost(records, by_drafter.get(VANILLA, []))}
                row |= {"slow_steps": slow_steps(records, baselines[0], seed)}
                rows.append(row | usage_figures(records))
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
    sources: Sequence[str] | None,
    seed: int,
) -> dict[str, Any]:
    """The figures of one drafter on one group of questions; ratios without a denominator are None.

    gamma is the speed over the `plain` loop, over_transformers over transformers' own `generate` (None if not run).
    turns + skipped = all turns of the questions: a turn that does not fit the context ends its question. Turns without
    seconds are replayed: they were neither timed nor compared, so those figures are None.
    """
    decoded = all(record.generation.seconds for record in records)
    return {
        "questions": len(questions),
        "skipped": sum(len(question.turns) for question in questions) - len(records),
        **turn_figures(records, plain, sources, seed),
        "over_transformers": speedup(records, transformers, seed)[0] if decoded else None,
        "lossless": lossless_counts(records).as_dict() if decoded else None,
        "time_share": time_share(records) if decoded else None,
        **score_figures([record.scores for record in records]),
    }


def turn_figures(
    turns: Sequence[Turn], plain: Sequence[Turn], sources: Sequence[str] | None, seed: int
) -> dict[str, Any]:
    """The figures of a row that follow from what answer files hold, too; `plain` are the plain loop's turns.

    Those that need what each step did are empty where a file does not tell it. `cut`: how many answers ended at the
    longest length or the context; None where one does not say how it ended.
    """
    new_tokens, steps = sum(turn.new_tokens for turn in turns), sum(turn.target_steps for turn in turns)
    times = [turn.wall_time for turn in turns]
    timed = [seconds for seconds in times if seconds is not None]
    seconds = sum(timed) if len(timed) == len(times) else None
    gamma, interval = (None, None) if seconds is None else speedup(turns, plain, seed)
    ends = [turn.finish_reason for turn in turns]
    stepwise = turns if all(len(turn.accept_lengths) == turn.target_steps for turn in turns) else []
    histogram = accept_length_histogram(stepwise)
    return {
        "turns": len(turns),
        "new_tokens": new_tokens,
        "target_steps": steps,
        "wall_seconds": seconds,
        "beta": new_tokens / steps if steps else None,
        "beta_ci95": beta_interval(turns, seed),
        "gamma": gamma,
        "gamma_ci95": interval,
        "tokens_per_second": new_tokens / seconds if seconds else None,
        "cut": sum(end in CUT for end in ends) if all(ends) else None,
        "accept_length_histogram": histogram,
        "acceptance_by_position": acceptance_by_position(histogram),
        "beta_by_output_position": beta_by_output_position(stepwise),
        "beta_by_context_length": beta_by_context_length(stepwise),
        "beta_by_turn": beta_by_turn(stepwise),
        "accepted_by_source": accepted_by_source(turns, sources),
    }


def without_shared_seconds(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of answers that were decoded together: they share seconds and joules by tokens, so none has its own. γ has
    no interval, and what is made of seconds or joules has no value by category."""
    shared = ("gamma", "over_transformers", "wall_seconds", "tokens_per_second", "time_share", "joules_per_token")
    dropped = {"gamma_ci95", *(shared if row["category"] else ())}
    return {key: None if key in dropped else value for key, value in row.items()}


def score_figures(scores: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The mean scores of a row: accuracy in `score`, the others under their names."""
    accuracy, others = (means := mean_scores(scores))["accuracy"], [name for name in means if name != "accuracy"]
    return {"score": None if accuracy is None else {"accuracy": accuracy}} | {name: means[name] for name in others}


def speedup(turns: Sequence[Turn], baseline: Sequence[Turn], seed: int) -> tuple[float | None, list[float] | None]:
    """Baseline seconds per token over the drafter's, on turns both answered, and its 95 % interval.

    The interval is a bootstrap over questions: whole questions are drawn with replacement, baseline and
    drafter together, so that both always answer the same questions. None without tokens or seconds.
    """
    drafted = {(turn.question, turn.turn): turn for turn in turns}
    sums: dict[Hashable, list[float]] = {}
    for base in baseline:
        turn = drafted.get((base.question, base.turn))
        if turn is None:
            continue
        entry = sums.setdefault(base.question, [0.0] * 4)
        for offset, one in ((0, base), (2, turn)):
            entry[offset] += one.wall_time or 0.0
            entry[offset + 1] += one.new_tokens
    sums_Q4 = torch.tensor(list(sums.values()), dtype=torch.float64).view(-1, 4)
    if not sums_Q4.sum(0).all():
        return None, None
    return float(_speedup(sums_Q4.sum(0))), _interval(_speedup(_bootstrap(sums_Q4, seed)), len(sums_Q4))


def beta_interval(turns: Sequence[Turn], seed: int) -> list[float] | None:
    """The 95 % interval of β by bootstrap over questions, as that of γ; None without answers to two questions."""
    sums: dict[Hashable, list[int]] = {}
    for turn in turns:
        entry = sums.setdefault(turn.question, [0, 0])
        entry[0] += turn.new_tokens
        entry[1] += turn.target_steps
    counted = [entry for entry in sums.values() if entry[1]]
    if not counted:
        return None
    tokens_B, steps_B = _bootstrap(torch.tensor(counted, dtype=torch.float64), seed).unbind(-1)
    return _interval(tokens_B / steps_B, len(counted))


def _bootstrap(sums_QK: Tensor, seed: int) -> Tensor:
    """[B, K] sums over Q questions that are drawn with replacement from those of `sums_QK [Q, K]`."""
    questions, generator = len(sums_QK), torch.Generator().manual_seed(seed)
    draws_BQ = torch.randint(questions, (BOOTSTRAP_SAMPLES, questions), generator=generator)
    return sums_QK[draws_BQ].sum(1)


def _interval(values_B: Tensor, questions: int) -> list[float] | None:
    """The quantiles between which 95 % of the values are; None where a draw has no value, and for a single question,
    which tells nothing of others."""
    if questions < 2 or not values_B.isfinite().all():
        return None
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
    """Share of the decoding time of each part of a step; sums to 1, None when nothing was decoded, and where parts are
    not timed apart: on a GPU, and where `generate` drafts."""
    if not all(record.generation.seconds.keys() >= set(TIME_KEYS) for record in records):
        return None
    seconds = {key: sum(record.generation.seconds[key] for record in records) for key in TIME_KEYS}
    total = sum(seconds.values())
    return {key: value / total for key, value in seconds.items()} if total else None


def verify_cost(records: Sequence[TurnRecord], vanilla: Sequence[TurnRecord]) -> list[dict[str, Any]] | None:
    """Median seconds of a step's verification by the nodes of its tree, and over those of a step of vanilla:
    [{"nodes": 8, "steps": 40, "seconds": 0.006, "over_plain_step": 1.2}, …].

    None where steps are not timed one by one: in batches, in transformers' `generate`, and where a step begins before
    the tokens of the one before are read.
    """
    found: dict[int, list[float]] = {}
    for record in records:
        for nodes, seconds in zip(record.generation.step_nodes, record.generation.step_seconds):
            found.setdefault(nodes, []).append(seconds)
    steps = [seconds for record in vanilla for seconds in record.generation.step_seconds]
    plain = median(steps) if steps else None
    costs = [(nodes, len(found[nodes]), median(found[nodes])) for nodes in sorted(found)]
    return [
        {"nodes": nodes, "steps": count, "seconds": cost, "over_plain_step": cost / plain if plain else None}
        for nodes, count, cost in costs
    ] or None


def slow_steps(records: Sequence[TurnRecord], plain: Sequence[TurnRecord], seed: int) -> dict[str, Any] | None:
    """Where verifications took over `SLOW` times the median of those with as many nodes, on the mean of a question, and
    a fiftieth of the time more than it: {"questions": {"114": 22.1}, "gamma_without": .92}, how many times, by the
    question's id, and γ without these questions and the plain loop's. None where there is none, and where steps are
    not timed one by one (`verify_cost`).
    """
    own, base = _slow(records), _slow(plain)
    if not own and not base:
        return None
    rest = [record for record in records if record.question_id not in {**own, **base}]
    return {
        "questions": {str(name): times for name, times in own.items()},
        "gamma_without": speedup(rest, plain, seed)[0],
    }


def _slow(records: Sequence[TurnRecord]) -> dict[Hashable, float]:
    """Question → the mean of its steps over the usual ones, of those that `slow_steps` tells."""
    usual = {cost["nodes"]: cost["seconds"] for cost in verify_cost(records, []) or ()}
    over: dict[Hashable, list[tuple[float, float]]] = {}
    for record in records:
        steps = zip(record.generation.step_nodes, record.generation.step_seconds)
        over.setdefault(record.question_id, []).extend((seconds, usual[nodes]) for nodes, seconds in steps)
    more = sum(record.generation.seconds.get("total", 0.0) for record in records) / 50
    times = {name: mean(taken / of for taken, of in steps) for name, steps in over.items() if steps}
    lost = {name: sum(taken - of for taken, of in steps) for name, steps in over.items()}
    return {name: times[name] for name in times if times[name] > SLOW and lost[name] > more}


def usage_figures(records: Sequence[TurnRecord]) -> dict[str, float | None]:
    """The highest peak of GPU memory, and the energy per token; None where they were not measured."""
    peaks = [record.peak_memory for record in records if record.peak_memory is not None]
    measured = [(record.joules, record.new_tokens) for record in records if record.joules is not None]
    tokens = sum(count for _, count in measured)
    joules = sum(joules for joules, _ in measured) / tokens if tokens else None
    return {"peak_memory_bytes": max(peaks, default=None), "joules_per_token": joules}


def accept_length_histogram(turns: Sequence[Turn]) -> list[int]:
    """Entry a = target steps after the prefill that kept a drafted tokens: kept lengths [1, 3, 1, 2] -> [1, 1, 1]."""
    counts = Counter(accepted for turn in turns for accepted in turn.accepted)
    return [counts[accepted] for accepted in range(max(counts, default=-1) + 1)]


def acceptance_by_position(histogram: Sequence[int]) -> dict[str, list[float]]:
    """How often the draft at each position of a step was accepted, up to the last position at which one was.

    unconditional  share of the target steps after the prefill that accepted at least k drafts
                   (vLLM's `per_position`, where every step has drafts)
    conditional    share of those that accepted k − 1 (EAGLE's n-α)

    Steps that kept 0, 1, 2 drafts, one, two and one of them: [.75, .25] and [.75, .333].
    """
    reached = [sum(histogram[k:]) for k in range(len(histogram))]
    pairs = list(pairwise(reached))
    return {
        "unconditional": [count / reached[0] for _, count in pairs],
        "conditional": [count / before for before, count in pairs],
    }


def beta_by_output_position(turns: Sequence[Turn]) -> list[float | None]:
    """β of the steps that began within each `OUTPUT_SPAN` tokens of the answers; None where none did.

    Of steps of 1, 257, 10 and 3 tokens two begin below 128, at 0 and 1, and two from 256 on: [129.0, None, 6.5].
    """
    return _by_place(_beta_by((place // OUTPUT_SPAN, length) for _, place, length in _steps(turns)))


def beta_by_context_length(turns: Sequence[Turn]) -> list[dict[str, float]]:
    """β of the steps after the prefill, by the length of the text before them, of which each group begins `from` a
    power of two and ends before the next: [{"from": 128, "beta": 2.1}, {"from": 256, "beta": 1.9}]."""
    later = ((turn.prompt_tokens + place, length) for turn, place, length in _steps(turns) if place)
    found = _beta_by((1 << (max(1, text).bit_length() - 1), length) for text, length in later)
    return [{"from": start, "beta": beta} for start, beta in found.items()]


def beta_by_turn(turns: Sequence[Turn]) -> list[float | None]:
    """β of the first, second, … answers of the questions; None where these are empty."""
    return _by_place(_beta_by((turn.turn, length) for turn, _, length in _steps(turns)))


def _steps(turns: Iterable[Turn]) -> Iterator[tuple[Turn, int, int]]:
    """(turn, tokens of its answer before the step, new tokens) of every target step; before the prefill there are 0."""
    for turn in turns:
        for place, length in zip(accumulate(turn.accept_lengths, initial=0), turn.accept_lengths):
            yield turn, place, length


def _beta_by(steps: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Group → its new tokens per step, in order; of (group, new tokens) of every step."""
    parts: dict[int, list[int]] = {}
    for group, length in steps:
        parts.setdefault(group, []).append(length)
    return {group: sum(parts[group]) / len(parts[group]) for group in sorted(parts)}


def _by_place(found: Mapping[int, float]) -> list[float | None]:
    """The values of the places 0, 1, 2, …, None of those that have none."""
    return [found.get(place) for place in range(max(found, default=-1) + 1)]


def accepted_by_source(turns: Sequence[Turn], names: Sequence[str] | None) -> dict[str, int] | None:
    """How many of the new tokens each source drafted; None for a drafter without sources."""
    if not names:
        return None
    counts = [turn.by_source for turn in turns]
    return {name: sum(one.get(source, 0) for one in counts) for source, name in enumerate(names)}
