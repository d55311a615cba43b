"""Build a datastore for the drafter `rest` from conversations.

    python scripts/build_datastore.py --dataset sharegpt.json --tokenizer TARGET --output runs/datastore
    python scripts/build_datastore.py --dataset runs/distilled --tokenizer TARGET --output runs/datastore

Conversations are rendered by the tokenizer's chat template; a tokenizer without one takes Vicuna's. Of the output of
scripts/distill.py the rows are taken as they are: with `--labels generate` the target's own answers. Writes
datastore.json, tokens.npy, suffixes.npy and starts.npy to --output (data/datastore.py says what is in them), six to
twelve bytes per token; takes about 50 bytes of memory per token, and 30 seconds for 9 million tokens on one thread.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from draft_heads.configs.command_line import exit_status, parse_with_config

from draft_heads.configs.options import add_flags, option_names
from draft_heads.data.common.console import plain_console
from draft_heads.data.common.progress import progress_bar
from draft_heads.data.datastore import ARRAYS, MANIFEST
from draft_heads.data.datastore_build import build_datastore, is_distilled
from draft_heads.data.text.chat_template import CHAT_TEMPLATE_HELP, load_chat_tokenizer, load_tokenizer
from draft_heads.data.text.conversations import DatasetOptions
from draft_heads.data.text.json_rows import check_source
from draft_heads.inference.evaluation.report import check_output
from draft_heads.scripts.decoding_options import check_positive, script_parser


def run(options: argparse.Namespace) -> None:
    check_positive(options, "limit")
    check_output(options.output, options.overwrite, MANIFEST)
    there = [f"{name}.npy" for name in ARRAYS if (options.output / f"{name}.npy").exists()]
    if there and not options.overwrite:
        raise ValueError(
            f"--output {options.output} holds {there[0]}, and no finished datastore; add --overwrite to replace it, or "
            "name another folder"
        )
    if options.output.is_file():
        raise ValueError(f"--output must be a folder; {options.output} is a file; name another one")
    check_source(options.dataset)
    if options.output.resolve() == Path(options.dataset).resolve():
        raise ValueError(f"--output must be another folder than --dataset; both are {options.output}; name a new one")
    if is_distilled(options.dataset):
        if options.chat_template:
            raise ValueError(
                f"--chat_template renders conversations; got {options.chat_template} with {options.dataset}, whose "
                "rows are rendered already; leave it out"
            )
        tokenizer = load_tokenizer(options.tokenizer, option="--tokenizer")
    else:
        tokenizer = load_chat_tokenizer(options.tokenizer, options.chat_template)
    console = plain_console()
    with progress_bar(console, "reading") as progress:
        chosen = DatasetOptions(**{name: getattr(options, name) for name in option_names(DatasetOptions)})
        given = options.dataset, tokenizer, options.output, options.limit, progress, chosen
        manifest = build_datastore(*given, overwrite=options.overwrite)
    bad_rows = {bad["place"] for bad in manifest["bad_rows"]}
    what = f"{options.output}: {manifest['tokens']:,} tokens of {manifest['conversations']:,} conversations"
    what += f"; {len(bad_rows):,} bad rows trimmed or left out, listed in {MANIFEST}" if bad_rows else ""
    console.print(what, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--dataset", help="ShareGPT or messages: JSON(L) file, also .gz, dataset folder, hub id; or distilled rows")
    add("--tokenizer", metavar="DIR|ID", help="the target's tokenizer")
    add("--chat_template", metavar="NAME|FILE", help=CHAT_TEMPLATE_HELP)
    add("--output", type=Path, help="folder to write")
    add("--limit", type=int, help="only N conversations: the first, or some of rows with cached states")
    add_flags(parser, DatasetOptions)
    add("--overwrite", action="store_true", help="replace a datastore in --output")
    return exit_status(lambda: run(parse_with_config(parser, arguments, ("dataset", "tokenizer", "output"))))


if __name__ == "__main__":
    sys.exit(main())
