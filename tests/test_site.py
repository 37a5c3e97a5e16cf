"""The pages of the site that are made: formulas of all cards, a page for each model and study, and all public names."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import ppl_bnn as bnn
from ppl_bnn import zoo

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Any:
    """The scripts of `docs/` and of `comparisons/`, which are no packages."""
    before = list(sys.path)
    sys.path[:0] = [str(DOCS), str(ROOT / "comparisons")]
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def made(importable: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all pages that are made."""
    pages = importlib.import_module("pages")
    folder = tmp_path_factory.mktemp("site") / "made"
    patch = pytest.MonkeyPatch()
    patch.setattr(pages, "MADE", folder)
    pages.write_all()
    patch.undo()
    return folder


def test_the_formulas_of_every_card_are_tex():
    formulas = importlib.import_module("formulas")
    assert doctest.testmod(formulas).failed == 0
    seen = 0
    for card in zoo.models().values():
        found = formulas.formulas(card.docstring)
        assert found, card.name
        for formula in found:
            made = formulas.tex(formula)
            assert made.count("{") == made.count("}"), made
            # No sign of the plain notation is left, and words are marked as such.
            outside = re.sub(r"\\(?:text|texttt|operatorname)\{[^{}]*\}|\\[a-z]+", "", made)
            assert not re.search(r"[~|*`⟦⟧]|sqrt|\.\.|[A-Za-z]{3,}", re.sub(r"_\{[^{}]*\}", "", outside)), (
                formula,
                made,
            )
            seen += 1
    assert seen > 150


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("h_(l+1) = sqrt((a + b) / 2)", r"h_{l+1} = \sqrt{(a + b) / 2}"),
        ("P(y_n <= c | x_n)", r"P(y_{n} \le c \mid x_{n})"),
        ("sum_c' exp(f_nc')", r"\sum_{c'} \exp(f_{nc'})"),
        ("s ~ HalfNormal(noise_scale)", r"s \sim \operatorname{HalfNormal}(\text{noise_scale})"),
        ("6 filters k x k", r"6\text{ filters } k \times k"),
        ("tau^2 r_k^2, k = 1..H hidden units", r"\tau^{2} r_{k}^{2}, k = 1\ldots H\text{ hidden units}"),
    ],
)
def test_a_formula_by_hand(formula: str, expected: str):
    assert importlib.import_module("formulas").tex(formula) == expected


def test_every_model_and_study_has_a_page(made: Path):
    for name in zoo.models():
        page = (made / "zoo" / f"{name}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {name}\n")
        assert "```{math}" in page
        assert "## Methods" in page
    verdicts = importlib.import_module("verdicts")
    for name in verdicts.judged_studies():
        page = (made / "studies" / f"{name}.md").read_text(encoding="utf-8")
        assert page.count("{bdg-") == len(verdicts.stored(name))
        for figure in (ROOT / "comparisons" / "results" / name).glob("*.png"):
            assert (made / "studies" / name / figure.name).is_file()


def test_every_public_name_is_in_the_reference_once(made: Path):
    pages = importlib.import_module("pages")
    listed = re.findall(r"^   (\w+)$", (made / "api" / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(set(bnn.__all__) - set(pages.public_modules()))
    for name, module in pages.public_modules().items():
        text = (made / "api" / f"{name}.md").read_text(encoding="utf-8")
        assert re.findall(r"^   (\w+)$", text, re.MULTILINE) == pages.names_of(module)


def test_docstrings_become_restructuredtext():
    docstrings = importlib.import_module("docstrings")
    lines = [
        "E over |w| of a * b.",
        "",
        "    w ~ N(0, 1)",
        "",
        "Parameters",
        "----------",
        "*args : tuple",
        "    As they are.",
    ]
    docstrings.plain(None, "class", "name", None, None, lines)
    assert lines[0] == r"E over \|w\| of a \* b."
    assert lines[2:5] == [".. code-block:: text", "", "    w ~ N(0, 1)"]
    assert lines[-2:] == ["*args : tuple", "    As they are."]


def test_broken_links_are_found(tmp_path: Path):
    check = importlib.import_module("check_links")
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="b.html#here"></a><a href="#top"></a>')
    (tmp_path / "b.html").write_text('<p id="here"></p>')
    assert check.broken_links(tmp_path) == []
    (tmp_path / "b.html").write_text(
        '<p id="there"></p><a href="c.html"></a><script src="https://example.org/x.js"></script>'
    )
    found = "\n".join(check.broken_links(tmp_path))
    assert "a.html links to b.html#here, which has no such anchor" in found
    assert "b.html links to c.html, which is no file" in found
    assert "b.html loads https://example.org/x.js from a network" in found
