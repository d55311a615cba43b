"""Cached hidden states: their size on disk, and [L, H] tensors as bytes of a shard."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from draft_heads.configs.options import dtype_name

STATE_COLUMNS = ("hidden", "aux_hidden")
"""Columns of a dataset: what the LM head reads, and the outputs of `target_layers` side by side."""


def hidden_bytes(hidden_LH: Tensor) -> bytes:
    """The raw little-endian bytes of `hidden_LH`; Arrow has no bfloat16."""
    return hidden_LH.contiguous().view(torch.uint8).numpy().tobytes()


def cast_for_storage(hidden_LH: Tensor, dtype: torch.dtype, row: str) -> Tensor:
    """`hidden_LH` in the type it is kept in; ValueError for values that this type, or the target's own, cannot hold."""
    kept = hidden_LH.to(dtype)
    if kept.isfinite().all():
        return kept
    if hidden_LH.isfinite().all():
        raise ValueError(
            f"hidden_states {dtype_name(dtype)} holds values up to {torch.finfo(dtype).max:,.0f}; a state of row "
            f"{row} has {float(hidden_LH.abs().max()):,.0f}; name bfloat16 or float32 and another output"
        )
    raise ValueError(
        f"the target's states must be finite; some of row {row} are not in {dtype_name(hidden_LH.dtype)}; name "
        "another dtype and another output"
    )


def hidden_from_bytes(raw: bytes, length: int, dtype: torch.dtype) -> Tensor:
    """The [length, H] tensor of type `dtype` that `hidden_bytes` wrote."""
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(length, -1)


def check_disk(tokens: int, exact: bool, hidden_size: int, dtype: torch.dtype, output: str, freed: int = 0) -> str:
    """A line with the size of `tokens` hidden states beside the free disk; ValueError when they do not fit.

    freed: bytes that will be free before they are written
    Example: `H=4096 bfloat16: 8 KiB per token, 1,000,000 tokens -> 7.64 GiB, free 120 GiB`.
    """
    per_token = hidden_size * dtype.itemsize
    needed = tokens * (per_token + 9)  # ids, labels and mask: 9 bytes per token
    folder = Path(output).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free + freed
    line = (
        f"H={hidden_size} {dtype_name(dtype)}: {per_token / 1024:g} KiB per token, "
        f"{'' if exact else 'about '}{tokens:,} tokens -> {_gib(needed)}, free {_gib(free)}"
    )
    if needed > free:
        raise ValueError(
            f"hidden_states does not fit on the disk of {output} ({line}); free some, or with another output "
            "lower limit or max_length, pick a 16-bit type, or leave it out: hidden states are then recomputed in "
            "training"
        )
    return line


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.3g} MiB"
