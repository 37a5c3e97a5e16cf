"""Priors that are programs: their densities and draws against SciPy, in both systems and under the methods."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.integrate
import scipy.spatial.distance
import scipy.stats
from scipy.special import expit, logit, logsumexp

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.arrays import iterate_seeds
from ppl_bnn.core.errors import InputError, ModelError, UnknownNameError, UnsupportedError
from ppl_bnn.inference.method import Method
from ppl_bnn.language.distributions import SPECIAL, group_shape
from ppl_bnn.language.transforms import with_prior_scales

ROWS, INPUTS, OUTPUTS = 9, 4, 3
X = np.random.default_rng(31).normal(size=(ROWS, INPUTS))
Y = X @ np.random.default_rng(3101).normal(size=(INPUTS, OUTPUTS)) + 0.3 * np.random.default_rng(3102).normal(
    size=(ROWS, OUTPUTS)
)
NOISE = 0.4
Sites = Mapping[str, np.ndarray]
# By hand: (unconstrained values, name, fan_in) -> log p(w(u)) + log |dw/du| and the tensor.
ByHand = Callable[[Sites, str, int], tuple[float, np.ndarray]]


def on_reals(density: Any, u: np.ndarray) -> float:
    return float(np.sum(density.logpdf(u)))


def on_positives(density: Any, u: np.ndarray) -> tuple[float, np.ndarray]:
    """Log density of s = exp(u), its volume included, and s."""
    return float(np.sum(density.logpdf(np.exp(u)) + u)), np.exp(u)


NORMAL = scipy.stats.norm()


def plain(density: Callable[[int], Any]) -> ByHand:
    return lambda u, name, fan_in: (on_reals(density(fan_in), u[name]), u[name])


def mixture(probability: float, slab: float, spike: float) -> ByHand:
    def by_hand(u: Sites, name: str, fan_in: int) -> tuple[float, np.ndarray]:
        parts = [
            np.log(weight) + scipy.stats.norm(0, scale).logpdf(u[name])
            for weight, scale in ((probability, slab), (1 - probability, spike))
        ]
        return float(np.sum(logsumexp(parts, axis=0))), u[name]

    return by_hand


def relaxed(u: Sites, name: str, fan_in: int) -> tuple[float, np.ndarray]:
    gates = scipy.stats.logistic(logit(0.2) / 0.7, 1 / 0.7)
    total = on_reals(gates, u[f"{name}.logit"]) + on_reals(NORMAL, u[f"{name}.base"])
    return total, 1.5 * expit(u[f"{name}.logit"]) * u[f"{name}.base"]


def hierarchical(scale: Any, factor: Callable[[int], float]) -> ByHand:
    def by_hand(u: Sites, name: str, fan_in: int) -> tuple[float, np.ndarray]:
        total, s = on_positives(scale, u[f"{name}.scale"])
        return total + on_reals(NORMAL, u[f"{name}.base"]), factor(fan_in) * s * u[f"{name}.base"]

    return by_hand


def centred(u: Sites, name: str, fan_in: int) -> tuple[float, np.ndarray]:
    total, s = on_positives(scipy.stats.invgamma(2.0, scale=1.5), u[f"{name}.scale"])
    return total + on_reals(scipy.stats.norm(0, s), u[name]), u[name]


def horseshoe(scale: Callable[[int], float], slab: tuple[float, float] | None = None) -> ByHand:
    def by_hand(u: Sites, name: str, fan_in: int) -> tuple[float, np.ndarray]:
        total, tau = on_positives(scipy.stats.halfcauchy(scale=scale(fan_in)), u[f"{name}.global"])
        more, local = on_positives(scipy.stats.halfcauchy(), u[f"{name}.local"])
        total += more + on_reals(NORMAL, u[f"{name}.base"])
        if slab is not None:
            width, df = slab
            more, c2 = on_positives(scipy.stats.invgamma(df / 2, scale=df * width**2 / 2), u[f"{name}.slab"])
            total += more
            local = np.sqrt(c2 * local**2 / (c2 + tau**2 * local**2))
        return total, tau * local * u[f"{name}.base"]

    return by_hand


def scaled(
    hyper: Any, density: Any, factor: Callable[[int], float] = lambda fan_in: 1.0, loc: float = 0.0
) -> ByHand:
    """loc + factor * s * e with one s ~ hyper for the tensor."""

    def by_hand(u: Sites, name: str, fan_in: int) -> tuple[float, np.ndarray]:
        total, s = on_positives(hyper, u[f"{name}.scale"])
        return total + on_reals(density, u[f"{name}.base"]), loc + factor(fan_in) * s * u[f"{name}.base"]

    return by_hand


def nested(u: Sites, name: str, fan_in: int) -> tuple[float, np.ndarray]:
    """Three levels: t ~ HalfCauchy(1.2), s ~ HalfNormal(t) per unit, w = s e."""
    total, t = on_positives(scipy.stats.halfcauchy(scale=1.2), u[f"{name}.scale.scale"])
    more, s = on_positives(scipy.stats.halfnorm(scale=t), u[f"{name}.scale"])
    return total + more + on_reals(NORMAL, u[f"{name}.base"]), s * u[f"{name}.base"]


def decay(size: int) -> np.ndarray:
    """A covariance of any size: 0.6^|i - j|."""
    return 0.6 ** np.abs(np.subtract.outer(np.arange(size), np.arange(size)))


COLUMNS = np.array([[1.5, 0.3, -0.2], [0.3, 0.8, 0.1], [-0.2, 0.1, 1.1]])


def matrix_normal(u: Sites, name: str, fan_in: int) -> tuple[float, np.ndarray]:
    w = u[name]
    rows = decay(w.shape[0]) if w.ndim == 2 else np.ones((1, 1))
    covariance = 0.7**2 / fan_in * np.kron(rows, COLUMNS)
    return float(scipy.stats.multivariate_normal(np.zeros(w.size), covariance).logpdf(w.ravel())), w


def lkj(z: np.ndarray, concentration: float) -> tuple[float, np.ndarray]:
    """log p(C(u)) + log |dC/du| for three outputs, u = artanh of the partial correlations z, and C.

    The constant is that of Lewandowski, Kurowicka and Joe (2009), theorem 5: each partial correlation is a stretched
    beta variable, of which the density of C is the product, with the volume of C in z.
    """
    a, b, c = np.tanh(z)
    factor = np.array(
        [
            [1.0, 0.0, 0.0],
            [a, math.sqrt(1 - a**2), 0.0],
            [b, c * math.sqrt(1 - b**2), math.sqrt((1 - b**2) * (1 - c**2))],
        ]
    )
    # Given the first variable the second pair is of one dimension less.
    first = scipy.stats.beta(concentration + 0.5, concentration + 0.5)
    second = scipy.stats.beta(concentration, concentration)
    total = sum(first.logpdf((1 + r) / 2) for r in (a, b)) + second.logpdf((1 + c) / 2) - 3 * math.log(2.0)
    return float(total + np.log(1 - np.tanh(z) ** 2).sum()), factor


def unknown_columns(u: Sites, name: str, fan_in: int) -> tuple[float, np.ndarray]:
    total, s = on_positives(scipy.stats.halfnorm(scale=0.9), u[f"{name}.columns.scale"])
    more, factor = lkj(u[f"{name}.columns.correlation"], 2.0)
    base = u[f"{name}.base"]
    rows = decay(INPUTS)
    # Any root of the rows' covariance gives the same prior; this one is the eigenvectors times root eigenvalues.
    values, vectors = np.linalg.eigh(rows)
    w = (vectors * np.sqrt(values)) @ base @ (s[:, None] * factor).T
    return total + more + on_reals(NORMAL, base), w


CASES: dict[str, tuple[Any, ByHand]] = {
    "spike and slab": (priors.SpikeAndSlab(0.2, 1.5, 0.05), mixture(0.2, 1.5, 0.05)),
    "narrow spike": (priors.SpikeAndSlab(0.3, 2.0), mixture(0.3, 2.0, 0.02)),
    "relaxed": (priors.SpikeAndSlab(0.2, 1.5, relaxed=True, temperature=0.7), relaxed),
    **{
        f"hierarchical per {per}": (
            priors.Hierarchical(dist.HalfNormal(0.8), per=per),
            hierarchical(scipy.stats.halfnorm(scale=0.8), lambda fan_in: 1.0),
        )
        for per in ("tensor", "unit", "input", "weight")
    },
    "hierarchical fan-in": (
        priors.Hierarchical(dist.LogNormal(0.1, 0.6), factor="fan_in"),
        hierarchical(scipy.stats.lognorm(s=0.6, scale=math.exp(0.1)), lambda fan_in: 1.0 / math.sqrt(fan_in)),
    ),
    "centred": (priors.Hierarchical(dist.InverseGamma(2.0, 1.5), per="unit", centred=True), centred),
    **{
        f"horseshoe per {per}": (priors.Horseshoe(0.3, per=per), horseshoe(lambda fan_in: 0.3))
        for per in ("weight", "unit", "input")
    },
    "horseshoe fan-in": (
        priors.Horseshoe("fan_in", sigma=0.5),
        horseshoe(lambda fan_in: 0.5 / math.sqrt(fan_in)),
    ),
    "regularised horseshoe": (
        priors.RegularisedHorseshoe(0.3, slab_scale=1.5, slab_df=5.0),
        horseshoe(lambda fan_in: 0.3, (1.5, 5.0)),
    ),
    "normal of unknown scale": (
        priors.Normal(0.2, "fan_in", sigma=dist.HalfNormal(0.8)),
        scaled(scipy.stats.halfnorm(scale=0.8), NORMAL, lambda fan_in: 1 / math.sqrt(fan_in), 0.2),
    ),
    "laplace of unknown scale": (
        priors.Laplace(0.0, "fan_in", sigma=dist.LogNormal(0.1, 0.6)),
        scaled(
            scipy.stats.lognorm(s=0.6, scale=math.exp(0.1)),
            scipy.stats.laplace(),
            lambda fan_in: 1 / math.sqrt(2 * fan_in),
        ),
    ),
    "three levels": (priors.Hierarchical(dist.HalfNormal(dist.HalfCauchy(1.2)), per="unit"), nested),
    "matrix normal": (priors.MatrixNormal(decay, COLUMNS, "fan_in", sigma=0.7), matrix_normal),
    "matrix normal, unknown columns": (
        priors.MatrixNormal(decay, priors.CovarianceFactor(dist.HalfNormal(0.9), 2.0)),
        unknown_columns,
    ),
    # Those that only some methods know: to a system, the density that starts are drawn from, and 1 / |w|.
    "empirical bayes": (
        priors.EmpiricalBayes("unit"),
        plain(lambda fan_in: scipy.stats.norm(0, 1 / math.sqrt(fan_in))),
    ),
    "log uniform": (
        priors.LogUniform(),
        lambda u, name, fan_in: (-float(np.log(np.abs(u[name])).sum()), u[name]),
    ),
}


# Compiling takes the time of this file: the shape of a bias is tried where groups or the fan-in depend on it.
BIASED = (
    "matrix normal",
    "hierarchical per input",
    "hierarchical fan-in",
    "horseshoe fan-in",
    "empirical bayes",
)


def program_of(ppl: str, model: Any) -> Program:
    """The program of `model`, to be called inside a session."""
    chosen = system(ppl)
    return Program.of(chosen, model, chosen.asarray(X), chosen.asarray(Y), language=True)


def layers(cases: Mapping[str, Any]) -> Any:
    """The sum of one linear layer for each prior, with known noise. Weights are (I, O); some have biases (O,)."""

    def model(x: Any, y: Any = None) -> None:
        f = sum(bnn.dense(case, x, OUTPUTS, prior, case in BIASED) for case, prior in cases.items())
        bnn.observe(y, f, likelihoods.Gaussian(NOISE))

    return model


def test_one_density_written_by_hand_and_one_gradient_in_both_systems() -> None:
    """Each prior with its volume, the joint with what the computed weights predict, and the gradient of it all."""
    model = layers({case: prior for case, (prior, _) in CASES.items()})
    gradients = {}
    for ppl in ("numpyro", "pyro"):
        chosen = system(ppl)
        with chosen.session("float64", "cpu"):
            program = program_of(ppl, model)
            x, y = chosen.asarray(X), chosen.asarray(Y)
            flat = 0.8 * np.random.default_rng(0).normal(size=program.parameter_count)
            u = program.unravel(flat)
            found = dict.fromkeys(CASES, 0.0)
            for site in program.run(program.unravel(chosen.asarray(flat)), x, y):
                if site.kind == "latent":
                    density = site.distribution.log_prob(site.value).sum() + site.log_det
                    found[site.name.split(".")[0]] += float(density)
            f = np.zeros((ROWS, OUTPUTS))
            for case, (_, by_hand) in CASES.items():
                density, weight = by_hand(u, f"{case}.weight", INPUTS)
                f += X @ weight
                if case in BIASED:
                    more, bias = by_hand(u, f"{case}.bias", 1)
                    density, f = density + more, f + bias
                np.testing.assert_allclose(found[case], density, rtol=1e-9, err_msg=case)

            def log_joint(flat: Any, program: Any = program, x: Any = x, y: Any = y) -> Any:
                return program.log_joint(program.unravel(flat), x, y)

            gradient = chosen.compile(chosen.value_and_grad(log_joint))
            value, gradients[ppl] = map(chosen.to_numpy, gradient(chosen.asarray(flat)))
            likelihood = scipy.stats.norm(f, NOISE).logpdf(Y).sum()
            np.testing.assert_allclose(value, sum(found.values()) + likelihood, rtol=1e-9)
    largest = np.abs(gradients["pyro"]).max()
    np.testing.assert_allclose(gradients["numpyro"], gradients["pyro"], rtol=1e-10, atol=1e-10 * largest)


def test_far_tails_of_a_half_cauchy_leave_gradients_finite(ppl: str) -> None:
    """Local scales whose squares are zero in the floating type, and large ones."""
    chosen = system(ppl)
    model = layers({"plain": priors.Horseshoe(0.3), "regularised": priors.RegularisedHorseshoe(0.3)})
    for dtype, logarithms in (("float64", (-600.0, 300.0)), ("float32", (-80.0, 40.0))):
        with chosen.session(dtype, "cpu"):
            program = program_of(ppl, model)
            x, y = chosen.asarray(X), chosen.asarray(Y)

            def log_joint(flat: Any, program: Any = program, x: Any = x, y: Any = y) -> Any:
                return program.log_joint(program.unravel(flat), x, y)

            gradient_of = chosen.compile(chosen.value_and_grad(log_joint))
            for far in logarithms:
                u = {
                    name: np.full(site.unconstrained_shape, far if "local" in name else 0.3).ravel()
                    for name, site in program.sites.items()
                }
                value, gradient = gradient_of(chosen.asarray(np.concatenate(list(u.values()))))
                assert np.isfinite(float(value)), (dtype, far)
                assert np.isfinite(chosen.to_numpy(gradient)).all(), (dtype, far)


# --- kernels, covariances and cut points ------------------------------------------------------------------


def densities_of(ppl: str, model: Any, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, float], Any]:
    """Unconstrained values, and for each site its log density with its volume and its value."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        program = program_of(ppl, model)
        u = program.unravel(0.7 * np.random.default_rng(seed).normal(size=program.parameter_count))
        values = {name: chosen.asarray(value) for name, value in u.items()}
        sites = program.run(values, chosen.asarray(X), chosen.asarray(Y))
        latents = [site for site in sites if site.kind == "latent"]
        found = {
            site.name: float(site.distribution.log_prob(site.value).sum() + site.log_det) for site in latents
        }
        return u, found, {site.name: chosen.to_numpy(site.value) for site in sites}


