"""What `bnn.Laplace` offers: every choice against an oracle of its own, or refused by name before the work begins.

Oracles: a network written by hand in torch (Jacobian, gradients, Hessian), Bayesian linear regression in closed form
with its evidence maximised by SciPy, and dense algebra.
"""

from __future__ import annotations

import itertools
import tracemalloc
from functools import cache

import numpy as np
import pytest
from scipy import optimize, stats

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import (
    CurvatureError,
    DivergenceError,
    InputError,
    UnknownNameError,
    UnsupportedError,
)
from ppl_bnn.core.progress import Silent
from ppl_bnn.inference.optimisation.mode import find_mode, starting_point
from tests.problems import Conjugate, in_both_systems, regression_data, small_classifier, small_network

PPLS = ("numpyro", "pyro")
# Where the two systems share the NumPy that is tested, the one that compiles for seconds is left to the slow tests.
PYRO_FIRST = pytest.mark.parametrize("ppl", ["pyro", pytest.param("numpyro", marks=pytest.mark.slow)])
# Where the system has no part in what is tested but for the fit, which is in other tests.
PYRO_ALONE = pytest.mark.parametrize("ppl", ["pyro"])


def some_in_numpyro(name, cases, *some):
    """All cases in Pyro, and some of each kind among the slow tests in NumPyro."""
    later = [pytest.param("numpyro", case, marks=pytest.mark.slow) for case in some]
    return pytest.mark.parametrize(f"ppl,{name}", [*(("pyro", case) for case in cases), *later])


def fit(model, x, y, ppl, **settings):
    return bnn.fit(model, x, y, bnn.Laplace(ppl=ppl, **settings))


def close(ours, wanted, relative=1e-8):
    """To `relative` of the largest entry: what rounding may do to a matrix."""
    ours, wanted = np.asarray(ours), np.asarray(wanted)
    assert ours.shape == wanted.shape
    assert np.abs(ours - wanted).max() <= relative * np.abs(wanted).max()


def flat_centre(posterior):
    return np.concatenate([np.ravel(value) for value in posterior.approximation.centre().values()])


# --- curvature x structure x weights --------------------------------------------------------------

CURVATURES = ("ggn", "empirical", "hessian")
STRUCTURES = ("full", "kron", "diag", "lowrank")
WHOLE = {"full": "full", "kron": "kron", "diag": "diag", "lowrank": "full"}
WEIGHTS = ("all", "last_layer", ("output", "hidden0.bias"), "largest_variance", "largest_magnitude")
# The only members of the product that are not defined; all others have to fit.
UNDEFINED = {
    **{("hessian", "kron", weights): "sum of products of gradients" for weights in WEIGHTS},
    **{(curvature, "kron", "largest_variance"): "whole layers" for curvature in ("ggn", "empirical")},
    **{(curvature, "kron", "largest_magnitude"): "whole layers" for curvature in ("ggn", "empirical")},
}
RANK, SUBNETWORK = 3, 5
# small_network with 2 inputs: noise, hidden0.weight (2, 3), hidden0.bias (3,), output.weight (3, 1), output.bias (1,).
SITES = {
    "noise": np.arange(1),
    "hidden0.weight": np.arange(1, 7),
    "hidden0.bias": np.arange(7, 10),
    "output.weight": np.arange(10, 13),
    "output.bias": np.arange(13, 14),
}


@cache
def network_mode():
    x, y = regression_data(rows=30)
    mode = bnn.fit(small_network, x, y, bnn.MAP())
    return x, y, mode, np.concatenate([np.ravel(mode.approximation.centre()[name]) for name in SITES])


@cache
def by_hand():
    """Gauss-Newton, empirical Fisher and Hessian of `small_network` at its mode, with torch and the formulas alone."""
    import torch

    x, y, _, u = network_mode()
    rows, targets = torch.tensor(x), torch.tensor(y)

    def eta(flat):
        hidden = torch.tanh(rows @ flat[1:7].reshape(2, 3) + flat[7:10])
        return torch.stack(
            [(hidden @ flat[10:13].reshape(3, 1) + flat[13])[:, 0], flat[0].expand(len(rows))], 1
        )

    def log_likelihood(flat):
        f, log_noise = eta(flat).T
        return -0.5 * ((targets - f) / log_noise.exp()) ** 2 - log_noise

    point = torch.tensor(u)
    jacobian = torch.func.jacrev(eta)(point).numpy()
    noise = np.exp(u[0])
    fisher = np.diag([1.0 / noise**2, 2.0])
    scores = torch.func.jacrev(log_likelihood)(point).numpy()
    hessian = torch.func.hessian(lambda flat: -log_likelihood(flat).sum())(point).numpy()
    # Of -log p(noise) - log noise, half-normal: noise^2 / 2 - log noise; weights have variance 1 / fan_in.
    prior = np.r_[2.0 * noise**2, np.full(6, 2.0), np.ones(3), np.full(3, 3.0), 1.0]
    return {
        "ggn": np.einsum("ndp,de,neq->pq", jacobian, fisher, jacobian),
        "empirical": scores.T @ scores,
        "hessian": hessian,
        "prior": prior,
        "jacobian": jacobian,
        "scores": scores,
    }


def positions_by_hand(weights, curvature):
    known = by_hand()
    if weights == "all":
        return np.arange(14)
    if weights == "last_layer":
        return np.r_[SITES["noise"], SITES["output.weight"], SITES["output.bias"]]
    if not isinstance(weights, str):
        return np.r_[SITES["noise"], SITES["hidden0.bias"], SITES["output.weight"], SITES["output.bias"]]
    size = np.abs(network_mode()[3])
    if weights == "largest_variance":
        size = 1.0 / (np.diag(known[curvature]) + known["prior"])
    chosen = 1 + np.argsort(-size[1:])[:SUBNETWORK]
    return np.r_[0, np.sort(chosen)]


def precision_by_hand(curvature, structure, weights):
    known = by_hand()
    at = positions_by_hand(weights, curvature)
    data, prior = known[curvature][np.ix_(at, at)], np.diag(known["prior"][at])
    if structure == "diag":
        data = np.diag(np.diag(data))
    elif structure == "lowrank":
        # The noise, first of all, has a block of its own. The eigenpairs are in the coordinates of the prior.
        noise, root = data[0, 0], np.sqrt(np.diag(prior)[1:])
        values, vectors = np.linalg.eigh(data[1:, 1:] / np.outer(root, root))
        values, vectors = values[-RANK:], root[:, None] * vectors[:, -RANK:]
        data = np.zeros_like(data)
        data[0, 0] = max(noise, 0.0)
        data[1:, 1:] = (vectors * np.maximum(values, 0.0)) @ vectors.T
    elif structure == "kron":
        data = kronecker_by_hand(curvature)[np.ix_(at, at)]
    return data + prior


