"""What the words of the command line mean: sizes, settings, columns of a file, completion; and what a refusal costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ppl_bnn
from ppl_bnn.cli import commands, complete, console, plan
from ppl_bnn.core.errors import BNNError, InputError
from ppl_bnn.evaluation.outside.known import ESTIMATORS
from ppl_bnn.inference.registry import ROWS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "remember_compilations", lambda: None)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    lines = [f"{row},{row % 3},{'red' if row % 2 else 'blue'},{row % 2},{row / 3:.3f}" for row in range(40)]
    file = tmp_path / "small.csv"
    file.write_text("a,b,colour,flag,y\n" + "\n".join(lines) + "\n")
    return file


def invoke(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(commands.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def planned(source: Path, target: str, model: str | None = None, **options: Any) -> plan.Plan:
    words = {"drop": [], "task": None, "settings": [], "seed": 0, "quick": False, "out": None} | options
    return plan.plan_of(model, str(source), target, **words)


# --- sizes ------------------------------------------------------------------------------------------------


def test_sizes_reach_every_method_that_has_them() -> None:
    systems = dict.fromkeys(["nuts", "map", "ensemble", "stacked-nuts", "smc"], "numpyro")
    sizes = {"draws": 7, "warmup": 8, "chains": 3, "steps": 9, "budget": 10.0}
    found: dict[str, Any] = plan.methods_of(list(systems), systems, "full", sizes)
    assert found["nuts"] == ppl_bnn.NUTS(draws=7, warmup=8, chains=3, budget=10.0)
    assert found["map"] == ppl_bnn.MAP(steps=9)
    assert found["ensemble"].member == found["map"]
    assert found["stacked-nuts"].member == found["nuts"]
    assert found["smc"] == ppl_bnn.SMC(budget=10.0)
    # What is not said stays as it is, and what is said goes before --quick.
    nothing = dict.fromkeys(sizes)
    assert plan.methods_of(["nuts"], {"nuts": "numpyro"}, "full", nothing) == {"nuts": ppl_bnn.NUTS()}
    quick: Any = plan.methods_of(["nuts"], {"nuts": "numpyro"}, "quick", {**nothing, "draws": 7})["nuts"]
    assert (quick.draws, quick.warmup) == (7, plan.QUICK["warmup"])
    names = ["nuts", "svi", "map"]
    short: Any = plan.methods_of(names, dict.fromkeys(names, "numpyro"), "short", {**nothing, "draws": 7})
    assert short["nuts"] == ppl_bnn.NUTS(draws=7, warmup=500)
    assert (short["svi"], short["map"]) == (ppl_bnn.SVI(steps=5000), ppl_bnn.MAP())


def test_only_the_command_without_arguments_has_short_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def ended(names: list[str], systems: dict[str, str], preset: str, sizes: dict[str, Any]) -> None:
        found.append(preset)
        raise InputError("ended here")

    monkeypatch.setattr(plan, "methods_of", ended)
    for words in (
        [],
        ["--seed", "1"],
        ["--quick"],
        ["--methods", "nuts"],
        ["regression_mlp"],
        ["--data", "yacht"],
    ):
        invoke("compare", *words)
    assert found == ["short", "short", "quick", "full", "full", "full"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "map", "--draws", "5"], ["--draws: expected a method that has draws", "got map"]),
        (["--methods", "nuts", "--steps", "5"], ["--steps: expected a method that has steps"]),
        (["--methods", "nuts", "--draws", "0"], ["whole number of at least 1", "got 0"]),
        (["--methods", "nuts", "--budget", "-1"], ["positive number", "got -1"]),
        (["--methods", "nuts", "--ppl", "pyro", "--budget", "5"], ["None in Pyro"]),
        (["--set", "width=1000000000"], ["--set width: expected a whole number up to 1000000"]),
        (["--set", "depth=-2000000"], ["--set depth: expected a whole number up to 1000000"]),
        (["--set", "width=1000000", "--set", "depth=3"], ["at most 100 million numbers to infer"]),
        (["--set", "width=abc"], ["--set: dense('hidden0'): expected a positive whole number", "got 'abc'"]),
        (["--set", "width=0"], ["expected a positive whole number", "got 0"]),
        (["--set", "depth=[1]"], ["--set: expected values that the model takes; got depth=[1]"]),
        (["--set", "width=3", "--set", "width=4"], ["each name once", "width twice"]),
        (["--grid", "x.toml", "--draws", "5"], ["--draws beside it"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_what_no_fit_can_mean_is_one_error(
    arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ppl_bnn.evaluation.comparison.run.compare", lambda *_, **__: pytest.fail("it was not refused")
    )
    code, out, err = invoke("compare", *arguments)
    assert (code, out, err.count("\n"), err.count("expected")) == (2, "", 1, 1)
    for word in words:
        assert word in err


def test_the_largest_model_that_is_not_refused() -> None:
    function = plan.load_model("linear_regression", False, {})
    assert plan.sketch_of(function, ppl_bnn.zoo.MOST_NUMBERS - 2)[0].parameters == ppl_bnn.zoo.MOST_NUMBERS
    with pytest.raises(ppl_bnn.zoo.TooLargeError, match="100 000 001 with site"):
        plan.sketch_of(function, ppl_bnn.zoo.MOST_NUMBERS - 1)
    plan.load_model("regression_mlp", False, {"width": plan.MOST_WHOLE})
    with pytest.raises(InputError, match="up to 1000000; got 1000001"):
        plan.load_model("regression_mlp", False, {"width": plan.MOST_WHOLE + 1})


# --- tables -----------------------------------------------------------------------------------------------


def test_the_target_decides_the_task_and_task_always_wins(csv: Path) -> None:
    assert planned(csv, "flag").name == "classification_mlp"
    assert planned(csv, "flag", task="regression").name == "regression_mlp"
    assert planned(csv, "b").name == "regression_mlp"
    assert planned(csv, "b", task="classification").name == "classification_mlp"
    assert planned(csv, "colour").name == "classification_mlp"
    # A model of numbers reads 0 and 1 as numbers: they may be counts.
    counts = planned(csv, "flag", "count_mlp")
    assert counts.table.task == "regression"
    assert "flag as numbers, though only 2 whole ones occur (0, 1); task=" in counts.table.reading


def test_what_was_read_as_what_is_said_before_a_fit(csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Begun(Exception):
        pass

    def begin(*_: Any, **__: Any) -> None:
        raise Begun

    monkeypatch.setattr("ppl_bnn.evaluation.comparison.run.compare", begin)
    result = CliRunner().invoke(
        commands.app, ["compare", "--data", str(csv), "--target", "b", "--drop", "flag", "--methods", "map"]
    )
    assert isinstance(result.exception, Begun)
    assert (
        "read: target b as numbers, though only 3 whole ones occur (0, 1, 2); --task classification reads them as "
        "classes; a, y as numbers; colour as 2 categories (blue, red); 1 left out\n"
    ) in result.stderr
    code, _, err = invoke("advise", "--data", csv, "--target", "flag", "--methods", "map", "--seconds", "-1")
    assert code == 2
    assert "read: target flag as 2 classes (0, 1); --task regression reads them as numbers" in err


def test_results_of_two_files_called_data_lie_in_two_folders(tmp_path: Path, csv: Path) -> None:
    for folder in ("houses", "boats"):
        (tmp_path / folder).mkdir()
        csv.rename(tmp_path / folder / "data.csv").write_text(
            "a,y\n" + "".join(f"{row},{row / 3}\n" for row in range(9))
        )
        csv.write_text("")
        found = planned(tmp_path / folder / "data.csv", "y")
        assert (found.table.name, found.out.name) == (folder, f"regression_mlp-{folder}")


def test_escape_codes_do_not_reach_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "codes.csv"
    file.write_text("a\x1b[31m,b\x07,y\n1,x\x1b[2J,3.5\n2,,4.5\n3,z,5.5\n")
    code, out, err = invoke("compare", "--data", file, "--target", "y")
    assert (code, "column 'b\ufffd'" in err) == (2, True)
    code, out, err = invoke("compare", "--data", file)
    assert (code, "a\ufffd[31m, b\ufffd, y" in err) == (2, True)
    for words in (["mo\x1b[31mdel"], ["--data", "a\x1b[31m.csv", "--target", "y"]):
        code, out, err = invoke("compare", *words)
        assert code == 2
        assert "\x1b" not in out + err


def test_the_picture_of_a_prior_is_a_file_where_it_is_called_one(csv: Path) -> None:
    words = ["linear_regression", "--data", csv, "--target", "y", "--draws", "5"]
    code, out, err = invoke("prior", *words, "--out", "pictures/mine.png")
    assert code == 0, err
    assert Path("pictures/mine.png").read_bytes().startswith(b"\x89PNG")
    assert "Kept: pictures/mine.png" in out
    assert [entry.name for entry in Path("pictures").iterdir()] == ["mine.png"]


# --- completion -------------------------------------------------------------------------------------------


def completed(*words: str, folder: Path) -> tuple[list[str], set[str]]:
    """What bash is offered for the last of the words, and the modules that this took."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "_PPL_BNN_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["ppl-bnn", *words]),
        "COMP_CWORD": str(len(words)),
    }
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ppl_bnn"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return ran.stdout.split(), {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}


