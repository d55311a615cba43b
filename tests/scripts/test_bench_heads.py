"""The table that compares heads: what it trains, for how long, and what it says of each."""

import json
import sys

import pytest

from draft_heads.scripts.bench import heads


def test_an_arm_has_a_name_a_kind_and_options_with_lists_in_spaces():
    arm = heads.Arm("deep=ctc,target_layers=1 2 3,labels=2")
    assert (arm.name, arm.kind) == ("deep", "ctc")
    assert arm.options == ["--target_layers", "1", "2", "3", "--labels", "2"]


@pytest.mark.parametrize("text", ["ctc", "x=nothing", "x=ctc,labels"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match=r"NAME=KIND\[,option=value…\], KIND one of chimera, ctc, .*; got"):
        heads.Arm(text)


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    """A function that runs the script, its commands replaced: {argument: …} of each goes to `commands`."""
    commands = []

    def cpu_seconds(command, log):
        commands.append(command)
        if "--max_steps" in command:
            steps = int(command[command.index("--max_steps") + 1])
            return 20 + steps * (0.5 if "train/ctc.py" in command else 0.25)
        return 0.0

    monkeypatch.setattr(heads, "cpu_seconds", cpu_seconds)
    monkeypatch.setattr(heads.Comparison, "rows", lambda self: [])

    def run(*more):
        required = ["--target", "T", "--dataset", "D", "--benchmarks", "gsm8k=F", "--output", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["heads.py", *required, "--heads", "medusa=medusa", "ctc=ctc", *more])
        commands.clear()
        heads.run()
        return [(c[0], int(c[c.index("--max_steps") + 1])) for c in commands if "--max_steps" in c]

    return run


def test_equal_times_are_numbers_of_steps_by_what_a_step_costs(comparison, tmp_path):
    trained = comparison("--minutes", "5", "--seeds", "0", "1")
    calibrated = [(f"train/{kind}.py", steps) for kind in ("medusa", "ctc") for steps in heads.CALIBRATION]
    assert trained[:4] == calibrated
    assert sorted(trained[4:]) == 2 * [("train/ctc.py", 600)] + 2 * [("train/medusa.py", 1200)]
    assert json.loads((tmp_path / "step_seconds.json").read_text()) == {"medusa": 0.25, "ctc": 0.5}


def test_a_second_run_trains_what_is_missing(comparison, tmp_path):
    (tmp_path / "ctc-0" / "head").mkdir(parents=True)
    (tmp_path / "ctc-0" / "head" / "config.json").write_text("{}")
    assert comparison("--steps", "7") == [("train/medusa.py", 7)]


def test_the_table_has_a_row_a_head():
    betas = {f"beta{variant}_gsm8k": 2.0 for variant in heads.VARIANTS}
    row = {"head": "ctc", "steps": 1200, "simulated_beta": 3.5, **betas, "accuracy": [0.5, 0.25], "draft_share": 0.25}
    made = heads.table([{**row, "parameters": 1_500_000, "bytes_read": 7 * 2**20}], ["gsm8k"])
    assert "| ctc | 1,200 | 3.50 | 2.00 | 2.00 | 2.00 | 0.50 0.25 | 0.25 | 1.5M | 7 MiB |" in made
