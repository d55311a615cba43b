"""What only a GPU can tell, with random weights and without a network: correctness first, then speeds in one process.

    scripts/bench/gpu.sh [OUTPUT.json]

- every drafter on small random targets in float32, graphs on and off, against transformers' `generate`;
- for each of `--shapes`, in bfloat16 behind `--prompt_tokens` of text: the plain step against the time its weights take
  to read at the measured bandwidth; trees of 8 … 64 nodes, each head's step, n-grams and a hybrid over the plain step;
  captured against eager steps, both tree attentions, transformers' `generate`; η of scripted accepted lengths;
- the training step of a CTC head: tokens a second, share of the GPU's peak (MFU), peak memory.

Arms take turns; figures are medians of the ratios of neighbouring runs, with their quartiles. Whatever fails is named
in the file and does not stop the rest. Exit status 0 only when everything ran and no answer differed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from draft_heads.data.config_file import exit_status

import torch
import yaml
from rich.console import Console

from draft_heads.data.options import add_threads, option_names
from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.heads.config import target_sizes
from draft_heads.inference.drafters.base import Drafter, VanillaDrafter
from draft_heads.inference.drafters.registry import DrafterBuilder, DrafterSpec
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle, judge_all
from draft_heads.inference.evaluation.report import environment
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.bench.decode import FullTrees, generating, in_turn, prompts, random_target, ratio, table
from draft_heads.scripts.bench.scripted import ScriptedEngine
from draft_heads.scripts.checks.lossless_matrix import RANDOM_TARGETS, make_prompts, untrained_head
from draft_heads.scripts.decoding_options import script_parser
from draft_heads.train.options import PEAK_FLOPS, RECIPES, SHAPES

NODES = (8, 16, 32, 64)
ACCEPTED = 3.6  # tokens a step of a CTC head in its paper
FREE = ("ngram", "lookahead,n=4,w=4", "medusa:head+ngram", "ctc:head+ngram")


def builder(target: Target, nodes: int) -> DrafterBuilder:
    """Builds drafters with untrained heads of the 8B recipes' settings, scaled to the target."""
    made = DrafterBuilder(target, nodes)

    def head(kind: str, path: str = "") -> DraftHead:
        if target.vocab_size < 1000:
            return untrained_head(target, kind).to(target.device).eval()
        head_type, config_type = head_classes(kind)
        recipe = yaml.safe_load((RECIPES / kind / "8b.yaml").read_text())
        settings = {name: recipe[name] for name in option_names(config_type) if name in recipe}
        with torch.device(target.device):
            return head_type(config_type(**target_sizes(target.config), **settings)).to(target.dtype).eval()

    made.head = head  # type: ignore[method-assign]
    return made


def drafters(target: Target, nodes: int) -> Iterator[tuple[str, Callable[[], Drafter]]]:
    """A name and how it is made, for every kind of drafter that needs no other model."""
    for words in (*(f"{kind}:head" for kind in sorted(HEADS)), *FREE):
        spec = DrafterSpec.parse(f"drafter={words}")
        yield words.replace(":head", ""), partial(builder(target, nodes).build, spec)


