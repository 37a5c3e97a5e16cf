"""Figures about the fits of a comparison: ranks of draws, losses, leave-one-out, Pareto k, gaps to the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.diagnostics.importance import K_LIMIT, LeaveOneOut, leave_one_out
from ppl_bnn.evaluation.comparison.drawing import BLUE, GREY, SKY, VERMILION
from ppl_bnn.evaluation.comparison.figures import predicted_for_drawing
from ppl_bnn.evaluation.comparison.panels import (
    Panel,
    Picture,
    draw_gaps,
    draw_marks_inside,
    draw_ratios,
    forest_panel,
    frame_of,
    height_for,
    names_below,
    plain_axes,
    together,
)
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import LEVELS, Transform
from ppl_bnn.prediction.scores import coverages, paired_difference, pit_uniformity
from ppl_bnn.reporting.verdict import row_scores

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ppl_bnn.evaluation.comparison.comparison import Comparison


# Above this number, marks are drawn as pixels.
MANY = 400
# Rows whose mean function is searched for the worst R-hat; number of simulations for the band of ranks.
ROWS_RANKED, SIMULATIONS = 100, 1000
# For ranks: fewest draws of a chain for a band, and the level of the band. False alarms should be rare.
FEWEST_RANKS, BAND = 20, 0.99
STEPS_DRAWN = 200


class Findings:
    """Figures computed from a comparison and shared by several pictures; each is computed on first use."""

    def __init__(self, comparison: Comparison):
        self.comparison = comparison

    @property
    def names(self) -> list[str]:
        """The methods with predictions, in the order of the table."""
        return [str(name) for name in self.comparison.table.index if name in self.comparison.predictions]

    @property
    def reference(self) -> str | None:
        """The reference, if it has predictions."""
        name = self.comparison.reference
        return name if name in self.comparison.predictions else None

    @cached_property
    def row_scores(self) -> dict[str, dict[str, np.ndarray]]:
        """The scores of each test row, see `verdict.row_scores`."""
        return row_scores(self.comparison)

    @cached_property
    def left_out(self) -> dict[str, LeaveOneOut]:
        """PSIS-LOO of each tree for which leave-one-out is defined."""
        found = {name: leave_one_out(tree) for name, tree in self.comparison.trees.items()}
        return {name: loo for name, loo in found.items() if not loo.reason}

    @cached_property
    def transforms(self) -> tuple[dict[str, Transform], str]:
        """Probability integral transforms of each method that predicts numbers; and why others have none."""
        made, refused = {}, ""
        for name in self.names:
            try:
                made[name] = Transform.of(self.comparison.predictions[name], self.comparison.test_targets)
            except (UnsupportedError, InputError) as error:
                refused = str(error)
        return made, refused

    @cached_property
    def intervals(self) -> pd.DataFrame:
        """Intervals and PIT of each method that predicts numbers, one row each.

        Columns: `coverage_50`, `width_50` and so on at `LEVELS`, `pit_distance` and `pit_p` of `scores.pit_uniformity`.
        """
        rows = []
        for name in self.transforms[0]:
            prediction, y = self.comparison.predictions[name], self.comparison.test_targets
            try:
                found = coverages(prediction, y, LEVELS)
            except UnsupportedError:
                continue
            row: dict[str, Any] = {"method": name}
            for level, share, width in zip(found["level"], found["coverage"], found["width"], strict=True):
                row |= {f"coverage_{100 * level:.0f}": share, f"width_{100 * level:.0f}": width}
            row["pit_distance"], row["pit_p"] = pit_uniformity(prediction, y)
            rows.append(row)
        return frame_of(rows)

    def at(self, name: str, x: np.ndarray) -> Prediction | None:
        """The prediction of a method at the inputs of a picture; None if it has no posterior and none was stored."""
        posterior = self.comparison.posteriors.get(name)
        if posterior is not None:
            return predicted_for_drawing(posterior, x, self.comparison.data.get("seed", 0))
        kept = self.comparison.drawn_at
        return self.comparison.drawn.get(name) if kept is not None and np.array_equal(kept, x) else None


def behind(values: Mapping[str, np.ndarray], name: str, column: str) -> tuple[float, float]:
    """Lead of the best method over `name`, and its standard error, in the units of the column."""
    best = max(values, key=lambda other: float(np.mean(values[other])))
    gap, error = paired_difference(values[best], values[name])
    if name == best:
        error = 0.0
    if column == "rmse":
        # sqrt(a) - sqrt(b) = (a - b) / (sqrt(a) + sqrt(b)); the values are squared errors with the sign changed.
        both = sum(math.sqrt(max(-float(np.mean(values[each])), 0.0)) for each in (best, name))
        gap, error = (gap / both, error / both) if both > 0.0 else (0.0, 0.0)
    return gap, error


def elpd_figure(comparison: Comparison) -> Figure:
    """Differences of log score to the best method, on test rows and by leave-one-out over training rows."""
    return together(elpd(Findings(comparison)))


def elpd(found: Findings) -> Picture:
    """The picture of `elpd_figure`."""
    scored = found.row_scores["log_score"]
    panels, rows = [], []
    entries = []
    for name in scored:
        gap, error = behind(scored, name, "log_score")
        entries.append((name, -gap, error, False))
    entries.sort(key=lambda entry: -entry[1])
    if len(entries) > 1:
        rows += [_difference("test rows, mean", *entry) for entry in entries]
        panels.append(
            forest_panel(
                f"On {len(found.comparison.test_targets)} test rows",
                entries,
                "log score minus the best,\nnats per test row",
            )
        )
    found_loo = {
        name: np.asarray(loo.elpd_data.elpd_i.values).ravel() for name, loo in found.left_out.items()
    }
    if len(found_loo) > 1:
        best = max(found_loo, key=lambda name: float(found_loo[name].sum()))
        entries = []
        for name, values in found_loo.items():
            gap, error = paired_difference(found_loo[best], values)
            count = len(values)
            doubtful = not found.left_out[name].worst_k <= K_LIMIT
            entries.append((name, -gap * count, 0.0 if name == best else error * count, doubtful))
        entries.sort(key=lambda entry: -entry[1])
        rows += [_difference("leave-one-out, sum", *entry) for entry in entries]
        panels.append(
            forest_panel(
                f"By leave-one-out over {len(found_loo[best])} training rows",
                entries,
                "ELPD minus the best,\nnats in all",
                "Pareto k above 0.7: not to be relied on",
            )
        )
    return Picture(
        "elpd",
        "Expected log predictive density",
        "Differences to the nominally best method, with two standard errors of the paired difference. A bar that "
        "reaches the dashed line is no difference that these rows establish. Leave-one-out is by Pareto-smoothed "
        "importance sampling (ArviZ); draws of an approximation are taken at their word there, and hollow marks have "
        "rows for which it fails.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "There are no two methods to compare.",
    )


def _difference(where: str, name: str, value: float, error: float, doubtful: bool) -> dict[str, Any]:
    return {
        "where": where,
        "method": name,
        "difference": value,
        "standard_error": error,
        "pareto_k_above_limit": doubtful,
    }


def ranks_figure(comparison: Comparison) -> Figure:
    """Ranks of the draws of each chain among those of all, in function space, as differences of distributions."""
    return together(ranks(Findings(comparison)))


def function_draws(comparison: Comparison, name: str) -> Any:
    """Outputs of a network, draw by draw, as a DataTree for ArviZ: `arviz_plots.plot_rank(function_draws(...))`.

    Parameters
    ----------
    comparison : Comparison
        The comparison.
    name : str
        Name of the method.

    Returns
    -------
    xarray.DataTree
        `f` (chain, draw, row): the mean of each draw at up to 100 test rows (for classes the probability of the class
        that occurred). `log_likelihood` (chain, draw): the sum over training rows.

    Raises
    ------
    UnsupportedError
        A method that is not one of chains, or whose predictions are not those of its draws.
    """
    fit, tree = comparison.fits.get(name), comparison.trees.get(name)
    if fit is None or comparison.table.loc[name, "kind"] != "chains":
        raise UnsupportedError.of(
            "function_draws", "a method of chains", f"{name!r}, which is none", "NUTS or another sampler"
        )
    from xarray import Dataset, DataTree

    prediction = comparison.predictions[name]
    chains, draws = fit.shape
    found: dict[str, Any] = {}
    if prediction.draws == chains * draws:
        means = prediction.component_mean()
        if prediction.is_classes:
            labels = np.asarray(comparison.test_targets).astype(int)
            means = (
                np.where(labels == 1, means, 1.0 - means)
                if means.ndim == 2
                else means[:, np.arange(len(labels)), labels]
            )
        means = means.reshape(chains, draws, -1)
        rows = np.unique(np.linspace(0, means.shape[-1] - 1, ROWS_RANKED).round().astype(int))
        found["f"] = (("chain", "draw", "row"), means[..., rows])
    if tree is not None and "log_likelihood" in tree.children:
        total = tree["log_likelihood"]["y"].values
        found["log_likelihood"] = (("chain", "draw"), total.reshape(*total.shape[:2], -1).sum(axis=-1))
    if not found:
        raise UnsupportedError.of(
            "function_draws",
            "predictions of each draw, or a tree",
            repr(prediction),
            "a prediction of all draws",
        )
    sets = {key: Dataset({key: value}) for key, value in found.items()}
    if len({value[1].shape[:2] for value in found.values()}) == 1:
        return DataTree.from_dict({"posterior": Dataset(found)})
    # A thinned tree has fewer draws than the prediction.
    return DataTree.from_dict({"posterior": sets["f"], "log_likelihood": sets["log_likelihood"]})


def ranks(found: Findings) -> Picture:
    """The picture of `ranks_figure`."""
    comparison = found.comparison
    panels, rows = [], []
    for name in found.names:
        if comparison.table.loc[name, "kind"] != "chains":
            continue
        try:
            tree = function_draws(comparison, name)
        except UnsupportedError:
            continue
        for label, values in _ranked_quantities(tree):
            if values.shape[0] < 2 or not np.isfinite(values).all():
                continue
            made = rank_curves(values)
            outside = made.outside
            told = (
                "too few independent draws of each for a band"
                if made.band is None
                else "all chains stay inside the band of chains that agree"
                if not outside
                else f"{len(outside)} of {len(made.curves)} chains leave the band of chains that agree"
            )
            panels.append(
                Panel(
                    f"{name}: {label}",
                    _ranks_drawer(made),
                    f"Ranks of {label} of {name}, {len(made.curves)} chains, {made.draws} draws of each: {told}.",
                )
            )
            rows += [
                {"method": name, "quantity": label, "chain": chain, "at": at, "difference": value}
                for chain, curve in enumerate(made.curves)
                for at, value in zip(made.at, curve, strict=True)
            ]
    return Picture(
        "ranks",
        "Ranks in function space",
        "Draws of all chains are ranked together; for each chain the distribution of its ranks minus the uniform "
        "one. Chains that agree wander around zero inside the band, which holds all of them together in 99 % of "
        "cases. Draws are thinned until they are nearly independent. Shown are the log likelihood of the training "
        "rows and, of the mean function at the test rows, that with the largest R-hat: weights themselves can be "
        "exchanged without any change to the function, and are not ranked.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method has several chains.",
    )


def _ranked_quantities(tree: Any) -> Iterable[tuple[str, np.ndarray]]:
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

    groups = [tree[name].dataset for name in tree.children]
    for each in groups:
        if "f" in each:
            values = each["f"].values
            varies = np.flatnonzero(values.max(axis=(0, 1)) > values.min(axis=(0, 1)))
            if len(varies) and values.shape[0] > 1 and values.shape[1] > 3:
                with np.errstate(all="ignore"):
                    rhat: Any = array_stats.rhat(
                        values[..., varies], method="rank", chain_axis=0, draw_axis=1
                    )
                worst = varies[int(np.argmax(np.nan_to_num(rhat, nan=np.inf)))]
                yield "mean function, worst row", values[..., worst]
    for each in groups:
        if "log_likelihood" in each:
            yield "log likelihood", each["log_likelihood"].values


@dataclass(frozen=True)
class RankCurves:
    """ECDF of ranks minus uniform, made by `rank_curves`.

    Parameters
    ----------
    at : np.ndarray
        (n,), the points of the curves.
    curves : np.ndarray
        (chain, n), the differences.
    band : np.ndarray, optional
        (n,), half-width of the band, or None.
    draws : int
        Number of draws of a chain, after thinning.
    """

    at: np.ndarray
    curves: np.ndarray
    band: np.ndarray | None
    draws: int

    @property
    def outside(self) -> list[int]:
        """The chains that leave the band anywhere."""
        if self.band is None:
            return []
        return [index for index, curve in enumerate(self.curves) if np.any(np.abs(curve) > self.band)]


def rank_curves(values: np.ndarray, seed: int = 0) -> RankCurves:
    """Fractional ranks of draws among those of all chains, as differences of distributions.

    Draws are thinned to about the effective sample size of single chains (ArviZ's bulk ESS, the median over chains:
    that of all chains together is small exactly when they disagree). The band is simultaneous: ranks of chains that
    agree are a random division of all ranks, of which 1000 are simulated; in 99 % of them no chain leaves the band
    anywhere. Its width is proportional to the pointwise standard deviation sqrt(u (1 - u) (1 - 1 / m) / n). If fewer
    than 20 draws of a chain are left there is no band, and nothing is thinned.

    Parameters
    ----------
    values : np.ndarray
        Draws (chain, draw).
    seed : int
        Seed of the simulations.

    Returns
    -------
    RankCurves

    References
    ----------
    Säilynoja, Bürkner and Vehtari (2022), Statistics and Computing 32.
    """
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]
    from scipy.stats import rankdata

    chains, draws = values.shape
    with np.errstate(all="ignore"):
        sizes = [
            np.ravel(array_stats.ess(chain[None, :, None], method="bulk", chain_axis=0, draw_axis=1))[0]
            for chain in values.astype(np.float64)
        ]
    size = max(float(np.median(np.nan_to_num(sizes, nan=1.0))), 1.0)
    factor = math.ceil(draws / size)
    known = draws // factor >= FEWEST_RANKS
    thin = values[:, factor - 1 :: factor] if known else values
    count = thin.shape[1]
    steps = min(count, STEPS_DRAWN)
    places = np.arange(1, steps) / steps
    shares = rankdata(thin).reshape(thin.shape) / thin.size
    found = np.stack([np.mean(shares <= place, axis=1) for place in places], axis=1) - places
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
    return RankCurves(places, found, band, count)


def _ranks_drawer(made: RankCurves) -> Any:
    def draw(axes: Axes) -> None:
        at = np.concatenate([[0.0], made.at, [1.0]])
        closed = np.pad(made.curves, ((0, 0), (1, 1)))
        if made.band is not None:
            band = np.pad(made.band, 1)
            axes.fill_between(
                at, -band, band, color=GREY, alpha=0.18, linewidth=0, label="99 % where chains agree"
            )
        for chain, curve in enumerate(closed):
            off = chain in made.outside
            axes.plot(
                at,
                curve,
                color=VERMILION if off else BLUE,
                linewidth=1.6 if off else 1.0,
                linestyle="--" if off else "-",
                label="a chain that leaves the band" if off else "a chain",
            )
        axes.axhline(0.0, color=GREY, linewidth=0.8)
        axes.set_xlim(0.0, 1.0)
        axes.set_xlabel("rank among all draws (share)")
        axes.set_ylabel("distribution minus uniform")
        plain_axes(axes)

    return draw


def losses_figure(comparison: Comparison) -> Figure:
    """The loss curve of each method that has one."""
    return together(losses(Findings(comparison)))


def losses(found: Findings) -> Picture:
    """The picture of `losses_figure`."""
    panels, rows = [], []
    for name in found.names:
        fit = found.comparison.fits.get(name)
        history = {} if fit is None else fit.info.history
        curves = np.asarray(history.get("loss", history.get("member_loss", ())), dtype=np.float64)
        if curves.ndim == 1:
            curves = curves[:, None]
        if curves.ndim != 2 or len(curves) < 2 or not np.isfinite(curves).any():
            continue
        made = [_binned(curves[:, column]) for column in range(curves.shape[1])]
        rows += [
            {"method": name, "curve": column, "step": step, "mean": mean, "lowest": low, "highest": high}
            for column, (steps, means, lows, highs) in enumerate(made)
            for step, mean, low, high in zip(steps, means, lows, highs, strict=True)
        ]
        several = f", {len(made)} members" if len(made) > 1 else ""
        first, last = np.nanmean([each[1][0] for each in made]), np.nanmean([each[1][-1] for each in made])
        panels.append(
            Panel(
                f"{name}{several}",
                _losses_drawer(made),
                f"Loss of {name} over {len(curves)} steps{several}: from {first:.4g} in the first to {last:.4g} in "
                "the last hundredth or so.",
            )
        )
    return Picture(
        "losses",
        "Loss curves",
        "The loss over the steps of the optimiser: means over short stretches, with the lowest and highest value in "
        "each as a band. The axis shows what comes after the first tenth of the steps in full; earlier losses may "
        "lie above it. Losses of different methods are different quantities.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method keeps a loss curve.",
    )


def _binned(curve: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(last step of each bin, mean, lowest, highest) of finite losses, in at most STEPS_DRAWN bins."""
    steps = np.flatnonzero(np.isfinite(curve))
    parts = np.array_split(steps, min(STEPS_DRAWN, len(steps))) if len(steps) else []
    columns = [(part[-1] + 1, curve[part].mean(), curve[part].min(), curve[part].max()) for part in parts]
    at, mean, low, high = (np.array(column, dtype=np.float64) for column in zip(*columns, strict=True))
    return at, mean, low, high


