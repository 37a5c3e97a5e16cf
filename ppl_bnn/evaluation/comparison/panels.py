"""Panels and pictures, the building blocks of pages and figures, and the marks that several of them share.

A panel can be drawn alone, as on a page for a narrow screen. A `Picture` holds panels with a description in words and
the numbers that are drawn. As in `comparison.figures`, pyplot is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.names import for_figure
from ppl_bnn.evaluation.comparison.drawing import BLUE, CLASS_COLOURS, GREY, ORANGE
from ppl_bnn.evaluation.comparison.summary import STANDARD_ERRORS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ppl_bnn.prediction.reliability import Transform

INK, LINES_OF_GRID = "black", "0.92"
# In inches; about the width of a panel on a phone.
WIDTH, HEIGHT = 3.6, 2.7
LONGEST_NAME = 24


@dataclass(frozen=True)
class Panel:
    """One panel of a picture.

    Parameters
    ----------
    title : str
        Title.
    draw : callable
        Draws the panel on given axes.
    words : str
        Description of the panel in words.
    height : float
        Height in inches.
    """

    title: str
    draw: Callable[[Axes], None]
    words: str
    height: float = HEIGHT


@dataclass(frozen=True)
class Picture:
    """Content of one figure.

    Parameters
    ----------
    key, title, caption : str
        Key, title and caption of the figure.
    panels : tuple of Panel
        The panels.
    numbers : pd.DataFrame, optional
        The numbers that are drawn, as a table.
    missing : str
        Why there is nothing to draw, or "".
    """

    key: str
    title: str
    caption: str
    panels: tuple[Panel, ...] = ()
    numbers: pd.DataFrame | None = None
    missing: str = ""


# --- figures ----------------------------------------------------------------------------------------------


def together(picture: Picture) -> Figure:
    """All panels of a picture in one figure, with one legend; without panels, the reason.

    Parameters
    ----------
    picture : Picture
        The picture.

    Returns
    -------
    matplotlib.figure.Figure
    """
    if not picture.panels:
        figure = new_figure(2.0 * WIDTH, HEIGHT)
        figure.text(0.5, 0.5, for_figure(picture.missing), ha="center", va="center", wrap=True, fontsize=9)
        return figure
    count = len(picture.panels)
    columns = min(count, 3 if count != 4 else 2)
    rows = math.ceil(count / columns)
    height = max(panel.height for panel in picture.panels)
    figure = new_figure(columns * WIDTH * 1.1, rows * height * 1.15 + 0.6)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.set_axis_off()
    for axes, panel in zip(grid, picture.panels, strict=False):
        panel.draw(axes)
        axes.set_title(for_figure(panel.title), fontsize=10)
    entries = legend_entries(grid[:count])
    if entries:
        figure.legend(
            entries.values(),
            entries.keys(),
            loc="outside lower center",
            ncols=min(len(entries), columns + 1),
            frameon=False,
            fontsize=9,
        )
    figure.suptitle(for_figure(picture.title), fontsize=12)
    return figure


def legend_entries(panels: Iterable[Axes]) -> dict[str, Any]:
    """Label -> handle, each label once, over several axes."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of the given size in inches, on its own canvas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


# --- accuracy against cost --------------------------------------------------------------------------------


def cost_drawer(
    points: Sequence[tuple[str, float, float, float]],
    heading: str,
    *,
    smaller: bool,
    time: str = "wall time of the fit",
) -> Callable[[Axes], None]:
    """A function that draws accuracy against cost; better is up.

    Parameters
    ----------
    points : sequence of tuple
        (name, seconds, value, standard error of its difference to the best).
    heading : str
        Label of the vertical axis.
    smaller : bool
        Whether smaller values are better.
    time : str
        Label of the time axis.

    Returns
    -------
    callable
        Draws on given axes.
    """

    def draw(axes: Axes) -> None:
        seconds = np.array([point[1] for point in points])
        values = np.array([point[2] for point in points])
        errors = np.nan_to_num(np.array([point[3] for point in points]))
        front = pareto_front(seconds, values if smaller else -values)
        axes.set_xscale("log")
        reach = np.concatenate([values - STANDARD_ERRORS * errors, values + STANDARD_ERRORS * errors])
        low, high = float(reach.min()), float(reach.max())
        margin = 0.12 * (high - low) or 0.1
        axes.set_ylim(*((high + margin, low - margin) if smaller else (low - margin, high + margin)))
        axes.set_xlim(seconds.min() / 1.8, seconds.max() * 1.8)
        axes.step(
            [*seconds[front], axes.get_xlim()[1]],
            [*values[front], values[front][-1]],
            where="post",
            color=ORANGE,
            linewidth=1.6,
            label="front: nothing is better and faster",
            zorder=2,
        )
        axes.vlines(
            seconds,
            values - STANDARD_ERRORS * errors,
            values + STANDARD_ERRORS * errors,
            color=BLUE,
            linewidth=1.3,
            alpha=0.6,
            label="two standard errors of the difference",
            zorder=3,
        )
        axes.plot(seconds, values, "o", color=BLUE, markersize=5.5, label="a method", zorder=4)
        label_points(axes, seconds, values, [point[0] for point in points])
        log_ticks(axes, "x", round_duration)
        axes.set_xlabel(time)
        axes.set_ylabel(heading)
        plain_axes(axes)

    return draw


