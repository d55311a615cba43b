"""What distillation leaves when it is killed, and several processes and nodes that share it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from operator import itemgetter

import numpy as np
import pytest
import torch

from draft_heads.data.common.processes import own_device
from draft_heads.data.labels import distill as distilling
from draft_heads.data.labels.answer_journal import count_answers
from draft_heads.data.labels.distill import distill
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.distiller import Distiller
from draft_heads.data.labels.shards import ShardFolder, load_distilled
from draft_heads.inference.answers import TargetAnswerer
from draft_heads.inference.target.target import Target
from tests.data.labels.distilling.distilled import rows_of, run_distill
from tests.running import ROOT, on_two_nodes

KILLED = """
import os, pathlib, signal, sys
from draft_heads.data.labels import shards
moment, target, source, output = sys.argv[1:]
writes = 0
def replace(self, other, real=pathlib.Path.replace):
    global writes
    writes += 1
    if writes == 4 and moment == "before":    # the second shard is written but not renamed
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, other)
    if writes == 4 and moment == "after":     # renamed, but its entry is not written
        os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.replace = replace
from tests.data.labels.distilling.distilled import run_distill
run_distill(target, source, output, labels="generate", max_new_tokens=12)
"""


def test_running_out_of_memory_names_the_options_and_what_is_done(target, source, tmp_path, monkeypatch):
    def full(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(Distiller, "rows", full)
    rule = r"distillation ran out of memory; lower batch_size.*; no shard was finished: the same command"
    with pytest.raises(ValueError, match=rule):
        run_distill(target, source, str(tmp_path / "out"))


def test_settings_that_a_first_failure_names_may_change_where_it_left_no_answer(target, source, tmp_path, monkeypatch):
    def full(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        yield

    options = {"labels": "generate", "max_new_tokens": 12}
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="smaller dtype and another output; no shard"):
        patch.setattr(TargetAnswerer, "__call__", full)
        run_distill(target, source, str(tmp_path / "out"), **options)
    (tmp_path / "out" / "shard-00000.answers.jsonl").write_text('{"prompt": ')  # a kill cut off the first line
    changed = options | {"max_new_tokens": 6, "shard_rows": 3}
    assert run_distill(target, source, str(tmp_path / "out"), **changed)["settings"]["max_new_tokens"] == 6


@pytest.mark.parametrize("labels", ["argmax", "generate"])
def test_skip_bad_rows_goes_on_where_a_bad_row_ended_the_run(target, tmp_path, labels):
    """As its sentence says; the rows before are what they would be with it from the beginning. It is not taken back."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [
        {"messages": [turns[0] | {"content": text}, turns[1]]} for text in ("Hi", "Who?", "Why?", "[PAD]</s>", "How?")
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = target, str(tmp_path / "chat.jsonl")
    options = {"labels": labels, "max_new_tokens": 4, "shard_rows": 2}
    with pytest.raises(ValueError, match=r"line 4 \(id row-4\): .* set skip_bad_rows to leave such rows out"):
        run_distill(*given, str(tmp_path / "out"), **options)
    first = (tmp_path / "out" / "shard-00000.arrow").stat().st_mtime_ns
    resumed = run_distill(*given, str(tmp_path / "out"), **options, skip_bad_rows=True)
    assert (tmp_path / "out" / "shard-00000.arrow").stat().st_mtime_ns == first
    assert resumed == run_distill(*given, str(tmp_path / "whole"), **options, skip_bad_rows=True)
    assert resumed["counts"]["rows"] == 4 and rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"settings\.skip_bad_rows is True there, False here"):
        run_distill(*given, str(tmp_path / "out"), **options)


def test_an_interrupted_run_says_what_is_done(target, source, tmp_path, monkeypatch):
    def interrupted(distiller, conversations, first, *journal, own=Distiller.rows):
        if first == 4:
            raise KeyboardInterrupt
        return own(distiller, conversations, first, *journal)

    monkeypatch.setattr(Distiller, "rows", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"4 of 10 conversations are done and kept in .*out: the same command"):
        run_distill(target, source, str(tmp_path / "out"))


