"""The decoding benchmark runs on a CPU and ends with one JSON line that holds what it promises."""

import json
import shutil
import sys

import pytest
import torch

from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.bench import decode as bench_decode
from draft_heads.scripts.bench.decode import ScriptedAcceptance, ratio, schedule
from tests.inference.models import load_target, make_head

SMALL = ["--questions", "1", "--prompt_tokens", "32", "--new_tokens", "12", "--repeats", "2", "--max_nodes", "8"]


def run(monkeypatch, capsys, *flags):
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", *SMALL, *flags])
    status = bench_decode.exit_status(bench_decode.run)
    out, err = capsys.readouterr()
    return status, out, err


def test_it_reports_every_ratio(monkeypatch, capsys):
    scripted = ["--scripted", "2.3", "--heads", "medusa", "ctc"]
    flags = ["--target", "tests/tiny_target", "--baselines", "eager", "static", *scripted]
    status, out, _ = run(monkeypatch, capsys, *flags)
    result = json.loads(out.splitlines()[-1])
    assert status == 0
    for name in ("vanilla_over_hf_generate", "vanilla_over_hf_static"):
        assert result[name] > 0
    assert set(result["verify_over_step"]) == {"8", "16", "32", "64"}
    medusa = result["scripted medusa 2.3"]
    assert medusa["beta"] == pytest.approx(2.3, abs=0.4) and 0 < medusa["eta_bound"] < 1


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([3.0], (3, 3, 3)),
        ([1.0, 2.0], (1.25, 1.5, 1.75)),
        ([1.0, 2.0, 3.0], (1.5, 2, 2.5)),
        ([5.0, 1, 2, 4, 3], (2, 3, 4)),
    ],
)
def test_quartiles_lie_within_what_was_measured(taken, expected):
    """As numpy's linear ones; of two runs the spread was wider than the runs."""
    assert tuple(ratio(taken, [1.0] * len(taken))[name] for name in ("low", "median", "high")) == expected


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "either --target or --shape"),
        (["--target", "tests/tiny_target", "--shape", "7b"], "either --target or --shape"),
        (["--target", "tests/tiny_target", "--prompt_tokens", "1000"], "--prompt_tokens must leave"),
        (["--target", "tests/tiny_target", "--new_tokens", "9000"], "a prompt and --new_tokens must have room"),
        (["--target", "tests/tiny_target", "--drafters", "kept=ngram,keep=1"], "'kept' keeps what it learned"),
        (["--target", "tests/tiny_target", "--drafters", "h=ngram,keep=1+prompt_lookup"], "'h' keeps what it learned"),
        (["--target", "tests/tiny_target", "--scripted", "9", "--heads", "medusa"], "--scripted must lie between"),
        (["--target", "tests/tiny_target", "--layers", "2"], "--layers has no effect without --shape"),
        (["--target", "tests/tiny_target", "--heads", "ctc"], "--heads has no effect without --scripted"),
        (["--shape", "7b", "--chat_template", "vicuna"], "--chat_template has no effect with --shape"),
        (["--shape", "7b", "--device", "auto"], "this bench runs on one device; got --device auto"),
        (["--shape", "7b", "--device", "gpu"], "--device must be one that torch sees; got gpu"),
        (["--shape", "7b", "--device", "xpu"], "--device must be one that torch sees; got xpu"),
        (["--shape", "7b", "--device", "hpu"], "--device must be one that torch sees; got hpu"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, flags, told):
    status, _, err = run(monkeypatch, capsys, *flags)
    assert status == 2 and told in err


def test_a_flag_of_a_config_that_nothing_reads_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "bench.yaml").write_text("target: tests/tiny_target\nlayers: 2\n")
    status, _, err = run(monkeypatch, capsys, "--config", str(tmp_path / "bench.yaml"))
    assert status == 2 and "--layers has no effect without --shape; got 2" in err


def test_a_schedule_spreads_whole_numbers_around_its_mean():
    assert schedule(2.5, 4) == [2, 3, 2, 3] and schedule(3.0, 3) == [3, 3, 3]
    for mean in (2.3, 3.3, 4.3, 2.78, 2.33, 1.97, 2.02, 1.04):
        assert sum(schedule(mean)) == round(100 * mean) and set(schedule(mean)) == {int(mean), int(mean) + 1}


def test_a_drafter_may_have_a_name_that_begins_as_a_baselines(monkeypatch, capsys):
    status, out, _ = run(monkeypatch, capsys, "--target", "tests/tiny_target", "--drafters", "vanilla_x=ngram")
    assert status == 0 and json.loads(out.splitlines()[-1])["vanilla_x"]["beta"] >= 1


def test_the_baseline_has_a_cache_and_no_beams_whatever_the_checkpoint_says(tmp_path):
    """Each forward after the prompt reads one token of one text."""
    own = {"use_cache": False, "num_beams": 4, "stop_strings": ["a"], "max_length": 9, "penalty_alpha": 0.6, "top_k": 4}
    shutil.copytree("tests/tiny_target", tmp_path / "target")
    (tmp_path / "target/generation_config.json").write_text(json.dumps(own))
    target = Target.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    shapes = []
    target.model.register_forward_pre_hook(
        lambda model, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    for kind in ("eager", "static"):
        shapes.clear()
        bench_decode.generating(target, kind, [[5, 6, 7, 8]], 8)()
        assert shapes == [(1, 4), *[(1, 1)] * 7]


@pytest.mark.parametrize("ahead", [False, True])
def test_scripted_steps_keep_what_the_script_says(ahead):
    target = load_target("llama", torch.float32)
    drafter = drafter_for(make_head(target, "medusa").eval(), target, 8)
    engine = DecodingEngine(target, drafter, accept=ScriptedAcceptance(drafter, 2.3, target.device), ahead=ahead)
    answer = engine.generate(list(range(3, 40)), GenerationSettings(60))
    assert answer.accept_lengths[1:-1] == (schedule(2.3) * 3)[: len(answer.accept_lengths) - 2]
