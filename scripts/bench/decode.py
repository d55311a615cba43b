"""Decoding benchmarks. The last line of output is one JSON object.

    python scripts/bench/decode.py --target TARGET [--compile] [--drafters ctc=RUN/head …] [--threads 2]

- vanilla against transformers' own `generate` (`--baselines eager static compiled`), tokens per second, same prompts;
- verifying a tree of 8, 16, 32, 64 nodes against a step of a single row, behind `--prompt_tokens` of text, and beside
  it the floor: nothing but the matrix products of the same forward;
- the share of the memory's read bandwidth, measured in the same run, that a vanilla step uses;
- for every drafter the same prompts: β, γ against vanilla, and η = γ / β, what of the accepted length becomes speed;
- with `--batches 4 16`, tokens per second of that many sequences at once over those of one by one;
- with `--shape 7b`, a random-weight Llama of that shape instead of a target, and with `--scripted 2.3 3.3 4.3` the γ
  and η of untrained heads on it whose accepted lengths are scripted: real computation, acceptance by script.

Arms take turns; figures are medians of the ratios of neighbouring runs, with their quartiles.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from draft_heads.data.rendering import render_prompt
from draft_heads.data.synthetic.corpus import questions
from draft_heads.heads.checkpoint import head_classes
from draft_heads.heads.config import target_sizes
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.config_file import parse_with_config
from draft_heads.inference.drafters.registry import HEAD_DRAFTERS, DrafterSpec, build_drafter, drafter_for
from draft_heads.inference.drafters.vanilla import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.options import drafter_specs, load_drafters, load_target, prepared, target_parser
from draft_heads.inference.evaluation.scripted import ScriptedEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from draft_heads.train.options import SHAPES

NODES = (8, 16, 32, 64)
BASELINES = ("eager", "static", "compiled")


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


def random_target(options: argparse.Namespace) -> Target:
    """A Llama of a published shape, its weights random: for speeds only."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = (
        getattr(torch, options.dtype) if options.dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    config = LlamaConfig(**SHAPES[options.shape], max_position_embeddings=4096, dtype=dtype)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    return prepared(Target(model, name=f"random {options.shape}"), options)


def prompts(target: Target, count: int, tokens: int) -> list[list[int]]:
    """Rendered questions of the project's own, or random tokens for a target without a tokenizer."""
    if target.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(1, target.config.vocab_size, (count, tokens), generator=generator).tolist()
    asked = questions(count, 1, "heldout")
    return [render_prompt(target.tokenizer, [{"role": "user", "content": row["turns"][0]}]) for row in asked]


def bench_decoding(
    target: Target,
    drafters: dict[str, Any],
    texts: list[list[int]],
    new_tokens: int,
    repeats: int,
    baselines: Sequence[str] = ("eager",),
) -> dict[str, Any]:
    """Vanilla over transformers' generate; for each drafter β, γ and η. Answers have no EOS: all are equally long."""
    engines = {name: DecodingEngine(target, drafter) for name, drafter in drafters.items()}
    spent: dict[str, list[int]] = {}
    arms = {name: decoding(name, engine, texts, new_tokens, spent) for name, engine in engines.items()}
    arms |= {f"hf_{kind}": generating(target, kind, texts, new_tokens) for kind in baselines}
    taken = in_turn(arms, repeats, target.device)
    result: dict[str, Any] = {
        "vanilla_over_hf_" + ("generate" if kind == "eager" else kind): ratio(taken[f"hf_{kind}"], taken["vanilla"])
        for kind in baselines
    }
    return result | {name: speed(taken, name, spent) for name in engines if name != "vanilla"}


def decoding(
    name: str, engine: DecodingEngine, texts: list[list[int]], new_tokens: int, spent: dict[str, list[int]]
) -> Callable[[], None]:
    """A run of one engine over all texts; adds its tokens and target steps to `spent[name]`."""

    def run() -> None:
        counts = spent.setdefault(name, [0, 0])
        for text in texts:
            answer = engine.generate(text, GenerationSettings(max_new_tokens=new_tokens))
            counts[0] += len(answer.tokens)
            counts[1] += answer.target_steps

    return run


