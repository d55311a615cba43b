"""The report folder: what is in it, and what its files say."""

import importlib.metadata
import io
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from draft_heads.configs.waiting import threads_in_use
from draft_heads.inference.evaluation import plots
from draft_heads.inference.evaluation.metrics import shown_name
from draft_heads.inference.evaluation.report import (
    build_report,
    environment,
    markdown,
    write_report,
)
from draft_heads.inference.evaluation.report_text import (
    explanation,
    findings_note,
    lossless_cell,
    relative_paths,
    slow_note,
)
from draft_heads.scripts.terminal import summary_table
from tests.inference.stub_engine import StubEngine, StubOracle, benchmark, evaluate, question, render

TARGET = {"path": "models/stub", "parameters": 1234567, "dtype": "float32", "device": "cpu"}
SETTINGS = {"max_new_tokens": 64, "temperature": 0.0, "seed": 0, "max_nodes": 32}
ROW_KEYS = {
    *(
        "benchmark",
        "category",
        "drafter",
        "kind",
        "lossy",
        "questions",
        "turns",
        "skipped",
        "new_tokens",
        "target_steps",
    ),
    *("wall_seconds", "beta", "beta_ci95", "gamma", "gamma_ci95", "tokens_per_second", "lossless", "time_share"),
    *("accept_length_histogram", "score", "rouge2", "pass_at_1", "over_transformers", "accepted_by_source"),
    *("verify_cost", "slow_steps", "max_depth", "peak_memory_bytes", "joules_per_token", "cut"),
    *("acceptance_by_position", "beta_by_output_position", "beta_by_context_length", "beta_by_turn"),
}


@pytest.fixture(scope="module")
def evaluation():
    engines = {"vanilla": StubEngine(), "fast": StubEngine(2, 0.004), "broken": StubEngine(spoil=0)}
    other = benchmark([question(1, None, "word"), question(2, None, "y" * 99)], name="other")
    return evaluate(engines, StubOracle(), [benchmark(), other], render)


@pytest.fixture
def report(evaluation):
    return build_report(evaluation, TARGET, SETTINGS, seed=0)


def test_a_checkout_that_is_not_installed_has_no_version(monkeypatch):
    real = importlib.metadata.distribution

    def distribution(name):
        if name == "draft-heads":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    found = environment("cpu")
    assert found["draft-heads"] is None and found["torch"]


def test_the_report_is_json_with_the_agreed_keys(report):
    report = json.loads(json.dumps(report, allow_nan=False))
    assert {"target", "settings", "results", "findings", "environment"} <= set(report)
    assert {"torch", "transformers", "python", "threads"} <= set(report["environment"])
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert report["environment"][project["name"]] == project["version"]
    for row in report["results"]:
        assert set(row) == ROW_KEYS
        counts = row["lossless"]
        assert counts["identical_turns"] + counts["near_ties"] + counts["unexplained"] == counts["turns"]
        assert counts["turns"] == row["turns"]
        assert sum(row["time_share"].values()) == pytest.approx(1.0)
    places = [(row["benchmark"], row["category"]) for row in report["results"] if row["drafter"] == "vanilla"]
    assert places == [("bench", None), ("bench", "writing"), ("bench", "math"), ("other", None)]


def test_the_folder_holds_tables_pictures_and_the_report(tmp_path, report):
    pictures = write_report(tmp_path, report)
    assert [path.name for path in pictures] == ["speedup.png", "accepted_length.png", "time_share.png"]
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text())["results"] == report["results"]
    assert not list(tmp_path.glob("*.partial"))


def test_report_md_shows_the_figures(report):
    text = markdown(report)
    assert "Score: accuracy of bench." in text
    assert "With fewer than 20 answered turns" in text and "bench 4, other 1" in text
    assert "| bench | fast | 1.50 | 2.50× | 2.50–2.50 | 250.0 | 4/4 | 50.0% |" in text
    assert "| bench | broken | 1.00 | 1.00× | 1.00–1.00 | 100.0 | 0/4, 4 UNEXPLAINED | 0.0% |" in text
    assert "| writing | 1.00 (1.00×) | 1.50 (2.50×) | 1.00 (1.00×) |" in text
    assert "other vanilla 1, other fast 1, other broken 1" in text
    assert "## other: β" not in text


