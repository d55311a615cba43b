"""The list of seeded defects keeps up with the code, and planting one is noticed."""

from dataclasses import replace

import pytest

from draft_heads.scripts.checks.seeded_defects import Defect, definitions, edited, fault, kills, listed, pattern, source

DEFECTS = listed()
LABELS = next(defect for defect in DEFECTS if defect.name == "labels after a disagreement")


def test_every_defect_can_be_planted_and_names_its_tests():
    assert [found for defect in DEFECTS if (found := fault(defect))] == []


def test_every_list_is_read_and_no_name_is_given_twice():
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 281


@pytest.mark.parametrize(
    "code",
    ["f(a, b[-1]) if c else d", "f(\n    a,\n    b[-1],\n) if c else d", "f(a, b[\n    -1\n])\nif c\nelse d"],
    ids=["one line", "rewrapped", "other breaks"],
)
def test_code_is_found_however_its_lines_are_wrapped(code):
    assert pattern("f(a, b[-1]) if c").search(code)


def test_words_are_found_as_wholes():
    assert not pattern("a + b").search("aa + b") and not pattern("a + b").search("a + bb")
    assert not pattern("not a").search("nota")


def test_an_edit_changes_nothing_else_and_indents_its_lines():
    file, text = edited(replace(LABELS, wrong="if alive.any():\n    pass"))
    before, after = source(file).splitlines(), text.splitlines()
    place = next(i for i, line in enumerate(after) if line != before[i])
    indentation = before[place][: -len(before[place].lstrip())]
    assert after[place : place + 2] == [f"{indentation}if alive.any():", f"{indentation}    pass"]
    assert before[:place] + before[place + 1 :] == after[:place] + after[place + 2 :]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"at": "label_window"}, "`at` names a definition, and there is no label_window"),
        ({"right": "alive = dead"}, "'alive = dead' stands 0 times in heads/windows.py:"),
        ({"right": "alive"}, "lengthen it"),
        ({"wrong": "alive = ("}, "correct `wrong`"),
        ({"tests": "tests/heads/test_window.py"}, "there is no tests/heads/test_window.py; write where"),
        ({"tests": "tests/heads/test_windows.py -k agreemant"}, "has no agreemant; write what"),
        ({"tests": "tests/heads/test_windows.py::test_agreemant"}, "has no test_agreemant; write what"),
    ],
)
def test_an_entry_that_does_not_fit_says_what_to_correct(change, error):
    found = fault(replace(LABELS, **change))
    assert found.startswith("labels after a disagreement: ") and error in found


def test_a_planted_defect_is_caught():
    assert kills(LABELS)


def test_a_test_that_fails_without_the_defect_too_catches_nothing(tmp_path, monkeypatch):
    for folder in ("configs", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "configs" / "sums.py").write_text("def total():\n    return 1 + 1\n")
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from draft_heads.configs.sums import total\n\n\ndef test_total():\n    assert total() == 2\n\n\n"
        "def test_wrong():\n    assert total() == 3\n"
    )
    monkeypatch.setattr("draft_heads.scripts.checks.seeded_defects.ROOT", tmp_path)
    definitions.cache_clear()
    try:
        planted = Defect("a sum", "total", "1 + 1", "1 - 1", "tests/test_sums.py -k test_total")
        assert kills(planted)
        with pytest.raises(RuntimeError, match="a sum: the test that caught it fails without it too; mend the test"):
            kills(replace(planted, tests="tests/test_sums.py -k test_wrong"))
        with pytest.raises(
            RuntimeError, match="a sum: `wrong` is a mistake that runs, and this is a NameError: name 'two'"
        ):
            kills(replace(planted, wrong="two"))
    finally:
        definitions.cache_clear()
