"""The Stan programs of the reference posteriors: what they have in common with the models, and their log densities."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from comparisons import reference_problems as problems
from ppl_bnn.core.errors import InputError, MissingFrameworkError, ModelError

PROGRAMS = problems.FOLDER / "programs"
MODELS = sorted(file.stem for file in PROGRAMS.glob("*.stan"))
NO_STAN = importlib.util.find_spec("httpstan") is None
needs_stan = pytest.mark.skipif(NO_STAN, reason="needs httpstan, which has Stan's compiler in it")
# Of httpstan 4.17 on Python 3.12.
pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(problems.FOLDER.parent))
        yield importlib.import_module("reference_stan")


def entry_of(model: str, script: Any, **arguments: Any) -> Any:
    """A small entry of a model with other arguments than the defaults, so that none is left out."""
    given = {"sigma": 1.3, "scale": 0.8, "noise_scale": 0.7, "precision": 2.0, "level": 2.0, "width": 4}
    known = script.inspect.signature(script.numpy_program(model).log_joint).parameters
    entry = next(each for each in problems.Entry.read().values() if each.model == model)
    changed = {name: value for name, value in given.items() if name in known}
    return replace(entry, rows=20, arguments={**entry.arguments, **changed, **arguments})


def code_of(model: str) -> str:
    return (PROGRAMS / f"{model}.stan").read_text()


def block(code: str, name: str) -> set[str]:
    """The names that a block declares."""
    lines = re.search(rf"^{name} {{\n(.*?)^}}", code, re.DOTALL | re.MULTILINE)
    assert lines
    return {re.sub(r"//.*", "", line).split()[-1].strip(";") for line in lines[1].splitlines()}


def test_every_stan_program_stands_beside_a_log_joint_by_hand() -> None:
    assert MODELS
    assert set(MODELS) <= {file.stem for file in PROGRAMS.glob("*.py")}


@pytest.mark.parametrize("model", MODELS)
def test_a_program_has_the_parameters_and_the_data_of_the_model(script: Any, model: str) -> None:
    entry, code = entry_of(model, script), code_of(model)
    chosen = problems.problem(entry)
    sites = {site.replace("0", "").replace(".", "_") for site in script.points(entry, chosen)[0]}
    assert {script.SHORTER.get(name, name) for name in block(code, "parameters")} == sites
    assert block(code, "data") <= set(script.data_of(entry, chosen))


def test_arguments_that_a_program_is_not_written_for_are_refused(script: Any) -> None:
    for model, argument in (("regression_mlp", {"activation": "relu"}), ("bayes_by_backprop", {"depth": 2})):
        entry = entry_of(model, script, **argument)
        with pytest.raises(InputError, match=next(iter(argument))):
            script.data_of(entry, problems.problem(entry))


class Density:
    """What stands for a compiled program: the log joint in NumPy with something wrong, at draws of a model."""

    def __init__(self, log_joint: Any, shapes: dict[str, list[int]]):
        self.log_joint, self.shapes = log_joint, shapes

    def get_param_names(self, data: Any) -> list[str]:
        return list(self.shapes)

    def get_dims(self, data: Any) -> list[list[int]]:
        return list(self.shapes.values())

    def transform_inits(self, data: Any, values: Any) -> Any:
        return values

    def log_prob(self, data: Any, values: Any, adjust_transform: bool) -> float:
        assert not adjust_transform
        w = {"noise": np.array(values["noise"]), "output.weight": np.array(values["weight"])[:, None]}
        return self.log_joint(
            w | {"output.bias": np.array(values["bias"])}, *map(np.array, (data["x"], data["y"]))
        )


def test_a_constant_is_no_difference_and_another_scale_of_a_prior_is_one(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(problems.Entry.read()["linear_regression-surface"], rows=20)
    by_hand, shapes = (
        script.numpy_program("linear_regression").log_joint,
        {"noise": [], "weight": [4], "bias": []},
    )
    for change, holds in (({}, True), ({"scale": 1.0 + 1e-6}, False), ({"noise_scale": 2.0}, False)):
        density = Density(lambda w, x, y, change=change: by_hand(w, x, y, **change) + 7.0, shapes)
        monkeypatch.setattr(script, "compiled", lambda code, density=density: density)
        assert script.compare(entry, "").holds is holds, change
    with pytest.raises(InputError, match="parameters"):
        script.stan_log_joints("", "linear_regression", {}, [{"noise": np.array(1.0)}])


@pytest.mark.skipif(not NO_STAN, reason="httpstan is installed")
def test_what_is_missing_is_named(script: Any) -> None:
    with pytest.raises(MissingFrameworkError, match="httpstan"):
        script.compiled("")


@needs_stan
def test_what_is_not_stan_is_refused_with_the_message_of_its_compiler(script: Any) -> None:
    with pytest.raises(ModelError, match='Identifier "b" not in scope'):
        script.compiled("parameters { real a; } model { a ~ normal(b, 1); }")


@needs_stan
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_density_of_a_program_is_that_by_hand(
    script: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = [{"activation": "relu"}, {"activation": "tanh"}] if model == "wide_network" else [{}]
    for arguments in each:
        found = script.compare(entry_of(model, script, **arguments), code_of(model))
        assert found.holds, str(found)
    if model == "survival_mlp":
        # Also with times that are known to be longer than the true ones.
        entry = entry_of(model, script)
        chosen = problems.problem(entry)
        chosen.y[::3, 1] = -1.0
        monkeypatch.setattr(script, "problem", lambda entry: chosen)
        found = script.compare(entry, code_of(model))
        assert found.holds, str(found)


@needs_stan
@pytest.mark.slow
def test_a_wrong_scale_of_a_prior_is_found(script: Any) -> None:
    code = code_of("linear_regression")
    wrong = code.replace("noise ~ normal(0, noise_scale)", "noise ~ normal(0, 2 * noise_scale)")
    assert wrong != code
    assert not script.compare(entry_of("linear_regression", script), wrong).holds
