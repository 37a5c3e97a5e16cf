"""Simulation-based calibration, on posteriors whose error was planted, and its tests against SciPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.stats

import ppl_bnn as bnn
from ppl_bnn.diagnostics.calibration import (
    CALIBRATED,
    MISCALIBRATED,
    UNDECIDED,
    Calibration,
    CalibrationInterrupted,
    ecdf_band,
    simulation_based_calibration,
    uniformity,
)
from ppl_bnn.errors import DivergenceError, InputError, UnsupportedError
from ppl_bnn.inference.mean_field import MeanField
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.posterior import Approximation, Chains

NOISE, ROWS = 0.5, 12


def inputs() -> np.ndarray:
    """Two columns that hardly differ: the posterior of their weights is correlated."""
    rng = np.random.default_rng(5)
    common = rng.normal(size=ROWS)
    return np.column_stack([common + 0.3 * rng.normal(size=ROWS) for _ in range(2)])


def linear(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0), bias=False)
    bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))


def with_noise(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0), bias=False)
    bnn.observe(y, f, bnn.likelihoods.Gaussian(noise))


def classifier(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [3]), bnn.likelihoods.Categorical())


@dataclass
class Gaussian(Approximation):
    """N(mean, L L') over the two weights."""

    mean: np.ndarray
    factor: np.ndarray
    kind: ClassVar[Any] = "iid"

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"output.weight": (self.mean + rng.normal(size=(count, 2)) @ self.factor.T)[..., None]}

    def log_prob(self, u: Any) -> None:
        return None

    def arrays(self) -> dict[str, np.ndarray]:
        return {"mean": self.mean, "factor": self.factor}

    @classmethod
    def from_arrays(cls, arrays: Any) -> Gaussian:
        return cls(**arrays)


@dataclass(frozen=True)
class Conjugate(Method):
    """The posterior of `linear` in closed form, moved by `shift` and widened by `widen` posterior standard deviations.

    mean_field: its best approximation by independent normals in its place. error: what every third fit or so raises.
    """

    shift: float = 0.0
    widen: float = 1.0
    mean_field: bool = False
    error: Any = None
    converged: float = 1.0

    def run(self, problem: Any, progress: Any) -> Outcome:
        if self.error is not None and problem.seed % 3 == 0:
            raise self.error
        x, y = problem.inputs, problem.targets
        precision = x.T @ x / NOISE**2 + np.eye(2)
        covariance = np.linalg.inv(precision)
        mean = covariance @ x.T @ y / NOISE**2
        if self.mean_field:
            covariance = np.diag(1.0 / np.diag(precision))
        mean = mean + self.shift * np.sqrt(np.diag(covariance))
        figures = {"converged": self.converged}
        return Outcome(Gaussian(mean, self.widen * np.linalg.cholesky(covariance)), figures=figures)


def weights(w: dict[str, np.ndarray], eta: np.ndarray, y: np.ndarray) -> np.ndarray:
    return w["output.weight"][..., 0]


def calibrated(method: Method, **options: Any) -> Calibration:
    options = {"simulations": 60, "draws": 49} | options
    return simulation_based_calibration(options.pop("model", linear), inputs(), method, **options)


# --- the tests of ranks ---------------------------------------------------------------------------


def uniform_ranks(count: int, draws: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, draws + 1, size=count)


