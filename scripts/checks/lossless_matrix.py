"""The full losslessness matrix: targets × precisions × heads × trees, against transformers' own `generate`.

    python scripts/checks/lossless_matrix.py --targets data/tiny_target --prompts 200 --output runs/lossless

Targets are the folders given and random-weight Llama, Mistral, Qwen2 and Qwen3 with sliding windows shorter than the
prompts. Every prompt is decoded with every kind of head and its variants (`HEADS`), untrained and trained on the spot
on the target's own answers, with all its trees, with every training-free drafter but `rest`, and with hybrids of both.
Node budgets 1, 2, 4, … 64 take turns over the prompts. Draft models are the target with noise on its weights or a
layer skipped.
Writes lossless_matrix.json and lossless_matrix.md; the exit status is 0 only when nothing is unexplained.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from draft_heads.data.common.progress import track
from draft_heads.data.synthetic.corpus import questions
from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import HEADS as REGISTERED
from draft_heads.heads.checkpoint import head_classes, head_variants, new_head
from draft_heads.heads.config import spread_layers
from draft_heads.heads.draft_vocab import frequent_tokens
from draft_heads.inference.drafters.registry import DRAFTERS, HEAD_DRAFTERS, DrafterBuilder, DrafterSpec
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle, judge_all
from draft_heads.inference.evaluation.report import markdown_table
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import script_parser

VARIANTS = head_variants()
"""Name → (kind, option values)."""
LAST = dict(VARIANTS.values())  # the last variant of each kind, which has most parts
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{kind}_cut": (kind, {**options, "draft_vocab_size": 100}) for kind, options in LAST.items()},
    **{f"{kind}_layers": (kind, {**options, "target_layers": []}) for kind, options in LAST.items()},
}
"""With a draft vocabulary, and reading several layers of the target: [] stands for its `spread_layers`."""
HEADS = {**VARIANTS, **OPTIONS}
SMALL = {"lookahead": "n=4,w={columns}", "self_speculative": "skip=1", "ouroboros": "gamma=4,w=4,p=4,max_nodes={nodes}"}
"""Training-free drafter → options with which it fits the random targets and the budgets."""
WITH = {"": "", "MODEL": ":noisy"}
"""What the matrix has for a drafter to load, and how it is written; a datastore it has not."""
FREE = {
    kind: ",".join(filter(None, [kind + WITH[drafter.loads], SMALL.get(kind)]))
    for kind, drafter in DRAFTERS.items()
    if kind not in HEAD_DRAFTERS and kind != "vanilla" and drafter.loads in WITH
} | {"ngram tree, kept": "ngram,branches=4,keep=1"}
"""Training-free drafters as on a command line, by the labels of the table."""
PARTNERS = (("ouroboros",), ("ngram",), ("lookahead", "ngram"), ("ngram,keep=1", "prompt_lookup"))
HYBRIDS = dict(zip(REGISTERED, itertools.cycle(PARTNERS)))
"""Name of a head → the training-free drafters that share a tree with it, as in `FREE` or as they are written."""
KINDS = (*HEADS, "free", "hybrid")
USUAL = (*REGISTERED, "free", "hybrid")

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
DTYPES = {"float64": torch.float64, "float32": torch.float32}
NEW_TOKENS = 64
_SIZES: dict[str, Any] = {
    **{"vocab_size": 211, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    "initializer_range": 0.3,  # sharper than usual: greedy text of a random model should not be one token for ever
    **{"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


def random_model(model_type: str, **settings: Any) -> Any:
    """A causal language model of `_SIZES` with random weights."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings, **_SIZES))


RANDOM_TARGETS: dict[str, Callable[[], Any]] = {
    "llama": partial(random_model, "llama"),
    "mistral": partial(random_model, "mistral", sliding_window=16),
    "qwen2": partial(random_model, "qwen2", **_WINDOW),
    "qwen3": partial(random_model, "qwen3", **_WINDOW),
}


def load_target(name: str, dtype: torch.dtype) -> Target:
    """A random-weight target by its architecture, or a folder."""
    if name not in RANDOM_TARGETS:
        return Target.from_pretrained(name, dtype=dtype, device="cpu")
    torch.manual_seed(0)
    return Target(RANDOM_TARGETS[name]().to(dtype), name=name)


def make_prompts(target: Target, count: int) -> list[list[int]]:
    """Random tokens longer than the window, or rendered questions where the target has a tokenizer."""
    if target.tokenizer is None:
        rng = random.Random(0)
        return [[rng.randrange(1, 211) for _ in range(rng.randint(20, 80))] for _ in range(count)]
    rendered = (
        target.renderer.prompt([{"role": "user", "content": row["turns"][0]}])
        for row in questions(2 * count, 1, "heldout")
    )
    distinct = {tuple(prompt): None for prompt in rendered if len(prompt) + NEW_TOKENS <= target.max_positions}
    return [list(prompt) for prompt in distinct][:count]


