"""Studies: their files, what is trained for them, and what their tables say."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from draft_heads.data.text.benchmarks import load_benchmark
from draft_heads.inference.evaluation.made_from import must_be_made
from draft_heads.inference.evaluation.studies import (
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
    ],
)
def test_a_file_that_is_wrong_is_refused_by_what_is_wrong(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_study(write(tmp_path / "mine.yaml", STUDY, change))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"one of anpd_grid, anpd_table1, .*; got 'table9'"):
        read_study("table9")


# ----------------------------------------------------------------------------------------------------
# Training


def test_an_arm_has_a_kind_and_options_with_lists_in_spaces():
    arm = arms.Arm("deep", "ctc,target_layers=1 2 3,labels=2")
    assert (arm.name, arm.kind) == ("deep", "ctc")
    assert arm.options == ["--target_layers", "1", "2", "3", "--labels", "2"]


@pytest.mark.parametrize("text", ["nothing", "ctc,labels"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match=r"KIND\[,option=value…\], KIND one of chimera, ctc, .*; got"):
        arms.Arm("x", text)


def test_a_training_that_fails_is_told_with_its_last_line(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text('import sys\nprint("loading")\nsys.exit("error: no such folder")\n')
    with pytest.raises(ValueError, match=r"fails\.py failed: error: no such folder \(all of its output is in .*log\)"):
        arms.cpu_seconds([str(script)], tmp_path / "log")


@pytest.fixture
def commands(monkeypatch):
    """The commands that are run, in their place: (script, steps) of each."""
    found = []

    def cpu_seconds(command, log):
        steps = int(command[command.index("--max_steps") + 1])
        found.append((command[0], steps))
        return 20 + steps * (0.5 if "train/ctc.py" in command else 0.25)

    monkeypatch.setattr(arms, "cpu_seconds", cpu_seconds)
    return found


BOTH = [arms.Arm("medusa", "medusa"), arms.Arm("ctc", "ctc")]


def test_equal_times_are_numbers_of_steps_by_what_a_step_costs(commands, tmp_path):
    heads = arms.ArmTrainer(tmp_path, "T", ["D"], minutes=5).train(BOTH)
    assert heads == {name: tmp_path / name / "head" for name in ("medusa", "ctc")}
    calibrated = [(f"train/{kind}.py", steps) for kind in ("medusa", "ctc") for steps in arms.CALIBRATION]
    assert commands[:4] == calibrated
    assert sorted(commands[4:]) == [("train/ctc.py", 600), ("train/medusa.py", 1200)]
    assert json.loads((tmp_path / "step_seconds.json").read_text()) == {"medusa": 0.25, "ctc": 0.5}


def test_a_second_run_trains_what_is_missing_and_refuses_another_schedule(commands, tmp_path):
    (tmp_path / "ctc" / "head").mkdir(parents=True)
    (tmp_path / "ctc" / "head" / "config.json").write_text("{}")
    arms.ArmTrainer(tmp_path, "T", ["D"], steps=7).train(BOTH)
    assert commands == [("train/medusa.py", 7)]
    with pytest.raises(ValueError, match=r"another training: it is medusa \(7 steps\), and not medusa \(9 st"):
        arms.ArmTrainer(tmp_path, "T", ["D"], steps=9).train(BOTH)


def test_a_head_of_another_target_or_other_labels_is_not_taken_over(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "load_distilled", lambda folder: SimpleNamespace(content=f"content of {folder}"))
    (tmp_path / "ctc" / "head").mkdir(parents=True)
    (tmp_path / "ctc" / "head" / "config.json").write_text("{}")
    (tmp_path / "ctc" / "run.json").write_text(json.dumps({"target": "T", "data": ["content of D"]}))
    arms.ArmTrainer(tmp_path, "T", ["D"], steps=7).train(BOTH[1:])
    with pytest.raises(ValueError, match="its target is T, and not U; take another --output, or remove it"):
        arms.ArmTrainer(tmp_path, "U", ["D"], steps=7).train(BOTH[1:])
    with pytest.raises(ValueError, match="its labels are not those of E;"):
        arms.ArmTrainer(tmp_path, "T", ["E"], steps=7).train(BOTH[1:])
    assert commands == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "medusa"}, "bigram names a head with kind=chimera; .* has medusa"),
        ({"kind": "chimera", "order": 3, "residual": False}, "with order=2; .* has 3; give another"),
        ({"kind": "chimera", "order": 2, "residual": True}, "with residual=false; .* has True"),
        ({"kind": "chimera", "order": 2, "residual": False, "target_layers": [1, 2]}, "target_layers=1 3; .* has"),
    ],
)
def test_a_given_head_that_is_not_what_its_name_means_is_refused(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = {"bigram": arms.Arm("bigram", "chimera,order=2,residual=false,target_layers=1 3")}
    with pytest.raises(ValueError, match=message):
        arms.given_heads([f"bigram={tmp_path}"], found)
    (tmp_path / "config.json").write_text(json.dumps({"kind": "chimera", "order": 2, "target_layers": [1, 3]}))
    assert arms.given_heads([f"bigram={tmp_path}"], found) == {"bigram": tmp_path}


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


def test_results_of_something_else_are_not_taken_over(tmp_path):
    assert must_be_made(tmp_path, "report.json", {"limit": 3, "heads": {"ctc": "a"}}, overwrite=False)
    assert must_be_made(tmp_path, "report.json", {"limit": 3, "heads": {"ctc": "a"}}, overwrite=False)
    with pytest.raises(ValueError, match=r"\(heads was {'ctc': 'a'}, now {'ctc': 'b'}; limit was 3, now None\);"):
        must_be_made(tmp_path, "report.json", {"heads": {"ctc": "b"}}, overwrite=False)  # interrupted, then changed
    (tmp_path / "report.json").write_text("{}")
    assert not must_be_made(tmp_path, "report.json", {"limit": 3, "heads": {"ctc": "a"}}, overwrite=False)
    assert must_be_made(tmp_path, "report.json", {"limit": 4}, overwrite=True)
    (tmp_path / "made_from.json").unlink()
    with pytest.raises(ValueError, match="add --overwrite"):
        must_be_made(tmp_path, "report.json", {"limit": 4}, overwrite=False)


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
    assert shown.count("2 drafters on") == 0 and shown.count("1 drafters on mt_bench") == 1
    made = (tmp_path / "out" / "mine" / "study.md").read_text()
    assert "Not measured here, for want of a draft model (--draft_model DIR): Drafted." in made
    assert "for want of the benchmark gsm8k (--benchmarks gsm8k=FILE): Vanilla, N-grams" in made
    assert "for want of questions of mt_bench of the category math: Maths." in made
    assert "Decoded by scripts/evaluate.py with its defaults but for all: --device cpu --max_new_tokens 4." in made
    content = json.loads((tmp_path / "out" / "mine" / "study.json").read_text())
    assert content["rows"][0]["values"] == {"GSM8K β": None, "γ": 1.0, "β": 1.0}
    assert content["published"] == {"Vicuna-7B": {"Vanilla": {"GSM8K β": None, "γ": 1, "β": 1}}}


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
        (["anpd_grid", "anpd_grid", "--target", "T"], "studies must have different names"),
        (["chimera_table2", "--target", "T", "--benchmarks", "mt_bench=F", "--dataset", "D"], "D has no manifest.json"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message, tmp_path, capsys):
    assert script.main([*options, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


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
