"""A seeded English-like corpus: dialogues, word problems, lists, code. It makes the embedded target.

The *content* of a first question (its topic, people and numbers, not its wording) is hashed into one of two
splits, so no question of "heldout" can turn up in "train", whatever the seeds.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any

from draft_heads.data.synthetic.problems import draw_drill, draw_problem
from draft_heads.data.synthetic.texts import Topic, read_texts, topics

SPLITS = ("train", "heldout")
HELDOUT_PERCENT = 15
# Shares of the conversations that open with a word problem, bare sums or a program; the rest is dialogue.
PROBLEM_SHARE, DRILL_SHARE, CODE_SHARE = 0.36, 0.12, 0.07
CATEGORIES = {"problem": "math", "drill": "math", "code": "coding"}  # as in MT-bench; dialogues.yaml names its own


def split_of(content: tuple) -> str:
    """The split that a content belongs to; the same on every machine and for every seed."""
    digest = hashlib.sha256(repr(content).encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % 100 < HELDOUT_PERCENT else "train"


def draw_dialogue(rng: random.Random, kind: str) -> tuple[tuple, str, str, list[tuple[str, str]]]:
    """A random dialogue of a kind as (content, question, answer, follow-up turns)."""
    words, forms = read_texts("words"), read_texts("dialogues")
    first = forms["first"][kind]
    index, other = rng.sample(range(len(topics())), 2)
    role, day = rng.randrange(len(words["roles"])), rng.randrange(7)
    slots: dict[str, Any] = {
        "topic": topics()[index].name,
        "role": words["roles"][role],
        "name": rng.choice(words["she"] + words["he"]),
        "place": rng.choice(words["places"]),
        "day": words["days"][day],
        "next_day": words["days"][(day + rng.randint(2, 5)) % 7],
        "minutes": rng.choice(words["minutes"]),
        "opener": words["openers"][role % len(words["openers"])],
        "closer": words["closers"][index % len(words["closers"])],
        "sign": topics()[index].sign,
        "other": topics()[other].name,
    }
    slots |= _phrases(topics()[index], "") | _phrases(topics()[other], "o")
    form = rng.choice(first["forms"])
    question, answer = (_sentence(form[part].format(**slots)) for part in ("question", "answer"))
    follow_ups = [
        (turn["question"], _sentence(turn["answer"].format(**slots))) for turn in rng.sample(forms["follow_ups"], 2)
    ]
    return (kind, *(slots[key] for key in first["keys"])), question, answer, follow_ups


def draw_code(rng: random.Random) -> tuple[tuple, str, str, list[tuple[str, str]]]:
    """A random small programming task as (content that decides its split, question, answer, follow-up turns)."""
    texts = read_texts("code")
    index, verb = rng.randrange(len(texts["tasks"])), rng.choice(texts["verbs"])
    item, k = rng.choice(read_texts("words")["items"]), rng.randint(2, 99)
    one = item.removesuffix("s")
    slots = {"verb": verb, "item": item, "one": one, "One": one.capitalize(), "k": k}
    task = texts["tasks"][index]
    follow_ups = [(turn["question"], turn["answer"].format(**slots)) for turn in rng.sample(texts["follow_ups"], 2)]
    return ("code", index, verb, item, k), task["question"].format(**slots), task["answer"].format(**slots), follow_ups


def _phrases(topic: Topic, prefix: str) -> dict[str, str]:
    """A topic's phrases by slot: `t0` its first tool, `S1` its second step capitalised, …"""
    slots = {}
    for letter, phrases in (("t", topic.tools), ("s", topic.steps), ("g", topic.gains), ("p", topic.slips)):
        for i, phrase in enumerate(phrases):
            slots[f"{prefix}{letter}{i}"] = phrase
            slots[f"{prefix}{letter.upper()}{i}"] = _sentence(phrase)
    return slots


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _draw(rng: random.Random) -> tuple[str, tuple, str, str, list[tuple[str, str]]]:
    """One first turn of any kind with up to two follow-ups: (kind, content, question, answer, follow-ups).

    A second problem is of the first one's split: no held-out problem is trained on as a follow-up.
    """
    kinds = ("problem", "drill", "code", "dialogue")
    shares = (PROBLEM_SHARE, DRILL_SHARE, CODE_SHARE, 1 - PROBLEM_SHARE - DRILL_SHARE - CODE_SHARE)
    kind = rng.choices(kinds, shares)[0]
    if kind == "code":
        return kind, *draw_code(rng)
    if kind in ("problem", "drill"):
        draw = draw_problem if kind == "problem" else draw_drill
        content, question, answer = draw(rng)
        second_content, second, second_answer = draw_problem(rng)
        while split_of(second_content) != split_of(content):
            second_content, second, second_answer = draw_problem(rng)
        intro = rng.choice(read_texts("problems")["intros"]) if kind == "problem" else ""
        return kind, content, intro + question, answer, [(second, second_answer)]
    kind = rng.choice(list(read_texts("dialogues")["first"]))
    return kind, *draw_dialogue(rng, kind)


