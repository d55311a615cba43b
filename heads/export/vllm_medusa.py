"""vLLM's Medusa. Every size is written: its loader's defaults are others, and a bias that it is not told of is lost."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from draft_heads.heads.checkpoint import misfits
from draft_heads.heads.medusa import MedusaConfig, MedusaHead


def check(head: MedusaHead) -> None:
    """ValueError for what no engine's Medusa can do."""
    if head.config.target_layers:
        raise ValueError(
            "no engine's Medusa reads several layers of the target; this head was trained with --target_layers "
            f"{' '.join(map(str, head.config.target_layers))}; train one without"
        )


def names_of(
    heads: int, layers: int, vocabulary: str = "lm_heads.{k}.weight", layer: str = "blocks.{k}.layers.{index}.{part}"
) -> dict[str, str]:
    """This head's names of tensors → a format's, whose patterns are given."""
    return {f"heads.{k}.vocabulary.weight": vocabulary.format(k=k) for k in range(heads)} | {
        f"heads.{k}.layers.{index}.linear.{part}": layer.format(k=k, index=index, part=part)
        for k in range(heads)
        for index in range(layers)
        for part in ("weight", "bias")
    }


def write(head: MedusaHead, target: Any, target_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """See `formats.Format`."""
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": head.config.hidden_size,
        "vocab_size": head.config.vocab_size,
        "truncated_vocab_size": head.config.vocab_size,
        "num_heads": head.config.heads,
        "num_hidden_layers": head.config.layers,
        "original_lm_head": False,
        "medusa_fc_bias": True,
        "base_model_name_or_path": target_name,
    }
    return config, tensors_of(head, names_of(head.config.heads, head.config.layers))


def tensors_of(head: MedusaHead, names: dict[str, str]) -> dict[str, Tensor]:
    """The head's tensors under their names. Engines read vocabulary matrices of all tokens: one that is never drafted
    gets the mean of the rows of those that are, so its logit is their mean and never the largest. `token_map`, which
    engines then pass over, tells our reader which those are."""
    state = head.state_dict()
    tensors = {theirs: state[ours] for ours, theirs in names.items()}
    if head.draft_vocab is None:
        return tensors
    for ours, theirs in names.items():
        if ours.endswith("vocabulary.weight"):
            whole = state[ours].mean(0).repeat(head.config.vocab_size, 1)
            whole[head.draft_vocab] = state[ours]
            tensors[theirs] = whole
    return {**tensors, "token_map": head.draft_vocab}


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> MedusaHead:
    """See `formats.Format`; as vLLM reads it, which drops biases unless `medusa_fc_bias` is true, a prefix
    `medusa_heads.` of the names, and takes the first offset's LM head for a shared one."""
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    if config.get("original_lm_head") and "lm_head.weight" not in tensors and "lm_heads.0.weight" in tensors:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    layers, hidden, vocabulary = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    shared = {"vocabulary": "lm_head.weight"} if config.get("original_lm_head") else {}  # of all offsets
    names = names_of(config["num_heads"], layers, **shared)
    classes, kept = len(tensors.get("token_map", range(vocabulary))), config.get("truncated_vocab_size") or vocabulary
    if kept not in (classes, vocabulary):
        raise ValueError(f"truncated_vocab_size {kept} must be the number of tokens that can be drafted, {classes}")
    head = assembled(names, tensors, layers, hidden, vocabulary, bool(config.get("medusa_fc_bias")))
    scale = config.get("logit_scale", 1.0)
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"logit_scale must be a positive number; got {scale!r}; copy it again")
    with torch.no_grad():
        for one in head.offset_heads:
            one.vocabulary.weight *= scale
    return head


def assembled(
    names: dict[str, str], tensors: dict[str, Tensor], layers: int, hidden: int, vocab_size: int, biased: bool
) -> MedusaHead:
    """A head from tensors under other names; a layer without a bias has one of zeros here."""
    heads = sum(name.endswith("vocabulary.weight") for name in names)
    needed = {theirs for theirs in names.values() if biased or not theirs.endswith("bias")}
    missing, unknown = sorted(needed - set(tensors)), sorted(set(tensors) - needed - {"token_map"})
    if missing or unknown:
        raise ValueError(
            f"a Medusa head of {heads} offsets, {layers} layers and medusa_fc_bias {str(biased).lower()} "
            f"{'needs' if missing else 'has no'} {', '.join(missing or unknown)}; correct its config.json"
        )
    token_map = tensors.get("token_map")
    size = 0 if token_map is None else len(token_map)
    sizes = {"hidden_size": hidden, "vocab_size": vocab_size, "heads": heads, "layers": layers}
    head = MedusaHead(MedusaConfig.from_dict({**sizes, "draft_vocab_size": size}))
    state = {ours: tensors.get(theirs, torch.zeros(hidden)) for ours, theirs in names.items()}
    if token_map is not None:
        head.set_draft_vocab(token_map)
        for name, weight in state.items():
            if name.endswith("vocabulary.weight") and len(weight) > size:
                state[name] = weight[token_map]
        state["draft_vocab"] = token_map
    if problems := misfits(head, state):
        raise ValueError(f"its tensors do not fit: {'; '.join(problems)}; copy the folder again")
    head.load_state_dict(state)
    return head.eval()
