"""Faults that are planted one by one, and how many of them the default tests find.

A fault is one place of the package written wrongly: a sign, a factor, a threshold, a row, a step that is left out. Each
is planted in a copy of the checkout, and the default tests of its module (the table in CONTRIBUTING.md) run over it, up
to the first that fails. A fault that no test finds shows what the tests do not look at.

    python tests/planted_faults.py                     all of them, with a table at the end
    python tests/planted_faults.py --only stacking     those whose module or name has this word in it
    python tests/planted_faults.py --store             keep what was found in planted_faults.json

`planted_faults.toml` lists them. A run of all takes an hour or two on two cores, so it is a script and no test;
`test_suite_rules.py` holds that each fault can still be planted, and what was stored.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
STORED = Path(__file__).with_suffix(".json")
LEAST, TARGET = 150, 0.9
# Seconds that the tests of one fault may take. The tests themselves end none sooner than after 900.
LIMIT = 1200
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


def files_of(module: str, table: dict[str, list[str]]) -> list[str]:
    """The files of the longest path that the module begins with; [] where there is none."""
    return (
        table[max(paths, key=len)] if (paths := [path for path in table if module.startswith(path)]) else []
    )


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


def outcome(copy: Path, files: list[str]) -> str:
    """What the default tests of these files end in: "passed", "failed", or what stopped them."""
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        # Programs that the fault does not change are compiled once for all faults.
        "PPL_BNN_TESTS_COMPILED": str(copy.parent / "compiled"),
    }
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *(f"tests/{file}.py" for file in files)],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "did not end"
    if done.returncode == 0:
        return "passed"
    # A crash of the process (a negative code) is found, too.
    return FOUND.get(done.returncode, f"ended with {done.returncode}")


def search(chosen: list[Fault], jobs: int = 2) -> dict[str, str]:
    """For each fault what its tests ended in."""
    table = files_by_path()
    found: dict[str, str] = {}
    with copies(jobs) as free, ThreadPoolExecutor(jobs) as pool:

        def sound(files: tuple[str, ...]) -> None:
            copy = free.get()
            try:
                if (ended := outcome(copy, list(files))) != "passed":
                    raise SystemExit(
                        f"without a fault, {', '.join(files)}: {ended}. Nothing can be said of faults."
                    )
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
            print(f"{found[fault.key]:<14} {fault.key}", flush=True)

        list(pool.map(sound, sorted({tuple(files_of(fault.module, table)) for fault in chosen})))
        list(pool.map(plant, chosen))
    return {fault.key: found[fault.key] for fault in chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose module or name has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="runs of tests at a time")
    parser.add_argument("--store", action="store_true", help=f"keep the outcomes in {STORED.name}")
    arguments = parser.parse_args()
    chosen = [fault for fault in faults() if arguments.only in fault.key]
    if not chosen:
        raise SystemExit(f"no fault has {arguments.only!r} in its module or name")
    found = search(chosen, arguments.jobs)
    missed = [key for key, ended in found.items() if ended == "passed"]
    print("\n" + "\n".join(f"{count:5d}  {ended}" for ended, count in Counter(found.values()).most_common()))
    print(f"{len(found) - len(missed)} of {len(found)} found: {1 - len(missed) / len(found):.1%}")
    if arguments.store:
        stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
        known = {fault.key for fault in faults()}
        merged = {key: ended for key, ended in {**stored, **found}.items() if key in known}
        STORED.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
