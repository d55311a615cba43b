"""Parameters of every kind of head, and the bytes a draft reads, for a target's shape; nothing is loaded or trained.

    python scripts/bench/head_sizes.py --target lmsys/vicuna-7b-v1.3
    python scripts/bench/head_sizes.py --shape 7b

A draft at batch 1 is bound by the weights it reads. They count once per use: a Chimera head reads its block once a
level, and the LM head once a level where heads share it.
"""

from __future__ import annotations

import sys
from typing import Any

from draft_heads.data.config_file import exit_status

import torch
from transformers import AutoConfig

from draft_heads.data.pretrained import load_config
from draft_heads.heads.checkpoint import head_classes
from draft_heads.heads.config import target_sizes
from draft_heads.inference.evaluation.report import markdown_table
from draft_heads.scripts.decoding_options import script_parser
from draft_heads.train.options import SHAPES, estimated_parameters

VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("ctc", "ctc", {}),
    ("ctc, two blocks", "ctc", {"blocks": 2}),
    ("chimera, full", "chimera", {}),
    ("chimera, shared", "chimera", {"projection": "shared"}),
    ("medusa", "medusa", {}),
    ("hydra", "hydra", {}),
    ("hydra++", "hydra", {"layers": 4, "prefix_attention": True}),
]


def sizes(config: Any) -> list[tuple[str, int, int]]:
    """(variant, parameters, weights a draft reads) for a decoder configuration."""
    found = []
    for name, kind, settings in VARIANTS:
        head_type, config_type = head_classes(kind)
        with torch.device("meta"):
            head = head_type(config_type(**target_sizes(config), **settings))
        found.append((name, sum(p.numel() for p in head.parameters()), head.weights_read()))
    return found


def table(config: Any) -> str:
    """Markdown, bytes of 16-bit weights."""
    rows, target = [], estimated_parameters(config)
    for name, parameters, read in sizes(config):
        rows.append((name, f"{parameters / 1e6:,.1f} M", f"{2 * read / 2**20:,.0f} MiB", f"{read / target:.1%}"))
    return markdown_table(("head", "parameters", "read per draft", "of the target's step"), rows, 4)


def run() -> None:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("--target", help="take the sizes from this folder's or hub id's configuration")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b", help="without --target: a Llama of this size")
    args = parser.parse_args()
    config = load_config(args.target) if args.target else AutoConfig.for_model("llama", **SHAPES[args.shape])
    print(table(config.get_text_config(decoder=True)))


def main() -> int:
    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
