"""Engines that run independent tasks: this machine's processes (`workers.py`), Dask or Ray clusters (`clusters.py`).

Processes of this machine are started for each call and never forked, since the threads of XLA and torch do not survive
a fork. Each has a share of the cores, a memory limit and one GPU, if there are any, and ends with its parent. They
share functions compiled by JAX in JAX_COMPILATION_CACHE_DIR, else in the cache of this process if it has one
(`enable_compilation_cache`), else in a temporary folder.

If the head of a cluster ends, the call ends in a `ClusterError` after returning what was finished: within seconds if
connections are refused, within minutes if Ray does not answer. Ray's server for clients ("ray://HOST:PORT") forks while
gRPC's threads run. The child is sometimes aborted, and the client cannot connect: start the head with
GRPC_ENABLE_FORK_SUPPORT=0.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ppl_bnn.backends.protocol import resolve_device
from ppl_bnn.core.errors import DeviceError, InputError, MissingFrameworkError, unknown_name
from ppl_bnn.core.processes import machine_memory
from ppl_bnn.core.settings import whole
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.evaluation.grid import clusters, ray_driver
from ppl_bnn.evaluation.grid.clusters import Lost as Lost
from ppl_bnn.evaluation.grid.workers import Share, on_processes

KINDS = ("local", "sequential", "dask", "ray")
# Memory of a process with a system, its compiler and a small model.
USUAL_MEMORY = 2 * 2**30
# The share of the machine's memory that all processes together may use.
SHARE = 0.9
# Kind of a cluster -> its package, what installs it, its usual port, and how to connect.
_CLUSTERS: dict[str, tuple[str, str, int, Callable[[str, str], Any]]] = {
    "dask": ("distributed", "ppl-bnn[dask]", 8786, clusters.on_dask),
    "ray": ("ray", "ppl-bnn[ray]", 10001, ray_driver.on_ray),
}


@dataclass(frozen=True)
class Engine:
    """Where tasks are computed: one of `KINDS`, and the address of a cluster as its client expects it."""

    kind: str
    address: str = ""

    @classmethod
    def of(cls, word: str) -> Engine:
        """The engine "local", "sequential", "dask://HOST:PORT", "ray://HOST:PORT" or "ray://auto" (on this machine).

        Raises UnknownNameError, InputError for a cluster without an address, and MissingFrameworkError.
        """
        kind, mark, address = str(word).partition("://")
        if kind not in KINDS:
            raise unknown_name("engine", word, ("local", "sequential", "dask://HOST:PORT", "ray://HOST:PORT"))
        if kind not in _CLUSTERS:
            InputError.check(not mark, "engine", kind, repr(word), f"engine={kind!r}")
            return cls(kind)
        package, extra, port, _ = _CLUSTERS[kind]
        if not re.fullmatch(r"(\w+://)?[^/:\s]+:\d+" + ("|auto" if kind == "ray" else ""), address):
            advice = f"engine='{kind}://127.0.0.1:{port}'"
            raise InputError.of("engine", f"{kind}://HOST:PORT", repr(word), advice)
        advice = f"pip install '{extra}', or engine='local'"
        if importlib.util.find_spec(package) is None:
            raise MissingFrameworkError.of("engine", f"the package {package} for {word}", "none", advice)
        return cls(kind, address)

    def __str__(self) -> str:
        return f"{self.kind}://{self.address}" if self.address else self.kind


def share(jobs: int | None = None, device: str = "auto", memory: int | None = None) -> tuple[int, Share]:
    """The number of processes on this machine, and the resources of each.

    Default: one process per GPU if the work goes to GPUs, else as many as cores and memory allow. The cores, and 90 %
    of the memory of the machine or its container, are divided evenly.
    """
    import joblib

    for name, value, least in (("jobs", jobs, 1), ("memory", memory, 2**20)):
        if value is not None and (expected := whole(least)(value)):
            raise InputError.of(name, expected, repr(value), f"{name}=None")
    cores, available = joblib.cpu_count(), machine_memory()
    found = gpus()
    kind, index = resolve_device(device)
    expected = f"a CUDA device for device={device!r}"
    there, got = kind != "cuda" or (index or 0) < len(found), f"{len(found)} of them"
    DeviceError.check(there, "", expected, got, "device='cpu' or 'auto'")
    if index is not None:
        found = (found[index],)
    used = () if kind == "cpu" else found or None
    if jobs is None:
        room = cores if available is None else int(SHARE * available // USUAL_MEMORY)
        jobs = len(used) if used else max(1, min(cores, room))
    if memory is None and available is not None:
        memory = int(SHARE * available / jobs)
    return jobs, Share(max(1, cores // jobs), memory, used)


def gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs that this process may see, as in CUDA_VISIBLE_DEVICES, found without importing a framework."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        found = [word.strip() for word in named.split(",") if word.strip()]
        # CUDA reads the list up to the first invalid entry.
        return tuple(found[: found.index("-1")] if "-1" in found else found)
    folder = Path("/proc/driver/nvidia/gpus")
    return tuple(str(index) for index in range(len(list(folder.iterdir())))) if folder.is_dir() else ()


def device_inside(engine: Engine, device: str) -> str:
    """Name of `device` inside the process that does the work: another process sees only its own GPU, as the first."""
    kind, _ = resolve_device(device)
    return device if engine.kind == "sequential" or kind != "cuda" else kind


def check(engine: Engine, jobs: int | None = None, device: str = "auto", memory: int | None = None) -> None:
    """Raise at once the errors that `outcomes` would raise: invalid numbers or GPUs, a cluster that does not answer."""
    if engine.kind == "local":
        share(jobs, device, memory)
        return
    resolve_device(device)
    share(jobs)
    if engine.kind == "sequential" and jobs not in (None, 1):
        raise InputError.of("jobs", "one at a time in this process", repr(jobs), "engine='local'")
    expected = f"no limit on {engine.kind}, which has its own"
    InputError.check(memory is None, "memory", expected, repr(memory), "memory=None")
    if engine.address and engine.address != "auto" and (error := clusters.not_reached(engine.address)):
        got = f"{engine}: {error}"
        raise InputError.of("engine", "a cluster that answers", got, "its scheduler's address") from error


def outcomes(
    engine: Engine,
    function: Callable[..., Any],
    tasks: Sequence[tuple[Any, ...]],
    *,
    jobs: int | None = None,
    device: str = "auto",
    memory: int | None = None,
) -> Generator[tuple[int, Any], None, None]:
    """Yield (number of the task, `function(*task)`) for each of the tasks, as they finish.

    A task whose process ended is tried again: once on this machine, up to three times on a cluster, the last time
    alone. Then its result is `Lost`. An error of `function` ends everything and is raised here. Function and arguments
    must be picklable. `jobs`, `device` and `memory` (bytes per process) are as in `share`.

    Raises InputError for a cluster that does not answer, has no process, or has processes of several threads (a fit
    sets globals of torch and JAX), and ClusterError for one that ended during the call.
    """
    check(engine, jobs, device, memory)
    numbered = dict(enumerate(tasks))
    if engine.kind == "sequential":
        yield from ((number, function(*task)) for number, task in numbered.items())
    elif engine.kind == "local":
        connect = partial(on_processes, *share(jobs, device, memory))
        yield from clusters.computed(connect, "local", function, numbered, None, tries=2)
    else:
        connect = partial(_CLUSTERS[engine.kind][-1], engine.address, device)
        with ignored("Sending large graph", everywhere=True):
            yield from clusters.computed(connect, str(engine), function, numbered, jobs)
