"""Grids: what a cell is, that it is computed once, what is kept, and what the tables make of it.

Most methods here know the posterior of a linear model in closed form, so that a cell costs little and its numbers can
be computed from outside.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import ppl_bnn as bnn
from ppl_bnn import scores
from ppl_bnn.core import processes, stored
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.core.files import part_of
from ppl_bnn.core.progress import Progress
from ppl_bnn.datasets import splits
from ppl_bnn.datasets.tables import Splits, Table
from ppl_bnn.evaluation.comparison.run import compare
from ppl_bnn.evaluation.comparison.table import gap
from ppl_bnn.evaluation.grid import cell as cells
from ppl_bnn.evaluation.grid import grid as grid_module
from ppl_bnn.evaluation.grid.grid import Grid, GridInterrupted
from ppl_bnn.evaluation.grid.result import COSTS, GridResult
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.posterior.approximation import Chains, Point
from ppl_bnn.prediction.reliability import Event, Transform
from ppl_bnn.reporting.figures.pictures import calibration
from ppl_bnn.reporting.grid_findings import GridFindings

NOISE = 0.5


def line(x: Any, y: Any = None, *, scale: float = 1.0) -> None:
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, scale))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))


def labels(x: Any, y: Any = None, *, classes: int = 2) -> None:
    f = bnn.mlp(x, [classes], prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Categorical())


@dataclass(frozen=True)
class Exact(Method):
    """Independent draws from the posterior of `line`, in two chains. shift: of every draw, in standard deviations."""

    draws: int = 60
    shift: float = 0.0
    stretch: float = 1.0

    def run(self, problem: Any, progress: Progress) -> Outcome:
        design = np.column_stack([problem.inputs, np.ones(len(problem.inputs))])
        covariance = np.linalg.inv(np.eye(design.shape[1]) + design.T @ design / NOISE**2)
        mean = covariance @ design.T @ problem.targets / NOISE**2
        rng = np.random.default_rng(problem.seed)
        z = self.stretch * rng.normal(size=(2, self.draws, len(mean))) + self.shift
        flat = mean + z @ np.linalg.cholesky(covariance).T
        return Outcome(
            Chains({"output.weight": flat[..., :-1, None], "output.bias": flat[..., -1:]}), run_seconds=0.1
        )


@dataclass(frozen=True)
class Zero(Method):
    """All weights zero: a point."""

    def run(self, problem: Any, progress: Progress) -> Outcome:
        sites = problem.program.sites.values()
        return Outcome(Point({site.name: np.zeros(site.unconstrained_shape) for site in sites}))


@dataclass(frozen=True)
class FromPrior(Method):
    """Draws from the prior as chains, of any model."""

    def run(self, problem: Any, progress: Progress) -> Outcome:
        u = problem.program.prior_draws(problem.x, problem.y, problem.seed, 12)
        return Outcome(Chains({name: value.reshape(2, 6, *value.shape[1:]) for name, value in u.items()}))


@dataclass(frozen=True)
class Refuses(Method):
    def run(self, problem: Any, progress: Progress) -> Outcome:
        raise UnsupportedError("not this\nmodel")


@dataclass(frozen=True)
class Warns(Zero):
    def run(self, problem: Any, progress: Progress) -> Outcome:
        for words in ("Error reading persistent compilation cache entry for 'f': cut short", "of mine"):
            warnings.warn(words, UserWarning, stacklevel=1)
        return super().run(problem, progress)


def table(seed: int, rows: int = 30, name: str = "made") -> Table:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 2))
    y = x @ [1.0, -0.5] + 0.3 + NOISE * rng.normal(size=rows)
    order = np.stack([np.arange(rows), np.arange(rows)[::-1]])
    published = Splits(order[:, : rows // 2], order[:, rows // 2 :])
    return Table(name, x, y, ["a", "b"], "y", "regression", splits=published)


def classes(rows: int = 30) -> Table:
    rng = np.random.default_rng(5)
    return Table(
        "three",
        rng.normal(size=(rows, 2)),
        np.arange(rows) % 3,
        ["a", "b"],
        "c",
        "classification",
        ("u", "v", "w"),
    )


METHODS = {
    "exact": Exact(ppl="pyro"),
    "off": Exact(ppl="pyro", shift=2.0, stretch=1.5),
    "zero": Zero(ppl="pyro"),
}


def small(**changes: Any) -> Grid:
    settings: dict[str, Any] = {
        "models": [line],
        "data": {"one": table(1), "two": table(2)},
        "methods": METHODS | {"refuses": Refuses(ppl="pyro")},
        "splits": "random:2@0.8",
        "seeds": 2,
        "reference": "exact",
        "standardise": False,
    }
    return Grid(**{**settings, **changes})


class Told(list):
    """A progress that keeps what it was told."""

    def task(self, title: str, total: int) -> Told:
        self.append((title, total))
        return self

    def update(self, done: int, **figures: float) -> None:
        self.append((done, figures))

    def close(self) -> None:
        self.append("closed")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[GridResult, Path, Told]:
    told, out = Told(), tmp_path_factory.mktemp("grid") / "new"
    return small().run(out, engine="sequential", progress=told), out, told


# --- what is computed ---------------------------------------------------------------------------------------


def test_one_row_per_cell_in_the_order_of_the_grid(finished: Any) -> None:
    result = finished[0]
    assert len(result.cells) == result.asked == 2 * 4 * 2 * 2
    assert (result.missing, result.failures) == (0, 8)
    found = list(result.cells[["split", "seed", "data", "method"]].itertuples(index=False, name=None))
    assert found == [
        (split, seed, data, method)
        for split in ("random@0.8[0]", "random@0.8[1]")
        for seed in (0, 1)
        for data in ("one", "two")
        for method in ("exact", "off", "zero", "refuses")
    ]
    assert set(result.cells["model"]) == {"line"}
    assert [cell.key for cell in small().cells] == list(result.cells["key"])


def test_a_cell_has_what_a_comparison_has(finished: Any) -> None:
    """Every number of `compare` on the same rows with the same seed, but for times."""
    result, made = finished[0], table(1)
    train, test = made.split(1, 0.2)
    for seed in (0, 1):
        compared = compare(
            line, (made.x[train], made.y[train]), (made.x[test], made.y[test]), METHODS,
            reference="exact", seed=seed, feature_names=["a", "b"],
        ).table  # fmt: skip
        block = result.cells.query("data == 'one' and split == 'random@0.8[1]' and seed == @seed").set_index(
            "method"
        )
        shared = [name for name in compared.columns if name in block.columns and name not in COSTS]
        assert {"log_score", "crps", "elpd_loo", "r_hat", "gap_mean", "gap_sd_floor", "reference"} <= set(
            shared
        )
        for name in METHODS:
            for column in shared:
                one, other = block.loc[name, column], compared.loc[name, column]
                if isinstance(other, str):
                    assert one == other, (name, column)
                else:
                    np.testing.assert_allclose(one, other, rtol=1e-12, err_msg=f"{name} {column}")


def test_calibration_of_a_grid_is_that_of_its_cells(finished: Any) -> None:
    """Pooled over cells with equally many test rows: the mean of what the scores say of each."""
    result = finished[0]
    picture = calibration(GridFindings(result))
    assert picture.numbers is not None
    assert [panel.title for panel in picture.panels] == [
        f"{data}: {what}" for data in ("one", "two") for what in ("coverage", "PIT")
    ]
    rows = picture.numbers.set_index(["data", "method"])
    for (data, name), block in result.cells.query("failure == ''").groupby(["data", "method"]):
        assert rows.loc[(data, name), "rows"] == block["test_rows"].sum()
        assert rows.loc[(data, name), "coverage_90"] == pytest.approx(block["coverage_90"].mean(), abs=1e-12)
    assert ("one", "refuses") not in rows.index
    assert result.arrays(result.cells["key"].iloc[3]) == {}


def test_costs_of_a_cell_are_kept(finished: Any) -> None:
    done = finished[0].cells.query("failure == ''")
    assert set(done["parameters"]) == {3.0}
    assert set(done["run_seconds"]) == {0.1, 0.0}
    assert (done["seconds"] > 0.0).all()
    # A process with torch, Pyro and ArviZ holds more than 100 MB, and nobody's has a terabyte.
    assert done["peak_memory"].between(1e2, 1e6).all()
    assert (done["begun"].diff().dropna() > 0.0).all()
    assert set(done["device"]) == {"cpu"}


def test_a_cell_that_fails_is_a_row_with_its_reason(finished: Any) -> None:
    failed = finished[0].cells.query("method == 'refuses'")
    assert set(failed["failure"]) == {"UnsupportedError: not this model"}
    assert failed[["log_score", "rmse", "gap_mean"]].isna().all(axis=None)


def test_warnings_of_a_fit_are_kept_but_not_what_another_process_had_to_do_with(tmp_path: Path) -> None:
    grid = small(data={"one": table(1)}, methods={"warns": Warns(ppl="pyro")}, reference=None, seeds=1)
    result = grid.run(tmp_path, engine="sequential")
    assert [said["warnings"] for said in result.notes.values()] == ["of mine", "of mine"]


def test_progress_counts_cells_and_failures_and_foretells_the_end(finished: Any) -> None:
    told = finished[2]
    assert told[0] == ("Grid", 32)
    assert told[-1] == "closed"
    counts = told[1:-1]
    assert [done for done, _ in counts] == list(range(33))
    assert counts[0][1] == {"failed": 0.0}
    assert counts[-1][1] == {"failed": 8.0, "minutes_left": 0.0}
    assert all(math.isfinite(figures["minutes_left"]) for _, figures in counts[1:])


def test_a_model_is_not_fitted_to_a_table_of_another_task(tmp_path: Path) -> None:
    grid = Grid(
        models=[line, labels], data={"one": table(1), "three": classes()}, methods={"prior": FromPrior(ppl="pyro")},
        splits="random:1@0.8", reference="prior",
    )  # fmt: skip
    assert [(cell.model, cell.data) for cell in grid.cells] == [("line", "one"), ("labels", "three")]
    assert grid.left_out == (
        "labels is a model for classification, and one for regression.",
        "line is a model for regression, and three for classification.",
    )
    result = grid.run(tmp_path, engine="sequential")
    assert result.left_out == grid.left_out
    row = result.cells.set_index("model").loc["labels"]
    # Three columns of weights and their biases: `classes` was bound.
    assert row["parameters"] == 9.0
    assert 0.0 < row["brier"] < 2.0
    assert math.isnan(row["rmse"])
    found = result.table()
    assert found.loc[("labels", "three", "prior"), "accuracy"] == row["accuracy"]
    event = Event.from_arrays(result.arrays(row["key"]))
    assert event.happened.mean() == row["accuracy"]
    picture = calibration(GridFindings(result))
    assert [panel.title for panel in picture.panels] == [
        "line on one: coverage",
        "line on one: PIT",
        "labels on three: reliability",
    ]
    with pytest.raises(InputError, match="a model for the task"):
        _ = replace(grid, models=[labels], data={"one": table(1)}).cells


# --- gaps -----------------------------------------------------------------------------------------------------


def test_gaps_from_moments_are_those_of_whole_predictions() -> None:
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.ones(3), size=(2, 12, 7))
    numbers = [
        bnn.Prediction("Normal", {"loc": rng.normal(size=(12, 7)), "scale": np.ones((12, 7))})
        for _ in range(2)
    ]
    several = [
        bnn.Prediction("Normal", {"loc": rng.normal(size=(12, 7, 2)), "scale": np.ones((12, 7, 2))})
        for _ in range(2)
    ]
    labelled = [bnn.Prediction("Categorical", {"probs": each}) for each in p]
    binary = [bnn.Prediction("Bernoulli", {"probs": each[..., 0]}) for each in p]
    certain = bnn.Prediction("Bernoulli", {"probs": np.where(np.arange(7) < 2, 0.5, p[0, ..., 0])})
    point = bnn.Prediction("Normal", {"loc": np.zeros((1, 7)), "scale": np.ones((1, 7))})
    for one, other in (numbers, several, labelled, binary, (binary[0], certain), (point, numbers[0])):
        arrays = [{"mean": each.mean, "variance": each.mean_function_variance} for each in (one, other)]
        truth = scores.fidelity(one, other)
        found = gap(arrays[0], arrays[1], one.is_classes)
        np.testing.assert_allclose(found, [truth["mean_gap"], truth["sd_ratio"]], rtol=1e-12)
    with pytest.raises(InputError, match="epistemic spread"):
        gap(arrays[1], arrays[0], False)
    with pytest.raises(InputError, match="the same rows"):
        gap({"mean": np.zeros(3), "variance": np.ones(3)}, arrays[1], False)


def test_gaps_can_be_measured_against_another_method(finished: Any) -> None:
    result, out, _ = finished
    other = GridResult.load(out, reference="off").cells.query("failure == ''")
    one = result.cells.query("failure == ''")
    by = ["data", "split", "seed"]
    a = one[one["method"] == "off"].set_index(by)["gap_sd_ratio"]
    b = other[other["method"] == "exact"].set_index(by)["gap_sd_ratio"]
    np.testing.assert_allclose(a * b, 1.0, rtol=1e-12)
    with pytest.raises(UnknownNameError, match="did you mean 'exact'"):
        GridResult.load(out, reference="exat")
    against_a_point = GridResult.load(out, reference="zero")
    assert against_a_point.cells["gap_mean"].isna().all()
    assert any("epistemic spread" in said.get("gap_mean", "") for said in against_a_point.notes.values())


# --- the table ------------------------------------------------------------------------------------------------


def test_the_table_pairs_differences_over_splits_and_averages_seeds_first(finished: Any) -> None:
    result = finished[0]
    found = result.table(corrected=False)
    assert found.index.names == ["model", "data", "method"]
    assert len(found) == 8
    for data in ("one", "two"):
        block = result.cells[(result.cells["data"] == data) & (result.cells["failure"] == "")]
        means = block.groupby(["method", "split"], sort=False)["rmse"].mean().unstack()
        best = means.mean(axis=1).idxmin()
        for method in METHODS:
            row = found.loc[("line", data, method)]
            assert row["rmse"] == pytest.approx(means.loc[method].mean(), rel=1e-12)
            assert row["rmse_se"] == pytest.approx(stats.sem(means.loc[method]), rel=1e-12)
            for word, other in (("best", best), ("reference", "exact")):
                if method == other:
                    assert math.isnan(row[f"rmse_to_{word}"])
                    continue
                difference = means.loc[method] - means.loc[other]
                assert row[f"rmse_to_{word}"] == pytest.approx(difference.mean(), rel=1e-12)
                assert row[f"rmse_to_{word}_se"] == pytest.approx(stats.sem(difference), rel=1e-12)
        # Of a log score more is better.
        scored = block.groupby(["method", "split"])["log_score"].mean().unstack().mean(axis=1)
        assert math.isnan(found.loc[("line", data, scored.idxmax()), "log_score_to_best"])
        assert (found.loc[("line", data), "log_score_to_best"].dropna() < 0.0).all()
        assert list(found.loc[("line", data), "failures"]) == [0, 0, 0, 4]
        assert list(found.loc[("line", data), "cells"]) == [4, 4, 4, 0]
        assert math.isnan(found.loc[("line", data, "refuses"), "rmse"])
        worst = block.query("method == 'exact'")
        assert found.loc[("line", data, "exact"), "r_hat"] == worst["r_hat"].max()
        assert found.loc[("line", data, "exact"), "ess_min"] == worst["ess_min"].min()
    # 24 training and 6 test rows, two splits: sqrt(1 / 2 + 6 / 24) in place of sqrt(1 / 2).
    wider = result.table()["rmse_to_best_se"] / found["rmse_to_best_se"]
    np.testing.assert_allclose(wider.dropna(), math.sqrt(1.5), rtol=1e-12)


def test_differences_are_over_the_splits_that_both_have(finished: Any) -> None:
    result = replace(finished[0], cells=finished[0].cells.copy())
    lost = result.cells.eval("method == 'off' and data == 'one' and split == 'random@0.8[1]'")
    result.cells.loc[lost, "failure"] = "gone"
    row = result.table().loc[("line", "one", "off")]
    assert (row["splits"], row["cells"], row["failures"]) == (1, 2, 2)
    block = result.cells.query("data == 'one' and split == 'random@0.8[0]'").groupby("method")["rmse"].mean()
    assert row["rmse_to_reference"] == pytest.approx(block["off"] - block["exact"], rel=1e-12)
    assert math.isnan(row["rmse_to_reference_se"])


def test_tables_are_saved_and_read_again(finished: Any) -> None:
    result, out, _ = finished
    assert {"grid.json", "cells", "cells.csv", "table.csv"} <= {entry.name for entry in out.iterdir()}
    again = GridResult.load(out)
    pd.testing.assert_frame_equal(again.cells, result.cells)
    pd.testing.assert_frame_equal(again.table(), result.table())
    assert again.notes == result.notes
    assert (again.reference, again.axes["seeds"]) == ("exact", [0, 1])
    assert again.settings["data"] == {"one": table(1).card(), "two": table(2).card()}
    read = pd.read_csv(out / "cells.csv", keep_default_na=False, na_values={"log_score": ""})
    assert list(read["method"]) == list(result.cells["method"])
    np.testing.assert_array_equal(read["log_score"], result.cells["log_score"])
    read = pd.read_csv(out / "table.csv", index_col=[0, 1, 2])
    assert read.loc[("line", "two", "off"), "crps"] == result.table().loc[("line", "two", "off"), "crps"]


# --- what a cell is -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A scale that a network tells, whose `repr` leaves most of it out."""

    weights: np.ndarray

    def __float__(self) -> float:
        return float(self.weights[0])


