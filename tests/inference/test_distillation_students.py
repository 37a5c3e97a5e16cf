"""Distillation, against closed forms, SciPy and scikit-learn."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError
from ppl_bnn.inference import distillation
from ppl_bnn.prediction.prediction import Prediction
from tests.problems import Conjugate, regression_data, small_classifier, small_network

QUICK = bnn.MAP(steps=300, tolerance=0.1)
# Where it does not matter how near a student comes.
SHORT = bnn.MAP(steps=50, polish=False)


def logistic(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Bernoulli())


def constant(x: Any, y: Any = None) -> None:
    """A student that cannot vary: the same normal at every input."""
    bnn.observe(
        y, bnn.mlp(0.0 * x, [2], prior=priors.Normal(0.0, 1.0)), likelihoods.HeteroscedasticGaussian()
    )


@functools.cache
def conjugate() -> tuple[Conjugate, Any]:
    """A problem whose predictive is normal with known moments, and its exact posterior: Laplace of a Gaussian."""
    problem = Conjugate.make(rows=15)
    return problem, bnn.fit(problem.model, problem.x, problem.y, bnn.Laplace())


@functools.cache
def classifier() -> Any:
    x, y = regression_data()
    return bnn.fit(small_classifier, x, np.digitize(y, [-0.5, 0.5]), bnn.Laplace(ppl="pyro", steps=300))


@functools.cache
def varied(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs of a distillation of `conjugate` with seed 0: those that the student saw, and those held out."""
    _, posterior = conjugate()
    rng = np.random.default_rng(distillation.site_seed("distillation", 0))
    return distillation._inputs(posterior, None, rows, rng)


def divergences_by_quadrature(problem: Conjugate, student: Any, x: np.ndarray) -> np.ndarray:
    """KL(N(m, v + noise^2) || student) at each row, by Gauss and Hermite's rule."""
    mean, variance = problem.predictive(x)
    sd = np.sqrt(variance + problem.noise**2)
    z, weights = np.polynomial.hermite_e.hermegauss(60)
    q, found = student.predict(x), np.zeros(len(x))
    for each, weight in zip(z, weights / weights.sum(), strict=True):
        y = mean + sd * each
        found += weight * (stats.norm.logpdf(y, mean, sd) - q.log_prob(y))
    return found


# --- closed forms -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_student_reaches_a_predictive_that_is_known_in_closed_form() -> None:
    problem, posterior = conjugate()
    student = posterior.distil(rows=400)
    _, unseen = varied(400)
    exact = divergences_by_quadrature(problem, student, unseen)
    assert 0.0 <= exact.mean() < 1e-3
    # The mode is far from it: it has no variance of the mean function.
    mode = bnn.fit(problem.model, problem.x, problem.y, bnn.MAP())
    assert divergences_by_quadrature(problem, mode, unseen).mean() > 1e-2
    # What was measured with draws of the teacher is that, within its errors; each input has 32 draws.
    figures, each = student.info.figures, student.info.history["divergence"]
    assert each.shape == (100,)
    assert figures["divergence"] == pytest.approx(each.mean())
    noise = np.std(each - exact, ddof=1) / np.sqrt(len(each))
    assert abs(figures["divergence"] - exact.mean()) < 4.0 * noise
    assert student.info.warnings == ()


def test_a_heteroscedastic_student_reaches_it_too() -> None:
    """In Pyro; the student above is fitted in NumPyro."""
    problem, _ = conjugate()
    method = bnn.Laplace(ppl="pyro", steps=300)
    posterior = bnn.fit(problem.model, problem.x, problem.y, method, standardise=True)
    student = posterior.distil(bnn.zoo.load("heteroscedastic_mlp"), rows=200)
    p, q = posterior.predict(problem.x), student.predict(problem.x)
    # Normals both: the divergence of q from p in closed form.
    ratio = p.variance / q.variance
    lost = 0.5 * (ratio - 1.0 - np.log(ratio) + (p.mean - q.mean) ** 2 / q.variance)
    assert q.family == "Normal"
    assert lost.mean() < 3e-3


