"""The study of corrected leave-one-out values: its oracle against refits, its tiny run, and its stored figures."""

from __future__ import annotations

import csv
import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.stats

FOLDER = Path(__file__).parents[2] / "comparisons"
RESULTS = FOLDER / "results" / "corrected_leave_one_out"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("corrected_leave_one_out")


def test_the_exact_value_is_that_of_refits(study: Any) -> None:
    x, y = study.data(3, study.Sizes(rows=12, features=2), 0.5)
    total = 0.0
    for row in range(12):
        kept = np.arange(12) != row
        covariance = np.linalg.inv(x[kept].T @ x[kept] / study.NOISE**2 + np.eye(2))
        mean = covariance @ x[kept].T @ y[kept] / study.NOISE**2
        scale = math.sqrt(x[row] @ covariance @ x[row] + study.NOISE**2)
        total += float(scipy.stats.norm.logpdf(y[row], x[row] @ mean, scale))
    assert study.at_known_noise(x, y) == pytest.approx(total, abs=1e-9)


def test_the_noise_is_integrated_over_its_prior(study: Any) -> None:
    x, y = study.data(4, study.Sizes(rows=8, features=2), 0.3)

    def evidence(x: np.ndarray, y: np.ndarray) -> float:
        def density(noise: float) -> float:
            joint = scipy.stats.multivariate_normal(np.zeros(len(y)), x @ x.T + noise**2 * np.eye(len(y)))
            return float(joint.pdf(y) * scipy.stats.halfnorm.pdf(noise))

        return math.log(scipy.integrate.quad(density, 0.05, 5.0, epsabs=0.0, epsrel=1e-10, limit=200)[0])

    rows = np.arange(8)
    wanted = sum(evidence(x, y) - evidence(x[rows != row], y[rows != row]) for row in rows)
    assert study.over_the_noise(x, y) == pytest.approx(wanted, abs=1e-4)


def test_what_is_stored_says_that_what_is_published_is_nearer() -> None:
    """Over fifty seeds of each setting, from the stored values themselves."""
    with (RESULTS / "values.csv").open() as file:
        rows = list(csv.DictReader(file))
    settings = {row["setting"] for row in rows}
    assert all(sum(row["setting"] == name for row in rows) == 50 for name in settings)
    found = {
        key: np.array([float(row[key]) for row in rows]) for key in ("exact", "uncorrected", "published")
    }
    published = np.isfinite(found["published"])
    k = np.array([float(row["corrected_k"]) for row in rows])
    assert (k[published] <= 0.7).all()
    gain = np.abs(found["uncorrected"] - found["exact"]) - np.abs(found["published"] - found["exact"])
    mean, error = gain[published].mean(), gain[published].std(ddof=1) / math.sqrt(published.sum())
    assert mean > 4.0 * error
    content = json.loads((RESULTS / "results.json").read_text())
    assert [each["verdict"] for each in content["verdicts"]] == ["reproduced"]


@pytest.mark.slow
def test_the_tiny_study_runs(study: Any, tmp_path: Path) -> None:
    done = study.main(tiny=True, out=tmp_path)
    assert len(done.tables["values"]) == 2 * 5
    assert {row["setting"] for row in done.tables["settings"]} >= {"all", "Laplace, noise unknown"}
    assert (tmp_path / "settings.csv").exists()
