"""`scripts/score_answers.py` on small files whose figures are worked out by hand."""

import json
from pathlib import Path

import pytest

from draft_heads.data.text.benchmarks import Question
from draft_heads.inference.evaluation import metrics
from draft_heads.inference.evaluation.answer_files import read_answers
from draft_heads.inference.evaluation.comparison import csv_text, differences, read_report, read_reports
from draft_heads.scripts import evaluate, score_answers


def row(question_id, texts, new_tokens, wall_time, **steps):
    choice = {"index": 0, "turns": texts, "new_tokens": new_tokens, "wall_time": wall_time, **steps}
    return {"question_id": question_id, "choices": [choice]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


DRAFTER = [
    row(1, ["same", "text"], [10, 20], [1.0, 2.0], idxs=[4, 5]),
    row(2, ["other"], [30], [1.0], idxs=[10]),
]
BASELINE = [
    row(2, ["different"], [20], [6.0], idxs=[19]),
    row(1, ["same", "text"], [10, 20], [3.0, 6.0], idxs=[9, 19]),
]
QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["a", "b"]},
    {"question_id": 2, "category": "math", "turns": ["c"]},
    {"question_id": 3, "category": "math", "turns": ["never answered"]},
]


@pytest.fixture
def files(tmp_path):
    return [
        "--answers",
        write(tmp_path / "a.jsonl", DRAFTER),
        "--baseline",
        write(tmp_path / "b.jsonl", BASELINE),
    ]


def table(capsys):
    lines = capsys.readouterr().out.splitlines()[1:]
    return {line.split()[0]: line.split()[1:] for line in lines}


def test_ratios_are_of_totals(files, capsys):
    # 60 tokens over 19 idxs, over 22 steps; 15/50 seconds a token against 4/60
    assert score_answers.main(files) == 0
    assert table(capsys) == {"all": ["2", "3.16", "2.73", "4.50", "1/2"]}


def test_categories_get_their_own_row(files, tmp_path, capsys):
    assert score_answers.main([*files, "--questions", write(tmp_path / "q.jsonl", QUESTIONS)]) == 0
    assert table(capsys) == {
        "writing": ["1", "3.33", "2.73", "3.00", "1/1"],  # 30/9, 30/11, (9/30)/(3/30)
        "math": ["1", "3.00", "2.73", "9.00", "0/1"],  # 30/10, 30/11, (6/20)/(1/30)
        "all": ["2", "3.16", "2.73", "4.50", "1/2"],
    }


def test_answers_decoded_together_have_no_speed_of_a_category(files, tmp_path, capsys):
    for at, rows in ((1, DRAFTER), (3, BASELINE)):
        files[at] = write(tmp_path / f"{at}.jsonl", [{**one, "batch_size": 2} for one in rows])
    assert score_answers.main([*files, "--questions", write(tmp_path / "q.jsonl", QUESTIONS)]) == 0
    assert {name: cells[3] for name, cells in table(capsys).items()} == {"writing": "-", "math": "-", "all": "4.50"}


def test_answers_of_other_batches_have_no_speed_over_each_other(files, tmp_path, capsys):
    files[1] = write(tmp_path / "a.jsonl", [{**one, "batch_size": 8} for one in DRAFTER])
    files[3] = write(tmp_path / "b.jsonl", [{**one, "batch_size": 4} for one in BASELINE])
    rows = tmp_path / "rows.json"
    assert score_answers.main([*files, "--json", str(rows)]) == 0
    told = capsys.readouterr().out
    assert "γ is left out: answers and baseline were decoded 8 and 4 at once" in told
    assert told.splitlines()[1].split() == ["all", "2", "3.16", "2.73", "-", "1/2"]
    (row,) = json.loads(rows.read_text())["results"]
    assert row["gamma"] is None and row["gamma_ci95"] is None and row["beta"] == pytest.approx(60 / 22)


