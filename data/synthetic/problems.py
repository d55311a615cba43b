"""Arithmetic word problems of one or two steps, worked in steps; operands to 99, last line `#### n`."""

import random
from dataclasses import dataclass

from draft_heads.data.synthetic.parts import HE, ITEMS, SHE

MAX_OPERAND = 99


@dataclass(frozen=True)
class Scenario:
    """A story with one operation per step; `{a}` and `{b}` enter the first step, `{c}` the second."""

    operations: str  # one or two of "+-*"
    questions: tuple[str, str, str]  # wording i is answered in frame i
    steps: tuple[str, ...]  # imperative phrases, one per operation
    final: str  # a sentence with {n}


# fmt: off
SCENARIOS = (
    Scenario(
        "+-",
        ("{name} has {a} {item}. A neighbour brings {b} more, and then {name} gives {c} away. "
         "How many {item} does {name} have now?",
         "{name} starts the week with {a} {item} and gets {b} more from an aunt. By the weekend, {c} of them "
         "are gone. How many {item} remain?",
         "There were {a} {item} in the drawer. {name} put in {b} more and {their} brother took out {c}. "
         "How many {item} are in the drawer?"),
        ("add what comes in", "take off what goes out"),
        "There are {n} {item} in the end.",
    ),
    Scenario(
        "++",
        ("{name} found {a} {item} on Monday, {b} on Tuesday and {c} on Friday. "
         "How many {item} did {they} find altogether?",
         "Three friends count their {item}: {name} has {a}, the second friend has {b} and the third has {c}. "
         "How many {item} do they have in total?",
         "A shop sold {a} {item} in the morning, {b} at noon and {c} in the evening. "
         "How many {item} were sold that day?"),
        ("put the first two numbers together", "add the third one"),
        "The total is {n} {item}.",
    ),
    Scenario(
        "--",
        ("{name} bought {a} {item} for the fair. {They} sold {b} before lunch and {c} after lunch. "
         "How many {item} were not sold?",
         "Out of {a} {item}, {b} were broken and {c} were lost on the way. "
         "How many {item} could {name} still use?",
         "{name} had {a} {item}. {They} lent {b} to a cousin and {c} to a teacher. "
         "How many {item} did {they} keep?"),
        ("subtract the first group", "subtract the second group as well"),
        "That leaves {n} {item}.",
    ),
    Scenario(
        "-+",
        ("A bus leaves the station with {a} passengers. At the next stop {b} get off and {c} get on. "
         "How many passengers are on the bus?",
         "A ferry carries {a} people. At the first island {b} of them leave and {c} new ones come aboard. "
         "How many people does it carry now?",
         "{name} drives a tram with {a} people in it. Near the market {b} step out and {c} step in. "
         "How many people ride on?"),
        ("remove everyone who leaves", "count those who join"),
        "Now {n} people are on board.",
    ),
    Scenario(
        "*+",
        ("{name} fills {a} boxes with {b} {item} each and has {c} loose {item} left over. "
         "How many {item} does {name} have?",
         "There are {a} shelves with {b} {item} on each of them, and {c} more {item} in a basket. "
         "How many {item} are there in all?",
         "{name} buys {a} bags. Each bag holds {b} {item}. At home {they} already had {c} {item}. "
         "How many {item} does that make?"),
        ("multiply to get the full groups", "add the extra ones"),
        "Altogether it makes {n} {item}.",
    ),
    Scenario(
        "*-",
        ("{name} works {a} hours for {b} dollars an hour and spends {c} dollars on dinner. "
         "How many dollars does {name} have left?",
         "A gardener earns {b} dollars per hour. After {a} hours {name} pays {c} dollars for a ticket home. "
         "How much money remains?",
         "{name} sells {a} cakes at {b} dollars apiece, but the ingredients cost {c} dollars. "
         "How many dollars does {they} gain?"),
        ("find out what was earned", "pay the cost out of it"),
        "So {name} keeps {n} dollars.",
    ),
    Scenario(
        "*-",
        ("An orchard has {a} rows of {b} trees. A storm knocks down {c} trees. How many trees still stand?",
         "{name} planted {a} beds with {b} tulips in each. The deer ate {c} tulips. "
         "How many tulips were spared?",
         "In a hall there are {a} lines of {b} chairs, and {c} chairs are taken out. "
         "How many chairs stay in the hall?"),
        ("count the whole field row by row", "cross out the missing ones"),
        "In the end {n} are still there.",
    ),
    Scenario(
        "+*",
        ("For one bracelet {name} needs {a} red beads and {b} blue beads. "
         "How many beads does {they} need for {c} bracelets?",
         "Every guest gets {a} sweets and {b} nuts. How many pieces does {name} hand out to {c} guests?",
         "A table has {a} plates and {b} bowls on it. How many dishes are on {c} such tables?"),
        ("see how many belong to a single set", "multiply by the number of sets"),
        "The answer is {n} pieces.",
    ),
    Scenario(
        "+-",
        ("The first class has {a} children and the second class has {b}. On the day of the trip {c} are ill. "
         "How many children come along?",
         "{name} invited {a} relatives and {b} colleagues, but {c} could not come. "
         "How many guests showed up?",
         "A choir of {a} women and {b} men goes on tour; {c} singers stay at home. How many singers travel?"),
        ("join both groups", "leave out the absent ones"),
        "So {n} of them take part.",
    ),
    Scenario(
        "--",
        ("A book has {a} pages. {name} read {b} pages last night and {c} this morning. "
         "How many pages are left to read?",
         "The road to the lake is {a} miles long. {name} cycled {b} miles, rested, then did {c} more. "
         "How many miles are still ahead?",
         "A rope measures {a} feet. {name} cuts off {b} feet for a swing and {c} feet for a net. "
         "How long is the rest?"),
        ("take the first part off the whole length", "take the second part off too"),
        "What is left measures {n}.",
    ),
    Scenario(
        "-+",
        ("The library owns {a} novels. {name} borrows {b} of them and a donor brings {c} new ones. "
         "How many novels are in the library?",
         "A tank holds {a} gallons. {name} uses {b} gallons for the garden, and the rain adds {c}. "
         "How many gallons are in the tank?",
         "The phone shows {a} percent. A call uses up {b} percent, then charging adds {c} percent. "
         "What does the phone show?"),
        ("lower the starting value", "raise it again"),
        "At last it stands at {n}.",
    ),
    Scenario(
        "++",
        ("A coat costs {a} dollars, a hat costs {b} dollars and a belt costs {c} dollars. "
         "What does {name} pay for everything?",
         "{name} scored {a} points in the first game, {b} in the second and {c} in the final. "
         "What was the overall score?",
         "On a long trip {name} drove {a} miles on the first day, {b} on the second and {c} on the last. "
         "How far was it?"),
        ("begin with the first pair", "include the last amount"),
        "The sum comes to {n}.",
    ),
    Scenario(
        "*+",
        ("{name} reads {a} chapters of {b} pages and then {c} more pages. How many pages is that?",
         "A poem has {a} verses of {b} lines, followed by {c} lines without a rhyme. "
         "How many lines are there?",
         "{name} saves {b} coins a week for {a} weeks, and grandmother adds {c} coins. "
         "How many coins are saved?"),
        ("work out the equal parts", "count the remainder on top"),
        "Counting everything, we get {n}.",
    ),
    Scenario(
        "+",
        ("{name} picks {a} {item} and {their} sister picks {b}. How many {item} do they pick together?",
         "There are {a} {item} in one bag and {b} in another. How many {item} are there?",
         "{name} had {a} {item} and won {b} more. How many {item} does {name} have?"),
        ("add both amounts",),
        "Together there are {n} {item}.",
    ),
    Scenario(
        "-",
        ("{name} has {a} {item} and eats or loses {b} of them. How many {item} are left?",
         "A crate held {a} {item} until {name} took {b}. How many {item} does the crate hold now?",
         "{name} needs {a} {item} and already has {b}. How many {item} are missing?"),
        ("find the difference",),
        "The result is {n} {item}.",
    ),
    Scenario(
        "*",
        ("{name} buys {a} packs of {b} {item}. How many {item} is that?",
         "On each of {a} tables there are {b} {item}. How many {item} are there?",
         "{name} makes {b} {item} a day. How many {item} does {they} make in {a} days?"),
        ("multiply the two numbers",),
        "That makes {n} {item}.",
    ),
)

