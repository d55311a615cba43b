"""Keys of rows and turns that change the text or the mask and that nothing reads, and their values that ask nothing."""

from __future__ import annotations

import re
from typing import Any

TRAINED = ("trained", "train", "training", "weight", "loss")
"""Keys of a turn that say whether it is trained on: true, false, 1 or 0."""

_MEDIA = {"image", "images", "video", "videos", "audio", "audios", "image_url", "files", "attachment", "attachments"}
_MEDIA_FORM = re.compile(r"(\w+_)?(attachment|image|video|audio|photo|picture|screenshot)s?_urls?")
_WANTED = {"label", "is_chosen", "is_preferred", "is_correct", "is_good"}
_WANTED |= {"is_accepted", "is_selected", "is_approved", "is_valid", "is_complete", "is_reasoning_complete"}
_WANTED |= {"is_target", "used_in_training", "correctness_math_verify", "correctness_llama"}
"""Keys that are true of an answer that is wanted; `label` is KTO's, and other datasets have names and numbers there."""
_UNWANTED = {"is_rejected", "is_bad", "is_wrong", "is_incorrect"}
_UNWANTED |= {"is_invalid", "is_spam", "is_deleted", "deleted", "is_truncated", "truncated", "is_error", "has_error"}
_UNWANTED |= {"has_errors", "is_failed", "is_refusal", "is_refused", "is_broken", "is_corrupted", "is_incomplete"}
_UNWANTED |= {"is_low_quality", "is_hallucination", "has_hallucination", "has_hallucinations"}
_BAD_STATUS = ("incomplete", "failed", "error", "truncated", "cancelled")
OF_THE_ANSWER = _WANTED | _UNWANTED | {"status"}
"""Keys that say whether an answer is wanted; they ask nothing where the target writes it anew, and of another turn."""
_NOT_READ = _MEDIA | {"chosen", "rejected", "instructions", "history", "response_format", "input_ids", "token_ids"}
_NOT_READ |= {"train_detail", "training_detail", "train_on_inputs", "mask", "loss_mask", "prefix"}
_NOT_READ |= {"function_call", "refusal", "channel", "recipient"}

_ASK_NOTHING: list[tuple[str, Any]] = [("prefix", False), ("train_on_inputs", False)]
_ASK_NOTHING += [("channel", "final"), ("recipient", "all")]
_ASK_NOTHING += [(key, True) for key in _WANTED] + [(key, False) for key in _UNWANTED]
TEMPLATE_FLAGS = ("thinking", "enable_thinking", "tools_in_user_message")
_FLAGS = {*TRAINED, *TEMPLATE_FLAGS, *(key for key, _ in _ASK_NOTHING)} - {"channel", "recipient"}
_FLAG_TEXTS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
_WORDS = _FLAG_TEXTS | {"yes": True, "y": True, "no": False, "n": False}


def flag(key: str, value: Any) -> Any:
    """The value of a key that is true or false, also where a text says so, as in CSV; any other value as it is."""
    known = _FLAG_TEXTS if key == "label" else _WORDS  # a label's "no" may be the class of a question
    return known.get(value.lower(), value) if key in _FLAGS and isinstance(value, str) else value


def asks_nothing(key: str, value: Any) -> bool:
    """Whether one of these keys changes nothing with this value. Example: `is_rejected` with false, or a list of it."""
    if isinstance(value, list) and value and key in OF_THE_ANSWER:
        return all(asks_nothing(key, one) for one in value)
    return (key, value) in _ASK_NOTHING


def is_refused(key: str, value: Any) -> bool:
    """Whether a key with a value that asks for something changes the text or the mask in a way that nothing follows."""
    if key == "status":
        return value in _BAD_STATUS
    names = key == "label" and value != 0  # anything but KTO's false
    unwanted = key in OF_THE_ANSWER and value is not None and not names and not asks_nothing(key, value)
    return unwanted or key in _NOT_READ or _MEDIA_FORM.fullmatch(key) is not None
