"""Self-speculative decoding: the target without some of its layers drafts for the full target."""

from __future__ import annotations

from typing import Any, ClassVar

from draft_heads.inference.drafters.base import Builder
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.text.base import refuse_path
from draft_heads.inference.target.target import Target


class SelfSpeculativeDrafter(DraftModelDrafter):
    """A draft model that shares the target's weights and has its own cache for the remaining layers."""

    sources = ("self_speculative",)
    kind = "self_speculative"
    options: ClassVar[dict[str, Any]] = {"k": 3, "skip": ""}

    @classmethod
    def from_options(  # type: ignore[override]
        cls, path: str, build: Builder, max_nodes: int = 32, skip: str = "", **options: Any
    ) -> SelfSpeculativeDrafter:
        """See `Drafter.from_options`. skip: layers from 0, as "1/3"; "": every second one, not the last."""
        refuse_path("self_speculative", path)
        return cls(without_layers(build.target, skip), None, max_nodes, **options)


def without_layers(target: Target, skip: str = "") -> Target:
    """The target without the layers in `skip`, sharing its weights."""
    return target.without_layers(skipped_layers(skip, len(target.layer_types)))


def skipped_layers(skip: str, layers: int) -> list[int]:
    """The numbers in `skip`; "": 1, 3, 5, … up to the last but one. ValueError unless some layers remain."""
    numbers = skip.split("/") if skip else [str(layer) for layer in range(1, layers - 1, 2)]
    chosen = [int(number) if number.isdecimal() else -1 for number in numbers]
    if not chosen or not 0 <= min(chosen) <= max(chosen) < layers or len(set(chosen)) == layers:
        raise ValueError(
            f"drafter option skip names some but not all of the target's layers 0 to {layers - 1}; got "
            f"{skip or 'none'!r}; write e.g. skip={max(layers - 1, 0)}"
        )
    return chosen