def kronecker_by_hand(curvature):
    """mean(a a') (x) sum(g g') for weights, exact blocks for biases and the noise, nothing between sites."""
    known, (x, _, _, u) = by_hand(), network_mode()
    total = np.zeros((14, 14))
    for at in SITES.values():
        total[np.ix_(at, at)] = known[curvature][np.ix_(at, at)]
    hidden = np.tanh(x @ u[1:7].reshape(2, 3) + u[7:10])
    for weight, bias, inputs in (
        ("hidden0.weight", "hidden0.bias", x),
        ("output.weight", "output.bias", hidden),
    ):
        # The gradient at the output of a layer is that of its bias.
        right = known[curvature][np.ix_(SITES[bias], SITES[bias])]
        total[np.ix_(SITES[weight], SITES[weight])] = np.kron(inputs.T @ inputs / len(x), right)
    return total


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_every_combination_is_the_dense_one_or_a_named_error(curvature, structure):
    """Both systems, at the same weights; the oracle is neither."""
    x, y, mode, _ = network_mode()
    new = np.random.default_rng(0).normal(size=(4, 2))
    for weights in WEIGHTS:
        settings = {"curvature": curvature, "structure": structure, "weights": weights}
        settings |= {"rank": RANK} if structure == "lowrank" else {}
        settings |= {"subnetwork": SUBNETWORK} if str(weights).startswith("largest") else {}
        undefined = UNDEFINED.get((curvature, structure, weights))
        if undefined is not None:
            with pytest.raises(UnsupportedError, match=undefined):
                bnn.Laplace(**settings)
            continue
        # NumPyro compiles for seconds; which weights a Gaussian is over is decided before a system is asked, and
        # test_curvature has the curvature of some weights in both.
        ppls = PPLS if weights == "all" else ("pyro",)
        found = [fit(small_network, x, y, ppl, start=mode, optimise=False, **settings) for ppl in ppls]
        wanted = precision_by_hand(curvature, structure, weights)
        for posterior in found:
            close(posterior.approximation.covariance.precision(), wanted)
            at = posterior.approximation.positions
            assert np.array_equal(np.arange(14) if at is None else at, positions_by_hand(weights, curvature))
            # What the Gaussian is not over does not move.
            moves = np.concatenate(
                [np.ptp(v[0], axis=0).ravel() for v in posterior.unconstrained_draws.values()]
            )
            assert np.array_equal(np.flatnonzero(moves), positions_by_hand(weights, curvature))
            # Effective parameters are those of the whole curvature, also beyond a rank.
            whole = (
                wanted if curvature == "hessian" else precision_by_hand(curvature, WHOLE[structure], weights)
            )
            if structure == "lowrank":
                # The noise has its own block: an empirical Fisher matrix couples it to the weights.
                whole[0, 1:] = whole[1:, 0] = 0.0
            data = whole - np.diag(by_hand()["prior"][positions_by_hand(weights, curvature)])
            gamma = np.trace(np.linalg.solve(whole, data))
            assert np.isclose(posterior.info.figures["effective_parameters"], gamma, rtol=1e-7)
        predictions = [posterior.predict(new) for posterior in found]
        for posterior, prediction in zip(found[1:], predictions[1:], strict=True):
            close(
                posterior.approximation.covariance.precision(), found[0].approximation.covariance.precision()
            )
            close(prediction.mean, predictions[0].mean)
            close(prediction.std, predictions[0].std)


def test_sampled_and_reduced_curvatures_are_the_same_in_both_systems():
    """The targets that a sampled Fisher draws come from the seed, not from a system."""
    x, y, mode, _ = network_mode()
    for settings in ({"fisher": "sampled", "samples": 3}, {"structure": "kron", "sharing": "reduce"}):
        a, b = (
            fit(small_network, x, y, ppl, start=mode, optimise=False, **settings).approximation.covariance
            for ppl in PPLS
        )
        close(a.precision(), b.precision())


# --- refused before the work begins ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"structure": "fulll"}, UnknownNameError, "did you mean 'full'"),
        ({"structure": "kfac"}, UnknownNameError, "kron"),
        ({"curvature": "gnn"}, UnknownNameError, "did you mean 'ggn'"),
        ({"fisher": "exakt"}, UnknownNameError, "did you mean 'exact'"),
        ({"sharing": "reduced"}, UnknownNameError, "did you mean 'reduce'"),
        ({"noise": "gausian"}, UnknownNameError, "did you mean 'gaussian'"),
        ({"tune": "layers"}, UnknownNameError, "did you mean 'layer'"),
        ({"objective": "evidense"}, UnknownNameError, "did you mean 'evidence'"),
        ({"search": "fixed-point"}, UnknownNameError, "did you mean 'fixed_point'"),
        ({"engine": "guides"}, UnknownNameError, "did you mean 'guide'"),
        ({"repair": "clipped"}, UnknownNameError, "did you mean 'clip'"),
        ({"prior_approximation": "average"}, UnknownNameError, "mean"),
        ({"weights": "last-layer"}, UnknownNameError, "did you mean 'last_layer'"),
        ({"struct": "full"}, UnknownNameError, "did you mean 'structure'"),
        ({"weights": "largest_variance"}, InputError, "subnetwork"),
        ({"weights": "largest_magnitude", "subnetwork": 0}, InputError, "subnetwork"),
        ({"weights": "largest_magnitude", "subnetwork": 2.5}, InputError, "subnetwork"),
        ({"subnetwork": 5}, InputError, "largest_variance"),
        ({"weights": "last_layer", "subnetwork": 5}, InputError, "largest_variance"),
        ({"structure": "lowrank"}, InputError, "rank"),
        ({"structure": "lowrank", "rank": 0}, InputError, "rank"),
        ({"rank": 3}, InputError, "structure='lowrank'"),
        ({"samples": 0}, InputError, "samples"),
        ({"validation": 0.0}, InputError, "validation"),
        ({"validation": 1.0}, InputError, "validation"),
        ({"optimise": False}, InputError, "start="),
        ({"restarts": 0}, InputError, "restarts"),
        ({"restarts": 2.0}, InputError, "restarts"),
        ({"restarts": 2, "start": {}}, InputError, "start=None"),
        ({"steps": 0}, InputError, "steps"),
        ({"learning_rate": 0.0}, InputError, "learning_rate"),
        ({"tolerance": -1.0}, InputError, "tolerance"),
        ({"structure": "kron", "tune": "weight"}, UnsupportedError, "one precision for each tensor"),
        ({"curvature": "hessian", "noise": "evidence"}, UnsupportedError, "in proportion to the noise"),
        ({"tune": "global", "marginal": ["s"]}, UnsupportedError, "one search"),
        ({"noise": "evidence", "marginal": ["s"]}, UnsupportedError, "one search"),
        ({"objective": "validation"}, UnsupportedError, "prior precisions"),
        (
            {"objective": "validation", "tune": "global", "noise": "evidence"},
            UnsupportedError,
            "prior precisions",
        ),
        ({"objective": "validation", "tune": "weight"}, UnsupportedError, "few factors"),
        ({"during_training": True}, UnsupportedError, "something to tune"),
        (
            {"during_training": True, "tune": "global", "optimise": False, "start": {}},
            UnsupportedError,
            "optimise=True",
        ),
        ({"engine": "guide", "structure": "diag"}, UnsupportedError, "engine='curvature'"),
        ({"engine": "guide", "weights": "last_layer"}, UnsupportedError, "engine='curvature'"),
        ({"engine": "guide", "tune": "global"}, UnsupportedError, "engine='curvature'"),
        ({"engine": "guide", "noise": "mode"}, UnsupportedError, "engine='curvature'"),
        ({"engine": "guide", "marginal": ["s"]}, UnsupportedError, "engine='curvature'"),
        ({"engine": "guide", "predictive": "linearised"}, UnsupportedError, "engine='curvature'"),
        ({"predictive": "linearized"}, UnknownNameError, "did you mean 'linearised'"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_where_they_are_written(settings, error, says):
    with pytest.raises(error, match=says):
        bnn.Laplace(**settings)


def scaled(x, y=None):
    scale = bnn.sample("scale", dist.LogNormal(0.0, 1.0))
    weight = bnn.sample("output.weight", dist.Normal(0.0, scale).expand((x.shape[1], 1)).to_event())
    bnn.observe(y, bnn.linear("output", x, weight), likelihoods.Gaussian(0.5))


@pytest.mark.parametrize(
    ("model", "settings", "error", "says"),
    [
        (small_network, {"weights": ["hidden7"]}, UnknownNameError, "did you mean 'hidden0'"),
        (small_network, {"weights": ["output.wieght"]}, UnknownNameError, "did you mean 'output.weight'"),
        (small_network, {"marginal": ["noize"]}, UnknownNameError, "did you mean 'noise'"),
    ],
)
def test_names_that_a_model_does_not_have_are_refused_before_its_mode_is_sought(
    ppl, model, settings, error, says, monkeypatch
):
    monkeypatch.setattr(
        "ppl_bnn.inference.laplace.fit.find_mode", lambda *_, **__: pytest.fail("the mode was sought")
    )
    x, y = regression_data(rows=10)
    with pytest.raises(error, match=says):
        fit(model, x, y, ppl, **settings)


def heteroscedastic(x, y=None):
    f = bnn.mlp(x, [2], prior=priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.HeteroscedasticGaussian())


def computed_noise(x, y=None):
    root = bnn.sample("root", dist.HalfNormal(1.0))
    f = bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Gaussian(0.1 + root**2))


