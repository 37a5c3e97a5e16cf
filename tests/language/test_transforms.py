"""Functions from model to model: each against the model written by hand, through fits in both systems."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system, written_in
from ppl_bnn.core.errors import BNNError, InputError, ModelError, UnknownNameError, UnsupportedError
from ppl_bnn.language.transforms import GaussianPrior, noncentred, with_precision_factors, with_prior
from tests.problems import Conjugate

ROWS, FEATURES = 11, 2
X = np.random.default_rng(12).normal(size=(ROWS, FEATURES))
Y = X[:, 0] - 0.5 * X[:, 1] + 0.3 * np.random.default_rng(1201).normal(size=ROWS)


def log_joint(ppl: str, model: Any, u: dict[str, np.ndarray], y: np.ndarray = Y) -> float:
    """log p(w(u), y) + log |dw/du| at the given sites, which must be all there are."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        x, targets = chosen.asarray(X), chosen.asarray(y)
        program = Program.of(chosen, model, x, targets, language=True)
        assert set(program.sites) == set(u)
        return float(program.log_joint({n: chosen.asarray(v) for n, v in u.items()}, x, targets))


def values_for(ppl: str, model: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Standard normal unconstrained values for every site."""
    chosen, rng = system(ppl), np.random.default_rng(seed)
    with chosen.session("float64", "cpu"):
        program = Program.of(chosen, model, chosen.asarray(X), chosen.asarray(Y), language=True)
    return {name: rng.normal(size=site.unconstrained_shape) for name, site in program.sites.items()}


# --- tuned hyper-parameters -------------------------------------------------------------------------

WEIGHT_FACTORS = np.array([[0.3, 2.0, 1.0], [4.0, 0.5, 9.0]])


def network(x: Any, y: Any = None, *, width: int = 3) -> None:
    """A small network."""
    f = bnn.mlp(x, [width, 1], "tanh", priors.Normal(0.1, 0.7))
    bnn.observe(y, f, likelihoods.Gaussian(0.4))


def network_by_hand(x: Any, y: Any = None) -> None:
    w1 = bnn.sample("hidden0.weight", dist.Normal(0.1, 0.7 / np.sqrt(WEIGHT_FACTORS)).to_event(2))
    b1 = bnn.sample("hidden0.bias", dist.Normal(0.1, 0.7).expand((3,)).to_event())
    w2 = bnn.sample("output.weight", dist.Normal(0.1, 0.7 / math.sqrt(5.0)).expand((3, 1)).to_event())
    b2 = bnn.sample("output.bias", dist.Normal(0.1, 0.7).expand((1,)).to_event())
    f = bnn.linear("output", ops.tanh(bnn.linear("hidden0", x, w1, b1)), w2, b2)
    bnn.observe(y, f, likelihoods.Gaussian(0.9))


def test_precision_factors_are_the_model_written_by_hand(ppl: str) -> None:
    tuned = with_precision_factors(
        network, {"hidden0.weight": WEIGHT_FACTORS, "output.weight": 5.0}, noise=0.9
    )
    u = values_for(ppl, network)
    assert log_joint(ppl, tuned, u) == pytest.approx(log_joint(ppl, network_by_hand, u), rel=1e-12)
    assert abs(log_joint(ppl, tuned, u) - log_joint(ppl, network, u)) > 1.0
    only_noise = with_precision_factors(network, {}, noise=0.9)
    difference = log_joint(ppl, tuned, u) - log_joint(ppl, only_noise, u)
    z = (np.concatenate([u["hidden0.weight"].ravel(), u["output.weight"].ravel()]) - 0.1) / 0.7
    factors = np.append(WEIGHT_FACTORS.ravel(), [5.0] * 3)
    assert difference == pytest.approx(np.sum(0.5 * np.log(factors) - 0.5 * (factors - 1) * z**2), rel=1e-12)


def test_a_factor_of_a_sampled_scale(ppl: str) -> None:
    def hierarchical(x: Any, y: Any = None, *, factor: Any = 1.0) -> None:
        scale = bnn.sample("scale", dist.HalfNormal(1.0))
        w = bnn.sample("w", dist.Normal(0.0, scale / np.sqrt(factor)).expand((FEATURES, 1)).to_event())
        bnn.observe(y, bnn.linear("w", x, w), likelihoods.Gaussian(0.4))

    u = values_for(ppl, hierarchical)
    for factor in (3.0, np.array([[0.5], [7.0]])):
        tuned = with_precision_factors(hierarchical, {"w": factor})
        root = np.asarray(factor, float)
        # The density by hand: N(w; 0, scale^2 / factor).
        scale = math.exp(u["scale"])
        z = u["w"] / scale
        shift = np.sum(0.5 * np.log(root * np.ones_like(z)) - 0.5 * (root - 1) * z**2)
        plain = log_joint(ppl, hierarchical, u)
        assert log_joint(ppl, tuned, u) == pytest.approx(plain + shift, rel=1e-12)


def test_a_tuned_model_keeps_its_name_its_arguments_and_its_language(ppl: str) -> None:
    bound = functools.partial(network, width=2)
    tuned = with_precision_factors(bound, {"output.weight": 2.0}, noise=0.5)
    assert isinstance(tuned, functools.partial)
    assert tuned.keywords == {"width": 2}
    assert tuned.func.__name__ == "network"
    assert tuned.func.__doc__ == "A small network."
    assert written_in(tuned, X, Y, ppl) == "language"
    posterior = bnn.MAP(ppl=ppl, steps=20, polish=False).fit(tuned, X, Y, progress=False)
    assert "network" in repr(posterior)
    assert posterior.draws["hidden0.weight"].shape == (1, 1, FEATURES, 2)


def test_transformed_models_travel_to_other_processes(ppl: str) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    tuned = with_precision_factors(network, {"hidden0.weight": WEIGHT_FACTORS}, noise=0.9)
    again = cloudpickle.loads(cloudpickle.dumps(tuned))
    u = values_for(ppl, network)
    assert log_joint(ppl, again, u) == log_joint(ppl, tuned, u)


def student(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    f = bnn.dense("output", x, 1, priors.StudentT(), bias=priors.Point())
    bnn.observe(y, f, likelihoods.Gaussian(noise))


@pytest.mark.parametrize(
    ("model", "factors", "noise", "error", "says"),
    [
        (network, {"hidden.weight": 2.0}, None, UnknownNameError, "did you mean 'hidden0.weight'"),
        (network, {"hidden0.weight": np.ones(3)}, None, InputError, r"shape \(2, 3\); got shape \(3,\)"),
        (
            student,
            {"output.weight": 2.0},
            None,
            UnsupportedError,
            "prior Normal at site 'output.weight'; got StudentT",
        ),
        (student, {"output.bias": 2.0}, None, ModelError, "parameter without a prior"),
        (student, {}, 0.5, UnsupportedError, "noise that is a random variable"),
    ],
    ids=["absent", "shape", "family", "parameter", "noise"],
)
def test_factors_that_a_model_has_no_place_for_are_refused(
    ppl: str, model: Any, factors: Any, noise: float | None, error: type[BNNError], says: str
) -> None:
    tuned = with_precision_factors(model, factors, noise)
    with pytest.raises(error, match=says):
        bnn.MAP(ppl=ppl, steps=5).fit(tuned, X, Y, progress=False)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf, "2", np.array([1.0, 0.0]), np.zeros(0)])
def test_impossible_factors_are_refused_at_once(factor: Any) -> None:
    with pytest.raises(InputError, match="positive factors"):
        with_precision_factors(network, {"hidden0.weight": factor})


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, True, "1"])
def test_impossible_noise_is_refused_at_once(noise: Any) -> None:
    with pytest.raises(InputError, match="noise"):
        with_precision_factors(network, {}, noise)


# --- other coordinates ------------------------------------------------------------------------------


def hierarchical(x: Any, y: Any = None) -> None:
    """Scales of three kinds, one of them through two functions of a number, and a site with plain arguments."""
    log_scale = bnn.sample("log_scale", dist.Normal(-0.5, 0.3))
    ard = bnn.sample("ard", dist.HalfNormal(1.0).expand((FEATURES, 1)).to_event())
    level = bnn.sample("level", dist.Normal(0.0, 1.0))
    w = bnn.sample("w", dist.Normal(0.0, ard).expand((FEATURES, 3)).to_event())
    b = bnn.sample("b", dist.StudentT(4.0, level, 0.5).expand((3,)).to_event())
    v = bnn.sample("v", dist.Laplace(0.1, ops.sqrt(ops.exp(log_scale))).expand((3, 1)).to_event())
    hidden = ops.tanh(bnn.linear("hidden", x, w, b))
    bnn.observe(y, bnn.linear("output", hidden, v), likelihoods.Gaussian(0.4))


def noncentred_by_hand(x: Any, y: Any = None) -> None:
    log_scale = bnn.sample("log_scale", dist.Normal(-0.5, 0.3))
    ard = bnn.sample("ard", dist.HalfNormal(1.0).expand((FEATURES, 1)).to_event())
    level = bnn.sample("level", dist.Normal(0.0, 1.0))
    w = ard * bnn.sample("w.base", dist.Normal(0.0, 1.0).expand((FEATURES, 3)).to_event())
    b = level + 0.5 * bnn.sample("b.base", dist.StudentT(4.0, 0.0, 1.0).expand((3,)).to_event())
    base = bnn.sample("v.base", dist.Laplace(0.0, 1.0).expand((3, 1)).to_event())
    v = 0.1 + ops.exp(0.5 * log_scale) * base
    hidden = ops.tanh(bnn.linear("hidden", x, w, b))
    bnn.observe(y, bnn.linear("output", hidden, v), likelihoods.Gaussian(0.4))


def test_the_noncentred_model_is_the_one_written_by_hand(ppl: str) -> None:
    u = values_for(ppl, noncentred_by_hand)
    value = log_joint(ppl, noncentred(hierarchical), u)
    assert value == pytest.approx(log_joint(ppl, noncentred_by_hand, u), rel=1e-10)


def test_other_coordinates_are_a_change_of_variables(ppl: str) -> None:
    """log p(e, ...) = log p(w(e), ...) + log |dw/de|."""
    u = values_for(ppl, noncentred_by_hand)
    ard, scale = np.exp(u["ard"]), math.exp(0.5 * u["log_scale"])
    w = {name: value for name, value in u.items() if not name.endswith(".base")}
    w |= {"w": ard * u["w.base"], "b": u["level"] + 0.5 * u["b.base"], "v": 0.1 + scale * u["v.base"]}
    volume = 3 * u["ard"].sum() + 3 * math.log(0.5) + 3 * 0.5 * u["log_scale"]
    expected = log_joint(ppl, hierarchical, w) + volume
    assert log_joint(ppl, noncentred(hierarchical), u) == pytest.approx(expected, rel=1e-10)


def test_only_named_sites_move(ppl: str) -> None:
    moved = noncentred(hierarchical, ["log_scale", "w"])
    sites = set(values_for(ppl, moved))
    assert sites == {"log_scale.base", "ard", "level", "w.base", "b", "v"}
    assert set(values_for(ppl, noncentred(noncentred(hierarchical, ["w"])))) == set(
        values_for(ppl, noncentred_by_hand)
    )


def test_the_site_is_recorded_and_the_base_is_what_is_substituted(ppl: str) -> None:
    u = values_for(ppl, noncentred_by_hand)
    w = {name: np.exp(value) if name == "ard" else value for name, value in u.items()}
    moved, chosen = noncentred(hierarchical), system(ppl)
    f = bnn.network_function(moved)(w, X)
    hidden = np.tanh(X @ (w["ard"] * w["w.base"]) + w["level"] + 0.5 * w["b.base"])
    expected = hidden @ (0.1 + math.exp(0.5 * w["log_scale"]) * w["v.base"])
    np.testing.assert_allclose(f, expected, rtol=1e-12)
    with chosen.session("float64", "cpu"):
        values = {name: chosen.asarray(value) for name, value in w.items()}
        x, y = chosen.asarray(X), chosen.asarray(Y)
        sites = {site.name: site for site in chosen.run(chosen.native(moved), x, y, values=values)}
        assert sites["w"].kind == "deterministic"
        np.testing.assert_allclose(chosen.to_numpy(sites["w"].value), w["ard"] * w["w.base"], rtol=1e-14)


def smooth(x: Any, y: Any = None) -> None:
    """A hierarchical model of numbers and tensors that every method serves."""
    scale = bnn.sample("scale", dist.LogNormal(-0.5, 0.5))
    slope = bnn.sample("slope", dist.Normal(0.0, ops.sqrt(ops.exp(scale))))
    w = bnn.sample("w", dist.Normal(0.0, scale).expand((FEATURES, 1)).to_event())
    f = bnn.linear("w", x, w) + slope * x[:, :1]
    bnn.observe(y, f, likelihoods.Gaussian(0.4))


METHODS = {
    "MAP": {"steps": 200},
    "Laplace": {"steps": 300},
    "SVI": {"steps": 60, "elbo_draws": 20},
    "NUTS": {"draws": 12, "warmup": 15, "chains": 1, "max_tree_depth": 4},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_fits_a_noncentred_model(ppl: str, method: str) -> None:
    posterior = getattr(bnn, method)(ppl=ppl, **METHODS[method]).fit(noncentred(smooth), X, Y, progress=False)
    # The Gaussian of Laplace hands out the computed weights too, since they are not scale times base in its draws.
    computed = {"slope", "w"} if method == "Laplace" else set()
    assert set(posterior.draws) == {"scale", "slope.base", "w.base"} | computed
    assert "smooth" in repr(posterior)
    assert np.isfinite(posterior.predict(X).mean).all()


def test_a_noncentred_variable_of_the_rows(ppl: str) -> None:
    def rows(x: Any, y: Any = None) -> None:
        spread = bnn.sample("spread", dist.HalfNormal(1.0))
        with bnn.rows(x.shape[0]):
            shift = bnn.sample("shift", dist.Normal(0.0, spread))
        bnn.observe(y, bnn.mlp(x, [1]) + shift[:, None], likelihoods.Gaussian(0.5))

    u = values_for(ppl, noncentred(rows))
    assert u["shift.base"].shape == (ROWS,)
    spread = math.exp(u["spread"])
    w = {name: value for name, value in u.items() if name != "shift.base"} | {
        "shift": spread * u["shift.base"]
    }
    expected = log_joint(ppl, rows, w) + ROWS * u["spread"]
    assert log_joint(ppl, noncentred(rows), u) == pytest.approx(expected, rel=1e-10)


def two_names(x: Any, y: Any = None) -> None:
    scale = bnn.sample("w.base", dist.HalfNormal(1.0))
    w = bnn.sample("w", dist.Normal(0.0, scale).expand((FEATURES, 1)).to_event())
    bnn.observe(y, bnn.linear("w", x, w), likelihoods.Gaussian(0.4))


@pytest.mark.parametrize(
    ("model", "sites", "error", "says"),
    [
        (two_names, None, ModelError, "two sites named 'w.base'"),
        (hierarchical, ["ard"], UnsupportedError, "'ard'; got HalfNormal"),
        (hierarchical, ["vv"], UnknownNameError, "unknown site of noncentred 'vv'"),
        (student, ["output.bias"], ModelError, "parameter without a prior"),
    ],
    ids=["name taken", "family", "absent", "parameter"],
)
def test_what_cannot_be_noncentred_is_refused(
    ppl: str, model: Any, sites: Any, error: Any, says: str
) -> None:
    with pytest.raises(error, match=says):
        bnn.MAP(ppl=ppl, steps=5).fit(noncentred(model, sites), X, Y, progress=False)


def test_sites_are_a_list() -> None:
    with pytest.raises(InputError, match=r"try sites=\['w'\]"):
        noncentred(hierarchical, "w")


# --- yesterday's posterior --------------------------------------------------------------------------


def several_supports(x: Any, y: Any = None) -> None:
    """Numbers and tensors, real and positive, in one model."""
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    stretch = bnn.sample("stretch", dist.Gamma(2.0, 2.0).expand((FEATURES,)).to_event())
    w = bnn.sample("w", dist.Normal(0.0, 1.0).expand((FEATURES, 3)).to_event())
    level = bnn.sample("level", dist.StudentT(3.0, 0.0, 1.0))
    v = bnn.sample("v", dist.Normal(0.0, noise).expand((3, 1)).to_event())
    f = bnn.linear("output", ops.tanh(bnn.linear("hidden", x * stretch, w)), v) + level
    bnn.observe(y, f, likelihoods.Gaussian(noise))


SHAPES = {"noise": (), "stretch": (FEATURES,), "w": (FEATURES, 3), "level": (), "v": (3, 1)}
SIZE = sum(math.prod(shape) for shape in SHAPES.values())


def gaussian_over(names: list[str], seed: int = 4) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A mode and a dense covariance of the sites `names`."""
    rng = np.random.default_rng(seed)
    mode = {name: 0.3 * rng.normal(size=SHAPES[name]) for name in names}
    size = sum(value.size for value in mode.values())
    root = 0.3 * rng.normal(size=(size, size))
    return mode, root @ root.T + 0.2 * np.eye(size)


def ravelled(u: dict[str, np.ndarray], names: Any) -> np.ndarray:
    return np.concatenate([np.asarray(u[name]).reshape(-1) for name in names])


def log_prior(ppl: str, model: Any, u: dict[str, np.ndarray]) -> float:
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        x, y = chosen.asarray(X), chosen.asarray(Y)
        program = Program.of(chosen, model, x, y, language=True)
        return float(program.log_prior({n: chosen.asarray(v) for n, v in u.items()}, x, y))


def dense_prior() -> tuple[GaussianPrior, np.ndarray, np.ndarray]:
    mode, covariance = gaussian_over(list(SHAPES))
    prior = GaussianPrior(mode, joint=((tuple(mode), np.linalg.inv(covariance)),))
    return prior, ravelled(mode, mode), covariance


def test_a_joint_prior_is_that_gaussian_in_unconstrained_coordinates(ppl: str) -> None:
    prior, mean, covariance = dense_prior()
    u = values_for(ppl, several_supports)
    expected = scipy.stats.multivariate_normal(mean, covariance).logpdf(ravelled(u, SHAPES))
    assert log_prior(ppl, with_prior(several_supports, prior), u) == pytest.approx(expected, rel=1e-10)
    # The likelihood is that of the model itself.
    difference = log_joint(ppl, with_prior(several_supports, prior), u) - expected
    plain = log_joint(ppl, several_supports, u) - log_prior(ppl, several_supports, u)
    assert difference == pytest.approx(plain, rel=1e-10)


def test_draws_from_a_joint_prior_have_its_mean_and_covariance(ppl: str) -> None:
    prior, mean, covariance = dense_prior()
    chosen, count = system(ppl), 400
    with chosen.session("float64", "cpu"):
        x, y = chosen.asarray(X), chosen.asarray(Y)
        program = Program.of(chosen, with_prior(several_supports, prior), x, y, language=True)
        draws = program.prior_draws(x, y, 0, count)
    flat = np.concatenate([draws[name].reshape(count, -1) for name in SHAPES], axis=1)
    z = np.linalg.solve(np.linalg.cholesky(covariance), (flat - mean).T)
    # Standard normal coordinates: 14 means and 105 covariances, within five standard errors.
    assert np.abs(z.mean(axis=1)).max() < 5 / math.sqrt(count)
    assert np.abs(np.cov(z) - np.eye(SIZE)).max() < 5 * math.sqrt(2 / count)


def test_a_prior_of_parts(ppl: str) -> None:
    """Independent, joint and Kronecker-factored sites beside one that keeps its own prior."""
    rng = np.random.default_rng(7)
    pair, covariance = gaussian_over(["noise", "v"])
    rest, _ = gaussian_over(["stretch", "w"], seed=5)
    left, right = np.linalg.qr(rng.normal(size=(2, 2)))[0], np.linalg.qr(rng.normal(size=(3, 3)))[0]
    precisions = rng.uniform(0.5, 3.0, size=(2, 3))
    prior = GaussianPrior(
        pair | rest,
        scale={"stretch": np.array([0.3, 0.8])},
        joint=((("noise", "v"), np.linalg.inv(covariance)),),
        kronecker={"w": (left, right, precisions)},
    )
    u = values_for(ppl, several_supports)
    rotation = np.kron(left, right)
    wide = rotation @ np.diag(1 / precisions.ravel()) @ rotation.T
    expected = (
        scipy.stats.multivariate_normal(ravelled(pair, pair), covariance).logpdf(ravelled(u, pair))
        + scipy.stats.norm(rest["stretch"], [0.3, 0.8]).logpdf(u["stretch"]).sum()
        + scipy.stats.multivariate_normal(rest["w"].ravel(), wide).logpdf(u["w"].ravel())
        + scipy.stats.t(3.0).logpdf(u["level"])
    )
    model = with_prior(several_supports, prior)
    assert log_prior(ppl, model, u) == pytest.approx(expected, rel=1e-10)
    # The sites of a model that was given a prior can be given another one.
    dense, mean, covariance = dense_prior()
    expected = scipy.stats.multivariate_normal(mean, covariance).logpdf(ravelled(u, SHAPES))
    assert log_prior(ppl, with_prior(model, dense), u) == pytest.approx(expected, rel=1e-10)


def test_the_posterior_of_one_half_as_prior_of_the_other_is_that_of_all_rows(ppl: str) -> None:
    problem = Conjugate.make()
    half = len(problem.y) // 2
    method = bnn.Laplace(ppl=ppl)
    first = method.fit(problem.model, problem.x[:half], problem.y[:half], progress=False)
    again = with_prior(problem.model, first)
    both: Any = method.fit(again, problem.x[half:], problem.y[half:], progress=False).approximation
    np.testing.assert_allclose(ravelled(both.mode, both.mode), problem.mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(both.covariance.covariance(), problem.covariance, rtol=1e-6, atol=1e-9)


class _Holder:
    """An approximation that hands out a prior."""

    def __init__(self, prior: GaussianPrior):
        self.prior = prior

    def as_prior(self) -> GaussianPrior:
        return self.prior


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["SVI", "NUTS"])
def test_methods_that_draw_fit_under_a_joint_prior(ppl: str, method: str) -> None:
    """With no rows to speak of (a noise of a million), the posterior is the prior."""

    def silent(x: Any, y: Any = None) -> None:
        stretch = bnn.sample("stretch", dist.Gamma(2.0, 2.0).expand((FEATURES,)).to_event())
        w = bnn.sample("w", dist.Normal(0.0, 1.0).expand((FEATURES, 3)).to_event())
        bnn.observe(y, ops.sum(x @ (stretch[:, None] * w), 1)[:, None], likelihoods.Gaussian(1e6))

    mode, covariance = gaussian_over(["stretch", "w"])
    prior = GaussianPrior(mode, joint=((tuple(mode), np.linalg.inv(covariance)),))
    settings: dict[str, Any] = {"steps": 400, "elbo_draws": 20, "learning_rate": 0.05}
    if method == "NUTS":
        settings = {"draws": 100, "warmup": 100, "chains": 1}
    posterior = getattr(bnn, method)(ppl=ppl, **settings).fit(with_prior(silent, prior), X, Y, progress=False)
    u = posterior.unconstrained_draws
    flat = np.concatenate([u[name][0].reshape(len(u[name][0]), -1) for name in mode], axis=1)
    z = np.linalg.solve(np.linalg.cholesky(covariance), (flat.mean(axis=0) - ravelled(mode, mode)))
    assert np.abs(z).max() < 0.6
    # Mean field has the variances 1 / diag(precision), which are the smaller ones.
    wanted = 1 / np.diag(np.linalg.inv(covariance)) if method == "SVI" else np.diag(covariance)
    np.testing.assert_allclose(np.log(flat.var(axis=0) / wanted), 0.0, atol=1.0)


def test_a_network_function_asks_for_no_conditional_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prior's matrices are as large as all weights squared; what only predicts does not multiply by them."""
    prior, _, _ = dense_prior()
    model, u = with_prior(several_supports, prior), values_for("numpyro", several_supports)
    w = {name: np.exp(u[name]) if name in ("noise", "stretch") else u[name] for name in u}
    expected = bnn.network_function(several_supports)(w, X)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a conditional mean was computed")

    monkeypatch.setattr(ops, "concatenate", refuse)
    np.testing.assert_array_equal(bnn.network_function(model)(w, X), expected)
    with pytest.raises(AssertionError, match="a conditional mean"):
        log_prior("numpyro", model, u)


def test_a_model_with_a_prior_travels_and_keeps_its_name(ppl: str) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    prior, _, _ = dense_prior()
    model = with_prior(several_supports, prior)
    assert model.__name__ == "several_supports"
    u = values_for(ppl, several_supports)
    assert log_joint(ppl, cloudpickle.loads(cloudpickle.dumps(model)), u) == log_joint(ppl, model, u)


def turned_around(x: Any, y: Any = None) -> None:
    w = bnn.sample("w", dist.Normal(0.0, 1.0).expand((FEATURES, 1)).to_event())
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.linear("w", x, w), likelihoods.Gaussian(noise))


