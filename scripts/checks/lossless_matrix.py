"""The full losslessness matrix: targets × precisions × heads × trees, against transformers' own `generate`.

    python scripts/checks/lossless_matrix.py --targets data/tiny_target --prompts 200 --output runs/lossless

Targets are the folders given and random-weight Llama, Mistral, Qwen2 and Qwen3 with sliding windows shorter than the
prompts. Every prompt is decoded with every kind of head (CTC with all its tree modes), untrained and trained on the
spot on the target's own answers, with every training-free drafter and with hybrids of both; node budgets 1, 2, 4, … 64
are cycled over the prompts. Draft models are the target with noise on its weights or a layer skipped. Writes
lossless_matrix.json and lossless_matrix.md; the exit status is 0 only when nothing is unexplained.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draft_heads.data.rendering import render_prompt
from draft_heads.data.synthetic.corpus import questions
from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import head_classes
from draft_heads.heads.config import target_sizes
from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.heads.ctc_search import TREE_MODES
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.drafters.models.self_speculative import SelfSpeculativeDrafter, without_layers
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import LosslessCounts, Oracle, Turn, judge_all
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target

VARIANTS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "ctc": ({}, [{"tree": mode} for mode in TREE_MODES]),
    "chimera": ({}, [{}]),
    "medusa": ({}, [{}]),
    "hydra": ({"prefix_attention": True}, [{}]),
}
"""Kind of head → its settings, and the drafter options it is decoded with."""

FREE: dict[str, Callable[[Target, Target, int], Drafter]] = {
    "ngram": lambda target, model, nodes: NgramDrafter(max_nodes=nodes),
    "ngram tree, kept": lambda target, model, nodes: NgramDrafter(max_nodes=nodes, branches=4, keep=1),
    "prompt_lookup": lambda target, model, nodes: PromptLookupDrafter(max_nodes=nodes),
    "lookahead": lambda target, model, nodes: LookaheadDrafter(n=4, w=min(nodes, 8)),
    "self_speculative": lambda target, model, nodes: _skipping(target, nodes),
    "draft_model": lambda target, model, nodes: DraftModelDrafter(model, max_nodes=nodes),
    "cascade": lambda target, model, nodes: DraftModelDrafter(model, NgramDrafter(), max_nodes=nodes, k=8),
    "ouroboros": lambda target, model, nodes: OuroborosDrafter(model, max_nodes=nodes, gamma=4, w=4, p=4),
}
"""Training-free drafters by (target, draft model, node budget)."""
HYBRIDS = {
    "ctc": ("ngram",),
    "medusa": ("ngram tree, kept", "prompt_lookup"),
    "chimera": ("ouroboros",),
    "hydra": ("lookahead", "ngram"),
}
"""Kind of head → the training-free drafters that share a tree with it."""
KINDS = (*VARIANTS, "free", "hybrid")

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
DTYPES = {"float64": torch.float64, "float32": torch.float32}
NEW_TOKENS = 64
_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # sharper than usual: greedy text of a random model should not be one token for ever
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
RANDOM_TARGETS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=16, **_SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_WINDOW, **_SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_WINDOW, **_SIZES)),
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
        render_prompt(target.tokenizer, [{"role": "user", "content": row["turns"][0]}])
        for row in questions(2 * count, 1, "heldout")
    )
    distinct = {tuple(prompt): None for prompt in rendered if len(prompt) + NEW_TOKENS <= target.max_positions}
    return [list(prompt) for prompt in distinct][:count]


def untrained_head(target: Target, kind: str = "ctc", **settings: Any) -> DraftHead:
    """A head as training starts it, a little disturbed so that its drafts differ."""
    torch.manual_seed(1)
    head_type, config = head_classes(kind)
    head = head_type(config(**target_sizes(target.config), **settings))
    head.to(target.dtype)
    for parameter in head.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return head


def trained_head(
    target: Target, texts: list[tuple[list[int], list[int]]], steps: int = 200, kind: str = "ctc", **settings: Any
) -> DraftHead:
    """A head fitted to (prompt, greedy answer) pairs, so that many drafts are accepted."""
    head = untrained_head(target, kind, **settings).train()
    head.config.anchors = 16
    view = target.view()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for step in range(steps):
        batch = [texts[(step * 4 + row) % len(texts)] for row in range(4)]
        length = max(len(prompt) + len(answer) for prompt, answer in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        mask, segments = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids)
        for row, (prompt, answer) in enumerate(batch):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            mask[row, len(prompt) : end] = True
            segments[row, :end] = 1
        positions = torch.arange(length).expand_as(ids)
        hidden, _ = target.forward_rows(ids, segments, positions)
        if step == 0:
            head.start_from(hidden[mask], view)
        loss = head(hidden, ids, ids, mask, view, segments, positions, seed=step)
        (loss.total / loss.windows.clamp(min=1)).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return head.eval()


class _Cell:
    """One target in one precision: its prompts, its own answers, and the rows found so far."""

    def __init__(self, name: str, dtype_name: str, count: int, steps: int, tick: Callable[[], None]) -> None:
        self.name, self.dtype_name, self.steps, self.tick = name, dtype_name, steps, tick
        self._trained: dict[str, DraftHead] = {}
        self.target = load_target(name, DTYPES[dtype_name])
        self.prompts = make_prompts(self.target, count)
        self.settings = GenerationSettings(max_new_tokens=NEW_TOKENS)  # no EOS: every answer has all its tokens
        self.oracle = Oracle(self.target, self.settings)
        self.texts = [(prompt, self.oracle.answer(prompt)) for prompt in self.prompts]
        self.rows: list[dict[str, Any]] = []

    def decode(self, drafter: str, trained: str, make: Callable[[int], Drafter]) -> None:
        """Every prompt with drafters of `make(node budget)`; one more row."""
        engines = {budget: DecodingEngine(self.target, make(budget)) for budget in BUDGETS}
        turns, spent = [], 0
        for index, prompt in enumerate(self.prompts):
            answer = engines[BUDGETS[index % len(BUDGETS)]].generate(prompt, self.settings)
            turns.append(Turn(tuple(prompt), tuple(answer.tokens), f"{self.name} prompt {index}"))
            spent += answer.target_steps
            self.tick()
        counts = judge_all(self.oracle, turns)
        self.rows.append(describe(self.name, self.dtype_name, drafter, trained, counts, spent))

    def trained(self, kind: str) -> DraftHead:
        """A head fitted to the target's own answers, once."""
        if kind not in self._trained:
            made = VARIANTS[kind][0]
            self._trained[kind] = trained_head(self.target, self.texts, self.steps, kind, **made)
        return self._trained[kind]

    def heads(self, kind: str) -> None:
        """A kind of head, untrained and trained, with all its trees."""
        made, modes = VARIANTS[kind]
        for trained, head in (("no", untrained_head(self.target, kind, **made)), ("yes", self.trained(kind))):
            for options in modes:
                label = " ".join([kind, *options.values()])
                self.decode(label, trained, partial(drafter_for, head, self.target, **options))

    def free(self) -> None:
        """Every training-free drafter."""
        model = disturbed(self.name, DTYPES[self.dtype_name])
        for label, make in FREE.items():
            self.decode(label, "free", partial(make, self.target, model))

    def hybrids(self) -> None:
        """Heads and training-free drafters in one tree."""
        model = disturbed(self.name, DTYPES[self.dtype_name])
        for kind, others in HYBRIDS.items():

            def make(nodes: int, kind: str = kind, others: Sequence[str] = others) -> Drafter:
                parts = [(kind, drafter_for(self.trained(kind), self.target, nodes))]
                parts += [(name, FREE[name](self.target, model, nodes)) for name in others]
                return HybridDrafter(parts, self.target, nodes)

            self.decode(" + ".join([kind, *others]), "yes", make)


