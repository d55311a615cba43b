"""Three pictures of an evaluation, from the content of `report.json`: speedup, accepted drafts, time shares.

One panel per benchmark. Speedup and time shares have one horizontal bar per drafter, so that the names and figures of
any number of drafters stand beside their own bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from draft_heads.inference.evaluation.metrics import shown_names

Row = dict[str, Any]
Report = dict[str, Any]

BASELINE_GREYS = {"vanilla": "#8c8c8c", "transformers": "#bfbfbf"}
# Okabe and Ito's palette, distinguishable with every kind of colour vision.
DRAFTER_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#f0e442")
TIME_COLOURS = {"draft": "#e69f00", "verify": "#0072b2", "accept": "#009e73", "other": "#c8c8c8"}
TIME_LABELS = {"draft": "drafting", "verify": "target's forward", "accept": "accepting", "other": "other"}
UNKNOWN = "not known: steps that a GPU computes beside the host, or that are none"


def speedup(report: Report) -> Figure:
    """Gamma and beta of every drafter, gamma with its interval; a line at the plain loop's 1."""
    rows, benchmarks, drafters = _overall(report["results"])
    styles, names = _styles(drafters), _labels(report)
    bars = [names[drafter] for drafter in drafters]
    figure, panels = _panels("Speedup over decoding without drafts", benchmarks, bars)
    for axes, benchmark in zip(panels, benchmarks):
        for place, drafter in enumerate(drafters):
            row, (colour, hatch, *_) = rows[benchmark, drafter], styles[drafter]
            if row["gamma"] is None:
                continue
            low, high = row["gamma_ci95"] or 2 * [row["gamma"]]
            error = [[max(row["gamma"] - low, 0)], [max(high - row["gamma"], 0)]]
            axes.barh(place, row["gamma"], 0.7, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
            axes.errorbar(row["gamma"], place, xerr=error, color="#333333", capsize=3, linewidth=1)
            text = f"γ {row['gamma']:.2f}   β {row['beta']:.2f}"
            end = max(high, row["gamma"]), place
            beside: Any = {"xytext": (6, 0), "textcoords": "offset points"}
            beside["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the dashed line
            axes.annotate(text, end, va="center", fontsize=8, **beside)
        axes.axvline(1.0, color="#333333", linewidth=0.8, linestyle="--")
        axes.set_xlim(0, 1.55 * max([1.0, *((row["gamma_ci95"] or [row["gamma"] or 0])[-1] for row in rows.values())]))
        axes.set_xlabel("γ")
    plain = report["settings"].get("plain_loop", "vanilla")
    interval = ", with the 95 % interval over questions" if any(row["gamma_ci95"] for row in rows.values()) else ""
    _caption(
        figure,
        f"γ: how many times faster than without drafts ({plain}, dashed line){interval}.",
        "β: new tokens for each forward of the target; 1 without drafts.",
    )
    return figure


def accepted_length(report: Report) -> Figure:
    """Share of target steps that accepted at least a drafted tokens."""
    rows, benchmarks, drafters = _overall(report["results"])
    accepted = {key: _at_least(row["accept_length_histogram"]) for key, row in rows.items()}
    drafting = [name for name in drafters if any(accepted[benchmark, name] for benchmark in benchmarks)]
    styles, names = _styles(drafters), _labels(report)
    figure, panels = _panels("How many drafted tokens a forward of the target accepts", benchmarks)
    for axes, benchmark in zip(panels, benchmarks):
        for drafter in drafting:
            shares, (colour, _, line, marker) = accepted[benchmark, drafter], styles[drafter]
            look: Any = {"marker": marker, "markersize": 4, "color": colour, "linestyle": line}
            axes.plot(range(1, len(shares) + 1), shares, label=names[drafter], **look)
        axes.set_xlabel("accepted tokens, at least")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    panels[0].set_ylabel("share of the forwards after the prefill")
    if drafting:
        _legend_below(figure, panels[0])
    return figure


def _at_least(histogram: Sequence[int]) -> list[float]:
    """Share of steps that accepted at least 1, 2, … tokens: [5, 3, 2] -> [0.5, 0.2]."""
    steps = sum(histogram)
    return [sum(histogram[accepted:]) / steps for accepted in range(1, len(histogram))] if steps else []


def time_share(report: Report) -> Figure:
    """Shares of each drafter's decoding time, one stacked bar per drafter."""
    rows, benchmarks, drafters = _overall(report["results"])
    names = [_labels(report)[drafter] for drafter in drafters]
    figure, panels = _panels("Where the time of an answer goes", benchmarks, names)
    for axes, benchmark in zip(panels, benchmarks):
        left = [0.0] * len(drafters)
        for key, colour in TIME_COLOURS.items():
            shares = [(rows[benchmark, name]["time_share"] or {}).get(key, 0.0) for name in drafters]
            bars = axes.barh(range(len(drafters)), shares, 0.7, left=left, color=colour, label=TIME_LABELS[key])
            labels = [f"{share:.0%}" if share >= 0.08 else "" for share in shares]
            dark = key in ("verify", "accept")
            axes.bar_label(bars, labels, label_type="center", color="white" if dark else "black", fontsize=8)
            left = [start + share for start, share in zip(left, shares)]
        for place, total in enumerate(left if any(left) else []):
            if not total:
                axes.text(0.01, place, "not timed apart", va="center", fontsize=8)
        if not any(left):
            axes.text(0.5, 0.5, UNKNOWN, transform=axes.transAxes, ha="center", va="center")
        axes.set_xlabel("share of decoding time")
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    _legend_below(figure, panels[0])
    return figure


def _panels(title: str, benchmarks: Sequence[str], drafters: Sequence[str] = ()) -> tuple[Figure, Any]:
    """A figure with a panel beside another for each benchmark; `drafters` name the bars, if there are any, from the
    top."""
    names = 0.08 * max(map(len, drafters), default=0)
    size = max(6.0, 4.2 * len(benchmarks) + names), 1.9 + 0.34 * len(drafters) if drafters else 4.4
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(benchmarks), squeeze=False, sharey=True)[0]
    for axes, benchmark in zip(panels, benchmarks):
        axes.set_title(_literal(benchmark), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    if drafters:
        panels[0].set_yticks(range(len(drafters)), drafters)
        panels[0].invert_yaxis()
    return figure, panels


def _overall(results: Sequence[Row]) -> tuple[dict[tuple[str, str], Row], list[str], list[str]]:
    """Rows of whole benchmarks by (benchmark, drafter), and the names of both in order."""
    rows = {(row["benchmark"], row["drafter"]): row for row in results if row["category"] is None}
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in rows))
    return rows, benchmarks, list(dict.fromkeys(drafter for _, drafter in rows))


