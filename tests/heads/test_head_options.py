"""Option values that no head can work with are refused by name."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from draft_heads.heads.base import Rows
from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.heads.config import LOSS_WEIGHT
from draft_heads.train.inherited import NO_EFFECT
from tests.heads.small import SIZES, lent_target


@pytest.mark.parametrize(
    "kind,settings,told",
    [
        ("medusa", {"heads": 0}, "--heads must be at least 1"),
        ("medusa", {"layers": -1}, "--layers"),
        ("medusa", {"decay": 0.0}, "--decay"),
        ("ctc", {"decay": 1.5}, "--decay"),
        ("medusa", {"anchors": -1}, "--anchors"),
        ("hydra", {"heads": 0}, "--heads"),
        ("hydra", {"labels_from": "air"}, "tokens, distribution"),
        ("hydra", {"dropout": 1.0}, "--dropout"),
        ("chimera", {"order": 0}, "--order must be from 1 to 5; got 0"),
        ("chimera", {"order": 6}, "--order"),
        ("chimera", {"encoder": "lstm"}, "kgram, target_layer0_frozen"),
        ("chimera", {"projection": "none"}, "full, shared"),
        ("chimera", {"ce_weight": 0.0}, "--ce_weight must be above 0; got 0.0"),
        *(
            (kind, {name: value}, f"--{name} must be .*; got {value}")
            for kind, names in (
                ("chimera", ("ce_weight", "mse_weight")),
                ("ctc", ("ctc_weight", "regression_weight", "soft_weight")),
            )
            for name in names
            for value in (float("nan"), float("inf"), -1.0)
        ),
        ("ctc", {"ctc_weight": 0.0}, "must not all be 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind, settings, told):
    with pytest.raises(ValueError, match=told):
        head_classes(kind)[1](**SIZES, **settings)


def other_values(field, value):
    """Values of an option that differ from this one."""
    if choices := field.metadata.get("choices"):
        return [choice for choice in choices if choice != value]
    if isinstance(value, float):
        return [value / 2 or 1.0]
    return [{"draft_vocab_size": 40, "target_layers": [1]}.get(field.name, value - 1 if value else 1)]


def measures(head_type, config):
    """What a head is trained and evaluated by, and the shapes of its weights."""
    torch.manual_seed(3)
    head, view = head_type(config), lent_target()
    for name, parameter in sorted(head.named_parameters()):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    ids = torch.randint(1, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    greedy = torch.where(torch.arange(20) % 5 > 0, ids, 1)  # text and labels differ at some places
    aux = torch.randn(2, 20, 32 * len(config.target_layers)) if config.target_layers else None
    hidden, mask = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(1)), torch.ones(2, 20, dtype=bool)
    rows = Rows.of(hidden, ids, None, None, aux)
    given = (rows.hidden, ids, greedy, mask, view, rows.segment_ids, rows.position_ids, rows.aux_hidden)
    torch.manual_seed(4)
    trained = head.train()(*given)
    evaluated = head.eval()(*given)
    shapes = {name: tuple(x.shape) for name, x in head.named_parameters()}
    trains = [name for name, x in head.named_parameters() if x.requires_grad]
    return float(trained.total.detach()), int(trained.windows), evaluated.scored.tolist(), shapes, trains


def zero_weights(kind):
    """A head's options with each of its weights of a loss at 0, and with none."""
    config = head_classes(kind)[1]
    base = {"frames_from": "chain", "regression_weight": 1.0, "soft_weight": 0.1} if kind == "ctc" else {}
    weights = [f.name for f in fields(config) if f.metadata.get("rule") == LOSS_WEIGHT]
    return [base, *({**base, weight: 0.0} for weight in weights)]


@pytest.mark.parametrize("kind, settings", [(kind, settings) for kind in HEADS for settings in zero_weights(kind)])
def test_every_option_changes_the_training_or_is_refused(kind, settings):
    head_type, config_type = head_classes(kind)
    config = config_type(**SIZES, **settings)
    before, idle = measures(head_type, config), []
    for f in fields(config):
        if "help" not in f.metadata or f.name in settings:
            continue
        for other in other_values(f, getattr(config, f.name)):
            try:
                changed = replace(config, **{f.name: other})
            except ValueError:
                continue
            read = SimpleNamespace(**vars(changed))
            refused = any(
                f.name in names and hasattr(config, taker) and takes_effect_away(read)
                for names, taker, takes_effect_away, _ in NO_EFFECT
            )
            if not refused and measures(head_type, changed) == before:
                idle.append((f.name, other))
    assert idle == []
