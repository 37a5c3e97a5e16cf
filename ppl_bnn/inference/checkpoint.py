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
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core import stored
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.files import writable
from ppl_bnn.core.plain_values import encoded
from ppl_bnn.inference.fingerprint import identity
from ppl_bnn.inference.pretrained import is_network, weights_of

READER = stored.Reader("checkpoint", "a file that can be read", "removing it, or another folder")
OLDER = "it has no checksum, and was written by an older version, which can go on from it"
# Seconds between two writes: the most work that an interruption loses.
INTERVAL = 5.0


@dataclass
class Checkpoint:
    """The latest state of one fit: arrays, and a fingerprint of the fit that they belong to.

    Both are in one file with a checksum (`ppl_bnn.core.stored`). The file is replaced as a whole, so an interruption
    during a write leaves the previous state.

    Attributes
    ----------
    path : Path or None
        The file; None for a checkpoint that keeps nothing.
    fingerprint : dict
        What the fit depends on, in plain values (see `fingerprint`).
    """

    path: Path | None
    fingerprint: dict[str, Any]
    _written: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, folder: Any, fingerprint: Mapping[str, Any], name: str) -> Checkpoint:
        """The checkpoint `name` in a folder.

        Parameters
        ----------
        folder : path or None
            The folder, created if it does not exist. None gives a checkpoint that keeps nothing.
        fingerprint : mapping
            What the fit depends on.
        name : str
            The name of the file, without its extension.

        Returns
        -------
        Checkpoint
            The checkpoint.

        Raises
        ------
        InputError
            The folder cannot be written.
        """
        if folder is None:
            return cls(None, dict(fingerprint))
        return cls(
            writable(folder, "checkpoint") / f"{name}.safetensors", json.loads(json.dumps(dict(fingerprint)))
        )

    def load(self) -> dict[str, np.ndarray] | None:
        """Read the stored state.

        Returns
        -------
        dict of str to ndarray, or None
            The arrays; None if nothing is stored.

        Raises
        ------
        InputError
            The checkpoint belongs to another fit.
        DamagedError
            The file cannot be read, or has no checksum (written by an older version).
        """
        if self.path is None or not os.path.lexists(self.path):
            return None
        found = READER.sealed(self.path, ("fingerprint",))
        if found is None:
            raise READER.damaged(self.path, OLDER)
        arrays, words = found
        before = READER.json(self.path, words["fingerprint"], {str: object})
        if before != self.fingerprint:
            raise InputError.of(
                "checkpoint",
                "the checkpoint of the same fit",
                f"{self.path}, which differs in {_difference(before, self.fingerprint)}",
                "the same model, data, seed and settings, or another folder",
            )
        return arrays

    def keep(self, state: Callable[[], Mapping[str, np.ndarray]], last: bool = False) -> None:
        """Write the state, if the last write was at least `INTERVAL` seconds ago or this is the last state.

        Parameters
        ----------
        state : callable
            Returns the arrays; called only if they are written.
        last : bool, default False
            Whether this is the last state, which is always written.
        """
        if self.path is None or (not last and time.monotonic() - self._written < INTERVAL):
            return
        stored.write_sealed(self.path, state(), {"fingerprint": json.dumps(encoded(self.fingerprint))})
        self._written = time.monotonic()


def _difference(before: Any, now: Mapping[str, Any]) -> str:
    if not isinstance(before, Mapping):
        return "all that is known of it"
    found = []
    for key in now:
        if before.get(key) == now[key]:
            continue
        if isinstance(now[key], Mapping) and isinstance(before.get(key), Mapping):
            found += [
                f"{key} {inner}"
                for inner in {**before[key], **now[key]}
                if before[key].get(inner) != now[key].get(inner)
            ]
        else:
            found.append(key)
    return ", ".join(found) or "the kinds of things that are kept"


def fingerprint(
    problem: Problem, method: Any, left_out: Sequence[str] = (), **settings: Any
) -> dict[str, Any]:
    """What a fit depends on, in plain values: settings, sites, the log joint at a point, data, seed and dtype.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    method : Method
        The method.
    left_out : sequence of str
        Settings that do not change the stored arrays, besides `checkpoint`.
    **settings
        Settings that `Method.settings` does not distinguish.

    Returns
    -------
    dict
        The fingerprint.
    """
    start = method.start
    if is_network(start, problem):
        start = weights_of(start, problem)
    known = method.settings() | {"start": start} | settings
    program, system = problem.program, problem.system
    u = {site.name: system.asarray(np.full(site.unconstrained_shape, 0.1)) for site in program.sites.values()}
    return {
        "settings": {
            key: identity(value) for key, value in known.items() if key not in ("checkpoint", *left_out)
        },
        "sites": {site.name: list(site.shape) for site in program.sites.values()},
        # The log joint at a point distinguishes two models with the same sites.
        "model": repr(float(program.log_joint(u, problem.x, problem.y))),
        "data": problem.data_hash,
        "seed": problem.seed,
        "dtype": problem.dtype,
    }
