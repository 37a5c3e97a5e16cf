"""ONNX files, by onnxruntime against `predict`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.errors import InputError, MissingFrameworkError, UnsupportedError
from ppl_bnn.posterior import onnx_export
from tests.problems import regression_data, small_classifier, small_network

ROUGH: dict[str, Any] = {"steps": 30, "polish": False}


def outputs(path: Path, x: Any) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, x if isinstance(x, dict) else {"x": x}), strict=True))


def check(posterior: Any, path: Path, x: Any, tolerance: float = 1e-9) -> None:
    """Each output at x of the exported file against the prediction."""
    same(posterior, posterior.export_onnx(path), x, tolerance)


def same(posterior: Any, path: Path, x: Any, tolerance: float = 1e-9) -> None:
    """Each output of a file at x against the prediction, by the names of the documentation."""
    found, prediction = outputs(path, x), posterior.predict(x)
    parameters = {name: value[0] for name, value in prediction.parameters.items()}
    if prediction.is_classes:
        parameters = {"probabilities": prediction.probabilities}
    elif prediction.family == "Normal":
        parameters = {"mean": prediction.mean, "sd": prediction.std}
    assert set(found) == set(parameters)
    for name, value in parameters.items():
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance)


# Each likelihood, and layers of each kind, which are slow to record.
QUICK = ("linear_regression", "mixture_density", "ordinal_mlp")
SLOW = ("student_t_mlp", "count_mlp", "survival_mlp", "logistic_regression", "neal_hierarchical")
SLOW += ("multitask_hierarchical", "lenet", "resnet", "lstm_classifier", "horseshoe_mlp", "spike_and_slab")
SLOW += ("last_layer", "wide_network")
# Targets that are measured in units.
WITH_UNITS = (
    "linear_regression",
    "mixture_density",
    "student_t_mlp",
    "multitask_hierarchical",
    "horseshoe_mlp",
)
WITH_UNITS += ("spike_and_slab", "last_layer", "wide_network")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_model_of_the_zoo_predicts_the_same_by_onnxruntime(
    matrix: ModuleType, name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    model, x, y = matrix.problem(name)
    # In its own units, so that those of the fit have to be in the file.
    x = x * np.arange(1, x.shape[1] + 1) + 5.0
    y = 10.0 * y + 100.0 if name in WITH_UNITS else y
    posterior = bnn.fit(model, x, y, bnn.MAP(ppl="pyro", **ROUGH), standardise=True)
    # Recording it takes seconds.
    path = posterior.export_onnx(tmp_path / "network.onnx")
    for rows in (1, 7):
        same(posterior, path, rng.normal(size=(rows, x.shape[1])) * 3.0)


@pytest.mark.slow
def test_a_network_of_either_system_and_its_student(ppl: str, tmp_path: Path) -> None:
    x, y = regression_data()
    fit = bnn.fit(small_network, x, y, bnn.SVI(ppl=ppl, steps=50, elbo_draws=5), standardise=True)
    student = fit.distil(rows=20, method=bnn.MAP(steps=50, polish=False))
    check(student, tmp_path / "student.onnx", x + 0.5)
    check(bnn.fit(small_network, x, y, bnn.MAP(ppl=ppl, **ROUGH)), tmp_path / "mode.onnx", x + 0.5)


def test_several_outputs_and_inputs_by_name(tmp_path: Path, rng: np.random.Generator) -> None:
    def model(x: Any, y: Any = None) -> None:
        both = bnn.ops.concatenate([x["a"], bnn.ops.mean(bnn.embedding("words", x["b"], 5, 3), 1)])
        bnn.observe(y, bnn.dense("output", both, 2), likelihoods.Gaussian(0.5))

    x = {"a": rng.normal(size=(20, 2)) * 4.0 + 1.0, "b": rng.integers(0, 5, size=(20, 4))}
    y = rng.normal(size=(20, 2)) * [1.0, 50.0] + [0.0, 300.0]
    posterior = bnn.fit(model, x, y, bnn.MAP(ppl="pyro", **ROUGH), standardise=True)
    check(posterior, tmp_path / "network.onnx", {name: each[:3] for name, each in x.items()})


def test_correlated_outputs(tmp_path: Path, rng: np.random.Generator) -> None:
    def model(x: Any, y: Any = None) -> None:
        factor = priors.CovarianceFactor()("factor", 2)
        bnn.observe(y, bnn.mlp(x, [2]), likelihoods.MultiOutputGaussian(factor))

    x = rng.normal(size=(20, 3))
    y = rng.normal(size=(20, 2)) * [1.0, 50.0] + [0.0, 300.0]
    posterior = bnn.fit(model, x, y, bnn.MAP(ppl="pyro", **ROUGH), standardise=True)
    check(posterior, tmp_path / "network.onnx", x)


def test_single_precision(tmp_path: Path) -> None:
    x, y = regression_data()
    posterior = bnn.fit(small_network, x, y, bnn.MAP(ppl="pyro", dtype="float32", **ROUGH), standardise=True)
    check(posterior, tmp_path / "network.onnx", x, 1e-5)


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    x, y = regression_data()
    labels = np.array(["low", "middle", "high"])[np.digitize(y, [-0.5, 0.5])]
    with pytest.warns(UserWarning, match="are the classes"):
        posterior = bnn.fit(small_classifier, x, labels, bnn.MAP(ppl="pyro", **ROUGH))
    session = onnxruntime.InferenceSession(str(posterior.export_onnx(tmp_path / "network.onnx")))
    found = session.get_modelmeta().custom_metadata_map
    assert found["model"] == "small_classifier"
    assert found["method"] == "MAP"
    assert found["family"] == "Categorical"
    assert found["data_hash"] == posterior.info.data_hash
    assert found["ppl_bnn"] == bnn.__version__
    assert json.loads(found["labels"]) == ["high", "low", "middle"]
    assert session.get_inputs()[0].shape == ["rows", 2]


# --- what is refused --------------------------------------------------------------------------------


def mode(model: Any = small_network) -> Any:
    x, y = regression_data()
    return bnn.fit(model, x, y, bnn.MAP(ppl="pyro", **ROUGH), standardise=True)


@pytest.mark.parametrize("fault", ["weights", "units", "patches"])
def test_a_wrong_file_is_not_written(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: other weights, targets in the units of the fit, a convolution without its bias."""
    posterior, path = mode(), tmp_path / "network.onnx"
    path.write_text("what was there")
    if fault == "weights":
        given = onnx_export._function

        def other(*arguments: Any) -> Any:
            function, values = given(*arguments)
            return function, {name: 1.001 * value for name, value in values.items()}

        monkeypatch.setattr(onnx_export, "_function", other)
    elif fault == "units":
        named = onnx_export._outputs
        monkeypatch.setattr(onnx_export, "_outputs", lambda family, found, units: named(family, found, None))
    else:

        def convolution(x: Any, y: Any = None) -> None:
            h = bnn.conv1d("conv", x[:, :, None], 3, 2)
            bnn.observe(y, bnn.mlp(h.reshape(x.shape[0], -1), [1]), likelihoods.Gaussian(0.5))

        posterior = mode(convolution)
        process = onnx_export._Patches.process

        def without(self: Any, msg: Any) -> None:
            msg.arguments["bias"] = None
            process(self, msg)

        monkeypatch.setattr(onnx_export._Patches, "process", without)
    with pytest.raises(UnsupportedError, match=r"within 1e-06 of predict.*no file was written"):
        posterior.export_onnx(path)
    assert path.read_text() == "what was there"
    assert [each.name for each in tmp_path.iterdir()] == ["network.onnx"]


