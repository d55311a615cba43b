"""An engine that answers from a table, so that every figure of a report can be worked out by hand."""

from types import SimpleNamespace

import torch

from draft_heads.data.text.benchmarks import Question
from draft_heads.inference.evaluation.evaluate import Benchmark, judge_decoded
from draft_heads.inference.evaluation.evaluate import decode as decode_groups
from draft_heads.inference.generation import ContextError, Generation, GenerationSettings

CONTEXT = 40  # a prompt is one token per character


def render(messages, extra=None):
    """One token per character; each turn's text is followed by token 0."""
    return [token for message in messages for token in (*map(ord, message["content"]), 0)]


def decode(tokens, skip_special_tokens=True):
    return "".join(chr(token) for token in tokens if token)


def question(question_id, category, *turns, reference=None):
    return Question(question_id, category, list(turns), reference)


class StubEngine:
    """Answers a prompt with its last question's text reversed, `per_step` tokens a step, at fixed cost."""

    def __init__(self, per_step=1, seconds_per_token=0.01, spoil=None, log=None, name=""):
        self.per_step, self.seconds_per_token, self.spoil = per_step, seconds_per_token, spoil
        self.log, self.name = log, name
        self.prompts = []

    def generate(self, prompt_ids, settings):
        if len(prompt_ids) >= CONTEXT:
            raise ContextError(f"{len(prompt_ids)} tokens do not fit")
        self.prompts.append((decode(prompt_ids), settings.max_new_tokens))
        if self.log is not None:
            self.log.append(self.name)
        tokens = [*reversed(last_text(prompt_ids)), 0]
        if self.spoil is not None:
            tokens[self.spoil] += 1
        rest, lengths = len(tokens) - 1, [1]
        while rest:
            lengths.append(min(self.per_step, rest))
            rest -= lengths[-1]
        total = self.seconds_per_token * len(tokens)
        parts = {
            "draft": 0.25 * total,
            "verify": 0.5 * total,
            "accept": 0.125 * total,
            "other": 0.125 * total,
        }
        sources = [-1, *(source for kept in lengths[1:] for source in [0] * (kept - 1) + [-1])]
        return Generation(tokens, lengths, sources, {**parts, "total": total}, "eos")


class StubOracle:
    """The stub engine's right answers; as in float64, every difference is unexplained."""

    measured_noise = None

    def __init__(self, settings=None):
        self.settings = settings or GenerationSettings(max_new_tokens=64, eos_token_ids=(0,))
        facts = {"dtype": torch.float64, "device": torch.device("cpu"), "layer_devices": []}
        self.target = SimpleNamespace(answer_text=decode, opens_thought=lambda prompt: False, **facts)

    def add_answers(self, answers):
        assert all(self.answer(prompt) == tokens for prompt, tokens in answers.items())

    def answer(self, prompt):
        return [*reversed(last_text(list(prompt))), 0]


class DecodedInMemory(dict):
    """A `DecodedFolder` without a folder."""

    def put(self, group, decoded):
        self[group] = decoded


def evaluate(engines, oracle, benchmarks, render, store=None, group_size=1):
    """`decode` and `judge_decoded`, in one process."""
    store = DecodedInMemory() if store is None else store
    decode_groups(engines, oracle, benchmarks, render, store, group_size=group_size)
    return judge_decoded(engines, oracle, benchmarks, store, group_size)


def last_text(prompt_ids):
    body = prompt_ids[:-1]
    start = len(body) - body[::-1].index(0) if 0 in body else 0
    return body[start:]


QUESTIONS = [
    question(1, "writing", "abcd", "efg"),  # 5 and 4 new tokens
    question(2, "math", "hi", reference="ih"),  # 3 new tokens
    question(3, "math", "jk", reference="jk"),  # 3, scored wrong
]


def benchmark(questions=None, name="bench"):
    return Benchmark(name, questions or QUESTIONS, same_text)


def same_text(question, answer, in_thought, finish_reason):
    return {} if question.reference is None else {"accuracy": float(answer == question.reference)}
