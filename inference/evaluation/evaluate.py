"""Answer benchmark questions with every drafter, time them fairly, and judge each answer.

Fair means: one process, the same prompts, the same token counter, a discarded warm-up, and the drafters
taking turns question by question in changing order, so that a machine that slows down or heats up slows
them all. Every drafter holds its own conversation: the second turn's prompt contains its own first answer.

Questions, the chat template and the rule that scores an answer come in as plain arguments; nothing here reads
files.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.evaluation.lossless import Difference, Oracle, Turn, judge
from draft_heads.inference.generation import ContextError, Generation, GenerationSettings

VANILLA = "vanilla"
TRANSFORMERS = "transformers"  # the row of transformers' own `generate`
BASELINES = (TRANSFORMERS, "transformers_lookup", "transformers_assisted")  # its own ways; no drafter may be called so
WARM_UP_TOKENS = 16

Key = TypeVar("Key")
Messages = list[dict[str, str]]
Progress = Callable[[str, int, int], None]  # stage, done, of


class Question(Protocol):
    """What is asked, turn after turn; `reference` holds the right answer where there is one."""

    question_id: int | str
    category: str | None
    turns: list[str]
    reference: str | None


class Engine(Protocol):
    """The part of the decoding engine that an evaluation uses."""

    def generate(self, prompt_ids: list[int], settings: GenerationSettings) -> Generation: ...


class ManyAtOnce(Protocol):
    """An engine that decodes several prompts at once (`inference.batch.BatchEngine`)."""

    def answers(self, prompts: Sequence[list[int]], settings: GenerationSettings) -> Sequence[Generation | None]: ...


@dataclass(frozen=True)
class Benchmark:
    """Named questions; `is_correct(answer, reference)` scores the last turn where a reference is given."""

    name: str
    questions: Sequence[Any]
    is_correct: Callable[[str, str], bool] | None = None


@dataclass(frozen=True)
class TurnRecord:
    """One answered turn; `difference` is None while unjudged and when the answer is the oracle's."""

    benchmark: str
    question: int  # index in its benchmark
    question_id: int | str
    category: str | None
    turn: int
    drafter: str
    prompt: tuple[int, ...]
    text: str
    generation: Generation
    correct: bool | None = None
    difference: Difference | None = None


@dataclass(frozen=True)
class Evaluation:
    """Everything that was decoded: records in the order they ran.

    sources   drafter → the names of who drafts for it, as `Generation.sources` counts them
    findings  drafter → what it has learned about itself, where there is anything
    """

    benchmarks: Sequence[Benchmark]
    drafters: tuple[str, ...]
    records: list[TurnRecord] = field(default_factory=list)
    noise: float | None = None
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)


def evaluate(
    engines: Mapping[str, Engine | ManyAtOnce],
    oracle: Oracle,
    benchmarks: Sequence[Benchmark],
    render: Callable[[Messages], list[int]],
    progress: Progress = lambda stage, done, of: None,
    on_answer: Callable[[list[TurnRecord]], None] = lambda records: None,
    questions_at_once: int = 1,
) -> Evaluation:
    """Decode every question with every engine, then judge every turn against the oracle.

    `engines` must hold `vanilla`, the yardstick of gamma; `transformers`, a second yardstick, is
    `inference.evaluation.hf_generate.PlainGenerate` and may be left out. `on_answer` receives each question's turns as
    soon as a drafter has answered it (before they are judged), for results that survive an interruption.
    `questions_at_once`: drafters take turns after so many questions; above 1 for engines that decode batches.
    """
    if VANILLA not in engines:
        raise ValueError(f"an evaluation needs the drafter 'vanilla' to compare with, got {list(engines)}")
    warm_up(engines.values(), oracle.settings, benchmarks, render)
    with _older_objects_set_apart():
        records = _answers(engines, oracle, benchmarks, render, progress, on_answer, questions_at_once)
    drafters = {name: engine.drafter for name, engine in engines.items() if hasattr(engine, "drafter")}
    return Evaluation(
        benchmarks,
        tuple(engines),
        judge_records(oracle, records, progress),
        oracle.measured_noise,
        {name: drafter.sources for name, drafter in drafters.items()},
        findings_of(drafters),
    )


@contextmanager
def _older_objects_set_apart() -> Iterator[None]:
    """The garbage collector does not walk through what is there already, libraries and programs: that takes it a
    quarter of a second or more, in the answer of a drafter that happens to make many objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _answers(
    engines: Mapping[str, Engine | ManyAtOnce],
    oracle: Oracle,
    benchmarks: Sequence[Benchmark],
    render: Callable[[Messages], list[int]],
    progress: Progress,
    on_answer: Callable[[list[TurnRecord]], None],
    questions_at_once: int,
) -> list[TurnRecord]:
    """Every drafter's answer to every question, in turn."""
    names = tuple(engines)
    decode = oracle.target.tokenizer.decode
    records: list[TurnRecord] = []
    total = sum(len(benchmark.questions) for benchmark in benchmarks) * len(names)
    done = 0
    for benchmark in benchmarks:
        for group, start in enumerate(range(0, len(benchmark.questions), questions_at_once)):
            questions = benchmark.questions[start : start + questions_at_once]
            for name in order(names, group):
                progress(f"{benchmark.name}: {name}", done, total)
                for index, turns in enumerate(
                    answer_questions(engines[name], oracle.settings, questions, render, decode), start
                ):
                    question = benchmark.questions[index]
                    answered = [
                        TurnRecord(
                            benchmark.name,
                            index,
                            question.question_id,
                            question.category,
                            turn,
                            name,
                            prompt,
                            text,
                            generation,
                            _correct(benchmark, question, turn, text),
                        )
                        for turn, (prompt, text, generation) in enumerate(turns)
                    ]
                    records += answered
                    on_answer(answered)
                    done += 1
    progress("decoded", total, total)
    return records


