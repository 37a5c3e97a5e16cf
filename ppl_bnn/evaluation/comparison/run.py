"""Fits of one model by several methods, one after the other, each saved as soon as it ends."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn import references
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.protocol import SYSTEMS, Model, resolve_device
from ppl_bnn.backends.systems import system, written_in
from ppl_bnn.core import checks, stored
from ppl_bnn.core.arrays import map_data, row_count
from ppl_bnn.core.errors import (
    BNNError,
    DeviceError,
    InputError,
    Interrupted,
    MissingFrameworkError,
    check_known,
)
from ppl_bnn.core.files import writable
from ppl_bnn.core.names import LONGEST_FILE, clean, clean_all
from ppl_bnn.core.progress import Progress, resolve
from ppl_bnn.core.settings import whole
from ppl_bnn.evaluation.comparison import folder as files
from ppl_bnn.evaluation.comparison.comparison import Comparison, file_names
from ppl_bnn.evaluation.comparison.record import Record, fitted, reason, stored_record
from ppl_bnn.evaluation.comparison.table import table_of
from ppl_bnn.evaluation.outside.outside import Outside
from ppl_bnn.inference.method import Method
from ppl_bnn.references.reference import Reference


class ComparisonInterrupted(Interrupted[Comparison]):
    """Raised on Ctrl-C during `compare`. `partial` is the `Comparison` of the methods that had finished."""


def compare(
    model: Model,
    train: tuple[Any, Any],
    test: tuple[Any, Any],
    methods: Mapping[str, Method | Outside],
    *,
    reference: str | Reference | None = None,
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
    finished: Callable[[Comparison], Any] | None = None,
) -> Comparison:
    """Fit `model` to `train` by each of `methods`, and score the predictions of `test`.

    Parameters
    ----------
    model : Model
        The model. A free keyword-only parameter `classes` is set from `class_names`, else from the training labels.
    train, test : tuple
        (x, y) in original units.
    methods : mapping of str to Method or Outside
        Name -> method, or estimator from outside the library, fitted in this order, all with the same seed. A name is
        also a file name.
    reference : str or Reference, optional
        Name of the method whose posterior the gaps of the others are measured against; or a stored reference posterior
        or its name (`bnn.references`), whose training and test rows `train` and `test` then have to be.
    seed : int
        Seed of all fits.
    device : str
        "auto", "cpu" or "cuda[:i]".
    progress : bool or Progress, optional
        Whether and where to report progress.
    standardise : bool
        Whether to fit on standardised inputs and targets. Scores are always in original units.
    out : str or PathLike, optional
        A folder for `Comparison.load`, written after each method. Existing files of a comparison are removed first.
    feature_names, class_names : sequence of str, optional
        Names of the columns of x, and of the classes.
    target_name : str, optional
        Name of the target.
    observed : str, optional
        The observed site of a plain NumPyro or Pyro model.
    card : mapping, optional
        Further information on the data (name, licence, ...), kept in `Comparison.data`.
    finished : callable, optional
        Called after each method with the comparison so far. The last row of its table is that of the method; ranks and
        weights are there after the last one.

    Returns
    -------
    Comparison
        The table, the posteriors and the predictions, by method.

    Raises
    ------
    InputError, UnknownNameError, ModelError, DeviceError
        Errors that concern all methods; raised before the first fit.
    ComparisonInterrupted
        Ctrl-C. Its `partial` holds the methods that had finished.
    ComparisonNotWrittenError
        `out` can no longer be written, for example because the disk is full. It also has a `partial`.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> train, test = ((table.x[rows], table.y[rows]) for rows in table.split(seed=0))
    >>> methods = {"laplace": bnn.Laplace(), "map": bnn.MAP()}
    >>> result = bnn.compare(model, train, test, methods, reference="laplace", standardise=True)
    >>> result.table[["rmse", "coverage_90", "gap_mean"]].shape
    (2, 3)
    """
    methods = _checked_methods(methods)
    feature_names, class_names = clean_all(feature_names), clean_all(class_names)
    card = {name: clean(value) if isinstance(value, str) else value for name, value in (card or {}).items()}
    certified = _stored_reference(reference, methods)
    check_reference(reference, methods)
    reference = reference if certified is None else certified.name
    if whole(0, 2**31 - 1)(seed):
        raise InputError.of("seed", "a whole number from 0 to 2**31 - 1", repr(seed), "seed=0")
    resolve_device(device)
    got, advice = type(model).__name__, "the model itself, not its name"
    InputError.check(callable(model), "model", "a function (x, y=None)", got, advice)
    x, y = _checked_rows("train", train)
    x_test, y_test = _checked_rows("test", test, like=(x, y))
    columns = None if isinstance(x, Mapping) or x.ndim != 2 else x.shape[1]
    if feature_names is not None and columns not in (None, len(feature_names)):
        expected = f"{columns} names, one per column of x"
        raise InputError.of("feature_names", expected, f"{len(feature_names)}", "the same columns")
    model = bind_classes(model, y, class_names)
    folder = None if out is None else stored.Folder(writable(out))
    ppls = [method.ppl for method in methods.values() if isinstance(method, Method)] or list(SYSTEMS)
    program = _check_model(model, x, y, y_test, ppls, device, observed)
    if certified is not None:
        _check_same(certified, program, (x, y), (x_test, y_test), standardise)
    data = {
        "task": program.likelihood.task,
        "train_rows": len(y),
        "test_rows": len(y_test),
        "target_name": "y" if target_name is None else clean(target_name) or "y",
        "feature_names": feature_names,
        "class_names": class_names,
        "standardised": bool(standardise),
        "seed": int(seed),
        "train_hash": checks.data_hash(x, y),
        "test_hash": checks.data_hash(x_test, y_test),
        **card,
    }
    rows = tuple(methods) if certified is None else (certified.name, *methods)
    if folder is not None:
        for file in sorted(file_names(rows)):
            (folder.path / file).unlink(missing_ok=True)
    given = {"reference": reference, "data": data, "test_inputs": x_test, "test_targets": y_test}
    run = _Run(rows, folder, given, finished)
    options: dict[str, Any] = {
        "seed": int(seed),
        "device": device,
        "progress": resolve(progress),
        "observed": observed,
        "standardise": standardise,
        "feature_names": feature_names,
        "class_names": class_names,
    }
    latest = run.comparison(ranked=False)
    try:
        if certified is not None:
            run.add(certified.name, stored_record(certified, program.likelihood, y_test))
        for name, method in methods.items():
            try:
                fit = functools.partial(method.fit, model, x, y, **options)
                record = fitted(fit, x_test, y_test, int(seed), device)
                record.ppl = record.ppl or method.ppl
                latest = run.add(name, record)
            except KeyboardInterrupt as error:
                raise run.interrupted(name) from error
        if folder is not None:
            files.write_figure(folder.path, latest)
    except OSError as error:
        raise run.not_written(error) from error
    return latest


def check_reference(reference: Any, methods: Mapping[str, Method | Outside]) -> None:
    """Refuse an estimator from outside as the reference."""
    outside = isinstance(reference, str) and isinstance(methods.get(reference), Outside)
    expected = "a method that approximates the posterior"
    InputError.check(not outside, "reference", expected, f"{reference}, from outside", "reference='nuts'")


def _stored_reference(
    reference: str | Reference | None, methods: Mapping[str, Method | Outside]
) -> Reference | None:
    """A stored reference, as it is or by its name; None without a reference, and for the name of a method."""
    if isinstance(reference, Reference):
        return reference
    if reference is None or reference in methods:
        return None
    check_known("reference", [reference], [*methods, *references.entries()])
    return references.load(reference)


def _check_same(
    reference: Reference, program: Program, train: tuple[Any, Any], test: tuple[Any, Any], standardise: bool
) -> None:
    """Refuse a comparison of another model, or of other rows, than those of a stored reference."""
    where, advice = f"reference {reference.name}", "reference.model(), reference.train and reference.test"
    InputError.check(not standardise, where, "standardise=False: its rows are standardised", "True", advice)
    for name, ours, theirs in (("training", train, reference.train), ("test", test, reference.test)):
        same = all(np.shape(a) == b.shape and np.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
        InputError.check(same, where, f"its {name} rows", "others", advice)
    sites = {name: site.size for name, site in program.sites.items()}
    InputError.check(
        sites == reference.card["sites"], where, f"sites {reference.card['sites']}", sites, advice
    )


def bind_classes(model: Model, y: np.ndarray, class_names: Sequence[str] | None = None) -> Model:
    """Set a model's free parameter `classes` to the number of `class_names`, else of the labels in `y` (0..K-1)."""
    parameter = inspect.signature(model).parameters.get("classes")
    bound = isinstance(model, functools.partial) and "classes" in model.keywords
    if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY or bound:
        return model
    count = len(np.unique(y)) if class_names is None else len(class_names)
    # A single class is reported as an error of the labels, not of a model with one class.
    checks.check_labels(y, max(count, 2))
    return functools.partial(model, classes=count)


