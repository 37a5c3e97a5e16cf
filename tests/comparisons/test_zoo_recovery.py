"""The study of whether models recover themselves: its arithmetic beside SciPy's, planted errors, and a tiny run."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, UnknownNameError
from ppl_bnn.diagnostics.calibration import Calibration

REPRODUCED, REFUTED, UNDECIDED, NOT_RUN = "reproduced", "refuted", "undecided", "not run"

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("zoo_recovery")


def made(ranks: np.ndarray, names: tuple[str, ...], draws: int = 199) -> Calibration:
    """Ranks of chains that have converged in every quantity."""
    count = len(ranks)
    quantities = {name.partition("[")[0] for name in names}
    figures = {f"rhat of {name}": np.full(count, 1.001) for name in quantities}
    figures |= {f"ess of {name}": np.full(count, 900.0) for name in quantities}
    truths = np.zeros(ranks.shape)
    return Calibration("made", names, np.arange(count), ranks, truths, draws, count, figures=figures)


# --- coverage by ranks ----------------------------------------------------------------------------


def test_intervals_hold_their_share_of_all_ranks_and_of_draws(study: Any) -> None:
    every = np.arange(200)[:, None]
    for level in study.LEVELS:
        inside = study.within(every, 199, level)
        assert inside.mean() == pytest.approx(level, abs=1e-12)
        # The same as whether the truth lies between quantiles of draws.
        rng = np.random.default_rng(1)
        draws, truth = rng.normal(size=(500, 199)), 1.5 * rng.normal(size=500)
        low, high = np.quantile(draws, [0.5 * (1.0 - level), 0.5 * (1.0 + level)], axis=1, method="weibull")
        ranks = (draws < truth[:, None]).sum(axis=1)
        expected = (low < truth) & (truth < high)
        np.testing.assert_array_equal(study.within(ranks[:, None], 199, level)[:, 0], expected)
    with pytest.raises(InputError, match="ranked"):
        study.within(every, 100, 0.9)


def test_the_error_counts_simulations_and_not_inputs(study: Any) -> None:
    rng = np.random.default_rng(2)
    one = rng.integers(0, 200, size=(40, 1))
    single, repeated = (study.covered("f", ranks, 199, 0.5) for ranks in (one, np.repeat(one, 30, axis=1)))
    assert repeated.share == single.share
    assert repeated.error == pytest.approx(single.error, rel=1e-12)
    inside = study.within(one, 199, 0.5)
    assert single.error == pytest.approx(float(stats.sem(inside[:, 0])), rel=1e-12)
    independent = study.covered("f", rng.integers(0, 200, size=(40, 30)), 199, 0.5)
    assert independent.error < 0.4 * single.error
    assert (single.components, repeated.components) == (1, 30)


def test_rows_of_simulations_are_means_over_components(study: Any) -> None:
    ranks = np.array([[0, 199, 100], [99, 150, 50]])
    rows = study.rank_rows("m", study.POSTERIOR, made(ranks, ("f[0]", "f[1]", "noise")))
    assert [(row["quantity"], row["simulation"], row["components"]) for row in rows] == [
        ("f", 0, 2),
        ("f", 1, 2),
        ("noise", 0, 1),
        ("noise", 1, 1),
    ]
    uniform = np.arange(200)
    variance = np.mean((uniform - uniform.mean()) ** 2)
    for row, own in zip(rows, (ranks[0, :2], ranks[1, :2], ranks[0, 2:], ranks[1, 2:]), strict=True):
        assert row["centre"] == pytest.approx(np.mean(own / 199), rel=1e-12)
        assert row["spread"] == pytest.approx(np.mean((own - uniform.mean()) ** 2) / variance, rel=1e-12)
        assert row["covered_50%"] == np.mean((own >= 50) & (own < 150))
        assert row["covered_90%"] == np.mean((own >= 10) & (own < 190))
        assert (row["rhat"], row["ess"]) == (1.001, 900.0)
    # Draws from the prior are no chains.
    assert "rhat" not in study.rank_rows("m", study.PRIOR, made(ranks, ("f[0]", "f[1]", "noise")))[0]


def test_mean_and_standard_error_give_the_interval_of_the_units(study: Any) -> None:
    values = np.random.default_rng(7).uniform(size=9)
    units, moments = study.mean(values), study.of_moments(values.mean(), stats.sem(values), 9)
    assert (moments.value, moments.low, moments.high) == pytest.approx(
        (units.value, units.low, units.high), rel=1e-12
    )
    assert (moments.n, moments.rule) == (9, units.rule)
    assert not np.isfinite(study.of_moments(0.5, np.inf, 1).low)


# --- verdicts -------------------------------------------------------------------------------------

MODEL = "linear_regression"


def verdict(study: Any, judge: Any, *kinds: str) -> list[str]:
    """What the referee makes of the evidence on these claims of one model alone."""
    claims = study.read_claims("zoo_recovery")
    referee = study.Referee({f"{MODEL}-{kind}": claims[f"{MODEL}-{kind}"] for kind in kinds})
    judge(referee)
    return [each.verdict for each in referee.verdicts()]


def unit_rows(study: Any, quantity: str, source: str = "posterior", **columns: Any) -> list[dict[str, Any]]:
    """Rows of the table `ranks` from columns of equal length."""
    count = len(next(iter(columns.values())))
    common = {"model": MODEL, "source": source, "quantity": quantity, "rhat": 1.001, "ess": 900.0}
    return [
        common | {"simulation": at} | {name: each[at] for name, each in columns.items()}
        for at in range(count)
    ]


def about(value: float, count: int = 20) -> np.ndarray:
    """Values of this mean and of a standard error of about a thousandth."""
    return value + 0.004 * np.resize([-1.0, 1.0], count)


ROW = {
    "model": MODEL,
    "simulations": 20,
    "failed": 0,
    "not_converged": 0,
    "worst_rhat": 1.0,
    "least_ess": 900.0,
}


def of_coverage(
    study: Any, level: float, values: np.ndarray, components: int = 20, quantity: str = "f", **figures: float
) -> str:
    rows = unit_rows(study, quantity, **{f"covered_{level:.0%}": values})
    for name, value in figures.items():
        rows[3][name] = value
    row = {"quantity": quantity, "level": level, "components": components, "share": np.nan, "error": np.nan}
    (found,) = verdict(
        study,
        lambda referee: study.judge_coverage(study.Case(referee, ROW, rows), row),
        f"{quantity}-{level:.0%}",
    )
    return found


@pytest.mark.parametrize(("level", "low", "high"), [(0.5, 0.455, 0.545), (0.9, 0.856, 0.944)])
def test_verdict_on_coverage_close_by_both_edges(study: Any, level: float, low: float, high: float) -> None:
    for edge, inward in ((low, 1.0), (high, -1.0)):
        assert of_coverage(study, level, about(edge + 0.003 * inward)) == REPRODUCED
        assert of_coverage(study, level, about(edge)) == UNDECIDED
        assert of_coverage(study, level, about(edge - 0.003 * inward)) == REFUTED


def test_draws_that_have_not_converged_decide_nothing(study: Any) -> None:
    """One of 20 simulations may move the mean coverage by 0.025 to either side, and widens the interval."""
    for value, outcome in ((0.53, REPRODUCED), (0.47, REPRODUCED), (0.56, REFUTED), (0.44, REFUTED)):
        assert of_coverage(study, 0.5, about(value), rhat=1.0099, ess=401.0) == outcome
        for figures in ({"rhat": 1.0101}, {"ess": 399.0}, {"rhat": np.nan}):
            assert of_coverage(study, 0.5, about(value), **figures) == UNDECIDED
    for value, outcome in ((0.5, REPRODUCED), (0.7, REFUTED)):
        assert of_coverage(study, 0.5, about(value, 400), rhat=1.02) == outcome


def test_verdict_on_equal_values_is_none(study: Any) -> None:
    """Two simulations that agree have no spread, which is not to say that they have no error."""
    assert of_coverage(study, 0.5, np.array([0.5, 0.5])) == UNDECIDED


def test_verdict_on_a_single_number_is_by_the_binomial(study: Any) -> None:
    def found(inside: int, count: int) -> str:
        return of_coverage(study, 0.9, np.arange(count) < inside, components=1, quantity="noise")

    assert found(900, 1000) == REPRODUCED
    assert found(20, 20) == found(180, 200) == UNDECIDED
    assert found(8, 20) == REFUTED


def test_verdict_on_what_is_stored_without_ranks(study: Any) -> None:
    """By mean and standard error: of f nothing is known of its convergence, of a single number it is."""

    def found(share: float, error: float, components: int, row: dict[str, Any] = ROW) -> str:
        quantity = "noise" if components == 1 else "f"
        part = {"quantity": quantity, "level": 0.5, "components": components, "share": share, "error": error}
        (verdict_of,) = verdict(
            study, lambda referee: study.judge_coverage(study.Case(referee, row, []), part), f"{quantity}-50%"
        )
        return verdict_of

    assert found(0.5, 0.01, 20) == found(0.1, 0.01, 20) == UNDECIDED
    assert found(0.1, 0.07, 1) == REFUTED
    assert found(0.5, 0.1, 1) == UNDECIDED
    assert found(0.1, 0.07, 1, ROW | {"worst_rhat": 1.02}) == UNDECIDED
    assert found(0.1, 0.07, 1, ROW | {"least_ess": 399.0}) == UNDECIDED


def test_verdict_on_the_ranks_of_the_log_likelihood(study: Any) -> None:
    def found(centre: float, spread: float, **figures: float) -> list[str]:
        rows = unit_rows(study, "log likelihood", centre=about(centre), spread=about(spread))
        rows[0] |= figures
        return verdict(
            study,
            lambda referee: study.judge_likelihood(study.Case(referee, ROW, rows)),
            "log likelihood-centre",
            "log likelihood-spread",
        )

    assert found(0.5, 1.0) == [REPRODUCED, REPRODUCED]
    assert found(0.453, 0.873) == found(0.547, 1.127) == [REPRODUCED, REPRODUCED]
    assert found(0.447, 0.867) == found(0.553, 1.133) == [REFUTED, REFUTED]
    assert found(0.45, 1.13) == [UNDECIDED, UNDECIDED]
    assert found(0.5, 1.0, rhat=1.02) == [UNDECIDED, UNDECIDED]
    # Of a spread one simulation can be 3 and not only 1, so that it leaves more open.
    assert found(0.9, 1.3, ess=100.0) == [REFUTED, UNDECIDED]
    kinds = ("log likelihood-centre", "log likelihood-spread")
    assert verdict(study, lambda referee: study.judge_likelihood(study.Case(referee, ROW, [])), *kinds) == [
        NOT_RUN,
        NOT_RUN,
    ]


def test_verdict_on_draws_from_the_prior(study: Any) -> None:
    def found(above: int, count: int) -> str:
        centres = np.where(np.arange(count) < above, 0.9, 0.2)
        rows = unit_rows(study, "log likelihood", study.PRIOR, centre=centres)
        rows += unit_rows(study, "f", study.PRIOR, centre=np.full(count, 0.5))
        return verdict(study, lambda referee: study.judge_prior(study.Case(referee, ROW, rows)), "prior")[0]

    assert found(20, 20) == found(200, 200) == REPRODUCED
    assert found(11, 20) == found(115, 200) == UNDECIDED
    assert found(5, 20) == found(80, 200) == REFUTED
    assert verdict(study, lambda referee: study.judge_prior(study.Case(referee, ROW, [])), "prior") == [
        NOT_RUN
    ]


def test_verdict_on_the_gain_of_an_ensemble(study: Any) -> None:
    claims = study.read_claims("zoo_recovery")
    row = {"model": "lenet", "method": "m", "score": -1.0, "prior_score": -2.0, "simulations": 5}

    def found(gains: Any, **moments: float) -> str:
        referee = study.Referee({"lenet-gain": claims["lenet-gain"]})
        rows = [{"model": "lenet", "gain": gain} for gain in gains]
        study.judge_gain(referee, row | moments, rows)
        return referee.verdicts()[0].verdict

    assert found([0.9, 1.0, 1.1]) == found([], gain=0.4, gain_error=0.1) == REPRODUCED
    assert found([-0.9, -1.0, -1.1]) == found([], gain=-0.4, gain_error=0.1) == REFUTED
    assert found([-0.9, 1.0, 1.1]) == found([], gain=0.2, gain_error=0.1) == UNDECIDED
    # Two standard errors are not enough for five data sets: 2.78 are.
    assert found([], gain=0.27, gain_error=0.1) == UNDECIDED
    assert found([], gain=0.29, gain_error=0.1) == REPRODUCED


@pytest.mark.parametrize("inputs_are", ["alike", "independent", "in part"])
def test_what_recovers_itself_is_seldom_refuted(study: Any, inputs_are: str) -> None:
    """Of 60 made calibrations that are exact, at most 5 % may be; more than 9 are one case in 500."""
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(60):
        common, each = rng.uniform(size=(200, 1)), rng.uniform(size=(200, 15))
        uniform = {
            "alike": np.repeat(common, 15, axis=1),
            "independent": each,
            # Uniform whatever is added, modulo one.
            "in part": (common + 0.2 * each) % 1.0,
        }[inputs_are]
        wrong += REFUTED in of_ranks(study, uniform)
    assert wrong <= 9


def of_ranks(study: Any, uniform: np.ndarray) -> list[str]:
    """Verdicts on f from probabilities (S, F) at which its truths lie among draws."""
    ranks = np.minimum(np.floor(200 * uniform), 199).astype(int)
    found = made(ranks, tuple(f"f[{k}]" for k in range(ranks.shape[1])))
    parts = study.coverages(found)
    assert [(part.quantity, part.level) for part in parts] == [("f", 0.5), ("f", 0.9)]
    rows = study.rank_rows(MODEL, study.POSTERIOR, found)

    def judge(referee: Any) -> None:
        for part in parts:
            study.judge_coverage(study.Case(referee, ROW, rows), vars(part))

    return verdict(study, judge, "f-50%", "f-90%")


def test_a_posterior_that_is_too_narrow_or_too_wide_is_refuted(study: Any) -> None:
    """In units of the standard deviation of the posterior truths are 1, 1.05, 1.6 or 0.5 wide."""
    z = np.random.default_rng(4).normal(size=(400, 20))
    for width, expected in ((1.0, REPRODUCED), (1.05, REPRODUCED), (1.6, REFUTED), (0.5, REFUTED)):
        assert of_ranks(study, stats.norm.cdf(width * z)) == [expected, expected]
    # Twenty simulations of a single number say nothing of an exact posterior.
    assert of_ranks(study, stats.norm.cdf(z[:20, :1].repeat(20, axis=1))) == [UNDECIDED, UNDECIDED]


def test_draws_from_the_prior_pass_by_f_and_are_found_out_by_the_log_likelihood(study: Any) -> None:
    """The library's draws from the prior of a linear regression, in place of its posterior."""
    subject, rows = study.Subject(MODEL), 20
    x = study.inputs(subject, rows + 3, 0)
    asked = study.functions(study.bound(subject.model, x[:rows]), (), rows)
    found = bnn.simulation_based_calibration(
        subject.model,
        x[:rows],
        study.Prior(draws=39),
        simulations=40,
        draws=39,
        functions=asked,
        probe=x,
        device="cpu",
    )
    assert not found.failures
    ranks = study.rank_rows(MODEL, study.PRIOR, found)
    case = study.Case(None, ROW, ranks)
    centres = np.array([row["centre"] for row in case.units("f", study.PRIOR)])
    # A mean of 40 whose standard deviation is at most that of one uniform rank.
    assert abs(centres.mean() - 0.5) < 4.0 * 0.3 / np.sqrt(40)
    assert verdict(study, lambda referee: study.judge_prior(study.Case(referee, ROW, ranks)), "prior") == [
        REPRODUCED
    ]