def test_programs_that_made_a_part_each_are_told_and_noted(target, source, tmp_path, monkeypatch, caplog):
    first = {"git_commit": "a", "packages": {"torch": "2.11"}}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(distilling, "this_program", lambda: first)
        own = Distiller.rows
        patch.setattr(Distiller, "rows", lambda *given: own(*given) if given[2] < 4 else interrupt())
        run_distill(target, source, str(tmp_path / "out"))
    second = first | {"packages": {"torch": "2.12"}}
    monkeypatch.setattr(distilling, "this_program", lambda: second)
    assert run_distill(target, source, str(tmp_path / "out"))["programs"] == [first, second]
    assert "out: what is missing is made by another program than the rest: torch was 2.11, now 2.12" in caplog.text
    assert run_distill(target, source, str(tmp_path / "whole"))["programs"] == [second]


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_run_goes_on_where_it_stopped(target, source, tmp_path, moment):
    out = tmp_path / "out"
    root = str(ROOT)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, moment, target, source, str(out)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])},
    )
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in out.glob("shard-*.json")] == ["shard-00000.json"]
    assert not json.loads((out / "manifest.json").read_text())["complete"]
    first = (out / "shard-00000.arrow").stat().st_mtime_ns
    options = {"labels": "generate", "max_new_tokens": 12}
    resumed = run_distill(target, source, str(out), **options)
    uninterrupted = run_distill(target, source, str(tmp_path / "whole"), **options)
    assert rows_of(out) == rows_of(tmp_path / "whole")
    assert resumed == uninterrupted
    assert (out / "shard-00000.arrow").stat().st_mtime_ns == first
    assert sorted(path.name for path in out.iterdir()) == [
        *["manifest.json", "shard-00000.arrow", "shard-00001.arrow", "shard-00002.arrow"]
    ]


def test_a_run_killed_while_it_collects_lists_no_shard_twice(target, source, tmp_path):
    out = tmp_path / "out"
    whole = run_distill(target, source, str(tmp_path / "whole"))
    run_distill(target, source, str(out))
    manifest = json.loads((out / "manifest.json").read_text())
    for shard in manifest["shards"][1:]:  # their entries were to be removed next
        (out / shard["file"]).with_suffix(".json").write_text(json.dumps(shard))
    (out / "manifest.json").write_text(json.dumps(manifest | {"complete": False, "counts": {}}))
    assert run_distill(target, source, str(out)) == whole


SHARED = """
import os, signal, sys
from draft_heads.data.labels.shards import ShardFolder
target, source, output, dies = sys.argv[1:]
def write(self, rows, entry, *more, own=ShardFolder.write):
    own(self, rows, entry, *more)
    if dies == os.environ["RANK"]:  # after its first shard
        os.kill(os.getpid(), signal.SIGKILL)
ShardFolder.write = write
from tests.data.labels.distilling.distilled import run_distill
run_distill(target, source, output, labels="generate", max_new_tokens=12, shard_rows=2)
"""


def launched(script, arguments, processes=2):
    """torchrun of a script on the CPU."""
    root = str(ROOT)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, script, *arguments], cwd=root, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["0", "1"])
def test_processes_share_the_rows_and_go_on_after_a_kill(target, source, tmp_path, dies):
    out, script = tmp_path / "out", tmp_path / "shared.py"
    script.write_text(SHARED)
    run_distill(target, source, str(tmp_path / "whole"), labels="generate", max_new_tokens=12, shard_rows=2)
    killed = launched(str(script), [target, source, str(out), dies])
    assert killed.returncode != 0 and "Signal 9" in killed.stderr
    with pytest.raises(ValueError, match="is not complete"):
        load_distilled(str(out))
    resumed = launched(str(script), [target, source, str(out), "nobody"])
    assert resumed.returncode == 0, resumed.stderr
    assert rows_of(out) == rows_of(tmp_path / "whole")
    assert (out / "manifest.json").read_text() == (tmp_path / "whole" / "manifest.json").read_text()
    again = launched(str(script), [target, source, str(out), "nobody"])
    assert again.returncode != 0 and again.stderr.count("already complete") >= 1


