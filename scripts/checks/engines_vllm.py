"""Runs in vLLM's own environment: makes one engine, gives it tasks one after another, and writes what came of each.

    python engines_vllm.py JOB.json RESULT.json

JOB has "engine" (arguments of vLLM's LLM) and "tasks", each with "prompts" (lists of token ids), "at_once" (how many
are asked together), "sampling" (arguments of SamplingParams) and "abort" (give up as many requests first). RESULT is a
list: of each task "answers" (token ids), "texts", "counts" (what vLLM counted meanwhile), "slots" (requests that the
head still keeps), "memory" (MiB that the worker then holds) and "seconds".
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

COUNTED = ("spec_decode", "num_preemptions", "prefix_cache")


class Constant:
    """A proposer without a head: the same drafts for every request, which no correct engine shows in its answers."""

    def __init__(self, vllm_config: Any) -> None:
        self.drafts = list(range(5, 5 + vllm_config.speculative_config.num_speculative_tokens))

    def load_model(self, target_model: Any) -> None:
        """Nothing to load."""

    def propose(self, sampled_token_ids: list[list[int]], *step: Any, **named: Any) -> list[list[int]]:
        return [self.drafts if sampled else [] for sampled in sampled_token_ids]


def kept(worker: Any) -> tuple[int, float]:
    """Requests that a worker's head keeps, and the memory in MiB that the worker holds now."""
    drafts = getattr(getattr(worker.model_runner, "drafter", None), "drafts", ())
    return len(drafts), psutil.Process().memory_info().rss / 2**20


def counts(engine: Any) -> dict[str, float]:
    return {
        metric.name.removeprefix("vllm:"): metric.value
        for metric in engine.get_metrics()
        if any(name in metric.name for name in COUNTED) and hasattr(metric, "value")
    }


def give_up(engine: Any, prompts: list[list[int]], sampling: Any) -> None:
    """Ask, and abort all of it after five steps."""
    names = [f"given up {number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts):
        engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    for _ in range(5):
        engine.llm_engine.step()
    engine.llm_engine.abort_request(names)
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()


def run(engine: Any, task: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(**task["sampling"])
    prompts, at_once, before = task["prompts"], task.get("at_once", 1), counts(engine)
    start, outputs = time.monotonic(), []
    if task.get("abort"):
        give_up(engine, prompts[:at_once], sampling)
    for first in range(0, len(prompts), at_once):
        asked = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + at_once]]
        outputs += engine.generate(asked, sampling, use_tqdm=False)
    seconds = time.monotonic() - start
    slots, memory = engine.collective_rpc(kept)[0]
    after = counts(engine)
    return {
        "answers": [[list(one.token_ids) for one in output.outputs] for output in outputs],
        "texts": [output.outputs[0].text for output in outputs],
        "counts": {name: after[name] - before.get(name, 0) for name in after},
        "slots": slots,
        "memory": memory,
        "seconds": seconds,
    }


def main() -> None:
    from vllm import LLM

    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(**{"dtype": "float32", "enforce_eager": True, "disable_log_stats": False} | job["engine"])
    Path(sys.argv[2]).write_text(json.dumps([run(engine, task) for task in job["tasks"]]))


if __name__ == "__main__":
    main()
