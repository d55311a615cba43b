"""Replay answers through drafters: the target steps that they would have taken, without the target.

Greedy decoding writes the target's answer whatever is drafted, so the number of target steps follows from the answer
alone: each step commits the drafts that agree with the answer, and one token more. Recorded answers are replayed
through text-only drafters and, where one forward of the target over each gives its hidden states, through heads;
training replays held-out answers, whose hidden states it has, through its head's drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draft_heads.data.fingerprint import tokenizer_hash
from draft_heads.data.text.benchmarks import Question
from draft_heads.data.text.end_tokens import closing_token
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.registry import DRAFTERS, HEAD_DRAFTERS, DrafterBuilder, DrafterSpec
from draft_heads.inference.evaluation.answer_files import Answer, QuestionKey, check_one_benchmark, some
from draft_heads.inference.evaluation.carried_over import carried_over
from draft_heads.inference.evaluation.decoded import TurnRecord
from draft_heads.inference.evaluation.evaluate import (
    Benchmark,
    Evaluation,
    Messages,
    described,
    findings_of,
)
from draft_heads.inference.generation import Generation
from draft_heads.inference.step import VerifiedStep, select_layers
from draft_heads.inference.target.kv_cache import STEPS
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


def replay(
    drafter: Drafter,
    prompt: Sequence[int],
    answer: Sequence[int],
    hidden: Tensor | None = None,
    aux_hidden: Tensor | None = None,
) -> Generation:
    """The answer as greedy decoding with `drafter` would have written it; `seconds` and `finish_reason` stay empty.

    Takes the same steps as `DecodingEngine` with a target that writes `answer` after `prompt` and stops: the prefill
    gives the first token, and the last step keeps no more tokens than are left. A drafter that reads more than the text
    needs the target's states of prompt and answer, `hidden [n, H]` and, of its `target_layers`, `aux_hidden [n, k·H]`.

    Worked example: the answer `a b c d E`. The prefill gives a; `b c` is accepted after a, so the step gives b c d; `E`
    is accepted after d and ends the answer: three steps for five tokens, β = 1.67.
    """
    tokens = list(answer)
    done = Generation(tokens[:1], [1] if tokens else [], [-1] * len(tokens[:1]))
    if not tokens:
        return done
    count = len(prompt)  # of the tokens that the newest step commits
    text = torch.tensor([*prompt, *tokens], device=None if hidden is None else hidden.device)
    rounded = STEPS[text.device.type]
    states = text.new_empty(len(text), 0, dtype=torch.float32) if hidden is None else hidden
    drafter.begin(0, text[:count], len(text))
    step = VerifiedStep.of_prompt(text[:count], states[:count], text[count : count + 1], _rows(aux_hidden, 0, count))
    while len(done.tokens) < len(tokens):
        start = len(done.tokens)
        drafter.set_visible_length(-(-(len(prompt) + start + drafter.max_depth) // rounded) * rounded)
        drafter.observe(step, 0 if step.tree is None else None)
        tree = drafter.propose()
        sources = accepted_sources(tree, tokens[start:])
        count = len(sources) + 1
        new = tokens[start : start + count]
        if start + count >= len(tokens):
            drafter.end(0, new)
        done.tokens.extend(new)
        done.sources.extend([*sources, -1][: len(new)])
        done.accept_lengths.append(len(new))
        base = len(prompt) + start - 1  # the old base token comes first, the new one last
        rows, accepted = slice(base, base + count), text.new_tensor([count])
        following, aux = text[None, base + 1 : base + 1 + count], _rows(aux_hidden, base, base + count)
        aux = None if aux is None else aux[None]
        step = VerifiedStep(text[None, rows], following, states[None, rows], accepted, tree=tree, aux_hidden=aux)
    return done


def _rows(states: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if states is None else states[start:end]


def accepted_sources(tree: DraftTree, answer: Sequence[int]) -> list[int]:
    """The source of each token of the longest path of one text's `tree` that is a prefix of `answer`.

    One pass suffices, because parents come before their children and siblings differ.
    """
    end = -1
    sources: list[int] = []
    columns = torch.cat([tree.tokens, tree.parents, tree.source, tree.candidate.to(tree.tokens.dtype)])
    for node, (token, parent, source, candidate) in enumerate(zip(*columns.tolist())):  # one copy to the host
        if parent == end and candidate and len(sources) < len(answer) and token == answer[len(sources)]:
            sources.append(source)
            end = node
    return sources


def recorded_turns(
    name: str,
    answers: Mapping[QuestionKey, Answer],
    questions: Sequence[Question],
    tokenizer: Any,
    renderer: ChatRenderer | None,
    end: int | None,
) -> Iterator[TurnRecord]:
    """The turns of the benchmark's `questions`, one for each of `answers`, in order; of no drafter yet.

    end: the token that ends an answer (`end_of_answer`)

    With `renderer` a prompt is the conversation so far, the question last; without, it is the first token of a text
    (BOS, or EOS of a tokenizer that has none) and the earlier answers of the same conversation. Answers are the token
    ids that a file has of this tokenizer; the text of others is tokenised, with `renderer` as it follows its prompt.
    """
    own = tokenizer_hash(tokenizer) if any(answer.tokenizer for answer in answers.values()) else None
    marks = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
    if not marks and renderer is None:
        raise ValueError("replaying answers without --questions needs a tokenizer with BOS or EOS; it has neither")
    for index, (question, answer) in enumerate(zip(questions, answers.values())):
        messages: Messages = question.opening
        before = marks[:1]
        for turn, (text, recorded) in enumerate(zip(question.turns, answer.turns)):
            messages.append({"role": "user", "content": text})
            prompt = list(before) if renderer is None else renderer.prompt(messages, question.extra)
            if own is not None and answer.tokenizer == own:
                tokens = list(recorded.token_ids)
            else:
                if renderer is None:
                    ids = tokenizer(recorded.text, add_special_tokens=False, verbose=False)["input_ids"]
                else:
                    ids = renderer.answer_after(messages, recorded.text, question.extra)
                tokens = answer_tokens(ids, recorded.new_tokens, end, recorded.finish_reason)
            which = name, index, question.question_id, question.category, turn
            yield TurnRecord(*which, "", tuple(prompt), recorded.text, Generation(tokens))
            messages.append({"role": "assistant", "content": recorded.text})
            before += tokens


def end_of_answer(tokenizer: Any) -> int | None:
    """The token with which a model ends its answers: the one that its chat template closes them with, else its EOS.

    They differ in Gemma, Phi-3, GLM-4 and others: `<end_of_turn>` and `<eos>`.
    """
    closing = closing_token(tokenizer)
    return tokenizer.eos_token_id if closing is None else closing


def answer_tokens(ids: Sequence[int], new_tokens: int, end: int | None, finish_reason: str = "") -> list[int]:
    """Token ids of a recorded answer, with `end` where it ended by itself; without a reason, where more were counted.

    ids: of its text

    Decoded text lacks that token, recorded counts include it: a text of 12 tokens recorded as 13 ended with it, one
    recorded as 12 was cut at the maximum length. A text may have fewer tokens than were written, so a recorded reason
    decides.
    """
    ended = finish_reason == "eos" if finish_reason else new_tokens > len(ids)
    return [*ids, end] if ended and end is not None else [*ids]


def match_questions(answers: Mapping[QuestionKey, Answer], questions: Sequence[Question] | None) -> Sequence[Question]:
    """The question of each answer, with the turns that were answered; without `questions`, one without text.

    ValueError names those that are missing.
    """
    if questions is None:
        return [Question(answer.question_id, None, [""] * len(answer.turns)) for answer in answers.values()]
    check_one_benchmark(answers)
    known = {question.question_id: question for question in questions}
    if missing := [answer.question_id for answer in answers.values() if answer.question_id not in known]:
        raise ValueError(
            f"every answered question must be in --questions; it lacks {some(missing)}; pass the file that was "
            "answered, --limit N for its first N, or, without --target and --chat_template, no --questions"
        )
    found = [known[answer.question_id] for answer in answers.values()]
    for question, answer in zip(found, answers.values()):
        if len(question.turns) < len(answer.turns):
            raise ValueError(
                f"question {question.question_id!r} has {len(question.turns)} turns in --questions and "
                f"{len(answer.turns)} answers; pass the file that was answered"
            )
    return [replace(one, turns=one.turns[: len(answer.turns)]) for one, answer in zip(found, answers.values())]


@dataclass(frozen=True)
class States:
    """A target's states of a prompt and its answer: `hidden [n, H]` and, of some layers, `aux_hidden [n, k·H]`."""

    hidden: Tensor | None = None
    aux_hidden: Tensor | None = None
    layers: tuple[int, ...] = ()

    def of_layers(self, layers: Sequence[int]) -> Tensor | None:
        """`aux_hidden` of these layers, side by side; None for none."""
        return None if self.aux_hidden is None else select_layers(self.aux_hidden, self.layers, layers)


