"""Which architectures serve as targets: small random models decode trees, compared with transformers' `generate`.

    python scripts/checks/architectures.py --write docs/targets.md

The drafts are the model's own answer, each behind a wrong sibling, so that branches are accepted. Exit status 1 if an
architecture answers differently, drafts worse than known answers allow, or is refused where it is to be served.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from draft_heads.data.collate import DraftCollator
from draft_heads.data.common.pretrained import model_class
from draft_heads.heads.checkpoint import HEADS, head_variants, new_head
from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.registry import drafter_for
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
_ONE_FOR_ONE = {"num_key_value_heads": 4, "head_dim": 8}  # a key head for each query head
_WIDE = {"num_key_value_heads": 1, "head_dim": 16}  # heads that are together wider than the hidden state, one for all
_TIED = {"tie_word_embeddings": True}
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
_GRANITE = {
    **{"logits_scaling": 3.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "attention_multiplier": 0.1,
}
_CAPS = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
_GEMMA_4 = {
    **{"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16},
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY, "final_logit_softcapping": 30.0},
}
_PER_LAYER_INPUTS = {
    **{"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "num_key_value_heads": 1},
    **{"use_double_wide_mlp": True, "layer_types": 2 * (2 * ["sliding_attention"] + ["full_attention"])},
}
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1},
    **{"num_heads": 2, "embed_dim": 32, "out_hidden_size": 32, "image_size": 28, "patch_size": 14},
    "num_position_embeddings": 16,
}
_THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: _HEADS for name in ("llama", "qwen2", "hunyuan_v1_dense", "nemotron", "qwen3_next")},
    **{name: _ONE_FOR_ONE for name in ("phi", "olmo", "olmo2", "gpt_neox", "stablelm")},
    **{name: _HEADS | {"num_key_value_heads": 1} for name in ("glm", "glm4")},
    **{name: _WIDE | _TIED for name in ("qwen3", "ernie4_5", "gemma")},
    "seed_oss": _WIDE,
    "smollm3": _HEADS | _TIED | {"no_rope_layer_interval": 2},
    "llama, 3.x rope, tied": _HEADS | _TIED | {"rope_parameters": _ROPE | {"original_max_position_embeddings": 64}},
    **{name: _HEADS | _SLIDING for name in ("mistral", "ministral", "exaone4")},
    **{name: _ONE_FOR_ONE | _SLIDING for name in ("phi3", "olmo3")},
    "starcoder2": _HEADS | _SLIDING | {"num_key_value_heads": 1},
    **{
        f"{name}, long rope": settings | {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 50}
        for name, settings in {"phi3": _HEADS, "phimoe": _HEADS | _EXPERTS, "llama": _HEADS}.items()
    },
    **{
        f"{name}, stray window": _HEADS | _EXPERTS | {"sliding_window": 50}
        for name in ("arcee", "gpt_bigcode", "minimax_m2")
    },
    "gemma2": _HEADS | _SLIDING | _TIED | _CAPS | {"head_dim": 12, "query_pre_attn_scalar": 12},
    "gemma3_text": _WIDE | _SLIDING | _TIED | {"num_hidden_layers": 6},
    "gemma4_text": _GEMMA_4 | _SLIDING | _TIED | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_text, per-layer inputs": _GEMMA_4 | _SLIDING | _TIED | _PER_LAYER_INPUTS,
    "gemma4_text, experts": _GEMMA_4
    | _SLIDING
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    **{name: _ONE_FOR_ONE | _EXPERTS for name in ("qwen2_moe", "olmoe")},
    **{name: _HEADS | _EXPERTS for name in ("mixtral", "llama4_text")},
    "qwen3_moe": _WIDE | _EXPERTS,
    "granite": _HEADS | _TIED | _GRANITE,
    "granitemoe": _HEADS | _EXPERTS | _TIED | _GRANITE,
    "cohere": _ONE_FOR_ONE | _TIED | {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": _HEADS | _SLIDING | _TIED | {"logit_scale": 0.25},
    "gpt_oss": _HEADS | _EXPERTS | _SLIDING | {"head_dim": 12},
    "glm4_moe": _WIDE | _EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True},
    "deepseek_v3": _LATENT,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "tie_word_embeddings": True},
    "opt, projected": {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False} | _TIED,
    **{name: {"tie_word_embeddings": True} for name in ("gpt2", "mpt", "bloom")},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba": {},
    "falcon": {"alibi": True},
    "falcon, rotary": {"multi_query": True, "parallel_attn": True},
    "recurrent_gemma": _HEADS,
    "t5": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
}
"""Settings beside `_SIZES` that have the proportions of the published models: key heads to query heads, heads wider
than the hidden state, sizes by layer, tied embeddings, scales and caps."""
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": _WIDE | _SLIDING | {"num_hidden_layers": 6},
    **{name: _HEADS for name in ("mistral3", "llava", "internvl")},
    **{name: _HEADS | _THREE_AXES for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
    "qwen3_vl_moe": _HEADS | _EXPERTS | _THREE_AXES,
}
"""Models with a text part of these settings beside a small vision part; they serve as text targets."""
REFUSED = ("qwen3_next", "llama4_text", "mpt", "bloom", "gpt_neo", "mamba", "falcon", "recurrent_gemma", "t5")
"""What is no target; any other refusal is a fault."""
WITHOUT_HEADS = ("opt, projected",)
"""Targets of drafters that need no training alone."""
TRAINED = dict(head_variants().values())
"""Settings of the heads that are trained for a few steps: the last variant of each kind."""

HEADER = "| architectures | float64 | float32 | forward |\n| --- | --- | --- | --- |"


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

    def begin(self, slot: int, prompt: Any, capacity: int) -> None:
        self.position = -len(prompt)

    def observe(self, step: VerifiedStep, slot: int | None = None) -> None:
        self.position += int(step.count)

    def propose(self) -> DraftTree:
        right = (self.answer[self.position + 1 :][:4] + [0] * 4)[:4]
        tokens = [token for wanted in right for token in ((wanted + 1) % VOCABULARY, wanted)]
        return DraftTree.build(torch.tensor([tokens]), torch.tensor([[-1, -1, 1, 1, 3, 3, 5, 5]]))


def own_answers(folder: Path, dtype: torch.dtype, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy answers of transformers' `generate`, by a model loaded for this alone."""
    model = model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    rows = [torch.tensor([prompt]) for prompt in prompts]
    options = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0}
    answers = [model.generate(row, attention_mask=torch.ones_like(row), **options) for row in rows]
    return [answer[0, len(prompt) :].tolist() for answer, prompt in zip(answers, prompts)]