def test_statistics_are_those_of_scipy() -> None:
    ranks = np.random.default_rng(0).binomial(99, 0.55, size=200)
    found = uniformity(ranks, 99)
    counts = np.bincount(ranks // 5, minlength=20)
    expected = scipy.stats.chisquare(counts)
    assert found.bins == 20
    assert found.chi2 == pytest.approx(expected.statistic, rel=1e-12)
    assert found.chi2_p == pytest.approx(expected.pvalue, rel=1e-9)
    p = 1.0 - ranks / 99
    assert found.mean_probability == pytest.approx(p.mean(), rel=1e-12)
    # With ties at the same floating-point number: 1 - p is made of integers.
    two = scipy.stats.ks_2samp(99 - ranks, ranks)
    assert found.asymmetry == pytest.approx(two.statistic, abs=1e-6)


def test_with_one_draw_the_distribution_function_is_a_binomial() -> None:
    ranks = np.repeat([0, 1], [38, 22])
    found = uniformity(ranks, 1, null_draws=99_999)
    # Two equal tails: gamma is a function of the distance from 30, and its p-value that of the binomial test.
    exact = scipy.stats.binomtest(38, 60, 0.5).pvalue
    assert found.ecdf_p == pytest.approx(exact, abs=5 * np.sqrt(exact * (1 - exact) / 99_999))


def test_each_test_rejects_uniform_ranks_at_its_rate() -> None:
    # 400 sets of ranks at a rate of 10 %: the share has a standard error of 1.5 %.
    found = [uniformity(uniform_ranks(50, 39, seed), 39, null_draws=999, seed=seed) for seed in range(400)]
    for name in ("asymmetry_p", "spread_p", "ecdf_p"):
        share = np.mean([getattr(test, name) <= 0.1 for test in found])
        assert abs(share - 0.1) < 4 * np.sqrt(0.1 * 0.9 / 400), name


def test_the_band_holds_all_of_a_distribution_function_at_its_rate() -> None:
    levels, lower, upper = ecdf_band(50, 39, 0.1)
    np.testing.assert_allclose(levels, np.arange(1, 40) / 40)
    ranks = np.random.default_rng(3).integers(0, 40, size=(2000, 50))
    shares = (ranks[:, :, None] <= np.arange(39)).mean(axis=1)
    outside = ((shares < lower - 1e-12) | (shares > upper + 1e-12)).any(axis=1).mean()
    assert outside < 0.1 + 4 * np.sqrt(0.09 / 2000)
    assert (
        outside > 0.1 - 4 * np.sqrt(0.09 / 2000) - 0.02
    )  # the band is of whole counts, and so a little wide


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda rng: rng.beta(2.0, 1.0, size=100), "biased downwards"),
        (lambda rng: rng.beta(1.0, 2.0, size=100), "biased upwards"),
        (lambda rng: rng.beta(0.4, 0.4, size=100), "over-confident"),
        (lambda rng: rng.beta(3.0, 3.0, size=100), "under-confident"),
        (lambda rng: rng.uniform(size=100), "uniform within"),
        (
            lambda rng: (rng.integers(0, 4, size=100) + 0.05 * rng.uniform(size=100)) / 4.0 + 0.1,
            "not uniform",
        ),
    ],
)
def test_words_are_those_of_the_shape(draw: Any, said: str) -> None:
    ranks = np.floor(100 * draw(np.random.default_rng(1))).astype(int)
    assert said in uniformity(ranks, 99).words(0.01)


def test_ranks_must_be_ranks() -> None:
    for ranks in (
        np.array([0.5]),
        np.array([3, 100]),
        np.array([-1]),
        np.empty(0, dtype=int),
        np.ones((2, 2), int),
    ):
        with pytest.raises(InputError, match="ranks"):
            uniformity(ranks, 99)


# --- the simulations ------------------------------------------------------------------------------


def test_the_exact_posterior_is_calibrated(ppl: str) -> None:
    # Each fit compiles in the one system and none does in the other.
    count = {"numpyro": 20, "pyro": 60}[ppl]
    found = calibrated(Conjugate(ppl=ppl), simulations=count)
    assert found.verdict == CALIBRATED
    assert found.simulations == found.asked == count
    assert found.names == ("f of row 0", "f of row 6", "f of row 11", "log likelihood")
    assert found.failures == {}
    assert "neither bias nor a wrong spread" in found.summary
    assert str(found).startswith(
        f"Conjugate in {ppl}: calibrated as far as seen ({count} simulations, 49 draws each)"
    )