def correctness(device: torch.device, names: list[str]) -> dict[str, Any]:
    """Counts of answers over small random targets in float32: graphs on and off must both give `generate`'s."""
    found: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        target = Target(RANDOM_TARGETS[name]().to(device), name=name)
        texts, settings = make_prompts(target, 4), GenerationSettings(48, eos_token_ids=())
        oracle = Oracle(target, settings)
        for drafter, make in (("vanilla", partial(VanillaDrafter, device)), *drafters(target, 12)):
            for graphs in (True, False):
                engine = DecodingEngine(target, make())
                if not graphs:
                    engine._captured = None
                turns = [(text, engine.generate(text, settings).tokens) for text in texts]
                counts = judge_all(oracle, turns)
                found[f"{name}, {drafter}{', graphs' if graphs else ''}"] = counts.as_dict()
    return found


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a large sum reads."""
    words = torch.ones(2**30 if device.type == "cuda" else 2**24, dtype=torch.bfloat16, device=device)
    taken = in_turn({"read": lambda: words.sum(dtype=torch.float32)}, 9, device)["read"]
    return 2 * words.numel() / statistics.median(taken)


def decoding(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps of every kind, as ratios; see the module's head."""
    device = target.device
    text = prompts(target, 1, args.prompt_tokens)[0]
    settings = GenerationSettings(args.new_tokens, eos_token_ids=())
    made: dict[str, DecodingEngine] = {"vanilla": DecodingEngine(target, VanillaDrafter(device))}
    made |= {f"{nodes} nodes": DecodingEngine(target, FullTrees(nodes, device)) for nodes in NODES}
    for name, make in drafters(target, 32):
        made[name] = DecodingEngine(target, make())
    made["vanilla eager"], made["32 nodes eager"] = (
        DecodingEngine(target, drafter) for drafter in (VanillaDrafter(device), FullTrees(32, device))
    )
    for name in ("vanilla eager", "32 nodes eager"):
        made[name]._captured = None
    ctc = builder(target, 32).build(DrafterSpec.parse("ctc=ctc:head"))
    made["ctc scripted"] = ScriptedEngine(target, ctc, ACCEPTED)
    steps: dict[str, list[int]] = {name: [] for name in made}

    def run(name: str) -> None:
        answer = made[name].generate(text, settings)
        steps[name].append(answer.target_steps)

    arms: dict[str, Callable[[], Any]] = {name: partial(run, name) for name in made}
    arms["hf generate"] = generating(target, "eager", [text], args.new_tokens)
    taken = in_turn(arms, args.repeats, device)
    graphs = {name: len(engine._captured) for name, engine in made.items() if engine._captured is not None}
    each = {name: [seconds / steps[name][-1] for seconds in taken[name]] for name in made}
    each["hf generate"] = [seconds / args.new_tokens for seconds in taken["hf generate"]]
    read = sum(p.numel() * p.element_size() for p in target.decoder.parameters())
    read += target.lm_head.weight.numel() * target.lm_head.weight.element_size()
    read -= target.embedding.weight.numel() * target.embedding.weight.element_size()
    per_second = bandwidth(device)
    gamma = ratio(taken["vanilla"], taken["ctc scripted"])
    result = {
        "bandwidth_gb_s": round(per_second / 1e9),
        "plain_step_ms": round(1e3 * statistics.median(each["vanilla"]), 3),
        "plain_step_over_bandwidth": round(read / per_second / statistics.median(each["vanilla"]), 3),
        "over_plain_step": {name: ratio(each[name], each["vanilla"]) for name in each if name != "vanilla"},
        "ctc_scripted": {"beta": ACCEPTED, "gamma": gamma, "eta": round(gamma["median"] / ACCEPTED, 3)},
        "graphs": graphs,
    }
    if device.type == "cuda":
        result["memory_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    return result


def flex(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """A step of 32 nodes with FlexAttention over one with a dense mask."""
    text, settings = prompts(target, 1, args.prompt_tokens)[0], GenerationSettings(args.new_tokens, eos_token_ids=())
    arms = {}
    for attention in ("masked", "flex"):
        target.attend(attention)
        engine = DecodingEngine(target, FullTrees(32, target.device))
        engine.generate(text, settings)  # a graph keeps the attention it was captured with
        arms[attention] = partial(engine.generate, text, settings)
    taken = in_turn(arms, args.repeats, target.device)
    target.attend("masked")
    return ratio(taken["flex"], taken["masked"])


def training(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second, MFU and peak memory of a CTC head's training step over one row of `--train_tokens`."""
    device, on_gpu = target.device, target.device.type == "cuda"
    recipe = yaml.safe_load((RECIPES / "ctc" / "8b.yaml").read_text())
    head: Any = builder(target, 32).head("ctc", "").float().train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-5, fused=on_gpu)
    ids = torch.randint(0, target.vocab_size, (args.train_rows, args.train_tokens), device=device)
    ones, view = torch.ones_like(ids), target.view()
    batch = {"input_ids": ids, "greedy_ids": ids, "mask": ones.bool(), "segment_ids": ones}
    batch["position_ids"] = torch.arange(args.train_tokens, device=device).expand_as(ids)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = head(**batch, **target.states_of(batch), target=view)
        (loss.total / loss.windows.clamp(min=1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(in_turn({"step": step}, args.repeats, device)["step"])
    rows = args.train_rows * min(recipe["anchors"], args.train_tokens) * head.config.frames
    width, layers = target.config.hidden_size, target.config.num_hidden_layers
    per_token = 2 * sum(p.numel() for p in target.decoder.parameters()) + 2 * layers * args.train_tokens * width
    flops = per_token * ids.numel() + rows * (
        6 * sum(p.numel() for p in head.blocks.parameters()) + 4 * head.config.classes * width
    )
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    peak = next((value for key, value in PEAK_FLOPS.items() if key in name), None)
    return {
        "tokens_per_second": round(ids.numel() / seconds),
        "mfu": None if peak is None else round(flops / seconds / peak, 3),
        "memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if on_gpu else None,
    }


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = script_parser(__doc__, config=False)
    add = made.add_argument
    add("--output", type=Path, required=True, help="the JSON file to write")
    add("--shapes", nargs="*", choices=list(SHAPES), default=["7b", "8b"], help="of random targets (default 7b 8b)")
    add("--targets", nargs="+", choices=list(RANDOM_TARGETS), default=list(RANDOM_TARGETS), help="for correctness")
    add("--device", help="default: cuda if present")
    add("--dtype", help="default: bfloat16 on a GPU")
    add("--layers", type=int, help="of the shapes, for a rehearsal (default: all)")
    for name, default in {
        "prompt_tokens": 1024,
        "new_tokens": 64,
        "repeats": 5,
        "train_rows": 2,
        "train_tokens": 2048,
    }.items():
        add(f"--{name}", type=int, default=default, help=f"default {default}")
    add_threads(made)
    return made


def run() -> bool:
    args = parser().parse_args()
    args.attention, args.compile = "masked", False
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    result: dict[str, Any] = {"benchmark": "gpu", "environment": environment(str(device)), "failed": {}}

    def part(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            result[name] = found = work()
        except Exception:
            result["failed"][name] = traceback.format_exc()
            print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr)
            found = None
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        return found

    answers = part("correctness", partial(correctness, device, args.targets)) or {}
    wrong = [name for name, counts in answers.items() if counts["unexplained"]]
    print(f"answers of {len(answers)} engines; {', '.join(wrong) or 'none'} with unexplained differences")
    for shape in args.shapes:
        args.shape = shape
        target = random_target(args)
        found = part(f"decoding {shape}", partial(decoding, target, args))
        if found:
            rows = found["over_plain_step"] | {"ctc γ at β 3.6": found["ctc_scripted"]["gamma"]}
            Console().print(table({f"{shape}, over the plain step": rows}))
            print({key: found[key] for key in ("bandwidth_gb_s", "plain_step_ms", "plain_step_over_bandwidth")})
        print(part(f"flex over masked {shape}", partial(flex, target, args)))
        print(part(f"training {shape}", partial(training, target, args)))
        del target
        gc.collect()  # engines hold themselves
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"written: {args.output}")
    return not wrong and not result["failed"]


if __name__ == "__main__":
    sys.exit(exit_status(run))
