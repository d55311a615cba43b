"""Locks of operators that DeepSpeed builds: those that a killed build left are named, others are waited for."""

import os
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from draft_heads.inference.target.library_names import builds_lock_by_a_file
from draft_heads.train.zero_config import check_build_locks


def test_the_lock_file_that_torch_keeps_where_the_system_locks_is_none(tmp_path, monkeypatch):
    """torch 2.14 on: it stays after every build, and a killed build locks nobody out."""
    (tmp_path / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("draft_heads.train.zero_config.builds_lock_by_a_file", lambda: False)
    check_build_locks(pause=0)


def test_torch_leaves_the_lock_file_of_a_build_only_where_it_locks_nothing(tmp_path, monkeypatch):
    """Asked of the installed torch, without a compiler."""
    monkeypatch.setattr(cpp_extension, "_write_ninja_file_and_build_library", lambda **options: None)
    monkeypatch.setattr(cpp_extension, "_import_module_from_library", lambda *args: None)
    cpp_extension.load("operator", [], build_directory=str(tmp_path))
    assert (tmp_path / "lock").exists() != builds_lock_by_a_file()


def test_builds_of_another_python_or_torch_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    monkeypatch.setattr("draft_heads.train.zero_config.builds_lock_by_a_file", lambda: True)
    own = Path(cpp_extension._get_build_directory("operator", False))
    other = own.parent.with_name("py27_cu11") / "operator"
    other.mkdir(parents=True)
    (other / "lock").touch()
    check_build_locks(pause=0)
    (own / "lock").touch()
    with pytest.raises(ValueError, match="a build of DeepSpeed's operators was killed"):
        check_build_locks(pause=0)


def test_a_lock_that_a_killed_build_left_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("draft_heads.train.zero_config.builds_lock_by_a_file", lambda: True)
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    check_build_locks()
    lock.touch()
    with pytest.raises(ValueError, match=r"shm_comm/lock is 0 minutes old .*delete the file, unless another machine"):
        check_build_locks(pause=0)
    with subprocess.Popen(["sleep", "60"], cwd=lock.parent) as build:
        check_build_locks()
        build.kill()
    assert f"waiting for a build of DeepSpeed's operators by sleep ({build.pid}) ({lock})" in capsys.readouterr().out
    monkeypatch.setattr("draft_heads.train.zero_config._working_in", lambda folder: None)
    check_build_locks(pause=0)
    os.utime(lock, (0, 0))
    with pytest.raises(ValueError, match="no compiler works there"):
        check_build_locks(pause=0)