def generating(target: Target, kind: str, texts: list[list[int]], new_tokens: int) -> Callable[[], None]:
    """A run of transformers' own greedy loop: as it is, with its static cache, or compiled over that."""
    options: dict[str, Any] = {} if kind == "eager" else {"cache_implementation": "static"}
    model = copy.copy(target.model)
    if kind == "compiled":
        model.forward = torch.compile(target.model.forward)

    def run() -> None:
        for text in texts:
            ids = torch.tensor([text], device=target.device)
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
                eos_token_id=None, pad_token_id=0, **options,
            )  # fmt: skip

    return run


def speed(taken: dict[str, list[float]], name: str, spent: dict[str, list[int]]) -> dict[str, Any]:
    """β, γ with its quartiles, and η of a drafter."""
    gamma = ratio(taken["vanilla"], taken[name])
    beta = spent[name][0] / spent[name][1]
    return {"beta": round(beta, 3), "gamma": gamma, "eta": round(gamma["median"] / beta, 3)}


def scripted_engines(
    target: Target, kinds: Sequence[str], lengths: Sequence[float], max_nodes: int
) -> dict[str, ScriptedEngine]:
    """An engine for every untrained head and accepted length; ValueError for a length no step can have."""
    engines = {}
    for kind in kinds if lengths else ():
        head_type, config = head_classes(kind)
        head = head_type(config(**target_sizes(target.config))).to(target.device, target.dtype)
        drafter = drafter_for(head, target, max_nodes)
        engines |= {f"scripted {kind} {length:g}": ScriptedEngine(target, drafter, length) for length in lengths}
    return engines


def bench_scripted(
    target: Target, engines: dict[str, ScriptedEngine], texts: list[list[int]], new_tokens: int, repeats: int
) -> dict[str, Any]:
    """γ and η of untrained heads at scripted accepted lengths; beside η the bound that reading the head's weights sets.

    The bound is 1 / (1 + weights a draft reads / weights of a target step): what a step costs at least, were verifying
    as cheap as a single row.
    """
    spent: dict[str, list[int]] = {}
    vanilla = DecodingEngine(target, VanillaDrafter(target.device))
    arms = {name: decoding(name, engine, texts, new_tokens, spent) for name, engine in engines.items()}
    taken = in_turn({"vanilla": decoding("vanilla", vanilla, texts, new_tokens, spent), **arms}, repeats, target.device)
    found = {}
    for name, engine in engines.items():
        drafted: Any = engine.drafter
        bound = 1 / (1 + drafted.head.weights_read() / read_in_a_step(target))
        found[name] = speed(taken, name, spent) | {"eta_bound": round(bound, 3)}
    return found


def read_in_a_step(target: Target) -> int:
    """Weights that a forward over one row reads: all but the embedding's other rows."""
    return target.parameters - (
        0 if target.lm_head.weight is target.embedding.weight else target.embedding.weight.numel()
    )


@torch.inference_mode()
def bench_bandwidth(target: Target, text: list[int], repeats: int) -> dict[str, Any]:
    """The read bandwidth that a vanilla step reaches, over that of summing one large tensor."""
    engine = DecodingEngine(target, VanillaDrafter(target.device))
    new_tokens = 64
    large = torch.ones(2**28 if target.device.type == "cuda" else 2**25, device=target.device)
    arms = {
        "long": lambda: engine.generate(text, GenerationSettings(2 * new_tokens)),
        "short": lambda: engine.generate(text, GenerationSettings(new_tokens)),
        "sum": lambda: large.sum(),
    }
    taken = in_turn(arms, repeats, target.device)
    size = target.lm_head.weight.element_size()
    layers, heads = target.config.num_hidden_layers, target.config.num_key_value_heads
    cached = 2 * layers * heads * target.config.hidden_size // target.config.num_attention_heads * len(text)
    read = size * (read_in_a_step(target) + cached)
    steps = [(long - short) / new_tokens for long, short in zip(taken["long"], taken["short"])]
    return {
        "vanilla_share_of_bandwidth": ratio([read / step for step in steps], [4 * len(large) / s for s in taken["sum"]])
    }


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
    """Seconds of a step's forward and acceptance, by node count, over those of one row's; and of bare products."""

    def step(nodes: int) -> Callable[[], Any]:
        engine = DecodingEngine(target, FullTrees(nodes, target.device))
        cache = target.new_cache(len(text) + 2 * max(NODES))
        engine._end.fill_(len(text) + max(NODES))
        target.prefill(torch.tensor(text, device=target.device), cache)
        tree, base = engine.drafter.propose(), torch.zeros((), dtype=torch.long, device=target.device)
        cache.set_visible_length(1 + nodes)

        def run() -> None:
            cache.lengths.fill_(len(text))
            engine._verify(base, tree, cache, engine._end, None, None)

        return run

    forwards = in_turn({str(nodes): step(nodes) for nodes in (0, *NODES)}, repeats, target.device)
    products = {str(nodes): matrix_products(target, nodes + 1) for nodes in (0, *NODES)}
    floors = in_turn(products, repeats, target.device)
    return {
        "verify_over_step": {str(nodes): ratio(forwards[str(nodes)], forwards["0"]) for nodes in NODES},
        "floor_over_step": {str(nodes): ratio(floors[str(nodes)], forwards["0"]) for nodes in (0, *NODES)},
    }


