"""The complexity cost: closed forms against the systems' own divergences, quadrature, and the mean over draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import integrate, optimize, stats

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.variational.guides import Guide
from ppl_bnn.inference.variational.kl import (
    Divergence,
    empirical_cross_entropy,
    empirical_scale,
    laplace_cross_entropy,
    log_uniform_divergence,
    normal_cross_entropy,
)
from ppl_bnn.language.transforms import with_prior_scales

X = np.random.default_rng(1).normal(size=(5, 2))
Y = np.random.default_rng(101).normal(size=5)
SIGMAS = 4.5


# --- models -----------------------------------------------------------------------------------------


def finished(x: Any, y: Any, prior: Any, noise: Any = 0.5) -> None:
    bnn.observe(y, bnn.mlp(x, [3, 1], "tanh", prior), likelihoods.Gaussian(noise))


def normal(x: Any, y: Any = None) -> None:
    finished(x, y, priors.Normal(0.3, 0.7))


def several(x: Any, y: Any = None) -> None:
    """Laplace weights, a log-normal noise, and a Student-t site, which has no closed form."""
    noise = bnn.sample("noise", dist.LogNormal(-1.0, 0.4))
    shift = bnn.sample("shift", dist.StudentT(4.0, 0.0, 1.0))
    f = bnn.mlp(x, [3, 1], "tanh", priors.Laplace(0.2, 0.6)) + shift
    bnn.observe(y, f, likelihoods.Gaussian(noise))


def hierarchical(x: Any, y: Any = None) -> None:
    """The scale of one layer is a random variable; the prior of the other depends on nothing."""
    tau = bnn.sample("tau", dist.LogNormal(0.0, 0.5))
    weight = bnn.sample("inner.weight", dist.Normal(0.0, tau).expand((2, 3)).to_event())
    last = bnn.sample("output.weight", dist.Normal(0.0, 1.0).expand((3, 1)).to_event())
    bnn.observe(y, ops.tanh(x @ weight) @ last, likelihoods.Gaussian(0.5))


def empirical(x: Any, y: Any = None, *, per: str = "weight") -> None:
    finished(x, y, priors.EmpiricalBayes(per))


def log_uniform(x: Any, y: Any = None) -> None:
    finished(x, y, priors.LogUniform())


# --- at draws of a guide ------------------------------------------------------------------------------


class Bound:
    """A guide over a program at parameters away from its start."""

    def __init__(self, ppl: str, model: Any, family: Any, seed: int = 2):
        self.system = system(ppl)
        with self.system.session("float64", "cpu"):
            self.x, self.y = self.system.asarray(X), self.system.asarray(Y)
            self.program = Program.of(self.system, model, self.x, self.y, language=True)
            self.guide = Guide.of(family, self.program.sites.values())
            rng = np.random.default_rng(seed)
            u0 = {s.name: rng.normal(0.0, 0.6, s.unconstrained_shape) for s in self.program.sites.values()}
            scale = {name: rng.uniform(0.2, 0.6, value.shape) for name, value in u0.items()}
            started = self.guide.start(u0, scale, rng)
            # Factors start at zero or nearly so: dependence has to show.
            self.numpy = {
                name: value + 0.3 * rng.normal(size=value.shape) if "rho" not in name else value
                for name, value in started.items()
            }
            self.params = {name: self.system.asarray(value) for name, value in self.numpy.items()}
            self.u0 = {name: self.system.asarray(value) for name, value in u0.items()}

    def plan(self, analytic: bool = True) -> Divergence:
        with self.system.session("float64", "cpu"):
            problem = Problem(self.program, self.x, self.y, X, Y, 0, "cpu", "float64")
            return Divergence.of(problem, self.guide, analytic)

    def costs(self, plan: Divergence, draws: int, seed: int = 3) -> np.ndarray:
        """The cost at each of as many draws (S,), strata weighted."""
        strata, chosen = self.guide.strata, self.system
        shape = (draws, *((strata,) if strata > 1 else ()), self.guide.noise_size)
        eps = np.random.default_rng(seed).standard_normal(shape)

        def cost(u: Any, log_q: Any) -> Any:
            traced = chosen.run(self.program.native, self.x, self.y, values=u, unconstrained=True)
            return plan(traced, self.params, log_q)

        def one(eps: Any) -> Any:
            u, log_q = self.guide.draw(self.params, eps)
            if strata == 1:
                return cost(u, log_q)
            log_q = [ops.broadcast_to(each, (strata,)) for each in log_q]
            weights = ops.exp(self.guide.log_weights(self.params))
            return ops.sum(weights * chosen.vmap(cost)(u, log_q))

        with chosen.session("float64", "cpu"):
            return chosen.to_numpy(chosen.vmap(one)(chosen.asarray(eps)))

    def exact(self, plan: Divergence) -> float:
        """The value where nothing is taken at the draw."""
        assert set(plan.crosses) == set(plan.guide.names)
        assert all(plan.entropies)
        costs = self.costs(plan, 2)
        assert costs[0] == pytest.approx(costs[1], rel=1e-13)
        return float(costs[0])


def within(sample: np.ndarray, expected: float) -> None:
    error = sample.std(ddof=1) / math.sqrt(len(sample))
    assert abs(sample.mean() - expected) < SIGMAS * error, (sample.mean(), expected, error)


# --- against the systems' own divergences -----------------------------------------------------------------


def test_independent_normals_under_normal_priors_are_what_both_systems_say(ppl: str) -> None:
    import numpyro.distributions
    import torch

    bound = Bound(ppl, normal, "normal")
    loc, scale = bound.guide.loc_scale(bound.numpy)
    total = {"numpyro": 0.0, "pyro": 0.0}
    with system("numpyro").session("float64", "cpu"):
        for name in loc:
            q = numpyro.distributions.Normal(loc[name], scale[name])
            p = numpyro.distributions.Normal(np.full_like(loc[name], 0.3), np.full_like(loc[name], 0.7))
            total["numpyro"] += float(numpyro.distributions.kl_divergence(q, p).sum())
    for name in loc:
        q = torch.distributions.Normal(torch.tensor(loc[name]), torch.tensor(scale[name]))
        p = torch.distributions.Normal(torch.tensor(np.float64(0.3)), torch.tensor(np.float64(0.7)))
        total["pyro"] += float(torch.distributions.kl_divergence(q, p).sum())
    for expected in total.values():
        assert bound.exact(bound.plan()) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("family", ["lowrank", "fullrank"])
def test_joint_gaussians_under_normal_priors_are_what_torch_says(ppl: str, family: str) -> None:
    import torch

    bound = Bound(ppl, normal, family)
    prior = bound.guide.as_prior(bound.numpy)
    ((names, precision),) = prior.joint
    mean = torch.tensor(np.concatenate([prior.mode[name].reshape(-1) for name in names]))
    q = torch.distributions.MultivariateNormal(mean, precision_matrix=torch.tensor(precision))
    full = torch.full_like(mean, 0.3), 0.49 * torch.eye(len(mean), dtype=mean.dtype)
    p = torch.distributions.MultivariateNormal(*full)
    expected = float(torch.distributions.kl_divergence(q, p))
    assert bound.exact(bound.plan()) == pytest.approx(expected, rel=1e-10)


# --- the mean over draws --------------------------------------------------------------------------------

FAMILIES = [
    "normal",
    "lowrank",
    "fullrank",
    "matrixnormal",
    "mixture",
    {"hidden*": "fullrank", "*": "normal"},
]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("model", [normal, several, hierarchical], ids=lambda model: model.__name__)
def test_closed_forms_and_draws_have_one_mean(model: Any, family: Any) -> None:
    if isinstance(family, Mapping) and model is hierarchical:
        family = {"inner": "fullrank", "*": "normal"}
    # What is written over arrays of either system is written once; the systems take turns.
    ppl = "numpyro" if family == "normal" else "pyro"
    bound = Bound(ppl, model, family)
    draws = 1500
    drawn = bound.costs(bound.plan(analytic=False), draws)
    closed = bound.costs(bound.plan(), draws, seed=4)
    spread = math.hypot(drawn.std(ddof=1), closed.std(ddof=1)) / math.sqrt(draws)
    assert abs(drawn.mean() - closed.mean()) < SIGMAS * spread


@pytest.mark.parametrize(
    ("model", "family", "drawn", "entropies"),
    [
        (normal, "normal", (), (True,)),
        (normal, "mixture", (), (False,)),
        (normal, {"output": "delta", "*": "fullrank"}, (), (True, True)),
        (several, "normal", ("shift",), (True,)),
        (
            several,
            "mixture",
            ("shift", *(f"{n}.{p}" for n in ("hidden0", "output") for p in ("weight", "bias"))),
            (False,),
        ),
        (hierarchical, "normal", (), (True,)),
        (hierarchical, "fullrank", ("inner.weight",), (True,)),
        (hierarchical, "mixture", ("inner.weight",), (False,)),
        (hierarchical, {"tau": "normal", "*": "fullrank"}, (), (True, True)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_what_is_closed_is_told(ppl: str, model: Any, family: Any, drawn: Any, entropies: Any) -> None:
    """Given its parents a Normal site is closed only where q makes it independent of them."""
    plan = Bound(ppl, model, family).plan()
    assert set(plan.crosses) == set(plan.guide.names) - set(drawn)
    assert plan.entropies == entropies


def test_nothing_is_closed_where_it_is_not_asked_for(ppl: str) -> None:
    plan = Bound(ppl, several, "normal").plan(analytic=False)
    assert not plan.crosses
    assert not any(plan.entropies)


def test_the_cost_at_a_draw_is_minus_log_prior_plus_log_q(ppl: str) -> None:
    """Without closed forms it is the difference of what program and guide say."""
    bound = Bound(ppl, several, "fullrank")
    cost = bound.costs(bound.plan(analytic=False), 3, seed=5)
    eps = np.random.default_rng(5).standard_normal((3, bound.guide.noise_size))
    u, log_q = bound.guide.draw(bound.numpy, eps)
    with bound.system.session("float64", "cpu"):
        log_prior = bound.program.log_prior_draws(u, bound.x, bound.y)
    np.testing.assert_allclose(cost, sum(log_q) - log_prior, rtol=1e-10)


# --- closed forms of one coordinate ------------------------------------------------------------------------

MOMENTS = [(0.0, 1.0), (0.7, 0.3), (-2.0, 0.05), (5.0, 0.2), (0.01, 2.0)]


def expectation(function: Any, mean: float, scale: float, at: tuple[float, ...] = ()) -> float:
    """E of a function of N(mean, scale^2), by quadrature in standard units."""
    points = [(point - mean) / scale for point in at]
    value, error = 0.0, 0.0
    edges = sorted({-12.0, 12.0, *(point for point in points if -12 < point < 12)})
    for low, high in itertools.pairwise(edges):
        part = integrate.quad(
            lambda z: function(mean + scale * z) * stats.norm.pdf(z), low, high, epsabs=1e-13, limit=500
        )
        value, error = value + part[0], error + part[1]
    assert error < 1e-7
    return value


@pytest.mark.parametrize(("mean", "scale"), MOMENTS)
def test_cross_entropies_are_what_quadrature_says(mean: float, scale: float) -> None:
    arrays = np.array([mean]), np.array([scale**2])
    normal = expectation(lambda u: -stats.norm.logpdf(u, 0.4, 0.6), mean, scale)
    assert normal_cross_entropy(*arrays, 0.4, 0.6) == pytest.approx(normal, rel=1e-9)
    folded = expectation(lambda u: -stats.laplace.logpdf(u, 0.4, 0.6), mean, scale, at=(0.4,))
    assert laplace_cross_entropy(*arrays, 0.4, 0.6) == pytest.approx(folded, rel=1e-9)


@pytest.mark.parametrize("per", ["weight", "unit", "tensor"])
def test_empirical_bayes_is_at_the_scale_that_costs_least(per: str) -> None:
    """Against a search over the scale of each group, with scipy's own normal density."""
    rng = np.random.default_rng(6)
    mean, scale = rng.normal(size=(3, 2)), rng.uniform(0.1, 1.0, (3, 2))
    groups = {
        "weight": np.arange(6).reshape(3, 2),
        "unit": np.tile([0, 1], (3, 1)),
        "tensor": np.zeros((3, 2)),
    }[per]
    total, scales = 0.0, []
    for group in np.unique(groups):
        mu, sigma = mean[groups == group], scale[groups == group]

        def divergence(log_s: float, mu: Any = mu, sigma: Any = sigma) -> float:
            s = math.exp(log_s)
            return float((np.log(s / sigma) + (mu**2 + sigma**2) / (2.0 * s**2) - 0.5).sum())

        found: Any = optimize.minimize_scalar(
            divergence, bounds=(-5.0, 3.0), method="bounded", options={"xatol": 1e-10}
        )
        total += found.fun
        scales.append(math.exp(found.x))
    entropy = stats.norm.entropy(mean, scale).sum()
    assert empirical_cross_entropy(mean, scale**2, per) - entropy == pytest.approx(total, rel=1e-9)
    np.testing.assert_allclose(empirical_scale(mean, scale**2, per).reshape(-1), scales, rtol=1e-6)
    if per == "weight":
        assert total == pytest.approx(0.5 * np.log1p(mean**2 / scale**2).sum(), rel=1e-9)


