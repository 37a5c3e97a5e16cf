"""The record of a fit, which a posterior keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class FitInfo:
    """Record of a fit.

    Parameters
    ----------
    method, ppl : str
        Names of the method and of the system.
    seed : int
        Seed of the fit.
    dtype, device : str
        Floating-point type and device of the fit.
    compile_seconds, run_seconds : float
        Wall time of compilation, and of the rest.
    gradient_evaluations : float, optional
        Number of gradient evaluations of the log joint over all rows (a mini-batch counts as its share). None if the
        system does not report it.
    history : dict of str to ndarray
        Arrays (steps,), such as losses.
    settings : dict
        Settings of the method.
    versions : dict of str to str
        Versions of the libraries.
    data_hash : str
        Hash of the training data.
    warnings : tuple of str
        Warnings of the fit.
    figures : dict of str to float
        Summary numbers of the fit.
    target : str
        What was fitted if it is not the posterior of the model (a tempered one, an approximate objective), else "".
        `bnn.diagnose` computes p / q and k-hat for the posterior itself in either case.
    """

    method: str
    ppl: str
    seed: int
    dtype: str
    device: str
    compile_seconds: float
    run_seconds: float
    gradient_evaluations: float | None
    history: dict[str, np.ndarray] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    data_hash: str = ""
    warnings: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    target: str = ""
