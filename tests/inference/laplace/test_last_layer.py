"""Laplace over the last layer by its features: against dense algebra in NumPy, laplace-torch, and the dense route."""

from __future__ import annotations

import pickle
import tracemalloc
import warnings
from functools import cache

import numpy as np
import pytest
import scipy
import torch

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.inference.curvature import curvature as curvature_module
from ppl_bnn.inference.curvature import last_layer as layer_module
from ppl_bnn.inference.flat_vector import Where
from ppl_bnn.inference.laplace import approximation as approximation_module
from ppl_bnn.inference.laplace import layer_predictions as predictions_module
from ppl_bnn.inference.laplace import row_covariances
from ppl_bnn.inference.laplace.layer_predictions import KeptFeatures
from ppl_bnn.inference.laplace.linearised import FEW_DRAWS

CLASSES, ROWS, FEATURES, INPUTS = 10, 30, 6, 3
NEW = np.random.default_rng(5).normal(size=(4, INPUTS))
CLOSED = ("probit", "probit_covariance", "bridge", "bridge_norm")
STRUCTURES = {"diag": {}, "kron": {}, "lowrank": {"rank": 12}}


def network(classes, width=FEATURES, bias=True):
    def model(x, y=None):
        h = bnn.ops.tanh(bnn.dense("hidden", x, width, priors.Normal()))
        f = bnn.dense(
            "output", h, classes, priors.Normal(0.0, 0.7), priors.Normal(0.0, 1.5) if bias else False
        )
        bnn.observe(y, f, likelihoods.Categorical())

    return model


@cache
def given(classes, width=FEATURES, rows=ROWS, inputs=INPUTS):
    """Weights that are no mode, and data."""
    rng = np.random.default_rng(1)
    start = {
        "hidden.weight": rng.normal(size=(inputs, width)),
        "hidden.bias": 0.3 * rng.normal(size=width),
        "output.weight": rng.normal(size=(width, classes)),
        "output.bias": 0.5 * rng.normal(size=classes),
    }
    y = np.arange(rows) % classes
    y[-1] = classes - 1
    return start, rng.normal(size=(rows, inputs)), y


def fitted(ppl="pyro", structure="diag", model=None, classes=CLASSES, start=None, **settings):
    known, x, y = given(classes)
    settings = {"weights": "last_layer"} | STRUCTURES.get(structure, {}) | settings
    method = bnn.Laplace(ppl=ppl, structure=structure, start=start or known, optimise=False, **settings)
    return bnn.fit(model or network(classes), x, y, method, progress=False)


def close(found, wanted, relative=1e-10):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= relative * np.abs(wanted).max()


def layer_of(posterior):
    return posterior.with_problem(posterior.approximation._of_layer)


def moments(posterior, x=NEW):
    """Mean and covariances, as many classes have them."""
    approximation = posterior.approximation
    (found,) = posterior.with_problem(lambda problem: list(approximation._moments(problem, x, len(x), 2**28)))
    return found


@pytest.fixture
def without_layer(monkeypatch):
    """A function after which everything goes by Jacobians."""

    def switch():
        monkeypatch.setattr(curvature_module, "last_layer", lambda *given: None)
        monkeypatch.setattr(approximation_module, "last_layer", lambda *given: None)

    return switch


@pytest.fixture
def counted(monkeypatch):
    """The inputs of each forward pass for features."""
    calls, features = [], layer_module.features

    def count(problem, u, x, *rest):
        calls.append(len(x))
        return features(problem, u, x, *rest)

    monkeypatch.setattr(layer_module, "features", count)
    return calls


# --- against other work ----------------------------------------------------------------------------------


def features_of(start, x):
    return np.tanh(x @ start["hidden.weight"] + start["hidden.bias"])


