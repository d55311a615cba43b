"""What a report calls a drafter: its kind and LOSSY everywhere, names of any characters; what drafters carry over."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from draft_heads.data.common.console import plain_console
from draft_heads.inference.drafters.heads.chimera import ChimeraDrafter
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.evaluation import plots
from draft_heads.inference.evaluation.answer_files import write_answers
from draft_heads.inference.evaluation.carried_over import carried_over, notes
from draft_heads.inference.evaluation.decoded import DecodedFolder
from draft_heads.inference.evaluation.metrics import shown_name
from draft_heads.inference.evaluation.report import build_report, markdown, write_report
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.verify import TypicalAcceptance
from draft_heads.scripts import terminal
from tests.inference.stub_engine import QUESTIONS, StubEngine, StubOracle, benchmark, evaluate, question, render

TARGET = {"path": "models/stub", "parameters": 1234567, "dtype": "float32", "device": "cpu"}
SETTINGS = {"max_new_tokens": 64, "temperature": 0.0, "seed": 0, "max_nodes": 32}
ODD = ("[bold]", "[/x]", "a|b", "$x$ and $y$", "_hidden", ":smile:", "a`b", "new\nline", "\\|", "[red]a[/]")


class StubDrafter(SimpleNamespace):
    """Says of itself what it is given."""

    slots, kind, parts, deepest_draft, keeps_text, __hash__ = 1, "", (), 4, True, object.__hash__

    def of_slot(self, slot):
        return self

    def members(self):
        return iter([self, *self.parts])


class Drafting(StubEngine):
    """A stub engine with a drafter of a kind."""

    def __init__(self, kind, max_nodes=4, carries_over=False):
        super().__init__(2)
        facts = {"kind": kind, "sources": (kind,), "max_nodes": max_nodes, "carries_over": carries_over}
        self.drafter = StubDrafter(**facts, findings=dict, settings=dict, forget=dict)


def report_of(drafters, questions=QUESTIONS, **settings):
    oracle = StubOracle(GenerationSettings(64, eos_token_ids=(0,), **settings))
    found = evaluate({"vanilla": Drafting("vanilla", 0), **drafters}, oracle, [benchmark(questions)], render)
    return found, build_report(found, TARGET, SETTINGS, 0)


def printed(report, tmp_path):
    file = io.StringIO()
    console = plain_console()
    console.file, console.width = file, 200
    terminal.show_report(console, tmp_path, report)
    return file.getvalue()


def drawn(report):
    """All texts of the three pictures."""
    texts = []
    for draw in (plots.speedup, plots.accepted_length, plots.time_share):
        figure = draw(report)
        figure.draw_without_rendering()
        texts += [text.get_text() for axes in figure.axes for text in axes.get_yticklabels()]
        texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return texts


@pytest.mark.parametrize("typical", [False, True])
def test_kind_and_lossiness_stand_in_every_table_picture_and_answer(tmp_path, typical):
    settings = {"typical": TypicalAcceptance()} if typical else {}
    found, report = report_of(
        {"medusa": Drafting("ctc"), "h": Drafting("ctc+ngram"), "ngram": Drafting("ngram")}, **settings
    )
    names = (
        ["medusa (ctc, LOSSY)", "h (ctc+ngram, LOSSY)", "ngram (LOSSY)"]
        if typical
        else ["medusa (ctc)", "h (ctc+ngram)", "ngram"]
    )
    assert [shown_name(row) for row in report["results"][:4]] == ["vanilla", *names]
    text = markdown(report)
    assert f"| category | vanilla | {' | '.join(names)} |" in text
    for name in names:
        assert text.count(f"| bench | {name} |") == 2  # figures and times
        assert drawn(report).count(name) == 3 and name in printed(report, tmp_path)
    write_answers(tmp_path, found)
    for drafter in found.drafters:
        rows = [json.loads(line) for line in (tmp_path / "answers" / f"{drafter}.jsonl").read_text().splitlines()]
        assert {row["model_id"] for row in rows} == {
            f"{drafter} (LOSSY)" if typical and drafter != "vanilla" else drafter
        }
    assert {row["drafter"] for row in report["results"] if row["lossy"]} == (
        {"medusa", "h", "ngram"} if typical else set()
    )


@pytest.mark.parametrize("odd", ODD)
def test_any_name_is_shown_as_it_is(tmp_path, odd):
    """As a drafter's name, a benchmark's, a category's, and a folder's: no traceback, no lost text, no broken table."""
    questions = [question(1, odd, "abcd"), question(2, "math", "hi")]
    oracle = StubOracle()
    engines = {"vanilla": Drafting("vanilla", 0), odd: Drafting("ctc")}
    found = evaluate(engines, oracle, [benchmark(questions, name=odd)], render)
    report = build_report(found, {**TARGET, "path": f"models/{odd}"}, SETTINGS, 0)
    folder = tmp_path / odd
    folder.mkdir(parents=True)
    assert odd.split()[0] in printed(report, folder)
    shown = odd.replace("$", r"\$").replace("_hidden", "\u200b_hidden")
    assert drawn(report).count(f"{shown} (ctc)") == 3
    tables = [line for line in markdown(report).splitlines() if line.startswith("|")]
    columns = [line.replace("\\\\", "").replace("\\|", "").count("|") for line in tables]
    assert sorted(set(columns)) == [3, 4, 8, 9]  # settings, categories, times, figures
    assert write_report(folder, report)


def test_skipped_questions_are_told_on_the_terminal_too(tmp_path):
    _, report = report_of({"fast": StubEngine(2)}, [question(1, None, "word"), question(2, None, "y" * 99)])
    told = "did not fit the context or the chat template refuses it: bench vanilla 1, bench fast 1."
    assert told in printed(report, tmp_path) and told in markdown(report)


# --- what drafters carry from question to question -----------------------------------------------------------------


def test_runs_processes_batches_and_repeated_questions_are_counted(tmp_path):
    asked = [question(1, None, "abcd"), question(2, None, "efgh"), question(3, None, "abcd")]
    learner, plain = StubDrafter(carries_over=True), StubDrafter(carries_over=False)
    engines = {"vanilla": StubEngine(), "learns": Drafting("ngram", carries_over=True)}
    both = [benchmark(asked, name="one"), benchmark([question(1, None, "efgh", "new")], name="two")]
    found = evaluate(engines, StubOracle(), both, render)
    facts = {"runs": 1, "drafters_per_run": 1, "repeated_turns": {"one": 1, "two": 1}}
    assert found.carried_over == {"learns": facts}
    (note,) = notes(found.carried_over)
    assert notes({"a": facts, "b": facts}) == [note.replace("learns learns", "a, b: each learns")]
    assert "one drafter answered all questions in order" in note and note.endswith("a known text: one 1, two 1.")
    several = carried_over({"learns": [learner] * 4, "plain": [plain]}, found.records, runs=2)
    assert several["learns"] == {**facts, "runs": 2, "drafters_per_run": 4} and "plain" not in several
    assert (
        "8 copies of it shared the questions, each beginning with nothing (2 runs or processes, 4 s"
        in notes(several)[0]
    )
    assert "a known text for a copy that had answered them: one 1" in notes(several)[0]  # another copy begins anew
    hybrid = {"carries_over": True, "keeps_text": HybridDrafter.keeps_text}
    calibrated, keeping = StubDrafter(**hybrid), StubDrafter(**hybrid, parts=[learner])
    assert NgramDrafter.keeps_text and not ChimeraDrafter.keeps_text
    for drafter, repeated in ((calibrated, {}), (keeping, facts["repeated_turns"])):
        of_hybrid = carried_over({"learns": [drafter]}, found.records)
        assert of_hybrid == {"learns": {**facts, "repeated_turns": repeated}}
        assert ("a known text" in notes(of_hybrid)[0]) == bool(repeated)
    for kind, copies in ((ChimeraDrafter.kind, 1), (HybridDrafter.kind, 4)):  # one table of k-grams; counts for each
        of_batch = carried_over({"learns": [StubDrafter(carries_over=True, kind=kind, slots=4)]}, found.records)
        assert of_batch["learns"]["drafters_per_run"] == copies
    assert "so its β or its speed depends on those before" in note  # that of Chimera's k-grams is the same
    report = build_report(found, TARGET, SETTINGS, 0)
    assert report["carried_over"] == found.carried_over
    assert note in markdown(report) and note in " ".join(printed(report, tmp_path).split())


def test_a_resumed_run_is_counted(tmp_path):
    engines = {"vanilla": StubEngine(), "learns": Drafting("ngram", carries_over=True)}
    parts = DecodedFolder(tmp_path)
    parts.begin({}, False)
    whole = evaluate(engines, StubOracle(), [benchmark()], render, store=parts)
    (tmp_path / "parts" / "bench-00002.json").unlink()
    parts._lock.close()
    again = DecodedFolder(tmp_path)
    again.begin({}, False)
    resumed = evaluate(engines, StubOracle(), [benchmark()], render, store=again)
    runs = [one.carried_over["learns"]["runs"] for one in (whole, resumed)]
    assert runs == [1, 2] and not replace(resumed, carried_over={}).carried_over
