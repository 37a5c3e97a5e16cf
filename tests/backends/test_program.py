"""A model bound to a system: coordinates, draws, chunks, rows, plain models, and globals left as they were."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats
from scipy.special import expit

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.backends import many_draws
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system, written_in
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import ModelError, UnknownNameError

ROWS, FEATURES = 9, 2
X = np.random.default_rng(6).normal(size=(ROWS, FEATURES))
Y = X[:, 0] - 0.5 * X[:, 1] + 0.1 * np.random.default_rng(601).normal(size=ROWS)


def model(x: Any, y: Any = None, *, width: int = 3) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    f = bnn.mlp(x, [width, 1], "tanh", [priors.Normal(0.0, "fan_in"), priors.Point()])
    bnn.observe(y, f, likelihoods.Gaussian(noise))


def with_rows(x: Any, y: Any = None) -> None:
    with bnn.rows(x.shape[0]):
        shift = bnn.sample("shift", dist.Normal(0.0, 1.0))
    bnn.observe(y, bnn.mlp(x, [1]) + shift[:, None], likelihoods.Gaussian(0.5))


def program_of(
    ppl: str, model: Any, x: Any = X, y: Any = Y, **keywords: Any
) -> tuple[Any, Program, Any, Any]:
    chosen = system(ppl)
    xs, ys = map_data(chosen.asarray, x), chosen.asarray(y)
    return chosen, Program.of(chosen, model, xs, ys, language=True, **keywords), xs, ys


# --- coordinates ------------------------------------------------------------------------------------


def test_flat_vectors_and_dicts_are_inverses(rng, ppl: str) -> None:
    with system(ppl).session("float64", "cpu"):
        chosen, program, _, _ = program_of(ppl, model)
        assert program.parameter_count == 1 + 6 + 3 + 3 + 1
        flat = chosen.asarray(rng.normal(size=(2, 4, program.parameter_count)))
        u = program.unravel(flat)
        assert u["hidden0.weight"].shape == (2, 4, 2, 3)
        again = program.ravel({name: value[1, 2] for name, value in u.items()})
        np.testing.assert_array_equal(chosen.to_numpy(again), chosen.to_numpy(flat)[1, 2])
        names = ["output.bias", "noise"]
        some = program.ravel({n: u[n][0, 0] for n in names}, names)
        np.testing.assert_array_equal(chosen.to_numpy(some), chosen.to_numpy(flat)[0, 0, [-1, 0]])


def test_constrained_values_come_back(ppl: str) -> None:
    with system(ppl).session("float64", "cpu"):
        _, program, x, y = program_of(ppl, model)
        u = program.prior_draws(x, y, seed=3, count=4)
        w = program.constrain_draws(u, x, y)
        np.testing.assert_allclose(w["noise"], np.exp(u["noise"]), rtol=1e-14)
        np.testing.assert_array_equal(w["hidden0.weight"], u["hidden0.weight"])
        one = program.unconstrain({name: value[2] for name, value in w.items()}, x, y)
        for name in program.sites:
            np.testing.assert_allclose(one[name], u[name][2], rtol=1e-12, atol=1e-14)


def test_prior_draws_are_the_same_bits_for_the_same_seed(ppl: str) -> None:
    draws = []
    for seed in (5, 5, 6):
        with system(ppl).session("float64", "cpu"):
            _, program, x, y = program_of(ppl, model)
            draws.append(program.prior_draws(x, y, seed=seed, count=3))
    for name in draws[0]:
        assert draws[0][name].tobytes() == draws[1][name].tobytes()
        assert draws[0][name].tobytes() != draws[2][name].tobytes()


# --- predictions in chunks --------------------------------------------------------------------------


def test_memory_does_not_change_a_prediction(rng, ppl: str) -> None:
    rows = rng.normal(size=(23, FEATURES))
    with system(ppl).session("float64", "cpu"):
        _, program, x, y = program_of(ppl, model)
        w = program.constrain_draws(program.prior_draws(x, y, 0, 7), x, y)
        hidden = np.tanh(rows @ w["hidden0.weight"] + w["hidden0.bias"][:, None])
        f = hidden @ w["output.weight"] + w["output.bias"][:, None]
        expected = np.concatenate([f, np.broadcast_to(np.log(w["noise"])[:, None, None], f.shape)], axis=-1)
        for memory in (1, 1500, 2**28):
            program._compiled.clear()
            eta = program.predictor_draws(w, rows, memory=memory)
            np.testing.assert_allclose(eta, expected, rtol=1e-12)


def test_cores_do_not_change_a_prediction(rng, monkeypatch: pytest.MonkeyPatch) -> None:
    new = rng.normal(size=(1800, FEATURES))
    found = {}
    monkeypatch.setattr(many_draws, "SMALL", 0)
    with system("numpyro").session("float64", "cpu"):
        _, program, x, y = program_of("numpyro", model)
        w = program.constrain_draws(program.prior_draws(x, y, 0, 300), x, y)
        for threads in ("1", "2", "3"):
            monkeypatch.setenv("NPROC", threads)
            program._compiled.clear()
            # Few rows are one chunk, whose draws the threads share; many rows are several.
            found[threads] = [program.predictor_draws(w, rows) for rows in (new[:400], new)]
    for one, two, three in zip(*found.values(), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-12)
        np.testing.assert_allclose(three, one, rtol=1e-12)


def test_small_predictions_share_a_program_and_larger_ones_compute_no_row_twice(
    rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and draws are padded where their bytes, of values and of weights, are at most the limit."""
    new, system_, shapes = rng.normal(size=(65, FEATURES)), system("numpyro"), []
    compile_for = type(system_).compile_for

    def recorded(self: Any, function: Any, arguments: Any, quick: bool = False) -> Any:
        draws, (rows, _) = arguments
        shapes.append((len(draws["noise"]), len(rows)))
        return compile_for(self, function, arguments, quick)

    with system_.session("float64", "cpu"):
        _, program, x, y = program_of("numpyro", model)
        w = program.constrain_draws(program.prior_draws(x, y, 0, 600), x, y)
        first = {name: value[:1] for name, value in w.items()}
        per_row, _ = many_draws._bytes_per_row(program, {name: value[0] for name, value in w.items()}, new)
        work = 600 * 33 * (per_row + 8 * program.parameter_count)
        monkeypatch.setattr(type(system_), "compile_for", recorded)
        whole = program.predictor_draws(w, new)
        for rows in (33, 50, 64):
            np.testing.assert_allclose(program.predictor_draws(w, new[:rows]), whole[:, :rows], rtol=1e-12)
        program.predictor_draws(first, new[:1])
        assert shapes == [(512, 128), (512, 64), (1, 1)]
        shapes.clear()
        monkeypatch.setenv("NPROC", "1")
        for limit in (work, work - 1):
            program._compiled.clear()
            monkeypatch.setattr(many_draws, "SMALL", limit)
            program.predictor_draws(w, new[:33])
        assert shapes == [(512, 64), (600, 33)]