def test_claims_are_declared_of_every_model_and_of_all_that_was_looked_at(study: Any) -> None:
    claims = study.read_claims("zoo_recovery")
    assert {key.partition("-")[0] for key in claims} == {subject.label for subject in study.subjects(False)}
    stored = study.Study.read(FOLDER / "results" / "zoo_recovery", study.FULL)
    # Of the log likelihood the claims are about its ranks.
    rows = [row for row in stored.tables["coverage"] if row["quantity"] != study.LOG_LIKELIHOOD]
    assert len({f"{row['model']}-{row['quantity']}-{row['level']:.0%}" for row in rows} - set(claims)) == 0
    for row in stored.tables["recovery"]:
        of_model = {key.partition("-")[2] for key in claims if key.partition("-")[0] == row["model"]}
        assert {"log likelihood-centre", "log likelihood-spread", "prior", "f-50%", "f-90%"} <= of_model


def test_what_is_not_in_a_run_or_left_out_is_not_run(study: Any, tmp_path: Path) -> None:
    tables = {"left_out": [{"model": "last_layer", "reason": "a parameter without a prior"}], "coverage": []}
    found = study.judge(study.Study(study.TINY, tmp_path, tables))
    assert {each.verdict for each in found} == {NOT_RUN}
    texts = {each.key: each.numbers for each in found}
    assert texts["last_layer-f-90%"] == "left out: a parameter without a prior"
    assert texts[f"{MODEL}-prior"] == "not in this run"


