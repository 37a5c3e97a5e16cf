"""The docstrings of the public names: complete by numpydoc's rules, and with examples that run.

The sizes in the examples are small for these tests: an example shows how a name is called, not how long a fit takes.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ppl_bnn as bnn
from ppl_bnn import estimators

PACKAGE = Path(bnn.__file__).parent


def with_examples(file: Path, name: str) -> Iterator[doctest.DocTest]:
    """The docstrings of a file that have examples, each as one test."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes: list[tuple[str, Any]] = [("", tree)]
    while nodes:
        path, node = nodes.pop(0)
        text = ast.get_docstring(node) or ""
        if ">>>" in text:
            line = node.body[0].lineno - 1
            yield doctest.DocTestParser().get_doctest(text, {}, f"{name}::{path}", str(file), line)
        inside = [each for each in node.body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
        nodes += [(f"{path}.{each.name}".strip("."), each) for each in inside]


EXAMPLES = [
    test
    for file in sorted(PACKAGE.rglob("*.py"))
    for test in with_examples(file, file.relative_to(PACKAGE).as_posix())
]


def outcome(test: doctest.DocTest) -> tuple[int, str]:
    """Run an example: how many of its lines fail, and doctest's report of these."""
    # In a module, because dataclasses and the reader of sources look for one.
    page, report = types.ModuleType("example"), []
    test.globs = vars(page)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    return runner.run(test, out=report.append, clear_globs=False).failed, "".join(report)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_an_example_runs_as_shown(example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    failed, report = outcome(example)
    assert failed == 0, report
