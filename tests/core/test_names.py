"""Names from outside: cleaned where they enter, and drawn, printed and written as what they are and nothing else."""

from __future__ import annotations

import csv
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import ppl_bnn as bnn
from ppl_bnn.core import names
from ppl_bnn.core.errors import InputError
from ppl_bnn.datasets.tables import Table
from ppl_bnn.reporting.page import report

# What a table that nobody here has seen may be called: mathematics, groups, markup, formulas, codes, half characters.
HOSTILE = (
    "fee_$_in_$",
    r"\1 \g<0> $\frac{1}{",
    "_hidden",
    "<script>alert(1)</script>",
    "=1+1",
    "[bold]x[/] {y} %s",
    "\x1b[31mred\x07",
    "nul\0byte",
    "half \ud800 pair",
    "a\nb\tc",
    "\u202egnirts",
    "größe 温度 🙂",
    "x" * 300,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain name", "plain name"),
        ("fee_$_in_$", "fee_$_in_$"),
        (" a \n b\tc ", "a b c"),
        ("\x1b[31mred", "\ufffd[31mred"),
        ("nul\0byte", "nul\ufffdbyte"),
        ("\ud800", "\ufffd"),
        ("\x9b31m", "\ufffd31m"),
        ("\u202eabc", "\ufffdabc"),
        ("größe 温度 🙂", "größe 温度 🙂"),
        (3, "3"),
    ],
)
def test_a_name_is_cleaned_once(name: Any, expected: str) -> None:
    assert names.clean(name) == expected
    assert names.clean(expected) == expected
    names.clean(name).encode()


@pytest.mark.parametrize("name", HOSTILE)
def test_matplotlib_draws_the_name_itself(name: str) -> None:
    from matplotlib.cbook import is_math_text

    shown = names.for_figure(names.clean(name))
    # What Matplotlib itself takes for mathematics, and for a label to leave out of a legend.
    assert not is_math_text(shown)
    assert not shown.startswith("_")
    assert names.from_figure(shown) == names.clean(name)


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"=sum": ["@cmd", "-1", "-a", "plain", "+1.5e3", "-"], "n": [-1.0, np.nan, 2.0, 3.0, 4.0, 5.0]},
        index=["=1+1", "b", "c", "d", "e", "f"],
    )
    before = frame.copy()
    file = tmp_path / "x.csv"
    names.for_spreadsheet(frame).to_csv(file)
    pd.testing.assert_frame_equal(frame, before)
    with file.open(newline="") as lines:
        rows = list(csv.reader(lines))
    assert rows[0] == ["", "'=sum", "n"]
    assert [row[:2] for row in rows[1:]] == [
        ["'=1+1", "'@cmd"], ["b", "-1"], ["c", "'-a"], ["d", "plain"], ["e", "+1.5e3"], ["f", "-"],
    ]  # fmt: skip
    assert [row[2] for row in rows[1:3]] == ["-1.0", ""]


@pytest.mark.parametrize("name", [*HOSTILE, "../../etc/passwd", "..", "a/b", "C:\\x", "温" * 200, ""])
def test_a_name_becomes_one_file_name(name: str, tmp_path: Path) -> None:
    file = names.for_file(name)
    (tmp_path / file).write_text("")
    assert [entry.name for entry in tmp_path.iterdir()] == [file]


def test_a_table_holds_clean_names() -> None:
    x, y = np.zeros((2, 2)), np.array([0, 1])
    table = Table("a\x1b", x, y, ["b\0", "c\nd"], "\ud800", "classification", ("e\x07", "f"))
    assert (table.name, table.feature_names, table.target_name, table.class_names) == (
        "a\ufffd", ["b\ufffd", "c d"], "\ufffd", ("e\ufffd", "f"),
    )  # fmt: skip
    with pytest.raises(InputError, match="more than once"):
        Table("a", x, y, ["b\0", "b\x01"], "t", "classification")


def linear(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Gaussian(1.0))


def classes(x: Any, y: Any = None, *, classes: int) -> None:
    bnn.observe(y, bnn.mlp(x, [classes]), bnn.likelihoods.Categorical())


def rows(task: str, features: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, features))
    y = x[:, 0] + 0.1 * rng.normal(size=40)
    labels = np.digitize(y, [-0.4, 0.4])
    y = labels if task == "classification" else y
    return (x[:30], y[:30]), (x[30:], y[30:])


