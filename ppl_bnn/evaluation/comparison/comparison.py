"""Fits side by side: the same model and rows by several methods, and the table of what each gives and costs.

`compare` fits, predicts, scores and diagnoses one method after the other, and writes what is finished at once. A
method that fails is a row with its reason. `COLUMNS` says what each column of the table means.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
    DamagedError,
    DeviceError,
    InputError,
    MissingFrameworkError,
    UnsupportedError,
    message,
    unknown_name,
)
from ppl_bnn.core.files import left_by_a_kill, staged, staged_within, write_arrays, write_tree, write_whole
from ppl_bnn.core.memory import peak_memory
from ppl_bnn.core.names import LONGEST_FILE, clean, clean_all, for_spreadsheet
from ppl_bnn.core.plain_values import encoded
from ppl_bnn.core.progress import Progress, resolve
from ppl_bnn.core.warning_filters import ignored, recorded
from ppl_bnn.inference.method import Method
from ppl_bnn.posterior.posterior import FitInfo, Posterior
from ppl_bnn.posterior.storage import INFO
from ppl_bnn.prediction import scores
from ppl_bnn.prediction.prediction import Prediction

if TYPE_CHECKING:
    import pandas as pd

    from ppl_bnn.diagnostics.diagnose import Diagnosis

COLUMNS: dict[str, str] = {
    "reference": "'reference' where the gaps are measured against this method, with what keeps it from being one: "
    "'(not converged)', '(converged per mode only)', '(of another target)'",
    "kind": "'chains', 'iid' (an approximation that draws independently) or 'point'",
    "ppl": "the system that ran the method",
    "target": "what was fitted where it is not the posterior of the model: tempered, an approximate objective, stacked",
    "log_score": "mean over test rows of log p(y) under the predictive mixture; nats, original units; larger is better",
    "log_score_se": "standard error of log_score over test rows",
    "rmse": "root mean squared error of the predictive mean; units of y",
    "crps": "continuous ranked probability score; units of y; smaller is better",
    "coverage_90": "share of test targets in the central 90 % interval",
    "width_90": "mean width of the central 90 % interval; units of y",
    "concordance": "share of pairs of rows of known order that medians have in that order (Harrell's C); where rows "
    "may be censored",
    "accuracy": "share of test rows whose most probable class is the label",
    "brier": "Brier score summed over all classes, from 0 to 2; smaller is better",
    "ece": "expected calibration error of the most probable class, 15 bins",
    "elpd_loo": "PSIS-LOO expected log predictive density of the training rows, summed, the draws taken at their word; "
    "nats, original units",
    "elpd_loo_se": "standard error of elpd_loo",
    "elpd_loo_corrected": "the same with fresh draws of an approximation weighted by p / q; blank where k_hat or "
    "pareto_k_corrected exceeds 0.7",
    "pareto_k_corrected": "largest Pareto k over training rows for elpd_loo_corrected",
    "pareto_k_loo": "largest Pareto k of PSIS-LOO over training rows; above 0.7 elpd_loo is not to be relied on",
    "loo_rank": "rank by elpd_loo from arviz_stats.compare; 0 is best",
    "loo_weight": "stacking weight from arviz_stats.compare",
    "k_hat": "Pareto k-hat of p(w, D) / q(w): the approximation as an importance proposal",
    "r_hat": "largest rank-normalised split R-hat in function space (chains only)",
    "ess_min": "smallest effective sample size in function space (chains only)",
    "converged": "chains: in function space, 'per mode' where each by itself has but they disagree, 'in doubt' where "
    "R-hat and ESS are good but the sampler complained; else whether the optimisation settled, blank where the method "
    "does not say",
    "gap_mean": "error of the mean function against the reference; reference (epistemic) standard deviations",
    "gap_sd_ratio": "epistemic standard deviation divided by that of the reference, geometric mean",
    "gap_mean_floor": "gap_mean between two halves of the reference's draws: what sampling noise alone amounts to",
    "gap_sd_floor": "gap_sd_ratio between two halves of the reference's draws",
    "compile_seconds": "wall time of compilation, as far as the method can tell it apart",
    "run_seconds": "wall time of the fit without compilation",
    "predict_seconds": "wall time of the first prediction of the test rows, its compilation included",
    "gradient_evaluations": "gradients of the log joint over all rows (a mini-batch counts as its share)",
    "peak_memory": "the most memory that the process held while the method was fitted, predicted and was judged, in MB "
    "of 10^6 bytes: what frameworks and earlier methods hold included, processes of single chains and the memory of a "
    "GPU not; blank where the system does not say",
    "parameters": "how many unconstrained numbers the method infers",
    "failure": "why the method gave no posterior; blank where it did",
}
_REGRESSION = ("rmse", "crps", "coverage_90", "width_90", "concordance")
# What a bound on the value says nothing about.
_OF_VALUES = ("rmse", "crps", "coverage_90")
_CLASSIFICATION = ("accuracy", "brier", "ece")
# Draws x rows in each group of a tree: half a gigabyte. A chain keeps at least so many draws whatever the rows.
MOST_VALUES = 2**26
FEWEST_DRAWS = 100
_WORDS = ("reference", "kind", "ppl", "target", "converged", "failure")
# What lies in the folder of a comparison beside its trees, its table and its figure, so that it can be read again.
# 2: checksums of all files.
KIND, FORMAT = "ppl_bnn comparison", 2
FIGURE = "figure.png"
MANIFEST, TEST_ROWS, PREDICTION = "comparison.json", "comparison.safetensors", ".prediction.safetensors"
_SCHEMA = {
    "reference": (str, None),
    "data": {str: object},
    "columns": [str],
    "rows": [[(str, float)]],
    "notes": [[str]],
    "failures": {str: str},
    "missing?": [str],
    "fits": {str: {"info": INFO, "shape": [int]}},
    "diagnoses": {
        str: {"verdict": str, "reasons": [str], "advice": [str], "figures": {str: object}, "subject": str}
    },
    "trees": [str],
    "predictions": [str],
}
_OF_PREDICTION = {"family": str, "class_names": ([(str, float, bool)], None), "censored": bool}
_READER = stored.Reader("folder", "a whole comparison", "computing it once more")


class ComparisonInterrupted(KeyboardInterrupt):
    """Ctrl-C during `compare`. `partial` is the `Comparison` of the methods that had finished."""

    def __init__(self, text: str, partial: Comparison):
        super().__init__(text)
        self.partial = partial


class ComparisonNotWrittenError(BNNError, OSError):
    """A folder of `compare` that cannot be written any more, such as one on a full disk.

    `partial` is the `Comparison` of all that had finished, which can be saved elsewhere.
    """

    def __init__(self, text: str, partial: Comparison):
        super().__init__(text)
        self.partial = partial


@dataclass(frozen=True)
class Fit:
    """How a posterior came about, without the posterior itself. shape: its chains and draws."""

    info: FitInfo
    shape: tuple[int, int]


@dataclass(eq=False)
class Comparison:
    """Fits side by side.

    table: a pandas DataFrame, one row per method in the order given, columns as in `COLUMNS`; NaN or "" is a blank.
    notes: (method, column) -> one sentence, for each blank that needs a reason and each number that needs a warning.
    posteriors, predictions (at the test rows), trees, diagnoses: by method, those that finished. failures: method ->
    reason.
    data: what was compared on (rows, names, units, hashes). test_inputs, test_targets: the test rows, original units.
    fits: method -> how its posterior came about, which is known where the posterior is not at hand.
    drawn: of a comparison that was read from a folder, the predictions of its pictures at the inputs `drawn_at`.
    missing: the methods that were asked for and not fitted, of a comparison that was interrupted or still goes on.
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
    fits: dict[str, Fit] = field(default_factory=dict)
    drawn: dict[str, Prediction] = field(default_factory=dict)
    drawn_at: np.ndarray | None = None
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.fits = {name: Fit(each.info, each.shape) for name, each in self.posteriors.items()} | self.fits

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Comparison:
        """What `compare(..., out=folder)` or `save(folder)` kept, also of a run that is not finished.

        Everything is there but `posteriors`: a model is code, and is in no folder (`Posterior.save` keeps single ones).
        Table, notes, predictions and trees are the same to the last bit, and so is a report of them.

        Raises
        ------
        InputError: no folder of a comparison. DamagedError: a damaged one. UnsupportedError: one of a newer format.
        A folder that an older version wrote is read with a UserWarning, since it has no checksums.
        """
        words = read_manifest(folder)
        if words is None:
            left = left_by_a_kill(Path(folder))
            advice = "the `out` of `compare`"
            if left is not None:
                advice = f"{left}, which a save that was killed has left"
            raise InputError(
                "folder: " + message("the folder of a comparison", f"{folder}, without {MANIFEST}", advice)
            )
        try:
            return _read(Path(folder), words)
        except DamagedError:
            raise
        # Whatever a part raises whose values do not go together.
        except Exception as error:
            raise _READER.damaged(Path(folder), reason(error)) from error

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.table.index)}; reference={self.reference!r})"

    @property
    def task(self) -> str:
        """ "regression" or "classification"."""
        return self.data["task"]

    def pointwise_log_scores(self) -> dict[str, np.ndarray]:
        """Log score of each test row by method, (N,): what paired differences are made of."""
        return {
            name: np.asarray(scores.log_score(prediction, self.test_targets, pointwise=True))
            for name, prediction in self.predictions.items()
        }

    def summary(self) -> str:
        """What the table means, in three sentences."""
        from ppl_bnn.evaluation.comparison.summary import sentences

        return sentences(self)

    def figure(self) -> Any:
        """Predictions against truth, one panel per method: a matplotlib Figure."""
        from ppl_bnn.evaluation.comparison.figures import predictions_figure

        return predictions_figure(self)

    def markdown(self) -> str:
        """The table, the three sentences and the notes, in Markdown."""
        header = ["method", *self.table.columns]
        lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for name, row in self.table.iterrows():
            cells = [str(name), *(_cell(value) for value in row)]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts = ["\n".join(lines), self.summary()]
        together: dict[tuple[str, str], list[str]] = {}
        for (name, column), note in self.notes.items():
            together.setdefault((name, note), []).append(column)
        if together:
            parts.append(
                "\n".join(f"- {name}, {', '.join(found)}: {note}" for (name, note), found in together.items())
            )
        return "\n\n".join(parts) + "\n"

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `<method>.nc` per tree, `comparison.csv`, `figure.png` and what `load` needs besides to `folder`, and
        give its path.

        All files appear together at the end: a save that fails or is interrupted leaves what was there before. All
        files of another comparison are replaced; whatever else is in the folder stays.

        Raises
        ------
        InputError: the folder cannot be written, or has files of these names and none of a comparison.
        """
        folder = Path(folder)
        try:
            with _staged(folder, self) as stage:
                written = stored.Folder(stage)
                _write_test_rows(written, self.test_inputs, self.test_targets)
                for name, tree in self.trees.items():
                    _write_tree(written, name, tree)
                for name in self.predictions:
                    _write_prediction(written, self, name)
                _write_table(stage, self.table)
                _write_figure(stage, self)
                _write_words(written, self)
        except OSError as error:
            raise InputError(
                "folder: "
                + message("a folder that can be written", f"{folder} ({reason(error)})", "another folder")
            ) from error
        return folder


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
    train, test
        (x, y) in original units; a model with a keyword-only parameter `classes` has it bound from `class_names` or
        else from the training labels.
    methods
        Name -> method, fitted in this order, all under the same seed. A name is also a file name.
    reference
        Name of the method whose posterior the others' gaps are measured against.
    standardise
        Fit on standardised inputs and targets; all scores are in original units all the same.
    out
        A folder: as soon as a method is done its tree goes to `<name>.nc`, its prediction to
        `<name>.prediction.safetensors`, the table to `comparison.csv` and all else that `Comparison.load` needs to
        `comparison.json`; a figure `figure.png` follows at the end. Files of those names that lie there from before are
        removed first, so that the folder tells of one run.
    card
        What else is known of the data (name, licence, ...), kept in `Comparison.data`.

    Raises
    ------
    InputError, UnknownNameError, ModelError, DeviceError: before the first fit, for what concerns all methods.
    ComparisonInterrupted: Ctrl-C; its `partial` holds what had finished. ComparisonNotWrittenError: `out` cannot be
    written any more, as where a disk is full; its `partial` holds what had finished, too.
    """
    methods = _checked_methods(methods)
    feature_names, class_names = clean_all(feature_names), clean_all(class_names)
    target_name = None if target_name is None else clean(target_name)
    card = {name: clean(value) if isinstance(value, str) else value for name, value in (card or {}).items()}
    if reference is not None and reference not in methods:
        raise unknown_name("reference", reference, methods)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**31:
        raise InputError("seed: " + message("a whole number from 0 to 2**31 - 1", repr(seed), "seed=0"))
    resolve_device(device)
    if not callable(model):
        raise InputError(
            "model: "
            + message("a function (x, y=None)", type(model).__name__, "the model itself, not its name")
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
            _write_figure(folder, result)
        except OSError as error:
            raise run.not_written(error) from error
    return result


def bind_classes(model: Model, y: np.ndarray, class_names: Sequence[str] | None = None) -> Model:
    """`model` with its keyword-only parameter `classes`, if it has one that is free, bound to the number of classes.

    The number is that of `class_names`, or else of the different labels in `y`, which must be 0..K-1.
    """
    parameter = inspect.signature(model).parameters.get("classes")
    bound = isinstance(model, functools.partial) and "classes" in model.keywords
    if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY or bound:
        return model
    count = len(np.unique(y)) if class_names is None else len(class_names)
    # One class only is a complaint about the labels, not about a model of one class.
    checks.check_labels(y, max(count, 2))
    return functools.partial(model, classes=count)


# --- before the first fit ---------------------------------------------------------------------------------


def _checked_methods(methods: Mapping[str, Method]) -> dict[str, Method]:
    if not isinstance(methods, Mapping) or not methods:
        raise InputError(
            "methods: "
            + message("a dict of at least one name and method", repr(methods), "methods={'nuts': bnn.NUTS()}")
        )
    for name, method in methods.items():
        if isinstance(method, type) and issubclass(method, Method):
            raise InputError(
                f"methods[{name!r}]: "
                + message("an instance of a method", f"the class {method.__name__}", f"{method.__name__}()")
            )
        if not isinstance(method, Method):
            raise InputError(f"methods[{name!r}]: " + message("a method", repr(method), "bnn.NUTS()"))
        # A name is a file, and the first cell of a line of a table that spreadsheets open.
        plain = isinstance(name, str) and clean(name) == name and name and name[0] not in ".=+-@"
        if not plain or len(name.encode()) > LONGEST_FILE or any(mark in name for mark in '/\\:*?"<>|'):
            raise InputError(
                "methods: " + message("names that can be file names", repr(name), "letters and digits")
            )
    folded = [name.casefold() for name in methods]
    if len(set(folded)) < len(folded):
        raise InputError(
            "methods: "
            + message("names that differ in more than case", ", ".join(methods), "names that are file names")
        )
    return dict(methods)


def _checked_rows(name: str, rows: Any, like: tuple[Any, np.ndarray] | None = None) -> tuple[Any, np.ndarray]:
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise InputError(f"{name}: " + message("a pair (x, y)", type(rows).__name__, f"{name}=(x, y)"))
    try:
        x = checks.check_inputs(rows[0], None if like is None else checks.describe_inputs(like[0]))
        y = checks.check_targets(rows[1], row_count(x))
    except InputError as error:
        raise InputError(f"{name} {error}") from error
    if like is not None and y.shape[1:] != like[1].shape[1:]:
        raise InputError(
            f"{name} y: "
            + message(
                f"targets of shape (N, *{like[1].shape[1:]}) as in training",
                f"{y.shape}",
                "the same outputs",
            )
        )
    return x, y


def _check_names(x: Any, feature_names: Sequence[str] | None) -> None:
    if feature_names is None or isinstance(x, Mapping) or x.ndim != 2:
        return
    if len(feature_names) != x.shape[1]:
        raise InputError(
            "feature_names: "
            + message(f"{x.shape[1]} names, one per column of x", f"{len(feature_names)}", "the same columns")
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
    """Trace the model once as every fit will, so that what is wrong for all methods is said before the first.

    A system or a device that only some methods lack is left to their rows. Gives the task.
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
            raise InputError(
                "test y: "
                + message(
                    f"labels 0..{classes - 1}",
                    f"values from {y_test.min()} to {y_test.max()}",
                    "the labels of training, or a model with as many classes",
                )
            )
        return "classification"
    assert failure is not None
    raise failure


# --- one method -------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What is known of one method, as `fitted` finds it.

    figures, notes: column of `COLUMNS` -> value, or a sentence about it. pointwise: log score of each test row, (N,).
    tree: what leave-one-out was computed from. failure: why there is none of all this, "" where there is.
    """

    name: str
    ppl: str = ""
    posterior: Posterior | None = None
    prediction: Prediction | None = None
    tree: Any = None
    diagnosis: Any = None
    elpd: Any = None
    figures: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    pointwise: np.ndarray | None = None
    failure: str = ""


def fitted(
    name: str, fit: Callable[[], Posterior], x_test: Any, y_test: np.ndarray, seed: int, device: str
) -> Record:
    """Everything about one method that needs no other; what fails in fit or prediction is the row's reason."""
    with peak_memory() as peak:
        record = _fitted(name, fit, x_test, y_test, seed, device)
    record.figures["peak_memory"] = peak()
    return record


def _fitted(
    name: str, fit: Callable[[], Posterior], x_test: Any, y_test: np.ndarray, seed: int, device: str
) -> Record:
    record = Record(name)
    try:
        record.posterior = posterior = fit()
        started = time.perf_counter()
        record.prediction = posterior.predict(x_test, seed=seed, device=device)
        seconds = time.perf_counter() - started
        pointwise = record.pointwise = np.asarray(scores.log_score(record.prediction, y_test, pointwise=True))
        record.figures = {
            **scores.scores_of(record.prediction, y_test),
            "kind": posterior.kind,
            "target": posterior.target,
            "log_score_se": _standard_error(pointwise),
            "compile_seconds": posterior.info.compile_seconds,
            "run_seconds": posterior.info.run_seconds,
            "predict_seconds": seconds,
            "gradient_evaluations": posterior.info.gradient_evaluations,
            "parameters": float(posterior._with(lambda problem: problem.program.parameter_count)),
        }
    except Warning:
        # A caller who has turned warnings into errors wants to see them.
        raise
    except Exception as error:
        return Record(name, failure=reason(error))
    record.ppl = posterior.info.ppl
    if posterior.weights is not None:
        record.notes["target"] = _stacked(posterior)
    if posterior.info.warnings:
        record.notes["run_seconds"] = " ".join(f"{said.rstrip('.')}." for said in posterior.info.warnings)
    if posterior.info.gradient_evaluations is None:
        record.notes["gradient_evaluations"] = f"{posterior.info.method} does not count its gradients."
    if len(y_test) < 2:
        record.notes["log_score_se"] = "One test row has no standard error."
    if record.prediction.censored and not set(_OF_VALUES) <= set(record.figures):
        count = int(np.count_nonzero(y_test[:, 1] != 1.0))
        note = (
            f"Of {count} of {len(y_test)} test rows a bound is known and not the value: they were censored."
        )
        record.notes |= dict.fromkeys(_OF_VALUES, note)
    for part, title, columns in _PARTS:
        try:
            part(record, x_test)
        except Warning:
            raise
        except Exception as error:
            record.notes |= dict.fromkeys(columns, f"{title} failed: {reason(error)}")
    return record


def chain_of_draws(posterior: Posterior, prediction: Prediction) -> np.ndarray | None:
    """The chain of each draw of a prediction, (S,); None where it is not made of all draws of the posterior."""
    chains, draws = posterior.shape
    return np.repeat(np.arange(chains), draws) if prediction.draws == chains * draws else None


def standing(row: Mapping[str, Any]) -> str:
    """What the row of the reference says of it: "reference", with what keeps it from being one."""
    doubt = {
        "yes": " (of another target)" if row.get("target") else "",
        "no": " (not converged)",
        "per mode": " (converged per mode only)",
        "in doubt": " (in doubt)",
    }
    return "reference" + (
        doubt.get(row.get("converged", ""), " (convergence not known)")
        if row["kind"] == "chains"
        else " (an approximation)"
    )


def _stacked(posterior: Posterior) -> str:
    """A sentence on the weights of a stacked posterior."""
    weights, figures = posterior.weights, posterior.info.figures
    assert weights is not None
    gain = figures.get("stacking_gain", math.nan)
    gained = (
        ""
        if math.isnan(gain)
        else f", {gain:.3g} nats per row above equal weights on the rows that chose them"
    )
    return (
        f"{len(weights)} parts with weights from {weights.min():.3f} to {weights.max():.3f}, chosen by what each "
        f"predicts{gained}: not the posterior."
    )


def _export(record: Record, x_test: Any) -> None:
    from ppl_bnn.posterior.export import posterior_datatree

    posterior = record.posterior
    assert posterior is not None
    chains, draws = posterior.shape
    rows = row_count(posterior.inputs) + row_count(x_test)
    kept = min(chains * draws, max(MOST_VALUES // rows, FEWEST_DRAWS * chains))
    if kept < chains * draws:
        record.notes["elpd_loo"] = (
            f"Of {chains * draws} draws the tree holds {kept // chains * chains}, evenly spaced, as {rows} rows "
            "would make it too large; leave-one-out uses these, everything else uses all."
        )
    record.tree = posterior_datatree(posterior, x_test, draws=None if kept == chains * draws else kept)


def _diagnose(record: Record, x_test: Any) -> None:
    from ppl_bnn.diagnostics.diagnose import CONVERGED, NOT_CONVERGED, PER_MODE, diagnose

    posterior = record.posterior
    assert posterior is not None
    record.diagnosis = diagnosis = diagnose(posterior)
    found = diagnosis.figures
    if posterior.kind == "chains":
        record.figures["r_hat"] = found["rhat"]
        record.figures["ess_min"] = min(found["ess_bulk"], found["ess_tail"])
        record.figures["converged"] = {CONVERGED: "yes", PER_MODE: "per mode", NOT_CONVERGED: "no"}.get(
            diagnosis.verdict, "in doubt"
        )
    elif "converged" in posterior.info.figures:
        record.figures["converged"] = "yes" if posterior.info.figures["converged"] else "no"
    if record.figures.get("converged") in ("no", "per mode", "in doubt"):
        record.notes["converged"] = "; ".join(diagnosis.reasons) + "."
        # The reasons contain the warnings of the fit; nobody needs to read them twice.
        record.notes.pop("run_seconds", None)
    record.figures["k_hat"] = found.get("pareto_k")
    if posterior.kind == "iid" and "pareto_k" not in found:
        record.notes["k_hat"] = "The approximation has no density."


def _leave_one_out(record: Record, x_test: Any) -> None:
    from ppl_bnn.diagnostics.importance import K_LIMIT, leave_one_out

    if record.tree is None:
        raise InputError("there is no tree to leave a row out of")
    assert record.posterior is not None
    loo = leave_one_out(record.posterior, record.tree)
    record.elpd = loo.elpd_data
    if loo.reason:
        record.notes |= dict.fromkeys(_LOO, loo.reason[0].upper() + loo.reason[1:] + ".")
        return
    record.figures |= {
        "elpd_loo": loo.elpd,
        "elpd_loo_se": loo.se,
        "pareto_k_loo": loo.worst_k,
        "elpd_loo_corrected": loo.corrected_elpd,
        "pareto_k_corrected": loo.corrected_worst_k,
    }
    if loo.share_above > 0.0:
        record.notes["pareto_k_loo"] = (
            f"Pareto k is above {K_LIMIT} in {loo.share_above:.1%} of the training rows: "
            "elpd_loo and what is ranked by it are not to be relied on."
        )
    if loo.corrected_reason and record.figures["kind"] == "iid":
        said = loo.corrected_reason[0].upper() + loo.corrected_reason[1:] + "."
        record.notes["elpd_loo_corrected"] = said
        if loo.corrected_k is None:
            record.notes["pareto_k_corrected"] = said


_LOO = (
    "elpd_loo",
    "elpd_loo_se",
    "elpd_loo_corrected",
    "pareto_k_corrected",
    "pareto_k_loo",
    "loo_rank",
    "loo_weight",
)
_PARTS = (
    (_export, "The export to ArviZ", ("elpd_loo",)),
    (_diagnose, "The diagnosis", ("converged", "r_hat", "ess_min", "k_hat")),
    (_leave_one_out, "Leave-one-out cross-validation", _LOO),
)


# --- all methods ------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The records so far, and the table and files made of them."""

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
            for file in sorted(_file_names(names)):
                (self.folder / file).unlink(missing_ok=True)

    def add(self, record: Record) -> None:
        self.records[record.name] = record
        if self.folder is None:
            return
        found = self.comparison()
        if self._written is None:
            self._written = stored.Folder(self.folder)
            _write_test_rows(self._written, self.x_test, self.y_test)
        if record.tree is not None:
            _write_tree(self._written, record.name, record.tree)
        if record.prediction is not None:
            _write_prediction(self._written, found, record.name)
        _write_table(self.folder, found.table)
        _write_words(self._written, found)

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

        others = _CLASSIFICATION if self.data["task"] == "regression" else _REGRESSION
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
            rows[name] = {column: "" if column in _WORDS else math.nan for column in columns}
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
            table[column] = table[column].astype(object if column in _WORDS else float)
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
        """ArviZ's own ranking and stacking weights of what it could leave one out of."""
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
        """The gap of a method, or for the reference itself its noise floor; a sentence where there is none."""
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


# --- files ------------------------------------------------------------------------------------------------


def writable(out: str | os.PathLike[str]) -> Path:
    """The folder, made if need be, after a file has been written to it and removed."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"0")
    except OSError as error:
        raise InputError(
            "out: "
            + message(
                "a folder that can be written",
                f"{folder} ({type(error).__name__}: {error.strerror or error})",
                "another folder",
            )
        ) from error
    return folder


def _staged(folder: Path, comparison: Comparison) -> AbstractContextManager[Path]:
    """Where a comparison is written to, which then takes the place of the one in `folder`."""
    if not os.path.lexists(folder):
        return staged(folder)
    # A link leads to a folder that stays where it is.
    place = writable(folder).resolve()
    entries = list(place.iterdir())
    own = _own_files(entries, comparison)
    alone = own == {entry.name for entry in entries}
    return staged(place) if alone and _can_be_renamed(place) else staged_within(place, own, MANIFEST)


def _own_files(entries: Sequence[Path], comparison: Comparison) -> set[str]:
    """Those of the entries of a folder that a comparison has written there, or would write.

    Raises InputError where the new files would take the place of some that no comparison has written.
    """
    found = {entry.name for entry in entries}
    methods = {name.removesuffix(PREDICTION) for name in found if name.endswith(PREDICTION)}
    theirs = bool(methods) or TEST_ROWS in found
    for entry in entries:
        if entry.name == MANIFEST and stored.claims(entry, KIND):
            theirs = True
            # A damaged one is replaced, too: that is the advice where it is read.
            with contextlib.suppress(BNNError), ignored(".* has no checksum"):
                words = read_manifest(entry.parent) or {}
                methods |= {*words.get("trees", ()), *words.get("predictions", ())}
    methods |= {*comparison.trees, *comparison.predictions}
    own = found & _file_names(methods)
    strange = [
        entry for entry in entries if entry.name in own and (entry.is_symlink() or not entry.is_file())
    ]
    if strange or (own and not theirs):
        came = (
            str(strange[0])
            if strange
            else f"{', '.join(sorted(own))} of something else in {entries[0].parent}"
        )
        raise InputError(
            "folder: " + message("a new folder, or that of a comparison to replace", came, "another folder")
        )
    return own


def _file_names(methods: Iterable[str]) -> set[str]:
    of_methods = {f"{name}{ending}" for name in methods for ending in (".nc", PREDICTION)}
    return {"comparison.csv", FIGURE, MANIFEST, TEST_ROWS, *of_methods}


def _can_be_renamed(folder: Path) -> bool:
    """Whether another can take the place of a folder: no disk is mounted there, and this process is not in it."""
    try:
        inside = Path.cwd().resolve().is_relative_to(folder)
    except OSError:
        inside = False
    return not inside and not os.path.ismount(folder) and os.access(folder.parent, os.W_OK | os.X_OK)


def _write_tree(folder: stored.Folder, name: str, tree: Any) -> None:
    folder.write(f"{name}.nc", lambda path: write_tree(path, tree))


def _write_table(folder: Path, table: pd.DataFrame) -> None:
    write_whole(folder / "comparison.csv", lambda path: for_spreadsheet(table).to_csv(path))


def _write_figure(folder: Path, comparison: Comparison) -> None:
    """figure.png; where it cannot be drawn a warning, and everything else is kept."""
    try:
        figure = comparison.figure()
        # Letters that Matplotlib's font does not have are drawn as boxes.
        with ignored("Glyph .* missing from"):
            write_whole(folder / FIGURE, lambda path: figure.savefig(path, dpi=100, format="png"))
    except (Warning, OSError):
        # A caller who has turned warnings into errors wants to see them; a full disk is not the figure's.
        raise
    except Exception as error:
        warnings.warn(f"{FIGURE} was not drawn: {reason(error)}", UserWarning, stacklevel=3)


def _write_words(folder: stored.Folder, comparison: Comparison) -> None:
    """Everything that is no array and no tree, and the checksums of what is."""
    table = comparison.table
    content = {
        "kind": KIND,
        "format": FORMAT,
        "reference": comparison.reference,
        "data": _storable(comparison.data),
        "columns": list(table.columns),
        "rows": [[str(name), *row] for name, row in zip(table.index, table.to_numpy().tolist(), strict=True)],
        "notes": [[name, column, note] for (name, column), note in comparison.notes.items()],
        "failures": comparison.failures,
        "missing": list(comparison.missing),
        "fits": {name: _words_of_fit(fit) for name, fit in comparison.fits.items()},
        "diagnoses": {name: dataclasses.asdict(found) for name, found in comparison.diagnoses.items()},
        "trees": list(comparison.trees),
        "predictions": list(comparison.predictions),
    }
    folder.write_manifest(MANIFEST, content)


def _words_of_fit(fit: Fit) -> dict[str, Any]:
    info = {
        each.name: _storable(getattr(fit.info, each.name))
        for each in dataclasses.fields(fit.info)
        if each.name != "history"
    }
    return {"info": info, "shape": list(fit.shape)}


def _storable(value: Any) -> Any:
    """Plain values for a file; of anything else, such as what a user says of the data, the words that it has."""
    if isinstance(value, Mapping):
        return {str(name): _storable(each) for name, each in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_storable(each) for each in value]
    try:
        return encoded(value)
    except UnsupportedError:
        return str(value)


def _write_test_rows(folder: stored.Folder, x: Any, y: np.ndarray) -> None:
    inputs = {f"inputs/{name}": value for name, value in x.items()} if isinstance(x, Mapping) else {"x": x}
    _write_arrays(folder, TEST_ROWS, {**inputs, "targets": y}, {})


def _write_prediction(folder: stored.Folder, comparison: Comparison, name: str) -> None:
    """A prediction of the test rows, the loss curves of its fit, and what is drawn of it elsewhere."""
    words, arrays = _parts_of_prediction(comparison.predictions[name], "test/")
    said = {"test": words}
    if name in comparison.fits:
        history = comparison.fits[name].info.history
        arrays |= {f"history/{key}": np.asarray(value) for key, value in history.items()}
    at, drawn = _drawn(comparison, name)
    if at is not None and drawn is not None:
        said["drawn"], more = _parts_of_prediction(drawn, "drawn/")
        arrays |= {**more, "drawn_at": at}
    _write_arrays(folder, f"{name}{PREDICTION}", arrays, said)


def _parts_of_prediction(prediction: Prediction, where: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    names = None if prediction.class_names is None else list(prediction.class_names)
    words = {"family": prediction.family, "class_names": names, "censored": prediction.censored}
    arrays = {f"{where}parameters/{name}": value for name, value in prediction.parameters.items()}
    for name in ("log_weights", "epistemic_within"):
        if (value := getattr(prediction, name)) is not None:
            arrays[f"{where}{name}"] = value
    return words, arrays


def _write_arrays(
    folder: stored.Folder, name: str, arrays: Mapping[str, Any], words: Mapping[str, Any]
) -> None:
    folder.write(name, lambda path: write_arrays(path, arrays, {"words": json.dumps(words)}))


def _drawn(comparison: Comparison, name: str) -> tuple[np.ndarray | None, Prediction | None]:
    """The prediction of a method where curves or maps are drawn, which cannot be had again without the model."""
    posterior, prediction = comparison.posteriors.get(name), comparison.predictions[name]
    if posterior is None:
        return comparison.drawn_at, comparison.drawn.get(name)
    from ppl_bnn.evaluation.comparison import figures

    try:
        at = figures.drawn_at(comparison.test_inputs, comparison.test_targets, prediction)
        if at is None:
            return None, None
        return at, figures.predicted_for_drawing(posterior, at, comparison.data.get("seed", 0))
    except Warning:
        raise
    except Exception:
        # A model that refuses such inputs has no curve; its row of the table is no worse for it.
        return None, None


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What `comparison.json` in a folder says; None where there is none.

    Raises
    ------
    DamagedError: a manifest of something else, or damaged. UnsupportedError: one of a newer format.
    """
    return _READER.manifest(Path(folder) / MANIFEST, KIND, FORMAT, _SCHEMA, sealed_since=2)


def _read(folder: Path, words: Mapping[str, Any]) -> Comparison:
    import pandas as pd

    columns = words["columns"]
    names = [name for name, *_ in words["rows"]]
    table = pd.DataFrame([row for _, *row in words["rows"]], index=names, columns=columns)
    for column in columns:
        table[column] = table[column].astype(object if column in _WORDS else float)
    table.index.name = "method"
    files = words.get("files")
    rows = _read_arrays(folder, TEST_ROWS, files, {})[0]
    predictions: dict[str, Prediction] = {}
    drawn: dict[str, Prediction] = {}
    drawn_at: np.ndarray | None = None
    histories: dict[str, dict[str, np.ndarray]] = {}
    for name in words["predictions"]:
        both = {"test": _OF_PREDICTION, "drawn?": _OF_PREDICTION}
        arrays, said = _read_arrays(folder, f"{name}{PREDICTION}", files, both)
        predictions[name] = _prediction_of(said["test"], _under(arrays, "test/"))
        histories[name] = _under(arrays, "history/")
        if "drawn" in said:
            drawn[name] = _prediction_of(said["drawn"], _under(arrays, "drawn/"))
            drawn_at = arrays["drawn_at"]
    fits = {}
    for name, fit in words["fits"].items():
        info = fit["info"] | {"warnings": tuple(fit["info"]["warnings"])}
        fits[name] = Fit(FitInfo(history=histories.get(name, {}), **info), tuple(fit["shape"]))
    data = dict(words["data"])
    for name in ("feature_names", "class_names"):
        if data.get(name) is not None:
            data[name] = tuple(data[name])
    return Comparison(
        table=table,
        posteriors={},
        predictions=predictions,
        trees={name: _READER.tree(_READER.listed(folder, f"{name}.nc", files)) for name in words["trees"]},
        diagnoses={name: _diagnosis_of(found) for name, found in words["diagnoses"].items()},
        reference=words["reference"],
        notes={(name, column): note for name, column, note in words["notes"]},
        data=data,
        test_inputs=_under(rows, "inputs/") or rows["x"],
        test_targets=rows["targets"],
        failures=dict(words["failures"]),
        missing=tuple(words.get("missing", ())),
        fits=fits,
        drawn=drawn,
        drawn_at=drawn_at,
    )


def _read_arrays(
    folder: Path, name: str, files: Mapping[str, str] | None, schema: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    file = _READER.listed(folder, name, files)
    arrays, said = _READER.arrays(file, ("words",))
    return arrays, _READER.json(file, said["words"], schema)


def _prediction_of(words: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Prediction:
    for name, value in arrays.items():
        if value.dtype.kind != "f":
            raise ValueError(f"{name} of a prediction is {value.dtype}, not floating-point numbers")
    return Prediction(
        words["family"],
        _under(arrays, "parameters/"),
        log_weights=arrays.get("log_weights"),
        epistemic_within=arrays.get("epistemic_within"),
        class_names=words["class_names"],
        censored=words["censored"],
    )


def _diagnosis_of(words: Mapping[str, Any]) -> Diagnosis:
    from ppl_bnn.diagnostics.diagnose import Diagnosis

    return Diagnosis(**{**words, "reasons": tuple(words["reasons"]), "advice": tuple(words["advice"])})


def _under(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): each for name, each in arrays.items() if name.startswith(prefix)}


# --- pieces -----------------------------------------------------------------------------------------------


def _standard_error(values: np.ndarray) -> float:
    """Standard error of the mean; NaN for one value, and where a value is infinite."""
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def reason(error: BaseException) -> str:
    """An exception in one line."""
    text = clean(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def _said() -> Iterator[list[str]]:
    """What ArviZ warns of belongs in the notes of the table, once; any other warning goes on its way."""
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


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else f"{value:.4g}"