def test_kernels_are_correlated_over_places_and_independent_over_channels(ppl: str) -> None:
    """Densities against SciPy with the covariance written element by element, and the computed kernel."""
    shape = (2, 3, 2, 2)

    def model(x: Any, y: Any = None) -> None:
        fixed = priors.CorrelatedConvolution(1.5, scale="fan_in", sigma=0.8)
        fixed("fixed", shape, 12)
        fixed("dense", (3, 2), 3)
        priors.CorrelatedConvolution(1.5, "squared_exponential")("line", (3, 2, 2), 6)
        priors.CorrelatedConvolution(dist.LogNormal(0.2, 0.3), scale=dist.HalfNormal(1.0))("free", shape, 12)
        bnn.observe(y, x[:, :OUTPUTS], likelihoods.Gaussian(1.0))

    u, densities, values = densities_of(ppl, model)

    def covariance(places: np.ndarray, channels: int, of: Callable[[float], float]) -> np.ndarray:
        index = [(tuple(a), c, o) for a in places for c in range(channels) for o in range(channels)]
        return np.array(
            [[of(math.dist(a, b)) if (c, o) == (d, p) else 0.0 for b, d, p in index] for a, c, o in index]
        )

    grid = np.array([(i, j) for i in range(2) for j in range(3)], dtype=float)
    fixed = covariance(grid, 2, lambda d: 0.8**2 / 12 * math.exp(-d / 1.5))
    line = covariance(np.arange(3.0)[:, None], 2, lambda d: math.exp(-((d / 1.5) ** 2)))
    for name, matrix in (("fixed", fixed), ("line", line), ("dense", 0.8**2 / 3 * np.eye(6))):
        normal = scipy.stats.multivariate_normal(np.zeros(len(matrix)), matrix)
        np.testing.assert_allclose(densities[name], normal.logpdf(u[name].ravel()), rtol=1e-9, err_msg=name)
    length = math.exp(float(u["free.length_scale"]))
    factor = np.linalg.cholesky(np.exp(-scipy.spatial.distance.cdist(grid, grid) / length))
    expected = math.exp(float(u["free.scale"])) * (factor @ u["free.base"].reshape(6, -1)).reshape(shape)
    np.testing.assert_allclose(values["free"], expected, rtol=1e-10)


