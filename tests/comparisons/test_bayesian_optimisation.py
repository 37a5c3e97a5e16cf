"""The study of surrogates for Bayesian optimisation: its verdicts from made-up regrets, and a tiny run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("bayesian_optimisation")


def rows(study: Any, ratios: dict[str, float]) -> list[dict[str, Any]]:
    """Regrets of six seeds on Branin: of the process 0.01 to 0.06 at the end, of the others so many times as much."""
    rng = np.random.default_rng(0)
    return [
        {"function": "branin", "surrogate": label, "seed": seed, "step": step, "regret": regret}
        for label, ratio in ({study.PROCESS: 1.0} | ratios).items()
        for seed in range(6)
        for step, regret in ((16, 0.01 * (1 + seed) * ratio * np.exp(0.02 * rng.normal())), (0, 3.0))
    ]


@pytest.mark.parametrize(("ratio", "expected"), [(1.8, REPRODUCED), (2.2, REFUTED)])
def test_the_last_regrets_of_equal_seeds_are_compared(
    study: Any, tmp_path: Path, ratio: float, expected: str
) -> None:
    found = study.Study(study.FULL, tmp_path)
    found.tables = {"regrets": rows(study, {study.LAPLACE: ratio, study.ENSEMBLE: 0.5, study.RANDOM: 100.0})}
    verdicts = {verdict.key: verdict for verdict in study.judge(found)}
    assert verdicts["branin-laplace-process"].verdict == expected
    assert verdicts["branin-laplace-process"].estimate == pytest.approx(np.log10(ratio), abs=0.02)
    assert (
        verdicts["branin-ensemble-random"].verdict == verdicts["branin-laplace-random"].verdict == REPRODUCED
    )
    assert verdicts["hartmann-laplace-process"].verdict == NOT_RUN
    assert verdicts["branin-laplace-known-process"].verdict == NOT_RUN


def test_only_the_noise_of_the_network_differs(study: Any) -> None:
    """Without noise in the model the mode of few points explains them; under the zoo's prior it calls them noise."""
    pytest.importorskip("botorch", reason="the extra botorch is not installed")
    measured, inputs, _ = study.function_of("branin")
    x = np.random.default_rng(0).random((20, inputs))
    y = measured(x)
    noise = {}
    for label in (study.LAPLACE, study.LAPLACE_KNOWN):
        model = study.network(50, label)
        posterior = bnn.fit(model, x, y, bnn.MAP(), standardise=True)
        noise[label] = np.std(y - posterior.predict(x).mean) / np.std(y)
    assert noise[study.LAPLACE_KNOWN] < 0.3 < 0.8 < noise[study.LAPLACE]


def test_regrets_that_no_user_would_tell_apart_are_equal(study: Any) -> None:
    np.testing.assert_allclose(
        study.logarithm([1e-9, 1e-4, 1.1e-4, 1.0]), [-4.0, -4.0, np.log10(1.1e-4), 0.0]
    )


@pytest.mark.parametrize(("name", "inputs", "best"), [("branin", 2, 0.397887), ("hartmann", 6, -3.32237)])
def test_functions_are_to_be_maximised_on_the_unit_cube(
    study: Any, name: str, inputs: int, best: float
) -> None:
    """The points of the maxima are those of the functions' authors."""
    pytest.importorskip("botorch", reason="the extra botorch is not installed")
    measured, dimension, largest = study.function_of(name)
    where = {
        "branin": [(np.pi + 5.0) / 15.0, 2.275 / 15.0],
        "hartmann": [0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573],
    }[name]
    assert dimension == inputs
    assert largest == pytest.approx(-best, abs=1e-5)
    np.testing.assert_allclose(measured(np.array([where])), largest, atol=1e-5)
    assert (measured(np.random.default_rng(0).random((1000, inputs))) < largest).all()


@pytest.mark.slow
def test_a_tiny_run_and_its_checkpoint(study: Any, tmp_path: Path) -> None:
    pytest.importorskip("botorch", reason="the extra botorch is not installed")
    folder = tmp_path / "parts"
    first = study.main(tiny=True, out=tmp_path / "first", checkpoint=folder)
    table = first.tables["regrets"]
    assert {row["surrogate"] for row in table} == set(study.KEYS)
    begun = {(row["seed"], row["regret"]) for row in table if row["step"] == 0}
    assert len(begun) == 2  # the same points for all surrogates
    assert (tmp_path / "first" / "regrets.png").stat().st_size > 5_000
    again = study.main(tiny=True, out=tmp_path / "second", checkpoint=folder)
    assert again.tables == first.tables