def test_truths_are_draws_from_the_prior_and_targets_from_the_likelihood() -> None:
    def residual(w: Any, eta: Any, y: np.ndarray) -> np.ndarray:
        return ((y - eta[..., 0]) / NOISE).mean(axis=-1)

    found = calibrated(Conjugate(ppl="pyro"), simulations=100, functions={"w": weights, "residual": residual})
    assert found.names == ("w[0]", "w[1]", "residual")
    for column, sd in ((0, 1.0), (1, 1.0), (2, 1.0 / np.sqrt(ROWS))):
        # Over 20 seeds the least of these 60 p-values was 0.022.
        assert scipy.stats.kstest(found.truths[:, column] / sd, "norm").pvalue > 0.001


def test_bias_is_caught() -> None:
    for shift, side in ((1.0, "upwards"), (-1.0, "downwards")):
        found = calibrated(Conjugate(shift=shift, ppl="pyro"), functions={"w": weights})
        assert found.verdict == MISCALIBRATED
        assert all(f"biased {side}" in reason for reason in found.reasons)
        assert (np.sign(found.probabilities.mean(axis=0) - 0.5) == np.sign(shift)).all()


def test_a_posterior_that_is_too_narrow_or_too_wide_is_caught() -> None:
    narrow = calibrated(Conjugate(widen=0.4, ppl="pyro"))
    assert narrow.verdict == MISCALIBRATED
    assert narrow.tests["f of row 0"].spread > 1.5
    assert "over-confident" in narrow.summary
    wide = calibrated(Conjugate(widen=3.0, ppl="pyro"))
    assert "under-confident" in wide.summary


def test_mean_field_on_correlated_regression_is_over_confident() -> None:
    found = calibrated(Conjugate(mean_field=True, ppl="pyro"), functions={"w": weights})
    assert found.verdict == MISCALIBRATED
    for test in found.tests.values():
        assert test.spread > 1.3
        assert test.asymmetry_p > found.threshold
    assert "over-confident" in found.summary


def test_laplace_is_exact_here_and_noise_is_a_function_of_its_own() -> None:
    found = calibrated(bnn.Laplace(ppl="pyro", steps=50), model=with_noise, simulations=3, draws=9)
    assert found.names == ("f of row 0", "f of row 6", "f of row 11", "log likelihood", "noise")
    assert found.verdict == UNDECIDED
    assert "fewer than 20" in found.summary
    assert (found.truths[:, 4] > 0).all()


@pytest.mark.slow
def test_laplace_of_a_linear_model_is_calibrated() -> None:
    found = calibrated(bnn.Laplace(ppl="pyro", steps=50), simulations=40)
    assert found.verdict == CALIBRATED


@pytest.mark.slow
def test_variational_inference_is_seen_to_be_over_confident() -> None:
    svi = bnn.SVI(ppl="pyro", steps=300, learning_rate=0.05, elbo_draws=20)
    found = calibrated(svi, simulations=24, functions={"w": weights})
    assert found.verdict == MISCALIBRATED
    assert all(test.spread > 1.3 for test in found.tests.values())


def test_chains_are_thinned() -> None:
    @dataclass(frozen=True)
    class Sampled(Conjugate):
        def run(self, problem: Any, progress: Any) -> Outcome:
            rng = np.random.default_rng(problem.seed)
            gaussian: Any = super().run(problem, progress).approximation
            drawn = gaussian.draw(400, rng)["output.weight"]
            return Outcome(Chains({"output.weight": drawn.reshape(2, 200, 2, 1)}))

    assert calibrated(Sampled(ppl="pyro")).verdict == CALIBRATED
    with pytest.raises(InputError, match="draws"):
        calibrated(Sampled(ppl="pyro"), draws=500)


