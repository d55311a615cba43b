"""transformers' TrainingArguments as flags: each is read, refused by name, or not offered."""

import re
import sys
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from transformers import TrainingArguments

from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.heads.chimera import ChimeraConfig
from draft_heads.heads.ctc import CTCConfig
from draft_heads.train.inherited import DECIDE, EVALUATE, FREE, NO_EFFECT, READ, REFUSED
from draft_heads.train.options import RunOptions, TrainingOptions
from draft_heads.train.training_arguments import HeadTrainingArguments, parse_options, transformers_help
from tests.train.runs import run

TARGET = "tests/tiny_target"
GIVEN = ("--target", TARGET, "--dataset", "d", "--output_dir", "r", "--use_cpu")

NOT_OFFERED = {
    *("average_tokens_across_devices", "batch_eval_metrics", "debug", "eval_accumulation_steps"),
    *("eval_do_concat_batches", "eval_use_gather_object", "hub_always_push", "hub_model_id", "hub_private_repo"),
    *("hub_revision", "hub_strategy", "hub_token", "include_for_metrics", "include_num_input_tokens_seen"),
    *("label_names", "length_column_name", "liger_kernel_config", "log_on_each_node", "logging_nan_inf_filter"),
    *("prediction_loss_only", "project", "remove_unused_columns", "restore_callback_states_from_checkpoint"),
    *("save_on_each_node", "skip_memory_metrics", "trackio_bucket_id", "trackio_space_id"),
    *("trackio_static_space_id", "use_cache"),
}
"""Unknown flags: nothing on the way of a head's training reads them, or the trainer sets them itself."""


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        parse_options(CTCConfig, [*GIVEN, *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_every_field_of_transformers_is_read_refused_or_not_offered():
    names = [f.name for f in fields(TrainingArguments)]
    tables = (READ, REFUSED, NOT_OFFERED)
    assert [name for name in names if not any(name in table for table in tables)] == []  # decide about a new one
    assert len({*READ, *REFUSED, *NOT_OFFERED}) == sum(map(len, tables))


def test_a_flag_either_decides_what_is_learned_or_may_change_when_a_run_is_resumed():
    assert len(READ) == len(DECIDE) + len(EVALUATE) + len(FREE)


def test_help_lists_the_flags_that_are_read_and_no_other():
    listed = set(re.findall(r"^  --(\w+)", transformers_help(), re.MULTILINE))
    assert set(READ) <= listed and not listed & {*REFUSED, *NOT_OFFERED}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_flag_is_answered_with_its_reason(capsys, tmp_path, name):
    assert f"error: --{name} {REFUSED[name]}; leave it out" in refusal(capsys, f"--{name}", "1")
    dashes = f"--{name.replace('_', '-')}=x"
    assert f"--{name} {REFUSED[name]}" in refusal(capsys, dashes)
    (tmp_path / "r.yaml").write_text(f"{name}: 1\n")
    assert f"--{name} {REFUSED[name]}" in refusal(capsys, "--config", str(tmp_path / "r.yaml"))


def test_a_flag_that_is_not_offered_is_unknown(capsys):
    for name in NOT_OFFERED:
        assert f"unknown flag --{name}" in refusal(capsys, f"--{name}", "1")


BY_ITSELF = {  # TrainingArguments acts on these when it is made, or hands them on through a method
    *("tf32", "log_level", "log_level_replica", "ddp_backend", "ddp_timeout", "use_cpu", "local_rank", "deepspeed"),
    *("bf16", "fp16", "disable_tqdm", "report_to", "torch_compile", "warmup_steps"),
}
BY_REPORTERS = {"run_name"}  # of those that --report_to names; here none


def test_a_flag_that_is_said_to_be_read_is_read(dataset, tmp_path, monkeypatch):
    """Records which modules look at an attribute of TrainingArguments during a run."""
    readers = defaultdict(set)
    read = TrainingArguments.__getattribute__

    def recorded(self, name):
        readers[name].add("/".join(Path(sys._getframe(1).f_code.co_filename).parts[-2:]))
        return read(self, name)

    monkeypatch.setattr(TrainingArguments, "__getattribute__", recorded)
    flags = "--eval_strategy steps --eval_steps 3 --load_best_model_at_end true --save_steps 3 --eval_on_start true"
    status, told = run(dataset, tmp_path / "run", *flags.split())
    assert status == 0, told
    checks = {"transformers/training_args.py", "train/options.py", "train/inherited.py"}
    assert {name for name in READ if not readers[name] - checks} <= BY_ITSELF | BY_REPORTERS


@pytest.mark.parametrize(
    "arguments, cause",
    [
        ("--optim adamw_torch --head_optimizer muon", "--head_optimizer muon: Muon is the optimizer"),
        ("--adam_epsilon 1e-3 --optim sgd --head_optimizer adamw", "--optim sgd: it has none"),
        ("--adam_beta2 0.9 --optim adafactor", "--optim adafactor"),
        ("--dataloader_drop_last --tokens_per_batch 900", "--tokens_per_batch 900: batches hold every row"),
        ("--per_device_train_batch_size 2 --tokens_per_batch 900", "--tokens_per_batch 900"),
        ("--eval_steps 5 --eval_strategy no", "--eval_strategy no: nothing is evaluated"),
        ("--eval_steps 5 --eval_strategy epoch", "--eval_strategy epoch: it counts no steps"),
        ("--save_steps 5 --save_strategy epoch", "--save_strategy epoch: it counts no steps"),
        ("--logging_steps 5 --logging_strategy no", "--logging_strategy no: it counts no steps"),
        (
            "--save_strategy epoch --patience 2 --eval_strategy steps",
            "--save_strategy epoch has no effect with --patience 2: it saves at every evaluation",
        ),
        (
            "--load_best_model_at_end false --patience 2 --eval_strategy steps",
            "--load_best_model_at_end False has no effect with --patience 2: it exports the best",
        ),
        (
            "--load_best_model_at_end true --eval_strategy no --save_strategy no",
            "--eval_strategy no: no checkpoint is evaluated, so none is the best",
        ),
        ("--save_strategy best --eval_strategy no", "--eval_strategy no: nothing is evaluated, so nothing would be"),
        (
            "--save_steps 8 --load_best_model_at_end true --eval_strategy steps --eval_steps 4",
            "--save_steps 8.0 has no effect with --load_best_model_at_end True: it saves at every evaluation",
        ),
        ("--clip value --max_grad_norm 0", "--max_grad_norm 0.0: 0 turns clipping off"),
        ("--packing true --per_device_train_batch_size 1", "--per_device_train_batch_size 1: a row takes in"),
        (
            "--warmup_steps 5 --lr_scheduler_type constant --max_steps 9",
            "--lr_scheduler_type constant: it has no warm-up",
        ),
        ('--lr_scheduler_kwargs {"x":2} --lr_scheduler_type constant --max_steps 9', "constant: it has no settings"),
        ("--save_total_limit 3 --save_strategy no", "--save_strategy no: no checkpoint is saved"),
        ("--run_name mine --report_to tensorboard", "--report_to ['tensorboard']: runs have names in wandb, trackio,"),
        ("--metric_for_best_model accuracy_1", "--load_best_model_at_end False: the last checkpoint is exported"),
        ("--simulate_nodes 4 --simulate_rows 0", "--simulate_rows 0: nothing is simulated"),
        ("--dataloader_prefetch_factor 2 --dataloader_num_workers 0", "--dataloader_num_workers"),
    ],
)
def test_a_flag_without_effect_in_a_combination_is_refused(capsys, tmp_path, arguments, cause):
    words = arguments.split()
    told = refusal(capsys, *words)
    assert cause in told
    if words[0] == "--dataloader_prefetch_factor":
        return  # transformers says so itself
    assert f"{words[0]} " in told and " has no effect with " in told
    pairs = re.findall(r"--(\w+)(?: ([^-]\S*))?", arguments)
    (tmp_path / "r.yaml").write_text("".join(f"{name}: {value or 'true'}\n" for name, value in pairs))
    if len(pairs) == 2:  # of one file both; what the command line sets may overrule a line of it
        assert cause in refusal(capsys, "--config", str(tmp_path / "r.yaml"))
        (tmp_path / "r.yaml").write_text(f"{pairs[0][0]}: {pairs[0][1] or 'true'}\n")
        parse_options(CTCConfig, [*GIVEN, "--config", str(tmp_path / "r.yaml"), f"--{pairs[1][0]}", pairs[1][1]])


def test_packing_is_refused_beside_a_recipes_batches_of_one(capsys):
    told = refusal(capsys, "--config", "paper", "--bf16", "false", "--packing", "true")
    assert "--packing True has no effect with --per_device_train_batch_size 1" in told
    two = ["--config", "paper", "--bf16", "false", "--packing", "true", "--per_device_train_batch_size", "2"]
    assert parse_options(CTCConfig, [*GIVEN, *two])[0].packing


def test_flags_of_several_processes_are_refused_in_one(capsys, tmp_path):
    assert "--ddp_timeout 60 has no effect in one process; leave it out, or" in refusal(capsys, "--ddp_timeout", "60")
    (tmp_path / "r.yaml").write_text("ddp_timeout: 60\n")  # a file may be for both
    parse_options(CTCConfig, [*GIVEN, "--config", str(tmp_path / "r.yaml")])


@pytest.mark.parametrize("flags", ["--shard_target", "--target_device auto"])
def test_a_target_that_does_not_run_is_not_split(cached, tmp_path, flags):
    status, told = run(cached, tmp_path / "run", *flags.split())
    assert status != 0 and f"{flags} has no effect with cached hidden states, for which no target runs" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "kind, flags",
    [
        ("ctc", "--lr_scheduler_type constant --max_steps 9"),
        ("ctc", "--eval_strategy epoch --max_steps 9"),
        ("ctc", "--eval_strategy no --logging_strategy epoch --save_strategy epoch"),
        ("ctc", "--patience 2 --eval_steps 40"),
        ("ctc", "--load_best_model_at_end true --eval_steps 40 --max_steps 900"),
        ("ctc", "--load_best_model_at_end true --save_strategy best"),
        ("ctc", "--config paper --bf16 false --max_grad_norm 0"),
        ("ctc", "--config vicuna-7b --bf16 false --tokens_per_batch 4096"),
        ("ctc", "--config 8b --bf16 false --optim sgd"),
        ("ctc", "--labels 1"),
        ("medusa", "--heads 1"),
        ("chimera", "--encoder target_layer0_frozen"),
        ("eagle3", "--passes 1"),
    ],
)
def test_the_recipe_that_a_run_writes_is_one_that_it_may_be_given(tmp_path, kind, flags):
    config = head_classes(kind)[1]
    run, head, training = parse_options(config, [*GIVEN, *flags.split()])
    (tmp_path / "recipe.yaml").write_text(training.recipe)
    again, same_head, same = parse_options(config, ["--config", str(tmp_path / "recipe.yaml")])
    assert (again, same_head, same.to_dict()) == (run, head, training.to_dict())
    assert yaml.safe_load(same.recipe) == yaml.safe_load(training.recipe)


def test_a_files_name_of_the_run_stays_beside_a_reporter_that_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr("draft_heads.train.options.check_reporting", lambda names: None)  # wandb is not installed here
    (tmp_path / "own.yaml").write_text("run_name: mine\n")
    given = [*GIVEN, "--config", str(tmp_path / "own.yaml"), "--report_to"]
    assert parse_options(CTCConfig, [*given, "wandb"])[2].run_name == "mine"
    assert parse_options(CTCConfig, [*given, "tensorboard"])[2].run_name != "mine"


BEST = "metric_for_best_model: accuracy_2"


@pytest.mark.parametrize(
    "file, flags, metric",
    [
        (f"{BEST}\npatience: 2\neval_strategy: steps", "", "accuracy_2"),
        (f"{BEST}\neval_strategy: steps", "--patience 2", "accuracy_2"),
        (f"{BEST}\neval_strategy: steps\nload_best_model_at_end: true", "", "accuracy_2"),
        (f"{BEST}\npatience: 2\neval_strategy: steps", "--patience 0", None),  # which takes its effect away
        (f"{BEST}\npatience: 2\neval_strategy: steps", "--patience 0 --save_strategy best", "accuracy_2"),
    ],
)
def test_a_line_of_a_file_is_dropped_only_where_a_flag_takes_its_effect_away(tmp_path, file, flags, metric):
    (tmp_path / "r.yaml").write_text(f"{file}\nmax_steps: 6\n")
    training = parse_options(CTCConfig, [*GIVEN, "--config", str(tmp_path / "r.yaml"), *flags.split()])[2]
    assert training.metric_for_best_model == yaml.safe_load(training.recipe).get("metric_for_best_model") == metric


@pytest.mark.parametrize(
    "line, cause",
    [
        ("eval_steps: 2", "--eval_steps 2.0 has no effect with --eval_strategy no"),
        ("metric_for_best_model: loss", "--metric_for_best_model loss has no effect with --load_best_model_at_end"),
        ("dataloader_prefetch_factor: 2", "--dataloader_prefetch_factor can only be set when"),  # transformers' own
    ],
)
def test_a_line_of_a_file_is_refused_as_the_flag_would_be(capsys, tmp_path, line, cause):
    (tmp_path / "r.yaml").write_text(f"{line}\nmax_steps: 6\n")
    assert cause in refusal(capsys, "--config", str(tmp_path / "r.yaml"))


@pytest.mark.parametrize("kind, one", [("medusa", "heads"), ("eagle3", "passes"), ("chimera", "heads")])
@pytest.mark.parametrize("weight", ["decay", "accept_weight"])
def test_a_single_offset_has_no_other_to_be_weighed_against(capsys, kind, one, weight):
    config = head_classes(kind)[1]
    if not hasattr(config, weight):
        pytest.skip("Chimera heads have no decay")
    with pytest.raises(SystemExit):
        parse_options(config, [*GIVEN, f"--{weight}", "0.5", f"--{one}", "1"])
    assert f"--{weight} 0.5 has no effect with --{one} 1: one offset has no other" in capsys.readouterr().err


def test_one_label_of_a_ctc_head_is_weighed_against_the_end_of_its_window():
    given = ["--decay", "0.5", "--accept_weight", "0.5", "--labels", "1", "--use_cpu"]
    assert parse_options(CTCConfig, [*GIVEN, *given])[1]["decay"] == 0.5


def test_an_encoder_of_single_tokens_has_no_k_grams(capsys):
    with pytest.raises(SystemExit):
        parse_options(ChimeraConfig, [*GIVEN, "--order", "2", "--encoder", "target_layer0_frozen"])
    assert "--order 2 has no effect with --encoder target_layer0_frozen" in capsys.readouterr().err
    parse_options(ChimeraConfig, [*GIVEN, "--encoder", "target_layer0_frozen"])  # the order is the recipe's


@pytest.mark.parametrize("use_cpu, read", [(False, {"ddp_timeout"}), (True, {"ddp_timeout", "ddp_backend"})])
def test_deepspeed_takes_ddps_flags_away(use_cpu, read):
    def taken(file):
        values, entries = (
            SimpleNamespace(deepspeed=file, use_cpu=use_cpu),
            [one for one in NO_EFFECT if one[1] == "deepspeed"],
        )
        return {name for names, _, takes_effect_away, _ in entries if takes_effect_away(values) for name in names}

    assert taken("zero2.json") == {name for name in READ if name.startswith("ddp_")} - read and not taken(None)


def test_every_entry_of_no_effect_names_options():
    kinds = (TrainingArguments, TrainingOptions, RunOptions, *(head_classes(kind)[1] for kind in HEADS))
    names = {f.name for kind in kinds for f in fields(kind)}
    assert all({*flags, other} <= names for flags, other, _, _ in NO_EFFECT)


@pytest.mark.parametrize("metric", ["accuracy_5", "eval_accuracy", "windows", "perplexity", "simulated_beta"])
def test_a_metric_that_is_not_measured_is_refused_before_anything_is_loaded(capsys, metric):
    patient = ["--patience", "1", "--eval_strategy", "steps", "--frames", "8", "--labels", "4", "--simulate_rows", "0"]
    told = refusal(capsys, *patient, "--metric_for_best_model", metric)
    assert f"must be one of loss, accuracy_1, accuracy_2, accuracy_3, accuracy_4; got {metric}" in told
    for good, more_is_better in (("eval_loss", False), ("accuracy_4", True)):
        training = parse_options(CTCConfig, [*GIVEN, *patient, "--metric_for_best_model", good])[2]
        assert training.greater_is_better is more_is_better and training.load_best_model_at_end
    assert parse_options(CTCConfig, [*GIVEN, *patient])[2].metric_for_best_model == "eval_loss"


def test_a_best_checkpoint_that_is_saved_is_exported(capsys):
    given = ["--save_strategy", "best", "--eval_strategy", "steps", "--max_steps", "9"]
    training = parse_options(CTCConfig, [*GIVEN, *given])[2]
    assert training.load_best_model_at_end and training.metric_for_best_model == "eval_loss"
    assert not parse_options(CTCConfig, [*GIVEN, "--max_steps", "9"])[2].load_best_model_at_end
    assert "no effect with --save_strategy best" in refusal(capsys, *given, "--load_best_model_at_end", "false")


@pytest.mark.parametrize(
    ("asked", "last"),
    [
        ({}, None),
        ({"torch_compile": True}, False),
        ({"torch_compile_mode": "max-autotune"}, False),
        ({"torch_compile_backend": "inductor"}, False),
    ],
)
@pytest.mark.parametrize("tf32", [None, True, False])
def test_compiling_does_not_round_the_products_of_float32(tmp_path, monkeypatch, asked, last, tf32):
    """transformers turns TF32 on with --torch_compile; only --tf32 does so here."""
    said = []
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.enable_tf32", said.append)
    HeadTrainingArguments(str(tmp_path), report_to=[], use_cpu=True, tf32=tf32, **asked)
    assert (said[-1] if said else None) == (last if tf32 is None else tf32)
