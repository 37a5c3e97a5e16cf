"""Products with vectors against dense curvatures and curvlinops; Laplace approximations that are made of them alone."""

from __future__ import annotations

import tracemalloc
import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.curvature import curvature as curvature_module
from ppl_bnn.inference.curvature import jacobian as jacobian_module
from ppl_bnn.inference.curvature import prior as prior_module
from ppl_bnn.inference.curvature.curvature import data_curvature
from ppl_bnn.inference.curvature.jacobian import linear_factors
from ppl_bnn.inference.curvature.products import GaussNewtonProducts
from ppl_bnn.inference.flat_vector import Where
from ppl_bnn.inference.laplace import approximation as approximation_module
from tests.inference.curvature.test_curvature import point, problem_of
from tests.problems import small_network

ROWS, NEW = 30, np.random.default_rng(7).normal(size=(5, 2))


def images(x, y=None):
    """A small residual network: convolutions, normalisation, ways around."""
    f = bnn.resnet(x, (2, 3), 4, activation="tanh", prior=priors.Normal(0.0, "fan_in"))
    bnn.observe(y, f, likelihoods.Categorical())


def classes(x, y=None):
    """Scales that differ between sites: the coordinates of the prior are not those of the weights."""
    h = bnn.ops.tanh(bnn.dense("hidden", x, 6, priors.Normal(0.0, 2.0), priors.Normal(0.0, 0.5)))
    f = bnn.dense("output", h, 4, priors.Normal(0.0, "fan_in"), priors.Normal(0.0, 3.0))
    bnn.observe(y, f, likelihoods.Categorical())


def known_noise(x, y=None):
    f = bnn.mlp(x, [5, 2], activation="tanh", prior=priors.Normal(0.0, 1.5))
    bnn.observe(y, f, likelihoods.Gaussian(0.3))


MODELS = {"classes": classes, "known noise": known_noise, "sampled noise": small_network}


# Both systems share the code under test. NumPyro compiles for seconds, so it has one model.
in_both_systems = pytest.mark.parametrize(
    ("ppl", "name"), [*(("pyro", name) for name in MODELS), ("numpyro", "classes")]
)


@cache
def data(name):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, 2))
    if name == "classes":
        return x, np.r_[np.arange(4), rng.integers(0, 4, ROWS - 4)]
    wave = np.sin(2.0 * x) + 0.1 * rng.normal(size=x.shape)
    return x, wave if name == "known noise" else wave[:, 0]


@cache
def start_of(name):
    """A mode, found once."""
    posterior = bnn.fit(MODELS[name], *data(name), bnn.MAP(ppl="pyro", steps=400))
    return {site: value[0, 0] for site, value in posterior.draws.items()}


def fitted(ppl, name, **settings):
    method = bnn.Laplace(ppl=ppl, start=start_of(name), optimise=False, **settings)
    return bnn.fit(MODELS[name], *data(name), method)


@pytest.fixture
def by_products(monkeypatch):
    """No dense matrix, and an error at any Jacobian or factor of one."""

    def refused(*arguments, **keywords):
        raise AssertionError("a Jacobian")

    monkeypatch.setattr(curvature_module, "DENSE", 0)
    monkeypatch.setattr(jacobian_module, "linear_factors", refused)


def close(found, wanted, relative=1e-8):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= relative * np.abs(wanted).max()


# --- products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [images, classes], ids=["images", "classes"])
def test_products_are_those_of_the_dense_matrix(ppl, model):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 6, 6, 2)) if model is images else rng.normal(size=(7, 2))
    with problem_of(ppl, model, x, np.arange(7) % 4) as problem:
        u, root = point(problem), problem.program.likelihood.fisher_root
        every = Where.of(problem, None)
        dense = data_curvature(problem, u)[0].matrix()
        some = Where.of(problem, np.arange(1, every.size, 3))
        # All rows at once, and one by one.
        for where, memory in ((every, 2**28), (some, 2**28), (every, 1)):
            products = GaussNewtonProducts(problem, u, where, memory, lambda eta, rows: np.asarray(root(eta)))
            directions = rng.normal(size=(6, where.count))
            at = np.arange(every.size) if where.kept is None else np.arange(1, every.size, 3)
            close(products(directions), directions @ dense[np.ix_(at, at)], 1e-11)
            assert products.passes == 6


