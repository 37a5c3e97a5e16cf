"""`bnn.Laplace` under every kind of prior: hierarchies, heavy tails, arrays of scales, and where data say nothing.

Oracles: linear models in closed form with their evidence maximised by SciPy, second derivatives of SciPy's densities,
and dense algebra.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, stats

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.core.errors import CurvatureError, UnsupportedError
from ppl_bnn.inference.curvature.structures import DiagonalCurvature, FactorCurvature, FullCurvature
from ppl_bnn.inference.laplace import fit as laplace_fit
from ppl_bnn.language.transforms import GaussianPrior
from tests.problems import Conjugate, in_both_systems

NOISE = 0.5
# Where the two systems share the NumPy that is tested, the one that compiles for seconds is left to the slow tests.
PYRO_FIRST = pytest.mark.parametrize("ppl", ["pyro", pytest.param("numpyro", marks=pytest.mark.slow)])


def fit(model, x, y, ppl, **settings):
    return bnn.fit(model, x, y, bnn.Laplace(ppl=ppl, **settings))


def close(ours, wanted, relative=1e-8):
    """To `relative` of the largest entry: what rounding may do to a matrix."""
    assert np.shape(ours) == np.shape(wanted)
    assert np.abs(ours - wanted).max() <= relative * np.abs(wanted).max()


def second_derivative(log_density, at, step=1e-4):
    """Of minus a log density, by central differences of fourth order: relative error 1e-6 or so."""
    terms = [-log_density(at + k * step) for k in (-2, -1, 0, 1, 2)]
    return (-terms[0] + 16 * terms[1] - 30 * terms[2] + 16 * terms[3] - terms[4]) / (12 * step**2)


# --- scales of priors -----------------------------------------------------------------------------


def hierarchy(scale_prior):
    def model(x, y=None):
        scale = bnn.sample("scale", scale_prior)
        weight = bnn.sample("weight", dist.Normal(0.0, scale).expand((x.shape[1], 1)).to_event())
        bnn.observe(y, bnn.linear("output", x, weight), likelihoods.Gaussian(NOISE))

    return model


def local_scales(x, y=None):
    """The horseshoe: a half-Cauchy scale for each weight, and one for all."""
    common = bnn.sample("common", dist.HalfCauchy(1.0))
    local = bnn.sample("local", dist.HalfCauchy(1.0).expand((x.shape[1], 1)).to_event())
    weight = bnn.sample("weight", dist.Normal(0.0, common * local).to_event(2))
    bnn.observe(y, bnn.linear("output", x, weight), likelihoods.Gaussian(NOISE))


HYPER = {
    "half-normal": (dist.HalfNormal(2.0), stats.halfnorm(scale=2.0)),
    "log-normal": (dist.LogNormal(0.2, 0.7), stats.lognorm(s=0.7, scale=np.exp(0.2))),
    "half-cauchy": (dist.HalfCauchy(1.0), stats.halfcauchy(scale=1.0)),
    "inverse gamma": (dist.InverseGamma(2.0, 1.0), stats.invgamma(2.0, scale=1.0)),
    "gamma": (dist.Gamma(2.0, 1.0), stats.gamma(2.0)),
}


def log_evidence(problem, scale):
    total = problem.noise**2 * np.eye(len(problem.y)) + scale**2 * problem.x @ problem.x.T
    return float(stats.multivariate_normal(np.zeros(len(problem.y)), total).logpdf(problem.y))


@in_both_systems("hyper", HYPER, once="half-normal")
def test_a_scale_at_its_marginal_mode_is_the_maximum_of_the_closed_form(ppl, hyper):
    """log p(D | s) + log p(s) + log s, in the coordinate log s; the weights are N(0, s^2) given it."""
    problem = Conjugate.make()
    ours, density = HYPER[hyper]
    found = optimize.minimize_scalar(
        lambda u: -(log_evidence(problem, np.exp(u)) + density.logpdf(np.exp(u)) + u),
        bounds=(-4.0, 4.0),
        method="bounded",
        options={"xatol": 1e-9},
    )
    posterior = fit(hierarchy(ours), problem.x, problem.y, ppl, marginal=["scale"], steps=200)
    u = float(posterior.approximation.centre()["scale"])
    # The outer search stops at 1e-3 in log scale, and at 1e-6 in the value.
    assert abs(u - found.x) < 2e-3
    scale = np.exp(u)
    precision = problem.x.T @ problem.x / NOISE**2 + np.eye(3) / scale**2
    close(posterior.approximation.covariance.precision(), precision)
    mean = np.linalg.solve(precision, problem.x.T @ problem.y / NOISE**2)
    assert np.allclose(posterior.approximation.centre()["weight"][:, 0], mean, rtol=1e-6)
    assert np.isclose(posterior.log_evidence, log_evidence(problem, scale), rtol=1e-8)
    assert np.ptp(posterior.draws["scale"]) == 0.0


WITHOUT_MODE = {
    "half-normal": (hierarchy(dist.HalfNormal(1.0)), "scale"),
    "half-cauchy": (hierarchy(dist.HalfCauchy(1.0)), "scale"),
    "gamma": (hierarchy(dist.Gamma(1.5, 1.0)), "scale"),
    "horseshoe": (local_scales, "common"),
}


@in_both_systems("case", WITHOUT_MODE, once="half-normal")
def test_a_joint_density_without_a_mode_is_refused_and_fits_without_its_funnel(ppl, case):
    model, named = WITHOUT_MODE[case]
    problem = Conjugate.make()
    with pytest.raises(UnsupportedError, match=rf"marginal=\['{named}'\].*noncentred"):
        fit(model, problem.x, problem.y, ppl, steps=100)
    posterior = fit(bnn.noncentred(model), problem.x, problem.y, ppl, steps=500)
    prediction = posterior.predict(problem.x)
    assert np.isfinite(prediction.std).all()
    assert (prediction.epistemic > 0).all()
    # Forty rows determine three weights: whatever the hierarchy, the fit is that of least squares.
    design = problem.x
    fitted = design @ np.linalg.lstsq(design, problem.y, rcond=None)[0]
    assert np.abs(prediction.mean - fitted).max() < 0.25


@pytest.mark.parametrize(
    "scale_prior",
    [dist.LogNormal(0.0, 1.0), dist.InverseGamma(2.0, 1.0), dist.Gamma(6.0, 2.0)],
    ids=["log-normal", "inverse gamma", "gamma"],
)
@PYRO_FIRST
def test_a_hyper_prior_that_keeps_the_density_bounded_is_no_obstacle(ppl, scale_prior):
    """The joint mode over (scale, weights), with the dense curvature of the prior by finite differences."""
    problem = Conjugate.make()
    density = {
        "LogNormal": stats.lognorm(s=1.0),
        "InverseGamma": stats.invgamma(2.0, scale=1.0),
        "Gamma": stats.gamma(6.0, scale=0.5),
    }[scale_prior.family]
    posterior = fit(hierarchy(scale_prior), problem.x, problem.y, ppl, steps=500)
    centre = posterior.approximation.centre()
    mode = np.r_[float(centre["scale"]), centre["weight"][:, 0]]

    def log_joint(z):
        prior = density.logpdf(np.exp(z[0])) + z[0] + stats.norm(0.0, np.exp(z[0])).logpdf(z[1:]).sum()
        return prior + stats.norm(problem.x @ z[1:], NOISE).logpdf(problem.y).sum()

    best = optimize.minimize(lambda z: -log_joint(z), mode, method="BFGS", options={"gtol": 1e-6})
    assert np.allclose(mode, best.x, atol=1e-4)
    # -log prior in (log s, w): w'w exp(-2u) / 2 + 3u, and the hyper-prior's own curvature.
    u, w = mode[0], mode[1:]
    wanted = np.zeros((4, 4))
    wanted[0, 0] = 2.0 * w @ w * np.exp(-2 * u)
    wanted[0, 0] += second_derivative(lambda v: density.logpdf(np.exp(v)) + v, u)
    wanted[0, 1:] = wanted[1:, 0] = -2.0 * w * np.exp(-2 * u)
    wanted[1:, 1:] = problem.x.T @ problem.x / NOISE**2 + np.eye(3) * np.exp(-2 * u)
    close(posterior.approximation.covariance.precision(), wanted, 1e-5)


# --- elementwise priors ---------------------------------------------------------------------------


def one_prior(prior):
    def model(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1], prior=prior, bias=False), likelihoods.Gaussian(NOISE))

    return model


MIXTURE = priors.ScaleMixture((0.5, 0.5), (2.0, 0.05))


def mixture_density(w):
    return np.log(0.5 * stats.norm(0.0, 2.0).pdf(w) + 0.5 * stats.norm(0.0, 0.05).pdf(w))


ELEMENTWISE = {
    "normal": (priors.Normal(0.3, 0.7), lambda w: stats.norm(0.3, 0.7).logpdf(w)),
    "student": (priors.StudentT(4.0, 0.0, 2.0), lambda w: stats.t(4.0, 0.0, 2.0).logpdf(w)),
    "mixture": (MIXTURE, mixture_density),
}


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("name", ELEMENTWISE)
@PYRO_FIRST
def test_the_curvature_of_a_prior_is_its_second_derivative(ppl, name, structure):
    """Away from the centre each weight has a curvature of its own, in the tails a negative one."""
    problem = Conjugate.make()
    prior, density = ELEMENTWISE[name]
    posterior = fit(one_prior(prior), problem.x, problem.y, ppl, structure=structure, steps=300)
    w = posterior.approximation.centre()["output.weight"][:, 0]
    data = problem.x.T @ problem.x / NOISE**2
    data = np.diag(np.diag(data)) if structure == "diag" else data
    wanted = data + np.diag([second_derivative(density, value) for value in w])
    close(posterior.approximation.covariance.precision(), wanted, 1e-6)
    gradient = problem.x.T @ (problem.y - problem.x @ w) / NOISE**2
    slope = np.array([(density(value + 1e-6) - density(value - 1e-6)) / 2e-6 for value in w])
    assert np.allclose(gradient + slope, 0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("prior", "value"), [(priors.StudentT(3.0, 0.0, 0.1), 1.0), (MIXTURE, 0.12)], ids=["student", "mixture"]
)
@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])
@PYRO_FIRST
def test_a_prior_that_curves_upwards_is_an_error_or_is_clipped_in_writing(ppl, prior, value, structure):
    """Inputs of a hundredth, so that the data cannot make up for the tail of a prior."""
    x, y = 0.01 * np.random.default_rng(0).normal(size=(10, 2)), np.zeros(10)
    density = mixture_density if prior is MIXTURE else stats.t(3.0, 0.0, 0.1).logpdf
    curvature = second_derivative(density, value)
    assert curvature < 0
    start = {"output.weight": np.array([[value], [0.0]])}
    settings = {"structure": structure, "start": start, "optimise": False}
    settings |= {"rank": 1} if structure == "lowrank" else {}
    with pytest.raises(CurvatureError, match="repair='clip'"):
        fit(one_prior(prior), x, y, ppl, **settings)
    posterior = fit(one_prior(prior), x, y, ppl, repair="clip", **settings)
    assert any("1 negative eigenvalues" in sentence for sentence in posterior.info.warnings)
    data = x.T @ x / NOISE**2
    if structure == "diag":
        data = np.diag(np.diag(data))
    elif structure == "lowrank":
        values, vectors = np.linalg.eigh(data)
        data = values[-1] * np.outer(vectors[:, -1], vectors[:, -1])
    wanted = data + np.diag([0.0, second_derivative(density, 0.0)])
    # The clipped weight has nothing but the data: the entry is checked by itself, it is small beside the other.
    precision = posterior.approximation.covariance.precision()
    close(precision, wanted, 1e-6)
    assert np.isclose(precision[0, 0], data[0, 0], rtol=1e-4)


@PYRO_FIRST
def test_a_prior_with_a_kink_is_refused_in_every_structure(ppl):
    problem = Conjugate.make()
    for structure in ("full", "kron", "diag"):
        with pytest.raises(UnsupportedError, match="kink"):
            fit(one_prior(priors.Laplace(0.0, 1.0)), problem.x, problem.y, ppl, structure=structure)


SCALES = {
    "Normal": (dist.Normal(0.0, 1.0), lambda u: stats.norm.logpdf(u), lambda u: u**2 + 0.1),
    "LogNormal": (dist.LogNormal(0.1, 0.6), lambda u: stats.norm(0.1, 0.6).logpdf(u), np.exp),
    "HalfNormal": (dist.HalfNormal(1.5), lambda u: stats.halfnorm(scale=1.5).logpdf(np.exp(u)) + u, np.exp),
    "Gamma": (dist.Gamma(2.0, 3.0), lambda u: stats.gamma(2.0, scale=1 / 3).logpdf(np.exp(u)) + u, np.exp),
}


@pytest.mark.parametrize(
    ("ppl", "family"),
    [*(("pyro", family) for family in SCALES), pytest.param("numpyro", "Gamma", marks=pytest.mark.slow)],
)
def test_a_noise_of_any_prior_has_its_curvature(ppl, family):
    """The noise is a site, or made of one: a block of its own, 2 (d log noise / du)^2 for each row and the prior's."""
    problem = Conjugate.make()
    specification, density, to_noise = SCALES[family]

    def model(x, y=None):
        root = bnn.sample("root", specification)
        noise = root**2 + 0.1 if family == "Normal" else root
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0)), likelihoods.Gaussian(noise))

    for structure in ("full", "kron", "diag"):
        posterior = fit(model, problem.x, problem.y, ppl, structure=structure, steps=300)
        u = float(posterior.approximation.centre()["root"])
        slope = (np.log(to_noise(u + 1e-6)) - np.log(to_noise(u - 1e-6))) / 2e-6
        wanted = 2.0 * len(problem.y) * slope**2 + second_derivative(density, u)
        precision = posterior.approximation.covariance.precision()
        assert np.isclose(precision[0, 0], wanted, rtol=1e-5)
        assert np.abs(precision[0, 1:]).max() < 1e-10 * precision[0, 0]


