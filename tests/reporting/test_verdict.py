"""From what size on a difference counts, and when the exact reference is named in place of what is near it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ppl_bnn.evaluation.comparison.summary import is_difference, lags_of
from ppl_bnn.reporting.verdict import BEST, is_far, margin_of, standing
from tests.reporting.test_grid_page import block_of, grid_verdict, made
from tests.reporting.test_page import told, verdict

ROWS = 40


def apart(difference: float, error: float = 1e-5) -> dict[str, np.ndarray]:
    """Log scores of which those of "ahead" are better by that much, with that standard error."""
    noise = np.where(np.arange(ROWS) % 2, 1.0, -1.0) * error * math.sqrt(ROWS - 1.0)
    return {"ahead": np.full(ROWS, -1.0) + difference + noise, "map": np.full(ROWS, -1.0)}


def test_a_difference_exceeds_two_standard_errors_and_the_margin() -> None:
    assert is_difference(0.0101, 0.005)
    assert not is_difference(0.0099, 0.001)
    assert is_difference(0.0202, 0.01)
    assert not is_difference(0.0198, 0.01)
    assert is_difference(math.inf, math.nan)
    assert not is_difference(1.0, math.nan)
    assert is_difference(0.51, 0.1, 0.5)
    assert not is_difference(0.49, 0.1, 0.5)


@pytest.mark.parametrize(("difference", "counts"), [(0.0008, False), (0.0098, False), (0.0102, True)])
def test_below_the_margin_methods_are_level_however_certain_the_difference(
    difference: float, counts: bool
) -> None:
    values = apart(difference)
    comparison = told(values, map={"run_seconds": 1.0})
    found = verdict(comparison)
    assert (found.method, "0.01 nats per test row" in found.because) == ("ahead" if counts else "map", True)
    assert "No difference between the methods is established" not in found.because
    assert ("ahead predicts best" in comparison.summary()) is counts
    assert ("level with map" in comparison.summary()) is not counts
    assert standing(lags_of(values)) == ({"ahead": BEST} if counts else {})
    of_grid = made({"data": {name: each[:10] for name, each in values.items()}}, map={"run_seconds": 1.0})
    assert grid_verdict(of_grid).method == ("ahead" if counts else "map")
    marks = block_of(of_grid).standing("log_score")
    assert marks == ({"ahead": BEST} if counts else {})


@pytest.mark.parametrize(("error", "counts"), [(0.0495, True), (0.0505, False)])
def test_the_summary_and_the_verdict_ask_for_two_standard_errors(error: float, counts: bool) -> None:
    comparison = told(apart(0.1, error), map={"run_seconds": 1.0})
    assert ("ahead predicts best" in comparison.summary()) is counts
    assert (verdict(comparison).method == "ahead") is counts


@pytest.mark.parametrize(("difference", "counts"), [(0.0195, False), (0.0205, True)])
def test_other_scores_have_a_margin_of_one_percent_of_the_best(difference: float, counts: bool) -> None:
    # Errors of 2.0, so that 1 % is 0.02; the sign is that of `row_scores`.
    values = {name: each - 1.0 for name, each in apart(difference).items()}
    values = {"ahead": values["ahead"] - difference, "map": values["map"] - difference}
    assert standing(lags_of(values), margin_of("crps", float(values["ahead"].mean()))) == (
        {"ahead": BEST} if counts else {}
    )
    assert margin_of("log_score", -9.0) == margin_of("elpd_loo", -9.0) == 0.01


@pytest.mark.parametrize(("difference", "counts"), [(0.0095, False), (0.0105, True)])
def test_of_a_grid_too(difference: float, counts: bool) -> None:
    # rmse is exp(-log score) there: a share of it is a difference of log scores.
    of_grid = made({"data": {"ahead": np.full(10, difference), "map": np.zeros(10)}})
    marks = block_of(of_grid).standing("rmse")
    assert marks == ({"ahead": BEST} if counts else {})


@pytest.mark.parametrize(
    ("gap", "floor", "ratio", "words"),
    [
        (0.26, 0.1, 1.0, "off by 0.26"),
        (0.24, 0.1, 1.0, ""),
        (0.30, 0.31, 1.0, ""),
        (0.30, 0.29, 1.0, "off by 0.30"),
        (0.30, math.nan, 1.0, "off by 0.30"),
        (0.1, 0.1, 1.26, "its spread is 1.26 times"),
        (0.1, 0.1, 1.24, ""),
        (0.1, 0.1, 1.0 / 1.26, "its spread is 0.79 times"),
        (0.1, 0.1, 1.0 / 1.24, ""),
        (0.1, 0.1, 0.0, "it has no spread"),
        (math.nan, math.nan, math.nan, ""),
    ],
)
def test_what_is_far_from_a_reference(gap: float, floor: float, ratio: float, words: str) -> None:
    assert words in is_far(gap, floor, ratio)
    assert bool(is_far(gap, floor, ratio)) is bool(words)


CHAINS = {"kind": "chains", "converged": "yes", "run_seconds": 8.0, "gap_mean_floor": 0.05}


@pytest.mark.parametrize(
    ("gap", "changes", "exact"),
    [
        (0.7, {}, True),
        (0.2, {}, False),
        (0.7, {"run_seconds": 59.0}, True),
        (0.7, {"run_seconds": 61.0}, False),
        (0.7, {"converged": "no"}, False),
        (0.7, {"kind": "iid"}, False),
    ],
)
def test_an_exact_reference_that_costs_little_comes_before_an_approximation_far_from_it(
    gap: float, changes: dict[str, Any], exact: bool
) -> None:
    near = {"run_seconds": 1.0, "gap_mean": gap, "gap_sd_ratio": 1.0, "gap_mean_floor": 0.05}
    values = {"nuts": np.full(ROWS, -1.0), "svi": np.full(ROWS, -1.0005)}
    found = verdict(told(values, "nuts", nuts={**CHAINS, **changes}, svi=near))
    assert found.method == ("nuts" if exact else "svi")
    assert ("exact reference" in found.because and "0.70 epistemic" in found.because) is exact
    if "converged" in changes or "kind" in changes:
        doubt = {"reference": "reference (not converged)"}
    else:
        doubt = {"reference": "reference"}
    of_grid = grid_verdict(
        made(
            {"data": {name: each[:10] for name, each in values.items()}},
            reference="nuts",
            nuts={**CHAINS, **changes, **doubt},
            svi=near,
        )
    )
    assert of_grid.method == ("nuts" if exact else "svi")
    assert ("exact reference" in of_grid.because and "0.70 epistemic" in of_grid.because) is exact
