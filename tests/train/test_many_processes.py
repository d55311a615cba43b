"""Training on two processes and on two nodes: ZeRO stages, split targets, one shared folder."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.running import on_two_nodes
from tests.train.runs import launch, launch_two_nodes, losses, run

ZERO_2 = "configs/deepspeed/zero2.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind,stage,split",
    [("medusa", 0, False), ("chimera", 1, False), ("hydra", 2, True), ("ctc", 3, True)],
)
def test_two_processes_have_the_losses_of_one_at_the_same_global_batch(dataset, tmp_path, kind, stage, split):
    status, told = run(dataset, tmp_path / "one", "--head_optimizer", "adamw", kind=kind)
    assert status == 0, told
    extra = ["--deepspeed", f"configs/deepspeed/zero{stage}.json", *["--shard_target"] * split]
    status, told = launch(dataset, tmp_path / "two", *extra, batch=2, kind=kind)
    assert status == 0, told
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    if stage:  # DeepSpeed tells none of stage 0
        norms = [losses(tmp_path / name, "grad_norm") for name in ("one", "two")]
        assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    if kind == "ctc":  # its only part, of both processes
        parts = losses(tmp_path / "two", "loss_ctc")
        assert parts == pytest.approx(losses(tmp_path / "two"), rel=1e-3)
    one, two = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(one[name], two[name], atol=3e-4) for name in one)
    if stage == 3 and split:
        for later in ("checkpoint-6", "head"):
            shutil.rmtree(tmp_path / "two" / later)
        status, told = launch(dataset, tmp_path / "two", *extra, batch=2, kind=kind)
        assert status == 0 and "resuming" in told, told
        resumed = load_file(tmp_path / "two" / "head" / "model.safetensors")
        assert all(torch.equal(two[name], resumed[name]) for name in two)


@pytest.mark.slow
def test_two_nodes_train_and_resume_as_one_process(dataset, uninterrupted, tmp_path):
    same = ("--head_optimizer", "adamw", "--learning_rate", "1e-3")
    same += ("--max_steps", "14", "--save_steps", "4")  # 10 steps are an epoch
    extra = ("--deepspeed", "configs/deepspeed/zero1.json", *same)
    status, told = run(dataset, tmp_path / "one", *same)
    assert status == 0, told
    nodes = tmp_path / "nodes"
    for again in (False, True):
        if again:
            shutil.rmtree(nodes / "head")
            shutil.rmtree(nodes / "checkpoint-14")
        for status, told in launch_two_nodes(tmp_path / "hostfile", dataset, nodes, *extra, batch=2):
            assert status == 0, told
        assert losses(nodes) == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    whole, resumed = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("one", "nodes"))
    assert all(torch.allclose(whole[name], resumed[name], atol=3e-4) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags,batch",
    [
        ((), 2),
        (("--gradient_accumulation_steps", "2"), 1),
        (("--deepspeed", ZERO_2), 2),
        (("--gradient_accumulation_steps", "2", "--deepspeed", ZERO_2), 1),
    ],
    ids=str,
)
def test_the_last_step_of_an_epoch_on_two_processes_is_that_of_one(cached, tmp_path, flags, batch):
    """41 rows in batches of 4: the last has a row, so one process has none; its cached states are padding too."""
    same = ("--head_optimizer", "adamw", "--learning_rate", "1e-3")
    same += ("--held_out", "7", "--max_steps", "14", "--save_steps", "12")
    status, told = run(cached, tmp_path / "one", *same)
    assert status == 0, told
    two = tmp_path / "two"
    for again in (False, True)[: 1 if batch == 1 else 2]:  # accumulated batches resume as others do
        if again:  # in the second epoch
            shutil.rmtree(two / "head")
            shutil.rmtree(two / "checkpoint-14")
        status, told = launch(cached, two, *same, *flags, batch=batch)
        assert status == 0 and ("resuming" in told) == again, told
        assert losses(two) == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
        assert losses(two, "grad_norm") == pytest.approx(losses(tmp_path / "one", "grad_norm"), rel=1e-3)
    one, two = (
        json.loads((tmp_path / name / "head/provenance.json").read_text())["metrics"] for name in ("one", "two")
    )
    assert {name: one[name] for name in one if "seconds" not in name} == pytest.approx(
        {name: two[name] for name in two if "seconds" not in name}, abs=1e-4
    )


def test_a_target_is_split_among_several_processes_only(dataset, tmp_path):
    status, told = run(dataset, tmp_path / "run", "--shard_target")
    assert status != 0 and "this run has one; start several" in told
    status, told = run(dataset, tmp_path / "run", "--shard_target", "--target_device", "auto")
    assert status != 0 and "got both; drop one" in told


NODES = """
import torch
from accelerate import PartialState
from types import SimpleNamespace
from draft_heads.train.run_folder import begin, check_folder
rank = PartialState(cpu=True).process_index
for output, use in (("foreign", check_folder), ("own", check_folder), ("own", begin)):
    try:
        use(SimpleNamespace(output_dir=output, overwrite=False, process_index=rank, world_size=2, recipe=""), {})
        print("fine")
    except ValueError as error:
        print(error)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_nodes_agree_on_a_folder_and_refuse_one_that_they_do_not_share(tmp_path):
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    (nodes[0] / "foreign").mkdir()
    (nodes[0] / "foreign" / "thesis.txt").touch()
    for status, told in on_two_nodes(["-c", NODES], *nodes):
        refused, fine, alone = told.splitlines()[-3:]
        assert status == 0 and "it holds thesis.txt" in refused and fine == "fine", told
        assert alone.startswith("--output_dir must be a folder that all nodes share; what the first process writes")
    for _, told in on_two_nodes(["-c", NODES], nodes[0], nodes[0]):
        assert "fine\nfine\n" in told
