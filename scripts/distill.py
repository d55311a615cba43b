"""Label conversations with the frozen target's own greedy tokens.

    python scripts/distill.py --target DIR|ID --dataset FILE|ID --output OUT --labels generate --max_new_tokens 256

Writes OUT/shard-*.arrow and OUT/manifest.json (see data/labels/distill.py). If a run is killed, the same command
goes on, with every answer that had ended. `--preview N` prints N conversations with the trained tokens marked and
writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from draft_heads.configs.command_line import exit_status, parse_with_config

from rich.table import Table

from draft_heads.configs.options import DTYPES, add_flags, add_threads, option_names, use_threads
from draft_heads.data.common.console import plain_console
from draft_heads.data.common.processes import Processes, own_device
from draft_heads.data.labels.distill import distill, preview, select_conversations
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.shards import check_apart
from draft_heads.data.text.chat_template import CHAT_TEMPLATE_HELP
from draft_heads.data.text.conversations import BadRow, count_by_reason
from draft_heads.inference.answers import TargetAnswerer
from draft_heads.inference.target.loading import target_config, target_tokenizer
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import check_positive, script_parser, tell_how_targets_run


def parse(argv: list[str]) -> argparse.Namespace:
    """Defaults, then --config, then flags; ValueError with a sentence for missing ones."""
    p = script_parser(__doc__)
    p.add_argument("--target", help="folder or hub id of the target")
    p.add_argument("--dataset", help="ShareGPT or messages: JSON(L) file, also .gz, dataset folder or hub id")
    p.add_argument("--output", help="folder to write")
    p.add_argument("--overwrite", action="store_true", help="replace what is in --output")
    p.add_argument("--preview", type=int, metavar="N", help="print N conversations, trained tokens marked")
    add_flags(p, DistillOptions)
    p.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default: float32 on CPU, the checkpoint's on GPU)")
    p.add_argument("--device", help="cpu, cuda, …, or auto: layers on all GPUs (default cuda if present)")
    p.add_argument("--chat_template", metavar="NAME|FILE", help=CHAT_TEMPLATE_HELP)
    p.add_argument("--target_adapter", metavar="DIR", help="PEFT adapter merged into the target")
    add_threads(p)
    args = parse_with_config(p, argv, ("target", "dataset"))
    check_positive(args, "preview")
    if args.output is None and not args.preview:
        raise ValueError("--output is required but for --preview; give it on the command line or in --config")
    return args


def run(args: dict[str, Any]) -> None:
    options = DistillOptions(**{name: args[name] for name in option_names(DistillOptions)})
    options.check_read()
    if not args["preview"]:
        check_apart(args["dataset"], args["output"])
    tokenizer = None
    if options.labels == "generate":
        target_config(args["target"])
        tokenizer = target_tokenizer(args["target"], args["chat_template"], args["target_adapter"])
    loaded = select_conversations(args["dataset"], options, tokenizer)
    use_threads(args["threads"])
    target = Target.from_pretrained(
        args["target"],
        args["dtype"],
        own_device(args["device"]),
        args["target_adapter"],
        args["chat_template"],
        tokenizer=tokenizer,
    )
    local = options.labels == "generate" and options.engine == "local"
    answerer = TargetAnswerer.from_options(target, options) if local else None
    if args["preview"]:
        preview(target, loaded, args["preview"], options, answerer)
        return
    rank = Processes.from_environment().rank
    if rank == 0:
        print(f"writes {args['output']}/shard-*.arrow and {args['output']}/manifest.json")
    manifest = distill(target, loaded, args["output"], options, args["overwrite"], answerer=answerer)
    if rank == 0:
        summary(manifest, args["output"])


def main(argv: list[str]) -> int:
    tell_how_targets_run()
    return exit_status(lambda: run(vars(parse(argv))))


def summary(manifest: dict[str, Any], output: str) -> None:
    """Print the manifest's counts, and what was left out: how many rows by reason, and the first of them."""
    counts = manifest["counts"]
    table = Table(title=f"{output}: {manifest['labels']} labels of {manifest['target']['path']}")
    table.add_column("count")
    table.add_column("", justify="right")
    names = {
        "rows": "rows",
        "tokens": "tokens",
        "trained_tokens": "trained tokens",
        "agreement": "text and label agree",
        "skipped": "left out, for a reason that is listed",
        "cut": "cut at max_length",
        "unfinished": "ended at max_new_tokens",
        "loops": "cut at a loop",
        "unasked": "questions that were not asked",
        "without_end": "recorded answers without an end token",
        "shortened": "recorded answers to earlier questions without their thoughts",
    }
    bad_rows = [BadRow(**bad) for bad in manifest["data"]["bad_rows"]]
    for row in (row for shard in manifest["shards"] for row in shard.get("trimmed", ())):  # for the target's tokens
        bad_rows.append(BadRow.of(row["place"], row["reason"], row["kept_turns"]))
    for key, name in names.items():
        value = counts.get(key)
        table.add_row(name, "–" if value is None else f"{value:.4f}" if isinstance(value, float) else f"{value:,}")
    table.add_row("left out: asks what an earlier row asks", f"{manifest['data']['repeated']:,}")
    for outcome in ("trimmed", "dropped"):
        places = {bad.place for bad in bad_rows if bad.outcome == outcome}
        table.add_row(f"bad rows {outcome}", f"{len(places):,}")
    console = plain_console()
    console.print(table)
    skipped = [row for shard in manifest["shards"] for row in shard["skipped"]]
    left_out = [f"left out: {row['place']} (id {row['id']}): {row['reason']}" for row in skipped]
    lines = count_by_reason(bad_rows) + left_out[:10]
    if len(left_out) > 10:
        lines.append(f"… and {len(left_out) - 10} more")
    for line in [*lines, f"every one of them: {output}/manifest.json"] if lines else []:
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