def only_noise(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Point()), likelihoods.Gaussian(noise))


def two_tailed(x, y=None):
    f = bnn.mlp(x, [1], prior=priors.StudentT(5.0, 0.0, 1.0))
    bnn.observe(y, f, likelihoods.Gaussian(0.5))


@pytest.mark.parametrize(
    ("model", "settings", "error", "says"),
    [
        (heteroscedastic, {"noise": "evidence"}, UnsupportedError, r"likelihoods\.Gaussian\(noise\)"),
        (small_classifier, {"noise": "evidence"}, UnsupportedError, r"likelihoods\.Gaussian\(noise\)"),
        (computed_noise, {"noise": "evidence"}, UnsupportedError, "computed"),
        (scaled, {"tune": "global"}, UnsupportedError, r"marginal=\['scale'\]"),
        (two_tailed, {"tune": "tensor"}, UnsupportedError, "Normal prior"),
        (only_noise, {"noise": "mode"}, UnsupportedError, "at least one weight"),
        (small_network, {"predictive": "probit"}, UnsupportedError, "'linearised', 'sampled' for Gaussian"),
        (small_network, {"structure": "lowrank", "rank": 99}, InputError, "at most the 13 weights"),
        (
            small_network,
            {"weights": "largest_magnitude", "subnetwork": 99},
            InputError,
            "at most the 13 weights",
        ),
        (
            small_network,
            {"tune": "global", "objective": "validation", "validation": 0.01},
            InputError,
            "share",
        ),
    ],
)
def test_what_a_model_has_no_place_for_is_refused(ppl, model, settings, error, says, monkeypatch):
    monkeypatch.setattr(
        "ppl_bnn.inference.laplace.fit.find_mode", lambda *_, **__: pytest.fail("the mode was sought")
    )
    rng = np.random.default_rng(2)
    x = rng.normal(size=(12, 2))
    y = np.arange(12) % 3 if model is small_classifier else rng.normal(size=12)
    with pytest.raises(error, match=says):
        fit(model, x, y, ppl, steps=100, **settings)
    found = bnn.Laplace(ppl=ppl, steps=100, **settings).refusal(model, x, y)
    assert isinstance(found, error)


# --- linear models in closed form -----------------------------------------------------------------


def unknown_noise(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0)), likelihoods.Gaussian(noise))


def known_noise(x, y=None):
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0)), likelihoods.Gaussian(0.9))


def log_marginal(design, y, noise, variances=1.0):
    """log N(y; 0, noise^2 I + X diag(variances) X')."""
    total = noise**2 * np.eye(len(y)) + (design * variances) @ design.T
    return float(stats.multivariate_normal(np.zeros(len(y)), total).logpdf(y))


def argmax(function, start):
    """SciPy's maximum of a smooth function of log hyper-parameters."""
    found = optimize.minimize(lambda z: -function(z), start, method="BFGS", options={"gtol": 1e-7})
    refined = optimize.minimize(
        lambda z: -function(z), found.x, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13}
    )
    return refined.x, -refined.fun


@in_both_systems(
    "model,search",
    itertools.product([unknown_noise, known_noise], ["fixed_point", "maximise"]),
    once=(unknown_noise, "fixed_point"),
)
def test_noise_by_the_evidence_is_the_optimum_of_the_closed_form(ppl, model, search):
    """A prior on the noise has no say; nor has the value that was written down."""
    problem = Conjugate.make()
    log_noise, best = argmax(lambda z: log_marginal(problem.design, problem.y, np.exp(z[0])), [0.0])
    settings = {"noise": "evidence", "during_training": True, "search": search, "steps": 300}
    posterior = fit(model, problem.x, problem.y, ppl, **settings)
    noise = posterior.info.figures["noise"]
    assert np.isclose(np.log(noise), log_noise[0], atol=1e-5)
    assert np.isclose(posterior.log_evidence, best, rtol=1e-9)
    tuned = Conjugate(problem.x, problem.y, noise)
    close(posterior.approximation.covariance.covariance(), tuned.covariance)
    new = np.random.default_rng(0).normal(size=(5, 3))
    mean, variance = tuned.predictive(new)
    prediction = posterior.predict(new)
    assert np.allclose(prediction.mean, mean, rtol=1e-5)
    assert np.allclose(prediction.epistemic, variance, rtol=1e-6)
    assert np.allclose(prediction.aleatoric, noise**2, rtol=1e-9)
    if model is known_noise:
        assert np.isclose(posterior.approximation.noise, noise)
    else:
        assert np.allclose(posterior.draws["noise"], noise)


def joint_mode(problem):
    """log noise at the mode of the joint density in log noise, under HalfNormal(1)."""

    def profile(z):
        given = Conjugate(problem.x, problem.y, float(np.exp(z[0])))
        fit = stats.norm(given.design @ given.mean, given.noise).logpdf(problem.y).sum()
        return fit + stats.norm.logpdf(given.mean).sum() + stats.halfnorm.logpdf(given.noise) + z[0]

    return float(np.exp(argmax(profile, [0.0])[0][0]))


def test_noise_at_its_mode_or_in_the_gaussian(ppl):
    problem = Conjugate.make()
    noise = joint_mode(problem)
    given = Conjugate(problem.x, problem.y, noise)
    start = {"noise": np.array(noise), "output.weight": given.mean[:-1, None], "output.bias": given.mean[-1:]}
    held, within = (
        fit(unknown_noise, problem.x, problem.y, ppl, noise=choice, start=start, optimise=False)
        for choice in ("mode", "gaussian")
    )
    assert not held.info.warnings
    close(held.approximation.covariance.covariance(), given.covariance)
    assert np.isclose(held.log_evidence, log_marginal(problem.design, problem.y, noise), rtol=1e-8)
    assert np.allclose(held.draws["noise"], noise)
    # The Fisher information of log noise is 2 for each row, and that of the half-normal adds 2 noise^2.
    wanted = np.zeros((5, 5))
    wanted[0, 0], wanted[1:, 1:] = 2.0 * len(problem.y) + 2.0 * noise**2, given.precision
    close(within.approximation.covariance.precision(), wanted)
    assert np.ptp(within.draws["noise"]) > 0
    joint = (
        stats.norm(given.design @ given.mean, noise).logpdf(problem.y).sum()
        + stats.norm.logpdf(given.mean).sum()
        + stats.halfnorm.logpdf(noise)
        + np.log(noise)
    )
    volume = 0.5 * (5 * np.log(2.0 * np.pi) - np.linalg.slogdet(wanted)[1])
    assert np.isclose(within.log_evidence, joint + volume, rtol=1e-7)


