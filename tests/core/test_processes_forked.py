"""A child that is forked after a fit: it is refused by name, and does not hang."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import os, sys, warnings
    import numpy as np
    import ppl_bnn as bnn

    warnings.simplefilter("ignore")
    x = np.linspace(-1.0, 1.0, 12)[:, None]
    model, used, other = bnn.zoo.load("linear_regression"), *sys.argv[1:]
    posterior = bnn.fit(model, x, x[:, 0], bnn.MAP(ppl=used, steps=3), device="cpu")
    child = os.fork()
    if child == 0:
        for ppl in (used, other):
            try:
                bnn.fit(model, x, x[:, 0], bnn.MAP(ppl=ppl, steps=3), device="cpu")
            except bnn.errors.UnsupportedError as error:
                print(error, flush=True)
        try:
            posterior.predict(x)
        except bnn.errors.UnsupportedError as error:
            print(error, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    # The parent goes on as before.
    posterior.predict(x)
    print("parent")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks of POSIX")
def test_a_child_that_is_forked_after_a_fit_is_refused() -> None:
    # Without the refusal the child waits for ever in JAX, and the time runs out.
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), "numpyro", "pyro"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("forked from") == 3
    assert "multiprocessing.get_context('spawn')" in ended.stdout
    assert ended.stdout.endswith("parent\n")
