"""The Pyro system: predictions of many draws from recorded operations are those that torch.func maps; its threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.backends import pyro as module
from ppl_bnn.backends.program import Program, threads_for
from ppl_bnn.backends.pyro import SYSTEM
from tests.problems import regression_data, small_classifier, small_network

KNOWN = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)


def network(w, given):
    x, _ = given
    return (torch.relu(x @ w["a"] + w["b"]) @ w["c"]).T


def written_over(w, given):
    """What is written in place by the model itself, read twice, or not the model's own must not be overwritten."""
    x, _ = given
    h = x @ w["a"]
    h = h + KNOWN
    again = h * 2.0
    h.mul_(3.0)
    h[:, 0:1] = 0.5
    return ((torch.relu(KNOWN * 2.0) * (h + again) + h) @ w["c"]).T


def scaled_by_a_value(w, given):
    x, _ = given
    return (x @ w["a"] * x.max().item() @ w["c"]).T


def decided_by_a_value(w, given):
    x, _ = given
    h = x @ w["a"]
    return ((torch.relu(h) if (x > 3.0).any() else torch.tanh(h)) @ w["c"]).T


def read_into_numpy(w, given):
    x, _ = given
    return (x @ w["a"] * float(np.mean(x.numpy())) @ w["c"]).T


def with_noise(w, given):
    x, _ = given
    return network(w, given) + torch.randn(1, len(x))


def problem(seed, draws=29, rows=11):
    rng = np.random.default_rng(seed)
    w = {
        "a": rng.normal(size=(draws, 3, 5)),
        "b": rng.normal(size=(draws, 5)),
        "c": rng.normal(size=(draws, 5, 1)),
    }
    return {name: SYSTEM.asarray(value) for name, value in w.items()}, SYSTEM.asarray(
        rng.normal(size=(rows, 3))
    )


@pytest.fixture
def recorded(monkeypatch):
    """Whatever is computed for several draws is recorded, `draws` at a time; the list has what got of each try."""
    found, original = [], module.Pyro._recorded

    def record(self, *arguments):
        found.append(original(self, *arguments))
        return found[-1]

    def begin(draws):
        monkeypatch.setattr(module, "RECORDED_BLOCKS", 0)
        # The widest array in a draw of `problem` has 11 rows of 5 columns.
        monkeypatch.setattr(module, "BLOCK", 8 * 11 * 5 * draws)
        monkeypatch.setattr(module.Pyro, "_recorded", record)
        return found

    return begin


@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize(
    ("function", "can"),
    [
        (network, True),
        (written_over, True),
        (scaled_by_a_value, True),
        (decided_by_a_value, False),
        (read_into_numpy, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_recorded_operations_compute_what_the_function_does(recorded, function, can, draws):
    known = KNOWN.clone()
    tries = recorded(draws)
    with SYSTEM.session("float64", "cpu"):
        batched = SYSTEM.batched(function, 8)
        # A second call has other weights and rows of the same shapes: nothing of the first may be left in the record.
        for seed in (0, 1):
            w, x = problem(seed)
            into = np.full((29, 1, 9), np.nan)  # the last rows are padding
            batched(w, (x, None), into)
            each = [function({k: v[i] for k, v in w.items()}, (x, None)).numpy() for i in range(29)]
            np.testing.assert_allclose(into, np.stack(each)[..., :9], rtol=1e-12, atol=1e-12)
    assert [found and found[0] for found in tries] == [draws if can else None]
    assert torch.equal(KNOWN, known)


@pytest.mark.parametrize("draws", [1, 4])
def test_random_numbers_are_drawn_anew_each_time(recorded, draws):
    tries = recorded(draws)
    with SYSTEM.session("float64", "cpu"):
        batched = SYSTEM.batched(with_noise, 8)
        w, x = problem(0)
        into = np.zeros((2, 28, 1, 11))
        for each in into:
            batched(w, (x, None), each)
        exact = np.stack([network({k: v[i] for k, v in w.items()}, (x, None)).numpy() for i in range(28)])
    assert tries[0] is not None
    noise = (into - exact).reshape(-1)
    assert len(np.unique(noise)) == noise.size


def test_an_error_of_the_model_is_the_one_without_a_record(recorded):
    recorded(1)

    def wrong(w, given):
        return given[0] @ w["c"]

    with SYSTEM.session("float64", "cpu"):
        w, x = problem(0)
        with pytest.raises(RuntimeError, match="size"):
            SYSTEM.batched(wrong, 8)(w, (x, None), np.zeros((29, 1, 11)))


@pytest.mark.parametrize("model", [small_network, small_classifier])
@pytest.mark.parametrize("method", [bnn.SVI(ppl="pyro", steps=20), bnn.Laplace(ppl="pyro", steps=50)])
def test_predictions_do_not_depend_on_the_record(recorded, monkeypatch, model, method):
    x, y = regression_data(30)
    y = y if model is small_network else np.digitize(y, [-0.5, 0.5])
    posterior = bnn.fit(model, x, y, method)
    plain = posterior.predict(x, draws=100, kind=posterior.approximation.kinds[0])
    eta = posterior.predictor(x, draws=100)
    tries = recorded(1)
    # Programs keep what they have compiled, which here is another function than before.
    for program in posterior.programs.values():
        program._compiled.clear()
    assert np.allclose(posterior.predictor(x, draws=100), eta, rtol=1e-12, atol=1e-12)
    again = posterior.predict(x, draws=100, kind=posterior.approximation.kinds[0])
    for name, value in plain.parameters.items():
        np.testing.assert_allclose(again.parameters[name], value, rtol=1e-12, atol=1e-12)
    assert tries
    assert all(found is not None for found in tries)


def test_small_work_takes_one_thread() -> None:
    """The operations of a network count, also of weights that are held and of those that a convolution shares."""
    body = torch.nn.Sequential(torch.nn.Linear(3, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 1))
    seen: list[int] = []

    def held(x: Any, y: Any = None) -> None:
        seen.append(torch.get_num_threads())
        f = bnn.module("net", x, body, {"2.bias": priors.Normal(0.0, 1.0), "*": None})
        bnn.observe(y, f, likelihoods.Gaussian(1.0))

    def convolved(x: Any, y: Any = None) -> None:
        h = bnn.conv2d("images", x, 4, kernel=3)
        f = bnn.dense("output", h.reshape(x.shape[0], -1), 1)
        bnn.observe(y, f, likelihoods.Gaussian(1.0))

    with SYSTEM.session("float64", "cpu", 1):
        for model, shape, expected in (
            (held, (6, 3), 2 * 6 * (3 * 1000 + 1000)),
            (convolved, (6, 8, 8, 1), 2 * 6 * 64 * (9 * 4 + 4)),
        ):
            x, y = torch.ones(shape), torch.ones(6)
            # A module is checked at a few rows where it is first run, which is no work of the model.
            with SYSTEM.counted() as count:
                Program.of(SYSTEM, model, x, y, language=True)
            assert count() == expected
    assert threads_for(49_999_999) == 1
    assert threads_for(50_000_000) is None
    own, found = torch.get_num_threads(), {}
    try:
        torch.set_num_threads(3)
        # 8000 operations for each row.
        for rows in (6_200, 6_300):
            seen.clear()
            x = np.random.default_rng(rows).normal(size=(rows, 3))
            bnn.fit(held, x, x[:, 0], bnn.MAP(ppl="pyro", steps=1))
            found[rows] = seen[-1]
    finally:
        torch.set_num_threads(own)
    assert found == {6_200: 1, 6_300: 3}
