"""Parts of HTML pages: tables, pictures as inline SVG, and downloads, all inside one file.

Pictures take their colours from the page, so that one serves a light screen, a dark one and paper. A content security
policy forbids all requests. Templates of this folder: `base.html`, `parts.html` and `page.html`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import pandas as pd
from markupsafe import Markup, escape

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.figures import INK, new_figure
from ppl_bnn.core.files import writable, write_whole
from ppl_bnn.core.names import for_spreadsheet, from_figure
from ppl_bnn.core.notebook.html import in_words
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.evaluation.comparison import drawing
from ppl_bnn.evaluation.comparison.columns import Column, in_digits, is_alarm
from ppl_bnn.reporting.figures.panels import WIDTH, Panel, Picture

# Colour in a picture -> variable of the page: one picture for light, dark and paper.
_COLOURS = ("blue", "orange", "green", "vermilion", "sky", "pink", "grey", "yellow")
THEME = {colour.lower(): name for colour, name in zip(drawing.CLASS_COLOURS, _COLOURS, strict=True)}
THEME |= {"#000000": "ink", "#ebebeb": "grid", "#ffffff": "paper"}
DOTS_PER_INCH = 150
# The mark of the difference of the best method to itself.
ITSELF = "itself"
# Largest number of rows of a table that the page offers for download; larger ones need `numbers`.
MOST_ROWS = 4000
# Largest number of feature names that a card of data shows.
MOST_NAMES = 40
_STYLE: Any = dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.8)
_STYLE |= {"svg.fonttype": "none", "svg.hashsalt": "ppl_bnn", "font.size": 8.5, "text.color": INK}


# --- files ------------------------------------------------------------------------------------------------


def checked_path(path: str | os.PathLike[str]) -> Path:
    """A path that can be written and ends in .html, with its folder made."""
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError.of("path", "a file name that ends in .html", f"{str(path)!r}", f"{target.stem}.html")
    InputError.check(not target.is_dir(), "path", "a file", f"{target}, a folder", "another name")
    return writable(target.parent, "path") / target.name


def write_numbers(target: Path, frames: Mapping[str, pd.DataFrame]) -> None:
    """Write tables beside a page as CSV: the one called "table" as `<stem>.csv`, any other as `<stem>-<name>.csv`."""
    for name, frame in frames.items():
        file = f"{target.stem}.csv" if name == "table" else f"{target.stem}-{name}.csv"
        write_whole(target.with_name(file), partial(for_spreadsheet(frame).to_csv, index=False))


def rendered(template: str, values: Mapping[str, Any]) -> str:
    """A page from a template of this folder."""
    loader = jinja2.PackageLoader("ppl_bnn", "reporting")
    options: Any = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=loader, autoescape=True, **options)
    style, script = (loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    # The hash of exactly this text: no other script can run.
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    fixed = {"script_hash": script_hash, "style": Markup(style), "script": Markup(script)}
    return environment.get_template(template).render(**values, **fixed)


# --- tables -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableCell:
    """One cell of a table.

    `text` is shown, `order` is the value to sort by ("" for a blank), `mark` is "best", "level" or "", `notes` are
    numbers of notes, and `alarm` highlights a problem.
    """

    text: str
    order: str = ""
    mark: str = ""
    notes: tuple[int, ...] = ()
    alarm: bool = False


@dataclass(frozen=True)
class Sheet:
    """One sortable table.

    `columns` are (heading, explanation) of all but the first, whose heading is `first`; `rows` are name, remark and
    cells; `foot` has a text per column; `below` is a sentence below the table.
    """

    heading: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, str, Sequence[TableCell]]]
    foot: Sequence[str] = ()
    below: str = ""
    first: str = "method"


def cell_of(row: Mapping[Any, Any], column: Column, mark: str = "", notes: tuple[int, ...] = ()) -> TableCell:
    """The cell of a row of the table in a column, with its standard error if the column has one."""
    value = row[column.source]
    if mark == ITSELF:
        return TableCell("best", "0")
    if isinstance(value, str):
        return TableCell(value or "–", value, mark, notes, alarm=value not in ("", "yes"))
    if math.isnan(value):
        return TableCell("–", "", "", notes)
    # The script of a page would not read "inf" as a number.
    order = repr(float(value)) if math.isfinite(value) else "Infinity" if value > 0.0 else "-Infinity"
    return TableCell(minus(in_digits(row, column)), order, mark, notes, is_alarm(row, column))


def minus(text: str) -> str:
    """The text with minus signs instead of hyphens."""
    return text.replace("-", "−")


# --- pictures ---------------------------------------------------------------------------------------------


def or_why_not[T](draw: Callable[[], T], title: str) -> T | Picture:
    """What `draw` returns; after an error a picture without panels that holds the reason."""
    try:
        return draw()
    except Warning:
        # A caller who has turned warnings into errors wants to see them.
        raise
    except Exception as error:
        return Picture(title, missing=f"This could not be drawn: {type(error).__name__}: {error}")


def shown(key: str, picture: Picture) -> dict[str, Any]:
    """A picture in the form that the templates use; `key` is its name in addresses and files."""
    panels, legend = [], {}

    def draw() -> None:
        for index, panel in enumerate(picture.panels):
            svg, swatches = _drawn(panel, f"{key}{index}-")
            panels.append({"title": panel.title, "svg": Markup(svg), "words": panel.words})
            for label, swatch in swatches.items():
                legend.setdefault(from_figure(label), Markup(swatch))

    failed = or_why_not(draw, picture.title)
    if failed is not None:
        return shown(key, failed)
    rows = len(picture.numbers)
    data = download(picture.numbers) if 0 < rows <= MOST_ROWS else ""
    parts = {"key": key, "panels": panels, "legend": [*legend.items()], "download": data, "rows": rows}
    return vars(picture) | parts


def _drawn(panel: Panel, prefix: str) -> tuple[str, dict[str, str]]:
    """A panel as SVG that takes its colours from the page, and label -> SVG of each entry of its legend."""
    # Characters that matplotlib's font does not have are drawn by the browser.
    with matplotlib.rc_context(_STYLE), ignored("Glyph .* missing from"):
        figure = new_figure(WIDTH, panel.height)
        axes = figure.subplots()
        panel.draw(axes)
        axes.set_facecolor("none")
        svg = _svg(figure, prefix, f'role="img" aria-label="{escape(panel.words)}"')
        swatches = {}
        for index, (label, handle) in enumerate(drawing.legend_entries([axes]).items()):
            small = new_figure(0.36, 0.17)
            small.set_layout_engine("none")
            bare = dict.fromkeys(("borderpad", "handletextpad", "borderaxespad"), 0.0)
            one = {"numpoints": 1, "scatterpoints": 1, "handlelength": 2.2}
            small.legend([handle], [""], loc="center", frameon=False, **bare, **one)
            swatches[label] = _svg(small, f"{prefix}l{index}-", 'aria-hidden="true"')
    return svg, swatches


def _svg(figure: Any, prefix: str, attributes: str) -> str:
    """A figure as an <svg> element for a page: no namespaces, unique ids, colours by name."""
    buffer, metadata = io.StringIO(), {"Date": None, "Creator": None}
    figure.savefig(buffer, format="svg", transparent=True, dpi=DOTS_PER_INCH, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    text = re.sub(r"<svg[^>]*>", lambda _: f"<svg {box.group()} {attributes}>", text, count=1)
    return re.sub(r"<[^>]+>", lambda tag: _themed(tag.group(), prefix), text)


def _themed(tag: str, prefix: str) -> str:
    """One tag with shorter numbers, the page's colours and fonts, and ids that no other picture has."""
    if tag.startswith("<svg"):
        return tag
    tag = tag.replace("xlink:href", "href")
    tag = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", tag)
    if tag.startswith("<image"):
        return tag

    def colour(found: re.Match[str]) -> str:
        return f"var(--{THEME[found.group()]})" if found.group() in THEME else found.group()

    tag = re.sub(r"(?<=[:\s])#[0-9a-f]{6}\b", colour, tag)
    # "font: 8px 'DejaVu Sans', ..." or "font-family: 'DejaVu Sans', ...", depending on the version of matplotlib.
    tag = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--letters)", tag)
    return re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found.group()):.2f}", tag)


def download(frame: pd.DataFrame, *, exact: bool = False) -> str:
    """A table as a data URL for download, with all digits if `exact`, else with eight."""
    content = for_spreadsheet(frame).to_csv(index=False, float_format=None if exact else "%.8g").encode()
    return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(content).decode()}"


# --- words ------------------------------------------------------------------------------------------------


_CALLED = {
    "hash": "hash of the rows",
    "train_hash": "hash of the training rows",
    "test_hash": "hash of the test rows",
    "ordered": "in time order",
}


def data_card(words: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Description of data, such as `Table.card`, as (name, text) pairs; of many feature names the first."""
    told = {name: value for name, value in words.items() if value is not None and value != ""}
    return [(_CALLED.get(name, name.replace("_", " ")), _shortened(value)) for name, value in told.items()]


def _shortened(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) <= MOST_NAMES:
        return in_words(value)
    return f"{in_words(value[:MOST_NAMES])}, ... ({len(value)} in all)"