# --- one precision for each tensor ----------------------------------------------------------------


def fan_in(x, y=None):
    f = bnn.mlp(x, [4, 1], activation="tanh", prior=priors.Normal(0.0, "fan_in"))
    bnn.observe(y, f, likelihoods.Gaussian(NOISE))


def test_kronecker_factors_with_a_precision_for_each_tensor():
    """Subtracting the prior by hand, 1 / variance = fan_in, leaves a product of two factors in each weight."""
    problem = Conjugate.make()
    posterior = fit(fan_in, problem.x, problem.y, "pyro", structure="kron", steps=300)
    precision = posterior.approximation.covariance.precision()
    mode = posterior.approximation.centre()
    prior = np.repeat([3.0, 1.0, 4.0, 1.0], [12, 4, 4, 1])
    hidden = np.tanh(problem.x @ mode["hidden0.weight"] + mode["hidden0.bias"])
    outer = (1.0 - hidden**2) * mode["output.weight"][:, 0] / NOISE
    rows = len(problem.x)
    wanted = np.zeros((21, 21))
    wanted[:12, :12] = np.kron(problem.x.T @ problem.x / rows, outer.T @ outer)
    wanted[12:16, 12:16] = outer.T @ outer
    wanted[16:20, 16:20] = hidden.T @ hidden / NOISE**2
    wanted[20, 20] = rows / NOISE**2
    close(precision, wanted + np.diag(prior))


