"""Stored results that are damaged or hostile are refused by name, and none is read as something else."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.core import plain_values, stored
from ppl_bnn.core.errors import DamagedError, InputError, UnsupportedError
from ppl_bnn.core.files import _put_in_place, write_arrays
from ppl_bnn.evaluation.grid import result as grid_result
from ppl_bnn.evaluation.grid import toml_file as grid_file
from ppl_bnn.evaluation.grid.result import GridResult
from ppl_bnn.inference.checkpoint import Checkpoint
from ppl_bnn.posterior.storage import ARRAYS, MANIFEST, TREE
from tests.problems import regression_data, small_network
from tests.stored_results import KINDS, cell, comparison, files, grid, model, outcome, posterior, rows, stream

READER = stored.Reader("folder", "a whole thing", "making it again")


def changed(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The manifest with a change and a new checksum, as somebody would write it who knows the format."""
    content = json.loads(file.read_text())
    del content["checksum"]
    change(content)
    stored.write_manifest(file, plain_values.decoded(content))


def relisted(folder: Path, manifest: str, name: str) -> None:
    """The checksum of a file that was changed, in the list of its folder."""
    changed(folder / manifest, lambda words: words["files"].update({name: stored.digest(folder / name)}))


# --- checksums ----------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    stored.write_manifest(file, {"kind": "k", "format": 3, "flag": True, "n": 8, "files": {}})
    content = file.read_bytes()

    def read() -> Any:
        return READER.manifest(file, "k", 3, {"flag": bool, "n": int})

    assert outcome(read)[0] == "same"
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        what, said = outcome(read)
        assert what == "refused", (place, said)
        assert str(file) in said


