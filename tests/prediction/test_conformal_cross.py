"""Conformal prediction by cross-validation beside MAPIE, and all of its scores beside their definitions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mapie.classification import CrossConformalClassifier
from mapie.regression import CrossConformalRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.model_selection import PredefinedSplit

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.prediction.prediction import Prediction

LEVEL = 0.8


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A method in name: `make(x, y)` gives a function from inputs to a prediction."""

    make: Callable[[Any, Any], Callable[[Any], Prediction]]
    checkpoint: Any = None

    def fit(self, model: Any, x: Any, y: Any, **_: Any) -> Any:
        return SimpleNamespace(predict=self.make(x, y), checkpoint=self.checkpoint, model=model)


def ridge(x: Any, y: Any) -> Callable[[Any], Prediction]:
    found = Ridge().fit(x, y)

    def predict(x: Any) -> Prediction:
        # Another scale for each row and each fit, as posteriors have.
        return Prediction(
            "Normal", {"loc": found.predict(x)[None], "scale": np.abs(x[None, :, 0]) + abs(y.mean()) + 0.1}
        )

    return predict


def never(x: Any, y: Any) -> Any:
    raise AssertionError("a fit")


def logistic(x: Any, y: Any) -> Callable[[Any], Prediction]:
    found = LogisticRegression().fit(x, y)
    return lambda x: Prediction("Categorical", {"probs": found.predict_proba(x)[None]})


@pytest.fixture
def numbers(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(90, 3))
    return x, np.sin(2.0 * x[:, 0]) + x[:, 1] + 0.3 * rng.standard_t(4, size=90)


@pytest.fixture
def classes(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(300, 3))
    return x, np.argmax(x @ rng.normal(size=(3, 6)) + rng.gumbel(size=(300, 6)), axis=1)


# --- MAPIE --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["plus", "minmax"])
@pytest.mark.parametrize("folds", [7, 60])
def test_intervals_are_those_of_mapie(numbers: Any, rule: str, folds: int) -> None:
    """Folds of unequal sizes, and the jackknife."""
    x, y = numbers
    found = bnn.cross_conformal(
        None, x[:60], y[:60], Fitted(ridge), LEVEL, "absolute", folds=folds, rule=rule
    )
    peer = CrossConformalRegressor(
        Ridge(), confidence_level=LEVEL, method=rule, cv=PredefinedSplit(found.folds)
    )
    _, ends = peer.fit_conformalize(x[:60], y[:60]).predict_interval(x[60:])
    np.testing.assert_allclose(found.interval(x[60:]), [ends[:, 0, 0], ends[:, 1, 0]], rtol=1e-10)


def test_sets_are_those_of_mapie(classes: Any) -> None:
    x, y = classes
    found = bnn.cross_conformal(None, x[:200], y[:200], Fitted(logistic), LEVEL, "lac", folds=5)
    peer = CrossConformalClassifier(
        LogisticRegression(), confidence_level=LEVEL, conformity_score="lac", cv=PredefinedSplit(found.folds)
    )
    peer = peer.fit_conformalize(x[:200], y[:200])
    _, sets = peer.predict_set(x[200:], agg_scores="crossval")
    np.testing.assert_array_equal(found.sets(x[200:]), sets[:, :, 0])


def test_every_fifth_row_chooses_the_penalty(classes: Any) -> None:
    """The rank that a share `level` of them does not exceed, and the penalty of the smallest sets."""
    x, y = classes
    p, chosen = logistic(x[:60], y[:60])(x), np.arange(60, 260, 5)
    probabilities, seen = p.probabilities, []
    ranks = 1 + np.sum(probabilities[chosen] > probabilities[chosen, y[chosen]][:, None], axis=1)
    rank = int(np.sort(ranks)[math.ceil(LEVEL * 41) - 1])
    for penalty in (0.001, 0.01, 0.1, 0.2, 0.5):
        found = bnn.conformal(p.take(chosen), None, y[chosen], LEVEL, "raps", penalty=(penalty, rank))
        seen.append((found.sets(p.take(chosen)).sum(), penalty))
    assert len({size for size, _ in seen}) > 1
    rest = np.setdiff1d(np.arange(60, 260), chosen)
    wanted = bnn.conformal(p.take(rest), None, y[rest], LEVEL, "raps", penalty=(min(seen)[1], rank))
    found = bnn.conformal(p.take(slice(60, 260)), None, y[60:260], LEVEL, "raps")
    assert (found.penalty, found.threshold, found.rows) == (wanted.penalty, wanted.threshold, 160)
    # Labels that are text.
    names = np.array(list("abcdef"))
    labelled = Prediction("Categorical", p.parameters, labels=tuple(names))
    again = bnn.conformal(labelled.take(slice(60, 260)), None, names[y[60:260]], LEVEL, "raps")
    assert (again.penalty, again.threshold) == (found.penalty, found.threshold)


