"""A reference with a posterior of this library, in a comparison, and on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import ppl_bnn as bnn
from ppl_bnn.cli.commands import app
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.references import library as stored

NAME = "linear_regression-surface"


@pytest.fixture(scope="module")
def reference() -> bnn.references.Reference:
    if NAME not in stored.entries():
        pytest.skip(f"{NAME} is not stored")
    return bnn.references.load(NAME)


@pytest.mark.slow
def test_exact_draws_of_another_sampler_are_worth_what_they_are(reference: bnn.references.Reference) -> None:
    """NUTS, with its own seed: nearly as many exact draws as its effective sample size, and no loss."""
    posterior = bnn.fit(reference.model(), *reference.train, bnn.NUTS(draws=500), seed=3)
    for region, figures in reference.grade(posterior).figures.items():
        assert figures["worth_mean"] > 200.0, region
        assert figures["worth_sd"] > 100.0, region
        assert figures["mean_error"] < 3.0 * figures["mean_floor"], region
    assert abs(reference.grade(posterior).figures["test"]["elpd_loss"]) < 0.02


def test_a_point_and_laplace_by_both_systems(reference: bnn.references.Reference, ppl: str) -> None:
    point = bnn.fit(reference.model(), *reference.train, bnn.MAP(ppl=ppl))
    assert reference.grade(point).figures["all"]["sd_ratio"] == 0.0
    laplace = bnn.fit(reference.model(), *reference.train, bnn.Laplace(ppl=ppl))
    figures = reference.grade(laplace).figures["all"]
    # Given the noise the posterior is normal, so that the mean is nearly right.
    assert figures["mean_error"] < 0.2
    assert figures["sd_ratio"] == pytest.approx(1.0, abs=0.1)


def test_a_fit_to_other_rows_is_refused(reference: bnn.references.Reference) -> None:
    x, y = reference.train
    with pytest.raises(InputError, match="other rows"):
        reference.grade(bnn.fit(reference.model(), x[:-1], y[:-1], bnn.MAP(steps=10)))
    with pytest.raises(InputError, match="standardise"):
        reference.grade(bnn.fit(reference.model(), x, y, bnn.MAP(steps=10), standardise=True))


def test_a_comparison_against_a_stored_reference(reference: bnn.references.Reference, tmp_path: Path) -> None:
    methods = {"laplace": bnn.Laplace(), "map": bnn.MAP()}
    arguments = reference.model(), reference.train, reference.test, methods
    result = bnn.compare(*arguments, reference=NAME, out=tmp_path / "kept")
    assert list(result.table.index) == [NAME, "laplace", "map"]
    row = result.table.loc[NAME]
    assert (row["reference"], row["ppl"], row["converged"]) == ("reference", "stored", "yes")
    assert result.table.loc["laplace", "gap_mean"] < 0.2
    assert result.table.loc["map", "gap_sd_ratio"] == 0.0
    assert row["log_score"] == pytest.approx(reference.log_density["test"].mean(), rel=1e-6)
    again = bnn.Comparison.load(tmp_path / "kept")
    assert again.table.equals(result.table)
    text = bnn.report(again, tmp_path / "report.html").read_text()
    assert f"Use {NAME}" not in text
    assert "is a stored posterior" in text
    assert bnn.compare(*arguments, reference=reference).reference == NAME
    x, y = reference.test
    with pytest.raises(InputError, match="its test rows"):
        bnn.compare(reference.model(), reference.train, (x + 1.0, y), methods, reference=NAME)
    with pytest.raises(InputError, match="sites"):
        bnn.compare(bnn.zoo.load("regression_mlp"), reference.train, reference.test, methods, reference=NAME)
    with pytest.raises(InputError, match="standardise"):
        bnn.compare(*arguments, reference=NAME, standardise=True)
    with pytest.raises(UnknownNameError, match=f"did you mean '{NAME}'"):
        bnn.compare(*arguments, reference="linear_regression-surfaces")


@pytest.mark.parametrize(("grade", "kind"), [("mode-weighted", "chains"), ("bracketed", "iid")])
def test_a_comparison_against_a_reference_of_another_grade(grade: str, kind: str) -> None:
    names = [each.name for each in stored.entries().values() if each.grade == grade]
    if not names:
        pytest.skip(f"no {grade} reference is stored")
    reference = bnn.references.load(names[0])
    arguments = reference.model(), reference.train, reference.test, {"map": bnn.MAP(steps=200)}
    result = bnn.compare(*arguments, reference=reference)
    row = result.table.loc[names[0]]
    assert (row["kind"], row["ppl"]) == (kind, "stored")
    assert np.isnan(row["r_hat_test"]) == (grade == "bracketed")
    assert row["gradient_evaluations"] > 1e5
    assert result.table.loc["map", "gap_mean"] > 0.0
    code, text = _invoke("references", names[0])
    assert code == 0
    assert ("masses of modes" if grade == "mode-weighted" else "from above") in text


def test_a_record_of_failure_is_listed_and_not_loaded() -> None:
    names = [each.name for each in stored.entries().values() if each.grade == "failed"]
    if not names:
        pytest.skip("no record of failure is stored")
    assert names[0] in _invoke("references")[1]
    with pytest.raises(UnsupportedError, match="a record of failure"):
        bnn.references.load(names[0])
    assert bnn.references.record(names[0])[0]["grade"] == "failed"
    assert "FAILS" in _invoke("references", names[0])[1]


def _invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout + result.stderr


def test_commands(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    draws = stored.load("known-line").draws
    code, text = _invoke("references")
    assert code == 0
    assert "known-line" in text
    np.savez("mine.npz", **{region: each[..., 0] for region, each in draws.items()})  # pyright: ignore
    code, text = _invoke("grade", "known-line", "mine.npz", "--report")
    assert code == 0
    assert "test: the mean is 0.00 standard deviations off" in text
    assert (tmp_path / "mine.html").exists()
    np.savez("moments.npz", mean_test=draws["test"].mean(0), sd_test=draws["test"].std(0))
    assert _invoke("grade", "known-line", "moments.npz")[0] == 0
    np.savez("wrong.npz", tests=draws["test"])
    for arguments, words in (
        (("known-line", "wrong.npz"), "regions: train, test"),
        (("known-line", "nothing.npz"), "a .npz file"),
        (("known-lime", "mine.npz"), "did you mean 'known-line'"),
    ):
        code, text = _invoke("grade", *arguments)
        assert code == 2
        assert words in text
