"""Faults that are planted one by one, and how many of them the default tests find.

A fault is one place of the package written wrongly: a sign, a factor, a threshold, a row, a step that is left out. Each
is planted in a copy of the checkout, and the default tests of its module (the table in CONTRIBUTING.md) run over it, up
to the first that fails. A fault that no test finds shows what the tests do not look at.

    python tests/planted_faults.py                     all of them, with a table at the end
    python tests/planted_faults.py --only stacking     those whose module or name has this word in it
    python tests/planted_faults.py --store             keep what was found in planted_faults.json, fault by fault
    python tests/planted_faults.py --store --missing   only those that have no outcome in that file

    python tests/planted_faults.py --unchecked         without first running the tests on what has no fault

`planted_faults.toml` lists them. A run of all takes about an hour on two cores, so it is a script and no test;
`test_suite_rules.py` holds that each fault can still be planted, and what was stored.

The frameworks are imported once: each run of tests is a child that was forked after that, before any of them computed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
STORED = Path(__file__).with_suffix(".json")
LEAST, TARGET = 150, 0.9
# Seconds that the tests of one fault may take. The tests themselves end none sooner than after 900.
LIMIT = 1200
# Libraries refuse two forks at a time.
FORKING = Lock()
COPIED = ("ppl_bnn", "models", "comparisons", "tests", "pyproject.toml")
# What pytest ends with where tests ran and some failed, and where a file could not even be imported.
FOUND = {1: "failed", 2: "not collected"}


@dataclass(frozen=True)
class Fault:
    """One place written wrongly.

    Attributes
    ----------
    module : str
        The file, relative to `ppl_bnn`.
    name : str
        What is wrong, in a few words.
    old, new : str
        The text of the file, which occurs once, and what takes its place.
    """

    module: str
    name: str
    old: str
    new: str

    @property
    def key(self) -> str:
        return f"{self.module}: {self.name}"

    def planted_in(self, text: str) -> str:
        """The text of the module with the fault in it."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.key}: its text occurs {count} times in the module, not once")
        planted = text.replace(self.old, self.new)
        compile(planted, self.module, "exec")
        return planted


def faults() -> list[Fault]:
    return [Fault(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["fault"]]


def files_by_path() -> dict[str, list[str]]:
    """The table of CONTRIBUTING.md: a path of the package, and the files of tests that go with it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.split("## Which tests go with which module")[1].split("```text\n")[1].split("```")[0]
    return {path: files for path, *files in (line.split() for line in block.splitlines())}


def files_of(module: str, table: dict[str, list[str]], folder: Path = ROOT / "tests") -> list[str]:
    """The files of tests of a module: those that its path names, and those of the longest path in the table.

    The tests of `posterior/storage.py` are `tests/posterior/test_storage.py`, and any `test_storage_*.py` beside it.
    """
    place = Path(module).with_suffix("")
    named = [*(folder / place.parent).glob(f"test_{place.name}.py")]
    named += (folder / place.parent).glob(f"test_{place.name}_*.py")
    found = {path.relative_to(folder).with_suffix("").as_posix() for path in named}
    paths = [path for path in table if module.startswith(path)]
    return sorted(found | set(table[max(paths, key=len)] if paths else ()))


@contextmanager
def copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """So many copies of what the tests need, to take one from and to put it back."""
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for index in range(count):
            copy = Path(folder) / str(index)
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            for entry in (*COPIED, *(path.name for path in ROOT.glob("*.md"))):
                source = ROOT / entry
                copy.mkdir(exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, copy / entry, ignore=ignored)
                else:
                    shutil.copy(source, copy / entry)
            free.put(copy)
        yield free


def run_tests(copy: Path, files: list[str], log: Path) -> None:
    """In a forked child: run the default tests of these files on a copy, up to the first failure, and end."""
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    # Programs that the fault does not change are compiled once for all faults.
    os.environ["PPL_BNN_TESTS_COMPILED"] = str(copy.parent / "compiled")
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    with log.open("w") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
        import pytest

        options = ["-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
        code = pytest.main([*options, *(f"tests/{file}.py" for file in files)])
        sys.stdout.flush()
        os._exit(int(code))


def outcome(copy: Path, files: list[str]) -> str:
    """What the default tests of these files end in: "passed", "failed", or what stopped them."""
    child = multiprocessing.get_context("fork").Process(
        target=run_tests, args=(copy, files, copy.with_suffix(".log"))
    )
    with FORKING:
        child.start()
    child.join(LIMIT)
    if child.exitcode is None:
        child.kill()
        child.join()
        return "did not end"
    if child.exitcode == 0:
        return "passed"
    # A crash of the process (a negative code) is found, too.
    return FOUND.get(child.exitcode, f"ended with {child.exitcode}")


def stored_outcomes() -> dict[str, str]:
    """The outcomes in the file, of the faults that are on the list."""
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    known = {fault.key for fault in faults()}
    return {key: ended for key, ended in stored.items() if key in known}


def search(
    chosen: list[Fault], jobs: int = 2, store: bool = False, unchecked: bool = False
) -> dict[str, str]:
    """For each fault what its tests ended in; `store` writes each outcome at once, so that none is lost."""
    table = files_by_path()
    found: dict[str, str] = {}
    writing = Lock()
    with copies(jobs) as free, ThreadPoolExecutor(jobs) as pool:

        def sound(file: str) -> None:
            copy = free.get()
            try:
                if (ended := outcome(copy, [file])) != "passed":
                    raise SystemExit(f"without a fault, {file}: {ended}. Nothing can be said of faults.")
            finally:
                free.put(copy)

        def plant(fault: Fault) -> None:
            copy = free.get()
            path = copy / "ppl_bnn" / fault.module
            text = path.read_text(encoding="utf-8")
            try:
                path.write_text(fault.planted_in(text), encoding="utf-8")
                found[fault.key] = outcome(copy, files_of(fault.module, table))
            finally:
                path.write_text(text, encoding="utf-8")
                free.put(copy)
            with writing:
                print(f"{found[fault.key]:<14} {fault.key}", flush=True)
                if store:
                    merged = {**stored_outcomes(), **found}
                    STORED.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n", encoding="utf-8")

        if not unchecked:
            list(
                pool.map(sound, sorted({file for fault in chosen for file in files_of(fault.module, table)}))
            )
        list(pool.map(plant, chosen))
    return {fault.key: found[fault.key] for fault in chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose module or name has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="runs of tests at a time")
    parser.add_argument("--store", action="store_true", help=f"keep the outcomes in {STORED.name}")
    parser.add_argument("--missing", action="store_true", help=f"faults without an outcome in {STORED.name}")
    parser.add_argument("--unchecked", action="store_true", help="trust that all tests pass without a fault")
    arguments = parser.parse_args()
    known = stored_outcomes() if arguments.missing else {}
    chosen = [fault for fault in faults() if arguments.only in fault.key and fault.key not in known]
    if not chosen:
        raise SystemExit(
            f"no fault to plant: none has {arguments.only!r} in its module or name, or all are stored"
        )
    # Not the package itself, of which each copy has its own.
    for framework in ("numpyro", "jax", "torch", "pyro", "arviz_base", "sklearn", "pandas", "scipy.stats"):
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module(framework)
    found = search(chosen, arguments.jobs, arguments.store, arguments.unchecked)
    missed = [key for key, ended in found.items() if ended == "passed"]
    print("\n" + "\n".join(f"{count:5d}  {ended}" for ended, count in Counter(found.values()).most_common()))
    print(f"{len(found) - len(missed)} of {len(found)} found: {1 - len(missed) / len(found):.1%}")


if __name__ == "__main__":
    main()
