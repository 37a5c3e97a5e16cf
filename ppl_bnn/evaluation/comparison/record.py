"""One method of a comparison: its fit, its scores and diagnostics, and its status."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.core.arrays import row_count
from ppl_bnn.core.errors import BNNError, InputError
from ppl_bnn.core.names import clean
from ppl_bnn.core.processes import peak_memory
from ppl_bnn.evaluation.outside.outside import FittedOutside
from ppl_bnn.language.likelihoods.base import Likelihood
from ppl_bnn.posterior.fit_info import FitInfo
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.prediction import scores
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.references.reference import Reference

# The system of a stored reference, which nothing ran.
STORED = "stored"
# Figures that need the value of a target: the bound that a censored row gives is not enough.
VALUE_SCORES = ("rmse", "crps", "coverage_90")
_NO_POSTERIOR = "An estimator from outside the library is no approximation of the posterior."
# What the table says of chains that have converged at the training rows only.
NOT_AT_TEST_ROWS = "not at test rows"
# Largest draws x rows of a group of a tree (half a gigabyte); a chain keeps at least FEWEST_DRAWS.
MOST_VALUES = 2**26
FEWEST_DRAWS = 100
_LOO = ("elpd_loo", "elpd_loo_se", "elpd_loo_corrected", "pareto_k_corrected", "pareto_k_loo")
_LOO += ("loo_rank", "loo_weight")
_OF_POSTERIORS = ("kind", "gap_mean", "converged", "k_hat", "gradient_evaluations", "parameters")


@dataclass(frozen=True)
class FitSummary:
    """How a posterior was fitted, and its numbers of chains and draws, without the posterior."""

    info: FitInfo
    shape: tuple[int, int]


@dataclass
class Record:
    """The results of one method, made by `fitted`.

    `figures` and `notes` are by column of `COLUMNS`; `tree` is used for leave-one-out; `pointwise` is the log score of
    each test row, (N,); `moments` are those of the mean function; `fit` is how one without a posterior was fitted;
    `failure` is the reason of a failure, or "".
    """

    ppl: str = ""
    posterior: Posterior | None = None
    prediction: Prediction | None = None
    fit: FitSummary | None = None
    tree: Any = None
    diagnosis: Any = None
    elpd: Any = None
    figures: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    pointwise: np.ndarray | None = None
    moments: dict[str, np.ndarray] = field(default_factory=dict)
    failure: str = ""


def fitted(
    fit: Callable[[], Posterior | FittedOutside], x: Any, y: np.ndarray, seed: int, device: str
) -> Record:
    """The results of one method that need no other method, on test rows x, y. An error is the record's `failure`."""
    with peak_memory() as peak:
        try:
            record = _fitted(fit, x, y, seed, device)
        except Warning:
            # A caller who has turned warnings into errors wants to see them.
            raise
        except Exception as error:
            record = Record(failure=reason(error))
    record.figures["peak_memory"] = peak()
    return record


def _fitted(
    fit: Callable[[], Posterior | FittedOutside], x: Any, y: np.ndarray, seed: int, device: str
) -> Record:
    posterior = fit()
    started = time.perf_counter()
    prediction = posterior.predict(x, seed=seed, device=device)
    seconds = time.perf_counter() - started
    info = posterior.info
    record = _scored(info.ppl, prediction, y)
    figures = record.figures
    figures |= {
        "compile_seconds": info.compile_seconds,
        "run_seconds": info.run_seconds,
        "predict_seconds": seconds,
        "gradient_evaluations": info.gradient_evaluations,
    }
    if info.warnings:
        record.notes["run_seconds"] = " ".join(f"{text.rstrip('.')}." for text in info.warnings)
    if info.gradient_evaluations is None and not isinstance(posterior, FittedOutside):
        record.notes["gradient_evaluations"] = f"{info.method} does not count its gradients."
    if len(y) < 2:
        record.notes["log_score_se"] = "One test row has no standard error."
    if isinstance(posterior, FittedOutside):
        record.fit = FitSummary(info, (1, prediction.draws))
        record.notes |= dict.fromkeys((*_LOO, *_OF_POSTERIORS), _NO_POSTERIOR)
        return record
    record.posterior = posterior
    figures |= {
        "kind": posterior.kind,
        "target": posterior.target,
        "parameters": float(posterior.with_problem(lambda problem: problem.program.parameter_count)),
    }
    if posterior.weights is not None:
        record.notes["target"] = stacking_weights(posterior)
    if prediction.censored and not set(VALUE_SCORES) <= set(figures):
        of = f"{np.count_nonzero(y[:, 1] != 1.0)} of {len(y)}"
        note = f"Of {of} test rows a bound is known and not the value: they were censored."
        record.notes |= dict.fromkeys(VALUE_SCORES, note)
    for part, title, columns in _PARTS:
        try:
            part(record, posterior, x)
        except Warning:
            raise
        except Exception as error:
            record.notes |= dict.fromkeys(columns, f"{title} failed: {reason(error)}")
    return record


