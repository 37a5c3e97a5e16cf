"""Checkpoints: the state of a fit in a folder, from which an interrupted fit continues to the same bits.

A state holds everything that the next step depends on, random number generators included.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core import stored
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.files import writable
from ppl_bnn.core.plain_values import encoded
from ppl_bnn.inference.fingerprint import identity
from ppl_bnn.inference.pretrained import is_network, weights_of

READER = stored.Reader("checkpoint", "a file that can be read", "removing it, or another folder")
# Seconds between two writes: the most work that an interruption loses.
INTERVAL = 5.0


@dataclass
class Checkpoint:
    """The latest state of one fit: arrays, and the `fingerprint` of the fit, in one file with a checksum.

    The file is replaced as a whole, so an interruption during a write leaves the previous state. Without a `path`
    nothing is kept.
    """

    path: Path | None
    fingerprint: dict[str, Any]
    _written: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, folder: Any, fingerprint: Mapping[str, Any], name: str) -> Self:
        """The checkpoint `name` in a folder, which is created; without a folder, a checkpoint that keeps nothing."""
        path = None if folder is None else writable(folder, "checkpoint") / f"{name}.safetensors"
        return cls(path, json.loads(json.dumps(dict(fingerprint))))

    def load(self) -> dict[str, np.ndarray] | None:
        """The stored arrays, or None; refuses the checkpoint of another fit, and a file without a checksum."""
        if self.path is None or not os.path.lexists(self.path):
            return None
        arrays, words = READER.sealed(self.path, ("fingerprint",))
        before = READER.json(self.path, words["fingerprint"], {str: object})
        if before != self.fingerprint:
            got = f"{self.path}, which differs in {_difference(before, self.fingerprint)}"
            advice = "the same model, data, seed and settings, or another folder"
            raise InputError.of("checkpoint", "the checkpoint of the same fit", got, advice)
        return arrays

    def keep(self, state: Callable[[], Mapping[str, np.ndarray]], last: bool = False) -> None:
        """Write what `state()` returns, if this is the `last` state or the last write was `INTERVAL` seconds ago."""
        if self.path is None or (not last and time.monotonic() - self._written < INTERVAL):
            return
        stored.write_sealed(self.path, state(), {"fingerprint": json.dumps(encoded(self.fingerprint))})
        self._written = time.monotonic()


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    found = []
    for key in now:
        old, new = before.get(key), now[key]
        if isinstance(new, Mapping) and isinstance(old, Mapping):
            found += [f"{key} {inner}" for inner in {**old, **new} if old.get(inner) != new.get(inner)]
        elif old != new:
            found.append(key)
    return ", ".join(found) or "the kinds of things that are kept"


def fingerprint(
    problem: Problem, method: Any, left_out: Sequence[str] = (), **settings: Any
) -> dict[str, Any]:
    """What a fit depends on, in plain values: settings, sites, the log joint at a point, data, seed and dtype.

    Settings in `left_out` do not change the stored arrays; `settings` are added to those of the method.
    """
    start = method.start
    if is_network(start, problem):
        start = weights_of(start, problem)
    known = method.settings() | {"start": start} | settings
    skipped = ("checkpoint", *left_out)
    program, system = problem.program, problem.system
    u = {site.name: system.asarray(np.full(site.unconstrained_shape, 0.1)) for site in program.sites.values()}
    return {
        "settings": {key: identity(value) for key, value in known.items() if key not in skipped},
        "sites": {site.name: list(site.shape) for site in program.sites.values()},
        # The log joint at a point distinguishes two models with the same sites.
        "model": repr(float(program.log_joint(u, problem.x, problem.y))),
        "data": problem.data_hash,
        "seed": problem.seed,
        "dtype": problem.dtype,
    }
