"""What all tests share: the systems, small data, and the rule that no test changes a global."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

# Before ArviZ, which leaves a lazy module of that name: "import numpyro.distributions" makes half a package of it.
import numpyro  # noqa: F401
import pytest

# The folder of the programs that JAX has compiled. Several runs over the same programs, as in .ci/run, may share one.
COMPILED = "PPL_BNN_TESTS_COMPILED"


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of compiled programs, which the processes of this run inherit."""
    if COMPILED not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="ppl-bnn-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[COMPILED] = folder.name
    # There is a process for each core. On small matrices a second thread of linear algebra saves no time, and waits for
    # the first one in a loop, on the core of another process.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # For the processes that tests start.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ[COMPILED]
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # Programs of tests run for milliseconds, and compiling them is most of the time: most optimisations cost more.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The code of the guide is one test of minutes. It begins first: in its place at the end other cores would wait."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture(scope="session", autouse=True)
def compiled_programs() -> None:
    """JAX keeps what it compiles in a folder that all processes of the tests share.

    Tests bind the same few models over and over, and each binding is a function of its own to JAX: without this it
    compiles the same program once for each of them. What a fit does is not changed by where its program comes from.
    """
    import jax

    import ppl_bnn as bnn

    bnn.enable_compilation_cache(os.environ[COMPILED])
    # JAX looks at all files when it adds one, and the tests have thousands of small programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def optimised() -> Iterator[None]:
    """For a test whose programs run for longer than it takes to optimise them."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def matrix() -> Iterator[ModuleType]:
    """The study that fits the whole zoo: it has small data for each model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "comparisons"))
        yield importlib.import_module("zoo_matrix")


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The programs that JAX compiles while the fixture is in use, one name for each."""
    import jax

    found: list[str] = []

    def seen(name: str, seconds: float, **_: Any) -> None:
        if name.endswith("/backend_compile_duration"):
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(seen)
    yield found
    jax.monitoring.unregister_event_duration_listener(seen)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture(params=["numpyro", "pyro"])
def ppl(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def double_by_default() -> Iterator[None]:
    """What is written by hand in torch or Pyro has torch's default type, which a session leaves alone."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
