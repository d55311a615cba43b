"""What a folder holds when training is killed, stopped or started twice, and what the same command does then."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draft_heads.configs.options import option_names
from draft_heads.data.common.files import sealed, unsealed
from draft_heads.data.labels.shards import DistilledDataset
from draft_heads.heads.ctc import CTCConfig
from draft_heads.train.checkpoints import complete_checkpoints, incomplete_checkpoints
from draft_heads.train.options import RunOptions, TrainingOptions
from draft_heads.train.run_folder import begin, check_folder, run_settings
from draft_heads.train.training_arguments import transformers_help
from tests.running import ROOT, run_script
from tests.train.runs import command, losses, run, without


def test_a_finished_run_is_not_trained_again(dataset, uninterrupted):
    status, told = run(dataset, uninterrupted)
    assert status != 0 and "finished run" in told and "--overwrite" in told


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_and_run_again_it_reproduces_the_uninterrupted_losses(dataset, uninterrupted, tmp_path, how):
    output = tmp_path / "killed"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *command(dataset, output)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (output / "checkpoint-2" / "complete.json").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(how)
    printed, told = process.communicate()
    left = rf"the newest checkpoint is {output}/checkpoint-\d: the same"
    if how == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in told
        assert re.search(rf"interrupted; {left}", told)
    if how == signal.SIGTERM:  # one that comes after the last step finds nothing to stop
        assert process.returncode == 0 and (
            re.search(rf"stopped by SIGTERM .*; {left}", printed) or "head: " in printed
        )
    shutil.rmtree(output / "head", ignore_errors=True)  # should the kill have come too late
    (output / "checkpoint-99").mkdir()  # as a kill in the middle of writing leaves it

    status, told = run(dataset, output, "--learning_rate", "0.5")
    assert status != 0 and "other settings" in told and "learning_rate" in told
    status, told = run(dataset, output)
    assert status == 0, told
    assert "checkpoint-99 was not written to its end" in told and not (output / "checkpoint-99").exists()
    assert losses(output) == pytest.approx(losses(uninterrupted), abs=1e-6)
    whole, resumed = (load_file(folder / "head" / "model.safetensors") for folder in (uninterrupted, output))
    assert all((whole[name] - resumed[name]).abs().max() < 1e-6 for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("how, status", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_to_every_process_of_a_run_spares_the_workers_of_its_data_loader(dataset, tmp_path, how, status):
    output = tmp_path / "run"
    flags = ("--dataloader_num_workers", "2", "--max_steps", "5000", "--logging_steps", "100")
    process = subprocess.Popen(
        [sys.executable, *command(dataset, output, *flags, kind="medusa")],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (output / "checkpoint-2" / "complete.json").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    for _ in range(2):  # a scheduler and a launcher may both send one
        os.killpg(process.pid, how)
    printed, told = process.communicate(timeout=120)
    assert process.returncode == status and "Traceback" not in told, told
    assert f"the newest checkpoint is {output}/checkpoint-" in (printed if how == signal.SIGTERM else told)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # no worker is left


def test_a_run_killed_after_its_last_step_exports_the_same_head(dataset, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "head")
    settings = json.loads((tmp_path / "run" / "run.json").read_text()) | {"output_dir": str(tmp_path / "run")}
    (tmp_path / "run" / "run.json").write_text(json.dumps(settings))
    status, told = run(dataset, tmp_path / "run")
    assert status == 0 and "resuming" in told, told
    whole, resumed = (load_file(folder / "head" / "model.safetensors") for folder in (uninterrupted, tmp_path / "run"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())["steps"] == 6


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_resumed(dataset, uninterrupted, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(uninterrupted, output)
    shutil.rmtree(output / "head")
    settings = json.loads((output / "run.json").read_text()) | {"output_dir": str(output)}
    (output / "run.json").write_text(json.dumps(settings))
    os.truncate(output / "checkpoint-6" / "optimizer.pt", 1000)
    status, told = run(dataset, output)
    assert status == 0 and "Traceback" not in told, told
    assert re.search(r"checkpoint-6 is damaged: optimizer.pt has 1000 bytes instead of \d{4,}; not resumed", told)
    assert f"resuming {output / 'checkpoint-4'}" in told and (output / "damaged-checkpoint-6").is_dir()
    whole, resumed = (load_file(folder / "head" / "model.safetensors") for folder in (uninterrupted, output))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_checkpoints_of_the_future_do_not_displace_new_ones(dataset, uninterrupted, tmp_path):
    """The clock was set back between a run and its resumption, which may also keep fewer."""
    output = tmp_path / "run"
    shutil.copytree(uninterrupted, output)
    for later in ("head", "checkpoint-6"):
        shutil.rmtree(output / later)
    shutil.copytree(output / "checkpoint-4", output / "checkpoint-3")
    for step in (3, 4):
        os.utime(output / f"checkpoint-{step}", (2**32, 2**32))
    settings = json.loads((output / "run.json").read_text()) | {"output_dir": str(output), "save_total_limit": 9}
    (output / "run.json").write_text(json.dumps(settings))
    status, told = run(dataset, output, "--save_total_limit", "2")
    assert status == 0 and "resuming" in told, told
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}


def test_batches_by_tokens_resume_where_they_stopped(dataset, tmp_path):
    output, batches = tmp_path / "run", ("--tokens_per_batch", "700")
    status, told = run(dataset, output, *batches, batch=None)
    assert status == 0, told
    whole = losses(output)
    for later in ("checkpoint-6", "head"):
        shutil.rmtree(output / later)
    status, told = run(dataset, output, *batches, batch=None)
    assert status == 0 and "resuming" in told, told
    assert losses(output) == pytest.approx(whole, abs=1e-6)


def test_patience_ends_training_and_exports_the_best_checkpoint(dataset, tmp_path):
    patient = shlex.split("--patience 1 --eval_strategy steps --eval_steps 1 --max_steps 30 --learning_rate 0.5")
    status, told = run(dataset, tmp_path / "run", *patient, kind="medusa")
    assert status == 0, told
    measured = [float(loss) for loss in re.findall(r"held-out loss ([\d.e+-]+)", told)]
    assert len(measured) < 20 and measured[-1] > min(measured)  # the first one that is no lower ends training
    assert (tmp_path / "run" / "loss.png").stat().st_size > 10_000
    provenance = json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())
    assert provenance["steps"] == 1 + measured.index(min(measured))
    assert provenance["metrics"]["eval_loss"] == pytest.approx(min(measured), rel=1e-3)
    marker = tmp_path / "run" / f"checkpoint-{provenance['steps']}" / "complete.json"
    marker.write_text(sealed(unsealed(marker.read_text()) | {"minutes": 7.5}))  # not those of the steps after it
    shutil.rmtree(tmp_path / "run" / "head")
    status, told = run(dataset, tmp_path / "run", *patient, kind="medusa")
    assert status == 0 and "resuming" in told, told
    again = json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())
    assert again["steps"] == provenance["steps"] and again["minutes"] == 7.5
    assert again["metrics"] == provenance["metrics"]
    assert losses(tmp_path / "run") and not re.findall(r"step \d+: (?:held-out )?loss", told)  # nor by another step


def test_the_best_checkpoint_is_exported_where_the_recipe_would_save_at_other_steps(dataset, tmp_path):
    output, flags = tmp_path / "run", "--load_best_model_at_end true --eval_steps 5 --max_steps 10 --learning_rate 0.5"
    words = command(dataset, output, *flags.split(), "--eval_strategy", "steps", kind="medusa")
    status, told = run_script(*without(words, "--save_steps"))
    assert status == 0, told
    measured = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): held-out loss ([\d.e+-]+)", told)}
    provenance = json.loads((output / "head" / "provenance.json").read_text())
    best = min(measured, key=measured.get)
    assert list(measured) == [5, 10] and provenance["steps"] == best == 5
    saved = load_file(output / f"checkpoint-{best}" / "model.safetensors")
    exported = load_file(output / "head" / "model.safetensors")
    assert all(torch.equal(saved[name], exported[name]) for name in exported)


def test_a_run_is_repeated_and_resumed_by_the_recipe_that_it_wrote(dataset, tmp_path):
    """The warm-up is the recipe's 100 steps, which 10 steps have a fifth of."""
    first, second = tmp_path / "first", tmp_path / "second"
    words = command(dataset, first, "--max_steps", "10", kind="medusa")
    words = without(words, "--warmup_steps", "--save_steps")
    status, told = run_script(*words)
    assert status == 0, told
    kept = yaml.safe_load((first / "recipe.yaml").read_text())
    begun = json.loads((first / "run.json").read_text())
    assert kept["warmup_steps"] == begun["warmup_steps"] == 2 and kept["save_steps"] == 2
    assert json.loads((first / "head" / "provenance.json").read_text())["options"]["warmup_steps"] == 2
    by_recipe = [words[0], "--config", str(first / "recipe.yaml")]
    status, told = run_script(*by_recipe, "--output_dir", str(second))
    assert status == 0, told
    assert losses(second) == losses(first) and losses(second, "learning_rate") == losses(first, "learning_rate")
    assert json.loads((second / "run.json").read_text()) == begun
    for later in ("head", "checkpoint-10"):
        shutil.rmtree(first / later)
    status, told = run_script(*words, "--warmup_steps", "5")
    assert status != 0 and "begun with other settings (warmup_steps was 2, now 5.0)" in told
    status, told = run_script(*by_recipe, "--warmup_steps", "100", "--lr_scheduler_type", "linear")
    assert status != 0 and "lr_scheduler_type was 'cosine', now 'linear'; warmup_steps was 2, now 100.0" in told
    status, told = run_script(*by_recipe)
    assert status == 0 and f"resuming {first / 'checkpoint-8'}" in told, told
    assert losses(first) == losses(second) and losses(first, "learning_rate") == losses(second, "learning_rate")


