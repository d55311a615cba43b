"""Train a small target from scratch: tokenizer, chat template and language model; then measure what it can do.

    python scripts/make_tiny_target.py --output runs/tiny_target
    python scripts/make_tiny_target.py --dataset chats.json --hidden 256 --output runs/small
    python scripts/make_tiny_target.py --dataset chats.json --tokenizer runs/small --layers 1 \\
        --output runs/draft

Without --dataset it learns the synthetic corpus of `data.synthetic.corpus`, arithmetic included. The folder
loads with `AutoModelForCausalLM` and `AutoTokenizer`. The last line of output is one JSON object.
"""

import argparse
import json
import math
import platform
import random
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from draft_heads.configs.command_line import exit_status, on_interrupt

import tokenizers
import torch
import transformers
from rich.console import Console
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from draft_heads.configs.options import add_flags, add_threads, check_read, use_threads
from draft_heads.data.bpe import train_tokenizer
from draft_heads.data.common.console import plain_console
from draft_heads.data.common.files import let_others_read
from draft_heads.data.common.pretrained import check_folder_or_hub_id
from draft_heads.data.common.progress import progress_bar
from draft_heads.data.synthetic.corpus import conversations, drills
from draft_heads.data.text.chat_template import load_chat_tokenizer
from draft_heads.data.text.conversations import (
    DatasetOptions,
    conversation_of,
    count_by_reason,
    parse_record,
    read_conversations,
    render_row,
)
from draft_heads.data.text.end_tokens import end_token_ids
from draft_heads.data.text.rendering import ChatRenderer, ConversationError
from draft_heads.inference.evaluation.report import markdown_table
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import check_new_folder, script_parser
from draft_heads.scripts.measure_tiny_target import MEASURED, Placed, Row, loss_of, measure
from draft_heads.train.optimizer import Muon

PRACTICE = 0.3  # share of the time spent on bare sums first: tables are learnt by repetition