def _scored(ppl: str, prediction: Prediction, y: np.ndarray) -> Record:
    """A record with the scores of predictions of test targets y."""
    pointwise = np.asarray(scores.log_score(prediction, y, pointwise=True))
    error = scores.paired_difference(pointwise, np.zeros_like(pointwise))[1]
    figures = {**scores.scores_of(prediction, y), "log_score_se": error}
    return Record(ppl, prediction=prediction, figures=figures, pointwise=pointwise)


def stored_record(reference: Reference, likelihood: Likelihood, y: np.ndarray) -> Record:
    """The results of a stored reference at its test rows; its times are those of the runs that made it."""
    prediction = Prediction(*likelihood.mixture_parameters(reference.predictor("test")))
    cost, grade = reference.cost, reference.card["grade"]
    record = _scored(STORED, prediction, y)
    record.figures |= {
        "kind": "iid" if grade == "bracketed" else "chains",
        "converged": "yes",
        "r_hat_test": reference.worst("R-hat"),
        "ess_min_test": reference.worst("bulk ESS"),
        "compile_seconds": 0.0,
        "run_seconds": cost["seconds"],
        "gradient_evaluations": cost["gradients"],
        "parameters": float(reference.card["weights"]),
    }
    made = "A stored reference: times and gradients are those of the two runs that made it."
    record.notes |= dict.fromkeys(("run_seconds", "gradient_evaluations"), made)
    if grade == "mode-weighted":
        inside = "Of chains that stay in one mode; the masses of modes are those of tempered SMC."
        record.notes |= dict.fromkeys(("r_hat_test", "ess_min_test"), inside)
    record.notes |= dict.fromkeys(_LOO, "The stored reference has draws at the rows of its grid only.")
    _moments(record, reference.shape)
    return record


def stacking_weights(posterior: Posterior) -> str:
    """A sentence on the weights of a stacked posterior."""
    weights = posterior.weights
    assert weights is not None
    gain = posterior.info.figures.get("stacking_gain", math.nan)
    gained = f", {gain:.3g} nats per row above equal weights on the rows that chose them"
    chosen = f"chosen by what each predicts{'' if math.isnan(gain) else gained}"
    weighted = f"{len(weights)} parts with weights from {weights.min():.3f} to {weights.max():.3f}"
    return f"{weighted}, {chosen}: not the posterior."


