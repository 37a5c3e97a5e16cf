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
from claims import Referee, Verdict, exact, mean, read_claims, share
from study import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION, Study, command_line, converged, panels

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.core.errors import CurvatureError
from ppl_bnn.diagnostics.function_space import convergence

# What stands for maximum likelihood: a prior of standard deviation 100.
FLAT = 1e-4
VARIATIONAL = {"normal": "mean-field VI at that alpha", "fullrank": "full-rank VI at that alpha"}
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
ALL = "prior_factor/all"
# What a fit warns of where its alternation ended at no optimum of the evidence.
UNSETTLED = ("the alternation stopped", "had not settled")
# A precision that changes by less than this share in a round has settled.
SETTLED = 1e-4
LEFT_OUT = "left out of this size of run"
# What may have a precision of its own.
FINER = ("layer", "tensor")


@dataclass(frozen=True)
class Sizes:
    """How much is computed. Rows and units are the study's; the rest trades Monte-Carlo error for time.

    starts: for each of `start_sets` data sets.
    """

    rows: int = 60
    test_rows: int = 2000
    units: int = 8
    curve_rows: int = 30
    curve_units: int = 5
    seeds: int = 12
    curve_seeds: int = 8
    softmax_seeds: int = 4
    start_sets: int = 8
    starts: int = 8
    alphas: tuple[float, ...] = (0.004, 0.01, 0.03, 0.06, 0.1, 0.17, 0.3, 0.55, 1.0, 3.0)
    modes: int = 2
    tunes: tuple[str, ...] = FINER
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
    seeds=1,
    curve_seeds=1,
    softmax_seeds=0,
    start_sets=1,
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


# --- fits for the claims ----------------------------------------------------------------------------------


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


def softmax(study: Study) -> None:
    """Three classes: the same two lines with another likelihood."""
    sizes = study.sizes
    if not sizes.softmax_seeds:
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


def _log_softmax(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    return logits[np.arange(len(y)), y] - np.logaddexp.reduce(logits, axis=1)


def regression(study: Study) -> dict[str, Any]:
    """Numbers: alpha and beta tuned, the formulas by hand, the guard."""
    sizes = study.sizes
    xt, yt = sine(sizes.test_rows, 10_000)
    grid = np.linspace(-4.0, 4.0, 241)[:, None]
    among, beyond = (np.abs(grid[:, 0]) > 0.5) & (np.abs(grid[:, 0]) < 2.0), np.abs(grid[:, 0]) > 3.0
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
        f, g = output_and_gradient(found, grid)
        epistemic = np.einsum("nw,nw->n", g, np.linalg.solve(precision, g.T).T)
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
                "epistemic_ratio": float(epistemic[beyond].mean() / epistemic[among].mean()),
                "warnings": "; ".join(posterior.info.warnings),
            }
        )
        if seed == 0:
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
    study.numbers["guard"] = guard(study)
    return shown


def _precision(weights: Mapping[str, np.ndarray], x: np.ndarray, alpha: float, noise: float) -> np.ndarray:
    """A = alpha I + beta sum_n g_n g_n'."""
    _, g = output_and_gradient(weights, x)
    return alpha * np.eye(g.shape[1]) + noise**-2 * g.T @ g


def _normal_score(f: np.ndarray, noise: float, y: np.ndarray) -> float:
    return float(np.mean(-0.5 * ((y - f) / noise) ** 2 - math.log(noise) - 0.5 * math.log(2.0 * math.pi)))


def guard(study: Study) -> dict[str, Any]:
    """What comes of tuning the noise where there are more weights than rows and the prior says nothing."""
    x, y = sine(6, 0)
    model = partial(curve, units=study.sizes.curve_units, precision=1e-8)
    try:
        posterior = bnn.fit(model, x, y, laplace(study, noise="evidence"))
    except CurvatureError as refused:
        return {"refused": str(refused)}
    figures = posterior.info.figures
    return {
        "gamma": figures["effective_parameters"],
        "noise": figures["noise"],
        "warnings": "; ".join(posterior.info.warnings),
    }


