"""What identifies a target: its architecture and sizes, tokenizer, chat template, a sample of its weights, and the
numbers of its configuration that it computes with."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from draft_heads.data.common.pretrained import layer_sizes
from draft_heads.data.text.chat_template import PROBE_TEXT, template_source

logger = logging.getLogger(__name__)

SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
FIELDS = ("architecture", "vocab_size", "hidden_size", *SIZES, "tokenizer_hash", "chat_template_hash")
ADDED = ("scales_hash", "constants", "adapter_scaling")  # older fingerprints lack them
WEIGHTS = ("quantization", "weights_hash", *ADDED)
_NO_CONSTANT = re.compile(
    r"_.*|.*(token_id|token_ids|token_index|dropout|pdrop|layerdrop|loss|aux|jitter|initializer|init_std|label|dtype).*"
    r"|output_(attentions|hidden_states|scores|.*logits)"
    r"|(return|use_cache|vocab|summary|mask|time|vision|audio|freeze|quantization|per_layer_config).*"
    r"|(max|n)_(position|ctx|seq|source|target).*|.*(architecture|_version|auto_map|pretraining_tp|model_type)s?"
    r"|(is|add|cross)_(encoder|decoder|cross|attention).*|tie_.*|problem_type|torchscript|chunk_size_.*|languages?|seed"
)
"""Names of a config that change nothing of what the same weights compute, or that other fields say."""
_OF_QUANTIZATION = re.compile(
    r"(?!.*(dtype|skip|storage)).*(bit|group|block|sym|zero|desc_act|scheme|type|format|threshold).*"
)
"""Names of quantization settings that say which numbers the weights are rounded to."""

_VALUES_PER_WEIGHT = 16


def target_fingerprint(
    config: Any, tokenizer: PreTrainedTokenizerBase, sampled_weights: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`FIELDS` of a target from its text config and its tokenizer; stable across library versions.

    sampled_weights: its `weights_hashes`, with an adapter its `adapter_scaling` too; None leaves the weights out, which
    are then not compared
    """
    fingerprint = {
        "architecture": str(config.model_type).removesuffix("_text"),  # one name alone and inside a multimodal model
        "vocab_size": int(config.vocab_size),
        "hidden_size": int(config.hidden_size),
        **{name: getattr(layer_sizes(config), name, None) for name in SIZES},
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "chat_template_hash": chat_template_hash(tokenizer),
        "constants": constants(config),
    }
    if sampled_weights is not None:
        quantization = getattr(config, "quantization_config", None)
        fingerprint["quantization"] = None if quantization is None else str(_quantization_method(quantization))
        fingerprint |= sampled_weights
    return fingerprint


def constants(config: Any) -> dict[str, Any]:
    """What a model computes with beside its weights, sizes and types: what else its config says, as its rotary
    settings, windows, types of layers, norms, activations and factors, and how its weights were quantized; None where
    it has no value."""
    given = config.to_dict()
    values = {name: value for name, value in given.items() if not _NO_CONSTANT.fullmatch(name)}
    if any(map(_factor_is_of_length, _mappings(values))):
        values["max_position_embeddings"] = given.get("max_position_embeddings")
    for name, value in (_as_dict(given.get("quantization_config")) or {}).items():
        if _OF_QUANTIZATION.fullmatch(name):
            values[f"quantization_config.{name}"] = value
    known: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return {name: _without_none(value) for name, value in sorted(known.items()) if name not in ("hidden_size", *SIZES)}


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """A value's dicts, at any depth."""
    if isinstance(value, Mapping):
        yield value
        for inner in value.values():
            yield from _mappings(inner)


def _factor_is_of_length(rotary: Mapping[str, Any]) -> bool:
    """Whether attention is scaled by how much longer the longest text is than the original one, as Phi-3's is."""
    return rotary.get("rope_type", rotary.get("type")) in ("longrope", "su")


def _without_none(value: Any) -> Any:
    """A setting without those inside it that have no value."""
    if not isinstance(value, dict):
        return value
    return {name: _without_none(inner) for name, inner in value.items() if inner is not None}


