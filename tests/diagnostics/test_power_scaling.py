"""Power-scaling against the distances of distributions that are known in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy
import xarray

import ppl_bnn as bnn
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.diagnostics.diagnose import diagnose
from ppl_bnn.diagnostics.power_scaling import LIMIT, Sensitivity, power_scaling
from ppl_bnn.inference.method import Outcome
from ppl_bnn.posterior.approximation import Chains, Point
from tests.diagnostics.test_diagnose import FEATURES, NOISE, Planted, data


def linear(sd: float, mean: float = 0.0) -> Any:
    """Bayesian linear regression, whose weights have the prior N(mean, sd^2)."""

    def model(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, [1], prior=bnn.priors.Normal(mean, sd), bias=False)
        bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))

    return model


def closed_form(sd: float, mean: float, prior: float = 1.0, likelihood: float = 1.0) -> Any:
    """Mean and covariance of the weights, with prior and likelihood to these powers."""
    x, y = data()
    covariance = np.linalg.inv(likelihood * x.T @ x / NOISE**2 + prior / sd**2 * np.eye(FEATURES))
    return covariance @ (likelihood * x.T @ y / NOISE**2 + prior * mean / sd**2), covariance


def fitted(sd: float, mean: float = 0.0, draws: int = 1000, seed: int = 0, **outcome: Any) -> Any:
    w = np.random.default_rng(seed).multivariate_normal(*closed_form(sd, mean), size=(4, draws))
    method = Planted(outcome=Outcome(Chains({"output.weight": w[..., None]}), **outcome), ppl="pyro")
    return method.fit(linear(sd, mean), *data())


def distance(p: Any, q: Any, low: float, high: float) -> float:
    """The cumulative Jensen-Shannon distance of Nguyen and Vreeken, the larger one of both directions."""
    t = np.linspace(low, high, 20_001)
    found = []
    for functions in ((p.cdf(t), q.cdf(t)), (p.sf(t), q.sf(t))):
        total = 0.0
        for one, other in (functions, functions[::-1]):
            inside = scipy.special.rel_entr(one, 0.5 * (one + other)) / np.log(2.0)
            total += np.trapezoid(inside + (other - one) / (2.0 * np.log(2.0)), t)
        found.append(np.sqrt(max(total, 0.0) / np.trapezoid(sum(functions), t)))
    return max(found)


@pytest.mark.parametrize(("sd", "mean"), [(1.0, 0.0), (0.1, 0.0), (0.2, 2.0), (3.0, 0.0)])
def test_sensitivities_are_those_of_the_scaled_posteriors(sd: float, mean: float) -> None:
    """Where another prior and another likelihood give a posterior that is known: no weights, no smoothing."""
    posterior = fitted(sd, mean, draws=4000)
    found = power_scaling(posterior)
    f = posterior.predictor(data()[0])[..., 0]
    assert found.prior.shape == found.likelihood.shape == (30,)
    for row in range(0, 30, 6):
        x, ends = data()[0][row], (f[..., row].min(), f[..., row].max())

        def at(x: Any = x, **powers: float) -> Any:
            centre, covariance = closed_form(sd, mean, **powers)
            return scipy.stats.norm(x @ centre, np.sqrt(x @ covariance @ x))

        for name, value in (("prior", found.prior[row]), ("likelihood", found.likelihood[row])):
            each = [
                distance(at(), at(**{name: power}), *ends) / abs(np.log2(power)) for power in (0.99, 1.01)
            ]
            assert value == pytest.approx(np.mean(each), abs=0.01, rel=0.1)


def test_a_diagnosis_says_what_prior_and_data_decide() -> None:
    plain = diagnose(fitted(1.0))
    assert "prior_sensitivity" not in plain.figures
    found = diagnose(fitted(1.0), sensitivity=True)
    assert found.verdict == plain.verdict == "converged"
    assert any("over 30 outputs at training rows" in reason for reason in found.reasons)
    assert not any("are sensitive" in reason for reason in found.reasons)
    assert not any("check_prior" in advice for advice in found.advice)
    # A prior that is narrow and far from what the data say; then one that is so narrow that they hardly count.
    conflict = diagnose(fitted(0.2, 2.0), sensitivity=True)
    assert conflict.verdict == "converged"
    assert conflict.figures["prior_conflict_share"] > 0.9
    assert any("both prior and likelihood, which may be in conflict" in reason for reason in conflict.reasons)
    assert any("check_prior" in advice for advice in conflict.advice)
    narrow = diagnose(fitted(0.02), sensitivity=True)
    assert narrow.figures["prior_dominance_share"] > 0.0
    assert narrow.figures["likelihood_sensitivity"] < LIMIT
    assert any("the prior and not to the likelihood" in reason for reason in narrow.reasons)


def test_the_limit_from_both_sides() -> None:
    for prior, likelihood, conflict, dominance in (
        (LIMIT + 1e-6, LIMIT + 1e-6, 1.0, 0.0),
        (LIMIT + 1e-6, LIMIT, 0.0, 1.0),
        (LIMIT, LIMIT + 1e-6, 0.0, 0.0),
    ):
        found = Sensitivity(np.array([prior]), np.array([likelihood]))
        assert found.figures["prior_conflict_share"] == conflict
        assert found.figures["prior_dominance_share"] == dominance
        assert len(found.findings) == 1 + int(conflict + dominance)


def test_the_prior_of_every_site_counts_at_the_values_of_the_program(ppl: str) -> None:
    """The density of a scale without the volume of its coordinate, as ArviZ finds it in the whole tree."""
    from arviz_stats.psense import psense

    def model(x: Any, y: Any = None) -> None:
        noise = bnn.sample("noise", bnn.dist.HalfNormal(0.2))
        f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 0.3), bias=False)
        bnn.observe(y, f, bnn.likelihoods.Gaussian(noise))

    posterior = bnn.fit(model, *data(), bnn.NUTS(ppl=ppl, warmup=30, draws=60, chains=2))
    tree = posterior.to_datatree()
    x = data()[0]
    f = np.einsum("cdij,ni->cdn", np.asarray(tree["posterior"]["output.weight"]), x)
    assert set(tree["log_prior"].data_vars) == {"noise", "output.weight"}
    tree["posterior"]["f"] = xarray.DataArray(f, dims=("chain", "draw", "row"))
    wanted = psense(tree, var_names=["f"], group="prior")["f"]
    # Each row has f and the logarithm of the noise.
    np.testing.assert_allclose(power_scaling(posterior).prior[::2], np.asarray(wanted), rtol=1e-6)


def test_what_has_no_sensitivity_is_refused() -> None:
    point = Planted(outcome=Outcome(Point({"output.weight": np.ones((FEATURES, 1))})), ppl="pyro")
    with pytest.raises(UnsupportedError, match="of kind 'point'"):
        diagnose(point.fit(linear(1.0), *data()), sensitivity=True)
    with pytest.raises(UnsupportedError, match="tempered"):
        diagnose(fitted(1.0, target="tempered: T=0.5"), sensitivity=True)
    same = Planted(outcome=Outcome(Chains({"output.weight": np.ones((2, 50, FEATURES, 1))})), ppl="pyro")
    with pytest.raises(UnsupportedError, match="outputs that vary over the draws"):
        power_scaling(same.fit(linear(1.0), *data()))
    stacked = bnn.stack(fitted(1.0, draws=50))
    with pytest.raises(UnsupportedError, match="all counted alike"):
        power_scaling(stacked)