def key(**changes: Any) -> str:
    return small(data={"one": table(1)}, methods={"exact": METHODS["exact"]}, **changes).cells[0].key


def test_a_key_changes_with_all_that_a_result_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    first = key()
    other = table(1)
    other.y[0] += 1e-9
    changed = {
        "arguments": key(models={"line": functools.partial(line, scale=2.0)}),
        "fields": small(methods={"exact": Exact(ppl="pyro", draws=61)}).cells[0].key,
        "class": small(methods={"exact": Zero(ppl="pyro")}).cells[0].key,
        "system": small(methods={"exact": Exact()}).cells[0].key,
        "data": small(data={"one": other}).cells[0].key,
        "split": key(splits="random:1-1@0.8"),
        "seed": key(seeds=[5]),
        "units": key(standardise=True),
        "device": key(device="cuda"),
        "a network": key(models={"line": functools.partial(line, scale=Held(np.full(3000, 2.0)))}),
        "another network": key(models={"line": functools.partial(line, scale=Held(np.full(3000, 3.0)))}),
    }
    assert key() == first
    # What "auto" comes to on this machine, and so another cell where there is a GPU.
    assert key(device="cpu") == first
    monkeypatch.setattr(grid_module.engines, "gpus", lambda: ("0",))
    assert key() == changed["device"]
    monkeypatch.undo()
    assert key(models={"called otherwise": line}, seeds=1) == first
    assert len({first, *changed.values()}) == 1 + len(changed), changed
    monkeypatch.setattr(cells, "versions", lambda *names: {"ppl-bnn": "9", "torch": "1", "pyro-ppl": "1"})
    assert key() != first


