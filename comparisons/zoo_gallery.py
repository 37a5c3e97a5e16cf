"""The gallery of the zoo: each model fitted to data small enough to be seen, and one picture of what the fit says.

The data are made for the picture (a few dozen rows of one or two inputs, wherever the model allows), and each caption
says of what. Each model is fitted by a method that suits it, NUTS where that is feasible; the caption names the method
with the verdict of `bnn.diagnose`, whatever that is. Colours: Okabe and Ito's.

    python comparisons/zoo_gallery.py [MODEL ...] [--tiny] [--out DIR]

Without names it draws the models that have no figure yet; with names those, again. A figure and its caption are written
as soon as they are there, so that a run that was stopped goes on with the next model. Figures and `captions.json` go to
models/gallery, and the section of models/README.md between its two marks is written again from all captions; with
--out, or --tiny (into a temporary folder), README.md is left as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import active_learning as asking
import numpy as np
from claims import mean
from evidence_framework import ALL, FLAT, mixture
from study import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NOT_CONVERGED,
    ORANGE,
    PINK,
    RHAT,
    SKY,
    VERMILION,
    new_figure,
    panels,
    read_table,
    unconverged_handle,
)

import ppl_bnn as bnn
from ppl_bnn.evaluation.comparison.drawing import draw_class_map, draw_classes, draw_curve, grid_points

MODELS = bnn.zoo.MODELS_FOLDER
BEGIN, END = "<!-- gallery: begin -->", "<!-- gallery: end -->"
# Half of the central 90 % of a normal, in standard deviations.
NINETY = 1.6448536269514722
# Readable where a page shows the 640 pixels at 400.
STYLE = {
    "font.size": 13,
    "axes.titlesize": 13,
    "axes.labelsize": 13,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "legend.fontsize": 12,
    "legend.frameon": False,
    "legend.handlelength": 1.5,
    "legend.columnspacing": 1.2,
}
COLOURS = 192
SEED = 0
LENET_SIGMA = 5.0


@dataclass(frozen=True)
class Sizes:
    """How much is computed. steps: the most that an optimiser takes. grid, places: along an axis of a curve, of a map.

    images: training rows of the figures of digits. sequential: chains one after the other, in this process.
    """

    ppl: str = "numpyro"
    chains: int = 4
    warmup: int = 500
    draws: int = 800
    tree_depth: int = 10
    steps: int = 20_000
    grid: int = 200
    places: int = 80
    images: int = 1200
    sequential: bool = False


FULL = Sizes()
# In Pyro, because nothing is compiled there.
TINY = Sizes("pyro", 2, 6, 8, 2, 20, 12, 6, 40, True)


@dataclass(frozen=True)
class Drawn:
    """What a model comes to: its figure; what is seen, in sentences; and the method with its verdict."""

    figure: Any
    caption: str
    fitted: str


# --- fitting ------------------------------------------------------------------------------------------


def fitted(model: Any, x: Any, y: np.ndarray, method: Any, seed: int = SEED) -> Any:
    with warnings.catch_warnings():
        # Pixels at the rim that are blank in every image.
        warnings.filterwarnings("ignore", message=".*have no variance")
        return bnn.fit(model, x, y, method, seed=seed, device="cpu", progress=sys.stderr.isatty())


def told(posterior: Any, how: str) -> str:
    """The method in words, with the verdict of `bnn.diagnose` and, of chains, the worst R-hat in function space."""
    found = bnn.diagnose(posterior)
    rhat = found.figures.get("rhat", math.nan)
    return f"{how}: {found.verdict}" + (f" (R-hat {rhat:.3f})" if math.isfinite(rhat) else "")


def sampled(sizes: Sizes, model: Any, x: Any, y: np.ndarray, **settings: Any) -> tuple[Any, str]:
    """The posterior by NUTS and what is said of it."""
    method = bnn.NUTS(
        **{
            "ppl": sizes.ppl,
            "chains": sizes.chains,
            "warmup": sizes.warmup,
            "draws": sizes.draws,
            "max_tree_depth": sizes.tree_depth,
            "chain_method": "sequential" if sizes.sequential else "auto",
            **settings,
        }
    )
    posterior = fitted(model, x, y, method)
    return posterior, told(posterior, f"NUTS, {method.chains} chains of {method.draws} draws")


def shorter(sizes: Sizes, draws: int, tree_depth: int) -> dict[str, int]:
    """Settings of NUTS for a posterior whose trajectories are long: fewer draws and shorter ones."""
    return {
        "warmup": min(draws, sizes.warmup),
        "draws": min(draws, sizes.draws),
        "max_tree_depth": min(tree_depth, sizes.tree_depth),
    }


def flat_draws(posterior: Any, site: str) -> np.ndarray:
    """(draw, *shape), the chains one after the other."""
    values = posterior.draws[site]
    return values.reshape(-1, *values.shape[2:])


def prior_draws(sizes: Sizes, model: Any, x: Any, y: np.ndarray, site: str) -> np.ndarray:
    drawn = bnn.prior_predictive(model, x, y, draws=4 * sizes.draws, seed=SEED, ppl=sizes.ppl)
    return flat_draws(drawn, site)


# --- drawing ------------------------------------------------------------------------------------------


def legend(figure: Any, *axes: Any, columns: int = 3) -> None:
    """One legend below everything, with each label once."""
    found: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)


def draw_data(axes: Any, x: np.ndarray, y: np.ndarray, label: str = "data") -> None:
    axes.plot(x, y, "o", color=BLACK, markersize=4.5, markerfacecolor="white", zorder=4, label=label)


def curve(
    grid: np.ndarray, prediction: Any, x: np.ndarray, y: np.ndarray, truth: np.ndarray | None = None
) -> tuple[Any, Any]:
    """A figure of one prediction along one input, with its data and, dashed, what they were made from."""
    figure, ((axes,),) = panels(6.4, 4.2)
    draw_curve(axes, grid, prediction)
    if truth is not None:
        axes.plot(grid, truth, "--", color=VERMILION, linewidth=1.6, label="truth")
    draw_data(axes, x, y)
    axes.set(xlabel="$x$", ylabel="$y$", xlim=(grid[0], grid[-1]))
    return figure, axes


def draw_other(
    axes: Any,
    grid: np.ndarray,
    mean: np.ndarray,
    interval: tuple[np.ndarray, np.ndarray],
    labels: tuple[str, str],
) -> None:
    """What else is said of the same rows, above a curve: its mean, dashed, and an interval, dotted."""
    axes.plot(grid, mean, "--", color=VERMILION, linewidth=1.6, label=labels[0])
    for edge, label in zip(interval, (labels[1], None), strict=True):
        axes.plot(grid, edge, ":", color=VERMILION, linewidth=1.8, label=label, zorder=3)


def plane(
    x: np.ndarray, sizes: Sizes, margin: float = 1.0, finer: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places along both inputs around the rows x (N, 2), `finer` times as many as usual, and all points (A A, 2)."""
    low, high = x.min(axis=0) - margin, x.max(axis=0) + margin
    across, up = (np.linspace(low[i], high[i], finer * sizes.places) for i in (0, 1))
    return across, up, grid_points(across, up)


def draw_map(
    axes: Any, across: np.ndarray, up: np.ndarray, prediction: Any, x: Any, y: Any, steep: bool = False
) -> None:
    """A map of class probabilities with its rows. steep: of two classes, with the one line at a half, unlabelled."""
    classes = prediction.classes
    draw_class_map(axes, across, up, prediction, levels=[] if steep else None)
    if steep:
        values = prediction.probabilities[:, 1].reshape(len(up), len(across))
        # Matplotlib warns of a level that is nowhere reached.
        if values.min() < 0.5 < values.max():
            axes.contour(across, up, values, levels=[0.5], colors="black", linewidths=2.2)
    draw_classes(axes, x, y, [f"class {label}" for label in range(classes)], size=5.0)
    axes.set(xlabel="$x_1$", ylabel="$x_2$", xlim=(across[0], across[-1]), ylim=(up[0], up[-1]))


def two_maps(
    x: np.ndarray, y: np.ndarray, sizes: Sizes, margin: float, posteriors: Mapping[str, Any], steep: str = ""
) -> Any:
    """A figure of what two posteriors, by their titles, say of the same rows x (N, 2).

    steep: the title of one whose probabilities go from 0 to 1 within the width of a line.
    """
    figure, axes = panels(6.8, 4.2, 2)
    for each, (title, posterior) in zip(axes[0], posteriors.items(), strict=True):
        across, up, points = plane(x, sizes, margin, 4 if title == steep else 1)
        draw_map(each, across, up, posterior.predict(points), x, y, title == steep)
        each.set_title(title)
    axes[0, 1].set(ylabel="", yticklabels=[])
    legend(figure, axes[0, 0])
    return figure