RELEVANCE = np.array([[0.5], [1.0], [2.0]])


@PYRO_FIRST
def test_a_precision_that_differs_within_a_tensor(ppl):
    """Kronecker factors cannot have it: refused, or averaged in writing; all other structures do."""
    problem = Conjugate.make()
    model = one_prior(priors.Normal(0.0, RELEVANCE))
    data, prior = problem.x.T @ problem.x / NOISE**2, 1.0 / RELEVANCE[:, 0] ** 2
    mode = np.linalg.solve(data + np.diag(prior), problem.x.T @ problem.y / NOISE**2)
    settings = {"start": {"output.weight": mode[:, None]}, "optimise": False}
    with pytest.raises(UnsupportedError, match=r"output\.weight.*prior_approximation='kron' or 'mean'"):
        fit(model, problem.x, problem.y, ppl, structure="kron", **settings)
    averaged = fit(model, problem.x, problem.y, ppl, structure="kron", prior_approximation="mean", **settings)
    assert any("averaged over each weight matrix" in sentence for sentence in averaged.info.warnings)
    close(averaged.approximation.covariance.precision(), data + prior.mean() * np.eye(3))
    for structure in ("full", "diag"):
        exact = fit(model, problem.x, problem.y, ppl, structure=structure, **settings)
        of_data = np.diag(np.diag(data)) if structure == "diag" else data
        close(exact.approximation.covariance.precision(), of_data + np.diag(prior))
        assert not exact.info.warnings
    same = fit(
        one_prior(priors.Normal(0.0, 2.0)),
        problem.x,
        problem.y,
        ppl,
        structure="kron",
        prior_approximation="mean",
        steps=300,
    )
    assert not any("averaged" in sentence for sentence in same.info.warnings)


