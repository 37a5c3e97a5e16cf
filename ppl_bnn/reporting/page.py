"""A comparison as one self-contained page: a verdict in words, the table, pictures, and where it all comes from.

Everything is in the file: pictures as SVG that takes its colours from the page (so that one picture serves a light
screen, a dark one and paper), numbers as downloads made of the file itself, some forty lines of script for sorting and
for the theme. A content security policy forbids the page to ask for anything else.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppl_bnn.comparison import COLUMNS, Comparison
from ppl_bnn.errors import InputError, UnsupportedError, message
from ppl_bnn.reporting.comparison_figures import (
    INK,
    PICTURES,
    WIDTH,
    Findings,
    Panel,
    Picture,
    legend_entries,
    new_figure,
)
from ppl_bnn.reporting.figures import BLUE, CLASS_COLOURS, GREY, ORANGE, SKY, VERMILION
from ppl_bnn.reporting.terminal import FIDELITY, PREDICTION, Column, number
from ppl_bnn.reporting.verdict import standing, verdict

if TYPE_CHECKING:
    import pandas as pd

# What a picture is drawn in -> what the page calls it: one picture for light, dark and paper.
THEME = {
    "#000000": "ink",
    "#ebebeb": "grid",
    "#ffffff": "paper",
    BLUE.lower(): "blue",
    SKY.lower(): "sky",
    ORANGE.lower(): "orange",
    VERMILION.lower(): "vermilion",
    GREY.lower(): "grey",
    CLASS_COLOURS[2].lower(): "green",
    CLASS_COLOURS[5].lower(): "pink",
    CLASS_COLOURS[7].lower(): "yellow",
}
DOTS_PER_INCH = 150
# Rows of a table that goes into the page for download; a larger one is for `numbers`.
MOST_ROWS = 4000
FORMATS = ("csv", "parquet")
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ppl_bnn",
    "font.size": 8.5,
    "axes.linewidth": 0.8,
    "xtick.major.width": 0.8,
    "ytick.major.width": 0.8,
    "text.color": INK,
}


def report(
    comparison: Comparison,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    numbers: str | None = None,
) -> Path:
    """Write a comparison as one HTML file that needs no other, and give its path.

    First a verdict in words (`reporting.verdict`), then the table, in which a value is marked only where its difference
    from the others exceeds twice its standard error; then the pictures of `reporting.comparison_figures`, the data, the
    settings and the versions. It is for screens of any width, light or dark, and for paper.

    Parameters
    ----------
    path
        A file whose name ends in .html; its folder is made if need be, and the file appears whole or not at all.
    title
        The heading; default the target and the methods.
    numbers
        "csv" or "parquet": also write all numbers (`all_numbers`) beside the page, the table to `<stem>.csv` and what
        each picture shows to `<stem>-<picture>.csv`. (The page itself carries most of it.)

    Raises
    ------
    InputError: something that is no comparison, a path that cannot be written, an unknown format. UnsupportedError:
    "parquet" where pandas finds nothing to write it with. All before anything is drawn.
    """
    if not isinstance(comparison, Comparison):
        raise InputError(
            "report: " + message("a Comparison", type(comparison).__name__, "the result of bnn.compare(...)")
        )
    target = _checked_path(path)
    _check_format(numbers)
    findings = Findings(comparison)
    pictures = _pictures(findings)
    _write_whole(target, page(comparison, title=title, pictures=pictures, findings=findings).encode())
    if numbers is not None:
        for name, frame in all_numbers(comparison, pictures).items():
            beside = target.with_name(f"{target.stem}{'' if name == 'table' else f'-{name}'}.{numbers}")
            buffer = io.BytesIO()
            if numbers == "csv":
                buffer.write(frame.to_csv(index=False).encode())
            else:
                frame.to_parquet(buffer, index=False)
            _write_whole(beside, buffer.getvalue())
    return target


def all_numbers(comparison: Comparison, pictures: Sequence[Picture] | None = None) -> dict[str, pd.DataFrame]:
    """Everything that a report shows, as tables: "table", "rows" (scores of each test row) and one for each picture."""
    import pandas as pd

    findings = Findings(comparison)
    pictures = _pictures(findings) if pictures is None else pictures
    found = {"table": comparison.table.reset_index()}
    scored = {
        (name, column): values
        for column, by_method in findings.row_scores.items()
        for name, values in by_method.items()
    }
    # Row by row rmse is a squared error, and what is smaller the better has lost the sign that made it larger.
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
    """The page of a comparison as text (see `report`)."""
    import jinja2
    from markupsafe import Markup

    findings = Findings(comparison) if findings is None else findings
    pictures = _pictures(findings) if pictures is None else pictures
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ppl_bnn", "reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    loader = environment.loader
    assert loader is not None
    style, script = (loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    notes = _Notes(comparison)
    tables = _tables(comparison, findings, notes)
    whole = _whole_table(comparison, notes)
    return environment.get_template("page.html").render(
        title=title or _title(comparison),
        subtitle=_subtitle(comparison),
        # Of exactly this text: no other script can run.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(style),
        script=Markup(script),
        verdict=verdict(comparison),
        tables=tables,
        whole=whole,
        notes=notes.listed,
        glossary=[(name, COLUMNS[name]) for name in comparison.table.columns if name in COLUMNS],
        pictures=[_shown(picture) for picture in pictures],
        table_download=_download(comparison.table.reset_index()),
        data=_data_card(comparison),
        fits=_fits(comparison),
        versions=_versions(comparison),
    )


# --- before anything is drawn -----------------------------------------------------------------------------


def _checked_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError(
            "path: " + message("a file name that ends in .html", f"{str(path)!r}", f"{target.stem}.html")
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        probe = target.with_name(f".{target.name}.part")
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(
            "path: "
            + message(
                "a file that can be written",
                f"{target} ({type(error).__name__}: {error.strerror or error})",
                "another folder",
            )
        ) from error
    return target


def _check_format(numbers: str | None) -> None:
    if numbers is not None and numbers not in FORMATS:
        raise InputError("numbers: " + message("None, 'csv' or 'parquet'", repr(numbers), "numbers='csv'"))
    engines = ("pyarrow", "fastparquet")
    if numbers == "parquet" and not any(importlib.util.find_spec(name) for name in engines):
        raise UnsupportedError(
            "numbers: "
            + message(
                "pyarrow or fastparquet, with which pandas writes Parquet",
                "neither",
                "pip install pyarrow, or numbers='csv'",
            )
        )


def _write_whole(path: Path, content: bytes) -> None:
    """Write beside the file and rename: a reader never sees half of it."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# --- the table --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """text: what is shown. order: what is sorted by, "" for a blank. mark: "best", "level" or "". notes: numbers."""

    text: str
    order: str = ""
    mark: str = ""
    notes: tuple[int, ...] = ()
    alarm: bool = False


@dataclass(frozen=True)
class Grid:
    """One table: its heading, (heading, explanation) of each column, rows of a method's name and cells, and a foot."""

    heading: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, str, Sequence[Cell]]]
    foot: Sequence[str] = ()