def test_nothing_is_padded_where_shapes_cost_nothing(rng, monkeypatch: pytest.MonkeyPatch) -> None:
    found, sizes = system("pyro"), []
    batched = type(found).batched

    def recorded(self: Any, function: Any, size: int) -> Any:
        sizes.append(size)
        return batched(self, function, size)

    monkeypatch.setattr(type(found), "batched", recorded)
    with found.session("float64", "cpu"):
        _, program, x, y = program_of("pyro", model)
        w = program.constrain_draws(program.prior_draws(x, y, 0, 37), x, y)
        program.predictor_draws(w, rng.normal(size=(33, FEATURES)))
    assert sizes == [37]


@pytest.mark.parametrize("threads", [1, 3])
def test_of_the_calls_on_threads_few_are_held_and_an_error_ends_them(ppl: str, threads: int) -> None:
    made, ended = 0, []

    def calls() -> Iterator[tuple[int]]:
        nonlocal made
        for number in range(50):
            assert made - len(ended) <= threads
            made += 1
            yield (number,)

    def call(number: int) -> None:
        if number == 7:
            raise ZeroDivisionError
        ended.append(number)

    with system(ppl).session("float32", "cpu"), pytest.raises(ZeroDivisionError):
        system(ppl).each(call, calls(), threads)
    assert ended[:7] == list(range(7)) if threads == 1 else set(range(7)) <= set(ended)
    assert made <= 8 + threads


