"""The study of the evidence framework: formulas against other oracles, verdicts, and a tiny run of all of it."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import ppl_bnn as bnn
from comparisons.claims import CORRECTED, NOT_RUN, OUTCOMES, REFUTED, REPRODUCED, UNDECIDED
from ppl_bnn import likelihoods, priors

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"
TABLES = ("overfit", "regression", "restarts", "contours", "choices", "reference", "alpha", "gold_standard")
FIGURES = ("boundaries", "contours", "regression", "alpha", "gold_standard", "scores")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("evidence_framework")


def network(units: int, seed: int, inputs: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "hidden0.weight": (inputs, units),
        "hidden0.bias": (units,),
        "output.weight": (units, 1),
        "output.bias": (1,),
    }
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def test_gradient_by_hand_is_that_of_differences(script):
    weights, x = network(3, 0), np.random.default_rng(1).normal(size=(4, 2))
    _, gradient = script.output_and_gradient(weights, x)
    step, columns = 1e-6, []
    for name, value in weights.items():
        for index in np.ndindex(value.shape):
            ends = []
            for sign in (1.0, -1.0):
                moved = {key: each.copy() for key, each in weights.items()}
                moved[name][index] += sign * step
                ends.append(script.output_and_gradient(moved, x)[0])
            columns.append((ends[0] - ends[1]) / (2.0 * step))
    assert np.allclose(gradient, np.stack(columns, axis=1), rtol=0.0, atol=1e-8)


def test_optimal_logit_is_that_of_the_densities(script):
    x, _ = script.mixture(20, 3)
    density = [
        sum(stats.multivariate_normal(centre, script.WIDTH**2 * np.eye(2)).pdf(x) for centre in centres)
        for centres in script.CENTRES
    ]
    assert np.allclose(script.optimal_logit(x), np.log(density[1] / density[0]), rtol=1e-9)


def merged(units: int, kind: str) -> dict[str, np.ndarray]:
    """A network whose first two units are alike up to sign, or whose first unit is zero, or neither."""
    weights = network(units, 5)
    if kind == "equal up to sign":
        for name in ("hidden0.weight", "hidden0.bias"):
            weights[name][..., 1] = -weights[name][..., 0]
        weights["output.weight"][1] = -weights["output.weight"][0]
    if kind == "zero":
        for name in ("hidden0.weight", "hidden0.bias"):
            weights[name][..., 0] = 0.0
        weights["output.weight"][0] = 0.0
    return weights


@pytest.mark.parametrize(("kind", "different"), [("all different", 4), ("equal up to sign", 3), ("zero", 4)])
def test_images_of_a_mode_are_those_that_enumeration_finds(script, kind, different):
    weights = merged(4, kind)
    units = np.vstack([weights["hidden0.weight"], weights["hidden0.bias"], weights["output.weight"].T]).T
    images = {
        tuple(np.round(np.array(signs)[:, None] * units[list(order)], 9).ravel() + 0.0)
        for order in itertools.permutations(range(4))
        for signs in itertools.product((1.0, -1.0), repeat=4)
    }
    log_number, found = script.log_images(weights)
    assert np.isclose(log_number, math.log(len(images)), rtol=1e-12)
    assert found == different


def linear(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 0.7)), likelihoods.Gaussian(0.5))


def test_tempered_monte_carlo_finds_the_evidence_of_linear_regression(script):
    """log N(y; 0, noise^2 I + s^2 (X X' + 1)), to 5 standard errors.

    Over 40 other seeds it was off by 2.8 standard errors at most.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 2))
    y = x @ [1.0, -0.5] + 0.3 + 0.5 * rng.normal(size=12)
    posterior = bnn.fit(linear, x, y, bnn.MAP(steps=100))
    found = script.tempered_smc(posterior, 0.7**-2, particles=400, moves=8, runs=20, seed=1)
    covariance: Any = 0.25 * np.eye(12) + 0.49 * (x @ x.T + 1.0)
    exact = float(stats.multivariate_normal.logpdf(y, np.zeros(12), covariance))
    assert 0.0 < found.error < 0.2
    assert abs(found.log_evidence - exact) < 5.0 * found.error
    assert found.ladder[0] == 0.0
    assert found.ladder[-1] == 1.0