def test_soft_labels_have_the_optimum_of_scikit_learn(ppl: str) -> None:
    x, y = regression_data()
    posterior = bnn.fit(logistic, x, (y > 0).astype(int), bnn.Laplace(ppl=ppl))
    student = posterior.distil(logistic, rows=100, method=bnn.MAP())
    rng = np.random.default_rng(distillation.site_seed("distillation", 0))
    seen, unseen = distillation._inputs(posterior, None, 100, rng)
    share = posterior.predict(seen).probabilities[:, 1]
    found = LogisticRegression(C=1.0 / distillation.PRIOR_WEIGHT, tol=1e-10, max_iter=1000).fit(
        np.concatenate([seen, seen]),
        np.repeat([0, 1], len(seen)),
        sample_weight=np.concatenate([1.0 - share, share]),
    )
    draws = student.draws
    # The bias has a prior of weight 1e-3 here and none there.
    np.testing.assert_allclose(draws["output.weight"].ravel(), found.coef_.ravel(), rtol=2e-3)
    np.testing.assert_allclose(draws["output.bias"].ravel(), found.intercept_, rtol=2e-3, atol=2e-3)
    # Of classes the divergence is exact.
    p = posterior.predict(unseen).probabilities[:, 1]
    q = expit(unseen @ draws["output.weight"].reshape(-1) + draws["output.bias"].ravel())
    lost = p * np.log(p / q) + (1.0 - p) * np.log((1.0 - p) / (1.0 - q))
    np.testing.assert_allclose(student.info.history["divergence"], lost, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("prediction", "tolerance"),
    [
        (Prediction("Normal", {"loc": np.zeros((1, 50)), "scale": np.ones((1, 50))}), 4e-3),
        (Prediction("Laplace", {"loc": np.zeros((1, 400)), "scale": np.ones((1, 400))}), 2e-2),
        (Prediction("Poisson", {"rate": np.full((1, 50), 4.0)}), 1e-2),
        # Counts over more whole numbers than the grid has values.
        (Prediction("Poisson", {"rate": np.full((1, 400), 900.0)}), 1e-2),
    ],
    ids=["Normal", "Laplace", "Poisson", "Poisson, wide"],
)
def test_means_over_the_grid_are_expectations(
    prediction: Prediction, tolerance: float, rng: np.random.Generator
) -> None:
    nodes, weights = distillation._nodes(prediction, rng)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0)
    if prediction.is_counts:
        assert np.array_equal(nodes, np.floor(nodes))
    mean, variance = prediction.mean[0], prediction.variance[0]
    first = np.mean(np.sum(weights * nodes, axis=1))
    second = np.mean(np.sum(weights * (nodes - mean) ** 2, axis=1))
    assert first == pytest.approx(mean, abs=tolerance * np.sqrt(variance))
    # Beyond the ends of the grid lies a probability of 2e-4, which is far out.
    assert second == pytest.approx(variance, rel=2.0 * tolerance)


@pytest.mark.slow
def test_several_outputs_are_distilled(rng: np.random.Generator) -> None:
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [2], prior=priors.Normal(0.0, 1.0)), likelihoods.Gaussian(0.5))

    x = rng.normal(size=(60, 2))
    y = np.column_stack([x[:, 0], 100.0 * x[:, 1] + 1000.0]) + 0.3 * rng.normal(size=(60, 2)) * [1.0, 100.0]
    posterior = bnn.fit(model, x, y, bnn.Laplace(ppl="pyro", steps=300), standardise=True)
    student = posterior.distil(rows=300)
    p, q = posterior.predict(x), student.predict(x)
    assert q.family == "Normal"
    assert q.shape == (60, 2)
    ratio = p.variance / q.variance
    lost = 0.5 * (ratio - 1.0 - np.log(ratio) + (p.mean - q.mean) ** 2 / q.variance)
    # Two numbers, from 32 draws of each of 300 rows.
    assert lost.sum(axis=1).mean() < 0.02


# --- what a student is ------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    """NumPy draws the inputs. `test_method` has the seed of a fit, in both systems."""
    x, y = regression_data()
    posterior = bnn.fit(small_network, x, y, bnn.SVI(ppl="pyro", steps=50, elbo_draws=20), standardise=True)
    first, again, other = (posterior.distil(rows=60, method=SHORT, seed=seed) for seed in (3, 3, 4))
    for name, value in first.unconstrained_draws.items():
        assert np.array_equal(value, again.unconstrained_draws[name])
    assert first.info.figures == again.info.figures
    weight = "student.output.weight"
    assert not np.array_equal(first.unconstrained_draws[weight], other.unconstrained_draws[weight])


