"""What differs among the versions of transformers and torch in pyproject.toml's ranges, each looked up here."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import output_capturing


def _first_field(kind: Any, *names: str) -> str:
    """The first of `names` that a dataclass has; ImportError if a library renamed it once more."""
    found = {field.name for field in fields(kind)}
    name = next((name for name in names if name in found), None)
    if name is None:
        raise ImportError(
            f"{kind.__module__}.{kind.__name__} must have a field {' or '.join(names)}; it has "
            f"{', '.join(sorted(found))}; install versions of pyproject.toml's ranges"
        )
    return name


CACHE = _first_field(BaseModelOutputWithPast, "cache", "past_key_values")
"""The argument of forwards and of `generate`, and the output, that hold cached keys and values: `cache` from
transformers 5.24, `past_key_values` before."""


def takes_cache(decoder: Any) -> bool:
    """Whether a decoder's forward takes cached keys and values."""
    return CACHE in inspect.signature(decoder.forward).parameters


def caps_scores(config: Any) -> bool:
    """Whether attention caps its scores (Gemma 2), which scaled-dot-product attention cannot.

    transformers 5.17 runs such models with it all the same, and leaves the cap out without a word; 5.24 refuses.
    """
    return getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None


def is_recurrent(model: Any, config: Any) -> bool:
    """Whether a model keeps a state that grows with the text and cannot go back or branch, as transformers marks it.

    Where a config names the types of its layers those decide (`Architecture.of`): of one model class some checkpoints
    have recurrent layers and others attention only. Arguments tell nothing: Mamba's state was `cache_params` and is
    `cache`, as keys and values are.
    """
    return bool(getattr(model, "_is_stateful", False)) and not getattr(config, "layer_types", None)


def forward_hooks(module: nn.Module) -> list[Any]:
    """What was laid on a module's forward or put in its place, but for what changes no output: transformers' hooks that
    record them from the first `output_hidden_states=True` on, what `enable_input_require_grads` lays on embeddings, our
    own, and its own forward, compiled."""
    replaced = module.__dict__.get("forward")  # as steering, scaling and long-context patches do
    within = getattr(replaced, "_torchdynamo_orig_callable", replaced)
    own = getattr(within, "__func__", within) is type(module).forward
    return ([] if replaced is None or own else [replaced]) + [
        hook
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if getattr(hook, "__module__", "") != output_capturing.__name__
        and not getattr(hook, "__qualname__", "").endswith("make_inputs_require_grads")
        and not getattr(hook, "__qualname__", "").startswith("ModuleDecoder.")
    ]


def builds_lock_by_a_file() -> bool:
    """Whether torch takes an operator for being built as long as a file `lock` exists.

    So it did until 2.13, and a killed build left it. From 2.14 on the lock is the system's, and its file stays.
    """
    from torch.utils import cpp_extension

    return hasattr(cpp_extension, "FileBaton")