def _losses_drawer(made: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]) -> Any:
    def draw(axes: Axes) -> None:
        lowest, highest = math.inf, -math.inf
        for steps, mean, low, high in made:
            single = len(made) == 1
            if single:
                axes.fill_between(
                    steps, low, high, color=SKY, alpha=0.35, linewidth=0, label="lowest to highest"
                )
            axes.plot(
                steps,
                mean,
                color=BLUE,
                linewidth=1.2,
                alpha=1.0 if single else 0.6,
                label="mean of a stretch",
            )
            late = steps > 0.1 * steps[-1]
            lowest = min(lowest, float((low if single else mean)[late].min()))
            highest = max(highest, float((high if single else mean)[late].max()))
        pad = 0.05 * (highest - lowest) or 1.0
        axes.set_ylim(lowest - pad, highest + pad)
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats")
        plain_axes(axes)

    return draw


def gap_figure(comparison: Comparison) -> Figure:
    """Distance of the mean function and the spread of each method to the reference, beside sampling noise alone."""
    return together(gap(Findings(comparison)))


def gap(found: Findings) -> Picture:
    """The picture of `gap_figure`."""
    comparison, reference = found.comparison, found.reference
    heading = "Gap to the reference, and the noise floor"
    if reference is None:
        return Picture(
            "gap", heading, "", missing="There is no reference to measure a gap by, or it gave no posterior."
        )
    table = comparison.table
    rows = [
        {
            "method": name,
            **{
                column: float(table.loc[name, column])  # type: ignore[arg-type]
                for column in ("gap_mean", "gap_mean_floor", "gap_sd_ratio", "gap_sd_floor")
            },
        }
        for name in found.names
        if name != reference and math.isfinite(float(table.loc[name, "gap_mean"]))  # type: ignore[arg-type]
    ]
    if not rows:
        return Picture("gap", heading, "", missing="No other method has a gap that could be measured.")
    rows.sort(key=lambda row: row["gap_mean"])
    names = [row["method"] for row in rows]
    floor, floor_ratio = rows[0]["gap_mean_floor"], rows[0]["gap_sd_floor"]
    known = math.isfinite(floor) and math.isfinite(floor_ratio) and floor_ratio > 0.0
    noise = f" Between two halves of {reference}: {floor:.2f}." if known else ""
    noise_ratio = f" Between two halves of {reference}: {floor_ratio:.2f}." if known else ""
    panels = (
        Panel(
            "Mean function",
            lambda axes: draw_gaps(axes, names, [row["gap_mean"] for row in rows], floor if known else None),
            f"Distance of the mean function from that of {reference} in its epistemic standard deviations: "
            + "; ".join(f"{row['method']} {row['gap_mean']:.2f}" for row in rows)
            + f".{noise}",
            height_for(len(names)),
        ),
        Panel(
            "Spread",
            lambda axes: draw_ratios(
                axes, names, [row["gap_sd_ratio"] for row in rows], floor_ratio if known else None
            ),
            f"Epistemic standard deviation over that of {reference}: "
            + "; ".join(f"{row['method']} {row['gap_sd_ratio']:.2f}" for row in rows)
            + f".{noise_ratio}",
            height_for(len(names)),
        ),
    )
    return Picture(
        "gap",
        heading,
        f"First, how far the mean function is from that of {reference}, in its epistemic standard deviations. Then, "
        "the epistemic standard deviation divided by its own; 1 is right. Grey is what two halves of the draws of "
        f"{reference} differ by: sampling noise alone. Logarithmic axes; an arrow is a value beyond the edge.",
        panels,
        frame_of(rows),
    )


