"""Advice for a method whose fit falls short: only settings that the method has, with values to try.

Settings are those of `FitInfo.settings`; for a method fitted several times, those of the member.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]


def fitted_settings(posterior: Any) -> dict[str, Any]:
    """The settings of the fitted method; those of the member if it was fitted several times."""
    settings = posterior.info.settings
    while isinstance(settings.get("member"), dict):
        settings = settings["member"]
    return settings


def number(settings: Settings, name: str) -> float | None:
    """The value of a setting that is a number, else None."""
    value = settings.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _times(settings: Settings, name: str, factor: int) -> str:
    value = number(settings, name)
    return f"more {name}" if value is None else f"{name}={int(factor * value)}"


def more_of_a_sampler(settings: Settings) -> list[str]:
    """Advice for draws that are too few or too dependent."""
    if "moves" in settings:
        # Sequential Monte Carlo: particles move a few times at each temperature, without warm-up.
        more = f"{_times(settings, 'particles', 4)}, or {_times(settings, 'moves', 2)}"
        return [f"{more}: particles that differ more"]
    longer = " and a longer warm-up" if "warmup" in settings else ""
    return [f"more draws{longer}"] if "draws" in settings else []


def more_chains(settings: Settings) -> list[str]:
    """Advice for a single chain, which cannot be compared with another."""
    return [f"{name}=4" for name in ("chains", "runs") if name in settings][:1]


def other_starts(settings: Settings) -> list[str]:
    """Advice for chains that disagree."""
    return ["start=MAP(), so that no chain begins far out in the prior"] if "start" in settings else []


def more_modes(settings: Settings) -> list[str]:
    """Advice for chains that are in different modes."""
    weights = "weights of the chains by what they predict, instead of equal ones"
    stacked = f"bnn.stack(posterior), or Stacked(...): {weights}"
    if "moves" in settings:
        more = _times(settings, "particles", 4)
        return [stacked, f"{more}: the shares of modes are those of the particles in them"]
    starts = "several starts: more chains, each from its own, show more of the modes, though not their shares"
    smc = "SMC(), which carries particles from the prior to the posterior and weights the modes"
    return [stacked, starts, smc]


def not_still(settings: Settings, smaller: str) -> str:
    """Advice for a chain that never moves. smaller: what makes the steps smaller, see `smaller_steps`."""
    if "moves" in settings:
        return f"{_times(settings, 'moves', 2)}: a particle that never moves accepts nothing"
    warmup = "a longer warm-up, " if "warmup" in settings else ""
    start = ", another start" if "start" in settings else ""
    return f"{warmup}{smaller}{start}: a chain that never moves accepts nothing"


def longer_optimisation(settings: Settings) -> list[str]:
    """Advice for an optimisation that has not settled."""
    rate = ", or a larger learning_rate" if "learning_rate" in settings else ""
    lengths = [name for name in ("max_iterations", "burn_in", "steps") if name in settings]
    return [f"{_times(settings, name, 2)}{rate}" for name in lengths[:1]]


def smaller_steps(settings: Settings, statistics: Mapping[str, Any]) -> str:
    """What makes the steps of a sampler smaller, by the recorded statistics: some settings were not in use."""
    variance, multiplier = number(settings, "energy_variance"), number(settings, "step_size_multiplier")
    if "energy_variance" in statistics and variance is not None:
        adjusted = "adjusted=True, whose step size follows the acceptance"
        return f"energy_variance={variance / 10:.2g}, or {adjusted}"
    if multiplier is not None:
        return f"step_size_multiplier={multiplier / 2:g}"
    accept = number(settings, "target_accept")
    if accept is not None:
        # A harmonic mean over many chains is tuned to a lower target to begin with.
        return f"target_accept={1 - (1 - accept) / (4 if number(settings, 'superchains') is None else 2):.3g}"
    return "smaller steps, or a prior with lighter tails"
