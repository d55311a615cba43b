"""Which architectures serve as targets: small random models decode trees, compared with transformers' `generate`.

    python scripts/checks/architectures.py --write docs/targets.md

The drafts are the model's own answer, each behind a wrong sibling, so that branches are accepted. Exit status 1 if an
architecture that is served answers differently, or fails without a sentence.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draft_heads.data.config_file import exit_status

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from draft_heads.data.pretrained import model_class
from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from draft_heads.scripts.decoding_options import script_parser

TOKENIZER = Path(__file__).resolve().parents[2] / "data" / "tiny_target"
VOCABULARY = 1024  # that tokenizer's
_SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 256, "initializer_range": 0.3},
    **{"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
    "tie_word_embeddings": False,
}
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {"sliding_window": 16}
_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG_ROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 50},
    **{"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "short_mscale": 1.0, "long_mscale": 1.1},
}
_LATENT = {
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8},
}
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1},
    **{"num_heads": 2, "embed_dim": 32, "out_hidden_size": 32, "image_size": 28, "patch_size": 14},
    "num_position_embeddings": 16,
}
_THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_PLAIN = "llama qwen2 qwen3 phi olmo olmo2 glm glm4 smollm3 ernie4_5 hunyuan_v1_dense gpt_neox stablelm nemotron"
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: _HEADS for name in [*_PLAIN.split(), "seed_oss", "gemma", "qwen3_next"]},
    "llama, 3.x rope, tied": _HEADS
    | {"tie_word_embeddings": True, "rope_parameters": _ROPE | {"original_max_position_embeddings": 64}},
    **{name: _HEADS | _SLIDING for name in ("mistral", "ministral", "phi3", "olmo3", "exaone4", "starcoder2")},
    **{
        f"{name}, long rope": settings | {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 50}
        for name, settings in {"phi3": _HEADS, "phimoe": _HEADS | _EXPERTS, "llama": _HEADS}.items()
    },
    **{
        f"{name}, stray window": _HEADS | _EXPERTS | {"sliding_window": 50}
        for name in ("arcee", "gpt_bigcode", "minimax_m2")
    },
    **{name: _HEADS | _SLIDING for name in ("gemma2", "gemma3_text", "gemma4_text")},
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
    "t5": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": _HEADS | _SLIDING,
    **{name: _HEADS for name in ("mistral3", "llava", "internvl")},
    **{name: _HEADS | _THREE_AXES for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
    "qwen3_vl_moe": _HEADS | _EXPERTS | _THREE_AXES,
}
"""Models with a text part of these settings beside a small vision part; they serve as text targets."""


def make_model(name: str, folder: Path) -> None:
    """Save a small model of the architecture, random weights in float32, with a tokenizer."""
    torch.manual_seed(0)
    architecture = name.split(",")[0]
    if name in MULTIMODAL:
        text = _SIZES | MULTIMODAL[name]
        config = AutoConfig.for_model(architecture, text_config=text, vision_config=dict(_VISION))
        config.tie_word_embeddings = False
    else:
        config = AutoConfig.for_model(architecture, **_SIZES | ARCHITECTURES[name])
    loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else model_class(config)
    model = loader.from_config(config)
    if getattr(config, "tie_word_embeddings", False):
        model.get_input_embeddings().weight.data *= 0.1  # a token shall not be its own likeliest follower
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)


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
        tokens = [token for wanted in right for token in ((wanted + 1) % VOCABULARY, wanted)]
        return DraftTree.build(torch.tensor(tokens), torch.tensor([-1, -1, 1, 1, 3, 3, 5, 5]))


def own_answers(folder: Path, dtype: torch.dtype, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy answers of transformers' `generate`, by a model loaded for this alone."""
    model = model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    rows = [torch.tensor([prompt]) for prompt in prompts]
    options = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0}
    answers = [model.generate(row, attention_mask=torch.ones_like(row), **options) for row in rows]
    return [answer[0, len(prompt) :].tolist() for answer, prompt in zip(answers, prompts)]


