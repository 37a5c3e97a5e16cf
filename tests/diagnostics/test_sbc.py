"""Simulation-based calibration, on posteriors whose error was planted, and its tests against SciPy."""

from __future__ import annotations

import importlib
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.stats

import ppl_bnn as bnn
from ppl_bnn.core.errors import DivergenceError, InputError, UnknownNameError, UnsupportedError
from ppl_bnn.diagnostics import sbc as calibration
from ppl_bnn.diagnostics.calibration import (
    CALIBRATED,
    MISCALIBRATED,
    UNDECIDED,
    Calibration,
    CalibrationInterrupted,
    ecdf_band,
    uniformity,
)
from ppl_bnn.diagnostics.sbc import _Simulator, simulation_based_calibration
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.posterior.approximation import Approximation, Chains
from ppl_bnn.posterior.posterior import Posterior

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
        (
            lambda rng: (rng.integers(0, 4, size=100) + 0.05 * rng.uniform(size=100)) / 4.0 + 0.1,
            "not uniform",
        ),
    ],
)
def test_words_are_those_of_the_shape(draw: Any, said: str) -> None:
    ranks = np.floor(100 * draw(np.random.default_rng(1))).astype(int)
    assert said in "; ".join(uniformity(ranks, 99).shapes(0.01).values())


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
    assert "neither bias nor a wrong spread" in str(found)
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
    assert "over-confident" in str(narrow)
    wide = calibrated(Conjugate(widen=3.0, ppl="pyro"))
    assert "under-confident" in str(wide)


def test_mean_field_on_correlated_regression_is_over_confident() -> None:
    found = calibrated(Conjugate(mean_field=True, ppl="pyro"), functions={"w": weights})
    assert found.verdict == MISCALIBRATED
    for test in found.tests.values():
        assert test.spread > 1.3
        assert test.asymmetry_p > found.threshold
    assert "over-confident" in str(found)


def test_laplace_is_exact_here_and_noise_is_a_function_of_its_own() -> None:
    found = calibrated(bnn.Laplace(ppl="pyro", steps=50), model=with_noise, simulations=3, draws=9)
    assert found.names == ("f of row 0", "f of row 6", "f of row 11", "log likelihood", "noise")
    assert found.verdict == UNDECIDED
    assert "fewer than 20" in str(found)
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
    assert f"{len(found.failures)} of 45 simulations failed" in str(found)
    assert f"{found.simulations} of {found.simulations} fits had not converged" in str(found)
    frame = found.to_dataframe("simulation")
    assert set(frame.simulation) == set(found.numbers)


def test_all_failing_is_undecided() -> None:
    @dataclass(frozen=True)
    class Fails(Method):
        def run(self, problem: Any, progress: Any) -> Outcome:
            raise DivergenceError("always")

    found = calibrated(Fails(ppl="pyro"), simulations=4)
    assert (found.verdict, found.simulations, len(found.failures)) == (UNDECIDED, 0, 4)
    assert "DivergenceError: always" in str(found)


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
    assert "stopped after 23 of 60 simulations" in str(partial)
    # The same simulations as those of a run to the end.
    np.testing.assert_array_equal(partial.ranks, calibrated(Conjugate(ppl="pyro"), simulations=23).ranks)


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
        ({"jobs": True}, "jobs"),
        ({"probe": np.zeros((2, 3))}, "probe: x: expected inputs like those"),
        ({"figures": 3}, "figures"),
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


# --- kept, continued, compiled once ---------------------------------------------------------------

FITTED: list[int] = []


@dataclass(frozen=True)
class Counted(Conjugate):
    """Conjugate, which notes the seed of each fit, and is interrupted in the fit after so many."""

    stop_after: int = 10**9

    def run(self, problem: Any, progress: Any) -> Outcome:
        if len(FITTED) >= self.stop_after:
            raise KeyboardInterrupt
        FITTED.append(problem.seed)
        return super().run(problem, progress)


