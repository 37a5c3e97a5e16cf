"""The rules that the tests themselves keep: no shared generator, no clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import planted_faults
from tests.planted_faults import Fault, files_by_path, files_of

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
GENERATORS = {"default_rng", "RandomState", "Generator", "PRNGKey"}
CLOCKS = {"perf_counter", "monotonic", "process_time", "thread_time"}


def called(node: ast.AST) -> str:
    """The last name of a called function: "default_rng" of np.random.default_rng(0)."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def shared_generators(tree: ast.Module) -> Iterator[int]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and called(node.value) in GENERATORS:
            yield node.lineno


def timed_assertions(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and any(called(part) in CLOCKS for part in ast.walk(node.test)):
            yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_test_has_a_generator_of_its_own_and_no_clock(path: Path) -> None:
    # A generator that tests share makes the numbers of one depend on which others ran before it.
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert list(shared_generators(tree)) == []
    assert list(timed_assertions(tree)) == []


def test_the_readers_see_what_they_look_for() -> None:
    tree = ast.parse(
        "import time\nrng = np.random.default_rng(0)\nX = np.random.default_rng(0).normal()\n"
        "def test():\n    rng = np.random.default_rng(0)\n    assert time.monotonic() - begin < 5\n"
    )
    assert list(shared_generators(tree)) == [2]
    assert list(timed_assertions(tree)) == [6]


def modules() -> list[str]:
    package = FOLDER.parent / "ppl_bnn"
    return sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))


def test_every_module_has_tests_by_its_path_or_by_the_table_of_contributing() -> None:
    table = files_by_path()
    missing = [name for name in modules() if Path(name).name != "__init__.py" and not files_of(name, table)]
    assert missing == []
    unknown = [path for path in table if not any(name.startswith(path) for name in modules())]
    assert unknown == []
    files = {file for listed in table.values() for file in listed}
    assert [file for file in sorted(files) if not (FOLDER / f"{file}.py").exists()] == []


def test_the_tests_of_a_module_are_found_by_its_path_and_in_the_table(tmp_path: Path) -> None:
    table = {"language/": ["test_language"], "language/ops.py": ["layers/test_basic"]}
    assert files_of("language/ops.py", table, tmp_path) == ["layers/test_basic"]
    assert files_of("language/graph.py", table, tmp_path) == ["test_language"]
    assert files_of("scores.py", table, tmp_path) == []
    (tmp_path / "language").mkdir()
    for name in ("test_ops", "test_ops_torch", "test_opsis"):
        (tmp_path / "language" / f"{name}.py").touch()
    expected = ["language/test_ops", "language/test_ops_torch", "layers/test_basic"]
    assert files_of("language/ops.py", table, tmp_path) == expected


@pytest.mark.parametrize("module", sorted({fault.module for fault in planted_faults.faults()}))
def test_every_planted_fault_can_still_be_planted(module: str) -> None:
    text = (FOLDER.parent / "ppl_bnn" / module).read_text(encoding="utf-8")
    for fault in planted_faults.faults():
        if fault.module == module:
            assert fault.planted_in(text) != text


def test_a_fault_whose_place_is_gone_or_double_is_refused() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        Fault("scores.py", "gone", "old", "new").planted_in("x = 1")
    with pytest.raises(ValueError, match="occurs 2 times"):
        Fault("scores.py", "double", "x", "y").planted_in("x = x")


def test_the_default_tests_find_nine_of_ten_planted_faults() -> None:
    outcomes = planted_faults.stored_outcomes()
    assert set(outcomes) == {fault.key for fault in planted_faults.faults()}
    assert len(outcomes) >= planted_faults.LEAST
    found = sum(ended != "passed" for ended in outcomes.values())
    assert found >= planted_faults.TARGET * len(outcomes)
