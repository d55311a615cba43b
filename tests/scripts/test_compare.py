"""Reports side by side, and what is refused."""

import csv
import io
import json
import os

import pytest

from draft_heads.inference.evaluation import made_from
from draft_heads.inference.evaluation.comparison import latex_text, short_names
from draft_heads.inference.evaluation.report import build_report, environment, write_json
from draft_heads.scripts import compare
from draft_heads.scripts.decoding_options import loaded_by, loaded_checksums
from tests.inference.stub_engine import StubEngine, StubOracle, benchmark, evaluate, render

FINGERPRINT = {"vocab_size": 96, "weights": "abc"}
TARGET = {"path": "models/stub", "parameters": 1234567, "dtype": "float32", "device": "cpu", "fingerprint": FINGERPRINT}
SETTINGS = {"max_new_tokens": 64, "temperature": 0.0, "seed": 0, "max_nodes": 32}


def report_of(target=TARGET, names=("fast", "slow"), **settings):
    engines = {"vanilla": StubEngine(), names[0]: StubEngine(2, 0.004), names[1]: StubEngine(2, 0.02)}
    found = evaluate(engines, StubOracle(), [benchmark()], render)
    return build_report(found, target, {**SETTINGS, **settings}, 0)


@pytest.fixture
def folders(tmp_path):
    """Two reports: the second has longer answers, other threads, and one other drafter."""
    reports = {"a": report_of(), "b": report_of(names=("fast", "a_b&c"), max_new_tokens=128)}
    reports["b"]["environment"] |= {"threads": 99, "processor": "Another"}
    reports["a"]["options"]["fast"], reports["b"]["options"]["fast"] = {"k": 4, "n": 2}, {"k": 7, "n": 2}
    for name, report in reports.items():
        (tmp_path / name / "report").mkdir(parents=True)
        write_json(tmp_path / name / "report" / "report.json", report)
    return [str(tmp_path / name / "report") for name in reports]


def output_of(arguments, capsys):
    assert compare.main(arguments) == 0
    return capsys.readouterr()


def refusal(arguments, capsys):
    assert compare.main(arguments) != 0
    return " ".join(capsys.readouterr().err.split())


def test_what_differs_comes_first_and_then_the_drafters_side_by_side(folders, capsys):
    text = output_of(folders, capsys).out
    apart, table = text.split("| benchmark |")
    assert "| setting | a/report | b/report |" in apart
    assert "| max_new_tokens | 64 | 128 |" in apart and "| fast: k | 4 | 7 |" in apart
    assert "| threads | " in apart and " | 99 |" in apart
    assert f"| processor | {environment('cpu')['processor']} | Another |" in apart
    for same in ("temperature", "fast: n", "torch", "time", "a_b"):
        assert f"| {same} |" not in apart
    assert "| bench | fast | 1.50 | 2.50× (2.50–2.50) | 4/4 | 1.50 | 2.50× (2.50–2.50) | 4/4 |" in table
    assert "| bench | slow | 1.50 | 0.50× (0.50–0.50) | 4/4 | – | – | – |" in table


def test_reports_of_the_same_settings_are_said_to_be(folders, capsys, tmp_path):
    (tmp_path / "c").mkdir()
    again = json.loads((tmp_path / "a/report/report.json").read_text())
    again["environment"]["time"] = "2030-01-01T00:00:00Z"
    write_json(tmp_path / "c" / "report.json", again)
    text = output_of([folders[0], str(tmp_path / "c" / "report.json")], capsys).out
    assert text.startswith("The reports have the same target, settings and versions.")
    assert "| β report | γ report | lossless report | β c |" in text


def test_other_questions_of_the_same_name_and_number_are_told(folders, capsys, tmp_path):
    for name, checksum in (("c", "0a"), ("d", "0b"), ("e", "0a")):
        (tmp_path / name).mkdir()
        known = report_of(question_checksums={"bench": checksum}, benchmarks=[f"bench={name}.jsonl"])
        write_json(tmp_path / name / "report.json", known)
    assert "| questions: bench | 3 0a | 3 0b |" in output_of([str(tmp_path / "c"), str(tmp_path / "d")], capsys).out
    assert "The reports have the same" in output_of([str(tmp_path / "c"), str(tmp_path / "e")], capsys).out
    assert (
        "| questions: bench | 3 | 3 0b |" in output_of([folders[0], str(tmp_path / "d")], capsys).out
    )  # of an older one