@pytest.fixture
def fitted() -> list[int]:
    FITTED.clear()
    return FITTED


def test_what_has_finished_is_never_computed_twice(fitted: list[int], tmp_path: Path) -> None:
    undisturbed = calibrated(Counted(ppl="pyro"), simulations=12)
    seeds = list(fitted)
    fitted.clear()
    with pytest.raises(CalibrationInterrupted) as caught:
        calibrated(
            Counted(ppl="pyro", stop_after=5), simulations=12, checkpoint=tmp_path, functions={"w": weights}
        )
    assert caught.value.partial.simulations == 5
    # The settings of a method belong to what is kept: one that stops elsewhere is another method.
    with pytest.raises(InputError, match="settings stop_after"):
        calibrated(Counted(ppl="pyro"), simulations=12, checkpoint=tmp_path, functions={"w": weights})
    fitted.clear()
    folder = tmp_path / "other"
    for count in (5, 12):
        found = calibrated(Counted(ppl="pyro"), simulations=count, checkpoint=folder)
    assert fitted == seeds
    np.testing.assert_array_equal(found.ranks, undisturbed.ranks)
    np.testing.assert_array_equal(found.truths, undisturbed.truths)
    assert found.asked == found.simulations == 12
    again = calibrated(Counted(ppl="pyro"), simulations=12, checkpoint=folder)
    assert len(fitted) == 12
    np.testing.assert_array_equal(again.ranks, undisturbed.ranks)


def test_an_interrupted_run_goes_on_to_the_same_bits(fitted: list[int], tmp_path: Path) -> None:
    undisturbed = calibrated(Conjugate(ppl="pyro"), simulations=12)
    with pytest.raises(CalibrationInterrupted, match="after 7 of 12"):
        calibrated(Conjugate(ppl="pyro"), simulations=12, checkpoint=tmp_path, progress=Stops(after=7))
    assert len(list(tmp_path.glob("simulation-*.safetensors"))) == 7
    found = calibrated(Conjugate(ppl="pyro"), simulations=12, checkpoint=tmp_path)
    np.testing.assert_array_equal(found.ranks, undisturbed.ranks)


def test_failures_are_kept_too(tmp_path: Path) -> None:
    fails = Conjugate(error=DivergenceError("planted"), converged=0.0, ppl="pyro")
    once, twice = (calibrated(fails, simulations=12, checkpoint=tmp_path) for _ in range(2))
    assert once.failures
    assert twice.failures == once.failures
    assert twice.not_converged == once.not_converged == once.simulations
    np.testing.assert_array_equal(twice.numbers, once.numbers)


def test_a_folder_of_other_simulations_is_refused(tmp_path: Path) -> None:
    calibrated(Conjugate(ppl="pyro"), simulations=2, checkpoint=tmp_path)
    with pytest.raises(InputError, match="seed"):
        calibrated(Conjugate(ppl="pyro"), simulations=2, checkpoint=tmp_path, seed=1)
    with pytest.raises(InputError, match="settings widen"):
        calibrated(Conjugate(widen=2.0, ppl="pyro"), simulations=2, checkpoint=tmp_path)
    with pytest.raises(InputError, match="draws"):
        calibrated(Conjugate(ppl="pyro"), simulations=2, checkpoint=tmp_path, draws=19)
    with pytest.raises(InputError, match="functions"):
        calibrated(Conjugate(ppl="pyro"), simulations=2, checkpoint=tmp_path, functions={"w": weights})
    with pytest.raises(InputError, match="probe"):
        calibrated(Conjugate(ppl="pyro"), simulations=2, checkpoint=tmp_path, probe=np.ones((1, 2)))

    def wider(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 2.0), bias=False)
        bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))

    with pytest.raises(InputError, match="model and inputs"):
        calibrated(Conjugate(ppl="pyro"), model=wider, simulations=2, checkpoint=tmp_path)
    own = bnn.SVI(ppl="pyro", steps=20, checkpoint=str(tmp_path))
    with pytest.raises(InputError, match="checkpoint of its own"):
        calibrated(own, simulations=2)


