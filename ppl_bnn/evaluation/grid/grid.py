"""Many fits: every model on every data set, over splits, by every method, with every seed.

A cell is one fit with its scores. Finished cells are files of the folder and are never computed twice: an interrupted
run continues with the missing cells, and an extended grid computes only the new ones.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn import zoo
from ppl_bnn.backends.protocol import resolve_device
from ppl_bnn.backends.systems import written_in
from ppl_bnn.core import checks, processes, stored
from ppl_bnn.core.errors import ClusterError, DamagedError, InputError, Interrupted, check_known
from ppl_bnn.core.files import writable
from ppl_bnn.core.progress import Progress, resolve
from ppl_bnn.core.settings import whole
from ppl_bnn.datasets import splits, tables
from ppl_bnn.datasets.tables import Table
from ppl_bnn.evaluation.comparison.run import bind_classes, check_reference, check_row
from ppl_bnn.evaluation.grid import cell as cells
from ppl_bnn.evaluation.grid import engines
from ppl_bnn.evaluation.grid.cell import Cell, Store
from ppl_bnn.evaluation.grid.result import AXES, CELLS, FORMAT, KIND, MANIFEST, GridResult, read_manifest
from ppl_bnn.evaluation.outside.known import ESTIMATORS
from ppl_bnn.evaluation.outside.outside import Outside
from ppl_bnn.inference.method import Method
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.zoo.support import named

LOCK = ".lock"
MOST_SEEDS = 10**6
# Files that a run killed before it wrote its manifest can leave in a folder.
_BEGUN = re.compile(r"\.lock|\.probe-.*|\.grid\.part.*\.json")


class GridInterrupted(Interrupted[GridResult]):
    """Raised on Ctrl-C during `Grid.run`. `partial` is the `GridResult` of the cells that had finished."""


@dataclass(frozen=True, eq=False)
class Grid:
    """A comparison over models, data sets, methods, splits and seeds.

    Each axis is a dict label -> value, or a sequence whose items provide their own labels. A model and a data set of
    different tasks have no cells (`left_out`). A cell that fails is a row with its reason.

    Parameters
    ----------
    models : dict or sequence
        Functions, labelled by their names, or names of the zoo. A free parameter `classes` is set for each data set.
    data : dict or sequence
        Names of data sets (`ppl_bnn.data.datasets()`), or tables.
    methods : dict or sequence
        Methods, or names of the registry such as "nuts" and "laplace-kron", at their defaults in NumPyro; estimators
        from outside (`Outside`), or their names.
    splits : str, sequence of str or dict
        Names of splits (see `ppl_bnn.datasets.splits`), or a dict label of the data -> names.
    seeds : int or sequence of int
        Seeds of the fits: how many (3 means 0, 1 and 2), or which. Splits have their own.
    reference : str, optional
        Label of the method whose posterior the others are compared with, within the same model, data, split and seed.
    standardise : bool
        Whether to fit on standardised inputs and targets. Scores are always in original units.
    device : str
        "auto", "cpu" or "cuda[:i]", for every fit.

    Raises
    ------
    InputError, UnknownNameError
        An axis that is empty or of the wrong type; a name that does not exist.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> grid = bnn.Grid(["linear_regression"], ["diabetes"], ["map"], "random:2@0.9")
    >>> len(grid.cells)  # one model, one data set, one method, two splits
    2
    >>> grid.run("grid", engine="sequential").table()["cells"].tolist()
    [2]
    """

    models: Any
    data: Any
    methods: Any
    splits: Any = "random:5@0.9"
    seeds: Any = 1
    reference: str | None = None
    standardise: bool = True
    device: str = "auto"

    def __post_init__(self) -> None:
        settled = {
            "models": labelled("models", self.models, _model, _name_of_model),
            "data": labelled("data", self.data, _data, lambda table: table.name),
            "methods": labelled("methods", self.methods, _method, lambda method: method.name.lower()),
            "seeds": _seeds(self.seeds),
        }
        known = settled["data"]
        if isinstance(self.splits, Mapping):
            check_known("data set in splits", self.splits, known)
            for label in [each for each in known if each not in self.splits]:
                got = f"none for {label!r}"
                raise InputError.of("splits", "splits for each data set", got, "'random:5@0.9'")
            settled["splits"] = {label: splits.check(self.splits[label]) for label in known}
        else:
            settled["splits"] = splits.check(self.splits)
        check_known("reference", [] if self.reference is None else [self.reference], settled["methods"])
        check_reference(self.reference, settled["methods"])
        if not isinstance(self.standardise, bool):
            raise InputError.of("standardise", "True or False", repr(self.standardise), "standardise=True")
        resolve_device(self.device)
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Grid:
        """The grid of a TOML file, whose format `ppl_bnn.evaluation.grid.toml_file` describes.

        Parameters
        ----------
        path : str or PathLike
            The file.

        Returns
        -------
        Grid
            The grid.
        """
        from ppl_bnn.evaluation.grid import toml_file

        return toml_file.read(path, cls)

    def __repr__(self) -> str:
        sizes = [f"{len(getattr(self, name))} {name}" for name in ("models", "data", "methods", "seeds")]
        wanted = list(dict.fromkeys(name for label in self.data for name in self._splits_of(label)))
        return f"Grid({', '.join(sizes)}, splits {', '.join(wanted)}; reference={self.reference!r})"

    def _splits_of(self, data: str) -> tuple[str, ...]:
        return self.splits[data] if isinstance(self.splits, Mapping) else self.splits

    @property
    def cells(self) -> list[Cell]:
        """All cells in the order of computation: split by split, so that what is compared is computed together.

        Tables are read for this, and models are run once without a framework.
        """
        return [planned.cell for planned in self._plan.cells]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The models and data sets that cannot be combined, one sentence each."""
        return self._plan.left_out

    @cached_property
    def _plan(self) -> _Plan:
        return _planned(self)

    def run(
        self,
        out: str | os.PathLike[str],
        engine: str = "local",
        jobs: int | None = None,
        resume: bool = True,
        progress: bool | Progress | None = None,
        *,
        retry_failed: bool = False,
        memory: int | None = None,
    ) -> GridResult:
        """Compute the cells that the folder `out` does not have, and return the result of all.

        Parameters
        ----------
        out : str or PathLike
            A folder: new, empty, or of an earlier state of this grid. Finished cells are written at once; at the end,
            or on Ctrl-C, `cells.csv`, `table.csv` and, with pyarrow, `cells.parquet` follow.
        engine : str
            "local" (processes of this machine), "sequential" (this process), "dask://HOST:PORT", "ray://HOST:PORT" or
            "ray://auto".
        jobs : int, optional
            Number of cells at once. Default: as cores and memory allow, or one per GPU, or as the cluster has room.
        resume : bool
            If False, existing cells are computed again.
        progress : bool or Progress, optional
            True for a bar over cells, with the number that failed and the minutes left.
        retry_failed : bool
            Whether to compute failed cells again.
        memory : int, optional
            Bytes per process of this machine; a cell that needs more fails. Default: an equal part of the memory.

        Returns
        -------
        GridResult
            All cells of the folder.

        Raises
        ------
        InputError, UnknownNameError, DeviceError, MissingFrameworkError
            Raised before anything is computed.
        GridInterrupted, ClusterError
            Ctrl-C (its `partial` holds the finished cells), or the cluster ended. The next run continues from there.
        """
        place = engines.Engine.of(engine)
        engines.check(place, jobs, self.device, memory)
        InputError.check(isinstance(resume, bool), "resume", "True or False", repr(resume), "resume=True")
        _check_folder(self, out)
        plan = self._plan
        tasks = plan.tasks(engines.device_inside(place, self.device))
        folder = writable(out)
        with _locked(folder):
            # The manifest comes first, so that after a kill the folder is recognised as that of a grid.
            stored.write_manifest(folder / MANIFEST, plan.manifest(self))
            store = Store(folder / CELLS)
            store.folder.mkdir(exist_ok=True)
            waiting = plan.waiting(store, resume, retry_failed)
            store.warn_of_damaged("are computed again")
            if not resume:
                # Existing cells would count as finished if this run were stopped.
                for planned in waiting:
                    store.path(planned.cell.key).unlink(missing_ok=True)
            arguments = [tasks[planned] for planned in waiting]
            limits: dict[str, Any] = {"jobs": jobs, "device": self.device, "memory": memory}
            try:
                # Closed at once however this ends, so that no process continues with cells that are not needed.
                with (
                    closing(_Meter(plan, waiting, store, resolve(progress))) as meter,
                    closing(engines.outcomes(place, cells.computed, arguments, **limits)) as results,
                ):
                    for number, content in results:
                        planned = waiting[number]
                        if isinstance(content, engines.Lost):
                            content = cells.packed({"failure": content.reason}, planned.parts, {})
                        store.write(planned.cell.key, content)
                        meter.finished(planned.cell)
                return _saved(folder)
            except (KeyboardInterrupt, ClusterError) as error:
                partial = _saved(folder)
                kept = f"{len(partial.cells)} of {partial.asked} cells are finished and kept in {folder}"
                if isinstance(error, ClusterError):
                    raise ClusterError(f"{error}; {kept}") from error
                raise GridInterrupted(f"interrupted; {kept}", partial) from error


