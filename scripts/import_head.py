"""Read a head that was trained elsewhere, in one of the formats of scripts/export.py, so that it can be measured here.

    python scripts/import_head.py --head FOLDER --target meta-llama/Llama-3.1-8B-Instruct --output runs/public/head

FOLDER is a local folder, for example of FasterDecoding's Medusa or of a published EAGLE-3 head; its tensors must be in
safetensors. The target is the one the head was trained for: the checkpoint takes its sizes and fingerprint, and a head
whose sizes differ is refused.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from draft_heads.configs.command_line import exit_status

import torch

from draft_heads.heads.card import is_hub_id, target_licence
from draft_heads.heads.config import target_sizes
from draft_heads.heads.eagle3 import Eagle3Config
from draft_heads.heads.export.formats import FORMATS, assembled, read_settings, read_tensors, stated_target
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import check_new_folder, check_positive, script_parser, tell_of_another_target

PASSES_HELP = "EAGLE-3: tokens that it drafts one after another (default 7), whatever the folder says"
LAYERS_HELP = "EAGLE-3: the layers that it reads, in place of those that the folder names, or where it names none"


def run() -> None:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("--head", type=Path, required=True, help="the folder to read")
    parser.add_argument("--format", default="", choices=[*FORMATS], help="default: read from its config.json")
    parser.add_argument("--target", required=True, help="folder or hub id of the target that it drafts for")
    parser.add_argument("--target_layers", type=int, nargs="+", default=[], help=LAYERS_HELP)
    parser.add_argument("--passes", type=int, help=PASSES_HELP)
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    args = parser.parse_args()
    check_positive(args, "passes")
    check_new_folder(args.output)
    config, name = read_settings(args.head, args.format)
    used, tensors = FORMATS[name], read_tensors(args.head, FORMATS[name].weights)
    read = assembled(args.head, name, config, tensors, args.target_layers)
    target = Target.from_pretrained(args.target, lend_to=torch.device("cpu"))
    sizes = target_sizes(target.config)
    for name in ("hidden_size", "vocab_size"):
        if getattr(read.config, name) != sizes[name]:
            raise ValueError(
                f"a head fits one target; {args.head} has {name} {getattr(read.config, name)} and {args.target} "
                f"{sizes[name]}; give the target it was trained for"
            )
    target.check_layers(read.config.target_layers)
    if args.passes and not isinstance(read.config, Eagle3Config):
        raise ValueError(f"--passes are those of an EAGLE-3 head; {args.head} is {read.config.title}; leave it out")
    if trained_for := stated_target(config):
        tell_of_another_target(args.head, trained_for, args.target)
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None and not torch.equal(embedding, target.embedding.weight.to(embedding.dtype)):
        raise ValueError(
            f"a head drafts with its target's embeddings; embed_tokens.weight of {args.head} has others than "
            f"{args.target}; give the target it was trained for (a head with embeddings of its own is not read)"
        )
    own = {name: size for name, size in sizes.items() if name not in used.stated}
    # its chat template is not known: any may be used with it
    fingerprint = {key: value for key, value in target.fingerprint().items() if key != "chat_template_hash"}
    made_for = {"target": args.target, "target_fingerprint": fingerprint}
    made_for |= {"passes": args.passes} if args.passes else {}
    head = type(read)(dataclasses.replace(read.config, **own, **made_for))
    head.load_state_dict(read.state_dict())
    provenance = {"imported_from": str(args.head), "format": args.format or "read from config.json"}
    provenance |= {"base_model": args.target if is_hub_id(args.target) else ""}
    head.save_pretrained(args.output, {**provenance, "target_licence": target_licence(args.target)})
    layers = f", reads layers {' '.join(map(str, read.config.target_layers))}" if read.config.target_layers else ""
    print(f"{args.output}: {head.config.kind}, for {args.target}{layers}, drafts up to {head.config.offsets} tokens")


if __name__ == "__main__":
    sys.exit(exit_status(run))
