"""The command line: what it refuses, what it shows, what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import ppl_bnn
from ppl_bnn.cli import commands, compare, console, plan
from ppl_bnn.evaluation.comparison import columns
from ppl_bnn.inference.registry import MODULES, ROWS
from ppl_bnn.reporting import terminal

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    """40 rows: two numbers, a word, a class 0 or 1, and a target that is nearly a - b."""
    rng = np.random.default_rng(4)
    lines = ["a,b,colour,group,y"]
    for row in range(40):
        a, b = rng.normal(size=2)
        lines.append(f"{a:.3f},{b:.3f},{'red' if row % 3 else 'blue'},{int(a > 0)},{a - b:.3f}")
    file = tmp_path / "small.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A compilation cache cannot be unset within a process, and belongs to no test.
    monkeypatch.setattr(console, "remember_compilations", lambda: None)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: Any) -> tuple[int, str, str]:
    """Exit code, standard output, error stream."""
    result = CliRunner().invoke(commands.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_module_is_the_command_and_is_light(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", "ppl_bnn"]
    for argument, expected in (("--version", f"ppl-bnn {ppl_bnn.__version__}\n"), ("--help", "compare")):
        ran = subprocess.run(
            [*command, argument], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 0
        assert expected in ran.stdout
        loaded = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
        assert "ppl_bnn.cli" in loaded
        assert not loaded & {"jax", "torch", "numpyro", "pyro", "pandas", "sklearn", "arviz", "matplotlib"}


def test_models_are_listed_and_their_cards_shown() -> None:
    code, out, _ = invoke("models")
    assert code == 0
    for name, card in ppl_bnn.zoo.models().items():
        assert f"{name} " in out
        assert str(card.data) in out
    assert "122" in out  # 10 inputs, 10 hidden units, 1 output, 1 noise
    assert "21 386" in out
    assert max(len(line) for line in out.splitlines()) <= 100
    assert "…" not in out
    assert "was not read" not in out
    code, out, _ = invoke("models", "linear_regression")
    assert code == 0
    assert "y_n | x_n, w, b, s ~ N(x_n . w + b, s^2)" in out
    assert "scale=1.0, noise_scale=1.0" in out
    code, _, err = invoke("models", "linear_regresion")
    assert code == 2
    assert "did you mean 'linear_regression'" in err


def test_models_are_listed_with_what_fits_them() -> None:
    from ppl_bnn.zoo.support import declared

    _, out, _ = invoke("models")
    # Columns beside a cell of several lines would stand between its words.
    heading = next(line for line in out.splitlines() if "what it is" in line)
    cell = slice(heading.index("what it is"), heading.index("task, data"))
    words = " ".join(" ".join(line[cell] for line in out.splitlines()).split())
    for name, card in ppl_bnn.zoo.models().items():
        assert f"{card.summary} Methods: {declared().summary(name)}." in words
    assert "Methods: only svi." in words


def test_what_does_not_fit_a_model_is_shown_with_the_reason() -> None:
    from ppl_bnn.zoo.support import declared

    code, out, _ = invoke("show", "last_layer")
    assert code == 0
    shown = out[out.index("Methods that fit it: only map, svi, vbll, laplace, laplace-kron") :]
    assert max(len(line) for line in shown.splitlines()) <= 100
    heading = next(line for line in shown.splitlines() if "does not fit" in line)
    at = heading.index("why")
    names = " ".join(" ".join(line[:at] for line in shown.splitlines()).split())
    reasons = " ".join(" ".join(line[at:] for line in shown.splitlines()).split())
    for rule, methods in declared().missing("last_layer").items():
        assert ", ".join(methods) in names
        assert rule.reason in reasons
    # A file of one's own stands in no table.
    file = Path("mine.py")
    file.write_text(
        "import ppl_bnn as bnn\n\ndef model(x, y=None):\n"
        "    bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Gaussian(1.0))\n"
    )
    code, out, _ = invoke("show", file, "--data", "iris")
    assert code == 0
    assert "output.weight" in out
    assert "Methods" not in out


def test_a_model_that_cannot_be_read_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.py").write_text("def model(x, y=None):\n    raise ValueError('no [such] layer\\nat all')\n")
    code, out, _ = invoke("show", "mine.py", "--data", "iris")
    assert code == 0
    assert "Its sites are not listed: outside of a system it ends in ValueError: no [such] layer\n" in out
    Path("mine.py").write_text("def model(x, y=None):\n    pass\n")
    assert "ModelError: expected exactly one `observe`" in invoke("show", "mine.py", "--data", "iris")[1]

    read = ppl_bnn.zoo.sketch

    def fail(model: Any, features: int) -> Any:
        if getattr(model, "__module__", "").endswith("regression_mlp"):
            raise KeyError("width")
        return read(model, features)

    monkeypatch.setattr(ppl_bnn.zoo, "sketch", fail)
    code, out, _ = invoke("models")
    assert code == 0
    assert "regression_mlp was not read: outside of a system it ends in KeyError: 'width'" in out


def test_a_model_is_shown_with_its_sites() -> None:
    code, out, _ = invoke("show", "regression_mlp", "--set", "width=4")
    assert code == 0
    out = out[: out.index("Methods that fit it")]
    assert "h_n = tanh(x_n W1 + b1)" in out
    assert "width=4" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    # 1 / sqrt(10) and 1 / sqrt(4): variance over fan-in.
    assert rows["hidden0.weight"][1:] == ["Normal(0,", "0.3162)", "10", "x", "4", "40"]
    assert rows["output.weight"][1:] == ["Normal(0,", "0.5)", "4", "x", "1", "4"]
    assert rows["noise"][1:] == ["HalfNormal(1)", "-", "1"]
    assert rows["in"] == ["in", "all", "50"]
    assert "y, given x and these: Gaussian(...)" in out
    code, again, _ = invoke("models", "regression_mlp")
    assert (code, again) == (0, invoke("show", "regression_mlp")[1])
    code, out, _ = invoke("show", "linear_regression", "--data", "wine")
    assert "On wine, with 13 inputs" in out
    code, _, err = invoke("show", "linear_regresion")
    assert (code, "did you mean 'linear_regression'" in err) == (2, True)
    code, _, err = invoke("show", "iris")
    assert (code, "ppl-bnn show MODEL --data iris" in err) == (2, True)


def test_methods_are_advised_before_a_fit(csv: Path) -> None:
    before = sorted(Path().iterdir())
    wanted = ("--data", csv, "--target", "y", "--methods", "map, mc-dropout")
    code, out, err = invoke("advise", "linear_regression", *wanted, "--seconds", "3000")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("read: target y as numbers; ")
    assert "linear_regression on" in out
    assert "Within 50 min on" in out
    assert "\nmap         yes " in out
    assert "\nmc-dropout  refused " in out
    assert sorted(Path().iterdir()) == before
    for arguments, word in (
        (("--seconds", "-1"), "seconds"),
        (("--methods", "nutz"), "nuts"),
        (("--methods", ","), "methods"),
    ):
        code, _, err = invoke("advise", "linear_regression", "--data", csv, "--target", "y", *arguments)
        assert code == 2
        assert word in err


def test_a_prior_is_pictured(csv: Path) -> None:
    code, out, err = invoke(
        "prior", "linear_regression", "--data", csv, "--target", "y", "--draws", "50", "--out", "before"
    )
    assert code == 0, err
    assert "the model expects y between -" in out
    assert "Kept: before/prior.png" in out
    assert Path("before/prior.png").read_bytes().startswith(b"\x89PNG")
    assert "warning" not in out
    wide = ["--set", "scale=200", "--data", csv, "--target", "y", "--out", "before"]
    code, out, _ = invoke("prior", "linear_regression", "--draws", "20", *wide)
    assert (code, "warning: functions drawn from the prior vary by" in out) == (0, True)
    code, _, err = invoke("compare", "linear_regression", "--methods", "map", "--quick", *wide)
    assert (code, "warning: functions drawn from the prior vary by" in err) == (0, True)
    code, out, err = invoke(
        "prior", "classification_mlp", "--data", csv, "--target", "group", "--draws", "30", "--out", "before"
    )
    assert code == 0, err
    assert "ignorance" in out
    for words, arguments in (
        ("whole number of at least 2", ["--draws", "1"]),
        ("did you mean 'regression_mlp'", ["regresion_mlp"]),
    ):
        code, _, err = invoke("prior", *arguments)
        assert code == 2
        assert words in err


def test_data_are_listed() -> None:
    code, out, _ = invoke("data")
    assert code == 0
    for name, card in ppl_bnn.data.datasets().items():
        assert f"{name} " in out
        assert f"{card.rows:,}".replace(",", " ") in out


REFUSALS: list[tuple[list[str], list[str]]] = [
    (["regresion_mlp"], ["unknown model 'regresion_mlp'", "did you mean 'regression_mlp'"]),
    (["iris"], ["the data set 'iris'", "ppl-bnn compare --data iris"]),
    (["absent.py"], ["absent.py, which is no file"]),
    (["--data", "diabets"], ["unknown data set 'diabets'", "did you mean 'diabetes'"]),
    (["--data", "absent.csv"], ["absent.csv, which does not exist"]),
    (["--data", "{csv}"], ["--target", "one of: a, b, colour, group, y"]),
    (["--data", "{csv}", "--target", "z"], ["unknown column", "'z'", "known: a, b, colour, group, y"]),
    (["--data", "{csv}", "--target", "y", "--drop", "colr"], ["'colr'", "did you mean 'colour'"]),
    (["--data", "{csv}", "--target", "y", "--task", "clasification"], ["did you mean 'classification'"]),
    (["--data", "{csv}", "--target", "y", "--task", "classification"], ["try --task regression"]),
    (["--data", "iris", "--target", "y"], ["a CSV file to go with it", "data set 'iris'"]),
    (["--methods", "nuts,sv"], ["unknown method 'sv'", "did you mean 'svi'"]),
    (["--methods", "nuts,nuts"], ["each method once"]),
    (["--methods", ","], ["each method once"]),
    (["--ppl", "piro"], ["unknown system 'piro'", "did you mean 'pyro'"]),
    (["--ppl", "svy=pyro"], ["unknown method 'svy'", "did you mean 'svi'"]),
    (["--ppl", "svi=pyro", "--methods", "nuts"], ["got svi", "--methods nuts,svi"]),
    (["--methods", "nuts,pathfinde"], ["unknown method 'pathfinde'", "did you mean 'pathfinder'"]),
    (["--methods", "mclmc,nuts", "--ppl", "pyro"], ["mclmc in numpyro", "--ppl pyro,mclmc=numpyro"]),
    (["--methods", "stacked,map", "--reference", "nuts"], ["--reference: expected one of", "got nuts"]),
    (["--reference", "nut"], ["unknown method 'nut'", "did you mean 'nuts'"]),
    (["--device", "gpu"], ["'auto', 'cpu' or 'cuda[:i]'", "got 'gpu'", "try --device auto"]),
    (["--seed", "-1"], ["a whole number from 0 to 2**31 - 1", "got -1"]),
    (["--seed", str(2**31)], ["a whole number from 0 to 2**31 - 1"]),
    (["--set", "widht=3"], ["argument of model 'regression_mlp' 'widht'", "did you mean 'width'"]),
    (["--set", "width"], ["NAME=VALUE", "got 'width'"]),
    (["regression_mlp", "--data", "iris"], ["a model for classification", "try classification_mlp"]),
    (["classification_mlp", "--data", "diabetes"], ["a model for regression", "try regression_mlp"]),
    (["--out", "{csv}"], ["a folder that can be written", "small.csv"]),
    (["--out", "{csv}/deeper/still"], ["a folder that can be written", "Not a directory"]),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSALS, ids=lambda value: " ".join(value)[:40])
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: list[str], words: list[str], csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ppl_bnn.evaluation.comparison.run.compare", lambda *_, **__: pytest.fail("it was not refused")
    )
    code, out, err = invoke("compare", *(argument.format(csv=csv) for argument in arguments))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert [entry.name for entry in csv.parent.iterdir()] == ["small.csv"]


def test_folder_of_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, err = invoke("compare")
    assert code == 2
    assert "--out: expected a folder that can be written" in err
    assert "Permission denied" in err


def test_a_missing_column_name_in_a_model_is_shown_literally(tmp_path: Path) -> None:
    # Square brackets are markup to rich; in an error they are just brackets.
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('[bold]x[/bold]')\n")
    code, _, err = invoke("compare", file, "--data", "iris")
    assert code == 2
    assert "RuntimeError: [bold]x[/bold]" in err


def test_quick_comparison_of_a_file(csv: Path) -> None:
    code, out, err = invoke(
        "compare", "--data", csv, "--target", "y", "--drop", "group", "--set", "width=3", "--quick",
        "--methods", "map,laplace", "--ppl", "numpyro", "--report",
    )  # fmt: skip
    assert code == 0, err
    assert "regression_mlp, 20 parameters, on small: 32 training and 8 test rows, 4 features" in err
    assert "MAP (numpyro)" in err
    for words in ("log score", "RMSE", "CRPS", "LOO ELPD", "k-hat", "gradients", "On 8 test rows", "--quick"):
        assert words in out
    assert max(len(line) for line in out.splitlines()) <= 100
    assert "…" not in out
    folder = Path("ppl-bnn-results") / "regression_mlp-small-quick"
    # Each row appears when its method has finished; the first one below the headings.
    running = err.splitlines()
    first = [line.split(" ")[0] for line in running]
    assert first.index("method") < first.index("map") < first.index("laplace")
    assert first.count("method") == 1
    assert f"Kept in {folder}/" in out
    assert {entry.name for entry in folder.iterdir()} == {
        "map.nc", "laplace.nc", "comparison.csv", "comparison.md", "figure.png", "report.html", "comparison.json",
        "comparison.safetensors", "map.prediction.safetensors", "laplace.prediction.safetensors",
    }  # fmt: skip
    assert "<h1>regression_mlp on small</h1>" in (folder / "report.html").read_text(encoding="utf-8")
    # The page can be had again from what was kept, without a fit.
    code, said, err = invoke("report", folder, "--out", "again.html")
    assert (code, said, err) == (0, "again.html\n", "")
    assert Path("again.html").read_bytes() == (folder / "report.html").read_bytes()
    code, _, err = invoke("report", folder, "--reference", "map")
    assert code == 2
    assert "--reference: expected a grid to go with it" in err
    import pandas as pd

    table = pd.read_csv(folder / "comparison.csv", index_col=0)
    assert list(table.index) == ["map", "laplace"]
    assert f"{table.loc['laplace', 'log_score']:.3f}" in out
    for name in table.index:
        row = next(line for line in running if line.startswith(f"{name} "))
        assert f" {table.loc[name, 'log_score']:.3f} ± {table.loc[name, 'log_score_se']:.3f} " in row
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


GRID = """
models = ["linear_regression"]
splits = "random:2@0.8"
reference = "laplace"