def test_what_is_not_one_network_is_refused(tmp_path: Path) -> None:
    x, y = regression_data()
    path = tmp_path / "network.onnx"

    def plain(x: Any, y: Any = None) -> None:
        import pyro
        import pyro.distributions as pd

        weight = pyro.sample("weight", pd.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", pd.Normal(x[:, 0] * weight, 1.0), obs=y)

    def of_numbers(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x.reshape(int(x.shape[0]), 2), [1]), likelihoods.Gaussian(0.5))

    graph = bnn.zoo.load("graph_convolution", classes=3)
    labels = np.digitize(y, [-0.5, 0.5])
    draws = bnn.fit(small_network, x, y, bnn.SVI(ppl="pyro", steps=20, elbo_draws=5))
    with pytest.raises(UnsupportedError, match=r"of many networks; try posterior\.distil"):
        draws.export_onnx(path)
    with pytest.raises(UnsupportedError, match="plain NumPyro or Pyro model"):
        bnn.fit(plain, x, y, bnn.MAP(ppl="pyro", **ROUGH)).export_onnx(path)
    with pytest.raises(UnsupportedError, match="rows that interact"):
        bnn.fit(graph, x, labels, bnn.MAP(ppl="pyro", **ROUGH)).export_onnx(path)
    with pytest.raises(UnsupportedError, match="latent variables of rows"):
        mode(bnn.zoo.load("latent_inputs", width=3)).export_onnx(path)
    with pytest.raises(UnsupportedError, match=r"x\.shape\[0\] without int\(\)"):
        mode(of_numbers).export_onnx(path)
    with pytest.raises(InputError, match="a folder that exists"):
        mode().export_onnx(tmp_path / "nowhere" / "network.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_network_of_jax_alone_is_refused(tmp_path: Path) -> None:
    import equinox
    import jax

    network = equinox.nn.Linear(2, 1, key=jax.random.key(0))

    def model(x: Any, y: Any = None) -> None:
        f = bnn.module("net", x, network, priors.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihoods.Gaussian(0.5))

    x, y = regression_data()
    posterior = bnn.fit(model, x, y, bnn.MAP(**ROUGH))
    with pytest.raises(UnsupportedError, match=r"operations torch records; got .*[Ee]quinox"):
        posterior.export_onnx(tmp_path / "network.onnx")


def test_operations_that_onnxruntime_lacks_are_named(tmp_path: Path) -> None:
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [3, 1], "gelu"), likelihoods.Gaussian(0.5))

    with pytest.raises(UnsupportedError, match=r"Erf.*dtype='float32'"):
        mode(model).export_onnx(tmp_path / "network.onnx")


def test_without_the_packages_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, found = mode(), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "onnxscript" else found(name, *more)
    )
    with pytest.raises(MissingFrameworkError, match=r"no onnxscript; try pip install 'ppl-bnn\[onnx\]'"):
        posterior.export_onnx(tmp_path / "network.onnx")
