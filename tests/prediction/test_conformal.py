"""Split-conformal intervals and sets: their coverage is a theorem, and is counted here where predictions are wrong."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from ppl_bnn.core import checks
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.prediction.conformal import conformal
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.recalibration import recalibrate


def _wrong(rng, rows):
    """Numbers, and a prediction with the wrong place, the wrong width and the wrong shape."""
    loc, scale = rng.normal(size=(2, rows)), rng.gamma(3.0, 0.3, (2, rows))
    y = loc[0] + 1.0 + 3.0 * rng.laplace(size=rows)
    return Prediction("Normal", {"loc": loc, "scale": scale}), y


def _wrong_classes(rng, rows):
    """Labels that have nothing to do with what is predicted of them."""
    return Prediction("Categorical", {"probs": rng.dirichlet(np.full(5, 0.5), (2, rows))}), rng.choice(
        5, rows, p=[0.5, 0.2, 0.1, 0.1, 0.1]
    )


# --- the guarantee ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "score", ["absolute", "normalised", "quantile", "lac", "aps", "aps, randomised", "raps, randomised"]
)
@pytest.mark.parametrize(("rows", "level"), [(20, 0.8), (9, 0.9)])
def test_coverage_is_what_is_promised(score, rows, level):
    """k / (n + 1), exactly, over held-out rows and new ones: the mean of many runs within 4 of its standard errors.

    Within a run the coverage of new rows is from a Beta(k, n + 1 - k) distribution, and its variance is known.
    """
    make = _wrong_classes if score.split(",")[0] in ("lac", "aps", "raps") else _wrong
    penalty = (0.1, 2) if "raps" in score else None
    runs, new = 200, 25
    rng = np.random.default_rng(0)
    covered = np.empty(runs)
    for run in range(runs):
        p, y = make(rng, rows + new)
        held, fresh = p.take(slice(None, rows)), p.take(slice(rows, None))
        seed = run if "randomised" in score else None
        found = conformal(held, None, y[:rows], level, score.split(",")[0], randomise=seed, penalty=penalty)
        if make is _wrong_classes:
            covered[run] = found.sets(fresh)[np.arange(new), y[rows:]].mean()
        else:
            lower, upper = found.interval(fresh)
            covered[run] = np.mean((lower <= y[rows:]) & (y[rows:] <= upper))
    k = math.ceil(level * (rows + 1) - 1e-9)
    share = k / (rows + 1)
    assert share >= level
    beta = stats.beta(k, rows + 1 - k)
    assert beta.mean() == pytest.approx(share)
    variance = beta.var() + (share * (1.0 - share) - beta.var()) / new
    if score == "aps":  # least probable classes are ties, which can only add to the coverage
        assert covered.mean() > share + 4.0 * np.sqrt(variance / runs)
        return
    assert abs(covered.mean() - share) < 4.0 * np.sqrt(variance / runs)
    # Not only on average: the shares of runs differ as they should.
    assert np.var(covered) == pytest.approx(variance, rel=0.5)


def test_each_output_has_the_coverage_by_itself():
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(300):
        y = rng.normal(size=(40, 2)) * [1.0, 30.0]
        p = Prediction("Normal", {"loc": np.zeros((1, 40, 2)), "scale": np.ones((1, 40, 2))})
        found = conformal(p.take(slice(0, 15)), None, y[:15], 0.75)
        lower, upper = found.interval(p.take(slice(15, None)))
        covered.append(np.mean((lower <= y[15:]) & (y[15:] <= upper), axis=0))
    assert found.threshold.shape == (2,)  # type: ignore[union-attr]
    error = np.std(covered, axis=0) / np.sqrt(300.0)
    assert (np.abs(np.mean(covered, axis=0) - 12.0 / 16.0) < 4.0 * error).all()


# --- the definitions ----------------------------------------------------------------------------------------


def test_intervals_by_hand():
    rng = np.random.default_rng(0)
    p, y = _wrong(rng, 30)
    new, _ = _wrong(rng, 4)
    k = 25  # ceil(31 * 0.8)
    q = np.sort(np.abs(y - p.mean))[k - 1]
    np.testing.assert_allclose(
        conformal(p, None, y, 0.8, "absolute").interval(new), [new.mean - q, new.mean + q]
    )
    q = np.sort(np.abs(y - p.mean) / p.std)[k - 1]
    expected = [new.mean - q * new.std, new.mean + q * new.std]
    np.testing.assert_allclose(conformal(p, None, y, 0.8).interval(new), expected)
    (a, b), (c, d) = p.interval(0.8), new.interval(0.8)
    q = np.sort(np.maximum(a - y, y - b))[k - 1]
    np.testing.assert_allclose(conformal(p, None, y, 0.8, "quantile").interval(new), [c - q, d + q])


def test_sets_by_hand():
    probs = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.1, 0.3], [0.3, 0.4, 0.3]])
    p = Prediction("Categorical", {"probs": probs[None]})
    y = np.array([0, 2, 2, 1])
    # 1 - P_y: 0.5, 0.3, 0.7, 0.6; the 3rd of 4, ceil(5 * 0.6), is 0.6.
    new = Prediction(
        "Categorical", {"probs": np.array([[[0.45, 0.35, 0.2], [0.1, 0.3, 0.6], [0.34, 0.33, 0.33]]])}
    )
    lac = conformal(p, None, y, 0.6)
    assert lac.threshold == pytest.approx(0.6)
    assert lac.sets(new).tolist() == [[True, False, False], [False, False, True], [False, False, False]]
    # Down to y: 0.5, 0.7, 0.9, 0.4; the 3rd is 0.7.
    aps = conformal(p, None, y, 0.6, "aps")
    assert aps.threshold == pytest.approx(0.7)
    assert aps.sets(new).tolist() == [[True, False, False], [False, False, True], [True, True, False]]


def test_an_interval_that_is_much_too_wide_shrinks_to_a_point():
    p = Prediction("Normal", {"loc": np.zeros((1, 30)), "scale": np.full((1, 30), 100.0)})
    y = 0.01 * np.random.default_rng(0).normal(size=30)
    found = conformal(p, None, y, 0.5, "quantile")
    narrow = Prediction("Normal", {"loc": np.array([[7.0]]), "scale": np.ones((1, 1))})
    lower, upper = found.interval(narrow)
    np.testing.assert_allclose([lower, upper], 7.0)
    lower, upper = found.interval(p)
    assert (upper - lower).max() < 0.1


def test_too_few_rows_give_no_finite_interval():
    rng = np.random.default_rng(0)
    p, y = _wrong(rng, 8)
    with pytest.warns(UserWarning, match="needs 9 held-out rows, and there are 8"):
        found = conformal(p, None, y, 0.9)
    lower, upper = found.interval(p)
    assert (lower == -np.inf).all()
    assert (upper == np.inf).all()
    classes, labels = _wrong_classes(rng, 8)
    for score in ("lac", "aps"):
        with pytest.warns(UserWarning, match="every class"):
            assert conformal(classes, None, labels, 0.9, score).sets(classes).all()
    for rows, level in ((9, 0.9), (19, 0.95), (99, 0.99)):  # the fewest that are enough
        p, y = _wrong(rng, rows)
        assert np.isfinite(conformal(p, None, y, level).threshold)


def test_levels_are_taken_as_they_are_written():
    """(n + 1) level is a whole number for each of these, and rounding makes it larger: one row more would be taken."""
    for rows, level, k in ((99, 0.07, 7), (99, 0.14, 14), (99, 0.28, 28), (99, 0.55, 55), (99, 0.56, 56)):
        assert math.ceil(level * (rows + 1)) == k + 1
        p = Prediction("Normal", {"loc": np.zeros((1, rows)), "scale": np.ones((1, rows))})
        y = np.arange(1.0, rows + 1.0)
        assert conformal(p, None, y, level, "absolute").threshold == k


def test_counts_have_intervals_too():
    rng = np.random.default_rng(0)
    p = Prediction("Poisson", {"rate": rng.gamma(3.0, 2.0, (3, 200))})
    y = rng.negative_binomial(2, 0.2, 200)
    for score in ("absolute", "normalised", "quantile"):
        lower, upper = conformal(p.take(slice(0, 100)), None, y[:100], 0.8, score).interval(p)
        assert np.mean((lower <= y) & (y <= upper)) > 0.7


# --- sources ------------------------------------------------------------------------------------------------


def test_a_source_predicts_for_itself():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)), rng.normal(size=60)
    asked = []

    def predict(x, **keywords):
        asked.append(keywords)
        return Prediction("Normal", {"loc": x[None, :, 0], "scale": np.ones((1, len(x)))})

    info = SimpleNamespace(data_hash=checks.data_hash(x[:20], y[:20]))
    source = SimpleNamespace(predict=predict, info=info)
    found = conformal(source, x[20:], y[20:], 0.8, draws=7)
    lower, upper = found.interval(x[:3])
    np.testing.assert_allclose(0.5 * (lower + upper), x[:3, 0])
    assert asked == [{"draws": 7}, {"draws": 7}]
    assert "0.8 by normalised, from 40 rows" in repr(found)
    # On top of a recalibration by other rows; an isotonic map has means, standard deviations and quantiles.
    again = recalibrate(source, x[20:40], y[20:40])
    for score in ("absolute", "normalised", "quantile"):
        lower, upper = conformal(again, x[40:], y[40:], 0.8, score).interval(x[40:])
        assert np.mean((lower <= y[40:]) & (y[40:] <= upper)) >= 0.8
    for each in (source, again):
        with pytest.raises(InputError, match="has not seen"):
            conformal(each, x[:20], y[:20])


def test_what_cannot_be_promised_is_refused():
    rng = np.random.default_rng(0)
    p, y = _wrong(rng, 30)
    classes, labels = _wrong_classes(rng, 30)
    for level in (0.0, 1.0, 1.5, float("nan")):
        with pytest.raises(InputError, match="level"):
            conformal(p, None, y, level)
    with pytest.raises(UnknownNameError, match="did you mean 'normalised'"):
        conformal(p, None, y, score="normalized")
    with pytest.raises(UnknownNameError):
        conformal(classes, None, labels, score="absolute")
    with pytest.raises(UnsupportedError, match="sets"):
        conformal(classes, None, labels).interval(classes)
    with pytest.raises(UnsupportedError, match="interval"):
        conformal(p, None, y).sets(p)
    for found, other in ((conformal(p, None, y), classes), (conformal(classes, None, labels), p)):
        with pytest.raises(UnsupportedError):
            (found.sets if found.score == "lac" else found.interval)(other)
    heavy = Prediction("StudentT", {"df": np.full((1, 30), 1.5), **p.take_draws([0]).parameters})
    with pytest.raises(UnsupportedError, match="finite standard deviation"):
        conformal(heavy, None, y)
    assert np.isfinite(conformal(heavy, None, y, score="quantile").threshold)
    censored = Prediction("CensoredNormal", p.parameters)
    events = np.column_stack([y, np.arange(30) % 2])
    with pytest.raises(UnsupportedError, match="censored"):
        conformal(censored, None, events)
    with pytest.raises(InputError, match="shape"):
        conformal(p, None, y[:5])
    with pytest.raises(InputError, match="randomise"):
        conformal(classes, None, labels, randomise=0)


def test_later_rows_have_uniforms_of_their_own():
    # The score of "aps" with a random part: probability down to the class, less u times its own.
    probs = np.tile([0.5, 0.3, 0.2], (40, 1))
    p = Prediction("Categorical", {"probs": probs[None]})
    y = np.arange(40) % 3
    held_out, later = (np.random.default_rng([7, part]).random(40) for part in (0, 1))
    values = np.cumsum(probs, axis=1) - held_out[:, None] * probs
    threshold = np.sort(values[np.arange(40), y])[int(np.ceil(0.6 * 41)) - 1]
    found = conformal(p, None, y, 0.6, "aps", randomise=7)
    assert found.threshold == pytest.approx(threshold, rel=1e-12)
    wanted = np.cumsum(probs, axis=1) - later[:, None] * probs <= threshold
    np.testing.assert_array_equal(found.sets(p), wanted)
    # The same uniforms as for the held-out rows would give other sets.
    assert (wanted != (values <= threshold)).any()
