"""Arithmetic word problems of one or two steps, worked in steps; operands to 99, last line `#### n`."""

import random

from draft_heads.data.synthetic.texts import read_texts, scenarios

MAX_OPERAND = 99


def apply(a: int, operation: str, b: int) -> int:
    """The value of `a operation b` for an operation out of "+-*"."""
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


def working(a: int, operation: str, b: int) -> str:
    """One step written out; sums go by tens and ones, so that nothing is carried unseen.

    `27 + 45 = 60 + 12 = 72`, `72 - 18 = 60 - 6 = 54`, `78 - 12 = 60 + 6 = 66`, `6 * 8 = 48`.
    """
    result = apply(a, operation, b)
    if operation == "*" or max(a, b) < 10:
        return f"{a} {operation} {b} = {result}"
    tens = apply(a - a % 10, operation, b - b % 10)
    ones = apply(a % 10, operation, b % 10)
    return f"{a} {operation} {b} = {tens} {'-' if ones < 0 else '+'} {abs(ones)} = {result}"


def operands(rng: random.Random, operations: str) -> tuple[int, ...]:
    """Numbers for the steps, each in 2..99, what a last step takes away from 1 on; every intermediate value in 2..99,
    the last in 1..198."""
    if operations == "+*":
        first = rng.randint(2, 7)
        return first, rng.randint(2, 9 - first), rng.randint(2, 9)
    if operations[0] == "*":
        numbers = [rng.randint(2, 9), rng.randint(2, 9)]
    elif operations[0] == "+":
        a = rng.randint(2, MAX_OPERAND - 2)
        numbers = [a, rng.randint(2, MAX_OPERAND - a)]
    else:
        a = rng.randint(4 + 20 * (len(operations) - 1), MAX_OPERAND)
        numbers = [a, rng.randint(2, a - 2)]
    if len(operations) == 2:
        value = apply(numbers[0], operations[0], numbers[1])
        numbers.append(rng.randint(1, value - 1) if operations[1] == "-" else rng.randint(2, MAX_OPERAND))
    return tuple(numbers)


def draw_problem(rng: random.Random, steps: int | None = None) -> tuple[tuple, str, str]:
    """A random problem as (content that decides its split, question, answer)."""
    words = read_texts("words")
    index = rng.choice([i for i, s in enumerate(scenarios()) if steps in (None, len(s.operations))])
    scenario = scenarios()[index]
    numbers = operands(rng, scenario.operations)
    name = rng.choice(words["she"] + words["he"])
    they, their = ("she", "her") if name in words["she"] else ("he", "his")
    slots: dict[str, object] = dict(zip("abc", numbers)) | {"name": name, "item": rng.choice(words["items"])}
    slots |= {"they": they, "They": they.capitalize(), "their": their}

    value, work = numbers[0], []
    for operation, number in zip(scenario.operations, numbers[1:]):
        work.append(working(value, operation, number))
        value = apply(value, operation, number)

    wording = rng.randrange(3)
    parts = {f"work{i}": text for i, text in enumerate(work)}
    parts |= {f"step{i}": text for i, text in enumerate(scenario.steps)}
    final = scenario.final.format(n=value, **slots)
    answer = read_texts("problems")["frames"][len(work)][wording].format(final=final, **parts)
    return (
        ("problem", index, *numbers),
        scenario.questions[wording].format(**slots),
        f"{answer}\n#### {value}",
    )


def draw_drill(rng: random.Random) -> tuple[tuple, str, str]:
    """Two to four bare sums in one request, as (content that decides its split, question, answer)."""
    sums = []
    for _ in range(rng.randint(2, 4)):
        operation = rng.choice("++--*")
        a, b = operands(rng, operation)
        sums.append((a, operation, b))
    asked = ", ".join(f"{a} {operation} {b}" for a, operation, b in sums)
    question = rng.choice(read_texts("problems")["drills"]).format(sums=asked)
    return ("drill", *sums), question, "\n".join(working(a, operation, b) for a, operation, b in sums)