def log_uniform_by_quadrature(alpha: float) -> float:
    """KL(N(1, alpha) || 1 / |w|), zero as alpha grows: E log|w| - log sigma + (Euler's gamma + log 2) / 2."""
    sigma = math.sqrt(alpha)
    mean = expectation(lambda w: math.log(abs(w)) if w else 0.0, 1.0, sigma, at=(0.0,))
    return mean - math.log(sigma) + 0.5 * (np.euler_gamma + math.log(2.0))


@pytest.mark.parametrize("log_alpha", [-8.0, -5.0, -3.5, -2.0, -1.0, 0.0, 1.0, 2.0, 8.0])
def test_the_approximation_of_the_log_uniform_divergence_is_as_near_as_it_says(log_alpha: float) -> None:
    """Its error, measured against quadrature, is below a hundredth of a nat per weight at all alpha."""
    alpha = math.exp(log_alpha)
    approximate = log_uniform_divergence(np.array([1.0]), np.array([alpha]))
    assert abs(approximate - log_uniform_by_quadrature(alpha)) < 0.01


@pytest.mark.parametrize(("log_alpha", "error"), [(-3.5, 0.0094), (-1.75, -0.0044)])
def test_the_largest_errors_of_the_log_uniform_divergence_are_those_it_states(
    log_alpha: float, error: float
) -> None:
    """Against quadrature: a constant of the formula that is off by a hundredth moves them by more than 0.0001."""
    alpha = math.exp(log_alpha)
    approximate = float(log_uniform_divergence(np.array([1.0]), np.array([alpha])))
    assert approximate - log_uniform_by_quadrature(alpha) == pytest.approx(error, abs=1e-4)


