"""The findings of a report on a comparison: scores of single rows, problems of the fits, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.diagnostics.diagnose import INADEQUATE, UNDECIDED
from ppl_bnn.diagnostics.importance import K_LIMIT, LeaveOneOut, leave_one_out
from ppl_bnn.evaluation.comparison import summary
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.evaluation.comparison.record import STORED
from ppl_bnn.evaluation.comparison.summary import STANDARD_ERRORS, Lags, lags_of
from ppl_bnn.prediction import scores
from ppl_bnn.prediction.reliability import LEVELS, Event, Transform
from ppl_bnn.reporting import verdict
from ppl_bnn.reporting.verdict import ELPD, SCORE, UnitBlock, Verdict, judge


class Findings(UnitBlock):
    """The findings on a comparison, each computed on first use. Methods are compared over test rows."""

    pairing = "over the same test rows"
    time = "wall time of the fit, compilation included"

    def __init__(self, comparison: Comparison):
        self.comparison, self.table, self.blocks = comparison, comparison.table, {"": self}
        rows = len(comparison.test_targets)
        self.units = f"{rows} test rows" if rows > 1 else "one test row"
        self.names = [str(name) for name in self.table.index if name in comparison.predictions]
        self.reference = comparison.reference if comparison.reference in self.names else None

    # --- scores -------------------------------------------------------------------------------------------

    @cached_property
    def row_scores(self) -> dict[str, dict[str, np.ndarray]]:
        """Scores of each test row: column of the table -> method -> (N,), larger being better.

        The mean over rows is the value of the table; rmse has squared errors, which have the same order. Columns that
        are not such means (ece, coverage, widths) and those of censored rows are left out.
        """
        y = self.comparison.test_targets
        found: dict[str, dict[str, np.ndarray]] = {SCORE: self.comparison.pointwise_log_scores()}
        for name, prediction in self.comparison.predictions.items():
            of_rows: dict[str, Any] = {}
            if prediction.is_classes:
                of_rows["accuracy"] = prediction.probabilities.argmax(axis=1) == np.asarray(y)
                of_rows["brier"] = -np.asarray(scores.brier(prediction, y, pointwise=True))
            elif math.isfinite(self.number(name, "rmse")):
                of_rows["rmse"] = -((prediction.mean - prediction.observed_values(y)) ** 2)
                if math.isfinite(self.number(name, "crps")):
                    of_rows["crps"] = -np.asarray(scores.crps(prediction, y, pointwise=True))
            for column, values in of_rows.items():
                # Means over the outputs of each row.
                by_row = np.asarray(values, dtype=np.float64).reshape(len(values), -1).mean(axis=1)
                found.setdefault(column, {})[name] = by_row
        return found

    @cached_property
    def left_out(self) -> dict[str, LeaveOneOut]:
        """PSIS-LOO of each tree for which leave-one-out is defined."""
        found = {name: leave_one_out(tree) for name, tree in self.comparison.trees.items()}
        return {name: loo for name, loo in found.items() if not loo.reason}

    @cached_property
    def left_out_rows(self) -> dict[str, np.ndarray]:
        """ELPD of each training row by leave-one-out."""
        return {name: np.ravel(loo.elpd_data.elpd_i.values) for name, loo in self.left_out.items()}

    @cached_property
    def calibrations(self) -> tuple[dict[str, Transform], dict[str, Event]]:
        """Of each method, the probability integral transforms of numbers, or the events of classes."""
        transforms, events = {}, {}
        for name in self.names:
            prediction, y = self.comparison.predictions[name], self.comparison.test_targets
            if prediction.is_classes:
                events[name] = Event.of(prediction, np.asarray(y).astype(int))
                continue
            try:
                transforms[name] = Transform.of(prediction, y)
            except (UnsupportedError, InputError) as error:
                self.no_calibration = str(error)
        return transforms, events

    no_calibration = "No method gave predictions."

    @cached_property
    def intervals(self) -> pd.DataFrame:
        """Intervals and PIT of each method that predicts numbers, one row each.

        Columns: `coverage_50`, `width_50` and so on at `LEVELS`; `pit_distance` and `pit_p` of `scores.pit_uniformity`.
        """
        rows = []
        for name in self.calibrations[0]:
            prediction, y = self.comparison.predictions[name], self.comparison.test_targets
            try:
                found = scores.coverages(prediction, y, LEVELS)
            except UnsupportedError:
                continue
            row: dict[str, Any] = {"method": name}
            for level, share, width in zip(found["level"], found["coverage"], found["width"], strict=True):
                row |= {f"coverage_{100 * level:.0f}": share, f"width_{100 * level:.0f}": width}
            row["pit_distance"], row["pit_p"] = scores.pit_uniformity(prediction, y)
            rows.append(row)
        return pd.DataFrame.from_records(rows)

    # --- what a verdict needs -----------------------------------------------------------------------------

    def lags(self, score: str) -> Lags:
        values = self.row_scores.get(score, {})
        if score == ELPD:
            # The sum over rows, where other scores are the mean.
            values = {name: len(rows) * rows for name, rows in self.left_out_rows.items()}
        lags = lags_of(values)
        if score != "rmse":
            return lags
        # sqrt(a) - sqrt(b) = (a - b) / (sqrt(a) + sqrt(b)), where a and b are mean squared errors.
        root = {name: self.number(name, score) for name in lags}
        # Where both errors are zero, so is their difference.
        both = {name: root[name] + min(root.values()) or 1.0 for name in lags}
        return {name: (lag / both[name], se / both[name]) for name, (lag, se) in lags.items()}

    def paired(self, score: str, first: str, second: str) -> int:
        return len((self.left_out_rows if score == ELPD else self.row_scores[score])[first])

    def problem(self, name: str) -> str:
        if self.table.loc[name, "ppl"] == STORED:
            return "is a stored posterior, which predicts at the rows of its grid only"
        return summary.problem_of(self.table.loc[name])

    @cached_property
    def reference_doubt(self) -> str:
        row = None if self.reference is None else self.table.loc[self.reference]
        if row is None or not (doubt := summary.doubt_of(row)):
            return ""
        gaps = f"{summary.NO_TRUE_GAPS}, and the verdict does not use them"
        return f"The reference {self.reference} {doubt}{summary.measured(row, 4)}, so {gaps}."

    def doubts(self) -> Iterator[str]:
        comparison, reference = self.comparison, self.comparison.reference
        if self.reference is None:
            why = summary.no_reference(reference, reference in comparison.failures)
            yield f"{why}, so the distance of the methods from the posterior is not known."
        for name in map(str, self.table.index):
            problem = self.problem(name) if name in comparison.predictions else ""
            if problem and not (self.reference_doubt and name == reference):
                reasons = self._reasons(name)
                yield f"{name} {problem}{': ' if reasons else ''}{reasons}."
            if not problem and (undecided := self._undecided(name)):
                yield f"{name} {undecided}."
            if (target := self.table.loc[name, "target"]) and name != reference:
                yield f"{name} has another target than the posterior: {target}."
        yield from (f"{name} gave no posterior: {reason}" for name, reason in comparison.failures.items())

    def _undecided(self, name: str) -> str:
        """What the diagnosis of an approximation leaves open or finds wrong, as the end of a sentence, or "".

        This does not rule out a recommendation: an approximation may predict well and be far from the posterior.
        """
        diagnosis = self.comparison.diagnoses.get(name)
        if diagnosis is None or diagnosis.verdict not in (UNDECIDED, INADEQUATE):
            return ""
        if diagnosis.verdict == INADEQUATE:
            return "is not an adequate approximation of the posterior, however well it predicts; see its diagnosis"
        k = float(diagnosis.figures.get("pareto_k", math.nan))
        reason = f": Pareto k-hat is {k:.2f}, above {K_LIMIT}" if k > K_LIMIT else "; see its diagnosis"
        return f"{verdict.UNDECIDED_FIT}{reason}"

    def _reasons(self, name: str, most: int = 2) -> str:
        """The first reasons of a diagnosis; the page lists all of them below its fits."""
        diagnosis = self.comparison.diagnoses.get(name)
        reasons = [] if diagnosis is None else [str(reason).rstrip(".") for reason in diagnosis.reasons]
        more = f"; and {len(reasons) - most} more, in its diagnosis" if len(reasons) > most else ""
        return "; ".join(reasons[:most]) + more

    def coverage(self, name: str) -> tuple[str, ...]:
        """Whether the 90 % intervals have their nominal coverage, by a binomial standard error."""
        covered, rows = self.number(name, "coverage_90"), len(self.comparison.test_targets)
        if not math.isfinite(covered):
            return ()
        error = math.sqrt(0.9 * 0.1 / rows)
        errors = f"two standard errors ({100 * error:.1f} points each)"
        if abs(covered - 0.9) <= STANDARD_ERRORS * error:
            result = f", within {errors} of the nominal level"
        elif covered > 0.9 and self.comparison.predictions[name].is_counts:
            result = ": intervals of counts end at whole numbers, and contain more than the nominal level"
        else:
            wrong = "narrow" if covered < 0.9 else "wide"
            result = f", more than {errors} from the nominal level: they are too {wrong}"
        return (f"The 90 % intervals of {name} contain {covered:.0%} of the test targets{result}.",)

    def limits(self) -> Iterator[str]:
        """What the numbers of a comparison cannot show."""
        if (rows := len(self.comparison.test_targets)) == 1:
            yield "There is one test row, so there is no standard error, and no difference is established."
        else:
            yield (
                f"Standard errors are over {rows} test rows of one split, with fits of one seed, assuming independent "
                "rows. Another split or seed, and rows that belong together, would add to them."
            )
        if len(self.comparison.predictions) > 2:
            yield (
                "Of pairs of methods that do not differ at all, about one in twenty still shows a difference of more "
                "than two standard errors, by chance."
            )
        yield verdict.MARGIN_LIMIT
        yield "Times are those of one run on one machine, compilation included."


def comparison_verdict(found: Findings) -> Verdict:
    """Which method of a comparison to use, why, and the doubts about it (see `verdict.judge`)."""
    judged = judge(found)
    return replace(judged, limits=tuple(found.limits())) if judged.lags else judged
