"""The scale of a prior: a number, a distribution, or one determined by the fan-in; checks of the fields of priors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.settings import between
from ppl_bnn.language import distributions as dist
from ppl_bnn.language.primitives import deterministic, sample

Scale = Any
Names = tuple[str, ...]


class Prior(Protocol):
    """A callable that makes a weight tensor of `shape` under `name`."""

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any: ...


def check_fields(
    prior: Any, *, numbers: Names = (), scales: Names = (), sampled: Names = (), groups: Names = ()
) -> None:
    """Check the fields of a prior.

    `numbers` are positive numbers; `scales` are positive scales, arrays or "fan_in"; `sampled` may be
    distributions too; `groups` are the known values of `per`. A field `sigma` is for `scale="fan_in"` only.
    """
    where = f"priors.{type(prior).__name__}"
    for name in numbers:
        value = getattr(prior, name)
        expected = between()(value)
        InputError.check(not expected, where, f"{expected} as {name}", repr(value), f"{name}=1.0")
    for name in (*scales, *sampled):
        check_scale(where, getattr(prior, name), name in sampled)
    if groups:
        dist.check_group(where, prior.per, groups)
    if "sigma" in (*scales, *sampled) and "scale" in (*scales, *sampled):
        scale, sigma = prior.scale, prior.sigma
        InputError.check(not isinstance(sigma, str), where, "a number as sigma", repr(sigma), "sigma=1.0")
        # The text is made on failure only: the representation of a sampled scale waits for its device.
        if not isinstance(scale, str) and sigma != 1.0:
            got = f"scale={scale!r} and sigma={sigma!r}"
            raise InputError.of(where, "sigma with scale='fan_in' only", got, "one of them")


def check_scale(where: str, scale: Scale, sampled: bool = False) -> None:
    """Check a positive scale, "fan_in", or, if `sampled`, a distribution. Arrays are values of a model, not checked."""
    check = InputError.check
    if isinstance(scale, dist.Distribution):
        got, advice = f"the distribution {scale.family}", "priors.Hierarchical(scale=...)"
        check(sampled, where, "a number here", got, advice)
        check_hyper_prior(where, scale)
    elif isinstance(scale, str):
        check(scale == "fan_in", where, "a scale that is a number or 'fan_in'", repr(scale), "'fan_in'")
    elif isinstance(scale, int | float | np.floating | np.integer):
        check(0 < scale < math.inf, where, "a positive scale", repr(scale), "scale=1.0 or scale='fan_in'")


def check_hyper_prior(where: str, given: Any, positive: bool = True) -> None:
    """Check that `given` is a distribution of one number, which has to be positive by default.

    Its arguments that are distributions are checked too. `where` begins the error message.
    """
    families = dist.ON_POSITIVES if positive else dist.ON_POSITIVES | dist.ON_REALS
    if not isinstance(given, dist.Distribution):
        got = type(given).__name__
    elif given.family not in families or given.family in (*dist.EVENTS, *dist.SPECIAL):
        got = given.family
    elif dist.draw_shape(given) != () or given.event_dims:
        got = f"{given.family} with a shape"
    else:
        for name, value in given.arguments.items():
            if isinstance(value, dist.Distribution):
                check_hyper_prior(f"{where}, {name} of {given.family}", value, name in dist.POSITIVE)
        return
    number = "positive number as scale" if positive else "number"
    raise InputError.of(where, f"a distribution of one {number}", got, "scale=dist.HalfNormal(1.0)")


def draw(name: str, specification: dist.Distribution) -> Any:
    """Sample from a distribution after its arguments that are distributions, which are the sites `name.argument`."""
    arguments = {
        argument: draw(f"{name}.{argument}", value) if isinstance(value, dist.Distribution) else value
        for argument, value in specification.arguments.items()
    }
    return sample(name, replace(specification, arguments=arguments))


def is_sampled(*scales: Scale) -> bool:
    """Whether one of the scales is a distribution."""
    return any(isinstance(scale, dist.Distribution) for scale in scales)


def sampled_scale(name: str, scale: Scale, sigma: Scale, fan_in: int) -> Any:
    """The scale of a tensor, sampled at `name.scale` if it is a random variable."""
    given = sigma if isinstance(scale, str) else scale
    factor = 1.0 / math.sqrt(fan_in) if isinstance(scale, str) else 1.0
    return factor * (draw(f"{name}.scale", given) if isinstance(given, dist.Distribution) else given)


def shifted_and_scaled(name: str, loc: Any, scale: Any, base: dist.Distribution) -> Any:
    """loc + scale * e with e ~ base, the site `name.base`."""
    return deterministic(name, loc + scale * sample(f"{name}.base", base))


def resolve_scale(scale: Scale, sigma: float, fan_in: int) -> Any:
    """The scale as a number: sigma / sqrt(fan_in) for "fan_in"."""
    return sigma / math.sqrt(fan_in) if isinstance(scale, str) else scale
