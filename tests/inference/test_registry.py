"""The registry of methods: names, variants, methods made of others, and where each name is taken."""

from __future__ import annotations

import dataclasses

import pytest

import ppl_bnn as bnn
from ppl_bnn.core.errors import UnknownNameError
from ppl_bnn.evaluation.grid.grid import Grid
from ppl_bnn.inference import registry
from ppl_bnn.inference.registry import MODULES, ROWS, method_class, row
from ppl_bnn.posterior.registered import APPROXIMATIONS, approximation_class
from ppl_bnn.zoo.support import declared


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
