"""Answer benchmark questions with every drafter, time them fairly, and judge each answer.

All drafters run in one process, on the same prompts, after a discarded warm-up; they take turns question by question in
changing order, so that a machine that slows down slows them all. Every drafter has its own conversation: the second
turn's prompt contains its own first answer. Several processes share the questions (`decode`), one judges
(`judge_decoded`).
"""

from __future__ import annotations

import gc
import logging
import random
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from draft_heads.configs.waiting import threads_in_use
from draft_heads.data.common.processes import ALONE, Processes
from draft_heads.data.text.benchmarks import Question
from draft_heads.data.text.rendering import ConversationError, Extra, Messages
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import Drafter, forget_all
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.carried_over import carried_over
from draft_heads.inference.evaluation.decoded import (
    DecodedFolder,
    DecodedGroup,
    Group,
    TurnRecord,
    add_findings,
    subtract_counts,
    total_findings,
)
from draft_heads.inference.evaluation.hf_generate import HFGenerate, has_stop_rules
from draft_heads.inference.evaluation.lossless import Oracle, judge
from draft_heads.inference.evaluation.meter import Meter, devices_of
from draft_heads.inference.generation import ContextError, Generation, GenerationSettings
from draft_heads.inference.target.labels import Overflow

logger = logging.getLogger(__name__)

VANILLA = "vanilla"
TRANSFORMERS = "transformers"  # the row of transformers' own `generate`
WARM_UP_TOKENS = 64  # several steps of the deepest drafts

Key = TypeVar("Key")
Progress = Callable[[str, int, int], None]  # stage, done, of


AnyEngine = DecodingEngine | HFGenerate | BatchEngine
Render = Callable[[Messages, Extra], list[int]]


@dataclass(frozen=True)
class Benchmark:
    """Named questions; `score(question, answer, in_thought, finish_reason)` gives the scores of the answer to a
    question's last turn, by name (`scores.Scorer`)."""

    name: str
    questions: Sequence[Question]
    score: Callable[[Question, str, bool, str], dict[str, float]] | None = None


@dataclass(frozen=True)
class Evaluation:
    """All decoded turns, in the order they ran.

    sources   drafter → the names of its draft sources, which `Generation.sources` indexes
    findings  drafter → its own statistics (`Drafter.findings`), where it has any
    options   drafter → every option with its value (`Drafter.settings`)
    kinds     drafter → its kind, whatever its name; those of its parts, joined by +, for a hybrid
    depths    drafter → the most tokens of a path that it drafts
    carried_over  see `evaluation.carried_over`
    lossy     the drafters whose drafts were accepted by a rule that is not lossless
    processes  of each run of the program that answered: how many, as they share a machine
    threads   of each of them, and what they did while they waited
    """

    benchmarks: Sequence[Benchmark]
    drafters: tuple[str, ...]
    records: list[TurnRecord] = field(default_factory=list)
    noise: float | None = None
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)
    carried_over: dict[str, dict[str, Any]] = field(default_factory=dict)
    lossy: frozenset[str] = frozenset()
    processes: Sequence[int] = (1,)
    threads: Sequence[str] = ()


def groups_of(benchmarks: Sequence[Benchmark], group_size: int = 1) -> list[Group]:
    """All groups of `group_size` questions, in the order in which they are asked."""
    return [
        Group(benchmark.name, start)
        for benchmark in benchmarks
        for start in range(0, len(benchmark.questions), group_size)
    ]