@dataclass
class _Notes:
    """Notes by number, in the order in which they are first referred to; the same text of one method is one note."""

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


def _tables(comparison: Comparison, findings: Findings, notes: _Notes) -> list[Grid]:
    """What a terminal shows, too: how well each predicts, then how far it is from the reference and what it cost."""
    table = comparison.table
    marks = {column: standing(values) for column, values in findings.row_scores.items()}
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
        _grid(comparison, f"How well it predicts {rows} test rows", predicted, marks, notes),
        _grid(
            comparison,
            f"How far it is from {reference}, and what it cost" if reference else "Convergence and cost",
            fidelity,
            marks,
            notes,
            floor,
        ),
    ]


def _grid(
    comparison: Comparison,
    heading: str,
    columns: Sequence[Column],
    marks: Mapping[str, Mapping[str, str]],
    notes: _Notes,
    foot: Sequence[str] = (),
) -> Grid:
    rows = []
    for name, row in comparison.table.to_dict(orient="index").items():
        name = str(name)
        cells = [
            _cell(row, column, marks.get(column.source, {}).get(name, ""), notes.of(name, column.source))
            for column in columns
        ]
        rows.append((name, str(row["reference"]), cells))
    return Grid(
        heading,
        [(_heading(column), COLUMNS.get(column.source, "")) for column in columns],
        rows,
        foot,
    )


