"""The Hessian of -log p(w(u)) - log |dw/du| in the flat vector of latent sites, and checks for priors without one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ppl_bnn.backends.native import unwrap
from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.protocol import TracedSite
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.processes import machine_memory
from ppl_bnn.inference import flat_vector
from ppl_bnn.inference.curvature.gaussians import Rotated
from ppl_bnn.inference.curvature.jacobian import hessian_product
from ppl_bnn.inference.curvature.kronecker import TensorPrior
from ppl_bnn.inference.flat_vector import Values
from ppl_bnn.language import ops

# Families that are a product over elements: those of the language, by their names in both systems.
_ELEMENTWISE = {
    "Normal", "StudentT", "Cauchy", "LogNormal", "HalfNormal", "HalfCauchy", "Gamma", "InverseGamma", "Exponential",
    "Beta", "Uniform", "NormalMixture", "MixtureSameFamily",
}  # fmt: skip


def _of_prior(problem: Problem, u: Values, name: str, derivative: Any) -> np.ndarray:
    """A derivative of -log p(w(u)) - log |dw/du| in the flat latents, float64; derivative: function -> function."""
    program, system, names = problem.program, problem.system, flat_vector.latent_names(problem)

    def minus_log_prior(flat: Any, values: Any, x: Any, y: Any) -> Any:
        return -program.log_prior({**values, **program.unravel(flat, names)}, x, y)

    function = program.cached(name, lambda: system.compile(derivative(minus_log_prior)))
    flat = system.asarray(flat_vector.flat_latents(problem, u))
    found = function(flat, flat_vector.system_values(problem, u), *flat_vector.first_rows(problem))
    return system.to_numpy(found).astype(np.float64)


def prior_hessian(problem: Problem, u: Values) -> np.ndarray:
    """The Hessian of the module docstring, dense: (P, P), NumPy float64."""
    hessian = _of_prior(problem, u, "prior hessian", problem.system.hessian)
    return 0.5 * (hessian + hessian.T)


def prior_curvature(problem: Problem, u: Values) -> np.ndarray:
    """The Hessian of -log p(w(u)) - log |dw/du|: its diagonal (P,) if it is diagonal, otherwise (P, P).

    It is diagonal if priors are independent over elements and sites. Its product with ones is then the diagonal.
    """
    return prior_hessian(problem, u) if _is_dependent(problem, u) else _row_sums(problem, u)


def _is_dependent(problem: Problem, u: Values) -> bool:
    """Whether elements or sites depend on each other under the prior."""
    program = problem.program
    elementwise = program.language and all(site.family in _ELEMENTWISE for site in program.latents)
    return not elementwise or any(parents(problem, u).values())


def check_prior_fits(problem: Problem, u: Values) -> None:
    """Raise `UnsupportedError` if the curvature of the prior is a matrix that cannot fit into memory."""
    size, available = sum(site.size for site in problem.program.latents), machine_memory() or math.inf
    # The matrix, its transpose and the precision.
    needed = 3 * 8 * size**2
    if needed > available and _is_dependent(problem, u):
        expected = f"a prior whose elements are independent, for {size:,} weights"
        got = f"one with a dense curvature, {needed / 1e9:,.3g} GB"
        advice = "priors.Normal with scales that are numbers, bnn.noncentred(model), or structure='kron'"
        raise UnsupportedError.of("Laplace", expected, got, advice)


def _row_sums(problem: Problem, u: Values) -> np.ndarray:
    """The Hessian times a vector of ones, (P,)."""
    system = problem.system

    def derivative(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda flat, *rest: hessian_product(system, function, flat, *rest)(ops.ones_like(flat))

    return _of_prior(problem, u, "prior row sums", derivative)


def site_curvatures(problem: Problem, u: Values) -> dict[str, TensorPrior] | None:
    """Hessian of -log p(w(u)) - log |dw/du| by site; None for other priors, or priors that depend on a site.

    A site is (p,) for independent elements, (p, p) for a multivariate (log-)normal, `Rotated` for `KroneckerNormal`.
    """
    program, to_numpy = problem.program, problem.system.to_numpy
    if not program.language or any(parents(problem, u).values()):
        return None
    slices, sums = flat_vector.site_slices(problem), _row_sums(problem, u)
    traced = traced_latents(problem, flat_vector.system_values(problem, u), *flat_vector.first_rows(problem))
    found: dict[str, TensorPrior] = {}
    for site in program.latents:
        distribution = unwrap(traced[site.name].distribution)
        if site.family in _ELEMENTWISE:
            found[site.name] = sums[slices[site.name]]
        elif site.family == "KroneckerNormal":
            names = ("left_vectors", "right_vectors", "precisions")
            found[site.name] = Rotated(*(to_numpy(getattr(distribution, name)) for name in names))
        elif site.family in ("MultivariateNormal", "MultivariateLogNormal"):
            root = np.asarray(to_numpy(distribution.scale_tril), dtype=np.float64)
            if root.shape != (site.size, site.size):
                return None
            half = np.linalg.inv(root)
            found[site.name] = half.T @ half
        else:
            return None
    return found


def parents(problem: Problem, u: Values) -> dict[str, set[str]]:
    """For each latent site, the latent sites on which its prior depends, also through data.

    Each site is moved, and the others are scored. A dependence that does not change the density at u is missed.
    """

    def find() -> dict[str, set[str]]:
        before = site_densities(problem, u)
        found: dict[str, set[str]] = {name: set() for name in before}
        for name in found:
            # Each element moves by a different amount, to break symmetries.
            moved = np.asarray(u[name]) + flat_vector.somewhere(problem)[name]
            after = site_densities(problem, {**u, name: moved})
            for other in found:
                if other != name and not all(map(np.array_equal, before[other], after[other])):
                    found[other].add(name)
        return found

    return problem.program.cached("parents", find)


def site_densities(problem: Problem, u: Values) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Log prior density (by element; one number if elements depend on each other) and log |dw/du|, by site."""
    program, system = problem.program, problem.system

    def densities(values: Any, x: Any, y: Any) -> dict[str, Any]:
        found = {}
        for name, site in traced_latents(problem, values, x, y).items():
            distribution = site.distribution
            while type(distribution).__name__ == "Independent":
                distribution = distribution.base_dist
            found[name] = distribution.log_prob(site.value).reshape(-1), site.log_det
        return found

    function = program.cached("site densities", lambda: system.compile(densities))
    found = function(flat_vector.system_values(problem, u), *flat_vector.first_rows(problem))
    return {
        name: (system.to_numpy(found[name][0]), np.asarray(system.to_numpy(found[name][1])))
        for name in flat_vector.latent_names(problem)
    }


