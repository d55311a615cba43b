"""`train/NAME.py` from its command line: resume, several processes, ZeRO stages, refusals.

Scripts run inside the test's process, but where the process is killed or a launcher starts several.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draft_heads.data.collate import DraftCollator, label_counts
from draft_heads.data.shards import load_distilled
from draft_heads.data.synthetic.corpus import conversations
from draft_heads.heads.checkpoint import load_head
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.target.target import Target
from draft_heads.train.options import RunOptions
from draft_heads.train.run import explained
from draft_heads.train.run_folder import begin, check_folder
from draft_heads.train.training_data import load_data
from tests.running import ROOT, free_port, on_two_nodes, run_script

TARGET = str(ROOT / "tests" / "tiny_target")
SMALL = shlex.split(
    "--anchors 6 --max_steps 6 --logging_steps 1 --save_steps 2 "
    "--eval_strategy no --held_out 8 --simulate_rows 2 --per_device_eval_batch_size 4 --warmup_steps 2 --threads 1"
)
HEADS = {
    "ctc": ("--frames", "4", "--labels", "2"),
    "chimera": ("--heads", "2"),
    "medusa": ("--heads", "2"),
    "hydra": ("--heads", "2", "--dropout", "0"),
    "eagle3": ("--passes", "3"),
}


@pytest.fixture(scope="module")
def distil(tmp_path_factory):
    source = tmp_path_factory.mktemp("source") / "conversations.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in conversations(48, 5, "heldout")))
    command = ["scripts/distill.py", "--target", TARGET, "--dataset", str(source), "--labels", "argmax"]

    def into(folder, *flags):
        status, told = run_script(*command, "--output", str(folder), *flags)
        assert status == 0, told
        return str(folder)

    return into


@pytest.fixture(scope="module")
def dataset(distil, tmp_path_factory):
    return distil(tmp_path_factory.mktemp("distilled") / "out")


def command(dataset, output, *extra, batch=4, kind="ctc"):
    return [
        f"train/{kind}.py", "--target", TARGET, "--dataset", dataset, "--output_dir", str(output),
        *SMALL, *HEADS[kind], "--per_device_train_batch_size", str(batch), *extra,
    ]  # fmt: skip


def run(*arguments, **options):
    return run_script(*command(*arguments, **options))


def launch(*arguments, **options):
    """As `run`, on two processes."""
    deepspeed = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--num_accelerators",
        "2",
        "--master_port",
        free_port(),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*deepspeed, *command(*arguments, **options)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def launch_two_nodes(hostfile, *arguments, **options):
    """As `launch`, by two launchers that pose as two nodes: (status, all that was printed) of each."""
    hostfile.write_text("node-a slots=1\nnode-b slots=1\n")
    deepspeed = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(hostfile), "--no_ssh"]
    deepspeed += ["--master_addr", "127.0.0.1", "--master_port", free_port()]
    nodes = [
        subprocess.Popen(
            [*deepspeed, "--node_rank", str(rank), *command(*arguments, **options)],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    told = [node.communicate()[0] for node in nodes]
    return [(node.returncode, text) for node, text in zip(nodes, told)]


def losses(output):
    newest = max(Path(output).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def uninterrupted(dataset, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "a whole run"
    status, told = run(dataset, output)
    assert status == 0, told
    assert re.search(
        rf"held-out rows: loss \S+, simulated β .*, top-1 accuracy by offset .*\nhead: {output}/head\n", told
    )
    return output


def test_a_run_leaves_a_head_with_its_history(uninterrupted):
    head = uninterrupted / "head"
    provenance = json.loads((head / "provenance.json").read_text())
    assert provenance["steps"] == 6 and provenance["options"]["labels"] == 2
    assert {"eval_loss", "eval_accuracy_1", "eval_accuracy_2"} <= set(provenance["metrics"])
    assert provenance["command"].split()[1] == "train/ctc.py"
    assert str(uninterrupted) in shlex.split(provenance["command"])
    (typed,) = re.findall(r"^    (\S+ train/ctc.py .*)", (head / "README.md").read_text(), re.MULTILINE)
    assert uninterrupted.name in shlex.split(typed)  # without this machine's folders
    assert len(losses(uninterrupted)) == 6


def test_the_log_has_the_parts_of_the_loss_memory_and_mfu(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("draft_heads.train.since_log.peak_flops", lambda device: 1e9)
    status, told = run(dataset, tmp_path / "run", "--logging_steps", "3", kind="medusa")
    assert status == 0, told
    history = json.loads((tmp_path / "run" / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    head = sum(weight.numel() for weight in load_file(tmp_path / "run" / "head" / "model.safetensors").values())
    target = sum(weight.numel() for weight in load_file(Path(TARGET) / "model.safetensors").values())
    for entry in history:
        if "loss" in entry:  # of a mean over steps and one over windows
            assert entry["loss_ce_0"] + 0.8 * entry["loss_ce_1"] == pytest.approx(entry["loss"], rel=0.02)
            flops = entry["tokens_per_second"] * (6 * head + 2 * target)
            assert entry["mfu"] == pytest.approx(flops / 1e9, rel=0.01) and entry["memory_mib"] > 100
    events = (tmp_path / "run").rglob("events.out.tfevents*")
    shown = {tag for file in events for tag in EventAccumulator(str(file)).Reload().Tags()["scalars"]}
    assert {"train/loss_ce_1", "train/memory_mib", "train/mfu"} <= shown


def test_the_accuracy_table_of_the_held_out_rows_is_the_trainers(dataset, uninterrupted, tmp_path):
    command = ["scripts/accuracy.py", "--target", TARGET, "--dataset", dataset, "--rows", "8", "--threads", "1"]
    heads = f"mine={uninterrupted / 'head'}"
    status, told = run_script(*command, "--heads", heads, "--output", str(tmp_path))
    assert status == 0, told
    offsets = json.loads((tmp_path / "accuracy.json").read_text())["mine"]
    metrics = json.loads((uninterrupted / "head" / "provenance.json").read_text())["metrics"]
    assert [o["top"][0] for o in offsets] == pytest.approx(
        [metrics["eval_accuracy_1"], metrics["eval_accuracy_2"]], abs=1e-4
    )
    assert "| mine | top-5 |" in (tmp_path / "accuracy.md").read_text()
    status, told = run_script(*command, "--heads", "nameless", "--output", str(tmp_path))
    assert status == 1 and "NAME=RUN/head" in told
    status, told = run_script(*command, "--heads", heads, "--output", str(tmp_path), "--rows", "48")
    assert status == 1 and "--rows 48 must leave rows" in told


def test_the_tree_is_tuned_on_held_out_rows(distil, uninterrupted, tmp_path):
    head, tree = uninterrupted / "head", tmp_path / "tree.json"
    dataset = distil(tmp_path / "own", "--labels", "generate", "--max_new_tokens", "24")
    command = [
        "scripts/tune_tree.py", "--target", TARGET, "--head", str(head), "--dataset", dataset,
        "--output", str(tree), "--rows", "8", "--max_nodes", "2", "--threads", "1", "--temperatures", "0.05", "1", "50",
        "--prompts", "2", "--new_tokens", "8", "--nodes", "3", "5",
    ]  # fmt: skip
    status, told = run_script(*command)
    assert status == 0, told
    betas = {float(t): float(b) for t, b in re.findall(r"temperature (\S+) +simulated β (\S+)", told)}
    assert len(betas) == 3 and len(set(betas.values())) > 1, told
    tuned = json.loads(tree.read_text())
    assert betas[tuned["tree_temperature"]] == max(betas.values())
    assert tuned["max_nodes"] == int(max(tuned["speed"], key=lambda nodes: tuned["speed"][nodes]["gamma"]))
    target = Target.from_pretrained(TARGET)
    drafter = build_drafter(DrafterSpec.parse(f"ctc={head},tuned={tree}"), target, 32)
    assert drafter.max_nodes == tuned["max_nodes"]
    assert drafter.head.config.tree_temperature == tuned["tree_temperature"]
    assert build_drafter(DrafterSpec.parse(f"ctc={head},tuned={tree},max_nodes=7"), target, 32).max_nodes == 7
    with pytest.raises(ValueError, match="is not one"):
        build_drafter(DrafterSpec.parse(f"ctc={head},tuned={head / 'config.json'}"), target, 32)
    status, told = run_script(*command, "--temperatures", "0")
    assert status == 1 and "above 0; got 0" in told


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
    assert "checkpoint-99 was cut short" in told and not (output / "checkpoint-99").exists()
    assert losses(output) == pytest.approx(losses(uninterrupted), abs=1e-6)
    whole, resumed = (load_file(folder / "head" / "model.safetensors") for folder in (uninterrupted, output))
    assert all((whole[name] - resumed[name]).abs().max() < 1e-6 for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind,stage,split",
    [("medusa", 0, False), ("chimera", 1, False), ("medusa", 2, True), ("hydra", 3, False), ("ctc", 3, True)],
)
def test_two_processes_have_the_losses_of_one_at_the_same_global_batch(dataset, tmp_path, kind, stage, split):
    status, told = run(dataset, tmp_path / "one", "--head_optimizer", "adamw", kind=kind)
    assert status == 0, told
    extra = ["--deepspeed", f"configs/deepspeed/zero{stage}.json", *["--shard_target"] * split]
    status, told = launch(dataset, tmp_path / "two", *extra, batch=2, kind=kind)
    assert status == 0, told
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
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


def test_a_target_is_split_among_several_processes_only(dataset, tmp_path):
    status, told = run(dataset, tmp_path / "run", "--shard_target")
    assert status != 0 and "this run has one; start several" in told
    status, told = run(dataset, tmp_path / "run", "--shard_target", "--target_device", "auto")
    assert status != 0 and "got both; drop one" in told


def test_a_run_killed_behind_its_last_step_exports_the_same_head(dataset, uninterrupted, tmp_path):
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


def test_a_spread_target_trains_the_same_head(dataset, uninterrupted, tmp_path):
    status, told = run(dataset, tmp_path / "run", "--target_device", "auto")
    assert status == 0, told
    assert losses(tmp_path / "run") == losses(uninterrupted)


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind != "ctc"])
def test_every_head_trains_and_refuses_a_recipe_of_another(dataset, tmp_path, kind):
    status, told = run(dataset, tmp_path / "run", kind=kind)
    assert status == 0, told
    provenance = (tmp_path / "run" / "head" / "provenance.json").read_text()
    assert {"eval_loss", "eval_accuracy_2"} <= set(json.loads(provenance)["metrics"])
    assert "NaN" not in provenance  # β cannot be simulated on recorded answers
    status, told = run(dataset, tmp_path / "refused", "--config", "configs/ctc/tiny.yaml", kind=kind)
    assert status != 0 and "unknown" in told


def test_gradient_accumulation_has_the_losses_of_one_large_batch(dataset, uninterrupted, tmp_path):
    status, told = run(dataset, tmp_path / "run", "--gradient_accumulation_steps", "2", batch=2)
    assert status == 0, told
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), abs=1e-4)


def test_batches_by_tokens_resume_where_they_stopped(dataset, tmp_path):
    output, batches = tmp_path / "run", ("--tokens_per_batch", "700")
    status, told = run(dataset, output, *batches)
    assert status == 0, told
    whole = losses(output)
    for later in ("checkpoint-6", "head"):
        shutil.rmtree(output / later)
    status, told = run(dataset, output, *batches)
    assert status == 0 and "resuming" in told, told
    assert losses(output) == pytest.approx(whole, abs=1e-6)


def test_a_dataset_with_cached_hidden_states_is_trained_on_without_the_targets_forward(distil, tmp_path):
    cached = distil(tmp_path / "cached", "--hidden_states", "float32")
    rows = load_distilled(cached).dataset.select(range(4))
    batch = DraftCollator(0, 512, hidden_dtype=torch.float32)(list(rows))
    target = Target.from_pretrained(TARGET, device="cpu")
    recomputed, _ = target.forward_rows(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
    real = batch["segment_ids"] > 0
    assert torch.allclose(batch["hidden"][real], recomputed[real], atol=1e-4)
    status, told = run(cached, tmp_path / "run")
    assert status == 0, told
    assert len(losses(tmp_path / "run")) == 6


def test_several_datasets_are_trained_on_together(distil, dataset, tmp_path):
    more = distil(tmp_path / "more", "--limit", "20")
    status, told = run(dataset, tmp_path / "both", "--dataset", dataset, more)
    assert status == 0, told
    provenance = json.loads((tmp_path / "both" / "head" / "provenance.json").read_text())
    assert [part["counts"]["rows"] for part in provenance["data"]] == [48, 20]
    assert {part["name"] for part in provenance["data"]} == {"conversations.jsonl"}
    cached = distil(tmp_path / "cached", "--hidden_states", "float32")
    status, told = run(dataset, tmp_path / "mixed", "--dataset", dataset, cached)
    assert status != 0 and "or none; got" in told


def test_a_draft_vocabulary_is_counted_saved_and_resumed_with(dataset, tmp_path):
    status, told = run(dataset, tmp_path / "run", "--draft_vocab_size", "300", kind="chimera")
    assert status == 0, told
    covered = re.search(r"draft vocabulary: 300 of 1024 tokens, (\S+)% of the \d+ training answer tokens", told)
    assert covered and 70 < float(covered[1]) < 100, told
    target = Target.from_pretrained(TARGET)
    head = load_head(tmp_path / "run" / "head", target.fingerprint())
    training, _, _, collator = load_data(RunOptions(TARGET, [dataset], held_out=8), target)
    counts = label_counts(training, 1024, collator.max_length)
    rare = int(counts[head.draft_vocab[~torch.isin(head.draft_vocab, torch.tensor(head.config.end_token_ids))]].min())
    left_out = torch.ones(1024, dtype=torch.bool).index_fill(0, head.draft_vocab, False)
    assert len(head.draft_vocab) == 300 and int(counts[left_out].max()) <= rare
    assert all(each.weight.shape[0] == 300 for each in head.offset_heads)
    shutil.rmtree(tmp_path / "run" / "head")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    expected = load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors")["draft_vocab"]
    status, told = run(dataset, tmp_path / "run", "--draft_vocab_size", "300", kind="chimera")
    assert status == 0 and "resuming" in told, told
    assert torch.equal(load_head(tmp_path / "run" / "head").draft_vocab, expected)
    status, told = run(dataset, tmp_path / "large", "--draft_vocab_size", "1025", kind="chimera")
    assert status != 0 and "to 1024, the end tokens among them; got 1025" in told


def test_rows_without_an_answer_in_their_part_are_not_trained_on(dataset, tmp_path):
    status, told = run(dataset, tmp_path / "run", "--max_length", "8")
    assert status != 0 and "rows with an answer within --max_length 8; none of 40 has one; raise it" in told


def test_a_dataset_of_another_target_is_refused(dataset, tmp_path):
    other = tmp_path / "dataset"
    shutil.copytree(dataset, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["target"]["fingerprint"]["tokenizer_hash"] = "another"
    (other / "manifest.json").write_text(json.dumps(manifest))
    status, told = run(str(other), tmp_path / "run")
    assert status != 0 and "tokenizer_hash" in told
    status, told = run(dataset, tmp_path / "run", "--held_out", "48")
    assert status != 0 and "--held_out 48 must leave rows" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["ctc", "medusa"])
def test_a_loss_that_is_no_number_ends_training_and_names_the_rows(dataset, tmp_path, kind):
    wild = shlex.split("--learning_rate 1e30 --warmup_steps 0 --clip value --max_grad_norm 1e30 --head_optimizer adamw")
    status, told = run(dataset, tmp_path / "run", *wild, "--save_steps", "1", kind=kind)
    assert status != 0 and re.search(
        r"not a number by step \d; rows of the batch: (synthetic-\S+, ){4}no|the newest", told
    )
    assert not (tmp_path / "run" / "head").exists()


def test_patience_ends_training_and_exports_the_best_checkpoint(dataset, tmp_path):
    patient = shlex.split("--patience 1 --eval_strategy steps --eval_steps 1 --max_steps 30 --learning_rate 0.5")
    status, told = run(dataset, tmp_path / "run", *patient, kind="medusa")
    assert status == 0, told
    measured = [float(loss) for loss in re.findall(r"'eval_loss': '([^']*)'", told)]
    assert len(measured) < 20 and measured[-1] == min(measured)
    assert (tmp_path / "run" / "loss.png").stat().st_size > 10_000
    provenance = json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())
    assert provenance["steps"] == 1 + measured.index(min(measured))
    shutil.rmtree(tmp_path / "run" / "head")
    status, told = run(dataset, tmp_path / "run", *patient, kind="medusa")
    assert status == 0 and "resuming" in told, told
    assert json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())["steps"] == provenance["steps"]
    assert losses(tmp_path / "run") and len(re.findall("'loss':", told)) == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory: 8 bytes")])
def test_running_out_of_memory_names_the_options_that_lower_it(error, tmp_path):
    rule = r"--per_device_train_batch_size.*--anchors.*; nothing is left"
    with pytest.raises(ValueError, match=rule), explained(lambda: "nothing is left", tmp_path):
        raise error


def test_a_full_disk_is_named_with_what_is_kept(tmp_path):
    rule = r"could not be written to .*, whose disk has [\d,]+ MiB left; .*; nothing is left"
    with pytest.raises(ValueError, match=rule), explained(lambda: "nothing is left", tmp_path):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 494912 vs 494800")


def test_a_folder_of_something_else_is_not_overwritten(dataset, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    for flags in ([], ["--overwrite"]):
        status, told = run(dataset, tmp_path, *flags)
        assert status != 0 and "it holds thesis.txt; pick another folder" in told and (tmp_path / "thesis.txt").exists()


def test_other_settings_are_refused_where_there_is_a_checkpoint_to_resume(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path), overwrite=False, process_index=0, world_size=1)
    (tmp_path / "run.json").write_text('{"seed": 1}')
    (tmp_path / "checkpoint-3").mkdir()
    check_folder(args, {"seed": 2})
    (tmp_path / "checkpoint-3" / "complete.json").write_text("{}")
    check_folder(args, {"seed": 1})
    with pytest.raises(ValueError, match=r"other settings \(seed was 1, now 2\).*--overwrite"):
        check_folder(args, {"seed": 2})


def test_a_second_run_in_the_folder_of_a_running_one_is_refused(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path / "run"), overwrite=False, process_index=0, world_size=1)
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


NODES = """
import torch
from accelerate import PartialState
from types import SimpleNamespace
from draft_heads.train.run_folder import begin, check_folder
rank = PartialState(cpu=True).process_index
for output, use in (("foreign", check_folder), ("own", check_folder), ("own", begin)):
    try:
        use(SimpleNamespace(output_dir=output, overwrite=False, process_index=rank, world_size=2), {})
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