def decode(
    engines: Mapping[str, AnyEngine],
    oracle: Oracle,
    benchmarks: Sequence[Benchmark],
    render: Render,
    store: DecodedFolder,
    progress: Progress = lambda stage, done, of: None,
    group_size: int = 1,
    processes: Processes = ALONE,
) -> None:
    """This process's share of the groups that `store` lacks: every engine's turns, then the oracle's answers.

    `engines` must contain `vanilla`, the baseline of gamma; `transformers` (`HFGenerate`) is an optional second one.
    `group_size`: questions that one drafter answers before the next takes its turn; above 1 for batched engines.
    """
    if VANILLA not in engines:
        raise ValueError(f"an evaluation needs the drafter 'vanilla' to compare with; got {list(engines)}; add it")
    named = {benchmark.name: benchmark for benchmark in benchmarks}
    groups = groups_of(benchmarks, group_size)[processes.rank :: processes.count]
    missing = [group for group in groups if store.get(group) is None]
    meter = Meter(devices_of(oracle.target))
    if missing:
        warm_up(engines, oracle.settings, benchmarks, render, meter)
    drafters = drafters_of(engines)
    before = findings_of(drafters)
    run, total = uuid.uuid4().hex, len(missing) * len(engines)
    # A scan of all existing objects takes a quarter of a second, charged to the drafter that triggers it.
    gc.collect()
    gc.freeze()
    try:
        for number, group in enumerate(missing):
            benchmark, records = named[group.benchmark], list[TurnRecord]()
            questions = range(len(benchmark.questions))[group.start : group.start + group_size]
            for position, name in enumerate(drafter_order(tuple(engines), groups.index(group))):
                progress(f"{group.benchmark}: {name}", number * len(engines) + position, total)
                records += answer_questions(name, engines[name], oracle, benchmark, questions, render, meter)
            own = subtract_counts(findings_of(drafters), before)
            store.put(group, DecodedGroup(run, records, own, processes=processes.count, threads=threads_in_use()))
    finally:
        gc.unfreeze()
    progress("decoded", total, total)
    done = {group: store.get(group) for group in groups}
    unchecked = {group: decoded for group, decoded in done.items() if decoded and decoded.expected is None}
    for number, (group, decoded) in enumerate(unchecked.items()):
        progress("checking against generate", number, len(unchecked))
        if not has_stop_rules(oracle.settings):  # the row of `generate` has the oracle's own answers
            hf = engines.get(TRANSFORMERS)
            rows = [row for row in decoded.records if row.drafter == TRANSFORMERS and type(hf) is HFGenerate]
            oracle.add_answers({row.prompt: row.generation.tokens for row in rows})
        prompts = dict.fromkeys(record.prompt for record in decoded.records)
        store.put(group, replace(decoded, expected={prompt: oracle.answer(prompt) for prompt in prompts}))
    progress("checking against generate", len(unchecked), len(unchecked))


def judge_decoded(
    engines: Mapping[str, AnyEngine],
    oracle: Oracle,
    benchmarks: Sequence[Benchmark],
    store: DecodedFolder,
    group_size: int = 1,
    progress: Progress = lambda stage, done, of: None,
) -> Evaluation:
    """All groups together, every turn judged against the oracle's answer and scored where its benchmark has scores.

    ValueError if a group is missing.
    """
    found = []
    for group in groups_of(benchmarks, group_size):
        decoded = store.get(group)
        if decoded is None or decoded.expected is None:
            raise ValueError(
                f"the questions of {group} are missing; a process ended early: the same command, "
                "without --overwrite, goes on there"
            )
        oracle.add_answers(decoded.expected)
        found.append(decoded)
    records = [record for decoded in found for record in decoded.records]
    turns, named = list[TurnRecord](), {benchmark.name: benchmark for benchmark in benchmarks}
    for turn in records:
        progress("judging", len(turns), len(records))
        difference = judge(oracle, turn.prompt, turn.generation.tokens)
        turns.append(replace(turn, difference=difference, scores=scores_of(turn, named[turn.benchmark])))
    progress("judging", len(records), len(records))
    drafters = drafters_of(engines)
    carried = carried_over(drafters, records, runs=len({decoded.run for decoded in found}))
    first = {name: alike[0] for name, alike in drafters.items()}
    typical = oracle.settings.typical is not None
    lossy = frozenset(name for name, drafter in first.items() if typical and drafter.max_nodes)
    facts: dict[str, Any] = described(first) | {"findings": total_findings(found), "carried_over": carried}
    facts["processes"] = sorted({decoded.processes for decoded in found})
    facts["threads"] = sorted({decoded.threads for decoded in found} - {""})
    facts["kinds"] |= {name: TRANSFORMERS for name, engine in engines.items() if isinstance(engine, HFGenerate)}
    return Evaluation(benchmarks, tuple(engines), turns, oracle.measured_noise, lossy=lossy, **facts)