def test_a_key_follows_the_source_of_a_model_but_not_its_comments(tmp_path: Path) -> None:
    source = '''
import ppl_bnn as bnn

WIDTH = 1


def model(x, y=None, *, scale=1.0):
    """A line."""
    f = bnn.mlp(x, [WIDTH], prior=bnn.priors.Normal(0.0, scale))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(0.5))
'''

    def of(text: str) -> dict[str, Any]:
        file = tmp_path / "mine.py"
        file.write_text(text)
        model = bnn.zoo.from_file(file)
        return cells.of_model(model, bnn.zoo.sketch(model, 2))

    first = of(source)
    assert of(source.replace("    f =", "    # of one output\n\n    f  =")) == first
    assert of(source.replace("0.5", "0.25"))["source"] != first["source"]
    assert of(source.replace("WIDTH = 1", "WIDTH = 2"))["source"] != first["source"]
    narrower = of(source.replace("scale=1.0", "scale=0.5"))
    assert (narrower["sites"][0][1], first["sites"][0][1]) == ("Normal(0, 0.5)", "Normal(0, 1)")


def test_of_a_script_what_a_model_reaches_is_its_source(tmp_path: Path) -> None:
    """A script also says what is to be computed: a line of the grid that is changed is no other model."""
    script = """
import json, sys
import ppl_bnn as bnn
from ppl_bnn.evaluation.grid import cell as cells

WIDTH = 1
SEEDS = 3


def prior(scale):
    return bnn.priors.Normal(0.0, scale)


def made(noise):
    def model(x, y=None):
        bnn.observe(y, bnn.mlp(x, [WIDTH], prior=prior(1.0)), bnn.likelihoods.Gaussian(noise))

    return model


print(json.dumps(cells.of_model(made(0.5), None)))
"""
    import subprocess
    import sys

    def of(text: str) -> str:
        (tmp_path / "script.py").write_text(text)
        ran = subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    first = of(script)
    assert (
        of(script.replace("SEEDS = 3", "SEEDS = 30").replace("import json, sys", "import json\n\n# more\n"))
        == first
    )
    for before, after in (
        ("WIDTH = 1", "WIDTH = 2"),
        ("Normal(0.0", "Normal(0.1"),
        ("made(0.5)", "made(0.25)"),
    ):
        assert of(script.replace(before, after)) != first


