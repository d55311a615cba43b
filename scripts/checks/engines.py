"""Do heads work in a real vLLM? It must give the target's own answers, and accept as many drafts as we do.

    python scripts/checks/engines.py --python VENV/bin/python --target DIR --heads RUN/head … --output DIR

Every head drafts inside vLLM (`inference/serving/vllm.py`): answers equal transformers' `generate` up to the first end
token, one by one and eight at once, with prompts read in pieces; vLLM's steps and accepted drafts are those of our own
chain of 3 tokens (`tree=chain,max_nodes=3`); prefixes from a cache, requests that are preempted, given up, stopped by a
text or sampled change nothing but speed; 200 requests leave no slot and no memory behind. The first head also behind
`vllm serve` and OpenAI's client.

Every format that vLLM reads itself (`scripts/export.py`): the same answers, and as many accepted drafts a step as ours,
within 5 %. An EAGLE-3 export whose layer ids are moved by one must fail that. Exit status 0 only then.
`make check-engines` makes vLLM's environment, which is its own, and trains the heads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status

import torch

from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import load_head
from draft_heads.heads.export.formats import CONFIG, FORMATS, write_folder
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.hf_generate import hf_generate
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.bench.decode import prompts as make_prompts
from draft_heads.scripts.checks.engines_serve import SERVED, served_answer
from draft_heads.scripts.decoding_options import script_parser

DRAFTED = 3
TOLERANCE, LEAST = 0.05, 0.1
"""By what share the accepted drafts of a step may differ, and how many there must be to be compared."""
VLLM = {"vllm-medusa": "medusa", "eagle3": "eagle3", "speculators": "eagle3"}
"""Format → vLLM's name of the method."""
PLUGIN = "draft_heads.inference.serving.vllm.HeadProposer"
CONSTANT = "draft_heads.scripts.checks.engines_vllm.Constant"
FAR = 4.0
"""Standard deviations of χ² beyond which two samples have different distributions."""
GROWTH = 48.0
"""MiB by which a worker may grow over 200 requests that leave nothing."""


