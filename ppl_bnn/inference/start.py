"""Starting points of a fit: draws from the prior, the result of another method, a posterior, or given values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import InputError, UnsupportedError, unknown_name
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.flat_vector import with_values
from ppl_bnn.inference.pretrained import is_network, weights_of
from ppl_bnn.posterior.posterior import Posterior

# A method, a Posterior, a dict of arrays (constrained values), a trained network (see `pretrained`), or None.
Start = Any


def _is_method(start: Start) -> bool:
    """Whether a start is a method, whose module imports this one."""
    return hasattr(start, "fit") and hasattr(start, "refusal")


def check_start(problem: Problem, start: Start) -> None:
    """Refuse a start of another type or model, with wrong shapes, or a method that does not support the model."""
    if _is_method(start):
        if error := _called_for(problem, start.refusal):
            raise error
    elif isinstance(start, Posterior):
        u = start.approximation.draw(1, np.random.default_rng(0))
        _matching(problem, {name: value[0] for name, value in u.items()})
    elif start is not None:
        _given_values(problem, start)


def resolve_start(
    problem: Problem, start: Start, progress: Progress, count: int = 1
) -> list[dict[str, np.ndarray]]:
    """`count` starting points for a problem, each site -> array (NumPy) in unconstrained coordinates.

    - None: draws from the prior.
    - A method: it is fitted first, once per starting point, each with its own seed.
    - A posterior: draws from it, or its point if it is one.
    - A dict of constrained values, site to array. Other sites are drawn from the prior.
    - A trained network (a torch module, Flax parameters): a dict of weights, as `pretrained.weights_of` finds them.
    """
    if _is_method(start):
        fitted = (fitted_start(problem, start, progress, index) for index in range(count))
        return [_matching(problem, posterior.approximation.centre()) for posterior in fitted]
    if isinstance(start, Posterior):
        if start.kind == "point":
            return [_matching(problem, start.approximation.centre())] * count
        u = start.approximation.draw(count, np.random.default_rng(problem.seed))
        return [_matching(problem, each) for each in _one_by_one(u, count)]
    program, data = problem.program, (problem.x, problem.y)
    given = {} if start is None else _given_values(problem, start)
    if given and set(given) == set(program.sites):
        return [program.unconstrain(given, *data)] * count
    points = _one_by_one(program.prior_draws(*data, problem.seed, count), count)
    if start is None:
        return points
    return [with_values(problem, point, given) for point in points]


def _one_by_one(u: Mapping[str, np.ndarray], count: int) -> list[dict[str, np.ndarray]]:
    return [{name: value[index] for name, value in u.items()} for index in range(count)]


def _given_values(problem: Problem, start: Start) -> dict[str, np.ndarray]:
    """The values of a dict or of a network by site, checked; some sites may be missing."""
    if is_network(start, problem):
        start = weights_of(start, problem)
    if not isinstance(start, Mapping):
        wanted = "a method, a posterior, a dict of arrays or a network of torch, Flax or Equinox"
        raise InputError.of("start", wanted, type(start).__name__, "start=MAP()")
    sites = problem.program.sites
    for name, value in start.items():
        if name not in sites:
            raise unknown_name("site", name, sites)
        if np.shape(value) != sites[name].shape:
            wanted, got = f"shape {sites[name].shape}", f"shape {np.shape(value)}"
            raise InputError.of(f"start[{name!r}]", wanted, got, "the shape of the site")
    return {name: np.asarray(value, float) for name, value in start.items()}


def _called_for(problem: Problem, function: Callable[..., Any], **options: Any) -> Any:
    """`fit` or `refusal` of a method for the model, the data and the device of a problem."""
    program = problem.program
    observed = None if program.language else program.observed
    data = program.model, problem.inputs, problem.targets
    return function(*data, device=problem.device, observed=observed, **options)


def fitted_start(problem: Problem, start: Any, progress: Progress, index: int = 0) -> Posterior:
    """Fit the method `start` to the data of a problem, with the seed of the problem plus `index`."""
    return _called_for(problem, start.fit, seed=(problem.seed + index) % 2**31, progress=progress)


def central_start(problem: Problem, start: Posterior) -> dict[str, np.ndarray]:
    """The centre of a posterior, for methods that need one point and cannot use a draw."""
    refuse_without_centre(start)
    return _matching(problem, start.approximation.centre())


def refuse_without_centre(start: Any) -> None:
    """Refuse a posterior or a method whose approximation has no mode or mean to use as the mode."""
    if isinstance(start, Posterior):
        good, got = start.approximation.has_centre, start.info.method
    else:
        good, got = getattr(start, "finds_centre", True), getattr(start, "name", "")
    if not good:
        expected = "a start with a centre, to be taken as the mode"
        got = f"{got}, whose draws, members or components have none in common"
        advice = "start=MAP(), or optimise=True, which begins at a draw and finds the mode"
        raise UnsupportedError.of("start", expected, got, advice)


def missing_sites(problem: Problem, start: Start) -> list[str]:
    """The sites that a network or a dict does not name (a network has no noise); none for other starts."""
    if is_network(start, problem):
        start = weights_of(start, problem)
    elif not isinstance(start, Mapping):
        return []
    return [name for name in problem.program.sites if name not in start]


def _matching(problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`u`, checked to have the sites and shapes of the program."""
    wanted = {name: site.unconstrained_shape for name, site in problem.program.sites.items()}
    got = {name: np.shape(value) for name, value in u.items()}
    if wanted != got:
        raise InputError.of("start", f"sites {wanted}", f"sites {got}", "a posterior of the same model")
    return dict(u)