def test_what_differs_between_two_reports_is_told_beside_a_third_that_lacks_it(capsys, tmp_path):
    reports = {"a": report_of(), "b": report_of(), "c": report_of(names=("slow", "other"))}
    for (name, report), (k, checksum) in zip(reports.items(), ((4, "0a"), (7, "0b"), (5, "0c"))):
        report["options"]["other" if name == "c" else "fast"] = {"k": k}
        report["settings"]["question_checksums"] = {"bench": checksum}
        if name == "c":
            for row in report["results"]:
                row["benchmark"] = "another"
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "report.json", report)
    folders = [str(tmp_path / name) for name in reports]
    apart = output_of(folders, capsys).out.split("| benchmark |")[0]
    assert "| fast: k | 4 | 7 | – |" in apart and "| questions: bench | 3 0a | 3 0b | – |" in apart
    assert "another" not in apart and "loaded" not in apart  # of what one report has alone
    assert "The reports have the same" in output_of(folders[::2], capsys).out
    del reports["b"]["options"]["fast"]["k"]  # which an older report does not say
    write_json(tmp_path / "b" / "report.json", reports["b"])
    assert "| fast: k | 4 | – | – |" in output_of(folders, capsys).out


def test_answers_that_more_copies_of_a_learning_drafter_shared_are_told(capsys, tmp_path):
    for runs in (1, 2):
        learnt = {"fast": {"runs": runs, "drafters_per_run": 3, "repeated_turns": {}}}
        (tmp_path / str(runs)).mkdir()
        write_json(tmp_path / str(runs) / "report.json", report_of() | {"carried_over": learnt})
    text = output_of([str(tmp_path / "1"), str(tmp_path / "2")], capsys).out
    assert "| fast: copies that began with nothing | 3 | 6 |" in text


def test_what_a_learning_drafter_answered_before_is_told(capsys, tmp_path):
    for name, benchmarks in (("a", ["bench"]), ("b", ["first", "bench"])):
        report = report_of() | {"carried_over": {"fast": {"runs": 1, "drafters_per_run": 1, "repeated_turns": {}}}}
        report["results"] = [row | {"benchmark": one} for one in benchmarks for row in report["results"]]
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "report.json", report)
    text = output_of([str(tmp_path / "a"), str(tmp_path / "b")], capsys).out
    assert "| fast: learned from, in this order | bench | first, bench |" in text


def test_a_difference_at_the_end_of_a_long_value_is_told(capsys, tmp_path):
    for places in (30, 300):
        part = {"max_nodes": 32, "n": 16, "k": 10, "least": 1, "levels": 3, "places": places}
        report = report_of(own_settings_applied={"suppress_tokens": [*range(100, 130), places]})
        report["options"]["fast"] = {"max_nodes": 32, "parts": {"ngram": {"n": 5, "keep": 0}, "rest": part}}
        (tmp_path / str(places)).mkdir()
        write_json(tmp_path / str(places) / "report.json", report)
    apart = output_of([str(tmp_path / "30"), str(tmp_path / "300")], capsys).out.split("| benchmark |")[0]
    parts, own = (next(line for line in apart.splitlines() if key in line) for key in ("fast: parts", "own_settings"))
    assert parts.index("'places': 30}") < parts.index("'places': 300}")
    assert own.index("129, 30]") < own.index("129, 300]")


def checksums_of(words):
    return loaded_checksums({drafter: loaded_by(drafter) for drafter in words})


def test_other_weights_of_a_drafter_are_told_and_another_place_is_not(capsys, tmp_path):
    drafters = {
        name: [f"fast=ctc:{tmp_path / name / 'head'}", "slow=ngram,k=3"] for name in ("here", "copy", "other", "old")
    }
    drafters["old"][0] = f"fast=draft_model:x,via=ctc:{tmp_path / 'old' / 'head'}"
    for (name, words), weights in zip(drafters.items(), (b"1", b"1", b"2", b"1")):
        (tmp_path / name / "head").mkdir(parents=True)
        (tmp_path / name / "head" / "config.json").write_text('{"kind": "ctc"}')
        (tmp_path / name / "head" / "model.safetensors").write_bytes(weights)
        noted = {} if name == "old" else {"loaded_checksums": checksums_of(words)}
        write_json(tmp_path / name / "report.json", report_of(drafters=words, **noted))
    same, other, via = (checksums_of(drafters[name])["fast"] for name in ("here", "other", "old"))
    apart = output_of([str(tmp_path / "here"), str(tmp_path / "other")], capsys).out
    assert same != other and f"| fast: loaded | {same} | {other} |" in apart and "slow: loaded" not in apart
    assert "The reports have the same" in output_of([str(tmp_path / "here"), str(tmp_path / "copy")], capsys).out
    apart = output_of([str(tmp_path / "here"), str(tmp_path / "old")], capsys).out
    assert f"| fast: loaded | {same} | not noted ({drafters['old'][0]}) |" in apart
    (tmp_path / "old" / "head" / "model.safetensors").write_bytes(b"3")  # trained again in place
    assert [*checksums_of(drafters["old"])] == ["fast"] and checksums_of(drafters["old"])["fast"] != via


