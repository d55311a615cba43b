"""Options: recipes by target size, unknown names, and settings refused where they are declared."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, TrainingArguments

from draft_heads.configs.recipes import SIZE_CLASSES, load_recipe, recipe_names
from draft_heads.data.common.processes import Processes, trains_on_gpu
from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.heads.ctc import CTCConfig
from draft_heads.train.command import answer_help
from draft_heads.train.recipe import has_gpu, sized_recipe
from draft_heads.train.run_folder import check_same_steps
from draft_heads.train.training_arguments import defaults_beside, options_parser, parse_options

TARGET = "tests/tiny_target"
GIVEN = ("--target", TARGET, "--dataset", "d", "--output_dir", "r")


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        parse_options(CTCConfig, [*GIVEN, *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_the_recipe_of_the_targets_size_is_the_default_and_flags_override_it():
    run, head, training = parse_options(
        CTCConfig,
        [*GIVEN, "--labels", "3", "--learning_rate", "5e-4", "--use_cpu", "true"],
    )
    recipe = load_recipe("ctc", "tiny")
    assert head["frames"] == recipe["frames"] and head["labels"] == 3
    assert training.learning_rate == 5e-4 and training.max_minutes == recipe["max_minutes"]
    assert run.held_out == recipe["held_out"]


def test_a_command_without_a_launcher_tells_which_gpus_it_leaves_idle(monkeypatch, caplog):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 1 if self.__dict__.get("_n_gpu") == 1 else 8))
    _, _, training = parse_options(CTCConfig, [*GIVEN, "--use_cpu", "--max_steps", "5"])
    assert training.__dict__["_n_gpu"] == 1 and "one of 8 GPUs is used" in caplog.text
    assert "`torchrun --nproc_per_node 8`" in caplog.text


@pytest.mark.parametrize(
    "given, minutes",
    [
        (["--max_steps", "5"], 0),
        (["--num_train_epochs", "3"], 0),
        ([], 15),
    ],
)
def test_steps_or_epochs_asked_for_replace_the_minutes_of_the_recipe(given, minutes):
    _, _, training = parse_options(CTCConfig, [*GIVEN, "--use_cpu", *given])
    assert training.max_minutes == minutes


@pytest.mark.parametrize(
    "given", [["--max_steps", "5"], ["--num_train_epochs", "2"], ["--max_steps", "5", "--num_train_epochs", "2"]]
)
def test_a_run_has_one_end(capsys, tmp_path, given):
    assert "got --max_minutes 2 and --" in refused(capsys, *given, "--max_minutes", "2")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("max_minutes: 2\nmax_steps: 5\n")
    told = refused(capsys, "--config", str(recipe))
    assert f"--config {recipe}: a run ends by time or by steps" in told and "--max_minutes 2 and --max_steps 5" in told
    recipe.write_text("max_minutes: 2\n")
    assert parse_options(CTCConfig, [*GIVEN, "--use_cpu", "--config", str(recipe), *given])[2].max_minutes == 0


def test_minutes_asked_for_replace_the_steps_or_epochs_of_the_recipe():
    given = [*GIVEN, "--use_cpu", "--config", "8b", "--max_minutes", "2"]
    _, _, training = parse_options(CTCConfig, [*given, "--bf16", "false"])
    assert (training.max_minutes, training.max_steps, training.num_train_epochs) == (2, -1, 1e6)
    for given in ([], ["--max_minutes", "5"]):  # of the recipe `tiny`, few rows have many epochs in that time
        assert parse_options(CTCConfig, [*GIVEN, "--use_cpu", *given])[2].num_train_epochs == 1e6


def test_the_batch_asked_for_replaces_the_tokens_of_the_recipe():
    given = [*GIVEN, "--use_cpu", "--config", "8b", "--bf16", "false"]
    assert parse_options(CTCConfig, given)[2].tokens_per_batch > 0
    assert parse_options(CTCConfig, [*given, "--per_device_train_batch_size", "2"])[2].tokens_per_batch == 0


def test_a_config_may_name_the_target_and_flags_replace_its_steps(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"target: {TARGET}\ndataset: [d]\noutput_dir: r\nmax_steps: 50\n")
    run, _, training = parse_options(CTCConfig, ["--config", str(recipe), "--use_cpu"])
    assert run.target == TARGET and training.max_steps == 50
    _, _, training = parse_options(CTCConfig, ["--config", str(recipe), "--use_cpu", "--num_train_epochs", "3"])
    assert (training.max_steps, training.num_train_epochs) == (-1, 3)


def test_muon_is_taken_where_no_other_optimizer_is_asked_for():
    given = [*GIVEN, "--use_cpu", "--head_optimizer", "auto"]
    assert parse_options(CTCConfig, given)[2].head_optimizer == "muon"
    for other in ("adafactor", "adamw_torch"):
        assert parse_options(CTCConfig, [*given, "--optim", other])[2].head_optimizer == "adamw"
    of_the_recipe = [*GIVEN, "--use_cpu", "--optim", "adamw_torch_fused"]
    assert parse_options(CTCConfig, of_the_recipe)[2].head_optimizer == "adamw"


@pytest.mark.parametrize(
    "kind, flags, rate",
    [
        ("ctc", "--deepspeed configs/deepspeed/zero2.json", 3.2e-3),  # 1e-4 · 4096 / 128
        ("ctc", "--deepspeed configs/deepspeed/zero2.json --learning_rate 0.5", 0.5),
        ("medusa", "--optim adamw_torch", 3.2e-2),
        ("eagle3", "--config 1b-cpu --head_optimizer adamw", 1e-3),  # 5e-4 · 4096 / 2048
        ("eagle3", "--config 1b-cpu", 1.2e-2),
        ("eagle3", "--config 8b", 5e-4),
    ],
)
def test_adamw_has_no_learning_rate_of_muon(capsys, tmp_path, kind, flags, rate):
    text = printed_recipe(capsys, *GIVEN, "--use_cpu", *flags.split(), kind=kind)
    assert yaml.safe_load(text)["learning_rate"] == rate and text.count("learning_rate:") == 1
    assert ("for muon, the optimizer is adamw" in text) == (rate in (3.2e-3, 3.2e-2, 1e-3))
    (tmp_path / "same.yaml").write_text(text)
    again = printed_recipe(capsys, "--config", str(tmp_path / "same.yaml"), kind=kind)
    assert yaml.safe_load(again) == yaml.safe_load(text) and "give another" not in again


def test_what_ones_own_file_lacks_of_the_recipe_is_told(capsys, tmp_path):
    text, whole = printed_recipe(capsys, *GIVEN, "--use_cpu"), tmp_path / "whole.yaml"
    whole.write_text(text)
    assert "it replaces" not in printed_recipe(capsys, "--config", str(whole))
    told = printed_recipe(capsys, "--config", str(whole), "--head_optimizer", "adamw")
    assert "its learning rate 0.012 is for muon, the optimizer is adamw: give another as --learning_rate" in told
    whole.write_text("".join(line for line in text.splitlines(True) if not line.startswith(("held_out", "eval_steps"))))
    told = printed_recipe(capsys, "--config", str(whole), "--max_steps", "9")  # whose minutes the steps replace
    assert "whole.yaml; it replaces the recipe ctc/tiny, of which it lacks eval_steps, held_out: they have" in told


@pytest.mark.parametrize("kind", HEADS)
def test_every_recipe_parses(kind):
    config = head_classes(kind)[1]
    for recipe in recipe_names(kind):
        arguments = [*GIVEN, "--config", recipe, "--bf16", "false", "--use_cpu", "true"]
        run, head, training = parse_options(config, arguments)
        config(**head)
        assert training.max_grad_norm == 0.5
        assert not run.packing  # several conversations a row need a dense mask in the target's forward
        if recipe in {name for _, name in SIZE_CLASSES[1:]}:
            assert training.tokens_per_batch >= run.max_length > 0


def test_the_ctc_papers_own_settings_are_a_recipe_by_name():
    arguments = [*GIVEN, "--config", "paper", "--bf16", "false", "--use_cpu", "true"]
    run, head, training = parse_options(CTCConfig, arguments)
    literal = {"context": "hidden", "labels_cut": "none", "anchors": 0, "draft_vocab_size": 0}
    assert {name: head[name] for name in literal} == literal
    assert (head["label_context"], head["target_layers"]) == (0, [])
    assert (training.learning_rate, training.max_grad_norm, training.clip) == (3e-5, 0.5, "norm")
    assert run.max_length == 2048 and not run.packing


def test_a_recipe_of_another_head_is_refused(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(load_recipe("chimera", "tiny")))
    assert "unknown ce_weight, encoder, heads" in refused(capsys, "--config", str(tmp_path / "r.yaml"))


DENSE = {  # hidden, intermediate, layers, heads of a published size in each class
    "1b": (2048, 8192, 16, 32),
    "8b": (4096, 14336, 32, 32),
    "14b": (5120, 17408, 40, 40),
    "70b": (8192, 28672, 80, 64),
}
EXPERTS = {  # hidden, intermediate of an expert, layers, heads, experts
    "1b": (1024, 512, 16, 16, 16),
    "14b": (2880, 2880, 24, 64, 32),
    "32b": (2048, 768, 48, 32, 128),
    "70b": (6144, 16384, 56, 48, 8),
}


FAMILIES = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"), DENSE)
FAMILIES |= dict.fromkeys(("gpt_oss", "mixtral", "qwen3_moe"), EXPERTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_the_recipe_of_its_size(tmp_path, family):
    parser = options_parser(CTCConfig)
    for size, (hidden, inner, layers, heads, *experts) in FAMILIES[family].items():
        text = {"model_type": family, "vocab_size": 128256, "hidden_size": hidden, "intermediate_size": inner}
        text |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
        text |= {"pad_token_id": 0, "rope_scaling": None}
        if experts:
            text |= {"num_local_experts": experts[0], "num_experts": experts[0], "moe_intermediate_size": inner}
        if family == "gemma3":  # the text model of a multimodal checkpoint
            text = {"model_type": family, "text_config": text | {"model_type": "gemma3_text"}}
        (tmp_path / "config.json").write_text(json.dumps(text))
        recipe = sized_recipe("ctc", AutoConfig.from_pretrained(tmp_path), parser)
        assert recipe.line.startswith(f"ctc/{size}, by the ")
        assert recipe.settings["anchors"] == load_recipe("ctc", size)["anchors"]


@pytest.mark.parametrize(("given", "left"), [({}, True), ({"fp16": True}, None), ({"fp16": False}, True)])
def test_the_other_half_precision_replaces_that_of_the_recipe(given, left):
    parser = options_parser(CTCConfig)
    recipe = sized_recipe("ctc", AutoConfig.for_model("llama", num_hidden_layers=36), parser, gpu=True)
    assert recipe.settings["bf16"] is True
    assert defaults_beside(given, recipe, parser).get("bf16") is left


def test_a_target_of_a_size_that_trains_without_a_gpu_gets_the_recipe_for_that():
    parser = options_parser(CTCConfig)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    config = AutoConfig.for_model("llama", **shape, num_attention_heads=9, num_key_value_heads=3)
    with_gpu, without = (sized_recipe("ctc", config, parser, gpu) for gpu in (True, False))
    assert with_gpu.line.startswith("ctc/1b, by the ") and with_gpu.settings["bf16"]
    assert re.fullmatch(r"ctc/1b-cpu, by the .* config, without a GPU \(with one: --config 1b\)", without.line)
    assert "bf16" not in without.settings and without.settings["max_minutes"] > 0
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 36, 4096, 12288
    for_a_gpu = sized_recipe("ctc", config, parser, gpu=False)
    assert for_a_gpu.line.startswith("ctc/8b, by the ") and for_a_gpu.line.endswith(
        "none is used here: without its bf16, and slow"
    )
    assert "bf16" not in for_a_gpu.settings and "bf16:" not in for_a_gpu.text(for_a_gpu.settings, {})


def test_the_recipe_taken_is_printed_and_a_bundled_one_is_named_from_any_folder(tmp_path, monkeypatch, capsys):
    for name in ("own target", "adapter"):
        shutil.copytree(TARGET, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    arguments = ["--target", "own target", "--dataset", "d", "--output_dir", "r", "--bf16", "false"]
    parse_options(CTCConfig, arguments)
    assert re.fullmatch(
        r"recipe: ctc/tiny, by the \d\.\d M parameters of the target's config\n", capsys.readouterr().out
    )
    run, _, training = parse_options(CTCConfig, [*arguments, "--config", "vicuna-7b"])
    assert training.learning_rate == 3e-5
    assert run.chat_template is None and "vicuna is left out, the tokenizer has its own" in capsys.readouterr().out
    run = parse_options(CTCConfig, [*arguments, "--config", "vicuna-7b", "--chat_template", "llama-2"])[0]
    assert run.chat_template == "llama-2"
    (tmp_path / "own target" / "chat_template.jinja").unlink()
    run = parse_options(CTCConfig, [*arguments, "--config", "vicuna-7b"])[0]
    assert run.chat_template == "vicuna"
    run = parse_options(CTCConfig, [*arguments, "--config", "vicuna-7b", "--target_adapter", "adapter"])[0]
    assert run.chat_template is None  # the adapter's own counts, as in decoding
    with pytest.raises(SystemExit):
        parse_options(CTCConfig, [*arguments, "--config", "vicuna-8b"])
    told = capsys.readouterr().err
    assert "neither a file nor a bundled recipe; pass a YAML file or one of tiny, 1b-cpu, 1b, " in told


def printed_recipe(capsys, *arguments, kind="ctc"):
    with pytest.raises(SystemExit) as stopped:
        parse_options(head_classes(kind)[1], [*arguments, "--print_recipe"])
    assert stopped.value.code in (0, None)
    return capsys.readouterr().out


def test_print_recipe_needs_no_target_and_names_the_memory(capsys):
    text = printed_recipe(capsys, "--config", "8b")
    assert yaml.safe_load(text) == load_recipe("ctc", "8b")
    flat = " ".join(text.replace("# ", "").split())
    assert "of about this size: 35 GiB on 1 GPU; 35 / 33 / 33 / 32 GiB on each of 8 at ZeRO 0 / 1 / 2 / 3" in flat
    assert "the target in bfloat16, 15 GiB, is whole on every GPU" in flat and "# sizes.yaml, 8b\n" in text
    split = " ".join(printed_recipe(capsys, "--config", "8b", "--shard_target", "true").replace("# ", "").split())
    assert "35 GiB on 1 GPU; 25 / 23 / 22 / 22 GiB" in split
    assert "15 GiB, is split among the 8, but for what heads read)" in split
    assert "156 GiB on 1 GPU; 156 / 146 / 145 / 143 GiB" in printed_recipe(capsys, "--config", "70b")
    assert "44 GiB on 1 GPU; 44 / 32 / 30 / 28 GiB" in printed_recipe(capsys, "--config", "8b", kind="hydra")
    assert "--target must have a value; got none" in refused(capsys, "--target", "", "--print_recipe")


def test_print_recipe_of_a_target_is_what_its_run_takes(capsys, tmp_path):
    given = ["--config", "vicuna-7b", "--bf16", "false", "--max_minutes", "3", "--lr_scheduler_type", "linear"]
    text = printed_recipe(capsys, *GIVEN, *given)
    settings = yaml.safe_load(text)
    assert "chat_template" not in settings and "num_train_epochs" not in settings  # the tokenizer has one; minutes
    assert settings["max_minutes"] == 3 and settings["bf16"] is False and settings["lr_scheduler_type"] == "linear"
    assert "# Memory for tests/tiny_target: " in text
    assert text.index("# ctc.yaml, papers") < text.index("# command line\n")
    (tmp_path / "same.yaml").write_text(text)
    runs = [parse_options(CTCConfig, a) for a in ([*GIVEN, *given], ["--config", str(tmp_path / "same.yaml")])]
    assert runs[0][:2] == runs[1][:2]
    same, again = (run[2].to_dict() for run in runs)
    assert same == again
    assert yaml.safe_load(runs[0][2].recipe) == yaml.safe_load(runs[1][2].recipe) == settings


def test_a_recipes_draft_vocabulary_is_left_out_for_smaller_vocabularies(tmp_path):
    config = json.loads(Path(TARGET, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 2048, "intermediate_size": 8192}))
    _, head, _ = parse_options(
        CTCConfig, ["--target", str(tmp_path), "--dataset", "d", "--output_dir", "r", "--bf16", "false"]
    )
    assert head["draft_vocab_size"] == 0


def test_an_unknown_name_in_a_recipe_is_refused(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("framez: 3\n")
    assert "unknown framez" in refused(capsys, "--config", str(tmp_path / "r.yaml"))
    (tmp_path / "r.yaml").write_text("max_length:\n")
    assert "max_length has no value; give one, or delete the line" in refused(
        capsys, "--config", str(tmp_path / "r.yaml")
    )


def test_a_recipe_that_is_no_mapping_is_refused(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("- 1\n")
    assert "must map flags" in refused(capsys, "--config", str(tmp_path / "r.yaml"))
    assert "neither a file nor a bundled recipe" in refused(capsys, "--config", str(tmp_path / "missing.yaml"))


@pytest.mark.parametrize(
    "arguments,told",
    [
        (["--frames", "3", "--labels", "4"], "2*labels-1"),
        (["--frams", "3"], "unknown flag --frams; did you mean --frames?"),
        (["--target", "data/nothing"], "--target data/nothing does not exist"),
        (["--target", "tests/tiny_target/config.json"], "config.json is a file"),
        (["--clip", "both"], "--clip must be norm or value"),
        (["--max_minutes", "-1"], "--max_minutes"),
        (["--gradient_checkpointing", "true"], "--gradient_checkpointing is not for heads"),
        (["--patience", "1", "--eval_strategy", "no"], "--patience 1 counts evaluations, got --eval_strategy no"),
        (["--save_only_model", "true"], "--save_only_model leaves the optimizer out of checkpoints"),
        (["--max_minutes", "1", "--eval_steps", "0.2"], "--eval_steps must be a number of steps with --max_minutes"),
        (["--held_out", "0"], "--held_out"),
        (["--output_dir", ""], "--output_dir must have a value; got none"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--data_seed", "99999999999999999999"], "--data_seed must be at least 0 and below 2^32"),
        (["--adam_beta1", "1.5"], "--adam_beta1 must be at least 0 and below 1; got 1.5"),
        (["--dataloader_num_workers", "2", "--dataloader_prefetch_factor", "0"], "_factor must be at least 1; got 0"),
        (
            ["--torch_compile_mode", "max_autotune"],
            "--torch_compile_mode must be default, reduce-overhead",
        ),
        (["--eval_steps", "-1"], "--eval_steps must be above 0; got -1"),
        (["--save_steps", "0"], "--save_steps must be above 0; got 0"),
        (["--save_total_limit", "-3"], "--save_total_limit must be at least 2, got -3"),
        (["--warmup_steps", "nan"], "--warmup_steps must be 0 or more; got nan"),
        (["--simulate_rows", "-1"], "--simulate_rows must be at least 0; got -1"),
        (["--dataloader_num_workers", "-1"], "--dataloader_num_workers must be 0 or more"),
        (["--num_train_epochs", "inf"], "--num_train_epochs must be a number above 0; got inf"),
        (["--lr_scheduler_kwargs", '{"x": 2}'], "kwargs {'x': 2} make no schedule: get_cosine_schedule"),
        (["--lr_scheduler_kwargs", "[1]"], "--lr_scheduler_kwargs must be a JSON object"),
        (["--lr_scheduler_type", "cosine_with_min_lr"], "--lr_scheduler_type cosine_with_min_lr make no schedule"),
        (["--max_minutes", "1", "--lr_scheduler_type", "greedy"], "make no schedule: --max_minutes needs a schedule"),
        (
            ["--lr_scheduler_type", "inverse_sqrt", "--lr_scheduler_kwargs", '{"timescale": 50}'],
            "{'timescale': 50} make no schedule: timescale must be a number of steps, which a run of --max_minutes",
        ),
        (["--max_length", "3"], "--max_length"),
        (["--target_dtype", "int8"], "--target_dtype"),
        (["--simulate_nodes", "0"], "--simulate_nodes"),
        (["--optim", "galore_adamw"], "--optim must be one of adamw_torch_fused, adamw_torch, adafactor"),
        (["--report_to", "wandb"], "--report_to must be none or one of "),
        (["--max_grad_norm", "-1"], "--max_grad_norm must be 0 or more; got -1.0"),
        (["--eval_strategy", "steps", "--eval_delay", "nan"], "--eval_delay must be 0 or more; got nan"),
        (["--deepspeed", "missing.json"], "--deepspeed missing.json cannot be read"),
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


@pytest.mark.parametrize("found, gpu", [(None, False), ("cuda", True), ("xpu", True), ("mps", False)])
def test_a_mac_trains_on_its_cpu(monkeypatch, found, gpu):
    """Its GPU has no float64, in which losses are added up."""
    device = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    assert trains_on_gpu() == has_gpu({}) == gpu and not has_gpu({"use_cpu": True})
    if not gpu:
        assert parse_options(CTCConfig, [*GIVEN, "--config", "1b-cpu"])[2].use_cpu


def test_the_steps_at_which_processes_wait_for_each_other_are_compared(monkeypatch):
    told = []
    monkeypatch.setattr(Processes, "check_same", lambda self, given: told.append(given))
    run, _, training = parse_options(CTCConfig, [*GIVEN, "--use_cpu", "--logging_steps", "7", "--simulate_rows", "3"])
    check_same_steps(run, training)
    assert told[0]["logging_steps"] == 7 and told[0]["simulate_rows"] == 3
    assert {"save_steps", "save_strategy", "eval_steps", "eval_strategy", "eval_delay"} <= told[0].keys()
    assert not {"output_dir", "seed", "log_level"} & told[0].keys()
