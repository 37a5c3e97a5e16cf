"""A posterior that is taken as the mode: it begins at the centre, says how far that is from a mode, or is refused.

And modes that lie on kinks, where the gradient does not vanish.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from scipy.optimize import linprog

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.laplace.fit import NO_MODE
from ppl_bnn.inference.optimisation.mode import RISE
from ppl_bnn.inference.variational.families.blocks import Mixture
from tests.problems import Conjugate, regression_data, small_network

PPL = pytest.mark.parametrize("ppl", ["pyro", "numpyro"])


def taken(problem, start, ppl="numpyro", **settings):
    method = bnn.Laplace(ppl=ppl, start=start, optimise=False, **settings)
    return bnn.fit(problem.model, problem.x, problem.y, method)


@PPL
def test_a_gaussian_posterior_is_taken_at_its_centre_not_at_a_draw(ppl):
    """On a conjugate model the evidence at the mode is the exact one; a draw of it is 2 nats off on average."""
    problem = Conjugate.make()
    fitted = bnn.fit(problem.model, problem.x, problem.y, bnn.Laplace(ppl=ppl, steps=200))
    assert fitted.kind == "iid"
    found = taken(problem, fitted, ppl)
    assert np.isclose(found.log_evidence, problem.log_evidence, rtol=0, atol=1e-8)
    assert found.info.figures["newton_gain"] < 1e-12
    assert found.info.figures["converged"] == 1.0
    assert found.info.warnings == ()
    for name, value in fitted.approximation.centre().items():
        assert np.array_equal(found.approximation.centre()[name], value)


def test_an_optimiser_begins_at_the_centre_of_a_gaussian_posterior():
    problem = Conjugate.make()
    fitted = bnn.fit(problem.model, problem.x, problem.y, bnn.Laplace(steps=200))
    still = {"steps": 1, "learning_rate": 1e-12}
    for method in (bnn.MAP(start=fitted, polish=False, **still), bnn.IVON(start=fitted, **still)):
        centre = bnn.fit(problem.model, problem.x, problem.y, method).approximation.centre()
        for name, value in fitted.approximation.centre().items():
            np.testing.assert_allclose(centre[name], value, atol=1e-9)


@pytest.mark.parametrize(("share", "mode"), [(0.9, True), (1.1, False)])
def test_a_point_that_is_no_mode_says_by_how_much_the_evidence_is_off(share, mode):
    """The log joint is quadratic, so what a Newton step gains is what the evidence lacks; both sides of the limit."""
    problem = Conjugate.make()
    direction = np.array([1.0, -1.0, 1.0, 0.5])
    size = np.sqrt(2.0 * share * NO_MODE / (direction @ problem.precision @ direction))
    at = problem.mean + size * direction
    start = bnn.fit(
        problem.model,
        problem.x,
        problem.y,
        bnn.MAP(
            start={"output.weight": at[:-1, None], "output.bias": at[-1:]},
            steps=1,
            learning_rate=1e-12,
            polish=False,
        ),
    )
    found = taken(problem, start)
    assert np.isclose(found.info.figures["newton_gain"], share * NO_MODE, rtol=1e-6)
    assert np.isclose(problem.log_evidence - found.log_evidence, share * NO_MODE, rtol=1e-6)
    assert bool(found.info.figures["converged"]) is mode
    assert any("not a mode" in text for text in found.info.warnings) is not mode
    assert (bnn.diagnose(found).verdict == "not converged") is not mode


@pytest.fixture(scope="module")
def without_centre():
    """Posteriors without a centre, by name; in Pyro where possible, which compiles nothing."""
    problem = Conjugate.make()
    methods = {
        "NUTS": bnn.NUTS(draws=5, warmup=5, chains=1, ppl="pyro"),
        "SVGD": bnn.SVGD(particles=3, steps=2, ppl="pyro"),
        "Ensemble": bnn.Ensemble(bnn.MAP(steps=100, ppl="pyro"), 2, ppl="pyro"),
        "SVI": bnn.SVI(guide=Mixture(2), steps=2, elbo_draws=50, ppl="pyro"),
        "Pathfinder": bnn.Pathfinder(paths=2, importance=False),
    }
    return problem, {
        name: bnn.fit(problem.model, problem.x, problem.y, method) for name, method in methods.items()
    }


def test_a_posterior_without_a_centre_is_refused_by_name(without_centre):
    problem, posteriors = without_centre
    for name, posterior in posteriors.items():
        with pytest.raises(UnsupportedError, match=f"with a centre.*got {name}.*optimise=True"):
            bnn.Laplace(start=posterior, optimise=False)
    # To begin an optimisation any draw will do, of chains or of the rest.
    for name in ("NUTS", "Ensemble"):
        method = bnn.Laplace(start=posteriors[name], steps=100, ppl="pyro")
        found = bnn.fit(problem.model, problem.x, problem.y, method)
        assert np.isclose(found.log_evidence, problem.log_evidence, atol=1e-6)


def test_a_method_without_a_centre_is_refused_before_it_is_fitted():
    for method in (bnn.NUTS(), bnn.SMC(), bnn.SVGD(), bnn.Ensemble(bnn.MAP(), 3), bnn.Stacked(bnn.NUTS())):
        with pytest.raises(UnsupportedError, match=rf"with a centre.*got {method.name}"):
            bnn.Laplace(start=method, optimise=False)
    # Whether a guide has a centre shows once it is fitted.
    problem = Conjugate.make()
    with pytest.raises(UnsupportedError, match=r"with a centre.*got SVI"):
        taken(problem, bnn.SVI(guide=Mixture(2), steps=2, elbo_draws=50))


def test_which_approximations_have_a_centre(without_centre):
    problem, posteriors = without_centre
    for posterior in posteriors.values():
        assert not posterior.approximation.has_centre
    for method in (
        bnn.MAP(steps=100, ppl="pyro"),
        bnn.SVI(steps=2, elbo_draws=50, ppl="pyro"),
        bnn.SVI(guide="fullrank", steps=2, elbo_draws=50, ppl="pyro"),
        bnn.SWAG(steps=100, collections=2, rank=2, burn_in=0, ppl="pyro"),
        bnn.Pathfinder(importance=False),
        bnn.IVON(steps=2, ppl="pyro"),
    ):
        approximation = bnn.fit(problem.model, problem.x, problem.y, method).approximation
        assert approximation.has_centre, method


# --- kinks ----------------------------------------------------------------------------------------


def median_regression(x, y=None):
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 1e4)), likelihoods.Laplace(0.5))


def absolute_shrinkage(x, y=None, *, scale):
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Laplace(0.0, scale)), likelihoods.Gaussian(0.5))


def test_a_median_regression_is_a_mode_on_kinks():
    """The minimum of the absolute residuals by linear programming: the mode is there, and is not called none."""
    problem = Conjugate.make(rows=21)
    design = problem.design
    rows, size = design.shape
    cost = np.concatenate([np.zeros(size), np.ones(2 * rows)])
    equal = np.hstack([design, np.eye(rows), -np.eye(rows)])
    bounds = [(None, None)] * size + [(0, None)] * (2 * rows)
    best = linprog(cost, A_eq=equal, b_eq=problem.y, bounds=bounds)
    for method in (bnn.MAP(ppl="pyro", steps=400), bnn.Laplace(ppl="pyro", steps=400)):
        posterior = bnn.fit(median_regression, problem.x, problem.y, method)
        centre = posterior.approximation.centre()
        weights = np.append(centre["output.weight"].ravel(), centre["output.bias"])
        # L-BFGS comes near a kink and not onto it.
        assert np.abs(problem.y - design @ weights).sum() < best.fun * (1.0 + 1e-3)
        assert posterior.info.figures["rise_along_gradient"] < RISE
        assert "gradient_norm" not in posterior.info.figures
        assert not any("not a mode" in text for text in posterior.info.warnings)
        reasons = " ".join(bnn.diagnose(posterior).reasons)
        assert "the log joint has kinks" in reasons
        assert "norm of the gradient" not in reasons


@pytest.mark.parametrize(
    "model", [median_regression, partial(absolute_shrinkage, scale=0.05)], ids=["likelihood", "prior"]
)
def test_a_point_away_from_the_kinks_is_no_mode(model):
    problem = Conjugate.make()
    away = {"output.weight": np.full((3, 1), 2.0), "output.bias": np.ones(1)}
    method = bnn.MAP(start=away, steps=1, learning_rate=1e-9, polish=False)
    posterior = bnn.fit(model, problem.x, problem.y, method)
    assert posterior.info.figures["rise_along_gradient"] > RISE
    assert any("not a mode: along its gradient" in text for text in posterior.info.warnings)


def test_both_sides_of_the_limit_of_the_rise():
    """One weight w with one row at 0: the log joint is -|w| / 0.5 but for a flat prior, and rises by |w| / 0.5."""

    def one_weight(x, y=None):
        w = bnn.sample("w", bnn.dist.Normal(0.0, 1e6))
        bnn.observe(y, w * x, likelihoods.Laplace(0.5))

    for rise in (0.9 * RISE, 1.1 * RISE):
        # A step length that the line search has: 2^-k. The scale of the input makes it as long as is needed.
        x = np.array([[0.5 * rise * 2.0**6]])
        method = bnn.MAP(start={"w": np.array(2.0**-6)}, steps=1, learning_rate=1e-12, polish=False)
        posterior = bnn.fit(one_weight, x, np.zeros(1), method)
        assert np.isclose(posterior.info.figures["rise_along_gradient"], rise, rtol=1e-6)
        assert any("not a mode" in text for text in posterior.info.warnings) is (rise > RISE)


def test_a_smooth_log_joint_is_judged_by_its_gradient():
    x, y = regression_data(rows=20)
    figures = bnn.fit(small_network, x, y, bnn.MAP(steps=200)).info.figures
    assert "gradient_norm" in figures
    assert "rise_along_gradient" not in figures


@pytest.mark.parametrize("settings", [{"curvature": "hessian"}, {"engine": "guide"}], ids=str)
def test_an_exact_hessian_of_a_density_with_kinks_is_refused(settings):
    """It would have nothing of the data: the Gaussian would be that of the prior."""
    problem = Conjugate.make()
    with pytest.raises(UnsupportedError, match=r"the Laplace likelihood.*curvature='ggn'"):
        bnn.fit(median_regression, problem.x, problem.y, bnn.Laplace(steps=100, **settings))
