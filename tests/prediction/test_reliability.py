"""Where predictions put what was observed, against SciPy, scikit-learn and the scores."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.calibration import calibration_curve

from ppl_bnn import scores
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import ARRAYS, BINS, LEVELS, Event, Transform


def test_the_transform_of_numbers_is_the_distribution_function(rng: np.random.Generator) -> None:
    mean, sd, y = rng.normal(size=(1, 50)), rng.uniform(0.5, 2.0, size=(1, 50)), rng.normal(size=50)
    found = Transform.of(Prediction("Normal", {"loc": mean, "scale": sd}), y)
    np.testing.assert_allclose(found.pit, stats.norm.cdf(y, mean[0], sd[0]), rtol=1e-10)
    assert found.at is found.pit
    assert not found.of_counts
    assert found.arrays().keys() == {"pit"}


def test_the_transform_of_counts_has_both_sides_of_a_jump(rng: np.random.Generator) -> None:
    rate, y = rng.uniform(0.5, 3.0, size=(1, 40)), rng.poisson(1.5, size=40).astype(float)
    prediction = Prediction("Poisson", {"rate": rate})
    found = Transform.of(prediction, y)
    np.testing.assert_allclose(found.below, stats.poisson.cdf(y - 1.0, rate[0]), atol=1e-12)
    np.testing.assert_allclose(found.at, stats.poisson.cdf(y, rate[0]), rtol=1e-10)
    assert ((found.below <= found.pit) & (found.pit <= found.at)).all()
    shares = scores.coverages(prediction, y, LEVELS)["coverage"]
    assert [found.covered(level) for level in LEVELS] == list(shares)
    assert found.of_counts
    assert found.arrays().keys() == {"pit", "cdf"}


@pytest.mark.parametrize("classes", [2, 4])
def test_a_reliability_diagram_is_that_of_scikit_learn(classes: int, rng: np.random.Generator) -> None:
    probability = rng.dirichlet(np.full(classes, 0.7), size=300)
    labels = rng.integers(0, classes, size=300)
    found = Event.of(Prediction("Categorical", {"probs": probability[None]}), labels)
    if classes == 2:
        predicted, happened = probability[:, 1], labels == 1
    else:
        predicted, happened = probability.max(axis=1), probability.argmax(axis=1) == labels
    share, mean = calibration_curve(happened, predicted, n_bins=BINS)
    made = found.binned()
    np.testing.assert_allclose(made["probability"], mean)
    np.testing.assert_allclose(made["share"], share)
    assert made["rows"].sum() == 300


def test_what_is_written_is_read_again_and_several_are_one(rng: np.random.Generator) -> None:
    y = rng.poisson(2.0, size=30).astype(float)
    counts = Transform.of(Prediction("Poisson", {"rate": np.full((1, 30), 2.0)}), y)
    numbers = Transform(*([rng.random(20)] * 3))
    labels = Event(rng.random(25), rng.random(25) < 0.5)
    for one in (counts, numbers, labels):
        arrays = one.arrays()
        assert arrays.keys() <= ARRAYS.keys()
        again = type(one).from_arrays(arrays)
        joined = type(one).joined([again, one])  # type: ignore[arg-type]
        for name, value in vars(one).items():
            np.testing.assert_array_equal(getattr(again, name), value)
            np.testing.assert_array_equal(getattr(joined, name), np.concatenate([value, value]))
