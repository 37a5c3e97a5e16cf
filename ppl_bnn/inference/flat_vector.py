"""The flat vector: the unconstrained coordinates of the latent sites, concatenated in the order of the program.

Gaussians, curvatures and Jacobians are defined on this vector or on some of its positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.protocol import Site
from ppl_bnn.core.arrays import map_data, ravel
from ppl_bnn.core.errors import InputError, UnsupportedError

# Unconstrained coordinates, site -> array of NumPy.
Values = Mapping[str, np.ndarray]


def latent_names(problem: Problem) -> list[str]:
    """The sites of a Gaussian approximation: all random variables, without the parameters that have no prior."""
    names = [site.name for site in problem.program.latents]
    if not names:
        raise UnsupportedError.of("", "at least one site with a prior", "point estimates only", "MAP()")
    return names


def flat_latents(problem: Problem, u: Mapping[str, np.ndarray]) -> np.ndarray:
    """The flat vector (P,) of the latent sites."""
    return ravel(u, latent_names(problem)).astype(float)


def flat_sites(problem: Problem, u: Mapping[str, np.ndarray]) -> np.ndarray:
    """The flat vector (P,) of all sites, including parameters without a prior."""
    return ravel(u, problem.program.sites).astype(float)


def by_site(problem: Problem, flat: np.ndarray) -> dict[str, np.ndarray]:
    """The inverse of `flat_sites`, also for (..., P), as copies."""
    return {name: np.array(value) for name, value in problem.program.unravel(flat).items()}


def minus_log_joint(program: Program, scale: float = 1.0, jacobian: bool = True) -> Callable[..., Any]:
    """The function (flat vector of all sites, x, y) -> minus the log joint; the arguments are as in `log_joint`."""
    return lambda flat, x, y: -program.log_joint(program.unravel(flat), x, y, scale, jacobian)


def latent_places(problem: Problem) -> np.ndarray:
    """The positions of the latent sites in the flat vector of all sites, which includes parameters without a prior."""
    sites = problem.program.sites.values()
    return np.flatnonzero(np.concatenate([np.full(site.size, not site.is_param) for site in sites]))


def site_slices(problem: Problem, names: Sequence[str] | None = None) -> dict[str, slice]:
    """The slice of each latent site in the flat vector, or in that of the sites `names` only."""
    slices, start = {}, 0
    for name in latent_names(problem) if names is None else names:
        slices[name] = slice(start, start + problem.program.sites[name].size)
        start += problem.program.sites[name].size
    return slices


def system_values(problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Values of all sites as arrays of the system, in the shapes of the program."""
    sites = problem.program.sites
    return {
        name: problem.system.asarray(np.asarray(u[name], dtype=float).reshape(site.unconstrained_shape))
        for name, site in sites.items()
    }


def constrained(problem: Problem, u: Values) -> dict[str, np.ndarray]:
    """The values w(u) of all sites at one point, in NumPy."""
    draws = {name: np.asarray(value)[None] for name, value in u.items()}
    w = problem.program.constrain_draws(draws, problem.x, problem.y)
    return {name: value[0] for name, value in w.items()}


def with_values(problem: Problem, u: Values, values: Values) -> dict[str, np.ndarray]:
    """The point u with the constrained `values` at some sites."""
    return problem.program.unconstrain(constrained(problem, u) | dict(values), problem.x, problem.y)


def first_rows(problem: Problem) -> tuple[Any, Any]:
    """(x, y) where only shapes matter, as for priors: one row, or all if rows cannot be separated."""
    program = problem.program
    if program.has_local or program.coupled or not program.language:
        return problem.x, problem.y
    return map_data(lambda a: a[:1], problem.x), problem.y[:1]


def somewhere(problem: Problem) -> dict[str, np.ndarray]:
    """A generic point, for computations whose result does not depend on the point.

    No two elements of a site are equal: a curvature that changes with the value would otherwise look constant.
    """

    def values(site: Site) -> np.ndarray:
        part, _ = np.modf(np.arange(1, site.size + 1) * 0.6180339887498949)
        return (0.1 + 0.2 * part).reshape(site.unconstrained_shape)

    return {name: values(site) for name, site in problem.program.sites.items()}


def untransformed(problem: Problem) -> set[str]:
    """The sites whose unconstrained coordinates are the values that the program reads, as found at two points."""
    program, to_numpy = problem.program, problem.system.to_numpy

    def find() -> set[str]:
        same = {name for name, site in program.sites.items() if site.shape == site.unconstrained_shape}
        for shift in (0.0, 0.7):
            moved = {name: value + shift for name, value in somewhere(problem).items()}
            u = system_values(problem, moved)
            w = program.constrain(u, *first_rows(problem))
            same = {name for name in same if np.array_equal(to_numpy(u[name]), to_numpy(w[name]))}
        return same

    return program.cached("untransformed", find)


@dataclass(frozen=True)
class Where:
    """The part of the flat vector that a curvature covers: the `sites` involved and the `size` of their flat vector.

    `kept` are the positions in that vector; None for all.
    """

    sites: tuple[str, ...]
    size: int
    kept: np.ndarray | None

    @classmethod
    def of(cls, problem: Problem, positions: np.ndarray | None) -> Where:
        """The part at increasing positions (Q,) in the flat vector; None for the whole vector."""
        every = site_slices(problem)
        total = max(at.stop for at in every.values())
        if positions is None:
            return cls(tuple(every), total, None)
        positions = np.asarray(positions)
        numbers = positions.ndim == 1 and len(positions) > 0 and np.issubdtype(positions.dtype, np.integer)
        if not numbers or np.any(np.diff(positions) <= 0) or positions[0] < 0 or positions[-1] >= total:
            wanted = f"increasing whole numbers from 0 to {total - 1}"
            got = f"{positions.dtype} of shape {positions.shape}"
            advice = "np.flatnonzero(mask) with a mask over the flat vector"
            raise InputError.of("positions", wanted, got, advice)
        inside = {name: (positions >= at.start) & (positions < at.stop) for name, at in every.items()}
        sites = tuple(name for name in every if inside[name].any())
        local = site_slices(problem, sites)
        kept = np.concatenate([positions[inside[n]] - every[n].start + local[n].start for n in sites])
        size = max(at.stop for at in local.values())
        return cls(sites, size, None if len(kept) == size else kept)

    @property
    def count(self) -> int:
        """Q, the number of positions."""
        return self.size if self.kept is None else len(self.kept)

    def chosen(self, array: np.ndarray) -> np.ndarray:
        """Select the positions along the last axis, (..., size) to (..., Q)."""
        return array if self.kept is None else array[..., self.kept]

    def spread(self, chosen: np.ndarray) -> np.ndarray:
        """The inverse of `chosen`, with zeros at the other positions."""
        if self.kept is None:
            return chosen
        whole = np.zeros((*chosen.shape[:-1], self.size), chosen.dtype)
        whole[..., self.kept] = chosen
        return whole
