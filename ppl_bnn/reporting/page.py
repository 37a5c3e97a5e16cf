"""A comparison as one self-contained page: a verdict in words, the table, pictures, and the origin of the numbers.

`report` writes the page of a comparison, or of the result of a grid (`reporting.grid_page`); the parts of both are in
`reporting.html`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.files import write_whole
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.evaluation.comparison.panels import Picture
from ppl_bnn.evaluation.comparison.summary import listed
from ppl_bnn.evaluation.comparison.table import COLUMNS
from ppl_bnn.evaluation.grid.result import GridResult
from ppl_bnn.prediction.reliability import LEVELS
from ppl_bnn.reporting import grid_page
from ppl_bnn.reporting.comparison_figures import PICTURES
from ppl_bnn.reporting.diagnostic_figures import Findings
from ppl_bnn.reporting.html import (
    Cell,
    Sheet,
    cell_of,
    check_format,
    checked_path,
    data_card,
    download,
    heading_of,
    in_words,
    minus,
    pictures_of,
    rendered,
    shown,
    write_numbers,
)
from ppl_bnn.reporting.terminal import FIDELITY, PREDICTION, Column, number
from ppl_bnn.reporting.verdict import margin_of, standing, verdict

if TYPE_CHECKING:
    import pandas as pd


def report(
    result: Comparison | GridResult,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    numbers: str | None = None,
) -> Path:
    """Write a comparison, or the result of a grid, as one self-contained HTML file.

    The page begins with a verdict in words (`reporting.verdict`, `reporting.grid_verdict`). Then follow the tables, in
    which a value is marked only if its difference from the others exceeds twice its standard error; the pictures of
    `reporting.comparison_figures` or `reporting.grid_figures`; the data, the settings and the versions; and for a grid
    also failures and missing cells. The page suits screens of any width, light or dark, and paper.

    Parameters
    ----------
    result : Comparison or GridResult
        What to report.
    path : str or PathLike
        A file whose name ends in .html. Its folder is made if needed, and the file appears whole or not at all.
    title : str, optional
        The heading. Default: the target and the methods, or the models and the data.
    numbers : {"csv", "parquet"}, optional
        Also write all numbers (`all_numbers`, `grid_page.all_numbers`) beside the page, the table to `<stem>.csv` and
        the numbers of each picture to `<stem>-<picture>.csv`. (The page itself has most of them.)

    Returns
    -------
    Path
        The file.

    Raises
    ------
    InputError
        Another type of result, a path that cannot be written, or an unknown format; before anything is drawn.
    UnsupportedError
        "parquet" without a package with which pandas can write it; before anything is drawn.
    """
    if not isinstance(result, Comparison | GridResult):
        raise InputError.of(
            "report",
            "a Comparison or a GridResult",
            type(result).__name__,
            "the result of bnn.compare(...) or of a grid's run(...)",
        )
    target = checked_path(path)
    check_format(numbers)
    if isinstance(result, GridResult):
        grid_page.write(result, target, title, numbers)
        return target
    findings = Findings(result)
    pictures = _pictures(findings)
    content = page(result, title=title, pictures=pictures, findings=findings).encode()
    write_whole(target, lambda path: path.write_bytes(content))
    if numbers is not None:
        write_numbers(target, all_numbers(result, pictures, findings), numbers)
    return target


def all_numbers(
    comparison: Comparison, pictures: Sequence[Picture] | None = None, findings: Findings | None = None
) -> dict[str, pd.DataFrame]:
    """Everything that a report shows, as tables.

    They are "table", "rows" (scores of each test row), for numbers "intervals" (coverage and width at several levels,
    and the distance of PIT from uniform) and one for each picture.

    Parameters
    ----------
    comparison : Comparison
        The comparison.
    pictures : sequence of Picture, optional
        The pictures, if they have been made already.
    findings : Findings, optional
        The findings, if they have been made already.

    Returns
    -------
    dict of str to pd.DataFrame
    """
    import pandas as pd

    findings = Findings(comparison) if findings is None else findings
    pictures = _pictures(findings) if pictures is None else pictures
    found = {"table": comparison.table.reset_index()}
    scored = {
        (name, column): values
        for column, by_method in findings.row_scores.items()
        for name, values in by_method.items()
    }
    # By row, rmse is a squared error, and scores of which smaller is better get their original sign back.
    signs = {"log_score": 1.0, "accuracy": 1.0}
    called = {"rmse": "squared_error", "accuracy": "correct"}
    found["rows"] = pd.concat(
        [
            pd.DataFrame(
                {
                    "method": name,
                    "row": range(len(next(iter(found_scores.values())))),
                    **{
                        called.get(column, column): signs.get(column, -1.0) * values
                        for column, values in found_scores.items()
                    },
                }
            )
            for name in findings.names
            if (found_scores := {c: v for (method, c), v in scored.items() if method == name})
        ]
        or [pd.DataFrame()]
    )
    if len(findings.intervals):
        found["intervals"] = findings.intervals
    for picture in pictures:
        if picture.numbers is not None and len(picture.numbers):
            found[picture.key] = picture.numbers
    return found


def page(
    comparison: Comparison,
    *,
    title: str | None = None,
    pictures: Sequence[Picture] | None = None,
    findings: Findings | None = None,
) -> str:
    """The page of a comparison as text (see `report`).

    Parameters
    ----------
    comparison : Comparison
        The comparison.
    title : str, optional
        The heading.
    pictures : sequence of Picture, optional
        The pictures, if they have been made already.
    findings : Findings, optional
        The findings, if they have been made already.

    Returns
    -------
    str
    """
    findings = Findings(comparison) if findings is None else findings
    pictures = _pictures(findings) if pictures is None else pictures
    notes = _Notes(comparison)
    tables = _tables(comparison, findings, notes)
    whole = _whole_table(comparison, notes)
    return rendered(
        "page.html",
        title=title or _title(comparison),
        subtitle=_subtitle(comparison),
        interrupted=_interrupted(comparison),
        verdict=verdict(comparison),
        tables=tables,
        whole=whole,
        notes=notes.listed,
        glossary=[(name, COLUMNS[name]) for name in comparison.table.columns if name in COLUMNS],
        pictures=[shown(picture) for picture in pictures],
        intervals=_intervals(findings),
        table_download=download(comparison.table.reset_index()),
        data=data_card(comparison.data),
        fits=_fits(comparison),
        versions=_versions(comparison),
    )


def _interrupted(comparison: Comparison) -> str:
    """What is missing from an interrupted comparison, in a sentence or two; "" if it is complete."""
    if not comparison.missing:
        return ""
    return (
        f"This comparison was interrupted, or is still being computed. Not fitted: {listed(list(comparison.missing))}. "
        "Everything below is about the methods that had finished."
    )


def _pictures(findings: Findings) -> list[Picture]:
    return pictures_of(PICTURES, findings)


# --- the table --------------------------------------------------------------------------------------------


@dataclass
class _Notes:
    """Notes by number, in the order of first reference; equal texts of one method are one note."""

    comparison: Comparison
    listed: list[dict[str, Any]] = field(default_factory=list)

    def of(self, name: str, column: str) -> tuple[int, ...]:
        note = self.comparison.notes.get((name, column))
        if not note:
            return ()
        for entry in self.listed:
            if entry["method"] == name and entry["text"] == note:
                if column not in entry["columns"]:
                    entry["columns"].append(column)
                return (entry["number"],)
        self.listed.append(
            {"number": len(self.listed) + 1, "method": name, "columns": [column], "text": note}
        )
        return (len(self.listed),)


def _tables(comparison: Comparison, findings: Findings, notes: _Notes) -> list[Sheet]:
    """The tables of the terminal: how well each method predicts, then its distance to the reference and its cost."""
    table = comparison.table
    marks = {
        column: standing(values, margin_of(column, values)) for column, values in findings.row_scores.items()
    }
    reliable = {name: loo for name, loo in findings.left_out.items() if loo.share_above == 0.0}
    if len(reliable) == len(findings.left_out):
        marks["elpd_loo"] = standing(
            {name: loo.elpd_data.elpd_i.values.ravel() for name, loo in reliable.items()}
        )
    reference = findings.reference
    predicted = [column for column in PREDICTION[comparison.task] if column.source in table.columns]
    fidelity = [
        column
        for column in FIDELITY
        if column.source in table.columns and (reference or not column.source.startswith("gap"))
    ]
    floor: list[str] = []
    if reference:
        floors: Any = table[["gap_mean_floor", "gap_sd_floor"]].dropna()
        if len(floors):
            sources = {"gap_mean": "gap_mean_floor", "gap_sd_ratio": "gap_sd_floor"}
            floor = [
                number(float(floors[sources[column.source]].iloc[0]), 2) if column.source in sources else ""
                for column in fidelity
            ]
    rows = comparison.data.get("test_rows", len(comparison.test_targets))
    return [
        _sheet(comparison, f"How well it predicts {rows} test rows", predicted, marks, notes),
        _sheet(
            comparison,
            f"How far it is from {reference}, and what it cost" if reference else "Convergence and cost",
            fidelity,
            marks,
            notes,
            floor,
        ),
    ]


def _sheet(
    comparison: Comparison,
    heading: str,
    columns: Sequence[Column],
    marks: Mapping[str, Mapping[str, str]],
    notes: _Notes,
    foot: Sequence[str] = (),
) -> Sheet:
    rows = []
    for name, row in comparison.table.to_dict(orient="index").items():
        name = str(name)
        cells = [
            cell_of(row, column, marks.get(column.source, {}).get(name, ""), notes.of(name, column.source))
            for column in columns
        ]
        rows.append((name, str(row["reference"]), cells))
    return Sheet(
        heading, [(heading_of(column), COLUMNS.get(column.source, "")) for column in columns], rows, foot
    )


def _intervals(findings: Findings) -> Sheet | None:
    """Coverage and width of central intervals, and whether PIT is uniform; None if no method predicts numbers."""
    frame = findings.intervals
    if not len(frame):
        return None
    columns = []
    for level in LEVELS:
        percent = f"{100 * level:.0f}"
        columns += [
            (
                Column(f"{percent} % cover", f"coverage_{percent}", 2),
                f"share of test targets in the central {percent} % interval",
            ),
            (
                Column(f"{percent} % width", f"width_{percent}", -3),
                f"mean width of the central {percent} % interval; units of y",
            ),
        ]
    columns += [
        (
            Column("PIT off by", "pit_distance", 2),
            "largest distance between the share of PIT values up to u, and u",
        ),
        (Column("p value", "pit_p", 3), "of that distance, by a Kolmogorov-Smirnov test"),
    ]
    rows = []
    for row in frame.to_dict(orient="records"):
        cells = [cell_of(row, column) for column, _ in columns]
        if row["pit_p"] < 0.001:
            cells[-1] = Cell("< 0.001", cells[-1].order)
        rows.append((str(row["method"]), "", cells))
    return Sheet(
        "Central intervals, and PIT against uniform",
        [(heading_of(column), said) for column, said in columns],
        rows,
        below="Cover: the share of test targets inside; width: the mean, in units of the target. PIT off by: the "
        "largest distance of its distribution from the uniform one. The p value takes rows as independent, which "
        "those that one fit has predicted are not: it is small too often.",
    )


def _whole_table(comparison: Comparison, notes: _Notes) -> dict[str, Any]:
    """All columns: one line for each column, one column for each method."""
    names = [str(name) for name in comparison.table.index]
    lines = []
    for column in comparison.table.columns:
        cells = []
        for name in names:
            value = comparison.table.loc[name, column]
            text = value if isinstance(value, str) else "" if math.isnan(value) else minus(f"{value:.4g}")
            cells.append(Cell(text or "–", notes=notes.of(name, str(column))))
        lines.append((str(column), cells))
    return {"names": names, "lines": lines}


# --- origin -----------------------------------------------------------------------------------------------


def _title(comparison: Comparison) -> str:
    what = comparison.data.get("name") or comparison.data.get("target_name", "y")
    if comparison.data.get("model"):
        return f"{comparison.data['model']} on {what}"
    names = [str(name) for name in comparison.table.index]
    if len(names) > 4:
        return f"{what}: {len(names)} methods compared"
    return f"{what}: {', '.join(names)} compared" if len(names) > 1 else f"{what}: {''.join(names)}"


def _subtitle(comparison: Comparison) -> str:
    data = comparison.data
    rows = f"{data.get('train_rows', '?')} training rows and {data.get('test_rows', '?')} test rows"
    return f"{comparison.task.capitalize()} of {data.get('target_name', 'y')}, {rows}"


def _fits(comparison: Comparison) -> list[dict[str, Any]]:
    """How each posterior was fitted: device, seed, settings, figures and warnings."""
    found = []
    for name, fit in comparison.fits.items():
        info, diagnosis = fit.info, comparison.diagnoses.get(name)
        found.append(
            {
                "name": name,
                "made": [
                    ("method", info.method),
                    ("system", info.ppl),
                    ("draws", " x ".join(map(str, fit.shape))),
                    ("seed", str(info.seed)),
                    ("type", info.dtype),
                    ("device", info.device),
                ],
                "settings": [(key, in_words(value)) for key, value in info.settings.items()],
                "figures": [(key, f"{value:.6g}") for key, value in info.figures.items()],
                "verdict": "" if diagnosis is None else diagnosis.verdict,
                "reasons": [] if diagnosis is None else list(diagnosis.reasons),
                "advice": [] if diagnosis is None else list(diagnosis.advice),
            }
        )
    return found


def _versions(comparison: Comparison) -> list[tuple[str, str]]:
    """Package -> version; all of them if fits differ because they were made at different times."""
    found: dict[str, dict[str, None]] = {}
    for fit in comparison.fits.values():
        for package, version in fit.info.versions.items():
            found.setdefault(package, {})[version] = None
    return [(package, ", ".join(versions)) for package, versions in found.items()]
