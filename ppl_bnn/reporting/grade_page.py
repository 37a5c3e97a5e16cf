"""The page of a grade: sentences, the table of regions, and pictures of errors along the grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ppl_bnn.references.figure import draw_means, draw_spreads
from ppl_bnn.references.grade import COLUMNS, Grade, cell_text
from ppl_bnn.reporting.figures.panels import Panel, Picture, finish
from ppl_bnn.reporting.html import Sheet, TableCell, download, minus
from ppl_bnn.reporting.verdict import Verdict


def content_of_grade(grade: Grade) -> dict[str, Any]:
    """The parts of the page."""
    regions = [region for region in grade.figures if region != "all"]
    whole = grade.sentences.get("all", grade.sentences[regions[0]])
    why = tuple(f"{region}: {grade.sentences[region]}" for region in regions)
    columns = [name for name in COLUMNS if any(not math.isnan(each[name]) for each in grade.figures.values())]
    rows = [
        (region, "", [TableCell(minus(cell_text(name, figures)), _order(figures[name])) for name in columns])
        for region, figures in grade.figures.items()
    ]
    headings = [(name.replace("_", " "), COLUMNS[name]) for name in columns]
    rows_of_grid = sum(len(grade.inputs[region]) for region in regions)
    return {
        "title": f"Grade against {grade.reference}",
        "subtitle": f"{rows_of_grid} rows of the grid, in {len(regions)} regions: {', '.join(regions)}",
        "verdict": Verdict(headline=whole[0].upper() + whole[1:], why=why),
        "why_title": "Region by region",
        "problems": False,
        "explained": "A row is a region of the grid of the reference. Worth: the number of independent exact draws "
        "whose mean, or standard deviation, has the same error. Floor: the same figure between halves of the chains of "
        "the reference, which is what noise alone amounts to.",
        "marked": None,
        "tables": [Sheet("Regions", headings, rows, first="region")],
        "downloads": [("grade.csv", download(grade.table.reset_index(), exact=True), "The table as CSV")],
        "glossary": [(name, COLUMNS[name]) for name in columns],
        "origin": [
            (
                "Reference",
                [("name", grade.reference), ("certificate", "certificate.json of the reference")],
                [],
            )
        ],
    }


def _order(value: float) -> str:
    return "" if math.isnan(value) else repr(float(value))


def _picture(
    grade: Grade, kind: str, title: str, caption: str, draw: Callable[..., None], label: str
) -> Picture:
    def drawn(axes: Axes, region: str) -> None:
        draw(axes, grade, region)
        finish(axes, "first input", label)

    panels = [
        Panel(region, partial(drawn, region=region), _words(grade, kind, region)) for region in grade.errors
    ]
    return Picture(title, caption, panels, _numbers(grade, kind))


def _words(grade: Grade, kind: str, region: str) -> str:
    values = grade.errors[region][kind]
    known = values[np.isfinite(values)]
    return (
        f"{region}: from {known.min():.3g} to {known.max():.3g}." if len(known) else f"{region}: not known."
    )


def _numbers(grade: Grade, kind: str) -> Iterator[dict[str, Any]]:
    for region, errors in grade.errors.items():
        for row, values in enumerate(errors[kind]):
            for output, value in enumerate(values):
                place = {
                    "region": region,
                    "row": row,
                    "output": output,
                    "first_input": grade.inputs[region][row],
                }
                yield place | {kind: value}


GRADE_PICTURES = {
    "means": lambda grade: _picture(
        grade,
        "mean",
        "Errors of the mean",
        "In standard deviations of the reference; the band is two standard errors of its own means.",
        draw_means,
        "error (reference sd)",
    ),
    "spreads": lambda grade: _picture(
        grade,
        "sd",
        "Standard deviations",
        "Divided by those of the reference; triangles are beyond the scale.",
        draw_spreads,
        "sd / reference sd",
    ),
}