def test_rows_that_interact_are_not_cut(ppl: str) -> None:
    def graph(x: Any, y: Any = None) -> None:
        bnn.coupled()
        centred = x - ops.mean(x, 0)
        bnn.observe(y, bnn.mlp(centred, [1]), likelihoods.Gaussian(1.0))

    with system(ppl).session("float64", "cpu"):
        _, program, x, y = program_of(ppl, graph)
        assert program.coupled
        w = program.constrain_draws(program.prior_draws(x, y, 0, 3), x, y)
        np.testing.assert_allclose(
            program.predictor_draws(w, X, memory=1), program.predictor_draws(w, X), rtol=1e-12
        )
        assert not program_of(ppl, model)[1].coupled


def test_variables_of_rows_are_drawn_afresh_at_new_rows(ppl: str) -> None:
    new = np.zeros((400, FEATURES))
    with system(ppl).session("float64", "cpu"):
        _, program, x, y = program_of(ppl, with_rows)
        assert program.has_local
        assert program.sites["shift"].local
        w = program.constrain_draws(program.prior_draws(x, y, 0, 3), x, y)
        assert w["shift"].shape == (3, ROWS)
        eta = program.predictor_draws(w, new, seed=1)
        again = program.predictor_draws(w, new, seed=1, memory=1)
        other = program.predictor_draws(w, new, seed=2)
    np.testing.assert_array_equal(eta, again)
    assert not np.allclose(eta[..., 0], other[..., 0])
    shifts = eta[..., 0] - w["output.bias"]
    # 1200 standard normal numbers: mean and variance within five standard errors.
    assert abs(shifts.mean()) < 5 / np.sqrt(1200)
    assert abs(shifts.var() - 1) < 5 * np.sqrt(2 / 1200)
    assert abs(np.corrcoef(shifts[0], shifts[1])[0, 1]) < 5 / np.sqrt(400)


# --- callables of all kinds, inputs of all kinds ----------------------------------------------------


class Holder:
    width = 4

    def method(self, x: Any, y: Any = None) -> None:
        model(x, y, width=self.width)

    __call__ = method


def closure(width: int) -> Any:
    def inner(x: Any, y: Any = None) -> None:
        model(x, y, width=width)

    return inner


@pytest.mark.parametrize(
    "callable_model",
    [
        closure(4),
        functools.partial(model, width=4),
        functools.partial(functools.partial(model), width=4),
        Holder().method,
        Holder(),
        lambda x, y=None: model(x, y, width=4),
    ],
    ids=["closure", "partial", "nested partial", "method", "object", "lambda"],
)
def test_models_may_be_any_callable(ppl: str, callable_model: Any) -> None:
    assert written_in(callable_model, X, Y, ppl) == "language"
    with system(ppl).session("float64", "cpu"):
        chosen, program, x, y = program_of(ppl, callable_model)
        assert program.sites["hidden0.bias"].shape == (4,)
        u = program.unravel(chosen.asarray(np.full(program.parameter_count, 0.1)))
        value = float(program.log_joint(u, x, y))
        reference = program_of(ppl, functools.partial(model, width=4))[1]
        assert value == float(reference.log_joint(u, x, y))