@pytest.mark.slow
def test_processes_give_the_same_bits_and_keep_what_they_finish(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second time by a method that can be imported only since the first processes began."""
    one = calibrated(Conjugate(ppl="pyro"), simulations=12)
    two = calibrated(Conjugate(ppl="pyro"), simulations=6, jobs=2)
    np.testing.assert_array_equal(two.ranks, one.ranks[:6])
    np.testing.assert_array_equal(two.truths, one.truths[:6])
    body = "import test_sbc\n\n\nclass Method(test_sbc.Conjugate):\n    pass\n"
    (tmp_path / "written_later.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    method, kept = importlib.import_module("written_later").Method(ppl="pyro"), tmp_path / "kept"
    for count, jobs in ((6, 1), (12, 2)):
        later = calibrated(method, simulations=count, jobs=jobs, checkpoint=kept)
        assert len(list(kept.glob("simulation-*.safetensors"))) == count
    np.testing.assert_array_equal(later.ranks, one.ranks)


def test_a_process_that_may_start_no_others_does_all_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    two = calibrated(Conjugate(ppl="pyro"), simulations=4, jobs=2)
    np.testing.assert_array_equal(two.ranks, calibrated(Conjugate(ppl="pyro"), simulations=4).ranks)


def test_one_program_serves_all_simulations_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []
    plain = Method.fit

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        fits.append(options["seed"])
        return plain(self, *arguments, **options)

    monkeypatch.setattr(Method, "fit", counted)
    svgd = bnn.SVGD(particles=12, steps=15)
    once = calibrated(svgd, model=with_noise, simulations=3, draws=9)
    assert len(fits) == 1
    # As if each were the first.
    monkeypatch.setattr(_Simulator, "_first", property(lambda self: None, lambda self, value: None))
    each = calibrated(svgd, model=with_noise, simulations=3, draws=9)
    assert len(fits) == 4
    np.testing.assert_array_equal(once.ranks, each.ranks)


def test_labels_are_checked_over_a_program_that_is_kept() -> None:
    @dataclass(frozen=True)
    class Prior(Method):
        def run(self, problem: Any, progress: Any) -> Outcome:
            assert problem.targets.dtype == np.int64
            sites = {site.name: np.zeros(site.unconstrained_shape) for site in problem.program.latents}
            return Outcome(MeanField(sites, {name: np.ones(value.shape) for name, value in sites.items()}))

    found = calibrated(Prior(), model=classifier, simulations=3, draws=9)
    assert found.simulations + len(found.failures) == 3


def test_outputs_are_ranked_at_inputs_of_choice() -> None:
    probe = np.array([[0.0, 0.0], [2.0, -1.0]])
    found = calibrated(Conjugate(ppl="pyro"), simulations=4, probe=probe)
    assert found.names == ("f of probe 1", "log likelihood")
    assert found.constant == ("f of probe 0",)

    def by_hand(w: dict[str, np.ndarray], eta: np.ndarray, y: np.ndarray) -> np.ndarray:
        return w["output.weight"][..., 0] @ probe[1]

    expected = calibrated(Conjugate(ppl="pyro"), simulations=4, functions={"f": by_hand})
    np.testing.assert_allclose(found.truths[:, 0], expected.truths[:, 0], rtol=1e-12)
    np.testing.assert_array_equal(found.ranks[:, 0], expected.ranks[:, 0])


def test_functions_of_ones_own_are_given_the_predictor_at_the_probe() -> None:
    probe = np.array([[1.0, 0.0], [2.0, -1.0]])
    own = {"f": lambda w, eta, y: eta[..., 0], "rows": lambda w, eta, y: np.full(len(eta), float(len(y)))}
    found = calibrated(Conjugate(ppl="pyro"), simulations=4, probe=probe, functions=own)
    usual = calibrated(Conjugate(ppl="pyro"), simulations=4, probe=probe)
    assert found.names == ("f[0]", "f[1]")
    assert found.constant == ("rows",)
    np.testing.assert_array_equal(found.truths, usual.truths[:, :2])
    np.testing.assert_array_equal(found.ranks, usual.ranks[:, :2])


def test_usual_functions_are_those_that_convergence_is_judged_by() -> None:
    svi = bnn.SVI(ppl="pyro", steps=30, elbo_draws=5)
    seen: list[Posterior] = []

    def kept(posterior: Posterior) -> dict[str, float]:
        seen.append(posterior)
        return {}

    found = calibrated(svi, model=with_noise, simulations=1, draws=19, figures=kept)
    posterior = seen[0]
    # The posterior that was ranked says the same of its own draws.
    eta = posterior.predictor(inputs(), draws=19)[0]
    family, parameters = posterior.with_problem(
        lambda problem: problem.program.likelihood.mixture_parameters(eta)
    )
    density = bnn.Prediction(family, parameters).component_log_prob(posterior.targets).sum(axis=-1)
    for name, values in (
        ("f of row 0", eta[:, 0, 0]),
        ("f of row 6", eta[:, 6, 0]),
        ("log likelihood", density),
        ("noise", np.exp(eta[:, 0, 1])),
    ):
        column = found.names.index(name)
        assert found.ranks[0, column] == (values < found.truths[0, column]).sum()


def test_figures_are_kept_of_each_fit(tmp_path: Path) -> None:
    def asked(posterior: Posterior) -> dict[str, float]:
        even = posterior.info.seed % 2
        return {"converged": even, "seed": posterior.info.seed, **({"odd": 1.0} if not even else {})}

    fails = Conjugate(error=DivergenceError("planted"), ppl="pyro")
    found = calibrated(fails, simulations=20, figures=asked, checkpoint=tmp_path)
    assert found.failures
    assert set(found.figures) == {"converged", "seed", "odd"}
    assert all(values.shape == (found.simulations,) for values in found.figures.values())
    np.testing.assert_array_equal(found.figures["converged"], found.figures["seed"] % 2)
    np.testing.assert_array_equal(np.isnan(found.figures["odd"]), found.figures["converged"] == 1.0)
    assert found.not_converged == np.count_nonzero(found.figures["converged"] == 0.0)
    again = calibrated(fails, simulations=20, figures=asked, checkpoint=tmp_path)
    for name, values in found.figures.items():
        np.testing.assert_array_equal(again.figures[name], values)
    with pytest.raises(InputError, match="figures"):
        calibrated(fails, simulations=20, checkpoint=tmp_path, figures=lambda posterior: {})
    assert calibrated(Conjugate(ppl="pyro"), simulations=2).figures == {}


# --- figures --------------------------------------------------------------------------------------


def made(ranks: np.ndarray, draws: int = 49) -> Calibration:
    count, functions = ranks.shape
    names = tuple(f"function {index}" for index in range(functions))
    truths = np.zeros(ranks.shape)
    return Calibration("Made", names, np.arange(count), ranks, truths, draws, count)


def test_the_figure_shows_the_ranks_and_their_band() -> None:
    rng = np.random.default_rng(0)
    ranks = np.column_stack([rng.integers(0, 50, 200), rng.choice([0, 1, 48, 49], 200)])
    calibration = made(ranks)
    figure = calibration.figure()
    first, second = (axes for axes in figure.axes if axes.get_visible())
    assert first.get_title().startswith("function 0\nuniform")
    assert second.get_title().startswith("function 1\ntoo narrow")
    assert second.title.get_color() != first.title.get_color()
    for column, axes in enumerate((first, second)):
        z, difference = axes.lines[0].get_data()
        share = (ranks[:, column][:, None] < np.arange(1, 50)).mean(axis=0)
        np.testing.assert_allclose(difference[1:-1], share - z[1:-1], atol=1e-12)
        _, lower, upper = ecdf_band(200, 49, 0.05 / 2)
        polygon = axes.collections[0].get_paths()[0].vertices
        assert polygon[:, 1].max() == pytest.approx((upper - z[1:-1]).max())
        assert polygon[:, 1].min() == pytest.approx((lower - z[1:-1]).min())
        outside = ((difference[1:-1] > upper - z[1:-1]) | (difference[1:-1] < lower - z[1:-1])).any()
        assert outside == bool(column)


def test_the_histogram_shows_all_ranks() -> None:
    ranks = np.random.default_rng(0).integers(0, 50, (200, 4))
    ranks[:40, 2] = 0
    figure = made(ranks).figure("histogram")
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert len(panels) == 4
    for column, axes in enumerate(panels):
        counts = axes.patches[-1].get_data().values
        assert counts.sum() == 200
        np.testing.assert_array_equal(counts, np.bincount(ranks[:, column] // 5, minlength=10))
        assert axes.get_ylim()[0] == 0.0
        assert axes.get_ylim()[1] > counts.max()


def test_a_figure_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="figure"):
        made(np.empty((0, 2), dtype=int)).figure()
    with pytest.raises(UnknownNameError, match="ecdf"):
        made(np.zeros((3, 1), dtype=int)).figure("rank")


def test_arviz_reads_the_tree() -> None:
    from arviz_stats.ecdf_utils import ecdf_pit

    ranks = np.column_stack(
        [np.random.default_rng(3).integers(0, 50, 300), np.random.default_rng(4).choice(20, 300)]
    )
    tree = made(ranks).to_datatree()
    for name, inside in (("function 0", True), ("function 1", False)):
        values = tree["prior_sbc"][name].to_numpy()
        assert values.shape == (1, 300)
        assert ((values >= 0) & (values < 1)).all()
        _, share, lower, upper = ecdf_pit(values[0], 0.99, 1000)
        assert ((share >= lower) & (share <= upper)).all() == inside


# --- the study ------------------------------------------------------------------------------------

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("simulation_based_calibration")


def test_the_study_runs_at_a_tiny_size(script: Any, tmp_path: Path) -> None:
    study = script.main(tiny=True, out=tmp_path, checkpoint=tmp_path / "kept")
    assert len(study.verdicts) == 15
    for name in ("tests", "power", "ranks"):
        assert (tmp_path / f"{name}.csv").stat().st_size > 100
    for name in ("nuts", "narrow"):
        for kind in ("ecdf", "histogram"):
            assert (tmp_path / f"{name}_{kind}.png").stat().st_size > 5000
    assert len(list((tmp_path / "kept").rglob("simulation-*.safetensors"))) == 48
    assert {row["method"] for row in study.tables["power"]} == {"NUTS", "NUTS with 0.8 of its sd"}


def test_draws_of_the_narrow_posterior_are_narrow(script: Any) -> None:
    sizes = script.TINY
    model, x, probe = script.model_and_inputs(sizes)
    y = np.random.default_rng(0).normal(size=len(x))
    plain, narrow = (bnn.fit(model, x, y, method) for method in script.methods(sizes).values())
    for one, other in (
        (plain.predictor(probe), narrow.predictor(probe)),
        (plain.unconstrained_draws["noise"], narrow.unconstrained_draws["noise"]),
    ):
        np.testing.assert_allclose(other.mean(axis=(0, 1)), one.mean(axis=(0, 1)), rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(other.std(axis=(0, 1)), 0.8 * one.std(axis=(0, 1)), rtol=1e-8)


def test_verdicts_of_the_study_can_come_out_either_way(script: Any, tmp_path: Path) -> None:
    """Uniform ranks, ranks of a posterior that is too narrow, ranks that lean, and too few of them."""
    rng = np.random.default_rng(0)
    fine = rng.integers(0, 100, (2000, 5))
    narrow = np.floor(100 * rng.beta(0.7, 0.7, (2000, 5))).astype(int)
    leaning = np.minimum(99, fine + 15)

    def outcomes(nuts: np.ndarray, other: np.ndarray) -> dict[str, str]:
        study = script.Study(script.FULL, tmp_path)
        study.tables = {"ranks": [], "tests": []}
        for method, ranks in zip(script.NAMES.values(), (nuts, other), strict=True):
            study.tables["ranks"] += [
                {"method": method} | dict(zip(script.FUNCTIONS, row, strict=True)) for row in ranks.tolist()
            ]
            study.tables["tests"] += [
                {"method": method, "function": name, "asymmetry_p": 0.5, "spread_p": 0.5, "ecdf_p": 0.5}
                for name in script.FUNCTIONS
            ]
        return {each.key: each.verdict for each in script.judge(study)}

    found = outcomes(fine, narrow)
    assert len(found) == 15
    assert set(found.values()) == {"reproduced"}
    found = outcomes(narrow, fine)
    for key, verdict in found.items():
        assert verdict == ("reproduced" if "centre" in key else "refuted"), key
    assert outcomes(leaning, narrow)["nuts-centre-noise"] == "refuted"
    assert set(outcomes(fine[:40], narrow[:40]).values()) == {"undecided"}


def test_centre_and_spread_are_those_of_uniform_ranks(script: Any) -> None:
    ranks = np.arange(100)
    assert script.centre(ranks, 99).mean() == pytest.approx(0.5)
    assert script.spread(ranks, 99).mean() == pytest.approx(1.0)


def test_the_first_of_a_calibration_are_those_of_a_shorter_one(script: Any) -> None:
    fails = Conjugate(error=DivergenceError("planted"), ppl="pyro")
    part = script.first(calibrated(fails, simulations=12), 8)
    short = calibrated(fails, simulations=8)
    np.testing.assert_array_equal(part.ranks, short.ranks)
    np.testing.assert_array_equal(part.numbers, short.numbers)
    assert part.failures == short.failures
    assert part.asked == short.asked


@pytest.mark.slow
def test_nuts_is_calibrated_and_a_posterior_that_is_too_narrow_is_not(script: Any, optimised: None) -> None:
    """One hundred simulations of each. Failure rates are said in the study, whose table has smaller numbers.

    In this process: most of what others would do is to import JAX and to compile.
    """
    model, x, probe = script.model_and_inputs(script.FULL)
    nuts, narrow = (
        simulation_based_calibration(model, x, method, simulations=100, probe=probe)
        for method in script.methods(script.FULL).values()
    )
    assert nuts.verdict == CALIBRATED
    assert nuts.simulations == 100
    assert narrow.verdict == MISCALIBRATED


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


def test_ties_are_broken_evenly() -> None:
    """Two draws below the truth and three equal to it: each rank from 2 to 5 is as likely, whatever comes above."""
    drawn = {"g": np.array([0.0, -1.0, 0.0, 2.0, 0.0, -3.0, 1.0]), "constant": np.zeros(7)}
    true = {"g": np.zeros(1), "constant": np.zeros(1)}
    records = [calibration._Simulator._ranked(SimpleNamespace(seed=5), drawn, true, k) for k in range(400)]  # pyright: ignore[reportArgumentType]
    ranks = np.array([record.ranks for record in records])
    # The 400 numbers are always the same; that one of these p-values falls below 1e-3 has a chance of 2e-3.
    assert set(ranks[:, 0]) == {2, 3, 4, 5}
    assert scipy.stats.chisquare(np.bincount(ranks[:, 0])[2:]).pvalue > 1e-3
    assert set(ranks[:, 1]) == set(range(8))
    assert scipy.stats.chisquare(np.bincount(ranks[:, 1])).pvalue > 1e-3
    assert list(records[0].varied) == [True, False]