@pytest.mark.parametrize(
    ("environment", "gpus", "own"),
    [
        ({}, 2, None),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 2, "cuda:1"),
        ({"LOCAL_RANK": "3"}, 1, "cuda:0"),  # Slurm shows each task a GPU of its own
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 2, "each process of a node needs a GPU; got 4 processes and 2"),
    ],
)
def test_a_process_takes_a_gpu_that_it_sees(monkeypatch, environment, gpus, own):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    set_to = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    if own and not own.startswith("cuda"):
        with pytest.raises(ValueError, match=own):
            own_device(None)
        return
    assert own_device(None) == own_device("cuda" if own else None) == own
    assert set(set_to) == ({int(own[-1])} if own else set())
    assert own_device(f"cuda:{gpus - 1}") == f"cuda:{gpus - 1}" and own_device("auto") == "auto"
    with pytest.raises(ValueError, match=f"--device must be one that torch sees; got cuda:{gpus}, which it does not"):
        own_device(f"cuda:{gpus}")
    assert set_to[-1] == gpus - 1
    with pytest.raises(ValueError, match="--device mps: a Mac's GPU has no float64 and is not used"):
        own_device("mps")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--device auto spreads the target over the GPUs of one process; this run has"):
        own_device("auto")


def test_nodes_that_do_not_share_the_output_folder_are_told_so(target, source, tmp_path):
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    command = [str(ROOT / "scripts" / "distill.py"), "--target", target, "--dataset", source, "--labels", "argmax"]
    for status, told in on_two_nodes([*command, "--output", "out"], *nodes):
        assert status == 2 and "output must be a folder that all nodes share" in told, told


def test_a_shard_that_another_process_finished_is_kept(target, source, tmp_path):
    out = tmp_path / "out"
    manifest = run_distill(target, source, str(out))
    shard, entry = (out / "shard-00000.arrow"), out / "shard-00000.json"
    before = shard.read_bytes()
    straggler = ShardFolder.join(str(out))
    row = {"id": "late", "conversation": "c", "input_ids": [1], "assistant_mask": [True], "greedy_ids": [1]}
    straggler.write([row], {"first_row": 0, "source_rows": 4}, {})
    assert shard.read_bytes() == before and not entry.exists() and not list(out.glob("*.tmp"))
    shard.unlink()

    def rows():
        (temporary,) = out.glob("*.tmp")  # a second one at work has a name of its own
        ShardFolder.join(str(out)).write([row], {"first_row": 0, "source_rows": 4}, {"rows": 1})
        assert temporary.exists()
        yield row

    straggler.write(rows(), {"first_row": 0, "source_rows": 4}, {"rows": 2})
    assert json.loads(entry.read_text())["counts"] == {"rows": 1} and manifest["complete"]


def test_a_process_that_outlives_its_run_writes_nothing_into_the_next(target, source, tmp_path):
    out = tmp_path / "out"
    run_distill(target, source, str(out))
    late = ShardFolder.join(str(out))
    run_distill(target, source, str(out), True, max_length=40)
    (out / "shard-00001.arrow").unlink()
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    row = {"id": "late", "conversation": "c", "input_ids": [1], "assistant_mask": [True], "greedy_ids": [1]}
    assert late.manifest["settings"]["target_layers"] == []
    with pytest.raises(ValueError, match=r"now holds another distillation.*shard-00001\.arrow is not written"):
        late.write([row], {"first_row": 4, "source_rows": 4}, {})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == written


@pytest.mark.parametrize("key", ["target", "settings", "data", "shards", "complete"])
def test_a_manifest_that_lacks_a_key_is_told_as_damaged(target, source, tmp_path, key):
    out = tmp_path / "out"
    manifest = run_distill(target, source, str(out))
    (out / "manifest.json").write_text(json.dumps({name: value for name, value in manifest.items() if name != key}))
    told = rf"manifest.json is damaged \(it has no {key}\); make the folder again with overwrite"
    with pytest.raises(ValueError, match=told):
        load_distilled(str(out))
    with pytest.raises(ValueError, match=told):
        run_distill(target, source, str(out))
    assert run_distill(target, source, str(out), overwrite=True)["counts"] == manifest["counts"]