def test_a_run_that_goes_by_its_evaluations_is_resumed_with_the_same(dataset, tmp_path):
    """Checked when the run's length is known, as a recipe's interval depends on it."""
    args = SimpleNamespace(output_dir=str(tmp_path), overwrite=False, process_index=0, world_size=1, recipe="")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "complete.json").write_text('{"minutes": 1.0}')
    (tmp_path / "run.json").write_text('{"eval_steps": 10, "seed": 1}')
    with pytest.raises(ValueError, match=r"other settings \(eval_steps was 10, now 20\)"):
        begin(args, {"eval_steps": 20, "seed": 1})
    assert json.loads((tmp_path / "run.json").read_text())["eval_steps"] == 10
    for settings, kept in (
        ({"patience": 0, "lr_scheduler_type": "cosine"}, False),
        ({"patience": 2, "lr_scheduler_type": "cosine"}, True),
        ({"patience": 0, "lr_scheduler_type": "reduce_lr_on_plateau"}, True),
        ({"patience": 0, "lr_scheduler_type": "greedy"}, True),
        ({"patience": 0, "lr_scheduler_type": "cosine", "load_best_model_at_end": True}, True),
    ):
        given = {**settings, "eval_steps": 10, "save_steps": 10}
        args.deepspeed, args.to_sanitized_dict = None, lambda given=given: given
        found = run_settings(RunOptions(target="t", dataset=["d"]), {}, args)
        assert ("eval_steps" in found) == kept and "save_steps" not in found