@pytest.mark.parametrize("alpha", [0.01, 0.3, 4.0])
def test_the_log_uniform_divergence_is_the_formula_of_its_source(alpha: float) -> None:
    """Molchanov, Ashukha and Vetrov (2017), equation 14, with the numbers of the article, for two weights."""
    gate = 1.0 / (1.0 + math.exp(-(1.87320 + 1.48695 * math.log(alpha))))
    one = 0.63576 - 0.63576 * gate + 0.5 * math.log1p(1.0 / alpha)
    mean = np.array([0.7, -2.0])
    assert float(log_uniform_divergence(mean, alpha * mean**2)) == pytest.approx(2.0 * one, rel=1e-12)


def test_the_log_uniform_divergence_depends_on_alpha_alone_and_has_a_gradient_at_zero(ppl: str) -> None:
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        mean, scale = np.array([2.0, -0.3]), np.array([0.5, 0.4])
        one = log_uniform_divergence(chosen.asarray(mean), chosen.asarray(scale**2))
        other = log_uniform_divergence(chosen.asarray(10.0 * mean), chosen.asarray(100.0 * scale**2))
        assert float(one) == pytest.approx(float(other), rel=1e-12)
        value, gradient = chosen.value_and_grad(log_uniform_divergence)(
            chosen.asarray(np.zeros(2)), chosen.asarray(scale)
        )
        assert float(value) == pytest.approx(0.0, abs=1e-15)
        np.testing.assert_array_equal(chosen.to_numpy(gradient), np.zeros(2))