def no_states(turn: TurnRecord) -> States:
    """What text-only drafters are given."""
    return States()


class AnswerStates:
    """The target's states along recorded answers, from one forward over each; counts those that it would not write."""

    def __init__(self, target: Target, drafters: Iterable[Drafter]) -> None:
        self.target = target
        self.layers = tuple(sorted({layer for drafter in drafters for layer in drafter.target_layers}))
        self.turns = self.not_greedy = 0

    def __call__(self, turn: TurnRecord) -> States:
        """ValueError for a prompt and answer that exceed the target's positions."""
        ids, start = [*turn.prompt, *turn.generation.tokens], len(turn.prompt)
        if len(ids) > self.target.max_positions:
            raise ValueError(
                f"a prompt and its answer must fit the target's {self.target.max_positions} positions; those of "
                f"question {turn.question_id!r} are {len(ids)} tokens; leave it out"
            )
        mask = [place >= start for place in range(len(ids))]
        (labelled,) = self.target.label([ids], True, self.layers, [mask])
        self.turns += 1
        greedy, ends = labelled.greedy_ids, self.target.end_token_ids
        if ids[-1] in ends and greedy[-1] in ends:  # a text does not say which of several ended it
            greedy = [*greedy[:-1], ids[-1]]
        self.not_greedy += greedy[start:] != ids[start:]
        assert labelled.hidden is not None and labelled.aux_hidden is not None
        device = self.target.device
        return States(labelled.hidden.to(device), labelled.aux_hidden.to(device), self.layers)

    def note(self) -> str | None:
        """How many answers the target itself would not write so, near ties of half precision too; None for none."""
        if not self.not_greedy:
            return None
        note = (
            f"{self.not_greedy} of {self.turns} answers are not token for token what the target would write greedily "
            "after these prompts, and there β is that of a text which it would not decode."
        )
        if self.target.dtype.itemsize > 2:
            return note
        dtype = str(self.target.dtype).removeprefix("torch.")
        return f"{note} Near ties count too: in {dtype} one forward rounds otherwise than step after step."


