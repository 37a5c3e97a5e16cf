"""Moments that pass through a program: closed forms, SciPy, draws of the weights, both systems, what is refused.

The comparison with draws (5 Monte-Carlo standard errors, 24 numbers each) failed at none of 20 seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import integrate
from scipy.stats import norm

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.language import activation_moments, moments
from ppl_bnn.language.moments import predictor_moments

NORMAL = priors.Normal(0.0, 1.0)
SHAPES = {"hidden0.weight": (3, 6), "hidden0.bias": (6,), "output.weight": (6, 2), "output.bias": (2,)}
ERRORS = 5.0


def network(activation: Any) -> Callable[..., None]:
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [6, 2], activation, NORMAL), likelihoods.Categorical())

    return model


def linear(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [2], prior=NORMAL), likelihoods.Gaussian(noise))


def normals(shapes: dict[str, tuple[int, ...]], seed: int = 0, spread: float = 1.0) -> tuple[Any, Any, Any]:
    """Means and variances of independent normals over sites, and three rows of inputs."""
    rng = np.random.default_rng(seed)
    loc = {name: np.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    variance = {
        name: np.asarray(spread * rng.uniform(0.05, 0.6, size=shape)) for name, shape in shapes.items()
    }
    return loc, variance, rng.normal(size=(3, 3))


def drawn(loc: Any, variance: Any, count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: loc[name] + np.sqrt(variance[name]) * rng.normal(size=(count, *np.shape(loc[name])))
        for name in loc
    }


def through(w: dict[str, np.ndarray], x: np.ndarray, activation: Callable[..., Any]) -> np.ndarray:
    """Outputs (S, N, 2) of the network of one hidden layer, written by hand."""
    h = activation(x @ w["hidden0.weight"] + w["hidden0.bias"][:, None])
    return h @ w["output.weight"] + w["output.bias"][:, None]


def moments_in(
    ppl: str, model: Any, values: Any, loc: Any, variance: Any, x: Any, first_order: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """`predictor_moments` in a system, from and to NumPy."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        w, m, v = ({name: chosen.asarray(v) for name, v in each.items()} for each in (values, loc, variance))
        mean, covariance = predictor_moments(model, w, m, v, chosen.asarray(x), first_order)
        return chosen.to_numpy(mean), chosen.to_numpy(covariance)


def check_against_draws(activation: str, seed: int, count: int = 100_000) -> None:
    """Means and all covariances of a row are those of draws, up to their Monte-Carlo errors.

    Spreads are moderate where the moments of the activation come from a quadrature.
    """
    spread = 1.0 if activation in (*activation_moments.CLOSED, "identity") else 0.1
    loc, variance, x = normals(SHAPES, seed, spread)
    mean, covariance = predictor_moments(network(activation), loc, loc, variance, x)
    f = through(drawn(loc, variance, count, seed + 1), x, ops.ACTIVATIONS[activation])
    error = f.std(0) / np.sqrt(count)
    np.testing.assert_array_less(np.abs(f.mean(0) - mean), ERRORS * error)
    products = np.einsum("snd,sne->snde", f - mean, f - mean)
    error = products.std(0) / np.sqrt(count)
    np.testing.assert_array_less(np.abs(products.mean(0) - covariance), ERRORS * error)


# --- oracles --------------------------------------------------------------------------------------------


def test_a_linear_layer_is_exact() -> None:
    shapes = {"output.weight": (3, 2), "output.bias": (2,), "noise": ()}
    loc, variance, x = normals(shapes)
    values = loc | {"noise": np.exp(loc["noise"])}
    mean, covariance = moments_in("pyro", linear, values, loc, variance, x)
    f = x @ loc["output.weight"] + loc["output.bias"]
    np.testing.assert_allclose(mean, np.c_[f, np.full((3, 2), loc["noise"])], rtol=1e-13)
    expected = np.zeros((3, 4, 4))
    expected[:, [0, 1], [0, 1]] = x**2 @ variance["output.weight"] + variance["output.bias"]
    # One noise for both outputs.
    expected[:, 2:, 2:] = variance["noise"]
    np.testing.assert_allclose(covariance, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sin", "gelu", "identity"])
def test_a_hidden_layer_has_the_moments_of_draws(activation: str) -> None:
    check_against_draws(activation, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "tanh", "sin", "gelu", "silu", "softplus", "sigmoid"])
def test_the_moments_of_draws_at_more_seeds(activation: str) -> None:
    for seed in (10, 20, 30):
        check_against_draws(activation, seed)


