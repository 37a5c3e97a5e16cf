"""The study of whether models recover themselves: its arithmetic beside SciPy's, planted errors, and a tiny run."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, UnknownNameError
from ppl_bnn.diagnostics.calibration import Calibration

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("zoo_recovery")


def made(ranks: np.ndarray, names: tuple[str, ...], draws: int = 199) -> Calibration:
    truths = np.zeros(ranks.shape)
    return Calibration("made", names, np.arange(len(ranks)), ranks, truths, draws, len(ranks))


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


def test_the_p_value_of_one_number_is_that_of_the_binomial_test(study: Any) -> None:
    ranks = np.array([0] * 9 + [100] * 11)[:, None]
    found = study.covered("noise", ranks, 199, 0.9)
    assert found.share == 0.55
    assert found.p == pytest.approx(float(stats.binomtest(11, 20, 0.9).pvalue), rel=1e-12)
    both = study.covered("f", np.column_stack([ranks, np.full(20, 100)]), 199, 0.9)
    second = stats.binomtest(20, 20, 0.9).pvalue
    assert both.p == pytest.approx(float(found.p + second), rel=1e-12)


@pytest.mark.parametrize("inputs_are", ["alike", "independent", "in part"])
def test_what_recovers_itself_is_seldom_called_otherwise(study: Any, inputs_are: str) -> None:
    """At ERROR_RATE = 1 % of 150 made calibrations 1.5 may be called wrong; more than 6 are one case in 1000."""
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(150):
        common = rng.uniform(size=(20, 1))
        each = rng.uniform(size=(20, 15))
        uniform = {
            "alike": np.repeat(common, 15, axis=1),
            "independent": each,
            # Uniform whatever is added, modulo one.
            "in part": (common + 0.2 * each) % 1.0,
        }[inputs_are]
        ranks = np.floor(200 * np.column_stack([uniform, rng.uniform(size=20)])).astype(int)
        parts = study.coverages(made(ranks, (*(f"f[{k}]" for k in range(15)), "noise")))
        assert [(part.quantity, part.level) for part in parts] == [
            ("f", 0.5),
            ("f", 0.9),
            ("noise", 0.5),
            ("noise", 0.9),
        ]
        wrong += study.verdict_of(parts, 20) == study.NOT_RECOVERED
    assert wrong <= 6


def test_a_posterior_that_is_too_narrow_or_too_wide_is_not_recovered(study: Any) -> None:
    rng = np.random.default_rng(4)
    names = tuple(f"f[{k}]" for k in range(5))
    # Truths three and a third posterior standard deviations wide.
    for width in (4.0, 0.1):
        uniform = stats.norm.cdf(width * rng.normal(size=(20, 5)))
        ranks = np.minimum(np.floor(200 * uniform), 199).astype(int)
        parts = study.coverages(made(ranks, names))
        assert study.verdict_of(parts, 20) == study.NOT_RECOVERED
        assert study.verdict_of(parts, 5) == study.UNDECIDED
    assert study.verdict_of([], 20) == study.UNDECIDED
    # Of chains that have not converged, most of them, nothing is said.
    assert study.verdict_of(parts, 20, not_converged=10) == study.NOT_RECOVERED
    assert study.verdict_of(parts, 20, not_converged=11) == study.UNDECIDED


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_what_would_have_passed_is_said(study: Any, level: float) -> None:
    low, high = study.unseen(level, 20, 4)
    for count in range(21):
        ranks = np.where(np.arange(20) < count, 100, 0)[:, None].repeat(3, axis=1)
        part = study.covered("f", ranks, 199, level)
        assert part.share == count / 20
        assert (part.p >= study.ERROR_RATE / 4) is (low <= count / 20 <= high)


# --- what is compared -----------------------------------------------------------------------------


def test_functions_are_those_of_the_model(study: Any) -> None:
    x = study.inputs(study.Subject("ard_mlp"), 6, 0)
    program = study.bound(bnn.zoo.load("ard_mlp"), x)
    found = study.functions(program, study.APART["ard_mlp"].scales)
    assert set(found) == {"f", "noise", "hidden0.weight.scale"}
    eta = np.random.default_rng(0).normal(size=(4, 6, 2))
    w = {"noise": np.arange(4.0), "hidden0.weight.scale": np.arange(40.0).reshape(4, 10, 1)}
    np.testing.assert_array_equal(found["f"](w, eta, x), eta[..., 0])
    np.testing.assert_array_equal(found["noise"](w, eta, x), np.arange(4.0))
    np.testing.assert_array_equal(found["hidden0.weight.scale"](w, eta, x)[1], np.arange(10.0, 20.0))


def test_components_of_a_mixture_may_change_places(study: Any) -> None:
    def mixture(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [6]), bnn.likelihoods.MixtureDensity())

    program = study.bound(mixture, np.zeros((3, 2)))
    eta = np.random.default_rng(0).normal(size=(5, 3, 6))
    f = study.functions(program)["f"]
    found = f({}, eta, None)
    order = [1, 0, 3, 2, 5, 4]
    np.testing.assert_allclose(f({}, eta[..., order], None), found, rtol=1e-12)
    family, parameters = program.likelihood.mixture_parameters(eta[:1])
    prediction = bnn.Prediction(family, parameters)
    np.testing.assert_allclose(found[0, :3], prediction.mean, rtol=1e-12)
    np.testing.assert_allclose(found[0, 3:], prediction.std, rtol=1e-12)


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
    assert (row["weights"], row["rows"], row["simulations"], row["failed"]) == (12, 12, 2, 0)
    # Two simulations of 15 draws: told, counted, and no reason to leave them out.
    assert row["verdict"] == study.UNDECIDED
    assert row["not_converged"] == 2
    assert row["worst_rhat"] > 1.01
    assert row["scale"] == "noise"
    assert {0.0, 0.5, 1.0} >= {row["scale_50%"], row["scale_90%"]}
    assert 0.0 <= row["f_50%"] <= row["f_90%"] <= 1.0
    assert len(list((tmp_path / "kept").rglob("simulation-*.safetensors"))) == 2
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
    assert content["numbers"]["versions"]["numpy"] == np.__version__
    for table in ("recovery", "scores", "left_out", "coverage"):
        assert (tmp_path / f"{table}.csv").read_text().count("\n") > 1
    assert (tmp_path / "verdicts.txt").read_text().count("\n") == 4

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
