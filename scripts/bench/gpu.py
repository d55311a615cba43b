"""What only a GPU can tell, with random weights and without a network: correctness first, then speeds in one process.

    scripts/bench/gpu.sh [OUTPUT.json]

- every drafter on small random targets in float32, some in bfloat16, graphs on and off, against transformers'
  `generate`; where drafting is the device's, every tensor of a step must lie there;
- for each of `--shapes`, in bfloat16 after `--prompt_tokens` of text: the plain step against the time its weights take
  to read at the measured bandwidth; trees of 8 … 64 nodes, each head's step, n-grams and a hybrid over the plain step;
  what drafting alone takes; captured against eager steps, both tree attentions, transformers' `generate`; γ and η of
  scripted accepted lengths; the memory of cache and graphs;
- the training step of a CTC head: tokens per second, share of the GPU's peak (MFU), peak memory.

A step's time is that of an answer's later steps, after its prefill and its first step. Every run has a run of the plain
loop beside it; figures are medians of the ratios of such pairs, with their quartiles. What fails is named in the file
and does not stop the rest; what `--seconds` leave no time for is named too. Exit status 0 only when everything ran and
no answer differed.
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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status

import torch
from transformers.generation.streamers import BaseStreamer

from draft_heads.configs.options import add_threads
from draft_heads.configs.recipes import SHAPES, load_recipe
from draft_heads.data.common.console import plain_console
from draft_heads.inference.drafters.base import Drafter, VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.report import environment
from draft_heads.inference.generation import Generation, GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.bench.answers_on_gpu import (
    HEAD_WORDS,
    build,
    check_fused,
    correctness,
    draft_worse,
    recipe_head,
)
from draft_heads.scripts.bench.decode import (
    FullTrees,
    ScriptedAcceptance,
    generating,
    in_turn,
    one_device,
    prompts,
    random_target,
    ratio,
    table,
)
from draft_heads.scripts.checks.lossless_matrix import RANDOM_TARGETS
from draft_heads.scripts.decoding_options import script_parser
from draft_heads.train.options import peak_flops

NODES = (32, 64, 8, 16)  # trees of one node are padded to 8
ACCEPTED = 3.6  # tokens per step of a CTC head in its paper
TIMED = (*HEAD_WORDS, "ngram", "lookahead,n=4,w=4", "medusa:head+ngram", "ctc:head+ngram")


class Clock(BaseStreamer):
    """When `generate` handed over its prompt and each of its tokens, in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a large sum reads."""
    words = torch.ones(2**30 if device.type == "cuda" else 2**24, dtype=torch.bfloat16, device=device)
    taken = in_turn({"read": lambda: words.sum(dtype=torch.float32)}, 9, device)["read"]
    return 2 * words.numel() / statistics.median(taken)


class StepTimer:
    """Times steps of engines over one text, each beside the plain loop's."""

    def __init__(self, target: Target, args: argparse.Namespace) -> None:
        self.target, self.args, self.device = target, args, target.device
        self.text = prompts(target, 1, args.prompt_tokens)[0]
        self.settings = GenerationSettings(args.new_tokens, eos_token_ids=())
        self.plain = self.engine(VanillaDrafter(self.device))
        self.synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None

    def engine(self, drafter: Drafter, graphs: bool = True, **options: Any) -> DecodingEngine:
        """One that captures no longer texts than this bench decodes."""
        engine = DecodingEngine(self.target, drafter, captured=None if graphs else False, **options)
        engine.steps.reserved = self.args.prompt_tokens + self.args.new_tokens + 256
        return engine

    def memory(self) -> int:
        """Bytes that the process holds on the device and could not give back; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def run(self, engine: DecodingEngine) -> tuple[float, float]:
        """Seconds per step and tokens per step, over the steps after the prefill's and the first."""
        result = Generation()
        pieces = engine.stream(self.text, self.settings, result)
        next(pieces), next(pieces)
        self.synchronize()
        steps, tokens, start = result.target_steps, len(result.tokens), time.perf_counter()
        for _ in pieces:
            pass
        self.synchronize()
        steps, tokens = result.target_steps - steps, len(result.tokens) - tokens
        return (time.perf_counter() - start) / steps, tokens / steps

    def beside_plain(self, engine: DecodingEngine) -> dict[str, Any]:
        """Its step over the plain one, tokens per step, β, γ and η, the number of graphs and their memory."""
        before = self.memory()
        self.run(engine)  # captures, warms up
        used = self.memory() - before
        pairs = [(self.run(self.plain)[0], *self.run(engine)) for _ in range(self.args.repeats)]
        plain, own, tokens = map(list, zip(*pairs))
        over = ratio(own, plain)
        return {
            "over_plain_step": over,
            "step_ms": round(1e3 * statistics.median(own), 3),
            "beta": round(statistics.median(tokens), 3),
            "gamma": round(statistics.median(tokens) / over["median"], 3),
            "eta": round(1 / over["median"], 3),
            "graphs": len(engine.steps.captured or ()),
            "memory_mib": round(used / 2**20),
        }

    def plain_step(self) -> dict[str, Any]:
        """Milliseconds of a plain step, and the time its weights take to read over that."""
        target = self.target
        self.run(self.plain)
        seconds = statistics.median(self.run(self.plain)[0] for _ in range(2 * self.args.repeats))
        read = sum(p.numel() * p.element_size() for p in target.decoder.parameters())
        read += target.lm_head.weight.numel() * target.lm_head.weight.element_size()
        read -= target.embedding.weight.numel() * target.embedding.weight.element_size()
        per_second = bandwidth(self.device)
        return {
            "bandwidth_gb_s": round(per_second / 1e9),
            "plain_step_ms": round(1e3 * seconds, 3),
            "plain_step_over_bandwidth": round(read / per_second / seconds, 3),
        }

    def scripted(self) -> dict[str, Any]:
        """Steps of a CTC head that accept `ACCEPTED` tokens, by script."""
        ctc = build(self.target, "ctc:head", 32)
        return self.beside_plain(self.engine(ctc, accept=ScriptedAcceptance(ctc, ACCEPTED, self.device)))

    def drafting(self, words: str) -> dict[str, float]:
        """Drafting alone over the plain step: `observe` and `propose` after the text, captured where steps are."""
        steps = self.engine(build(self.target, words, 32), graphs=False).steps
        state = steps.begin(len(self.text) + self.args.new_tokens, self.settings)
        step, _ = steps.run(steps.prefill(self.text, state)[0], state)
        work = partial(steps.draft, step, state)
        if self.device.type == "cuda" and steps.drafter.on_device:
            with torch.inference_mode():
                work()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    work()
            work = graph.replay
        taken = []
        for _ in range(self.args.repeats):
            steps.drafter.begin(0, torch.tensor(self.text, device=self.device), state.reserved)
            plain = self.run(self.plain)[0]
            with torch.inference_mode():
                self.synchronize()
                start = time.perf_counter()
                for _ in range(8):
                    work()
                self.synchronize()
            taken.append(((time.perf_counter() - start) / 8, plain))
        return ratio(*map(list, zip(*taken)))

    def hf_generate(self) -> dict[str, float]:
        """A token of transformers' own loop over the plain step, timed from its first token to its last."""
        taken = []
        for _ in range(self.args.repeats):
            clock = Clock()
            generating(self.target, "eager", [self.text], self.args.new_tokens, streamer=clock)()
            _, first, *later = clock.times  # the prompt is handed over first
            taken.append(((later[-1] - first) / len(later), self.run(self.plain)[0]))
        return ratio(*map(list, zip(*taken)))

    def masked(self, nodes: int) -> dict[str, float]:
        """A step of so many nodes with torch's attention over one with attention as products."""
        steps, ways = {}, ("masked", "products")
        try:
            for attention in ways:  # a graph keeps the attention it was captured with
                self.target.attend(attention)
                steps[attention] = self.engine(FullTrees(nodes, self.device))
                self.run(steps[attention])
            pairs = [[self.run(steps[attention])[0] for attention in ways] for _ in range(self.args.repeats)]
        finally:
            self.target.attend("auto")
        return ratio(*map(list, zip(*pairs)))

    def kernels(self, nodes: int) -> dict[str, list[int]]:
        """The operations that take most of an answer's time: how often each ran, its own microseconds."""
        engine = self.engine(FullTrees(nodes, self.device))
        self.run(engine)
        with torch.profiler.profile() as profile:
            self.run(engine)
        own = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        ranked = sorted(profile.key_averages(), key=lambda event: -getattr(event, own))
        return {event.key: [event.count, round(getattr(event, own))] for event in ranked[:15]}

    def parts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Name and work of everything that is measured, the most important first."""
        yield "plain step", self.plain_step
        for nodes in NODES:
            yield f"{nodes} nodes", lambda nodes=nodes: self.beside_plain(self.engine(FullTrees(nodes, self.device)))
        yield "ctc scripted", self.scripted
        for words in TIMED:
            name = words.replace(":head", "")
            yield name, lambda words=words: self.beside_plain(self.engine(build(self.target, words, 32)))
        yield "training", partial(training, self.target, self.args)
        for words in HEAD_WORDS:
            yield f"drafting {words.replace(':head', '')}", partial(self.drafting, words)
        for name, nodes in (("plain eager", 0), ("32 nodes eager", 32)):
            trees = FullTrees(nodes, self.device)
            yield name, lambda trees=trees: self.beside_plain(self.engine(trees, graphs=False))
        yield "kernels of plain steps", partial(self.kernels, 0)
        yield "kernels of 32 nodes", partial(self.kernels, 32)
        yield "hf generate", self.hf_generate
        for nodes in (0, 32):
            yield f"{nodes} nodes: masked over products", partial(self.masked, nodes)


def training(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second, MFU and peak memory of a CTC head's training step over one row of `--train_tokens`."""
    device, on_gpu = target.device, target.device.type == "cuda"
    recipe = load_recipe("ctc", "8b")
    head: Any = recipe_head(target, "ctc").float().train()
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
    multiplied = sum(p.numel() for p in target.decoder.parameters()) - target.embedding.weight.numel()
    per_token = 2 * multiplied + 2 * layers * args.train_tokens * width
    flops = per_token * ids.numel() + rows * (
        6 * sum(p.numel() for p in head.blocks.parameters()) + 4 * head.config.classes * width
    )
    peak = peak_flops(device)
    return {
        "tokens_per_second": round(ids.numel() / seconds),
        "mfu": None if peak is None else round(flops / seconds / peak, 3),
        "memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if on_gpu else None,
    }


