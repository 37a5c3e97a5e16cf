"""Recorded functions of torch: a fit by recorded steps has the numbers of a fit by eager ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyro
import pyro.distributions as pd
import pytest
import torch

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods
from ppl_bnn.backends import pyro_recording as module
from ppl_bnn.backends.pyro import SYSTEM
from ppl_bnn.backends.pyro_recording import EAGER, Replayed
from ppl_bnn.core.errors import UnsupportedError
from tests.problems import regression_data, small_classifier, small_network

STEPS = 40
NEVER = 10**9


def written_guide(x, y=None):
    """Site by site, one of them by hand in a module whose parameters Pyro keeps."""
    for name, shape in (
        ("hidden0.weight", (2, 3)),
        ("hidden0.bias", (3,)),
        ("output.weight", (3, 1)),
        ("output.bias", (1,)),
    ):
        loc = pyro.param(f"{name}.loc", torch.zeros(shape))
        scale = pyro.param(
            f"{name}.scale", 0.1 * torch.ones(shape), constraint=torch.distributions.constraints.positive
        )
        pyro.sample(name, pd.Normal(loc, scale).to_event(len(shape)))
    scale = pyro.param("noise.scale", torch.tensor(0.1), constraint=torch.distributions.constraints.positive)
    pyro.sample("noise", pd.LogNormal(pyro.param("noise.loc", torch.tensor(-1.0)), scale))


GUIDES = {
    "normal": {},
    "normal, particles": {"particles": 3},
    "normal, batches": {"batch_size": 16},
    "diagonal": {"guide": "diagonal"},
    "lowrank": {"guide": "lowrank"},
    "fullrank": {"guide": "fullrank"},
    "matrixnormal": {"guide": "matrixnormal"},
    "mixture": {"guide": "mixture"},
    "iaf": {"guide": "iaf"},
    "spline": {"guide": "spline"},
    "delta": {"guide": "delta"},
    "parts": {"guide": {"output": "fullrank", "*": "normal"}},
    "written": {"guide": written_guide},
    "local": {"estimator": "local"},
    "flipout": {"estimator": "flipout", "batch_size": 16},
    "analytic": {"divergence": "analytic"},
    "sticking the landing": {"guide": "fullrank", "sticking_the_landing": True},
    "iwelbo": {"objective": "iwelbo", "particles": 3},
    "renyi": {"objective": "renyi", "alpha": 0.5, "particles": 3},
}
METHODS = {
    **{
        f"SVI, {name}": bnn.SVI(ppl="pyro", steps=STEPS, elbo_draws=5, **each)
        for name, each in GUIDES.items()
    },
    "MAP": bnn.MAP(ppl="pyro", steps=STEPS),
    "MAP, restarts": bnn.MAP(ppl="pyro", steps=STEPS, restarts=2),
    "MAP, early stopping": bnn.MAP(ppl="pyro", steps=STEPS, validation=0.2),
    "IVON": bnn.IVON(ppl="pyro", steps=STEPS),
    "SWAG": bnn.SWAG(ppl="pyro", collections=10, every=4, rank=5, start=bnn.MAP(ppl="pyro", steps=STEPS)),
    "SVGD": bnn.SVGD(ppl="pyro", steps=STEPS, particles=5),
    "MCDropout": bnn.MCDropout(ppl="pyro", steps=STEPS),
    "Laplace": bnn.Laplace(ppl="pyro", start=bnn.MAP(ppl="pyro", steps=STEPS)),
    # Few steps, as rounding grows along a trajectory.
    "HMC": bnn.HMC(ppl="pyro", chains=1, warmup=5, draws=3, num_steps=3, step_size=0.01),
    "HMC, blocks": bnn.HMC(
        ppl="pyro", chains=1, warmup=5, draws=3, num_steps=3, step_size=0.01, mass_matrix="block"
    ),
}


def numbers(posterior):
    """All numbers of a fit: curves, figures and draws."""
    info = posterior.info
    found = {**info.history, **{name: np.asarray(value) for name, value in info.figures.items()}}
    draws = posterior.approximation.draw(5, np.random.default_rng(0))
    return found | {f"draws of {name}": np.asarray(value) for name, value in draws.items()}


@pytest.fixture
def after(monkeypatch):
    """Set the number of calls after which functions are recorded."""
    return lambda calls: monkeypatch.setattr(module, "CALLS", calls)


@pytest.mark.parametrize("name", METHODS)
def test_a_fit_by_recorded_steps_has_the_numbers_of_a_fit_by_eager_ones(after, name):
    x, y = regression_data()
    after(NEVER)
    eager = numbers(bnn.fit(small_network, x, y, METHODS[name], seed=1))
    after(0)
    posterior = bnn.fit(small_network, x, y, METHODS[name], seed=1)
    recorded = numbers(posterior)
    assert not any(EAGER in text for text in posterior.info.warnings)
    assert eager.keys() == recorded.keys()
    for key, value in eager.items():
        scale = np.max(np.abs(value), initial=1.0)
        np.testing.assert_allclose(recorded[key], value, rtol=1e-7, atol=1e-8 * scale, err_msg=key)


def test_classes_and_single_precision_are_recorded_too(after):
    x, _ = regression_data()
    labels = np.arange(len(x)) % 3
    for method in (
        bnn.SVI(ppl="pyro", steps=STEPS, elbo_draws=5, dtype="float32"),
        bnn.MAP(ppl="pyro", steps=STEPS, dtype="float32"),
    ):
        after(NEVER)
        eager = bnn.fit(small_classifier, x, labels, method).info.history["loss"]
        after(0)
        recorded = bnn.fit(small_classifier, x, labels, method).info.history["loss"]
        np.testing.assert_allclose(recorded, eager, rtol=1e-4)


def test_convolutions_are_recorded_without_the_interpreter(after):
    """torch's interpreter refuses the arguments of their derivatives."""
    model = bnn.zoo.load("lenet", classes=2, channels=(2,), widths=(3,), kernel=3)
    x = np.random.default_rng(0).normal(size=(10, 16))
    method = bnn.MAP(ppl="pyro", steps=STEPS, polish=False)
    after(NEVER)
    eager = numbers(bnn.fit(model, x, np.arange(10) % 2, method))
    after(0)
    posterior = bnn.fit(model, x, np.arange(10) % 2, method)
    assert not any(EAGER in text for text in posterior.info.warnings)
    np.testing.assert_allclose(numbers(posterior)["loss"], eager["loss"], rtol=1e-8)