def test_what_another_option_takes_the_place_of_is_no_setting_of_a_run():
    """A run by time has transformers' loop end after 1e6 epochs, and one by tokens no rows in a batch."""
    args = SimpleNamespace(world_size=1, deepspeed=None)
    usual = {"num_train_epochs": 3.0, "max_steps": -1, "max_minutes": 0.0, "per_device_train_batch_size": 8}
    usual |= {"tokens_per_batch": 0}
    for given, dropped in (
        ({}, set()),
        ({"max_steps": 7}, {"num_train_epochs"}),
        ({"max_minutes": 2.0, "num_train_epochs": 1e6}, {"num_train_epochs"}),
        ({"tokens_per_batch": 900}, {"per_device_train_batch_size"}),
    ):
        args.to_sanitized_dict = lambda given=given: usual | given
        found = run_settings(RunOptions(target="t", dataset=["d"]), {}, args)
        assert usual.keys() - found.keys() == dropped


def test_a_folder_of_something_else_is_not_overwritten(dataset, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    for flags in ([], ["--overwrite"]):
        status, told = run(dataset, tmp_path, *flags)
        assert status != 0 and "it holds thesis.txt; pick another folder" in told and (tmp_path / "thesis.txt").exists()


def test_checkpoints_of_another_program_are_not_touched(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path), overwrite=False, process_index=0, world_size=1, recipe="")
    for name in ("runs", "checkpoint-500"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="it holds checkpoint-500; pick another folder"):
        check_folder(args, {})


