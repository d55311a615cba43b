"""Replays recorded answers through drafters that read text only: what they would have saved, without the target.

Greedy decoding commits the target's answer whatever is drafted, so how many target steps a drafter would have taken
follows from the answer alone: each step commits the drafts that the answer confirms, and one token more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.registry import DRAFTERS, DrafterSpec, build_drafter
from draft_heads.inference.evaluation.answers import Answer, QuestionKey, some
from draft_heads.inference.evaluation.evaluate import Benchmark, Evaluation, Messages, Question, TurnRecord, findings_of
from draft_heads.inference.generation import Generation
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


@dataclass(frozen=True)
class TokenizerTarget:
    """Stands in for the target where drafters are made that ask it for no more (`TextTarget`)."""

    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)


# ----------------------------------------------------------------------------------------------------
# One answer


def replay(drafter: Drafter, prompt: Sequence[int], answer: Sequence[int]) -> Generation:
    """The answer as greedy decoding with `drafter` would have written it; `seconds` stays empty.

    Step for step what `DecodingEngine` does with a target that says `answer` behind `prompt` and ends there: the
    prefill yields the first token, and a step at the end keeps no more than there is.
    """
    tokens = list(answer)
    done = Generation(tokens[:1], [1] if tokens else [], [-1] * len(tokens[:1]), {}, "stop")
    if not tokens:
        return done
    text = torch.tensor(list(prompt))
    drafter.begin(text, len(prompt) + len(tokens))
    step = VerifiedStep.of_prompt(text, _no_hidden(len(prompt)), torch.tensor(tokens[0]))
    while len(done.tokens) < len(tokens):
        drafter.observe(step)
        tree = drafter.propose()
        start = len(done.tokens)
        sources = accepted(tree, tokens[start:])
        new = tokens[start : start + len(sources) + 1]
        done.tokens.extend(new)
        done.sources.extend([*sources, -1][: len(new)])
        done.accept_lengths.append(len(new))
        step = _verified(tokens[start - 1 : start + len(sources) + 1], len(sources) + 1, tree)
    return done


def accepted(tree: DraftTree, answer: Sequence[int]) -> list[int]:
    """Who drafted each token of the longest path of `tree` that begins `answer`.

    One pass: parents come before their children, and siblings differ.
    """
    end = -1
    sources: list[int] = []
    rows = zip(*(x.tolist() for x in (tree.tokens, tree.parents, tree.source, tree.candidate)))
    for node, (token, parent, source, candidate) in enumerate(rows):
        if parent == end and candidate and len(sources) < len(answer) and token == answer[len(sources)]:
            sources.append(source)
            end = node
    return sources


def _verified(tokens: Sequence[int], count: int, tree: DraftTree) -> VerifiedStep:
    """`count` committed tokens, the old base token first, and the new base token behind them."""
    text = torch.tensor(tokens)
    return VerifiedStep(text[:count], text[1:], _no_hidden(count), torch.tensor(count), tree=tree)


def _no_hidden(tokens: int) -> Tensor:
    """[n, 0]: text drafters read no hidden states."""
    return torch.empty(tokens, 0)


# ----------------------------------------------------------------------------------------------------
# A file of answers


@dataclass(frozen=True)
class RecordedTurn:
    """What a drafter would have met: the tokens before an answer, and the answer's."""

    question: int  # index among the questions
    turn: int
    prompt: list[int]
    answer: list[int]
    text: str


def recorded_turns(
    answers: Mapping[QuestionKey, Answer],
    questions: Sequence[Question],
    tokenizer: Any,
    render: Callable[[Messages], list[int]] | None,
) -> Iterator[RecordedTurn]:
    """The turns of `questions`, one for each of `answers`, in order.

    With `render` a prompt is the conversation so far, question last. Without, it is what was answered before in the
    same conversation, behind the token that begins texts.
    """
    for index, (question, answer) in enumerate(zip(questions, answers.values())):
        messages: Messages = []
        before = [_first_token(tokenizer)]
        for turn, (asked, recorded) in enumerate(zip(question.turns, answer.turns)):
            messages.append({"role": "user", "content": asked})
            tokens = answer_tokens(tokenizer, recorded.text, recorded.new_tokens)
            yield RecordedTurn(index, turn, render(messages) if render else list(before), tokens, recorded.text)
            messages.append({"role": "assistant", "content": recorded.text})
            before += tokens


