"""Stored results: written with checksums, and read as files that may be damaged or written by somebody else.

A folder has one manifest, a JSON file that is written last. It lists the SHA-256 of every file that is read back. Its
last entry, `checksum`, is the SHA-256 of the manifest with the 64 digits of that entry set to zero. A single file (a
cell of a grid, a checkpoint, a piece of a stream) has the same entry in the header of its arrays.

Only regular files inside the folder are opened, sizes and nesting are bounded before any object is built, and each
value has to be of the kind that its reader declares. Anything else raises a `DamagedError` that names the file. A
checksum detects damage; it does not prove who wrote a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from ppl_bnn.core.errors import DamagedError, UnsupportedError
from ppl_bnn.core.files import bounded, in_order, regular, write_whole
from ppl_bnn.core.plain_values import check_kind, decoded, encoded, parse_json, shown

# The manifest of a grid of 10^5 cells has about 15 MB.
MOST_JSON, MOST_HEADER = 2**26, 2**24
_ZEROS = b"0" * 64
_TAIL = re.compile(rb'"checksum": "sha256:([0-9a-f]{64})"\n\}\n\Z')
_OWN = {"ppl_bnn.format": "2", "ppl_bnn.sha256": "0" * 64}
_SEAL = re.compile(rb'"ppl_bnn\.sha256":"([0-9a-f]{64})"')


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def claims(file: Path, kind: str) -> bool:
    """Whether a manifest claims to be of a kind, damaged or not."""
    try:
        return json.dumps(kind).encode() in bounded(regular(file), MOST_JSON)
    except (OSError, ValueError):
        return False


@dataclass
class Folder:
    """A folder that is being written: its path, the SHA-256 of each file that is read back, finally its manifest."""

    path: Path
    files: dict[str, str] = field(default_factory=dict)

    def write(self, name: str, write: Callable[[Path], Any]) -> None:
        """Write a file atomically by a function of its path, and store its checksum."""
        write_whole(self.path / name, write)
        self.files[name] = digest(self.path / name)

    def write_manifest(self, name: str, content: Mapping[str, Any]) -> None:
        """Write the manifest with the list of checksums. It is the last file; without it the others are not valid."""
        write_manifest(self.path / name, {**content, "files": self.files})


def write_manifest(file: Path, content: Mapping[str, Any]) -> None:
    """Write plain values as JSON whose last entry is the checksum of the file."""
    text = json.dumps({**encoded(content), "checksum": "sha256:" + "0" * 64}, indent=1, allow_nan=False)
    raw = f"{text}\n".encode()
    end = len(raw) - len('"\n}\n')
    whole = raw[: end - 64] + hashlib.sha256(raw).hexdigest().encode() + raw[end:]
    write_whole(file, lambda path: path.write_bytes(whole))


def write_sealed(path: Path, arrays: Mapping[str, np.ndarray], words: Mapping[str, str]) -> None:
    """Write arrays and text entries atomically to a file that contains its own checksum."""
    content = sealed(arrays, words)
    write_whole(path, lambda part: part.write_bytes(content))


def sealed(arrays: Mapping[str, np.ndarray], words: Mapping[str, str]) -> bytes:
    """Content of the file that `write_sealed` writes."""
    from safetensors.numpy import save

    file = io.BytesIO(save(in_order(arrays), metadata={**words, **_OWN}))
    seal(file)
    return file.getvalue()


def seal(file: IO[bytes]) -> None:
    """Write the checksum of a file of arrays into its place."""
    place = _place(file)
    assert place is not None
    found = _digest_without(file, place)
    file.seek(place)
    file.write(found)


def _place(file: IO[bytes]) -> int | None:
    """Position of the digits of the checksum in a file of arrays. Raises ValueError."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if size > MOST_HEADER:
        raise ValueError(f"a header that claims {size} bytes")
    # In a text of the header each quotation mark is escaped by a backslash, so nothing else matches.
    found = [match.start(1) for match in _SEAL.finditer(file.read(size))]
    return 8 + found[0] if len(found) == 1 else None


def _digest_without(file: IO[bytes], place: int) -> bytes:
    """SHA-256 of a file with zeros in place of the 64 digits of its checksum."""
    file.seek(0)
    found = hashlib.sha256(file.read(place) + _ZEROS)
    file.seek(place + len(_ZEROS))
    while block := file.read(2**20):
        found.update(block)
    return found.hexdigest().encode()