def test_classes_and_plain_models_are_simulated() -> None:
    @dataclass(frozen=True)
    class Prior(Method):
        """The prior itself: calibrated for whatever does not look at y."""

        def run(self, problem: Any, progress: Any) -> Outcome:
            sites = {site.name: np.zeros(site.shape) for site in problem.program.latents}
            return Outcome(MeanField(sites, {name: np.ones(value.shape) for name, value in sites.items()}))

    found = calibrated(Prior(ppl="pyro"), model=classifier, simulations=25, draws=9)
    assert found.names[:2] == ("f[0] of row 0", "f[1] of row 0")
    assert len(found.names) == 10
    assert found.simulations + len(found.failures) == 25

    import numpyro
    import numpyro.distributions as dist

    def plain(x: Any, y: Any = None) -> None:
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("obs", dist.Normal(x @ w, NOISE), obs=y)

    found = calibrated(Prior(ppl="pyro"), model=plain, simulations=3, draws=9)
    assert found.subject == "Prior in numpyro"
    assert found.names[-1] == "log likelihood"
    assert found.constant == ("f[1] of row 0", "f[1] of row 6", "f[1] of row 11")


def test_the_log_likelihood_sees_a_posterior_that_ignores_the_data() -> None:
    @dataclass(frozen=True)
    class Ignorant(Method):
        def run(self, problem: Any, progress: Any) -> Outcome:
            return Outcome(Gaussian(np.zeros(2), np.eye(2)))

    found = calibrated(Ignorant(ppl="pyro"), simulations=80)
    threshold = found.threshold
    assert found.tests["log likelihood"].least < threshold
    assert all(found.tests[name].least > threshold for name in found.names if name.startswith("f "))


def test_failures_are_counted_and_named() -> None:
    found = calibrated(Conjugate(error=DivergenceError("planted"), converged=0.0, ppl="pyro"), simulations=45)
    assert 5 < len(found.failures) < 25
    assert found.simulations + len(found.failures) == found.asked == 45
    assert set(found.failures.values()) == {"DivergenceError: planted"}
    assert set(found.numbers) | set(found.failures) == set(range(45))
    assert found.not_converged == found.simulations
    assert f"{len(found.failures)} of 45 simulations failed" in found.summary
    assert f"{found.simulations} of {found.simulations} fits had not converged" in found.summary
    frame = found.to_dataframe("simulation")
    assert set(frame.simulation) == set(found.numbers)


def test_all_failing_is_undecided() -> None:
    @dataclass(frozen=True)
    class Fails(Method):
        def run(self, problem: Any, progress: Any) -> Outcome:
            raise DivergenceError("always")

    found = calibrated(Fails(ppl="pyro"), simulations=4)
    assert (found.verdict, found.simulations, len(found.failures)) == (UNDECIDED, 0, 4)
    assert "DivergenceError: always" in found.summary


class Stops:
    """A progress that a person stops after some updates."""

    def __init__(self, after: int):
        self.after, self.closed = after, False

    def task(self, title: str, total: int) -> Stops:
        return self

    def update(self, done: int, **figures: float) -> None:
        if done == self.after:
            raise KeyboardInterrupt

    def close(self) -> None:
        self.closed = True


def test_an_interrupt_keeps_what_has_finished() -> None:
    stops = Stops(after=23)
    with pytest.raises(CalibrationInterrupted) as caught:
        calibrated(Conjugate(ppl="pyro"), progress=stops)
    partial = caught.value.partial
    assert stops.closed
    assert partial.simulations == 23
    assert partial.verdict == CALIBRATED
    assert "stopped after 23 of 60 simulations" in partial.summary
    # The same simulations as those of a run to the end.
    np.testing.assert_array_equal(partial.ranks, calibrated(Conjugate(ppl="pyro"), simulations=23).ranks)


@pytest.mark.slow
def test_processes_give_the_same_bits() -> None:
    one, two = (calibrated(Conjugate(ppl="pyro"), simulations=24, workers=workers) for workers in (1, 2))
    np.testing.assert_array_equal(one.ranks, two.ranks)
    np.testing.assert_array_equal(one.truths, two.truths)


