"""A posterior in a folder: a netCDF tree for people and other tools, arrays and a manifest to rebuild it from.
Never pickle.

- `tree.nc`: the ArviZ DataTree of `ppl_bnn.posterior.export`;
- `arrays.safetensors`: the approximation and the weights of its parts, the data, statistics, loss curves and units,
as named arrays;
- `manifest.json`: everything that is no array, the class of the approximation by name, a signature of the model, and
the checksums of all three files (`ppl_bnn.core.stored`).

A model is code and is not stored: it is given again to `load`, which compares it with the signature.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core import stored
from ppl_bnn.core.errors import DeviceError, InputError, ModelError, UnsupportedError, message
from ppl_bnn.core.files import left_by_a_kill, staged, write_arrays, write_tree
from ppl_bnn.posterior.export import posterior_datatree
from ppl_bnn.posterior.posterior import Chains, FitInfo, Posterior
from ppl_bnn.posterior.registered import APPROXIMATIONS, approximation_class
from ppl_bnn.prediction.standardisation import Standardisation

# 2: weights of the parts of a mixture, groups of chains, the state of a sampler. 3: checksums of all files.
FORMAT = 3
KIND = "ppl_bnn posterior"
TREE, ARRAYS, MANIFEST = "tree.nc", "arrays.safetensors", "manifest.json"

# What a manifest holds. `info` is that of `FitInfo` without the loss curves; a comparison keeps it too.
INFO = {
    "method": str,
    "ppl": ("numpyro", "pyro"),
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
_SITE = {"name": str, "shape": [int], "unconstrained_shape": [int], "kind": str}
_SCHEMA = {
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
    "sha256?": str,
}
_READER = stored.Reader("path", "a complete saved posterior", "saving it again")

# The log joint of one draw, computed again when loading, differs by rounding between machines, by more between models.
LOG_JOINT_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}


def save(posterior: Posterior, path: str | Path) -> Path:
    """Write a posterior to the folder `path`, which is made, and give the path back.

    Everything is written to a folder beside it that is renamed at the end: an interrupted save leaves what was
    there before. A saved posterior is replaced; anything else in the way is refused.

    Raises
    ------
    InputError: `path` cannot be written, or holds something else. UnsupportedError: an approximation that is
    not in `APPROXIMATIONS`.
    """
    path = Path(path)
    name = type(posterior.approximation).__name__
    if name not in APPROXIMATIONS or approximation_class(name) is not type(posterior.approximation):
        raise UnsupportedError(
            "save: "
            + message(
                f"an approximation among {', '.join(sorted(APPROXIMATIONS))}",
                name,
                "a row for it in ppl_bnn.inference.registry",
            )
        )
    _refuse_occupied(path)
    arrays, manifest = _arrays(posterior), _manifest(posterior, name)
    tree = posterior_datatree(posterior)
    try:
        with staged(path) as folder:
            _write(folder, arrays, manifest, tree)
    except OSError as error:
        raise InputError(
            "path: " + message("a folder that can be written", f"{path}: {error}", "another folder")
        ) from error
    return path


def load(path: str | Path, model: Any, *, device: str = "auto") -> Posterior:
    """Read back a posterior that `save` wrote; `model` is the function that it was fitted to.

    Its predictions are the same bits as before, on the same machine and device. device: where it will predict
    by default; "auto" is the device of the fit, or the CPU, with a warning, where there is no such device.

    A posterior that an older version saved is read with a UserWarning, since its manifest has no checksum.

    Raises
    ------
    InputError: no saved posterior at `path`. DamagedError: one that is damaged, or contradicts itself.
    UnsupportedError: a newer format.
    ModelError: another model: the sites that differ are listed, or the log joint of a stored draw has changed.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    arrays = _read_arrays(path, manifest)
    try:
        _check_flags(manifest, arrays)
        posterior = _rebuilt(manifest, arrays, model)
    # No model runs here: whatever a class raises whose arrays are not of its kind.
    except Exception as error:
        raise _READER.damaged(path / MANIFEST, f"{type(error).__name__}: {error}") from error
    posterior = _on_device(posterior, device)
    _check_model(posterior, manifest["model"], _part(arrays, "probe"))
    return posterior


# --- writing --------------------------------------------------------------------------------------


def _arrays(posterior: Posterior) -> dict[str, np.ndarray]:
    inputs = posterior.inputs
    parts: dict[str, Mapping[str, Any]] = {
        "approximation": posterior.approximation.arrays(),
        "weights": {} if posterior.weights is None else {"parts": posterior.weights},
        "inputs": {f"dict/{name}": value for name, value in inputs.items()}
        if isinstance(inputs, Mapping)
        else {"array": inputs},
        "targets": {"array": posterior.targets},
        "statistics": posterior.statistics,
        "history": posterior.info.history,
        "standardisation": {} if posterior.standardisation is None else posterior.standardisation.arrays(),
        "probe": {name: value[0, 0] for name, value in posterior.unconstrained_draws.items()},
    }
    # Not np.ascontiguousarray, which gives a number an axis.
    return {
        f"{part}/{name}": np.asarray(value, order="C")
        for part, values in parts.items()
        for name, value in values.items()
    }