def replay_all(
    name: str,
    drafters: Mapping[str, Drafter],
    questions: Sequence[Question],
    turns: Sequence[TurnRecord],
    progress: Callable[[str, int, int], None] = lambda stage, done, of: None,
    states: Callable[[TurnRecord], States] = no_states,
) -> Evaluation:
    """Every turn through every drafter; each drafter reads the texts in order.

    states: of a turn, the target's, where a drafter reads them
    """
    records, total = list[TurnRecord](), len(drafters) * len(turns)
    for turn in turns:
        progress(name, len(records), total)
        given = states(turn)
        for drafter_name, drafter in drafters.items():
            aux_hidden = given.of_layers(drafter.target_layers)
            with torch.inference_mode():
                replayed = replay(drafter, turn.prompt, turn.generation.tokens, given.hidden, aux_hidden)
            records.append(replace(turn, drafter=drafter_name, generation=replayed))
    progress("replayed", total, total)
    alike = {drafter_name: [drafter] for drafter_name, drafter in drafters.items()}
    facts: dict[str, Any] = {"findings": findings_of(alike), "carried_over": carried_over(alike, records)}
    return Evaluation([Benchmark(name, questions)], tuple(drafters), records, None, **(described(drafters) | facts))


def replayed_drafters(specs: Sequence[DrafterSpec], target: Target, max_nodes: int) -> dict[str, Drafter]:
    """The drafters by name; ValueError for one whose steps do not follow from text and states alone."""
    for spec in specs:
        for part in spec.parts:
            if part.kind in DRAFTERS and part.kind not in HEAD_DRAFTERS and not DRAFTERS[part.kind].text_only:
                raise ValueError(
                    f"recorded answers can be replayed through heads and text-only drafters; {spec.name!r} is of kind "
                    f"{part.kind}, which runs a model of its own or reads the target's choices; measure it with "
                    "scripts/evaluate.py"
                )
    builder = DrafterBuilder(target, max_nodes)
    return {spec.name: builder.build(spec) for spec in specs}


def text_drafters(specs: Sequence[DrafterSpec], tokenizer: Any, max_nodes: int) -> dict[str, Drafter]:
    """The drafters by name; ValueError for one that reads more than the text."""
    for spec in specs:
        for part in spec.parts:
            if part.kind in HEAD_DRAFTERS:
                raise ValueError(
                    f"a replay needs the target for a head, which reads its hidden states; {spec.name!r} is of kind "
                    f"{part.kind}; pass the target instead of its tokenizer"
                )
    # text drafters read no more of a target
    target: Any = SimpleNamespace(tokenizer=tokenizer, vocab_size=len(tokenizer), device=torch.device("cpu"))
    return replayed_drafters(specs, target, max_nodes)
