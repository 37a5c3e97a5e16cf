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
from ppl_bnn.backends.interpretation import ArrayNormal, CholeskyFactor, KroneckerFactor, resolved
from ppl_bnn.language.distributions import Distribution, censored_log_prob
from ppl_bnn.language.modules.torch_defaults import floating


class NormalMixture(pyro.distributions.TorchDistribution):
    """Mixture of centred normals, sum_k weights_k N(0, scales_k^2), elementwise.

    The support that torch's MixtureSameFamily declares has no bijection from the real line, so no guide accepts it.
    """

    arg_constraints: Any = {"weights": constraints.simplex, "scales": constraints.positive}
    support: Any = constraints.real

    def __init__(self, weights: Any, scales: Any, batch_shape: Any = torch.Size()):
        self.weights, self.scales = weights, scales
        super().__init__(torch.Size(batch_shape), torch.Size(), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> NormalMixture:
        return NormalMixture(self.weights, self.scales, batch_shape)

    def log_prob(self, value: Any) -> Any:
        each = -0.5 * (value[..., None] / self.scales) ** 2 - self.scales.log() - 0.9189385332046727
        shape = torch.broadcast_shapes(value.shape, self.batch_shape)
        return torch.logsumexp(each + self.weights.log(), dim=-1).expand(shape)

    def sample(self, sample_shape: Any = torch.Size()) -> Any:
        shape = torch.Size(sample_shape) + self.batch_shape
        chosen = torch.distributions.Categorical(probs=self.weights).sample(shape)
        return torch.randn(shape, dtype=self.scales.dtype, device=self.scales.device) * self.scales[chosen]


class MixtureOfNormals(pyro.distributions.TorchDistribution):
    """Mixture of normals, sum_m softmax(logits)_m N(loc_m, scale_m^2) over the last axis.

    torch's own has the support problem of `NormalMixture`.
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


class _ArrayNormal(ArrayNormal, pyro.distributions.TorchDistribution):
    """One event of the shape of loc."""

    arg_constraints: Any = {}
    has_rsample = True

    def __init__(self, loc: Any, batch_shape: Any = torch.Size()):
        self.loc = loc
        pyro.distributions.TorchDistribution.__init__(
            self, torch.Size(batch_shape), loc.shape, validate_args=False
        )

    @property
    def support(self) -> Any:
        return constraints.independent(constraints.real, self.event_dim)

    def rsample(self, sample_shape: Any = torch.Size()) -> Any:
        batch = torch.Size(sample_shape) + self.batch_shape
        return self.drawn(
            torch.randn((*batch, self.loc.numel()), dtype=self.loc.dtype, device=self.loc.device)
        )

    def log_prob(self, value: Any) -> Any:
        density = self.density(value)
        return density.expand(torch.broadcast_shapes(density.shape, self.batch_shape))


class MultivariateNormal(CholeskyFactor, _ArrayNormal):
    """Normal distribution of an array; the distribution of torch supports vectors as events only."""

    def expand(self, batch_shape: Any, _instance: Any = None) -> MultivariateNormal:
        return MultivariateNormal(self.loc, self.scale_tril, batch_shape=batch_shape)


class KroneckerNormal(KroneckerFactor, _ArrayNormal):
    """Normal distribution of an array whose covariance is that of `KroneckerFactor`."""

    def expand(self, batch_shape: Any, _instance: Any = None) -> KroneckerNormal:
        factors = self.left_vectors, self.right_vectors, self.precisions
        return KroneckerNormal(self.loc, *factors, batch_shape=batch_shape)


class MultivariateLogNormal(pyro.distributions.TransformedDistribution):
    """exp of a `MultivariateNormal`, elementwise."""

    arg_constraints: Any = {}

    def __init__(self, loc: Any, scale_tril: Any):
        self.loc, self.scale_tril = loc, scale_tril
        exp = torch.distributions.transforms.ExpTransform()
        super().__init__(MultivariateNormal(loc, scale_tril), [exp], validate_args=False)

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


# Families that Pyro does not have, or has in a form or with arguments that are not suitable here.
_OWN: dict[str, Any] = {
    "NormalMixture": NormalMixture,
    "MixtureOfNormals": MixtureOfNormals,
    "MultivariateNormal": MultivariateNormal,
    "MultivariateLogNormal": MultivariateLogNormal,
    "KroneckerNormal": KroneckerNormal,
    "EmpiricalBayes": EmpiricalBayes,
    "ImproperLogUniform": ImproperLogUniform,
    "Censored": Censored,
    "NegativeBinomial": lambda concentration, logits: pyro.distributions.NegativeBinomial(
        concentration, logits=logits
    ),
    # Rows are the batch and share one factor, so torch's own distribution of vectors is enough.
    "RowNormal": lambda loc, scale_tril: pyro.distributions.MultivariateNormal(loc, scale_tril=scale_tril),
    "LKJCholesky": lambda dimension, concentration: pyro.distributions.LKJCholesky(
        int(dimension), concentration
    ),
}
_RESOLVED: dict[Any, Any] = {}
_MOST_RESOLVED = 512


def _family(name: str) -> Any:
    return _OWN.get(name) or getattr(pyro.distributions, name)


def resolve(specification: Distribution, settings: Any = None) -> Any:
    """The Pyro distribution of a specification; `settings`: the `current_settings()` of a run.

    It is cached if all arguments are plain numbers: its construction takes longer than the evaluation of its density.
    """
    arguments = tuple(specification.arguments.values())
    if not all(map(_is_constant, arguments)):
        return resolved(specification, _family, _as_tensor)
    settings = settings or current_settings()
    key = (specification.family, arguments, specification.shape, specification.event_dims, settings)
    found = _RESOLVED.get(key)
    if found is None:
        found = resolved(specification, _family, _as_tensor)
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


def _as_tensor(value: Any) -> Any:
    """A number, or a list of them, as a tensor of the session's type and device; tensors and text unchanged."""
    return value if isinstance(value, torch.Tensor | str) else torch.as_tensor(value, dtype=floating())
