"""What a prior expects: draws in NumPy against SciPy and another system, and warnings only where they are due."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError
from ppl_bnn.diagnostics.prior_check import check_prior
from ppl_bnn.diagnostics.prior_draws import drawn_in_numpy, prior_predictive

ROOT = Path(__file__).resolve().parents[2]
X = np.random.default_rng(8).normal(size=(80, 4))
Y = X[:, 0] - 0.5 * X[:, 1] + 0.3 * np.random.default_rng(801).normal(size=80)
LABELS = (Y > 0).astype(np.int64)


# --- draws in NumPy ---------------------------------------------------------------------------------------


def mixture_cdf(z: np.ndarray) -> np.ndarray:
    return 0.3 * stats.norm.cdf(z) + 0.7 * stats.norm(0.0, 5.0).cdf(z)


NUMBERS: dict[str, tuple[dist.Distribution, Any]] = {
    "Normal": (dist.Normal(1.0, 2.0), stats.norm(1.0, 2.0).cdf),
    "HalfNormal": (dist.HalfNormal(2.0), stats.halfnorm(0.0, 2.0).cdf),
    "LogNormal": (dist.LogNormal(0.5, 0.3), stats.lognorm(0.3, scale=math.exp(0.5)).cdf),
    "StudentT": (dist.StudentT(3.0, 1.0, 2.0), stats.t(3.0, 1.0, 2.0).cdf),
    "Laplace": (dist.Laplace(1.0, 2.0), stats.laplace(1.0, 2.0).cdf),
    "Cauchy": (dist.Cauchy(1.0, 2.0), stats.cauchy(1.0, 2.0).cdf),
    "Logistic": (dist.Logistic(1.0, 2.0), stats.logistic(1.0, 2.0).cdf),
    "HalfCauchy": (dist.HalfCauchy(2.0), stats.halfcauchy(0.0, 2.0).cdf),
    "Gamma": (dist.Gamma(2.0, 3.0), stats.gamma(2.0, scale=1.0 / 3.0).cdf),
    "InverseGamma": (dist.InverseGamma(2.0, 3.0), stats.invgamma(2.0, scale=3.0).cdf),
    "Exponential": (dist.Exponential(2.0), stats.expon(scale=0.5).cdf),
    "Beta": (dist.Beta(2.0, 3.0), stats.beta(2.0, 3.0).cdf),
    "Uniform": (dist.Uniform(-1.0, 3.0), stats.uniform(-1.0, 4.0).cdf),
    "EmpiricalBayes": (dist.EmpiricalBayes(2.0), stats.norm(0.0, 2.0).cdf),
    "ImproperLogUniform": (dist.ImproperLogUniform(2.0), stats.norm(0.0, 2.0).cdf),
    "NormalMixture": (dist.NormalMixture((0.3, 0.7), (1.0, 5.0)), mixture_cdf),
}


@pytest.mark.parametrize("family", NUMBERS)
def test_draws_of_numbers_are_those_of_scipy(family: str) -> None:
    specification, cdf = NUMBERS[family]
    rng = np.random.default_rng(1)
    drawn = drawn_in_numpy(specification.expand((40, 50)).to_event(), rng)
    assert drawn.shape == (40, 50)
    # 20 seeds of all families: see the note on failure rates below.
    assert stats.kstest(drawn.ravel(), cdf).pvalue > 1e-4
    assert drawn_in_numpy(specification, rng).shape == ()


def test_arguments_may_differ_from_place_to_place() -> None:
    scale = np.array([1.0, 100.0])
    drawn = drawn_in_numpy(dist.Normal(0.0, scale).expand((3000, 2)), np.random.default_rng(2))
    np.testing.assert_allclose(drawn.std(axis=0), scale, rtol=5.0 / math.sqrt(2 * 3000))


def test_draws_of_vectors_and_matrices_have_their_covariance() -> None:
    rng, count = np.random.default_rng(3), 4000
    loc = np.arange(6.0).reshape(3, 2)
    factor = np.tril(rng.normal(size=(6, 6))) + 3.0 * np.eye(6)
    z = drawn_in_numpy(dist.MultivariateNormal(loc, factor).expand((count,)), rng)
    assert z.shape == (count, 3, 2)
    whitened = np.linalg.solve(factor, (z - loc).reshape(count, 6).T)
    assert stats.kstest(whitened.ravel(), "norm").pvalue > 1e-4
    np.testing.assert_allclose(np.cov(whitened), np.eye(6), atol=5.0 * math.sqrt(2.0 / count))
    logged = drawn_in_numpy(dist.MultivariateLogNormal(loc, factor), np.random.default_rng(4))
    plain = drawn_in_numpy(dist.MultivariateNormal(loc, factor), np.random.default_rng(4))
    np.testing.assert_allclose(np.log(logged), plain, rtol=1e-12)
    left, right = (np.linalg.qr(rng.normal(size=(size, size)))[0] for size in (3, 2))
    precisions = rng.uniform(0.5, 4.0, size=(3, 2))
    w = drawn_in_numpy(dist.KroneckerNormal(loc, left, right, precisions).expand((count,)), rng)
    both = np.kron(left, right)
    covariance = both @ np.diag(1.0 / precisions.ravel()) @ both.T
    np.testing.assert_allclose(
        np.cov((w - loc).reshape(count, 6).T), covariance, atol=5.0 * math.sqrt(2.0 / count) / 0.5
    )


def test_draws_of_a_simplex_and_of_correlations_have_their_margins() -> None:
    rng = np.random.default_rng(5)
    concentration = (1.0, 2.0, 3.0)
    p = drawn_in_numpy(dist.Dirichlet(concentration).expand((2000,)), rng)
    np.testing.assert_allclose(p.sum(axis=-1), 1.0, rtol=1e-12)
    for k, each in enumerate(concentration):
        assert stats.kstest(p[:, k], stats.beta(each, 6.0 - each).cdf).pvalue > 1e-4
    # Of D variables each correlation r has (r + 1) / 2 ~ Beta(a, a), a = concentration - 1 + D / 2.
    size, eta = 4, 1.5
    factor = drawn_in_numpy(dist.LKJCholesky(size, eta).expand((20_000,)), rng)
    correlation = factor @ np.swapaxes(factor, -1, -2)
    np.testing.assert_allclose(np.diagonal(correlation, axis1=-2, axis2=-1), 1.0, rtol=1e-12)
    assert (np.triu(factor, 1) == 0.0).all()
    margin = stats.beta(eta - 1.0 + size / 2.0, eta - 1.0 + size / 2.0)
    for row in range(size):
        for column in range(row):
            assert stats.kstest(0.5 * (correlation[:, row, column] + 1.0), margin.cdf).pvalue > 1e-4


def test_a_plate_has_one_draw_for_each_row() -> None:
    rng = np.random.default_rng(6)
    for specification, shape in (
        (dist.Normal(0.0, 1.0), (7,)),
        (dist.Normal(0.0, 1.0).expand((2,)).to_event(), (7, 2)),
        (dist.Normal(np.zeros(7), 1.0), (7,)),
        (dist.Dirichlet((1.0, 1.0)), (7, 2)),
        (dist.LKJCholesky(2, 1.0), (7, 2, 2)),
    ):
        drawn = drawn_in_numpy(specification, rng, rows=7)
        assert drawn.shape == shape
        assert len(np.unique(drawn.reshape(7, -1)[:, -1])) == 7
    with pytest.raises(UnsupportedError, match="Poisson"):
        drawn_in_numpy(dist.Poisson(1.0), rng)


def test_every_site_of_a_system_can_be_drawn_in_numpy() -> None:
    """The spread of f, in Pyro and here, of a model with scales, gates and a parameter."""

    def model(x: Any, y: Any = None) -> None:
        noise = bnn.sample("noise", dist.HalfNormal(1.0))
        prior = priors.Hierarchical(dist.HalfNormal(1.0), per="input", factor="fan_in")
        h = ops.tanh(bnn.dense("hidden0", x, 5, prior))
        gated = priors.SpikeAndSlab(0.5, relaxed=True, scale="fan_in")
        f = bnn.dense("output", h, 1, gated) + bnn.param("shift", np.zeros(()))
        bnn.observe(y, f, likelihoods.Gaussian(noise))

    found = check_prior(model, X, Y, draws=400)
    eta = prior_predictive(model, X, Y, draws=400, ppl="pyro").predictor(X)[0]
    low, high = np.quantile(eta[..., 0], [0.16, 0.84])
    # Rows of one draw are alike: as if there were one each, and a quantile of a normal then has an error of 5 %.
    assert found.figures["f_spread"] == pytest.approx(0.5 * (high - low), rel=0.25)
    assert found.figures["noise"] == pytest.approx(np.median(np.exp(eta[:, 0, 1])), rel=0.25)
    assert (found.draws, found.rows, found.sound) == (400, 50, True)


def test_figures_are_those_of_the_closed_form() -> None:
    """One input in four rows under a linear model: f ~ N(0, 4 scale^2 + 1) at each, and entropies of a known logit."""
    x, y = np.full((4, 1), 2.0), np.array([-1.0, 1.0, -1.0, 1.0])

    def linear(x: Any, y: Any = None) -> None:
        f = bnn.dense("output", x, 1, priors.Normal(0.0, 3.0), bias=priors.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihoods.Gaussian(0.5))

    found = check_prior(linear, x, y, draws=4000).figures
    sd = math.sqrt(37.0)
    # Half the difference of two quantiles of 4000 normals has a standard error of 1.6 % of sd.
    assert found["f_spread"] == pytest.approx(sd, rel=0.08)
    assert found["y_sd"] == 1.0
    assert found["noise"] == pytest.approx(0.5)
    assert found["outside"] == 0.0

    def logistic(x: Any, y: Any = None) -> None:
        f = bnn.dense("output", x, 1, priors.Normal(0.0, 3.0), bias=priors.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihoods.Bernoulli())

    found = check_prior(logistic, x, (y > 0).astype(int), draws=4000).figures
    p = stats.logistic.cdf(stats.norm.ppf(0.75) * sd)
    assert found["entropy"] == pytest.approx(float(stats.entropy([p, 1.0 - p], base=2)), abs=0.05)


# --- what is found, and what is not -----------------------------------------------------------------------


def network(
    x: Any,
    y: Any = None,
    *,
    hidden: float = 1.0,
    output: float = 1.0,
    noise: Any = None,
    activation: str = "tanh",
) -> None:
    scale = bnn.sample("noise", dist.HalfNormal(1.0)) if noise is None else noise
    each = [priors.Normal(0.0, "fan_in", hidden), priors.Normal(0.0, "fan_in", output)]
    bnn.observe(y, bnn.mlp(x, [10, 1], activation, each), likelihoods.Gaussian(scale))


def having(**keywords: Any) -> Any:
    return lambda x, y=None: network(x, y, **keywords)


def the_finding(model: Any, x: Any, y: Any, rule: str, **options: Any) -> Any:
    found = check_prior(model, x, y, **options)
    assert [each.rule for each in found.findings] == [rule], str(found)
    assert not found.sound
    assert found.warnings == (str(found.findings[0]),)
    return found.findings[0]


def test_a_sound_prior_is_called_nothing() -> None:
    found = check_prior(network, X, Y)
    assert found.sound
    assert found.warnings == ()
    assert str(found) == "100 draws from the prior at 50 rows: no problems found"


def test_the_layer_that_is_too_wide_is_named_with_its_priors() -> None:
    of_output = the_finding(having(output=100.0), X, Y, "functions")
    assert "layer 'output', output.weight ~ Normal(0, 31.62), output.bias ~ Normal(0, 100)" in of_output.found
    assert "times too wide" in of_output.found
    assert "smaller there" in of_output.advice
    # Under relu the size of the first layer goes through, under tanh it does not.
    of_hidden = the_finding(having(hidden=300.0, activation="relu"), X, Y, "functions")
    assert "layer 'hidden0', hidden0.weight ~ Normal(0, 150)" in of_hidden.found
    assert check_prior(having(hidden=300.0), X, Y).sound


def test_a_prior_that_is_too_narrow_is_found() -> None:
    narrow = the_finding(having(output=0.005), X, Y, "functions")
    assert "times too narrow" in narrow.found
    assert "layer 'output'" in narrow.found
    assert "larger there" in narrow.advice


def test_targets_in_other_units_are_blamed_on_no_layer() -> None:
    found = the_finding(network, X, 3000.0 * Y, "functions")
    assert "the last layer has output.weight ~ Normal(0, 0.3162), output.bias ~ Normal(0, 1)" in found.found
    assert found.advice.startswith("standardise=True")
    assert check_prior(network, X, 3000.0 * Y, standardise=True).sound


def test_targets_elsewhere_are_found() -> None:
    found = the_finding(network, X, 1000.0 + Y, "range")
    assert "100% of the targets" in found.found
    assert "output.bias ~ Normal(0, 1)" in found.found
    assert check_prior(network, X, 1000.0 + Y, standardise=True).sound


def test_inputs_in_other_units_are_named() -> None:
    def linear(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal()), likelihoods.Gaussian(1.0))

    found = the_finding(linear, 500.0 * X, Y, "functions")
    assert "inputs of size" in found.found
    assert found.advice == "standardise=True"


def test_noise_that_no_one_can_have_meant_is_found() -> None:
    for noise, words in ((5.0, "nothing would be left"), (1e-4, "all but a millionth")):
        found = the_finding(having(noise=noise), X, Y, "noise")
        assert f"noise = {noise:.4g}, which is given" in found.found
        assert words in found.found

    def sampled(x: Any, y: Any = None) -> None:
        network(x, y, noise=bnn.sample("spread", dist.LogNormal(5.0, 0.5)))

    assert "spread ~ LogNormal(5, 0.5)" in the_finding(sampled, X, Y, "noise").found
    assert check_prior(having(noise=1.0), X, Y).sound


def test_classes_that_are_certain_before_data_are_found() -> None:
    def classifier(x: Any, y: Any = None, *, scale: float = 1.0, classes: int = 3) -> None:
        f = bnn.mlp(x, [10, classes], "tanh", priors.Normal(0.0, "fan_in", scale))
        bnn.observe(y, f, likelihoods.Categorical())

    assert check_prior(classifier, X, LABELS).sound
    found = the_finding(lambda x, y=None: classifier(x, y, scale=200.0), X, LABELS, "classes")
    assert "layer 'output'" in found.found

    def logistic(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal()), likelihoods.Bernoulli())

    assert check_prior(logistic, X, LABELS).sound
    assert "inputs of size" in the_finding(logistic, 300.0 * X, LABELS, "classes").found
    assert check_prior(logistic, 300.0 * X, LABELS, standardise=True).sound


def test_counts_are_looked_at_on_the_scale_of_their_logarithm(rng: np.random.Generator) -> None:
    counts = rng.poisson(3.0, size=80)

    def poisson(x: Any, y: Any = None, *, scale: float = 1.0) -> None:
        bnn.observe(
            y, bnn.mlp(x, [10, 1], "tanh", priors.Normal(0.0, "fan_in", scale)), likelihoods.Poisson()
        )

    assert check_prior(poisson, X, counts).sound
    found = the_finding(poisson, X, 100_000 + counts, "range")
    assert "log(mean of y)" in found.advice
    rules = [
        each.rule for each in check_prior(lambda x, y=None: poisson(x, y, scale=20.0), X, counts).findings
    ]
    assert rules == ["rates"]


def test_draws_that_overflow_are_counted() -> None:
    def heavy(x: Any, y: Any = None) -> None:
        scale = bnn.sample("scale", dist.InverseGamma(0.002, 1.0))
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, scale)), likelihoods.Gaussian(1.0))

    found = check_prior(heavy, X, Y)
    assert found.findings[0].rule == "overflow"
    # P(Gamma(0.002) < 10^-308) = (10^-308)^0.002 / Gamma(1.002), and what is left overflows in products.
    assert found.figures["overflow"] == pytest.approx(10.0 ** (-308 * 0.002), abs=0.2)


def test_several_outputs_and_mixtures_are_looked_at_one_by_one() -> None:
    def two(x: Any, y: Any = None) -> None:
        factor = priors.CovarianceFactor()("noise", 2)
        bnn.observe(y, bnn.mlp(x, [10, 2], "tanh"), likelihoods.MultiOutputGaussian(factor))

    both = np.column_stack([Y, Y[::-1]])
    assert check_prior(two, X, both).sound
    found = the_finding(two, X, both * [1.0, 1000.0], "functions")
    assert "functions of output 1" in found.found

    def mixture(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [10, 6], "tanh"), likelihoods.MixtureDensity())

    assert check_prior(mixture, X, Y).sound
    the_finding(mixture, X, 1000.0 * Y, "functions")


def test_rows_that_interact_are_looked_at_together() -> None:
    x = {"features": np.repeat(X, 2, axis=0), "adjacency": np.zeros((160, 160), dtype=int)}

    def graph(x: Any, y: Any = None) -> None:
        bnn.coupled()
        neighbours = ops.matmul(ops.in_floats(x["adjacency"], like=x["features"]), x["features"])
        bnn.observe(y, bnn.mlp(x["features"] + neighbours, [5, 2]), likelihoods.Categorical())

    found = check_prior(graph, x, np.repeat(LABELS, 2))
    assert (found.rows, found.sound) == (160, True)


def test_large_networks_are_looked_at_in_fewer_rows_and_draws() -> None:
    wide = having_width(500)
    found = check_prior(wide, np.repeat(X, 2, axis=0), np.repeat(Y, 2))
    assert found.rows == 10
    assert 20 <= found.draws < 100
    assert found.sound


def having_width(width: int) -> Any:
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [width, width, 1], "tanh"), likelihoods.Gaussian(1.0))

    return model


def test_a_model_of_a_system_is_drawn_from_there() -> None:
    import pyro
    import pyro.distributions as pyro_dist
    import torch

    def plain(x: Any, y: Any = None) -> None:
        w = pyro.sample("w", pyro_dist.Normal(torch.zeros(4), torch.ones(4)).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("obs", pyro_dist.Normal(x @ w, 0.5), obs=y)

    assert check_prior(plain, X, Y, draws=50).sound
    found = the_finding(plain, X, 3000.0 * Y, "functions", draws=50)
    assert "the sites w" in found.found


def test_what_is_no_model_and_bad_input_are_refused() -> None:
    with pytest.raises(ModelError):
        check_prior(lambda x, y=None: None, X, Y)
    with pytest.raises(ModelError, match="two sites"):
        check_prior(lambda x, y=None: [bnn.sample("w", dist.Normal()) for _ in range(2)], X, Y)
    with pytest.raises(InputError, match="as many as x"):
        check_prior(network, X, Y[:-1])
    with pytest.raises(InputError, match="draws"):
        check_prior(network, X, Y, draws=1)


def test_the_same_seed_gives_the_same_figures() -> None:
    once, twice, other = (check_prior(network, X, Y, seed=seed).figures for seed in (0, 0, 1))
    assert once == twice
    assert once != other


def test_no_system_is_imported() -> None:
    program = """