def restarts(study: Study) -> dict[str, Any]:
    """Several starts on each data set: the modes, their evidence and their test scores.

    Gives the posteriors of the first data set, and the best of them by evidence.
    """
    sizes = study.sizes
    xt, yt = mixture(sizes.test_rows, 10_000)
    model = partial(two_classes, units=sizes.units)
    rows: list[dict[str, Any]] = []
    found: list[Any] = []
    traces: list[list[float]] = []
    for data_seed in range(sizes.start_sets):
        x, y = mixture(sizes.rows, data_seed)
        for seed in range(sizes.starts):
            rounds = Rounds()
            posterior = bnn.fit(model, x, y, evidence(study), seed=seed, progress=rounds)
            if data_seed == 0:
                found.append(posterior)
                traces.append(rounds.values)
            images, different = log_images(centre(posterior))
            p = posterior.predict(xt, kind="probit").probabilities[:, 1]
            rows.append(
                {
                    "data_seed": data_seed,
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
    values = np.array([posterior.log_evidence for posterior in found])
    chosen = int(values.argmax())
    weights = np.exp(values - values.max())
    return {
        "posterior": found[chosen],
        "all": found,
        "weights": weights / weights.sum(),
        "traces": traces,
        "seed": chosen,
    }


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
    xt, yt = mixture(study.sizes.test_rows, 10_000)
    right, gradient = output_and_gradient(centre(posterior), xt)
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
        "slip_error": error(gradient @ flat, yt),
        "error": error(right, yt),
    }
    return {"axis": axis, "a": a.reshape(shape), "with_variance": with_variance.reshape(shape)}


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
            hessian = bnn.fit(model, x, y, laplace(study, curvature="hessian", start=weights, optimise=False))
            eigenvalues = np.linalg.eigvalsh(hessian.approximation.covariance.precision()) - alpha
            row |= {
                "log_evidence_hessian": hessian.log_evidence,
                "gamma_hessian": hessian.info.figures["effective_parameters"],
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


def slips(log_evidence: float, log_determinant: float, weights: int, alpha: float) -> dict[str, float]:
    """The log evidence with + 1/2 ln|A|, and with alpha in place of alpha^(W/2)."""
    return {
        "wrong_sign": log_evidence + log_determinant,
        "lost_powers": log_evidence + (1.0 - 0.5 * weights) * math.log(alpha),
    }


def alpha_curve(study: Study, posterior: Any) -> tuple[list[dict[str, Any]], Any]:
    """The evidence over alpha, what a wrong sign of 1/2 ln|A| makes of it, and the posterior at the tuned alpha."""
    sizes, tuned = study.sizes, float(posterior.info.figures[ALL])
    rows, known = evidence_of_alpha(
        study, sizes.units, sorted({*sizes.alphas, tuned}), sizes.modes, posterior
    )
    for row in rows:
        row |= slips(row["log_evidence_ggn"], row["log_determinant_ggn"], row["weights"], row["alpha"])
    study.tables["alpha"] = rows
    return rows, known[[row["alpha"] for row in rows].index(tuned)]


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
    return rows


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
    references: dict[str, np.ndarray] = {}
    study.tables["reference"] = []
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
        references[name] = p
        at_test_rows = convergence(posterior, xt).quantities["f"]
        study.tables["reference"].append(
            {"reference": name}
            | {figure: getattr(at_test_rows, figure) for figure in ("rhat", "ess_bulk", "ess_tail")}
        )
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
        hessian = bnn.fit(fixed, x, y, laplace(study, curvature="hessian", start=start, optimise=False))
        add_laplace("exact Hessian at the fixed point", hessian, ("linearised",), alpha=f"{alpha:.4g}")
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
        for name, reference in references.items():
            row[f"gap_to_{name}"] = "" if p is None else float(np.mean(np.abs(p - reference)))
    study.tables["choices"] = rows
    study.numbers["direct"] = {
        "alpha_fixed_point": alpha,
        "alpha_direct": direct_alpha,
        "log_evidence_fixed_point": base.log_evidence,
        "log_evidence_direct": direct.log_evidence,
    }


# --- verdicts ---------------------------------------------------------------------------------------------


def simulated(sizes: Sizes) -> str:
    """What every verdict has to say of its sizes."""
    return (
        f"data simulated here: {sizes.rows} rows of classes, {sizes.curve_rows} rows of a curve; {sizes.units} and "
        f"{sizes.curve_units} tanh units; Adam and L-BFGS (the source: single data sets, conjugate gradients)"
    )


def column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], float)


