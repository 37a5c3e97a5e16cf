"""Diagnostics against ArviZ and closed forms, on draws whose quality is known because they were planted."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

import ppl_bnn as bnn
from ppl_bnn.core.arrays import ravel
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.diagnostics import importance
from ppl_bnn.diagnostics.diagnose import VERDICTS, diagnose
from ppl_bnn.diagnostics.function_space import (
    ESS_PER_CHAIN,
    RESTART_LIMIT,
    RHAT_LIMIT,
    agreement,
    convergence,
    probe_rows,
    rows_at,
)
from ppl_bnn.diagnostics.importance import leave_one_out, pareto_k, pareto_k_of
from ppl_bnn.inference.curvature.gaussians import Full
from ppl_bnn.inference.laplace.approximation import LaplaceGaussian
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.posterior.approximation import Approximation, Chains, Drawn, Point
from ppl_bnn.posterior.convergence import FUNCTIONS, by_arviz, evenly_spaced, mixing, quantities

NOISE, ROWS, FEATURES = 0.5, 30, 2


@dataclass(frozen=True)
class Planted(Method):
    """A posterior with a given approximation."""

    outcome: Any = None

    def run(self, problem: Any, progress: Any) -> Outcome:
        return self.outcome


def linear(x: Any, y: Any = None) -> None:
    """Bayesian linear regression: the posterior is the Gaussian of `closed_form`."""
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0), bias=False)
    bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))


def network(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [3, 1], activation="tanh"), bnn.likelihoods.Gaussian(noise))


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    x = rng.normal(size=(ROWS, FEATURES))
    return x, x @ [1.0, -0.5] + NOISE * rng.normal(size=ROWS)


def closed_form() -> tuple[np.ndarray, np.ndarray, float]:
    """Posterior mean and covariance of the weights, and the log evidence."""
    x, y = data()
    covariance = np.linalg.inv(x.T @ x / NOISE**2 + np.eye(FEATURES))
    marginal = scipy.stats.multivariate_normal(np.zeros(ROWS), x @ x.T + NOISE**2 * np.eye(ROWS))
    return covariance @ x.T @ y / NOISE**2, covariance, float(marginal.logpdf(y))


def fitted(model: Any, approximation: Any, standardise: bool = False, **outcome: Any) -> Any:
    method = Planted(outcome=Outcome(approximation, **outcome), ppl="pyro")
    return method.fit(model, *data(), standardise=standardise)


def exact_chains(chains: int = 4, draws: int = 500, shift: float = 0.0, seed: int = 0, **outcome: Any) -> Any:
    """Independent draws from the closed form; the last half of the chains moved by `shift` standard deviations."""
    mean, covariance, _ = closed_form()
    w = np.random.default_rng(seed).multivariate_normal(mean, covariance, size=(chains, draws))
    w[chains // 2 :] += shift * np.sqrt(np.diag(covariance))
    return fitted(linear, Chains({"output.weight": w[..., None]}), **outcome)


def exact_gaussian(widen: float = 1.0, **outcome: Any) -> Any:
    mean, covariance, _ = closed_form()
    gaussian = Full.of(np.linalg.inv(covariance) / widen**2)
    return fitted(linear, LaplaceGaussian({"output.weight": mean[:, None]}, gaussian), **outcome)


def network_chains(chains: int = 4, draws: int = 500, permute: bool = False, noise: float = 0.1) -> Any:
    rng = np.random.default_rng(2)
    shapes = {"hidden0.weight": (2, 3), "hidden0.bias": (3,), "output.weight": (3, 1), "output.bias": (1,)}
    u = {
        name: rng.normal(size=shape) + noise * rng.normal(size=(chains, draws, *shape))
        for name, shape in shapes.items()
    }
    u["noise"] = -1.0 + 0.2 * rng.normal(size=(chains, draws))
    if permute:
        half = slice(chains // 2, None)
        order = [2, 0, 1]
        u["hidden0.weight"][half] = u["hidden0.weight"][half][..., order]
        u["hidden0.bias"][half] = u["hidden0.bias"][half][..., order]
        u["output.weight"][half] = u["output.weight"][half][..., order, :]
    return fitted(network, Chains(u))


# --- function space -------------------------------------------------------------------------------


def test_figures_are_those_of_arviz() -> None:
    import arviz_stats
    from arviz_base import dict_to_dataset

    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4, 200, 3)).cumsum(axis=1) * 0.1 + rng.normal(size=(4, 200, 3))
    figures = mixing(draws)
    dataset = dict_to_dataset({"f": draws})
    rhat = arviz_stats.rhat(dataset).f.values
    bulk, tail = (arviz_stats.ess(dataset, method=method).f.values for method in ("bulk", "tail"))
    mcse = arviz_stats.mcse(dataset, method="mean").f.values / draws.std(axis=(0, 1))
    # ArviZ takes the tails at the ends of its default interval, 89 % wide; here 5 % and 95 %, as in the article.
    tail = arviz_stats.ess(dataset, method="tail", prob=(0.05, 0.95)).f.values
    expected = [rhat.max(), bulk.min(), tail.min(), mcse.max()]
    found = [figures.rhat, figures.ess_bulk, figures.ess_tail, figures.mcse]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert figures.components == 3


def test_what_is_judged_of_a_network_is_that_of_numpy_and_scipy() -> None:
    posterior = network_chains(chains=1, draws=20)
    w = {name: value[0] for name, value in posterior.draws.items()}
    x, y = data()

    def judged(problem: Any) -> Any:
        program = problem.program
        eta = program.predictor_draws(w, x)
        return quantities(problem, w, eta[:, :4], eta, y)

    found = posterior.with_problem(judged)
    hidden = np.tanh(np.einsum("nf,sfh->snh", x, w["hidden0.weight"]) + w["hidden0.bias"][:, None])
    f = np.einsum("snh,sho->sno", hidden, w["output.weight"])[..., 0] + w["output.bias"]
    assert list(found) == ["f", "log_likelihood", "noise"]
    np.testing.assert_allclose(found["f"][..., 0], f[:, :4], rtol=1e-10)
    np.testing.assert_allclose(found["f"][..., 1], np.log(w["noise"])[:, None] + np.zeros(4), rtol=1e-10)
    wanted = scipy.stats.norm.logpdf(y, f, w["noise"][:, None]).sum(1)
    np.testing.assert_allclose(found["log_likelihood"], wanted, rtol=1e-10)
    np.testing.assert_array_equal(found["noise"], w["noise"])


def test_a_variable_of_the_name_of_a_quantity_stands_beside_it() -> None:
    def named(x: Any, y: Any = None) -> None:
        level = bnn.sample("log_likelihood", bnn.dist.Normal(0.0, 1.0))
        bnn.observe(y, level + 0.0 * x[:, :1], bnn.likelihoods.Gaussian(NOISE))

    level = np.random.default_rng(0).normal(size=(4, 100))
    judged = convergence(fitted(named, Chains({"log_likelihood": level})))
    assert set(judged.quantities) == {"f", "log_likelihood", "log_likelihood (site)"}
    assert judged.quantities["log_likelihood (site)"] == mixing(level[..., None])
    assert judged.quantities["log_likelihood"] != judged.quantities["log_likelihood (site)"]


def test_independent_draws_have_converged_and_constants_are_left_out() -> None:
    posterior = exact_chains()
    judged = convergence(posterior)
    assert judged.converged
    assert judged.reasons == ()
    assert 0.99 < judged.rhat < 1.01
    # ESS of S independent draws is S, with a relative standard error of about 2 / sqrt(S) per component.
    f = posterior.predictor(data()[0])[..., 0]
    assert 0.85 * 2000 < np.median(by_arviz("ess", f, 0.0, method="bulk")) < 1.15 * 2000
    assert judged.quantities["f"].components == ROWS
    assert judged.quantities["f"].constant == 1  # the known noise, the same in every row
    # In standard deviations, over correlated rows: the worst is near them all.
    assert math.isclose(judged.quantities["f"].mcse, 1 / math.sqrt(2000), rel_tol=0.25)


def test_separated_chains_are_flagged() -> None:
    judged = convergence(exact_chains(shift=5.0))
    assert not judged.converged
    assert judged.rhat > 1.5
    assert judged.ess_bulk < 10
    assert any("R-hat of f" in reason for reason in judged.reasons)
    assert any("log_likelihood" in reason for reason in judged.reasons)
    assert judged.per_mode


def test_exchanged_hidden_units_change_the_weights_only() -> None:
    posteriors = [network_chains(permute=permute) for permute in (False, True)]
    plain, permuted = (convergence(posterior) for posterior in posteriors)
    weights = [mixing(ravel(posterior.unconstrained_draws, lead=2)) for posterior in posteriors]
    assert weights[0].rhat < 1.02
    assert weights[1].rhat > 1.5
    assert weights[1].ess_bulk < 10
    assert permuted.converged
    assert set(permuted.quantities) == {"f", "log_likelihood", "noise"}
    assert permuted.rhat == pytest.approx(plain.rhat, abs=1e-6)
    # eta = (f, log noise): the noise is the same in all rows and is one component.
    assert permuted.quantities["f"].components == ROWS + 1


def test_noise_is_judged_by_itself() -> None:
    posterior = network_chains()
    posterior.approximation.u["noise"][2:] += 3.0
    judged = convergence(posterior)
    assert judged.quantities["noise"].rhat > 1.5
    assert any("R-hat of noise" in reason for reason in judged.reasons)


def test_too_few_draws_is_not_converged() -> None:
    # R-hat is good; 4 chains of 50 have an ESS of about 200, and 400 are wanted.
    judged = convergence(exact_chains(draws=50))
    assert not judged.converged
    assert all("ESS" in reason for reason in judged.reasons if "R-hat" not in reason)
    assert any("not above 400 (100 per chain)" in reason for reason in judged.reasons)
    one = convergence(exact_chains(chains=1, draws=2000))
    assert not one.converged
    assert any("one chain alone" in reason for reason in one.reasons)
    assert not convergence(exact_chains(draws=3)).converged


def test_chains_that_stand_still_are_not_converged() -> None:
    stuck = exact_chains()
    u = stuck.approximation.u["output.weight"]
    u[:] = u[:, :1]
    judged = convergence(stuck)
    assert not judged.converged
    assert judged.rhat == math.inf
    assert judged.ess_bulk == 0.0
    same = exact_chains()
    same.approximation.u["output.weight"][:] = 0.3
    judged = convergence(same)
    assert not judged.converged
    assert "did not move" in judged.reasons[0]


def test_probe_rows_are_training_rows_in_original_units() -> None:
    mean, covariance, _ = closed_form()
    w = np.random.default_rng(0).multivariate_normal(mean, covariance, size=(2, 10))[..., None]
    posterior = fitted(linear, Chains({"output.weight": w}), standardise=True)
    x, _ = data()
    chosen = probe_rows(posterior, 10)
    np.testing.assert_array_equal(chosen, probe_rows(posterior, 10))
    distances = np.abs(chosen[:, None] - x[None]).max(-1)
    assert len(set(distances.argmin(1))) == 10
    assert distances.min(1).max() < 1e-12
    assert convergence(posterior, x[:4]).quantities["f"].components == 4


def test_convergence_is_for_chains_only() -> None:
    with pytest.raises(UnsupportedError, match="chains"):
        convergence(exact_gaussian())


# --- within chains and between them ---------------------------------------------------------------


def test_variance_within_and_between_chains_is_told_apart() -> None:
    posterior = exact_chains(shift=3.0)
    judged = convergence(posterior, data()[0])
    f = posterior.predictor(data()[0])[..., 0]
    # The law of total variance: what is not within chains is between them.
    shares = 1.0 - f.var(axis=1).mean(axis=0) / f.var(axis=(0, 1))
    assert judged.between_share == pytest.approx(np.median(shares), abs=1e-12)
    assert judged.between_share_max == pytest.approx(shares.max(), abs=1e-12)
    # Two halves of the chains, 3 sd of each weight apart: (1.5 sd . x)^2 against x' C x.
    _, covariance, _ = closed_form()
    x, _ = data()
    between = (x @ (1.5 * np.sqrt(np.diag(covariance)))) ** 2
    exact = between / (between + np.einsum("ni,ij,nj->n", x, covariance, x))
    assert judged.between_share == pytest.approx(np.median(exact), abs=0.05)
    assert judged.rhat_within < 1.05
    assert 50 < judged.ess_within < 1000
    assert convergence(exact_chains()).between_share < 5 / 500


def test_chains_in_modes_of_their_own_have_converged_per_mode_only() -> None:
    found = diagnose(exact_chains(shift=5.0))
    assert found.verdict == "converged per mode only"
    assert found.figures["rhat_within"] < 1.05
    assert found.figures["between_share"] > 0.5
    assert said(found, "modes of their own")
    assert any("bnn.stack" in advice for advice in found.advice)
    assert any("SMC" in advice for advice in found.advice)
    # Half a standard deviation apart is disagreement; a tenth is too few draws.
    assert convergence(exact_chains(shift=0.2)).per_mode is False


def squared(x: Any, y: Any = None) -> None:
    """f = a^2 x: the signs of a have the same predictions, and a posterior of two modes."""
    a = bnn.sample("a", bnn.dist.Normal(0.0, 1.0))
    bnn.observe(y, a * a * x[:, :1], bnn.likelihoods.Gaussian(NOISE))


def signed(signs: tuple[int, ...], draws: int = 500) -> Any:
    a = 1.0 + 0.05 * np.random.default_rng(8).normal(size=(len(signs), draws))
    return fitted(squared, Chains({"a": np.array(signs)[:, None] * a}))


def test_modes_of_a_symmetric_function_are_named_as_modes() -> None:
    judged = convergence(signed((-1, -1, 1, -1)))
    assert judged.quantities["f"].rhat < 1.01
    assert judged.quantities["a"].rhat > 1.5
    assert judged.per_mode
    assert judged.between == "a"
    found = diagnose(signed((-1, -1, 1, -1)))
    assert found.verdict == "converged per mode only"
    # Of the variance of a the share between means of 1 and -1, in shares of 1 and 3: 0.75 of 0.75 + 0.05^2.
    assert said(found, "between chains lies 100% of the variance of a, while R-hat of f is 1.00")
    for words in ("bnn.stack", "several starts", "SMC"):
        assert any(words in advice for advice in found.advice)
    assert not any("more draws" in advice for advice in found.advice)
    assert diagnose(signed((-1, -1, -1, -1))).verdict == "converged"


# --- at the rows where a claim is made -------------------------------------------------------------


def silent() -> np.ndarray:
    """The training rows with a third input that is nearly 0 in all of them."""
    return np.column_stack([data()[0], 1e-6 * np.random.default_rng(20).normal(size=ROWS)])


def with_a_silent_input(apart: float, draws: int = 500) -> Any:
    """Chains of `linear` that agree but for the weight of the silent input, `apart` standard deviations each."""
    mean, covariance, _ = closed_form()
    rng = np.random.default_rng(21)
    w = rng.multivariate_normal(mean, covariance, size=(4, draws))
    third = 0.1 * rng.normal(size=(4, draws, 1)) + 0.1 * apart * np.arange(4)[:, None, None]
    u = {"output.weight": np.concatenate([w, third], axis=-1)[..., None]}
    method = Planted(outcome=Outcome(Chains(u)), ppl="pyro")
    return method.fit(linear, silent(), data()[1])


def loud(rows: int) -> np.ndarray:
    """Rows where the third input is far from 0."""
    x = np.random.default_rng(22).normal(size=(rows, 3))
    x[:, 2] = np.sign(x[:, 2]) * (2.0 + np.abs(x[:, 2]))
    return x


def test_chains_that_agree_at_the_training_rows_only_are_told_so() -> None:
    apart, together = with_a_silent_input(1.0), with_a_silent_input(0.0)
    assert diagnose(apart).verdict == "converged"
    found = diagnose(apart, x={"test": loud(40), "near": silent()})
    assert found.verdict != "converged"
    figures = found.figures
    words = f"R-hat {figures['rhat_at_test']:.3f}, ESS {figures['ess_at_test']:.0f}"
    assert said(
        found, f"converged at the training rows, not at the test rows: {words} (the limits are 1.01 and 400)"
    )
    assert said(found, f"at the near rows: R-hat {figures['rhat_at_near']:.3f}")
    assert figures["rhat"] < 1.01
    assert figures["rhat_at_near"] < 1.01
    assert figures["rhat_at_test"] > 1.1
    assert figures["ess_at_test"] < 400 < figures["ess_at_near"]
    # All chains stand still in places of their own: more draws are not the remedy.
    assert found.verdict == "converged per mode only"
    assert said(found, "of the variance of f at the test rows, while R-hat of f is 1.00")
    assert not said(found, "hardly differs")
    good = diagnose(together, x=loud(40))
    assert good.verdict == "converged"
    assert said(good, "at the given rows: R-hat 1.00")
    assert good.figures["rhat_at_given"] < 1.01
    # Chains that disagree at the training rows as well are not said to have converged there.
    both = diagnose(exact_chains(draws=40), x=data()[0])
    assert said(both, "not converged at the given rows either")
    assert not said(both, "converged at the training rows")


def test_further_rows_change_nothing_at_the_training_rows() -> None:
    posterior = with_a_silent_input(1.0)
    plain, further = convergence(posterior), convergence(posterior, regions=rows_at(posterior, loud(40)))
    assert (further.rhat, further.ess_bulk, further.quantities) == (
        plain.rhat,
        plain.ess_bulk,
        plain.quantities,
    )
    assert further.at_training
    assert not further.converged
    assert further.failing == ("given",)
    assert not plain.at
    # The same functions, as components of ArviZ.
    f = posterior.predictor(loud(40))[..., 0]
    assert further.at["given"].rhat == pytest.approx(mixing(f).rhat, rel=1e-9)
    # The known noise is the same in every draw.
    assert (further.at["given"].components, further.at["given"].constant) == (40, 1)


def test_at_most_200_functions_are_judged_evenly_spaced() -> None:
    posterior = with_a_silent_input(0.0, draws=50)
    many = loud(1000)
    # 201 components: f at 200 rows, and the known noise, which is last.
    f = posterior.predictor(many[np.linspace(0, 999, 200).round().astype(int)])[..., 0]
    given = convergence(posterior, regions=rows_at(posterior, many)).at["given"]
    assert given.rhat == pytest.approx(mixing(f[..., evenly_spaced(201, 200)[:-1]]).rhat, rel=1e-9)
    found = convergence(posterior, many, regions=rows_at(posterior, {"a": many, "b": many[:30]}))
    assert found.quantities["f"].components + found.quantities["f"].constant == 200
    assert found.at["a"].components + found.at["a"].constant == 100
    assert found.at["b"].components + found.at["b"].constant == 31


def test_rows_that_interact_are_judged_together() -> None:
    def centred(x: Any, y: Any = None) -> None:
        bnn.coupled()
        slope, level = (bnn.sample(name, bnn.dist.Normal(0.0, 1.0)) for name in ("a", "b"))
        bnn.observe(y, slope * (x[:, :1] - x[:, :1].mean(0)) + level, bnn.likelihoods.Gaussian(NOISE))

    rng = np.random.default_rng(3)
    u = {name: rng.normal(size=(4, 200)) for name in ("a", "b")}
    posterior, x = fitted(centred, Chains(u)), rng.normal(size=(300, FEATURES)) ** 2
    at = convergence(posterior, regions=rows_at(posterior, x)).at["given"]
    f = u["a"][..., None] * (x[:, 0] - x[:, 0].mean()) + u["b"][..., None]
    chosen = evenly_spaced(300, 200)[evenly_spaced(201, 200)[:-1]]
    assert at.rhat == pytest.approx(mixing(f[..., chosen]).rhat, rel=1e-9)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (np.zeros((3, 2)), r"x: expected inputs like those of the training, \(3,\)"),
        ({"gap": np.full((3, 3), np.nan)}, "gap rows: x"),
        ({"gap": np.zeros((0, 3))}, "gap rows: x: expected at least one row"),
        ({}, "x: expected 1 to 200 regions"),
        ({"training": np.zeros((3, 3))}, "other than 'training'"),
        ({1: np.zeros((3, 3))}, "names in words"),
    ],
)
def test_rows_that_cannot_be_judged_are_refused(x: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        diagnose(with_a_silent_input(0.0, draws=10), x=x)
    # An approximation is not judged there, and the rows are checked all the same.
    with pytest.raises(InputError, match="gap rows: x: expected inputs like those of the training"):
        diagnose(exact_gaussian(), x={"gap": np.zeros((3, 7))})


def test_rows_of_named_inputs_are_told_from_regions() -> None:
    def of_two(x: Any, y: Any = None) -> None:
        weight = bnn.sample("a", bnn.dist.Normal(0.0, 1.0))
        bnn.observe(y, weight * (x["left"] + x["test"]), bnn.likelihoods.Gaussian(NOISE))

    rng = np.random.default_rng(0)
    x = {"left": rng.normal(size=(20, 1)), "test": rng.normal(size=(20, 1))}
    approximation = Chains({"a": rng.normal(size=(4, 200))})
    posterior = Planted(outcome=Outcome(approximation), ppl="pyro").fit(of_two, x, rng.normal(size=20))
    assert "rhat_at_given" in diagnose(posterior, x=x).figures
    assert "rhat_at_far" in diagnose(posterior, x={"far": x}).figures


# Measured rates of false alarms of 200 functions of 4 chains of independent draws: 0 of 210 of either kind with 1000
# draws; of independent functions 1 of 200 with 350 and 60 of 200 with 250 draws; of a network 3 of 200 with 250.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["independent", "network"])
def test_200_functions_of_independent_draws_seldom_fail(kind: str) -> None:
    draws, repeats, alarms = 1000, 60, 0
    for repeat in range(repeats):
        rng = np.random.default_rng(repeat)
        if kind == "independent":
            f = rng.normal(size=(4, draws, FUNCTIONS))
        else:
            # f(x) = sum over 10 units of v tanh(w x + b) at 200 inputs from -3 to 3.
            w, b, v = rng.normal(size=(3, 10, 4, draws, 1))
            f = np.sum(v * np.tanh(w * np.linspace(-3.0, 3.0, FUNCTIONS) + b), axis=0)
        found = mixing(f)
        alarms += not (found.rhat < RHAT_LIMIT and found.ess > 4 * ESS_PER_CHAIN)
    # At a rate of 5 %, none of 60 would occur with a probability of 4.6 %.
    assert alarms == 0


def test_chains_that_wander_have_not_converged_per_mode() -> None:
    rng = np.random.default_rng(5)
    mean, covariance, _ = closed_form()
    walk = rng.normal(size=(4, 500, FEATURES)).cumsum(axis=1) / 10.0
    w = mean + walk * np.sqrt(np.diag(covariance))
    judged = convergence(fitted(linear, Chains({"output.weight": w[..., None]})))
    assert judged.rhat > 1.05
    assert not judged.per_mode
    assert judged.rhat_within > 1.05
    assert diagnose(fitted(linear, Chains({"output.weight": w[..., None]}))).verdict == "not converged"


def test_one_chain_that_never_moves_is_named() -> None:
    posterior = exact_chains()
    posterior.approximation.u["output.weight"][2] = 0.3
    judged = convergence(posterior)
    assert judged.still == (2,)
    assert "chain 2 never moves" in judged.reasons[0]
    assert not judged.per_mode
    found = diagnose(posterior)
    assert found.verdict == "not converged"
    assert any("never moves accepts nothing" in advice for advice in found.advice)
    # In the middle of the others it moves no mean: R-hat alone would let it pass.
    posterior.approximation.u["output.weight"][2] = closed_form()[0][:, None]
    assert diagnose(posterior).verdict == "not converged"


def grouped(modes: str, chains: int = 64, draws: int = 60, apart: float = 6.0) -> Any:
    """Eight groups of short chains: in one mode; in two at random; or in a mode per group."""
    mean, covariance, _ = closed_form()
    w = np.random.default_rng(4).multivariate_normal(mean, covariance, size=(chains, draws))
    side = {"one": 0.0 * np.arange(chains), "random": np.arange(chains) % 2, "group": np.arange(chains) // 32}
    w += apart * side[modes][:, None, None] * np.sqrt(np.diag(covariance))
    return fitted(linear, Chains({"output.weight": w[..., None]}, groups=8))


def test_many_short_chains_are_judged_by_nested_r_hat() -> None:
    from arviz_stats.base import array_stats

    good = convergence(grouped("one"))
    assert good.converged
    assert good.superchains == 8
    log_likelihood = grouped("one").log_likelihood().sum(-1)
    nested = array_stats.rhat_nested(log_likelihood, superchain_ids=np.repeat(np.arange(8), 8))
    assert good.quantities["log_likelihood"].rhat == pytest.approx(nested, rel=1e-12)
    assert good.ess_bulk > 800
    assert diagnose(grouped("one")).verdict == "converged"
    apart = diagnose(grouped("group"))
    assert apart.verdict == "not converged"
    assert said(apart, "nested R-hat of f")


def test_nested_r_hat_does_not_hide_chains_that_chose_their_modes_at_random() -> None:
    judged = convergence(grouped("random"))
    assert judged.rhat < 1.01
    assert judged.rhat_between > 1.5
    assert not judged.converged
    assert judged.per_mode
    assert any("does not depend on where they started" in reason for reason in judged.reasons)
    assert diagnose(grouped("random")).verdict == "converged per mode only"


def test_both_sides_of_what_short_chains_may_differ() -> None:
    """sqrt(1 + 4 / e), e the mean over chains of the ESS of each, here over all rows and from ArviZ.

    The modes are moved apart until R-hat over single chains is 0.002 below that and 0.002 above: the ESS of some rows
    in place of all moves the limit by a third of this.
    """
    from arviz_stats.base import array_stats

    def functions(apart: float) -> Any:
        return grouped("random", apart=apart).predictor(data()[0])[..., 0]

    # A shift of a chain changes its mean, not its ESS.
    f = functions(0.0)
    each = [
        np.median(array_stats.ess(f[chain : chain + 1], chain_axis=0, draw_axis=1)) for chain in range(64)
    ]
    limit = math.sqrt(1.0 + 4.0 / float(np.mean(each)))

    def excess(apart: float) -> float:
        return mixing(functions(apart)).rhat - limit

    for margin in (-0.002, 0.002):
        apart = scipy.optimize.brentq(lambda apart: excess(apart) - margin, 0.0, 2.0, xtol=1e-3)  # noqa: B023
        judged = convergence(grouped("random", apart=apart))
        assert judged.rhat < 1.01
        assert judged.per_mode is (margin > 0.0)


def test_a_run_that_its_budget_ended_is_never_called_converged() -> None:
    for figures in (
        {"stopped_by_budget": 1.0, "rule_held": 0.0},
        {"stopped_by_budget": 1.0},
        {"rule_held": 0.0},
    ):
        found = diagnose(exact_chains(figures=figures))
        assert found.verdict == "undecided"
        assert said(found, "budget") or said(found, "did not hold")
        assert any("extend" in advice for advice in found.advice)
        assert found.figures["rhat"] < 1.01
    assert diagnose(exact_chains(figures={"stopped_by_budget": 0.0, "rule_held": 1.0})).verdict == "converged"
    assert diagnose(exact_chains(draws=60, figures={"stopped_by_budget": 1.0})).verdict == "not converged"


def test_what_chains_are_of_is_named() -> None:
    found = diagnose(exact_chains(target="approximate: a step size of 0.1", warnings=("bias of 0.02 sd",)))
    assert found.verdict == "converged"
    assert said(found, "not the posterior: approximate: a step size of 0.1")
    assert said(found, "bias of 0.02 sd")


# --- importance -----------------------------------------------------------------------------------


def test_the_posterior_itself_is_a_perfect_proposal() -> None:
    pareto = pareto_k(exact_gaussian())
    assert pareto.reliable
    assert pareto.k == -math.inf
    assert pareto.log_evidence == pytest.approx(closed_form()[2], abs=1e-8)
    assert pareto.relative_ess == pytest.approx(1.0, abs=1e-8)


def test_a_wider_proposal_gives_the_evidence_within_its_standard_error() -> None:
    pareto = pareto_k(exact_gaussian(widen=1.5), draws=4000)
    assert pareto.k < 0.5
    assert 0 < pareto.log_evidence_se < 0.05
    assert abs(pareto.log_evidence - closed_form()[2]) < 4 * pareto.log_evidence_se
    # E[w]^2 / E[w^2] of N(0, 1) / N(0, c^2) is sqrt(2 c^2 - 1) / c^2 in each of the two directions.
    assert pareto.relative_ess == pytest.approx((2 * 1.5**2 - 1) / 1.5**4, rel=0.05)


def test_a_proposal_that_is_too_narrow_is_flagged() -> None:
    pareto = pareto_k(exact_gaussian(widen=0.4))
    assert not pareto.reliable
    assert pareto.k > 0.7
    assert pareto.relative_ess < 0.2


def test_mean_field_has_a_k_hat_too() -> None:
    mean, covariance, _ = closed_form()
    scale = np.sqrt(1.0 / np.diag(np.linalg.inv(covariance)))
    posterior = fitted(linear, MeanField({"output.weight": mean[:, None]}, {"output.weight": scale[:, None]}))
    assert pareto_k(posterior).k < 0.7


@pytest.mark.parametrize("shape", [0.2, 0.5, 1.0])
def test_k_hat_finds_the_shape_of_a_pareto_distribution(shape: float) -> None:
    # P(w > t) = t^(-1 / k): log w is exponential with mean k; k-hat has a standard error of about (1 + k) / sqrt(tail).
    log_ratios = shape * np.random.default_rng(0).exponential(size=10_000)
    error = (1 + shape) / math.sqrt(3 * math.sqrt(10_000))
    assert abs(pareto_k_of(log_ratios).k - shape) < 3 * error


def test_ratios_that_are_not_finite_are_not_trusted() -> None:
    ratios = np.random.default_rng(0).normal(size=100)
    ratios[3] = -np.inf
    assert not pareto_k_of(ratios).reliable


def test_weights_that_one_draw_carries_alone_are_not_trusted() -> None:
    # Next to weights that differ by a factor e^300 the others underflow; ArviZ alone answers k = 0.05 for these.
    ratios = 300 * np.random.default_rng(1).normal(size=1000)
    assert pareto_k_of(ratios).k == math.inf


def test_k_hat_is_for_densities_only() -> None:
    for posterior in (exact_chains(), fitted(linear, Point({"output.weight": np.ones((2, 1))}))):
        with pytest.raises(UnsupportedError, match="density"):
            pareto_k(posterior)
    with pytest.raises(InputError, match="draws"):
        pareto_k(exact_gaussian(), draws=3)


def exact_leave_one_out() -> float:
    x, y = data()
    total = 0.0
    for row in range(ROWS):
        kept = np.arange(ROWS) != row
        covariance = np.linalg.inv(x[kept].T @ x[kept] / NOISE**2 + np.eye(FEATURES))
        mean = covariance @ x[kept].T @ y[kept] / NOISE**2
        scale = np.sqrt(x[row] @ covariance @ x[row] + NOISE**2)
        total += scipy.stats.norm.logpdf(y[row], x[row] @ mean, scale)
    return total


def test_leave_one_out_is_that_of_arviz_and_of_the_closed_form() -> None:
    import arviz_stats

    posterior = exact_chains(draws=1000)
    tree = posterior.to_datatree()
    expected = arviz_stats.loo(tree, pointwise=True)
    for found in (leave_one_out(posterior), leave_one_out(tree)):
        assert (found.elpd, found.se, found.p_loo) == (expected.elpd, expected.se, expected.p)
        assert found.worst_k == expected.pareto_k.max()
        assert found.share_above == 0.0
        assert found.reason == ""
        assert math.isnan(found.corrected_elpd)
        assert "chains" in found.corrected_reason
    assert expected.elpd == pytest.approx(exact_leave_one_out(), abs=0.1)


def test_leave_one_out_of_an_approximation_is_corrected_where_the_weights_allow() -> None:
    mean, covariance, _ = closed_form()

    def gaussian(widen: float, linearised: bool) -> Any:
        full = Full.of(np.linalg.inv(covariance) / widen**2)
        kinds = ("linearised", "sampled") if linearised else ("sampled",)
        approximation = LaplaceGaussian({"output.weight": mean[:, None]}, full, kinds=kinds)
        return fitted(linear, approximation)

    wide = leave_one_out(gaussian(1.6, False))
    truth = exact_leave_one_out()
    # Draws spread too widely lose score when taken at their word; the weights p/q repair it.
    assert wide.elpd < truth - 0.5
    assert wide.corrected_elpd == pytest.approx(truth, abs=0.1)
    assert wide.corrected_k is not None
    assert wide.corrected_k.shape == (ROWS,)
    assert wide.corrected_worst_k == wide.corrected_k.max() <= 0.7
    assert wide.corrected_share_above == 0.0
    narrow = leave_one_out(gaussian(0.3, False))
    assert math.isnan(narrow.corrected_elpd)
    assert "k-hat" in narrow.corrected_reason
    assert narrow.corrected_k is None
    # A predictor that is linear in the weights is its own linearisation.
    linearised = leave_one_out(gaussian(1.6, True))
    assert linearised.corrected_elpd == pytest.approx(wide.corrected_elpd, abs=1e-9)
    assert linearised.corrected_reason == ""


def test_the_correction_of_a_linearised_network_is_withheld() -> None:
    posterior = network_chains(chains=1, draws=4)
    mode = {name: value[0, 0] for name, value in posterior.approximation.u.items()}
    size = sum(np.size(value) for value in mode.values())

    def by(kinds: tuple[str, ...]) -> Any:
        gaussian = LaplaceGaussian(mode, Full.of(1e8 * np.eye(size)), kinds=kinds)
        return fitted(network, gaussian)

    u = by(("linearised", "sampled")).approximation.draw(50, np.random.default_rng(0))
    assert importance._linear(
        by(("linearised", "sampled")), {name: 0.0 * v + mode[name] for name, v in u.items()}
    )
    assert not importance._linear(by(("linearised", "sampled")), u)


def test_corrected_figures_are_those_of_arviz() -> None:
    import arviz_stats
    from arviz_base import from_dict

    rng = np.random.default_rng(2)
    values, log_p, log_q = (
        0.3 * rng.normal(size=(800, 12)),
        0.3 * rng.normal(size=800),
        0.3 * rng.normal(size=800),
    )
    tree = from_dict({"posterior": {"a": log_p[None]}, "log_likelihood": {"y": values[None]}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected: Any = arviz_stats.loo_approximate_posterior(tree, log_p=log_p, log_q=log_q, pointwise=True)
    elpd, k = importance._leave_out(values, log_p - log_q)
    np.testing.assert_allclose(elpd, expected.elpd_i.values, rtol=1e-10)
    np.testing.assert_allclose(k, expected.pareto_k.values, rtol=1e-10)
    corrected = importance._published(elpd, k, 0.0)
    assert corrected["corrected_elpd"] == pytest.approx(expected.elpd, rel=1e-12)
    assert corrected["corrected_se"] == pytest.approx(expected.se, rel=1e-12)


@pytest.mark.parametrize(
    ("row", "overall", "published"), [(0.69, 0.69, True), (0.71, 0.5, False), (0.5, 0.71, False)]
)
def test_one_row_above_the_limit_withholds_the_corrected_value(
    row: float, overall: float, published: bool
) -> None:
    k = np.array([0.1, row, 0.3, -math.inf])
    found = importance._published(np.full(4, -1.0), k, overall)
    assert math.isfinite(found.get("corrected_elpd", math.nan)) is published
    assert ("corrected_reason" not in found) is published
    assert found["corrected_k"] is k
    if row > 0.7:
        assert "above 0.7 in 25.0% of the rows, 0.71 at most" in found["corrected_reason"]
    if overall > 0.7:
        assert "k-hat of p/q is 0.71" in found["corrected_reason"]


def test_a_narrow_approximation_is_not_corrected_for_rows_that_its_weights_do_not_reach() -> None:
    """Mean field at its optimum for correlated inputs: k-hat of p/q allows what Pareto k of the rows forbids."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, 1)) + rng.normal(size=(ROWS, FEATURES))
    y = x @ [1.0, -0.5] + NOISE * rng.normal(size=ROWS)
    precision = x.T @ x / NOISE**2 + np.eye(FEATURES)
    mean = np.linalg.solve(precision, x.T @ y / NOISE**2)
    optimum = MeanField(
        {"output.weight": mean[:, None]}, {"output.weight": np.diag(precision)[:, None] ** -0.5}
    )
    posterior = Planted(outcome=Outcome(optimum), ppl="pyro").fit(linear, x, y)
    assert pareto_k(posterior).k <= 0.7
    found = leave_one_out(posterior)
    assert found.corrected_worst_k > 0.7
    assert 0.0 < found.corrected_share_above < 1.0
    assert math.isnan(found.corrected_elpd)
    assert "of the rows" in found.corrected_reason


