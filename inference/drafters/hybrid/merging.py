"""What merges drafts, in C++ where there is a compiler, else in Python: the same trees, only more slowly."""

from __future__ import annotations

from collections.abc import Sequence

from draft_heads.inference.drafters.hybrid.calibration import Calibration
from draft_heads.inference.drafters.hybrid.merged_tree import Merged, MergedTree, Source
from draft_heads.inference.drafters.text.ngram_table import NgramTable
from draft_heads.inference.native import library, merging


def table_of(n: int) -> NgramTable:
    """An n-gram table with nothing in it."""
    return merging.NgramTable(n) if library.load_library() else NgramTable(n)


def calibration_of(sources: int, learned: Calibration | None = None) -> Calibration:
    """A calibration of so many sources; learned: what it begins with."""
    if not library.load_library():
        return learned or Calibration()
    made = merging.Calibration(sources)
    if learned:
        made.put(learned.state_dict())
    return made


def merge(
    sources: Sequence[Source],
    calibration: Calibration,
    max_nodes: int,
    max_depth: int,
    bounds: Sequence[float] | None = None,
) -> Merged:
    """See `MergedTree`."""
    if isinstance(calibration, merging.Calibration):
        return merging.MergedTree(sources, calibration, max_nodes, max_depth, bounds)
    return MergedTree(sources, calibration, max_nodes, max_depth, bounds)