def untrained_head(target: Target, kind: str = "ctc", **settings: Any) -> DraftHead:
    """A head as training starts it, a little disturbed so that its drafts differ."""
    torch.manual_seed(1)
    head = new_head(kind, target.config, **settings).to(target.dtype)
    for parameter in head.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return head


def trained_head(
    target: Target, texts: list[tuple[list[int], list[int]]], steps: int = 200, kind: str = "ctc", **settings: Any
) -> DraftHead:
    """A head fitted to (prompt, greedy answer) pairs, so that many drafts are accepted.

    A draft vocabulary has the answers' most frequent tokens.
    """
    head = untrained_head(target, kind, **settings).train()
    if size := head.config.draft_vocab_size:
        said = torch.tensor([token for _, answer in texts for token in answer])
        counts = said.bincount(minlength=head.config.vocab_size)
        head.set_draft_vocab(frequent_tokens(counts, size, head.config.end_token_ids))
    head.config.anchors = 16
    view, rows_per_step = target.view(), min(4, len(texts))
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)

    @cache
    def batch_from(first: int) -> tuple[Any, ...]:
        """The texts from one on, with what the target says of them, which stays the same from step to step."""
        batch = [texts[(first + row) % len(texts)] for row in range(rows_per_step)]
        rows = [torch.tensor(prompt + answer) for prompt, answer in batch]
        ids, segments = pad_sequence(rows, True), pad_sequence([torch.ones_like(row) for row in rows], True)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        mask = segments.bool() & (positions >= torch.tensor([[len(prompt)] for prompt, _ in batch]))
        return ids, mask, segments, positions, *target.forward_rows(ids, segments, positions, head.config.target_layers)

    for step in range(steps):
        ids, mask, segments, positions, hidden, aux_hidden = batch_from(step * rows_per_step % len(texts))
        if step == 0:
            head.start_from(hidden[mask], view)
        loss = head(hidden, ids, ids, mask, view, segments, positions, aux_hidden, seed=step)
        (loss.total / loss.windows.clamp(min=1)).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return head.eval()


def other_trees(kind: str) -> tuple[str, ...]:
    """The values of the option `tree` of a head's drafter beside the default, which comes first."""
    options = fields(HEAD_DRAFTERS[kind].options_type)
    return next((f.metadata["choices"][1:] for f in options if f.name == "tree"), ())


