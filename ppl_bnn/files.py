"""Files that appear whole, and named arrays as a file of safetensors, which is read without running what lies in it."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.errors import InputError, UnsupportedError, message


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


def read_manifest(file: Path, kind: str, newest: int) -> dict[str, Any] | None:
    """The JSON manifest of a folder; None where there is no such file.

    kind: what it has to say that it is of, under "kind". newest: the format that is known.

    Raises
    ------
    InputError: a manifest of something else, or damaged. UnsupportedError: one of a newer format.
    """
    try:
        words = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError("folder: " + message(f"a manifest, {file}", str(error), "another folder")) from error
    if not isinstance(words, dict) or words.get("kind") != kind:
        raise InputError(
            "folder: " + message(f"the manifest of a {kind}", f"{file}, of something else", "another folder")
        )
    if words.get("format", 0) > newest:
        raise UnsupportedError(
            "folder: " + message(f"format {newest}", f"format {words['format']}", "a newer ppl-bnn")
        )
    return words


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