def test_covariance_factors_and_cut_points(ppl: str) -> None:
    def model(x: Any, y: Any = None) -> None:
        priors.CovarianceFactor(dist.HalfNormal(0.9), 2.0)("three", 3)
        priors.CovarianceFactor(None)("correlation", 3)
        priors.CovarianceFactor()("one", 1)
        priors.CutPoints(2.0)("cuts", 4)
        bnn.observe(y, x[:, :OUTPUTS], likelihoods.Gaussian(1.0))

    u, densities, values = densities_of(ppl, model)
    for name, concentration in (("three", 2.0), ("correlation", 1.0)):
        density, factor = lkj(u[f"{name}.correlation"], concentration)
        np.testing.assert_allclose(densities[f"{name}.correlation"], density, rtol=1e-9)
        scale = np.exp(u["three.scale"]) if name == "three" else np.ones(3)
        np.testing.assert_allclose(values[name], scale[:, None] * factor, rtol=1e-10, atol=1e-14)
    assert values["one"].shape == (1, 1)
    p = values["cuts.probabilities"]
    np.testing.assert_allclose(np.diff(expit([-np.inf, *values["cuts"], np.inf])), p, rtol=1e-10)
    # The volume of the simplex coordinates is the systems' own business; the rest is SciPy's density.
    assert np.isfinite(densities["cuts.probabilities"])


