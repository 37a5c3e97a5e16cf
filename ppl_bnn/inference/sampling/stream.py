"""Draws and state of a chain, written to disk while it runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core import stored
from ppl_bnn.inference.checkpoint import INTERVAL, OLDER, Checkpoint

Arrays = dict[str, np.ndarray]
# A state and the draws before it, along axis 1.
Kept = tuple[Arrays, Arrays]
_READER = stored.Reader("checkpoint", "all pieces of its draws", "another folder, or removing this one")


@dataclass
class Stream:
    """Transitions in a folder: pieces of draws, one file each, and the state after the last piece.

    Each file has its own checksum, so that a long run never reads its earlier files. A piece, named by its first draw,
    is written before the state that follows it. An interruption between the two only leaves a piece that is replaced by
    the same draws.
    """

    checkpoint: Checkpoint
    name: str
    _written: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, folder: Any, fingerprint: Mapping[str, Any], name: str) -> Stream:
        """The stream `name` in a folder, which is created."""
        return cls(Checkpoint.of(folder, fingerprint, name), name)

    @property
    def path(self) -> Path:
        """The file of the state."""
        assert self.checkpoint.path is not None
        return self.checkpoint.path

    @property
    def begun(self) -> bool:
        """Whether anything was written."""
        return self.path.exists()

    @property
    def due(self) -> bool:
        """Whether the last write was long enough ago."""
        return time.monotonic() - self._written >= INTERVAL

    def load(self) -> Kept | None:
        """The last written state and draws (along axis 1), or None; refuses a stream of another fit."""
        state = self.checkpoint.load()
        if state is None:
            return None
        count = state.pop("draws_written", np.array("none"))
        if count.shape != () or count.dtype.kind not in "iu" or count < 0:
            raise _READER.damaged(self.path, "draws_written is no number of draws")
        pieces: list[Arrays] = []
        have = 0
        while have < count:
            pieces.append(self._read(have, pieces[0] if pieces else None))
            have += next(iter(pieces[-1].values())).shape[1]
        names = pieces[0] if pieces else {}
        return state, {
            name: np.concatenate([piece[name] for piece in pieces], 1)[:, :count] for name in names
        }

    def write(self, first: int, draws: Arrays, state: Arrays) -> None:
        """Write `draws`, (chains, count, ...) from draw `first` on, and the state after them."""
        count = next(iter(draws.values())).shape[1] if draws else 0
        if count:
            stored.write_sealed(self._path(first), draws, self._words(first))
        written = {**state, "draws_written": np.array(first + count)}
        self.checkpoint.keep(lambda: written, last=True)
        self._written = time.monotonic()

    def _path(self, first: int) -> Path:
        return self.path.parent / f"{self.name}-draws-{first:08d}.safetensors"

    def _words(self, first: int) -> dict[str, str]:
        """The identity of a piece: fit, chain and first draw."""
        of = hashlib.sha256(json.dumps(self.checkpoint.fingerprint, sort_keys=True).encode()).hexdigest()
        return {"fit": of, "stream": self.name, "first": str(first)}

    def _read(self, first: int, like: Arrays | None) -> Arrays:
        """Read the piece that begins with draw `first`; `like` is another piece of the run."""
        file, words = self._path(first), self._words(first)
        found = _READER.sealed(file, tuple(words))
        if found is None:
            raise _READER.damaged(file, OLDER)
        piece, found_words = found
        if found_words != words:
            raise _READER.damaged(file, "it is a piece of another run, or from another place of this one")
        counts = {value.shape[1] if value.ndim > 1 else 0 for value in piece.values()}
        if len(counts) != 1 or 0 in counts:
            raise _READER.damaged(file, "its arrays are not of the same number of draws")

        def kinds(arrays: Arrays) -> dict[str, Any]:
            return {name: (value.dtype, value.shape[:1], value.shape[2:]) for name, value in arrays.items()}

        if like is not None and kinds(piece) != kinds(like):
            raise _READER.damaged(file, "its arrays are not those of the pieces before")
        return piece
