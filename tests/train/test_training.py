"""`train/NAME.py` from its command line: what a run leaves, options of its data, refusals.

Scripts run inside the test's process, but where the process is killed or a launcher starts several.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draft_heads.data.collate import DraftCollator, label_counts, split_held_out
from draft_heads.data.labels.shards import load_distilled
from draft_heads.heads.checkpoint import HEADS, load_head
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.target.target import Target
from draft_heads.train.loss_plot import held_out_losses
from draft_heads.train.options import RunOptions, peak_flops
from draft_heads.train.run import explain_errors
from draft_heads.train.trainer import DraftHeadTrainer
from draft_heads.train.training_data import load_data
from tests.running import run_script
from tests.train.runs import TARGET, command, losses, run, without


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 64GB HBM2", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_is_that_of_the_card_not_of_its_generation(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak and peak_flops(torch.device("cpu")) is None


def test_a_run_leaves_a_head_with_its_history(uninterrupted):
    head = uninterrupted / "head"
    provenance = json.loads((head / "provenance.json").read_text())
    assert provenance["steps"] == 6 and provenance["options"]["labels"] == 2
    assert {"eval_loss", "eval_accuracy_1", "eval_accuracy_2"} <= set(provenance["metrics"])
    assert provenance["command"].split()[1] == "train/ctc.py"
    assert str(uninterrupted) in shlex.split(provenance["command"])
    assert [provenance[part]["rows"] for part in ("trained", "held_out")] == [40, 8]  # of 48 distilled
    assert 0 < provenance["held_out"]["answer_tokens"] < provenance["trained"]["answer_tokens"]
    (typed,) = re.findall(r"^    (\S+ train/ctc.py .*)", (head / "README.md").read_text(), re.MULTILINE)
    assert uninterrupted.name in shlex.split(typed)  # without this machine's folders
    assert len(losses(uninterrupted)) == 6


def test_the_log_has_the_parts_of_the_loss_memory_and_mfu(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("draft_heads.train.log.peak_flops", lambda device: 1e9)
    status, told = run(dataset, tmp_path / "run", "--logging_steps", "3", kind="medusa")
    assert status == 0, told
    history = json.loads((tmp_path / "run" / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    head = sum(weight.numel() for weight in load_file(tmp_path / "run" / "head" / "model.safetensors").values())
    weights = load_file(Path(TARGET) / "model.safetensors")
    target = sum(weight.numel() for name, weight in weights.items() if "embed" not in name and "lm_head" not in name)
    for entry in history:
        if "loss" in entry:
            assert entry["loss_ce_0"] + 0.8 * entry["loss_ce_1"] == pytest.approx(entry["loss"], rel=1e-5)
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
    status, told = run_script(*command, "--heads", heads, "--output", str(tmp_path))
    assert status == 1 and "holds a finished run (accuracy.json)" in told
    status, told = run_script(*command, "--heads", "nameless", "--output", str(tmp_path))
    assert status == 1 and "NAME=RUN/head" in told
    status, told = run_script(*command, "--heads", heads, "--output", str(tmp_path), "--rows", "48", "--overwrite")
    assert status == 1 and "got 48, and mine held out 8; pass --rows 8" in told


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
    answers, tokens = map(int, re.findall(r"simulated β: (\d+) answers of 8 rows .*, (\d+) tokens", told)[0])
    assert (tuned["answers"], tuned["answer_tokens"]) == (answers, tokens) and 8 <= answers <= tokens
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
    kept = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert kept.items() >= {"warmup_steps": 2, "weight_decay": 0.01, "report_to": "tensorboard"}.items()
    status, told = run(dataset, tmp_path / "refused", "--config", "published-code", kind=kind)
    assert status != 0 and "published-code is neither a file nor a bundled recipe" in told


def test_gradient_accumulation_has_the_losses_of_one_large_batch(dataset, uninterrupted, tmp_path):
    status, told = run(dataset, tmp_path / "run", "--gradient_accumulation_steps", "2", batch=2)
    assert status == 0, told
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), abs=1e-4)


def test_a_dataset_with_cached_hidden_states_is_trained_on_without_the_targets_forward(cached, tmp_path):
    rows = load_distilled(cached).dataset.select(range(4))
    batch = DraftCollator(0, 512, hidden_dtype=torch.float32)(list(rows))
    target = Target.from_pretrained(TARGET, device="cpu")
    recomputed, _ = target.forward_rows(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
    real = batch["segment_ids"] > 0
    assert torch.allclose(batch["hidden"][real], recomputed[real], atol=1e-4)
    status, told = run(cached, tmp_path / "run")
    assert status == 0, told
    assert len(losses(tmp_path / "run")) == 6


def test_several_datasets_are_trained_on_together(distil, dataset, cached, tmp_path):
    more = distil(tmp_path / "more", "--limit", "20")
    status, told = run(dataset, tmp_path / "both", "--dataset", dataset, more)
    assert status == 0, told
    provenance = json.loads((tmp_path / "both" / "head" / "provenance.json").read_text())
    assert [part["counts"]["rows"] for part in provenance["data"]] == [48, 20]
    assert {part["name"] for part in provenance["data"]} == {"conversations.jsonl"}
    status, told = run(dataset, tmp_path / "mixed", "--dataset", dataset, cached)
    assert status != 0 and "or none; got" in told


def test_labels_of_another_chat_template_name_the_option_that_chose_it(dataset, tmp_path):
    known = json.loads(Path(dataset, "manifest.json").read_text())
    known["target"] |= {"chat_template": "own,style=x", "fingerprint": {"chat_template_hash": "of that"}}
    labels = shutil.copytree(dataset, tmp_path / "labels")
    (labels / "manifest.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match=r"with --chat_template own,style=x, was made .* another chat template"):
        load_data(RunOptions(TARGET, [labels], held_out=8), Target.from_pretrained(TARGET))


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


def test_the_held_out_loss_is_a_mean_over_labels_in_the_draft_vocabulary_and_is_measured_once(dataset, tmp_path):
    often = ("--eval_strategy", "steps", "--eval_steps", "3")
    status, told = run(dataset, tmp_path / "run", "--draft_vocab_size", "64", *often, kind="medusa")
    assert status == 0, told
    (events,) = (tmp_path / "run").rglob("events.out.tfevents*")
    assert [point.step for point in EventAccumulator(str(events)).Reload().Scalars("eval/loss")] == [3, 6]
    metrics = json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())["metrics"]
    target, head = Target.from_pretrained(TARGET), load_head(tmp_path / "run" / "head")
    _, held_out, _, collator = load_data(RunOptions(TARGET, [dataset], held_out=8), target)
    batch = collator(list(held_out))
    windows = head.windows(*(batch[name] for name in ("input_ids", "greedy_ids", "mask", "segment_ids")))
    log_probs = head.draft_log_probs(windows.gather(target.states_of(batch)["hidden"])).detach()
    class_of = {token: number for number, token in enumerate(head.draft_vocab.tolist())}
    loss, inside, every = 0.0, 0, 0
    labelled = zip(windows.labels[windows.valid].tolist(), windows.lengths[windows.valid].tolist())
    for window, (labels, length) in enumerate(labelled):
        for k, label in enumerate(labels[:length]):
            every += 1
            if label in class_of:
                inside += 1
                loss -= 0.8**k * float(log_probs[window, k, class_of[label]])
    assert 0.1 < inside / every < 0.9
    assert metrics["eval_loss"] == pytest.approx(loss / len(log_probs) * every / inside, rel=1e-4)
    assert held_out_losses([{"step": 6, **metrics}])[1] == [pytest.approx(loss / len(log_probs), rel=1e-4)]
    assert metrics["eval_outside_vocabulary"] == pytest.approx(1 - inside / every, abs=1e-4)
    assert f"; {1 - inside / every:.1%} of the labels, or with CTC one before them in a window, are none that" in told


def test_rows_without_an_answer_in_their_part_are_not_trained_on(dataset, tmp_path):
    status, told = run(dataset, tmp_path / "run", "--max_length", "8")
    assert status != 0 and "an answer of two tokens or more within --max_length 8; none of 40 has one; raise it" in told


def test_a_head_that_finds_no_window_in_any_row_is_not_trained(distil, tmp_path):
    """Of words that the target never says, a head that does not read the base token learns nothing, others do."""
    said = {"from": "gpt", "value": "Qx zv qj wq vz jx kq zx"}
    rows = [{"conversations": [{"from": "human", "value": f"Hi {n}"}, said]} for n in range(20)]
    foreign = distil(tmp_path / "foreign", rows=rows)
    status, told = run(foreign, tmp_path / "medusa", kind="medusa")
    assert status != 0 and "Medusa heads found none in 12 rows within --max_length" in told and "generate" in told
    assert not (tmp_path / "medusa" / "head").exists()
    status, told = run(foreign, tmp_path / "hydra", "--max_steps", "1", kind="hydra")
    assert status == 0, told


def test_a_dataset_that_is_named_twice_is_refused(dataset, tmp_path):
    status, told = run(dataset, tmp_path / "run", "--dataset", dataset, f"{dataset}/../out")
    assert (
        status != 0 and f"names each folder once, or its rows count twice; got {Path(dataset).resolve()} again" in told
    )
    copy = str(shutil.copytree(dataset, tmp_path / "copy"))
    status, told = run(dataset, tmp_path / "run", "--dataset", dataset, copy)
    assert status != 0 and f"trained on once; --dataset {copy} has the rows of an earlier one" in told


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


@pytest.mark.parametrize(
    ("kind", "looked"),
    [("ctc", ["--save_steps", "1"]), ("medusa", ["--save_steps", "1"]),
     ("medusa", ["--logging_strategy", "no", "--save_strategy", "no"])],
)  # fmt: skip
def test_a_loss_that_is_no_number_ends_training_and_names_the_rows(dataset, tmp_path, kind, looked):
    """Also of a run that nothing looks at before its head is exported."""
    wild = shlex.split("--learning_rate 1e30 --warmup_steps 0 --clip value --max_grad_norm 1e30 --head_optimizer adamw")
    words = without(command(dataset, tmp_path / "run", *wild, kind=kind), "--logging_steps", "--save_steps")
    status, told = run_script(*words, *looked)
    assert status != 0 and re.search(
        r"not a number by step \d; rows of the batch: (synthetic-\S+[,;] ){4}begin anew", told
    )
    assert not (tmp_path / "run" / "head").exists()


def test_a_held_out_loss_that_is_no_number_ends_training_and_names_the_rows(dataset, tmp_path, monkeypatch):
    """As of a target in float16 that overflows on one held-out row: patience would export a head that no loss chose."""
    _, held_out = split_held_out(load_distilled(dataset).dataset, 8)
    fifth, head_loss = held_out[5]["input_ids"], DraftHeadTrainer.head_loss

    def overflowing(self, model, batch, seed=0):
        loss = head_loss(self, model, batch, seed)
        if any(ids[: len(fifth)] == fifth for ids in batch["input_ids"].tolist()):
            loss.total = loss.total * float("nan")
        return loss

    monkeypatch.setattr(DraftHeadTrainer, "head_loss", overflowing)
    patient = shlex.split("--eval_strategy steps --eval_steps 2 --patience 3")
    words = without(command(dataset, tmp_path / "run", *patient, kind="medusa"), "--save_steps")
    status, told = run_script(*words)
    rows = ", ".join(held_out[row]["id"] for row in (4, 5, 6, 7))  # the second batch of four
    assert (
        status == 1
        and f"must be a finite number; after step 2 it is nan, first in a batch of the rows {rows}; begin anew ("
        in told
    )  # patience counts evaluations: to go on without them is refused
    assert not (tmp_path / "run" / "head").exists()
    words = command(dataset, tmp_path / "run", *shlex.split("--eval_strategy steps --eval_steps 4"), kind="medusa")
    status, told = run_script(*words, "--overwrite")
    assert status == 1 and "resumes there, with --eval_strategy no for --eval_steps; or begin" in told
    status, told = run(dataset, tmp_path / "run", "--eval_strategy", "no", kind="medusa")
    assert (
        status == 0
        and "resuming" in told
        and "the head is exported without it" in told
        and (tmp_path / "run" / "head").exists()
    )


def test_the_rows_of_the_simulation_are_told_where_fewer_are_held_out(dataset, tmp_path):
    status, told = run(dataset, tmp_path / "run", "--max_steps", "1", "--simulate_rows", "64", kind="medusa")
    assert (
        status == 0 and "simulated β is measured on the 8 held-out rows at most, fewer than --simulate_rows has" in told
    )
    assert json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())["options"]["simulate_rows"] == 8


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory: 8 bytes")])
def test_running_out_of_memory_names_the_options_that_lower_it(error, tmp_path):
    rule = r"--per_device_train_batch_size.*--anchors.*; nothing is left"
    with pytest.raises(ValueError, match=rule), explain_errors(lambda: "nothing is left", tmp_path):
        raise error


def test_a_full_disk_is_named_with_what_is_kept(tmp_path):
    rule = r"could not be written: its disk has [\d,]+ MiB left; free some; nothing is left"
    with pytest.raises(ValueError, match=rule), explain_errors(lambda: "nothing is left", tmp_path):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 494912 vs 494800")


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


def test_windows_of_an_imported_head_end_where_answers_do(dataset, tmp_path):
    """Formats of other engines name no end token; a window has no label after one, whatever the head knows.

    The most frequent label is called one here, so that texts go on after it.
    """
    dataset = shutil.copytree(dataset, tmp_path / "data")
    manifest = json.loads((dataset / "manifest.json").read_text())
    manifest["end_token_ids"] += [int(label_counts(load_distilled(str(dataset)).dataset, 1024, 512).argmax())]
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    status, told = run(str(dataset), tmp_path / "run", "--max_steps", "1", kind="eagle3")
    assert status == 0, told
    head, counted = tmp_path / "run" / "head", []
    config = json.loads((head / "config.json").read_text())
    ends = set(config["end_token_ids"])
    for known in (sorted(ends), []):
        (head / "config.json").write_text(json.dumps({**config, "end_token_ids": known}))
        output = tmp_path / f"accuracy {len(known)}"
        words = ["--target", TARGET, "--heads", f"e={head}", "--dataset", str(dataset), "--rows", "8", "--threads", "1"]
        status, told = run_script("scripts/accuracy.py", *words, "--output", str(output))
        assert status == 0, told
        counted.append([one["counted"] for one in json.loads((output / "accuracy.json").read_text())["e"]])
    right, longer = [0, 0, 0], 0
    for row in split_held_out(load_distilled(str(dataset)).dataset, 8)[1]:
        mask, labels = row["assistant_mask"], row["greedy_ids"]
        for anchor in range(len(mask)):
            for offset in range(3):
                written = mask[anchor + 1 : anchor + 3 + offset]
                ended = ends & set(labels[anchor + 2 : anchor + 2 + offset])
                fits = len(written) == 2 + offset and all(written)
                right[offset] += fits and not ended
                longer += fits and bool(ended)
    assert counted == [right, right] and longer