# --- computed once ------------------------------------------------------------------------------------------


def times(folder: Path) -> dict[str, int]:
    """When each cell was written."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / "cells").iterdir()}


def one(**changes: Any) -> Grid:
    return small(data={"one": table(1)}, methods=METHODS, splits="random:1@0.8", seeds=1, **changes)


def test_finished_cells_are_not_computed_again(tmp_path: Path) -> None:
    first = one().run(tmp_path, engine="sequential")
    written = times(tmp_path)
    assert len(written) == 3
    pd.testing.assert_frame_equal(one().run(tmp_path, engine="sequential").cells, first.cells)
    assert times(tmp_path) == written
    # A method, a seed more: only what is new. Cells that are no longer asked for stay, and are in no table.
    grown = replace(
        one(), methods={"exact": METHODS["exact"], "more": Exact(ppl="pyro", draws=40)}, seeds=[0, 1]
    )
    result = grown.run(tmp_path, engine="sequential")
    assert list(result.cells["method"]) == ["exact", "more", "exact", "more"]
    assert written.items() < times(tmp_path).items()
    assert len(times(tmp_path)) == 6
    # One that is damaged is as good as none.
    written = times(tmp_path)
    name = f"{result.cells['key'][1]}.safetensors"
    victim = tmp_path / "cells" / name
    victim.write_bytes(victim.read_bytes()[:-8])
    with pytest.warns(UserWarning, match=f"damaged cells are left out.*{name[:24]}"):
        assert GridResult.load(tmp_path).missing == 1
    with pytest.warns(UserWarning, match=f"damaged cells are computed again: {name[:24]} "):
        again = grown.run(tmp_path, engine="sequential")
    assert {other for other, when in times(tmp_path).items() if when != written[other]} == {name}
    pd.testing.assert_frame_equal(again.cells.drop(columns=[*COSTS]), result.cells.drop(columns=[*COSTS]))
    written = times(tmp_path)
    assert grown.run(tmp_path, engine="sequential", resume=False).missing == 0
    assert sum(when != written[other] for other, when in times(tmp_path).items()) == 4


def test_one_fit_under_two_labels_is_computed_once_and_is_two_rows(tmp_path: Path) -> None:
    twice = replace(
        one(), methods={"exact": METHODS["exact"], "again": METHODS["exact"], "off": METHODS["off"]}
    )
    said = Told()
    result = twice.run(tmp_path, engine="sequential", progress=said)
    assert list(result.cells["method"]) == ["exact", "again", "off"]
    assert (result.missing, result.absent, len(times(tmp_path))) == (0, (), 2)
    exact, again, off = (row for _, row in result.cells.iterrows())
    assert exact["log_score"] == again["log_score"] != off["log_score"]
    assert (again["gap_mean"], again["gap_sd_ratio"]) == (0.0, 1.0)
    assert math.isnan(exact["gap_mean"])
    assert [done for done, _ in said[1:-1]] == [0, 2, 3]
    assert GridResult.load(tmp_path).missing == 0


def test_classes_are_bound_to_a_table_whose_classes_have_no_names(tmp_path: Path) -> None:
    nameless = replace(classes(), class_names=None)
    grid = Grid([labels], [nameless], {"prior": FromPrior(ppl="pyro")}, "random:1@0.8")
    result = grid.run(tmp_path, engine="sequential")
    assert result.failures == 0, result.cells["failure"][0]
    assert len(cells.Store(tmp_path / "cells").arrays(result.cells["key"][0])["mean"][0]) == 3


def test_the_versions_of_a_key_are_of_the_system_that_fits() -> None:
    """A model of one system's own is fitted there, whatever the method says."""
    import pyro
    import pyro.distributions as pd_

    def plain(x: Any, y: Any = None) -> None:
        slope = pyro.sample("slope", pd_.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", pd_.Normal(x @ slope, 0.5), obs=y)

    (planned,) = Grid([plain], [table(1)], {"zero": Zero()}, "random:1@0.8")._plan.cells
    assert set(json.loads(planned.parts)["method"]["versions"]) == {"ppl-bnn", "pyro-ppl", "torch"}


def test_a_numbered_gpu_is_the_only_one_that_a_process_elsewhere_sees() -> None:
    for device in ("cuda", "cpu"):
        (work, *_) = next(iter(one()._plan.tasks(device).values()))
        assert processes.read(work).keywords["device"] == device


def test_what_ends_after_a_fit_is_a_row_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*_: Any) -> None:
        raise MemoryError("no room for a transform")

    monkeypatch.setattr(Transform, "of", greedy)
    result = one().run(tmp_path, engine="sequential")
    assert result.missing == 0
    assert "no room for a transform" in result.cells["failure"][0]


