"""Bayes by Backprop for a curve: costs of two kinds, a band away from the data, and how far off it is.

Source: an English tutorial on Bayes by Backprop in Keras, after C. Blundell, J. Cornebise, K. Kavukcuoglu and D.
Wierstra (2015), "Weight uncertainty in neural networks". 32 rows, x linear in [-1/2, 1/2], y = 10 sin(2 pi x) + e with
e ~ N(0, 1) of known standard deviation; ReLU layers of 20, 20 and 1 unit; every weight and bias has the prior

    p(w) = 1/2 N(w; 0, 1.5^2) + 1/2 N(w; 0, 0.1^2)

of its own; q(w) = N(mu, softplus(rho)^2), begun at rho = 0 and mu ~ N(0, 1.13), 1.13 being the variance of the prior.
Each of 1500 steps of Adam at the rate 0.08 sees all rows and one draw w = mu + softplus(rho) eps, and lowers

    F = E_q[log q(w) - log p(w)] - E_q log p(D | w) = KL(q || p(w | D)) - log p(D),

a complexity cost and a likelihood cost; with M mini-batches in an epoch the first counts 1/M in each. `Source` below
is that schedule to the letter, written over the library's guide, bound and loop; what is left to differ is the random
numbers, double precision, and the epsilon in Adam's denominator (1e-8 for Keras's 1e-7). `bnn.SVI` lowers the rate in
the second half and averages the iterates, and is shown beside it.

Corrected here: the mean of the predictive is not the pass at the mean of the weights; a draw of the weights serves all
rows, where the source's prediction draws anew for every 32 of them, so that none of its 500 curves is a network; and
log(p1 + p2), which underflows at the first steps with the narrowest prior of Blundell et al., though not with the
source's, is logaddexp(log p1, log p2).

Beside it, on the same rows: maximum likelihood, the mode, local reparameterisation, noise that is learned (for all
rows, and for each input), NUTS where it converges in function space, and log p(D) by tempered sequential Monte Carlo,
which no ELBO may exceed.

    python comparisons/bayes_by_backprop.py [--tiny] [--out DIR] [--cache DIR]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, exact, mean, read_claims
from study import BLACK, BLUE, GREEN, ORANGE, VERMILION, Study, command_line, converged, panels

import ppl_bnn as bnn
from ppl_bnn import dist, guides, likelihoods, priors, scores
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import DivergenceError
from ppl_bnn.core.progress import Progress
from ppl_bnn.diagnostics.function_space import convergence
from ppl_bnn.diagnostics.importance import pareto_k
from ppl_bnn.inference.method import Outcome, Stopwatch
from ppl_bnn.inference.optimisation.adam import descent
from ppl_bnn.inference.optimisation.loops import STRETCH
from ppl_bnn.inference.variational.guides import Guide
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.inference.variational.objectives import Objective

NOISE = 1.0
SHARES, SCALES = (0.5, 0.5), (1.5, 0.1)
PRIOR = priors.ScaleMixture(SHARES, SCALES)
# What stands for no prior at all: a standard deviation of 100.
FLAT = priors.Normal(0.0, 100.0)
# Where q begins: the standard deviation of the means, that of the prior, and softplus(0).
MEANS = math.sqrt(sum(share * scale**2 for share, scale in zip(SHARES, SCALES, strict=True)))
SPREAD = math.log(2.0)
# Rows that a prediction in the source shares its weights over.
PREDICTED_TOGETHER = 32
NO_REFERENCE = "no reference"
SOURCE = "the source's run"
LEARNED = ("learned noise", "learned noise, begun at the truth")
OF_INPUT, SAMPLED, SAMPLED_NOISE = "noise of the input", "NUTS", "learned noise, NUTS"
GAPS = ("mean_gap", "sd_ratio", "wasserstein")


@dataclass(frozen=True)
class Sizes:
    """How much is computed. Rows, units and steps are the source's; the rest trades Monte-Carlo error for time."""

    rows: int = 32
    units: tuple[int, ...] = (20, 20)
    steps: int = 1500
    longer: int = 10
    draws: int = 500
    grid: int = 1000
    many_draws: int = 5000
    coarse: int = 121
    seeds: int = 8
    test_rows: int = 1000
    mode_steps: int = 30_000
    elbo_draws: int = 1000
    chains: int = 4
    sampled: int = 700
    tree_depth: int = 10
    particles: int = 256
    moves: int = 5
    leaps: int = 16
    runs: int = 6
    gradient_draws: int = 400
    batch: int = 8


FULL = Sizes()
# The grid and the test rows are as many, and so share what is compiled.
TINY = Sizes(
    rows=16,
    units=(3, 3),
    steps=60,
    longer=2,
    draws=30,
    grid=128,
    many_draws=60,
    coarse=31,
    seeds=1,
    test_rows=128,
    mode_steps=60,
    elbo_draws=50,
    chains=2,
    sampled=30,
    tree_depth=4,
    particles=40,
    moves=2,
    leaps=3,
    runs=3,
    gradient_draws=20,
    batch=4,
)


# --- data and models ----------------------------------------------------------------------------------


def truth(x: np.ndarray) -> np.ndarray:
    return 10.0 * np.sin(2.0 * np.pi * x)


def curve(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, 1), linear in [-1/2, 1/2], and y (N,)."""
    x = np.linspace(-0.5, 0.5, rows)
    return x[:, None], truth(x) + NOISE * np.random.default_rng(seed).normal(size=rows)


def fresh(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that no fit sees, from the same interval."""
    rng = np.random.default_rng(10_000)
    x = rng.uniform(-0.5, 0.5, rows)
    return x[:, None], truth(x) + NOISE * rng.normal(size=rows)


def wide(count: int) -> np.ndarray:
    """Inputs (count, 1), linear in [-3/2, 3/2]."""
    return np.linspace(-1.5, 1.5, count)[:, None]


def known_noise(x: Any, y: Any = None, *, units: Sequence[int] = (20, 20), prior: Any = PRIOR) -> None:
    """y ~ N(f(x, w), 1): the source's model."""
    f = bnn.mlp(x, [*units, 1], activation="relu", prior=prior)
    bnn.observe(y, f, likelihoods.Gaussian(NOISE))


def learned_noise(x: Any, y: Any = None, *, units: Sequence[int] = (20, 20)) -> None:
    """y ~ N(f(x, w), noise^2), log noise ~ N(0, 1): one noise for all rows, with an uncertainty of its own."""
    noise = bnn.sample("noise", dist.LogNormal(0.0, 1.0))
    f = bnn.mlp(x, [*units, 1], activation="relu", prior=PRIOR)
    bnn.observe(y, f, likelihoods.Gaussian(noise))


def noise_of_input(x: Any, y: Any = None, *, units: Sequence[int] = (20, 20)) -> None:
    """y ~ N(f_1(x, w), softplus(f_2(x, w))^2): both kinds of uncertainty, each a function of the input."""
    f = bnn.mlp(x, [*units, 2], activation="relu", prior=PRIOR)
    bnn.observe(y, f, likelihoods.HeteroscedasticGaussian())


# --- formulas by hand ---------------------------------------------------------------------------------