def shades(colour: str) -> Any:
    """From white to a colour."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(f"white to {colour}", ["white", colour])


def draw_density(axes: Any, grid: np.ndarray, values: np.ndarray, prediction: Any) -> None:
    """p(y | x) at inputs `grid` (rows of the prediction) and targets `values`, each column by its own maximum."""
    density = np.stack([np.exp(prediction.log_prob(np.full(len(grid), value))) for value in values])
    axes.pcolormesh(
        grid, values, density / density.max(axis=0), cmap=shades(BLUE), vmin=0.0, vmax=1.0, shading="nearest"
    )


def draw_spreads(
    axes: Any, labels: Sequence[str], values: np.ndarray, prior: np.ndarray | None = None
) -> None:
    """Medians with central 50 % and 90 % intervals of values (draw, K), one line for each of `labels`, from above;
    below each, in grey, those of the prior (draw, K).
    """
    for sample, colour, shift, label in ((values, BLUE, -0.13, "posterior"), (prior, GREY, 0.2, "prior")):
        if sample is None:
            continue
        low, lower, middle, upper, high = np.quantile(sample, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
        at = np.arange(len(labels)) + shift
        width = 1.0 if sample is values else 0.6
        axes.hlines(at, low, high, color=colour, linewidth=2.0 * width)
        axes.hlines(at, lower, upper, color=colour, linewidth=6.0 * width)
        axes.plot(middle, at, "o", color=colour, markersize=7.0 * width, markerfacecolor="white", label=label)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def draw_digits(prediction: Any, images: np.ndarray, labels: np.ndarray, most: int = 4) -> tuple[Any, int]:
    """The test digits of which the model is least sure, each above its class probabilities, and how many were right.

    images: (N, 8, 8). Least sure: those with the largest entropy.
    """
    shown = np.argsort(-prediction.entropy, kind="stable")[:most]
    figure, axes = panels(6.4, 4.2, most, 2)
    for column, row in enumerate(shown):
        top, below = axes[:, column]
        top.imshow(images[row], cmap="Greys", interpolation="nearest")
        top.set_xticks([])
        top.set_yticks([])
        top.spines[:].set_visible(False)
        top.set_title(f"a {labels[row]}")
        probabilities = prediction.probabilities[row]
        colours = [ORANGE if label == labels[row] else BLUE for label in range(len(probabilities))]
        below.bar(range(len(probabilities)), probabilities, color=colours, width=0.8)
        below.set(ylim=(0.0, 1.0), xlim=(-0.7, 9.7))
        below.set_xticks(range(0, 10, 3))
        below.set_yticks([0.0, 0.5, 1.0], ["0", "0.5", "1"] if column == 0 else [])
    axes[1, 0].set_ylabel("probability")
    figure.supxlabel("digit (orange: the true one)", fontsize=13)
    right = int((prediction.probabilities.argmax(axis=1) == labels).sum())
    return figure, right


def digits(sizes: Sizes, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """At most `most` training rows of scikit-learn's digits, 400 test rows, pixels from -1 to 1; the test images."""
    table = bnn.data.load("digits")
    order = np.random.default_rng(SEED).permutation(len(table.y))
    train, test = order[: min(most, sizes.images)], order[1200:][:400]
    x = table.x / 8.0 - 1.0
    return x[train], table.y[train], x[test], table.y[test], table.x[test].reshape(-1, 8, 8)


# --- data ---------------------------------------------------------------------------------------------


def wave(rows: int, seed: int, noise: float = 0.15) -> tuple[np.ndarray, np.ndarray]:
    """y = sin(2 x) + noise at x in [-2, -0.7] and [0.4, 2]: nothing in the gap, nothing outside."""
    rng = np.random.default_rng(seed)
    x = np.where(np.arange(rows) % 2, rng.uniform(0.4, 2.0, rows), rng.uniform(-2.0, -0.7, rows))
    return x, np.sin(2.0 * x) + noise * rng.normal(size=rows)


def blobs(rows: int, centres: Sequence[tuple[float, float]], width: float, seed: int) -> Any:
    """Inputs (N, 2) and labels (N,): a normal cloud around each centre, of equal numbers."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % len(centres)
    return np.asarray(centres)[y] + width * rng.normal(size=(rows, 2)), y


def two_of_six(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Six inputs N(0, 1), of which two matter: y = sin(1.5 x_1) + 0.7 x_2 + 0.2 e."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6))
    return x, np.sin(1.5 * x[:, 0]) + 0.7 * x[:, 1] + 0.2 * rng.normal(size=rows)


# --- one model after the other: regression ------------------------------------------------------------


def linear_regression(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(3)
    x = rng.uniform(-1.0, 1.0, 15)
    y = 0.3 + 0.8 * x + 0.4 * rng.normal(size=15)
    posterior, how = sampled(sizes, bnn.zoo.load("linear_regression"), x[:, None], y)
    grid = np.linspace(-4.0, 4.0, sizes.grid)
    figure, axes = curve(grid, posterior.predict(grid[:, None]), x, y, 0.3 + 0.8 * grid)
    legend(figure, axes)
    return Drawn(
        figure,
        "Fifteen rows of a line with noise 0.4. The inner band is about where the line is, and widens without end away "
        "from the data; what lies between it and the outer one is noise, and is as wide everywhere.",
        how,
    )


def regression_mlp(sizes: Sizes) -> Drawn:
    x, y = wave(24, 1)
    posterior, how = sampled(sizes, bnn.zoo.load("regression_mlp", sigma=2.0), x[:, None], y)
    grid = np.linspace(-3.5, 3.5, sizes.grid)
    figure, axes = curve(grid, posterior.predict(grid[:, None]), x, y, np.sin(2.0 * grid))
    axes.set_ylim(-4.0, 4.0)
    legend(figure, axes)
    return Drawn(
        figure,
        "24 rows of sin(2x) with noise 0.15, none in the middle and none outside. Where there are rows only the noise "
        "is left; where there are none the functions that fit go their own ways, and the inner band says so.",
        how,
    )


def heteroscedastic_mlp(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(5)
    x = np.sort(rng.uniform(-2.0, 2.0, 120))
    y = np.sin(1.5 * x) + (0.05 + 0.2 * (x + 2.0)) * rng.normal(size=120)
    posterior, how = sampled(sizes, bnn.zoo.load("heteroscedastic_mlp"), x[:, None], y)
    grid = np.linspace(-2.5, 2.5, sizes.grid)
    figure, axes = curve(grid, posterior.predict(grid[:, None]), x, y)
    inside = grid[(grid >= -2.0) & (grid <= 2.0)]
    for sign, label in ((-1.0, None), (1.0, "90 %, truth")):
        edge = np.sin(1.5 * inside) + sign * NINETY * (0.05 + 0.2 * (inside + 2.0))
        axes.plot(inside, edge, "--", color=VERMILION, linewidth=1.6, label=label)
    legend(figure, axes)
    return Drawn(
        figure,
        "120 rows of a sine whose noise grows from 0.05 on the left to 0.85 on the right. The outer band follows the "
        "noise (dashed: where it should be); the mean function is known less well where the noise is large.",
        how,
    )


def last_layer(sizes: Sizes) -> Drawn:
    x, y = wave(24, 1)
    method = bnn.Laplace(ppl=sizes.ppl, steps=min(5000, sizes.steps))
    posterior = fitted(bnn.zoo.load("last_layer"), x[:, None], y, method)
    # Logarithmic beyond the rows: the last of the units saturate fifty times as far out.
    near, far = np.linspace(-3.0, 3.0, sizes.grid), np.geomspace(3.0, 1000.0, sizes.grid)
    grid = np.concatenate([-far[::-1], near[1:-1], far])
    figure, axes = curve(grid, posterior.predict(grid[:, None]), x, y)
    axes.set_xscale("symlog", linthresh=3.0, linscale=1.5)
    axes.set_xticks([-1000, -100, -10, -2, 0, 2, 10, 100, 1000], minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:g}")
    legend(figure, axes)
    return Drawn(
        figure,
        "The rows of `regression_mlp`, seen from far away (the axis is logarithmic beyond 3). The features are one "
        "network that was found, and only their weights are unsure. Outside the data the inner band widens as long as "
        "there are units that do not saturate yet, here up to about 100, and then hardly any more.",
        told(posterior, "Laplace"),
    )


def nngp(
    x: np.ndarray, y: np.ndarray, new: np.ndarray, sigma: float, offset: float, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of f at inputs (M, F) under the Gaussian process on the card of `wide_network`."""

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        first = offset**2 + sigma**2 * a @ b.T / a.shape[1]
        sizes = [np.sqrt(offset**2 + sigma**2 * (each**2).sum(axis=1) / a.shape[1]) for each in (a, b)]
        product = np.outer(*sizes)
        cosine = np.clip(first / product, -1.0, 1.0)
        angle = np.arccos(cosine)
        hidden = product * (np.sqrt(1.0 - cosine**2) + (np.pi - angle) * cosine) / (2.0 * np.pi)
        return offset**2 + sigma**2 * hidden

    factor = np.linalg.cholesky(kernel(x, x) + noise**2 * np.eye(len(x)))
    half = np.linalg.solve(factor, kernel(x, new))
    variance = np.diag(kernel(new, new)) - (half**2).sum(axis=0)
    return half.T @ np.linalg.solve(factor, y), np.sqrt(np.maximum(variance, 0.0))


