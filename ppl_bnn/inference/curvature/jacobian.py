"""The Jacobian of the predictor in the flat vector, row by row, from linear maps; written once over the protocol.

The gradient of a weight (I, O) of a linear map is sum_t a_t g_t', with a_t (I,) the input of the map and g_t (O,) the
gradient at its output, over the T places and uses of the map in one row. `linear_factors` returns a and g, from
which every curvature and every projection is computed without a gradient of a weight for every row. `jacobians`
multiplies them out. A site that is not simply the weight or the bias of linear maps is differentiated directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import chunks, map_data, padded, row_count
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.curvature.gaussians import check_finite
from ppl_bnn.inference.flat_vector import Where, first_rows, latent_names, site_slices, system_values
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import NetworkFunction, RecordLinear, SubstituteLinear

# (eta (B, D), the rows) -> R (B, D, C)
Cotangents = Callable[[np.ndarray, slice], np.ndarray]


# --- linear maps: which sites they are made of ----------------------------------------------------


@dataclass(frozen=True)
class LinearMap:
    """A weight that is a site, with all its uses in a run on one row.

    Parameters
    ----------
    name : str
        The name of its first use.
    weight : str
        The site, a matrix of `shape` in C order.
    bias : str or None
        The site added after each use.
    shape : (int, int)
        (I, O).
    places : int
        T, the number of positions and uses per row.
    uses : tuple
        (name, number of the use under that name) each.
    """

    name: str
    weight: str
    bias: str | None
    shape: tuple[int, int]
    places: int
    uses: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """How the Jacobian of some sites is computed: through linear maps, and directly for the rest.

    Parameters
    ----------
    sites : tuple of str
        The sites.
    maps : dict of LinearMap
        The linear maps.
    rest : tuple of str
        Sites that are differentiated directly.
    added : dict
        Use of a linear map -> shape of its output for one row.
    reached : ndarray
        Outputs (D,) that depend on a linear map (on any site, if there is no map).
    moved : ndarray
        Outputs (D,) that depend on any of the sites.
    activations : int
        Numbers held for one row of a forward pass.
    eta : ndarray
        The predictor (1, D) of one row.
    """

    sites: tuple[str, ...]
    maps: dict[str, LinearMap]
    rest: tuple[str, ...]
    added: dict[tuple[str, int], tuple[int, ...]]
    reached: np.ndarray
    moved: np.ndarray
    activations: int
    eta: np.ndarray

    def floats(self, problem: Problem, width: int) -> int:
        """Numbers returned for one row with `width` cotangents, and held while they are computed."""
        inputs = sum(linear.places * linear.shape[0] for linear in self.maps.values())
        outputs = sum(linear.places * linear.shape[1] for linear in self.maps.values())
        rest = sum(problem.program.sites[name].size for name in self.rest)
        return 2 * inputs + width * (2 * outputs + 2 * rest + self.activations) + 2 * self.activations


def linear_maps(
    problem: Problem, u: Mapping[str, np.ndarray], sites: Sequence[str] | None = None
) -> dict[str, LinearMap]:
    """The linear maps and convolutions whose weight is a latent site that has no other use.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.
    sites : sequence of str or None
        Return only maps with a weight or a bias among these sites, as `linear_factors` with the same `sites` does.

    Returns
    -------
    dict of LinearMap
        Name -> map.
    """
    return dict(plan_of(problem, u, tuple(latent_names(problem) if sites is None else sites)).maps)


def plan_of(problem: Problem, u: Mapping[str, np.ndarray], sites: tuple[str, ...]) -> Plan:
    """The plan of some sites, made once for each program.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.
    sites : tuple of str
        The sites.
    """
    return problem.program.cached(("linear plan", sites), lambda: _make_plan(problem, u, sites))


def refuse_interacting_rows(problem: Problem) -> None:
    """Raise `UnsupportedError` if a row has no Jacobian of its own."""
    if problem.program.coupled:
        raise UnsupportedError.of(
            "", "rows that do not interact", "bnn.coupled() in the model", "NUTS or SVI"
        )


def _make_plan(problem: Problem, u: Mapping[str, np.ndarray], sites: tuple[str, ...]) -> Plan:
    """Make the plan by running the model on one row.

    A weight is served by its linear maps if it is a site, is a coordinate of the Gaussian itself (its transform to the
    coordinates of the program is the identity), and is used nowhere else. The same holds for a bias. All other sites
    are rest.
    """
    program, system = problem.program, problem.system
    refuse_interacting_rows(problem)
    values = system_values(problem, u)
    first_x, first_y = first_rows(problem)
    w = program.constrain(values, first_x, first_y)
    row = map_data(lambda a: a[:1], problem.x)
    eta = system.to_numpy(program.predictor(w, row))
    check_finite("a finite predictor", eta)
    if not program.language:
        everything = np.ones(eta.shape[-1], dtype=bool)
        return Plan(sites, {}, sites, {}, everything, everything, 256, eta)

    with NetworkFunction(w) as run, RecordLinear(values=w) as record:
        program.model(row, None)
    assert isinstance(run, NetworkFunction)
    assert isinstance(record, RecordLinear)
    same = _untransformed(problem, values, w)
    counts: dict[str, int] = {}
    found: dict[str, list[tuple[tuple[str, int], str | None, tuple[int, int], int]]] = {}
    leading: dict[tuple[str, int], tuple[int, ...]] = {}
    for use in record.uses:
        number = counts.setdefault(use.name, 0)
        counts[use.name] += 1
        shape = tuple(map(int, record.inputs[use.name][number].shape[:-1]))
        leading[use.name, number] = (*shape, use.matrix_shape[1])
        if use.weight in same and program.sites[use.weight].size == math.prod(use.matrix_shape):
            entry = ((use.name, number), use.bias, use.matrix_shape, math.prod(shape))
            found.setdefault(use.weight, []).append(entry)
    candidates = {weight for weight in found if not _used_elsewhere(problem, w, row, weight)}
    owners: dict[str, set[str | None]] = {}
    for use in record.uses:
        if use.bias is not None:
            owners.setdefault(use.bias, set()).add(use.weight if use.weight in candidates else None)

    maps: dict[str, LinearMap] = {}
    for weight, uses in found.items():
        if weight not in candidates:
            continue
        bias = uses[0][1]
        if bias is not None and (
            any(other != bias for _, other, _, _ in uses)
            or bias not in same
            or program.sites[bias].size != uses[0][2][1]
            or owners[bias] != {weight}
            or _used_elsewhere(problem, w, row, bias)
        ):
            bias = None
        if weight not in sites and bias not in sites:
            continue
        name = uses[0][0][0]
        if name in maps:
            # Two weights share one name: use the weight's own name, which is unique.
            name = weight
        places = sum(count for *_, count in uses)
        maps[name] = LinearMap(name, weight, bias, uses[0][2], places, tuple(use for use, *_ in uses))
    mapped = {site for linear in maps.values() for site in (linear.weight, linear.bias)}
    looked_at = {use for linear in maps.values() for use in linear.uses}
    rest = tuple(name for name in sites if name not in mapped)
    activations = sum(math.prod(shape) for shape in leading.values()) + sum(
        math.prod(map(int, part.shape)) for parts in record.inputs.values() for part in parts
    )

    moved = _depends(problem, w, row, list(sites))
    reached = _depends(problem, w, row, [name for name in sites if name in mapped]) if maps else moved
    added = {use: shape for use, shape in leading.items() if use in looked_at}
    return Plan(sites, maps, rest, added, reached, moved, max(1, activations), eta)


def _untransformed(problem: Problem, values: Mapping[str, Any], w: Mapping[str, Any]) -> set[str]:
    """Latent sites whose unconstrained coordinates are those of the program, at u and at another point."""
    program, system = problem.program, problem.system
    other = {name: value + 0.7 for name, value in values.items()}
    moved = program.constrain(other, *first_rows(problem))
    found = set()
    for site in program.latents:
        if site.shape == site.unconstrained_shape and all(
            np.array_equal(system.to_numpy(after[site.name]), system.to_numpy(before[site.name]))
            for before, after in ((values, w), (other, moved))
        ):
            found.add(site.name)
    return found


def _nan(problem: Problem, w: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {**w, **{name: w[name] * float("nan") for name in names}}


def _used_elsewhere(problem: Problem, w: Mapping[str, Any], row: Any, name: str) -> bool:
    """Whether a site has a use outside linear maps. If so, NaN in its place reaches the predictor."""
    program = problem.program
    values = _nan(problem, w, [name])
    with NetworkFunction(values) as run, SubstituteLinear({name: w[name]}, values):
        program.model(row, None)
    assert isinstance(run, NetworkFunction)
    return bool(np.any(np.isnan(problem.system.to_numpy(run.likelihood.predictor(run.f)))))


def _depends(problem: Problem, w: Mapping[str, Any], row: Any, names: Sequence[str]) -> np.ndarray:
    """Which outputs (D,) depend on the sites: those that NaN in their place reaches."""
    eta = problem.system.to_numpy(problem.program.predictor(_nan(problem, w, names), row))
    return np.isnan(eta[0]) if names else np.zeros(eta.shape[-1], dtype=bool)


# --- factors of the Jacobian, row by row ----------------------------------------------------------


@dataclass(frozen=True)
class Factors:
    """Factors of R' J for some rows.

    Parameters
    ----------
    rows : slice
        The rows.
    eta : ndarray
        The predictor, (B, D).
    maps : dict
        Name -> inputs (B, T, I), gradients (B, A, T, O) for the cotangents `active`.
    rest : ndarray
        (B, C, R), for all C cotangents.
    active : ndarray
        Cotangents (A,) that reach a linear map.
    resting : ndarray
        Cotangents that reach only the rest.
    """

    rows: slice
    eta: np.ndarray
    maps: dict[str, tuple[np.ndarray, np.ndarray]]
    rest: np.ndarray
    active: np.ndarray
    resting: np.ndarray


def linear_factors(
    problem: Problem,
    u: Mapping[str, np.ndarray],
    x: Any,
    cotangents: Cotangents | None = None,
    memory: int = 2**28,
    sites: Sequence[str] | None = None,
) -> Iterator[tuple[slice, np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]], np.ndarray]]:
    """Factors of R' J for chunks of the rows of x (NumPy).

    The gradient of a map's weight in column c is sum_t a_t g_ct' (I, O), that of its bias sum_t g_ct.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.
    x
        The rows.
    cotangents : callable or None
        None for the identity (C = D, the Jacobian itself), else a function of eta (B, D) and the rows.
    memory : int
        Bytes that may be held besides the result.
    sites : sequence of str or None
        The sites to differentiate in, all latent ones by default. Reverse mode goes back no further than to them.

    Yields
    ------
    rows : slice
        The rows of the chunk.
    eta : ndarray
        The predictor, (B, D).
    maps : dict
        Name of a map of `linear_maps` -> inputs a (B, T, I) and gradients g (B, C, T, O).
    rest : ndarray
        R' J for the other sites, in flat order, (B, C, R).

    Raises
    ------
    UnsupportedError
        Rows that interact.
    """
    chosen = tuple(latent_names(problem) if sites is None else sites)
    for part in factors_of(problem, u, x, cotangents, memory, chosen):
        width = part.rest.shape[1]
        maps = {}
        for name, (inputs, gradients) in part.maps.items():
            if len(part.active) < width:
                filled = np.zeros((len(gradients), width, *gradients.shape[2:]), dtype=gradients.dtype)
                filled[:, part.active] = gradients
                gradients = filled
            maps[name] = (inputs, gradients)
        yield part.rows, part.eta, maps, part.rest


def factors_of(
    problem: Problem,
    u: Mapping[str, np.ndarray],
    x: Any,
    cotangents: Cotangents | None,
    memory: int,
    sites: tuple[str, ...],
    extra: Callable[[int], int] = lambda width: 0,
) -> Iterator[Factors]:
    """Factors for chunks of the rows of x (NumPy), see `linear_factors`.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.
    x
        The rows.
    cotangents : callable or None
        As in `linear_factors`.
    memory : int
        Bytes that may be held besides the result.
    sites : tuple of str
        The sites to differentiate in.
    extra : callable
        Numbers that the caller holds for each row, as a function of the width.
    """
    system = problem.system
    plan = plan_of(problem, u, sites)
    outputs = plan.eta.shape[-1]
    width = outputs if cotangents is None else np.asarray(cotangents(plan.eta, slice(0, 1))).shape[-1]
    rows = row_count(x)
    chunk = int(np.clip(memory // (8 * (plan.floats(problem, width) + extra(width))), 1, rows))
    values = system_values(problem, u)
    size = sum(problem.program.sites[name].size for name in plan.rest)
    for start, stop in chunks(rows, chunk):
        count = stop - start
        part = map_data(lambda a, i=start, j=stop: system.asarray(padded(np.asarray(a[i:j]), chunk)), x)
        if cotangents is None:
            root = np.broadcast_to(np.eye(outputs), (count, outputs, outputs))
        else:
            eta = system.to_numpy(compiled(problem, plan, "predictor")(values, part))[:count]
            # Overflow here is detected later, from the gradients.
            with np.errstate(over="ignore", invalid="ignore"):
                root = np.asarray(cotangents(eta, slice(start, stop)))
        # If noise is sampled, half of all cotangents affect no weight. If it is known, they affect nothing.
        reaching = np.any(root[:, plan.reached] != 0, axis=(0, 1))
        active = np.flatnonzero(reaching) if reaching.any() else np.zeros(1, dtype=int)
        reaching[active] = True
        resting = np.flatnonzero(np.any(root[:, plan.moved] != 0, axis=(0, 1)) & ~reaching)

        def call(kind: str, columns: np.ndarray, root: Any = root, part: Any = part) -> Any:
            cotangent = system.asarray(padded(np.ascontiguousarray(root[:, :, columns]), chunk))
            return compiled(problem, plan, kind)(values, part, cotangent)

        value, inputs, gradients, direct = call("maps", active)
        eta = system.to_numpy(value)[:count]
        maps = {
            name: (system.to_numpy(inputs[name])[:count], system.to_numpy(gradients[name])[:count])
            for name in plan.maps
        }
        rest = np.zeros((count, width, size), dtype=eta.dtype)
        for columns in (active, resting) if plan.rest else ():
            if columns is resting and len(resting):
                *_, direct = call("rest", resting)
            for name, at in site_slices(problem, plan.rest).items() if len(columns) else ():
                rest[:, columns, at] = system.to_numpy(direct[name])[:count].reshape(count, len(columns), -1)
        yield Factors(slice(start, stop), eta, maps, rest, active, resting)


def compiled(problem: Problem, plan: Plan, kind: str) -> Callable[..., Any]:
    """The function that computes the factors, compiled once for each program, kind and choice of sites.

    Everything is computed row by row and then mapped over rows, so that all computation within a row belongs to that
    row.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    plan : Plan
        The plan of the sites.
    kind : {"maps", "rest", "predictor"}
        "maps" for everything, "rest" if no linear map is reached, "predictor" for eta alone.

    Returns
    -------
    callable
        (values, rows, R) -> eta, inputs, gradients, rest.
    """
    program, system = problem.program, problem.system

    def build() -> Callable[..., Any]:
        data = first_rows(problem)

        def forward(values: Any, row: Any, perturbations: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            w = program.constrain(values, *data)
            row = map_data(lambda a: a[None], row)
            if not perturbations:
                return program.predictor(w, row)[0], {}
            with NetworkFunction(w) as run, RecordLinear(perturbations) as record:
                program.model(row, None)
            assert isinstance(run, NetworkFunction)
            assert isinstance(record, RecordLinear)
            inputs = {
                name: ops.concatenate(
                    [record.inputs[use][number].reshape(-1, linear.shape[0]) for use, number in linear.uses],
                    0,
                )
                for name, linear in plan.maps.items()
            }
            return run.likelihood.predictor(run.f)[0], inputs

        def factors(values: Any, row: Any, root: Any) -> tuple[Any, Any, Any, Any]:
            def of(leaves: Any) -> tuple[Any, Any]:
                perturbations: dict[str, dict[int, Any]] = {}
                for (name, number), added in zip(plan.added, leaves.get("added", ()), strict=False):
                    perturbations.setdefault(name, {})[number] = added
                eta, inputs = forward({**values, **leaves["rest"]}, row, perturbations)
                return eta, (eta, inputs)

            leaves: dict[str, Any] = {"rest": {name: values[name] for name in plan.rest}}
            if kind == "maps":
                leaves["added"] = [system.asarray(np.zeros(shape)) for shape in plan.added.values()]
            _, pullback, (eta, inputs) = system.vjp(of, leaves)
            pulled = system.vmap(pullback)(root.T)
            gradients = {}
            if kind == "maps":
                at = dict(zip(plan.added, pulled["added"], strict=True))
                gradients = {
                    name: ops.concatenate(
                        [at[use].reshape(len(at[use]), -1, linear.shape[1]) for use in linear.uses], 1
                    )
                    for name, linear in plan.maps.items()
                }
            return eta, inputs, gradients, pulled["rest"]

        def predictor(values: Any, row: Any) -> Any:
            return forward(values, row, {})[0]

        if kind == "predictor":
            return system.compile(system.vmap(predictor, in_axes=(None, 0)))
        return system.compile(system.vmap(factors, in_axes=(None, 0, 0)))

    return program.cached(("factors", kind, plan.sites), build)


def jacobians(
    problem: Problem, u: Mapping[str, np.ndarray], x: Any, memory: int, positions: np.ndarray | None = None
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Predictor and its Jacobian in the flat vector at u, for chunks of the rows of x (NumPy).

    It takes one reverse pass per output, vectorised over rows, so that the cost of a row is D gradients.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.
    x
        The rows.
    memory : int
        Bytes that may be held besides the result.
    positions : ndarray or None
        Positions of the flat vector to differentiate in, in increasing order. P is then their number.

    Yields
    ------
    rows : slice
        The rows of the chunk.
    eta : ndarray
        The predictor, (B, D).
    jacobian : ndarray
        (B, D, P).
    """
    where = Where.of(problem, positions)
    plan = plan_of(problem, u, where.sites)
    for part in factors_of(problem, u, x, None, memory, where.sites, lambda width: 2 * width * where.size):
        width = part.rest.shape[1]
        jacobian = np.zeros((len(part.eta), width, where.size), dtype=part.eta.dtype)
        for columns in (part.active, part.resting):
            fill(jacobian, columns, columns is part.active, problem, plan, part)
        yield part.rows, part.eta, where.chosen(jacobian)