def _heading(column: Column) -> str:
    """The heading in one line, without the hyphens that a narrow terminal needs."""
    return column.heading.replace("-\n", "").replace("\n", " ")


def _cell(row: Mapping[Any, Any], column: Column, mark: str, notes: tuple[int, ...]) -> Cell:
    value = row[column.source]
    if isinstance(value, str):
        return Cell(value or "–", value, mark, notes, alarm=value not in ("", "yes"))
    if math.isnan(value):
        return Cell("–", "", "", notes)
    text = number(value, column.digits)
    error = float(row[column.error]) if column.error else math.nan
    if not math.isnan(error):
        text += f" ± {number(error, column.digits)}"
    return Cell(_minus(text), repr(float(value)), mark, notes)


def _whole_table(comparison: Comparison, notes: _Notes) -> dict[str, Any]:
    """All columns: one line for each, one column for each method."""
    names = [str(name) for name in comparison.table.index]
    lines = []
    for column in comparison.table.columns:
        cells = []
        for name in names:
            value = comparison.table.loc[name, column]
            text = value if isinstance(value, str) else "" if math.isnan(value) else _minus(f"{value:.4g}")
            cells.append(Cell(text or "–", notes=notes.of(name, str(column))))
        lines.append((str(column), cells))
    return {"names": names, "lines": lines}


def _minus(text: str) -> str:
    return text.replace("-", "−")


# --- pictures ---------------------------------------------------------------------------------------------


def _pictures(findings: Findings) -> list[Picture]:
    """All pictures; one that cannot be drawn from this comparison says why, and the others are drawn all the same."""
    made = []
    for key, function in PICTURES.items():
        try:
            made.append(function(findings))
        except Warning:
            # A caller who has turned warnings into errors wants to see them.
            raise
        except Exception as error:
            made.append(_failed(key, key.replace("_", " ").capitalize(), error))
    return made


def _failed(key: str, title: str, error: Exception) -> Picture:
    return Picture(key, title, "", missing=f"This could not be drawn: {type(error).__name__}: {error}")


def _shown(picture: Picture) -> dict[str, Any]:
    from markupsafe import Markup

    panels, entries, drawn = [], {}, []
    try:
        drawn = [_drawn(panel, f"{picture.key}{index}-") for index, panel in enumerate(picture.panels)]
    except Warning:
        raise
    except Exception as error:
        picture = _failed(picture.key, picture.title, error)
    for panel, (drawing, found) in zip(picture.panels, drawn, strict=True):
        panels.append({"title": panel.title, "svg": Markup(drawing), "words": panel.words})
        for label, swatch in found.items():
            entries.setdefault(label, Markup(swatch))
    numbers = picture.numbers
    small = numbers is not None and 0 < len(numbers) <= MOST_ROWS
    return {
        "key": picture.key,
        "title": picture.title,
        "caption": picture.caption,
        "missing": picture.missing,
        "panels": panels,
        "legend": [(label.replace(r"\$", "$"), swatch) for label, swatch in entries.items()],
        "download": _download(numbers) if small and numbers is not None else "",
        "rows": 0 if numbers is None else len(numbers),
    }


def _drawn(panel: Panel, prefix: str) -> tuple[str, dict[str, str]]:
    """A panel as SVG that takes its colours from the page, and label -> SVG of each entry of its legend."""
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Letters that matplotlib's font does not have are drawn by whoever shows the page.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = new_figure(WIDTH, panel.height)
        axes = figure.subplots()
        panel.draw(axes)
        entries = legend_entries([axes])
        axes.set_facecolor("none")
        drawing = _svg(figure, prefix, f'role="img" aria-label="{_attribute(panel.words)}"')
        swatches = {}
        for index, (label, handle) in enumerate(entries.items()):
            small = new_figure(0.36, 0.17)
            small.set_layout_engine("none")
            small.legend([handle], [""], loc="center", frameon=False, borderpad=0.0, handletextpad=0.0,
                         borderaxespad=0.0, handlelength=2.2, numpoints=1, scatterpoints=1)  # fmt: skip
            swatches[label] = _svg(small, f"{prefix}l{index}-", 'aria-hidden="true"')
    return drawing, swatches


