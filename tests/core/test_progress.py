"""What a caller may give for `progress`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.progress import Bars, Silent, resolve
from ppl_bnn.datasets.tables import Table


def test_a_function_is_called_with_the_news() -> None:
    told: list[tuple[str, int, int, dict[str, float]]] = []

    def tell(*news: Any) -> None:
        told.append(news)  # type: ignore[arg-type]

    task = resolve(tell).task("Chains", 100)
    task.update(30, divergences=2.0)
    task.close()
    assert told == [("Chains", 30, 100, {"divergences": 2.0})]
    x = np.linspace(-1.0, 1.0, 12)[:, None]
    bnn.fit(
        bnn.zoo.load("linear_regression"),
        x,
        x[:, 0],
        bnn.MAP(ppl="pyro", steps=200),
        device="cpu",
        progress=tell,  # type: ignore[arg-type]
    )
    assert len(told) > 1
    assert all(title and 0 <= done <= total for title, done, total, _ in told)


def test_what_else_may_be_given() -> None:
    assert isinstance(resolve(True), Bars)
    assert isinstance(resolve(None), Silent)
    assert isinstance(resolve(False), Silent)
    bars = Bars()
    assert resolve(bars) is bars
    for wrong in (5, "bar", Bars):
        with pytest.raises(InputError, match="progress: expected True, False, a function"):
            resolve(wrong)


def test_a_table_is_shown_in_a_few_lines() -> None:
    names = [f"column {number}" for number in range(300)]
    shown = repr(Table("wide", np.zeros((5000, 300)), np.zeros(5000), names, "cost", "regression"))
    assert len(shown.splitlines()) == 3
    assert len(shown) < 300
    assert "5000 rows, 300 features" in shown
    assert "target: cost" in shown
    assert "and 292 more" in shown
    few = Table("few", np.zeros((2, 1)), np.array([0, 1]), ["dose"], "ill", "classification", ("no", "yes"))
    assert "ill (2 classes)" in repr(few)
    assert repr(few).endswith("features: dose")
