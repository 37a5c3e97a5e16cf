"""Finds the studies and benchmarks in a checkout or in the installed package, and runs one by its name.

A study is a script with its own command line, and runs in its own process. --out sets where it writes; speed benchmarks
print, and write only if requested.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ppl_bnn.core.errors import check_known
from ppl_bnn.zoo.files import shipped

# Modules that studies share, and the scripts that judge stored results and make the references.
_NOT_RUN = ("study", "claims", "verdicts", "problem", "ratios", "grading_outside")
# Files with this beginning make the reference posteriors.
_REFERENCES = "reference"


def folder() -> Path:
    """The folder of the studies, in a checkout or installed."""
    return shipped(Path(__file__), "_studies", "comparisons")


def studies() -> dict[str, Path]:
    """Name -> file, sorted; speed benchmarks are called "performance/sampling" and similar."""
    files = [*folder().glob("*.py"), *(folder() / "performance").glob("*.py")]
    found = {file.relative_to(folder()).with_suffix("").as_posix(): file for file in files}
    run = (name for name in sorted(found) if not found[name].stem.startswith(_REFERENCES))
    return {name: found[name] for name in run if found[name].stem not in _NOT_RUN}


def summary(file: Path) -> str:
    """The first line of a study's docstring, without running it."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a study with the given command line arguments; returns its exit status."""
    known = studies()
    check_known("study", [name], known)
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run([sys.executable, str(known[name]), *arguments], env=environment).returncode