def test_answers_that_lack_a_turn_of_their_question_are_told(tmp_path, caplog):
    """They have no score: a mean over the others alone would pass for that of all."""
    whole = {"turns": ["x", "y"], "idxs": [1, 1], "new_tokens": [3, 3], "wall_time": [1.0, 1.0]}
    part = {key: values[:1] for key, values in whole.items()}
    answered = [{"question_id": number, "choices": [choice]} for number, choice in enumerate((whole, part))]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, answered)))
    answers = read_answers(tmp_path / "a.jsonl")
    score_answers.score_answers(answers, answers, [Question(number, None, ["a", "b"]) for number in range(2)])
    assert "lack a turn of their question have no score, and β and γ of their turns: 1 (1 of 2)" in caplog.text
    (tmp_path / "b.jsonl").write_text(json.dumps({"question_id": 1, "choices": [{key: [] for key in whole}]}))
    with pytest.raises(
        ValueError, match=r"choices\[0\].turns must have a text or more, has none; leave the question out"
    ):
        read_answers(tmp_path / "b.jsonl")


def test_that_the_first_of_several_choices_is_read_is_told(files, tmp_path, capsys, caplog):
    several = [{**one, "choices": one["choices"] * 2} for one in DRAFTER[:1]] + DRAFTER[1:]
    files[1] = write(tmp_path / "a.jsonl", several)
    assert score_answers.main(files) == 0
    assert table(capsys) == {"all": ["2", "3.16", "2.73", "4.50", "1/2"]}
    assert "a.jsonl: the first of several choices is read, of 1 questions" in caplog.text


def test_our_own_files_count_the_prefill(files, tmp_path, capsys):
    ours = [row(1, ["same", "text"], [10, 20], [1, 2], decoding_steps=[5, 6])]
    ours += [row(2, ["other"], [30], [1], decoding_steps=[11])]
    files[1] = write(tmp_path / "ours.jsonl", ours)
    assert score_answers.main(files) == 0
    assert table(capsys)["all"] == ["2", "3.16", "2.73", "4.50", "1/2"]


def test_questions_without_id_are_numbered_from_zero(tmp_path, capsys):
    answers = write(tmp_path / "a.jsonl", [row(0, ["x"], [4], [1.0], idxs=[1])])
    questions = write(tmp_path / "q.jsonl", [{"question": "2 + 2?", "answer": "#### 4"}])
    options = ["--answers", answers, "--baseline", answers, "--questions", questions]
    assert score_answers.main(options) == 0
    assert table(capsys) == {"all": ["1", "4.00", "2.00", "1.00", "1/1", "0.0%"]}


def test_questions_are_those_of_the_benchmark_that_our_own_files_name(tmp_path, capsys):
    ours = [{**row(number, ["x"], [4], [1.0], idxs=[1]), "benchmark": "spec_bench"} for number in (0, 1)]
    answers = write(tmp_path / "a.jsonl", ours)
    tasks = [
        {"question_id": 0, "category": "stem", "turns": ["a"]},
        {"question_id": 1, "category": "rag", "turns": ["a"]},
    ]
    given = ["--answers", answers, "--baseline", answers, "--questions"]
    assert score_answers.main([*given, write(tmp_path / "q.jsonl", tasks)]) == 0
    assert list(table(capsys)) == ["multi-turn", "RAG", "all"]
    without_name = [{key: value for key, value in one.items() if key != "benchmark"} for one in ours]
    others = write(tmp_path / "others.jsonl", without_name)
    theirs = ["--answers", others, "--baseline", others, "--questions"]
    for name, columns in (("", ["stem", "rag", "all"]), ("spec_bench=", ["multi-turn", "RAG", "all"])):
        assert score_answers.main([*theirs, f"{name}{tmp_path / 'q.jsonl'}"]) == 0
        assert list(table(capsys)) == columns
    (tmp_path / "sums.yaml").write_text("source: p.jsonl\nkeys: [q, a]\nprompt: '{q}'\nreference: a\nscore: accuracy\n")
    write(tmp_path / "p.jsonl", [{"q": "2 + 2?", "a": "4"}, {"q": "2 + 3?", "a": "5"}])
    ours[1]["choices"][0]["turns"] = ["It is 5."]
    assert (
        score_answers.main([*given[:1], write(tmp_path / "b.jsonl", ours), *given[2:], str(tmp_path / "sums.yaml")])
        == 0
    )
    assert table(capsys)["all"] == ["2", "4.00", "2.00", "1.00", "1/2", "50.0%"]


