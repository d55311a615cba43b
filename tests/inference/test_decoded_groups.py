"""Groups of questions of an evaluation in a folder: resumed, shared among processes, their findings put together."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from draft_heads.data.common.processes import Processes
from draft_heads.inference.evaluation.decoded import (
    DecodedFolder,
    DecodedGroup,
    Group,
    subtract_counts,
    total_findings,
)
from draft_heads.inference.evaluation.evaluate import (
    decode,
    drafters_of,
    findings_of,
    groups_of,
    judge_decoded,
)
from tests.inference.stub_engine import StubEngine, StubOracle, benchmark, evaluate, render


def run(engines, **options):
    return evaluate(engines, StubOracle(), [benchmark()], render, **options)


def figures(evaluation):
    """What must not depend on how an evaluation ran."""
    rows = [(replace(r, generation=replace(r.generation, seconds={}))) for r in evaluation.records]
    return sorted(rows, key=lambda r: (r.question, r.turn, r.drafter)), evaluation.findings, evaluation.drafters


def test_a_stopped_evaluation_goes_on_by_question(tmp_path):
    engines = {"vanilla": StubEngine(), "fast": StubEngine(2)}
    whole, settings = run(engines), {"limit": 3}
    parts, put = DecodedFolder(tmp_path), DecodedFolder.put

    def stop_at_the_second(self, group, part):
        if group.start == 1:
            raise KeyboardInterrupt
        put(self, group, part)

    parts.begin(settings, False)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DecodedFolder, "put", stop_at_the_second)
        run(engines, store=parts)
    told = f"1 of 3 groups of questions are kept in {tmp_path}/parts: the same command, without --overwrite, goes on"
    assert parts.resume_hint(3) == f"{told} there"
    again, asked = DecodedFolder(tmp_path), [StubEngine(), StubEngine(2)]
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="is being written by another run; wait for its end"):
            again.begin(settings, overwrite)
    parts._lock.close()  # as the end of its process does
    again.begin(settings, False)
    resumed = run(dict(zip(("vanilla", "fast"), asked)), store=again)
    assert figures(resumed) == figures(whole)
    assert [text for text, most in asked[0].prompts if most == 64] == ["abcd", "hi", "jk"]  # the warm-up first
    again._lock.close()
    with pytest.raises(ValueError, match=r"an unfinished run with other settings \(limit was 3, now 4\).*overwrite"):
        DecodedFolder(tmp_path).begin({"limit": 4}, False)
    DecodedFolder(tmp_path).begin({"limit": 4}, True)
    assert not list((tmp_path / "parts").glob("bench*"))
    DecodedFolder(tmp_path).begin({"limit": 5}, False)  # other settings have made nothing yet
    assert json.loads((tmp_path / "parts" / "run.json").read_text()) == {"limit": 5}


def test_only_answers_that_were_not_compared_are_compared_and_counted(tmp_path):
    engines, store, told = {"vanilla": StubEngine()}, DecodedFolder(tmp_path), []
    store.begin({}, False)
    run(engines, store=store)
    stopped = next(group for group in groups_of([benchmark()], 1) if group.start == 1)
    store.put(stopped, replace(store.get(stopped), expected=None))
    decode(engines, StubOracle(), [benchmark()], render, store, lambda *now: told.append(now))
    assert [now for now in told if now[0].startswith("checking")] == [
        ("checking against generate", 0, 1),
        ("checking against generate", 1, 1),
    ]


def test_a_process_that_outlives_its_run_keeps_nothing_in_the_next_ones_folder(tmp_path):
    first, late, group = DecodedFolder(tmp_path), DecodedFolder(tmp_path), Group("bench", 0)
    first.begin({"limit": 3}, False)
    late.join()
    late.put(group, DecodedGroup("a", []))
    (first.folder / "bench-00000.json").unlink()
    first._lock.close()
    DecodedFolder(tmp_path).begin({"limit": 4}, False)
    with pytest.raises(ValueError, match=r"now holds another run, .*: bench-00000 is not kept; end this run"):
        late.put(group, DecodedGroup("a", []))
    assert not (first.folder / "bench-00000.json").exists()


def test_what_an_interrupted_run_left_is_discarded_unless_it_runs(tmp_path):
    parts = DecodedFolder(tmp_path)
    parts.discard()  # nothing is there
    parts.begin({"limit": 3}, False)
    (parts.folder / "a-00000.json").write_text("{}")
    with pytest.raises(ValueError, match="is being written by another run"):
        DecodedFolder(tmp_path).discard()
    parts._lock.close()
    (parts.folder / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"it holds mine\.txt, which no run wrote; move it away"):
        DecodedFolder(tmp_path).discard()
    (parts.folder / "mine.txt").unlink()
    DecodedFolder(tmp_path).discard()
    assert not parts.folder.exists()


def test_groups_without_run_json_are_anothers_and_it_goes_last(tmp_path, monkeypatch):
    parts, removed, unlink = DecodedFolder(tmp_path), [], Path.unlink

    def note(path, **options):
        removed.append(path.name)
        unlink(path, **options)

    parts.begin({"limit": 3}, False)
    groups = [parts.folder / name for name in ("a-00000.json", "z-00000.json")]
    for group in groups:
        group.write_text("{}")
    parts._lock.close()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", note)
        parts.begin({"limit": 4}, True)
    assert sorted(removed[:2]) == ["a-00000.json", "z-00000.json"] and removed[2] == "run.json"
    groups[0].write_text("{}")
    (parts.folder / "run.json").unlink()
    parts._lock.close()
    with pytest.raises(ValueError, match=r"other settings \(its run.json is missing\); .* add --overwrite"):
        parts.begin({"limit": 4}, False)


def test_a_group_that_is_not_as_it_was_written_is_named_with_the_remedy(tmp_path):
    engines, parts = {"vanilla": StubEngine(), "fast": StubEngine(2)}, DecodedFolder(tmp_path)
    parts.begin({}, False)
    run(engines, store=parts)
    first, other = sorted(parts.folder.glob("bench-*.json"))[:2]
    text = first.read_text()
    record = json.loads(text)["records"][0]
    tokens, lacking = record["generation"]["tokens"], json.loads(text)
    lacking["records"].pop()
    texts = [text.replace(json.dumps(tokens), json.dumps([*tokens[:-1], tokens[-1] + 1]), 1), json.dumps(lacking)]
    texts += [text.replace('"question": 0', '"question": 7'), "[]", "", "{}", other.read_text()]
    for damaged in texts:
        assert damaged != text
        first.write_text(damaged)
        with pytest.raises(ValueError, match=r"bench-00000\.json is damaged .*; delete it, and the same command"):
            run(engines, store=DecodedFolder(tmp_path))
    first.write_text(text)
    assert figures(run(engines, store=DecodedFolder(tmp_path))) == figures(run(engines))
    (parts.folder / "run.json").write_text("")
    parts._lock.close()
    with pytest.raises(ValueError, match=r"run\.json is damaged .*; add --overwrite"):
        parts.begin({}, False)


def test_processes_share_the_questions_and_one_judges(tmp_path):
    engines = {"vanilla": StubEngine(), "fast": StubEngine(2)}
    first, second = DecodedFolder(tmp_path), DecodedFolder(tmp_path)
    first.begin({}, False)
    oracle, asked = StubOracle(), [benchmark()]
    decode(engines, oracle, asked, render, first, processes=Processes(0, 2))
    with pytest.raises(ValueError, match="bench-00001 are missing; a process ended early"):
        judge_decoded(engines, oracle, asked, first)
    decode(engines, oracle, asked, render, second, processes=Processes(1, 2))
    assert figures(judge_decoded(engines, oracle, asked, first)) == figures(run(engines))
    judged = judge_decoded(engines, oracle, asked, DecodedFolder(tmp_path))
    assert judged.processes == [2] and judged.threads == ["1 thread"]  # as their files say


def test_findings_of_several_runs_are_added_and_ratios_averaged():
    def group_of(run, at, steps, ratio):
        return DecodedGroup(
            run, [], {"hybrid": {"steps": steps, "parts": {"ctc": {"needed": steps // 2}}, "ratio": ratio}}, time=at
        )

    total = total_findings([group_of("b", 3, 8, 2.0), group_of("a", 2, 10, 4.0), group_of("a", 1, 4, 9.0)])
    assert total == {"hybrid": {"steps": 18, "parts": {"ctc": {"needed": 9}}, "ratio": 3.0}}


def test_findings_leave_out_what_was_counted_before_and_add_the_drafters_of_a_batch():
    class Counting:
        sources = ("draft",)

        def __init__(self, steps):
            self.steps = steps

        def findings(self):
            return {"steps": self.steps, "ratio": 0.5, "parts": {"ngram": {"needed": 2 * self.steps}}}

    each = [Counting(3), Counting(4)]
    engine = SimpleNamespace(drafter=SimpleNamespace(slots=2, of_slot=each.__getitem__))
    drafters = drafters_of({"h": engine, "transformers": object()})
    before = findings_of(drafters)
    for drafter in drafters["h"]:
        drafter.steps += 10
    found = subtract_counts(findings_of(drafters), before)
    assert found == {"h": {"steps": 20, "ratio": 0.5, "parts": {"ngram": {"needed": 40}}}}


def test_what_a_run_that_died_at_its_start_left_is_its_own(tmp_path):
    """The file that shows whether all processes see the folder."""
    DecodedFolder(tmp_path).folder.mkdir()
    (tmp_path / "parts" / ".shared-1f3c").touch()
    DecodedFolder(tmp_path).begin({"limit": 3}, overwrite=False)
    (tmp_path / "parts" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"it holds notes.txt, which no run wrote"):
        DecodedFolder(tmp_path).begin({"limit": 3}, overwrite=True)
