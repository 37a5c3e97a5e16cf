"""Code shared by both systems: interpretation of the language, and distributions.

A specification becomes the system's distribution of the same name. `CholeskyFactor` and `KroneckerFactor` are the
mathematics of the normal distributions of arrays that neither system has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ppl_bnn.backends.native import Model
from ppl_bnn.backends.protocol import Function
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import Distribution, check_no_nested
from ppl_bnn.language.primitives import Interpretation, Message


class SystemInterpretation(Interpretation):
    """Every primitive of the language as a primitive of a system; a subclass has those of its system.

    The likelihood is scaled to `population` rows; with `record`, f is a deterministic site.
    """

    # The module of the system with `sample`, `deterministic` and `param`; its scale handler and its plate.
    primitives: Any
    scale: Any
    plate: Any
    # A distribution whose log density is multiplied by a weight for each row.
    weighted: Any

    def __init__(self, population: int | None, record: bool):
        super().__init__()
        self.population = population
        self.record = record

    def resolve(self, specification: Distribution) -> Any:
        """The system's distribution of a specification."""
        raise NotImplementedError

    def start(self, init: Any) -> Any:
        """The start of a parameter."""
        return init

    def process(self, msg: Message) -> None:
        super().process(msg)
        given = msg.arguments
        match msg.kind:
            case "sample":
                chosen = self.resolve(given["distribution"])
                msg.answer(self.primitives.sample(msg.name, chosen, obs=given["obs"]))
            case "deterministic":
                msg.answer(self.primitives.deterministic(msg.name, given["value"]))
            case "param":
                init = given["init"]
                drawn = isinstance(init, Distribution)
                init = self.resolve(init).sample if drawn else self.start(init)
                msg.answer(self.primitives.param(msg.name, init))
            case "rows":
                msg.answer(self._rows("rows", given["n"]))
            case "observe":
                f = given["f"]
                if self.record:
                    self.record_output(f)
                with self._rows("observations", f.shape[0]):
                    chosen = self.resolve(given["likelihood"].distribution(f))
                    if given["weight"] is not None:
                        chosen = self.weighted(chosen, given["weight"])
                    msg.answer(self.primitives.sample("y", chosen, obs=given["y"]))

    def record_output(self, f: Any) -> None:
        self.primitives.deterministic("f", f)

    @contextmanager
    def _rows(self, name: str, count: int) -> Iterator[None]:
        scaled: AbstractContextManager[Any] = nullcontext()
        if self.population is not None and self.population != count:
            # In NumPyro, a plate with subsample_size refuses to run under HMC; the scale handler does not.
            scaled = self.scale(scale=self.population / count)
        with scaled, self.plate(name, count):
            yield


def interpreted(model: Model, interpretation: Callable[[], Interpretation]) -> Model:
    """A model in the language as a callable `(x, y=None)` of a system."""

    @functools.wraps(getattr(model, "func", model))
    def native(x: Any, y: Any = None, **keywords: Any) -> None:
        with interpretation():
            model(x, y, **keywords)

    return native


# --- distributions --------------------------------------------------------------------------------


def resolved(
    specification: Distribution, own: Mapping[str, Any], module: Any, array: Function, **options: Any
) -> Any:
    """The system's distribution of a specification, `family(array(argument), ..., **options)`.

    The family is one of our `own` by name, or one of the `module` of the system. `ModelError` is raised for an argument
    that is a distribution itself.
    """
    made = own.get(specification.family) or getattr(module, specification.family)
    given = specification.arguments
    if specification.family == "Censored":
        base = given["base"]
        arguments = {name: array(value) for name, value in base.arguments.items()}
        result = made(resolved(base, own, module, array, **options), base.family, arguments, **options)
    else:
        check_no_nested(specification)
        result = made(**{name: array(value) for name, value in given.items()}, **options)
    if specification.shape is not None:
        result = result.expand(specification.shape)
    return result.to_event(specification.event_dims) if specification.event_dims else result


class ArrayNormal:
    """loc + A eps over an array, eps standard normal; a subclass defines A. One event of the shape of loc."""

    loc: Any

    def drawn(self, eps: Any) -> Any:
        """The draws (..., *event) of standard normal numbers (..., P)."""
        return self.loc + self.spread(eps).reshape((*eps.shape[:-1], *self.loc.shape))

    def log_prob(self, value: Any, intermediates: Any = None) -> Any:
        """log p of values (..., *event); NumPyro passes `intermediates`."""
        deviation, size = value - self.loc, math.prod(self.loc.shape)
        batch = deviation.shape[: deviation.ndim - len(self.loc.shape)]
        eps = self.gather(deviation.reshape((*batch, size)))
        return -0.5 * (eps**2).sum(-1) - (self.log_volume() + 0.5 * size * math.log(2.0 * math.pi))

    def spread(self, eps: Any) -> Any:
        """A eps, (..., P) to (..., P)."""
        raise NotImplementedError

    def gather(self, deviation: Any) -> Any:
        """A^-1 deviation, (..., P) to (..., P)."""
        raise NotImplementedError

    def log_volume(self) -> Any:
        """log |det A|."""
        raise NotImplementedError


class CholeskyFactor(ArrayNormal):
    """A = L (P, P), the Cholesky factor of the covariance of the ravelled array."""

    def __init__(self, loc: Any, scale_tril: Any, **options: Any):
        self.scale_tril = scale_tril
        super().__init__(loc, **options)  # pyright: ignore[reportCallIssue]

    def spread(self, eps: Any) -> Any:
        return eps @ self.scale_tril.T

    def gather(self, deviation: Any) -> Any:
        return ops.solve_triangular(self.scale_tril, deviation)

    def log_volume(self) -> Any:
        return ops.log(self.scale_tril.diagonal()).sum()


class KroneckerFactor(ArrayNormal):
    """A = (Q_l (x) Q_r) diag(precisions^-1/2), which is never built; Q_l (I, I), Q_r (O, O), precisions (I, O)."""

    def __init__(self, loc: Any, left_vectors: Any, right_vectors: Any, precisions: Any, **options: Any):
        self.left_vectors, self.right_vectors, self.precisions = left_vectors, right_vectors, precisions
        super().__init__(loc, **options)  # pyright: ignore[reportCallIssue]

    def _as_matrices(self, flat: Any) -> Any:
        return flat.reshape((*flat.shape[:-1], *self.precisions.shape))

    def spread(self, eps: Any) -> Any:
        scaled = self._as_matrices(eps) / ops.sqrt(self.precisions)
        return (self.left_vectors @ scaled @ self.right_vectors.T).reshape(eps.shape)

    def gather(self, deviation: Any) -> Any:
        turned = self.left_vectors.T @ self._as_matrices(deviation) @ self.right_vectors
        return (ops.sqrt(self.precisions) * turned).reshape(deviation.shape)

    def log_volume(self) -> Any:
        return -0.5 * ops.log(self.precisions).sum()
