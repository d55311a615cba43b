"""What an n-gram drafter costs a step, in short and in long texts: observe and propose, in microseconds.

    python scripts/bench/ngram.py --contexts 1000 32000

Steps of 1 to 4 tokens along made-up conversations, the contexts in turn. Prints median and 99th percentile of each;
the last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from draft_heads.data.synthetic.corpus import conversations
from draft_heads.inference.drafters.base import VerifiedStep
from draft_heads.inference.drafters.text.base import TextDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from draft_heads.inference.evaluation.report import environment
from draft_heads.inference.tree import DraftTree

TOKENIZER = Path(__file__).resolve().parents[2] / "data" / "tiny_target"
DRAFTERS = {
    "ngram": lambda: NgramDrafter(),
    "ngram tree": lambda: NgramDrafter(branches=4, max_nodes=16),
    "prompt_lookup": lambda: PromptLookupDrafter(),
}


def text_of(tokenizer: str, tokens: int) -> list[int]:
    """So many token ids of made-up conversations."""
    encode, ids = AutoTokenizer.from_pretrained(tokenizer), []
    for row in conversations(tokens // 50 + 100, 0, "train"):
        ids += encode("\n".join(turn["value"] for turn in row["conversations"]), add_special_tokens=False)["input_ids"]
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(f"the corpus has {len(ids)} tokens of the {tokens} asked for; lower --contexts")


def step_times(drafter: TextDrafter, text: Sequence[int], context: int, steps: int, seed: int) -> list[float]:
    """Seconds of `observe` and `propose` of steps behind `context` tokens of a text."""
    rng, times, place = random.Random(seed), [], context
    drafter.begin(torch.tensor(text[:context]), len(text))
    drafter.read(list(text[:context]))
    for _ in range(steps):
        count = rng.randint(1, 4)
        tokens = torch.tensor([*text[place : place + count], *[0] * (drafter.max_depth + 1 - count)])
        step = VerifiedStep(tokens, tokens, torch.empty(len(tokens), 0), torch.tensor(count), None, DraftTree.empty())
        start = time.perf_counter()
        drafter.observe(step)
        drafter.propose()
        times.append(time.perf_counter() - start)
        place += count
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 32000], help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=1000, help="steps measured at a time (default 1000)")
    parser.add_argument("--repeats", type=int, default=5, help="times every context is measured, in turn (default 5)")
    parser.add_argument("--tokenizer", default=str(TOKENIZER), help="default: the embedded target's")
    options = parser.parse_args(arguments)
    if min(*options.contexts, options.steps, options.repeats) < 1:
        parser.error("--contexts, --steps and --repeats must be at least 1")
    torch.set_num_threads(1)
    text = text_of(options.tokenizer, max(options.contexts) + 4 * options.steps)
    table = Table("drafter", "context", "median µs", "99th percentile µs")
    results: dict[str, Any] = {}
    for name, make in DRAFTERS.items():
        drafter, times = make(), {context: [] for context in options.contexts}
        for repeat in range(options.repeats):
            for context in options.contexts:
                times[context] += step_times(drafter, text, context, options.steps, repeat)
        for context, taken in times.items():
            taken = torch.tensor(taken, dtype=torch.float64) * 1e6
            median, late = (float(taken.quantile(share)) for share in (0.5, 0.99))
            results.setdefault(name, {})[context] = {"median_us": round(median, 1), "p99_us": round(late, 1)}
            table.add_row(name, f"{context:,}", f"{median:.1f}", f"{late:.1f}")
    Console().print(table)
    print(json.dumps({"steps": options.steps * options.repeats, "results": results, **environment("cpu")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
