"""Progress in a notebook: one output that is updated, without ipywidgets, and nothing on the error stream."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods
from ppl_bnn.core.notebook import bars
from ppl_bnn.core.notebook.bars import in_notebook
from ppl_bnn.core.progress import Bars


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A kernel as IPython presents it; the outputs by which a cell would be shown, updates in place."""
    shown: list[dict[str, Any]] = []

    def display(content: Any, *, raw: bool, display_id: str, update: bool) -> None:
        assert raw
        known = [each for each in shown if each["id"] == display_id]
        assert bool(known) == update
        if update:
            known[0] |= {"content": content, "updates": known[0]["updates"] + 1}
        else:
            shown.append({"id": display_id, "content": content, "updates": 0})

    package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.__dict__["get_ipython"] = lambda: types.SimpleNamespace(kernel=object())
    module.__dict__["display"] = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    # As on a machine without it.
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    return shown


def model(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(noise))


def test_a_fit_in_a_notebook_has_one_bar(outputs: list[dict[str, Any]], capfd: Any) -> None:
    x = np.linspace(-1.0, 1.0, 20)[:, None]
    bnn.fit(model, x, 2.0 * x[:, 0], bnn.SVI(ppl="pyro", steps=120, elbo_draws=10), progress=True)
    (bar,) = outputs
    text, html = bar["content"]["text/plain"], bar["content"]["text/html"]
    assert text.startswith("SVI (pyro): 100%")
    assert 'value="1.0000"' in html
    assert capfd.readouterr() == ("", "")


def test_a_bar_is_updated_in_place_and_says_where_it_stopped(
    outputs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "SECONDS", -1.0)
    task = Bars().task("<b>NUTS</b>", 8)
    task.update(2, step_size=0.125)
    (bar,) = outputs
    assert "25%" in bar["content"]["text/plain"]
    assert "step size 0.125" in bar["content"]["text/html"]
    assert "<b>" not in bar["content"]["text/html"]
    task.update(6)
    task.close()
    assert bar["updates"] == 3
    assert bar["content"]["text/plain"].endswith("stopped")


def test_messages_to_the_browser_are_few(
    outputs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "SECONDS", 1e9)
    task = Bars().task("SVI", 1000)
    for done in range(1000):
        task.update(done)
    task.close()
    assert outputs[0]["updates"] == 1


def test_elsewhere_bars_are_lines_of_the_error_stream(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for shell in (None, types.SimpleNamespace()):
        package = types.ModuleType("IPython")
        package.__dict__["get_ipython"] = lambda shell=shell: shell
        monkeypatch.setitem(sys.modules, "IPython", package)
        assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()
    task = Bars().task("MAP", 2)
    task.update(2)
    task.close()
    assert capsys.readouterr().err.startswith("MAP: done")
