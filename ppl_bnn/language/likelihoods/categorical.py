"""Likelihoods of two classes, of several classes, and of ordered classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.activation_moments import quadrature
from ppl_bnn.language.likelihoods.base import Likelihood

# Nodes of the expectation of softplus over a normal.
NODES = 33


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Two classes, P(y = 1) = sigmoid(f).

    f has the shape (N, 1), y the shape (N,) with values 0 and 1. eta = f, with Fisher information p (1 - p).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Bernoulli())
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('Bernoulli()', 'classification')
    """

    task = "classification"
    outputs = (lambda k: k == 1, "one network output", "likelihoods.Categorical() for several classes")

    def distribution(self, f: Any) -> dist.Distribution:
        return dist.distribution("Bernoulli", f[:, 0])

    def fisher_root(self, eta: Any) -> Any:
        # sigmoid(-eta) is accurate where 1 - p is rounded to zero.
        return ops.diagonal_matrix(ops.sqrt(ops.sigmoid(eta) * ops.sigmoid(-eta)))

    def score(self, eta: Any, y: Any) -> Any:
        return y[:, None] - ops.sigmoid(eta)

    def jensen_gap(self, mean: Any, variance: Any) -> Any:
        # The root of the variance keeps its derivative where that is zero.
        expected = quadrature(ops.softplus, mean, variance + 1e-30, NODES)[0]
        return ops.sum(ops.softplus(mean) - expected)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        return "Bernoulli", {"probs": ops.sigmoid(eta[..., 0])}


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Several classes, P(y = k) = softmax(f)_k.

    f has the shape (N, C), y the shape (N,) with labels 0..C-1. eta = f, with Fisher information diag(p) - p p'.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [3]), bnn.likelihoods.Categorical())
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('Categorical()', 'classification')
    """

    task = "classification"
    outputs = (lambda k: k >= 2, "at least two network outputs", "likelihoods.Bernoulli()")

    def distribution(self, f: Any) -> dist.Distribution:
        return dist.distribution("Categorical", f)

    def fisher_root(self, eta: Any) -> Any:
        # Column c is sqrt(p_c) (e_c - p): the scores of all classes, each weighted with its probability.
        p = ops.softmax(eta)
        root = ops.sqrt(p)
        return ops.diagonal_matrix(root) - p[..., :, None] * root[..., None, :]

    def fisher_parts(self, eta: Any) -> tuple[Any, Any, float]:
        p = ops.softmax(eta)
        return p, p[..., None], -1.0

    def score(self, eta: Any, y: Any) -> Any:
        return ops.one_hot(y, int(eta.shape[-1]), like=eta) - ops.softmax(eta)

    def jensen_gap(self, mean: Any, variance: Any) -> Any:
        # A bound: E log sum_k exp f_k <= log sum_k E exp f_k.
        return ops.sum(ops.logsumexp(mean) - ops.logsumexp(mean + 0.5 * variance))

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        return "Categorical", {"probs": ops.softmax(eta)}


@dataclass(frozen=True)
class Ordinal(Likelihood):
    """Ordered classes by cumulative logits, P(y <= k) = sigmoid(c_k - f), k = 0..C-2 (McCullagh 1980).

    f has the shape (N, 1), y the shape (N,) with labels 0..C-1 in their order. No other parameter should shift f by a
    constant, because the cut points do.

    eta = (f, c_0, log(c_1 - c_0), ..., log(c_(C-2) - c_(C-3))), D = C. Every eta in R^C gives ordered cut points, since
    a linearised predictor may take any value. With p_k the probabilities, the Fisher information is
    sum_k p_k (grad log p_k) (grad log p_k)'. A prediction has the family `Categorical`.

    Parameters
    ----------
    cut_points : array (C - 1,)
        The cut points c: increasing numbers (known), or sampled ones, as from `priors.CutPoints`.
    classes : int, optional
        C; it follows from the cut points.

    Raises
    ------
    InputError
        Cut points that are not finite and increasing, or another number of classes.

    References
    ----------
    McCullagh (1980), Regression models for ordinal data.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Ordinal((-1.0, 0.0, 1.0)))
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('Ordinal(..., 4)', 'classification')
    """

    cut_points: Any
    classes: int | None = None
    task = "classification"
    arrays = ("cut_points",)
    outputs = (lambda k: k == 1, "one network output", "likelihoods.Categorical() for classes without order")

    def __post_init__(self) -> None:
        if self.cut_points is None:
            return
        if isinstance(self.cut_points, list | tuple):
            object.__setattr__(self, "cut_points", np.asarray(self.cut_points, dtype=float))
        cuts = self.cut_points
        shape = tuple(np.shape(cuts))
        where = "likelihoods.Ordinal"
        good, expected = len(shape) == 1 and shape[0] > 0, "cut points of shape (C - 1,)"
        InputError.check(good, where, expected, f"shape {shape}", "priors.CutPoints()('cuts', C)")
        if isinstance(cuts, np.ndarray) and not (np.isfinite(cuts).all() and (np.diff(cuts) > 0).all()):
            raise InputError.of(where, "finite cut points that increase", str(cuts.tolist()), "sorting them")
        count = shape[0] + 1
        good, expected = self.classes in (None, count), f"{count} classes for {shape[0]} cut points"
        InputError.check(good, where, expected, repr(self.classes), "leaving it out")
        object.__setattr__(self, "classes", count)

    def distribution(self, f: Any) -> dist.Distribution:
        return dist.distribution("Categorical", self._log_probabilities(self.predictor(f)))

    def predictor(self, f: Any) -> Any:
        cuts = ops.asarray(self.cut_points, like=f)
        ordered = ops.concatenate([cuts[:1], ops.log(cuts[1:] - cuts[:-1])])
        return ops.concatenate([f, ops.broadcast_to(ordered, (f.shape[0], int(cuts.shape[0])))])

    @staticmethod
    def _parts(eta: Any) -> tuple[Any, Any]:
        """(c - f, the gaps between cut points), (..., C - 1) and (..., C - 2)."""
        gaps = ops.exp(eta[..., 2:])
        return ops.cumsum(ops.concatenate([eta[..., 1:2] - eta[..., :1], gaps])), gaps

    def _log_probabilities(self, eta: Any) -> Any:
        """(..., C). sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)), which avoids cancellation."""
        above, gaps = self._parts(eta)
        lower, upper = above[..., :-1], above[..., 1:]
        middle = ops.log(dist.one_minus_exp(gaps)) - ops.softplus(-upper) - ops.softplus(lower)
        return ops.concatenate([-ops.softplus(-above[..., :1]), middle, -ops.softplus(above[..., -1:])])

    def _scores(self, eta: Any) -> Any:
        """(N, D, C): the gradients of log p_k in eta, for each class."""
        above, gaps = self._parts(eta)
        gap = dist.one_minus_exp(gaps)
        at, beyond = ops.softplus(-above), ops.softplus(above)
        # d log p_k / d c_k for k = 0..C-2, and d log p_(k+1) / d c_k.
        up = ops.concatenate([ops.exp(-beyond[:, :1]), ops.exp(beyond[:, :-1] - beyond[:, 1:]) / gap])
        down = ops.concatenate([ops.exp(at[:, 1:] - at[:, :-1]) / gap, ops.exp(-at[:, -1:])])
        none = ops.zeros_like(above)[:, :, None]
        up, down = ops.diagonal_matrix(up), ops.diagonal_matrix(down)
        cuts = ops.concatenate([up, none]) - ops.concatenate([none, down])
        # A gap shifts all cut points above it.
        later = ops.asarray(np.triu(np.ones((above.shape[-1],) * 2)), like=eta)
        unit = ops.concatenate([ops.ones_like(above[:, :1]), gaps])
        cuts = unit[:, :, None] * ops.einsum("jk,nkc->njc", later, cuts)
        p, end = ops.sigmoid(above), ops.ones_like(above)[:, :1]
        f = ops.concatenate([p, end]) + ops.concatenate([0.0 * end, p]) - 1.0
        return ops.concatenate([f[:, None, :], cuts], -2)

    def fisher_root(self, eta: Any) -> Any:
        return self._scores(eta) * ops.exp(0.5 * self._log_probabilities(eta))[:, None, :]

    def score(self, eta: Any, y: Any) -> Any:
        observed = ops.one_hot(y, int(eta.shape[-1]), like=eta)
        return ops.einsum("ndc,nc->nd", self._scores(eta), observed)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        return "Categorical", {"probs": ops.exp(self._log_probabilities(eta))}
