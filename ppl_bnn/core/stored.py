"""Stored results: written with checksums, and read as files that may be damaged or written by somebody else.

A folder has one manifest, a JSON file that is written last. It lists the SHA-256 of every file that is read back. Its
last entry, `checksum`, is the SHA-256 of the manifest itself with the 64 digits of that entry set to zero. A single
file (a cell of a grid, a checkpoint, a piece of a stream) has the same entry in the header of its arrays. So any change
of any byte is found, and each file can be written without reading the others.

Files are not trusted: only regular files inside the folder are opened, sizes and nesting are bounded before any object
is built, and each value has to be of the kind that its reader declares. Anything else raises a `DamagedError` that
names the file. A checksum detects damage; it does not prove who wrote a file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from ppl_bnn.core import netcdf
from ppl_bnn.core.errors import DamagedError, UnsupportedError, message
from ppl_bnn.core.files import bounded, in_order, regular, write_arrays, write_whole
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
    """Whether a manifest claims to be of a kind, damaged or not.

    Parameters
    ----------
    file : Path
        The manifest.
    kind : str
        The kind.

    Returns
    -------
    bool
        Whether it claims the kind.
    """
    try:
        return json.dumps(kind).encode() in bounded(regular(file), MOST_JSON)
    except (OSError, ValueError):
        return False


@dataclass
class Folder:
    """A folder that is being written: its files, their SHA-256, and finally its manifest.

    Parameters
    ----------
    path : Path
        The folder.
    files : dict of str to str
        SHA-256 of each file that is read back.
    """

    path: Path
    files: dict[str, str] = field(default_factory=dict)

    def write(self, name: str, write: Callable[[Path], Any]) -> None:
        """Write a file atomically and store its checksum.

        Parameters
        ----------
        name : str
            Name of the file.
        write : callable
            Function that writes to the path that it is given.
        """
        write_whole(self.path / name, write)
        self.files[name] = digest(self.path / name)

    def write_manifest(self, name: str, content: Mapping[str, Any]) -> None:
        """Write the manifest with the list of checksums. It is the last file; without it the others are not valid.

        Parameters
        ----------
        name : str
            Name of the manifest.
        content : mapping
            Its entries.
        """
        write_manifest(self.path / name, {**content, "files": self.files})


def write_manifest(file: Path, content: Mapping[str, Any]) -> None:
    """Write plain values as JSON whose last entry is the checksum of the file.

    Parameters
    ----------
    file : Path
        The manifest.
    content : mapping
        Its entries.
    """
    text = json.dumps({**encoded(content), "checksum": "sha256:" + "0" * 64}, indent=1, allow_nan=False)
    raw = f"{text}\n".encode()
    end = len(raw) - len('"\n}\n')
    whole = raw[: end - 64] + hashlib.sha256(raw).hexdigest().encode() + raw[end:]
    write_whole(file, lambda path: path.write_bytes(whole))


def write_sealed(path: Path, arrays: Mapping[str, np.ndarray], words: Mapping[str, str]) -> None:
    """Write arrays and text entries atomically to a file that contains its own checksum.

    Parameters
    ----------
    path : Path
        The file.
    arrays : mapping of str to ndarray
        The arrays.
    words : mapping of str to str
        The text entries.
    """

    def write(part: Path) -> None:
        write_arrays(part, arrays, {**words, **_OWN})
        with open(part, "r+b") as file:
            _seal(file)

    write_whole(path, write)


def sealed(arrays: Mapping[str, np.ndarray], words: Mapping[str, str]) -> bytes:
    """Content of the file that `write_sealed` writes.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        The arrays.
    words : mapping of str to str
        The text entries.

    Returns
    -------
    bytes
        The content.
    """
    from safetensors.numpy import save

    file = io.BytesIO(save(in_order(arrays), metadata={**words, **_OWN}))
    _seal(file)
    return file.getvalue()


def _seal(file: IO[bytes]) -> None:
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
    """Reader of one kind of stored result.

    Parameters
    ----------
    argument, expected, advice : str
        Parts of its error messages.
    """

    argument: str
    expected: str
    advice: str

    def damaged(self, file: Path, why: object) -> DamagedError:
        """The error that states which file is damaged, and why.

        Parameters
        ----------
        file : Path
            The file.
        why
            The reason.

        Returns
        -------
        DamagedError
            The error.
        """
        text = message(self.expected, f"{file}, damaged: {why}", self.advice)
        return DamagedError(f"{self.argument}: {text}")

    def file(self, file: Path) -> Path:
        """The path of a regular file that no link leads out of its folder.

        Parameters
        ----------
        file : Path
            The file.

        Returns
        -------
        Path
            The path.

        Raises
        ------
        DamagedError
            For any other file.
        """
        try:
            return regular(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.damaged(file, "it is missing") from error
        except (OSError, ValueError) as error:
            raise self.damaged(file, error) from error

    def listed(self, folder: Path, name: str, files: Mapping[str, str] | None) -> Path:
        """A file of a folder, checked against the list of its manifest.

        Parameters
        ----------
        folder : Path
            The folder.
        name : str
            Name of the file.
        files : mapping of str to str, or None
            SHA-256 of the files in the manifest. None if the manifest has no list.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        DamagedError
            For a name that leads outside the folder, a missing file, a file that is not in the list, or another
            checksum.
        """
        if not _plain_name(name):
            raise self.damaged(folder, f"it names the file {shown(name)}, which is no plain name")
        file = self.file(folder / name)
        if files is None:
            return file
        if name not in files:
            raise self.damaged(file, "the manifest does not list it")
        try:
            same = digest(file) == files[name]
        except OSError as error:
            raise self.damaged(file, error) from error
        if not same:
            raise self.damaged(file, "its SHA-256 is not the one in the manifest")
        return file

    def manifest(
        self, file: Path, kind: str, newest: int, schema: Mapping[str, Any], sealed_since: int
    ) -> dict[str, Any] | None:
        """The manifest of a folder.

        Parameters
        ----------
        file : Path
            The manifest.
        kind : str
            The kind that it has to state.
        newest : int
            The newest supported format.
        schema : mapping
            Kinds of all its entries except "kind", "format", "files" and "checksum".
        sealed_since : int
            The first format with a checksum. An older one has no entry "files" and is read with a UserWarning that it
            has no checksum.

        Returns
        -------
        dict or None
            The entries. None if there is no such file.

        Raises
        ------
        DamagedError
            If it is damaged, or the manifest of something else.
        UnsupportedError
            For a newer format.
        """
        if not os.path.lexists(file):
            return None
        try:
            content = bounded(self.file(file), MOST_JSON)
            place = _TAIL.search(content, max(0, len(content) - 200))
            if place is not None:
                whole = content[: place.start(1)] + _ZEROS + content[place.end(1) :]
                if hashlib.sha256(whole).hexdigest().encode() != place[1]:
                    raise ValueError("its checksum does not match its content")
            words = parse_json(content)
        except (OSError, ValueError) as error:
            raise error if isinstance(error, DamagedError) else self.damaged(file, error) from error
        if not isinstance(words, dict) or words.get("kind") != kind:
            got = f"{file}, of something else"
            raise DamagedError.of(f"{self.argument}", f"the manifest of a {kind}", got, "another folder")
        version = words.get("format")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise self.damaged(file, "it has no format number")
        if version > newest:
            raise UnsupportedError.of(
                f"{self.argument}",
                f"format {newest} or older",
                f"{file}, of format {version}",
                "a newer ppl-bnn",
            )
        whole_schema = {"kind": str, "format": int, **schema}
        if version >= sealed_since:
            if place is None:
                raise self.damaged(file, "it has no checksum")
            whole_schema |= {"files": {str: str}, "checksum": str}
        try:
            words = decoded(words)
            check_kind(words, whole_schema)
        except ValueError as error:
            raise self.damaged(file, error) from error
        if version < sealed_since:
            self.tell_older(file)
        return words

    def tell_older(self, file: Path) -> None:
        """Warn that a file has no checksum."""
        text = f"{file} was written by an older version and has no checksum: damage to it would not be seen"
        warnings.warn(text, UserWarning, stacklevel=4)

    def json(self, file: Path, content: bytes | str, schema: Any) -> Any:
        """Values of a declared kind, decoded, from a JSON text in `file`.

        Parameters
        ----------
        file : Path
            The file, for messages.
        content : bytes or str
            The JSON text.
        schema
            The kind, as in `plain_values.check_kind`.

        Returns
        -------
        object
            The values.

        Raises
        ------
        DamagedError
            If the text is damaged.
        """
        try:
            found = decoded(parse_json(content.encode() if isinstance(content, str) else content))
            check_kind(found, schema)
        except ValueError as error:
            raise self.damaged(file, error) from error
        return found

    def sealed(self, file: Path, words: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, str]] | None:
        """Arrays and text entries of a file of `write_sealed`.

        Parameters
        ----------
        file : Path
            The file.
        words : sequence of str
            Names of the required text entries.

        Returns
        -------
        arrays : dict of str to ndarray
            The arrays.
        words : dict of str to str
            The text entries.

            None instead of the two for a file of an older version, without a checksum.

        Raises
        ------
        DamagedError
            If the file is damaged.
        """
        try:
            with open(self.file(file), "rb") as opened:
                place = _place(opened)
                if place is not None:
                    opened.seek(place)
                    if opened.read(len(_ZEROS)) != _digest_without(opened, place):
                        raise ValueError("its checksum does not match its content")
        except (OSError, ValueError) as error:
            raise error if isinstance(error, DamagedError) else self.damaged(file, error) from error
        names = set(words) if place is None else {*words, *_OWN}
        arrays, said = self.arrays(file, names)
        if place is None:
            return None
        if said["ppl_bnn.format"] != _OWN["ppl_bnn.format"]:
            raise self.damaged(file, f"it is of format {shown(said['ppl_bnn.format'])}")
        return arrays, {name: said[name] for name in words}

    def arrays(self, file: Path, words: Iterable[str] = ()) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Arrays and text entries of a safetensors file that has been checked.

        Parameters
        ----------
        file : Path
            The file.
        words : iterable of str
            Names of the required text entries.

        Returns
        -------
        arrays : dict of str to ndarray
            The arrays.
        words : dict of str to str
            The text entries.

        Raises
        ------
        DamagedError
            If the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file(file), framework="numpy") as opened:
                said = opened.metadata() or {}
                # The library compares shapes with the size of the file before it reads.
                arrays = {name: np.array(opened.get_tensor(name)) for name in list(opened.keys())}
        except DamagedError:
            raise
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise self.damaged(file, f"{type(error).__name__}: {error}") from error
        if set(said) != set(words):
            raise self.damaged(file, f"its header has the entries {shown(sorted(said))}")
        return arrays, said

    def tree(self, file: Path) -> Any:
        """The DataTree of a netCDF file that refers to nothing outside it.

        Parameters
        ----------
        file : Path
            The file.

        Returns
        -------
        xarray.DataTree
            The tree.

        Raises
        ------
        DamagedError
            If the file is damaged.
        """
        import xarray

        try:
            netcdf.check(self.file(file))
            with xarray.open_datatree(file, engine="h5netcdf") as tree:
                return tree.load()
        except DamagedError:
            raise
        # Errors that the three libraries below raise for invalid files.
        except Exception as error:
            raise self.damaged(file, f"{type(error).__name__}: {error}") from error


def _plain_name(name: str) -> bool:
    plain = name.isprintable() and name not in ("", ".", "..") and not any(mark in name for mark in "/\\:")
    return plain and len(name.encode("utf-8", "replace")) <= 255
