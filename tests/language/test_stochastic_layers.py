"""Estimators on linear maps: moments and gradients in closed form, both systems on the same noise, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import UnknownNameError, UnsupportedError
from ppl_bnn.language.handlers import network_output
from ppl_bnn.language.stochastic_layers import (
    DroppedInputs,
    Flipout,
    LocalReparameterisation,
    refuse_shared,
    shared_weights,
)
from ppl_bnn.language.transforms import noncentred

SIGMAS = 4.5


def normals(seed: int) -> Callable[..., Any]:
    rng = np.random.default_rng(seed)
    return lambda shape, like: ops.asarray(rng.standard_normal(shape), like=like)


def signs(seed: int) -> Callable[..., Any]:
    rng = np.random.default_rng(seed)
    return lambda shape, like: ops.asarray(rng.choice([-1.0, 1.0], size=shape), like=like)


def keeps(seed: int) -> Callable[..., Any]:
    rng = np.random.default_rng(seed)
    return lambda shape, like, probability: ops.asarray(
        (rng.random(shape) < probability).astype(float), like=like
    )


def moments(shapes: dict[str, tuple[int, ...]], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(seed)
    loc = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return loc, {name: rng.uniform(0.2, 1.0, size=shape) for name, shape in shapes.items()}


def within(sample: np.ndarray, expected: np.ndarray, errors: float = SIGMAS) -> None:
    """The mean over axis 0 is `expected`, to Monte-Carlo error."""
    error = sample.std(0, ddof=1) / np.sqrt(len(sample))
    np.testing.assert_array_less(np.abs(sample.mean(0) - expected), errors * error + 1e-12)


def within_covariance(f: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    """Mean and covariance of draws f (S, K)."""
    within(f, mean)
    deviation = f - mean
    within(deviation[:, :, None] * deviation[:, None, :], covariance)


def under(model: Any, handler: Callable[[], Any]) -> Any:
    """The model with a handler inside the interpretation, which answers what the handler sees."""

    def handled(x: Any, y: Any = None) -> None:
        with handler():
            model(x, y)

    return handled


def outputs(model: Any, handler: Any, values: Any, x: Any) -> Any:
    """f (N, K) of one run under a handler."""
    return network_output(under(model, lambda: handler), values, x).f


# --- models -----------------------------------------------------------------------------------------


def one_map(x: Any, y: Any = None, *, width: int = 2) -> None:
    bnn.observe(y, bnn.mlp(x, [width], prior=priors.Normal()), likelihoods.Gaussian(0.5))


def convolution(x: Any, y: Any = None) -> None:
    """Two places of one filter: the places are the outputs."""
    weight = bnn.sample("weight", dist.Normal(0.0, 1.0).expand((2, 2, 2, 1)).to_event())
    bias = bnn.sample("bias", dist.Normal(0.0, 1.0).expand((1,)).to_event())
    bnn.observe(y, bnn.conv("map", x, weight, bias).reshape(x.shape[0], -1), likelihoods.Gaussian(0.5))


def positions(x: Any, y: Any = None) -> None:
    """The same map at each position of x (N, T, I)."""
    f = bnn.dense("map", x, 1, priors.Normal())
    bnn.observe(y, f[..., 0], likelihoods.Gaussian(0.5))


def two_maps(x: Any, y: Any = None) -> None:
    """One weight and one bias in two maps of a row."""
    weight = bnn.sample("weight", dist.Normal(0.0, 1.0).expand((2, 1)).to_event())
    bias = bnn.sample("bias", dist.Normal(0.0, 1.0).expand((1,)).to_event())
    parts = [bnn.linear("left", x[:, :2], weight, bias), bnn.linear("right", x[:, 2:], weight, bias)]
    bnn.observe(y, ops.concatenate(parts), likelihoods.Gaussian(0.5))


def folded(x: Any, y: Any = None) -> None:
    """Positions folded into the rows of a map."""
    f = bnn.dense("map", x.reshape(-1, x.shape[-1]), 1, priors.Normal()).reshape(x.shape[0], -1)
    bnn.observe(y, f, likelihoods.Gaussian(0.5))


def interacting(x: Any, y: Any = None) -> None:
    bnn.coupled()
    one_map(x, y)


def outside(x: Any, y: Any = None) -> None:
    """A weight in a map and in a product by hand, and another one in a map and in the prior of a third."""
    weight = bnn.sample("weight", dist.Normal(0.0, 1.0).expand((3, 1)).to_event())
    other = bnn.sample("other", dist.Normal(0.0, 1.0).expand((3, 1)).to_event())
    third = bnn.sample("third", dist.Normal(ops.sum(other), 1.0))
    f = bnn.linear("map", x, weight) + ops.tanh(x @ weight) + bnn.linear("second", x, other) + third
    bnn.observe(y, f, likelihoods.Gaussian(0.5))


# --- the distribution of what leaves a map ------------------------------------------------------------


def test_local_reparameterisation_has_the_moments_of_the_outputs_and_independent_rows() -> None:
    loc, scale = moments({"output.weight": (3, 2), "output.bias": (2,)}, 1)
    row = np.array([1.2, -0.7, 0.4])
    x = np.repeat(row[None], 20_000, axis=0)
    f = outputs(one_map, LocalReparameterisation(loc, scale, normals(2)), loc, x)
    variance = row**2 @ scale["output.weight"] ** 2 + scale["output.bias"] ** 2
    mean = row @ loc["output.weight"] + loc["output.bias"]
    within_covariance(f, mean, np.diag(variance))
    # Pairs of rows: outputs of one with those of the next.
    pairs = f.reshape(-1, 4)
    within_covariance(pairs, np.tile(mean, 2), np.diag(np.tile(variance, 2)))


def flipped(model: Any, x: np.ndarray, loc: Any, scale: Any, draws: int, seed: int) -> np.ndarray:
    """Outputs (S, N * K) of as many draws of the weights, each with signs of its own."""
    rng, sign = np.random.default_rng(seed), signs(seed + 1)
    found = []
    for _ in range(draws):
        values = {name: loc[name] + scale[name] * rng.standard_normal(loc[name].shape) for name in loc}
        found.append(outputs(model, Flipout(loc, sign), values, x).reshape(-1))
    return np.array(found)


def test_flipout_has_the_moments_of_the_outputs_and_uncorrelated_rows() -> None:
    loc, scale = moments({"output.weight": (3, 2), "output.bias": (2,)}, 3)
    x = np.random.default_rng(4).normal(size=(2, 3))
    f = flipped(one_map, x, loc, scale, 6000, 5)
    variance = x**2 @ scale["output.weight"] ** 2 + scale["output.bias"] ** 2
    mean = x @ loc["output.weight"] + loc["output.bias"]
    within_covariance(f, mean.reshape(-1), np.diag(variance.reshape(-1)))


def shared_moments(design: np.ndarray, loc: Any, scale: Any, names: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of rows n of outputs t that are design (N, T, P) times one vector (P,), rows uncorrelated."""
    mean = np.concatenate([loc[name].reshape(-1) for name in names])
    spread = np.concatenate([scale[name].reshape(-1) for name in names])
    rows, places, _ = design.shape
    covariance = np.zeros((rows, places, rows, places))
    for row in range(rows):
        covariance[row, :, row] = (design[row] * spread**2) @ design[row].T
    return (design @ mean).reshape(-1), covariance.reshape(rows * places, -1)


