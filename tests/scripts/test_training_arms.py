"""Heads that studies train, or are given: what is trained, what is taken over, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from draft_heads.scripts import training_arms as arms


def test_an_arm_has_a_kind_and_options_with_lists_in_spaces():
    arm = arms.Arm("deep", "ctc,target_layers=1 2 3,labels=2")
    assert (arm.name, arm.kind) == ("deep", "ctc")
    assert arm.options == ["--target_layers", "1", "2", "3", "--labels", "2"]


@pytest.mark.parametrize("text", ["nothing", "ctc,labels"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match=r"KIND\[,option=value…\], KIND one of chimera, ctc, .*; got"):
        arms.Arm("x", text)


@pytest.mark.parametrize(
    ("value", "text", "same"),
    [
        (0.01, "1e-2", True),
        (0.01, "0.01", True),
        (0.01, "1", False),
        (4, "4", True),
        (True, "true", True),
        (True, "1", True),
        (False, "no", True),
        (True, "2", False),
        ([1, 2], "1 2", True),
        ("chain", "chain", True),
        (0.01, "none", False),
    ],
)
def test_the_value_of_an_option_is_what_was_written_for_it(value, text, same):
    assert arms.is_written(value, text) == same


def test_a_training_that_fails_is_told_with_its_last_line(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text('import sys\nprint("loading")\nsys.exit("error: no such folder")\n')
    with pytest.raises(ValueError, match=r"fails\.py failed: error: no such folder \(all of its output is in .*log\)"):
        arms.cpu_seconds([str(script)], tmp_path / "log")


TRAININGS = """
import sys
from draft_heads.configs.command_line import exit_status
from draft_heads.scripts import training_arms as arms
script, folder, *names = sys.argv[1:]

def run():
    with arms._pool(2) as pool:
        files = [arms.Path(folder, name) for name in names]
        results = [pool.submit(arms.cpu_seconds, (script, str(file)), file.with_suffix(".log")) for file in files]
        for result in results:
            result.result()

