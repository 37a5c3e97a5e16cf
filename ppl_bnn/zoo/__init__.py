"""The zoo: finds the models in a checkout or in the installed package.

One file is one model. A checkout has them in the folder `models`, the wheel in `ppl_bnn/_zoo`. That folder is the
`__path__` of this module, so a file is imported as `ppl_bnn.zoo.<name>` from any working folder and in worker
processes. `MODELS_FOLDER` is the folder, `Model` the type of a function `(x, y=None)`, and `MOST_NUMBERS` the largest
number of unknowns that `sketch` accepts.

Cards are read from the syntax tree of a file: listing the zoo does not run any model.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ppl_bnn.core.errors import check_known
from ppl_bnn.zoo.files import Card, Model, bind, from_file, read_card, shipped
from ppl_bnn.zoo.sketches import MOST_NUMBERS, SiteSketch, Sketch, TooLargeError, sketch

__all__ = [
    "MODELS_FOLDER", "MOST_NUMBERS", "Card", "Model", "SiteSketch", "Sketch", "TooLargeError", "bind", "from_file",
    "load", "models", "names", "read_card", "sketch",
]  # fmt: skip


# Each file of the folder is a module `ppl_bnn.zoo.<name>`, so that other processes find a model by its name.
MODELS_FOLDER = shipped(Path(__file__), "_zoo", "models")
__path__ = [*__path__, str(MODELS_FOLDER)]


def names() -> list[str]:
    """The names of all models of the zoo. No file is read.

    Returns
    -------
    list of str
        The names, sorted.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> "linear_regression" in bnn.zoo.names()
    True
    """
    return sorted(file.stem for file in MODELS_FOLDER.glob("[a-z]*.py"))


def models() -> dict[str, Card]:
    """The cards of all models of the zoo, by name.

    Returns
    -------
    dict of str to Card
        Name -> card.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.zoo.models()["linear_regression"].summary
    'Bayesian linear regression: a network without a hidden layer.'
    """
    return {name: read_card(MODELS_FOLDER / f"{name}.py") for name in names()}


def load(name: str, **keywords: Any) -> Model:
    """Load a model of the zoo, with its keyword-only parameters set: `load("regression_mlp", width=50)`.

    Parameters
    ----------
    name : str
        Name of the model.
    **keywords
        Values of keyword-only parameters of the model.

    Returns
    -------
    Model
        A function `(x, y=None)`.

    Raises
    ------
    UnknownNameError
        A model or an argument that does not exist; the message names the nearest one that does.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> model = bnn.zoo.load("regression_mlp", width=5)
    >>> bnn.zoo.sketch(model, 10).parameters
    62
    """
    check_known("model", [name], names())
    return bind(importlib.import_module(f"{__name__}.{name}").model, name, **keywords)