def _export(record: Record, posterior: Posterior, x_test: Any) -> None:
    from ppl_bnn.posterior.export import posterior_datatree

    chains, draws = posterior.shape
    rows = row_count(posterior.inputs) + row_count(x_test)
    kept = min(chains * draws, max(MOST_VALUES // rows, FEWEST_DRAWS * chains))
    if kept < chains * draws:
        record.notes["elpd_loo"] = (
            f"Of {chains * draws} draws the tree holds {kept // chains * chains}, evenly spaced, as {rows} rows "
            "would make it too large; leave-one-out uses these, everything else uses all."
        )
    record.tree = posterior_datatree(posterior, x_test, draws=None if kept == chains * draws else kept)


def _diagnose(record: Record, posterior: Posterior, x_test: Any) -> None:
    from ppl_bnn.diagnostics.diagnose import CONVERGED, NOT_CONVERGED, PER_MODE, diagnose

    record.diagnosis = diagnosis = diagnose(posterior, x={"test": x_test})
    found, figures = diagnosis.figures, record.figures
    if posterior.kind == "chains":
        figures["r_hat"] = found["rhat"]
        figures["ess_min"] = min(found["ess_bulk"], found["ess_tail"])
        words = {CONVERGED: "yes", PER_MODE: "per mode", NOT_CONVERGED: "no"}
        figures["converged"] = words.get(diagnosis.verdict, "in doubt")
        figures |= {"r_hat_test": found["rhat_at_test"], "ess_min_test": found["ess_at_test"]}
        if diagnosis.verdict in (PER_MODE, NOT_CONVERGED) and found["converged_at_training"]:
            figures["converged"] = NOT_AT_TEST_ROWS
    elif "converged" in posterior.info.figures:
        figures["converged"] = "yes" if posterior.info.figures["converged"] else "no"
    if figures.get("converged", "yes") != "yes":
        record.notes["converged"] = "; ".join(diagnosis.reasons) + "."
        # The reasons contain the warnings of the fit, which are not repeated.
        record.notes.pop("run_seconds", None)
    figures["k_hat"] = found.get("pareto_k")
    if posterior.kind == "iid" and "pareto_k" not in found:
        record.notes["k_hat"] = "The approximation has no density."


def _leave_one_out(record: Record, posterior: Posterior, x_test: Any) -> None:
    from ppl_bnn.diagnostics.importance import K_LIMIT, leave_one_out

    if record.tree is None:
        raise InputError("there is no tree to leave a row out of")
    loo = leave_one_out(posterior, record.tree)
    record.elpd = loo.elpd_data
    if loo.reason:
        record.notes |= dict.fromkeys(_LOO, _sentence(loo.reason))
        return
    record.figures |= {
        "elpd_loo": loo.elpd,
        "elpd_loo_se": loo.se,
        "pareto_k_loo": loo.worst_k,
        "elpd_loo_corrected": loo.corrected_elpd,
        "pareto_k_corrected": loo.corrected_worst_k,
    }
    if loo.share_above > 0.0:
        above = f"Pareto k is above {K_LIMIT} in {loo.share_above:.1%} of the training rows"
        record.notes["pareto_k_loo"] = f"{above}: elpd_loo and what is ranked by it are not to be relied on."
    if loo.corrected_reason and record.figures["kind"] == "iid":
        columns = ["elpd_loo_corrected", *(["pareto_k_corrected"] if loo.corrected_k is None else [])]
        record.notes |= dict.fromkeys(columns, _sentence(loo.corrected_reason))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _moments(record: Record, shape: tuple[int, int]) -> None:
    """Mean and variance of the mean function, and if there are enough draws those of two halves of them."""
    prediction: Any = record.prediction
    record.moments = {"mean": prediction.mean, "variance": prediction.mean_function_variance}
    chains, draws = shape
    of_draws = np.repeat(np.arange(chains), draws) if prediction.draws == chains * draws else None
    with contextlib.suppress(BNNError):
        halves = scores.halves(prediction, of_draws)
        record.moments |= {
            "half_means": np.stack([half.mean for half in halves]),
            "half_variances": np.stack([half.mean_function_variance for half in halves]),
        }


_PARTS = (
    (_export, "The export to ArviZ", ("elpd_loo",)),
    (_diagnose, "The diagnosis", ("converged", "r_hat", "ess_min", "r_hat_test", "ess_min_test", "k_hat")),
    (_leave_one_out, "Leave-one-out cross-validation", _LOO),
    (lambda record, posterior, _: _moments(record, posterior.shape), "The mean function", ("gap_mean",)),
)


def reason(error: BaseException) -> str:
    """An exception in one line."""
    text = clean(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
