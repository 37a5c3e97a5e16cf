"""Judges the stored results of all studies again, and writes the table of claims in README.md.

Every verdict is a function of the tables in `results/` and of the rules in `claims/`; this script computes all of them
from there, in seconds, and compares them with those that are stored.

    python comparisons/verdicts.py [--store]

Without --store it prints what differs from the stored verdicts and exits with 1 where anything does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from claims import OUTCOMES, Verdict
from study import Study, write_verdicts

FOLDER = Path(__file__).parent
# A benchmark with claims is judged like a study.
sys.path.append(str(FOLDER / "performance"))
BEGIN, END = "<!-- table of claims: written by verdicts.py -->", "<!-- end of the table of claims -->"


def declared_studies() -> list[str]:
    """The studies whose claims are declared in `claims/`."""
    return sorted(path.stem for path in (FOLDER / "claims").glob("*.toml"))


def judged_studies() -> list[str]:
    """Those of them that have stored results."""
    return [name for name in declared_studies() if (FOLDER / "results" / name / "results.json").is_file()]


def judge_again(name: str, results: Path | None = None) -> list[Verdict]:
    """The verdicts of a study from its stored tables."""
    script: Any = importlib.import_module(name)
    return script.judge(Study.read((results or FOLDER / "results") / name, script.FULL))


def stored(name: str, results: Path | None = None) -> list[Verdict]:
    """The verdicts that are stored with the results of a study."""
    content = json.loads(((results or FOLDER / "results") / name / "results.json").read_text())
    return [Verdict(**each) for each in content["verdicts"]]


def table(verdicts: dict[str, list[Verdict]]) -> str:
    """The table of README.md: a row for each claim, the studies in alphabetical order."""
    counts = Counter(each.verdict for rows in verdicts.values() for each in rows)
    summary = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    waiting = ", ".join(f"`{name}`" for name in declared_studies() if name not in verdicts)
    lines = [
        f"{sum(counts.values())} claims: {summary}."
        + (f" Declared, and not run whole yet: {waiting}." if waiting else ""),
        "",
        "| study | source | claim | outcome | estimate [95 % interval] | n | sizes against the source's | figure |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in verdicts.items():
        lines += [f"| {' | '.join(map(_cell, _row(name, each)))} |" for each in rows]
    return "\n".join(lines)


def _row(name: str, verdict: Verdict) -> list[str]:
    late = "; rule declared after the results" if verdict.declared == "after" else ""
    before = f"; before: {verdict.before}" if verdict.before else ""
    figure = f"[figure](results/{verdict.figure})" if verdict.figure else ""
    outcome = f"**{verdict.verdict.upper()}**{before}{late}"
    count = str(verdict.n) if verdict.n else ""
    return [
        name,
        verdict.source,
        verdict.claim,
        outcome,
        estimate_in_words(verdict),
        count,
        verdict.sizes,
        figure,
    ]


def estimate_in_words(verdict: Verdict) -> str:
    """The estimate of a claim with its interval, as the tables show it; "" for none."""
    if verdict.estimate is None:
        return verdict.rule if verdict.rule == "exact" and verdict.n else ""
    if verdict.low is None or verdict.high is None:
        return f"{verdict.estimate:.3g}, no interval"
    if verdict.rule == "exact":
        return f"{verdict.estimate:.3g} (this fit)"
    return f"{verdict.estimate:.3g} [{verdict.low:.3g}, {verdict.high:.3g}]"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def with_table(text: str, made: str) -> str:
    """The text of README.md with this table in place of the one that it has."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(store: bool = False) -> int:
    """Judge all stored results again; returns the exit status."""
    found = {name: judge_again(name) for name in judged_studies()}
    differing = 0
    for name, verdicts in found.items():
        old = {str(each) for each in stored(name)}
        new = [each for each in verdicts if str(each) not in old]
        differing += len(new) + abs(len(old) - len(verdicts))
        for each in new:
            print(f"{name}: {each}")
        if store:
            folder = FOLDER / "results" / name
            write_verdicts(folder, json.loads((folder / "results.json").read_text()), verdicts)
    readme = FOLDER / "README.md"
    text = readme.read_text()
    made = with_table(text, table(found))
    if store:
        readme.write_text(made)
    elif made != text:
        differing += 1
        print("README.md: its table of claims differs")
    return 0 if store else min(differing, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--store", action="store_true", help="write the verdicts and the table")
    raise SystemExit(main(**vars(parser.parse_args())))
