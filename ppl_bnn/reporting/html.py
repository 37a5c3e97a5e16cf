"""Parts of HTML pages: one self-contained file with tables, pictures as inline SVG, and downloads.

Everything is in the file: pictures as SVG that takes its colours from the page (so that one picture serves a light
screen, a dark one and paper), numbers as downloads made from the file itself, some forty lines of script for sorting
and for the theme. A content security policy forbids all other requests. The templates in this folder are `base.html`
(head, style, script), `parts.html` (tables, pictures) and one file for each kind of page.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.files import part_of, write_whole
from ppl_bnn.core.names import for_spreadsheet, from_figure
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.evaluation.comparison.drawing import BLUE, CLASS_COLOURS, GREY, ORANGE, SKY, VERMILION
from ppl_bnn.evaluation.comparison.panels import INK, WIDTH, Panel, Picture, legend_entries, new_figure
from ppl_bnn.reporting.terminal import Column, number

if TYPE_CHECKING:
    import pandas as pd

# Colour in a picture -> variable of the page: one picture for light, dark and paper.
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
# Largest number of rows of a table that the page offers for download; larger ones need `numbers`.
MOST_ROWS = 4000
# Largest number of feature names that a card of data shows.
MOST_NAMES = 40
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


# --- files ------------------------------------------------------------------------------------------------


def checked_path(path: str | os.PathLike[str]) -> Path:
    """A path that can be written, with its folder made.

    Parameters
    ----------
    path : str or PathLike
        The path.

    Returns
    -------
    Path

    Raises
    ------
    InputError
        The path cannot be written, or does not end in .html.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError.of("path", "a file name that ends in .html", f"{str(path)!r}", f"{target.stem}.html")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        probe = part_of(target)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError.of(
            "path",
            "a file that can be written",
            f"{target} ({type(error).__name__}: {error.strerror or error})",
            "another folder",
        ) from error
    return target


def check_format(numbers: str | None) -> None:
    """Refuse a format of numbers that is unknown, or that no installed package can write."""
    if numbers is not None and numbers not in FORMATS:
        raise InputError.of("numbers", "None, 'csv' or 'parquet'", repr(numbers), "numbers='csv'")
    engines = ("pyarrow", "fastparquet")
    if numbers == "parquet" and not any(importlib.util.find_spec(name) for name in engines):
        raise UnsupportedError.of(
            "numbers",
            "pyarrow or fastparquet, with which pandas writes Parquet",
            "neither",
            "pip install pyarrow, or numbers='csv'",
        )


def write_numbers(target: Path, frames: Mapping[str, pd.DataFrame], form: str) -> None:
    """Write tables beside a page: the one called "table" as `<stem>.<form>`, any other as `<stem>-<name>.<form>`.

    Parameters
    ----------
    target : Path
        The file of the page.
    frames : mapping of str to pd.DataFrame
        Name -> table.
    form : {"csv", "parquet"}
        The format.
    """
    for name, frame in frames.items():
        buffer = io.BytesIO()
        if form == "csv":
            buffer.write(for_spreadsheet(frame).to_csv(index=False).encode())
        else:
            frame.to_parquet(buffer, index=False)
        ending = "" if name == "table" else f"-{name}"
        write_whole(
            target.with_name(f"{target.stem}{ending}.{form}"),
            lambda path, buffer=buffer: path.write_bytes(buffer.getvalue()),
        )


def rendered(template: str, **values: Any) -> str:
    """A page from a template of this folder.

    Parameters
    ----------
    template : str
        Name of the template.
    **values
        Values for the template.

    Returns
    -------
    str
    """
    import jinja2
    from markupsafe import Markup

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
    return environment.get_template(template).render(
        # The hash of exactly this text: no other script can run.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(style),
        script=Markup(script),
        **values,
    )


