"""Bad input to `fit`: a named error that says what was expected, got and can be tried, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.core.errors import (
    BNNError,
    DeviceError,
    InputError,
    ModelError,
    UnknownNameError,
    UnsupportedError,
)

X = np.random.default_rng(0).normal(size=(6, 2))
Y = X[:, 0] + 0.1 * np.random.default_rng(1).normal(size=6)
LABELS = np.array([0, 1, 0, 1, 1, 0])


def regression(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [3, 1]), likelihoods.Gaussian(0.1))


def binary(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Bernoulli())


def three_classes(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [3]), likelihoods.Categorical())


def no_observe(x: Any, y: Any = None) -> None:
    bnn.mlp(x, [1])


def two_observes(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1])
    bnn.observe(y, f, likelihoods.Gaussian(1.0))
    bnn.observe(y, f, likelihoods.Gaussian(1.0))


def same_name(x: Any, y: Any = None) -> None:
    f = bnn.dense("layer", x, 1) + bnn.dense("layer", x, 1)
    bnn.observe(y, f, likelihoods.Gaussian(1.0))


def reserved(name: str) -> Any:
    def model(x: Any, y: Any = None) -> None:
        bnn.sample(name, dist.Normal(0.0, 1.0))
        bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(1.0))

    return model


def no_sites(x: Any, y: Any = None) -> None:
    pass


def nothing_to_infer(x: Any, y: Any = None) -> None:
    bnn.observe(y, x[:, :1], likelihoods.Gaussian(1.0))


def flat_output(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [1])[:, 0], likelihoods.Gaussian(1.0))


def two_outputs(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [2]), likelihoods.Gaussian(1.0))


def odd_outputs(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [3]), likelihoods.HeteroscedasticGaussian())


def negative_noise(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(-0.1))


def negative_scale(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, -1.0)), likelihoods.Gaussian(1.0))


def wrong_plate(x: Any, y: Any = None) -> None:
    with bnn.rows(4):
        bnn.sample("shift", dist.Normal(0.0, 1.0))
    bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(1.0))


def noise_per_row(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0).expand((x.shape[0],)).to_event())
    bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(noise))


def unknown_activation(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [3, 1], "tahn"), likelihoods.Gaussian(1.0))


def with_value(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.copy()
    changed[(1,) * array.ndim] = value
    return changed


# what is wrong -> (model, x, y, arguments of fit, error, what the message says)
DATA: dict[str, tuple[Any, Any, Any, dict[str, Any], type[BNNError], list[str]]] = {
    "nan in x": (regression, with_value(X, np.nan), Y, {}, InputError, ["x:", "NaN at (1, 1)"]),
    "infinity in x": (regression, with_value(X, np.inf), Y, {}, InputError, ["x:", "infinity at (1, 1)"]),
    "nan in y": (regression, X, with_value(Y, np.nan), {}, InputError, ["y:", "NaN at (1,)", "imputing"]),
    "infinity in y": (regression, X, with_value(Y, -np.inf), {}, InputError, ["y:", "infinity at (1,)"]),
    "short y": (regression, X, Y[:4], {}, InputError, ["6 rows", "got 4", "same rows"]),
    "flat x": (regression, X[:, 0], Y, {}, InputError, ["(N, features)", "(6,)", "x[:, None]"]),
    "column y": (regression, X, Y[:, None], {}, InputError, ["(N,)", "(6, 1)", "y[:, 0]"]),
    "cubic y": (regression, X, np.zeros((6, 2, 2)), {}, InputError, ["(6, 2, 2)"]),
    "scalar y": (regression, X, 3.0, {}, InputError, ["y:", "shape ()"]),
    "strings in x": (regression, np.full((6, 2), "a"), Y, {}, InputError, ["x:", "<U1", "encoding"]),
    "strings of bytes in y": (binary, X, np.array(list("ababab")).astype("S"), {}, InputError, ["y:", "S1"]),
    "objects in x": (
        regression,
        np.array([[1, "a"]] * 6, dtype=object),
        Y,
        {},
        InputError,
        ["array of object"],
    ),
    "dates in x": (regression, X.astype("datetime64[s]"), Y, {}, InputError, ["datetime64"]),
    "complex x": (regression, X + 1j, Y, {}, InputError, ["complex128"]),
    "ragged x": (regression, [[1.0, 2.0], [3.0]], Y[:2], {}, InputError, ["rectangular", "equal length"]),
    "masked x": (regression, np.ma.masked_greater(X, 0.5), Y, {}, InputError, ["masked values"]),
    "no rows": (regression, X[:0], Y[:0], {}, InputError, ["at least one row", "(0, 2)"]),
    "no columns": (regression, X[:, :0], Y, {}, InputError, ["one column", "(6, 0)"]),
    "empty dict": (regression, {}, Y, {}, InputError, ["at least one array"]),
    "dict of different lengths": (
        regression,
        {"a": X, "b": X[:3]},
        Y,
        {},
        InputError,
        ["common first axis", "'b': 3"],
    ),
    "not a function": (
        "regression_mlp",
        X,
        Y,
        {},
        InputError,
        ["a function (x, y=None)", "str", "not its name"],
    ),
    "negative seed": (regression, X, Y, {"seed": -1}, InputError, ["seed:", "-1", "seed=0"]),
    "fractional seed": (regression, X, Y, {"seed": 1.5}, InputError, ["seed:", "1.5"]),
    "truth as seed": (regression, X, Y, {"seed": True}, InputError, ["seed:", "True"]),
    "huge seed": (regression, X, Y, {"seed": 2**31}, InputError, ["2**31 - 1"]),
    "unknown device": (
        regression,
        X,
        Y,
        {"device": "gpu"},
        InputError,
        ["'cuda[:i]'", "'gpu'", "device='auto'"],
    ),
    "unknown device index": (regression, X, Y, {"device": "cuda:x"}, InputError, ["'cuda:x'"]),
}
# These need a run of the model, and so say the same in both systems.
MODELS: dict[str, tuple[Any, Any, Any, dict[str, Any], type[BNNError], list[str]]] = {
    "no observe": (no_observe, X, Y, {}, ModelError, ["exactly one `observe`", "none", "bnn.observe(y, f"]),
    "two observes": (two_observes, X, Y, {}, ModelError, ["exactly one `observe`", "a second one"]),
    "two sites with one name": (same_name, X, Y, {}, ModelError, ["two sites named 'layer.weight'", "renam"]),
    "site f": (reserved("f"), X, Y, {}, ModelError, ["'f'", "another name"]),
    "site y": (reserved("y"), X, Y, {}, ModelError, ["'y'", "another name"]),
    "site named like a plate": (reserved("rows"), X, Y, {}, ModelError, ["'rows'", "another name"]),
    "no sites": (no_sites, X, Y, {}, ModelError, ["no_sites", "no sites", "bnn.observe"]),
    "nothing to infer": (nothing_to_infer, X, Y, {}, ModelError, ["at least one random variable", "prior"]),
    "f of shape (N,)": (flat_output, X, Y, {}, ModelError, ["(N, K)", "(6,)", "f[:, None]"]),
    "y (N,) for two outputs": (two_outputs, X, Y, {}, ModelError, ["(6, 2)", "y of shape (6,)"]),
    "y (N, 2) for one output": (regression, X, X, {}, ModelError, ["y of shape (6,)", "y of shape (6, 2)"]),
    "odd outputs": (odd_outputs, X, Y, {}, ModelError, ["even number", "(6, 3)", "2 outputs"]),
    "negative noise": (negative_noise, X, Y, {}, InputError, ["positive noise", "-0.1", "noise=1.0"]),
    "negative scale": (negative_scale, X, Y, {}, InputError, ["positive scale", "-1.0"]),
    "plate of another size": (wrong_plate, X, Y, {}, ModelError, ["rows", "4 and 6", "x.shape[0]"]),
    "noise per row": (noise_per_row, X, Y, {}, ModelError, ["one noise", "(6,)", "Heteroscedastic"]),
    "unknown activation": (unknown_activation, X, Y, {}, UnknownNameError, ["'tahn'", "did you mean 'tanh'"]),
    "unknown observed site": (regression, X, Y, {"observed": "yy"}, UnknownNameError, ["did you mean 'y'"]),
    "one class only": (binary, X, np.ones(6), {}, InputError, ["two classes", "single class 1"]),
    "labels from 2": (binary, X, LABELS + 2, {}, InputError, ["labels 0..1", "2..3", "from 0"]),
    "text for numbers": (regression, X, Y.astype(str), {}, InputError, ["numbers", "text", "classes"]),
    "three names for two classes": (
        binary,
        X,
        np.array(["a", "b", "c"])[[0, 1, 2, 0, 1, 2]],
        {},
        InputError,
        ["2 different labels", "'c'"],
    ),
    "labels -1 and 1": (binary, X, 2 * LABELS - 1, {}, InputError, ["labels 0..1", "-1..1"]),
    "labels with fractions": (binary, X, LABELS + 0.5, {}, InputError, ["whole numbers", "0.5"]),
    "labels beyond all integers": (binary, X, LABELS * 1e300, {}, InputError, ["labels 0..1", "1e+300"]),
    "one-hot labels": (three_classes, X, np.eye(3)[[0, 1, 2, 0, 1, 2]], {}, ModelError, ["(6,)", "(6, 3)"]),
}


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Programs of more than one operation that JAX compiles meanwhile."""
    import jax.monitoring

    compiled: list[str] = []

    def listen(event: str, seconds: float, **details: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(str(details.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)


def refusal(action: Callable[[], Any], error: type[BNNError], parts: list[str]) -> None:
    with pytest.raises(error) as caught:
        action()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    if not isinstance(caught.value, UnknownNameError):
        assert message.index("expected ") < message.index("; got ") < message.index("; try "), message
    assert "\n" not in message, message
    assert type(caught.value) is error


def test_compilations_are_counted(compilations: list[str]) -> None:
    import jax

    jax.jit(lambda x: 3.0 * x + 1.0)(np.ones(2))
    assert len(compilations) >= 1


@pytest.mark.parametrize("case", DATA)
def test_data_and_arguments_are_refused(case: str, compilations: list[str]) -> None:
    model, x, y, arguments, error, parts = DATA[case]
    refusal(lambda: bnn.MAP().fit(model, x, y, progress=False, **arguments), error, parts)
    assert compilations == []


@pytest.mark.parametrize("case", MODELS)
def test_models_that_are_none_are_refused(ppl: str, case: str, compilations: list[str]) -> None:
    model, x, y, arguments, error, parts = MODELS[case]
    refusal(lambda: bnn.MAP(ppl=ppl).fit(model, x, y, progress=False, **arguments), error, parts)
    # A random key may be made; the model itself is never compiled.
    assert [name for name in compilations if "lambda" in name or "predictor" in name] == []
    assert len(compilations) <= 6, compilations


def test_labels_are_held_to_the_outputs_of_the_network(ppl: str) -> None:
    labels = np.array([0, 1, 2, 3, 0, 1])
    refusal(
        lambda: bnn.MAP(ppl=ppl).fit(three_classes, X, labels, progress=False),
        InputError,
        ["labels 0..2", "labels 0..3", "as many classes"],
    )


def test_a_missing_cuda_device_is_a_named_error(ppl: str) -> None:
    for device, dtype in (("cuda:99", "auto"), ("cuda:99", "float64")):
        refusal(
            lambda device=device, dtype=dtype: bnn.MAP(ppl=ppl, dtype=dtype).fit(
                regression, X, Y, device=device, progress=False
            ),
            DeviceError,
            ["cuda:99", "device='cpu'"],
        )


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    [
        (lambda: bnn.MAP(ppl="stan"), UnknownNameError, ["'stan'", "numpyro, pyro"]),
        (lambda: bnn.MAP(ppl="numpiro"), UnknownNameError, ["did you mean 'numpyro'"]),
        (lambda: bnn.MAP(dtype="float16"), UnknownNameError, ["did you mean 'float64'"]),
        (lambda: bnn.MAP(space="constraint"), UnknownNameError, ["did you mean 'constrained'"]),
        (lambda: bnn.MAP(steps=0), InputError, ["steps", "0"]),
        (lambda: bnn.MAP(learning_rate=-1.0), InputError, ["learning_rate", "-1.0"]),
        (lambda: bnn.fit(regression, X, Y, bnn.MAP), InputError, ["an instance", "MAP()"]),
        (lambda: bnn.fit(regression, X, Y, "map"), InputError, ["a method", "'map'", "bnn.MAP()"]),
    ],
)
def test_impossible_methods_are_refused(
    make: Callable[[], Any], error: type[BNNError], parts: list[str]
) -> None:
    refusal(make, error, parts)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: dist.Normal(0.0, -1.0), ["positive scale", "-1.0"]),
        (lambda: dist.Normal(0.0, np.float32(-1.0)), ["positive scale", "-1.0"]),
        (lambda: dist.Normal(0.0, np.array([1.0, -2.0])), ["positive scale", "-2.0"]),
        (lambda: dist.Normal(float("nan"), 1.0), ["finite loc", "nan"]),
        (lambda: dist.HalfNormal(0), ["positive scale", "0"]),
        (lambda: dist.StudentT(-1.0), ["positive df"]),
        (lambda: dist.Normal(0.0, 1.0, 2.0), ["at most 2 arguments", "loc, scale"]),
        (lambda: dist.Gamma(), ["'concentration'", "none"]),
        (lambda: dist.Uniform(1.0, 1.0), ["low < high"]),
        (lambda: dist.NormalMixture((0.5, 0.6), (1.0, 2.0)), ["sum 1"]),
        (lambda: dist.NormalMixture((1.0,), (1.0, 2.0)), ["as many weights as scales"]),
        (lambda: priors.Normal(0.0, -1.0), ["priors.Normal", "positive scale"]),
        (lambda: priors.Normal(0.0, np.float64("inf")), ["positive scale", "inf"]),
        (lambda: priors.Normal(0.0, "fanin"), ["'fan_in'", "'fanin'"]),
        (lambda: priors.Normal(0.0, "fan_in", -2.0), ["positive scale", "-2.0"]),
        (lambda: priors.Normal(0.0, 0.5, sigma=2.0), ["sigma with scale='fan_in' only"]),
        (lambda: priors.StudentT(0.0), ["priors.StudentT"]),
        (lambda: priors.Laplace(scale=0.0), ["priors.Laplace"]),
        (lambda: priors.ScaleMixture((0.5, 0.4), (1.0, 0.1)), ["sum 1"]),
        (lambda: priors.ScaleMixture((1.0,), (1.0, 0.1)), ["as many weights as scales"]),
        (lambda: priors.Point(-1.0), ["priors.Point"]),
        (lambda: likelihoods.Gaussian(0.0), ["positive noise", "0.0"]),
        (lambda: likelihoods.Gaussian(float("inf")), ["positive noise", "inf"]),
    ],
)
def test_impossible_numbers_are_refused_where_they_are_written(
    make: Callable[[], Any], parts: list[str]
) -> None:
    refusal(make, InputError, parts)