@pytest.mark.parametrize("task", ["regression", "classes"])
def test_products_are_those_of_curvlinops(task):
    import torch
    from curvlinops import GGNLinearOperator

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 2)), rng.normal(size=(9, 3)) if task == "regression" else np.arange(9) % 3

    def model(x, y=None):
        f = bnn.mlp(x, [4, 3], activation="tanh", prior=priors.Normal())
        bnn.observe(y, f, likelihoods.Gaussian(1.0) if task == "regression" else likelihoods.Categorical())

    with problem_of("pyro", model, x, y) as problem:
        u, root = point(problem), problem.program.likelihood.fisher_root
        where = Where.of(problem, None)
        products = GaussNewtonProducts(problem, u, where, 2**28, lambda eta, rows: np.asarray(root(eta)))
        directions = rng.normal(size=(3, where.count))
        ours = products(directions)
        sites = {name: site.shape for name, site in problem.program.sites.items()}
    # torch.nn has the transposed weights; a bias follows its weight in both.
    network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    ordered = ["hidden0.weight", "hidden0.bias", "output.weight", "output.bias"]
    with torch.no_grad():
        for parameter, name in zip(network.parameters(), ordered, strict=True):
            parameter.copy_(torch.tensor(u[name].T))
    # Half of the squared error is minus the log density of unit noise, summed over outputs.
    if task == "regression":
        loss, factor = torch.nn.MSELoss(reduction="sum"), 0.5
    else:
        loss, factor = torch.nn.CrossEntropyLoss(reduction="sum"), 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = (torch.tensor(x), torch.tensor(y))
        operator = GGNLinearOperator(network, loss, list(network.parameters()), [batch])

    def turned(row, back):
        """A flat vector of our sites in torch's order, or back."""
        order, parts, at = (ordered, {}, 0) if back else (list(sites), {}, 0)
        for name in order:
            size = int(np.prod(sites[name]))
            shape = sites[name][::-1] if back else sites[name]
            parts[name] = row[at : at + size].reshape(shape).T.reshape(-1)
            at += size
        return np.concatenate([parts[name] for name in (sites if back else ordered)])

    for direction, product in zip(directions, ours, strict=True):
        theirs = operator @ torch.tensor(turned(direction, False))
        close(product, factor * turned(np.asarray(theirs), True), 1e-6)


# --- Laplace by products ----------------------------------------------------------------------------


@in_both_systems
def test_the_whole_rank_is_the_full_structure(ppl, name, by_products, monkeypatch):
    found = fitted(ppl, name, structure="lowrank", rank=weights_of(name))
    ours, draws = found.info.figures, found.draws
    monkeypatch.setattr(jacobian_module, "linear_factors", linear_factors)
    predicted = found.predict(NEW, memory=1)
    full = fitted(ppl, name, structure="full")
    close(found.approximation.covariance.covariance(), full.approximation.covariance.covariance(), 1e-9)
    for figure in ("log_evidence", "effective_parameters", "log_joint"):
        assert ours[figure] == pytest.approx(full.info.figures[figure], rel=1e-10)
    for figure in (
        "log_evidence_error",
        "log_evidence_beyond_rank",
        "parameters_beyond_rank",
        "trace_beyond_rank",
    ):
        assert abs(ours[figure]) < 1e-9, figure
    for parameter, values in full.predict(NEW).parameters.items():
        close(predicted.parameters[parameter], values)
    # No eigenpair of a dense matrix, and no more products than a few for each weight.
    assert 0 < ours["curvature_products"] <= 3 * weights_of(name) + 40
    assert set(draws) == set(full.draws)


def weights_of(name):
    return {"classes": 46, "known noise": 27, "sampled noise": 13}[name]


@pytest.mark.parametrize("settings", [{"tune": "global"}, {"tune": "global", "search": "maximise"}])
def test_one_factor_is_tuned_by_the_evidence_of_the_whole_curvature(settings, by_products, monkeypatch):
    few, every = (
        fitted("pyro", "classes", structure="lowrank", rank=r, probes=256, **settings) for r in (4, 46)
    )
    monkeypatch.setattr(jacobian_module, "linear_factors", linear_factors)
    full = fitted("pyro", "classes", structure="full", **settings).info.figures
    for figure in ("log_evidence", "prior_factor/all", "effective_parameters", "log_joint"):
        assert every.info.figures[figure] == pytest.approx(full[figure], rel=1e-7)
    error = few.info.figures["log_evidence_error"]
    assert 0.0 < error < 0.5
    assert abs(few.info.figures["log_evidence"] - full["log_evidence"]) < 5.0 * error
    # Without the rest of the spectrum the evidence is far off.
    assert few.info.figures["log_evidence_beyond_rank"] < -10.0 * error


def test_noise_is_tuned_with_it(by_products, monkeypatch):
    settings = {"noise": "evidence", "tune": "global"}
    ours = fitted("pyro", "known noise", structure="lowrank", rank=27, **settings).info.figures
    monkeypatch.setattr(jacobian_module, "linear_factors", linear_factors)
    full = fitted("pyro", "known noise", structure="full", **settings).info.figures
    for figure in ("log_evidence", "prior_factor/all", "noise", "log_joint"):
        assert ours[figure] == pytest.approx(full[figure], rel=1e-7)