def check(name: str, folder: Path, dtype: torch.dtype, count: int, new_tokens: int = 40) -> tuple[str, str, bool]:
    """The answers of one architecture or the sentence that refuses it, its forward, whether it holds."""
    try:
        target = Target.from_pretrained(str(folder), dtype, "cpu")
    except ValueError as error:
        sentence = str(error).replace(str(folder), name.split(",")[0])
        return f"refused: {sentence}", "", not re.search("failed a trial|differ", sentence)
    settings = GenerationSettings(max_new_tokens=new_tokens, eos_token_ids=())
    prompts = [[1 + (7 * i + 31 * seed) % (VOCABULARY - 1) for i in range(20 + seed)] for seed in range(count)]
    rooms = [min(new_tokens, target.max_positions - len(prompt)) for prompt in prompts]
    answers = [answer[:room] for answer, room in zip(own_answers(folder, dtype, prompts, new_tokens), rooms)]
    generated = [DecodingEngine(target, _ForkedAnswer(a)).generate(p, settings) for p, a in zip(prompts, answers)]
    identical = sum(found.tokens == answer for found, answer in zip(generated, answers))
    beta = sum(rooms) / sum(len(found.accept_lengths) for found in generated)
    distinct = min(len(set(answer)) for answer in answers)
    found = f"{identical} of {count}, β {beta:.1f}, {distinct} tokens"
    return found, target.forward_kind, identical == count


def check_all(names: Sequence[str], count: int = 2) -> Iterator[tuple[str, bool]]:
    """A row of the table for each architecture, and whether it holds."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            make_model(name, Path(folder))
            cells = [check(name, Path(folder), dtype, count) for dtype in (torch.float64, torch.float32)]
        refused = cells[0][0] == cells[1][0] and cells[0][0].startswith("refused")
        row = f"| {name} | {cells[0][0]} | {'refused' if refused else cells[1][0]} | {cells[0][1]} |"
        yield row, all(holds for _, _, holds in cells)


HEAD = """# Architectures that serve as targets

Small models with random weights decode draft trees of which every second node is accepted. A cell has the answers that equal those of
transformers' `generate`, β, and the fewest different tokens in an answer. The last column is the forward that runs
([decoding](decoding.md#speed)).

    python scripts/checks/architectures.py --write docs/targets.md

A long-rope model (`"rope_type": "longrope"`: Phi-3, Phi-4-mini and others) changes its rotary frequencies beyond
`original_max_position_embeddings` tokens, which makes cached keys wrong. Prompt and answer together end at that length, which a line says
when the target is loaded; a longer prompt is refused. The same holds where a config has a `sliding_window` that attention ignores
but the cache of `generate` obeys.

Targets that transformers loads quantised run through their modules. Tried on a CPU with torchao 0.18.0, torch 2.13.0 and transformers
5.23.0: the embedded target with int8 weights (`TorchAoConfig(Int8WeightOnlyConfig())`, saved and loaded as a folder) writes labels, trains
all five heads and decodes as its own `generate` does. With int8 activations (`Int8DynamicActivationInt8WeightConfig`) it is refused in
float32: where two forwards round differently, a value moves by a whole int8 step.

"""  # noqa: E501


def main() -> bool:
    parser = script_parser(__doc__, config=False)
    known = [*ARCHITECTURES, *MULTIMODAL]
    parser.add_argument("names", nargs="*", default=known, metavar="NAME", help="architectures; all by default")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of 20 tokens and more each (default 2)")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    args = parser.parse_args()
    if unknown := set(args.names) - set(known):
        raise ValueError(f"{', '.join(sorted(unknown))} is no row of the table; those are {'; '.join(known)}")
    lines = ["| architecture | float64 | float32 | forward |", "| --- | --- | --- | --- |"]
    holds = True
    for row, sound in check_all(args.names, args.prompts):
        lines.append(row)
        holds &= sound
        print(row, flush=True)
    if args.write:
        args.write.write_text(HEAD + "\n".join(lines) + "\n")
    return holds


if __name__ == "__main__":
    sys.exit(exit_status(main))
