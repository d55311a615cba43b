"""Decoding benchmarks. The last line of output is one JSON object.

    python scripts/bench_decode.py --target TARGET [--compile] [--drafters ctc=RUN/head …] [--threads 2]

- vanilla against transformers' own `generate`, tokens per second, the same prompts;
- a forward over a tree of 8, 16, 32, 64 nodes against one over a single row, behind `--prompt_tokens` of text, and
  beside it the floor: nothing but the matrix products of the same forward;
- for every drafter the same prompts: β, γ against vanilla, and η = γ / β, what of the accepted length becomes speed;
- with `--batches 4 16`, tokens per second of that many sequences at once over those of one by one.

Arms take turns; figures are medians of the ratios of neighbouring runs, with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from data.rendering import render_prompt
from data.synthetic import questions
from inference.batch import BatchEngine
from inference.config_file import parse_with_config
from inference.drafters.registry import DrafterSpec, build_drafter
from inference.engine import DecodingEngine, GenerationSettings
from inference.options import drafter_specs, load_drafters, load_target, target_parser
from inference.target import Target
from inference.tree import ancestor_rows, depths

NODES = (8, 16, 32, 64)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Wall seconds of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turn(arms: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every arm, the arms in turn; the first round is a warm-up and left out."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, run in arms.items():
            spent = seconds(run, device)
            if repeat:
                taken[name].append(spent)
    return taken


def ratio(over: list[float], under: list[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of runs that were neighbours."""
    ratios = [a / b for a, b in zip(over, under)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def prompts(target: Target, count: int, tokens: int) -> list[list[int]]:
    """Rendered questions of the project's own, or random tokens for a target without a tokenizer."""
    if target.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(1, target.config.vocab_size, (count, tokens), generator=generator).tolist()
    asked = questions(count, 1, "heldout")
    return [render_prompt(target.tokenizer, [{"role": "user", "content": row["turns"][0]}]) for row in asked]


def bench_decoding(
    target: Target, drafters: dict[str, Any], texts: list[list[int]], new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Vanilla over transformers' generate; for each drafter β, γ and η. Answers have no EOS: all are equally long."""
    settings = GenerationSettings(max_new_tokens=new_tokens)
    engines = {name: DecodingEngine(target, drafter) for name, drafter in drafters.items()}
    spent = {name: [0, 0] for name in engines}  # tokens, target steps

    def decode(name: str) -> None:
        for text in texts:
            answer = engines[name].generate(text, settings)
            spent[name][0] += len(answer.tokens)
            spent[name][1] += answer.target_steps

    def generate() -> None:
        for text in texts:
            ids = torch.tensor([text], device=target.device)
            target.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip

    arms: dict[str, Callable[[], Any]] = {name: (lambda name=name: decode(name)) for name in engines}  # type: ignore[misc]
    taken = in_turn({"transformers": generate, **arms}, repeats, target.device)
    result: dict[str, Any] = {"vanilla_over_hf_generate": ratio(taken["transformers"], taken["vanilla"])}
    for name in engines:
        if name != "vanilla":
            gamma = ratio(taken["vanilla"], taken[name])
            beta = spent[name][0] / spent[name][1]
            result[name] = {"beta": round(beta, 3), "gamma": gamma, "eta": round(gamma["median"] / beta, 3)}
    return result


def bench_batches(
    target: Target, specs: list[DrafterSpec], options: argparse.Namespace, texts: list[list[int]]
) -> dict[str, Any]:
    """For every drafter and batch size: seconds of one by one over seconds of the batch, the same prompts."""
    settings = GenerationSettings(max_new_tokens=options.new_tokens)
    found = {}
    for spec in specs:

        def make(spec: DrafterSpec = spec) -> Any:
            return build_drafter(spec, target, options.max_nodes)

        engines = {size: BatchEngine(target, make, size) for size in (1, *options.batches)}
        arms = {str(size): (lambda engine=engine: engine.generate(texts, settings)) for size, engine in engines.items()}
        taken = in_turn(arms, max(2, options.repeats // 3), target.device)
        found[spec.name] = {str(size): ratio(taken["1"], taken[str(size)]) for size in options.batches}
    return found


@torch.inference_mode()
def bench_verification(target: Target, text: list[int], repeats: int) -> dict[str, Any]:
    """Seconds of a tree's forward over those of one row's, by node count; and of bare matrix products."""
    cache = target.new_cache(len(text) + max(NODES) + 1)
    target.prefill(torch.tensor(text, device=target.device), cache)

    def tree(nodes: int) -> Callable[[], Any]:
        parents = torch.tensor([max(-1, i // 2 - 1) for i in range(nodes)], dtype=torch.long, device=target.device)
        sees = ancestor_rows(parents, 8)
        depth, rows = depths(sees), torch.arange(nodes + 1, device=target.device)
        return lambda: target.forward_tree(rows, depth, sees, cache)

    products = {nodes: matrix_products(target, nodes + 1) for nodes in (0, *NODES)}
    forwards = in_turn({str(nodes): tree(nodes) for nodes in (0, *NODES)}, repeats, target.device)
    floors = in_turn({str(nodes): run for nodes, run in products.items()}, repeats, target.device)
    return {
        "verify_over_step": {str(nodes): ratio(forwards[str(nodes)], forwards["0"]) for nodes in NODES},
        "floor_over_step": {str(nodes): ratio(floors[str(nodes)], forwards["0"]) for nodes in (0, *NODES)},
    }


def matrix_products(target: Target, rows: int) -> Callable[[], Any]:
    """The products of one forward over this many rows and nothing else, in the layout the forward uses."""
    if target.fused is not None:
        weights = [
            weight
            for layer in target.fused.layers
            for weight in (layer.qkv_weight, layer.o_weight, layer.gate_up_weight, layer.down_weight)
        ] + [target.fused.lm_head_weight]
    else:
        weights = [module.weight for module in target.model.modules() if isinstance(module, torch.nn.Linear)]
    inputs: list[Tensor] = [weight.new_ones(rows, weight.shape[1]) for weight in weights]
    return lambda: [F.linear(x, weight) for x, weight in zip(inputs, weights)]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = target_parser(__doc__)
    add = made.add_argument
    add("--drafters", nargs="*", default=[], metavar="NAME[=[KIND:]PATH[,key=value…]]")
    add("--max_nodes", type=int, default=32, help="most nodes of a draft tree (default 32)")
    add("--questions", type=int, default=4, help="prompts of a run (default 4)")
    add("--prompt_tokens", type=int, default=256, help="text behind which trees are verified (default 256)")
    add("--new_tokens", type=int, default=128, help="tokens of an answer (default 128)")
    add("--repeats", type=int, default=9, help="runs of every arm (default 9)")
    add("--batches", type=int, nargs="*", default=[], help="also decode this many sequences at once")
    return made


def table(result: dict[str, Any]) -> Table:
    """Everything measured, a line each."""
    made = Table("ratio", "median", "quartiles")
    for name, value in result.items():
        pairs = value.items() if "median" not in value else [("", value)]
        for key, cell in pairs:
            if isinstance(cell, dict):
                made.add_row(f"{name} {key}", f"{cell['median']:.2f}", f"{cell['low']:.2f}–{cell['high']:.2f}")
            else:
                made.add_row(f"{name} {key}", f"{cell:.2f}", "")
    return made


def main() -> int:
    try:
        options = parse_with_config(parser(), None, ("target",))
        for name in ("max_nodes", "questions", "prompt_tokens", "new_tokens", "repeats"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
        target = load_target(options)
        specs = drafter_specs(options.drafters)
        drafters = load_drafters(specs, target, options.max_nodes)
        if min(options.batches, default=1) < 1:
            raise ValueError(f"--batches must be at least 1, got {min(options.batches)}")
        room = target.max_positions - options.prompt_tokens
        if room < max(NODES) + 1:
            raise ValueError(
                f"--prompt_tokens must leave {max(NODES) + 1} of the target's {target.max_positions} positions; got "
                f"{options.prompt_tokens}"
            )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    texts = prompts(target, options.questions, options.prompt_tokens)
    filler = (texts[0] * options.prompt_tokens)[: options.prompt_tokens]
    result = bench_decoding(target, drafters, texts, options.new_tokens, options.repeats)
    result |= bench_verification(target, filler, 10 * options.repeats)
    if options.batches:
        many = prompts(target, max(options.batches), options.prompt_tokens)
        batched = bench_batches(target, specs, options, many)
        result |= {f"batch_over_one_by_one {name}": ratios for name, ratios in batched.items()}
    Console().print(table(result))
    settings = {"threads": torch.get_num_threads(), "compile": options.compile, "device": str(target.device)}
    medians = {
        "vanilla_over_hf_generate": result["vanilla_over_hf_generate"]["median"],
        "verify_over_step": {nodes: value["median"] for nodes, value in result["verify_over_step"].items()},
    }
    print(json.dumps({**result, **medians, "settings": settings}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