def dense_covariances(structure, x):
    """J A^-1 J' (N, D, D), with A (P, P) over the weight, ravelled, and the bias."""
    start, data, _ = given(CLASSES)
    inputs, new = features_of(start, data), features_of(start, x)
    p = scipy.special.softmax(inputs @ start["output.weight"] + start["output.bias"], axis=1)
    fisher = np.stack([np.diag(row) - np.outer(row, row) for row in p])
    ones = np.ones((len(inputs), 1))
    everything = np.concatenate([inputs, ones], 1)
    size = FEATURES * CLASSES
    prior = np.concatenate([np.full(size, 0.7**-2), np.full(CLASSES, 1.5**-2)])
    whole = sum(np.kron(np.outer(a, a), each) for a, each in zip(everything, fisher, strict=True))
    if structure == "diag":
        curvature = np.diag(np.diag(whole))
    elif structure == "kron":
        curvature = np.zeros_like(whole)
        curvature[:size, :size] = np.kron(inputs.T @ inputs / len(inputs), fisher.sum(0))
        curvature[size:, size:] = fisher.sum(0)
    else:
        scale = np.sqrt(prior)
        values, vectors = np.linalg.eigh(whole / scale / scale[:, None])
        kept = (vectors[:, -12:] * values[-12:]) @ vectors[:, -12:].T
        curvature = kept * scale * scale[:, None]
    covariance = np.linalg.inv(curvature + np.diag(prior))
    jacobians = (np.kron(np.append(a, 1.0), np.eye(CLASSES)) for a in new)
    return np.stack([jacobian @ covariance @ jacobian.T for jacobian in jacobians])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_covariances_are_those_of_dense_algebra(ppl, structure, monkeypatch):
    posterior, wanted = fitted(ppl, structure), dense_covariances(structure, NEW)
    close(moments(posterior)[1], wanted, 1e-9)
    monkeypatch.setattr(approximation_module, "MANY", CLASSES - 1)
    monkeypatch.setattr(predictions_module, "MANY", CLASSES - 1)
    mean, rows = moments(posterior)
    start, _, _ = given(CLASSES)
    close(mean, features_of(start, NEW) @ start["output.weight"] + start["output.bias"])
    close(rows.dense(), wanted, 1e-9)
    close(rows.variances(), np.diagonal(wanted, axis1=1, axis2=2), 1e-9)
    close(rows.sums(), wanted.sum(-1), 1e-9)
    root = rows.colour(np.eye(rows.dimension))
    close(np.einsum("snd,sne->nde", root, root), wanted, 1e-9)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_laplace_torch_has_the_same_last_layer(structure, double_by_default):
    from laplace import Laplace

    start, x, y = given(CLASSES)

    def model(x, y=None):
        h = bnn.ops.tanh(bnn.dense("hidden", x, FEATURES, priors.Normal(0.0, 0.7)))
        f = bnn.dense("output", h, CLASSES, priors.Normal(0.0, 0.7))
        bnn.observe(y, f, likelihoods.Categorical())

    hidden, output = torch.nn.Linear(INPUTS, FEATURES), torch.nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        for layer, name in ((hidden, "hidden"), (output, "output")):
            layer.weight.copy_(torch.tensor(start[f"{name}.weight"].T))
            layer.bias.copy_(torch.tensor(start[f"{name}.bias"]))
    body = torch.nn.Sequential(hidden, torch.nn.Tanh(), output)
    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=len(x)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = Laplace(body, "classification", "last_layer", structure, prior_precision=0.7**-2)
        theirs.fit(batches)
        mean, covariance = theirs._glm_predictive_distribution(torch.tensor(NEW))
        probs = theirs(torch.tensor(NEW), pred_type="glm", link_approx="probit").detach().numpy()
    ours = fitted("pyro", structure, model)
    close(ours.predict(NEW, kind="probit").probabilities, probs, 1e-9)
    for found, wanted in zip(moments(ours), (mean, covariance), strict=True):
        close(found, wanted.detach().numpy(), 1e-9)


# --- against the dense route -----------------------------------------------------------------------------


# NumPy computes predictions from covariances. The tests above compare the covariances of both systems.
@pytest.mark.parametrize("structure", STRUCTURES)
def test_ten_classes_are_those_of_the_jacobian(structure, without_layer, monkeypatch):
    posterior = fitted("pyro", structure)
    assert layer_of(posterior) is not None
    kinds = [kind for kind in posterior.approximation.kinds if kind != "sampled"]
    ours = {kind: posterior.predict(NEW, kind=kind) for kind in kinds}
    draws = {kind: posterior.predictor(NEW, kind=kind, draws=7) for kind in ("linearised", "sampled")}
    monkeypatch.setattr(approximation_module, "MANY", CLASSES - 1)
    monkeypatch.setattr(predictions_module, "MANY", CLASSES - 1)
    many = {kind: posterior.predict(NEW, kind=kind) for kind in kinds}
    without_layer()
    other = fitted("pyro", structure)
    assert layer_of(other) is None
    for figure in ("log_evidence", "effective_parameters", "newton_gain"):
        assert posterior.info.figures[figure] == pytest.approx(other.info.figures[figure], rel=1e-10)
    for kind in kinds:
        wanted = other.predict(NEW, kind=kind)
        close(ours[kind].probabilities, wanted.probabilities)
        close(ours[kind].epistemic, wanted.epistemic, 1e-8)
        # Another root of the covariance puts the points elsewhere: the rule has an error of less than 1e-3.
        close(many[kind].probabilities, wanted.probabilities, 1e-10 if kind in CLOSED else 1e-2)
    for kind, found in draws.items():
        close(found, other.predictor(NEW, kind=kind, draws=7), 1e-9)