def check(
    name: str,
    dtype_name: str,
    count: int,
    kinds: Sequence[str] = KINDS,
    steps: int = 200,
    tick: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """One row of counts per drafter, training and tree, for one target in one precision.

    kinds: of `KINDS`; steps: of training; `tick` is called per decoding.
    """
    torch.set_num_threads(1)
    cell = _Cell(name, dtype_name, count, steps, tick)
    for kind in kinds:
        if kind == "free":
            cell.free()
        elif kind == "hybrid":
            cell.hybrids()
        else:
            cell.heads(kind)
    return cell.rows


def disturbed(name: str, dtype: torch.dtype) -> Target:
    """A draft model that often agrees with a target: the target with noise on its weights."""
    model = load_target(name, dtype)
    torch.manual_seed(2)
    for parameter in model.model.parameters():
        parameter.data += 0.1 * parameter.std().nan_to_num() * torch.randn_like(parameter)
    return model


def _skipping(target: Target, nodes: int) -> Drafter:
    """The target without its second layer, as a draft model."""
    return SelfSpeculativeDrafter(without_layers(target, "1"), None, nodes)


def describe(name: str, dtype: str, drafter: str, trained: str, counts: LosslessCounts, steps: int) -> dict[str, Any]:
    """A row of the report."""
    return {
        "target": Path(name).name,
        "dtype": dtype,
        "drafter": drafter,
        "trained": trained,
        **counts.as_dict(),
        "tokens": counts.tokens,
        "beta": round(counts.tokens / steps, 3),
    }


def _check(arguments: tuple[str, str, int, Sequence[str]]) -> list[dict[str, Any]]:
    return check(*arguments)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the rows, then the totals by precision."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    lines.append("")
    for dtype in DTYPES:
        some = [row for row in rows if row["dtype"] == dtype]
        total = {key: sum(row[key] for row in some) for key in ("tokens", "turns", "near_ties", "unexplained")}
        lines.append(
            f"{dtype}: {total['tokens']:,} tokens in {total['turns']:,} answers, {total['near_ties']} near ties, "
            f"{total['unexplained']} unexplained.\n"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="*", default=[], help="folders of targets beside the random-weight ones")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="heads, free (of training), hybrid")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    for folder in args.targets:
        AutoConfig.from_pretrained(folder)  # a wrong path fails here, not after an hour
    args.output.mkdir(parents=True, exist_ok=True)
    cells = [(name, dtype, args.prompts, args.kinds) for name in [*RANDOM_TARGETS, *args.targets] for dtype in DTYPES]
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for found in track(pool.imap_unordered(_check, cells), "lossless", len(cells), console=Console()):
            rows += found
            (args.output / "lossless_matrix.json").write_text(json.dumps(rows, indent=1) + "\n")
    rows.sort(key=lambda row: (row["target"], row["dtype"], row["drafter"], row["trained"]))
    (args.output / "lossless_matrix.md").write_text(table(rows))
    print(table(rows))
    print(f"written: {args.output / 'lossless_matrix.md'}")
    too_many = [
        row for row in rows if row["dtype"] == "float64" and row["identical_turns"] != row["turns"]
    ]  # float64 allows no difference at all
    return 1 if too_many or any(row["unexplained"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
