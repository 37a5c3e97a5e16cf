"""The registry of methods: names, variants, methods made of others, and where each name is taken."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.core.errors import UnknownNameError
from ppl_bnn.evaluation.grid.grid import Grid
from ppl_bnn.inference import registry
from ppl_bnn.inference.registry import MODULES, ROWS, method_class, row
from ppl_bnn.posterior.registered import APPROXIMATIONS, approximation_class
from ppl_bnn.zoo.support import declared
from tests.problems import Conjugate


def test_every_class_of_the_registry_is_there_under_its_own_name() -> None:
    for name in MODULES:
        assert method_class(name) is getattr(bnn, name)
        assert method_class(name).__name__ == name
    for name in APPROXIMATIONS:
        assert approximation_class(name).__name__ == name
    with pytest.raises(UnknownNameError, match="did you mean 'NUTS'"):
        method_class("NUST")


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("nuts", "nuts"),
        (" MC_Dropout", "mc-dropout"),
        ("MCDropout", "mc-dropout"),
        ("Laplace-Kron", "laplace-kron"),
    ],
)
def test_a_name_is_known_with_and_without_hyphens(word: str, name: str) -> None:
    assert row(word) is ROWS[name]


def test_a_method_that_is_made_of_another_takes_its_name() -> None:
    found = row("ensemble-swag")
    assert (found.name, found.class_name, found.member) == ("ensemble-swag", "Ensemble", "swag")
    assert found.build("pyro") == bnn.Ensemble(bnn.SWAG(ppl="pyro"), ppl="pyro")
    assert row("Stacked_NUTS").build("numpyro") == bnn.Stacked(bnn.NUTS())
    nested = row("stacked-ensemble-svi")
    assert nested.build("numpyro") == bnn.Stacked(bnn.Ensemble(bnn.SVI()))
    assert row(nested.name) == nested
    for wrong in ("nuts-map", "ensemble-swig", ""):
        with pytest.raises(UnknownNameError, match="unknown method"):
            row(wrong)


def test_settings_are_those_of_the_row_then_the_quick_ones_then_those_that_are_given() -> None:
    kron = ROWS["laplace-kron"]
    assert kron.build("numpyro") == bnn.Laplace(structure="kron")
    assert kron.build("numpyro", quick=True).steps == kron.quick["steps"]
    assert kron.build("numpyro", quick=True, steps=7, structure="diag") == bnn.Laplace(
        structure="diag", steps=7
    )
    ensemble = ROWS["ensemble"].build("pyro", quick=True)
    assert ensemble.member == ROWS["map"].build("pyro", quick=True)
    assert ROWS["ensemble"].build("numpyro", member=bnn.SVI()).member == bnn.SVI()


def test_grids_advice_and_the_table_of_the_zoo_take_the_same_names() -> None:
    grid = Grid(models=["linear_regression"], data=["diabetes"], methods=["laplace-kron", "ensemble-map"])
    assert grid.methods == {
        "laplace-kron": bnn.Laplace(structure="kron"),
        "ensemble-map": bnn.Ensemble(bnn.MAP()),
    }
    assert declared().methods is ROWS
    assert declared().served("ensemble-mclmc") == ("numpyro",)
    assert declared().served("ensemble-swag") == declared().served("swag")


def test_a_method_of_another_library_becomes_known_by_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dataclasses.replace(ROWS["map"], name="mine", settings={"steps": 3})
    monkeypatch.setitem(registry.ROWS, "mine", mine)
    assert row("ensemble-mine").build("numpyro").member == bnn.MAP(steps=3)


def test_the_method_of_the_contributors_guide_is_one_file_and_two_lines_of_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = guide.split("## Adding a method", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]
    module = types.ModuleType("importance_resampling")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "CONTRIBUTING.md", "exec"), vars(module))
    monkeypatch.setitem(MODULES, "ImportanceResampling", module.__name__)
    row_of_it = registry.MethodRow("importance-resampling", "ImportanceResampling", {"draws": 2000})
    monkeypatch.setitem(ROWS, row_of_it.name, row_of_it)

    exact = Conjugate.make(rows=6, features=1, noise=1.0)
    posterior = bnn.fit(
        exact.model, exact.x, exact.y, row("importance_resampling").build("numpyro"), progress=False
    )
    effective = posterior.info.figures["effective_proposals"]
    assert 500 < effective < 20_000
    draws = Conjugate.flat(posterior.draws).reshape(2000, -1)
    # Resampling adds the error of 2000 draws to that of the proposals.
    # Over 20 seeds the largest z was 2.7, that of the evidence 2.5.
    error = np.sqrt(np.diag(exact.covariance) * (1.0 / effective + 1.0 / 2000))
    assert np.all(np.abs(draws.mean(axis=0) - exact.mean) < 5.0 * error)
    # The relative error of a mean of weights is sqrt(1 / effective - 1 / proposals).
    evidence = posterior.info.figures["log_evidence"]
    assert abs(evidence - exact.log_evidence) < 5.0 / np.sqrt(effective)
    posterior.save(tmp_path / "kept")
    again = bnn.load(tmp_path / "kept", exact.model)
    np.testing.assert_array_equal(again.predict(exact.x).mean, posterior.predict(exact.x).mean)
    with pytest.raises(bnn.errors.InputError, match="proposals"):
        row("importance-resampling").build("pyro", proposals=0)
