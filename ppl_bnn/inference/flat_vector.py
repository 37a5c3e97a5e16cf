"""The flat vector: unconstrained coordinates of the latent sites, ravelled in the order of the program.

Gaussians, curvatures and Jacobians are over this vector or over some of its positions. `system_values` goes back from
NumPy to arrays of a system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import InputError, UnsupportedError, message


def latent_names(problem: Problem) -> list[str]:
    """The sites over which a Gaussian is put: all random variables, not the parameters without a prior."""
    names = [site.name for site in problem.program.latents]
    if not names:
        raise UnsupportedError(message("at least one site with a prior", "point estimates only", "MAP()"))
    return names


def flat_latents(problem: Problem, u: Mapping[str, np.ndarray]) -> np.ndarray:
    """The flat vector (P,) of the latent sites, NumPy."""
    return np.concatenate([np.asarray(u[name], dtype=float).reshape(-1) for name in latent_names(problem)])


def latent_places(problem: Problem) -> np.ndarray:
    """Where the flat vector (P,) of the latent sites lies in that of all sites, parameters without a prior included."""
    sites = problem.program.sites.values()
    return np.flatnonzero(np.concatenate([np.full(site.size, not site.is_param) for site in sites]))


def site_slices(problem: Problem, names: Sequence[str] | None = None) -> dict[str, slice]:
    """Where each latent site lies in the flat vector (or in that of `names` alone)."""
    slices, start = {}, 0
    for name in names or latent_names(problem):
        slices[name] = slice(start, start + problem.program.sites[name].size)
        start += problem.program.sites[name].size
    return slices


def system_values(problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """u as arrays of the system, in the shapes of the program."""
    sites = problem.program.sites
    return {
        name: problem.system.asarray(np.asarray(u[name], dtype=float).reshape(site.unconstrained_shape))
        for name, site in sites.items()
    }


def first_rows(problem: Problem) -> tuple[Any, Any]:
    """Data for what needs no more than their shape: transforms to the coordinates of the program, and priors."""
    program = problem.program
    if program.has_local or program.coupled or not program.language:
        return problem.x, problem.y
    return map_data(lambda a: a[:1], problem.x), problem.y[:1]


def somewhere(problem: Problem) -> dict[str, np.ndarray]:
    """A point that tells what any would. No two elements of a site are alike there, or a prior whose curvature changes
    with the value would look as if it had one for the whole tensor.
    """
    return {
        name: (0.1 + 0.2 * np.modf(np.arange(1, site.size + 1) * 0.6180339887498949)[0]).reshape(
            site.unconstrained_shape
        )
        for name, site in problem.program.sites.items()
    }


@dataclass(frozen=True)
class Where:
    """The part of the flat vector that a curvature is over.

    sites: those with at least one position in it. size: of their own flat vector. kept: positions in that, or None
    for all.
    """

    sites: tuple[str, ...]
    size: int
    kept: np.ndarray | None

    @classmethod
    def of(cls, problem: Problem, positions: np.ndarray | None) -> Where:
        """From increasing positions (Q,), or None for the whole flat vector."""
        every = site_slices(problem)
        total = max(at.stop for at in every.values())
        if positions is None:
            return cls(tuple(every), total, None)
        positions = np.asarray(positions)
        if (
            positions.ndim != 1
            or len(positions) == 0
            or not np.issubdtype(positions.dtype, np.integer)
            or np.any(np.diff(positions) <= 0)
            or positions[0] < 0
            or positions[-1] >= total
        ):
            raise InputError(
                "positions: "
                + message(
                    f"increasing whole numbers from 0 to {total - 1}",
                    f"{positions.dtype} of shape {positions.shape}",
                    "np.flatnonzero(mask) with a mask over the flat vector",
                )
            )
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
        """The last axis, restricted to the positions."""
        return array if self.kept is None else array[..., self.kept]
