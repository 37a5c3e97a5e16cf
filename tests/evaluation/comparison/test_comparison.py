"""Comparisons of methods whose posterior is known in closed form, so that every column can be checked from outside."""

from __future__ import annotations

import dataclasses
import functools
import html
import io
import math
import os
import re
import shutil
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import arviz_stats
import numpy as np
import pandas as pd
import pytest
import scoringrules
import xarray
from rich.console import Console
from scipy import stats

import ppl_bnn as bnn
from ppl_bnn.core.errors import CurvatureError, DeviceError, InputError, ModelError, UnknownNameError
from ppl_bnn.core.progress import Progress
from ppl_bnn.diagnostics.importance import leave_one_out, pareto_k
from ppl_bnn.evaluation.comparison import folder as comparison_files
from ppl_bnn.evaluation.comparison import record
from ppl_bnn.evaluation.comparison import table as tables
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.evaluation.comparison.run import ComparisonInterrupted, bind_classes, compare
from ppl_bnn.evaluation.comparison.summary import paired_difference, sentences
from ppl_bnn.evaluation.comparison.table import COLUMNS
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.posterior.approximation import Approximation, Chains, Point
from ppl_bnn.prediction import scores
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.reporting.terminal import show

NOISE = 0.5


def line(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))


def classifier(x: Any, y: Any = None, *, classes: int = 2) -> None:
    f = bnn.mlp(x, [classes], prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Categorical())


