"""`ppl-bnn report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppl_bnn.cli.console import REPORT, app, new_console, told, warnings_told
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.names import clean

if TYPE_CHECKING:
    from ppl_bnn.evaluation.comparison.comparison import Comparison
    from ppl_bnn.evaluation.grid.result import GridResult


@app.command()
@told
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="What `ppl-bnn compare` kept, with or without --grid.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page.", show_default=f"DIR/{REPORT}")
    ] = None,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Its heading.", show_default="the model and the data")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Of a grid: which of its methods the others are measured against.",
            show_default="that of the grid",
        ),
    ] = None,
) -> None:
    """Write the page of a comparison or of a grid that was kept, also while it is being computed.

    Nothing is fitted again. The page is one file that needs no other.
    """
    result = _read(folder, reference)
    from ppl_bnn.reporting.page import report as write

    errors = new_console(error=True)
    with warnings_told(errors):
        page = write(result, out or folder / REPORT, title=None if title is None else clean(title))
    if missing := getattr(result, "missing", 0):
        errors.print(f"{missing} cells have not been computed.", markup=False)
    new_console().print(str(page), markup=False, soft_wrap=True)


def _read(folder: Path, reference: str | None) -> Comparison | GridResult:
    """The content of a folder: the result of a grid, or a comparison."""
    from ppl_bnn.evaluation.comparison import comparison
    from ppl_bnn.evaluation.grid import result as grid_result

    if grid_result.read_manifest(folder) is not None:
        return grid_result.GridResult.load(folder, reference)
    if comparison.read_manifest(folder) is None:
        if not folder.exists():
            got = f"{folder}, which does not exist"
        elif (folder / "comparison.csv").is_file():
            got = f"{folder}, whose comparison was kept before its predictions were"
        else:
            got = f"{folder}, without {grid_result.MANIFEST} and {comparison.MANIFEST}"
        raise InputError.of(
            "DIR", "the folder of a comparison or of a grid", got, "the --out of `ppl-bnn compare`"
        )
    if reference is not None:
        raise InputError.of(
            "--reference",
            "a grid to go with it",
            f"{folder}, a comparison, whose gaps are measured",
            "no --reference",
        )
    return comparison.Comparison.load(folder)