def _saved(folder: Path) -> GridResult:
    """The result of the cells in a folder, which gets its tables."""
    result = GridResult.load(folder)
    result.save()
    return result


# --- the axes ---------------------------------------------------------------------------------------------


def labelled(
    name: str, given: Any, checked: Callable[[str, Any], Any], label: Callable[[Any], str]
) -> dict[str, Any]:
    """Label -> checked value of a dict, or of a list whose items give their own labels. name: of the argument."""
    if isinstance(given, str) or not isinstance(given, Mapping | Sequence) or not given:
        expected = "a dict of labels, or a list, with one entry or more"
        raise InputError.of(name, expected, repr(given), f"{name}=[...]")
    entries = [(each if isinstance(each, str) else None, each) for each in given]
    if isinstance(given, Mapping):
        entries = list(given.items())
    found: dict[str, Any] = {}
    for called, each in entries:
        value = checked(f"{name}[{called!r}]" if called is not None else name, each)
        called = label(value) if called is None else called
        if not isinstance(called, str) or not called.strip() or called != " ".join(called.split()):
            raise InputError.of(name, "labels that are words", repr(called), "'nuts'")
        if called in found:
            raise InputError.of(name, "labels that differ", f"{called!r} twice", "a dict of labels")
        found[called] = value
    return found