def test_displacement_of_a_circle_is_the_difference_of_its_radii(script):
    axis = np.linspace(-3.0, 3.0, 121)
    square = axis[:, None] ** 2 + axis**2
    logit = 4.0 - square
    kept = script.displacement(axis, logit, 0.5 * logit, 0.5)
    assert kept[1] < 1e-9
    level = math.log(0.9 / 0.1)
    median, largest, lost = script.displacement(axis, logit, 0.7 * logit, 0.9)
    radii = math.sqrt(4.0 - level), math.sqrt(4.0 - level / 0.7)
    assert not lost
    assert abs(median - (radii[0] - radii[1])) < 0.05
    assert largest < radii[0] - radii[1] + 0.1
    assert script.displacement(axis, logit, 0.5 * logit, 0.9)[2]  # 0.5 * 4 < log 9: never so sure


def test_zero_weights_are_one_image(script):
    weights = {name: np.zeros_like(value) for name, value in network(4, 0).items()}
    log_number, different = script.log_images(weights)
    assert abs(log_number) < 1e-12
    assert different == 1


@pytest.mark.parametrize("alpha", [0.05, 0.4, 3.0])
def test_slips_are_what_is_left_of_the_evidence_of_a_linear_model(script, alpha):
    """The integral of exp(-E) over the weights of a linear model is known; either slip gives another number."""
    rng = np.random.default_rng(0)
    x, y, beta = rng.normal(size=(9, 3)), rng.normal(size=9), 4.0
    covariance: Any = np.eye(9) / beta + x @ x.T / alpha
    right = float(stats.multivariate_normal.logpdf(y, np.zeros(9), covariance))
    precision = alpha * np.eye(3) + beta * x.T @ x
    mode = np.linalg.solve(precision, beta * x.T @ y)
    loss = 0.5 * beta * ((y - x @ mode) ** 2).sum() + 0.5 * alpha * mode @ mode
    log_determinant = float(np.linalg.slogdet(precision)[1])
    rest = -loss + 4.5 * math.log(beta / (2.0 * math.pi))
    assert np.isclose(right, rest - 0.5 * log_determinant + 1.5 * math.log(alpha), rtol=1e-12)
    found = script.slips(right, log_determinant, 3, alpha)
    assert np.isclose(found["wrong_sign"], rest + 0.5 * log_determinant + 1.5 * math.log(alpha), rtol=1e-12)
    assert np.isclose(found["lost_powers"], rest - 0.5 * log_determinant + math.log(alpha), rtol=1e-12)
    assert all(abs(value - right) > 0.1 for value in found.values())


def test_without_a_prior_gamma_is_the_number_of_rows(script):
    """16 weights and 6 rows: what the noise is divided by vanishes with alpha, and only then."""
    x, y = script.sine(6, 0)
    gammas = [
        script.curve_evidence(network(5, 2, inputs=1), x, y, alpha, 25.0)["gamma"] for alpha in (1e-9, 0.3)
    ]
    assert abs(gammas[0] - 6.0) < 1e-3
    assert gammas[1] < 5.9


def test_the_gradient_times_the_weights_is_not_the_output(script):
    weights, x = network(3, 0), np.random.default_rng(1).normal(size=(50, 2))
    a, b = script.output_and_gradient(weights, x)
    other = b @ np.concatenate([value.reshape(-1) for value in weights.values()])
    assert np.abs(a - other).min() > 0.1


def outcomes(script, judge: str, *evidence: Any) -> dict[str, str]:
    """What the referee makes of the evidence of one function, by claim."""
    claims = script.read_claims("evidence_framework")
    referee = script.Referee(claims)
    getattr(script, judge)(referee, *evidence)
    judged = referee.evidence
    for key in set(claims) - judged:
        referee.not_run(key, "another test")
    return {key: each.verdict for key, each in zip(claims, referee.verdicts(), strict=True) if key in judged}


NOISE = np.array([-0.01, 0.0, 0.01, 0.0])


def overfit_rows(ml: float, point: float, variance: float, fewer: float) -> list[dict[str, float]]:
    """Four data sets about these scores; the optimum is 0, the error of maximum likelihood 0.2."""
    return [
        {
            "log_score_ml": ml,
            "log_score_evidence_point": point + noise,
            "log_score_evidence_variance": variance,
            "log_score_optimal": 0.0,
            "error_ml": 0.2,
            "error_evidence": fewer + noise,
            "error_optimal": 0.0,
        }
        for noise in NOISE
    ]