@pytest.mark.parametrize(
    ("task", "features", "hostile"),
    [
        ("regression", 1, HOSTILE[:4]),
        pytest.param("regression", 3, HOSTILE[4:8], marks=pytest.mark.slow),
        ("classification", 2, HOSTILE[:3] + HOSTILE[8:10]),
        pytest.param("classification", 3, HOSTILE[10:] + HOSTILE[:2], marks=pytest.mark.slow),
    ],
)
def test_hostile_names_cost_nothing_from_fit_to_page(
    task: str, features: int, hostile: tuple[str, ...], tmp_path: Path
) -> None:
    train, test = rows(task, features)
    found = bnn.compare(
        linear if task == "regression" else classes,
        train,
        test,
        {"map": bnn.MAP(steps=5), "$a_$ [b]": bnn.MAP(steps=5)},
        out=tmp_path,
        feature_names=[f"{name}{at}" for at, name in enumerate((hostile * 3)[:features])],
        class_names=(hostile * 3)[1:4] if task == "classification" else None,
        target_name=" ".join(hostile[:2]),
        card={"name": hostile[-1], "description": hostile[1]},
        reference="map",
    )
    assert not found.failures
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    page = report(found, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "could not be drawn" not in page
    assert "<script>alert" not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)
    assert "$a_$ [b]" in page
    again = bnn.Comparison.load(tmp_path)
    assert again.data["target_name"] == names.clean(" ".join(hostile[:2]))
    assert "\x1b" not in again.markdown()


def test_a_figure_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(comparison: Any) -> Any:
        raise RuntimeError("no figure")

    monkeypatch.setattr("ppl_bnn.evaluation.comparison.figures.predictions_figure", fail)
    train, test = rows("regression", 1)
    with pytest.warns(UserWarning, match=r"figure\.png was not drawn: RuntimeError: no figure"):
        found = bnn.compare(linear, train, test, {"map": bnn.MAP(steps=5)}, out=tmp_path)
    assert list(found.posteriors) == ["map"]
    assert not (tmp_path / "figure.png").exists()
    assert np.array_equal(
        bnn.Comparison.load(tmp_path).predictions["map"].mean, found.predictions["map"].mean
    )
    with pytest.warns(UserWarning, match="not drawn"):
        found.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "comparison.csv").is_file()
    # Pictures that need the model fail one by one, too.
    monkeypatch.undo()
    monkeypatch.setattr("ppl_bnn.evaluation.comparison.figures.drawn_at", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bnn.compare(linear, train, test, {"map": bnn.MAP(steps=5)}, out=tmp_path / "second")


@pytest.mark.parametrize("name", ["=1+1", "-a", "@x", "a\x1b[31m", "a\0", "\ud800", "x" * 101, "a\nb", "+b"])
def test_a_label_of_a_method_is_refused_before_the_fit(name: str) -> None:
    train, test = rows("regression", 1)
    with pytest.raises(InputError, match="names that can be file names"):
        bnn.compare(linear, train, test, {name: bnn.MAP(steps=5)})


def test_names_given_to_a_fit_are_clean(tmp_path: Path) -> None:
    (x, y), _ = rows("classification", 2)
    posterior = bnn.MAP(steps=5).fit(
        partial(classes, classes=3), x, y, feature_names=("a\0", "b\x1b"), class_names=("\ud800", "b", "c")
    )
    assert posterior.feature_names == ("a\ufffd", "b\ufffd")
    posterior.to_datatree().to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
    assert posterior.predict(x).class_names == ("\ufffd", "b", "c")


@pytest.mark.parametrize("label", ["half \ud800", "\x1b[31mred", "a\0b"])
def test_labels_of_text_are_refused_where_no_file_takes_them(label: str) -> None:
    (x, y), _ = rows("classification", 2)
    with pytest.raises(InputError, match="labels without control characters"):
        bnn.MAP(steps=5).fit(partial(classes, classes=2), x, np.array(["plain", label])[(y > 0).astype(int)])


def test_a_label_is_no_part_of_a_regular_expression() -> None:
    from ppl_bnn.reporting.figures.panels import Panel, Picture
    from ppl_bnn.reporting.html import shown

    words = r"\1 \g<0> \g<none> \d"
    panel = Panel(words, lambda axes: axes.plot([0.0, 1.0], label=names.for_figure(words)), words)
    found = shown("key", Picture("title", "", (panel,)))
    assert found["missing"] == ""
    assert r'aria-label="\1 \g&lt;0&gt; \g&lt;none&gt; \d"' in found["panels"][0]["svg"]
    assert [label for label, _ in found["legend"]] == [words]
