"""One log joint for both systems: against plain NumPy and SciPy, between the systems, and against the systems' own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
from scipy.special import expit, log_expit, log_softmax, logsumexp, softmax

import ppl_bnn as bnn
from ppl_bnn import data, dist, likelihoods, priors, zoo
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import InputError

ROWS, FEATURES = 7, 2
X = np.random.default_rng(8).normal(size=(ROWS, FEATURES))
SYSTEMS = ("numpyro", "pyro")


def program_of(ppl: str, model: Any, x: Any = X, y: Any = None) -> Program:
    """The program of `model`, to be called inside a session."""
    chosen = system(ppl)
    return Program.of(chosen, model, chosen.asarray(x), chosen.asarray(y), language=True)


def evaluate(
    ppl: str, model: Any, u: np.ndarray, x: Any, y: Any, **keywords: Any
) -> tuple[float, np.ndarray]:
    """Log joint and its gradient at the flat vector u, in NumPy."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        program = program_of(ppl, model, x, y)
        xs, ys = chosen.asarray(x), chosen.asarray(y)
        value, gradient = chosen.value_and_grad(
            lambda flat: program.log_joint(program.unravel(flat), xs, ys, **keywords)
        )(chosen.asarray(u))
        return float(value), chosen.to_numpy(gradient)


def size_of(model: Any, x: Any, y: Any) -> int:
    with system("pyro").session("float64", "cpu"):
        return program_of("pyro", model, x, y).parameter_count


def assert_same(a: tuple[float, np.ndarray], b: tuple[float, np.ndarray], rtol: float = 1e-10) -> None:
    """Value and gradient agree, the gradient relative to its largest entry."""
    np.testing.assert_allclose(a[0], b[0], rtol=rtol)
    np.testing.assert_allclose(a[1], b[1], rtol=rtol, atol=rtol * np.abs(b[1]).max())


# --- every prior with every likelihood, in plain NumPy --------------------------------------------

PRIORS: dict[str, tuple[Any, Callable[[np.ndarray, int], np.ndarray]]] = {
    "normal": (priors.Normal(0.3, 0.7), lambda w, n: scipy.stats.norm(0.3, 0.7).logpdf(w)),
    "normal fan-in": (
        priors.Normal(0.1, "fan_in", 1.5),
        lambda w, n: scipy.stats.norm(0.1, 1.5 / math.sqrt(n)).logpdf(w),
    ),
    "student": (priors.StudentT(4.0, 0.2, 0.6), lambda w, n: scipy.stats.t(4.0, 0.2, 0.6).logpdf(w)),
    "student fan-in": (
        priors.StudentT(3.0, 0.0, "fan_in"),
        lambda w, n: scipy.stats.t(3.0, 0.0, 1.0 / math.sqrt(n)).logpdf(w),
    ),
    "laplace": (priors.Laplace(0.1, 0.4), lambda w, n: scipy.stats.laplace(0.1, 0.4).logpdf(w)),
    # The variance of a Laplace distribution is 2 scale^2, and "fan_in" speaks of the variance.
    "laplace fan-in": (
        priors.Laplace(0.0, "fan_in", 2.0),
        lambda w, n: scipy.stats.laplace(0.0, 2.0 / math.sqrt(2 * n)).logpdf(w),
    ),
    "scale mixture": (
        priors.ScaleMixture((0.25, 0.75), (1.5, 0.1)),
        lambda w, n: logsumexp(
            [
                math.log(0.25) + scipy.stats.norm(0, 1.5).logpdf(w),
                math.log(0.75) + scipy.stats.norm(0, 0.1).logpdf(w),
            ],
            axis=0,
        ),
    ),
    "spike and slab fan-in": (
        priors.SpikeAndSlab(0.25, 1.5, 0.1, scale="fan_in"),
        lambda w, n: logsumexp(
            [
                math.log(0.25) + scipy.stats.norm(0, 1.5 / math.sqrt(n)).logpdf(w),
                math.log(0.75) + scipy.stats.norm(0, 0.1 / math.sqrt(n)).logpdf(w),
            ],
            axis=0,
        ),
    ),
}


def normal_rows(f: np.ndarray, y: np.ndarray, scale: Any) -> float:
    return float(scipy.stats.norm(f, scale).logpdf(y).sum())