def test_nothing_goes_on_behind_a_run_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    def outcomes(*_: Any, **__: Any) -> Any:
        try:
            yield 0, b""
            yield 1, b""
        finally:
            closed.append("workers")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(grid_module.engines, "outcomes", outcomes)
    monkeypatch.setattr(cells.Store, "write", interrupt)
    with pytest.raises(GridInterrupted, match="0 of 3 cells"):
        one().run(tmp_path, engine="sequential")
    assert closed == ["workers"]


def test_what_is_computed_anew_is_not_taken_for_finished_when_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Any, problem: Any, progress: Any) -> Outcome:
        raise KeyboardInterrupt

    one().run(tmp_path, engine="sequential")
    monkeypatch.setattr(Zero, "run", interrupt)
    with pytest.raises(GridInterrupted, match="2 of 3 cells"):
        one().run(tmp_path, engine="sequential", resume=False)
    assert GridResult.load(tmp_path).missing == 1


def test_failed_cells_are_tried_again_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = replace(one(), methods={"refuses": Refuses(ppl="pyro")}, reference=None)
    assert grid.run(tmp_path, engine="sequential").failures == 1
    monkeypatch.setattr(Refuses, "run", Zero.run)
    assert grid.run(tmp_path, engine="sequential").failures == 1
    assert grid.run(tmp_path, engine="sequential", retry_failed=True).failures == 0


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Any, problem: Any, progress: Any) -> Outcome:
        raise KeyboardInterrupt

    run = Zero.run
    monkeypatch.setattr(Zero, "run", interrupt)
    with pytest.raises(GridInterrupted, match="2 of 3 cells are finished and kept in") as caught:
        one().run(tmp_path, engine="sequential")
    assert list(caught.value.partial.cells["method"]) == ["exact", "off"]
    assert "off" in (tmp_path / "table.csv").read_text()
    assert not list((tmp_path / "cells").glob(".*"))
    monkeypatch.setattr(Zero, "run", run)
    written = times(tmp_path)
    assert one().run(tmp_path, engine="sequential").missing == 0
    assert written.items() < times(tmp_path).items()
    assert len(times(tmp_path)) == 3


