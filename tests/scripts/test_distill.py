"""The command line of scripts/distill.py."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from draft_heads.data.labels.distill import mark_trained
from draft_heads.data.labels.shards import load_distilled
from draft_heads.scripts import distill
from tests.tiny_chat import byte_tokenizer, save_target, template, write_sharegpt


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """--target and --dataset of a tiny target and eight conversations."""
    folder = tmp_path_factory.mktemp("given")
    source = write_sharegpt(folder / "chat.json", conversations=8)
    return ["--target", save_target(folder / "target"), "--dataset", source]


def test_command_writes_the_dataset_and_ends_with_a_summary(given, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert distill.main([*given, "--output", out, "--limit", "5"]) == 0
    printed = capsys.readouterr().out
    assert f"writes {out}/shard-*.arrow and {out}/manifest.json" in printed
    assert "text and label agree" in printed
    assert len(load_distilled(out).dataset) == 5


def test_it_says_what_of_the_targets_own_settings_is_applied(given, tmp_path, caplog, monkeypatch):
    """As the other commands do; labels depend on it."""
    monkeypatch.setattr(logging.getLogger("draft_heads.data.generation_config"), "level", logging.NOTSET)
    target = shutil.copytree(given[1], tmp_path / "target")
    (target / "generation_config.json").write_text('{"eos_token_id": 2, "repetition_penalty": 1.3}')
    assert distill.main(["--target", str(target), *given[2:], "--output", str(tmp_path / "out"), "--limit", "1"]) == 0
    assert "repetition_penalty=1.3" in caplog.text and "applied" in caplog.text


def test_config_gives_defaults_that_flags_override(given, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("labels: generate\nmax_new_tokens: 9\nlimit: 3\ncut_loops: true\nbatch_size: 2\n")
    args = distill.parse([*given, "--output", "o", "--config", str(config), "--limit", "2"])
    assert (args.labels, args.max_new_tokens, args.limit, args.cut_loops) == ("generate", 9, 2, True)
    assert distill.main([*given, "--output", str(tmp_path / "o"), "--config", str(config), "--limit", "2"]) == 0
    assert len(load_distilled(str(tmp_path / "o")).dataset) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_new_token: 5\nlimits: 3", "unknown limits, max_new_token; valid keys: target, dataset"),
        ("- a", "must map flags to values"),
    ],
)
def test_bad_config_lists_the_valid_keys(given, tmp_path, capsys, text, reason):
    config = tmp_path / "c.yaml"
    config.write_text(text)
    assert distill.main([*given, "--output", str(tmp_path / "o"), "--config", str(config)]) == 2
    assert reason in capsys.readouterr().err


def test_preview_prints_conversations_and_writes_nothing(given, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert distill.main([*given, "--preview", "2"]) == 0
    printed = capsys.readouterr().out
    assert "c1: " in printed and "c2: " not in printed
    assert "Turn 0 of 1" in printed and printed.count("⟦") == printed.count("⟧") > 2  # read without colours
    assert list(tmp_path.iterdir()) == []


def test_preview_marks_exactly_the_trained_tokens():
    tokenizer = byte_tokenizer(template("chatml"))
    ids = tokenizer("Hello there. I am fine", add_special_tokens=False)["input_ids"]
    split = len(tokenizer("Hello there.", add_special_tokens=False)["input_ids"])
    text = mark_trained(tokenizer, ids, [i >= split for i in range(len(ids))])
    assert text.plain == "Hello there.⟦ I am fine⟧"
    assert [(text.plain[span.start : span.end], str(span.style)) for span in text.spans] == [
        ("⟦ I am fine⟧", "black on green")
    ]


def test_preview_shows_signs_that_a_terminal_would_follow_or_drop():
    tokenizer = byte_tokenizer(template("chatml"))
    ids = tokenizer("a\r\x07\x1b[31m\tb\n", add_special_tokens=False)["input_ids"]
    assert mark_trained(tokenizer, ids, [False] * len(ids)).plain == "a\\r\\x07\\x1b[31m\tb\n"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max_length", "999"], "max_length 999 exceeds the target's 256 positions"),
        (["--batch_size", "0"], "--batch_size must be at least 1; got 0"),
        (
            ["--cut_loops", "false"],
            "--cut_loops is read with --labels generate only; got False with --labels argmax",
        ),
        (["--max_new_tokens", "3"], "--max_new_tokens is read with --labels generate only; got 3 with"),
        (["--labels", "generate", "--concurrency", "2"], "--concurrency is read with --engine openai only; got 2"),
        (["--labels", "generate", "--model_name", "x"], "--model_name is read with --engine openai only; got x"),
        (["--engine", "openai"], "--engine openai and --base_url URL go together"),
        (["--engine", "openai", "--base_url", "http://x"], "pass --labels generate with it"),
        (["--target", "nowhere", "--dataset", "chat.csv"], "received the .csv file chat.csv; write its rows as JSONL"),
        (["--target", "nowhere", "--dataset", "no.json.gz"], "no.json.gz does not exist"),  # before the target loads
        (["--target", "./nowhere", "--labels", "generate"], "./nowhere does not exist; give an existing folder"),
        (["--split", "test"], "split names a part of a dataset"),
        (["--dataset_config", "all"], "dataset_config names a part of a dataset"),
        (["--hidden_states", "int8"], "--hidden_states must be one of target, "),
    ],
)
def test_wrong_flags_end_in_a_sentence(given, tmp_path, capsys, flags, reason):
    assert distill.main([*given, "--output", str(tmp_path / "o"), *flags]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_missing_flags_are_named(capsys):
    assert distill.main(["--target", "x"]) == 2
    assert "--dataset is required; give it on the command line" in capsys.readouterr().err
    assert distill.main(["--target", "x", "--dataset", "y"]) == 2
    assert "--output is required but for --preview" in capsys.readouterr().err


def test_left_out_rows_are_listed_in_the_summary(given, tmp_path, capsys):
    source = tmp_path / "chat.jsonl"
    rows = json.loads(Path(given[3]).read_text())[:2]
    source.write_text("\n".join(["{", *map(json.dumps, rows)]))
    flags = ["--target", given[1], "--dataset", str(source), "--output", str(tmp_path / "o"), "--skip_bad_rows"]
    assert distill.main([*flags, "--max_length", "36"]) == 0
    printed = capsys.readouterr().out
    assert "1 row dropped: malformed JSON (line 1)" in printed
    assert "line 3 (id c1): its first answer begins beyond max_length 36" in printed


def test_a_setting_without_a_value_is_refused_where_the_bare_flag_means_something(tmp_path):
    """A manifest copied into YAML says null, of what was off."""
    config = tmp_path / "c.yaml"
    given = ["--target", "t", "--dataset", "d", "--output", "o"]
    for written in ("hidden_states:\n", "hidden_states: null\n", "hidden_states: ~\n"):
        config.write_text(written)
        with pytest.raises(ValueError, match="hidden_states without a value could mean the flag alone, which is 'targ"):
            distill.parse([*given, "--config", str(config)])
    config.write_text("hidden_states: target\nlimit: null\n")
    parsed = distill.parse([*given, "--config", str(config)])
    assert parsed.hidden_states == "target" and parsed.limit is None
    assert distill.parse([*given, "--hidden_states"]).hidden_states == "target"
    assert distill.parse(given).hidden_states is None
