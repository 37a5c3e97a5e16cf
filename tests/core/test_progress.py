"""What a caller may give for `progress` and `callback`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.progress import Bars, Silent, Step, ended_by_callback, resolve
from ppl_bnn.datasets.tables import Table


class _Recorder:
    """A progress, and its own task."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def task(self, title: str, total: int) -> _Recorder:
        self.calls.append((title, total))
        return self

    def update(self, done: int, **figures: float) -> None:
        self.calls.append((done, figures))

    def close(self) -> None:
        self.calls.append("closed")


def test_a_callback_is_called_beside_a_progress() -> None:
    steps: list[Step] = []
    recorder = _Recorder()
    task = resolve(recorder, steps.append).task("Chains", 100)
    assert not task.update(30, divergences=2.0)
    task.close()
    assert recorder.calls == [("Chains", 100), (30, {"divergences": 2.0}), "closed"]
    assert steps == [Step("Chains", 30, 100, {"divergences": 2.0})]
    assert steps[0].loss is None
    assert steps[0].draws() == {}


@pytest.mark.parametrize(
    ("figures", "loss"), [({"loss": 3.0}, 3.0), ({"elbo": -4.0, "k": 1.0}, 4.0), ({}, None)]
)
def test_the_loss_of_a_step(figures: dict[str, float], loss: float | None) -> None:
    assert Step("SVI", 1, 2, figures).loss == loss


def test_a_callback_that_has_asked_for_the_end_is_not_called_again() -> None:
    calls: list[int] = []

    def enough(step: Step) -> bool:
        calls.append(step.done)
        return step.done >= 20

    shown = resolve(None, enough)
    task = shown.task("Chains", 30)
    assert [task.update(done) for done in (10, 20, 21, 30)] == [False, True, True, True]
    assert calls == [10, 20]
    # Another part of the fit has its own end, and the last step is an end by itself.
    assert shown.task("Chains, again", 20).update(20)
    assert ended_by_callback(shown) == ("Chains was ended by the callback after 20 of 30",)
    assert ended_by_callback(Silent()) == ()
    # An object of a caller may have an attribute of the same name.
    recorder: Any = _Recorder()
    recorder.ended = False
    assert ended_by_callback(recorder) == ()


@pytest.mark.parametrize("answer", [1, "yes", 0.0, np.array([True])])
def test_a_callback_answers_true_or_nothing(answer: Any) -> None:
    with pytest.raises(InputError, match="callback: expected True to end, or None"):
        resolve(None, lambda step: answer).task("Chains", 30).update(1)
    assert resolve(None, lambda step: np.True_).task("Chains", 30).update(1)


@pytest.mark.parametrize("wrong", [5, "print", Bars])
def test_a_callback_is_a_function(wrong: Any) -> None:
    with pytest.raises(InputError, match="callback: expected a function of one step"):
        resolve(None, wrong)


def test_what_else_may_be_given() -> None:
    assert isinstance(resolve(True), Bars)
    assert isinstance(resolve(None), Silent)
    assert isinstance(resolve(False), Silent)
    bars = Bars()
    assert resolve(bars) is bars
    for wrong in (5, "bar", Bars, print):
        with pytest.raises(InputError, match=r"progress: expected True, False or a Progress.*callback= for"):
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
