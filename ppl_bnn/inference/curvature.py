"""Curvature at a point, written once over the protocol.

What the data say is H = sum_n J_n' F_n J_n: J_n (D, P) is the Jacobian of the predictor eta_n in the flat vector of
latent sites, F_n (D, D) the Fisher information of p(y_n | eta_n) in eta. This generalised Gauss-Newton matrix is
never indefinite, and for canonical links it uses the Hessian of -log p(y | f) itself (Martens 2020). Taking the
Fisher information in place of that Hessian is what keeps heteroscedastic noise positive. Beside it stand the
empirical Fisher matrix, sum_n s_n s_n' with s_n the gradient of log p(y_n | eta_n), and the exact Hessian.

All but the Hessian are made of R_n' J_n with R_n R_n' = F_n (or its estimate), and of linear maps: the gradient of a
weight (I, O) is sum_t a_t g_t', a_t (I,) what enters the map and g_t (O,) the gradient at what leaves it, over the T
places and uses of the map in one row. `linear_factors` hands out a and g, from which each structure is computed
without a gradient of a weight for every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ppl_bnn.errors import CurvatureError, InputError, UnsupportedError, message, unknown_name
from ppl_bnn.inference.precision import (
    DataCurvature,
    DenseBlock,
    DiagonalCurvature,
    FactorCurvature,
    FullCurvature,
    KroneckerBlock,
    KroneckerCurvature,
)
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import NetworkFunction, RecordLinear, SubstituteLinear
from ppl_bnn.ppl.protocol import Problem, TracedSite, chunks, map_data, padded, row_count
from ppl_bnn.predictive import Prediction

CURVATURES = ("ggn", "empirical", "hessian")
STRUCTURES = ("full", "kron", "diag", "lowrank")
# Up to this size the eigenpairs of a dense matrix are found faster than those of a product with vectors.
DENSE = 3000
# (eta (B, D), the rows) -> R (B, D, C)
Cotangents = Callable[[np.ndarray, slice], np.ndarray]


def latent_names(problem: Problem) -> list[str]:
    """The sites over which a Gaussian is put: all random variables, not the parameters without a prior."""
    names = [site.name for site in problem.program.latents]
    if not names:
        raise UnsupportedError(message("at least one site with a prior", "point estimates only", "MAP()"))
    return names


def flat_latents(problem: Problem, u: Mapping[str, np.ndarray]) -> np.ndarray:
    """The flat vector (P,) of the latent sites, NumPy."""
    return np.concatenate([np.asarray(u[name], dtype=float).reshape(-1) for name in latent_names(problem)])


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


# --- linear maps: which sites they are made of ----------------------------------------------------


@dataclass(frozen=True)
class LinearMap:
    """A weight that is a site, with all its uses in a run on one row.

    name: that of its first use. weight: the site, a matrix of `shape` (I, O) in C order. bias: the site added after
    each use, or None. places: T, the number of positions and uses per row. uses: (name, number of the use under that
    name).
    """

    name: str
    weight: str
    bias: str | None
    shape: tuple[int, int]
    places: int
    uses: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Plan:
    """How the Jacobian of some sites comes about: through linear maps, and for the rest directly.

    added: use of a linear map -> shape of its output for one row. reached: outputs (D,) that depend on a linear map
    (on any site, where there is no map); moved: on any of the sites. activations: numbers held for one row of a
    forward pass.
    eta: the predictor (1, D) of one row.
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
        """Numbers handed out for one row with `width` cotangents, and held while they are computed."""
        inputs = sum(linear.places * linear.shape[0] for linear in self.maps.values())
        outputs = sum(linear.places * linear.shape[1] for linear in self.maps.values())
        rest = sum(problem.program.sites[name].size for name in self.rest)
        return 2 * inputs + width * (2 * outputs + 2 * rest + self.activations) + 2 * self.activations


def linear_maps(
    problem: Problem, u: Mapping[str, np.ndarray], sites: Sequence[str] | None = None
) -> dict[str, LinearMap]:
    """The linear maps and convolutions whose weight is a latent site and nothing but a weight.

    sites: only maps with a weight or a bias among them, as `linear_factors` with the same `sites` hands out.
    """
    return dict(_plan(problem, u, tuple(latent_names(problem) if sites is None else sites)).maps)


def _plan(problem: Problem, u: Mapping[str, np.ndarray], sites: tuple[str, ...]) -> _Plan:
    return problem.program._cached(("linear plan", sites), lambda: _make_plan(problem, u, sites))