def test_questions_with_slow_steps_are_named(report):
    assert not slow_note(report)
    rows = [row for row in report["results"] if row["benchmark"] == "bench" and row["category"] is None]
    for row, questions in zip(rows, ({}, {"7": 22.1, "a|b": 3.5}, {"7": 4.0})):
        row["slow_steps"] = {"questions": questions, "gamma_without": row["gamma"]}
    (told,) = slow_note(report)
    assert told.startswith("In these questions of bench steps took over 3 times as long as most")
    assert told.endswith(": fast in 7, a|b; broken in 7. γ without them: vanilla 1.00, fast 2.50, broken 1.00.")
    assert told in markdown(report)


def test_a_column_shows_speed_over_transformers_where_it_was_run(report):
    engines = {"vanilla": StubEngine(), "transformers": StubEngine(1, 0.02), "fast": StubEngine(2, 0.004)}
    beside = build_report(evaluate(engines, StubOracle(), [benchmark()], render), TARGET, SETTINGS, 0)
    rows = {(row["category"], row["drafter"]): row for row in beside["results"]}
    assert [rows[None, name]["gamma"] for name in engines] == pytest.approx([1.0, 0.5, 2.5])
    assert [rows[None, name]["over_transformers"] for name in engines] == pytest.approx([2.0, 1.0, 5.0])
    assert rows["math", "fast"]["over_transformers"] == pytest.approx(5.0)
    text = markdown(beside)
    assert "| benchmark | drafter | β | γ | 95 % | over transformers | tokens/s | lossless | score |" in text
    assert "| bench | transformers | 1.00 | 0.50× | 0.50–0.50 | 1.00× | 50.0 | 4/4 | 50.0% |" in text
    assert "| bench | fast | 1.50 | 2.50× | 2.50–2.50 | 5.00× | 250.0 | 4/4 | 50.0% |" in text
    assert "over transformers: its seconds per token" in text
    shown = closing_table(beside, width=80)
    assert all(figure in shown for figure in ("transformers", "0.50×", "2.50×", "4/4", "50.0%")) and "…" not in shown


def test_the_plain_loop_is_the_faster_of_vanilla_and_generate_and_is_named(report):
    assert report["settings"]["plain_loop"] == "vanilla"
    engines = {"vanilla": StubEngine(), "transformers": StubEngine(1, 0.008), "fast": StubEngine(2, 0.004)}
    faster = build_report(evaluate(engines, StubOracle(), [benchmark()], render), TARGET, SETTINGS, 0)
    assert faster["settings"]["plain_loop"] == "transformers"
    rows = {(row["category"], row["drafter"]): row["gamma"] for row in faster["results"]}
    assert [rows[None, name] for name in engines] == pytest.approx([0.8, 1.0, 2.0])
    assert rows["math", "fast"] == pytest.approx(2.0)
    assert "the plain loop, here\n`transformers`" in markdown(faster)
    assert "times faster than transformers" in closing_table(faster)


def test_legends_are_read_from_left_to_right():
    results = [
        {"benchmark": "b", "category": None, "drafter": f"drafter_{name}", "accept_length_histogram": [1, 1]}
        for name in "abcdefghij"
    ]
    figure = plots.accepted_length({"results": results})
    (legend,) = figure.legends
    figure.draw_without_rendering()
    found = [
        (-text.get_window_extent().y0, text.get_window_extent().x0, text.get_text()) for text in legend.get_texts()
    ]
    assert len({round(row) for row, *_ in found}) > 1  # several rows
    assert [name[-1] for *_, name in sorted(found, key=lambda one: (round(one[0]), one[1]))] == list("abcdefghij")


def test_nothing_is_said_of_transformers_where_it_was_not_run(report):
    assert {row["over_transformers"] for row in report["results"]} == {None}
    assert "over transformers" not in markdown(report)