class FullTrees(VanillaDrafter):
    """The same binary tree of so many nodes at every step."""

    def __init__(self, nodes: int, device: torch.device) -> None:
        super().__init__(device)
        parents = torch.tensor([max(-1, i // 2 - 1) for i in range(nodes)], dtype=torch.long, device=device)
        self._tree = DraftTree.build(torch.arange(nodes, device=device), parents)
        self.max_nodes, self.max_depth = nodes, 8 if nodes else 0


def matrix_products(target: Target, rows: int) -> Callable[[], Any]:
    """The products of one forward over this many rows and nothing else, in the layout the forward uses."""
    products: list[Any] = [module for module in target.model.modules() if isinstance(module, torch.nn.Linear)]
    sizes = [module.in_features for module in products]
    if target.fused is not None:
        products = [product for layer in target.fused.layers for product in layer.linears] + [target.fused.logits]
        sizes = [product.inputs for product in products]
    inputs = [torch.ones(rows, size, dtype=target.dtype, device=target.device) for size in sizes]
    return lambda: [product(x) for product, x in zip(products, inputs)]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = target_parser(__doc__)
    add = made.add_argument
    add("--drafters", nargs="*", default=[], metavar="NAME[=[KIND:]PATH[,key=value…]]")
    add("--max_nodes", type=int, default=32, help="most nodes of a draft tree (default 32)")
    add("--questions", type=int, default=4, help="prompts of a run (default 4)")
    add("--prompt_tokens", type=int, default=256, help="text behind which trees are verified (default 256)")
    add("--new_tokens", type=int, default=128, help="tokens of an answer (default 128)")
    add("--baselines", nargs="*", choices=BASELINES, default=["eager"], help="transformers' generate (default eager)")
    add("--shape", choices=list(SHAPES), help="a random-weight Llama of this shape instead of --target")
    add("--scripted", type=float, nargs="*", default=[], metavar="β", help="accepted lengths of untrained heads")
    add("--heads", nargs="+", choices=list(HEAD_DRAFTERS), default=list(HEAD_DRAFTERS), help="heads for --scripted")
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
        options = parse_with_config(parser(), None, ())
        if (options.target is None) == (options.shape is None):
            raise ValueError(f"give either --target or --shape; got {options.target} and {options.shape}")
        for name in ("max_nodes", "questions", "prompt_tokens", "new_tokens", "repeats"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
        target = load_target(options) if options.target else random_target(options)
        specs = drafter_specs(options.drafters)
        drafters = load_drafters(specs, target, options.max_nodes)
        scripted = scripted_engines(target, options.heads, options.scripted, options.max_nodes)
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
    result = bench_decoding(target, drafters, texts, options.new_tokens, options.repeats, options.baselines)
    result |= bench_bandwidth(target, filler, options.repeats)
    if scripted:
        result |= bench_scripted(target, scripted, texts, options.new_tokens, options.repeats)
    result |= bench_verification(target, filler, 10 * options.repeats)
    if options.batches:
        many = prompts(target, max(options.batches), options.prompt_tokens)
        batched = bench_batches(target, specs, options, many)
        result |= {f"batch_over_one_by_one {name}": ratios for name, ratios in batched.items()}
    Console().print(table(result))
    settings = {"threads": torch.get_num_threads(), "compile": options.compile, "device": str(target.device)}
    medians = {
        **{name: value["median"] for name, value in result.items() if name.startswith("vanilla_")},
        "verify_over_step": {nodes: value["median"] for nodes, value in result["verify_over_step"].items()},
    }
    print(json.dumps({**result, **medians, "settings": settings}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
