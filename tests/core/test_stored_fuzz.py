"""All readers of stored results, fuzzed: no silent change, no raw exception, nothing executed, bounded memory.

Examples are derived from the tests themselves (`derandomize`), so that each run is the same.
"""

from __future__ import annotations

import json
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ppl_bnn as bnn
from ppl_bnn.core import plain_values, stored
from ppl_bnn.evaluation.grid import toml_file as grid_file
from tests import stored_results
from tests.stored_results import KINDS, NOT_READ, files

pytestmark = pytest.mark.slow
SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
EXECUTED = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")


class Executed:
    """Collects what Python reports of code that a file could make it run. A hook cannot be removed, only idle."""

    events: list[str] | None = None
    installed = False

    @classmethod
    def hook(cls, event: str, arguments: Any) -> None:
        if cls.events is not None and event in EXECUTED:
            cls.events.append(event)


def outcome(read: Callable[[], Any]) -> tuple[str, Any]:
    """That of `stored_results`, while nothing may be executed."""
    if not Executed.installed:
        sys.addaudithook(Executed.hook)
        Executed.installed = True
    Executed.events = []
    try:
        found = stored_results.outcome(read)
        assert not Executed.events
    finally:
        Executed.events = None
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_flipped_bits_change_anything_silently(kind: str, tmp_path: Path) -> None:
    """200 flips in each file, of one bit and of several."""
    read = KINDS[kind](tmp_path)
    what, before = outcome(read)
    assert what == "same"
    rng = random.Random(7)
    for file in files(tmp_path):
        content = file.read_bytes()
        for flips in [1] * 150 + [2, 3, 5, 20, 100] * 10:
            damaged = bytearray(content)
            for _ in range(flips):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            if damaged == content:
                continue
            file.write_bytes(damaged)
            what, said = outcome(read)
            assert what != "same", (file, flips)
            assert file.name.removesuffix(".safetensors") in str(said)
        file.write_bytes(content)
    assert outcome(read) == ("same", before)


@pytest.mark.parametrize("kind", list(KINDS))
def test_any_content_is_refused_in_bounded_memory(kind: str, tmp_path: Path) -> None:
    """Cut, lengthened, emptied, replaced by other content."""
    read = KINDS[kind](tmp_path)
    outcome(read)
    places = files(tmp_path)
    whole = {file: file.read_bytes() for file in places}

    @settings(max_examples=60, **SETTINGS)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(places))
        content = whole[file]
        cut = data.draw(st.integers(0, len(content) - 1))
        other = data.draw(st.binary(max_size=200))
        damaged = data.draw(
            st.sampled_from(
                [
                    content[:cut],
                    content + (other or b"x"),
                    other,
                    content[:cut] + other,
                    other + content[cut:],
                ]
            )
        )
        if damaged == content:
            return
        file.write_bytes(damaged)
        tracemalloc.start()
        what, said = outcome(read)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        file.write_bytes(content)
        assert what != "same"
        assert file.name.removesuffix(".safetensors") in str(said)
        assert peak < 2**27

    fuzz()