def compared(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Where two fingerprints differ: the field, `constants.NAME` for one of them, and both values, None where there is
    none. What an older version, or another one of transformers, did not write is not compared."""
    ours, theirs = map(flat, (one, other))
    may_lack = {name for name in (*ours, *theirs) if name.partition(".")[0] in ADDED}
    names = [name for name in {**ours, **theirs} if name not in may_lack or (name in ours and name in theirs)]
    return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]


def flat(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint's fields, those of `constants` by `constants.NAME`."""
    inner = fingerprint.get("constants") or {}
    return {name: value for name, value in fingerprint.items() if name != "constants"} | {
        f"constants.{name}": value for name, value in inner.items()
    }


def adapter_scaling(model: nn.Module) -> str:
    """Hash of what each layer of a PEFT model multiplies its adapter's update by (16 hex digits)."""
    scaling = {name: module.scaling for name, module in model.named_modules() if hasattr(module, "scaling")}
    return _digest(json.dumps({name: value for name, value in scaling.items() if isinstance(value, dict)}))


def _as_dict(config: Any) -> dict[str, Any] | None:
    return config.to_dict() if hasattr(config, "to_dict") else config


def _quantization_method(config: Any) -> Any:
    method = (_as_dict(config) or {}).get("quant_method")
    return getattr(method, "value", method)


def weights_hashes(
    *modules: nn.Module, whole: Callable[[Any], AbstractContextManager[Any]] = nullcontext
) -> dict[str, str]:
    """Hashes of evenly spaced values of every weight (16 hex digits each); alike in float32 and bfloat16.

    weights_hash  of the values, rounded to bfloat16, then to 1/127 of the largest one sampled of their tensor, so that
                  what float16 loses of the small ones of a bfloat16 checkpoint does not count; a float32 checkpoint in
                  float16 is rounded twice, and has another hash
    scales_hash   of those largest values, in bfloat16; 0 where float16 has no full precision. Older fingerprints lack
                  it: two models that differ in a tensor's scale alone are one to them

    Packed values of quantised layers are left out. whole([weight]): a context in which a weight that is split among
    processes is whole.
    """
    digest, scales = hashlib.sha256(), hashlib.sha256()
    for name, weight in (named for module in modules for named in module.named_parameters()):
        if type(weight) is not nn.Parameter or not weight.is_floating_point():
            continue
        with whole([weight]):
            step = -(-weight.numel() // _VALUES_PER_WEIGHT) or 1
            values = weight.detach().reshape(-1)[::step].cpu().to(torch.bfloat16).float()
        if not values.numel():
            continue
        largest = values.abs().max()
        levels = (values / largest.clamp(min=1e-30) * 127).round().to(torch.int8)
        digest.update(name.encode() + levels.numpy().tobytes())
        scales.update(name.encode() + (largest * (largest >= 2**-14)).numpy().tobytes())
    return {"weights_hash": digest.hexdigest()[:16], "scales_hash": scales.hexdigest()[:16]}


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase, special: bool = True) -> str:
    """Hash of the vocabulary, the special ids and the tokens of a probe text (16 hex digits).

    special: False leaves out which tokens begin and end a text, in which a base model and its fine-tune may differ
    """
    described = {
        "vocab": sorted(tokenizer.get_vocab().items()),
        **({"special": [tokenizer.bos_token_id, tokenizer.eos_token_id]} if special else {}),
        "probe": list(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]),
    }
    return _digest(json.dumps(described, ensure_ascii=True))


def chat_template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Hash of the chat template in use, all its parts (16 hex digits), None when there is none."""
    return _digest(template_source(tokenizer)) if tokenizer.chat_template else None


def check_fingerprint(made_for: dict[str, Any], target: dict[str, Any], what: str, fine_tune: bool = False) -> None:
    """ValueError naming every field in which `what` (say "dataset OUT") was not made for this target.

    fine_tune: other weights, and with them another chat template, are allowed and reported in one line. A field that
    is not known, of an older version or of a head from elsewhere, is not compared, which a line says too.
    """
    known = [name for name in (*FIELDS, *WEIGHTS) if name in target]
    missing = [name for name in known if name not in (*made_for, *ADDED)]
    shared = [{name: known_of[name] for name in known if name in made_for} for known_of in (made_for, target)]
    different = {name: f"{name} {made!r} against the target's {own!r}" for name, made, own in compared(*shared)}
    weights = [name for name in different if name.partition(".")[0] in WEIGHTS]
    others = [name for name in different if name not in weights]  # their difference implies that of the weights
    if fine_tune and weights and set(others) <= {"chat_template_hash"}:
        logger.warning(
            "%s was trained for another model of the same architecture and tokenizer (%s%s): decoding stays "
            "lossless, but fewer drafts may be accepted",
            what,
            "; ".join(different[name] for name in weights) if all("." in name for name in weights) else "other weights",
            ", another chat template" if others else "",
        )
        return
    named = "; ".join(different[name] for name in others or weights)
    if others == ["chat_template_hash"] and not weights:
        raise ValueError(
            f"{what} was made for this target with another chat template ({named}); pass the chat template it was "
            "made with, or none if it was made with the tokenizer's own, or make it again with this one"
        )
    if others:
        raise ValueError(
            f"{what} belongs to another target: {named}; pass the target it was made with, or make it again for this "
            "one"
        )
    if weights:
        raise ValueError(
            f"{what} was made with other weights of the same architecture, a fine-tune or another quantization "
            f"({named}); labels are a model's own: pass the target that made them, in the dtype that it had, or make "
            "them again with this one"
        )
    if missing:
        logger.warning("%s does not say what it was made for in %s: not compared", what, ", ".join(missing))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
