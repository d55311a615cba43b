"""Right code passes in every form in which models write it, and code that returns nothing passes in none."""

import re
import textwrap

import pytest

from draft_heads.data.text.benchmarks import CodeTask
from draft_heads.inference.evaluation.run_code import code_of, pass_at_1, program_of

PROMPT = '''from typing import List


def running(numbers: List[int]) -> List[int]:
    """ Sums of all beginnings.
    >>> running([1, 2])
    [1, 3]
    """
'''
BODY = """    total, sums = 0, []
    for number in numbers:
        total += number
        sums.append(total)
    return sums
"""
TASK = CodeTask(PROMPT, "running", "def check(candidate):\n    assert candidate([1, 2, 4]) == [1, 3, 7]\n")
NEXT = '\n\ndef next_one(numbers: List[int]):\n    """ It is cut he'


def forms_of(prompt: str, body: str) -> dict[str, str]:
    """Name → answer, of a task's prompt and a body of its function."""
    whole, indented = prompt + body, textwrap.indent(prompt + body, "  ")
    return {
        "the body": body,
        "the body, its blanks lost": body.strip(),
        "the body, one blank lost": body[1:],
        "the body, all blanks lost": textwrap.dedent(body),
        "the body and a stray fence": f"{body}\n# Test cases\nprint('x')\n\n```\n\nExplanation: it adds",
        "the body and a fenced example": f"{body}```python\n{'print(1)' + chr(10) * 2}" + "print(2)\n" * 20 + "```",
        "the fenced body after a word": f"Solution\n```python\n{body}```",
        "the beginning, and then the body": f"From\n```python\n{prompt}```\nfollows\n```python\n{body}```",
        "the body, and the next function cut": body + NEXT,
        "the fenced body after a blank line": f"```python\n\n{body}```",
        "the function and a sentence": f"{whole}\nThis function does what was asked. It's short.",
        "the function and a word": f"{whole}\nDone\n",
        "a sentence and the function": f"Here is the function:\n\n{whole}",
        "a word and the function": f"Solution\n\n{whole}",
        "fenced": f"Here:\n```python\n{whole}```\nIt works.",
        "fenced, the last fence behind the code": f"Here:\n```python\n{whole.rstrip()}```\nIt works.",
        "fenced, the last fence behind the code, and more": f"```\n{whole.rstrip()}```  \n```\nprint(1)```",
        "fenced with an example that is cut": f"```python\n{whole}\n\nprint({whole.split('def ')[-1][:3]}(",
        "fenced by tildes": f"~~~python\n{whole}~~~\nIt works.",
        "fenced by four": f"````python\n{whole}````\nIt works.",
        "a fence after text": f"Sure: ```python\n{whole}```",
        "with a wrong example": f"```python\n{whole}\n\n# Test\nassert running([1]) == [2]\n```",
        "with an example that asks": f"{whole}\n\nn = input('Enter: ')\nprint(running(n))\n",
        "the body and a wrong example": f"{body}\n\nassert running([1]) == [2]\n",
        "with what it needs below": (
            whole.replace("total, sums = 0, []", "total, sums = zero(), list(FIRST)")
            + "\nrunning([])\nFIRST = ()\ndef zero():\n    return 0\nif __name__ == '__main__':\n    running(input())\n"
        ),
        "in a quotation": textwrap.indent(f"So:\n\n```python\n{whole}```\nDone.", "> ", lambda line: True),
        "unfenced in a quotation": "As asked:\n" + textwrap.indent(whole, "> ", lambda line: True),
        "the fenced body in a quotation": textwrap.indent(f"```\n{body}```", ">", lambda line: True),
        "in an indented block": f"So:\n\n{textwrap.indent(whole, '    ')}\nwhich is all.",
        "in an indented block of a list": f"1. So:\n\n{textwrap.indent(whole, chr(9))}\n2. Done.",
        "in a list": f"1. So:\n  ```python\n{indented}  ```\n2. Done.",
        "imports in a block of their own": f"```\nimport math\nfrom typing import *\n```\nThen\n```\n{whole}```",
        "a frame that raises, and then all": f"```\n{prompt}    raise NotImplementedError\n```\nso\n```\n{whole}```",
        "the beginning, and then all": f"You gave\n```python\n{prompt}```\nso\n```python\n{whole}```",
        "the beginning, and then all, unfenced": f"{prompt}\n\n{whole}",
        "constants in a block of their own": (
            "```\nFIRST, plus = 0, lambda a, b: a + b\nSTART: int = FIRST + len('')\n"
            "answer = running([int(input())])\n```\n"
            f"```\n{whole.replace('total, sums = 0', 'total, sums = START')}```"
        ),
        "a future import": f"```python\nfrom __future__ import annotations\n{whole}```",
        "a future import below another": f"import math\nfrom __future__ import annotations\n{whole}",
    }


FORMS = forms_of(PROMPT, BODY)


