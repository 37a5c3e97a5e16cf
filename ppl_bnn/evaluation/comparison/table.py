"""The table of a comparison: a row per method, their ranking by leave-one-out, and their gaps to the reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.warning_filters import recorded
from ppl_bnn.evaluation.comparison.record import Record, reason
from ppl_bnn.evaluation.comparison.summary import no_reference, standing
from ppl_bnn.prediction import scores

if TYPE_CHECKING:
    import pandas as pd

COLUMNS: dict[str, str] = {
    "reference": "'reference' where the gaps are measured against this method, with what keeps it from being one: "
    "'(not converged)', '(not converged at the test rows)', '(converged per mode only)', '(of another target)'",
    "kind": "'chains', 'iid' (an approximation that draws independently) or 'point'",
    "ppl": "the system that ran the method; 'stored' for a stored reference, 'outside' for an estimator from outside",
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
    "r_hat": "largest rank-normalised split R-hat in function space, at training rows (chains only)",
    "ess_min": "smallest effective sample size in function space, at training rows (chains only)",
    "r_hat_test": "largest rank-normalised split R-hat of the network's outputs at test rows (chains only)",
    "ess_min_test": "smallest effective sample size of the network's outputs at test rows (chains only)",
    "converged": "chains: in function space at training and test rows, 'not at test rows' where at training rows only, "
    "'per mode' where each by itself has but they disagree, 'in doubt' where R-hat and ESS are good but the sampler "
    "complained; else whether the optimisation settled, blank where the method "
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
REGRESSION_SCORES = ("rmse", "crps", "coverage_90", "width_90", "concordance")
CLASSIFICATION_SCORES = ("accuracy", "brier", "ece")
WORDS = ("reference", "kind", "ppl", "target", "converged", "failure")
NOT_RANKED = "Methods are ranked when the last one has finished."


def typed(table: Any, words: Collection[str]) -> pd.DataFrame:
    """The table with floats in all columns but those of `words`, where a blank is ""."""
    for column in table.columns:
        values = table[column]
        if column in words:
            table[column] = values.astype(object).where(values.notna(), "")
        else:
            table[column] = values.astype(float)
    return table


def table_of(
    records: Mapping[str, Record], reference: str | None, task: str, *, ranked: bool = True
) -> tuple[pd.DataFrame, dict[tuple[str, str], str]]:
    """The table of the methods so far, and (method, column) -> a note.

    `ranked` compares the methods by leave-one-out, which takes longer than all the rest.
    """
    import pandas as pd

    notes = {name: dict(each.notes) for name, each in records.items()}
    rows = {name: {"ppl": one.ppl, "failure": one.failure, **one.figures} for name, one in records.items()}
    if ranked:
        _rank(records, rows, notes)
    else:
        for name in (name for name, each in records.items() if each.elpd is not None):
            notes[name] |= {"loo_rank": NOT_RANKED, "loo_weight": NOT_RANKED}
    measure_gaps(reference, rows, notes, lambda name: records[name].moments, task == "classification")
    left_out = {*(CLASSIFICATION_SCORES if task == "regression" else REGRESSION_SCORES)}
    if not any("concordance" in row for row in rows.values()):
        left_out.add("concordance")
    columns = [name for name in COLUMNS if name not in left_out]
    index = pd.Index(list(rows), name="method")
    found = {(name, column): note for name, each in notes.items() for column, note in each.items()}
    return typed(pd.DataFrame(list(rows.values()), index, columns), WORDS), found


def _rank(
    records: Mapping[str, Record], rows: dict[str, dict[str, Any]], notes: dict[str, dict[str, str]]
) -> None:
    """ArviZ's ranking and stacking weights of the methods for which leave-one-out is defined."""
    results = {name: record.elpd for name, record in records.items() if record.elpd is not None}
    if not results:
        return
    import arviz_stats

    try:
        with recorded() as caught:
            ranking = arviz_stats.compare(  # pyright: ignore[reportPrivateImportUsage]
                results, method="stacking", round_to="none"
            )
        # ArviZ's warnings are notes of the table, once each; other warnings pass through.
        noted = [each for each in caught if issubclass(each.category, UserWarning | RuntimeWarning)]
        texts = dict.fromkeys(" ".join(str(each.message).split()) for each in noted)
        for each in (each for each in caught if each not in noted):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    except Warning:
        raise
    except Exception as error:
        texts, ranking = {f"the comparison failed: {reason(error)}": None}, None
    for name in results:
        if ranking is not None:
            rows[name] |= {f"loo_{each}": float(ranking.loc[name, each]) for each in ("rank", "weight")}
        if texts:
            notes[name]["loo_weight"] = "ArviZ: " + " ".join(texts)


def measure_gaps(
    reference: str | None,
    rows: Mapping[str, dict[str, Any]],
    notes: Mapping[str, dict[str, str]],
    moments: Callable[[str], Mapping[str, np.ndarray]],
    classes: bool,
) -> None:
    """Write into the row of each method its gap to the reference and the noise floor, or into its notes why not.

    rows, notes, moments: by method; `moments` are those of `record.Record`. The row of the reference gets its standing.
    """
    fitted = [name for name, row in rows.items() if not row["failure"]]
    if reference not in fitted:
        for name in fitted:
            notes[name].setdefault("gap_mean", f"{no_reference(reference, reference in rows)}.")
        return
    rows[reference]["reference"] = standing(rows[reference])
    # Another label of the same fit has the same notes, and a gap.
    notes[reference]["gap_mean"] = "The reference has no gap to itself."
    of = moments(reference)
    both = zip(of.get("half_means", ()), of.get("half_variances", ()), strict=True)
    halves = [{"mean": mean, "variance": variance} for mean, variance in both] or [{}, {}]
    for name in fitted:
        pairs: dict[tuple[str, str], Any] = {("gap_mean_floor", "gap_sd_floor"): halves}
        if name != reference:
            pairs["gap_mean", "gap_sd_ratio"] = [moments(name), of]
        for columns, pair in pairs.items():
            try:
                rows[name].update(zip(columns, gap(*pair, classes=classes), strict=True))
                notes[name].pop(columns[0], None)
            except InputError as error:
                notes[name].setdefault(columns[0], reason(error))


def gap(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], classes: bool
) -> tuple[float, float]:
    """Gap of means and ratio of standard deviations (`scores.fidelity`) of two mean functions at equal rows.

    With `classes`, mean functions are (N, C). Raises InputError for missing moments, other shapes, or a reference
    without spread.
    """
    known, expected = "mean" in ours and "mean" in theirs, "two mean functions with their variances"
    InputError.check(known, "", expected, "one at most", "predictions of more draws")
    shape, wanted = ours["mean"].shape, theirs["mean"].shape
    InputError.check(shape == wanted, "", f"a mean function of shape {wanted}", shape, "the same rows")
    moments = (each[name] for each in (ours, theirs) for name in ("mean", "variance"))
    found = scores.mean_function_gap(*moments, classes=classes)
    return found["mean_gap"], found["sd_ratio"]
