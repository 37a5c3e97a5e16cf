"""Where predictions put what was observed, row by row: what pictures of calibration are made of.

`scores` has the numbers that come of it (coverage, the test of the PIT, calibration errors).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.scores import pit

# Of a reliability diagram.
BINS = 10
# Central intervals whose coverage is told in numbers.
LEVELS = (0.5, 0.8, 0.9, 0.95)
# What `Transform` and `Event` are, as arrays of a file.
ARRAYS = {
    "pit": "(N,), the probability integral transform of each target (and output), randomised where it is a count",
    "cdf": "(2, N), the distribution function just below each target and at it, of counts alone",
    "event": "(2, N), of classes: how probable what was predicted was, and whether it came true (1.0)",
}


@dataclass(frozen=True)
class Transform:
    """Where in its predictive distribution each target fell: F_n just below it and F_n at it, which differ for counts
    only, and `pit`, a point between the two that is uniform where predictions are calibrated. (N,) each."""

    below: np.ndarray
    at: np.ndarray
    pit: np.ndarray

    @classmethod
    def of(cls, prediction: Prediction, y: np.ndarray) -> Transform:
        """The transform of each target (and output), in one row of numbers.

        Raises
        ------
        UnsupportedError, InputError: what has no distribution function of its targets.
        """
        drawn = np.clip(np.ravel(pit(prediction, y, seed=0)), 0.0, 1.0)
        if not prediction.is_counts:
            return cls(drawn, drawn, drawn)
        values = np.asarray(y, dtype=np.float64)
        return cls(np.ravel(prediction.cdf(values - 1.0)), np.ravel(prediction.cdf(values)), drawn)

    @classmethod
    def joined(cls, parts: Iterable[Transform]) -> Transform:
        """Those of several predictions as one."""
        several = list(parts)
        below, at, drawn = (
            np.concatenate([getattr(part, name) for part in several]) for name in ("below", "at", "pit")
        )
        return cls(below, at, drawn)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Transform:
        """From arrays as `arrays` gives them."""
        below, at = arrays["cdf"] if "cdf" in arrays else (arrays["pit"], arrays["pit"])
        return cls(below, at, arrays["pit"])

    def arrays(self) -> dict[str, np.ndarray]:
        """What it is made of (see `ARRAYS`)."""
        return {"pit": self.pit} | ({} if self.below is self.at else {"cdf": np.stack([self.below, self.at])})

    @property
    def of_counts(self) -> bool:
        """Whether distribution functions jump at what was observed."""
        return not np.array_equal(self.below, self.at)

    def covered(self, level: float) -> float:
        """`scores.coverage` of central intervals: a target lies in one where F_n at it reaches the lower quantile, and
        F_n below it not the upper one, so that no quantile has to be found."""
        low, high = 0.5 * (1.0 - level), 0.5 * (1.0 + level)
        return float(np.mean((self.at >= low) & (self.below < high)))


@dataclass(frozen=True)
class Event:
    """What a reliability diagram looks at, (N,) each: the predicted probability of class 1, or of the most probable
    class where there are more than two, and whether that was the label."""

    probability: np.ndarray
    happened: np.ndarray

    @classmethod
    def of(cls, prediction: Prediction, labels: np.ndarray) -> Event:
        """labels: class numbers, (N,)."""
        if prediction.classes == 2:
            return cls(prediction.probabilities[:, 1], labels == 1)
        probability = prediction.probabilities
        return cls(probability.max(axis=1), probability.argmax(axis=1) == labels)

    @classmethod
    def joined(cls, parts: Iterable[Event]) -> Event:
        """Those of several predictions as one."""
        several = list(parts)
        return cls(
            np.concatenate([part.probability for part in several]),
            np.concatenate([part.happened for part in several]),
        )

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Event:
        """From arrays as `arrays` gives them."""
        probability, happened = arrays["event"]
        return cls(probability, happened > 0.5)

    def arrays(self) -> dict[str, np.ndarray]:
        """What it is made of (see `ARRAYS`)."""
        return {"event": np.stack([self.probability, self.happened.astype(np.float64)])}

    def binned(self) -> dict[str, np.ndarray]:
        """For each of `BINS` equal bins of [0, 1] with rows: mean `probability`, `share` that came true, `rows`."""
        which = np.clip((self.probability * BINS).astype(int), 0, BINS - 1)
        rows = np.bincount(which, minlength=BINS)
        used = rows > 0
        return {
            "probability": np.bincount(which, weights=self.probability, minlength=BINS)[used] / rows[used],
            "share": np.bincount(which, weights=self.happened, minlength=BINS)[used] / rows[used],
            "rows": rows[used],
        }
