"""The `speculators` form of EAGLE-3, which vLLM reads: the same tensors, the sizes in a part of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draft_heads.heads.eagle3 import Eagle3Head
from draft_heads.heads.export import eagle3

VERSION = "0.3.0"
"""Of the format that is written."""


def write(head: Eagle3Head, target: Any, target_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """See `formats.Format`."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": head.config.classes,
        "norm_before_residual": False,  # g itself is the residual stream; a loader takes a missing one for true
        "eagle_aux_hidden_state_layer_ids": eagle3.layer_ids(head)["eagle_aux_hidden_state_layer_ids"],
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": eagle3.sizes(head, target),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target_name, "architectures": list(target.architectures or [])},
        },
    }, eagle3.tensors_of(head, "layers.0")


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3Head:
    """See `formats.Format`."""
    around = {"norm_before_residual": True, **config}  # what a loader takes it for where it is missing
    named = ("norm_before_residual", "norm_output", "draft_vocab_size")
    sizes = config["transformer_layer_config"] | {name: around.get(name) for name in named}
    return eagle3.assembled(sizes, tensors, "layers.0", config.get("eagle_aux_hidden_state_layer_ids"))