def row_of(rows: Sequence[Mapping[str, Any]], choice: str, predictive: str) -> Mapping[str, Any]:
    return next(row for row in rows if row["choice"] == choice and row.get("predictive") == predictive)


def judge_overfit(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """Two classes: half of what maximum likelihood loses to the optimal classifier is won back; the error falls."""
    ml, point, variance, best = (
        column(rows, f"log_score_{name}") for name in ("ml", "evidence_point", "evidence_variance", "optimal")
    )
    wrong, fewer, least = (column(rows, f"error_{name}") for name in ("ml", "evidence", "optimal"))
    referee.measured(
        "overfit-score",
        mean(point - (ml + best) / 2.0),
        f"test log score {ml.mean():.3f} by maximum likelihood, {point.mean():.3f} at w_MAP by the evidence, "
        f"{best.mean():.3f} by the optimal classifier",
    )
    referee.measured(
        "overfit-error",
        mean(wrong - fewer),
        f"test error {wrong.mean():.3f} by maximum likelihood, {fewer.mean():.3f} by the evidence, {least.mean():.3f} "
        "by the optimal classifier",
    )
    referee.measured(
        "variance-score",
        mean(variance - point),
        f"test log score {variance.mean():.4f} with the variance, {point.mean():.4f} without; higher with it in "
        f"{np.count_nonzero(variance > point)} of {len(rows)} data sets",
    )


def judge_alternation(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """Settled where the last round changed log alpha by less than 1e-4."""
    settled = int(np.count_nonzero(column(rows, "last_change") < SETTLED))
    referee.measured(
        "alternation",
        share(settled, len(rows)),
        f"{settled} of {len(rows)} data sets settled, in a median of {np.median(column(rows, 'rounds')):.0f} rounds",
    )


def judge_softmax(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        referee.not_run("softmax", LEFT_OUT)
        return
    ml, ours = column(rows, "log_score_ml"), column(rows, "log_score_evidence")
    referee.measured(
        "softmax",
        mean(ours - ml),
        f"test log score {ml.mean():.3f} by maximum likelihood, {ours.mean():.3f} by the evidence with the variance",
    )


def judge_regression(referee: Referee, rows: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any]) -> None:
    """The formulas by hand, the equations of alpha and beta, the gain over maximum likelihood, and the band."""
    for key, name in (
        ("evidence-formula", "log_evidence_by_hand_off"),
        ("variance-formula", "variance_by_hand_off"),
        ("alpha-equation", "alpha_equation_off"),
        ("beta-equation", "beta_equation_off"),
    ):
        referee.measured(
            key,
            exact(float(column(rows, name).max())),
            f"the largest of {len(rows)} fits, one for each data set",
        )
    ml, ours = column(rows, "log_score_ml"), column(rows, "log_score_evidence_variance")
    referee.measured(
        "regression",
        mean(ours - ml),
        f"test log score {ml.mean():.3f} by maximum likelihood, {ours.mean():.3f} by the evidence; standard deviation "
        f"of the noise {column(rows, 'noise_ml').mean():.3f} and {column(rows, 'noise').mean():.3f} (true {NOISE})",
    )
    if all("epistemic_ratio" in row for row in rows):
        ratios = column(rows, "epistemic_ratio")
        referee.measured(
            "band", mean(np.log10(ratios)), f"the ratio is {ratios.min():.3g} to {ratios.max():.3g}"
        )
    else:
        referee.undecided(
            "band",
            "the ratio was stored for one of the data sets only",
            f"there it is {numbers['epistemic_ratio']:.3g}",
        )


def judge_noise_equation(referee: Referee, guarded: Mapping[str, Any] | None) -> None:
    """At alpha = 0 the formula is 0 / 0 where the gradients of all rows are independent and the network fits them."""
    proof = (
        "at alpha = 0 gamma is the rank of the rows' gradients. With N weights or more it can be N, and a network that "
        "fits all rows has SSE = 0: then 1 / beta is 0 / 0. At alpha > 0, with the Gauss-Newton matrix, gamma is below "
        "N and the formula is defined"
    )
    shown = ""
    if guarded and "refused" in guarded:
        shown = f"; 6 rows and alpha = 1e-8: the library refuses ({guarded['refused'][:120]})"
    elif guarded:
        shown = (
            f"; 6 rows and alpha = 1e-8: gamma {guarded['gamma']:.3f}, noise {guarded['noise']:.2e}, warnings: "
            f"{guarded['warnings'][:120] or 'none'}"
        )
    referee.proved("noise-equation", True, proof + shown)


def judge_starts(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """Different modes on the first data set; over data sets, the test score of the mode that the evidence picks.

    Starts that ended at one value of the evidence are one mode, which counts once; one mode is no choice.
    """
    gains, counts, shown = [], [], ""
    for data_seed in sorted({row.get("data_seed", 0) for row in rows}):
        own = [row for row in rows if row.get("data_seed", 0) == data_seed]
        values = column(own, "log_evidence")
        # np.unique sorts by evidence: the last is the largest.
        _, first = np.unique(np.round(values, 3), return_index=True)
        counts.append(len(first))
        if not shown:
            shown = f"{len(own)} starts; log evidence {values.min():.2f} to {values.max():.2f}"
        if len(first) > 1:
            *others, picked = column(own, "log_score")[first]
            gains.append(picked - np.mean(others))
    referee.measured("starts", exact(counts[0]), shown)
    if not gains:
        referee.undecided(
            "picked", "on every data set all starts ended in one mode: there is nothing to pick"
        )
        return
    referee.measured(
        "picked",
        mean(gains),
        f"{len(gains)} of {len(counts)} data sets had several modes, at most {max(counts)}",
    )


def judge_images(referee: Referee, rows: Sequence[Mapping[str, Any]], units: int) -> None:
    """A mode that a symmetry maps to itself has fewer images; for a large alpha the mode has one."""
    differ = column(rows, "different_units").astype(int)
    best = max(rows, key=lambda row: row["log_evidence"])
    referee.proved(
        "images",
        True,
        "for a large alpha the posterior has one highest mode, which every symmetry maps to itself: one image (there "
        "|w|^2 is at most 2 N ln 2 / alpha, and in so small a ball alpha exceeds the curvature of the likelihood). "
        f"In {np.count_nonzero(differ < units)} of {len(rows)} modes found here units are equal up to sign, and "
        "symmetries that exchange them give no other image "
        f"({differ.min()} to {differ.max()} of {units} differ); where the evidence is largest ln(images) is "
        f"{best['log_images']:.2f}, ln(M!) + M ln 2 is {log_symmetries(units):.2f}",
    )


def judge_contours(referee: Referee, rows: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any]) -> None:
    """How far contours of one fit move once the variance is in the prediction, in steps of the grid."""
    step = numbers["grid_step"]
    (middle,) = (row for row in rows if row["level"] == 0.5)
    others = {row["level"]: row["median_displacement"] / step for row in rows if row["level"] != 0.5}
    referee.measured(
        "contour-half",
        exact(middle["largest_displacement"] / step),
        f"{100.0 * numbers['points_that_change_sides']:.3g} % of the grid's points change sides; kappa is positive, so "
        "kappa a has the sign of a",
    )
    referee.measured(
        "contour-others",
        exact(min(others.values())),
        f"medians by level: {', '.join(f'{level:g}: {moved:.2f}' for level, moved in others.items())}",
    )


def judge_slip(referee: Referee, numbers: Mapping[str, Any]) -> None:
    """The mean of a(x, w) is a_MAP; b'w_MAP is another number where a is not linear in the weights."""
    scored = ""
    if "slip_error" in numbers:
        scored = f"; test error {numbers['slip_error']:.3f}, with a_MAP {numbers['error']:.3f}"
    referee.proved(
        "slip",
        True,
        "a(x, w) = a_MAP + b'(w - w_MAP) to first order, whose mean at w ~ N(w_MAP, A^-1) is a_MAP; b'w_MAP is a_MAP "
        "only if a is linear in the weights. The formula with kappa a_MAP and the library differ by "
        f"{numbers['probit_by_hand_off']:.1e}; b'w_MAP puts {100.0 * numbers['slip_changes_sides']:.1f} % of the plane "
        f"on the other side of the boundary{scored}",
    )


def judge_chains(referee: Referee, numbers: Mapping[str, Any]) -> None:
    """The library's diagnosis of the two runs of NUTS, in function space."""
    for key, name in (("chains-fixed", "nuts"), ("chains-scale", "nuts_hierarchical")):
        found = numbers[name]
        referee.measured(
            key,
            exact(float(found["verdict"] == "converged")),
            "; ".join([found["verdict"], *found["reasons"]]),
        )


def judge_gaps(
    referee: Referee, rows: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]], floor: float
) -> None:
    """Which of two predictions is nearer to that of NUTS at the same alpha, where its chains can tell."""
    reference = next((row for row in references if row["reference"] == "nuts"), None)
    if reference is None:
        known, why = False, "R-hat and ESS of NUTS at the test rows were not stored"
    else:
        known = converged(reference["rhat"], reference["ess_bulk"])
        why = f"NUTS at the test rows: R-hat {reference['rhat']:.3f}, bulk ESS {reference['ess_bulk']:.0f}"

    def gap(choice: str, predictive: str) -> float:
        return row_of(rows, choice, predictive)["gap_to_nuts"]

    def nearer(key: str, far: float, near: float, numbers: str) -> None:
        numbers = f"{numbers}; two halves of NUTS differ by {floor:.4f}"
        if abs(far - near) < floor:
            same = f"the two distances, {near:.4f} and {far:.4f}, differ by less than two halves of NUTS do"
            referee.undecided(key, same, "; ".join(filter(None, (numbers, "" if known else why))))
        else:
            referee.measured(key, exact(far - near), numbers, converged=known, why_not=why)

    kinds = {kind: gap("fixed point", kind) for kind in ("point", "probit", "linearised", "sampled")}
    listing = ", ".join(f"{kind} {value:.4f}" for kind, value in kinds.items())
    nearer("variance-gap", kinds["point"], kinds["probit"], f"mean |p - p_NUTS|: {listing}")
    factorised, full = (row_of(rows, name, "sampled") for name in VARIATIONAL.values())
    nearer(
        "full-rank-gap",
        factorised["gap_to_nuts"],
        full["gap_to_nuts"],
        f"mean |p - p_NUTS| {full['gap_to_nuts']:.4f} against {factorised['gap_to_nuts']:.4f}; ELBO "
        f"{full['elbo']:.2f} against {factorised['elbo']:.2f}",
    )
    hessian = next(row for row in rows if row["choice"] == "exact Hessian at the fixed point")
    if "gap_to_nuts" not in hessian:
        referee.undecided("hessian-gap", f"there is no Gaussian to compare: {hessian['warnings']}")
        return
    near = hessian["gap_to_nuts"]
    nearer(
        "hessian-gap",
        kinds["linearised"],
        near,
        f"mean |p - p_NUTS| {near:.4f} with the exact Hessian, {kinds['linearised']:.4f} with Gauss-Newton; gamma "
        f"{hessian['gamma']:.4g} against {row_of(rows, 'fixed point', 'linearised')['gamma']:.4g}",
    )