def test_a_student_says_whose_it_is_and_is_stored(tmp_path: Path) -> None:
    posterior = classifier()
    student = posterior.distil(rows=80, method=SHORT, seed=5)
    info = student.info
    assert (student.kind, info.method, info.seed) == ("point", "Distillation", 5)
    assert info.data_hash == posterior.info.data_hash
    assert info.settings["teacher"]["method"] == "Laplace"
    assert "Laplace, distilled" in student.target
    assert "not split into epistemic and aleatoric" in str(bnn.diagnose(student))
    student.save(tmp_path / "network")
    again = bnn.load(tmp_path / "network", bnn.student_of(small_classifier))
    x, _ = regression_data()
    assert np.array_equal(again.predict(x).probabilities, student.predict(x).probabilities)
    assert again.info.figures == info.figures
    assert np.array_equal(again.info.history["divergence"], info.history["divergence"])
    with pytest.raises(UnsupportedError, match="one network already"):
        student.distil()


def test_a_loss_above_the_limit_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    _, posterior = conjugate()
    poor = posterior.distil(constant, rows=60, method=QUICK)
    assert "nats per row to its teacher" in poor.info.warnings[0]
    lower = poor.info.figures["divergence"] - 2.0 * poor.info.figures["divergence_se"]
    for limit, expected in ((lower - 1e-9, 1), (lower + 1e-9, 0)):
        monkeypatch.setattr(distillation, "LIMIT", limit)
        student = posterior.distil(constant, rows=60, method=QUICK)
        assert len(student.info.warnings) == expected
        assert bnn.diagnose(student).verdict == ("not converged" if expected else "converged")


def test_the_kind_of_the_prediction_is_chosen(rng: np.random.Generator) -> None:
    posterior = classifier()
    x, _ = regression_data()
    for kind in ("probit", "linearised"):
        found = distillation._soft_targets(posterior, posterior.inputs, kind, rng)
        np.testing.assert_allclose(found["weights"], posterior.predict(x, kind=kind).probabilities)
    assert posterior.distil(rows=60, kind="probit", method=SHORT).info.settings["kind"] == "probit"


# --- inputs -----------------------------------------------------------------------------------------


def test_varied_inputs_keep_what_all_rows_have_in_common(rng: np.random.Generator) -> None:
    x = rng.normal(size=(50, 3))
    x = np.column_stack([x, x.sum(axis=1), np.full(50, 7.0)])
    found = distillation._varied({"a": x, "b": x[:, None, :]}, 2000, rng)
    np.testing.assert_allclose(found["a"][:, 4], 7.0)
    np.testing.assert_allclose(found["a"][:, 3], found["a"][:, :3].sum(axis=1), atol=1e-12)
    assert np.array_equal(found["b"][:, 0], found["a"])
    # Cov(x_i + t (x_j - x_k)) = (1 + 2 E t^2) Cov(x) with E t^2 = 1/12.
    ratio = found["a"][:, 0].var() / x[:, 0].var()
    assert ratio == pytest.approx(1.0 + 2.0 / 12.0, rel=0.15)


def test_given_inputs_are_in_place_of_varied_ones(rng: np.random.Generator) -> None:
    x, y = regression_data()
    posterior = bnn.fit(small_network, x, y, bnn.SVI(ppl="pyro", steps=50, elbo_draws=20), standardise=True)
    pool = rng.normal(size=(50, 2)) * 3.0 + 10.0
    seen, unseen = distillation._inputs(posterior, pool, 200, rng)
    units = posterior.standardisation
    assert units is not None
    given = np.concatenate([seen[60:], unseen])
    assert len(unseen) == 10
    np.testing.assert_allclose(np.sort(units.original_inputs(given), axis=0), np.sort(pool, axis=0))
    assert np.array_equal(np.sort(seen[:60], axis=0), np.sort(posterior.inputs, axis=0))
    assert posterior.distil(x=pool, method=SHORT).info.history["divergence"].shape == (10,)


