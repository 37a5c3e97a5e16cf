"""What the tests of studies share: linear algebra in one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# Loads the linear algebra of SciPy, which is another copy than that of NumPy.
import scipy.linalg  # noqa: F401
from threadpoolctl import threadpool_limits


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Linear algebra in one thread.

    The networks here are small. A step of SciPy's L-BFGS on 122 weights takes 20 times as long in two threads on two
    busy cores, because each thread waits for the other in a loop.
    """
    with threadpool_limits(limits=1, user_api="blas"):
        yield