def test_a_covariance_that_is_none_or_of_another_size_is_refused() -> None:
    wrong = {
        "positive definite": priors.MatrixNormal(None, np.ones((OUTPUTS, OUTPUTS))),
        "symmetric": priors.MatrixNormal(None, np.triu(np.ones((OUTPUTS, OUTPUTS)))),
        r"a covariance of shape \(4, 4\)": priors.MatrixNormal(np.eye(3)),
    }
    for says, prior in wrong.items():
        with pytest.raises((InputError, ModelError), match=says):
            densities_of("pyro", layers({"w": prior}))


def test_a_distribution_of_distributions_is_not_sampled_by_itself(ppl: str) -> None:
    def model(x: Any, y: Any = None) -> None:
        bnn.sample("s", dist.HalfNormal(dist.HalfNormal(1.0)))
        bnn.observe(y, x[:, :OUTPUTS], likelihoods.Gaussian(1.0))

    with pytest.raises(ModelError, match="drawing it first"):
        densities_of(ppl, model)


# --- draws ------------------------------------------------------------------------------------------

GROUPS = [((), "tensor"), ((5,), "unit"), ((4, 1), "input"), ((2, 3, 4, 5), "weight")]


def test_one_scale_for_each_group() -> None:
    for shape, per in GROUPS:
        assert group_shape(per, (2, 3, 4, 5)) == shape
    assert [group_shape(per, (5,)) for per in ("tensor", "unit", "input", "weight")] == [(), (5,), (1,), (5,)]
    assert group_shape("unit", ()) == ()


def test_sites_of_computed_weights_and_their_shapes(ppl: str) -> None:
    def model(x: Any, y: Any = None) -> None:
        images = x.reshape(ROWS, 2, 2, 1)
        h = bnn.conv2d("conv", images, 2, 2, prior=priors.Horseshoe(0.1, per="unit"))
        h = bnn.dense("hidden", h.reshape(ROWS, -1), 5, priors.Hierarchical(per="input"))
        prior = priors.RegularisedHorseshoe(0.1, per="input")
        f = bnn.dense("output", h, OUTPUTS, prior, bias=priors.SpikeAndSlab(0.5, relaxed=True))
        bnn.observe(y, f, likelihoods.Gaussian(NOISE))

    with system(ppl).session("float64", "cpu"):
        sites = program_of(ppl, model).sites
    assert {name: (site.shape, site.family) for name, site in sites.items()} == {
        "conv.weight.global": ((), "HalfCauchy"),
        "conv.weight.local": ((2,), "HalfCauchy"),
        "conv.weight.base": ((2, 2, 1, 2), "Normal"),
        "conv.bias.global": ((), "HalfCauchy"),
        "conv.bias.local": ((2,), "HalfCauchy"),
        "conv.bias.base": ((2,), "Normal"),
        "hidden.weight.scale": ((8, 1), "HalfNormal"),
        "hidden.weight.base": ((8, 5), "Normal"),
        "hidden.bias.scale": ((1,), "HalfNormal"),
        "hidden.bias.base": ((5,), "Normal"),
        "output.weight.global": ((), "HalfCauchy"),
        "output.weight.local": ((5, 1), "HalfCauchy"),
        "output.weight.slab": ((), "InverseGamma"),
        "output.weight.base": ((5, OUTPUTS), "Normal"),
        "output.bias.logit": ((OUTPUTS,), "Logistic"),
        "output.bias.base": ((OUTPUTS,), "Normal"),
    }


# E log |e| of a standard normal variable.
LOG_NORMAL = -0.5 * (np.euler_gamma + math.log(2.0))


def deviations(w: np.ndarray) -> np.ndarray:
    """log |w| less its expectation, for w = s * e with s from the half-normal distribution of scale 0.8."""
    return np.log(np.abs(w)) - math.log(0.8) - 2.0 * LOG_NORMAL


