"""The published methods of the UCI tables run here: objective, verdicts on made-up rows, and a tiny run."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from scipy import stats

from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED
from ppl_bnn.prediction.prediction import Prediction

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("uci_published_methods")


def test_a_run_chooses_from_the_grid_on_the_validation_part(script: Any, tmp_path: Path) -> None:
    run = script.main(tiny=True, out=tmp_path, checkpoint=tmp_path / "kept")
    rows = [row for row in run.tables["scores"] if row["method"] == script.DROPOUT]
    assert len(rows) == 2
    for row in rows:
        grid = [each for each in run.tables["validation"] if each["split"] == row["split"]]
        assert len(grid) == len(script.PRECISIONS["diabetes"])
        best = max(grid, key=lambda each: each["validation"])
        assert (row["rate"], row["precision"]) == (best["rate"], best["precision"])
    assert all(math.isfinite(row["log_score"]) and row["rmse"] > 0.0 for row in run.tables["scores"])
    assert matplotlib.image.imread(tmp_path / "scores.png").std() > 0.0


def test_the_model_is_the_published_objective(script: Any) -> None:
    """The log joint is minus N tau sd(y)^2 / 2 times mean square error plus decay, as the script has them."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 3)), 7.0 * rng.normal(size=20) + 2.0
    rate, precision, scale = 0.05, 0.3, script.LENGTH_SCALE
    scaled = script.Scaled.by(x, y)
    weight = math.sqrt(2.0 / (1.0 - rate)) / (scale * scaled.y_sd)
    decay = scale**2 * (1.0 - rate) / (2.0 * len(y) * precision)

    def objective(f: np.ndarray, weights: np.ndarray) -> float:
        return float(np.mean((scaled.target(y) - f) ** 2) + decay * np.sum(weights**2))

    def joint(f: np.ndarray, weights: np.ndarray) -> float:
        noise = 1.0 / (math.sqrt(precision) * scaled.y_sd)
        fit = -0.5 * np.sum(((scaled.target(y) - f) / noise) ** 2)
        return float(fit - 0.5 * np.sum((weights / weight) ** 2))

    first, second = [(rng.normal(size=20), rng.normal(size=9)) for _ in range(2)]
    factor = -0.5 * len(y) * precision * scaled.y_sd**2
    np.testing.assert_allclose(
        joint(*first) - joint(*second), factor * (objective(*first) - objective(*second)), rtol=1e-10
    )


def test_an_ensemble_finds_a_noise_that_changes_with_the_input(script: Any) -> None:
    """Its log score is near that of the distribution which the rows are drawn from, and far from that of one noise."""
    rng = np.random.default_rng(0)

    def rows(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x = rng.uniform(-2.0, 2.0, (count, 1))
        sd = 3.0 * np.where(x[:, 0] > 0.0, 1.0, 0.1)
        return x, 5.0 + 6.0 * x[:, 0] + sd * rng.normal(size=count), sd

    x, y, _ = rows(1000)
    x_test, y_test, sd = rows(1000)
    exact = stats.norm(5.0 + 6.0 * x_test[:, 0], sd).logpdf(y_test).mean()
    one_noise = stats.norm(5.0 + 6.0 * x_test[:, 0], np.sqrt(np.mean(sd**2))).logpdf(y_test).mean()
    # The published rate of 0.1 is too large for this.
    sizes = replace(script.FULL, ensemble_rate=0.01)
    found = script.run_ensemble(sizes, (x, y), (x_test, y_test))["row"]
    assert exact - 0.5 * (exact - one_noise) < found["log_score"] < exact + 0.05
    again = script.run_ensemble(sizes, (x, y), (x_test, y_test))["row"]
    assert found["log_score"] == again["log_score"]


def test_scores_are_in_units_of_the_target(script: Any) -> None:
    """A linear scale of the target moves the log score by the log of the scale, and the error by the scale."""

    x, y = np.arange(6.0)[:, None], np.array([0.0, 1.0, 4.0, 2.0, 3.0, -1.0])
    known = Prediction("Normal", {"loc": np.zeros((1, 6)), "scale": np.ones((1, 6))})
    small = script.Scaled.by(x, y).scores(known, y)
    large = script.Scaled.by(x, 10.0 * y).scores(known, 10.0 * y)
    exact = stats.norm(y.mean(), y.std()).logpdf(y).mean()
    assert small[0] == pytest.approx(exact)
    assert small[1] == pytest.approx(y.std())
    assert large[0] == pytest.approx(exact - math.log(10.0))
    assert large[1] == pytest.approx(10.0 * y.std())


def rows(
    script: Any, gap: float, error: float, precision: float = 0.75, splits: int = 20
) -> list[dict[str, Any]]:
    """Made-up scores on yacht: MC dropout ahead of the published one by `gap` nats, its error `error` times that."""
    published = {row["split"]: row for row in script.published_dropout() if row["data"] == "yacht"}
    rng = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for split in range(splits):
        base = {"data": "yacht", "split": split, "train_rows": 277, "test_rows": 31}
        found.append(
            base
            | {
                "method": script.DROPOUT,
                "log_score": published[split]["log_likelihood"] + gap + rng.normal(0.0, 0.005),
                "rmse": published[split]["rmse"] * (error + rng.normal(0.0, 0.005)),
                "precision": precision,
            }
        )
        ensemble = script.RECALLED_LOG_SCORES[script.THEIR_ENSEMBLE]["yacht"] + gap
        found.append(base | {"method": script.ENSEMBLE, "log_score": ensemble + rng.normal(0.0, 0.005)})
    return found


def judged(script: Any, tmp_path: Path, made: list[dict[str, Any]]) -> dict[str, str]:
    study = script.Study(script.FULL, tmp_path, tables={"scores": made})
    by_text = {claim.text: key for key, claim in script.read_claims("uci_published_methods").items()}
    return {by_text[each.claim]: each.verdict for each in script.judge(study)}


@pytest.mark.parametrize(
    ("gap", "error", "outcome"),
    [
        (0.09, 1.09, REPRODUCED),
        (-0.09, 0.91, REPRODUCED),
        (0.11, 1.11, REFUTED),
        (-0.11, 0.89, REFUTED),
        (0.1, 1.1, UNDECIDED),
    ],
)
def test_margins_on_both_sides(script: Any, tmp_path: Path, gap: float, error: float, outcome: str) -> None:
    found = judged(script, tmp_path, rows(script, gap, error))
    for name in ("dropout-log_score", "dropout-rmse", "ensemble"):
        assert found[f"yacht-{name}"] == outcome, name
    assert found["energy-ensemble"] == found["energy-dropout-rmse"] == found["concrete-edge"] == NOT_RUN


@pytest.mark.parametrize(("precision", "outcome"), [(0.75, REPRODUCED), (0.5, REFUTED)])
def test_the_end_of_the_grid(script: Any, tmp_path: Path, precision: float, outcome: str) -> None:
    assert judged(script, tmp_path, rows(script, 0.0, 1.0, precision))["yacht-edge"] == outcome
