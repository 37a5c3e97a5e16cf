"""Calibration data per row: the position of each observation in its predictive distribution, for calibration plots.

`scores` has the summary numbers (coverage, the test of the PIT, calibration errors).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.scores import pit

# Number of bins of a reliability diagram.
BINS = 10
# Central intervals whose coverage is reported.
LEVELS = (0.5, 0.8, 0.9, 0.95)
# Descriptions of the arrays in which `Transform` and `Event` are stored.
ARRAYS = {
    "pit": "(N,), the probability integral transform of each target (and output), randomised where it is a count",
    "cdf": "(2, N), the distribution function just below each target and at it, of counts alone",
    "event": "(2, N), of classes: how probable what was predicted was, and whether it came true (1.0)",
}


@dataclass(frozen=True)
class _PerRow:
    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Concatenate the arrays of several predictions."""
        several = list(parts)
        return cls(*(np.concatenate([getattr(part, each.name) for part in several]) for each in fields(cls)))


@dataclass(frozen=True)
class Transform(_PerRow):
    """Position of each target in its predictive distribution, arrays (N,).

    `below` and `at` are F_n just below the target and at it; they differ for counts only. `pit` is a point between the
    two that is uniform where predictions are calibrated.
    """

    below: np.ndarray
    at: np.ndarray
    pit: np.ndarray

    @classmethod
    def of(cls, prediction: Prediction, y: np.ndarray) -> Transform:
        """The transform of each target (and output), flattened.

        Raises UnsupportedError if the targets have no distribution function, InputError if y does not match the
        prediction.
        """
        drawn = np.clip(np.ravel(pit(prediction, y, seed=0)), 0.0, 1.0)
        if not prediction.is_counts:
            return cls(drawn, drawn, drawn)
        values = np.asarray(y, dtype=np.float64)
        return cls(np.ravel(prediction.cdf(values - 1.0)), np.ravel(prediction.cdf(values)), drawn)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Transform:
        """The inverse of `arrays`."""
        below, at = arrays["cdf"] if "cdf" in arrays else (arrays["pit"], arrays["pit"])
        return cls(below, at, arrays["pit"])

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the transform, for storage (see `ARRAYS`)."""
        return {"pit": self.pit} | ({} if self.below is self.at else {"cdf": np.stack([self.below, self.at])})

    @property
    def of_counts(self) -> bool:
        """Whether the distribution functions jump at the observations."""
        return not np.array_equal(self.below, self.at)

    def covered(self, level: float) -> float:
        """Coverage of the central intervals of probability `level`, as `scores.coverage`.

        A target is in its interval if F_n at it reaches the lower level and F_n below it does not reach the upper
        level, so no quantile has to be computed.
        """
        low, high = 0.5 * (1.0 - level), 0.5 * (1.0 + level)
        return float(np.mean((self.at >= low) & (self.below < high)))


@dataclass(frozen=True)
class Event(_PerRow):
    """Data of a reliability diagram, arrays (N,).

    `probability` is the predicted probability of class 1, or of the most probable of more than two classes; `happened`
    says whether that class was the label.
    """

    probability: np.ndarray
    happened: np.ndarray

    @classmethod
    def of(cls, prediction: Prediction, labels: np.ndarray) -> Event:
        """The event of each row, for class numbers `labels` (N,)."""
        probability = prediction.probabilities
        if prediction.classes == 2:
            return cls(probability[:, 1], labels == 1)
        return cls(probability.max(axis=1), probability.argmax(axis=1) == labels)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Event:
        """The inverse of `arrays`."""
        probability, happened = arrays["event"]
        return cls(probability, happened > 0.5)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the events, for storage (see `ARRAYS`)."""
        return {"event": np.stack([self.probability, self.happened.astype(np.float64)])}

    def binned(self) -> dict[str, np.ndarray]:
        """Mean `probability`, `share` of events that happened and number of `rows`, for each bin that has rows."""
        bins = np.clip((self.probability * BINS).astype(int), 0, BINS - 1)
        _, which, rows = np.unique(bins, return_inverse=True, return_counts=True)
        return {
            "probability": np.bincount(which, weights=self.probability) / rows,
            "share": np.bincount(which, weights=self.happened) / rows,
            "rows": rows,
        }
