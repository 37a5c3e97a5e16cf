"""Results in a notebook say what tables and texts say, as small HTML in which all names are text."""

from __future__ import annotations

import io
import math
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods
from ppl_bnn.core.notebook.html import Folded, Listing, card, in_words
from ppl_bnn.evaluation.comparison.run import compare
from tests.evaluation.comparison.test_comparison import Exact, Fails, FromPrior, line
from tests.posterior.test_export import Planted
from tests.references.conftest import make as reference_of
from tests.references.test_grade import outputs
from tests.reporting.test_grid_page import made as grid_of

HOSTILE = "<b onmouseover=\"alert('x')\">&amp; $a_b$</b><script>alert(1)</script>"


class Read(HTMLParser):
    """The tags, the attributes and the texts of a piece of HTML."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def read(result: Any) -> Read:
    """The HTML of a result, checked for what no notebook should be given."""
    found = Read(result._repr_html_())
    known = {"div", "strong", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "details", "summary"}
    assert set(found.tags) <= known
    assert found.attributes <= {"style"}
    # Colours of the notebook, light or dark: neither paper nor ink is set.
    html = result._repr_html_()
    assert "background" not in html
    assert "color:#000" not in html
    assert "http" not in html
    return found


def regression(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [3, 1]), likelihoods.Gaussian(noise))


def data(rows: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 2))
    return x, x[:, 0] + 0.1 * rng.normal(size=rows)


def test_every_kind_of_part_is_text_in_its_place() -> None:
    listing = Listing(HOSTILE, ["name", "value"], [[HOSTILE, "1"], ["b", "2"]], frozenset({(1, 1)}))
    html = card(
        HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, [HOSTILE], listing, Folded(HOSTILE, [[HOSTILE]]), "", [], None
    )
    found = Read(html)
    assert found.texts.count(HOSTILE) == 9
    assert "b" not in found.tags
    assert "script" not in found.tags
    assert html.count("#d55e00") == 1
    assert found.tags.count("details") == 1
    # What is empty leaves nothing behind, and a control character is no character.
    assert card("a", "", [], {}, Folded("nothing", [])) == card("a")
    assert "\x1b" not in card("\x1b[31mred")


def test_values_in_words() -> None:
    assert in_words(None) == "none"
    assert in_words({"a": [1, None], "b": ()}) == "a: 1, none, b: none"


@pytest.mark.parametrize("form", ["chains", "iid", "point"])
def test_a_posterior_says_how_it_was_fitted(form: str) -> None:
    x, y = data()
    posterior = Planted(form=form, ppl="pyro").fit(regression, x, y, feature_names=("a", HOSTILE))
    found = read(posterior)
    assert found.texts[0] == repr(posterior)
    assert "12 rows, inputs (2,) each" in found.texts
    for site, value in posterior.unconstrained_draws.items():
        at = found.texts.index(site)
        assert found.texts[at + 1] == (" x ".join(map(str, value.shape[2:])) or "1")
    assert found.texts[found.texts.index("spread") + 1] == "0.05"


def test_a_prediction_shows_its_first_rows() -> None:
    x, y = data()
    prediction = Planted(ppl="pyro").fit(regression, x, y).predict(x)
    found = read(prediction)
    assert found.texts[0] == repr(prediction)
    assert "Medians and central 90 % intervals, the first 5 of 12 rows" in found.texts
    low, middle, high = prediction.quantile([0.05, 0.5, 0.95])
    for row in range(5):
        assert f"{middle[row]:.4g} ({low[row]:.4g} to {high[row]:.4g})" in found.texts
    assert {"4", "5"} - set(found.texts) == {"5"}


def test_class_probabilities_and_several_outputs_are_shown() -> None:
    probs = np.array([[[0.25, 0.5, 0.25]]])
    found = read(bnn.Prediction("Categorical", {"probs": probs}, class_names=("a", "b", HOSTILE)))
    assert found.texts[-8:] == ["row", "P(a)", "P(b)", f"P({HOSTILE})", "0", "0.250", "0.500", "0.250"]
    loc = np.zeros((1, 2, 2))
    found = read(bnn.Prediction("Normal", {"loc": loc, "scale": loc + 1.0}))
    assert found.texts.count("-2.776e-17 (-1.645 to 1.645)") + found.texts.count("0 (-1.645 to 1.645)") == 4
    assert "y[1]" in found.texts


def test_a_diagnosis_has_verdict_reasons_and_advice() -> None:
    x, y = data()
    diagnosis = bnn.diagnose(Planted(ppl="pyro").fit(regression, x, y))
    found = read(diagnosis)
    assert found.texts[0] == f"{diagnosis.subject}: {diagnosis.verdict}"
    for line_of_it in (*diagnosis.reasons, *diagnosis.advice, *diagnosis.figures):
        assert line_of_it in found.texts


def test_a_comparison_shows_the_tables_of_the_terminal(rng: np.random.Generator) -> None:
    from rich.console import Console

    from ppl_bnn.reporting.terminal import show

    x, methods = rng.normal(size=(30, 1)), {"exact": Exact(), "from prior": FromPrior(), "bad": Fails()}
    rows = (x, x[:, 0] + 0.1 * rng.normal(size=30))
    result = compare(line, rows, rows, methods, reference="exact", target_name=HOSTILE)
    found = read(result)
    console = Console(width=250, file=io.StringIO(), record=True)
    show(console, result)
    terminal = console.export_text()
    # Every cell of both tables is a cell of the terminal's.
    cells = [text for text in found.texts if text[:1] in "-0123456789" and len(text) < 20 and "%" not in text]
    assert len(cells) > 15
    assert [cell for cell in cells if cell not in terminal] == []
    assert f"bad failed: {result.failures['bad']}" in found.texts
    assert result.summary() in found.texts
    headings = {"system", "log score ↑", "RMSE ↓", "mean off by (sd)", "converged", "memory (MB)"}
    assert headings <= set(found.texts)
    assert "noise floor" in found.texts


def test_a_grid_shows_a_table_for_each_data_set_and_marks_failures() -> None:
    scores = {
        "one": {"map": [-1.0, -1.1], HOSTILE: [-1.2, math.nan]},
        "two": {"map": [-1.0], HOSTILE: [-1.3]},
    }
    result = grid_of(scores, reference="map")
    found = read(result)
    assert found.texts[0] == repr(result)
    assert {"mlp on one", "mlp on two"} <= set(found.texts)
    assert found.texts.count(HOSTILE) == 2
    # One cell has failed, which is the only problem.
    assert result._repr_html_().count("#d55e00") == 1


def test_a_grade_shows_the_table_and_the_sentences() -> None:
    reference = reference_of()
    grade = reference.grade(draws={region: rows[::7] for region, rows in outputs(reference).items()})
    found = read(grade)
    assert found.texts[0] == f"Against {grade.reference}"
    for region, sentence in grade.sentences.items():
        assert f"{region}: {sentence}" in found.texts
    assert {"mean error", "worth mean", *grade.figures} <= set(found.texts)


def test_models_show_their_card_and_their_sites() -> None:
    found = read(bnn.zoo.sketch(regression, 2))
    assert found.texts[0] == "A model for regression"
    at = found.texts.index("hidden0.weight")
    assert found.texts[at + 2 : at + 4] == ["2 x 3", "6"]
    assert found.texts[found.texts.index("in all") + 1] == "14"
    found = read(bnn.zoo.models()["regression_mlp"])
    assert found.texts[:2] == ["regression_mlp", bnn.zoo.models()["regression_mlp"].docstring]