def _make_plan(problem: Problem, u: Mapping[str, np.ndarray], sites: tuple[str, ...]) -> _Plan:
    """Find out by running the model on one row.

    A weight is served by its linear maps if it is a site, is what the Gaussian is over (its transform to the
    coordinates of the program is the identity), and is used nowhere else. A bias beside it, likewise. All else is
    rest.
    """
    program, system = problem.program, problem.system
    if program.coupled:
        raise UnsupportedError(
            message("rows that do not interact", "bnn.coupled() in the model", "NUTS or SVI")
        )
    values = system_values(problem, u)
    first_x, first_y = first_rows(problem)
    w = program.constrain(values, first_x, first_y)
    row = map_data(lambda a: a[:1], problem.x)
    eta = system.to_numpy(program.predictor(w, row))
    _refuse_infinite("a finite predictor", eta)
    if not program.language:
        everything = np.ones(eta.shape[-1], dtype=bool)
        return _Plan(sites, {}, sites, {}, everything, everything, 256, eta)

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
            # One name for two weights: the weight's own is unique.
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
    return _Plan(sites, maps, rest, added, reached, moved, max(1, activations), eta)


def _refuse_infinite(expected: str, *arrays: np.ndarray) -> None:
    if not all(np.all(np.isfinite(array)) for array in arrays):
        raise CurvatureError(
            message(
                expected, "NaN or infinity", "a mode with finite density: other start, or standardise=True"
            )
        )


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
    """Whether a site has another use than in linear maps: NaN in its place then reaches the predictor."""
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
class _Chunk:
    """Factors of R' J for some rows.

    maps: name -> inputs (B, T, I), gradients (B, A, T, O) for the cotangents `active` (A,), those that reach a linear
    map. rest: (B, C, R), for all C cotangents; `resting` are those that reach the rest alone.
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
    """Factors of R' J for chunks of the rows of x (NumPy): rows, eta (B, D), maps, rest (B, C, R).

    maps: name of a map of `linear_maps` -> inputs a (B, T, I) and gradients g (B, C, T, O). The gradient of its
    weight in column c is sum_t a_t g_ct' (I, O), that of its bias sum_t g_ct. rest: R' J for the other sites, in
    flat order.

    cotangents: None for the identity (C = D, the Jacobian itself), else a function of eta (B, D) and the rows.
    sites: those to differentiate in, all latent ones by default; reverse mode goes no further back than to them.
    memory: bytes that may be held besides what is handed out.

    Raises
    ------
    UnsupportedError: rows that interact.
    """
    chosen = tuple(latent_names(problem) if sites is None else sites)
    for part in _factors(problem, u, x, cotangents, memory, chosen):
        width = part.rest.shape[1]
        maps = {}
        for name, (inputs, gradients) in part.maps.items():
            if len(part.active) < width:
                filled = np.zeros((len(gradients), width, *gradients.shape[2:]), dtype=gradients.dtype)
                filled[:, part.active] = gradients
                gradients = filled
            maps[name] = (inputs, gradients)
        yield part.rows, part.eta, maps, part.rest


def _factors(
    problem: Problem,
    u: Mapping[str, np.ndarray],
    x: Any,
    cotangents: Cotangents | None,
    memory: int,
    sites: tuple[str, ...],
    extra: Callable[[int], int] = lambda width: 0,
) -> Iterator[_Chunk]:
    """`extra`: numbers that the caller holds for each row, as a function of the width."""
    system = problem.system
    plan = _plan(problem, u, sites)
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
            eta = system.to_numpy(_compiled(problem, plan, "predictor")(values, part))[:count]
            # What overflows here is judged by the gradients that come of it.
            with np.errstate(over="ignore", invalid="ignore"):
                root = np.asarray(cotangents(eta, slice(start, stop)))
        # Where noise is sampled, half of all cotangents concern no weight; where it is known, they concern nothing.
        reaching = np.any(root[:, plan.reached] != 0, axis=(0, 1))
        active = np.flatnonzero(reaching) if reaching.any() else np.zeros(1, dtype=int)
        reaching[active] = True
        resting = np.flatnonzero(np.any(root[:, plan.moved] != 0, axis=(0, 1)) & ~reaching)

        def call(kind: str, columns: np.ndarray, root: Any = root, part: Any = part) -> Any:
            cotangent = system.asarray(padded(np.ascontiguousarray(root[:, :, columns]), chunk))
            return _compiled(problem, plan, kind)(values, part, cotangent)

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
        yield _Chunk(slice(start, stop), eta, maps, rest, active, resting)


def _compiled(problem: Problem, plan: _Plan, kind: str) -> Callable[..., Any]:
    """(values, rows, R) -> eta, inputs, gradients, rest; compiled once for each program, kind and choice of sites.

    kind: "maps" for everything, "rest" where no linear map is reached, "predictor" for eta alone. Everything is
    computed row by row and then mapped over rows, so that whatever a model does within a row belongs to that row.
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

    return program._cached(("factors", kind, plan.sites), build)