def test_a_turn_without_a_step_after_the_prefill_has_no_idxs_ratio(tmp_path, capsys):
    answers = write(tmp_path / "a.jsonl", [row(0, ["x"], [1], [1.0], idxs=[0])])
    assert score_answers.main(["--answers", answers, "--baseline", answers]) == 0
    assert table(capsys)["all"] == ["1", "-", "1.00", "1.00", "1/1"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "malformed JSON"),
        ("[]", "a row must be a JSON object, got list"),
        ('{"question_id": 3}', "choices must be a list"),
        ('{"question_id": null, "choices": []}', "an id is a whole number or a text, received nothing"),
        ('{"question_id": true, "choices": []}', "an id is a whole number or a text, received bool 'True'"),
        (json.dumps(row(3, ["x"], [1], [1.0])), "must have decoding_steps or idxs"),
        (json.dumps(row(3, ["x", "y"], [1], [1.0], idxs=[1, 2])), "2 turns, 1 entries"),
        (json.dumps(row(3, ["x"], ["one"], [1.0], idxs=[1])), "new_tokens must hold int; got 'one'"),
        (json.dumps(row(3, ["x"], [1], [-1.0], idxs=[1])), "must be 0 or more, and finite; got -1.0"),
        (json.dumps(row(3, ["x"], [1], [float("inf")], idxs=[1])), "must be 0 or more, and finite; got inf"),
        (json.dumps(row(1, ["x"], [1], [1.0], idxs=[1])), "question_id 1 appears a second time"),
    ],
)
def test_malformed_rows_name_file_line_and_reason(line, reason, files, tmp_path, capsys):
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(line + "\n")
    assert score_answers.main(files) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / 'a.jsonl'}, line 3: " in message
    assert reason in message


def test_files_must_answer_the_same_questions(files, tmp_path, capsys):
    files[1] = write(tmp_path / "a.jsonl", DRAFTER[:1])
    assert score_answers.main(files) == 2
    assert "only the baseline has 2" in capsys.readouterr().err


def named(rows, *names):
    return [{**row, "benchmark": name} for row, name in zip(rows, names)]


@pytest.mark.parametrize(
    ("own", "others"),
    [(("q", "q"), (None, None)), ((None, None), ("q", "r")), (("q", "q"), ("r", "r")), (("q", "r"), (None, None))],
)
def test_files_that_name_the_benchmark_otherwise_are_matched_by_id(own, others, tmp_path, capsys):
    answers, baseline = write(tmp_path / "a.jsonl", named(DRAFTER, *own)), named(BASELINE, *others)
    baseline[0]["question_id"] = 2.0  # of a column of floats
    command = ["--answers", answers, "--baseline", write(tmp_path / "b.jsonl", baseline)]
    assert score_answers.main([*command, "--json", str(tmp_path / "rows.json")]) == 0
    assert table(capsys) == {"all": ["2", "3.16", "2.73", "4.50", "1/2"]}
    rows = json.loads((tmp_path / "rows.json").read_text())["results"]
    assert sum(row["gamma"] is not None for row in rows) == len(rows) == len(set(own))


def test_benchmarks_that_cannot_be_matched_are_named(tmp_path, capsys):
    answers = write(tmp_path / "a.jsonl", named(DRAFTER, "q", "q"))
    assert score_answers.main(
        ["--answers", answers, "--baseline", write(tmp_path / "b.jsonl", named(BASELINE, "r", "s"))]
    )
    assert "the answers name q, the baseline r, s; name them alike; the baseline lacks 1, 2" in capsys.readouterr().err


