"""Class labels that are text or numbers from 1, and posteriors that are pickled."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.prediction.scores import accuracy

X = np.random.default_rng(60).normal(size=(30, 2))
NOISY = X[:, 0] + 0.3 * np.random.default_rng(61).normal(size=30)
CODES = np.digitize(X[:, 0], [-0.5, 0.5])
TEXT = np.array(["high", "low", "middle"])


def classes(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.dense("f", x, 3), likelihoods.Categorical())


def line(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.dense("f", x, 1), likelihoods.Gaussian(noise))


def fitted(y: Any) -> Any:
    return bnn.MAP(steps=60, polish=False).fit(classes, X, y, progress=False)


@pytest.mark.parametrize("named", [TEXT, np.array([1, 2, 3])], ids=["text", "from 1"])
def test_labels_stand_for_classes_and_are_kept(named: np.ndarray, tmp_path) -> None:
    """The same fit as of 0..K-1, draws and densities of y in the labels that were given."""
    plain = fitted(CODES)
    with pytest.warns(UserWarning, match="are the classes 0 to 2, in this order"):
        posterior = fitted(named[CODES])
    assert posterior.labels == tuple(named.tolist())
    expected, prediction = plain.predict(X), posterior.predict(X)
    np.testing.assert_array_equal(prediction.probabilities, expected.probabilities)
    assert prediction.class_names == tuple(map(str, named))
    np.testing.assert_array_equal(prediction.log_prob(named[CODES]), expected.log_prob(CODES))
    np.testing.assert_array_equal(prediction.sample(3, 0), named[expected.sample(3, 0)])
    np.testing.assert_array_equal(posterior.log_likelihood(X, named[CODES]), plain.log_likelihood(X, CODES))
    assert accuracy(prediction, named[CODES]) == accuracy(expected, CODES)
    loaded = bnn.load(posterior.save(tmp_path / "saved"), classes)
    np.testing.assert_array_equal(loaded.predict(X).sample(3, 0), prediction.sample(3, 0))
    with pytest.raises(InputError, match="labels among"):
        prediction.log_prob(np.full(30, 0))


def test_labels_from_zero_are_taken_as_they_are(recwarn) -> None:
    assert fitted(CODES).labels is None
    assert not recwarn.list


@pytest.mark.parametrize(
    "method",
    [
        bnn.MAP(steps=40, polish=False),
        bnn.MAP(steps=40, polish=False, ppl="pyro"),
        bnn.SVI(steps=40),
        bnn.Laplace(),
        bnn.NUTS(warmup=20, draws=10, chains=2),
        bnn.Ensemble(bnn.MAP(steps=40, polish=False), size=2),
    ],
    ids=lambda method: f"{method.name}-{method.ppl}",
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_posterior_is_pickled_without_what_is_compiled(method: Any) -> None:
    posterior = method.fit(line, X, NOISY, progress=False)
    expected = posterior.predict(X)
    back = pickle.loads(pickle.dumps(posterior))
    assert back.programs == {}
    np.testing.assert_array_equal(back.predict(X).mean, expected.mean)
    for name, draws in posterior.draws.items():
        np.testing.assert_array_equal(back.draws[name], draws)


def test_a_posterior_of_a_local_function_is_refused_by_pickle_and_sent_by_value() -> None:
    def local(x: Any, y: Any = None) -> None:
        line(x, y)

    posterior = bnn.MAP(steps=10, polish=False).fit(local, X, NOISY, progress=False)
    with pytest.raises(UnsupportedError, match=r"can be imported.*local.*posterior.save"):
        pickle.dumps(posterior)
    back = pickle.loads(cloudpickle.dumps(posterior))
    np.testing.assert_array_equal(back.predict(X).mean, posterior.predict(X).mean)
