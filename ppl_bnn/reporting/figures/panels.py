"""Panels and pictures, of which pages are made, and the marks that several of them share.

A panel can be drawn alone, as on a narrow screen. A `Picture` has panels, a description and the numbers drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ppl_bnn.core.figures import BAR, BLUE, GUIDE, NOISE, ORANGE, grid_lines
from ppl_bnn.core.names import for_figure
from ppl_bnn.evaluation.comparison import drawing
from ppl_bnn.evaluation.comparison.summary import STANDARD_ERRORS

# In inches; about the width of a panel on a phone.
WIDTH, HEIGHT = 3.6, 2.7
LONGEST_NAME = 24
DOT: Any = {"color": BLUE, "marker": "o", "linestyle": "", "markersize": 6.0}


@dataclass(frozen=True)
class Panel:
    """One panel: its title, a function that draws it, a description in words, and its height in inches."""

    title: str
    draw: Callable[[Axes], None]
    words: str
    height: float = HEIGHT


@dataclass
class Picture:
    """Several panels with a title, a caption and the numbers that are drawn; `missing` is why there are no panels."""

    title: str
    caption: str = ""
    panels: Sequence[Panel] = ()
    rows: InitVar[Iterable[Any]] = ()
    missing: str = ""
    numbers: pd.DataFrame = field(init=False)

    def __post_init__(self, rows: Iterable[Any]) -> None:
        self.numbers = pd.DataFrame.from_records(list(rows))
        self.panels, self.missing = tuple(self.panels), "" if self.panels else self.missing


def rows_of(
    columns: Sequence[str], values: Mapping[str, Iterable[Any]], **labels: Any
) -> Iterator[dict[str, Any]]:
    """Rows of a table, from method -> tuples of the values of these columns."""
    for name, each in values.items():
        for row in each:
            yield {**labels, "method": name, **dict(zip(columns, row, strict=True))}


def listed_values(values: Mapping[str, float]) -> str:
    return "; ".join(f"{name} {value:.2f}" for name, value in values.items())


# --- accuracy against cost --------------------------------------------------------------------------------


def draw_costs(axes: Axes, points: Mapping[str, tuple[float, float, float]], heading: str, time: str) -> None:
    """Draw method -> (seconds, distance to the best, its standard error) with the Pareto front, the best up."""
    columns = zip(*points.values(), strict=True)
    seconds, lags, errors = (np.nan_to_num(np.array(column)) for column in columns)
    front, half = pareto_front(seconds, lags), STANDARD_ERRORS * errors
    low, high = float((lags - half).min()), float((lags + half).max())
    margin = 0.12 * (high - low) or 0.1
    axes.set_xscale("log")
    axes.set_ylim(high + margin, low - margin)
    axes.set_xlim(seconds.min() / 1.8, seconds.max() * 1.8)
    along = [*seconds[front], axes.get_xlim()[1]], [*lags[front], lags[front][-1]]
    label = "front: nothing is better and faster"
    axes.step(*along, where="post", color=ORANGE, linewidth=1.6, label=label, zorder=2)
    axes.vlines(seconds, lags - half, lags + half, **BAR, label="two standard errors of the difference")
    axes.plot(seconds, lags, **DOT, label="a method", zorder=4)
    label_points(axes, seconds, lags, list(points))
    log_ticks(axes, round_duration)
    finish(axes, time, heading)


def pareto_front(seconds: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Indices of the points for which no other point is both faster and better, from fast to slow."""
    order = np.lexsort((losses, seconds))
    best_before = np.minimum.accumulate(np.concatenate([[math.inf], losses[order][:-1]]))
    return order[losses[order] < best_before]


# --- differences ------------------------------------------------------------------------------------------