# --- the two special priors in a program -----------------------------------------------------------------------


@pytest.mark.parametrize("per", ["weight", "unit", "tensor"])
def test_empirical_bayes_costs_what_the_normal_prior_at_its_scales_does(ppl: str, per: str) -> None:
    def model(x: Any, y: Any = None) -> None:
        empirical(x, y, per=per)

    bound = Bound(ppl, model, "normal")
    plan = bound.plan()
    scales = plan.prior_scales(bound.numpy)
    assert {name: value.shape for name, value in scales.items()} == {
        name: {"weight": site.shape, "unit": site.shape[-1:], "tensor": ()}[per]
        for name, site in bound.program.sites.items()
    }
    fixed = Bound(ppl, with_prior_scales(model, scales), "normal")
    assert bound.exact(plan) == pytest.approx(fixed.exact(fixed.plan()), rel=1e-10)


def test_a_log_uniform_prior_costs_its_approximation(ppl: str) -> None:
    bound = Bound(ppl, log_uniform, "normal")
    loc, scale = bound.guide.loc_scale(bound.numpy)
    expected = sum(float(log_uniform_divergence(loc[name], scale[name] ** 2)) for name in loc)
    assert bound.exact(bound.plan()) == pytest.approx(expected, rel=1e-9)
    # They have no density to be taken at a draw, so that a cross entropy in closed form is all there is.
    assert tuple(bound.plan(analytic=False).crosses) == bound.guide.names


@pytest.mark.parametrize("model", [empirical, log_uniform], ids=lambda model: model.__name__)
@pytest.mark.parametrize("family", ["fullrank", "delta", "mixture"])
def test_the_special_priors_are_refused_without_independent_normals(
    ppl: str, model: Any, family: str
) -> None:
    with pytest.raises(UnsupportedError, match="independent normals"):
        Bound(ppl, model, family).plan()