def test_a_head_that_reads_layers_trains_on_cached_and_on_computed_states(distil, dataset, tmp_path):
    layers = ("--target_layers", "1", "2", "3")
    cached = distil(tmp_path / "states", "--hidden_states", "float32", *layers)
    batch = DraftCollator(0, 512, False, torch.float32, True)(list(load_distilled(cached).dataset.select(range(4))))
    text = {name: value for name, value in batch.items() if "hidden" not in name}
    computed = Target.from_pretrained(TARGET, device="cpu").states_of(text, [1, 2, 3])
    for name, states in computed.items():
        assert torch.allclose(batch[name][text["segment_ids"] > 0], states[text["segment_ids"] > 0], atol=1e-4)
    for name, data in (("computed", dataset), ("cached", cached)):
        status, told = run(data, tmp_path / name, *layers, kind="medusa")
        assert status == 0, told
        head = load_head(tmp_path / name / "head")
        assert head.config.target_layers == [1, 2, 3] and head.layer_projection.weight.abs().sum() > 0
    for data, flags, kind, rule in [
        (cached, ("--target_layers", "1", "3"), "medusa", "has 1 2 3; distil with the same"),
        (dataset, ("--target_layers", "4"), "medusa", "from 1 to 3"),
    ]:
        status, told = run(data, tmp_path / f"refused {kind} {flags}", *flags, kind=kind)
        assert status != 0 and rule in told, told