def test_large_weights_too_are_told_by_their_content_whenever_they_were_written(monkeypatch, tmp_path):
    monkeypatch.setattr(made_from, "_LARGE", 1)  # byte
    found = []
    for place, weights in enumerate((b"12", b"12", b"13")):
        head = tmp_path / str(place)
        head.mkdir()
        for name, content in {"config.json": b'{"kind": "ctc"}', "model.safetensors": weights}.items():
            (head / name).write_bytes(content)
            os.utime(head / name, (place, place))
        found.append(checksums_of([f"fast=ctc:{head}"])["fast"])
    assert found[0] == found[1] != found[2]


def test_one_drafter_has_one_row_whatever_its_reports_call_it(capsys, tmp_path):
    reports = {"exact": report_of(), "lossy": report_of(), "old": report_of()}
    for name in ("exact", "lossy"):
        for row in reports[name]["results"]:
            row |= {"kind": "ctc", "lossy": (name, row["drafter"]) == ("lossy", "fast")}
    for row in reports["old"]["results"]:
        del row["kind"], row["lossy"]
    for name, report in reports.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "report.json", report)
    table = output_of([str(tmp_path / name) for name in reports], capsys).out
    lines = [line for line in table.splitlines() if line.startswith("| bench | ")]
    assert [line.split(" | ")[1] for line in lines] == [
        "vanilla (ctc) / vanilla",
        "fast (ctc) / fast (ctc, LOSSY) / fast",
        "slow (ctc) / slow",
    ]
    assert all(line.count("4/4") == 3 for line in lines)


def test_latex_rows_hold_no_commands_and_differences_are_comments(folders, capsys):
    lines = output_of([*folders, "--latex"], capsys).out.splitlines()
    assert "% max_new_tokens | 64 | 128" in lines
    assert r"bench & a\_b\&c & -- & -- & -- & 1.50 & 0.50$\times$ (0.50--0.50) & 4/4 \\" in lines
    assert latex_text("\\x{1}^~ 50% β") == r"\textbackslash{}x\{1\}\textasciicircum{}\textasciitilde{} 50\% $\beta$"


def test_csv_has_every_figure_of_every_category(folders, capsys, tmp_path):
    printed = output_of([*folders, "--csv", "--output", str(tmp_path / "out")], capsys)
    rows = list(csv.DictReader(io.StringIO(printed.out)))
    assert "max_new_tokens" in printed.err and "max_new_tokens" not in printed.out
    assert len(rows) == 2 * 3 * 3  # reports, drafters, all and two categories
    row = next(row for row in rows if (row["report"], row["category"], row["drafter"]) == ("b/report", "math", "fast"))
    assert (float(row["beta"]), float(row["gamma"])) == (1.5, 2.5)
    assert (row["questions"], row["identical_turns"], row["unexplained"]) == ("2", "2", "0")
    assert float(row["accuracy"]) == 0.5 and float(row["gamma_low"]) == pytest.approx(2.5)
    results = json.loads((tmp_path / "b" / "report" / "report.json").read_text())["results"]
    known = next(one for one in results if (one["category"], one["drafter"]) == ("math", "fast"))
    assert float(row["wall_seconds"]) == known["wall_seconds"] and int(row["skipped"]) == known["skipped"]
    assert [float(row[part]) for part in ("draft", "verify")] == [known["time_share"][p] for p in ("draft", "verify")]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"comparison.{end}" for end in ("md", "tex", "csv")}
    assert (tmp_path / "out" / "comparison.csv").read_text() == printed.out


