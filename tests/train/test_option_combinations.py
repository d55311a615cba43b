"""Random options of every head: trained for two steps, exported, read back; drafts are lossless and β is the decoder's.

A combination may be refused, in a sentence and before training; then another is drawn.
"""

import json
import os
import random
from dataclasses import fields

import pytest

from draft_heads.heads.checkpoint import HEADS, head_classes, load_head
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.train.held_out import greedy_answers
from draft_heads.train.options import RunOptions
from draft_heads.train.training_arguments import parse_options
from draft_heads.train.training_data import load_data
from tests.running import run_script
from tests.train.runs import TARGET

RANGES = {  # of heads' options that have no choices; others keep their default, or are true or false
    "heads": (1, 2, 5),
    "layers": (0, 1, 2),
    "decay": (0.1, 0.8, 1),
    "dropout": (0, 0.2, 0.9),
    "frames": (1, 2, 4, 7),
    "labels": (1, 2, 3, 4),
    "label_context": (0, 0, 1, 5),
    "ctc_weight": (0, 0.5, 1),
    "regression_weight": (0, 0, 1),
    "soft_weight": (0, 0, 0.1),
    "order": (1, 3, 5),
    "ce_weight": (0.1, 1),
    "mse_weight": (0, 1),
    "passes": (1, 2, 4),
    "target_layers": ((), (1,), (1, 2)),
    "anchors": (0, 1, 6),
    "draft_vocab_size": (0, 0, 4, 300, 1024),
}
TRAINING = {  # lists of flags, one of which is drawn
    "rows": ("--per_device_train_batch_size 1", "--per_device_train_batch_size 5", "--tokens_per_batch 1500"),
    "packing": ("", "", "--packing"),
    "accumulation": ("", "--gradient_accumulation_steps 3"),
    "precision": ("", "--bf16"),
    "optimizer": ("", "--head_optimizer muon", "--optim adamw_torch", "--optim sgd", "--optim adafactor"),
    "clipping": ("", "--clip value", "--max_grad_norm 0", "--max_grad_norm 1e-3"),
    "schedule": ("", "--lr_scheduler_type constant", "--lr_scheduler_type polynomial --warmup_steps 1"),
    "length": ("", "--max_length 120"),
    "held_out": ("--held_out 1", "--held_out 4"),
    "simulated": ("--simulate_nodes 1", "--simulate_nodes 6", "--simulate_nodes 64", "--simulate_rows 0"),
    "evaluation": ("--eval_strategy no", "--eval_strategy steps --eval_steps 1", "--eval_strategy epoch"),
    "best": ("--save_steps 2", "", "--patience 1", "--load_best_model_at_end true --save_strategy best"),
    "epsilon": ("", "--adam_epsilon 1e-3", "--weight_decay 0.3"),
}
ALWAYS = "--max_steps 2 --logging_steps 1 --per_device_eval_batch_size 3 --report_to none --threads 1"


def draw(kind, rng):
    """The words of a command line: some of the head's options, some of training's."""
    words = []
    for f in fields(head_classes(kind)[1]):
        if "help" not in f.metadata or rng.random() < 0.3:
            continue
        usual = ("true", "false") if isinstance(f.default, bool) else (f.default,)
        value = rng.choice(f.metadata.get("choices") or RANGES.get(f.name) or usual)
        if value != ():
            words += [f"--{f.name}", *map(str, value if isinstance(value, tuple) else (value,))]
    for choices in TRAINING.values():
        words += rng.choice(choices).split()
    return words


@pytest.fixture(scope="session")
def generated(distil, tmp_path_factory):
    flags = ("--labels", "generate", "--max_new_tokens", "20", "--limit", "24")
    return distil(tmp_path_factory.mktemp("generated") / "out", *flags)


def check_combination(kind, seed, generated, tmp_path, monkeypatch):
    monkeypatch.setattr("draft_heads.train.run.save_loss_plot", lambda *_: None)  # takes as long as a run
    rng, output = random.Random(f"{kind} {seed}"), tmp_path / "run"
    for attempt in range(100):
        words = draw(kind, rng)
        folder = output / str(attempt)
        given = ["--target", TARGET, "--dataset", generated, "--output_dir", str(folder), *ALWAYS.split(), *words]
        status, told = run_script(f"train/{kind}.py", *given)
        if status == 0:
            break
        reason = told.strip().splitlines()[-1]
        assert reason.startswith((f"{kind}.py: ", "error: ")) and "--" in reason, (words, told)
        assert " parameters for " not in told, (words, told)  # refused before, not after
    else:
        pytest.fail(f"100 combinations were refused, the last by: {reason}")
    parse_options(head_classes(kind)[1], ["--config", str(folder / "recipe.yaml")])
    provenance = json.loads((folder / "head" / "provenance.json").read_text())
    options = provenance["options"]
    head, target = load_head(folder / "head"), Target.from_pretrained(TARGET)
    assert provenance["steps"] in (1, 2) and all(p.isfinite().all() for p in head.parameters()), words
    run = RunOptions(
        **{name: options[name] for name in ("target", "held_out", "max_length", "packing")}, dataset=[generated]
    )
    _, held_out, _, collator = load_data(run, target, head.config.target_layers)
    drafter = build_drafter(DrafterSpec.parse(f"{kind}={folder / 'head'}"), target, options["simulate_nodes"])
    engine, tokens, steps = DecodingEngine(target, drafter), 0, 0
    for row in held_out.select(range(min(options["simulate_rows"], len(held_out)))):
        text = {name: values[0] for name, values in collator([row]).items()}
        ids = text["input_ids"].tolist()
        for begin, start, end in greedy_answers(text):
            decoded = engine.generate(ids[begin:start], GenerationSettings(end - start))
            assert list(decoded.tokens) == ids[start:end], words  # lossless
            tokens, steps = tokens + len(decoded.tokens), steps + decoded.target_steps
    simulated = provenance["metrics"].get("eval_simulated_beta")
    assert simulated == (pytest.approx(tokens / steps, abs=1e-4) if steps else None), words


@pytest.mark.parametrize("kind", HEADS)
def test_a_random_combination_of_options_trains_exports_and_drafts(kind, generated, tmp_path, monkeypatch):
    check_combination(kind, 0, generated, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 1 + (24 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 6)))
@pytest.mark.parametrize("kind", HEADS)
def test_many_random_combinations_of_options_train_export_and_draft(kind, seed, generated, tmp_path, monkeypatch):
    check_combination(kind, seed, generated, tmp_path, monkeypatch)
