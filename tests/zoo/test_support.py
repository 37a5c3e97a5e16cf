"""The table of models, methods and systems at three depths: what is declared, one step of each model, stored fits.

Every method fits one small model in each of its systems in `test_method.py`, and both systems agree about every
model in `test_distributions.py`. The whole product takes hours; `comparisons/zoo_matrix.py` has computed what is
stored.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import errors, zoo
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.protocol import SYSTEMS
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import BNNError, CurvatureError, InputError, UnknownNameError
from ppl_bnn.inference.registry import ROWS, MethodRow
from ppl_bnn.zoo.support import Declarations, declared, read
from tests.problems import METHODS

FOLDER = Path(__file__).parents[2] / "comparisons"
DECLARED = declared()


# --- what is declared ---------------------------------------------------------------------------------


def test_every_model_and_every_method_is_in_the_table() -> None:
    assert DECLARED.models == tuple(zoo.models())
    assert DECLARED.methods is ROWS
    # Whoever adds a row to the tests of all methods adds it to the table, and the other way round.
    assert set(DECLARED.methods) == set(METHODS)
    assert len(list(DECLARED.cells())) == len(DECLARED.models) * len(METHODS) * len(SYSTEMS)


@pytest.mark.parametrize("name", DECLARED.methods)
def test_a_row_is_a_method_in_the_systems_that_it_is_declared_for(name: str) -> None:
    row = DECLARED.methods[name]
    served = DECLARED.served(name)
    assert served, "a method that runs nowhere"
    for ppl in SYSTEMS:
        if ppl in served:
            for quick in (False, True):
                method = row.build(ppl, quick)
                assert (type(method).__name__, method.ppl) == (row.class_name, ppl)
                assert method.systems == served
            continue
        rule = DECLARED.why_not(DECLARED.models[0], name, ppl)
        assert rule is not None
        with pytest.raises(rule.error, match=re.escape(rule.says)):
            row.build(ppl)
    # The conformance tests fit each row in these systems, or in some of them, at this size.
    assert set(METHODS[name].systems) <= set(served)
    assert isinstance(METHODS[name].build(served[0], METHODS[name].quick), type(row.build(served[0])))


def specific_cells(ppl: str) -> list[tuple[str, str]]:
    """(model, method) of the cells that are impossible for a reason that lies in the model."""
    rules = {cell: DECLARED.why_not(*cell) for cell in DECLARED.cells() if cell[2] == ppl}
    return [cell[:2] for cell, rule in rules.items() if rule is not None and not rule.general]


def refusals() -> list[Any]:
    """All of Pyro, which compiles nothing; of NumPyro the first cell of each reason, the others later."""
    found = [pytest.param("pyro", *cell, id="-".join(("pyro", *cell))) for cell in specific_cells("pyro")]
    seen = set()
    for cell in specific_cells("numpyro"):
        rule = DECLARED.why_not(*cell, "numpyro")
        found.append(
            pytest.param(
                "numpyro",
                *cell,
                id="-".join(("numpyro", *cell)),
                marks=[pytest.mark.slow] if rule in seen else [],
            )
        )
        seen.add(rule)
    return found


class Untouched:
    """What a fit that is refused beforehand has nothing to tell."""

    def task(self, title: str, total: int) -> Any:
        pytest.fail(f"{title} had begun when it was refused")


@pytest.mark.parametrize(("ppl", "name", "row"), refusals())
def test_what_is_declared_impossible_is_refused_beforehand(
    matrix: Any, ppl: str, name: str, row: str
) -> None:
    rule = DECLARED.why_not(name, row, ppl)
    assert rule is not None
    model, x, y = matrix.problem(name)
    method = DECLARED.methods[row].build(ppl, quick=True)
    with pytest.raises(BNNError) as caught:
        bnn.fit(model, x, y, method, progress=Untouched())
    assert rule.explains(type(caught.value).__name__, str(caught.value)), caught.value


# --- the file that declares it --------------------------------------------------------------------------


METHOD_ROWS = {
    "map": MethodRow("map", "MAP", quick={"steps": 3}),
    "laplace": MethodRow("laplace", "Laplace"),
    "laplace-kron": MethodRow("laplace-kron", "Laplace", {"structure": "kron"}),
    "nuts": MethodRow("nuts", "NUTS"),
    "ensemble": MethodRow("ensemble", "Ensemble", member="map"),
}
FILE = """
[[impossible]]
methods = ["nuts"]
systems = ["pyro"]
error = "InputError"
says = "chains"
reason = "There are no such chains in this system."

