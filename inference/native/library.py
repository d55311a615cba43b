"""The project's C++ as torch operations; the first process that needs them compiles them.

    skinny_matmul   a few float32 rows times a matrix (`skinny_matmul.cpp`)

With it a CTC head's γ on the embedded target was 1.15 times that without: one thread, medians of 8 runs in turn.

Callers ask `load_library` first and have a torch version of their own for where it says no.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import cpp_extension

OUTPUTS = 32  # of one of `column_blocks`
_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC")
_VECTOR_FLAGS = {"AVX2": "-march=x86-64-v3", "AVX512": "-march=x86-64-v4"}  # by torch's name of what this CPU can do

logger = logging.getLogger(__name__)


@cache
def load_library() -> bool:
    """Compile (fifteen seconds, once per machine: the library stays in torch's cache) and load; False without g++."""
    compiler = os.environ.get("CXX", "c++")
    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    links = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu"]
    vectors = _VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability())
    flags = [*_FLAGS, *([vectors] if vectors else [])]
    command = [compiler, *flags, *includes, *map(str, _SOURCES), *links]
    made_from = [torch.__version__, *command, *(path.read_text(encoding="utf-8") for path in _SOURCES)]
    name = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]
    try:
        library = Path(cpp_extension.get_default_build_root()) / "draft_heads" / f"{name}.so"
        if not library.exists():
            _compile(command, library)
        torch.ops.load_library(library)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip().replace("\n", " ")
        logger.warning(
            "decoding without C++, which is slower: %s did not compile %s (%s); install g++ or name a compiler in CXX",
            compiler,
            ", ".join(source.name for source in _SOURCES),
            reason[-300:],
        )
        return False
    return True


def is_loaded() -> bool:
    """Whether this process has asked for the library and has it."""
    return load_library.cache_info().currsize > 0 and load_library()


def _compile(command: list[str], library: Path) -> None:
    """Into a temporary file, then renamed: another process may compile too, or this one may be killed."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        subprocess.run(  # in a session of its own: a terminal's Ctrl-C is for this program, which then ends it or not
            [*command, "-o", str(fresh)], check=True, capture_output=True, text=True, start_new_session=True
        )
        fresh.replace(library)


def skinny_matmul(rows: Tensor, blocks: Tensor, outputs: int) -> Tensor:
    """rows `[R, K]` float32 times a matrix with `outputs` N, given as `column_blocks` `[N/32, K, 32]` → [R, N]."""
    product: Tensor = torch.ops.draft_heads.skinny_matmul(rows, blocks, outputs)
    return product


def column_blocks(weight: Tensor) -> Tensor:
    """A matrix `[N, K]` as `skinny_matmul` reads it, `[⌈N/32⌉, K, 32]`: element [b, k, o] is weight[32b + o, k]."""
    outputs, inputs = weight.shape
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % OUTPUTS))
    return filled.view(-1, OUTPUTS, inputs).transpose(1, 2).contiguous()