def log_product(scale: float, slab: tuple[float, float] | None) -> float:
    """E log of tau lambda, held by a slab where there is one, by quadrature.

    The product of two standard half-Cauchy variables has the density 4 / pi^2 * log(r) / (r^2 - 1).
    """
    t = np.linspace(-60.0, 60.0, 24_001)[:, None] + 1e-7
    # The density of t = log r; beside r = 1 its ratio is 1 / 2.
    density = 4.0 / math.pi**2 * t / (2.0 * np.sinh(t))
    log_r = t + math.log(scale)
    if slab is None:
        held, weights = log_r, np.ones(1)
    else:
        width, df = slab
        c2 = scipy.stats.invgamma(df / 2, scale=df * width**2 / 2).ppf((np.arange(2000) + 0.5) / 2000)
        held, weights = log_r - 0.5 * np.logaddexp(0.0, 2.0 * log_r - np.log(c2)), np.full(2000, 1 / 2000)
    return float(scipy.integrate.trapezoid((density * held) @ weights, t[:, 0]))


def mean_of_gates(function: Callable[[float], float], probability: float, temperature: float) -> float:
    gate = scipy.stats.logistic(logit(probability) / temperature, 1 / temperature)
    return float(
        scipy.integrate.quad(lambda t: function(float(expit(t))) * gate.pdf(t), -80, 80, limit=400)[0]
    )


SIZE = (INPUTS, OUTPUTS)
# A prior, a function of a draw's sites (draws, ...), and its expectation.
MOMENTS: dict[str, tuple[Any, Callable[[Sites], np.ndarray], float]] = {
    "second moment of a spike and slab": (
        priors.SpikeAndSlab(0.2, 1.5, 0.3, scale=2.0),
        lambda w: w["w"] ** 2,
        4.0 * (0.2 * 1.5**2 + 0.8 * 0.3**2),
    ),
    "open gates": (
        priors.SpikeAndSlab(0.2, relaxed=True, temperature=0.3),
        lambda w: np.asarray(w["w.gate"] > 0.5, float),
        0.2,
    ),
    "second moment of a relaxed spike and slab": (
        priors.SpikeAndSlab(0.4, 1.5, relaxed=True, scale="fan_in"),
        lambda w: w["w"] ** 2,
        1.5**2 / INPUTS * mean_of_gates(lambda z: z**2, 0.4, 0.5),
    ),
    "second moment of a hierarchical prior": (
        priors.Hierarchical(dist.HalfNormal(0.8), per="unit", factor="fan_in"),
        lambda w: w["w"] ** 2,
        0.8**2 / INPUTS,
    ),
    # Logarithms have light tails, where products of squares would need far more draws. The variance of log s, pi^2 / 8,
    # is what the logarithms of two weights share if they share s.
    "weights into one unit": (
        priors.Hierarchical(dist.HalfNormal(0.8), per="unit"),
        lambda w: deviations(w["w"])[:, 0] * deviations(w["w"])[:, 1],
        math.pi**2 / 8.0,
    ),
    "weights into other units": (
        priors.Hierarchical(dist.HalfNormal(0.8), per="unit"),
        lambda w: deviations(w["w"])[:, :, 0] * deviations(w["w"])[:, :, 1],
        0.0,
    ),
    "logarithm of a horseshoe": (
        priors.Horseshoe(0.3),
        lambda w: np.log(np.abs(w["w"])),
        log_product(0.3, None) + LOG_NORMAL,
    ),
    "share that a horseshoe takes away": (
        priors.Horseshoe(1.0),
        lambda w: (1.0 / (1.0 + w["w.local"] ** 2)) ** 2,
        float(scipy.stats.beta(0.5, 0.5).moment(2)),
    ),
    "logarithm of a regularised horseshoe": (
        priors.RegularisedHorseshoe(2.0, slab_scale=0.5, slab_df=3.0),
        lambda w: np.log(np.abs(w["w"])),
        log_product(2.0, (0.5, 3.0)) + LOG_NORMAL,
    ),
    "starts under empirical Bayes": (priors.EmpiricalBayes("tensor", start=0.7), lambda w: w["w"] ** 2, 0.49),
    "starts under a log-uniform prior": (priors.LogUniform(), lambda w: w["w"] ** 2, 1.0 / INPUTS),
}


def standard_errors_off(ppl: str, seed: int, draws: int = 800) -> dict[str, float]:
    """(mean - expectation) / standard error of each moment, over independent draws of all priors in one program."""
    chosen = system(ppl)

    def model(x: Any, y: Any = None) -> None:
        for index, (prior, _, _) in enumerate(MOMENTS.values()):
            prior(f"p{index}", SIZE, INPUTS)
        bnn.observe(y, x[:, :1], likelihoods.Gaussian(1.0))

    with chosen.session("float64", "cpu"):
        x, y = chosen.asarray(X), chosen.asarray(Y[:, 0])
        native = chosen.native(model, record=False)

        def values(key: Any) -> dict[str, Any]:
            return {site.name: site.value for site in chosen.run(native, x, y, seed=key)}

        seeds = chosen.seeds(seed, draws)
        if chosen.maps_randomness:
            found = {n: chosen.to_numpy(v) for n, v in chosen.compile(chosen.vmap(values))(seeds).items()}
        else:
            each = [{n: chosen.to_numpy(v) for n, v in values(key).items()} for key in iterate_seeds(seeds)]
            found = {name: np.stack([one[name] for one in each]) for name in each[0]}
    errors = {}
    for index, (name, (_, function, expectation)) in enumerate(MOMENTS.items()):
        own = {n.replace(f"p{index}", "w", 1): v for n, v in found.items() if n.split(".")[0] == f"p{index}"}
        one = function(own).reshape(draws, -1).mean(axis=1)
        errors[name] = (one.mean() - expectation) / (one.std(ddof=1) / math.sqrt(draws))
    return errors


@pytest.mark.parametrize("ppl", [pytest.param("numpyro", marks=pytest.mark.slow), "pyro"])
def test_draws_have_the_moments_of_the_prior(ppl: str) -> None:
    """Within four standard errors; each figure is one of independent draws."""
    errors = standard_errors_off(ppl, seed=1)
    assert max(map(abs, errors.values())) < 4.0, errors


