"""A reference posterior: its rows, its draws of outputs on the grid, and grades against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, check_known
from ppl_bnn.references.grade import Candidate, Grade, grade_of

REGIONS = ("train", "test", "gap", "far")
# What the file of a reference has at least.
ARRAYS = ("f", "x", "y", "pairs", "ess_mean", "ess_sd", *(f"x_{region}" for region in REGIONS))
# Draws of a posterior of ours whose parts have weights.
DRAWS = 4000


def _sigmoid(f: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * f))


def _softmax(f: np.ndarray) -> np.ndarray:
    p = np.exp(f - f.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


# From outputs of the network to what is graded.
LINKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda f: f,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}


@dataclass(frozen=True, eq=False)
class Reference:
    """A reference posterior of the outputs of a network at a frozen grid of inputs.

    The grid has named regions: "train" (training rows), "test" (held-out rows), "gap" (rows from a part of the input
    space that training leaves out) and "far" (inputs at a distance from all training rows). All arrays are in the units
    in which the model sees the data.

    What is graded is g = f, the outputs of the network, for numbers; for classes it is their probabilities, g =
    sigmoid(f), one column, or softmax(f), one column for each class.

    Parameters
    ----------
    card : dict
        What the reference is of: model and its arguments, data, split, sizes.
    certificate : dict
        Every check with its value and limit, samplers, seeds, versions and seconds.
    arrays : dict of str to ndarray
        What is stored.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> reference = bnn.references.load("regression_mlp-curve")
    >>> x, y = reference.train
    >>> posterior = bnn.fit(reference.model(), x, y, bnn.Laplace())
    >>> sorted(reference.grade(posterior).sentences)
    ['all', 'far', 'gap', 'test', 'train']
    """

    card: Mapping[str, Any]
    certificate: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    def __repr__(self) -> str:
        size = f"{self.card['weights']} weights, {self.card['rows']} rows, {len(self._draws)} draws"
        return f"<Reference {self.name}: {self.card['grade']}, {size}>"

    @property
    def name(self) -> str:
        """Name of the reference."""
        return self.card["name"]

    @property
    def train(self) -> tuple[np.ndarray, np.ndarray]:
        """The training rows: inputs (N, F) and targets (N,)."""
        return self.arrays["x"], self.arrays["y"]

    @property
    def test(self) -> tuple[np.ndarray, np.ndarray]:
        """The test rows: inputs and targets."""
        return self.x["test"], self.y["test"]

    @property
    def x(self) -> dict[str, np.ndarray]:
        """Region -> inputs (rows, F)."""
        return {region: self.arrays[f"x_{region}"] for region in REGIONS}

    @property
    def y(self) -> dict[str, np.ndarray]:
        """Region -> targets, of the regions that have some."""
        return {region: self.arrays[f"y_{region}"] for region in REGIONS if f"y_{region}" in self.arrays}

    @property
    def shape(self) -> tuple[int, int]:
        """Chains and draws of each; the first half of the chains is one run of the sampler."""
        return self.arrays["f"].shape[:2]

    @property
    def cost(self) -> dict[str, float]:
        """Wall "seconds" and "gradients" of the runs whose draws are stored: NUTS, in all modes, or annealing."""
        made = {"mode-weighted": "mode", "bracketed": "annealing"}.get(self.card["grade"], "nuts")
        runs = [each for name, each in self.certificate["cost"].items() if name.startswith(made)]
        return {what: float(sum(each[what] for each in runs)) for what in ("seconds", "gradients")}

    def worst(self, diagnostic: str) -> float:
        """Worst value of a diagnostic of the certificate, of f at the grid.

        Of chains in one mode where modes are weighted; NaN where there are no chains.

        Parameters
        ----------
        diagnostic : str
            "R-hat" or "bulk ESS".

        Returns
        -------
        float
            The value.
        """
        checks = self.certificate["from the full runs"]
        values = [each["value"] for each in checks if each["name"].endswith(f"f at the grid: {diagnostic}")]
        return (max if diagnostic == "R-hat" else min)(values, default=math.nan)

    def predictor(self, region: str) -> np.ndarray:
        """Draw by draw, all that the likelihood needs at a region.

        Parameters
        ----------
        region : str
            Name of the region.

        Returns
        -------
        ndarray
            (S, rows, D): the outputs, then what all rows share, such as the log noise.
        """
        f = np.asarray(self.arrays["f"], dtype=np.float64)
        f = f.reshape(f.shape[0] * f.shape[1], -1, self.outputs)[:, self.slices[region]]
        if "shared" not in self.arrays:
            return f
        shared = np.asarray(self.arrays["shared"], dtype=np.float64).reshape(len(f), 1, -1)
        return np.concatenate([f, np.broadcast_to(shared, (*f.shape[:2], shared.shape[-1]))], axis=-1)

    @property
    def link(self) -> str:
        """What is graded: "identity", "sigmoid" or "softmax" of the outputs of the network."""
        return self.card["outputs"]["link"]

    @property
    def outputs(self) -> int:
        """Number of outputs of the network."""
        return len(self.card["outputs"]["columns"])

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Region -> its rows in the grid."""
        ends = np.cumsum([0, *(len(self.x[region]) for region in REGIONS)])
        return {region: slice(*ends[index : index + 2]) for index, region in enumerate(REGIONS)}

    @cached_property
    def _floors(self) -> dict[bytes, dict[str, float]]:
        """The figures of noise alone by rows of the grid, filled by grades: they are the same for every candidate."""
        return {}

    @cached_property
    def _draws(self) -> np.ndarray:
        """What is graded, (S, rows of the grid, K); the first half of the draws is one run of the sampler."""
        f = np.asarray(self.arrays["f"], dtype=np.float64)
        return LINKS[self.link](f.reshape(f.shape[0] * f.shape[1], -1, self.outputs))

    def graded(self, rows: np.ndarray) -> np.ndarray:
        """Draws of what is graded at rows of the grid.

        Parameters
        ----------
        rows : ndarray of int
            Numbers of the rows in the grid.

        Returns
        -------
        ndarray
            (S, rows, K).
        """
        return self._draws[:, rows]

    def effective(self, moment: str, rows: np.ndarray) -> np.ndarray:
        """Effective sample size of the draws for the mean or the standard deviation at rows of the grid.

        Parameters
        ----------
        moment : {"mean", "sd"}
            What is estimated.
        rows : ndarray of int
            Numbers of the rows in the grid.

        Returns
        -------
        ndarray
            (rows, K).
        """
        return self.arrays[f"ess_{moment}"][rows]

    @property
    def draws(self) -> dict[str, np.ndarray]:
        """Region -> draws of what is graded, (S, rows, K)."""
        return {region: self._draws[:, rows] for region, rows in self.slices.items()}

    @property
    def mean(self) -> dict[str, np.ndarray]:
        """Region -> posterior mean of what is graded, (rows, K)."""
        return {region: draws.mean(axis=0) for region, draws in self.draws.items()}

    @property
    def sd(self) -> dict[str, np.ndarray]:
        """Region -> posterior standard deviation of what is graded, (rows, K)."""
        return {region: draws.std(axis=0) for region, draws in self.draws.items()}

    @property
    def log_density(self) -> dict[str, np.ndarray]:
        """Region -> log posterior predictive density of each held target, (rows,), in nats."""
        return {region: self.arrays[f"lpd_{region}"] for region in self.y}

    def model(self) -> Callable[..., None]:
        """The model of the zoo with its arguments.

        Returns
        -------
        callable
            The model `(x, y=None)`.
        """
        from ppl_bnn import zoo

        return zoo.load(self.card["model"]["name"], **self.card["model"]["arguments"])

    def grade(
        self,
        posterior: Any = None,
        *,
        draws: Mapping[str, Any] | None = None,
        mean: Mapping[str, Any] | None = None,
        sd: Mapping[str, Any] | None = None,
        probabilities: Mapping[str, Any] | None = None,
        log_density: Mapping[str, Any] | None = None,
    ) -> Grade:
        """How far an approximation is from this posterior, region by region.

        Give a posterior of this library, or one of `draws`, `mean` and `sd`, and `probabilities`, from anywhere. Each
        maps regions to arrays; a region that is left out is not graded.

        Parameters
        ----------
        posterior : Posterior, optional
            A fit of `model()` to `train`, without `standardise`.
        draws : mapping of str to array, optional
            Joint draws of the outputs f of the network (logits for classes), (S, rows, K) or, with one output, (S,
            rows). Draws of several regions belong together: the s-th of each is of one network.
        mean, sd : mapping of str to array, optional
            Mean and standard deviation of the outputs f over the posterior, (rows, K) or (rows,). For numbers only.
        probabilities : mapping of str to array, optional
            Probabilities of classes: (rows, C), or draws of them (S, rows, C); for two classes also that of class 1,
            (rows,) or (S, rows).
        log_density : mapping of str to array, optional
            Log predictive density of the held targets `y`, (rows,), in nats. It is computed from a posterior, and for
            classes from draws and probabilities, too.

        Returns
        -------
        Grade
            The grade; `print` shows it.

        Raises
        ------
        InputError
            For none or several of the four, an unknown region, another shape, values that are not finite, probabilities
            that do not add up to one, and for a posterior that was fitted to other rows.
        """
        given = {"posterior": posterior, "draws": draws, "mean": mean, "probabilities": probabilities}
        named = [name for name, value in given.items() if value is not None]
        expected = "one of a posterior, draws=, mean= and sd=, and probabilities="
        InputError.check(
            len(named) == 1, "grade", expected, ", ".join(named) or "none", "reference.grade(posterior)"
        )
        together = (mean is None) == (sd is None)
        InputError.check(together, "grade", "mean= and sd= together", named[0], "both, or draws=")
        if posterior is not None:
            found = self._of_posterior(posterior)
        elif draws is not None:
            each = {region: self._checked("draws", region, values, 1) for region, values in draws.items()}
            found = {region: Candidate.of_draws(LINKS[self.link](f)) for region, f in each.items()}
            if self.link != "identity":
                found = {region: self._with_density(region, one) for region, one in found.items()}
        elif mean is not None and sd is not None:
            found = self._of_moments(mean, sd)
        else:
            assert probabilities is not None
            found = {region: self._of_classes(region, values) for region, values in probabilities.items()}
        for region, values in (log_density or {}).items():
            check_known("region", [region], self.y)
            InputError.check(
                region in found, "log_density", f"one of {', '.join(found)}", region, "its draws, too"
            )
            found[region].log_density = _finite("log_density", region, values, (len(self.y[region]),))
        return grade_of(self, found)

    def _checked(self, name: str, region: str, values: Any, leading: int) -> np.ndarray:
        """Values (..., rows, K) with `leading` axes before the rows, checked."""
        check_known("region", [region], REGIONS)
        rows, array = len(self.x[region]), np.asarray(values)
        if self.outputs == 1 and array.ndim == leading + 1:
            array = array[..., None]
        first = array.shape[:leading]
        shape = (*(first or (1,) * leading), rows, self.outputs)
        if leading and 0 in first:
            shape = (2, rows, self.outputs)
        return _finite(name, region, array, shape)

    def _of_moments(self, mean: Mapping[str, Any], sd: Mapping[str, Any]) -> dict[str, Candidate]:
        advice = "probabilities=, or draws= of the logits"
        InputError.check(self.link == "identity", "mean", "probabilities of classes", "mean and sd", advice)
        InputError.check(
            set(mean) == set(sd), "sd", f"the regions {sorted(mean)}", sorted(sd), "the same for both"
        )
        found = {}
        for region in mean:
            centre, spread = (
                self._checked(name, region, value[region], 0) for name, value in (("mean", mean), ("sd", sd))
            )
            InputError.check(
                (spread >= 0.0).all(), f"sd[{region!r}]", "no negative number", spread.min(), "its root"
            )
            found[region] = Candidate(centre, spread)
        return found

    def _of_classes(self, region: str, values: Any) -> Candidate:
        """A candidate from probabilities of classes, or from draws of them."""
        InputError.check(
            self.link != "identity", "probabilities", "mean= and sd=, or draws=", "probabilities", "draws="
        )
        check_known("region", [region], REGIONS)
        array, rows = np.asarray(values, dtype=np.float64), len(self.x[region])
        classes = self.outputs if self.link == "softmax" else 2
        if classes == 2 and array.ndim and array.shape[-1] == rows and array.shape[-2:] != (rows, 2):
            array = np.stack([1.0 - array, array], axis=-1)
        leading = () if array.ndim < 3 else array.shape[:1]
        p = _finite("probabilities", region, array, (*leading, rows, classes))
        good = (p >= 0.0).all() and np.allclose(p.sum(axis=-1), 1.0, atol=1e-6)
        got = f"values from {p.min():g} to {p.max():g} with sums from {p.sum(-1).min():g} to {p.sum(-1).max():g}"
        InputError.check(
            good, f"probabilities[{region!r}]", "probabilities of all classes", got, "a softmax of the logits"
        )
        p = p if self.link == "softmax" else p[..., 1:]
        found = Candidate.of_draws(p) if leading else Candidate(p, None)
        return self._with_density(region, found)

    def _with_density(self, region: str, candidate: Candidate) -> Candidate:
        """With the log density of held labels, by the mean probabilities."""
        if region in self.y:
            p = candidate.mean
            p = np.concatenate([1.0 - p, p], axis=-1) if self.link == "sigmoid" else p
            with np.errstate(divide="ignore"):
                candidate.log_density = np.log(
                    np.take_along_axis(p, self.y[region][:, None].astype(int), 1)[:, 0]
                )
        return candidate

    def _of_posterior(self, posterior: Any) -> dict[str, Candidate]:
        """A candidate of a fit of this library, by its own predictive."""
        advice = "bnn.fit(reference.model(), *reference.train, method)"
        known = all(hasattr(posterior, each) for each in ("predictor", "predict", "original_inputs"))
        InputError.check(
            known, "grade", "a posterior of bnn.fit", type(posterior).__name__, "draws=, or mean= and sd="
        )
        InputError.check(
            posterior.standardisation is None, "grade", "a fit without standardise", "one with it", advice
        )
        for ours, theirs in zip((posterior.inputs, posterior.targets), self.train, strict=True):
            same = np.shape(ours) == theirs.shape and np.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
            InputError.check(
                same, "grade", f"a fit to the training rows of {self.name}", "other rows", advice
            )
        x = np.concatenate([self.x[region] for region in REGIONS])
        eta = posterior.predictor(x, draws=None if posterior.weights is None else DRAWS)
        columns = self.card["outputs"]["columns"]
        widest, model = max(columns), f"the model {self.card['model']['name']}"
        InputError.check(widest < eta.shape[-1], "grade", model, f"{eta.shape[-1]} outputs", advice)
        g = LINKS[self.link](eta.reshape(-1, *eta.shape[2:]).astype(np.float64)[..., columns])
        found = {}
        for region, rows in self.slices.items():
            found[region] = Candidate.of_draws(g[:, rows])
            if region in self.y:
                prediction, y = posterior.predict(self.x[region]), self.y[region]
                found[region].log_density = np.asarray(prediction.log_prob(y))
        return found


def _finite(name: str, region: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Values of a shape, as float64; `InputError` for another shape, and for values that are not finite."""
    where = f"{name}[{region!r}]"
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError.of(where, "an array of numbers", str(error), "a NumPy array") from error
    InputError.check(
        array.shape == shape, where, f"shape {shape}", array.shape, "one row for each of the region"
    )
    wrong = np.count_nonzero(~np.isfinite(array))
    InputError.check(
        not wrong, where, "finite numbers", f"{wrong} of {array.size} are not", "leaving the region out"
    )
    return array