def findings_of(drafters: Mapping[str, Drafter]) -> dict[str, dict[str, Any]]:
    """Drafter → what it has learned about itself, where there is anything."""
    return {name: found for name, drafter in drafters.items() if (found := drafter.findings())}


def order(names: Sequence[Key], index: int) -> list[Key]:
    """The order in which drafters answer question `index`: each is at every place once in as many questions as there
    are, and then behind others: what one leaves in the caches shall not always help, or harm, the same next one."""
    turn, start = divmod(index, len(names))
    mixed = random.Random(turn).sample(list(names), len(names))
    return [*mixed[start:], *mixed[:start]]


def answer_questions(
    engine: Engine | ManyAtOnce,
    settings: GenerationSettings,
    questions: Sequence[Question],
    render: Callable[[Messages], list[int]],
    decode: Callable[..., str],
) -> list[list[tuple[tuple[int, ...], str, Generation]]]:
    """For each question (prompt, text, generation) per turn, up to the first prompt that does not fit the context.

    Turn after turn, all questions' prompts go to the engine together.
    """
    messages: list[Messages] = [[] for _ in questions]
    answered: list[list[tuple[tuple[int, ...], str, Generation]]] = [[] for _ in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [
            index for index, question in enumerate(questions) if len(question.turns) > turn == len(answered[index])
        ]
        for index in asked:
            messages[index].append({"role": "user", "content": questions[index].turns[turn]})
        prompts = [tuple(render(messages[index])) for index in asked]
        for index, prompt, generation in zip(asked, prompts, _answers_of(engine, prompts, settings)):
            if generation is not None:
                text = decode(generation.tokens, skip_special_tokens=True)
                messages[index].append({"role": "assistant", "content": text})
                answered[index].append((prompt, text, generation))
    return answered


def _answers_of(
    engine: Engine | ManyAtOnce, prompts: Sequence[tuple[int, ...]], settings: GenerationSettings
) -> list[Generation | None]:
    """An answer to each prompt, None where it does not fit the context."""
    if hasattr(engine, "answers"):
        return list(engine.answers([list(prompt) for prompt in prompts], settings))
    found: list[Generation | None] = []
    for prompt in prompts:
        try:
            found.append(engine.generate(list(prompt), settings))
        except ContextError:
            found.append(None)
    return found


def in_turn(
    engines: Mapping[int, Engine], prompts: Iterable[list[int]], settings: GenerationSettings
) -> dict[int, tuple[int, int, float]]:
    """New tokens, target steps and seconds of every engine over all prompts, which they answer in changing `order`.

    Each has answered the first prompt read backwards before, untimed.
    """
    totals = {key: (0, 0, 0.0) for key in engines}
    for turn, prompt in enumerate(prompts):
        if turn == 0:
            for engine in engines.values():
                engine.generate(prompt[::-1], settings)
        for key in order(list(engines), turn):
            answer, (tokens, steps, spent) = engines[key].generate(prompt, settings), totals[key]
            totals[key] = (
                tokens + len(answer.tokens),
                steps + answer.target_steps,
                spent + answer.seconds["total"],
            )
    return totals


def warm_up(
    engines: Iterable[Engine | ManyAtOnce],
    settings: GenerationSettings,
    benchmarks: Sequence[Benchmark],
    render: Callable[[Messages], list[int]],
) -> None:
    """A short answer to the first question that fits, thrown away: allocating and compiling is not timed.

    Its words stand in reverse order: a drafter that remembers shall not have met a measured prompt before.

    A GPU may still capture graphs for longer texts while it is timed.
    """
    short = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
    questions = [question for benchmark in benchmarks for question in benchmark.questions]
    for engine in engines:
        for question in questions:
            prompt = tuple(render([{"role": "user", "content": " ".join(question.turns[0].split()[::-1])}]))
            if _answers_of(engine, [prompt], short) != [None]:
                break


def judge_records(
    oracle: Oracle, records: Sequence[TurnRecord], progress: Progress = lambda stage, done, of: None
) -> list[TurnRecord]:
    """The records with their differences; every prompt is answered before the first difference is judged."""
    prompts = list(dict.fromkeys(record.prompt for record in records))
    for done, prompt in enumerate(prompts):
        progress("checking against generate", done, len(prompts))
        oracle.answer(prompt)
    progress("checking against generate", len(prompts), len(prompts))
    return [replace(record, difference=judge(oracle, _as_turn(record))) for record in records]


def _as_turn(record: TurnRecord) -> Turn:
    place = f"{record.drafter}, {record.benchmark} question {record.question_id}, turn {record.turn + 1}"
    return Turn(record.prompt, tuple(record.generation.tokens), place)


def _correct(benchmark: Benchmark, question: Question, turn: int, text: str) -> bool | None:
    last = turn == len(question.turns) - 1
    if benchmark.is_correct is None or question.reference is None or not last:
        return None
    return benchmark.is_correct(text, question.reference)
