"""The page of the benchmarks is what page.py writes from the stored results."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "comparisons" / "performance"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("page")


def test_the_page_is_written_from_the_stored_results(page):
    written = page.PAGE.read_text()
    assert written == page.page()
    kept = {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "results").glob("*.json"))}
    measured = [name for name, content in kept.items() if content.get("ratios")]
    assert measured
    assert re.findall(r"^## `(\w+)\.py`$", written, re.MULTILINE) == measured


@pytest.mark.parametrize(("median", "verdict"), [(0.9, "met"), (0.899, "not met")])
def test_a_target_is_met_from_its_value_on(page, median, verdict):
    kept = json.loads((FOLDER / "results" / "threads.json").read_text())
    kept["ratios"] = [dict(kept["ratios"][0], target=0.9, median=median)]
    (row,) = [line for line in page.section("threads", kept) if line.startswith("| two threads")]
    assert row.endswith(f"| 0.9 | {verdict} |")