def bounded(x: Any, y: Any = None) -> None:
    w = bnn.sample("w", dist.Uniform(-1.0, 1.0).expand((FEATURES, 1)).to_event())
    bnn.observe(y, bnn.linear("w", x, w), likelihoods.Gaussian(1.0))


W = np.zeros((FEATURES, 1))


@pytest.mark.parametrize(
    ("model", "prior", "error", "says"),
    [
        (bounded, GaussianPrior({"w": W}, scale={"w": W + 1}), UnsupportedError, "'w'.*got Uniform"),
        (
            turned_around,
            GaussianPrior({"noise": np.zeros(()), "w": W}, joint=((("noise", "w"), np.eye(1 + FEATURES)),)),
            ModelError,
            "site 'noise' before site 'w'",
        ),
        (
            turned_around,
            GaussianPrior({"w": W.ravel()}, scale={"w": W.ravel() + 1}),
            InputError,
            r"shape \(2, 1\); got shape \(2,\)",
        ),
        (
            turned_around,
            GaussianPrior({"ww": W}, scale={"ww": W + 1}),
            UnknownNameError,
            "unknown site of with_prior 'ww'",
        ),
        (
            several_supports,
            GaussianPrior(
                {"stretch": np.zeros(2)}, kronecker={"stretch": (np.eye(2), np.eye(1), np.ones((2, 1)))}
            ),
            UnsupportedError,
            "real line for a Kronecker-factored Gaussian.*'stretch'; got ",
        ),
    ],
    ids=["support", "order", "shape", "absent", "kronecker"],
)
def test_priors_that_a_model_has_no_place_for_are_refused(
    ppl: str, model: Any, prior: GaussianPrior, error: type[BNNError], says: str
) -> None:
    with pytest.raises(error, match=says):
        bnn.MAP(ppl=ppl, steps=5).fit(with_prior(model, prior), X, Y, progress=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "one spread for each site"),
        ({"scale": {"w": W + 1}, "joint": ((("w",), np.eye(2)),)}, "one spread for each site"),
        ({"scale": {"w": W}}, "positive standard deviations"),
        ({"scale": {"w": np.ones(2)}}, r"shape \(2, 1\)"),
        ({"joint": ((("w",), np.eye(3)),)}, r"precision of shape \(2, 2\)"),
        ({"joint": ((("w",), np.array([[1.0, 0.5], [0.0, 1.0]])),)}, "not symmetric"),
        ({"kronecker": {"w": (np.eye(2), np.eye(1), np.ones((1, 2)))}}, "left_vectors"),
        ({"kronecker": {"w": (np.eye(2), np.eye(1), np.zeros((2, 1)))}}, "positive precisions"),
    ],
)
def test_impossible_gaussians_are_refused_at_once(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        GaussianPrior({"w": W}, **arguments)


def test_posteriors_without_a_gaussian_in_the_units_of_the_data_are_refused() -> None:
    indefinite = GaussianPrior({"w": W}, joint=((("w",), np.diag([1.0, -1.0])),))
    with pytest.raises(InputError, match="positive definite precision"):
        with_prior(turned_around, indefinite)
    with pytest.raises(UnsupportedError, match="whose approximation is a Gaussian; got dict"):
        with_prior(turned_around, {"w": W})
    point = bnn.MAP(steps=20, polish=False).fit(turned_around, X, Y, progress=False)
    with pytest.raises(UnsupportedError, match="got Point"):
        with_prior(turned_around, point)
    scaled = SimpleNamespace(approximation=_Holder(indefinite), standardisation=object())
    with pytest.raises(UnsupportedError, match="standardise=True"):
        with_prior(turned_around, scaled)