# name -> (outputs, sites of the noise, likelihood of these, targets, log density by hand)
LIKELIHOODS: dict[str, tuple[int, int, Callable[[Any], Any], np.ndarray, Callable[..., float]]] = {
    "gaussian known": (
        1,
        0,
        lambda noise: likelihoods.Gaussian(0.4),
        np.random.default_rng(801).normal(size=ROWS),
        lambda f, y, noise: normal_rows(f[:, 0], y, 0.4),
    ),
    "gaussian sampled": (
        1,
        1,
        likelihoods.Gaussian,
        np.random.default_rng(802).normal(size=ROWS),
        lambda f, y, noise: normal_rows(f[:, 0], y, noise),
    ),
    "gaussian of two outputs": (
        2,
        0,
        lambda noise: likelihoods.Gaussian(0.4),
        np.random.default_rng(803).normal(size=(ROWS, 2)),
        lambda f, y, noise: normal_rows(f, y, 0.4),
    ),
    "gaussian of two outputs, noise each": (
        2,
        2,
        likelihoods.Gaussian,
        np.random.default_rng(804).normal(size=(ROWS, 2)),
        lambda f, y, noise: normal_rows(f, y, noise),
    ),
    "heteroscedastic": (
        2,
        0,
        lambda noise: likelihoods.HeteroscedasticGaussian(),
        np.random.default_rng(805).normal(size=ROWS),
        lambda f, y, noise: normal_rows(f[:, 0], y, np.logaddexp(0, f[:, 1])),
    ),
    "heteroscedastic of two outputs": (
        4,
        0,
        lambda noise: likelihoods.HeteroscedasticGaussian(),
        np.random.default_rng(806).normal(size=(ROWS, 2)),
        lambda f, y, noise: normal_rows(f[:, :2], y, np.logaddexp(0, f[:, 2:])),
    ),
    "bernoulli": (
        1,
        0,
        lambda noise: likelihoods.Bernoulli(),
        np.array([0.0, 1, 1, 0, 1, 0, 0]),
        lambda f, y, noise: float((y * log_expit(f[:, 0]) + (1 - y) * log_expit(-f[:, 0])).sum()),
    ),
    "categorical": (
        3,
        0,
        lambda noise: likelihoods.Categorical(),
        np.array([0, 1, 2, 2, 1, 0, 0]),
        lambda f, y, noise: float(log_softmax(f, axis=1)[np.arange(ROWS), y].sum()),
    ),
}


def by_hand(prior: str, likelihood: str, u: np.ndarray, y: np.ndarray) -> float:
    """log p(w, y) + log |dw/du| of the model below, with exp as the transform of the noise."""
    outputs, noises, _, _, density = LIKELIHOODS[likelihood]
    log_prior = PRIORS[prior][1]
    parts, start, total = {}, 0, 0.0
    for name, shape in (
        ("noise", (noises,)),
        ("w1", (FEATURES, 3)),
        ("b1", (3,)),
        ("w2", (3, outputs)),
        ("b2", (outputs,)),
    ):
        count = math.prod(shape)
        parts[name] = u[start : start + count].reshape(shape)
        start += count
    noise = np.exp(parts["noise"])
    total += float((scipy.stats.halfnorm(0, 0.8).logpdf(noise) + parts["noise"]).sum())
    for name, fan_in in (("w1", FEATURES), ("b1", 1), ("w2", 3), ("b2", 1)):
        total += float(log_prior(parts[name], fan_in).sum())
    f = np.tanh(X @ parts["w1"] + parts["b1"]) @ parts["w2"] + parts["b2"]
    return total + density(f, y, noise)


