"""Fits of one model by several methods, one after the other, each saved as soon as it ends."""

from __future__ import annotations

import functools
import inspect
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.backends.program import Program
from ppl_bnn.backends.protocol import Model, resolve_device
from ppl_bnn.backends.systems import system, written_in
from ppl_bnn.core import checks, stored
from ppl_bnn.core.arrays import map_data, row_count
from ppl_bnn.core.errors import (
    BNNError,
    DeviceError,
    InputError,
    MissingFrameworkError,
    UnsupportedError,
    message,
    unknown_name,
)
from ppl_bnn.core.names import LONGEST_FILE, clean, clean_all
from ppl_bnn.core.progress import Progress, resolve
from ppl_bnn.core.warning_filters import recorded
from ppl_bnn.evaluation.comparison.comparison import (
    CLASSIFICATION_SCORES,
    COLUMNS,
    REGRESSION_SCORES,
    Comparison,
    file_names,
)
from ppl_bnn.evaluation.comparison.folder import (
    WORDS,
    ComparisonNotWrittenError,
    writable,
    write_figure,
    write_method_tree,
    write_prediction,
    write_table,
    write_test_rows,
    write_words,
)
from ppl_bnn.evaluation.comparison.record import Record, chain_of_draws, fitted, reason, standing
from ppl_bnn.inference.method import Method
from ppl_bnn.prediction import scores

if TYPE_CHECKING:
    import pandas as pd


class ComparisonInterrupted(KeyboardInterrupt):
    """Raised on Ctrl-C during `compare`. `partial` is the `Comparison` of the methods that had finished."""

    def __init__(self, text: str, partial: Comparison):
        super().__init__(text)
        self.partial = partial


def compare(
    model: Model,
    train: tuple[Any, Any],
    test: tuple[Any, Any],
    methods: Mapping[str, Method],
    *,
    reference: str | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: bool | Progress | None = None,
    standardise: bool = False,
    out: str | os.PathLike[str] | None = None,
    feature_names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    target_name: str | None = None,
    observed: str | None = None,
    card: Mapping[str, Any] | None = None,
) -> Comparison:
    """Fit `model` to `train` by each of `methods`, and score the predictions of `test`.

    Parameters
    ----------
    model : Model
        The model. If it has a keyword-only parameter `classes`, that is set from `class_names` or else from the
        training labels.
    train, test : tuple
        (x, y) in original units.
    methods : mapping of str to Method
        Name -> method, fitted in this order, all with the same seed. A name is also a file name.
    reference : str, optional
        Name of the method whose posterior the gaps of the others are measured against.
    seed : int
        Seed of all fits.
    device : str
        "auto", "cpu" or "cuda[:i]".
    progress : bool or Progress, optional
        Whether and where to report progress.
    standardise : bool
        Whether to fit on standardised inputs and targets. All scores are in original units in any case.
    out : str or PathLike, optional
        A folder. As soon as a method has finished, its tree is written to `<name>.nc`, its prediction to
        `<name>.prediction.safetensors`, the table to `comparison.csv` and the other data that `Comparison.load` needs
        to `comparison.json`; a figure `figure.png` follows at the end. Existing files of those names are removed first,
        so that the folder holds one run.
    feature_names : sequence of str, optional
        Names of the columns of x.
    class_names : sequence of str, optional
        Names of the classes.
    target_name : str, optional
        Name of the target.
    observed : str, optional
        The observed site of a plain NumPyro or Pyro model.
    card : mapping, optional
        Further information on the data (name, licence, ...), kept in `Comparison.data`.

    Returns
    -------
    Comparison

    Raises
    ------
    InputError, UnknownNameError, ModelError, DeviceError
        Errors that concern all methods; raised before the first fit.
    ComparisonInterrupted
        Ctrl-C. Its `partial` holds what had finished.
    ComparisonNotWrittenError
        `out` can no longer be written, for example because the disk is full. Its `partial` holds what had finished.
    """
    methods = _checked_methods(methods)
    feature_names, class_names = clean_all(feature_names), clean_all(class_names)
    target_name = None if target_name is None else clean(target_name)
    card = {name: clean(value) if isinstance(value, str) else value for name, value in (card or {}).items()}
    if reference is not None and reference not in methods:
        raise unknown_name("reference", reference, methods)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**31:
        raise InputError.of("seed", "a whole number from 0 to 2**31 - 1", repr(seed), "seed=0")
    resolve_device(device)
    if not callable(model):
        raise InputError.of(
            "model", "a function (x, y=None)", type(model).__name__, "the model itself, not its name"
        )
    x, y = _checked_rows("train", train)
    x_test, y_test = _checked_rows("test", test, like=(x, y))
    _check_names(x, feature_names)
    model = bind_classes(model, y, class_names)
    folder = None if out is None else writable(out)
    task = _check_model(model, x, y, y_test, methods, device, observed)

    run = _Run(
        x_test,
        y_test,
        reference,
        {
            "task": task,
            "train_rows": len(y),
            "test_rows": len(y_test),
            "target_name": target_name or "y",
            "feature_names": feature_names,
            "class_names": class_names,
            "standardised": bool(standardise),
            "seed": int(seed),
            "train_hash": checks.data_hash(x, y),
            "test_hash": checks.data_hash(x_test, y_test),
            **card,
        },
        folder,
        tuple(methods),
    )
    run.clear(methods)
    bars = resolve(progress)
    for name, method in methods.items():
        try:
            record = fitted(
                name,
                lambda method=method: method.fit(
                    model,
                    x,
                    y,
                    seed=int(seed),
                    device=device,
                    progress=bars,
                    observed=observed,
                    standardise=standardise,
                    feature_names=feature_names,
                    class_names=class_names,
                ),
                x_test,
                y_test,
                int(seed),
                device,
            )
            record.ppl = record.ppl or method.ppl
            run.add(record)
        except KeyboardInterrupt as error:
            raise run.interrupted(name) from error
        except OSError as error:
            raise run.not_written(error) from error
    result = run.comparison()
    if folder is not None:
        try:
            write_figure(folder, result)
        except OSError as error:
            raise run.not_written(error) from error
    return result


