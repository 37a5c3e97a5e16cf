"""Bayesian neural networks as generative programs, fitted by interchangeable inference, compared in one table.

This file is the table of contents: the methods of the registry, and the imports under `TYPE_CHECKING`. Type checkers
read these, and at run time `__getattr__` loads a name when it is first used. So importing the package loads neither
torch nor JAX, and a broken or missing framework breaks its own half only.

The sizes in the examples of this reference are small, because tests run all of them. Without arguments each method
takes sizes that are meant for use.
"""

from __future__ import annotations

import ast
import importlib
from typing import TYPE_CHECKING, Any, cast

from ppl_bnn.inference.registry import MODULES

if TYPE_CHECKING:
    from ppl_bnn import references, zoo
    from ppl_bnn.backends.numpyro import as_numpyro, enable_compilation_cache
    from ppl_bnn.backends.pyro import as_pyro
    from ppl_bnn.core import errors
    from ppl_bnn.core.progress import Step
    from ppl_bnn.datasets import tables as data
    from ppl_bnn.diagnostics.diagnose import diagnose
    from ppl_bnn.diagnostics.feature_density import feature_density
    from ppl_bnn.diagnostics.prior_check import check_prior
    from ppl_bnn.diagnostics.prior_draws import prior_predictive
    from ppl_bnn.diagnostics.sbc import simulation_based_calibration
    from ppl_bnn.evaluation.advice import advise
    from ppl_bnn.evaluation.comparison.comparison import Comparison
    from ppl_bnn.evaluation.comparison.run import compare
    from ppl_bnn.evaluation.grid.grid import Grid
    from ppl_bnn.evaluation.grid.result import GridResult
    from ppl_bnn.evaluation.outside.outside import Outside
    from ppl_bnn.inference.ensembles.ensemble import Ensemble
    from ppl_bnn.inference.ensembles.stacked import Stacked
    from ppl_bnn.inference.laplace.laplace import Laplace
    from ppl_bnn.inference.mcmc.chees import ChEES
    from ppl_bnn.inference.mcmc.hmc import HMC
    from ppl_bnn.inference.mcmc.laps import LAPS
    from ppl_bnn.inference.mcmc.mclmc import MCLMC
    from ppl_bnn.inference.mcmc.meads import MEADS
    from ppl_bnn.inference.mcmc.nuts import NUTS
    from ppl_bnn.inference.mcmc.sghmc import SGHMC
    from ppl_bnn.inference.mcmc.sgld import SGLD
    from ppl_bnn.inference.mcmc.smc import SMC
    from ppl_bnn.inference.method import Method
    from ppl_bnn.inference.optimisation.map import MAP
    from ppl_bnn.inference.optimisation.swag import SWAG
    from ppl_bnn.inference.sampling.sampler import extend
    from ppl_bnn.inference.variational import guides
    from ppl_bnn.inference.variational.ivon import IVON
    from ppl_bnn.inference.variational.mc_dropout import MCDropout
    from ppl_bnn.inference.variational.pathfinder import Pathfinder
    from ppl_bnn.inference.variational.svgd import SVGD
    from ppl_bnn.inference.variational.svi import SVI
    from ppl_bnn.language import distributions as dist
    from ppl_bnn.language import likelihoods, ops, priors
    from ppl_bnn.language.handlers import network_function
    from ppl_bnn.language.layers.attention import attention, transformer_block
    from ppl_bnn.language.layers.basic import (
        conv1d,
        conv2d,
        dense,
        embedding,
        filter_response_norm,
        layer_norm,
        learned_positions,
        random_features,
        residual,
        residual_block,
    )
    from ppl_bnn.language.layers.graph import graph_conv
    from ppl_bnn.language.layers.networks import cnn, lstm_classifier, mlp, resnet, transformer
    from ppl_bnn.language.layers.recurrent import gru, lstm
    from ppl_bnn.language.modules.module import module
    from ppl_bnn.language.primitives import conv, coupled, deterministic, linear, observe, param, rows, sample
    from ppl_bnn.language.transforms import noncentred, student_of, with_prior
    from ppl_bnn.posterior.function_draws import FunctionDraws
    from ppl_bnn.posterior.loading import load
    from ppl_bnn.posterior.posterior import Posterior
    from ppl_bnn.posterior.stacking import stack
    from ppl_bnn.prediction import scores
    from ppl_bnn.prediction.conformal import conformal, cross_conformal
    from ppl_bnn.prediction.prediction import Prediction
    from ppl_bnn.prediction.recalibration import recalibrate
    from ppl_bnn.reporting import plot
    from ppl_bnn.reporting.page import report

__version__ = "0.1.0"


def _contents() -> dict[str, tuple[str, str]]:
    """Public name -> (module or package, name there), from the imports of this file for type checkers."""
    # By the loader, so that a package in a zip file has them too.
    tree = ast.parse(cast(Any, __spec__).loader.get_source(__name__))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module]
    return {
        each.asname or each.name: (str(node.module), each.name) for node in imports for each in node.names
    }


_CONTENTS = {name: (module, name) for name, module in MODULES.items()} | _contents()
__all__ = ["fit", *_CONTENTS]


def fit(
    model: Any,
    x: Any,
    y: Any,
    method: Method | None = None,
    *,
    seed: int = 0,
    device: str = "auto",
    progress: Any = None,
    callback: Any = None,
    observed: str | None = None,
    standardise: bool = False,
) -> Posterior:
    """Fit a model to data by a method.

    Parameters
    ----------
    model : callable
        A function `(x, y=None)` in the language, or a NumPyro or Pyro model.
    x : array or dict of arrays
        Inputs; the first axis is the N rows.
    y : array
        Targets, (N,) or (N, K).
    method : Method, optional
        `SVI()` by default.
    seed : int
        The same seed on the same machine gives the same bits.
    device : str
        "auto", "cpu", "cuda" or "cuda:1".
    progress : bool or Progress, optional
        Whether, and to whom, progress is reported.
    callback : callable, optional
        Called with a `Step` at each report of progress; returning True ends that part of the fit (see `Method.fit`).
    observed : str, optional
        The observed site of a NumPyro or Pyro model that has several.
    standardise : bool
        Fit in standardised units. Predictions and scores are in the units of the data.

    Returns
    -------
    Posterior
        It predicts, draws, exports and saves itself.

    Raises
    ------
    BNNError
        One of `bnn.errors`; `Method.fit` lists them.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> model = bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.MAP(), standardise=True)
    >>> posterior.predict(table.x).mean.shape
    (442,)
    """
    from ppl_bnn.core.errors import InputError
    from ppl_bnn.inference.method import Method

    if method is None:
        from ppl_bnn.inference.variational.svi import SVI

        method = SVI()
    if isinstance(method, type) and issubclass(method, Method):
        got, advice = f"the class {method.__name__}", f"bnn.{method.__name__}()"
        raise InputError.of("", "an instance of a method", got, advice)
    if not isinstance(method, Method):
        raise InputError.of("", "a method", repr(method), "bnn.NUTS(), bnn.SVI(), bnn.Laplace() or bnn.MAP()")
    given = {"seed": seed, "device": device, "progress": progress, "callback": callback}
    return method.fit(model, x, y, observed=observed, standardise=standardise, **given)


def __getattr__(name: str) -> Any:
    if name not in _CONTENTS:
        raise AttributeError(f"module 'ppl_bnn' has no attribute {name!r}")
    home, own = _CONTENTS[name]
    module = importlib.import_module(home)
    # What is imported from a package is a module.
    value = importlib.import_module(f"{home}.{own}") if hasattr(module, "__path__") else getattr(module, own)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
