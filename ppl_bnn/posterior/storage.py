"""Storage of a posterior in a folder, without pickle.

- `tree.nc`: the ArviZ DataTree of `ppl_bnn.posterior.export`, for other tools;
- `arrays.safetensors`: the approximation and the weights of its parts, the data, statistics, loss curves and units, as
  named arrays;
- `manifest.json`: everything that is not an array, the class of the approximation by name, a signature of the model,
  and the checksums of all three files (`ppl_bnn.core.stored`).

A model is code and is not stored. It is passed to `load`, which compares it with the signature.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.backends.program import Program
from ppl_bnn.backends.protocol import Model
from ppl_bnn.core import stored
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.files import staged, write_arrays, write_tree
from ppl_bnn.posterior.export import posterior_datatree
from ppl_bnn.posterior.registered import APPROXIMATIONS, approximation_class

if TYPE_CHECKING:
    from ppl_bnn.posterior.posterior import Posterior

# 2: weights of the parts of a mixture, groups of chains, the state of a sampler. 3: checksums of all files. 4: the
# fields of an approximation by their names.
FORMAT = 4
KIND = "ppl_bnn posterior"
TREE, ARRAYS, MANIFEST = "tree.nc", "arrays.safetensors", "manifest.json"
# Schema of a manifest. `info` is `FitInfo` without the loss curves; a comparison stores it too, also of a fit from
# outside the library.
INFO = {
    "method": str,
    "ppl": ("numpyro", "pyro", "outside"),
    "seed": int,
    "dtype": ("float32", "float64"),
    "device": str,
    "compile_seconds": float,
    "run_seconds": float,
    "gradient_evaluations": (float, None),
    "settings": {str: object},
    "versions": {str: str},
    "data_hash": str,
    "warnings": [str],
    "figures": {str: (float, bool)},
    "target?": str,
}
# Attributes of a posterior that the manifest holds as they are.
AS_IT_IS = ("language", "observed", "feature_names", "class_names", "labels")
_SITE = {"name": str, "shape": [int], "unconstrained_shape": [int], "kind": str}
SCHEMA = {
    "approximation": str,
    "groups?": (int, None),
    "language": bool,
    "observed": str,
    "standardised": bool,
    "feature_names": ([str], None),
    "class_names": ([(str, float, bool)], None),
    "labels?": ([(str, int)], None),
    "info": INFO,
    "model": {"name": str, "likelihood": str, "sites": [_SITE], "log_joint": float},
    "arrays": [str],
}
READER = stored.Reader("path", "a complete saved posterior", "saving it again")


def save(posterior: Posterior, path: str | Path) -> Path:
    """Write a posterior to a folder, and return the folder.

    All files are written to a temporary folder beside it, which is renamed at the end: an interrupted save leaves the
    previous content. A saved posterior is replaced. Raises InputError if `path` cannot be written or holds something
    else, and UnsupportedError for an approximation that is not in `APPROXIMATIONS`.
    """
    path = Path(path)
    name = type(posterior.approximation).__name__
    known = name in APPROXIMATIONS and approximation_class(name) is type(posterior.approximation)
    expected = f"an approximation among {', '.join(sorted(APPROXIMATIONS))}"
    UnsupportedError.check(known, "save", expected, name, "a row for it in ppl_bnn.inference.registry")
    _check_free(path)
    arrays, manifest = _arrays(posterior), _manifest(posterior, name)
    tree = posterior_datatree(posterior)
    try:
        with staged(path) as folder:
            written = stored.Folder(folder)
            written.write(TREE, lambda path: write_tree(path, tree))
            written.write(ARRAYS, lambda path: write_arrays(path, arrays))
            # A file of arrays does not keep the order of the program.
            written.write_manifest(MANIFEST, manifest | {"arrays": list(arrays)})
    except OSError as error:
        raise InputError.of("path", "a folder that can be written", f"{path}: {error}", "another") from error
    return path


# --- writing --------------------------------------------------------------------------------------


def _arrays(posterior: Posterior) -> dict[str, np.ndarray]:
    inputs = posterior.inputs
    parts: dict[str, Mapping[str, Any]] = {
        "approximation": posterior.approximation.arrays(),
        "weights": {} if posterior.weights is None else {"parts": posterior.weights},
        "inputs": {} if isinstance(inputs, Mapping) else {"array": inputs},
        "inputs/dict": inputs if isinstance(inputs, Mapping) else {},
        "targets": {"array": posterior.targets},
        "statistics": posterior.statistics,
        "history": posterior.info.history,
        "standardisation": {} if posterior.standardisation is None else posterior.standardisation.arrays(),
        "probe": {name: value[0, 0] for name, value in posterior.unconstrained_draws.items()},
    }
    each = ((part, name, value) for part, values in parts.items() for name, value in values.items())
    return {f"{part}/{name}": np.asarray(value) for part, name, value in each}


def _manifest(posterior: Posterior, approximation: str) -> dict[str, Any]:
    info = posterior.info
    function = getattr(posterior.model, "func", posterior.model)
    home = getattr(function, "__module__", "?")
    qualified = getattr(function, "__qualname__", repr(function))
    sites, likelihood = posterior.with_problem(signature_of)
    first = {name: value[0, :1] for name, value in posterior.unconstrained_draws.items()}
    model = {"name": f"{home}.{qualified}", "likelihood": likelihood, "sites": sites}
    return {
        "kind": KIND,
        "format": FORMAT,
        "approximation": approximation,
        "groups": getattr(posterior.approximation, "groups", None),
        "standardised": posterior.standardisation is not None,
        **{name: getattr(posterior, name) for name in AS_IT_IS},
        "info": {name.rstrip("?"): getattr(info, name.rstrip("?")) for name in INFO},
        "model": {**model, "log_joint": float(posterior.log_joint(first)[0])},
    }


def signature_of(problem: Any) -> tuple[list[dict[str, Any]], str]:
    """Signature of a model: the sites in the order of the program, which is that of the flat vector; the likelihood."""
    program: Program = problem.program
    sites = []
    for name, site in program.sites.items():
        shapes = {"shape": list(site.shape), "unconstrained_shape": list(site.unconstrained_shape)}
        sites.append({"name": name, **shapes, "kind": "parameter" if site.is_param else "random variable"})
    return sites, program.likelihood.family


def _check_free(path: Path) -> None:
    """Refuse a path that holds anything but a saved posterior: replacing it would lose that."""
    free = not os.path.lexists(path)
    if path.is_dir() and not path.is_symlink():
        try:
            names = {entry.name for entry in path.iterdir()}
        except OSError as error:
            raise InputError.of("path", "a folder that can be read", str(error), "another") from error
        # A damaged posterior is replaced too, as the error of `load` advises.
        own = names <= {TREE, ARRAYS, MANIFEST} and stored.claims(path / MANIFEST, KIND)
        free = not names or own
    got = f"{path}: {'a folder with other things in it' if path.is_dir() else 'a file or a link'}"
    InputError.check(free, "path", "a new folder, or a saved posterior to replace", got, "another name")


def check_importable(model: Model) -> None:
    """Refuse to pickle a function that another process could not import. cloudpickle sends such functions by value."""
    function = getattr(model, "func", model)
    name, home = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if name is None or not inspect.isfunction(function):
        return
    found: Any = sys.modules.get(home or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is function or _in_cloudpickle():
        return
    expected = "a posterior whose model can be imported, a function at the top of a module"
    raise UnsupportedError.of("pickle", expected, f"{home}.{name}", "posterior.save(folder) and bnn.load")


def _in_cloudpickle() -> bool:
    """Whether cloudpickle is among the callers."""
    frame = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__", "")).startswith("cloudpickle"):
        frame = frame.f_back
    return frame is not None
