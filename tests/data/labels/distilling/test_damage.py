"""What is damaged between two runs of a distillation is noticed, and made again where that is possible."""

import gc
import json
import shutil

import pytest

from draft_heads.data.common.files import sealed
from draft_heads.data.labels.answer_journal import AnswerJournal, count_answers
from draft_heads.data.labels.answers import Answer
from draft_heads.data.labels.distill import distill
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.shards import load_distilled
from draft_heads.inference.target.target import Target
from tests.data.labels.distilling.distilled import rows_of
from tests.data.labels.distilling.test_survival import Dying


@pytest.mark.parametrize("damage", ["token", "short", "end", "text", "damaged and older", "older"])
def test_a_damaged_answer_is_written_again(target, source, tmp_path, caplog, damage):
    loaded, out = Target.from_pretrained(target), tmp_path / "out"
    options = DistillOptions(labels="generate", max_new_tokens=12, batch_size=2)
    whole = Dying(loaded, options, 1000)
    distill(loaded, source, str(tmp_path / "whole"), options, False, False, whole)
    with pytest.raises(KeyboardInterrupt):
        distill(loaded, source, str(out), options, False, False, Dying(loaded, options, 3))
    (journal,) = out.glob("*.answers.jsonl")
    first, *rest = journal.read_text().splitlines()
    answer = json.loads(first)
    tokens, finish = answer["tokens"], answer["finish"]
    damaged = {
        "token": first.replace(json.dumps(tokens), json.dumps([*tokens[:-1], tokens[-1] ^ 1])),
        "short": first.replace(json.dumps(tokens), json.dumps(tokens[:3])),
        "end": first.replace(f'"{finish}"', '"loop"'),
        "text": first.replace(json.dumps(tokens), '"abc"'),
        "damaged and older": json.dumps([answer["prompt"], "abc", finish, True]),
        "older": json.dumps([answer["prompt"], tokens, finish, True]),  # no damage
    }[damage]
    assert damaged != first
    journal.write_text("\n".join([damaged, *rest]) + "\n")
    last = Dying(loaded, options, 1000)
    distill(loaded, source, str(out), options, False, False, last)
    kept = 3 if damage == "older" else 2
    assert last.asked == whole.asked - kept and rows_of(out) == rows_of(tmp_path / "whole")
    assert ("answers that are damaged, and are written again: 1" in caplog.text) == (kept == 2)


def test_a_damaged_answer_is_told_once_and_not_counted_again(target, source, tmp_path, caplog):
    loaded, out = Target.from_pretrained(target), tmp_path / "out"
    options = DistillOptions(labels="generate", max_new_tokens=12, batch_size=2)

    def run(answers):
        with pytest.raises(KeyboardInterrupt) as told:
            distill(loaded, source, str(out), options, False, False, Dying(loaded, options, answers))
        said = str(told.value)
        del told
        gc.collect()  # the frames of the traceback hold the folder's lock
        return said

    assert run(3).startswith("3 answers")
    (journal,) = out.glob("*.answers.jsonl")
    journal.write_text(journal.read_text().replace('"tokens": [', '"tokens": [1, ', 1))
    assert run(0).startswith("2 answers") and caplog.text.count("are damaged") == 1
    assert run(1).startswith("3 answers") and caplog.text.count("are damaged") == 1
    (out / f".{journal.name}.partial").touch()  # as a kill leaves it
    distill(loaded, source, str(out), options, True, False, Dying(loaded, options, 1000))
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "shard-00000.arrow"]


@pytest.mark.parametrize("damage", ["rows", "counts", "first", "empty", "byte", "list", "gone"])
def test_a_shard_whose_entry_is_damaged_is_made_again(target, source, tmp_path, caplog, damage):
    options, out = DistillOptions(labels="argmax", shard_rows=2), tmp_path / "out"
    loaded = Target.from_pretrained(target)
    distill(loaded, source, str(tmp_path / "whole"), options, False, False)
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    shutil.copytree(tmp_path / "whole", out)
    entry, others = manifest["shards"][0], manifest["shards"][1:]
    (out / "manifest.json").write_text(json.dumps({**manifest, "shards": others, "complete": False}))
    file, text = out / "shard-00000.json", sealed(entry)
    texts = {
        "rows": text.replace('"rows": 2', '"rows": 0', 1),
        "counts": text.replace('"trained_tokens": ', '"trained_tokens": 9'),
        "first": text.replace('"first_row": 0', '"first_row": 1'),
        "empty": "",
        "byte": "\xff",
        "list": "[]",
    }
    if damage != "gone":
        file.write_bytes(texts[damage].encode("latin-1"))
        assert texts[damage] != text
    distill(loaded, source, str(out), options, False, False)
    assert rows_of(out) == rows_of(tmp_path / "whole") and not file.exists()
    assert json.loads((out / "manifest.json").read_text())["counts"] == manifest["counts"]
    assert ("shard-00000.json is damaged" in caplog.text) == (damage != "gone")


@pytest.mark.parametrize("place", ["shard", "all"])
def test_a_manifest_that_names_other_numbers_of_rows_is_damaged(target, source, tmp_path, place):
    distill(Target.from_pretrained(target), source, str(tmp_path), DistillOptions(shard_rows=2), False, False)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (manifest["shards"][0] if place == "shard" else manifest["counts"])["rows"] = 0
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: its shards have \d+ rows, and it says"):
        load_distilled(str(tmp_path))


def test_answers_of_a_process_that_outlives_its_run_stay_out_of_the_next_ones_file(tmp_path):
    """The next run, with --overwrite, removes the file while the process writes on."""
    path = tmp_path / "shard-00000.answers.jsonl"
    old = AnswerJournal(lambda prompts, limits: iter([(0, Answer([5], "end")), (1, Answer([6], "end"))]), path)
    writing = old([[1], [2]], [8, 8])
    assert next(writing)[1].tokens == [5]
    path.unlink()
    new = AnswerJournal(lambda prompts, limits: iter([(0, Answer([7], "end"))]), path)
    assert [answer.tokens for _, answer in new([[1]], [8])] == [[7]]
    assert next(writing)[1].tokens == [6]
    assert count_answers(path) == 1


def test_a_disk_that_is_full_of_answers_is_told_by_the_name_of_their_file(tmp_path, no_larger_files):
    """When an answer is written, and when the file is closed with what could not be written."""
    path = tmp_path / "shard-00000.answers.jsonl"
    journal = AnswerJournal(lambda prompts, limits: iter([(0, Answer([5] * 9999, "end"))]), path)
    with pytest.raises(ValueError, match=rf"^{path} could not be written: "):
        list(journal([[1]], [9999]))
