"""Atomic writing of files and folders, and named arrays as safetensors files, which are read without executing code."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file atomically: `write` gets the path of a temporary file beside it, which is then renamed.

    Of several processes that write the same file, the last one to finish determines the content.
    """
    part = part_of(path)
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def part_of(path: Path) -> Path:
    """A unique name beside a file, with the same extension, for its temporary file."""
    return path.with_name(f".{path.stem}.part-{os.getpid()}-{uuid.uuid4().hex[:8]}{path.suffix}")


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, which replaces it at the end of the block; after an error `path` is unchanged.

    A process that is killed between the two renames leaves the old folder complete (see `left_by_a_kill`).
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = path.parent / _beside(path, "partial")
    stage.mkdir()
    try:
        yield stage
        _put_in_place(stage, path)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _beside(path: Path, ending: str) -> str:
    return f".{path.name}.{uuid.uuid4().hex[:8]}.{ending}"


def _put_in_place(stage: Path, path: Path) -> None:
    """Rename into place. The old folder is removed only after the new one is in its place."""
    if not path.exists():
        stage.rename(path)
        return
    shutil.copymode(path, stage)
    old = stage.with_suffix(".old")
    try:
        path.rename(old)
        stage.rename(path)
    except BaseException:
        if not os.path.lexists(path):
            old.rename(path)
        raise
    finally:
        if os.path.lexists(path):
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def staged_within(folder: Path, own: Collection[str], last: str) -> Iterator[Path]:
    """A new folder inside `folder`, whose files replace the files `own` of it at the end of the block.

    For a folder that has other files, or that cannot be renamed. `last` is the file without which the others are not
    valid: it is removed first and appears last. After an error all files are unchanged. A process that is killed during
    the renames leaves the old files complete in a folder that `left_by_a_kill` finds.
    """
    stage = folder / _beside(folder, "partial")
    stage.mkdir()
    old = stage.with_suffix(".old")
    changed = False
    try:
        yield stage
        new = sorted((entry.name for entry in stage.iterdir()), key=last.__eq__)
        old.mkdir()
        for name in own:
            try:
                os.link(folder / name, old / name)
            except OSError:
                # The file system has no hard links.
                shutil.copy2(folder / name, old / name)
        try:
            changed = True
            (folder / last).unlink(missing_ok=True)
            for name in set(own) - {*new, last}:
                (folder / name).unlink()
            for name in new:
                os.replace(stage / name, folder / name)
            changed = False
        except BaseException:
            for name in set(new) - set(own):
                (folder / name).unlink(missing_ok=True)
            for name in sorted(own, key=last.__eq__):
                os.replace(old / name, folder / name)
            changed = False
            raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        # If the old files could not be put back, the folder that holds them is kept.
        if not changed:
            shutil.rmtree(old, ignore_errors=True)


def left_by_a_kill(path: Path) -> Path | None:
    """The old folder of `staged` or `staged_within`, if the process was killed before the new one was in place."""
    path = path.absolute()
    pattern = f".{glob.escape(path.name)}.*.old"
    return max([*path.parent.glob(pattern), *path.glob(pattern)], default=None)


def writable(folder: str | os.PathLike[str], argument: str = "out") -> Path:
    """The folder, created if needed, after writing and removing a test file; `argument` is named in the error."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe-") as probe:
            probe.write(b"0")
    except OSError as error:
        got = f"{path} ({type(error).__name__}: {error.strerror or error})"
        raise InputError.of(argument, "a folder that can be written", got, "another folder") from error
    return path


def regular(path: Path) -> Path:
    """The path, if it is a regular file that no link leads out of its folder. Raises OSError or ValueError."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        try:
            target = path.resolve(strict=True)
        except RuntimeError as error:
            raise ValueError("a link that leads to itself") from error
        if not target.is_relative_to(path.parent.resolve()):
            raise ValueError("a link that leads out of its folder")
        found = os.stat(target)
    # Opening a FIFO blocks, and a device has no end.
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("no regular file")
    return path


def bounded(path: Path, most: int) -> bytes:
    """The content of a file of at most `most` bytes; a larger one is a ValueError."""
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most} bytes")
    return content


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named arrays, and text metadata, to a file with the usual permissions of new files of this process."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    # safetensors by itself creates a file that only its owner can read, like a temporary file.
    try:
        save_file(in_order(arrays), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        # On a full disk safetensors raises its own error class instead of OSError.
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(mode)


def write_tree(path: Path, tree: Any) -> None:
    """Write a DataTree as netCDF, made in memory first: on a full disk HDF5 itself ends in a segmentation fault."""
    path.write_bytes(tree.to_netcdf(engine="h5netcdf"))


def in_order(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays in C order, which the format requires. Their shapes do not change."""
    # np.ascontiguousarray would add an axis to a scalar.
    return {name: np.asarray(value, order="C") for name, value in arrays.items()}
