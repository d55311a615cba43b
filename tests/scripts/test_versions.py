"""The check of the oldest and newest libraries: what it installs, and whether the table of what was tried is of now."""

import re
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from draft_heads.scripts.checks.versions import SHOWN, lower_bounds, outcome, requirements, step, table

ROOT = Path(__file__).resolve().parents[2]


def test_the_oldest_versions_are_the_lower_bounds():
    ranges = {"one": Requirement("one>=1.2,<3"), "two": Requirement("two>=0.4")}
    assert lower_bounds(ranges) == {"one": "1.2", "two": "0.4"}
    with pytest.raises(ValueError, match=r"must give three one lower bound, as three>=1\.0; got three<2; add it"):
        lower_bounds({"three": Requirement("three<2")})


def test_the_tested_set_is_within_every_range():
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    tested = {re.sub("[-_]", "-", name).lower(): found for name, found in tested.items()}
    for name, wanted in requirements().items():
        assert tested[name] in wanted.specifier, f"constraints.txt has {name} {tested[name]}, pyproject.toml {wanted}"
        assert version(name).split("+")[0] in wanted.specifier


def test_contributing_has_the_lower_bounds_as_the_oldest_versions_that_were_tried():
    """A range that was changed is tried again: `make check-versions`."""
    contributing, ranges = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), requirements()
    oldest = lower_bounds(ranges)
    for name in SHOWN:
        found = re.search(rf"^\| {name} \| (\S+) \| (\S+) \|$", contributing, re.MULTILINE)
        assert found, f"CONTRIBUTING.md has no row {name} in the table that `make check-versions` prints"
        assert Version(found[1]) == Version(oldest[name]), (
            f"pyproject.toml begins {name} at {oldest[name]}, tried {found[1]}"
        )
        assert found[2] in ranges[name].specifier
    (results,) = re.findall(r"^\| result \| (.+?) \| (.+?) \|$", contributing, re.MULTILINE)
    assert all(re.fullmatch(r"good: \d+ passed.*; quickstart passed", result) for result in results), results


def test_a_failing_step_is_said_with_its_log(tmp_path, capsys):
    log = tmp_path / "tests.log"
    assert not step("oldest: tests", ["sh", "-c", "echo '=== 1 failed in 2s ==='; exit 1"], log)
    assert f"oldest: tests: failed (status 1), see {log}" in capsys.readouterr().out
    assert outcome(log) == "1 failed in 2s"
    rows = [("oldest", False, {"torch": "2.11.0"}, "1 failed in 2s"), ("newest", True, {}, "9 passed")]
    lines = table(rows, date(2026, 11, 25)).split("\n")
    assert lines[0] == "| 2026-11-25 | oldest | newest |" and lines[2] == "| torch | 2.11.0 | — |"
    assert lines[-1] == "| result | FAILED: 1 failed in 2s | good: 9 passed |"