@pytest.mark.parametrize("fault", ["v_W v_h", "sign", "v_b"])
def test_draws_tell_a_wrong_formula(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right = moments.linear_map

    def wrong(applied: Any, x: Any, weight: Any, bias: Any) -> Any:
        found = right(applied, x, weight, bias)
        if isinstance(x, moments.Moments) and fault == "v_W v_h":
            found.own = found.own - applied(x.variance, weight.variance)
        if isinstance(x, moments.Moments) and fault == "sign":
            found.own = found.own - 2.0 * applied(x.mean**2, weight.variance)
        if fault == "v_b":
            found.own = found.own - bias.variance
        return found

    monkeypatch.setattr(moments, "linear_map", wrong)
    with pytest.raises(AssertionError):
        check_against_draws("tanh", seed=0)


def test_relu_has_the_published_moments() -> None:
    """Frey and Hinton (1999), through SciPy's normal distribution."""
    m, s = np.meshgrid(np.linspace(-4.0, 4.0, 17), [1e-3, 0.3, 1.0, 2.5])
    mean, variance, slope = activation_moments.relu(m, s**2)
    z = m / s
    first = m * norm.cdf(z) + s * norm.pdf(z)
    second = (m**2 + s**2) * norm.cdf(z) + m * s * norm.pdf(z)
    np.testing.assert_allclose(mean, first, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(variance, second - first**2, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(slope(), norm.cdf(z), rtol=1e-9, atol=1e-15)


def by_integration(function: Callable[..., Any], m: float, s: float) -> tuple[float, float]:
    def expected(g: Callable[[float], float]) -> float:
        return integrate.quad(lambda z: g(m + s * z) * norm.pdf(z), -10.0, 10.0, limit=200)[0]

    mean = expected(lambda x: float(function(np.float64(x))))
    return mean, expected(lambda x: (float(function(np.float64(x))) - mean) ** 2)


@pytest.mark.parametrize(
    ("name", "most"),
    [("sin", 1e-10), ("cos", 1e-10), ("exp", 1e-10), ("tanh", 1e-2), ("sigmoid", 1e-4), ("gelu", 1e-2)],
)
def test_moments_of_activations_against_integrals(name: str, most: float) -> None:
    """Closed forms to rounding; quadrature to `most` for a spread of 1, and far better for small ones."""
    function = getattr(ops, name)
    for m in (-2.0, -0.4, 0.0, 1.0):
        for s, bound in ((0.3, min(most, 1e-5)), (1.0, most)):
            root = moments.Moments(np.array(m), np.array(s * s), frozenset("w"), False, rowwise=False)
            found = root.apply(function, name)
            mean, variance = by_integration(function, m, s)
            assert abs(found.mean - mean) < bound * (1.0 + abs(mean))
            assert abs(found.variance - variance) < bound * (1.0 + variance)


@pytest.mark.parametrize(("s", "quadrature", "linearised"), [(0.7, 0.004, 0.75), (1.5, 0.08, 1.05)])
def test_the_quadrature_of_tanh_beside_its_linearisation(
    s: float, quadrature: float, linearised: float
) -> None:
    """The largest relative errors of the standard deviation over means within 3, as the docstring has them."""
    m = np.linspace(-3.0, 3.0, 25)
    exact = np.sqrt([by_integration(np.tanh, each, s)[1] for each in m])
    found = np.sqrt(activation_moments.quadrature(np.tanh, m, np.full_like(m, s * s))[1])
    slope = 1.0 - np.tanh(m) ** 2
    assert 0.5 * quadrature < np.abs(found / exact - 1.0).max() < quadrature
    assert 0.9 * linearised < np.abs(slope * s / exact - 1.0).max() < linearised


def test_without_spread_it_is_the_network() -> None:
    for activation in ("relu", "tanh", "sin"):
        loc, variance, x = normals(SHAPES, spread=0.0)
        mean, covariance = predictor_moments(network(activation), loc, loc, variance, x)
        one = {name: value[None] for name, value in loc.items()}
        np.testing.assert_allclose(mean, through(one, x, ops.ACTIVATIONS[activation])[0], rtol=1e-12)
        np.testing.assert_allclose(covariance, 0.0, atol=1e-15)


def test_products_with_a_scale_have_the_moments_of_products() -> None:
    """Weights s e with a random scale: E s E e and var s var e + (E s)^2 var e + var s (E e)^2."""

    def model(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, [2], prior=priors.Hierarchical(dist.HalfCauchy(1.0)), bias=False)
        bnn.observe(y, f, likelihoods.Categorical())

    shapes = {"output.weight.scale": (), "output.weight.base": (3, 2)}
    loc, variance, x = normals(shapes)
    values = loc | {"output.weight.scale": np.exp(loc["output.weight.scale"])}
    mean, covariance = moments_in("pyro", model, values, loc, variance, x)
    m, v = loc["output.weight.scale"], variance["output.weight.scale"]
    scale, square = np.exp(m + v / 2), np.exp(2 * m + 2 * v)
    base, spread = loc["output.weight.base"], variance["output.weight.base"]
    np.testing.assert_allclose(mean, x @ (scale * base), rtol=1e-12)
    each = square * (base**2 + spread) - scale**2 * base**2
    np.testing.assert_allclose(np.einsum("ndd->nd", covariance), x**2 @ each, rtol=1e-10)


def test_columns_of_one_output_keep_their_covariance() -> None:
    """The mean and the noise of a heteroscedastic network share hidden units, through log softplus too."""

    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [6, 2], "tanh", NORMAL), likelihoods.HeteroscedasticGaussian())

    loc, variance, x = normals(SHAPES, spread=0.05)
    _, covariance = predictor_moments(model, loc, loc, variance, x)
    f = through(drawn(loc, variance, 100_000, 3), x, np.tanh)
    eta = np.stack([f[..., 0], np.log(np.logaddexp(f[..., 1], 0.0))], -1)
    for row in range(3):
        expected = np.cov(eta[:, row].T)
        size = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
        assert np.abs(covariance[row] - expected).max() < 0.03 * size.max()
        assert abs(covariance[row, 0, 1]) > 0.0


# --- both systems ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "tanh", "silu"])
def test_both_systems_agree(ppl: str, activation: str) -> None:
    loc, variance, x = normals(SHAPES)
    expected = predictor_moments(network(activation), loc, loc, variance, x)
    found = moments_in(ppl, network(activation), loc, loc, variance, x)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_first_order_is_the_jacobian_times_the_variances(ppl: str) -> None:
    """eta at the means, and J V J' with J by differences of the network."""
    loc, variance, x = normals(SHAPES)

    def f(w: dict[str, np.ndarray]) -> np.ndarray:
        return through({name: value[None] for name, value in w.items()}, x, np.tanh)[0]

    expected = np.zeros((3, 2, 2))
    for name, value in loc.items():
        for at in np.ndindex(value.shape):
            step = np.zeros_like(value)
            step[at] = 1e-6
            slope = (f(loc | {name: value + step}) - f(loc | {name: value - step})) / 2e-6
            expected += variance[name][at] * slope[:, :, None] * slope[:, None, :]
    mean, covariance = moments_in(ppl, network("tanh"), loc, loc, variance, x, first_order=True)
    np.testing.assert_allclose(mean, f(loc), rtol=1e-12)
    np.testing.assert_allclose(covariance, expected, rtol=1e-6, atol=1e-9)


def test_the_cost_in_multiplications(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of the program; two products of matrices for the first layer, where nothing is random before."""
    runs, products = [], []
    right = moments.apply_map

    def counted(msg: Any, x: Any, weight: Any) -> Any:
        products.append((msg.name, x.shape[0] * weight.shape[0] * weight.shape[1]))
        return right(msg, x, weight)

    def model(x: Any, y: Any = None) -> None:
        runs.append(1)
        network("tanh")(x, y)

    monkeypatch.setattr(moments, "apply_map", counted)
    loc, variance, x = normals(SHAPES)
    predictor_moments(model, loc, loc, variance, x)
    assert len(runs) == 1
    assert [name for name, _ in products] == ["hidden0", "hidden0", "output", "output"]
    assert sum(size for _, size in products) == 2 * 3 * (3 * 6 + 6 * 2)


# --- what is refused ------------------------------------------------------------------------------------


def shared(x: Any, y: Any = None) -> None:
    h = ops.tanh(bnn.dense("a", x, 3, NORMAL))
    bnn.observe(y, h + ops.tanh(bnn.dense("b", h, 3, NORMAL)), likelihoods.Categorical())


def attended(x: Any, y: Any = None) -> None:
    h = bnn.attention("a", bnn.dense("b", x.reshape(x.shape[0], 3, 1), 2, NORMAL), 1, NORMAL)
    bnn.observe(y, h[:, 0], likelihoods.Categorical())


def convolved(x: Any, y: Any = None) -> None:
    h = bnn.conv1d("a", x.reshape(x.shape[0], 3, 1), 2, 2, prior=NORMAL)
    bnn.observe(y, h.reshape(x.shape[0], -1), likelihoods.Categorical())


def recurrent(x: Any, y: Any = None) -> None:
    f = bnn.lstm_classifier(x.reshape(x.shape[0], 3, 1), None, 2, 2, NORMAL)
    bnn.observe(y, f, likelihoods.Categorical())


def ordered(x: Any, y: Any = None) -> None:
    cuts = priors.CutPoints()("cuts", 3)
    bnn.observe(y, bnn.mlp(x, [1], prior=NORMAL, bias=False), likelihoods.Ordinal(cuts))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (shared, "both depend on 'a.bias', 'a.weight'"),
        (attended, "einsum"),
        (convolved, "a convolution, 'a'"),
        (recurrent, "positions share their weights"),
        (ordered, "'cuts.probabilities', a Dirichlet"),
    ],
)
def test_programs_without_moments_are_refused(model: Any, words: str) -> None:
    chosen = system("pyro")
    with chosen.session("float64", "cpu"):
        x, y = chosen.asarray(np.ones((3, 3))), chosen.asarray(np.array([0, 1, 1]))
        program = Program.of(chosen, model, x, y, language=True)
        u = {name: chosen.asarray(np.zeros(site.unconstrained_shape)) for name, site in program.sites.items()}
        w = program.constrain(u, x, y)
        with pytest.raises(UnsupportedError, match=r"kind='propagated'.*try kind='sampled'") as error:
            predictor_moments(model, w, u, {name: value + 1.0 for name, value in u.items()}, x)
    assert words in str(error.value)