INTEGERS = {
    "vocab_size": (1024, "tokens of the tokenizer, where one is trained"),
    "hidden": (128, "hidden size, a multiple of 32"),
    "layers": (4, "decoder blocks"),
    "max_length": (512, "conversations are cut after so many tokens"),
    "batch_tokens": (1024, "tokens per optimizer step"),
    "conversations": (30000, "conversations in the synthetic corpus"),
    "questions": (250, "unseen prompts of each kind to measure on"),
    "seed": (0, "seed of the weights and the corpus"),
}
"""Flag → default, help."""
READ_WITH = (
    *(("vocab_size", "tokenizer", False), ("conversations", "dataset", False)),
    ("split dataset_config skip_bad_rows", "dataset", True),
)
"""See `check_read`."""


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, config=False)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder to write; must be empty or absent")
    add("--dataset", help="ShareGPT or messages: JSON(L) file, also .gz or hub id; default: the synthetic corpus")
    add_flags(parser, DatasetOptions)
    add("--tokenizer", help="folder or hub id of a tokenizer to reuse; default: train one")
    add("--max_minutes", type=float, default=12, help="minutes of training (12)")
    add("--store", choices=["float32", "bfloat16"], default="float32", help="dtype of the saved weights")
    add("--learning_rate", type=float, default=3e-3, help="highest learning rate (0.003)")
    for name, (default, text) in INTEGERS.items():
        add(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    add_threads(parser)
    options = parser.parse_args(argv)
    if options.hidden % 32 or options.hidden < 32:
        parser.error(f"--hidden must be a multiple of 32 (heads have 32 dimensions); got {options.hidden}")
    if options.vocab_size < 300:
        parser.error(f"--vocab_size must be at least 300 (256 bytes and the marks); got {options.vocab_size}")
    for name in ("layers", "max_length", "max_minutes", "batch_tokens", "conversations", "questions"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be positive; got {getattr(options, name)}")
    check_read(options, parser.get_default, READ_WITH)
    check_new_folder(options.output)
    return options


# ---- corpus and tokenizer --------------------------------------------------------------------------------


def load_corpus(options: argparse.Namespace) -> tuple[list[Placed], list[Placed]]:
    """(training, unseen) conversations; of a user's dataset every 50th first question is kept unseen, in all rows."""
    if options.dataset:
        loaded = read_conversations(
            options.dataset, options.split, options.skip_bad_rows, config=options.dataset_config
        )
        rows = [(row["place"], conversation_of(row)) for row in loaded.dataset]
        first: dict[str, Placed] = {}  # of the conversations that begin with the same question
        for row in rows:
            first.setdefault(row[1].opening, row)
        if len(first) < 2:
            raise SystemExit(f"--dataset needs 2 different first questions or more; {options.dataset} has {len(first)}")
        unseen = dict(list(first.items())[:: min(50, len(first))])
        return [row for row in rows if row[1].opening not in unseen], list(unseen.values())
    train = conversations(options.conversations, options.seed, "train")
    return placed(train), placed(conversations(options.questions, options.seed, "heldout"))


def placed(rows: list[dict]) -> list[Placed]:
    """Rows of the synthetic corpus."""
    return [(f"row {number}", parse_record(row)) for number, row in enumerate(rows, start=1)]


def render(tokenizer: PreTrainedTokenizerFast, rows: list[Placed], options: argparse.Namespace) -> list[Row]:
    """Token ids and assistant marks of every conversation; what lies beyond --max_length is cut, and a line counts
    those whose answers do.

    ConversationError for one that the chat template refuses, or that holds a control token, unless --skip_bad_rows.
    """
    renderer, found, bad_rows, beyond = ChatRenderer(tokenizer), [], [], 0
    source = options.dataset or "the corpus"
    for place, row in rows:
        made, bad = render_row(renderer, row, source, place, options.skip_bad_rows, renderer.conversation)
        bad_rows += bad
        ids, mask = made or ([], [])
        beyond += bool(ids) and not any(mask[1 : options.max_length])
        if any(mask[1 : options.max_length]):
            found.append((ids[: options.max_length], mask[: options.max_length]))
    if beyond and found:
        print(f"{source}: {beyond:,} conversations have no answer within --max_length; left out", file=sys.stderr)
    for line in count_by_reason(bad_rows):
        print(f"{options.dataset}: {line}", file=sys.stderr)
    if not found:
        reason = f"the first bad row is {bad_rows[0]}" if bad_rows else "raise it"
        if options.dataset:
            reason += "; every 50th first question is measured on, so another order of the rows may help"
        raise ConversationError(
            f"none of {len(rows):,} conversations, which begin with {rows[0][0]} and are trained on or measured "
            f"together, has an answer within --max_length {options.max_length} tokens; {reason}"
        )
    return found


# ---- model and training ----------------------------------------------------------------------------------


def build_model(tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> torch.nn.Module:
    """A randomly initialised Llama; its weights are drawn wide enough to learn in a few thousand steps."""
    heads, ends = options.hidden // 32, list(end_token_ids(tokenizer))
    if not ends:
        raise ValueError(f"a target needs an end token; {options.tokenizer} has none; set its eos_token")
    marks = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        "llama",
        vocab_size=1 + max(tokenizer.get_vocab().values()),  # some tokenizers have holes
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 5 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=2 * options.max_length,
        initializer_range=options.hidden**-0.5,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        **marks,
    )
    model = AutoModelForCausalLM.from_config(config)
    ending = ends if len(ends) > 1 else ends[0]
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=ending, **marks)
    return model


def batches(rows: list[Row], batch_tokens: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids [B, L], mask [B, L]): rows of similar length, padded right; B·L <= batch_tokens."""
    rng = random.Random(seed)
    while True:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + rng.uniform(0, 16))
        groups: list[list[int]] = [[]]
        for i in order:
            if groups[-1] and (len(groups[-1]) + 1) * (len(rows[i][0]) + 16) > batch_tokens:
                groups.append([])
            groups[-1].append(i)
        rng.shuffle(groups)
        for group in groups:
            length = max(len(rows[i][0]) for i in group)
            yield tuple(
                torch.stack([pad(torch.tensor(rows[i][part]), (0, length - len(rows[i][part]))) for i in group])
                for part in (0, 1)
            )


def train(
    model: torch.nn.Module, practice: list[Row], rows: list[Row], options: argparse.Namespace, console: Console
) -> dict:
    """Train for `--max_minutes`, `PRACTICE` of it on `practice` if any: 50 steps warm-up, linear decay from half.

    Muon for the blocks' matrices, which needs about half of Adam's steps; AdamW for everything else.
    """
    peak, blocks = options.learning_rate, {id(p): p for p in model.model.layers.parameters() if p.ndim == 2}
    others = [p for p in model.parameters() if id(p) not in blocks]
    square_step = 0.2 * options.hidden**0.5  # `Muon` moves a square matrix by this many learning rates
    muon = Muon(list(blocks.values()), lr=5 * peak / square_step, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.97), weight_decay=0.0)
    peaks = [(group, group["lr"]) for group in muon.param_groups + adam.param_groups]
    start, steps, tokens, average = time.monotonic(), 0, 0, math.nan
    model.train()
    with progress_bar(console, "training") as show:
        stream = batches(rows, options.batch_tokens, options.seed)
        practising = batches(practice, options.batch_tokens, options.seed) if practice else stream
        while (done := (time.monotonic() - start) / (60 * options.max_minutes)) < 1:
            ids, mask = next(practising if done < PRACTICE else stream)
            for group, highest in peaks:
                group["lr"] = highest * min((steps + 1) / 50, 1.0, 2 * (1 - done))
            loss = loss_of(model, ids, mask)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in (muon, adam):
                optimizer.step()
                optimizer.zero_grad()
            steps, tokens = steps + 1, tokens + int(mask[:, 1:].sum())
            if steps % 10 == 1:
                value = loss.item()
                average = value if math.isnan(average) else 0.8 * average + 0.2 * value
                rate = tokens / (time.monotonic() - start)
                figures = f"loss {average:.3f}, {steps} steps, {rate:,.0f} trained tokens/s"
                show("minutes of training", done * options.max_minutes, options.max_minutes, figures)
    model.eval()
    return {"steps": steps, "trained_tokens": tokens, "training_loss": round(average, 4)}


CARD = """# A small target

A Llama-style language model trained from scratch, with {}. It exists to
train, test and measure draft heads without a download; it knows its corpus and nothing else.

Made by

    {}

{}

{}
"""


def make(argv: list[str] | None = None) -> dict:
    options, console = parse_options(argv), plain_console(stderr=True)
    use_threads(options.threads)
    torch.manual_seed(options.seed)
    output = options.output

    with console.status("reading and tokenizing the corpus"):
        corpus, unseen = load_corpus(options)
        if options.tokenizer:
            check_folder_or_hub_id("--tokenizer", options.tokenizer)
            tokenizer = load_chat_tokenizer(options.tokenizer)
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
        else:
            tokenizer = train_tokenizer(
                [row.messages for _, row in corpus[:8000]], options.vocab_size, 2 * options.max_length
            )
        rows, unseen_rows = render(tokenizer, corpus, options), render(tokenizer, unseen, options)
        bare = [] if options.dataset else drills(options.conversations // 2, options.seed, "train")
        practice = render(tokenizer, placed(bare), options) if bare else []

    model = build_model(tokenizer, options).to("cuda" if torch.cuda.is_available() else "cpu")
    parameters, size = sum(p.numel() for p in model.parameters()), sum(len(ids) for ids, _ in rows)
    console.print(f"{len(rows):,} conversations, {size:,} tokens, {parameters:,} parameters")
    trained = train(model, practice, rows, options, console)

    model.to(getattr(torch, options.store)).save_pretrained(output)
    let_others_read(Path(output))
    model.float()  # the figures below are of the stored weights
    tokenizer.save_pretrained(output)
    kept = f"the model is in {output}, not yet measured; empty it to make another"
    with on_interrupt(lambda: kept), console.status("measuring on unseen prompts"):
        figures = measure(Target(model, tokenizer), unseen, unseen_rows, options)
    command = shlex.join(["python", "scripts/make_tiny_target.py", *(sys.argv[1:] if argv is None else argv)])
    facts = {
        "parameters": parameters,
        "conversations": len(rows),
        **trained,
        "device": f"{model.device.type}, {torch.get_num_threads()} threads, {platform.machine()}",
        "python": platform.python_version(),
        **{module.__name__: module.__version__ for module in (torch, transformers, tokenizers)},
    }
    measured = [(text, str(figures[key])) for key, text in MEASURED.items() if key in figures]
    made = [(key.replace("_", " "), str(value)) for key, value in facts.items()]
    tables = markdown_table(("measured", ""), measured, 2), markdown_table(("made with", ""), made, 2)
    spelled = "the tokenizer that the command names" if options.tokenizer else "a byte-level BPE tokenizer"
    (output / "README.md").write_text(CARD.format(spelled, command, *tables), encoding="utf-8")
    console.print(f"wrote {output}: model, tokenizer and README.md with the figures below")
    print(json.dumps({"command": command, **facts, **figures}))
    return figures


if __name__ == "__main__":
    sys.exit(exit_status(make))