def bind_classes(model: Model, y: np.ndarray, class_names: Sequence[str] | None = None) -> Model:
    """Set the free keyword-only parameter `classes` of a model, if it has one, to the number of classes.

    Parameters
    ----------
    model : Model
        The model.
    y : np.ndarray
        Labels.
    class_names : sequence of str, optional
        Names of the classes; their number is used if given. Else it is the number of different labels in `y`, which
        must be 0..K-1.

    Returns
    -------
    Model
    """
    parameter = inspect.signature(model).parameters.get("classes")
    bound = isinstance(model, functools.partial) and "classes" in model.keywords
    if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY or bound:
        return model
    count = len(np.unique(y)) if class_names is None else len(class_names)
    # A single class is reported as an error of the labels, not of a model with one class.
    checks.check_labels(y, max(count, 2))
    return functools.partial(model, classes=count)


def _checked_methods(methods: Mapping[str, Method]) -> dict[str, Method]:
    if not isinstance(methods, Mapping) or not methods:
        raise InputError.of(
            "methods", "a dict of at least one name and method", repr(methods), "methods={'nuts': bnn.NUTS()}"
        )
    for name, method in methods.items():
        if isinstance(method, type) and issubclass(method, Method):
            raise InputError.of(
                f"methods[{name!r}]",
                "an instance of a method",
                f"the class {method.__name__}",
                f"{method.__name__}()",
            )
        if not isinstance(method, Method):
            raise InputError.of(f"methods[{name!r}]", "a method", repr(method), "bnn.NUTS()")
        # A name is used as a file name, and as the first cell of a row in a table that spreadsheets open.
        plain = isinstance(name, str) and clean(name) == name and name and name[0] not in ".=+-@"
        if not plain or len(name.encode()) > LONGEST_FILE or any(mark in name for mark in '/\\:*?"<>|'):
            raise InputError.of("methods", "names that can be file names", repr(name), "letters and digits")
    folded = [name.casefold() for name in methods]
    if len(set(folded)) < len(folded):
        raise InputError.of(
            "methods", "names that differ in more than case", ", ".join(methods), "names that are file names"
        )
    return dict(methods)


def _checked_rows(name: str, rows: Any, like: tuple[Any, np.ndarray] | None = None) -> tuple[Any, np.ndarray]:
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise InputError.of(name, "a pair (x, y)", type(rows).__name__, f"{name}=(x, y)")
    try:
        x = checks.check_inputs(rows[0], None if like is None else checks.describe_inputs(like[0]))
        y = checks.check_targets(rows[1], row_count(x))
    except InputError as error:
        raise InputError(f"{name} {error}") from error
    if like is not None and y.shape[1:] != like[1].shape[1:]:
        raise InputError.of(
            f"{name} y",
            f"targets of shape (N, *{like[1].shape[1:]}) as in training",
            f"{y.shape}",
            "the same outputs",
        )
    return x, y