def judge_direct(referee: Referee, rows: Sequence[Mapping[str, Any]], numbers: Mapping[str, float]) -> None:
    """What the fixed point leaves of the evidence, against the maximum with the mode found again."""
    fixed = row_of(rows, "fixed point", "linearised")
    again = row_of(rows, "direct, mode found again", "linearised")
    referee.measured(
        "derivative",
        exact(numbers["log_evidence_direct"] - numbers["log_evidence_fixed_point"]),
        f"fixed point: alpha {numbers['alpha_fixed_point']:.4g}, log evidence "
        f"{numbers['log_evidence_fixed_point']:.3f}, test log score {fixed['log_score']:.4f}; maximum with the mode "
        f"found again: alpha {numbers['alpha_direct']:.4g}, {numbers['log_evidence_direct']:.3f}, "
        f"{again['log_score']:.4f}",
    )


def judge_finer(referee: Referee, rows: Sequence[Mapping[str, Any]], tune: str) -> None:
    """A precision for each layer or tensor against one. An alternation that ended at no optimum says nothing of it."""
    keys = f"{tune}-evidence", f"{tune}-score"
    name = f"one alpha for each {tune}"
    if all(row["choice"] != name for row in rows):
        for key in keys:
            referee.not_run(key, LEFT_OUT)
        return
    row, one = row_of(rows, name, "linearised"), row_of(rows, "fixed point", "linearised")
    numbers = (
        f"log evidence {row['log_evidence']:.2f} against {one['log_evidence']:.2f} with one alpha, test log score "
        f"{row['log_score']:.4f} against {one['log_score']:.4f}; alpha {row['alpha']}"
    )
    if any(words in row.get("warnings", "") for words in UNSETTLED):
        for key in keys:
            referee.undecided(
                key, "the alternation ended before it settled, so this is no optimum to compare", numbers
            )
        return
    referee.measured(keys[0], exact(row["log_evidence"] - one["log_evidence"]), numbers)
    referee.measured(keys[1], mean([row["log_score"] - one["log_score"]]), numbers)


