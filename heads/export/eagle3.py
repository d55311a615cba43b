"""The form of the published EAGLE-3 heads, which vLLM, SGLang and llama.cpp's converter read.

Layers are named twice: `eagle_aux_hidden_state_layer_ids` as here (k is transformers' `hidden_states[k]`), and one less
in `eagle_config`, to which SGLang adds one. A mistake by one changes no answer, only how many drafts are accepted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head

BLOCK = {
    "input_layernorm": "token_norm",
    "hidden_norm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    **{f"self_attn.{name}_proj": f"{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}_proj": f"{name}_proj" for name in ("gate", "up", "down")},
}
"""Their names of a layer's parts → this block's."""
OUTSIDE = {"fc": "layer_projection", "norm": "norm", "lm_head": "lm_head"}
ONLY = {
    **{"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "num_hidden_layers": 1, "logit_scale": 1.0},
    **{"norm_before_residual": False, "norm_output": False, "partial_rotary_factor": 1.0},
}
"""Settings of other heads that this block does not have: their only values here, which are the loaders' defaults."""


def write(head: Eagle3Head, target: Any, target_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """See `formats.Format`."""
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
    """See `formats.Format`; published heads name no layers where they read the usual ones of their target."""
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if inner is not None:
        inner = [layer + 1 for layer in inner]
        if layers not in (None, inner):
            raise ValueError(
                f"config.json names the layers {layers}, and {inner} in eagle_config (counted from one less); give "
                "the right ones as --target_layers LOW MIDDLE HIGH"
            )
        layers = inner
    return assembled(config, tensors, "midlayer", layers)


def assembled(config: dict[str, Any], tensors: dict[str, Tensor], layer: str, layers: list[int] | None) -> Eagle3Head:
    """A head from the sizes of its block and its tensors."""
    if layers is None:
        raise ValueError(
            "config.json names no layers of the target (eagle_aux_hidden_state_layer_ids), and a guess wrong by "
            "one is silent; give them as --target_layers LOW MIDDLE HIGH (published heads: 2, n/2 and n-3 of n)"
        )
    rope = config.get("rope_parameters") or {}
    for name, only in ONLY.items():
        if (value := {**config, **rope}.get(name)) not in (None, only):
            raise ValueError(
                f"{name} must be {only!r}; got {value!r}; such a head would draft nonsense and is not read"
            )
    for positions in (rope, config.get("rope_scaling") or {}):
        scaling = positions.get("rope_type") or positions.get("type") or "default"
        if scaling != "default":
            raise ValueError(f"the head's rotary positions are of type {scaling}; only the default type can be read")
    d2t, classes = tensors.get("d2t"), len(tensors["lm_head.weight"])
    vocabulary = config["vocab_size"]
    if (stated := config.get("draft_vocab_size")) not in (None, classes):
        raise ValueError(f"draft_vocab_size {stated} must be the rows of lm_head.weight, {classes}; copy both again")
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=config["hidden_size"],
            vocab_size=vocabulary,
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            intermediate_size=config["intermediate_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            target_layers=list(layers),
            draft_vocab_size=0 if classes == vocabulary else classes,
        )
    )
    names = {f"{layer}.{theirs}.weight": f"block.{ours}.weight" for theirs, ours in BLOCK.items()}
    names |= {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in OUTSIDE.items()}
    unknown = set(tensors) - set(names) - {"d2t", "t2d", "embed_tokens.weight"}
    if missing := sorted(set(names) - set(tensors)) or sorted(unknown):
        raise ValueError(f"this is no EAGLE-3 head of one layer: {', '.join(missing)} missing or unexpected")
    state = {ours: tensors[theirs] for theirs, ours in names.items()}
    if head.draft_vocab is not None:
        if d2t is None:
            raise ValueError(f"a head with {classes} of {vocabulary} tokens needs d2t, which its tensors lack")
        head.set_draft_vocab(torch.arange(classes) + d2t.long())
        state["draft_vocab"] = head.draft_vocab
    head.load_state_dict(state)
    return head.eval()


def drafted(head: Eagle3Head) -> Tensor:
    """See `formats.DRAFTED`."""
    config, random = head.config, torch.Generator().manual_seed(0)
    length, known = 64, 16  # one length for all heads: behind the last anchor, each pass has a token to read
    embedding = torch.nn.Embedding(known, config.hidden_size)
    embedding.weight.data.normal_(generator=random)
    ids = torch.randint(known, (1, length), generator=random)
    states = torch.randn(1, length, config.hidden_size * (1 + len(config.target_layers)), generator=random)
    rows = Rows.of(
        states[..., : config.hidden_size],
        ids,
        aux_hidden=states[..., config.hidden_size :] if config.target_layers else None,
    )
    lent = TargetView(embedding, torch.empty(0, config.hidden_size))
    return head.next_log_probs(head.train_states(rows, torch.arange(3)[None], lent)[0]).transpose(0, 1)