def _check_names(x: Any, feature_names: Sequence[str] | None) -> None:
    if feature_names is None or isinstance(x, Mapping) or x.ndim != 2:
        return
    if len(feature_names) != x.shape[1]:
        raise InputError.of(
            "feature_names",
            f"{x.shape[1]} names, one per column of x",
            f"{len(feature_names)}",
            "the same columns",
        )


def _check_model(
    model: Model,
    x: Any,
    y: np.ndarray,
    y_test: np.ndarray,
    methods: Mapping[str, Method],
    device: str,
    observed: str | None,
) -> str:
    """Trace the model once as every fit will, so that errors that concern all methods are raised before the first fit.

    A missing system or device that only some methods need is reported in their rows. Returns the task.
    """
    failure: BNNError | None = None
    for name in dict.fromkeys(method.ppl for method in methods.values()):
        try:
            with system(name).session("float64" if device == "cpu" else "float32", device):
                pass
        except (MissingFrameworkError, DeviceError) as error:
            failure = failure or error
            continue
        spoken = written_in(model, x, y, name)
        chosen = system(name if spoken == "language" else spoken)
        with chosen.session("float64", "cpu"):
            program = Program.of(
                chosen,
                model,
                map_data(chosen.asarray, x),
                chosen.asarray(y.astype(float)),
                language=spoken == "language",
                observed=observed,
            )
            if program.likelihood.task == "regression":
                return "regression"
            classes = program.classes(y)
        checks.check_labels(y, classes)
        if (y_test != np.floor(y_test)).any() or y_test.min() < 0 or y_test.max() >= classes:
            raise InputError.of(
                "test y",
                f"labels 0..{classes - 1}",
                f"values from {y_test.min()} to {y_test.max()}",
                "the labels of training, or a model with as many classes",
            )
        return "classification"
    assert failure is not None
    raise failure


