"""The files of an output folder: answers are read back and scored, and nothing else in it is replaced."""

import json

import pytest

from draft_heads.inference.evaluation.answer_files import check_answers, read_answers, write_answers
from draft_heads.inference.evaluation.decoded import DecodedFolder
from draft_heads.inference.evaluation.evaluate import Evaluation
from draft_heads.inference.evaluation.report import check_output, clear_output, write_json
from draft_heads.scripts.score_answers import score_answers
from tests.inference.stub_engine import StubEngine, StubOracle, benchmark, evaluate, question, render


@pytest.fixture(scope="module")
def evaluation():
    engines = {"vanilla": StubEngine(), "fast": StubEngine(2, 0.004)}
    other = benchmark([question(1, None, "word"), question(2, None, "y" * 99)], name="other")
    return evaluate(engines, StubOracle(), [benchmark(), other], render)


def test_a_finished_folder_is_not_overwritten_unasked(tmp_path):
    clear_output(tmp_path / "new")
    check_output(tmp_path / "new", overwrite=False)
    write_json(tmp_path / "new" / "report.json", {})
    with pytest.raises(ValueError, match="--overwrite"):
        check_output(tmp_path / "new", overwrite=False)
    check_output(tmp_path / "new", overwrite=True)
    clear_output(tmp_path / "new")
    assert not (tmp_path / "new" / "report.json").exists()


def test_answer_files_are_read_back_and_scored(tmp_path, evaluation):
    write_answers(tmp_path, evaluation)
    vanilla, fast = (read_answers(tmp_path / "answers" / f"{name}.jsonl") for name in ("vanilla", "fast"))
    assert list(fast) == [("bench", 1), ("bench", 2), ("bench", 3), ("other", 1)]
    score = score_answers(fast, vanilla)[None]
    assert (score.figures["beta"], score.equal_texts) == (20 / 13, 4)
    assert score.figures["gamma"] == pytest.approx(2.5)


def test_answer_rows_are_what_spec_bench_reads(tmp_path, evaluation):
    write_answers(tmp_path, evaluation)
    row = json.loads((tmp_path / "answers" / "fast.jsonl").read_text().splitlines()[0])
    choice = row["choices"][0]
    assert (row["question_id"], row["category"], row["model_id"]) == (1, "writing", "fast")
    assert choice["turns"] == ["dcba", "gfe"]
    assert choice["new_tokens"] == [5, 4]
    assert choice["decoding_steps"] == [3, 3]
    assert choice["accept_lengths_per_turn"] == [[1, 2, 2], [1, 2, 1]]
    assert choice["accept_lengths"] == [1, 2, 2, 1, 2, 1]
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
    assert choice["wall_time"] == pytest.approx([0.02, 0.016])
    assert choice["finish_reasons"] == ["eos", "eos"]


def test_answers_of_an_earlier_run_do_not_stay(tmp_path):
    write_answers(tmp_path, Evaluation([], ("old",)))
    write_answers(tmp_path, Evaluation([], ("new",)))
    assert [path.name for path in (tmp_path / "answers").iterdir()] == ["new.jsonl"]


def test_answers_that_someone_laid_beside_stay(tmp_path, evaluation):
    """As those of another project, to be scored against these."""
    write_answers(tmp_path, evaluation)
    own = tmp_path / "answers" / "baseline.jsonl"
    own.write_text(json.dumps({"question_id": 1, "model_id": "vicuna", "choices": []}) + "\n")
    write_answers(tmp_path, Evaluation([], ("new",)))
    assert sorted(path.name for path in own.parent.iterdir()) == ["baseline.jsonl", "new.jsonl"]


def test_what_no_run_wrote_is_not_deleted(tmp_path):
    own = tmp_path / "answers" / "mine.jsonl"
    own.parent.mkdir()
    own.write_text("{}")
    with pytest.raises(ValueError, match=r"mine\.jsonl is there without a report\.json; .* add --overwrite"):
        check_answers(tmp_path, overwrite=False)
    own.unlink()
    for name in ("report.md", "speedup.png"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"the report in its folder; .*{name} is there without"):
            check_answers(tmp_path, overwrite=False)
        (tmp_path / name).unlink()
    check_answers(tmp_path, overwrite=True)
    for name in ("report.json", "parts/run.json"):  # of a finished run and of one to go on with
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
        check_answers(tmp_path, overwrite=False)
        (tmp_path / name).unlink()
    parts = tmp_path / "parts"
    for name in ("notes.txt", "notes.json", "shard-1.json"):
        (parts / name).write_text("")
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=rf"parts, and deletes .* it holds {name}, which no run wrote"):
                DecodedFolder(tmp_path).begin({}, overwrite)
        (parts / name).unlink()
    for name in ("a 1%2F-00012.json", ".a-00012.json.partial", ".run.json.partial", "a-123456.json"):
        (parts / name).write_text("")
    DecodedFolder(tmp_path).begin({}, overwrite=True)
    assert {path.name for path in parts.iterdir()} == {".lock", "run.json"}
