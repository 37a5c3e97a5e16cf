"""Grids in TOML files: what they say, and that an error names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

import ppl_bnn as bnn
from ppl_bnn.core.errors import BNNError, InputError
from ppl_bnn.evaluation.grid.grid import Grid
from ppl_bnn.zoo.support import declared

SMALL = 'models = ["linear_regression"]\ndata = ["diabetes"]\nmethods = ["map"]\n'


def read(folder: Path, text: str) -> Grid:
    file = folder / "uci.toml"
    file.write_text(text)
    return Grid.from_toml(file)


def test_names_are_enough(tmp_path: Path) -> None:
    grid = read(tmp_path, SMALL)
    assert [list(axis) for axis in (grid.models, grid.data, grid.methods)] == [
        ["linear_regression"], ["diabetes"], ["map"],
    ]  # fmt: skip
    assert grid.methods["map"] == bnn.MAP()
    assert (grid.splits, grid.seeds, grid.reference) == (("random:5@0.9",), (0,), None)
    assert (grid.standardise, grid.device) == (True, "auto")


def test_everything_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import ppl_bnn as bnn\n\n\ndef model(x, y=None, *, noise=1.0):\n"
        "    bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Gaussian(noise))\n"
    )
    (tmp_path / "mine.csv").write_text("a,id,y\n1,1,2.5\n2,2,4\n3,3,6\n4,4,8\n")
    grid = read(
        tmp_path,
        """
        splits = ["time@0.5", "random:3@0.5"]
        seeds = [3, 1]
        reference = "long"
        standardise = false
        device = "cpu"
        [models]
        plain = "linear_regression"
        "mine.py" = {}
        [models.wide]
        model = "regression_mlp"
        arguments = { width = 50 }
        [models.noisy]
        model = "mine.py"
        arguments = { noise = 2.0 }
        [data.diabetes]
        [data.own]
        file = "mine.csv"
        target = "y"
        drop = ["id"]
        splits = "time@0.75"
        [methods.laplace-kron]
        [methods.long]
        method = "nuts"
        settings = { draws = 2000, start = { noise = 1.0 } }
        [methods.in-pyro]
        method = "svi"
        ppl = "pyro"
        [methods.quick]
        method = "map"
        settings = { steps = 7 }
        [methods.several]
        method = "ensemble"
        member = "quick"
        settings = { size = 3 }
        [methods.warm]
        method = "nuts"
        start = "svi"
        [methods.stacked]
        """,
    )
    assert list(grid.models) == ["plain", "mine.py", "wide", "noisy"]
    assert grid.models["wide"].keywords == {"width": 50}
    assert grid.models["noisy"].keywords == {"noise": 2.0}
    assert bnn.zoo.sketch(grid.models["mine.py"], 1).parameters == 2
    assert grid.data["diabetes"] == "diabetes"
    assert grid.data["own"].feature_names == ["a"]
    assert grid.splits == {"diabetes": ("time@0.5", "random:3@0.5"), "own": ("time@0.75",)}
    assert grid.methods == {
        "laplace-kron": bnn.Laplace(structure="kron"),
        "long": bnn.NUTS(draws=2000, start={"noise": 1.0}),
        "in-pyro": bnn.SVI(ppl="pyro"),
        "quick": bnn.MAP(steps=7),
        "several": bnn.Ensemble(member=bnn.MAP(steps=7), size=3),
        "warm": bnn.NUTS(start=bnn.SVI()),
        "stacked": declared().methods["stacked"].build("numpyro"),
    }
    assert (grid.seeds, grid.reference, grid.standardise, grid.device) == ((3, 1), "long", False, "cpu")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models = 3 4", ["a TOML file", "uci.toml", "line 1"]),
        ('modles = ["linear_regression"]', ["uci.toml: unknown key 'modles': did you mean 'models'"]),
        ('models = ["linear_regression"]\nmethods = ["map"]', ["uci.toml, data: expected the data of the grid"]),
        (SMALL.replace("linear_regression", "linear_regresion"), ["uci.toml, models.linear_regresion", "did you mean"]),
        (SMALL.replace("linear_regression", "absent.py"), ["uci.toml, models.absent", "no file"]),
        (SMALL.replace("diabetes", "diabets"), ["uci.toml, data.diabets", "did you mean 'diabetes'"]),
        (SMALL.replace("map", "mapp"), ["uci.toml, methods.mapp", "did you mean 'map'"]),
        (SMALL.replace('["map"]', '["map", "map"]'), ["uci.toml, methods: expected labels that differ"]),
        (SMALL.replace('["map"]', '"map"'), ["uci.toml, methods: expected a list of names"]),
        (SMALL.replace('["map"]', "[3]"), ["uci.toml, methods: expected a list of names"]),
        (SMALL + 'reference = "nuts"', ["uci.toml: unknown reference 'nuts'", "known: map"]),
        (SMALL + 'splits = "random"', ["uci.toml: splits: expected"]),
        (SMALL + "seeds = 0", ["uci.toml: seeds: expected"]),
        (SMALL + 'standardise = "no"', ["uci.toml: standardise: expected"]),
        (SMALL + 'device = "gpu"', ["uci.toml: device: expected"]),
        (
            'data = ["diabetes"]\nmethods = ["map"]\n[models.a]\nmodel = "regression_mlp"\narguments = { widht = 3 }',
            ["uci.toml, models.a", "did you mean 'width'"],
        ),
        (
            'data = ["diabetes"]\nmethods = ["map"]\n[models.a]\nmodel = "regression_mlp"\nwidth = 3',
            ["uci.toml, models.a", "unknown key 'width'", "known: arguments, model"],
        ),
        (
            'models = ["linear_regression"]\ndata = ["diabetes"]\n[methods.nuts]\nsettings = { drawz = 3 }',
            ["uci.toml, methods.nuts", "did you mean 'draws'"],
        ),
        (
            'models = ["linear_regression"]\ndata = ["diabetes"]\n[methods.nuts]\nsettings = { draws = -3 }',
            ["uci.toml, methods.nuts", "-3"],
        ),
        (
            'models = ["linear_regression"]\ndata = ["diabetes"]\n[methods.nuts]\nppl = "piro"',
            ["uci.toml, methods.nuts", "did you mean 'pyro'"],
        ),
        (
            'models = ["linear_regression"]\ndata = ["diabetes"]\n[methods.mclmc]\nppl = "pyro"',
            ["uci.toml, methods.mclmc", "numpyro"],
        ),
        (
            'models = ["linear_regression"]\ndata = ["diabetes"]\n[methods.ensemble]\nmember = "mapp"',
            ["uci.toml, methods.mapp", "did you mean 'map'"],
        ),
        (
            'models = ["linear_regression"]\ndata = ["diabetes"]\n[methods.a]\nmethod = "ensemble"\nmember = "b"\n'
            '[methods.b]\nmethod = "ensemble"\nmember = "a"',
            ["uci.toml, methods.a", "a of b of a"],
        ),
        ('models = ["linear_regression"]\nmethods = ["map"]\n[data.a]\nfile = "a.csv"', ["uci.toml, data.a", "target"]),
        (
            'models = ["linear_regression"]\nmethods = ["map"]\n[data.a]\nfile = "a.csv"\ntarget = "y"',
            ["uci.toml, data.a", "a.csv, which does not exist"],
        ),
        (
            'models = ["linear_regression"]\nmethods = ["map"]\n[data.diabetes]\ntarget = "y"',
            ["uci.toml, data.diabetes", "a file for target"],
        ),
        (
            'models = ["linear_regression"]\nmethods = ["map"]\n[data.yacht]\noptions = { instant = true }',
            ["uci.toml, data.yacht", "no option"],
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_file_and_the_key(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(BNNError) as caught:
        read(tmp_path, text)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its full path"):
        Grid.from_toml(tmp_path / "absent.toml")
    with pytest.raises(InputError, match="a TOML file"):
        Grid.from_toml(tmp_path)
