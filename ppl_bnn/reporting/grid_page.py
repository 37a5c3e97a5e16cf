"""The result of a grid as one self-contained page.

It has verdicts in words, a table for each model and data set, pictures, failures and missing cells, and the origin of
the numbers. `reporting.page.report` writes it, from the parts in `reporting.html`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppl_bnn.core.files import write_whole
from ppl_bnn.evaluation.comparison.panels import Picture
from ppl_bnn.evaluation.comparison.summary import duration
from ppl_bnn.evaluation.comparison.table import COLUMNS
from ppl_bnn.evaluation.grid import cell as cells
from ppl_bnn.evaluation.grid.result import LARGER_IS_BETTER, GridResult
from ppl_bnn.reporting.grid_figures import PICTURES
from ppl_bnn.reporting.grid_verdict import GridFindings, Pair, grid_verdict
from ppl_bnn.reporting.html import (
    Cell,
    Sheet,
    cell_of,
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
from ppl_bnn.reporting.terminal import Column, number

if TYPE_CHECKING:
    import pandas as pd

# Columns of a table, if they have values; `GridResult.table` has more.
SHOWN = (
    Column("splits", "splits", 0),
    Column("log score ↑", "log_score", 3, "log_score_se"),
    Column("minus the best", "log_score_to_best", 3, "log_score_to_best_se"),
    Column("RMSE ↓", "rmse", -3, "rmse_se"),
    Column("accuracy ↑", "accuracy", 3, "accuracy_se"),
    Column("concordance ↑", "concordance", 3, "concordance_se"),
    Column("CRPS ↓", "crps", -3, "crps_se"),
    Column("Brier ↓", "brier", 3, "brier_se"),
    Column("90 % cover", "coverage_90", 2),
    Column("ECE ↓", "ece", 3, "ece_se"),
    Column("mean off by (sd)", "gap_mean", 2),
    Column("sd ratio", "gap_sd_ratio", 2),
    Column("converged", "converged", 2),
    Column("run (s)", "run_seconds", 1),
    Column("gradients", "gradient_evaluations", 0),
    Column("failed", "failures", 0),
)
_FLOORS = {"gap_mean": "gap_mean_floor", "gap_sd_ratio": "gap_sd_floor"}
MEANINGS = {
    "splits": "how many splits have a result",
    "cells": "how many cells have a result",
    "failures": "how many cells have failed",
    "converged": "share of the cells of chains that had converged",
    "_se": "standard error over splits, corrected for the training rows that splits share",
    "_to_best": "mean over splits of the paired differences to the best method: what this one has more",
    "_to_best_se": "standard error of that mean",
    "_to_reference": "mean over splits of the paired differences to the reference: what this one has more",
    "_to_reference_se": "standard error of that mean",
}
# Largest number of rows of a list on a page; the file of all cells has the rest.
MOST_LISTED = 100


def write(result: GridResult, target: Path, title: str | None, numbers: str | None) -> None:
    """Write the page of a result, and with `numbers` its numbers as files beside it (see `reporting.page.report`).

    Parameters
    ----------
    result : GridResult
        The result of a grid.
    target : Path
        The file of the page.
    title : str or None
        The heading.
    numbers : {"csv", "parquet", None}
        Format of the numbers.
    """
    findings = GridFindings(result)
    pictures = pictures_of(PICTURES, findings)
    content = page(result, title=title, pictures=pictures, findings=findings).encode()
    write_whole(target, lambda path: path.write_bytes(content))
    if numbers is not None:
        write_numbers(target, all_numbers(result, pictures), numbers)


def all_numbers(result: GridResult, pictures: Sequence[Picture] | None = None) -> dict[str, pd.DataFrame]:
    """Everything that a report shows, as tables: "table", "cells" and one for each picture.

    Parameters
    ----------
    result : GridResult
        The result of a grid.
    pictures : sequence of Picture, optional
        The pictures, if they have been made already.

    Returns
    -------
    dict of str to pd.DataFrame
    """
    pictures = pictures_of(PICTURES, GridFindings(result)) if pictures is None else pictures
    found = {"table": result.table().reset_index(), "cells": result.cells}
    for picture in pictures:
        if picture.numbers is not None and len(picture.numbers):
            found[picture.key] = picture.numbers
    return found


def page(
    result: GridResult,
    *,
    title: str | None = None,
    pictures: Sequence[Picture] | None = None,
    findings: GridFindings | None = None,
) -> str:
    """The page of the result of a grid as text (see `reporting.page.report`).

    Parameters
    ----------
    result : GridResult
        The result of a grid.
    title : str, optional
        The heading.
    pictures : sequence of Picture, optional
        The pictures, if they have been made already.
    findings : GridFindings, optional
        The findings, if they have been made already.

    Returns
    -------
    str
    """
    findings = GridFindings(result) if findings is None else findings
    pictures = pictures_of(PICTURES, findings) if pictures is None else pictures
    failed, not_listed = _failed(result)
    notes, notes_left = _notes(result)
    return rendered(
        "grid_page.html",
        title=title or _title(result),
        subtitle=_subtitle(result),
        verdict=grid_verdict(findings),
        several=len(findings.blocks) > 1,
        tables=[_sheet(findings, pair) for pair in findings.blocks],
        glossary=[(name, _meaning(str(name))) for name in findings.table.columns],
        pictures=[shown(picture) for picture in pictures],
        table_download=download(findings.table.reset_index(), exact=True) if len(findings.table) else "",
        cells_download=download(result.cells, exact=True) if len(result.cells) else "",
        failed=failed,
        not_listed=not_listed,
        absent=_absent(result),
        left_out=list(result.left_out),
        notes=notes,
        notes_left=notes_left,
        axes=[(name, in_words(labels)) for name, labels in result.axes.items()],
        asked=_asked(result),
        data=[(label, data_card(card)) for label, card in result.settings.get("data", {}).items()],
        methods=_methods(result),
        models=_models(result),
        versions=_versions(result),
        origin=_origin(result),
    )


# --- the tables -------------------------------------------------------------------------------------------


def _sheet(findings: GridFindings, pair: Pair) -> Sheet:
    """The table of one model on one data set. The best method has no difference to itself; its cell says so."""
    block = findings.blocks[pair]
    columns = [column for column in SHOWN if column.source in block and block[column.source].notna().any()]
    marks = {
        column.source: findings.standing(pair, column.source)
        for column in columns
        if column.source in LARGER_IS_BETTER
    }
    best = findings.best(pair, "log_score")
    rows = []
    for name, row in block.to_dict(orient="index").items():
        name = str(name)
        made = [_cell(row, column, marks.get(column.source, {}).get(name, "")) for column in columns]
        if name == best:
            made = [
                Cell("best", "0") if column.source == "log_score_to_best" else cell
                for column, cell in zip(columns, made, strict=True)
            ]
        rows.append((name, str(row["reference"]), made))
    reference, foot = findings.result.reference, []
    if reference in block.index and any(column.source in _FLOORS for column in columns):
        ours = block.loc[reference]
        foot = [
            ""
            if column.source not in _FLOORS
            or math.isnan(value := float(ours.get(_FLOORS[column.source], math.nan)))
            else minus(number(value, column.digits))
            for column in columns
        ]
    return Sheet(
        findings.name(pair),
        [(heading_of(column), _meaning(column.source)) for column in columns],
        rows,
        foot if any(foot) else (),
    )


def _cell(row: Any, column: Column, mark: str) -> Cell:
    cell = cell_of(row, column, mark)
    bad = column.source == "failures" and row[column.source] > 0
    bad = bad or (column.source == "converged" and row[column.source] < 1.0)
    return Cell(cell.text, cell.order, cell.mark, cell.notes, alarm=True) if bad else cell


def _meaning(column: str) -> str:
    """Explanation of a column of the table."""
    # Standard errors first, because in a single comparison they are over test rows.
    for ending in ("_to_reference_se", "_to_best_se", "_to_reference", "_to_best", "_se"):
        if column.removesuffix(ending) in LARGER_IS_BETTER and column.endswith(ending):
            return f"{column.removesuffix(ending)}: {MEANINGS[ending]}"
    return (COLUMNS | cells.COLUMNS | MEANINGS).get(column, "")


# --- failures and missing cells ---------------------------------------------------------------------------


def _failed(result: GridResult) -> tuple[Sheet | None, int]:
    """The cells that failed, each with its reason, and the number of those beyond the limit of the list."""
    every: Any = result.cells
    failed = every[every["failure"] != ""]
    if not len(failed):
        return None, 0
    columns = ("model", "data", "split", "seed", "reason")
    rows = [
        (
            str(row["method"]),
            "",
            [
                *(Cell(str(row[name]), str(row[name])) for name in columns[:-1]),
                Cell(row["failure"], row["failure"]),
            ],
        )
        for _, row in failed.head(MOST_LISTED).iterrows()
    ]
    heading = f"{len(failed)} of {len(every)} cells failed"
    return Sheet(heading, [(name, "") for name in columns], rows), max(len(failed) - MOST_LISTED, 0)


def _absent(result: GridResult) -> list[str]:
    """Cells that have not been computed, by model, data and method."""
    count = Counter((cell.model, cell.data, cell.method) for cell in result.absent)
    return [
        f"{model} on {data} by {method}: {n} cell{'s' if n > 1 else ''}"
        for (model, data, method), n in count.items()
    ]


def _notes(result: GridResult) -> tuple[list[str], int]:
    """The notes of cells, each sentence once with the number of its cells, and how many sentences are left out."""
    every: Any = result.cells
    methods = dict(zip(every["key"], every["method"], strict=True))
    count: Counter[tuple[str, str]] = Counter()
    columns: dict[tuple[str, str], dict[str, None]] = {}
    for key, said in result.notes.items():
        for text in dict.fromkeys(said.values()):
            found = (methods.get(key, ""), text)
            count[found] += 1
            columns.setdefault(found, {}).update(
                dict.fromkeys(column for column, other in said.items() if other == text)
            )
    listed = [
        f"{method}, {', '.join(columns[method, text])}, {n} cell{'s' if n > 1 else ''}: {text}"
        for (method, text), n in count.most_common(MOST_LISTED)
    ]
    return listed, len(count) - len(listed)


# --- origin -----------------------------------------------------------------------------------------------


def _title(result: GridResult) -> str:
    def some(labels: Sequence[str], many: str) -> str:
        return ", ".join(labels) if len(labels) <= 3 else f"{len(labels)} {many}"

    axes = result.axes
    return f"{some(axes['models'], 'models')} on {some(axes['data'], 'data sets')}"


def _subtitle(result: GridResult) -> str:
    axes = result.axes
    parts = [
        f"{len(axes['methods'])} method{'s' if len(axes['methods']) > 1 else ''}",
        f"{len(axes['splits'])} split{'s' if len(axes['splits']) > 1 else ''}",
        f"{len(axes['seeds'])} seed{'s' if len(axes['seeds']) > 1 else ''}",
    ]
    done = len(result.cells) - result.failures
    text = f"{', '.join(parts)}: {done} of {result.asked} cells have a result"
    if result.failures:
        text += f", {result.failures} failed"
    return text + (f", {result.missing} are missing" if result.missing else "")


def _asked(result: GridResult) -> list[tuple[str, str]]:
    found = [("cells asked for", str(result.asked)), ("finished", str(len(result.cells) - result.failures))]
    found += [("failed", str(result.failures)), ("missing", str(result.missing))]
    found.append(("reference", result.reference or "none"))
    for name in ("standardise", "device"):
        if name in result.settings:
            found.append((name, in_words(result.settings[name])))
    return found


def _methods(result: GridResult) -> list[dict[str, Any]]:
    """Class and fields of each method, as its cells were computed."""
    return [
        {
            "name": name,
            "what": words["class"].rpartition(".")[2],
            "fields": [(key, in_words(value)) for key, value in words["fields"].items()],
        }
        for name, words in result.settings.get("methods", {}).items()
    ]


def _models(result: GridResult) -> list[tuple[str, str]]:
    """The bound arguments and the likelihood."""
    return [
        (
            name,
            f"arguments: {in_words(words['arguments'])}; likelihood: {words['likelihood'] or 'of its own system'}",
        )
        for name, words in result.settings.get("models", {}).items()
    ]


def _versions(result: GridResult) -> list[tuple[str, str]]:
    found: dict[str, dict[str, None]] = {}
    for words in result.settings.get("methods", {}).values():
        for package, version in words["versions"].items():
            found.setdefault(package, {})[version] = None
    return [(package, ", ".join(versions)) for package, versions in found.items()]


def _origin(result: GridResult) -> list[tuple[str, str]]:
    """Hosts, devices, dates and computing time."""
    return list(_origins(result))


def _origins(result: GridResult) -> Iterator[tuple[str, str]]:
    every: Any = result.cells
    hosts = Counter(str(process).rpartition(":")[0] for process in every["process"] if process)
    if hosts:
        yield "hosts", ", ".join(f"{host} ({count} cells)" for host, count in hosts.most_common())
    devices = Counter(device for device in every["device"] if device)
    if devices:
        yield "devices", ", ".join(f"{device} ({count} cells)" for device, count in devices.most_common())
    begun = every["begun"].dropna()
    if len(begun):
        first, last = (datetime.fromtimestamp(float(at), UTC) for at in (begun.min(), begun.max()))
        yield "first cell begun", f"{first:%Y-%m-%d %H:%M} UTC"
        yield "last cell begun", f"{last:%Y-%m-%d %H:%M} UTC"
    seconds = every["seconds"].dropna()
    if len(seconds):
        yield "wall time of all cells, added up", _long(float(seconds.sum()))
    memory = every["peak_memory"].dropna()
    if len(memory):
        yield "largest memory of a process", f"{float(memory.max()):.0f} MB"


def _long(seconds: float) -> str:
    return duration(seconds) if seconds < 7200.0 else f"{seconds / 3600.0:.1f} h"
