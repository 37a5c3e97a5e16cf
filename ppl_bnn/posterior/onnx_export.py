"""Export of one network to ONNX: from inputs to the predictive distribution, in the units of the data.

The program runs in torch at the weights of the point, whichever system fitted them, and torch records its operations.
The graph has the raw inputs of `predict`, "x" (N, ...) or one for each entry of a dict, with N free, and the units of a
standardised fit. Its outputs are "probabilities" (N, C) for classes; "mean" and "sd", (N,) or (N, K), for normal noise;
and for other families the parameters by the names and of the shapes in `Prediction`, without the axis of draws.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import InputError, MissingFrameworkError, UnsupportedError
from ppl_bnn.core.files import write_whole
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import network_output
from ppl_bnn.language.primitives import Handler, Message
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.standardisation import Standardisation

if TYPE_CHECKING:
    from ppl_bnn.posterior.posterior import Posterior

PACKAGES = ("onnx", "onnxruntime", "onnxscript")
# Largest difference between onnxruntime and `predict`, relative to the largest value.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3}


class _Patches(Handler):
    """Convolutions as matrix products of patches: onnxruntime has no convolution in double precision."""

    sees_maps = False

    def process(self, msg: Message) -> None:
        if msg.kind == "conv":
            x, weight, bias, *places = msg.arguments.values()
            kernel: Any = weight.shape[:-2] if len(weight.shape) > 3 else weight.shape[0]
            found = ops.patches(x, kernel, *places) @ weight.reshape(-1, weight.shape[-1])
            msg.answer(found if bias is None else found + bias)


def export_onnx(posterior: Posterior, path: str | Path) -> Path:
    """The work of `Posterior.export_onnx`, which documents it."""
    path, where = Path(path), "export_onnx"
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        expected, advice = f"the packages {', '.join(PACKAGES)}", "pip install 'ppl-bnn[onnx]'"
        raise MissingFrameworkError.of(where, expected, f"no {' and no '.join(missing)}", advice)
    InputError.check(path.parent.is_dir(), where, "a file in a folder that exists", path, "another path")
    _check_support(posterior)
    prediction = posterior.predict(posterior.original_inputs)
    try:
        with ignored():
            model = _graph(posterior)
    except Exception as error:
        got = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        advice = "layers of bnn or of torch, bnn.ops, and x.shape[0] without int()"
        raise UnsupportedError.of(where, "a network whose operations torch records", got, advice) from error
    _describe(model, posterior, prediction.family)
    content = model.SerializeToString()
    _check(content, posterior, prediction)
    write_whole(path, lambda part: part.write_bytes(content))
    return path


def _check_support(posterior: Posterior) -> None:
    """Refuse what is not one network that takes its rows one by one."""
    where, check, got = "export_onnx", UnsupportedError.check, f"{posterior.info.method}, of many networks"
    check(posterior.kind == "point", where, "one network", got, "posterior.distil().export_onnx(path)")
    expected, got = "a model in the language", "a plain NumPyro or Pyro model"
    check(posterior.language, where, expected, got, "the exporter of its system")
    program = posterior.with_problem(lambda problem: problem.program)
    got, advice = "latent variables of rows, which are drawn at random", "distilling a posterior of the model"
    check(not program.has_local, where, "a function of the inputs", got, advice)
    expected, got = "rows that are predicted one by one", "rows that interact (bnn.coupled)"
    check(not program.coupled, where, expected, got, "predict")


def _graph(posterior: Posterior) -> Any:
    """The ONNX model, without its metadata."""
    import torch

    chosen, raw = system("pyro"), _entries(posterior.original_inputs)
    with chosen.session(posterior.info.dtype, "cpu", threads=1):

        class Network(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.function, values = _function(posterior, chosen)
                self.sites = list(values)
                for index, value in enumerate(values.values()):
                    self.register_buffer(f"site{index}", value)

            def forward(self, *arrays: Any) -> tuple[Any, ...]:
                w = {name: getattr(self, f"site{index}") for index, name in enumerate(self.sites)}
                return tuple(self.function(w, dict(zip(raw, arrays, strict=True))).values())

        few = [torch.from_numpy(np.resize(each, (3, *each.shape[1:]))) for each in raw.values()]
        shapes = (tuple({0: torch.export.Dim("rows")} for _ in few),)
        network = Network().eval()
        w = dict(zip(network.sites, network.buffers(), strict=True))
        names = list(network.function(w, dict(zip(raw, few, strict=True))))
        program = torch.export.export(network, tuple(few), dynamic_shapes=shapes, strict=False)
        # No value of torch has such a name.
        own = {f"@{name}": name for name in (*raw, *names)}
        ends: dict[str, Any] = {"input_names": list(own)[: len(raw)], "output_names": list(own)[len(raw) :]}
        made: Any = torch.onnx.export(program, (), dynamo=True, verbose=False, **ends)
    model = made.model_proto  # a new one at each access
    graph = model.graph
    renamed = {name: f"inner.{name}" for name in own.values()} | own
    for node in graph.node:
        node.input[:], node.output[:] = (
            [renamed.get(v, v) for v in each] for each in (node.input, node.output)
        )
    values = (*graph.input, *graph.output, *graph.value_info)
    for each in (*values, *graph.initializer):
        each.name = renamed.get(each.name, each.name)
    free = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for size in (size for each in values for size in each.type.tensor_type.shape.dim):
        if size.dim_param == free:
            size.dim_param = "rows"
    return model


def _entries(x: Any) -> dict[str, np.ndarray]:
    """The inputs by the names that they have in the file."""
    return dict(x) if isinstance(x, Mapping) else {"x": x}


def _function(posterior: Posterior, chosen: Any) -> tuple[Callable[..., dict[str, Any]], dict[str, Any]]:
    """(weights, raw inputs) -> outputs by name, over arrays of torch, and the weights."""
    units, table = posterior.standardisation, not isinstance(posterior.inputs, Mapping)
    model = posterior.approximation.program(posterior.model)
    x, y = (map_data(lambda a: chosen.asarray(a[:1]), each) for each in (posterior.inputs, posterior.targets))
    likelihood = Program.of(chosen, model, x, y, language=True).likelihood
    values = {name: chosen.asarray(value[0, 0]) for name, value in posterior.draws.items()}
    like = chosen.asarray(np.zeros(1))

    def moved(entry: Any, location: Any, scale: Any) -> Any:
        return (entry - ops.asarray(location, like=entry)) / ops.asarray(scale, like=entry)

    def function(w: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(raw)
        if units is not None:
            means, scales = _entries(units.x_mean), _entries(units.x_scale)
            given |= {name: moved(given[name], means[name], scales[name]) for name in means}
        given |= {name: each.to(like.dtype) for name, each in given.items() if each.is_floating_point()}
        with _Patches():
            eta = network_output(model, w, given["x"] if table else given).predictor
        family, parameters = likelihood.mixture_parameters(eta)
        # As a prediction, which is in double precision.
        return _outputs(family, {name: each.double() for name, each in parameters.items()}, units)

    return function, values


def _outputs(family: str, parameters: dict[str, Any], units: Standardisation | None) -> dict[str, Any]:
    """The outputs by their names, in the units of the data, of arrays of torch or NumPy without an axis of draws."""
    if family in ("Bernoulli", "Categorical"):
        probs = parameters["probs"]
        return {"probabilities": ops.stack([1.0 - probs, probs]) if family == "Bernoulli" else probs}
    if units is not None and units.y_mean is not None and units.y_scale is not None:
        loc = parameters["loc"]
        # A mixture has its parts in the last axis, a censored target its event in the last column.
        outputs = loc.shape[1:] if family != "NormalMixture" and len(loc.shape) > 1 else ()
        mean, scale = (np.resize(each, outputs) for each in (units.y_mean, units.y_scale))
        mean, scale = (ops.asarray(each, like=loc) for each in (mean, scale))
        factors = {"loc": scale, "scale": scale, "scale_tril": scale[..., None]}
        changed = {name: each * factors[name] for name, each in parameters.items() if name in factors}
        parameters = parameters | changed | {"loc": changed["loc"] + mean}
    if family == "Normal":
        return {"mean": parameters["loc"], "sd": parameters["scale"]}
    return parameters


def _describe(model: Any, posterior: Posterior, family: str) -> None:
    """What the file says of itself."""
    info, function = posterior.info, getattr(posterior.model, "func", posterior.model)
    words = {"model": getattr(function, "__name__", "model"), "method": info.method, "family": family}
    words |= {"data_hash": info.data_hash, "ppl_bnn": info.versions["ppl-bnn"], "target": posterior.target}
    for name in ("class_names", "labels", "feature_names"):
        value = getattr(posterior, name)
        words |= {} if value is None else {name: json.dumps(list(value))}
    model.producer_name = "ppl_bnn"
    for key, value in words.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value


def _check(content: bytes, posterior: Posterior, prediction: Prediction) -> None:
    """Refuse a file whose outputs at the training inputs are not those of `predict`."""
    # By name, as the package is of an extra.
    onnxruntime = importlib.import_module("onnxruntime")
    where, tolerance = "export_onnx", TOLERANCE[posterior.info.dtype]
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:
        got = str(error).strip().partition(chr(10))[0]
        advice = "a fit with dtype='float32', for which it has more operations"
        raise UnsupportedError.of(where, "operations that onnxruntime has", got, advice) from error
    raw = _entries(posterior.original_inputs)
    names = [each.name for each in session.get_outputs()]
    found = dict(zip(names, session.run(names, raw), strict=True))
    one = {name: np.asarray(value)[0] for name, value in prediction.parameters.items()}
    for name, wanted in _outputs(prediction.family, one, None).items():
        worst = float(np.max(np.abs(found[name] - wanted)) / np.max(np.abs(wanted)))
        expected = f"{name} of onnxruntime within {tolerance:g} of predict, relative to the largest"
        good, advice = worst <= tolerance, "a report of this model; no file was written"
        UnsupportedError.check(good, where, expected, f"a difference of {worst:.3g}", advice)