# --- the definition -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["plus", "minmax"])
@pytest.mark.parametrize("score", ["absolute", "normalised", "quantile"])
@pytest.mark.parametrize("outputs", [0, 2])
def test_intervals_by_their_definition(
    numbers: Any, score: str, rule: str, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate is within if fewer than k rows have a smaller score than it."""
    from ppl_bnn.prediction import conformal as module

    x, y = numbers
    y = np.column_stack([y, 3.0 * y**2]) if outputs else y

    def make(x: Any, y: Any) -> Callable[[Any], Prediction]:
        found = LinearRegression().fit(x, y)
        scale = np.std(y - found.predict(x), axis=0)
        return lambda x: Prediction(
            "Normal",
            {"loc": found.predict(x)[None], "scale": np.multiply.outer(1.0 + np.abs(x[:, 0]), scale)[None]},
        )

    # A new row at a time, too.
    monkeypatch.setattr(module, "BLOCK", 100)
    found = bnn.cross_conformal(None, x[:50], y[:50], Fitted(make), LEVEL, score, folds=6, rule=rule)
    new, k = x[50:], math.ceil(LEVEL * 51)
    lower, upper = found.interval(new)
    assert lower.shape == y[50:].shape

    def scores(prediction: Prediction, y: np.ndarray) -> np.ndarray:
        if score == "quantile":
            low, high = prediction.interval(LEVEL)
            return np.maximum(low - y, y - high)
        return np.abs(y - prediction.mean) / (prediction.std if score == "normalised" else 1.0)

    fits = [posterior.predict for posterior in found.posteriors]
    own = np.stack([scores(fits[fold](x[[row]]), y[[row]])[0] for row, fold in enumerate(found.folds)])
    np.testing.assert_allclose(found.values, own, rtol=1e-12)
    for inside, ends in ((True, 1e-6), (False, -1e-6)):
        for candidate, sign in ((lower + ends, 1.0), (upper - ends, -1.0)):
            each = np.stack([scores(fit(new), candidate) for fit in fits])
            if rule == "minmax":
                within = each.min(axis=0) <= np.sort(own, axis=0)[k - 1]
            else:
                # Of the rows whose intervals are on the other side, as an interval closes the gaps.
                beyond = np.stack([sign * (fit(new).mean - candidate) > 0.0 for fit in fits]) | (not inside)
                within = np.sum((own[:, None] < each[found.folds]) & beyond[found.folds], axis=0) < k
            assert (within == inside).all()


@pytest.mark.parametrize("rule", ["plus", "minmax"])
@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize("randomise", [None, 5])
def test_sets_by_their_definition(classes: Any, score: str, rule: str, randomise: int | None) -> None:
    x, y = classes
    options: dict[str, Any] = {"penalty": (0.05, 2)} if score == "raps" else {}
    options |= {} if score == "lac" else {"randomise": randomise}
    found = bnn.cross_conformal(
        None, x[:120], y[:120], Fitted(logistic), LEVEL, score, folds=4, rule=rule, **options
    )
    held, later = (np.random.default_rng([5, part]).random(rows) for part, rows in ((0, 120), (1, 180)))

    def one(fold: int, row: np.ndarray, label: int, uniform: float) -> float:
        probabilities = found.posteriors[fold].predict(row[None]).probabilities[0]
        if score == "lac":
            return 1.0 - probabilities[label]
        rank = 1 + np.sum(probabilities > probabilities[label])
        counted = 1.0 if randomise is None else 1.0 - uniform
        total = probabilities[probabilities > probabilities[label]].sum() + counted * probabilities[label]
        return total + (0.05 * max(0, rank - 2) if score == "raps" else 0.0)

    own = np.array([one(fold, x[row], y[row], held[row]) for row, fold in enumerate(found.folds)])
    np.testing.assert_allclose(found.values, own, rtol=1e-9)
    k, own = math.ceil(LEVEL * 121), np.round(own, 9)
    sets = found.sets(x[120:])
    for row in range(10):
        for label in range(6):
            each = np.round([one(fold, x[120 + row], label, later[row]) for fold in range(4)], 9)
            within = np.sum(own < each[found.folds]) < k
            if rule == "minmax":
                within = each.min() <= np.sort(own)[k - 1]
            assert sets[row, label] == within


# --- the guarantee ------------------------------------------------------------------------------------------


def least_squares(x: Any, y: Any) -> Callable[[Any], Prediction]:
    weights = np.linalg.lstsq(x, y)[0]
    return lambda x: Prediction("Normal", {"loc": (x @ weights)[None], "scale": np.ones((1, len(x)))})


@pytest.mark.parametrize(("folds", "rule"), [(6, "plus"), (30, "plus"), (6, "minmax"), (30, "minmax")])
def test_coverage_is_what_is_promised(folds: int, rule: str) -> None:
    """Least squares with 8 weights and 30 rows, so that fits differ."""
    rng, runs, new = np.random.default_rng(1), 100, 20
    covered = np.empty(runs)
    for run in range(runs):
        x = rng.normal(size=(30 + new, 8))
        y = x[:, 0] + rng.laplace(size=len(x))
        found = bnn.cross_conformal(
            None, x[:30], y[:30], Fitted(least_squares), LEVEL, "absolute", folds=folds, rule=rule, seed=run
        )
        lower, upper = found.interval(x[30:])
        covered[run] = np.mean((lower <= y[30:]) & (y[30:] <= upper))
    error, m = covered.std() / np.sqrt(runs), 30 // folds
    promised = {
        "plus": 0.6 - min(2.0 * (1.0 - 1.0 / folds) / (m + 1), (1.0 - 1.0 / m) / (folds + 1)),
        "minmax": 25 / (30 + m),
    }[rule]
    assert found.least_coverage == pytest.approx(promised)
    # The level is reached here, although less is proved.
    assert covered.mean() > LEVEL - 4.0 * error
    assert covered.mean() < LEVEL + (0.06 if rule == "plus" else 0.12)


def test_too_few_rows_promise_all_numbers(numbers: Any, classes: Any) -> None:
    found = bnn.cross_conformal(None, numbers[0][:8], numbers[1][:8], Fitted(ridge), 0.9, folds=4)
    lower, upper = found.interval(numbers[0][:3])
    assert found.least_coverage == 1.0
    assert (lower == -np.inf).all()
    assert (upper == np.inf).all()
    x, y = classes[0], np.arange(300) % 2
    for rule in ("plus", "minmax"):
        small = bnn.cross_conformal(None, x[:8], y[:8], Fitted(logistic), 0.9, folds=4, rule=rule)
        assert small.sets(x[:3]).all()
    # Nine are enough.
    found = bnn.cross_conformal(None, numbers[0][:9], numbers[1][:9], Fitted(ridge), 0.9, folds=3)
    assert np.isfinite(found.interval(numbers[0][:3])).all()


# --- use ----------------------------------------------------------------------------------------------------


def test_folds_are_random_and_as_equal_as_possible(numbers: Any) -> None:
    x, y = numbers
    first, again, other = (
        bnn.cross_conformal(None, x, y, Fitted(ridge), folds=7, seed=seed).folds for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert set(np.bincount(first)) == {12, 13}


def test_labels_that_are_text_and_inputs_by_name(classes: Any) -> None:
    """A fit by Laplace to each fold, in the labels of the user."""
    x, y = classes
    names = np.array(["ash", "beech", "cedar"])[y % 3]
    model = bnn.zoo.load("classification_mlp", classes=3, width=3, depth=1)
    with pytest.warns(UserWarning, match="are the classes 0 to 2"):
        found = bnn.cross_conformal(model, x[:80], names[:80], bnn.Laplace(), 0.9, folds=2)
    assert found.posteriors[0].predict(x[:1]).labels == ("ash", "beech", "cedar")
    assert found.sets(x[80:]).shape == (220, 3)
    assert "2 fits to 80 rows: 0.9 by lac" in repr(found)


def test_each_fold_has_a_checkpoint_of_its_own(numbers: Any, tmp_path: Any) -> None:
    found = bnn.cross_conformal(None, *numbers, Fitted(ridge, tmp_path / "fits"), folds=3)
    assert [posterior.checkpoint for posterior in found.posteriors] == [
        tmp_path / "fits" / f"fold{fold}" for fold in range(3)
    ]


def test_what_cannot_be_promised_is_refused(numbers: Any, classes: Any) -> None:
    x, y = numbers
    for folds in (1, 91, 2.0, True):
        with pytest.raises(InputError, match="a whole number from 2 to 90"):
            bnn.cross_conformal(None, x, y, Fitted(ridge), folds=folds)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="did you mean 'plus'"):
        bnn.cross_conformal(None, x, y, Fitted(ridge), rule="pluss")
    with pytest.raises(UnknownNameError, match="did you mean 'absolute'"):
        bnn.cross_conformal(None, x, y, Fitted(ridge), score="absolut")
    with pytest.raises(InputError, match="level"):
        bnn.cross_conformal(None, x, y, Fitted(ridge), 1.0)
    for method in (bnn.MAP, None, "map"):
        with pytest.raises(InputError, match="expected a method"):
            bnn.cross_conformal(None, x, y, method)
    # Nothing is fitted before settings are known to be possible.
    refused: list[dict[str, Any]] = [
        {"score": "absolut"},
        {"score": "lac", "randomise": 1},
        {"penalty": (0.1, 2)},
    ]
    for options in refused:
        with pytest.raises((InputError, UnknownNameError)):
            bnn.cross_conformal(None, x, y, Fitted(never), **options)
    with pytest.raises(InputError, match="90 rows"):
        bnn.cross_conformal(None, x, y[:-1], Fitted(ridge))
    found = bnn.cross_conformal(None, x, y, Fitted(ridge), folds=2)
    with pytest.raises(UnsupportedError, match="sets"):
        found.sets(x)
    x, y = classes
    with pytest.raises(UnsupportedError, match="interval"):
        bnn.cross_conformal(None, x, y, Fitted(logistic), folds=2).interval(x)
    with pytest.raises(InputError, match="which no rows could choose"):
        bnn.cross_conformal(None, x, y, Fitted(logistic), score="raps")
    alone = np.where(np.arange(300) == 7, 1, 0) + 2 * (np.arange(300) % 2)
    for labels, match in ((alone, "class 3 in one"), (np.array(list("abcd"))[alone], "class 'd' in one")):
        with pytest.raises(InputError, match=match):
            bnn.cross_conformal(None, x, labels, Fitted(logistic), folds=3)


def test_a_penalty_is_checked(classes: Any) -> None:
    x, y = classes
    p = logistic(x, y)(x)
    for penalty in ((-0.1, 2), (0.1, 2.5), (math.inf, 2), (0.1,), "ab"):
        with pytest.raises(InputError, match="two numbers"):
            bnn.conformal(p, None, y, 0.9, "raps", penalty=penalty)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="score='raps'"):
        bnn.conformal(p, None, y, 0.9, "aps", penalty=(0.1, 2))
    with pytest.raises(InputError, match="enough held-out rows to choose a penalty"):
        bnn.conformal(p.take(slice(0, 40)), None, y[:40], 0.9, "raps")
    bnn.conformal(p.take(slice(0, 45)), None, y[:45], 0.9, "raps")
    # Without a penalty it is "aps".
    plain, none = (
        bnn.conformal(p, None, y, 0.9, "aps"),
        bnn.conformal(p, None, y, 0.9, "raps", penalty=(0.0, 0)),
    )
    np.testing.assert_array_equal(plain.sets(p), none.sets(p))
