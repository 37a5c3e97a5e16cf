"""Independent normals as an approximation: what variational dropout reads out of them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from ppl_bnn.inference.variational.mean_field import MeanField


@pytest.fixture
def q() -> MeanField:
    loc = {"weight": np.array([[2.0, 0.01], [-0.5, 0.0]]), "bias": np.array([1.0])}
    scale = {"weight": np.array([[0.1, 0.2], [0.5, 0.3]])}
    return MeanField(loc, scale)


def test_log_alpha_is_noise_over_signal(q: MeanField) -> None:
    assert np.allclose(
        q.log_alpha()["weight"], [[2.0 * np.log(0.05), 2.0 * np.log(20.0)], [0.0, np.inf]], atol=1e-12
    )
    assert set(q.log_alpha()) == {"weight"}


def test_pruned_weights_are_zero_and_leave_the_density(q: MeanField) -> None:
    kept = q.pruned()
    draws = kept.draw(500, np.random.default_rng(0))
    assert np.all(draws["weight"][:, [0, 1], [1, 1]] == 0.0)
    assert np.all(draws["weight"][:, [0, 1], [0, 0]].std(0) > 0.0)
    expected = stats.norm(2.0, 0.1).logpdf(draws["weight"][:, 0, 0]) + stats.norm(-0.5, 0.5).logpdf(
        draws["weight"][:, 1, 0]
    )
    assert np.allclose(kept.log_prob(draws), expected, rtol=1e-12)
    assert np.array_equal(q.pruned(np.inf).scale["weight"], q.scale["weight"])


def test_what_was_pruned_stays_so_in_a_file(q: MeanField) -> None:
    again = MeanField.from_arrays(q.pruned().arrays())
    assert np.array_equal(again.loc["weight"], q.pruned().loc["weight"])
    assert np.array_equal(again.scale["weight"], q.pruned().scale["weight"])
