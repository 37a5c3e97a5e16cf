"""The zoo: found from anywhere, described without running it, sent to worker processes."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import data, dist, likelihoods, zoo
from ppl_bnn.core.errors import InputError, ModelError, UnknownNameError
from ppl_bnn.language.handlers import network_function
from ppl_bnn.language.primitives import Handler, Message

ROOT = Path(__file__).resolve().parents[2]
# Parameters at 10 features and 3 classes, counted by hand from the formulas on the cards.
COUNTS = {
    "linear_regression": 10 + 2,
    "regression_mlp": (10 + 2) * 10 + 2,
    "heteroscedastic_mlp": (10 + 3) * 10 + 2,
    "classification_mlp": (10 + 3 + 1) * 10 + 3,
}


class Ones(Handler):
    """Every latent site is one in its shape, so that f can be written down."""

    def process(self, msg: Message) -> None:
        if msg.kind == "sample":
            msg.answer(np.ones(msg.arguments["distribution"].shape or ()))


def output(model: zoo.Model, x: np.ndarray) -> np.ndarray:
    """f (N, K) with all weights one."""

    def with_ones(x: np.ndarray, y: None) -> None:
        with Ones():
            model(x, y)

    return network_function(with_ones)({}, x)


def test_cards_say_what_each_model_is() -> None:
    cards = zoo.models()
    # The other models are counted where their densities are written out, in tests/zoo/test_zoo_models.py.
    assert set(COUNTS) <= set(cards)
    for name, card in cards.items():
        assert card.name == name
        assert card.path == ROOT / "models" / f"{name}.py"
        assert card.data in data.datasets()
        assert card.summary
        assert card.summary.endswith(".")
        assert "\n" not in card.summary
        for part in ("Sizes:", "Default data:", "Source:", "What is hard about its posterior"):
            assert part in card.docstring
        assert len(card.path.read_text().splitlines()) < 80
    assert cards["classification_mlp"].arguments["classes"] == "2"


@pytest.mark.parametrize("name", COUNTS)
def test_sizes_are_those_of_the_card(name: str) -> None:
    model = zoo.load(name, classes=3) if name == "classification_mlp" else zoo.load(name)
    task = data.datasets()[zoo.models()[name].data or ""].task
    assert zoo.sketch(model, 10) == zoo.Sketch(COUNTS[name], task)


def sites_of(sketch: zoo.Sketch) -> dict[str, tuple[int, ...]]:
    return {site.name: site.shape for site in sketch.sites}


def test_a_model_of_symbols_is_sketched_on_whole_numbers() -> None:
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.lstm_classifier(x, 20, 3, 2), likelihoods.Categorical())

    wanted = {
        "embedding.weight": (20, 3),
        "lstm.input.weight": (3, 12),
        "lstm.input.bias": (12,),
        "lstm.state.weight": (3, 12),
        "output.weight": (3, 2),
        "output.bias": (2,),
    }
    # By the number of columns, and by an example.
    for inputs in (5, np.int64(5), np.array([[19, 0, 3]])):
        assert sites_of(zoo.sketch(model, inputs)) == wanted
    with pytest.raises(ModelError, match=r"numbers 0\.\.19; got 20\.\.20"):
        zoo.sketch(model, np.array([[20]]))


def test_a_model_of_a_dict_and_of_rows_that_interact_is_sketched_on_an_example() -> None:
    model = zoo.load("graph_convolution", width=4)
    graph = {"features": np.ones((3, 5)), "adjacency": np.ones((3, 3), int) - np.eye(3, dtype=int)}
    wanted = {"hidden0.weight": (5, 4), "hidden0.bias": (4,), "output.weight": (4, 3), "output.bias": (3,)}
    for inputs in (graph, np.zeros((3, 5)), 5):
        assert sites_of(zoo.sketch(model, inputs)) == wanted

    def shifted(x: Any, y: Any = None) -> None:
        with bnn.rows(x["a"].shape[0]):
            shift = bnn.sample("shift", dist.Normal(0.0, 1.0).expand((1,)).to_event())
        bnn.observe(y, bnn.mlp(x["a"], [1]) + shift, likelihoods.Gaussian(1.0))

    # Two weights, a bias, and the variable of one row; without an example nobody knows the names of a dict.
    found = zoo.sketch(shifted, {"a": np.ones((4, 2))})
    assert (found.parameters, found.per_row) == (4, 1)
    assert [site.name for site in found.sites if site.local] == ["shift"]
    with pytest.raises(IndexError):
        zoo.sketch(shifted, 2)


def test_an_example_of_its_inputs_stands_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "reader.py"
    text = (
        "import ppl_bnn as bnn\nEXAMPLE = {'tokens': [[0, 2, 1]], 'age': [[0.5]]}\n"
        "def model(x, y=None, *, width=3):\n"
        "    h = bnn.lstm('lstm', bnn.embedding('words', x['tokens'], 20, width), width)[:, -1]\n"
        "    bnn.observe(y, bnn.dense('age', x['age'], 1) + bnn.dense('out', h, 1), bnn.likelihoods.Bernoulli())\n"
    )
    file.write_text(text)
    card = zoo.read_card(file)
    assert card.example == {"tokens": [[0, 2, 1]], "age": [[0.5]]}
    found = sites_of(zoo.sketch(zoo.from_file(file), card.example))
    assert found["words.weight"] == (20, 3)
    assert found["age.weight"] == (1, 1)
    # A row of ones is no dict.
    with pytest.raises(IndexError):
        zoo.sketch(zoo.from_file(file), 2)
    file.write_text("1 / 0\nEXAMPLE: list = [[1, 2.5]]\n")
    assert zoo.read_card(file).example == [[1, 2.5]]
    for wrong in ("np.ones(3)", "[[1], [1, 2]]", "3", "{}", "['a']", "{'a': 1.0}"):
        file.write_text(f"EXAMPLE = {wrong}\n")
        with pytest.raises(ModelError, match=r"lists of numbers.*one row, written out"):
            zoo.read_card(file)
    assert all(card.example is None for card in zoo.models().values())


def test_what_a_model_refuses_is_said_as_it_was_first() -> None:
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.conv2d("conv", x, 2, 3), likelihoods.Categorical())

    with pytest.raises(ModelError, match=r"conv2d\('conv'\): expected images.*got shape \(1, 4\)"):
        zoo.sketch(model, 4)


def test_keywords_reach_the_network() -> None:
    x = np.linspace(-1.0, 1.0, 12).reshape(4, 3)
    hidden = np.tanh(x.sum(1) + 1.0)
    found = output(zoo.load("regression_mlp", width=7), x)
    np.testing.assert_allclose(found, (7 * hidden + 1.0)[:, None], rtol=1e-12)
    assert output(zoo.load("classification_mlp", classes=5), x).shape == (4, 5)
    np.testing.assert_allclose(output(zoo.load("linear_regression"), x)[:, 0], x.sum(1) + 1.0, rtol=1e-12)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown model 'regresion_mlp': did you mean 'regression_mlp'"
    ):
        zoo.load("regresion_mlp")
    with pytest.raises(UnknownNameError, match=r"argument of model 'regression_mlp' 'widht'.*mean 'width'"):
        zoo.load("regression_mlp", widht=3)
    with pytest.raises(UnknownNameError, match=r"argument of model 'regression_mlp' 'y'"):
        zoo.load("regression_mlp", y=3)
    with pytest.raises(UnknownNameError, match=r"unknown model '../models/regression_mlp'"):
        zoo.load("../models/regression_mlp")


def test_no_model_hides_a_function_of_the_zoo() -> None:
    # Importing a file sets an attribute of this name on the module `ppl_bnn.zoo`.
    for name in zoo.models():
        assert not hasattr(zoo, name) or getattr(zoo, name).__file__ == str(zoo.models()[name].path)


def test_zoo_is_found_from_any_folder_and_takes_no_top_level_name(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("raise RuntimeError('a file of the user was imported')\n")
    program = """
