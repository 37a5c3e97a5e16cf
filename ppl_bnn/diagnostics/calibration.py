"""Result of a simulation-based calibration: ranks, tests of their uniformity, and figures."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import InputError, Interrupted, check_known

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


ERROR_RATE = 0.05
FEWEST = 20
MOST_BINS = 20
FEWEST_PER_BIN = 5
NULL_DRAWS = 9999
CALIBRATED = "calibrated as far as seen"
MISCALIBRATED = "miscalibrated"
UNDECIDED = "undecided"


class CalibrationInterrupted(Interrupted["Calibration"]):
    """Raised on Ctrl-C during `simulation_based_calibration`; `partial` is the `Calibration` of what had finished."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Ranks of true values among posterior draws, one simulation per row, made by `simulation_based_calibration`.

    Parameters
    ----------
    subject : str
        The method and its system.
    names : tuple of str
        Names of the functions, (F,).
    numbers : np.ndarray
        Numbers of the simulations that finished, (S,).
    ranks : np.ndarray
        How many of the `draws` lie below the truth, (S, F), integers in 0..draws. Ties are broken at random.
    truths : np.ndarray
        Value of each function at the true parameters, (S, F).
    draws : int
        Number of posterior draws that each truth is ranked among.
    asked : int
        Number of simulations requested.
    failures : dict of int to str
        Number of a failed simulation -> why it has no ranks.
    constant : tuple of str
        Functions that never varied; they are left out.
    not_converged : int
        How many of the S fits reported that they had not converged.
    error_rate : float
        Probability that an exact method is called miscalibrated, over all functions and tests (Bonferroni).
    figures : dict of str to np.ndarray
        Name -> (S,): the figures computed from each fit, NaN where a fit has none.

    Notes
    -----
    The ranks of an exact method are uniform even if some fits fail: the data decide whether a fit fails, and given the
    data the truth is one more draw from the posterior.
    """

    subject: str
    names: tuple[str, ...]
    numbers: np.ndarray
    ranks: np.ndarray
    truths: np.ndarray
    draws: int
    asked: int
    failures: dict[int, str] = field(default_factory=dict)
    constant: tuple[str, ...] = ()
    not_converged: int = 0
    error_rate: float = ERROR_RATE
    figures: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def simulations(self) -> int:
        """Number of simulations that finished."""
        return len(self.ranks)

    @property
    def probabilities(self) -> np.ndarray:
        """P_q(theta~ > theta), the share of the draws above the truth, (S, F)."""
        return 1.0 - self.ranks / self.draws

    @cached_property
    def tests(self) -> dict[str, Uniformity]:
        """The tests of each function, by name; empty with fewer than 20 simulations."""
        if self.simulations < FEWEST:
            return {}
        # Enough draws of the null distribution for a p-value to fall well below the threshold of a single test.
        count = max(NULL_DRAWS, int(np.ceil(20.0 * 3 * len(self.names) / self.error_rate)))
        columns = zip(self.names, self.ranks.T, strict=True)
        return {name: uniformity(ranks, self.draws, null_draws=count) for name, ranks in columns}

    @property
    def threshold(self) -> float:
        """The p-value below which a single test is significant: the error rate over three tests per function."""
        return self.error_rate / (3 * max(1, len(self.names)))

    @property
    def verdict(self) -> str:
        """ "calibrated as far as seen", "miscalibrated", or "undecided" if too few simulations finished."""
        if not self.tests:
            return UNDECIDED
        least = min(test.least for test in self.tests.values())
        return MISCALIBRATED if least < self.threshold else CALIBRATED

    @property
    def reasons(self) -> tuple[str, ...]:
        """The findings, one sentence each."""
        return tuple(self._reasons())

    def _reasons(self) -> Iterator[str]:
        if not self.names and self.simulations:
            yield "no function varied: there is nothing to rank"
        elif not self.tests:
            yield f"{self.simulations} simulations finished, and fewer than {FEWEST} show nothing"
        every = {name: test.shapes(self.threshold) for name, test in self.tests.items()}
        found = {name: "; ".join(shapes.values()) for name, shapes in every.items() if shapes}
        yield from (f"{name}: {shapes}" for name, shapes in found.items())
        if self.tests and not found:
            ranks = f"ranks of {listed(self.names)} are uniform within an error rate of {self.error_rate:.0%}"
            yield f"{ranks}: neither bias nor a wrong spread is seen in {self.simulations} simulations"
        if self.failures:
            worst = max(set(self.failures.values()), key=list(self.failures.values()).count)
            yield f"{len(self.failures)} of {self.asked} simulations failed and have no ranks, such as by: {worst}"
        if self.simulations + len(self.failures) < self.asked:
            yield f"stopped after {self.simulations + len(self.failures)} of {self.asked} simulations"
        if self.not_converged:
            yield f"{self.not_converged} of {self.simulations} fits had not converged, which is judged with the rest"

    def __str__(self) -> str:
        """The verdict and its reasons as text."""
        head = f"{self.subject}: {self.verdict} ({self.simulations} simulations, {self.draws} draws each)"
        return "\n".join([head, *(f"  - {reason}" for reason in self.reasons)])

    def to_dataframe(self, per: str = "function") -> pd.DataFrame:
        """The result as a table.

        Parameters
        ----------
        per : {"function", "simulation"}
            "function": one row per function with its tests. "simulation": one row per simulation and function, with the
            columns simulation (its number), function, truth, rank and probability.

        Returns
        -------
        pd.DataFrame

        Raises
        ------
        InputError
            `per` is neither of the two.
        """
        import pandas as pd

        if per == "function":
            rows = {name: vars(test) for name, test in self.tests.items()}
            columns = list(Uniformity.__dataclass_fields__)
            return pd.DataFrame.from_dict(rows, "index", columns=columns).rename_axis("function")
        known = per == "simulation"
        InputError.check(known, "per", "'function' or 'simulation'", repr(per), "per='function'")
        found = {"truth": self.truths, "rank": self.ranks, "probability": self.probabilities}
        numbers, functions = np.repeat(self.numbers, len(self.names)), list(self.names) * self.simulations
        columns = {name: values.ravel() for name, values in found.items()}
        return pd.DataFrame({"simulation": numbers, "function": functions, **columns})

    def figure(self, kind: str = "ecdf") -> Figure:
        """Draw the ranks, one panel per function: `figure().savefig("ranks.png")`.

        Parameters
        ----------
        kind : {"ecdf", "histogram"}
            "ecdf": the share of ranks below z (draws + 1), minus z. All curves of an exact method stay in the band
            together with probability at least 1 - error_rate. Above the band at the left and below it at the right:
            draws too narrow; the reverse: too wide; on one side throughout: biased. "histogram": the ranks in bins,
            with the range that holds all counts with the same probability.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        InputError
            An unknown kind, no simulation that finished, or no function that varied.
        """
        from matplotlib.figure import Figure

        check_known("kind of figure", [kind], _DRAWN)
        got = f"none in {self.simulations} simulations"
        InputError.check(self.ranks.size, "figure", "ranks", got, "more simulations")
        count = len(self.names)
        columns = min(count, 3)
        rows = -(-count // columns)
        figure = Figure(figsize=(3.8 * columns, 2.9 * rows + 0.9), dpi=100, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for axes in panels[count:]:
            axes.set_visible(False)
        for axes, name, ranks in zip(panels, self.names, self.ranks.T, strict=False):
            _DRAWN[kind](self, axes, ranks)
            title, found = name, {}
            if (test := self.tests.get(name)) is not None:
                found = test.shapes(self.threshold)
                title = f"{name}\n{' and '.join(found) or 'uniform'}, p = {test.least:.2g}"
            axes.set_title(title, fontsize=10, color=_VERMILION if found else "black")
            axes.set_xlim(0.0, 1.0)
            axes.spines[["top", "right"]].set_visible(False)
        if kind == "histogram":
            # Set once, after all panels are drawn: the axes are shared, and setting a limit turns autoscaling off.
            panels[0].set_ylim(0.0, 1.05 * max(axes.dataLim.y1 for axes in panels[:count]))
        for axes in panels[max(0, count - columns) : count]:
            axes.set_xlabel("rank of the truth / (draws + 1)")
            axes.tick_params(labelbottom=True)
        heights = "share of simulations below, less uniform" if kind == "ecdf" else "simulations"
        figure.supylabel(heights, fontsize=10)
        counts = f"{self.simulations} simulations, {self.draws} draws each"
        stays = f"an exact method stays, in all panels together, with probability {1 - self.error_rate:.0%}"
        title = f"{self.subject}: {self.verdict}\n{counts}; grey: where {stays}"
        figure.suptitle(title, fontsize=11)
        return figure

    def to_datatree(self) -> Any:
        """A DataTree with the group "prior_sbc", for ArviZ's `plot_ecdf_pit` and similar functions.

        Returns
        -------
        xarray.DataTree
            One variable per function, (chain 1, draw S): (rank + v) / (draws + 1) with v uniform on [0, 1) and fixed.
            It is uniform on [0, 1) if the ranks are uniform.
        """
        import xarray

        rng = np.random.default_rng(site_seed("randomised ranks", self.simulations))
        values = (self.ranks + rng.random(self.ranks.shape)) / (self.draws + 1)
        variables = {name: (("chain", "draw"), values[None, :, at]) for at, name in enumerate(self.names)}
        coords = {"chain": [0], "draw": self.numbers}
        return xarray.DataTree.from_dict({"prior_sbc": xarray.Dataset(variables, coords=coords)})


@dataclass(frozen=True)
class Uniformity:
    """Tests of the ranks of one function, made by `uniformity`. Each p-value is that of one test alone.

    Parameters
    ----------
    simulations : int
        Number of ranks.
    mean_probability : float
        Mean share of the draws above the truth.
    asymmetry, asymmetry_p : float
        Statistic D and p-value of the symmetry test.
    spread, spread_p : float
        Spread relative to that of uniform ranks, and its p-value.
    ecdf_p : float
        p-value of the distribution function.
    chi2, chi2_p, bins : float, float, int
        Pearson's statistic, its p-value (NaN if there are not even two bins), and the number of bins.
    """

    simulations: int
    mean_probability: float
    asymmetry: float
    asymmetry_p: float
    spread: float
    spread_p: float
    ecdf_p: float
    chi2: float
    chi2_p: float
    bins: int

    @property
    def least(self) -> float:
        """The smallest of the three p-values that count: symmetry, spread and distribution function."""
        return min(self.asymmetry_p, self.spread_p, self.ecdf_p)

    def shapes(self, threshold: float) -> dict[str, str]:
        """What the significant tests show: one or two words for each, and the description in full."""
        found = {}
        if self.asymmetry_p < threshold:
            side = f"biased {'upwards' if self.mean_probability > 0.5 else 'downwards'}"
            exceeds = f"a draw exceeds the truth with probability {self.mean_probability:.2f} on average"
            found[side] = f"{side} ({exceeds}, asymmetric with p = {self.asymmetry_p:.2g})"
        if self.spread_p < threshold:
            width, shape = "too wide", "under-confident: the truth lies in the middle of the draws too often"
            if self.spread > 1.0:
                width, tails = "too narrow", "the truth lies in the tails of the draws too often"
                shape = f"over-confident: {tails}, in the shape of a U"
            spread = f"spread {self.spread:.2f} times that of uniform ranks, p = {self.spread_p:.2g}"
            found[width] = f"{shape} ({spread})"
        if not found and self.ecdf_p < threshold:
            p = f"(p = {self.ecdf_p:.2g})"
            found["not uniform"] = f"not uniform {p}, in a way that is neither bias nor spread alone"
        return found


def uniformity(ranks: Any, draws: int, *, null_draws: int = NULL_DRAWS, seed: int = 0) -> Uniformity:
    """Test whether ranks (S,) are uniform on 0..L, with L = `draws`.

    - Symmetry (Yao et al. 2018): D = sup_t |F(t) - G(t)| of the distribution functions of p and 1 - p, with p the share
      of draws above the truth. p and 1 - p are one sample, so the null distribution comes from random reflections of
      each p about 1/2 and not from Kolmogorov and Smirnov's table; the test is exact. Asymmetry is bias.
    - Spread: mean squared distance of (rank + 1/2) / (L + 1) from 1/2, over its expectation, two-sided. Above 1 the
      draws are too narrow for their error, below 1 too wide.
    - ECDF (Säilynoja et al. 2022): gamma = min over v of 2 min(P(B_v <= k_v), P(B_v >= k_v)), with k_v the number of
      ranks at most v and B_v ~ Binomial(S, (v + 1) / (L + 1)). Its p-value is P(gamma' <= gamma) over simulated uniform
      ranks.
    - Pearson's chi2 over bins of equal size, which does not enter the verdict. NaN if there are not even two bins.

    Raises InputError for no ranks, or ranks that are not integers in 0..L.

    References
    ----------
    Säilynoja, Bürkner and Vehtari (2022), Statistics and Computing 32.
    Yao, Vehtari, Simpson and Gelman (2018), ICML.
    """
    array = np.asarray(ranks)
    whole = array.ndim == 1 and len(array) > 0 and array.dtype.kind in "iu"
    good, got = whole and 0 <= array.min() <= array.max() <= draws, f"{array.dtype} of shape {array.shape}"
    wanted = f"whole numbers from 0 to {draws}, shape (S,)"
    InputError.check(good, "ranks", wanted, got, "Calibration.ranks")
    count, size = len(array), draws + 1
    counts = np.bincount(array, minlength=size)
    null = _null(count, draws, null_draws)

    squares = ((np.arange(size) + 0.5) / size - 0.5) ** 2
    expected = squares.mean()
    spread = counts @ squares / count
    far = np.abs(null.counts @ squares / count - expected)
    asymmetry, reflected = _asymmetry(array, draws, null_draws, seed)
    bins = _bins(count, size)
    chi2 = chi2_p = np.nan
    if bins >= 2:
        from scipy.stats import chisquare

        chi2, chi2_p = map(float, chisquare(counts.reshape(bins, -1).sum(axis=1)))
    # Sums of the same numbers in another order differ by rounding; the tolerance counts them as ties.
    slack = 1e-12
    extreme = {
        "asymmetry_p": reflected >= asymmetry - slack,
        "spread_p": far >= abs(spread - expected) - slack,
        "ecdf_p": null.gammas <= _gamma(counts[None], null.tails)[0] + slack,
    }
    # The observed value counts as one of the draws under the null: a test of level a rejects with probability at most
    # a.
    found: Any = {name: (1 + np.count_nonzero(each)) / (1 + null_draws) for name, each in extreme.items()}
    found |= {"asymmetry": asymmetry, "spread": float(spread / expected), "chi2": chi2, "chi2_p": chi2_p}
    mean = float(1.0 - array.mean() / draws)
    return Uniformity(simulations=count, mean_probability=mean, bins=bins, **found)


def ecdf_band(simulations: int, draws: int, error_rate: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Simultaneous band (levels, lower, upper), each (L,), of the distribution function of uniform ranks, L = `draws`.

    The share of ranks at most v lies in [lower, upper] for all v at once with probability at least 1 - error_rate, over
    9999 simulated sets of uniform ranks. Levels are (v + 1) / (L + 1) for v = 0..L-1.
    """
    null = _null(simulations, draws, NULL_DRAWS)
    # The smallest gamma still inside: at most a share `error_rate` of the null is below it.
    limit = np.sort(null.gammas)[int(np.floor(error_rate * NULL_DRAWS))]
    inside = null.tails >= limit
    lower = inside.argmax(axis=0) / simulations
    upper = (simulations - inside[::-1].argmax(axis=0)) / simulations
    return np.arange(1, draws + 1) / (draws + 1), lower, upper


class _Null(NamedTuple):
    """Simulated uniform ranks: counts (M, L + 1), their gammas (M,), and the tails (S + 1, L) behind gamma."""

    counts: np.ndarray
    gammas: np.ndarray
    tails: np.ndarray


@functools.lru_cache(maxsize=2)
def _null(simulations: int, draws: int, null_draws: int) -> _Null:
    from scipy.special import bdtr, bdtrc

    size = draws + 1
    rng = np.random.default_rng(site_seed("uniform ranks", simulations))
    counts = rng.multinomial(simulations, np.full(size, 1.0 / size), size=null_draws)
    k = np.arange(simulations + 1)[:, None]
    levels = np.arange(1, size)[None] / size
    below = bdtr(k, simulations, levels)
    above = np.concatenate([np.ones((1, draws)), bdtrc(k[:-1], simulations, levels)])
    tails = 2.0 * np.minimum(below, above)
    return _Null(counts, _gamma(counts, tails), tails)


def _gamma(counts: np.ndarray, tails: np.ndarray) -> np.ndarray:
    """Gamma (M,) from the counts (M, L + 1) of each rank."""
    upto = counts.cumsum(axis=1)[:, :-1]
    return tails[upto, np.arange(tails.shape[1])].min(axis=1)


def _asymmetry(ranks: np.ndarray, draws: int, flips: int, seed: int) -> tuple[float, np.ndarray]:
    """sup_t |F(t) - G(t)| of ranks r and of L - r, and the same after random reflections, (flips,)."""
    count = len(ranks)
    # What simulation i adds to the difference of the two histograms, and subtracts from it when reflected.
    difference = np.zeros((count, draws + 1), dtype=np.float32)
    np.add.at(difference, (np.arange(count), ranks), 1.0)
    np.add.at(difference, (np.arange(count), draws - ranks), -1.0)
    difference = difference.cumsum(axis=1)
    signs = np.random.default_rng(seed).choice(np.array([-1.0, 1.0], dtype=np.float32), size=(flips, count))
    reflected = np.abs(signs @ difference).max(axis=1)
    return float(np.abs(difference.sum(axis=0)).max()) / count, reflected.astype(np.float64) / count


def _bins(count: int, size: int) -> int:
    """The largest number of equal bins, at most 20, with at least 5 of `count` ranks expected in each; or 1."""
    fits = [bins for bins in range(1, MOST_BINS + 1) if size % bins == 0 and count >= FEWEST_PER_BIN * bins]
    return fits[-1] if fits else 1


def listed(names: tuple[str, ...]) -> str:
    """The names joined for a sentence."""
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"


_BLUE, _VERMILION, _GREY = "#0072B2", "#D55E00", "#BBBBBB"


def _draw_ecdf(calibration: Calibration, axes: Any, ranks: np.ndarray) -> None:
    """Draw the distribution function of the ranks minus that of uniform ranks, with its band."""
    draws, together = calibration.draws, calibration.error_rate / len(calibration.names)
    levels, lower, upper = ecdf_band(len(ranks), draws, together)
    share = np.bincount(ranks, minlength=draws + 1).cumsum()[:-1] / len(ranks)
    z = np.concatenate([[0.0], levels, [1.0]])
    low, high, middle = (np.pad(values - levels, 1) for values in (lower, upper, share))
    axes.fill_between(z, low, high, color=_GREY, alpha=0.55, linewidth=0.0)
    axes.plot(z, middle, color=_BLUE, linewidth=1.5)
    axes.axhline(0.0, color="black", linewidth=0.7, linestyle="dashed")


def _draw_histogram(calibration: Calibration, axes: Any, ranks: np.ndarray) -> None:
    """Draw the ranks in bins of equal size, with the range of binomial counts."""
    from scipy.stats import binom

    size = calibration.draws + 1
    bins = _bins(len(ranks), size)
    edges = np.linspace(0.0, 1.0, bins + 1)
    counts = np.bincount(ranks, minlength=size).reshape(bins, -1).sum(axis=1)
    tail = 0.5 * calibration.error_rate / (len(calibration.names) * bins)
    low, high = binom.ppf([tail, 1.0 - tail], len(ranks), 1.0 / bins)
    axes.axhspan(low, high, color=_GREY, alpha=0.55, linewidth=0.0)
    axes.axhline(len(ranks) / bins, color="black", linewidth=0.7, linestyle="dashed")
    axes.stairs(counts, edges, color=_BLUE, linewidth=1.5, baseline=None)


_DRAWN = {"ecdf": _draw_ecdf, "histogram": _draw_histogram}
