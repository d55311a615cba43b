"""Charts as inline SVG, which need no scripts: bars, stacked bars and lines.

Horizontal places are percentages of the width and text has a fixed size, so that a chart of any width stays readable.
Each mark has a `<title>`, the value that browsers show on hover. Colours are classes of page.css: `c0` … `c7` and the
greys of the baselines, `g0` and `g1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

COLOURS = 8
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 2", "9 3 2 3 2 3")
"""Of each colour; lines whose colours look alike to somebody differ in their dashes."""

BASELINES = {"vanilla": "g0", "transformers": "g1"}
HEIGHT, LEFT, RIGHT = 180, 11.0, 98.0  # of a line chart: pixels of the plot, and its sides in percent
TOP, BOTTOM = 8, 34


@dataclass(frozen=True)
class Bar:
    """One bar: a name, its colour class, its length with an interval, and what is written beside the name."""

    name: str
    colour: str
    value: float | None
    interval: Sequence[float] | None
    shown: str


@dataclass(frozen=True)
class Line:
    """One line: a name, its colour class, the dashes, and points (place, value)."""

    name: str
    colour: str
    dashes: str
    points: Sequence[tuple[float, float]]


def text(value: object) -> str:
    """Escaped for HTML, in an element or an attribute."""
    return escape(str(value), quote=True)


def name_html(value: object) -> str:
    """A name that comes from data, whose direction of writing does not change the text around it."""
    return f"<bdi>{text(value)}</bdi>"


def drafter_looks(drafters: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Drafter → colour class and dashes, another pair for each of 64; baselines are grey and leave the colours to the
    others."""
    looks = {name: (grey, "") for name, grey in BASELINES.items()}
    others = [name for name in dict.fromkeys(drafters) if name not in BASELINES]
    places = {name: divmod(index, COLOURS) for index, name in enumerate(others)}
    return looks | {name: (f"c{own}", DASHES[(own + again) % COLOURS]) for name, (again, own) in places.items()}


def bars(rows: Sequence[Bar], most: float, one: bool = False) -> str:
    """A list of bars, each below its name; `most` is the longest, `one` draws a line at 1."""
    items = []
    for row in rows:
        title = f"{row.name}: {row.shown}"
        parts = []
        if row.value is not None:
            parts.append(f'<rect class="bar" x="0" y="1" width="{percent(row.value / most)}" height="12"/>')
        if row.interval is not None:
            low, high = (percent(end / most) for end in row.interval)
            parts.append(f'<line class="interval" x1="{low}" x2="{high}" y1="7" y2="7"/>')
            parts += [f'<line class="interval" x1="{end}" x2="{end}" y1="3" y2="11"/>' for end in (low, high)]
        if one:
            parts.append(f'<line class="one" x1="{percent(1 / most)}" x2="{percent(1 / most)}" y1="0" y2="14"/>')
        parts.append('<rect class="hit" x="0" y="0" width="100%" height="14"/>')
        items.append(
            f'<li class="{row.colour}"><span>{name_html(row.name)}</span><span class="value">{text(row.shown)}</span>'
            f'<svg class="chart" aria-hidden="true"><g><title>{text(title)}</title>{"".join(parts)}</g></svg></li>'
        )
    return f'<ul class="bars">{"".join(items)}</ul>'


def stacked(rows: Sequence[tuple[str, Mapping[str, float] | None]], colours: Mapping[str, str]) -> str:
    """A list of bars of shares that sum to 1, of each name; `colours` has the class of each part."""
    items = []
    for name, shares in rows:
        start, parts = 0.0, []
        for part, share in (shares or {}).items():
            box = f'x="{percent(start)}" width="{percent(share)}" y="1" height="12"'
            title = f"{name}: {part} {share:.1%}"
            parts.append(f'<g class="{colours[part]}"><title>{text(title)}</title><rect class="bar" {box}/></g>')
            start += share
        svg = f'<svg class="chart" aria-hidden="true">{"".join(parts)}</svg>'
        items.append(f"<li><span>{name_html(name)}</span>{svg}</li>")
    return f'<ul class="bars">{"".join(items)}</ul>'