[data.small]
file = "small.csv"
target = "y"
drop = ["group"]

[methods.laplace]
ppl = "pyro"
[methods.map]
ppl = "pyro"
[methods.nuts]
settings = { chains = 1, warmup = 5, draws = 3 }
ppl = "pyro"
"""


def test_a_grid_is_run_shown_and_not_computed_twice(csv: Path) -> None:
    Path("two.toml").write_text(GRID.replace("small.csv", str(csv)))
    code, out, err = invoke("compare", "--grid", "two.toml", "--engine", "sequential")
    assert code == 0, out + err
    assert "6 cells" in err
    assert re.search(r"laplace +2 +-?\d+\.\d+ ± ", out)
    folder = Path("ppl-bnn-results/two")
    assert f"Kept in {folder}/" in out
    files = {file: file.stat().st_mtime_ns for file in folder.glob("cells/*")}
    assert len(files) == 6
    code, again, err = invoke("compare", "--grid", "two.toml", "--engine", "sequential")
    assert code == 0, err
    assert again == out
    assert files == {file: file.stat().st_mtime_ns for file in folder.glob("cells/*")}
    code, again, err = invoke("compare", "--grid", "two.toml", "--engine", "sequential", "--report")
    assert code == 0, err
    assert again == f"{out}report.html\n"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<h1>linear_regression on small</h1>" in page
    code, again, err = invoke("report", folder, "--out", "other.html", "--title", "Two", "--reference", "map")
    assert (code, again) == (0, "other.html\n"), err
    other = Path("other.html").read_text(encoding="utf-8")
    assert "<h1>Two</h1>" in other
    assert "The reference map is not valid everywhere" in other
    code, _, err = invoke("report", folder, "--reference", "mop")
    assert code == 2
    assert "did you mean 'map'" in err


ALONE = (
    GRID[: GRID.index("[methods.laplace]")].replace('reference = "laplace"\n', "")
    + """
