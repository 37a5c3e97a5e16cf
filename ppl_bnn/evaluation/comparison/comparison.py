"""The result of `compare`: posteriors, predictions and scores of several methods, with one table."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core import stored
from ppl_bnn.core.errors import BNNError, DamagedError, InputError
from ppl_bnn.core.files import left_by_a_kill, staged, staged_within, writable
from ppl_bnn.core.notebook.html import card
from ppl_bnn.evaluation.comparison import columns, reading
from ppl_bnn.evaluation.comparison import folder as files
from ppl_bnn.evaluation.comparison.record import FitSummary, reason
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.prediction import scores
from ppl_bnn.prediction.prediction import Prediction

if TYPE_CHECKING:
    import pandas as pd


@dataclass(eq=False)
class Comparison:
    """Fits of several methods to one model and one data set, made by `compare`.

    Parameters
    ----------
    table : pd.DataFrame
        One row per method in the order given, columns as in `COLUMNS`; a blank is NaN or "".
    posteriors, predictions, trees, diagnoses : dict
        By method. Predictions are of the test rows.
    reference : str, optional
        Name of the reference method. If it has not converged, the table says so and gaps to it are not reliable.
    notes : dict
        (method, column) -> one sentence on a blank or on a number that needs a warning.
    data : dict
        Description of the data: rows, names, units, hashes.
    test_inputs, test_targets : array
        The test rows, in original units.
    failures, fits : dict
        By method: the reasons of failures, and summaries of fits, which remain without the posteriors.
    drawn, drawn_at, missing : dict, ndarray and tuple of str
        After `load`: predictions for the figures, their inputs, and the methods that were not fitted.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> train, test = ((table.x[rows], table.y[rows]) for rows in table.split(seed=0))
    >>> result = bnn.compare(model, train, test, {"map": bnn.MAP()}, standardise=True)
    >>> list(result.posteriors), result.predictions["map"].shape
    (['map'], (88,))
    """

    table: pd.DataFrame
    posteriors: dict[str, Posterior]
    predictions: dict[str, Prediction]
    trees: dict[str, Any]
    diagnoses: dict[str, Any]
    reference: str | None
    notes: dict[tuple[str, str], str]
    data: dict[str, Any]
    test_inputs: Any
    test_targets: np.ndarray
    failures: dict[str, str] = field(default_factory=dict)
    fits: dict[str, FitSummary] = field(default_factory=dict)
    drawn: dict[str, Prediction] = field(default_factory=dict)
    drawn_at: np.ndarray | None = None
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        summaries = {name: FitSummary(each.info, each.shape) for name, each in self.posteriors.items()}
        self.fits = summaries | self.fits

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Comparison:
        """Load the folder that `compare(..., out=folder)` or `save(folder)` wrote, also of an unfinished run.

        Everything is restored bit for bit except `posteriors`, since a model is code (see `Posterior.save`).

        Parameters
        ----------
        folder : str or PathLike
            Folder of a comparison.

        Returns
        -------
        Comparison
            What the folder holds.

        Raises
        ------
        InputError, DamagedError, UnsupportedError
            Not a folder of a comparison; a damaged one; one of another format.
        """
        words = reading.read_manifest(folder)
        if words is None:
            left = left_by_a_kill(Path(folder))
            advice = f"{left}, which a save that was killed has left" if left else "the `out` of `compare`"
            got = f"{folder}, without {files.MANIFEST}"
            raise InputError.of("folder", "the folder of a comparison", got, advice)
        try:
            return cls(**reading.read_folder(Path(folder), words))
        except DamagedError:
            raise
        # A part may raise any error if its values are inconsistent.
        except Exception as error:
            raise reading.READER.damaged(Path(folder), reason(error)) from error

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.table.index)}; reference={self.reference!r})"

    def _repr_html_(self) -> str:
        """The two tables of the terminal, and the conclusions."""
        (first, prediction), (second, fidelity) = columns.tables(self).items()
        tables = [
            columns.listing(self.table, first, [columns.Column("system", "ppl"), *prediction]),
            columns.listing(self.table, second, fidelity, self.reference),
        ]
        failed = [f"{name} failed: {why}" for name, why in self.failures.items()]
        return card(repr(self), *tables, failed, self.summary())

    @property
    def task(self) -> str:
        """ "regression" or "classification"."""
        return self.data["task"]

    def pointwise_log_scores(self) -> dict[str, np.ndarray]:
        """Log score of each test row by method, from which paired differences are computed.

        Returns
        -------
        dict of str to ndarray
            Method -> (N,), in nats.
        """
        found, y = self.predictions.items(), self.test_targets
        return {name: np.asarray(scores.log_score(each, y, pointwise=True)) for name, each in found}

    def summary(self) -> str:
        """The conclusions of the table in three sentences.

        Returns
        -------
        str
            The sentences.
        """
        from ppl_bnn.evaluation.comparison.summary import sentences

        return sentences(self)

    def figure(self) -> Any:
        """Draw predictions against truth, one panel per method.

        Returns
        -------
        matplotlib.figure.Figure
            The figure.
        """
        from ppl_bnn.evaluation.comparison.figures import predictions_figure

        return predictions_figure(self)

    def markdown(self) -> str:
        """The table, the three sentences and the notes, in Markdown.

        Returns
        -------
        str
            The text.
        """
        header = ["method", *self.table.columns]
        lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for name, row in self.table.iterrows():
            cells = [str(name), *map(short_cell, row)]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        together: dict[tuple[str, str], list[str]] = {}
        for (name, column), note in self.notes.items():
            together.setdefault((name, note), []).append(column)
        notes = [f"- {name}, {', '.join(found)}: {note}" for (name, note), found in together.items()]
        parts = ["\n".join(lines), self.summary(), *(["\n".join(notes)] if notes else [])]
        return "\n\n".join(parts) + "\n"

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the comparison to a folder: a tree per method, the table, a figure, and what `load` needs.

        All files appear together at the end, so an interrupted save leaves the previous content. They replace the files
        of another comparison; other files stay.

        Parameters
        ----------
        folder : str or PathLike
            The folder.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        InputError
            The folder cannot be written, or has files of these names that no comparison has written.
        """
        folder = Path(folder)
        try:
            with _staged(folder, self) as stage:
                files.write_parts(stored.Folder(stage), self)
                files.write_figure(stage, self)
        except OSError as error:
            got = f"{folder} ({reason(error)})"
            raise InputError.of("folder", "a folder that can be written", got, "another folder") from error
        return folder