class Engines:
    """What every run of vLLM has in common, and how many of the checks failed."""

    def __init__(self, python: str, target: str, output: Path, prompts: list[list[int]], max_tokens: int) -> None:
        self.python, self.target, self.output, self.prompts = python, target, output, prompts
        self.greedy = {"temperature": 0, "max_tokens": max_tokens}
        self.longest = max(map(len, prompts)) + max_tokens + DRAFTED + 1
        self.failed = 0
        self.apart_without_head: float | None = None
        self.not_compared: list[str] = []

    def run(self, name: str, tasks: list[dict[str, Any]], **engine: Any) -> list[dict[str, Any]]:
        """What came of each task in one engine; ValueError with the end of its output if it fails."""
        job, result = self.output / f"{name}.job.json", self.output / f"{name}.json"
        settings = {"model": self.target, "max_model_len": self.longest, "max_num_seqs": 8, **engine}
        job.write_text(json.dumps({"engine": settings, "tasks": tasks}))
        script = Path(__file__).with_name("engines_vllm.py")
        command = [self.python, str(script), str(job), str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
        (self.output / f"{name}.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise ValueError(f"vLLM failed on {name}:\n{(done.stdout + done.stderr)[-3000:]}")
        found: list[dict[str, Any]] = json.loads(result.read_text())
        return found

    def tell(self, good: bool, line: str) -> None:
        """Print one line, and count it if it is a failure."""
        self.failed += not good
        print(f"{line}: {'good' if good else 'DIFFERENT'}", flush=True)

    def tasks(self) -> list[dict[str, Any]]:
        """What plain vLLM and every head is given; see `check_head`."""
        few, many = self.prompts[:8], (self.prompts * 25)[:200]
        sampled = {"temperature": 1.0, "max_tokens": 4, "n": 64, "ignore_eos": True}
        return [
            {"prompts": self.prompts, "sampling": self.greedy},
            {"prompts": self.prompts, "at_once": 8, "sampling": self.greedy},
            {"prompts": few, "at_once": 8, "sampling": self.greedy | {"stop": ["e ", "."]}},
            {"prompts": few, "at_once": 8, "sampling": self.greedy, "abort": True},
            {"prompts": [self.prompts[0]] * 16, "at_once": 8, "sampling": sampled},
            {"prompts": many[:40], "at_once": 8, "sampling": self.greedy | {"max_tokens": 8}},
            {"prompts": many, "at_once": 8, "sampling": self.greedy | {"max_tokens": 8}},
            {"prompts": few[:1], "sampling": self.greedy | {"max_tokens": 8}},
        ]


def environment() -> dict[str, str]:
    """What vLLM reads: GiB of its cache on a CPU, that it computes on every core (by default it leaves one out), and
    that its workers may be asked how many slots they keep."""
    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    return {**on_cpu, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **os.environ}


def until_end(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """Tokens up to the first end token, which is kept."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def acceptance_length(counts: dict[str, float]) -> float:
    """1 + accepted drafts a step with drafts, as vLLM counts them."""
    return 1 + counts["spec_decode_num_accepted_tokens"] / max(1, counts["spec_decode_num_drafts"])


def own_chain(engine: DecodingEngine, prompts: list[list[int]], most: int) -> tuple[int, int]:
    """Steps and accepted drafts of our own engine, the last step of an answer counted whole, as vLLM does."""
    accepted = steps = 0
    for prompt in prompts:
        answer = engine.generate(prompt, GenerationSettings(most + DRAFTED + 1, eos_token_ids=()))
        length, end = 1, len(until_end(answer.tokens[:most], engine.target.end_token_ids))
        for tokens in answer.accept_lengths[1:]:
            if length >= end:
                break
            accepted, steps, length = accepted + tokens - 1, steps + 1, length + tokens
    return steps, accepted


def same_answers(found: dict[str, Any], expected: list[list[int]], ends: tuple[int, ...]) -> int:
    """How many of a task's first answers are these, up to the first end token."""
    pairs = zip(found["answers"], expected)
    return sum(until_end(got[0], ends) == until_end(want, ends) for got, want in pairs)


def distance(one: list[list[list[int]]], other: list[list[list[int]]], place: int) -> float:
    """Between the distributions of two runs' tokens at a place, in standard deviations of what chance gives (χ²)."""
    counted = [Counter(answer[place] for answers in run for answer in answers) for run in (one, other)]
    total, squares, classes = counted[0].total(), 0.0, 0
    assert total == counted[1].total()
    common = {token for token in counted[0] | counted[1] if counted[0][token] + counted[1][token] >= 10}
    pairs = [(counted[0][token], counted[1][token]) for token in common]
    rest = tuple(total - sum(pair[side] for pair in pairs) for side in (0, 1))
    for a, b in [*pairs, rest]:
        if a + b:
            squares, classes = squares + (a - b) ** 2 / (a + b), classes + 1
    freedom = max(1, classes - 1)
    return float((squares - freedom) / (2 * freedom) ** 0.5)


def check_head(engines: Engines, path: str, head: DraftHead, chain: tuple[int, int], plain: list[Any]) -> None:
    """A head inside vLLM against plain vLLM's answers and our own chain's steps."""
    kind = head.config.kind
    drafts = {
        "speculative_config": {"method": "custom_class", "model": PLUGIN, "num_speculative_tokens": DRAFTED},
        "additional_config": {"draft_head": path},
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 64,
    }
    found = engines.run(kind, engines.tasks(), **drafts)
    counts = found[0]["counts"]
    theirs = int(counts["spec_decode_num_drafts"]), int(counts["spec_decode_num_accepted_tokens"])
    answers = [got["answers"] == want["answers"] for got, want in zip(found[:4], plain)]
    engines.tell(answers[0] and theirs == chain, f"{kind}: answers; steps and accepted drafts {theirs}, ours {chain}")
    engines.tell(answers[1], f"{kind}: eight at once, prompts read in pieces of 64")
    engines.tell(answers[2] and found[2]["texts"] == plain[2]["texts"], f"{kind}: texts that stop an answer")
    engines.tell(answers[3], f"{kind}: after eight requests that were given up")
    check_samples(engines, kind, found[4], plain[4])
    growth, slots = found[6]["memory"] - found[5]["memory"], found[7]["slots"]
    good = slots == 1 and growth < GROWTH  # a slot is freed at the next step, here of one request
    engines.tell(good, f"{kind}: 200 requests leave {slots - 1} slots and {growth:.0f} MiB")
    small = {"enable_prefix_caching": True, "block_size": 32, "num_gpu_blocks_override": -(-engines.longest // 32) + 6}
    long = [prompt for prompt in engines.prompts if len(prompt) > 33][:4]
    twice = [prompt for prompt in long for _ in range(2)]
    tasks = [
        {"prompts": engines.prompts, "at_once": 8, "sampling": engines.greedy},
        {"prompts": twice, "sampling": engines.greedy},
    ]
    found = engines.run(f"{kind}_preempted", tasks, **drafts | small)
    counted = Counter(found[0]["counts"]) + Counter(found[1]["counts"])
    alone = dict(zip(map(tuple, engines.prompts), plain[0]["answers"]))
    good = found[0]["answers"] == plain[1]["answers"] and found[1]["answers"] == [alone[tuple(one)] for one in twice]
    good &= counted["num_preemptions"] > 0 and counted["prefix_cache_hits"] > 0
    engines.tell(
        good,
        f"{kind}: {counted['num_preemptions']:.0f} requests preempted, {counted['prefix_cache_hits']:.0f} tokens from "
        "the cache of prefixes",
    )


def check_samples(engines: Engines, kind: str, found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Drafts must not change how often a token is sampled; where those of no head do, too, it is vLLM's own doing."""

    def apart(samples: dict[str, Any]) -> float:
        return max(distance(samples["answers"], plain["answers"], place) for place in (1, 2, 3))

    far = apart(found)
    if far >= FAR:
        if engines.apart_without_head is None:  # one run serves all heads
            speculative = {"method": "custom_class", "model": CONSTANT, "num_speculative_tokens": DRAFTED}
            (constant,) = engines.run("constant", [engines.tasks()[4]], speculative_config=speculative)
            engines.apart_without_head = apart(constant)
        if engines.apart_without_head >= FAR:
            engines.not_compared.append(kind)
            print(
                f"{kind}: sampled tokens NOT COMPARED: drafts that are always the same change them in this vLLM "
                f"({engines.apart_without_head:.0f} standard deviations of chance), so that its own sampling of drafts "
                "is wrong here"
            )
            return
    engines.tell(far < FAR, f"{kind}: sampled tokens differ by {far:.1f} standard deviations of chance")


def check_exports(engines: Engines, head: DraftHead, chain: tuple[int, int], plain: list[Any], target: Target) -> None:
    """Each export that vLLM reads."""
    own = chain[1] / chain[0]
    if own < LEAST:
        engines.tell(
            False, f"{head.config.kind}: {own:.3f} accepted drafts a step are too few to compare its exports by"
        )
    for name, method in VLLM.items():
        if FORMATS[name].kind != head.config.kind:
            continue
        folder = engines.output / "exports" / name
        write_folder(head, name, folder, target.config, engines.target)

        def check(title: str, method: str, folder: Path) -> tuple[bool, str]:
            speculative = {"method": method, "model": str(folder), "num_speculative_tokens": DRAFTED}
            (found,) = engines.run(title, engines.tasks()[:1], speculative_config=speculative)
            theirs = acceptance_length(found["counts"]) - 1
            good = found["answers"] == plain[0]["answers"] and abs(theirs - own) <= TOLERANCE * own
            return good, f"{title}: answers; accepted drafts a step {theirs:.3f}, ours {own:.3f}"

        engines.tell(*check(name, method, folder))
        if name == "eagle3":
            right = (folder / CONFIG).read_text()
            moved = json.loads(right)
            key = "eagle_aux_hidden_state_layer_ids"
            moved[key] = [max(0, layer - 1) for layer in moved[key]]
            (folder / CONFIG).write_text(json.dumps(moved))
            good, line = check(f"{name}_layers_moved_by_one", method, folder)
            (folder / CONFIG).write_text(right)
            engines.tell(not good, f"{line}; such a mistake must be caught")


def engines_parser(description: str | None, max_new_tokens: int, needs_heads: bool = True) -> argparse.ArgumentParser:
    """The flags of what runs a real vLLM, with heads in it."""
    parser = script_parser(description, config=False)
    add = parser.add_argument
    add("--python", required=True, help="python of an environment with vLLM and this package")
    add("--target", required=True)
    add("--heads", nargs="+", required=needs_heads, default=[], help="RUN/head of heads of any kinds")
    add("--output", type=Path, required=True)
    add("--questions", type=int, default=24, help="prompts, at least 8 (default 24)")
    add("--max_new_tokens", type=int, default=max_new_tokens, help=f"default {max_new_tokens}")
    return parser


def main() -> bool:
    args = engines_parser(__doc__, 64).parse_args()
    (args.output / "exports").mkdir(parents=True, exist_ok=True)
    target = Target.from_pretrained(args.target, torch.float32, "cpu")
    prompts = make_prompts(target, args.questions, 0)
    engines = Engines(args.python, args.target, args.output, prompts, args.max_new_tokens)
    settings = GenerationSettings(args.max_new_tokens)
    expected = [hf_generate(target, prompt, settings, args.max_new_tokens) for prompt in prompts]
    plain = engines.run("plain", engines.tasks())
    same = same_answers(plain[0], expected, target.end_token_ids)
    engines.tell(same == len(prompts), f"vLLM without drafts: {same} of {len(prompts)} answers are those of generate")
    for number, path in enumerate(args.heads):
        head = load_head(path, target.fingerprint())
        spec = DrafterSpec.parse(f"head={head.config.kind}:{path},tree=chain,max_nodes={DRAFTED}")
        engine = DecodingEngine(target, build_drafter(spec, target, DRAFTED))
        chain = own_chain(engine, prompts, args.max_new_tokens)
        check_head(engines, path, head, chain, plain)
        check_exports(engines, head, chain, plain, target)
        if not number:
            given = args.python, args.target, path, PLUGIN, DRAFTED, prompts[0], engines.longest
            answer = served_answer(*given, environment(), args.output / "server.log")
            engines.tell(answer == plain[0]["answers"][0][0][:SERVED], "vllm serve and OpenAI's client")
    print(f"{engines.failed} checks failed" if engines.failed else "all checks passed")
    if engines.not_compared:
        print(f"but sampled tokens were not compared for {', '.join(engines.not_compared)}")
    return not engines.failed


if __name__ == "__main__":
    sys.exit(exit_status(main))
