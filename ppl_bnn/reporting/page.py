"""A comparison, or the result of a grid, as one self-contained page: a verdict in words, tables, pictures, origins."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.files import write_whole
from ppl_bnn.core.notebook.html import in_words
from ppl_bnn.evaluation.comparison.columns import Column, noise_floors, number, of_grid, tables
from ppl_bnn.evaluation.comparison.comparison import Comparison, short_cell
from ppl_bnn.evaluation.comparison.summary import duration, lags_of, listed
from ppl_bnn.evaluation.comparison.table import COLUMNS
from ppl_bnn.evaluation.grid import cell as cells
from ppl_bnn.evaluation.grid.result import LARGER_IS_BETTER, GridResult
from ppl_bnn.prediction.reliability import LEVELS
from ppl_bnn.references.grade import Grade
from ppl_bnn.reporting import html
from ppl_bnn.reporting.figures.panels import Picture
from ppl_bnn.reporting.figures.pictures import GRID_PICTURES, PICTURES
from ppl_bnn.reporting.findings import Findings, comparison_verdict
from ppl_bnn.reporting.grade_page import GRADE_PICTURES, content_of_grade
from ppl_bnn.reporting.grid_findings import GridBlock, GridFindings, grid_verdict
from ppl_bnn.reporting.html import Sheet, TableCell, data_card, download, minus
from ppl_bnn.reporting.verdict import standing

Pairs = list[tuple[str, str]]
# (method, column) -> numbers of the notes to this cell.
Notes = Mapping[tuple[str, str], tuple[int, ...]]

MEANINGS = {
    "splits": "number of splits with a result",
    "cells": "number of cells with a result",
    "failures": "number of failed cells",
    "converged": "share of the cells of chains that converged",
    # Standard errors first, because in a single comparison they are over test rows.
    "_to_reference_se": "standard error of that mean",
    "_to_best_se": "standard error of that mean",
    "_to_reference": "mean over splits of the paired differences to the reference: this method minus the reference",
    "_to_best": "mean over splits of the paired differences to the best method: this method minus the best",
    "_se": "standard error over splits, corrected for the training rows that splits share",
}
# What not every page has.
PARTS = {"why_title": "Why", "problems": True, "not_fitted": "", "explained": "", "whole": None}
PARTS |= {"intervals": None, "notes": [], "gaps": None}
# Largest number of rows of a list on a page; the file of all cells has the rest.
MOST_LISTED = 100


def report(
    result: Comparison | GridResult | Grade,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    numbers: bool = False,
) -> Path:
    """Write a comparison, the result of a grid, or a grade as one self-contained HTML file.

    The page has a verdict in words; tables, which mark a value only if it differs from the others by twice the standard
    error; pictures; data, settings and versions; and for a grid failures and missing cells.

    Parameters
    ----------
    result : Comparison, GridResult or Grade
        What to report.
    path : str or PathLike
        A file whose name ends in .html; its folder is made if needed. The file appears whole or not at all.
    title : str, optional
        The heading. Default: the target and the methods, or the models and the data.
    numbers : bool
        Whether to write all numbers beside the page, too: `<stem>.csv` for the table, `<stem>-<picture>.csv` for each
        picture.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    InputError
        Another type of result, a path that cannot be written, or `numbers` of another type. Raised before anything is
        drawn.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> reference = bnn.references.load("regression_mlp-curve")
    >>> grade = reference.grade(mean=reference.mean, sd=reference.sd)
    >>> bnn.report(grade, "grade.html").name
    'grade.html'
    """
    known = isinstance(result, Comparison | GridResult | Grade)
    got, advice = (
        type(result).__name__,
        "the result of bnn.compare(...), of a grid's run(...) or of grade(...)",
    )
    InputError.check(known, "report", "a Comparison, a GridResult or a Grade", got, advice)
    InputError.check(isinstance(numbers, bool), "numbers", "True or False", repr(numbers), "numbers=True")
    target = html.checked_path(path)
    found = _findings(result)
    pictures = _pictures(found)
    content = page(found, title=title, pictures=pictures).encode()
    write_whole(target, lambda path: path.write_bytes(content))
    if numbers:
        html.write_numbers(target, all_numbers(found, pictures))
    return target


# What a page is made from.
Found = Findings | GridFindings | Grade


def _findings(result: Comparison | GridResult | Found) -> Found:
    if isinstance(result, Comparison):
        return Findings(result)
    return GridFindings(result) if isinstance(result, GridResult) else result


def _pictures(found: Found) -> dict[str, Picture]:
    """All pictures by their keys. One that cannot be drawn holds the reason, and the others are still drawn."""
    functions: Any = {Findings: PICTURES, GridFindings: GRID_PICTURES, Grade: GRADE_PICTURES}[type(found)]
    called = {key: key.replace("_", " ").capitalize() for key in functions}
    return {key: html.or_why_not(partial(functions[key], found), title) for key, title in called.items()}


def all_numbers(result: Any, pictures: Mapping[str, Picture] | None = None) -> dict[str, pd.DataFrame]:
    """Everything that a report shows, as tables: "table", one for each picture, and further ones.

    For a comparison "rows" has the scores of test rows, "intervals" coverage, width and PIT; for a grid "cells" has
    all.
    """
    found = _findings(result)
    frames = {"table": found.table.reset_index()}
    if isinstance(found, Findings):
        frames["rows"] = _rows(found)
    elif isinstance(found, GridFindings):
        frames["cells"] = found.result.cells
    if isinstance(found, Findings) and len(found.intervals):
        frames["intervals"] = found.intervals
    drawn = _pictures(found) if pictures is None else pictures
    return frames | {key: picture.numbers for key, picture in drawn.items() if len(picture.numbers)}


def _rows(found: Findings) -> pd.DataFrame:
    # By row, rmse is a squared error, and scores of which smaller is better get their original sign back.
    called = {"log_score": ("log_score", 1.0), "accuracy": ("correct", 1.0), "rmse": ("squared_error", -1.0)}
    frames = []
    for name in found.names:
        scores = {column: values[name] for column, values in found.row_scores.items() if name in values}
        renamed = {called.get(column, (column, -1.0)): values for column, values in scores.items()}
        columns = {column: sign * values for (column, sign), values in renamed.items()}
        frames.append(pd.DataFrame({"method": name, "row": range(len(scores["log_score"])), **columns}))
    return pd.concat(frames or [pd.DataFrame()])


def page(result: Any, *, title: str | None = None, pictures: Mapping[str, Picture] | None = None) -> str:
    """The page of a comparison, of the result of a grid or of a grade as text (see `report`)."""
    found = _findings(result)
    if isinstance(found, Findings):
        content = _of_comparison(found)
    else:
        content = _of_grid(found) if isinstance(found, GridFindings) else content_of_grade(found)
    content["title"] = title or content["title"]
    drawn = _pictures(found) if pictures is None else pictures
    content["pictures"] = [html.shown(key, picture) for key, picture in drawn.items()]
    return html.rendered("page.html", PARTS | content)


# --- a comparison -----------------------------------------------------------------------------------------


def _of_comparison(found: Findings) -> dict[str, Any]:
    comparison, table = found.comparison, found.table
    # (method, note) -> the columns that it is about, in the order in which the tables refer to them.
    told: dict[tuple[str, str], list[str]] = {}
    sheets = [[column.source for column in columns] for columns in tables(comparison).values()]
    sources = (*sheets, table.columns)
    places = ((name, column) for sheet in sources for name in table.index for column in sheet)
    for name, column in dict.fromkeys(places):
        if text := comparison.notes.get((name, column)):
            told.setdefault((name, text), []).append(column)
    numbered = enumerate(told.items(), start=1)
    numbers = {(name, column): (note,) for note, ((name, _), columns) in numbered for column in columns}
    data = comparison.data
    rows = f"{data.get('train_rows', '?')} training rows and {data.get('test_rows', '?')} test rows"
    return {
        "title": _title_of_comparison(comparison),
        "subtitle": f"{comparison.task.capitalize()} of {data.get('target_name', 'y')}, {rows}",
        "verdict": comparison_verdict(found),
        "not_fitted": listed(list(comparison.missing)),
        "marked": "Only means over test rows, and leave-one-out if it is reliable for every method, are marked.",
        "tables": _tables_of_comparison(found, numbers),
        "downloads": [("comparison.csv", download(table.reset_index()), "All columns as CSV")],
        "whole": _whole_table(table, numbers),
        "glossary": [(name, COLUMNS[name]) for name in table.columns if name in COLUMNS],
        "intervals": _intervals(found),
        "notes": list(told.items()),
        "origin": [
            ("Data", data_card(data), []),
            ("Fits", [], [_fit(comparison, name) for name in comparison.fits]),
            ("Versions", _versions(fit.info.versions for fit in comparison.fits.values()), []),
        ],
    }


def _title_of_comparison(comparison: Comparison) -> str:
    what = comparison.data.get("name") or comparison.data.get("target_name", "y")
    if comparison.data.get("model"):
        return f"{comparison.data['model']} on {what}"
    names = [str(name) for name in comparison.table.index]
    called = ", ".join(names) if len(names) <= 4 else f"{len(names)} methods"
    return f"{what}: {called}{' compared' if len(names) > 1 else ''}"


def _tables_of_comparison(found: Findings, notes: Notes) -> list[Sheet]:
    """The tables of the terminal (`columns.tables`)."""
    marks = {column: found.standing(column) for column in found.row_scores}
    if all(loo.share_above == 0.0 for loo in found.left_out.values()):
        marks["elpd_loo"] = standing(lags_of(found.left_out_rows))
    meaning, reference, sheets = COLUMNS.__getitem__, found.reference, tables(found.comparison)
    return [_sheet(found.table, *sheet, meaning, reference, marks, notes) for sheet in sheets.items()]


def _sheet(
    table: pd.DataFrame,
    heading: str,
    columns: Sequence[Column],
    meaning: Callable[[str], str],
    reference: str | None,
    marks: Mapping[str, Mapping[str, str]],
    notes: Notes,
    below: str = "",
) -> Sheet:
    """The columns of a table that it has, with the noise floors of a reference."""
    columns = [column for column in columns if column.source in table.columns]

    def cell(row: Mapping[Any, Any], name: Any, column: Column) -> TableCell:
        mark = marks.get(column.source, {}).get(name, "")
        return html.cell_of(row, column, mark, notes.get((name, column.source), ()))

    rows = [
        (str(name), str(row.get("reference", "")), [cell(row, name, column) for column in columns])
        for name, row in table.to_dict(orient="index").items()
    ]
    floors = noise_floors(table, reference)
    foot = [minus(number(floors[c.source], 2)) if c.source in floors else "" for c in columns]
    headings = [(column.in_one_line, meaning(column.source)) for column in columns]
    return Sheet(heading, headings, rows, foot if any(foot) else (), below)


def _intervals(found: Findings) -> Sheet | None:
    """Coverage and width of central intervals, and whether PIT is uniform; None if no method predicts numbers."""
    frame = found.intervals
    if not len(frame):
        return None
    columns, meanings = [], {}
    for level in (f"{100 * level:.0f}" for level in LEVELS):
        cover, width = f"coverage_{level}", f"width_{level}"
        columns += [Column(f"{level} % cover", cover), Column(f"{level} % width", width, -3)]
        meanings[f"coverage_{level}"] = "share of test targets in this interval"
        meanings[f"width_{level}"] = "mean width of this interval; units of y"
    columns += [Column("PIT off by", "pit_distance"), Column("p value", "pit_p", 3, least=0.001)]
    meanings["pit_distance"] = "largest distance between the share of PIT values up to u, and u"
    meanings["pit_p"] = "of that distance, by a Kolmogorov-Smirnov test"
    below = (
        "Cover: the share of test targets inside; width: the mean, in units of the target. PIT off by: the largest "
        "distance of its distribution from the uniform one. The p value assumes independent rows; predictions by one "
        "fit are not, so it is too often small."
    )
    table, heading = frame.set_index("method"), "Central intervals, and PIT against uniform"
    return _sheet(table, heading, columns, meanings.__getitem__, None, {}, {}, below)


def _whole_table(table: pd.DataFrame, notes: Notes) -> dict[str, Any]:
    """All columns: one line for each column, one column for each method."""
    lines = []
    for column, values in table.to_dict().items():
        texts = {name: v if isinstance(v, str) else minus(short_cell(v)) for name, v in values.items()}
        cells = [TableCell(text or "–", notes=notes.get((name, column), ())) for name, text in texts.items()]
        lines.append((column, cells))
    return {"names": [str(name) for name in table.index], "lines": lines}


def _fit(comparison: Comparison, name: str) -> dict[str, Any]:
    """How a posterior was fitted: device, seed, diagnosis, settings and figures."""
    fit, diagnosis = comparison.fits[name], comparison.diagnoses.get(name)
    info, draws = fit.info, " x ".join(map(str, fit.shape))
    made = {"method": info.method, "system": info.ppl, "draws": draws, "seed": str(info.seed)}
    made |= {"type": info.dtype, "device": info.device}
    parts: dict[str, Any] = {"": list(made.items())}
    if diagnosis is not None:
        parts |= {"Diagnosis": diagnosis.reasons, "What to try": diagnosis.advice}
        name = f"{name}: {diagnosis.verdict}"
    parts["Settings"] = [(key, in_words(value)) for key, value in info.settings.items()]
    parts["Figures of the fit"] = [(key, f"{value:.6g}") for key, value in info.figures.items()]
    return {"summary": name, "parts": parts}


def _versions(fits: Any) -> Pairs:
    """Package -> version; all of them if fits differ because they were made at different times."""
    found: dict[str, dict[str, None]] = {}
    for versions in fits:
        for package, version in versions.items():
            found.setdefault(package, {})[version] = None
    return [(package, ", ".join(versions)) for package, versions in found.items()]


# --- the result of a grid ---------------------------------------------------------------------------------


def _of_grid(found: GridFindings) -> dict[str, Any]:
    result, table = found.result, found.table
    axes, settings, every = result.axes, result.settings, result.cells
    done, methods = len(every) - result.failures, settings.get("methods", {})
    counts = [("methods", "method"), ("splits", "split"), ("seeds", "seed")]
    sizes = [f"{len(axes[axis])} {one}{'s' if len(axes[axis]) > 1 else ''}" for axis, one in counts]
    subtitle = f"{', '.join(sizes)}: {done} of {result.asked} cells have a result"
    subtitle += f", {result.failures} failed" if result.failures else ""
    subtitle += f", {result.missing} are missing" if result.missing else ""
    models, data = axes["models"], axes["data"]
    models = ", ".join(models) if len(models) <= 3 else f"{len(models)} models"
    data = ", ".join(data) if len(data) <= 3 else f"{len(data)} data sets"
    counted = {"requested": result.asked, "finished": done, "failed": result.failures}
    counted |= {"missing": result.missing, "reference": result.reference}
    counted |= {name: settings[name] for name in ("standardise", "device") if name in settings}
    cards = settings.get("data", {})
    return {
        "title": f"{models} on {data}",
        "subtitle": subtitle,
        "verdict": grid_verdict(found),
        "explained": "Means over splits ± standard errors over splits; seeds are averaged first.",
        "marked": "Only scores are marked.",
        "tables": [_table_of_block(block) for block in found.blocks.values()],
        "downloads": [
            ("table.csv", download(table.reset_index(), exact=True), "All columns of the tables as CSV"),
            ("cells.csv", download(every, exact=True), "All cells as CSV"),
        ],
        "glossary": [(name, _meaning(str(name))) for name in table.columns],
        "gaps": _gaps(result),
        "origin": [
            ("Data", [], [_folded(label, data_card(card), len(cards) == 1) for label, card in cards.items()]),
            ("Axes", [(name, in_words(labels)) for name, labels in axes.items()], []),
            ("Cells", [(name, in_words(value)) for name, value in counted.items()], []),
            ("Methods", [], [_method(name, words) for name, words in methods.items()]),
            ("Models", [(name, _model(words)) for name, words in settings.get("models", {}).items()], []),
            ("Where and when", list(_origins(result)), []),
            ("Versions", _versions(words["versions"] for words in methods.values()), []),
        ],
    }


def _table_of_block(block: GridBlock) -> Sheet:
    columns = of_grid(block.table)
    marks = {c.source: block.standing(c.source) for c in columns if c.source in LARGER_IS_BETTER}
    marks["log_score_to_best"] = {str(block.best("log_score")): html.ITSELF}
    return _sheet(block.table, block.title, columns, _meaning, block.reference, marks, {})


def _meaning(column: str) -> str:
    """Explanation of a column of the table of a grid."""
    for ending, meaning in MEANINGS.items():
        if column.endswith(ending) and column.removesuffix(ending) in LARGER_IS_BETTER:
            return f"{column.removesuffix(ending)}: {meaning}"
    return (COLUMNS | cells.COLUMNS | MEANINGS).get(column, "")


def _gaps(result: GridResult) -> dict[str, Any]:
    """Failed, missing and excluded cells, and the notes to cells, each note once with the number of its cells."""
    every: Any = result.cells
    failed = every[every["failure"] != ""]
    sources = ["method", "model", "data", "split", "seed", "failure"]
    lines = failed[sources].head(MOST_LISTED).astype(str).itertuples(index=False)
    rows = [(method, "", [TableCell(text, text) for text in texts]) for method, *texts in lines]
    headings = [(name, "") for name in ("model", "data", "split", "seed", "reason")]
    sheet = Sheet(f"{len(failed)} of {len(every)} cells failed", headings, rows)
    absent = Counter(f"{cell.model} on {cell.data} by {cell.method}" for cell in result.absent)
    methods = dict(zip(every["key"], every["method"], strict=True))
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for key, notes in result.notes.items():
        for column, text in notes.items():
            found.setdefault((methods.get(key, ""), text), {}).setdefault(column, set()).add(key)
    counted = {note: len(set().union(*columns.values())) for note, columns in found.items()}
    most = sorted(found, key=lambda note: -counted[note])[:MOST_LISTED]
    return {
        "failed": sheet if len(failed) else None,
        "failed_left": max(len(failed) - MOST_LISTED, 0),
        "absent": [f"{where}: {_cells(count)}" for where, count in absent.items()],
        "left_out": list(result.left_out),
        "notes": [f"{n[0]}, {', '.join(found[n])}, {_cells(counted[n])}: {n[1]}" for n in most],
        "notes_left": len(found) - len(most),
    }


def _cells(count: int) -> str:
    return f"{count} cell{'s' if count > 1 else ''}"


def _folded(summary: str, pairs: Pairs, opened: bool = False) -> dict[str, Any]:
    return {"summary": summary, "parts": {"": pairs}, "open": opened}


def _method(name: str, words: Mapping[str, Any]) -> dict[str, Any]:
    fields = [(key, in_words(value)) for key, value in words["fields"].items()]
    return _folded(f"{name}: {words['class'].rpartition('.')[2]}", fields)


def _model(words: Mapping[str, Any]) -> str:
    likelihood = words["likelihood"] or "of its own system"
    return f"arguments: {in_words(words['arguments'])}; likelihood: {likelihood}"


def _origins(result: GridResult) -> Iterator[tuple[str, str]]:
    """Hosts, devices, dates and computing time."""
    every: Any = result.cells
    hosts = Counter(str(process).rpartition(":")[0] for process in every["process"] if process)
    devices = Counter(device for device in every["device"] if device)
    for what, count in (("hosts", hosts), ("devices", devices)):
        if count:
            yield what, ", ".join(f"{name} ({number} cells)" for name, number in count.most_common())
    begun, seconds, memory = (every[column].dropna() for column in ("begun", "seconds", "peak_memory"))
    if len(begun):
        for what, at in (("first", begun.min()), ("last", begun.max())):
            yield f"{what} cell begun", f"{datetime.fromtimestamp(float(at), UTC):%Y-%m-%d %H:%M} UTC"
    if len(seconds):
        total = float(seconds.sum())
        yield "total wall time of all cells", duration(total)
    if len(memory):
        yield "largest memory of a process", f"{float(memory.max()):.0f} MB"
