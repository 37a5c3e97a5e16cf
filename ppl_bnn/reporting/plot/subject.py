"""What a plot is about: fits, predictions, blocks of results, and what is to be said of their convergence."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ppl_bnn.core.errors import InputError, UnsupportedError, check_known, unknown_name
from ppl_bnn.core.figures import VERMILION, axes_or_new
from ppl_bnn.core.names import for_figure
from ppl_bnn.diagnostics.diagnose import CONVERGED, UNDECIDED, diagnose
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.evaluation.comparison.drawing import legend_entries
from ppl_bnn.evaluation.comparison.summary import doubt_in_words
from ppl_bnn.evaluation.grid.result import GridResult
from ppl_bnn.posterior.fit_info import FitInfo
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.prediction.arguments import checked_targets
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.recalibration import Recalibrated, held_out_prediction
from ppl_bnn.reporting.figures.panels import Picture
from ppl_bnn.reporting.findings import Findings
from ppl_bnn.reporting.grid_findings import GridFindings

# Letters of a title in an inch, and of the labels in one line of a legend below axes of 640 pixels.
_IN_AN_INCH, _LEGEND = 13, 88


# --- fits -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """One fit: its name, how it was made, and in a few words what is wrong with its convergence."""

    name: str
    info: FitInfo
    kind: str
    shape: tuple[int, int]
    doubt: str


def fit_of(result: Any, method: str | None, where: str) -> Fit:
    """The fit that a posterior is, or that a comparison has of a method."""
    if isinstance(result, Posterior):
        InputError.check(method is None, "method", "None for one posterior", repr(method), "no method=")
        return Fit(result.info.method, result.info, result.kind, result.shape, doubt_of(result))
    expected, advice = "a Posterior or a Comparison", "bnn.fit(...) or bnn.compare(...)"
    InputError.check(isinstance(result, Comparison), where, expected, type(result).__name__, advice)
    name = chosen("method", method, list(result.fits))
    fit, row = result.fits[name], result.table.loc[name]
    return Fit(name, fit.info, row["kind"], fit.shape, doubt_in_words(row))


def chosen(what: str, given: str | None, known: list[str]) -> str:
    """The given one of the known names, or the only one."""
    if given is None and len(known) == 1:
        return known[0]
    InputError.check(given is not None, what, f"one of {', '.join(known) or 'none'}", "None", f"{what}=...")
    check_known(what, [given], known)
    return str(given)


def doubt_of(posterior: Any) -> str:
    """What is wrong with the convergence of a posterior, in a few words; "" for nothing. Judged once."""
    kept = vars(posterior)
    if "_doubt" not in kept:
        kept["_doubt"] = _judged(posterior)
    return kept["_doubt"]


def _judged(posterior: Posterior) -> str:
    if posterior.kind != "chains":
        return "" if posterior.info.figures.get("converged", 1.0) else "not converged"
    found = diagnose(posterior)
    words = "convergence in doubt" if found.verdict == UNDECIDED else found.verdict
    return "" if found.verdict == CONVERGED else f"{words}, R-hat {found.figures['rhat']:.3g}"


# --- predictions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """Predictions of the same rows by name, the targets of these rows, and doubts by name."""

    predictions: dict[str, Prediction]
    y: np.ndarray
    doubts: dict[str, str]


def predicted(result: Any, x: Any, y: Any, where: str) -> Predicted:
    """Predictions of rows that were held out: of a comparison its test rows, else rows x (of posteriors) and y."""
    if isinstance(result, Comparison):
        InputError.check(
            x is None and y is None, where, "no x and y", "some", "the comparison's own test rows"
        )
        return Predicted(result.predictions, result.test_targets, _doubts(result))
    named = result if isinstance(result, Mapping) else {"": result}
    kinds = Posterior | Recalibrated | Prediction
    odd = [type(each).__name__ for each in named.values() if not isinstance(each, kinds)]
    expected = "a Posterior, a Prediction, a Comparison, a GridResult, or a dict of posteriors or predictions"
    InputError.check(named and not odd, where, expected, (odd or ["nothing"])[0], "bnn.fit(...)")
    InputError.check(y is not None, where, "the targets of rows that were held out", "none", "y=y_new")
    found, doubts = {}, {}
    for given, each in named.items():
        source = each if isinstance(each, Prediction) else source_of(each)
        name = given or ("prediction" if isinstance(source, Prediction) else source.info.method)
        InputError.check(
            isinstance(each, Prediction) or x is not None, where, "x and y", "y alone", "x=x_new"
        )
        found[name] = held_out_prediction(where, each, x, y, {})
        if isinstance(source, Posterior) and (doubt := doubt_of(source)):
            doubts[name] = doubt
    checked = [checked_targets(each, y) for each in found.values()]
    return Predicted(found, checked[0], doubts)


def source_of(posterior: Any) -> Any:
    """The posterior that is recalibrated, or the posterior itself."""
    return posterior.source if isinstance(posterior, Recalibrated) else posterior


def _doubts(comparison: Comparison) -> dict[str, str]:
    table = comparison.table.to_dict(orient="index")
    rows = {str(name): doubt_in_words(row) for name, row in table.items() if name in comparison.predictions}
    return {name: words for name, words in rows.items() if words}


# --- results of several methods ---------------------------------------------------------------------------


def block_of(result: Any, block: str | None, where: str) -> tuple[Any, dict[str, str]]:
    """The findings on one model and one data set, and doubts by name; `block` chooses them in the result of a grid."""
    expected, advice = "a Comparison or a GridResult", "bnn.compare(...) or grid.run(...)"
    known = isinstance(result, Comparison | GridResult)
    InputError.check(known, where, expected, type(result).__name__, advice)
    if isinstance(result, Comparison):
        InputError.check(block is None, "block", "None for a comparison", repr(block), "no block=")
        return Findings(result), _doubts(result)
    found: Any = GridFindings(result)
    pairs = {" on ".join(pair): pair for pair in found.blocks}
    pair = pairs[chosen("block", block, list(pairs))]
    one = found.blocks[pair]
    # The title of a block tells it from the others, which are not drawn.
    one.title = ""
    found.blocks = {pair: one}
    doubts = {str(name): one.not_converged(str(name)) for name in one.table.index}
    return found, {name: words.removeprefix("has ") for name, words in doubts.items() if words}


def panel_of(picture: Picture, place: int, where: str) -> Any:
    """One panel of a picture of a report; UnsupportedError, with the reason, if it could not be drawn."""
    wanted = f"a result with what {where} draws"
    UnsupportedError.check(picture.panels, where, wanted, picture.missing.rstrip("."), "another result")
    return picture.panels[place]


def place_of(what: str, names: tuple[str, ...]) -> int:
    """The number of a choice among names."""
    if what not in names:
        raise unknown_name("choice", what, names)
    return names.index(what)


# --- axes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Canvas:
    """Axes to draw on, and whether their figure is made for them."""

    axes: Axes
    own: bool

    @classmethod
    def of(cls, ax: Any, height: float = 4.2) -> Canvas:
        return cls(axes_or_new(ax, height), ax is None)

    def finished(self, title: str, doubts: Mapping[str, str]) -> Axes:
        """The axes with their title, what has not converged, and a legend if it tells things apart."""
        axes = self.axes
        notes = [f"{name}: {words}" if name else words for name, words in doubts.items() if words]
        figure: Any = axes.figure
        letters = max(20, int(axes.bbox.width / figure.dpi * _IN_AN_INCH))
        note, wrapped = (
            textwrap.fill(textwrap.shorten(text, 3 * letters, placeholder=" ..."), letters)
            for text in ("; ".join(notes), title)
        )
        axes.set_title(for_figure(wrapped), fontsize=10)
        if note:
            # Above the title, so that a title of the user's own does not cover it.
            style: Any = {"color": VERMILION, "fontsize": 8.5, "ha": "center", "va": "bottom"}
            above = (0.0, 6.0 + 15.0 * len(wrapped.splitlines()))
            style |= {"xycoords": "axes fraction", "textcoords": "offset points"}
            axes.annotate(for_figure(note), (0.5, 1.0), above, **style)
        if len(entries := legend_entries([axes])) > 1:
            longest = max(map(len, entries)) + 6
            columns = min(len(entries), max(1, _LEGEND // longest))
            small: Any = {"fontsize": 8, "ncols": columns, "frameon": not self.own}
            where = (figure, "outside lower center") if self.own else (axes, "best")
            small |= {"ncols": columns if self.own else 1, "framealpha": 0.8}
            where[0].legend(entries.values(), entries.keys(), loc=where[1], **small)
        return axes


def one_note(name: str, doubt: str) -> dict[str, str]:
    """The doubt about the only fit of a plot, whose title has its name."""
    return {"": doubt} if doubt else {}
