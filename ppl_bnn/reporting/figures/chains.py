"""Pictures of the fits of a comparison: ranks of the draws of chains, and loss curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.figures import BLUE, FILLED, GREY, NOISE, VERMILION
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.posterior.convergence import FEWEST_DRAWS, by_arviz, evenly_spaced
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.reporting.figures.panels import Panel, Picture, finish, line_of, rows_of
from ppl_bnn.reporting.findings import Findings

# Rows whose mean function is searched for the worst R-hat; number of simulations for the band of ranks.
ROWS_RANKED, SIMULATIONS = 100, 1000
# For ranks: fewest draws of a chain for a band, and the level of the band. False alarms should be rare.
FEWEST_RANKS, BAND = 20, 0.99
STEPS_DRAWN = 200


def function_draws(comparison: Comparison, name: str) -> Any:
    """Outputs of a network, draw by draw, as a DataTree for ArviZ: `arviz_plots.plot_rank(function_draws(...))`.

    `f` (chain, draw, row) is the mean of each draw at up to 100 test rows, or the probability of the class that
    occurred; `log_likelihood` (chain, draw) sums over training rows. UnsupportedError for a method without chains.
    """
    fit, tree = comparison.fits.get(name), comparison.trees.get(name)
    if fit is None or comparison.table.loc[name, "kind"] != "chains":
        got = f"{name!r}, which is none"
        raise UnsupportedError.of("function_draws", "a method of chains", got, "NUTS or another sampler")
    from xarray import Dataset, DataTree

    prediction = comparison.predictions[name]
    found: dict[str, Any] = {}
    if prediction.draws == math.prod(fit.shape):
        means = functions_of(prediction, comparison.test_targets, fit.shape)
        rows = evenly_spaced(means.shape[-1], ROWS_RANKED)
        found["f"] = (("chain", "draw", "row"), means[..., rows])
    if tree is not None and "log_likelihood" in tree.children:
        total = tree["log_likelihood"]["y"].values
        found["log_likelihood"] = (("chain", "draw"), total.reshape(*total.shape[:2], -1).sum(axis=-1))
    wanted, advice = "predictions of each draw, or a tree", "a prediction of all draws"
    UnsupportedError.check(found, "function_draws", wanted, repr(prediction), advice)
    if len({value[1].shape[:2] for value in found.values()}) == 1:
        return DataTree.from_dict({"posterior": Dataset(found)})
    # A thinned tree has fewer draws than the prediction.
    groups = {"f": "posterior", "log_likelihood": "log_likelihood"}
    return DataTree.from_dict({groups[key]: Dataset({key: value}) for key, value in found.items()})


def functions_of(prediction: Prediction, y: Any, shape: tuple[int, int]) -> np.ndarray:
    """Mean functions (chain, draw, row) of a prediction of all draws, or the probabilities of the labels y (N,)."""
    means = prediction.component_mean()
    if prediction.is_classes:
        labels = np.asarray(y).astype(int)
        if means.ndim == 2:
            means = np.stack([1.0 - means, means], axis=-1)
        means = means[:, np.arange(len(labels)), labels]
    return means.reshape(*shape, -1)


# --- ranks ------------------------------------------------------------------------------------------------


def ranks_of_draws(found: Findings) -> Picture:
    """Ranks of the draws of each chain among those of all, in function space, as differences of distributions."""
    panels, rows = [], []
    for name in found.names:
        try:
            quantities = list(_ranked_quantities(variables(function_draws(found.comparison, name))))
        except UnsupportedError:
            continue
        for label, values in quantities:
            if values.shape[0] < 2 or not np.isfinite(values).all():
                continue
            ranked = rank_curves(values)
            chains, outside = len(ranked.curves), len(ranked.outside)
            result = "too few independent draws for a band"
            if ranked.band is not None:
                left = f"{outside} of {chains} chains leave" if outside else "all chains stay inside"
                result = f"{left} the band of chains that agree"
            words = f"Ranks of {label} of {name}, {chains} chains, {ranked.draws} draws of each: {result}."
            panels.append(Panel(f"{name}: {label}", partial(draw_ranks, ranked=ranked), words))
            for chain, curve in enumerate(ranked.curves):
                values = {name: zip(ranked.at, curve, strict=True)}
                rows += rows_of(("at", "difference"), values, quantity=label, chain=chain)
    caption = (
        "Draws of all chains are ranked together; for each chain the distribution of its ranks minus the uniform one. "
        "Chains that agree vary around zero inside the band, which contains all of them in 99 % of cases. Draws are "
        "thinned until they are nearly independent. The quantities are the log likelihood of the training rows and, of "
        "the mean function at the test rows, that with the largest R-hat. Weights are not ranked: they can be "
        "exchanged without a change of the function."
    )
    return Picture("Ranks in function space", caption, panels, rows, "No method has several chains.")


def variables(tree: Any) -> dict[str, np.ndarray]:
    """Name -> values of all variables of a tree."""
    groups = tree.children.values()
    return {str(key): value.values for group in groups for key, value in group.dataset.items()}


def _ranked_quantities(found: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    if "f" in found and (worst := worst_row(found["f"])) is not None:
        yield "mean function, worst row", found["f"][..., worst]
    if "log_likelihood" in found:
        yield "log likelihood", found["log_likelihood"]


def worst_row(values: np.ndarray) -> int | None:
    """The row of values (chain, draw, row) with the largest R-hat; None if there is no R-hat or nothing varies."""
    varies = np.flatnonzero(values.max(axis=(0, 1)) > values.min(axis=(0, 1)))
    if not len(varies) or values.shape[0] < 2 or values.shape[1] < FEWEST_DRAWS:
        return None
    return int(varies[int(np.argmax(by_arviz("rhat", values[..., varies], np.inf, method="rank")))])


@dataclass(frozen=True)
class RankCurves:
    """ECDF of ranks minus uniform, made by `rank_curves`.

    `at` (n,) are the points, `curves` (chain, n), `band` (n,) its half-width or None; `draws` per chain after thinning.
    """

    at: np.ndarray
    curves: np.ndarray
    band: np.ndarray | None
    draws: int

    @property
    def outside(self) -> list[int]:
        """The chains that leave the band anywhere."""
        band = math.inf if self.band is None else self.band
        return [index for index, curve in enumerate(self.curves) if np.any(np.abs(curve) > band)]


def rank_curves(values: np.ndarray, seed: int = 0) -> RankCurves:
    """ECDF minus uniform of fractional ranks of draws (chain, draw) among all chains (Säilynoja et al. 2022).

    Draws are thinned to the median bulk ESS of single chains, since the ESS of all chains together is small when they
    disagree. The simultaneous 99 % band is from 1000 random divisions of all ranks, and proportional to
    sqrt(u (1 - u) (1 - 1 / m) / n). With fewer than 20 draws per chain there is no band and no thinning.
    """
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]
    from scipy.stats import rankdata

    chains, draws = values.shape
    by_chain = values.astype(np.float64)[:, None, :, None]
    with np.errstate(all="ignore"):
        found = [array_stats.ess(chain, method="bulk", chain_axis=0, draw_axis=1) for chain in by_chain]
    sizes = np.nan_to_num([np.ravel(size)[0] for size in found], nan=1.0)
    factor = math.ceil(draws / max(float(np.median(sizes)), 1.0))
    known = draws // factor >= FEWEST_RANKS
    thin = values[:, factor - 1 :: factor] if known else values
    count = thin.shape[1]
    steps = min(count, STEPS_DRAWN)
    places = np.arange(1, steps) / steps
    shares = rankdata(thin).reshape(thin.shape) / thin.size
    curves = np.stack([np.mean(shares <= place, axis=1) for place in places], axis=1) - places
    band = None
    if known:
        deviation = np.sqrt(places * (1.0 - places) * (1.0 - 1.0 / chains) / count)
        upto = np.floor(places * thin.size + 1e-9).astype(int) - 1
        labels = np.tile(np.repeat(np.arange(chains, dtype=np.int32), count), (SIMULATIONS, 1))
        labels = np.random.default_rng(seed).permuted(labels, axis=1)
        largest = np.zeros(SIMULATIONS)
        for chain in range(chains):
            inside = np.cumsum(labels == chain, axis=1)[:, upto] / count
            np.maximum(largest, np.max(np.abs(inside - places) / deviation, axis=1), out=largest)
        band = np.quantile(largest, BAND) * deviation
    return RankCurves(places, curves, band, count)


def draw_ranks(axes: Axes, ranked: RankCurves) -> None:
    at = np.concatenate([[0.0], ranked.at, [1.0]])
    if ranked.band is not None:
        band = np.pad(ranked.band, 1)
        axes.fill_between(at, -band, band, **NOISE, label="99 % if chains agree")
    for chain, curve in enumerate(np.pad(ranked.curves, ((0, 0), (1, 1)))):
        style: dict[str, Any] = {"color": BLUE, "linewidth": 1.0, "label": "a chain"}
        if chain in ranked.outside:
            style = {"color": VERMILION, "linewidth": 1.6, "label": "a chain that leaves the band"}
            style["linestyle"] = "--"
        axes.plot(at, curve, **style)
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    axes.set_xlim(0.0, 1.0)
    finish(axes, "rank among all draws (share)", "distribution minus uniform")


def draw_traces(axes: Axes, values: np.ndarray, label: str) -> None:
    """Draw values (chain, draw) over the draws, a line for each chain."""
    for chain, curve in enumerate(values):
        style: dict[str, Any] = line_of(chain) | {"linewidth": 0.8, "alpha": 0.8}
        axes.plot(np.arange(1, len(curve) + 1), curve, label=f"chain {chain + 1}", **style)
    axes.set_xlim(1, max(values.shape[1], 2))
    finish(axes, "draw", label)


# --- losses -----------------------------------------------------------------------------------------------


def loss_curves(history: Mapping[str, Any]) -> np.ndarray:
    """Losses (steps, members) of a fit; of no members if it has no loss curve."""
    curves = np.asarray(history.get("loss", history.get("member_loss", ())), dtype=np.float64)
    if curves.ndim == 1:
        curves = curves[:, None]
    if curves.ndim != 2 or len(curves) < 2 or not np.isfinite(curves).any():
        return np.empty((0, 0))
    return curves


def losses(found: Findings) -> Picture:
    """The loss curve of each method that has one."""
    panels, rows = [], []
    for name in found.names:
        fit = found.comparison.fits.get(name)
        curves = loss_curves({} if fit is None else fit.info.history)
        if not curves.size:
            continue
        binned = binned_losses(curves)
        for curve, bins in enumerate(binned):
            rows += rows_of(("step", "mean", "lowest", "highest"), {name: bins}, curve=curve)
        several = f", {len(binned)} members" if len(binned) > 1 else ""
        first, last = (np.nanmean([bins[place, 1] for bins in binned]) for place in (0, -1))
        words = f"Loss of {name} over {len(curves)} steps{several}: from {first:.4g} in the first to {last:.4g} in "
        draw = partial(draw_losses, binned=binned)
        panels.append(Panel(f"{name}{several}", draw, f"{words}the last hundredth or so."))
    caption = (
        "The loss over the steps of the optimiser: means over short stretches, with the lowest and highest value in "
        "each as a band. The axis shows all losses after the first tenth of the steps; earlier losses may be above it. "
        "Losses of different methods are different quantities."
    )
    return Picture("Loss curves", caption, panels, rows, "No method has stored a loss curve.")


def binned_losses(curves: np.ndarray) -> list[np.ndarray]:
    """Stretches of each curve of losses (steps, members), as `_binned` gives them."""
    return [_binned(curve) for curve in curves.T]


def _binned(curve: np.ndarray) -> np.ndarray:
    """Last step, mean, lowest and highest finite loss of each of at most STEPS_DRAWN bins, (bins, 4)."""
    steps = np.flatnonzero(np.isfinite(curve))
    parts = np.array_split(steps, min(STEPS_DRAWN, len(steps))) if len(steps) else []
    bins = [(part[-1] + 1, curve[part].mean(), curve[part].min(), curve[part].max()) for part in parts]
    return np.array(bins, dtype=np.float64)


def draw_losses(axes: Axes, binned: Sequence[np.ndarray]) -> None:
    single, ends = len(binned) == 1, []
    for steps, mean, low, high in (bins.T for bins in binned):
        if single:
            axes.fill_between(steps, low, high, **FILLED, label="lowest to highest")
        shade = 1.0 if single else 0.6
        axes.plot(steps, mean, color=BLUE, linewidth=1.2, alpha=shade, label="mean of a stretch")
        late = steps > 0.1 * steps[-1]
        ends += [(low if single else mean)[late].min(), (high if single else mean)[late].max()]
    pad = 0.05 * float(max(ends) - min(ends)) or 1.0
    axes.set_ylim(min(ends) - pad, max(ends) + pad)
    finish(axes, "step", "loss, nats")
