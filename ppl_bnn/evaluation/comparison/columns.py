"""Columns of the tables of a comparison, and numbers as text, for the terminal, the page and notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppl_bnn.core.notebook.html import Listing

if TYPE_CHECKING:
    import pandas as pd

    from ppl_bnn.evaluation.comparison.comparison import Comparison


@dataclass(frozen=True)
class Column:
    """A column as shown; negative `digits` are significant ones; `spare` ones are left out where space is short.

    Of numbers below `least` only that is shown.
    """

    heading: str
    source: str
    digits: int = 2
    error: str = ""
    spare: bool = False
    least: float = -math.inf

    @property
    def in_one_line(self) -> str:
        """The heading without the hyphens that a narrow terminal needs."""
        return self.heading.replace("-\n", "").replace("\n", " ")


# Columns of the scores of a comparison or a grid, as far as its table has them.
PREDICTION = (
    Column("log score\n↑", "log_score", 3, "log_score_se"),
    Column("minus\nthe best", "log_score_to_best", 3, "log_score_to_best_se"),
    Column("RMSE\n↓", "rmse", -3, "rmse_se"),
    Column("accuracy\n↑", "accuracy", 3, "accuracy_se"),
    Column("concordance\n↑", "concordance", 3, "concordance_se", spare=True),
    Column("CRPS\n↓", "crps", -3, "crps_se", spare=True),
    Column("Brier\n↓", "brier", 3, "brier_se", spare=True),
    Column("90 %\ncover", "coverage_90", 2, spare=True),
    Column("90 %\nwidth", "width_90", -3, spare=True),
    Column("ECE\n↓", "ece", 3, "ece_se", spare=True),
    Column("LOO ELPD\n↑", "elpd_loo", 1, "elpd_loo_se"),
    Column("LOO\nmax k", "pareto_k_loo", 2, spare=True),
    Column("LOO\nrank", "loo_rank", 0, spare=True),
    Column("stack\nweight", "loo_weight", 2, spare=True),
)
FIDELITY = (
    Column("mean off\nby (sd)", "gap_mean", 2),
    Column("sd\nratio", "gap_sd_ratio", 2),
    Column("con-\nverged", "converged", 2, spare=True),
    Column("R-hat\nmax", "r_hat", 3),
    Column("ESS\nmin", "ess_min", 0),
    Column("k-hat", "k_hat", 2),
    Column("compile\n(s)", "compile_seconds", 1, spare=True),
    Column("run\n(s)", "run_seconds", 1),
    Column("predict\n(s)", "predict_seconds", 1, spare=True),
    Column("gradients", "gradient_evaluations", 0, spare=True),
    Column("memory\n(MB)", "peak_memory", 0, spare=True),
)

# Columns of the table of a grid; `GridResult.table` has more.
_NOT_OF_GRID = ("width_90", "elpd_loo", "pareto_k_loo", "loo_rank", "loo_weight", "r_hat", "ess_min", "k_hat")
_NOT_OF_GRID += ("compile_seconds", "predict_seconds", "peak_memory")
GRID = (
    Column("splits", "splits", 0),
    *(column for column in (*PREDICTION, *FIDELITY) if column.source not in _NOT_OF_GRID),
    Column("failed", "failures", 0),
)


def of_grid(table: pd.DataFrame) -> list[Column]:
    """The columns of a block of the table of a grid that have values."""
    known = set(table.dropna(axis="columns", how="all").columns)
    return [column for column in GRID if column.source in known]


def tables(comparison: Comparison) -> dict[str, Sequence[Column]]:
    """Title -> columns of two tables: how well each method predicts, then its distance to the reference and cost."""
    rows = comparison.data.get("test_rows", len(comparison.test_targets))
    fidelity, far = FIDELITY, f"How far it is from {comparison.reference}"
    if comparison.reference not in comparison.predictions:
        fidelity, far = [column for column in FIDELITY if not column.source.startswith("gap")], "Convergence"
    return {
        f"How well it predicts {rows} test rows": [c for c in PREDICTION if c.source in comparison.table],
        f"{far}, and what it cost": fidelity,
    }


def noise_floors(table: pd.DataFrame, reference: str | None) -> dict[str, float]:
    """Column of a gap -> its noise floor, which the reference or another row has; empty without a reference."""
    sources = {"gap_mean": "gap_mean_floor", "gap_sd_ratio": "gap_sd_floor"}
    floors: Any = table.reindex(columns=list(sources.values())).dropna()
    if reference not in table.index or not len(floors):
        return {}
    row = floors.loc[reference] if reference in floors.index else floors.iloc[0]
    return {column: float(row[source]) for column, source in sources.items()}


def listing(
    table: pd.DataFrame, heading: str, columns: Sequence[Column], reference: str | None = None
) -> Listing:
    """A table of methods for a notebook. Gaps to a `reference` have a row with their noise floors."""
    rows, alarms = [], set()
    for place, (name, row) in enumerate(table.to_dict(orient="index").items()):
        rows.append([str(name), *(cell(row, column) for column in columns)])
        alarms |= {(place, at) for at, column in enumerate(columns, start=1) if is_alarm(row, column)}
    if floors := noise_floors(table, reference):
        foot = [number(floors[c.source], 2) if c.source in floors else "" for c in columns]
        rows += [["noise floor", *foot]] if any(foot) else []
    headings = ["method", *(column.in_one_line for column in columns)]
    words = 2 if columns and columns[0].source == "ppl" else 1
    return Listing(heading, headings, rows, frozenset(alarms), words)


def cell(row: Mapping[Any, Any], column: Column) -> str:
    """One cell of the table as text: "-" for a blank, or for a column that the table does not have."""
    value = row.get(column.source, math.nan)
    if isinstance(value, str):
        return value or "-"
    return "-" if math.isnan(value) else in_digits(row, column)


def is_alarm(row: Mapping[Any, Any], column: Column) -> bool:
    """Whether a cell says that a fit has not converged, or that cells have failed."""
    value = row.get(column.source, math.nan)
    if isinstance(value, str):
        return column.source == "converged" and value not in ("", "yes")
    return (column.source == "failures" and value > 0) or (column.source == "converged" and value < 1.0)


def in_digits(row: Mapping[Any, Any], column: Column) -> str:
    """A number of the table with its standard error, as text."""
    if row[column.source] < column.least:
        return f"< {column.least:g}"
    error = float(row.get(column.error, math.nan))
    text = number(row[column.source], column.digits)
    return text if math.isnan(error) else f"{text} ± {number(error, column.digits)}"


def number(value: float, digits: int) -> str:
    """A number as text; digits: after the point, or significant digits if negative."""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if digits < 0:
        digits = max(0, -digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{digits}f}" if digits == 0 else f"{value:.{digits}f}"
    return text.replace(",", " ")
