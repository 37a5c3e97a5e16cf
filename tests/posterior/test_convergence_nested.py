"""Nested R-hat: the paper's formula by hand, its relation to plain R-hat, and what it does and does not notice."""

from __future__ import annotations

import numpy as np
import pytest
from arviz_stats.base import array_stats
from scipy import stats

from ppl_bnn.posterior.convergence import mixing, nested_rhat


def plain_rhat(draws: np.ndarray) -> np.ndarray:
    return np.asarray(array_stats.rhat(draws, method="rank", chain_axis=0, draw_axis=1))


def halves(draws: np.ndarray, superchains: int) -> np.ndarray:
    """(chain, draw) as (superchain, half-chain, draw)."""
    chains, count = draws.shape
    half = count // 2
    grouped = draws.reshape(superchains, chains // superchains, count)
    return np.concatenate([grouped[..., :half], grouped[..., -half:]], axis=1)


def normal_scores(values: np.ndarray) -> np.ndarray:
    ranks = stats.rankdata(values).reshape(values.shape)
    return stats.norm.ppf((ranks - 3 / 8) / (values.size + 1 / 4))


def by_hand(draws: np.ndarray, superchains: int) -> float:
    """Equations 4 to 8 of Margossian et al. (2024) on the normal scores of ranks and of folded ranks."""
    found = []
    split = halves(draws, superchains)
    for values in (split, abs(split - np.median(split))):
        x = normal_scores(values)
        means = x.mean(axis=2)
        within = x.var(axis=2, ddof=1).mean(axis=1) + means.var(axis=1, ddof=1)
        found.append(np.sqrt(1 + means.mean(axis=1).var(ddof=1) / within.mean()))
    return max(found)


@pytest.mark.parametrize(
    ("superchains", "per", "count"), [(2, 1, 4), (2, 3, 5), (5, 2, 10), (4, 8, 9), (3, 1, 8)]
)
def test_the_formula_by_hand(superchains, per, count):
    rng = np.random.default_rng(superchains + count)
    starts = np.repeat(rng.normal(size=superchains), per)[:, None, None]
    draws = rng.normal(size=(superchains * per, count, 3)) * [1.0, 2.0, 0.1] + starts * [0.0, 1.0, 3.0]
    found = nested_rhat(draws, superchains)
    wanted = [by_hand(draws[..., j], superchains) for j in range(3)]
    assert found.shape == (3,)
    assert np.allclose(found, wanted, rtol=1e-12)
    assert found[0] >= 1


def test_relation_to_plain_rhat():
    """One chain per superchain whose halves are alike: B_k = 0, and both are made of the same two variances.

    With n = N / 2 draws per half and B' the variance over all 2K half-chains, plain R-hat^2 = (n - 1) / n + B' / W and
    B' = B 2 (K - 1) / (2K - 1).
    """
    chains, half = 6, 50
    rng = np.random.default_rng(4)
    once = rng.normal(size=(chains, half, 2)) + rng.normal(size=(chains, 1, 2)) * [0.1, 1.0]
    draws = np.concatenate([once, once], axis=1)
    between = nested_rhat(draws, chains) ** 2 - 1
    share = 2 * (chains - 1) / (2 * chains - 1)
    assert np.allclose(plain_rhat(draws) ** 2 - (half - 1) / half, between * share, rtol=1e-10)


def autoregressive(rng, chains, count, correlation, start):
    x = np.empty((chains, count))
    state = np.asarray(start, float)
    for index in range(count):
        state = correlation * state + np.sqrt(1 - correlation**2) * rng.normal(size=chains)
        x[:, index] = state
    return x[..., None]


def test_many_short_chains_that_have_converged():
    """40 draws of 64 chains with correlation 0.5: 850 effective draws, of which plain R-hat sees 13 at a time."""
    rng = np.random.default_rng(5)
    draws = autoregressive(rng, 64, 40, 0.5, rng.normal(size=64))
    assert plain_rhat(draws)[0] > 1.02
    assert nested_rhat(draws, 4)[0] < 1.01


def test_chains_that_have_not_forgotten_their_start():
    rng = np.random.default_rng(6)
    start = np.repeat(3.0 * rng.normal(size=8), 8)
    slow = autoregressive(rng, 64, 40, 0.99, start)
    assert nested_rhat(slow, 8)[0] > 1.3
    # It sees scales, too: the folded ranks.
    spread = rng.normal(size=(64, 40, 1)) * np.repeat(2.0 ** np.arange(8), 8)[:, None, None]
    assert nested_rhat(spread, 8)[0] > 1.3


def test_chains_stuck_in_modes_that_each_superchain_has_alike():
    """What nested R-hat cannot see and the docstring says: the start is forgotten, and yet no chain mixes."""
    rng = np.random.default_rng(7)
    modes = np.tile([-5.0, 5.0], 32)[:, None, None]
    draws = modes + rng.normal(size=(64, 100, 1))
    assert nested_rhat(draws, 8)[0] < 1.01
    # Scores of two halves of a normal: means +-sqrt(2 / pi), and the rest of the variance within.
    assert abs(plain_rhat(draws)[0] - np.sqrt(np.pi / (np.pi - 2))) < 0.02


def test_components_with_nothing_to_compare():
    rng = np.random.default_rng(8)
    draws = rng.normal(size=(8, 20, 4))
    draws[3, 7, 0] = np.nan
    draws[..., 1] = np.arange(8)[:, None]
    draws[..., 2] = 2.5
    found = [mixing(draws[..., [column]], 4).rhat for column in range(4)]
    assert found[0] == np.inf
    assert found[1] == np.inf
    assert np.isnan(found[2])
    assert 1 <= found[3] < 1.2
    assert found[3] == nested_rhat(draws[..., 3:], 4)[0]
    assert np.isinf(mixing(draws[:, :3, 3:], 4).rhat)
