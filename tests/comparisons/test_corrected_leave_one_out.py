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
    k = np.array([float(row["corrected_k"]) for row in rows])
    published = np.array([math.isfinite(float(row["published"] or "nan")) for row in rows])
    assert (k[published] <= 0.7).all()
    content = json.loads((RESULTS / "results.json").read_text())
    assert [each["verdict"] for each in content["verdicts"]] == ["reproduced"]


@pytest.mark.parametrize(("gain", "expected"), [(0.1, "reproduced"), (-0.1, "refuted"), (0.0, "undecided")])
def test_the_verdict_counts_a_seed_once(study: Any, tmp_path: Path, gain: float, expected: str) -> None:
    rng = np.random.default_rng(1)
    rows = []
    for seed in range(20):
        noise = 0.01 * rng.normal()
        for setting in ("a", "b", "c"):
            row = {"setting": setting, "seed": seed, "exact": 0.0, "uncorrected": 1.0}
            rows.append(row | ({} if setting == "c" else {"published": 1.0 - gain - noise}))
    whole = [{"by_k_hat_alone": math.nan, "published": math.nan} | row for row in rows]
    found = study.Study(study.FULL, tmp_path)
    found.tables = {"values": rows, "settings": [study.summary("all", whole)]}
    (verdict,) = study.judge(found)
    assert (verdict.verdict, verdict.n) == (expected, 20)


@pytest.mark.slow
def test_the_tiny_study_runs(study: Any, tmp_path: Path) -> None:
    done = study.main(tiny=True, out=tmp_path)
    assert len(done.tables["values"]) == 2 * 5
    assert {row["setting"] for row in done.tables["settings"]} >= {"all", "Laplace, noise unknown"}
    assert (tmp_path / "settings.csv").exists()