# --- priors that only some methods know ---------------------------------------------------------------


class Reached(Exception):
    """The method was run."""


class Ignorant(Method):
    """A method that knows no special prior."""

    def run(self, problem: Any, progress: Any) -> Any:
        raise Reached


class Knowing(Ignorant):
    """One that knows empirical Bayes."""

    serves_priors: ClassVar[frozenset[str]] = frozenset({"EmpiricalBayes"})


def mixed(x: Any, y: Any = None, *, prior: Any = priors.EmpiricalBayes()) -> None:
    h = bnn.ops.tanh(bnn.dense("hidden", x, 3))
    bnn.observe(y, bnn.dense("output", h, OUTPUTS, prior), likelihoods.Gaussian(NOISE))


@pytest.mark.parametrize("method", [Ignorant, bnn.MAP, bnn.Laplace, bnn.NUTS])
def test_special_priors_are_refused_before_anything_runs(ppl: str, method: Any) -> None:
    for prior, name in ((priors.EmpiricalBayes(), "EmpiricalBayes"), (priors.LogUniform(), "LogUniform")):
        model = functools.partial(mixed, prior=prior)
        says = rf"{method.__name__}, site 'output\.weight'.*got priors\.{name}; try SVI"
        with pytest.raises(UnsupportedError, match=says):
            method(ppl=ppl).fit(model, X, Y, progress=False)


def test_a_method_is_given_the_priors_that_it_knows(ppl: str) -> None:
    with pytest.raises(Reached):
        Knowing(ppl=ppl).fit(mixed, X, Y, progress=False)
    with pytest.raises(UnsupportedError, match=r"priors\.LogUniform"):
        Knowing(ppl=ppl).fit(functools.partial(mixed, prior=priors.LogUniform()), X, Y, progress=False)


def test_numpyros_own_log_uniform_is_not_ours() -> None:
    import numpyro

    def model(x: Any, y: Any = None) -> None:
        scale = numpyro.sample("scale", numpyro.distributions.LogUniform(0.1, 1.0))
        numpyro.sample("y", numpyro.distributions.Normal(x[:, 0], scale).to_event(1), obs=y)

    with pytest.raises(Reached):
        Ignorant().fit(model, X, Y[:, 0], progress=False)


def test_special_priors_are_known_by_their_family_and_say_what_shares_a_scale(ppl: str) -> None:
    chosen = system(ppl)
    for per in ("weight", "unit", "tensor"):
        with chosen.session("float64", "cpu"):
            program = program_of(ppl, functools.partial(mixed, prior=priors.EmpiricalBayes(per)))
            assert program.sites["output.weight"].family == "EmpiricalBayes"
            sites = chosen.run(program.native, chosen.asarray(X), chosen.asarray(Y), seed=_seed(chosen))
            given = next(site.distribution for site in sites if site.name == "output.weight")
            while hasattr(given, "base_dist"):
                given = given.base_dist
            assert given.per == per
    with chosen.session("float64", "cpu"):
        program = program_of(ppl, functools.partial(mixed, prior=priors.LogUniform()))
        assert program.sites["output.bias"].family == "ImproperLogUniform"
    assert set(SPECIAL) == {"EmpiricalBayes", "ImproperLogUniform"}


def _seed(chosen: Any) -> Any:
    return next(iterate_seeds(chosen.seeds(0, 1)))


# --- the model at the scales found ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (OUTPUTS,), (3, OUTPUTS)], ids=["tensor", "unit", "weight"])
def test_the_model_at_the_scales_found_is_the_one_with_normal_priors(
    ppl: str, shape: tuple[int, ...]
) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    scales = np.linspace(0.5, 2.0, max(1, math.prod(shape))).reshape(shape)
    tuned = with_prior_scales(mixed, {"output.weight": scales, "output.bias": 0.3})
    assert tuned.__name__ == "mixed"
    chosen = system(ppl)
    for model in (tuned, cloudpickle.loads(cloudpickle.dumps(tuned))):
        with chosen.session("float64", "cpu"):
            program = program_of(ppl, model)
            assert {site.family for site in program.sites.values()} == {"Normal"}
            u = np.random.default_rng(2).normal(size=program.parameter_count)
            x, y = chosen.asarray(X), chosen.asarray(Y)
            value = float(program.log_prior(program.unravel(chosen.asarray(u)), x, y))
            w = program.unravel(u)
        expected = (
            scipy.stats.norm(0, 1 / math.sqrt(INPUTS)).logpdf(w["hidden.weight"]).sum()
            + scipy.stats.norm(0, 1).logpdf(w["hidden.bias"]).sum()
            + scipy.stats.norm(0, np.broadcast_to(scales, (3, OUTPUTS))).logpdf(w["output.weight"]).sum()
            + scipy.stats.norm(0, 0.3).logpdf(w["output.bias"]).sum()
        )
        np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_a_site_without_scales_keeps_its_prior(ppl: str) -> None:
    with system(ppl).session("float64", "cpu"):
        sites = program_of(ppl, with_prior_scales(mixed, {"output.weight": 0.5})).sites
    assert sites["output.weight"].family == "Normal"
    assert sites["output.bias"].family == "EmpiricalBayes"