# --- what is compared -----------------------------------------------------------------------------


def test_functions_are_those_of_the_model(study: Any) -> None:
    x = study.inputs(study.Subject("ard_mlp"), 6, 0)
    program = study.bound(bnn.zoo.load("ard_mlp"), x)
    found = study.functions(program, study.APART["ard_mlp"].scales, 6)
    assert set(found) == {"f", "noise", "hidden0.weight.scale", "log likelihood"}
    rng = np.random.default_rng(0)
    # Of six rows with targets and of two held-out ones.
    eta, y = rng.uniform(0.5, 2.0, size=(4, 8, 2)), rng.normal(size=6)
    w = {"noise": np.arange(4.0), "hidden0.weight.scale": np.arange(40.0).reshape(4, 10, 1)}
    np.testing.assert_array_equal(found["f"](w, eta, y), eta[:, 6:, 0])
    np.testing.assert_array_equal(found["noise"](w, eta, y), np.arange(4.0))
    np.testing.assert_array_equal(found["hidden0.weight.scale"](w, eta, y)[1], np.arange(10.0, 20.0))
    _, parameters = program.likelihood.mixture_parameters(eta[:, :6])
    expected = stats.norm.logpdf(y, parameters["loc"], parameters["scale"]).sum(axis=1)
    np.testing.assert_allclose(found["log likelihood"](w, eta, y), expected, rtol=1e-12)


