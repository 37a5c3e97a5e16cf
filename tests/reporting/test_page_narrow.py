"""A page on a telephone: each value says what it is, and nothing is wider than 390 pixels."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.reporting.page import report


def linear(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Gaussian(1.0))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(30, 2))
    rows = (x[:20], x[:20, 0]), (x[20:], x[20:, 0])
    methods = {"map": bnn.MAP(steps=5), "a rather long label of a method": bnn.MAP(steps=6)}
    return report(
        bnn.compare(linear, *rows, methods, reference="map"), tmp_path_factory.mktemp("page") / "p.html"
    )


def test_every_cell_says_what_it_is(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tables = re.findall(r'<table class="(?:sortable|stacked)">.*?</table>', text, re.DOTALL)
    assert len(tables) == len(re.findall("<table", text)) >= 3
    for table in tables:
        head, body = table.split("</thead>")
        cells = [re.sub("<[^>]+>", "", cell).strip() for cell in re.findall(r"<th.*?</th>", head, re.DOTALL)]
        for row in re.findall(r"<tr>.*?</tr>", body, re.DOTALL):
            assert re.findall(r'<td data-heading="([^"]*)"', row) == cells[1:], html.unescape(row)
            assert row.count("<td") == len(cells) - 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_nothing_is_wider_than_a_telephone(page: Path) -> None:
    # Windows of chromium are wider than that, frames need not be.
    frame = page.with_name("frame.html")
    frame.write_text(
        "<script>onload = () => {const d = frames[0].document;"
        "d.querySelectorAll('details').forEach(e => e.open = true);"
        "const wide = [...d.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > 390.5);"
        "document.title = `${d.documentElement.scrollWidth} ${wide.length}`}</script>"
        '<iframe src="p.html" style="width:390px;height:4000px;border:0"></iframe>'
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    ran = subprocess.run(
        [*command, "--window-size=500,4000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r"<title>(\d+) (\d+)</title>", ran.stdout)
    assert found is not None
    assert int(found[1]) <= 390
    assert found[2] == "0"