def test_a_baseline_without_seconds_gives_no_speed(files, tmp_path, capsys):
    files[3] = write(
        tmp_path / "b.jsonl", [row(1, ["x", "y"], [1, 1], [0.0, 0.0], idxs=[1, 1]), row(2, ["z"], [1], [0.0], idxs=[1])]
    )
    assert score_answers.main(files) == 0
    assert table(capsys)["all"][3] == "-"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--json", "absent/x.json"], "--json names a file in a folder; absent is none"),
        (["--json", "tests"], "--json names a file in a folder; tests is a folder"),
        (["--seed", "5"], "--seed is of the intervals in --json, which is not given; got 5; leave it out"),
        (["--run_code"], "--run_code scores answers to --questions, which is not given"),
    ],
)
def test_flags_without_effect_and_outputs_are_checked_first(flags, told, capsys):
    assert score_answers.main(["--answers", "absent.jsonl", "--baseline", "absent.jsonl", *flags]) == 2
    assert told in capsys.readouterr().err


def test_rows_replace_no_file_but_their_own(files, tmp_path, capsys):
    own, report = tmp_path / "rows.json", tmp_path / "report.json"
    report.write_text(json.dumps({"target": None, "settings": {}, "results": []}))
    assert score_answers.main([*files, "--json", str(own)]) == score_answers.main([*files, "--json", str(own)]) == 0
    for other in (report, Path(files[1])):
        before = other.read_bytes()
        assert score_answers.main([*files, "--json", str(other)]) == 2
        assert f"--json replaces none but its own files; {other} is another" in capsys.readouterr().err
        assert other.read_bytes() == before


def test_a_question_the_questions_file_lacks_is_an_error(files, tmp_path, capsys):
    questions = write(tmp_path / "q.jsonl", QUESTIONS[:1])
    assert score_answers.main([*files, "--questions", questions]) == 2
    assert "it lacks 2" in capsys.readouterr().err


def test_an_empty_file_is_an_error(files, tmp_path, capsys):
    files[3] = write(tmp_path / "empty.jsonl", [])
    assert score_answers.main(files) == 2
    assert "empty.jsonl is empty" in capsys.readouterr().err


ELSEWHERE = {"kind", "lossy", "max_depth", "skipped", "over_transformers", "lossless", "time_share", "verify_cost"}
ELSEWHERE |= {"peak_memory_bytes", "joules_per_token", "slow_steps"}
"""What a row of report.json says and answer files do not."""
REPEATED = ("Count: one two one two one two", "Say tea coffee tea coffee tea coffee.", "A rose is a rose is a rose is")


@pytest.mark.parametrize("batch", [1, 2])
def test_every_figure_that_answer_files_hold_is_recomputed_as_the_report_has_it(batch, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "OUTPUT_SPAN", 16)
    turns = [[text, "Again, please."][: 1 + index % 2] for index, text in enumerate(REPEATED * 2)]
    asked = [{"question_id": 3 * i, "category": ["a", "b"][i > 2], "turns": text} for i, text in enumerate(turns)]
    questions, report = write(tmp_path / "q.jsonl", asked), tmp_path / "report"
    command = ["--target", "data/tiny_target", "--drafters", "both=ngram+prompt_lookup", "--device", "cpu"]
    command += ["--benchmarks", f"q={questions}", f"again={questions}", "--output", str(report), "--seed", "5"]
    command += ["--max_new_tokens", "24", "--threads", "1", "--batch_size", str(batch)]
    assert evaluate.main(command) == 0
    rows = json.loads((report / "report.json").read_text())["results"]
    assert max(len(row["beta_by_output_position"]) for row in rows) == len(rows[0]["beta_by_turn"]) == 2
    assert any(sum(row["accepted_by_source"].values()) for row in rows)
    assert {row["verify_cost"] is None for row in rows} == {batch > 1}  # steps of a batch are not a text's own
    plain, found = report / "answers" / "vanilla.jsonl", tmp_path / "found.json"
    for name in ("vanilla", "both"):
        answers = report / "answers" / f"{name}.jsonl"
        given = ["--answers", str(answers), "--baseline", str(plain), "--json", str(found), "--seed", "5"]
        assert score_answers.main(given) == 0  # both benchmarks
        same = [row for row in rows if row["drafter"] == name and row["category"] is None]
        recomputed(found, same, ELSEWHERE)
        own, base = (  # one of them, with its categories
            write(tmp_path / f"{path.stem}.jsonl", [one for one in lines(path) if one["benchmark"] == "q"])
            for path in (answers, plain)
        )
        given = ["--answers", own, "--baseline", base, *given[4:], "--questions", questions]
        assert score_answers.main(given) == 0
        same = [row for row in rows if row["drafter"] == name and row["benchmark"] == "q"]
        assert len(same) == 3
        recomputed(found, same, ELSEWHERE)
    shown = read_report(found)
    assert csv_text({"report": shown}).splitlines()[1].startswith("report,q,,both,6,,9,")  # skipped: unknown
    for row in shown["results"]:  # answers of a batch share their seconds
        assert (row["gamma_ci95"] is None) == (batch > 1)
        for key in ("gamma", "wall_seconds", "tokens_per_second"):
            assert (row[key] is None) == (batch > 1 and row["category"] is not None)
    for row in rows:
        assert (row["time_share"] is None) == (batch > 1 and row["category"] is not None)
        assert row["cut"] is not None


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def recomputed(path, rows, elsewhere):
    """Every row is in the file and says the same, but for what files do not hold."""
    found = json.loads(path.read_text())["results"]
    assert len(found) == len(rows)
    for one, row in zip(found, rows):
        assert one.pop("lossless") is None and row.keys() - one.keys() == elsewhere
        assert one == {key: row[key] for key in one}