class _Cell:
    """One target in one precision: its prompts, its own answers, heads trained on them and a draft model."""

    def __init__(self, name: str, dtype_name: str, count: int, steps: int) -> None:
        self.name, self.dtype_name, self.steps = name, dtype_name, steps
        self.target = load_target(name, DTYPES[dtype_name])
        self.prompts = make_prompts(self.target, count)
        self.generation = GenerationSettings(NEW_TOKENS, eos_token_ids=())  # no EOS: every answer has all its tokens
        self.oracle = Oracle(self.target, self.generation)

    def drafters(self, kind: str) -> Iterator[tuple[str, str, str]]:
        """(label, "yes", "no" or "free" for how it is trained, command-line form) of every drafter of one of `KINDS`.

        The path of a head is its name in `HEADS` and whether it is trained, that of a draft model is `noisy`. Heads
        with their defaults are decoded with every tree, variants with the usual one and the chain.
        """
        if kind == "free":
            yield from ((label, "free", text) for label, text in FREE.items())
        elif kind == "hybrid":
            for head, others in HYBRIDS.items():
                if not self.refuses(head):
                    text = "+".join([f"{HEADS[head][0]}:{head}-yes", *(FREE.get(name, name) for name in others)])
                    yield " + ".join([head, *others]), "yes", text
        elif not self.refuses(kind):
            head = HEADS[kind][0]
            others = () if kind in OPTIONS else other_trees(head) if kind in REGISTERED else ("chain",)
            for trained, mode in itertools.product(("no", "yes"), ("", *others)):
                yield f"{kind} {mode}".strip(), trained, f"{head}:{kind}-{trained}" + (mode and f",tree={mode}")

    def refuses(self, name: str) -> bool:
        """Whether a head cannot start from this target: it copies the first layer, which must be as a Llama's."""
        try:
            head = self.new_head(name)
            head.start_from(torch.zeros(1, 1, head.config.hidden_size, dtype=head.dtype), self.target.view())
        except ValueError as error:
            if self.name == "llama" or not self.settings_of(name).get("encoder", "").startswith("target_layer0"):
                raise
            print(f"{name} is left out for {self.name}: {error}")
            return True
        return False

    def decode(self, label: str, trained: str, text: str) -> dict[str, Any]:
        """A row of the report: every prompt with one drafter, its node budgets taking turns."""
        engines = []
        for nodes in BUDGETS:
            spec = DrafterSpec.parse("drafter=" + text.format(nodes=nodes, columns=min(nodes, 8)))
            nodes = max(nodes, 6) if "+lookahead" in text else nodes  # its smallest window
            builder = DrafterBuilder(self.target, nodes)  # with heads and draft models that come from no file
            builder.head, builder.draft_model = self.head, lambda kind, path: self.draft_model
            engines.append(DecodingEngine(self.target, builder.build(spec)))
        taking_turns = zip(itertools.cycle(engines), self.prompts)
        answers = [engine.generate(prompt, self.generation) for engine, prompt in taking_turns]
        turns = zip(self.prompts, [answer.tokens for answer in answers])
        counts, steps = judge_all(self.oracle, turns), sum(answer.target_steps for answer in answers)
        row = {"target": Path(self.name).name, "dtype": self.dtype_name, "drafter": label, "trained": trained}
        return {**row, **counts.as_dict(), "tokens": counts.tokens, "beta": round(counts.tokens / steps, 3)}

    @cache  # noqa: B019  a cell lives as long as its process decodes it
    def head(self, kind: str, path: str) -> DraftHead:
        """A head as training starts it ("NAME-no"), or fitted to the target's own answers ("NAME-yes")."""
        name, _, trained = path.partition("-")
        if trained == "no":
            return self.new_head(name)
        texts = [(prompt, self.oracle.answer(prompt)) for prompt in self.prompts]
        return trained_head(self.target, texts, self.steps, kind, **self.settings_of(name))

    def settings_of(self, name: str) -> dict[str, Any]:
        """The option values of a head of `HEADS` for this target."""
        kind, settings = HEADS[name]
        layers = self.target.config.num_hidden_layers
        read = spread_layers(layers) if "target_layers" in settings else head_classes(kind)[1].usual_layers(layers)
        return {**settings, "target_layers": read}

    def new_head(self, name: str) -> DraftHead:
        """An untrained head of `HEADS`."""
        return untrained_head(self.target, HEADS[name][0], **self.settings_of(name))

    @cached_property
    def draft_model(self) -> Target:
        """A draft model that often agrees with the target: the target with noise on its weights."""
        model = load_target(self.name, self.target.dtype)
        torch.manual_seed(2)
        for parameter in model.model.parameters():
            parameter.data += 0.1 * parameter.std().nan_to_num() * torch.randn_like(parameter)
        return model


def check(cell: tuple[str, str, int], kinds: Sequence[str] = KINDS, steps: int = 200) -> list[dict[str, Any]]:
    """A row of counts for each drafter of `kinds` on a cell (target, precision, prompts); `steps` train a head."""
    torch.set_num_threads(1)
    decoded = _Cell(*cell, steps)
    return [decoded.decode(*drafter) for kind in kinds for drafter in decoded.drafters(kind)]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the rows, then the totals by precision."""
    parts = [markdown_table(list(rows[0]), [list(map(str, row.values())) for row in rows], 4)]
    for dtype in DTYPES:
        chosen = [row for row in rows if row["dtype"] == dtype]
        total = {key: sum(row[key] for row in chosen) for key in ("tokens", "turns", "near_ties", "unexplained")}
        parts.append(
            f"{dtype}: {total['tokens']:,} tokens in {total['turns']:,} answers, {total['near_ties']} near ties, "
            f"{total['unexplained']} unexplained."
        )
    return "\n\n".join(parts) + "\n"


def main() -> bool:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("--targets", nargs="*", default=[], help="folders of targets beside the random-weight ones")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="heads, free (of training), hybrid")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    for folder in args.targets:
        AutoConfig.from_pretrained(folder)  # a wrong path fails here, not after an hour
    args.output.mkdir(parents=True, exist_ok=True)
    cells = [(name, dtype, args.prompts) for name in [*RANDOM_TARGETS, *args.targets] for dtype in DTYPES]
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for found in track(pool.imap_unordered(partial(check, kinds=args.kinds), cells), "lossless", len(cells)):
            rows += found
            (args.output / "lossless_matrix.json").write_text(json.dumps(rows, indent=1) + "\n")
    rows.sort(key=lambda row: (row["target"], row["dtype"], row["drafter"], row["trained"]))
    (args.output / "lossless_matrix.md").write_text(table(rows))
    print(table(rows))
    print(f"written: {args.output / 'lossless_matrix.md'}")
    return not any(row["unexplained"] for row in rows)  # in float64 every difference is


if __name__ == "__main__":
    sys.exit(exit_status(main))