def exact(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of (weights, bias) of `line`, in closed form."""
    design = np.column_stack([x, np.ones(len(x))])
    covariance = np.linalg.inv(np.eye(design.shape[1]) + design.T @ design / NOISE**2)
    return covariance @ design.T @ y / NOISE**2, covariance


@dataclass(frozen=True)
class Exact(Method):
    """Independent draws from the closed-form posterior of `line`, as if they were chains.

    apart: distance between the chains, in posterior standard deviations. stretch: factor on the spread.
    """

    chains: int = 4
    draws: int = 300
    apart: float = 0.0
    stretch: float = 1.0
    shift: float = 0.0
    target: str = ""

    def run(self, problem: Any, progress: Progress) -> Outcome:
        mean, covariance = exact(problem.inputs, problem.targets)
        rng = np.random.default_rng(problem.seed)
        root = np.linalg.cholesky(covariance)
        z = self.stretch * rng.normal(size=(self.chains, self.draws, len(mean))) + self.shift
        z += self.apart * np.arange(self.chains)[:, None, None]
        flat = mean + z @ root.T
        u = {"output.weight": flat[..., :-1, None], "output.bias": flat[..., -1:]}
        return Outcome(
            Chains(u), compile_seconds=1.5, run_seconds=2.5, gradient_evaluations=400.0, target=self.target
        )


@dataclass(frozen=True)
class Mode(Method):
    def run(self, problem: Any, progress: Progress) -> Outcome:
        mean, _ = exact(problem.inputs, problem.targets)
        return Outcome(Point({"output.weight": mean[:-1, None], "output.bias": mean[-1:]}), run_seconds=0.25)


class Normal(Approximation):
    """q = N(mean, root root^T) over (weights, bias) of `line`."""

    kind = "iid"

    def __init__(self, mean: np.ndarray, root: np.ndarray):
        self.mean, self.root = mean, root

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        flat = self.mean + rng.normal(size=(count, len(self.mean))) @ self.root.T
        return {"output.weight": flat[:, :-1, None], "output.bias": flat[:, -1:]}

    def log_prob(self, u: Any) -> np.ndarray:
        flat = np.column_stack([u["output.weight"][..., 0], u["output.bias"]])
        return stats.multivariate_normal.logpdf(flat, self.mean, self.root @ self.root.T)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"mean": self.mean, "root": self.root}

    @classmethod
    def from_arrays(cls, arrays: Any) -> Normal:
        return cls(arrays["mean"], arrays["root"])


@dataclass(frozen=True)
class Approximate(Method):
    """The closed-form posterior of `line`, its standard deviations too large by a factor."""

    stretch: float = 1.2
    settled: float = 1.0

    def run(self, problem: Any, progress: Progress) -> Outcome:
        mean, covariance = exact(problem.inputs, problem.targets)
        q = Normal(mean, self.stretch * np.linalg.cholesky(covariance))
        return Outcome(q, figures={"converged": self.settled})


@dataclass(frozen=True)
class FromPrior(Method):
    """Draws from the prior as chains, in whatever system and model."""

    def run(self, problem: Any, progress: Progress) -> Outcome:
        u = problem.program.prior_draws(problem.x, problem.y, problem.seed, 12)
        return Outcome(Chains({name: v.reshape(2, 6, *v.shape[1:]) for name, v in u.items()}))


@dataclass(frozen=True)
class Fails(Method):
    error: BaseException = dataclasses.field(default_factory=lambda: CurvatureError("not positive"))

    def run(self, problem: Any, progress: Progress) -> Outcome:
        raise self.error


@pytest.fixture(scope="module")
def rows() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 2))
    y = x @ [1.0, -0.5] + 0.3 + NOISE * rng.normal(size=60)
    return (x[:40], y[:40]), (x[40:], y[40:])


@pytest.fixture(scope="module")
def result(rows: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    out = tmp_path_factory.mktemp("compared") / "new" / "folder"
    methods = {
        "exact": Exact(),
        "wide": Exact(draws=100, stretch=3.0),
        "map": Mode(),
        "broken": Fails(),
        "surprise": Fails(error=RuntimeError("out of\nmemory")),
    }
    return compare(line, *rows, methods, reference="exact", seed=5, out=out, target_name="height / cm"), out


# --- numbers that others compute too ----------------------------------------------------------------------


def test_one_row_per_method_in_the_given_order_with_documented_columns(result: Any) -> None:
    table = result[0].table
    assert list(table.index) == ["exact", "wide", "map", "broken", "surprise"]
    assert table.index.name == "method"
    assert set(table.columns) < set(COLUMNS)
    assert {"rmse", "crps"} <= set(table.columns)
    assert not {"accuracy", "brier"} & set(table.columns)


def test_scores_are_those_of_the_mixture_by_scipy_and_scoringrules(rows: Any, result: Any) -> None:
    (x, y), (x_test, y_test) = rows
    comparison = result[0]
    for name in ("exact", "wide"):
        draws = comparison.posteriors[name].draws
        f = x_test @ draws["output.weight"].reshape(-1, 2).T + draws["output.bias"].reshape(-1)
        pointwise = np.log(np.mean(stats.norm.pdf(y_test[:, None], f, NOISE), axis=1))
        row = comparison.table.loc[name]
        assert row["log_score"] == pytest.approx(pointwise.mean(), rel=1e-10)
        assert row["log_score_se"] == pytest.approx(stats.sem(pointwise), rel=1e-10)
        assert row["rmse"] == pytest.approx(np.sqrt(np.mean((f.mean(axis=1) - y_test) ** 2)), rel=1e-10)
        if name == "wide":
            crps = scoringrules.crps_mixnorm(y_test, f, np.full_like(f, NOISE), backend="numpy")
            assert row["crps"] == pytest.approx(np.mean(crps), rel=1e-4)
        inside = np.abs(np.mean(stats.norm.cdf(y_test[:, None], f, NOISE), axis=1) - 0.5) <= 0.45
        assert row["coverage_90"] == np.mean(inside)
    # The closed-form predictive, to Monte-Carlo accuracy: 1200 draws of a function whose spread is about 0.1.
    mean, covariance = exact(x, y)
    design = np.column_stack([x_test, np.ones(len(x_test))])
    scale = np.sqrt(NOISE**2 + np.einsum("ni,ij,nj->n", design, covariance, design))
    truth = stats.norm.logpdf(y_test, design @ mean, scale).mean()
    assert comparison.table.loc["exact", "log_score"] == pytest.approx(truth, abs=0.02)
    assert comparison.table.loc["map", "log_score"] == pytest.approx(
        stats.norm.logpdf(y_test, design @ mean, NOISE).mean(), rel=1e-10
    )


def test_leave_one_out_is_arviz_on_the_same_trees(result: Any) -> None:
    comparison = result[0]
    trees = {name: comparison.trees[name] for name in ("exact", "wide")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranking = arviz_stats.compare(trees, method="stacking", round_to="none")
        for name, tree in trees.items():
            loo = arviz_stats.loo(tree, pointwise=True)
            row = comparison.table.loc[name]
            assert row["elpd_loo"] == pytest.approx(loo.elpd, rel=1e-12)
            assert row["elpd_loo_se"] == pytest.approx(loo.se, rel=1e-12)
            assert row["pareto_k_loo"] == pytest.approx(float(loo.pareto_k.max()), rel=1e-12)
            assert math.isnan(row["elpd_loo_corrected"])  # chains need no correction
            assert row["loo_rank"] == ranking.loc[name, "rank"]
            assert row["loo_weight"] == pytest.approx(ranking.loc[name, "weight"], abs=1e-8)


def test_a_point_has_no_leave_one_out_and_says_why(result: Any) -> None:
    comparison = result[0]
    for column in (
        "elpd_loo", "elpd_loo_se", "elpd_loo_corrected", "pareto_k_corrected", "pareto_k_loo", "loo_rank", "loo_weight",
    ):  # fmt: skip
        assert math.isnan(comparison.table.loc["map", column])
        assert "no posterior spread" in comparison.notes["map", column]


def test_an_approximation_is_judged_as_a_proposal_and_its_leave_one_out_corrected(rows: Any) -> None:
    result = compare(
        line, *rows, {"q": Approximate(), "early": Approximate(stretch=0.2, settled=0.0)}, reference="q"
    )
    row = result.table.loc["q"]
    assert row["k_hat"] == pareto_k(result.posteriors["q"]).k < 0.7
    found = leave_one_out(result.posteriors["q"])
    assert row["elpd_loo_corrected"] == found.corrected_elpd
    assert row["pareto_k_corrected"] == found.corrected_worst_k < 0.7
    # Against refits in closed form, of which the plain value of draws that are too wide falls short.
    truth = 0.0
    for left in range(40):
        kept = np.arange(40) != left
        mean, covariance = exact(rows[0][0][kept], rows[0][1][kept])
        at = np.append(rows[0][0][left], 1.0)
        truth += stats.norm.logpdf(rows[0][1][left], at @ mean, np.sqrt(NOISE**2 + at @ covariance @ at))
    assert row["elpd_loo_corrected"] == pytest.approx(truth, abs=0.1)
    assert abs(row["elpd_loo"] - truth) > abs(row["elpd_loo_corrected"] - truth)
    assert (row["kind"], row["converged"], row["reference"]) == ("iid", "yes", "reference (an approximation)")
    assert math.isnan(row["r_hat"])
    assert "itself an approximation" in result.summary()
    # Far too narrow: no importance weight can repair it, and the optimisation says that it had not settled.
    early = result.table.loc["early"]
    assert early["k_hat"] > 0.7
    assert math.isnan(early["elpd_loo_corrected"])
    assert math.isnan(early["pareto_k_corrected"])
    assert "k-hat" in result.notes["early", "pareto_k_corrected"].lower()
    assert "k-hat" in result.notes["early", "elpd_loo_corrected"].lower()
    assert early["converged"] == "no"
    assert "plateau" in result.notes["early", "converged"]
    assert early["gap_sd_ratio"] == pytest.approx(0.2 / 1.2, rel=1e-9)


def test_gaps_are_those_of_the_known_posteriors(result: Any) -> None:
    table = result[0].table
    # The sd of 400 draws has a relative error of 1 / sqrt(800), that of 1200 less.
    assert table.loc["wide", "gap_sd_ratio"] == pytest.approx(3.0, rel=4.0 / math.sqrt(800.0))
    assert table.loc["map", "gap_sd_ratio"] == 0.0
    # The mean of 1200 independent draws is off by 1 / sqrt(1200) sd; two halves of 600 by sqrt(2 / 600).
    assert 0.0 < table.loc["map", "gap_mean"] < 4.0 / math.sqrt(1200.0)
    assert 0.0 < table.loc["exact", "gap_mean_floor"] < 4.0 * math.sqrt(2.0 / 600.0)
    assert table.loc["exact", "gap_sd_floor"] == pytest.approx(1.0, abs=0.3)
    assert math.isnan(table.loc["exact", "gap_mean"])
    assert "itself" in result[0].notes["exact", "gap_mean"]
    assert table.loc["wide", "gap_mean_floor"] == table.loc["exact", "gap_mean_floor"]


def test_a_shift_of_the_mean_is_measured_in_sd_of_the_reference(rows: Any) -> None:
    # Shifting z by s moves f(x) by s * L^T d(x): at most |s| * sqrt(3) and for one weight only exactly s.
    x, y = rows[0][0][:, :1] * 0.0, rows[0][1]
    methods = {"there": Exact(), "here": Exact(shift=2.0)}
    with pytest.warns(UserWarning, match="no variance"):
        table = compare(line, (x, y), (x[:5], y[:5]), methods, reference="there").table
    # x = 0 leaves the bias alone, whose z is the last: f = mean + sd * (z + 2).
    assert table.loc["here", "gap_mean"] == pytest.approx(2.0, rel=0.1)
    assert table.loc["here", "gap_sd_ratio"] == pytest.approx(1.0, rel=1e-6)


def test_costs_are_those_the_methods_report(result: Any) -> None:
    row = result[0].table.loc["exact"]
    assert (row["compile_seconds"], row["run_seconds"], row["gradient_evaluations"]) == (1.5, 2.5, 400.0)
    assert row["predict_seconds"] > 0.0
    assert math.isnan(result[0].table.loc["map", "gradient_evaluations"])
    assert "does not count" in result[0].notes["map", "gradient_evaluations"]
    # JAX with what else is loaded takes a hundred megabytes at least.
    assert row["parameters"] == 3.0
    assert 1e2 < row["peak_memory"] < 1e6


def test_standardised_fits_are_scored_in_original_units(rows: Any) -> None:
    (x, y), (x_test, y_test) = rows
    big = compare(line, (x, 1000 * y), (x_test, 1000 * y_test), {"e": Exact()}, standardise=True).table
    one = compare(line, (x, y), (x_test, y_test), {"e": Exact()}, standardise=True).table
    assert big.loc["e", "rmse"] == pytest.approx(1000 * one.loc["e", "rmse"], rel=1e-9)
    assert big.loc["e", "log_score"] == pytest.approx(one.loc["e", "log_score"] - math.log(1000), rel=1e-9)
    assert big.loc["e", "elpd_loo"] == pytest.approx(one.loc["e", "elpd_loo"] - 40 * math.log(1000), rel=1e-9)


# --- methods that fail, and runs that stop ----------------------------------------------------------------


def test_a_method_that_fails_is_a_row_with_its_reason(result: Any) -> None:
    comparison = result[0]
    assert comparison.table.loc["broken", "failure"] == "CurvatureError: not positive"
    assert comparison.table.loc["surprise", "failure"] == "RuntimeError: out of memory"
    assert comparison.table.loc["broken", "log_score":"crps"].isna().all()
    assert comparison.failures.keys() == {"broken", "surprise"}
    assert comparison.predictions.keys() == {"exact", "wide", "map"}
    assert comparison.table.loc["exact", "failure"] == ""
    assert "broken and surprise failed" in comparison.summary()


def test_files_of_what_finished(result: Any) -> None:
    comparison, out = result
    assert {path.name for path in out.iterdir()} == {
        "exact.nc",
        "wide.nc",
        "map.nc",
        "exact.prediction.safetensors",
        "wide.prediction.safetensors",
        "map.prediction.safetensors",
        "comparison.csv",
        "comparison.json",
        "comparison.safetensors",
        "figure.png",
    }
    read = pd.read_csv(out / "comparison.csv", index_col="method", keep_default_na=True)
    assert read.loc["wide", "rmse"] == comparison.table.loc["wide", "rmse"]
    tree = xarray.open_datatree(out / "exact.nc", engine="h5netcdf")
    np.testing.assert_array_equal(tree["log_likelihood/y"], comparison.trees["exact"]["log_likelihood/y"])
    tree.close()


def test_ctrl_c_keeps_what_is_finished_and_says_where(rows: Any, tmp_path: Path) -> None:
    (tmp_path / "late.nc").write_text("of an earlier run")
    methods = {"first": Exact(), "second": Fails(error=KeyboardInterrupt()), "late": Exact()}
    with pytest.raises(KeyboardInterrupt) as caught:
        compare(line, *rows, methods, out=tmp_path)
    assert isinstance(caught.value, ComparisonInterrupted)
    assert str(tmp_path) in str(caught.value)
    assert "finished: first" in str(caught.value)
    assert list(caught.value.partial.table.index) == ["first"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "first.nc",
        "first.prediction.safetensors",
        "comparison.csv",
        "comparison.json",
        "comparison.safetensors",
    }
    assert list(pd.read_csv(tmp_path / "comparison.csv")["method"]) == ["first"]
    with pytest.raises(ComparisonInterrupted, match="partial"):
        compare(line, *rows, methods)


def test_ctrl_c_while_methods_are_ranked_leaves_a_folder_that_loads(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, calls = tables._rank, []

    def interrupted(*arguments: Any) -> None:
        calls.append(len(arguments[0]))
        if len(calls) == 1:
            raise KeyboardInterrupt
        rank(*arguments)

    monkeypatch.setattr(tables, "_rank", interrupted)
    with pytest.raises(ComparisonInterrupted, match=r"finished: first, second") as caught:
        compare(line, *rows, {"first": Exact(), "second": Exact()}, out=tmp_path)
    assert calls == [2, 2]
    loaded = Comparison.load(tmp_path)
    pd.testing.assert_frame_equal(loaded.table, caught.value.partial.table)
    assert list(loaded.predictions) == list(loaded.trees) == ["first", "second"]


def test_methods_are_ranked_and_measured_once(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    for module, name in ((tables, "_rank"), (scores, "halves")):
        measure = getattr(module, name)

        def counting(*arguments: Any, _name: str = name, _measure: Any = measure) -> Any:
            counted[_name] += 1
            return _measure(*arguments)

        monkeypatch.setattr(module, name, counting)
    methods = {"first": Exact(), "second": Exact(), "third": Exact()}
    compare(line, *rows, methods, reference="first", out=tmp_path)
    assert counted == {"_rank": 1, "halves": 3}


def test_high_pareto_k_is_a_note_and_no_warning() -> None:
    # Two rows far out decide the posterior: leaving one out cannot be done by reweighting.
    x = np.array([[0.0], [0.1], [-0.1], [8.0], [-9.0]])
    y = np.array([0.0, 0.1, 0.2, 30.0, 20.0])
    result = compare(line, (x, y), (x, y), {"e": Exact(draws=50)})
    assert result.table.loc["e", "pareto_k_loo"] > 0.7
    assert "above 0.7 in" in result.notes["e", "pareto_k_loo"]


def test_trees_of_many_rows_hold_fewer_draws_and_say_so(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_VALUES", 60 * 404)
    result = compare(line, *rows, {"e": Exact()})
    assert dict(result.trees["e"]["log_likelihood"].sizes) == {"chain": 4, "draw": 101, "obs": 40}
    assert "Of 1200 draws the tree holds 404" in result.notes["e", "elpd_loo"]
    assert result.predictions["e"].draws == 1200


# --- the reference ----------------------------------------------------------------------------------------


def test_a_converged_reference_is_called_one(result: Any) -> None:
    row = result[0].table.loc["exact"]
    assert row["reference"] == "reference"
    assert row["converged"] == "yes"
    assert row["r_hat"] < 1.01
    assert row["ess_min"] > 400
    assert "The reference exact converged" in result[0].summary()
    assert list(result[0].table["reference"])[1:] == [""] * 4


def test_a_reference_that_converged_per_mode_only_is_none(rows: Any) -> None:
    result = compare(line, *rows, {"stuck": Exact(apart=4.0), "map": Mode()}, reference="stuck")
    assert result.table.loc["stuck", "converged"] == "per mode"
    assert result.table.loc["stuck", "reference"] == "reference (converged per mode only)"
    assert "modes of their own" in result.notes["stuck", "converged"]
    assert "The reference stuck has converged per mode only" in result.summary()
    assert "cannot be taken for gaps to the posterior" in result.summary()


def test_a_reference_of_another_target_is_marked(rows: Any) -> None:
    result = compare(line, *rows, {"cold": Exact(target="tempered: T=0.5"), "map": Mode()}, reference="cold")
    assert result.table.loc["cold", "reference"] == "reference (of another target)"
    assert result.table.loc["cold", "target"] == "tempered: T=0.5"
    assert "not to the posterior (tempered: T=0.5)" in result.summary()


def test_a_reference_that_has_not_converged_is_marked(rows: Any) -> None:
    result = compare(line, *rows, {"stuck": Exact(apart=4.0, draws=40), "map": Mode()}, reference="stuck")
    assert result.table.loc["stuck", "reference"] == "reference (not converged)"
    assert result.table.loc["stuck", "converged"] == "no"
    assert result.table.loc["stuck", "r_hat"] > 1.5
    assert "has not converged" in result.summary()
    assert "cannot be taken for gaps to the posterior: run it longer." in result.summary()
    # Chains apart: the halves of the reference, split by chain, are apart too.
    assert result.table.loc["map", "gap_mean_floor"] > 1.0


@dataclass(frozen=True)
class Elsewhere(Exact):
    """`Exact`, but chain k has the weight of the last input moved by k standard deviations."""

    moved: float = 1.0

    def run(self, problem: Any, progress: Progress) -> Outcome:
        outcome = super().run(problem, progress)
        outcome.approximation.u["output.weight"][:, :, -1, 0] += self.moved * np.arange(self.chains)[:, None]
        return outcome


def test_chains_that_agree_at_the_training_rows_only_are_marked(tmp_path: Path) -> None:
    rng = np.random.default_rng(14)
    x = rng.normal(size=(60, 2))
    # The second input hardly varies in training.
    x[:40, 1] *= 1e-6
    y = x[:, 0] + 0.3 + NOISE * rng.normal(size=60)
    methods = {"apart": Elsewhere(draws=500), "good": Exact(draws=500), "map": Mode()}
    found = compare(
        line, (x[:40], y[:40]), (x[40:], y[40:]), methods, reference="apart", out=tmp_path / "run"
    )
    sentence, said = (
        "converged at the training rows, not at the test rows",
        "has not converged at the test rows",
    )
    console = Console(file=io.StringIO(), width=100)
    show(console, found)
    for result in (found, Comparison.load(tmp_path / "run"), Comparison.load(found.save(tmp_path / "again"))):
        table: Any = result.table
        assert list(table["converged"]) == ["not at test rows", "yes", ""]
        assert (table["r_hat"][:2] < 1.01).all()
        assert (table["ess_min"][:2] > 400).all()
        assert table.loc["good", "r_hat_test"] < 1.01 < 1.1 < table.loc["apart", "r_hat_test"]
        assert table.loc["apart", "ess_min_test"] < 400 < table.loc["good", "ess_min_test"]
        assert math.isnan(table.loc["map", "r_hat_test"])
        row = table.loc["apart"]
        figures = f"{sentence}: R-hat {row['r_hat_test']:.3f}, ESS {row['ess_min_test']:.0f}"
        assert figures in result.notes["apart", "converged"]
        assert figures in str(result.diagnoses["apart"])
        assert row["reference"] == "reference (not converged at the test rows)"
        assert f"The reference apart {said} (R-hat up to {row['r_hat_test']:.3f} and" in result.summary()
        assert figures in result.markdown()
    terminal = " ".join(cast(io.StringIO, console.file).getvalue().split())
    assert "not at test rows" in terminal
    # A note begins with a capital.
    assert figures[1:] in terminal
    page = bnn.report(found, tmp_path / "report.html").read_text(encoding="utf-8")
    text = " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())
    assert figures in text
    assert f"The reference apart {said}" in text


@pytest.mark.parametrize(
    ("methods", "reference", "note"),
    [
        ({"e": Exact()}, None, "No reference"),
        ({"bad": Fails(), "e": Exact()}, "bad", "failed"),
        ({"m": Mode(), "e": Exact()}, "m", "spread"),
    ],
)
def test_without_a_usable_reference_gaps_are_blank_with_a_reason(
    rows: Any, methods: Any, reference: Any, note: str
) -> None:
    result = compare(line, *rows, methods, reference=reference)
    assert math.isnan(result.table.loc["e", "gap_mean"])
    assert note in result.notes["e", "gap_mean"]
    assert result.summary().count(". ") == 2


# --- classes ----------------------------------------------------------------------------------------------


def three_classes() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    y = rng.permutation(np.arange(45) % 3)
    x = rng.normal(size=(45, 2)) + 2.0 * np.eye(3)[y][:, :2]
    return (x[:30], y[:30]), (x[30:], y[30:])


def test_classes_are_bound_from_the_labels_and_scored(ppl: str, tmp_path: Path) -> None:
    train, test = three_classes()
    names = ("low", "middle", "high")
    result = compare(
        classifier,
        train,
        test,
        {"prior": FromPrior(ppl=ppl)},
        reference="prior",
        class_names=names,
        feature_names=["a", "b"],
        out=tmp_path,
    )
    probabilities = result.predictions["prior"].probabilities
    assert probabilities.shape == (15, 3)
    row = result.table.loc["prior"]
    assert row["accuracy"] == np.mean(probabilities.argmax(axis=1) == test[1])
    assert row["log_score"] == pytest.approx(np.mean(np.log(probabilities[np.arange(15), test[1]])))
    assert row["brier"] == pytest.approx(np.mean(np.sum((probabilities - np.eye(3)[test[1]]) ** 2, axis=1)))
    assert "rmse" not in result.table
    assert result.task == "classification"


def test_bind_classes() -> None:
    y = np.array([0, 1, 2, 3])
    assert bind_classes(line, y) is line
    bound = bind_classes(classifier, y)
    assert isinstance(bound, functools.partial)
    assert bound.keywords == {"classes": 4}
    chosen = functools.partial(classifier, classes=7)
    assert bind_classes(chosen, y) is chosen
    named = bind_classes(classifier, y, ["a", "b", "c", "d", "e"])
    assert isinstance(named, functools.partial)
    assert named.keywords == {"classes": 5}
    with pytest.raises(InputError, match="labels"):
        bind_classes(classifier, np.array([0, 2, 2]))
    with pytest.raises(InputError, match="at least two classes"):
        bind_classes(classifier, np.zeros(4))


# --- bad input, before the first fit ----------------------------------------------------------------------


def no_observation(x: Any, y: Any = None) -> None:
    bnn.mlp(x, [1])


def test_bad_input_is_refused_before_any_fit(rows: Any, tmp_path: Path) -> None:
    (x, y), (x_test, y_test) = rows
    good: dict[str, Any] = {
        "train": (x, y),
        "test": (x_test, y_test),
        "methods": {"nuts": Fails(error=AssertionError())},
    }
    bad = x_test.copy()
    bad[3, 1] = np.nan
    file = tmp_path / "file"
    file.write_text("in the way")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"test": (bad, y_test)}, InputError, r"test x: .*NaN at \(3, 1\)"),
        ({"train": (x, y[:-1])}, InputError, "train y: .*40 rows"),
        ({"test": (x_test[:, :1], y_test)}, InputError, "test x: .*the same columns"),
        ({"test": (x_test, np.stack([y_test, y_test], 1))}, InputError, "test y"),
        ({"train": x}, InputError, "train: expected a pair"),
        ({"methods": {}}, InputError, "methods"),
        ({"methods": {"nuts": Exact}}, InputError, r"an instance of a method.*Exact\(\)"),
        ({"methods": {"nuts": "nuts"}}, InputError, "expected a method"),
        ({"methods": {"a/b": Exact()}}, InputError, "file names"),
        ({"methods": {"a": Exact(), "A": Exact()}}, InputError, "case"),
        ({"reference": "nutz"}, UnknownNameError, "did you mean 'nuts'"),
        ({"seed": -1}, InputError, "seed"),
        ({"device": "tpu"}, InputError, "device"),
        ({"device": "cuda:7"}, DeviceError, "cuda"),
        ({"out": file / "folder"}, InputError, "a folder that can be written"),
        ({"feature_names": ["one"]}, InputError, "2 names"),
        ({"model": "line"}, InputError, "model"),
        ({"model": no_observation}, ModelError, "observe"),
    ]
    for changed, error, text in cases:
        with pytest.raises(error, match=text):
            compare(**{"model": line, **good, **changed})
    train, (inputs, labels) = three_classes()
    with pytest.raises(InputError, match=r"test y: expected labels 0\.\.2"):
        compare(classifier, train, (inputs, labels + 1), good["methods"])
    with pytest.raises(InputError, match="whole numbers"):
        compare(classifier, (train[0], train[1] + 0.5), (inputs, labels), good["methods"])


def test_nothing_is_removed_by_a_call_that_is_refused(rows: Any, tmp_path: Path) -> None:
    (tmp_path / "comparison.csv").write_text("kept")
    with pytest.raises(ModelError):
        compare(no_observation, *rows, {"e": Exact()}, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.csv"]


# --- the three sentences ----------------------------------------------------------------------------------


def made_up(log_scores: dict[str, np.ndarray], **columns: Any) -> Comparison:
    """A comparison whose pointwise log scores are given rather than computed."""
    table = pd.DataFrame(
        {
            "reference": "",
            "converged": "",
            "kind": "chains",
            "target": "",
            "failure": "",
            "log_score": {name: values.mean() for name, values in log_scores.items()},
            "log_score_se": {
                name: stats.sem(values) if np.isfinite(values).all() else math.nan
                for name, values in log_scores.items()
            },
            "r_hat": math.nan,
            "ess_min": math.nan,
            "gap_mean": 0.5,
            "gap_sd_ratio": 0.8,
            "gap_mean_floor": 0.1,
            "compile_seconds": 1.0,
            "run_seconds": 1.0,
        }
    )
    for column, values in columns.items():
        table[column] = pd.Series(values)
    rows = len(next(iter(log_scores.values())))
    nothing = Prediction("Normal", {"loc": np.zeros((1, rows)), "scale": np.ones((1, rows))})

    class MadeUp(Comparison):
        def pointwise_log_scores(self) -> dict[str, np.ndarray]:
            return log_scores

    return MadeUp(
        table,
        {},
        dict.fromkeys(log_scores, nothing),
        {},
        {},
        "a",
        {},
        {"task": "regression", "target_name": "y"},
        np.zeros((rows, 1)),
        np.zeros(rows),
    )


def test_a_difference_below_its_paired_standard_error_is_not_claimed(rng: np.random.Generator) -> None:
    shared = 10.0 * rng.normal(size=50)
    noise = rng.normal(size=50)
    noise = (noise - noise.mean()) / noise.std(ddof=1)  # mean 0, standard error of the mean 1 / sqrt(50)
    error = 1.0 / math.sqrt(50)
    close = sentences(made_up({"a": shared, "b": shared + noise - 0.9 * error}))
    assert "level with b" in close
    assert "predicts best" not in close
    # Shared rows vary with sd 10: only the paired error shows that this difference is real.
    far = sentences(made_up({"a": shared, "b": shared + noise - 5.0 * error}))
    assert "a predicts best" in far
    mixed = sentences(made_up({"a": shared, "b": shared + noise - 5.0 * error, "c": shared - 1e-9 * noise}))
    assert "predicts best" not in mixed
    assert "a is ahead of b by" in mixed
    assert "level with c" in mixed
    assert f"ahead of b by {5 * error:.2f} ± {error:.2f}" in far
    difference, se = paired_difference(shared, shared + noise - 5.0 * error)
    oracle = stats.ttest_rel(shared, shared + noise - 5.0 * error)
    assert difference / se == pytest.approx(oracle.statistic, rel=1e-10)


@pytest.mark.parametrize(("errors", "claimed"), [(1.95, False), (2.05, True)])
def test_a_difference_is_claimed_from_two_standard_errors_on(
    errors: float, claimed: bool, rng: np.random.Generator
) -> None:
    noise = rng.normal(size=50)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    shared = 10.0 * rng.normal(size=50)
    text = sentences(made_up({"a": shared, "b": shared + noise - errors / math.sqrt(50)}))
    assert ("a predicts best" in text) is claimed
    assert ("level with b" in text) is not claimed


def test_sentences_without_differences_rows_or_finite_scores() -> None:
    same = np.array([-1.0, -2.0])
    assert "level with b" in sentences(made_up({"a": same, "b": same.copy()}))
    assert "no probability" in sentences(made_up({"a": same, "b": np.array([-1.0, -math.inf])}))
    assert "predicts best" not in sentences(
        made_up({"a": np.array([-1.0, -math.inf]), "b": np.array([-1.0, -math.inf])})
    )


def test_the_sentences_weigh_gaps_and_costs() -> None:
    scores = {"a": np.array([-1.0, -2.0]), "b": np.array([-1.1, -1.9])}
    text = sentences(
        made_up(
            scores,
            run_seconds={"a": 19.0, "b": 1.0},
            converged={"a": "yes", "b": ""},
            r_hat={"a": 1.004, "b": math.nan},
            ess_min={"a": 812.0, "b": math.nan},
        )
    )
    assert "0.50 sd off in the mean and with 0.80 times its spread, in 2 s (10 times faster)" in text
    assert "R-hat up to 1.004 and effective sample size at least 812" in text
    doubtful = sentences(made_up(scores, converged={"a": "in doubt", "b": ""}))
    assert (
        "may have converged, but its sampler reported problems, so the gaps to it cannot be taken" in doubtful
    )
    assert "reference a converged" not in doubtful
    assert "within sampling noise" in sentences(made_up(scores, gap_mean={"a": math.nan, "b": 0.05}))
    assert "without any spread" in sentences(made_up(scores, gap_sd_ratio={"a": math.nan, "b": 0.0}))


def test_markdown_holds_table_summary_and_notes(result: Any) -> None:
    text = result[0].markdown()
    assert text.splitlines()[0].startswith("| method | reference | kind | ppl | target | log_score |")
    assert len({line.count("|") for line in text.splitlines()[:7]}) == 1
    assert result[0].summary() in text
    assert (
        "- map, elpd_loo, elpd_loo_se, elpd_loo_corrected, pareto_k_corrected, pareto_k_loo, loo_rank, loo_weight: "
        in text
    )


def test_saving_again_elsewhere_gives_the_same_files(result: Any, tmp_path: Path) -> None:
    comparison, out = result
    folder = comparison.save(tmp_path / "copy")
    assert (folder / "comparison.csv").read_bytes() == (out / "comparison.csv").read_bytes()
    assert {path.name for path in folder.iterdir()} == {path.name for path in out.iterdir()}


# --- a folder that was there before -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def later(rows: Any) -> Comparison:
    """A comparison of other methods."""
    return compare(line, *rows, {"map": Mode(), "again": Mode()}, seed=6)


def content(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder; None for a folder."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def kept(out: Path, tmp_path: Path, among: bool) -> tuple[Path, dict[str, bytes | None]]:
    """A folder with the comparison `out`, alone or among other things; these other things."""
    folder = tmp_path / "kept"
    shutil.copytree(out, folder)
    if among:
        (folder / "notes.txt").write_text("mine")
        (folder / "mine.nc").write_bytes(b"my own")
        (folder / "data" / "deep").mkdir(parents=True)
        (folder / "data" / "deep" / "rows.csv").write_text("1,2")
    of_comparison = set(content(out))
    return folder, {name: each for name, each in content(folder).items() if name not in of_comparison}


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(folder: Path, comparison: Comparison) -> None:
        (folder / "figure.png").write_bytes(b"drawn")

    monkeypatch.setattr(comparison_files, "write_figure", drawn)


STEPS = (
    "write_test_rows",
    "write_tree",
    "write_prediction",
    "for_spreadsheet",
    "write_figure",
    "write_words",
)


@pytest.mark.parametrize(("error", "among"), [(OSError, False), (KeyboardInterrupt, True)])
@pytest.mark.parametrize("step", [*STEPS, "replace"])
def test_a_save_that_fails_leaves_what_was_there(
    step: str,
    among: bool,
    error: type[BaseException],
    result: Any,
    later: Comparison,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = kept(result[1], tmp_path, among)
    before = content(tmp_path)
    with monkeypatch.context() as patched:
        quick(patched)
        where = os if step == "replace" else comparison_files
        works, calls = getattr(where, step), []

        def fails(*arguments: Any) -> Any:
            # The second of two: a tree, a prediction, a file after the first.
            moved = step == "replace" and Path(arguments[1]).parent != folder
            calls.extend([] if moved else [1])
            once = step in ("write_test_rows", "for_spreadsheet", "write_figure", "write_words")
            if len(calls) == (1 if once else 2):
                raise error("planted")
            return works(*arguments)

        patched.setattr(where, step, fails)
        with pytest.raises(InputError if error is OSError else error, match="planted"):
            later.save(folder)
    assert content(tmp_path) == before
    assert list(Comparison.load(folder).predictions) == list(result[0].predictions)


@pytest.mark.parametrize("among", [False, True])
def test_a_save_replaces_all_of_the_comparison_and_nothing_else(
    among: bool, result: Any, later: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    folder, others = kept(result[1], tmp_path, among)
    assert later.save(folder) == folder
    fresh = later.save(tmp_path / "new" / "fresh")
    assert content(folder) == content(fresh) | others
    again = Comparison.load(folder)
    pd.testing.assert_frame_equal(again.table, later.table)
    assert list(again.trees) == list(later.trees) == ["map", "again"]
    # Once more, and over a damaged one.
    later.save(folder)
    (folder / "comparison.json").write_bytes((folder / "comparison.json").read_bytes()[:-20])
    result[0].save(folder)
    assert set(content(folder)) == {path.name for path in result[1].iterdir()} | set(others)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_save_where_the_process_is_and_through_a_link(
    result: Any, later: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    folder, _ = kept(result[1], tmp_path, False)
    link = tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)
    later.save(link)
    assert link.is_symlink()
    assert list(Comparison.load(folder).trees) == ["map", "again"]
    monkeypatch.chdir(folder)
    result[0].save(".")
    assert Path.cwd() == folder
    assert list(Comparison.load(".").trees) == list(result[0].trees)
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "link"}


def test_files_that_no_comparison_has_written_are_not_replaced(
    later: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    (tmp_path / "figure.png").write_bytes(b"mine")
    with pytest.raises(
        InputError, match=r"that of a comparison to replace; got figure.png of something else"
    ):
        later.save(tmp_path)
    assert content(tmp_path) == {"figure.png": b"mine"}
    folder = tmp_path / "second"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    later.save(folder)
    (folder / "map.nc").unlink()
    (folder / "map.nc").symlink_to(tmp_path / "figure.png")
    with pytest.raises(InputError, match=r"map.nc"):
        later.save(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "map.nc").read_bytes() == b"mine"
    with pytest.raises(InputError, match="written"):
        later.save(tmp_path / "figure.png")
    with pytest.raises(InputError, match="written"):
        later.save(tmp_path / "figure.png" / "below")


def test_what_a_kill_left_is_named(result: Any, tmp_path: Path) -> None:
    folder, _ = kept(result[1], tmp_path, False)
    left = tmp_path / ".kept.0123abcd.old"
    folder.rename(left)
    with pytest.raises(
        InputError, match=r"try .*\.kept\.0123abcd\.old, which a save that was killed has left"
    ):
        Comparison.load(folder)
    assert list(Comparison.load(left).trees) == list(result[0].trees)