def test_a_folder_that_another_run_writes_is_refused(target, source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is being written by another run; wait for its end"):
            run_distill(target, source, str(out), overwrite=True)
    run_distill(target, source, str(out))


class Dying:
    """The target's answers until `after` of them have ended; `asked`: how many prompts it was given."""

    def __init__(self, target, options, after):
        self._own, self._left, self.asked = TargetAnswerer.from_options(target, options), after, 0

    def __call__(self, prompts, limits):
        self.asked += len(prompts)
        for ended in self._own(prompts, limits):
            if not self._left:
                raise KeyboardInterrupt
            self._left -= 1
            yield ended


@pytest.mark.parametrize("states", [None, "float64"])
@pytest.mark.parametrize("cut_off", [False, True])
def test_a_killed_run_keeps_the_answers_of_its_unfinished_shard(target, source, tmp_path, states, cut_off):
    options = DistillOptions(labels="generate", max_new_tokens=12, batch_size=2, hidden_states=states)
    loaded = Target.from_pretrained(target, "float64")

    def run(output, answerer, **changes):
        return distill(loaded, source, str(output), replace(options, **changes), False, False, answerer)

    whole = run(tmp_path / "whole", Dying(loaded, options, 1000))
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt, match=r"5 answers of conversations are done and kept in .*out: the same"):
        run(out, Dying(loaded, options, 5))
    (journal,) = out.glob("*.answers.jsonl")
    if cut_off:  # within the fifth line
        journal.write_bytes(journal.read_bytes()[:-9])
    with pytest.raises(ValueError, match="max_new_tokens is 12 there, 13 here; set overwrite"):
        run(out, Dying(loaded, options, 0), max_new_tokens=13)
    with pytest.raises(KeyboardInterrupt, match="7 answers"):
        run(out, Dying(loaded, options, 3 if cut_off else 2))
    last = Dying(loaded, options, 1000)
    assert run(out, last)["counts"] == whole["counts"]
    everyone = Dying(loaded, options, 1000)
    run(tmp_path / "counted", everyone)
    assert last.asked == everyone.asked - 7
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "shard-00000.arrow"]
    kept, expected = (sorted(rows_of(place), key=itemgetter("id", "input_ids")) for place in (out, tmp_path / "whole"))
    for row, wanted in zip(kept, expected, strict=True):
        if states is not None:
            found, own = (np.frombuffer(cells.pop("hidden")) for cells in (row, wanted))
            np.testing.assert_allclose(found, own, atol=1e-12)
        assert row == wanted


def test_answers_that_a_killed_run_kept_are_their_own_labels(target, source, tmp_path, monkeypatch):
    """The checkpoint forces an end at the longest answer, which a forward over the row does not know."""
    options = DistillOptions(labels="generate", max_new_tokens=12, hidden_states="float64")
    loaded = Target.from_pretrained(target, "float64")
    loaded.model.generation_config.forced_eos_token_id = min(loaded.end_token_ids)

    def run(output, answerer):
        return distill(loaded, source, str(output), options, False, False, answerer)

    def dies(distiller, rows):
        list(rows)
        raise KeyboardInterrupt

    run(tmp_path / "whole", Dying(loaded, options, 1000))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Distiller, "records", dies)
        run(tmp_path / "out", Dying(loaded, options, 1000))
    last = Dying(loaded, options, 0)
    run(tmp_path / "out", last)
    kept, expected = (sorted(rows_of(tmp_path / name), key=itemgetter("id")) for name in ("out", "whole"))
    assert last.asked == 0 and [row["greedy_ids"] for row in kept] == [row["greedy_ids"] for row in expected]
    for row in kept:
        own = zip(row["input_ids"], row["greedy_ids"], row["assistant_mask"], strict=True)
        assert all(label == (token if trained else -100) for token, label, trained in own)


def test_overwriting_drops_the_answers_of_other_settings(target, source, tmp_path):
    loaded, out = Target.from_pretrained(target), tmp_path / "out"
    options = DistillOptions(labels="generate", max_new_tokens=12, batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        distill(loaded, source, str(out), options, False, False, Dying(loaded, options, 3))
    assert list(out.glob("*.answers.jsonl"))
    own = Dying(loaded, options, 1000)
    for output, overwrite in ((out, True), (tmp_path / "fresh", False)):
        distill(loaded, source, str(output), replace(options, max_new_tokens=6), overwrite, False, own)
    assert rows_of(out) == rows_of(tmp_path / "fresh") and not list(out.glob("*.answers.jsonl"))


def test_counting_answers_leaves_a_file_that_another_process_writes_as_it_is(tmp_path):
    journal = tmp_path / "shard-00001.answers.jsonl"
    written = b'["a", [1], "end", true]\n["b", [2'  # the second line is on its way
    journal.write_bytes(written)
    assert count_answers(journal) == 1 and journal.read_bytes() == written
    assert count_answers(tmp_path / "absent") == 0
