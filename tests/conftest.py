"""What all tests share: the systems, small data, and the rule that no test changes a global."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np

# Before ArviZ, which leaves a lazy module of that name: "import numpyro.distributions" makes half a package of it.
import numpyro  # noqa: F401
import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_programs() -> Iterator[None]:
    """JAX keeps what it compiles in a folder of this process, for as long as the tests run.

    Tests bind the same few models over and over, and each binding is a function of its own to JAX: without this it
    compiles the same program once for each of them. What a fit does is not changed by where its program comes from.
    """
    import jax

    with tempfile.TemporaryDirectory(prefix="ppl-bnn-tests-") as folder:
        # Many short runs over the same programs, as in planted_faults.py, share a folder.
        jax.config.update("jax_compilation_cache_dir", os.environ.get("PPL_BNN_TESTS_COMPILED", folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        yield


@pytest.fixture(scope="module")
def matrix() -> Iterator[ModuleType]:
    """The study that fits the whole zoo: it has small data for each model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "comparisons"))
        yield importlib.import_module("zoo_matrix")


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