def forward(weights: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """f (S, N) of ReLU networks with weights (S, I, O) and biases (S, O), at x (N, 1)."""
    layers = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    h = np.broadcast_to(x, (len(weights[f"{layers[0]}.weight"]), *x.shape))
    for layer in layers:
        h = h @ weights[f"{layer}.weight"] + weights[f"{layer}.bias"][:, None, :]
        if layer != layers[-1]:
            h = np.maximum(h, 0.0)
    return h[..., 0]


def _normal(w: np.ndarray, scale: float) -> np.ndarray:
    """log N(w; 0, scale^2), in the precision of w."""
    kind = w.dtype.type
    return -kind(0.5) * (w / kind(scale)) ** 2 - kind(math.log(scale) + 0.5 * math.log(2.0 * math.pi))


def log_mixture(
    w: np.ndarray, shares: Sequence[float] = SHARES, scales: Sequence[float] = SCALES
) -> np.ndarray:
    """log(share1 N(w; 0, scale1^2) + share2 N(w; 0, scale2^2)) for each weight, by logaddexp."""
    parts = [
        w.dtype.type(math.log(share)) + _normal(w, scale) for share, scale in zip(shares, scales, strict=True)
    ]
    return np.logaddexp(*parts)


def log_mixture_as_written(
    w: np.ndarray, shares: Sequence[float] = SHARES, scales: Sequence[float] = SCALES
) -> np.ndarray:
    """The same with densities added before the logarithm is taken: minus infinity where both underflow."""
    parts = [
        w.dtype.type(share) * np.exp(_normal(w, scale)) for share, scale in zip(shares, scales, strict=True)
    ]
    with np.errstate(divide="ignore"):
        return np.log(parts[0] + parts[1])


def draw_mixture(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draws of the prior."""
    return rng.normal(size=shape) * np.where(rng.uniform(size=shape) < SHARES[0], *SCALES)


def mean_of_relu(loc: float, scale: float) -> float:
    """E max(w, 0) of w ~ N(loc, scale^2), exactly."""
    z = loc / scale
    below = 0.5 * math.erfc(-z / math.sqrt(2.0))
    return loc * below + scale * math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)


def least_divergence(scales: Sequence[float] = SCALES) -> float:
    """min over s of KL(N(0, s^2) || prior) of one weight, in nats: what a normal pays where the data say nothing.

    The trapezium rule over 8 standard deviations on either side, for s from half the smaller scale to twice the larger.
    """
    z = np.linspace(-8.0, 8.0, 2001)
    weights = np.exp(-0.5 * z * z)
    s = np.geomspace(0.5 * min(scales), 2.0 * max(scales), 401)
    cross = -(log_mixture(s[:, None] * z, scales=scales) @ (weights / weights.sum()))
    return float((cross - np.log(s) - 0.5 * math.log(2.0 * math.pi * math.e)).min())


# --- the source's schedule ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Source(bnn.Method):
    """Bayes by Backprop as the source runs it: one rate for all steps, one draw in each, the last iterate is the fit.

    Guide, bound and Adam are the library's. history: "loss", "likelihood_cost" and "complexity_cost" of each step.
    """

    steps: int = 1500
    learning_rate: float = 0.08

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        guide = Guide.of("diagonal", problem.program.sites.values())
        objective = bound_of(problem, guide)
        rng = np.random.default_rng(problem.seed)
        sites = problem.program.sites.values()
        means = {site.name: MEANS * rng.normal(size=site.unconstrained_shape) for site in sites}
        begun = guide.start(means, SPREAD, rng)
        loop = descent(problem, objective, begun)
        loop.begin(begun, problem.seed)
        trail = np.empty((0, 3))
        task = progress.task(self.name, self.steps)
        try:
            while len(trail) < self.steps:
                count = min(STRETCH, self.steps - len(trail))
                rates = np.full(count, self.learning_rate)
                found = loop.advance(rates, np.zeros(count, bool), np.ones(count))
                trail = np.concatenate([trail, found])
                if not math.isfinite(trail[-1, 0]):
                    raise DivergenceError.of(
                        "", "a finite loss", f"{trail[-1, 0]} at step {len(trail) - 1}", "another seed"
                    )
                task.update(len(trail), elbo=-float(found[:, 0].mean()))
        finally:
            task.close()
        return Outcome(
            approximation=objective.approximation(loop.latest()),
            history=dict(zip(("loss", "likelihood_cost", "complexity_cost"), trail.T, strict=True)),
            compile_seconds=loop.compile_seconds,
            run_seconds=watch() - loop.compile_seconds,
            gradient_evaluations=float(self.steps),
        )


def bound_of(problem: Problem, guide: Guide, estimator: str = "plain") -> Objective:
    """F of a guide at one draw, log q and log p at the draw itself as in the source."""
    return Objective(
        problem,
        guide,
        estimator=estimator,
        analytic=False,
        sticking_the_landing=False,
        objective="elbo",
        alpha=None,
        particles=1,
        approximate=False,
        population=None,
    )


# --- the evidence by tempered sequential Monte Carlo ----------------------------------------------------


@dataclass(frozen=True)
class Tempered:
    """log p(D), its standard error over independent runs, inverse temperatures from 0 to 1, and the last particles.

    particles: (runs * S, P), flat; log_weights: (runs * S,), normalised: runs count in proportion to their estimates.
    """

    log_evidence: float
    error: float
    ladder: tuple[float, ...]
    particles: np.ndarray
    log_weights: np.ndarray
    gradients: int


@contextmanager
def opened(model: Callable[..., Any], x: np.ndarray, y: np.ndarray) -> Iterator[Problem]:
    """The model on data, opened in NumPyro."""
    chosen = system("numpyro")
    with chosen.session("float64", "cpu", 1):
        data, targets = chosen.asarray(x), chosen.asarray(y)
        program = Program.of(chosen, model, data, targets, language=True)
        yield Problem(program, data, targets, x, y, 0, "cpu", "float64")


def tempered_smc(
    model: Callable[..., Any],
    x: np.ndarray,
    y: np.ndarray,
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray],
    *,
    particles: int,
    moves: int,
    leaps: int,
    runs: int,
    seed: int = 0,
) -> Tempered:
    """log p(D) of a model of independent latent variables on the real line, whose prior draws are draw(rng, shape).

    Particles from the prior pass through p(w) p(D | w)^t, t from 0 to 1: they are weighted with p(D | w)^(t' - t),
    resampled, and moved by Hamiltonian Monte Carlo, `moves` trajectories of `leaps` leapfrog steps, each accepted or
    rejected. Where ladder and step sizes are fixed the product of mean weights has the mean p(D), whatever the moves
    (Del Moral, Doucet and Jasra 2006), so that its logarithm is low in the mean. A first run, which is thrown away,
    fixes both (effective sample size of one half; acceptance of 0.7); `runs` others give log mean Z and its standard
    error.
    """
    rng = np.random.default_rng(seed)
    with opened(model, x, y) as problem:
        program, chosen = problem.program, problem.system
        size = program.parameter_count

        def tempered(at: Mapping[str, Any]) -> Any:
            u = program.unravel(at["w"])
            likelihood = program.log_likelihood(u, problem.x, problem.y).sum()
            return program.log_prior(u, problem.x, problem.y) + at["t"] * likelihood

        # The derivative in t is the log likelihood.
        compiled = chosen.compile(chosen.vmap(chosen.value_and_grad(tempered)))
        gradients = 0

        def evaluate(w: np.ndarray, t: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            nonlocal gradients
            gradients += len(w)
            value, slope = compiled({"w": chosen.asarray(w), "t": chosen.asarray(np.full(len(w), t))})
            return chosen.to_numpy(value), chosen.to_numpy(slope["w"]), chosen.to_numpy(slope["t"])

        def move(w: np.ndarray, t: float, width: float) -> tuple[np.ndarray, np.ndarray, float]:
            """One trajectory for each particle; widths differ by up to a fifth, so that no orbit closes."""
            value, slope, likelihood = evaluate(w, t)
            step = width * rng.uniform(0.8, 1.2, size=(len(w), 1))
            momentum = rng.normal(size=w.shape)
            place, energy = w, value - 0.5 * (momentum**2).sum(1)
            # A trajectory that runs off the finite numbers is rejected.
            with np.errstate(over="ignore", invalid="ignore"):
                for _ in range(leaps):
                    momentum = momentum + 0.5 * step * slope
                    place = place + step * momentum
                    last, slope, there = evaluate(place, t)
                    momentum = momentum + 0.5 * step * slope
                change = last - 0.5 * (momentum**2).sum(1) - energy
                accepted = np.log(rng.uniform(size=len(w))) < change
            return (
                np.where(accepted[:, None], place, w),
                np.where(accepted, there, likelihood),
                float(accepted.mean()),
            )

        def once(
            given: tuple[list[float], list[float]] | None,
        ) -> tuple[float, list[float], list[float], np.ndarray]:
            w = draw(rng, (particles, size))
            likelihood = evaluate(w, 0.0)[2]
            t, total, ladder, widths, width = 0.0, 0.0, [0.0], [], 0.02
            while t < 1.0:
                following = next_temperature(likelihood, t) if given is None else given[0][len(ladder)]
                increments = (following - t) * likelihood
                weights = np.exp(increments - increments.max())
                total += increments.max() + math.log(weights.mean())
                # Systematic resampling.
                places = (rng.uniform() + np.arange(particles)) / particles
                chosen_ones = np.minimum(
                    np.searchsorted(np.cumsum(weights) / weights.sum(), places), particles - 1
                )
                w, likelihood, t = w[chosen_ones], likelihood[chosen_ones], following
                if given is not None:
                    width = given[1][len(widths)]
                for _ in range(moves):
                    w, likelihood, rate = move(w, t, width)
                    if given is None:
                        width *= math.exp(rate - 0.7)
                ladder.append(t)
                widths.append(width)
            return total, ladder, widths, w

        _, ladder, widths, _ = once(None)
        found = [once((ladder, widths)) for _ in range(runs)]
    totals = np.array([each[0] for each in found])
    ratios = np.exp(totals - totals.max())
    weights = np.repeat(ratios / ratios.sum() / particles, particles)
    # A run that counts for nothing beside the others has no logarithm left; its particles get the smallest there is.
    log_weights = np.log(np.maximum(weights, np.finfo(float).tiny))
    return Tempered(
        float(totals.max() + math.log(ratios.mean())),
        float(ratios.std(ddof=1) / ratios.mean() / math.sqrt(runs)),
        tuple(ladder),
        np.concatenate([each[3] for each in found]),
        log_weights - np.logaddexp.reduce(log_weights),
        gradients,
    )


def next_temperature(likelihood: np.ndarray, t: float) -> float:
    """The next inverse temperature: where the effective sample size falls to one half, by bisection."""

    def effective(step: float) -> float:
        weights = np.exp(step * (likelihood - likelihood.max()))
        return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))

    if effective(1.0 - t) >= 0.5:
        return 1.0
    low, high = 0.0, 1.0 - t
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if effective(middle) >= 0.5 else (low, middle)
    return t + high


# --- what is measured ---------------------------------------------------------------------------------


def inside(x: np.ndarray) -> np.ndarray:
    """Which rows lie where there are data."""
    return np.abs(x[:, 0]) <= 0.5


def order_of(seconds: float) -> float:
    """The nearest power of ten: more cannot be said of a machine that others use."""
    return 10.0 ** round(math.log10(seconds))


def root_mean(square: np.ndarray) -> float:
    return float(np.sqrt(np.mean(square)))


def costs(posterior: Any, draws: int, seed: int = 0) -> dict[str, float]:
    """ELBO, its standard error and the two costs, over fresh draws of a normal q."""
    u = posterior.approximation.draw(draws, np.random.default_rng(seed))
    joint, prior = posterior.log_joint(u), posterior.log_prior(u)
    complexity, likelihood = posterior.approximation.log_prob(u) - prior, prior - joint
    values = -(complexity + likelihood)
    return {
        "elbo": float(values.mean()),
        "elbo_se": float(values.std(ddof=1) / math.sqrt(draws)),
        "likelihood_cost": float(likelihood.mean()),
        "complexity_cost": float(complexity.mean()),
    }


def where_it_is(prediction: Any, x: np.ndarray) -> dict[str, Any]:
    """Standard deviations of both kinds among the data and away from them, and how often the band holds the truth."""
    near = inside(x)
    epistemic, aleatoric = prediction.epistemic, prediction.aleatoric
    held = np.abs(truth(x[:, 0]) - prediction.mean) <= 2.0 * np.sqrt(epistemic)
    return {
        "epistemic_sd_inside": root_mean(epistemic[near]),
        "epistemic_sd_away": root_mean(epistemic[~near]),
        "epistemic_sd_far": root_mean(epistemic[np.abs(x[:, 0]) > 1.0]),
        "epistemic_ratio": root_mean(epistemic[~near]) / root_mean(epistemic[near])
        if np.any(epistemic[near])
        else "",
        "aleatoric_sd_inside": root_mean(aleatoric[near]),
        "aleatoric_sd_away": root_mean(aleatoric[~near]),
        "rmse_to_truth": root_mean((prediction.mean - truth(x[:, 0]))[near] ** 2),
        "truth_in_band_inside": float(held[near].mean()),
        "truth_in_band_away": float(held[~near].mean()),
    }


def from_the_mode(sizes: Sizes, mode: Any, **options: Any) -> bnn.SVI:
    """An SVI that starts narrow at the mode and takes more steps, as a user of the library would."""
    given: dict[str, Any] = {
        "guide": "diagonal",
        "steps": sizes.longer * sizes.steps,
        "learning_rate": 0.01,
        "init_scale": 0.05,
        "start": mode,
    }
    return bnn.SVI(**given | options)


def pass_at_means(posterior: Any, x: np.ndarray) -> np.ndarray:
    """f (N,) of the network whose weights are the means of q."""
    return forward({name: value[None] for name, value in posterior.approximation.loc.items()}, x)[0]


def beginning(model: Callable[..., Any], x: np.ndarray, y: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Weights from N(0, 1.13), where the source begins its means."""
    rng = np.random.default_rng(seed)
    with opened(model, x, y) as problem:
        shapes = {site.name: site.shape for site in problem.program.latents}
    return {name: MEANS * rng.normal(size=shape) for name, shape in shapes.items()}


# --- the source's run -----------------------------------------------------------------------------------


def protocol(study: Study) -> list[Any]:
    """The source's run on several data sets, each with its own start: the band, the costs, the pass at the means."""
    sizes = study.sizes
    x_wide = wide(sizes.grid)
    near = inside(wide(sizes.coarse))
    rows: list[dict[str, Any]] = []
    found = []
    for seed in range(sizes.seeds):
        x, y = curve(sizes.rows, seed)
        model = partial(known_noise, units=sizes.units)
        posterior = bnn.fit(model, x, y, Source(steps=sizes.steps), seed=seed)
        found.append(posterior)
        prediction = posterior.predict(x_wide, draws=sizes.draws)
        coarse = wide(sizes.coarse)
        many = forward(posterior.approximation.draw(sizes.many_draws, np.random.default_rng(2)), coarse)
        at_means = pass_at_means(posterior, coarse)
        gap, sd = many.mean(0) - at_means, many.std(0, ddof=1)
        z = gap / (sd / math.sqrt(sizes.many_draws))
        last = len(posterior.info.history["loss"]) // 5
        rows.append(
            {"data_seed": seed}
            | costs(posterior, sizes.elbo_draws)
            | {
                f"{name}_of_steps": float(value[-last:].mean())
                for name, value in posterior.info.history.items()
            }
            | where_it_is(prediction, x_wide)
            | {
                "log_score": scores.log_score(
                    posterior.predict(fresh(sizes.test_rows)[0]), fresh(sizes.test_rows)[1]
                ),
                "gap_of_mean_inside": root_mean(gap[near] ** 2),
                "gap_of_mean_away": root_mean(gap[~near] ** 2),
                "gap_in_epistemic_sd_inside": root_mean((gap / sd)[near] ** 2),
                "gap_in_epistemic_sd_away": root_mean((gap / sd)[~near] ** 2),
                "gap_in_standard_errors": root_mean(z**2),
                "pass_to_truth": root_mean((at_means - truth(coarse[:, 0]))[near] ** 2),
                "seconds_order": order_of(posterior.info.run_seconds),
            }
        )
        row = rows[-1]
        study.say(
            f"data set {seed}: ELBO {row['elbo']:.1f}, epistemic sd {row['epistemic_sd_inside']:.2f} and "
            f"{row['epistemic_sd_away']:.2f} away"
        )
    study.tables["protocol"] = rows
    return found


# --- slips that can be seen ---------------------------------------------------------------------------------


def new_weights(study: Study, posterior: Any) -> dict[str, np.ndarray]:
    """Curves of one draw each, and of a draw for every 32 rows as in the source."""
    sizes = study.sizes
    x = wide(sizes.grid)
    rng = np.random.default_rng(1)
    draw = partial(posterior.approximation.draw, sizes.draws)
    right = forward(draw(rng), x)
    parts = [
        forward(draw(rng), x[first : first + PREDICTED_TOGETHER])
        for first in range(0, len(x), PREDICTED_TOGETHER)
    ]
    patched = np.concatenate(parts, axis=1)
    off = float(np.max(np.abs(forward(_flat_draws(posterior), x) - posterior.predictor(x)[0, ..., 0])))
    boundary = np.arange(1, len(x)) % PREDICTED_TOGETHER == 0
    beyond = x[:, 0] > 0.5
    rows = []
    for name, f in (("one draw for all rows", right), ("a draw for every 32 rows", patched)):
        steps = np.abs(np.diff(f, axis=1))
        rows.append(
            {
                "prediction": name,
                "step_at_boundaries": float(steps[:, boundary].mean()),
                "step_elsewhere": float(steps[:, ~boundary].mean()),
                "band_sd_inside": root_mean(f.var(axis=0)[inside(x)]),
                "band_sd_away": root_mean(f.var(axis=0)[~inside(x)]),
                "sd_of_mean_over_right_side": float(f[:, beyond].mean(axis=1).std(ddof=1)),
            }
        )
    study.tables["new_weights"] = rows
    study.numbers["pass_by_hand_off"] = off
    return {"x": x[:, 0], "right": right[:6], "patched": patched[:6]}


def _flat_draws(posterior: Any) -> dict[str, np.ndarray]:
    return {name: value[0] for name, value in posterior.draws.items()}


# The prior of the source, and the narrowest of those that Blundell et al. chose from.
MIXTURES = {
    "source": SCALES,
    "paper, -log scale 0 and 6": (1.0, math.exp(-6.0)),
    "paper, -log scale 1 and 7": (math.exp(-1.0), math.exp(-7.0)),
    "paper, -log scale 2 and 8": (math.exp(-2.0), math.exp(-8.0)),
}


def underflow(study: Study, found: Sequence[Any]) -> None:
    """Where log(p1 + p2) has no value in single precision, and whether a first step of the source meets it."""
    count = sum(value.size for value in found[0].approximation.loc.values())
    seen = max(float(np.abs(value).max()) for posterior in found for value in posterior.draws.values())
    rows = []
    for name, scales in MIXTURES.items():
        w = np.linspace(0.0, 60.0, 600_001, dtype=np.float32)
        lost = ~np.isfinite(log_mixture_as_written(w, scales=scales))
        limit = float(w[lost.argmax()]) if lost.any() else math.inf
        means = math.sqrt(sum(share * scale**2 for share, scale in zip(SHARES, scales, strict=True)))
        infinite, finite = 0, 0
        for seed in range(100):
            rng = np.random.default_rng(seed)
            first = (means * rng.normal(size=count) + SPREAD * rng.normal(size=count)).astype(np.float32)
            infinite += int(not np.isfinite(log_mixture_as_written(first, scales=scales).sum()))
            finite += int(np.isfinite(log_mixture(first, scales=scales).sum()))
        rows.append(
            {
                "prior": name,
                "scale1": scales[0],
                "scale2": scales[1],
                "no_value_beyond": limit,
                "first_losses_infinite_as_written": infinite / 100.0,
                "first_losses_finite_by_logaddexp": finite / 100.0,
            }
        )
    study.tables["underflow"] = rows
    u = {name: value[0] for name, value in found[0].draws.items()}
    by_hand = np.zeros(len(next(iter(u.values()))))
    for value in u.values():
        by_hand = by_hand + log_mixture(value).reshape(len(by_hand), -1).sum(1)
    study.numbers["log_prior_by_hand_off"] = float(np.max(np.abs(by_hand - found[0].log_prior())))
    study.numbers["largest_weight_seen"] = seen


# --- point estimates ----------------------------------------------------------------------------------------


def points(study: Study, found: Sequence[Any]) -> dict[str, Any]:
    """Maximum likelihood and the mode from the same start, beside the source's run, on the same data sets."""
    sizes = study.sizes
    xt, yt = fresh(sizes.test_rows)
    rows: list[dict[str, Any]] = []
    kept: dict[str, Any] = {}
    for seed, posterior in enumerate(found):
        x, y = curve(sizes.rows, seed)
        model = partial(known_noise, units=sizes.units)
        method = bnn.MAP(steps=sizes.mode_steps, polish=False, start=beginning(model, x, y, seed))
        row: dict[str, Any] = {"data_seed": seed}
        fits = {
            "ml": bnn.fit(partial(model, prior=FLAT), x, y, method, seed=seed),
            "map": bnn.fit(model, x, y, method, seed=seed),
            "source": posterior,
        }
        for name, each in fits.items():
            prediction = each.predict(xt)
            row |= {
                f"rmse_train_{name}": root_mean((each.predict(x).mean - y) ** 2),
                f"rmse_to_truth_{name}": root_mean((prediction.mean - truth(xt[:, 0])) ** 2),
                f"log_score_{name}": scores.log_score(prediction, yt),
                f"log_score_train_{name}": scores.log_score(each.predict(x), y),
            }
        rows.append(row)
        if seed == 0:
            kept = fits
        study.say(
            f"data set {seed}: rmse to the truth {row['rmse_to_truth_ml']:.2f} by maximum likelihood, "
            f"{row['rmse_to_truth_map']:.2f} at the mode, {row['rmse_to_truth_source']:.2f} by the source's run"
        )
    study.tables["points"] = rows
    return kept


def best_log_score() -> float:
    """E log N(y; truth, noise^2)."""
    return -0.5 * math.log(2.0 * math.pi * NOISE**2) - 0.5


# --- everything beside it, and the reference -----------------------------------------------------------------


def reference_of(
    study: Study, name: str, model: Callable[..., Any], x: np.ndarray, y: np.ndarray, draws: int
) -> dict[str, Any]:
    """NUTS, and where it is a reference: `bnn.diagnose` judges it at the training rows; away, R-hat and ESS there."""
    sizes = study.sizes
    posterior = bnn.fit(
        model,
        x,
        y,
        bnn.NUTS(
            draws=draws,
            warmup=sizes.sampled,
            chains=sizes.chains,
            max_tree_depth=sizes.tree_depth,
            target_accept=0.9,
        ),
        seed=1,
    )
    diagnosis = bnn.diagnose(posterior)
    grid = wide(61)
    near = inside(grid)
    away = convergence(posterior, grid[~near])
    study.tables.setdefault("references", []).extend(
        [
            {
                "model": name,
                "region": "training rows",
                "verdict": diagnosis.verdict,
                "reason": diagnosis.reasons[0],
            }
            | {name: diagnosis.figures.get(name, "") for name in ("rhat", "ess_bulk", "ess_tail")},
            {
                "model": name,
                "region": "0.5 < |x| <= 1.5",
                "verdict": "converged" if away.converged else "not converged",
                "reason": away.reasons[0] if away.reasons else "R-hat and ESS are good",
            }
            | away.figures,
        ]
    )
    study.say(f"NUTS, {name}: {diagnosis.verdict} at the training rows; away: {away.reasons or 'converged'}")
    return {
        "posterior": posterior,
        "grid": grid,
        "regions": {"inside": near, "away": ~near},
        "converged": {
            "inside": diagnosis.verdict == "converged",
            "away": diagnosis.verdict == "converged" and away.converged,
        },
    }


def gap(predict: Callable[[np.ndarray], Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """mean_gap, sd_ratio and the 1-Wasserstein distance to the reference in both regions, beside the noise floor."""
    posterior = reference["posterior"]
    chains, draws = posterior.shape
    found: dict[str, Any] = {}
    for region, rows in reference["regions"].items():
        if not reference["converged"][region]:
            found |= {f"{region}_{name}": NO_REFERENCE for name in GAPS}
            continue
        x = reference["grid"][rows]
        true = posterior.predict(x)
        floor = scores.noise_floor(true, np.repeat(np.arange(chains), draws))
        measured = scores.fidelity(predict(x), true)
        found |= {f"{region}_{name}": measured[name] for name in GAPS}
        found |= {f"{region}_{name}_floor": floor[name] for name in GAPS}
    return found


def beside(study: Study, fits: Mapping[str, Any]) -> dict[str, Any]:
    """All methods on the first data set: scores, both kinds of uncertainty, the evidence, the gap to NUTS, costs."""
    sizes = study.sizes
    x, y = curve(sizes.rows, 0)
    xt, yt = fresh(sizes.test_rows)
    grid = wide(sizes.grid)
    model = partial(known_noise, units=sizes.units)
    reference = reference_of(study, "known noise", model, x, y, sizes.sampled)
    scaled = partial(learned_noise, units=sizes.units)
    # A noise of its own mixes more slowly.
    scaled_reference = reference_of(study, "learned noise", scaled, x, y, 2 * sizes.sampled)
    smc = tempered_smc(
        model,
        x,
        y,
        draw_mixture,
        particles=sizes.particles,
        moves=sizes.moves,
        leaps=sizes.leaps,
        runs=sizes.runs,
    )
    study.say(f"log p(D) by tempered Monte Carlo: {smc.log_evidence:.2f} +- {smc.error:.2f}")
    begun = beginning(model, x, y, 0)
    same: dict[str, Any] = {
        "guide": "diagonal",
        "steps": sizes.steps,
        "learning_rate": 0.08,
        "init_scale": SPREAD,
        "start": begun,
    }
    posteriors = {
        "maximum likelihood": fits["ml"],
        "the mode": fits["map"],
        "the source's run": fits["source"],
        "its steps, rate lowered, iterates averaged": bnn.fit(model, x, y, bnn.SVI(**same)),
        "its steps, local reparameterisation": bnn.fit(model, x, y, bnn.SVI(**same, estimator="local")),
        "from the mode, more steps": bnn.fit(model, x, y, from_the_mode(sizes, fits["map"])),
        "from the mode, more steps, local": bnn.fit(
            model, x, y, from_the_mode(sizes, fits["map"], estimator="local")
        ),
        "from the mode, rank 10 besides the diagonal": bnn.fit(
            model, x, y, from_the_mode(sizes, fits["map"], guide=guides.LowRank(rank=10))
        ),
        "NUTS": reference["posterior"],
    }
    mode = bnn.MAP(steps=sizes.mode_steps, polish=False)
    # Where the mode of a model with learned noise explains nothing, a start that explains all must be given, too.
    at_truth = {name: value[0, 0] for name, value in fits["map"].draws.items()} | {"noise": NOISE}
    others = {
        "learned noise": bnn.fit(scaled, x, y, from_the_mode(sizes, mode)),
        "learned noise, begun at the truth": bnn.fit(scaled, x, y, from_the_mode(sizes, at_truth)),
        "learned noise, NUTS": scaled_reference["posterior"],
        "noise of the input": bnn.fit(
            partial(noise_of_input, units=sizes.units), x, y, from_the_mode(sizes, mode)
        ),
    }
    rows = []

    def add(name: str, predict: Callable[[np.ndarray], Any], **columns: Any) -> None:
        prediction = predict(xt)
        rows.append(
            {"method": name, "log_score": scores.log_score(prediction, yt)}
            | {"coverage_95": scores.coverage(prediction, yt, 0.95)}
            | where_it_is(predict(grid), grid)
            | columns
        )
        study.say(f"{name}: log score {rows[-1]['log_score']:.3f}, ELBO {columns.get('elbo', '-')}")

    for name, posterior in {**posteriors, **others}.items():
        columns: dict[str, Any] = {
            "gradients": posterior.info.gradient_evaluations,
            "seconds_order": order_of(posterior.info.run_seconds),
        }
        if posterior.kind == "iid":
            columns |= costs(posterior, sizes.elbo_draws)
            pareto = pareto_k(posterior)
            columns |= {"importance_weighted": pareto.log_evidence, "pareto_k": pareto.k}
        if name in ("maximum likelihood", "noise of the input"):
            columns |= {f"{region}_{each}": NO_REFERENCE for region in reference["regions"] for each in GAPS}
        elif posterior.kind != "chains":
            columns |= gap(posterior.predict, scaled_reference if name in others else reference)
        if "noise" in posterior.draws:
            noise = posterior.draws["noise"]
            columns |= {"noise_mean": float(noise.mean()), "noise_sd": float(noise.std())}
        add(name, posterior.predict, **columns)

    with opened(model, x, y) as problem:
        weights = problem.program.unravel(smc.particles)

    def by_particles(x: np.ndarray) -> Any:
        f = forward(weights, x)
        return bnn.Prediction(
            "Normal", {"loc": f, "scale": np.full(f.shape, NOISE)}, log_weights=smc.log_weights
        )

    add(
        "tempered Monte Carlo",
        by_particles,
        elbo="",
        log_evidence=smc.log_evidence,
        log_evidence_se=smc.error,
        temperatures=len(smc.ladder),
        gradients=smc.gradients,
        **gap(by_particles, reference),
    )
    study.tables["methods"] = rows
    study.numbers["evidence"] = {
        "log_evidence": smc.log_evidence,
        "error": smc.error,
        "temperatures": len(smc.ladder),
        "ladder": list(smc.ladder),
        "least_divergence_from_prior": smc.particles.shape[1] * least_divergence(),
    }
    return {
        "posteriors": posteriors,
        "others": others,
        "bounded": bounded(rows),
        "smc": smc,
        "reference": reference,
    }


# --- estimators and mini-batches ----------------------------------------------------------------------------


def estimators(study: Study, posterior: Any) -> None:
    """The variance of one gradient of F at the source's fit and at its start, plain and local."""
    sizes = study.sizes
    x, y = curve(sizes.rows, 0)
    model = partial(known_noise, units=sizes.units)
    begun = beginning(model, x, y, 0)
    spread = {name: np.full(value.shape, SPREAD) for name, value in begun.items()}
    places = {
        "start": MeanField(begun, spread),
        "end": MeanField(posterior.approximation.loc, posterior.approximation.scale),
    }
    rows = []
    with opened(model, x, y) as problem:
        chosen = problem.system
        guide = Guide.of("diagonal", problem.program.sites.values())
        for estimator in ("plain", "local"):
            objective = bound_of(problem, guide, estimator)

            def at(parameters: Any, seed: Any, objective: Objective = objective) -> Any:
                return chosen.value_and_grad(
                    lambda inner: objective(inner, seed, 1.0, problem.x, problem.y)[1][0]
                )(parameters)

            compiled = chosen.compile(chosen.vmap(at, in_axes=(None, 0)))
            for place, q in places.items():
                given = guide.start(q.loc, q.scale, np.random.default_rng(0))
                value, slope = compiled(
                    {name: chosen.asarray(each) for name, each in given.items()},
                    chosen.seeds(3, sizes.gradient_draws),
                )
                parts = {name: chosen.to_numpy(each) for name, each in slope.items()}
                rows.append(
                    {
                        "estimator": estimator,
                        "place": place,
                        "likelihood_cost": float(chosen.to_numpy(value).mean()),
                    }
                    | {
                        "standard_error": float(
                            chosen.to_numpy(value).std() / math.sqrt(sizes.gradient_draws)
                        )
                    }
                    | variances(parts)
                )
    study.tables["estimators"] = rows


def variances(gradients: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Of gradients (S, ...) by parameter of a diagonal normal guide: the variance over S, summed over locations and
    over rho, of which the standard deviation is the softplus.
    """
    found = {}
    for column, kind in (("variance_loc", "loc"), ("variance_scale", "rho")):
        own = [value.var(axis=0, ddof=1).sum() for name, value in gradients.items() if name.endswith(kind)]
        if not own:
            raise KeyError(f"no parameter ends in {kind}: {', '.join(gradients)}")
        found[column] = float(sum(own))
    return found


def minibatches(study: Study, mode: Any) -> None:
    """The complexity cost with and without 1/M over M mini-batches, at one draw and in fits that have settled."""
    sizes = study.sizes
    x, y = curve(sizes.rows, 0)
    grid = wide(sizes.grid)
    model = partial(known_noise, units=sizes.units)
    count = sizes.rows // sizes.batch
    begun = beginning(model, x, y, 0)
    draw = {name: value[None] for name, value in begun.items()}
    scale = {name: np.full(value.shape, SPREAD) for name, value in begun.items()}
    prior = sum(log_mixture(value).sum() for value in begun.values())
    complexity = float(MeanField(begun, scale).log_prob(draw)[0] - prior)
    likelihood = 0.5 * ((y - forward(draw, x)[0]) / NOISE) ** 2 + 0.5 * math.log(2.0 * math.pi * NOISE**2)
    parts = likelihood.reshape(count, sizes.batch).sum(1)
    whole = float(likelihood.sum() + complexity)
    study.numbers["epoch_with_1/M_off"] = float(abs((parts + complexity / count).sum() - whole) / abs(whole))
    rows = []
    for name, batch, weight in (
        ("all rows", None, 1.0),
        (f"{count} mini-batches, KL 1/{count}", sizes.batch, 1.0),
        (f"{count} mini-batches, KL in full", sizes.batch, float(count)),
    ):
        posterior = bnn.fit(model, x, y, from_the_mode(sizes, mode, batch_size=batch, kl_weight=weight))
        rows.append(
            {"batches": name}
            | costs(posterior, sizes.elbo_draws)
            | where_it_is(posterior.predict(grid), grid)
        )
        study.say(f"{name}: ELBO {rows[-1]['elbo']:.1f}, rmse to the truth {rows[-1]['rmse_to_truth']:.2f}")
    study.tables["minibatches"] = rows


# --- verdicts ---------------------------------------------------------------------------------------------


Row = Mapping[str, Any]


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    """One figure, by data set."""
    return np.array([row[name] for row in rows], float)


def average(rows: Sequence[Row], name: str) -> str:
    return f"{column(rows, name).mean():.2f}"


def judge_band(referee: Referee, rows: Sequence[Row]) -> None:
    """How much higher epistemic uncertainty is away from the data, by the source's run."""
    ratio = mean(column(rows, "epistemic_ratio"))
    numbers = (
        f"root mean square epistemic sd {average(rows, 'epistemic_sd_inside')} over |x| <= 0.5, "
        f"{average(rows, 'epistemic_sd_away')} over 0.5 < |x| <= 1.5, {average(rows, 'epistemic_sd_far')} beyond "
        f"|x| = 1; the band of 2 sd holds the true curve at {column(rows, 'truth_in_band_inside').mean():.0%} of the "
        f"inputs inside and {column(rows, 'truth_in_band_away').mean():.0%} away (means over data sets)"
    )
    referee.measured("higher", ratio, numbers)
    referee.measured("much-higher", ratio, numbers)


def judge_costs(referee: Referee, rows: Sequence[Row]) -> None:
    """F of the last fifth of the steps, in which q still moves at the full rate, against F of the q that is kept."""
    referee.measured(
        "loss-of-steps",
        mean(column(rows, "loss_of_steps") + column(rows, "elbo")),
        f"F of the last iterate is {-column(rows, 'elbo').mean():.1f} nats over fresh draws: likelihood cost "
        f"{column(rows, 'likelihood_cost').mean():.1f}, complexity cost {column(rows, 'complexity_cost').mean():.1f}",
    )


def judge_pass_at_means(referee: Referee, rows: Sequence[Row]) -> None:
    """E f(w) is not f(E w): exactly for one unit, and by how much in the source's runs."""
    unit = mean_of_relu(0.0, 1.0)
    errors = column(rows, "gap_in_standard_errors")
    referee.proved(
        "pass-at-means",
        unit > 0.0,
        f"of one unit max(w, 0) with w ~ N(0, 1) the mean is {unit:.3f} and the pass at the mean is 0; in the source's "
        f"runs the two curves differ by {average(rows, 'gap_of_mean_inside')} inside and "
        f"{average(rows, 'gap_of_mean_away')} away (root mean square), {errors.min():.0f} to {errors.max():.0f} times "
        f"the standard error; distance to the truth inside {average(rows, 'rmse_to_truth')} by the mean and "
        f"{average(rows, 'pass_to_truth')} by the pass",
    )
    for place in ("inside", "away"):
        referee.measured(f"gap-{place}", mean(column(rows, f"gap_in_epistemic_sd_{place}")))


def judge_new_weights(referee: Referee, rows: Sequence[Row]) -> None:
    """A curve is torn where it steps three times as far at the boundaries as elsewhere, and one draw is not."""
    right, patched = rows
    tears = [row["step_at_boundaries"] / row["step_elsewhere"] for row in rows]
    referee.proved(
        "one-network",
        tears[1] > 3.0 > tears[0],
        f"every {PREDICTED_TOGETHER} rows get new weights, and a curve steps {tears[1]:.0f} times as far where they "
        f"change as elsewhere ({tears[0]:.2f} times with one draw for all rows). Mean and band of each row stay right "
        f"up to Monte-Carlo error (band sd away {patched['band_sd_away']:.2f} for {right['band_sd_away']:.2f}). What "
        "joins rows does not: the sd of the mean of f over 0.5 < x <= 1.5 is "
        f"{patched['sd_of_mean_over_right_side']:.2f} in place of {right['sd_of_mean_over_right_side']:.2f}",
    )


def judge_underflow(referee: Referee, rows: Sequence[Row], seen: float, off: float) -> None:
    """The sum of densities is wrong where a first step has no value by it and has one by logaddexp."""
    for key, row in zip(("source", "0-6", "1-7", "2-8"), rows, strict=True):
        lost = row["first_losses_infinite_as_written"]
        more = f"; the largest weight drawn after the source's runs is {seen:.1f}" if key == "source" else ""
        referee.proved(
            f"underflow-{key}",
            lost > 0.0 and row["first_losses_finite_by_logaddexp"] == 1.0,
            f"no value beyond |w| = {row['no_value_beyond']:.2f}, which {lost:.0%} of 100 first steps meet; by "
            f"logaddexp {row['first_losses_finite_by_logaddexp']:.0%} have a value, and library and logaddexp by hand "
            f"differ by {off:.1g} nats over all weights{more}",
        )


def judge_points(referee: Referee, rows: Sequence[Row]) -> None:
    """Maximum likelihood, the mode, and the average over the source's q, on the same data sets."""
    fresh_ml, trained_ml = column(rows, "log_score_ml"), column(rows, "log_score_train_ml")
    fresh_map = column(rows, "log_score_map")
    referee.measured("overfit-residuals", mean(column(rows, "rmse_train_ml")))
    referee.measured(
        "overfit-score",
        mean(trained_ml - fresh_ml),
        f"{fresh_ml.mean():.3f} on fresh rows, where the true curve has {best_log_score():.3f}",
    )
    referee.measured(
        "regularised-residuals", mean(column(rows, "rmse_train_map") - column(rows, "rmse_train_ml"))
    )
    referee.measured(
        "regularised-score",
        mean(fresh_map - fresh_ml),
        f"{fresh_map.mean():.3f} at the mode; distance to the truth {average(rows, 'rmse_to_truth_map')} for "
        f"{average(rows, 'rmse_to_truth_ml')}",
    )
    averaged = column(rows, "log_score_source")
    referee.measured(
        "averaging", mean(averaged - fresh_map), f"{averaged.mean():.3f} against {fresh_map.mean():.3f}"
    )


def judge_estimators(referee: Referee, rows: Sequence[Row], draws: int) -> None:
    """The variance of a gradient, summed over parameters, plain over local."""
    total = {(row["estimator"], row["place"]): row["variance_loc"] + row["variance_scale"] for row in rows}
    for place in ("start", "end"):
        ratio = total["plain", place] / total["local", place]
        referee.measured(f"local-{place}", exact(ratio), f"over {draws} gradients of each kind")


def judge_minibatches(referee: Referee, rows: Sequence[Row], off: float) -> None:
    """An epoch sums to F, and what becomes of a fit in which every mini-batch counts the whole complexity cost."""
    whole, right, wrong = rows
    referee.proved("epoch", not off < 1e-12, f"an epoch so weighted sums to F to {off:.0e} of it")
    referee.measured(
        "whole-cost",
        exact(right["elbo"] - wrong["elbo"]),
        f"ELBO {whole['elbo']:.1f} with all rows, {right['elbo']:.1f} +- {right['elbo_se']:.1f} with 1/M, "
        f"{wrong['elbo']:.1f} +- {wrong['elbo_se']:.1f} with the whole cost, with an epistemic sd of "
        f"{wrong['epistemic_sd_inside']:.2f} among the data for {right['epistemic_sd_inside']:.2f} and a distance to "
        f"the truth of {wrong['rmse_to_truth']:.2f} for {right['rmse_to_truth']:.2f}",
    )


def bounded(rows: Sequence[Row]) -> list[Row]:
    """Of the table `methods`, the fits of the source's model that have an ELBO."""
    others = (*LEARNED, OF_INPUT, SAMPLED_NOISE)
    return [row for row in rows if row["method"] not in others and row.get("elbo") not in (None, "")]


def judge_bound(referee: Referee, rows: Sequence[Row], evidence: Row) -> None:
    """The largest ELBO against log p(D); what is missing is KL(q || p(w | D))."""
    log_evidence = evidence["log_evidence"]
    gaps = "; ".join(
        f"{row['method']} {row['elbo']:.1f} +- {row['elbo_se']:.1f} (KL {log_evidence - row['elbo']:.0f})"
        for row in rows
    )
    referee.measured(
        "bound",
        exact(log_evidence - max(row["elbo"] for row in rows)),
        f"log p(D) = {log_evidence:.1f} +- {evidence['error']:.1f}; ELBO, and with it KL(q || p(w | D)): {gaps}. No "
        "normal is the mixture: whatever the data, the complexity cost of independent normals is at least "
        f"{evidence['least_divergence_from_prior']:.0f} nats",
    )


def judge_steps(referee: Referee, rows: Sequence[Row]) -> None:
    """The source's run against the best ELBO of the same family."""
    source = next(row for row in rows if row["method"] == SOURCE)
    best = max((row for row in rows if "rank" not in row["method"]), key=lambda row: row["elbo"])
    referee.measured(
        "enough-steps",
        exact(best["elbo"] - source["elbo"]),
        f"{source['elbo']:.1f} +- {source['elbo_se']:.1f} by the source's run, {best['elbo']:.1f} +- "
        f"{best['elbo_se']:.1f} by the best ({best['method']})",
    )


@dataclass(frozen=True)
class Reference:
    """What the table `references` knows of NUTS on one model: rows for the training inputs and for those away."""

    rows: Sequence[Row]

    @classmethod
    def of(cls, rows: Sequence[Row], model: str) -> Reference:
        return cls([row for row in rows if row["model"] == model])

    def found(self, *places: str) -> tuple[str, dict[str, Any]]:
        """Words on the convergence in these places, for the numbers of a verdict, and what the referee has to know.

        Inside, all training rows were looked at.
        """
        wanted = [self.rows[("inside", "away").index(place)] for place in places]
        figures = [(row.get("rhat", math.inf), row.get("ess_bulk", 0.0)) for row in wanted]
        words = "; ".join(
            f"NUTS {place}: R-hat {rhat:.4g}, bulk ESS {ess:.0f}"
            for place, (rhat, ess) in zip(places, figures, strict=True)
        )
        if all(converged(rhat, ess) for rhat, ess in figures):
            return words, {"converged": True}
        return "", {"converged": False, "why_not": words}


def judge_reference(referee: Referee, row: Row, reference: Reference) -> None:
    """The source's band against that of NUTS, in both regions. row: of the source's run."""
    for place in ("inside", "away"):
        words, known = reference.found(*dict.fromkeys(("inside", place)))
        for key, name in (("sd", "sd_ratio"), ("mean", "mean_gap")):
            value = row[f"{place}_{name}"]
            if value == NO_REFERENCE:
                why = "; ".join(each["reason"] for each in reference.rows)
                referee.undecided(f"band-{key}-{place}", f"no reference: {why}")
                continue
            floor = f"between halves of the chains of NUTS {row[f'{place}_{name}_floor']:.2f}"
            numbers = "; ".join(filter(None, (floor, words)))
            referee.measured(f"band-{key}-{place}", exact(float(value)), numbers, **known)


def judge_posterior_band(referee: Referee, row: Row, reference: Reference) -> None:
    """The source's claim about the posterior itself. row: of NUTS."""
    words, known = reference.found("inside", "away")
    held = (
        f"the band of 2 sd holds the true curve at {row['truth_in_band_inside']:.0%} of the inputs inside and "
        f"{row['truth_in_band_away']:.0%} away"
    )
    numbers = "; ".join(filter(None, (held, words)))
    referee.measured("posterior-much-higher", exact(row["epistemic_ratio"]), numbers, **known)


def judge_noise(referee: Referee, rows: Sequence[Row], reference: Reference) -> None:
    """Both kinds of uncertainty at once: noise among the data over the true one, and the epistemic sd away over inside.

    Of two starts of the fit with one noise the higher ELBO counts.
    """
    by_name = {row["method"]: row for row in rows}
    starts = [by_name[name] for name in LEARNED if name in by_name]
    one = max(starts, key=lambda row: row["elbo"])
    told = "; ".join(
        f"{row['method']}: {row['noise_mean']:.2f} +- {row['noise_sd']:.2f}, ELBO {row['elbo']:.1f}, distance to the "
        f"truth {row['rmse_to_truth']:.2f}"
        for row in starts
    )
    words, known = reference.found("inside", "away")
    for key, row, more, convergence_of in (
        ("one", one, told, {}),
        ("of-input", by_name[OF_INPUT], "", {}),
        ("posterior", by_name[SAMPLED_NOISE], words, known),
    ):
        noise = (
            f"noise {row['aleatoric_sd_inside']:.2f} among the data and {row['aleatoric_sd_away']:.2f} away, distance "
            f"to the truth {row['rmse_to_truth']:.2f}, 95 % intervals hold {row['coverage_95']:.0%} of fresh rows"
        )
        numbers = "; ".join(filter(None, (noise, more)))
        referee.measured(f"noise-{key}", exact(row["aleatoric_sd_inside"] / NOISE), numbers, **convergence_of)
        grows = words if key == "posterior" else ""
        referee.measured(f"grows-{key}", exact(row["epistemic_ratio"]), grows, **convergence_of)


def compared(sizes: Sizes) -> str:
    """How the sizes differ from the source's, of which a full run has all."""
    same = (sizes.rows, sizes.units, sizes.steps) == (FULL.rows, FULL.units, FULL.steps)
    return "" if same else "fewer rows, units or steps than the source"


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables and numbers."""
    tables, numbers = study.tables, study.numbers
    referee = Referee(read_claims("bayes_by_backprop"), compared(study.sizes))
    for each in (judge_band, judge_costs, judge_pass_at_means):
        each(referee, tables["protocol"])
    judge_new_weights(referee, tables["new_weights"])
    judge_underflow(
        referee, tables["underflow"], numbers["largest_weight_seen"], numbers["log_prior_by_hand_off"]
    )
    judge_points(referee, tables["points"])
    judge_estimators(referee, tables["estimators"], study.sizes.gradient_draws)
    judge_minibatches(referee, tables["minibatches"], numbers["epoch_with_1/M_off"])
    methods = tables["methods"]
    by_name = {row["method"]: row for row in methods}
    judge_bound(referee, bounded(methods), numbers["evidence"])
    judge_steps(referee, bounded(methods))
    known = Reference.of(tables["references"], "known noise")
    judge_reference(referee, by_name[SOURCE], known)
    judge_posterior_band(referee, by_name[SAMPLED], known)
    judge_noise(referee, methods, Reference.of(tables["references"], "learned noise"))
    return referee.verdicts()


# --- figures ----------------------------------------------------------------------------------------------


def _data(axes: Any, x: np.ndarray, y: np.ndarray, low: float = -80.0, high: float = 80.0) -> None:
    grid = np.linspace(-1.5, 1.5, 601)
    axes.plot(grid, truth(grid), color=GREEN, linestyle="dashed", linewidth=1.2, label="truth")
    axes.plot(x[:, 0], y, "+", color=BLACK, markersize=5, label="data")
    axes.set(xlabel="$x$", xlim=(-1.5, 1.5), ylim=(low, high))


def _legend(axes: Any, place: str = "upper right") -> None:
    axes.legend(framealpha=1.0, edgecolor="none", fontsize=8.5, loc=place)


def draw_prediction(path: Path, study: Study, beside_it: Mapping[str, Any]) -> None:
    x, y = curve(study.sizes.rows, 0)
    grid = wide(study.sizes.grid)
    shown = {
        "the source's run": "the source's run",
        "from the mode, more steps": "mean-field VI from the mode",
        "NUTS": "NUTS",
    }
    predictions = {name: beside_it["posteriors"][name].predict(grid) for name in shown}
    tops = [np.abs(each.mean) + 2.0 * np.sqrt(each.epistemic) for each in predictions.values()]
    limit = 1.05 * float(max(top.max() for top in tops))
    figure, axes = panels(12.6, 4.2, 3)
    for panel, (name, title) in zip(axes[0], shown.items(), strict=True):
        each = predictions[name]
        sd = np.sqrt(each.epistemic)
        panel.fill_between(
            grid[:, 0],
            each.mean - 2 * sd,
            each.mean + 2 * sd,
            color=BLUE,
            alpha=0.25,
            linewidth=0,
            label="2 epistemic sd",
        )
        panel.plot(grid[:, 0], each.mean, color=VERMILION, linewidth=1.6, label="predictive mean")
        _data(panel, x, y, -limit, limit)
        if name == "NUTS":
            known = study.tables["references"][:2]
            title += f": {known[0]['verdict']} at the data, {known[1]['verdict']} away"
        panel.set_title(title, fontsize=10.5)
    axes[0][0].set_ylabel("$y$")
    _legend(axes[0][0])
    figure.savefig(path)


def draw_costs(path: Path, beside_it: Mapping[str, Any]) -> None:
    names = {
        "the source's run": "the source's schedule",
        "its steps, rate lowered, iterates averaged": "rate lowered from the middle on",
    }
    figure, axes = panels(10.6, 4.2, 2)
    histories = [beside_it["posteriors"][name].info.history for name in names]
    low = min(
        float(history[key].min()) for history in histories for key in ("likelihood_cost", "complexity_cost")
    )
    high = max(float(history["likelihood_cost"].max()) for history in histories)
    for panel, history, title in zip(axes[0], histories, names.values(), strict=True):
        for key, label, colour, style in (
            ("likelihood_cost", "likelihood cost", BLUE, "solid"),
            ("complexity_cost", "complexity cost", ORANGE, "dashed"),
        ):
            panel.plot(history[key], color=colour, linestyle=style, linewidth=0.9, label=label)
        panel.set(xlabel="step", yscale="log", ylim=(0.8 * low, 1.2 * high))
        panel.set_title(title, fontsize=10.5)
    axes[0][0].set_ylabel("nats, one draw (log scale)")
    _legend(axes[0][0])
    figure.savefig(path)


def draw_slips(path: Path, study: Study, curves: Mapping[str, np.ndarray], source: Any) -> None:
    x, y = curve(study.sizes.rows, 0)
    grid = wide(study.sizes.grid)
    figure, axes = panels(12.6, 4.2, 3)
    limit = 1.05 * float(max(np.abs(curves["right"][:3]).max(), np.abs(curves["patched"][:3]).max()))
    for panel, key, title in (
        (axes[0][0], "right", "one draw of the weights for all rows"),
        (axes[0][1], "patched", "new weights for every 32 rows"),
    ):
        for f, colour in zip(curves[key][:3], (BLUE, ORANGE, VERMILION), strict=True):
            panel.plot(curves["x"], f, color=colour, linewidth=1.0)
        _data(panel, x, y, -limit, limit)
        panel.set_title(title, fontsize=10.5)
    axes[0][0].set_ylabel("$y$")
    panel = axes[0][2]
    prediction = source.predict(grid, draws=study.sizes.draws)
    error = 2.0 * np.sqrt(prediction.epistemic / study.sizes.draws)
    at_means = pass_at_means(source, grid)
    panel.fill_between(
        grid[:, 0],
        prediction.mean - error,
        prediction.mean + error,
        color=VERMILION,
        alpha=0.3,
        linewidth=0,
        label="predictive mean, 2 s.e.",
    )
    panel.plot(grid[:, 0], prediction.mean, color=VERMILION, linewidth=1.2)
    panel.plot(
        grid[:, 0], at_means, color=BLUE, linestyle="dashdot", linewidth=1.4, label="pass at the means"
    )
    panel.set_title("two curves that are not one", fontsize=10.5)
    top = 1.1 * float(max(np.abs(prediction.mean).max(), np.abs(at_means).max(), 12.0))
    _data(panel, x, y, -top, 1.7 * top)
    panel.legend(framealpha=1.0, edgecolor="none", fontsize=8.5, loc="upper center", ncols=2)
    figure.savefig(path)


def draw_noise(path: Path, study: Study, beside_it: Mapping[str, Any]) -> None:
    x, y = curve(study.sizes.rows, 0)
    grid = wide(study.sizes.grid)
    titles = {
        "learned noise": "one noise, independent normals",
        "noise of the input": "noise of the input, independent normals",
        "learned noise, NUTS": "one noise, NUTS",
    }
    predictions = {name: beside_it["others"][name].predict(grid) for name in titles}
    limit = 1.05 * max(float((np.abs(each.mean) + 2.0 * each.std).max()) for each in predictions.values())
    figure, axes = panels(12.6, 4.2, 3)
    for panel, (name, each) in zip(axes[0], predictions.items(), strict=True):
        for sd, alpha, label in (
            (each.std, 0.15, "2 sd, both kinds"),
            (np.sqrt(each.epistemic), 0.3, "2 sd, epistemic"),
        ):
            panel.fill_between(
                grid[:, 0],
                each.mean - 2 * sd,
                each.mean + 2 * sd,
                color=BLUE,
                alpha=alpha,
                linewidth=0,
                label=label,
            )
        panel.plot(grid[:, 0], each.mean, color=VERMILION, linewidth=1.4, label="predictive mean")
        _data(panel, x, y, -limit, limit)
        noise = root_mean(each.aleatoric[inside(grid)])
        panel.set_title(f"{titles[name]}: sd {noise:.2f} (true {NOISE:g})", fontsize=10)
    axes[0][0].set_ylabel("$y$")
    _legend(axes[0][0])
    figure.savefig(path)


def draw_evidence(path: Path, beside_it: Mapping[str, Any]) -> None:
    rows, smc = sorted(beside_it["bounded"], key=lambda row: row["elbo"]), beside_it["smc"]
    figure, axes = panels(8.6, 3.4, 1)
    panel = axes[0][0]
    places = np.arange(len(rows))
    elbos = np.array([row["elbo"] for row in rows])
    panel.errorbar(
        elbos,
        places,
        xerr=[2.0 * row["elbo_se"] for row in rows],
        fmt="o",
        color=BLUE,
        capsize=3,
        label="ELBO, 2 s.e.",
    )
    panel.axvline(
        smc.log_evidence, color=BLACK, linewidth=1.6, label="$\\ln p(D)$, tempered Monte Carlo, 2 s.e."
    )
    panel.axvspan(
        smc.log_evidence - 2.0 * smc.error,
        smc.log_evidence + 2.0 * smc.error,
        color=BLACK,
        alpha=0.15,
        linewidth=0,
    )
    panel.set_yticks(places, [row["method"] for row in rows], fontsize=9)
    panel.set(xlabel="nats", ylim=(-0.7, len(rows) - 0.3))
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path)


# --- all of it --------------------------------------------------------------------------------------------


def main(tiny: bool = False, out: str | Path | None = None) -> Study:
    """Run the study and write tables, figures and verdicts to `out`.

    Without `out` a full run writes to results/bayes_by_backprop beside this file, a tiny one to a temporary folder.
    """
    study = Study.begin(TINY if tiny else FULL, "bayes_by_backprop", tiny, out)
    found = protocol(study)
    curves = new_weights(study, found[0])
    underflow(study, found)
    fits = points(study, found)
    estimators(study, found[0])
    minibatches(study, fits["map"])
    beside_it = beside(study, fits)
    draw_prediction(study.out / "prediction.png", study, beside_it)
    draw_costs(study.out / "costs.png", beside_it)
    draw_slips(study.out / "slips.png", study, curves, found[0])
    draw_noise(study.out / "noise.png", study, beside_it)
    draw_evidence(study.out / "evidence.png", beside_it)
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    options = vars(command_line(__doc__, "cache").parse_args())
    # Data sets and starts share their programs: compiled once, they are read from disk by all others.
    bnn.enable_compilation_cache(options.pop("cache"))
    main(**options)
