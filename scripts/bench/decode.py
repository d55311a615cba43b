"""Decoding benchmarks. The last line of output is one JSON object.

    python scripts/bench/decode.py --target TARGET [--compile] [--drafters ctc=RUN/head …] [--threads 2]

- the speed of vanilla over transformers' own `generate` (`--baselines eager static compiled`), on the same prompts;
- the time to verify a tree of 8, 16, 32, 64 nodes over that of a single row, after `--prompt_tokens` of text;
- for every drafter, on the same prompts: β, γ over vanilla, and η = γ / β;
- with `--shape 7b`, a random-weight Llama of that shape replaces the target, and `--scripted 2.3 3.3 4.3` gives γ and η
  of untrained heads on it with real computation but scripted accepted lengths.

Arms take turns; figures are medians of the ratios of neighbouring runs, with their quartiles.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from draft_heads.data.config_file import exit_status, parse_with_config
from draft_heads.data.rendering import render_prompt
from draft_heads.data.synthetic.corpus import questions
from draft_heads.heads.checkpoint import head_classes
from draft_heads.heads.config import target_sizes
from draft_heads.inference.drafters.registry import HEAD_DRAFTERS, drafter_for
from draft_heads.inference.drafters.vanilla import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from draft_heads.scripts.bench.scripted import ScriptedEngine
from draft_heads.scripts.bench.timing import interleaved_seconds, ratio
from draft_heads.scripts.decoding_options import (
    configure_target,
    drafter_specs,
    load_drafters,
    load_target,
    target_parser,
)
from draft_heads.train.options import SHAPES

NODES = (8, 16, 32, 64)
BASELINES = ("eager", "static", "compiled")


def random_target(options: argparse.Namespace) -> Target:
    """A random-weight Llama of a published shape, for measuring speed only."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = (
        getattr(torch, options.dtype) if options.dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    config = LlamaConfig(**SHAPES[options.shape], max_position_embeddings=4096, dtype=dtype)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    return configure_target(Target(model, name=f"random {options.shape}"), options)


def prompts(target: Target, count: int, tokens: int) -> list[list[int]]:
    """Rendered synthetic questions, or random tokens for a target without a tokenizer."""
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
    """Vanilla over transformers' generate; for each drafter β, γ and η. No EOS: all answers have the same length."""
    engines = {name: DecodingEngine(target, drafter) for name, drafter in drafters.items()}
    counts: dict[str, list[int]] = {}
    arms = {name: decoding(name, engine, texts, new_tokens, counts) for name, engine in engines.items()}
    arms |= {f"hf_{kind}": hf_decoding(target, kind, texts, new_tokens) for kind in baselines}
    seconds = interleaved_seconds(arms, repeats, target.device)
    result: dict[str, Any] = {
        "vanilla_over_hf_" + ("generate" if kind == "eager" else kind): ratio(seconds[f"hf_{kind}"], seconds["vanilla"])
        for kind in baselines
    }
    return result | {name: speed(seconds, name, counts) for name in engines if name != "vanilla"}


def decoding(
    name: str, engine: DecodingEngine, texts: list[list[int]], new_tokens: int, counts: dict[str, list[int]]
) -> Callable[[], None]:
    """A run of one engine over all texts; adds its tokens and target steps to `counts[name]`."""

    def run() -> None:
        total = counts.setdefault(name, [0, 0])
        for text in texts:
            answer = engine.generate(text, GenerationSettings(max_new_tokens=new_tokens))
            total[0] += len(answer.tokens)
            total[1] += answer.target_steps

    return run


def hf_decoding(target: Target, kind: str, texts: list[list[int]], new_tokens: int) -> Callable[[], None]:
    """A run of transformers' own greedy loop: eager, with a static cache, or compiled with a static cache."""
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


def speed(seconds: dict[str, list[float]], name: str, counts: dict[str, list[int]]) -> dict[str, Any]:
    """β, γ with its quartiles, and η of a drafter."""
    gamma = ratio(seconds["vanilla"], seconds[name])
    beta = counts[name][0] / counts[name][1]
    return {"beta": round(beta, 3), "gamma": gamma, "eta": round(gamma["median"] / beta, 3)}


def scripted_engines(
    target: Target, kinds: Sequence[str], lengths: Sequence[float], max_nodes: int
) -> dict[str, ScriptedEngine]:
    """An engine for every untrained head and accepted length; ValueError for an impossible length."""
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
    """γ and η of untrained heads at scripted accepted lengths, and the bound on η from reading the head's weights.

    The bound is 1 / (1 + weights a draft reads / weights a target step reads): η if verifying a tree took as long as a
    single row.
    """
    counts: dict[str, list[int]] = {}
    vanilla = DecodingEngine(target, VanillaDrafter(target.device))
    arms = {name: decoding(name, engine, texts, new_tokens, counts) for name, engine in engines.items()}
    seconds = interleaved_seconds(
        {"vanilla": decoding("vanilla", vanilla, texts, new_tokens, counts), **arms}, repeats, target.device
    )
    found = {}
    for name, engine in engines.items():
        drafted: Any = engine.drafter
        bound = 1 / (1 + drafted.head.weights_read() / read_in_a_step(target))
        found[name] = speed(seconds, name, counts) | {"eta_bound": round(bound, 3)}
    return found


