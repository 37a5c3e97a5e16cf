"""Distributions of the language in Pyro: those that Pyro has, and those that are defined here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributions import constraints

from ppl_bnn.core.warning_filters import ignored

with ignored(category=FutureWarning), ignored(category=DeprecationWarning):
    # Pyro 1.9 compiles helpers with torch.jit.script, which torch 2.15 deprecates; users cannot change that.
    import pyro
    import pyro.distributions
    import pyro.poutine
from ppl_bnn.language.distributions import Distribution, censored_log_prob, check_no_nested
from ppl_bnn.language.modules.torch_defaults import floating


class NormalMixture(pyro.distributions.TorchDistribution):
    """Mixture of centred normals, sum_k weights_k N(0, scales_k^2), elementwise.

    The support that torch's MixtureSameFamily declares has no bijection from the real line, so no guide accepts it.

    Parameters
    ----------
    weights : Tensor
        Mixture weights.
    scales : Tensor
        Standard deviations.
    """

    arg_constraints: Any = {"weights": constraints.simplex, "scales": constraints.positive}
    support: Any = constraints.real

    def __init__(self, weights: Any, scales: Any, batch_shape: Any = torch.Size(), validate_args: Any = None):
        self.weights = weights
        self.scales = scales
        super().__init__(torch.Size(batch_shape), torch.Size(), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> NormalMixture:
        return NormalMixture(self.weights, self.scales, batch_shape)

    def log_prob(self, value: Any) -> Any:
        each = -0.5 * (value[..., None] / self.scales) ** 2 - self.scales.log() - 0.9189385332046727
        return torch.logsumexp(each + self.weights.log(), dim=-1).expand(
            torch.broadcast_shapes(value.shape, self.batch_shape)
        )

    def sample(self, sample_shape: Any = torch.Size()) -> Any:
        shape = torch.Size(sample_shape) + self.batch_shape
        chosen = torch.distributions.Categorical(probs=self.weights).sample(shape)
        return torch.randn(shape, dtype=self.scales.dtype, device=self.scales.device) * self.scales[chosen]


class MixtureOfNormals(pyro.distributions.TorchDistribution):
    """Mixture of normals, sum_m softmax(logits)_m N(loc_m, scale_m^2) over the last axis.

    torch's own has the support problem of `NormalMixture`.

    Parameters
    ----------
    logits : Tensor
        Logits of the weights.
    loc : Tensor
        Means.
    scale : Tensor
        Standard deviations.
    """

    arg_constraints: Any = {
        "logits": constraints.independent(constraints.real, 1),
        "loc": constraints.independent(constraints.real, 1),
        "scale": constraints.independent(constraints.positive, 1),
    }
    support: Any = constraints.real

    def __init__(self, logits: Any, loc: Any, scale: Any):
        self.logits, self.loc, self.scale = torch.broadcast_tensors(logits, loc, scale)
        super().__init__(self.loc.shape[:-1], torch.Size(), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> MixtureOfNormals:
        shape = (*batch_shape, self.loc.shape[-1])
        return MixtureOfNormals(*(value.expand(shape) for value in (self.logits, self.loc, self.scale)))

    def log_prob(self, value: Any) -> Any:
        each = -0.5 * ((value[..., None] - self.loc) / self.scale) ** 2 - self.scale.log()
        log_weights = torch.log_softmax(self.logits, dim=-1)
        return torch.logsumexp(each + log_weights, dim=-1) - 0.5 * math.log(2.0 * math.pi)

    def sample(self, sample_shape: Any = torch.Size()) -> Any:
        shape = torch.Size(sample_shape) + self.batch_shape
        chosen = torch.distributions.Categorical(logits=self.logits).sample(torch.Size(sample_shape))
        loc, scale = (
            value.expand((*shape, value.shape[-1])).gather(-1, chosen[..., None])[..., 0]
            for value in (self.loc, self.scale)
        )
        return loc + scale * torch.randn(shape, dtype=loc.dtype, device=loc.device)


class _ArrayNormal(pyro.distributions.TorchDistribution):
    """loc + A eps over an array, eps standard normal; a subclass defines A. One event of the shape of loc."""

    arg_constraints: Any = {}
    has_rsample = True

    def __init__(self, loc: Any, batch_shape: Any = torch.Size()):
        self.loc = loc
        super().__init__(torch.Size(batch_shape), loc.shape, validate_args=False)

    @property
    def support(self) -> Any:
        return constraints.independent(constraints.real, self.event_dim)

    def rsample(self, sample_shape: Any = torch.Size()) -> Any:
        batch = torch.Size(sample_shape) + self.batch_shape
        eps = torch.randn((*batch, self.loc.numel()), dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + self.spread(eps).reshape(batch + self.event_shape)

    def log_prob(self, value: Any) -> Any:
        deviation = value - self.loc
        batch = deviation.shape[: deviation.dim() - self.event_dim]
        eps = self.gather(deviation.reshape((*batch, self.loc.numel())))
        constant = self.log_volume() + 0.5 * self.loc.numel() * math.log(2.0 * math.pi)
        density = -0.5 * (eps**2).sum(-1) - constant
        return density.expand(torch.broadcast_shapes(batch, self.batch_shape))

    def spread(self, eps: Any) -> Any:
        """A eps, (..., P) to (..., P)."""
        raise NotImplementedError

    def gather(self, deviation: Any) -> Any:
        """A^-1 deviation, (..., P) to (..., P)."""
        raise NotImplementedError

    def log_volume(self) -> Any:
        """log |det A|."""
        raise NotImplementedError


class MultivariateNormal(_ArrayNormal):
    """Normal distribution of an array; the distribution of torch supports vectors as events only.

    Parameters
    ----------
    loc : Tensor
        Mean.
    scale_tril : Tensor
        Cholesky factor of the covariance of the ravelled array.
    """

    def __init__(self, loc: Any, scale_tril: Any, batch_shape: Any = torch.Size()):
        self.scale_tril = scale_tril
        super().__init__(loc, batch_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> MultivariateNormal:
        return MultivariateNormal(self.loc, self.scale_tril, batch_shape)

    def spread(self, eps: Any) -> Any:
        return eps @ self.scale_tril.T

    def gather(self, deviation: Any) -> Any:
        flat = deviation.reshape(-1, self.loc.numel()).T
        return torch.linalg.solve_triangular(self.scale_tril, flat, upper=False).T.reshape(deviation.shape)

    def log_volume(self) -> Any:
        return self.scale_tril.diagonal().log().sum()


class KroneckerNormal(_ArrayNormal):
    """Normal distribution with A = (Q_l (x) Q_r) diag(precisions^-1/2), which is never built.

    Parameters
    ----------
    loc : Tensor
        Mean.
    left_vectors, right_vectors : Tensor
        Q_l (I, I) and Q_r (O, O), orthogonal.
    precisions : Tensor
        Precisions, (I, O).
    """

    def __init__(
        self,
        loc: Any,
        left_vectors: Any,
        right_vectors: Any,
        precisions: Any,
        batch_shape: Any = torch.Size(),
    ):
        self.left_vectors, self.right_vectors, self.precisions = left_vectors, right_vectors, precisions
        super().__init__(loc, batch_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> KroneckerNormal:
        return KroneckerNormal(self.loc, self.left_vectors, self.right_vectors, self.precisions, batch_shape)

    def _as_matrices(self, flat: Any) -> Any:
        return flat.reshape((*flat.shape[:-1], *self.precisions.shape))

    def spread(self, eps: Any) -> Any:
        scaled = self._as_matrices(eps) / self.precisions.sqrt()
        return (self.left_vectors @ scaled @ self.right_vectors.T).reshape(eps.shape)

    def gather(self, deviation: Any) -> Any:
        turned = self.left_vectors.T @ self._as_matrices(deviation) @ self.right_vectors
        return (self.precisions.sqrt() * turned).reshape(deviation.shape)

    def log_volume(self) -> Any:
        return -0.5 * self.precisions.log().sum()


class MultivariateLogNormal(pyro.distributions.TransformedDistribution):
    """exp of a `MultivariateNormal`, elementwise."""

    arg_constraints: Any = {}

    def __init__(self, loc: Any, scale_tril: Any):
        self.loc, self.scale_tril = loc, scale_tril
        super().__init__(
            MultivariateNormal(loc, scale_tril),
            [torch.distributions.transforms.ExpTransform()],
            validate_args=False,
        )

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        new = self._get_checked_instance(MultivariateLogNormal, _instance)
        new.loc, new.scale_tril = self.loc, self.scale_tril
        return super().expand(batch_shape, _instance=new)


class EmpiricalBayes(pyro.distributions.Normal):
    """Normal(0, scale), from which starts are drawn; `per` defines which weights share the scale of a method."""

    arg_constraints: Any = {"loc": constraints.real, "scale": constraints.positive}

    def __init__(self, scale: Any, per: str = "weight"):
        self.per = per
        super().__init__(torch.zeros_like(scale), scale)

    def expand(self, batch_shape: Any, _instance: Any = None) -> EmpiricalBayes:
        return EmpiricalBayes(self.scale.expand(batch_shape), self.per)


class ImproperLogUniform(pyro.distributions.TorchDistribution):
    """log p(w) = -log |w|, without a normalising constant. Starts are drawn from Normal(0, scale)."""

    arg_constraints: Any = {"scale": constraints.positive}
    support: Any = constraints.real
    has_rsample = True

    def __init__(self, scale: Any):
        self.scale = scale
        super().__init__(scale.shape, torch.Size(), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> ImproperLogUniform:
        return ImproperLogUniform(self.scale.expand(batch_shape))

    def rsample(self, sample_shape: Any = torch.Size()) -> Any:
        shape = torch.Size(sample_shape) + self.batch_shape
        return self.scale * torch.randn(shape, dtype=self.scale.dtype, device=self.scale.device)

    def log_prob(self, value: Any) -> Any:
        return -value.abs().log().expand(torch.broadcast_shapes(value.shape, self.batch_shape))


class Censored(pyro.distributions.TorchDistribution):
    """Rows (value, event) of a base distribution, with log density `censored_log_prob`; draws have event 1."""

    arg_constraints: Any = {}
    support: Any = constraints.real_vector

    def __init__(self, base: Any, family: str, arguments: Mapping[str, Any]):
        self.base, self.family, self.arguments = base, family, arguments
        super().__init__(base.batch_shape, torch.Size([2]), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Censored:
        return Censored(self.base.expand(batch_shape), self.family, self.arguments)

    def log_prob(self, value: Any) -> Any:
        density = censored_log_prob(self.family, self.arguments, value)
        return density.expand(torch.broadcast_shapes(density.shape, self.batch_shape))

    def sample(self, sample_shape: Any = torch.Size()) -> Any:
        value = self.base.sample(sample_shape)
        return torch.stack([value, torch.ones_like(value)], dim=-1)


# Families that torch does not have, or has in a form that is not suitable here.
_OWN: dict[str, Any] = {
    family.__name__: family
    for family in (
        MultivariateNormal,
        MultivariateLogNormal,
        KroneckerNormal,
        EmpiricalBayes,
        ImproperLogUniform,
    )
}
_RESOLVED: dict[Any, Any] = {}
_MOST_RESOLVED = 512


def resolve(specification: Distribution, circumstances: Any = None) -> Any:
    """The Pyro distribution of a specification.

    A distribution whose arguments are all plain numbers is the same in every run of the model. Its construction takes
    longer than the evaluation of its density, and a run of SVI would construct it at each step, so it is cached.

    Parameters
    ----------
    specification : Distribution
        The specification.
    circumstances : optional
        The `current_settings()` of a run, by default those of the call.

    Returns
    -------
    pyro.distributions.Distribution
        The distribution.

    Raises
    ------
    ModelError
        An argument is a distribution itself.
    """
    arguments = tuple(specification.arguments.values())
    if not all(map(_is_constant, arguments)):
        return _resolve(specification)
    key = (
        specification.family,
        arguments,
        specification.shape,
        specification.event_dims,
        circumstances or current_settings(),
    )
    found = _RESOLVED.get(key)
    if found is None:
        found = _resolve(specification)
        if _may_be_kept(torch.as_tensor(0.0)):
            if len(_RESOLVED) >= _MOST_RESOLVED:
                _RESOLVED.clear()
            _RESOLVED[key] = found
    return found


def current_settings() -> Any:
    """The global settings on which a distribution depends."""
    return (floating(), torch.get_default_device(), torch.distributions.Distribution._validate_args)


def _is_constant(value: Any) -> bool:
    kind = type(value)
    return kind in (float, int, str) or (kind is tuple and all(map(_is_constant, value)))


def _may_be_kept(fresh: torch.Tensor) -> bool:
    """Whether tensors made now remain valid later: those made inside transforms of torch.func do not."""
    if type(fresh) is not torch.Tensor or fresh.is_inference():
        return False
    try:
        fresh.data_ptr()
    except RuntimeError:
        # A wrapper of a transform has no storage of its own.
        return False
    return True


def _as_tensor(value: Any) -> torch.Tensor:
    """A plain Python number as a scalar tensor of the session's type and device."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(value, dtype=floating())


