"""The evidence framework for neural networks: how much regularisation, learnt from the training data alone.

Source: C. M. Bishop, Pattern Recognition and Machine Learning (2006), section 5.7, after D. J. C. MacKay (1992), "The
evidence framework applied to classification networks", Neural Computation 4; retold, with proofs, in a Japanese text
whose slips are corrected here. With the prior w ~ N(0, 1 / alpha), E = -log p(D | w) + alpha w'w / 2, H the Hessian of
-log p(D | w) and A = H + alpha I at the mode,

    ln p(D | alpha) = -E - 1/2 ln|A| + W/2 ln alpha,
    alpha = gamma / w'w,    gamma = sum_i lambda_i / (alpha + lambda_i),

for numbers also + N/2 ln beta - N/2 ln 2 pi, 1 / beta = SSE / (N - gamma) and the variance 1 / beta + g' A^-1 g, and
for classes p = sigmoid(kappa(s^2) a_MAP) with s^2 = b' A^-1 b, kappa(s^2) = (1 + pi s^2 / 8)^(-1/2). Modes are found by
Adam and L-BFGS, where the source has conjugate gradients.

Every model is written in the language and fitted by `bnn.Laplace`; what it says is held to the formulas above, written
a second time in NumPy. Besides the source's claims: what its fixed point leaves out, against the maximum of the
evidence with the mode found again; a precision for each layer; the exact Hessian; the evidence against that of
tempered sequential Monte Carlo; and the gap of every choice to NUTS on the same model.

    python comparisons/evidence_framework.py [--tiny] [--out DIR] [--cache DIR]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    REPRODUCED,
    VERMILION,
    Study,
    Verdict,
    command_line,
    judge_better,
    paired,
    panels,
)

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.core.errors import CurvatureError

# What stands for maximum likelihood: a prior of standard deviation 100.
FLAT = 1e-4
VARIATIONAL = {"normal": "mean-field VI at that alpha", "fullrank": "full-rank VI at that alpha"}
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
ALL = "prior_factor/all"
NO_REFERENCE = "no reference"
# What a fit warns of where its alternation ended at no optimum of the evidence.
UNSETTLED = ("the alternation stopped", "had not settled")


@dataclass(frozen=True)
class Sizes:
    """How much is computed. Rows and units are the study's; the rest trades Monte-Carlo error for time."""

    rows: int = 60
    test_rows: int = 2000
    units: int = 8
    curve_rows: int = 30
    curve_units: int = 5
    seeds: int = 12
    curve_seeds: int = 8
    softmax_seeds: int = 4
    starts: int = 8
    alphas: tuple[float, ...] = (0.004, 0.01, 0.03, 0.06, 0.1, 0.17, 0.3, 0.55, 1.0, 3.0)
    modes: int = 2
    tunes: tuple[str, ...] = ("layer", "tensor")
    small_units: int = 3
    small_modes: int = 4
    small_alphas: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0)
    particles: int = 1000
    moves: int = 25
    runs: int = 6
    steps: int = 4000
    draws: int = 1000
    chains: int = 4
    grid: int = 161


FULL = Sizes()
TINY = Sizes(
    test_rows=200,
    units=3,
    curve_rows=12,
    curve_units=2,
    seeds=2,
    curve_seeds=2,
    softmax_seeds=0,
    starts=2,
    alphas=(),
    modes=1,
    tunes=("layer",),
    small_alphas=(),
    particles=100,
    moves=3,
    runs=3,
    steps=100,
    draws=50,
    chains=2,
    grid=41,
)


# --- models ---------------------------------------------------------------------------------------


def two_classes(x: Any, y: Any = None, *, units: int = 8, precision: float = 1.0) -> None:
    """y ~ Bernoulli(sigmoid(a(x, w))), a: `units` tanh units, every weight and bias N(0, 1 / precision)."""
    a = bnn.mlp(x, [units, 1], activation="tanh", prior=priors.Normal(0.0, precision**-0.5))
    bnn.observe(y, a, likelihoods.Bernoulli())


def two_classes_with_scale(x: Any, y: Any = None, *, units: int = 8, spread: float = 10.0) -> None:
    """The same with alpha = scale^-2 sampled, log scale ~ N(0, spread^2): flat over log alpha for a large spread."""
    scale = bnn.sample("scale", dist.LogNormal(0.0, spread))
    a = bnn.mlp(x, [units, 1], activation="tanh", prior=priors.Normal(0.0, scale))
    bnn.observe(y, a, likelihoods.Bernoulli())


def several_classes(
    x: Any, y: Any = None, *, units: int = 8, classes: int = 3, precision: float = 1.0
) -> None:
    """y ~ Categorical(softmax(a(x, w)))."""
    a = bnn.mlp(x, [units, classes], activation="tanh", prior=priors.Normal(0.0, precision**-0.5))
    bnn.observe(y, a, likelihoods.Categorical())


def squared_error(x: Any, y: Any = None, *, units: int = 8, precision: float = 1.0) -> None:
    """What the source's proof for classes starts from: y ~ N(sigmoid(a(x, w)), 1). Labels are not normal."""
    a = bnn.mlp(x, [units, 1], activation="tanh", prior=priors.Normal(0.0, precision**-0.5))
    bnn.observe(y, ops.sigmoid(a), likelihoods.Gaussian(1.0))


def curve(x: Any, y: Any = None, *, units: int = 5, precision: float = 1.0, noise: float = 0.3) -> None:
    """y ~ N(f(x, w), noise^2): regression with one hidden layer of tanh units."""
    f = bnn.mlp(x, [units, 1], activation="tanh", prior=priors.Normal(0.0, precision**-0.5))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


# --- data of known truth ----------------------------------------------------------------------------

# Two components for each class, weights 1/2: the optimal boundary bends, and its error is not zero.
CENTRES = np.array([[[-1.3, -0.3], [0.9, 0.9]], [[-0.4, 1.1], [0.7, -0.7]]])
WIDTH = 0.55
THREE = np.array([[[-1.2, 0.0], [-1.2, 0.0]], [[0.6, 1.0], [0.6, 1.0]], [[0.6, -1.0], [0.6, -1.0]]])


def mixture(rows: int, seed: int, centres: np.ndarray = CENTRES) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, 2) and labels (N,): class and component uniformly, then a normal of standard deviation WIDTH."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, len(centres), rows)
    component = rng.integers(0, centres.shape[1], rows)
    return centres[y, component] + WIDTH * rng.normal(size=(rows, 2)), y


def optimal_logit(x: np.ndarray) -> np.ndarray:
    """log p(class 1 | x) - log p(class 0 | x), (N,): zero is the optimal boundary."""
    square = ((x[:, None, None, :] - CENTRES) ** 2).sum(-1) / (2.0 * WIDTH**2)
    density = np.logaddexp.reduce(-square, axis=2)
    return density[:, 1] - density[:, 0]


NOISE = 0.2