def test_convergence_is_that_of_the_quantities_that_are_ranked(
    study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three quantities mix; the third is stuck in one of two chains."""
    clock = SimpleNamespace(process_time=iter([1.0, 3.0, 6.5, 0.0, 0.0]).__next__)
    monkeypatch.setattr(study, "time", clock)
    rng = np.random.default_rng(1)
    noise, apart = rng.normal(size=(2, 1000)), rng.normal(size=(2, 1000))
    apart[1] += 3.0
    eta = rng.normal(size=(2, 1000, 4, 1))
    posterior = SimpleNamespace(
        predictor=lambda x: eta,
        draws={"noise": noise, "apart": apart},
        targets=np.zeros(3),
        statistics={"diverging": np.zeros(4), "reached_max_tree_depth": np.zeros(4)},
        info=SimpleNamespace(gradient_evaluations=8.0),
    )
    asked = {
        "f": lambda w, eta, y: eta[:, 3:, 0],
        "noise": lambda w, eta, y: w["noise"],
        "apart": lambda w, eta, y: w["apart"],
    }
    figures = study.figures_of(asked, np.zeros((4, 1)))
    found = figures(posterior)
    assert found["converged"] == 0.0
    assert [found["seconds"], figures(posterior)["seconds"]] == [2.0, 3.5]
    assert found["rhat of apart"] > 1.5
    for name, values in (("f", eta[:, :, 3, 0]), ("noise", noise)):
        mixed = study.mixing(values[..., None])
        assert (found[f"rhat of {name}"], found[f"ess of {name}"]) == (mixed.rhat, mixed.ess_bulk)
    del asked["apart"]
    assert study.figures_of(asked, np.zeros((4, 1)))(posterior)["converged"] == 1.0


def test_components_of_a_mixture_may_change_places(study: Any) -> None:
    def mixture(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [6]), bnn.likelihoods.MixtureDensity())

    program = study.bound(mixture, np.zeros((3, 2)))
    eta = np.random.default_rng(0).normal(size=(5, 3, 6))
    found_of = study.functions(program, (), 0)
    f = found_of["f"]
    found = f({}, eta, None)
    order = [1, 0, 3, 2, 5, 4]
    np.testing.assert_allclose(f({}, eta[..., order], None), found, rtol=1e-12)
    family, parameters = program.likelihood.mixture_parameters(eta[:1])
    prediction = bnn.Prediction(family, parameters)
    np.testing.assert_allclose(found[0, :3], prediction.mean, rtol=1e-12)
    np.testing.assert_allclose(found[0, 3:], prediction.std, rtol=1e-12)
    likelihood = study.functions(program, (), 3)["log likelihood"]
    y = np.array([0.3, -0.2, 1.0])
    np.testing.assert_allclose(likelihood({}, eta[..., order], y), likelihood({}, eta, y), rtol=1e-12)


def test_every_model_of_the_zoo_is_asked(study: Any) -> None:
    names = [subject.name for subject in study.subjects(False)]
    assert set(names) == set(bnn.zoo.models())
    assert len({subject.file for subject in study.subjects(False)}) == len(names)
    for name, apart in study.APART.items():
        assert name in bnn.zoo.models()
        assert apart != study.Apart()
        assert {field.name for field in dataclasses.fields(study.Sizes)} >= set(apart.chains)
    for subject in study.subjects(False):
        features = subject.features
        size = bnn.zoo.sketch(subject.model, features).parameters
        if "width" in subject.keywords:
            default = bnn.zoo.sketch(bnn.zoo.load(subject.name), features).parameters
            assert size <= study.FULL.most_weights < default


def test_chains_that_differ_from_the_others_are_said(study: Any) -> None:
    subject = study.Subject("one_layer_digits")
    assert subject.words_of_chains == "noncentred"
    sites = study.bound(subject.model, study.inputs(subject, 5, 0)).sites
    assert "hidden0.weight.base" in sites
    assert "max_tree_depth=10" in study.Subject("latent_inputs").words_of_chains
    assert study.Subject("regression_mlp").words_of_chains == ""


# --- a tiny run -----------------------------------------------------------------------------------


def test_a_tiny_run_is_kept_by_model_and_goes_on(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = study.main(tiny=True, out=tmp_path, checkpoint=tmp_path / "kept", only=["linear_regression"])
    assert [row["model"] for row in first.tables["recovery"]] == ["linear_regression"]
    row = first.tables["recovery"][0]
    # Two simulations whose fits are quick, and so a third.
    assert (row["weights"], row["rows"], row["simulations"], row["failed"]) == (12, 12, 3, 0)
    # Of 15 draws: told, counted, and no reason to leave them out.
    assert row["not_converged"] == 3
    assert row["worst_rhat"] > 1.01
    assert row["scale"] == "noise"
    assert 0.0 <= row["scale_50%"] <= row["scale_90%"] <= 1.0
    assert 0.0 <= row["f_50%"] <= row["f_90%"] <= 1.0
    ranks = first.tables["ranks"]
    assert {(row["quantity"], row["source"]): row["components"] for row in ranks} == {
        (quantity, source): components
        for quantity, components in (("f", 3), ("noise", 1), ("log likelihood", 1))
        for source in ("posterior", "prior")
    }
    assert {row["simulation"] for row in ranks} == {0, 1, 2}
    decided = {each.key: each.verdict for each in first.verdicts if each.key.startswith("linear_regression")}
    assert decided.pop("linear_regression-prior") in (REPRODUCED, UNDECIDED)
    assert set(decided.values()) == {UNDECIDED}
    assert len(list((tmp_path / "kept" / "linear_regression").rglob("simulation-*.safetensors"))) == 3
    assert len(list((tmp_path / "kept" / "linear_regression-prior").rglob("simulation-*.safetensors"))) == 3
    assert (tmp_path / "coverage.png").stat().st_size > 5000

    whole = study.main(tiny=True, out=tmp_path)
    assert whole.tables["recovery"] == first.tables["recovery"]
    reasons = {row["model"]: row["reason"] for row in whole.tables["left_out"]}
    assert set(reasons) == {"empirical_bayes", "graph_convolution"}
    assert "priors.EmpiricalBayes" in reasons["empirical_bayes"]
    assert "coupled" in reasons["graph_convolution"]
    (score,) = whole.tables["scores"]
    assert score["model"] == "wide_network(width=10)"
    assert score["gain"] == pytest.approx(score["score"] - score["prior_score"])
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["numbers"]["seed"] == 0
    assert content["stamp"]["versions"]["numpy"] == np.__version__
    assert [row["gain"] for row in whole.tables["gains"]] == pytest.approx(
        [row["after"] - row["before"] for row in whole.tables["gains"]]
    )
    for table in ("recovery", "scores", "left_out", "coverage", "ranks", "gains"):
        assert (tmp_path / f"{table}.csv").read_text().count("\n") > 1
    assert (tmp_path / "verdicts.txt").read_text().count("\n") == len(study.read_claims("zoo_recovery"))

    def never(*_: Any) -> Any:
        raise AssertionError("what is kept was computed again")

    monkeypatch.setattr(study, "one", never)
    again = study.main(tiny=True, out=tmp_path)
    assert again.tables == whole.tables
    # A model that has changed since is another one.
    stored = tmp_path / "models" / "linear_regression.json"
    content = json.loads(stored.read_text())
    content["part"]["source"] = "another"
    stored.write_text(json.dumps(content))
    with pytest.raises(AssertionError, match="computed again"):
        study.main(tiny=True, out=tmp_path)
    # So is one whose chains are asked for something else.
    content["part"]["source"] = study.Subject("linear_regression").source
    stored.write_text(json.dumps(content))
    study.main(tiny=True, out=tmp_path)
    # And one whose ranks were not kept.
    older = {**content, "part": {name: each for name, each in content["part"].items() if name != "ranks"}}
    stored.write_text(json.dumps(older))
    with pytest.raises(AssertionError, match="computed again"):
        study.main(tiny=True, out=tmp_path)
    stored.write_text(json.dumps(content))
    monkeypatch.setitem(study.APART, "linear_regression", study.Apart(chains={"warmup": 16}))
    with pytest.raises(AssertionError, match="computed again"):
        study.main(tiny=True, out=tmp_path)
    with pytest.raises(UnknownNameError, match="linear_regression"):
        study.main(tiny=True, out=tmp_path, only=["linear_regresion"])


def test_costly_models_stop_early_on_more_data_sets_and_an_interrupted_run_goes_on(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = study.Subject("wide_network", {"width": 3})
    monkeypatch.setitem(study.APART, "wide_network", study.Apart(costly=True))
    fit, fits = study.bnn.fit, []

    def counted(*arguments: Any, **options: Any) -> Any:
        fits.append(arguments[3])
        if len(fits) == 3:
            raise KeyboardInterrupt
        return fit(*arguments, **options)

    monkeypatch.setattr(study.bnn, "fit", counted)
    with pytest.raises(KeyboardInterrupt):
        study.scored(subject, study.TINY, tmp_path, lambda words: None)
    assert fits[0].member.validation == study.VALIDATION
    assert not fits[0].member.polish
    found = study.scored(subject, study.TINY, tmp_path, lambda words: None)
    assert len(fits) == 3 + 2
    assert found["row"]["simulations"] == study.TIMES * study.TINY.scored == 4
    assert "stopped early" in found["row"]["method"]
    undisturbed = study.scored(subject, study.TINY, None, lambda words: None)
    assert undisturbed["row"] == found["row"]
    gains = [each["gain"] for each in found["gains"]]
    assert found["row"]["gain"] == pytest.approx(np.mean(gains))
    assert found["row"]["gain_error"] == pytest.approx(stats.sem(gains))


def test_the_time_left_is_that_of_the_simulations_to_come(
    study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(study, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    said: list[str] = []
    told = study.TimeLeft("model", said.append).task("", 20)
    for done in (8, 9, 10):
        told.update(done, failed=0.0, not_converged=1.0)
        clock[0] += 60.0
    # One a minute since the eighth, which is where this run began.
    assert said == [
        "model: 9 of 20 (1 not converged), 11 min left",
        "model: 10 of 20 (1 not converged), 10 min left",
    ]