# Two-step and one-step answers; frame i answers question wording i.
FRAMES = {
    2: (
        "First, {step0}: {work0}.\nThen {step1}: {work1}.\n{final}",
        "We need two steps here. To begin with, {step0}, which gives {work0}. After that, {step1}, "
        "and you get {work1}. {final}",
        "Let us work it out.\n- As a first step, {step0}: {work0}\n"
        "- What remains is to {step1}: {work1}\n{final}",
    ),
    1: (
        "All we have to do is to {step0}: {work0}.\n{final}",
        "This takes just one step. If you {step0}, you find {work0}. {final}",
        "Let us work it out.\n- Here, {step0}: {work0}\n{final}",
    ),
}
# Bare sums, for practice.
DRILLS = ("Work out {sums}.", "What is {sums}?", "Please calculate: {sums}", "I need the results of {sums}.")
# fmt: on


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
    """Numbers for the steps, each in 2..99 and every intermediate value in 2..99, the last in 1..198."""
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
    index = rng.choice([i for i, s in enumerate(SCENARIOS) if steps in (None, len(s.operations))])
    scenario, numbers = SCENARIOS[index], operands(rng, SCENARIOS[index].operations)
    name = rng.choice(SHE + HE)
    they, their = ("she", "her") if name in SHE else ("he", "his")
    slots: dict[str, object] = dict(zip("abc", numbers)) | {"name": name, "item": rng.choice(ITEMS)}
    slots |= {"they": they, "They": they.capitalize(), "their": their}

    value, work = numbers[0], []
    for operation, number in zip(scenario.operations, numbers[1:]):
        work.append(working(value, operation, number))
        value = apply(value, operation, number)

    wording = rng.randrange(3)
    parts = {f"work{i}": text for i, text in enumerate(work)}
    parts |= {f"step{i}": text for i, text in enumerate(scenario.steps)}
    final = scenario.final.format(n=value, **slots)
    answer = FRAMES[len(work)][wording].format(final=final, **parts)
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
    question = rng.choice(DRILLS).format(sums=asked)
    return ("drill", *sums), question, "\n".join(working(a, operation, b) for a, operation, b in sums)