@pytest.mark.parametrize(("where", "step"), [(grid_module, "writable"), (stored, "write_whole")])
def test_a_run_that_was_killed_before_it_had_a_manifest_can_be_begun_again(
    where: Any, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on disk at that moment stays there, as after a kill."""
    real = getattr(where, step)

    def killed(place: Any, *rest: Any) -> Any:
        # The files of either step, which it has no time to remove or to rename.
        if step == "writable":
            Path(place).mkdir()
            (Path(place) / ".probe-abc").write_bytes(b"0")
        else:
            part_of(place).write_text("{")
        raise MemoryError

    monkeypatch.setattr(where, step, killed)
    with pytest.raises(MemoryError):
        one().run(tmp_path / "new", engine="sequential")
    assert [entry.name for entry in (tmp_path / "new").iterdir() if entry.name != ".lock"]
    monkeypatch.setattr(where, step, real)
    assert one().run(tmp_path / "new", engine="sequential").missing == 0


def test_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(self: Any, problem: Any, progress: Any) -> Outcome:
        with pytest.raises(InputError, match="with a run at work"):
            one().run(tmp_path, engine="sequential")
        raise ValueError("seen")

    monkeypatch.setattr(Zero, "run", again)
    assert list(one().run(tmp_path, engine="sequential").cells["failure"]) == ["", "", "ValueError: seen"]


# --- splits -------------------------------------------------------------------------------------------------


def test_splits_by_name() -> None:
    made = table(1)
    found = splits.splits_of(made, ["random:2@0.9", "random:7-8@0.9", "published", "time@0.7"])
    assert [split.name for split in found] == [
        "random@0.9[0]", "random@0.9[1]", "random@0.9[7]", "random@0.9[8]", "published[0]", "published[1]", "time@0.7",
    ]  # fmt: skip
    for split, (train, test) in zip(
        found, [made.split(0, 0.1), made.split(1, 0.1), made.split(7, 0.1), made.split(8, 0.1),
                made.published_split(0), made.published_split(1), (np.arange(21), np.arange(21, 30))],
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(split.train, train)
        np.testing.assert_array_equal(split.test, test)
    assert [split.name for split in splits.splits_of(made, "published:1-1")] == ["published[1]"]
    for name in ("random", "random:5", "random:0@0.9", "random:5@1.5", "random:5@0", "random:3-1@0.5", "published@0.9",
                 "time", "time:2@0.5", "folds:5", "", "random:5@0.9 ", "random:٣@0.9"):  # fmt: skip
        with pytest.raises(InputError, match="splits: expected"):
            splits.check(name)
    for names, words in (
        (["random:2@0.9", "random:1-3@0.9"], "each split once"),
        (["published", "published"], "each once"),
        ("published:5", "a split from 0 to 1"),
    ):
        with pytest.raises(InputError, match=words):
            splits.splits_of(made, names)
    with pytest.raises(InputError, match=r"try 'time@0\.9'"):
        splits.splits_of(replace(made, ordered=True), "random:2@0.9")
    with pytest.raises(InputError, match="a table with published splits"):
        splits.splits_of(replace(made, splits=None), "published")


def test_splits_may_differ_between_tables() -> None:
    grid = small(
        splits={"one": ["published"], "two": "random:3@0.8"}, methods={"exact": METHODS["exact"]}, seeds=1
    )
    assert [(cell.data, cell.split) for cell in grid.cells] == [
        ("one", "published[0]"), ("two", "random@0.8[0]"), ("one", "published[1]"), ("two", "random@0.8[1]"),
        ("two", "random@0.8[2]"),
    ]  # fmt: skip


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": ["regresion_mlp"]}, "unknown model 'regresion_mlp': did you mean 'regression_mlp'"),
        ({"models": "regression_mlp"}, "models: expected a dict of labels, or a list"),
        ({"models": []}, "models: expected"),
        ({"models": [3]}, "models: expected a function"),
        ({"models": [line, line]}, "'line' twice"),
        ({"models": {"two\nlines": line}}, "labels that are words"),
        ({"data": ["diabets"]}, "did you mean 'diabetes'"),
        ({"data": {"x": (1, 2)}}, "data\\['x'\\]: expected a table"),
        ({"methods": ["nut"]}, "did you mean 'nuts'"),
        ({"methods": {"n": bnn.NUTS}}, "methods\\['n'\\]: expected an instance of a method"),
        ({"methods": {"n": bnn.NUTS(checkpoint="somewhere")}}, "without a checkpoint"),
        ({"reference": "exat"}, "unknown reference 'exat': did you mean 'exact'"),
        ({"splits": "random:5"}, "splits: expected"),
        ({"splits": {"one": "published"}}, "none for 'two'"),
        ({"splits": {"one": "published", "two": "published", "three": "published"}}, "'three'"),
        ({"seeds": 0}, "seeds: expected"),
        ({"seeds": [0, 0]}, "seeds: expected"),
        ({"seeds": [-1]}, "seeds: expected"),
        ({"seeds": True}, "seeds: expected"),
        ({"standardise": 1}, "standardise: expected"),
        ({"device": "gpu"}, "'auto', 'cpu' or 'cuda"),
    ],
)  # fmt: skip
def test_a_grid_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=words):
        small(**changes)


def test_a_folder_of_something_else_is_refused_before_data_are_read(
    tmp_path: Path, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppl_bnn.data.load", lambda *_: pytest.fail("data were read"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "grid.json").write_text(json.dumps({"kind": "of electricity"}))
    grid = Grid(models=["linear_regression"], data=["diabetes"], methods=["map"])
    for folder, words in (
        (tmp_path / "other", "with other files"),
        (tmp_path / "json", "of something else"),
        (finished[1], "that of one whose models are line"),
        (tmp_path / "other" / "notes.txt" / "deeper", "a folder that can be written"),
    ):
        if "deeper" in str(folder):
            monkeypatch.undo()
        with pytest.raises(InputError, match=words):
            grid.run(folder)
    for arguments, words in (
        ({"engine": "locl"}, "did you mean 'local'"),
        ({"engine": "dask://"}, "dask://HOST:PORT"),
        ({"jobs": 0}, "jobs: expected"),
        ({"memory": 10}, "memory: expected"),
        ({"resume": 1}, "resume: expected"),
    ):
        with pytest.raises((InputError, UnknownNameError), match=words):
            grid.run(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()
    assert [entry.name for entry in (tmp_path / "other").iterdir()] == ["notes.txt"]
    with pytest.raises(InputError, match=r"without grid\.json"):
        GridResult.load(tmp_path / "other")


def test_names_stand_for_models_tables_and_methods() -> None:
    grid = Grid(
        models=["linear_regression"],
        data=["diabetes"],
        methods=["map", "laplace-kron", "ensemble"],
        seeds=[4],
    )
    assert list(grid.models) == ["linear_regression"]
    assert grid.methods == {
        "map": bnn.MAP(), "laplace-kron": bnn.Laplace(structure="kron"), "ensemble": bnn.Ensemble(member=bnn.MAP()),
    }  # fmt: skip
    assert grid.seeds == (4,)
    assert repr(grid) == "Grid(1 models, 1 data, 3 methods, 1 seeds, splits random:5@0.9; reference=None)"
    assert list(
        Grid(models=[functools.partial(line, scale=2.0)], data=[table(1)], methods=[Exact()]).models
    ) == ["line"]


@pytest.mark.parametrize(
    ("rows", "share", "train"),
    [(10, 0.74, 7), (10, 0.76, 8), (9, 0.5, 4), (11, 0.5, 6), (3, 0.99, 2), (3, 0.01, 1)],
)
def test_a_split_in_time_is_cut_at_the_nearest_row(rows: int, share: float, train: int) -> None:
    table = Table("t", np.zeros((rows, 1)), np.arange(float(rows)), ["a"], "y", "regression")
    (split,) = splits.splits_of(table, [f"time@{share}"])
    assert split.train.tolist() == list(range(train))
    assert split.test.tolist() == list(range(train, rows))


def test_a_damaged_manifest_is_written_anew_and_whole_cells_stay(tmp_path: Path) -> None:
    first = one().run(tmp_path, engine="sequential")
    written = times(tmp_path)
    manifest = tmp_path / "grid.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    with pytest.warns(UserWarning, match=r"manifest of the grid is damaged and is written again.*grid\.json"):
        again = one().run(tmp_path, engine="sequential")
    assert times(tmp_path) == written
    pd.testing.assert_frame_equal(again.cells, first.cells)