# Two linear layers that add up: four tensors with closed-form evidence for every grouping of their precisions.
GROUPS = {
    "global": np.zeros(5, int),
    "layer": np.array([0, 0, 1, 1, 1]),
    "tensor": np.array([0, 1, 2, 2, 3]),
    "weight": np.arange(5),
}
NAMES = {
    "global": ["all"],
    "layer": ["first", "second"],
    "tensor": ["first.weight", "first.bias", "second.weight", "second.bias"],
    "weight": ["first.weight", "first.bias", "second.weight[0]", "second.weight[1]", "second.bias"],
}
SCALES = np.array([1.0, 1.0, 0.5, 0.5, 0.5])
NOISE = 0.4


def added(x, y=None):
    f = bnn.dense("first", x[:, :1], 1, priors.Normal(0.0, 1.0))
    f = f + bnn.dense("second", x[:, 1:3], 1, priors.Normal(0.0, 0.5)) * x[:, 3:]
    bnn.observe(y, f, likelihoods.Gaussian(NOISE))


@cache
def added_data():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(35, 4))
    design = np.column_stack([x[:, 0], np.ones(35), x[:, 1] * x[:, 3], x[:, 2] * x[:, 3], x[:, 3]])
    truth = np.array([2.0, -1.5, 1.2, -0.8, 1.0])
    return x, design @ truth + NOISE * rng.normal(size=35), design


def structured(data, structure):
    if structure == "diag":
        return np.diag(np.diag(data))
    if structure == "kron":
        x, inside = added_data()[0], GROUPS["tensor"][:, None] == GROUPS["tensor"]
        data = np.where(inside, data, 0.0)
        # Rows weigh by x_3^2 in the second layer; factors take the mean of the products of its inputs by itself.
        inputs = x[:, 1:3]
        data[2:4, 2:4] = inputs.T @ inputs / len(x) * data[4, 4]
    return data


def laplace_evidence(factors, structure="full", noise=NOISE):
    """log p(D, mode) + P/2 log 2 pi - log det(A) / 2, with the mode under these factors: exact where A is."""
    _, y, design = added_data()
    prior = factors / SCALES**2
    data = design.T @ design / noise**2
    mode = np.linalg.solve(data + np.diag(prior), design.T @ y / noise**2)
    joint = stats.norm(design @ mode, noise).logpdf(y).sum()
    joint += stats.norm(0.0, 1.0 / np.sqrt(prior)).logpdf(mode).sum()
    precision = structured(data, structure) + np.diag(prior)
    return joint + 0.5 * (5 * np.log(2.0 * np.pi) - np.linalg.slogdet(precision)[1]), mode, precision


@cache
def tuned_by_scipy(tune, structure):
    groups = GROUPS[tune]
    return argmax(
        lambda z: laplace_evidence(np.exp(z)[groups], structure)[0], np.zeros(int(groups.max()) + 1)
    )


def test_the_brute_force_is_the_closed_form():
    _, y, design = added_data()
    factors = np.array([0.3, 2.0, 0.7, 1.1, 1.4])
    exact = log_marginal(design, y, NOISE, SCALES**2 / factors)
    assert np.isclose(laplace_evidence(factors)[0], exact, rtol=1e-12)


@pytest.mark.parametrize(
    ("search", "tune", "structure"),
    [
        *itertools.product(["fixed_point"], GROUPS, ["full"]),
        *itertools.product(["fixed_point"], ("tensor", "weight"), ["diag"]),
        ("fixed_point", "tensor", "kron"),
        # The other search has the same evidence: each structure once.
        ("maximise", "layer", "full"),
        ("maximise", "weight", "diag"),
        ("maximise", "tensor", "kron"),
    ],
)
def test_tuned_precisions_are_the_optimum_of_the_closed_form(search, tune, structure):
    x, y, design = added_data()
    z, best = tuned_by_scipy(tune, structure)
    settings = {"tune": tune, "structure": structure, "search": search, "during_training": True}
    posterior = fit(added, x, y, "numpyro", steps=200, **settings)
    figures = posterior.info.figures
    ours = np.array([figures[f"prior_factor/{name}"] for name in NAMES[tune]])
    # The alternation of mode and factors stops at changes of 1e-4 in log factors.
    assert np.allclose(np.log(ours), z, atol=3e-4)
    assert np.isclose(posterior.log_evidence, best, rtol=1e-7)
    _, mode, precision = laplace_evidence(ours[GROUPS[tune]], structure)
    close(posterior.approximation.covariance.precision(), precision)
    assert np.allclose(flat_centre(posterior), mode, rtol=1e-5)
    data = structured(design.T @ design / NOISE**2, structure)
    gamma = np.trace(np.linalg.solve(precision, data))
    assert np.isclose(figures["effective_parameters"], gamma, rtol=1e-8)


# The finest groups. The test of optima above has the coarser ones, too.
@in_both_systems("tune", ["tensor", "weight"], once="tensor")
def test_a_tuned_posterior_speaks_of_the_tuned_program(ppl, tune, tmp_path):
    """Densities, draws, diagnosis and storage: all under the prior N(0, scale^2 / factor) and the tuned noise."""
    x, y, design = added_data()
    posterior = fit(added, x, y, ppl, tune=tune, noise="evidence", during_training=True, steps=200)
    figures, approximation = posterior.info.figures, posterior.approximation
    factors = np.array([figures[f"prior_factor/{name}"] for name in NAMES[tune]])[GROUPS[tune]]
    noise = figures["noise"]
    assert abs(noise / NOISE - 1.0) > 1e-3
    assert np.abs(np.log(factors)).min() > 1e-3
    flat = np.concatenate([v[0].reshape(1000, -1) for v in posterior.unconstrained_draws.values()], axis=1)
    prior = stats.norm(0.0, SCALES / np.sqrt(factors)).logpdf(flat).sum(1)
    assert np.allclose(posterior.log_prior(), prior, rtol=1e-10)
    joint = prior + stats.norm(flat @ design.T, noise).logpdf(y).sum(1)
    assert np.allclose(posterior.log_joint(), joint, rtol=1e-10)
    centre = {name: value[None] for name, value in approximation.centre().items()}
    evidence, mode, precision = laplace_evidence(factors, noise=noise)
    wanted = stats.norm(design @ mode, noise).logpdf(y).sum()
    wanted += stats.norm(0.0, SCALES / np.sqrt(factors)).logpdf(mode).sum()
    assert np.allclose(posterior.log_joint(centre), wanted, rtol=1e-8)
    assert np.isclose(posterior.log_evidence, evidence, rtol=1e-8)
    # A Gaussian posterior: every importance weight is the same, so that they tell the programs apart.
    weights = posterior.log_joint() - posterior.log_q().ravel()
    assert np.allclose(weights, evidence, atol=1e-6)
    close(approximation.covariance.precision(), precision)
    assert str(bnn.diagnose(posterior))
    posterior.save(tmp_path / "tuned")
    again = bnn.load(tmp_path / "tuned", added)
    assert again.approximation.factors.keys() == approximation.factors.keys()
    for name, factor in approximation.factors.items():
        assert np.array_equal(again.approximation.factors[name], factor)
    assert again.approximation.noise == approximation.noise == noise
    assert np.array_equal(again.predict(x).std, posterior.predict(x).std)
    assert np.array_equal(again.log_joint(), posterior.log_joint())


