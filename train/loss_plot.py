"""A picture of a training run, from what its trainer logged: loss.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from draft_heads.data.common.files import replacing


def held_out_losses(history: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Steps, and losses as the training log has them: summed over the labels in the draft vocabulary, per window.

    Worked example: an `eval_loss` of 20 with a quarter of the labels outside is 15.
    """
    entries = [entry for entry in history if "eval_loss" in entry]
    inside = [1 - entry.get("eval_outside_vocabulary", 0.0) for entry in entries]
    return [entry["step"] for entry in entries], [e["eval_loss"] * share for e, share in zip(entries, inside)]


def save_loss_plot(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Training and held-out loss by step, and beside them simulated β where it was measured.

    history: `trainer.state.log_history`. Labels outside the draft vocabulary add nothing to either curve: `eval_loss`
    counts each as the mean of the others, which is undone here.
    """

    def points(name: str) -> tuple[list[float], list[float]]:
        entries = [entry for entry in history if name in entry]
        return [entry["step"] for entry in entries], [entry[name] for entry in entries]

    simulated = points("eval_simulated_beta")
    figure = Figure(figsize=(9.0 if simulated[0] else 5.5, 3.6), layout="constrained")
    panels = figure.subplots(1, 2 if simulated[0] else 1, squeeze=False)[0]
    panels[0].plot(*points("loss"), color="#0072b2", label="training rows")
    panels[0].plot(*held_out_losses(history), color="#e69f00", marker="o", markersize=4, label="held-out rows")
    panels[0].set_ylabel("loss per window")
    panels[0].legend(frameon=False)
    if simulated[0]:
        panels[1].plot(*simulated, color="#009e73", marker="o", markersize=4)
        panels[1].set_ylabel("simulated β of held-out rows")
    for axes in panels:
        axes.set_xlabel("optimizer step")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=150, format="png")
