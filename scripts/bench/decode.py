"""Decoding benchmarks. The last line of output is one JSON object.

    python scripts/bench/decode.py --target TARGET [--drafters ctc=RUN/head …] [--threads 2]

- vanilla against transformers' own `generate` (`--baselines eager static compiled`), tokens per second, same prompts;
- verifying a tree of 8, 16, 32, 64 nodes against a step of a single row, after `--prompt_tokens` of text;
- for every drafter the same prompts: β, γ against vanilla, and η = γ / β, what of the accepted length becomes speed;
- with `--shape 7b`, a random-weight Llama of that shape instead of a target, and with `--scripted 2.3 3.3 4.3` the γ
  and η of untrained heads on it whose accepted lengths are scripted: real computation, acceptance by script.

Arms take turns; figures are medians of the ratios of neighbouring runs, with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from draft_heads.configs.command_line import exit_status, parse_with_config

import torch
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draft_heads.configs.options import check_read
from draft_heads.configs.recipes import SHAPES
from draft_heads.data.common.console import plain_console
from draft_heads.data.common.processes import own_device
from draft_heads.data.generation_config import generate_config, with_config
from draft_heads.data.synthetic.corpus import questions
from draft_heads.heads.checkpoint import new_head
from draft_heads.inference.drafters.base import Drafter, VanillaDrafter
from draft_heads.inference.drafters.registry import HEAD_DRAFTERS, drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.report import environment
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.steps import StepRunner
from draft_heads.inference.target.sizes import weights_per_token
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from draft_heads.scripts.decoding_options import (
    check_positive,
    configure_target,
    drafter_specs,
    load_engines,
    load_target,
    target_parser,
)

NODES = (8, 16, 32, 64)
BASELINES = ("eager", "static", "compiled")
READ_WITH = (("layers", "shape", True), ("heads", "scripted", True), ("target_adapter chat_template", "shape", False))
"""See `check_read`."""


def in_turn(arms: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every arm, the device's work included, the arms in turn; the first round is a discarded warm-up."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, run in arms.items():
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            if repeat:
                taken[name].append(time.perf_counter() - start)
    return taken


def ratio(over: list[float], under: list[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of runs that were neighbours."""
    ratios = [a / b for a, b in zip(over, under)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def check_forgets(drafters: Mapping[str, Drafter]) -> None:
    """ValueError for a drafter that would know from the first round the texts that every later round decodes."""
    for name, drafter in drafters.items():
        if any(one.carries_over and one.kind != "hybrid" for one in drafter.members()):  # whose counts know no text
            raise ValueError(
                f"a bench decodes the same texts in every round, and {name!r} keeps what it learned of them; "
                "leave that off (keep=0, reuse_history=0, kgram_cache=0), or measure it with scripts/evaluate.py"
            )


def one_device(name: str | None) -> torch.device:
    """That of a bench, by default cuda if present; ValueError for one that torch does not see, and for several."""
    if name == "auto":
        raise ValueError("this bench runs on one device; got --device auto; name one, or leave it out")
    return torch.device(own_device(name) or ("cuda" if torch.cuda.is_available() else "cpu"))


def random_target(options: argparse.Namespace) -> Target:
    """A Llama of a published shape, its weights random: for speeds only."""
    device = one_device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    shape = SHAPES[options.shape] | ({"num_hidden_layers": options.layers} if options.layers else {})
    # weights as small as a wide model's: larger ones make its logits noisier in half precision than a trained one's
    config = AutoConfig.for_model("llama", **shape, max_position_embeddings=4096, initializer_range=0.01)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return configure_target(Target(model, name=f"random {options.shape}"), options)


def prompts(target: Target, count: int, tokens: int) -> list[list[int]]:
    """Rendered questions of the project's own, or random tokens for a target without a tokenizer."""
    if target.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(1, target.config.vocab_size, (count, tokens), generator=generator).tolist()
    asked = questions(count, 1, "heldout")
    return [target.renderer.prompt([{"role": "user", "content": row["turns"][0]}]) for row in asked]


def bench_decoding(
    target: Target,
    engines: dict[str, Any],
    texts: list[list[int]],
    options: argparse.Namespace,
    baselines: Sequence[str] = (),
) -> dict[str, Any]:
    """Vanilla over transformers' generate; for each other engine β, γ with its quartiles, and η.

    Answers have no EOS: all are equally long.
    """
    spent = {name: [0, 0] for name in engines}  # tokens, target steps

    def decode(name: str) -> None:
        for text in texts:
            answer = engines[name].generate(text, GenerationSettings(options.new_tokens, eos_token_ids=()))
            spent[name][0] += len(answer.tokens)
            spent[name][1] += answer.target_steps

    arms: dict[str, Callable[[], None]] = {name: partial(decode, name) for name in engines}
    arms |= {f"hf_{kind}": generating(target, kind, texts, options.new_tokens) for kind in baselines}
    taken = in_turn(arms, options.repeats, target.device)
    result: dict[str, Any] = {
        "vanilla_over_hf_" + ("generate" if kind == "eager" else kind): ratio(taken[f"hf_{kind}"], taken["vanilla"])
        for kind in baselines
    }
    for name, (tokens, steps) in spent.items():
        if name != "vanilla":
            gamma, beta = ratio(taken["vanilla"], taken[name]), tokens / steps
            result[name] = {"beta": round(beta, 3), "gamma": gamma, "eta": round(gamma["median"] / beta, 3)}
    return result


def generating(
    target: Target, kind: str, texts: list[list[int]], new_tokens: int, **options: Any
) -> Callable[[], None]:
    """A run of transformers' own greedy loop: as it is, with its static cache, or compiled over that.

    The checkpoint's own settings are those of an evaluation: none for another cache, beams or stop texts.
    """
    config = generate_config(target.model, new_tokens, ())
    if kind != "eager":
        config.cache_implementation, config.disable_compile = "static", True
    model = with_config(target.model, config)
    if kind == "compiled":
        model.forward = torch.compile(target.model.forward)

    def run() -> None:
        for text in texts:
            ids = torch.tensor([text], device=target.device)
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **options)

    return run