@pytest.mark.parametrize("form", FORMS)
def test_right_code_passes_in_every_form(form):
    namespace = {}
    exec(program_of(FORMS[form], TASK).replace("check(running)", ""), namespace)
    assert namespace["running"]([3, 4, 5]) == [3, 7, 12]


def test_one_of_these_forms_passes_in_a_process_of_its_own_and_nothing_in_none():
    assert pass_at_1(FORMS["the body, and the next function cut"], TASK) == 1.0
    for form, answer in forms_of(PROMPT, "    return None\n").items():
        namespace = {}
        exec(program_of(answer, TASK).replace("check(running)", ""), namespace)
        assert namespace["running"]([1, 2, 4]) is None, form


def test_a_helper_in_its_own_block_is_kept_and_what_else_is_there_is_not():
    blocks = [
        "def add(a, b):\n    return a + b\n\nadd(open('x'))",
        "import os\nimport sys",
        f"{PROMPT}    return add(1, 2)\n",
    ]
    answer = "\n".join(f"```\n{block}\n```" for block in blocks)
    namespace = {}
    exec(program_of(answer, TASK).replace("check(running)", ""), namespace)
    assert namespace["running"]([]) == 3 and "os" in namespace


@pytest.mark.parametrize("head", ["running = lambda", "running  =  lambda"])
def test_a_lambda_is_a_function(head):
    line = f"{head} numbers: [sum(numbers[: end + 1]) for end in range(len(numbers))]"
    for answer in (line, f"```python\n{line}\n```", f"So:\n```python\n{line}\n```\n```python\nrunning([1, 2])\n```"):
        namespace = {}
        exec(program_of(answer, TASK).replace("check(running)", ""), namespace)
        assert namespace["running"]([3, 4, 5]) == [3, 7, 12], answer


@pytest.mark.parametrize(
    "end",
    [
        "running = _sums",
        "running: object = _sums",
        "running=functools.lru_cache(_sums)",
        "class Own:\n    def running(self, numbers):\n        return _sums(numbers)\n\nrunning = Own().running",
    ],
)
def test_a_name_that_is_bound_to_a_function_is_one(end):
    body = "    return [sum(numbers[: end + 1]) for end in range(len(numbers))]\n\n"
    sums = f"import functools\n\ndef _sums(numbers):\n{body}"
    for answer in (sums + end, f"So:\n```python\n{sums}{end}\n\nprint(running(open('x')))\n```\nThat is all."):
        namespace = {}
        exec(program_of(answer, TASK).replace("check(running)", ""), namespace)
        assert namespace["running"]((3, 4, 5)) == [3, 7, 12], answer


def test_an_example_behind_a_lambda_is_left_out():
    answer = "running = lambda numbers: ['né', *numbers][1:]; running(input())\nrunning(open('x'))"
    namespace = {}
    exec(program_of(answer, TASK).replace("check(running)", ""), namespace)
    assert namespace["running"]([3]) == [3]


def test_an_answer_of_many_lines_is_read_in_time():
    answer = "\n".join(["It is so, as one sees."] * 1000 + [PROMPT + BODY] + ["And then, one sees it again."] * 1000)
    assert code_of(answer, re.compile("^def running", re.MULTILINE)).rstrip() == (PROMPT + BODY).rstrip()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "again", ["x = 1\ndef running(x):\n    pass\n", "def running(x):\n", "Done\ndef running(x):\n"]
)
def test_an_answer_that_repeats_itself_is_read_in_time(again):
    """170 times: what 512 tokens hold."""
    namespace = {}
    exec(program_of(again * 170 + PROMPT + BODY, TASK).replace("check(running)", ""), namespace)
    assert namespace["running"]([3, 4, 5]) == [3, 7, 12]
    program_of(again * 170, TASK)


@pytest.mark.parametrize(
    "below",
    [
        "running.seen = {}",
        "SEEN = {}\nrunning.seen = SEEN",
        "class Memory(dict): pass\nrunning.seen: Memory = Memory()",
        "import collections\nMade: Dict[int, int] = collections.OrderedDict()\nrunning.seen = {}",
        "try:\n    from unheard_of import table as seen\nexcept ImportError:\n    seen = {}\nrunning.seen = seen",
        "seen = {}\nfor n in range(3):\n    seen[n] = n\nseen.clear()\nrunning.seen = {**seen, 9: 9}",
        "running.seen = {}\nresult = running([1]) + undefined\ntext = input()\nfor n in [40]: print(running(n))",
        "import logging\nSEEN = logging.getLogger(__name__).manager.loggerDict\nrunning.seen = SEEN",
        "running.seen = {}\ntry:\n    n = int(input())\nexcept EOFError:\n    exit(1)",
        "running.seen = {}\nwhile True:\n    try:\n        n = int(input()); break\n    except Exception: pass",
        "running.seen = {}\ndef slow(n): return n < 2 or slow(n - 1) + slow(n - 2)\nresult = slow(60)",
        "running.seen = {}\nseen = exit()\ndef other(): return seen",
        "import sys\nrunning.seen = {}\nrunning.seen[9] = sys.exit(2)",
    ],
)
def test_what_is_set_below_the_function_is_kept_and_may_fail(below):
    answer = (
        "def running(numbers):\n    if id(numbers) in running.seen: return []\n"
        f"    return [sum(numbers[: i + 1]) for i in range(len(numbers))]\n\n{below}\n"
    )
    assert pass_at_1(answer, TASK) == 1.0 == pass_at_1(f"```python\n{answer}```\nIt works.", TASK)


