"""The attempt at a posterior of posteriordb: its model is that of Stan, its reduction is exact, and it runs tiny."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system

FOLDER = Path(__file__).parents[2] / "comparisons"
ROWS, PIXELS, WIDTH = 12, 30, 3


@pytest.fixture(scope="module")
def attempt() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("reference_posteriordb")


def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (ROWS, PIXELS)).astype(float), rng.integers(0, 10, ROWS)


def drawn(attempt: Any, x: np.ndarray, y: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Draws of the model with scales at which the network does something, and their log joint."""
    with (numpyro := system("numpyro")).session("float64", "cpu"):
        data = numpyro.asarray(x), numpyro.asarray(y)
        program = Program.of(
            numpyro, partial(attempt.network, pixels=PIXELS, width=WIDTH), *data, language=True
        )
        u = program.prior_draws(*data, 0, 5)
        u["hidden0.weight.variance"] = np.linspace(-20.0, -8.0, 5)
        u["output.weight.variance"] = np.linspace(-10.0, 2.0, 5)
        values = program.mapped(lambda u, x, y: program.log_joint(u, x, y, jacobian=False))(u, *data)
        w = {name: numpyro.to_numpy(each) for name, each in program.constrain_draws(u, *data).items()}
        return w, numpyro.to_numpy(values)


def test_the_log_joint_is_that_of_the_stan_program(attempt: Any) -> None:
    x, y = rows()
    w, values = drawn(attempt, x, y)
    for index, value in enumerate(values):
        stan, jacobian = attempt.in_stan({name: each[index] for name, each in w.items()})
        np.testing.assert_allclose(attempt.stan_log_joint(stan, x, y) + jacobian, value, rtol=1e-10)


def test_the_columns_that_the_rows_do_not_span_keep_their_prior(attempt: Any) -> None:
    """p(a, y) = p(V'a, y) p(the rest of a), a normal density."""
    x, y = rows()
    z, v = attempt.reduced(x)
    np.testing.assert_allclose(z @ v.T, x, atol=1e-10)
    rng = np.random.default_rng(1)
    base = rng.standard_normal((PIXELS, WIDTH))
    rest = base - v @ (v.T @ base)
    w = {
        "hidden0.weight.variance": np.array(1e-5),
        "output.weight.variance": np.array(1.0),
        "output.weight.base": rng.standard_normal((WIDTH, 9)),
        "hidden0.bias": rng.standard_normal(WIDTH),
        "output.bias": rng.standard_normal(9),
    }

    def likelihood_and_base(x: np.ndarray, base: np.ndarray) -> float:
        stan, jacobian = attempt.in_stan(w | {"hidden0.weight.base": base})
        # The prior of the variance depends on the number of columns; it cancels where it is that of all pixels.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attempt, "rate", lambda inputs: 1e-6)
            return attempt.stan_log_joint(stan, x, y) + jacobian

    whole, part = likelihood_and_base(x, base), likelihood_and_base(z, v.T @ base)
    outside = (PIXELS - ROWS) * WIDTH
    wanted = -0.5 * np.sum(rest**2) - 0.5 * outside * np.log(2.0 * np.pi)
    np.testing.assert_allclose(whole - part, wanted, rtol=1e-10)


@pytest.mark.slow
def test_a_tiny_attempt_is_stored_resumed_and_honest(
    attempt: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    found = attempt.main(tiny=True, work=tmp_path, out=tmp_path / "outcome.json")
    assert json.loads((tmp_path / "outcome.json").read_text()) == found
    assert not found["holds"]
    assert "no reference" in found["sentence"]
    assert found["transitions"] == 40
    assert "s of one core" in capsys.readouterr().out
    again = attempt.main(tiny=True, work=tmp_path, out=tmp_path / "again.json")
    assert again["convergence"] == found["convergence"]
