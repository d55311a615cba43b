"""Parameters of every kind of head, what a draft reads, and the memory that training takes; nothing is loaded.

    python scripts/head_sizes.py --target Qwen/Qwen3-8B
    python scripts/head_sizes.py --shape 8b

A draft at batch 1 is bound by the weights it reads. They count once per use: a Chimera head reads its block once a
level, and the LM head once a level where heads share it.

Memory is an estimate for the recipe of the target's size class: the target in 16 bits, whole on every GPU; 16 bytes for
each parameter of the head (weight and gradient in 16 bits, a float32 weight and two Adam moments), of which ZeRO 1
shards 12, ZeRO 2 also the gradients, whose sums it has in float32, ZeRO 3 all; at most the
activations of one micro-batch, of short conversations with every token an anchor; 2 GiB for CUDA.
"""

from __future__ import annotations

import sys
from typing import Any

from draft_heads.configs.command_line import exit_status

import torch
import yaml
from transformers import AutoConfig

from draft_heads.configs.options import option_names
from draft_heads.data.common.pretrained import load_config
from draft_heads.heads.base import DraftHead
from draft_heads.heads.block import DecoderBlock
from draft_heads.heads.checkpoint import HEADS, head_classes, head_variants
from draft_heads.heads.config import target_sizes
from draft_heads.inference.evaluation.report import markdown_table
from draft_heads.scripts.decoding_options import script_parser
from draft_heads.train.options import SHAPES, count_parameters, recipe_for_size


def make_head(config: Any, kind: str, settings: dict[str, Any]) -> DraftHead:
    """A head without memory for a decoder configuration."""
    head_type, config_type = head_classes(kind)
    settings = {"target_layers": config_type.usual_layers(config.num_hidden_layers), **settings}
    with torch.device("meta"):
        return head_type(config_type(**target_sizes(config), **settings))


def sizes(config: Any) -> list[tuple[str, int, int]]:
    """(variant, parameters, weights a draft reads) for a decoder configuration."""
    found = []
    for name, (kind, settings) in head_variants().items():
        head = make_head(config, kind, settings)
        found.append((name, sum(p.numel() for p in head.parameters()), head.weights_read()))
    return found


def table(config: Any) -> str:
    """Markdown, bytes of 16-bit weights."""
    rows, target = [], count_parameters(config)
    for name, parameters, read in sizes(config):
        rows.append((name, f"{parameters / 1e6:,.1f} M", f"{2 * read / 2**20:,.0f} MiB", f"{read / target:.1%}"))
    return markdown_table(("head", "parameters", "read per draft", "of the target's step"), rows, 4)


def training_memory(config: Any, kind: str, recipe: dict[str, Any]) -> dict[str, float]:
    """GiB on each GPU by part, and in all by ZeRO stage on 8 GPUs: target, head, activations, zero0 … zero3."""
    head = make_head(config, kind, {key: recipe[key] for key in option_names(head_classes(kind)[1]) if key in recipe})
    parameters, sizes = sum(p.numel() for p in head.parameters()), head.config
    rows, longest = recipe.get("per_device_train_batch_size", 1), recipe["max_length"]
    tokens, anchors = rows * longest, rows * (recipe["anchors"] or longest)
    if by_tokens := recipe.get("tokens_per_batch"):
        tokens = anchors = by_tokens  # a batch of rows that have no more than `anchors` tokens each
    drafted = anchors * getattr(sizes, "frames", sizes.offsets)
    read = tokens if any(isinstance(module, DecoderBlock) for module in head.modules()) else 0
    forward = tokens * (8 * sizes.hidden_size + 3 * sizes.intermediate_size)  # of one layer of the target at a time
    saved = (read + drafted) * (12 * sizes.hidden_size + 4 * sizes.intermediate_size)  # a block's, for the backward
    parts = {
        "target": 2 * count_parameters(config) / 2**30,
        "head": 16 * parameters / 2**30,
        "activations": 2 * (forward + saved) / 2**30 + 2,
    }
    fixed = parts["target"] + parts["activations"]
    for stage, (whole, sharded) in enumerate(((16, 0), (4, 12), (2, 16), (0, 18))):
        parts[f"zero{stage}"] = fixed + (whole + sharded / 8) * parameters / 2**30
    return parts


def memory_line(config: Any, kind: str, recipe: dict[str, Any]) -> str:
    """One line for a recipe."""
    memory = training_memory(config, kind, recipe)
    stages = " / ".join(f"{memory[f'zero{stage}']:.0f}" for stage in range(4))
    return f"{memory['zero0']:.0f} GiB on 1 GPU; {stages} GiB on each of 8 at ZeRO 0 / 1 / 2 / 3"


def memory_table(config: Any) -> str:
    """Markdown, GiB on a GPU with the recipe of the size class."""
    rows = []
    for kind in HEADS:
        recipe = recipe_for_size(kind, count_parameters(config))
        settings = {"max_length": 512, **yaml.safe_load(recipe.read_text())}
        if settings.get("draft_vocab_size", 0) >= config.vocab_size:  # left out in training, too
            del settings["draft_vocab_size"]
        memory = training_memory(config, kind, settings)
        rows.append((f"{kind}/{recipe.stem}", *(f"{value:.1f}" for value in memory.values())))
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
    config = config.get_text_config(decoder=True)
    print(f"{table(config)}\n\nGiB of GPU memory in training:\n\n{memory_table(config)}")


def main() -> int:
    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