def _resolve(specification: Distribution) -> Any:
    if specification.family == "NormalMixture":
        result: Any = NormalMixture(
            torch.as_tensor(specification.arguments["weights"], dtype=floating()),
            torch.as_tensor(specification.arguments["scales"], dtype=floating()),
        )
    elif specification.family == "MixtureOfNormals":
        result = MixtureOfNormals(*map(_as_tensor, specification.arguments.values()))
    elif specification.family == "NegativeBinomial":
        concentration, logits = map(_as_tensor, specification.arguments.values())
        result = pyro.distributions.NegativeBinomial(concentration, logits=logits)
    elif specification.family == "RowNormal":
        # Rows are the batch and share one factor, so torch's own distribution of vectors is enough.
        loc, scale_tril = map(_as_tensor, specification.arguments.values())
        result = pyro.distributions.MultivariateNormal(loc, scale_tril=scale_tril)
    elif specification.family == "Censored":
        base = specification.arguments["base"]
        arguments = {name: _as_tensor(value) for name, value in base.arguments.items()}
        result = Censored(_resolve(base), base.family, arguments)
    elif specification.family == "LKJCholesky":
        result = pyro.distributions.LKJCholesky(
            specification.arguments["dimension"], _as_tensor(specification.arguments["concentration"])
        )
    elif specification.family in ("Bernoulli", "Categorical"):
        result = getattr(pyro.distributions, specification.family)(logits=specification.arguments["logits"])
    else:
        check_no_nested(specification)
        arguments = {
            name: value if isinstance(value, str) else _as_tensor(value)
            for name, value in specification.arguments.items()
        }
        family = _OWN.get(specification.family) or getattr(pyro.distributions, specification.family)
        result = family(**arguments)
    if specification.shape is not None:
        result = result.expand(specification.shape)
    return result.to_event(specification.event_dims) if specification.event_dims else result