HEAVY = {"jax", "torch", "numpyro", "pyro", "pandas", "sklearn", "arviz", "matplotlib"}
# SciPy loads these when they are first used; its root is as light as NumPy.
HEAVY |= {"scipy.stats", "scipy.special", "scipy.optimize", "scipy.linalg"}


def test_the_tab_key_completes_in_a_shell(csv: Path) -> None:
    found, loaded = completed("compare", "regression_m", folder=csv.parent)
    assert found == ["regression_mlp"]
    assert not loaded & HEAVY
    found, loaded = completed("compare", "--data", "small.csv", "--target", "c", folder=csv.parent)
    assert found == ["colour"]
    assert not loaded & HEAVY
    assert "--install-completion" in invoke("--help")[1]


def test_what_is_completed() -> None:
    assert complete.models("linear_r") == ["linear_regression"]
    assert complete.datasets("diab") == ["diabetes", "diabetes_levels"]
    known = [*ROWS, *ESTIMATORS]
    assert complete.methods("nuts,m") == [f"nuts,{name}" for name in known if name.startswith("m")]
    assert complete.methods("map,ma") == []
    assert complete.method("nu") == ["nuts"]
    assert complete.methods("svi,laplace-k") == ["svi,laplace-kron"]
    assert complete.systems("svi=p") == ["svi=pyro"]
    assert complete.tasks("c") == ["classification"]
    assert "evidence_framework" in complete.studies("ev")


