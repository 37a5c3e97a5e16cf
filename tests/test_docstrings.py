"""The docstrings of the public names: complete by numpydoc's checks, and every example runs as it is shown.

Sizes in the examples are small for these tests: an example shows how a name is called, not how long a fit takes.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib.util
import inspect
import socket
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from numpydoc.docscrape import get_doc_object
from numpydoc.validate import ERROR_MSGS, validate

import ppl_bnn as bnn
from ppl_bnn import estimators

PACKAGE = Path(bnn.__file__).parent
# All checks of numpydoc are on but these.
OFF = {
    "ES01": "a summary may say all there is to say",
    "SA01": "related names are in the text, in backquotes",
    "SS05": "it takes any first word that ends in s for a verb: Draws, Class probabilities",
    "RT02": "it takes two values of one type, `lower, upper : ndarray`, for one",
}
# Of these modules most members are functions of a line, as in NumPy, or a row of a table: each has a summary, and the
# docstring of the module has examples of the typical ones.
BRIEF = {"ops", "dist"}
# Members that other rooms of the library call. They are no part of the reference, and have a summary.
FOR_OTHER_ROOMS = {
    "Method": {"check_support", "prepared"},
    "Posterior": {
        "chosen_draws", "constrained_draws", "drawn_kind", "fit_inputs", "in_original_units", "prediction_of_draws",
        "with_problem",
    },
    "Prediction": {"component_log_prob", "component_mean", "law", "marginals", "observed_values", "scaled"},
}  # fmt: skip
# A fit in a form that nothing else compiles: each takes seconds.
SLOW = {
    "evaluation/comparison/run.py::compare",
    "inference/mcmc/chees.py::ChEES",
    "inference/mcmc/laps.py::LAPS",
    "inference/mcmc/meads.py::MEADS",
    "inference/mcmc/sghmc.py::SGHMC",
    "inference/mcmc/smc.py::SMC",
    "inference/variational/pathfinder.py::Pathfinder",
    "language/transforms.py::with_prior",
    "references/reference.py::Reference",
    "reporting/plot/results.py::compare",
}

MODULES = {name: value for name in bnn.__all__ if inspect.ismodule(value := getattr(bnn, name))}
MODULES["estimators"] = estimators
if importlib.util.find_spec("botorch") is not None:
    MODULES["botorch"] = importlib.import_module("ppl_bnn.botorch")
NAMES = {f"bnn.{name}": getattr(bnn, name) for name in bnn.__all__ if name not in MODULES} | {
    f"{module}.{name}": getattr(value, name) for module, value in MODULES.items() for name in value.__all__
}
DOCUMENTED = {
    name: value for name, value in NAMES.items() if inspect.isclass(value) or inspect.isfunction(value)
}
CLASSES = [bnn.Posterior, bnn.Prediction, bnn.Comparison, bnn.GridResult, bnn.data.Table]
CLASSES += [bnn.references.Reference, bnn.references.Grade, bnn.Method, bnn.Grid, bnn.dist.Distribution]
CLASSES += [estimators.BNNRegressor, estimators.BNNClassifier]


def members() -> Iterator[tuple[str, Any, bool]]:
    """(name, function, whether it is read as an attribute) of the public methods and properties of the classes."""
    for owner in CLASSES:
        value: Any
        for name, value in vars(owner).items():
            read = isinstance(value, property | functools.cached_property)
            function = value.fget if isinstance(value, property) else value.func if read else value
            function = getattr(function, "__func__", function)
            if inspect.isfunction(function) and not name.startswith("_"):
                yield f"{owner.__name__}.{name}", function, read


MEMBERS = {name: (function, read) for name, function, read in members()}


def complaints(value: Any, *besides: str) -> dict[str, str]:
    """What numpydoc's checks, without those that are off, find in a docstring."""
    found = dict(validate(get_doc_object(value))["errors"])
    return {code: text for code, text in found.items() if code not in OFF and code not in besides}


# --- they are complete ------------------------------------------------------------------------------------


def test_what_is_off_is_a_check():
    assert set(OFF) <= set(ERROR_MSGS)
    known = {f"{owner}.{name}" for owner, names in FOR_OTHER_ROOMS.items() for name in names}
    assert known <= set(MEMBERS)
    assert {test.name for test in EXAMPLES} >= SLOW


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_name_is_documented(name: str):
    besides = ["PR01", "RT01", "EX01"] if name.split(".")[0] in BRIEF else []
    # Its signature is that of `__new__`, which takes the arguments of any method.
    besides += ["PR01", "PR02"] if name == "bnn.Method" else []
    assert complaints(DOCUMENTED[name], *besides) == {}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_public_member_is_documented(name: str):
    function, read = MEMBERS[name]
    owner, _, own = name.partition(".")
    brief = read or own in FOR_OTHER_ROOMS.get(owner, ())
    assert complaints(function, "EX01", *(["PR01", "RT01", "YD01"] if brief else [])) == {}


