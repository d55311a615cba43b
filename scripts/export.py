"""Write a trained head in a format that another engine loads.

    python scripts/export.py --head runs/eagle3/head --format eagle3 --output runs/eagle3/vllm [--check]

| format | heads | read by |
| --- | --- | --- |
| vllm-medusa | Medusa | vLLM up to 0.32 |
| tgi-medusa | Medusa | TGI (archived) |
| eagle3 | EAGLE-3 | vLLM, SGLang, llama.cpp's converter |
| speculators | EAGLE-3 | vLLM |

No engine but this project's knows other heads. --check reads the folder back and compares all tensors,
the settings that it states and the drafts from random states; it runs no other engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from draft_heads.configs.command_line import exit_status, parse_with_config

from draft_heads.data.common.pretrained import layer_sizes, load_config
from draft_heads.data.fingerprint import SIZES
from draft_heads.heads.checkpoint import load_head
from draft_heads.heads.config import check_target_layers
from draft_heads.heads.export.formats import FORMATS, check_exportable, differences, read_folder, write_folder
from draft_heads.scripts.decoding_options import check_new_folder, script_parser, tell_of_another_target


def run() -> bool:
    parser = script_parser(__doc__)
    parser.add_argument("--head", help="RUN/head, or a hub id")
    parser.add_argument("--format", choices=list(FORMATS))
    parser.add_argument("--output", type=Path, help="a new folder")
    parser.add_argument("--target", default="", help="the target's folder or hub id, if it is not where it was trained")
    parser.add_argument("--check", action="store_true", help="read the folder back and compare it with the head")
    args = parse_with_config(parser, None, ("head", "format", "output"))
    check_new_folder(args.output)
    head = load_head(args.head)
    check_exportable(head, args.format)
    name = args.target or head.config.target
    whole = load_config(name)
    target = layer_sizes(whole.get_text_config(decoder=True))
    for stated in ("dtype", "architectures"):  # multimodal checkpoints state them for the whole model only
        setattr(target, stated, getattr(target, stated, None) or getattr(whole, stated, None))
    made_for = head.config.target_fingerprint
    different = [
        f"{size} {made_for[size]} against {getattr(target, size, None)}"
        for size in ("vocab_size", "hidden_size", *SIZES)
        if size in made_for and made_for[size] != getattr(target, size, None)
    ]
    if different:
        raise ValueError(
            f"a head is exported for the target it was trained for; {name} has other sizes: {', '.join(different)}; "
            "give that target, or leave --target out if it is where it was"
        )
    check_target_layers(head.config.target_layers, target.num_hidden_layers, name)
    write_folder(head, args.format, args.output, target, name)
    print(f"{args.output}: written for {FORMATS[args.format].engines}")
    if args.target:
        tell_of_another_target(args.head, head.config.target, args.target)
    if adapter := head.provenance.get("options", {}).get("target_adapter"):
        print(
            f"the head was trained with the adapter {adapter} merged into its target, and the engine drafts for {name} "
            "as it is; serve the merged checkpoint, and give its path as --target"
        )
    if not args.check:
        return True
    found = differences(head, read_folder(args.output, args.format), args.format)
    compared = f"{len(head.state_dict())} tensors, {', '.join(FORMATS[args.format].stated)} and the log-probabilities"
    compared += " of drafts from random states"
    print(f"read back: {', '.join(found)} differ" if found else f"read back and found equal: {compared}")
    return not found


if __name__ == "__main__":
    sys.exit(exit_status(run))