def _collect(count: int, seed: int, split: str, draw: Callable[[random.Random], tuple[tuple, str, dict]]) -> list[dict]:
    """`count` rows of a split with different first questions; `draw` gives (content, first question, row)."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
    rng = random.Random(f"{split} {seed}")
    rows: dict[str, dict] = {}
    draws_left = 50 * count + 1000
    while len(rows) < count:
        content, question, row = draw(rng)
        if split_of(content) == split:
            rows.setdefault(question, row)
        draws_left -= 1
        if not draws_left:
            raise ValueError(f"count must leave room for new questions; found {len(rows)} of {count}, lower it")
    return list(rows.values())


def conversations(count: int, seed: int, split: str) -> list[dict]:
    """ShareGPT rows `{"id", "conversations": [{"from", "value"}, ...]}` of one to three turns."""

    def draw(rng: random.Random) -> tuple[tuple, str, dict]:
        _, content, question, answer, follow_ups = _draw(rng)
        turns = [(question, answer)] + follow_ups[: rng.choice((0, 0, 0, 1, 1, 2))]
        messages = (
            [{"from": "system", "value": rng.choice(read_texts("words")["system_prompts"])}]
            if rng.random() < 0.1
            else []
        )
        for asked, answered in turns:
            messages += [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]
        return content, question, {"conversations": messages}

    rows = _collect(count, seed, split, draw)
    return [{"id": f"synthetic-{split}-{seed}-{i}", **row} for i, row in enumerate(rows)]


def drills(count: int, seed: int, split: str) -> list[dict]:
    """ShareGPT rows of one turn with two to four bare sums: dense practice before the word problems."""

    def draw(rng: random.Random) -> tuple[tuple, str, dict]:
        content, question, answer = draw_drill(rng)
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return content, question, {"conversations": turns}

    rows = _collect(count, seed, split, draw)
    return [{"id": f"drill-{split}-{seed}-{i}", **row} for i, row in enumerate(rows)]


def word_problems(count: int, seed: int, split: str, steps: int | None = None) -> list[dict]:
    """GSM8K rows `{"question", "answer"}`, the answer ending in `#### n`; `steps` 1 or 2 keeps only those."""

    if steps not in (None, 1, 2):
        raise ValueError(f"steps must be 1, 2 or None (both); got {steps!r}")

    def draw(rng: random.Random) -> tuple[tuple, str, dict]:
        content, question, answer = draw_problem(rng, steps)
        return content, question, {"question": question, "answer": answer}

    return _collect(count, seed, split, draw)


def questions(count: int, seed: int, split: str) -> list[dict]:
    """MT-bench rows `{"question_id", "category", "turns"}` of two turns each."""

    def draw(rng: random.Random) -> tuple[tuple, str, dict]:
        kind, content, question, _, follow_ups = _draw(rng)
        forms = read_texts("dialogues")["first"]
        category = forms[kind]["category"] if kind in forms else CATEGORIES[kind]
        return content, question, {"category": category, "turns": [question, follow_ups[0][0]]}

    rows = _collect(count, seed, split, draw)
    return [{"question_id": i + 1, **row} for i, row in enumerate(rows)]