def _svg(figure: Any, prefix: str, attributes: str) -> str:
    """A figure as an <svg> element to stand inside a page: no namespaces, ids of its own, colours by name."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, dpi=DOTS_PER_INCH, metadata={"Date": None, "Creator": None}
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    text = re.sub(r"<svg[^>]*>", f"<svg {box.group()} {attributes}>", text, count=1)
    return re.sub(r"<[^>]+>", lambda tag: _themed(tag.group(), prefix), text)


def _themed(tag: str, prefix: str) -> str:
    """One tag: shorter numbers, the page's colours and letters, ids that no other picture has."""
    if tag.startswith("<svg"):
        return tag
    tag = tag.replace("xlink:href", "href")
    tag = re.sub(r'\bid="', f'id="{prefix}', tag)
    tag = re.sub(r"url\(#", f"url(#{prefix}", tag)
    tag = re.sub(r'href="#', f'href="#{prefix}', tag)
    if tag.startswith("<image"):
        return tag
    tag = re.sub(
        r"(?<=[:\s])#[0-9a-f]{6}\b",
        lambda found: f"var(--{THEME[found.group()]})" if found.group() in THEME else found.group(),
        tag,
    )
    # "font: 8px 'DejaVu Sans', ..." or "font-family: 'DejaVu Sans', ...", as the version of matplotlib has it.
    tag = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--letters)", tag)
    return re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found.group()):.2f}", tag)


def _attribute(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))


def _download(frame: pd.DataFrame) -> str:
    """A table as the address of a download that is made of the page itself."""
    content = frame.to_csv(index=False, float_format="%.8g").encode()
    return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(content).decode()}"


# --- where it comes from ----------------------------------------------------------------------------------


def _title(comparison: Comparison) -> str:
    what = comparison.data.get("name") or comparison.data.get("target_name", "y")
    names = [str(name) for name in comparison.table.index]
    if len(names) > 4:
        return f"{what}: {len(names)} methods compared"
    return f"{what}: {', '.join(names)} compared" if len(names) > 1 else f"{what}: {''.join(names)}"


def _subtitle(comparison: Comparison) -> str:
    data = comparison.data
    rows = f"{data.get('train_rows', '?')} training rows and {data.get('test_rows', '?')} test rows"
    return f"{comparison.task.capitalize()} of {data.get('target_name', 'y')}, {rows}"


def _data_card(comparison: Comparison) -> list[tuple[str, str]]:
    """All that is known of the data, the names of people first."""
    words = {"train_hash": "hash of the training rows", "test_hash": "hash of the test rows"}
    return [
        (words.get(key, key.replace("_", " ")), _in_words(value))
        for key, value in comparison.data.items()
        if value is not None
    ]


def _fits(comparison: Comparison) -> list[dict[str, Any]]:
    """How each posterior came about: where, under which seed, its settings, its figures, what it warned of."""
    found = []
    for name, posterior in comparison.posteriors.items():
        info, diagnosis = posterior.info, comparison.diagnoses.get(name)
        found.append(
            {
                "name": name,
                "made": [
                    ("method", info.method),
                    ("system", info.ppl),
                    ("draws", " x ".join(map(str, posterior.shape))),
                    ("seed", str(info.seed)),
                    ("type", info.dtype),
                    ("device", info.device),
                ],
                "settings": [(key, _in_words(value)) for key, value in info.settings.items()],
                "figures": [(key, f"{value:.6g}") for key, value in info.figures.items()],
                "verdict": "" if diagnosis is None else diagnosis.verdict,
                "reasons": [] if diagnosis is None else list(diagnosis.reasons),
                "advice": [] if diagnosis is None else list(diagnosis.advice),
            }
        )
    return found


def _versions(comparison: Comparison) -> list[tuple[str, str]]:
    """Package -> version; where fits differ (they were made at different times) all of them."""
    found: dict[str, dict[str, None]] = {}
    for posterior in comparison.posteriors.values():
        for package, version in posterior.info.versions.items():
            found.setdefault(package, {})[version] = None
    return [(package, ", ".join(versions)) for package, versions in found.items()]


def _in_words(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_in_words(each)}" for key, each in value.items()) or "none"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_in_words(each) for each in value) or "none"
    return str(value)
