"""Advice names settings that the method has, with the values to try."""

from __future__ import annotations

import re
from typing import Any

import pytest

import ppl_bnn as bnn
from ppl_bnn.diagnostics import remedies as knobs
from tests.problems import METHODS


def advice_of(settings: dict[str, Any]) -> list[str]:
    smaller = knobs.smaller_steps(settings, {})
    return [
        *knobs.more_of_a_sampler(settings),
        *knobs.more_chains(settings),
        *knobs.other_starts(settings),
        *knobs.longer_optimisation(settings),
        knobs.not_still(settings, smaller),
    ]


@pytest.mark.parametrize("name", METHODS)
def test_advice_names_only_what_the_method_has(name: str) -> None:
    row = METHODS[name]
    method = row.build(row.systems[0], row.quick)
    while hasattr(method, "member"):
        method = method.member
    settings = method.settings()
    for text in advice_of(settings):
        for word in re.findall(r"[a-z_]+(?==)|learning_rate", text):
            assert word in settings, text
        for word, setting in (("warm-up", "warmup"), ("more draws", "draws"), ("another start", "start")):
            assert word not in text or setting in settings, text


@pytest.mark.parametrize(
    ("method", "function", "expected"),
    [
        (
            bnn.SMC(particles=100, moves=3),
            "more_of_a_sampler",
            "particles=400, or moves=6: particles that differ more",
        ),
        (bnn.SMC(particles=100), "more_chains", "runs=4"),
        (bnn.NUTS(), "more_of_a_sampler", "more draws and a longer warm-up"),
        (bnn.NUTS(), "more_chains", "chains=4"),
        (bnn.Pathfinder(max_iterations=50), "longer_optimisation", "max_iterations=100"),
        (bnn.SWAG(burn_in=10), "longer_optimisation", "burn_in=20, or a larger learning_rate"),
        (bnn.SVI(steps=2000), "longer_optimisation", "steps=4000, or a larger learning_rate"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", None),
)
def test_advice_is_about_the_method_at_hand(method: Any, function: str, expected: str) -> None:
    assert getattr(knobs, function)(method.settings()) == [expected]


def test_particles_are_not_sent_back_to_smc() -> None:
    found = knobs.more_modes(bnn.SMC(particles=100).settings())
    assert found[0].startswith("bnn.stack")
    assert found[1:] == ["particles=400: the shares of modes are those of the particles in them"]
    assert any("SMC()" in text for text in knobs.more_modes(bnn.NUTS().settings()))


def test_settings_are_those_of_the_member() -> None:
    posterior: Any = type("P", (), {})()
    posterior.info = type("I", (), {"settings": bnn.Ensemble(bnn.NUTS(draws=7), size=2).settings()})()
    assert knobs.fitted_settings(posterior)["draws"] == 7
