"""Runs in vLLM's own environment: decodes prompts with one draft head, and writes tokens and metrics as JSON.

    python engines_vllm.py JOB.json RESULT.json

JOB has "model", "speculative" (null, or vLLM's speculative_config), "prompts" (lists of token ids) and "max_tokens".
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    longest = max(map(len, job["prompts"])) + job["max_tokens"] + 8
    engine = LLM(
        job["model"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=longest,
        speculative_config=job["speculative"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], detokenize=False)
    answers = []
    for prompt in job["prompts"]:  # one after another: as this project decodes
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling)
        answers.append(list(output.outputs[0].token_ids))
    metrics = {
        metric.name: getattr(metric, "value", None) or getattr(metric, "values", None)
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name
    }
    Path(sys.argv[2]).write_text(json.dumps({"answers": answers, "metrics": metrics}))


if __name__ == "__main__":
    main()