def test_over_fitting_is_judged_over_data_sets(script):
    """The half of the loss is 0.5; Student's t of four values about m with this noise reaches 0.013."""
    found = outcomes(script, "judge_overfit", overfit_rows(-1.0, -0.48, -0.45, 0.18))
    assert found == {"overfit-score": REPRODUCED, "overfit-error": REPRODUCED, "variance-score": REPRODUCED}
    found = outcomes(script, "judge_overfit", overfit_rows(-1.0, -0.52, -0.54, 0.22))
    assert found == {"overfit-score": REFUTED, "overfit-error": REFUTED, "variance-score": REFUTED}
    # The claims of the family need 0.016 for two of them; the variance, alone, 0.013.
    found = outcomes(script, "judge_overfit", overfit_rows(-1.0, -0.488, -0.476, 0.188))
    assert set(found.values()) == {UNDECIDED}
    one = outcomes(script, "judge_overfit", overfit_rows(-1.0, -0.1, 0.0, 0.1)[:1])
    assert set(one.values()) == {UNDECIDED}


def test_convergence_of_the_alternation_is_a_share(script):
    """Nine in ten: 36 of 36 have a lower end of 0.903, 35 one of 0.900, 34 one below."""

    def found(settled: int, moving: int = 0) -> str:
        changes = [0.9e-4] * settled + [1.1e-4] * moving
        rows = [{"last_change": change, "rounds": 9} for change in changes]
        return outcomes(script, "judge_alternation", rows)["alternation"]

    assert found(36) == REPRODUCED
    assert found(34) == UNDECIDED
    assert found(30, 6) == UNDECIDED
    assert found(26, 10) == REFUTED


def test_three_classes_are_judged_where_they_were_run(script):
    def found(gain: float) -> dict[str, str]:
        rows = [{"log_score_ml": -1.0, "log_score_evidence": gain - 1.0 + noise} for noise in NOISE]
        return outcomes(script, "judge_softmax", rows)

    assert found(0.02) == {"softmax": REPRODUCED}
    assert found(-0.02) == {"softmax": REFUTED}
    assert found(0.01) == {"softmax": UNDECIDED}
    assert outcomes(script, "judge_softmax", []) == {"softmax": NOT_RUN}


def regression_rows(
    off: float = 1e-9, equation: float = 1e-5, gain: float = 0.02, ratio: float = 10.0
) -> Any:
    return [
        {
            "log_evidence_by_hand_off": off,
            "variance_by_hand_off": off,
            "alpha_equation_off": equation,
            "beta_equation_off": equation,
            "log_score_ml": -1.0,
            "log_score_evidence_variance": gain - 1.0 + noise,
            "noise": 0.2,
            "noise_ml": 0.1,
            "epistemic_ratio": ratio * (1.0 + noise),
        }
        for noise in NOISE
    ]


def test_claims_on_regression_follow_their_numbers(script):
    def found(**changed: float) -> dict[str, str]:
        return outcomes(script, "judge_regression", regression_rows(**changed), {"epistemic_ratio": 150.0})

    formulas, equations = ("evidence-formula", "variance-formula"), ("alpha-equation", "beta-equation")
    assert found() == dict.fromkeys((*formulas, *equations, "regression", "band"), REPRODUCED)
    for off, expected in ((0.9e-6, REPRODUCED), (1.1e-6, REFUTED)):
        assert [found(off=off)[key] for key in formulas] == [expected] * 2
    for off, expected in ((0.9e-3, REPRODUCED), (1.1e-3, REFUTED)):
        assert [found(equation=off)[key] for key in equations] == [expected] * 2
    # One fit of several that is off is enough.
    rows = regression_rows()
    rows[2]["alpha_equation_off"] = 0.01
    assert outcomes(script, "judge_regression", rows, {})["alpha-equation"] == REFUTED
    assert found(gain=-0.02)["regression"] == REFUTED
    assert found(gain=0.01)["regression"] == UNDECIDED
    assert [found(ratio=ratio)["band"] for ratio in (4.2, 4.0, 3.8)] == [REPRODUCED, UNDECIDED, REFUTED]
    rows = [{key: value for key, value in row.items() if key != "epistemic_ratio"} for row in rows]
    assert outcomes(script, "judge_regression", rows, {"epistemic_ratio": 150.0})["band"] == UNDECIDED


def start_rows(evidence: Any, scores: Any, data_seed: int | None = None) -> list[dict[str, float]]:
    known = {} if data_seed is None else {"data_seed": data_seed}
    return [known | {"log_evidence": e, "log_score": s} for e, s in zip(evidence, scores, strict=True)]