def trains(target: Target, kind: str, prompts: list[list[int]], answers: list[list[int]]) -> bool:
    """Whether a head of this kind learns for two steps on labels that the target writes, then drafts losslessly."""
    torch.manual_seed(0)
    given: dict[str, Any] = TRAINED[kind] | ({} if target.modules.layers is not None else {"target_layers": []})
    head = new_head(kind, target.config, **given).to(target.dtype)
    layers = head.config.target_layers
    texts = [prompt + answer for prompt, answer in zip(prompts, answers)]
    labelled = target.label(texts, keep_hidden=True, target_layers=layers)
    marks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in zip(prompts, answers)]
    rows = [
        {"input_ids": text, "greedy_ids": labels.greedy_ids, "assistant_mask": mask}
        for text, labels, mask in zip(texts, labelled, marks)
    ]
    batch = DraftCollator(0, target.max_positions)(rows)
    states = target.states_of(batch, layers)
    head.start_from(states["hidden"], target.view(), states.get("aux_hidden"))
    before = [parameter.detach().clone() for parameter in head.parameters()]
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = head(**batch, **states, target=target.view())
        losses.append(float(loss.total.detach() / loss.windows))
        (loss.total / loss.windows).backward()
        optimizer.step()
        optimizer.zero_grad()
    learned = any(not torch.equal(old, new) for old, new in zip(before, head.parameters()))
    settings = GenerationSettings(max_new_tokens=len(answers[0]), eos_token_ids=())
    found = DecodingEngine(target, drafter_for(head.eval(), target, 8)).generate(prompts[0], settings).tokens
    agree = labelled[0].greedy_ids[len(prompts[0]) :] == answers[0]
    return learned and agree and losses[1] < losses[0] and found == answers[0]


