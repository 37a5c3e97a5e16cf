"""The figure of a grade: errors of the mean and ratios of standard deviations along the grid."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.figures import BLUE, GUIDE, NOISE, grid_lines, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ppl_bnn.references.grade import Grade

DOT: Any = {"color": BLUE, "marker": "o", "linestyle": "", "markersize": 4.0, "zorder": 3}
# Ratios outside this range are drawn as triangles at its ends.
RATIOS = (0.1, 10.0)


def figure_of(grade: Grade) -> Figure:
    """Errors of the mean above, ratios of standard deviations below, one column for each region."""
    figure = new_figure(3.2 * len(grade.errors) + 0.8, 6.0)
    panels: Any = figure.subplots(2, len(grade.errors), squeeze=False, sharey="row")
    for column, region in enumerate(grade.errors):
        draw_means(panels[0, column], grade, region)
        draw_spreads(panels[1, column], grade, region)
        panels[0, column].set_title(region)
        panels[1, column].set_xlabel("first input")
        for axes in panels[:, column]:
            grid_lines(axes)
    panels[0, 0].set_ylabel("error of the mean\n(reference sd)")
    panels[1, 0].set_ylabel("sd / reference sd")
    figure.suptitle(f"Against {grade.reference}; band: noise of the reference", fontsize="medium")
    return figure


def draw_means(axes: Axes, grade: Grade, region: str) -> None:
    """Errors of the mean in standard deviations of the reference against the first input; a band for noise."""
    # Halves of the draws differ by twice the standard error of the mean of all.
    noise = grade.figures[region]["mean_floor"]
    axes.axhspan(-noise, noise, **NOISE, label="noise of the reference")
    axes.axhline(0.0, **GUIDE, zorder=1)
    axes.plot(_places(grade, region), grade.errors[region]["mean"].ravel(), **DOT, label="an output")


def draw_spreads(axes: Axes, grade: Grade, region: str) -> None:
    """Ratios of standard deviations against the first input, on a logarithmic scale."""
    ratios, places = grade.errors[region]["sd"].ravel(), _places(grade, region)
    axes.set_yscale("log")
    reach = _reach(grade)
    axes.set_ylim(1.0 / reach, reach)
    axes.axhline(1.0, **GUIDE, zorder=1)
    inside = (ratios >= RATIOS[0]) & (ratios <= RATIOS[1])
    axes.plot(places[inside], ratios[inside], **DOT, label="an output")
    for beyond, mark, end in ((ratios < RATIOS[0], "v", 1.0 / reach), (ratios > RATIOS[1], "^", reach)):
        if beyond.any():
            ends = np.full(np.count_nonzero(beyond), end)
            axes.plot(places[beyond], ends, **DOT | {"marker": mark}, clip_on=False)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if 1.0 / reach <= tick <= reach]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _reach(grade: Grade) -> float:
    """The largest ratio of the scale, one for all regions."""
    ratios = np.concatenate([errors["sd"].ravel() for errors in grade.errors.values()])
    within = ratios[(ratios >= RATIOS[0]) & (ratios <= RATIOS[1])]
    return 1.15 * max([2.0, *within, *(1.0 / within)])


def _places(grade: Grade, region: str) -> np.ndarray:
    """The first input of each output of a region."""
    return np.repeat(grade.inputs[region], math.prod(grade.errors[region]["mean"].shape[1:]))