# --- what is refused --------------------------------------------------------------------------------


def test_what_cannot_be_distilled_is_refused() -> None:
    x, y = regression_data()
    svi = bnn.SVI(ppl="pyro", steps=20, elbo_draws=5)
    graph = bnn.zoo.load("graph_convolution", classes=3)
    coupled = bnn.fit(graph, x, np.digitize(y, [-0.5, 0.5]), svi)
    with pytest.raises(UnsupportedError, match="rows that interact"):
        coupled.distil()
    survival = bnn.zoo.load("survival_mlp", width=3)
    censored = bnn.fit(survival, x, np.column_stack([np.exp(y), y > 0]), svi)
    with pytest.raises(UnsupportedError, match=r"likelihoods\.Censored"):
        censored.distil()
    latent = bnn.fit(bnn.zoo.load("latent_inputs", width=3), x, y, svi)
    with pytest.raises(UnsupportedError, match=r"per-row latent variables.*heteroscedastic_mlp"):
        latent.distil()

    def tokens(x: Any, y: Any = None) -> None:
        f = bnn.ops.mean(bnn.embedding("words", x, 5, 3), 1)
        bnn.observe(y, bnn.dense("output", f, 1), likelihoods.Gaussian(0.5))

    words = np.random.default_rng(0).integers(0, 5, size=(60, 4))
    of_words = bnn.fit(tokens, words, y, svi)
    with pytest.raises(UnsupportedError, match=r"whole numbers, such as tokens.*try x="):
        of_words.distil()
    student = of_words.distil(x=np.random.default_rng(1).integers(0, 5, size=(40, 4)), method=SHORT)
    assert np.isfinite(student.predict(words).log_prob(y)).all()


def test_impossible_students_and_arguments_are_refused() -> None:
    problem, posterior = conjugate()
    labels = classifier()

    def four(x: Any, y: Any = None) -> None:
        small_classifier(x, y, classes=4)

    def two(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [2]), likelihoods.Gaussian(1.0))

    def plain(x: Any, y: Any = None) -> None:
        import pyro
        import pyro.distributions as pd

        weight = pyro.sample("weight", pd.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", pd.Normal(x[:, 0] * weight, 1.0), obs=y)

    with pytest.raises(InputError, match="3 classes; got 4"):
        labels.distil(four)
    with pytest.raises(InputError, match="1 numbers for each row; got 2"):
        posterior.distil(two)
    with pytest.raises(UnsupportedError, match="same kind of targets as Gaussian; got Categorical"):
        posterior.distil(small_classifier)
    with pytest.raises(UnsupportedError, match="a model in the language"):
        posterior.distil(plain)
    with pytest.raises(InputError, match="a model, a function"):
        posterior.distil("mlp")
    with pytest.raises(ModelError, match="distil student"):
        posterior.distil(lambda x, y=None: None)
    for wrong in ({"method": bnn.SVI()}, {"method": bnn.MAP(validation=0.1)}, {"rows": 3}, {"seed": -1}):
        with pytest.raises(InputError):
            posterior.distil(**wrong)
    with pytest.raises(InputError, match="at least 10 rows; got 5"):
        posterior.distil(x=problem.x[:5])
    plainly = bnn.fit(plain, problem.x, problem.y, bnn.SVI(ppl="pyro", steps=20, elbo_draws=5))
    with pytest.raises(UnsupportedError, match="a model in the language"):
        plainly.distil()


def test_stacked_draws_keep_their_weights(rng: np.random.Generator) -> None:
    """Draws of each row by itself come from the weighted mixture."""
    loc = np.array([[0.0], [5.0]]) * np.ones((2, 20_000))
    prediction = Prediction("Normal", {"loc": loc, "scale": np.full(loc.shape, 0.1)}, np.log([0.9, 0.1]))
    y = distillation._row_by_row(prediction).sample(1, rng)[0]
    # A share of 20 000 rows, within four standard errors.
    assert np.mean(y > 2.5) == pytest.approx(0.1, abs=4.0 * np.sqrt(0.09 / 20_000))
    assert distillation._row_by_row(replace(prediction, log_weights=None)).weights.shape == loc.shape
