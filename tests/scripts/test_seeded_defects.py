"""The list of seeded defects keeps up with the code, and planting one is noticed."""

import pytest

from draft_heads.scripts.checks.seeded_defects import ROOT, kills, listed

DEFECTS = listed()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_defect_still_has_its_place(defect):
    assert (ROOT / defect.file).read_text(encoding="utf-8").count(defect.right) == 1
    tests = [path for part in defect.tests.split() if (path := part.partition("::")[0]).endswith(".py")]
    assert tests and all((ROOT / path).is_file() for path in tests)


def test_every_list_is_read_and_no_name_is_given_twice():
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 63


def test_a_planted_defect_is_caught():
    assert kills(next(defect for defect in DEFECTS if defect.name == "labels behind a disagreement"))