def _model(where: str, given: Any) -> Any:
    if isinstance(given, str):
        return zoo.load(given)
    if not callable(given) or isinstance(given, type | Method):
        raise InputError.of(where, "a function (x, y=None), or a name", repr(given), "'regression_mlp'")
    return given


def _name_of_model(model: Any) -> str:
    while hasattr(model, "func"):
        model = model.func
    name = getattr(model, "__name__", type(model).__name__)
    # A file of the zoo gives its function this name.
    file = str(model.__module__).rpartition(".")[2].removeprefix("_ppl_bnn_file_")
    return file if name == "model" else name


def _data(where: str, given: Any) -> Any:
    if isinstance(given, str):
        check_known("data set", [given], tables.datasets())
        return given
    advice = "ppl_bnn.data.read_csv(path, target)"
    InputError.check(isinstance(given, Table), where, "a table, or a name", type(given).__name__, advice)
    return given


def _method(where: str, given: Any) -> Method | Outside:
    if isinstance(given, str):
        return Outside(given) if given in ESTIMATORS else named(given)
    check_row(where, given)
    if getattr(given, "checkpoint", None) is not None:
        expected = "a method without a checkpoint, as each cell is another fit"
        raise InputError.of(where, expected, "one with", "checkpoint=None")
    return given


def _seeds(given: Any) -> tuple[int, ...]:
    found: Any = list(range(min(given, MOST_SEEDS + 1))) if type(given) is int else given
    good = isinstance(found, Sequence) and not isinstance(found, str) and 0 < len(found) <= MOST_SEEDS
    valid = whole(0, 2**31 - 1)
    if not good or any(valid(seed) for seed in found) or len(set(found)) < len(found):
        expected = "a number of seeds, or whole numbers from 0 that differ"
        raise InputError.of("seeds", expected, repr(given), "seeds=3")
    return tuple(map(int, found))


# --- the plan ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Planned:
    """A cell, the parts of its key (JSON), its rows, and the fit of its method to its model, which others share."""

    cell: Cell
    parts: str
    table: Table
    split: splits.Split
    fit: partial[Posterior]