def check_method(where: str, given: Any) -> None:
    """Refuse anything but an instance of a method."""
    if isinstance(given, type) and issubclass(given, Method):
        advice = f"{given.__name__}()"
        raise InputError.of(where, "an instance of a method", f"the class {given.__name__}", advice)
    if not isinstance(given, Method):
        raise InputError.of(where, "a method", repr(given), "bnn.NUTS()")


def check_row(where: str, given: Any) -> None:
    """Refuse anything but an instance of a method, or an estimator from outside."""
    estimator = callable(getattr(given, "fit", None)) and not isinstance(given, type | Method | Outside)
    got, advice = f"an estimator, {type(given).__name__}", f"bnn.Outside({type(given).__name__}())"
    InputError.check(not estimator, where, "a method, or one from outside", got, advice)
    if not isinstance(given, Outside):
        check_method(where, given)


def _checked_methods(methods: Mapping[str, Method | Outside]) -> dict[str, Method | Outside]:
    if not isinstance(methods, Mapping) or not methods:
        expected = "a dict of at least one name and method"
        raise InputError.of("methods", expected, repr(methods), "methods={'nuts': bnn.NUTS()}")
    for name, method in methods.items():
        check_row(f"methods[{name!r}]", method)
        # A name is used as a file name, and as the first cell of a row in a table that spreadsheets open.
        plain = isinstance(name, str) and clean(name) == name and name and name[0] not in ".=+-@"
        if not plain or len(name.encode()) > LONGEST_FILE or any(mark in name for mark in '/\\:*?"<>|'):
            raise InputError.of("methods", "names that can be file names", repr(name), "letters and digits")
    differ = len({name.casefold() for name in methods}) == len(methods)
    expected, advice = "names that differ in more than case", "names that are file names"
    InputError.check(differ, "methods", expected, ", ".join(methods), advice)
    return dict(methods)


