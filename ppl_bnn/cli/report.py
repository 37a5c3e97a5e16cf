"""`ppl-bnn report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ppl_bnn.cli import console
from ppl_bnn.cli.options import argument, option
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.names import clean

if TYPE_CHECKING:
    from ppl_bnn.evaluation.comparison.comparison import Comparison
    from ppl_bnn.evaluation.grid.result import GridResult

KEPT = "What `ppl-bnn compare` kept, with or without --grid."
OF_GRID = "Of a grid: which of its methods the others are measured against."


def report(
    folder: Annotated[Path, argument(KEPT, "DIR")],
    out: Annotated[Path | None, option("The page.", "FILE.html", f"DIR/{console.REPORT}")] = None,
    title: Annotated[str | None, option("Its heading.", "TEXT", "the model and the data")] = None,
    reference: Annotated[str | None, option(OF_GRID, "METHOD", "that of the grid")] = None,
) -> None:
    """Write the page of a stored comparison or grid, also while it is being computed.

    Nothing is fitted again. The page is a single file.
    """
    result = _read(folder, reference)
    errors, heading = console.new_console(error=True), None if title is None else clean(title)
    page = console.write_report(errors, result, out or folder / console.REPORT, heading)
    # A number of cells of a grid, or names of methods of a comparison.
    if missing := result.missing:
        cells = f"{missing} cells have not been computed."
        text = cells if isinstance(missing, int) else f"Not fitted: {', '.join(missing)}."
        errors.print(text, markup=False)
    console.say(console.new_console(), str(page))


def _read(folder: Path, reference: str | None) -> Comparison | GridResult:
    """The content of a folder: the result of a grid, or a comparison."""
    from ppl_bnn.evaluation.comparison import reading
    from ppl_bnn.evaluation.comparison.comparison import Comparison
    from ppl_bnn.evaluation.grid import result as grid_result

    if grid_result.read_manifest(folder) is not None:
        return grid_result.GridResult.load(folder, reference)
    if reading.read_manifest(folder) is None:
        without = f"without {grid_result.MANIFEST} and {reading.MANIFEST}"
        got = f"{folder}, {without if folder.exists() else 'which does not exist'}"
        advice = "the --out of `ppl-bnn compare`"
        raise InputError.of("DIR", "the folder of a comparison or of a grid", got, advice)
    got = f"{folder}, a comparison, whose gaps are measured"
    InputError.check(reference is None, "--reference", "a grid to go with it", got, "no --reference")
    return Comparison.load(folder)
