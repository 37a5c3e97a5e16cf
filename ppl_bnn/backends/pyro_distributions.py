"""Distributions of the language in Pyro: those that Pyro has, and those that are defined here."""

from __future__ import annotations

import copy
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


class ExpandedDistribution(pyro.distributions.ExpandedDistribution):
    """That of Pyro changes itself in `expand`, which would also change a distribution that `resolve` keeps."""

    def expand(self, batch_shape: Any, _instance: Any = None) -> ExpandedDistribution:
        return super(ExpandedDistribution, copy.copy(self)).expand(batch_shape)


class _Own(pyro.distributions.TorchDistribution):
    """A distribution without checks of its arguments, which `expand` wraps."""

    arg_constraints: Any = {}
    support: Any = constraints.real

    def __init__(self, batch_shape: Any = (), event_shape: Any = ()):
        super().__init__(torch.Size(batch_shape), torch.Size(event_shape), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> ExpandedDistribution:
        return ExpandedDistribution(self, self.batch_shape).expand(batch_shape)


class NormalMixture(_Own):
    """Mixture of centred normals, sum_k weights_k N(0, scales_k^2), elementwise.

    The support that torch's MixtureSameFamily declares has no bijection from the real line, so no guide accepts it.
    """

    def __init__(self, weights: Any, scales: Any):
        self.weights, self.scales = weights, scales
        super().__init__()

    def log_prob(self, value: Any) -> Any:
        each = -0.5 * (value[..., None] / self.scales) ** 2 - self.scales.log() - 0.9189385332046727
        return torch.logsumexp(each + self.weights.log(), dim=-1)

    def sample(self, sample_shape: Any = torch.Size()) -> Any:
        chosen = torch.distributions.Categorical(probs=self.weights).sample(sample_shape)
        return self.scales[chosen] * _normal(sample_shape, self.scales)


class MixtureOfNormals(_Own):
    """Mixture of normals, sum_m softmax(logits)_m N(loc_m, scale_m^2) over the last axis.

    torch's own has the support problem of `NormalMixture`.
    """

    def __init__(self, logits: Any, loc: Any, scale: Any):
        self.logits, self.loc, self.scale = torch.broadcast_tensors(logits, loc, scale)
        super().__init__(self.loc.shape[:-1])

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
        return loc + scale * _normal(shape, loc)


class _ArrayNormal(ArrayNormal, _Own):
    """One event of the shape of loc."""

    has_rsample = True

    def __init__(self, loc: Any):
        self.loc = loc
        super().__init__((), loc.shape)

    @property
    def support(self) -> Any:
        return constraints.independent(constraints.real, self.event_dim)

    def rsample(self, sample_shape: Any = torch.Size()) -> Any:
        return self.drawn(_normal((*sample_shape, self.loc.numel()), self.loc))


class MultivariateNormal(CholeskyFactor, _ArrayNormal):
    """Normal distribution of an array; the distribution of torch supports vectors as events only."""


class KroneckerNormal(KroneckerFactor, _ArrayNormal):
    """Normal distribution of an array whose covariance is that of `KroneckerFactor`."""


class MultivariateLogNormal(pyro.distributions.TransformedDistribution):
    """exp of a `MultivariateNormal`, elementwise."""

    arg_constraints: Any = {}
    expand = _Own.expand

    def __init__(self, loc: Any, scale_tril: Any):
        self.loc, self.scale_tril = loc, scale_tril
        exp = torch.distributions.transforms.ExpTransform()
        super().__init__(MultivariateNormal(loc, scale_tril), [exp], validate_args=False)


class EmpiricalBayes(pyro.distributions.Normal):
    """Normal(0, scale), from which starts are drawn; `per` defines which weights share the scale of a method."""

    arg_constraints: Any = {"loc": constraints.real, "scale": constraints.positive}

    def __init__(self, scale: Any, per: str = "weight"):
        self.per = per
        super().__init__(torch.zeros_like(scale), scale)

    def expand(self, batch_shape: Any, _instance: Any = None) -> EmpiricalBayes:
        return EmpiricalBayes(self.scale.expand(batch_shape), self.per)


class ImproperLogUniform(_Own):
    """log p(w) = -log |w|, without a normalising constant. Starts are drawn from Normal(0, scale)."""

    has_rsample = True

    def __init__(self, scale: Any):
        self.scale = scale
        super().__init__(scale.shape)

    def rsample(self, sample_shape: Any = torch.Size()) -> Any:
        return self.scale * _normal(torch.Size(sample_shape) + self.batch_shape, self.scale)

    def log_prob(self, value: Any) -> Any:
        return -value.abs().log()


class Censored(_Own):
    """Rows (value, event) of a base distribution, with log density `censored_log_prob`; draws have event 1."""

    support: Any = constraints.real_vector

    def __init__(self, base: Any, family: str, arguments: Mapping[str, Any]):
        self.base, self.family, self.arguments = base, family, arguments
        super().__init__(base.batch_shape, (2,))

    def log_prob(self, value: Any) -> Any:
        return censored_log_prob(self.family, self.arguments, value)

    def sample(self, sample_shape: Any = torch.Size()) -> Any:
        value = self.base.sample(sample_shape)
        return torch.stack([value, torch.ones_like(value)], dim=-1)


class Weighted(_Own):
    """A distribution whose log density is multiplied by a weight for each row; draws are those of the base."""

    def __init__(self, base: Any, weight: Any):
        self.base, self.weight, self.support = base, weight, base.support
        super().__init__(base.batch_shape, base.event_shape)

    def log_prob(self, value: Any) -> Any:
        return self.weight * self.base.log_prob(value)

    def sample(self, sample_shape: Any = torch.Size()) -> Any:
        return self.base.sample(sample_shape)


def _normal(shape: Any, like: Any) -> Any:
    """Standard normal numbers of the type and device of `like`."""
    return torch.randn(shape, dtype=like.dtype, device=like.device)


# Families that Pyro does not have, or has in a form or with arguments that are not suitable here.
_NORMALS = (NormalMixture, MixtureOfNormals, MultivariateNormal, MultivariateLogNormal, KroneckerNormal)
_OWN: dict[str, Any] = {
    **{kind.__name__: kind for kind in (*_NORMALS, EmpiricalBayes, ImproperLogUniform, Censored)},
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


def resolve(specification: Distribution, settings: Any = None) -> Any:
    """The Pyro distribution of a specification; `settings`: the `current_settings()` of a run.

    It is cached if all arguments are plain numbers: its construction takes longer than the evaluation of its density.
    """
    arguments = tuple(specification.arguments.values())
    constant = all(map(_is_constant, arguments))
    shape = specification.shape, specification.event_dims
    key = (specification.family, arguments, shape, settings or current_settings()) if constant else None
    if key is not None and key in _RESOLVED:
        return _RESOLVED[key]
    found = resolved(specification, _OWN, pyro.distributions, _as_tensor)
    if key is not None and _may_be_kept(torch.as_tensor(0.0)):
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
