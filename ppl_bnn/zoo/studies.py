"""Finds the studies and benchmarks, wherever the package lies, and runs one by its name.

A study is a script with a command line of its own, and runs in a process of its own. Where it writes is said by --out;
benchmarks of speed print, and write nothing unless they are told to.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ppl_bnn.core.errors import unknown_name

# What other studies import, and what nobody runs.
_NOT_RUN = ("study", "problem", "ratios")


def folder() -> Path:
    """Where the studies lie: in a checkout, or installed."""
    package = Path(__file__).resolve().parents[1]
    installed, checkout = package / "_studies", package.parent / "comparisons"
    return installed if installed.is_dir() else checkout


def studies() -> dict[str, Path]:
    """Name -> file, sorted; benchmarks of speed are called "performance/sampling"."""
    files = [*folder().glob("*.py"), *(folder() / "performance").glob("*.py")]
    found = {file.relative_to(folder()).with_suffix("").as_posix(): file for file in files}
    return {name: found[name] for name in sorted(found) if found[name].stem not in _NOT_RUN}


def summary(file: Path) -> str:
    """The first line of a study's docstring, without running it."""
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return said.partition("\n")[0]


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a study with arguments of its own, and give its exit status. Raises UnknownNameError: no such study."""
    known = studies()
    if name not in known:
        raise unknown_name("study", name, known)
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *(place for place in [os.environ.get("PYTHONPATH")] if place)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, str(known[name]), *arguments], env=environment).returncode
