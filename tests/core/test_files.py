"""Files appear whole, may be read by whoever may read their neighbours, and hold what they were given."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from ppl_bnn.core import files
from ppl_bnn.core.files import in_order, write_arrays, write_whole


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


WAYS = {
    "beside": "files.staged(folder)",
    "within": "files.staged_within(folder, {'a', 'last', 'gone'}, 'last')",
}


@pytest.mark.parametrize("way", list(WAYS))
def test_a_process_that_is_killed_between_two_renames_leaves_the_old_folder_whole(
    way: str, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    old = {"a": "old", "gone": "old", "last": "old"}
    for name, text in old.items():
        (folder / name).write_text(text)
    script = f"""
import os, sys
from pathlib import Path
from ppl_bnn.core import files
folder = Path(sys.argv[1])
renames = []
def second(rename):
    def called(*paths):
        renames.append(paths)
        if len(renames) == 2:
            os._exit(9)
        rename(*paths)
    return called
with {WAYS[way]} as stage:
    for name in ("a", "b", "last"):
        (stage / name).write_text("new")
    Path.rename, os.replace = second(Path.rename), second(os.replace)
"""
    ended = subprocess.run([sys.executable, "-c", script, str(folder)], check=False, capture_output=True)
    assert ended.returncode == 9, ended.stderr
    # Half of it is not taken for the whole.
    assert not (folder / "last").exists()
    left = files.left_by_a_kill(folder)
    assert left is not None
    assert {path.name: path.read_text() for path in left.iterdir()} == old
    assert files.left_by_a_kill(tmp_path / "other") is None


def test_what_cannot_be_put_back_stays_where_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "last"):
        (tmp_path / name).write_text("old")

    def fails(*paths: Path) -> None:
        raise OSError("planted")

    def save() -> None:
        with files.staged_within(tmp_path, {"a", "last"}, "last") as stage:
            (stage / "a").write_text("new")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="planted"):
        save()
    left = files.left_by_a_kill(tmp_path)
    assert left is not None
    assert {path.name: path.read_text() for path in left.iterdir()} == {"a": "old", "last": "old"}


def test_a_folder_keeps_its_mode_and_needs_no_second_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(0o751)
    with files.staged(folder) as stage:
        (stage / "a").write_text("first")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o751

    def refused(*paths: Path) -> None:
        raise OSError("no second names here")

    monkeypatch.setattr(os, "link", refused)

    def written(text: str) -> None:
        with files.staged_within(folder, {"a"}, "a") as stage:
            (stage / "a").write_text(text)
            (stage / "b").write_text(text)

    with monkeypatch.context() as patched:
        works = os.replace

        def fails(path: Path, place: Path) -> None:
            if path.name == "a" and "partial" in str(path):
                raise OSError("planted")
            works(path, place)

        patched.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="planted"):
            written("second")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "first"}
    written("third")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "third", "b": "third"}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_fails_on_the_way_leaves_the_old_folder_where_it_was(
    at: int, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "a").write_text("old")
    rename, renames = Path.rename, []

    def fails(path: Path, place: Path) -> Path:
        renames.append(place)
        if len(renames) == at:
            raise error("planted")
        return rename(path, place)

    monkeypatch.setattr(Path, "rename", fails)

    def save() -> None:
        with files.staged(folder) as stage:
            (stage / "a").write_text("new")
            if at == 0:
                raise error("planted")

    with pytest.raises(error, match="planted"):
        save()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (folder / "a").read_text() == "old"
