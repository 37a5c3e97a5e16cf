"""Advice before fitting: which methods apply to a model and its data, and how many seconds each will take.

The estimate combines the number of gradients of a method (`Method.effort`) with the measured seconds of one gradient.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppl_bnn.backends.protocol import SYSTEMS, Model
from ppl_bnn.backends.systems import written_in
from ppl_bnn.core import checks
from ppl_bnn.core.arrays import cores, map_data, row_count
from ppl_bnn.core.errors import BNNError, InputError, ModelError, UnsupportedError
from ppl_bnn.core.processes import machine_memory
from ppl_bnn.core.settings import between
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.evaluation.comparison.run import check_method
from ppl_bnn.evaluation.comparison.summary import duration
from ppl_bnn.evaluation.grid.grid import labelled
from ppl_bnn.inference import registry
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.flat_vector import minus_log_joint
from ppl_bnn.inference.method import Method
from ppl_bnn.zoo.support import declared

if TYPE_CHECKING:
    import pandas as pd

FEASIBLE = ("yes", "likely", "unlikely", "no", "refused")
# Seconds for which one gradient is measured, and the smallest and largest number of repetitions.
MEASURING, FEWEST, MOST = 0.3, 5, 200
# Number of gradients computed at once to measure the cost of one among many.
MANY = 32
# Cost of a step of a method, in gradients called one by one: less inside a compiled loop, more if the step also draws
# and updates. Measured by comparisons/performance/advice.py.
STEP: dict[str, tuple[float, float]] = {"numpyro": (0.3, 4.5), "pyro": (0.8, 2.0)}
# Compile time of a method as a multiple of that of the gradient alone; measured by the same script.
COMPILING: dict[str, float] = {"numpyro": 4.0, "pyro": 1.0}
# Linear algebra operations per second in the worst case; the usual and the best case are ten and fifty times that.
# This is a guess, not a measurement.
OPERATIONS = 2e9
# Share of the machine's memory that a fit may use.
SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True)
class Advice:
    """Estimated cost and known weaknesses of methods, made by `advise`.

    Parameters
    ----------
    table : pd.DataFrame
        One row per method, the feasible ones first. Columns:

        feasible
            "yes", "likely" or "unlikely": its longest, its usual or only its shortest fit ends in time. "no": none
            does, or memory is too small. "refused": it cannot fit this model.
        seconds_low, seconds, seconds_high
            The shortest fit, the usual one (by the geometric mean of the range of overheads), and the longest.
        gradients_low, gradients, gradients_high
            Evaluations of the gradient over all rows.
        memory
            MB of 10^6 bytes, besides the model and the data.
        reason, limitations
            Why it is not feasible; what it is known to get wrong.
    facts : dict of str to float
        Rows, parameters, outputs, cores, memory (MB), and for each system the seconds of a gradient, of compiling it,
        and of one among many (`_together`), if a method computes many at once.
    seconds : float
        The time budget in seconds.
    """

    table: pd.DataFrame
    facts: dict[str, float]
    seconds: float

    @property
    def feasible(self) -> list[str]:
        """The methods that are expected to end in time: "yes" and "likely"."""
        return [str(name) for name, word in self.table["feasible"].items() if word in FEASIBLE[:2]]

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 110) -> str:
        """The table as text.

        Parameters
        ----------
        width : int
            Number of characters per line.

        Returns
        -------
        str
        """
        facts = self.facts
        seconds = {name: facts.get(f"gradient_seconds_{name}") for name in SYSTEMS}
        measured = [f"{1000.0 * each:.3g} ms in {name}" for name, each in seconds.items() if each is not None]
        size = f"{facts['rows']:.0f} rows"
        if measured:
            size = f"{facts['parameters']:.0f} parameters, {size}; a gradient takes {', '.join(measured)}"
        lines = [f"{size}. Within {duration(self.seconds)} on {facts['cores']:.0f} cores:", ""]
        longest = max(len("method"), *(len(str(name)) for name in self.table.index))
        lines.append(f"{'method':<{longest}}  {'in time':<8}  {'about':<8}  at most")
        for name, row in self.table.to_dict(orient="index").items():
            times = row["seconds"], row["seconds_high"]
            about, most = ("", "") if math.isnan(times[0]) else map(duration, times)
            begin = f"{name:<{longest}}  {row['feasible']:<8}  {about:<8}  {most:<8}  "
            text, indent = begin + (row["reason"] or row["limitations"]), " " * len(begin)
            lines.append(textwrap.fill(text, max(width, len(indent) + 40), subsequent_indent=indent))
        return "\n".join(lines)


def advise(
    model: Model,
    x: Any,
    y: Any,
    *,
    seconds: float = 300.0,
    methods: Mapping[str, Any] | Sequence[Any] | None = None,
    device: str = "auto",
    observed: str | None = None,
    standardise: bool = False,
) -> Advice:
    """Estimate which methods fit the model within `seconds` on this machine, and what each is known to get wrong.

    Nothing is fitted. One gradient is compiled and measured in each system that a method runs in.

    Parameters
    ----------
    model : Model
        The model.
    x : array or dict of arrays
        Inputs, as for `fit`.
    y : array
        Targets, as for `fit`.
    seconds : float
        Time budget of a fit in seconds.
    methods : mapping or sequence, optional
        A dict label -> method, a list of methods, or names of rows of `models/methods.toml` such as "laplace-kron".
        Default: all rows, in NumPyro where possible, else in Pyro.
    device : str
        As for `fit`.
    observed : str, optional
        As for `fit`.
    standardise : bool
        As for `fit`.

    Returns
    -------
    Advice
        A table with a row for each method; `print` shows it.

    Raises
    ------
    InputError, UnknownNameError, ModelError
        Invalid arguments, an unknown name, or a model that is not valid.

    Notes
    -----
    The seconds are an order of magnitude, above all for samplers, whose number of gradients varies.
    Refusals and numbers of iterations that are fixed by a setting are certain.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> advice = bnn.advise(model, table.x, table.y, seconds=300, methods=["map", "laplace"], standardise=True)
    >>> sorted(advice.table.index), advice.seconds
    (['laplace', 'map'], 300.0)
    """
    InputError.check(not between()(seconds), "seconds", "a positive number", repr(seconds), "seconds=300")
    checked = checks.check_inputs(x)
    targets = checks.check_targets(y, row_count(checked))
    written = written_in(model, checked, targets, SYSTEMS[0])
    named = _methods(methods, written)
    options = {"device": device, "observed": observed, "standardise": standardise}
    answers = {
        label: method if isinstance(method, BNNError) else method.refusal(model, x, y, **options)
        for label, method in named.items()
    }
    refused = {label: error for label, error in answers.items() if error is not None}
    errors = {str(error): error for error in refused.values()}
    first = next(iter(errors.values()), None)
    if len(refused) == len(named) and len(errors) == 1 and isinstance(first, InputError | ModelError):
        # The model or the data are refused, not the methods.
        raise first
    fitting = {label: method for label, method in named.items() if label not in refused}
    # A model written in one system is fitted in it.
    ppl = {label: written if written in SYSTEMS else method.ppl for label, method in fitting.items()}
    served = {name: [fitting[label] for label in ppl if ppl[label] == name] for name in SYSTEMS}
    probes = {name: _probe(each, (model, x, y), options) for name, each in served.items() if each}
    memory = machine_memory()
    rows: dict[str, dict[str, Any]] = {}
    for label, method in named.items():
        if label in refused:
            rows[label] = {"feasible": "refused", "reason": str(refused[label])}
        else:
            probe = probes[ppl[label]]
            rows[label] = _row(method, method.effort(probe.size), probe, float(seconds), memory)
        rows[label]["limitations"] = getattr(method, "limitations", "")
    facts: dict[str, float] = {"rows": float(row_count(checked)), "cores": float(cores())}
    if memory is not None:
        facts["memory"] = memory / 1e6
    for name, probe in probes.items():
        facts |= {"parameters": float(probe.size.parameters), "outputs": float(probe.size.outputs)}
        facts |= {f"gradient_seconds_{name}": probe.alone, f"compile_seconds_{name}": probe.compiling}
        if not math.isnan(probe.together):
            facts[f"gradient_seconds_{name}_together"] = probe.together
    return Advice(_table(rows), facts, float(seconds))


# --- methods ----------------------------------------------------------------------------------------------


def _methods(given: Any, written: str) -> dict[str, Any]:
    """Label -> method, or the error of one that does not exist for this model's system."""

    def checked(where: str, each: Any) -> Any:
        value = _named(each, written) if isinstance(each, str) else each
        if not isinstance(value, BNNError):
            check_method(where, value)
        return value

    named = {str(label): each for label, each in given.items()} if isinstance(given, Mapping) else given
    every = list(registry.ROWS) if named is None else named
    return labelled("methods", every, checked, lambda each: each.name.lower())