def _checked_rows(name: str, rows: Any, like: tuple[Any, np.ndarray] | None = None) -> tuple[Any, np.ndarray]:
    pair = isinstance(rows, tuple | list) and len(rows) == 2
    InputError.check(pair, name, "a pair (x, y)", type(rows).__name__, f"{name}=(x, y)")
    try:
        x = checks.check_inputs(rows[0], None if like is None else checks.describe_inputs(like[0]))
        y = checks.check_targets(rows[1], row_count(x))
    except InputError as error:
        raise InputError(f"{name} {error}") from error
    if like is not None and y.shape[1:] != like[1].shape[1:]:
        expected = f"targets of shape (N, *{like[1].shape[1:]}) as in training"
        raise InputError.of(f"{name} y", expected, f"{y.shape}", "the same outputs")
    return x, y


def _check_model(
    model: Model, x: Any, y: np.ndarray, y_test: np.ndarray, ppls: list[str], device: str, observed: Any
) -> Program:
    """Trace the model once, so that errors common to all methods come before the first fit.

    A missing system or device that only some methods need is reported in their rows.
    """
    failure: BNNError | None = None
    for name in dict.fromkeys(ppls):
        try:
            with system(name).session("float64" if device == "cpu" else "float32", device):
                pass
        except (MissingFrameworkError, DeviceError) as error:
            failure = failure or error
            continue
        spoken = written_in(model, x, y, name)
        chosen = system(name if spoken == "language" else spoken)
        with chosen.session("float64", "cpu"):
            arrays = map_data(chosen.asarray, x), chosen.asarray(y.astype(float))
            language = spoken == "language"
            program = Program.of(chosen, model, *arrays, language=language, observed=observed)
            if program.likelihood.task == "regression":
                return program
            classes = program.classes(y)
        checks.check_labels(y, classes)
        if (y_test != np.floor(y_test)).any() or y_test.min() < 0 or y_test.max() >= classes:
            got = f"values from {y_test.min()} to {y_test.max()}"
            advice = "the labels of training, or a model with as many classes"
            raise InputError.of("test y", f"labels 0..{classes - 1}", got, advice)
        return program
    assert failure is not None
    raise failure