def test_inputs_may_be_a_dict(rng, ppl: str) -> None:
    def two_inputs(x: Any, y: Any = None) -> None:
        f = bnn.dense("left", x["a"], 1) + bnn.dense("right", x["b"], 1, bias=False)
        bnn.observe(y, f, likelihoods.Gaussian(0.3))

    inputs = {"a": X, "b": rng.normal(size=(ROWS, 3))}
    with system(ppl).session("float64", "cpu"):
        _, program, x, y = program_of(ppl, two_inputs, inputs)
        w = program.constrain_draws(program.prior_draws(x, y, 0, 2), x, y)
        eta = program.predictor_draws(w, inputs, memory=1)
    f = inputs["a"] @ w["left.weight"] + w["left.bias"][:, None] + inputs["b"] @ w["right.weight"]
    np.testing.assert_allclose(eta[..., :1], f, rtol=1e-12)
    posterior = bnn.MAP(ppl=ppl, steps=20, polish=False).fit(two_inputs, inputs, Y, progress=False)
    assert posterior.predict(inputs).mean.shape == (ROWS,)


# --- plain models of the systems --------------------------------------------------------------------


def plain_numpyro(x: Any, y: Any = None) -> None:
    import numpyro
    import numpyro.distributions as nd

    w = numpyro.sample("w", nd.Normal(0.0, 1.0).expand([FEATURES]).to_event(1))
    numpyro.factor("tilt", -0.5 * (w**2).sum())
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", nd.Normal(x @ w, 0.5), obs=y)


def plain_pyro(x: Any, y: Any = None) -> None:
    import pyro
    import pyro.distributions as pd
    import torch

    w = pyro.sample("w", pd.Normal(torch.zeros(FEATURES), 1.0).to_event(1))
    pyro.factor("tilt", -0.5 * (w**2).sum())
    with pyro.plate("data", x.shape[0]):
        pyro.sample("obs", pd.Normal(x @ w, 0.5), obs=y)


PLAIN = {"numpyro": plain_numpyro, "pyro": plain_pyro}


@pytest.mark.parametrize("preferred", ["numpyro", "pyro"])
def test_plain_models_are_recognised_whatever_is_preferred(ppl: str, preferred: str) -> None:
    assert written_in(PLAIN[ppl], X, Y, preferred) == ppl
    assert written_in(lambda x, y=None: PLAIN[ppl](x, y), X, Y, preferred) == ppl
    assert written_in(bnn.as_numpyro(model), X, Y, preferred) == "language"


def test_a_plain_model_is_fitted_and_predicts_its_mean(rng, ppl: str) -> None:
    """The mode of ridge regression with precision 2 (the prior and the factor), whichever system was asked for."""
    other = {"numpyro": "pyro", "pyro": "numpyro"}[ppl]
    posterior = bnn.MAP(ppl=other).fit(PLAIN[ppl], X, Y, progress=False)
    assert posterior.info.ppl == ppl
    expected = np.linalg.solve(X.T @ X / 0.25 + 2 * np.eye(FEATURES), X.T @ Y / 0.25)
    np.testing.assert_allclose(posterior.draws["w"][0, 0], expected, atol=1e-6)
    new = rng.normal(size=(4, FEATURES))
    prediction = posterior.predict(new)
    np.testing.assert_allclose(prediction.mean, new @ expected, atol=1e-6)
    np.testing.assert_allclose(prediction.std, 0.5, rtol=1e-12)


def plain_classes(ppl: str, several: bool, by: str) -> Any:
    def in_numpyro(x: Any, y: Any = None) -> None:
        import jax
        import numpyro
        import numpyro.distributions as nd

        w = numpyro.sample("w", nd.Normal(0.0, 1.0).expand([FEATURES, 3]).to_event(2))
        f = x @ w if several else (x @ w)[:, 0]
        squash = jax.nn.softmax if several else jax.nn.sigmoid
        arguments = {"logits": f} if by == "logits" else {"probs": squash(f)}
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", (nd.Categorical if several else nd.Bernoulli)(**arguments), obs=y)

    def in_pyro(x: Any, y: Any = None) -> None:
        import pyro
        import pyro.distributions as pd
        import torch

        w = pyro.sample("w", pd.Normal(torch.zeros(FEATURES, 3), 1.0).to_event(2))
        f = x @ w if several else (x @ w)[:, 0]
        arguments = {"logits": f} if by == "logits" else {"probs": f.softmax(-1) if several else f.sigmoid()}
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", (pd.Categorical if several else pd.Bernoulli)(**arguments), obs=y)

    return in_numpyro if ppl == "numpyro" else in_pyro


