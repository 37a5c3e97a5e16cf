"""Colours and marks that all figures share, and empty figures, which are drawn without pyplot."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.files import write_whole
from ppl_bnn.core.warning_filters import ignored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinguishable with any kind of colour vision; meaning is never in colour alone.
BLUE, SKY, ORANGE, VERMILION, GREY = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#666666"
INK, LINES_OF_GRID = "black", "0.92"
# Lines that guide the eye, the range of sampling noise, the filled interval and the bar of an estimate.
GUIDE: dict[str, Any] = {"color": GREY, "linewidth": 1.0, "linestyle": "--"}
NOISE: dict[str, Any] = {"color": GREY, "alpha": 0.18, "linewidth": 0}
FILLED: dict[str, Any] = {"color": SKY, "alpha": 0.35, "linewidth": 0}
BAR: dict[str, Any] = {"color": BLUE, "linewidth": 1.6, "alpha": 0.6, "zorder": 2}


def new_figure(width: float = 12.0, height: float = 8.0) -> Figure:
    """An empty figure of the given size in inches, by default 1200 x 800 pixels, on its own canvas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def axes_or_new(ax: Axes | None, height: float = 4.2) -> Axes:
    """`ax`, or the axes of a new figure of its own, 640 pixels wide, which a notebook shows.

    Pyplot does not know the figure: it needs no closing, and `plt.show()` does not show it.
    """
    from matplotlib.axes import Axes

    if ax is not None:
        got = type(ax).__name__
        InputError.check(isinstance(ax, Axes), "ax", "Matplotlib axes", got, "plt.subplots()[1]")
        return ax
    figure = new_figure(6.4, height)
    axes: Any = figure.subplots()
    # IPython asks an object for this method. Axes of pyplot are shown through their figure.
    axes._repr_png_ = partial(_png, figure)
    return axes


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with ignored("Glyph .* missing from"):
        figure.savefig(buffer, dpi=100, format="png")
    return buffer.getvalue()


def save(figure: Figure, file: Path) -> None:
    """Write a figure as a PNG file, whole or not at all."""
    # Characters that Matplotlib's font does not have are drawn as boxes.
    with ignored("Glyph .* missing from"):
        write_whole(file, lambda path: figure.savefig(path, dpi=100, format="png"))


def grid_lines(axes: Axes) -> None:
    axes.grid(color=LINES_OF_GRID, zorder=0)
    axes.set_axisbelow(True)
