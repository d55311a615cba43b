"""`scripts/lossless.py` from its command line, on a random-weight target."""

import json

from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.report_text import WHY_SKIPPED
from draft_heads.scripts import decoding_options as options
from draft_heads.scripts import lossless


class SpoiledEngine(DecodingEngine):
    """Decodes one wrong token, the third, on every second answer."""

    count = 0

    def generate(self, prompt_ids, settings=None):
        generation = super().generate(prompt_ids, settings)
        type(self).count += 1
        if self.count % 2 and len(generation.tokens) > 2:
            generation.tokens[2] = (generation.tokens[2] + 1) % 70
        return generation


def test_lossless_exits_0_when_nothing_is_unexplained(command, tmp_path, capsys):
    assert lossless.main(command) == 0
    report = json.loads((tmp_path / "out" / "lossless.json").read_text())
    assert [row["drafter"] for row in report["results"]] == ["vanilla", "plain"]
    assert {row["identical_turns"] for row in report["results"]} == {8}
    assert report["differences"] == []
    # 2 + 2 + 1 turns of mt.jsonl, of which the last does not fit, and 4 of gsm.jsonl
    assert {(row["asked"], row["turns"], row["skipped"]) for row in report["results"]} == {(9, 8, 1)}
    shown = " ".join(capsys.readouterr().out.split())
    assert "lossless.json" in shown and "skipped" in shown.partition("identical")[0]
    assert f"1 of 9 turns were skipped and not compared: {WHY_SKIPPED}; the target has 128 positions" in shown


def test_a_gap_that_is_infinite_is_null_in_json():
    """JSON has no infinity: the target's own settings may exclude one of two tokens."""
    found = [lossless.finite(value) for value in (0.5, None, float("inf"), float("nan"))]
    assert json.loads(json.dumps(found, allow_nan=False)) == [0.5, None, None, None]


def test_lossless_exits_1_and_shows_unexplained_differences(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(options, "DecodingEngine", SpoiledEngine)
    assert lossless.main(command) == 1
    report = json.loads((tmp_path / "out" / "lossless.json").read_text())
    row = report["results"][1]
    assert row["identical_turns"] + row["unexplained"] == row["turns"] == 8
    assert row["unexplained"] > 0
    difference = report["differences"][0]
    assert difference["position"] == 2
    assert difference["expected"] != difference["received"]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{difference['benchmark']} question {difference['question_id']}, turn 1, new token 2: expected" in shown
    assert "and 3 more" in shown


def test_turns_that_one_drafter_alone_skips_are_lost(command, capsys, monkeypatch):
    own = lossless.lossless_counts
    monkeypatch.setattr(lossless, "lossless_counts", lambda turns: own(turns[turns[0].drafter == "plain" :]))
    assert lossless.main(command) == 1
    assert "some drafters skipped more turns than others: these were lost." in " ".join(capsys.readouterr().out.split())


def test_lossless_has_no_row_that_compares_generate_with_itself(command, capsys):
    assert lossless.main([*command, "--drafters", "transformers"]) == 2
    assert "'transformers' is reserved" in capsys.readouterr().err


def test_a_missing_flag_is_named(capsys):
    assert lossless.main([]) == 2
    assert "--target is required" in capsys.readouterr().err