[methods.map]
ppl = "pyro"
settings = { steps = 20 }
"""
)


def test_a_grid_of_one_method_is_shown(csv: Path) -> None:
    Path("alone.toml").write_text(ALONE.replace("small.csv", str(csv)))
    code, out, err = invoke("compare", "--grid", "alone.toml", "--engine", "sequential")
    assert code == 0, out + err
    # It is behind none, so there is no column of differences.
    assert "the best" not in out.partition("Means over splits")[0]
    assert re.search(r"\nmap +2 +-?\d+\.\d+ ± \d+\.\d+ +\d", out)


def test_a_grid_in_which_one_method_alone_has_a_result_says_why(
    csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, problem: Any, progress: Any) -> None:
        raise ppl_bnn.errors.CurvatureError("the curvature is singular")

    monkeypatch.setattr(ppl_bnn.Laplace, "run", fail)
    Path("alone.toml").write_text(f"{ALONE}[methods.laplace]\n".replace("small.csv", str(csv)))
    code, out, _ = invoke("compare", "--grid", "alone.toml", "--engine", "sequential")
    assert code == 1
    assert re.search(r"\nmap +2 +-?\d+\.\d+ ± \d+\.\d+ +\d", out)
    assert re.search(r"\n *laplace +0 +- +- ", out)
    assert out.count("by laplace, seed 0: CurvatureError: the curvature is singular") == 2

    monkeypatch.setattr(ppl_bnn.MAP, "run", fail)
    code, out, _ = invoke("compare", "--grid", "alone.toml", "--engine", "sequential", "--anew")
    assert code == 1
    assert out.count("CurvatureError") == 4


def test_cells_that_failed_are_computed_anew_on_demand(csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, problem: Any, progress: Any) -> None:
        raise MemoryError("no room")

    Path("alone.toml").write_text(ALONE.replace("small.csv", str(csv)))
    command = ("compare", "--grid", "alone.toml", "--engine", "sequential")
    with monkeypatch.context() as patched:
        patched.setattr(ppl_bnn.MAP, "run", fail)
        code, out, _ = invoke(*command)
        assert code == 1
        assert "--retry-failed computes it again. For want of memory give a process more with --memory" in out
    code, out, _ = invoke(*command)
    assert code == 1
    assert out.count("MemoryError: no room") == 2
    code, out, err = invoke(*command, "--retry-failed")
    assert code == 0, out + err
    assert "--retry-failed" not in out


def test_estimators_from_outside_stand_beside_methods(csv: Path) -> None:
    command = ("compare", "linear_regression", "--data", csv, "--target", "y", "--out", "run")
    code, out, err = invoke(*command, "--methods", "map,bayesian-ridge", "--ppl", "pyro", "--report")
    assert code == 0, out + err
    assert "(pyro), bayesian-ridge (outside)" in " ".join(err.split())
    assert ppl_bnn.Comparison.load("run").table["ppl"].tolist() == ["pyro", "outside"]
    assert "bayesian-ridge" in Path("run/report.html").read_text()
    code, out, err = invoke(*command, "--methods", "bayesian-ridge", "--report")
    assert code == 0, out + err
    assert Path("run/report.html").is_file()
    for words, said in (
        (
            ["--methods", "map,gp", "--reference", "gp"],
            "--reference: expected one of the methods map; got gp",
        ),
        (["--methods", "gp", "--draws", "5"], "expected a method that has draws"),
        (["--methods", "gp", "--ppl", "svi=pyro"], "--ppl: expected methods among"),
    ):
        code, _, err = invoke(*command, *words)
        assert (code, said in " ".join(err.split())) == (2, True), err


def test_what_a_process_may_hold_is_a_size(csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def run(self: Any, *_: Any, **options: Any) -> None:
        given.append((options["memory"], options["retry_failed"]))
        raise KeyboardInterrupt("seen")

    monkeypatch.setattr("ppl_bnn.evaluation.grid.grid.Grid.run", run)
    Path("alone.toml").write_text(ALONE.replace("small.csv", str(csv)))
    for words in (["--memory", "4GB"], ["--memory", "1.5 GiB"], ["--memory", "500MB", "--retry-failed"], []):
        assert invoke("compare", "--grid", "alone.toml", *words)[0] == 130
    assert given == [(4 * 10**9, False), (3 * 2**29, False), (5 * 10**8, True), (None, False)]


def test_a_folder_of_neither_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for folder, said in (
        ("nowhere", "which does not exist"),
        ("other", "without grid.json and comparison.json"),
    ):
        code, out, err = invoke("report", folder)
        assert (code, out) == (2, "")
        assert "DIR: expected the folder of a comparison or of a grid" in err
        assert said in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--grid", "two.toml", "--seed", "1"), "--seed beside it"),
        (("--jobs", "2"), "which --jobs is about"),
        (("--grid", "nowhere.toml"), "nowhere.toml"),
        (("--grid", "two.toml", "--engine", "cloud"), "unknown engine"),
        (("--retry-failed",), "which --retry-failed is about"),
        (("--memory", "4GB"), "which --memory is about"),
        (("--grid", "two.toml", "--memory", "4"), "with its unit, one of MB, GB"),
        (("--grid", "two.toml", "--memory", "4gb"), "got '4gb'; try --memory 4GB"),
        (("--grid", "two.toml", "--memory", "-4GB"), "got '-4GB'"),
        (("--grid", "two.toml", "--memory", "1e3MB"), "got '1e3MB'"),
        (("--grid", "two.toml", "--memory", "0.5MB"), "a size of 1MiB or more"),
        (("--grid", "two.toml", "--memory", "4GB", "--engine", "sequential"), "try no --memory"),
    ],
)
def test_what_a_grid_is_not_told_that_way_is_refused(
    arguments: tuple[str, ...], said: str, csv: Path
) -> None:
    Path("two.toml").write_text(GRID.replace("small.csv", str(csv)))
    code, _, err = invoke("compare", *arguments)
    assert code == 2
    assert said in err


def test_studies_are_listed_and_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from ppl_bnn.zoo import studies

    code, out, _ = invoke("bench")
    assert code == 0
    assert "evidence_framework" in out
    assert "performance/sampling" in out
    asked: list[Any] = []

    def run(command: list[str], env: dict[str, str]) -> Any:
        asked.append(command)
        return type("Done", (), {"returncode": 3})

    monkeypatch.setattr(studies.subprocess, "run", run)
    code, _, _ = invoke("bench", "evidence_framework", "--tiny")
    assert code == 3
    assert asked[0][1].endswith("evidence_framework.py")
    assert asked[0][2:] == ["--tiny", "--out", str(Path("ppl-bnn-results/evidence_framework"))]
    code, _, err = invoke("bench", "evidence")
    assert code == 2
    assert "evidence_framework" in err


def test_the_model_of_the_contributors_guide_is_one() -> None:
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    Path("mine.py").write_text(
        guide.split("## Adding a model", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]
    )
    code, out, err = invoke("show", "mine.py")
    assert code == 0, err
    assert "On diabetes, with 10 inputs:" in out
    assert re.search(r"in all +242\b", out)


def test_variables_of_rows_are_told_from_those_of_all() -> None:
    code, out, err = invoke("show", "latent_inputs")
    assert code == 0, err
    assert re.search(r"^ *z .*each row: 1 +1\b", out, re.MULTILINE)
    assert re.search(r"in all +132\b", out)
    assert re.search(r"and for each row +1\b", out)
    _, listed, _ = invoke("models")
    assert re.search(r"^ *latent_inputs .* 132\b", listed, re.MULTILINE)
    assert listed.count("+1 a row") == 1


def test_show_takes_the_example_of_a_file() -> None:
    Path("mine.py").write_text(
        "import ppl_bnn as bnn\nfrom ppl_bnn import likelihoods, ops\n\n"
        "EXAMPLE = {'words': [[1, 2, 0]]}\n\n\n"
        "def model(x, y=None):\n"
        "    table = bnn.embedding('table', x['words'], 5, 2)\n"
        "    bnn.observe(y, bnn.dense('out', ops.mean(table, axis=1), 1), likelihoods.Gaussian(1.0))\n"
    )
    code, out, err = invoke("show", "mine.py")
    assert code == 0, err
    assert "On the example in its file:" in out
    assert re.search(r"in all +13\b", out)


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_keeps_what_is_finished(
    how: signal.Signals, status: int, csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who started the tests may have told them to ignore Ctrl-C, or to handle SIGTERM.
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def interrupt(self: Any, problem: Any, progress: Any) -> None:
        signal.raise_signal(how)

    monkeypatch.setattr(ppl_bnn.Laplace, "run", interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        code, out, err = invoke(
            "compare", "linear_regression", "--data", csv, "--target", "y", "--quick", "--out", "kept",
            "--methods", "map,laplace,svi", "--ppl", "numpyro", "--report",
        )  # fmt: skip
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert code == status
    page = Path("kept/report.html").read_text()
    assert "was interrupted, or is still being computed. Not fitted: laplace and svi." in page
    # The folder says the same of itself later on.
    code, _, later = invoke("report", "kept", "--out", "later.html")
    assert code == 0
    assert "Not fitted: laplace, svi." in later
    assert "Not fitted: laplace and svi." in Path("later.html").read_text()
    assert "How well it predicts 8 test rows" in out
    assert "interrupted during 'laplace'; finished: map; kept in kept" in err
    assert {"map.nc", "comparison.csv", "comparison.md"} <= {entry.name for entry in Path("kept").iterdir()}
    assert not Path("kept/laplace.nc").exists()

    monkeypatch.setattr(ppl_bnn.MAP, "run", interrupted)
    code, out, err = invoke(
        "compare", "--data", csv, "--target", "y", "--quick", "--methods", "map", "--out", "kept"
    )
    assert code == 130
    assert out == ""
    assert "finished: none" in err


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "at", ["ppl_bnn.reporting.page.report", "ppl_bnn.evaluation.comparison.folder.write_figure"]
)
def test_an_interrupt_after_the_fits_says_where_they_lie(
    at: str, csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at, interrupted)
    code, _, err = invoke(
        "compare", "linear_regression", "--data", csv, "--target", "y", "--quick", "--out", "kept", "--report",
        "--methods", "map", "--ppl", "pyro",
    )  # fmt: skip
    assert code == 130
    assert err.endswith("error: interrupted; finished results are in kept\n")
    assert Path("kept/map.nc").exists()


def test_an_interrupted_grid_leaves_the_page_of_what_is_finished(
    csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("alone.toml").write_text(ALONE.replace("small.csv", str(csv)))
    finished, write = [], ppl_bnn.evaluation.grid.cell.Store.write

    def second(self: Any, key: str, content: Any) -> None:
        if finished:
            raise KeyboardInterrupt
        finished.append(key)
        write(self, key, content)

    monkeypatch.setattr("ppl_bnn.evaluation.grid.cell.Store.write", second)
    code, _, err = invoke(
        "compare", "--grid", "alone.toml", "--engine", "sequential", "--out", "kept", "--report"
    )
    assert code == 130
    assert "1 of 2 cells are finished" in err
    page = Path("kept/report.html").read_text()
    assert (
        "This grid was interrupted, or is still being computed: 1 of 2 cells have not been computed" in page
    )


def test_an_interrupt_of_a_grid_outside_of_its_cells_says_where_they_lie(
    csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("alone.toml").write_text(ALONE.replace("small.csv", str(csv)))
    command = ("compare", "--grid", "alone.toml", "--engine", "sequential", "--out", "kept")
    with monkeypatch.context() as patched:
        # Before there is anything, nothing is said of anything.
        patched.setattr("ppl_bnn.evaluation.grid.grid._planned", interrupted)
        code, _, err = invoke(*command)
        assert (code, err) == (130, "error: interrupted\n")
    with monkeypatch.context() as patched:
        patched.setattr("ppl_bnn.evaluation.grid.result.GridResult.save", interrupted)
        code, _, err = invoke(*command)
    assert code == 130
    assert "error: interrupted; finished results are in kept\n" in err
    assert len(list(Path("kept/cells").iterdir())) == 2
    monkeypatch.setattr("ppl_bnn.evaluation.grid.grid._planned", interrupted)
    code, _, err = invoke(*command)
    assert (code, err) == (130, "error: interrupted; finished results are in kept\n")


@pytest.mark.parametrize("words", [(), ("--out", "kept"), ("--out=kept",)])
def test_an_interrupt_of_a_study_says_where_it_writes(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppl_bnn.zoo import studies

    folder = Path("kept" if words else "ppl-bnn-results/evidence_framework")
    monkeypatch.setattr(studies.subprocess, "run", interrupted)
    code, _, err = invoke("bench", "evidence_framework", *words)
    assert (code, err) == (130, "error: interrupted\n")
    folder.mkdir(parents=True)
    (folder / "table.csv").write_text("")
    code, _, err = invoke("bench", "evidence_framework", *words)
    assert (code, err) == (130, f"error: interrupted; finished results are in {folder}\n")


def test_a_method_that_fails_is_a_red_row_and_exit_code_1(csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, problem: Any, progress: Any) -> None:
        raise ppl_bnn.errors.CurvatureError("the curvature is singular")

    monkeypatch.setattr(ppl_bnn.Laplace, "run", fail)
    code, out, err = invoke(
        "compare", "linear_regression", "--data", csv, "--target", "y", "--quick", "--methods", "map,laplace",
        "--ppl", "numpyro",
    )  # fmt: skip
    assert code == 1
    assert any(line.split()[:3] == ["laplace", "numpyro", "-"] for line in err.splitlines())
    assert "laplace failed: CurvatureError: the curvature is singular" in out
    assert "Kept in" in out


def test_default_model_follows_the_task(monkeypatch: pytest.MonkeyPatch, csv: Path) -> None:
    planned = plan.plan_of(None, "wine", None, [], None, [], 0, False, None)
    assert (planned.name, planned.parameters) == ("classification_mlp", (13 + 3 + 1) * 10 + 3)
    assert planned.out == Path("ppl-bnn-results/classification_mlp-wine")
    planned = plan.plan_of(None, None, None, [], None, ["width=4"], 0, False, None)
    assert (planned.name, planned.table.name, planned.parameters) == (
        "regression_mlp",
        "diabetes",
        12 * 4 + 2,
    )
    # A column of 0 and 1 is a class to a model of classes, and a number to any other.
    planned = plan.plan_of("classification_mlp", str(csv), "group", [], None, [], 0, False, None)
    assert planned.table.task == "classification"
    planned = plan.plan_of("linear_regression", str(csv), "group", [], None, [], 0, False, None)
    assert planned.table.task == "regression"


def test_notes_are_said_once_and_not_at_length() -> None:
    notes = {
        ("a", "rmse"): "one; two.",
        ("a", "crps"): "two; three; four.",
        ("a", "hidden"): "of a column that is not shown.",
        ("b", "crps"): "five.",
    }
    lines, cut = terminal.notes_by_method(notes, {"rmse", "crps"})
    assert lines == {"a": "One; two. Three.", "b": "Five."}
    assert cut == ["a"]


def test_numbers_keep_the_digits_that_matter() -> None:
    assert [columns.number(value, -3) for value in (53.302, 0.06213, 1234.5, 0.0)] == [
        "53.3", "0.0621", "1 234", "0",
    ]  # fmt: skip
    assert [columns.number(value, 0) for value in (805904.0, np.inf)] == ["805 904", "inf"]
    assert columns.number(-1916.56, 1) == "-1916.6"
    row = {"log_score": -5.3975, "log_score_se": 0.0627, "converged": "no", "rmse": np.nan}
    assert columns.cell(row, columns.Column("", "log_score", 3, "log_score_se")) == "-5.397 ± 0.063"
    assert columns.cell(row, columns.Column("", "rmse")) == "-"
    assert columns.cell(row, columns.Column("", "converged")) == "no"
    assert columns.is_alarm(row, columns.Column("", "converged"))


def test_narrow_terminals_lose_columns_and_no_digits(csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    code, out, _ = invoke(
        "compare", "linear_regression", "--data", csv, "--target", "y", "--quick", "--methods", "map",
        "--ppl", "numpyro", "--out", "narrow",
    )  # fmt: skip
    assert code == 0
    assert "(4 columns do not fit)" in out
    assert "…" not in out
    assert max(len(line) for line in out.splitlines()) <= 72


def test_a_model_of_one_system_alone_is_compared_too(csv: Path) -> None:
    file = csv.with_name("native.py")
    file.write_text(
        "import numpyro\nimport numpyro.distributions as dist\n\n"
        "def model(x, y=None):\n"
        "    w = numpyro.sample('w', dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))\n"
        "    with numpyro.plate('rows', x.shape[0]):\n"
        "        numpyro.sample('y', dist.Normal(x @ w, 0.5), obs=y)\n"
    )
    code, out, err = invoke(
        "compare", file, "--data", csv, "--target", "y", "--quick", "--methods", "map", "--out", "native"
    )
    assert code == 0, err
    assert "native, on small: 32 training" in err
    assert "its size is not known: outside of a system it ends in AssertionError" in err
    assert "On 8 test rows map alone gave predictions" in out


def test_systems_of_the_methods() -> None:
    assert plan.systems_of(["nuts", "svi", "laplace", "map"], None) == {
        "nuts": "numpyro", "svi": "pyro", "laplace": "pyro", "map": "numpyro",
    }  # fmt: skip
    assert plan.systems_of(["nuts", "svi"], "pyro") == {"nuts": "pyro", "svi": "pyro"}
    assert plan.systems_of(["nuts", "svi"], "svi=numpyro") == {"nuts": "numpyro", "svi": "numpyro"}
    assert plan.systems_of(["nuts", "svi"], "pyro, nuts=numpyro") == {"nuts": "numpyro", "svi": "pyro"}
    assert plan.systems_of(["ensemble", "smc"], "ensemble=pyro") == {"ensemble": "pyro", "smc": "numpyro"}
    # What is taken where nothing is said has to exist.
    for name, system in plan.systems_of(list(ROWS), None).items():
        assert plan.systems_of([name], system) == {name: system}


def test_every_method_of_the_library_goes_by_its_name() -> None:
    from ppl_bnn.inference.method import Method

    exported = {name: getattr(ppl_bnn, name) for name in ppl_bnn.__all__}
    methods = {
        name: value
        for name, value in exported.items()
        if isinstance(value, type) and issubclass(value, Method) and value is not Method
    }
    assert set(methods) == set(MODULES)
    assert {row.class_name for row in ROWS.values()} == set(MODULES)
    for name, row in ROWS.items():
        for preset in plan.PRESETS:
            assert type(plan.method_of(name, "numpyro", preset, {})) is methods[row.class_name]
    assert plan.method_names("NUTS, mc_dropout") == ["nuts", "mc-dropout"]
    assert plan.method_names("MC-Dropout,laplace-kron") == ["mc-dropout", "laplace-kron"]
    assert plan.method_of("laplace-kron", "numpyro", "full", {}) == ppl_bnn.Laplace(structure="kron")
    ensemble = plan.method_of("ensemble", "pyro", "full", {})
    assert (ensemble.ppl, compare.called(ensemble)) == ("pyro", "Ensemble of MAP")
    # At its defaults a method is what its class makes of no arguments.
    assert plan.method_of("mclmc", "numpyro", "full", {}) == ppl_bnn.MCLMC()


def test_the_reference_is_nuts_unless_another_is_named() -> None:
    assert plan.reference_of(["svi", "nuts"], None) == "nuts"
    assert plan.reference_of(["svi", "mclmc"], None) is None
    assert plan.reference_of(["svi", "mclmc"], "MCLMC") == "mclmc"


@pytest.mark.slow
def test_quick_comparison_of_all_methods_in_both_systems() -> None:
    for system in ("pyro", "numpyro"):
        code, out, err = invoke("compare", "linear_regression", "--quick", "--ppl", system, "--out", system)
        assert code == 0, err
        assert "noise floor" in out
        assert "has not converged" in " ".join(out.split())
        assert {f"{name}.nc" for name in plan.DEFAULT} <= {entry.name for entry in Path(system).iterdir()}


@pytest.mark.slow
def test_quick_comparison_of_all_other_methods(csv: Path) -> None:
    others = [name for name, row in ROWS.items() if name not in plan.DEFAULT and not row.settings]
    code, out, err = invoke(
        "compare", "--data", csv, "--target", "y", "--quick", "--out", "others", "--set", "width=3",
        "--methods", ",".join(others), "--reference", "mclmc",
    )  # fmt: skip
    assert code == 0, out + err
    assert "HMC (numpyro), ChEES (numpyro)" in err
    assert "How far it is from mclmc" in out
    assert max(len(line) for line in out.splitlines()) <= 100
    assert {f"{name}.nc" for name in others} <= {entry.name for entry in Path("others").iterdir()}
