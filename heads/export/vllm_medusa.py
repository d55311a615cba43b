"""vLLM's Medusa. Every size is written: its loader's defaults are others, and a bias that it is not told of is lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_heads.heads.medusa import MedusaConfig, MedusaHead


def check(head: MedusaHead) -> None:
    """ValueError for what no engine's Medusa can do."""
    if head.config.target_layers:
        raise ValueError(
            "no engine's Medusa reads several layers of the target; this head was trained with --target_layers "
            f"{' '.join(map(str, head.config.target_layers))}; train one without"
        )


def _names(heads: int, layers: int, shared: bool = False) -> dict[str, str]:
    """This head's names of tensors → theirs; shared: one vocabulary matrix for all offsets."""
    return {
        f"heads.{k}.vocabulary.weight": "lm_head.weight" if shared else f"lm_heads.{k}.weight" for k in range(heads)
    } | {
        f"heads.{k}.layers.{index}.linear.{part}": f"blocks.{k}.layers.{index}.{part}"
        for k in range(heads)
        for index in range(layers)
        for part in ("weight", "bias")
    }


def write(head: MedusaHead, target: Any, target_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """See `formats.Format`."""
    check(head)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": head.config.hidden_size,
        "vocab_size": head.config.vocab_size,
        "truncated_vocab_size": head.config.classes,
        "num_heads": head.config.heads,
        "num_hidden_layers": head.config.layers,
        "original_lm_head": False,
        "medusa_fc_bias": True,
        "base_model_name_or_path": target_name,
    }
    state = head.state_dict()
    tensors = {theirs: state[ours] for ours, theirs in _names(head.config.heads, head.config.layers).items()}
    return config, tensors if head.draft_vocab is None else {**tensors, "token_map": head.draft_vocab}


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> MedusaHead:
    """See `formats.Format`."""
    names = _names(config["num_heads"], config["num_hidden_layers"], bool(config.get("original_lm_head")))
    return assembled(names, tensors, config["num_hidden_layers"], config["vocab_size"], tensors.get("token_map"))


def assembled(
    names: dict[str, str], tensors: dict[str, Tensor], layers: int, vocab_size: int, token_map: Tensor | None = None
) -> MedusaHead:
    """A head from tensors under other names; a layer without a bias has one of zeros here."""
    heads = sum(name.endswith("vocabulary.weight") for name in names)
    missing = sorted(theirs for theirs in names.values() if theirs not in tensors and not theirs.endswith("bias"))
    if missing:
        raise ValueError(f"a Medusa head of {heads} offsets and {layers} layers needs {', '.join(missing)}")
    if unknown := sorted(set(tensors) - set(names.values()) - {"token_map"}):
        raise ValueError(f"a Medusa head of {heads} offsets and {layers} layers has no {', '.join(unknown)}")
    classes, hidden = tensors[names["heads.0.vocabulary.weight"]].shape
    size = classes if token_map is not None else 0
    head = MedusaHead(
        MedusaConfig(hidden_size=hidden, vocab_size=vocab_size, heads=heads, layers=layers, draft_vocab_size=size)
    )
    state = {ours: tensors.get(theirs, torch.zeros(hidden)) for ours, theirs in names.items()}
    if token_map is not None:
        head.set_draft_vocab(token_map)
        state["draft_vocab"] = token_map
    head.load_state_dict(state)
    return head.eval()
