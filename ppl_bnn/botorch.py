"""A posterior as a model of BoTorch, for Bayesian optimisation. It needs the extra `botorch`.

A Bayesian neural network, fitted by any method, takes the place of a Gaussian process. The functions that it draws are
fixed, so that predictions at several points are joint and an optimiser of an acquisition function sees one surface.
"""

from __future__ import annotations

from typing import Any

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.posterior.posterior import Posterior

__all__ = ["BNNModel"]

try:
    # Of what BoTorch itself imports.
    with ignored("`torch.jit", FutureWarning, everywhere=True):
        from botorch.models.ensemble import EnsembleModel
except ImportError as error:
    got, advice = f"{type(error).__name__}: {error}", "pip install 'ppl-bnn[botorch]'"
    raise UnsupportedError.of("BNNModel", "the package botorch", got, advice) from error


class BNNModel(EnsembleModel):
    """A fitted posterior as a model of BoTorch.

    Its posterior at q points is that of `draws` functions, an `EnsemblePosterior`: joint over the points, and
    differentiable in them. Any method may have fitted it, in either system.

    Parameters
    ----------
    posterior : Posterior
        A posterior of a regression with one array as inputs. For the maximisers of BoTorch its targets are what is to
        be large.
    draws : int, default 128
        Number S of functions.
    seed : int, default 0
        Seed of the functions.
    kind : str, optional
        "sampled", through the network, or "linearised"; that of `Posterior.predict` by default.

    Attributes
    ----------
    functions : FunctionDraws
        The functions, for Thompson sampling: each is a draw of the function that is to be optimised.

    Raises
    ------
    UnsupportedError
        The posterior has no functions of this kind (see `Posterior.function_draws`).

    Notes
    -----
    New rows need a new fit: there is no `condition_on_observations` and no `fantasize`. Observation noise is not part
    of the posterior, as in every `EnsembleModel`.

    References
    ----------
    Balandat, Karrer, Jiang, Daulton, Letham, Wilson and Bakshy 2020, BoTorch: a framework for efficient Monte-Carlo
    Bayesian optimization. Li, Rudner and Wilson 2024, A study of Bayesian neural network surrogates for Bayesian
    optimization.

    Examples
    --------
    >>> import torch
    >>> import ppl_bnn as bnn
    >>> from ppl_bnn.botorch import BNNModel
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.Laplace(), standardise=True)
    >>> surrogate = BNNModel(posterior, draws=50)
    >>> surrogate.posterior(torch.tensor(table.x[:3])).mean.shape
    torch.Size([3, 1])
    """

    def __init__(
        self, posterior: Posterior, draws: int = 128, *, seed: int = 0, kind: str | None = None
    ) -> None:
        import torch

        super().__init__()
        self.functions = posterior.function_draws(draws, seed=seed, kind=kind)
        shape = getattr(posterior.inputs, "shape", (1, 1))
        # What has no functions of tensors is refused here, and not by the first acquisition function.
        found = self.functions(torch.zeros(1, *shape[1:], dtype=torch.float64))
        self._num_outputs = found.shape[-1] if found.ndim > 2 else 1

    def forward(self, X: Any) -> Any:
        """The functions at X, (batch, q, F): values (batch, S, q, K).

        Parameters
        ----------
        X : Tensor
            Inputs in the units of the data, of shape (batch, q, F) with any number of batch dimensions.

        Returns
        -------
        Tensor
            Shape (batch, S, q, K).
        """
        values = self.functions(X)
        values = values if self.num_outputs > 1 else values.unsqueeze(-1)
        return values.movedim(0, -3)