def test_replays_with_two_targets_are_refused_and_a_replay_without_one_fits_each(tmp_path, capsys):
    """A field that one version of transformers does not write is not compared."""
    given = {"text": None, "one": FINGERPRINT, "newer": {**FINGERPRINT, "constants": {"rope": []}}}
    given["two"] = {**FINGERPRINT, "weights": "xyz"}
    for name, fingerprint in given.items():
        (tmp_path / name).mkdir()
        report = report_of(None, answers="a.jsonl")
        report["settings"] |= {"target": "models/stub", "target_fingerprint": fingerprint} if fingerprint else {}
        write_json(tmp_path / name / "report.json", report)
    paths = {name: str(tmp_path / name) for name in given}
    output_of([paths[name] for name in ("text", "one", "newer")], capsys)
    said = refusal([paths[name] for name in ("text", "one", "two")], capsys)
    assert "one has models/stub (replayed answers) and two models/stub (replayed answers), of another weights;" in said
    assert "| target weights | abc | xyz |" in output_of([paths["one"], paths["two"], "--any_target"], capsys).out


def test_another_target_is_refused_unless_asked_for(folders, capsys, tmp_path):
    other = {**TARGET, "path": "models/other", "fingerprint": {**FINGERPRINT, "weights": "xyz"}}
    (tmp_path / "c").mkdir()
    write_json(tmp_path / "c" / "report.json", report_of(other))
    both = [folders[0], str(tmp_path / "c")]
    said = refusal(both, capsys)
    assert "one target; report has models/stub (1,234,567 parameters) and c models/other" in said
    assert "--any_target" in said
    assert (
        "| target | models/stub | models/other |"
        in output_of([folders[0], str(tmp_path / "c"), "--any_target"], capsys).out
    )
    again = {**TARGET, "fingerprint": {**FINGERPRINT, "weights": "xyz"}}  # trained again in place
    write_json(tmp_path / "c" / "report.json", report_of(again))
    assert "c models/stub (1,234,567 parameters), of another weights; compare" in refusal(both, capsys)
    assert "| target weights | abc | xyz |" in output_of([*both, "--any_target"], capsys).out
    moved = {**TARGET, "path": "elsewhere/stub"}  # the same weights in another folder
    write_json(tmp_path / "c" / "report.json", report_of(moved))
    assert "| target | models/stub | elsewhere/stub |" in output_of(both, capsys).out
    newer = {**TARGET, "fingerprint": {**FINGERPRINT, "constants": {"rope": []}}}  # what older versions do not note
    write_json(tmp_path / "c" / "report.json", report_of(newer))
    assert "of another" not in output_of(both, capsys).out
    older = {name: value for name, value in TARGET.items() if name != "fingerprint"}
    write_json(tmp_path / "c" / "report.json", report_of(older))
    assert "of another" not in output_of(both, capsys).out
    write_json(tmp_path / "c" / "report.json", report_of({**older, "parameters": 7}))
    assert "c models/stub (7 parameters)" in refusal(both, capsys)


def test_a_report_that_cannot_be_read_is_named_with_the_remedy(folders, capsys, tmp_path):
    whole = (tmp_path / "b/report/report.json").read_text()
    bad = tmp_path / "bad"
    (bad / "parts").mkdir(parents=True)
    assert f"{bad} holds an unfinished run; repeat its command, without --overwrite" in refusal(
        [folders[0], str(bad)], capsys
    )
    (bad / "parts").rmdir()
    for absent in (tmp_path / "absent", tmp_path / "absent" / "report.json", tmp_path / "a" / "other.json"):
        said = refusal([folders[0], str(absent)], capsys)
        assert f"{absent} does not exist; name the --output" in said and "holds" not in said
    assert compare.main([*folders, "--output", f"{folders[0]}/report.json"]) == 2
    told = capsys.readouterr()
    assert "--output must be a folder" in told.err and not told.out
    assert f"{bad} holds none; name the --output" in refusal([folders[0], str(bad)], capsys)
    for content, part in (
        (whole[: len(whole) // 2], "is cut or damaged"),
        ("[1, 2]", "has a list of results"),
        ('{"results": [{"benchmark": "x"}]}', "row 0 of"),
        ("", "is cut or damaged"),
    ):
        (bad / "report.json").write_text(content)
        said = refusal([folders[0], str(bad)], capsys)
        assert part in said and str(bad / "report.json") in said


def test_at_least_two_different_reports_are_needed(folders, capsys):
    assert "at least two reports; got 1" in refusal(folders[:1], capsys)
    assert "given once" in refusal([folders[0], f"{folders[0]}/report.json"], capsys)


def test_names_are_the_shortest_that_differ(tmp_path):
    files = [tmp_path / "a" / "report" / "report.json", tmp_path / "b" / "report" / "report.json"]
    assert short_names(files) == ["a/report", "b/report"]
    assert short_names([tmp_path / "a" / "report.json", tmp_path / "old.json"]) == ["a", "old.json"]
