"""Reads the folder of one reference: its card, its certificate and its arrays, every file checked by its SHA-256."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core.errors import DamagedError, UnsupportedError
from ppl_bnn.core.stored import digest
from ppl_bnn.references.reference import ARRAYS, Reference

SCHEMA = 1
CERTIFICATE, CARD, DRAWS = "certificate.json", "card.json", "reference.npz"


def checked(place: Path, known: Mapping[str, str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The card and the certificate of a folder, after all its files have been checked.

    `known` has the SHA-256 of each file; without it they are those of the certificate.
    """
    certificate = read_json(place / CERTIFICATE)
    stated = certificate.get("sha256") if known is None else known
    if not isinstance(stated, dict) or CARD not in stated:
        raise DamagedError.of(str(place), "the SHA-256 of its files", "none", "a fresh copy")
    for file, sha256 in stated.items():
        try:
            found = digest(place / file)
        except OSError as error:
            raise DamagedError.of(str(place), f"a file {file}", str(error), "a fresh copy") from error
        DamagedError.check(found == sha256, str(place / file), f"SHA-256 {sha256}", found, "a fresh copy")
    card = read_json(place / CARD)
    version = card.get("schema")
    advice = "the version of ppl-bnn that made it"
    UnsupportedError.check(version == SCHEMA, str(place), f"a reference of schema {SCHEMA}", version, advice)
    return card, certificate


def read(place: Path, known: Mapping[str, str] | None) -> Reference:
    """A reference from its folder; `known` as in `checked`."""
    card, certificate = checked(place, known)
    refuse_failed(place.name, card.get("grade"))
    try:
        with np.load(place / DRAWS, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError) as error:
        raise DamagedError.of(str(place / DRAWS), "arrays of NumPy", str(error), "a fresh copy") from error
    missing = [name for name in ARRAYS if name not in arrays]
    DamagedError.check(
        not missing, str(place / DRAWS), f"the arrays {', '.join(ARRAYS)}", missing, "a fresh copy"
    )
    return Reference(card, certificate, arrays)


def refuse_failed(name: str, grade: Any) -> None:
    """Refuse a record of failure, which has no draws."""
    advice = f"another one; bnn.references.record({name!r}) says what failed"
    UnsupportedError.check(grade != "failed", name, "a reference with draws", "a record of failure", advice)


def read_json(file: Path) -> dict[str, Any]:
    """The object of a JSON file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedError.of(str(file), "a JSON file of a reference", str(error), "a fresh copy") from error
    DamagedError.check(
        isinstance(found, dict), str(file), "an object in JSON", type(found).__name__, "a fresh copy"
    )
    return found
