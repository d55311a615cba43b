"""Studies: their files, what is trained for them, and what their tables say."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from draft_heads.data.common.files import lock_folder
from draft_heads.data.text.benchmarks import load_benchmark
from draft_heads.data.text.known_benchmarks import SCORES
from draft_heads.inference.evaluation.metrics import acceptance_by_position
from draft_heads.inference.evaluation.studies import (
    FIGURES,
    Cell,
    figure,
    known_studies,
    mixed_questions,
    read_study,
    study_table,
)
from draft_heads.scripts import measure_study, tiny_study
from draft_heads.scripts import study as script
from draft_heads.scripts import training_arms as arms

STUDY = """
title: A table
heads: {medusa: medusa}
cell: {benchmark: mt_bench}
rows:
  Vanilla: {drafter: vanilla}
  Medusa: {head: medusa}
  N-grams: {drafter: "ngram,k={k}", k: 3}
columns: {γ: {measure: gamma}, β: {measure: beta}}
published: {Vicuna-7B: {Medusa: [2.13, null]}}
"""


def write(path, text=STUDY, *changes):
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return str(path)


# ----------------------------------------------------------------------------------------------------
# Files


def test_a_cell_has_the_fields_of_its_row_and_column_over_those_of_all(tmp_path):
    study = read_study(write(tmp_path / "mine.yaml"))
    assert (study.name, study.rows, study.columns) == ("mine", ("Vanilla", "Medusa", "N-grams"), ("γ", "β"))
    assert study.cells["N-grams", "β"] == Cell("beta", "ngram,k=3", benchmark="mt_bench")
    medusa = study.cells["Medusa", "γ"]
    assert (medusa.drafter, medusa.drafter_name) == ("{kind}:{head}", "medusa")
    assert study.cells["N-grams", "γ"].drafter_name == "ngram_k_3"
    assert study.benchmarks == ["mt_bench"]


def test_a_published_number_stands_below_ours_under_its_own_source(tmp_path):
    study = read_study(write(tmp_path / "mine.yaml"))
    made = study_table(study, {("Medusa", "γ"): 1.234, ("Medusa", "β"): 2.0, ("Vanilla", "β"): 1.0}, "own-model")
    assert made.splitlines()[2:] == [
        "| Vanilla | here: own-model | – | 1.00 |",
        "| Medusa | here: own-model | 1.23× | 2.00 |",
        "| Medusa | published: Vicuna-7B | 2.13× | – |",
        "| N-grams | here: own-model | – | – |",
    ]


def test_a_figure_is_found_by_benchmark_category_drafter_and_path():
    row = {"benchmark": "b", "category": None, "drafter": "ngram", "time_share": {"draft": 0.25}, "at": [0.5]}
    rows = [row, row | {"category": "math", "time_share": {"draft": 0.75}}]
    assert figure(rows, Cell("time_share.draft", "ngram", benchmark="b")) == 0.25
    assert figure(rows, Cell("time_share.draft", "ngram", benchmark="b", category="math")) == 0.75
    assert figure(rows, Cell("at.0", "ngram", benchmark="b")) == 0.5
    assert figure(rows, Cell("at.1", "ngram", benchmark="b")) is None
    assert figure(rows, Cell("at.0", "ngram", benchmark="other")) is None


def test_a_position_at_which_nothing_was_accepted_has_0_and_one_that_was_not_drafted_none():
    def shares(histogram, max_depth):
        shown = {"max_depth": max_depth, "accept_length_histogram": histogram}
        row = {"benchmark": "b", "category": None, "drafter": "ngram", **shown}
        row["acceptance_by_position"] = acceptance_by_position(histogram)
        cells = [[f"acceptance_by_position.{of}.{k}" for k in range(4)] for of in ("unconditional", "conditional")]
        return [[figure([row], Cell(cell, "ngram", benchmark="b")) for cell in each] for each in cells]

    assert shares([69], 3) == [[0, 0, 0, None], [0, None, None, None]]  # 69 steps accepted nothing
    assert shares([1, 3], 3) == [[0.75, 0, 0, None], [0.75, 0, None, None]]
    assert shares([], 3) == shares([69], 0) == shares([69], None) == [[None] * 4] * 2


@pytest.mark.parametrize("name", known_studies())
def test_every_study_of_the_project_can_be_read(name):
    study = read_study(name)
    assert study.cells and study.title
    names = {(cell.run, cell.drafter_name): cell.drafter for cell in study.cells.values() if cell.of_report}
    specs = {(cell.run, cell.drafter_name, cell.drafter) for cell in study.cells.values() if cell.of_report}
    assert len(names) == len(specs), "two drafters have one name in a report"


def test_the_studies_of_the_papers_are_there():
    tables = {
        **{"ctc_drafter": ["table1", "table2", "figure2", "figure3"], "anpd": ["table1", "grid"]},
        "chimera": ["table2", "table3", "table4", "table5", "table6", "table7", "figure6"],
        "ouroboros": ["table2", "table3", "table4", "table10", "table13", "table17", "figure6"],
    }
    assert {f"{paper}_{one}" for paper, found in tables.items() for one in found} <= set(known_studies())
    arms.arms_of([read_study(name) for name in known_studies()])  # one name means one head in all


def test_numbers_of_the_papers_are_those_they_print():
    assert read_study("ctc_drafter_table1").published["Vicuna-7B"]["CTC-drafter"] == [2.78, 3.56, 2.43, 3.53]
    assert read_study("chimera_table7").published["Vicuna-7B"]["3-gram"] == [0.90, 0.75, 0.62, 0.54]
    assert read_study("anpd_table1").published["CodeLLaMA-13B"]["ANPD"] == [None, None, 3.6665]
    assert read_study("ouroboros_table13").published["Yi 34B/6B"]["Ouroboros"] == [13.12, 7.43, 4.65, 7.46, 4.05]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("title: A table", "tittle: A table"), "a study has the keys title, rows, .*; received tittle"),
        (("title: A table\n", ""), "title is required"),
        (("{head: medusa}", "{head: hydra}"), "needs a head of medusa, got 'hydra'"),
        (("k={k}", "k={n}"), "needs n; add it to the row"),
        (("k: 3}", "k: 3, width: 2}"), "width is no field of a cell"),
        (("{measure: beta}", "{}"), "needs measure"),
        (("{measure: beta}", "{measure: null}"), "needs measure"),
        (("{measure: beta}", "{measure: head.size, head: medusa}"), "of a head one of steps, parameters"),
        (("cell: {benchmark: mt_bench}", "cell: {run: typical, benchmark: mt_bench}"), "runs has no 'typical'"),
        (("cell: {benchmark: mt_bench}", "cell: {}"), "needs benchmark"),
        (("[2.13, null]", "[2.13]"), "Vicuna-7B, Medusa has 1 numbers for 2 columns; use null"),
        (("Vicuna-7B: {Medusa", "Vicuna-7B: {Hydra"), "'Hydra' is none"),
        (("rows:", "rows: ["), "is not YAML"),
        (("{drafter: vanilla}", "vanilla"), "rows maps names to mappings, received 'Vanilla': 'vanilla'"),
        (
            ("{measure: beta}", "{measure: betta}"),
            "measure is accuracy, head.… or a figure of a report, beta, .*'betta'",
        ),
        (("{measure: beta}", "{measure: gamma.ci95.low}"), "a figure of a report, .*; got 'gamma.ci95.low'"),
        (("{measure: beta}", "{measure: time_share.darft}"), "time_share.draft, .*; got 'time_share.darft'"),
        (("{measure: beta}", "{measure: acceptance_by_position.conditional}"), "conditional.N; got"),
        (("rows:", "rows:\n  Vanilla: {head: medusa}"), "not YAML: a mapping has the key 'Vanilla' twice; keep one"),
        (("{measure: beta}", "{measure: 3}"), "measure of the cell .* is no 3"),
        (("{measure: beta}", "{measure: accuracy, head: medusa, top: 6}"), "top from 1 to 5; got 0, 6"),
        (("[2.13, null]", "[2.13, fast]"), "a list of numbers or null, one a column; got"),
        (("[2.13, null]", "2.13"), "a list of numbers or null, one a column; got 2.13"),
        (("title: A table", "title: A table\nnotes: one"), "notes a list of texts"),
        (("title: A table", "title: A table\nmixes: {both: {of: gsm8k}}"), "a mix is {of: .*received both"),
        (("title: A table", "title: A table\nruns: {half: 0.5}"), "runs maps names to mappings, received 'half': 0.5"),
        (("title: A table", "title: A table\nsettings: {target: T}"), "target is given otherwise; take it out"),
        (("title: A table", "title: A table\nbenchmark_settings: {gsm8k: {}}"), "has gsm8k, which no cell names"),
        (("{medusa: medusa}", "{medusa: [medusa]}"), "heads has a name, .* received 'medusa': \\['medusa'\\]"),
        (("{drafter: vanilla}", '{drafter: "ngram,k:3"}'), "'ngram,k:3' and 'ngram,k=3' have one name in a report"),
        (("medusa", "vanilla"), "'vanilla' and '{kind}:vanilla' have one name in a report, vanilla"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_what_is_wrong(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_study(write(tmp_path / "mine.yaml", STUDY, change))


def test_heads_of_one_name_in_a_report_are_refused(tmp_path):
    changes = [("{medusa: medusa}", "{m.a: medusa, m_a: hydra}"), ("Medusa: {head: medusa}", "Medusa: {head: m.a}")]
    changes += [("rows:", "rows:\n  Hydra: {head: m_a}")]
    with pytest.raises(ValueError, match=r"'{kind}:m_a' and '{kind}:m\.a' have one name in a report, m_a; change one"):
        read_study(write(tmp_path / "mine.yaml", STUDY, *changes))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"one of anpd_grid, anpd_table1, .*; got 'table9'"):
        read_study("table9")


# ----------------------------------------------------------------------------------------------------
# The whole


def test_mixes_take_turns_of_consecutive_questions_or_are_shuffled(tmp_path):
    files = {}
    for name in ("a", "b"):
        files[name] = str(tmp_path / name)
        (tmp_path / name).write_text("".join(json.dumps({"turns": [f"{name}{i}"]}) + "\n" for i in range(5)))
    rows = mixed_questions({"each": 4, "consecutive": 2}, files)
    assert [row["turns"][0] for row in rows] == ["a0", "a1", "b0", "b1", "a2", "a3", "b2", "b3"]
    shuffled = mixed_questions({"each": 4}, files)
    assert sorted(row["turns"][0] for row in shuffled) == sorted(row["turns"][0] for row in rows)
    assert shuffled != rows and shuffled == mixed_questions({"each": 4}, files)
    for run_length in (0, 1, 2, 4):  # a limit leaves the same questions in all orders
        limited = mixed_questions({"each": 4, "consecutive": run_length}, files, limit=2)
        assert sorted(row["turns"][0] for row in limited) == ["a0", "a1", "b0", "b1"]


def test_a_mix_asks_the_questions_of_its_parts_with_all_that_belongs_to_them(tmp_path):
    row = {"turns": ["a", "b"], "system": "Be brief.", "reference": ["4", "5"], "enable_thinking": False}
    row |= {"tools": [{"type": "function", "function": {"name": "add"}}], "documents": [{"text": "4"}]}
    row |= {"chat_template_kwargs": {"of_any_name": {"x": 1}}}
    (tmp_path / "own").write_text("".join(json.dumps({**row, "question_id": n}) + "\n" for n in range(2)))
    rows = mixed_questions({"each": 2}, {"own": str(tmp_path / "own"), "gsm8k": gsm8k_file(tmp_path)})
    (tmp_path / "mix.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = {one.question_id: one for one in load_benchmark("mixed", str(tmp_path / "mix.jsonl"))}
    for own in load_benchmark("own", str(tmp_path / "own")):
        assert (
            own.extra.keys() == {"enable_thinking", "tools", "documents", "of_any_name"} and own.reference == "4\n\n5"
        )
        assert mixed[f"own {own.question_id}"] == replace(own, question_id=f"own {own.question_id}", category="own")
    assert mixed["gsm8k 0"].reference == "3 + 4 = 7\n#### 7" and mixed["gsm8k 0"].category == "gsm8k"


def gsm8k_file(folder):
    (folder / "gsm8k").write_text(json.dumps({"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}))
    return str(folder / "gsm8k")


def test_options_and_drafters_are_checked_before_anything_runs(tmp_path):
    def check(*change):
        script.check_decoding(read_study(write(tmp_path / "mine.yaml", STUDY, change)))

    with pytest.raises(
        ValueError, match=r"mine: max_tokens is no option of scripts/evaluate\.py; it has .*max_new_tokens"
    ):
        check("title: A table", "title: A table\nsettings: {max_tokens: 3}")
    with pytest.raises(ValueError, match=r"mine: .*temperature"):
        check("title: A table", "title: A table\nsettings: {temperature: -1}")
    with pytest.raises(ValueError, match=r"mine: .*tree"):
        check("{head: medusa}", '{head: medusa, drafter: "{kind}:{head},tree=plain"}')


def test_options_of_a_benchmark_are_over_those_of_the_study_and_below_those_of_a_run():
    study = read_study("ouroboros_table3")
    lengths = {name: measure_study.options_of(study, "one", name, {})["max_new_tokens"] for name in study.benchmarks}
    assert lengths == {"gsm8k": 256, "cnn_dm": 128, "wmt16": 64}  # section 4.1
    assert measure_study.options_of(study, "one", "gsm8k", {"max_new_tokens": 8})["max_new_tokens"] == 8


def test_published_numbers_keep_their_digits():
    assert Cell("gamma").text(2.7455, unrounded=True) == "2.7455×"
    assert [Cell("time_share.draft").text(value, unrounded=True) for value in (0.0371, 0.65)] == ["3.71%", "65.0%"]
    assert Cell("tokens_per_second").text(28.5, unrounded=True) == "28.50"


@pytest.mark.parametrize(
    ("measure", "value", "text"),
    [
        *(("questions", 80, "80"), ("lossless.unexplained", 3, "3"), ("new_tokens", 12345, "12,345")),
        *(("score.accuracy", 0.4211, "42.1%"), ("rouge2", 0.18, "18.0%"), ("accuracy", 0.5, "50.0%")),
        ("acceptance_by_position.conditional.0", 0.75, "75.0%"),
        ("beta", 2, "2.00"),
    ],
)
def test_counts_have_no_decimals_and_shares_are_percentages(measure, value, text):
    assert Cell(measure).text(value) == text


@pytest.mark.parametrize("given", [{}, {"device": "auto"}, {"attention": "auto", "threads": "1"}, {"device": "cpu"}])
def test_what_is_given_reaches_the_commands_that_decode(given, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(measure_study.evaluate, "main", lambda words: asked.append(words) or 1)
    (tmp_path / "mt.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["Hello."]}) + "\n")
    options = ["--target", str(tiny_study.TARGET), "--benchmarks", f"mt_bench={tmp_path / 'mt.jsonl'}"]
    text = STUDY.partition("published")[0].replace("heads: {medusa: medusa}\n", "")
    own = write(tmp_path / "mine.yaml", text.replace("  Medusa: {head: medusa}\n", ""))
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    with pytest.raises(SystemExit):  # the command failed
        script.main([own, *options, "--output", str(tmp_path / "out"), *words])
    names = ("--device", "--attention", "--threads")
    found = {word[2:]: after for word, after in zip(asked[0], asked[0][1:]) if word in names}
    assert found == given


def test_what_was_not_given_is_named_and_its_cells_stay_empty(tmp_path, capsys):
    (tmp_path / "mt.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["Hello."]}) + "\n")
    text = STUDY.replace("columns: {", "columns: {GSM8K β: {measure: beta, benchmark: gsm8k}, ")
    text = text.replace("columns:", '  Drafted: {drafter: "draft_model:{draft_model}"}\ncolumns:')
    text = text.replace("columns:", "  Maths: {drafter: vanilla, category: math}\ncolumns:")
    text = text.replace("  Medusa: {head: medusa}\n", "").replace("{Medusa: [2.13, null]}", "{Vanilla: [null, 1, 1]}")
    options = ["--target", str(tiny_study.TARGET), "--benchmarks", f"mt_bench={tmp_path / 'mt.jsonl'}"]
    options += ["--output", str(tmp_path / "out"), "--max_new_tokens", "4", "--device", "cpu"]
    own = write(tmp_path / "mine.yaml", text.replace("heads: {medusa: medusa}\n", ""))
    for _ in range(2):  # the second run has nothing left to decode
        assert script.main([own, *options]) == 0
    shown = capsys.readouterr().out
    assert script.main([own, *options, "--limit", "1"]) == 2
    refused = capsys.readouterr().err
    assert "plain_mt_bench was made from something else (limit was None, now 1); repeat what it was made" in refused
    with lock_folder(tmp_path / "out", "--output"):  # another study is measured there
        assert script.main([own, *options]) == 2
    assert "is being written by another run" in capsys.readouterr().err
    assert shown.count("2 drafters on") == 0 and shown.count("1 drafters on mt_bench") == 1
    made = (tmp_path / "out" / "mine" / "study.md").read_text()
    assert "Not measured here, for want of a draft model (--draft_model DIR): Drafted." in made
    assert "for want of the benchmark gsm8k (--benchmarks gsm8k=FILE): Vanilla, N-grams" in made
    assert "for want of questions of mt_bench of the category math: Maths." in made
    limits = "all: --max_new_tokens 4 --max_nodes 32 --device cpu; what is not named is its default."
    assert f"Decoded by scripts/evaluate.py with {limits}" in made
    row = json.loads((tmp_path / "out/mine/plain_mt_bench/report.json").read_text())["results"][0]
    for first, *further in (path.split(".") for path in FIGURES if path not in ("score.accuracy", *SCORES)):
        assert further[0] in row[first] if further else first in row  # scores are of other benchmarks
    content = json.loads((tmp_path / "out" / "mine" / "study.json").read_text())
    assert any(note.startswith("plain_mt_bench: Answers cut at the longest length") for note in content["notes"])
    assert content["rows"][0]["values"] == {"GSM8K β": None, "γ": 1.0, "β": 1.0}
    assert content["published"] == {"Vicuna-7B": {"Vanilla": {"GSM8K β": None, "γ": 1, "β": 1}}}
    assert "γ of" not in made
    report = tmp_path / "out/mine/plain_mt_bench/report.json"
    report.write_text(report.read_text().replace('"plain_loop": "vanilla"', '"plain_loop": "transformers"'))
    assert script.main([own, *options]) == 0
    assert (
        "γ of plain_mt_bench is over transformers, the faster of its loops"
        in (tmp_path / "out" / "mine" / "study.md").read_text()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give studies or --all"),
        (["anpd_grid"], "give --target, or --tiny, which has its own; got neither"),
        (["anpd_grid", "--tiny", "--target", "T"], "got both"),
        (["ctc_drafter_table2", "--target", "T", "--benchmarks", "mt_bench=F"], "the heads medusa, ctc_paper must be"),
        (["anpd_grid", "--target", "T", "--heads", "x=y"], "NAME one of none, each once; got 'x=y'"),
        (["heads", "--target", "T", "--minutes", "0"], "--minutes must be above 0; got 0"),
        (["heads", "--target", "T", "--minutes", "1", "--steps", "2"], "both say how long a head trains"),
        (["heads", "--tiny", "--dataset", "D"], "--tiny has its own --dataset; leave one of them out"),
        (["anpd_grid", "--target", "T", "--benchmarks", "gsm8k"], "of the studies, cnn_dm, humaneval; got 'gsm8k'"),
        (["anpd_grid", "--target", "T", "--benchmarks", "humaneval=F.jsonl"], "F.jsonl does not exist"),
        (["anpd_grid", "--target", "T", "--steps", "3"], "--steps has no effect: the studies do not train a head"),
        (["anpd_grid", "--target", "T", "--dataset", "D"], "--dataset has no effect"),
        (["anpd_grid", "--target", "T", "--draft_model", "D"], "do not have a row with a draft model; leave it out"),
        (
            ["chimera_figure6", "--target", "T", "--dataset", "D", "--limit", "3"],
            "--limit has no effect: .* not decode",
        ),
        (["anpd_grid", "anpd_grid", "--target", "T"], "studies must have different names"),
        (["chimera_table2", "--target", "T", "--benchmarks", "mt_bench=F", "--dataset", "D"], "D has no manifest.json"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message, tmp_path, capsys):
    assert script.main([*options, "--output", str(tmp_path / "out")]) == 2
    assert re.search(message, capsys.readouterr().err)


ONE_OF_EACH_FORM = ("anpd_table1", "chimera_figure6", "chimera_table2", "ctc_drafter_table2", "ouroboros_table17")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_tiny_form_of_studies_of_each_form_runs(tmp_path):
    assert script.main([*ONE_OF_EACH_FORM, "--tiny", "--jobs", "2", "--output", str(tmp_path)]) == 0
    for name in ONE_OF_EACH_FORM:
        content = json.loads((tmp_path / name / "study.json").read_text())
        assert content["not_measured"] == {}
        values = [value for row in content["rows"] for value in row["values"].values()]
        assert None not in values, name


def test_a_numbered_gpu_is_refused_where_heads_are_trained():
    """Trainings take the first GPU that they see."""
    args = SimpleNamespace(device="cuda:1")
    with pytest.raises(ValueError, match=r"--device cuda:1 names a GPU, .* set CUDA_VISIBLE_DEVICES=1"):
        script.arm_trainer(args)