@dataclass(frozen=True)
class _Plan:
    cells: list[_Planned]
    tables: dict[str, Table]
    left_out: tuple[str, ...]

    def waiting(self, store: Store, resume: bool, retry_failed: bool) -> list[_Planned]:
        """The cells to compute; of identical cells (the same fit under two labels) only the first."""
        first: dict[str, _Planned] = {}
        for planned in self.cells:
            first.setdefault(planned.cell.key, planned)

        def finished(key: str) -> bool:
            words = store.words(key)
            return words is not None and not (retry_failed and words["failure"])

        return [planned for key, planned in first.items() if not resume or not finished(key)]

    def tasks(self, device: str) -> dict[_Planned, tuple[Any, ...]]:
        """The arguments of `cells.computed` for each cell, with the `device` as named where the cells are computed.

        Raises InputError for a model or a method that cannot be sent to another process.
        """
        written: dict[partial[Posterior], bytes] = {}
        tasks = {}
        for each in self.cells:
            if each.fit not in written:
                try:
                    written[each.fit] = processes.written(partial(each.fit, device=device), each.fit.args[0])
                except Exception as error:
                    where = f"{each.cell.model} by {each.cell.method}"
                    got, advice = f"{type(error).__name__}: {error}", "a model at the top of a module"
                    raise InputError.of(where, "what can be sent to another process", got, advice) from error
            rows = each.table.x, each.table.y, each.split.train, each.split.test
            tasks[each] = (written[each.fit], each.parts, *rows, each.cell.seed)
        return tasks

    def manifest(self, grid: Grid) -> dict[str, Any]:
        """The data that identify the folder of this grid, and the files of its cells."""
        axes = {name: list(getattr(grid, name)) for name in AXES}
        axes["splits"] = list(dict.fromkeys(planned.split.name for planned in self.cells))
        return {
            "kind": KIND,
            "format": FORMAT,
            "reference": grid.reference,
            "standardise": grid.standardise,
            "axes": axes,
            "left_out": list(self.left_out),
            "data": {label: table.card() for label, table in self.tables.items()},
            "cells": [list(asdict(planned.cell).values()) for planned in self.cells],
            # Cells are written one by one, and each has its own checksum.
            "files": {},
        }


def _planned(grid: Grid) -> _Plan:
    found = {label: tables.load(each) if isinstance(each, str) else each for label, each in grid.data.items()}
    parted = {label: splits.splits_of(table, grid._splits_of(label)) for label, table in found.items()}
    # Results do not depend on which GPU is used. The planning machine resolves "auto".
    device, _ = resolve_device(grid.device)
    if device == "auto":
        device = "cuda" if engines.gpus() else "cpu"
    # The labels, the table, the fit, and the parts of the key that cells of one model, data set and method share.
    every: list[tuple[tuple[str, str, str], Table, partial[Posterior], dict[str, Any]]] = []
    left_out: list[str] = []
    for data, table in found.items():
        options: dict[str, Any] = {"standardise": grid.standardise, "class_names": table.class_names}
        options["feature_names"] = tuple(table.feature_names)
        of_classes, of_data = table.task == "classification", checks.data_hash(table.x, table.y)
        for name, model in grid.models.items():
            bound = bind_classes(model, table.y, table.class_names) if of_classes else model
            sketch, own = _seen(bound, table)
            if sketch is not None and sketch.task != table.task:
                left_out.append(f"{name} is a model for {sketch.task}, and {data} for {table.task}.")
                continue
            common = {"model": cells.of_model(bound, sketch), "data": of_data, "device": device}
            for label, method in grid.methods.items():
                fit = partial(method.fit, bound, **options)
                of_method = cells.of_method(method, own or method.ppl)
                parts = {**common, "method": of_method, "standardise": grid.standardise}
                every.append(((name, data, label), table, fit, parts))
    got = " ".join(left_out)
    InputError.check(every, "models, data", "a model for the task of a data set", got, "others")
    planned = []
    for position in range(max(map(len, parted.values()))):
        for seed in grid.seeds:
            for (model, data, method), table, fit, shared in every:
                if position >= len(parted[data]):
                    continue
                split = parted[data][position]
                # The numbers of the rows, in their order, identify a split.
                of_split = checks.data_hash({"train": split.train, "test": split.test}, np.empty(0))
                parts = {**shared, "split": of_split, "seed": seed}
                cell = Cell(model, data, split.name, method, seed, cells.key_of(parts))
                planned.append(_Planned(cell, json.dumps(parts), table, split, fit))
    return _Plan(planned, found, tuple(left_out))