def pareto_k_figure(comparison: Comparison) -> Figure:
    """k-hat of each approximation as an importance proposal, and Pareto k of leaving out each training row."""
    return together(pareto_k_picture(Findings(comparison)))


def pareto_k_picture(found: Findings) -> Picture:
    """The picture of `pareto_k_figure`."""
    table, panels, rows = found.comparison.table, [], []
    hats = [
        (name, float(table.loc[name, "k_hat"]))  # type: ignore[arg-type]
        for name in found.names
        if not math.isnan(float(table.loc[name, "k_hat"]))  # type: ignore[arg-type]
    ]
    rows += [{"method": name, "what": "p / q", "row": -1, "pareto_k": k} for name, k in hats]
    if hats:
        panels.append(
            Panel(
                "k-hat of the approximation",
                lambda axes: _draw_k_hats(axes, hats),
                "k-hat of p(w, D) / q(w), good below 0.7: "
                + "; ".join(f"{name} {k:.2f}" for name, k in hats)
                + ".",
                height_for(len(hats)),
            )
        )
    per_row = {name: np.ravel(loo.elpd_data.pareto_k.values) for name, loo in found.left_out.items()}
    rows += [
        {"method": name, "what": "leave-one-out", "row": row, "pareto_k": float(k)}
        for name, ks in per_row.items()
        for row, k in enumerate(ks)
    ]
    if per_row:
        panels.append(
            Panel(
                "Pareto k of training rows",
                lambda axes: _draw_row_ks(axes, per_row),
                "Pareto k of leaving out each training row; largest, and share above 0.7: "
                + "; ".join(
                    f"{name} {np.max(ks):.2f}, {np.mean(~(ks <= K_LIMIT)):.1%}"
                    for name, ks in per_row.items()
                )
                + ".",
                height_for(len(per_row)),
            )
        )
    return Picture(
        "pareto_k",
        "Pareto k",
        "First, k-hat of the importance weights p(w, D) / q(w) of each approximation with a density. Above 0.7 it is "
        "no proposal for importance sampling; over hundreds of weights that is nearly always so, and says little "
        "about its predictions. Then, k of leaving out one training row after the other; above 0.7 leave-one-out "
        "cannot be relied on for that row. Arrows stand for infinite values.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method has a density, or rows that can be left out.",
    )


