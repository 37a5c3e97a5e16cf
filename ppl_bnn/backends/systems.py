"""The two systems by name, and detection of the system in which a model is written."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from ppl_bnn.backends.native import is_torch_module
from ppl_bnn.backends.protocol import SYSTEMS, Model, System
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import BNNError, MissingFrameworkError, ModelError, unknown_name
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.language.handlers import RecordMessages

_PACKAGES = {"numpyro": "numpyro and jax", "pyro": "pyro-ppl and torch"}


def system(name: str) -> System:
    """The system of that name; imports it.

    `UnknownNameError`: there is no such system. `MissingFrameworkError`: it cannot be imported.
    """
    if name not in SYSTEMS:
        raise unknown_name("system", name, SYSTEMS)
    try:
        # Both import tqdm, which asks for ipywidgets in a notebook; the bars of this library do without.
        with ignored("IProgress not found"):
            if name == "numpyro":
                from ppl_bnn.backends import numpyro as chosen
            else:
                from ppl_bnn.backends import pyro as chosen
        return chosen.SYSTEM
    except ImportError as error:
        package, got = _PACKAGES[name], f"{type(error).__name__}: {error}"
        (other,) = (each for each in SYSTEMS if each != name)
        advice = f"ppl={other!r} or installing {package}"
        raise MissingFrameworkError.of("", f"{package} for ppl={name!r}", got, advice) from error


def written_in(model: Model, x: Any, y: Any, preferred: str) -> Literal["language", "numpyro", "pyro"]:
    """Find the language of a model by tracing it once, in the system `preferred` first.

    A program in the language runs in both systems; a NumPyro or Pyro model determines the system. `ModelError` is
    raised if the model has no sites, runs in neither system, or is a torch module without priors.
    """
    failures: dict[str, Exception] = {}
    for name in _hinted(model) or [preferred, *(name for name in SYSTEMS if name != preferred)]:
        try:
            in_language, sites = _probe(system(name), model, x, y)
        except Exception as error:
            if isinstance(error, BNNError) and not isinstance(error, MissingFrameworkError):
                raise
            failures[name] = error
        else:
            if in_language:
                return "language"
            if sites:
                return "numpyro" if name == "numpyro" else "pyro"
    if is_torch_module(model):
        expected = "a PyroModule whose weights are PyroSample, or a function (x, y=None)"
        got = f"the torch module {type(model).__name__}, whose weights have no priors"
        advice = "bnn.module('net', x, network) in a model that ends with bnn.observe"
        raise ModelError.of("", expected, got, advice) from next(iter(failures.values()), None)
    for name, error in failures.items():
        raise ModelError(f"running the model in {name} failed: {type(error).__name__}: {error}") from error
    expected = "a model written with bnn.sample and bnn.observe, or in NumPyro or Pyro"
    got = f"{getattr(model, '__name__', type(model).__name__)}, which has no sites"
    raise ModelError.of("", expected, got, "ending the model with bnn.observe(y, f, likelihood)")


def _hinted(model: Model) -> list[str]:
    """Systems that the source of the model names; they are tried first."""
    if is_torch_module(getattr(model, "__self__", getattr(model, "func", model))):
        return ["pyro"]
    function = inspect.unwrap(getattr(model, "func", model))
    try:
        names = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        # Not a function of Python, or one with a name that has no value yet.
        return []
    values = (*names.globals.values(), *filter(inspect.ismodule, names.nonlocals.values()))
    modules = [
        each.__name__ if inspect.ismodule(each) else getattr(each, "__module__", "") for each in values
    ]
    # A module that the function itself imports is a name of its code only.
    roots = dict.fromkeys(str(name).split(".")[0] for name in (*modules, *function.__code__.co_names))
    return [root for root in roots if root in SYSTEMS]


def _probe(chosen: System, model: Model, x: Any, y: Any) -> tuple[bool, int]:
    """Whether the model uses primitives of the language, and its number of sites in a system."""
    record = RecordMessages()
    with chosen.session("float64", "cpu"):
        probed = record.around(chosen.plain(model))
        x, y = map_data(chosen.asarray, x), None if y is None else chosen.asarray(y)
        try:
            latents, others = chosen.describe(probed, x, y)
        except Exception:
            # Outside of an interpretation, the first primitive of the language raises.
            if not record.messages:
                raise
            return True, 0
    return bool(record.messages), len(latents) + sum(site.kind == "observed" for site in others)
