"""Which architectures serve as targets: small random models decode trees, compared with transformers' `generate`.

    python scripts/checks/architectures.py --write docs/targets.md

The drafts are the model's own answer, each behind a wrong sibling, so that branches are accepted. Exit status 1 if an
architecture that is served answers differently, or fails without a sentence.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.hf_generate import hf_generate
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree

_SIZES: dict[str, Any] = {
    **{"vocab_size": 211, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"max_position_embeddings": 256, "initializer_range": 0.3},
    **{"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
}
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {"sliding_window": 16}
_UNTIED = {"tie_word_embeddings": False}  # large tied random embeddings would repeat one token for ever
_LATENT = {
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8},
}
_PLAIN = "llama qwen2 qwen3 phi olmo olmo2 glm glm4 smollm3 ernie4_5 hunyuan_v1_dense gpt_neox stablelm nemotron"
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: _HEADS for name in [*_PLAIN.split(), "seed_oss", "qwen3_next"]},
    **{name: _HEADS | _SLIDING for name in ("mistral", "ministral", "phi3", "olmo3")},
    **{name: _HEADS | _SLIDING | _UNTIED for name in ("gemma2", "gemma3_text", "gemma4_text")},
    "gemma": _HEADS | _UNTIED,
    **{name: _HEADS | _SLIDING for name in ("exaone4", "starcoder2")},
    **{name: _HEADS | _EXPERTS for name in ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "llama4_text"]},
    "granite": _HEADS | {"logits_scaling": 3.0},
    "granitemoe": _HEADS | _EXPERTS | {"logits_scaling": 3.0},
    "cohere": _HEADS | {"logit_scale": 0.25},
    "cohere2": _HEADS | _SLIDING | {"logit_scale": 0.25},
    "gpt_oss": _HEADS | _EXPERTS | _SLIDING,
    "glm4_moe": _HEADS | _EXPERTS | {"n_routed_experts": 4},
    "deepseek_v3": _LATENT,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    **{name: {} for name in ("gpt2", "mpt", "bloom", "mamba")},
    "falcon": {"alibi": True},
    "recurrent_gemma": _HEADS,
}


class _ForkedAnswer(Drafter):
    """Four levels of a known answer, a wrong sibling in front of every right token."""

    on_device = False
    max_nodes, max_depth = 8, 4

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer

    def begin(self, prompt: Any, capacity: int) -> None:
        self.position = -len(prompt)

    def observe(self, step: VerifiedStep) -> None:
        self.position += int(step.count)

    def propose(self) -> DraftTree:
        right = (self.answer[self.position + 1 :][:4] + [0] * 4)[:4]
        tokens = [token for wanted in right for token in ((wanted + 1) % 211, wanted)]
        return DraftTree.build(torch.tensor(tokens), torch.tensor([-1, -1, 1, 1, 3, 3, 5, 5]))


def check(name: str, dtype: torch.dtype, prompts: int, new_tokens: int = 40) -> tuple[str, str, bool]:
    """The answers of one architecture or the sentence that refuses it, its forward, whether it holds."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **_SIZES | ARCHITECTURES[name])
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    try:
        target = Target(model, name=name)
    except ValueError as error:
        sentence = str(error)
        return f"refused: {sentence}", "", "failed a trial" not in sentence and "differ" not in sentence
    settings, identical, steps = GenerationSettings(max_new_tokens=new_tokens, eos_token_ids=()), 0, 0
    distinct = new_tokens
    for seed in range(prompts):
        prompt = [1 + (7 * i + 31 * seed) % 210 for i in range(20 + seed)]
        answer = hf_generate(target, prompt, settings, new_tokens)
        generated = DecodingEngine(target, _ForkedAnswer(answer)).generate(prompt, settings)
        distinct = min(distinct, len(set(answer)))
        identical += generated.tokens == answer
        steps += len(generated.accept_lengths)
    found = f"{identical} of {prompts} identical, β {prompts * new_tokens / steps:.1f}, ≥ {distinct} distinct tokens"
    return found, "fused" if target.fused else "modules", identical == prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES), help="architectures; all by default")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of 20 tokens and more each")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    args = parser.parse_args()
    lines = ["| architecture | float64 | float32 | forward |", "| --- | --- | --- | --- |"]
    failed = False
    for name in args.names:
        cells = [check(name, dtype, args.prompts) for dtype in (torch.float64, torch.float32)]
        failed |= not all(holds for _, _, holds in cells)
        refused = cells[0][0] == cells[1][0] and cells[0][0].startswith("refused")
        lines.append(f"| {name} | {cells[0][0]} | {'refused' if refused else cells[1][0]} | {cells[0][1]} |")
        print(lines[-1], flush=True)
    if args.write:
        head = (
            "# Architectures that serve as targets\n\nSmall models with random weights decode draft trees of which "
            "every second node is accepted; their answers are compared with transformers' own `generate`.\n\n"
            "    python scripts/checks/architectures.py --write docs/targets.md\n\n"
        )
        args.write.write_text(head + "\n".join(lines) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
