"""Sample answers of a report, token by token: which step gave a token, which source drafted it, and the step's tree.

Trees are recorded after the measured run, in a second decoding of the sample prompts, one by one and eagerly; the timed
decoding is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from draft_heads.data.text.token_spans import answer_tokens
from draft_heads.inference.batch import BatchEngine, BatchRun
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.decoded import TurnRecord
from draft_heads.inference.evaluation.evaluate import AnyEngine, Evaluation
from draft_heads.inference.generation import Generation, GenerationSettings, room
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.steps import StepRunner, TextState
from draft_heads.inference.target.cuda_graphs import Drafted
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree

MOST_TOKENS = 160

Sample = dict[str, Any]
Tree = dict[str, list[Any]]
Text = Callable[[list[int]], str]


def sample_answers(
    evaluation: Evaluation,
    engines: Mapping[str, AnyEngine],
    target: Target,
    settings: GenerationSettings,
    most_tokens: int = MOST_TOKENS,
) -> list[Sample]:
    """The first answer of each benchmark by each drafter that drafts, as report.json's `samples` holds it.

    benchmark, question_id, question, drafter, finish_reason    what was answered by whom
    answer_tokens   of the whole answer; the sample has its first whole steps, of at most `most_tokens` tokens together
    texts           text of each token; joined, the answer's text; "" for an end token and where a character needs the
                    next token's bytes too
    sources         of each token, an index into `source_names`; -1: the base token, the target's own
    accept_lengths  tokens of each step, as in `Generation`
    measured_steps  steps of the measured run that began within these tokens; more or fewer than `accept_lengths` has
                    where the drafter had learnt from the texts by the second decoding
    trees           for each step None, or the `texts`, `parents` (-1: the base token before the step) and `sources` of
                    the drafted nodes and the nodes `accepted`; None for an engine whose trees cannot be recorded and
                    where the second decoding gave other tokens
    """
    samples = []
    for benchmark in evaluation.benchmarks:
        for drafter in evaluation.drafters:
            turns = (turn for turn in evaluation.records if (turn.benchmark, turn.drafter) == (benchmark.name, drafter))
            first = min((turn for turn in turns if turn.turn == 0), key=lambda turn: turn.question, default=None)
            if first is None or not drafts(first, engines.get(drafter)):
                continue
            question = benchmark.questions[first.question].turns[0]
            names = evaluation.sources.get(drafter) or ("draft",)
            if tuple(names) == ("draft",):  # a source without a name of its own
                names = (evaluation.kinds.get(drafter) or drafter,)
            found = sample_answer(first, engines.get(drafter), target, settings, most_tokens)
            facts = {"benchmark": benchmark.name, "question_id": first.question_id, "question": question}
            samples.append({**facts, "drafter": drafter, "source_names": list(names), **found})
    return samples


def drafts(turn: TurnRecord, engine: AnyEngine | None) -> bool:
    """Whether an answer's engine drafts: the plain loops have nothing to show."""
    drafter = getattr(engine, "drafter", None)
    return any(source >= 0 for source in turn.generation.sources) or bool(getattr(drafter, "max_nodes", 0))


def sample_answer(
    turn: TurnRecord, engine: AnyEngine | None, target: Target, settings: GenerationSettings, most_tokens: int
) -> Sample:
    """The part of a sample that its answer decides; see `sample_answers`."""
    measured = whole_steps(turn.generation, most_tokens)
    again, trees = measured, list[DraftTree | None]()
    if isinstance(engine, DecodingEngine):
        again, trees = decode_again(engine, turn.prompt, settings, most_tokens)
    elif isinstance(engine, BatchEngine):
        again, trees = decode_in_first_slot(engine, turn.prompt, settings, most_tokens)
    shown = again if again.tokens == turn.generation.tokens[: len(again.tokens)] else measured
    began = accumulate(turn.generation.accept_lengths, initial=0)
    nodes: list[Tree | None] | None = None
    if trees and shown is again:
        starts = accumulate(shown.accept_lengths, initial=0)
        nodes = [
            None if tree is None else tree_of(tree, target, turn.prompt, shown, start, length)
            for tree, start, length in zip(trees, starts, shown.accept_lengths)
        ]
    return {
        "finish_reason": turn.generation.finish_reason,
        "answer_tokens": len(turn.generation.tokens),
        "texts": token_texts(shown.tokens, partial(unstripped_text, target)),
        "sources": shown.sources if len(shown.sources) == len(shown.tokens) else [-1] * len(shown.tokens),
        "accept_lengths": shown.accept_lengths,
        "measured_steps": sum(start < len(shown.tokens) for start in began),
        "trees": nodes,
    }


def whole_steps(answer: Generation, most_tokens: int) -> Generation:
    """The first steps of an answer that have at most `most_tokens` tokens: of [1, 3, 3] at most 5 are [1, 3]."""
    ends = accumulate(answer.accept_lengths)
    lengths = [length for length, end in zip(answer.accept_lengths, ends) if end <= most_tokens]
    tokens = sum(lengths)
    return Generation(answer.tokens[:tokens], lengths, answer.sources[:tokens], finish_reason=answer.finish_reason)


