"""Functions from model to model: each against the model written by hand, through fits in both systems."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.errors import BNNError, InputError, ModelError, UnknownNameError, UnsupportedError
from ppl_bnn.language.transforms import with_precision_factors
from ppl_bnn.ppl.protocol import Program, system, written_in

RNG = np.random.default_rng(12)
ROWS, FEATURES = 11, 2
X = RNG.normal(size=(ROWS, FEATURES))
Y = X[:, 0] - 0.5 * X[:, 1] + 0.3 * RNG.normal(size=ROWS)


def log_joint(ppl: str, model: Any, u: dict[str, np.ndarray], y: np.ndarray = Y) -> float:
    """log p(w(u), y) + log |dw/du| at the given sites, which must be all there are."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        x, targets = chosen.asarray(X), chosen.asarray(y)
        program = Program.of(chosen, model, x, targets, language=True)
        assert set(program.sites) == set(u)
        return float(program.log_joint({n: chosen.asarray(v) for n, v in u.items()}, x, targets))


def values_for(ppl: str, model: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Standard normal unconstrained values for every site."""
    chosen, rng = system(ppl), np.random.default_rng(seed)
    with chosen.session("float64", "cpu"):
        program = Program.of(chosen, model, chosen.asarray(X), chosen.asarray(Y), language=True)
    return {name: rng.normal(size=site.unconstrained_shape) for name, site in program.sites.items()}


# --- tuned hyper-parameters -------------------------------------------------------------------------

WEIGHT_FACTORS = np.array([[0.3, 2.0, 1.0], [4.0, 0.5, 9.0]])


def network(x: Any, y: Any = None, *, width: int = 3) -> None:
    """A small network."""
    f = bnn.mlp(x, [width, 1], "tanh", priors.Normal(0.1, 0.7))
    bnn.observe(y, f, likelihoods.Gaussian(0.4))


def network_by_hand(x: Any, y: Any = None) -> None:
    w1 = bnn.sample("hidden0.weight", dist.Normal(0.1, 0.7 / np.sqrt(WEIGHT_FACTORS)).to_event(2))
    b1 = bnn.sample("hidden0.bias", dist.Normal(0.1, 0.7).expand((3,)).to_event())
    w2 = bnn.sample("output.weight", dist.Normal(0.1, 0.7 / math.sqrt(5.0)).expand((3, 1)).to_event())
    b2 = bnn.sample("output.bias", dist.Normal(0.1, 0.7).expand((1,)).to_event())
    f = bnn.linear("output", ops.tanh(bnn.linear("hidden0", x, w1, b1)), w2, b2)
    bnn.observe(y, f, likelihoods.Gaussian(0.9))


def test_precision_factors_are_the_model_written_by_hand(ppl: str) -> None:
    tuned = with_precision_factors(
        network, {"hidden0.weight": WEIGHT_FACTORS, "output.weight": 5.0}, noise=0.9
    )
    u = values_for(ppl, network)
    assert log_joint(ppl, tuned, u) == pytest.approx(log_joint(ppl, network_by_hand, u), rel=1e-12)
    assert abs(log_joint(ppl, tuned, u) - log_joint(ppl, network, u)) > 1.0
    only_noise = with_precision_factors(network, {}, noise=0.9)
    difference = log_joint(ppl, tuned, u) - log_joint(ppl, only_noise, u)
    z = (np.concatenate([u["hidden0.weight"].ravel(), u["output.weight"].ravel()]) - 0.1) / 0.7
    factors = np.append(WEIGHT_FACTORS.ravel(), [5.0] * 3)
    assert difference == pytest.approx(np.sum(0.5 * np.log(factors) - 0.5 * (factors - 1) * z**2), rel=1e-12)


def test_a_factor_of_a_sampled_scale(ppl: str) -> None:
    def hierarchical(x: Any, y: Any = None, *, factor: Any = 1.0) -> None:
        scale = bnn.sample("scale", dist.HalfNormal(1.0))
        w = bnn.sample("w", dist.Normal(0.0, scale / np.sqrt(factor)).expand((FEATURES, 1)).to_event())
        bnn.observe(y, bnn.linear("w", x, w), likelihoods.Gaussian(0.4))

    u = values_for(ppl, hierarchical)
    for factor in (3.0, np.array([[0.5], [7.0]])):
        tuned = with_precision_factors(hierarchical, {"w": factor})
        root = np.asarray(factor, float)
        # The density by hand: N(w; 0, scale^2 / factor).
        scale = math.exp(u["scale"])
        z = u["w"] / scale
        shift = np.sum(0.5 * np.log(root * np.ones_like(z)) - 0.5 * (root - 1) * z**2)
        plain = log_joint(ppl, hierarchical, u)
        assert log_joint(ppl, tuned, u) == pytest.approx(plain + shift, rel=1e-12)


def test_a_tuned_model_keeps_its_name_its_arguments_and_its_language(ppl: str) -> None:
    bound = functools.partial(network, width=2)
    tuned = with_precision_factors(bound, {"output.weight": 2.0}, noise=0.5)
    assert isinstance(tuned, functools.partial)
    assert tuned.keywords == {"width": 2}
    assert tuned.func.__name__ == "network"
    assert tuned.func.__doc__ == "A small network."
    assert written_in(tuned, X, Y, ppl) == "language"
    posterior = bnn.MAP(ppl=ppl, steps=20, polish=False).fit(tuned, X, Y, progress=False)
    assert "network" in repr(posterior)
    assert posterior.draws["hidden0.weight"].shape == (1, 1, FEATURES, 2)


def test_transformed_models_travel_to_other_processes(ppl: str) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    tuned = with_precision_factors(network, {"hidden0.weight": WEIGHT_FACTORS}, noise=0.9)
    again = cloudpickle.loads(cloudpickle.dumps(tuned))
    u = values_for(ppl, network)
    assert log_joint(ppl, again, u) == log_joint(ppl, tuned, u)


def student(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    f = bnn.dense("output", x, 1, priors.StudentT(), bias=priors.Point())
    bnn.observe(y, f, likelihoods.Gaussian(noise))


@pytest.mark.parametrize(
    ("model", "factors", "noise", "error", "says"),
    [
        (network, {"hidden.weight": 2.0}, None, UnknownNameError, "did you mean 'hidden0.weight'"),
        (network, {"hidden0.weight": np.ones(3)}, None, InputError, r"shape \(2, 3\); came shape \(3,\)"),
        (student, {"output.weight": 2.0}, None, UnsupportedError, "Normal prior at site 'output.weight'"),
        (student, {"output.bias": 2.0}, None, ModelError, "parameter without a prior"),
        (student, {}, 0.5, UnsupportedError, "noise that is a random variable"),
    ],
    ids=["absent", "shape", "family", "parameter", "noise"],
)
def test_factors_that_a_model_has_no_place_for_are_refused(
    ppl: str, model: Any, factors: Any, noise: float | None, error: type[BNNError], says: str
) -> None:
    tuned = with_precision_factors(model, factors, noise)
    with pytest.raises(error, match=says):
        bnn.MAP(ppl=ppl, steps=5).fit(tuned, X, Y, progress=False)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf, "2", np.array([1.0, 0.0]), np.zeros(0)])
def test_impossible_factors_are_refused_at_once(factor: Any) -> None:
    with pytest.raises(InputError, match="positive factors"):
        with_precision_factors(network, {"hidden0.weight": factor})


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, True, "1"])
def test_impossible_noise_is_refused_at_once(noise: Any) -> None:
    with pytest.raises(InputError, match="noise"):
        with_precision_factors(network, {}, noise)