def test_what_cannot_be_corrected_says_why() -> None:
    mean, covariance, _ = closed_form()
    part = Full.of(np.linalg.inv(covariance)[:1, :1])
    held = LaplaceGaussian(
        {"output.weight": mean[:, None]}, part, positions=np.array([0]), kinds=("sampled",)
    )
    wide = gaussian(1.5)
    u = wide.draw(500, np.random.default_rng(0))
    for posterior, words in (
        (fitted(linear, held), "held at a value"),
        (fitted(linear, Drawn(u, wide.log_prob(u))), "no more than were kept"),
        (fitted(linear, Undense((gaussian(),))), "no density"),
        (exact_gaussian().to_datatree(), "a tree holds too few draws"),
    ):
        found = leave_one_out(posterior)
        assert math.isfinite(found.elpd)
        assert math.isnan(found.corrected_elpd)
        assert found.corrected_k is None
        assert words in found.corrected_reason


@pytest.mark.parametrize(("draws", "defined"), [(24, False), (25, True)])
def test_leaving_out_takes_a_tail_of_five_draws(draws: int, defined: bool) -> None:
    found = leave_one_out(exact_chains(chains=1, draws=draws))
    assert math.isfinite(found.elpd) is defined
    assert (found.reason == "") is defined
    if not defined:
        assert "24 draws have no tail" in found.reason