def shared_scale(x, y=None):
    scale = bnn.sample("scale", dist.InverseGamma(3.0, 2.0))
    weight = bnn.sample("output.weight", dist.Normal(0.0, scale).expand((3, 1)).to_event())
    bnn.observe(y, bnn.linear("output", x, weight), likelihoods.Gaussian(NOISE))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (one_prior(MIXTURE), r"'output\.weight'.*Mixture.* prior, whose curvature changes with the value"),
        (one_prior(priors.StudentT(4.0, 0.0, 2.0)), "StudentT prior, whose curvature changes with the value"),
        (shared_scale, "sites are independent.*dense curvature"),
    ],
    ids=["mixture", "student", "hierarchy"],
)
@PYRO_FIRST
def test_what_kronecker_factors_cannot_hold_is_refused_before_training(ppl, model, words, monkeypatch):
    """At zero all elements of a tensor are alike, and such a prior looks as if it had one precision."""
    problem = Conjugate.make()
    assert fit(model, problem.x, problem.y, ppl, structure="kron", prior_approximation="mean", steps=300)

    def trained(*arguments, **keywords):
        raise AssertionError("it was trained")

    monkeypatch.setattr(laplace_fit, "find_mode", trained)
    with pytest.raises(UnsupportedError, match=words):
        fit(model, problem.x, problem.y, ppl, structure="kron")