def test_tuning_after_training_is_the_optimum_at_that_mode(ppl):
    """Without during_training the mode stays; that it is left behind is measured in nats and said."""
    x, y, design = added_data()
    _, mode, _ = laplace_evidence(np.ones(5))

    def at_mode(z):
        prior = np.exp(z)[GROUPS["tensor"]] / SCALES**2
        joint = stats.norm(0.0, 1.0 / np.sqrt(prior)).logpdf(mode).sum()
        return joint - 0.5 * np.linalg.slogdet(design.T @ design / NOISE**2 + np.diag(prior))[1]

    z, _ = argmax(at_mode, np.zeros(4))
    posterior = fit(added, x, y, ppl, tune="tensor", steps=200)
    ours = [posterior.info.figures[f"prior_factor/{name}"] for name in NAMES["tensor"]]
    assert np.allclose(np.log(ours), z, atol=1e-5)
    assert np.allclose(flat_centre(posterior), mode, rtol=1e-7)
    prior = np.exp(z)[GROUPS["tensor"]] / SCALES**2
    gradient = design.T @ (y - design @ mode) / NOISE**2 - prior * mode
    precision = design.T @ design / NOISE**2 + np.diag(prior)
    gain = 0.5 * gradient @ np.linalg.solve(precision, gradient)
    said = any("a Newton step would gain" in sentence for sentence in posterior.info.warnings)
    assert said == (gain > 1.0)
    assert np.isclose(posterior.info.figures["gradient_norm"], np.linalg.norm(gradient), rtol=1e-4)


@PYRO_ALONE
def test_a_mode_that_tuning_has_left_behind_is_reported(ppl):
    """A prior far too wide for ten weights that are nearly zero: the evidence wants another mode altogether."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 10))
    y = 0.05 * x[:, 0] + 0.3 * rng.normal(size=12)

    def wide(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 30.0)), likelihoods.Gaussian(0.3))

    posterior = fit(wide, x, y, ppl, tune="global", steps=300)
    assert any("a Newton step would gain" in sentence for sentence in posterior.info.warnings)
    again = fit(wide, x, y, ppl, tune="global", during_training=True, steps=300)
    assert not any("a Newton step would gain" in sentence for sentence in again.info.warnings)


@PYRO_ALONE
def test_validation_chooses_the_factor_with_the_best_score_on_held_out_rows(ppl):
    """Divided by the seed: mode and curvature from one part of the rows, by hand, the mean log density of the other."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 30))
    y = x[:, 0] + 0.5 * rng.normal(size=60)

    def loose(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 5.0), bias=False), likelihoods.Gaussian(0.5))

    posterior = fit(loose, x, y, ppl, tune="global", objective="validation", validation=0.3, steps=300)
    factor = posterior.info.figures["prior_factor/all"]
    order = np.random.default_rng(site_seed("validation", 0)).permutation(60)
    out, kept = order[:18], order[18:]
    data = x[kept].T @ x[kept] / 0.25
    mean = x[out] @ np.linalg.solve(data + np.eye(30) / 25.0, x[kept].T @ y[kept] / 0.25)

    def score(factor):
        covariance = np.linalg.inv(data + factor / 25.0 * np.eye(30))
        variance = np.einsum("ni,ij,nj->n", x[out], covariance, x[out]) + 0.25
        return stats.norm(mean, np.sqrt(variance)).logpdf(y[out]).mean()

    assert score(factor) >= max(score(f) for f in np.geomspace(1e-4, 1e4, 400)) - 1e-5
    assert abs(np.log(factor)) > 0.1
    close(posterior.approximation.covariance.precision(), x.T @ x / 0.25 + factor / 25.0 * np.eye(30))
    # A mode that was given has seen all rows: it is kept, and the score comes from one that has not.
    mode = {"output.weight": np.linalg.solve(x.T @ x / 0.25 + np.eye(30) / 25.0, x.T @ y / 0.25)[:, None]}
    settings = {"tune": "global", "objective": "validation", "validation": 0.3, "steps": 300}
    given = fit(loose, x, y, ppl, start=mode, optimise=False, **settings)
    assert np.isclose(given.info.figures["prior_factor/all"], factor, rtol=1e-3)
    assert np.array_equal(flat_centre(given), mode["output.weight"][:, 0])