def wide_network(sizes: Sizes) -> Drawn:
    x, y = wave(14, 4, noise=0.1)
    keywords = {"sigma": 1.4, "offset": 0.5, "noise": 0.1}
    posterior, how = sampled(sizes, bnn.zoo.load("wide_network", **keywords), x[:, None], y)
    grid = np.linspace(-3.0, 3.0, sizes.grid)
    figure, axes = curve(grid, posterior.predict(grid[:, None]), x, y)
    mean, spread = nngp(x[:, None], y, grid[:, None], **keywords)
    edges = mean - NINETY * spread, mean + NINETY * spread
    draw_other(axes, grid, mean, edges, ("Gaussian process: mean", "and its 90 % of f"))
    legend(figure, axes, columns=2)
    return Drawn(
        figure,
        "14 rows of sin(2x) with known noise 0.1, and 200 relu units. Dashed and dotted is the Gaussian process that "
        "the network tends to as it grows wider, in closed form: the network's mean and inner band lie close to it.",
        how,
    )


def bayes_by_backprop(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(2)
    x = np.linspace(-0.5, 0.5, 32)
    y = 10.0 * np.sin(2.0 * np.pi * x) + rng.normal(size=32)
    model = bnn.zoo.load("bayes_by_backprop", noise=1.0)
    svi = fitted(model, x[:, None], y, bnn.SVI(ppl=sizes.ppl, steps=min(5000, sizes.steps), elbo_draws=200))
    nuts, how = sampled(sizes, model, x[:, None], y, **shorter(sizes, 500, 8))
    grid = np.linspace(-1.0, 1.0, sizes.grid)
    figure, ((left, right),) = panels(6.8, 4.2, 2)
    for axes, posterior, title in ((left, svi, "mean-field SVI"), (right, nuts, "NUTS")):
        draw_curve(axes, grid, posterior.predict(grid[:, None]))
        draw_data(axes, x, y)
        axes.set(xlabel="$x$", title=title, ylim=(-35.0, 35.0), xlim=(-1.0, 1.0))
    left.set_ylabel("$y$")
    right.set_yticklabels([])
    legend(figure, left, columns=2)
    return Drawn(
        figure,
        "32 rows of 10 sin(2 pi x) with known noise 1, as in a well-known exercise. Bayes by Backprop is the left fit: "
        "independent normals over the weights. Beside the posterior on the right it is far too sure where there are no "
        "rows.",
        f"Left: {told(svi, 'SVI')}. Right: {how}",
    )


# --- other targets ------------------------------------------------------------------------------------


def student_t_mlp(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(16)
    x = np.sort(rng.uniform(-2.0, 2.0, 45))
    y = np.sin(1.5 * x) + 0.1 * rng.normal(size=45)
    y[[6, 14, 21, 30, 39]] += np.array([2.5, -3.0, 3.0, 2.5, -2.5])
    posterior, how = sampled(sizes, bnn.zoo.load("student_t_mlp"), x[:, None], y)
    normal, how_normal = sampled(sizes, bnn.zoo.load("regression_mlp"), x[:, None], y)
    grid = np.linspace(-2.3, 2.3, sizes.grid)
    figure, axes = curve(grid, posterior.predict(grid[:, None]), x, y)
    other = normal.predict(grid[:, None])
    draw_other(axes, grid, other.mean, other.interval(0.9), ("normal noise: mean", "and 90 %"))
    legend(figure, axes)
    return Drawn(
        figure,
        "45 rows of a sine with noise 0.1, five of them moved by 2.5 or 3. Heavy tails let the fit pass by these five; "
        "under normal noise (`regression_mlp`, dashed and dotted) they pull at the mean and set the noise of all rows.",
        f"{how}. With normal noise {how_normal}",
    )


def count_mlp(sizes: Sizes) -> Drawn:
    from scipy.stats import poisson

    rng = np.random.default_rng(17)
    x = np.sort(rng.uniform(-2.0, 2.0, 120))
    rate = np.exp(1.2 + np.sin(1.5 * x))
    y = rng.negative_binomial(3.0, 3.0 / (3.0 + rate))
    posterior, how = sampled(sizes, bnn.zoo.load("count_mlp", sigma=2.0), x[:, None], y)
    figure, ((left, right),) = panels(6.8, 4.2, 2)
    grid = np.linspace(-2.0, 2.0, sizes.grid)
    draw_curve(left, grid, posterior.predict(grid[:, None]))
    left.plot(grid, np.exp(1.2 + np.sin(1.5 * grid)), "--", color=VERMILION, linewidth=1.6, label="true rate")
    draw_data(left, x, y)
    left.set(xlabel="$x$", ylabel="count", ylim=(-0.5, 26.0))
    one = posterior.predict(np.array([[1.0]]))
    counts = np.arange(0, 26)
    # One row at a time, so that a row may be asked for every count.
    mass = [float(np.exp(one.log_prob(np.array([count])))[0]) for count in counts]
    right.bar(counts, mass, color=SKY, width=0.8)
    right.plot(
        counts, poisson(one.mean[0]).pmf(counts), "o--", color=GREY, markersize=4, label="Poisson, same mean"
    )
    right.set(xlabel="count", ylabel="probability", title="at $x = 1$", xlim=(-0.7, 25.7))
    legend(figure, left, right)
    return Drawn(
        figure,
        "120 counts that scatter more than Poisson's do (variance m + m^2 / 3). Left: the outer band is of whole "
        "numbers. Right: what is expected at x = 1, far wider than a Poisson distribution of the same mean.",
        how,
    )


def ordinal_mlp(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(18)
    x = np.sort(rng.uniform(-2.0, 2.0, 150))
    place = 2.5 * np.sin(1.3 * x) + rng.logistic(size=150)
    y = np.digitize(place, [-1.5, 0.0, 1.5])
    posterior, how = sampled(sizes, bnn.zoo.load("ordinal_mlp", sigma=2.0), x[:, None], y)
    grid = np.linspace(-2.5, 2.5, sizes.grid)
    prediction = posterior.predict(grid[:, None])
    figure, axes = panels(6.4, 4.6, 1, 2)
    top, below = axes[:, 0]
    top.plot(x, y + rng.uniform(-0.25, 0.25, 150), ".", color=BLACK, markersize=4)
    top.set(ylabel="observed", xlim=(-2.5, 2.5), xticklabels=[], ylim=(-0.5, 3.5))
    top.set_yticks(range(4))
    colours = [shades(BLUE)(share) for share in (0.1, 0.4, 0.7, 1.0)]
    below.stackplot(
        grid, prediction.probabilities.T, colors=colours, labels=[f"level {level}" for level in range(4)]
    )
    middle = prediction.parameters["probs"][..., :2].sum(axis=-1)
    for edge, label in zip(
        np.quantile(middle, [0.05, 0.95], axis=0), ("90 % of P(0 or 1)", None), strict=True
    ):
        below.plot(grid, edge, ":", color=VERMILION, linewidth=2.0, label=label)
    below.set(xlabel="$x$", ylabel="probability", xlim=(-2.5, 2.5), ylim=(0.0, 1.0))
    legend(figure, below)
    return Drawn(
        figure,
        "150 rows with four levels that have an order. Above: the rows. Below: the probabilities of the levels, one on "
        "the other, and between which lines the border in the middle is: better known among the rows than beyond them.",
        how,
    )


def stretch(x: np.ndarray) -> np.ndarray:
    """The scale of the times of `survival_mlp` in its figure, in years: what 37 % outlive."""
    return 12.0 * np.exp(-0.45 * x**2)


def kaplan_meier(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times and the share that outlives them, from y (N, 2), times and events, for steps that begin at (0, 1)."""
    from scipy.stats import CensoredData, ecdf

    seen = y[:, 1] == 1.0
    survival = ecdf(CensoredData(uncensored=y[seen, 0], right=y[~seen, 0])).sf
    return np.concatenate([[0.0], survival.quantiles]), np.concatenate([[1.0], survival.probabilities])


def survival_mlp(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(20)
    x = rng.uniform(-2.2, 2.2, 240)
    time, end = stretch(x) * rng.weibull(1.5, 240), rng.exponential(18.0, 240)
    y = np.column_stack([np.minimum(time, end), time <= end])
    posterior, how = sampled(sizes, bnn.zoo.load("survival_mlp"), x[:, None], y)
    figure, ((left, right),) = panels(6.8, 4.6, 2)
    grid = np.linspace(-2.2, 2.2, sizes.grid)
    draw_curve(left, grid, posterior.predict(grid[:, None]))
    seen = y[:, 1] == 1.0
    left.plot(x[seen], y[seen, 0], "o", color=BLACK, markersize=4, markerfacecolor="white", label="event")
    left.plot(x[~seen], y[~seen, 0], "^", color=VERMILION, markersize=4, label="censored: later")
    left.set(xlabel="$x$", ylabel="time, years", xlim=(-2.2, 2.2), ylim=(0.0, 32.0))
    times = np.linspace(0.0, 25.0, sizes.grid)
    for place, colour, height in ((0.0, BLUE, 0.62), (1.6, ORANGE, 0.2)):
        parameters = posterior.predict(np.array([[place]])).parameters
        shape, scale = (parameters[name].reshape(-1, 1) for name in ("concentration", "scale"))
        survival = np.exp(-((times / scale) ** shape))
        right.fill_between(
            times, *np.quantile(survival, [0.05, 0.95], axis=0), color=colour, alpha=0.3, linewidth=0
        )
        right.plot(times, survival.mean(axis=0), color=colour, linewidth=2.0)
        right.plot(
            times, np.exp(-((times / stretch(np.array(place))) ** 1.5)), "--", color=BLACK, label="truth"
        )
        right.step(
            *kaplan_meier(y[np.abs(x - place) < 0.4]),
            where="post",
            color=GREY,
            linewidth=1.2,
            label="Kaplan-Meier",
        )
        right.text(7.0 if place else 12.5, height, f"$x = {place:g}$", color=BLACK)
    right.set(xlabel="time, years", ylabel="share that outlives it", xlim=(0.0, 25.0), ylim=(0.0, 1.02))
    legend(figure, left, right)
    return Drawn(
        figure,
        f"240 times, of which {int((~seen).sum())} were censored: that the event came later is all that is known. "
        "Right: the survival function S(t | x) at two inputs with its 90 % band, what the times were made from "
        "(dashed), and Kaplan-Meier's estimate from the rows within 0.4 of x.",
        how,
    )


def mixture_density(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(19)
    y = rng.uniform(0.0, 1.0, 200)
    x = y + 0.3 * np.sin(2.0 * np.pi * y) + 0.04 * rng.normal(size=200)
    # In units of about 1, for which the prior is meant.
    x, y = (x - 0.5) * 3.5, (y - 0.5) * 3.5
    model = bnn.zoo.load("mixture_density", sigma=2.0)
    start = bnn.MAP(ppl=sizes.ppl, steps=min(5000, sizes.steps))
    posterior, how = sampled(sizes, model, x[:, None], y, start=start, **shorter(sizes, 500, 8))
    grid, values = np.linspace(-2.2, 2.2, 2 * sizes.places), np.linspace(-2.6, 2.6, 2 * sizes.places)
    prediction = posterior.predict(grid[:, None], draws=min(1000, sizes.draws))
    figure, ((axes,),) = panels(6.4, 4.2)
    draw_density(axes, grid, values, prediction)
    axes.plot(x, y, ".", color=BLACK, markersize=4, label="data")
    axes.plot(grid, prediction.mean, "--", color=VERMILION, linewidth=1.8, label="mean of $p(y \\mid x)$")
    axes.set(xlabel="$x$", ylabel="$y$", xlim=(-2.2, 2.2), ylim=(-2.6, 2.6))
    legend(figure, axes)
    return Drawn(
        figure,
        "200 rows of an inverse problem: in the middle an input has three answers. Blue: the predictive density, each "
        "column by its own maximum. Its mean (dashed) is mostly between the branches, where there is nothing.",
        f"Begun at modes: {how}",
    )


def forecast(
    draws: Mapping[str, np.ndarray], lags: np.ndarray, steps: int, rng: np.random.Generator
) -> np.ndarray:
    """Continuations (draw, steps) of a series that ended in `lags` (F,), oldest first, under the card of
    `autoregressive`: each within one draw of the weights, every value drawn with its noise and put behind the lags.
    """
    linear, inner, bias, outer, offset, noise = (
        draws[name]
        for name in ("lags.weight", "hidden0.weight", "hidden0.bias", "output.weight", "output.bias", "noise")
    )
    window = np.repeat(lags[None], len(noise), axis=0)
    values = np.empty((len(noise), steps))
    for step in range(steps):
        hidden = np.tanh(np.einsum("sf,sfk->sk", window, inner) + bias)
        mean = np.einsum("sf,sf->s", window, linear[..., 0]) + np.einsum("sk,sk->s", hidden, outer[..., 0])
        values[:, step] = mean + offset[:, 0] + noise * rng.normal(size=len(noise))
        window = np.column_stack([window[:, 1:], values[:, step]])
    return values


def autoregressive(sizes: Sizes) -> Drawn:
    table = bnn.data.load("mackey_glass")
    rows, ahead, before = 200, 60, 60
    centre, spread = table.y[:rows].mean(), table.y[:rows].std()
    x, y = (table.x - centre) / spread, (table.y - centre) / spread
    posterior, how = sampled(sizes, bnn.zoo.load("autoregressive"), x[:rows], y[:rows], target_accept=0.9)
    draws = {name: flat_draws(posterior, name) for name in posterior.draws}
    paths = spread * forecast(draws, x[rows], ahead, np.random.default_rng(SEED)) + centre
    figure, ((axes,),) = panels(6.4, 4.2)
    times = np.arange(rows, rows + ahead)
    for level, alpha in ((0.9, 0.35), (0.5, 0.5)):
        low, high = np.quantile(paths, [0.5 - 0.5 * level, 0.5 + 0.5 * level], axis=0)
        axes.fill_between(
            times,
            low,
            high,
            color=SKY,
            alpha=alpha,
            linewidth=0,
            label=f"{100 * level:.0f} % of the forecast",
        )
    axes.plot(times, np.median(paths, axis=0), color=BLUE, linewidth=1.8, label="median")
    seen = np.arange(rows - before, rows)
    for at, colour, label in ((seen, BLACK, "seen"), (times, VERMILION, "what came")):
        axes.plot(at, table.y[at], ".-", color=colour, markersize=6, linewidth=0.6, label=label)
    axes.axvline(rows - 0.5, color=GREY, linewidth=1.0)
    axes.set(xlabel="time, steps of the series", ylabel="$z$", xlim=(rows - before, rows + ahead))
    legend(figure, axes)
    return Drawn(
        figure,
        f"A chaotic series (`mackey_glass`) and its continuation after {rows} rows, {ahead} steps ahead: every path "
        "stays within one draw of the weights and feeds on what it has drawn itself. The fan opens until it is as wide "
        "as the series.",
        how,
    )


# --- scales that are learned --------------------------------------------------------------------------


def ard_mlp(sizes: Sizes) -> Drawn:
    x, y = two_of_six(100, 6)
    model = bnn.zoo.load("ard_mlp", width=8)
    posterior, how = sampled(sizes, model, x, y, target_accept=0.9)
    site = "hidden0.weight.scale"
    figure, ((axes,),) = panels(6.4, 4.2)
    draw_spreads(
        axes,
        [f"$x_{j}$" for j in range(1, 7)],
        flat_draws(posterior, site)[..., 0],
        prior_draws(sizes, model, x, y, site)[..., 0],
    )
    axes.set(xscale="log", xlabel="relevance of the input, $r_j$", ylabel="input")
    axes.set_xlim(3e-3, 30.0)
    legend(figure, axes)
    return Drawn(
        figure,
        "100 rows of six inputs of which two matter, y = sin(1.5 x_1) + 0.7 x_2 with noise 0.2. The scales of these "
        "two stand out; those of the others are the prior cut off from above, not zeros. Lines: 50 and 90 %.",
        how,
    )


def unit_scales(draws: Mapping[str, np.ndarray], site: str = "hidden0.weight") -> np.ndarray:
    """tau l_k of `horseshoe_mlp` (draw, unit), the largest of each draw first: units can be exchanged."""
    tau, local, slab = (draws[f"{site}.{part}"] for part in ("global", "local", "slab"))
    r2 = (tau[:, None] * local) ** 2
    # tau^2 l^2 = c^2 r^2 / (c^2 + r^2), which does not overflow where r is large.
    scale = np.sqrt(slab[:, None] / (1.0 + slab[:, None] / r2))
    return -np.sort(-scale, axis=1)


def horseshoe_mlp(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(100, 4))
    y = np.tanh(1.5 * (x[:, 0] - x[:, 1])) + 0.1 * rng.normal(size=100)
    model = bnn.zoo.load("horseshoe_mlp", width=8)
    posterior, how = sampled(sizes, model, x, y, target_accept=0.95)
    prior = bnn.prior_predictive(model, x, y, draws=4 * sizes.draws, seed=SEED, ppl=sizes.ppl)
    figure, ((left, right),) = panels(6.8, 4.2, 2)
    grid = np.linspace(-4.0, 4.0, sizes.grid)
    along = np.column_stack([0.5 * grid, -0.5 * grid, np.zeros((len(grid), 2))])
    draw_curve(left, grid, posterior.predict(along))
    draw_data(left, x[:, 0] - x[:, 1], y)
    left.set(xlabel="$x_1 - x_2$", ylabel="$y$", xlim=(-4.0, 4.0))
    scales = [
        unit_scales({name: flat_draws(each, name) for name in each.draws}) for each in (posterior, prior)
    ]
    draw_spreads(right, [str(place) for place in range(1, 9)], *scales)
    right.set(xscale="log", xlabel=r"scale of a unit, $\tau\, l_k$", ylabel="unit, largest first")
    right.set_xlim(1e-4, 30.0)
    legend(figure, left, right)
    return Drawn(
        figure,
        "100 rows of tanh(1.5 (x_1 - x_2)) with two inputs besides, which one tanh unit of the eight can make. On the "
        "right the scales of the units, in each draw the largest first: the first stands out, above its prior, and the "
        "others lie below theirs. Lines: 50 and 90 %.",
        how,
    )


def in_use(w: np.ndarray, probability: float, slab: float, fan_in: int) -> np.ndarray:
    """P(slab | w) under the mixture of `spike_and_slab`, whose spike is a hundredth of the slab; the shape of w."""
    wide = slab / math.sqrt(fan_in)
    log_odds = (
        math.log((1.0 - probability) / probability) + math.log(100.0) + 0.5 * (w / wide) ** 2 * (1.0 - 1e4)
    )
    return 1.0 / (1.0 + np.exp(np.clip(log_odds, -700.0, 700.0)))


def spike_and_slab(sizes: Sizes) -> Drawn:
    x, y = two_of_six(100, 6)
    model = bnn.zoo.load("spike_and_slab", width=5)
    posterior, how = sampled(sizes, model, x, y, **shorter(sizes, 500, 8))
    # (chain, draw, input, unit): how many of the units read an input.
    used = in_use(posterior.draws["hidden0.weight"], 0.25, 1.5, 6).sum(axis=-1).mean(axis=1)
    figure, ((axes,),) = panels(6.4, 4.2)
    at = np.arange(1, 7)
    axes.bar(at, used.mean(axis=0), color=SKY, width=0.6, label="all chains")
    for chain, counts in enumerate(used):
        axes.plot(
            at + 0.12 * (chain - 0.5 * (len(used) - 1)),
            counts,
            "o",
            color=BLUE,
            markersize=6,
            label="each chain" if chain == 0 else None,
        )
    axes.axhline(1.25, color=VERMILION, linestyle="--", linewidth=1.6, label="prior")
    axes.set(ylabel="weights in use, of 5", ylim=(0.0, None))
    axes.set_xticks(at, [f"$x_{j}$" for j in at])
    axes.set_xlabel("input")
    legend(figure, axes)
    return Drawn(
        figure,
        "The rows of `ard_mlp`: six inputs of which the first two matter. Bars: how many of the five weights out of an "
        "input are expected to be in use. Dots that differ from chain to chain are chains that stay in the subset of "
        "weights where they began, which is what is hard here.",
        how,
    )


def empirical_bayes(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(8)
    plane_x, y = mixture(200, 3)
    x = np.column_stack([plane_x, rng.normal(size=(200, 4))])
    method = bnn.SVI(
        ppl=sizes.ppl,
        steps=min(6000, sizes.steps),
        divergence="analytic",
        restarts=1 if sizes.sequential else 3,
        elbo_draws=200,
    )
    posterior = fitted(bnn.zoo.load("empirical_bayes", width=10), x, y, method)
    weights = posterior.unconstrained_draws["hidden0.weight"][0]
    # 1/2 log(1 + mean^2 / variance): what a weight costs whose prior variance is mean^2 + variance.
    costs = 0.5 * np.log1p(weights.mean(axis=0) ** 2 / weights.var(axis=0))
    figure, ((left, right),) = panels(6.8, 4.2, 2)
    across, up, points = plane(plane_x, sizes, 0.5)
    padded = np.column_stack([points, np.zeros((len(points), 4))])
    draw_map(left, across, up, posterior.predict(padded, draws=min(400, 4 * sizes.draws)), plane_x, y)
    left.set_title("P(class 1), other inputs at 0")
    for j in range(6):
        right.plot(
            j + 1 + np.linspace(-0.25, 0.25, costs.shape[1]),
            costs[j],
            "o",
            color=BLUE,
            markersize=5,
            label="each weight" if j == 0 else None,
        )
    right.set_xticks(range(1, 7), [f"$x_{j}$" for j in range(1, 7)])
    right.set(xlabel="input", ylabel="cost of a weight, nats", ylim=(-0.1, None))
    legend(figure, left, right)
    return Drawn(
        figure,
        "200 rows of two classes in a plane, with four inputs of noise besides. On the right what each weight costs, "
        f"1/2 log(1 + mean^2 / variance): {int((costs[2:] < 0.1).sum())} of the {costs[2:].size} weights out of the "
        "inputs of noise are left without a mean and cost next to nothing, and so are all weights of idle units.",
        told(posterior, f"SVI, the best of {method.restarts} starts"),
    )


def neal_hierarchical(sizes: Sizes) -> Drawn:
    x, y = blobs(60, [(-1.2, -0.6), (1.2, -0.6), (0.0, 1.3)], 0.55, 9)
    model = bnn.zoo.load("neal_hierarchical", width=8)
    posterior, how = sampled(sizes, model, x, y)
    sites = ("hidden0.weight", "hidden0.bias", "output.weight")
    spreads = [
        np.column_stack([flat_draws(each, f"{site}.precision") ** -0.5 for site in sites])
        for each in (
            posterior,
            bnn.prior_predictive(model, x, y, draws=4 * sizes.draws, seed=SEED, ppl=sizes.ppl),
        )
    ]
    figure, ((left, right),) = panels(6.8, 4.2, 2)
    across, up, points = plane(x, sizes)
    draw_map(left, across, up, posterior.predict(points, draws=min(1000, sizes.draws)), x, y)
    draw_spreads(right, ["input\nweights", "hidden\nbiases", "output\nweights"], *spreads)
    right.set(xlabel="scale of the group, $t_g^{-1/2}$", xscale="log", xlim=(0.3, 12.0))
    right.set_xticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    right.set_xticks([], minor=True)
    legend(figure, left, right)
    return Drawn(
        figure,
        "60 rows of three classes; lines are at 0.7 and 0.9 of the most probable one. On the right the standard "
        "deviation of each group of weights: classes that can be told apart ask for larger output weights than the "
        "prior expects. Lines there: 50 and 90 %.",
        how,
    )


def multitask_hierarchical(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(10)
    counts, shifts = (20, 12, 5, 2), (0.0, 0.5, -0.4, 0.3)
    group = np.repeat(np.arange(4), counts)
    first = rng.uniform(-2.0, 2.0, len(group))
    y = np.sin(1.5 * first) + np.take(shifts, group) + 0.15 * rng.normal(size=len(group))
    x = np.column_stack([first, group.astype(float)])
    model = bnn.zoo.load("multitask_hierarchical", column=1, cuts=(0.5, 1.5, 2.5))
    posterior, how = sampled(sizes, model, x, y, target_accept=0.95)
    grid = np.linspace(-3.0, 3.0, sizes.grid)
    figure, axes = panels(6.6, 5.2, 2, 2)
    for number, each in enumerate(axes.ravel()):
        inputs = np.column_stack([grid, np.full(len(grid), float(number))])
        draw_curve(each, grid, posterior.predict(inputs))
        average = average_head(posterior, inputs)
        each.plot(grid, average, "--", color=VERMILION, linewidth=1.6, label="average group")
        draw_data(each, first[group == number], y[group == number])
        each.set(ylim=(-3.0, 3.0), xlim=(-3.0, 3.0), title=f"{counts[number]} rows")
    for each in axes[1]:
        each.set_xlabel("$x$")
    for each in axes[:, 0]:
        each.set_ylabel("$y$")
    legend(figure, axes[0, 0])
    return Drawn(
        figure,
        "Four groups, of 20, 12, 5 and 2 rows, of sines that differ in height. Dashed: the head that a new group is "
        "expected to have. A group with many rows goes its own way; one with two leans on the others, and its band is "
        "wider.",
        how,
    )


def average_head(posterior: Any, x: np.ndarray) -> np.ndarray:
    """The mean over draws of the network with the common head, m and c on the card, (N,)."""
    parts = ("shared.weight", "shared.bias", "heads.weight.mean", "heads.bias.mean")
    weight, bias, head, offset = (flat_draws(posterior, part) for part in parts)
    hidden = np.tanh(np.einsum("nf,sfk->snk", x, weight) + bias[:, None, :])
    f = np.einsum("snk,sk->sn", hidden, head[..., 0]) / math.sqrt(head.shape[1])
    return (f + offset.reshape(len(f), 1)).mean(axis=0)


def latent_inputs(sizes: Sizes) -> Drawn:
    rng = np.random.default_rng(11)
    x = np.sort(rng.uniform(-1.5, 1.5, 60))
    y = rng.choice([-1.0, 1.0], 60) * (0.1 + 0.35 * (x + 1.5)) + 0.07 * rng.normal(size=60)
    model = bnn.zoo.load("latent_inputs", noise_scale=0.1, sigma=2.0)
    method = bnn.SVI(ppl=sizes.ppl, steps=min(6000, sizes.steps), restarts=1 if sizes.sequential else 3)
    start = fitted(model, x[:, None], y, method)
    posterior, how = sampled(sizes, model, x[:, None], y, start=start, **shorter(sizes, 500, 8))
    z = flat_draws(posterior, "z")[..., 0]
    z = z * np.where(z @ y < 0.0, -1.0, 1.0)[:, None]
    centre = z.mean(axis=0)
    figure, ((left, right),) = panels(6.8, 4.2, 2)
    grid, values = np.linspace(-1.7, 1.7, sizes.places), np.linspace(-1.8, 1.8, sizes.places)
    draw_density(left, grid, values, posterior.predict(grid[:, None]))
    draw_signed(left, x, y, centre)
    left.set(xlabel="$x$", ylabel="$y$", title="$p(y \\mid x)$ and the rows")
    low, high = np.quantile(z, [0.05, 0.95], axis=0)
    right.axhspan(-NINETY, NINETY, color="0.9", linewidth=0, label="90 % of the prior")
    right.vlines(y, low, high, color=GREY, linewidth=1.0, label="90 % of the posterior")
    draw_signed(right, y, centre, centre)
    right.set(xlabel="$y$ of the row", ylabel="$z$ of the row", title="latent inputs")
    legend(figure, right, columns=2)
    return Drawn(
        figure,
        "60 rows on one of two branches, which no measured input tells apart. The latent input of each row learns "
        "which branch it is on (orange: z below 0, blue: above; signs of draws are such that z rises with y), and "
        "a prediction, for which z is drawn anew, has two humps.",
        how,
    )


def draw_signed(axes: Any, x: np.ndarray, y: np.ndarray, values: np.ndarray) -> None:
    for chosen, colour, marker in ((values < 0.0, ORANGE, "s"), (values >= 0.0, BLUE, "o")):
        axes.plot(x[chosen], y[chosen], marker, color=colour, markersize=5, markeredgecolor=BLACK, zorder=3)


# --- classes ------------------------------------------------------------------------------------------


def logistic_regression(sizes: Sizes) -> Drawn:
    x, y = blobs(16, [(-0.8, -0.5), (0.8, 0.5)], 0.8, 12)
    model = bnn.zoo.load("logistic_regression", scale=2.0)
    mode = fitted(model, x, y, bnn.MAP(ppl=sizes.ppl, steps=min(3000, sizes.steps)))
    posterior, how = sampled(sizes, model, x, y)
    titled = {"at the mode": mode, "averaged over the posterior": posterior}
    return Drawn(
        two_maps(x, y, sizes, 2.0, titled),
        "Sixteen rows. At the mode the lines of equal probability are parallel, and all are certain far enough away; "
        "averaged over the posterior they fan out, because nobody knows the direction of the boundary.",
        f"Left: MAP. Right: {how}",
    )


def classification_mlp(sizes: Sizes) -> Drawn:
    x, y = blobs(75, [(-1.3, -0.5), (1.3, -0.5), (0.0, 1.4)], 0.6, 13)
    model = bnn.zoo.load("classification_mlp", classes=3, sigma=2.0)
    posterior, how = sampled(sizes, model, x, y)
    across, up, points = plane(x, sizes, 2.5)
    prediction = posterior.predict(points, draws=min(1000, sizes.draws))
    figure, ((left, right),) = panels(6.8, 4.2, 2)
    draw_map(left, across, up, prediction, x, y)
    left.set_title("most probable class")
    unsure = prediction.epistemic.reshape(len(up), len(across))
    shown = right.pcolormesh(across, up, unsure, cmap=shades(PINK), vmin=0.0, shading="nearest")
    right.plot(x[:, 0], x[:, 1], ".", color=BLACK, markersize=4)
    right.set(title="epistemic, nats", xlabel="$x_1$", yticklabels=[])
    figure.colorbar(shown, ax=right, shrink=0.9)
    legend(figure, left)
    return Drawn(
        figure,
        "75 rows of three classes that overlap. Left: lines at 0.7 and 0.9 of the most probable class. Right: the "
        "mutual information of label and network, what more rows there would teach: least where rows of one class are "
        "many, most along the borders far from all of them.",
        how,
    )


def evidence_framework(sizes: Sizes) -> Drawn:
    x, y = mixture(60, 0)
    steps = min(8000, sizes.steps)
    flat = bnn.zoo.load("evidence_framework", precision=FLAT)
    likelihood = fitted(flat, x, y, bnn.MAP(ppl=sizes.ppl, steps=steps))
    method = bnn.Laplace(ppl=sizes.ppl, steps=steps, tune="global", during_training=True)
    posterior = fitted(bnn.zoo.load("evidence_framework"), x, y, method)
    titled = {"maximum likelihood": likelihood, "precision by the evidence": posterior}
    return Drawn(
        two_maps(x, y, sizes, 0.5, titled, steep="maximum likelihood"),
        "60 rows of two classes that overlap (of `comparisons/evidence_framework.py`). Maximum likelihood bends the "
        "boundary around single rows and is certain on both sides of it: its other lines would lie on that of 0.5. The "
        f"precision that the evidence chose, {posterior.info.figures[ALL]:.2g}, leaves a smooth boundary and "
        "probabilities that admit the overlap.",
        f"Left: MAP under a prior precision of {FLAT:g}. Right: {told(posterior, 'Laplace with tuned precision')}",
    )


# --- digits -------------------------------------------------------------------------------------------


def least_sure(
    sizes: Sizes, what: str, fit: Callable[[np.ndarray, np.ndarray], tuple[Any, str]], most: int, said: str
) -> Drawn:
    """The figure of a classifier of digits. fit: (x, y) -> posterior and what is told of it; most: training rows."""
    x, y, x_new, y_new, images = digits(sizes, most)
    posterior, how = fit(x, y)
    held = posterior.shape[0] * posterior.shape[1]
    prediction = posterior.predict(x_new, draws=min(1000, held)) if held > 1000 else posterior.predict(x_new)
    figure, right = draw_digits(prediction, images, y_new)
    return Drawn(
        figure,
        f"The four of {len(y_new)} test digits (8 x 8 pixels) of which {what}, after {len(y)} others, is least sure; "
        f"it is right about {right} of all. {said}",
        how,
    )


def one_layer_digits(sizes: Sizes) -> Drawn:
    def fit(x: np.ndarray, y: np.ndarray) -> tuple[Any, str]:
        # Draws of the prior, the joint mode and the best independent normals are where all weights are next to nothing.
        rng, inputs, hidden = np.random.default_rng(SEED), x.shape[1], 10
        somewhere = {
            "hidden0.variance": 1.0 / inputs,
            "hidden0.weight": rng.normal(size=(inputs, hidden)) / math.sqrt(inputs),
            "hidden0.bias": np.zeros(hidden),
            "output.variance": 1.0 / hidden,
            "output.weight": rng.normal(size=(hidden, 9)) / math.sqrt(hidden),
            "output.bias": np.zeros(9),
        }
        method = bnn.MAP(
            ppl=sizes.ppl, steps=min(2000, sizes.steps), polish=False, validation=0.1, start=somewhere
        )
        model = bnn.zoo.load("one_layer_digits")
        start = fitted(model, x, y, method)
        posterior, how = sampled(sizes, model, x, y, start=start, **shorter(sizes, 500, 8))
        return posterior, f"All begun at one network: {how}"

    said = "With so few rows many weights would do, and they disagree about these."
    return least_sure(sizes, "a layer of ten tanh units", fit, 400, said)


def by_modes(sizes: Sizes, name: str, what: str, most: int, steps: int, said: str) -> Drawn:
    """The figure of a model of the zoo whose posterior is stood for by modes found from different starts."""

    def fit(x: np.ndarray, y: np.ndarray) -> tuple[Any, str]:
        member = bnn.MAP(ppl=sizes.ppl, steps=min(steps, sizes.steps), polish=False)
        size = 2 if sizes.sequential else 4
        posterior = fitted(bnn.zoo.load(name), x, y, bnn.Ensemble(member, size=size, ppl=sizes.ppl))
        return posterior, told(posterior, f"An ensemble of {size} modes")

    return least_sure(sizes, what, fit, most, said)


def lenet(sizes: Sizes) -> Drawn:
    # Of the default network, 21 386 weights under its default prior, 600 rows leave all classes about equally probable.
    # Of the scales 2, 3 and 5 of this smaller one Laplace's evidence of the 600 rows is largest at the one taken here.
    model = bnn.zoo.load("lenet", sigma=LENET_SIGMA, channels=(4, 8), widths=(32,), kernel=3)

    def fit(x: np.ndarray, y: np.ndarray) -> tuple[Any, str]:
        mode = fitted(model, x, y, bnn.MAP(ppl=sizes.ppl, steps=min(800, sizes.steps), learning_rate=0.02))
        laplace = bnn.Laplace(ppl=sizes.ppl, start=mode, optimise=False, structure="kron")
        posterior = fitted(model, x, y, laplace)
        return posterior, told(posterior, "Laplace with Kronecker factors, linearised")

    said = "Two convolutions of four and eight filters, and weights that may be larger than by default."
    return least_sure(sizes, "a small LeNet", fit, 600, said)


def resnet(sizes: Sizes) -> Drawn:
    said = "Its members are modes found from different starts, and what they disagree about is what is not known."
    return by_modes(sizes, "resnet", "a residual network", 500, 600, said)


def by_svi(sizes: Sizes, name: str, what: str, said: str) -> Drawn:
    """The figure of a model of the zoo whose weights are independent normals."""

    def fit(x: np.ndarray, y: np.ndarray) -> tuple[Any, str]:
        method = bnn.SVI(ppl=sizes.ppl, steps=min(3000, sizes.steps), elbo_draws=50)
        posterior = fitted(bnn.zoo.load(name), x, y, method)
        return posterior, told(posterior, "SVI")

    return least_sure(sizes, what, fit, 600, said)


def lstm_classifier(sizes: Sizes) -> Drawn:
    said = "It reads an image row by row, from above, and speaks after the last."
    return by_svi(sizes, "lstm_classifier", "a long short-term memory of ten units", said)


def transformer_classifier(sizes: Sizes) -> Drawn:
    said = "It reads sixteen patches of 2 x 2 pixels, each beside all others; its members are modes."
    return by_modes(sizes, "transformer_classifier", "a transformer of six channels", 600, 1500, said)


# --- graphs -------------------------------------------------------------------------------------------


def communities(seed: int, nodes: int = 45) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """A graph of three groups of nodes: features and adjacency, labels (N,), and places to draw the nodes at (N, 2).

    Two nodes of one group are neighbours with probability 0.22, of two groups 0.015. Features (N, 2) are normal around
    the centre of the group, so wide that single nodes can hardly be told apart.
    """
    rng = np.random.default_rng(seed)
    y = np.arange(nodes) % 3
    angle = 2.0 * np.pi * y / 3.0 + np.pi / 2.0
    centre = np.column_stack([np.cos(angle), np.sin(angle)])
    features = centre + 1.2 * rng.normal(size=(nodes, 2))
    chance = np.where(y[:, None] == y[None, :], 0.22, 0.015)
    upper = np.triu(rng.uniform(size=(nodes, nodes)) < chance, 1)
    adjacency = (upper | upper.T).astype(int)
    # Around a circle for each group, so that no node hides another.
    turn = 2.0 * np.pi * (np.arange(nodes) // 3) / (nodes / 3.0)
    radius = np.where(np.arange(nodes) // 3 % 2, 0.62, 0.85)
    places = 1.15 * centre + radius[:, None] * np.column_stack([np.cos(turn), np.sin(turn)])
    return {"features": features, "adjacency": adjacency}, y, places


def graph_convolution(sizes: Sizes) -> Drawn:
    from matplotlib.colors import to_rgb

    x, y, _ = communities(14)
    x_new, y_new, places = communities(15)
    posterior, how = sampled(sizes, bnn.zoo.load("graph_convolution"), x, y)
    plain, how_plain = sampled(sizes, bnn.zoo.load("classification_mlp", classes=3), x["features"], y)
    figure, axes = panels(6.8, 3.8, 2)
    colours = np.array([to_rgb(colour) for colour in (BLUE, ORANGE, GREEN)])
    rights = []
    for each, prediction, title in (
        (axes[0, 0], plain.predict(x_new["features"]), "features alone"),
        (axes[0, 1], posterior.predict(x_new), "features and neighbours"),
    ):
        p = prediction.probabilities
        rights.append(int((p.argmax(axis=1) == y_new).sum()))
        sure = 1.5 * (p.max(axis=1) - 1.0 / 3.0)
        faces = 1.0 - (1.0 - colours[p.argmax(axis=1)]) * (0.05 + 0.95 * sure[:, None])
        for one, other in zip(*np.nonzero(np.triu(x_new["adjacency"])), strict=True):
            each.plot(*places[[one, other]].T, color="0.75", linewidth=0.8, zorder=1)
        for label, mark in enumerate("os^"):
            rows = y_new == label
            each.scatter(
                *places[rows].T, s=70, c=faces[rows], marker=mark, edgecolors=BLACK, linewidths=0.8, zorder=2
            )
        each.set(title=title, aspect="equal", xlim=(-2.2, 2.2), ylim=(-1.7, 2.2))
        each.set_axis_off()
    names = ("circles", "squares", "triangles")
    for label, mark in enumerate("os^"):
        # Nothing but a line of the legend.
        axes[0, 0].plot(
            [], [], mark, color=colours[label], markeredgecolor=BLACK, markersize=8, label=names[label]
        )
    legend(figure, axes[0, 0])
    return Drawn(
        figure,
        f"A new graph of {len(y_new)} nodes, from where the {len(y)} training nodes and their edges came: three groups "
        "(shapes) that features hardly tell apart. Colour: the most probable group, paler where less sure. Without "
        f"edges (`classification_mlp`) {rights[0]} nodes are right, with them {rights[1]}: a node is what its "
        "neighbours are.",
        f"Left: {how_plain}. Right: {how}",
    )


# --- examples -----------------------------------------------------------------------------------------


def draw_gains(axes: Any) -> tuple[int, float, float, float]:
    """What choosing gained over random labels on each pool of the study: number of pools, the mean and its interval."""
    rows = read_table(Path(__file__).parent / "results" / "active_learning" / "small_scores.csv")
    labels, gains = asking.small_gains(rows, *asking.SIDES["small-nuts"])
    axes.plot(labels, gains.T, color=SKY, linewidth=1.0)
    # Nothing but a line of the legend.
    axes.plot([], [], color=SKY, linewidth=1.5, label="one pool")
    axes.plot(labels, gains.mean(axis=0), color=BLUE, linewidth=2.6, label="mean")
    axes.axhline(0.0, color=BLACK, linewidth=1.0)
    axes.set(xlabel="labels known", xticks=labels, title="gain over random labels")
    axes.set_ylabel("log score, nats per row")
    found = mean(gains.mean(axis=1))
    return len(gains), found.value, found.low, found.high


def active_learning(sizes: Sizes) -> Drawn:
    small = asking.TINY_SMALL if sizes.sequential else asking.SMALL
    seed = small.first_seed
    task = asking.tasks(small.sizes)["plane"]
    data = task.data(small.sizes, seed)
    asked = asking.small_run(asking.BY_NUTS, seed, small)["asked"]
    known = [*data.first, *asked]
    posterior, how = sampled(sizes, task.model, data.x[known], data.y[known])
    figure, axes = panels(6.8, 4.2, 2)
    left, right = axes[0]
    across, up = np.linspace(-2.0, 2.0, sizes.places), np.linspace(-2.0, 2.0, sizes.places)
    draw_class_map(left, across, up, posterior.predict(grid_points(across, up)), levels=[])
    left.plot(*data.x.T, ".", color=BLACK, markersize=3, label="not asked for")
    draw_classes(
        left, data.x[data.first], data.y[data.first], ["known at first, 0", "known at first, 1"], size=5.0
    )
    for number, row in enumerate(asked, 1):
        left.annotate(
            str(number), data.x[row], ha="center", va="center", fontsize=8,
            bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": BLACK, "linewidth": 0.8},
        )  # fmt: skip
    left.axvline(asking.COIN, color=BLACK, linestyle=":", linewidth=1.4)
    left.set(
        xlabel="$x_1$",
        ylabel="$x_2$",
        xlim=(-2.0, 2.0),
        ylim=(-2.0, 2.0),
        title="labels in the order asked for",
    )
    pools, gain, low, high = draw_gains(right)
    legend(figure, left, right)
    return Drawn(
        figure,
        f"Left, one pool of `comparisons/active_learning.py`, its first: {len(data.first)} labels of two classes are "
        f"known, and {len(asked)} more are asked for, each where it tells most about the weights; right of the dotted "
        f"line a coin decides. Right, what that gained over random labels on each of {pools} pools: on average "
        f"{gain:+.3f} nats per row, with a 95 % interval from {low:+.3f} to {high:+.3f}.",
        f"`evidence_framework`, fitted again after each label; with all labels {how}",
    )


# A function of the name of a model draws it; a test says which models have none. Examples come after them.
EXAMPLES: dict[str, Callable[[Sizes], Drawn]] = {"active_learning": active_learning}
FIGURES: dict[str, Callable[[Sizes], Drawn]] = {
    **{name: globals()[name] for name in bnn.zoo.models() if name in globals()},
    **EXAMPLES,
}


# --- what is written ----------------------------------------------------------------------------------


# What `told` says of a fit that has not converged, with R-hat if it is of chains.
UNCONVERGED = re.compile(r"(not converged|converged per mode only)(?: \(R-hat ([0-9.]+)\))?")


def note_of(text: str) -> tuple[str, bool]:
    """What a picture has to say of its fit, "" if nothing, and whether it is of chains."""
    found = UNCONVERGED.findall(text)
    if not found:
        return "", False
    rhats = [float(rhat) for _, rhat in found if rhat]
    if rhats:
        return f"{NOT_CONVERGED}: R-hat {max(rhats):.2f}, not below {RHAT}", True
    return f"{NOT_CONVERGED}: {text.split(':')[0]}", False


def with_note(picture: Any, text: str, chains: bool) -> Any:
    """The picture below a strip with this text; before it, of chains, the mark of what has not converged."""
    from PIL import Image

    figure = new_figure(picture.width / 100, 0.28)
    if chains:
        handle = unconverged_handle()
        handle.set_data([0.025], [0.5])
        handle.set_transform(figure.transFigure)
        figure.add_artist(handle)
    figure.text(0.05 if chains else 0.015, 0.47, text, fontsize=13, va="center")
    figure.canvas.draw()
    strip = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])
    whole = Image.new("RGB", (picture.width, strip.height + picture.height), "white")
    whole.paste(strip, (0, 0))
    whole.paste(picture, (0, strip.height))
    return whole


def save_small(figure: Any, path: Path, note: str = "", chains: bool = False) -> None:
    """A PNG with a palette of COLOURS colours: a third of the size of one with all colours. note: see `with_note`.

    The palette covers the colours that occur, however small their area: the median cut would grey the marks.
    """
    from PIL import Image

    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])
    save_reduced(with_note(picture, note, chains) if note else picture, path)


def save_reduced(picture: Any, path: Path) -> None:
    """The picture with a palette of its own."""
    from PIL import Image

    reduced = picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


def read_captions(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / "captions.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def section(captions: Mapping[str, Mapping[str, str]]) -> str:
    """The part of models/README.md between its two marks, in the order of the names."""
    parts = [
        "The data are made for the pictures. Bands and intervals are of 90 %: the inner band of a curve is of the mean "
        "function (what is not known), the outer one of observations, except where a legend says otherwise. After each "
        "caption stand the method and what `bnn.diagnose` says of the fit. `python comparisons/zoo_gallery.py` draws "
        "all of it."
    ]
    for name in sorted(captions, key=lambda name: (name in EXAMPLES, name)):
        entry = captions[name]
        summary = re.split(r"(?<=\.)\s", entry["caption"])[0]
        parts += [
            f"### `{name}`",
            f"![{name}: {summary}](gallery/{entry['figure']})",
            f"{entry['caption']} {entry['fitted']}.",
        ]
    # A picture is one line, whatever its length.
    lines = [part if part[0] in "#!" else textwrap.fill(part, 120, break_on_hyphens=False) for part in parts]
    return "\n\n".join(lines)


def with_section(page: str, text: str) -> str:
    """The page with `text` between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"models/README.md has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(names: Sequence[str] = (), tiny: bool = False, out: str | Path | None = None) -> Path:
    """Draw models and write their captions; the folder that all went to."""
    import matplotlib

    sizes = TINY if tiny else FULL
    ours = out is None and not tiny
    folder = MODELS / "gallery" if ours else Path(out or tempfile.mkdtemp(prefix="zoo_gallery_"))
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name not in FIGURES:
            raise SystemExit(f"no figure of {name!r}: there are {', '.join(FIGURES)}")
    captions = read_captions(folder)
    todo = names or [
        name for name in FIGURES if name not in captions or not (folder / captions[name]["figure"]).is_file()
    ]
    for number, name in enumerate(todo, 1):
        clock = time.perf_counter()
        print(f"{name} ({number} of {len(todo)}) ...", flush=True)
        with matplotlib.rc_context(STYLE):
            drawn = FIGURES[name](sizes)
            save_small(drawn.figure, folder / f"{name}.png", *note_of(drawn.fitted))
        captions[name] = {"figure": f"{name}.png", "caption": drawn.caption, "fitted": drawn.fitted}
        text = json.dumps(dict(sorted(captions.items())), indent=1) + "\n"
        (folder / "captions.json").write_text(text, encoding="utf-8")
        print(f"  {time.perf_counter() - clock:.0f} s; {drawn.fitted}", flush=True)
    if ours:
        page = MODELS / "README.md"
        page.write_text(with_section(page.read_text(encoding="utf-8"), section(captions)), encoding="utf-8")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out")
    given = parser.parse_args()
    print(main(given.models, given.tiny, given.out))