def _seen(model: Any, table: Table) -> tuple[zoo.Sketch | None, str | None]:
    """The sites and the task of a model; or the system that it is written in, which then fits it for any method."""
    with suppress(Exception):
        return zoo.sketch(model, table.x.shape[1]), None
    # A model of a system cannot be run outside of it. The cells of one that cannot be read report why.
    with suppress(Exception):
        system = written_in(model, table.x, table.y, "numpyro")
        return None, None if system == "language" else system
    return None, None


# --- the folder -------------------------------------------------------------------------------------------


def _check_folder(grid: Grid, out: str | os.PathLike[str]) -> None:
    """Refuse a folder of another grid. An earlier state of this grid shares labels with it on each axis."""
    folder = Path(out)
    try:
        before = read_manifest(out)
    except DamagedError as error:
        if not stored.claims(folder / MANIFEST, KIND):
            raise
        # Its labels are not known, and cells are identified by their keys.
        warnings.warn(f"the manifest of the grid is damaged and is written again: {error}", stacklevel=3)
        return
    if before is None:
        if folder.is_dir() and not all(_BEGUN.fullmatch(entry.name) for entry in folder.iterdir()):
            expected = "a new or an empty folder, or that of this grid"
            raise InputError.of("out", expected, f"{folder}, with other files", "another folder")
        return
    axes = before["axes"]
    for name in ("models", "data", "methods", "seeds"):
        got = f"{out}, that of one whose {name} are {', '.join(map(str, axes[name]))}"
        common = set(axes[name]) & set(getattr(grid, name))
        InputError.check(common, "out", "the folder of this grid", got, "another folder")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Allow one run at a time in a folder, on systems with file locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(folder / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            got = f"{folder}, with a run at work"
            raise InputError.of("out", "a folder where nothing runs", got, "waiting for it") from error
        yield


# --- progress ---------------------------------------------------------------------------------------------


class _Meter:
    """Counts finished and failed cells, and estimates the remaining time.

    The time of a cell is the mean over its model, data and method, else over all; the number at once is its average so
    far.
    """

    def __init__(self, plan: _Plan, waiting: Sequence[_Planned], store: Store, progress: Progress):
        self._store, self._total = store, len(plan.cells)
        # A key counts once for each of its labels.
        self._labels = Counter(planned.cell.key for planned in plan.cells)
        self._left = {planned.cell.key: planned.cell for planned in waiting}
        self._seconds: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
        self._failed = 0
        for planned in plan.cells:
            if planned.cell.key not in self._left:
                self._take(planned.cell)
        self._begun, self._busy = time.monotonic(), 0.0
        self._task = progress.task("Grid", self._total)
        self._update()

    def _take(self, cell: Cell) -> float:
        words = self._store.words(cell.key) or {}
        self._failed += bool(words.get("failure"))
        seconds = float(words.get("costs", {}).get("seconds", 0.0))
        self._seconds[cell.model, cell.data, cell.method].append(seconds)
        return seconds

    def finished(self, cell: Cell) -> None:
        self._left.pop(cell.key, None)
        self._busy += self._take(cell)
        self._update()

    def _update(self) -> None:
        figures = {"failed": float(self._failed)}
        # Before the first cell of this run is finished, there is no estimate.
        if self._busy or not self._left:
            every = [second for seconds in self._seconds.values() for second in seconds]
            alike = (self._seconds.get((each.model, each.data, each.method)) for each in self._left.values())
            work = sum(float(np.mean(seconds or every)) for seconds in alike)
            elapsed = time.monotonic() - self._begun
            figures["minutes_left"] = work * elapsed / (self._busy or 1.0) / 60.0
        self._task.update(self._total - sum(self._labels[key] for key in self._left), **figures)

    def close(self) -> None:
        with suppress(Exception):
            self._task.close()
