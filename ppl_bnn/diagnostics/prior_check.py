"""Checks of a prior before a model is fitted: the prior as a posterior, and whether it suits the data.

`prior_predictive` gives the prior as a posterior with all its functions. `check_prior` compares draws from the prior
with the data and reports settings that are almost certainly mistakes. It runs the program with its own NumPy
interpretation: every random variable is drawn from its prior as the model runs, so that no system is imported and
nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.backends.protocol import Model
from ppl_bnn.core import checks
from ppl_bnn.core.arrays import map_data, row_count
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.diagnostics.prior_draws import (
    PriorDraw,
    PriorDraws,
    RecordedMaps,
    UnitGain,
    draws_at,
    prior_predictive,
    root_mean_square,
)
from ppl_bnn.inference.optimisation.loops import check_whole
from ppl_bnn.language.distributions import Distribution
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
# If the targets were drawn from the prior, 0.2 % of them would be outside. They are not independent, so up to fifty
# times as many are not evidence against the prior; more are.
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


# --- findings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PriorFinding:
    """One problem of a prior.

    Parameters
    ----------
    rule : str
        "overflow", "functions", "range", "noise", "rates" or "classes" (see `check_prior`).
    found : str
        The numbers, and the sites with their priors.
    advice : str
        What to try.
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
        ratio "f_ratio", of the output that is furthest off; "outside", the share of targets outside the central 99.8 %
        of the prior predictive; "noise", the median of its standard deviation or scale, and "noise_ratio", over that of
        the targets; "log_rate_spread"; "entropy", the median over prior draws of the entropy over log C.
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

    @property
    def summary(self) -> str:
        """The whole result as text."""
        where = f"{self.draws} draws from the prior at {self.rows} rows"
        if self.sound:
            return f"{where}: no problems found"
        return "\n".join([f"{where}:", *(f"  - {line}" for line in self.warnings)])

    def __str__(self) -> str:
        return self.summary