def forest_panel(
    title: str, entries: Mapping[str, tuple[float, float, bool]], label: str, hollow: str = ""
) -> Panel:
    """Differences with two standard errors: method -> value, standard error, hollow mark or not, from the top.

    `hollow` is the meaning of hollow marks.
    """

    def draw(axes: Axes) -> None:
        values, errors, hollows = map(np.array, zip(*entries.values(), strict=True))
        halves = STANDARD_ERRORS * np.where(np.isfinite(errors), errors, 0.0)
        known = np.isfinite(values)
        reach = 1.12 * (np.abs(values) + halves)[known].max(initial=0.0) or 1.0
        axes.set_xlim(-reach, max(0.15 * reach, 1.12 * (values + halves)[known].max(initial=0.0)))
        axes.axvline(0.0, **GUIDE, zorder=1)
        for place, (value, half, is_hollow) in enumerate(zip(values, halves, hollows, strict=True)):
            if math.isinf(value):
                axes.plot(-reach, place, **DOT | {"marker": "<"}, clip_on=False, zorder=4)
                continue
            if half > 0.0:
                axes.hlines(place, value - half, value + half, **BAR)
            axes.plot(value, place, **DOT, markerfacecolor="none" if is_hollow else BLUE, zorder=3)
        axes.plot([], [], **DOT | {"linestyle": "-"}, label="difference, two standard errors")
        if hollows.any():
            axes.plot([], [], **DOT, markerfacecolor="none", label=hollow)
        names_below(axes, list(entries))
        finish(axes, label)

    doubt = {name: " (not reliable)" if is_hollow else "" for name, (_, _, is_hollow) in entries.items()}
    words = [f"{name} {with_error(*lag)}{doubt[name]}" for name, (*lag, _) in entries.items()]
    described = f"{title}, {' '.join(label.split())}: {'; '.join(words)}."
    return Panel(title, draw, described, height_for(len(entries)))


def draw_values(
    axes: Axes, values: Mapping[str, float], label: str, low: float, high: float, *, log: bool = False
) -> None:
    """Draw a mark for each value, one below the other; values outside the range are drawn as arrows at the edge."""
    axes.set_xscale("log" if log else "linear")
    axes.set_xlim(low, high)
    if log:
        log_ticks(axes, "{:g}".format)
    for place, value in enumerate(values.values()):
        if low <= value <= high:
            axes.plot(value, place, **DOT, zorder=3)
        else:
            at, mark = (low, "<") if value < low else (high, ">")
            axes.plot(at, place, **DOT | {"marker": mark}, clip_on=False, zorder=4)
    axes.plot([], [], **DOT, label="a method")
    names_below(axes, list(values))
    finish(axes, label)


def draw_gaps(axes: Axes, values: Mapping[str, float], floor: float | None) -> None:
    """Draw the distance of mean functions from that of a reference, and the gap that is sampling noise alone."""
    usable = [value for value in [*values.values(), floor or 0.0] if value > 0.0 and math.isfinite(value)]
    low, high = min(usable, default=0.1) / 2.0, max(usable, default=1.0) * 2.0
    draw_values(axes, values, "mean off by (sd of the reference)", low, high, log=True)
    if floor is not None and floor > 0.0:
        axes.axvspan(low, floor, **NOISE, label="sampling noise alone")


def draw_ratios(axes: Axes, values: Mapping[str, float], floor: float | None) -> None:
    """Draw spreads over that of a reference, and the ratios up to which there is only sampling noise."""
    usable = [abs(math.log(value)) for value in [*values.values(), floor or 1.0] if 0.0 < value < math.inf]
    reach = math.exp(max(*usable, math.log(2.0))) * 1.2
    draw_values(axes, values, "spread over that of the reference", 1.0 / reach, reach, log=True)
    if floor is not None:
        ratio = math.exp(abs(math.log(floor)))
        axes.axvspan(1.0 / ratio, ratio, **NOISE, label="sampling noise alone")
    axes.axvline(1.0, **GUIDE, label="that of the reference", zorder=1)


# --- several lines ----------------------------------------------------------------------------------------


def draw_shares(
    axes: Axes, shares: Mapping[str, Callable[[float], float]], rows: int, labels: Sequence[str]
) -> None:
    """Draw the share of rows up to each level, minus the level, of each method.

    If `rows` is positive, the range is drawn that holds 90 % of such shares of independent rows.
    """
    from scipy.stats import binom

    levels = np.linspace(0.01, 0.99, 99)
    if rows:
        low, high = (binom.ppf(tail, rows, levels) / rows - levels for tail in (0.05, 0.95))
        axes.fill_between(levels, low, high, **NOISE, label="90 % if calibrated")
    axes.axhline(0.0, **GUIDE)
    for index, (name, share) in enumerate(shares.items()):
        values = np.array([share(level) for level in levels]) - levels
        axes.plot(levels, values, label=for_figure(name), **line_of(index))
    axes.set_xlim(0.0, 1.0)
    finish(axes, *labels)