def test_names_that_do_not_exist_come_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'HalfNormal'"):
        _ = dist.HalfNormall
    with pytest.raises(UnknownNameError, match="did you mean 'scale'"):
        dist.Normal(scal=1.0)
    with pytest.raises(InputError, match="given twice"):
        dist.Normal(0.0, loc=1.0)


def test_a_column_without_variance_is_warned_of_and_kept() -> None:
    x = np.column_stack([X, np.full(6, 3.0)])
    with pytest.warns(UserWarning, match=r"columns \[2\] have no variance"):
        posterior = bnn.MAP(steps=10, polish=False).fit(regression, x, Y, progress=False)
    assert posterior.draws["hidden0.weight"].shape[-2:] == (3, 3)
    np.testing.assert_array_equal(posterior.inputs, x)


def test_a_constrained_parameter_of_a_plain_model_is_refused() -> None:
    import numpyro
    import numpyro.distributions as nd
    import pyro
    import pyro.distributions as pd
    import torch

    def in_numpyro(x: Any, y: Any = None) -> None:
        scale = numpyro.param("scale", 1.0, constraint=nd.constraints.positive)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", nd.Normal(x[:, 0], scale), obs=y)

    def in_pyro(x: Any, y: Any = None) -> None:
        scale = pyro.param("scale", torch.tensor(1.0), constraint=pd.constraints.positive)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", pd.Normal(x[:, 0], scale), obs=y)

    for model in (in_numpyro, in_pyro):
        refusal(
            lambda model=model: bnn.MAP().fit(model, X, Y, progress=False),
            UnsupportedError,
            ["'scale'", "without a constraint"],
        )