@dataclass
class _Run:
    """The records so far, and the comparison and the folder made of them; given: what the comparison has besides."""

    names: tuple[str, ...]
    folder: stored.Folder | None
    given: dict[str, Any]
    finished: Callable[[Comparison], Any] | None = None
    records: dict[str, Record] = field(default_factory=dict)

    def comparison(self, *, ranked: bool = True) -> Comparison:
        given, records = self.given, self.records
        table, notes = table_of(records, given["reference"], given["data"]["task"], ranked=ranked)

        def present(part: str) -> dict[str, Any]:
            parts = {name: getattr(each, part) for name, each in records.items()}
            return {name: value for name, value in parts.items() if value is not None}

        return Comparison(
            table=table,
            posteriors=present("posterior"),
            predictions=present("prediction"),
            trees=present("tree"),
            diagnoses=present("diagnosis"),
            fits=present("fit"),
            notes=notes,
            failures={name: each.failure for name, each in records.items() if each.failure},
            missing=tuple(name for name in self.names if name not in records),
            **given,
        )

    def add(self, name: str, record: Record) -> Comparison:
        """Add a method, and write its files and the table; the methods are ranked when the last one has finished."""
        self.records[name] = record
        latest = self.comparison(ranked=len(self.records) == len(self.names))
        if self.folder is not None:
            files.write_parts(self.folder, latest)
        if self.finished is not None:
            self.finished(latest)
        return latest

    def interrupted(self, during: str) -> ComparisonInterrupted:
        partial = self.comparison()
        if self.folder is not None and self.records:
            with contextlib.suppress(OSError):
                files.write_parts(self.folder, partial)
        done = ", ".join(partial.predictions) or "none"
        if self.folder is None:
            place = "in the `partial` of this exception"
        elif partial.predictions:
            what = "comparison.csv and one .nc file each; Comparison.load reads it again"
            place = f"in {self.folder.path} ({what})"
        else:
            place = "nowhere, as nothing was finished"
        text = f"interrupted during {during!r}; finished: {done}; kept {place}"
        return ComparisonInterrupted(text, partial)

    def not_written(self, error: OSError) -> files.ComparisonNotWrittenError:
        partial = self.comparison()
        advice = (
            "making room, or another folder: the `partial` of this exception has all that had finished "
            f"({', '.join(partial.predictions) or 'nothing'}), and partial.save(folder) writes it"
        )
        assert self.folder is not None
        text = BNNError.of("out", f"room to write to in {self.folder.path}", reason(error), advice)
        return files.ComparisonNotWrittenError(str(text), partial)
