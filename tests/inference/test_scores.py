"""Scores worked out by hand, and code of answers that must not harm the machine."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from draft_heads.data.text.benchmarks import CodeTask, Question
from draft_heads.data.text.thoughts import without_thoughts
from draft_heads.inference.evaluation import run_code, scores
from draft_heads.inference.evaluation.answer_files import read_answers, write_answers
from draft_heads.inference.evaluation.evaluate import scores_of
from draft_heads.inference.evaluation.metrics import result_rows
from draft_heads.inference.evaluation.run_code import CodeLimits, code_of, pass_at_1, program_of
from draft_heads.scripts.score_answers import score_answers
from tests.inference.stub_engine import QUESTIONS, StubEngine, StubOracle, benchmark, evaluate, render

TASK = CodeTask(
    prompt='import math\n\n\ndef helper(n):\n    return n + 1\n\n\ndef twice(n):\n    """Two of n."""\n',
    entry_point="twice",
    test="def check(candidate):\n    assert candidate(3) == 6 and candidate(0) == 0\n",
)
LIMITS = CodeLimits(wall_seconds=3.0, cpu_seconds=1, memory_bytes=1 << 28, file_bytes=1 << 16)
PAIR = "from dataclasses import dataclass\n\n@dataclass\nclass Pair:\n    n: int\n\n"
WHOLE = "def twice(n):\n    return math.floor(helper(2 * n)) - 1\n"


def test_rouge_2_is_the_f_of_shared_word_pairs():
    pytest.importorskip("rouge_score")
    # answer: the-cat cat-sat sat-on on-a a-mat; reference: the-cat cat-sat sat-on on-the the-mat; 3 of 5, 3 of 5
    assert scores.rouge2("The cat sat on a mat.", "the cat sat on the mat") == pytest.approx(0.6)
    # 1 of 2 pairs of the answer, 1 of 5 of the reference: 2 · 0.5 · 0.2 / 0.7
    assert scores.rouge2("a cat sat", "the cat sat on the mat") == pytest.approx(0.2 / 0.7)
    assert scores.rouge2("cats sitting", "cat sits") == 1.0  # stems
    assert scores.rouge2("", "the cat") == scores.rouge2("cat", "cat") == 0.0


def test_accuracy_is_of_the_final_number():
    scorer = scores.Scorer(asked := [Question(1, None, ["a"], "#### 4", "accuracy"), Question(2, None, ["a"], "x")])
    assert [scorer(asked[0], text) for text in ("2 + 2 = 4", "So 5.")] == [{"accuracy": 1.0}, {"accuracy": 0.0}]
    assert scorer(asked[1], "x") == {} and scorer.unscored == []


def test_a_thought_is_not_scored():
    asked = Question(1, None, ["a"], score="pass_at_1", code=TASK)
    answer = f"<think>```python\ndef twice(n): return n\n```</think>\n```python\n{WHOLE}```"
    assert scores.Scorer([asked], run_code=True)(asked, answer) == {"pass_at_1": 1.0}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("<think>3 * 5 = 15. Or 14? Let me check: 15", 0.0),
        ("<think>14?</think> It is 15.", 1.0),
        ("<think>14?</think><think>Or 15", 0.0),
        ("It is 15. <think>Or 14?", 1.0),
        ("<|channel|>analysis<|message|>3 * 5 = 15. Or 14? Let me check: 15", 0.0),
        ("<|channel|>analysis<|message|>14?<|end|><|start|>assistant<|channel|>final<|message|>15", 1.0),
        ("[THINK]15? Or 14", 0.0),
        ("[THINK]14?[/THINK]15", 1.0),
        ("<seed:think>15, so", 0.0),
        ("<seed:think>It is 14</seed:think>It is 15", 1.0),
        ("<|channel>thought\n15", 0.0),
        ("<|channel>thought\n15<channel|>14", 0.0),
        ("<|START_THINKING|>15", 0.0),
        ("◁think▷15", 0.0),
        ("<thought>15", 0.0),
        ("<|begin_of_thought|>15", 0.0),
        ("<|inner_prefix|>14<|inner_suffix|>15<|inner_prefix|>16", 1.0),
        ("<|think|>14<|end|><|begin|>assistant<|content|>15", 1.0),
        ("It is 14.\n[BEGIN FINAL RESPONSE]15[END FINAL RESPONSE]\n16", 1.0),
        ("Here are my reasoning steps: 15", 1.0),
    ],
)
def test_a_thought_that_never_ends_is_not_scored(answer, right):
    asked = Question(1, None, ["a"], "#### 15", "accuracy")
    assert scores.Scorer([asked])(asked, answer) == {"accuracy": right}


def test_the_marks_of_a_response_are_none_of_the_answer():
    told = "<|START_THINKING|>A dog?<|END_THINKING|><|START_RESPONSE|>A cat.<|END_RESPONSE|>"
    assert without_thoughts(told) == without_thoughts(told[:-16]) == without_thoughts("A cat.") == "A cat."
    for header in ("final", "final json", "final <|constrain|>json"):  # gpt-oss names the format of its answer
        asked = f"<|channel|>analysis<|message|>A dog?<|end|><|start|>assistant<|channel|>{header}<|message|>A cat."
        assert without_thoughts(asked) == "A cat."


@pytest.mark.parametrize("opened", [False, True])
def test_a_thought_that_the_prompt_opens_is_none_of_the_answer(opened, tmp_path):
    texts = {"51": "#### 15", "61>kniht/<9": "#### 16"}
    asked = [Question(number, None, [text], texts[text], "accuracy") for number, text in enumerate(texts)]
    oracle = StubOracle()  # it answers with the reversed text
    oracle.target.opens_thought = lambda prompt: opened
    judged = replace(benchmark(asked), score=scores.Scorer(asked))
    evaluation = evaluate({"vanilla": StubEngine()}, oracle, [judged], render)
    assert [record.scores["accuracy"] for record in evaluation.records] == [float(not opened), 1.0]
    write_answers(tmp_path, evaluation)
    answers = read_answers(tmp_path / "answers" / "vanilla.jsonl")
    assert [found["accuracy"] for found in score_answers(answers, answers, asked)[None].scores] == [1.0 - opened, 1.0]


def test_words_of_other_scripts_are_words():
    pytest.importorskip("rouge_score")
    assert scores.rouge2("Кошка сидит дома", "кошка сидит дома") == 1.0
    assert scores.rouge2("кошка сидит тихо", "кошка сидит дома") == pytest.approx(0.5)
    for text in (
        "Курс доллара вырос на 5 процентов",
        "北京下雪了",
        "GPT は速い",
        "สวัสดี",
        "हिन्दी भाषा",
        "Zürich, Straße 5",
    ):
        assert scores.rouge2(text, text) == 1.0, text
    assert scores.rouge2("北京下雨了", "北京下雪了") == pytest.approx(0.5)  # of 4 pairs of characters each 2 are shared
    assert scores.rouge2("курс вырос на 7", "курс вырос на 5") == pytest.approx(2 / 3)
    assert scores.rouge2("हन्दे भाषा", "हिन्दी भाषा") == 0.0  # marks of vowels count
    assert scores.rouge2("Кошка loved dogs", "кошка loves dog") == 1.0  # stems
    assert scores.rouge2("caf au lait", "Café au lait") == 1.0  # the package's own words, as published figures have


def test_what_cannot_be_scored_is_told_and_left_out(monkeypatch):
    asked = [Question(1, None, ["a"], "b", "rouge2"), Question(2, None, ["a"], score="pass_at_1", code=TASK)]
    monkeypatch.setattr(scores, "rouge_scorer", lambda: None)
    monkeypatch.setattr(scores, "pass_at_1", lambda *_, **__: pytest.fail("code ran unasked"))
    scorer = scores.Scorer(asked)
    assert [scorer(question, "b c") for question in asked] == [{}, {}]
    assert [reason.partition(":")[0] for reason in scorer.unscored] == ["ROUGE-2 is not scored", "pass@1 is not scored"]
    assert "pip install rouge-score" in scorer.unscored[0] and "--run_code allows" in scorer.unscored[1]


@pytest.mark.parametrize(("ended", "cut"), [("length", True), ("context", True), ("eos", False), ("", False)])
def test_a_score_knows_whether_a_limit_has_cut_the_answer(monkeypatch, tmp_path, ended, cut):
    known = []
    monkeypatch.setattr(scores, "pass_at_1", lambda answer, task, cut: known.append(cut) or 1.0)
    asked = [Question(1, None, ["a"], score="pass_at_1", code=TASK)]
    judged = replace(benchmark(asked), score=scores.Scorer(asked, run_code=True))
    evaluation = evaluate({"vanilla": StubEngine()}, StubOracle(), [judged], render)
    record = evaluation.records[0]
    scores_of(replace(record, generation=replace(record.generation, finish_reason=ended)), judged)
    assert known[-1] == cut
    write_answers(tmp_path, evaluation)
    file = tmp_path / "answers" / "vanilla.jsonl"
    row = json.loads(file.read_text())
    row["choices"][0]["finish_reasons"] = [ended]
    if not ended:
        del row["choices"][0]["finish_reasons"]
    file.write_text(json.dumps(row))
    monkeypatch.setattr(scores, "check_machine", lambda: None)
    answers = read_answers(file)
    score_answers(answers, answers, asked, run_code=True)
    assert known[-1] == cut


def test_each_answer_is_scored_once(monkeypatch):
    ran = []
    monkeypatch.setattr(scores, "pass_at_1", lambda answer, task, cut: ran.append(answer) or 1.0)
    question = Question(1, None, ["a"], score="pass_at_1", code=TASK)
    scorer = scores.Scorer([question], run_code=True)
    assert [scorer(question, text) for text in ("x", "x", "y")] == [{"pass_at_1": 1.0}] * 3 and ran == ["x", "y"]


def test_means_are_of_the_answers_that_have_the_score():
    assert scores.mean_scores([{"rouge2": 0.5}, {}, {"rouge2": 0.25}]) == {
        **{"accuracy": None, "rouge2": 0.375},
        **{"pass_at_1": None},
    }


def test_columns_are_rows_in_place_of_categories_and_answers_keep_theirs():
    columns = {1: "multi-turn", 2: "math"}
    asked = [replace(one, column=columns.get(one.question_id)) for one in QUESTIONS]  # two of category math
    asked.append(replace(asked[0], question_id=4, category="stem"))
    evaluation = evaluate({"vanilla": StubEngine()}, StubOracle(), [benchmark(asked)], render)
    found = [(row["category"], row["questions"], row["new_tokens"]) for row in result_rows(evaluation, 0)]
    assert found == [(None, 4, 24), ("multi-turn", 2, 18), ("math", 2, 6)]
    assert {record.category for record in evaluation.records} == {"writing", "math", "stem"}


def test_every_score_has_a_field_of_its_own_and_is_of_last_turns():
    def score(question, answer, in_thought, finish_reason):
        return {"rouge2": len(answer) / 8} if question.question_id == 1 else {"pass_at_1": float(answer == "ih")}

    evaluation = evaluate({"vanilla": StubEngine()}, StubOracle(), [replace(benchmark(), score=score)], render)
    found = {
        row["category"]: [row[name] for name in ("score", "rouge2", "pass_at_1")] for row in result_rows(evaluation, 0)
    }
    assert found == {None: [None, 3 / 8, 0.5], "writing": [None, 3 / 8, None], "math": [None, None, 0.5]}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Here:\n```python\na = 1\n```\nor\n```\nb\n```", None),
        ("    return 1", None),
        (f"```bash\npip install x\n```\n```python\n>>> twice(1)\n2\n```\n```python\n{WHOLE}```", WHOLE),
        ("- So:\n  ```python\n  def twice(n):\n      return 2 * n\n  ```", "def twice(n):\n    return 2 * n\n"),
    ],
)
def test_code_is_the_first_fenced_block_that_has_the_function(answer, code):
    assert code_of(answer, re.compile("^def twice", re.MULTILINE)) == code


def test_an_answer_with_the_function_replaces_it_and_any_other_goes_on():
    assert program_of(WHOLE, TASK).startswith(f"import math\n\n\ndef helper(n):\n    return n + 1\n\n\n\n{WHOLE}")
    for answer in ("    return 2 * n", "```py\nreturn 2 * n\n"):  # of which one is cut at the longest answer
        assert program_of(answer, TASK).startswith(f"{TASK.prompt}\n    return 2 * n\n")
    bare = CodeTask("def twice(n):\n", "twice", TASK.test)  # no docstring: the prompt alone is no Python
    assert pass_at_1("def twice(n):\n    return 2 * n", bare, LIMITS) == 1.0


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("    return 2 * n", True),
        (f"Of course:\n```python\n{WHOLE}```\nIt adds n to itself.", True),
        ("return 2 * n", True),  # answers are stripped
        ("both = n + n\n    return both", True),
        ("```python\nboth = n + n\nreturn both\n```", True),
        ("    return n * n", False),
        ("I do not know.", False),
        ("", False),
        ("    import sys\n    sys.exit(0)", False),  # ends without an error before the test does
        ("    import os\n    os._exit(0)", False),
        ("    return int(input())", False),  # no input
        (f"```python\n{WHOLE}if __name__ == '__main__':\n    twice(input())\n```", True),
        (f"```python\n{PAIR}{WHOLE}both = Pair(1)\nassert both.n == 1\n```", True),
        (f"```python\nfrom __future__ import annotations\n{PAIR}{WHOLE}```", True),
        ("```python\ndef twice(n: Unknown):\n    return 2 * n\n```", False),  # a NameError, as in any file
    ],
)
def test_an_answer_passes_if_its_code_completes_the_test(answer, passes):
    assert pass_at_1(answer, TASK, LIMITS) == float(passes)


def test_files_of_its_own_folder_may_be_written_and_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(run_code.tempfile, "tempdir", str(tmp_path))
    lines = ["import os", "assert os.listdir() == []", "def twice(n):", "    with open(f'{n}', 'w') as file:"]
    lines += ["        file.write('ab' * n)", "    return len(open(f'{n}').read())"]
    assert pass_at_1("\n".join(lines), TASK, LIMITS) == 1.0
    assert list(tmp_path.iterdir()) == []


HARMFUL = {
    "loops": "while True:\n        pass",
    "sleeps": "import time\n    time.sleep(60)",
    "forks": "import os\n    while True:\n        os.fork()",
    "catches every error": "import os\n    while True:\n        try: os.fork()\n        except OSError: 0",
    "starts a program": "import subprocess\n    subprocess.Popen(['sleep', '60'])\n    return 2 * n",
    "starts threads": "import threading\n    threading.Thread(target=print).start()\n    return 2 * n",
    "allocates at once": "return len(bytearray(1 << 40))",
    "allocates bit by bit": "kept = []\n    while True:\n        kept.append(bytearray(1 << 20))",
    "recurses": "return twice(n)",
    "writes a large file": "file = open('x', 'wb')\n    while True:\n        file.write(bytes(1 << 20))",
    "writes many files": "for i in range(1000):\n        open(str(i), 'wb').write(bytes(1000))\n    return 2 * n",
    "prints endlessly": "while True:\n        print('x' * 1000)",
    "makes folders": "import os\n    os.mkdir('a')\n    return 2 * n",
    "kills its parent": "import os, signal\n    os.kill(os.getppid(), signal.SIGKILL)\n    return 2 * n",
    "deletes": "import os\n    os.remove({victim!r})\n    return 2 * n",
    "deletes a tree": "import shutil\n    shutil.rmtree({folder!r})\n    return 2 * n",
    "overwrites": "open({victim!r}, 'w')\n    return 2 * n",
    "connects": "import socket\n    socket.create_connection(('127.0.0.1', 9))\n    return 2 * n",
}


@pytest.mark.parametrize("deed", HARMFUL)
def test_code_that_would_harm_fails_and_leaves_nothing_behind(deed, tmp_path, monkeypatch):
    victim = tmp_path / "kept" / "file"
    victim.parent.mkdir()
    victim.write_text("kept")
    victim.chmod(0o666)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(run_code.tempfile, "tempdir", str(tmp_path / "temporary"))
    begun, started = [], time.monotonic()

    class Noting(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            begun.append(self.pid)

    monkeypatch.setattr(run_code.subprocess, "Popen", Noting)
    answer = f"    {HARMFUL[deed].format(victim=str(victim), folder=str(victim.parent))}\n"
    assert pass_at_1(answer, TASK, LIMITS) == 0.0
    assert time.monotonic() - started < 30
    assert victim.read_text() == "kept" and list((tmp_path / "temporary").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(begun[-1], 0)  # its process group is gone


def test_secrets_of_the_environment_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert pass_at_1("    import os\n    assert 'HF_TOKEN' not in os.environ\n    return 2 * n", TASK, LIMITS) == 1.0


def test_a_machine_that_does_not_limit_processes_is_refused(monkeypatch, tmp_path):
    runner = run_code._RUNNER.read_text()
    (tmp_path / "runner.py").write_text(runner.replace("resource.RLIMIT_NPROC: 1,", ""))
    monkeypatch.setattr(run_code, "_RUNNER", tmp_path / "runner.py")
    question = Question(1, None, ["a"], score="pass_at_1", code=TASK)
    run_code.check_machine.cache_clear()
    try:
        with pytest.raises(
            ValueError, match=r"--run_code .*\(the limit on processes is not enforced\); run as another"
        ):
            scores.Scorer([question], run_code=True)
        (tmp_path / "runner.py").write_text("raise OSError")
        with pytest.raises(ValueError, match="Python does not start there"):
            scores.Scorer([question], run_code=True)
    finally:
        monkeypatch.undo()
        run_code.check_machine.cache_clear()
    scores.Scorer([SimpleNamespace(score="accuracy")], run_code=True)  # nothing to run, nothing to check


def test_the_runner_needs_no_package():
    file = Path(run_code.__file__).with_name("code_runner.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import ast; ast.parse(open({str(file)!r}).read())"], check=False
    )
    assert done.returncode == 0 and "draft_heads" not in file.read_text()