[[impossible]]
models = ["a"]
methods = ["nuts", "laplace", "laplace-kron"]
error = "UnsupportedError"
says = "a curvature"
reason = '''
This model has no
curvature at all.'''

[[impossible]]
models = ["b"]
not_methods = ["map", "laplace-kron"]
error = "UnsupportedError"
says = "a point"
reason = "This model has no more than a point."

[[impossible]]
models = ["c"]
methods = ["map"]
systems = ["numpyro"]
error = "ModelError"
says = "a shape"
reason = "One system cannot know its shapes."

[[depends]]
models = ["c", "a"]
methods = ["laplace", "laplace-kron"]
error = "CurvatureError"
says = "indefinite"
reason = "Its density is not concave everywhere."
"""


def declarations(folder: Path, text: str = FILE) -> Declarations:
    path = folder / "methods.toml"
    path.write_text(text)
    return read(path, ("a", "b", "c"), METHOD_ROWS)


def test_the_first_rule_that_names_a_cell_speaks_for_it(tmp_path: Path) -> None:
    found = declarations(tmp_path)
    assert found.served("nuts") == ("numpyro",)
    assert found.served("map") == SYSTEMS
    first, second = found.why_not("a", "nuts", "pyro"), found.why_not("a", "nuts", "numpyro")
    assert first is not None
    assert second is not None
    assert (first.error, first.general, second.error, second.general) == (
        InputError, True, errors.UnsupportedError, False,
    )  # fmt: skip
    assert second.reason == "This model has no curvature at all."
    assert second.explains("UnsupportedError", "expected a curvature; got none")
    assert not second.explains("InputError", "expected a curvature; got none")
    assert not second.explains("UnsupportedError", "expected something else")
    assert found.why_not("c", "nuts", "numpyro") is None
    # What cannot be is not doubtful.
    assert found.doubt("a", "laplace", "pyro") is None
    doubt = found.doubt("c", "laplace", "pyro")
    assert doubt is not None
    assert doubt.error is CurvatureError


def test_what_fits_is_said_in_few_words(tmp_path: Path) -> None:
    found = declarations(tmp_path)
    assert found.summary("a") == "only map, ensemble"
    assert found.summary("b") == "only map, laplace-kron"
    assert found.summary("c") == "all (not map in numpyro)"
    assert found.shortened(["laplace-kron", "map", "laplace"]) == ["laplace*", "map"]
    told = {rule.reason: names for rule, names in found.missing("a").items()}
    assert told == {"This model has no curvature at all.": ["laplace*", "nuts"]}
    told = {rule.reason: names for rule, names in found.missing("c").items()}
    assert told == {"One system cannot know its shapes.": ["map in numpyro"]}
    assert list(found.doubtful("c").values()) == [["laplace*"]]
    assert found.doubtful("a") == {}
    shorter = FILE.replace('not_methods = ["map", "laplace-kron"]', 'methods = ["laplace"]')
    assert declarations(tmp_path, shorter).summary("b") == "all but laplace"


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        ("[[depends]]", "[[depends]", InputError, "a TOML file"),
        ("[[depends]]", "[[depend]]", UnknownNameError, "did you mean 'depends'"),
        ('models = ["c", "a"]', 'models = ["d"]', UnknownNameError, "models of depends[0]"),
        ('models = ["c", "a"]', 'models = ["c", "c"]', InputError, "a list of names"),
        ('models = ["c", "a"]', "models = []", InputError, "a list of names"),
        ('methods = ["map"]', 'methods = ["mop"]', UnknownNameError, "did you mean 'map'"),
        ('systems = ["numpyro"]', 'systems = ["numpiro"]', UnknownNameError, "did you mean 'numpyro'"),
        ('not_methods = ["map"', 'methods = ["nuts"]\nnot_methods = ["map"', InputError, "got both"),
        ('error = "ModelError"', 'error = "CurvatureError"', UnknownNameError, "error of impossible[3]"),
        ('error = "CurvatureError"', 'error = "CurveError"', UnknownNameError, "did you mean 'CurvatureError'"),
        ('says = "a shape"', 'says = " "', InputError, "says: expected words"),
        ('reason = "One system', 'reason = "one system', InputError, "a sentence"),
        ("know its shapes.", "know its shapes", InputError, "a sentence"),
        ('reason = "One system cannot know its shapes."', 'reason = "No."', InputError, "a sentence"),
        ('models = ["c", "a"]', 'models = ["a"]', InputError, "rules that decide a cell"),
    ],
)  # fmt: skip
def test_a_file_with_a_mistake_is_refused(
    tmp_path: Path, old: str, new: str, error: type[Exception], words: str
) -> None:
    assert FILE.count(old) == 1
    with pytest.raises(error, match=re.escape(words)):
        declarations(tmp_path, FILE.replace(old, new))


# --- one step of each model ------------------------------------------------------------------------------


IN_NUMPYRO = ("regression_mlp", "graph_convolution")


@pytest.mark.parametrize(
    ("ppl", "name"),
    [
        pytest.param(
            ppl, name, marks=[pytest.mark.slow] if ppl == "numpyro" and name not in IN_NUMPYRO else []
        )
        for ppl in ("pyro", "numpyro")
        for name in DECLARED.models
    ],
)
def test_a_model_takes_a_step_along_its_gradient(matrix: Any, ppl: str, name: str) -> None:
    """The slope of the log joint along its gradient is the gradient's norm, by a difference of second order.

    With steps of 1e-5 it is exact to about 1e-10 times the third derivative, and to 1e-11 times the log joint.
    """
    model, x, y = matrix.problem(name)
    chosen = system(ppl)
    with chosen.session("float64", "cpu", threads=1):
        # One logit has labels that are numbers, as a method hands them over.
        targets = y if "classes" in zoo.models()[name].arguments else y.astype(float)
        xs, ys = chosen.asarray(x), chosen.asarray(targets)
        program = Program.of(chosen, model, xs, ys, language=True)
        joint = chosen.compile(
            chosen.value_and_grad(lambda flat, xs, ys: program.log_joint(program.unravel(flat), xs, ys))
        )
        u = 0.5 * np.random.default_rng(1).normal(size=program.parameter_count)
        value, gradient = joint(chosen.asarray(u), xs, ys)
        value, gradient = float(value), chosen.to_numpy(gradient)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        norm = float(np.linalg.norm(gradient))
        assert norm > 0.0
        step = 1e-5 * gradient / norm
        up, down = (float(joint(chosen.asarray(at), xs, ys)[0]) for at in (u + step, u - step))
    assert up > value
    np.testing.assert_allclose((up - down) / 2e-5, norm, rtol=1e-4)


# --- the product: how it is computed ----------------------------------------------------------------------


def test_a_run_keeps_every_cell_and_goes_on_where_it_was_killed(
    matrix: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cells.jsonl"
    study = matrix.main(tiny=True, out=tmp_path)
    first = matrix.Store(file).cells
    assert {cell[1]: record["outcome"] for cell, record in first.items()} == {
        "map": "works", "svi": "works", "mc-dropout": "refused", "mclmc": "refused",
    }  # fmt: skip
    assert study.verdicts[0].verdict == "not run"
    assert f"4 of {len(list(DECLARED.cells()))} cells computed" in study.verdicts[0].numbers
    assert "; 0 against" in study.verdicts[0].numbers
    row = study.tables["matrix"][2 * DECLARED.models.index("linear_regression") + SYSTEMS.index("pyro")]
    assert (row["model"], row["system"], row["map"]) == ("linear_regression", "pyro", "works")
    assert (row["mclmc"], row["nuts"]) == ("UnsupportedError", "-")

    # A kill in the middle of a line.
    lines = file.read_text().splitlines()
    assert set(json.loads(lines[0])) == {"environment", "versions"}
    file.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    done: list[Any] = []
    compute = matrix.computed
    monkeypatch.setattr(matrix, "computed", lambda cell, sizes: done.append(cell) or compute(cell, sizes))
    matrix.main(tiny=True, out=tmp_path)
    last = json.loads(lines[-1])
    assert done == [(last["model"], last["method"], last["system"])]
    second = matrix.Store(file).cells
    assert {cell: record["outcome"] for cell, record in second.items()} == {
        cell: record["outcome"] for cell, record in first.items()
    }
    with pytest.raises(UnknownNameError, match="did you mean 'map'"):
        matrix.main(tiny=True, out=tmp_path, methods=["mapp"])
    matrix.main(tiny=True, out=tmp_path, methods=["mclmc"], again=True)
    assert [cell[1] for cell in done[1:]] == ["mclmc"]


@pytest.mark.slow
def test_processes_share_the_cells(matrix: Any, tmp_path: Path) -> None:
    """Two that are refused, so that it costs no more than to begin two processes."""
    matrix.main(tiny=True, out=tmp_path, methods=["mc-dropout", "mclmc"], workers=2)
    cells = matrix.Store(tmp_path / "cells.jsonl").cells
    assert [record["outcome"] for record in cells.values()] == ["refused", "refused"]


def test_what_ends_in_an_error_is_told_by_its_name(matrix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = ("linear_regression", "laplace-guide", "pyro")

    def fail(*_: Any) -> None:
        raise CurvatureError("Pyro's AutoLaplaceApproximation failed: expected one\nand more")

    monkeypatch.setattr(matrix, "fitted", fail)
    record = matrix.computed(cell, matrix.Sizes())
    assert (record["outcome"], record["error"]) == ("failed", "CurvatureError")
    assert record["message"] == "Pyro's AutoLaplaceApproximation failed: expected one"
    assert matrix.contradiction(DECLARED, record) is None
    assert "declared works, got failed" in matrix.contradiction(DECLARED, record | {"method": "map"})
    works = {"model": "linear_regression", "method": "mc-dropout", "system": "pyro", "outcome": "works"}
    assert "declared impossible" in matrix.contradiction(DECLARED, works)
    other = works | {"outcome": "refused", "error": "UnsupportedError", "message": "for another reason"}
    assert "declared impossible" in matrix.contradiction(DECLARED, other)
    assert matrix.contradiction(DECLARED, works | {"method": "map"}) is None


def test_a_cell_without_an_end_is_ended(matrix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "fitted", lambda *_: time.sleep(60.0))
    record = matrix.computed(("linear_regression", "map", "pyro"), matrix.Sizes(limit=0.1))
    assert (record["outcome"], record["error"]) == ("failed", "TimeoutError")
    assert record["seconds"] < 30.0


def test_a_cell_whose_process_ended_has_failed_after_nobody_knows_how_long(
    matrix: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(engine: Any, function: Any, tasks: list[Any], **_: Any) -> Any:
        return ((number, matrix.Lost("it was killed")) for number in range(len(tasks)))

    monkeypatch.setattr(matrix.engines, "outcomes", lost)
    matrix.main(tiny=True, out=tmp_path)
    records = matrix.Store(tmp_path / "cells.jsonl").cells.values()
    assert {(each["outcome"], each["seconds"]) for each in records} == {("failed", None)}
    assert all("it was killed" in each["message"] for each in records)
    assert "map, pyro: failed CONTRADICTION" in capsys.readouterr().out


@pytest.mark.parametrize("name", DECLARED.models)
def test_data_of_a_cell_are_drawn_from_its_model(matrix: Any, name: str) -> None:
    model, x, y = matrix.problem(name)
    assert len(x) == len(y) == matrix.Sizes.rows
    if zoo.sketch(model, x.shape[1]).task == "classification":
        labels, counts = np.unique(y, return_counts=True)
        assert y.dtype == np.int64
        assert len(labels) > 1
        assert counts.min() >= matrix.FEWEST
    else:
        assert np.isfinite(y).all()
        assert np.ptp(y) > 0.0


# --- the product: what got of it -------------------------------------------------------------------------


def test_the_stored_table_is_what_is_declared(matrix: Any) -> None:
    store = matrix.Store(matrix.RESULTS / "cells.jsonl")
    assert store.cells
    wrong = [matrix.contradiction(DECLARED, record) for record in store.cells.values()]
    assert [text for text in wrong if text is not None] == []
    for record in store.cells.values():
        assert record["environment"] in store.environments
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert set(store.cells) <= set(DECLARED.cells()), "cells of models or methods that are no longer there"


def test_every_cell_is_stored(matrix: Any) -> None:
    store = matrix.Store(matrix.RESULTS / "cells.jsonl")
    missing = [cell for cell in DECLARED.cells() if cell not in store.cells]
    if missing:
        named = "; ".join(", ".join(cell) for cell in missing)
        pytest.skip(f"{len(missing)} of {len(list(DECLARED.cells()))} cells are not computed yet: {named}")
