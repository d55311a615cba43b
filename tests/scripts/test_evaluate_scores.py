"""Scores from the command lines of `scripts/evaluate.py` and `scripts/score_answers.py`, on a target of the tests."""

import json
from dataclasses import replace

import pytest

from draft_heads.inference.evaluation.evaluate import scores_of
from draft_heads.scripts import decoding_options, evaluate, lossless, score_answers


@pytest.fixture
def command(tmp_path):
    """The arguments that the scripts need beside --benchmarks."""
    return [
        *("--target", "tests/tiny_target", "--drafters", "plain=vanilla", "--output", str(tmp_path / "out")),
        *("--max_new_tokens", "4", "--device", "cpu", "--threads", "1"),
    ]


ADD = {"task_id": "T/0", "prompt": "def add(a, b):\n", "entry_point": "add", "test": "def check(add):\n    add(1, 2)"}
NEWS = {"document": "A cat sat on a mat.", "summary": "A cat sat.", "id": "x"}


def test_scores_of_the_report_are_those_that_score_answers_computes_from_the_answer_files(
    command, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("rouge_score")
    texts = {"T/0": "```python\ndef add(a, b):\n    return a + b\n```", "x": "The cat sat.", 0: "So 2 + 2 = #### 4"}
    rows = {"humaneval": ADD, "xsum": NEWS, "gsm8k": {"question": "2+2?", "answer": "#### 4"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    own = evaluate.decode_and_judge

    def answered(options, target, engines, benchmarks, *rest):
        """The evaluation of answers as in `texts`, on a target that cannot write them."""
        found = own(options, target, engines, benchmarks, *rest)
        named = {benchmark.name: benchmark for benchmark in benchmarks}
        turns = [replace(turn, text=texts[turn.question_id]) for turn in found.records]
        return replace(found, records=[replace(one, scores=scores_of(one, named[one.benchmark])) for one in turns])

    monkeypatch.setattr(evaluate, "decode_and_judge", answered)
    files = [f"{name}={tmp_path / name}.jsonl" for name in rows]
    fields = {"humaneval": "pass_at_1", "xsum": "rouge2", "gsm8k": "score"}
    for run_code, passed in ((["--run_code"], 1.0), (["--overwrite"], None)):
        assert evaluate.main([*command, "--benchmarks", *files, *run_code]) == 0
        shown = capsys.readouterr().out
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        found = {
            row["benchmark"]: row for row in report["results"] if not row["category"] and row["drafter"] == "plain"
        }
        # the-cat cat-sat against a-cat cat-sat: 1 of 2, 1 of 2
        wanted = {"humaneval": passed, "xsum": pytest.approx(0.5), "gsm8k": {"accuracy": 1.0}}
        assert {name: found[name][field] for name, field in fields.items()} == wanted
        assert ("humaneval: pass@1 is not scored" in shown) == (passed is None)
        assert f"Score: {'pass@1 of humaneval, ' if passed else ''}ROUGE-2 (F) of xsum, accuracy of gsm8k." in shown
    lines = (tmp_path / "out" / "answers" / "plain.jsonl").read_text().splitlines()
    for name, printed in (("humaneval", "100.0%"), ("xsum", "50.0%"), ("gsm8k", "100.0%")):
        one = tmp_path / "one.jsonl"
        one.write_text("".join(line + "\n" for line in lines if json.loads(line)["benchmark"] == name))
        given = ["--answers", str(one), "--baseline", str(one), "--questions", str(tmp_path / f"{name}.jsonl")]
        assert score_answers.main([*given, *(["--run_code"] if name == "humaneval" else [])]) == 0
        assert capsys.readouterr().out.splitlines()[-1].split()[-1] == printed
        assert score_answers.main(given) == 0
        shown = capsys.readouterr().out
        assert (printed in shown) == (name != "humaneval") == ("--run_code allows" not in shown)


def test_rows_of_another_form_under_a_scored_name_are_told(command, tmp_path, capsys):
    (tmp_path / "mt.jsonl").write_text('{"turns": ["Write."]}')
    assert evaluate.main([*command, "--benchmarks", f"gsm8k={tmp_path / 'mt.jsonl'}"]) == 0
    assert "gsm8k: its answers are not scored: its rows do not have the published form" in capsys.readouterr().out


def test_lossless_scores_nothing(command, capsys):
    with pytest.raises(SystemExit):
        lossless.main([*command, "--benchmarks", "gsm8k", "--run_code"])
    assert "unknown flag --run_code" in capsys.readouterr().err


def test_answers_that_no_run_wrote_stay(command, tmp_path, capsys):
    (tmp_path / "out" / "answers").mkdir(parents=True)
    (own := tmp_path / "out" / "answers" / "mine.jsonl").write_text("{}")
    (tmp_path / "mt.jsonl").write_text('{"turns": ["Write."]}')
    assert evaluate.main([*command, "--benchmarks", f"mt={tmp_path / 'mt.jsonl'}"]) == 2
    assert f"{own} is there without a report.json" in capsys.readouterr().err and own.exists()


@pytest.mark.parametrize("given", ["https://hub/questions.jsonl?download=true", "runs/a=b/questions.jsonl"])
def test_what_has_a_slash_before_its_equals_sign_is_a_file(monkeypatch, given):
    monkeypatch.setattr(decoding_options, "load_benchmark", lambda name, source: [name, source])
    assert decoding_options.answered_questions(given, [("mt_bench", 1)]) == ("mt_bench", ["mt_bench", given])
    assert decoding_options.answered_questions("mine=q.jsonl", []) == ("mine", ["mine", "q.jsonl"])