def test_one_class_more_changes_the_route():
    for classes, dense in ((approximation_module.MANY, True), (approximation_module.MANY + 1, False)):
        _, found = moments(fitted(structure="diag", classes=classes))
        assert isinstance(found, np.ndarray) is dense


@pytest.mark.parametrize("settings", [{"fisher": "sampled", "samples": 3}, {"curvature": "empirical"}])
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_other_curvatures_are_those_of_the_jacobian(structure, settings, without_layer):
    ours = fitted("pyro", structure, **settings).approximation.covariance
    without_layer()
    close(ours.variances(), fitted("pyro", structure, **settings).approximation.covariance.variances())


def test_products_with_vectors_are_those_of_the_dense_matrix(monkeypatch):
    monkeypatch.setattr(curvature_module, "DENSE", 0)
    found = fitted(structure="lowrank", rank=70)
    assert found.info.figures["curvature_products"] > 0
    full = fitted(structure="full")
    close(found.approximation.covariance.covariance(), full.approximation.covariance.covariance(), 1e-8)
    assert found.log_evidence == pytest.approx(full.log_evidence, rel=1e-9)


def test_a_layer_without_bias_a_module_and_names_of_layers(without_layer):
    def module_body(x, y=None):
        h = bnn.ops.tanh(x @ bnn.ops.asarray(given(CLASSES)[0]["hidden.weight"], like=x))
        bnn.observe(y, bnn.dense("output", h, CLASSES, priors.Normal()), likelihoods.Categorical())

    start = given(CLASSES)[0]
    known = {name: value for name, value in start.items() if name != "output.bias"}
    last = {name: value for name, value in start.items() if name.startswith("output")}
    cases = [
        (network(CLASSES, bias=False), known, "last_layer"),
        (module_body, last, "all"),
        (network(CLASSES), start, ("output",)),
        (network(CLASSES), start, ("output.weight",)),
    ]
    models = [fitted("pyro", "kron", model, start=at, weights=weights) for model, at, weights in cases]
    assert all(layer_of(posterior) is not None for posterior in models)
    found = [posterior.predict(NEW, kind="bridge").probabilities for posterior in models]
    without_layer()
    for probs, (model, at, weights) in zip(found, cases, strict=True):
        close(
            probs,
            fitted("pyro", "kron", model, start=at, weights=weights)
            .predict(NEW, kind="bridge")
            .probabilities,
        )


def test_a_fixed_torch_module_is_a_body(without_layer):
    body = torch.nn.Sequential(torch.nn.Linear(INPUTS, FEATURES), torch.nn.Tanh()).double()

    def model(x, y=None):
        h = bnn.module("body", x, body, {"*": None})
        bnn.observe(y, bnn.dense("output", h, CLASSES, priors.Normal()), likelihoods.Categorical())

    start = {name: value for name, value in given(CLASSES)[0].items() if name.startswith("output")}
    posterior = fitted("pyro", "kron", model, weights="all", start=start)
    assert layer_of(posterior) is not None
    found = posterior.predict(NEW, kind="probit").probabilities
    without_layer()
    close(
        found,
        fitted("pyro", "kron", model, weights="all", start=start).predict(NEW, kind="probit").probabilities,
    )