import sys, ppl_bnn as bnn
model = bnn.zoo.load("regression_mlp", width=3)
assert bnn.zoo.sketch(model, 5).parameters == 7 * 3 + 2
assert "models" not in sys.modules and "regression_mlp" not in sys.modules
assert not {"jax", "torch", "numpyro", "pyro", "pandas", "sklearn"} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=60)


def test_installed_zoo_lies_in_the_package(tmp_path: Path) -> None:
    package = tmp_path / "ppl_bnn"
    package.mkdir()
    (package / "_zoo").mkdir()
    (tmp_path / "models").mkdir()
    (package / "zoo").mkdir()
    (package / "zoo" / "__init__.py").write_text(Path(zoo.__file__).read_text())
    spec = importlib.util.spec_from_file_location("installed_zoo", package / "zoo" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    installed = importlib.util.module_from_spec(spec)
    sys.modules["installed_zoo"] = installed
    try:
        spec.loader.exec_module(installed)
    finally:
        del sys.modules["installed_zoo"]
    assert package / "_zoo" == installed.MODELS_FOLDER
    assert installed.__path__ == [str(package / "zoo"), str(package / "_zoo")]


def test_models_go_to_worker_processes(tmp_path: Path) -> None:
    own = tmp_path / "own_model.py"
    own.write_text(
        "import ppl_bnn as bnn\nfrom ppl_bnn import likelihoods\n\ndef network(x, width):\n"
        "    return bnn.mlp(x, [width, 1])\n\ndef model(x, y=None, *, width=2):\n"
        "    bnn.observe(y, network(x, width), likelihoods.Gaussian(1.0))\n"
    )
    pickle.loads(pickle.dumps(zoo.load("regression_mlp", width=3)))
    models = [zoo.load("regression_mlp"), zoo.load("regression_mlp", width=3), zoo.from_file(own, width=4)]
    # Two at a time, so that joblib does start processes.
    found = joblib.Parallel(n_jobs=2, backend="loky")(
        joblib.delayed(lambda m: (os.getpid(), zoo.sketch(m, 5).parameters))(m) for m in models
    )
    assert [count for _, count in found] == [72, 23, 29]
    assert os.getpid() not in {process for process, _ in found}


def test_a_file_of_ones_own_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        '"""Mine, in one line. And more."""\nDATA = "iris"\nimport ppl_bnn as bnn\n'
        "def model(x, y=None, *, width, depth=1):\n"
        "    bnn.observe(y, bnn.mlp(x, [width] * depth + [1]), bnn.likelihoods.Gaussian(1.0))\n"
    )
    card = zoo.read_card(file)
    assert (card.name, card.summary, card.data) == ("mine", "Mine, in one line.", "iris")
    assert card.arguments == {"width": None, "depth": "1"}
    bound = zoo.from_file(file, width=2)
    assert isinstance(bound, functools.partial)
    assert zoo.sketch(bound, 3).parameters == 4 * 2 + 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.py"]
    with pytest.raises(UnknownNameError, match=r"argument of model 'mine.py' 'wdth'.*did you mean 'width'"):
        zoo.from_file(file, wdth=2)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (None, InputError, "which is no file"),
        ("def modle(x, y=None): pass", ModelError, "got functions modle; try naming it `model`"),
        ("DATA = 'iris'", ModelError, "no function at all"),
        ("def model(x, y=None)", ModelError, "SyntaxError"),
        ("import absent_module_xyz", ModelError, "installing 'absent_module_xyz', or PYTHONPATH="),
        ("1 / 0", ModelError, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_is_no_model_is_refused(
    tmp_path: Path, content: str | None, error: type[Exception], words: str
) -> None:
    file = tmp_path / "broken.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(error, match=words):
        zoo.from_file(file)