@pytest.mark.parametrize("by", ["logits", "probs"])
def test_plain_classifiers_predict_their_probabilities(rng, ppl: str, by: str) -> None:
    labels = np.array([0, 1, 2, 1, 0, 2, 2, 1, 0])
    chosen, w = system(ppl), rng.normal(size=(2, FEATURES, 3))
    for several, y in ((True, labels), (False, (labels > 0).astype(float))):
        with chosen.session("float64", "cpu"):
            program = Program.of(
                chosen, plain_classes(ppl, several, by), chosen.asarray(X), chosen.asarray(y), language=False
            )
            eta = program.predictor_draws({"w": w}, X)
            parameters = program.likelihood.mixture_parameters(eta)[1]
        if several:
            weights = np.exp(X @ w)
            np.testing.assert_allclose(
                parameters["probs"], weights / weights.sum(-1, keepdims=True), rtol=1e-9
            )
        else:
            np.testing.assert_allclose(parameters["probs"], expit((X @ w)[..., 0]), rtol=1e-9)


def test_several_observed_sites_need_a_name(ppl: str) -> None:
    def two(x: Any, y: Any = None) -> None:
        PLAIN[ppl](x, y)
        if ppl == "numpyro":
            import numpyro
            import numpyro.distributions as nd

            numpyro.sample("more", nd.Normal(0.0, 1.0), obs=0.5)
        else:
            import pyro
            import pyro.distributions as pd
            import torch

            pyro.sample("more", pd.Normal(0.0, 1.0), obs=torch.tensor(0.5))

    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        x, y = chosen.asarray(X), chosen.asarray(Y)
        with pytest.raises(ModelError, match=r"exactly one observed site; got 2: \['obs', 'more'\]"):
            Program.of(chosen, two, x, y, language=False)
        with pytest.raises(UnknownNameError, match="did you mean 'obs'"):
            Program.of(chosen, two, x, y, language=False, observed="ob")
        assert Program.of(chosen, two, x, y, language=False, observed="obs").observed == "obs"


# --- the language in the tools of the systems -------------------------------------------------------


def test_numpyro_tools_take_the_model() -> None:
    import jax
    from numpyro.infer import Predictive
    from numpyro.infer.util import log_density

    chosen = system("numpyro")
    with chosen.session("float64", "cpu"):
        native, x, y = bnn.as_numpyro(functools.partial(model, width=2)), chosen.asarray(X), chosen.asarray(Y)
        _, program, _, _ = program_of("numpyro", functools.partial(model, width=2))
        params = {site.name: chosen.asarray(np.zeros(site.shape)) for site in program.params}
        drawn = Predictive(native, params=params, num_samples=3)(jax.random.PRNGKey(0), x)
        assert drawn["y"].shape == (3, ROWS)
        assert drawn["f"].shape == (3, ROWS, 1)
        w = {"noise": 0.4, "hidden0.weight": np.ones((2, 2)), "hidden0.bias": np.zeros(2)}
        w = {name: chosen.asarray(value) for name, value in w.items()}
        value, _ = log_density(native, (x, y), {}, {**w, **params})
        u = {**w, **params, "noise": np.log(0.4)}
        ours = program.log_joint(u, x, y, jacobian=False)
        np.testing.assert_allclose(float(value), float(ours), rtol=1e-12)