def test_flipout_keeps_the_joint_distribution_within_a_row_for_shared_weights() -> None:
    """Two maps of a row share a weight and a bias: their covariance is that under q, and rows are uncorrelated."""
    loc, scale = moments({"weight": (2, 1), "bias": (1,)}, 6)
    x = np.random.default_rng(7).normal(size=(2, 4))
    design = np.concatenate([x.reshape(2, 2, 2), np.ones((2, 2, 1))], axis=-1)
    f = flipped(two_maps, x, loc, scale, 6000, 8)
    within_covariance(f, *shared_moments(design, loc, scale, ("weight", "bias")))


def test_flipout_keeps_the_joint_distribution_over_the_places_of_a_convolution() -> None:
    loc, scale = moments({"weight": (2, 2, 2, 1), "bias": (1,)}, 9)
    x = np.random.default_rng(10).normal(size=(2, 2, 3, 2))
    patches = ops.patches(x, (2, 2)).reshape(2, 2, -1)
    design = np.concatenate([patches, np.ones((2, 2, 1))], axis=-1)
    f = flipped(convolution, x, loc, scale, 6000, 11)
    within_covariance(f, *shared_moments(design, loc, scale, ("weight", "bias")))


def test_the_approximate_local_reparameterisation_of_a_convolution_loses_the_dependence_of_places() -> None:
    """Means and variances of the outputs are right; places are independent, which under q they are not."""
    loc, scale = moments({"weight": (2, 2, 2, 1), "bias": (1,)}, 12)
    row = np.random.default_rng(13).normal(size=(1, 2, 3, 2))
    x = np.repeat(row, 20_000, axis=0)
    f = outputs(convolution, LocalReparameterisation(loc, scale, normals(14)), loc, x)
    patches = np.concatenate([ops.patches(row, (2, 2)).reshape(1, 2, -1), np.ones((1, 2, 1))], axis=-1)
    mean, covariance = shared_moments(patches, loc, scale, ("weight", "bias"))
    assert abs(covariance[0, 1]) > 0.1
    within_covariance(f, mean, np.diag(np.diag(covariance)))


