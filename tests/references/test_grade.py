"""Grades of approximations whose errors are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, UnknownNameError
from ppl_bnn.references.grade import COLUMNS, worth_text
from ppl_bnn.references.reference import Reference

Known = Callable[..., Reference]
LINKS = [("identity", 1), ("identity", 2), ("sigmoid", 1), ("softmax", 3)]


def outputs(reference: Reference) -> dict[str, np.ndarray]:
    """The stored draws of f, (S, rows, K), by region."""
    f = reference.arrays["f"].astype(float)
    f = f.reshape(f.shape[0] * f.shape[1], -1, reference.outputs)
    return {region: f[:, rows] for region, rows in reference.slices.items()}


@pytest.mark.parametrize(("link", "count"), LINKS)
def test_the_reference_itself_has_no_error(known: Known, link: str, count: int) -> None:
    reference = known(link, count)
    grade = reference.grade(draws=outputs(reference))
    assert list(grade.figures) == ["train", "test", "gap", "far", "all"]
    for figures in grade.figures.values():
        assert list(figures) == list(COLUMNS)
        assert figures["mean_error"] == pytest.approx(0.0, abs=1e-12)
        assert figures["sd_ratio"] == pytest.approx(1.0)
        assert figures["distance"] == pytest.approx(0.0, abs=1e-12)
        assert figures["covariance_error"] == pytest.approx(0.0, abs=1e-12)
        assert figures["worth_mean"] == figures["limit_mean"] == pytest.approx(4000.0)
        assert figures["worth_sd"] == figures["limit_sd"]
    assert (link == "identity") == math.isnan(grade.figures["test"]["agreement"])


@pytest.mark.slow
@pytest.mark.parametrize(("link", "count"), LINKS)
def test_worth_is_the_number_of_exact_draws(known: Known, link: str, count: int) -> None:
    """Over replications, the squared error of k exact draws is that of k: the harmonic mean of `worth` is k."""
    reference, k = known(link, count), 40
    found = []
    for seed in range(40):
        fresh = outputs(known(link, count, chains=2, draws=k // 2, seed=100 + seed))
        figures = reference.grade(draws=fresh).figures["all"]
        found.append((figures["worth_mean"], figures["worth_sd"]))
    inverse = k / np.array(found)
    centre, error = inverse.mean(axis=0), inverse.std(axis=0, ddof=1) / math.sqrt(len(found))
    # For standard deviations c is that of large k; at k = 40 it is a few per cent larger.
    assert np.all(np.abs(centre - [1.0, 1.05]) < 4.0 * error + [0.0, 0.05]), (centre, error)


def test_floors_are_those_of_halves(known: Known) -> None:
    """Two halves of 2000 independent draws: each mean has a standard error of 1 / sqrt(2000)."""
    found = [known(seed=seed) for seed in range(10)]
    floors = [each.grade(draws=outputs(each)).figures["all"]["mean_floor"] for each in found]
    assert np.sqrt(np.mean(np.square(floors))) == pytest.approx(math.sqrt(2.0 / 2000.0), rel=0.25)


def test_known_errors_are_found(known: Known) -> None:
    reference = known()
    mean, sd = reference.mean, reference.sd
    shifted = {region: value + 0.5 * sd[region] for region, value in mean.items()}
    narrow = {region: 0.9 * value for region, value in sd.items()}
    figures = reference.grade(mean=shifted, sd=narrow).figures["test"]
    assert figures["mean_error"] == pytest.approx(0.5)
    assert figures["sd_ratio"] == pytest.approx(0.9)
    # E[err^2] of k draws is 1 / k, and log(0.9)^2 = 1 / (2 k) at k = 45 for a normal distribution.
    assert figures["worth_mean"] == pytest.approx(1.0 / (0.25 - 1.0 / 4000.0))
    assert figures["worth_sd"] == pytest.approx(0.5 / math.log(0.9) ** 2, rel=0.1)
    assert math.isnan(figures["covariance_error"])
    assert math.isnan(figures["distance"])


def test_the_distance_is_that_of_scipy(known: Known) -> None:
    reference = known()
    fresh = outputs(known(seed=5, chains=2))
    grade = reference.grade(draws={"test": fresh["test"] * 1.3})
    exact = reference.draws["test"]
    each = [
        scipy.stats.wasserstein_distance(1.3 * fresh["test"][:, row, 0], exact[:, row, 0])
        / exact[:, row, 0].std()
        for row in range(exact.shape[1])
    ]
    # 200 nodes of the quantile functions lose a little of the tails.
    assert grade.figures["test"]["distance"] == pytest.approx(np.mean(each), rel=0.03)


def test_marginals_alone_lose_the_joint_covariance(known: Known) -> None:
    """Draws shuffled row by row have the right marginals; neighbouring rows correlate by nearly one."""
    reference, rng = known(), np.random.default_rng(0)
    shuffled = {region: rng.permuted(f, axis=0) for region, f in outputs(reference).items()}
    figures = reference.grade(draws=shuffled).figures["test"]
    assert figures["distance"] == pytest.approx(0.0, abs=1e-12)
    assert figures["covariance_error"] > 10 * figures["covariance_floor"]


def test_probabilities_with_and_without_draws(known: Known) -> None:
    two, three = known("sigmoid"), known("softmax", 3)
    p = {region: draws[..., 0] for region, draws in two.draws.items()}
    whole = two.grade(probabilities=p)
    assert whole.figures["test"]["sd_ratio"] == pytest.approx(1.0)
    means = two.grade(probabilities={region: each.mean(axis=0) for region, each in p.items()})
    assert means.figures["test"]["mean_error"] == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(means.figures["test"]["sd_ratio"])
    both = {region: np.stack([1.0 - each, each], axis=-1) for region, each in p.items()}
    assert two.grade(probabilities=both).figures["test"] == whole.figures["test"]
    y, q = three.y["test"], three.mean["test"]
    loss = three.grade(probabilities={"test": q}).figures["test"]["elpd_loss"]
    assert loss == pytest.approx(np.mean(-1.0 - np.log(q[np.arange(len(y)), y])))
    of_draws = three.grade(draws={"test": outputs(three)["test"]}).figures["test"]["elpd_loss"]
    assert of_draws == pytest.approx(loss)
    wrong = three.grade(probabilities={"test": np.full_like(q, 1.0 / 3.0)}).figures["test"]
    assert wrong["distance"] == pytest.approx(0.5 * np.abs(q - 1.0 / 3.0).sum(-1).mean())


def test_log_densities_are_compared_row_by_row(known: Known) -> None:
    reference = known()
    given = {"test": -1.0 - np.arange(10.0) / 10.0}
    figures = reference.grade(draws=outputs(reference), log_density=given).figures
    assert figures["test"]["elpd_loss"] == pytest.approx(0.45)
    assert figures["test"]["elpd_loss_se"] == pytest.approx(
        (np.arange(10.0) / 10.0).std(ddof=1) / math.sqrt(10.0)
    )
    assert math.isnan(figures["gap"]["elpd_loss"])
    assert figures["all"]["elpd_loss"] == pytest.approx(0.45)


def test_a_point_has_no_spread(known: Known) -> None:
    reference = known()
    figures = reference.grade(draws={"test": reference.mean["test"][None]}).figures["test"]
    assert figures["sd_ratio"] == 0.0
    assert figures["worth_sd"] == 0.0
    assert (
        "there is no spread"
        in reference.grade(draws={"test": reference.mean["test"][None]}).sentences["test"]
    )


def test_words_and_figure(known: Known) -> None:
    reference = known()
    grade = reference.grade(draws={region: 1.5 * f + 1.0 for region, f in outputs(reference).items()})
    text = str(grade)
    assert text.startswith("Against known-line\n")
    assert "test: the mean is " in text
    assert max(map(len, text.split("\n\n")[1].splitlines())) <= 100
    assert list(grade.table.index) == ["train", "test", "gap", "far", "all"]
    figure = grade.figure()
    assert [axes.get_title() for axes in figure.axes[:4]] == ["train", "test", "gap", "far"]
    assert [worth_text(value, 100.0) for value in (0.3, 4.44, 44.4, 100.0)] == ["< 1", "4.4", "44", "≥ 100"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "one of a posterior"),
        ({"draws": {}, "probabilities": {}}, "draws, probabilities"),
        ({"mean": {"test": np.zeros(10)}}, "together"),
        ({"draws": {}}, "at least one region"),
        ({"draws": {"test": np.zeros((5, 9))}}, r"draws\['test'\]: expected shape \(5, 10, 1\)"),
        ({"draws": {"test": np.full((5, 10), np.nan)}}, "finite"),
        ({"draws": {"test": np.zeros((0, 10))}}, "shape"),
        ({"draws": {"test": np.zeros((5, 10)), "gap": np.zeros((6, 4))}}, "as many draws"),
        ({"draws": {"test": [["a"] * 10]}}, "numbers"),
        ({"mean": {"test": np.zeros(10)}, "sd": {"gap": np.ones(4)}}, "regions"),
        ({"mean": {"test": np.zeros(10)}, "sd": {"test": -np.ones(10)}}, "negative"),
        ({"probabilities": {"test": np.full(10, 0.5)}}, "mean= and sd="),
        ({"draws": {"test": np.zeros((5, 10))}, "log_density": {"gap": np.zeros(4)}}, "log_density"),
        ({"draws": {"test": np.zeros((5, 10))}, "log_density": {"test": np.zeros(3)}}, "shape"),
        ({"posterior": 3}, "a posterior of bnn.fit"),
    ],
)
def test_what_cannot_be_graded_is_refused(known: Known, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        known().grade(**arguments)


def test_unknown_regions_and_wrong_probabilities_are_refused(known: Known) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'test'"):
        known().grade(draws={"tests": np.zeros((5, 10))})
    with pytest.raises(InputError, match="probabilities of classes"):
        known("sigmoid").grade(mean={"test": np.zeros(10)}, sd={"test": np.ones(10)})
    for wrong in (np.full((10, 3), 0.5), np.full((10, 3), -1.0), np.zeros((10, 2))):
        with pytest.raises(InputError, match=r"probabilities\['test'\]"):
            known("softmax", 3).grade(probabilities={"test": wrong})


def test_the_page_of_a_grade(known: Known, tmp_path: Path) -> None:
    reference = known()
    grade = reference.grade(
        draws={region: 20.0 * f for region, f in outputs(reference).items() if region != "far"}
    )
    text = bnn.report(grade, tmp_path / "grade.html", numbers=True).read_text()
    for word in (
        "Grade against known-line",
        "Region by region",
        "worth mean",
        "Errors of the mean",
        "region",
    ):
        assert word in text
    assert "There are no known problems" not in text
    assert {file.name for file in tmp_path.iterdir()} == {
        "grade.html",
        "grade.csv",
        "grade-means.csv",
        "grade-spreads.csv",
    }
    spreads = pd.read_csv(tmp_path / "grade-spreads.csv")
    assert spreads["sd"].to_numpy() == pytest.approx(20.0, rel=1e-6)
    assert len(spreads) == 20