def _labels(report: Report) -> dict[str, str]:
    """Drafter → how pictures name it."""
    return {drafter: _literal(name) for drafter, name in shown_names(report["results"]).items()}


def _literal(name: str) -> str:
    """A name that matplotlib shows as it is: `$` begins no formula, and a leading `_` hides it from no legend."""
    escaped = name.replace("$", r"\$")
    return f"\N{ZERO WIDTH SPACE}{escaped}" if name.startswith("_") else escaped


def _styles(drafters: Sequence[str]) -> dict[str, tuple[str, str, str, str]]:
    """Drafter → colour, hatch, line style and marker; the palette's every reuse has a look of its own."""
    styles = product("os^", (("", "-"), ("//", "--"), ("xx", ":")), DRAFTER_COLOURS)
    others = [name for name in drafters if name not in BASELINE_GREYS]
    drafting = {name: (colour, *look, marker) for name, (marker, look, colour) in zip(others, cycle(styles))}
    return drafting | {name: (grey, "", "-", "o") for name, grey in BASELINE_GREYS.items()}


def _caption(figure: Figure, *sentences: str) -> None:
    """Sentences below the panels, in lines as wide as the figure."""
    lines = [line for sentence in sentences for line in wrap(sentence, int(13 * figure.get_figwidth()))]
    figure.set_figheight(figure.get_figheight() + 0.17 * len(lines))
    figure.supxlabel("\n".join(lines), fontsize=8, x=0.02, ha="left")


def _legend_below(figure: Figure, axes: Axes) -> None:
    """The legend of all panels, which share it, in rows to be read from left to right."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), int(figure.get_figwidth() / (0.6 + 0.07 * max(map(len, labels))))))
    figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(labels) // columns))
    order = [place for column in range(columns) for place in range(column, len(labels), columns)]  # it fills columns
    handles, labels = [handles[place] for place in order], [labels[place] for place in order]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
