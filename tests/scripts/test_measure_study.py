"""What a study decodes, and which of its results are taken over when it is run again."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from draft_heads.data.text.benchmarks import load_benchmark
from draft_heads.inference.evaluation import made_from
from draft_heads.inference.evaluation.made_from import make_again, must_be_made
from draft_heads.inference.evaluation.studies import read_study
from draft_heads.inference.target.target import Target
from draft_heads.scripts import measure_study, tiny_study
from tests.inference.models import make_head

MIXED = """
title: A table
mixes: {both: {of: [a, b], each: 3, consecutive: 1}}
cell: {measure: beta, benchmark: a}
rows: {N-grams: {drafter: "ngram"}, Head: {head: medusa, drafter: "{kind}:{head},tuned=TUNED"}}
heads: {medusa: medusa}
columns: {both: {benchmark: both}, alone: {}, over: {measure: over_transformers}}
"""


@pytest.fixture
def decoded(monkeypatch, tmp_path):
    """(measure, commands): measures MIXED with a limit; the words of each scripts/evaluate.py, in place of which an
    empty report is written."""
    commands = []

    def evaluate(words):
        commands.append(words)
        report = {"target": {"dtype": "float32"}, "results": []}
        (Path(words[words.index("--output") + 1]) / "report.json").write_text(json.dumps(report))
        return 0

    monkeypatch.setattr(measure_study.evaluate, "main", evaluate)
    for file in ("target/config.json", "target/model.safetensors", "head/config.json", "t.jinja", "tuned.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("before")
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(json.dumps({"turns": [f"{name}{i}"]}) + "\n" for i in range(5)))
    (tmp_path / "mine.yaml").write_text(MIXED.replace("TUNED", str(tmp_path / "tuned.json")))
    study = read_study(str(tmp_path / "mine.yaml"))
    decoding = {"limit": 2, "chat_template": str(tmp_path / "t.jinja")}
    files = {name: str(tmp_path / name) for name in ("a", "b")}
    inputs = measure_study.Inputs(str(tmp_path / "target"), {"medusa": tmp_path / "head"}, files, None, decoding)
    return partial(measure_study.measure, study, inputs, tmp_path / "out"), commands


def test_a_limit_is_of_the_parts_of_a_mix_and_generate_runs_where_it_is_compared_with(decoded, tmp_path):
    measure, commands = decoded
    measure()
    measure()  # finds all there
    mixed, alone = commands
    assert "--limit" not in mixed and alone[alone.index("--limit") + 1] == "2"
    asked = load_benchmark("both", str(tmp_path / "out" / "plain_both" / "both.jsonl"))
    assert [one.turns[0] for one in asked] == ["a0", "b0", "a1", "b1"]
    assert "transformers" in alone and "transformers" not in mixed


def test_what_was_to_be_measured_again_is_so_by_the_command_that_goes_on(decoded, tmp_path, monkeypatch):
    """It is interrupted in the first decoding, with which evaluate.py itself goes on."""
    measure, commands = decoded
    measure()
    study, inputs, out = measure.args
    others = ("heads/medusa", "plain_c")  # a trained head, of a study named `heads`; and no cell's
    for other in others:
        (out / other).mkdir(parents=True)
        (out / other / "made_from.json").write_text("{}")
    make_again(measure_study.measured_in(study, inputs, out))
    assert all((out / other / "made_from.json").read_text() == "{}" for other in others)
    parts = out / "plain_both" / "parts"  # of an earlier, interrupted run
    parts.mkdir()
    (parts / "both-00000.json").write_text("{}")
    evaluate = measure_study.evaluate.main

    def begun(words):
        assert "--overwrite" in words
        parts.mkdir()
        (parts / "run.json").write_text("{}")
        return 130

    monkeypatch.setattr(measure_study.evaluate, "main", lambda words: 130)  # while the target is loaded
    with pytest.raises(SystemExit):
        measure()
    assert not parts.exists()
    monkeypatch.setattr(measure_study.evaluate, "main", begun)
    with pytest.raises(SystemExit):
        measure()
    monkeypatch.setattr(measure_study.evaluate, "main", evaluate)
    measure()
    measure()  # finds all there
    assert [words[words.index("--output") + 1] for words in commands] == 2 * [
        str(tmp_path / "out" / "plain_both"),
        str(tmp_path / "out" / "plain_a"),
    ]
    assert ["--overwrite" in words for words in commands] == [False, False, False, True]


def test_what_a_drafter_learned_on_one_benchmark_does_not_count_on_another(tmp_path):
    mixes = {"first": "{of: [a], each: 3}", "second": "{of: [a], each: 3, consecutive: 1}"}
    asked = [{"turns": [f"{number} tables have {number + 2} ribbons each. How many?"]} for number in (3, 5, 8)]
    (tmp_path / "a").write_text("".join(json.dumps(row) + "\n" for row in asked))
    found = {}
    for named in (("second",), ("first", "second")):
        study = tmp_path / f"{len(named)}.yaml"
        columns = {name: {"benchmark": name} for name in named}
        lines = [f"  {name}: {mixes[name]}" for name in named]
        lines = ["title: T", "mixes:", *lines, f"rows: {{kept: {{drafter: 'ngram,keep=1'}}}}\ncolumns: {columns}"]
        study.write_text("\n".join([*lines, "settings: {max_new_tokens: 24}", "cell: {measure: beta}"]))
        target = str(tiny_study.TARGET)
        inputs = measure_study.Inputs(target, {}, {"a": str(tmp_path / "a")}, None, {"threads": 1, "device": "cpu"})
        out = tmp_path / f"out{len(named)}"
        found[named] = measure_study.measure(read_study(str(study)), inputs, out)
    measure_study.write_study(read_study(str(study)), found[named], inputs, out, False)
    note = "so its β or its speed depends on those before: here one drafter answered all questions"
    assert (out / "study.md").read_text().count(note) == 1  # the same of both benchmarks
    report = json.loads((out / "plain_first" / "report.json").read_text())
    place = measure_study.surroundings_of(report)
    assert " python 3." in place and "1 thread, draft-heads " in place
    report["settings"]["threads_of_runs"] = ["1 thread", "2 threads that spin while they wait"]
    assert "1 thread or 2 threads that spin while they wait, draft-heads" in measure_study.surroundings_of(report)
    report["environment"]["torch"], report["target"]["dtype"] = "1.2", "bfloat16"
    report["settings"]["acceptance"], row = "typical (LOSSY)", report["results"][0]
    row["lossless"]["unexplained"], row["skipped"] = 2, 1
    (out / "plain_first" / "report.json").write_text(json.dumps(report))
    measure_study.write_study(read_study(str(study)), found[named], inputs, out, False)
    told = (out / "study.md").read_text().partition("whose times do not compare: bfloat16 on ")[2].splitlines()[0]
    caveats = json.loads((out / "study.json").read_text())["notes"]
    for note in ("Acceptance is typical, which is LOSSY", "With fewer than 20 answered turns", "Turns skipped because"):
        (own,) = [one for one in caveats if one.startswith(f"plain_first: {note}")]
        assert own in (out / "study.md").read_text()
    assert any(one.startswith("plain_first: Answers that differ from generate's, UNEXPLAINED: f") for one in caveats)
    assert "torch 1.2" in told and told.endswith(f"(plain_first); {place} (plain_second).")
    (alone,), (_, after) = (values.values() for values in found.values())
    assert after == alone  # `first` had the same questions
    without = dict.fromkeys(found[named])
    measure_study.write_study(read_study(str(study)), without, inputs, out, False)
    told = "Not measured here, for want of a figure in what was measured (a score that was not taken, shares of time"
    told += " on a GPU or of `generate`, more drafts than a head has): kept."
    assert (out / "study.md").read_text().count(told) == 1


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("target/model.safetensors", r"target\.model\.safetensors"),
        ("target/config.json", r"target\.config\.json"),
        ("head/config.json", r"heads\.medusa\.config\.json"),
        ("t.jinja", "chat_template"),
        ("tuned.json", r"files\..*tuned\.json"),
        ("a", r"questions\.both"),
    ],
)
def test_figures_of_what_has_changed_in_its_place_are_not_taken_over(decoded, tmp_path, file, named):
    measure, commands = decoded
    measure()
    (tmp_path / file).write_text(json.dumps({"turns": ["another"]}))
    with pytest.raises(ValueError, match=rf"made from something else \({named} was '"):
        measure()
    assert len(commands) == 2


def test_bytes_that_a_draft_reads_are_those_of_the_type_it_was_decoded_in(tmp_path):
    head = make_head(Target.from_pretrained(str(tiny_study.TARGET), device="cpu"), "medusa")
    head.save_pretrained(tmp_path)
    read = {dtype: measure_study.head_facts(tmp_path, dtype)["bytes_read"] for dtype in ("float32", "bfloat16", None)}
    assert read == {"float32": 4 * head.weights_read(), "bfloat16": 2 * head.weights_read(), None: None}


def test_a_hub_id_is_compared_by_the_revision_that_is_loaded(tmp_path, monkeypatch):
    """Its owner may push other weights between two runs."""
    revision = ["a1"]

    def cached_file(source, name, **_):
        assert source in ("someone/head", "someone/adapter")
        held = name == ("config.json" if source == "someone/head" else "adapter_config.json")
        return str(tmp_path / "snapshots" / revision[0] / name) if revision[0] and held else None

    monkeypatch.setattr(made_from, "cached_file", cached_file)
    assert made_from.content_of("someone/head") == "someone/head@a1"
    assert made_from.content_of("someone/adapter") == "someone/adapter@a1"
    assert must_be_made(tmp_path, "report.json", {"head": made_from.content_of("someone/head")}, overwrite=False)
    revision[0] = "b2"
    with pytest.raises(ValueError, match="head was 'someone/head@a1', now 'someone/head@b2'"):
        must_be_made(tmp_path, "report.json", {"head": made_from.content_of("someone/head")}, overwrite=False)
    revision[0] = ""
    assert [made_from.content_of(word) for word in ("someone/head", "ngram", "a/b/c")] == [
        "someone/head",
        "ngram",
        "a/b/c",
    ]


def test_a_template_with_settings_is_known_by_its_content_and_them(tmp_path):
    file, known = tmp_path / "mine.jinja", []
    for text, settings in (("a", "x=1"), ("b", "x=1"), ("b", "x=2")):
        file.write_text(text)
        known.append(json.dumps(made_from.content_of(f"{file},{settings}")))
    assert len(set(known)) == 3 and made_from.content_of("own,x=1") == "own,x=1"


def test_results_of_something_else_are_not_taken_over(tmp_path):
    assert must_be_made(tmp_path, "report.json", {"limit": 3, "heads": {"ctc": "a"}}, overwrite=False)
    assert must_be_made(tmp_path, "report.json", {"limit": 3, "heads": {"ctc": "a"}}, overwrite=False)
    with pytest.raises(ValueError, match=r"\(limit was 3, now None; heads.ctc was 'a', now 'b'\); repeat"):
        must_be_made(tmp_path, "report.json", {"heads": {"ctc": "b"}}, overwrite=False)  # interrupted, then changed
    (tmp_path / "report.json").write_text("{}")
    assert not must_be_made(tmp_path, "report.json", {"limit": 3, "heads": {"ctc": "a"}}, overwrite=False)
    assert must_be_made(tmp_path, "report.json", {"limit": 4}, overwrite=True)
    assert must_be_made(tmp_path, "report.json", {"limit": 4}, overwrite=False)  # interrupted: the old one is gone
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / "made_from.json").unlink()
    with pytest.raises(ValueError, match="add --overwrite"):
        must_be_made(tmp_path, "report.json", {"limit": 4}, overwrite=False)


@pytest.mark.parametrize("rows,asked", [(5, 4), (64, 63), (65, 64), (900, 64)])
def test_accuracy_is_measured_on_rows_that_are_there(tmp_path, monkeypatch, rows, asked):
    """One is left to train on, as study.py has no option for them."""
    commands = []

    def accuracy(words):
        commands.append(words)
        (tmp_path / "out" / "accuracy.json").write_text('{"medusa": []}')
        return 0

    monkeypatch.setattr(measure_study.accuracy, "main", accuracy)
    monkeypatch.setattr(
        measure_study, "load_distilled", lambda folder: SimpleNamespace(dataset=range(rows if folder == "d" else 0))
    )
    monkeypatch.setattr(measure_study, "content_of", str)
    (tmp_path / "out").mkdir()
    inputs = measure_study.Inputs("t", {}, {}, None, {}, dataset=["d", "e"])
    assert measure_study.accuracies({"medusa": tmp_path}, inputs, tmp_path / "out") == {"medusa": []}
    assert commands[0][commands[0].index("--rows") + 1] == str(asked)
    for damaged in ("", "{}", "[]"):
        (tmp_path / "out" / "accuracy.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"accuracy\.json is damaged .*; add --overwrite to measure it again"):
            measure_study.accuracies({"medusa": tmp_path}, inputs, tmp_path / "out")
    other = replace(inputs, dataset=["d"])
    with pytest.raises(ValueError, match="was made from something else"):
        measure_study.accuracies({"medusa": tmp_path}, other, tmp_path / "out")
    (tmp_path / "out" / "accuracy.json").unlink()  # what failed had measured nothing
    assert measure_study.accuracies({"medusa": tmp_path}, other, tmp_path / "out") == {"medusa": []}