def answer_tokens(tokenizer: Any, text: str, new_tokens: int) -> list[int]:
    """Token ids of a recorded answer, with EOS where more tokens were counted than the text has.

    Decoded text has no EOS, recorded counts have: an answer of 12 tokens that was recorded as 13 ended with it, one
    recorded as 12 was cut at its greatest length.
    """
    ids: list[int] = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    ended = new_tokens > len(ids) and tokenizer.eos_token_id is not None
    return [*ids, tokenizer.eos_token_id] if ended else ids


def _first_token(tokenizer: Any) -> int:
    """BOS, or EOS of a tokenizer that has none."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError("replaying answers without --questions needs a tokenizer with BOS or EOS; it has neither")


def asked_of(answers: Mapping[QuestionKey, Answer], questions: Sequence[Question] | None) -> Sequence[Question]:
    """The question of each answer; without `questions`, one without text. ValueError names those that are missing."""
    if questions is None:
        return [Question(answer.question_id, None, [""] * len(answer.turns)) for answer in answers.values()]
    known = {question.question_id: question for question in questions}
    if missing := [answer.question_id for answer in answers.values() if answer.question_id not in known]:
        raise ValueError(
            f"every answered question must be in --questions; it lacks {some(missing)}; pass the file that was asked, "
            "--limit N for its first N, or leave --questions out"
        )
    found = [known[answer.question_id] for answer in answers.values()]
    for question, answer in zip(found, answers.values()):
        if len(question.turns) < len(answer.turns):
            raise ValueError(
                f"question {question.question_id!r} has {len(question.turns)} turns in --questions and "
                f"{len(answer.turns)} answers; pass the file that was asked"
            )
    return found


def replay_all(
    name: str,
    drafters: Mapping[str, Drafter],
    questions: Sequence[Question],
    turns: Sequence[RecordedTurn],
    progress: Callable[[str, int, int], None] = lambda stage, done, of: None,
) -> Evaluation:
    """Every turn through every drafter, one drafter after another: what it keeps of texts it keeps in their order."""
    records = []
    for place, (drafter_name, drafter) in enumerate(drafters.items()):
        for number, turn in enumerate(turns):
            progress(f"{name}: {drafter_name}", place * len(turns) + number, len(drafters) * len(turns))
            question = questions[turn.question]
            generation = replay(drafter, turn.prompt, turn.answer)
            records.append(
                TurnRecord(
                    name,
                    turn.question,
                    question.question_id,
                    question.category,
                    turn.turn,
                    drafter_name,
                    (),
                    turn.text,
                    generation,
                )
            )
    progress("replayed", len(drafters) * len(turns), len(drafters) * len(turns))
    return Evaluation(
        [Benchmark(name, questions)],
        tuple(drafters),
        records,
        sources={name: drafter.sources for name, drafter in drafters.items()},
        findings=findings_of(drafters),
    )


# ----------------------------------------------------------------------------------------------------
# Drafters


def text_drafters(specs: Sequence[DrafterSpec], tokenizer: Any, max_nodes: int) -> dict[str, Drafter]:
    """The drafters by name; ValueError for one that reads more of the target than its text."""
    for spec in specs:
        for part in spec.parts:
            if part.kind in DRAFTERS and not DRAFTERS[part.kind].text_only:
                raise ValueError(
                    f"recorded answers can be replayed through drafters that read text only; {spec.name!r} is of kind "
                    f"{part.kind}, which needs a target; measure it with scripts/evaluate.py"
                )
    target = cast(Target, TokenizerTarget(tokenizer))  # text drafters ask for no more
    return {spec.name: build_drafter(spec, target, max_nodes) for spec in specs}
