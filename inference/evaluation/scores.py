"""Scores of answers against their questions: accuracy of word problems, ROUGE-2 of summaries, pass@1 of code.

The figures are those of the last turn of each question, between 0 and 1; a report has their means.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from draft_heads.data.text.benchmarks import Question, gsm8k_answer
from draft_heads.data.text.known_benchmarks import SCORES
from draft_heads.data.text.thoughts import without_thoughts
from draft_heads.inference.evaluation.run_code import check_machine, pass_at_1

CUT = ("length", "context")
"""How an answer ended that a limit has cut (`Generation.finish_reason`)."""
_UNSPACED = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
"""Scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana, Chinese characters."""


class Scorer:
    """Scores answers `without_thoughts`, each text to a question once; lossless drafters share the target's.

    run_code: whether code from answers may be run on this machine, without which `pass_at_1` is not scored. ValueError
    if it may and the machine cannot limit it.
    """

    def __init__(self, questions: Iterable[Question], run_code: bool = False) -> None:
        self._run_code = run_code
        self._known: dict[tuple[int | str, str, bool], dict[str, float]] = {}
        wanted = {question.score for question in questions}
        self.unscored = [reason for score in SCORES if score in wanted and (reason := self._why_not(score))]
        if run_code and "pass_at_1" in wanted:
            check_machine()

    def __call__(
        self, question: Question, answer: str, in_thought: bool = False, finish_reason: str = ""
    ) -> dict[str, float]:
        """{name of the score: value} of the answer to a question's last turn; empty if it is not scored.

        in_thought: whether the prompt opens a thought, which the answer goes on from
        finish_reason: how it ended (`Generation`), where that is known
        """
        if question.score is None or self._why_not(question.score):
            return {}
        answer, cut = without_thoughts(answer, in_thought), finish_reason in CUT
        key = question.question_id, answer, cut
        if key not in self._known:
            self._known[key] = {question.score: MEASURES[question.score](question, answer, cut)}
        return self._known[key]

    def _why_not(self, score: str) -> str | None:
        """A sentence on why answers cannot be scored here."""
        if score == "pass_at_1" and not self._run_code:
            return "pass@1 is not scored: it runs the model's code on this machine, which --run_code allows"
        if score == "rouge2" and rouge_scorer() is None:
            return "ROUGE-2 is not scored: it needs the package rouge-score; run `pip install rouge-score`"
        return None


def _passes(question: Question, answer: str, cut: bool) -> float:
    assert question.code is not None
    return pass_at_1(answer, question.code, cut=cut)


MEASURES: dict[str, Callable[[Question, str, bool], float]] = {
    "accuracy": lambda question, answer, cut: float(same_number(answer, str(question.reference))),
    "rouge2": lambda question, answer, cut: rouge2(answer, str(question.reference)),
    "pass_at_1": _passes,
}
"""Name of a score → its value, from a question, an answer and whether a limit has cut that."""


def same_number(answer: str, reference: str) -> bool:
    """Whether an answer to a word problem ends with the reference's number."""
    wanted = gsm8k_answer(reference)
    return wanted is not None and gsm8k_answer(answer) == wanted


def rouge2(answer: str, reference: str) -> float:
    """ROUGE-2 F of a summary: the harmonic mean of the shares of common word pairs, words stemmed.

    The package's own words are runs of a-z and 0-9, accents apart; where the reference has other letters, `_Words`.
    """
    letters = filter(str.isalpha, unicodedata.normalize("NFKD", reference.lower()))
    scorer = rouge_scorer(latin=all(letter.isascii() for letter in letters))
    assert scorer is not None
    return float(scorer(reference, answer)["rouge2"].fmeasure)


@cache
def rouge_scorer(latin: bool = True) -> Callable[[str, str], dict[str, Any]] | None:
    """`score(reference, answer)` of the package rouge-score, None if it is not installed."""
    try:
        from rouge_score.rouge_scorer import RougeScorer  # takes a second
        from rouge_score.tokenizers import DefaultTokenizer
    except ImportError:
        return None
    own = DefaultTokenizer(use_stemmer=True)
    words = own if latin else _Words(own.tokenize)
    score: Callable[[str, str], dict[str, Any]] = RougeScorer(["rouge2"], tokenizer=words).score
    return score


class _Words:
    """A tokenizer of rouge-score for every script: words of a-z and 0-9 are stemmed as its own does."""

    def __init__(self, stem: Callable[[str], list[str]]) -> None:
        self._stem = stem

    def tokenize(self, text: str) -> list[str]:
        """Runs of letters, their marks, and digits; in a script without spaces each character is a word."""
        text = unicodedata.normalize("NFC", text.lower())
        text = "".join(one if one.isalnum() or unicodedata.category(one)[0] == "M" else " " for one in text)
        words = re.sub(_UNSPACED, r" \g<0> ", text).split()
        return [token for word in words for token in (self._stem(word) if word.isascii() else [word])]


def mean_scores(scores: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """The mean of every score over the answers that have it, None where none has."""
    values = {name: [one[name] for one in scores if name in one] for name in SCORES}
    return {name: sum(each) / len(each) if each else None for name, each in values.items()}