def lines(label: str, drawn: Sequence[Line], axis: str, form: str, places: Mapping[float, str], top: float) -> str:
    """A chart of lines over an axis from 0 to `top`.

    label    says what it shows, for who cannot see it
    axis     what the horizontal axis counts
    form     format of a value, as `.0%`
    places   the horizontal places that points have, in order, and how each is written
    """
    order = list(places)
    at = {place: LEFT + 3 + (RIGHT - LEFT - 6) * index / max(1, len(order) - 1) for index, place in enumerate(order)}
    parts = []
    for step in range(5):
        y = height_of(step / 4, 1)
        parts.append(f'<line class="grid" x1="{LEFT}%" x2="{RIGHT}%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 1}%" y="{y + 4}" text-anchor="end">{format(top * step / 4, form)}</text>')
    every = -(-len(order) // 8)
    for place in order[::every]:
        parts.append(
            f'<text x="{at[place]:.2f}%" y="{TOP + HEIGHT + 15}" text-anchor="middle">{text(places[place])}</text>'
        )
    middle, below = (LEFT + RIGHT) / 2, TOP + HEIGHT + BOTTOM - 2
    parts.append(f'<text x="{middle}%" y="{below}" text-anchor="middle">{text(axis)}</text>')
    for line in drawn:
        dots = [(at[place], height_of(value, top), place, value) for place, value in line.points]
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        parts.append(f'<g class="{line.colour}">')
        parts += [
            f'<line class="line" x1="{a[0]:.2f}%" y1="{a[1]}" x2="{b[0]:.2f}%" y2="{b[1]}"{dashes}/>'
            for a, b in pairwise(dots)
        ]
        for x, y, place, value in dots:
            title = f"{line.name}\n{axis} {places[place]}: {format(value, form)}"
            circles = f'<circle class="hit" cx="{x:.2f}%" cy="{y}" r="11"/>'
            circles += f'<circle class="dot" cx="{x:.2f}%" cy="{y}" r="4"/>'
            parts.append(f"<g><title>{text(title)}</title>{circles}</g>")
        parts.append("</g>")
    size = TOP + HEIGHT + BOTTOM
    return f'<svg class="chart" role="img" aria-label="{text(label)}" height="{size}">{"".join(parts)}</svg>'


def legend(drawn: Sequence[tuple[str, str, str]]) -> str:
    """A legend of lines: names with their colour class and dashes."""
    items = []
    for name, colour, dashes in drawn:
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        mark = f'<line class="line" x1="0" x2="28" y1="5" y2="5"{dash}/><circle class="dot" cx="14" cy="5" r="4"/>'
        items.append(f'<li class="{colour}"><svg aria-hidden="true">{mark}</svg>{name_html(name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def boxes(drawn: Mapping[str, str]) -> str:
    """A legend of filled boxes: name → colour class."""
    mark = '<svg aria-hidden="true"><rect class="bar" width="28" height="10"/></svg>'
    items = "".join(f'<li class="{colour}">{mark}{name_html(name)}</li>' for name, colour in drawn.items())
    return f'<ul class="legend">{items}</ul>'


def percent(share: float) -> str:
    """A share of the width, which never leaves it: 0.5 -> `50%`."""
    return f"{100 * min(max(share, 0.0), 1.0):.4g}%"


def height_of(value: float, top: float) -> float:
    """The vertical place of a value in a line chart, in pixels; 0 is at the bottom of the plot, `top` at its top."""
    return round(TOP + HEIGHT * (1 - value / top), 1)


def rounded_top(values: Iterable[float]) -> float:
    """The end of an axis that holds the values: 1, 2, 3, 4, 6, 8, 12, 16, 24, …."""
    highest = max([1.0, *values])
    step = 1.0
    while step < highest:
        step += max(1.0, 2 ** (int(step).bit_length() - 2))
    return step
