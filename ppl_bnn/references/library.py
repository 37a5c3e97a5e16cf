"""Finds the stored references: in a folder, in a checkout, or at an address, each file checked by its SHA-256.

`index.json` of this folder has the SHA-256 of every file of every reference of the project. `PPL_BNN_REFERENCES` names
a folder of references, which may hold others; these are checked against their own certificates.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppl_bnn.core.errors import InputError, check_known
from ppl_bnn.references.folder import CARD, checked, read, read_json, refuse_failed
from ppl_bnn.references.reference import Reference

FOLDER, ADDRESS = "PPL_BNN_REFERENCES", "PPL_BNN_REFERENCES_URL"
INDEX = Path(__file__).with_name("index.json")
_CHECKOUT = Path(__file__).resolve().parents[2] / "comparisons" / "references"


@dataclass(frozen=True)
class Entry:
    """One reference in the list: what it is of, and its grade.

    Parameters
    ----------
    name : str
        Its name, "<model>-<data>".
    grade : str
        "certified"; "mode-weighted", NUTS in each of several modes; "bracketed", weighted particles with a log evidence
        between two bounds; or "failed" for a record of failure, which has no draws.
    model, data : str
        Names of the model of the zoo and of the data.
    weights, rows, outputs : int
        Numbers of weights, of training rows, and of outputs of the network.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> entry = bnn.references.entries()["regression_mlp-curve"]
    >>> entry.grade, entry.model, entry.data
    ('certified', 'regression_mlp', 'curve_with_a_gap')
    """

    name: str
    grade: str
    model: str
    data: str
    weights: int
    rows: int
    outputs: int

    @classmethod
    def of(cls, card: Mapping[str, Any]) -> Entry:
        """The entry of a card."""
        counts = {name: int(card[name]) for name in ("weights", "rows")}
        model, data, count = card["model"]["name"], card["data"]["name"], len(card["outputs"]["columns"])
        return cls(card["name"], card["grade"], model, data, outputs=count, **counts)


@functools.cache
def index() -> dict[str, dict[str, Any]]:
    """Name -> the entry, and the SHA-256 of each file, of every reference of the project."""
    return json.loads(INDEX.read_text(encoding="utf-8"))


def folder_here() -> Path | None:
    """The folder of references on this machine: `PPL_BNN_REFERENCES`, else that of a checkout, else None."""
    if named := os.environ.get(FOLDER):
        path = Path(named)
        InputError.check(path.is_dir(), FOLDER, "a folder of references", named, f"unsetting {FOLDER}")
        return path
    return _CHECKOUT if _CHECKOUT.is_dir() else None


def entries() -> dict[str, Entry]:
    """The references that can be loaded, and records of failure, by name.

    Returns
    -------
    dict of str to Entry
        Those of the project, in the order in which they were declared, then others of the folder.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> "regression_mlp-curve" in bnn.references.entries()
    True
    """
    found = {name: Entry(name, **each["entry"]) for name, each in index().items()}
    here = folder_here()
    for card in sorted(here.glob(f"*/{CARD}")) if here is not None else ():
        if card.parent.name not in found:
            found[card.parent.name] = Entry.of(read_json(card))
    return found


def load(name: str, folder: str | os.PathLike[str] | None = None) -> Reference:
    """Load a reference posterior.

    Parameters
    ----------
    name : str
        Its name; `entries()` lists them.
    folder : str or PathLike, optional
        A folder of references. By default that in `PPL_BNN_REFERENCES`, else the one of a checkout; without either the
        files are downloaded from the address in `PPL_BNN_REFERENCES_URL` and kept in the cache (`PPL_BNN_CACHE`).

    Returns
    -------
    Reference
        The reference.

    Raises
    ------
    UnknownNameError
        If there is no such reference.
    UnsupportedError
        If it is a record of failure, which has no draws.
    DamagedError
        If a file has another SHA-256 than the index, or than its certificate, says, or does not have what a reference
        has.
    InputError
        If there is neither a folder nor an address.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> reference = bnn.references.load("regression_mlp-curve")
    >>> reference.x["test"].shape
    (32, 1)
    """
    if folder is not None:
        place = Path(folder)
        names = sorted(card.parent.name for card in place.glob(f"*/{CARD}"))
        InputError.check(names, "folder", "a folder of references", folder, "folder=None")
        check_known("reference", [name], names)
        return read(place / name, _known(name))
    if name in (known := entries()):
        # Before anything is downloaded.
        refuse_failed(name, known[name].grade)
    return read(_place(name), _known(name))


def record(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The card and the certificate of a reference or of a record of failure, which has no more than these.

    Parameters
    ----------
    name : str
        Its name; `entries()` lists them.

    Returns
    -------
    card, certificate : dict
        The certificate has every check with its value, its limit and whether it "holds", under "from the full runs" and
        "from the stored arrays".

    Raises
    ------
    UnknownNameError, DamagedError, InputError
        As `load`.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> card, certificate = bnn.references.record("regression_mlp-curve")
    >>> card["grade"]
    'certified'
    """
    return checked(_place(name), _known(name))


def _known(name: str) -> dict[str, str] | None:
    """The SHA-256 of each file of a reference of the project."""
    return index()[name]["sha256"] if name in index() else None


def _place(name: str) -> Path:
    """The folder of a reference: here, or of its downloaded files."""
    check_known("reference", [name], entries())
    here = folder_here()
    return here / name if here is not None and (here / name).is_dir() else _downloaded(name)


def _downloaded(name: str) -> Path:
    """The folder of a reference whose files were downloaded, or are in the cache."""
    address = os.environ.get(ADDRESS, "").rstrip("/")
    expected, advice = (
        "a folder of references or their address",
        f"a folder in {FOLDER}, or an address in {ADDRESS}",
    )
    InputError.check(address, name, expected, "neither", advice)
    from ppl_bnn.datasets.readers import downloaded

    place, advice = f"references/{name}", f"a folder in {FOLDER}"
    files = [
        downloaded(f"{address}/{name}/{file}", sha256, place, advice)
        for file, sha256 in index()[name]["sha256"].items()
    ]
    return files[0].parent