def test_a_bias_alone_is_one_draw_per_row_over_all_positions() -> None:
    """The weight is not in the factorised part: it is used at its value, and the bias has its own distribution."""
    loc, scale = moments({"map.bias": (1,)}, 15)
    values = {"map.weight": np.array([[0.5], [-1.0]]), "map.bias": np.array([7.0])}
    x = np.repeat(np.random.default_rng(16).normal(size=(1, 3, 2)), 5000, axis=0)
    f = outputs(positions, LocalReparameterisation(loc, scale, normals(17)), values, x)
    noise = f - (x @ values["map.weight"])[..., 0]
    np.testing.assert_allclose(noise, np.repeat(noise[:, :1], 3, axis=1), atol=1e-12)
    within_covariance(noise[:, :1], loc["map.bias"], np.diag(scale["map.bias"] ** 2))


def test_a_weight_alone_keeps_the_value_of_its_bias() -> None:
    loc, scale = moments({"output.weight": (3, 2)}, 18)
    values = {"output.weight": np.zeros((3, 2)), "output.bias": np.array([3.0, -4.0])}
    x = np.array([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    for handler in (LocalReparameterisation(loc, scale, normals(19)), Flipout(loc, signs(19))):
        f = outputs(one_map, handler, values, x)
        # A row of zeros has no weight in it.
        np.testing.assert_array_equal(f[1], values["output.bias"])
        assert not np.allclose(f[0], x[0] @ loc["output.weight"] + values["output.bias"])


def broadcast_bias(x: Any, y: Any = None) -> None:
    weight = bnn.sample("weight", dist.Normal(0.0, 1.0).expand((3, 2)).to_event())
    bias = bnn.sample("bias", dist.Normal(0.0, 1.0).expand((1,)).to_event())
    bnn.observe(y, bnn.linear("map", x, weight, bias), likelihoods.Gaussian(0.5))


def positive_weight(x: Any, y: Any = None) -> None:
    weight = bnn.sample("weight", dist.HalfNormal(1.0).expand((3, 2)).to_event())
    bnn.observe(y, bnn.linear("map", x, weight), likelihoods.Gaussian(0.5))


@pytest.mark.parametrize(
    ("model", "site", "shape"),
    [
        pytest.param(broadcast_bias, "bias", (1,), id="one bias for several outputs"),
        pytest.param(positive_weight, "weight", (3, 2), id="a constrained weight"),
        pytest.param(noncentred(one_map, ["output.weight"]), "output.weight.base", (3, 2), id="computed"),
    ],
)
def test_what_is_no_plain_weight_of_a_map_keeps_its_sampled_value(model: Any, site: str, shape: Any) -> None:
    """There the one sampled value is right, and a normal per row and output would not be."""
    rng = np.random.default_rng(20)
    names = ("weight", "bias", "output.weight.base", "output.bias")
    values = {name: rng.normal(size=(3, 2) if "weight" in name else (2,)) for name in names}
    values[site] = rng.normal(size=shape)
    loc, scale = moments({site: shape}, 21)
    x = rng.normal(size=(4, 3))
    plain = network_output(model, values, x).f
    for handler in (LocalReparameterisation(loc, scale, normals(22)), Flipout(loc, signs(22))):
        np.testing.assert_array_equal(outputs(model, handler, values, x), plain)


# --- both systems -------------------------------------------------------------------------------------


def network(x: Any, y: Any = None) -> None:
    """Images: a convolution without bias, then dense layers with relu: some outputs of maps have variance zero."""
    hidden = ops.relu(bnn.conv2d("conv", x, 2, 2, prior=priors.Normal(), bias=False))
    f = bnn.mlp(hidden.reshape(x.shape[0], -1), [4, 2], activation="relu", prior=priors.Normal())
    bnn.observe(y, f, likelihoods.Gaussian(0.5))


IMAGES = np.random.default_rng(23).normal(size=(5, 3, 3, 1))
IMAGES[2] = 0.0
TARGETS = np.random.default_rng(24).normal(size=(5, 2))


def log_likelihood(chosen: Any, model: Any, u: Any, x: Any, y: Any) -> Any:
    """Sum over rows of the log likelihood of the program, as the system runs it."""
    sites = chosen.run(chosen.native(model, record=False), x, y, values=u, unconstrained=True)
    return next(site for site in sites if site.name == "y").distribution.log_prob(y).sum()


HANDLERS = {
    "local": lambda loc, scale: LocalReparameterisation(loc, scale, normals(25)),
    "flipout": lambda loc, scale: Flipout(loc, signs(25)),
    "dropout": lambda loc, scale: DroppedInputs({"hidden0": 0.3, "output": 0.3}, keeps(25)),
}


def value_and_gradients(ppl: str, estimator: str) -> list[np.ndarray]:
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        x, y = chosen.asarray(IMAGES), chosen.asarray(TARGETS)
        program = Program.of(chosen, network, x, y, language=True)
        loc, scale = moments({name: site.shape for name, site in program.sites.items()}, 26)
        params = [{name: chosen.asarray(value) for name, value in part.items()} for part in (loc, scale)]

        def objective(params: Any) -> Any:
            loc, scale = params
            eps = np.random.default_rng(27)
            u = {n: loc[n] + scale[n] * chosen.asarray(eps.normal(size=loc[n].shape)) for n in program.sites}
            handled = under(network, lambda: HANDLERS[estimator](loc, scale))
            return log_likelihood(chosen, handled, u, x, y)

        value, (by_loc, by_scale) = chosen.value_and_grad(objective)(params)
        found = [value, *(by_loc[n] for n in program.sites), *(by_scale[n] for n in program.sites)]
        return [chosen.to_numpy(array) for array in found]


@pytest.mark.parametrize("estimator", HANDLERS)
def test_both_systems_agree_on_the_same_noise_and_gradients_at_rows_of_zeros_are_finite(
    estimator: str,
) -> None:
    """Rounding only. One image is zero, so all that enters the first map, and relu leaves zeros in the others."""
    ours = value_and_gradients("numpyro", estimator)
    for mine, other in zip(ours, value_and_gradients("pyro", estimator), strict=True):
        assert np.all(np.isfinite(mine))
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-12 * max(1.0, np.abs(other).max()))
    assert any(np.abs(gradient).max() > 0 for gradient in ours[1:])


ROWS, INPUTS, NOISE, DRAWS = 30, 3, 0.5, 3000


def expected_gradients(x: np.ndarray, y: np.ndarray, loc: Any, scale: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of E_q log p(y | x, w) = -1/(2 s^2) sum_n [(y_n - x_n mu - mu_b)^2 + x_n^2 sigma^2 + sigma_b^2] + const,
    by the mean and by the standard deviation of the flat vector of weights and bias."""
    design = np.column_stack([x, np.ones(len(x))])
    mu = np.append(loc["output.weight"], loc["output.bias"])
    sigma = np.append(scale["output.weight"], scale["output.bias"])
    return design.T @ (y - design @ mu) / NOISE**2, -(design**2).sum(0) * sigma / NOISE**2


def sampled_gradients(ppl: str, estimator: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradients (S, 2 (I + 1)) of as many draws, and the expected one."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, INPUTS))
    loc, scale = moments({"output.weight": (INPUTS, 1), "output.bias": (1,)}, seed + 1)
    y = (x @ loc["output.weight"] + loc["output.bias"])[:, 0] + NOISE * rng.normal(size=ROWS)
    noise = {
        "eps.weight": rng.standard_normal((DRAWS, INPUTS, 1)),
        "eps.bias": rng.standard_normal((DRAWS, 1)),
        "normal": rng.standard_normal((DRAWS, ROWS, 1)),
        "sign.in": rng.choice([-1.0, 1.0], (DRAWS, ROWS, INPUTS)),
        "sign.out": rng.choice([-1.0, 1.0], (DRAWS, ROWS, 1)),
    }
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        data = chosen.asarray(x), chosen.asarray(y)

        def objective(params: Any, noise: Any) -> Any:
            loc, scale = ({"output.weight": p[0], "output.bias": p[1]} for p in (params[:2], params[2:]))
            u = {name: loc[name] + scale[name] * noise[f"eps.{name[7:]}"] for name in loc}

            def sign(shape: tuple[int, ...], like: Any) -> Any:
                return noise["sign.in" if shape[-1] == INPUTS else "sign.out"]

            handlers = {
                "plain": lambda: DroppedInputs({}, lambda *_: None),
                "local": lambda: LocalReparameterisation(loc, scale, lambda *_: noise["normal"]),
                "flipout": lambda: Flipout(loc, sign),
            }

            def model(x: Any, y: Any = None) -> None:
                with handlers[estimator]():
                    f = bnn.mlp(x, [1], prior=priors.Normal())
                    bnn.observe(y, f, likelihoods.Gaussian(NOISE))

            return log_likelihood(chosen, model, u, *data)

        params = [chosen.asarray(part[name]) for part in (loc, scale) for name in loc]
        mapped = chosen.vmap(chosen.value_and_grad(objective), in_axes=(None, 0))
        _, gradients = mapped(params, {name: chosen.asarray(value) for name, value in noise.items()})
        flat = np.concatenate([chosen.to_numpy(g).reshape(DRAWS, -1) for g in gradients], axis=1)
    return flat, np.concatenate(expected_gradients(x, y, loc, scale))


@pytest.mark.parametrize("estimator", ["plain", "local", "flipout"])
def test_gradients_are_unbiased_in_both_systems(ppl: str, estimator: str) -> None:
    gradients, expected = sampled_gradients(ppl, estimator, 28)
    within(gradients, expected)


def test_gradients_by_row_have_less_variance(ppl: str) -> None:
    """Rows with noise of their own average it away. By the mean, with residual noise e = y - f, the gradient is
    D' e / s^2, whose covariance is D' Cov(e) D / s^4 in closed form. By the scale the factors are measured: flipout
    leaves the square of each deviation in all rows, and gains nothing there."""
    found = {name: sampled_gradients(ppl, name, 29) for name in ("plain", "local", "flipout")}
    x = np.random.default_rng(29).normal(size=(ROWS, INPUTS))
    design = np.column_stack([x, np.ones(ROWS)])
    scale = moments({"output.weight": (INPUTS, 1), "output.bias": (1,)}, 30)[1]
    variance = np.append(scale["output.weight"], scale["output.bias"]) ** 2
    joint = (design * variance) @ design.T
    names = [f"{of}.{name}" for of in ("loc", "scale") for name in ("w0", "w1", "w2", "b")]
    for estimator, covariance in (("plain", joint), ("local", np.diag(np.diag(joint)))):
        gradients, expected = found[estimator]
        exact = np.diag(design.T @ covariance @ design) / NOISE**4
        within((gradients - expected)[:, : INPUTS + 1] ** 2, exact)
    within((found["flipout"][0] - found["flipout"][1])[:, : INPUTS + 1] ** 2, exact)
    for estimator in ("local", "flipout"):
        factors = found["plain"][0].var(0) / found[estimator][0].var(0)
        pairs = zip(names, factors, strict=True)
        print(f"plain / {estimator}: " + ", ".join(f"{name} {factor:.1f}" for name, factor in pairs))
        reduced = factors if estimator == "local" else factors[: INPUTS + 1]
        assert np.all(reduced > 1.2)


# --- what is refused, and before anything is compiled ----------------------------------------------------

X = {
    "flat": np.random.default_rng(30).normal(size=(4, 3)),
    "wide": np.random.default_rng(31).normal(size=(4, 4)),
    "positions": np.random.default_rng(32).normal(size=(4, 3, 2)),
    "images": np.random.default_rng(33).normal(size=(4, 2, 3, 2)),
}
# Model, inputs, sites with their shapes, and what `shared_weights` finds.
SHARED: dict[str, tuple[Any, str, dict[str, tuple[int, ...]], dict[str, str]]] = {
    "once": (one_map, "flat", {"output.weight": (3, 2), "output.bias": (2,)}, {}),
    "convolution": (convolution, "images", {"weight": (2, 2, 2, 1), "bias": (1,)}, {"weight": "positions"}),
    "positions": (
        positions,
        "positions",
        {"map.weight": (2, 1), "map.bias": (1,)},
        {"map.weight": "positions"},
    ),
    "maps": (two_maps, "wide", {"weight": (2, 1), "bias": (1,)}, {"weight": "maps", "bias": "maps"}),
    "folded": (
        folded,
        "positions",
        {"map.weight": (2, 1), "map.bias": (1,)},
        {"map.weight": "rows", "map.bias": "rows"},
    ),
    "interacting": (
        interacting,
        "flat",
        {"output.weight": (3, 2), "output.bias": (2,)},
        {"output.weight": "rows", "output.bias": "rows"},
    ),
    "outside": (outside, "flat", {"weight": (3, 1), "other": (3, 1), "third": ()}, {"weight": "outside"}),
}


def case(name: str) -> Iterator[Any]:
    model, inputs, shapes, found = SHARED[name]
    loc, scale = moments(shapes, 34)
    return iter((model, X[inputs], loc, scale, found))


def found(name: str, ppl: str, sites: Any = None) -> dict[str, Any]:
    model, x, loc, *_ = case(name)
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        values = {site: chosen.asarray(value) for site, value in loc.items()}
        return shared_weights(model, values, chosen.asarray(x), sites)


@pytest.mark.parametrize("name", SHARED)
def test_shared_weights_are_found_by_a_run(name: str, ppl: str) -> None:
    expected = SHARED[name][3]
    assert {site: use.kind for site, use in found(name, ppl).items()} == expected
    assert found(name, ppl, sites=()) == {}


@pytest.mark.parametrize("name", SHARED)
def test_the_local_reparameterisation_of_shared_weights_is_refused(name: str) -> None:
    """Beforehand in all cases: a run would give each use a draw of its own, and shows no use outside of linear maps."""
    model, x, loc, scale, expected = case(name)
    shared = found(name, "pyro")
    if name == "once":
        refuse_shared(shared, "local")
        outputs(model, LocalReparameterisation(loc, scale, normals(35)), loc, x)
        return
    with pytest.raises(UnsupportedError, match=next(iter(expected))):
        refuse_shared(shared, "local")
    refuse_shared(shared, "local", approximate=True)
    handler = LocalReparameterisation(loc, scale, normals(35))
    assert np.all(np.isfinite(outputs(model, handler, loc, x)))


@pytest.mark.parametrize("name", SHARED)
def test_flipout_is_refused_for_rows_that_interact_and_other_uses_alone(name: str) -> None:
    model, x, loc, scale, expected = case(name)
    shared = found(name, "pyro")
    values = {site: loc[site] + scale[site] for site in loc}
    if set(expected.values()) <= {"positions", "maps"}:
        refuse_shared(shared, "flipout")
        outputs(model, Flipout(loc, signs(36)), values, x)
        return
    with pytest.raises(UnsupportedError, match="plain"):
        refuse_shared(shared, "flipout")


def test_a_site_that_the_run_lacks_is_named() -> None:
    loc, scale = moments({"output.weight": (3, 2), "output.bia": (2,)}, 37)
    values = {"output.weight": np.zeros((3, 2)), "output.bias": np.zeros(2)}
    with pytest.raises(UnknownNameError, match=r"output\.bias"):
        network_output(
            under(one_map, lambda: LocalReparameterisation(loc, scale, normals(38))), values, X["flat"]
        )


# --- dropout ------------------------------------------------------------------------------------------


class Masks:
    """A source that notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], float]] = []
        self.keep = keeps(39)

    def __call__(self, shape: tuple[int, ...], like: Any, probability: float) -> Any:
        self.asked.append((shape, probability))
        return self.keep(shape, like, probability)