def test_runs_of_the_user_are_not_taken_for_those_of_tensorboard(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path), overwrite=True, process_index=0, world_size=1, recipe="")
    (tmp_path / "runs" / "today").mkdir(parents=True)
    (tmp_path / "runs" / "today" / "events.out.tfevents.1.host").touch()
    check_folder(args, {})
    (tmp_path / "runs" / "today" / "model.safetensors").touch()
    with pytest.raises(ValueError, match="it holds runs; pick another folder"):
        check_folder(args, {})


def test_other_settings_are_refused_where_there_is_a_checkpoint_to_resume(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path), overwrite=False, process_index=0, world_size=1, recipe="")
    (tmp_path / "run.json").write_text('{"seed": 1}')
    (tmp_path / "checkpoint-3").mkdir()
    check_folder(args, {"seed": 2})
    (tmp_path / "checkpoint-3" / "complete.json").write_text('{"minutes": 1.0}')
    check_folder(args, {"seed": 1})
    with pytest.raises(ValueError, match=r"other settings \(seed was 1, now 2\).*--overwrite"):
        check_folder(args, {"seed": 2})
    check_folder(args, {"seed": 1, "decay": 1.0, "new": 5}, {"decay": 1.0})  # options that were added since
    with pytest.raises(ValueError, match=r"decay was 1.0, now 0.7"):
        check_folder(args, {"seed": 1, "decay": 0.7}, {"decay": 1.0})


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]"])
def test_damaged_settings_of_a_run_are_named_with_the_remedy(tmp_path, text):
    args = SimpleNamespace(output_dir=str(tmp_path), overwrite=False, process_index=0, world_size=1, recipe="")
    (tmp_path / "run.json").write_bytes(text)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "complete.json").write_text('{"minutes": 1.0}')
    with pytest.raises(ValueError, match=r"run\.json is damaged .*restore it, or add --overwrite"):
        check_folder(args, {"seed": 2})


def test_the_content_of_a_deepspeed_configuration_is_a_setting(tmp_path):
    zero, run = tmp_path / "zero.json", RunOptions(target="t", dataset=["d"])
    args = SimpleNamespace(deepspeed=str(zero), world_size=1, to_sanitized_dict=lambda: {"deepspeed": str(zero)})
    found = []
    for stage in (1, 2):
        zero.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        found.append(run_settings(run, {}, args))
    assert [x["deepspeed_config"]["zero_optimization"]["stage"] for x in found] == [1, 2]
    args.deepspeed = str(zero.rename(tmp_path / "renamed.json"))
    args.to_sanitized_dict = lambda: {"deepspeed": args.deepspeed}
    assert run_settings(run, {}, args) == found[1]  # whatever its name
    args.deepspeed = None
    assert run_settings(run, {}, args)["deepspeed_config"] is None


