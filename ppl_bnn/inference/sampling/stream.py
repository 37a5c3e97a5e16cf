"""Draws and state of a chain, written to disk while it runs."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core import stored
from ppl_bnn.inference.checkpoint import INTERVAL, Checkpoint

Arrays = dict[str, np.ndarray]
# A state and the draws before it, along axis 1.
Kept = tuple[Arrays, Arrays]
_READER = stored.Reader("checkpoint", "all pieces of its draws", "another folder, or removing this one")


@dataclass
class Stream(Checkpoint):
    """Transitions in a folder: pieces of draws, one file each, and the state after the last piece, as a checkpoint.

    Each file has its own checksum, so that a long run never reads its earlier files. A piece, named by its first draw,
    is written before the state that follows it. An interruption between the two only leaves a piece that is replaced by
    the same draws.
    """

    # There is always a folder.
    path: Path  # type: ignore[assignment]

    @property
    def name(self) -> str:
        """The name of the stream in its folder."""
        return self.path.stem

    @property
    def begun(self) -> bool:
        """Whether anything was written."""
        return self.path.exists()

    @property
    def due(self) -> bool:
        """Whether the last write was long enough ago."""
        return time.monotonic() - self._written >= INTERVAL

    def resume(self) -> Kept | None:
        """The last written state and draws (along axis 1), or None; refuses a stream of another fit."""
        state = self.load()
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
            file, words = self._piece(first)
            stored.write_sealed(file, draws, words)
        self.keep(lambda: {**state, "draws_written": np.array(first + count)}, last=True)

    def _piece(self, first: int) -> tuple[Path, dict[str, str]]:
        """The file of the piece from draw `first` on, and its identity: fit, chain and first draw."""
        of = hashlib.sha256(json.dumps(self.fingerprint, sort_keys=True).encode()).hexdigest()
        file = self.path.with_name(f"{self.name}-draws-{first:08d}.safetensors")
        return file, {"fit": of, "stream": self.name, "first": str(first)}

    def _read(self, first: int, like: Arrays | None) -> Arrays:
        """Read the piece that begins with draw `first`; `like` is another piece of the run."""
        file, words = self._piece(first)
        piece, found_words = _READER.sealed(file, tuple(words))
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
