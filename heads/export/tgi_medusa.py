"""The tensors of FasterDecoding's Medusa in the file that TGI reads; with the sizes that vLLM asks for."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from draft_heads.heads.export import vllm_medusa
from draft_heads.heads.medusa import MedusaHead

logger = logging.getLogger(__name__)


def _names(heads: int, layers: int) -> dict[str, str]:
    """This head's names of tensors → theirs."""
    return vllm_medusa.names_of(heads, layers, f"{{k}}.{layers}.weight", "{k}.{index}.linear.{part}")


def write(head: MedusaHead, target: Any, target_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """See `formats.Format`. No `architectures`: TGI takes a folder that has them for a whole model."""
    config = {
        "medusa_num_heads": head.config.heads,
        "medusa_num_layers": head.config.layers,
        "base_model_name_or_path": target_name,
        "hidden_size": head.config.hidden_size,
        "vocab_size": head.config.vocab_size,
        "medusa_fc_bias": True,
    }
    return config, vllm_medusa.tensors_of(head, _names(head.config.heads, head.config.layers))


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> MedusaHead:
    """See `formats.Format`; names may begin with `medusa_head.`, as in the published checkpoints."""
    tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()}
    layers = config["medusa_num_layers"]
    numbers = {name: name.partition(".")[0] for name in set(tensors) - {"token_map"}}
    if foreign := sorted(name for name, number in numbers.items() if not number.isdecimal()):
        raise ValueError(f"tensors of a head are named by its number (0.0.linear.weight); got {', '.join(foreign)}")
    heads = 1 + max(map(int, numbers.values()))
    if (stated := config.get("medusa_num_heads")) not in (None, heads):  # published folders name fewer than they have
        logger.warning(
            "config.json says medusa_num_heads %r; the tensors are those of %d heads, all of which are read",
            stated,
            heads,
        )
    if f"0.{layers}.weight" not in tensors:
        found = ", ".join(sorted(name for name in tensors if name.startswith("0.")))
        raise ValueError(f"medusa_num_layers {layers!r} needs a tensor 0.{layers}.weight; of head 0 there are {found}")
    vocabulary, hidden = tensors[f"0.{layers}.weight"].shape
    sizes = config.get("hidden_size", hidden), config.get("vocab_size", vocabulary)  # published folders name none
    return vllm_medusa.assembled(_names(heads, layers), tensors, layers, *sizes, config.get("medusa_fc_bias", True))
