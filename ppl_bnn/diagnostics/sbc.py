"""Simulation-based calibration: a method is tried on data of which the truth is known, because it was drawn first.

If (theta, y) is a draw from p(theta) p(y | theta), then theta is itself a draw from p(theta | y). The rank of g(theta)
among g(theta_1), ..., g(theta_L), theta_l from a posterior that a method fitted to y, is therefore uniform on 0..L for
every function g if the method is exact (Talts, Betancourt, Simpson, Vehtari and Gelman 2018), and how the ranks
deviate says in which way it is not (for variational inference: Yao, Vehtari, Simpson and Gelman 2018, ICML).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.protocol import Model
from ppl_bnn.backends.systems import system, written_in
from ppl_bnn.core import checks, processes
from ppl_bnn.core.arrays import map_data, row_count, site_seed
from ppl_bnn.core.errors import (
    DeviceError,
    InputError,
    MissingFrameworkError,
    ModelError,
    UnknownNameError,
    UnsupportedError,
    message,
    unknown_name,
)
from ppl_bnn.core.progress import Progress, Silent, resolve
from ppl_bnn.inference.checkpoint import Checkpoint
from ppl_bnn.inference.fingerprint import identity
from ppl_bnn.inference.method import Method, labels
from ppl_bnn.posterior.convergence import LOG_LIKELIHOOD, PREDICTOR, quantities
from ppl_bnn.posterior.posterior import MEMORY, Posterior

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PROBES = 3
ERROR_RATE = 0.05
FEWEST = 20
MOST_BINS = 20
FEWEST_PER_BIN = 5
NULL_DRAWS = 9999

CALIBRATED = "calibrated as far as seen"
MISCALIBRATED = "miscalibrated"
UNDECIDED = "undecided"

# (w, eta, y) -> (S,) or (S, K)
Function = Callable[[dict[str, np.ndarray], np.ndarray, np.ndarray], Any]
# What is kept of each fit, besides its ranks.
Figures = Callable[[Posterior], Mapping[str, float]]
# They say that the method cannot serve this model at all: the next data set would be refused in the same words.
_HOPELESS = (UnsupportedError, ModelError, UnknownNameError, MissingFrameworkError, DeviceError)


class CalibrationInterrupted(KeyboardInterrupt):
    """Ctrl-C during `simulation_based_calibration`. `partial` is the `Calibration` of what had finished."""

    def __init__(self, text: str, partial: Calibration):
        super().__init__(text)
        self.partial = partial


@dataclass(frozen=True, eq=False)
class Calibration:
    """Where the truth lay among the draws of a posterior, simulation by simulation.

    Made by `simulation_based_calibration`. With S simulations finished and F functions: names (F,); numbers (S,), which
    of the simulations finished; ranks (S, F), how many of the `draws` lie below the truth, 0..draws, ties broken at
    random; truths (S, F). asked: how many simulations were wanted. failures: number of the simulation -> why it has no
    ranks. constant: functions that never varied, left out. not_converged: how many of the S fits said of themselves
    that they had not converged. error_rate: the probability that an exact method is called miscalibrated, over all
    functions and tests together (Bonferroni). figures: name -> (S,), what was asked of each fit, NaN where it had none.

    An exact method keeps uniform ranks also where fits fail, since whether one fails is decided by the data, given
    which the truth is one draw from the posterior like any other.
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
        """How many simulations finished."""
        return len(self.ranks)

    @property
    def probabilities(self) -> np.ndarray:
        """P_q(theta~ > theta), the share of the draws above the truth, (S, F)."""
        return 1.0 - self.ranks / self.draws

    @cached_property
    def tests(self) -> dict[str, Uniformity]:
        """The tests by function; empty with fewer than 20 simulations, which tell nothing."""
        if self.simulations < FEWEST:
            return {}
        # Enough of the null distribution that a p-value can fall well below the threshold of a single test.
        count = max(NULL_DRAWS, int(np.ceil(20.0 * 3 * len(self.names) / self.error_rate)))
        return {
            name: uniformity(self.ranks[:, column], self.draws, null_draws=count)
            for column, name in enumerate(self.names)
        }

    @property
    def threshold(self) -> float:
        """The p-value below which a single test counts: the error rate over three tests per function."""
        return self.error_rate / (3 * max(1, len(self.names)))

    @property
    def verdict(self) -> str:
        """ "calibrated as far as seen", "miscalibrated", or "undecided" where too few simulations finished."""
        if not self.tests:
            return UNDECIDED
        bad = any(test.least < self.threshold for test in self.tests.values())
        return MISCALIBRATED if bad else CALIBRATED

    @property
    def reasons(self) -> tuple[str, ...]:
        """What was found, in sentences."""
        return tuple(self._reasons())

    def _reasons(self) -> Iterator[str]:
        if not self.names and self.simulations:
            yield "no function varied: there is nothing to rank"
        elif not self.tests:
            yield f"{self.simulations} simulations finished, and fewer than {FEWEST} tell nothing"
        found = False
        for name, test in self.tests.items():
            if test.least < self.threshold:
                found = True
                yield f"{name}: {test.words(self.threshold)}"
        if self.tests and not found:
            yield (
                f"ranks of {_listed(self.names)} are uniform within an error rate of {self.error_rate:.0%}: neither "
                f"bias nor a wrong spread is seen in {self.simulations} simulations"
            )
        if self.failures:
            worst = max(set(self.failures.values()), key=list(self.failures.values()).count)
            yield f"{len(self.failures)} of {self.asked} simulations failed and have no ranks, such as by: {worst}"
        if self.simulations + len(self.failures) < self.asked:
            yield f"stopped after {self.simulations + len(self.failures)} of {self.asked} simulations"
        if self.not_converged:
            yield f"{self.not_converged} of {self.simulations} fits had not converged, which is judged with the rest"

    @property
    def summary(self) -> str:
        """The verdict and its reasons."""
        head = f"{self.subject}: {self.verdict} ({self.simulations} simulations, {self.draws} draws each)"
        return "\n".join([head, *(f"  - {reason}" for reason in self.reasons)])

    def __str__(self) -> str:
        return self.summary

    def ecdf_band(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(levels, lower, upper): where the share of simulations with a rank below z (draws + 1) stays, for all z of
        `levels` at once, with probability of at least 1 - error_rate in an exact method; for one function."""
        return ecdf_band(self.simulations, self.draws, self.error_rate)

    def to_dataframe(self, per: str = "function") -> pd.DataFrame:
        """One row per function with its tests, or per="simulation": one per simulation and function.

        Columns per simulation: simulation (its number), function, truth, rank, probability.
        """
        import pandas as pd

        if per == "function":
            columns = [name for name in Uniformity.__dataclass_fields__ if name != "draws"]
            rows = {name: {key: getattr(test, key) for key in columns} for name, test in self.tests.items()}
            return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("function")
        if per != "simulation":
            raise InputError("per: " + message("'function' or 'simulation'", repr(per), "per='function'"))
        return pd.DataFrame(
            {
                "simulation": np.repeat(self.numbers, len(self.names)),
                "function": list(self.names) * self.simulations,
                "truth": self.truths.ravel(),
                "rank": self.ranks.ravel(),
                "probability": self.probabilities.ravel(),
            }
        )

    def figure(self, kind: str = "ecdf") -> Figure:
        """The ranks, one panel per function, as a Matplotlib figure: `figure().savefig("ranks.png")`.

        kind="ecdf": the share of simulations with a rank below z (draws + 1), less z, inside the band in which the
        curves of all functions together stay with probability of at least 1 - error_rate where the method is exact.
        A curve that rises above the band at the left and falls below it at the right: draws too narrow; the reverse:
        too wide; above or below throughout: biased. kind="histogram": the ranks in as many bins as `uniformity` uses,
        with the same probability for all counts of all functions together.

        Raises
        ------
        InputError: a kind that does not exist, no simulation that finished, or no function that varied.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        if kind not in _DRAWN:
            raise unknown_name("kind of figure", kind, _DRAWN)
        if not self.ranks.size:
            raise InputError(
                "figure: " + message("ranks", f"none in {self.simulations} simulations", "more simulations")
            )
        count = len(self.names)
        columns = min(count, 3)
        rows = -(-count // columns)
        figure = Figure(figsize=(3.8 * columns, 2.9 * rows + 0.9), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for axes in panels[count:]:
            axes.set_visible(False)
        for column, (axes, name) in enumerate(zip(panels, self.names, strict=False)):
            _DRAWN[kind](self, axes, self.ranks[:, column])
            test = self.tests.get(name)
            found = test is not None and test.least < self.threshold
            said = "" if test is None else f"\n{_shape(test, self.threshold)}, p = {test.least:.2g}"
            axes.set_title(f"{name}{said}", fontsize=10, color=_VERMILION if found else "black")
            axes.spines[["top", "right"]].set_visible(False)
        if kind == "histogram":
            # Once, after all: the axes are shared, and a limit that is set stays.
            panels[0].set_ylim(0.0, 1.05 * max(axes.dataLim.y1 for axes in panels[:count]))
        for axes in panels[max(0, count - columns) : count]:
            axes.set_xlabel("rank of the truth / (draws + 1)")
            axes.tick_params(labelbottom=True)
        figure.supylabel(
            "share of simulations below, less uniform" if kind == "ecdf" else "simulations", fontsize=10
        )
        figure.suptitle(
            f"{self.subject}: {self.verdict}\n{self.simulations} simulations, {self.draws} draws each; grey: where "
            f"an exact method stays, in all panels together, with probability {1 - self.error_rate:.0%}",
            fontsize=11,
        )
        return figure

    def to_datatree(self) -> Any:
        """A DataTree with the group "prior_sbc", as ArviZ's `plot_ecdf_pit` and others read it.

        One variable per function, (chain 1, draw S): (rank + v) / (draws + 1) with v uniform on [0, 1), which is
        uniform on [0, 1) where ranks are uniform; the same at every call.
        """
        import xarray

        rng = np.random.default_rng(site_seed("randomised ranks", self.simulations))
        values = (self.ranks + rng.random(self.ranks.shape)) / (self.draws + 1)
        variables = {name: (("chain", "draw"), values[None, :, at]) for at, name in enumerate(self.names)}
        coords = {"chain": [0], "draw": self.numbers}
        return xarray.DataTree.from_dict({"prior_sbc": xarray.Dataset(variables, coords=coords)})


# --- the tests --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uniformity:
    """Tests of the ranks of one function (see `uniformity`); the p-values are each of one test alone."""

    simulations: int
    draws: int
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
        """The least of the three p-values that count: of symmetry, of the spread, of the distribution function."""
        return min(self.asymmetry_p, self.spread_p, self.ecdf_p)

    def words(self, threshold: float) -> str:
        """What the ranks look like, at this threshold for each p-value."""
        found = []
        if self.asymmetry_p < threshold:
            side = "upwards" if self.mean_probability > 0.5 else "downwards"
            found.append(
                f"biased {side} (a draw exceeds the truth with probability {self.mean_probability:.2f} on average, "
                f"asymmetric with p = {self.asymmetry_p:.2g})"
            )
        if self.spread_p < threshold:
            shape = (
                "over-confident: the truth lies in the tails of the draws too often, in the shape of a U"
                if self.spread > 1.0
                else "under-confident: the truth lies in the middle of the draws too often"
            )
            found.append(
                f"{shape} (spread {self.spread:.2f} times that of uniform ranks, p = {self.spread_p:.2g})"
            )
        if not found and self.ecdf_p < threshold:
            found.append(
                f"not uniform (p = {self.ecdf_p:.2g}), in a way that is neither bias nor spread alone"
            )
        return "; ".join(found) if found else "uniform within the error rate"


def uniformity(ranks: Any, draws: int, *, null_draws: int = NULL_DRAWS, seed: int = 0) -> Uniformity:
    """Tests of whether ranks (S,) are uniform on 0..L, L being `draws`.

    - Symmetry (Yao et al. 2018): D = sup_t |F(t) - G(t)|, F and G the distribution functions of p and of 1 - p, p the
      share of draws above the truth. p and 1 - p are one sample, not two, so that the distribution of D is taken not
      from the table of Kolmogorov and Smirnov but from random reflections of each p about 1/2, under which a symmetric
      distribution does not change: the test is exact. Asymmetry is bias.
    - Spread: mean squared distance of (rank + 1/2) / (L + 1) from 1/2, over its expectation. Above 1 the ranks pile up
      at the ends (a U): draws too narrow for their error. Below 1: too wide. Two-sided, from simulated uniform ranks.
    - ECDF (Säilynoja, Bürkner and Vehtari 2022, Statistics and Computing 32): gamma = min over v of
      2 min(P(B_v <= k_v), P(B_v >= k_v)), k_v the number of ranks at most v and B_v ~ Binomial(S, (v + 1) / (L + 1)).
      Its p-value is P(gamma' <= gamma) over simulated uniform ranks: whether the distribution function leaves the
      simultaneous band of `ecdf_band` at that level.
    - Pearson's chi2 over bins of equal size, of which there are as many as divide L + 1, at most 20 and with at least 5
      ranks expected in each; NaN where not even two can be made. It is reported and decides nothing.

    Raises
    ------
    InputError: ranks that are no whole numbers in 0..L, or none.
    """
    array = np.asarray(ranks)
    if (
        array.ndim != 1
        or not len(array)
        or array.dtype.kind not in "iu"
        or array.min() < 0
        or array.max() > draws
    ):
        came = f"{array.dtype} of shape {array.shape}"
        raise InputError(
            "ranks: " + message(f"whole numbers from 0 to {draws}, shape (S,)", came, "Calibration.ranks")
        )
    count, size = len(array), draws + 1
    counts = np.bincount(array, minlength=size)
    null = _null(count, draws, null_draws)

    def share(extreme: np.ndarray) -> float:
        # The observed one is one of the draws under the null: so a test of level a rejects with probability at most a.
        return float((1 + np.count_nonzero(extreme)) / (1 + null_draws))

    squares = ((np.arange(size) + 0.5) / size - 0.5) ** 2
    expected = squares.mean()
    spread = counts @ squares / count
    far = np.abs(null.counts @ squares / count - expected)
    asymmetry, reflected = _asymmetry(array, draws, null_draws, seed)
    bins = _bins(count, size)
    chi2 = chi2_p = np.nan
    if bins >= 2:
        from scipy.special import chdtrc

        binned = counts.reshape(bins, -1).sum(axis=1)
        chi2 = float(np.sum((binned - count / bins) ** 2) / (count / bins))
        chi2_p = float(chdtrc(bins - 1, chi2))
    # Sums of the same numbers in another order differ by rounding; a tie counts as one.
    slack = 1e-12
    return Uniformity(
        simulations=count,
        draws=draws,
        mean_probability=float(1.0 - array.mean() / draws),
        asymmetry=asymmetry,
        asymmetry_p=share(reflected >= asymmetry - slack),
        spread=float(spread / expected),
        spread_p=share(far >= abs(spread - expected) - slack),
        ecdf_p=share(null.gammas <= _gamma(counts[None], null.tails)[0] + slack),
        chi2=chi2,
        chi2_p=chi2_p,
        bins=bins,
    )


def ecdf_band(simulations: int, draws: int, error_rate: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(levels, lower, upper), each (L,): the simultaneous band of the distribution function of uniform ranks.

    levels are z = (v + 1) / (L + 1), v = 0..L-1. The share of ranks at most v lies in [lower, upper] for all v at once
    with probability at least 1 - error_rate, over 9999 simulated sets of uniform ranks (see `uniformity`).
    """
    null = _null(simulations, draws, NULL_DRAWS)
    # The least gamma that still lies inside: at most a share of `error_rate` of the null is below.
    limit = np.sort(null.gammas)[int(np.floor(error_rate * NULL_DRAWS))]
    inside = null.tails >= limit
    lower = inside.argmax(axis=0) / simulations
    upper = (simulations - inside[::-1].argmax(axis=0)) / simulations
    return np.arange(1, draws + 1) / (draws + 1), lower, upper


@dataclass(frozen=True, eq=False)
class _Null:
    """Uniform ranks, simulated: counts (M, L + 1), their gammas (M,), and tails (S + 1, L), what gamma is made of."""

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
    """(M,) of counts (M, L + 1) of each rank."""
    upto = counts.cumsum(axis=1)[:, :-1]
    return tails[upto, np.arange(tails.shape[1])].min(axis=1)


def _asymmetry(ranks: np.ndarray, draws: int, flips: int, seed: int) -> tuple[float, np.ndarray]:
    """sup_t |F(t) - G(t)| of ranks r and of L - r, and the same after random reflections, (flips,)."""
    count = len(ranks)
    # What reflection i adds to the difference of the two histograms, and takes from it when reflected.
    difference = np.zeros((count, draws + 1), dtype=np.float32)
    np.add.at(difference, (np.arange(count), ranks), 1.0)
    np.add.at(difference, (np.arange(count), draws - ranks), -1.0)
    difference = difference.cumsum(axis=1)
    signs = np.random.default_rng(seed).choice(np.array([-1.0, 1.0], dtype=np.float32), size=(flips, count))
    reflected = np.abs(signs @ difference).max(axis=1)
    return float(np.abs(difference.sum(axis=0)).max()) / count, reflected.astype(np.float64) / count


def _bins(count: int, size: int) -> int:
    """The most bins of equal numbers of ranks, at most 20, with at least 5 of `count` ranks expected in each; or 1."""
    fits = [bins for bins in range(1, MOST_BINS + 1) if size % bins == 0 and count >= FEWEST_PER_BIN * bins]
    return fits[-1] if fits else 1


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"


# --- figures ----------------------------------------------------------------------------------------------

_BLUE, _VERMILION, _GREY = "#0072B2", "#D55E00", "#BBBBBB"


def _shape(test: Uniformity, threshold: float) -> str:
    """One or two words for what `Uniformity.words` says in full."""
    found = []
    if test.asymmetry_p < threshold:
        found.append("biased upwards" if test.mean_probability > 0.5 else "biased downwards")
    if test.spread_p < threshold:
        found.append("too narrow" if test.spread > 1.0 else "too wide")
    if not found and test.ecdf_p < threshold:
        found.append("not uniform")
    return " and ".join(found) or "uniform"


def _draw_ecdf(calibration: Calibration, axes: Any, ranks: np.ndarray) -> None:
    """The difference of the distribution function of ranks from that of uniform ones, with its band."""
    draws, together = calibration.draws, calibration.error_rate / len(calibration.names)
    levels, lower, upper = ecdf_band(len(ranks), draws, together)
    share = np.bincount(ranks, minlength=draws + 1).cumsum()[:-1] / len(ranks)
    z = np.concatenate([[0.0], levels, [1.0]])

    def difference(values: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], values - levels, [0.0]])

    axes.fill_between(z, difference(lower), difference(upper), color=_GREY, alpha=0.55, linewidth=0.0)
    axes.plot(z, difference(share), color=_BLUE, linewidth=1.5)
    axes.axhline(0.0, color="black", linewidth=0.7, linestyle="dashed")
    axes.set_xlim(0.0, 1.0)


def _draw_histogram(calibration: Calibration, axes: Any, ranks: np.ndarray) -> None:
    """Ranks in bins of equal size, with the range of binomial counts."""
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
    axes.set_xlim(0.0, 1.0)


_DRAWN: dict[str, Callable[[Calibration, Any, np.ndarray], None]] = {
    "ecdf": _draw_ecdf,
    "histogram": _draw_histogram,
}


# --- the simulations --------------------------------------------------------------------------------------


def simulation_based_calibration(
    model: Model,
    x: Any,
    method: Method,
    *,
    simulations: int = 100,
    draws: int = 99,
    functions: Mapping[str, Function] | None = None,
    probe: Any = None,
    figures: Figures | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
    jobs: int = 1,
    checkpoint: str | Path | None = None,
    device: str = "auto",
    observed: str | None = None,
) -> Calibration:
    """Is `method` calibrated on `model` at inputs `x`, on average over the prior and over data?

    Each simulation draws all unknowns from the prior and y from the likelihood at x, fits `method` to (x, y), takes
    `draws` draws of the posterior (thinned evenly from all, where it is of chains) and finds the rank of the truth
    among them for each function. What exact methods have in common, and the tests: see `Calibration`, `uniformity`.

    functions: name -> function(w, eta, y), in NumPy and over S draws at once: w are the constrained values of all sites
    (S, *shape), eta (S, N, D) the predictor at x, y (N,) or (N, K) the simulated targets; it gives (S,) or (S, K). By
    default: the network's outputs f(x*) at inputs x* = `probe` (M, F), or without it at 3 rows of x, evenly spaced; the
    log likelihood of y, which alone can see a posterior that ignores the data, and sees a wrong spread of many weights
    together (Modrák et al. 2023, Bayesian Analysis); and each scalar random variable, such as "noise". eta is the
    predictor as the posterior predicts by default (linearised, for Laplace). Functions of one's own beside a `probe`
    are given eta at the probe, (S, M, D), in place of that at x.

    figures: a function of each fitted posterior -> name -> number, kept in `Calibration.figures`, such as what its
    chains say of their convergence; a figure "converged" is what `not_converged` counts by.

    It costs `simulations` fits; in NumPyro what a method keeps with its program is compiled once for all of them. jobs:
    so many processes at a time, with the same result to the bit (not threads: a fit changes settings of its framework
    while it runs); the functions and the model are sent to them. checkpoint: a folder where each simulation is kept as
    soon as it has finished, so that the next call takes it from there: after an interruption those in flight are lost,
    and a larger number of simulations goes on from a smaller one. It refuses another model, method or seed by name.

    Successive draws of a chain are alike, and their ranks are then not uniform even if the chain is exact: let it be
    several times longer than `draws`. Ranks resolve no finer than 1 / (draws + 1); choose a number for which draws + 1
    has many divisors. observed: the observed site of a plain NumPyro or Pyro model.

    x is taken as it is, with the prior of the model: there is no `standardise` here, because units that are made from
    simulated targets would be another prior for each of them.

    A fit that fails is counted and named in `failures`; what the model or method refuses altogether is raised at once.

    Raises
    ------
    InputError: impossible arguments; a checkpoint of other simulations. UnsupportedError: a method that gives a point;
    a model with parameters that have no prior, or with a factor or other observations, from which no truth can be
    drawn. CalibrationInterrupted: Ctrl-C; its `partial` holds what had finished.
    """
    for name, value, least in (("simulations", simulations, 1), ("draws", draws, 1), ("jobs", jobs, 1)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise InputError(
                f"{name}: " + message(f"a whole number of at least {least}", repr(value), f"{name}=100")
            )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**31:
        raise InputError("seed: " + message("a whole number from 0 to 2**31 - 1", repr(seed), "seed=0"))
    if not isinstance(method, Method):
        raise InputError("method: " + message("a method", repr(method), "bnn.SVI() or bnn.Laplace()"))
    if getattr(method, "checkpoint", None) is not None:
        raise InputError(
            "method: "
            + message(
                "a method without a checkpoint of its own, since each simulation is another fit",
                f"checkpoint={method.checkpoint!r}",  # pyright: ignore[reportAttributeAccessIssue]
                "simulation_based_calibration(..., checkpoint=folder)",
            )
        )
    if not callable(model):
        raise InputError(
            "model: " + message("a function (x, y=None)", type(model).__name__, "the model itself")
        )
    if functions is not None and (not functions or not all(callable(each) for each in functions.values())):
        raise InputError(
            "functions: "
            + message(
                "a dict of name -> function(w, eta, y)", repr(functions), "functions=None for the usual ones"
            )
        )
    if figures is not None and not callable(figures):
        raise InputError(
            "figures: " + message("a function posterior -> name -> number", repr(figures), "figures=None")
        )
    x = checks.check_inputs(x)
    if probe is not None:
        try:
            probe = checks.check_inputs(probe, checks.describe_inputs(x))
        except InputError as error:
            raise InputError(f"probe: {error}") from None
    simulator = _Simulator(
        model, x, method, int(draws), functions, probe, figures, int(seed), device, observed, checkpoint
    )
    records = simulator.finished(int(simulations))
    task = resolve(progress).task(f"Calibration of {method.name}", int(simulations))

    def tell() -> None:
        failed = sum(bool(each.failure) for each in records.values())
        doubtful = sum(not each.failure and not each.converged for each in records.values())
        task.update(len(records), failed=float(failed), not_converged=float(doubtful))

    try:
        if records:
            tell()
        with closing(_records(simulator, int(simulations), records, int(jobs))) as found:
            for index, record in found:
                records[index] = record
                tell()
    except KeyboardInterrupt as error:
        # With a folder also what processes had finished and not yet handed back.
        records |= simulator.finished(int(simulations))
        partial = _gathered(simulator, records, int(simulations))
        raise CalibrationInterrupted(
            f"interrupted after {len(records)} of {simulations} simulations; `partial` has them", partial
        ) from error
    finally:
        task.close()
    return _gathered(simulator, records, int(simulations))


@dataclass(frozen=True, eq=False)
class _Record:
    """One simulation: truths (F,) and ranks (F,), and which functions varied; or why there are none."""

    names: tuple[str, ...] = ()
    truths: np.ndarray = field(default_factory=lambda: np.empty(0))
    ranks: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    varied: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=bool))
    converged: bool = True
    failure: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it as arrays, words as the bytes of JSON."""
        words = {
            "names": self.names,
            "converged": self.converged,
            "failure": self.failure,
            "figures": self.figures,
        }
        return {
            "truths": self.truths,
            "ranks": self.ranks,
            "varied": self.varied,
            "words": np.frombuffer(json.dumps(words).encode(), dtype=np.uint8),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> _Record:
        """The inverse of `arrays`."""
        words = json.loads(arrays["words"].tobytes())
        return cls(
            tuple(words["names"]),
            arrays["truths"],
            arrays["ranks"],
            arrays["varied"],
            words["converged"],
            words["failure"],
            # Folders of before there were any have none.
            words.get("figures", {}),
        )


def _records(
    simulator: _Simulator, simulations: int, finished: Mapping[int, _Record], jobs: int
) -> Generator[tuple[int, _Record]]:
    waiting = [index for index in range(simulations) if index not in finished]
    if jobs == 1 or len(waiting) < 2 or not processes.allowed():
        for index in waiting:
            yield index, simulator(index)
        return
    # Ctrl-C loses what a process has not handed back, unless there is a folder.
    size = max(1, len(waiting) // (4 * jobs))
    parts = [waiting[start : start + size] for start in range(0, len(waiting), size)]
    written = processes.written(simulator, simulator.model)
    calls = [(written, indices) for indices in parts]
    with closing(processes.unordered(_several, calls, min(jobs, len(parts)))) as found:
        for _, records in found:
            yield from records


def _several(written: bytes, indices: Iterable[int]) -> list[tuple[int, _Record]]:
    simulator = _at_work(written)
    return [(index, simulator(index)) for index in indices]


@functools.lru_cache(maxsize=1)
def _at_work(written: bytes) -> _Simulator:
    """The simulator that a process works with: what it has compiled serves all parts."""
    return processes.read(written)


@dataclass(eq=False)
class _Simulator:
    """Makes one simulation after another; only the numbers of the simulation and of the seed decide what it is."""

    model: Model
    x: Any
    method: Method
    draws: int
    functions: Mapping[str, Function] | None
    probe: Any
    figures: Figures | None
    seed: int
    device: str
    observed: str | None
    folder: str | Path | None = None
    _spoken: str = ""
    _belongs: dict[str, Any] | None = None
    _program: Program | None = None
    _first: Posterior | None = None

    @property
    def ppl(self) -> str:
        return self.method.ppl if self._language else self._written

    @property
    def _written(self) -> str:
        if not self._spoken:
            self._spoken = written_in(self.model, self.x, None, self.method.ppl)
        return self._spoken

    @property
    def _language(self) -> bool:
        return self._written == "language"

    # -- what is kept

    def finished(self, simulations: int) -> dict[int, _Record]:
        """The simulations that the folder holds."""
        if self.folder is None:
            return {}
        kept = {index: self._checkpoint(index).load() for index in range(simulations)}
        return {index: _Record.from_arrays(arrays) for index, arrays in kept.items() if arrays is not None}

    def _checkpoint(self, index: int) -> Checkpoint:
        if self.folder is not None and self._belongs is None:
            settings = self.method.settings()
            self._belongs = {
                "method": self.method.name,
                "settings": {name: identity(getattr(self.method, name)) for name in settings},
                "draws": self.draws,
                "functions": None if self.functions is None else identity(dict(self.functions)),
                "probe": None if self.probe is None else checks.data_hash(self.probe, np.empty(0)),
                "seed": self.seed,
                # Inputs, prior and likelihood: another model draws other targets.
                "model and inputs": checks.data_hash(self.x, self._drawn(0)[1]),
            }
            if self.figures is not None:
                self._belongs["figures"] = identity(self.figures)
        return Checkpoint.of(self.folder, self._belongs or {}, f"simulation-{index:06d}")

    # -- one simulation

    def __call__(self, index: int) -> _Record:
        record = self._simulated(index)
        if self.folder is not None:
            self._checkpoint(index).keep(record.arrays, last=True)
        return record

    def _simulated(self, index: int) -> _Record:
        truth, y = self._drawn(index)
        if not np.isfinite(y).all():
            return _Record(failure="the targets drawn from the prior predictive are not finite")
        try:
            posterior = self._fitted(y, site_seed(f"calibration fit {index}", self.seed) % 2**31)
        except _HOPELESS:
            raise
        except Exception as error:
            return _Record(failure=f"{type(error).__name__}: {error}")
        if posterior.kind == "point":
            raise UnsupportedError(
                "simulation_based_calibration: "
                + message("a method with draws that differ", f"{self.method.name}, a point", "bnn.Laplace()")
            )
        record = self._ranked(*self._evaluated(posterior, truth, index), index)
        asked = {} if self.figures is None else self.figures(posterior)
        figures = {name: float(value) for name, value in asked.items()}
        converged = figures.get("converged", posterior.info.figures.get("converged", 1.0))
        return replace(record, converged=bool(converged), figures=figures)

    def _fitted(self, y: np.ndarray, seed: int) -> Posterior:
        """The method on (x, y). From the second time on over the program of the first, with what it has compiled."""
        first = self._first
        if first is None or not first._programs:
            posterior = self.method.fit(
                self.model,
                self.x,
                y,
                seed=seed,
                device=self.device,
                observed=None if self._language else self.observed,
            )
            # Torch compiles nothing; and JAX's functions are of one shape and type, which the next y has too.
            if posterior.info.ppl == "numpyro":
                self._first = posterior
            return posterior
        method = self.method if self.method.ppl == self.ppl else replace(self.method, ppl=self.ppl)
        program = next(iter(first._programs.values()))
        y = labels(program, y) if first.task == "classification" else y.astype(np.float64)
        data_hash = checks.data_hash(first.inputs, y)
        again = replace(first, targets=y, info=replace(first.info, seed=seed, data_hash=data_hash))
        outcome = again._with(lambda problem: method.run(problem, Silent()))
        untuned = outcome.approximation.program(self.model) is self.model
        return replace(
            again,
            approximation=outcome.approximation,
            statistics=outcome.statistics,
            info=replace(
                again.info,
                compile_seconds=outcome.compile_seconds,
                run_seconds=outcome.run_seconds,
                gradient_evaluations=outcome.gradient_evaluations,
                history=outcome.history,
                warnings=outcome.warnings,
                figures=outcome.figures,
                target=outcome.target,
            ),
            _programs=first._programs if untuned else {},
        )

    def _drawn(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """One draw of all unknowns (constrained) and of y."""
        chosen = system(self.ppl)
        with chosen.session("float64", "cpu", threads=1):
            x = map_data(chosen.asarray, self.x)
            if self._language:
                native, observed = chosen.native(self.model, record=False), "y"
            else:
                native = self.model
                if self.observed is None:
                    zeros = chosen.asarray(np.zeros(row_count(self.x)))
                    self.observed = Program.of(chosen, native, x, zeros, language=False).observed
                observed = self.observed
            key = chosen.seeds(site_seed(f"calibration prior {index}", self.seed) % 2**31, 1)[0]
            sites = chosen.run(native, x, None, seed=key)
            self._refuse([site for site in sites if site.name != observed])
            y = next((site.value for site in sites if site.name == observed), None)
            if y is None:
                raise ModelError(
                    "simulation_based_calibration: "
                    + message(
                        "a model that draws y where it is None", "one that does not", "bnn.observe(y, f, ...)"
                    )
                )
            truth = {
                site.name: np.array(chosen.to_numpy(site.value))
                for site in sites
                if site.kind == "latent" and site.name != observed
            }
            return truth, np.array(chosen.to_numpy(y))

    def _refuse(self, sites: list[Any]) -> None:
        for kind, came in (
            ("param", "a parameter without a prior"),
            ("observed", "a factor, or other observations"),
        ):
            names = [site.name for site in sites if site.kind == kind]
            if names:
                raise UnsupportedError(
                    "simulation_based_calibration: "
                    + message(
                        "a model that draws all its unknowns from a prior, and y given them",
                        f"{came}: {', '.join(names[:3])}",
                        "a model with a proper prior over each",
                    )
                )

    def _evaluated(
        self, posterior: Posterior, truth: dict[str, np.ndarray], index: int
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Each function of the draws, (draws,), and of the truth, (1,)."""
        approximation, kind = posterior.approximation, posterior._drawn_kind(None)
        u = posterior._chosen_draws(self.draws)

        def of_draws(problem: Problem) -> dict[str, np.ndarray]:
            def at(x: Any) -> np.ndarray:
                return approximation.predictor_draws(problem, u, x, kind, 0, MEMORY)

            return self._functions(problem, problem.program.constrain_draws(u, problem.x, problem.y), at)

        def of_truth(problem: Problem) -> dict[str, np.ndarray]:
            one = {name: truth[name][None] for name in problem.program.sites}

            def at(x: Any) -> np.ndarray:
                # Another seed than that of the draws: latent variables of rows are drawn afresh for both.
                return problem.program.predictor_draws(one, x, seed=index + 1, memory=MEMORY)

            return self._functions(problem, {name: value[None] for name, value in truth.items()}, at)

        def compiled_once(action: Callable[[Problem], Any]) -> Any:
            """As `Posterior._with`, over one program for all simulations, whose functions are compiled once."""
            chosen, info = system(posterior.info.ppl), posterior.info
            with chosen.session("float64", "cpu", threads=1):
                x, y = map_data(chosen.asarray, posterior.inputs), chosen.asarray(posterior.targets)
                if self._program is None:
                    self._program = Program.of(
                        chosen, self.model, x, y, language=self._language, observed=posterior.observed
                    )
                problem = Problem(
                    self._program, x, y, posterior.inputs, posterior.targets, info.seed, "cpu", "float64"
                )
                return action(problem)

        on_cpu, tuned = posterior.info.device == "cpu", approximation.program(self.model) is not self.model
        drawn = (compiled_once if on_cpu and not tuned else posterior._with)(of_draws)
        return drawn, compiled_once(of_truth)

    def _functions(
        self, problem: Problem, w: dict[str, np.ndarray], predictor: Callable[[Any], np.ndarray]
    ) -> dict[str, np.ndarray]:
        """name -> (S,), each component of a function by a name of its own."""
        probe = problem.inputs if self.probe is None else self.probe
        if self.functions is None:
            return self._usual(
                problem.program,
                quantities(problem, w, predictor, probe, problem.inputs, problem.targets),
            )
        eta, found = predictor(probe), {}
        for name, function in self.functions.items():
            value = np.asarray(function(w, eta, problem.targets))
            if value.ndim not in (1, 2) or len(value) != len(eta):
                raise InputError(
                    f"functions[{name!r}]: "
                    + message(
                        f"a function that gives ({len(eta)},) or ({len(eta)}, K) for {len(eta)} draws",
                        f"shape {value.shape}",
                        "working over the leading axis",
                    )
                )
            if value.ndim == 1:
                found[name] = value
            else:
                found |= {f"{name}[{column}]": value[:, column] for column in range(value.shape[1])}
        return found

    def _usual(self, program: Program, judged: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What convergence is judged by (`mixing.quantities`), of f the network's outputs at single rows."""
        f = judged.pop(PREDICTOR)
        columns = f.shape[-1] if program.outputs is None else min(program.outputs, f.shape[-1])
        every = f.shape[1]
        rows = np.unique(np.linspace(0, every - 1, PROBES if self.probe is None else every).round())
        where = "row" if self.probe is None else "probe"
        found = {}
        for row in rows.astype(int):
            for column in range(columns):
                name = f"f of {where} {row}" if columns == 1 else f"f[{column}] of {where} {row}"
                found[name] = f[:, row, column]
        found["log likelihood"] = judged.pop(LOG_LIKELIHOOD)
        return found | judged

    def _ranked(self, drawn: dict[str, np.ndarray], true: dict[str, np.ndarray], index: int) -> _Record:
        rng = np.random.default_rng(site_seed(f"calibration ties {index}", self.seed))
        truths = np.array([float(true[name][0]) for name in drawn])
        values = np.stack([np.asarray(value, dtype=np.float64) for value in drawn.values()], axis=1)
        undefined = [
            name
            for name, column, value in zip(drawn, values.T, truths, strict=True)
            if np.isnan(value) or np.isnan(column).any()
        ]
        if undefined:
            return _Record(failure=f"{_listed(tuple(undefined))} is not a number for the truth or for a draw")
        below, ties = (values < truths).sum(axis=0), (values == truths).sum(axis=0)
        ranks = below + rng.integers(0, ties + 1)
        return _Record(tuple(drawn), truths, ranks, ties < len(values))


def _gathered(simulator: _Simulator, records: Mapping[int, _Record], asked: int) -> Calibration:
    order = sorted(records)
    numbers = [index for index in order if not records[index].failure]
    finished = [records[index] for index in numbers]
    names: tuple[str, ...] = finished[0].names if finished else ()
    shape = (len(finished), len(names))
    ranks = np.array([record.ranks for record in finished], dtype=np.int64).reshape(shape)
    truths = np.array([record.truths for record in finished], dtype=np.float64).reshape(shape)
    varied = np.array([record.varied for record in finished], dtype=bool).reshape(shape).any(axis=0)
    kept = dict.fromkeys(name for record in finished for name in record.figures)
    return Calibration(
        subject=f"{simulator.method.name} in {simulator.ppl}",
        names=tuple(name for name, varies in zip(names, varied, strict=True) if varies),
        numbers=np.array(numbers, dtype=np.int64),
        ranks=ranks[:, varied],
        truths=truths[:, varied],
        draws=simulator.draws,
        asked=asked,
        failures={index: records[index].failure for index in order if records[index].failure},
        constant=tuple(name for name, varies in zip(names, varied, strict=True) if not varies),
        not_converged=sum(not record.converged for record in finished),
        figures={
            name: np.array([record.figures.get(name, np.nan) for record in finished], dtype=np.float64)
            for name in kept
        },
    )