def line_of(index: int) -> dict[str, Any]:
    """Line style of the method at this index: lines also differ by their dashes, and 32 of them by both."""
    turn, place = divmod(index, len(drawing.CLASS_COLOURS))
    dashes = ("-", "--", "-.", ":")[(index + turn) % 4]
    return {"color": drawing.CLASS_COLOURS[place], "linestyle": dashes, "linewidth": 1.5}


# --- parts ------------------------------------------------------------------------------------------------


def short(name: str) -> str:
    """A name shortened to fit beside an axis."""
    if len(name) > LONGEST_NAME:
        half = (LONGEST_NAME - 1) // 2
        name = f"{name[:half]}…{name[-half:]}"
    return for_figure(name)


def height_for(entries: int) -> float:
    """Height in inches of a panel with this number of entries."""
    return max(1.5, 0.85 + 0.27 * entries)


def round_duration(seconds: float) -> str:
    """A round number of seconds as text."""
    if seconds < 0.95:
        return f"{1000 * seconds:g} ms"
    return f"{seconds:g} s" if seconds < 950.0 else f"{seconds:.0e} s".replace("e+0", "e")


def with_error(value: float, error: float) -> str:
    """A value with its standard error, as text."""
    known = math.isfinite(error) and error != 0.0
    return f"{value:.3g} (standard error {error:.2g})" if known else f"{value:.3g}"


def finish(axes: Axes, x: str, y: str = "") -> None:
    """Label the axes and style them: grid, no upper and right spines, small labels."""
    grid_lines(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.set_xlabel(x, fontsize=8.5)
    axes.set_ylabel(y, fontsize=8.5)


def names_below(axes: Axes, names: Sequence[str]) -> None:
    """Names down the vertical axis, the first at the top."""
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)


def log_ticks(axes: Axes, text: Callable[[float], str]) -> None:
    """At most six ticks at 1, 2, 5 times a power of ten, as plain text instead of mathematics."""
    low, high = axes.get_xlim()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [tick for power in powers for step in steps if low <= (tick := step * 10.0**power) <= high]
        if len(ticks) <= 6:
            break
    ticks = ticks[:: math.ceil(len(ticks) / 6) or 1]
    axes.set_xticks(ticks, [text(tick) for tick in ticks])
    axes.set_xticks([], minor=True)


# Offsets (in points) and alignments of a name beside its point, the preferred first.
_SIDES = ((5, "left"), (-5, "right"))
_PLACES = (
    *((dx, dy, ha, va) for dx, ha in _SIDES for dy, va in ((4, "bottom"), (-4, "top"))),
    (0, 7, "center", "bottom"),
    (0, -7, "center", "top"),
    *((dx, dy, ha, va) for dx, ha in _SIDES for dy, va in ((12, "bottom"), (-12, "top"))),
)
# Size of a panel without its labels, height of a line and width of a letter, in points.
_WIDE, _TALL, _LINE, _LETTER = 205.0, 150.0, 9.5, 4.5


def label_points(axes: Axes, x: np.ndarray, y: np.ndarray, names: Sequence[str]) -> None:
    """Put names beside points, each where it overlaps others least."""
    left, right = np.log(axes.get_xlim())
    bottom, top = axes.get_ylim()
    at = np.column_stack([(np.log(x) - left) / (right - left) * _WIDE, (y - bottom) / (top - bottom) * _TALL])
    low, high = at - 4.0, at + 4.0
    share = {"left": 0.0, "bottom": 0.0, "center": 0.5, "right": 1.0, "top": 1.0}
    for index in np.argsort(at[:, 0], kind="stable"):
        name = short(str(names[index]))
        size, options = np.array([_LETTER * len(name), _LINE]), []
        for number, (dx, dy, ha, va) in enumerate(_PLACES):
            begin = at[index] + (dx, dy) - size * (share[ha], share[va])
            end = begin + size
            overlaps = np.clip(np.minimum(high, end) - np.maximum(low, begin), 0.0, None).prod(axis=1)
            outside = np.clip([-begin, end - (_WIDE, _TALL)], 0.0, None).sum()
            options.append((overlaps.sum() - overlaps[index] + _LINE * outside, number, begin, end))
        _, number, begin, end = min(options)
        low, high = np.vstack([low, begin]), np.vstack([high, end])
        dx, dy, ha, va = _PLACES[number]
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "zorder": 5}
        axes.annotate(name, (x[index], y[index]), xytext=(dx, dy), ha=ha, va=va, **style)