@dataclass(frozen=True, eq=False)
class _Subject:
    """What a finding is about: the names of its sites, and the layer that causes a size.

    layer: (size of eta, the size wanted) -> the sites of the layer that accounts for the difference, or None. last,
    noise: the sites of the last layer and of the noise. inputs: root mean square of x. standardised: the data are in
    the units of a fit that standardises, so standardising is not advised.
    """

    layer: Callable[[Callable[[np.ndarray], float], float], str | None]
    last: str
    noise: str
    inputs: float
    standardised: bool = False

    def units(self, otherwise: str) -> str:
        """Advice if the units of the data may be the cause."""
        return otherwise if self.standardised else f"standardise=True, or {otherwise}"

    def blamed(
        self, size: Callable[[np.ndarray], float], now: float, wanted: float, otherwise: str
    ) -> tuple[str, str]:
        """(what accounts for a size that is off, what to try)."""
        factor = now / wanted if now > wanted else wanted / max(now, 1e-300)
        which = "smaller" if now > wanted else "larger"
        layer = self.layer(size, wanted)
        if layer is not None:
            return f"it comes from {layer}", f"scales about {factor:.2g} times {which} there"
        if now > wanted and self.inputs > INPUTS_ABOVE and not self.standardised:
            return (
                f"it comes from inputs of size {self.inputs:.3g} (root mean square), before {self.last}",
                "standardise=True",
            )
        return f"the last layer has {self.last}", otherwise


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
      variation is half the distance between its 16 % and its 84 % quantiles, the standard deviation of a normal, which
      a single extreme draw under a prior with heavy tails does not change. Mixed-up units differ by 100 or more; sound
      priors of networks by some tens at most.
    - range: more than 10 % of the targets lie outside the central 99.8 % of the prior predictive of their rows, 0.2 %
      being expected. Reported if the variation of f is sound, or for counts: then the location of y is the cause.
    - noise: of the draws 99 % have noise of more than twice the standard deviation of y, which is what a constant
      leaves, or of less than a thousandth of it, which explains all but a millionth of the variance.
    - rates, for counts: the log rate varies by more than log 50 (measured as f above).
    - classes: the entropy of a draw's probabilities, averaged over rows, has a median over draws below 5 % of log C:
      half of the draws are certain of all labels before they have seen any. This needs logits with a standard deviation
      of about 40.
    - overflow: more than 5 % of the draws are not finite.

    Parameters
    ----------
    model : Model
        The model.
    x, y
        Inputs and targets.
    draws : int
        Largest number of draws.
    seed : int
        Seed of the draws.
    standardise : bool
        Whether to check in the units of a fit with `standardise=True`.
    ppl, observed
        System and observed site of a plain NumPyro or Pyro model, as in `prior_predictive`.

    Returns
    -------
    PriorCheck

    Raises
    ------
    InputError
        Invalid input.
    ModelError
        A model that is not valid.

    Notes
    -----
    A finding names the layer that accounts for more than half of the difference if its map is rescaled to keep the size
    of its input, with its sites and their priors; or the inputs; or, if the units of y are off, the last layer.

    At most `draws` draws and 50 rows are used (all rows if they interact), fewer for large networks, so that the check
    takes less than half a second up to some hundred thousand weights; nothing is compiled. A plain model of a system is
    drawn from by `prior_predictive`, which takes longer.
    """
    check_whole("check_prior", "draws", draws, 2, "100")
    x = checks.check_inputs(x)
    y = checks.check_targets(y, row_count(x))
    tried = _tried(model, x, seed)
    if tried is None:
        return _in_its_system(model, x, y, draws, seed, standardise, ppl, observed)
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
    drawn = draws_at(model, some, count, seed)

    def layer(size: Callable[[np.ndarray], float], wanted: float) -> str | None:
        return _accountable(model, some, seed, maps.names, size, wanted, run.drawn)

    inputs = max(
        (root_mean_square(part) for part in (some.values() if isinstance(some, Mapping) else [some])),
        default=0.0,
    )
    last = _sites_of(maps.names[-1], run.drawn) if maps.names else _listed(run.drawn, run.drawn)
    subject = _Subject(layer, last, _noise_of(run), inputs, standardise)
    outputs = int(np.shape(run.f)[-1])
    findings, figures = _judged(drawn, y, np.asarray(y)[index], outputs, subject)
    return PriorCheck(findings, figures, count, rows)


def _tried(model: Model, x: Any, seed: int) -> tuple[PriorDraw, RecordedMaps, np.ndarray] | None:
    """One draw on some of the rows, or on all if they interact; None for a model that only its own system can run."""
    every = row_count(x)
    for index in (probe_indices(every, seed, ROWS), np.arange(every)):
        run, maps = PriorDraw(np.random.default_rng(seed)), RecordedMaps()
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
            continue
        if not run.coupled or len(index) == every:
            return run, maps, index
    return None


def _in_its_system(
    model: Model,
    x: Any,
    y: np.ndarray,
    draws: int,
    seed: int,
    standardise: bool,
    ppl: str,
    observed: str | None,
) -> PriorCheck:
    """The same for a model that only a system can draw from; nothing is known about its layers."""
    prior = prior_predictive(
        model, x, y, draws=draws, seed=seed, ppl=ppl, observed=observed, standardise=standardise
    )
    eta = prior.predictor(x)
    eta = eta.reshape(-1, *eta.shape[2:])
    sites = f"the sites {', '.join(prior.draws)}"
    inputs = max(
        (root_mean_square(part) for part in (x.values() if isinstance(x, Mapping) else [x])), default=0.0
    )
    subject = _Subject(lambda size, wanted: None, sites, sites, inputs, standardise)
    drawn = PriorDraws(eta, prior.predict(x), 0.0)
    findings, figures = _judged(drawn, y, y, eta.shape[-1], subject)
    return PriorCheck(findings, figures, draws, row_count(x))


# --- the rules --------------------------------------------------------------------------------------------


# Overflow is what is tested for here, so NumPy's warnings are silenced.
@np.errstate(all="ignore")
def _judged(
    drawn: PriorDraws, every_y: np.ndarray, y: np.ndarray, outputs: int, subject: _Subject
) -> tuple[tuple[PriorFinding, ...], dict[str, float]]:
    """Findings and figures. every_y: all targets, for the spread; y: those of the rows drawn at."""
    findings: list[PriorFinding] = []
    figures = {"overflow": drawn.overflowed}
    if drawn.overflowed > OVERFLOW:
        findings.append(
            PriorFinding(
                "overflow",
                f"{drawn.overflowed:.0%} of the draws from the prior are not finite; the last layer has {subject.last}",
                "priors with lighter tails, or scales by fan-in",
            )
        )
    prediction = drawn.prediction
    # Targets of several numbers, such as a time and an event indicator, are not on the scale of a prediction.
    if prediction is None or (not prediction.is_classes and prediction.shape != np.shape(y)):
        return tuple(findings), figures
    if prediction.is_classes:
        _classes(prediction, outputs, subject, findings, figures)
    elif prediction.is_counts:
        _rates(subject, prediction, findings, figures)
        _range(prediction, y, subject, findings, figures)
    else:
        sd = np.atleast_1d(np.asarray(every_y, dtype=float).std(axis=0))
        off = _functions(prediction, sd, subject, findings, figures)
        if off == "":
            _range(prediction, y, subject, findings, figures)
        _noise(prediction, sd, off, subject, findings, figures)
    return tuple(findings), figures


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


def _functions(
    prediction: Prediction,
    sd: np.ndarray,
    subject: _Subject,
    findings: list[PriorFinding],
    figures: dict[str, float],
) -> str:
    """The direction in which f varies by the wrong amount, "wide" or "narrow"; empty if it does not."""
    loc = _locations(prediction)
    varying = np.flatnonzero(sd > 0.0)
    if loc is None or not len(varying):
        return ""
    spreads = np.array([_spread(loc[..., column]) for column in varying])
    off = np.abs(np.log(np.maximum(spreads, 1e-300) / sd[varying]))
    at = int(np.argmax(off))
    column, spread, scale = int(varying[at]), float(spreads[at]), float(sd[varying[at]])
    ratio = spread / scale
    figures |= {"f_spread": spread, "y_sd": scale, "f_ratio": ratio}
    if 1.0 / FACTOR <= ratio <= FACTOR:
        return ""

    def size(eta: np.ndarray) -> float:
        # The locations are the first columns of eta; only the weights of a mixture come before them.
        return _spread(eta[..., column]) if prediction.family != "NormalMixture" else _spread(eta)

    otherwise = subject.units("a prior in the units of the targets")
    why, advice = subject.blamed(size, spread, scale, otherwise)
    which = f" of output {column}" if loc.shape[-1] > 1 else ""
    findings.append(
        PriorFinding(
            "functions",
            f"functions{which} drawn from the prior vary by {spread:.3g}, the targets by {scale:.3g}, so that it "
            f"is {_times(ratio)}; {why}",
            advice,
        )
    )
    return "wide" if ratio > 1.0 else "narrow"


def _times(ratio: float) -> str:
    if ratio >= 1.0:
        return f"{ratio:.3g} times too wide"
    return f"{1.0 / ratio:.3g} times too narrow" if ratio > 0.0 else "without any width"


def _range(
    prediction: Prediction,
    y: np.ndarray,
    subject: _Subject,
    findings: list[PriorFinding],
    figures: dict[str, float],
) -> None:
    """Targets where the prior predictive expects none."""
    try:
        upto = prediction.cdf(y)
        # For counts, the probability of the observed count itself is part of both tails.
        below = prediction.cdf(y - 1.0) if prediction.is_counts else upto
    except UnsupportedError:
        return
    outside = float(np.mean((upto < TAIL) | (below > 1.0 - TAIL)))
    figures["outside"] = outside
    if outside <= OUTSIDE:
        return
    lower, upper = prediction.interval(1.0 - 2.0 * TAIL)
    findings.append(
        PriorFinding(
            "range",
            f"{outside:.0%} of the targets lie where the prior predictive expects {2 * TAIL:.1%} of them: they are "
            f"between {np.min(y):.3g} and {np.max(y):.3g}, and between {np.mean(lower):.3g} and {np.mean(upper):.3g} "
            f"was expected; the last layer has {subject.last}",
            "a bias in the last layer that reaches log(mean of y)"
            if prediction.is_counts
            else subject.units("a prior that is centred where the targets are"),
        )
    )


def _noise(
    prediction: Prediction,
    sd: np.ndarray,
    off: str,
    subject: _Subject,
    findings: list[PriorFinding],
    figures: dict[str, float],
) -> None:
    """Noise that is larger than the targets allow, or almost zero."""
    if prediction.family == "MultivariateNormal":
        factor = prediction.parameters["scale_tril"]
        scale = np.sqrt(np.sum(factor**2, axis=-1))
    elif prediction.family == "NormalMixture" or "scale" not in prediction.parameters:
        return
    else:
        scale = prediction.parameters["scale"]
    scale = scale.reshape(*scale.shape[:2], -1)
    varying = np.flatnonzero(sd > 0.0)
    if scale.shape[-1] != len(sd) or not len(varying):
        return
    # One number for each draw and output: if the noise differs between rows, the median row.
    of_draws = np.median(scale[..., varying], axis=1) / sd[varying]
    ratios = np.median(of_draws, axis=0)
    at = int(np.argmax(np.abs(np.log(ratios))))
    ratio, unit = float(ratios[at]), float(sd[varying[at]])
    figures |= {"noise": ratio * unit, "noise_ratio": ratio}
    large, small = (
        float(np.mean(shares)) for shares in (of_draws[:, at] > NOISE_ABOVE, of_draws[:, at] < NOISE_BELOW)
    )
    found = (
        f"the noise is {ratio * unit:.3g} (median over the prior, {subject.noise}), and all that the targets vary by "
        f"is {unit:.3g}"
    )
    # If f is off in the same direction, the cause is the units of y, which are reported already.
    if large >= NEARLY_ALL and off != "wide":
        why = "nothing would be left for the function to explain"
        advice = subject.units(f"noise of at most {unit:.2g}")
        findings.append(PriorFinding("noise", f"{found}: {why}", advice))
    elif small >= NEARLY_ALL and off != "narrow":
        why = "the function would have to explain all but a millionth of their variance"
        advice = subject.units(f"a prior of the noise that reaches {0.1 * unit:.2g}")
        findings.append(PriorFinding("noise", f"{found}: {why}", advice))


def _rates(
    subject: _Subject, prediction: Prediction, findings: list[PriorFinding], figures: dict[str, float]
) -> None:
    """Log rates that vary too much."""
    spread = _spread(np.log(prediction.parameters["rate"]))
    figures["log_rate_spread"] = spread
    if spread <= math.log(FACTOR):
        return
    why, advice = subject.blamed(lambda eta: _spread(eta[..., 0]), spread, 1.0, "narrower priors")
    findings.append(
        PriorFinding(
            "rates",
            f"rates drawn from the prior vary by a factor of {math.exp(min(spread, 700.0)):.3g} up or down; {why}",
            advice,
        )
    )


def _classes(
    prediction: Prediction,
    outputs: int,
    subject: _Subject,
    findings: list[PriorFinding],
    figures: dict[str, float],
) -> None:
    """Draws that are certain of every label."""
    probs = prediction.parameters["probs"]
    if prediction.family == "Bernoulli":
        probs = np.stack([1.0 - probs, probs], axis=-1)
    terms = np.where(probs > 0.0, probs * np.log(np.where(probs > 0.0, probs, 1.0)), 0.0)
    entropy = float(np.median(-terms.sum(axis=-1).mean(axis=-1))) / math.log(probs.shape[-1])
    figures["entropy"] = entropy
    if entropy >= SATURATED:
        return

    def size(eta: np.ndarray) -> float:
        return _spread(eta[..., :outputs])

    # With logits of size one every class has a non-negligible probability.
    why, advice = subject.blamed(size, 1.0 / max(entropy, 1e-12), 1.0, "narrower priors")
    findings.append(
        PriorFinding(
            "classes",
            f"half of the draws from the prior are sure of every label before they have seen one: their entropy is "
            f"{entropy:.2g} of log {probs.shape[-1]}; {why}",
            advice,
        )
    )


# --- names ------------------------------------------------------------------------------------------------


def _accountable(
    model: Model,
    x: Any,
    seed: int,
    maps: Sequence[str],
    size: Callable[[np.ndarray], float],
    wanted: float,
    drawn: Mapping[str, tuple[Distribution, np.ndarray]],
) -> str | None:
    """The sites of the map that accounts for more than half of log(size / wanted), or None.

    Each map in turn is rescaled to keep the size of its input, under the same draws of all weights.
    """
    before = draws_at(model, x, DRAWS_PER_MAP, seed).eta
    now = size(before) if len(before) else 0.0
    if not 0.0 < now < math.inf or now == wanted:
        return None
    best, share = None, 0.5
    for name in maps[-MOST_MAPS:]:
        after = draws_at(model, x, DRAWS_PER_MAP, seed, UnitGain(name)).eta
        changed = size(after) if len(after) else 0.0
        if 0.0 < changed < math.inf:
            part = math.log(now / changed) / math.log(now / wanted)
            if part > share:
                best, share = name, part
    return None if best is None else f"layer {best!r}, {_sites_of(best, drawn)}"


def _sites_of(layer: str, drawn: Mapping[str, tuple[Distribution, np.ndarray]]) -> str:
    """The sites of a layer with their priors; sites belong to a layer by their names."""
    own = [name for name in drawn if name == layer or name.startswith(f"{layer}.")]
    return _listed(own, drawn) if own else f"{layer!r}, whose weights are computed elsewhere"


def _listed(names: Any, drawn: Mapping[str, tuple[Distribution, np.ndarray]]) -> str:
    shown = [f"{name} ~ {_words(drawn[name][0])}" for name in names]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _words(specification: Distribution) -> str:
    """A family with its arguments: numbers as they were given, "..." for values computed from other sites."""
    values = specification.arguments.values()
    words = (f"{value:.4g}" if type(value) in (int, float) else "..." for value in values)
    return f"{specification.family}({', '.join(words)})"


def _noise_of(run: PriorDraw) -> str:
    """The site that the likelihood was given as its noise, or its value if it is known."""
    likelihood = run.likelihood
    for each in dataclasses.fields(likelihood) if dataclasses.is_dataclass(likelihood) else ():
        value = getattr(likelihood, each.name)
        if each.name not in ("noise", "scale", "scale_tril"):
            continue
        for name, (specification, drawn) in run.drawn.items():
            if value is drawn:
                return f"{name} ~ {_words(specification)}"
        if type(value) in (int, float):
            return f"{each.name} = {value:.4g}, which is given"
    return f"as {type(likelihood).__name__} has it"
