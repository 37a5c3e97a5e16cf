"""The two systems by name, and detection of the system in which a model is written."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any, Literal

from ppl_bnn.backends.native import is_torch_module
from ppl_bnn.backends.protocol import SYSTEMS, Model, System
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import BNNError, MissingFrameworkError, ModelError, unknown_name


def system(name: str) -> System:
    """The system of that name; imports it.

    Raises
    ------
    UnknownNameError
        There is no such system.
    MissingFrameworkError
        The system cannot be imported; the other one is not affected.
    """
    if name not in SYSTEMS:
        raise unknown_name("system", name, SYSTEMS)
    try:
        if name == "numpyro":
            from ppl_bnn.backends import numpyro as chosen
        else:
            from ppl_bnn.backends import pyro as chosen
        return chosen.SYSTEM
    except ImportError as error:
        package = {"numpyro": "numpyro and jax", "pyro": "pyro-ppl and torch"}[name]
        other = "pyro" if name == "numpyro" else "numpyro"
        raise MissingFrameworkError.of(
            "",
            f"{package} for ppl={name!r}",
            f"{type(error).__name__}: {error}",
            f"ppl={other!r} or installing {package}",
        ) from error


def written_in(model: Model, x: Any, y: Any, preferred: str) -> Literal["language", "numpyro", "pyro"]:
    """Find out in which language a model is written, by tracing it once, without computation where the system allows.

    A program in the language runs in both systems; a NumPyro or Pyro model determines the system.

    Parameters
    ----------
    model : callable
        The user's model.
    x, y
        Data.
    preferred : str
        The system to try first.

    Returns
    -------
    {"language", "numpyro", "pyro"}
        The language of the model.

    Raises
    ------
    ModelError
        The model has no sites, runs in neither system, or is a torch module without priors.
    """
    failures: dict[str, Exception] = {}
    candidates = _hinted(model) or [preferred, *(name for name in SYSTEMS if name != preferred)]
    for name in candidates:
        try:
            chosen = system(name)
        except MissingFrameworkError as error:
            failures[name] = error
            continue
        try:
            spoken, sites = _probe(chosen, model, x, y)
        except BNNError:
            raise
        except Exception as error:
            failures[name] = error
            continue
        if spoken:
            return "language"
        if sites:
            return "numpyro" if name == "numpyro" else "pyro"
    if is_torch_module(model):
        raise ModelError.of(
            "",
            "a PyroModule whose weights are PyroSample, or a function (x, y=None)",
            f"the torch module {type(model).__name__}, whose weights have no priors",
            "bnn.module('net', x, network) in a model that ends with bnn.observe",
        ) from next(iter(failures.values()), None)
    if failures:
        name, error = next(iter(failures.items()))
        raise ModelError(f"running the model in {name} failed: {type(error).__name__}: {error}") from error
    raise ModelError.of(
        "",
        "a model written with bnn.sample and bnn.observe, or in NumPyro or Pyro",
        f"{getattr(model, '__name__', type(model).__name__)}, which has no sites",
        "ending the model with bnn.observe(y, f, likelihood)",
    )


def _hinted(model: Model) -> list[str]:
    """Systems that the source of the model names; they are tried first."""
    if is_torch_module(getattr(model, "__self__", getattr(model, "func", model))):
        return ["pyro"]
    function = inspect.unwrap(getattr(model, "func", model))
    namespace = getattr(function, "__globals__", {})
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    found = []
    names = list(code.co_names)
    with suppress(ValueError):
        names += [
            cell.cell_contents.__name__
            for cell in function.__closure__ or ()
            if inspect.ismodule(cell.cell_contents)
        ]
    for name in names:
        value = namespace.get(name)
        module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "") or name
        root = str(module).split(".")[0]
        if root in SYSTEMS and root not in found:
            found.append(root)
    return found


def _probe(chosen: System, model: Model, x: Any, y: Any) -> tuple[bool, int]:
    """Whether the model uses primitives of the language, and its number of sites in a system."""
    from ppl_bnn.language.primitives import Handler, Message

    class Ear(Handler):
        heard = False

        def process(self, msg: Message) -> None:
            self.heard = True

    ear = Ear()

    def listened(x: Any, y: Any = None) -> None:
        with ear:
            plain(x, y)

    with chosen.session("float64", "cpu"):
        plain = chosen.plain(model)
        x, y = map_data(chosen.asarray, x), None if y is None else chosen.asarray(y)
        try:
            latents, others = chosen.describe(listened, x, y)
        except Exception:
            if not ear.heard:
                raise
            return True, 0
    return ear.heard, len(latents) + sum(site.kind == "observed" for site in others)