def test_a_flipped_bit_in_any_byte_of_a_file_with_its_own_checksum_is_found(tmp_path: Path) -> None:
    file = tmp_path / "cell.safetensors"
    arrays = {"a": np.array([1.0, 2.0]), "flag": np.array(True)}
    # A text that looks like the checksum is no checksum.
    words = {"words": '"ppl_bnn.sha256":"' + "0" * 64 + '"'}
    stored.write_sealed(file, arrays, words)
    content = file.read_bytes()
    assert content == stored.sealed(arrays, words) or len(content) == len(stored.sealed(arrays, words))
    found = READER.sealed(file, ("words",))
    assert found[1] == words
    np.testing.assert_array_equal(found[0]["a"], arrays["a"])
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        what, said = outcome(lambda: READER.sealed(file, ("words",)))
        assert what == "refused", (place, said)
        assert str(file) in said


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_change_in_any_file_is_named(kind: str, tmp_path: Path) -> None:
    read = KINDS[kind](tmp_path / "it")
    what, before = outcome(read)
    assert what == "same"
    for file in files(tmp_path / "it"):
        content = file.read_bytes()
        for place in (len(content) // 3, len(content) - 9):
            damaged = bytearray(content)
            damaged[place] ^= 4
            file.write_bytes(damaged)
            what, said = outcome(read)
            assert what in ("refused", "said"), (file, place)
            assert file.name.removesuffix(".safetensors") in str(said)
        file.write_bytes(content)
    assert outcome(read) == ("same", before)


def test_a_flag_that_contradicts_the_arrays_is_refused_whatever_its_checksum(tmp_path: Path) -> None:
    read = posterior(tmp_path)
    _, before = outcome(read)
    for change, said in (
        ({"standardised": False}, "standardised is False, and the arrays say True"),
        ({"feature_names": ["a"]}, "feature_names has 1 names, and the inputs 2 columns"),
        ({"groups": 4}, "groups"),
        ({"arrays": []}, "does not list the arrays"),
    ):
        content = (tmp_path / MANIFEST).read_bytes()
        changed(tmp_path / MANIFEST, lambda words, change=change: words.update(change))
        what, got = outcome(read)
        assert what == "refused", change
        assert said in got
        assert str(tmp_path) in got
        (tmp_path / MANIFEST).write_bytes(content)
    assert outcome(read) == ("same", before)


@pytest.mark.parametrize(
    "method",
    [
        bnn.MAP(ppl="pyro", dtype="float32", steps=50),
        bnn.SVI(ppl="pyro", dtype="float32", steps=20),
        bnn.SVGD(ppl="pyro", dtype="float32", steps=20),
    ],
    ids=lambda method: method.name,
)
def test_a_posterior_in_single_precision_comes_back(method: Any, tmp_path: Path) -> None:
    x, y = regression_data(rows=20)
    fitted = bnn.fit(small_network, x, y, method)
    again = bnn.load(fitted.save(tmp_path), small_network)
    assert again.info.dtype == "float32"
    np.testing.assert_array_equal(again.predict(x).mean, fitted.predict(x).mean)


def test_draws_in_single_precision_are_of_no_fit_in_double_precision(tmp_path: Path) -> None:
    x, y = regression_data(rows=20)
    bnn.fit(small_network, x, y, bnn.SVGD(ppl="pyro", dtype="float32", steps=20)).save(tmp_path)
    changed(tmp_path / MANIFEST, lambda words: words["info"].update(dtype="float64"))
    with pytest.raises(DamagedError, match=r"info\.dtype is float64"):
        bnn.load(tmp_path, small_network)


def test_a_prediction_of_whole_numbers_is_refused_whatever_its_checksum(tmp_path: Path) -> None:
    read = comparison(tmp_path)
    name = "svi.prediction.safetensors"
    arrays, words = READER.arrays(tmp_path / name, ("words",))
    arrays["test/parameters/loc"] = arrays["test/parameters/loc"].astype(np.int32)
    write_arrays(tmp_path / name, arrays, words)
    relisted(tmp_path, "comparison.json", name)
    with pytest.raises(DamagedError, match="loc of a prediction is int32"):
        read()


def test_cells_and_pieces_do_not_take_each_others_place(tmp_path: Path) -> None:
    read = grid(tmp_path / "grid")
    one, other = (tmp_path / "grid" / "cells" / f"{cell(number)[0]}.safetensors" for number in range(2))
    one.write_bytes(other.read_bytes())
    with pytest.warns(UserWarning, match=f"damaged cells are left out.*{one.stem}.*it is another cell"):
        assert GridResult.load(tmp_path / "grid").missing == 1
    one.write_bytes(b"")
    other.write_bytes(b"")
    with pytest.warns(UserWarning, match="and 1 more"):
        read()
    read = stream(tmp_path / "run")
    first, second = sorted((tmp_path / "run").glob("*draws*"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(DamagedError, match="from another place of this one"):
        read()


@pytest.mark.parametrize(
    "piece",
    [{}, {"w": np.ones((1, 0, 2))}, {"w": np.ones(3)}, {"w": np.ones((1, 2, 2)), "lp": np.ones((1, 1))},
     {"w": np.ones((1, 2, 3)), "lp": np.ones((1, 2))}, {"w": np.ones((1, 2, 2))}],
)  # fmt: skip
def test_pieces_of_other_shapes_are_refused_whatever_their_checksum(
    piece: dict[str, np.ndarray], tmp_path: Path
) -> None:
    read = stream(tmp_path)
    file = tmp_path / "chain-0-draws-00000002.safetensors"
    found = READER.sealed(file, ("fit", "stream", "first"))
    stored.write_sealed(file, piece, found[1])
    with pytest.raises(DamagedError, match="00000002"):
        read()


def test_a_long_stream_is_written_without_reading_what_is_there(tmp_path: Path) -> None:
    stream(tmp_path)
    for file in tmp_path.glob("*draws*"):
        file.write_bytes(b"damaged")
    kept = bnn.inference.sampling.stream.Stream.of(tmp_path, {"seed": 1}, "chain-0")
    kept.write(4, {"w": np.ones((1, 2, 2)), "lp": np.ones((1, 2))}, {"u": np.zeros(2)})
    with pytest.raises(DamagedError, match="draws-00000000"):
        kept.resume()


# --- what has no checksum, or another format ------------------------------------------------------------


@pytest.mark.parametrize("name", ["posterior", "comparison", "grid"])
def test_another_format_and_a_manifest_without_a_checksum_are_refused(name: str, tmp_path: Path) -> None:
    read = KINDS[name](tmp_path)
    manifest = {"posterior": MANIFEST, "comparison": "comparison.json", "grid": "grid.json"}[name]
    words = json.loads((tmp_path / manifest).read_text())
    for other in (words["format"] - 1, words["format"] + 1):
        changed(tmp_path / manifest, lambda content, other=other: content.update(format=other))
        with pytest.raises(
            UnsupportedError, match=f"expected format {words['format']}; got .*of format {other}"
        ):
            read()
    del words["checksum"]
    (tmp_path / manifest).write_text(json.dumps(words, indent=1))
    with pytest.raises(DamagedError, match="it has no checksum"):
        read()


def test_cells_and_checkpoints_without_a_checksum_are_damaged(tmp_path: Path) -> None:
    grid = KINDS["grid"](tmp_path / "grid")
    file = tmp_path / "grid" / "cells" / f"{cell(0)[0]}.safetensors"
    arrays, said = READER.arrays(file, ("cell", "parts", "ppl_bnn.format", "ppl_bnn.sha256"))
    write_arrays(file, arrays, {name: said[name] for name in ("cell", "parts")})
    what, warned = outcome(grid)
    assert what == "said"
    assert sum("damaged cells are left out" in text for text in warned) == 1
    kept = Checkpoint.of(tmp_path, {"seed": 1}, "fit")
    write_arrays(tmp_path / "fit.safetensors", {"u": np.zeros(2)}, {"fingerprint": '{"seed": 1}'})
    with pytest.raises(DamagedError, match=r"fit\.safetensors.*no checksum"):
        kept.load()
    read = stream(tmp_path / "run")
    write_arrays(tmp_path / "run" / "chain-0-draws-00000000.safetensors", {"w": np.zeros((1, 2, 2))})
    with pytest.raises(DamagedError, match="draws-00000000"):
        read()


# --- hostile files --------------------------------------------------------------------------------------

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "content",
    [DEEP.encode(), b'{"a":' * 5000, b"\xff\xfe{}", b"", b"null", b"[]", b'"\\', b'"' + b'\\"' * 200_000,
     b'{"kind": NaN}', b"1" * 10_000, b'{"kind": "k", "format": true}', b'{"kind": "k", "format": "3"}'],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused_at_once(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_bytes(content)
    with pytest.raises(DamagedError, match=r"m\.json"):
        READER.manifest(file, "k", 3, {})


def test_nesting_and_size_are_bounded_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = plain_values.DEEPEST
    assert plain_values.parse_json(b"[" * most + b"]" * most)
    with pytest.raises(ValueError, match="nested"):
        plain_values.parse_json(b"[" * (most + 1) + b"]" * (most + 1))
    # Brackets in texts do not count.
    assert plain_values.parse_json(json.dumps(["[" * 200, '\\"[[' * 200]).encode())
    file = tmp_path / "grid.toml"
    for depth, good in ((most - 1, True), (most, False)):
        file.write_text(f"a = {'[' * depth}{']' * depth}\n")
        if good:
            assert plain_values.read_toml(file)
        else:
            with pytest.raises(InputError, match="nested more than"):
                plain_values.read_toml(file)
    monkeypatch.setattr(plain_values, "MOST_TOML", 10)
    file.write_bytes(b"a = 123456")
    assert plain_values.read_toml(file) == {"a": 123456}
    file.write_bytes(b"a = 1234567")
    with pytest.raises(InputError, match="more than 10 bytes"):
        plain_values.read_toml(file)


@pytest.mark.parametrize(
    "text",
    [f"models = {DEEP}", "a" + ".a" * 5000 + " = 1", "x = " + "{a=" * 2000, "x = " + "9" * 5000, "x = 1\0",
     "\ud800", 'x = "\\ud800"', "models = 3", "[models]\na = 3", "methods = 1979-05-27", "x = 0001-13-99",
     'models = ["linear_regression"]\ndata = ["diabetes"]\n[methods.a]\nmethod = "map"\nmember = ["map"]\n',
     'models = ["linear_regression"]\ndata = ["diabetes"]\n[methods.a]\nmethod = "map"\nppl = ["pyro"]\n',
     'models = ["linear_regression"]\ndata = ["diabetes"]\nmethods = ["map"]\nseeds = 1000000000000\n',
     'models = ["linear_regression"]\nmethods = ["map"]\n[data.a]\nfile = 3\ntarget = "y"\n',
     'models = ["linear_regression"]\nmethods = ["map"]\n[data.a]\nfile = "pipe"\ntarget = "y"\n',
     'data = ["diabetes"]\nmethods = ["map"]\nmodels = ["pipe.py"]\n'],
)  # fmt: skip
def test_a_grid_file_that_is_none_is_refused_at_once(text: str, tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(bnn.errors.BNNError, match=r"grid\.toml"):
        grid_file.read(file, bnn.Grid)


@pytest.mark.skipif(os.name != "posix", reason="files of another kind")
@pytest.mark.parametrize("what", ["fifo", "device", "link out", "link to itself", "folder"])
@pytest.mark.parametrize("kind", ["posterior", "comparison", "grid", "stream"])
def test_what_is_no_file_of_the_folder_is_not_opened(what: str, kind: str, tmp_path: Path) -> None:
    read = KINDS[kind](tmp_path / "it")
    for file in files(tmp_path / "it"):
        content = file.read_bytes()
        file.unlink()
        if what == "fifo":
            os.mkfifo(file)
        elif what == "device":
            file.symlink_to("/dev/zero")
        elif what == "link out":
            # The very content, so that no checksum can tell.
            (tmp_path / "outside").write_bytes(content)
            file.symlink_to(tmp_path / "outside")
        elif what == "link to itself":
            file.symlink_to(file)
        else:
            file.mkdir()
        got, said = outcome(read)
        assert got in ("refused", "said"), file
        assert file.name.removesuffix(".safetensors") in str(said)
        file.rmdir() if what == "folder" else file.unlink()
        file.write_bytes(content)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", "", "a\0b", "a\\b", "x\ud800"])
def test_names_that_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    read = comparison(tmp_path / "it")
    manifest = tmp_path / "it" / "comparison.json"
    content = manifest.read_bytes()
    for entry in ("trees", "predictions"):
        changed(manifest, lambda words, entry=entry: words.update({entry: [name]}))
        with pytest.raises(DamagedError, match=r"comparison|no plain name|missing"):
            read()
        manifest.write_bytes(content)
    read = grid(tmp_path / "grid")
    changed(tmp_path / "grid" / "grid.json", lambda words: words["cells"][0].__setitem__(5, name))
    with pytest.raises(DamagedError, match=r"grid\.json, damaged: cells\[0\]"):
        read()


def test_a_file_outside_the_folder_is_not_read_though_it_is_listed(tmp_path: Path) -> None:
    read = comparison(tmp_path / "it")
    outside = tmp_path / "outside.nc"
    outside.write_bytes((tmp_path / "it" / "svi.nc").read_bytes())
    for name in ("../outside", str(tmp_path / "outside")):

        def change(words: dict[str, Any], name: str = name) -> None:
            words["trees"] = [name]
            words["files"][f"{name}.nc"] = stored.digest(outside)

        changed(tmp_path / "it" / "comparison.json", change)
        with pytest.raises(DamagedError, match="which is no plain name"):
            read()


@pytest.mark.parametrize("kind", ["posterior", "comparison", "grid"])
def test_values_of_another_kind_are_named_whatever_the_checksum(kind: str, tmp_path: Path) -> None:
    read = KINDS[kind](tmp_path)
    file = next(iter(tmp_path.glob("*.json")))
    whole = json.loads(file.read_text())
    _, before = outcome(read)
    # Where one of the values below is as good as the one that was there.
    free = ("observed", "reference", "data", "feature_names", "class_names", "groups")
    for name in whole:
        if name == "checksum":
            continue
        for value in (7, "x", None, [[]], {"a": {}}, True, "missing"):
            if value == whole[name]:
                continue

            def change(words: dict[str, Any], name: str = name, value: Any = value) -> None:
                if value == "missing":
                    del words[name]
                else:
                    words[name] = value

            content = file.read_bytes()
            changed(file, change)
            got, said = outcome(read)
            assert got == "refused" or said == before or name in free, (name, value)
            file.write_bytes(content)


def test_the_entry_of_a_manifest_that_is_wrong_is_named() -> None:
    schema = {"a": int, "b?": [float], "c": {str: (str, None)}, "d": "x"}
    good: dict[str, Any] = {"a": 1, "b": [1, 2.5], "c": {"n": None}, "d": "x"}
    plain_values.check_kind(good, schema)
    plain_values.check_kind({"a": 1, "c": {}, "d": "x"}, schema)
    for change, said in (
        ({"a": True}, "a is True, not a whole number"),
        ({"a": 1.0}, "a is 1.0, not a whole number"),
        ({"b": [1, "2"]}, r"b\[1\] is '2', not a number"),
        ({"b": [False]}, r"b\[0\] is False, not a number"),
        ({"c": {"n": 3}}, "c.n is 3, not a text or nothing"),
        ({"c": []}, r"c is \[\], not a table"),
        ({"d": "y"}, "d is 'y', not 'x'"),
        ({"e": 1}, "unknown entry 'e'"),
    ):
        with pytest.raises(ValueError, match=said):
            plain_values.check_kind(good | change, schema)
    with pytest.raises(ValueError, match="has no entry 'a'"):
        plain_values.check_kind({"c": {}, "d": "x"}, schema)


def test_arrays_that_claim_more_than_their_file_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    for shape, offsets in (([2**33], [0, 2**36]), ([2**33], [0, 16]), ([2**62, 8], [0, 16]), ([-1], [0, 16])):
        header = json.dumps({"a": {"dtype": "F64", "shape": shape, "data_offsets": offsets}}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        tracemalloc.start()
        with pytest.raises(DamagedError, match=r"a\.safetensors"):
            READER.sealed(file, ())
        assert tracemalloc.get_traced_memory()[1] < 2**24
        tracemalloc.stop()
    file.write_bytes((2**40).to_bytes(8, "little") + bytes(100))
    with pytest.raises(DamagedError, match="a header that claims"):
        READER.sealed(file, ())


# --- netCDF ---------------------------------------------------------------------------------------------


def secret_link(file: Any, folder: Path) -> None:
    import h5py

    file["posterior/w2"] = h5py.ExternalLink(str(folder / "secret.nc"), "/posterior/w")


def soft_link(file: Any, folder: Path) -> None:
    import h5py

    file["posterior/w2"] = h5py.SoftLink("/posterior/w")


def external_values(file: Any, folder: Path) -> None:
    file["posterior"].create_dataset("w2", (4,), "u1", external=[(str(folder / "secret.txt"), 0, 4)])


def virtual_values(file: Any, folder: Path) -> None:
    import h5py

    layout = h5py.VirtualLayout((2, 3), "f8")
    layout[:] = h5py.VirtualSource(str(folder / "secret.nc"), "/posterior/w", (2, 3))
    file["posterior"].create_virtual_dataset("w2", layout)


def claim(file: Any, folder: Path) -> None:
    file["posterior"].create_dataset("w2", (2**33,), "f8")


def packed_claim(file: Any, folder: Path) -> None:
    file["posterior"].create_dataset("w2", (2**33,), "f8", chunks=(2**16,), compression="gzip")


def unlimited(file: Any, folder: Path) -> None:
    file["posterior"].create_dataset("w2", (1,), "f8", maxshape=(None,))


def cycle(file: Any, folder: Path) -> None:
    file["posterior/again"] = file["posterior"]


def texts(file: Any, folder: Path) -> None:
    import h5py

    file["posterior"].create_dataset("w2", (200_000,), h5py.string_dtype())


def references(file: Any, folder: Path) -> None:
    import h5py

    file["posterior"].create_dataset("w2", data=[file["posterior"].ref], dtype=h5py.ref_dtype)


HOSTILE = (
    secret_link,
    soft_link,
    external_values,
    virtual_values,
    claim,
    packed_claim,
    unlimited,
    cycle,
    texts,
    references,
)


@pytest.mark.parametrize("harm", HOSTILE)
def test_a_tree_that_refers_outside_or_claims_too_much_is_refused(
    harm: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    import h5py

    read = comparison(tmp_path / "it")
    file = tmp_path / "it" / "svi.nc"
    (tmp_path / "secret.nc").write_bytes(file.read_bytes())
    (tmp_path / "secret.txt").write_text("key!")
    with h5py.File(file, "r+") as opened:
        harm(opened, tmp_path)
    relisted(tmp_path / "it", "comparison.json", "svi.nc")
    tracemalloc.start()
    with pytest.raises(DamagedError, match=r"svi\.nc, damaged: ValueError: "):
        read()
    assert tracemalloc.get_traced_memory()[1] < 2**27
    tracemalloc.stop()


def test_trees_as_methods_write_them_are_read(tmp_path: Path) -> None:
    """Every group, kind of value and coordinate that an export has."""
    x, y = rows()
    bnn.MAP(ppl="pyro", steps=5).fit(model, x, y, feature_names=("a", "b")).save(tmp_path)
    tree = READER.tree(tmp_path / TREE)
    assert "posterior" in tree.children


# --- replacing a posterior --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_the_old_folder_is_back_when_its_replacement_fails(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    rename, seen = Path.rename, []

    def failing(self: Path, target: Path) -> Path:
        seen.append(self.name)
        if self.name == "new":
            raise error("disk full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(error):
        _put_in_place(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "old"
    assert seen == ["old", "new", "new.old"]
    monkeypatch.undo()
    _put_in_place(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]


def test_what_a_killed_replacement_left_is_named(tmp_path: Path) -> None:
    posterior(tmp_path / "it")
    (tmp_path / "it").rename(tmp_path / ".it.0123abcd.old")
    with pytest.raises(InputError, match=r"renaming .*\.it\.0123abcd\.old"):
        bnn.load(tmp_path / "it", model)


def test_a_damaged_posterior_is_replaced_by_saving_again(tmp_path: Path) -> None:
    read = posterior(tmp_path / "it")
    _, before = outcome(read)
    file = tmp_path / "it" / MANIFEST
    file.write_bytes(file.read_bytes().replace(b'"standardised": true', b'"standardised": tru!'))
    assert outcome(read)[0] == "refused"
    assert outcome(posterior(tmp_path / "it")) == ("same", before)


def test_a_damaged_manifest_of_a_grid_says_what_to_do(tmp_path: Path) -> None:
    grid(tmp_path)
    file = tmp_path / grid_result.MANIFEST
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DamagedError, match=r"grid\.json, damaged: .*try running the grid again"):
        GridResult.load(tmp_path)


def test_hashes_are_plain_sha_256(tmp_path: Path) -> None:
    """Any tool can check a folder: the list of a manifest is that of sha256sum."""
    posterior(tmp_path)
    words = json.loads((tmp_path / MANIFEST).read_text())
    assert words["files"] == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in (TREE, ARRAYS)
    }
    content = (tmp_path / MANIFEST).read_text()
    zeroed = content.replace(words["checksum"], "sha256:" + "0" * 64)
    assert words["checksum"] == "sha256:" + hashlib.sha256(zeroed.encode()).hexdigest()
