"""Label conversations with the frozen target's own greedy tokens.

    python scripts/distill.py --target DIR|ID --dataset FILE|ID --output OUT --labels generate --max_new_tokens 256

Writes OUT/shard-*.arrow and OUT/manifest.json (see data/distill.py). A run that was killed continues with the next
shard when the command is given again. `--preview N` prints N conversations with the trained tokens marked and writes
nothing.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from draft_heads.data.config_file import OptionParser, exit_status, parse_with_config

from rich.console import Console
from rich.table import Table

from draft_heads.data.chat_template import CHAT_TEMPLATE_HELP
from draft_heads.data.distill import distill, preview
from draft_heads.data.distill_options import DistillOptions
from draft_heads.data.options import DTYPES, add_flags, add_threads, option_names, use_threads
from draft_heads.inference.target.target import Target


def parser() -> argparse.ArgumentParser:
    """One flag per field of DistillOptions, the target's flags, input and output."""
    p = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", type=Path, metavar="FILE.yaml", help="the flags below as YAML keys; flags override them")
    p.add_argument("--target", help="folder or hub id of the target")
    p.add_argument("--dataset", help="ShareGPT or messages JSON/JSONL file, dataset folder or hub id")
    p.add_argument("--output", help="folder to write")
    p.add_argument("--overwrite", action="store_true", help="replace what is in --output")
    p.add_argument("--preview", type=int, metavar="N", help="print N conversations, trained tokens marked")
    add_flags(p, DistillOptions)
    p.add_argument("--dtype", help=f"{', '.join(DTYPES)} (float32 on CPU, the checkpoint's on GPU)")
    p.add_argument("--device", help="cpu, cuda, …; auto spreads the layers over all devices (a GPU where there is one)")
    p.add_argument("--chat_template", metavar="NAME|FILE", help=CHAT_TEMPLATE_HELP)
    p.add_argument("--target_adapter", metavar="DIR", help="PEFT adapter merged into the target")
    add_threads(p)
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """Defaults, then --config, then flags; SystemExit with a sentence for unknown or missing ones."""
    p = parser()
    args = parse_with_config(p, argv, ())
    needed = ["target", "dataset"] + ([] if args.preview else ["output"])
    if missing := [f"--{name}" for name in needed if getattr(args, name) is None]:
        p.error(f"{', '.join(missing)} needed")
    return args


def run(args: dict[str, Any]) -> None:
    options = DistillOptions(**{name: args[name] for name in option_names(DistillOptions)})
    use_threads(args["threads"])
    target = Target.from_pretrained(
        args["target"], args["dtype"], args["device"], args["target_adapter"], args["chat_template"]
    )
    if args["preview"]:
        preview(target, args["dataset"], args["preview"], options)
        return
    print(f"writes {args['output']}/shard-*.arrow and {args['output']}/manifest.json")
    manifest = distill(target, args["dataset"], args["output"], options, args["overwrite"])
    summary(manifest, args["output"])


def main(argv: list[str]) -> int:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    return exit_status(lambda: run(vars(parse(argv))))


def summary(manifest: dict[str, Any], output: str) -> None:
    """Print the manifest's counts and the first rows that were left out."""
    counts = manifest["counts"]
    table = Table(title=f"{output}: {manifest['labels']} labels of {manifest['target']['path']}")
    table.add_column("count")
    table.add_column("", justify="right")
    names = {
        **{"rows": "rows", "tokens": "tokens", "trained_tokens": "trained tokens", "agreement": "text and label agree"},
        **{"skipped": "skipped: no room or bad", "cut": "cut at max_length"},
        **{"unfinished": "ended at max_new_tokens", "loops": "cut at a loop"},
    }
    for key, name in names.items():
        value = counts.get(key)
        table.add_row(name, "–" if value is None else f"{value:.4f}" if isinstance(value, float) else f"{value:,}")
    table.add_row("left out: user turns of an earlier row", f"{manifest['data']['repeated']:,}")
    table.add_row("bad rows in the source", f"{len(manifest['data']['bad_rows']):,}")
    console = Console()
    console.print(table)
    skipped = [row for shard in manifest["shards"] for row in shard["skipped"]]
    left_out = [f"row {row['row']} (id {row['id']}): {row['reason']}" for row in skipped]
    left_out = manifest["data"]["bad_rows"] + left_out
    for line in left_out[:10]:
        console.print(f"left out: {line}", markup=False, highlight=False, soft_wrap=True)
    if len(left_out) > 10:
        console.print(f"… and {len(left_out) - 10} more, all in {output}/manifest.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
