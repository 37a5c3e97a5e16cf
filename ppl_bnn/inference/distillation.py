"""Distillation: the predictive distribution of a posterior as one network.

With p(y | x) the predictive of the teacher, a posterior of any kind, and q_w(y | x) that of the student, one network
with weights w, the student minimises the mean over inputs x_r of the divergence KL(p || q_w), which is to maximise

    1/R sum_r E_p log q_w(y | x_r).

The expectation is

- of classes, the sum over all of them with the probabilities of the teacher: exact;
- of one number or count for each row, a sum over a grid of values with the density of the teacher, between its
  quantiles at 1e-4 and 1 - 1e-4. The grid of each input is shifted at random. This is the trapezoidal rule: its error
  falls exponentially where the density is smooth, and over inputs it has no bias where it is not;
- of several outputs, a mean over draws of the teacher.

Half of the inputs are training rows. The others are x_i + t (x_j - x_k), with rows i, j, k at random and t uniform
between 0 and 1/2: between the rows, and somewhat beyond. A difference of rows keeps what all rows have in common, such
as a constant column. The loss is the divergence at further inputs of the second kind, which the student has not seen.

References
----------
Hinton, Vinyals and Dean (2015), Distilling the knowledge in a neural network. Korattikara, Rathod, Murphy and Welling
(2015), Bayesian dark knowledge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import rel_entr

from ppl_bnn.backends.program import Problem, Program, log_prior_of
from ppl_bnn.backends.systems import system, written_in
from ppl_bnn.backends.turns import progress_outside
from ppl_bnn.core.arrays import chunks, map_data, row_count, site_seed
from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError
from ppl_bnn.core.progress import Progress, resolve
from ppl_bnn.core.settings import check_value, whole
from ppl_bnn.inference.method import Outcome, Stopwatch, versions
from ppl_bnn.inference.optimisation.map import MAP
from ppl_bnn.language.likelihoods import Censored
from ppl_bnn.language.transforms import student_of
from ppl_bnn.posterior.fit_info import FitInfo
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.prediction.prediction import Prediction

# Values of y for each input, and the probability beyond each end of their grid.
NODES, TAIL = 32, 1e-4
# The weight of the student's log prior, which holds what the teacher leaves open.
PRIOR_WEIGHT = 1e-3
# The search for the weights: steps of Adam, and nats per row for a hundred of them, of which less is a plateau.
STEPS, TOLERANCE = 1000, 1e-4
# Nats per row that a student may lose to its teacher without a warning.
LIMIT = 0.01
# Draws times rows of a prediction of the teacher at a time.
AT_ONCE = 2**20


@dataclass
class _Student(Program):
    """The program of a student, with E_p log q in place of the log likelihood and a weight of the prior.

    Its targets are a dict: "first" (R,) or (R, K), valid targets; "nodes" (R, M) or (R, M, K); and their "weights"
    (R, M), which sum to 1.
    """

    def log_joint(
        self, u: Mapping[str, Any], x: Any, y: Any, scale: float = 1.0, jacobian: bool = True
    ) -> Any:
        sites = self.run(u, x, y)
        each = self._observation(sites).log_prob(y["nodes"].swapaxes(0, 1))
        fit = (each * y["weights"].swapaxes(0, 1)).sum()
        return scale * fit + PRIOR_WEIGHT * log_prior_of(sites, jacobian)


def distil(
    posterior: Posterior,
    student: Any,
    x: Any,
    *,
    method: MAP | None,
    kind: str | None,
    rows: int,
    seed: int,
    progress: Any,
) -> Posterior:
    """The work of `Posterior.distil`, which documents it."""
    watch, shown = Stopwatch(), resolve(progress)
    check_value(rows, whole(10), "distil rows", "rows=1000")
    check_value(seed, whole(0, 2**31 - 1), "seed", "seed=0")
    method = MAP(steps=STEPS, tolerance=TOLERANCE * rows) if method is None else method
    expected = "a bnn.MAP without validation=, the search for the weights of the student"
    good = isinstance(method, MAP) and method.validation is None
    InputError.check(good, "distil method", expected, repr(method), "method=bnn.MAP(restarts=3)")
    _check_teacher(posterior, x)
    student = student_of(posterior.approximation.program(posterior.model)) if student is None else student
    rng = np.random.default_rng(site_seed("distillation", seed))
    seen, unseen = _inputs(posterior, x, rows, rng)
    _check_student(posterior, student, map_data(lambda a: a[:2], seen))
    targets = _soft_targets(posterior, seen, kind, rng)
    outcome, device = _fitted(posterior.info, student, seen, targets, method, seed, shown)
    teacher = {"method": posterior.info.method, **posterior.info.settings}
    settings = {"teacher": teacher, "kind": kind, "rows": rows, "method": method.settings()}
    if posterior.info.settings.get("stream"):
        settings["stream"] = True
    found: dict[str, Any] = {"seed": int(seed), "settings": settings, "versions": versions()}
    found |= {name: getattr(outcome, name) for name in ("compile_seconds", "gradient_evaluations")}
    target = f"the predictive of {posterior.info.method}, distilled"
    info = replace(posterior.info, method="Distillation", device=device, target=target, **found)
    own: dict[str, Any] = {"model": student, "language": True, "observed": "y", "info": info}
    own |= {"approximation": outcome.approximation, "statistics": {}, "programs": {}}
    made = replace(posterior, **own)
    lost = _divergences(posterior, made, unseen, kind, rng)
    mean, error = float(lost.mean()), float(lost.std(ddof=1) / math.sqrt(len(lost)))
    near = mean - 2.0 * error <= LIMIT
    figures = {"divergence": mean, "divergence_se": error, "converged": float(near)}
    warnings = ()
    if not near:
        loss = f"the student loses {mean:.3g} +- {error:.2g} nats per row to its teacher at inputs that it has not seen"
        warnings = (f"{loss}: try student= with more units, a larger rows=, or method=bnn.MAP(restarts=3)",)
    history = {**outcome.history, "divergence": lost}
    spent = max(0.0, watch() - outcome.compile_seconds)
    made.info = replace(info, figures=figures, history=history, warnings=warnings, run_seconds=spent)
    return made


# --- what is refused ------------------------------------------------------------------------------


def _check_teacher(posterior: Posterior, x: Any) -> None:
    where, check, own = "distil", UnsupportedError.check, "predict of the posterior"
    expected, got = "a posterior with a spread", f"{posterior.info.method}, one network already"
    check(posterior.kind != "point", where, expected, got, own)
    program = posterior.with_problem(lambda problem: problem.program)
    expected, got = "rows that are predicted one by one", "rows that interact (bnn.coupled)"
    check(not program.coupled, where, expected, got, own)
    expected, got = "targets that are observed", "likelihoods.Censored, whose score depends on the censoring"
    check(not isinstance(program.likelihood, Censored), where, expected, got, own)
    arrays = posterior.inputs.values() if isinstance(posterior.inputs, Mapping) else [posterior.inputs]
    floats = x is not None or all(np.asarray(array).dtype.kind == "f" for array in arrays)
    expected, got = "inputs of floating type, which can be varied", "whole numbers, such as tokens or codes"
    check(floats, where, expected, got, "x= with further inputs of this kind, which need no targets")


def _check_student(posterior: Posterior, student: Any, x: Any) -> None:
    """Refuse a student that cannot have the targets of the teacher; x are a few inputs in the units of the fit."""
    where, check, default = "distil student", UnsupportedError.check, "student=None"
    InputError.check(callable(student), where, "a model, a function (x, y=None)", repr(student), default)
    try:
        written = written_in(student, x, None, posterior.info.ppl)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    expected, advice = "a model in the language", "student= a model that ends with bnn.observe"
    check(written == "language", where, expected, f"a {written} model", advice)
    chosen, teacher = system(posterior.info.ppl), posterior.with_problem(lambda problem: problem.program)
    with chosen.session(posterior.info.dtype, "cpu", threads=1):
        made = Program.of(chosen, student, map_data(chosen.asarray, x), None, language=True)
    expected, advice = (
        "a model without per-row latent variables",
        "student=bnn.zoo.load('heteroscedastic_mlp')",
    )
    check(not made.has_local, where, expected, "bnn.rows in the model", advice)
    check(not made.coupled, where, "rows that do not interact", "bnn.coupled in the model", default)
    kinds = [(each.likelihood.task, each.likelihood.standardises) for each in (teacher, made)]
    expected = f"a likelihood of the same kind of targets as {teacher.likelihood.family}"
    check(kinds[0] == kinds[1], where, expected, made.likelihood.family, default)
    if teacher.likelihood.task == "classification":
        what, counts = "classes", [each.classes(np.zeros(1)) for each in (teacher, made)]
    else:
        shape = made.likelihood.target_shape((row_count(x), made.outputs))
        what, counts = "numbers for each row", [math.prod(s[1:]) for s in (teacher.target_shape, shape)]
    InputError.check(counts[0] == counts[1], where, f"{counts[0]} {what}", str(counts[1]), default)


# --- inputs, and what the teacher says of them ------------------------------------------------------


def _inputs(posterior: Posterior, x: Any, rows: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Inputs of the distillation and further ones, in the units of the fit."""
    inputs, count = posterior.inputs, row_count(posterior.inputs)
    some = rng.permutation(count)[: rows // 2]
    if x is None:
        fresh = _varied(inputs, rows - len(some) + max(8, rows // 4), rng)
        held = rows - len(some)
    else:
        fresh = posterior.fit_inputs(x)
        enough = row_count(fresh) >= 10
        InputError.check(enough, "distil x", "at least 10 rows", row_count(fresh), "x=None for varied inputs")
        order = rng.permutation(row_count(fresh))
        fresh, held = map_data(lambda a: a[order], fresh), row_count(fresh) * 4 // 5
    fresh = fresh if isinstance(fresh, Mapping) else {"": fresh}
    known = inputs if isinstance(inputs, Mapping) else {"": inputs}
    seen = {name: np.concatenate([known[name][some], each[:held]]) for name, each in fresh.items()}
    unseen = {name: each[held:] for name, each in fresh.items()}
    return (seen, unseen) if isinstance(inputs, Mapping) else (seen[""], unseen[""])


def _varied(inputs: Any, rows: int, rng: np.random.Generator) -> Any:
    """x_i + t (x_j - x_k), with rows i, j, k at random and t uniform between 0 and 1/2."""
    i, j, k = rng.integers(0, row_count(inputs), (3, rows))
    t = rng.random(rows) / 2.0

    def varied(a: np.ndarray) -> np.ndarray:
        return a[i] + (t.reshape(-1, *[1] * (a.ndim - 1)) * (a[j] - a[k])).astype(a.dtype)

    return map_data(varied, inputs)


def _predictions(posterior: Posterior, x: Any, kind: str | None) -> Iterator[Prediction]:
    """Predictions, some rows at a time, at inputs in the units of the fit."""
    units = posterior.standardisation
    x = x if units is None else units.original_inputs(x)
    size = max(64, AT_ONCE // math.prod(posterior.shape))
    for start, stop in chunks(row_count(x), size):
        yield posterior.predict(map_data(lambda a, i=start, j=stop: a[i:j], x), kind=kind)


def _soft_targets(
    posterior: Posterior, x: Any, kind: str | None, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The targets of `_Student` at inputs x, in the units of the fit."""
    found = [_nodes(prediction, rng) for prediction in _predictions(posterior, x, kind)]
    nodes, weights = (np.concatenate(each) for each in zip(*found, strict=True))
    if posterior.standardisation is not None:
        flat = nodes.reshape(-1, *nodes.shape[2:])
        nodes = posterior.standardisation.targets(flat).reshape(nodes.shape)
    first = nodes[np.arange(len(nodes)), weights.argmax(axis=1)]
    return {"first": first, "nodes": nodes, "weights": weights}


def _nodes(prediction: Prediction, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Values of y (N, M) or (N, M, K) and their weights (N, M), over which means are expectations."""
    if prediction.is_classes:
        shares = prediction.probabilities
        nodes = np.tile(np.arange(shares.shape[1]), (len(shares), 1))
        nodes = nodes.astype(float) if prediction.family == "Bernoulli" else nodes
        return nodes, shares / shares.sum(axis=1, keepdims=True)
    if len(prediction.shape) > 1:
        y = np.moveaxis(_row_by_row(prediction).sample(NODES, rng), 0, 1)
        return y, np.full(y.shape[:2], 1.0 / NODES)
    low, high = (each[:, None] for each in prediction.quantile([TAIL, 1.0 - TAIL]))
    shift, at = rng.random(low.shape), np.arange(NODES)
    if prediction.is_counts:
        step = np.ceil((high - low + 1.0) / NODES)
        y = low + np.floor(shift * step) + step * at
    else:
        y = low + (high - low) * (at + shift) / NODES
    logs = np.stack([prediction.log_prob(each) for each in y.T], axis=1)
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    return y, weights / weights.sum(axis=1, keepdims=True)


def _row_by_row(prediction: Prediction) -> Prediction:
    """The same mixture, of which each row draws a component of its own."""
    weights = np.log(np.full(prediction.draws, 1.0 / prediction.draws))
    weights = weights if prediction.log_weights is None else prediction.log_weights
    if weights.ndim == 1:
        weights = np.repeat(weights[:, None], prediction.rows, axis=1)
    return replace(prediction, log_weights=weights)


def _divergences(
    posterior: Posterior, student: Posterior, x: Any, kind: str | None, rng: np.random.Generator
) -> np.ndarray:
    """KL(p || q) at each input, in nats: exact for classes, else the mean over draws of the teacher."""
    found = []
    pairs = zip(_predictions(posterior, x, kind), _predictions(student, x, None), strict=False)
    for p, q in pairs:
        if p.is_classes:
            found.append(rel_entr(p.probabilities, q.probabilities).sum(axis=1))
        else:
            y = _row_by_row(p).sample(NODES, rng)
            found.append(np.mean([p.log_prob(each) - q.log_prob(each) for each in y], axis=0))
    return np.concatenate(found)


# --- the fit --------------------------------------------------------------------------------------


def _fitted(
    info: FitInfo,
    student: Any,
    x: Any,
    targets: dict[str, np.ndarray],
    method: MAP,
    seed: int,
    progress: Progress,
) -> tuple[Outcome, str]:
    """What `method` finds for the student, and the device."""
    chosen: Any = system(info.ppl)
    with chosen.session(info.dtype, info.device, 1) as device:
        data, given = map_data(chosen.asarray, x), map_data(chosen.asarray, targets)
        program = _Student.of(chosen, student, data, given["first"], language=True)
        program.likelihood.check_values(targets["nodes"].reshape(-1, *targets["nodes"].shape[2:]))
        native = program.native
        program.native = lambda x, y=None: native(x, None if y is None else y["first"])
        data = (data, given, x, targets["first"], int(seed), device, info.dtype, info.data_hash)
        problem = Problem(program, *data)
        outcome = method.run(problem, progress_outside(progress, chosen.outside))
        seconds, _ = chosen.recorded()
    return replace(outcome, compile_seconds=outcome.compile_seconds + seconds), device
