"""Bayesian neural networks as generative programs, fitted by interchangeable inference, compared in one table.

This file is the table of contents. Names are loaded when they are first used, so that importing the package
loads neither torch nor JAX, and a broken or missing framework breaks its own half only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_CONTENTS: dict[str, str] = {
    # the language
    "sample": "ppl_bnn.language.primitives",
    "deterministic": "ppl_bnn.language.primitives",
    "param": "ppl_bnn.language.primitives",
    "observe": "ppl_bnn.language.primitives",
    "rows": "ppl_bnn.language.primitives",
    "coupled": "ppl_bnn.language.primitives",
    "linear": "ppl_bnn.language.primitives",
    "dense": "ppl_bnn.language.layers",
    "conv": "ppl_bnn.language.primitives",
    "conv1d": "ppl_bnn.language.layers",
    "conv2d": "ppl_bnn.language.layers",
    "layer_norm": "ppl_bnn.language.layers",
    "filter_response_norm": "ppl_bnn.language.layers",
    "residual": "ppl_bnn.language.layers",
    "residual_block": "ppl_bnn.language.layers",
    "embedding": "ppl_bnn.language.layers",
    "learned_positions": "ppl_bnn.language.layers",
    "attention": "ppl_bnn.language.attention",
    "transformer_block": "ppl_bnn.language.attention",
    "gru": "ppl_bnn.language.recurrent",
    "lstm": "ppl_bnn.language.recurrent",
    "graph_conv": "ppl_bnn.language.graph",
    "module": "ppl_bnn.language.modules",
    "noncentred": "ppl_bnn.language.transforms",
    "with_prior": "ppl_bnn.language.transforms",
    "mlp": "ppl_bnn.language.networks",
    "cnn": "ppl_bnn.language.networks",
    "resnet": "ppl_bnn.language.networks",
    "lstm_classifier": "ppl_bnn.language.networks",
    "transformer": "ppl_bnn.language.networks",
    "network_function": "ppl_bnn.language.handlers",
    "as_numpyro": "ppl_bnn.ppl.numpyro",
    "as_pyro": "ppl_bnn.ppl.pyro",
    # the methods
    "Method": "ppl_bnn.inference.method",
    "MAP": "ppl_bnn.inference.map",
    "SVI": "ppl_bnn.inference.svi",
    "Laplace": "ppl_bnn.inference.laplace",
    "NUTS": "ppl_bnn.inference.nuts",
    "HMC": "ppl_bnn.inference.hmc",
    "ChEES": "ppl_bnn.inference.chees",
    "MEADS": "ppl_bnn.inference.meads",
    "MCLMC": "ppl_bnn.inference.mclmc",
    "SGLD": "ppl_bnn.inference.sgld",
    "SGHMC": "ppl_bnn.inference.sghmc",
    "Pathfinder": "ppl_bnn.inference.pathfinder",
    "SMC": "ppl_bnn.inference.smc",
    "SVGD": "ppl_bnn.inference.svgd",
    "IVON": "ppl_bnn.inference.ivon",
    "MCDropout": "ppl_bnn.inference.mc_dropout",
    "Ensemble": "ppl_bnn.inference.ensemble",
    "SWAG": "ppl_bnn.inference.swag",
    "Stacked": "ppl_bnn.inference.stacked",
    # what comes of them
    "Posterior": "ppl_bnn.posterior",
    "Prediction": "ppl_bnn.predictive",
    "load": "ppl_bnn.storage",
    "stack": "ppl_bnn.stacking",
    "extend": "ppl_bnn.inference.sampler",
    "diagnose": "ppl_bnn.diagnostics.diagnose",
    "simulation_based_calibration": "ppl_bnn.diagnostics.calibration",
    "check_prior": "ppl_bnn.before_data",
    "prior_predictive": "ppl_bnn.before_data",
    "compare": "ppl_bnn.comparison",
    "Comparison": "ppl_bnn.comparison",
    "report": "ppl_bnn.reporting.page",
    "Grid": "ppl_bnn.grid",
    "GridResult": "ppl_bnn.grid_result",
    "advise": "ppl_bnn.advice",
    "recalibrate": "ppl_bnn.recalibration",
    "conformal": "ppl_bnn.conformal_prediction",
    "enable_compilation_cache": "ppl_bnn.ppl.numpyro",
}
_MODULES: dict[str, str] = {
    "dist": "ppl_bnn.language.distributions",
    "ops": "ppl_bnn.language.ops",
    "priors": "ppl_bnn.language.priors",
    "likelihoods": "ppl_bnn.language.likelihoods",
    "guides": "ppl_bnn.inference.guides",
    "errors": "ppl_bnn.errors",
    "data": "ppl_bnn.data",
    "scores": "ppl_bnn.scores",
    "zoo": "ppl_bnn.zoo",
}
__all__ = ["fit", *_CONTENTS, *_MODULES]


def fit(
    model: Any,
    x: Any,
    y: Any,
    method: Any = None,
    *,
    seed: int = 0,
    device: str = "auto",
    progress: Any = None,
    observed: str | None = None,
    standardise: bool = False,
) -> Any:
    """Fit a model to data by a method: `bnn.fit(model, x, y, bnn.NUTS(), seed=0)`.

    `method` defaults to `SVI()`. See `Method.fit` for the arguments and errors.
    """
    from ppl_bnn.errors import InputError, message
    from ppl_bnn.inference.method import Method

    if method is None:
        from ppl_bnn.inference.svi import SVI

        method = SVI()
    if isinstance(method, type) and issubclass(method, Method):
        raise InputError(
            message("an instance of a method", f"the class {method.__name__}", f"bnn.{method.__name__}()")
        )
    if not isinstance(method, Method):
        raise InputError(
            message("a method", repr(method), "bnn.NUTS(), bnn.SVI(), bnn.Laplace() or bnn.MAP()")
        )
    return method.fit(
        model, x, y, seed=seed, device=device, progress=progress, observed=observed, standardise=standardise
    )


def __getattr__(name: str) -> Any:
    if name in _CONTENTS:
        value = getattr(importlib.import_module(_CONTENTS[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'ppl_bnn' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if TYPE_CHECKING:
    from ppl_bnn import data, errors, scores, zoo
    from ppl_bnn.advice import advise
    from ppl_bnn.before_data import check_prior, prior_predictive
    from ppl_bnn.comparison import Comparison, compare
    from ppl_bnn.conformal_prediction import conformal
    from ppl_bnn.diagnostics.calibration import simulation_based_calibration
    from ppl_bnn.diagnostics.diagnose import diagnose
    from ppl_bnn.grid import Grid
    from ppl_bnn.grid_result import GridResult
    from ppl_bnn.inference import guides
    from ppl_bnn.inference.chees import ChEES
    from ppl_bnn.inference.ensemble import Ensemble
    from ppl_bnn.inference.hmc import HMC
    from ppl_bnn.inference.ivon import IVON
    from ppl_bnn.inference.laplace import Laplace
    from ppl_bnn.inference.map import MAP
    from ppl_bnn.inference.mc_dropout import MCDropout
    from ppl_bnn.inference.mclmc import MCLMC
    from ppl_bnn.inference.meads import MEADS
    from ppl_bnn.inference.method import Method
    from ppl_bnn.inference.nuts import NUTS
    from ppl_bnn.inference.pathfinder import Pathfinder
    from ppl_bnn.inference.sampler import extend
    from ppl_bnn.inference.sghmc import SGHMC
    from ppl_bnn.inference.sgld import SGLD
    from ppl_bnn.inference.smc import SMC
    from ppl_bnn.inference.stacked import Stacked
    from ppl_bnn.inference.svgd import SVGD
    from ppl_bnn.inference.svi import SVI
    from ppl_bnn.inference.swag import SWAG
    from ppl_bnn.language import distributions as dist
    from ppl_bnn.language import likelihoods, ops, priors
    from ppl_bnn.language.attention import attention, transformer_block
    from ppl_bnn.language.graph import graph_conv
    from ppl_bnn.language.handlers import network_function
    from ppl_bnn.language.layers import (
        conv1d,
        conv2d,
        dense,
        embedding,
        filter_response_norm,
        layer_norm,
        learned_positions,
        residual,
        residual_block,
    )
    from ppl_bnn.language.modules import module
    from ppl_bnn.language.networks import cnn, lstm_classifier, mlp, resnet, transformer
    from ppl_bnn.language.primitives import conv, coupled, deterministic, linear, observe, param, rows, sample
    from ppl_bnn.language.recurrent import gru, lstm
    from ppl_bnn.language.transforms import noncentred, with_prior
    from ppl_bnn.posterior import Posterior
    from ppl_bnn.ppl.numpyro import as_numpyro, enable_compilation_cache
    from ppl_bnn.ppl.pyro import as_pyro
    from ppl_bnn.predictive import Prediction
    from ppl_bnn.recalibration import recalibrate
    from ppl_bnn.reporting.page import report
    from ppl_bnn.stacking import stack
    from ppl_bnn.storage import load
