"""A DeepSpeed configuration beside the flags, and what accelerate's launcher puts into the environment."""

import json
import os
from types import SimpleNamespace

import pytest

from draft_heads.configs.recipes import RECIPES
from draft_heads.heads.ctc import CTCConfig
from draft_heads.train.training_arguments import parse_options
from draft_heads.train.zero_config import check_launcher, free_buffers_at_the_end, read_zero_config, zero_config

FLAGS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "fp16": False}
ARGS = SimpleNamespace(**FLAGS, bf16=True, optim="adamw_torch_fused", torch_compile=False)
FILLED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "train_batch_size": 24,  # on three processes
    "zero_optimization": {"stage": 0},
}


@pytest.fixture(autouse=True)
def three_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")


def test_what_a_file_leaves_out_is_filled_from_the_flags():
    assert zero_config({}, ARGS) == (FILLED, [])
    auto = {name: {"enabled": "auto"} if name in ("bf16", "fp16") else "auto" for name in FILLED}
    assert zero_config({**auto, "zero_optimization": {}}, ARGS) == (FILLED, [])
    assert zero_config(FILLED, ARGS) == (FILLED, [])
    assert zero_config({"bfloat16": {"enabled": True}}, ARGS) == (FILLED, [])


def test_what_no_flag_says_is_kept():
    own = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "communication_data_type": "fp32"}
    own |= {"fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12}}
    config, _ = zero_config(own, ARGS)
    assert config == {**FILLED, **own, "fp16": {**own["fp16"], "enabled": False}}


@pytest.mark.parametrize(
    "entry, told",
    [
        ({"gradient_clipping": 1.0}, 'gradient_clipping 1.0 contradicts --max_grad_norm, 0.5; write "auto"'),
        ({"gradient_clipping": 0}, "gradient_clipping 0 contradicts --max_grad_norm"),
        ({"train_micro_batch_size_per_gpu": 8}, "contradicts --per_device_train_batch_size, 4"),
        ({"gradient_accumulation_steps": 1}, "contradicts --gradient_accumulation_steps, 2"),
        ({"train_batch_size": 8}, "train_batch_size 8 contradicts --per_device_train_batch_size, .* 3 processes"),
        ({"bf16": {"enabled": False}}, "bf16.enabled false contradicts --bf16, true"),
        ({"fp16": {"enabled": True}}, "fp16.enabled true contradicts --fp16, false"),
        ({"fp16": True}, r"fp16 must be a mapping such as \{\"enabled\": true\}; got true"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "'optimizer' would replace --optim, --learning"),
        ({"optimizer": {"type": "OneBitAdam"}}, "'optimizer' would replace --optim"),
        ({"scheduler": {"type": "WarmupLR"}}, "'scheduler' would replace --lr_scheduler_type, --warmup_steps"),
        ({"amp": {"enabled": True}}, "'amp' would replace --bf16 and --fp16"),
        ({"gradient_cliping": 1.0}, "'gradient_cliping' is not one for a head's training; delete it; known are aio"),
        ({"gradient_allreduce_op": "sum"}, "'gradient_allreduce_op' is not one"),
        ({"zero_optimization": {"stage": "auto"}}, "no flag fills zero_optimization.stage 'auto'; write a value"),
        ({"communication_data_type": "auto"}, "no flag fills communication_data_type 'auto'"),
        ({"zero_optimization": None}, 'zero_optimization must be a mapping such as {"stage": 2}; got null'),
        ({"zero_optimization": 2}, 'zero_optimization must be a mapping such as {"stage": 2}; got 2'),
        ({"zero_optimization": {"stage": "2"}}, 'zero_optimization.stage must be 0, 1, 2 or 3; got "2"'),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be 0, 1, 2 or 3; got 4"),
        ({"zero_optimization": {"cpu_offload": True}}, 'is an old name, .*; write "offload_optimizer": {"device"'),
        ({"zero_optimization": {"cpu_offload_param": True}}, 'cpu_offload_param is an old name, .* "offload_param"'),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, 'offload_optimizer must be a mapping .*; got "cpu"'),
    ],
)
def test_what_a_file_says_otherwise_is_refused(entry, told):
    with pytest.raises(ValueError, match=f"^--deepspeed: .*{told}"):
        zero_config(entry, ARGS)


