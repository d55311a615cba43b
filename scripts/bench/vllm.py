"""How fast is a real vLLM with each head? Acceptance length and tokens per second, alone and eight requests at once.

    python scripts/bench/vllm.py --python VENV/bin/python --target DIR --heads RUN/head … --output DIR [--prompts FILE]

Arms: vLLM without drafts, its own n-grams, its own EAGLE-3 from our export, and every head inside it
(`inference/serving/vllm.py`). Each arm is an engine of its own; the arms take turns, `--rounds` times over, and the
table has medians of the rounds. Answers must be those without drafts. VENV is made by `make check-engines`.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from typing import Any

from draft_heads.configs.command_line import exit_status

import torch

from draft_heads.data.text.benchmarks import load_benchmark
from draft_heads.heads.checkpoint import load_head
from draft_heads.heads.export.formats import write_folder
from draft_heads.inference.target.target import Target
from draft_heads.scripts.bench.decode import prompts as make_prompts
from draft_heads.scripts.checks.engines import PLUGIN, Engines, acceptance_length, engines_parser

SIZES = (1, 8)


def arms(args: Any, target: Target) -> dict[str, dict[str, Any]]:
    """Name → vLLM's arguments."""
    tokens = {"num_speculative_tokens": args.tokens}
    lookup = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    found: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"speculative_config": lookup | tokens}}
    kinds = Counter[str]()
    for path in args.heads:
        head = load_head(path, target.fingerprint())
        kind = head.config.kind
        kinds[kind] += 1
        name = f"{kind}_{kinds[kind]}" if kinds[kind] > 1 else kind  # of two CTC heads the second is ctc_2
        if kind == "eagle3":
            folder = args.output / f"{name}_export"
            write_folder(head, "eagle3", folder, target.config, args.target)
            found[f"{name}, its export"] = {"speculative_config": {"method": "eagle3", "model": str(folder)} | tokens}
        found[name] = {
            "speculative_config": {"method": "custom_class", "model": PLUGIN} | tokens,
            "additional_config": {"draft_head": path},
        }
    return found


def measure(engines: Engines, name: str, arm: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each of `SIZES`: answers, acceptance length and tokens per second."""
    tasks = [{"prompts": engines.prompts, "at_once": size, "sampling": engines.greedy} for size in SIZES]
    warm = {"prompts": engines.prompts[:8], "at_once": 8, "sampling": engines.greedy | {"max_tokens": 8}}
    results = engines.run(name, [warm, *tasks], enable_prefix_caching=False, **arm)[1:]
    return [
        {
            "answers": [answers[0] for answers in found["answers"]],
            "length": acceptance_length(found["counts"]) if arm else 1.0,
            "speed": sum(len(answers[0]) for answers in found["answers"]) / found["seconds"],
        }
        for found in results
    ]


def main() -> None:
    parser = engines_parser(__doc__, 96)
    add = parser.add_argument
    add("--prompts", help="a benchmark, of which the first turns are asked (default: questions of the project's own)")
    add("--tokens", type=int, default=4, help="drafted tokens a step (default 4)")
    add("--rounds", type=int, default=3, help="default 3")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    target = Target.from_pretrained(args.target, torch.float32, "cpu")
    if args.prompts:
        questions = load_benchmark("prompts", args.prompts, args.questions)
        prompts = [target.renderer.prompt([{"role": "user", "content": one.turns[0]}]) for one in questions]
    else:
        prompts = make_prompts(target, args.questions, 0)
    engines = Engines(args.python, args.target, args.output, prompts, args.max_new_tokens)
    chosen = arms(args, target)
    rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in chosen}
    for number in range(args.rounds):
        for name, arm in chosen.items():
            rounds[name].append(measure(engines, name.replace(", its export", "_export"), arm))
            print(f"round {number + 1} of {args.rounds}: {name}", flush=True)
    sizes = " | ".join(f"tokens/s, {size} at once | over plain" for size in SIZES)
    print(f"\n| arm | acceptance length | {sizes} | same answers |")
    print(f"| --- | --- |{' --- | --- |' * len(SIZES)} --- |")
    plain = rounds["plain"][0]
    for name, measured in rounds.items():
        cells = [name, f"{measured[0][0]['length']:.2f}"]
        for index in range(len(SIZES)):
            speeds = [found[index]["speed"] for found in measured]
            over = [found[index]["speed"] / base[index]["speed"] for found, base in zip(measured, rounds["plain"])]
            cells += [
                f"{statistics.median(speeds):.0f}",
                f"{statistics.median(over):.2f} ({min(over):.2f}–{max(over):.2f})",
            ]
        same = sum(
            got == want for found in measured for index in range(len(SIZES))
            for got, want in zip(found[index]["answers"], plain[index]["answers"])
        )  # fmt: skip
        print(f"| {' | '.join(cells)} | {same}/{len(prompts) * len(SIZES) * args.rounds} |")


if __name__ == "__main__":
    sys.exit(exit_status(main))
