"""What the trainer takes of the rows before the first step, and what it says of their labels."""

from types import SimpleNamespace

import datasets
import pytest
from transformers import GenerationConfig

from draft_heads.heads.checkpoint import head_classes
from draft_heads.train.trainer import DraftHeadTrainer
from draft_heads.train.training_data import warn_of_other_rules, warn_of_own_settings


class Taken(Exception):
    """The rows that start values are made from."""


def test_start_values_are_of_rows_of_any_length_whatever_their_order():
    """Rows with cached states are stored by length."""
    rows = datasets.Dataset.from_list([{"assistant_mask": [False] + [True] * length} for length in range(200)])

    def collate(taken):
        raise Taken([sum(row["assistant_mask"]) for row in taken])

    trainer = SimpleNamespace(train_dataset=rows, longest=300, data_collator=collate)
    with pytest.raises(Taken) as found:
        DraftHeadTrainer.start_head(trainer, 64)
    (lengths,) = found.value.args
    assert len(lengths) == 64 and min(lengths) > 1
    assert 80 < sum(lengths) / 64 < 120  # of all rows: 101; of the first 64: 33


@pytest.mark.parametrize(
    ("settings", "ends", "told"),
    [
        ({}, [2], None),
        ({"repetition_penalty": 1.2}, [2], "other generation settings when --dataset D was labelled (none, now {'re"),
        ({"temperature": 0.5, "do_sample": True}, [2], None),  # which do not choose labels
        ({}, [2, 5], "other end tokens when --dataset D was labelled ([2], now [2, 5])"),
    ],
)
def test_labels_that_were_chosen_under_other_settings_are_told(settings, ends, told, caplog):
    target = SimpleNamespace(
        model=SimpleNamespace(generation_config=GenerationConfig(**settings)), end_token_ids=tuple(ends)
    )
    warn_of_other_rules("D", SimpleNamespace(manifest={"settings": {}, "end_token_ids": [2]}), target)
    assert told in caplog.text if told else not caplog.messages


@pytest.mark.parametrize(
    ("kind", "options", "learns"),
    [
        ("eagle3", {}, True),
        ("hydra", {"labels_from": "distribution"}, True),
        ("hydra", {}, False),
        ("ctc", {"frames_from": "chain", "soft_weight": 0.1}, True),
        ("ctc", {}, False),
        ("medusa", {}, False),
        ("chimera", {}, False),
    ],
)
def test_settings_that_the_learned_distribution_has_not_are_told(kind, options, learns, caplog):
    config = head_classes(kind)[1](**options)
    for settings in ({"repetition_penalty": 1.2}, {}):
        caplog.clear()
        warn_of_own_settings(
            config, SimpleNamespace(model=SimpleNamespace(generation_config=GenerationConfig(**settings)))
        )
        told = "repetition_penalty=1.2 of the target's generation_config.json: in the labels"
        assert (told in caplog.text) == bool(caplog.messages) == (learns and bool(settings))
