"""What `DraftHeadTrainer` and its callbacks override of transformers, and what they rely on in accelerate.

Any version may change it. A test fails where a method is gone, takes other parameters or is not called any more, or
where what it is given means something else; the message names our method.
"""

import inspect
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import accelerate
import deepspeed
import pytest
import torch
import transformers
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.utils._pytree import tree_flatten
from transformers import Trainer

from draft_heads.heads.base import HeadLoss
from draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from draft_heads.train import batches, checkpoints, log, stopping, training_arguments
from draft_heads.train import run as train_run
from draft_heads.train.trainer import DraftHeadTrainer
from tests.heads.small import disturbed
from tests.internals import changed, overridden, parameters
from tests.train.runs import run

TRAINER = {  # what each method of `DraftHeadTrainer` is called with by `Trainer`
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "create_optimizer": "model",
    "create_scheduler": "num_training_steps optimizer",
    "evaluate": "eval_dataset ignore_keys metric_key_prefix",
    "get_train_dataloader": "",
    "log": "logs start_time",
    "_clip_grad_norm": "model",
    "_get_num_items_in_batch": "batch_samples device",
    "_maybe_log_save_evaluate": "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate",
    "_run_epoch": "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval "
    "start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
}


def test_every_override_of_the_trainer_is_listed_here():
    assert overridden(DraftHeadTrainer, Trainer) == set(TRAINER)


@pytest.mark.parametrize("name", TRAINER)
def test_an_overridden_method_of_the_trainer_has_the_parameters_it_had(name):
    assert hasattr(Trainer, name), changed(f"DraftHeadTrainer.{name}", f"Trainer.{name}", "is gone")
    found = parameters(getattr(Trainer, name))
    assert found == TRAINER[name].split(), changed(f"DraftHeadTrainer.{name}", f"Trainer.{name}", f"takes {found}")


def test_the_trainer_calls_every_method_that_is_overridden(dataset, tmp_path, monkeypatch):
    """Two steps of two micro-batches, with a checkpoint and an evaluation after each."""
    calls = {name: [] for name in TRAINER}
    for name in TRAINER:
        own = getattr(DraftHeadTrainer, name)

        def call(self, *args, name=name, own=own, **options):
            calls[name].append((args, options))
            return own(self, *args, **options)

        monkeypatch.setattr(DraftHeadTrainer, name, call)
    flags = "--max_steps 2 --gradient_accumulation_steps 2 --eval_strategy steps --eval_steps 1 --save_steps 1"
    status, printed = run(dataset, tmp_path / "run", *shlex.split(flags), batch=2)
    assert status == 0, printed
    for name, made in calls.items():
        assert made, changed(f"DraftHeadTrainer.{name}", f"Trainer.{name}", "is not called in training any more")
    epochs = [options.get("epoch") for _, options in calls["_run_epoch"]]
    assert epochs == list(range(len(epochs))), changed(
        "DraftHeadTrainer._run_epoch", "Trainer._run_epoch", f"is not handed epoch= by name; its epochs are {epochs}"
    )
    ours = "DraftHeadTrainer._get_num_items_in_batch"
    micro_batches = [len(args[0]) for args, _ in calls["_get_num_items_in_batch"]]
    assert micro_batches == [2, 2], changed(ours, "Trainer.get_batch_samples", f"hands over {micro_batches} at a time")
    assert len(calls["compute_loss"]) == 4
    counts = [options.get("num_items_in_batch") for _, options in calls["compute_loss"]]
    assert all(count is not None and count == counts[0] > 0 for count in counts[:2]), changed(
        "DraftHeadTrainer.compute_loss", "num_items_in_batch", f"is {counts} for the micro-batches of two steps"
    )


def test_the_trainer_does_not_divide_the_loss_of_an_accumulated_batch_again():
    """By what every version reads; the numbers are compared in `test_training`."""
    ours, source = "DraftHeadTrainer.__init__", inspect.getsource(Trainer.training_step)
    assert "self.model_accepts_loss_kwargs" in source, changed(ours, "Trainer.model_accepts_loss_kwargs", "is not read")
    default = getattr(Trainer, "loss_is_scaled_for_ga", None)
    assert default is None, changed(ours, "Trainer.loss_is_scaled_for_ga", f"is {default}, which goes before it")