# --- data that do not determine every weight ------------------------------------------------------


def rectified(x, y=None):
    f = bnn.mlp(x, [3, 1], activation="relu", prior=priors.Normal(0.0, 0.7))
    bnn.observe(y, f, likelihoods.Gaussian(NOISE))


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
@PYRO_FIRST
def test_a_dead_unit_keeps_its_prior(ppl, structure):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 2)), rng.normal(size=20)
    start = {
        "hidden0.weight": np.array([[0.5, 0.2, 1.0], [-0.3, 0.4, 0.8]]),
        "hidden0.bias": np.array([0.1, -50.0, 0.2]),
        "output.weight": np.array([[0.7], [1.0], [-0.5]]),
        "output.bias": np.array([0.1]),
    }
    settings = {"structure": structure, "rank": 5 if structure == "lowrank" else None}
    posterior = fit(rectified, x, y, ppl, start=start, optimise=False, **settings)
    covariance = posterior.approximation.covariance.covariance()
    # weight (2, 3) ravelled, then the biases, then the output: unit 1 is at 1, 4, 7 and 10.
    dead = np.array([1, 4, 7, 10])
    assert np.allclose(covariance[np.ix_(dead, dead)], 0.49 * np.eye(4), rtol=1e-9, atol=1e-12)
    others = np.setdiff1d(np.arange(13), dead)
    assert np.abs(covariance[np.ix_(dead, others)]).max() < 1e-12
    if structure == "full":
        hidden = np.maximum(x @ start["hidden0.weight"] + start["hidden0.bias"], 0.0)
        outer = (hidden > 0) * start["output.weight"][:, 0]
        jacobian = np.concatenate(
            [(x[:, :, None] * outer[:, None]).reshape(20, 6), outer, hidden, np.ones((20, 1))], axis=1
        )
        close(covariance, np.linalg.inv(jacobian.T @ jacobian / NOISE**2 + np.eye(13) / 0.49))


