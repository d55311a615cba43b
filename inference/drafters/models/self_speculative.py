"""Self-speculative decoding: the target without some of its layers drafts for the whole of it."""

from __future__ import annotations

from typing import Any, ClassVar

from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.registry import whole_number
from draft_heads.inference.drafters.text.base import refuse_path
from draft_heads.inference.target.target import Target


class SelfSpeculativeDrafter(DraftModelDrafter):
    """A draft model that holds no weights of its own, only a cache of the layers that are left."""

    sources = ("self_speculative",)
    options: ClassVar[dict[str, Any]] = {"k": 3, "skip": ""}

    @classmethod
    def from_options(  # type: ignore[override]
        cls, path: str, target: Target, max_nodes: int = 32, skip: str = "", **options: int
    ) -> SelfSpeculativeDrafter:
        """See `FREE_DRAFTERS`. skip: layers from 0 with slashes between, "1/3"; "": every second but the outermost."""
        refuse_path("self_speculative", path)
        return cls(target.without_layers(skipped_layers(skip, len(target.layer_types))), None, max_nodes, **options)


def skipped_layers(skip: str, layers: int) -> list[int]:
    """The numbers in `skip`; without any, 1, 3, 5, … up to the last but one. ValueError unless some layers stay."""
    chosen = [whole_number("skip", part) for part in skip.split("/")] if skip else list(range(1, layers - 1, 2))
    if not chosen or not 0 <= min(chosen) <= max(chosen) < layers or len(set(chosen)) == layers:
        raise ValueError(
            f"drafter option skip names some but not all of the target's layers 0 to {layers - 1}; got "
            f"{skip or 'none'!r}; write e.g. skip={max(layers - 1, 0)}"
        )
    return chosen