@dataclass(frozen=True)
class Reader:
    """Reader of one kind of stored result; `argument`, `expected` and `advice` are parts of its error messages.

    Every method raises a DamagedError that names the file and the reason.
    """

    argument: str
    expected: str
    advice: str

    def damaged(self, file: Path, why: object) -> DamagedError:
        """The error that states which file is damaged, and why."""
        return DamagedError.of(self.argument, self.expected, f"{file}, damaged: {why}", self.advice)

    @contextlib.contextmanager
    def _checking(self, file: Path, *libraries: type[Exception]) -> Iterator[None]:
        """A block in which an OSError, a ValueError or an error of a library means that the file is damaged."""
        try:
            yield
        except DamagedError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.damaged(file, "it is missing") from error
        except (OSError, ValueError, *libraries) as error:
            why = f"{type(error).__name__}: {error}" if libraries else error
            raise self.damaged(file, why) from error

    def file(self, file: Path) -> Path:
        """The path of a regular file that no link leads out of its folder."""
        with self._checking(file):
            return regular(file)

    def listed(self, folder: Path, name: str, files: Mapping[str, str]) -> Path:
        """A file of a folder, checked against `files`, the SHA-256 in its manifest."""
        if not _is_plain(name):
            raise self.damaged(folder, f"it names the file {shown(name)}, which is no plain name")
        file = self.file(folder / name)
        if name not in files:
            raise self.damaged(file, "the manifest does not list it")
        with self._checking(file):
            if digest(file) != files[name]:
                raise ValueError("its SHA-256 is not the one in the manifest")
        return file

    def manifest(
        self, file: Path, kind: str, number: int, schema: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The entries of the manifest of a folder; None if there is no such file.

        It has to state `kind` and the format `number` (another one is an UnsupportedError). `schema` has the kinds of
        all entries except "kind", "format", "files" and "checksum".
        """
        if not os.path.lexists(file):
            return None
        with self._checking(file):
            content = bounded(self.file(file), MOST_JSON)
            place = _TAIL.search(content, max(0, len(content) - 200))
            if place is not None:
                whole = content[: place.start(1)] + _ZEROS + content[place.end(1) :]
                _compare(hashlib.sha256(whole).hexdigest().encode(), place[1])
            words = parse_json(content)
        got = f"{file}, of something else"
        if not isinstance(words, dict) or words.get("kind") != kind:
            raise DamagedError.of(self.argument, f"the manifest of a {kind}", got, "another folder")
        version = words.get("format")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise self.damaged(file, "it has no format number")
        got, advice = f"{file}, of format {version}", "the version of ppl-bnn that wrote it"
        UnsupportedError.check(version == number, self.argument, f"format {number}", got, advice)
        with self._checking(file):
            if place is None:
                raise ValueError("it has no checksum")
            words = decoded(words)
            check_kind(words, {"kind": str, "format": int, **schema, "files": {str: str}, "checksum": str})
        return words

    def json(self, file: Path, content: bytes | str, schema: Any) -> Any:
        """Values of a declared kind (see `plain_values.check_kind`), decoded, from a JSON text in `file`."""
        with self._checking(file):
            found = decoded(parse_json(content.encode() if isinstance(content, str) else content))
            check_kind(found, schema)
        return found

    def sealed(self, file: Path, words: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Arrays and text entries of a file of `write_sealed`.

        `words` are the names of the required text entries.
        """
        with self._checking(file), open(self.file(file), "rb") as opened:
            place = _place(opened)
            if place is None:
                raise ValueError("it has no checksum")
            opened.seek(place)
            _compare(opened.read(len(_ZEROS)), _digest_without(opened, place))
        arrays, found = self.arrays(file, {*words, *_OWN})
        if found["ppl_bnn.format"] != _OWN["ppl_bnn.format"]:
            raise self.damaged(file, f"it is of format {shown(found['ppl_bnn.format'])}")
        return arrays, {name: found[name] for name in words}

    def arrays(self, file: Path, words: Iterable[str] = ()) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Arrays and text entries (which have to be `words`) of a safetensors file that has been checked."""
        from safetensors import SafetensorError, safe_open

        with (
            self._checking(file, SafetensorError, TypeError, KeyError, AttributeError),
            safe_open(self.file(file), framework="numpy") as opened,
        ):
            found = opened.metadata() or {}
            # The library compares shapes with the size of the file before it reads.
            arrays = {name: np.array(opened.get_tensor(name)) for name in list(opened.keys())}
        if set(found) != set(words):
            raise self.damaged(file, f"its header has the entries {shown(sorted(found))}")
        return arrays, found

    def tree(self, file: Path) -> Any:
        """The DataTree of a netCDF file that refers to nothing outside it."""
        import xarray

        # Errors that the three libraries below raise for invalid files.
        with self._checking(file, Exception):
            check_tree(self.file(file))
            with xarray.open_datatree(file, engine="h5netcdf") as tree:
                return tree.load()


def _compare(found: bytes, stated: bytes) -> None:
    if found != stated:
        raise ValueError("its checksum does not match its content")


def _is_plain(name: str) -> bool:
    plain = name.isprintable() and name not in ("", ".", "..") and not any(mark in name for mark in "/\\:")
    return plain and len(name.encode("utf-8", "replace")) <= 255


# --- netCDF ------------------------------------------------------------------------------------------

# Largest numbers of objects in a file, and of texts in one array, which are read one by one for their lengths.
MOST_OBJECTS, MOST_STRINGS = 10_000, 100_000


def check_tree(path: Path) -> None:
    """Refuse (ValueError) an HDF5 file that refers to anything outside it, or that claims more data than it holds.

    That is an external or a soft link, external or virtual storage, a filter other than compression and checksums, an
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
                    claimed += _checked_bytes(found, size)
                else:
                    raise ValueError(f"{shown(name)} is neither a group nor an array")
                if claimed > size:
                    raise ValueError(f"its arrays claim {claimed} bytes or more, in a file of {size}")


def _checked_bytes(array: Any, size: int) -> int:
    """Number of bytes that an array of an HDF5 file claims. Raises ValueError."""
    import h5py

    filters = array.id.get_create_plist()
    strings = h5py.check_string_dtype(array.dtype)
    used = {filters.get_filter(index)[0] for index in range(filters.get_nfilters())}
    for wrong, what in (
        (array.is_virtual or array.external, "has its values in another file"),
        (array.maxshape != array.shape, "has an unlimited dimension"),
        (not used <= {1, 2, 3}, "needs a filter"),
        (strings is None and array.dtype.kind not in "fiub", f"is of the type {array.dtype}"),
    ):
        if wrong:
            raise ValueError(f"{shown(array.name)} {what}")
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