@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])
@pytest.mark.parametrize("case", ["twice the same column", "more weights than rows"])
@PYRO_FIRST
def test_a_singular_curvature_under_a_proper_prior_is_the_dense_computation(ppl, case, structure):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20, 2)) if case == "twice the same column" else rng.normal(size=(6, 15))
    x = np.column_stack([x, x[:, 0]])
    y = rng.normal(size=len(x))
    rank = np.linalg.matrix_rank(x)
    assert rank < x.shape[1]
    settings = {"structure": structure, "rank": int(rank) if structure == "lowrank" else None}
    posterior = fit(one_prior(priors.Normal(0.0, 1.5)), x, y, ppl, steps=300, **settings)
    data = x.T @ x / NOISE**2
    data = np.diag(np.diag(data)) if structure == "diag" else data
    precision = data + np.eye(x.shape[1]) / 1.5**2
    close(posterior.approximation.covariance.covariance(), np.linalg.inv(precision))
    if structure != "diag":
        total = NOISE**2 * np.eye(len(y)) + 1.5**2 * x @ x.T
        exact = stats.multivariate_normal(np.zeros(len(y)), total).logpdf(y)
        assert np.isclose(posterior.log_evidence, exact, rtol=1e-8)
        assert posterior.info.figures["effective_parameters"] < rank
    # Draws spread along what the data do not see as far as the prior lets them.
    weights = posterior.draws["output.weight"][0, :, :, 0]
    unseen = (weights[:, 0] - weights[:, -1]) / np.sqrt(2.0)
    direction = np.zeros(x.shape[1])
    direction[0], direction[-1] = np.sqrt(0.5), -np.sqrt(0.5)
    wanted = np.sqrt(direction @ np.linalg.solve(precision, direction))
    # 1000 draws: a standard deviation scatters by 1 / sqrt(2000) of itself.
    assert abs(unseen.std() / wanted - 1.0) < 4.5 / np.sqrt(2000)


def test_a_singular_curvature_without_a_prior_is_named():
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(2, 4))
    for curvature in (FullCurvature(factor.T @ factor), FactorCurvature(factor)):
        with pytest.raises(CurvatureError, match="improper prior"):
            curvature.gaussian(np.zeros(4))
    with pytest.raises(CurvatureError):
        DiagonalCurvature(np.array([1.0, 0.0])).gaussian(np.zeros(2))
    # Where the data do determine every weight, no prior is needed.
    whole = rng.normal(size=(7, 4))
    close(FactorCurvature(whole).gaussian(np.zeros(4)).precision(), whole.T @ whole)


def test_a_joint_normal_prior_far_from_zero_is_no_funnel(rng):
    """Far from its centre a normal log density is nearly linear, as that of a scale that goes to zero is."""
    x, y = rng.normal(size=(30, 2)), rng.normal(size=30)
    mode = {"output.weight": np.full((2, 1), -3000.0), "output.bias": np.zeros(1)}
    precision = np.array([[2.0, 0.5, 0.3], [0.5, 1.0, 0.2], [0.3, 0.2, 1.5]])
    prior = GaussianPrior(mode, joint=((tuple(mode), precision),))

    def model(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(1.0))

    fitted = bnn.fit(bnn.with_prior(model, prior), x, y, bnn.Laplace(ppl="pyro", steps=300), progress=False)
    design = np.column_stack([x, np.ones(30)])
    before = np.array([-3000.0, -3000.0, 0.0])
    exact = np.linalg.solve(precision + design.T @ design, precision @ before + design.T @ y)
    centre = fitted.approximation.centre()
    found = np.r_[centre["output.weight"][:, 0], centre["output.bias"]]
    np.testing.assert_allclose(found, exact, rtol=1e-4)