# --- what a refusal costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("a,b,y\n1,3.1%,2\n2,4%,3\n", "y"),
        ("a,b,y\n1,,2\n2,4,3\n", "y"),
        ("a,b,y\n1,2,red\n2,4,red\n", "y"),
        ("a,b,y\n1,2,3\n", "z"),
    ],
)
def test_a_bad_table_is_refused_without_a_framework(text: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(text)
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ppl_bnn", "compare", "--data", "bad.csv", "--target", target],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 2
    loaded = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert not loaded & (HEAVY - {"pandas"})
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.csv"]


def test_an_error_of_a_file_is_not_taken_for_that_of_a_setting(tmp_path: Path) -> None:
    # A file may be written for a system, whose sites nothing here can read.
    file = tmp_path / "own.py"
    file.write_text("def model(x, y=None, *, scale=1):\n    raise AssertionError\n")
    assert plan.sketch_of(plan.load_model(str(file), True, {"scale": 2}), 3) == (None, "AssertionError")
    with pytest.raises(BNNError, match="up to 1000000; got 10000000"):
        plan.load_model(str(file), True, {"scale": 10**7})


def test_the_end_of_a_command_runs_what_was_registered_for_it() -> None:
    """The process ends without taking down its modules, but with its exit functions, output and status."""
    script = (
        "import atexit, sys; from ppl_bnn.cli.commands import main; atexit.register(print, 'left');"
        "sys.argv = ['ppl-bnn', *sys.argv[1:]]; main(); print('never')"
    )
    for words, status in ((["--version"], 0), (["show", "nothing"], 2)):
        run = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
        assert (run.returncode, run.stdout.splitlines()[-1]) == (status, "left"), run.stderr