def test_pyro_tools_take_the_model() -> None:
    import pyro
    from pyro.infer import Predictive

    chosen = system("pyro")
    with chosen.session("float64", "cpu"):
        native, x, y = bnn.as_pyro(functools.partial(model, width=2)), chosen.asarray(X), chosen.asarray(Y)
        drawn = Predictive(native, num_samples=3)(x)
        assert drawn["y"].shape == (3, ROWS)
        # Pyro keeps an axis for the plate of the rows in sites outside it.
        assert drawn["f"].shape == (3, 1, ROWS, 1)
        trace = pyro.poutine.trace(native).get_trace(x, y)
        assert trace.nodes["y"]["is_observed"]
        assert {"f", "noise", "hidden0.weight", "output.weight"} <= set(trace.nodes)
        _, program, _, _ = program_of("pyro", functools.partial(model, width=2))
        values = {site.name: trace.nodes[site.name]["value"].detach() for site in program.sites.values()}
        u = {**values, "noise": values["noise"].log()}
        ours = program.log_joint(u, x, y, jacobian=False)
        np.testing.assert_allclose(trace.log_prob_sum().detach().numpy(), ours.numpy(), rtol=1e-12)


# --- distributions that Pyro keeps from run to run --------------------------------------------------

KEPT = {
    "Normal": (dist.Normal(0.3, 0.7), scipy.stats.norm(0.3, 0.7)),
    "StudentT": (dist.StudentT(4.0, 0.1, 2.0), scipy.stats.t(4.0, 0.1, 2.0)),
    "Gamma": (dist.Gamma(2.0, 3.0), scipy.stats.gamma(2.0, scale=1 / 3)),
    "LogNormal": (dist.LogNormal(0.2, 0.7), scipy.stats.lognorm(s=0.7, scale=np.exp(0.2))),
    "NormalMixture": (dist.NormalMixture((0.3, 0.7), (1.0, 1.0)), scipy.stats.norm(0.0, 1.0)),
}
POINTS = np.array([0.4, 1.1, 2.3])


@pytest.fixture
def nothing_kept() -> Any:
    """The kept distributions, none at first; those of others come back afterwards."""

    from ppl_bnn.backends import pyro_distributions

    before = dict(pyro_distributions._RESOLVED)
    pyro_distributions._RESOLVED.clear()
    yield pyro_distributions._RESOLVED
    pyro_distributions._RESOLVED.clear()
    pyro_distributions._RESOLVED.update(before)


def transforms_of_torch() -> dict[str, Any]:
    """name -> (transform of a function of one number to one of three numbers, order of the derivative it gives)."""
    import torch

    ones = torch.ones(3)

    def each(function: Any) -> Any:
        return lambda f: torch.func.vmap(function(f), randomness="different")

    return {
        "vmap": (lambda f: torch.func.vmap(f, randomness="different"), 0),
        "grad": (lambda f: torch.func.grad(lambda v: torch.func.vmap(f)(v).sum()), 1),
        "grad alone": (lambda f: lambda v: torch.stack([torch.func.grad(f)(one) for one in v]), 1),
        "vmap of grad": (each(torch.func.grad), 1),
        "jvp": (lambda f: lambda v: torch.func.jvp(torch.func.vmap(f), (v,), (ones,))[1], 1),
        "jacrev": (lambda f: lambda v: torch.func.jacrev(torch.func.vmap(f))(v).diagonal(), 1),
        "hessian": (lambda f: lambda v: torch.stack([torch.func.hessian(f)(one) for one in v]), 2),
        "vmap of hessian": (each(lambda f: torch.func.grad(torch.func.grad(f))), 2),
    }


TRANSFORMS = ("vmap", "grad", "grad alone", "vmap of grad", "jvp", "jacrev", "hessian", "vmap of hessian")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("first", TRANSFORMS)
def test_kept_distributions_survive_the_transforms_of_torch(first: str, nothing_kept: Any) -> None:
    """Asked for inside a transform first, then inside every other one and outside: always the density of SciPy."""
    import torch

    from ppl_bnn.backends.pyro_distributions import resolve

    step = 1e-4
    with system("pyro").session("float64", "cpu"):
        transforms = transforms_of_torch()
        assert set(transforms) == set(TRANSFORMS)
        points = torch.as_tensor(POINTS)
        for name, (specification, frozen) in KEPT.items():
            nothing_kept.clear()

            def density(value: Any, s: Any = specification) -> Any:
                return resolve(s).log_prob(value)

            below, here, above = (frozen.logpdf(POINTS + shift) for shift in (-step, 0.0, step))
            wanted = [here, (above - below) / (2 * step), (above - 2 * here + below) / step**2]
            # Differences of SciPy's density: rounding over step^2 for the second, step^2 for the first.
            for use in (first, *TRANSFORMS, first):
                transform, order = transforms[use]
                value = transform(density)(points).numpy()
                np.testing.assert_allclose(
                    value, wanted[order], rtol=1e-6, atol=1e-6, err_msg=f"{name}, {use}"
                )
            np.testing.assert_allclose(density(points).numpy(), here, rtol=1e-12)
            assert np.isfinite(resolve(specification).sample().item())


