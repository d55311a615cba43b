"""What is told of a head, and of one that fits a target or does not."""

import json
import re
import shutil
import sys

from draft_heads.configs.command_line import exit_status

import pytest

from draft_heads.heads.checkpoint import load_head
from draft_heads.heads.ctc import CTCConfig, CTCHead
from draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from draft_heads.heads.medusa import MedusaConfig, MedusaHead
from draft_heads.inference.target.target import Target
from draft_heads.scripts import inspect_head
from tests.heads.small import disturbed

PROVENANCE = {
    "command": "python train/ctc.py --target t",
    "steps": 1200,
    "minutes": 9.5,
    "git_commit": "abc",
    "data": [{"name": "chats.jsonl", "fingerprint": "f00", "counts": {"rows": 2997, "trained_tokens": 283609}}],
    "metrics": {"eval_simulated_beta": 2.5, "eval_accuracy_1": 0.75, "eval_accuracy_2": 0.5},
}


def told(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["inspect_head.py", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "200")
    status = exit_status(inspect_head.run)
    captured = capsys.readouterr()
    return status, " ".join((captured.out + captured.err).split())


def test_everything_of_a_trained_head_is_told(tmp_path, monkeypatch, capsys):
    disturbed(CTCHead, CTCConfig, target="some/target", label_context=4).save_pretrained(tmp_path, PROVENANCE)
    status, text = told(monkeypatch, capsys, tmp_path)
    assert status == 0
    epochs = {**PROVENANCE, "epochs": 0.352}  # which older heads do not know
    disturbed(CTCHead, CTCConfig).save_pretrained(tmp_path / "new", epochs)
    assert "1,200 steps (0.352 epochs) in 9.5 minutes" in told(monkeypatch, capsys, tmp_path / "new")[1]
    for words in (
        *(
            "ctc, ",
            "some/target",
            "hidden_size 32",
            "label_context 4",
            "only this project's engine",
            "1,200 steps in 9.5 minutes, commit abc",
        ),
        *(
            "python train/ctc.py --target t",
            "2,997 rows with 283,609 answer tokens of chats.jsonl (fingerprint f00)",
            # offsets count from 0, as in accuracy.md
            "top-1 accuracy at offset 0: 0.75, top-1 accuracy at offset 1: 0.5, simulated β: 2.5",
        ),
    ):
        assert words in text, words


def test_minutes_that_no_schedule_counted_are_left_out(tmp_path, monkeypatch, capsys):
    disturbed(CTCHead, CTCConfig).save_pretrained(tmp_path, {**PROVENANCE, "minutes": 0.0})
    assert "1,200 steps, commit abc" in told(monkeypatch, capsys, tmp_path)[1]
    assert "1,200 steps on 2,997" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("changed", [False, True])
def test_whether_it_fits_a_target_is_told(tmp_path, monkeypatch, capsys, changed):
    target = Target.from_pretrained("tests/tiny_target", device="cpu")
    fingerprint = {**target.fingerprint(), **({"hidden_size": 7} if changed else {})}
    disturbed(MedusaHead, MedusaConfig, target_fingerprint=fingerprint).save_pretrained(tmp_path, {})
    _, text = told(monkeypatch, capsys, tmp_path, "--target", "tests/tiny_target")
    assert ("no: hidden_size 7 against" in text) == changed and "vllm-medusa (vLLM up to 0.32)" in text


def test_a_target_that_computes_otherwise_fits_as_a_fine_tune(tmp_path, monkeypatch, capsys):
    known = Target.from_pretrained("tests/tiny_target", device="cpu").fingerprint()
    other = {**known, "constants": {**known["constants"], "rms_norm_eps": 0.5}}
    disturbed(MedusaHead, MedusaConfig, target_fingerprint=other).save_pretrained(tmp_path, {})
    _, text = told(monkeypatch, capsys, tmp_path, "--target", "tests/tiny_target")
    assert "yes, as on a fine-tune: constants.rms_norm_eps 0.5 against" in text


def test_heads_without_a_history_are_told_of_too(tmp_path, monkeypatch, capsys, caplog):
    disturbed(MedusaHead, MedusaConfig).save_pretrained(tmp_path, {"imported_from": "elsewhere"})
    assert "read from elsewhere" in told(monkeypatch, capsys, tmp_path)[1]
    (tmp_path / "provenance.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "target_fingerprint": {}}))
    assert "no provenance.json says it" in told(monkeypatch, capsys, tmp_path, "--target", "tests/tiny_target")[1]
    (tmp_path / "provenance.json").write_text('{"command": "python tr')
    text = told(monkeypatch, capsys, tmp_path)[1]
    assert "no provenance.json says it" in text
    assert "provenance.json must be a JSON object; Unterminated" in caplog.text
    status, text = told(monkeypatch, capsys, tmp_path / "missing")
    assert status != 0 and "does not exist" in text


def test_each_commit_that_trained_a_head_is_told(tmp_path, monkeypatch, capsys):
    programs = [{"from_step": step, "git_commit": commit} for step, commit in enumerate(["aaa", "bbb", "bbb", "abc"])]
    disturbed(MedusaHead, MedusaConfig).save_pretrained(tmp_path, PROVENANCE | {"programs": programs})
    assert "commit aaa, then bbb, then abc" in told(monkeypatch, capsys, tmp_path)[1]


@pytest.mark.parametrize("settings,fits", [({}, "no, or if"), ({"rms_norm_eps": 2e-5}, "yes, as on a fine-tune")])
def test_another_chat_template_fits_with_other_weights_alone_as_when_the_head_is_loaded(
    tmp_path, monkeypatch, capsys, settings, fits
):
    shutil.copytree("tests/tiny_target", tmp_path / "target")
    made_for = Target.from_pretrained(str(tmp_path / "target"), device="cpu").fingerprint()
    disturbed(MedusaHead, MedusaConfig, target_fingerprint=made_for).save_pretrained(tmp_path / "head", {})
    config = tmp_path / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    other = Target.from_pretrained(str(tmp_path / "target"), device="cpu", chat_template="vicuna")
    asked = "--target", tmp_path / "target", "--chat_template", "vicuna"
    assert f"fits the target │ {fits}" in told(monkeypatch, capsys, tmp_path / "head", *asked)[1]
    if settings:
        load_head(str(tmp_path / "head"), other.fingerprint())
    else:
        with pytest.raises(ValueError, match="another chat template"):
            load_head(str(tmp_path / "head"), other.fingerprint())


def test_only_formats_that_hold_the_head_are_named(tmp_path, monkeypatch, capsys):
    disturbed(MedusaHead, MedusaConfig, target_layers=[1, 2]).save_pretrained(tmp_path / "medusa", {})
    disturbed(Eagle3Head, Eagle3Config, target_layers=[1]).save_pretrained(tmp_path / "eagle3", {})
    for kind, why in (("medusa", "no engine's Medusa reads several layers"), ("eagle3", "heads of three layers")):
        text = told(monkeypatch, capsys, tmp_path / kind)[1]
        assert f"none: {'' if kind == 'medusa' else 'engines read EAGLE-3 '}{why}" in text and "vLLM" not in text


@pytest.mark.parametrize("flag", ["--chat_template", "--target_adapter"])
def test_what_is_the_targets_is_refused_without_one(tmp_path, monkeypatch, capsys, flag):
    status, text = told(monkeypatch, capsys, tmp_path, flag, "vicuna")
    assert status == 2 and f"{flag} vicuna is for a --target; got none" in text


def test_a_head_fits_the_target_with_the_adapter_whose_chat_template_it_was_trained_on(tmp_path, monkeypatch, capsys):
    target = Target.from_pretrained("tests/tiny_target", device="cpu", chat_template="vicuna")
    adapter, head = tmp_path / "adapter", tmp_path / "head"
    target.tokenizer.save_pretrained(adapter)
    known = {"options": {"target_adapter": str(adapter)}}
    disturbed(MedusaHead, MedusaConfig, target_fingerprint=target.fingerprint()).save_pretrained(head, known)
    text = told(monkeypatch, capsys, head, "--target", "tests/tiny_target")[1]
    assert (
        "no, or if its weights are others, yes, as on a fine-tune: chat_template_hash" in text and str(adapter) in text
    )
    asked = "--target", "tests/tiny_target", "--target_adapter", adapter
    assert "fits the target │ yes" in told(monkeypatch, capsys, head, *asked)[1]


@pytest.mark.parametrize(
    "made_with, given, words",
    [
        ("a", (), "yes, as on a fine-tune: it was made with the adapter"),
        ("a", ("--target_adapter",), "yes; the weights are not compared, nor whether the two adapters are one"),
        ("b/adapter", ("--target_adapter",), "yes; the weights are not compared"),  # the same, in another folder
        (None, (), "yes; the weights are not compared"),
        (None, ("--target_adapter",), "yes, as on a fine-tune: it was made without an adapter"),
    ],
)
def test_a_head_of_another_adapter_fits_as_a_fine_tune(tmp_path, monkeypatch, capsys, made_with, given, words):
    target = Target.from_pretrained("tests/tiny_target", device="cpu")
    known, head = {"options": {"target_adapter": made_with}}, tmp_path / "head"
    disturbed(MedusaHead, MedusaConfig, target_fingerprint=target.fingerprint()).save_pretrained(head, known)
    target.tokenizer.save_pretrained(tmp_path / "adapter")
    given = [*given, tmp_path / "adapter"] if given else []
    text = told(monkeypatch, capsys, head, "--target", "tests/tiny_target", *given)[1]
    assert f" fits the target {words} " in re.sub(r"[^-\w:;,.]+", " ", text)


def test_large_figures_and_what_was_held_out_are_told(tmp_path, monkeypatch, capsys):
    amounts = {"trained": {"rows": 2933, "answer_tokens": 277000}, "held_out": {"rows": 64, "answer_tokens": 6609}}
    known = {**PROVENANCE, **amounts, "metrics": {"eval_windows": 1234567.0}}
    disturbed(CTCHead, CTCConfig).save_pretrained(tmp_path, known)
    text, card = told(monkeypatch, capsys, tmp_path)[1], (tmp_path / "README.md").read_text()
    data = "2,933 rows with 277,000 answer tokens of chats.jsonl (fingerprint f00), of which 64 more were held"
    assert "windows measured: 1,234,567" in text and data in text
    assert "| windows measured | 1,234,567 |" in card and data in card