@PYRO_ALONE
def test_noise_cannot_be_tuned_by_more_effective_parameters_than_rows(ppl):
    """A diagonal of 40 columns over 8 rows counts nearly 40 parameters: nothing is left of the data for the noise."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 40)), rng.normal(size=8)

    def tight(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0)), likelihoods.Gaussian(0.1))

    with pytest.raises(CurvatureError, match="fewer effective parameters than the 8 targets"):
        fit(tight, x, y, ppl, structure="diag", noise="evidence", steps=200)
    posterior = fit(tight, x, y, ppl, noise="evidence", steps=200)
    assert posterior.info.figures["effective_parameters"] < 8
    assert np.isfinite(posterior.predict(x).std).all()


# --- which weights --------------------------------------------------------------------------------


def body_held(x, y=None):
    """`small_network` with a hidden layer that has no prior."""
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    hidden = bnn.ops.tanh(bnn.dense("hidden0", x, 3, priors.Point()))
    f = bnn.dense("output", hidden, 1, priors.Normal(0.0, "fan_in"))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


@some_in_numpyro("structure", ["full", "kron", "diag"], "kron")
def test_the_last_layer_alone_is_the_model_whose_body_is_a_point(ppl, structure):
    x, y, mode, _ = network_mode()
    start = {name: value[0, 0] for name, value in mode.draws.items()}
    last = fit(
        small_network, x, y, ppl, structure=structure, weights="last_layer", start=start, optimise=False
    )
    point = fit(body_held, x, y, ppl, structure=structure, start=start, optimise=False)
    close(last.approximation.covariance.covariance(), point.approximation.covariance.covariance())
    new = np.random.default_rng(0).normal(size=(5, 2))
    close(last.predict(new).std, point.predict(new).std)
    close(last.joint(new).covariance, point.joint(new).covariance)
    assert np.isclose(last.log_evidence, point.log_evidence, rtol=1e-9)
    for name in ("hidden0.weight", "hidden0.bias"):
        assert np.array_equal(last.draws[name][0, 0], last.draws[name][0, -1])
        assert np.allclose(last.draws[name][0, 0], start[name])


@PYRO_FIRST
def test_layers_and_sites_are_named_alike(ppl):
    x, y, mode, _ = network_mode()
    by_layer, by_site, last = (
        fit(small_network, x, y, ppl, weights=weights, start=mode, optimise=False).approximation
        for weights in (["output"], ["output.bias", "output.weight"], "last_layer")
    )
    assert np.array_equal(by_layer.positions, by_site.positions)
    assert np.array_equal(by_layer.positions, last.positions)
    with pytest.raises(UnsupportedError, match=r"weights='all'"):
        by_layer.as_prior()


# --- a network trained elsewhere ------------------------------------------------------------------


def elsewhere(form):
    """Weights (2, 4), (4,), (4, 1), (1,), as a module of torch or as a nested dict of Flax; and what they compute."""
    import torch

    rng = np.random.default_rng(6)
    w1, b1, w2, b2 = (rng.normal(size=shape) for shape in ((2, 4), (4,), (4, 1), (1,)))

    def function(x):
        return (np.tanh(x @ w1 + b1) @ w2 + b2)[:, 0]

    if form == "flax":
        layers = {"Dense_0": {"kernel": w1, "bias": b1}, "Dense_1": {"kernel": w2, "bias": b2}}
        return {"params": layers}, function
    module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    with torch.no_grad():
        for layer, weight, bias in ((module[0], w1, b1), (module[2], w2, b2)):
            layer.weight.copy_(torch.tensor(weight.T))
            layer.bias.copy_(torch.tensor(bias))
    return module, function


def four_units(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    f = bnn.mlp(x, [4, 1], activation="tanh", prior=priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


@pytest.mark.parametrize(
    ("form", "choice"), [("torch", "gaussian"), ("flax", "mode"), ("torch", "evidence"), ("flax", "gaussian")]
)
@PYRO_FIRST
def test_a_network_trained_elsewhere_gets_a_spread_and_keeps_its_mean(ppl, form, choice):
    """The noise, which a network does not have, is that of the joint mode, or of the evidence, given the weights."""
    start, function = elsewhere(form)
    rng = np.random.default_rng(7)
    x = rng.normal(size=(25, 2))
    y = function(x) + 0.3 * rng.normal(size=25)
    posterior = fit(four_units, x, y, ppl, start=start, optimise=False, noise=choice)
    new = rng.normal(size=(6, 2))
    assert np.allclose(posterior.predict(new).mean, function(new), rtol=1e-9, atol=1e-10)
    assert np.all(posterior.predict(new).epistemic > 0)
    misfit = np.sum((y - function(x)) ** 2)

    def joint(z):
        return -0.5 * misfit / np.exp(2 * z[0]) - 25 * z[0] - 0.5 * np.exp(2 * z[0]) + z[0]

    noise = float(np.exp(posterior.approximation.centre()["noise"]))
    if choice == "evidence":
        gamma = posterior.info.figures["effective_parameters"]
        assert np.isclose(noise**2, misfit / (25 - gamma), rtol=1e-6)
    else:
        assert np.isclose(np.log(noise), argmax(joint, [-1.0])[0][0], atol=1e-6)


@PYRO_ALONE
def test_a_mode_that_is_none_is_reported(ppl):
    """Weights that have nothing to do with the targets, taken as they are."""
    start, _ = elsewhere("torch")
    x, y = regression_data(rows=25)
    posterior = fit(four_units, x, 5.0 * y, ppl, start=start, optimise=False)
    assert any("not a mode" in sentence for sentence in posterior.info.warnings)
    trained = fit(four_units, x, 5.0 * y, ppl, start=start, steps=300)
    assert not any("not a mode" in sentence for sentence in trained.info.warnings)


# --- predictions ----------------------------------------------------------------------------------


def normal(x, y=None):
    bnn.observe(y, bnn.mlp(x, [3, 1], activation="tanh"), likelihoods.Gaussian(0.4))


def two_normals(x, y=None):
    noise = bnn.sample("noise", dist.LogNormal(0.0, 0.5).expand((2,)).to_event())
    bnn.observe(y, bnn.mlp(x, [3, 2], activation="tanh"), likelihoods.Gaussian(noise))


def uneven(x, y=None):
    bnn.observe(y, bnn.mlp(x, [3, 2], activation="tanh"), likelihoods.HeteroscedasticGaussian())


def yes_or_no(x, y=None):
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0)), likelihoods.Bernoulli())


CLOSED = ("linearised", "probit", "bridge", "bridge_norm")
KINDS_OF = {
    normal: ("linearised", "sampled"),
    small_network: ("linearised", "sampled"),
    two_normals: ("linearised", "sampled"),
    uneven: ("linearised", "sampled"),
    yes_or_no: (*CLOSED, "sampled"),
    small_classifier: ("linearised", "probit", "probit_covariance", "bridge", "bridge_norm", "sampled"),
}


def targets_for(model, x, rng):
    f = np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=len(x))
    if model is two_normals:
        return np.column_stack([f, x[:, 1] + 0.3 * rng.normal(size=len(x))])
    if model is yes_or_no:
        return (f > 0).astype(float)
    return np.digitize(f, [-0.4, 0.4]) if model is small_classifier else f


@some_in_numpyro("model", KINDS_OF, small_network, small_classifier)
def test_every_likelihood_predicts_in_every_kind_that_it_has(ppl, model):
    rng = np.random.default_rng(1)
    x, new = rng.normal(size=(30, 2)), rng.normal(size=(6, 2))
    posterior = fit(model, x, targets_for(model, x, rng), ppl, steps=300)
    assert posterior.approximation.kinds == KINDS_OF[model]
    for kind in KINDS_OF[model]:
        prediction = posterior.predict(new, kind=kind)
        again = posterior.predict(new, kind=kind)
        for name, values in prediction.parameters.items():
            assert np.isfinite(values).all(), (kind, name)
            assert np.array_equal(values, again.parameters[name])
        if posterior.task == "classification":
            assert np.allclose(prediction.probabilities.sum(1), 1.0)
        if kind in ("linearised", "sampled"):
            assert posterior.predict(new, kind=kind, draws=7).draws == 7
        else:
            with pytest.raises(InputError, match="draws=None"):
                posterior.predict(new, kind=kind, draws=7)
            with pytest.raises(UnsupportedError, match="expected linearised or sampled, with draws"):
                posterior.predictor(new, kind=kind)
    wrong = "probit" if posterior.task == "regression" else "bridges"
    with pytest.raises(UnknownNameError, match="kind of prediction"):
        posterior.predict(new, kind=wrong)


@some_in_numpyro("kind", ["sampled", "bridge"], "sampled")
def test_the_predictive_of_a_method_is_what_predict_gives_unasked(ppl, kind, tmp_path):
    rng = np.random.default_rng(1)
    x, new = rng.normal(size=(30, 2)), rng.normal(size=(6, 2))
    y = targets_for(small_classifier, x, rng)
    plain = fit(small_classifier, x, y, ppl, steps=300)
    chosen = fit(small_classifier, x, y, ppl, steps=300, predictive=kind)
    assert chosen.approximation.kinds[0] == kind
    assert sorted(chosen.approximation.kinds) == sorted(plain.approximation.kinds)
    wanted = plain.predict(new, kind=kind).probabilities
    assert np.array_equal(chosen.predict(new).probabilities, wanted)
    assert not np.array_equal(wanted, plain.predict(new).probabilities)
    chosen.save(tmp_path / "kept")
    assert np.array_equal(bnn.load(tmp_path / "kept", small_classifier).predict(new).probabilities, wanted)


def test_logistic_regression_against_its_own_formulas(ppl):
    """The curvature X' p (1 - p) X + I, the integral over the logit by SciPy, and the probit formula."""
    from scipy import integrate, special

    rng = np.random.default_rng(2)
    x, new = rng.normal(size=(15, 2)), 3.0 * rng.normal(size=(4, 2))
    y = (x[:, 0] + 0.5 * rng.normal(size=15) > 0).astype(float)
    posterior = fit(yes_or_no, x, y, ppl, steps=300)
    design, points = (np.column_stack([a, np.ones(len(a))]) for a in (x, new))
    mode = flat_centre(posterior)
    p = special.expit(design @ mode)
    assert np.abs(design.T @ (y - p) - mode).max() < 1e-6
    precision = (design.T * (p * (1.0 - p))) @ design + np.eye(3)
    close(posterior.approximation.covariance.precision(), precision)
    mean = points @ mode
    variance = np.einsum("ni,ij,nj->n", points, np.linalg.inv(precision), points)
    probit = special.expit(mean / np.sqrt(1.0 + np.pi * variance / 8.0))
    assert np.allclose(posterior.predict(new, kind="probit").mean, probit, rtol=1e-8)
    for n in range(len(new)):
        density = stats.norm(mean[n], np.sqrt(variance[n]))
        wanted, _ = integrate.quad(
            lambda f, density=density: special.expit(f) * density.pdf(f),
            mean[n] - 40,
            mean[n] + 40,
            epsabs=1e-12,
        )
        assert np.isclose(posterior.predict(new).mean[n], wanted, atol=1e-8)