def network_values() -> dict[str, np.ndarray]:
    shapes = {
        "conv.weight": (2, 2, 1, 2),
        "hidden0.weight": (18, 4),
        "hidden0.bias": (4,),
        "output.weight": (4, 2),
        "output.bias": (2,),
    }
    return moments(shapes, 40)[0]


@pytest.mark.parametrize(
    ("rates", "asked"),
    [
        pytest.param({"hidden0": 0.25, "output": 0.25}, [((5, 18), 0.75), ((5, 4), 0.75)], id="dense"),
        pytest.param({"conv": 0.1, "output": 0.5}, [((5, 1, 1, 1), 0.9), ((5, 4), 0.5)], id="convolution"),
        pytest.param({"conv": 0.0, "output": 0.25}, [((5, 4), 0.75)], id="a rate of zero"),
        pytest.param({}, [], id="none"),
    ],
)
def test_dropout_masks_inputs_by_row_and_unit(rates: Any, asked: Any) -> None:
    masks = Masks()
    outputs(network, DroppedInputs(rates, masks), network_values(), IMAGES)
    assert [shape for shape, _ in masks.asked] == [shape for shape, _ in asked]
    np.testing.assert_allclose([p for _, p in masks.asked], [p for _, p in asked])


def test_dropout_is_a_bernoulli_mask_on_inputs_with_their_mean() -> None:
    row, rate = np.array([1.0, -2.0, 0.5]), 0.3
    values = moments({"output.weight": (3, 2), "output.bias": (2,)}, 41)[0]
    x = np.repeat(row[None], 20_000, axis=0)
    f = outputs(one_map, DroppedInputs({"output": rate}, keeps(42)), values, x)
    weight = values["output.weight"]
    covariance = rate / (1.0 - rate) * (weight.T * row**2) @ weight
    within_covariance(f, row @ weight + values["output.bias"], covariance)


def test_dropout_names_maps_that_are_not_there() -> None:
    with pytest.raises(UnknownNameError, match="output"):
        outputs(network, DroppedInputs({"ouput": 0.1}, keeps(44)), network_values(), IMAGES)