class Parts:
    """The result file: one entry per part, what failed and what there was no time for."""

    def __init__(self, output: Path, device: torch.device, seconds: float) -> None:
        self.output, self.device, self.end = output, device, time.monotonic() + seconds
        self.result: dict[str, Any] = {"benchmark": "gpu", "environment": environment(str(device))}
        self.result |= {"failed": {}, "no_time": []}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """What the work returns, None where it failed or there was no time; memory it used is free afterwards."""
        start = time.monotonic()
        found = None
        if start > self.end:
            self.result["no_time"].append(name)
        else:
            try:
                self.result[name] = found = work()
            except Exception:  # told at once and in the result; the parts after it are still measured
                self.result["failed"][name] = traceback.format_exc()
                print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr)
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        self.output.write_text(json.dumps(self.result, indent=1) + "\n")
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # of a device that has failed
                torch.cuda.empty_cache()
        return found


def run() -> bool:
    parser = script_parser(__doc__, config=False)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="the JSON file to write")
    add("--shapes", nargs="*", choices=list(SHAPES), default=["8b", "7b"], help="of random targets (default 8b 7b)")
    add("--targets", nargs="*", choices=list(RANDOM_TARGETS), default=list(RANDOM_TARGETS), help="for correctness")
    add(
        "--parts",
        nargs="+",
        default=[""],
        help="of a shape, those with one of these texts in their names (default: all)",
    )
    add("--device", help="default: cuda if present")
    add("--dtype", help="default: bfloat16 on a GPU")
    add("--layers", type=int, help="of the shapes, for a rehearsal (default: all)")
    add("--seconds", type=float, default=520.0, help="no part begins after so many seconds (default 520)")
    sizes = {"prompt_tokens": 1024, "new_tokens": 64, "repeats": 5, "train_rows": 2, "train_tokens": 2048}
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default, help=f"default {default}")
    add_threads(parser)
    args = parser.parse_args()
    args.attention = "auto"
    device = one_device(args.device)
    parts = Parts(args.output, device, args.seconds)
    wrong = check_answers(parts, args, device)
    for shape in args.shapes:
        measure_shape(parts, args, shape)
    result = parts.result
    print(f"written: {args.output}; failed: {', '.join(result['failed']) or 'nothing'}")
    if result["no_time"]:
        print(f"no time for: {', '.join(result['no_time'])}")
    return not (wrong or result["failed"] or result["no_time"])