def test_report_md_lists_settings_versions_and_command_in_a_table(evaluation):
    settings = {**SETTINGS, "drafters": ["fast", "b=ctc:RUN/head"], "limit": None}
    report = build_report(evaluation, TARGET, settings, 0, "python scripts/evaluate.py --drafters fast")
    lines = markdown(report).splitlines()
    start = lines.index("## Settings, versions and command")
    for line in (
        "| target | models/stub |",
        "| parameters | 1,234,567 |",
        "| max_new_tokens | 64 |",
        "| drafters | fast b=ctc:RUN/head |",
        f"| torch | {report['environment']['torch']} |",
        "| command | python scripts/evaluate.py --drafters fast |",
    ):
        assert line in lines[start:]
    assert not any(line.startswith("| limit") for line in lines)  # it was not set
    assert max(map(len, lines)) < 400


def test_processes_that_shared_a_machine_are_told(evaluation, report):
    assert report["settings"]["processes"] == [1] and "processes." not in markdown(report)
    shared = markdown(build_report(replace(evaluation, processes=[1, 8]), TARGET, SETTINGS, 0))  # resumed with more
    assert ", 1 and 8 processes." in shared and "| processes | 1 8 |" in shared
    here = build_report(replace(evaluation, threads=[threads_in_use()]), TARGET, SETTINGS, 0)
    assert "threads_of_runs" not in report["settings"] | here["settings"]
    first = ["9 threads that sleep while they wait"]  # all groups are of a process that was interrupted after them
    assert f", float32 on cpu, {first[0]}." in markdown(
        build_report(replace(evaluation, threads=first), TARGET, SETTINGS, 0)
    )
    runs = ["1 thread", "2 threads that spin while they wait"]
    resumed = markdown(build_report(replace(evaluation, threads=runs), TARGET, SETTINGS, 0))
    assert ", float32 on cpu, 1 thread or 2 threads that spin while they wait." in resumed


def test_paths_below_the_working_directory_are_relative(tmp_path, monkeypatch, evaluation):
    monkeypatch.chdir(tmp_path)
    here, settings = str(tmp_path), {**SETTINGS, "drafters": [f"b=ctc:{tmp_path}/runs/head+ngram"]}
    report = build_report(evaluation, {**TARGET, "path": f"{here}/model"}, settings, 0, f"evaluate.py '{here}/a b'")
    assert report["target"]["path"] == "model"
    assert report["settings"]["drafters"] == ["b=ctc:runs/head+ngram"]
    assert report["command"] == "evaluate.py 'a b'"
    for other in (f"/data{here}/x", here, f"{here}2/x", "~/runs", 3, None):
        assert relative_paths(other) == other


def test_report_md_says_nothing_of_skipped_turns_when_there_are_none():
    evaluation = evaluate({"vanilla": StubEngine()}, StubOracle(), [benchmark()], render)
    text = markdown(build_report(evaluation, TARGET, SETTINGS, 0))
    assert "skipped" not in text


def test_answers_that_were_cut_are_counted_beside_their_scores(report):
    class Cut(StubEngine):
        """Of answers of 5, 4, 3 and 3 tokens the first is as long as it may be, the second ends with the context."""

        def generate(self, prompt_ids, settings):
            answer = super().generate(prompt_ids, settings)
            answer.finish_reason = {5: "length", 4: "context", 3: "stop"}[len(answer.tokens)]
            return answer

    engines = {"vanilla": StubEngine(), "cut": Cut()}
    found = build_report(evaluate(engines, StubOracle(), [benchmark()], render), TARGET, SETTINGS, 0)
    counts = {(row["category"], row["drafter"]): row["cut"] for row in found["results"]}
    assert [counts[group, "cut"] for group in (None, "writing", "math")] == [2, 2, 0]
    assert counts[None, "vanilla"] == 0
    note = "Answers cut at the longest length or the end of the context, and scored as far as they go: bench 0–2 of 4."
    assert note in markdown(found) and "Answers cut" not in markdown(report)
    for row in found["results"]:  # another benchmark is the one that has scores
        row["score"] = None
    other = [row | {"benchmark": "other", "cut": 0, "score": {"accuracy": 1.0}} for row in found["results"]]
    found["results"] += other
    assert "the end of the context: bench 0–2 of 4." in markdown(found)
    for row in other:
        row["cut"] = 1
    told = "the end of the context: bench 0–2 of 4, other 1 of 4; those of other are scored as far as they go."
    assert told in markdown(found)


