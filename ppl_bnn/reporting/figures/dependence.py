"""Partial dependence: the mean function over one input, averaged over the others as they occur."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ppl_bnn.core.figures import BAR, BLUE, INK
from ppl_bnn.core.names import for_figure
from ppl_bnn.evaluation.comparison.drawing import ENOUGH, MOST_POINTS
from ppl_bnn.posterior.convergence import evenly_spaced
from ppl_bnn.posterior.posterior import DRAWN, Posterior
from ppl_bnn.reporting.figures.panels import DOT, line_of

# Points along an input; an input with at most so many values is evaluated at these.
POINTS, FEW = 40, 12
# Draws x points of one prediction.
MOST = 2**21


@dataclass(frozen=True)
class Dependence:
    """Mean functions of draws, `means` (S, G, K), at the values `at` (G,) of an input, averaged over `rows` rows."""

    at: np.ndarray
    means: np.ndarray
    rows: int


def dependence(posterior: Posterior, x: np.ndarray, feature: int, at: np.ndarray, rows: int) -> Dependence:
    """The partial dependence of each draw s on input j of x (N, F), over up to `rows` rows, evenly spaced:

        g_s(v) = 1 / N sum_n E[y | x_n with x_nj = v, w_s]

    For classes these are their probabilities. Draws are those of the networks, at most 1000, of equal weight.

    References
    ----------
    Friedman (2001), Greedy function approximation: a gradient boosting machine, Annals of Statistics 29, section 8.2.
    """
    kind = next(kind for kind in posterior.approximation.kinds if kind in DRAWN)
    some, count = x[evenly_spaced(len(x), rows)], min(ENOUGH, math.prod(posterior.shape))
    size, parts = max(1, MOST // (count * len(some))), []
    for values in np.array_split(at, math.ceil(len(at) / size)):
        points = np.repeat(some[None], len(values), axis=0)
        points[:, :, feature] = values[:, None]
        flat = points.reshape(-1, x.shape[1])
        means = posterior.predict(flat, kind=kind, draws=count).component_mean()
        parts.append(means.reshape(count, len(values), len(some), -1).mean(axis=2))
    return Dependence(at, np.concatenate(parts, axis=1), len(some))


def places_along(values: np.ndarray) -> np.ndarray:
    """Values of an input between its smallest and its largest; all of them if they are few."""
    found = np.unique(values)
    return (
        found
        if len(found) <= FEW
        else np.unique(np.linspace(found[0], found[-1], POINTS).astype(values.dtype))
    )


def draw_dependence(axes: Axes, found: Dependence, outputs: dict[str, int], level: float) -> None:
    """Draw mean and central interval of the draws of each output: curves in bands, or bars at an input's few values.

    `outputs` are label -> number of an output; a single one has the look of a curve of its own.
    """
    few, alone = len(found.at) <= FEW, len(outputs) == 1
    # Bars of several outputs are drawn side by side.
    shift = 0.02 * float(np.ptp(found.at))
    for place, (name, output) in enumerate(outputs.items()):
        draws = found.means[:, :, output]
        lower, upper = np.quantile(draws, [0.5 * (1.0 - level), 0.5 * (1.0 + level)], axis=0)
        at = found.at + (shift * (place - 0.5 * (len(outputs) - 1)) if few else 0.0)
        line: dict[str, Any] = {"color": BLUE, "linewidth": 1.6} if alone else line_of(place)
        label, band = (
            ("mean", f"{100.0 * level:g} % of the mean function") if alone else (for_figure(name), None)
        )
        if few:
            axes.vlines(at, lower, upper, **BAR | {"color": line["color"], "label": band})
            axes.plot(at, draws.mean(axis=0), **DOT | {"color": line["color"], "label": label}, zorder=3)
        else:
            shade = {"color": line["color"], "alpha": 0.4 if alone else 0.2, "linewidth": 0, "label": band}
            axes.fill_between(at, lower, upper, **shade)
            axes.plot(at, draws.mean(axis=0), label=label, **line)
    if few:
        axes.set_xticks(found.at, [f"{value:g}" for value in found.at])


def draw_rug(axes: Axes, values: np.ndarray) -> None:
    """Draw where the rows are, (N,), as strokes at the lower edge."""
    some = values[evenly_spaced(len(values), MOST_POINTS)]
    style: dict[str, Any] = {"color": INK, "alpha": 0.4, "markersize": 5.0, "linestyle": "", "marker": "|"}
    axes.plot(some, np.zeros(len(some)), transform=axes.get_xaxis_transform(), label="rows", **style)