@pytest.mark.parametrize(
    ("scales", "error", "says"),
    [
        ({"output.weight": 0.0}, InputError, "positive scales"),
        ({"output.weight": np.array([1.0, math.nan, 1.0])}, InputError, "positive scales"),
        ({"output.weight": "unit"}, InputError, "positive scales"),
        ({"output.weight": np.ones(4)}, InputError, r"numbers of shape \(3,\).*shape \(4,\)"),
        ({"output.weight": np.ones((3, 1))}, InputError, r"or of shape \(3, 3\).*shape \(3, 1\)"),
        ({"hidden.weight": 1.0}, UnsupportedError, "EmpiricalBayes at site 'hidden.weight'; got Normal"),
        ({"outputs.weight": 1.0}, UnknownNameError, "output.weight"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scales: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says), system("pyro").session("float64", "cpu"):
        program_of("pyro", with_prior_scales(mixed, scales))


# --- arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: priors.EmpiricalBayes("units"), UnknownNameError, "did you mean 'unit'"),
        (lambda: priors.EmpiricalBayes("input"), UnknownNameError, "known: tensor, unit, weight"),
        (lambda: priors.EmpiricalBayes(start=-1.0), InputError, "a positive scale"),
        (lambda: dist.EmpiricalBayes(1.0, "row"), UnknownNameError, "per of EmpiricalBayes"),
        (lambda: priors.LogUniform(0.0), InputError, "a positive scale"),
        (lambda: priors.SpikeAndSlab(1.0), InputError, "a probability between 0 and 1"),
        (lambda: priors.SpikeAndSlab(0.5, 1.0, 1.0), InputError, "a spike narrower than the slab"),
        (lambda: priors.SpikeAndSlab(0.5, spike=0.1, relaxed=True), InputError, "no spike with relaxed=True"),
        (lambda: priors.SpikeAndSlab(0.5, temperature=0.1), InputError, "no temperature with relaxed=False"),
        (lambda: priors.SpikeAndSlab(0.5, "fan_in"), InputError, "a positive number"),
        (lambda: priors.SpikeAndSlab(relaxed=True, temperature=0.0), InputError, "a positive number"),
        (lambda: priors.Hierarchical(1.0), InputError, "a distribution of one positive number"),
        (lambda: priors.Hierarchical(dist.Normal()), InputError, "got Normal"),
        (lambda: priors.Hierarchical(dist.HalfNormal().expand((3,))), InputError, "HalfNormal with a shape"),
        (lambda: priors.Hierarchical(per="row"), UnknownNameError, "per of priors.Hierarchical"),
        (lambda: priors.Hierarchical(factor="fanin"), InputError, "'fan_in'"),
        (lambda: priors.Horseshoe(-1.0), InputError, "a positive scale"),
        (lambda: priors.Horseshoe(per="tensor"), UnknownNameError, "known: input, unit, weight"),
        (lambda: priors.Horseshoe(1.0, sigma=2.0), InputError, "sigma with scale='fan_in' only"),
        (lambda: priors.RegularisedHorseshoe(slab_df=0.0), InputError, "a positive number"),
        (lambda: priors.RegularisedHorseshoe(slab_df=None), InputError, "a positive number"),  # pyright: ignore[reportArgumentType]
        (lambda: priors.CovarianceFactor(concentration=None), InputError, "a positive number"),  # pyright: ignore[reportArgumentType]
        (lambda: priors.ScaleMixture(scales=(dist.HalfNormal(1.0), 0.1)), InputError, "a number here"),  # pyright: ignore[reportArgumentType]
        (lambda: priors.ScaleMixture(scales=("a", 0.1)), InputError, "a number or 'fan_in'"),  # pyright: ignore[reportArgumentType]
        (lambda: priors.RegularisedHorseshoe(slab_scale=math.inf), InputError, "a positive scale"),
        (lambda: priors.Normal(0.0, dist.Normal()), InputError, "got Normal"),
        (lambda: priors.Normal(0.0, dist.HalfNormal().expand((2,))), InputError, "HalfNormal with a shape"),
        (lambda: priors.Normal(0.0, 2.0, dist.HalfNormal()), InputError, "sigma with scale='fan_in' only"),
        (lambda: priors.Normal(0.0, 2.0, "fan_in"), InputError, "a number as sigma"),
        (lambda: priors.Horseshoe(dist.HalfNormal()), InputError, "a number here"),
        (
            lambda: priors.Hierarchical(dist.HalfNormal(dist.Normal())),
            InputError,
            "scale of HalfNormal.*got Normal",
        ),
        (lambda: priors.Hierarchical(dist.LogNormal(dist.Bernoulli(0.3))), InputError, "got Bernoulli"),
        (lambda: priors.MatrixNormal(np.ones(3)), InputError, "a square matrix"),
        (lambda: priors.CorrelatedConvolution(0.0), InputError, "a positive number"),
        (lambda: priors.CorrelatedConvolution(kernel="exp"), UnknownNameError, "did you mean 'exponential'"),
        (lambda: priors.CovarianceFactor(dist.Normal()), InputError, "got Normal"),
        (lambda: priors.CovarianceFactor(concentration=-1.0), InputError, "a positive number"),
        (lambda: priors.CutPoints()("cuts", 1), InputError, "at least 2 classes"),
        (lambda: dist.LKJCholesky(1), InputError, "a whole number from 2"),
    ],
)
def test_impossible_arguments_are_refused_where_they_are_written(make: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make()


# --- methods --------------------------------------------------------------------------------------------


def sparse(x: Any, y: Any = None) -> None:
    """A network in which every weight is computed."""
    h = bnn.ops.tanh(bnn.dense("hidden", x, 2, priors.RegularisedHorseshoe(0.5, per="input")))
    prior = priors.Hierarchical(factor="fan_in")
    f = bnn.dense("output", h, OUTPUTS, prior, bias=priors.SpikeAndSlab(0.5, relaxed=True))
    bnn.observe(y, f, likelihoods.Gaussian(NOISE))


def f_by_hand(w: Sites, x: np.ndarray) -> np.ndarray:
    """(draws, N, O) of `sparse` from its latent sites, (draws, *shape)."""

    def horseshoe(name: str) -> np.ndarray:
        base = w[f"{name}.base"]
        # One scale per draw, against a weight (draws, I, O) or a bias (draws, O).
        tau, c2 = (w[f"{name}.{part}"].reshape(-1, *[1] * (base.ndim - 1)) for part in ("global", "slab"))
        local = w[f"{name}.local"]
        return base * tau * np.sqrt(c2 * local**2 / (c2 + tau**2 * local**2))

    h = np.tanh(x @ horseshoe("hidden.weight") + horseshoe("hidden.bias")[:, None])
    weight = w["output.weight.scale"][:, None, None] / math.sqrt(2) * w["output.weight.base"]
    bias = expit(w["output.bias.logit"]) * w["output.bias.base"]
    return h @ weight + bias[:, None]


def f_of_weights(w: Sites, x: np.ndarray) -> np.ndarray:
    """The same from the weights themselves, which a Laplace approximation hands out linearised."""
    h = np.tanh(x @ w["hidden.weight"] + w["hidden.bias"][:, None])
    return h @ w["output.weight"] + w["output.bias"][:, None]


SERVED = {
    "svi": lambda ppl: bnn.SVI(ppl=ppl, steps=50, elbo_draws=10),
    "laplace": lambda ppl: bnn.Laplace(ppl=ppl, steps=100),
    "nuts": lambda ppl: bnn.NUTS(
        ppl=ppl, draws=5, warmup=8, chains=1, max_tree_depth=3, chain_method="sequential"
    ),
}


# JAX compiles the other two for longer than torch takes to run them. Laplace of a network with computed weights in
# NumPyro is in test_computed_weights, NUTS under a horseshoe below.
@pytest.mark.parametrize(("ppl", "method"), [("numpyro", "svi"), *(("pyro", method) for method in SERVED)])
def test_computed_weights_are_served_and_predict_what_they_say(ppl: str, method: str) -> None:
    posterior = SERVED[method](ppl).fit(sparse, X, Y, device="cpu", progress=False)
    draws = posterior.draws
    flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in draws.items()}
    kinds = {"kind": "sampled"} if method == "laplace" else {}
    eta = posterior.predictor(X[:4], **kinds)[..., :OUTPUTS]
    expected = f_of_weights(flat, X[:4]) if method == "laplace" else f_by_hand(flat, X[:4])
    np.testing.assert_allclose(eta.reshape(-1, 4, OUTPUTS), expected, rtol=1e-9, atol=1e-12)


