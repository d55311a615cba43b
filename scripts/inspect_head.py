"""What a head is, for which target, what it was trained on and what was measured; no target is loaded.

    python scripts/inspect_head.py RUN/head [RUN/head …] [--target DIR]

With --target, also whether it fits: every size and hash in which its target and this one differ, but for those of
weights, which are not read. A head that was trained with an adapter fits the target with that --target_adapter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status

from rich.table import Table

from draft_heads.data.common.console import plain_console
from draft_heads.data.common.pretrained import load_config
from draft_heads.data.fingerprint import FIELDS, compared, target_fingerprint
from draft_heads.heads.base import DraftHead
from draft_heads.heads.card import figure, measured, trained_for, trained_on
from draft_heads.heads.checkpoint import PROVENANCE, load_head
from draft_heads.heads.config import OF_THE_TARGET, SIZES
from draft_heads.heads.export.formats import check_exportable, formats_of
from draft_heads.inference.target.loading import target_tokenizer
from draft_heads.scripts.decoding_options import script_parser


def described(path: str, target: dict[str, Any] | None, target_adapter: str | None = None) -> list[tuple[str, str]]:
    """(what, value) of everything that is shown of one head."""
    head = load_head(path)
    config = head.config.to_dict()
    own_weights, read = sum(p.numel() for p in head.parameters()), head.weights_read()
    rows = [("head", f"{config['kind']}, {own_weights:,} parameters")]
    rows.append(("read per draft", f"{read:,} weights, {2 * read / 2**20:,.1f} MiB in 16 bits"))
    rows.append(("target", config["target"] or "unknown"))
    if adapter := head.provenance.get("options", {}).get("target_adapter"):
        rows.append(("its adapter", adapter))
    rows.append(("its sizes", ", ".join(f"{name} {config[name]}" for name in SIZES)))
    own = {key: value for key, value in config.items() if key not in {"kind", *OF_THE_TARGET}}
    rows.append(("settings", ", ".join(f"{key} {value}" for key, value in own.items())))
    rows.append(("exports", exports(head)))
    if target is not None:
        found = fits(config["target_fingerprint"], target)
        if found == "yes" and "options" in head.provenance and bool(adapter) != bool(target_adapter):
            found = f"yes, as on a fine-tune: it was made {'with the adapter' if adapter else 'without an adapter'}"
        elif found == "yes":
            others = adapter and Path(adapter).name != Path(target_adapter or "").name
            found += f"; the weights are not compared{', nor whether the two adapters are one' if others else ''}"
        rows.append(("fits the target", found))
    return rows + trained(head.provenance)


def exports(head: DraftHead) -> str:
    """The formats that hold it and the engines that read them, or why there is none."""
    formats, why = [], "only this project's engine knows its kind"
    for name, one in formats_of(head.config.kind).items():
        try:
            check_exportable(head, name)
            formats.append(f"{name} ({one.engines})")
        except ValueError as error:
            why = str(error)
    return ", ".join(formats) or f"none: {why}"


def fits(made_for: dict[str, Any], target: dict[str, Any]) -> str:
    """Whether the sizes, tokenizer, chat template and constants of two fingerprints agree; weights are not read."""
    if not made_for:
        return "unknown: the head names no fingerprint"
    names = [name for name in (*FIELDS, "constants") if name in made_for and name in target]
    different = compared(*({name: known[name] for name in names} for known in (made_for, target)))
    told = {name: f"{name} {made!r} against {own!r}" for name, made, own in different}
    others = [line for name, line in told.items() if name in FIELDS and name != "chat_template_hash"]
    if others:
        return "no: " + "; ".join(others)
    if list(told) == ["chat_template_hash"]:
        return f"no, or if its weights are others, yes, as on a fine-tune: {told['chat_template_hash']}"
    return "yes, as on a fine-tune: " + "; ".join(told.values()) if told else "yes"


def trained(known: dict[str, Any]) -> list[tuple[str, str]]:
    """What its provenance says of the training."""
    if not known:
        return [("training", f"unknown: no {PROVENANCE} says it")]
    if "imported_from" in known:
        return [("training", f"unknown: read from {known['imported_from']}")]
    commits = dict.fromkeys(str(one.get("git_commit", "unknown")) for one in known.get("programs") or [known])
    figures = [f"{measured(name)}: {figure(value)}" for name, value in known.get("metrics", {}).items()]
    return [
        ("command", known.get("command", "unknown")),
        ("trained", f"{trained_for(known)}, commit {', then '.join(commits)}"),
        ("data", trained_on(known) or "unknown"),
        ("measured", ", ".join(figures) or "nothing"),
    ]


def run() -> None:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("heads", nargs="+", metavar="RUN/head", help="folders or hub ids")
    parser.add_argument("--target", help="a target's folder or hub id, of which only config and tokenizer are read")
    parser.add_argument("--chat_template", help="a bundled name or a .jinja file, instead of the tokenizer's own")
    parser.add_argument("--target_adapter", help="the target's PEFT adapter, which may come with a chat template")
    args = parser.parse_args()
    for name in ("chat_template", "target_adapter"):
        if (value := getattr(args, name)) and not args.target:
            raise ValueError(f"--{name} {value} is for a --target; got none; give one, or leave it out")
    target = None
    if args.target:
        config = load_config(args.target).get_text_config(decoder=True)
        target = target_fingerprint(config, target_tokenizer(args.target, args.chat_template, args.target_adapter))
    for path in args.heads:
        table = Table(title=path, show_header=False, title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in described(path, target, args.target_adapter):
            table.add_row(*row)
        plain_console().print(table)


if __name__ == "__main__":
    sys.exit(exit_status(run))