def _draw_k_hats(axes: Axes, hats: Sequence[tuple[str, float]]) -> None:
    finite = [k for _, k in hats if math.isfinite(k)]
    low, high = min([0.0, *finite]) - 0.1, max([1.2, *finite]) + 0.2
    axes.set_xlim(low, high)
    axes.axvline(K_LIMIT, color=GREY, linewidth=1.0, linestyle="--", label="limit 0.7", zorder=1)
    draw_marks_inside(axes, [k for _, k in hats], low, high)
    names_below(axes, [name for name, _ in hats])
    axes.set_xlabel("k-hat")
    plain_axes(axes)


def _draw_row_ks(axes: Axes, per_row: Mapping[str, np.ndarray]) -> None:
    finite = np.concatenate([ks[np.isfinite(ks)] for ks in per_row.values()] or [np.zeros(1)])
    low = min(-0.1, float(finite.min(initial=0.0))) - 0.05
    high = max(1.0, float(finite.max(initial=0.0))) + 0.1
    axes.set_xlim(low, high)
    axes.axvline(K_LIMIT, color=GREY, linewidth=1.0, linestyle="--", label="limit 0.7", zorder=1)
    for place, ks in enumerate(per_row.values()):
        # Rows of equal k are drawn side by side in a fixed zigzag, so that the picture is reproducible.
        beside = place + 0.3 * (np.arange(len(ks)) * 0.618034 % 1.0 - 0.5)
        bad = ~(ks <= K_LIMIT)
        at = np.clip(np.nan_to_num(ks, nan=high, posinf=high), low, high)
        many = len(ks) > MANY
        for rows, colour, mark, label in (
            (~bad, BLUE, ".", "a training row"),
            (bad, VERMILION, "D", "a row above the limit"),
        ):
            axes.plot(
                at[rows],
                beside[rows],
                mark,
                color=colour,
                markersize=4.0 if mark == "." else 3.5,
                alpha=0.8,
                markeredgewidth=0.0,
                label=label,
                rasterized=many,
                zorder=3,
            )
    names_below(axes, list(per_row))
    axes.set_xlabel("Pareto k")
    plain_axes(axes)