# --- one weight under a horseshoe, by numerical integration ---------------------------------------------

ONE_X = np.linspace(-1.0, 1.0, 9)[:, None]
ONE_Y = 0.6 * ONE_X[:, 0] + 0.4 * np.array([0.3, -1.2, 0.5, 0.9, -0.4, 0.1, -0.8, 1.1, 0.2])
ONE_SCALE = 0.4


def one_weight(x: Any, y: Any = None) -> None:
    f = bnn.dense("w", x, 1, priors.Horseshoe(ONE_SCALE), bias=False)
    bnn.observe(y, f, likelihoods.Gaussian(NOISE))


def exact_moments() -> tuple[float, float]:
    """E[w | y] and E[w^2 | y]: given r = tau lambda the posterior is normal, and r is integrated by quadrature."""
    t = np.linspace(-60.0, 60.0, 240_001) + 1e-7
    r2 = (ONE_SCALE * np.exp(t)) ** 2
    precision, information = (
        float(ONE_X[:, 0] @ ONE_X[:, 0]) / NOISE**2,
        float(ONE_X[:, 0] @ ONE_Y) / NOISE**2,
    )
    variance = r2 / (1.0 + r2 * precision)
    mean = variance * information
    log_evidence = 0.5 * mean * information - 0.5 * np.log1p(r2 * precision)
    weights = t / np.sinh(t) * np.exp(log_evidence)
    total = scipy.integrate.trapezoid(weights, t)
    first, second = (
        scipy.integrate.trapezoid(weights * moment, t) / total for moment in (mean, mean**2 + variance)
    )
    return float(first), float(second)


def horseshoe_errors(seed: int) -> list[float]:
    """Deviations of E[w], E[w^2] from the exact ones, in Monte-Carlo standard errors.

    In one system: the log joint and its gradient are the same in both, and torch takes minutes.
    """
    from arviz_stats.base import array_stats

    method = bnn.NUTS(draws=6000, warmup=1000, chains=4, target_accept=0.98)
    found = method.fit(one_weight, ONE_X, ONE_Y, seed=seed, device="cpu", progress=False).draws
    w = found["w.weight.global"] * (found["w.weight.local"] * found["w.weight.base"])[..., 0, 0]
    errors = []
    for value, truth in zip((w, w**2), exact_moments(), strict=True):
        mcse = float(array_stats.mcse(value, chain_axis=0, draw_axis=1, method="mean"))
        errors.append((value.mean() - truth) / mcse)
    return errors


def test_the_exact_moments_are_those_of_direct_integration() -> None:
    """The closed form given r, against a grid over w with the density of a horseshoe by quadrature at each w."""
    w = np.linspace(-3.0, 3.0, 1201) + 1e-4
    t = np.linspace(-40.0, 40.0, 4001) + 1e-7
    mixing = 4.0 / math.pi**2 * t / (2.0 * np.sinh(t))
    prior = scipy.integrate.trapezoid(
        mixing * scipy.stats.norm(0, ONE_SCALE * np.exp(t)).pdf(w[:, None]), t, axis=1
    )
    likelihood = np.exp(scipy.stats.norm(ONE_X @ w[None], NOISE).logpdf(ONE_Y[:, None]).sum(axis=0))
    total = scipy.integrate.trapezoid(prior * likelihood, w)
    found = [scipy.integrate.trapezoid(prior * likelihood * w**k, w) / total for k in (1, 2)]
    # The density has a logarithmic pole at zero, which a grid over w meets with an error of its spacing.
    np.testing.assert_allclose(found, exact_moments(), rtol=5e-3)


@pytest.mark.slow
def test_nuts_under_a_horseshoe_against_numerical_integration() -> None:
    assert max(map(abs, horseshoe_errors(seed=0))) < 5.0