# --- tables -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Parameters
    ----------
    text : str
        The text shown.
    order : str
        The value to sort by, "" for a blank.
    mark : str
        "best", "level" or "".
    notes : tuple of int
        Numbers of notes.
    alarm : bool
        Whether the value is highlighted as a problem.
    """

    text: str
    order: str = ""
    mark: str = ""
    notes: tuple[int, ...] = ()
    alarm: bool = False


@dataclass(frozen=True)
class Sheet:
    """One sortable table.

    Parameters
    ----------
    heading : str
        Heading of the table.
    columns : sequence of tuple
        (heading, explanation) of each column but the first.
    rows : sequence of tuple
        Name, remark and cells of each row.
    foot : sequence of str
        One text for each column.
    first : str
        Heading of the first column.
    below : str
        A sentence below the table.
    """

    heading: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, str, Sequence[Cell]]]
    foot: Sequence[str] = ()
    first: str = "method"
    below: str = ""


def heading_of(column: Column) -> str:
    """The heading in one line, without the hyphens that a narrow terminal needs."""
    return column.heading.replace("-\n", "").replace("\n", " ")


def cell_of(row: Mapping[Any, Any], column: Column, mark: str = "", notes: tuple[int, ...] = ()) -> Cell:
    """The cell of a row of the table in a column, with its standard error if the column has one."""
    value = row[column.source]
    if isinstance(value, str):
        return Cell(value or "–", value, mark, notes, alarm=value not in ("", "yes"))
    if math.isnan(value):
        return Cell("–", "", "", notes)
    text = number(value, column.digits)
    error = float(row[column.error]) if column.error else math.nan
    if not math.isnan(error):
        text += f" ± {number(error, column.digits)}"
    return Cell(minus(text), order_of(float(value)), mark, notes)


def order_of(value: float) -> str:
    """A number in the form that the script of a page reads; it would not read "inf" as a number."""
    return repr(value) if math.isfinite(value) else "Infinity" if value > 0.0 else "-Infinity"


def minus(text: str) -> str:
    """The text with minus signs instead of hyphens."""
    return text.replace("-", "−")


# --- pictures ---------------------------------------------------------------------------------------------


def pictures_of(functions: Mapping[str, Callable[[Any], Picture]], findings: Any) -> list[Picture]:
    """All pictures. One that cannot be drawn holds the reason, and the others are still drawn."""
    made = []
    for key, function in functions.items():
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


def shown(picture: Picture) -> dict[str, Any]:
    """A picture in the form that the templates use."""
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
        "legend": [(from_figure(label), swatch) for label, swatch in entries.items()],
        "download": download(numbers) if small and numbers is not None else "",
        "rows": 0 if numbers is None else len(numbers),
    }


def _drawn(panel: Panel, prefix: str) -> tuple[str, dict[str, str]]:
    """A panel as SVG that takes its colours from the page, and label -> SVG of each entry of its legend."""
    import matplotlib

    # Characters that matplotlib's font does not have are drawn by the browser.
    with matplotlib.rc_context(_STYLE), ignored("Glyph .* missing from"):
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
    """A figure as an <svg> element for a page: no namespaces, unique ids, colours by name."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, dpi=DOTS_PER_INCH, metadata={"Date": None, "Creator": None}
    )
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
    # "font: 8px 'DejaVu Sans', ..." or "font-family: 'DejaVu Sans', ...", depending on the version of matplotlib.
    tag = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--letters)", tag)
    return re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found.group()):.2f}", tag)


def _attribute(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))


def download(frame: pd.DataFrame, *, exact: bool = False) -> str:
    """A table as a data URL for download.

    Parameters
    ----------
    frame : pd.DataFrame
        The table.
    exact : bool
        Whether to write all digits instead of eight.

    Returns
    -------
    str
    """
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
    return [
        (_CALLED.get(name, name.replace("_", " ")), _shortened(value))
        for name, value in words.items()
        if value is not None and value != ""
    ]


def _shortened(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) <= MOST_NAMES:
        return in_words(value)
    return f"{in_words(value[:MOST_NAMES])}, ... ({len(value)} in all)"


def in_words(value: Any) -> str:
    """A plain value, or a container of plain values, as text."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {in_words(each)}" for key, each in value.items()) or "none"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(in_words(each) for each in value) or "none"
    return str(value)