@pytest.mark.parametrize("example", ["running = running([1])", "running: list = running([1]); print(running)"])
def test_an_example_that_takes_its_name_is_not_the_function(example):
    for answer in (f"{PROMPT}{BODY}\n\n{example}", f"```\n{example}\n```\n```\n{PROMPT}{BODY}\n{example}\n```"):
        assert pass_at_1(answer, TASK) == 1.0


FIRST = "def running(numbers):\n    for number in numbers:\n        return [number]\n"


@pytest.mark.parametrize("before", [PROMPT + BODY, BODY, f"{FIRST}\n\n{PROMPT}{BODY}", f"So:\n```\n{PROMPT}{BODY}```"])
@pytest.mark.parametrize("begun", [PROMPT + BODY[:60], FIRST, "def running(\n    numbers,\n):\n    return []\n\n"])
def test_a_function_that_a_cut_answer_begins_once_more_does_not_count(before, begun):
    answer = f"{before}\n\n{begun}"
    assert pass_at_1(answer, TASK, cut=True) == 1.0
    if not before.startswith("So"):  # a fenced block comes first
        assert pass_at_1(answer, TASK) == 0.0


LATER = BODY.replace("0, []", "zero(), []")


@pytest.mark.parametrize(
    "answer",
    [
        f"{FIRST}\n\n{PROMPT}{BODY}\n\nThat is all",
        f"{PROMPT}{BODY}",
        BODY,
        f"def zero():\n    return 0\n\n\n{PROMPT}{LATER}",
        f"```python\nclass Zero:\n    def __call__(self):\n        return 0\n\nzero = Zero()\n{PROMPT}{LATER}    # so",
        f"```\n{PROMPT}```\nSolution\n\n{PROMPT}{BODY}",
    ],
)
def test_a_cut_answer_keeps_the_last_function_where_more_follows_or_none_stands_before(answer):
    assert pass_at_1(answer, TASK, cut=True) == 1.0


@pytest.mark.parametrize("form", ["the beginning, and then the body", "fenced", "the body"])
def test_imports_alone_are_no_body(form):
    prompt = PROMPT.replace('    """ Sums', '    import math\n    """ Sums')
    task = CodeTask(prompt, "running", TASK.test)
    assert pass_at_1(forms_of(prompt, BODY)[form], task) == 1.0


def test_constants_of_another_block_may_need_what_it_imports():
    answer = "import math\nONE = math.floor(1.5)\n```\nand\n```python\ndef running(numbers):\n"
    body = "    return [ONE * sum(numbers[: i + 1]) for i in range(len(numbers))]\n"
    assert pass_at_1(f"```python\n{answer}{body}```", TASK) == 1.0


def test_the_first_body_that_always_returns_counts():
    first = "if not numbers:\n    return []\n"
    whole = f"{first}{textwrap.dedent(BODY)}"
    answer = f"First:\n```python\n{first}```\nAll of it:\n```python\n{whole}```\n"
    assert pass_at_1(answer, TASK) == 1.0
    more = f"```python\n{whole}```\nNot so:\n```python\n{whole.replace('+=', '-=')}print(total)\n```\n"
    assert pass_at_1(more, TASK) == 1.0


@pytest.mark.parametrize(
    "end",
    [
        "if sums:\n    return sums\nelse:\n    return []",
        "try:\n    return sums\nfinally:\n    pass",
        "with open('/dev/null'):\n    return sums",
        "while True:\n    if len(sums) == len(numbers):\n        return sums",
        "match sums:\n    case []:\n        return []\n    case _:\n        return sums",
    ],
)
def test_a_body_that_always_returns_is_known_by_its_last_statement(end):
    whole = textwrap.dedent(BODY).replace("return sums\n", f"{end}\n")
    answer = f"First:\n```python\nif not numbers:\n    return []\n```\nAll:\n```python\n{whole}```\n"
    assert pass_at_1(answer, TASK) == 1.0


@pytest.mark.parametrize(
    "second",
    [
        "def main():\n    x = 1\n    y = 2\n    print('x')\n    print(running([x, y]))\n    return 0\n",
        "def test():\n    x = 1\n    y = 2\n    z = 3\n    assert running([1]) == [1]\n    return x, y\n",
        "return [\n    3,\n    4,\n    5,\n    6,\n    7,\n    8,\n]\n",
    ],
)
def test_the_first_body_counts_whatever_longer_block_follows(second):
    answer = f"The body:\n```python\n{textwrap.dedent(BODY)}```\nUse it so:\n```python\n{second}```\n"
    assert pass_at_1(answer, TASK) == 1.0
