"""Loading of posteriors from a folder: checked, rebuilt, and compared with the given model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.backends.systems import system
from ppl_bnn.core.arrays import unprefixed
from ppl_bnn.core.errors import DeviceError, InputError, ModelError
from ppl_bnn.core.files import left_by_a_kill
from ppl_bnn.posterior import storage
from ppl_bnn.posterior.approximation import Chains
from ppl_bnn.posterior.fit_info import FitInfo
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.posterior.registered import approximation_class
from ppl_bnn.prediction.standardisation import Standardisation

# On loading, the log joint of one draw is computed and compared. Between machines it differs by rounding only.
LOG_JOINT_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}


def load(path: str | Path, model: Any, *, device: str = "auto") -> Posterior:
    """Read a posterior that `save` wrote.

    Its predictions are bitwise identical on the same machine and device.

    Parameters
    ----------
    path : str or Path
        The folder.
    model : callable
        The function that the posterior was fitted to.
    device : str, default "auto"
        Default device of predictions. "auto" is the device of the fit, or the CPU, with a warning, if there is no such
        device.

    Returns
    -------
    Posterior
        The posterior.

    Raises
    ------
    InputError
        If there is no saved posterior at `path`.
    DamagedError
        If it is damaged, or contradicts itself.
    UnsupportedError
        For another format.
    ModelError
        For another model: the error lists the sites that differ, or says that the log joint of a stored draw has
        changed.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.MAP(), standardise=True)
    >>> folder = posterior.save("posterior")
    >>> again = bnn.load("posterior", model)
    >>> bool((again.predict(table.x).mean == posterior.predict(table.x).mean).all())
    True
    """
    path = Path(path)
    manifest = _read_manifest(path)
    arrays = _read_arrays(path, manifest)
    try:
        _check_flags(manifest, arrays)
        posterior = _rebuilt(manifest, arrays, model)
    # No model runs here. A class may raise any error if the arrays are not valid for it.
    except Exception as error:
        raise storage.READER.damaged(path / storage.MANIFEST, f"{type(error).__name__}: {error}") from error
    posterior = _on_device(posterior, device)
    _check_model(posterior, manifest["model"], unprefixed(arrays, "probe"))
    return posterior


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        left, got = left_by_a_kill(path), "which is no folder"
        advice = f"renaming {left}, which a save that was killed has left" if left else "posterior.save(path)"
    else:
        got, advice = f"without {storage.MANIFEST}", "the folder given to save"
        place = path / storage.MANIFEST
        if manifest := storage.READER.manifest(place, storage.KIND, storage.FORMAT, storage.SCHEMA):
            return manifest
    raise InputError.of("path", "the folder of a saved posterior", f"{path}, {got}", advice)


def _read_arrays(path: Path, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
    files = manifest["files"]
    if os.path.lexists(path / storage.TREE) and storage.TREE in files:
        storage.READER.listed(path, storage.TREE, files)
    file = storage.READER.listed(path, storage.ARRAYS, files)
    found, _ = storage.READER.arrays(file)
    if sorted(manifest["arrays"]) != sorted(found):
        raise storage.READER.damaged(path / storage.MANIFEST, "it does not list the arrays that are there")
    return {name: found[name] for name in manifest["arrays"]}


def _check_flags(manifest: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Check that the manifest agrees with the arrays. A checksum does not show who wrote it. Raises ValueError."""
    units = bool(unprefixed(arrays, "standardisation"))
    if manifest["standardised"] is not units:
        raise ValueError(f"standardised is {manifest['standardised']}, and the arrays say {units}")
    features, table = manifest["feature_names"], arrays.get("inputs/array")
    if features is not None and table is not None and table.ndim == 2 and len(features) != table.shape[1]:
        raise ValueError(f"feature_names has {len(features)} names, and the inputs {table.shape[1]} columns")
    # A draw of a float32 fit may be made in float64, in NumPy; that of a float64 fit is never float32.
    for name, value in unprefixed(arrays, "probe").items():
        if value.dtype == np.float32 and manifest["info"]["dtype"] == "float64":
            raise ValueError(f"info.dtype is {manifest['info']['dtype']}, and {name} is {value.dtype}")


