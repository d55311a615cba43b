"""The form of the published EAGLE-3 heads, which vLLM, SGLang and llama.cpp's converter read.

Layers are named twice: `eagle_aux_hidden_state_layer_ids` as here (k is transformers' `hidden_states[k]`), and one less
in `eagle_config`, to which SGLang adds one: always until May 2026, since then in some of its models where the first is
1, and for gpt-oss never. A mistake by one changes no answer, only how many drafts are accepted.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from draft_heads.configs.options import check_whole
from draft_heads.heads.block import LLAMA_NAMES
from draft_heads.heads.checkpoint import misfits
from draft_heads.heads.draft_vocab import check_draft_vocab
from draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head

logger = logging.getLogger(__name__)

BLOCK = {**LLAMA_NAMES, "input_layernorm": "token_norm", "hidden_norm": "attention_norm"}
"""Their names of a layer's parts → this block's."""
OUTSIDE = {"fc": "layer_projection", "norm": "norm", "lm_head": "lm_head"}
ONLY = {
    **{"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "num_hidden_layers": 1, "logit_scale": 1.0},
    **{"norm_before_residual": False, "norm_output": False, "partial_rotary_factor": 1.0},
    **{"return_hidden_post_norm": False, "use_mtp_layernorm": False, "use_aux_hidden_state": True},
    **{"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "parallel_draft_step": 1},
    "layer_types": "full_attention",
}
"""Settings of other heads that this block does not have: their only values here, which are the loaders' defaults; of
`layer_types`, a list, the first."""


def write(head: Eagle3Head, target: Any, target_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """See `formats.Format`; a line where not every SGLang reads the same layers."""
    layers = head.config.target_layers
    if len(layers) == 3 and (getattr(target, "model_type", "") == "gpt_oss" or layers[0] != 2):
        logger.warning(
            "SGLang reads the layers from eagle_config, which names %s; versions since May 2026 add one to each only "
            "where the first is 1, and not for gpt-oss: if few drafts are accepted there, write %s in their place",
            " ".join(str(layer - 1) for layer in layers),
            " ".join(map(str, layers)),
        )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **sizes(head, target),
        "draft_vocab_size": head.config.classes,
        **layer_ids(head),
        "base_model_name_or_path": target_name,
    }, tensors_of(head, "midlayer")


def sizes(head: Eagle3Head, target: Any) -> dict[str, Any]:
    """The block as a Llama of one layer; `target` is the target's transformers config."""
    config = head.config
    dtype = str(getattr(target, "dtype", None) or "float32").removeprefix("torch.")
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "model_type": "llama",
        **{name: getattr(config, name) for name in (*same, "vocab_size", "rms_norm_eps")},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # what engines on transformers 4 read
        "max_position_embeddings": target.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "dtype": dtype,  # the target's: an engine that reads float32 may take float16 beside a target in bfloat16
        "torch_dtype": dtype,
    }


def layer_ids(head: Eagle3Head) -> dict[str, Any]:
    """Which layers of the target are read, in both countings; ValueError unless there are three, as engines have it."""
    layers = head.config.target_layers
    if len(layers) != 3:
        raise ValueError(
            "engines read EAGLE-3 heads of three layers; this one reads "
            f"{' '.join(map(str, layers)) or 'the last hidden state'}; train it with --target_layers LOW MIDDLE HIGH"
        )
    return {
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
        },
    }


def tensors_of(head: Eagle3Head, layer: str) -> dict[str, Tensor]:
    """All tensors, those of the block below `layer`; no embedding: engines take the target's.

    `d2t` and `t2d` only with a draft vocabulary: vLLM refuses them where all tokens can be drafted.
    """
    state = head.state_dict()
    tensors = {f"{layer}.{theirs}.weight": state[f"block.{ours}.weight"] for theirs, ours in BLOCK.items()}
    tensors |= {f"{theirs}.weight": state[f"{ours}.weight"] for theirs, ours in OUTSIDE.items()}
    if head.draft_vocab is None:
        return tensors
    drafted = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    drafted[head.draft_vocab] = True
    return {**tensors, "d2t": head.draft_vocab - torch.arange(len(head.draft_vocab)), "t2d": drafted}


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3Head:
    """See `formats.Format`; published heads name no layers, or an empty list, where they read the usual ones of their
    target. Those that eagle_config alone names count from one less if the first is 1, else nobody knows from what."""
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if inner not in (None, []):
        named, inner = inner, [layer + 1 for layer in checked_layers(inner)]
        if layers in (None, []) and named[0] != 1:
            raise ValueError(
                f"eagle_config alone names the layers, {named}, which vLLM takes as they are and SGLang, depending on "
                f"target and version, one higher; give the right ones as --target_layers {' '.join(map(str, named))} "
                f"or {' '.join(map(str, inner))}"
            )
        if layers not in (None, [], inner):
            raise ValueError(
                f"config.json names the layers {layers}, and {inner} in eagle_config (counted from one less); give "
                "the right ones as --target_layers LOW MIDDLE HIGH"
            )
        layers = inner
    return assembled(config, tensors, "midlayer", layers)


def checked_layers(layers: Any) -> list[int]:
    """ValueError unless they are whole numbers, none below 0: "2" or -1 would be another layer, or none."""
    if not isinstance(layers, list) or any(type(layer) is not int or layer < 0 for layer in layers):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids must be a list of layer numbers; got {layers!r}; give the right ones as "
            "--target_layers LOW MIDDLE HIGH"
        )
    return layers


