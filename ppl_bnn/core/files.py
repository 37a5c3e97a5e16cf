"""Files and folders that appear whole, and named arrays as a file of safetensors, which is read without running what
lies in it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
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


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, which takes its place at the end.

    Where anything is raised meanwhile, `path` is what it was. A process that is killed between the two renames leaves
    the old folder whole, under a name that `left_by_a_kill` finds. Errors: OSError.
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
    """Rename into place; the folder that was there is removed only once the new one is in its place."""
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
    """A new folder inside `folder`, whose files take the place of the files `own` of it; all else is left alone.

    For a folder with other things in it, or one that cannot be renamed. `last` is the file without which the others do
    not count: it is removed first and appears last. Where anything is raised meanwhile, all files are what they were. A
    process that is killed while files are renamed leaves the old ones whole, in a folder that `left_by_a_kill` finds.
    Errors: OSError.
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
            _link(folder / name, old / name)
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
        # Where not even what was there could be put back, it stays where it is whole.
        if not changed:
            shutil.rmtree(old, ignore_errors=True)


def _link(path: Path, second: Path) -> None:
    """The same file under a second name, or a copy where the file system has no such names."""
    try:
        os.link(path, second)
    except OSError:
        shutil.copy2(path, second)


def left_by_a_kill(path: Path) -> Path | None:
    """The folder that `staged` or `staged_within` moved away, where the process was killed before the new one came."""
    path = path.absolute()
    pattern = f".{glob.escape(path.name)}.*.old"
    left = sorted([*path.parent.glob(pattern), *path.glob(pattern)])
    return left[-1] if left else None


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