def _named(name: str, written: str) -> Any:
    row = registry.row(name)
    served = [written] if written in SYSTEMS else declared().served(row.name)
    there = [each for each in served if importlib.util.find_spec(each) is not None]
    try:
        return row.build((there or served)[0])
    except UnsupportedError as error:
        return error


# --- measurements -----------------------------------------------------------------------------------------


class _Probe(NamedTuple):
    """The size of a problem, and the seconds of the gradients of its log joint in the system `ppl`.

    `alone` is one gradient, `compiling` its compilation, and `together` one among `MANY` that are computed at once (NaN
    if no method does so).
    """

    size: Size
    ppl: str
    alone: float
    compiling: float
    together: float = math.nan


def _probe(methods: Sequence[Method], data: tuple[Model, Any, Any], options: Mapping[str, Any]) -> _Probe:
    """Measure what methods of one system compute. Warnings about the data are left to their fits."""
    first = dataclasses.replace(methods[0], dtype="auto")
    with ignored(), first.prepared(*data, seed=0, **options) as (_, problem, _, _):
        system = problem.system
        # A method that streams has the first rows only in its session.
        x, y = map_data(system.asarray, problem.inputs), system.asarray(problem.targets)
        program = problem.program.rebound(x, y)
        size = Size(problem.rows, program.parameter_count, program.outputs or 1)
        loss = minus_log_joint(program)

        def total(flats: Any, x: Any, y: Any) -> Any:
            return system.vmap(loss, in_axes=(0, None, None))(flats, x, y).sum()

        def measured(function: Callable[..., Any], *shape: int) -> tuple[float, float]:
            """Seconds of a gradient at an array of this shape, and of compiling it."""
            gradient = system.compile(system.value_and_grad(function))
            # Small numbers like those of weights; the time of the arithmetic does not depend on the values.
            at = system.asarray(0.1 * np.random.default_rng(0).standard_normal(shape))

            def once() -> float:
                begun = time.perf_counter()
                system.to_numpy(gradient(at, x, y)[1])
                return time.perf_counter() - begun

            first = once()
            taken = [once()]
            while len(taken) < FEWEST or (sum(taken) < MEASURING and len(taken) < MOST):
                taken.append(once())
            middle = float(np.median(taken))
            return middle, max(first - middle, 0.0)

        found = _Probe(size, system.name, *measured(loss, size.parameters))
        efforts = (method.effort(size) for method in methods)
        if any(effort is not None and effort.together > 1 for effort in efforts):
            found = found._replace(together=measured(total, MANY, size.parameters)[0] / MANY)
        return found


