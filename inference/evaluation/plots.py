"""Three pictures of an evaluation, from the rows of `report.json`: speedup, accepted drafts, time shares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

Row = dict[str, Any]

BASELINE_GREYS = {"vanilla": "#8c8c8c", "transformers": "#bfbfbf"}
# Okabe and Ito's palette, distinguishable with every kind of colour vision.
DRAFTER_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#f0e442")
TIME_COLOURS = {"draft": "#e69f00", "verify": "#0072b2", "accept": "#009e73", "other": "#c8c8c8"}


def speedup(results: Sequence[Row]) -> Figure:
    """Gamma per drafter with its interval, grouped by benchmark; a line at vanilla's 1."""
    rows, benchmarks, drafters = _overall(results)
    styles = _styles(drafters)
    figure = Figure(figsize=(max(5.0, 1.6 + 0.75 * len(rows)), 4.2), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(drafters)
    annotation: Any = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 8}
    annotation["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for index, drafter in enumerate(drafters):
        colour, hatch, _ = styles[drafter]
        for group, benchmark in enumerate(benchmarks):
            row = rows[benchmark, drafter]
            if row["gamma"] is None:
                continue
            x = group + (index - (len(drafters) - 1) / 2) * width
            low, high = row["gamma_ci95"]
            error = [[max(row["gamma"] - low, 0)], [max(high - row["gamma"], 0)]]
            label = drafter if group == 0 else None
            axes.bar(x, row["gamma"], width * 0.9, color=colour, hatch=hatch, label=label)
            axes.errorbar(x, row["gamma"], yerr=error, color="#333333", capsize=3, linewidth=1)
            axes.annotate(f"{row['gamma']:.2f}×\nβ {row['beta']:.2f}", (x, max(high, row["gamma"])), **annotation)
    axes.axhline(1.0, color="#333333", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(benchmarks)), benchmarks)
    axes.set_ylabel("speedup γ over vanilla")
    axes.margins(y=0.18)
    axes.set_title("Speedup, with 95 % interval over questions")
    _finish(axes)
    _legend_below(figure, axes)
    return figure


def accepted_length(results: Sequence[Row]) -> Figure:
    """Share of target steps that accepted at least a drafted tokens, one panel per benchmark."""
    rows, benchmarks, drafters = _overall(results)
    accepted = {key: _at_least(row["accept_length_histogram"]) for key, row in rows.items()}
    drafting = [name for name in drafters if any(accepted[benchmark, name] for benchmark in benchmarks)]
    styles = _styles(drafters)
    figure, panels = _panels(max(5.0, 4.2 * len(benchmarks)), 4.2, benchmarks)
    for axes, benchmark in zip(panels, benchmarks):
        for drafter in drafting:
            shares, (colour, _, line) = accepted[benchmark, drafter], styles[drafter]
            look: Any = {"marker": "o", "markersize": 4, "color": colour, "linestyle": line}
            axes.plot(range(1, len(shares) + 1), shares, label=drafter, **look)
        axes.set_xlabel("drafted tokens accepted, at least")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        _finish(axes)
    panels[0].set_ylabel("share of target steps")
    if drafting:
        _legend_below(figure, panels[0])
    return figure


def _at_least(histogram: Sequence[int]) -> list[float]:
    """Share of steps that accepted at least 1, 2, … tokens: [5, 3, 2] -> [0.5, 0.2]."""
    steps = sum(histogram)
    return [sum(histogram[accepted:]) / steps for accepted in range(1, len(histogram))] if steps else []


def time_share(results: Sequence[Row]) -> Figure:
    """Shares of each drafter's decoding time, one stacked bar per drafter and one panel per benchmark."""
    rows, benchmarks, drafters = _overall(results)
    figure, panels = _panels(max(6.0, 4.2 * len(benchmarks)), 1.9 + 0.42 * len(drafters), benchmarks)
    for axes, benchmark in zip(panels, benchmarks):
        left = [0.0] * len(drafters)
        for key, colour in TIME_COLOURS.items():
            shares = [(rows[benchmark, name]["time_share"] or {}).get(key, 0.0) for name in drafters]
            bars = axes.barh(range(len(drafters)), shares, 0.7, left=left, color=colour, label=key)
            labels = [f"{share:.0%}" if share >= 0.06 else "" for share in shares]
            dark = key in ("verify", "accept")
            axes.bar_label(bars, labels, label_type="center", color="white" if dark else "black", fontsize=8)
            left = [start + share for start, share in zip(left, shares)]
        axes.set_xlabel("share of decoding time")
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_yticks(range(len(drafters)), drafters)
        _finish(axes, grid="x")
    panels[0].invert_yaxis()
    _legend_below(figure, panels[0])
    return figure


def _panels(width: float, height: float, titles: Sequence[str]) -> tuple[Figure, Any]:
    """A figure with one titled panel beside another."""
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, len(titles), squeeze=False, sharey=True)[0]
    for axes, title in zip(panels, titles):
        axes.set_title(title)
    return figure, panels


def _overall(results: Sequence[Row]) -> tuple[dict[tuple[str, str], Row], list[str], list[str]]:
    """Rows of whole benchmarks by (benchmark, drafter), and the names of both in order."""
    rows = {(row["benchmark"], row["drafter"]): row for row in results if row["category"] is None}
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in rows))
    return rows, benchmarks, list(dict.fromkeys(drafter for _, drafter in rows))


def _styles(drafters: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Drafter → colour, hatch and line style; the palette's every reuse has its own hatch and line style."""
    styles = product((("", "-"), ("//", "--"), ("xx", ":")), DRAFTER_COLOURS)
    others = [name for name in drafters if name not in BASELINE_GREYS]
    drafting = {name: (colour, *look) for name, (look, colour) in zip(others, cycle(styles))}
    return drafting | {name: (grey, "", "-") for name, grey in BASELINE_GREYS.items()}


def _finish(axes: Axes, grid: str = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), 6, int(figure.get_figwidth() / 1.6))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