def jacobians(
    problem: Problem,
    u: Mapping[str, np.ndarray],
    x: Any,
    memory: int,
    positions: np.ndarray | None = None,
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Predictor eta (B, D) and its Jacobian (B, D, P) in the flat vector at u, for chunks of the rows of x (NumPy).

    positions: those of the flat vector to differentiate in, in increasing order; P is then their number. One reverse
    pass per output, vectorised over rows, so that the cost of a row is D gradients.
    """
    where = _Where.of(problem, positions)
    plan = _plan(problem, u, where.sites)
    for part in _factors(problem, u, x, None, memory, where.sites, lambda width: 2 * width * where.size):
        width = part.rest.shape[1]
        jacobian = np.zeros((len(part.eta), width, where.size), dtype=part.eta.dtype)
        for columns in (part.active, part.resting):
            _fill(jacobian, columns, columns is part.active, problem, plan, part)
        yield part.rows, part.eta, where.chosen(jacobian)


@dataclass(frozen=True)
class _Where:
    """The part of the flat vector that a curvature is over.

    sites: those with at least one position in it. size: of their own flat vector. kept: positions in that, or None
    for all.
    """

    sites: tuple[str, ...]
    size: int
    kept: np.ndarray | None

    @classmethod
    def of(cls, problem: Problem, positions: np.ndarray | None) -> _Where:
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
        return self.size if self.kept is None else len(self.kept)

    def chosen(self, array: np.ndarray) -> np.ndarray:
        """The last axis, restricted to the positions."""
        return array if self.kept is None else array[..., self.kept]


def _fill(
    jacobian: np.ndarray, columns: np.ndarray, active: bool, problem: Problem, plan: _Plan, part: _Chunk
) -> None:
    """Write columns of R' J (B, C, P) from its factors: outer products of inputs and gradients, summed over places."""
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


# --- what the data say ----------------------------------------------------------------------------


def gauss_newton(problem: Problem, u: Mapping[str, np.ndarray], memory: int = 2**28) -> np.ndarray:
    """sum_n J_n' F_n J_n over the training rows, (P, P), NumPy float64."""
    return data_curvature(problem, u, memory=memory)[0].matrix()


def data_curvature(
    problem: Problem,
    u: Mapping[str, np.ndarray],
    *,
    curvature: str = "ggn",
    fisher: str = "exact",
    samples: int = 1,
    structure: str = "full",
    rank: int | None = None,
    sharing: str = "expand",
    positions: np.ndarray | None = None,
    seed: int = 0,
    memory: int = 2**28,
) -> tuple[DataCurvature, float]:
    """The curvature of -sum_n log p(y_n | x_n, u) over the training rows at u, and what it cost.

    curvature: "ggn" is sum_n J_n' F_n J_n, "empirical" sum_n s_n s_n' with the gradients s_n of log p(y_n | u),
    "hessian" the exact Hessian, which may be indefinite.
    fisher: "exact", or "sampled": F_n estimated without bias from `samples` scores at targets drawn from p(y |
    eta_n).
    structure:
      - "full": `FactorCurvature` B'B where the rows of R' J are fewer than P, else `FullCurvature`;
      - "kron": `KroneckerCurvature`; a block left (x) right for each weight of a linear map, left = mean of a a'
      over rows
        and places, right = sum of g g' over rows, cotangents and places (sharing="expand"); or, with
        sharing="reduce", left from the mean of a and right from the sum of g over places (Eschenhagen et al. 2023;
        Martens and Grosse 2015). Exact for one row and one place. Biases and all other sites have a dense block
        each, exact within it;
      - "diag": `DiagonalCurvature`, the exact diagonal;
      - "lowrank": `FactorCurvature` with sqrt(lambda_i) v_i', the `rank` largest eigenpairs, of which those that are
      not
        positive are left out.
    positions: those of the flat vector to restrict it to, in increasing order (a sub-network); of "kron", whole
    sites only.
    memory: bytes that may be held besides the result.

    Returns the curvature, float64, and the number of gradients in passes over the data.

    Raises
    ------
    UnknownNameError, InputError: settings that do not exist. UnsupportedError: structure "kron" of a Hessian or of
    parts of sites; rows that interact; a plain model, other than by its Hessian. CurvatureError: not finite, or no
    convergence.
    """
    for name, value, known in (
        ("curvature", curvature, CURVATURES),
        ("fisher", fisher, ("exact", "sampled")),
        ("structure", structure, STRUCTURES),
        ("sharing", sharing, ("expand", "reduce")),
    ):
        if value not in known:
            raise unknown_name(f"{name} of a curvature", value, known)
    where = _Where.of(problem, positions)
    if structure == "lowrank" and (rank is None or not 1 <= rank <= where.count):
        raise InputError("rank: " + message(f"a rank from 1 to {where.count}", repr(rank), "rank=20"))
    if fisher == "sampled" and samples < 1:
        raise InputError("samples: " + message("at least one sample", repr(samples), "samples=1"))
    if curvature == "hessian":
        if structure == "kron":
            raise UnsupportedError(
                "curvature='hessian' with structure='kron': "
                + message(
                    "a curvature that is a sum over rows of products of gradients",
                    "a Hessian, which has no Kronecker factors",
                    "curvature='ggn', or structure='full', 'diag' or 'lowrank'",
                )
            )
        return _Hessian(problem, u, where, memory).structured(structure, rank, seed)
    rows = _Rows(problem, u, where, _cotangents(problem, u, curvature, fisher, samples, seed), memory)
    if structure == "full":
        return rows.full()
    if structure == "diag":
        return rows.diagonal()
    if structure == "kron":
        return rows.kronecker(sharing)
    assert rank is not None
    return rows.low_rank(rank, seed)


def _cotangents(
    problem: Problem, u: Mapping[str, np.ndarray], curvature: str, fisher: str, samples: int, seed: int
) -> Cotangents:
    """R_n (D, C), with R_n R_n' the Fisher information or what stands for it."""
    likelihood = problem.program.likelihood
    if not problem.program.language:
        likelihood.fisher(None)
    if curvature == "empirical":
        targets = np.asarray(problem.targets)
        return lambda eta, rows: np.asarray(likelihood.score(eta, targets[rows]))[:, :, None]
    if fisher == "exact":
        return lambda eta, rows: np.asarray(likelihood.fisher_root(eta))
    # All targets are drawn at once, so that they do not depend on how rows are divided.
    eta = np.concatenate([part for _, part in _predictors(problem, u)])
    drawn = Prediction(*likelihood.mixture_parameters(eta[None])).sample(samples, seed)

    def sampled(eta: np.ndarray, rows: slice) -> np.ndarray:
        scores = [np.asarray(likelihood.score(eta, y[rows])) for y in drawn]
        return np.stack(scores, -1) / math.sqrt(samples)

    return sampled


def _predictors(problem: Problem, u: Mapping[str, np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """eta (B, D) for chunks of the training rows."""
    system = problem.system
    plan = _plan(problem, u, tuple(latent_names(problem)))
    chunk = int(np.clip(2**26 // (16 * plan.activations), 1, problem.rows))
    for start, stop in chunks(problem.rows, chunk):
        part = map_data(
            lambda a, i=start, j=stop: system.asarray(padded(np.asarray(a[i:j]), chunk)), problem.inputs
        )
        value = _compiled(problem, plan, "predictor")(system_values(problem, u), part)
        yield slice(start, stop), system.to_numpy(value)[: stop - start]


@dataclass
class _Rows:
    """Curvatures that are B'B, B the stacked R_n' J_n: one block of rows at a time, in float64.

    passes: gradients so far, in passes over the data.
    """

    problem: Problem
    u: Mapping[str, np.ndarray]
    where: _Where
    cotangents: Cotangents
    memory: int
    passes: float = 0.0

    @property
    def plan(self) -> _Plan:
        return _plan(self.problem, self.u, self.where.sites)

    def chunks(self, extra: Callable[[int], int] = lambda width: 0) -> Iterator[_Chunk]:
        arguments = (
            self.problem,
            self.u,
            self.problem.inputs,
            self.cotangents,
            self.memory,
            self.where.sites,
            extra,
        )
        for part in _factors(*arguments):
            self.passes += len(part.eta) / self.problem.rows * (len(part.active) + len(part.resting))
            maps = {
                name: (inputs.astype(np.float64, copy=False), gradients.astype(np.float64, copy=False))
                for name, (inputs, gradients) in part.maps.items()
            }
            rest = part.rest.astype(np.float64, copy=False)
            gradients = (gradients for _, gradients in maps.values())
            _refuse_infinite("finite gradients of the predictor", rest, *gradients)
            yield _Chunk(part.rows, part.eta, maps, rest, part.active, part.resting)

    def blocks(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Number of rows, rows of B with gradients of weights (M, P), rows that concern the rest alone (M', R)."""
        for part in self.chunks(lambda width: 2 * width * self.where.size):
            rows = len(part.eta)
            jacobian = np.zeros((rows, len(part.active), self.where.size))
            own = replace(part, rest=part.rest[:, part.active])
            _fill(jacobian, np.arange(len(part.active)), True, self.problem, self.plan, own)
            resting = part.rest[:, part.resting].reshape(rows * len(part.resting), part.rest.shape[-1])
            yield rows, self.where.chosen(jacobian).reshape(-1, self.where.count), resting

    @cached_property
    def _places(self) -> dict[str, np.ndarray]:
        """For each site, where its coordinates lie among those that are kept, -1 where they are not."""
        place = np.full(self.where.size, -1)
        kept = np.arange(self.where.size) if self.where.kept is None else self.where.kept
        place[kept] = np.arange(len(kept))
        return {name: place[at] for name, at in site_slices(self.problem, self.where.sites).items()}

    def full(self) -> tuple[DataCurvature, float]:
        """B'B, or B where that is smaller."""
        from scipy.linalg.blas import dsyrk  # pyright: ignore[reportAttributeAccessIssue]

        size = self.where.count
        at = np.concatenate([self._places[name] for name in self.plan.rest] or [np.zeros(0, dtype=int)])
        kept = np.flatnonzero(at >= 0)
        gram = np.zeros((len(kept), len(kept)))
        stacked: list[np.ndarray] = []
        total: np.ndarray | None = None
        for rows, block, resting in self.blocks():
            gram += resting[:, kept].T @ resting[:, kept]
            if stacked or (total is None and len(block) // rows * self.problem.rows + len(kept) < size):
                stacked.append(block)
                continue
            if total is None:
                total = np.zeros((size, size), order="F")
            # One triangle only: half the work of a product of matrices.
            total = dsyrk(1.0, block.T, beta=1.0, c=total, overwrite_c=True, lower=True)
        if total is None:
            values, vectors = np.linalg.eigh(gram)
            some = values > 0
            root = np.zeros((int(some.sum()), size))
            root[:, at[kept]] = (vectors[:, some] * np.sqrt(values[some])).T
            return FactorCurvature(np.concatenate([*stacked, root])), self.passes
        matrix = np.ascontiguousarray(np.tril(total) + np.tril(total, -1).T)
        matrix[np.ix_(at[kept], at[kept])] += gram
        return FullCurvature(matrix), self.passes

    def diagonal(self) -> tuple[DataCurvature, float]:
        total = np.zeros(self.where.size)
        local = site_slices(self.problem, self.where.sites)
        for part in self.chunks():
            for name, linear in self.plan.maps.items():
                inputs, gradients = part.maps[name]
                if linear.weight in local:
                    total[local[linear.weight]] += _squares(inputs, gradients, self.memory).reshape(-1)
                if linear.bias in local:
                    total[local[linear.bias]] += np.sum(gradients.sum(2) ** 2, axis=(0, 1))
            for name, at in site_slices(self.problem, self.plan.rest).items() if self.plan.rest else ():
                total[local[name]] += np.sum(part.rest[:, :, at] ** 2, axis=(0, 1))
        return DiagonalCurvature(self.where.chosen(total)), self.passes

    def kronecker(self, sharing: str) -> tuple[DataCurvature, float]:
        parted = [name for name, place in self._places.items() if np.any(place < 0)]
        if parted:
            raise UnsupportedError(
                "structure='kron': "
                + message(
                    "positions that make up whole sites",
                    f"a part of {parted[0]!r}",
                    "structure='full' or 'diag'",
                )
            )
        left: dict[str, Any] = {}
        right: dict[str, Any] = {}
        dense: dict[str, Any] = {}
        local = self._places
        for part in self.chunks():
            for name, linear in self.plan.maps.items():
                inputs, gradients = part.maps[name]
                summed = gradients.sum(2).reshape(-1, linear.shape[1])
                if linear.weight in local:
                    a = inputs.mean(1) if sharing == "reduce" else inputs.reshape(-1, linear.shape[0])
                    g = summed if sharing == "reduce" else gradients.reshape(-1, linear.shape[1])
                    terms = self.problem.rows * (1 if sharing == "reduce" else linear.places)
                    left[linear.weight] = left.get(linear.weight, 0.0) + a.T @ a / terms
                    right[linear.weight] = right.get(linear.weight, 0.0) + g.T @ g
                if linear.bias is not None and linear.bias in local:
                    dense[linear.bias] = dense.get(linear.bias, 0.0) + summed.T @ summed
            for name, at in site_slices(self.problem, self.plan.rest).items() if self.plan.rest else ():
                rows = part.rest[:, :, at].reshape(-1, at.stop - at.start)
                dense[name] = dense.get(name, 0.0) + rows.T @ rows
        shapes = {linear.weight: linear.shape for linear in self.plan.maps.values()}
        blocks = [
            KroneckerBlock(name, shapes[name], left[name], right[name], place)
            if name in left
            else DenseBlock(name, dense[name], place)
            for name, place in local.items()
        ]
        return KroneckerCurvature(blocks), self.passes

    def low_rank(self, rank: int, seed: int) -> tuple[DataCurvature, float]:
        """Eigenpairs from a dense matrix, or its dual, where one is small; else from products with vectors."""
        size = self.where.count
        width = np.asarray(self.cotangents(self.plan.eta, slice(0, 1))).shape[-1]
        terms = self.problem.rows * width
        if size <= DENSE or (terms <= DENSE and 8 * terms * size <= self.memory):
            curvature, passes = self.full()
            if isinstance(curvature, FactorCurvature):
                values, vectors = _largest(curvature.factor @ curvature.factor.T, rank)
                return FactorCurvature(_positive(values, vectors.T @ curvature.factor, dual=True)), passes
            values, vectors = _largest(curvature.matrix(), rank)
            return FactorCurvature(_positive(values, vectors.T)), passes
        # What is held fits between two products, or is made again for each.
        held = 8 * self.problem.rows * self.plan.floats(self.problem, width)
        kept = list(self.chunks()) if held <= self.memory else None

        def product(flat: np.ndarray) -> np.ndarray:
            v = np.zeros(self.where.size)
            v[slice(None) if self.where.kept is None else self.where.kept] = np.ravel(flat)
            total = np.zeros(self.where.size)
            for part in self.chunks() if kept is None else kept:
                self._add_product(total, v, part)
            return self.where.chosen(total)

        values, vectors = _arnoldi(product, size, rank, seed)
        return FactorCurvature(_positive(values, vectors.T)), self.passes

    def _add_product(self, total: np.ndarray, v: np.ndarray, part: _Chunk) -> None:
        """total += B'(B v) for the rows of a chunk, from factors: no gradient of a weight for any row."""
        local = site_slices(self.problem, self.where.sites)
        rest = np.concatenate([v[local[name]] for name in self.plan.rest] or [np.zeros(0)])
        z = part.rest @ rest
        for name, linear in self.plan.maps.items():
            inputs, gradients = part.maps[name]
            moved = np.zeros((*inputs.shape[:2], linear.shape[1]))
            if linear.weight in local:
                moved = inputs @ v[local[linear.weight]].reshape(linear.shape)
            if linear.bias in local:
                moved = moved + v[local[linear.bias]]
            z[:, part.active] += np.einsum("bto,bato->ba", moved, gradients)
        for name, linear in self.plan.maps.items():
            inputs, gradients = part.maps[name]
            pulled = np.einsum("ba,bato->bto", z[:, part.active], gradients).reshape(-1, linear.shape[1])
            if linear.weight in local:
                total[local[linear.weight]] += (inputs.reshape(-1, linear.shape[0]).T @ pulled).reshape(-1)
            if linear.bias in local:
                total[local[linear.bias]] += pulled.sum(0)
        for name, at in site_slices(self.problem, self.plan.rest).items() if self.plan.rest else ():
            total[local[name]] += np.einsum("bc,bcr->r", z, part.rest[:, :, at])


def _squares(inputs: np.ndarray, gradients: np.ndarray, memory: int) -> np.ndarray:
    """sum_n sum_c (sum_t a_nt g_nct')^2, elementwise, (I, O): of a (B, T, I) and g (B, C, T, O)."""
    rows, width, places, outputs = gradients.shape
    if places == 1:
        return (inputs[:, 0] ** 2).T @ np.sum(gradients[:, :, 0] ** 2, axis=1)
    total = np.zeros((inputs.shape[-1], outputs))
    size = max(1, memory // (16 * width * inputs.shape[-1] * outputs))
    for start, stop in chunks(rows, size):
        each = inputs[start:stop, None].transpose(0, 1, 3, 2) @ gradients[start:stop]
        total += np.einsum("bcio,bcio->io", each, each)
    return total


def _largest(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest eigenvalues, largest first, and their eigenvectors as columns."""
    from scipy.linalg import eigh

    size = len(matrix)
    values, vectors = eigh(matrix, subset_by_index=(max(0, size - rank), size - 1))
    return values[::-1], vectors[:, ::-1]


def _arnoldi(
    product: Callable[[np.ndarray], np.ndarray], size: int, rank: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The largest eigenvalues of a symmetric operator and their eigenvectors, by implicitly restarted Lanczos."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    start = np.random.default_rng(seed).standard_normal(size)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    try:
        values, vectors = eigsh(operator, k=rank, which="LA", v0=start)
    except ArpackNoConvergence as error:
        raise CurvatureError(
            "structure='lowrank': "
            + message(f"{rank} eigenpairs", f"{len(error.eigenvalues)} that converged", "a smaller rank")
        ) from error
    order = np.argsort(values)[::-1]
    return values[order], vectors[:, order]


def _positive(values: np.ndarray, rows: np.ndarray, dual: bool = False) -> np.ndarray:
    """sqrt(lambda_i) v_i' of the positive eigenvalues; rows are v_i', or already u_i' B of the dual B B'."""
    some = values > max(float(np.max(np.abs(values), initial=0.0)) * 1e-14, 0.0)
    return rows[some] if dual else rows[some] * np.sqrt(values[some])[:, None]


@dataclass
class _Hessian:
    """The Hessian of -sum log p(y_n | x_n, u), by products with vectors: the pullback of the gradient.

    Rows are taken in chunks, whose sum it is; directions too, as many as memory allows.
    """

    problem: Problem
    u: Mapping[str, np.ndarray]
    where: _Where
    memory: int
    passes: float = 0.0

    def structured(self, structure: str, rank: int | None, seed: int) -> tuple[DataCurvature, float]:
        size = self.where.count
        if structure == "lowrank" and size > DENSE:
            assert rank is not None
            values, vectors = _arnoldi(lambda v: self.products(np.ravel(v)[None])[0], size, rank, seed)
            return FactorCurvature(_positive(values, vectors.T)), self.passes
        matrix = None if structure == "diag" else np.empty((size, size))
        diagonal = np.empty(size)
        step = self._sizes[1]
        for start, stop in chunks(size, step):
            directions = np.zeros((stop - start, size))
            directions[np.arange(stop - start), np.arange(start, stop)] = 1.0
            products = self.products(directions)
            diagonal[start:stop] = products[np.arange(stop - start), np.arange(start, stop)]
            if matrix is not None:
                matrix[start:stop] = products
        if matrix is None:
            return DiagonalCurvature(diagonal), self.passes
        matrix = 0.5 * (matrix + matrix.T)
        if structure == "lowrank":
            assert rank is not None
            values, vectors = _largest(matrix, rank)
            return FactorCurvature(_positive(values, vectors.T)), self.passes
        return FullCurvature(matrix), self.passes

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Rows and directions of one call."""
        program = self.problem.program
        rows = self.problem.rows
        if program.coupled:
            per_row = 8 * 4 * program.parameter_count
        else:
            per_row = 8 * 4 * _plan(self.problem, self.u, self.where.sites).activations
            rows = int(np.clip(self.memory // (4 * per_row), 1, rows))
        per_direction = per_row * rows + 8 * 4 * self.where.size
        return rows, int(np.clip(self.memory // per_direction, 1, self.where.count))

    def products(self, directions: np.ndarray) -> np.ndarray:
        """H v for directions (K, P), (K, P)."""
        problem, system = self.problem, self.problem.system
        function = problem.program._cached(("hessian", self.where.sites), self._build)
        rows, step = self._sizes
        step = min(step, len(directions))
        values = system_values(problem, self.u)
        total = np.zeros_like(directions)
        for start, stop in chunks(problem.rows, rows):
            x, y = (
                map_data(lambda a, i=start, j=stop: system.asarray(padded(np.asarray(a[i:j]), rows)), data)
                for data in (problem.inputs, problem.targets)
            )
            counted = system.asarray((np.arange(rows) < stop - start).astype(float))
            for first, last in chunks(len(directions), step):
                whole = np.zeros((step, self.where.size))
                kept = slice(None) if self.where.kept is None else self.where.kept
                whole[: last - first, kept] = directions[first:last]
                result = system.to_numpy(function(values, x, y, counted, system.asarray(whole)))
                total[first:last] += self.where.chosen(result.astype(np.float64)[: last - first])
                self.passes += (last - first) * (stop - start) / problem.rows
        _refuse_infinite("a finite Hessian", total)
        return total

    def _build(self) -> Callable[..., Any]:
        program, system = self.problem.program, self.problem.system
        sites = self.where.sites

        def loss(flat: Any, values: Any, x: Any, y: Any, counted: Any) -> Any:
            u = {**values, **program.unravel(flat, sites)}
            return -(counted * program.log_likelihood(u, x, y)).sum()

        def products(values: Any, x: Any, y: Any, counted: Any, directions: Any) -> Any:
            def gradient(flat: Any) -> tuple[Any, Any]:
                value, gradient = system.value_and_grad(loss)(flat, values, x, y, counted)
                return gradient, value

            # The Hessian is symmetric: its product with a vector from the left is that from the right.
            _, pullback, _ = system.vjp(gradient, program.ravel(values, sites))
            return system.vmap(pullback)(directions)

        return system.compile(products)


# --- what the prior says --------------------------------------------------------------------------


def prior_hessian(problem: Problem, u: Mapping[str, np.ndarray]) -> np.ndarray:
    """Hessian of -log p(w(u)) - log |dw/du| in the flat vector of latent sites, (P, P), NumPy float64."""
    system = problem.system

    def build() -> Callable[..., Any]:
        return system.compile(system.hessian(_minus_log_prior(problem)))

    hessian = problem.program._cached("prior hessian", build)(*_prior_arguments(problem, u))
    hessian = system.to_numpy(hessian).astype(np.float64)
    return 0.5 * (hessian + hessian.T)


def _minus_log_prior(problem: Problem) -> Callable[..., Any]:
    """A function of the flat latents, all values (for the parameters), and data of the right shapes."""
    program, names = problem.program, latent_names(problem)

    def minus_log_prior(flat: Any, values: Any, x: Any, y: Any) -> Any:
        return -program.log_prior({**values, **program.unravel(flat, names)}, x, y)

    return minus_log_prior


def _prior_arguments(problem: Problem, u: Mapping[str, np.ndarray]) -> tuple[Any, Any, Any, Any]:
    return (problem.system.asarray(flat_latents(problem, u)), system_values(problem, u), *first_rows(problem))


# Families that are a product over elements; those of the language, by their names in both systems.
_ELEMENTWISE = {
    "Normal", "StudentT", "Cauchy", "LogNormal", "HalfNormal", "HalfCauchy", "Gamma", "InverseGamma", "Exponential",
    "Beta", "Uniform", "NormalMixture", "MixtureSameFamily",
}  # fmt: skip


def prior_curvature(problem: Problem, u: Mapping[str, np.ndarray]) -> np.ndarray:
    """Hessian of -log p(w(u)) - log |dw/du|: its diagonal (P,) where there is nothing else, otherwise (P, P).

    There is nothing else where every prior is independent over elements and depends on no other latent site. The
    Hessian times a vector of ones is then the diagonal: one product, at the price of two gradients.
    """
    program, system = problem.program, problem.system
    if (
        not program.language
        or any(site.family not in _ELEMENTWISE for site in program.latents)
        or any(parents(problem, u).values())
    ):
        return prior_hessian(problem, u)

    def build() -> Callable[..., Any]:
        minus_log_prior = _minus_log_prior(problem)

        def diagonal(flat: Any, *arguments: Any) -> Any:
            def gradient(flat: Any) -> tuple[Any, Any]:
                value, gradient = system.value_and_grad(minus_log_prior)(flat, *arguments)
                return gradient, value

            _, pullback, _ = system.vjp(gradient, flat)
            return pullback(ops.ones_like(flat))

        return system.compile(diagonal)

    diagonal = program._cached("prior diagonal", build)(*_prior_arguments(problem, u))
    return system.to_numpy(diagonal).astype(np.float64)


def parents(problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, set[str]]:
    """For each latent site, the latent sites on which its prior depends.

    Found by evaluation, once for each program: one site is moved, and each other is scored at the coordinates that it
    has. A dependence through data is seen, one that does not change the density at u, not.
    """

    def find() -> dict[str, set[str]]:
        names = latent_names(problem)
        before = site_densities(problem, u)
        found: dict[str, set[str]] = {name: set() for name in names}
        for name in names:
            # Not a multiple of a symmetry: each element moves by another amount.
            site = problem.program.sites[name]
            step = 0.1 + 0.2 * np.modf(np.arange(1, site.size + 1) * 0.6180339887498949)[0]
            moved = np.asarray(u[name]) + step.reshape(site.unconstrained_shape)
            after = site_densities(problem, {**u, name: moved})
            for other in names:
                if other != name and not all(map(np.array_equal, before[other], after[other])):
                    found[other].add(name)
        return found

    return problem.program._cached("parents", find)


def site_densities(problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each latent site, its log prior density element by element (one number where elements depend on each other)
    and log |dw/du|, NumPy.
    """
    program, system = problem.program, problem.system

    def densities(values: Any, x: Any, y: Any) -> dict[str, Any]:
        found = {}
        for name, site in traced_latents(problem, values, x, y).items():
            distribution = site.distribution
            while type(distribution).__name__ == "Independent":
                distribution = distribution.base_dist
            found[name] = distribution.log_prob(site.value).reshape(-1), site.log_det
        return found

    function = program._cached("site densities", lambda: system.compile(densities))
    return {
        name: (system.to_numpy(elements), np.asarray(system.to_numpy(volume)))
        for name, (elements, volume) in function(system_values(problem, u), *first_rows(problem)).items()
    }


def traced_latents(problem: Problem, values: Mapping[str, Any], x: Any, y: Any) -> dict[str, TracedSite]:
    """The latent sites of one run at unconstrained values, with the distributions that they have there."""
    return {site.name: site for site in problem.program._run(values, x, y) if site.kind == "latent"}


# Coordinates at which a scale is judged: far from any mode, and with squares that no floating type loses.
_FAR = (-10.0, -20.0, -30.0, -40.0)


def check_bounded(problem: Problem, u: Mapping[str, np.ndarray], ignore: Sequence[str] = ()) -> None:
    """Refuse models whose joint density has no mode, because of a scale that can go to zero with what it scales.

    Where w_i ~ N(0, s^2), i = 1..K, with s sampled too, the density at w = 0 grows as s^-K when s goes to zero: with
    log s = u and a density of s that is positive at zero it is exp(-(K - 1) u), without bound, whatever the data say.
    Each site with dependents is moved to -10, -20, -30, -40 in its coordinates, its dependents to their locations,
    and the log prior is unbounded if it grows by the same amount, to a hundredth, each time.

    Raises
    ------
    UnsupportedError: such a scale.
    """
    program, system = problem.program, problem.system
    family = parents(problem, u)
    values = system_values(problem, u)
    x, y = first_rows(problem)
    for name in latent_names(problem):
        if name in ignore or not any(name in above for above in family.values()):
            continue
        densities = []
        for far in _FAR:
            moved = {**values, name: values[name] * 0.0 + far}
            below, settled = {name}, {name}
            # Generation by generation: a location may depend on what was moved before.
            while below := {child for child, above in family.items() if above & below} - settled:
                sites = traced_latents(problem, moved, x, y)
                for child in below:
                    moved[child] = system.unconstrain(sites[child].distribution, _location(sites[child]))
                settled |= below
            densities.append(float(system.to_numpy(program.log_prior(moved, x, y))))
        steps = np.diff(densities)
        if np.all(np.isfinite(steps)) and steps[-1] > 0.5 and abs(steps[-1] - steps[-2]) < 0.01 * steps[-1]:
            children = sorted(child for child, above in family.items() if name in above)
            raise UnsupportedError(
                f"site {name!r}: "
                + message(
                    "a joint density with a mode",
                    f"one that grows without bound as {name!r} goes to zero with {', '.join(children)} at its centre",
                    f"Laplace(marginal=[{name!r}]), bnn.noncentred(model), or NUTS or SVI",
                )
            )


def _location(site: TracedSite) -> Any:
    """The centre of a prior, shaped as its value: the location, or the scale where there is none (half-normals)."""
    base = site.distribution
    while hasattr(base, "base_dist") and not hasattr(base, "loc"):
        base = base.base_dist
    for attribute in ("loc", "scale"):
        if hasattr(base, attribute):
            return site.value * 0.0 + getattr(base, attribute)
    return site.value


def check_smooth(problem: Problem) -> None:
    """Refuse priors that have no curvature at a mode, by name.

    The edges of a uniform prior are no obstacle: in unconstrained coordinates they lie at infinity.

    Raises
    ------
    UnsupportedError: a Laplace prior, whose log density has a kink.
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