def traced_latents(problem: Problem, values: Mapping[str, Any], x: Any, y: Any) -> dict[str, TracedSite]:
    """The latent sites of one run at unconstrained values, with their distributions there."""
    return {site.name: site for site in problem.program.run(values, x, y) if site.kind == "latent"}


# Coordinates at which a scale is checked: far from any mode, and with squares that every floating type represents.
_FAR = (-10.0, -20.0, -30.0, -40.0)


def check_bounded(problem: Problem, u: Values, ignore: Sequence[str] = ()) -> None:
    """Refuse models whose joint density has no mode, because a scale can go to zero with the sites that it scales.

    If w_i ~ N(0, s^2), i = 1..K, with s = exp(u) sampled too and a density that is positive at zero, the joint density
    at w = 0 is exp(-(K - 1) u), without bound. So each site with dependents (but for `ignore`) is moved to -10, -20,
    -30, -40, and its dependents to their locations. The log prior is unbounded if it grows by the same amount each
    time, and the density of the dependents grows too. A site that affects only locations leaves that unchanged.
    """
    program, system = problem.program, problem.system
    family, values = parents(problem, u), flat_vector.system_values(problem, u)
    x, y = flat_vector.first_rows(problem)
    for name in flat_vector.latent_names(problem):
        if name in ignore or not any(name in above for above in family.values()):
            continue
        below: list[str] = []
        for child, above in family.items():
            if above & {name, *below}:
                below.append(child)
        densities, heights = [], []
        for far in _FAR:
            moved = {**values, name: values[name] * 0.0 + far}
            # In the order of the program: a location may depend on sites that were moved before.
            for child in below:
                site = traced_latents(problem, moved, x, y)[child]
                moved[child] = system.unconstrain(site.distribution, _location(site))
            densities.append(float(system.to_numpy(program.log_prior(moved, x, y))))
            sites = traced_latents(problem, moved, x, y)
            each = (sites[child].distribution.log_prob(sites[child].value) for child in below)
            heights.append(sum(float(system.to_numpy(density).sum()) for density in each))
        steps = np.diff(densities)
        even = np.all(np.isfinite(steps)) and abs(steps[-1] - steps[-2]) < 0.01 * steps[-1]
        unbounded = even and steps[-1] > 0.5 and heights[-1] - heights[-2] > 0.5
        children = ", ".join(sorted(child for child, above in family.items() if name in above))
        got = f"one that grows without bound as {name!r} goes to zero with {children} at its centre"
        advice = f"Laplace(marginal=[{name!r}]), bnn.noncentred(model), or NUTS or SVI"
        UnsupportedError.check(not unbounded, f"site {name!r}", "a joint density with a mode", got, advice)


def _location(site: TracedSite) -> Any:
    """The centre of a prior, shaped as its value: the location, or the scale if there is none (half-normals)."""
    base = site.distribution
    while hasattr(base, "base_dist") and not hasattr(base, "loc"):
        base = base.base_dist
    centre = getattr(base, "loc", getattr(base, "scale", None))
    return site.value if centre is None else site.value * 0.0 + centre


def check_smooth(problem: Problem) -> None:
    """Refuse Laplace priors, whose kinks are at modes. Edges of a uniform prior are at infinity in u."""
    for site in problem.program.latents:
        smooth = site.family not in ("Laplace", "SoftLaplace", "AsymmetricLaplace")
        where, expected = f"site {site.name!r}", "a prior with a twice differentiable log density"
        got = f"a {site.family} prior, which has a kink at its centre, where modes lie"
        advice = "priors.Normal or priors.StudentT, or NUTS or SVI with this one"
        UnsupportedError.check(smooth, where, expected, got, advice)
