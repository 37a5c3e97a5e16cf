"""Variational Bayesian neural networks: two kinds of uncertainty, and what a mean-field normal makes of them.

Source: a Chinese introduction to variational Bayesian networks, which retells Blundell et al. (2015), "Weight
uncertainty in neural networks", and Kingma, Salimans and Welling (2015), "Variational dropout and the local
reparameterization trick". With independent normals q(w) = N(mu, softplus(rho)^2) and a batch of B of N rows,

    ELBO = (N / B) sum_{i in batch} E_q log p(y_i | x_i, w) - KL(q || p),     w = mu + softplus(rho) eps,

and the predictive p(y* | x*) = E_q p(y* | x*, w) is an average over networks. Its variance is the aleatoric part,
E_q Var(y* | w), plus the epistemic one, Var_q E(y* | w).

Corrected here: the KL belongs to all rows and is counted once, not per row; it is in closed form for a Gaussian prior
and not for a mixture, which is a product over weights of sums in brackets; what local reparameterisation draws is the
pre-activation o_j = sum_i mu_ji a_i + eps_j (sum_i sigma_ji^2 a_i^2)^(1/2), with the root outside of the sum, which
lowers the variance of gradients and the number of random draws but not the number of parameters; dL/dw holds the
terms of log q and log p; standard normal variables are not between 0 and 1; and the weight of a mixture is a fixed
number. Where a slip can be seen, it is shown.

The curve is that of Blundell et al., y = x + 0.3 sin(2 pi (x + e)) + 0.3 sin(4 pi (x + e)) + e with e ~ N(0, 0.02^2)
and x in [0, 0.5]. Noise that goes through the sines is heteroscedastic, and its standard deviation is known by
quadrature. References are NUTS on the same model and rows, where it converges in function space.

    python comparisons/variational_overview.py [--tiny] [--out DIR] [--cache DIR]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from study import (
    BLACK,
    BLUE,
    CORRECTED,
    GREEN,
    GREY,
    NOT_REPRODUCED,
    NOT_RUN,
    ORANGE,
    PINK,
    REPRODUCED,
    SKY,
    VERMILION,
    Study,
    Verdict,
    command_line,
    panels,
)

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors, scores
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import UnsupportedError
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


@dataclass(frozen=True)
class Sizes:
    """How much is computed. Rows and units are the study's; the rest trades Monte-Carlo error for time."""

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
    row_seeds: int = 2
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
TINY = Sizes(
    rows=24,
    test_rows=50,
    units=3,
    networks=2,
    steps=60,
    mode_steps=40,
    draws=30,
    chains=2,
    tree_depth=4,
    row_counts=(16, 32),
    row_seeds=1,
    sampled_rows=16,
    batch=8,
    batches=(24, 1),
    elbo_draws=100,
    gradient_draws=40,
    gradient_batches=(1, 16),
    timed=2,
    friedman_rows=40,
    friedman_units=3,
    friedman_steps=60,
    priors=("Gaussian, sd 2", "scale mixture"),
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


def referenced(study: Study, case: str, posterior: Any) -> Reference | None:
    """The posterior as a reference where `bnn.diagnose` finds it converged; else None. Always a row of the table."""
    found = bnn.diagnose(posterior)
    study.tables.setdefault("references", []).append(
        {
            "case": case,
            "verdict": found.verdict,
            "reason": found.reasons[0],
            "gradients": posterior.info.gradient_evaluations,
            "seconds": posterior.info.run_seconds,
        }
    )
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


def noise(study: Study) -> dict[tuple[str, str], Any]:
    """Both noise models on both data sets by VI, and by NUTS on the curve; the two kinds of uncertainty, apart."""
    sizes = study.sizes
    inside, outside = grid(INSIDE), grid(OUTSIDE)
    found: dict[tuple[str, str], Any] = {}
    rows = []
    for name, (draw, moments) in DATA.items():
        x, y = draw(sizes.rows, 0)
        xt, yt = draw(sizes.test_rows, 1)
        truth = moments(inside[:, 0])[1]
        for kind, model in MODELS.items():
            fitted = partial(model, units=sizes.units)
            methods = {"VI": svi(study)}
            if name == "curve":
                methods |= {"NUTS": nuts(study), "VI, full rank": svi(study, guide="fullrank")}
            posteriors = {
                method: bnn.fit(fitted, x, y, each, standardise=True) for method, each in methods.items()
            }
            reference = None
            if "NUTS" in posteriors:
                reference = referenced(study, f"{name}, {kind}", posteriors["NUTS"])
            for method, posterior in posteriors.items():
                sd = np.sqrt(posterior.predict(inside).aleatoric)
                epistemic, aleatoric = spread(posterior, inside)
                away, aleatoric_away = spread(posterior, outside)
                rows.append(
                    {
                        "data": name,
                        "model": kind,
                        "method": method,
                        "log_score": scores.log_score(posterior.predict(xt), yt),
                        "aleatoric_sd": aleatoric,
                        "true_noise_sd": float(np.sqrt(np.mean(truth**2))),
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
                    f"{name}, {kind}, {method}: noise sd {aleatoric:.3f}, epistemic {epistemic:.3f}, away {away:.3f}"
                )
            found[name, kind] = posteriors | {"reference": reference}
    study.tables["noise"] = rows
    study.judge(judge_noise(rows))
    return found


def judge_noise(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where noise that differs is followed by the model that lets it differ, and it scores better (VI)."""
    case = {(row["data"], row["model"]): row for row in rows if row["method"] == "VI"}
    errors = {key: row["noise_sd_error"] for key, row in case.items()}
    gains = {
        data: case[data, "heteroscedastic"]["log_score"] - case[data, "homoscedastic"]["log_score"]
        for data in ("curve", "level")
    }
    follows = errors["curve", "heteroscedastic"] < errors["curve", "homoscedastic"]
    one = case["curve", "heteroscedastic"]["noise_sd_correlation"]
    return Verdict(
        "aleatoric uncertainty is homoscedastic or heteroscedastic, and a network can tell",
        REPRODUCED if follows and gains["curve"] > 0.0 else NOT_REPRODUCED,
        f"where the noise differs between rows, the error of its sd is "
        f"{errors['curve', 'heteroscedastic']:.4f} with noise "
        f"as an output and {errors['curve', 'homoscedastic']:.4f} with one noise (correlation with the true sd "
        f"{one if isinstance(one, str) else format(one, '.2f')}), and the test log score is higher by "
        f"{gains['curve']:.3f} nats per row; where it does not differ, {errors['level', 'heteroscedastic']:.4f} and "
        f"{errors['level', 'homoscedastic']:.4f}, and the score changes by {gains['level']:+.3f}; mean-field VI",
    )


# --- a plain network beside a Bayesian one --------------------------------------------------------


def beside(study: Study, found: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """Plain networks, an ensemble of them, VI and NUTS: what spread they have away from the data."""
    sizes = study.sizes
    x, y = curve(sizes.rows, 0)
    xt, yt = curve(sizes.test_rows, 1)
    inside, outside = grid(INSIDE), grid(OUTSIDE)
    shown: dict[tuple[str, str], Any] = {}
    rows = []
    for kind, model in MODELS.items():
        reference = found["curve", kind]["reference"]
        members = [plain(study, model, x, y, seed) for seed in range(sizes.networks)]
        cases: dict[str, Callable[[np.ndarray], Any]] = {
            "plain network": members[0].predict,
            f"ensemble of {len(members)} plain networks": lambda at, members=members: pooled(
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
    study.tables["beside"] = rows
    study.judge(judge_plain(rows))
    study.judge(judge_bayesian(rows))
    study.judge(judge_ensemble(rows))
    return {"cases": shown, "x": x, "y": y, "fits": {kind: found["curve", kind] for kind in MODELS}}


def _of(rows: Sequence[Mapping[str, Any]], kind: str, start: str) -> Mapping[str, Any]:
    return next(row for row in rows if row["model"] == kind and row["method"].startswith(start))


def judge_plain(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Corrected where the epistemic spread is zero everywhere, so that it need not vanish away from the data."""
    texts, none, narrow = [], [], []
    for kind in MODELS:
        row = _of(rows, kind, "plain")
        none.append(row["epistemic_sd_inside"] == row["epistemic_sd_away"] == 0.0)
        narrow.append(row["iqr_away"] < 0.5 * row["iqr_inside"])
        texts.append(f"{kind}: {row['iqr_inside']:.3f} among the data and {row['iqr_away']:.3f} away")
    verdict = REPRODUCED if all(narrow) else CORRECTED if all(none) else NOT_REPRODUCED
    return Verdict(
        "a plain network drives the spread of its prediction to zero away from the data",
        verdict,
        "one network has no epistemic spread anywhere, away from the data or among them; what it has is "
        "noise. Width of "
        f"its inter-quartile band, {'; '.join(texts)}",
    )


def _referenced_kinds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The noise models under which NUTS converged."""
    return [kind for kind in MODELS if _of(rows, kind, "NUTS")["away_mean_gap"] != NO_REFERENCE]


def judge_bayesian(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where the epistemic sd of NUTS and of mean-field VI is more than twice as large away from the data,
    corrected where that of NUTS alone is.
    """
    claim, kinds = "a Bayesian network is less sure away from the data", _referenced_kinds(rows)
    if not kinds:
        return Verdict(claim, NOT_RUN, "NUTS converged under neither noise model")
    growth = {
        name: [
            _of(rows, kind, name)["epistemic_sd_away"] / _of(rows, kind, name)["epistemic_sd_inside"]
            for kind in kinds
        ]
        for name in ("NUTS", "VI, full rank", "VI")
    }
    text = "; ".join(f"{name} {' and '.join(f'{one:.2f}' for one in each)}" for name, each in growth.items())
    nuts_grows, vi_grows = (min(growth[name]) > 2.0 for name in ("NUTS", "VI"))
    note = ""
    if nuts_grows and not vi_grows:
        note = ": the posterior's spread grows, that of its mean-field approximation does not"
    return Verdict(
        claim,
        REPRODUCED if nuts_grows and vi_grows else CORRECTED if nuts_grows else NOT_REPRODUCED,
        f"epistemic sd away over that among the data, {' and '.join(kinds)} noise: {text}{note}",
    )


def judge_ensemble(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where the spread of an ensemble is not twice as large away from the data as among them, corrected
    where it is and yet less than half of that of NUTS, under each noise model with a reference.
    """
    claim, kinds = "nor has a number of plain networks a spread away from the data", _referenced_kinds(rows)
    if not kinds:
        return Verdict(claim, NOT_RUN, "NUTS converged under neither noise model")
    grows, short, texts = [], [], []
    for kind in kinds:
        own, mean_field, chains = (_of(rows, kind, name) for name in ("ensemble", "VI", "NUTS"))
        sds = [(row["epistemic_sd_inside"], row["epistemic_sd_away"]) for row in (own, mean_field, chains)]
        growth, of_mean_field, _ = (away / inside for inside, away in sds)
        share = sds[0][1] / sds[2][1]
        grows.append(growth > 2.0)
        short.append(share < 0.5)
        texts.append(
            f"{kind} noise, {own['method']}: {sds[0][0]:.4f} among the data and {sds[0][1]:.4f} away, {growth:.2g} "
            f"times as much and {share:.2f} of that of NUTS ({sds[2][1]:.3f}); mean-field VI {sds[1][0]:.4f} and "
            f"{sds[1][1]:.4f}, {of_mean_field:.2g} times"
        )
    note = ""
    if all(grows):
        note = "; its spread does grow" + (", though to less than half of that of NUTS" if all(short) else "")
    return Verdict(
        claim,
        REPRODUCED if not any(grows) else CORRECTED if all(short) else NOT_REPRODUCED,
        f"epistemic sd, {'; '.join(texts)}{note} (one data set and one ensemble)",
    )


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
            closed = objectives[True].divergence.drawn
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
                        "sites_without_closed_form": ", ".join(closed),
                    }
                )
    study.tables["elbo"] = rows
    study.judge(judge_bounds(rows))
    study.judge(judge_closed_forms(rows))


def judge_bounds(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where no difference exceeds 4 standard errors."""
    worst = max(rows, key=lambda row: abs(row["z"]))
    return Verdict(
        "the ELBO can be had by Monte Carlo or with the KL in closed form",
        REPRODUCED if abs(worst["z"]) < 4.0 else NOT_REPRODUCED,
        f"largest of {len(rows)} differences {abs(worst['z']):.2f} standard errors ({worst['prior']}, "
        f"{worst['guide']}, {worst['place']}: KL {worst['kl_monte_carlo']:.2f} by draws, "
        f"{worst['kl_closed_form']:.2f}, "
        f"standard error {worst['standard_error']:.3f})",
    )


def judge_closed_forms(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Corrected where the closed form is complete for the Gaussian priors and for no other."""
    complete = {row["prior"] for row in rows if not row["sites_without_closed_form"]}
    gaussian = {row["prior"] for row in rows if row["prior"].startswith("Gaussian")}
    return Verdict(
        "the KL of the ELBO can be worked out",
        CORRECTED if complete == gaussian else NOT_REPRODUCED,
        f"in closed form for {', '.join(sorted(complete)) or 'no prior'}; "
        + "; ".join(
            f"{row['prior']}: {row['sites_without_closed_form']} by draws"
            for row in rows
            if row["sites_without_closed_form"] and row["place"] == "wide"
        ),
    )


# --- batches, and what a batch may count ----------------------------------------------------------


def batches(study: Study) -> dict[str, Any]:
    """Batches down to one row; the KL per row, and no KL at all, which is what two slips come to."""
    sizes = study.sizes
    x, y = curve(sizes.rows, 0)
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
        posterior = bnn.fit(model, x, y, method, standardise=True)
        epistemic, aleatoric = spread(posterior, inside)
        rows.append(
            {
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
        study.say(f"{name}: ELBO {rows[-1]['elbo']:.2f}, error of the mean {rows[-1]['error_of_mean']:.3f}")
    study.tables["batches"] = rows
    unbiased = batch_gradients(study)
    study.judge(judge_batches(rows, unbiased, sizes.rows))
    study.judge(judge_kl_per_row(rows))
    study.judge(judge_no_kl(rows))
    return {"cases": shown, "x": x, "y": y}


def batch_gradients(study: Study) -> list[dict[str, Any]]:
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
    return found


def judge_batches(
    rows: Sequence[Mapping[str, Any]], unbiased: Sequence[Mapping[str, Any]], count: int
) -> Verdict:
    """Reproduced where gradients are unbiased (no z beyond 4.5) and the ELBO after batches of one row is that after
    all rows within two standard errors; corrected where gradients are unbiased and the ELBO is less by more, but not
    by a tenth of a nat for each of `count` rows.
    """
    fits = [row for row in rows if row["fit"].startswith("batches")]
    loss = fits[0]["elbo"] - fits[-1]["elbo"]
    error = math.hypot(fits[0]["elbo_se"], fits[-1]["elbo_se"])
    z = max(row["largest_z"] for row in unbiased)
    verdict = NOT_REPRODUCED
    if z < 4.5 and loss < 0.1 * count:
        verdict = REPRODUCED if loss <= 2.0 * error else CORRECTED
    return Verdict(
        "a batch may be small, even one row",
        verdict,
        f"largest z of {sum(row['coordinates'] for row in unbiased)} differences from the gradient of all "
        f"rows {z:.2f}, "
        f"with up to {max(row['variance_over_full'] for row in unbiased):.0f} times the variance; ELBO after fits "
        + ", ".join(f"in {row['fit']} {row['elbo']:.2f}" for row in fits)
        + f" (standard error up to {max(row['elbo_se'] for row in fits):.2f}): {loss:.2f} +- {error:.2f} nats less in "
        f"{fits[-1]['fit']}, at {fits[-1]['gradients'] / fits[0]['gradients']:.2g} of the gradients of rows"
        + (": the gradient is right, and its noise costs part of the bound" if verdict == CORRECTED else ""),
    )


def judge_kl_per_row(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Corrected where counting the KL once for each row loses the fit: twice the error of the mean."""
    right = next(row for row in rows if row["fit"].startswith("batches"))
    slip = next(row for row in rows if row["fit"].startswith("KL"))
    return Verdict(
        "ELBO = 1/M sum over rows of (log p(D_i, w_i) - log q(w_i))",
        CORRECTED if slip["error_of_mean"] > 2.0 * right["error_of_mean"] else NOT_REPRODUCED,
        "(N/B) sum of log p(y_i | x_i, w) - KL, the KL once; counted once per row it is N times too heavy, the "
        f"divergence falls from {right['complexity_cost']:.1f} to {slip['complexity_cost']:.2f} nats, and "
        f"the error of the "
        f"mean among the data rises from {right['error_of_mean']:.3f} to {slip['error_of_mean']:.3f}",
    )


def judge_no_kl(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Corrected where, without the terms of log q and log p in dL/dw, the epistemic spread is less than half."""
    right = next(row for row in rows if row["fit"].startswith("batches"))
    slip = next(row for row in rows if row["fit"].startswith("no gradient"))
    return Verdict(
        "dL/dw is the gradient of an ordinary network",
        CORRECTED if slip["epistemic_sd_inside"] < 0.5 * right["epistemic_sd_inside"] else NOT_REPRODUCED,
        "it holds the terms of log q and log p too; what is left beside it, the score of log q at a fixed "
        "draw, has mean "
        "zero, so that without them the descent is that of E_q[-log p(D | w)] alone: epistemic sd among the data "
        f"{slip['epistemic_sd_inside']:.4f} instead of {right['epistemic_sd_inside']:.4f}, divergence from the prior "
        f"{slip['complexity_cost']:.0f} nats instead of {right['complexity_cost']:.0f}",
    )


# --- priors ---------------------------------------------------------------------------------------


def compare_priors(study: Study) -> dict[str, Any]:
    """The same rows and network under the four priors: what they predict among the data and away from them."""
    sizes = study.sizes
    x, y = curve(sizes.rows, 0)
    inside, outside = grid(INSIDE), grid(OUTSIDE)
    rows, shown = [], {}
    for name in sizes.priors:
        prior = PRIORS[name]
        model = partial(homoscedastic, units=sizes.units, prior=prior)
        # At a joint mode the scales of a horseshoe are zero: its fit starts from the prior.
        start = {} if name != "horseshoe" else {"start": None}
        found = {
            "VI": bnn.fit(model, x, y, svi(study, **start), standardise=True),
            "NUTS": bnn.fit(model, x, y, nuts(study), standardise=True),
        }
        reference = referenced(study, f"prior: {name}", found["NUTS"])
        for method, posterior in found.items():
            low, high = posterior.predict(outside).interval(0.5)
            f = posterior.predictor(outside)[..., 0].reshape(-1, len(outside))
            centred = f - f.mean(0)
            rows.append(
                {
                    "prior": name,
                    "method": method,
                    "epistemic_sd_inside": spread(posterior, inside)[0],
                    "epistemic_sd_away": spread(posterior, outside)[0],
                    "mean_at_end": float(posterior.predict(outside[-1:]).mean[0]),
                    "iqr_away": float(np.mean(high - low)),
                    "kurtosis_away": float(np.mean((centred**4).mean(0) / (centred**2).mean(0) ** 2)),
                    "converged": "" if method == "VI" else str(reference is not None),
                }
                | gap(posterior.predict(inside), reference, inside, "inside_")
                | gap(posterior.predict(outside), reference, outside, "away_")
                | costs(posterior)
            )
            shown[name, method] = posterior.predict
            study.say(
                f"{name}, {method}: epistemic sd {rows[-1]['epistemic_sd_inside']:.3f} inside, "
                f"{rows[-1]['epistemic_sd_away']:.3f} away"
            )
    study.tables["priors"] = rows
    study.judge(judge_priors(rows))
    study.judge(judge_mixture(mixture_density(study)))
    return {"cases": shown, "x": x, "y": y}


def judge_priors(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where priors differ away from the data, by more than among them, in NUTS that converged and in VI.

    Differ: the largest epistemic sd is more than 1.5 times the smallest.
    """
    texts, differ = [], []
    for method in ("NUTS", "VI"):
        taken = [row for row in rows if row["method"] == method and row["converged"] != "False"]
        if len(taken) < 2:
            texts.append(f"{method}: {NO_REFERENCE}")
            continue
        ratio = {
            part: max(row[f"epistemic_sd_{part}"] for row in taken)
            / min(row[f"epistemic_sd_{part}"] for row in taken)
            for part in ("inside", "away")
        }
        differ.append(ratio["away"] > 1.5 and ratio["away"] > ratio["inside"])
        each = ", ".join(f"{row['prior']} {row['epistemic_sd_away']:.3f}" for row in taken)
        texts.append(
            f"{method}: epistemic sd away {each}; largest over smallest {ratio['away']:.2f} away, "
            f"{ratio['inside']:.2f} among the data"
        )
    return Verdict(
        "where epistemic uncertainty is high the prediction depends on the prior",
        REPRODUCED if differ and all(differ) else CORRECTED if any(differ) else NOT_REPRODUCED,
        "; ".join(texts),
    )


def mixture_density(study: Study) -> dict[str, float]:
    """log p(w) of the scale mixture at draws: the library's, by hand, and as printed, without the brackets."""
    from scipy.stats import norm

    x, y = standardised(*curve(study.sizes.rows, 0))
    rng = np.random.default_rng(0)
    prior = PRIORS["scale mixture"]
    with opened(partial(homoscedastic, units=study.sizes.units, prior=prior, bias=False), x, y) as problem:
        program = problem.program
        u = {site.name: rng.normal(size=(5, *site.unconstrained_shape)) for site in program.latents}
        library = problem.log_prior_draws(u) - norm.logpdf(u["noise"], -1.0, 1.0)
        others = [
            site.name for site in program.latents if site.name != "noise" and not site.name.endswith("weight")
        ]
    w = np.concatenate([value.reshape(5, -1) for name, value in u.items() if name != "noise"], axis=1)
    parts = [
        math.log(weight) + norm.logpdf(w, 0.0, scale)
        for weight, scale in zip(prior.weights, prior.scales, strict=True)
    ]
    brackets = np.logaddexp(*parts).sum(1)
    printed = np.logaddexp(parts[0].sum(1), parts[1].sum(1))
    return {
        "off_with_brackets": float(np.abs(library - brackets).max()),
        "off_without": float(np.abs(library - printed).max()),
        "sites_for_the_weight": float(len(others)),
    }


def judge_mixture(found: Mapping[str, float]) -> Verdict:
    """Corrected where the bracketed product is the library's to rounding, the other is not, and pi is no site."""
    right = found["off_with_brackets"] < 1e-9 < found["off_without"] and found["sites_for_the_weight"] == 0.0
    return Verdict(
        "p(w) = prod_i pi N(w_i; 0, s1^2) + (1 - pi) N(w_i; 0, s2^2), pi random in [0, 1]",
        CORRECTED if right else NOT_REPRODUCED,
        "the product is over the bracketed sum, one choice of the component for each weight: log p(w) then "
        "agrees with the "
        f"library's to {found['off_with_brackets']:.0e}; one choice for all weights is off by up to "
        f"{found['off_without']:.1f} nats; pi is a number that is fixed, not a random variable of the program",
    )


# --- estimators of the gradient -------------------------------------------------------------------


ESTIMATORS = ("plain", "local", "flipout")


def estimators(study: Study, fitted: Any) -> list[dict[str, Any]]:
    """Variance of the gradient over draws at fixed parameters and rows, and the time of one, for each estimator.

    fitted: a mean-field posterior of `homoscedastic` on Friedman's rows; its parameters, and those of a start.
    """
    sizes = study.sizes
    x, y = standardised(*friedman(sizes.friedman_rows, 0))
    model = partial(homoscedastic, units=sizes.friedman_units)
    rows: list[dict[str, Any]] = []
    q = fitted.approximation
    with opened(model, x, y) as problem:
        rng = np.random.default_rng(0)
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
                    found = gradients(problem, run, parameters, few, seed=index)
                    values[place, estimator] = found
                    row: dict[str, Any] = {"place": place, "batch": batch, "estimator": estimator}
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
            study.say(f"gradients of batches of {batch}: done")
    study.tables["estimators"] = rows
    study.judge(judge_local(rows))
    study.judge(judge_local_mean(rows))
    return rows


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


def judge_local(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Corrected where local reparameterisation lowers the variance at every batch of more than one row, as the claim
    that it has fewer parameters, or less to compute, is not what it is for."""
    local = _estimates(rows, "local")
    several = [row for row in local if row["batch"] > 1]
    lower = all(min(row["factor_loc"], row["factor_scale"]) > 1.0 for row in several)
    largest = max(row["batch"] for row in rows)
    at = {row["place"]: row for row in local if row["batch"] == largest}
    times = {
        estimator: _estimates(rows, estimator, place="fitted", batch=largest)[0]["milliseconds"]
        for estimator in ("plain", "local")
    }
    fitted = at["fitted"]
    parameters = {row["parameters"] for row in rows}
    text = "; ".join(
        f"batch {row['batch']}, {row['place']}: {row['factor_loc']:.1f} and {row['factor_scale']:.1f}"
        for row in local
    )
    return Verdict(
        "local reparameterisation lowers the amount of computation, of which more parameters are the cause",
        CORRECTED if lower and len(parameters) == 1 else NOT_REPRODUCED,
        f"it lowers the variance of the gradient, in means and in rho, by factors of {text}; the parameters of q are "
        f"{' or '.join(map(str, sorted(parameters)))} either way; random numbers for {largest} rows: "
        f"{fitted['random_numbers_needed']}, {_estimates(rows, 'plain')[0]['random_numbers_needed']} for one draw of "
        f"the weights, {fitted['random_numbers_one_draw_per_row']} for one per row; time of a gradient "
        f"{times['local'] / times['plain']:.1f} times the plain one (loaded machine; here the weights are "
        f"drawn as well)",
    )


def judge_local_mean(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where no mean over draws differs from the plain one by 5 standard errors, over all coordinates."""
    values = [
        row[f"largest_z_{kind}"]
        for name in ("local", "flipout")
        for row in _estimates(rows, name)
        for kind in ("loc", "scale")
    ]
    return Verdict(
        "local reparameterisation is the same objective",
        REPRODUCED if max(values) < 5.0 else NOT_REPRODUCED,
        f"largest difference of the mean gradient from the plain one, over {rows[0]['parameters']} coordinates and "
        f"{len(values)} cases: {max(values):.2f} standard errors",
    )


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
    study.judge(judge_roots(rows))
    return rows


def judge_roots(rows: Sequence[Mapping[str, float]]) -> Verdict:
    """Corrected where weights and library are within 4.5 standard errors of the root outside of the sum."""
    right = all(
        abs(row[name] / row["sd_root_outside"] - 1.0) < 4.5 * row["relative_error"]
        for row in rows
        for name in ("sd_by_weights", "sd_by_library")
    )
    wrong = rows[-1]["sd_root_inside"] / rows[-1]["sd_by_weights"]
    return Verdict(
        "o_j = sum_i (mu_ji a_i + eps_j sqrt(sigma_ji^2 a_i^2)), the output of the activation",
        CORRECTED if right and wrong > 1.5 else NOT_REPRODUCED,
        "the root is outside of the sum, and o is what enters the activation; with it inside, the sd of o "
        "is too large by "
        + ", ".join(
            f"{row['sd_root_inside'] / row['sd_by_weights']:.2f} for {row['inputs']} inputs" for row in rows
        )
        + "; outside, the largest difference from drawn weights is "
        f"{100.0 * max(abs(row['sd_root_outside'] / row['sd_by_weights'] - 1.0) for row in rows):.1f} %",
    )


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


def dropout(study: Study) -> dict[str, Any]:
    """Variational dropout on 20 inputs of which 5 matter: what is pruned, and what pruning costs."""
    sizes = study.sizes
    x, y = friedman(sizes.friedman_rows, 0)
    xt, yt = friedman(sizes.test_rows, 1)
    rows, found = [], {}
    for name, prior in {"log-uniform": priors.LogUniform(), "Gaussian, sd 1": UNIT}.items():
        # From the prior: a mode of 20 units fits noise with all of its weights, and q would have to leave it.
        method = svi(study, steps=sizes.friedman_steps, learning_rate=0.01, estimator="local", start=None)
        posterior = bnn.fit(
            partial(homoscedastic, units=sizes.friedman_units, prior=prior), x, y, method, standardise=True
        )
        q = posterior.approximation
        ratio = log_alpha(q)
        gone = {site: value > THRESHOLD for site, value in ratio.items()}
        live = ~gone["output.weight"][:, 0]
        first = gone["hidden0.weight"][:, live]
        thin = replace(posterior, approximation=pruned(q))
        rows.append(
            {
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
            f"{name}: {rows[-1]['pruned']} of {rows[-1]['weights']} pruned, RMSE {rows[-1]['rmse']:.3f}"
        )
    study.tables["dropout"] = rows
    study.judge(judge_dropout(rows))
    study.judge(judge_shared(shared(study)))
    return found


def judge_dropout(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where it prunes at least half of the weights at no more than 5 % of the RMSE, and of those into units
    that are left more from irrelevant inputs than from relevant ones."""
    row = next(each for each in rows if each["prior"] == "log-uniform")
    other = next(each for each in rows if each["prior"] != "log-uniform")
    good = (
        row["pruned_share_irrelevant_inputs"] > row["pruned_share_relevant_inputs"]
        and 2 * row["pruned"] >= row["weights"]
        and row["rmse_pruned"] < 1.05 * row["rmse"]
    )
    return Verdict(
        "variational dropout, a prior uniform in log |w|, says which weights are not needed",
        REPRODUCED if good else NOT_REPRODUCED,
        f"log alpha > {THRESHOLD:g} for {row['pruned']} of {row['weights']} weights; {row['live_units']} units "
        f"remain, of whose weights {100.0 * row['pruned_share_irrelevant_inputs']:.0f} % from irrelevant inputs "
        f"and {100.0 * row['pruned_share_relevant_inputs']:.0f} % from relevant ones are pruned; test RMSE "
        f"{row['rmse']:.3f}, without them {row['rmse_pruned']:.3f} (noise 1); with N(0, 1) and the same steps "
        f"{other['pruned']} of {other['weights']}, RMSE {other['rmse']:.3f}, without them {other['rmse_pruned']:.3f}",
    )


def shared(study: Study) -> dict[str, str]:
    """What each estimator says to a convolution, and to variational dropout in it."""
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
    study.numbers["shared"] = found
    return found


def judge_shared(found: Mapping[str, str]) -> Verdict:
    """Corrected where local is refused for shared weights and the others are not: these are the general ones."""
    refused = {name for name, said in found.items() if said.startswith("refused")}
    return Verdict(
        "local reparameterisation is for unshared weights only; variational dropout is the general method",
        CORRECTED if refused == {"local"} else NOT_REPRODUCED,
        f"a convolution: local is refused; what serves shared weights is another estimator, plain "
        f"({found['plain']}) or "
        f"flipout ({found['flipout']}); variational dropout is a prior with a factorised q, for which any "
        f"of them serves",
    )


# --- more rows ------------------------------------------------------------------------------------


def more_rows(study: Study) -> list[dict[str, Any]]:
    """Costs and the two uncertainties as rows are added: VI in batches, NUTS where it is affordable."""
    sizes = study.sizes
    inside = grid(INSIDE)
    model = partial(homoscedastic, units=sizes.units)
    rows = []
    for count in sizes.row_counts:
        for seed in range(sizes.row_seeds):
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
            if count <= sizes.sampled_rows and seed == 0:
                fits["NUTS"] = bnn.fit(model, x, y, nuts(study), seed=seed, standardise=True)
                reference = referenced(study, f"{count} rows", fits["NUTS"])
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
                        "converged": str(reference is not None) if name == "NUTS" else "",
                    }
                    | gap(posterior.predict(inside), reference, inside)
                )
                study.say(
                    f"{count} rows, {name}: epistemic {epistemic:.4f}, aleatoric {aleatoric:.4f}, "
                    f"{work:.2g} row gradients"
                )
    study.tables["rows"] = rows
    # A draw of a tree of depth d takes 2^d gradients at most, in the warm-up as after it.
    most = sizes.chains * 2 * sizes.draws * 2**sizes.tree_depth
    study.judge(judge_cost(rows, most))
    study.judge(judge_small(rows, most))
    study.judge(judge_shrinks(rows))
    return rows


def slope(counts: Sequence[float], values: Sequence[float]) -> float:
    """Of log value on log count."""
    return float(np.polyfit(np.log(counts), np.log(values), 1)[0])


def slope_error(counts: Sequence[float], values: Sequence[float]) -> float:
    """Its standard error; of two points it is not known (infinite)."""
    x, y = np.log(counts), np.log(values)
    if len(x) < 3:
        return math.inf
    rest = y - np.polyval(np.polyfit(x, y, 1), x)
    return float(math.sqrt((rest**2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum()))


def _column(rows: Sequence[Mapping[str, Any]], method: str, column: str) -> tuple[list[float], list[float]]:
    taken = [row for row in rows if row["method"] == method and row["converged"] != "False"]
    return [row["rows"] for row in taken], [row[column] for row in taken]


def _of_the_cap(rows: Sequence[Mapping[str, Any]], most: float) -> str:
    """Gradients of NUTS as a share of the most that its trees allow."""
    counts, cost = _column(rows, "NUTS", "row_gradients")
    shares = ", ".join(f"{each / count / most:.2f}" for count, each in zip(counts, cost, strict=True))
    return f"trees of NUTS were cut: its gradients are {shares} of the {most:.3g} that their largest depth allows"


def judge_cost(rows: Sequence[Mapping[str, Any]], most: float) -> Verdict:
    """Reproduced where NUTS takes more than twice the seconds of VI at each count, by a factor that grows with it.

    Gradients of rows are told and have no say: those of VI are its steps times its batch, whatever N is.
    most: gradients that NUTS may take at most.
    """
    claim = "VI is much cheaper than MCMC and scales to many rows (measured: seconds)"
    ratios, seconds = {}, {}
    for name, found in (("row_gradients", ratios), ("seconds", seconds)):
        for count, cost in zip(*_column(rows, "NUTS", name), strict=True):
            own = [row[name] for row in rows if row["rows"] == count and row["method"] == "VI"]
            found[count] = cost / float(np.mean(own))
    if len(ratios) < 2:
        return Verdict(claim, NOT_RUN, f"NUTS converged at {len(ratios)} of the numbers of rows")
    good = min(seconds.values()) > 2.0 and seconds[max(seconds)] > seconds[min(seconds)]
    growth = {name: slope(*_column(rows, name, "seconds")) for name in ("VI", "NUTS")}
    gaps = "; ".join(
        f"{row['rows']} rows: mean off by {row['mean_gap']:.2f} sd (floor {row['mean_gap_floor']:.2f}), sd ratio "
        f"{row['sd_ratio']:.2f}"
        for row in rows
        if row["method"] == "VI" and row["mean_gap"] != NO_REFERENCE
    )
    return Verdict(
        claim,
        REPRODUCED if good else NOT_REPRODUCED,
        "seconds of NUTS over those of VI without its start: "
        + ", ".join(f"{ratio:.1f} at {count} rows" for count, ratio in seconds.items())
        + f"; they grow with N as N^{growth['VI']:.2f} for VI, to {max(row['rows'] for row in rows)} rows, and "
        f"N^{growth['NUTS']:.2f} for NUTS, to {max(seconds)} (orders of magnitude). Gradients of rows of NUTS over "
        "those of VI: "
        + ", ".join(f"{ratio:.0f} at {count} rows" for count, ratio in ratios.items())
        + ", which is by construction: a fixed number of steps in batches costs the same at any N, and "
        f"{_of_the_cap(rows, most)}. What VI costs in return: {gaps}",
    )


def judge_small(rows: Sequence[Mapping[str, Any]], most: float) -> Verdict:
    """Reproduced where NUTS converges at the fewest rows and its seconds grow at least like N^0.8."""
    claim = "MCMC is for small data: each gradient takes all rows, and its seconds grow with them"
    counts, cost = _column(rows, "NUTS", "row_gradients")
    if len(counts) < 2:
        return Verdict(claim, NOT_RUN, f"NUTS converged at {len(counts)} of the numbers of rows")
    seconds = _column(rows, "NUTS", "seconds")[1]
    growth = slope(counts, seconds)
    lost = [str(row["rows"]) for row in rows if row["method"] == "NUTS" and row["converged"] == "False"]
    fewest = min(row["rows"] for row in rows)
    return Verdict(
        claim,
        REPRODUCED if min(counts) == fewest and growth > 0.8 else NOT_REPRODUCED,
        "converged at "
        + ", ".join(
            f"{count} rows with {each:.1e} gradients of rows in {time:.0f} s"
            for count, each, time in zip(counts, cost, seconds, strict=True)
        )
        + (f", not at {', '.join(lost)}" if lost else "")
        + f"; seconds grow as N^{growth:.2f} over {len(counts)} numbers of rows (an order of magnitude). How many "
        f"gradients a posterior needs is not shown: {_of_the_cap(rows, most)}",
    )


def judge_shrinks(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where the epistemic sd falls faster than N^-0.25 and the aleatoric one is the truth at each number of
    rows, in VI and in NUTS; corrected where both fall so and the aleatoric one is the truth in NUTS alone.

    The truth: within a tenth of it, or within two standard errors of a standard deviation from so many rows. All
    numbers are means over seeds.
    """
    claim = "epistemic uncertainty falls as rows are added, aleatoric does not"
    texts, falls, stays, off = [], [], {}, {}
    for method in ("VI", "NUTS"):
        counts, epistemic = _column(rows, method, "epistemic_sd")
        aleatoric = _column(rows, method, "aleatoric_sd")[1]
        levels = sorted(set(counts))
        if len(levels) < 2:
            texts.append(f"{method}: {NO_REFERENCE}")
            continue
        of = {
            count: [
                float(np.mean([each for at, each in zip(counts, values, strict=True) if at == count]))
                for values in (epistemic, aleatoric)
            ]
            for count in levels
        }
        falls.append(slope(counts, epistemic) < -0.25)
        off[method] = of[levels[0]][1] / LEVEL_NOISE - 1.0
        stays[method] = all(
            abs(of[count][1] / LEVEL_NOISE - 1.0)
            <= max(0.1, 2.0 / math.sqrt(2.0 * count * counts.count(count)))
            for count in levels
        )
        error = slope_error(counts, aleatoric)
        told = f" +- {error:.2f}" if math.isfinite(error) else ", of two points"
        texts.append(
            f"{method}, {levels[0]:.0f} to {levels[-1]:.0f} rows: epistemic sd {of[levels[0]][0]:.4f} to "
            f"{of[levels[-1]][0]:.4f} (N^{slope(counts, epistemic):.2f}), aleatoric "
            + ", ".join(f"{of[count][1]:.4f}" for count in levels)
            + f" (N^{slope(counts, aleatoric):.2f}{told})"
        )
    verdict = NOT_REPRODUCED
    if falls and all(falls) and all(stays.values()):
        verdict = REPRODUCED
    elif falls and all(falls) and stays.get("NUTS"):
        verdict = CORRECTED
        texts.append(
            "at the fewest rows the noise is off by "
            + " and ".join(f"{100.0 * each:+.0f} % in {name}" for name, each in off.items())
        )
    return Verdict(claim, verdict, f"{'; '.join(texts)}; the truth is {LEVEL_NOISE:g} and N^-0.5")


# --- an average over networks ---------------------------------------------------------------------


def averages(study: Study, found: Mapping[tuple[str, str], Any]) -> list[dict[str, Any]]:
    """Test log score of predictions from 1, 2, ... networks, and of the one at the mean of the weights."""
    sizes = study.sizes
    xt, yt = curve(sizes.test_rows, 1)
    rows = []
    for name in ("VI", "VI, full rank", "NUTS"):
        posterior = found["curve", "homoscedastic"][name]
        prediction = posterior.predict(xt)
        density = prediction.component_log_prob(yt)
        rng = np.random.default_rng(0)
        for count in sizes.averaged:
            if count > len(density):
                continue
            values = []
            for _ in range(20):
                picked = density[rng.choice(len(density), count, replace=False)]
                values.append(float(np.mean(np.logaddexp.reduce(picked, axis=0) - math.log(count))))
            rows.append(
                {
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
                    "method": "VI, network at the mean",
                    "networks": 1,
                    "log_score": scores.log_score(centre.predict(xt), yt),
                    "sd": 0.0,
                }
            )
    study.tables["averages"] = rows
    study.judge(judge_averages(rows))
    return rows


def judge_averages(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where the average over VI beats the one network at the mean of its weights by 0.01 nats per row.

    That it beats the mean of its own networks is Jensen's inequality, which holds whatever they are: told, not judged.
    """
    texts, averages = [], {}
    for name in dict.fromkeys(row["method"] for row in rows if "mean" not in row["method"]):
        own = sorted((row for row in rows if row["method"] == name), key=lambda row: row["networks"])
        averages[name] = own[-1]["log_score"]
        texts.append(
            f"{name}: {own[0]['log_score']:.3f} for one, {own[-1]['log_score']:.3f} for {own[-1]['networks']}"
        )
    centre = next(row["log_score"] for row in rows if "mean" in row["method"])
    return Verdict(
        "a Bayesian network is an ensemble: its average over networks beats one network",
        REPRODUCED if averages["VI"] > centre + 0.01 else NOT_REPRODUCED,
        f"test log score per row of VI {averages['VI']:.3f}, of the one network at the mean of q {centre:.3f}; an "
        f"average is above its own networks by Jensen's inequality, as it is here: {'; '.join(texts)} (one data set)",
    )


# --- what needs numbers only ----------------------------------------------------------------------


def small_facts(study: Study) -> None:
    """softplus(rho) as the standard deviation, the number of parameters, and where standard normals lie."""
    x, y = standardised(*curve(study.sizes.rows, 0))
    with opened(partial(homoscedastic, units=study.sizes.units), x, y) as problem:
        chosen = problem.system
        loc = {site.name: np.zeros(site.unconstrained_shape) for site in problem.program.latents}
        guide, parameters = guide_at(problem, loc, 0.3)
        rho = np.concatenate([value for name, value in parameters.items() if not name.endswith("loc")])
        deviations = np.concatenate(
            [np.sqrt(np.asarray(value)).reshape(-1) for value in guide.variance(parameters).values()]
        )
        off = float(np.abs(np.log1p(np.exp(rho)) - deviations).max())
        weights = problem.program.parameter_count
        count = sum(np.size(value) for value in parameters.values())
        like = chosen.asarray(np.zeros(1))
        normal = chosen.to_numpy(chosen.randomness(chosen.seeds(0, 1)[0]).normal((100_000,), like))
    outside = float(np.mean((normal < 0.0) | (normal > 1.0)))
    study.judge(judge_doubled(weights, count, off))
    study.judge(judge_normal(outside))
    study.judge(
        Verdict(
            "the ELBO can also give the prior, one that depends on the training set",
            NOT_RUN,
            "that is empirical Bayes, for which there is a study of its own",
        )
    )


def judge_doubled(weights: int, parameters: int, off: float) -> Verdict:
    return Verdict(
        "w = mu + softplus(rho) eps has twice as many parameters as w",
        REPRODUCED if parameters == 2 * weights and off < 1e-12 else NOT_REPRODUCED,
        f"{parameters} for {weights} random variables (weights, biases, noise); standard deviations are "
        f"softplus(rho) to {off:.0e}",
    )


def judge_normal(outside: float) -> Verdict:
    """Corrected where the share outside of [0, 1] is a normal's, 0.6587, within 4.5 errors of 100000 draws."""
    expected = 0.6587
    error = math.sqrt(expected * (1.0 - expected) / 100_000)
    return Verdict(
        "the elements of eps ~ N(0, I) lie in [0, 1]",
        CORRECTED if abs(outside - expected) < 4.5 * error else NOT_REPRODUCED,
        f"{100.0 * outside:.1f} % of 100000 draws do not, and 65.9 % is what a normal has",
    )


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
            note = " (not converged)" if own["converged"] == "False" else ""
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
    figure, axes = panels(14.0, 4.4, 3)
    for each, kind, text in ((axes[0, 0], "loc", "means"), (axes[0, 1], "scale", "rho")):
        for estimator, colour in zip(ESTIMATORS, (BLACK, BLUE, ORANGE), strict=True):
            for place, style in (("start", "dotted"), ("fitted", "solid")):
                own = _estimates(rows, estimator, place=place)
                each.plot(
                    [row["batch"] for row in own],
                    [row[f"variance_{kind}"] for row in own],
                    marker="o",
                    markersize=4,
                    color=colour,
                    linestyle=style,
                    label=f"{estimator}, {place}",
                )
        each.set(xscale="log", yscale="log", xlabel="rows of the batch")
        each.set_title(f"variance of the gradient in {text}", fontsize=10)
    axes[0, 0].legend(frameon=False, fontsize=8)
    last = axes[0, 2]
    inputs = [row["inputs"] for row in root]
    last.plot(inputs, [row["sd_by_weights"] for row in root], "o", color=BLACK, label="drawn weights")
    last.plot(
        inputs, [row["sd_by_library"] for row in root], "x", color=BLUE, label="local reparameterisation"
    )
    last.plot(inputs, [row["sd_root_outside"] for row in root], color=GREEN, label="root outside of the sum")
    last.plot(
        inputs,
        [row["sd_root_inside"] for row in root],
        color=VERMILION,
        linestyle="dashed",
        label="root inside (slip)",
    )
    last.set(xscale="log", yscale="log", xlabel="inputs of the map")
    last.set_title("sd of a pre-activation", fontsize=10)
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
    centre = next(row["log_score"] for row in rows if "mean" in row["method"])
    each.axhline(centre, color=PINK, linestyle="dashed", label="VI, network at the mean")
    each.set(xscale="log", xlabel="networks averaged", ylabel="test log score per row")
    each.legend(frameon=False, fontsize=8)
    figure.savefig(path)


# --- all of it ------------------------------------------------------------------------------------


def main(tiny: bool = False, out: str | Path | None = None) -> Study:
    """Run the study and write tables, figures and verdicts to `out`.

    Without `out` a full run writes to results/variational_overview beside this file, a tiny one to a temporary folder.
    """
    study = Study.begin(TINY if tiny else FULL, "variational_overview", tiny, out)
    small_facts(study)
    root = roots(study)
    bounds(study)
    thin = dropout(study)
    draw_dropout(study.out / "dropout.png", thin)
    rates = estimators(study, thin["Gaussian, sd 1"][0])
    draw_estimators(study.out / "estimators.png", rates, root)
    draw_slips(study.out / "batches.png", batches(study))
    found = noise(study)
    draw_noise(study.out / "noise.png", found)
    draw_beside(study.out / "beside.png", beside(study, found))
    draw_averages(study.out / "averages.png", averages(study, found))
    study.write()
    shaped = compare_priors(study)
    draw_priors(study.out / "priors.png", shaped, study.tables["priors"])
    study.write()
    draw_rows(study.out / "rows.png", more_rows(study))
    study.write()
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    options = vars(command_line(__doc__, "cache").parse_args())
    # Data sets and seeds share their programs: compiled once, they are read from disk by all others.
    bnn.enable_compilation_cache(options.pop("cache"))
    main(**options)