@some_in_numpyro("structure", STRUCTURES, "kron")
def test_the_joint_prediction_is_that_of_the_dense_jacobian(ppl, structure):
    x, y, mode, _ = network_mode()
    settings = {"rank": RANK} if structure == "lowrank" else {}
    posterior = fit(small_network, x, y, ppl, structure=structure, start=mode, optimise=False, **settings)
    jacobian = by_hand()["jacobian"][:, 0]
    covariance = np.linalg.inv(precision_by_hand("ggn", structure, "all"))
    wanted = jacobian @ covariance @ jacobian.T
    joint = posterior.joint(x)
    close(joint.function_covariance, wanted)
    close(joint.mean, posterior.predict(x).mean)
    # E[noise^2] with log noise ~ N(log mode, variance).
    variance = covariance[0, 0]
    noise = np.exp(2.0 * posterior.approximation.centre()["noise"] + 2.0 * variance)
    if structure != "lowrank":
        close(joint.covariance, wanted + noise * np.eye(len(x)))
    assert np.allclose(np.diag(joint.covariance), posterior.predict(x).std ** 2, rtol=1e-7)
    f = posterior.predictor(x[:5], draws=20_000)[0, :, :, 0]
    scale = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))[:5, :5]
    assert np.all(np.abs(np.cov(f.T) - wanted[:5, :5]) < 6 * scale * np.sqrt(2 / 20_000))


@pytest.mark.parametrize(
    ("model", "structure"),
    [
        # Chunks of the other curvatures are in test_curvature, and those of low ranks in test_products.
        (small_network, "full"),
        (small_classifier, "kron"),
    ],
)
@PYRO_FIRST
def test_chunks_change_nothing(ppl, model, structure):
    rng = np.random.default_rng(1)
    x, new = rng.normal(size=(150, 2)), rng.normal(size=(170, 2))
    y = targets_for(model, x, rng)
    settings = {"structure": structure, "rank": RANK if structure == "lowrank" else None}
    mode = network_mode()[2] if model is small_network else classifier_mode()
    whole, parts = (
        fit(model, x, y, ppl, start=mode, optimise=False, memory=memory, **settings)
        for memory in (2**28, 2**16)
    )
    close(parts.approximation.covariance.precision(), whole.approximation.covariance.precision(), 1e-9)
    for kind in whole.approximation.kinds:
        a, b = whole.predict(new, kind=kind), whole.predict(new, kind=kind, memory=2**16)
        for name, values in a.parameters.items():
            assert np.allclose(b.parameters[name], values, rtol=1e-9, atol=1e-12), (kind, name)
    close(whole.joint(new, memory=2**16).function_covariance, whole.joint(new).function_covariance, 1e-9)


@cache
def classifier_mode():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(150, 2))
    return bnn.fit(small_classifier, x, targets_for(small_classifier, x, rng), bnn.MAP(steps=300))


FEATURES, CLASSES = 512, 1000


def many_classes(x, y=None):
    f = bnn.dense("output", x, CLASSES, priors.Normal(0.0, "fan_in"), priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Categorical())


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_thousand_classes_fit_in_memory(structure):
    """Half a million weights: their Jacobian at 50 rows would be 200 GB, a dense precision 2 TB.

    The bound is 1 GiB: the 64 MiB of a block (50, 1000, 1000) and the 15 prior draws of 4 MB, several times over.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, FEATURES))
    y = rng.integers(0, CLASSES, 60)
    y[0] = CLASSES - 1
    start = {"output.weight": 0.01 * rng.normal(size=(FEATURES, CLASSES)), "output.bias": np.zeros(CLASSES)}
    tracemalloc.start()
    try:
        posterior = fit(many_classes, x, y, "pyro", structure=structure, start=start, optimise=False)
        prediction = posterior.predict(x[:50], kind="probit")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**30
    assert prediction.probabilities.shape == (50, CLASSES)
    assert np.allclose(prediction.probabilities.sum(1), 1.0)


# --- data that come in parts ----------------------------------------------------------------------


def in_parts(problem, ppl, structures, method):
    """One fit after another, each under the posterior of the last as its prior."""
    model, posterior = problem.model, None
    for rows, structure in zip(
        np.array_split(np.arange(len(problem.y)), len(structures)), structures, strict=True
    ):
        if posterior is not None:
            model = bnn.with_prior(problem.model, posterior)
        posterior = fit(
            model, problem.x[rows], problem.y[rows], ppl, structure=structure, steps=300, **method
        )
    return posterior


def test_three_tasks_in_a_row_are_all_rows_at_once():
    problem = Conjugate.make(rows=42)
    posterior = in_parts(problem, "pyro", ["full"] * 3, {})
    close(posterior.approximation.covariance.covariance(), problem.covariance, 1e-7)
    assert np.allclose(flat_centre(posterior), problem.mean, rtol=1e-6, atol=1e-8)


@PYRO_ALONE
def test_diagonal_parts_have_the_precision_of_all_rows_and_another_mean(ppl):
    """Diagonals add up; the mode is that of a diagonal prior in place of the dense one, in closed form too."""
    problem = Conjugate.make()
    posterior = in_parts(problem, ppl, ["diag", "diag"], {})
    close(posterior.approximation.covariance.precision(), problem.precision_of("mean field"), 1e-7)
    mean, prior = np.zeros(4), np.eye(4)
    for rows in np.array_split(np.arange(40), 2):
        design, y = problem.design[rows], problem.y[rows]
        data = design.T @ design / problem.noise**2
        mean = np.linalg.solve(data + prior, design.T @ y / problem.noise**2 + prior @ mean)
        prior = prior + np.diag(np.diag(data))
    assert np.allclose(flat_centre(posterior), mean, rtol=1e-6, atol=1e-8)
    assert not np.allclose(mean, problem.mean, rtol=1e-3)


@PYRO_ALONE
def test_a_kronecker_part_is_a_prior_of_blocks(ppl):
    """Its second part keeps the blocks between which nothing was known, and adds a dense curvature."""
    problem = Conjugate.make()
    posterior = in_parts(problem, ppl, ["kron", "full"], {})
    first = Conjugate(problem.x[:20], problem.y[:20], problem.noise)
    design = problem.design[20:]
    wanted = first.precision_of("independent sites") + design.T @ design / problem.noise**2
    close(posterior.approximation.covariance.precision(), wanted, 1e-7)
    with pytest.raises((UnsupportedError, CurvatureError), match="diag"):
        in_parts(problem, ppl, ["kron", "kron"], {})


def three_outputs(x, y=None):
    f = bnn.mlp(x, [3], prior=priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Gaussian(np.array([0.3, 0.5, 0.8])))


def divergence(approximate, exact):
    """KL(N(0, B^-1) || N(0, A^-1)) of precisions B and A, by its formula."""
    ratio = np.linalg.solve(approximate, exact)
    return 0.5 * (np.trace(ratio) - len(exact) - np.linalg.slogdet(ratio)[1])


@PYRO_ALONE
def test_kronecker_factors_on_kronecker_factors(ppl):
    """Two parts of the rows, one fit after the other: A = H2 + (H1 + I), dense by hand, and what is kept of it.

    In this linear model K-FAC's blocks are exact for each part, so that A without what is between weight and bias is
    the precision given all rows.
    """
    rng = np.random.default_rng(4)
    x = rng.normal(size=(40, 3)) @ np.array([[1.0, 0.8, 0.0], [0.0, 0.5, 0.3], [0.0, 0.0, 0.2]])
    x[20:] = x[20:, ::-1]
    y = x @ rng.normal(size=(3, 3)) + rng.normal(size=(40, 3)) * np.array([0.3, 0.5, 0.8])
    noise = np.diag(np.array([0.3, 0.5, 0.8]) ** -2.0)
    wanted = np.zeros((12, 12))
    wanted[:9, :9] = np.kron(x.T @ x, noise) + np.eye(9)
    wanted[9:, 9:] = 40 * noise + np.eye(3)
    first = fit(three_outputs, x[:20], y[:20], ppl, structure="kron", steps=200)
    model = bnn.with_prior(three_outputs, first)
    with pytest.raises(UnsupportedError, match=r"Kronecker factors of the prior.*prior_approximation='kron'"):
        fit(model, x[20:], y[20:], ppl, structure="kron", steps=200)
    found = {
        kind: fit(model, x[20:], y[20:], ppl, structure="kron", prior_approximation=kind, steps=200)
        for kind in ("kron", "mean")
    }
    precision = {kind: posterior.approximation.covariance.precision() for kind, posterior in found.items()}
    for kind in found:
        close(precision[kind][9:, 9:], wanted[9:, 9:])
    losses = {kind: divergence(each, wanted) for kind, each in precision.items()}
    assert losses["kron"] < 0.5 * losses["mean"]
    assert any(
        "nearest precision with Kronecker eigenvectors in output.weight" in s
        for s in found["kron"].info.warnings
    )
    assert any("dependence between weights was left out" in s for s in found["mean"].info.warnings)
    gamma = 12 - np.trace(np.linalg.solve(precision["kron"], wanted - second_part(x[20:], noise)))
    assert np.isclose(found["kron"].info.figures["effective_parameters"], gamma, rtol=1e-6)
    # The mode is that under the whole prior: K-FAC being exact here, that of all rows but for weight and bias together.
    third = bnn.with_prior(three_outputs, found["kron"])
    again = fit(third, x[:10], y[:10], ppl, structure="kron", prior_approximation="kron", steps=200)
    assert np.all(
        again.approximation.covariance.variances() < found["kron"].approximation.covariance.variances()
    )


def second_part(x, noise):
    """Curvature of the data, weight and bias apart."""
    total = np.zeros((12, 12))
    total[:9, :9] = np.kron(x.T @ x, noise)
    total[9:, 9:] = len(x) * noise
    return total


@PYRO_ALONE
def test_a_hierarchy_under_kronecker_factors_keeps_what_is_within_a_tensor(ppl):
    """Its scale ties all weights to each other and to itself: what crosses tensors is left out, and that is said."""
    problem = Conjugate.make(rows=20)

    def scaled_weights(x, y=None):
        scale = bnn.sample("scale", dist.InverseGamma(3.0, 2.0))
        weight = bnn.sample("output.weight", dist.Normal(0.0, scale).expand((3, 1)).to_event())
        bnn.observe(y, bnn.linear("output", x, weight), likelihoods.Gaussian(problem.noise))

    settings = {"structure": "kron", "steps": 200}
    with pytest.raises(UnsupportedError, match="prior_approximation='kron'"):
        fit(scaled_weights, problem.x, problem.y, ppl, **settings)
    kept = fit(scaled_weights, problem.x, problem.y, ppl, prior_approximation="kron", **settings)
    whole = fit(scaled_weights, problem.x, problem.y, ppl, steps=200)
    assert any(
        "dependence between tensors under the prior was left out" in sentence
        for sentence in kept.info.warnings
    )
    dense = whole.approximation.covariance.precision()
    dense[0, 1:] = dense[1:, 0] = 0.0
    close(kept.approximation.covariance.precision(), dense, 1e-5)


# --- several starts -------------------------------------------------------------------------------


def starts(ppl, model, x, y, count):
    """Where the starts begin, as values for `start=`."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu", 1):
        xs, ys = chosen.asarray(x), chosen.asarray(y)
        program = Program.of(chosen, model, xs, ys, language=True)
        problem = Problem(program, xs, ys, x, y, 0, "cpu", "float64")
        found = []
        for restart in range(count):
            u = starting_point(problem, None, Silent(), restart)
            w = program.constrain_draws({name: value[None] for name, value in u.items()}, xs, ys)
            found.append({name: np.asarray(value[0]) for name, value in w.items()})
        return found