def check_answers(parts: Parts, args: argparse.Namespace, device: torch.device) -> list[str]:
    """The engines on small random targets whose answers differ or that leave the device."""
    wrong = []
    checks = {name: partial(correctness, device, name) for name in args.targets}
    if args.targets:
        name, half = args.targets[0], ("ctc:head", "eagle3:head", "ngram")
        checks[f"{name} bfloat16"] = partial(correctness, device, name, half, torch.bfloat16)
    for name, check in checks.items():
        answers = parts.run(f"correctness {name}", check) or {}
        bad = [words for words, counts in answers.items() if counts["unexplained"] or counts["elsewhere"]]
        bad += draft_worse(answers)
        print(
            f"{name}: answers of {len(answers)} engines; {', '.join(bad) or 'none'} differ, leave the device or draft "
            "worse with graphs"
        )
        wrong += bad
    return wrong


def measure_shape(parts: Parts, args: argparse.Namespace, shape: str) -> None:
    """Steps and training on a random target of a shape, whose memory is free afterwards."""
    args.shape = shape
    made: list[Target] = []  # `Parts` keeps no target alive

    def make() -> None:
        target = random_target(args)
        check_fused(target)
        made.append(target)

    parts.run(f"{shape}: target", make)
    if not made:
        return
    timer = StepTimer(made[0], args)
    every = dict(timer.parts())
    if unknown := [words for words in args.parts if not any(words in name for name in every)]:
        raise ValueError(f"--parts takes texts of the names {', '.join(every)}; got {unknown[0]!r}; leave it out")
    asked = {name: work for name, work in every.items() if any(words in name for words in args.parts)}
    found = {name: parts.run(f"{shape}: {name}", work) or {} for name, work in asked.items()}
    others = ("plain step", "kernels", "training")
    listed = {name: value for name, value in found.items() if not name.startswith(others)}
    rows = {name: value.get("over_plain_step", value) for name, value in listed.items()}
    timed = {name: row for name, row in rows.items() if row}
    plain_console().print(table({f"{shape}, over the plain step:": timed}))
    print(*(found[name] for name in ("plain step", "ctc scripted", "training") if name in found))


if __name__ == "__main__":
    sys.exit(exit_status(run))