def test_frames() -> None:
    found = calibrated(Conjugate(ppl="pyro"), simulations=20)
    table = found.to_dataframe()
    assert list(table.index) == list(found.names)
    assert table.loc["f of row 6", "ecdf_p"] == found.tests["f of row 6"].ecdf_p
    long = found.to_dataframe(per="simulation")
    assert len(long) == 80
    np.testing.assert_array_equal(long["rank"].to_numpy().reshape(20, 4), found.ranks)
    assert long["probability"].between(0, 1).all()
    with pytest.raises(InputError, match="per"):
        found.to_dataframe("row")


def test_what_has_no_truth_to_draw_is_refused() -> None:
    def with_parameter(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, [1], bias=False) + bnn.param("offset", np.zeros(()))
        bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))

    def with_evidence(x: Any, y: Any = None) -> None:
        bnn.sample("other", bnn.dist.Normal(0.0, 1.0), obs=np.zeros(()))
        linear(x, y)

    for model, said in ((with_parameter, "offset"), (with_evidence, "other")):
        with pytest.raises(UnsupportedError, match=said):
            calibrated(Conjugate(ppl="pyro"), model=model)
    with pytest.raises(UnsupportedError, match="a point"):
        calibrated(bnn.MAP(ppl="pyro", steps=20))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"simulations": 0}, "simulations"),
        ({"draws": 1.5}, "draws"),
        ({"workers": True}, "workers"),
        ({"seed": -1}, "seed"),
        ({"functions": {}}, "functions"),
        ({"functions": {"total": lambda w, eta, y: eta.sum()}}, "total"),
    ],
)
def test_impossible_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        calibrated(Conjugate(ppl="pyro"), **options)


def test_a_method_and_a_model_are_wanted() -> None:
    with pytest.raises(InputError, match="method"):
        simulation_based_calibration(linear, inputs(), "svi")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="model"):
        simulation_based_calibration("linear", inputs(), Conjugate())  # pyright: ignore[reportArgumentType]


# --- within a diagnosis ---------------------------------------------------------------------------


def test_a_diagnosis_takes_a_calibration_or_makes_one() -> None:
    rng = np.random.default_rng(0)
    x = inputs()
    y = x @ [1.0, -0.5] + NOISE * rng.normal(size=ROWS)
    good, narrow = (Conjugate(widen=widen, ppl="pyro") for widen in (1.0, 0.4))
    posterior = bnn.fit(linear, x, y, good)
    made = simulation_based_calibration(linear, x, narrow, simulations=40)
    found = bnn.diagnose(posterior, calibration=made)
    assert any(
        "simulation-based calibration of Conjugate in pyro: f of row" in reason for reason in found.reasons
    )
    assert any("richer approximation" in advice for advice in found.advice)
    assert found.figures["simulations"] == 40
    again = bnn.diagnose(posterior, calibration=narrow, simulations=40)
    assert again.reasons == found.reasons
    assert again.figures["calibration_least_p"] < 0.001
    fine = bnn.diagnose(posterior, calibration=good, simulations=25)
    assert any("neither bias nor a wrong spread" in reason for reason in fine.reasons)
    with pytest.raises(InputError, match="calibration"):
        bnn.diagnose(posterior, calibration="yes")  # pyright: ignore[reportArgumentType]


def test_miscalibration_takes_adequate_back() -> None:
    from ppl_bnn.diagnostics.diagnose import ADEQUATE, UNDECIDED

    x = inputs()
    y = x @ [1.0, -0.5] + NOISE * np.random.default_rng(0).normal(size=ROWS)
    posterior = bnn.fit(linear, x, y, bnn.Laplace(ppl="pyro"))
    assert bnn.diagnose(posterior).verdict == ADEQUATE
    found = bnn.diagnose(posterior, calibration=Conjugate(widen=0.4, ppl="pyro"), simulations=40)
    assert found.verdict == UNDECIDED
