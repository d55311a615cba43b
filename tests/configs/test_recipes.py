"""Recipes merged by rule: three of them written out, and what holds for all."""

import shutil

import pytest
import yaml

from draft_heads.configs import recipes
from draft_heads.configs.options import option_names
from draft_heads.configs.recipes import (
    SHAPES,
    SIZE_CLASSES,
    format_sources,
    load_recipe,
    merge_sources,
    recipe_names,
    recipe_shape,
    recipe_sources,
    size_class,
)
from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.train.inherited import READ
from draft_heads.train.options import RunOptions, TrainingOptions

CELLS = {
    ("ctc", "8b"): {
        "frames": 8,
        "labels": 4,
        "context": "hidden+token",
        "labels_cut": "agree",
        "decay": 0.7,
        "draft_vocab_size": 32000,
        "anchors": 256,
        "max_length": 4096,
        "num_train_epochs": 2,
        "tokens_per_batch": 8192,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1.0e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "adam_beta2": 0.95,
        "max_grad_norm": 0.5,
        "bf16": True,
        "held_out": 256,
        "simulate_rows": 64,
        "logging_steps": 20,
        "eval_strategy": "steps",
        "eval_steps": 500,
        "save_steps": 500,
        "save_total_limit": 2,
        "report_to": "tensorboard",
        "dataloader_num_workers": 2,
    },
    ("medusa", "tiny"): {
        "heads": 4,
        "layers": 1,
        "decay": 0.8,
        "anchors": 24,
        "max_minutes": 15,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "head_optimizer": "auto",
        "learning_rate": 8.0e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 100,
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "held_out": 64,
        "simulate_rows": 32,
        "logging_steps": 50,
        "eval_strategy": "steps",
        "eval_steps": 1000,
        "save_steps": 1000,
        "save_total_limit": 2,
        "report_to": "tensorboard",
        "dataloader_num_workers": 0,
    },
    ("chimera", "vicuna-13b"): {
        "heads": 4,
        "encoder": "kgram",
        "order": 3,
        "projection": "full",
        "residual": True,
        "ce_weight": 1.0,
        "mse_weight": 1.0,
        "anchors": 128,
        "chat_template": "vicuna",
        "max_length": 2048,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "learning_rate": 3.0e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "max_grad_norm": 0.5,
        "bf16": True,
        "held_out": 256,
        "simulate_rows": 64,
        "logging_steps": 20,
        "eval_strategy": "steps",
        "eval_steps": 500,
        "save_steps": 500,
        "save_total_limit": 2,
        "report_to": "tensorboard",
        "dataloader_num_workers": 2,
    },
}
SIZES = [name for _, name in SIZE_CLASSES]
NAMES = ["tiny", "1b-cpu", *SIZES[1:]]


@pytest.mark.parametrize("kind, name", CELLS)
def test_three_recipes_written_out(kind, name):
    merged = load_recipe(kind, name)
    assert {key: (type(value), value) for key, value in merged.items()} == {
        key: (type(value), value) for key, value in CELLS[kind, name].items()
    }


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_has_a_recipe_of_every_name_and_known_options_only(kind):
    names = recipe_names(kind)
    papers = ["vicuna-7b", "vicuna-13b", "vicuna-33b", "llama2-chat-7b", "llama2-chat-13b"]
    assert names == [*NAMES, *papers, *(["paper", "published-code"] if kind == "ctc" else [])]
    known = {*READ, *option_names(RunOptions), *option_names(TrainingOptions), *option_names(head_classes(kind)[1])}
    for name in names:
        assert set(load_recipe(kind, name)) <= known
        assert recipe_shape(name) in SHAPES


def test_learning_rates_fall_as_one_over_the_width_of_the_size_class():
    rates = [load_recipe("hydra", name)["learning_rate"] for name in SIZES]
    assert rates == [3e-3, 1e-3, 5e-4, 4e-4, 4e-4, 2.5e-4]  # of 3e-3 (tiny, Muon), and 5e-4 at width 4096
    assert load_recipe("chimera", "14b")["learning_rate"] == 2.4e-4  # 3e-4 * 4096 / 5120 to six digits
    assert [load_recipe("ctc", name)["learning_rate"] for name in ("1b", "vicuna-7b", "paper")] == [2e-4, 3e-5, 3e-5]
    assert load_recipe("medusa", "vicuna-33b")["learning_rate"] == 1e-3  # a paper's target: whatever its width


def test_the_base_rate_stands_beside_one_that_is_written():
    rates = {("ctc", "tiny"): 3.2e-3, ("medusa", "tiny"): 3.2e-2, ("eagle3", "1b-cpu"): 1e-3}
    for (kind, name), rate in rates.items():  # base · 4096 / width: 1e-4 · 32, 1e-3 · 32, 5e-4 · 2
        assert merge_sources(recipe_sources(kind, name, written_rate=False))["learning_rate"] == rate


def test_size_classes_go_by_parameters():
    assert [size_class(1e6 * millions) for millions in (2, 135, 8_000, 14_000, 32_000, 235_000)] == SIZES


def test_sources_say_where_each_setting_is_from():
    text = format_sources(recipe_sources("medusa", "tiny"))
    assert yaml.safe_load(text) == load_recipe("medusa", "tiny")
    assert "# medusa.yaml, tiny\nlearning_rate: 0.008\n" in text and text.count("learning_rate") == 1
    text = format_sources(recipe_sources("ctc", "70b"))
    assert "# base_learning_rate 0.0001 at width 4096, here 8192\nlearning_rate: 5.0e-05\n" in text
    assert "# ctc.yaml, sizes\ndecay: 0.7\n" in text


@pytest.fixture
def own_recipes(tmp_path, monkeypatch):
    """A folder of recipes that a test may add to."""
    for path in recipes.RECIPES.glob("*.yaml"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(recipes, "RECIPES", tmp_path)
    return tmp_path


def test_a_head_of_a_few_lines_has_every_recipe(own_recipes):
    (own_recipes / "scratch.yaml").write_text("heads: 3\n")
    for name in recipe_names("scratch"):
        others = load_recipe("medusa", name)
        of_medusa = ("layers", "decay", "learning_rate")
        expected = {key: value for key, value in others.items() if key not in of_medusa} | {"heads": 3}
        merged = load_recipe("scratch", name)
        assert {key: value for key, value in merged.items() if key != "learning_rate"} == expected
        assert merged["learning_rate"] == (3e-3 if name in ("tiny", "1b-cpu") else others["learning_rate"] / 2)


def test_a_head_without_a_file_and_unknown_names_are_refused_in_a_sentence(own_recipes):
    with pytest.raises(ValueError, match=r"the scratch head has no recipes: .*scratch.yaml is missing; create it"):
        recipe_names("scratch")
    with pytest.raises(ValueError, match="the medusa head has no recipe paper; pass one of tiny, 1b-cpu, 1b, 8b"):
        load_recipe("medusa", "paper")
    (own_recipes / "scratch.yaml").write_text("tinny:\n  heads: 3\n")
    with pytest.raises(ValueError, match="unknown section tinny; valid are sizes, papers, recipes, tiny, 1b"):
        load_recipe("scratch", "tiny")