def drafted_ids(tensors: dict[str, Tensor], classes: int, vocabulary: int) -> Tensor | None:
    """[D] the ids that `d2t` stands for; None where the head drafts from all tokens. ValueError where `d2t` or `t2d`
    cannot be read, or they contradict each other or the rows of the LM head."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and classes != vocabulary:
        raise ValueError(f"a head with {classes} of {vocabulary} tokens needs d2t, which its tensors lack")
    ids = torch.arange(classes)
    if d2t is not None:
        if d2t.is_floating_point() or d2t.dtype == torch.bool or d2t.shape != (classes,):
            raise ValueError(
                f"d2t must be {classes} whole numbers, as many as lm_head.weight has rows; got {d2t.dtype} of shape "
                f"{tuple(d2t.shape)}; copy the folder again"
            )
        ids = ids + d2t.long()
        check_draft_vocab(ids, classes, vocabulary)
    if t2d is not None:
        marked = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
        if t2d.shape != marked.shape or not torch.equal(t2d.bool(), marked):
            differ = (
                f"{int((t2d.bool() != marked).sum())} tokens differ" if t2d.shape == marked.shape else "another size"
            )
            raise ValueError(
                f"t2d must mark the {classes} of {vocabulary} tokens that d2t names; {differ}; copy the folder again"
            )
    return None if classes == vocabulary else ids


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a head's one block, of every place in which a config may have them: `rope_theta`,
    `rope_parameters` and, as it was called, `rope_scaling`, by type of layer or for all. ValueError where two differ.
    """
    found: dict[str, Any] = {}
    for part in (config.get("rope_parameters") or {}, config.get("rope_scaling") or {}, config):
        if not isinstance(part, dict):
            raise ValueError(f"rope_parameters of config.json must be an object; got {part!r}; copy it again")
        settings = {"rope_theta": config.get("rope_theta")} if part is config else part
        layers = [one for one in settings.values() if isinstance(one, dict)]
        for name, value in [pair for one in (*layers, settings) for pair in one.items()]:
            if value is not None and not isinstance(value, dict) and found.setdefault(name, value) != value:
                raise ValueError(
                    f"a head has one block with one {name}; config.json has {found[name]!r} and {value!r}; correct one"
                )
    return found


def assembled(config: dict[str, Any], tensors: dict[str, Tensor], layer: str, layers: list[int] | None) -> Eagle3Head:
    """A head from the sizes of its block and its tensors."""
    if layers in (None, []):
        raise ValueError(
            "config.json names no layers of the target (eagle_aux_hidden_state_layer_ids), and a guess wrong by "
            "one is silent; give them as --target_layers LOW MIDDLE HIGH (published heads: 2, n/2 and n-3 of n)"
        )
    rope = rope_of(config)
    inside = config.get("eagle_config")
    settings = {**config, **rope, "layer_types": (config.get("layer_types") or [None])[0]}
    for part in (settings, inside if isinstance(inside, dict) else {}):
        for name, only in ONLY.items():
            if (value := part.get(name)) not in (None, only):
                raise ValueError(
                    f"{name} must be {only!r}; got {value!r}; such a head would draft nonsense and is not read"
                )
    for scaling in (rope.get("rope_type", "default"), rope.get("type", "default")):
        if scaling != "default":
            raise ValueError(f"the head's rotary positions are of type {scaling}; only the default type can be read")
    classes = len(tensors["lm_head.weight"])
    if (stated := config.get("draft_vocab_size")) not in (None, classes):
        raise ValueError(f"draft_vocab_size {stated} must be the rows of lm_head.weight, {classes}; copy both again")
    sizes = {name: config[name] for name in ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")}
    for name, size in sizes.items():
        check_whole(name, size, least=1, remedy="copy it again")
    ids = drafted_ids(tensors, classes, sizes["vocab_size"])
    made = Eagle3Config.from_dict(
        {
            **sizes,
            "num_key_value_heads": config.get("num_key_value_heads") or sizes["num_attention_heads"],
            "head_dim": config.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"],
            "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
            "rope_theta": rope.get("rope_theta") or 10000.0,
            "target_layers": checked_layers(layers),
            "draft_vocab_size": 0 if ids is None else classes,
        }
    )
    for name in ("rms_norm_eps", "rope_theta"):
        if not 0 < getattr(made, name) < math.inf:
            raise ValueError(f"{name} must be a positive number; got {getattr(made, name)}; copy it again")
    head = Eagle3Head(made)
    names = {f"{layer}.{theirs}.weight": f"block.{ours}.weight" for theirs, ours in BLOCK.items()}
    names |= {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in OUTSIDE.items()}
    unknown = set(tensors) - set(names) - {"d2t", "t2d", "embed_tokens.weight"}
    if missing := sorted(set(names) - set(tensors)) or sorted(unknown):
        raise ValueError(f"this is no EAGLE-3 head of one layer: {', '.join(missing)} missing or unexpected")
    state = {ours: tensors[theirs] for theirs, ours in names.items()}
    if ids is not None:
        state["draft_vocab"] = ids
    if problems := misfits(head, state):
        raise ValueError(f"its tensors do not fit: {'; '.join(problems)}; copy the folder again")
    head.load_state_dict(state)
    return head.eval()