def test_a_model_runs_as_often_as_before_a_record_however_many_the_steps():
    runs = 0

    def model(x, y=None):
        nonlocal runs
        runs += 1
        small_network(x, y)

    x, y = regression_data()
    counts = []
    for steps in (200, 1000):
        runs = 0
        bnn.fit(model, x, y, bnn.SVI(ppl="pyro", steps=steps, elbo_draws=2))
        counts.append(runs)
    assert counts[0] == counts[1] < 2 * module.CALLS


# --- what cannot be recorded ---------------------------------------------------------------------------


def sloped(x, y, factor):
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    weight = bnn.sample("weight", dist.Normal(0.0, 1.0).expand((x.shape[1], 1)))
    bnn.observe(y, factor(x) * (x @ weight), likelihoods.Gaussian(noise))


def branching(x, y=None):
    sloped(x, y, lambda x: 2.0 if isinstance(x, torch.Tensor) and x.max() > 1.0 else 1.0)


def selecting(x, y=None):
    sloped(x, y, lambda x: torch.where(x.max() > 1.0, 2.0, 1.0) if isinstance(x, torch.Tensor) else 1.0)


def test_steps_that_depend_on_values_run_eagerly_with_a_warning():
    x, y = regression_data()
    steps = 3 * module.CALLS
    method = bnn.SVI(ppl="pyro", steps=steps, elbo_draws=5)
    eager, recorded = (bnn.fit(model, x, y, method) for model in (branching, selecting))
    assert [EAGER in text for text in eager.info.warnings if "ran several times" in text] == [True]
    assert not any(EAGER in text for text in recorded.info.warnings)
    np.testing.assert_allclose(eager.info.history["loss"], recorded.info.history["loss"], rtol=1e-8)
    assert not any(EAGER in text for text in bnn.fit(branching, x, y, bnn.MAP(steps=10)).info.warnings)


