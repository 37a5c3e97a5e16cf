"""The evidence of a problem at a mode: from a program and its curvature to the inputs of `evidence.py`.

The tuned quantities are factors on the precisions of Normal priors, by groups of weights, and a factor on the precision
of Gaussian noise. The evidence is log p(D | held sites), that of the coordinates of the Gaussian: it does not include
the prior density of sites that are held at a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.curvature.prior import parents, prior_curvature, site_densities, traced_latents
from ppl_bnn.inference.flat_vector import (
    first_rows,
    flat_latents,
    latent_names,
    latent_places,
    site_slices,
    system_values,
)
from ppl_bnn.inference.laplace.evidence import Evidence, GaussianNoise, groups_of
from ppl_bnn.inference.optimisation.mode import Changes
from ppl_bnn.language.handlers import network_output
from ppl_bnn.language.likelihoods import Gaussian


def log_likelihood(problem: Problem, u: Mapping[str, np.ndarray]) -> float:
    """The log likelihood log p(y | x, w(u)), over all rows.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.
    """
    program, system = problem.program, problem.system
    total = program.cached(
        "log likelihood", lambda: system.compile(lambda u, x, y: program.log_likelihood(u, x, y).sum())
    )
    return float(total(system_values(problem, u), problem.x, problem.y))


def log_prior(problem: Problem, u: Mapping[str, np.ndarray], positions: np.ndarray) -> float:
    """The log prior density (with log |dw/du|) of the positions of the flat vector, at u.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.
    positions : ndarray
        Positions of the flat vector.

    Raises
    ------
    UnsupportedError
        The positions are part of a site whose elements depend on each other.
    """
    if not len(positions):
        return 0.0
    inside = np.zeros(max(at.stop for at in site_slices(problem).values()), dtype=bool)
    inside[positions] = True
    prior = 0.0
    densities = site_densities(problem, u)
    for name, at in site_slices(problem).items():
        (elements, volume), chosen = densities[name], inside[at]
        if chosen.all():
            prior += float(elements.sum() + volume)
        elif chosen.any():
            if len(elements) != len(chosen):
                raise UnsupportedError.of(
                    f"site {name!r}",
                    "a prior that is independent over elements",
                    "one that is not",
                    "whole layers",
                )
            prior += float(elements[chosen].sum())
    return prior


# --- noise ----------------------------------------------------------------------------------------


def noise_sites(problem: Problem, u: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """The latent sites of a Gaussian likelihood's noise: those that affect log noise and not f.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.
    """
    program, system = problem.program, problem.system
    if not isinstance(program.likelihood, Gaussian):
        return ()
    known: dict[str, tuple[str, ...]] = program.cached("noise sites", dict)
    if "all" in known:
        return known["all"]
    x, y = first_rows(problem)
    w = program.constrain(system_values(problem, u), x, y)
    seen = program.language and not program.has_local
    if seen and isinstance(network_output(program.model, w, x).likelihood.noise, int | float):
        known["all"] = ()
        return ()

    def finite(values: Mapping[str, Any]) -> np.ndarray:
        return np.isfinite(system.to_numpy(program.predictor(values, x))[0])

    found = []
    for name in latent_names(problem):
        eta = finite({**w, name: w[name] * float("nan")})
        outputs = len(eta) // 2
        if eta[:outputs].all() and not eta[outputs:].all():
            found.append(name)
    # The outputs that a site affects are the same at every u, but they cannot be detected where the network overflows.
    if finite(w).all():
        known["all"] = tuple(found)
    return tuple(found)


@dataclass(frozen=True)
class Noise:
    """The noise of a Gaussian likelihood.

    Parameters
    ----------
    site : str or None
        The site of the noise, None for a number.
    value : ndarray
        Its value.
    likelihood : GaussianNoise
        The terms of the evidence at the mode.
    """

    site: str | None
    value: np.ndarray
    likelihood: GaussianNoise


def gaussian_noise(problem: Problem, u: Mapping[str, np.ndarray]) -> Noise:
    """The noise of a Gaussian likelihood, for tuning.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.

    Raises
    ------
    UnsupportedError
        A likelihood without one noise for all rows, or a noise that is computed from sites.
    """
    program, system = problem.program, problem.system
    advice = "noise='mode', or marginal= with the sites that the noise is made of"
    if not isinstance(program.likelihood, Gaussian):
        raise UnsupportedError.of(
            "Laplace(noise='evidence')",
            "likelihoods.Gaussian(noise)",
            type(program.likelihood).__name__,
            "noise='gaussian'",
        )
    x, y = first_rows(problem)
    w = program.constrain(system_values(problem, u), x, y)
    noise = network_output(program.model, w, x).likelihood.noise
    site = next((name for name, value in w.items() if value is noise), None)
    if site is None and not isinstance(noise, int | float):
        raise UnsupportedError.of(
            "Laplace(noise='evidence')",
            "a noise that is a number or a site of its own",
            "one that is computed",
            advice,
        )
    draws = {name: system.to_numpy(value)[None] for name, value in w.items()}
    eta = program.predictor_draws(draws, problem.inputs)[0].astype(float)
    outputs = eta.shape[-1] // 2
    residuals = np.asarray(problem.targets, float).reshape(len(eta), outputs) - eta[:, :outputs]
    likelihood = GaussianNoise.of(residuals, np.exp(-2.0 * eta[:, outputs:]))
    value = np.asarray(noise if site is None else system.to_numpy(w[site]), dtype=float)
    return Noise(site, value, likelihood)


# --- the evidence as a function of hyper-parameters -----------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """Which weights of a problem share a factor, and how a mode and an evidence follow from factors.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    positions : ndarray
        The positions of the flat vector of latent sites that the Gaussian is over, (Q,).
    groups : ndarray
        The group of each position, (Q,).
    names : tuple of str
        Names of the groups, (G,).
    held : tuple of str
        Groups whose priors are not Normal, and stay unchanged.
    location, precision : ndarray
        Of the Normal priors, (Q,).
    noise : bool
        Whether the noise is tuned too.
    curvature_at : callable
        u -> the data curvature over the positions, at factors of 1.
    """

    problem: Problem
    positions: np.ndarray
    groups: np.ndarray
    names: tuple[str, ...]
    held: tuple[str, ...]
    location: np.ndarray
    precision: np.ndarray
    noise: bool
    curvature_at: Callable[[Mapping[str, np.ndarray]], Any]

    @classmethod
    def of(
        cls,
        problem: Problem,
        u: Mapping[str, np.ndarray],
        positions: np.ndarray,
        per: str,
        noise: bool,
        curvature_at: Callable[[Mapping[str, np.ndarray]], Any],
    ) -> Tuning:
        """Groups over the sites with Normal priors; per "none" leaves all priors unchanged.

        Raises
        ------
        UnsupportedError
            No Normal prior to tune, or priors that depend on other sites.
        """
        slices, sites = site_slices(problem), problem.program.sites
        traced = traced_latents(problem, system_values(problem, u), *first_rows(problem))
        inside = np.zeros(max(at.stop for at in slices.values()), dtype=bool)
        inside[positions] = True
        present = [(name, int(inside[at].sum())) for name, at in slices.items() if inside[at].any()]
        above = parents(problem, u)
        normal = [
            (name, size)
            for name, size in present
            if sites[name].family == "Normal" and not above[name] and per != "none"
        ]
        if per != "none":
            dependent = [name for name, _ in present if above[name]]
            if dependent:
                raise UnsupportedError.of(
                    f"Laplace(tune={per!r})",
                    "priors that depend on no other site",
                    f"scales of their own for {', '.join(dependent)}",
                    f"marginal={sorted(set().union(*(above[name] for name in dependent)))}",
                )
            if not normal:
                raise UnsupportedError.of(
                    f"Laplace(tune={per!r})",
                    "a Normal prior, whose precision can be tuned",
                    ", ".join(sorted({sites[name].family for name, _ in present})),
                    "priors.Normal, or tune='none'",
                )
        index, names = groups_of(normal, per) if normal else (np.zeros(0, int), ())  # type: ignore[arg-type]
        tuned = {name for name, _ in normal}
        held = tuple(f"{name} (as written)" for name, _ in present if name not in tuned)
        groups, start, other = [], 0, len(names)
        location, precision = [], []
        for name, size in present:
            chosen = inside[slices[name]]
            if name in tuned:
                groups.append(index[start : start + size])
                start += size
                shape = traced[name].value.shape
                mean, variance = (
                    np.broadcast_to(
                        problem.system.to_numpy(getattr(traced[name].distribution, moment)), tuple(shape)
                    ).reshape(-1)[chosen]
                    for moment in ("mean", "variance")
                )
                location.append(mean.astype(float))
                precision.append(1.0 / variance.astype(float))
            else:
                groups.append(np.full(size, other))
                other += 1
                location.append(np.zeros(size))
                precision.append(np.zeros(size))
        return cls(
            problem,
            positions,
            np.concatenate(groups),
            (*names, *held),
            held,
            np.concatenate(location),
            np.concatenate(precision),
            noise,
            curvature_at,
        )

    @property
    def ones(self) -> np.ndarray:
        """Factors (G,) that leave the model unchanged."""
        return np.ones(len(self.names))

    def evidence(self, u: Mapping[str, np.ndarray], prior: np.ndarray) -> Evidence:
        """The evidence at the mode u as a function of factors; prior (Q,): its curvature there, at factors of 1."""
        problem = self.problem
        determinant = self.curvature_at(u).determinant(prior, self.groups)
        likelihood = gaussian_noise(problem, u).likelihood if self.noise else log_likelihood(problem, u)
        tuned = ~np.isin(np.asarray(self.names), self.held)[self.groups]
        kept = self.positions[~tuned]
        return Evidence.of(
            determinant,
            groups=self.groups,
            prior=np.where(tuned, self.precision, prior),
            mode=flat_latents(problem, u)[self.positions],
            location=self.location,
            likelihood=likelihood,
            names=self.names,
            held=self.held,
            log_prior_held=log_prior(problem, u, kept),
        )

    def prior(self, u: Mapping[str, np.ndarray]) -> np.ndarray:
        """The prior's curvature at u over the positions, at factors of 1: (Q,)."""
        prior = prior_curvature(self.problem, u)
        if prior.ndim == 2:
            raise UnsupportedError.of(
                "Laplace",
                "priors that are independent over elements, to tune them or the noise",
                "a prior with dependence between sites",
                "marginal=, or bnn.noncentred(model)",
            )
        return prior[self.positions]

    @property
    def places(self) -> np.ndarray:
        """The positions (Q,) in the flat vector of all sites, parameters without a prior included."""
        return latent_places(self.problem)[self.positions]

    def changes(self, factors: np.ndarray, scale: float) -> Changes:
        """The changes of the log joint by the factors, over the flat vector of all sites."""
        size, at = self.problem.program.parameter_count, self.places
        penalty, location = np.zeros(size), np.zeros(size)
        penalty[at] = (factors[self.groups] - 1.0) * self.precision
        location[at] = self.location
        return Changes(penalty, location, scale)

    def site_factors(self, factors: np.ndarray) -> dict[str, np.ndarray]:
        """Site -> factor on its prior's precision: a number if it is the same for the whole site, else an array."""
        each = np.ones(max(at.stop for at in site_slices(self.problem).values()))
        each[self.positions] = factors[self.groups]
        found = {}
        for name, at in site_slices(self.problem).items():
            part = each[at]
            if np.all(part == 1.0):
                continue
            uniform = np.all(part == part[0])
            found[name] = (
                np.asarray(part[0]) if uniform else part.reshape(self.problem.program.sites[name].shape)
            )
        return found