def _manifest(posterior: Posterior, approximation: str) -> dict[str, Any]:
    info = posterior.info
    function = getattr(posterior.model, "func", posterior.model)
    sites, likelihood = posterior._with(_signature)
    return {
        "kind": KIND,
        "format": FORMAT,
        "approximation": approximation,
        "groups": getattr(posterior.approximation, "groups", None),
        "language": posterior.language,
        "observed": posterior.observed,
        "standardised": posterior.standardisation is not None,
        "feature_names": posterior.feature_names,
        "class_names": posterior.class_names,
        "labels": posterior.labels,
        "info": {
            "method": info.method,
            "ppl": info.ppl,
            "seed": info.seed,
            "dtype": info.dtype,
            "device": info.device,
            "compile_seconds": info.compile_seconds,
            "run_seconds": info.run_seconds,
            "gradient_evaluations": info.gradient_evaluations,
            "settings": info.settings,
            "versions": info.versions,
            "data_hash": info.data_hash,
            "warnings": info.warnings,
            "figures": info.figures,
            "target": info.target,
        },
        "model": {
            "name": f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}",
            "likelihood": likelihood,
            "sites": sites,
            "log_joint": float(
                posterior.log_joint(
                    {name: value[0, :1] for name, value in posterior.unconstrained_draws.items()}
                )[0]
            ),
        },
    }


def _signature(problem: Any) -> tuple[list[dict[str, Any]], str]:
    """The sites in the order of the program, which is that of the flat vector, and the likelihood."""
    program: Program = problem.program
    sites = [
        {
            "name": site.name,
            "shape": list(site.shape),
            "unconstrained_shape": list(site.unconstrained_shape),
            "kind": "parameter" if site.is_param else "random variable",
        }
        for site in program.sites.values()
    ]
    likelihood = program.likelihood
    return sites, str(getattr(likelihood, "family", type(likelihood).__name__))