@pytest.mark.slow
def test_chains_in_other_processes_report_that_they_ran_eagerly():
    x, y = regression_data()
    method = bnn.HMC(ppl="pyro", chains=2, warmup=30, draws=10, num_steps=5, chain_method="processes")
    warnings = bnn.fit(branching, x, y, method).info.warnings
    assert sum(EAGER in text for text in warnings) == 1


# --- torch's compiler ----------------------------------------------------------------------------------


# What is compiled is the record of a step, and the default tests have the records of all methods: here an optimiser
# with draws of another method than SVI, a guide whose parameters Pyro keeps, and a gradient alone.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SVI, written", "IVON", "HMC, blocks"])
def test_compiled_steps_have_the_numbers_of_eager_ones(after, name):
    x, y = regression_data()
    after(NEVER)
    eager = numbers(bnn.fit(small_network, x, y, METHODS[name], seed=1))
    after(0)
    posterior = bnn.fit(small_network, x, y, dataclasses.replace(METHODS[name], compile=True), seed=1)
    assert posterior.info.compile_seconds > 0.0
    for key, value in numbers(posterior).items():
        scale = np.max(np.abs(value), initial=1.0)
        np.testing.assert_allclose(value, eager[key], rtol=1e-7, atol=1e-8 * scale, err_msg=key)


def test_compiling_is_refused_without_a_compiler_and_in_jax(monkeypatch):
    x, y = regression_data()
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    with pytest.raises(UnsupportedError, match=r"C\+\+ compiler for torch; got no '/nowhere/compiler'"):
        bnn.fit(small_network, x, y, bnn.MAP(ppl="pyro", compile=True))
    with pytest.raises(UnsupportedError, match="JAX compiles every fit"):
        bnn.MAP(compile=True)


# --- single functions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "runs"), [(0, 10), (1, 1)])
def test_a_long_loop_records_its_step_at_once(more, runs):
    calls = []

    def counted(x):
        calls.append(x)
        return 2.0 * x

    with SYSTEM.session("float64", "cpu"):
        replayed, x = Replayed(torch.no_grad()(counted)), torch.ones(3, dtype=torch.float64)
        with module.expected(module.CALLS + more):
            for _ in range(10):
                assert torch.equal(replayed(x), 2.0 * x)
        assert len(calls) == runs
        # Outside of the loop more calls are not expected.
        other = Replayed(torch.no_grad()(counted))
        other(x), other(x)
    assert len(calls) == runs + 2


def test_a_record_reads_the_present_values_of_the_arrays_that_a_function_holds(after):
    after(0)
    held = torch.ones(3, dtype=torch.float64)
    with SYSTEM.session("float64", "cpu"):
        replayed = Replayed(torch.no_grad()(lambda x: x * held))
        x = torch.arange(3.0, dtype=torch.float64)
        first = replayed(x)
        held.mul_(5.0)
        second = replayed(x)
    assert torch.equal(first, x)
    assert torch.equal(second, 5.0 * x)


def test_a_number_read_from_an_array_is_read_at_every_call(after):
    after(0)
    with SYSTEM.session("float64", "cpu"):
        replayed = Replayed(torch.no_grad()(lambda x: x * x.max().item()))
        x = torch.arange(3.0, dtype=torch.float64)
        assert torch.equal(replayed(x), 2.0 * x)
        assert torch.equal(replayed(10.0 * x), 200.0 * x)