def network(prior: str, likelihood: str) -> Any:
    outputs, noises, make, _, _ = LIKELIHOODS[likelihood]

    def model(x: Any, y: Any = None) -> None:
        noise = None
        if noises == 1:
            noise = bnn.sample("noise", dist.HalfNormal(0.8))
        elif noises:
            noise = bnn.sample("noise", dist.HalfNormal(0.8).expand((noises,)).to_event())
        f = bnn.mlp(x, [3, outputs], "tanh", PRIORS[prior][0])
        bnn.observe(y, f, make(noise))

    return model


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_log_joint_is_the_one_written_by_hand(ppl: str, likelihood: str) -> None:
    outputs, noises, _, y, _ = LIKELIHOODS[likelihood]
    u = 0.7 * np.random.default_rng(3).normal(size=noises + FEATURES * 3 + 3 + 3 * outputs + outputs)
    chosen = system(ppl)
    for prior in PRIORS:
        with chosen.session("float64", "cpu"):
            program = program_of(ppl, network(prior, likelihood), X, y)
            assert program.parameter_count == len(u)
            flat, xs, ys = chosen.asarray(u), chosen.asarray(X), chosen.asarray(y)
            value = float(program.log_joint(program.unravel(flat), xs, ys))
        np.testing.assert_allclose(value, by_hand(prior, likelihood, u, y), rtol=1e-9, err_msg=prior)


def test_a_wrong_scale_does_not_pass() -> None:
    """The comparison can fail: another width of the prior, and the Jacobian left out."""
    y = LIKELIHOODS["gaussian sampled"][3]
    u = 0.5 * np.random.default_rng(1).normal(size=1 + 6 + 3 + 3 + 1)
    model = network("normal", "gaussian sampled")
    right = by_hand("normal", "gaussian sampled", u, y)
    assert evaluate("numpyro", model, u, X, y)[0] == pytest.approx(right, rel=1e-9)
    assert by_hand("normal fan-in", "gaussian sampled", u, y) != pytest.approx(right, rel=1e-3)
    without = evaluate("numpyro", model, u, X, y, jacobian=False)
    assert without[0] == pytest.approx(right - u[0], rel=1e-9)
    with pytest.raises(AssertionError):
        assert_same(without, evaluate("pyro", model, u, X, y))
    with pytest.raises(AssertionError):
        assert_same(
            evaluate("numpyro", network("normal fan-in", "gaussian sampled"), u, X, y),
            evaluate("pyro", model, u, X, y),
        )


COVARIANCE = np.array(
    [[1.3, 0.4, -0.2, 0.1], [0.4, 0.9, 0.3, 0.0], [-0.2, 0.3, 2.1, 0.5], [0.1, 0.0, 0.5, 0.7]]
)
LOC = np.array([[0.2, -0.5], [1.0, 0.3]])
LEFT, RIGHT = (
    np.linalg.qr(np.random.default_rng(807).normal(size=(2, 2)))[0],
    np.linalg.qr(np.random.default_rng(808).normal(size=(3, 3)))[0],
)
PRECISIONS = np.array([[0.5, 2.0, 7.0], [1.0, 0.3, 40.0]])
MULTIVARIATE: dict[str, tuple[Any, np.ndarray, np.ndarray]] = {
    "MultivariateNormal": (
        dist.MultivariateNormal(LOC, np.linalg.cholesky(COVARIANCE)),
        LOC.ravel(),
        COVARIANCE,
    ),
    "MultivariateLogNormal": (
        dist.MultivariateLogNormal(LOC, np.linalg.cholesky(COVARIANCE)),
        LOC.ravel(),
        COVARIANCE,
    ),
    # A tensor with three axes, as a kernel has: a (2, 3) matrix once the first two are taken together.
    "KroneckerNormal": (
        dist.KroneckerNormal(np.linspace(-1, 1, 6).reshape(2, 1, 3), LEFT, RIGHT, PRECISIONS),
        np.linspace(-1, 1, 6),
        np.kron(LEFT, RIGHT) @ np.diag(1 / PRECISIONS.ravel()) @ np.kron(LEFT, RIGHT).T,
    ),
}