def judge_gaussian(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """The likelihood of a label is Bernoulli's; half a squared error is the loss of another model."""
    right, wrong = (
        row_of(rows, "fixed point", "point"),
        row_of(rows, "Gaussian likelihood (the slip)", "point"),
    )
    referee.proved(
        "gaussian",
        True,
        "-log p(t = 1) = -ln y has no upper bound and (1 - y)^2 / 2 is at most 1/2, so the two differ by more than a "
        f"constant. With the Bernoulli likelihood alpha is {float(right['alpha']):.4g} and the test log score at w_MAP "
        f"{right['log_score']:.4f}; with N(y, 1) they are {float(wrong['alpha']):.4g} and {wrong['log_score']:.4f}",
    )


def judge_steps(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """Two slips on the way to the last line, and where each would put the maximum over the alphas of the table."""
    proofs = {
        "sign": (
            "wrong_sign",
            "the integral of exp(-w'Aw / 2) is (2 pi)^(W/2) |A|^(-1/2), so its log has -1/2 ln|A|",
        ),
        "powers": (
            "lost_powers",
            "the density N(0, I / alpha) of W weights has the factor (alpha / 2 pi)^(W/2): alpha has the power W/2",
        ),
    }
    best, first, last = (
        max(rows, key=lambda row: row["log_evidence_ggn"])["alpha"],
        rows[0]["alpha"],
        rows[-1]["alpha"],
    )
    for key, (name, proof) in proofs.items():
        taken = max(rows, key=lambda row: row[name])["alpha"]
        referee.proved(
            key,
            True,
            f"{proof}. Over alpha from {first:.3g} to {last:.3g} the right line has its maximum at {best:.3g}, the "
            f"printed one at {taken:.3g}",
        )


def judge_gamma(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """With the exact Hessian gamma is no count where it is below 0 or above the number of weights."""
    known = [row for row in rows if "gamma_hessian" in row]
    outside = [row for row in known if not 0.0 <= row["gamma_hessian"] <= row["weights"]]
    indefinite = [row for row in rows if row.get("negative_eigenvalues_of_H") == "A indefinite"]
    listing = "; ".join(
        f"alpha {row['alpha']:.3g}: gamma {row['gamma_hessian']:.1f} ({row['negative_eigenvalues_of_H']} negative "
        "eigenvalues)"
        for row in outside
    )
    numbers = (
        f"at {len(known)} values of alpha with A positive definite gamma is outside of 0 to W at {len(outside)}"
        f"{f': {listing}' if outside else ''}; A is indefinite at {len(indefinite)} more; with the Gauss-Newton matrix "
        f"gamma is {column(rows, 'gamma_ggn').min():.1f} to {column(rows, 'gamma_ggn').max():.1f}"
    )
    if outside:
        proof = "an eigenvalue of H between -alpha and 0 adds a negative term of any size, while A is positive definite"
        referee.proved("gamma", True, f"{proof}; {numbers}")
    else:
        referee.undecided("gamma", "no fit of this run shows it", numbers)


def judge_gold_standard(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """One mode leaves its images out; what is missing with nothing, M! 2^M or its different images counted."""
    gaps = {
        "nothing": "gap_one_mode",
        "ln(M!) + M ln 2": "gap_with_symmetries",
        "ln(different images)": "gap_with_images",
    }
    low = [row for row in rows if row["gap_one_mode"] > 2.0 * row["smc_standard_error"]]
    distances = ", ".join(
        f"{np.abs(column(rows, name)).mean():.2f} with {added} added" for added, name in gaps.items()
    )
    cases = "; ".join(
        f"{row['units']} units, alpha {row['alpha']:.2g}: {row['log_evidence_smc']:.2f} +- "
        f"{row['smc_standard_error']:.2f} ({', '.join(f'{row[name]:+.2f}' for name in gaps.values())})"
        for row in rows
    )
    referee.proved(
        "one-mode",
        True,
        "the images of a mode under the symmetries of the units have its density, and p(D) is an integral over all of "
        "them: in the limit of many rows log p(D) exceeds the evidence of one mode by ln(images) or more. By tempered "
        f"Monte Carlo one mode is too low by more than two standard errors in {len(low)} of {len(rows)} cases; mean "
        f"distance in nats: {distances}; log p(D) +- one standard error (what is missing with each): {cases}",
    )


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    sizes, tables, numbers = study.sizes, study.tables, study.numbers
    referee = Referee(read_claims("evidence_framework"), simulated(sizes))
    chosen = tables["choices"]
    judge_overfit(referee, tables["overfit"])
    judge_alternation(referee, tables["overfit"])
    judge_softmax(referee, tables.get("softmax", ()))
    judge_regression(referee, tables["regression"], numbers)
    judge_noise_equation(referee, numbers.get("guard"))
    judge_starts(referee, tables["restarts"])
    judge_images(referee, tables["restarts"], sizes.units)
    judge_contours(referee, tables["contours"], numbers["contours"])
    judge_slip(referee, numbers["contours"])
    judge_chains(referee, numbers)
    judge_gaps(referee, chosen, tables.get("reference", ()), numbers["nuts"]["noise_floor_of_gap"])
    judge_direct(referee, chosen, numbers["direct"])
    for tune in FINER:
        judge_finer(referee, chosen, tune)
    judge_gaussian(referee, chosen)
    judge_steps(referee, tables["alpha"])
    judge_gamma(referee, tables["alpha"])
    judge_gold_standard(referee, tables["gold_standard"])
    referee.not_run(
        "uses",
        "named as uses; studied in continual_learning.py and active_learning.py, with claims of their own",
    )
    return referee.verdicts()


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
    middle = shown["mean"]
    right.plot(grid, middle, color=BLUE, linewidth=1.8, label="evidence")
    right.fill_between(
        grid,
        middle - 2 * total,
        middle + 2 * total,
        color=BLUE,
        alpha=0.18,
        linewidth=0,
        label="$1/\\beta + g'A^{-1}g$",
    )
    right.fill_between(
        grid,
        middle - 2 * epistemic,
        middle + 2 * epistemic,
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
    known = [(row["alpha"], row["log_evidence_hessian"]) for row in rows if row["log_evidence_hessian"] != ""]
    if known:
        left.plot(*zip(*known, strict=True), "s--", color=ORANGE, label="exact Hessian")
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
        if row.get("gap_to_nuts") not in (None, "", 0.0) and row["choice"] != "optimal"
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
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    options = vars(command_line(__doc__, "cache").parse_args())
    # Data sets and starts share their programs: compiled once, they are read from disk by all others.
    bnn.enable_compilation_cache(options.pop("cache"))
    main(**options)
