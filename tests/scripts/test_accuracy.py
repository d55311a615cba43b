"""The accuracy of heads on held-out rows, and what is refused before rows are measured or trees tuned."""

import json
import math
from types import SimpleNamespace

import pytest

from draft_heads.scripts import accuracy
from draft_heads.scripts.tune_tree import best_temperature, check_new_file

LABELS = {"data": {"fingerprint": "f"}, "counts": {"rows": 9, "trained_tokens": 80}}


def test_offsets_of_the_table_count_from_0():
    found = {"ctc": [{"counted": 2, "top": [0.5] * 5}, {"counted": 1, "top": [1.0] * 5}]}
    found["short"] = [{"counted": 0, "top": None}]
    lines = accuracy.table(found).splitlines()
    assert lines[0] == "| head | rank | offset 0 | offset 1 |"
    assert lines[2] == "| ctc | top-1 | 0.500 | 1.000 |" and lines[8] == "| short | top-1 | – | – |"
    assert lines[7] == "| ctc | labels | 2 | 1 |" and lines[-1] == "| short | labels | 0 | – |"


@pytest.mark.parametrize(
    ("known", "rows", "refused", "said"),
    [
        ({"options": {"held_out": 8}, "data": [{"fingerprint": "f", "counts": LABELS["counts"]}]}, 8, False, False),
        ({"options": {"held_out": 8}, "data": [{"fingerprint": "f", "counts": LABELS["counts"]}]}, 9, True, False),
        ({"options": {"held_out": 8}, "data": [{"fingerprint": "g", "counts": LABELS["counts"]}]}, 9, False, True),
        (
            {"options": {"held_out": 8}, "data": [{"fingerprint": "f", "counts": {"rows": 5}}]},
            8,
            False,
            True,
        ),  # limited
        ({"imported_from": "elsewhere"}, 64, False, False),
        (None, 64, False, False),
    ],
)
def test_rows_that_a_head_was_trained_on_are_not_measured(known, rows, refused, said, tmp_path, capsys):
    if known is not None:
        (tmp_path / "provenance.json").write_text(json.dumps(known, sort_keys=True))
    data = [SimpleNamespace(manifest=LABELS)]
    if refused:
        with pytest.raises(ValueError, match="got 9, and mine held out 8; pass --rows 8"):
            accuracy.check_held_out({"mine": tmp_path}, rows, data)
    else:
        accuracy.check_held_out({"mine": tmp_path}, rows, data)
    assert ("mine was trained on other data than --dataset" in capsys.readouterr().out) is said


def test_attention_over_trees_is_refused_where_none_is_built(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"kind": "ctc"}')
    words = ["--target", "T", "--heads", f"x={tmp_path}", "--dataset", "D", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        accuracy.main([*words, "--attention", "products"])
    assert "unknown flag --attention" in capsys.readouterr().err


def test_of_temperatures_with_equal_beta_the_one_nearest_1_is_kept():
    assert best_temperature({0.6: 2.0, 0.9: 2.0, 1.2: 2.0, 2.0: 1.5}) == 0.9
    assert best_temperature({0.6: 2.0, 1.0: 2.0, 2.0: 2.5}) == 2.0
    assert best_temperature({0.6: math.nan, 1.0: math.nan}) in (0.6, 1.0)


def test_tuned_settings_go_into_a_new_file(tmp_path):
    check_new_file(tmp_path / "tree.json")
    (tmp_path / "tree.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a new file; .*tree\.json is there already; name another, or remove it"):
        check_new_file(tmp_path / "tree.json")
    with pytest.raises(ValueError, match="is there already; name a file in it"):
        check_new_file(tmp_path)