FAMILIES: dict[str, Any] = {
    "Normal": dist.Normal(0.3, 2.0),
    "HalfNormal": dist.HalfNormal(2.0),
    "LogNormal": dist.LogNormal(0.2, 0.7),
    "StudentT": dist.StudentT(3.0, 0.1, 2.0),
    "Laplace": dist.Laplace(0.1, 2.0),
    "Cauchy": dist.Cauchy(0.1, 2.0),
    "HalfCauchy": dist.HalfCauchy(2.0),
    "Logistic": dist.Logistic(0.2, 1.5),
    "EmpiricalBayes": dist.EmpiricalBayes(0.7, "unit"),
    "Gamma": dist.Gamma(2.0, 3.0),
    "InverseGamma": dist.InverseGamma(2.0, 3.0),
    "Exponential": dist.Exponential(2.0),
    "Beta": dist.Beta(2.0, 3.0),
    "Uniform": dist.Uniform(-1.0, 3.0),
    "Dirichlet": dist.Dirichlet([1.0, 2.0, 3.0]),
    "LKJCholesky": dist.LKJCholesky(4, 1.5),
    "MixtureOfNormals": dist.MixtureOfNormals([0.2, -0.4], [-1.0, 2.0], [0.5, 1.5]),
    "NormalMixture": dist.NormalMixture((0.3, 0.7), (1.0, 0.1)),
    **{name: specification for name, (specification, _, _) in MULTIVARIATE.items()},
}
FROZEN: dict[str, Any] = {
    "Normal": scipy.stats.norm(0.3, 2.0),
    "HalfNormal": scipy.stats.halfnorm(scale=2.0),
    "LogNormal": scipy.stats.lognorm(s=0.7, scale=math.exp(0.2)),
    "StudentT": scipy.stats.t(3.0, 0.1, 2.0),
    "Laplace": scipy.stats.laplace(0.1, 2.0),
    "Cauchy": scipy.stats.cauchy(0.1, 2.0),
    "HalfCauchy": scipy.stats.halfcauchy(scale=2.0),
    "Logistic": scipy.stats.logistic(0.2, 1.5),
    "EmpiricalBayes": scipy.stats.norm(0.0, 0.7),
    "Gamma": scipy.stats.gamma(2.0, scale=1 / 3.0),
    "InverseGamma": scipy.stats.invgamma(2.0, scale=3.0),
    "Exponential": scipy.stats.expon(scale=0.5),
    "Beta": scipy.stats.beta(2.0, 3.0),
    "Uniform": scipy.stats.uniform(-1.0, 4.0),
    "Dirichlet": scipy.stats.dirichlet([1.0, 2.0, 3.0]),
}


def test_every_family_has_one_density_in_all_three(ppl: str) -> None:
    """Density of SciPy at the constrained values, and samples inside the support, for each family."""
    chosen = system(ppl)

    def model(x: Any, y: Any = None) -> None:
        for name, specification in FAMILIES.items():
            bnn.sample(name, specification)
        bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(1.0))

    with chosen.session("float64", "cpu"):
        program = program_of(ppl, model, X, X[:, 0])
        xs, ys = chosen.asarray(X), chosen.asarray(X[:, 0])
        drawn = program.prior_draws(xs, ys, seed=0, count=1)
        assert all(np.isfinite(value).all() for value in drawn.values())
        u = program.unravel(chosen.asarray(np.linspace(-1.0, 1.2, program.parameter_count)))
        for site in program.run(u, xs, ys):
            if site.name in FROZEN:
                value = chosen.to_numpy(site.value)
                density = chosen.to_numpy(site.distribution.log_prob(site.value))
                np.testing.assert_allclose(density, FROZEN[site.name].logpdf(value), rtol=1e-9)


def multivariate(name: str, batch: tuple[int, ...] = ()) -> Any:
    specification = MULTIVARIATE[name][0]

    def model(x: Any, y: Any = None) -> None:
        bnn.sample("w", specification.expand(batch).to_event() if batch else specification)
        bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(1.0))

    return model


