"""Do exported heads work in a real engine? vLLM must give the target's own answers, and accept as many drafts as we do.

    python scripts/checks/engines.py --python VENV/bin/python --target DIR --heads RUN/head … --output DIR

For each head every format that vLLM reads: answers equal transformers' `generate` up to the first end token, and the
acceptance length equals that of our own chain of 3 tokens (`tree=chain,max_nodes=3`) on the same prompts within 2 %. An
EAGLE-3 export whose layer ids are moved by one must fail that: its answers are right, its drafts are worse. Exit status
0 only then. `make check-engines` makes vLLM's environment, which is its own, and trains the heads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status

import torch

from draft_heads.heads.checkpoint import load_head
from draft_heads.heads.export.formats import CONFIG, FORMATS, write_folder
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.hf_generate import hf_generate
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.bench.decode import prompts as make_prompts
from draft_heads.scripts.decoding_options import script_parser

DRAFTED, TOLERANCE = 3, 0.02
VLLM = {"vllm-medusa": "medusa", "eagle3": "eagle3", "speculators": "eagle3"}
"""Format → vLLM's name of the method."""


def engine_run(args: Any, name: str, speculative: dict[str, Any] | None, prompts: list[list[int]]) -> dict[str, Any]:
    """Answers and metrics of vLLM; ValueError with the end of its output if it fails."""
    job, result = args.output / f"{name}.job.json", args.output / f"{name}.json"
    given = {"model": args.target, "speculative": speculative, "prompts": prompts, "max_tokens": args.max_new_tokens}
    job.write_text(json.dumps(given))
    script = Path(__file__).with_name("engines_vllm.py")
    done = subprocess.run(
        [args.python, str(script), str(job), str(result)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"vLLM failed on {name}:\n{(done.stdout + done.stderr)[-3000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def until_end(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """Tokens up to the first end token, which is kept."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def acceptance_length(metrics: dict[str, Any]) -> float:
    """1 + accepted drafts a step, as vLLM counts them."""
    value = {name.removesuffix("_total"): found for name, found in metrics.items()}
    return 1 + value["vllm:spec_decode_num_accepted_tokens"] / value["vllm:spec_decode_num_drafts"]


def run() -> bool:
    parser = script_parser(__doc__, config=False)
    add = parser.add_argument
    add("--python", required=True, help="python of an environment with vLLM")
    add("--target", required=True)
    add("--heads", nargs="+", required=True, help="RUN/head of Medusa and EAGLE-3 heads")
    add("--output", type=Path, required=True)
    add("--questions", type=int, default=24, help="prompts (default 24)")
    add("--max_new_tokens", type=int, default=64, help="default 64")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    target = Target.from_pretrained(args.target, torch.float32, "cpu")
    prompts = make_prompts(target, args.questions, 0)
    settings = GenerationSettings(args.max_new_tokens)
    expected = [hf_generate(target, prompt, settings, args.max_new_tokens) for prompt in prompts]

    def check(name: str, method: str, folder: Path, own: float) -> bool:
        """One export in vLLM."""
        speculative = {"method": method, "model": str(folder), "num_speculative_tokens": DRAFTED}
        return report(name, engine_run(args, name, speculative, prompts), expected, target, own)

    passed = report("vanilla", engine_run(args, "vanilla", None, prompts), expected, target, None)
    for path in args.heads:
        head = load_head(path, target.fingerprint())
        spec = DrafterSpec.parse(f"head={head.config.kind}:{path},tree=chain,max_nodes={DRAFTED}")
        engine = DecodingEngine(target, build_drafter(spec, target, DRAFTED))
        own = chain_length(engine, prompts, args.max_new_tokens)
        for name, method in VLLM.items():
            if FORMATS[name].kind != head.config.kind:
                continue
            folder = args.output / name
            write_folder(head, name, folder, target.config, args.target)
            passed &= check(name, method, folder, own)
            if name == "eagle3":
                moved = json.loads((folder / CONFIG).read_text())
                key = "eagle_aux_hidden_state_layer_ids"
                moved[key] = [max(0, layer - 1) for layer in moved[key]]
                (folder / CONFIG).write_text(json.dumps(moved))
                caught = not check(f"{name}_layers_moved_by_one", method, folder, own)
                print("  caught, as it must be" if caught else "  NOT CAUGHT: this check sees nothing")
                passed &= caught
    return passed


def chain_length(engine: DecodingEngine, prompts: list[list[int]], most: int) -> float:
    """1 + accepted drafts a step of our own engine, the last step of an answer counted whole, as vLLM does."""
    accepted = steps = 0
    for prompt in prompts:
        answer = engine.generate(prompt, GenerationSettings(most + DRAFTED + 1, eos_token_ids=()))
        length, end = 1, len(until_end(answer.tokens[:most], engine.target.end_token_ids))
        for tokens in answer.accept_lengths[1:]:
            if length >= end:
                break
            accepted, steps, length = accepted + tokens - 1, steps + 1, length + tokens
    return 1 + accepted / steps


def report(name: str, found: dict[str, Any], expected: list[list[int]], target: Target, own: float | None) -> bool:
    """Print one line; whether the answers are the target's and the acceptance length is ours."""
    ends = target.end_token_ids
    same = sum(until_end(got, ends) == until_end(want, ends) for got, want in zip(found["answers"], expected))
    line, good = f"{name}: {same} of {len(expected)} answers are those of generate", same == len(expected)
    if own is not None:
        theirs = acceptance_length(found["metrics"])
        good &= abs(theirs / own - 1) <= TOLERANCE
        line += f"; acceptance length {theirs:.3f}, ours {own:.3f}"
    print(f"{line}: {'good' if good else 'DIFFERENT'}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(exit_status(run))