@pytest.mark.parametrize(
    "entry, told",
    [
        (
            {"data_types": {"grad_acum_dtype": "bf16"}},
            "no entry data_types.grad_acum_dtype; .*grad_accum_dtype",
        ),
        ({"data_types": {"grad_accum_dtype": "bf17"}}, 'data_types.grad_accum_dtype must be .*; got "bf17"'),
        ({"data_types": "bf16"}, 'data_types must be a mapping of names to values; got "bf16"'),
        (
            {"aio": {"block_siz": 1}},
            "no entry aio.block_siz; correct its name or delete it; known are block_size",
        ),
        ({"flops_profiler": {"foo": 1}}, "no entry flops_profiler.foo; .*known are enabled, "),
        ({"timers": {"throughputs": {}}}, "no entry timers.throughputs"),
        ({"timers": {"throughput": {"enable": True}}}, "no entry timers.throughput.enable; .*enabled, synchronized"),
        ({"zero_optimization": {"overlap_com": True}}, "no entry zero_optimization.overlap_com; .*, overlap_comm,"),
        ({"zero_optimization": {"overlap_comm": "of"}}, 'zero_optimization.overlap_comm cannot be "of"'),
        (
            {"zero_optimization": {"offload_param": {"devic": "cpu"}}},
            "zero_optimization.offload_param.devic; .*device",
        ),
        ({"fp16": {"loss_scal": 1}}, "no entry fp16.loss_scal; .*loss_scale,"),
        ({"bf16": {"enable": True}}, "no entry bf16.enable; "),
        ({"comms_logger": {"verbos": True}}, "no entry comms_logger.verbos; .*verbose"),
        ({"comms_logger": True}, "comms_logger must be a mapping of names to values; got true"),
        ({"timers": {"throughput": 1}}, "timers must be a mapping of names to values; got .*throughput.*: 1"),
        ({"csv_monitor": {"path": "x"}}, "no entry csv_monitor.path; .*output_path"),
    ],
)
def test_what_deepspeed_does_not_read_within_a_section_is_refused(entry, told):
    with pytest.raises(ValueError, match=f"^--deepspeed: .*{told}"):
        zero_config(entry, ARGS)


def test_what_deepspeed_reads_within_a_section_is_kept():
    own = {"data_types": {"grad_accum_dtype": "float"}, "aio": {"block_size": 1}, "flops_profiler": {"detailed": True}}
    own |= {"timers": {"throughput": {"synchronized": False}}, "csv_monitor": {"enabled": True, "output_path": "x"}}
    own |= {"comms_logger": {"enabled": True, "prof_ops": []}}
    assert zero_config(own, ARGS)[0] == {**FILLED, **own}


def test_an_entry_without_effect_is_named():
    config, lines = zero_config({"steps_per_print": 2000, "wall_clock_breakdown": False}, ARGS)
    assert config == FILLED
    assert lines == ["--deepspeed: steps_per_print has no effect; --logging_steps says how often to log"]


def test_a_section_that_is_null_is_one_that_is_missing():
    """accelerate looks into it."""
    given = {"zero_optimization": {"stage": 2, "offload_optimizer": None, "offload_param": None}}
    assert zero_config(given, ARGS)[0]["zero_optimization"] == {"stage": 2}


def test_the_loss_of_fp16_is_scaled_or_the_stage_refused():
    """DeepSpeed's optimizer of stage 0 divides gradients by a scale that its engine gives to ZeRO's losses alone."""
    for entry in ({}, {"zero_optimization": {"stage": 0}}):
        half = SimpleNamespace(**{**vars(ARGS), "fp16": True, "bf16": False})
        with pytest.raises(ValueError, match=r"with --fp16 DeepSpeed scales the loss in stages 1 to 3 only; .*zero1"):
            zero_config(entry, half)
    assert zero_config({"zero_optimization": {"stage": 1}}, half)[0]["fp16"]["enabled"]