def test_random_numbers_follow_one_another_as_in_the_function_itself(after):
    after(1)

    def drawn(x):
        return x + torch.randn(3), torch.empty(3).normal_(), torch.rand(2) < 0.5

    with SYSTEM.session("float64", "cpu"):
        after(NEVER)
        SYSTEM.seeds(3, 1)
        x = torch.zeros(3)
        eager = [Replayed(torch.no_grad()(drawn))(x) for _ in range(4)]
        after(0)
        SYSTEM.seeds(3, 1)
        replayed = Replayed(torch.no_grad()(drawn))
        recorded = [replayed(x) for _ in range(4)]
    for one, other in zip(eager, recorded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(recorded[0][0], recorded[1][0])


def test_each_shape_and_each_plain_argument_has_its_own_record(after):
    after(0)
    with SYSTEM.session("float64", "cpu"):
        replayed = Replayed(torch.no_grad()(lambda x, name, power: (x**power).sum() if name else x))
        small, large = torch.ones(2), torch.ones(7)
        assert replayed(small, "a", 2.0) == 2.0
        assert replayed(large, "a", 2.0) == 7.0
        assert replayed(3.0 * small, "a", 3.0) == 54.0
        assert torch.equal(replayed(small, "", 2.0), small)
        assert replayed(small, None, 2.0) is not None
        assert len(replayed._replays) == 5


def test_torch_keeps_no_function_of_a_record(after):
    """torch has a list of the functions that it has traced, which it never forgets."""
    after(0)
    listed = torch.jit._state._python_cu
    before = len(listed.get_functions())
    with SYSTEM.session("float64", "cpu"):
        x = torch.ones(3)
        replayed = Replayed(torch.no_grad()(lambda x: (x.sum(), 2.0 * x)))
        assert [float(replayed(x)[0]) for _ in range(3)] == [3.0] * 3
        (found,) = replayed._replays.values()
        assert found is not None
    assert len(listed.get_functions()) == before


def test_operations_that_copy_are_left_out_and_those_that_round_are_not(after):
    after(0)

    def function(x):
        rounded = torch.div(x, 1, rounding_mode="floor")
        return x.sum().sum() ** 1.0 * 1.0, rounded, x.view(3).expand(3) * 2.0

    with SYSTEM.session("float64", "cpu"):
        x = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64)
        found = module.record(function, [x], torch.utils._pytree.tree_flatten((x,))[1])
        names = [str(node.target) for node in found.module.graph.nodes if node.op == "call_function"]
        assert names == ["aten.div.Tensor_mode", "aten.sum.default", "aten.mul.Tensor"]
        total, rounded, doubled = Replayed(function)(x)
    assert total == 4.5
    assert rounded.tolist() == [0.0, 1.0, 2.0]
    assert doubled.tolist() == [1.0, 3.0, 5.0]


def test_arrays_that_are_written_in_place_keep_their_copies(after):
    after(0)

    def function(x):
        copy = x**1.0
        copy.mul_(3.0)
        return copy, x * 2.0

    with SYSTEM.session("float64", "cpu"):
        replayed = Replayed(torch.no_grad()(function))
        x = torch.ones(3, dtype=torch.float64)
        for _ in range(2):
            copy, double = replayed(x)
            assert torch.equal(copy, 3.0 * torch.ones(3))
            assert torch.equal(double, 2.0 * torch.ones(3))


def test_nothing_is_recorded_inside_a_transform(after):
    after(0)
    with SYSTEM.session("float64", "cpu"):
        replayed = Replayed(lambda x: (x**2).sum())
        x = torch.ones(4, 3)
        assert torch.equal(torch.func.vmap(replayed)(x), torch.full((4,), 3.0))
        assert torch.equal(torch.func.grad(replayed)(x), 2.0 * x)
        assert not replayed._replays


def test_results_keep_their_structure(after):
    after(0)
    with SYSTEM.session("float64", "cpu"):
        replayed = Replayed(lambda state, x: ({"b": x, "a": state["a"] + 1.0}, (x.sum(),)))
        x = torch.ones(2)
        state, (total,) = replayed({"a": x}, 3.0 * x)
    assert list(state) == ["b", "a"]
    assert torch.equal(state["a"], 2.0 * x)
    assert torch.equal(state["b"], 3.0 * x)
    assert total == 6.0