def check(
    name: str, folder: Path, dtype: torch.dtype, count: int, heads: Sequence[str] = (), new_tokens: int = 40
) -> tuple[str, str, bool]:
    """The answers of one architecture or the sentence that refuses it, its forward, whether it holds.

    heads: the kinds that are trained on its labels for two steps
    """
    try:
        target = Target.from_pretrained(str(folder), dtype, "cpu")
    except ValueError as error:
        sentence = str(error).replace(f"{folder} ({name.split(',')[0]})", "it")
        sentence = sentence.replace(str(folder), "it")
        return f"refused: {sentence}", "", name in REFUSED
    settings = GenerationSettings(max_new_tokens=new_tokens, eos_token_ids=())
    prompts = [[1 + (7 * i + 31 * seed) % (VOCABULARY - 1) for i in range(20 + seed)] for seed in range(count)]
    rooms = [min(new_tokens, target.max_positions - len(prompt)) for prompt in prompts]
    answers = [answer[:room] for answer, room in zip(own_answers(folder, dtype, prompts, new_tokens), rooms)]
    generated = [DecodingEngine(target, _ForkedAnswer(a)).generate(p, settings) for p, a in zip(prompts, answers)]
    identical = sum(found.tokens == answer for found, answer in zip(generated, answers))
    steps = sum(len(found.accept_lengths) for found in generated)
    fewest = sum(1 + math.ceil((len(answer) - 1) / (1 + _ForkedAnswer.max_depth)) for answer in answers)
    holds = identical == count and steps == fewest and name not in REFUSED
    found = "exact" if identical == count else f"{identical} of {count}"
    found += f", {steps} steps where {fewest} are enough" * (steps != fewest)
    trained, refusals = 0, dict[str, None]()
    for kind in heads:
        try:
            trained += trains(target, kind, prompts, answers)
        except ValueError as error:
            refusals[str(error)] = None
    holds &= trained == (0 if name in WITHOUT_HEADS else len(heads))
    found += f", {trained} heads" if trained or (heads and not refusals) else ""
    found += "".join(f"; refused: {error}" for error in refusals)
    return found, target.forward_kind, holds


def check_all(names: Sequence[str], count: int = 2, heads: Sequence[str] = tuple(HEADS)) -> Iterator[tuple[str, bool]]:
    """What each architecture gives, as cells of the table, and whether it holds; heads are trained in float32."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            make_model(name, Path(folder))
            precisions = {torch.float64: (), torch.float32: heads}
            cells = [check(name, Path(folder), dtype, count, kinds) for dtype, kinds in precisions.items()]
        refused = cells[0][0] == cells[1][0] and cells[0][0].startswith("refused")
        row = f"{cells[0][0]} | {'refused' if refused else cells[1][0]} | {cells[0][1]} |"
        yield row, all(holds for _, _, holds in cells)


def main() -> bool:
    parser = script_parser(__doc__, config=False)
    known = [*ARCHITECTURES, *MULTIMODAL]
    parser.add_argument("names", nargs="*", default=known, metavar="NAME", help="architectures; all by default")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of 20 tokens and more each (default 2)")
    parser.add_argument("--write", type=Path, help="replace the table in this page")
    args = parser.parse_args()
    if unknown := set(args.names) - set(known):
        raise ValueError(f"{', '.join(sorted(unknown))} is no row of the table; those are {'; '.join(known)}")
    alike: dict[str, list[str]] = {}
    holds = True
    for name, (row, sound) in zip(args.names, check_all(args.names, args.prompts)):
        alike.setdefault(row, []).append(name)
        holds &= sound
        print(f"| {name} | {row}", flush=True)
    if args.write:
        prose, _, _ = args.write.read_text().partition(HEADER)
        rows = [f"| {'; '.join(names)} | {row}" for row, names in alike.items()]
        args.write.write_text("\n".join([prose + HEADER, *rows, ""]))
    return holds


if __name__ == "__main__":
    sys.exit(exit_status(main))
