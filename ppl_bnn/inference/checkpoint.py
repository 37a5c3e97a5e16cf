"""Checkpoints: a fit that is interrupted is kept in a folder and continued to the same bits.

A state therefore holds everything that the next step depends on, random number generators included.
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
from ppl_bnn.core.errors import InputError, message
from ppl_bnn.core.plain_values import encoded
from ppl_bnn.inference.fingerprint import identity
from ppl_bnn.inference.pretrained import is_network, weights_of

READER = stored.Reader("checkpoint", "a file that can be read", "removing it, or another folder")
OLDER = "it has no checksum, and was written by an older version, which can go on from it"
# Seconds between two writings: what an interruption costs at most.
INTERVAL = 5.0


@dataclass
class Checkpoint:
    """The latest state of one fit: arrays, beside a fingerprint of everything that they belong to.

    Both are in one file with a checksum (`ppl_bnn.core.stored`). It is replaced as a whole, so that an interruption
    while it is written leaves the one before.
    """

    path: Path | None
    fingerprint: dict[str, Any]
    _written: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, folder: Any, fingerprint: Mapping[str, Any], name: str) -> Checkpoint:
        """The checkpoint `name` in a folder, which is made; with `folder` None one that keeps nothing.

        Raises
        ------
        InputError: a folder that cannot be written.
        """
        if folder is None:
            return cls(None, dict(fingerprint))
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK):
                raise PermissionError(f"no permission to write to {path}")
        except OSError as error:
            raise InputError(
                "checkpoint: " + message("a folder that can be written", str(error), "another folder")
            ) from error
        return cls(path / f"{name}.safetensors", json.loads(json.dumps(dict(fingerprint))))

    def load(self) -> dict[str, np.ndarray] | None:
        """The arrays that were kept, or None where nothing was.

        Raises
        ------
        InputError: a checkpoint of another fit. DamagedError: one that cannot be read, or without a checksum, as older
        versions wrote them.
        """
        if self.path is None or not os.path.lexists(self.path):
            return None
        found = READER.sealed(self.path, ("fingerprint",))
        if found is None:
            raise READER.damaged(self.path, OLDER)
        arrays, words = found
        before = READER.json(self.path, words["fingerprint"], {str: object})
        if before != self.fingerprint:
            raise InputError(
                "checkpoint: "
                + message(
                    "the checkpoint of the same fit",
                    f"{self.path}, which differs in {_difference(before, self.fingerprint)}",
                    "the same model, data, seed and settings, or another folder",
                )
            )
        return arrays

    def keep(self, state: Callable[[], Mapping[str, np.ndarray]], last: bool = False) -> None:
        """Write what `state` gives, if the last time is long enough ago, or if this is the end."""
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
    """What a fit depends on, in plain values: its settings, its sites, what the model says of a point, data and seed.

    left_out: settings that change no bit of what is kept, besides `checkpoint`. settings: those that `Method.settings`
    does not tell apart.
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
        # Two models with the same sites are told apart by what they say of a point.
        "model": repr(float(program.log_joint(u, problem.x, problem.y))),
        "data": problem.data_hash,
        "seed": problem.seed,
        "dtype": problem.dtype,
    }