def _rebuilt(manifest: dict[str, Any], arrays: dict[str, np.ndarray], model: Any) -> Posterior:
    info = {**manifest["info"], "warnings": tuple(manifest["info"]["warnings"])}
    kind = approximation_class(manifest["approximation"])
    approximation = kind.from_arrays(unprefixed(arrays, "approximation"))
    if isinstance(approximation, Chains):
        approximation = replace(approximation, groups=manifest.get("groups"))
    if "weights/parts" in arrays:
        approximation = approximation.weighted(arrays["weights/parts"])
    units = unprefixed(arrays, "standardisation")
    stated = {name: manifest.get(name) for name in storage.AS_IT_IS}
    kept: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()}
    return Posterior(
        model=model,
        inputs=arrays["inputs/array"] if "inputs/array" in arrays else unprefixed(arrays, "inputs/dict"),
        targets=arrays["targets/array"],
        approximation=approximation,
        info=FitInfo(history=unprefixed(arrays, "history"), **info),
        statistics=unprefixed(arrays, "statistics"),
        standardisation=Standardisation.from_arrays(units) if units else None,
        **kept,
    )


def _on_device(posterior: Posterior, device: str) -> Posterior:
    """The posterior set to an available device."""
    info = posterior.info
    wanted = info.device if device == "auto" else device
    try:
        with system(info.ppl).session(info.dtype, wanted) as actual:
            pass
    except DeviceError:
        if device != "auto":
            raise
        text = f"fitted on {wanted}, which is not available; it will predict on the CPU"
        warnings.warn(text, UserWarning, stacklevel=3)
        actual = "cpu"
    return replace(posterior, info=replace(info, device=actual))


def _check_model(posterior: Posterior, signature: dict[str, Any], probe: dict[str, np.ndarray]) -> None:
    model, name = posterior.model, signature["name"]
    expected = "the function that was fitted"
    InputError.check(callable(model), "model", expected, repr(model), "load(path, model)")
    try:
        sites, likelihood = posterior.with_problem(storage.signature_of)
    except Exception as error:
        text = f"model: {name} was saved, and the given one does not run on its data"
        raise ModelError(f"{text}: {type(error).__name__}: {error}") from error
    was = {site["name"]: site for site in signature["sites"]}
    now = {site["name"]: site for site in sites}
    differences = [f"site {site!r} is missing" for site in was if site not in now]
    differences += [f"site {site!r} is new" for site in now if site not in was]
    for site in (site for site in was if site in now):
        each = ((key, value, now[site][key]) for key, value in was[site].items())
        differences += [f"{key} of {site!r} was {old}, is {new}" for key, old, new in each if old != new]
    if not differences and list(was) != list(now):
        differences.append(f"the order of the sites was {list(was)}, is {list(now)}")
    if likelihood != signature["likelihood"]:
        differences.append(f"the likelihood was {signature['likelihood']}, is {likelihood}")
    if not differences:
        before = signature["log_joint"]
        after = float(posterior.log_joint({name: value[None] for name, value in probe.items()})[0])
        tolerance = LOG_JOINT_TOLERANCE[posterior.info.dtype]
        # The relative tolerance is one of 1 + |before|. Values that are not finite are the same or not.
        if not np.isclose(after, before, rtol=tolerance, atol=tolerance, equal_nan=True):
            cause = "(another prior, activation or noise)"
            differences.append(f"the log joint of a stored draw was {before:.6g}, is {after:.6g} {cause}")
    got = f"another one: {'; '.join(differences)}"
    ModelError.check(not differences, "model", f"the model that was saved, {name}", got, expected)