def fill(
    jacobian: np.ndarray, columns: np.ndarray, active: bool, problem: Problem, plan: Plan, part: Factors
) -> None:
    """Write columns of R' J (B, C, P) from its factors: outer products of inputs and gradients, summed over places.

    Parameters
    ----------
    jacobian : ndarray
        R' J (B, C, P), which is written.
    columns : ndarray
        The columns to write.
    active : bool
        Whether the columns include cotangents that reach a linear map.
    problem : Problem
        The model and its data.
    plan : Plan
        The plan of the sites.
    part : Factors
        The factors.
    """
    local = site_slices(problem, plan.sites)
    rows = len(jacobian)
    if active:
        for name, linear in plan.maps.items():
            inputs, gradients = part.maps[name]
            for number, column in enumerate(columns):
                if linear.weight in local:
                    block = jacobian[:, column, local[linear.weight]].reshape(rows, *linear.shape)
                    if linear.places == 1:
                        np.multiply(inputs[:, 0, :, None], gradients[:, number, 0, None, :], out=block)
                    else:
                        np.matmul(inputs.transpose(0, 2, 1), gradients[:, number], out=block)
                if linear.bias in local:
                    jacobian[:, column, local[linear.bias]] = gradients[:, number].sum(1)
    rest = site_slices(problem, plan.rest) if plan.rest else {}
    for name, at in rest.items():
        jacobian[:, columns, local[name]] = part.rest[:, columns, at]