@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
@pytest.mark.parametrize("name", MULTIVARIATE)
def test_multivariate_families_against_scipy(
    rng: np.random.Generator, ppl: str, name: str, batch: tuple[int, ...]
) -> None:
    """Density of u, over many draws at once, and the first two moments of draws from the prior."""
    chosen, (specification, mean, covariance) = system(ppl), MULTIVARIATE[name]
    shape = specification.arguments["loc"].shape
    reference = scipy.stats.multivariate_normal(mean, covariance)
    draws = 1000 if not batch else 20
    with chosen.session("float64", "cpu"):
        program = program_of(ppl, multivariate(name, batch), X, X[:, 0])
        site = program.sites["w"]
        assert (site.shape, site.unconstrained_shape) == (batch + shape, batch + shape)
        if not batch:
            assert site.family == name
        xs, ys = chosen.asarray(X), chosen.asarray(X[:, 0])
        u = rng.normal(size=(5, *batch, *shape))
        rest = {n: np.zeros((5, *s.shape)) for n, s in program.sites.items() if n != "w"}
        values = program.log_prior_draws({"w": u, **rest}, xs, ys)
        w = program.constrain_draws({"w": u, **rest}, xs, ys)["w"]
        native = chosen.native(multivariate(name, batch), record=False)
        drawn = np.stack(
            [
                chosen.to_numpy(next(s for s in chosen.run(native, xs, ys, seed=seed) if s.name == "w").value)
                for seed in _seeds(chosen, draws)
            ]
        )
    others = scipy.stats.norm(0, [1 / math.sqrt(2), 1 / math.sqrt(2), 1]).logpdf(0.0).sum()
    expected = reference.logpdf(u.reshape(5, *batch, -1)).reshape(5, -1).sum(axis=1)
    np.testing.assert_allclose(values - others, expected, rtol=1e-10)
    logs = np.log(w) if name == "MultivariateLogNormal" else w
    np.testing.assert_allclose(logs, u, rtol=1e-12, atol=1e-14)
    assert drawn.shape == (draws, *batch, *shape)
    if batch:
        assert not np.allclose(drawn[:, 0], drawn[:, 1])
        return
    flat = (np.log(drawn) if name == "MultivariateLogNormal" else drawn).reshape(draws, -1)
    z = np.linalg.solve(np.linalg.cholesky(covariance), (flat - mean).T)
    # Standard normal coordinates: means and covariances within five standard errors.
    assert np.abs(z.mean(axis=1)).max() < 5 / math.sqrt(draws)
    assert np.abs(np.cov(z) - np.eye(len(z))).max() < 5 * math.sqrt(2 / draws)


def _seeds(chosen: Any, count: int) -> Any:
    from ppl_bnn.core.arrays import iterate_seeds

    return iterate_seeds(chosen.seeds(0, count))


def test_transforms_and_their_volumes_are_the_same_in_both_systems() -> None:
    def model(x: Any, y: Any = None) -> None:
        for name, specification in FAMILIES.items():
            bnn.sample(name, specification)
        bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(1.0))

    u = np.linspace(-1.3, 1.1, size_of(model, X, X[:, 0]))
    assert_same(evaluate("numpyro", model, u, X, X[:, 0]), evaluate("pyro", model, u, X, X[:, 0]))


# --- the zoo: both systems, and each system's own density -----------------------------------------


# Small images, 3 x 4, to the models that take rows for that; for the others twelve features.
PIXELS = np.random.default_rng(9).normal(size=(ROWS, 12))


def zoo_problem(name: str) -> tuple[Any, np.ndarray]:
    """The model at a small size, and targets of its kind for PIXELS."""
    arguments = zoo.models()[name].arguments
    sizes = {"width": 4, "classes": 3, "channels": (2, 3), "widths": (4, 3), "kernel": 3, "radius": 1.4}
    model = zoo.load(name, **{key: value for key, value in sizes.items() if key in arguments})
    sketch = zoo.sketch(model, PIXELS.shape[1])
    kind = data.load(zoo.models()[name].data or "").y
    # Counts, or several numbers to a row, as a time and whether it is that of an event: only such will do.
    if kind.ndim == 2 or sketch.likelihood.startswith(("Poisson", "NegativeBinomial")):
        return model, kind[:ROWS]
    if sketch.task == "regression":
        return model, PIXELS[:, 0] - PIXELS[:, 1]
    if "classes" in arguments:
        return model, np.array([0, 1, 2, 2, 1, 0, 0])
    # One logit has labels that are numbers, as a method hands them over.
    return model, np.array([0.0, 1, 1, 0, 1, 0, 0])


