"""The curvature at a point against closed forms, in both systems."""

from __future__ import annotations

import numpy as np

import ppl_bnn as bnn
from ppl_bnn.inference.curvature import conditioning as module
from ppl_bnn.inference.curvature.conditioning import conditioning
from tests.problems import Conjugate, regression_data, small_network


def test_curvature_is_that_of_a_normal_posterior(ppl, monkeypatch):
    problem = Conjugate.make()
    posterior = bnn.fit(problem.model, problem.x, problem.y, bnn.MAP(ppl=ppl, steps=2))
    found = posterior.with_problem(lambda each: conditioning(each, np.zeros(4)))
    assert found is not None
    assert np.allclose(found.curvature, problem.precision, rtol=1e-8)
    size = np.sqrt(np.diag(problem.precision))
    values = np.linalg.eigvalsh(problem.precision / np.outer(size, size))
    assert np.allclose(found.scaled, values, rtol=1e-8)
    assert np.isclose(found.number, values[-1] / values[0], rtol=1e-8)
    assert np.allclose(found.variances, np.diag(problem.covariance), rtol=1e-8)
    for largest, known in ((4, True), (3, False)):
        monkeypatch.setattr(module, "LARGEST", largest)
        assert (posterior.with_problem(lambda each: conditioning(each, np.zeros(4))) is not None) == known


def test_nothing_is_said_where_the_curvature_is_not_positive():
    """A network whose weights are all zero is at a saddle."""
    x, y = regression_data(rows=20)
    posterior = bnn.fit(small_network, x, 10.0 * y, bnn.MAP(ppl="pyro", steps=2))
    size = posterior.with_problem(lambda each: each.program.parameter_count)
    assert posterior.with_problem(lambda each: conditioning(each, np.zeros(size))) is None
