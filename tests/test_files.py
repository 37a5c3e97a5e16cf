"""Files appear whole, may be read by whoever may read their neighbours, and hold what they were given."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from ppl_bnn.files import in_order, write_arrays, write_whole


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    target.write_text("before")

    def broken(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(target, broken)
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
    assert target.read_text() == "before"
    write_whole(target, lambda path: path.write_text("after"))
    assert target.read_text() == "after"


def test_two_who_write_one_file_do_not_meet(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    parts: list[Path] = []

    def outer(path: Path) -> None:
        parts.append(path)
        path.write_text("half of the first")
        # Another begins, and ends, while this one is at it.
        write_whole(target, inner)
        assert target.read_text() == "the second"
        path.write_text("the first")

    def inner(path: Path) -> None:
        parts.append(path)
        assert not path.exists()
        path.write_text("the second")

    write_whole(target, outer)
    assert target.read_text() == "the first"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert len(set(parts)) == 2
    for path in parts:
        assert path.parent == tmp_path
        assert path.name.startswith(f".page.part-{os.getpid()}-")
        assert path.suffix == ".html"


def test_arrays_come_back_in_shape_and_with_their_words(tmp_path: Path) -> None:
    arrays = {
        "number": np.array(2.5),
        "turned": np.arange(6.0).reshape(2, 3).T,
        "every second": np.arange(10)[::2],
        "none": np.empty((0, 3)),
    }
    write_arrays(tmp_path / "a.safetensors", arrays, {"words": "what they are"})
    found = load_file(tmp_path / "a.safetensors")
    for name, value in arrays.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].shape == value.shape
        assert in_order(arrays)[name].flags.c_contiguous
    with safe_open(tmp_path / "a.safetensors", "numpy") as file:
        assert file.metadata() == {"words": "what they are"}


@pytest.mark.skipif(os.name != "posix", reason="permissions of another kind")
@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_arrays_may_be_read_by_whoever_may_read_new_files(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        (tmp_path / "text").write_text("")
        write_arrays(tmp_path / "arrays", {"a": np.zeros(1)})
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("text", "arrays")]
    assert modes == [0o666 & ~mask] * 2