@pytest.mark.parametrize("name", ["classes", "sampled noise"])
def test_a_low_rank_has_the_evidence_of_the_whole_curvature_within_its_error(name, by_products, monkeypatch):
    """Within 6 standard errors of 8 probes, which Student's t with 7 degrees passes once in 1900: of one seed."""
    found = fitted("pyro", name, structure="lowrank", rank=4)
    monkeypatch.setattr(jacobian_module, "linear_factors", linear_factors)
    monkeypatch.setattr(curvature_module, "DENSE", 3000)
    dense = fitted("pyro", name, structure="lowrank", rank=4)
    full = fitted("pyro", name, structure="full").info.figures
    close(found.approximation.covariance.precision(), dense.approximation.covariance.precision(), 1e-6)
    # From a dense matrix nothing is estimated.
    assert dense.info.figures["log_evidence_error"] == 0.0
    assert dense.info.figures["curvature_products"] == 0
    for figure in ("log_evidence", "effective_parameters"):
        assert dense.info.figures[figure] == pytest.approx(full[figure], rel=1e-9)
    ours = found.info.figures
    assert abs(ours["log_evidence"] - full["log_evidence"]) < 6.0 * ours["log_evidence_error"]
    trace = dense.info.figures["trace_beyond_rank"]
    assert abs(ours["trace_beyond_rank"] - trace) < 6.0 * ours["trace_beyond_rank_error"]


def test_what_a_rank_leaves_out_is_named():
    leaves, warned = "effective parameters", []
    for rank in (1, 40):
        warned.append(
            any(
                leaves in text
                for text in fitted("pyro", "classes", structure="lowrank", rank=rank).info.warnings
            )
        )
    assert warned == [True, False]


@in_both_systems
def test_predictions_by_products_are_those_of_the_jacobian(ppl, name):
    posterior = fitted(ppl, name, structure="lowrank", rank=5)
    approximation = posterior.approximation
    whole = posterior.with_problem(lambda problem: approximation.linearised(problem, NEW))
    parts = posterior.with_problem(lambda problem: approximation.linearised(problem, NEW, memory=1))
    for found, wanted in zip(parts, whole, strict=True):
        close(found, wanted, 1e-10)


@in_both_systems
def test_joint_predictions_by_products_are_those_of_the_full_structure(ppl, name, monkeypatch):
    """The precision of the full structure as a diagonal and a factor of whole rank, whatever they are of."""
    posterior = fitted(ppl, name, structure="full")
    full, precision = posterior.joint(NEW), posterior.approximation.covariance.precision()
    values, vectors = np.linalg.eigh(precision)
    diagonal, factor = np.full(len(values), 0.5 * values[0]), (vectors * np.sqrt(values - 0.5 * values[0])).T
    gaussian = curvature_module.structures.LowRankPrecision.of(diagonal, factor)
    monkeypatch.setattr(approximation_module, "jacobians", None)
    approximation = replace(posterior.approximation, covariance=gaussian)
    ours = replace(posterior, approximation=approximation).joint(NEW, memory=1)
    close(ours.mean, full.mean, 1e-10)
    close(ours.function_covariance, full.function_covariance)
    assert (ours.covariance is None) is (name == "classes")
    if full.covariance is not None:
        close(ours.covariance, full.covariance)
    # The rows depend on each other: no block beside the diagonal is zero.
    size = len(ours.mean) // len(NEW)
    assert np.abs(ours.function_covariance[:size, size:]).max() > 1e-3 * ours.function_covariance.max()


def test_a_fit_of_the_whole_rank_has_the_joint_prediction_of_the_full_structure(by_products, monkeypatch):
    found = fitted("pyro", "classes", structure="lowrank", rank=46).joint(NEW, memory=1)
    monkeypatch.setattr(jacobian_module, "linear_factors", linear_factors)
    wanted = fitted("pyro", "classes", structure="full").joint(NEW)
    close(found.function_covariance, wanted.function_covariance, 1e-6)


def test_joint_predictions_of_some_weights_are_those_of_the_jacobian(monkeypatch):
    posterior = fitted("pyro", "classes", structure="lowrank", rank=5, weights=("output",))
    wanted, by_rows = posterior.joint(NEW), []
    monkeypatch.setattr(approximation_module, "jacobians", lambda *given: by_rows.append(given))
    close(posterior.joint(NEW, memory=1).function_covariance, wanted.function_covariance)
    # The bytes of the Jacobian of 5 rows, 4 outputs and 28 weights, while it is made.
    size = 5 * 8 * 2 * 4 * 28
    posterior.joint(NEW, memory=size - 1)
    assert not by_rows
    with pytest.raises(TypeError):
        posterior.joint(NEW, memory=size)
    assert len(by_rows) == 1


