"""What pictures of the gallery say of fits that have not converged; their numbers are tested in tests/zoo."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("zoo_gallery")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NUTS, 4 chains of 800 draws: converged (R-hat 1.003)", ("", False)),
        ("Laplace with Kronecker factors: undecided", ("", False)),
        ("NUTS: not converged (R-hat 1.479)", ("not converged: R-hat 1.48, not below 1.01", True)),
        ("NUTS: converged per mode only (R-hat 1.2)", ("not converged: R-hat 1.20, not below 1.01", True)),
        ("Left: NUTS: converged (R-hat 1.002). Right: NUTS: not converged (R-hat 2.093)",
         ("not converged: R-hat 2.09, not below 1.01", True)),
        ("An ensemble of 4 modes: not converged", ("not converged: An ensemble of 4 modes", False)),
    ],
)  # fmt: skip
def test_a_note_says_what_has_not_converged(script: Any, text: str, expected: tuple[str, bool]) -> None:
    assert script.note_of(text) == expected


def test_a_note_is_above_the_picture_and_leaves_it_as_it_is(script: Any) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, size=(50, 640, 3), dtype=np.uint8))
    found = {chains: script.with_note(picture, "not converged", chains) for chains in (True, False)}
    for whole in found.values():
        assert whole.width == 640
        strip = np.asarray(whole)[:-50]
        assert strip.min() < 100
        assert strip[:, -1].min() == 255
        np.testing.assert_array_equal(np.asarray(whole)[-50:], np.asarray(picture))
    # The cross, of chains alone, begins left of the words.
    left = [np.flatnonzero((np.asarray(each)[:-50] < 128).any(axis=(0, 2)))[0] for each in found.values()]
    ink = [(np.asarray(each)[:-50, :26] < 128).any() for each in found.values()]
    assert ink[0]
    assert left[0] >= 8


def test_every_stored_picture_of_a_fit_that_has_not_converged_has_its_note(script: Any) -> None:
    """The first lines of the picture are those of the strip, up to its palette."""
    from PIL import Image

    folder = FOLDER.parent / "models" / "gallery"
    noted = 0
    for entry in script.read_captions(folder).values():
        note = script.note_of(entry["fitted"])
        if not note[0]:
            continue
        noted += 1
        with Image.open(folder / entry["figure"]) as image:
            stored = np.asarray(image.convert("RGB")).astype(float)
        blank = Image.new("RGB", (stored.shape[1], 1), "white")
        strip = np.asarray(script.with_note(blank, *note)).astype(float)[:-1]
        assert np.abs(stored[: len(strip)] - strip).max() < 40.0, entry["figure"]
    assert noted
