"""The rule by which studies judge claims."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from comparisons import claims
from comparisons.claims import AS_RUN, CORRECTED, EXACT, NOT_RUN, REFUTED, REPRODUCED, UNDECIDED, Claim


def claim(low: float = 0.0, high: float = math.inf, **more: str) -> Claim:
    return Claim(
        "c", "a is better than b", "ours", "difference", "seed", "mean", "none", low=low, high=high, **more
    )


def wrong_and_decided(
    truth: float, n: int, studies: int, rng: np.random.Generator, of: Claim
) -> tuple[float, float]:
    """Shares of simulated studies with a wrong outcome, and with any that is decided."""
    holds = of.low <= truth <= of.high
    found = [claims.outcome(of, claims.mean(truth + rng.standard_normal(n))) for _ in range(studies)]
    wrong = sum(each == (REFUTED if holds else REPRODUCED) for each in found)
    return wrong / studies, sum(each != UNDECIDED for each in found) / studies


@pytest.mark.parametrize("n", [2, 3, 5, 20])
@pytest.mark.parametrize("truth", [-0.3, 0.0, 1e-9, 0.3])
def test_a_wrong_outcome_in_at_most_five_per_cent_of_simulated_studies(n: int, truth: float) -> None:
    rng = np.random.default_rng(n)
    wrong, _ = wrong_and_decided(truth, n, 2000, rng, claim())
    # 2.5 % where the truth is at the edge of the claim; 2000 studies have a standard error of 0.35 %.
    assert wrong <= 0.025 + 4 * 0.0035


@pytest.mark.parametrize("truth", [-0.2, 0.0, 0.2])
def test_a_wrong_outcome_of_a_claim_with_two_sides(truth: float) -> None:
    wrong, _ = wrong_and_decided(truth, 10, 2000, np.random.default_rng(1), claim(-0.1, 0.1))
    assert wrong <= 0.05


def test_two_units_nearly_always_leave_a_claim_undecided() -> None:
    _, decided = wrong_and_decided(1.0, 2, 2000, np.random.default_rng(2), claim())
    assert decided < 0.15
    # The rule of two standard errors decides most of them.
    rng = np.random.default_rng(2)
    values = 1.0 + rng.standard_normal((2000, 2))
    error = values.std(1, ddof=1) / math.sqrt(2)
    assert (np.abs(values.mean(1)) > 2.0 * error).mean() > 0.4


def test_many_units_decide() -> None:
    _, decided = wrong_and_decided(0.5, 100, 200, np.random.default_rng(3), claim())
    assert decided > 0.95


def test_one_unit_has_no_interval() -> None:
    found = claims.mean([3.0])
    assert claims.outcome(claim(), found) == UNDECIDED
    assert "no interval" in str(found)
    verdict = claims.judge(claim(), found)
    assert (verdict.low, verdict.high, verdict.n) == (None, None, 1)


def test_the_interval_of_a_mean_is_that_of_scipy() -> None:
    values = np.random.default_rng(4).normal(size=7)
    found = claims.mean(values)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    for edge in (-0.5, 0.1):
        for above, side in ((True, "greater"), (False, "less")):
            assert found.tail(edge, above) == pytest.approx(
                stats.ttest_1samp(values, edge, alternative=side).pvalue
            )


def test_the_interval_of_a_share_is_that_of_scipy() -> None:
    for successes in (0, 1, 5, 8):
        found, expected = claims.share(successes, 8), stats.binomtest(successes, 8)
        ends = expected.proportion_ci(0.95)
        assert (found.low, found.high) == pytest.approx((ends.low, ends.high), abs=1e-12)
        one_sided = stats.binomtest(successes, 8, 0.3, alternative="greater").pvalue
        assert found.tail(0.3, True) == pytest.approx(one_sided)


def test_the_interval_and_the_p_value_agree_close_by_on_both_sides() -> None:
    values = np.random.default_rng(5).normal(size=9)
    for found in (claims.mean(values), claims.mean_over_splits(values, 1, 9)):
        for step, expected in ((-1e-9, REPRODUCED), (1e-9, UNDECIDED)):
            assert claims.outcome(claim(found.low + step), found) == expected
        for step, expected in ((-1e-9, UNDECIDED), (1e-9, REFUTED)):
            assert claims.outcome(claim(found.high + step), found) == expected


def test_overlapping_splits_widen_the_interval() -> None:
    """Scores over random splits of one table share rows: the plain interval misses the truth far more often."""
    rng = np.random.default_rng(6)
    rows, train, n, corrected, plain = 60, 54, 10, 0, 0
    for _ in range(400):
        table = rng.standard_normal(rows)
        values = []
        for _ in range(n):
            order = rng.permutation(rows)
            # A score of mean zero with a part that all splits share, the mean of the training rows.
            values.append(float(np.mean(table[order[train:]]) + np.mean(table[order[:train]])))
        for found, wide in (
            (claims.mean_over_splits(values, rows - train, train), True),
            (claims.mean(values), False),
        ):
            inside = found.low <= 0.0 <= found.high
            corrected, plain = corrected + (inside and wide), plain + (inside and not wide)
    assert plain < corrected


@pytest.mark.parametrize("unknown", [1, 3])
def test_units_whose_values_are_not_known_widen_the_interval_to_all_that_they_can_be(unknown: int) -> None:
    rng = np.random.default_rng(unknown)
    values, where = rng.uniform(size=12), np.arange(12) < unknown
    found = claims.worst_case(claims.mean, values, where, 0.0, 1.0)
    assert found.value == pytest.approx(values.mean())
    ends = []
    for _ in range(3000):
        filled = values.copy()
        # Within the limits, and at them.
        filled[where] = rng.uniform(size=unknown) if rng.random() < 0.5 else rng.integers(0, 2, unknown)
        one = claims.mean(filled)
        ends.append((one.low, one.high))
        for edge in (0.2, 0.8):
            assert found.tail(edge, edge < 0.5) >= one.tail(edge, edge < 0.5) - 1e-12
    low, high = np.transpose(ends)
    assert found.low == pytest.approx(low.min(), abs=1e-12)
    assert found.high == pytest.approx(high.max(), abs=1e-12)
    # Nothing changes where all are known.
    known = claims.worst_case(claims.mean, values, np.zeros(12, bool), 0.0, 1.0)
    assert (known.low, known.high) == (claims.mean(values).low, claims.mean(values).high)


def test_an_outlier_that_may_be_raises_the_mean_and_lowers_the_interval() -> None:
    """The end below is not where every value is lowest."""
    values, where = np.array([0.5, 0.51, 0.49, 0.5, 0.5]), np.arange(5) == 4
    found = claims.worst_case(claims.mean, values, where, 0.5, 1.0)
    assert found.low == claims.mean([0.5, 0.51, 0.49, 0.5, 1.0]).low < claims.mean(values).low


def test_a_share_of_units_some_of_which_are_not_known() -> None:
    def share(values: np.ndarray) -> claims.Estimate:
        return claims.share(round(values.sum()), len(values))

    found = claims.worst_case(share, np.ones(20), np.arange(20) < 2, 0.0, 1.0)
    assert (found.low, found.high) == (claims.share(18, 20).low, claims.share(20, 20).high)
    assert found.tail(0.5, True) == claims.share(18, 20).tail(0.5, True)


def test_a_bootstrap_covers_and_few_units_have_none() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for index in range(200):
        values = rng.normal(1.0, 1.0, 30)
        found = claims.bootstrap(values, lambda rows: float(rows.mean()), draws=500, seed=index)
        covered += found.low <= 1.0 <= found.high
    assert 0.86 <= covered / 200 <= 1.0
    assert claims.outcome(claim(), claims.bootstrap(np.ones(4), lambda rows: float(rows.mean()))) == UNDECIDED


def test_what_has_not_converged_decides_nothing_where_it_stands_for_the_posterior() -> None:
    strong = claims.mean(5.0 + np.arange(10) / 10)
    assert claims.outcome(claim(convergence=EXACT), strong, converged=True) == REPRODUCED
    assert claims.outcome(claim(convergence=EXACT), strong, converged=False) == UNDECIDED
    assert claims.outcome(claim(convergence=AS_RUN), strong, converged=False) == REPRODUCED
    assert claims.outcome(claim(10.0, convergence=EXACT), strong, converged=False) == UNDECIDED
    verdict = claims.judge(claim(convergence=EXACT), strong, converged=False, why_not="R-hat 1.3")
    assert "not converged (R-hat 1.3)" in verdict.numbers


def test_an_exact_quantity_decides_on_both_sides_of_an_edge() -> None:
    assert claims.outcome(claim(1.0), claims.exact(1.0 + 1e-12)) == REPRODUCED
    assert claims.outcome(claim(1.0), claims.exact(1.0)) == REPRODUCED
    assert claims.outcome(claim(1.0), claims.exact(1.0 - 1e-12)) == REFUTED
    assert claims.outcome(claim(0.0, 1.0), claims.exact(2.0)) == REFUTED


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [-0.3, -0.3], [0.1 + 0.2, 0.3, 0.3]])
def test_units_that_are_all_alike_decide_nothing(values: list[float]) -> None:
    """Up to rounding: three data sets without a difference do not show that there never is one."""
    for estimate in (claims.mean(values), claims.mean_over_splits(values, 10, 90)):
        assert claims.outcome(claim(0.0), estimate) == UNDECIDED
        assert "no interval" in str(estimate)
    assert claims.outcome(claim(0.0), claims.mean([*values, values[0] + 1e-6])) == (
        REPRODUCED if values[0] > 0 else UNDECIDED if values[0] == 0 else REFUTED
    )


def with_p(p: float) -> claims.Estimate:
    """The mean of ten units whose one-sided p-value against zero is p."""
    spread = np.arange(10) - 4.5
    return claims.mean(float(stats.t.isf(p, 9)) + spread / spread.std(ddof=1) * math.sqrt(10))


def test_holm_in_a_family() -> None:
    def outcomes(*p: float) -> list[str]:
        return [each.verdict for each in claims.judge_family([(claim(), with_p(each), {}) for each in p])]

    assert p_of(with_p(0.003)) == pytest.approx(0.003)
    # Holm's limits in a family of three are 0.0083, 0.0125 and 0.025.
    assert outcomes(0.003, 0.01, 0.02) == [REPRODUCED] * 3
    assert outcomes(0.02, 0.0084, 0.0126) == [UNDECIDED] * 3
    assert outcomes(0.02, 0.0082, 0.0126) == [UNDECIDED, REPRODUCED, UNDECIDED]
    assert outcomes(0.024) == [REPRODUCED]
    assert outcomes(0.026) == [UNDECIDED]


def p_of(estimate: claims.Estimate) -> float:
    return claims.p_values(claim(), estimate)[0]


def test_a_family_of_false_claims_rarely_has_any_reproduced() -> None:
    rng = np.random.default_rng(8)
    wrong = 0
    for _ in range(500):
        family = [(claim(), claims.mean(rng.standard_normal(6)), {}) for _ in range(6)]
        wrong += any(each.verdict != UNDECIDED for each in claims.judge_family(family))
    # 2.5 % for each side.
    assert wrong / 500 <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 500)


def test_proofs_and_what_was_not_run() -> None:
    assert claims.prove(claim(), True, "the sign is wrong").verdict == CORRECTED
    assert claims.prove(claim(), False, "").verdict == REPRODUCED
    late = claim(declared="after", before="not reproduced", changed="Student's t in place of two errors")
    verdict = claims.judge(late, None, why_not="a fifth of the steps")
    assert verdict.verdict == NOT_RUN
    assert "a fifth of the steps" in str(verdict)
    assert str(verdict).startswith("NOT RUN (before: NOT REPRODUCED; rule declared after the results): ")


def test_a_rule_of_later_date_says_what_was_changed() -> None:
    with pytest.raises(ValueError, match=r"changed of c: expected what was changed"):
        claim(declared="after", before="reproduced")
    with pytest.raises(ValueError, match=r"before, changed of c: expected of a claim declared after"):
        claim(before="reproduced")
    with pytest.raises(ValueError, match=r"declared of c: expected 'before' or 'after'"):
        claim(declared="late")


def referee(*keys: str, **more: str) -> claims.Referee:
    made = {key: dataclasses.replace(claim(**more), key=key) for key in keys}
    return claims.Referee(made, "2 seeds, 10 in the source")


def test_a_referee_judges_every_claim_in_the_order_of_declaration() -> None:
    found = referee("a", "b", "c")
    found.not_run("c", "a fifth of the steps")
    found.measured("b", claims.mean([-1.0, -1.1, -0.9]))
    with pytest.raises(ValueError, match="got none on a"):
        found.verdicts()
    found.undecided("a", "the best prior gains nothing")
    verdicts = found.verdicts()
    assert [(each.key, each.verdict) for each in verdicts] == [
        ("a", UNDECIDED),
        ("b", REFUTED),
        ("c", NOT_RUN),
    ]
    assert all(each.sizes == "2 seeds, 10 in the source" for each in verdicts)
    assert all(str(each).endswith("[2 seeds, 10 in the source]") for each in verdicts)


def test_a_referee_corrects_for_the_claims_of_a_family() -> None:
    """A p-value of 0.02 decides alone, and not as one of three."""
    values = np.array([1.0, 2.0, 3.0, 4.0]) - 2.5
    values += stats.t.isf(0.02, 3) * values.std(ddof=1) / 2.0
    for family, expected in (("", REPRODUCED), ("directions", UNDECIDED)):
        found = referee("a", "b", "c", family=family)
        for key, of_it in (("a", values), ("b", values - values.mean()), ("c", values - values.mean())):
            found.measured(key, claims.mean(of_it))
        assert found.verdicts()[0].verdict == expected


def test_a_referee_refuses_evidence_that_does_not_fit_the_claim() -> None:
    found = referee("a")
    with pytest.raises(ValueError, match=r"claim: expected one of a; got 'b'"):
        found.measured("b", claims.mean([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"estimate of a: expected the rule 'mean'; got 'Clopper-Pearson'"):
        found.measured("a", claims.share(1, 2))
    with pytest.raises(ValueError, match=r"claim a: expected the rule 'proof' of what is proved; got 'mean'"):
        found.proved("a", True, "")
    found = referee("a")
    found.measured("a", claims.mean([1.0, 2.0]))
    with pytest.raises(ValueError, match="expected evidence once"):
        found.not_run("a", "")


def test_claims_are_read_from_a_file_and_checked(tmp_path: Path) -> None:
    text = (
        "[better]\ntext = 'a is better'\nsource = 'ours'\nquantity = 'nats'\nunit = 'seed'\nrule = 'mean'\n"
        "margin = '0.1 nats'\nlow = -0.1\n"
    )
    (tmp_path / "study.toml").write_text(text)
    found = claims.read_claims("study", tmp_path)["better"]
    assert (found.key, found.low, found.high) == ("better", -0.1, math.inf)
    for wrong, match in (
        (text.replace("'mean'", "'two errors'"), "expected one of mean"),
        (text.replace("low = -0.1", ""), "one of them finite"),
        (text + "convergence = 'some'\n", "exact posterior"),
    ):
        (tmp_path / "study.toml").write_text(wrong)
        with pytest.raises(ValueError, match=match):
            claims.read_claims("study", tmp_path)


def test_a_resample_without_a_statistic_is_refused() -> None:
    with pytest.raises(ValueError, match="finite number for every resample"):
        claims.bootstrap(np.arange(6.0), lambda rows: float(rows.mean()) if np.ptp(rows) > 3 else math.nan)


def test_a_unit_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="one finite number per unit"):
        claims.mean([1.0, math.nan])