class RecordingSteps(StepRunner):
    """Steps that keep the tree of each."""

    def __init__(self, target: Target, engine: DecodingEngine) -> None:
        super().__init__(target, engine.drafter, ahead=False, captured=False)
        self.trees: list[DraftTree] = []

    def draft(self, step: VerifiedStep, text: TextState) -> Drafted:
        """See `StepRunner.draft`."""
        drafted = super().draft(step, text)
        self.trees.append(drafted.tree)
        return drafted


def decode_again(
    engine: DecodingEngine, prompt: Sequence[int], settings: GenerationSettings, most_tokens: int
) -> tuple[Generation, list[DraftTree | None]]:
    """The first whole steps of an answer and the tree of each, None for the prefill; by the same drafter, eagerly."""
    eager = DecodingEngine(engine.target, engine.drafter, ahead=False, captured=False)
    eager.steps = steps = RecordingSteps(engine.target, engine)
    answer = Generation()
    for _ in eager.stream(list(prompt), settings, answer):
        if len(answer.tokens) >= most_tokens:
            break
    shown = whole_steps(answer, most_tokens)
    return shown, [None, *steps.trees][: shown.target_steps]


class RecordingRun(BatchRun):
    """A run of one text, in the first slot, that keeps the tree of each step."""

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        self.trees: list[DraftTree] = []

    def verify(self, tree: DraftTree) -> VerifiedStep:
        """See `BatchRun.verify`."""
        self.trees.append(tree.map(lambda x: x[:1]))
        return super().verify(tree)


@torch.inference_mode()
def decode_in_first_slot(
    engine: BatchEngine, prompt: Sequence[int], settings: GenerationSettings, most_tokens: int
) -> tuple[Generation, list[DraftTree | None]]:
    """As `decode_again`, by a batch engine's drafter, whose other slots stay empty."""
    beyond = most_tokens + 1 + engine.drafter.max_depth  # the end of the answer shortens no step that is shown
    limit = room(engine.target, len(prompt), min(settings.max_new_tokens, beyond))
    run = RecordingRun(engine.target, engine.drafter, settings, len(prompt) + limit)
    (ended,) = run.answers([list(prompt)], [limit])
    shown = whole_steps(ended.answer, most_tokens)
    return shown, [None, *run.trees][: shown.target_steps]


def tree_of(
    tree: DraftTree, target: Target, prompt: Sequence[int], answer: Generation, start: int, length: int
) -> Tree:
    """One step's tree for report.json: its candidates, in order, and which of them the step accepted.

    start, length   where the step's tokens are in the answer
    """
    columns = zip(*(x[0].tolist() for x in (tree.tokens, tree.parents, tree.source, tree.candidate)))
    kept: dict[int, int] = {-1: -1}  # node -> its index among the candidates
    tokens, parents, sources = list[int](), list[int](), list[int]()
    for node, (token, parent, source, candidate) in enumerate(columns):
        if candidate and parent in kept:
            kept[node] = len(tokens)
            tokens.append(token)
            parents.append(kept[parent])
            sources.append(source)
    drafted = sum(source >= 0 for source in answer.sources[start : start + length])
    accepted = accepted_nodes(tokens, parents, answer.tokens[start : start + drafted])
    base = answer.tokens[start - 1] if start else prompt[-1]
    texts = [node_text(target, base if parent < 0 else tokens[parent], token) for token, parent in zip(tokens, parents)]
    return {"texts": texts, "parents": parents, "sources": sources, "accepted": accepted}


def accepted_nodes(tokens: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> list[int]:
    """The nodes that spell `path` from the root: tokens x y z, parents -1 -1 0, path x z -> [0, 2]."""
    nodes, end = list[int](), -1
    for node, (token, parent) in enumerate(zip(tokens, parents)):  # parents come before their children
        if parent == end and len(nodes) < len(path) and token == path[len(nodes)]:
            nodes.append(node)
            end = node
    return nodes


def node_text(target: Target, before: int, token: int) -> str:
    """A token's text after the token before it; U+FFFD where it is a part of a character."""
    both, first = (target.tokenizer.decode(ids, skip_special_tokens=False) for ids in ([before, token], [before]))
    return str(both[len(first) :] if both.startswith(first) else target.tokenizer.decode([token]))


def unstripped_text(target: Target, tokens: list[int]) -> str:
    """`Target.answer_text` with the blanks at both ends."""
    shown = answer_tokens(tokens, target.end_token_ids, target.answer_form)
    return str(target.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_texts(tokens: list[int], text_of: Text) -> list[str]:
    """The piece of the text that each token completes; joined, they are `text_of(tokens)`.

    A token ends where the text of the tokens so far stops to agree with the whole text: of two tokens that are two
    bytes of "🙂" each, the pieces are "" and "🙂".
    """
    whole, end, pieces = text_of(tokens), 0, list[str]()
    for count in range(1, len(tokens) + 1):
        start, so_far = end, text_of(tokens[:count]) if count < len(tokens) else whole
        end = max(start, common_prefix(so_far, whole))
        pieces.append(whole[start:end])
    return pieces


def common_prefix(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