def places_in(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of each entry of a tree of plain values."""
    found = [before] if before else []
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, each in entries:
        found += places_in(each, (*before, name))
    return found


@pytest.mark.parametrize("kind", ["posterior", "comparison", "grid"])
def test_any_value_in_a_manifest_with_a_right_checksum_raises_named_errors_only(
    kind: str, tmp_path: Path
) -> None:
    """Somebody who knows the format: what is read then may differ, but nothing is raised that has no name."""
    read = KINDS[kind](tmp_path)
    outcome(read)
    file = next(iter(tmp_path.glob("*.json")))
    content = file.read_bytes()
    paths = places_in(json.loads(content))

    @settings(max_examples=150, **SETTINGS)
    @given(st.sampled_from(paths), PLAIN, st.booleans())
    def fuzz(path: tuple[Any, ...], value: Any, removed: bool) -> None:
        words = json.loads(content)
        del words["checksum"]
        inner = words
        for name in path[:-1]:
            inner = inner.get(name, {}) if isinstance(inner, dict) else inner[name]
        if removed:
            inner.pop(path[-1], None) if isinstance(inner, dict) else inner.pop(path[-1])
        else:
            inner[path[-1]] = value
        try:
            stored.write_manifest(file, plain_values.decoded(words))
        except ValueError:
            return
        outcome(read)
        file.write_bytes(content)

    fuzz()


@pytest.mark.parametrize("kind", list(KINDS))
def test_any_header_of_arrays_with_a_right_checksum_raises_named_errors_only(
    kind: str, tmp_path: Path
) -> None:
    read = KINDS[kind](tmp_path)
    outcome(read)
    places = [file for file in files(tmp_path) if file.suffix == ".safetensors"]
    whole = {file: file.read_bytes() for file in places}
    manifests = {file: file.read_bytes() for file in tmp_path.glob("*.json")}
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F64", "F32", "I32", "BOOL", "BF16", "F8_E4M3", "none"]),
            "shape": st.lists(st.integers(-1, 2**40) | st.integers(0, 4), max_size=4),
            "data_offsets": st.lists(st.integers(0, 2**40) | st.integers(0, 64), min_size=1, max_size=3),
        }
    )

    @settings(max_examples=60, **SETTINGS)
    @given(st.sampled_from(places), st.integers(0, 50), entry | PLAIN, st.booleans())
    def fuzz(file: Path, which: int, value: Any, renamed: bool) -> None:
        content = whole[file]
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        names = sorted(name for name in header if name != "__metadata__")
        name = names[which % len(names)]
        if renamed:
            header[repr(value)] = header.pop(name)
        else:
            header[name] = value
        text = json.dumps(header, separators=(",", ":")).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
        with open(file, "r+b") as opened:
            # A renamed entry may have broken the place of the checksum; the file is then read as it is.
            if stored._place(opened) is not None:
                stored.seal(opened)
        for manifest, words in manifests.items():
            if file.name in (listed := json.loads(words)["files"]):
                again = json.loads(words)
                del again["checksum"]
                again["files"] = listed | {file.name: stored.digest(file)}
                stored.write_manifest(manifest, plain_values.decoded(again))
        tracemalloc.start()
        outcome(read)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        file.write_bytes(content)
        for manifest, words in manifests.items():
            manifest.write_bytes(words)
        assert peak < 2**27

    fuzz()


@settings(max_examples=300, **SETTINGS)
@given(st.binary(max_size=300) | PLAIN.map(lambda value: json.dumps(value).encode()))
def test_any_text_is_json_or_a_value_error(content: bytes) -> None:
    try:
        found = plain_values.parse_json(content)
    except ValueError:
        return
    assert json.loads(content) == found or found != found


KEYS = (
    "models",
    "data",
    "methods",
    "splits",
    "seeds",
    "reference",
    "standardise",
    "device",
    "method",
    "file",
)
NAMES = st.sampled_from(
    ["linear_regression", "diabetes", "map", "svi", "nuts", "random:1@0.5", "../x.py", "/"]
)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


VALUES = st.recursive(
    NAMES | st.integers(-3, 10**12) | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | NAMES | st.just("settings"), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, **SETTINGS)
@given(
    st.fixed_dictionaries(
        {"models": VALUES, "data": VALUES, "methods": VALUES}, optional=dict.fromkeys(KEYS[3:], VALUES)
    )
)
def test_any_grid_file_is_a_grid_or_a_named_error(tmp_path_factory: Any, content: dict[str, Any]) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_text("\n".join(f"{name} = {toml(value)}" for name, value in content.items()))
    what, said = outcome(lambda: grid_file.read(file, bnn.Grid))
    assert what != "refused" or "any.toml" in said


@settings(max_examples=150, **SETTINGS)
@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_a_grid_file_or_a_named_error(tmp_path_factory: Any, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    with pytest.raises(bnn.errors.BNNError, match=r"any\.toml"):
        grid_file.read(file, bnn.Grid)


def test_what_is_not_read_back_is_in_no_list(tmp_path: Path) -> None:
    read = KINDS["comparison"](tmp_path)
    _, before = outcome(read)
    for name in NOT_READ:
        (tmp_path / name).write_text("damaged")
    assert outcome(read) == ("same", before)