@pytest.mark.parametrize("name", zoo.models())
def test_zoo_models_have_one_log_joint_and_gradient(name: str) -> None:
    model, y = zoo_problem(name)
    size = size_of(model, PIXELS, y)
    points = [
        spread * np.random.default_rng(seed).normal(size=size) for seed, spread in enumerate((0.3, 1.0, 2.0))
    ]
    found: dict[str, list[tuple[float, np.ndarray]]] = {}
    for ppl in SYSTEMS:
        chosen = system(ppl)
        with chosen.session("float64", "cpu"):
            program = program_of(ppl, model, PIXELS, y)
            # Compiled as a whole, a model costs JAX a fraction of what its operations cost one by one.
            joint = chosen.compile(
                chosen.value_and_grad(
                    lambda flat, xs, ys, program=program: program.log_joint(program.unravel(flat), xs, ys)
                )
            )
            xs, ys = chosen.asarray(PIXELS), chosen.asarray(y)
            both = [joint(chosen.asarray(u), xs, ys) for u in points]
            found[ppl] = [(float(value), chosen.to_numpy(gradient)) for value, gradient in both]
    for one, other in zip(found["numpyro"], found["pyro"], strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("name", zoo.models())
def test_the_potential_energy_of_each_system_is_minus_the_log_joint(ppl: str, name: str) -> None:
    model, y = zoo_problem(name)
    u = np.random.default_rng(5).normal(size=size_of(model, PIXELS, y))
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        program = program_of(ppl, model, PIXELS, y)
        xs, ys = chosen.asarray(PIXELS), chosen.asarray(y)
        values = program.unravel(chosen.asarray(u))
        expected = -float(chosen.compile(lambda values: program.log_joint(values, xs, ys))(values))
        if ppl == "numpyro":
            from numpyro.infer.util import potential_energy

            native = bnn.as_numpyro(model)
            energy = chosen.compile(lambda values: potential_energy(native, (xs, ys), {}, values))(values)
        else:
            import pyro.poutine
            from pyro.infer.mcmc.util import initialize_model

            # A parameter without a prior is no coordinate of Pyro's potential: it is given beforehand.
            free = {site.name: values.pop(site.name) for site in program.params}
            native = pyro.poutine.substitute(bnn.as_pyro(model), data=free)
            _, potential, _, _ = initialize_model(native, (xs, ys))
            energy = potential(values)
    np.testing.assert_allclose(float(energy), expected, rtol=1e-10)


# --- mini-batches -----------------------------------------------------------------------------------


def with_rows(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    with bnn.rows(x.shape[0]):
        shift = bnn.sample("shift", dist.Normal(0.0, 0.5))
        stretch = bnn.sample("stretch", dist.LogNormal(0.0, 0.5))
    f = stretch[:, None] * bnn.mlp(x, [3, 1], "tanh") + shift[:, None]
    bnn.observe(y, f, likelihoods.Gaussian(noise))


@pytest.mark.parametrize("model", [network("normal", "gaussian sampled"), with_rows], ids=["plain", "rows"])
def test_a_batch_counts_as_its_share_of_all_rows(ppl: str, model: Any) -> None:
    """The scale handler of the native model and the factor N/B of the log joint are the same density."""
    y, population = X[:, 1], 50
    chosen = system(ppl)
    u = np.random.default_rng(2).normal(size=size_of(model, X, y))
    with chosen.session("float64", "cpu"):
        program = program_of(ppl, model, X, y)
        xs, ys = chosen.asarray(X), chosen.asarray(y)
        values = program.unravel(chosen.asarray(u))
        ours = float(program.log_joint(values, xs, ys, scale=population / ROWS))
        native = chosen.native(model, population=population)
        if ppl == "numpyro":
            from numpyro.infer.util import potential_energy

            theirs = -float(potential_energy(native, (xs, ys), {}, values))
        else:
            from pyro.infer.mcmc.util import initialize_model

            theirs = -float(initialize_model(native, (xs, ys))[1](values))
            if program.has_local:
                # Pyro's potential scales the density of a site and forgets the volume, here exp for `stretch`.
                theirs += (population / ROWS - 1) * float(values["stretch"].sum())
        whole = float(program.log_joint(values, xs, ys))
    np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    assert abs(ours - whole) > 1.0


def test_a_batch_leaves_pseudo_observations_alone(ppl: str) -> None:
    """Only what belongs to rows is scaled: not an observation of a weight, once for all rows."""

    def model(x: Any, y: Any = None) -> None:
        level = bnn.sample("level", dist.Normal(0.0, 1.0))
        bnn.sample("measured", dist.Normal(level, 0.1), obs=chosen.asarray(np.array(0.3)))
        bnn.observe(y, bnn.mlp(x, [1]) + level, likelihoods.Gaussian(0.5))

    chosen, y, u = system(ppl), X[:, 0], np.array([0.2, 0.5, -0.4, 0.1])
    with chosen.session("float64", "cpu"):
        xs, ys = chosen.asarray(X), chosen.asarray(y)
        program = Program.of(chosen, model, xs, ys, language=True, observed="y")
        value = float(program.log_joint(program.unravel(chosen.asarray(u)), xs, ys, scale=4.0))
    log_prior = scipy.stats.norm(0, [1.0, 1 / math.sqrt(2), 1 / math.sqrt(2), 1.0]).logpdf(u).sum()
    rows = scipy.stats.norm(X @ u[1:3] + u[3] + u[0], 0.5).logpdf(y).sum()
    expected = log_prior + scipy.stats.norm(u[0], 0.1).logpdf(0.3) + 4.0 * rows
    np.testing.assert_allclose(value, expected, rtol=1e-10)


# --- Fisher information -----------------------------------------------------------------------------


def gauss_hermite(score: Callable[[float], np.ndarray], scale: float) -> np.ndarray:
    """E[score score'] over y = f + scale * z with z ~ N(0, 1), exact for polynomials."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    total = sum(w * np.outer(score(scale * z), score(scale * z)) for z, w in zip(nodes, weights, strict=True))
    return np.asarray(total) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("likelihood", [likelihoods.Gaussian(0.5), likelihoods.HeteroscedasticGaussian()])
def test_fisher_of_gaussians_is_the_expected_outer_product_of_scores(likelihood: Any) -> None:
    eta = np.array([[0.3, -0.7], [1.2, 0.4]])
    for row, fisher in zip(eta, likelihood.fisher(eta), strict=True):
        scale = math.exp(row[1])
        # d log N(y | m, s) / d (m, log s) at y = m + r.
        expected = gauss_hermite(lambda r, s=scale: np.array([r / s**2, r**2 / s**2 - 1.0]), scale)
        np.testing.assert_allclose(fisher, expected, rtol=1e-10, atol=1e-12)


def test_fisher_of_several_outputs_is_diagonal_in_the_order_of_the_predictor(
    rng: np.random.Generator,
) -> None:
    f, noise = rng.normal(size=(3, 2)), np.array([0.5, 2.0])
    likelihood = likelihoods.Gaussian(noise)
    eta = likelihood.predictor(f)
    np.testing.assert_allclose(eta, np.column_stack([f, np.tile(np.log(noise), (3, 1))]))
    expected = np.diag([4.0, 0.25, 2.0, 2.0])
    np.testing.assert_allclose(likelihood.form.fisher(eta), np.tile(expected, (3, 1, 1)), rtol=1e-12)


def test_fisher_of_classes_is_the_expected_outer_product_of_scores(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(4, 3))
    for row, fisher in zip(logits, likelihoods.Categorical().fisher(logits), strict=True):
        p = softmax(row)
        scores = np.eye(3) - p  # d log p_k / d eta = e_k - p
        np.testing.assert_allclose(
            fisher, sum(p[k] * np.outer(scores[k], scores[k]) for k in range(3)), rtol=1e-12
        )
    for row, fisher in zip(logits[:, :1], likelihoods.Bernoulli().fisher(logits[:, :1]), strict=True):
        p = expit(row)
        np.testing.assert_allclose(fisher, [(p * (1 - p) ** 2 + (1 - p) * p**2)], rtol=1e-12)


def test_gauss_newton_does_not_depend_on_the_coordinates_of_the_predictor(rng: np.random.Generator) -> None:
    """(mean, log s) as ours, against (f_1, f_2) with s = softplus(f_2) and its own Fisher information."""
    f = rng.normal(size=(5, 2))
    jacobian = rng.normal(size=(5, 2, 6))  # of f in some weights
    likelihood = likelihoods.HeteroscedasticGaussian()
    scale, slope = np.logaddexp(0, f[:, 1]), expit(f[:, 1])
    chain = np.zeros((5, 2, 2))
    chain[:, 0, 0], chain[:, 1, 1] = 1.0, slope / scale
    ours = chain @ jacobian
    here = np.einsum("ndp,nde,neq->pq", ours, likelihood.fisher(likelihood.predictor(f)), ours)
    direct = np.zeros((5, 2, 2))
    direct[:, 0, 0], direct[:, 1, 1] = scale**-2, 2 * (slope / scale) ** 2
    np.testing.assert_allclose(here, np.einsum("ndp,nde,neq->pq", jacobian, direct, jacobian), rtol=1e-10)


def test_fisher_is_the_same_in_both_systems(rng: np.random.Generator) -> None:
    eta = rng.normal(size=(4, 4))
    for likelihood in (likelihoods.Gaussian(None), likelihoods.Categorical()):
        reference = likelihood.fisher(eta)
        for ppl in SYSTEMS:
            chosen = system(ppl)
            with chosen.session("float64", "cpu"):
                value = chosen.to_numpy(likelihood.fisher(chosen.asarray(eta)))
            np.testing.assert_allclose(value, reference, rtol=1e-12, atol=1e-15)


def test_what_a_prediction_is_made_of_is_what_the_likelihood_says(rng: np.random.Generator) -> None:
    """`mixture_parameters` of the predictor gives the density that the log joint uses."""
    from ppl_bnn.prediction.prediction import Prediction

    for name, (outputs, noises, make, y, density) in LIKELIHOODS.items():
        f = rng.normal(size=(ROWS, outputs))
        noise = np.exp(rng.normal(size=noises)) if noises else None
        likelihood = make(noise)
        eta = likelihood.predictor(f)
        family, parameters = likelihood.form.mixture_parameters(eta[None])
        total = Prediction(family, parameters).log_prob(y).sum()
        np.testing.assert_allclose(total, density(f, y, noise), rtol=1e-10, err_msg=name)


def test_binding_does_not_change_a_density() -> None:
    y = X[:, 0]
    bound = functools.partial(zoo.load("regression_mlp"), width=3)
    u = np.random.default_rng(0).normal(size=size_of(bound, X, y))
    assert_same(evaluate("numpyro", bound, u, X, y), evaluate("pyro", bound, u, X, y))


@pytest.mark.parametrize(
    ("specification", "says"),
    [
        (lambda: dist.MultivariateNormal(LOC, np.eye(3)), r"shape \(4, 4\) for loc of shape \(2, 2\)"),
        (lambda: dist.MultivariateNormal(LOC, COVARIANCE), "lower triangular"),
        (lambda: dist.MultivariateLogNormal(LOC, -np.eye(4)), "positive diagonal"),
        (lambda: dist.MultivariateNormal(0.0, np.eye(1)), "Normal for a single number"),
        (lambda: dist.MultivariateNormal(LOC * np.nan, np.eye(4)), "a finite loc"),
        (lambda: dist.KroneckerNormal(LOC, LEFT, RIGHT, PRECISIONS), r"I \* O = 4"),
        (lambda: dist.KroneckerNormal(LOC[:, :1] @ np.ones((1, 3)), RIGHT, LEFT, PRECISIONS), "left_vectors"),
        (lambda: dist.KroneckerNormal(np.zeros(6), LEFT, RIGHT, -PRECISIONS), "a positive precisions"),
    ],
)
def test_impossible_multivariate_families_are_refused_where_they_are_written(
    specification: Any, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        specification()


def test_the_frameworks_check_the_arguments_of_multivariate_families() -> None:
    """Validation in NumPyro, as a user may switch it on, takes what is right and refuses what is not."""
    import jax.numpy as jnp

    from ppl_bnn.backends.numpyro import resolve

    with system("numpyro").session("float64", "cpu"):
        for specification, mean, _ in MULTIVARIATE.values():
            shape = specification.arguments["loc"].shape
            value = np.abs(mean).reshape(shape) + 1.0
            assert np.isfinite(resolve(specification, validate=True).log_prob(jnp.asarray(value)))
        wrong = dist.MultivariateNormal(jnp.zeros(2), jnp.asarray([[1.0, 2.0], [0.0, 1.0]]))
        with pytest.raises(ValueError, match="scale_tril"):
            resolve(wrong, validate=True)