def scores_of(record: TurnRecord, benchmark: Benchmark) -> dict[str, float]:
    """The scores of a turn by name, which only a question's last one has."""
    question = benchmark.questions[record.question]
    last = record.turn == len(question.turns) - 1
    if benchmark.score is None or not last:
        return {}
    return benchmark.score(question, record.text, record.in_thought, record.finish_reason)


def described(drafters: Mapping[str, Drafter]) -> dict[str, dict[str, Any]]:
    """The fields `sources`, `options`, `kinds` and `depths` of an evaluation of these drafters."""
    sources = {name: drafter.sources for name, drafter in drafters.items()}
    options = {name: drafter.settings() for name, drafter in drafters.items()}
    kinds = {
        name: "+".join(part.drafter.kind for part in getattr(drafter, "parts", ())) or drafter.kind
        for name, drafter in drafters.items()
    }
    depths = {name: drafter.deepest_draft for name, drafter in drafters.items()}
    return {"sources": sources, "options": options, "kinds": kinds, "depths": depths}


def drafters_of(engines: Mapping[str, AnyEngine]) -> dict[str, list[Drafter]]:
    """The drafters of the engines that have any; a batch engine may have several alike, one a slot."""
    drafting: dict[str, Drafter] = {n: engine.drafter for n, engine in engines.items() if hasattr(engine, "drafter")}
    return {
        name: list(dict.fromkeys(drafter.of_slot(slot) for slot in range(drafter.slots)))
        for name, drafter in drafting.items()
    }


def findings_of(drafters: Mapping[str, Sequence[Drafter]]) -> dict[str, dict[str, Any]]:
    """Name → its drafters' own statistics together, where they have any."""
    return {name: found for name, its in drafters.items() if (found := add_findings([one.findings() for one in its]))}


def drafter_order(names: Sequence[Key], index: int) -> list[Key]:
    """The order in which drafters answer question `index`.

    In N questions each of N drafters has every rank once; then they are shuffled, so that what one leaves in the
    processor's caches does not always affect the same next one.
    """
    shuffle, start = divmod(index, len(names))
    shuffled = random.Random(shuffle).sample(list(names), len(names))
    return [*shuffled[start:], *shuffled[:start]]


def answer_questions(
    name: str,
    engine: AnyEngine,
    oracle: Oracle,
    benchmark: Benchmark,
    indices: Sequence[int],
    render: Render,
    meter: Meter,
) -> list[TurnRecord]:
    """The turns of each question of `indices`, up to the first prompt that does not fit, question by question.

    The prompts of one turn of all questions go to the engine together. A question ends, too, where the chat template
    refuses the answer before, as gpt-oss's does one that was cut before its final channel.
    """
    messages: dict[int, Messages] = {index: benchmark.questions[index].opening for index in indices}
    answered: dict[int, list[TurnRecord]] = {index: [] for index in indices}
    for turn in range(max(len(benchmark.questions[index].turns) for index in indices)):
        unanswered = [i for i in indices if len(benchmark.questions[i].turns) > turn == len(answered[i])]
        for index in unanswered:
            messages[index].append({"role": "user", "content": benchmark.questions[index].turns[turn]})
        rendered: dict[int, tuple[int, ...]] = {}
        for index in unanswered:
            try:
                rendered[index] = tuple(render(messages[index], benchmark.questions[index].extra))
            except ConversationError as error:
                if turn == 0:
                    raise
                which = f"{benchmark.name}, question {benchmark.questions[index].question_id}"
                logger.warning("%s, is left out from turn %d on for %s: %s", which, turn + 1, name, error)
        unanswered, prompts = [*rendered], [*rendered.values()]
        if not prompts:
            break
        found, used = meter.measure(name, partial(_generate_or_none, engine, prompts, oracle.settings))
        tokens = sum(len(generation.tokens) for generation in found if generation is not None)
        for index, prompt, generation in zip(unanswered, prompts, found):
            if generation is None:
                continue
            joules = None if used.joules is None else used.joules * len(generation.tokens) / max(1, tokens)
            text = oracle.target.answer_text(generation.tokens)
            messages[index].append({"role": "assistant", "content": text})
            question = benchmark.questions[index]
            record = TurnRecord(
                benchmark.name,
                *(index, question.question_id, question.category, turn),
                *(name, prompt, text, generation),
                peak_memory=used.peak_memory,
                joules=joules,
                in_thought=oracle.target.opens_thought(prompt),
            )
            answered[index].append(record)
    return [record for turns in answered.values() for record in turns]


