"""The scale of a prior: a number, a distribution, or one determined by the fan-in."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language.primitives import deterministic, sample

Scale = Any


class Prior(Protocol):
    """A callable that makes a weight tensor of `shape` under `name`."""

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any: ...


def check_scale(prior: str, scale: Scale, sampled: bool = False) -> None:
    """Refuse an invalid scale.

    Parameters
    ----------
    prior : str
        Name of the prior in the error message.
    scale
        The scale to check.
    sampled : bool
        Whether it may be a distribution, from which the scale is drawn.

    Raises
    ------
    InputError
        A distribution where none is allowed, or an invalid one; a string other than "fan_in"; or a number that is not
        positive.
    """
    if isinstance(scale, dist.Distribution):
        if not sampled:
            raise InputError.of(
                f"priors.{prior}",
                "a number here",
                f"the distribution {scale.family}",
                "priors.Hierarchical(scale=...)",
            )
        check_hyper_prior(prior, scale)
    elif isinstance(scale, str):
        if scale != "fan_in":
            raise InputError.of(
                f"priors.{prior}", "a scale that is a number or 'fan_in'", repr(scale), "'fan_in'"
            )
    elif isinstance(scale, int | float | np.floating | np.integer) and not (
        scale > 0 and math.isfinite(scale)
    ):
        raise InputError.of(f"priors.{prior}", "a positive scale", repr(scale), "scale=1.0 or scale='fan_in'")


def check_number(prior: str, value: Any) -> None:
    """Refuse a value that is not a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError.of(f"priors.{prior}", "a positive number", repr(value), "1.0")


def check_scales(prior: str, scale: Scale, sigma: Scale, sampled: bool = False) -> None:
    """Check `scale` and `sigma` together: `sigma` is for `scale="fan_in"` only."""
    check_scale(prior, scale, sampled)
    check_scale(prior, sigma, sampled)
    if isinstance(sigma, str):
        raise InputError.of(f"priors.{prior}", "a number as sigma", repr(sigma), "sigma=1.0")
    if not isinstance(scale, str) and sigma != 1.0:
        raise InputError.of(
            f"priors.{prior}",
            "sigma with scale='fan_in' only",
            f"scale={scale!r} and sigma={sigma!r}",
            "one of them",
        )


def check_hyper_prior(of: str, given: Any, positive: bool = True) -> None:
    """Refuse a hyper-prior that is not a distribution of one number.

    Its arguments that are distributions are checked too.

    Parameters
    ----------
    of : str
        Name of the prior in the error message.
    given
        The value to check.
    positive : bool
        Whether the distribution has to be on the positive numbers.

    Raises
    ------
    InputError
        `given` is not such a distribution.
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
                check_hyper_prior(f"{of}, {name} of {given.family}", value, name in dist.POSITIVE)
        return
    number = "positive number as scale" if positive else "number"
    raise InputError.of(f"priors.{of}", f"a distribution of one {number}", got, "scale=dist.HalfNormal(1.0)")


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