def test_files_of_other_projects_have_the_figures_that_need_no_steps(files, tmp_path):
    path = tmp_path / "rows.json"
    assert score_answers.main([*files, "--questions", write(tmp_path / "q.jsonl", QUESTIONS), "--json", str(path)]) == 0
    whole, *categories = json.loads(path.read_text())["results"]
    assert (whole["benchmark"], whole["drafter"], whole["category"], whole["questions"]) == ("a", "a", None, 2)
    assert [row["category"] for row in categories] == ["writing", "math"]
    assert whole["beta"] == 60 / 22 and whole["gamma"] == pytest.approx(4.5)
    low, high = whole["gamma_ci95"]
    assert (low, high) == pytest.approx((3, 9))  # both questions the one, both the other
    assert whole["beta_by_turn"] == whole["beta_by_output_position"] == whole["accept_length_histogram"] == []
    assert whole["accepted_by_source"] is None


def test_steps_that_do_not_add_up_are_an_error(files, tmp_path, capsys):
    ours = {"decoding_steps": [2], "accept_lengths_per_turn": [[1, 2]], "accepted_drafts_per_turn": [[1]]}
    files[1] = write(tmp_path / "a.jsonl", [row(1, ["x"], [4], [1.0], **ours, prompt_tokens=[3])])
    assert score_answers.main(files) == 2
    assert "decoding_steps (2; the prefill accepts no drafts) and new_tokens (4); got 2 and 1 steps of 3 tokens" in (
        capsys.readouterr().err
    )


def test_rows_of_other_files_are_no_rows_of_the_same_settings(files, tmp_path):
    slower = [row(1, ["same", "text"], [10, 20], [6.0, 9.0], idxs=[9, 19]), BASELINE[0]]
    (tmp_path / "new").mkdir()
    other = [*files[:3], write(tmp_path / "new" / "b.jsonl", slower)]
    asked = ["--questions", write(tmp_path / "q.jsonl", QUESTIONS)]
    changed = ["--questions", write(tmp_path / "new" / "q.jsonl", [{**QUESTIONS[0], "turns": ["z"]}, *QUESTIONS[1:]])]
    for name, given in (("one", [*files, *asked]), ("two", [*other, *asked]), ("again", [*files, *asked])):
        assert score_answers.main([*given, "--json", str(tmp_path / f"{name}.json")]) == 0
    assert score_answers.main([*files, *changed, "--json", str(tmp_path / "asked.json")]) == 0
    told = [read_reports([tmp_path / "one.json", tmp_path / f"{name}.json"]) for name in ("two", "again", "asked")]
    unlike = [[key for key, *_ in differences(reports).rows] for reports in told]
    assert unlike == [["baseline_checksum"], [], ["questions_checksum"]]