def test_a_point_has_no_leave_one_out() -> None:
    posterior = fitted(linear, Point({"output.weight": np.ones((2, 1))}))
    for source in (posterior, posterior.to_datatree()):
        found = leave_one_out(source)
        assert math.isnan(found.elpd)
        assert "point" in found.reason
        assert found.elpd_data is None


@pytest.mark.parametrize("points", [1, 2])
def test_rows_cannot_be_left_out_of_a_posterior_whose_weights_are_mostly_points(points: int) -> None:
    """Half of the weights may be points; of a network below a Bayesian last layer nearly all are."""

    def model(x: Any, y: Any = None) -> None:
        f = bnn.linear(
            "output", x, bnn.sample("w", bnn.dist.Normal(0.0, 1.0).expand((2, 1)).to_event()), None
        )
        shift = bnn.sample("shift", bnn.dist.Normal(0.0, 1.0).expand((1,)).to_event())
        bnn.observe(y, f + shift, bnn.likelihoods.Gaussian(NOISE))

    rng = np.random.default_rng(0)
    w, shift = np.array([1.0, -0.5]) + 0.1 * rng.normal(size=(4, 200, 2)), 0.1 * rng.normal(size=(4, 200, 1))
    (w if points == 2 else shift)[...] = 0.0
    posterior = fitted(model, Chains({"w": w[..., None], "shift": shift}))
    for source in (posterior, posterior.to_datatree()):
        found = leave_one_out(source)
        assert math.isfinite(found.elpd) is (points == 1)
        assert found.reason.startswith("2 of 3 weights are points") is (points == 2)