import sys
import numpy as np
import ppl_bnn as bnn
from ppl_bnn.diagnostics.prior_check import check_prior
x = np.random.default_rng(0).normal(size=(50, 3))
model = bnn.zoo.load("regression_mlp")
assert check_prior(model, x, x[:, 0]).sound
assert not check_prior(model, x, 5000.0 * x[:, 0]).sound
assert not {"jax", "torch", "numpyro", "pyro"} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


# --- the zoo ----------------------------------------------------------------------------------------------


def table_of(name: str) -> bnn.data.Table:
    """The default data of a model of the zoo, where they are here without a network."""
    card = bnn.data.datasets()[bnn.zoo.models()[name].data or ""]
    if card.bytes and "PPL_BNN_DATA" not in os.environ:
        pytest.skip(f"{card.name} is not bundled")
    return bnn.data.load(card.name)


@pytest.mark.parametrize("name", sorted(bnn.zoo.models()))
def test_no_model_of_the_zoo_is_warned_of_on_its_default_data(name: str) -> None:
    table = table_of(name)
    found = check_prior(bnn.zoo.load(name), table.x, table.y, standardise=True)
    assert found.sound, str(found)


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, card in bnn.zoo.models().items()
        if bnn.data.datasets()[card.data or ""].task == "regression"
    ),
)
def test_every_regression_of_the_zoo_is_warned_of_on_targets_in_the_thousands(name: str) -> None:
    table = table_of(name)
    if table.y.ndim > 1 or name == "count_mlp":
        pytest.skip("its targets have no units")
    x = (table.x - table.x.mean(axis=0)) / table.x.std(axis=0)
    y = 5000.0 + 2000.0 * (table.y - table.y.mean()) / table.y.std()
    found = check_prior(bnn.zoo.load(name), x, y)
    assert [each.rule for each in found.findings] == ["functions"], str(found)


def test_a_prior_of_scale_100_is_warned_of() -> None:
    for name, keywords in (
        ("regression_mlp", {"sigma": 100.0}),
        ("linear_regression", {"scale": 100.0}),
        ("logistic_regression", {"scale": 100.0}),
        ("classification_mlp", {"sigma": 100.0}),
        ("evidence_framework", {"precision": 1e-4}),
        ("wide_network", {"sigma": 100.0, "width": 20}),
    ):
        table = table_of(name)
        found = check_prior(bnn.zoo.load(name, **keywords), table.x, table.y, standardise=True)
        assert not found.sound, name
        assert any("output" in line for line in found.warnings)
