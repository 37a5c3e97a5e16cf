"""Compiled programs of JAX on disk: a second process with the same work compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
for method in (
    bnn.MAP(steps=200),
    bnn.SVI(steps=200, elbo_draws=5),
    bnn.SVI(steps=200, guide="lowrank", elbo_draws=5),
    bnn.Laplace(start=bnn.MAP(steps=200)),
    bnn.NUTS(warmup=20, draws=20, chains=2),
    bnn.MCLMC(warmup=50, draws=20, chains=2),
    bnn.IVON(steps=200),
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