def test_the_mode_that_the_evidence_picks_is_judged_over_data_sets(script):
    """Four starts in three modes: the best comes twice, and counts once."""
    evidence = [-3.0, -2.0, -1.0, -1.0002]
    one = start_rows(evidence, [-0.6, -0.5, -0.4, -0.4])
    assert outcomes(script, "judge_starts", one) == {"starts": REPRODUCED, "picked": UNDECIDED}

    def found(gain: float) -> dict[str, str]:
        rows = []
        for seed, noise in enumerate(NOISE):
            better = -0.5 + gain + noise
            rows += start_rows(evidence, [-0.6, -0.4, better, better], seed)
        return outcomes(script, "judge_starts", rows)

    assert found(0.02) == {"starts": REPRODUCED, "picked": REPRODUCED}
    assert found(-0.02)["picked"] == REFUTED
    assert found(0.01)["picked"] == UNDECIDED
    same = start_rows([-1.0, -1.0002], [-0.4, -0.4])
    assert outcomes(script, "judge_starts", same) == {"starts": REFUTED, "picked": UNDECIDED}


def contour_rows(half: float, other: float) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Displacements in steps of a grid of step 0.05; the 0.3 contour moves least of the others."""
    moved = {0.1: 9.0, 0.3: other, 0.5: 0.0, 0.7: 9.0, 0.9: 9.0}
    rows = [
        {"level": level, "median_displacement": 0.05 * median, "largest_displacement": 0.05 * half}
        for level, median in moved.items()
    ]
    return rows, {"grid_step": 0.05, "points_that_change_sides": 0.0}


def test_claims_on_the_contours_follow_their_numbers(script):
    for half, other, expected in (
        (0.09, 0.6, [REPRODUCED, REPRODUCED]),
        (0.11, 0.6, [REFUTED, REPRODUCED]),
        (0.09, 0.4, [REPRODUCED, REFUTED]),
    ):
        found = outcomes(script, "judge_contours", *contour_rows(half, other))
        assert [found["contour-half"], found["contour-others"]] == expected


def test_chains_are_judged_one_posterior_at_a_time(script):
    def run_of(word: str) -> dict[str, Any]:
        return {"verdict": word, "reasons": ["R-hat"]}

    numbers = {"nuts": run_of("converged"), "nuts_hierarchical": run_of("not converged")}
    assert outcomes(script, "judge_chains", numbers) == {"chains-fixed": REPRODUCED, "chains-scale": REFUTED}
    numbers = {"nuts": run_of("converged per mode only"), "nuts_hierarchical": run_of("converged")}
    assert outcomes(script, "judge_chains", numbers) == {"chains-fixed": REFUTED, "chains-scale": REPRODUCED}


GAPS = ("variance-gap", "full-rank-gap", "hessian-gap")
CONVERGED = [{"reference": "nuts", "rhat": 1.009, "ess_bulk": 401.0}]


def choice_rows(near: float, **hessian: Any) -> list[dict[str, Any]]:
    """Distances of 0.1 to NUTS, and of `near` for whatever is claimed to be nearer."""
    common = {"log_score": -0.4, "log_evidence": -41.0, "alpha": 0.3, "gamma": 9.0}
    rows = [common | {"choice": "fixed point", "predictive": kind, "gap_to_nuts": 0.1} for kind in KINDS]
    rows[KINDS.index("probit")]["gap_to_nuts"] = near
    for name, gap in (("mean-field VI at that alpha", 0.1), ("full-rank VI at that alpha", near)):
        rows.append(common | {"choice": name, "predictive": "sampled", "gap_to_nuts": gap, "elbo": -50.0})
    exact = {"choice": "exact Hessian at the fixed point", "predictive": "linearised", "gap_to_nuts": near}
    return [*rows, hessian or common | exact]


KINDS = ("point", "probit", "linearised", "sampled")


def test_distances_to_nuts_are_judged_where_its_chains_can_tell(script):
    def found(near: float, references: Any = CONVERGED) -> dict[str, str]:
        return outcomes(script, "judge_gaps", choice_rows(near), references, 0.01)

    assert found(0.08) == dict.fromkeys(GAPS, REPRODUCED)
    assert found(0.12) == dict.fromkeys(GAPS, REFUTED)
    # Within what two halves of the draws differ by.
    assert found(0.091) == found(0.109) == dict.fromkeys(GAPS, UNDECIDED)
    for rhat, ess in ((1.011, 900.0), (1.0, 399.0)):
        bad = [{"reference": "nuts", "rhat": rhat, "ess_bulk": ess}]
        assert found(0.02, bad) == found(0.9, bad) == dict.fromkeys(GAPS, UNDECIDED)
    # Not stored: not known to have converged.
    assert found(0.02, []) == dict.fromkeys(GAPS, UNDECIDED)
    none = choice_rows(
        0.08, choice="exact Hessian at the fixed point", warnings="A is indefinite: no Gaussian"
    )
    judged = outcomes(script, "judge_gaps", none, CONVERGED, 0.01)
    assert judged == {"variance-gap": REPRODUCED, "full-rank-gap": REPRODUCED, "hessian-gap": UNDECIDED}


def test_what_the_fixed_point_loses_is_judged_in_nats(script):
    rows = [
        {"choice": name, "predictive": "linearised", "log_score": -0.4}
        for name in ("fixed point", "direct, mode found again")
    ]
    for gain, expected in ((0.49, REPRODUCED), (0.51, REFUTED)):
        numbers = {
            "alpha_fixed_point": 0.3,
            "alpha_direct": 0.2,
            "log_evidence_fixed_point": -40.0,
            "log_evidence_direct": gain - 40.0,
        }
        assert outcomes(script, "judge_direct", rows, numbers) == {"derivative": expected}


@pytest.mark.parametrize("tune", ["layer", "tensor"])
def test_finer_precisions_are_judged_at_an_optimum(script, tune):
    keys = (f"{tune}-evidence", f"{tune}-score")
    one = {"choice": "fixed point", "predictive": "linearised", "log_evidence": -41.0, "log_score": -0.4}
    row = one | {"choice": f"one alpha for each {tune}", "alpha": "0.3, 0.2"}

    def found(**changed: Any) -> list[str]:
        judged = outcomes(script, "judge_finer", [one, row | changed], tune)
        return [judged[key] for key in keys]

    # One data set has no interval for what would be predicted on others.
    assert found(log_evidence=-40.9, log_score=-0.1) == [REPRODUCED, UNDECIDED]
    assert found(log_evidence=-41.1, log_score=-0.9) == [REFUTED, UNDECIDED]
    stopped = "the alternation stopped in round 3, where no part of a step raised it"
    assert found(log_evidence=-40.9, warnings=stopped) == [UNDECIDED, UNDECIDED]
    assert outcomes(script, "judge_finer", [one], tune) == dict.fromkeys(keys, NOT_RUN)


def numbers_of(script, judge: str, key: str, *evidence: Any) -> str:
    """What is said of a proof, which must come out as corrected."""
    claims = {key: script.read_claims("evidence_framework")[key]}
    referee = script.Referee(claims) if judge != "judge_steps" else None
    if referee is None:
        claims = {name: script.read_claims("evidence_framework")[name] for name in ("sign", "powers")}
        referee = script.Referee(claims)
    getattr(script, judge)(referee, *evidence)
    found = dict(zip(claims, referee.verdicts(), strict=True))[key]
    assert found.verdict == CORRECTED
    assert found.estimate is None
    return found.numbers


def test_proofs_say_what_the_run_shows_of_them(script):
    contours = {"probit_by_hand_off": 1e-15, "slip_changes_sides": 0.04}
    assert "4.0 % of the plane" in numbers_of(script, "judge_slip", "slip", contours)
    known = contours | {"slip_error": 0.2, "error": 0.1}
    assert "test error 0.200, with a_MAP 0.100" in numbers_of(script, "judge_slip", "slip", known)
    rows = [
        {"alpha": alpha, "log_evidence_ggn": right, "wrong_sign": alpha, "lost_powers": -alpha}
        for alpha, right in ((0.1, -3.0), (0.3, -1.0), (1.0, -2.0))
    ]
    for key, taken in (("sign", "1"), ("powers", "0.1")):
        said = numbers_of(script, "judge_steps", key, rows)
        assert said.endswith(f"has its maximum at 0.3, the printed one at {taken}")
    scored = [
        {"choice": "fixed point", "predictive": "point", "alpha": "0.3", "log_score": -0.4},
        {
            "choice": "Gaussian likelihood (the slip)",
            "predictive": "point",
            "alpha": "1e+08",
            "log_score": -0.7,
        },
    ]
    assert "alpha is 0.3 and" in numbers_of(script, "judge_gaussian", "gaussian", scored)
    modes = [
        {"log_evidence": -2.0, "log_images": 9.0, "different_units": 8},
        {"log_evidence": -1.0, "log_images": 5.0, "different_units": 4},
    ]
    said = numbers_of(script, "judge_images", "images", modes, 8)
    assert "In 1 of 2 modes" in said
    assert "ln(images) is 5.00, ln(M!) + M ln 2 is 16.15" in said
    for guarded, words in (
        ({"refused": "expected fewer"}, "the library refuses (expected fewer)"),
        ({"gamma": 5.9, "noise": 1e-3, "warnings": ""}, "gamma 5.900, noise 1.00e-03, warnings: none"),
    ):
        assert words in numbers_of(script, "judge_noise_equation", "noise-equation", guarded)
    assert "1e-8" not in numbers_of(script, "judge_noise_equation", "noise-equation", None)


@pytest.mark.parametrize(
    ("gammas", "expected"),
    [([9.0, 32.9], UNDECIDED), ([9.0, 33.1], CORRECTED), ([-0.1], CORRECTED), ([0.1], UNDECIDED)],
)
def test_gamma_is_no_count_outside_of_zero_and_the_number_of_weights(script, gammas, expected):
    row = {"alpha": 0.3, "weights": 33, "gamma_ggn": 9.0, "negative_eigenvalues_of_H": "2"}
    rows = [row | {"gamma_hessian": gamma} for gamma in gammas]
    rows.append(row | {"negative_eigenvalues_of_H": "A indefinite"})
    assert outcomes(script, "judge_gamma", rows) == {"gamma": expected}


def test_the_evidence_of_one_mode_is_shown_beside_what_corrections_leave(script):
    row = {"units": 3, "alpha": 0.1, "log_evidence_smc": -10.0, "smc_standard_error": 0.1}
    gaps = {"gap_one_mode": 4.0, "gap_with_symmetries": 0.2, "gap_with_images": 1.5}
    rows = [row | gaps, row | gaps | {"gap_one_mode": 0.1}]
    said = numbers_of(script, "judge_gold_standard", "one-mode", rows)
    assert "in 1 of 2 cases" in said
    assert "2.05 with nothing added, 0.20 with ln(M!) + M ln 2 added, 1.50 with ln(different images)" in said


def test_stored_results_are_judged_without_a_run(script):
    """Every claim has a verdict; none on NUTS is decided, as R-hat at the test rows was not stored."""
    study = script.Study.read(FOLDER / "results" / "evidence_framework", script.FULL)
    found = {each.key: each for each in script.judge(study)}
    assert list(found) == list(script.read_claims("evidence_framework"))
    if "reference" not in study.tables:
        assert {found[key].verdict for key in GAPS} == {UNDECIDED}
    assert all("60 rows of classes" in each.sizes for each in found.values())


def test_a_tiny_run_writes_tables_figures_and_verdicts(script, tmp_path, capsys):
    study = script.main(tiny=True, out=tmp_path)
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "results.json").read_text())
    assert [verdict["key"] for verdict in content["verdicts"]] == list(
        script.read_claims("evidence_framework")
    )
    for verdict in content["verdicts"]:
        assert verdict["verdict"] in OUTCOMES
        assert verdict["numbers"]
        assert verdict["claim"] in said
    assert len((tmp_path / "verdicts.txt").read_text().splitlines()) == len(content["verdicts"])
    numbers = 0
    for name in TABLES:
        with (tmp_path / f"{name}.csv").open() as file:
            for row in csv.DictReader(file):
                for value in row.values():
                    try:
                        number = float(value)
                    except ValueError:
                        continue
                    assert math.isfinite(number), (name, row)
                    numbers += 1
    assert numbers > 100
    for name in FIGURES:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    # What the library predicts is what the formulas by hand say.
    assert content["numbers"]["contours"]["probit_by_hand_off"] < 1e-12
    for row in study.tables["regression"]:
        assert row["log_evidence_by_hand_off"] < 1e-8
        assert row["variance_by_hand_off"] < 1e-8
        assert row["epistemic_ratio"] > 0.0
    # The verdicts are those of the files; two chains of 50 draws are no reference.
    again = script.judge(script.Study.read(tmp_path, script.TINY))
    assert again == study.verdicts
    found = {each.key: each.verdict for each in again}
    assert {found[key] for key in ("softmax", "tensor-evidence", "tensor-score", "uses")} == {NOT_RUN}
    assert {found[key] for key in GAPS} == {UNDECIDED}
    assert {found[key] for key in ("evidence-formula", "variance-formula")} == {REPRODUCED}
