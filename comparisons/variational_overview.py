"""Variational Bayesian neural networks: two kinds of uncertainty, and what a mean-field normal makes of them.

Source: a Chinese introduction to variational Bayesian networks, which retells Blundell et al. (2015), "Weight
uncertainty in neural networks", and Kingma, Salimans and Welling (2015), "Variational dropout and the local
reparameterization trick". With independent normals q(w) = N(mu, softplus(rho)^2) and a batch of B of N rows,

    ELBO = (N / B) sum_{i in batch} E_q log p(y_i | x_i, w) - KL(q || p),     w = mu + softplus(rho) eps,

and the predictive p(y* | x*) = E_q p(y* | x*, w) is an average over networks. Its variance is the aleatoric part,
E_q Var(y* | w), plus the epistemic one, Var_q E(y* | w).

Corrected here: the KL belongs to all rows and is counted once, not per row; a mixture is a product over weights of sums
in brackets, and its weight is a fixed number; what local reparameterisation draws is the pre-activation
o_j = sum_i mu_ji a_i + eps_j (sum_i sigma_ji^2 a_i^2)^(1/2), with the root outside of the sum, and the number of
parameters stays the same; dL/dw holds the terms of log q and log p; standard normal variables are not between 0 and 1;
and a plain network with one noise has a band of one width. Where a slip can be seen, it is shown.

The curve is that of Blundell et al., y = x + 0.3 sin(2 pi (x + e)) + 0.3 sin(4 pi (x + e)) + e with e ~ N(0, 0.02^2)
and x in [0, 0.5]. Noise that goes through the sines is heteroscedastic, and its standard deviation is known by
quadrature. References are NUTS on the same model and rows, where it converges in function space. What is measured is
measured on each of several data sets; what is proved is computed exactly, and the runs show what the slip would do.

    python comparisons/variational_overview.py [--tiny] [--out DIR] [--cache DIR] [--seeds N]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import claims
import numpy as np
from claims import Estimate, Referee, Verdict, read_claims
from scipy import stats
from study import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    Study,
    command_line,
    converged,
    panels,
)

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors, scores
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.diagnostics.function_space import convergence
from ppl_bnn.inference.variational.guides import Guide
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.inference.variational.objectives import Objective
from ppl_bnn.language.handlers import NetworkFunction
from ppl_bnn.language.stochastic_layers import LocalReparameterisation

# What stands for no prior at all: a standard deviation of 100.
FLAT = priors.Normal(0.0, 100.0)
UNIT = priors.Normal(0.0, 1.0)
# The four priors of the source, the first in two widths.
PRIORS: dict[str, Any] = {
    "Gaussian, sd 0.5": priors.Normal(0.0, 0.5),
    "Gaussian, sd 2": priors.Normal(0.0, 2.0),
    "scale mixture": priors.ScaleMixture((0.5, 0.5), (1.5, 0.1)),
    "spike and slab": priors.SpikeAndSlab(probability=0.5, slab=2.0, spike=0.05),
    "horseshoe": priors.Horseshoe(scale=1.0),
}
NO_REFERENCE = "no reference"
# Rows times draws of one compiled call.
CHUNK = 40_000
INSIDE, OUTSIDE = (0.0, 0.5), (0.6, 1.2)

PARTS = {"inside": INSIDE, "away": OUTSIDE}

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """How much is computed. Rows and units are the study's; the rest trades Monte-Carlo error for time.

    seeds: number of data sets, the unit of replication.
    """

    seeds: int = 10
    rows: int = 80
    test_rows: int = 1000
    units: int = 10
    networks: int = 6
    steps: int = 4000
    mode_steps: int = 2000
    draws: int = 500
    chains: int = 4
    tree_depth: int = 8
    row_counts: tuple[int, ...] = (32, 128, 512, 2048, 8192)
    sampled_rows: int = 512
    batch: int = 32
    batches: tuple[int, ...] = (80, 16, 4, 1)
    elbo_draws: int = 4000
    gradient_draws: int = 2000
    gradient_batches: tuple[int, ...] = (1, 16, 128)
    timed: int = 15
    friedman_rows: int = 400
    friedman_units: int = 20
    friedman_steps: int = 12_000
    priors: tuple[str, ...] = tuple(PRIORS)
    averaged: tuple[int, ...] = (1, 2, 5, 10, 30, 100, 300, 1000)


FULL = Sizes()
# Numbers of rows and of inputs come again in several parts, which then share what is compiled.
TINY = Sizes(
    seeds=1,
    rows=24,
    test_rows=60,
    units=3,
    networks=2,
    steps=60,
    mode_steps=40,
    draws=30,
    chains=2,
    tree_depth=4,
    row_counts=(24, 48),
    sampled_rows=24,
    batch=8,
    batches=(24, 1),
    elbo_draws=100,
    gradient_draws=40,
    gradient_batches=(16,),
    timed=2,
    friedman_rows=40,
    friedman_units=3,
    friedman_steps=60,
    priors=("scale mixture",),
    averaged=(1, 10),
)


# --- data and models ------------------------------------------------------------------------------


def curve_at(x: Any, e: Any = 0.0) -> Any:
    """y at x, with the noise e inside the sines."""
    return x + 0.3 * np.sin(2.0 * np.pi * (x + e)) + 0.3 * np.sin(4.0 * np.pi * (x + e)) + e


def curve(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, 1) in [0, 0.5] and y (N,) with e ~ N(0, 0.02^2)."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(*INSIDE, rows)
    return x[:, None], curve_at(x, 0.02 * rng.normal(size=rows))


def curve_moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E[y | x] and the standard deviation of y given x on the curve, by Gauss-Hermite quadrature over e."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    values = curve_at(np.asarray(x)[:, None], 0.02 * nodes)
    mean = values @ weights
    return mean, np.sqrt(((values - mean[:, None]) ** 2) @ weights)


LEVEL_NOISE = 0.06


def level(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same curve at e = 0 with noise of one standard deviation everywhere, LEVEL_NOISE."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(*INSIDE, rows)
    return x[:, None], curve_at(x) + LEVEL_NOISE * rng.normal(size=rows)


def level_moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return curve_at(np.asarray(x)), np.full(len(x), LEVEL_NOISE)


DATA: dict[str, tuple[Any, Any]] = {"curve": (curve, curve_moments), "level": (level, level_moments)}
FRIEDMAN_INPUTS, FRIEDMAN_RELEVANT = 20, 5


def friedman(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Friedman's (1991) function of 5 inputs among 20, each uniform on [0, 1], with noise of sd 1."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(rows, FRIEDMAN_INPUTS))
    mean = (
        10.0 * np.sin(np.pi * x[:, 0] * x[:, 1])
        + 20.0 * (x[:, 2] - 0.5) ** 2
        + 10.0 * x[:, 3]
        + 5.0 * x[:, 4]
    )
    return x, mean + rng.normal(size=rows)


def training_and_test(
    draw: Callable[..., Any], rows: int, test_rows: int, seed: int
) -> tuple[np.ndarray, ...]:
    """x, y, x_test, y_test of the data set `seed`. No two parts of any data sets share a stream of random numbers."""
    return *draw(rows, 2 * seed), *draw(test_rows, 2 * seed + 1)


def homoscedastic(x: Any, y: Any = None, *, units: int = 10, prior: Any = UNIT, bias: Any = UNIT) -> None:
    """y ~ N(f(x, w), noise^2), log noise ~ N(-1, 1): one noise for all rows. One hidden layer of tanh units."""
    noise = bnn.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = bnn.mlp(x, [units, 1], activation="tanh", prior=prior, bias=bias)
    bnn.observe(y, f, likelihoods.Gaussian(noise))


def heteroscedastic(x: Any, y: Any = None, *, units: int = 10, prior: Any = UNIT) -> None:
    """y ~ N(f_1(x, w), softplus(f_2(x, w))^2): the noise is an output of the network."""
    f = bnn.mlp(x, [units, 2], activation="tanh", prior=prior, bias=UNIT)
    bnn.observe(y, f, likelihoods.HeteroscedasticGaussian())


MODELS = {"homoscedastic": homoscedastic, "heteroscedastic": heteroscedastic}


def images(x: Any, y: Any = None) -> None:
    """A convolution, whose weights are used at several places of one row."""
    h = bnn.conv2d("conv", x, 2, 3, prior=UNIT)
    bnn.observe(y, bnn.dense("output", h.reshape((h.shape[0], -1)), 1, UNIT), likelihoods.Gaussian(0.5))


# --- what is measured -----------------------------------------------------------------------------


def grid(part: tuple[float, float], count: int = 60) -> np.ndarray:
    """Inputs (count, 1) over an interval."""
    return np.linspace(*part, count)[:, None]


def svi(study: Study, **options: Any) -> Any:
    """Mean-field VI with the KL in closed form, from the mode unless told otherwise."""
    given: dict[str, Any] = {
        "steps": study.sizes.steps,
        "learning_rate": 0.02,
        "divergence": "analytic",
        "start": bnn.MAP(steps=study.sizes.mode_steps, polish=False),
        "init_scale": 0.05,
    }
    return bnn.SVI(**given | options)


def nuts(study: Study) -> Any:
    sizes = study.sizes
    return bnn.NUTS(
        draws=sizes.draws,
        warmup=sizes.draws,
        chains=sizes.chains,
        max_tree_depth=sizes.tree_depth,
        target_accept=0.9,
    )


def plain(study: Study, model: Callable[..., Any], x: np.ndarray, y: np.ndarray, seed: int) -> Any:
    """A network without a prior worth the name: the likelihood alone, from a start of its own."""
    units, outputs = study.sizes.units, 1 if model is homoscedastic else 2
    rng = np.random.default_rng(seed)
    shapes = {
        "hidden0.weight": (1, units),
        "hidden0.bias": (units,),
        "output.weight": (units, outputs),
        "output.bias": (outputs,),
    }
    # Weights of the usual size at the start: draws of the flat prior would saturate every unit.
    start: dict[str, Any] = {
        name: rng.normal(size=shape) / math.sqrt(shape[0] if len(shape) == 2 else 1.0)
        for name, shape in shapes.items()
    }
    if model is homoscedastic:
        start["noise"] = 0.3
    method = bnn.MAP(steps=study.sizes.mode_steps, polish=False, start=start)
    return bnn.fit(
        partial(model, units=study.sizes.units, prior=FLAT), x, y, method, seed=seed, standardise=True
    )


@dataclass
class Reference:
    """A posterior that others are held to, and what it predicts at inputs that come again and again."""

    posterior: Any
    known: dict[bytes, tuple[Any, dict[str, float]]] = field(default_factory=dict)

    def at(self, x: np.ndarray) -> tuple[Any, dict[str, float]]:
        """The prediction at x, and the gap between two halves of its chains."""
        key = x.tobytes()
        if key not in self.known:
            prediction = self.posterior.predict(x)
            chains, draws = self.posterior.shape
            self.known[key] = prediction, scores.noise_floor(prediction, np.repeat(np.arange(chains), draws))
        return self.known[key]


def referenced(study: Study, case: str, seed: int, posterior: Any) -> Reference | None:
    """The posterior as a reference where `bnn.diagnose` finds it converged; else None. Always a row of the table.

    The row has the worst R-hat and bulk ESS of the outputs and of the noise at the inputs where claims are made.
    """
    found = bnn.diagnose(posterior)
    row: dict[str, Any] = {"seed": seed, "case": case, "verdict": found.verdict, "reason": found.reasons[0]}
    for part, interval in PARTS.items():
        mixed = convergence(posterior, grid(interval))
        row |= {f"rhat_{part}": mixed.rhat, f"ess_{part}": mixed.ess_bulk}
    study.tables.setdefault("references", []).append(row | costs(posterior))
    study.say(f"NUTS, {case}: {found.verdict}; {found.reasons[0]}")
    return Reference(posterior) if found.verdict == "converged" else None


def gap(prediction: Any, reference: Reference | None, x: np.ndarray, prefix: str = "") -> dict[str, Any]:
    """mean_gap, sd_ratio and the 1-Wasserstein distance to a reference at every third of x, beside its noise floor."""
    names = ("mean_gap", "sd_ratio", "wasserstein")
    if reference is None:
        return {f"{prefix}{name}": NO_REFERENCE for name in names}
    truth, floor = reference.at(x[::3])
    found = scores.fidelity(prediction.take(slice(None, None, 3)), truth)
    return {f"{prefix}{name}": found[name] for name in names} | {
        f"{prefix}{name}_floor": floor[name] for name in names
    }


def spread(posterior_or_prediction: Any, x: np.ndarray) -> tuple[float, float]:
    """Root mean square epistemic and aleatoric standard deviation over inputs x."""
    found = posterior_or_prediction
    prediction = found if isinstance(found, bnn.Prediction) else found.predict(x)
    return float(np.sqrt(prediction.epistemic.mean())), float(np.sqrt(prediction.aleatoric.mean()))


def pooled(predictions: Sequence[Any]) -> Any:
    """One prediction of several: the mixture of all their components, equally weighted."""
    first = predictions[0]
    parts = {
        name: np.concatenate([each.parameters[name] for each in predictions]) for name in first.parameters
    }
    return bnn.Prediction(first.family, parts)


def costs(posterior: Any) -> dict[str, Any]:
    return {"gradients": posterior.info.gradient_evaluations, "seconds": posterior.info.run_seconds}


@contextmanager
def opened(model: Callable[..., Any], x: np.ndarray, y: np.ndarray) -> Iterator[Problem]:
    """The model on data in the units of the network, opened in NumPyro."""
    chosen = system("numpyro")
    with chosen.session("float64", "cpu", 1):
        data, targets = chosen.asarray(x), chosen.asarray(y)
        program = Program.of(chosen, model, data, targets, language=True)
        yield Problem(program, data, targets, x, y, 0, "cpu", "float64")


def standardised(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def objective_of(problem: Problem, guide: Guide, **options: Any) -> Objective:
    """Minus the ELBO of a guide, as SVI descends on it."""
    given: dict[str, Any] = {
        "estimator": "plain",
        "analytic": True,
        "sticking_the_landing": False,
        "objective": "elbo",
        "alpha": None,
        "particles": 1,
        "approximate": False,
        "population": None,
    }
    return Objective(problem, guide, **given | options)


def guide_at(
    problem: Problem, loc: Mapping[str, np.ndarray], scale: Any
) -> tuple[Guide, dict[str, np.ndarray]]:
    """Independent normals with these locations and standard deviations."""
    guide = Guide.of("diagonal", problem.program.sites.values())
    return guide, guide.start(dict(loc), scale, np.random.default_rng(0))


def compiled_gradient(problem: Problem, objective: Objective) -> Callable[..., Any]:
    """(parameters, seeds (S,), x (S, B, K), y (S, B)) -> gradients of the loss, a leading axis for the seeds."""
    chosen = problem.system

    def at(parameters: Any, seed: Any, x: Any, y: Any) -> Any:
        return chosen.value_and_grad(lambda inner: objective(inner, seed, 1.0, x, y)[0])(parameters)[1]

    return chosen.compile(chosen.vmap(at, in_axes=(None, 0, 0, 0)))


def gradients(
    problem: Problem,
    run: Callable[..., Any],
    parameters: Mapping[str, np.ndarray],
    rows: np.ndarray,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Gradients of the loss in means ("loc") and in rho ("scale") of the guide, (S, P) each.

    run: of `compiled_gradient`. rows: (S, B), the batch of each of S evaluations, which differ in their draws.
    """
    chosen = problem.system
    given = {name: chosen.asarray(value) for name, value in parameters.items()}
    parts: dict[str, list[np.ndarray]] = {}
    seeds = chosen.seeds(seed, len(rows))
    # A part at a time: all of them at once would hold activations for every draw and row.
    size = max(1, min(len(rows), CHUNK // rows.shape[1]))
    for start in range(0, len(rows), size):
        # The last part is filled up from the beginning, or it would be compiled a second time.
        part = np.arange(start, start + size) % len(rows)
        each = run(given, seeds[part], problem.x[rows[part]], problem.y[rows[part]])
        for name, value in each.items():
            parts.setdefault(name, []).append(chosen.to_numpy(value).reshape(size, -1)[: len(rows) - start])
    found: dict[str, list[np.ndarray]] = {}
    for name, values in parts.items():
        kind = "loc" if name.endswith("loc") else "scale"
        found.setdefault(kind, []).append(np.concatenate(values))
    return {name: np.concatenate(parts, axis=1) for name, parts in found.items()}


def total_variance(values: np.ndarray) -> float:
    """The trace of the covariance of the rows of (S, P)."""
    return float(values.var(axis=0, ddof=1).sum())


def largest_z(first: np.ndarray, second: np.ndarray) -> float:
    """The largest |z| over the columns for a difference of two means of independent draws (S, P)."""
    error = first.var(0, ddof=1) / len(first) + second.var(0, ddof=1) / len(second)
    varies = error > 0.0
    return float(np.abs((first.mean(0) - second.mean(0))[varies] / np.sqrt(error[varies])).max())


# --- noise of two kinds, uncertainty of two kinds -------------------------------------------------


def noise(study: Study, seed: int) -> dict[tuple[str, str], Any]:
    """Both noise models on both kinds of data by VI, and by NUTS on the curve; the two kinds of uncertainty, apart."""
    sizes = study.sizes
    inside, outside = grid(INSIDE), grid(OUTSIDE)
    found: dict[tuple[str, str], Any] = {}
    rows = []
    for name, (draw, moments) in DATA.items():
        x, y, xt, yt = training_and_test(draw, sizes.rows, sizes.test_rows, seed)
        truth = moments(inside[:, 0])[1]
        for kind, model in MODELS.items():
            fitted = partial(model, units=sizes.units)
            methods = {"VI": svi(study)}
            if name == "curve":
                methods |= {"NUTS": nuts(study), "VI, full rank": svi(study, guide="fullrank")}
            posteriors = {
                method: bnn.fit(fitted, x, y, each, seed=seed, standardise=True)
                for method, each in methods.items()
            }
            reference = None
            if "NUTS" in posteriors:
                reference = referenced(study, f"{name}, {kind}", seed, posteriors["NUTS"])
            for method, posterior in posteriors.items():
                sd = np.sqrt(posterior.predict(inside).aleatoric)
                epistemic, aleatoric = spread(posterior, inside)
                away, aleatoric_away = spread(posterior, outside)
                rows.append(
                    {
                        "seed": seed,
                        "data": name,
                        "model": kind,
                        "method": method,
                        "log_score": scores.log_score(posterior.predict(xt), yt),
                        "aleatoric_sd": aleatoric,
                        "true_noise_sd": float(np.sqrt(np.mean(truth**2))),
                        "smallest_noise_sd": float(sd.min()),
                        "largest_noise_sd": float(sd.max()),
                        "noise_sd_error": float(np.sqrt(np.mean((sd - truth) ** 2))),
                        "noise_sd_correlation": float(np.corrcoef(sd, truth)[0, 1])
                        if np.ptp(truth) > 0.0 and np.ptp(sd) > 1e-9
                        else "",
                        "epistemic_sd_inside": epistemic,
                        "epistemic_sd_away": away,
                        "aleatoric_sd_away": aleatoric_away,
                    }
                    | gap(posterior.predict(inside), reference, inside, "inside_")
                    | gap(posterior.predict(outside), reference, outside, "away_")
                    | costs(posterior)
                )
                study.say(
                    f"data set {seed}, {name}, {kind}, {method}: noise sd {aleatoric:.3f}, epistemic {epistemic:.3f}, "
                    f"away {away:.3f}"
                )
            found[name, kind] = posteriors | {"reference": reference}
    study.tables.setdefault("noise", []).extend(rows)
    return found


# --- a plain network beside a Bayesian one --------------------------------------------------------


def beside(study: Study, found: Mapping[tuple[str, str], Any], seed: int) -> dict[str, Any]:
    """Plain networks, an ensemble of them, VI and NUTS: what spread they have away from the data."""
    sizes = study.sizes
    x, y, xt, yt = training_and_test(curve, sizes.rows, sizes.test_rows, seed)
    inside, outside = grid(INSIDE), grid(OUTSIDE)
    shown: dict[tuple[str, str], Any] = {}
    rows = []
    for kind, model in MODELS.items():
        reference = found["curve", kind]["reference"]
        starts = range(seed * sizes.networks, (seed + 1) * sizes.networks)
        members = [plain(study, model, x, y, start) for start in starts]
        cases: dict[str, Callable[[np.ndarray], Any]] = {
            "plain network": members[0].predict,
            ensemble_of(len(members)): lambda at, members=members: pooled(
                [each.predict(at) for each in members]
            ),
        }
        fitted = found["curve", kind]
        cases |= {name: fitted[name].predict for name in ("VI", "VI, full rank", "NUTS")}
        for name, predict in cases.items():
            epistemic, aleatoric = spread(predict(inside), inside)
            away, aleatoric_away = spread(predict(outside), outside)
            low, high = predict(outside).interval(0.5)
            low_inside, high_inside = predict(inside).interval(0.5)
            rows.append(
                {
                    "seed": seed,
                    "model": kind,
                    "method": name,
                    "log_score": scores.log_score(predict(xt), yt),
                    "epistemic_sd_inside": epistemic,
                    "epistemic_sd_away": away,
                    "aleatoric_sd_inside": aleatoric,
                    "aleatoric_sd_away": aleatoric_away,
                    "iqr_inside": float(np.mean(high_inside - low_inside)),
                    "iqr_away": float(np.mean(high - low)),
                }
                | gap(predict(inside), reference, inside, "inside_")
                | gap(predict(outside), reference, outside, "away_")
            )
            shown[kind, name] = predict
    study.tables.setdefault("beside", []).extend(rows)
    return {"cases": shown, "x": x, "y": y, "fits": {kind: found["curve", kind] for kind in MODELS}}


def ensemble_of(networks: int) -> str:
    """Name of an ensemble in tables."""
    return f"ensemble of {networks} plain networks"


def compiled_costs(problem: Problem, objective: Objective) -> Callable[..., Any]:
    """(parameters, seeds (S,)) -> likelihood and complexity cost at each of S draws."""

    def at(parameters: Any, seed: Any) -> Any:
        return objective(parameters, seed, 1.0, problem.x, problem.y)[1]

    return problem.system.compile(problem.system.vmap(at, in_axes=(None, 0)))


# --- the ELBO, two ways ---------------------------------------------------------------------------


def bounds(study: Study) -> None:
    """The complexity cost by draws and in closed form, at three places, for priors and guides of several kinds."""
    sizes = study.sizes
    x, y = standardised(*curve(sizes.rows, 0))
    rows = []
    cases = [(prior, "diagonal") for prior in sizes.priors] + [
        ("Gaussian, sd 2", "lowrank"),
        ("Gaussian, sd 2", "fullrank"),
    ]
    for prior, family in cases:
        with opened(partial(homoscedastic, units=sizes.units, prior=PRIORS[prior]), x, y) as problem:
            chosen = problem.system
            guide = Guide.of(family, problem.program.sites.values())
            seeds = chosen.seeds(1, sizes.elbo_draws)
            objectives = {
                analytic: objective_of(problem, guide, analytic=analytic) for analytic in (False, True)
            }
            losses = {analytic: compiled_costs(problem, each) for analytic, each in objectives.items()}
            crosses = objectives[True].divergence.crosses
            by_draw = [name for name in guide.names if name not in crosses]
            for place, width in (("narrow", 0.05), ("wide", 0.5)):
                rng = np.random.default_rng(3)
                loc = {site.name: 0.5 * rng.normal(size=site.unconstrained_shape) for site in guide.sites}
                parameters = {
                    name: chosen.asarray(value) for name, value in guide.start(loc, width, rng).items()
                }
                values = {
                    analytic: [chosen.to_numpy(each) for each in run(parameters, seeds)]
                    for analytic, run in losses.items()
                }
                drawn, exact = values[False][1], values[True][1]
                error = math.hypot(drawn.std(ddof=1), exact.std(ddof=1)) / math.sqrt(len(drawn))
                rows.append(
                    {
                        "prior": prior,
                        "guide": family,
                        "place": place,
                        "kl_monte_carlo": float(drawn.mean()),
                        "kl_closed_form": float(exact.mean()),
                        "standard_error": error,
                        "z": float((drawn.mean() - exact.mean()) / error) if error > 0.0 else 0.0,
                        "sd_of_one_draw": float(drawn.std(ddof=1)),
                        "sd_of_one_draw_closed_form": float(exact.std(ddof=1)),
                        "elbo_monte_carlo": float(-(values[False][0] + drawn).mean()),
                        "elbo_closed_form": float(-(values[True][0] + exact).mean()),
                        "sites_without_closed_form": ", ".join(by_draw),
                    }
                )
    study.tables["elbo"] = rows


# --- batches, and what a batch may count ----------------------------------------------------------


def batches(study: Study, seed: int) -> dict[str, Any]:
    """Batches down to one row; the KL per row, and no KL at all, which is what two slips come to."""
    sizes = study.sizes
    x, y, *_ = training_and_test(curve, sizes.rows, sizes.test_rows, seed)
    model = partial(homoscedastic, units=sizes.units)
    inside, outside = grid(INSIDE), grid(OUTSIDE)
    rows, shown = [], {}
    fits: dict[str, Any] = {
        f"batches of {batch}": svi(
            study,
            batch_size=batch,
            estimator="local",
            learning_rate=0.02 if batch > 4 else 0.005,
            steps=sizes.steps if batch > 4 else 3 * sizes.steps,
        )
        for batch in sizes.batches
    }
    fits |= {
        "KL counted once per row": svi(study, kl_weight=float(sizes.rows)),
        "no gradient of log q and log p": svi(study, kl_weight=1e-9),
    }
    for name, method in fits.items():
        posterior = bnn.fit(model, x, y, method, seed=seed, standardise=True)
        epistemic, aleatoric = spread(posterior, inside)
        rows.append(
            {
                "seed": seed,
                "fit": name,
                "elbo": posterior.info.figures["elbo"],
                "elbo_se": posterior.info.figures["elbo_se"],
                "likelihood_cost": posterior.info.figures["likelihood_cost"],
                "complexity_cost": posterior.info.figures["complexity_cost"],
                "error_of_mean": float(
                    np.sqrt(np.mean((posterior.predict(inside).mean - curve_moments(inside[:, 0])[0]) ** 2))
                ),
                "aleatoric_sd": aleatoric,
                "epistemic_sd_inside": epistemic,
                "epistemic_sd_away": spread(posterior, outside)[0],
            }
            | costs(posterior)
        )
        shown[name] = posterior.predict
        study.say(
            f"data set {seed}, {name}: ELBO {rows[-1]['elbo']:.2f}, error of the mean {rows[-1]['error_of_mean']:.3f}"
        )
    study.tables.setdefault("batches", []).extend(rows)
    return {"cases": shown, "x": x, "y": y}


def batch_gradients(study: Study) -> None:
    """Whether the mean gradient over batches of one row is that of all rows; all at one place of the parameters."""
    sizes = study.sizes
    x, y = standardised(*curve(sizes.rows, 0))
    rng = np.random.default_rng(5)
    found = []
    with opened(partial(homoscedastic, units=sizes.units), x, y) as problem:
        loc = {site.name: 0.5 * rng.normal(size=site.unconstrained_shape) for site in problem.program.latents}
        guide, parameters = guide_at(problem, loc, 0.2)
        # The same draws of the weights for both, so that only the rows differ.
        whole = compiled_gradient(problem, objective_of(problem, guide))
        part = compiled_gradient(problem, objective_of(problem, guide, population=sizes.rows))
        for batch in sorted({min(sizes.batches), min(16, sizes.rows)}):
            count = 10 * sizes.gradient_draws if batch == 1 else 2 * sizes.gradient_draws
            every = np.tile(np.arange(sizes.rows), (count, 1))
            picked = np.argsort(rng.random((count, sizes.rows)), axis=1)[:, :batch]
            full = gradients(problem, whole, parameters, every, seed=1)
            some = gradients(problem, part, parameters, picked, seed=1)
            for kind in full:
                # Paired: the difference of each draw.
                difference = some[kind] - full[kind]
                error = difference.std(0, ddof=1) / math.sqrt(count)
                varies = error > 0.0
                z = difference.mean(0)[varies] / error[varies]
                found.append(
                    {
                        "batch": batch,
                        "of": kind,
                        "largest_z": float(np.abs(z).max()),
                        "mean_square_z": float(np.mean(z**2)),
                        "coordinates": int(varies.sum()),
                        "variance_over_full": total_variance(some[kind]) / total_variance(full[kind]),
                    }
                )
    study.tables["batch_gradients"] = found


# --- priors ---------------------------------------------------------------------------------------


def compare_priors(study: Study, seed: int) -> dict[str, Any]:
    """The same rows and network under the four priors: what they predict among the data and away from them."""
    sizes = study.sizes
    x, y, *_ = training_and_test(curve, sizes.rows, sizes.test_rows, seed)
    inside, outside = grid(INSIDE), grid(OUTSIDE)
    rows, shown = [], {}
    for name in sizes.priors:
        prior = PRIORS[name]
        model = partial(homoscedastic, units=sizes.units, prior=prior)
        # At a joint mode the scales of a horseshoe are zero: its fit starts from the prior.
        start = {} if name != "horseshoe" else {"start": None}
        found = {
            "VI": bnn.fit(model, x, y, svi(study, **start), seed=seed, standardise=True),
            "NUTS": bnn.fit(model, x, y, nuts(study), seed=seed, standardise=True),
        }
        reference = referenced(study, f"prior: {name}", seed, found["NUTS"])
        for method, posterior in found.items():
            low, high = posterior.predict(outside).interval(0.5)
            f = posterior.predictor(outside)[..., 0].reshape(-1, len(outside))
            centred = f - f.mean(0)
            rows.append(
                {
                    "seed": seed,
                    "prior": name,
                    "method": method,
                    "epistemic_sd_inside": spread(posterior, inside)[0],
                    "epistemic_sd_away": spread(posterior, outside)[0],
                    "mean_at_end": float(posterior.predict(outside[-1:]).mean[0]),
                    "iqr_away": float(np.mean(high - low)),
                    "kurtosis_away": float(np.mean((centred**4).mean(0) / (centred**2).mean(0) ** 2)),
                    "converged": "" if method == "VI" else reference is not None,
                }
                | gap(posterior.predict(inside), reference, inside, "inside_")
                | gap(posterior.predict(outside), reference, outside, "away_")
                | costs(posterior)
            )
            shown[name, method] = posterior.predict
            study.say(
                f"data set {seed}, {name}, {method}: epistemic sd {rows[-1]['epistemic_sd_inside']:.3f} inside, "
                f"{rows[-1]['epistemic_sd_away']:.3f} away"
            )
    study.tables.setdefault("priors", []).extend(rows)
    return {"cases": shown, "x": x, "y": y}


def mixture_density(study: Study) -> dict[str, float]:
    """log p(w) of the scale mixture at draws: the library's, by hand, and as printed, without the brackets."""
    x, y = standardised(*curve(study.sizes.rows, 0))
    rng = np.random.default_rng(0)
    prior = PRIORS["scale mixture"]
    with opened(partial(homoscedastic, units=study.sizes.units, prior=prior, bias=False), x, y) as problem:
        program = problem.program
        u = {site.name: rng.normal(size=(5, *site.unconstrained_shape)) for site in program.latents}
        library = problem.log_prior_draws(u) - stats.norm.logpdf(u["noise"], -1.0, 1.0)
        others = [
            site.name for site in program.latents if site.name != "noise" and not site.name.endswith("weight")
        ]
    w = np.concatenate([value.reshape(5, -1) for name, value in u.items() if name != "noise"], axis=1)
    parts = [
        math.log(weight) + stats.norm.logpdf(w, 0.0, scale)
        for weight, scale in zip(prior.weights, prior.scales, strict=True)
    ]
    brackets = np.logaddexp(*parts).sum(1)
    printed = np.logaddexp(parts[0].sum(1), parts[1].sum(1))
    return {
        "off_with_brackets": float(np.abs(library - brackets).max()),
        "off_without": float(np.abs(library - printed).max()),
        "sites_for_the_weight": float(len(others)),
    }


# --- estimators of the gradient -------------------------------------------------------------------


ESTIMATORS = ("plain", "local", "flipout")


def estimators(study: Study, fitted: Any, seed: int) -> None:
    """Variance of the gradient over draws at fixed parameters and rows, and the time of one, for each estimator.

    fitted: a mean-field posterior of `homoscedastic` on Friedman's rows; its parameters, and those of a start.
    """
    sizes = study.sizes
    x, y = standardised(*friedman(sizes.friedman_rows, 2 * seed))
    model = partial(homoscedastic, units=sizes.friedman_units)
    rows: list[dict[str, Any]] = []
    q = fitted.approximation
    with opened(model, x, y) as problem:
        rng = np.random.default_rng(seed)
        begun = {
            site.name: rng.normal(size=site.unconstrained_shape)
            / math.sqrt(site.shape[0] if len(site.shape) == 2 else 1.0)
            for site in problem.program.latents
        }
        places = {"start": guide_at(problem, begun, 0.05), "fitted": guide_at(problem, q.loc, q.scale)}
        weights = problem.program.parameter_count
        for batch in [each for each in sizes.gradient_batches if each <= sizes.friedman_rows]:
            few = np.tile(rng.permutation(sizes.friedman_rows)[:batch], (sizes.gradient_draws, 1))
            values: dict[tuple[str, str], dict[str, np.ndarray]] = {}
            for index, estimator in enumerate(ESTIMATORS):
                # The guides of both places differ in nothing but their parameters.
                objective = objective_of(
                    problem, places["fitted"][0], estimator=estimator, population=sizes.friedman_rows
                )
                run = compiled_gradient(problem, objective)
                for place, (_, parameters) in places.items():
                    found = gradients(problem, run, parameters, few, seed=len(ESTIMATORS) * seed + index)
                    values[place, estimator] = found
                    row: dict[str, Any] = {
                        "seed": seed,
                        "place": place,
                        "batch": batch,
                        "estimator": estimator,
                    }
                    for kind, each in found.items():
                        plain_one = values[place, "plain"][kind]
                        row[f"variance_{kind}"] = total_variance(each)
                        row[f"factor_{kind}"] = total_variance(plain_one) / total_variance(each)
                        row[f"largest_z_{kind}"] = "" if index == 0 else largest_z(each, plain_one)
                    pre_activations = batch * (sizes.friedman_units + 1)
                    row["random_numbers_needed"] = (weights, pre_activations + 1, "")[index]
                    row["random_numbers_one_draw_per_row"] = batch * weights
                    row["parameters"] = sum(np.size(value) for value in parameters.values())
                    row["milliseconds"] = (
                        timed(problem, objective, parameters, few[0], sizes.timed)
                        if place == "fitted"
                        else ""
                    )
                    rows.append(row)
            study.say(f"data set {seed}, gradients of batches of {batch}: done")
    study.tables.setdefault("estimators", []).extend(rows)


def timed(
    problem: Problem,
    objective: Objective,
    parameters: Mapping[str, np.ndarray],
    rows: np.ndarray,
    repeats: int,
) -> float:
    """Milliseconds of one gradient: the least of several means over ten calls, which others disturb least."""
    chosen = problem.system
    given = {name: chosen.asarray(value) for name, value in parameters.items()}
    run = chosen.compile(
        lambda parameters, seed, x, y: chosen.value_and_grad(
            lambda inner: objective(inner, seed, 1.0, x, y)[0]
        )(parameters)
    )
    seed, x, y = chosen.seeds(0, 1)[0], problem.x[rows], problem.y[rows]
    float(run(given, seed, x, y)[0])
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(10):
            value = run(given, seed, x, y)[0]
        float(value)
        found.append((time.perf_counter() - begun) / 10.0)
    return 1e3 * min(found)


def _estimates(rows: Sequence[Mapping[str, Any]], estimator: str, **where: Any) -> list[Mapping[str, Any]]:
    return [
        row
        for row in rows
        if row["estimator"] == estimator and all(row[name] == value for name, value in where.items())
    ]


def one_map(x: Any, y: Any = None) -> None:
    """One pre-activation, and nothing else."""
    f = bnn.dense("map", x, 1, prior=UNIT, bias=False)
    bnn.observe(y, f, likelihoods.Gaussian(1.0))


def roots(study: Study) -> list[dict[str, Any]]:
    """The sd of a pre-activation of I inputs: by drawn weights, the library, the formula, and the root inside."""
    rows, count = [], 20 * study.sizes.gradient_draws
    for inputs in (1, 4, 16, 64, 256):
        rng = np.random.default_rng(inputs)
        mu, sigma, a = rng.normal(size=inputs), 0.1 + rng.random(inputs), rng.normal(size=inputs)
        by_weights = np.concatenate(
            [(mu + sigma * rng.normal(size=(100, inputs))) @ a for _ in range(max(1, count // 100))]
        )
        names, shape = "map.weight", (inputs, 1)
        w = {names: mu.reshape(shape)}
        handler = LocalReparameterisation(
            w, {names: sigma.reshape(shape)}, lambda size, like, rng=rng: rng.normal(size=size)
        )
        with NetworkFunction(w) as network, handler:
            one_map(np.tile(a, (len(by_weights), 1)))
        assert isinstance(network, NetworkFunction)
        drawn = np.asarray(network.f)[:, 0]
        rows.append(
            {
                "inputs": inputs,
                "sd_by_weights": float(by_weights.std(ddof=1)),
                "sd_by_library": float(drawn.std(ddof=1)),
                "sd_root_outside": float(np.sqrt(np.sum(sigma**2 * a**2))),
                "sd_root_inside": float(np.sum(np.abs(sigma * a))),
                "relative_error": 1.0 / math.sqrt(2.0 * len(by_weights)),
            }
        )
    study.tables["roots"] = rows
    return rows


# --- variational dropout --------------------------------------------------------------------------


THRESHOLD = 3.0


def log_alpha(approximation: MeanField) -> dict[str, np.ndarray]:
    """log of sigma^2 / mu^2, the noise-to-signal ratio of each weight."""
    return {
        name: 2.0 * (np.log(approximation.scale[name]) - np.log(np.abs(approximation.loc[name])))
        for name in approximation.scale
        if name.endswith("weight")
    }


def pruned(approximation: MeanField, threshold: float = THRESHOLD) -> MeanField:
    """The same with every weight above the threshold at zero, for good."""
    ratio = log_alpha(approximation)
    kept = {name: value <= threshold for name, value in ratio.items()}
    return MeanField(
        {name: value * kept.get(name, 1.0) for name, value in approximation.loc.items()},
        {name: value * kept.get(name, 1.0) for name, value in approximation.scale.items()},
    )


def dropout(study: Study, seed: int) -> dict[str, Any]:
    """Variational dropout on 20 inputs of which 5 matter: what is pruned, and what pruning costs."""
    sizes = study.sizes
    x, y, xt, yt = training_and_test(friedman, sizes.friedman_rows, sizes.test_rows, seed)
    rows, found = [], {}
    for name, prior in {"log-uniform": priors.LogUniform(), "Gaussian, sd 1": UNIT}.items():
        # From the prior: a mode of 20 units fits noise with all of its weights, and q would have to leave it.
        method = svi(study, steps=sizes.friedman_steps, learning_rate=0.01, estimator="local", start=None)
        posterior = bnn.fit(
            partial(homoscedastic, units=sizes.friedman_units, prior=prior),
            x,
            y,
            method,
            seed=seed,
            standardise=True,
        )
        q = posterior.approximation
        ratio = log_alpha(q)
        gone = {site: value > THRESHOLD for site, value in ratio.items()}
        live = ~gone["output.weight"][:, 0]
        first = gone["hidden0.weight"][:, live]
        thin = replace(posterior, approximation=pruned(q))
        rows.append(
            {
                "seed": seed,
                "prior": name,
                "weights": sum(value.size for value in gone.values()),
                "pruned": sum(int(value.sum()) for value in gone.values()),
                "live_units": int(live.sum()),
                "pruned_share_irrelevant_inputs": float(first[FRIEDMAN_RELEVANT:].mean())
                if live.any()
                else 1.0,
                "pruned_share_relevant_inputs": float(first[:FRIEDMAN_RELEVANT].mean())
                if live.any()
                else 1.0,
                "rmse": scores.rmse(posterior.predict(xt), yt),
                "rmse_pruned": scores.rmse(thin.predict(xt), yt),
                "log_score": scores.log_score(posterior.predict(xt), yt),
                "log_score_pruned": scores.log_score(thin.predict(xt), yt),
            }
            | costs(posterior)
        )
        found[name] = (posterior, ratio)
        study.say(
            f"data set {seed}, {name}: {rows[-1]['pruned']} of {rows[-1]['weights']} pruned, "
            f"RMSE {rows[-1]['rmse']:.3f}"
        )
    study.tables.setdefault("dropout", []).extend(rows)
    return found


def shared() -> dict[str, str]:
    """What each estimator says to a convolution under a normal prior."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 4, 4, 1))
    y = x[:, 1, 1, 0] + 0.5 * rng.normal(size=20)
    found = {}
    for estimator in ESTIMATORS:
        try:
            posterior = bnn.fit(images, x, y, bnn.SVI(guide="diagonal", steps=50, estimator=estimator))
            found[estimator] = f"ELBO {posterior.info.figures['elbo']:.1f} after 50 steps"
        except UnsupportedError as refused:
            found[estimator] = f"refused ({refused})"
    return found


# --- more rows ------------------------------------------------------------------------------------


def more_rows(study: Study) -> None:
    """Costs and the two uncertainties as rows are added: VI in batches, NUTS where it is affordable."""
    sizes = study.sizes
    inside = grid(INSIDE)
    model = partial(homoscedastic, units=sizes.units)
    rows = []
    for count in sizes.row_counts:
        for seed in range(sizes.seeds):
            x, y = level(count, seed)
            # The start is from as many rows as a batch has, so that its cost does not grow with the rows either.
            few = slice(0, min(sizes.batch, count))
            mode = bnn.fit(
                model, x[few], y[few], bnn.MAP(steps=sizes.mode_steps, polish=False), standardise=True
            )
            start = {name: value[0, 0] for name, value in mode.draws.items()}
            method = svi(
                study,
                start=start,
                estimator="local",
                batch_size=None if count <= sizes.batch else sizes.batch,
            )
            fits = {"VI": bnn.fit(model, x, y, method, seed=seed, standardise=True)}
            reference = None
            if count <= sizes.sampled_rows:
                fits["NUTS"] = bnn.fit(model, x, y, nuts(study), seed=seed, standardise=True)
                reference = referenced(study, f"{count} rows", seed, fits["NUTS"])
            for name, posterior in fits.items():
                epistemic, aleatoric = spread(posterior, inside)
                evaluations = posterior.info.gradient_evaluations
                work = evaluations * count
                if name == "VI":
                    work += mode.info.gradient_evaluations * min(sizes.batch, count)
                rows.append(
                    {
                        "rows": count,
                        "seed": seed,
                        "method": name,
                        "epistemic_sd": epistemic,
                        "aleatoric_sd": aleatoric,
                        "true_noise_sd": LEVEL_NOISE,
                        "error_of_mean": float(
                            np.sqrt(np.mean((posterior.predict(inside).mean - curve_at(inside[:, 0])) ** 2))
                        ),
                        "row_gradients": work,
                        "seconds": posterior.info.run_seconds,
                        "converged": reference is not None if name == "NUTS" else "",
                    }
                    | gap(posterior.predict(inside), reference, inside)
                )
                study.say(
                    f"{count} rows, {name}: epistemic {epistemic:.4f}, aleatoric {aleatoric:.4f}, "
                    f"{work:.2g} row gradients"
                )
    study.tables["rows"] = rows


def slope(counts: Sequence[float], values: Sequence[float]) -> float:
    """Of log value on log count."""
    return float(np.polyfit(np.log(counts), np.log(values), 1)[0])


# --- an average over networks ---------------------------------------------------------------------


CENTRE = "VI, network at the mean"


def averages(study: Study, found: Mapping[tuple[str, str], Any], seed: int) -> None:
    """Test log score of predictions from 1, 2, ... networks, and of the one at the mean of the weights."""
    sizes = study.sizes
    *_, xt, yt = training_and_test(curve, sizes.rows, sizes.test_rows, seed)
    rows = []
    for name in ("VI", "VI, full rank", "NUTS"):
        posterior = found["curve", "homoscedastic"][name]
        prediction = posterior.predict(xt)
        density = prediction.component_log_prob(yt)
        rng = np.random.default_rng(seed)
        for count in sizes.averaged:
            if count > len(density):
                continue
            values = []
            for _ in range(20):
                picked = density[rng.choice(len(density), count, replace=False)]
                values.append(float(np.mean(np.logaddexp.reduce(picked, axis=0) - math.log(count))))
            rows.append(
                {
                    "seed": seed,
                    "method": name,
                    "networks": count,
                    "log_score": float(np.mean(values)),
                    "sd": float(np.std(values)),
                }
            )
        if name == "VI":
            q = posterior.approximation
            centre = replace(
                posterior,
                approximation=MeanField(q.loc, {key: 0.0 * value for key, value in q.scale.items()}),
            )
            rows.append(
                {
                    "seed": seed,
                    "method": CENTRE,
                    "networks": 1,
                    "log_score": scores.log_score(centre.predict(xt), yt),
                    "sd": 0.0,
                }
            )
    study.tables.setdefault("averages", []).extend(rows)


# --- what needs numbers only ----------------------------------------------------------------------


NORMALS = 100_000


def small_facts(study: Study) -> None:
    """How far standard deviations are from softplus(rho), and the share of standard normals outside of [0, 1]."""
    x, y = standardised(*curve(study.sizes.rows, 0))
    with opened(partial(homoscedastic, units=study.sizes.units), x, y) as problem:
        chosen = problem.system
        loc = {site.name: np.zeros(site.unconstrained_shape) for site in problem.program.latents}
        guide, parameters = guide_at(problem, loc, 0.3)
        rho = np.concatenate([value for name, value in parameters.items() if not name.endswith("loc")])
        deviations = np.concatenate(
            [np.sqrt(np.asarray(value)).reshape(-1) for value in guide.variance(parameters).values()]
        )
        like = chosen.asarray(np.zeros(1))
        normal = chosen.to_numpy(chosen.randomness(chosen.seeds(0, 1)[0]).normal((NORMALS,), like))
    study.numbers["softplus_off"] = float(np.abs(np.log1p(np.exp(rho)) - deviations).max())
    study.numbers["normals_outside"] = float(np.mean((normal < 0.0) | (normal > 1.0)))


# --- verdicts: what is computed exactly -----------------------------------------------------------


def share_outside(low: float, high: float) -> float:
    """Probability that a standard normal is outside of [low, high]."""
    return float(stats.norm.cdf(low) + stats.norm.sf(high))


def quadrature(nodes: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the mean over a standard normal."""
    at, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return at, weights / weights.sum()


def kl_two_ways(mean: float, sd: float, prior_sd: float) -> tuple[float, float]:
    """KL of N(mean, sd^2) from N(0, prior_sd^2): in closed form, and as the mean of log q - log p under q."""
    closed = math.log(prior_sd / sd) + (sd**2 + mean**2) / (2.0 * prior_sd**2) - 0.5
    at, weights = quadrature()
    w = mean + sd * at
    return closed, float(weights @ (stats.norm.logpdf(w, mean, sd) - stats.norm.logpdf(w, 0.0, prior_sd)))


def bounds_of_a_mean(y: np.ndarray) -> dict[str, float]:
    """Both bounds at the exact posterior of w, for y ~ N(w, 1) and w ~ N(0, 1), and the log evidence.

    "once" counts the KL once; "by row" is the mean over rows of log p(y_i | w) minus the KL, times the number of rows.
    """
    n = len(y)
    variance = 1.0 / (n + 1.0)
    centre = variance * float(y.sum())
    likelihood = float(np.sum(stats.norm.logpdf(y, centre, 1.0))) - 0.5 * n * variance
    kl = kl_two_ways(centre, math.sqrt(variance), 1.0)[0]
    evidence = float(stats.multivariate_normal.logpdf(y, np.zeros(n), np.eye(n) + 1.0))
    return {"once": likelihood - kl, "by row": likelihood - n * kl, "evidence": evidence}


def terms_beside_the_likelihood(w: float, mean: float, sd: float) -> float:
    """d/dw of log q(w) - log p(w) for q = N(mean, sd^2) and p = N(0, 1)."""
    return -(w - mean) / sd**2 + w


def mean_over_batches(values: Sequence[float], batch: int) -> float:
    """The mean over all batches of N / B times the sum of the batch."""
    sums = [sum(picked) for picked in combinations(values, batch)]
    return len(values) / batch * float(np.mean(sums))


def likelihood_two_ways(mu: np.ndarray, sigma: np.ndarray, a: np.ndarray, y: float) -> tuple[float, float]:
    """E log N(y; tanh(w . a), 1) over two weights w_i ~ N(mu_i, sigma_i^2), and over o = w . a, which is normal too."""
    at, weights = quadrature()
    by_weights = (mu[0] + sigma[0] * at[:, None]) * a[0] + (mu[1] + sigma[1] * at) * a[1]
    by_o = mu @ a + math.sqrt(float(sigma**2 @ a**2)) * at
    first, second = (stats.norm.logpdf(y, np.tanh(o), 1.0) for o in (by_weights, by_o))
    return float(weights @ first @ weights), float(weights @ second)


def shared_covariance(sigma: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Covariance of w . a and w . b for weights of these standard deviations."""
    return float(np.sum(sigma**2 * a * b))


def gain_of_averaging(log_densities: Sequence[float]) -> float:
    """Log of the mean of densities minus the mean of their logs."""
    values = np.asarray(log_densities, float)
    return float(np.logaddexp.reduce(values) - math.log(len(values)) - values.mean())


def mixture_mass(weights: int, probability: float) -> float:
    """Integral of prod_i pi N(w_i; 0, s1^2) + prod_i (1 - pi) N(w_i; 0, s2^2): one component for all weights."""
    return probability**weights + (1.0 - probability) ** weights


def covariance_of_squares(first: float, second: float, variance: float) -> float:
    """Covariance of the squares of two weights of a mixture of N(0, first^2) and N(0, second^2), each independent of
    the other given pi, where pi has this variance.
    """
    return variance * (first**2 - second**2) ** 2


# --- verdicts: units ------------------------------------------------------------------------------


def data_sets(rows: Rows, **where: Any) -> dict[int, Mapping[str, Any]]:
    """The row of each data set that has these values; a table without seeds is of one data set."""
    taken = [row for row in rows if all(row.get(name) == value for name, value in where.items())]
    return {row.get("seed", 0): row for row in taken}


def over_data_sets(quantity: Callable[..., float], *cases: Mapping[int, Any]) -> Estimate:
    """The mean over data sets of a quantity of what each of them has in every case."""
    seeds = sorted(set.intersection(*(set(case) for case in cases)))
    return claims.mean([quantity(*(case[seed] for case in cases)) for seed in seeds])


def average(case: Mapping[int, Mapping[str, Any]], column: str) -> float:
    """The mean of a column over data sets."""
    return float(np.mean([row[column] for row in case.values()]))


def chains(study: Study, cases: Sequence[str], parts: Sequence[str]) -> dict[str, Any]:
    """Whether NUTS has converged in these cases at the inputs of these parts, as `Referee.measured` takes it."""
    rows = [row for row in study.tables["references"] if row["case"] in cases]
    columns = [(f"rhat_{part}", f"ess_{part}") for part in parts]
    if not rows or not all(name in row for row in rows for each in columns for name in each):
        told = "; ".join(f"{row['case']}: {_brief(row['reason'])}" for row in rows)
        return {
            "converged": False,
            "why_not": f"R-hat and ESS were not stored at the inputs of the claim; at the training rows: {told}",
        }
    found = [(row[rhat], row[ess]) for row in rows for rhat, ess in columns]
    worst = (
        f"R-hat up to {max(rhat for rhat, _ in found):.3f}, bulk ESS from {min(ess for _, ess in found):.0f}"
    )
    return {"converged": all(converged(*each) for each in found), "why_not": worst}


def _brief(reason: str) -> str:
    """R-hat and bulk ESS of a reason of `bnn.diagnose`."""
    return reason.removeprefix("in function space the worst ").split(" and tail ESS")[0]


# --- verdicts: parameters, the ELBO and its gradient ----------------------------------------------


def judge_parameters(referee: Referee, study: Study) -> None:
    counts = {
        (row["parameters"], row["random_numbers_needed"])
        for row in study.tables["estimators"]
        if row["estimator"] == "plain"
    }
    ((parameters, variables),) = counts
    referee.proved(
        "parameters",
        parameters != 2 * variables,
        f"{parameters} for {variables} random variables (weights, biases and the noise)",
    )
    local = [row for row in study.tables["estimators"] if row["estimator"] == "local"]
    referee.proved(
        "fewer-parameters",
        all(row["parameters"] == parameters for row in local),
        f"{parameters} parameters of q either way",
    )


def judge_normals(referee: Referee, study: Study) -> None:
    outside = share_outside(0.0, 1.0)
    drawn = study.numbers.get("normals_outside")
    told = "" if drawn is None else f"; {drawn:.1%} of {NORMALS} draws"
    referee.proved("normals", outside > 0.0, f"{outside:.1%} of them do not{told}")


def judge_bound(referee: Referee, study: Study) -> None:
    """The KL in two ways: exactly for normals, by draws for every prior; and for which priors it has a closed form."""
    pairs = [kl_two_ways(0.5, width, prior) for width in (0.05, 0.5) for prior in (0.5, 2.0)]
    rows = study.tables["elbo"]
    worst = max(rows, key=lambda row: abs(row["z"]))
    referee.proved(
        "bound-two-ways",
        not all(math.isclose(*pair, rel_tol=1e-9) for pair in pairs),
        f"{pairs[0][1]:.6f} nats as an integral and {pairs[0][0]:.6f} in closed form for N(0.5, 0.05^2) and "
        f"N(0, 0.5^2), and likewise for three others; of {len(rows)} differences between draws and closed forms, "
        f"which cover the sites that have one, the largest is {abs(worst['z']):.2f} standard errors",
    )
    drawn: dict[str, set[str]] = {}
    for row in rows:
        kind = row["prior"].split(",")[0]
        drawn.setdefault(kind, set()).update(filter(None, [row.get("sites_without_closed_form")]))
    complete = [kind for kind, sites in drawn.items() if not sites]
    others = "; ".join(
        f"{kind}: {', '.join(sorted(sites))} by draws" for kind, sites in drawn.items() if sites
    )
    referee.measured(
        "bound-closed-form",
        claims.exact(len(complete) / len(drawn)),
        f"complete for: {', '.join(complete) or 'none'}; {others}",
    )


def judge_bound_by_row(referee: Referee, study: Study) -> None:
    y = curve(study.sizes.rows, 0)[1]
    found = bounds_of_a_mean(y)
    right, slip = (_fits(study, name) for name in (_whole(study), "KL counted once per row"))
    referee.proved(
        "bound-by-row",
        not math.isclose(found["by row"], found["evidence"], rel_tol=1e-9),
        f"for the mean of {len(y)} values with a normal prior the bound at the exact posterior is "
        f"{found['by row']:.1f} as printed, times M, and {found['once']:.1f} with the KL once, which is the log "
        f"evidence, {found['evidence']:.1f}; of a network on the curve the error of the mean among the data is "
        f"{average(slip, 'error_of_mean'):.3f} with the KL in each row and {average(right, 'error_of_mean'):.3f} with "
        f"it once",
    )


def _fits(study: Study, name: str) -> dict[int, Mapping[str, Any]]:
    return data_sets(study.tables["batches"], fit=name)


def _whole(study: Study) -> str:
    """Name of the fit to all rows at once, or in the largest batches."""
    return f"batches of {max(study.sizes.batches)}"


def judge_weight_gradient(referee: Referee, study: Study) -> None:
    term = terms_beside_the_likelihood(1.0, 0.5, 0.5)
    right, slip = (_fits(study, name) for name in (_whole(study), "no gradient of log q and log p"))
    referee.proved(
        "weight-gradient",
        term != 0.0,
        f"at w = 1, q = N(0.5, 0.25) and p = N(0, 1) it is {term:g}; without these terms the epistemic standard "
        f"deviation among the data is {average(slip, 'epistemic_sd_inside'):.4f}, with them "
        f"{average(right, 'epistemic_sd_inside'):.4f}",
    )


def judge_batches(referee: Referee, study: Study) -> None:
    """Batches of one row: their gradient, and the ELBO of a fit."""
    values = curve(8, 0)[1]
    means = [mean_over_batches(values, batch) for batch in (1, 3)]
    found = study.tables["batch_gradients"]
    referee.proved(
        "batch-gradient",
        not np.allclose(means, values.sum()),
        f"the largest of {sum(row['coordinates'] for row in found)} differences from the gradient of all rows, by "
        f"draws, is {max(row['largest_z'] for row in found):.2f} standard errors, with up to "
        f"{max(row['variance_over_full'] for row in found):.0f} times the variance",
    )
    sizes = study.sizes
    whole, one = _fits(study, _whole(study)), _fits(study, f"batches of {min(sizes.batches)}")
    referee.measured(
        "batch-fit",
        over_data_sets(lambda a, b: (a["elbo"] - b["elbo"]) / sizes.rows, whole, one),
        f"ELBO {average(whole, 'elbo'):.1f} with all rows, {average(one, 'elbo'):.1f} with one (Monte-Carlo error "
        f"{average(one, 'elbo_se'):.2f}), at {average(one, 'gradients') / average(whole, 'gradients'):.1%} of the "
        f"gradients of rows and a smaller step",
    )


# --- verdicts: local reparameterisation and variational dropout -----------------------------------


def judge_root(referee: Referee, study: Study) -> None:
    rows = study.tables["roots"]
    ratios = {row["inputs"]: row["sd_root_inside"] / row["sd_root_outside"] for row in rows}
    off = max(
        abs(row[name] / row["sd_root_outside"] - 1.0)
        for row in rows
        for name in ("sd_by_weights", "sd_by_library")
    )
    referee.proved(
        "root",
        any(not math.isclose(ratio, 1.0, rel_tol=1e-3) for ratio in ratios.values()),
        "the root is outside of the sum: o_j = sum_i mu_ji a_i + eps_j sqrt(sum_i sigma_ji^2 a_i^2); inside, the "
        "standard deviation is too large by "
        + ", ".join(f"{ratio:.2f} for {inputs}" for inputs, ratio in ratios.items())
        + f" inputs; outside, it is that of draws, by weights and by the library, to {off:.1%}",
    )
    # A normal of mean zero is outside least often.
    sd = rows[-1]["sd_root_outside"]
    outside = share_outside(-1.0 / sd, 1.0 / sd)
    referee.proved(
        "pre-activation",
        outside > 0.0,
        f"o_j is what enters the activation; with {rows[-1]['inputs']} inputs at least {outside:.0%} of its values "
        f"are no value of tanh",
    )


def _larger_batches(rows: Rows, estimator: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["estimator"] == estimator and row["batch"] > 1]


def judge_local(referee: Referee, study: Study) -> None:
    """What local reparameterisation is the same in, and what it lowers."""
    rows = study.tables["estimators"]
    pair = likelihood_two_ways(np.array([0.3, -0.2]), np.array([0.2, 0.4]), np.array([1.0, 0.7]), 0.5)
    values = [
        row[name]
        for row in rows
        for name in ("largest_z_loc", "largest_z_scale")
        if row["estimator"] == "local" and name in row
    ]
    referee.proved(
        "same-objective",
        not math.isclose(*pair, rel_tol=1e-8),
        f"{pair[0]:.8f} and {pair[1]:.8f} for one unit of tanh with two weights; by draws the mean gradients of a "
        f"network differ by {max(values):.2f} standard errors at most, of {len(values)} cases of "
        f"{rows[0]['parameters'] // 2} coordinates",
    )
    local = _larger_batches(rows, "local")
    largest = max(row["batch"] for row in rows)
    needed = {(row["random_numbers_needed"], row["random_numbers_one_draw_per_row"]) for row in local}
    (once,) = {row["random_numbers_needed"] for row in rows if row["estimator"] == "plain"}
    referee.proved(
        "random-numbers",
        any(own >= by_row for own, by_row in needed),
        f"{max(needed)[0]}, not {max(needed)[1]}, for {largest} rows; weights drawn once for the batch need {once}",
    )
    times = {
        name: data_sets(rows, estimator=name, place="fitted", batch=largest) for name in ("plain", "local")
    }
    referee.measured(
        "computation",
        over_data_sets(
            lambda plain, local: math.log(plain["milliseconds"] / local["milliseconds"]), *times.values()
        ),
        f"a gradient of {largest} rows takes {average(times['plain'], 'milliseconds'):.3f} ms by weights and "
        f"{average(times['local'], 'milliseconds'):.3f} ms by local reparameterisation, where the library "
        f"draws the weights as well",
    )
    for key, column in (("variance-means", "factor_loc"), ("variance-rho", "factor_scale")):
        own: dict[int, list[float]] = {}
        for row in local:
            own.setdefault(row.get("seed", 0), []).append(math.log(row[column]))
        factors = "; ".join(
            f"batch {row['batch']}, {row['place']}: {row[column]:.1f}" for row in _first(local)
        )
        referee.measured(
            key, over_data_sets(lambda logs: float(np.mean(logs)), own), f"factors, first data set: {factors}"
        )


def _first(rows: Rows) -> list[Mapping[str, Any]]:
    """The rows of the first data set."""
    return [row for row in rows if row.get("seed", 0) == 0]


def judge_shared(referee: Referee, study: Study) -> None:
    sigma, a, b = np.array([0.5, 1.0]), np.array([1.0, 2.0]), np.array([2.0, 1.0])
    covariance = shared_covariance(sigma, a, b)
    said = study.numbers["shared"]
    referee.proved(
        "shared-weights",
        covariance == 0.0,
        f"{covariance:g} for sigma = (0.5, 1), a = (1, 2) and b = (2, 1); to a convolution the library says: "
        f"{said['local']}",
    )
    serve = [name for name, words in said.items() if name != "local" and not words.startswith("refused")]
    referee.measured(
        "shared-general",
        claims.exact(len(serve)),
        "; ".join(f"{name}: {said[name]}" for name in serve)
        + "; variational dropout is a prior with independent normals for q, for which any of them serves",
    )


def judge_dropout(referee: Referee, study: Study) -> None:
    own, other = (
        data_sets(study.tables["dropout"], prior=name) for name in ("log-uniform", "Gaussian, sd 1")
    )
    told = f"{average(own, 'pruned'):.0f} of {average(own, 'weights'):.0f} weights, under N(0, 1) "
    referee.measured(
        "dropout-many",
        over_data_sets(lambda row: row["pruned"] / row["weights"], own),
        f"{told}{average(other, 'pruned'):.0f}; {average(own, 'live_units'):.0f} units are left",
    )
    referee.measured(
        "dropout-cost",
        over_data_sets(lambda row: math.log(row["rmse_pruned"] / row["rmse"]), own),
        f"RMSE {average(own, 'rmse'):.3f}, without the weights {average(own, 'rmse_pruned'):.3f}; under N(0, 1) "
        f"{average(other, 'rmse'):.3f} and {average(other, 'rmse_pruned'):.3f}; the noise is 1",
    )
    shares = ("pruned_share_irrelevant_inputs", "pruned_share_relevant_inputs")
    referee.measured(
        "dropout-inputs",
        over_data_sets(lambda row: row[shares[0]] - row[shares[1]], own),
        f"{average(own, shares[0]):.0%} and {average(own, shares[1]):.0%}",
    )


# --- verdicts: noise, and what is away from the data ----------------------------------------------


def judge_noise(referee: Referee, study: Study) -> None:
    """Mean-field VI, where the noise differs between rows and where it is level."""
    case = {
        (data, kind): data_sets(study.tables["noise"], data=data, model=kind, method="VI")
        for data in DATA
        for kind in MODELS
    }
    for data, key in (("curve", "noise-differs-score"), ("level", "noise-level-score")):
        one, own = case[data, "homoscedastic"], case[data, "heteroscedastic"]
        referee.measured(
            key,
            over_data_sets(lambda a, b: b["log_score"] - a["log_score"], one, own),
            f"{average(own, 'log_score'):.3f} and {average(one, 'log_score'):.3f}",
        )
    one, own = case["curve", "homoscedastic"], case["curve", "heteroscedastic"]
    correlations = [
        f"{row['noise_sd_correlation']:.2f}" for row in own.values() if "noise_sd_correlation" in row
    ]
    referee.measured(
        "noise-differs",
        over_data_sets(lambda a, b: a["noise_sd_error"] - b["noise_sd_error"], one, own),
        f"{average(one, 'noise_sd_error'):.4f} and {average(own, 'noise_sd_error'):.4f}; correlation with the true "
        f"standard deviation {', '.join(correlations)}",
    )
    one, own = case["level", "homoscedastic"], case["level", "heteroscedastic"]
    ends = [f"{each}_noise_sd" for each in ("smallest", "largest")]
    told = ""
    if all(end in row for end in ends for row in own.values()):
        told = f"; it goes from {average(own, ends[0]):.3f} to {average(own, ends[1]):.3f}"
    referee.measured(
        "noise-level",
        over_data_sets(lambda row: row["noise_sd_error"] / row["true_noise_sd"], own),
        f"error {average(own, 'noise_sd_error'):.4f} of {LEVEL_NOISE:g}, with one noise "
        f"{average(one, 'noise_sd_error'):.4f}{told}",
    )


# The noise models and the methods as keys of claims name them.
NOISES = {"homoscedastic": "one-noise", "heteroscedastic": "noise-output"}
METHODS = {"NUTS": "nuts", "VI, full rank": "full-rank", "VI": "mean-field"}


def growth(row: Mapping[str, Any], column: str = "epistemic_sd") -> float:
    """Log of a column away from the data over that among them."""
    return math.log(row[f"{column}_away"] / row[f"{column}_inside"])


def judge_plain(referee: Referee, study: Study) -> None:
    one, own = (data_sets(study.tables["beside"], model=kind, method="plain network") for kind in MODELS)
    widths = {
        kind: f"width {average(case, 'iqr_inside'):.3f} among the data and {average(case, 'iqr_away'):.3f} away"
        for kind, case in zip(MODELS, (one, own), strict=True)
    }
    referee.proved(
        "plain-one-noise",
        all(math.isclose(row["iqr_away"], row["iqr_inside"], rel_tol=1e-4) for row in one.values()),
        f"{widths['homoscedastic']}; epistemic spread one network has none, away from the data or among them",
    )
    referee.measured(
        "plain-noise-output", over_data_sets(lambda row: growth(row, "iqr"), own), widths["heteroscedastic"]
    )


def judge_away(referee: Referee, study: Study) -> None:
    """The epistemic spread of NUTS, of two variational families, and of an ensemble of plain networks."""
    rows = study.tables["beside"]
    for kind, noise_key in NOISES.items():
        for name, key in METHODS.items():
            case = data_sets(rows, model=kind, method=name)
            more = chains(study, [f"curve, {kind}"], list(PARTS)) if name == "NUTS" else {}
            referee.measured(f"away-{key}-{noise_key}", over_data_sets(growth, case), _spreads(case), **more)
        name = ensemble_of(study.sizes.networks)
        case = data_sets(rows, model=kind, method=name)
        sampled = data_sets(rows, model=kind, method="NUTS")
        referee.measured(
            f"ensemble-{noise_key}",
            over_data_sets(growth, case),
            f"{name}: {_spreads(case)}; that of NUTS away is {average(sampled, 'epistemic_sd_away'):.4f}",
        )


def _spreads(case: Mapping[int, Mapping[str, Any]]) -> str:
    inside, away = (average(case, f"epistemic_sd_{part}") for part in PARTS)
    return f"{inside:.4f} among the data and {away:.4f} away"


# --- verdicts: averages and priors ----------------------------------------------------------------


def judge_averages(referee: Referee, study: Study) -> None:
    rows = study.tables["averages"]
    one, many = {}, {}
    for name in METHODS:
        most = max(row["networks"] for row in rows if row["method"] == name)
        one[name] = data_sets(rows, method=name, networks=1)
        many[name] = data_sets(rows, method=name, networks=most)
    gain = gain_of_averaging([0.0, 1.0, -2.0])
    told = "; ".join(
        f"{name} {average(one[name], 'log_score'):.3f} and {average(many[name], 'log_score'):.3f}"
        for name in METHODS
    )
    referee.proved(
        "average-own",
        gain < 0.0,
        f"of log densities 0, 1 and -2 it is {gain:.3f}; one network and many: {told}",
    )
    centre = data_sets(rows, method=CENTRE)
    referee.measured(
        "average-centre",
        over_data_sets(lambda a, b: a["log_score"] - b["log_score"], many["VI"], centre),
        f"{average(many['VI'], 'log_score'):.3f} and {average(centre, 'log_score'):.3f}",
    )


def dependence(rows: Rows) -> float:
    """How far priors differ away from the data, in logs, beyond a factor of 1.5 and beyond what they do among them."""
    away, inside = (
        math.log(max(values) / min(values))
        for values in ([row[f"epistemic_sd_{part}"] for row in rows] for part in ("away", "inside"))
    )
    return away - max(math.log(1.5), inside)


def judge_priors(referee: Referee, study: Study) -> None:
    """By NUTS without the horseshoe, of which chains do not converge at this length."""
    for method, key in (("NUTS", "priors-nuts"), ("VI", "priors-mean-field")):
        names = [name for name in study.sizes.priors if method == "VI" or name != "horseshoe"]
        cases = [data_sets(study.tables["priors"], prior=name, method=method) for name in names]
        told = ", ".join(
            f"{name} {average(case, 'epistemic_sd_inside'):.3f} and {average(case, 'epistemic_sd_away'):.3f}"
            for name, case in zip(names, cases, strict=True)
        )
        more = chains(study, [f"prior: {name}" for name in names], list(PARTS)) if method == "NUTS" else {}
        referee.measured(
            key,
            over_data_sets(lambda *rows: dependence(rows), *cases),
            f"epistemic standard deviation among the data and away: {told}",
            **more,
        )


def judge_mixture(referee: Referee, study: Study) -> None:
    prior = PRIORS["scale mixture"]
    count, probability = 2 * study.sizes.units, prior.weights[0]
    mass = mixture_mass(count, probability)
    off = study.numbers.get("mixture")
    told = "" if off is None else f"; log p(w) in brackets is the library's to {off['off_with_brackets']:.0e}"
    referee.proved(
        "mixture-product",
        not math.isclose(mass, 1.0),
        f"read so, all weights share one component, and for {count} weights and pi = {probability:g} the integral is "
        f"{mass:.2g}, not 1; the product is over the sum in brackets{told}",
    )
    covariance = covariance_of_squares(*prior.scales, variance=1.0 / 12.0)
    referee.proved(
        "mixture-weight",
        covariance > 0.0,
        f"{covariance:.3f} for pi uniform on [0, 1] and standard deviations of {prior.scales[0]:g} and "
        f"{prior.scales[1]:g}: with that density pi is a fixed number",
    )


# --- verdicts: more rows --------------------------------------------------------------------------


def along_rows(study: Study, method: str) -> dict[int, list[Mapping[str, Any]]]:
    """The rows of one method in each data set, the fewest rows first."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for row in sorted(study.tables["rows"], key=lambda row: row["rows"]):
        if row["method"] == method:
            found.setdefault(row.get("seed", 0), []).append(row)
    return found


def exponent(column: str) -> Callable[[Rows], float]:
    """Of the number of rows in a column."""
    return lambda rows: slope([row["rows"] for row in rows], [row[column] for row in rows])


def change(rows: Rows) -> float:
    """Log of the aleatoric standard deviation at the most rows over that at the fewest."""
    return math.log(rows[-1]["aleatoric_sd"] / rows[0]["aleatoric_sd"])


def cost_ratio(chained: Rows, variational: Rows) -> float:
    """Log of the seconds of chains over those of VI, mean over the numbers of rows of the chains."""
    seconds = {row["rows"]: row["seconds"] for row in variational}
    return float(np.mean([math.log(row["seconds"] / seconds[row["rows"]]) for row in chained]))


def means_along(rows: Mapping[int, Rows], column: str) -> str:
    """A column at each number of rows, mean over data sets, in words."""
    by_count: dict[int, list[float]] = {}
    for each in rows.values():
        for row in each:
            by_count.setdefault(row["rows"], []).append(row[column])
    return ", ".join(f"{np.mean(values):.3g} at {count}" for count, values in by_count.items())


def judge_rows(referee: Referee, study: Study) -> None:
    """Costs and the two uncertainties as rows are added. Gradients of rows are by construction, and not judged."""
    sizes = study.sizes
    variational, chained = along_rows(study, "VI"), along_rows(study, "NUTS")
    cases = [f"{count} rows" for count in sizes.row_counts if count <= sizes.sampled_rows]
    more = chains(study, cases, ["inside"])
    # A draw of a tree of depth d takes 2^d gradients at most, in the warm-up as after it.
    most = sizes.chains * 2 * sizes.draws * 2**sizes.tree_depth
    shares = [row["row_gradients"] / row["rows"] / most for rows in chained.values() for row in rows]
    cut = f"NUTS took {min(shares):.0%} or more of the gradients that its largest trees allow"
    of_nuts, of_vi = (f"{means_along(each, 'seconds')} rows" for each in (chained, variational))
    referee.measured(
        "cost",
        over_data_sets(cost_ratio, chained, variational),
        f"seconds of NUTS {of_nuts}; of VI {of_vi}; {cut}",
        **more,
    )
    referee.measured(
        "cost-rows",
        over_data_sets(exponent("seconds"), variational),
        f"seconds {of_vi}; steps and batches are the same at any number of rows",
    )
    grown: list[tuple[str, Any, Any, str, dict[str, Any]]] = [
        (
            "chains-rows",
            exponent("seconds"),
            chained,
            f"seconds {of_nuts}; {cut}, so how many a posterior needs is not shown",
            {},
        )
    ]
    for key, rows, words in (("mean-field", variational, {}), ("nuts", chained, more)):
        told = {column: f"{means_along(rows, column)} rows" for column in ("epistemic_sd", "aleatoric_sd")}
        grown += [
            (f"epistemic-{key}", exponent("epistemic_sd"), rows, told["epistemic_sd"], words),
            (
                f"aleatoric-{key}",
                change,
                rows,
                f"{told['aleatoric_sd']}; the truth is {LEVEL_NOISE:g}",
                words,
            ),
        ]
    for key, quantity, rows, numbers, words in grown:
        if min(len(each) for each in rows.values()) < 2:
            referee.not_run(key, "at one number of rows only", numbers)
        else:
            referee.measured(key, over_data_sets(quantity, rows), numbers, **words)


def own_sizes(sizes: Sizes) -> str:
    """The sizes in words, for every verdict."""
    return (
        f"sizes of this study, not of a source: {sizes.rows} rows of a curve, {sizes.units} tanh units; "
        f"Friedman's function, {sizes.friedman_rows} rows, {sizes.friedman_units} units"
    )


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    referee = Referee(read_claims("variational_overview"), own_sizes(study.sizes))
    referee.not_run("prior-by-elbo", "that is empirical Bayes, of which there is a study of its own")
    for each in (
        judge_parameters,
        judge_normals,
        judge_bound,
        judge_bound_by_row,
        judge_weight_gradient,
        judge_batches,
        judge_root,
        judge_local,
        judge_shared,
        judge_dropout,
        judge_noise,
        judge_plain,
        judge_away,
        judge_averages,
        judge_priors,
        judge_mixture,
        judge_rows,
    ):
        each(referee, study)
    return referee.verdicts()


# --- figures --------------------------------------------------------------------------------------


WHOLE = (-0.2, 1.2)


def band(axes: Any, predict: Callable[[np.ndarray], Any], colour: str, text: str | None = None) -> None:
    """Median and inter-quartile band of a predictive over the whole axis."""
    at = grid(WHOLE, 141)
    prediction = predict(at)
    low, high = prediction.interval(0.5)
    axes.fill_between(at[:, 0], low, high, color=colour, alpha=0.3, linewidth=0)
    axes.plot(at[:, 0], prediction.quantile(0.5), color=colour, linewidth=1.5, label=text)


def rows_shown(axes: Any, x: np.ndarray, y: np.ndarray) -> None:
    axes.plot(x[:, 0], y, "x", color=BLACK, markersize=3, alpha=0.6)
    axes.set(xlim=WHOLE, ylim=(-1.3, 1.9), xlabel="x")


def draw_beside(path: Path, shown: Mapping[str, Any]) -> None:
    names = list(dict.fromkeys(name for _, name in shown["cases"]))
    figure, axes = panels(16.0, 7.0, len(names), 2)
    for row, kind in enumerate(MODELS):
        for column, name in enumerate(names):
            each = axes[row, column]
            band(each, shown["cases"][kind, name], VERMILION if "plain" in name else BLUE)
            rows_shown(each, shown["x"], shown["y"])
            each.plot(
                grid(WHOLE, 141), curve_at(grid(WHOLE, 141)), color=GREY, linestyle="dotted", linewidth=1
            )
            last = note(shown["fits"][kind]) if name == "NUTS" else ""
            if row == 0 or last:
                each.set_title(f"{name}{last}", fontsize=10)
        axes[row, 0].set_ylabel(f"y, {kind} noise")
    figure.suptitle(
        "Median and inter-quartile band; crosses: data; dotted: the curve without noise", fontsize=11
    )
    figure.savefig(path)


def note(fits: Mapping[str, Any]) -> str:
    """What a figure adds to the name of NUTS."""
    return "" if fits["reference"] is not None else " (not converged)"


def draw_noise(path: Path, found: Mapping[tuple[str, str], Any]) -> None:
    figure, axes = panels(12.0, 4.6, 3)
    at = grid(INSIDE, 101)
    wide = grid(WHOLE, 141)
    for index, name in enumerate(DATA):
        each = axes[0, index]
        each.plot(at, DATA[name][1](at[:, 0])[1], color=BLACK, linewidth=1.5, label="truth")
        for kind, colour in zip(MODELS, (ORANGE, BLUE), strict=True):
            posterior = found[name, kind]["VI"]
            each.plot(at, np.sqrt(posterior.predict(at).aleatoric), color=colour, label=f"{kind}, VI")
            if "NUTS" in found[name, kind]:
                sd = np.sqrt(found[name, kind]["NUTS"].predict(at).aleatoric)
                each.plot(
                    at, sd, color=colour, linestyle="dashed", label=f"{kind}, NUTS{note(found[name, kind])}"
                )
        each.set(xlabel="x", ylim=(0.0, None))
        each.set_title(f"aleatoric sd, {name} data", fontsize=10)
        each.legend(frameon=False, fontsize=8)
    last = axes[0, 2]
    for kind, colour in zip(MODELS, (ORANGE, BLUE), strict=True):
        for method, style in (("VI", "solid"), ("VI, full rank", "dotted"), ("NUTS", "dashed")):
            sd = np.sqrt(found["curve", kind][method].predict(wide).epistemic)
            last.plot(
                wide,
                sd,
                color=colour,
                linestyle=style,
                label=f"{kind}, {method}{note(found['curve', kind]) if method == 'NUTS' else ''}",
            )
    last.axvspan(*INSIDE, color=GREY, alpha=0.15, linewidth=0)
    last.set(xlabel="x", yscale="log", xlim=WHOLE, ylim=(1e-3, None))
    last.set_title("epistemic sd, curve data (grey: data)", fontsize=10)
    last.legend(frameon=False, fontsize=7)
    figure.savefig(path)


def draw_priors(path: Path, shown: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for name, _ in shown["cases"]))
    figure, axes = panels(3.2 * len(names), 6.6, len(names), 2)
    for row, method in enumerate(("VI", "NUTS")):
        for column, name in enumerate(names):
            each = axes[row, column]
            band(each, shown["cases"][name, method], BLUE if method == "VI" else GREEN)
            rows_shown(each, shown["x"], shown["y"])
            each.set_ylim(-1.4, 2.8)
            own = next(one for one in rows if one["prior"] == name and one["method"] == method)
            note = " (not converged)" if own["converged"] is False else ""
            each.set_title(f"{name}\n{method}{note}", fontsize=10)
        axes[row, 0].set_ylabel("y")
    figure.savefig(path)


def draw_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    figure, axes = panels(11.0, 4.4, 2)
    left, right = axes[0]
    for method, marker in (("VI", "o"), ("NUTS", "s")):
        taken = [row for row in rows if row["method"] == method]
        for column, colour in (("epistemic_sd", BLUE), ("aleatoric_sd", ORANGE)):
            left.plot(
                [row["rows"] for row in taken],
                [row[column] for row in taken],
                marker,
                color=colour,
                markerfacecolor=colour if method == "VI" else "white",
                label=f"{column.split('_')[0]}, {method}",
            )
        right.plot(
            [row["rows"] for row in taken],
            [row["row_gradients"] for row in taken],
            marker,
            color=GREEN if method == "VI" else VERMILION,
            label=method,
        )
    left.axhline(LEVEL_NOISE, color=ORANGE, linestyle="dotted", label="true noise")
    left.set(xscale="log", yscale="log", xlabel="rows", ylabel="standard deviation")
    right.set(xscale="log", yscale="log", xlabel="rows", ylabel="gradients of single rows")
    for each in (left, right):
        each.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def draw_estimators(path: Path, rows: Sequence[Mapping[str, Any]], root: Sequence[Mapping[str, Any]]) -> None:
    """How many times smaller than that of the plain estimator the variance of a gradient is, and the slip of a root."""
    figure, axes = panels(13.0, 4.4, 3)
    few = [row for row in rows if row.get("seed", 0) == 0]
    styles = {("local", "start"): (BLUE, "dotted"), ("local", "fitted"): (BLUE, "solid")}
    styles |= {("flipout", "start"): (ORANGE, "dotted"), ("flipout", "fitted"): (ORANGE, "solid")}
    for each, kind, text in ((axes[0, 0], "loc", "means"), (axes[0, 1], "scale", "scale parameters")):
        for (estimator, place), (colour, line) in styles.items():
            own = _estimates(few, estimator, place=place)
            each.plot(
                [row["batch"] for row in own],
                [row[f"factor_{kind}"] for row in own],
                marker="o",
                markersize=5,
                color=colour,
                linestyle=line,
                label=f"{estimator}, at the {'start' if place == 'start' else 'fitted guide'}",
            )
        each.axhline(1.0, color=GREY, linewidth=1.0)
        batches = sorted({row["batch"] for row in few})
        each.set(xscale="log", yscale="log", xlabel="rows of the batch", xticks=batches, ylim=(0.7, 25.0))
        each.set_xticks(batches, [str(batch) for batch in batches], minor=False)
        each.set_xticks([], minor=True)
        each.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        each.set_yticks([], minor=True)
        each.set_title(
            f"gradient in the {text}: variance of the\nplain estimator over its own (higher is better)",
            fontsize=9,
        )
    axes[0, 0].legend(frameon=False, fontsize=8, loc="upper left")
    last = axes[0, 2]
    inputs = [row["inputs"] for row in root]
    by_weights = np.array([row["sd_by_weights"] for row in root])
    for column, colour, marker, label in (
        ("sd_by_library", BLUE, "o", "local reparameterisation"),
        ("sd_root_inside", VERMILION, "s", "root inside of the sum (slip)"),
    ):
        ratio = np.array([row[column] for row in root]) / by_weights
        last.plot(inputs, ratio, marker=marker, markersize=5, color=colour, label=label)
    last.axhline(1.0, color=GREY, linewidth=1.0)
    last.set(xscale="log", yscale="log", xlabel="inputs of the map")
    last.set_xticks(inputs, [str(count) for count in inputs])
    last.set_xticks([], minor=True)
    last.set_title("sd of a pre-activation over that of drawn weights\n(1 is right)", fontsize=9)
    last.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def draw_slips(path: Path, shown: Mapping[str, Any]) -> None:
    names = list(shown["cases"])
    names = [names[0], names[-3], *names[-2:]]
    figure, axes = panels(14.0, 3.8, len(names))
    for index, name in enumerate(names):
        each = axes[0, index]
        at = grid(WHOLE, 141)
        prediction = shown["cases"][name](at)
        sd = np.sqrt(prediction.epistemic)
        colour = VERMILION if index > 1 else BLUE
        mean = prediction.mean
        each.fill_between(at[:, 0], mean - 2 * sd, mean + 2 * sd, color=colour, alpha=0.3, linewidth=0)
        each.plot(at, mean, color=colour)
        rows_shown(each, shown["x"], shown["y"])
        each.set_title(name, fontsize=10)
    axes[0, 0].set_ylabel("mean and 2 epistemic sd")
    figure.savefig(path)


def draw_dropout(path: Path, found: Mapping[str, Any]) -> None:
    figure, axes = panels(11.0, 4.2, len(found))
    for index, (name, (_, ratio)) in enumerate(found.items()):
        each = axes[0, index]
        values = ratio["hidden0.weight"]
        rng = np.random.default_rng(0)
        for number, row in enumerate(values):
            colour = BLUE if number < FRIEDMAN_RELEVANT else GREY
            each.plot(number + 1 + rng.uniform(-0.25, 0.25, len(row)), row, ".", color=colour, markersize=4)
        each.axhline(THRESHOLD, color=VERMILION, linestyle="dashed", label="pruned above")
        each.set(xticks=[1, *range(5, FRIEDMAN_INPUTS + 1, 5)])
        each.set(xlabel="input (blue: relevant)", ylabel="$\\log\\alpha$ of weights of the first layer")
        each.set_title(name, fontsize=10)
        each.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path)


def draw_averages(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    figure, axes = panels(6.4, 4.4)
    each = axes[0, 0]
    for name, colour in (("VI", BLUE), ("VI, full rank", SKY), ("NUTS", GREEN)):
        own = [row for row in rows if row["method"] == name]
        each.errorbar(
            [row["networks"] for row in own],
            [row["log_score"] for row in own],
            yerr=[row["sd"] for row in own],
            color=colour,
            marker="o",
            markersize=4,
            capsize=2,
            label=name,
        )
    centre = next(row["log_score"] for row in rows if row["method"] == CENTRE)
    each.axhline(centre, color=PINK, linestyle="dashed", label="VI, network at the mean")
    each.set(xscale="log", xlabel="networks averaged", ylabel="test log score per row")
    each.legend(frameon=False, fontsize=8)
    figure.savefig(path)


# --- all of it ------------------------------------------------------------------------------------


def main(tiny: bool = False, out: str | Path | None = None, seeds: int | None = None) -> Study:
    """Run the study and write tables, figures and verdicts to `out`. `seeds`: how many data sets.

    Without `out` a full run writes to results/variational_overview beside this file, a tiny one to a temporary folder.
    """
    study = Study.begin(TINY if tiny else FULL, "variational_overview", tiny, out, seeds=seeds)
    small_facts(study)
    study.numbers["mixture"] = mixture_density(study)
    study.numbers["shared"] = shared()
    root = roots(study)
    bounds(study)
    batch_gradients(study)
    for seed in range(study.sizes.seeds):
        thin = dropout(study, seed)
        estimators(study, thin["Gaussian, sd 1"][0], seed)
        slips = batches(study, seed)
        found = noise(study, seed)
        shown = beside(study, found, seed)
        averages(study, found, seed)
        shaped = compare_priors(study, seed)
        if seed == 0:
            draw_dropout(study.out / "dropout.png", thin)
            draw_estimators(study.out / "estimators.png", study.tables["estimators"], root)
            draw_slips(study.out / "batches.png", slips)
            draw_noise(study.out / "noise.png", found)
            draw_beside(study.out / "beside.png", shown)
            draw_averages(study.out / "averages.png", study.tables["averages"])
            draw_priors(study.out / "priors.png", shaped, study.tables["priors"])
    more_rows(study)
    draw_rows(study.out / "rows.png", study.tables["rows"])
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    options = vars(command_line(__doc__, "cache", "seeds").parse_args())
    # Data sets and seeds share their programs: compiled once, they are read from disk by all others.
    bnn.enable_compilation_cache(options.pop("cache"))
    main(**options)