def test_joint_predictions_of_a_subnetwork_are_those_of_the_jacobian(ppl, monkeypatch):
    chosen = {"weights": "largest_magnitude", "subnetwork": 9}
    posterior = fitted(ppl, "classes", structure="lowrank", rank=5, **chosen)
    wanted = posterior.joint(NEW)
    monkeypatch.setattr(approximation_module, "jacobians", None)
    close(posterior.joint(NEW, memory=1).function_covariance, wanted.function_covariance)


@pytest.mark.slow
def test_a_joint_prediction_holds_nothing_as_large_as_a_jacobian():
    """65 050 weights and 50 classes: the Jacobian of 3 rows has 78 MB, and takes twice that."""
    model, start, x, y = wide_network()
    posterior = bnn.fit(model, x, y, bnn.Laplace(ppl="pyro", structure="diag", start=start, optimise=False))
    factor = np.random.default_rng(0).normal(size=(3, 65_050))
    gaussian = curvature_module.structures.LowRankPrecision.of(np.full(65_050, 79.0), factor)
    approximation = replace(posterior.approximation, covariance=gaussian)
    tracemalloc.start()
    try:
        found = posterior.with_problem(lambda problem: approximation.joint(problem, x[:3], 2**20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.function_covariance.shape == (150, 150)
    assert peak < 20 * 8 * 65_050


def test_products_keep_variances_that_data_reduce_a_lot():
    """A prior that is 1e12 times as wide as the posterior: what is left is no difference of two large numbers."""
    gaussian = curvature_module.structures.LowRankPrecision.of(np.full(6, 1e-6), 1e3 * np.eye(6)[:4])
    jacobian = np.random.default_rng(0).normal(size=(2, 3, 6))
    jacobian[..., 4:] = 0.0
    spread, along = (jacobian * 1e6) @ jacobian.transpose(0, 2, 1), (jacobian * 1e6) @ gaussian.factor.T
    close(gaussian.project_products(spread, along), gaussian.project(jacobian), 1e-3)


def test_single_precision_is_near(by_products, monkeypatch):
    ours = fitted("pyro", "classes", structure="lowrank", rank=20, dtype="float32")
    monkeypatch.setattr(jacobian_module, "linear_factors", linear_factors)
    double = fitted("pyro", "classes", structure="lowrank", rank=20)
    close(ours.approximation.covariance.precision(), double.approximation.covariance.precision(), 1e-4)
    close(ours.predict(NEW).probabilities, double.predict(NEW).probabilities, 1e-3)


def wide_network():
    """A model of 65 050 weights, a point, and data."""

    def model(x, y=None):
        f = bnn.mlp(x, [500, 50], activation="tanh", prior=priors.Normal(0.0, "fan_in"))
        bnn.observe(y, f, likelihoods.Categorical())

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 79)), np.arange(80) % 50
    start = {
        "hidden0.weight": 0.1 * rng.normal(size=(79, 500)),
        "hidden0.bias": np.zeros(500),
        "output.weight": 0.04 * rng.normal(size=(500, 50)),
        "output.bias": np.zeros(50),
    }
    return model, start, x, y


@pytest.mark.slow
def test_nothing_as_large_as_a_jacobian_is_held():
    """65 050 weights and 50 classes: the Jacobian of 40 rows has 1 GB, the Gauss-Newton matrix 34 GB."""
    model, start, x, y = wide_network()
    method = bnn.Laplace(ppl="pyro", structure="lowrank", rank=5, start=start, optimise=False, memory=2**24)
    tracemalloc.start()
    try:
        posterior = bnn.fit(model, x, y, method, progress=False)
        posterior.predict(x[:2], memory=2**24, kind="probit")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A hundred vectors of the size of the weights.
    assert peak < 100 * 8 * 65_050
    assert posterior.info.figures["curvature_products"] <= 200 + 40 * 5 + 8 * 100


def test_a_dense_prior_that_cannot_fit_is_refused_at_once(monkeypatch):
    def hierarchical(x, y=None):
        scale = bnn.sample("scale", bnn.dist.LogNormal(0.0, 1.0))
        f = bnn.mlp(x, [5, 1], activation="tanh", prior=priors.Normal(0.0, scale))
        bnn.observe(y, f, likelihoods.Gaussian(0.3))

    monkeypatch.setattr(prior_module, "machine_memory", lambda: 1000.0)
    x, y = data("sampled noise")
    method = bnn.Laplace(ppl="pyro", structure="lowrank", rank=3)
    with pytest.raises(UnsupportedError, match=r"dense curvature.*noncentred"):
        bnn.fit(hierarchical, x, y, method)
    # Independent priors need no matrix.
    fitted("pyro", "classes", structure="lowrank", rank=3)
