"""The distance of an approximation from a reference posterior, region by region, beside what noise alone amounts to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.notebook.html import Listing, card
from ppl_bnn.prediction.fidelity import mean_function_gap

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from ppl_bnn.references.reference import Reference

COLUMNS = {
    "rows": "rows of the region",
    "mean_error": "root mean square error of the mean, in standard deviations of the reference",
    "mean_floor": "the same between halves of the reference's chains",
    "worth_mean": "number of independent draws of the reference whose mean has this error",
    "sd_ratio": "standard deviation divided by that of the reference, geometric mean",
    "sd_floor": "the same between halves, the larger by the smaller",
    "worth_sd": "number of independent draws of the reference whose standard deviation has this error",
    "distance": "numbers: 1-Wasserstein distance of the marginals of f, in standard deviations of the reference; "
    "classes: total variation distance of their mean probabilities; mean over rows",
    "distance_floor": "the same between halves",
    "agreement": "classes: share of rows with the same most probable class",
    "agreement_floor": "the same between halves",
    "covariance_error": "root mean square error of joint covariances of pairs of rows, in products of standard "
    "deviations of the reference",
    "covariance_floor": "the same between halves",
    "elpd_loss": "the reference's mean log predictive density of held targets minus this one's, in nats per row",
    "elpd_loss_se": "standard error of that mean over rows",
    "elpd_floor": "the absolute difference between the two runs of the reference, in nats per row",
    "limit_mean": "the largest worth of a mean that the reference can tell: its own effective sample size",
    "limit_sd": "the largest worth of a standard deviation that it can tell",
}
# Random halves of the chains of the reference, between which noise is measured.
HALVES = 10
# Points at which quantile functions are compared.
QUANTILES = (np.arange(200) + 0.5) / 200


@dataclass
class Candidate:
    """What is graded in one region: mean and standard deviation of g, (rows, K), and where they are known its draws
    (S, rows, K) and the log density of held targets (rows,).
    """

    mean: np.ndarray
    sd: np.ndarray | None
    draws: np.ndarray | None = None
    log_density: np.ndarray | None = None

    @classmethod
    def of_draws(cls, draws: np.ndarray) -> Candidate:
        """From draws (S, rows, K)."""
        return cls(draws.mean(axis=0), draws.std(axis=0), draws)


@dataclass(frozen=True, eq=False)
class Grade:
    """How far an approximation is from a reference posterior.

    Parameters
    ----------
    reference : str
        Name of the reference.
    classes : bool
        Whether probabilities of classes are graded; else outputs of the network.
    figures : dict of str to dict
        Region -> column of `COLUMNS` -> number; NaN where it cannot be known from what was given. "all" is the whole
        grid.
    errors : dict of str to dict
        Region -> "mean", errors of the mean in standard deviations of the reference, and "sd", ratios of standard
        deviations, (rows, K).
    inputs : dict of str to ndarray
        Region -> the first input of each row, for figures.

    Notes
    -----
    With m the mean and v the variance of what is graded, a star for the reference and a_n weights of rows, equal for
    numbers and in proportion to ``v*_n`` for classes, ``mean_error = sqrt(sum_n a_n (m_n - m*_n)^2 / v*_n)``.

    "Worth k exact draws": k independent draws of the reference have an expected squared error of ``c / k``, where c is
    1 for means, and for logarithms of standard deviations ``(kurtosis - 1) / 4``, the mean over outputs. The
    reference's own error, ``c / n`` with its effective sample size n, is subtracted from the squared error e^2, so that
    ``k = c / (e^2 - c / n)``, at most n.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> reference = bnn.references.load("regression_mlp-curve")
    >>> mean, sd = reference.mean["test"], 1.2 * reference.sd["test"]  # an approximation that is too wide
    >>> grade = reference.grade(mean={"test": mean}, sd={"test": sd})
    >>> round(float(grade.table.loc["test", "sd_ratio"]), 2)
    1.2
    """

    reference: str
    classes: bool
    figures: Mapping[str, Mapping[str, float]]
    errors: Mapping[str, Mapping[str, np.ndarray]] = field(repr=False)
    inputs: Mapping[str, np.ndarray] = field(repr=False)

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each region, with the columns of `COLUMNS` (needs pandas)."""
        import pandas as pd

        return pd.DataFrame.from_dict(dict(self.figures), orient="index", columns=list(COLUMNS)).rename_axis(
            "region"
        )

    @property
    def sentences(self) -> dict[str, str]:
        """Region -> the grade in one sentence."""
        return {region: _sentence(each) for region, each in self.figures.items()}

    def figure(self) -> Figure:
        """Draw errors of the mean and ratios of standard deviations along the grid (needs Matplotlib).

        Returns
        -------
        matplotlib.figure.Figure
            The figure.
        """
        from ppl_bnn.references.figure import figure_of

        return figure_of(self)

    def _lines(self) -> list[list[str]]:
        """The table as text with its headings, without the columns of which nothing is known."""
        names = [
            name for name in COLUMNS if any(not math.isnan(each[name]) for each in self.figures.values())
        ]
        lines = [["", *(name.replace("_", " ") for name in names)]]
        lines += [
            [region, *(cell_text(name, each) for name in names)] for region, each in self.figures.items()
        ]
        return lines

    def _repr_html_(self) -> str:
        first, *rows = zip(*self._lines(), strict=True)
        said = [f"{region}: {text}" for region, text in self.sentences.items()]
        return card(f"Against {self.reference}", Listing("", first, rows), said)

    def __str__(self) -> str:
        lines = self._lines()
        if len(" ".join(lines[0])) > 100:
            # One line for each figure: a terminal is about 100 columns wide.
            lines = [list(line) for line in zip(*lines, strict=True)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = (
            "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
            for first, *rest in lines
        )
        said = (f"{region}: {text}" for region, text in self.sentences.items())
        return "\n".join([f"Against {self.reference}", "", *table, "", *said])


def cell_text(name: str, figures: Mapping[str, float]) -> str:
    """A figure of a region as text, "-" where it is not known."""
    value = figures[name]
    if math.isnan(value):
        return "-"
    if name.startswith("worth"):
        return worth_text(value, figures[name.replace("worth", "limit")])
    return f"{value:.0f}" if name == "rows" or name.startswith("limit") else f"{value:.3f}"


def worth_text(value: float, limit: float) -> str:
    """A number of draws as text, from "< 1" to "≥" the limit of the reference."""
    if value >= limit:
        return f"≥ {limit:.0f}"
    return "< 1" if value < 1.0 else f"{value:.1f}" if value < 10.0 else f"{value:.0f}"


_LESS = "less than one"


def _sentence(found: Mapping[str, float]) -> str:
    text = f"the mean is {found['mean_error']:.2f} standard deviations off (noise alone: {found['mean_floor']:.2f})"
    worth = _in_words(cell_text("worth_mean", found))
    text += f", worth {worth} exact draw{'' if worth == _LESS else 's'}"
    if found["sd_ratio"] == 0.0:
        text += "; there is no spread"
    elif not math.isnan(found["sd_ratio"]):
        worth = _in_words(cell_text("worth_sd", found))
        text += f"; the spread is {found['sd_ratio']:.2f} times the reference's, worth {worth}"
    if not math.isnan(found["elpd_loss"]):
        loss = f"{found['elpd_loss']:.3f} ± {found['elpd_loss_se']:.3f}"
        text += f"; it loses {loss} nats per row of held targets"
    return f"{text}."


def _in_words(worth: str) -> str:
    return _LESS if worth == "< 1" else worth.replace("≥", "at least")


# --- figures ------------------------------------------------------------------------------------------------


def grade_of(reference: Reference, given: Mapping[str, Candidate]) -> Grade:
    """The grade of candidates by region; "all" is all of them together."""
    InputError.check(given, "grade", "at least one region", "none", f"one of {', '.join(reference.x)}")
    regions = [region for region in reference.x if region in given]
    counts = {len(each.draws) for each in given.values() if each.draws is not None}
    got, advice = f"{sorted(counts)} draws", "the s-th draw of each region from one network"
    InputError.check(len(counts) < 2, "draws", "as many draws in each region", got, advice)
    rows = {region: np.r_[reference.slices[region]] for region in regions}
    losses = {region: _losses(reference, region, given[region]) for region in regions}
    figures, errors = {}, {}
    for region in regions:
        figures[region], errors[region] = _region(reference, rows[region], given[region])
        figures[region] |= _held([losses[region]])
    if len(regions) > 1:
        together = _together([given[region] for region in regions])
        figures["all"], _ = _region(reference, np.concatenate(list(rows.values())), together)
        figures["all"] |= _held(losses.values())
    inputs = {region: reference.x[region].reshape(len(reference.x[region]), -1)[:, 0] for region in regions}
    return Grade(reference.name, reference.link != "identity", figures, errors, inputs)


def _together(parts: list[Candidate]) -> Candidate:
    sd = [each.sd for each in parts if each.sd is not None]
    draws = [each.draws for each in parts if each.draws is not None]
    return Candidate(
        np.concatenate([each.mean for each in parts]),
        np.concatenate(sd) if len(sd) == len(parts) else None,
        np.concatenate(draws, axis=1) if len(draws) == len(parts) else None,
    )


def _region(
    reference: Reference, rows: np.ndarray, given: Candidate
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The figures of rows of the grid, and the errors of each."""
    exact, classes = reference.graded(rows), reference.link != "identity"
    whole = Candidate.of_draws(exact)
    found = dict.fromkeys(COLUMNS, math.nan) | {"rows": float(len(rows))}
    ours = _gap(given, whole, classes)
    found |= {"mean_error": ours["mean_gap"], "distance": _distance(given, whole, classes)}
    found["sd_ratio"] = math.nan if given.sd is None else ours["sd_ratio"]
    found["agreement"] = _agreement(given.mean, whole.mean) if classes else math.nan
    pairs = _pairs(reference, rows)
    if given.draws is not None and len(given.draws) > 1:
        found["covariance_error"] = _covariance_error(given.draws, exact, pairs, classes)
    if (key := rows.tobytes()) not in reference._floors:
        reference._floors[key] = _floors(reference, exact, pairs, classes)
    found |= reference._floors[key] | _worth(reference, rows, ours, exact, given.sd is not None)
    assert whole.sd is not None
    scale = np.where(whole.sd > 0.0, whole.sd, math.nan)
    errors = {"mean": (given.mean - whole.mean) / scale}
    errors["sd"] = np.full_like(errors["mean"], math.nan) if given.sd is None else given.sd / scale
    return found, errors


def _floors(reference: Reference, exact: np.ndarray, pairs: np.ndarray, classes: bool) -> dict[str, float]:
    """What noise alone amounts to: figures between random halves of the chains, on average."""
    chains, rng = reference.shape[0], np.random.default_rng(0)
    by_chain, found = exact.reshape(chains, -1, *exact.shape[1:]), []
    for _ in range(HALVES):
        order = rng.permutation(chains)
        first, second = (
            by_chain[chosen].reshape(-1, *exact.shape[1:])
            for chosen in (order[: chains // 2], order[chains // 2 :])
        )
        one, other = Candidate.of_draws(first), Candidate.of_draws(second)
        gap = _gap(one, other, classes)
        figures = gap["mean_gap"], math.log(gap["sd_ratio"]), _distance(one, other, classes)
        agreement = _agreement(one.mean, other.mean) if classes else math.nan
        found.append((*figures, agreement, _covariance_error(first, second, pairs, classes)))
    means, spreads, distances, agreements, covariances = np.array(found).T
    return {
        "mean_floor": float(np.sqrt(np.mean(means**2))),
        "sd_floor": float(np.exp(np.sqrt(np.mean(spreads**2)))),
        "distance_floor": float(distances.mean()),
        "agreement_floor": float(agreements.mean()),
        "covariance_floor": float(np.sqrt(np.mean(covariances**2))),
    }


def _gap(one: Candidate, other: Candidate, classes: bool) -> dict[str, float]:
    assert other.sd is not None
    spread = np.zeros_like(one.mean) if one.sd is None else one.sd
    return mean_function_gap(one.mean, spread**2, other.mean, other.sd**2, classes)


def _distance(one: Candidate, other: Candidate, classes: bool) -> float:
    """The column "distance"; NaN for numbers of which only moments are known."""
    if classes:
        p, q = _both(one.mean), _both(other.mean)
        return float(np.mean(0.5 * np.abs(p - q).sum(axis=-1)))
    if one.draws is None or other.draws is None or other.sd is None:
        return math.nan
    quantiles = (
        np.quantile(each.draws, QUANTILES, axis=0) for each in (one, other) if each.draws is not None
    )
    p, q = quantiles
    return float(np.mean(np.abs(p - q).mean(axis=0) / other.sd))


def _both(p: np.ndarray) -> np.ndarray:
    """Probabilities of all classes, (rows, C)."""
    return np.concatenate([1.0 - p, p], axis=-1) if p.shape[-1] == 1 else p


def _agreement(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.mean(_both(p).argmax(axis=-1) == _both(q).argmax(axis=-1)))


def _pairs(reference: Reference, rows: np.ndarray) -> np.ndarray:
    """The stored pairs within these rows, as positions among them, (P, 2); of the first column of each row."""
    place = np.full(sum(map(len, reference.x.values())), -1)
    place[rows] = np.arange(len(rows))
    pairs = place[np.asarray(reference.arrays["pairs"]) // reference.outputs]
    return pairs[(pairs >= 0).all(axis=1)]


def _covariance_error(one: np.ndarray, other: np.ndarray, pairs: np.ndarray, classes: bool) -> float:
    """Root mean square difference of covariances of pairs, in standard deviations of `other`; draws (S, rows, K).

    For classes the standard deviations of all pairs are pooled: those of certain rows are nearly zero.
    """
    a, b = pairs.T
    scale = other[..., 0].std(axis=0)
    each = []
    for draws in (one, other):
        centred = draws[..., 0] - draws[..., 0].mean(axis=0)
        each.append(np.mean(centred[:, a] * centred[:, b], axis=0))
    product = np.square(scale[a] * scale[b])
    return float(np.sqrt(np.mean(np.square(each[0] - each[1]) / (product.mean() if classes else product))))


def _worth(
    reference: Reference, rows: np.ndarray, ours: Mapping[str, float], exact: np.ndarray, has_sd: bool
) -> dict[str, float]:
    """The columns on numbers of exact draws."""
    found = {}
    for name, square, c in zip(
        ("mean", "sd"), _squares(ours), (1.0, _spread_of_one(reference, exact)), strict=True
    ):
        if name == "mean" or has_sd:
            limit = float(1.0 / np.mean(1.0 / reference.effective(name, rows)))
            excess = square - c / limit
            found |= {
                f"worth_{name}": min(c / excess, limit) if excess > 0.0 else limit,
                f"limit_{name}": limit,
            }
    return found


def _spread_of_one(reference: Reference, exact: np.ndarray) -> float:
    """k times the expected squared error of the log standard deviation of k exact draws, for large k."""
    squares = np.square(exact - exact.mean(axis=0))
    if reference.link != "identity":
        squares = squares.sum(axis=-1)
    variance = squares.mean(axis=0)
    each = squares.var(axis=0) / (4.0 * np.where(variance > 0.0, variance, math.inf) ** 2)
    return float(each.mean() if reference.link == "identity" else (variance * each).sum() / variance.sum())


def _squares(gap: Mapping[str, float]) -> tuple[float, float]:
    """The squared errors of means, and of logarithms of standard deviations."""
    spread = math.inf
    if gap["sd_ratio"] > 0.0:
        spread = math.log(gap["sd_ratio"]) ** 2 + gap["sd_log_ratio_spread"] ** 2
    return gap["mean_gap"] ** 2, spread


def _losses(reference: Reference, region: str, given: Candidate) -> tuple[np.ndarray, np.ndarray] | None:
    """Losses of log density by row, and differences between halves of the reference; None where they are not known."""
    if given.log_density is None or region not in reference.y:
        return None
    halves = reference.arrays[f"lpd_halves_{region}"]
    return reference.log_density[region] - given.log_density, halves[0] - halves[1]


def _held(parts: Iterable[tuple[np.ndarray, np.ndarray] | None]) -> dict[str, float]:
    """The columns on held targets."""
    known = [each for each in parts if each is not None]
    if not known:
        return {}
    losses, halves = (np.concatenate(each) for each in zip(*known, strict=True))
    error = float(losses.std(ddof=1) / math.sqrt(len(losses))) if np.isfinite(losses).all() else math.nan
    return {"elpd_loss": float(losses.mean()), "elpd_loss_se": error, "elpd_floor": float(abs(halves.mean()))}