sys.exit(exit_status(run))
"""


def test_a_signal_ends_the_trainings_that_run_and_those_that_wait(tmp_path):
    script, running, waiting = tmp_path / "script.py", [tmp_path / "a", tmp_path / "b"], tmp_path / "c"
    script.write_text("import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)")
    command = [sys.executable, "-c", TRAININGS, str(script), str(tmp_path), "a", "b", "c"]
    process, limit = subprocess.Popen(command), time.monotonic() + 120
    while not all(file.is_file() and file.read_text() for file in running) and time.monotonic() < limit:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 130
    for file in running:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
    assert not waiting.exists()


@pytest.fixture
def commands(monkeypatch):
    """The commands that are run, in their place: (script, steps) of each."""
    found = []

    def cpu_seconds(command, log):
        steps = int(command[command.index("--max_steps") + 1])
        found.append((command[0], steps))
        return 20 + steps * (0.5 if "train/ctc.py" in command else 0.25)

    monkeypatch.setattr(arms, "cpu_seconds", cpu_seconds)
    return found


BOTH = [arms.Arm("medusa", "medusa"), arms.Arm("ctc", "ctc")]


def test_equal_times_are_numbers_of_steps_by_what_a_step_costs(commands, tmp_path):
    heads = arms.ArmTrainer(tmp_path, "T", ["D"], minutes=5).train(BOTH)
    assert heads == {name: tmp_path / name / "run" / "head" for name in ("medusa", "ctc")}
    calibrated = [(f"train/{kind}.py", steps) for kind in ("medusa", "ctc") for steps in arms.CALIBRATION]
    assert commands[:4] == calibrated
    assert sorted(commands[4:]) == [("train/ctc.py", 600), ("train/medusa.py", 1200)]
    assert [float((tmp_path / name / "step_seconds.json").read_text()) for name in ("medusa", "ctc")] == [0.25, 0.5]


def test_a_step_that_takes_longer_than_all_is_still_one_step(commands, tmp_path):
    arms.ArmTrainer(tmp_path, "T", ["D"], minutes=0.001).train(BOTH[1:])
    assert commands[-1] == ("train/ctc.py", 1)


@pytest.mark.parametrize("seconds", [0.0, -0.2])
def test_a_step_that_cannot_be_measured_is_told(monkeypatch, tmp_path, seconds):
    """Loading varies by more; what was measured is not kept, not even of the head before, whose note goes too."""

    def cpu_seconds(command, log):
        per_step = seconds if "train/ctc.py" in command else 0.25
        return 20 + per_step * int(command[command.index("--max_steps") + 1])

    monkeypatch.setattr(arms, "cpu_seconds", cpu_seconds)
    with pytest.raises(ValueError, match=r"a step of \w+ takes less processor time than loading .*; give --steps"):
        arms.ArmTrainer(tmp_path, "T", ["D"], minutes=5).train(BOTH)
    assert not list(tmp_path.glob("*/step_seconds.json"))
    assert arms.ArmTrainer(tmp_path, "T", ["D"], steps=5).train(BOTH).keys() == {"medusa", "ctc"}  # the remedy


def finish(folder):
    """What a training leaves, of which only its configuration is looked for."""
    (folder / "run" / "head").mkdir(parents=True)
    (folder / "run" / "head" / "config.json").write_text("{}")


def test_a_second_run_trains_what_is_missing_and_refuses_what_was_made_otherwise(commands, tmp_path):
    (tmp_path / "T").mkdir()
    (tmp_path / "T" / "config.json").write_text("{}")
    given = {"output": tmp_path / "heads", "target": str(tmp_path / "T"), "dataset": ["D"], "steps": 7}
    arms.ArmTrainer(**given).train(BOTH[1:])
    finish(tmp_path / "heads" / "ctc")
    arms.ArmTrainer(**given).train(BOTH)
    assert commands == [("train/ctc.py", 7), ("train/medusa.py", 7)]
    for change, message in (
        ({"steps": 9}, "schedule was '7 steps', now '9 steps'"),
        ({"dataset": ["E"]}, r"labels was \['D/manifest.json'\], now \['E/manifest.json'\]"),
        ({"target": "U"}, "target was {'config.json': '[0-9a-f]{16}'}, now 'U'"),
        ({"options": ("--target_adapter", "A")}, "options was"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*or remove it, and it is trained again"):
            arms.ArmTrainer(**{**given, **change}).train(BOTH[1:])
    with pytest.raises(ValueError, match=r"head was 'ctc', now 'ctc,labels=2'"):
        arms.ArmTrainer(**given).train([arms.Arm("ctc", "ctc,labels=2")])
    (tmp_path / "T" / "config.json").write_text('{"retrained": true}')
    with pytest.raises(ValueError, match=r"target.config.json was '"):
        arms.ArmTrainer(**given).train(BOTH[1:])
    assert len(commands) == 2
    shutil.rmtree(tmp_path / "heads" / "ctc")  # the remedy
    arms.ArmTrainer(**given).train(BOTH[1:])
    assert commands[2:] == [("train/ctc.py", 7)]


def test_seconds_of_a_step_are_those_of_what_is_trained(commands, tmp_path):
    arms.ArmTrainer(tmp_path, "T", ["D"], minutes=5).train(BOTH[:1])
    with pytest.raises(ValueError, match="schedule was '5 minutes, 1 threads', now '5 minutes, 2 threads'"):
        arms.ArmTrainer(tmp_path, "T", ["D"], minutes=5, threads=2).train(BOTH[:1])
    shutil.rmtree(tmp_path / "medusa")
    commands.clear()
    arms.ArmTrainer(tmp_path, "T", ["D"], minutes=5, threads=2).train(BOTH[:1])
    assert [steps for _, steps in commands] == [*arms.CALIBRATION, 1200]  # 5 · 60 s / 0.25 s, measured again


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "medusa"}, "bigram names a head with kind=chimera; .* has medusa"),
        ({"kind": "chimera", "order": 3, "residual": False}, "with order=2; .* has 3; give another"),
        ({"kind": "chimera", "order": 2, "residual": True}, "with residual=false; .* has True"),
        ({"kind": "chimera", "order": 2, "residual": False, "target_layers": [1, 2]}, "target_layers=1 3; .* has"),
    ],
)
def test_a_given_head_that_is_not_what_its_name_means_is_refused(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = {"bigram": arms.Arm("bigram", "chimera,order=2,residual=false,target_layers=1 3")}
    with pytest.raises(ValueError, match=message):
        arms.given_heads([f"bigram={tmp_path}"], found)
    (tmp_path / "config.json").write_text(json.dumps({"kind": "chimera", "order": 2, "target_layers": [1, 3]}))
    assert arms.given_heads([f"bigram={tmp_path}"], found) == {"bigram": tmp_path}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("chimera", {"kind": "chimera", "order": 5}, "the usual order, 3; .* has 5; give another"),
        ("chimera", {"kind": "chimera", "order": 3, "residual": False}, "the usual residual, True; .* has False"),
        ("ctc", {"kind": "ctc", "context": "hidden"}, r"the usual context, hidden\+token; .* has hidden;"),
        ("hydra", {"kind": "hydra", "layers": 1}, "the usual layers, 4; .* has 1"),  # the class's default, no recipe's
        ("ctc", {"kind": "ctc", "context": "hidden+token", "decay": 0.7}, None),  # the recipe's
        ("ctc", {"kind": "ctc", "decay": 1.0, "frames": 5}, None),  # no study names frames
        ("deep", {"kind": "ctc", "context": "hidden+token", "decay": 0.5}, None),
    ],
)
def test_a_given_head_has_the_usual_values_of_options_that_other_heads_of_its_kind_are_named_by(
    tmp_path, name, config, message
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    more = {"chimera": "chimera", "hydra": "hydra", "hydra_plain": "hydra,layers=1", "deep": "ctc,decay=0.5"}
    found = {one.name: one for one in (*BOTH, *(arms.Arm(*pair) for pair in more.items()))}
    if message is None:
        assert arms.given_heads([f"{name}={tmp_path}"], found) == {name: tmp_path}
    else:
        with pytest.raises(ValueError, match=message):
            arms.given_heads([f"{name}={tmp_path}"], found)
