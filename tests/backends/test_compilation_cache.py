"""Compiled programs of JAX are shared: a second fit of the same shapes compiles nothing, nor does a second process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.backends import numpyro
from ppl_bnn.backends.numpyro import SYSTEM
from tests.problems import regression_data, small_network

# Settings that compile what their methods do not compile without them: tests/inference/test_method.py has all methods.
METHODS = {
    "MAP, restarts": bnn.MAP(steps=200, restarts=2),
    "SVI, lowrank": bnn.SVI(steps=200, guide="lowrank", elbo_draws=5),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_second_fit_of_the_same_shapes_compiles_nothing(name: str, compiled: list[str]) -> None:
    """Other rows, as of another split, and another seed."""
    for seed in (0, 1):
        compiled.clear()
        x, y = regression_data(seed=seed)
        bnn.fit(small_network, x, y, METHODS[name], seed=seed).predict(x[:5])
    assert compiled == []


def test_another_shape_and_another_model_are_compiled(compiled: list[str]) -> None:
    x, y = regression_data()
    counts = []
    for data, model in (((x, y), small_network), ((x[:-1], y[:-1]), small_network), ((x, y), noisier)):
        compiled.clear()
        bnn.fit(model, *data, bnn.MAP(steps=200))
        counts.append(len(compiled))
    assert counts[1] > 0
    assert counts[2] > 0


def noisier(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", bnn.dist.HalfNormal(2.0))
    f = bnn.mlp(x, [3, 1], activation="tanh", prior=bnn.priors.Normal(0.0, "fan_in"))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(noise))


def test_keys_are_those_of_jax_and_one_program_makes_any_number_of_them(compiled: list[str]) -> None:
    with SYSTEM.session("float64", "cpu"):
        for count in (1, 5, 16, 17, 40):
            wanted = jax.random.split(jax.random.PRNGKey(7), count)
            np.testing.assert_array_equal(SYSTEM.seeds(7, count), wanted)
        SYSTEM.seeds(0, 16)
        compiled.clear()
        for count in (2, 3, 15):
            assert len(SYSTEM.seeds(count, count)) == count
    assert compiled == []


def test_programs_that_differ_in_a_constant_are_different() -> None:
    with SYSTEM.session("float64", "cpu"):
        x = np.arange(5.0)
        one, other = (SYSTEM.compile(lambda x, k=k: x + k)(x) for k in (x, 2.0 * x))
        np.testing.assert_array_equal(one, 2.0 * x)
        np.testing.assert_array_equal(other, 3.0 * x)


def test_a_compiled_function_can_be_part_of_another(compiled: list[str]) -> None:
    with SYSTEM.session("float64", "cpu"):
        inner = SYSTEM.compile(lambda x: (x**2).sum())
        x = np.arange(4.0)
        np.testing.assert_array_equal(jax.grad(inner)(x), 2.0 * x)
        np.testing.assert_array_equal(jax.vmap(inner)(np.stack([x, x])), [14.0, 14.0])


def test_the_oldest_programs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = str(tmp_path / "one")
    program = (
        "import jax, ppl_bnn as bnn; bnn.enable_compilation_cache({!r}); jax.jit(lambda x: x + 1.0)(2.0)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program.format(folder)], check=True)
    names = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert names
    assert all(numpyro._PROGRAM_FILE.search(name) for name in names)
    for age, letter in enumerate("abcd"):
        file = tmp_path / f"jit_f-{64 * letter}-cache"
        file.write_bytes(bytes(10))
        os.utime(file, (1000 - age, 1000 - age))
    (tmp_path / "of the user-cache").write_bytes(bytes(1000))
    os.utime(tmp_path / "of the user-cache", (1, 1))
    for kept, left in ((40, "abcd"), (39, "abc"), (20, "ab"), (0, "")):
        numpyro._remove_oldest_programs(tmp_path, kept)
        assert sorted(file.name[6] for file in tmp_path.glob("jit_*")) == list(left)
    assert (tmp_path / "of the user-cache").exists()


# Counts the programs that were not in the cache; jax.monitoring reports each.
PROGRAM = """
import sys
import jax
import ppl_bnn as bnn
from tests.problems import regression_data, small_network

compiled = []
jax.monitoring.register_event_listener(
    lambda name, **_: compiled.append(name) if name.endswith("/cache_misses") else None
)
bnn.enable_compilation_cache(sys.argv[1])
x, y = regression_data()
# A guide, a mode with its curvature, and chains; the other programs are of the same model by the same functions.
for method in (
    bnn.SVI(steps=200, guide="lowrank", elbo_draws=5),
    bnn.Laplace(start=bnn.MAP(steps=200)),
    bnn.NUTS(warmup=20, draws=20, chains=2),
    bnn.SMC(particles=100, runs=2),
):
    bnn.fit(small_network, x, y, method).predict(x[:5])
print("compiled", len(compiled))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    def compiled(hashes: str) -> int:
        # Python orders its sets by a number that is another one in each process.
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "cache")]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, cwd=Path.cwd()
        )
        return int(done.stdout.split()[-1])

    assert compiled("1") > 20
    assert compiled("2") == 0