def schedule(mean: float, steps: int = 100) -> list[int]:
    """Tokens of each of `steps` steps, whole numbers next to `mean` and spread evenly: 2.5 → 2, 3, 2, 3, …

    Of 100 steps a mean of two decimals is exact, as those of published heads are.
    """
    return [int((step + 1) * mean + 1e-9) - int(step * mean + 1e-9) for step in range(steps)]


class ScriptedAcceptance:
    """An acceptance rule (`inference.verify.Accept`): the first rows of a step, as many as scheduled.

    A step computes everything as usual (the drafter's and the target's forward, the compaction, the readback); only the
    number of accepted tokens is fixed in advance, so the text is meaningless. It measures η = γ / β of random-weight
    models, for which no trained head exists, at the accepted lengths that published heads reach.
    """

    def __init__(self, drafter: Drafter, tokens_per_step: float, device: torch.device) -> None:
        """ValueError when a step of this drafter cannot give so many tokens."""
        counts = schedule(tokens_per_step)
        limit = 1 + min(drafter.max_depth, drafter.max_nodes)
        if min(counts) < 1 or max(counts) > limit:
            raise ValueError(
                f"--scripted must lie between 1 and the {limit} tokens that a step of this drafter can give; got "
                f"{tokens_per_step:g}; lower it"
            )
        self._counts = torch.tensor(counts, device=device)
        self._turn = torch.zeros(1, dtype=torch.long, device=device)

    def __call__(
        self, tree: DraftTree, choices: Tensor, logits: Tensor, sees: Tensor, depth: Tensor, max_depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first `count` rows, padded with the last of them; `count [1]`; the next base token `[1]`."""
        count = self._counts.index_select(0, self._turn % len(self._counts))
        self._turn += 1
        rows = torch.arange(max_depth + 1, device=choices.device)
        return torch.minimum(rows, count[:, None] - 1), count, choices[:, 0]


def scripted_engines(target: Target, options: argparse.Namespace) -> dict[str, DecodingEngine]:
    """An engine for every untrained head and accepted length; ValueError for a length no step can have."""
    engines = {}
    for kind in (options.heads or HEAD_DRAFTERS) if options.scripted else ():
        head = new_head(kind, target.config).to(target.device, target.dtype)
        drafter = drafter_for(head, target, options.max_nodes)
        for length in options.scripted:
            accept = ScriptedAcceptance(drafter, length, target.device)
            engines[f"scripted {kind} {length:g}"] = DecodingEngine(target, drafter, accept=accept)
    return engines


def eta_bound(target: Target, head: Any) -> float:
    """1 / (1 + weights a draft reads / weights of a target step): η if verifying were as cheap as a single row.

    A forward over one row reads all weights but the embedding's other rows.
    """
    return round(1 / (1 + head.weights_read() / weights_per_token(target)), 3)


@torch.inference_mode()
def bench_verification(target: Target, text: list[int], repeats: int) -> dict[str, Any]:
    """Seconds of a step's forward and acceptance, by node count, over those of one row's."""

    def step(nodes: int) -> Callable[[], Any]:
        steps = StepRunner(target, FullTrees(nodes, target.device), ahead=False, captured=False)
        state = steps.begin(len(text) + max(NODES), GenerationSettings())
        prefilled, _ = steps.prefill(text, state)
        drafted = steps.draft(prefilled, state)

        def run() -> None:
            state.cache.lengths.fill_(len(text))
            steps.verify(drafted, state)

        return run

    forwards = in_turn({str(nodes): step(nodes) for nodes in (0, *NODES)}, repeats, target.device)
    return {"verify_over_step": {str(nodes): ratio(forwards[str(nodes)], forwards["0"]) for nodes in NODES}}


class FullTrees(VanillaDrafter):
    """The same binary tree of so many nodes at every step."""

    def __init__(self, nodes: int, device: torch.device) -> None:
        super().__init__(device)
        parents = torch.tensor([[max(-1, i // 2 - 1) for i in range(nodes)]], dtype=torch.long, device=device)
        self._tree = DraftTree.build(torch.arange(nodes, device=device)[None], parents)
        self.max_nodes, self.max_depth = nodes, 8 if nodes else 0


def table(result: dict[str, Any]) -> Table:
    """Everything measured, a line each."""
    made = Table("ratio", "median", "quartiles")
    for name, value in result.items():
        for key, cell in {"": value}.items() if "median" in value else value.items():
            figures = [cell[part] for part in ("median", "low", "high")] if isinstance(cell, dict) else [cell]
            made.add_row(f"{name} {key}", f"{figures[0]:.2f}", "–".join(f"{figure:.2f}" for figure in figures[1:]))
    return made


def run() -> None:
    parser = target_parser(__doc__)
    add = parser.add_argument
    add("--drafters", nargs="*", default=[], metavar="NAME[=[KIND:]PATH[,key=value…]]")
    add("--max_nodes", type=int, default=32, help="most nodes of a draft tree (default 32)")
    add("--questions", type=int, default=4, help="prompts of a run (default 4)")
    add("--prompt_tokens", type=int, default=256, help="text after which trees are verified (default 256)")
    add("--new_tokens", type=int, default=128, help="tokens of an answer (default 128)")
    add("--baselines", nargs="*", choices=BASELINES, default=["eager"], help="transformers' generate (default eager)")
    add("--shape", choices=list(SHAPES), help="a random-weight Llama of this shape instead of --target")
    add("--layers", type=int, help="of that shape, for a rehearsal (default: all)")
    add("--scripted", type=float, nargs="*", default=[], metavar="β", help="accepted lengths of untrained heads")
    add("--heads", nargs="+", choices=list(HEAD_DRAFTERS), help="heads for --scripted (default: all)")
    add("--repeats", type=int, default=9, help="runs of every arm (default 9)")
    defaults = vars(parser.parse_args([]))
    options = parse_with_config(parser, None, ())
    if (options.target is None) == (options.shape is None):
        raise ValueError(f"give either --target or --shape; got {options.target} and {options.shape}")
    check_read(options, defaults.get, READ_WITH)
    check_positive(options, "max_nodes", "questions", "prompt_tokens", "new_tokens", "repeats")
    target = load_target(options) if options.target else random_target(options)
    engines = load_engines(drafter_specs(options.drafters), target, options.max_nodes, batch_size=1)
    check_forgets({name: engine.drafter for name, engine in engines.items()})
    scripted = scripted_engines(target, options)
    if target.max_positions - options.prompt_tokens < max(NODES) + 1:
        raise ValueError(
            f"--prompt_tokens must leave {max(NODES) + 1} of the target's {target.max_positions} positions; got "
            f"{options.prompt_tokens}"
        )
    texts = prompts(target, options.questions, options.prompt_tokens)
    if (longest := max(map(len, texts)) + options.new_tokens) > target.max_positions:  # `generate` would go on
        raise ValueError(
            f"a prompt and --new_tokens must have room in the target's {target.max_positions} positions; got "
            f"{longest}; lower one of them"
        )
    result = bench_decoding(target, engines, texts, options, options.baselines)
    if scripted:
        vanilla = {"vanilla": DecodingEngine(target, VanillaDrafter(target.device))}
        for name, found in bench_decoding(target, vanilla | scripted, texts, options).items():
            drafter: Any = scripted[name].drafter
            result[name] = found | {"eta_bound": eta_bound(target, drafter.head)}
    filler = (texts[0] * options.prompt_tokens)[: options.prompt_tokens]
    result |= bench_verification(target, filler, 10 * options.repeats)
    plain_console().print(table(result))
    medians = {
        **{name: value["median"] for name, value in result.items() if "median" in value},  # of the baselines
        "verify_over_step": {nodes: value["median"] for nodes, value in result["verify_over_step"].items()},
    }
    print(json.dumps({**result, **medians, "environment": environment(str(target.device))}))


if __name__ == "__main__":
    sys.exit(exit_status(run))