def sine(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """y = sin(2 x) + noise at x in [-2, -0.5] and [0.5, 2]: a gap in the middle, nothing outside."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.5, 2.0, rows) * np.where(np.arange(rows) % 2, 1.0, -1.0)
    return x[:, None], np.sin(2.0 * x) + NOISE * rng.normal(size=rows)


# --- the formulas by hand -----------------------------------------------------------------------------


def output_and_gradient(weights: Mapping[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a (N,) of one hidden layer of tanh, and b = da/dw (N, W), weights in the order of the program."""
    hidden = np.tanh(x @ weights["hidden0.weight"] + weights["hidden0.bias"])
    out = weights["output.weight"][:, 0]
    slope = (1.0 - hidden**2) * out
    inner = (x[:, :, None] * slope[:, None, :]).reshape(len(x), -1)
    a = hidden @ out + weights["output.bias"]
    return a, np.concatenate([inner, slope, hidden, np.ones((len(x), 1))], axis=1)


def sigmoid(a: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    return expit(a)


def kappa(variance: np.ndarray) -> np.ndarray:
    return 1.0 / np.sqrt(1.0 + np.pi * variance / 8.0)


def curve_evidence(
    weights: Mapping[str, np.ndarray], x: np.ndarray, y: np.ndarray, alpha: float, beta: float
) -> dict[str, float]:
    """ln p(D | alpha, beta) of regression by the source's last line, gamma, and what its updates would give."""
    f, g = output_and_gradient(weights, x)
    flat = np.concatenate([value.reshape(-1) for value in weights.values()])
    eigenvalues = np.linalg.eigvalsh(beta * g.T @ g)
    sse, square = float(((f - y) ** 2).sum()), float(flat @ flat)
    gamma = float((eigenvalues / (alpha + eigenvalues)).sum())
    size, rows = len(flat), len(y)
    log_evidence = (
        -0.5 * beta * sse
        - 0.5 * alpha * square
        - 0.5 * np.log(alpha + eigenvalues).sum()
        + 0.5 * size * math.log(alpha)
        + 0.5 * rows * math.log(beta)
        - 0.5 * rows * math.log(2.0 * math.pi)
    )
    return {
        "log_evidence": float(log_evidence),
        "gamma": gamma,
        "alpha": gamma / square,
        "beta": (rows - gamma) / sse,
    }


def log_symmetries(units: int) -> float:
    """ln(M!) + M ln 2: hidden tanh units can be permuted and turned in sign."""
    return math.lgamma(units + 1) + units * math.log(2.0)


def log_images(weights: Mapping[str, np.ndarray], tolerance: float = 1e-3) -> tuple[float, int]:
    """Log number of DIFFERENT images of a mode under those symmetries, and how many of its units differ.

    A symmetry that maps the mode to itself makes no image: k units that are equal up to sign count k! fewer, and d
    units that are zero d! 2^d fewer. With all units different it is ln(M!) + M ln 2.
    """
    units = np.vstack(
        [weights["hidden0.weight"], weights["hidden0.bias"][None], weights["output.weight"].T]
    ).T
    limit = tolerance * np.abs(units).max()
    groups: list[list[int]] = []
    for index, unit in enumerate(units):
        for group in groups:
            other = units[group[0]]
            if min(np.abs(unit - other).max(), np.abs(unit + other).max()) <= limit:
                group.append(index)
                break
        else:
            groups.append([index])
    lost = 0.0
    for group in groups:
        lost += math.lgamma(len(group) + 1)
        if np.abs(units[group[0]]).max() <= limit:
            lost += len(group) * math.log(2.0)
    return log_symmetries(len(units)) - lost, len(groups)


# --- the evidence by tempered sequential Monte Carlo --------------------------------------------------------


@dataclass(frozen=True)
class Tempered:
    """log Z, its standard error over independent runs, and the temperatures (inverse, from 0 to 1)."""

    log_evidence: float
    error: float
    ladder: tuple[float, ...]


def tempered_smc(
    posterior: Any, precision: float, *, particles: int, moves: int, runs: int, seed: int = 0
) -> Tempered:
    """log p(D) of a model whose latents are all N(0, 1 / precision), from the library's own log densities.

    Particles from the prior pass through p(w) p(D | w)^t, t from 0 to 1: weights p(D | w)^(t' - t), resampling, then
    `moves` steps of w -> sqrt(1 - s^2) w + s xi, xi from the prior, which leaves the prior invariant and is
    accepted with the tempered likelihood ratio (Neal 1998). The product of mean weights is unbiased for Z when
    ladder and steps are fixed (Del Moral, Doucet and Jasra 2006): a first run, which is thrown away, fixes them
    (effective sample size of one half; acceptance of 0.3); `runs` others give log mean Z and its standard error.
    """
    shapes = {name: value.shape for name, value in posterior.approximation.centre().items()}
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    rng = np.random.default_rng(seed)

    def log_likelihood(w: np.ndarray) -> np.ndarray:
        u, start = {}, 0
        for name, shape in shapes.items():
            stop = start + int(np.prod(shape))
            u[name] = w[:, start:stop].reshape(len(w), *shape)
            start = stop
        return posterior.log_joint(u) - posterior.log_prior(u)

    def draw() -> np.ndarray:
        return rng.normal(size=(particles, size)) * precision**-0.5

    def once(
        ladder: list[float] | None, widths: list[float] | None
    ) -> tuple[float, list[float], list[float]]:
        w = draw()
        likelihood = log_likelihood(w)
        t, total, temperatures, used, width = 0.0, 0.0, [0.0], [], 0.5
        while t < 1.0:
            following = _next(likelihood, t) if ladder is None else ladder[len(temperatures)]
            increments = (following - t) * likelihood
            largest = increments.max()
            each = np.exp(increments - largest)
            total += largest + math.log(each.mean())
            # Systematic resampling.
            places = (rng.uniform() + np.arange(particles)) / particles
            chosen = np.minimum(np.searchsorted(np.cumsum(each) / each.sum(), places), particles - 1)
            w, likelihood, t = w[chosen], likelihood[chosen], following
            if widths is not None:
                width = widths[len(used)]
            for _ in range(moves):
                proposed = math.sqrt(1.0 - width**2) * w + width * draw()
                value = log_likelihood(proposed)
                accepted = np.log(rng.uniform(size=particles)) < t * (value - likelihood)
                w[accepted], likelihood[accepted] = proposed[accepted], value[accepted]
                if widths is None:
                    width = min(0.99, width * math.exp(accepted.mean() - 0.3))
            temperatures.append(t)
            used.append(width)
        return total, temperatures, used

    _, ladder, widths = once(None, None)
    found = np.array([once(ladder, widths)[0] for _ in range(runs)])
    ratios = np.exp(found - found.max())
    error = ratios.std(ddof=1) / ratios.mean() / math.sqrt(runs)
    return Tempered(float(found.max() + math.log(ratios.mean())), float(error), tuple(ladder))


def _next(likelihood: np.ndarray, t: float) -> float:
    """The next inverse temperature: where the effective sample size falls to one half, by bisection."""

    def effective(step: float) -> float:
        weights = np.exp(step * (likelihood - likelihood.max()))
        return float(weights.sum() ** 2 / (weights**2).sum())

    if effective(1.0 - t) >= 0.5 * len(likelihood):
        return 1.0
    low, high = 0.0, 1.0 - t
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if effective(middle) >= 0.5 * len(likelihood) else (low, middle)
    return t + high


# --- scores and fits ------------------------------------------------------------------------------------


def log_score(p: np.ndarray, y: np.ndarray) -> float:
    """Mean log probability of the labels; p (N,) of class 1. A certain mistake is minus infinity, and is said."""
    return float(np.mean(each_log_score(p, y)))


def each_log_score(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The same row by row; p (..., N)."""
    return np.log(np.where(y == 1, p, 1.0 - p))


def log_score_of_logits(a: np.ndarray, y: np.ndarray) -> float:
    """The mean from logits, without rounding p to 0 or 1: a network fitted by maximum likelihood is that sure."""
    return float(np.mean(-np.logaddexp(0.0, np.where(y == 1, -a, a))))


def error(a: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean((a > 0.0) != (y == 1)))


class Rounds:
    """A progress that keeps what the alternation says of each round."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.change = math.inf
        self.listening = False

    def task(self, title: str, total: int) -> Rounds:
        self.listening = title == "evidence"
        return self

    def update(self, done: int, **figures: float) -> None:
        if self.listening:
            self.values.append(float(figures["log_evidence"]))
            self.change = float(figures["change"])

    def close(self) -> None:
        self.listening = False


def centre(posterior: Any) -> dict[str, np.ndarray]:
    """The weights at the mode, in the order of the program; a sampled scale is left out."""
    return {name: value for name, value in posterior.approximation.centre().items() if name != "scale"}


def evidence(study: Study, **choices: Any) -> Any:
    """Laplace with a precision tuned by the evidence, in alternation with training, unless chosen otherwise."""
    defaults = {"tune": "global", "during_training": True}
    return laplace(study, **(defaults | choices))


def laplace(study: Study, **choices: Any) -> Any:
    """Laplace in the system and with the steps of this size of run."""
    settings: dict[str, Any] = {"steps": study.sizes.steps}
    return bnn.Laplace(**(settings | choices))


def fit_flat(study: Study, model: Callable[..., Any], x: Any, y: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of maximum likelihood, or as near as a prior of standard deviation 100 and these steps come to it."""
    method = bnn.MAP(steps=2 * study.sizes.steps)
    return centre(bnn.fit(partial(model, precision=FLAT), x, y, method, seed=seed))


# --- the claims -----------------------------------------------------------------------------------------


def overfit(study: Study) -> None:
    """Maximum likelihood against the evidence, two classes, over several data sets."""
    sizes = study.sizes
    xt, yt = mixture(sizes.test_rows, 10_000)
    best = optimal_logit(xt)
    rows: list[dict[str, Any]] = []
    for seed in range(sizes.seeds):
        x, y = mixture(sizes.rows, seed)
        model = partial(two_classes, units=sizes.units)
        flat, _ = output_and_gradient(fit_flat(study, model, x, y), xt)
        rounds = Rounds()
        posterior = bnn.fit(model, x, y, evidence(study), progress=rounds)
        tuned, _ = output_and_gradient(centre(posterior), xt)
        p = posterior.predict(xt, kind="probit").probabilities[:, 1]
        rows.append(
            {
                "data_seed": seed,
                "alpha": posterior.info.figures[ALL],
                "gamma": posterior.info.figures["effective_parameters"],
                "log_evidence": posterior.log_evidence,
                "rounds": len(rounds.values),
                "last_change": rounds.change,
                "log_score_ml": log_score_of_logits(flat, yt),
                "log_score_evidence_point": log_score_of_logits(tuned, yt),
                "log_score_evidence_variance": log_score(p, yt),
                "log_score_optimal": log_score_of_logits(best, yt),
                "error_ml": error(flat, yt),
                "error_evidence": error(tuned, yt),
                "error_optimal": error(best, yt),
                "warnings": "; ".join(posterior.info.warnings),
            }
        )
        ml, ours = rows[-1]["log_score_ml"], rows[-1]["log_score_evidence_point"]
        study.say(f"data set {seed}: log score {ml:.3f} by maximum likelihood, {ours:.3f} by the evidence")
    study.tables["overfit"] = rows

    def difference(first: str, second: str) -> tuple[float, float]:
        return paired([row[first] - row[second] for row in rows])

    def mean(name: str) -> float:
        return float(np.mean([row[name] for row in rows]))

    ml, point, variance, best_score = (
        mean(f"log_score_{name}") for name in ("ml", "evidence_point", "evidence_variance", "optimal")
    )
    gain, gain_error = difference("log_score_evidence_point", "log_score_ml")
    fewer, fewer_error = difference("error_ml", "error_evidence")
    more, more_error = difference("log_score_evidence_variance", "log_score_evidence_point")
    study.judge(
        judge_better(
            "regularisation tuned by the evidence removes the over-fit (classes, log score)",
            gain,
            gain_error,
            f"test log score {ml:.3f} by maximum likelihood, {point:.3f} at w_MAP by the evidence, {best_score:.3f} "
            f"optimal; paired gain {gain:.3f} +- {gain_error:.3f} over {len(rows)} data sets of {sizes.rows} rows",
        )
    )
    study.judge(
        judge_better(
            "and the error falls",
            fewer,
            fewer_error,
            f"test error {mean('error_ml'):.3f}, {mean('error_evidence'):.3f}, optimal {mean('error_optimal'):.3f}; "
            f"paired fall {fewer:.4f} +- {fewer_error:.4f}",
        )
    )
    study.judge(
        judge_better(
            "the variance improves on the point estimate (classes, log score)",
            more,
            more_error,
            f"test log score {variance:.4f} against {point:.4f}; paired gain {more:.4f} +- {more_error:.4f}",
        )
    )
    study.judge(judge_convergence(rows))


def judge_convergence(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Settled where the last round of every data set changed no log alpha by more than 1e-4."""
    settled = [row for row in rows if row["last_change"] < 1e-4]
    return Verdict(
        "alternating with training converges",
        REPRODUCED if len(settled) == len(rows) else NOT_REPRODUCED,
        f"{len(settled)} of {len(rows)} data sets settled to 1e-4 in log alpha within 50 rounds (median "
        f"{np.median([row['rounds'] for row in rows]):.0f} rounds)",
    )


def softmax(study: Study) -> None:
    """Three classes: the same two lines with another likelihood."""
    sizes, claim = study.sizes, "several classes by a softmax are the same procedure"
    if sizes.softmax_seeds < 2:
        study.judge(Verdict(claim, NOT_RUN, "left out of this size of run"))
        return
    xt, yt = mixture(sizes.test_rows, 10_000, THREE)
    rows: list[dict[str, Any]] = []
    for seed in range(sizes.softmax_seeds):
        x, y = mixture(sizes.rows, seed, THREE)
        model = partial(several_classes, units=sizes.units)
        flat = bnn.fit(partial(model, precision=FLAT), x, y, bnn.MAP(steps=2 * sizes.steps))
        posterior = bnn.fit(model, x, y, evidence(study))
        rows.append(
            {
                "data_seed": seed,
                "alpha": posterior.info.figures[ALL],
                "log_score_ml": float(np.mean(_log_softmax(flat.predictor(xt)[0, 0], yt))),
                "log_score_evidence": float(np.mean(posterior.predict(xt).log_prob(yt))),
            }
        )
    study.tables["softmax"] = rows
    gain, gain_error = paired([row["log_score_evidence"] - row["log_score_ml"] for row in rows])
    study.judge(
        judge_better(
            claim,
            gain,
            gain_error,
            f"three classes: paired gain in test log score over maximum likelihood {gain:.3f} +- {gain_error:.3f} over "
            f"{len(rows)} data sets",
        )
    )


def _log_softmax(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    return logits[np.arange(len(y)), y] - np.logaddexp.reduce(logits, axis=1)


def regression(study: Study) -> dict[str, Any]:
    """Numbers: alpha and beta tuned, the formulas by hand, the guard."""
    sizes = study.sizes
    xt, yt = sine(sizes.test_rows, 10_000)
    grid = np.linspace(-4.0, 4.0, 241)[:, None]
    rows: list[dict[str, Any]] = []
    shown: dict[str, Any] = {}
    for seed in range(sizes.curve_seeds):
        x, y = sine(sizes.curve_rows, seed)
        model = partial(curve, units=sizes.curve_units)
        weights = fit_flat(study, model, x, y)
        residuals = output_and_gradient(weights, x)[0] - y
        ml_noise = float(np.sqrt(np.mean(residuals**2)))
        flat = output_and_gradient(weights, xt)[0]
        posterior = bnn.fit(model, x, y, evidence(study, noise="evidence"))
        alpha, noise = posterior.info.figures[ALL], posterior.info.figures["noise"]
        found = centre(posterior)
        by_hand = curve_evidence(found, x, y, alpha, noise**-2)
        tuned, gradient = output_and_gradient(found, xt)
        precision = _precision(found, x, alpha, noise)
        variance = noise**2 + np.einsum("nw,nw->n", gradient, np.linalg.solve(precision, gradient.T).T)
        prediction = posterior.predict(xt)
        rows.append(
            {
                "data_seed": seed,
                "alpha": alpha,
                "gamma": posterior.info.figures["effective_parameters"],
                "noise": noise,
                "noise_ml": ml_noise,
                "log_evidence": posterior.log_evidence,
                "log_score_ml": _normal_score(flat, ml_noise, yt),
                "log_score_evidence_point": _normal_score(tuned, noise, yt),
                "log_score_evidence_variance": float(np.mean(prediction.log_prob(yt))),
                "log_evidence_by_hand_off": abs(by_hand["log_evidence"] - posterior.log_evidence),
                "variance_by_hand_off": float(np.max(np.abs(prediction.std**2 / variance - 1.0))),
                "alpha_equation_off": abs(by_hand["alpha"] / alpha - 1.0),
                "beta_equation_off": abs(by_hand["beta"] * noise**2 - 1.0),
                "warnings": "; ".join(posterior.info.warnings),
            }
        )
        if seed == 0:
            f, g = output_and_gradient(found, grid)
            epistemic = np.einsum("nw,nw->n", g, np.linalg.solve(precision, g.T).T)
            shown = {
                "x": x[:, 0],
                "y": y,
                "grid": grid[:, 0],
                "ml": output_and_gradient(weights, grid)[0],
                "ml_noise": ml_noise,
                "mean": f,
                "noise": noise,
                "epistemic": epistemic,
            }
        study.say(
            f"curve {seed}: alpha {alpha:.3g}, noise {noise:.3f} (true {NOISE}), by maximum likelihood {ml_noise:.3f}"
        )
    study.tables["regression"] = rows

    worst = {
        name: max(row[name] for row in rows)
        for name in (
            "log_evidence_by_hand_off",
            "variance_by_hand_off",
            "alpha_equation_off",
            "beta_equation_off",
        )
    }
    study.numbers["regression"] = worst
    agrees = worst["log_evidence_by_hand_off"] < 1e-6 and worst["variance_by_hand_off"] < 1e-6
    solved = max(worst["alpha_equation_off"], worst["beta_equation_off"]) < 1e-3
    study.judge(
        Verdict(
            "the last line of the evidence for regression, and 1/beta + g' A^-1 g",
            REPRODUCED if agrees else NOT_REPRODUCED,
            f"the library and the formulas in NumPy differ by at most {worst['log_evidence_by_hand_off']:.1e} nats and "
            f"{worst['variance_by_hand_off']:.1e} of the variance",
        )
    )
    study.judge(
        Verdict(
            "alpha = gamma / w'w and 1/beta = SSE / (N - gamma) where alternation ends",
            REPRODUCED if solved else NOT_REPRODUCED,
            f"off by at most {worst['alpha_equation_off']:.1e} and {worst['beta_equation_off']:.1e} of their values",
        )
    )
    gain, gain_error = paired([row["log_score_evidence_variance"] - row["log_score_ml"] for row in rows])
    study.judge(
        judge_better(
            "regularisation tuned by the evidence removes the over-fit (regression)",
            gain,
            gain_error,
            f"paired gain in test log score {gain:.3f} +- {gain_error:.3f} over {len(rows)} data sets of "
            f"{sizes.curve_rows} rows; noise {np.mean([row['noise'] for row in rows]):.3f} against "
            f"{np.mean([row['noise_ml'] for row in rows]):.3f} by maximum likelihood (true {NOISE})",
        )
    )
    inside = shown["epistemic"][(np.abs(shown["grid"]) > 0.5) & (np.abs(shown["grid"]) < 2.0)].mean()
    outside = shown["epistemic"][np.abs(shown["grid"]) > 3.0].mean()
    study.numbers["epistemic_ratio"] = float(outside / inside)
    study.judge(
        Verdict(
            "the band widens away from the data",
            REPRODUCED if outside > 4.0 * inside else NOT_REPRODUCED,
            f"g' A^-1 g beyond |x| = 3 is {outside / inside:.1f} times that among the data",
        )
    )
    study.judge(guard(study))
    return shown


def _precision(weights: Mapping[str, np.ndarray], x: np.ndarray, alpha: float, noise: float) -> np.ndarray:
    """A = alpha I + beta sum_n g_n g_n'."""
    _, g = output_and_gradient(weights, x)
    return alpha * np.eye(g.shape[1]) + noise**-2 * g.T @ g


def _normal_score(mean: np.ndarray, noise: float, y: np.ndarray) -> float:
    return float(np.mean(-0.5 * ((y - mean) / noise) ** 2 - math.log(noise) - 0.5 * math.log(2.0 * math.pi)))


def guard(study: Study) -> Verdict:
    """1/beta = SSE / (N - gamma) where there are more weights than rows and the prior says nothing."""
    x, y = sine(6, 0)
    model = partial(curve, units=study.sizes.curve_units, precision=1e-8)
    claim = "1/beta = SSE / (N - gamma) is defined"
    try:
        posterior = bnn.fit(model, x, y, laplace(study, noise="evidence"))
    except CurvatureError as refused:
        return Verdict(claim, CORRECTED, f"6 rows, alpha = 1e-8: refused by name: {str(refused)[:160]}")
    gamma = posterior.info.figures["effective_parameters"]
    warned = "; ".join(posterior.info.warnings)[:160]
    return Verdict(
        claim,
        REPRODUCED if gamma < 5.5 and not warned else CORRECTED,
        f"6 rows, alpha = 1e-8: gamma = {gamma:.3f}, noise {posterior.info.figures['noise']:.2e}; warnings: "
        f"{warned or 'none'}",
    )


def restarts(study: Study) -> dict[str, Any]:
    """One data set, several starts: the modes, their evidence and their test scores. Gives the best by evidence."""
    sizes = study.sizes
    x, y = mixture(sizes.rows, 0)
    xt, yt = mixture(sizes.test_rows, 10_000)
    model = partial(two_classes, units=sizes.units)
    rows: list[dict[str, Any]] = []
    found: list[Any] = []
    each: list[np.ndarray] = []
    traces: list[list[float]] = []
    for seed in range(sizes.starts):
        rounds = Rounds()
        posterior = bnn.fit(model, x, y, evidence(study), seed=seed, progress=rounds)
        images, different = log_images(centre(posterior))
        found.append(posterior)
        traces.append(rounds.values)
        p = posterior.predict(xt, kind="probit").probabilities[:, 1]
        each.append(each_log_score(p, yt))
        rows.append(
            {
                "start": seed,
                "alpha": posterior.info.figures[ALL],
                "gamma": posterior.info.figures["effective_parameters"],
                "log_evidence": posterior.log_evidence,
                "log_score": log_score(p, yt),
                "error": float(np.mean((p > 0.5) != yt)),
                "different_units": different,
                "log_images": images,
                "rounds": len(rounds.values),
            }
        )
    study.tables["restarts"] = rows
    values = np.array([row["log_evidence"] for row in rows])
    distinct = len(np.unique(np.round(values, 3)))
    chosen = int(values.argmax())
    study.numbers["restarts"] = {"distinct": distinct, "spread": float(np.ptp(values)), "chosen": chosen}
    study.judge(
        Verdict(
            "the mode depends on the start",
            REPRODUCED if distinct > 1 else NOT_REPRODUCED,
            f"{distinct} different values of the log evidence from {len(rows)} starts, {values.min():.2f} to "
            f"{values.max():.2f}",
        )
    )
    study.judge(judge_picked(values, np.array(each)))
    differ = [row["different_units"] for row in rows]
    collapsed = [row for row in rows if row["different_units"] < sizes.units]
    study.judge(
        Verdict(
            f"a mode has {sizes.units}! 2^{sizes.units} images",
            CORRECTED if collapsed else REPRODUCED,
            f"in {len(collapsed)} of {len(rows)} modes units are equal up to sign ({min(differ)} to {max(differ)} of "
            f"{sizes.units} differ), so that symmetries map the mode to itself: ln(images) is "
            f"{rows[chosen]['log_images']:.2f} at the best one; ln(M!) + M ln 2 = {log_symmetries(sizes.units):.2f}",
        )
    )
    weights = np.exp(values - values.max())
    return {
        "posterior": found[chosen],
        "all": found,
        "weights": weights / weights.sum(),
        "traces": traces,
        "seed": chosen,
    }


def judge_picked(values: np.ndarray, each: np.ndarray) -> Verdict:
    """A good one: its test log score is above the mean of the other modes by two standard errors of test rows.

    values: the log evidence of S starts. each: their log scores, (S, test rows). Starts that ended at one value of the
    evidence are one mode, which counts once; one mode is no choice.
    """
    claim = "the evidence picks a good mode"
    _, first = np.unique(np.round(values, 3), return_index=True)
    if len(first) < 2:
        return Verdict(claim, NOT_RUN, f"all {len(values)} starts ended at one value of the evidence")
    # np.unique sorts by evidence: the last is the largest.
    scores = each[first].mean(axis=1)
    gain, error = paired(each[first[-1]] - each[first[:-1]].mean(axis=0))
    return Verdict(
        claim,
        REPRODUCED if gain > 2.0 * error else NOT_REPRODUCED,
        f"{len(first)} different modes from {len(values)} starts: test log score {scores[-1]:.4f} where the evidence "
        f"is largest, mean of the others {scores[:-1].mean():.4f} ({scores[:-1].min():.4f} to "
        f"{scores[:-1].max():.4f}), paired gain {gain:.4f} +- {error:.4f} over {each.shape[1]} test rows; one data set",
    )


# --- contours ------------------------------------------------------------------------------------------


def contours(study: Study, posterior: Any) -> dict[str, Any]:
    """Where p = 0.1 ... 0.9 without and with the variance; how far each line moves, in steps of the grid."""
    axis = np.linspace(-3.0, 3.0, study.sizes.grid)
    step = float(axis[1] - axis[0])
    points = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    a, b = output_and_gradient(centre(posterior), points)
    variance = np.einsum("nw,wv,nv->n", b, posterior.approximation.covariance.covariance(), b)
    with_variance = kappa(variance) * a
    p = posterior.predict(points, kind="probit").probabilities[:, 1]
    off = float(np.max(np.abs(p - sigmoid(with_variance))))
    shape = (len(axis), len(axis))
    moved = {
        level: displacement(axis, a.reshape(shape), with_variance.reshape(shape), level) for level in LEVELS
    }
    signs = float(np.mean((p > 0.5) != (a > 0.0)))
    flat = np.concatenate([value.reshape(-1) for value in centre(posterior).values()])
    slip = kappa(variance) * (b @ flat)
    study.tables["contours"] = [
        {
            "level": level,
            "median_displacement": middle,
            "largest_displacement": largest,
            "in_grid_steps": middle / step,
            "line_vanishes": lost,
        }
        for level, (middle, largest, lost) in moved.items()
    ]
    study.numbers["contours"] = {
        "grid_step": step,
        "points_that_change_sides": signs,
        "probit_by_hand_off": off,
        "slip_changes_sides": float(np.mean((slip > 0.0) != (a > 0.0))),
    }
    study.judge(judge_contours(signs, moved, step))
    xt, yt = mixture(study.sizes.test_rows, 10_000)
    right, gradient = output_and_gradient(centre(posterior), xt)
    wrong = gradient @ flat
    study.judge(judge_slip(study.numbers["contours"], error(wrong, yt), error(right, yt)))
    return {"axis": axis, "a": a.reshape(shape), "with_variance": with_variance.reshape(shape)}


def judge_slip(found: Mapping[str, float], wrong: float, right: float) -> Verdict:
    """Corrected where the library has the other formula, to rounding, and the printed one moves points of the grid to
    the other side of the boundary. wrong, right: test errors.
    """
    off, sides = found["probit_by_hand_off"], found["slip_changes_sides"]
    return Verdict(
        "p = sigmoid(kappa b'w_MAP)",
        CORRECTED if off < 1e-9 and sides > 0.0 else NOT_REPRODUCED,
        f"sigmoid(kappa a_MAP): the library's and the one in NumPy differ by {off:.1e}; b'w_MAP is not a_MAP, and "
        f"puts {100.0 * sides:.1f} % of the plane on the other side of the boundary; test error {wrong:.3f} "
        f"instead of {right:.3f}",
    )


def lines(axis: np.ndarray, logit: np.ndarray, level: float) -> np.ndarray:
    """Vertices (V, 2) of the contour at which sigmoid(logit) is `level`, over a square grid."""
    from contourpy import contour_generator

    parts = contour_generator(axis, axis, logit).lines(math.log(level / (1.0 - level)))
    return np.concatenate([np.asarray(part) for part in parts]) if parts else np.zeros((0, 2))


def displacement(
    axis: np.ndarray, before: np.ndarray, after: np.ndarray, level: float
) -> tuple[float, float, bool]:
    """Median and largest distance from the contour before to that after, and whether there is none after.

    A line that vanishes has moved by the width of the square, so that the numbers stay finite.
    """
    first, second = lines(axis, before, level), lines(axis, after, level)
    if not len(first) or not len(second):
        width = float(axis[-1] - axis[0])
        return (0.0, 0.0, False) if len(first) == len(second) else (width, width, True)
    distance = np.sqrt(((first[:, None] - second[None]) ** 2).sum(-1)).min(axis=1)
    return float(np.median(distance)), float(np.max(distance)), False


def judge_contours(signs: float, moved: Mapping[float, tuple[float, float, bool]], step: float) -> Verdict:
    """The 0.5 line stays: no point of the grid changes sides, and no vertex moves by a tenth of a step of the grid.

    The others move: their median displacement is at least ten times the largest of the 0.5 line, and half a step.
    """
    stays = signs == 0.0 and moved[0.5][1] < 0.1 * step
    others = [level for level in moved if level != 0.5]
    move = all(moved[level][0] > max(10.0 * moved[0.5][1], 0.5 * step) for level in others)
    text = ", ".join(f"{level}: {moved[level][0] / step:.2f}" for level in moved)
    return Verdict(
        "with the variance the 0.5 contour does not move, the others do",
        REPRODUCED if stays and move else NOT_REPRODUCED,
        f"{100.0 * signs:.3g} % of the grid's points change sides; largest displacement of the 0.5 line "
        f"{moved[0.5][1] / step:.3f} grid steps; median displacements in grid steps ({step:.3f}): {text}",
    )


def boundaries(study: Study, posterior: Any, seed: int) -> dict[str, Any]:
    """The three boundaries of figure 1, as logits over a grid."""
    sizes = study.sizes
    x, y = mixture(sizes.rows, 0)
    axis = np.linspace(-3.0, 3.0, sizes.grid)
    points = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    shape = (len(axis), len(axis))
    weights = fit_flat(study, partial(two_classes, units=sizes.units), x, y, seed)
    return {
        "axis": axis,
        "x": x,
        "y": y,
        "ml": output_and_gradient(weights, points)[0].reshape(shape),
        "evidence": output_and_gradient(centre(posterior), points)[0].reshape(shape),
        "optimal": optimal_logit(points).reshape(shape),
        "ml_weights": weights,
    }


# --- alpha --------------------------------------------------------------------------------------------


def evidence_of_alpha(
    study: Study, units: int, alphas: Sequence[float], modes: int, tuned: Any = None
) -> tuple[list[dict[str, Any]], list[Any]]:
    """For each alpha the best mode by evidence among a few starts: a row of figures, and the posterior.

    tuned: a posterior with an alpha of its own, whose mode is one more start, at every alpha alike.
    """
    x, y = mixture(study.sizes.rows, 0)
    rows: list[dict[str, Any]] = []
    posteriors = []
    for alpha in alphas:
        model = partial(two_classes, units=units, precision=alpha)
        found = [bnn.fit(model, x, y, laplace(study), seed=seed) for seed in range(modes)]
        if tuned is not None:
            found.append(bnn.fit(model, x, y, laplace(study, start=centre(tuned))))
        best = max(found, key=lambda posterior: posterior.log_evidence)
        weights = centre(best)
        flat = np.concatenate([value.reshape(-1) for value in weights.values()])
        row: dict[str, Any] = {
            "units": units,
            "alpha": alpha,
            "log_evidence_ggn": best.log_evidence,
            "gamma_ggn": best.info.figures["effective_parameters"],
            "alpha_ww": alpha * float(flat @ flat),
            "log_determinant_ggn": -best.approximation.covariance.log_determinant,
            "weights": len(flat),
            "different_units": log_images(weights)[1],
            "log_images": log_images(weights)[0],
            "log_evidence_hessian": "",
            "gamma_hessian": "",
            "negative_eigenvalues_of_H": "",
        }
        try:
            exact = bnn.fit(model, x, y, laplace(study, curvature="hessian", start=weights, optimise=False))
            eigenvalues = np.linalg.eigvalsh(exact.approximation.covariance.precision()) - alpha
            row |= {
                "log_evidence_hessian": exact.log_evidence,
                "gamma_hessian": exact.info.figures["effective_parameters"],
                "negative_eigenvalues_of_H": int((eigenvalues < -1e-8).sum()),
            }
        except CurvatureError:
            row["negative_eigenvalues_of_H"] = "A indefinite"
        rows.append(row)
        posteriors.append(best)
        study.say(
            f"{units} units, alpha {alpha:g}: log evidence {best.log_evidence:.2f}, gamma {row['gamma_ggn']:.2f}"
        )
    return rows, posteriors


def alpha_curve(study: Study, posterior: Any) -> tuple[list[dict[str, Any]], Any]:
    """The evidence over alpha, what a wrong sign of 1/2 ln|A| makes of it, and the posterior at the tuned alpha."""
    sizes, tuned = study.sizes, float(posterior.info.figures[ALL])
    rows, known = evidence_of_alpha(
        study, sizes.units, sorted({*sizes.alphas, tuned}), sizes.modes, posterior
    )
    for row in rows:
        row["wrong_sign"] = row["log_evidence_ggn"] + row["log_determinant_ggn"]
        row["lost_powers"] = row["log_evidence_ggn"] + (1.0 - 0.5 * row["weights"]) * math.log(row["alpha"])
    study.tables["alpha"] = rows
    verdict, study.numbers["alpha"] = judge_proof(rows)
    study.judge(verdict)
    indefinite = [row for row in rows if row["negative_eigenvalues_of_H"] not in ("", 0)]
    study.judge(
        Verdict(
            "gamma = sum lambda / (alpha + lambda) counts parameters, with H the Hessian",
            CORRECTED if indefinite else REPRODUCED,
            f"H has negative eigenvalues, or A is indefinite, at {len(indefinite)} of {len(rows)} values of alpha; "
            "with the Gauss-Newton matrix gamma is between 0 and W; "
            + "; ".join(
                f"alpha {row['alpha']:.3g}: {row['negative_eigenvalues_of_H']}"
                + (f", gamma {row['gamma_hessian']:.1f}" if row["gamma_hessian"] != "" else "")
                for row in indefinite
            ),
        )
    )
    return rows, known[[row["alpha"] for row in rows].index(tuned)]


def judge_proof(rows: Sequence[Mapping[str, Any]]) -> tuple[Verdict, dict[str, float]]:
    """Corrected where the right line has its maximum between the ends of alpha and each slip has its own at an end.
    Also where each maximum is.
    """
    best, wrong, lost = (
        max(rows, key=lambda row: row[name])["alpha"]
        for name in ("log_evidence_ggn", "wrong_sign", "lost_powers")
    )
    ends = rows[0]["alpha"], rows[-1]["alpha"]
    good = best not in ends and wrong in ends and lost in ends
    verdict = Verdict(
        "+ 1/2 ln|A| and alpha^1 in place of alpha^(W/2), on the way in the proof for regression",
        CORRECTED if good else NOT_REPRODUCED,
        f"over {ends[0]:.3g} to {ends[1]:.3g} the right line has its maximum at alpha = {best:.3g}; with the sign "
        f"turned it is at {wrong:.3g}, with the powers lost at {lost:.3g}",
    )
    return verdict, {"best_on_grid": best, "wrong_sign": wrong, "lost_powers": lost}


def gold_standard(study: Study, large: Mapping[str, Any], known_large: Any) -> list[dict[str, Any]]:
    """One-mode Laplace evidence against tempered Monte Carlo: a small network at several alphas, the large at one."""
    sizes = study.sizes
    rows, known = evidence_of_alpha(study, sizes.small_units, sizes.small_alphas, sizes.small_modes)
    rows.append(dict(large))
    for row, fitted in zip(rows, [*known, known_large], strict=True):
        truth = tempered_smc(
            fitted, row["alpha"], particles=sizes.particles, moves=sizes.moves, runs=sizes.runs
        )
        symmetries = log_symmetries(row["units"])
        row |= {
            "log_evidence_smc": truth.log_evidence,
            "smc_standard_error": truth.error,
            "temperatures": len(truth.ladder),
            "log_symmetries": symmetries,
            "gap_one_mode": truth.log_evidence - row["log_evidence_ggn"],
            "gap_with_symmetries": truth.log_evidence - row["log_evidence_ggn"] - symmetries,
            "gap_with_images": truth.log_evidence - row["log_evidence_ggn"] - row["log_images"],
        }
        study.say(
            f"{row['units']} units, alpha {row['alpha']:.3g}: log Z {truth.log_evidence:.2f} +- {truth.error:.2f}, one "
            f"mode {row['log_evidence_ggn']:.2f}, ln(M!) + M ln 2 = {symmetries:.2f}"
        )
    study.tables["gold_standard"] = rows
    study.judge(judge_gold_standard(rows))
    return rows


def judge_gold_standard(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Exact where no row is off by more than two standard errors; else which of the corrections comes nearest."""
    gaps = {
        "nothing": "gap_one_mode",
        "ln(M!) + M ln 2": "gap_with_symmetries",
        "the number of different images of the mode": "gap_with_images",
    }
    mean = {name: float(np.mean([abs(row[column]) for row in rows])) for name, column in gaps.items()}
    nearest = min(mean, key=lambda name: mean[name])
    low = [row for row in rows if row["gap_one_mode"] > 2.0 * row["smc_standard_error"]]
    off = [row for row in rows if abs(row["gap_one_mode"]) > 2.0 * row["smc_standard_error"]]
    cases = "; ".join(
        f"{row['units']} units, alpha {row['alpha']:.2g}: {row['log_evidence_smc']:.2f} +- "
        f"{row['smc_standard_error']:.2f} ({', '.join(f'{row[column]:+.2f}' for column in gaps.values())})"
        for row in rows
    )
    return Verdict(
        "the evidence of one mode is log p(D)",
        CORRECTED if off else REPRODUCED,
        f"too low in {len(low)} of {len(rows)} cases by tempered Monte Carlo; mean distance with "
        + ", ".join(f"{name} added {value:.2f}" for name, value in mean.items())
        + f" nats: nearest with {nearest}. log Z (what is missing with each): {cases}",
    )


# --- every choice against NUTS ---------------------------------------------------------------------------


def choices(study: Study, restarted: Mapping[str, Any], flat: Mapping[str, np.ndarray]) -> None:
    """What each choice predicts, beside NUTS on the same model and on the hierarchical one."""
    sizes = study.sizes
    x, y = mixture(sizes.rows, 0)
    xt, yt = mixture(sizes.test_rows, 10_000)
    base = restarted["posterior"]
    start = centre(base)
    alpha = float(base.info.figures[ALL])
    model = partial(two_classes, units=sizes.units)
    fixed = partial(model, precision=alpha)
    scaled = partial(two_classes_with_scale, units=sizes.units)
    rows: list[dict[str, Any]] = []
    predictions: dict[str, np.ndarray] = {}

    def add(name: str, predictive: str, p: np.ndarray, score: float | None = None, **columns: Any) -> None:
        predictions[f"{name}|{predictive}"] = p
        rows.append(
            {"choice": name, "predictive": predictive}
            | columns
            | {
                "log_score": log_score(p, yt) if score is None else score,
                "error": float(np.mean((p > 0.5) != yt)),
            }
        )

    def add_laplace(name: str, posterior: Any, kinds: Sequence[str], **columns: Any) -> None:
        figures = posterior.info.figures
        tuned = {
            key.partition("/")[2]: value for key, value in figures.items() if key.startswith("prior_factor")
        }
        if "alpha" not in columns:
            columns["alpha"] = ", ".join(
                (f"{value:.4g}" if key == "all" else f"{key}: {value:.4g}") for key, value in tuned.items()
            )
        columns |= {"gamma": figures["effective_parameters"], "log_evidence": figures["log_evidence"]}
        columns["warnings"] = "; ".join(posterior.info.warnings)
        for kind in kinds:
            add(name, kind, posterior.predict(xt, kind=kind).probabilities[:, 1], **columns)

    sampler = bnn.NUTS(draws=sizes.draws, warmup=sizes.draws, chains=sizes.chains, target_accept=0.9)
    nuts = bnn.fit(fixed, x, y, sampler, seed=1)
    hierarchical = bnn.fit(bnn.noncentred(partial(scaled, spread=1.0)), x, y, sampler, seed=2)
    references = {}
    for name, label, posterior in (
        ("nuts", f"NUTS at alpha = {alpha:.3g}", nuts),
        ("nuts_hierarchical", "NUTS, log scale ~ N(0, 1)", hierarchical),
    ):
        diagnosis = bnn.diagnose(posterior)
        eta = posterior.predictor(xt)
        each = sigmoid(eta[..., 0].reshape(eta.shape[0], -1, len(xt)))
        p = each.mean((0, 1))
        half = len(each) // 2
        floor = float(np.mean(np.abs(each[:half].mean((0, 1)) - each[half:].mean((0, 1)))))
        references[name] = (p, diagnosis, floor)
        scale = posterior.draws["scale"] ** -2.0 if name == "nuts_hierarchical" else None
        add(
            label,
            "sampled",
            p,
            alpha=f"{alpha:.4g}" if scale is None else f"median {np.median(scale):.4g}",
            warnings=diagnosis.verdict,
        )
        study.numbers[name] = {
            "verdict": diagnosis.verdict,
            "noise_floor_of_gap": floor,
            "reasons": list(diagnosis.reasons),
        }
        study.say(f"{label}: {diagnosis.verdict}; {diagnosis.reasons[0]}")

    logits = output_and_gradient(flat, xt)[0]
    add("maximum likelihood", "point", sigmoid(logits), log_score_of_logits(logits, yt), alpha=f"{FLAT:g}")
    point = output_and_gradient(start, xt)[0]
    add("fixed point", "point", sigmoid(point), log_score_of_logits(point, yt), alpha=f"{alpha:.4g}")
    add_laplace("fixed point", base, ("probit", "linearised", "sampled"))
    mixed = sum(
        weight * posterior.predict(xt, kind="linearised").probabilities[:, 1]
        for weight, posterior in zip(restarted["weights"], restarted["all"], strict=True)
    )
    add("restarts weighted by evidence", "linearised", np.asarray(mixed))
    maximised = bnn.fit(model, x, y, evidence(study, search="maximise", start=start))
    add_laplace("maximised at each mode", maximised, ("linearised",))
    direct = bnn.fit(scaled, x, y, laplace(study, marginal=("scale",), start={**start, "scale": alpha**-0.5}))
    direct_alpha = float(direct.draws["scale"][0, 0] ** -2.0)
    add_laplace("direct, mode found again", direct, ("linearised",), alpha=f"{direct_alpha:.4g}")
    for tune in sizes.tunes:
        posterior = bnn.fit(model, x, y, evidence(study, tune=tune, start=start))
        add_laplace(f"one alpha for each {tune}", posterior, ("linearised",))
    try:
        exact = bnn.fit(fixed, x, y, laplace(study, curvature="hessian", start=start, optimise=False))
        add_laplace("exact Hessian at the fixed point", exact, ("linearised",), alpha=f"{alpha:.4g}")
    except CurvatureError as refused:
        study.say(f"exact Hessian at the fixed point: {refused}")
        rows.append(
            {"choice": "exact Hessian at the fixed point", "warnings": "A is indefinite: no Gaussian"}
        )
    slip = bnn.fit(partial(squared_error, units=sizes.units), x, y.astype(float), evidence(study))
    p = sigmoid(output_and_gradient(centre(slip), xt)[0])
    add(
        "Gaussian likelihood (the slip)",
        "point",
        p,
        alpha=f"{slip.info.figures[ALL]:.4g}",
        gamma=slip.info.figures["effective_parameters"],
    )
    for guide, name in VARIATIONAL.items():
        vi = bnn.fit(fixed, x, y, bnn.SVI(guide=guide, steps=2 * sizes.steps, start=start))
        p = vi.predict(xt).probabilities[:, 1]
        add(name, "sampled", p, elbo=vi.info.figures["elbo"], alpha=f"{alpha:.4g}")
    best = sigmoid(optimal_logit(xt))
    add("optimal", "known density", best)

    for row in rows:
        p = predictions.get(f"{row['choice']}|{row.get('predictive')}")
        for name, (reference, diagnosis, _) in references.items():
            gap = "" if p is None else float(np.mean(np.abs(p - reference)))
            row[f"gap_to_{name}"] = gap if diagnosis.verdict == "converged" else NO_REFERENCE
    study.tables["choices"] = rows

    def row_of(name: str, kind: str) -> dict[str, Any]:
        return next(row for row in rows if row["choice"] == name and row["predictive"] == kind)

    study.judge(judge_reference(references))
    floor = references["nuts"][2]
    study.judge(
        judge_variance(
            {
                kind: row_of("fixed point", kind)["gap_to_nuts"]
                for kind in ("point", "probit", "linearised", "sampled")
            },
            floor,
        )
    )
    again = row_of("direct, mode found again", "linearised")["log_score"]
    study.numbers["direct"] = {
        "alpha_fixed_point": alpha,
        "alpha_direct": direct_alpha,
        "log_evidence_fixed_point": base.log_evidence,
        "log_evidence_direct": direct.log_evidence,
    }
    study.judge(
        Verdict(
            "leaving out dH/d alpha is harmless",
            REPRODUCED if direct.log_evidence - base.log_evidence < 0.5 else NOT_REPRODUCED,
            f"fixed point alpha = {alpha:.4g}, log evidence {base.log_evidence:.3f}, log score "
            f"{row_of('fixed point', 'linearised')['log_score']:.4f}; maximum with the mode found again alpha = "
            f"{direct_alpha:.4g}, {direct.log_evidence:.3f}, {again:.4f}; "
            f"maximising at each mode instead of the update gives alpha = {maximised.info.figures[ALL]:.4g}",
        )
    )
    one = row_of("fixed point", "linearised")
    finer = {tune: row_of(f"one alpha for each {tune}", "linearised") for tune in sizes.tunes}
    for tune, row in finer.items():
        p, q = (predictions[f"{name}|linearised"] for name in (row["choice"], one["choice"]))
        study.judge(judge_finer(tune, row, one, paired(each_log_score(p, yt) - each_log_score(q, yt))))
    exact_row = next(row for row in rows if row["choice"] == "exact Hessian at the fixed point")
    at_mode = row_of("fixed point", "point")["log_score"]
    wrong = row_of("Gaussian likelihood (the slip)", "point")
    study.judge(judge_hessian(one, exact_row, floor))
    p, q = (predictions[f"{name}|point"] for name in ("fixed point", "Gaussian likelihood (the slip)"))
    loss = paired(each_log_score(p, yt) - each_log_score(q, yt))
    study.judge(judge_gaussian(alpha, at_mode, slip.info.figures[ALL], wrong["log_score"], loss))
    factorised, full = (row_of(name, "sampled") for name in VARIATIONAL.values())
    study.judge(judge_variational(factorised, full, floor))
    study.judge(
        Verdict(
            "sequential and active learning",
            NOT_RUN,
            "named there as uses; they have studies of their own, continual_learning.py and active_learning.py",
        )
    )


def judge_variance(gaps: Mapping[str, Any], floor: float) -> Verdict:
    """Reproduced where the probit prediction of a fit is nearer to NUTS at the same alpha than its point is."""
    claim = "the variance brings the prediction nearer to the posterior's"
    if NO_REFERENCE in gaps.values():
        return Verdict(claim, NOT_RUN, f"NUTS did not converge: {NO_REFERENCE}")
    return Verdict(
        claim,
        REPRODUCED if gaps["probit"] < gaps["point"] else NOT_REPRODUCED,
        "mean |p - p_NUTS| at the same alpha: "
        + ", ".join(f"{kind} {gap:.4f}" for kind, gap in gaps.items())
        + f" (nearest: {min(gaps, key=lambda kind: gaps[kind])}); noise floor {floor:.4f}",
    )


def judge_finer(
    tune: str, row: Mapping[str, Any], one: Mapping[str, Any], gain: tuple[float, float]
) -> Verdict:
    """Reproduced where the evidence is larger and the gain in test log score exceeds two standard errors of test rows.
    A fit whose alternation ended at no optimum says nothing of the optimum: not run.
    """
    warnings = row.get("warnings", "")
    open_ = any(words in warnings for words in UNSETTLED)
    better = row["log_evidence"] > one["log_evidence"] and gain[0] > 2.0 * gain[1]
    return Verdict(
        f"an alpha for each {tune} has more evidence, and predicts better (ours)",
        NOT_RUN if open_ else REPRODUCED if better else NOT_REPRODUCED,
        ("the alternation ended before it settled, so that this is no optimum to compare: " if open_ else "")
        + f"log evidence {row['log_evidence']:.2f} against {one['log_evidence']:.2f} with one alpha; test log "
        f"score {row['log_score']:.4f} against {one['log_score']:.4f}, paired gain {gain[0]:.4f} +- {gain[1]:.4f} over "
        f"test rows of one data set; test error {row['error']:.4f} against {one['error']:.4f}; alpha {row['alpha']}; "
        f"warnings: {warnings or 'none'}",
    )


def judge_gaussian(
    alpha: float, at_mode: float, wrong_alpha: float, wrong_score: float, loss: tuple[float, float]
) -> Verdict:
    """Corrected where a network fitted as in the proof predicts worse by two standard errors of test rows."""
    return Verdict(
        "the proof for classes, from a Gaussian likelihood",
        CORRECTED if loss[0] > 2.0 * loss[1] else NOT_REPRODUCED,
        f"with the Bernoulli likelihood alpha = {alpha:.4g} and test log score {at_mode:.4f} at w_MAP; with "
        f"N(y, 1) as in the proof alpha = {wrong_alpha:.4g} and {wrong_score:.4f}, a paired loss of {loss[0]:.4f} +- "
        f"{loss[1]:.4f}",
    )


def judge_variational(factorised: Mapping[str, Any], full: Mapping[str, Any], floor: float) -> Verdict:
    """Both Gaussians at one alpha: that with all covariances holds the other, so its bound can only be higher."""
    claim = "a full-covariance Gaussian comes nearer to the posterior than a factorised one"
    if NO_REFERENCE in (factorised["gap_to_nuts"], full["gap_to_nuts"]):
        return Verdict(claim, NOT_RUN, f"NUTS did not converge: {NO_REFERENCE}")
    nearer = full["gap_to_nuts"] < factorised["gap_to_nuts"]
    numbers = (
        f"gap to NUTS {full['gap_to_nuts']:.4f} against {factorised['gap_to_nuts']:.4f} (noise floor {floor:.4f}), "
        f"ELBO {full['elbo']:.2f} against {factorised['elbo']:.2f}, test log score {full['log_score']:.4f} against "
        f"{factorised['log_score']:.4f}"
    )
    return Verdict(claim, REPRODUCED if nearer else NOT_REPRODUCED, numbers)


def judge_hessian(ggn: Mapping[str, Any], exact: Mapping[str, Any], floor: float) -> Verdict:
    """The exact Hessian is the better choice where it is a Gaussian with a gamma from 0 up and a smaller gap."""
    claim = "the exact Hessian is better than Gauss-Newton at the same mode (ours)"
    if "gamma" not in exact:
        return Verdict(claim, NOT_REPRODUCED, f"there is no Gaussian: {exact['warnings']}")
    if NO_REFERENCE in (exact["gap_to_nuts"], ggn["gap_to_nuts"]):
        return Verdict(claim, NOT_RUN, f"NUTS did not converge: {NO_REFERENCE}")
    better = exact["gamma"] >= 0.0 and exact["gap_to_nuts"] < ggn["gap_to_nuts"]
    return Verdict(
        claim,
        REPRODUCED if better else NOT_REPRODUCED,
        f"gamma {exact['gamma']:.4g} against {ggn['gamma']:.4g}, log evidence {exact['log_evidence']:.2f} against "
        f"{ggn['log_evidence']:.2f}, test log score {exact['log_score']:.4f} against {ggn['log_score']:.4f}, gap to "
        f"NUTS {exact['gap_to_nuts']:.4f} against {ggn['gap_to_nuts']:.4f} (noise floor {floor:.4f})",
    )


def judge_reference(references: Mapping[str, tuple[np.ndarray, Any, float]]) -> Verdict:
    """NUTS is a reference where it converged in function space."""
    good = [name for name, (_, diagnosis, _) in references.items() if diagnosis.verdict == "converged"]
    text = "; ".join(
        f"{name}: {diagnosis.verdict} ({diagnosis.reasons[0] if diagnosis.reasons else 'no reason'})"
        for name, (_, diagnosis, _) in references.items()
    )
    return Verdict(
        "NUTS is a reference for this model (ours)",
        REPRODUCED if len(good) == len(references) else NOT_REPRODUCED,
        text,
    )


# --- figures ----------------------------------------------------------------------------------------------


def _figure(width: float, height: float, columns: int) -> tuple[Any, Any]:
    figure, axes = panels(width, height, columns)
    return figure, axes[0]


def _points(axes: Any, x: np.ndarray, y: np.ndarray) -> None:
    for label, marker, colour in ((0, "o", ORANGE), (1, "x", BLUE)):
        part = x[y == label]
        axes.plot(
            part[:, 0], part[:, 1], marker, color=colour, markersize=5, markerfacecolor="none", zorder=1
        )
    axes.set(xlim=(-3, 3), ylim=(-3, 3), aspect="equal", xlabel="$x_1$", ylabel="$x_2$")


def draw_boundaries(path: Path, shown: Mapping[str, Any]) -> None:
    from matplotlib.lines import Line2D

    figure, (axes,) = _figure(6.4, 6.0, 1)
    _points(axes, shown["x"], shown["y"])
    handles = []
    styles: Any = (
        ("optimal", "optimal", GREEN, "dashed"),
        ("ml", "maximum likelihood", BLACK, "solid"),
        ("evidence", "evidence", VERMILION, "solid"),
    )
    for name, label, colour, style in styles:
        axes.contour(
            shown["axis"], shown["axis"], shown[name], [0.0], colors=colour, linestyles=style, linewidths=2.0
        )
        handles.append(Line2D([], [], color=colour, linestyle=style, linewidth=2.0, label=label))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path)


def draw_contours(path: Path, found: Mapping[str, Any], x: np.ndarray, y: np.ndarray) -> None:
    figure, panels = _figure(10.4, 5.4, 2)
    levels = [math.log(level / (1.0 - level)) for level in LEVELS]
    for axes, name, title in (
        (panels[0], "a", "point estimate, $\\sigma(a_{MAP})$"),
        (panels[1], "with_variance", "with the variance, $\\sigma(\\kappa(s^2)\\, a_{MAP})$"),
    ):
        _points(axes, x, y)
        drawn = axes.contour(
            found["axis"],
            found["axis"],
            found[name],
            levels,
            colors=[GREY, GREY, GREEN, GREY, GREY],
            linestyles="solid",
            linewidths=[1.2, 1.2, 2.4, 1.2, 1.2],
        )
        names = {level: f"{value:g}" for level, value in zip(drawn.levels, LEVELS, strict=True)}
        axes.clabel(drawn, fmt=names, fontsize=8)
        axes.set_title(title, fontsize=11)
    figure.savefig(path)


def draw_regression(path: Path, shown: Mapping[str, Any]) -> None:
    figure, panels = _figure(10.4, 4.4, 2)
    grid = shown["grid"]
    epistemic = np.sqrt(shown["epistemic"])
    total = np.sqrt(shown["noise"] ** 2 + shown["epistemic"])
    for axes in panels:
        axes.plot(grid, np.sin(2.0 * grid), color=GREEN, linestyle="dashed", linewidth=1.5, label="truth")
        axes.plot(
            shown["x"], shown["y"], "o", color=BLACK, markersize=4, markerfacecolor="none", label="data"
        )
        axes.set(xlabel="$x$", ylim=(-6.0, 5.0), xlim=(-4.0, 4.0))
    left, right = panels
    left.plot(grid, shown["ml"], color=VERMILION, linewidth=1.8, label="maximum likelihood")
    noise = 2.0 * shown["ml_noise"]
    left.fill_between(grid, shown["ml"] - noise, shown["ml"] + noise, color=VERMILION, alpha=0.2, linewidth=0)
    left.set_title("maximum likelihood, 2 sd of its noise", fontsize=11)
    mean = shown["mean"]
    right.plot(grid, mean, color=BLUE, linewidth=1.8, label="evidence")
    right.fill_between(
        grid,
        mean - 2 * total,
        mean + 2 * total,
        color=BLUE,
        alpha=0.18,
        linewidth=0,
        label="$1/\\beta + g'A^{-1}g$",
    )
    right.fill_between(
        grid,
        mean - 2 * epistemic,
        mean + 2 * epistemic,
        color=BLUE,
        alpha=0.3,
        linewidth=0,
        label="$g'A^{-1}g$",
    )
    right.set_title("evidence, 2 sd with and without noise", fontsize=11)
    left.set_ylabel("$y$")
    for axes in panels:
        axes.legend(framealpha=1.0, edgecolor="none", fontsize=9, loc="lower center", ncols=2)
    figure.savefig(path)


def draw_alpha(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    direct: Mapping[str, float],
    traces: Sequence[Sequence[float]],
) -> None:
    figure, panels = _figure(13.2, 4.2, 3)
    alphas = [row["alpha"] for row in rows]
    left, middle, right = panels
    left.plot(alphas, [row["log_evidence_ggn"] for row in rows], "o-", color=BLUE, label="Gauss-Newton")
    exact = [(row["alpha"], row["log_evidence_hessian"]) for row in rows if row["log_evidence_hessian"] != ""]
    if exact:
        left.plot(*zip(*exact, strict=True), "s--", color=ORANGE, label="exact Hessian")
    left.axvline(direct["alpha_fixed_point"], color=VERMILION, linestyle="solid", label="fixed point")
    left.axvline(direct["alpha_direct"], color=BLACK, linestyle="dotted", label="maximum, mode found again")
    left.set(xscale="log", xlabel="$\\alpha$", ylabel="log evidence of one mode")
    middle.plot(alphas, [row["gamma_ggn"] for row in rows], "o-", color=BLUE, label="$\\gamma$")
    middle.plot(alphas, [row["alpha_ww"] for row in rows], "s--", color=ORANGE, label="$\\alpha\\, w'w$")
    middle.axvline(direct["alpha_fixed_point"], color=VERMILION, label="fixed point")
    middle.set(xscale="log", xlabel="$\\alpha$", ylabel="effective parameters")
    middle.set_ylim(0.0, 1.1 * max(max(row["gamma_ggn"], row["alpha_ww"]) for row in rows))
    for axes in (left, middle):
        axes.set_xlim(min(alphas) / 1.5, max(alphas) * 1.5)
    for index, trace in enumerate(traces):
        label = "one start each" if index == 0 else None
        right.plot(range(1, len(trace) + 1), trace, "-", color=GREY, alpha=0.8, label=label)
    best = max(traces, key=lambda trace: trace[-1])
    right.plot(range(1, len(best) + 1), best, "o-", color=VERMILION, markersize=4, label="largest evidence")
    right.set(xlabel="round of the alternation", ylabel="log evidence")
    for axes, place in zip(panels, ("lower right", "upper right", "best"), strict=True):
        axes.legend(framealpha=1.0, edgecolor="none", fontsize=9, loc=place)
    figure.savefig(path)


def draw_gold_standard(path: Path, rows: Sequence[Mapping[str, Any]], units: int) -> None:
    figure, (axes,) = _figure(6.8, 4.6, 1)
    small = [row for row in rows if row["units"] == units] or list(rows)
    alphas = np.array([row["alpha"] for row in small])
    one = np.array([row["log_evidence_ggn"] for row in small])
    axes.plot(alphas, one, "o-", color=BLUE, label="Laplace, one mode")
    symmetries = np.array([row["log_symmetries"] for row in small])
    axes.plot(alphas, one + symmetries, "s--", color=ORANGE, label="and $\\ln(M!) + M\\,\\ln 2$")
    images = np.array([row["log_images"] for row in small])
    axes.plot(alphas, one + images, "^:", color=GREEN, label="and its different images")
    axes.errorbar(
        alphas,
        [row["log_evidence_smc"] for row in small],
        [2.0 * row["smc_standard_error"] for row in small],
        fmt="D",
        color=BLACK,
        capsize=4,
        markersize=5,
        label="tempered Monte Carlo, 2 s.e.",
        zorder=3,
    )
    axes.set(xscale="log", xlabel="$\\alpha$", ylabel="log evidence", title=f"{units} tanh units")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def draw_scores(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    choice_rows: Sequence[Mapping[str, Any]],
    reference: Mapping[str, Any],
) -> None:
    figure, (left, right) = _figure(12.0, 4.8, 2)
    values = np.array(
        [
            [row["log_score_ml"], row["log_score_evidence_point"], row["log_score_evidence_variance"]]
            for row in rows
        ]
    )
    for row in values:
        left.plot(range(3), -row, "-", color=GREY, alpha=0.6, linewidth=1)
    for index, (colour, marker) in enumerate(((BLACK, "o"), (VERMILION, "s"), (BLUE, "^"))):
        left.plot([index] * len(values), -values[:, index], marker, color=colour, markersize=6)
    left.axhline(-rows[0]["log_score_optimal"], color=GREEN, linestyle="dashed", label="optimal")
    left.set_xticks(range(3), ["maximum\nlikelihood", "evidence,\npoint", "evidence,\nvariance"])
    left.set(yscale="log", xlim=(-0.4, 2.4), ylabel="minus test log score, nats per row (log scale)")
    ticks = [
        tick
        for tick in (0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
        if -values.max() / 1.5 < tick < -values.min() * 1.2
    ]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_yticks([], minor=True)
    left.legend(frameon=False, fontsize=9)
    left.set_title("one line for each data set", fontsize=11)
    shown = [
        row
        for row in choice_rows
        if row.get("gap_to_nuts") not in (None, "", 0.0, NO_REFERENCE) and row["choice"] != "optimal"
    ]
    shown = sorted(shown, key=lambda row: -row["gap_to_nuts"])
    places = np.arange(len(shown))
    gaps = [row["gap_to_nuts"] for row in shown]
    right.hlines(places, 0.0, gaps, color=GREY, linewidth=1)
    right.plot(gaps, places, "o", color=BLUE)
    floor = reference["noise_floor_of_gap"]
    right.axvline(
        floor, color=ORANGE, linestyle="dotted", label=f"two halves of NUTS ({reference['verdict']})"
    )
    right.legend(frameon=False, fontsize=9)
    labels = [
        f"{row['choice']}: {row['predictive']}"
        + (" (not converged)" if row.get("warnings") == "not converged" else "")
        for row in shown
    ]
    right.set_yticks(places, labels, fontsize=8)
    right.set(xlabel="mean $|p - p_{NUTS}|$ over the test inputs", xlim=(0.0, None))
    right.set_title("gap to NUTS at the same $\\alpha$", fontsize=11)
    figure.savefig(path)


# --- all of it --------------------------------------------------------------------------------------------


def main(tiny: bool = False, out: str | Path | None = None) -> Study:
    """Run the study and write tables, figures and verdicts to `out`.

    Without `out` a full run writes to results/evidence_framework beside this file, a tiny one to a temporary folder.
    """
    study = Study.begin(TINY if tiny else FULL, "evidence_framework", tiny, out)
    overfit(study)
    softmax(study)
    shown = regression(study)
    restarted = restarts(study)
    posterior = restarted["posterior"]
    drawn = boundaries(study, posterior, restarted["seed"])
    found = contours(study, posterior)
    choices(study, restarted, drawn["ml_weights"])
    tuned = float(posterior.info.figures[ALL])
    rows, known = alpha_curve(study, posterior)
    gold = gold_standard(study, next(row for row in rows if row["alpha"] == tuned), known)
    draw_boundaries(study.out / "boundaries.png", drawn)
    draw_contours(study.out / "contours.png", found, drawn["x"], drawn["y"])
    draw_regression(study.out / "regression.png", shown)
    draw_alpha(study.out / "alpha.png", rows, study.numbers["direct"], restarted["traces"])
    draw_gold_standard(study.out / "gold_standard.png", gold, study.sizes.small_units)
    draw_scores(
        study.out / "scores.png", study.tables["overfit"], study.tables["choices"], study.numbers["nuts"]
    )
    study.write()
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    options = vars(command_line(__doc__, "cache").parse_args())
    # Data sets and starts share their programs: compiled once, they are read from disk by all others.
    bnn.enable_compilation_cache(options.pop("cache"))
    main(**options)
