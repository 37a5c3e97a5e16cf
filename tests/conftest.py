"""What all tests share: the systems, small data, and the rule that no test changes a global."""

from __future__ import annotations

import numpy as np

# Before ArviZ, which leaves a lazy module of that name: "import numpyro.distributions" makes half a package of it.
import numpyro  # noqa: F401
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture(params=["numpyro", "pyro"])
def ppl(request: pytest.FixtureRequest) -> str:
    return request.param
