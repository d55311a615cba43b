"""Parameters of every kind of head, what a draft reads, and the memory that training takes; nothing is loaded.

    python scripts/head_sizes.py --target Qwen/Qwen3-8B
    python scripts/head_sizes.py --shape 8b

A draft at batch 1 is bound by the weights it reads. They count once per use: a Chimera head reads its block once a
level, and the LM head once a level where heads share it.

Memory is an estimate for the recipe of the target's size class; `training_memory` says of what. `--print_recipe` of a
trainer gives it for any recipe.
"""

from __future__ import annotations

import sys
from typing import Any

from draft_heads.configs.command_line import exit_status

from transformers import AutoConfig

from draft_heads.configs.recipes import SHAPES, load_recipe, size_class
from draft_heads.data.common.model_sizes import count_parameters, weights_read_per_step
from draft_heads.data.common.pretrained import load_config
from draft_heads.heads.checkpoint import HEADS, head_variants
from draft_heads.inference.evaluation.report import markdown_table
from draft_heads.scripts.decoding_options import script_parser
from draft_heads.train.memory import make_head, training_memory


def sizes(config: Any) -> list[tuple[str, int, int]]:
    """(variant, parameters, weights a draft reads) for a target's configuration."""
    found = []
    for name, (kind, settings) in head_variants().items():
        head = make_head(config, kind, settings)
        found.append((name, sum(p.numel() for p in head.parameters()), head.weights_read()))
    return found


def table(config: Any) -> str:
    """Markdown, bytes of 16-bit weights, for a target's configuration."""
    rows, target = [], weights_read_per_step(config)
    for name, parameters, read in sizes(config):
        rows.append((name, f"{parameters / 1e6:,.1f} M", f"{2 * read / 2**20:,.0f} MiB", f"{read / target:.1%}"))
    return markdown_table(("head", "parameters", "read per draft", "of the target's step"), rows, 4)


def memory_table(config: Any) -> str:
    """Markdown, GiB on a GPU with the recipe of the size class."""
    rows, name = [], size_class(count_parameters(config))
    for kind in HEADS:
        memory = training_memory(config, kind, load_recipe(kind, name))
        rows.append((f"{kind}/{name}", *(f"{value:.1f}" for value in memory.values())))
    names = (
        "recipe",
        "target",
        "head, optimizer",
        "activations",
        "1 GPU, or ZeRO 0",
        "ZeRO 1, 8 GPUs",
        "ZeRO 2",
        "ZeRO 3",
    )
    return markdown_table(names, rows, 8)


def run() -> None:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("--target", help="take the sizes from this folder's or hub id's configuration")
    parser.add_argument("--shape", choices=list(SHAPES), help="without --target: a Llama of this size (8b)")
    args = parser.parse_args()
    if args.target and args.shape:
        raise ValueError(f"--target has sizes of its own; got it with --shape {args.shape}; leave one of them out")
    config = load_config(args.target) if args.target else AutoConfig.for_model("llama", **SHAPES[args.shape or "8b"])
    print(f"Heads of default options, which draft from the whole vocabulary:\n\n{table(config)}\n")
    print(f"GiB of GPU memory in training, of the recipes' heads:\n\n{memory_table(config)}")


if __name__ == "__main__":
    sys.exit(exit_status(run))
