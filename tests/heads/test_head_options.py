"""Option values that no head can work with are refused by name."""

import pytest

from draft_heads.heads.checkpoint import head_classes
from tests.heads.small import SIZES


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
