"""What identifies a target for labels and heads: its sizes, its tokenizer, its chat template."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

FIELDS = ("vocab_size", "hidden_size", "tokenizer_hash", "chat_template_hash")
# Two vocabularies with equal entries may still split text differently: the hash covers how this text is split.
_PROBE = "Don't split 1234.5 apples\n\n\tinto  three:  naïve café ≈ 日本 😀 def f(x):\n    return x_1 + 20"


def target_fingerprint(config: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`FIELDS` of a target from its text config and its tokenizer; stable across library versions."""
    return {
        "vocab_size": int(config.vocab_size),
        "hidden_size": int(config.hidden_size),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "chat_template_hash": chat_template_hash(tokenizer),
    }


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary, the special ids and the tokens of a probe text (16 hex digits)."""
    described = {
        "vocab": sorted(tokenizer.get_vocab().items()),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "probe": list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"]),
    }
    return _digest(json.dumps(described, ensure_ascii=True))


def chat_template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Hash of the chat template in use (16 hex digits), None when there is none."""
    return _digest(tokenizer.get_chat_template()) if tokenizer.chat_template else None


def check_fingerprint(manifest_fp: dict[str, Any], target_fp: dict[str, Any], what: str) -> None:
    """ValueError naming every field in which `what` (say "--dataset OUT") was not made with this target."""
    different = [
        f"{name} {manifest_fp.get(name)!r} against the target's {target_fp.get(name)!r}"
        for name in FIELDS
        if manifest_fp.get(name) != target_fp.get(name)
    ]
    if different:
        raise ValueError(
            f"{what} belongs to another target: {'; '.join(different)}; pass the target it was made with, or make "
            "it again for this one"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