def test_an_offloaded_optimizer_is_adam_or_refused():
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    zero_config(offload, ARGS)
    with pytest.raises(
        ValueError, match="offload_optimizer runs DeepSpeed's Adam whatever --optim says; got --optim sgd"
    ):
        zero_config(offload, SimpleNamespace(**{**vars(ARGS), "optim": "sgd"}))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    file = tmp_path / "zero.json"
    for text, told in (
        ("{", "must be JSON with every key once: Expecting property name"),
        ('{"bf16": {}, "bf16": {}}', "bf16 stands in it twice"),
        ("[1]", "must be a JSON object; got list"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=told):
            read_zero_config(str(file))
    with pytest.raises(ValueError, match=r"missing.json cannot be read \(No such file"):
        read_zero_config(str(tmp_path / "missing.json"))


def test_the_flags_reach_deepspeed_through_transformers(monkeypatch, tmp_path):
    """A file that says nothing but a stage, with a recipe that clips at 0.5 and accumulates 4 batches."""
    monkeypatch.setattr("draft_heads.train.training_arguments.check_build_locks", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    given = ["--target", "tests/tiny_target", "--dataset", "d", "--output_dir", str(tmp_path), "--bf16", "false"]
    given += ["--config", "1b", "--max_grad_norm", "0.25"]
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    for path in (file, RECIPES / "deepspeed" / "zero2.json"):
        training = parse_options(CTCConfig, [*given, "--deepspeed", str(path)])[2]
        config = training.deepspeed_plugin.deepspeed_config
        assert training.deepspeed == str(path)
        assert (config["gradient_clipping"], config["gradient_accumulation_steps"]) == (0.25, 4)
        assert (config["bf16"]["enabled"], config["train_batch_size"]) == (False, 8 * 4)


def test_options_are_checked_before_processes_connect(monkeypatch, tmp_path, capsys):
    started = []
    monkeypatch.setattr("draft_heads.train.training_arguments.start_processes", started.append)
    monkeypatch.setenv("WORLD_SIZE", "1")
    given = ["--target", "tests/tiny_target", "--dataset", "d", "--output_dir", str(tmp_path)]
    given += ["--deepspeed", str(RECIPES / "deepspeed" / "zero2.json")]
    for wrong in (["--head_optimizer", "muon"], ["--fp16", "true"], ["--save_steps", "0"]):
        with pytest.raises(SystemExit):
            parse_options(CTCConfig, [*given, *wrong])
        assert wrong[0] in capsys.readouterr().err
    assert not started
    assert parse_options(CTCConfig, given)[2].head_optimizer == "adamw" and len(started) == 1


@pytest.mark.parametrize(
    "variable, value, told",
    [
        ("MIXED_PRECISION", "fp16", "asks for mixed precision fp16 and the flags for bf16; pass --bf16 or --fp16"),
        ("MIXED_PRECISION", "fp8", "mixed precision fp8"),
        ("DYNAMO_BACKEND", "INDUCTOR", "pass --torch_compile true"),
        ("CONFIG_DS_FIELDS", "zero_stage", "turns DeepSpeed on, which the trainer's flags decide"),
        ("USE_FSDP", "true", "turns FSDP on"),
        ("USE_MEGATRON_LM", "true", "turns Megatron-LM on"),
        ("USE_PARALLELISM_CONFIG", "true", "turns parallelism on"),
    ],
)
def test_what_accelerates_launcher_says_otherwise_is_refused(variable, value, told):
    with pytest.raises(ValueError, match=told):
        check_launcher(ARGS, {f"ACCELERATE_{variable}": value})
    usual = {"ACCELERATE_DYNAMO_BACKEND": "no", "ACCELERATE_USE_FSDP": "false"}
    for precision in ("no", "bf16"):
        check_launcher(ARGS, {**usual, "ACCELERATE_MIXED_PRECISION": precision})


def test_bundled_configurations_leave_to_the_flags_what_is_theirs():
    for file in sorted((RECIPES / "deepspeed").glob("*.json")):
        config, lines = zero_config(str(file), ARGS)
        wanted = json.loads(file.read_text())["zero_optimization"]
        gathered = {"stage3_gather_16bit_weights_on_model_save": True} if wanted["stage"] == 3 else {}
        assert lines == [] and wanted | gathered == config["zero_optimization"]


@pytest.mark.parametrize("written", [{}, {"stage3_gather_16bit_weights_on_model_save": "auto"}])
def test_under_stage_3_a_checkpoint_has_the_heads_weights_once(written):
    """Otherwise transformers saves the engine in their place, and then once more."""
    zero = zero_config({"zero_optimization": {"stage": 3, **written}}, ARGS)[0]["zero_optimization"]
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    for own in ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
        zero = zero_config({"zero_optimization": {"stage": 3, own: False}}, ARGS)[0]["zero_optimization"]
        assert zero == {"stage": 3, own: False}
    assert "stage3" not in str(zero_config({"zero_optimization": {"stage": 2}}, ARGS)[0])


def test_shared_memory_loses_its_name_once_every_process_has_opened_it(monkeypatch, tmp_path):
    def buffer(port, rank):
        return tmp_path / f"deepspeed_allreduce_buffer_{os.getuid()}_10.0.0.7_{port}_{rank}"

    for own in (buffer(29511, 0), buffer(29511, 1), buffer(29512, 1)):
        own.touch()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setenv("MASTER_PORT", "29511")
    met = []
    monkeypatch.setattr("torch.distributed.barrier", lambda: met.append(buffer(29511, 1).exists()))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    free_buffers_at_the_end(tmp_path)
    assert met == [True]
    assert set(tmp_path.iterdir()) == {buffer(29511, 0), buffer(29512, 1)}
    free_buffers_at_the_end(tmp_path)  # processes of several machines have none
