"""The evidence of a problem at a mode: from a program and its curvature to the inputs of `evidence.py`.

Factors on the precisions of Normal priors, by groups of weights, and on the precision of Gaussian noise are tuned. The
evidence is log p(D | held sites): it does not include the prior density of sites that are held at a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference import flat_vector
from ppl_bnn.inference.curvature.prior import parents, prior_curvature, site_densities, traced_latents
from ppl_bnn.inference.curvature.structures import DataCurvature
from ppl_bnn.inference.flat_vector import Values
from ppl_bnn.inference.laplace.evidence import Evidence, groups_of
from ppl_bnn.inference.laplace.noise import gaussian_noise
from ppl_bnn.inference.optimisation.mode import Changes


def _inside(problem: Problem, positions: np.ndarray) -> dict[str, np.ndarray]:
    """For each latent site, which of its elements are among the positions of the flat vector."""
    inside = np.zeros(sum(site.size for site in problem.program.latents), dtype=bool)
    inside[positions] = True
    return {name: inside[at] for name, at in flat_vector.site_slices(problem).items()}


def log_likelihood(problem: Problem, u: Values) -> float:
    """The log likelihood log p(y | x, w(u)), over all rows."""
    program, system = problem.program, problem.system

    def total_of(u: Any, x: Any, y: Any) -> Any:
        return program.log_likelihood(u, x, y).sum()

    total = program.cached("log likelihood", lambda: system.compile(total_of))
    return float(total(flat_vector.system_values(problem, u), problem.x, problem.y))


def log_prior(problem: Problem, u: Values, positions: np.ndarray) -> float:
    """The log prior density (with log |dw/du|) of the positions of the flat vector, at u.

    `UnsupportedError` if the positions are part of a site whose elements depend on each other.
    """
    if not len(positions):
        return 0.0
    prior, densities = 0.0, site_densities(problem, u)
    for name, chosen in _inside(problem, positions).items():
        elements, volume = densities[name]
        if chosen.all():
            prior += float(elements.sum() + volume)
        elif chosen.any():
            where, expected = f"site {name!r}", "a prior that is independent over elements"
            good = len(elements) == len(chosen)
            UnsupportedError.check(good, where, expected, "one that is not", "whole layers")
            prior += float(elements[chosen].sum())
    return prior


@dataclass(frozen=True)
class Tuning:
    """Which weights of a problem share a factor, and how a mode and an evidence follow from factors.

    `positions` (Q,) of the Gaussian have `groups` (Q,), named `names` (G,). Those in `held` have no Normal prior and
    stay unchanged. `location` and `precision` (Q,) are those of the Normal priors.
    """

    problem: Problem
    positions: np.ndarray
    groups: np.ndarray
    names: tuple[str, ...]
    held: tuple[str, ...]
    location: np.ndarray
    precision: np.ndarray

    @classmethod
    def of(cls, problem: Problem, u: Values, positions: np.ndarray, per: str) -> Tuning:
        """Groups over the sites with Normal priors, by `per`; "none" leaves all priors unchanged.

        `UnsupportedError` if there is no Normal prior to tune, or priors depend on other sites.
        """
        sites = problem.program.sites
        inside = {name: chosen for name, chosen in _inside(problem, positions).items() if chosen.any()}
        above = parents(problem, u)
        names = [] if per == "none" else list(inside)
        normal = [name for name in names if sites[name].family == "Normal" and not above[name]]
        dependent = [name for name in inside if above[name]]
        where, got = f"Laplace(tune={per!r})", f"scales of their own for {', '.join(dependent)}"
        advice = f"marginal={sorted(set().union(*(above[name] for name in dependent)))}"
        expected = "priors that depend on no other site"
        UnsupportedError.check(per == "none" or not dependent, where, expected, got, advice)
        families = ", ".join(sorted({sites[name].family for name in inside}))
        expected, advice = "a Normal prior, whose precision can be tuned", "priors.Normal, or tune='none'"
        UnsupportedError.check(per == "none" or normal, where, expected, families, advice)
        sizes = {name: int(chosen.sum()) for name, chosen in inside.items()}
        index, names = groups_of([(name, sizes[name]) for name in normal], per) if normal else (0, ())
        tunable = np.isin(list(inside), normal)
        held = tuple(f"{name} (as written)" for name in inside if name not in normal)
        # The site of each position, and its group if that site is held.
        owner = np.repeat(np.arange(len(inside)), list(sizes.values()))
        groups = (len(names) - 1 + np.cumsum(~tunable))[owner]
        groups[tunable[owner]] = index
        location, precision = np.zeros((2, len(positions)))
        values, to_numpy = flat_vector.system_values(problem, u), problem.system.to_numpy
        traced = traced_latents(problem, values, *flat_vector.first_rows(problem))
        for number, (name, chosen) in enumerate(inside.items()):
            if name in normal:
                distribution, shape = traced[name].distribution, sites[name].shape
                mean, variance = to_numpy(distribution.mean), to_numpy(distribution.variance).astype(float)
                location[owner == number] = np.broadcast_to(mean, shape).reshape(-1)[chosen]
                precision[owner == number] = 1.0 / np.broadcast_to(variance, shape).reshape(-1)[chosen]
        return cls(problem, positions, groups, (*names, *held), held, location, precision)

    @property
    def tuned(self) -> np.ndarray:
        """The groups that are not held, (G,) of bool."""
        return ~np.isin(np.asarray(self.names), self.held)

    @property
    def ones(self) -> np.ndarray:
        """Factors (G,) that leave the model unchanged."""
        return np.ones(len(self.names))

    def evidence(self, u: Values, curvature: DataCurvature, prior: np.ndarray, with_noise: bool) -> Evidence:
        """The evidence at the mode u as a function of factors; curvature and prior (Q,) there, at factors of 1."""
        problem, tuned = self.problem, self.tuned[self.groups]
        return Evidence(
            curvature.determinant(prior, self.groups),
            self.groups,
            prior=np.where(tuned, self.precision, prior),
            mode=flat_vector.flat_latents(problem, u)[self.positions],
            likelihood=gaussian_noise(problem, u).likelihood if with_noise else log_likelihood(problem, u),
            names=self.names,
            location=self.location,
            held=self.held,
            log_prior_held=log_prior(problem, u, self.positions[~tuned]),
        )

    def prior(self, u: Values) -> np.ndarray:
        """The prior's curvature at u over the positions, at factors of 1: (Q,)."""
        prior = prior_curvature(self.problem, u)
        expected = "priors that are independent over elements, to tune them or the noise"
        got, advice = "a prior with dependence between sites", "marginal=, or bnn.noncentred(model)"
        UnsupportedError.check(prior.ndim == 1, "Laplace", expected, got, advice)
        return prior[self.positions]

    @property
    def places(self) -> np.ndarray:
        """The positions (Q,) in the flat vector of all sites, parameters without a prior included."""
        return flat_vector.latent_places(self.problem)[self.positions]

    def changes(self, factors: np.ndarray, scale: float) -> Changes:
        """The changes of the log joint by the factors, over the flat vector of all sites."""
        penalty, location = np.zeros((2, self.problem.program.parameter_count))
        penalty[self.places] = (factors[self.groups] - 1.0) * self.precision
        location[self.places] = self.location
        return Changes(penalty, location, scale)

    def site_factors(self, factors: np.ndarray) -> dict[str, np.ndarray]:
        """Site -> factor on its prior's precision: a number if it is the same for the whole site, else an array."""
        slices, sites = flat_vector.site_slices(self.problem), self.problem.program.sites
        each = np.ones(sum(site.size for site in self.problem.program.latents))
        each[self.positions] = factors[self.groups]
        parts = {name: each[at] for name, at in slices.items() if not np.all(each[at] == 1.0)}
        return {
            name: np.asarray(part[0]) if np.all(part == part[0]) else part.reshape(sites[name].shape)
            for name, part in parts.items()
        }
