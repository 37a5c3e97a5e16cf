"""Safety checks of netCDF files: references to anything outside the file, and claimed sizes beyond its size.

In a folder with checksums, HDF5 parses a file only after its checksum was verified (`ppl_bnn.core.stored`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core.plain_values import shown

# Largest numbers of objects in a file, and of texts in one array, which are read one by one for their lengths.
MOST_OBJECTS, MOST_STRINGS = 10_000, 100_000


def check(path: Path) -> None:
    """Refuse an HDF5 file that refers to anything outside it, or that claims more data than it holds.

    Parameters
    ----------
    path : Path
        The file.

    Raises
    ------
    ValueError
        For an external or a soft link, external or virtual storage, a filter other than compression and checksums, an
        unlimited dimension, references as values, or arrays larger than the file.
    """
    import h5py

    size, claimed, seen = path.stat().st_size, 0, set()
    with h5py.File(path, "r") as file:
        waiting: list[Any] = [file["/"]]
        while waiting:
            group = waiting.pop()
            for name in group:
                link = group.get(name, getlink=True)
                if not isinstance(link, h5py.HardLink):
                    raise ValueError(f"{shown(name)} is a link ({type(link).__name__})")
                found = group[name]
                # Objects are identified by their address in the file: a group that contains itself would never end.
                address = hash(found.id)
                if address in seen or len(seen) >= MOST_OBJECTS:
                    raise ValueError(f"{shown(name)} is there twice, or there are too many objects")
                seen.add(address)
                if isinstance(found, h5py.Group):
                    waiting.append(found)
                elif isinstance(found, h5py.Dataset):
                    claimed += _checked_array(found, size)
                else:
                    raise ValueError(f"{shown(name)} is neither a group nor an array")
                if claimed > size:
                    raise ValueError(f"its arrays claim {claimed} bytes or more, in a file of {size}")


def _checked_array(array: Any, size: int) -> int:
    """Number of bytes that an array of an HDF5 file claims. Raises ValueError."""
    import h5py

    if array.is_virtual or array.external:
        raise ValueError(f"{shown(array.name)} has its values in another file")
    if array.maxshape != array.shape:
        raise ValueError(f"{shown(array.name)} has an unlimited dimension")
    filters = array.id.get_create_plist()
    for index in range(filters.get_nfilters()):
        if filters.get_filter(index)[0] not in (1, 2, 3):
            raise ValueError(f"{shown(array.name)} needs a filter")
    strings = h5py.check_string_dtype(array.dtype)
    if strings is None and array.dtype.kind not in "fiub":
        raise ValueError(f"{shown(array.name)} is of the type {array.dtype}")
    claimed = int(array.id.get_type().get_size()) * int(array.size or 0)
    if str(array.attrs.get("NAME", b"")).removeprefix("b'").startswith("This is a netCDF dimension but not"):
        # A dimension without values: only its length is used.
        return 0
    if strings is not None and strings.length is None and claimed <= size:
        if array.size > MOST_STRINGS:
            raise ValueError(f"{shown(array.name)} has {array.size} texts")
        # Several entries may refer to one text of the file.
        length = 0
        for index in np.ndindex(array.shape):
            length += len(array[index])
            if length > size:
                raise ValueError(f"{shown(array.name)} claims {length} bytes or more, in a file of {size}")
    return claimed
