"""What `bnn.Laplace` offers: every choice against an oracle of its own, or refused by name before the work begins.

Oracles: a network written by hand in torch (Jacobian, gradients, Hessian), Bayesian linear regression in closed form
with its evidence maximised by SciPy, and dense algebra.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from functools import cache

import numpy as np
import pytest
from scipy import optimize, stats

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.errors import BNNError, CurvatureError, InputError, UnknownNameError, UnsupportedError
from tests.problems import Conjugate, regression_data, small_classifier, small_network

PPLS = ("numpyro", "pyro")


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
        return torch.stack([(hidden @ flat[10:13].reshape(3, 1) + flat[13])[:, 0], flat[0].expand(len(rows))], 1)

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
        values, vectors = np.linalg.eigh(data)
        values, vectors = values[-RANK:], vectors[:, -RANK:]
        data = (vectors * np.maximum(values, 0.0)) @ vectors.T
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
    for weight, bias, inputs in (("hidden0.weight", "hidden0.bias", x), ("output.weight", "output.bias", hidden)):
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
        # NumPyro compiles for seconds; which weights a Gaussian is over is decided before a system is asked.
        ppls = PPLS if weights in ("all", WEIGHTS[2]) else ("pyro",)
        found = [fit(small_network, x, y, ppl, start=mode, optimise=False, **settings) for ppl in ppls]
        wanted = precision_by_hand(curvature, structure, weights)
        for posterior in found:
            close(posterior.approximation.covariance.precision(), wanted)
            at = posterior.approximation.positions
            assert np.array_equal(np.arange(14) if at is None else at, positions_by_hand(weights, curvature))
            # What the Gaussian is not over does not move.
            moves = np.concatenate([np.ptp(v[0], axis=0).ravel() for v in posterior.unconstrained_draws.values()])
            assert np.array_equal(np.flatnonzero(moves), positions_by_hand(weights, curvature))
            data = wanted - np.diag(by_hand()["prior"][positions_by_hand(weights, curvature)])
            gamma = np.trace(np.linalg.solve(wanted, data))
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
        ({"steps": 0}, InputError, "steps"),
        ({"learning_rate": 0.0}, InputError, "learning rate"),
        ({"tolerance": -1.0}, InputError, "tolerance"),
        ({"structure": "kron", "tune": "weight"}, UnsupportedError, "one precision for each tensor"),
        ({"curvature": "hessian", "noise": "evidence"}, UnsupportedError, "in proportion to the noise"),
        ({"tune": "global", "marginal": ["s"]}, UnsupportedError, "one search"),
        ({"noise": "evidence", "marginal": ["s"]}, UnsupportedError, "one search"),
        ({"objective": "validation"}, UnsupportedError, "prior precisions"),
        ({"objective": "validation", "tune": "global", "noise": "evidence"}, UnsupportedError, "prior precisions"),
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
    ],
    ids=str,
)
def test_impossible_settings_are_refused_where_they_are_written(settings, error, says):
    begin = time.perf_counter()
    with pytest.raises(error, match=says):
        bnn.Laplace(**settings)
    assert time.perf_counter() - begin < 1.0


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
    monkeypatch.setattr("ppl_bnn.inference.laplace.find_mode", lambda *_, **__: pytest.fail("the mode was sought"))
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
        (small_network, {"structure": "lowrank", "rank": 99}, InputError, "from 1 to 14"),
        (
            small_network,
            {"weights": "largest_magnitude", "subnetwork": 99},
            InputError,
            "at most the 13 weights",
        ),
        (small_network, {"tune": "global", "objective": "validation", "validation": 0.01}, InputError, "share"),
    ],
)
def test_what_a_model_has_no_place_for_is_refused(ppl, model, settings, error, says):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(12, 2))
    y = np.arange(12) % 3 if model is small_classifier else rng.normal(size=12)
    with pytest.raises(error, match=says):
        fit(model, x, y, ppl, steps=100, **settings)
