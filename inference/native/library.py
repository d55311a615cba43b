"""Loads the C++ beside this file as torch operations; the first process that wants them compiles them.

    torch.ops.draft_heads.prefix_tree   the tree of highest Ψ under a CTC head (`prefix_tree.cpp`)
    torch.ops.draft_heads.few_rows      a few rows times a matrix in eight bits (`few_rows.cpp`)
    torch.ops.draft_heads.float_rows    a few rows times a matrix in float32 (`float_rows.cpp`)

What has no compiler decodes without them, more slowly and, but for rounding, the same.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import cpp_extension

LANES, FLOAT_LANES = 16, 32
"""Outputs that lie side by side in the weights of `few_rows` and of `float_rows`."""

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC")
_present: Path | None = None


def loaded() -> bool:
    """Whether the operations are there; compiled programs may ask."""
    return _present is not None


@cache
def load() -> bool:
    """Make them there if that can be done: fifteen seconds the first time, then the library lies in torch's cache."""
    global _present
    compiler = os.environ.get("CXX", "c++")
    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    links = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu"]
    command = [compiler, *_FLAGS, *includes, *map(str, _SOURCES), *links]
    made_from = [torch.__version__, *command, *(path.read_text(encoding="utf-8") for path in _SOURCES)]
    name = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]
    try:
        library = Path(cpp_extension.get_default_build_root()) / "draft_heads" / f"{name}.so"
        if not library.exists():
            _compile(command, library)
        torch.ops.load_library(library)
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        warnings.warn(
            f"decoding is faster with a C++ compiler, and {compiler} did not make {[s.name for s in _SOURCES]}: "
            f"{said[-500:]}; install g++ or name another compiler in CXX",
            stacklevel=2,
        )
        return False
    torch.library.register_fake("draft_heads::prefix_tree", _tree_shapes)
    torch.library.register_fake("draft_heads::few_rows", _product_shape)
    torch.library.register_fake("draft_heads::float_rows", _float_product_shape)
    _present = library
    return True


def _compile(command: list[str], library: Path) -> None:
    """In a file of its own first: another process may be at it, or this one be killed."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        subprocess.run([*command, "-o", str(fresh)], check=True, capture_output=True, text=True)
        fresh.replace(library)


def prefix_tree(probs: Tensor, max_nodes: int, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labels, parents and log Ψ `[M]` of the best prefixes; probs `[T, V+1]` float32, the blank last."""
    labels, parents, log_probs = torch.ops.draft_heads.prefix_tree(probs, max_nodes, max_depth)
    return labels, parents, log_probs


def _tree_shapes(probs: Tensor, max_nodes: int, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    vocabulary, level, size = probs.shape[1] - 1, 1, 0
    for _ in range(max_depth):
        level = min(level * vocabulary, max_nodes)
        size = min(size + level, max_nodes)
    labels = probs.new_empty(size, dtype=torch.long)
    return labels, torch.empty_like(labels), probs.new_empty(size)


def _product_shape(rows: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], scale.shape[0])


def few_rows(rows: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    """[R, N] from rows `[R, K]` float32; weights `[N/16, K/2, 32]` int8 and scale `[N]` are `side_by_side`'s."""
    product: Tensor = torch.ops.draft_heads.few_rows(rows, weights, scale)
    return product


def side_by_side(weights: Tensor) -> Tensor:
    """A matrix `[N, K]` int8 as `few_rows` reads it: blocks of 16 outputs, in each two neighbouring inputs a time."""
    outputs, inputs = weights.shape
    filled = torch.nn.functional.pad(weights, (0, inputs % 2, 0, -outputs % LANES))
    return filled.view(-1, LANES, (inputs + 1) // 2, 2).transpose(1, 2).flatten(2).contiguous()


def _float_product_shape(rows: Tensor, weights: Tensor, outputs: int) -> Tensor:
    return rows.new_empty(rows.shape[0], outputs)


def float_rows(rows: Tensor, weights: Tensor, outputs: int) -> Tensor:
    """[R, N] from rows `[R, K]` float32; weights `[N/32, K, 32]` are `in_blocks`'s, outputs is N."""
    product: Tensor = torch.ops.draft_heads.float_rows(rows, weights, outputs)
    return product


def in_blocks(weight: Tensor) -> Tensor:
    """A matrix `[N, K]` as `float_rows` reads it: blocks of 32 outputs, in each one input at a time."""
    outputs, inputs = weight.shape
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % FLOAT_LANES))
    return filled.view(-1, FLOAT_LANES, inputs).transpose(1, 2).contiguous()
