"""On a CUDA device: the same numbers as on the CPU, to float32 tolerance. Run with `pytest -m gpu`."""

from __future__ import annotations

import numpy as np
import pytest

import ppl_bnn as bnn
from tests.problems import METHODS, Conjugate, regression_data, small_network

pytestmark = pytest.mark.gpu


def has_cuda(ppl: str) -> bool:
    if ppl == "pyro":
        import torch

        return torch.cuda.is_available()
    import jax

    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


@pytest.fixture(autouse=True)
def _device(ppl):
    if not has_cuda(ppl):
        pytest.skip(f"needs a CUDA device that {ppl} can use")


def test_prediction_on_the_card_equals_that_on_the_cpu(ppl):
    x, y = regression_data()
    posterior = bnn.fit(small_network, x, y, bnn.MAP(ppl=ppl), device="cpu")
    on_card = posterior.predict(x, device="cuda")
    assert np.allclose(on_card.mean, posterior.predict(x, device="cpu").mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["map", "laplace"])
def test_fit_on_the_card_finds_the_same(ppl, name):
    problem = Conjugate.make()
    row = METHODS[name]
    posterior = bnn.fit(problem.model, problem.x, problem.y, row.build(ppl, row.exact), device="cuda")
    assert posterior.info.device.startswith("cuda")
    assert posterior.info.dtype == "float32"
    centre = posterior.approximation.centre()
    found = np.r_[centre["output.weight"][:, 0], centre["output.bias"]]
    assert np.allclose(found, problem.mean, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["svi", "nuts"])
def test_fit_by_draws_on_the_card(ppl, name):
    if (name, ppl) == ("nuts", "pyro"):
        pytest.skip("Pyro's NUTS runs its chains in processes on the CPU")
    problem = Conjugate.make()
    row = METHODS[name]
    posterior = bnn.fit(problem.model, problem.x, problem.y, row.build(ppl, row.exact), device="cuda:0")
    mean = Conjugate.flat(posterior.draws).mean((0, 1))
    assert np.all(np.abs(mean - problem.mean) < 0.3 * np.sqrt(np.diag(problem.covariance)))


@pytest.mark.parametrize(
    "options",
    [
        {"guide": "fullrank", "divergence": "analytic"},
        {"estimator": "local", "divergence": "analytic"},
        {"estimator": "flipout", "particles": 2},
        {"guide": "iaf"},
        {"batch_size": 10, "stream": True},
    ],
    ids=lambda options: ", ".join(options),
)
def test_variational_inference_on_the_card(ppl, options):
    problem = Conjugate.make()
    method = bnn.SVI(ppl=ppl, steps=2000, learning_rate=0.03, **options)
    posterior = bnn.fit(problem.model, problem.x, problem.y, method, device="cuda")
    assert posterior.info.device.startswith("cuda")
    mean = Conjugate.flat(posterior.draws).mean((0, 1))
    assert np.all(np.abs(mean - problem.mean) < 0.3 * np.sqrt(np.diag(problem.covariance)))
    assert (
        posterior.info.figures["elbo"] < problem.log_evidence + 4.0 * posterior.info.figures["elbo_se"] + 0.01
    )


@pytest.mark.parametrize("name", ["svgd", "ivon", "mc-dropout"])
def test_small_steps_on_the_card(ppl, name):
    row = METHODS[name]
    x, y = regression_data()
    posterior = bnn.fit(small_network, x, y, row.build(ppl, row.quick), device="cuda")
    assert posterior.info.device.startswith("cuda")
    assert np.all(np.isfinite(posterior.predict(x).mean))
