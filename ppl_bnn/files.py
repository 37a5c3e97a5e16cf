"""Files that appear whole, and named arrays as a file of safetensors, which is read without running what lies in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside the file and rename: a reader, or a run that is stopped, never sees half of it."""
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays by name, and words, to a file that whoever may read new files of this process may read."""
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    # By itself it leaves a file that its owner alone may read, as temporary files are.
    save_file(in_order(arrays), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)


def in_order(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays as the format wants them, row by row; their shapes stay."""
    # np.ascontiguousarray would give a number an axis.
    return {name: np.asarray(value, order="C") for name, value in arrays.items()}