def _generate_or_none(
    engine: AnyEngine, prompts: Sequence[tuple[int, ...]], settings: GenerationSettings
) -> list[Generation | None]:
    """The answer to each prompt, None for a prompt that does not fit the context."""
    if hasattr(engine, "generate_or_none"):
        return list(engine.generate_or_none([list(prompt) for prompt in prompts], settings))
    found: list[Generation | None] = []
    for prompt in prompts:
        try:
            found.append(engine.generate(list(prompt), settings))
        except ContextError:
            found.append(None)
    return found


def time_engines(
    engines: Mapping[int, DecodingEngine], prompts: Iterable[list[int]], settings: GenerationSettings
) -> dict[int, tuple[int, int, float]]:
    """(new tokens, target steps, seconds) of every engine over all prompts; the engines take turns (`drafter_order`).

    Each engine first answers the reversed first prompt, untimed.
    """
    totals = {key: (0, 0, 0.0) for key in engines}
    for turn, prompt in enumerate(prompts):
        if turn == 0:
            for engine in engines.values():
                with suppress(Overflow):  # of this text alone
                    engine.generate(prompt[::-1], endless(settings))
                forget_all(engine.drafter)
        for key in drafter_order(list(engines), turn):
            answer, (tokens, steps, seconds) = engines[key].generate(prompt, settings), totals[key]
            seconds += answer.seconds["total"]
            totals[key] = tokens + len(answer.tokens), steps + answer.target_steps, seconds
    return totals


def _warm_up_or_none(engine: AnyEngine, prompt: Any, settings: GenerationSettings) -> list[Generation | None]:
    """As `_generate_or_none`; [None] also for a text whose states overflow, which is no question."""
    try:
        return _generate_or_none(engine, [prompt], settings)
    except Overflow:
        return [None]


def endless(settings: GenerationSettings) -> GenerationSettings:
    """For a warm-up: nothing ends it before its tokens do, as programs are compiled in the second step and later."""
    return replace(settings, max_new_tokens=WARM_UP_TOKENS, eos_token_ids=(), stop_strings=(), stop=None)


def warm_up(
    engines: Mapping[str, AnyEngine],
    settings: GenerationSettings,
    benchmarks: Sequence[Benchmark],
    render: Render,
    meter: Meter,
) -> None:
    """Discard a short answer to the first question that fits, so that allocation and compilation are not timed.

    Drafters that keep something of earlier texts forget this one, whose words are those of a measured prompt, reversed.
    A GPU may still capture graphs for longer texts while it is timed.
    """
    short = endless(settings)
    questions = [question for benchmark in benchmarks for question in benchmark.questions]
    for name, engine in engines.items():
        for question in questions:
            reversed_words = {"role": "user", "content": " ".join(question.turns[0].split()[::-1])}
            prompt = tuple(render([*question.opening, reversed_words], question.extra))
            found, _ = meter.measure(name, partial(_warm_up_or_none, engine, prompt, short))
            if found != [None]:
                break
        if hasattr(engine, "drafter"):
            forget_all(engine.drafter)
