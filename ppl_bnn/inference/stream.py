"""Draws of a chain, written to disk while it runs, and where it stood when they were last written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.errors import InputError, message
from ppl_bnn.files import write_arrays, write_whole
from ppl_bnn.inference.checkpoint import INTERVAL, Checkpoint

Arrays = dict[str, np.ndarray]


@dataclass
class Stream:
    """A run of transitions in a folder: pieces of draws, each a file of its own, and the state after the last of them.

    A piece is named by the number of its first draw and written before the state that follows it. So an interruption
    between the two leaves a state whose draws are all there, and a piece that the same draws will replace.
    """

    checkpoint: Checkpoint
    name: str
    _written: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, folder: Any, fingerprint: Mapping[str, Any], name: str) -> Stream:
        """The stream `name` in a folder, which is made; with `folder` None one that keeps nothing."""
        return cls(Checkpoint.of(folder, fingerprint, name), name)

    @property
    def keeps(self) -> bool:
        """Whether there is a folder at all."""
        return self.checkpoint.path is not None

    @property
    def begun(self) -> bool:
        """Whether anything was written."""
        return self.checkpoint.path is not None and self.checkpoint.path.exists()

    @property
    def due(self) -> bool:
        """Whether the last writing is long enough ago."""
        return self.keeps and time.monotonic() - self._written >= INTERVAL

    def load(self) -> tuple[Arrays, Arrays] | None:
        """(state, draws along axis 1) as they were last written; None where nothing was.

        Raises
        ------
        InputError: a stream of another fit, or one with a piece missing.
        """
        state = self.checkpoint.load()
        if state is None:
            return None
        wanted = int(state.pop("draws_written"))
        pieces: list[Arrays] = []
        count = 0
        while count < wanted:
            piece = self._read(self._path(count))
            pieces.append(piece)
            count += next(iter(piece.values())).shape[1]
        joined = (
            {name: np.concatenate([piece[name] for piece in pieces], 1)[:, :wanted] for name in pieces[0]}
            if pieces
            else {}
        )
        return state, joined

    def write(self, first: int, draws: Arrays, state: Arrays) -> None:
        """Keep `draws`, (chains, count, ...) from draw number `first` on, and the state after them."""
        if not self.keeps:
            return
        count = next(iter(draws.values())).shape[1] if draws else 0
        if count:
            write_whole(self._path(first), lambda path: write_arrays(path, draws))
        written = {**state, "draws_written": np.array(first + count)}
        self.checkpoint.keep(lambda: written, last=True)
        self._written = time.monotonic()

    def _path(self, first: int) -> Path:
        assert self.checkpoint.path is not None
        return self.checkpoint.path.parent / f"{self.name}-draws-{first:08d}.safetensors"

    def _read(self, path: Path) -> Arrays:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise InputError(
                "checkpoint: "
                + message(
                    "all pieces of its draws", f"{path}: {error}", "another folder, or removing this one"
                )
            ) from error
