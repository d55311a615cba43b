"""Options: recipes by target size, unknown names, and settings refused where they are declared."""

import subprocess
import sys

import pytest
import yaml

from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.heads.ctc import CTCConfig
from draft_heads.train.command import answer_help
from draft_heads.train.options import RECIPES, recipe_for
from draft_heads.train.training_arguments import parse_options

TARGET = "data/tiny_target"


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        parse_options(CTCConfig, ["--target", TARGET, "--dataset", "d", *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_the_recipe_of_the_targets_size_is_the_default_and_flags_override_it():
    run, head, training = parse_options(
        CTCConfig,
        ["--target", TARGET, "--dataset", "d", "--labels", "3", "--learning_rate", "5e-4", "--use_cpu", "true"],
    )
    recipe = yaml.safe_load((RECIPES / "ctc" / "tiny.yaml").read_text())
    assert head["frames"] == recipe["frames"] and head["labels"] == 3
    assert training.learning_rate == 5e-4 and training.max_minutes == recipe["max_minutes"]
    assert run.held_out == recipe["held_out"]


@pytest.mark.parametrize("kind", HEADS)
def test_every_recipe_parses(tmp_path, kind):
    config = head_classes(kind)[1]
    recipes = sorted((RECIPES / kind).glob("*.yaml"))
    sizes = {"tiny", "vicuna-7b", "vicuna-13b", "vicuna-33b", "llama2-chat-7b", "llama2-chat-13b"}
    assert {path.stem for path in recipes} - {"published-code"} == sizes
    for recipe in recipes:
        arguments = [
            "--target",
            TARGET,
            "--dataset",
            "d",
            "--config",
            str(recipe),
            "--bf16",
            "false",
            "--use_cpu",
            "true",
        ]
        _, head, training = parse_options(config, [*arguments, "--output_dir", str(tmp_path)])
        config(**head)
        assert training.max_grad_norm == 0.5


def test_a_recipe_of_another_head_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        recipe = str(RECIPES / "chimera" / "tiny.yaml")
        parse_options(CTCConfig, ["--target", TARGET, "--dataset", "d", "--config", recipe])
    assert "residual" in capsys.readouterr().err


def test_large_targets_get_the_papers_recipes(monkeypatch):
    from transformers import LlamaConfig

    sizes = {
        "lmsys/vicuna-7b-v1.3": LlamaConfig(),
        "lmsys/vicuna-13b-v1.3": LlamaConfig(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40),
        "lmsys/vicuna-33b-v1.3": LlamaConfig(hidden_size=6656, intermediate_size=17920, num_hidden_layers=60),
        "meta-llama/Llama-2-7b-chat-hf": LlamaConfig(),
    }
    monkeypatch.setattr("draft_heads.train.options.AutoConfig.from_pretrained", sizes.__getitem__)
    names = [recipe_for("ctc", target).stem for target in sizes]
    assert names == ["vicuna-7b", "vicuna-13b", "vicuna-33b", "llama2-chat-7b"]


def test_an_unknown_name_in_a_recipe_is_refused(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("framez: 3\n")
    assert "unknown framez" in refused(capsys, "--config", str(tmp_path / "r.yaml"))


def test_a_recipe_that_is_no_mapping_is_refused(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("- 1\n")
    assert "must map flags" in refused(capsys, "--config", str(tmp_path / "r.yaml"))
    assert "cannot be read" in refused(capsys, "--config", str(tmp_path / "missing.yaml"))


@pytest.mark.parametrize(
    "arguments,told",
    [
        (["--frames", "3", "--labels", "4"], "2*labels-1"),
        (["--frams", "3"], "unknown flag --frams; did you mean --frames?"),
        (["--target", "data/nothing"], "--target data/nothing does not exist"),
        (["--target", "data/tiny_target/config.json"], "config.json is a file"),
        (["--clip", "both"], "--clip must be norm or value"),
        (["--max_minutes", "-1"], "--max_minutes"),
        (["--held_out", "0"], "--held_out"),
        (["--max_length", "3"], "--max_length"),
        (["--target_dtype", "int8"], "--target_dtype"),
        (["--simulate_nodes", "0"], "--simulate_nodes"),
    ],
)
def test_values_out_of_range_name_their_flag(capsys, arguments, told):
    assert told in refused(capsys, *arguments)


def test_help_has_our_flags_first_and_comes_without_transformers_trainer():
    command = [sys.executable, "-X", "importtime", "train/ctc.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    flags = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  --")]
    places = [flags.index(f"--{flag}") for flag in ("dataset", "frames", "output_dir", "max_minutes")]
    assert places == sorted(places) and "--adam_beta1" not in done.stdout
    assert "transformers.training_args" not in done.stderr and "torch" in done.stderr


def test_help_all_lists_every_flag_of_transformers(capsys):
    with pytest.raises(SystemExit):
        answer_help("ctc", ["--help_all"])
    told = capsys.readouterr().out
    assert told.index("--frames") < told.index("--adam_beta1")
