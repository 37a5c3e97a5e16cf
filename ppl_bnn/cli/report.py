"""`ppl-bnn report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ppl_bnn.cli import options
from ppl_bnn.cli.console import REPORT, new_console, say, warnings_shown
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.names import clean

if TYPE_CHECKING:
    from ppl_bnn.evaluation.comparison.comparison import Comparison
    from ppl_bnn.evaluation.grid.result import GridResult

KEPT = "What `ppl-bnn compare` kept, with or without --grid."
OF_GRID = "Of a grid: which of its methods the others are measured against."


def report(
    folder: Annotated[Path, options.argument(KEPT, "DIR")],
    out: Annotated[Path | None, options.option("The page.", "FILE.html", default=f"DIR/{REPORT}")] = None,
    title: Annotated[
        str | None, options.option("Its heading.", "TEXT", default="the model and the data")
    ] = None,
    reference: Annotated[str | None, options.option(OF_GRID, "METHOD", default="that of the grid")] = None,
) -> None:
    """Write the page of a stored comparison or grid, also while it is being computed.

    Nothing is fitted again. The page is a single file.
    """
    result = _read(folder, reference)
    from ppl_bnn.reporting.page import report as write

    errors = new_console(error=True)
    with warnings_shown(errors):
        page = write(result, out or folder / REPORT, title=None if title is None else clean(title))
    if missing := getattr(result, "missing", 0):
        errors.print(f"{missing} cells have not been computed.", markup=False)
    say(new_console(), str(page))


def _read(folder: Path, reference: str | None) -> Comparison | GridResult:
    """The content of a folder: the result of a grid, or a comparison."""
    from ppl_bnn.evaluation.comparison import folder as files
    from ppl_bnn.evaluation.comparison.comparison import Comparison
    from ppl_bnn.evaluation.grid import result as grid_result

    if grid_result.read_manifest(folder) is not None:
        return grid_result.GridResult.load(folder, reference)
    if files.read_manifest(folder) is None:
        got = f"{folder}, without {grid_result.MANIFEST} and {files.MANIFEST}"
        if not folder.exists():
            got = f"{folder}, which does not exist"
        elif (folder / "comparison.csv").is_file():
            got = f"{folder}, whose comparison was kept before its predictions were"
        advice = "the --out of `ppl-bnn compare`"
        raise InputError.of("DIR", "the folder of a comparison or of a grid", got, advice)
    if reference is not None:
        got = f"{folder}, a comparison, whose gaps are measured"
        raise InputError.of("--reference", "a grid to go with it", got, "no --reference")
    return Comparison.load(folder)