@pytest.mark.parametrize("turns", [(19, 25), (25, 19)])
def test_drafters_that_answered_different_numbers_of_turns_are_all_counted(turns):
    found = evaluate({"vanilla": StubEngine(), "fast": StubEngine(2)}, StubOracle(), [benchmark()], render)
    report = build_report(found, TARGET, SETTINGS, 0)
    for row in report["results"]:
        row |= {"turns": turns[row["drafter"] == "fast"], "cut": 3}
    text = markdown(report)
    assert "answered here: bench 19–25. Measure" in text and "as far as they go: bench 3 of 19–25." in text


def test_only_answers_decoded_together_are_said_to_share_their_time(report):
    none = {**report, "results": [{**row, "gamma_ci95": None} for row in report["results"]]}
    assert "bootstrap over questions" in explanation(none)
    assert "decoded together" in explanation({**none, "settings": {**none["settings"], "batch_size": 2}})


def test_lossless_cell():
    counts = {"identical_turns": 7, "turns": 10, "near_ties": 1, "unexplained": 2}
    assert lossless_cell(counts) == "7/10, 1 near tie, 2 UNEXPLAINED"
    assert lossless_cell(None) == "–"


def closing_table(report, width=120):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(summary_table(report))
    return console.export_text()


def test_the_kind_is_shown_where_the_name_does_not_hold_it(report):
    for name, kind in (("vanilla", "vanilla"), ("fast", "ctc"), ("broken", "ctc+ngram")):
        for row in report["results"]:
            row["kind"] = kind if row["drafter"] == name else row["kind"]
    for shown in (markdown(report), closing_table(report)):
        assert "fast (ctc)" in shown and "broken (ctc+ngram)" in shown and "(vanilla)" not in shown
    assert shown_name({"drafter": "ctc_raw", "kind": "ctc"}) == "ctc_raw"
    assert shown_name({"drafter": "medusa", "kind": "medusa+medusa"}) == "medusa (medusa+medusa)"


def test_the_closing_table_has_one_row_per_benchmark_and_drafter(report):
    text = closing_table(report)
    assert text.count(" fast ") == 2
    assert "2.50×" in text


def test_long_names_leave_every_figure_of_the_closing_table_whole_in_80_columns(report):
    for row in report["results"]:
        row["drafter"] = f"{row['drafter']}=runs/a_folder_with_a_long_name/head+ngram"
    text = closing_table(report, width=80)
    assert "…" not in text and "lossless" in text


def test_speedup_bars_are_gamma(report):
    figure = plots.speedup(report)
    lengths = [round(bar.get_width(), 2) for axes in figure.axes for bar in axes.patches]
    assert lengths == [1.0, 2.5, 1.0] * 2
    for axes in figure.axes:  # every label stands on the line of its bar
        assert [label.xy[1] for label in axes.texts] == [0, 1, 2]
        assert axes.texts[1].get_text().startswith("γ 2.50   β 1.")
    assert "without drafts (vanilla, dashed line)" in figure.get_supxlabel().replace("\n", " ")


def test_baselines_are_grey_and_leave_the_colours_to_drafters(report):
    styles = plots._styles(["vanilla", "transformers", "fast"])
    assert styles["fast"] == plots._styles(["vanilla", "fast"])["fast"]
    assert len({colour for colour, *_ in styles.values()}) == 3


def test_no_two_of_seventy_curves_look_alike():
    looks = [
        (colour, *curve) for colour, _, *curve in plots._styles([str(i) for i in range(70)] + ["vanilla"]).values()
    ]
    assert len(set(looks)) == 72  # with both baselines


def test_accepted_length_curve_is_the_share_of_steps_that_accept_at_least(report):
    figure = plots.accepted_length(report)
    (line,) = figure.axes[0].lines
    assert line.get_label() == "fast"
    assert list(line.get_xdata()) == [1]
    assert list(line.get_ydata()) == [5 / 6]


def test_time_share_bars_sum_to_one(report):
    axes = plots.time_share(report).axes[0]
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(3.0)


def test_a_part_that_a_hybrid_hardly_needed_is_named():
    found = {"steps": 1000, "parts": {"ctc": {"accepted": 800, "needed": 10}, "ngram": {"accepted": 15, "needed": 9}}}
    (note,) = findings_note({"h": found, "d": {"tokens": 3.0}})
    assert note.startswith("h: in 1,000 target steps, 9 tokens were accepted thanks to ngram alone")
