"""What a distillation replaces in its folder, and when it goes on there."""

import json
import os
import shutil
from pathlib import Path

import pytest

from draft_heads.data.labels import distill as distill_module
from draft_heads.data.labels import shards
from tests.data.labels.distilling.distilled import run_distill


@pytest.mark.parametrize("name", ["shard-00000.json", "shard-00000.arrow", "manifest.json"])
def test_files_that_are_named_as_ours_are_foreign_without_a_manifest_of_ours(target, source, tmp_path, name):
    (tmp_path / name).write_text('[{"precious": 1}]')
    with pytest.raises(ValueError, match=rf"holds other files \({name}\)"):
        run_distill(target, source, str(tmp_path), overwrite=True)
    assert (tmp_path / name).read_text() == '[{"precious": 1}]'
    (tmp_path / name).unlink()
    run_distill(target, source, str(tmp_path))
    (tmp_path / "shard-b.json").write_text("[]")
    with pytest.raises(ValueError, match=r"holds other files \(shard-b.json\)"):
        run_distill(target, source, str(tmp_path), overwrite=True)


def test_an_output_that_holds_the_conversations_or_is_among_them_is_refused(target, source, tmp_path):
    own = tmp_path / "in" / "shard-00000.json"
    own.parent.mkdir()
    own.write_bytes(Path(source).read_bytes())
    for read, written in (
        (own, own.parent),
        (own.parent, own.parent),
        (own.parent, own.parent / "out"),
        (own, tmp_path),
    ):
        with pytest.raises(ValueError, match="output must be a folder apart from the conversations"):
            run_distill(target, str(read), str(written))
    assert own.read_bytes() == Path(source).read_bytes() and list(own.parent.iterdir()) == [own]


def test_a_run_goes_on_with_other_paths_to_the_same_target_and_conversations(target, source, tmp_path):
    out, again = tmp_path / "out", tmp_path / "again.json"
    again.write_bytes(Path(source).read_bytes())
    whole = run_distill(target, source, str(out))
    (out / "shard-00001.arrow").unlink()
    assert run_distill(f"{target}/", str(again), str(out))["counts"] == whole["counts"]
    (out / "shard-00001.arrow").unlink()
    assert run_distill(os.path.relpath(target), str(again), str(out))["counts"] == whole["counts"]
    (out / "shard-00001.arrow").unlink()
    shutil.copytree(target, tmp_path / "other")  # whose fingerprint does not see every weight
    with pytest.raises(ValueError, match=r"target.path is '.*' there, '.*other' here"):
        run_distill(str(tmp_path / "other"), source, str(out))


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_kill_while_overwrite_clears_the_folder_leaves_one_that_goes_on(target, source, tmp_path, monkeypatch, kept):
    out, unlink, removed = tmp_path / "out", Path.unlink, []
    expected = run_distill(target, source, str(out))
    assert len(list(out.glob("*.arrow"))) > 2
    (out / "shard-00009.json").write_text('{"first_row": 36, "file": "shard-00009.arrow", "source_rows": 4}')

    def killed(path, **options):
        if path.parent == out and path.name != ".manifest.json.partial":
            if len(removed) == kept:
                raise KeyboardInterrupt
            removed.append(path.name)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        run_distill(target, source, str(out), overwrite=True)
    monkeypatch.setattr(Path, "unlink", unlink)
    found = run_distill(target, source, str(out), overwrite=kept < 2)  # whose shards are all there
    assert found["counts"] == expected["counts"] and found["complete"]


@pytest.mark.parametrize("labels", ["argmax", "generate"])
def test_what_overwrite_removes_is_free_for_the_states(target, source, tmp_path, monkeypatch, labels):
    out, freed = tmp_path / "out", []
    monkeypatch.setattr(distill_module, "check_disk", lambda *args: freed.append(args[-1]) or "")
    run_distill(target, source, str(out), labels=labels, hidden_states="float32", max_new_tokens=4)
    size = sum(path.stat().st_size for path in out.glob("*.arrow"))
    run_distill(target, source, str(out), True, labels=labels, hidden_states="float32", max_new_tokens=4)
    assert freed[0] == 0 and freed[1] == size


def test_a_run_that_filled_the_disk_goes_on_beside_files_of_others(target, source, tmp_path, monkeypatch):
    out, write = tmp_path / "out", shards.write_text
    whole = run_distill(target, source, str(out))
    (out / "shard-00001.arrow").rename(out / f"shard-00001.{'0' * 32}.arrow.tmp")
    (out / "shard-b.json").write_text("[]")
    (out / "shard-00000.json").write_text(json.dumps(whole["shards"][0]))  # not in the manifest yet

    def full(path, text):
        if list(out.glob("*.arrow.tmp")):
            raise ValueError("its disk has 0 MiB left")
        write(path, text)

    monkeypatch.setattr(shards, "write_text", full)
    assert run_distill(target, source, str(out))["counts"] == whole["counts"]
    assert (out / "shard-b.json").read_text() == "[]"
