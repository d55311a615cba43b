"""Files that are written whole, readable by whom the umask lets read, and what a full disk says."""

import errno
import json
import os
import stat

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draft_heads.data.common.files import let_others_read, names_path, write_tensors, write_text
from draft_heads.heads.medusa import MedusaConfig, MedusaHead
from tests.heads.small import SIZES


@pytest.mark.parametrize("umask, rights", [(0o022, 0o644), (0o007, 0o660)])
def test_weights_that_a_library_wrote_get_the_rights_of_the_umask(umask, rights, tmp_path):
    for name in ("model.safetensors", "key.pem"):
        (tmp_path / name).touch(0o600)
    before = os.umask(umask)
    try:
        let_others_read(tmp_path)
    finally:
        os.umask(before)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
        **{"model.safetensors": rights, "key.pem": 0o600}
    }


@pytest.mark.parametrize("umask, rights", [(0o022, 0o644), (0o007, 0o660)])
def test_every_file_of_a_head_has_the_rights_of_the_umask(umask, rights, tmp_path):
    before = os.umask(umask)
    (tmp_path / ".model.safetensors.partial").touch(0o600)  # a kill left it
    try:
        MedusaHead(MedusaConfig(**SIZES)).save_pretrained(tmp_path)
    finally:
        os.umask(before)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("README.md", "config.json", "model.safetensors", "provenance.json"), rights
    )


def test_a_file_that_does_not_fit_is_named_and_the_one_before_it_stays(no_larger_files, tmp_path):
    tensors, text = tmp_path / "model.safetensors", tmp_path / "config.json"
    write_tensors(tensors, {"x": torch.ones(3)})
    write_text(text, "1")
    for path, write in ((tensors, lambda: write_tensors(tensors, {"x": torch.zeros(5000)})),
                        (text, lambda: write_text(text, "x" * 5000))):  # fmt: skip
        with pytest.raises(
            ValueError, match=rf"^{path} could not be written: its disk takes no larger file; free some"
        ):
            write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(tensors)["x"].tolist() == [1, 1, 1] and json.loads(text.read_text()) == 1


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[enforce fail at inline_container.cc:672]")],
)
def test_a_full_disk_says_the_path_what_is_left_and_the_remedy(error, tmp_path):
    rule = r"new/file could not be written: its disk has [\d,]+ MiB left; free some, or name another disk"
    with pytest.raises(ValueError, match=rule), names_path(tmp_path / "new" / "file"):
        raise error


def test_a_full_disk_of_another_file_is_told_as_that_files(tmp_path):
    """A library writes elsewhere while ours is open, as into TMPDIR."""
    for name, told in (("/elsewhere/x", "/elsewhere/x"), (tmp_path / ".file.partial", tmp_path / "file")):
        rule = rf"^{told} could not be written: its disk has"
        with pytest.raises(ValueError, match=rule), names_path(tmp_path / "file"):
            raise OSError(errno.ENOSPC, "No space left on device", str(name))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/file could not be"), names_path(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "No space left on device", "/source/of/a/copy", None, str(tmp_path / "copy"))


def test_an_array_that_does_not_fit_is_named(no_larger_files, tmp_path):
    path = tmp_path / "tokens.npy"
    with pytest.raises(ValueError, match=rf"^{path} could not be written: its disk has"), names_path(path):
        np.save(path, np.zeros(5000))


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path):
    for error in (
        PermissionError(errno.EACCES, "Permission denied"),
        RuntimeError("shapes"),
        ValueError("No space left"),
    ):
        with pytest.raises(type(error), match=str(error.args[-1])), names_path(tmp_path):
            raise error
