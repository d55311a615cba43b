"""Small programming tasks with short answers: Python functions, shell lines, JSON records."""

import random

from draft_heads.data.synthetic.parts import ITEMS

VERBS = ("load", "count", "merge", "check", "print", "scale", "pick", "trim", "rank", "store")
TYPES = ("int", "str", "float")

# fmt: off
# (question, answer); {k} is a number, {verb}_{item} names a function, {one} is the item in the singular.
TASKS = (
    ("Write a Python function {verb}_{item} that adds {k} to every number in a list.",
     "```python\ndef {verb}_{item}(values):\n    return [value + {k} for value in values]\n```\n"
     "It builds a new list and leaves the old one alone."),
    ("How do I keep only the {item} above {k} in Python? Call the function {verb}_{item}.",
     "```python\ndef {verb}_{item}({item}):\n    result = []\n    for {one} in {item}:\n        if {one} > "
     "{k}:\n"
     "            result.append({one})\n    return result\n```\nThe loop looks at each {one} exactly once."),
    ("I need a loop that prints {k} {item}. The function is {verb}_{item}.",
     "```python\ndef {verb}_{item}():\n    for number in range({k}):\n        print(\"{one}\", number)\n```\n"
     "Note that the counting starts at zero."),
    ("Define a class for one {one} with a price of {k} and a method {verb}_{item}.",
     "```python\nclass {One}:\n    def __init__(self, price={k}):\n        self.price = price\n\n"
     "    def {verb}_{item}(self, amount):\n        return amount * self.price\n```\nCreate it with "
     "`{One}()`."),
    ("Show me a recursive function {verb}_{item} that stops at {k}.",
     "```python\ndef {verb}_{item}(n):\n    if n >= {k}:\n        return n\n    return {verb}_{item}(n + "
     "1)\n```\n"
     "Every call brings it one step closer to the end."),
    ("Write a test for {verb}_{item} which expects {k}.",
     "```python\ndef test_{verb}_{item}():\n    assert {verb}_{item}() == {k}\n```\nRun it with pytest."),
    ("Which shell command shows the first {k} lines of {verb}_{item}.txt?",
     "Use `head -n {k} {verb}_{item}.txt`. To see the end of the file instead, replace `head` by `tail`."),
    ("Turn this into JSON: {k} {item}, action {verb}.",
     "```json\n{{\"name\": \"{item}\", \"count\": {k}, \"action\": \"{verb}\"}}\n```"),
    ("Return the total price in {verb}_{item} when each {one} costs {k}.",
     "```python\ndef {verb}_{item}(amount):\n    total = amount * {k}\n    return total\n```\n"
     "For an empty basket it returns zero, as it should."),
    ("Why does {verb}_{item}[{k}] raise an IndexError?",
     "The list is too short. An index of {k} asks for one more element than `len` allows. "
     "Check the length before you read from it, or catch the error."),
)
CODE_FOLLOW_UPS = (
    ("Can you add a docstring?",
     "Of course. Put this line right below the signature:\n```python\n    \"\"\"Handle all {item} in one "
     "go.\"\"\"\n```"),
    ("How would you test it?",
     "Start with the empty case, then try {k} and a negative number. Two or three asserts are plenty."),
    ("Is it fast enough?",
     "For a few thousand {item} it makes no difference. If it ever gets slow, measure first and optimise "
     "later."),
    ("What if the input is empty?",
     "Then nothing happens: the body is skipped and you get the default value. No special case is needed."),
)
# fmt: on


def draw_code(rng: random.Random) -> tuple[tuple, str, str, list[tuple[str, str]]]:
    """A random task as (content that decides its split, question, answer, follow-up turns)."""
    index, verb, item, k = rng.randrange(len(TASKS)), rng.choice(VERBS), rng.choice(ITEMS), rng.randint(2, 99)
    one = item.removesuffix("s")
    slots = {"verb": verb, "item": item, "one": one, "One": one.capitalize(), "k": k}
    question, answer = (text.format(**slots) for text in TASKS[index])
    follow_ups = [(q, a.format(**slots)) for q, a in rng.sample(CODE_FOLLOW_UPS, 2)]
    return ("code", index, verb, item, k), question, answer, follow_ups