def test_a_compiled_head_is_evaluated_and_exported_as_itself():
    """`accelerate` leaves a compiled module around it, copies of which have none of the head's own names."""
    head = disturbed(Eagle3Head, Eagle3Config)
    trainer = DraftHeadTrainer.__new__(DraftHeadTrainer)
    trainer.accelerator = SimpleNamespace(unwrap_model=partial(accelerate.Accelerator.unwrap_model, None))
    trainer.model_wrapped = torch.compile(head, backend="eager")
    assert trainer.whole_head() is head, changed("DraftHeadTrainer.whole_head", "unwrap_model", "keeps what compiles")


def test_the_trainer_deletes_checkpoints_by_the_option_that_is_unset():
    """That none is deleted is tested in `test_resume`."""
    source = inspect.getsource(Trainer._save_checkpoint)
    assert "save_total_limit=self.args.save_total_limit" in source, changed(
        "DraftHeadTrainer.__init__", "Trainer._save_checkpoint", "does not read args.save_total_limit there"
    )


def test_our_callbacks_come_after_those_that_say_what_is_due():
    source = inspect.getsource(Trainer.__init__)
    assert "default_callbacks + callbacks" in source, changed(
        "StopOnSigterm.on_epoch_end", "Trainer.__init__", "does not put callbacks after its own"
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (stopping.WallClock, transformers.TrainerCallback),
        (stopping.StopOnSigterm, transformers.TrainerCallback),
        (checkpoints.MarkComplete, transformers.TrainerCallback),
        (log.LogLastStep, transformers.TrainerCallback),
        (stopping.Patience, transformers.EarlyStoppingCallback),
        (log.StepsBar, transformers.ProgressCallback),
        (log.MinutesBar, transformers.ProgressCallback),
        (log.MetricLines, transformers.PrinterCallback),
        (log.TrainingLines, transformers.PrinterCallback),
        (training_arguments.TrainerParser, transformers.HfArgumentParser),
    ],
)
def test_callbacks_take_what_those_of_transformers_are_called_with(ours, theirs):
    for name in overridden(ours, theirs):
        base = inspect.signature(getattr(theirs, name)).parameters
        wanted = [p.name for p in base.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        found = list(inspect.signature(getattr(ours, name)).parameters)
        assert found[: len(wanted)] == wanted, changed(
            f"{ours.__name__}.{name}", f"{theirs.__name__}.{name}", f"takes {list(base)}"
        )


def test_early_stopping_keeps_its_counter_where_a_resumed_run_looks_for_it():
    patience = stopping.Patience(3)
    patience.early_stopping_patience_counter = 2
    found = patience.state()["attributes"]
    assert found.get("early_stopping_patience_counter") == 2, changed(
        "stopping.Patience", "EarlyStoppingCallback.state()", f"holds {found}"
    )


def test_the_progress_bar_has_the_name_by_which_it_is_closed():
    assert hasattr(transformers.ProgressCallback(), "training_bar"), changed(
        "DraftHeadTrainer.close_progress", "ProgressCallback.training_bar", "is gone"
    )


@pytest.mark.parametrize("by_tokens", [False, True])
def test_accelerates_loader_tells_the_sampler_which_epoch_begins(by_tokens):
    if by_tokens:
        sampler = batches.TokenBatches([8] * 8, 16, seed=0)
        loader, order = torch.utils.data.DataLoader([0] * 8, batch_sampler=sampler), sampler.sampler
    else:
        order = batches.EpochSampler(8, 0)
        loader = torch.utils.data.DataLoader([0] * 8, sampler=order, batch_size=2)
    accelerate.Accelerator(cpu=True).prepare(loader).set_epoch(3)
    assert order.epoch == 3, changed("train/batches.py", "set_epoch of accelerate's loader", "does not reach a sampler")


def test_the_last_line_is_of_the_whole_run(monkeypatch):
    """transformers' loss and seconds are those since a resume: here 9 and 3, 12 over 4 windows in 2.5 minutes."""
    logged = {}
    monkeypatch.setattr(Trainer, "log", lambda self, logs, start_time: logged.update(logs))
    trainer = object.__new__(DraftHeadTrainer)
    trainer.clock = SimpleNamespace(elapsed=2.5)
    monkeypatch.setattr(DraftHeadTrainer, "_whole_loss_sum", lambda self: [12.0, 4.0])
    rates = {"train_samples_per_second": 7.0, "train_steps_per_second": 8.0}
    trainer.log({"train_loss": 9.0, "train_runtime": 3.0, **rates})
    assert logged == {"train_loss": 3.0, "train_runtime": 150.0}


def test_the_sum_of_losses_is_reduced_where_collectives_run():
    """A run that resumes after its last step has taken none that would have moved it to the GPU."""
    reduced = []

    def reduce(value):
        reduced.append(value.device.type)
        return torch.tensor([5.0, 2.0])

    trainer = object.__new__(DraftHeadTrainer)
    trainer._loss_sum, trainer._loss_before = torch.zeros(2, dtype=torch.float64), torch.tensor([2.0, 1.0])
    trainer.args, trainer.accelerator = SimpleNamespace(device=torch.device("meta")), SimpleNamespace(reduce=reduce)
    assert trainer._whole_loss_sum() == [7.0, 3.0] and reduced == ["meta"]


def test_deepspeed_and_ddp_see_into_the_loss_of_a_head():
    """At what a forward gives DeepSpeed prepares sums of micro-batches, and DDP the first step of a static graph."""
    weights, begun, ours = torch.ones(3, requires_grad=True), [], "heads/base.py: HeadLoss"
    loss = HeadLoss.zero(2, torch.device("cpu"))
    loss.add("ce_0", (2 * weights).sum())
    deepspeed.runtime.utils.register_output_backward_hooks(loss, lambda: begun.append("backward"))
    seen = any(leaf is loss.total for leaf in tree_flatten(loss)[0])
    assert seen, changed(ours, "transformers' ModelOutput", "is no tree of tensors")
    loss.total.backward()
    assert begun == ["backward"], changed(ours, "DeepSpeed's output hooks", "do not see a ModelOutput's tensors")


def test_loading_rows_draws_nothing_from_what_dropout_draws_from():
    """torch's loader draws a seed an epoch, but with persistent workers or after a resume not in every one."""
    settings = (
        "num_workers",
        "pin_memory",
        "persistent_workers",
        "prefetch_factor",
        "multiprocessing_context",
    )
    given = dict.fromkeys(settings) | {
        "num_workers": 0,
        "pin_memory": False,
        "persistent_workers": False,
    }
    trainer = SimpleNamespace(
        args=SimpleNamespace(**{f"dataloader_{name}": value for name, value in given.items()}),
        _row_batches=lambda: batches.RowBatches(8, 2, 0),
        train_dataset=range(8),
        data_collator=sorted,
        accelerator=SimpleNamespace(prepare=lambda loader: loader),
    )
    before = torch.get_rng_state()
    rows = [row for batch in DraftHeadTrainer.get_train_dataloader(trainer) for row in batch]
    assert sorted(rows) == [*range(8)] and torch.equal(torch.get_rng_state(), before)


LAUNCH = "--num_processes 4 --num_machines 1 --mixed_precision no --dynamo_backend no ctc.py"


@pytest.mark.parametrize(
    "environment, added, launcher",
    [
        ({}, (), Path(sys.executable).name),
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"}, (), "torchrun --nproc_per_node 4"),
        ("accelerate", (), "accelerate launch --num_processes 4"),
        ("accelerate on two nodes", (), "accelerate launch --num_processes 8 --num_machines 2"),
        ({"LOCAL_SIZE": "2"}, ("--local_rank=1",), "deepspeed --num_gpus 2"),
    ],
)
def test_a_run_remembers_the_command_with_its_launcher(monkeypatch, environment, added, launcher):
    if str(environment).startswith("accelerate"):  # as its launcher starts torch's
        nodes = 2 if environment.endswith("nodes") else 1
        flags = launch_command_parser().parse_args(LAUNCH.split())
        added_by_it = prepare_multi_gpu_env(flags).items() - os.environ.items()
        environment = {**dict(added_by_it), "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"}
        environment["WORLD_SIZE"] = str(4 * nodes)
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["/home/me/project/train/ctc.py", *added, "--target", "t"])
    assert " ".join(train_run._command()) == f"{launcher} train/ctc.py --target t"
    installed = SimpleNamespace(name="draft_heads.train.ctc")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", installed)
    module = "--module" if launcher.startswith("deepspeed") else "-m"
    assert " ".join(train_run._command()) == f"{launcher} {module} draft_heads.train.ctc --target t"