@dataclass
class _Run:
    """The records so far, and the table and files made from them."""

    x_test: Any
    y_test: np.ndarray
    reference: str | None
    data: dict[str, Any]
    folder: Path | None
    asked: tuple[str, ...] = ()
    records: dict[str, Record] = field(default_factory=dict)
    _written: stored.Folder | None = None
    _gaps: dict[str, dict[str, float] | str] = field(default_factory=dict)

    def clear(self, names: Mapping[str, Any]) -> None:
        if self.folder is not None:
            for file in sorted(file_names(names)):
                (self.folder / file).unlink(missing_ok=True)

    def add(self, record: Record) -> None:
        self.records[record.name] = record
        if self.folder is None:
            return
        found = self.comparison()
        if self._written is None:
            self._written = stored.Folder(self.folder)
            write_test_rows(self._written, self.x_test, self.y_test)
        if record.tree is not None:
            write_method_tree(self._written, record.name, record.tree)
        if record.prediction is not None:
            write_prediction(self._written, found, record.name)
        write_table(self.folder, found.table)
        write_words(self._written, found)

    def interrupted(self, during: str) -> ComparisonInterrupted:
        partial = self.comparison()
        done = ", ".join(partial.posteriors) or "none"
        where = (
            "in the `partial` of this exception"
            if self.folder is None
            else f"in {self.folder} (comparison.csv and one .nc file each; Comparison.load reads it again)"
            if partial.posteriors
            else "nowhere, as nothing was finished"
        )
        return ComparisonInterrupted(
            f"interrupted during {during!r}; finished: {done}; kept {where}", partial
        )

    def not_written(self, error: OSError) -> ComparisonNotWrittenError:
        partial = self.comparison()
        said = message(
            f"room to write to in {self.folder}",
            reason(error),
            "making room, or another folder: the `partial` of this exception has all that had finished "
            f"({', '.join(partial.posteriors) or 'nothing'}), and partial.save(folder) writes it",
        )
        return ComparisonNotWrittenError(f"out: {said}", partial)

    def comparison(self) -> Comparison:
        table, notes = self.table()
        records = self.records

        def held(attribute: str) -> dict[str, Any]:
            found = {name: getattr(record, attribute) for name, record in records.items()}
            return {name: value for name, value in found.items() if value is not None}

        return Comparison(
            table=table,
            posteriors=held("posterior"),
            predictions=held("prediction"),
            trees=held("tree"),
            diagnoses=held("diagnosis"),
            reference=self.reference,
            notes=notes,
            data=self.data,
            test_inputs=self.x_test,
            test_targets=self.y_test,
            failures={name: record.failure for name, record in records.items() if record.failure},
            missing=tuple(name for name in self.asked if name not in records),
        )

    def table(self) -> tuple[pd.DataFrame, dict[tuple[str, str], str]]:
        import pandas as pd

        others = CLASSIFICATION_SCORES if self.data["task"] == "regression" else REGRESSION_SCORES
        columns = [name for name in COLUMNS if name not in others]
        if not any("concordance" in record.figures for record in self.records.values()):
            columns = [name for name in columns if name != "concordance"]
        notes = {
            (name, column): note
            for name, record in self.records.items()
            for column, note in record.notes.items()
        }
        rows = {}
        for name, record in self.records.items():
            rows[name] = {column: "" if column in WORDS else math.nan for column in columns}
            rows[name] |= {"ppl": record.ppl, "failure": record.failure}
            rows[name] |= {
                column: value
                for column, value in record.figures.items()
                if column in columns and value is not None
            }
        self._rank(rows, notes)
        self._mark_reference(rows)
        self._measure_gaps(rows, notes)
        table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
        for column in columns:
            table[column] = table[column].astype(object if column in WORDS else float)
        table.index.name = "method"
        return table, notes

    def _mark_reference(self, rows: dict[str, dict[str, Any]]) -> None:
        if self.reference not in rows:
            return
        row = rows[self.reference]
        if row["failure"]:
            return
        row["reference"] = standing(row)

    def _rank(self, rows: dict[str, dict[str, Any]], notes: dict[tuple[str, str], str]) -> None:
        """ArviZ's ranking and stacking weights of the methods for which leave-one-out is defined."""
        results = {name: record.elpd for name, record in self.records.items() if record.elpd is not None}
        if not results:
            return
        import arviz_stats

        try:
            with _said() as said:
                ranking = arviz_stats.compare(  # pyright: ignore[reportPrivateImportUsage]
                    results, method="stacking", round_to="none"
                )
        except Warning:
            raise
        except Exception as error:
            said, ranking = [f"the comparison failed: {reason(error)}"], None
        for name in results:
            if ranking is not None:
                rows[name]["loo_rank"] = float(ranking.loc[name, "rank"])
                rows[name]["loo_weight"] = float(ranking.loc[name, "weight"])
            if said:
                notes[name, "loo_weight"] = "ArviZ: " + " ".join(said)

    def _measure_gaps(self, rows: dict[str, dict[str, Any]], notes: dict[tuple[str, str], str]) -> None:
        columns = ("gap_mean", "gap_sd_ratio", "gap_mean_floor", "gap_sd_floor")
        record = None if self.reference is None else self.records.get(self.reference)
        if record is None or record.prediction is None:
            if self.reference is None:
                note = "No reference was named."
            elif record is None:
                note = f"The reference, {self.reference}, has not been fitted."
            else:
                note = f"The reference, {self.reference}, failed."
            notes |= {(name, "gap_mean"): note for name in rows if not rows[name]["failure"]}
            return
        floor = self._gap(record.name, record)
        for name, row in rows.items():
            prediction = self.records[name].prediction
            if prediction is None:
                continue
            if isinstance(floor, str):
                notes[name, "gap_mean_floor"] = floor
            else:
                row[columns[2]], row[columns[3]] = floor["mean_gap"], floor["sd_ratio"]
            if name == self.reference:
                notes[name, "gap_mean"] = "The reference has no gap to itself."
                continue
            gap = self._gap(name, record)
            if isinstance(gap, str):
                notes[name, "gap_mean"] = gap
            else:
                row[columns[0]], row[columns[1]] = gap["mean_gap"], gap["sd_ratio"]

    def _gap(self, name: str, reference: Record) -> dict[str, float] | str:
        """The gap of a method, or for the reference itself its noise floor; a sentence if there is none."""
        if name not in self._gaps:
            target = reference.prediction
            assert target is not None
            assert reference.posterior is not None
            try:
                if name == reference.name:
                    groups = chain_of_draws(reference.posterior, target)
                    self._gaps[name] = scores.noise_floor(target, groups)
                else:
                    prediction = self.records[name].prediction
                    assert prediction is not None
                    self._gaps[name] = scores.fidelity(prediction, target)
            except (InputError, UnsupportedError) as error:
                self._gaps[name] = f"{type(error).__name__}: {error}"
        return self._gaps[name]


@contextmanager
def _said() -> Iterator[list[str]]:
    """Collect ArviZ's warnings for the notes of the table, once each; other warnings pass through."""
    said: list[str] = []
    with recorded() as caught:
        yield said
    for warning in caught:
        if issubclass(warning.category, UserWarning | RuntimeWarning):
            text = " ".join(str(warning.message).split())
            if text not in said:
                said.append(text)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
