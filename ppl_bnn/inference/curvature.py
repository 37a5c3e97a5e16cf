"""Curvature at a point, written once over the protocol.

The generalised Gauss-Newton matrix is sum_n J_n' F_n J_n: J_n (D, P) is the Jacobian of the predictor eta_n in the flat
vector of latent sites, F_n (D, D) the Fisher information of p(y_n | eta_n) in eta. It is never indefinite, and for
canonical links it uses the Hessian of -log p(y | f) itself (Martens 2020). Taking the Fisher information in place of
that Hessian is what keeps heteroscedastic noise positive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ppl_bnn.errors import UnsupportedError, message
from ppl_bnn.ppl.protocol import Problem, chunks, map_data, padded, row_count


def latent_names(problem: Problem) -> list[str]:
    """The sites over which a Gaussian is put: all random variables, not the parameters without a prior."""
    names = [site.name for site in problem.program.latents]
    if not names:
        raise UnsupportedError(message("at least one site with a prior", "point estimates only", "MAP()"))
    return names


def flat_latents(problem: Problem, u: Mapping[str, np.ndarray]) -> np.ndarray:
    """The flat vector (P,) of the latent sites, NumPy."""
    return np.concatenate([np.asarray(u[name], dtype=float).reshape(-1) for name in latent_names(problem)])


def _with_latents(problem: Problem, u: Mapping[str, np.ndarray]) -> Callable[[Any], dict[str, Any]]:
    """flat -> u, with the parameters held at their values."""
    program, names = problem.program, latent_names(problem)
    held = {site.name: problem.system.asarray(u[site.name]) for site in program.params}
    return lambda flat: {**held, **program.unravel(flat, names)}


def jacobians(
    problem: Problem, u: Mapping[str, np.ndarray], x: Any, memory: int
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Predictor eta (B, D) and its Jacobian (B, D, P) in the flat vector at u, for chunks of the rows of x (NumPy).

    One reverse pass per output, vectorised over rows, so that the cost of a row is D gradients.
    """
    program, system = problem.program, problem.system
    if program.coupled:
        raise UnsupportedError(
            message("rows that do not interact", "bnn.coupled() in the model", "NUTS or SVI")
        )
    first_x = map_data(lambda a: a[:1], problem.x)
    first_y = problem.y[:1]

    def build() -> Callable[..., Any]:
        def eta(flat: Any, held: Any, row: Any) -> Any:
            values = {**held, **program.unravel(flat, latent_names(problem))}
            # Transforms to the coordinates of the program need no data, only its shape.
            w = program.constrain(values, first_x, first_y)
            return program.predictor(w, map_data(lambda a: a[None], row))[0]

        def both(flat: Any, held: Any, row: Any) -> Any:
            return eta(flat, held, row), system.jacobian(eta)(flat, held, row)

        return system.compile(system.vmap(both, in_axes=(None, None, 0)))

    function = program._cached("jacobians", build)
    flat = system.asarray(flat_latents(problem, u))
    held = {site.name: system.asarray(u[site.name]) for site in program.params}
    rows = row_count(x)
    # Held per row: the Jacobian itself, its product with F, and what reverse mode keeps.
    chunk = max(1, min(rows, memory // (8 * 8 * max(1, len(flat)))))
    for start, stop in chunks(rows, chunk):
        part = map_data(lambda a, i=start, j=stop: system.asarray(padded(np.asarray(a[i:j]), chunk)), x)
        value, jacobian = function(flat, held, part)
        count = stop - start
        yield slice(start, stop), system.to_numpy(value)[:count], system.to_numpy(jacobian)[:count]


def gauss_newton(problem: Problem, u: Mapping[str, np.ndarray], memory: int = 2**28) -> np.ndarray:
    """sum_n J_n' F_n J_n over the training rows, (P, P), NumPy float64."""
    likelihood = problem.program.likelihood
    total: np.ndarray | None = None
    for _, eta, jacobian in jacobians(problem, u, problem.inputs, memory):
        fisher = np.asarray(likelihood.fisher(eta), dtype=np.float64)
        size = jacobian.shape[-1]
        left = jacobian.astype(np.float64, copy=False)
        weighted = fisher @ left
        part = left.reshape(-1, size).T @ weighted.reshape(-1, size)
        total = part if total is None else total + part
    assert total is not None
    return 0.5 * (total + total.T)


def prior_hessian(problem: Problem, u: Mapping[str, np.ndarray]) -> np.ndarray:
    """Hessian of -log p(w(u)) - log |dw/du| in the flat vector of latent sites, (P, P), NumPy float64."""
    program, system = problem.program, problem.system
    expand = _with_latents(problem, u)
    x, y = map_data(lambda a: a[:1], problem.x), problem.y[:1]
    if program.has_local or program.coupled or not program.language:
        x, y = problem.x, problem.y

    def minus_log_prior(flat: Any) -> Any:
        return -program.log_prior(expand(flat), x, y)

    flat = system.asarray(flat_latents(problem, u))
    hessian = system.to_numpy(system.compile(system.hessian(minus_log_prior))(flat)).astype(np.float64)
    return 0.5 * (hessian + hessian.T)


def check_smooth(problem: Problem) -> None:
    """Refuse priors that have no curvature at a mode, by name.

    Raises
    ------
    UnsupportedError: a Laplace or uniform prior, whose log density has a kink or an edge.
    """
    for site in problem.program.latents:
        if site.family in ("Laplace", "SoftLaplace", "AsymmetricLaplace"):
            raise UnsupportedError(
                f"site {site.name!r}: "
                + message(
                    "a prior with a twice differentiable log density",
                    f"a {site.family} prior, which has a kink at its centre, where modes lie",
                    "priors.Normal or priors.StudentT, or NUTS or SVI with this one",
                )
            )