def test_a_copy_of_a_checkpoint_is_the_users(tmp_path):
    for name in ("checkpoint-3", "checkpoint-3-keep", "checkpoint-best"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-3-keep" / "complete.json").write_text("{}")
    assert complete_checkpoints(tmp_path) == []
    assert incomplete_checkpoints(tmp_path) == [tmp_path / "checkpoint-3"]


def test_what_is_logged_evaluated_and_loaded_otherwise_after_a_resume_changes_no_loss(dataset, tmp_path, uninterrupted):
    output = tmp_path / "run"
    status, told = run(dataset, output)
    assert status == 0, told
    for later in ("head", "checkpoint-6"):
        shutil.rmtree(output / later)
    flags = (
        "--eval_strategy epoch --save_strategy epoch --logging_first_step true --report_to none --log_level warning "
    )
    flags += "--simulate_rows 4 --dataloader_num_workers 1 --dataloader_prefetch_factor 2 "
    flags += "--torch_empty_cache_steps 5"
    words = without(command(dataset, output), "--save_steps", "--eval_strategy", "--simulate_rows")
    status, told = run_script(*words, *flags.split())
    assert status == 0 and f"resuming {output}/checkpoint-4" in told, told
    assert losses(output) == losses(uninterrupted)


def test_a_difference_names_flags_and_no_field_that_follows_from_them(dataset, tmp_path):
    output = tmp_path / "run"
    status, told = run(dataset, output)
    assert status == 0, told
    shutil.rmtree(output / "head")
    begun = json.loads((output / "run.json").read_text())
    help_text = transformers_help()
    ours = option_names(RunOptions) + option_names(TrainingOptions) + option_names(CTCConfig)
    flags = {*ours, *re.findall(r"^  --(\w+)", help_text, re.MULTILINE)}
    assert begun.keys() - flags == {"processes", "deepspeed_config", "data"}
    words = without(command(dataset, output, "--load_best_model_at_end", "true"), "--save_steps", "--eval_strategy")
    status, told = run_script(*words, "--eval_strategy", "epoch", "--save_strategy", "epoch")
    assert (
        status != 0
        and "(load_best_model_at_end was False, now True; metric_for_best_model was 'None', now 'loss')" in told
    )


@pytest.mark.slow
def test_a_resumed_run_may_save_at_other_steps_but_not_learn_from_other_rows(dataset, tmp_path):
    other = tmp_path / "data"
    shutil.copytree(dataset, other)
    few = ("--max_steps", "4", "--lr_scheduler_type", "constant", "--warmup_steps", "0")
    status, told = run(str(other), tmp_path / "run", *few)
    assert status == 0, told
    for name in ("head", "checkpoint-4"):
        shutil.rmtree(tmp_path / "run" / name)
    extra = (*few, "--save_steps", "1", "--logging_steps", "2")
    status, told = run(f"{other}/", tmp_path / "run", *extra, "--per_device_eval_batch_size", "2")
    assert status == 0 and "resuming" in told, told
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    shutil.rmtree(tmp_path / "run" / "head")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["shards"].append(manifest["shards"].pop(0) | {"xxh3": "0"})
    with pytest.raises(ValueError, match=r"other settings \(data was"):
        args = SimpleNamespace(
            output_dir=str(tmp_path / "run"), overwrite=False, process_index=0, world_size=1, recipe=""
        )
        before = json.loads((tmp_path / "run" / "run.json").read_text())
        check_folder(args, {**before, "data": [DistilledDataset(None, manifest).content]})


def test_a_second_run_in_the_folder_of_a_running_one_is_refused(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path / "run"), overwrite=False, process_index=0, world_size=1, recipe="")
    _, lock = begin(args, {})
    (tmp_path / "run" / "checkpoint-1").mkdir()  # it is being written
    args.overwrite = True
    for use in (check_folder, begin):
        with pytest.raises(ValueError, match=r"--output_dir .*/run is being written by another run; wait for its end"):
            use(args, {})
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    lock.close()
    check_folder(args, {})
    begin(args, {})
    assert not (tmp_path / "run" / "checkpoint-1").exists()