def pareto_front(seconds: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Indices of the points for which no other point is both faster and better, from fast to slow.

    Parameters
    ----------
    seconds, losses : np.ndarray
        Seconds and losses of the points; smaller is better.

    Returns
    -------
    np.ndarray
    """
    order = np.lexsort((losses, seconds))
    kept, least = [], math.inf
    for index in order:
        if losses[index] < least:
            kept.append(int(index))
            least = float(losses[index])
    return np.array(kept)


# --- differences ------------------------------------------------------------------------------------------


def forest_panel(
    heading: str, entries: Sequence[tuple[str, float, float, bool]], label: str, hollow: str = ""
) -> Panel:
    """A panel of values with their standard errors, one line each.

    Parameters
    ----------
    heading : str
        Title of the panel.
    entries : sequence of tuple
        (name, value, standard error, hollow), drawn from the top.
    label : str
        Label of the axis.
    hollow : str
        Meaning of hollow marks.

    Returns
    -------
    Panel
    """

    def draw(axes: Axes) -> None:
        finite = [
            abs(value) + STANDARD_ERRORS * (error if math.isfinite(error) else 0.0)
            for _, value, error, _ in entries
            if math.isfinite(value)
        ]
        reach = 1.12 * max(finite, default=0.0) or 1.0
        positive = max(
            (
                value + STANDARD_ERRORS * (error if math.isfinite(error) else 0.0)
                for _, value, error, _ in entries
                if math.isfinite(value)
            ),
            default=0.0,
        )
        axes.set_xlim(-reach, max(0.15 * reach, 1.12 * positive))
        axes.axvline(0.0, color=GREY, linewidth=1.0, linestyle="--", zorder=1)
        for place, (_, value, error, open_mark) in enumerate(entries):
            if math.isinf(value):
                axes.plot(-reach, place, "<", color=BLUE, markersize=6.0, clip_on=False, zorder=4)
                continue
            if error > 0.0:
                half = STANDARD_ERRORS * error
                axes.hlines(place, value - half, value + half, color=BLUE, linewidth=1.6, alpha=0.6, zorder=2)
            axes.plot(
                value,
                place,
                "o",
                color=BLUE,
                markersize=6.0,
                markerfacecolor="none" if open_mark else BLUE,
                zorder=3,
            )
        axes.plot([], [], "o-", color=BLUE, markersize=6.0, label="difference, two standard errors")
        if any(entry[3] for entry in entries):
            axes.plot([], [], "o", color=BLUE, markersize=6.0, markerfacecolor="none", label=hollow)
        names_below(axes, [entry[0] for entry in entries])
        axes.set_xlabel(label)
        plain_axes(axes)

    words = f"{heading}, {label.replace(chr(10), ' ')}: " + "; ".join(
        f"{name} {with_error(value, error)}{' (not to be relied on)' if open_mark else ''}"
        for name, value, error, open_mark in entries
    )
    return Panel(heading, draw, words + ".", height_for(len(entries)))


# --- the gap to a reference -------------------------------------------------------------------------------


def draw_gaps(axes: Axes, names: Sequence[str], values: Sequence[float], floor: float | None) -> None:
    """Draw the distance of mean functions from that of a reference, and the gap that is sampling noise alone.

    Parameters
    ----------
    axes : Axes
        The axes to draw on.
    names : sequence of str
        Names of the methods.
    values : sequence of float
        Their gaps.
    floor : float or None
        The gap below which there is only sampling noise, if known.
    """
    usable = [value for value in [*values, floor or 0.0] if value > 0.0 and math.isfinite(value)]
    low, high = min(usable, default=0.1) / 2.0, max(usable, default=1.0) * 2.0
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    if floor is not None and floor > 0.0:
        axes.axvspan(low, floor, color=GREY, alpha=0.22, linewidth=0, label="sampling noise alone")
    draw_marks_inside(axes, values, low, high)
    log_ticks(axes, "x", lambda value: f"{value:g}")
    names_below(axes, names)
    axes.set_xlabel("mean off by (sd of the reference)")
    plain_axes(axes)


def draw_ratios(axes: Axes, names: Sequence[str], values: Sequence[float], floor: float | None) -> None:
    """Draw spreads over that of a reference, and the ratios up to which there is only sampling noise.

    Parameters
    ----------
    axes : Axes
        The axes to draw on.
    names : sequence of str
        Names of the methods.
    values : sequence of float
        Their ratios.
    floor : float or None
        The ratio that sampling noise alone reaches on either side, if known.
    """
    usable = [abs(math.log(value)) for value in [*values, floor or 1.0] if 0.0 < value < math.inf]
    reach = math.exp(max(*usable, math.log(2.0))) * 1.2
    axes.set_xscale("log")
    axes.set_xlim(1.0 / reach, reach)
    if floor is not None:
        ratio = math.exp(abs(math.log(floor)))
        axes.axvspan(1.0 / ratio, ratio, color=GREY, alpha=0.22, linewidth=0, label="sampling noise alone")
    axes.axvline(1.0, color=GREY, linewidth=1.0, linestyle="--", label="that of the reference", zorder=1)
    draw_marks_inside(axes, values, 1.0 / reach, reach)
    log_ticks(axes, "x", lambda value: f"{value:g}")
    names_below(axes, names)
    axes.set_xlabel("spread over that of the reference")
    plain_axes(axes)


def draw_coverages(axes: Axes, values: Mapping[str, Transform], counted: bool) -> None:
    """Draw the share of targets inside central intervals minus the nominal level, at every level.

    Parameters
    ----------
    axes : Axes
        The axes to draw on.
    values : mapping of str to Transform
        Method -> transforms of the targets.
    counted : bool
        Whether targets are counts, whose intervals may hold more than the nominal level.
    """
    _draw_shares(axes, values, lambda each, level: each.covered(level), band=not counted)
    axes.set_xlabel("probability of the interval")
    axes.set_ylabel("share inside, minus that")


def draw_transforms(axes: Axes, values: Mapping[str, Transform]) -> None:
    """Draw the distribution of each probability integral transform minus the uniform one; zero if calibrated.

    Parameters
    ----------
    axes : Axes
        The axes to draw on.
    values : mapping of str to Transform
        Method -> transforms of the targets.
    """
    _draw_shares(axes, values, lambda each, level: float(np.mean(each.pit <= level)), band=True)
    axes.set_xlabel("predicted probability of less\nthan what was observed (PIT)")
    axes.set_ylabel("share of rows below, minus that")


def _draw_shares(
    axes: Axes, values: Mapping[str, Transform], share: Callable[[Transform, float], float], band: bool
) -> None:
    """Draw shares of rows minus their nominal level, with the sampling range for this number of independent rows."""
    from scipy.stats import binom

    levels = np.linspace(0.01, 0.99, 99)
    if band:
        rows = min(len(each.pit) for each in values.values())
        low, high = (binom.ppf(tail, rows, levels) / rows - levels for tail in (0.05, 0.95))
        axes.fill_between(
            levels, low, high, color=GREY, alpha=0.18, linewidth=0, label="90 % where calibrated"
        )
    axes.axhline(0.0, color=GREY, linewidth=1.0, linestyle="--")
    for index, (name, each) in enumerate(values.items()):
        shares = np.array([share(each, level) for level in levels])
        axes.plot(levels, shares - levels, label=for_figure(name), **line_of(index))
    axes.set_xlim(0.0, 1.0)
    plain_axes(axes)


def line_of(index: int) -> dict[str, Any]:
    """Line style of the method at this index: lines also differ by their dashes, and 32 of them by both."""
    return {
        "color": CLASS_COLOURS[index % len(CLASS_COLOURS)],
        "linestyle": ("-", "--", "-.", ":")[(index + index // len(CLASS_COLOURS)) % 4],
        "linewidth": 1.5,
    }


def draw_marks_inside(axes: Axes, values: Sequence[float], low: float, high: float) -> None:
    """Draw a mark for each value, one below the other; values outside the range are drawn at the edge."""
    for place, value in enumerate(values):
        if low <= value <= high:
            axes.plot(value, place, "o", color=BLUE, markersize=6.5, zorder=3)
        else:
            # A value outside the axis is drawn at the edge on its side.
            at, mark = (low, "<") if value < low else (high, ">")
            axes.plot(at, place, mark, color=BLUE, markersize=7.0, clip_on=False, zorder=4)
    axes.plot([], [], "o", color=BLUE, markersize=6.5, label="a method")


# --- pieces -----------------------------------------------------------------------------------------------


def short(name: str) -> str:
    """A name shortened to fit beside an axis."""
    if len(name) > LONGEST_NAME:
        half = (LONGEST_NAME - 1) // 2
        name = f"{name[:half]}…{name[-half:]}"
    return for_figure(name)


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A table of these rows."""
    import pandas as pd

    return pd.DataFrame.from_records(list(rows))


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
    if not math.isfinite(error) or error == 0.0:
        return f"{value:.3g}"
    return f"{value:.3g} (standard error {error:.2g})"


def plain_axes(axes: Axes) -> None:
    """Style axes: grid, no upper and right spines, small labels."""
    axes.grid(color=LINES_OF_GRID, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(8.5)
    axes.yaxis.label.set_fontsize(8.5)


def names_below(axes: Axes, names: Sequence[str]) -> None:
    """Names down the vertical axis, the first at the top."""
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)


def log_ticks(axes: Axes, which: str, text: Callable[[float], str]) -> None:
    """At most six ticks at 1, 2, 5 times a power of ten, as plain text instead of mathematics."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 6:
            break
    else:
        ticks = ticks[:: math.ceil(len(ticks) / 6)]
    axis.set_ticks(ticks, [text(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def label_points(axes: Axes, x: np.ndarray, y: np.ndarray, names: Sequence[str]) -> None:
    """Put names beside points, each where it overlaps others least.

    Parameters
    ----------
    axes : Axes
        The axes to draw on.
    x, y : np.ndarray
        The points.
    names : sequence of str
        Their names. Overlaps are measured in points (1/72 inch), for a panel of the usual size.
    """
    wide, tall, line, letter = 205.0, 150.0, 9.5, 4.5
    left, right = np.log(axes.get_xlim())
    bottom, top = axes.get_ylim()
    at = np.column_stack([(np.log(x) - left) / (right - left) * wide, (y - bottom) / (top - bottom) * tall])
    boxes = [(px - 4.0, py - 4.0, px + 4.0, py + 4.0) for px, py in at]
    for index in np.argsort(at[:, 0], kind="stable"):
        name = short(str(names[index]))
        width = letter * len(name)
        options = []
        for dx, dy, ha, va in (
            (5, 4, "left", "bottom"),
            (5, -4, "left", "top"),
            (-5, 4, "right", "bottom"),
            (-5, -4, "right", "top"),
            (0, 7, "center", "bottom"),
            (0, -7, "center", "top"),
            (5, 12, "left", "bottom"),
            (5, -12, "left", "top"),
            (-5, 12, "right", "bottom"),
            (-5, -12, "right", "top"),
        ):
            px, py = at[index] + (dx, dy)
            x0 = px if ha == "left" else px - width if ha == "right" else px - 0.5 * width
            y0 = py if va == "bottom" else py - line if va == "top" else py - 0.5 * line
            box = (x0, y0, x0 + width, y0 + line)
            crowded = sum(_overlap(box, other) for number, other in enumerate(boxes) if number != index)
            outside = max(0.0, -x0) + max(0.0, box[2] - wide) + max(0.0, -y0) + max(0.0, box[3] - tall)
            options.append((crowded + line * outside, len(options), (dx, dy, ha, va), box))
        _, _, (dx, dy, ha, va), box = min(options)
        boxes.append(box)
        axes.annotate(
            name,
            (x[index], y[index]),
            xytext=(dx, dy),
            textcoords="offset points",
            ha=ha,
            va=va,
            fontsize=8,
            color=INK,
            zorder=5,
        )


def _overlap(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    wide = min(first[2], second[2]) - max(first[0], second[0])
    tall = min(first[3], second[3]) - max(first[1], second[1])
    return max(wide, 0.0) * max(tall, 0.0)
