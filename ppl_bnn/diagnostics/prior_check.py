"""Checks of a prior before a model is fitted.

Every random variable is drawn from its prior in NumPy as the model runs: nothing is compiled, no system imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ppl_bnn.backends.protocol import Model
from ppl_bnn.core import checks
from ppl_bnn.core.arrays import map_data, row_count
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.settings import check_value, whole
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.diagnostics import prior_draws
from ppl_bnn.language.distributions import Distribution, in_words
from ppl_bnn.language.primitives import Handler
from ppl_bnn.posterior.convergence import probe_indices
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.standardisation import Standardisation

# Draws and rows that a check uses; fewer for a large model, to stay within WORK multiplications in all.
DRAWS, ROWS, WORK = 100, 50, 5e8
FEWEST_DRAWS, FEWEST_ROWS = 20, 10
# Number of multiplications that take as long as drawing a number.
PER_NUMBER = 20
# Draws and maps used to find the layer that a finding is about.
DRAWS_PER_MAP, MOST_MAPS = 10, 12
# Mixed-up units give factors of a hundred and more. A sound prior on standardised data stays within some tens: relu
# layers without a scale by fan-in, the widest of the zoo, reach 31.
FACTOR = 50.0
# If the targets were drawn from the prior, 0.2 % of them would be outside. They are not independent, so only more than
# fifty times as many are evidence against the prior.
TAIL, OUTSIDE = 0.001, 0.10
# Residuals about a constant have the standard deviation of the targets, so noise of twice that is too large. Noise of
# a thousandth of it means a function that explains all but a millionth of their variance.
NOISE_ABOVE, NOISE_BELOW, NEARLY_ALL = 2.0, 1e-3, 0.99
# Share of log C. Normal logits with a standard deviation of 40 have a binary entropy of 5 % of log 2.
SATURATED = 0.05
# If a larger share of the draws overflows, means over the prior cannot be computed.
OVERFLOW = 0.05
# Root mean square of inputs above which the inputs have to be scaled, not a layer.
INPUTS_ABOVE = 10.0
# Site -> the distribution that it was drawn from, and its value.
Sites = Mapping[str, tuple[Distribution, np.ndarray]]
# A size of eta.
Size = Callable[[np.ndarray], float]


# --- findings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PriorFinding:
    """One problem of a prior.

    Parameters
    ----------
    rule : str
        "overflow", "functions", "range", "noise", "rates" or "classes" (see `check_prior`).
    found, advice : str
        The numbers and the sites with their priors; what to try.
    """

    rule: str
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.found}; try {self.advice}"


@dataclass(frozen=True)
class PriorCheck:
    """Result of `check_prior`: the problems found and the numbers behind them.

    Parameters
    ----------
    findings : tuple of PriorFinding
        The problems; empty if none were found.
    figures : dict of str to float
        The numbers that are defined: "overflow", the share of draws that are not finite; "f_spread", "y_sd" and their
        ratio "f_ratio", of the output that is furthest off; "outside", the share of targets outside the central 99.8 %;
        "noise", its median standard deviation or scale, and "noise_ratio", over that of the targets;
        "log_rate_spread"; "entropy", the median over prior draws of the entropy over log C.
    draws, rows : int
        Number of draws and rows that were used.
    """

    findings: tuple[PriorFinding, ...]
    figures: dict[str, float] = field(default_factory=dict)
    draws: int = 0
    rows: int = 0

    @property
    def sound(self) -> bool:
        """Whether no problems were found. This does not make the prior a good one."""
        return not self.findings

    @property
    def warnings(self) -> tuple[str, ...]:
        """The findings, one line each."""
        return tuple(str(finding) for finding in self.findings)

    def __str__(self) -> str:
        """The whole result as text."""
        where = f"{self.draws} draws from the prior at {self.rows} rows"
        if self.sound:
            return f"{where}: no problems found"
        return "\n".join([f"{where}:", *(f"  - {line}" for line in self.warnings)])


def check_prior(
    model: Model,
    x: Any,
    y: Any,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    standardise: bool = False,
    ppl: str = "numpyro",
    observed: str | None = None,
) -> PriorCheck:
    """Check whether the prior of `model` is absurd for these data, by a few draws at the inputs x beside the targets y.

    The check does not judge beliefs. Each rule detects a setting that is almost certainly a mistake, mostly of units:

    - functions: f varies over draws and rows by less than 1/50 or more than 50 times the standard deviation of y. Its
      variation is half the distance between its 16 % and 84 % quantiles, which extreme draws of heavy tails do not
      change.
    - range: more than 10 % of the targets lie outside the central 99.8 % of the prior predictive. Reported if the
      variation of f is sound, or for counts.
    - noise: 99 % of the draws have noise of more than twice the standard deviation of y, or of less than a thousandth.
    - rates, for counts: the log rate varies by more than log 50.
    - classes: half of the draws have a mean entropy over rows below 5 % of log C. They are certain of all labels before
      they have seen any, which needs logits with a standard deviation of about 40.
    - overflow: more than 5 % of the draws are not finite.

    Parameters
    ----------
    model : Model
        The model.
    x : array or dict of array
        Inputs, (N, F).
    y : array
        Targets, (N,) or (N, K).
    draws : int
        Largest number of draws.
    seed : int
        Seed of the draws.
    standardise : bool
        Whether to check in the units of a fit with `standardise=True`.
    ppl : str
        The system that draws, "numpyro" or "pyro".
    observed : str, optional
        The observed site of a plain NumPyro or Pyro model.

    Returns
    -------
    PriorCheck
        The findings, and the numbers behind them.

    Raises
    ------
    InputError, ModelError
        Invalid input, or a model that is not valid.

    Notes
    -----
    A finding names the sites of the layer that causes more than half of the difference, or the inputs.

    At most `draws` draws and 50 rows are used (all rows if they interact), fewer for large networks, so that the check
    takes less than half a second up to some hundred thousand weights. A plain model of a system takes longer.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> bnn.check_prior(model, table.x, table.y, standardise=True).sound
    True
    >>> narrow = bnn.zoo.load("linear_regression", scale=1e-3)  # hardly varies over the rows
    >>> bnn.check_prior(narrow, table.x, table.y, standardise=True).sound
    False
    """
    check_value(draws, whole(2), "check_prior draws", "draws=100")
    x = checks.check_inputs(x)
    y = checks.check_targets(y, row_count(x))
    tried = _tried(model, x, seed)
    if tried is None:
        return _in_its_system(model, x, y, draws, standardise, seed=seed, ppl=ppl, observed=observed)
    run, maps, index = tried
    regression = run.likelihood.task == "regression"
    run.likelihood.check_values(y)
    if standardise:
        # The fit itself warns of a constant column.
        with ignored(category=UserWarning):
            units = Standardisation.of(x, y, regression and run.likelihood.standardises)
        x, y = units.inputs(x), units.targets(y)
    rows, count = len(index), draws
    if not run.coupled:
        per_row = max(1, maps.work // rows)
        per_draw = PER_NUMBER * sum(value.size for _, value in run.drawn.values())
        rows = int(np.clip((WORK / draws - per_draw) / per_row, min(FEWEST_ROWS, rows), rows))
        index = index[np.linspace(0, len(index) - 1, rows).round().astype(int)]
        count = int(np.clip(WORK / (per_row * rows + per_draw), min(FEWEST_DRAWS, draws), draws))
    some = map_data(lambda a: a[index], x)
    last = _sites_of(maps.names[-1], run.drawn) if maps.names else _listed(run.drawn, run.drawn)
    accountable = partial(_accountable, model, some, seed, maps.names, run.drawn)
    outputs = int(np.shape(run.f)[-1])
    rules = _Rules(accountable, last, _noise_of(run), some, outputs, y, y[index], standardise)
    return rules.checked(prior_draws.draws_at(model, some, count, seed), count)


def _tried(
    model: Model, x: Any, seed: int
) -> tuple[prior_draws.PriorDraw, prior_draws.RecordedMaps, np.ndarray] | None:
    """One draw on some of the rows, or on all if they interact; None for a model that only its own system can run."""
    every = row_count(x)
    for index in (probe_indices(every, seed, ROWS), np.arange(every)):
        run, maps = prior_draws.PriorDraw(np.random.default_rng(seed)), prior_draws.RecordedMaps()
        some = map_data(lambda a, rows=index: a[rows], x)
        try:
            with np.errstate(all="ignore"), run, maps:
                model(some, None)
        except UnsupportedError:
            return None
        except Exception:
            # A model may raise anything, and one written in a system does so if it is given NumPy. Nothing is lost: a
            # run in its system, or on all rows, raises its own error.
            if not run.heard:
                return None
            # If rows interact, a subset may not be a valid input: a graph has a fixed number of nodes.
            if len(index) == every:
                raise
        else:
            if not run.coupled or len(index) == every:
                return run, maps, index
    return None


def _in_its_system(
    model: Model, x: Any, y: np.ndarray, draws: int, standardise: bool, **options: Any
) -> PriorCheck:
    """The check of a model that only its system can draw from, without findings on its layers."""
    prior = prior_draws.prior_predictive(model, x, y, draws=draws, standardise=standardise, **options)
    eta = prior.predictor(x)
    eta = eta.reshape(-1, *eta.shape[2:])
    sites = f"the sites {', '.join(prior.draws)}"
    rules = _Rules(None, sites, sites, x, eta.shape[-1], y, y, standardise)
    return rules.checked(prior_draws.PriorDraws(eta, prior.predict(x), 0.0), draws)


# --- the rules --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Rules:
    """The rules of `check_prior`, and what they need.

    `accountable` names the layer behind a size of eta, and is None for a model of a system; `last` and `noise` are the
    sites of the last layer and the noise; `x` are the inputs drawn at; `outputs` counts outputs; `every_y` are all
    targets, `y` those of the rows drawn at; `standardised` data are not advised to be standardised.
    """

    accountable: Callable[[Size, float], str | None] | None
    last: str
    noise: str
    x: Any
    outputs: int
    every_y: np.ndarray
    y: np.ndarray
    standardised: bool
    findings: list[PriorFinding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    # Overflow is what is tested for here, so NumPy's warnings are silenced.
    @np.errstate(all="ignore")
    def checked(self, drawn: prior_draws.PriorDraws, count: int) -> PriorCheck:
        """Apply the rules to `count` draws, of which those in `drawn` are finite."""
        self.figures["overflow"] = drawn.overflowed
        if drawn.overflowed > OVERFLOW:
            text = f"{drawn.overflowed:.0%} of the draws from the prior are not finite; the last layer has {self.last}"
            self.report("overflow", text, "priors with lighter tails, or scales by fan-in")
        if drawn.prediction is not None:
            self.check(drawn.prediction)
        return PriorCheck(tuple(self.findings), self.figures, count, len(self.y))

    def check(self, prediction: Prediction) -> None:
        """Apply the rules about predictions of this kind."""
        if prediction.is_classes:
            self.check_classes(prediction)
        # Targets of several numbers, such as a time and an event indicator, are not on the scale of a prediction.
        elif prediction.shape != np.shape(self.y):
            return
        elif prediction.is_counts:
            self.check_rates(prediction)
            self.check_range(prediction)
        else:
            sd = np.atleast_1d(np.asarray(self.every_y, dtype=float).std(axis=0))
            off = self.check_functions(prediction, sd)
            if off == "":
                self.check_range(prediction)
            self.check_noise(prediction, sd, off)

    def report(self, rule: str, found: str, advice: str) -> None:
        """Add a finding."""
        self.findings.append(PriorFinding(rule, found, advice))

    def units(self, otherwise: str) -> str:
        """Advice if the units of the data may be the cause."""
        return otherwise if self.standardised else f"standardise=True, or {otherwise}"

    def cause(self, size: Size, now: float, wanted: float, otherwise: str) -> tuple[str, str]:
        """(what accounts for a size that is off, what to try)."""
        factor = now / wanted if now > wanted else wanted / max(now, 1e-300)
        which = "smaller" if now > wanted else "larger"
        layer = self.accountable and self.accountable(size, wanted)
        if layer is not None:
            return f"it comes from {layer}", f"scales about {factor:.2g} times {which} there"
        arrays = self.x.values() if isinstance(self.x, Mapping) else [self.x]
        largest = max(map(prior_draws.root_mean_square, arrays), default=0.0)
        if now > wanted and largest > INPUTS_ABOVE and not self.standardised:
            inputs = f"inputs of size {largest:.3g} (root mean square)"
            return f"it comes from {inputs}, before {self.last}", "standardise=True"
        return f"the last layer has {self.last}", otherwise

    def check_functions(self, prediction: Prediction, sd: np.ndarray) -> str:
        """The direction in which f varies by the wrong amount, "wide" or "narrow"; empty if it does not."""
        loc = _locations(prediction)
        if loc is None or not sd.any():
            return ""
        # Outputs whose targets do not vary are not compared.
        spreads = np.array([_spread(each) for each in np.moveaxis(loc, -1, 0)])
        off = np.abs(np.log(np.maximum(spreads, 1e-300) / sd))
        column = int(np.argmax(np.where(sd > 0.0, off, -1.0)))
        spread, scale = float(spreads[column]), float(sd[column])
        ratio = spread / scale
        self.figures |= {"f_spread": spread, "y_sd": scale, "f_ratio": ratio}
        if 1.0 / FACTOR <= ratio <= FACTOR:
            return ""

        def size(eta: np.ndarray) -> float:
            # The locations are the first columns of eta; only the weights of a mixture come before them.
            return _spread(eta if prediction.family == "NormalMixture" else eta[..., column])

        why, advice = self.cause(size, spread, scale, self.units("a prior in the units of the targets"))
        which = f" of output {column}" if loc.shape[-1] > 1 else ""
        text = f"functions{which} drawn from the prior vary by {spread:.3g}, the targets by {scale:.3g}"
        self.report("functions", f"{text}, so that it is {_times(ratio)}; {why}", advice)
        return "wide" if ratio > 1.0 else "narrow"

    def check_range(self, prediction: Prediction) -> None:
        """Targets where the prior predictive expects none."""
        y = self.y
        try:
            upto = prediction.cdf(y)
            # For counts, the probability of the observed count itself is part of both tails.
            below = prediction.cdf(y - 1.0) if prediction.is_counts else upto
        except UnsupportedError:
            return
        outside = float(np.mean((upto < TAIL) | (below > 1.0 - TAIL)))
        self.figures["outside"] = outside
        if outside <= OUTSIDE:
            return
        lower, upper = prediction.interval(1.0 - 2.0 * TAIL)
        advice = "a bias in the last layer that reaches log(mean of y)"
        if not prediction.is_counts:
            advice = self.units("a prior that is centred where the targets are")
        few = f"{outside:.0%} of the targets are where the prior predictive expects {2 * TAIL:.1%} of them"
        ends = f"they are between {np.min(y):.3g} and {np.max(y):.3g}"
        expected = f"between {np.mean(lower):.3g} and {np.mean(upper):.3g} was expected"
        self.report("range", f"{few}: {ends}, and {expected}; the last layer has {self.last}", advice)

    def check_noise(self, prediction: Prediction, sd: np.ndarray, off: str) -> None:
        """Noise that is larger than the targets allow, or almost zero."""
        scale = prediction.parameters.get("scale")
        if prediction.family == "MultivariateNormal":
            scale = np.sqrt(prediction.law().variance())
        if scale is None or prediction.family == "NormalMixture":
            return
        scale = scale.reshape(*scale.shape[:2], -1)
        varying = np.flatnonzero(sd > 0.0)
        if scale.shape[-1] != len(sd) or not len(varying):
            return
        # One number for each draw and output: if the noise differs between rows, the median row.
        of_draws = np.median(scale[..., varying], axis=1) / sd[varying]
        ratios = np.median(of_draws, axis=0)
        at = int(np.argmax(np.abs(np.log(ratios))))
        ratio, unit = float(ratios[at]), float(sd[varying[at]])
        self.figures |= {"noise": ratio * unit, "noise_ratio": ratio}
        # If f is off in the same direction, the cause is the units of y, which are reported already.
        if np.mean(of_draws[:, at] > NOISE_ABOVE) >= NEARLY_ALL and off != "wide":
            why, advice = "nothing would be left for the function to explain", f"noise of at most {unit:.2g}"
        elif np.mean(of_draws[:, at] < NOISE_BELOW) >= NEARLY_ALL and off != "narrow":
            why = "the function would have to explain all but a millionth of their variance"
            advice = f"a prior of the noise that reaches {0.1 * unit:.2g}"
        else:
            return
        text = f"the noise is {ratio * unit:.3g} (median over the prior, {self.noise})"
        text += f", and all that the targets vary by is {unit:.3g}"
        self.report("noise", f"{text}: {why}", self.units(advice))

    def check_rates(self, prediction: Prediction) -> None:
        """Log rates that vary too much."""
        spread = _spread(np.log(prediction.parameters["rate"]))
        self.figures["log_rate_spread"] = spread
        if spread > math.log(FACTOR):
            why, advice = self.cause(lambda eta: _spread(eta[..., 0]), spread, 1.0, "narrower priors")
            factor = math.exp(min(spread, 700.0))
            text = f"rates drawn from the prior vary by a factor of {factor:.3g} up or down"
            self.report("rates", f"{text}; {why}", advice)

    def check_classes(self, prediction: Prediction) -> None:
        """Draws that are certain of every label."""
        classes = prediction.classes
        entropy = float(np.median(prediction.law().uncertainty().mean(axis=-1))) / math.log(classes)
        self.figures["entropy"] = entropy
        if entropy >= SATURATED:
            return
        # With logits of size one every class has a non-negligible probability.
        size, now = (lambda eta: _spread(eta[..., : self.outputs])), 1.0 / max(entropy, 1e-12)
        why, advice = self.cause(size, now, 1.0, "narrower priors")
        text = "half of the draws from the prior are sure of every label before they have seen one"
        self.report("classes", f"{text}: their entropy is {entropy:.2g} of log {classes}; {why}", advice)


def _spread(values: np.ndarray) -> float:
    """Half the distance between the 16 % and the 84 % quantiles: the standard deviation of a normal."""
    low, high = np.quantile(values, [0.16, 0.84])
    return 0.5 * float(high - low)


def _locations(prediction: Prediction) -> np.ndarray | None:
    """The location of the targets in each draw, (S, N, K); None for a family without one."""
    if prediction.family == "NormalMixture":
        return prediction.component_mean()[..., None]
    loc = prediction.parameters.get("loc")
    return None if loc is None else loc.reshape(*loc.shape[:2], -1)


def _times(ratio: float) -> str:
    if ratio >= 1.0:
        return f"{ratio:.3g} times too wide"
    return f"{1.0 / ratio:.3g} times too narrow" if ratio > 0.0 else "without any width"


# --- names ------------------------------------------------------------------------------------------------


def _accountable(
    model: Model, x: Any, seed: int, maps: Sequence[str], drawn: Sites, size: Size, wanted: float
) -> str | None:
    """The sites of the map that causes more than half of log(size of eta / wanted), or None.

    Each of the linear maps, in their order, is rescaled in turn to keep the size of its input, under the same draws of
    all weights. `drawn` has the sites of the model with the distributions that they were drawn from.
    """

    def size_of(*change: Handler) -> float:
        eta = prior_draws.draws_at(model, x, DRAWS_PER_MAP, seed, *change).eta
        return size(eta) if len(eta) else 0.0

    now = size_of()
    if not 0.0 < now < math.inf or now == wanted:
        return None
    changed = {name: size_of(prior_draws.UnitGain(name)) for name in maps[-MOST_MAPS:]}
    defined = {name: without for name, without in changed.items() if 0.0 < without < math.inf}
    shares = {name: math.log(now / a) / math.log(now / wanted) for name, a in defined.items()}
    best = max(shares, key=shares.__getitem__, default="")
    return f"layer {best!r}, {_sites_of(best, drawn)}" if shares.get(best, 0.0) > 0.5 else None


def _sites_of(layer: str, drawn: Sites) -> str:
    """The sites of a layer with their priors; sites belong to a layer by their names."""
    own = [name for name in drawn if name == layer or name.startswith(f"{layer}.")]
    return _listed(own, drawn) if own else f"{layer!r}, whose weights are computed elsewhere"


def _listed(names: Any, drawn: Sites) -> str:
    shown = [f"{name} ~ {in_words(drawn[name][0].family, drawn[name][0].arguments)}" for name in names]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _noise_of(run: prior_draws.PriorDraw) -> str:
    """The site that the likelihood was given as its noise, or its value if it is known."""
    likelihood = run.likelihood
    for field_name in ("noise", "scale", "scale_tril"):
        value = getattr(likelihood, field_name, None)
        for name, (specification, drawn) in run.drawn.items():
            if value is drawn:
                return f"{name} ~ {in_words(specification.family, specification.arguments)}"
        if type(value) in (int, float):
            return f"{field_name} = {value:.4g}, which is given"
    return f"as {type(likelihood).__name__} has it"
