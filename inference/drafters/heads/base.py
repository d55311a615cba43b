"""What the drafters of trained heads share."""

from __future__ import annotations

from typing import Any, ClassVar

from draft_heads.inference.drafters.base import Builder, Drafter


class HeadDrafter(Drafter):
    """Made from (head, target, max_nodes, **options)."""

    head: Any
    tuned_options: ClassVar[dict[str, type]] = {"max_nodes": int, "tree_temperature": float}
    tuned_by = "scripts/tune_tree.py"

    def __init__(self, head: Any, target: Any, max_nodes: int = 32, **options: Any) -> None: ...

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Those the head was trained with."""
        return tuple(self.head.config.target_layers)

    @classmethod
    def from_options(
        cls, path: str, build: Builder, tree_temperature: float | None = None, **options: Any
    ) -> HeadDrafter:
        """See `Drafter.from_options`; tree_temperature: that of a tuning file, instead of the checkpoint's."""
        head = build.head(cls.kind, path)
        if tree_temperature is not None:
            head.config.tree_temperature = tree_temperature
        return cls(head, build.target, **options)