def test_a_kept_distribution_belongs_to_its_dtype_its_device_and_its_validation(nothing_kept: Any) -> None:
    import torch

    from ppl_bnn.backends.pyro_distributions import resolve

    specification, validates = (
        dist.HalfNormal(0.5).expand((2,)),
        torch.distributions.Distribution._validate_args,
    )
    draws = []
    try:
        for _ in range(2):
            for dtype in ("float64", "float32"):
                with system("pyro").session(dtype, "cpu"):
                    assert resolve(specification) is resolve(specification)
                    draws.append(resolve(specification).sample())
                    with torch.device("meta"):
                        assert resolve(specification).sample().device.type == "meta"
                    torch.distributions.Distribution.set_default_validate_args(True)
                    with pytest.raises(ValueError, match="within the support"):
                        resolve(specification).log_prob(torch.tensor([-1.0, 1.0]))
                    torch.distributions.Distribution.set_default_validate_args(False)
                    resolve(specification).log_prob(torch.tensor([-1.0, 1.0]))
    finally:
        torch.distributions.Distribution.set_default_validate_args(validates)
    assert [draw.dtype for draw in draws] == [torch.float64, torch.float32] * 2
    assert {draw.device.type for draw in draws} == {"cpu"}
    # Two types on two devices, and those of the CPU with validation too.
    assert len(nothing_kept) == 6


def test_distributions_that_depend_on_values_are_not_kept(nothing_kept: Any) -> None:
    """They hold the graph of one run: the gradient of a second run is that of its own values."""
    import torch

    from ppl_bnn.backends.pyro_distributions import resolve

    with system("pyro").session("float64", "cpu"):
        for _ in range(2):
            scale = torch.tensor(2.0, requires_grad=True)
            resolve(dist.Normal(0.0, scale)).log_prob(torch.tensor(1.0)).backward()
            assert scale.grad is not None
            assert scale.grad.item() == pytest.approx(-1 / 2 + 1 / 8, rel=1e-12)
        resolve(dist.Normal(np.zeros(2), 1.0))
    assert len(nothing_kept) == 0


def test_no_more_distributions_are_kept_than_the_bound(nothing_kept: Any) -> None:
    from ppl_bnn.backends.pyro_distributions import _MOST_RESOLVED, resolve

    with system("pyro").session("float64", "cpu"):
        first = resolve(dist.Normal(0.0, 1.0))
        for number in range(2 * _MOST_RESOLVED + 5):
            found = resolve(dist.Normal(float(number), 1.0))
            assert found.mean.item() == number
            assert len(nothing_kept) <= _MOST_RESOLVED
        assert resolve(dist.Normal(0.0, 1.0)).mean.item() == first.mean.item()


# --- globals ----------------------------------------------------------------------------------------


