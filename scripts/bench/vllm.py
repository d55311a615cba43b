"""How fast is a real vLLM with each head? Acceptance length and tokens per second, alone and eight requests at once.

    python scripts/bench/vllm.py --python VENV/bin/python --target DIR --output DIR [--prompts FILE]
        [--heads RUN/head …] [--drafters transformers ctc=RUN/head …]

Arms: vLLM without drafts, its own n-grams, its own EAGLE-3 from our export, and every head inside it
(`inference/serving/vllm.py`). Each of these is an engine of its own. `--drafters`, written as for
`scripts/evaluate.py`, adds our engine without drafts and with each of them, and rows of transformers, all of one text
at a time. The arms take turns, `--rounds` times over, and the table has medians of the rounds. Answers must be those
of vLLM without drafts. VENV is made by `make check-engines`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from draft_heads.configs.command_line import exit_status

import torch

from draft_heads.heads.checkpoint import load_head
from draft_heads.heads.export.formats import write_folder
from draft_heads.inference.drafters.base import forget_all
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.evaluate import endless
from draft_heads.inference.evaluation.hf_assisted import hf_engine
from draft_heads.inference.evaluation.hf_generate import HFGenerate
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.bench.decode import check_forgets
from draft_heads.scripts.bench.decode import prompts as make_prompts
from draft_heads.scripts.checks.engines import PLUGIN, Engines, acceptance_length, engines_parser
from draft_heads.scripts.decoding_options import answered_questions, drafter_specs, load_engines
from draft_heads.scripts.evaluate import split_rows

SIZES = (1, 8)
OwnEngine = DecodingEngine | HFGenerate


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


def measure(engines: Engines, name: str, arm: dict[str, Any], compiled: bool) -> list[dict[str, Any]]:
    """Of each of `SIZES`: answers, acceptance length and tokens per second."""
    tasks = [{"prompts": engines.prompts, "at_once": size, "sampling": engines.greedy} for size in SIZES]
    warm = {"prompts": engines.prompts[:8], "at_once": 8, "sampling": engines.greedy | {"max_tokens": 8}}
    results = engines.run(name, [warm, *tasks], enable_prefix_caching=False, enforce_eager=not compiled, **arm)[1:]
    return [
        {
            "answers": [answers[0] for answers in found["answers"]],
            "length": acceptance_length(found["counts"]) if arm else 1.0,
            "speed": sum(len(answers[0]) for answers in found["answers"]) / found["seconds"],
        }
        for found in results
    ]


def own_engines(args: Any, target: Target) -> dict[str, OwnEngine]:
    """Rows of `--drafters` by name: our engine's, the first without drafts, and those of transformers.

    ValueError for a drafter that would know the texts from the first round.
    """
    if not args.drafters:
        return {}
    hf_rows, drafters = split_rows(args.drafters)
    engines = load_engines(drafter_specs(drafters), target, args.max_nodes, 1)
    check_forgets({name: engine.drafter for name, engine in engines.items()})
    own = {f"our {name}": engine for name, engine in engines.items() if isinstance(engine, DecodingEngine)}
    return own | {name: hf_engine(target, words) for name, words in hf_rows.items()}


def measure_own(engine: OwnEngine, prompts: list[list[int]], settings: GenerationSettings) -> list[dict[str, Any]]:
    """What `measure` gives, of one text at a time; the acceptance length is that of later steps than the prefill, as
    vLLM's is, but for drafters that may draft nothing, of which vLLM counts the steps that have drafts, and for the
    last step of an answer, which vLLM counts whole and we up to the answer's end."""
    engine.generate(prompts[0][::-1], endless(settings))
    if isinstance(engine, DecodingEngine):
        forget_all(engine.drafter)
    start = time.monotonic()
    answers = [engine.generate(prompt, settings) for prompt in prompts]
    seconds = time.monotonic() - start
    accepted = [tokens - 1 for answer in answers for tokens in answer.accept_lengths[1:]]  # after the prefill
    length, tokens = 1 + sum(accepted) / max(1, len(accepted)), sum(len(answer.tokens) for answer in answers)
    return [{"answers": [answer.tokens for answer in answers], "length": length, "speed": tokens / seconds}]


def main() -> None:
    parser = engines_parser(__doc__, 96, needs_heads=False)
    add = parser.add_argument
    add(
        "--prompts",
        help="a known benchmark or [NAME=]FILE, of which the first turns are asked (default: our own questions)",
    )
    add("--tokens", type=int, default=4, help="drafted tokens a step (default 4)")
    add("--rounds", type=int, default=3, help="default 3")
    add("--compile", action="store_true", help="let vLLM compile the target (default: its eager mode)")
    add("--drafters", nargs="+", default=[], help="rows of our own engine, and of transformers")
    add("--max_nodes", type=int, default=32, help="most nodes of our engine's trees (default 32)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    target = Target.from_pretrained(args.target, torch.float32, "cpu")
    if args.prompts:
        _, questions = answered_questions(args.prompts, ())
        prompts = [target.renderer.prompt(one.first_messages, one.extra) for one in questions[: args.questions]]
    else:
        prompts = make_prompts(target, args.questions, 0)
    engines = Engines(args.python, args.target, args.output, prompts, args.max_new_tokens)
    run: dict[str, Callable[[], list[dict[str, Any]]]] = {
        name: partial(measure, engines, name.replace(", its export", "_export"), arm, args.compile)
        for name, arm in arms(args, target).items()
    }
    settings, ours = GenerationSettings(args.max_new_tokens), own_engines(args, target)
    if taken := run.keys() & ours.keys():
        raise ValueError(
            f"rows of --drafters need names of their own; {', '.join(taken)} is a row of vLLM; give another"
        )
    run |= {name: partial(measure_own, own, prompts, settings) for name, own in ours.items()}
    rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in run}
    for number in range(args.rounds):
        for name, measured in run.items():
            rounds[name].append(measured())
            print(f"round {number + 1} of {args.rounds}: {name}", flush=True)
    sizes = " | ".join(f"tokens/s, {size} at once | over plain" for size in SIZES)
    print(f"\n| arm | acceptance length | {sizes} | same answers |")
    print(f"| --- | --- |{' --- | --- |' * len(SIZES)} --- |")
    plain = rounds["plain"][0]
    for name, measured in rounds.items():
        cells = [name, f"{measured[0][0]['length']:.2f}"]
        for index in range(len(measured[0])):
            speeds = [found[index]["speed"] for found in measured]
            over = [found[index]["speed"] / base[index]["speed"] for found, base in zip(measured, rounds["plain"])]
            cells += [
                f"{statistics.median(speeds):.0f}",
                f"{statistics.median(over):.2f} ({min(over):.2f}–{max(over):.2f})",
            ]
        cells += ["", ""] * (len(SIZES) - len(measured[0]))
        same = [
            got == want for found in measured for sized, base in zip(found, plain)
            for got, want in zip(sized["answers"], base["answers"])
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} | {sum(same)}/{len(same)} |")


if __name__ == "__main__":
    sys.exit(exit_status(main))