def log_prior_of_the_body(posterior):
    """Of the hidden layer of `small_network` over two inputs."""
    body = posterior.approximation.centre()
    return (
        stats.norm(0.0, 2**-0.5).logpdf(body["hidden0.weight"]).sum()
        + stats.norm(0.0, 1.0).logpdf(body["hidden0.bias"]).sum()
    )


@pytest.mark.parametrize("weights", [pytest.param("all", marks=pytest.mark.slow), "last_layer"])
@PYRO_ALONE
def test_of_several_starts_the_one_with_the_best_evidence_is_kept(ppl, weights):
    """One fit from each start by hand; with weights that are held, their prior counts too."""
    x = np.random.default_rng(4).normal(size=(24, 2))
    y = np.sign(x[:, 0] * x[:, 1])
    settings = {"weights": weights, "steps": 100}
    several = fit(small_network, x, y, ppl, restarts=3, **settings)
    alone = [fit(small_network, x, y, ppl, start=s, **settings) for s in starts(ppl, small_network, x, y, 3)]
    evidence, joint = (
        np.array([posterior.info.figures[name] for posterior in alone])
        for name in ("log_evidence", "log_joint")
    )
    history = several.info.history
    assert np.allclose(history["restart_log_evidence"], evidence, atol=1e-4)
    assert np.allclose(history["restart_log_joint"], joint, atol=1e-4)
    standing = evidence + (0.0 if weights == "all" else np.array([log_prior_of_the_body(p) for p in alone]))
    best = int(standing.argmax())
    assert np.ptp(standing) > 0.1
    # With the body held, the best evidence is that of a start with a worse prior density there.
    assert weights == "all" or best != evidence.argmax()
    assert np.isclose(several.info.figures["log_evidence"], evidence[best], atol=1e-4)
    assert several.info.gradient_evaluations > sum(p.info.gradient_evaluations for p in alone) * 0.8
    # The first start alone, to the same bits.
    one = fit(small_network, x, y, ppl, **settings)
    assert one.info.figures["log_joint"] == history["restart_log_joint"][0]
    assert "restart_log_joint" not in one.info.history


def test_a_start_that_fails_is_reported_and_all_of_them_are_an_error(monkeypatch):
    x, y = regression_data(rows=20)

    def failing(which):
        def find(*arguments, restart, **settings):
            if restart in which:
                raise DivergenceError("no finite loss")
            return find_mode(*arguments, restart=restart, **settings)

        monkeypatch.setattr("ppl_bnn.inference.laplace.fit.find_mode", find)

    failing({0})
    posterior = fit(small_network, x, y, "pyro", restarts=2, steps=100)
    assert any("1 of 2 starts failed" in sentence for sentence in posterior.info.warnings)
    assert posterior.info.history["restart_log_evidence"][0] == -np.inf
    assert posterior.info.history["restart_log_evidence"][1] == posterior.info.figures["log_evidence"]
    failing({0, 1})
    with pytest.raises(DivergenceError, match="no finite loss"):
        fit(small_network, x, y, "pyro", restarts=2, steps=100)


def test_a_rank_that_leaves_out_what_the_data_see_is_named():
    """Data so exact that two eigenvectors of four are far from the prior, which is all that the others have left."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4))
    y = x @ np.array([1.0, -1.0, 0.5, 2.0])

    def exact(x, y=None):
        f = bnn.dense("output", x, 1, priors.Normal(0.0, 1.0), bias=False)
        bnn.observe(y, f, likelihoods.Gaussian(1e-7))

    start = {"output.weight": np.array([[1.0], [-1.0], [0.5], [2.0]])}
    settings = {"structure": "lowrank", "tune": "tensor", "start": start, "optimise": False}
    with pytest.raises(CurvatureError, match=r"larger rank=, tune='global' or structure='full'"):
        fit(exact, x, y, "pyro", rank=2, **settings)
    assert np.isfinite(fit(exact, x, y, "pyro", rank=4, **settings).log_evidence)
