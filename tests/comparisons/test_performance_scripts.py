"""The benchmarks run at a tiny size: both sides do the same work. No timing is judged here."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons" / "performance"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.parametrize(
    "name",
    [
        "nuts_against_numpyro",
        "pyro_against_pyro",
        "first_answer",
        "predict_against_predictive",
        "laplace_against_laplace_torch",
        "variational",
        pytest.param("threads", marks=pytest.mark.slow),
        "sampling",
        "adapter_training",
    ],
)
def test_runs_at_a_tiny_size(script, name, capsys):
    if name == "adapter_training":
        pytest.importorskip("peft")
    if name == "variational":
        pytest.importorskip("bayesian_torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peers, written as their users write them
        figures = script(name).main(tiny=True, rounds=1)
    assert figures
    assert all(np.isfinite(value) and value > 0 for value in figures.values())
    assert "target" in capsys.readouterr().out


def test_advice_is_held_against_what_fits_take(script, capsys, monkeypatch):
    """One method of each kind: steps, chains, chains on mini-batches, and members together."""
    module = script("advice")
    kinds = ("MAP, numpyro", "NUTS, numpyro", "SGLD, numpyro", "Ensemble of MAP, numpyro")
    chosen = {name: method for name, method in module.methods(True).items() if name in kinds}
    monkeypatch.setattr(module, "methods", lambda tiny: chosen)
    facts = module.main(tiny=True)
    assert set(kinds) <= set(facts)
    assert "took" in capsys.readouterr().out


def test_the_nearest_single_normal_is_that_of_the_closed_form(script):
    """Independent normals nearest to N(m, A^-1) have variances 1 / A_jj and the divergence 1/2 log(prod A_jj / |A|).

    By 16384 quasi-random draws, whose second moments are right to 1e-3.
    """
    module = script("badly_scaled")
    exact = module.four()
    (vector,) = module.Mixtures(exact, 1).best(1)
    found = module.Mixtures(exact, 1).judged(vector)
    diagonal = np.diag(exact.precision)
    away = 0.5 * (np.log(diagonal).sum() - np.linalg.slogdet(exact.precision)[1])
    shares = 1.0 / diagonal / np.diag(np.linalg.inv(exact.precision))
    assert np.isclose(found["divergence"], away, atol=2e-3)
    assert np.allclose([found["marginal"][0], found["marginal"][2]], [shares.min(), shares.max()], rtol=1e-2)


def test_posteriors_in_closed_form_are_measured_at_a_tiny_size(script, capsys):
    """SVI comes within 0.01 nats of the nearest mixture of its family.

    At three components 0 of 20 seeds failed, and the largest distance was 0.003 nats.
    """
    found = script("badly_scaled").main(["svi"], ["four"], 1, ["fits", "mixtures", "particles"], tiny=True)
    (fit,) = found["fits"]
    one, two, fitted = (row["divergence"] for row in found["mixtures"])
    assert np.isclose(fit["divergence"], one, atol=0.02)
    assert -0.002 < fitted - two < 0.01
    assert two < one - 0.1
    (shown,) = found["particles"]
    # Three particles in four dimensions are a regular simplex: log(n + 1) (n - 1) / (n P).
    assert np.isclose(shown["variance"], np.log(4.0) * 2.0 / 12.0, rtol=1e-2)
    assert "nats" in capsys.readouterr().out


def test_hand_written_models_are_the_same_models(script, double_by_default):
    """Log joints of the language and of the hand-written models agree."""
    import jax
    import numpyro.infer.util
    import pyro
    import torch

    from ppl_bnn.backends.program import Program
    from ppl_bnn.backends.systems import system

    problem = script("problem")
    x, y = problem.data(7)
    numpyro_system = system("numpyro")
    with numpyro_system.session("float64", "cpu"):
        data = numpyro_system.asarray(x), numpyro_system.asarray(y)
        program = Program.of(numpyro_system, problem.in_the_language([3, 2]), *data, language=True)
        rng = np.random.default_rng(0)
        u = {name: rng.normal(size=site.unconstrained_shape) for name, site in program.sites.items()}
        values = {name: numpyro_system.asarray(value) for name, value in u.items()}
        ours = float(program.log_joint(values, *data))
        potential = numpyro.infer.util.potential_energy(problem.by_hand_in_numpyro([3, 2]), data, {}, values)
        w = {name: np.asarray(value) for name, value in program.constrain(values, *data).items()}
    assert np.isclose(ours, -float(potential), rtol=1e-12)
    assert not jax.config.jax_enable_x64
    pyro_system = system("pyro")
    with pyro_system.session("float64", "cpu"):
        conditioned = pyro.condition(
            problem.by_hand_in_pyro([3, 2]), {name: torch.tensor(value) for name, value in w.items()}
        )
        trace = pyro.poutine.trace(conditioned).get_trace(torch.tensor(x), torch.tensor(y))
        by_hand = float(trace.log_prob_sum())
    assert np.isclose(ours - u["noise"], by_hand, rtol=1e-12)


def test_ratio_says_whether_the_target_was_met(script):
    ratio = script("ratios").alternate("a / b", 1.0, "1/s", lambda i: 2.0, lambda i: 1.0 + i, 3)
    assert ratio.rounds == [2.0, 1.0, 2.0 / 3.0]
    assert ratio.median == 1.0
    assert "target 1: met" in str(ratio)
    assert "NOT MET" in str(script("ratios").Ratio("a / b", 1.1, [1.0], "1/s"))
