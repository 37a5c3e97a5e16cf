"""The study of Bayes by Backprop on MNIST: its rows, its choices, its verdicts, and a tiny run on digits."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED
from ppl_bnn import data

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("mnist_bayes_by_backprop")


# --- images and choices -------------------------------------------------------------------------------


def test_parts_of_the_digits_do_not_overlap(script: Any) -> None:
    images = script.load_images("digits", (100, 30, 20))
    table = data.load("digits")
    together = np.concatenate([images.x, images.held_x, images.test_x])
    np.testing.assert_allclose(together, table.x[:150] / 8.0, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([images.y, images.held_y, images.test_y]), table.y[:150])


@pytest.mark.skipif(not os.environ.get("PPL_BNN_DATA"), reason="needs the tables of PPL_BNN_DATA")
def test_of_mnist_the_last_training_images_are_held_out(script: Any) -> None:
    images = script.load_images("mnist", (50, 20, 10))
    table = data.load("mnist", part="train")
    np.testing.assert_array_equal(images.held_y, table.y[-20:])
    np.testing.assert_array_equal(images.y, table.y[:50])
    np.testing.assert_array_equal(images.test_y, data.load("mnist", part="test").y[:10])
    assert images.x.max() == pytest.approx(255.0 / 126.0, rel=1e-6)


def test_the_prior_is_that_of_the_source(script: Any) -> None:
    choice = script.choices(script.MIXTURE, script.FULL)[0]
    prior = script.prior_of(script.MIXTURE, choice)
    assert prior.weights == (0.5, 0.5)
    np.testing.assert_allclose(-np.log(prior.scales), [0.0, 6.0], atol=1e-12)
    assert {each.gaussian for each in script.choices(script.GAUSSIAN, script.FULL)} == set(
        script.FULL.gaussian_scales
    )
    for name in (script.MIXTURE, script.SGD, script.DROPOUT):
        assert {each.gaussian for each in script.choices(name, script.FULL)} == {None}


def test_an_epoch_sees_as_many_rows_as_there_are(script: Any) -> None:
    for name in script.METHODS:
        choice = script.Choice(1e-3, 3, 0.5 if name == script.GAUSSIAN else None)
        method = script.method_of(name, choice, script.FULL)
        assert method.steps == 3 * 391
        assert method.learning_rate == 1e-3
        assert method.batch_size == 128


# --- verdicts -----------------------------------------------------------------------------------------


def rows_of(script: Any, **changed: float) -> list[dict[str, Any]]:
    """Errors of three seeds at each width, a little below those of the source, with a little noise."""
    rng = np.random.default_rng(0)
    return [
        {
            "method": method,
            "width": width,
            "seed": seed,
            "error": wanted + changed.get(method.replace(" ", "_"), 0.0) + 0.02 * rng.normal(),
        }
        for method, widths in script.RECALLED.items()
        for width, wanted in widths.items()
        for seed in range(3)
    ]


def outcomes(script: Any, rows: list[dict[str, Any]], sizes: Any) -> dict[str, str]:
    """The outcome of every claim by key."""
    study = script.Study(sizes, Path())
    study.tables = {"errors": rows}
    return {each.key: each.verdict for each in script.judge(study)}


def test_published_errors_are_met_or_not(script: Any) -> None:
    found = outcomes(script, rows_of(script), script.FULL)
    assert len(found) == 15
    assert {found[f"{name}-{width}"] for name in script.SHORT.values() for width in (400, 800, 1200)} == {
        REPRODUCED
    }
    worse = outcomes(script, rows_of(script, SGD=0.4), script.FULL)
    assert [worse[f"sgd-{width}"] for width in (400, 800, 1200)] == [REFUTED] * 3
    assert worse["dropout-400"] == REPRODUCED
    one = [row for row in rows_of(script, SGD=0.4) if row["seed"] == 0]
    assert set(outcomes(script, one, script.FULL).values()) == {UNDECIDED}


@pytest.mark.parametrize("other", ["GAUSSIAN", "SGD"])
def test_methods_are_ordered_or_not(script: Any, other: str) -> None:
    name = getattr(script, other)
    claim = f"mixture-below-{script.SHORT[name]}"
    assert outcomes(script, rows_of(script), script.FULL)[claim] == REPRODUCED
    swapped = rows_of(script, **{name.replace(" ", "_"): -0.8})
    assert outcomes(script, swapped, script.FULL)[claim] == REFUTED


def test_a_smoke_test_is_compared_with_nothing(script: Any) -> None:
    for sizes in (script.SMOKE, script.TINY):
        assert set(outcomes(script, rows_of(script), sizes).values()) == {NOT_RUN}


# --- all of it ----------------------------------------------------------------------------------------


def test_a_tiny_run_writes_everything_and_goes_on(script: Any, tmp_path: Path) -> None:
    study = script.main(tiny=True, out=tmp_path / "out", checkpoint=tmp_path / "kept", device="cpu")
    for name in ("errors", "choices"):
        with (tmp_path / "out" / f"{name}.csv").open() as file:
            assert list(csv.DictReader(file)), name
    for name in ("errors", "weights"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {each["verdict"] for each in content["verdicts"]} == {NOT_RUN}
    errors, tried = study.tables["errors"], study.tables["choices"]
    assert len(errors) == 4 * 2
    assert all(0.0 <= row["error"] <= 100.0 and math.isfinite(row["log_score"]) for row in errors)
    for method in script.METHODS:
        own = [row for row in tried if row["method"] == method]
        assert [row["width"] for row in own] == [6, 6]
        (best,) = [row for row in own if row["chosen"]]
        assert best["held_out_error"] == min(row["held_out_error"] for row in own)
    again = script.main(tiny=True, out=tmp_path / "again", checkpoint=tmp_path / "kept", device="cpu")
    assert json.dumps(again.tables) == json.dumps(study.tables)
