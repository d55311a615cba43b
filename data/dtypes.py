"""The number types of weights and of cached hidden states, by the names that options use."""

from __future__ import annotations

import torch

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def dtype_named(flag: str, name: str | None) -> torch.dtype | None:
    """The type that the option `flag` names; None for None and `auto`; ValueError for an unknown name."""
    if name in (None, "auto"):
        return None
    if name not in DTYPES:
        raise ValueError(f"{flag} {name} is unknown; pass one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
