"""Files that appear whole, and named arrays as a file of safetensors, which is read without running what lies in it."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside the file and rename: a reader, or a run that is stopped, never sees half of it.

    Of several who write one file at a time each writes a part of its own, and the last to end has written the file.
    """
    part = part_of(path)
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def part_of(path: Path) -> Path:
    """A name beside a file, of the same ending, that nobody else takes: what is there before it is whole."""
    return path.with_name(f".{path.stem}.part-{os.getpid()}-{uuid.uuid4().hex[:8]}{path.suffix}")


def regular(path: Path) -> Path:
    """The path, if it is a regular file that lies where it seems to. Errors: OSError, ValueError."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        try:
            target = path.resolve(strict=True)
        except RuntimeError as error:
            raise ValueError("a link that leads to itself") from error
        if not target.is_relative_to(path.parent.resolve()):
            raise ValueError("a link that leads out of its folder")
        found = os.stat(target)
    # Opening a FIFO waits for ever, and a device has no end.
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("no regular file")
    return path


def bounded(path: Path, most: int) -> bytes:
    """The content of a file of at most so many bytes. Errors: OSError, ValueError."""
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most} bytes")
    return content


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays by name, and words, to a file that whoever may read new files of this process may read."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    # By itself it leaves a file that its owner alone may read, as temporary files are.
    try:
        save_file(in_order(arrays), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        # Where a disk is full it does not say so by the class that everything else has for it.
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(mode)


def write_tree(path: Path, tree: Any) -> None:
    """Write a DataTree as netCDF.

    It is made in memory first: where HDF5 itself cannot write to a file, as on a full disk, the process ends in a
    segmentation fault when the file is closed.
    """
    path.write_bytes(tree.to_netcdf(engine="h5netcdf"))


def in_order(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays as the format wants them, row by row; their shapes stay."""
    # np.ascontiguousarray would give a number an axis.
    return {name: np.asarray(value, order="C") for name, value in arrays.items()}