# --- report -----------------------------------------------------------------------------------------------


def _row(
    method: Method, effort: Effort | None, probe: _Probe, budget: float, memory: int | None
) -> dict[str, Any]:
    if effort is None:
        return {"feasible": "unlikely", "reason": "It does not say what it takes."}
    # A method with its own budget keeps it.
    own = getattr(method, "budget", None) or math.inf
    low, usual, high = (min(each, own) for each in _seconds(effort, probe))
    held = 8.0 * effort.numbers
    allowed = math.inf if memory is None else SHARE_OF_MEMORY * memory
    feasible, reason = "yes" if high <= budget else "likely", ""
    if held > allowed:
        feasible = "no"
        reason = f"It holds {held / 1e9:.3g} GB, and this machine can spare {allowed / 1e9:.3g}."
    elif low > budget:
        feasible, reason = "no", f"It takes {duration(low)} at the very least."
    elif usual > budget:
        feasible, reason = "unlikely", f"It usually takes {duration(usual)}."
    numbers = low, usual, high, effort.fewest, effort.usual, effort.most, held / 1e6
    return dict(zip(_NUMBERS, numbers, strict=True)) | {"feasible": feasible, "reason": reason}


def _seconds(effort: Effort, probe: _Probe) -> tuple[float, float, float]:
    """Seconds of the shortest, the usual and the longest fit."""
    shared = min(effort.parallel, cores())
    each = probe.together if effort.together > 1 else probe.alone
    least, most = STEP[probe.ppl]
    beside = COMPILING[probe.ppl] * probe.compiling
    algebra = effort.operations / OPERATIONS

    def fit(gradients: float, step: float) -> float:
        return gradients * each * step / shared

    return (
        fit(effort.fewest, least) + algebra / 50.0,
        fit(effort.usual, math.sqrt(least * most)) + beside + algebra / 10.0,
        fit(effort.most, most) + 3.0 * beside + algebra,
    )


_SECONDS = ("seconds_low", "seconds", "seconds_high")
_NUMBERS = (*_SECONDS, "gradients_low", "gradients", "gradients_high", "memory")


def _table(rows: dict[str, dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    columns = ["feasible", *_NUMBERS, "reason", "limitations"]
    table = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=columns)
    table = table.astype(dict.fromkeys(_NUMBERS, float)).rename_axis("method")
    table[["reason", "limitations"]] = table[["reason", "limitations"]].fillna("")
    return table.sort_values("feasible", kind="stable", key=lambda words: words.map(FEASIBLE.index))