def test_what_is_no_last_layer_is_none():
    def scaled(x, y=None):
        bnn.observe(
            y, 2.0 * bnn.mlp(x, [FEATURES, CLASSES], prior=priors.Normal()), likelihoods.Categorical()
        )

    def noisy(x, y=None):
        bnn.observe(y, bnn.mlp(x, [FEATURES, 1], prior=priors.Normal()), likelihoods.Gaussian(0.3))

    start = {name.replace("hidden", "hidden0"): value for name, value in given(CLASSES)[0].items()}
    for model, weights in (
        (scaled, "last_layer"),
        (network(CLASSES), "all"),
        (network(CLASSES), ("hidden",)),
    ):
        at = start if model is scaled else None
        assert layer_of(fitted("pyro", "diag", model, start=at, weights=weights)) is None
    some = fitted("pyro", "diag", weights="largest_magnitude", subnetwork=5)
    assert layer_of(some) is None
    x = given(CLASSES)[1]
    posterior = bnn.fit(
        noisy, x, x[:, 0], bnn.Laplace(ppl="pyro", weights="last_layer", steps=5, polish=False)
    )
    assert layer_of(posterior) is None


def test_draws_that_move_the_body_go_through_the_network(without_layer):
    posterior = fitted(structure="diag")
    u = posterior.chosen_draws(5)
    moved = u | {"hidden.bias": u["hidden.bias"] + 0.3}

    def draws(values):
        given = (values, NEW, "sampled", 0, 2**28)
        return posterior.with_problem(
            lambda problem: posterior.approximation.predictor_draws(problem, *given)
        )

    found, still = draws(moved), draws(u)
    without_layer()
    close(found, draws(moved), 1e-12)
    close(still, draws(u), 1e-9)
    assert np.abs(found - still).max() > 1e-3


def test_inputs_without_a_finite_predictor_are_refused():
    def steep(x, y=None):
        h = bnn.ops.exp(bnn.dense("hidden", x, FEATURES, priors.Normal()))
        bnn.observe(y, bnn.dense("output", h, CLASSES, priors.Normal()), likelihoods.Categorical())

    with pytest.raises(InputError, match=r"finite mean and covariance.*nearer to the data"):
        fitted("pyro", "diag", steep).predict(1e6 * NEW)


# --- features are computed once --------------------------------------------------------------------------


def test_features_are_kept_by_the_content_of_the_inputs(ppl, counted):
    posterior, x = fitted(ppl, "kron"), NEW.copy()
    before = len(counted)
    first = posterior.predict(x)
    for kind in CLOSED:
        posterior.predict(x.copy(), kind=kind)
    posterior.predictor(x, draws=3)
    posterior.predict(x, kind="sampled", draws=3)
    assert len(counted) - before == 1
    x[0] += 1.0
    second = posterior.predict(x)
    assert len(counted) - before == 2
    assert np.abs(first.probabilities[0] - second.probabilities[0]).max() > 1e-6
    assert np.array_equal(first.probabilities[1:], second.probabilities[1:])
    # They are no part of what is stored or sent to another process.
    assert not any("kept" in key for key in posterior.approximation.arrays())
    assert pickle.loads(pickle.dumps(posterior.approximation))._kept == {}


def test_few_features_are_kept(counted):
    posterior = fitted(structure="diag")
    each = 8 * len(NEW) * (FEATURES + CLASSES)

    def passes(most, *order):
        kept, before = KeptFeatures(most), len(counted)
        with_problem, centre = posterior.with_problem, posterior.approximation.centre()
        for shift in order:
            with_problem(
                lambda problem, x=NEW + shift: kept(
                    problem, centre, x, posterior.approximation._of_layer(problem).layer, 2**28
                )
            )
        return len(counted) - before

    assert passes(2 * each, 0, 1, 0, 1) == 2
    # The third puts out the one that was used longest ago.
    assert passes(2 * each, 0, 1, 0, 2, 0, 1) == 4
    assert passes(each - 1, 0, 0) == 2


# --- many classes ----------------------------------------------------------------------------------------


def many_classes(structure, classes, **settings):
    start, x, y = given(classes, 64, 20, 10)
    method = bnn.Laplace(
        ppl="pyro", structure=structure, weights="last_layer", start=start, optimise=False, **settings
    )
    return bnn.fit(network(classes, 64), x, y, method, progress=False)


def peaks(posterior, kinds, x):
    """The most memory of NumPy during one row, by kind, after a first call."""
    found = {}
    for kind in kinds:
        posterior.predict(x, kind=kind)
        tracemalloc.start()
        try:
            posterior.predict(x, kind=kind)
            found[kind] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return found