def _staged(folder: Path, comparison: Comparison) -> AbstractContextManager[Path]:
    """A temporary folder for the files of a comparison, which then replace the comparison in `folder`."""
    if not os.path.lexists(folder):
        return staged(folder)
    # A link is followed; the folder that it points to stays where it is.
    place = writable(folder).resolve()
    return staged_within(place, _own_files(place, comparison), files.MANIFEST)


def _own_files(folder: Path, comparison: Comparison) -> set[str]:
    """Entries that a comparison has written, or would write; InputError if it would replace other files."""
    found = {entry.name for entry in folder.iterdir()}
    methods = {name.removesuffix(files.PREDICTION) for name in found if name.endswith(files.PREDICTION)}
    theirs = bool(methods) or files.TEST_ROWS in found
    if stored.claims(folder / files.MANIFEST, files.KIND):
        theirs = True
        # A damaged comparison is replaced, too, as the error raised on loading it advises.
        with contextlib.suppress(BNNError):
            words = reading.read_manifest(folder) or {}
            methods |= {*words.get("trees", ()), *words.get("predictions", ())}
    methods |= {*comparison.trees, *comparison.predictions}
    own = found & file_names(methods)
    odd = [folder / name for name in own if (folder / name).is_symlink() or not (folder / name).is_file()]
    if odd or (own and not theirs):
        got = str(odd[0]) if odd else f"{', '.join(sorted(own))} of something else in {folder}"
        expected = "a new folder, or that of a comparison to replace"
        raise InputError.of("folder", expected, got, "another folder")
    return own


def file_names(methods: Iterable[str]) -> set[str]:
    """Names of the files of a comparison of these methods."""
    of_methods = {f"{name}{ending}" for name in methods for ending in (".nc", files.PREDICTION)}
    return {"comparison.csv", files.FIGURE, files.MANIFEST, files.TEST_ROWS, *of_methods}


def short_cell(value: Any) -> str:
    """A value of the table as text, a number with four digits."""
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else f"{value:.4g}"
