"""Small programming tasks with short answers: Python functions, shell lines, JSON records."""

import random

from draft_heads.data.synthetic.texts import read_texts


def draw_code(rng: random.Random) -> tuple[tuple, str, str, list[tuple[str, str]]]:
    """A random task as (content that decides its split, question, answer, follow-up turns)."""
    texts = read_texts("code")
    index, verb = rng.randrange(len(texts["tasks"])), rng.choice(texts["verbs"])
    item, k = rng.choice(read_texts("words")["items"]), rng.randint(2, 99)
    one = item.removesuffix("s")
    slots = {"verb": verb, "item": item, "one": one, "One": one.capitalize(), "k": k}
    task = texts["tasks"][index]
    follow_ups = [(turn["question"], turn["answer"].format(**slots)) for turn in rng.sample(texts["follow_ups"], 2)]
    return ("code", index, verb, item, k), task["question"].format(**slots), task["answer"].format(**slots), follow_ups
