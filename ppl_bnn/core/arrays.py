"""Helpers for arrays and dicts of arrays: rows, chunks, seeds."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from ppl_bnn.core.errors import UnsupportedError

Array = Any


def map_data(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to an array, or to each array of a dict of inputs."""
    return {name: function(value) for name, value in x.items()} if isinstance(x, Mapping) else function(x)


def describe_shapes(x: Any) -> str:
    """Description of the shapes of an array, a dict of arrays, or None, for messages."""
    return repr(None if x is None else map_data(lambda a: (tuple(a.shape), str(a.dtype)), x))


def ravel(u: Mapping[str, Any], names: Iterable[str] | None = None, lead: int = 0) -> np.ndarray:
    """The arrays `u[name]` side by side, (..., P); their first `lead` axes, which they share, are kept."""
    values = [np.asarray(u[name]) for name in (u if names is None else names)]
    return np.concatenate([value.reshape(*value.shape[:lead], -1) for value in values], axis=-1)


def unravel(flat: Array, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """The inverse of `ravel`, for arrays of NumPy or of a system; leading axes of `flat` are kept."""
    u, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        u[name] = flat[..., start:stop].reshape((*flat.shape[:-1], *shape))
        start = stop
    return u


def unprefixed(arrays: Mapping[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    """The arrays whose names begin with `part/`, by the rest of their names."""
    prefix = f"{part}/"
    names = (name for name in arrays if name.startswith(prefix))
    return {name.removeprefix(prefix): np.array(arrays[name]) for name in names}


def arrays_of(record: Any, but: Collection[str] = ()) -> dict[str, np.ndarray]:
    """The arrays of the fields of a dataclass, for storage, and those of dicts as "<field>/<number>/<key>".

    The numbers keep the order of a dict in a file that has none. A field that is None is absent. Fields named in `but`
    are left out; any other value is an UnsupportedError, so that nothing is lost silently.
    """
    found = {}
    for name in (each.name for each in fields(record) if each.name not in but):
        value = getattr(record, name)
        if isinstance(value, Mapping):
            parts = enumerate(value.items())
            found |= {f"{name}/{index:04d}/{key}": np.asarray(part) for index, (key, part) in parts}
        elif value is not None:
            expected, got = "an array or a dict of arrays, to be stored", type(value).__name__
            good, where = isinstance(value, np.ndarray | np.generic), f"{type(record).__name__}.{name}"
            UnsupportedError.check(
                good, where, expected, got, "methods `arrays` and `from_arrays` of its own"
            )
            found[name] = np.asarray(value)
    return found


def fields_in(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The inverse of `arrays_of`: the values of fields."""
    found: dict[str, Any] = {}
    for path in sorted(arrays):
        name, _, rest = path.partition("/")
        if rest:
            found.setdefault(name, {})[rest.split("/", 1)[1]] = np.asarray(arrays[path])
        else:
            found[name] = np.asarray(arrays[path])
    return found


def row_count(x: Any) -> int:
    """The number of rows of an array or of a dict of arrays."""
    return len(next(iter(x.values()))) if isinstance(x, Mapping) else len(x)


def wide(array: np.ndarray) -> np.ndarray:
    """The same numbers as float64, or as int64 if they are whole numbers or truth values."""
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64, copy=False)


def whole(array: np.ndarray) -> np.ndarray:
    """The array, with whole numbers of 8 or 16 bits as int64, whose differences do not wrap around."""
    narrow = array.dtype.kind in "iu" and array.dtype.itemsize < 4
    return array.astype(np.int64) if narrow else array


def rows_at(x: Any, index: Any) -> Any:
    """NumPy: some rows of an array or of each array of a dict, as float64 or int64, also if they lie in a file."""
    return map_data(lambda a: wide(np.asarray(a[index])), x)


def on_cpu(array: Array) -> bool:
    """Whether an array is on the CPU."""
    return "cpu" in str(getattr(array, "device", "cpu")).lower()


def cores() -> int:
    """Number of cores available to this process, which a container or a scheduler may restrict."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Ends (start, stop) of consecutive chunks of at most `size` of a range of length `total`."""
    for start in range(0, total, size):
        yield start, min(start + size, total)


def padded(array: np.ndarray, size: int) -> np.ndarray:
    """Pad the last chunk to the common size by repeating its first entry, so that nothing is compiled a second time."""
    missing = size - len(array)
    return array if missing == 0 else np.concatenate([array, np.repeat(array[:1], missing, axis=0)])


def power_of_two(size: int) -> int:
    """The least power of two that is not below the size: sizes that are padded to it share a compiled program."""
    return 1 << (size - 1).bit_length()


def iterate_seeds(seeds: Any) -> Iterator[Any]:
    """Iterate over seeds."""
    for index in range(len(seeds)):
        yield seeds[index]


def site_seed(name: str, seed: int) -> int:
    """A separate seed for each name of a site or of a purpose, from a common seed."""
    return zlib.crc32(f"{name}:{seed}".encode())