def read_in_a_step(target: Target) -> int:
    """Weights that a forward over one row reads: all except the embedding, unless the LM head shares it."""
    return target.parameters - (
        0 if target.lm_head.weight is target.embedding.weight else target.embedding.weight.numel()
    )


@torch.inference_mode()
def bench_verification(target: Target, text: list[int], repeats: int) -> dict[str, Any]:
    """Seconds of a step by node count over those of a single row."""

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

    forwards = interleaved_seconds({str(nodes): step(nodes) for nodes in (0, *NODES)}, repeats, target.device)
    return {
        "verify_over_step": {str(nodes): ratio(forwards[str(nodes)], forwards["0"]) for nodes in NODES},
    }


class FullTrees(VanillaDrafter):
    """Proposes the same binary tree at every step."""

    def __init__(self, nodes: int, device: torch.device) -> None:
        super().__init__(device)
        parents = torch.tensor([max(-1, i // 2 - 1) for i in range(nodes)], dtype=torch.long, device=device)
        self._tree = DraftTree.build(torch.arange(nodes, device=device), parents)
        self.max_nodes, self.max_depth = nodes, 8 if nodes else 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = target_parser(__doc__)
    add = made.add_argument
    add("--drafters", nargs="*", default=[], metavar="NAME[=[KIND:]PATH[,key=value…]]")
    add("--max_nodes", type=int, default=32, help="most nodes of a draft tree (default 32)")
    add("--questions", type=int, default=4, help="prompts of a run (default 4)")
    add("--prompt_tokens", type=int, default=256, help="tokens before the verified trees (default 256)")
    add("--new_tokens", type=int, default=128, help="tokens of an answer (default 128)")
    add("--baselines", nargs="*", choices=BASELINES, default=["eager"], help="transformers' generate (default eager)")
    add("--shape", choices=list(SHAPES), help="a random-weight Llama of this shape instead of --target")
    add("--scripted", type=float, nargs="*", default=[], metavar="β", help="accepted lengths of untrained heads")
    add("--heads", nargs="+", choices=list(HEAD_DRAFTERS), default=list(HEAD_DRAFTERS), help="heads for --scripted")
    add("--repeats", type=int, default=9, help="runs of every arm (default 9)")
    return made


def table(result: dict[str, Any]) -> Table:
    """One line for each figure."""
    made = Table("ratio", "median", "quartiles")
    for name, value in result.items():
        pairs = value.items() if "median" not in value else [("", value)]
        for key, cell in pairs:
            if isinstance(cell, dict):
                made.add_row(f"{name} {key}", f"{cell['median']:.2f}", f"{cell['low']:.2f}–{cell['high']:.2f}")
            else:
                made.add_row(f"{name} {key}", f"{cell:.2f}", "")
    return made


def run(options: argparse.Namespace) -> None:
    if (options.target is None) == (options.shape is None):
        raise ValueError(f"give either --target or --shape; got {options.target} and {options.shape}")
    for name in ("max_nodes", "questions", "prompt_tokens", "new_tokens", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    target = load_target(options) if options.target else random_target(options)
    drafters = load_drafters(drafter_specs(options.drafters), target, options.max_nodes)
    scripted = scripted_engines(target, options.heads, options.scripted, options.max_nodes)
    if target.max_positions - options.prompt_tokens < max(NODES) + 1:
        raise ValueError(
            f"--prompt_tokens must leave {max(NODES) + 1} of the target's {target.max_positions} positions; got "
            f"{options.prompt_tokens}"
        )
    texts = prompts(target, options.questions, options.prompt_tokens)
    filler = (texts[0] * options.prompt_tokens)[: options.prompt_tokens]
    result = bench_decoding(target, drafters, texts, options.new_tokens, options.repeats, options.baselines)
    if scripted:
        result |= bench_scripted(target, scripted, texts, options.new_tokens, options.repeats)
    result |= bench_verification(target, filler, 10 * options.repeats)
    Console().print(table(result))
    settings = {"threads": torch.get_num_threads(), "compile": options.compile, "device": str(target.device)}
    medians = {
        **{name: value["median"] for name, value in result.items() if name.startswith("vanilla_")},
        "verify_over_step": {nodes: value["median"] for nodes, value in result["verify_over_step"].items()},
    }
    print(json.dumps({**result, **medians, "settings": settings}))


def main() -> int:
    return exit_status(lambda: run(parse_with_config(parser(), None, ())))


if __name__ == "__main__":
    sys.exit(main())