def globals_now() -> dict[str, Any]:
    """Everything that a session could change."""
    import jax
    import pyro
    import torch

    return {
        "x64": jax.config.jax_enable_x64,
        "jax device": jax.config.jax_default_device,
        "dtype": torch.get_default_dtype(),
        "torch device": str(torch.get_default_device()),
        "torch generator": torch.get_rng_state().numpy().tobytes(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "validation of torch": torch.distributions.Distribution._validate_args,
        "validation of pyro": pyro.infer.util.is_validation_enabled(),
        "store": {name: value.detach().numpy().tobytes() for name, value in pyro.get_param_store().items()},
        "pyro stack": len(pyro.poutine.runtime._PYRO_STACK),
        "numpy generator": np.random.get_state()[1].tobytes(),  # noqa: NPY002
        "warnings": list(warnings.filters),
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
    }


def differences(before: dict[str, Any]) -> list[str]:
    now = globals_now()
    return [name for name in before if before[name] != now[name]]


@pytest.fixture
def unusual_globals() -> Any:
    """Settings of a user's own, none of them the default."""
    import pyro
    import torch

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), pyro.get_param_store().scope():
        torch.manual_seed(77)
        torch.set_num_threads(3)
        torch.set_default_dtype(torch.float16)
        pyro.param("mine", torch.ones(2))
        pyro.enable_validation(True)
        try:
            yield globals_now()
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_session_restores_everything(ppl: str, dtype: str, unusual_globals: dict[str, Any]) -> None:
    chosen = system(ppl)
    with chosen.session(dtype, "cpu", threads=1) as device:
        assert device == "cpu"
        _, program, x, y = program_of(ppl, model)
        u = program.prior_draws(x, y, 0, 2)
        assert u["hidden0.weight"].dtype == dtype
        assert program.log_joint_draws(u, x, y).dtype == dtype
    assert differences(unusual_globals) == []

    def breaks(x: Any, y: Any = None) -> None:
        model(x, y)
        raise KeyError("broken")

    with pytest.raises(KeyError), chosen.session(dtype, "cpu", threads=1):
        program_of(ppl, breaks)
    assert differences(unusual_globals) == []


def test_a_fit_and_a_prediction_restore_everything(ppl: str, unusual_globals: dict[str, Any]) -> None:
    posterior = bnn.MAP(ppl=ppl, steps=20, polish=False).fit(model, X, Y, progress=False)
    assert differences(unusual_globals) == []
    posterior.predict(X)
    assert differences(unusual_globals) == []
    with pytest.raises(ModelError):
        bnn.MAP(ppl=ppl).fit(lambda x, y=None: bnn.mlp(x, [1]), X, Y, progress=False)
    assert differences(unusual_globals) == []


def test_a_changed_global_is_seen() -> None:
    """The list above can tell a difference."""
    import torch

    before = globals_now()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        try:
            assert set(differences(before)) == {"dtype", "torch generator"}
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_default_device_of_the_user_is_put_aside_and_back() -> None:
    import torch

    torch.set_default_device("meta")
    try:
        with system("pyro").session("float64", "cpu"):
            _, program, x, y = program_of("pyro", model)
            assert np.isfinite(program.prior_draws(x, y, 0, 1)["noise"]).all()
        assert str(torch.get_default_device()) == "meta"
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("targets", ["vector", "column"])
def test_an_observation_that_would_be_broadcast_is_refused_in_the_fit(ppl: str, targets: str) -> None:
    """Means (N, 1) with targets (N,), and the other way round, would make (N, N) densities."""

    def in_numpyro(x: Any, y: Any = None) -> None:
        import numpyro
        import numpyro.distributions as nd

        w = numpyro.sample("w", nd.Normal(0.0, 1.0).expand([FEATURES, 1]).to_event(2))
        f = x @ w
        numpyro.sample("obs", nd.Normal(f if targets == "vector" else f[:, 0], 0.5), obs=y)

    def in_pyro(x: Any, y: Any = None) -> None:
        import pyro
        import pyro.distributions as pd
        import torch

        w = pyro.sample("w", pd.Normal(torch.zeros(FEATURES, 1), 1.0).to_event(2))
        f = x @ w
        pyro.sample("obs", pd.Normal(f if targets == "vector" else f[:, 0], 0.5), obs=y)

    model = in_numpyro if ppl == "numpyro" else in_pyro
    y = Y if targets == "vector" else Y[:, None]
    with pytest.raises(ModelError, match=rf"'obs'.*shape of y.*broadcasts to \({len(Y)}, {len(Y)}\)"):
        bnn.MAP(ppl=ppl).fit(model, X, y, progress=False)