def _refuse_occupied(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if path.is_dir() and not path.is_symlink():
        try:
            free = not any(path.iterdir()) or _is_saved(path)
        except OSError as error:
            raise InputError(
                "path: " + message("a folder that can be read", str(error), "another")
            ) from error
        if free:
            return
    what = "a folder with other things in it" if path.is_dir() else "a file or a link"
    raise InputError(
        "path: " + message("a new folder, or a saved posterior to replace", f"{path}: {what}", "another name")
    )


def _is_saved(path: Path) -> bool:
    """Whether the folder is a saved posterior and nothing besides, so that replacing it loses nothing else."""
    if not {entry.name for entry in path.iterdir()} <= {TREE, ARRAYS, MANIFEST}:
        return False
    # A damaged one is replaced, too: that is the advice where it is read.
    return stored.claims(path / MANIFEST, KIND)


def _write(folder: Path, arrays: dict[str, np.ndarray], manifest: dict[str, Any], tree: Any) -> None:
    written = stored.Folder(folder)
    written.write(TREE, lambda path: write_tree(path, tree))
    written.write(ARRAYS, lambda path: write_arrays(path, arrays))
    # A file of arrays has an order of its own; that of the sites is the program's.
    written.write_manifest(MANIFEST, manifest | {"arrays": list(arrays)})


# --- reading --------------------------------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        left = left_by_a_kill(path)
        advice = f"renaming {left}, which a save that was killed has left" if left else "posterior.save(path)"
        raise InputError(
            "path: " + message("the folder of a saved posterior", f"{path}, which is no folder", advice)
        )
    manifest = _READER.manifest(path / MANIFEST, KIND, FORMAT, _SCHEMA, sealed_since=3)
    if manifest is None:
        raise InputError(
            "path: "
            + message(
                "the folder of a saved posterior", f"{path}, without {MANIFEST}", "the folder given to save"
            )
        )
    return manifest


def _read_arrays(path: Path, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
    # The manifest of an older format has the checksum of the arrays alone.
    files = manifest.get("files", {ARRAYS: manifest.get("sha256", "")})
    if os.path.lexists(path / TREE) and TREE in files:
        _READER.listed(path, TREE, files)
    file = _READER.listed(path, ARRAYS, files)
    found, _ = _READER.arrays(file)
    if sorted(manifest["arrays"]) != sorted(found):
        raise _READER.damaged(path / MANIFEST, "it does not list the arrays that are there")
    return {name: found[name] for name in manifest["arrays"]}


def _check_flags(manifest: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """What the manifest says of the arrays has to be so: a checksum does not show who wrote it. Errors: ValueError."""
    units = bool(_part(arrays, "standardisation"))
    if manifest["standardised"] is not units:
        raise ValueError(f"standardised is {manifest['standardised']}, and the arrays say {units}")
    features, table = manifest["feature_names"], arrays.get("inputs/array")
    if features is not None and table is not None and table.ndim == 2 and len(features) != table.shape[1]:
        raise ValueError(f"feature_names has {len(features)} names, and the inputs {table.shape[1]} columns")
    # A draw of a float32 fit may be made in float64, in NumPy; that of a float64 fit is never float32.
    for name, value in _part(arrays, "probe").items():
        if value.dtype == np.float32 and manifest["info"]["dtype"] == "float64":
            raise ValueError(f"info.dtype is {manifest['info']['dtype']}, and {name} is {value.dtype}")


def _part(arrays: Mapping[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    prefix = part + "/"
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _rebuilt(manifest: dict[str, Any], arrays: dict[str, np.ndarray], model: Any) -> Posterior:
    inputs = _part(arrays, "inputs")
    info = dict(manifest["info"])
    info["warnings"] = tuple(info["warnings"])
    features, classes = manifest["feature_names"], manifest["class_names"]
    approximation = approximation_class(manifest["approximation"]).from_arrays(_part(arrays, "approximation"))
    if isinstance(approximation, Chains):
        approximation = replace(approximation, groups=manifest.get("groups"))
    if "weights/parts" in arrays:
        approximation = approximation.weighted(arrays["weights/parts"])
    return Posterior(
        model=model,
        language=manifest["language"],
        observed=manifest["observed"],
        inputs=inputs["array"] if "array" in inputs else _part(inputs, "dict"),
        targets=arrays["targets/array"],
        approximation=approximation,
        info=FitInfo(history=_part(arrays, "history"), **info),
        statistics=_part(arrays, "statistics"),
        standardisation=Standardisation.from_arrays(_part(arrays, "standardisation"))
        if manifest["standardised"]
        else None,
        feature_names=None if features is None else tuple(features),
        class_names=None if classes is None else tuple(classes),
        labels=None if manifest.get("labels") is None else tuple(manifest["labels"]),
    )


def _on_device(posterior: Posterior, device: str) -> Posterior:
    """The posterior set to a device that is there."""
    wanted = posterior.info.device if device == "auto" else device
    try:
        with system(posterior.info.ppl).session(posterior.info.dtype, wanted) as actual:
            pass
    except DeviceError:
        if device != "auto":
            raise
        warnings.warn(
            f"fitted on {wanted}, which is not here; it will predict on the CPU", UserWarning, stacklevel=3
        )
        actual = "cpu"
    if actual != posterior.info.device:
        posterior.info = replace(posterior.info, device=actual)
    return posterior


def _check_model(posterior: Posterior, signature: dict[str, Any], probe: dict[str, np.ndarray]) -> None:
    if not callable(posterior.model):
        raise InputError(
            "model: "
            + message("the function that was fitted", type(posterior.model).__name__, "load(path, model)")
        )
    name = signature["name"]
    try:
        sites, likelihood = posterior._with(_signature)
    except Exception as error:
        raise ModelError(
            f"model: {name} was saved, and the given one does not run on its data: {type(error).__name__}: {error}"
        ) from error
    was = {site["name"]: site for site in signature["sites"]}
    now = {site["name"]: site for site in sites}
    differences = [f"site {site!r} is missing" for site in was if site not in now]
    differences += [f"site {site!r} is new" for site in now if site not in was]
    for site in was:
        if site in now and was[site] != now[site]:
            parts = [key for key in was[site] if was[site][key] != now[site][key]]
            differences += [f"{key} of {site!r} was {was[site][key]}, is {now[site][key]}" for key in parts]
    if not differences and list(was) != list(now):
        differences.append(f"the order of the sites was {list(was)}, is {list(now)}")
    if likelihood != signature["likelihood"]:
        differences.append(f"the likelihood was {signature['likelihood']}, is {likelihood}")
    if not differences:
        before = signature["log_joint"]
        after = float(posterior.log_joint({name: value[None] for name, value in probe.items()})[0])
        tolerance = LOG_JOINT_TOLERANCE[posterior.info.dtype] * (1.0 + abs(before))
        if not (
            abs(after - before) <= tolerance or (not math.isfinite(before) and str(before) == str(after))
        ):
            differences.append(
                f"the log joint of a stored draw was {before:.6g}, is {after:.6g} (another prior, activation or noise)"
            )
    if differences:
        raise ModelError(
            "model: "
            + message(
                f"the model that was saved, {name}",
                f"another one: {'; '.join(differences)}",
                "the function as it was when it was fitted",
            )
        )