def test_the_arguments_of_all_methods_are_documented():
    documented = [name for each in get_doc_object(bnn.Method)["Parameters"] for name in each.name.split(", ")]
    assert documented == [each.name for each in fields(bnn.Method)]


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_has_a_summary_and_names_its_constants(name: str):
    text = inspect.getdoc(MODULES[name]) or ""
    assert text.split("\n\n")[0].endswith(".")
    constants = [each for each in MODULES[name].__all__ if f"{name}.{each}" not in DOCUMENTED]
    assert [each for each in constants if f"`{each}`" not in text] == []
    assert name not in BRIEF or ">>>" in text


def test_what_is_missing_is_found():
    def complete(x, y):
        """Add two numbers.

        Parameters
        ----------
        x, y : float
            The numbers.

        Returns
        -------
        float
            The sum.

        Examples
        --------
        >>> 1 + 1
        2
        """
        return x + y

    assert complaints(complete) == {}
    text = str(complete.__doc__)
    for old, new, code in [
        ("x, y : float", "x : float", "PR01"),
        ("x, y : float", "x, y, z : float", "PR02"),
        ("x, y : float", "y, x : float", "PR03"),
        ("x, y : float", "x, y", "PR04"),
        ("            The sum.\n", "", "RT03"),
        ("Returns\n        -------\n        float\n            The sum.\n\n        ", "", "RT01"),
        ("Examples\n        --------\n        >>> 1 + 1\n        2\n", "", "EX01"),
        ("Add two numbers.", "Add two numbers", "SS03"),
    ]:
        assert old in text
        complete.__doc__ = text.replace(old, new)
        assert code in complaints(complete), code


# --- their examples run -----------------------------------------------------------------------------------


def with_examples(file: Path, name: str) -> Iterator[doctest.DocTest]:
    """The docstrings of a file that have examples, each as one test."""
    nodes: list[tuple[str, Any]] = [("", ast.parse(file.read_text(encoding="utf-8")))]
    while nodes:
        path, node = nodes.pop(0)
        text = ast.get_docstring(node) or ""
        if ">>>" in text:
            line = node.body[0].lineno - 1
            yield doctest.DocTestParser().get_doctest(text, {}, f"{name}::{path}", str(file), line)
        inside = [each for each in node.body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
        nodes += [(f"{path}.{each.name}".strip("."), each) for each in inside]


EXAMPLES = [
    test
    for file in sorted(PACKAGE.rglob("*.py"))
    for test in with_examples(file, file.relative_to(PACKAGE).as_posix())
]


def outcome(test: doctest.DocTest) -> tuple[int, str]:
    """Run an example: how many of its lines fail, and doctest's report of these."""
    # In a module, because dataclasses and pickling look for one.
    report: list[str] = []
    test.globs = vars(types.ModuleType("example"))
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    return runner.run(test, out=report.append, clear_globs=False).failed, "".join(report)


@pytest.fixture
def on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A new folder, no network, no folder of data, and JAX's settings as they were."""
    import jax

    def refused(*_: Any) -> None:
        raise OSError("an example of a docstring needs no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setenv("PPL_BNN_CACHE", str(tmp_path / "cache"))
    for name in ("PPL_BNN_DATA", "PPL_BNN_REFERENCES", "PPL_BNN_REFERENCES_URL"):
        monkeypatch.delenv(name, raising=False)
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    names += ["jax_persistent_cache_min_entry_size_bytes"]
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    missing = name.startswith("skpro.py::") and importlib.util.find_spec("skpro") is None
    reason = "the extra skpro is not installed: it needs pandas below 3.1"
    return [pytest.mark.skipif(missing, reason=reason)] + [pytest.mark.slow] * (name in SLOW)


@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=marks_of(each.name)) for each in EXAMPLES],
    ids=lambda test: test.name,
)
def test_an_example_runs_as_shown(example: doctest.DocTest, on_its_own: None):
    failed, report = outcome(example)
    assert failed == 0, report


def test_a_wrong_output_and_a_missing_import_are_found():
    for text in (">>> 1 + 1\n3\n", ">>> bnn.MAP()\nMAP()\n"):
        failed, report = outcome(doctest.DocTestParser().get_doctest(text, {}, "wrong", None, 0))
        assert failed == 1
        assert "Failed example" in report
