"""The errors that this library raises.

Each message states, in this order, what was expected, what was given and what to try. Every error derives from
`BNNError`, and from the built-in class that a caller would otherwise expect.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self

__all__ = [
    "BNNError", "BudgetError", "ClusterError", "CurvatureError", "DamagedError", "DeviceError",
    "DivergenceError", "InputError", "Interrupted", "MissingFrameworkError", "ModelError", "UnknownNameError",
    "UnsupportedError",
]  # fmt: skip


def message(expected: str, got: str, advice: str) -> str:
    """The text of an error message: what was expected, what was given, what to try."""
    return f"expected {expected}; got {got}; try {advice}"


class BNNError(Exception):
    """Base class of all errors raised on purpose by ppl_bnn.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> try:
    ...     bnn.SVI(step=100)
    ... except bnn.errors.BNNError as error:
    ...     print(type(error).__name__)
    UnknownNameError
    """

    @classmethod
    def of(cls, where: str, expected: str, got: str, advice: str) -> Self:
        """An error with the text of `message`; `where` is the argument, site or file that is wrong, or empty."""
        return cls((f"{where}: " if where else "") + message(expected, got, advice))

    @classmethod
    def check(cls, good: object, where: str, expected: str, got: object, advice: str) -> None:
        """Raise the error of `of` unless `good` is true."""
        if not good:
            raise cls.of(where, expected, str(got), advice)


class Interrupted[Result](KeyboardInterrupt):
    """Ctrl-C during a long computation.

    Parameters
    ----------
    text : str
        The message.
    partial : object
        The result of what had finished.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> error = bnn.errors.Interrupted("interrupted; 1 of 2 methods finished", partial=["map"])
    >>> error.partial
    ['map']
    """

    def __init__(self, text: str, partial: Result):
        super().__init__(text)
        self.partial = partial


class InputError(BNNError, ValueError):
    """Data or an argument that cannot be used.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.SVI(steps=0)
    Traceback (most recent call last):
        ...
    ppl_bnn.core.errors.InputError: SVI steps: expected a whole number of at least 1; got 0; try steps=10000
    """


class DamagedError(InputError):
    """A stored file that has changed since it was written: another checksum, a missing part, or other content.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> issubclass(bnn.errors.DamagedError, bnn.errors.InputError)
    True
    """


class UnknownNameError(BNNError, LookupError, ValueError):
    """A model, data set, method or argument that does not exist.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.zoo.load("linear_regresion")
    Traceback (most recent call last):
        ...
    ppl_bnn.core.errors.UnknownNameError: unknown model 'linear_regresion': did you mean 'linear_regression'? ...
    """


class ModelError(BNNError, ValueError):
    """A program that is not a model: no `observe`, two sites with one name, a shape that does not fit.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> model = lambda x, y=None: bnn.observe(y, bnn.mlp(x, [2]), bnn.likelihoods.Bernoulli())
    >>> bnn.zoo.sketch(model, 10)
    Traceback (most recent call last):
        ...
    ppl_bnn.core.errors.ModelError: Bernoulli: expected one network output; got f of shape (1, 2); try ...
    """


class UnsupportedError(BNNError, NotImplementedError):
    """A combination of model, method and system that is not defined, with the reason.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.SVI(compile=True)
    Traceback (most recent call last):
        ...
    ppl_bnn.core.errors.UnsupportedError: SVI: expected compile=True with ppl='pyro' ...
    """


class CurvatureError(BNNError, ArithmeticError):
    """A curvature that gives no Gaussian: singular, indefinite or not finite.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> issubclass(bnn.errors.CurvatureError, ArithmeticError)
    True
    """


class DivergenceError(BNNError, ArithmeticError):
    """An optimisation or a chain whose values are no longer finite.

    `last` has the last finite values (constrained, by site), if the method keeps them.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> error = bnn.errors.DivergenceError("the loss became infinite")
    >>> isinstance(error, ArithmeticError), error.last
    (True, None)
    """

    last: Mapping[str, Any] | None = None


class BudgetError(BNNError, TimeoutError):
    """The time limit was reached before there was any result.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> issubclass(bnn.errors.BudgetError, TimeoutError)
    True
    """


class DeviceError(BNNError, RuntimeError):
    """A device that is not available.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> issubclass(bnn.errors.DeviceError, RuntimeError)
    True
    """


class ClusterError(BNNError, ConnectionError):
    """A cluster that ended while it computed. Results that were returned before are not affected.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> issubclass(bnn.errors.ClusterError, ConnectionError)
    True
    """


class MissingFrameworkError(BNNError, ImportError):
    """A system (NumPyro with JAX, or Pyro with torch) that cannot be imported.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> issubclass(bnn.errors.MissingFrameworkError, ImportError)
    True
    """


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """An `UnknownNameError` for a name of some kind, which suggests the nearest of the known ones."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UnknownNameError(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}")


def check_known(kind: str, names: Iterable[Any], known: Collection[str]) -> None:
    """Raise the error of `unknown_name` for the first of the names that is not among the known ones."""
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)