def test_rows_that_cannot_be_left_out_are_counted_without_a_warning() -> None:
    rng = np.random.default_rng(0)
    w = np.array([1.0, -0.5]) + 2.0 * rng.normal(size=(4, 200, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = leave_one_out(fitted(linear, Chains({"output.weight": w[..., None]})))
    assert found.worst_k > 0.7
    assert 0 < found.share_above <= 1


# --- the verdict ----------------------------------------------------------------------------------


def statistics(
    chains: int = 4, draws: int = 500, diverging: float = 0.0, energy: str = "good"
) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    level = rng.normal(size=(chains, draws))
    return {
        "diverging": rng.random((chains, draws)) < diverging,
        "reached_max_tree_depth": np.zeros((chains, draws), dtype=bool),
        "energy": level if energy == "good" else level.cumsum(axis=1),
    }


def test_good_chains_are_converged() -> None:
    found = diagnose(exact_chains(statistics=statistics()))
    assert found.verdict == "converged"
    assert found.figures["rhat"] < 1.01
    assert found.figures["divergences"] == 0
    assert found.figures["bfmi"] > 1.0
    assert "worst R-hat" in str(found)
    assert found.advice == ()


def test_bad_chains_are_not_converged_whatever_the_sampler_says() -> None:
    found = diagnose(exact_chains(draws=40, shift=5.0, statistics=statistics(draws=40)))
    assert found.verdict == "not converged"
    assert found.advice
    assert "try:" in str(found)


@pytest.mark.parametrize(
    ("options", "said", "verdict"),
    [
        ({"diverging": 0.002}, "diverged", "converged"),
        ({"diverging": 0.1}, "diverged", "undecided"),
        ({"energy": "bad"}, "E-BFMI", "undecided"),
    ],
)
def test_what_the_sampler_recorded_counts(options: dict[str, Any], said: str, verdict: str) -> None:
    found = diagnose(exact_chains(statistics=statistics(**options)))
    assert found.verdict == verdict
    assert any(said in reason for reason in found.reasons)
    assert found.advice


@dataclass(frozen=True)
class Knobs(Planted):
    """A planted posterior of a sampler with these settings."""

    target_accept: Any = None
    energy_variance: Any = None
    step_size_multiplier: Any = None
    superchains: Any = None


@pytest.mark.parametrize(
    ("knobs", "recorded", "advice"),
    [
        pytest.param({"target_accept": 0.8}, {}, "target_accept=0.95", id="nuts"),
        pytest.param(
            {"target_accept": 0.9, "energy_variance": 5e-4},
            {"energy_variance": np.full((4, 500), 5e-4)},
            "energy_variance=5e-05",
            id="mclmc",
        ),
        pytest.param(
            {"target_accept": 0.9, "energy_variance": 5e-4}, {}, "target_accept=0.975", id="adjusted"
        ),
        pytest.param(
            {"step_size_multiplier": 0.25, "superchains": 8}, {}, "step_size_multiplier=0.125", id="meads"
        ),
        pytest.param({"target_accept": 0.651, "superchains": 8}, {}, "target_accept=0.826", id="chees"),
        pytest.param({}, {}, "smaller steps", id="unknown"),
    ],
)
def test_divergences_are_met_by_the_knob_that_the_sampler_has(
    knobs: dict[str, Any], recorded: dict[str, Any], advice: str
) -> None:
    planted = exact_chains(statistics=statistics(diverging=0.1) | recorded)
    outcome = Outcome(planted.approximation, statistics=planted.statistics)
    found = diagnose(Knobs(outcome=outcome, ppl="pyro", **knobs).fit(linear, *data()))
    assert found.verdict == "undecided"
    (given,) = found.advice
    assert given.startswith(advice)


@pytest.mark.parametrize(("diverged", "verdict"), [(20, "converged"), (21, "undecided")])
def test_more_than_one_divergence_in_a_hundred_casts_doubt(diverged: int, verdict: str) -> None:
    recorded = statistics()
    recorded["diverging"][:] = np.arange(2000).reshape(4, 500) < diverged
    assert diagnose(exact_chains(statistics=recorded)).verdict == verdict


@pytest.mark.parametrize(("fraction", "verdict"), [(0.29, "undecided"), (0.31, "converged")])
def test_an_energy_that_moves_too_slowly_casts_doubt(fraction: float, verdict: str) -> None:
    # E-BFMI is the mean squared step over the variance: a walk on an arch, scaled in steps, has exactly `fraction`.
    recorded = statistics()
    steps = (-1.0) ** np.arange(500)
    slow = np.sin(np.pi * np.arange(500) / 499.0) * 20.0

    def bfmi(size: float) -> float:
        energy = slow + size * steps
        return float(np.sum(np.diff(energy) ** 2) / 499 / energy.var(ddof=1))

    size = scipy.optimize.brentq(lambda size: bfmi(size) - fraction, 0.0, 20.0)
    recorded["energy"] = np.tile(slow + size * steps, (4, 1))
    found = diagnose(exact_chains(statistics=recorded))
    assert found.figures["bfmi"] == pytest.approx(fraction, abs=0.002)
    assert found.verdict == verdict
    assert said(found, "E-BFMI") is (verdict == "undecided")


@pytest.mark.parametrize(("cut", "said_of"), [(100, False), (101, True)])
def test_one_tree_in_twenty_may_be_cut_off(cut: int, said_of: bool) -> None:
    recorded = statistics()
    recorded["reached_max_tree_depth"][:] = np.arange(2000).reshape(4, 500) < cut
    assert said(diagnose(exact_chains(statistics=recorded)), "greatest tree depth") is said_of


def test_trees_cut_off_are_slow_not_wrong() -> None:
    recorded = statistics()
    recorded["reached_max_tree_depth"][:] = True
    found = diagnose(exact_chains(statistics=recorded))
    assert found.verdict == "converged"
    assert any("slow, not wrong" in reason for reason in found.reasons)


def test_a_good_approximation_is_adequate_as_far_as_seen() -> None:
    found = diagnose(exact_gaussian(figures={"elbo": -40.0, "elbo_se": 0.1, "converged": 1.0}))
    assert found.verdict == "adequate as far as seen"
    assert found.figures["elbo"] == -40.0
    assert any("ELBO is -40.00" in reason for reason in found.reasons)


def test_k_hat_alone_never_says_inadequate() -> None:
    found = diagnose(exact_gaussian(widen=0.2))
    assert found.figures["pareto_k"] > 0.7
    assert found.verdict == "undecided"
    assert any("reference" in advice for advice in found.advice)


def test_an_optimisation_without_plateau_is_not_converged() -> None:
    assert diagnose(exact_gaussian(figures={"converged": 0.0})).verdict == "not converged"
    point = Point({"output.weight": closed_form()[0][:, None]})
    settled = diagnose(fitted(linear, point, figures={"converged": 1.0, "gradient_norm": 1e-6}))
    assert settled.verdict == "converged"
    assert any("gradient" in reason for reason in settled.reasons)
    assert any("no spread" in reason for reason in settled.reasons)
    stopped = diagnose(fitted(linear, point, figures={"converged": 0.0}, warnings=("stopped early",)))
    assert stopped.verdict == "not converged"
    assert "stopped early" in stopped.reasons


def test_a_reference_decides() -> None:
    reference = exact_chains(seed=3)
    good = diagnose(exact_gaussian(), reference=reference)
    assert good.verdict == "adequate as far as seen"
    assert good.figures["mean_gap"] < 0.2
    assert 0.9 < good.figures["sd_ratio"] < 1.1
    assert good.figures["mean_gap_floor"] > 0
    narrow = diagnose(exact_gaussian(widen=0.2), reference=reference)
    assert not any("a reference:" in advice for advice in narrow.advice)
    assert narrow.verdict == "inadequate"
    assert narrow.figures["sd_ratio"] == pytest.approx(0.2, rel=0.15)
    point = fitted(linear, Point({"output.weight": closed_form()[0][:, None]}))
    assert diagnose(point, reference=reference).verdict == "inadequate"
    assert diagnose(exact_chains(), reference=reference).verdict == "converged"
    apart = diagnose(exact_chains(shift=5.0), reference=reference)
    assert apart.verdict == "converged per mode only"
    assert "mean_gap" in apart.figures


def test_a_reference_that_has_not_converged_decides_nothing() -> None:
    for would_be, words in (
        (exact_chains(draws=40, shift=5.0), "would-be reference has not converged"),
        (exact_chains(shift=5.0), "would-be reference has converged per mode only"),
        (exact_chains(target="tempered: T=0.5"), "is not of the posterior (tempered: T=0.5)"),
    ):
        found = diagnose(exact_gaussian(widen=0.2), reference=would_be)
        assert found.verdict == "undecided"
        assert any(words in reason for reason in found.reasons)
        assert "mean_gap" not in found.figures
    with pytest.raises(UnsupportedError, match="reference"):
        diagnose(exact_gaussian(), reference=exact_gaussian())


def test_verdicts_are_from_the_list() -> None:
    for posterior in (exact_chains(), exact_gaussian(), network_chains(draws=20)):
        found = diagnose(posterior)
        assert found.verdict in VERDICTS
        assert str(found).startswith("Planted in pyro: ")
        assert all(isinstance(value, int | float) for value in found.figures.values())


# --- how far off an approximation is --------------------------------------------------------------


@dataclass(frozen=True)
class Tempered(Planted):
    """A planted posterior that says how the divergence was weighted and what was maximised."""

    kl_weight: float = 0.5
    objective: str = "renyi"


@dataclass(frozen=True)
class Warm(Planted):
    """A planted posterior of a tempered target."""

    temperature: float = 0.5


@dataclass
class Members(Approximation):
    """Several approximations from several starts, the best first."""

    members: tuple[Any, ...]
    kind: ClassVar[Any] = "iid"

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.members[0].draw(count, rng)

    def log_prob(self, u: Any) -> Any:
        return self.members[0].log_prob(u)

    def arrays(self) -> dict[str, np.ndarray]:
        return {}

    @classmethod
    def from_arrays(cls, arrays: Any) -> Members:
        return cls(())


@dataclass
class Kept(LaplaceGaussian):
    """Draws that were made once: no others can be had."""

    count: int = 200

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        assert count <= self.count
        return {
            name: value[:count] for name, value in super().draw(self.count, np.random.default_rng(7)).items()
        }


class Undense(Members):
    def log_prob(self, u: Any) -> None:
        return None


def gaussian(widen: float = 1.0, shift: float = 0.0) -> LaplaceGaussian:
    mean, covariance, _ = closed_form()
    moved = mean + shift * np.sqrt(np.diag(covariance))
    full = Full.of(np.linalg.inv(covariance) / widen**2)
    return LaplaceGaussian({"output.weight": moved[:, None]}, full, kinds=("sampled",))


def said(found: Any, words: str) -> bool:
    return any(words in reason for reason in found.reasons)


def test_bounds_are_those_of_the_closed_form() -> None:
    pareto = pareto_k(exact_gaussian(widen=1.5), draws=4000)
    # KL(N(m, c^2 C) || N(m, C)) = d (c^2 - 1 - log c^2) / 2, d = 2.
    divergence = 1.5**2 - 1 - math.log(1.5**2)
    assert abs(pareto.elbo - (closed_form()[2] - divergence)) < 4 * pareto.elbo_se
    assert abs(pareto.gap - divergence) < 4 * pareto.gap_se
    assert pareto.gap == pytest.approx(pareto.log_evidence - pareto.elbo, abs=1e-9)
    exact = pareto_k(exact_gaussian())
    assert exact.elbo == pytest.approx(closed_form()[2], abs=1e-8)
    assert exact.gap == pytest.approx(0.0, abs=1e-9)


def test_standard_errors_are_those_of_repetitions() -> None:
    # log w ~ N(0, 0.7^2): the evidence is 0.245, the ELBO 0. 300 repetitions know a standard deviation to 4 %.
    rng = np.random.default_rng(0)
    found = [pareto_k_of(0.7 * rng.normal(size=500)) for _ in range(300)]
    for name, truth in (("log_evidence", 0.245), ("elbo", 0.0), ("gap", 0.245)):
        values = np.array([getattr(each, name) for each in found])
        errors = np.array([getattr(each, f"{name}_se") for each in found])
        assert (
            abs(values.mean() - truth) < 4 * values.std() / math.sqrt(300) + 0.001
        )  # a bias of var(w) / 1000
        assert errors.mean() / values.std() == pytest.approx(1.0, abs=0.17)
    # In expectation a lower bound: log is concave.
    assert np.mean([each.log_evidence for each in found]) < 0.245 + 4 * 0.035 / math.sqrt(300)


def test_weights_of_any_size_give_an_evidence() -> None:
    ratios = 0.5 * np.random.default_rng(0).normal(size=1000)
    plain, far = pareto_k_of(ratios), pareto_k_of(ratios - 5e4)
    assert far.log_evidence + 5e4 == pytest.approx(plain.log_evidence, abs=1e-9)
    assert far.gap == pytest.approx(plain.gap, abs=1e-9)
    assert far.k == pytest.approx(plain.k, abs=1e-6)


def test_draws_come_a_part_at_a_time_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pareto_k(exact_gaussian(widen=1.5))
    wide = gaussian(1.5)
    kept = fitted(linear, Kept(wide.mode, wide.covariance))
    before = pareto_k(kept)
    assert before.draws == 200
    monkeypatch.setattr("ppl_bnn.diagnostics.importance.MEMORY", 8 * 2 * 64)
    parts = pareto_k(exact_gaussian(widen=1.5))
    assert parts.draws == whole.draws == 1000
    assert abs(parts.elbo - whole.elbo) < 5 * (parts.elbo_se + whole.elbo_se)
    # What has only these draws gives each of them once.
    assert pareto_k(kept) == before
    monkeypatch.setattr("ppl_bnn.diagnostics.importance.WORK", 1.0)
    assert pareto_k(exact_gaussian(widen=1.5)).draws == 100


def test_the_bounds_are_told_with_their_errors() -> None:
    found = diagnose(exact_gaussian(widen=1.3))
    assert found.verdict == "adequate as far as seen"
    assert said(found, "the ELBO is -")
    assert said(found, "the importance-weighted evidence, log mean p/q over 1000 draws, is")
    assert not said(found, "not to be trusted")
    assert {"elbo", "elbo_se", "importance_log_evidence_se", "evidence_gap", "evidence_gap_se"} <= set(
        found.figures
    )
    narrow = diagnose(exact_gaussian(widen=0.2))
    assert said(narrow, "not to be trusted, nor its standard error, as k-hat exceeds 0.7")


def test_the_ELBO_of_the_method_is_preferred() -> None:
    found = diagnose(exact_gaussian(widen=1.3, figures={"elbo": -40.0, "elbo_se": 0.1}))
    assert found.figures["elbo"] == -40.0
    assert said(found, "the ELBO is -40.00 (standard error 0.1)")


def test_a_tempered_target_is_another_target() -> None:
    outcome = Outcome(gaussian(1.3), figures={"elbo": -1.0, "converged": 1.0})
    found = diagnose(Tempered(outcome=outcome, ppl="pyro").fit(linear, *data()))
    assert said(found, "kl_weight=0.5: the fit aimed at another target, proportional to p(w) p(D | w)^2")
    assert said(found, "(p not tempered)")
    assert said(found, "maximised the objective 'renyi'")
    # -1 was the objective's; the ELBO is of the posterior itself.
    assert found.figures["elbo"] == pytest.approx(closed_form()[2] - (1.3**2 - 1 - math.log(1.3**2)), abs=0.2)
    plain = Tempered(outcome=outcome, ppl="pyro", kl_weight=1.0, objective="elbo").fit(linear, *data())
    assert not said(diagnose(plain), "target")


def test_a_temperature_is_another_target() -> None:
    outcome = Outcome(gaussian(1.3), figures={"elbo": -1.0, "converged": 1.0})
    found = diagnose(Warm(outcome=outcome, ppl="pyro").fit(linear, *data()))
    assert said(found, "temperature=0.5: the fit aimed at another target, proportional to p(w, D)^2")
    assert said(found, "(p not tempered)")
    # -1 was that of the tempered target; what is said is about the posterior itself.
    assert found.figures["elbo"] == pytest.approx(closed_form()[2] - (1.3**2 - 1 - math.log(1.3**2)), abs=0.2)


def test_what_the_method_warned_of_is_said() -> None:
    found = diagnose(
        exact_gaussian(warnings=("approximate estimator: planted", "the prior of a is improper"))
    )
    assert said(found, "approximate estimator: planted")
    assert said(found, "up to a constant, as a prior is improper")


def test_without_a_density_nothing_is_made_of_p_over_q() -> None:
    found = diagnose(fitted(linear, Undense((gaussian(),)), figures={"converged": 1.0}))
    assert found.verdict == "undecided"
    assert said(found, "has no density, so that what is made of p(w, D)/q(w) is not defined: k-hat, the ELBO")
    assert "pareto_k" not in found.figures
    assert any("reference" in advice for advice in found.advice)
    decided = diagnose(fitted(linear, Undense((gaussian(),))), reference=exact_chains(seed=3))
    assert decided.verdict == "adequate as far as seen"


def test_weights_held_at_a_value_are_counted() -> None:
    mean, covariance, _ = closed_form()
    part = Full.of(np.linalg.inv(covariance)[:1, :1])
    posterior = fitted(
        linear, LaplaceGaussian({"output.weight": mean[:, None]}, part, positions=np.array([0]))
    )
    found = diagnose(posterior)
    assert said(found, "1 coordinates are held at a value in every draw")
    # q is the exact conditional, k-hat sees nothing, and still half of the weights have no spread.
    assert found.figures["pareto_k"] < 0.7
    assert found.verdict == "undecided"


def losses(fall: float) -> np.ndarray:
    """Up and down by 1, about a line: over any tenth the noise is 0 on average."""
    noise = (-1.0) ** np.arange(1000)
    return 100.0 + noise + fall * (1.0 - np.arange(1000) / 1000.0)


def test_the_loss_curve_is_read() -> None:
    level = diagnose(exact_gaussian(history={"loss": losses(0.0)}))
    assert level.verdict == "adequate as far as seen"
    assert level.figures["loss_fall"] == pytest.approx(0.0, abs=1e-9)
    assert level.figures["loss_fall_se"] == pytest.approx(math.sqrt(2 / 99), rel=1e-9)
    falling = diagnose(exact_gaussian(history={"loss": losses(30.0)}))
    assert falling.verdict == "not converged"
    assert falling.figures["loss_fall"] == pytest.approx(3.0, abs=1e-9)
    # The method knows better which of its losses count.
    trusted = diagnose(exact_gaussian(history={"loss": losses(30.0)}, figures={"converged": 1.0}))
    assert trusted.verdict == "adequate as far as seen"
    assert said(trusted, "the method's own test found a plateau; from the last tenth but one")


def test_restarts_that_agree() -> None:
    members = Members(tuple(gaussian() for _ in range(3)))
    posterior = fitted(linear, members, history={"restart_elbo": np.array([-40.0, -40.1, -40.2])})
    judged = agreement(posterior)
    assert judged.agree
    assert judged.count == 3
    assert set(judged.quantities) == {"f", "log_likelihood"}
    assert 0.99 < judged.rhat < 1.02
    found = diagnose(posterior)
    assert said(found, "restarts agree: over 3 of them R-hat")
    assert said(found, "their ELBOs go from -40.20 to -40.00")
    assert found.figures["restart_elbo_spread"] == pytest.approx(0.2)
    assert found.verdict == "adequate as far as seen"


@pytest.mark.parametrize("other", [{"shift": 3.0}, {"widen": 4.0}])
def test_restarts_that_differ_in_place_or_width_are_other_modes(other: dict[str, float]) -> None:
    posterior = fitted(
        linear, Members((gaussian(), gaussian(**other))), history={"restart_elbo": np.array([-40.0, np.nan])}
    )
    judged = agreement(posterior)
    assert not judged.agree
    found = diagnose(posterior)
    assert said(found, "restarts differ: over 2 of them R-hat of")
    assert said(found, "and 1 have none")
    assert found.verdict == "undecided"


def test_r_hat_between_two_restarts_is_what_its_limit_says() -> None:
    # 1 + d^2 / 6 to second order for means d standard deviations apart; f of a single row, where it is exact.
    draws = np.random.default_rng(0).normal(size=(2, 20_000, 1)) + np.array([0.0, 0.55])[:, None, None]
    assert mixing(draws).rhat == pytest.approx(RESTART_LIMIT, abs=0.006)


def test_restarts_in_copies_of_one_mode_agree() -> None:
    rng = np.random.default_rng(2)
    shapes = {"hidden0.weight": (2, 3), "hidden0.bias": (3,), "output.weight": (3, 1), "output.bias": (1,)}
    loc = {name: rng.normal(size=shape) for name, shape in shapes.items()} | {"noise": np.asarray(-1.0)}
    order = [2, 0, 1]
    copy = dict(loc)
    for name in ("hidden0.weight", "hidden0.bias"):
        copy[name] = loc[name][..., order]
    copy["output.weight"] = loc["output.weight"][order]
    scale = {name: np.full(np.shape(value), 0.1) for name, value in loc.items()}
    judged = agreement(fitted(network, Members((MeanField(loc, scale), MeanField(copy, scale)))))
    assert judged.agree
    assert "noise" in judged.quantities
    assert judged.elbo is None
    with pytest.raises(UnsupportedError, match="at least two members"):
        agreement(exact_gaussian())
