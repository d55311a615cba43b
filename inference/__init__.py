"""The decoding engine: target, cache, draft trees, verification, drafters, evaluation.

target = Target.from_pretrained("data/tiny_target")
drafter = build_drafter(DrafterSpec.parse("ctc=runs/ctc/head"), target)
answer = DecodingEngine(target, drafter).generate("Why is the sky blue?", GenerationSettings(max_new_tokens=64))
"""

from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import Generation, GenerationSettings
from draft_heads.inference.target.target import Target

__all__ = ["DecodingEngine", "DrafterSpec", "Generation", "GenerationSettings", "Target", "build_drafter"]