def test_one_row_of_3000_classes_holds_no_matrix_of_classes():
    """195 000 weights: a covariance of logits has 72 MB, a Jacobian of one row 4.7 GB."""
    tracemalloc.start()
    try:
        posterior = many_classes("diag", 3000)
        fit = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert fit < 60e6
    found = peaks(posterior, ("linearised", "probit", "bridge", "propagated"), given(3000, 64, 20, 10)[1][:1])
    # The prediction itself is a mixture of 1024 parts.
    mixture = 8 * 1024 * 3000
    assert found["linearised"] < 5 * mixture
    assert found["propagated"] < 5 * mixture
    assert found["probit"] < 5 * mixture * FEW_DRAWS / 1024 + 1e6
    assert found["bridge"] < 5e6


@pytest.mark.parametrize(("structure", "settings"), [("kron", {}), ("lowrank", {"rank": 3, "probes": 2})])
def test_one_row_of_many_classes_holds_no_jacobian(structure, settings):
    """400 classes, 26 000 weights: the Jacobian of one row has 83 MB."""
    posterior = many_classes(structure, 400, **settings)
    x = given(400, 64, 20, 10)[1][:1]
    found = peaks(posterior, ("linearised", "probit", "bridge"), x)
    assert found["linearised"] < 6 * 8 * 1024 * 400
    assert found["probit"] < 5e6
    assert found["bridge"] < 3e6


def test_the_entropy_beside_probit_takes_few_points_of_many_classes():
    """Their average is within its own error of that of 1024 points: the entropy of one point varies little."""
    posterior = many_classes("diag", 400)
    x = given(400, 64, 20, 10)[1]
    every = posterior.predict(x)
    few = posterior.predict(x, kind="probit").aleatoric
    entropies = scipy.stats.entropy(every.parameters["probs"], axis=-1)
    error = entropies.std(0) / np.sqrt(FEW_DRAWS)
    assert np.abs(few - every.aleatoric).max() < 5.0 * error.max()


def test_a_full_structure_that_cannot_fit_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(curvature_module, "machine_memory", lambda: 100_000.0)
    with pytest.raises(UnsupportedError, match=r"structure='full'.*70 weights, which need.*'lowrank'"):
        fitted(structure="full")
    # Three matrices (70, 70) need 117 600 bytes.
    monkeypatch.setattr(curvature_module, "machine_memory", lambda: 117_600.0)
    fitted(structure="full")


def test_the_layer_is_found_at_any_point():
    posterior = fitted(structure="diag")
    layer = posterior.with_problem(
        lambda problem: layer_module.last_layer(
            problem, posterior.approximation.centre(), Where.of(problem, posterior.approximation.positions)
        )
    )
    assert layer.shape == (FEATURES, CLASSES)
    assert (layer.weight, layer.bias) == (slice(0, 60), slice(60, 70))


@pytest.mark.parametrize("shape", [(1, 5), (2, 2), (3, 5), (5, 2), (2, 1)])
def test_covariances_of_few_and_of_many_directions(shape: tuple[int, int]) -> None:
    """By matrices of outputs or of directions, whichever are smaller: what the formula of the class says."""
    rng = np.random.default_rng(0)
    outputs = shape[0]
    spread, along = rng.uniform(0.5, 2.0, (4, outputs)), rng.normal(size=(4, *shape))
    inside = rng.normal(size=(4, *shape))
    # In the last row an output has no spread of its own left.
    inside *= np.array([0.0, 0.5, 0.9, 1.0])[:, None, None] / np.linalg.norm(inside, 2, (1, 2), keepdims=True)
    rows = row_covariances.UpdatedRows(spread, inside, along)
    root = np.sqrt(spread)
    left = np.eye(outputs) - inside @ inside.transpose(0, 2, 1)
    expected = root[:, :, None] * left * root[:, None] + along @ along.transpose(0, 2, 1)
    np.testing.assert_allclose(rows.dense(), expected, atol=1e-12)
    np.testing.assert_allclose(rows.variances(), np.diagonal(expected, axis1=1, axis2=2), atol=1e-12)
    np.testing.assert_allclose(rows.sums(), expected.sum(2), atol=1e-12)
    # A linear map of standard normal points: its matrix is a root of the covariance.
    matrix = rows.colour(np.eye(rows.dimension))
    np.testing.assert_allclose(np.einsum("pnd,pne->nde", matrix, matrix), expected, atol=1e-12)
