"""The Jacobian of the predictor in the flat vector, row by row, from linear maps; written once over the protocol.

The gradient of a weight (I, O) of a linear map is sum_t a_t g_t', with a_t (I,) the input of the map and g_t (O,) the
gradient at its output, over the T places and uses of the map in one row. `linear_factors` returns a and g, which
suffice for curvatures and projections; `jacobians` multiplies them out. Other sites are differentiated directly.
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
from ppl_bnn.inference.flat_vector import Values, Where, first_rows, latent_names, site_slices, system_values
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import NetworkFunction, RecordLinear, SubstituteLinear

# (eta (B, D), the rows) -> R (B, D, C)
Cotangents = Callable[[np.ndarray, slice], np.ndarray]


# --- linear maps: which sites they are made of ----------------------------------------------------


@dataclass(frozen=True)
class LinearMap:
    """A weight that is a site, a matrix of `shape` (I, O) in C order, with all its uses in a run on one row.

    `bias` is the site added after each use; `places` is T, the number of positions and uses per row; a use is (name,
    number of the use under that name). The map has the name of its first use.
    """

    name: str
    weight: str
    bias: str | None
    shape: tuple[int, int]
    places: int
    uses: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class JacobianPlan:
    """How the Jacobian of some sites is computed: through linear maps, and directly for the `rest`.

    `added` is the shape of the output of each use for one row; `reached` and `moved` are the outputs (D,) that depend
    on a linear map (on any site, if there is no map) and on any of the sites; `activations` are the numbers that a
    forward pass holds for one row; `eta` (1, D) is the predictor of one row.
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


def linear_maps(problem: Problem, u: Values, sites: Sequence[str] | None = None) -> dict[str, LinearMap]:
    """The linear maps and convolutions whose weight is a latent site without other use, by name.

    With `sites`, only those with a weight or a bias among them.
    """
    return plan_of(problem, u, tuple(latent_names(problem) if sites is None else sites)).maps


def plan_of(problem: Problem, u: Values, sites: tuple[str, ...]) -> JacobianPlan:
    """The plan of some sites, made once for each program."""
    return problem.program.cached(("linear plan", sites), lambda: _make_plan(problem, u, sites))


def check_separable_rows(problem: Problem) -> None:
    """Raise `UnsupportedError` if a row has no Jacobian of its own."""
    if problem.program.coupled:
        expected, got = "rows that do not interact", "bnn.coupled() in the model"
        raise UnsupportedError.of("", expected, got, "NUTS or SVI")


def _run(problem: Problem, w: Mapping[str, Any], row: Any, handler: Any) -> tuple[Any, Any]:
    """Run the model under a handler: eta (1, D) and the handler."""
    with NetworkFunction(w) as run, handler as record:
        problem.program.model(row, None)
    assert isinstance(run, NetworkFunction)
    return run.likelihood.predictor(run.f), record


def _make_plan(problem: Problem, u: Values, sites: tuple[str, ...]) -> JacobianPlan:
    """Make the plan by running the model on one row.

    A weight or a bias is computed through linear maps if it is a site, its transform to the coordinates of the program
    is the identity, and it is used nowhere else.
    """
    program, system = problem.program, problem.system
    check_separable_rows(problem)
    values = system_values(problem, u)
    w = program.constrain(values, *first_rows(problem))
    row = map_data(lambda a: a[:1], problem.x)
    eta = system.to_numpy(program.predictor(w, row))
    check_finite("a finite predictor", eta)
    if not program.language:
        everything = np.ones(eta.shape[-1], dtype=bool)
        return JacobianPlan(sites, {}, sites, {}, everything, everything, 256, eta)

    _, record = _run(problem, w, row, RecordLinear(values=w))
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
    found = {weight: uses for weight, uses in found.items() if not _used_elsewhere(problem, w, row, weight)}
    owners: dict[str | None, set[str | None]] = {}
    for use in record.uses:
        owners.setdefault(use.bias, set()).add(use.weight if use.weight in found else None)

    maps: dict[str, LinearMap] = {}
    for weight, uses in found.items():
        (first, _), bias, shape, _ = uses[0]
        if bias is not None and (
            any(other != bias for _, other, _, _ in uses)
            or bias not in same
            or program.sites[bias].size != shape[1]
            or owners[bias] != {weight}
            or _used_elsewhere(problem, w, row, bias)
        ):
            bias = None
        if weight in sites or bias in sites:
            # Two weights may share one name: the second has its weight's own name, which is unique.
            name = weight if first in maps else first
            places = sum(count for *_, count in uses)
            maps[name] = LinearMap(name, weight, bias, shape, places, tuple(use for use, *_ in uses))
    mapped = {site for linear in maps.values() for site in (linear.weight, linear.bias)}
    used = {use for linear in maps.values() for use in linear.uses}
    inputs = sum(math.prod(map(int, part.shape)) for parts in record.inputs.values() for part in parts)
    activations = max(1, sum(map(math.prod, leading.values())) + inputs)
    moved = _depends(problem, w, row, list(sites))
    reached = _depends(problem, w, row, [name for name in sites if name in mapped]) if maps else moved
    added = {use: shape for use, shape in leading.items() if use in used}
    rest = tuple(name for name in sites if name not in mapped)
    return JacobianPlan(sites, maps, rest, added, reached, moved, activations, eta)


def _untransformed(problem: Problem, values: Mapping[str, Any], w: Mapping[str, Any]) -> set[str]:
    """Latent sites whose unconstrained coordinates are those of the program, at u and at another point."""
    program, system = problem.program, problem.system
    other = {name: value + 0.7 for name, value in values.items()}
    pairs = ((values, w), (other, program.constrain(other, *first_rows(problem))))

    def same(name: str) -> bool:
        each = ((system.to_numpy(after[name]), system.to_numpy(before[name])) for before, after in pairs)
        return all(np.array_equal(*two) for two in each)

    kept = (site.name for site in program.latents if site.shape == site.unconstrained_shape)
    return {name for name in kept if same(name)}


def _nan(w: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {**w, **{name: w[name] * float("nan") for name in names}}


def _used_elsewhere(problem: Problem, w: Mapping[str, Any], row: Any, name: str) -> bool:
    """Whether a site has a use outside linear maps. If so, NaN in its place reaches the predictor."""
    values = _nan(w, [name])
    eta, _ = _run(problem, values, row, SubstituteLinear({name: w[name]}, values))
    return bool(np.any(np.isnan(problem.system.to_numpy(eta))))


def _depends(problem: Problem, w: Mapping[str, Any], row: Any, names: Sequence[str]) -> np.ndarray:
    """Which outputs (D,) depend on the sites: those that NaN in their place reaches."""
    eta = problem.system.to_numpy(problem.program.predictor(_nan(w, names), row))
    return np.isnan(eta[0]) if names else np.zeros(eta.shape[-1], dtype=bool)


# --- factors of the Jacobian, row by row ----------------------------------------------------------


@dataclass(frozen=True)
class Factors:
    """Factors of R' J for some rows.

    `eta` (B, D) is the predictor; `maps` has for each linear map its inputs (B, T, I) and gradients (B, A, T, O) for
    the cotangents `active` (A,); `rest` (B, C, R) is for all C cotangents, of which `resting` reach only the rest.
    """

    rows: slice
    eta: np.ndarray
    maps: dict[str, tuple[np.ndarray, ...]]
    rest: np.ndarray
    active: np.ndarray
    resting: np.ndarray

    def all_gradients(self, name: str) -> np.ndarray:
        """The gradients of a map for all cotangents, (B, C, T, O)."""
        gradients = self.maps[name][1]
        filled = np.zeros((len(gradients), self.rest.shape[1], *gradients.shape[2:]))
        filled[:, self.active] = gradients
        return filled

    def jacobian(self, problem: Problem, plan: JacobianPlan) -> np.ndarray:
        """R' J (B, C, P): outer products of inputs and gradients, summed over places."""
        local = site_slices(problem, plan.sites)
        rows = len(self.eta)
        jacobian = np.zeros((rows, self.rest.shape[1], max(at.stop for at in local.values())))
        for name, linear in plan.maps.items():
            inputs, gradients = self.maps[name]
            for number, column in enumerate(self.active):
                if linear.weight in local:
                    block = jacobian[:, column, local[linear.weight]].reshape(rows, *linear.shape)
                    if linear.places == 1:
                        np.multiply(inputs[:, 0, :, None], gradients[:, number, 0, None, :], out=block)
                    else:
                        np.matmul(inputs.transpose(0, 2, 1), gradients[:, number], out=block)
                if linear.bias in local:
                    jacobian[:, column, local[linear.bias]] = gradients[:, number].sum(1)
        for name, at in site_slices(problem, plan.rest).items():
            jacobian[:, :, local[name]] = self.rest[:, :, at]
        return jacobian


def linear_factors(
    problem: Problem,
    u: Values,
    x: Any,
    cotangents: Cotangents | None = None,
    memory: int = 2**28,
    sites: tuple[str, ...] | None = None,
    extra: Callable[[int], int] = lambda width: 0,
) -> Iterator[Factors]:
    """Factors of R' J in float64 for chunks of the rows of x (NumPy).

    The gradient of a map's weight in column c is sum_t a_t g_ct' (I, O), that of its bias sum_t g_ct. R is the identity
    without `cotangents`. Reverse mode goes back no further than to `sites`, by default all latent ones. `memory` bounds
    the bytes held besides the result, of which `extra` numbers a row are the caller's.
    """
    system = problem.system
    plan = plan_of(problem, u, tuple(latent_names(problem)) if sites is None else sites)
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

        value, *arrays, direct = call("maps", active)
        eta = system.to_numpy(value)[:count]
        maps = {
            name: tuple(system.to_numpy(each[name])[:count].astype(float, copy=False) for each in arrays)
            for name in plan.maps
        }
        rest = np.zeros((count, width, size))
        for columns in (active, resting) if plan.rest else ():
            if columns is resting and len(resting):
                *_, direct = call("rest", resting)
            for name, at in site_slices(problem, plan.rest).items() if len(columns) else ():
                rest[:, columns, at] = system.to_numpy(direct[name])[:count].reshape(count, len(columns), -1)
        yield Factors(slice(start, stop), eta, maps, rest, active, resting)


def compiled(problem: Problem, plan: JacobianPlan, kind: str) -> Callable[..., Any]:
    """The function (values, rows, R) -> eta, inputs, gradients, rest, compiled once for each program, kind and sites.

    `kind` is "maps" for everything, "rest" if no linear map is reached, "predictor" for eta alone. It is computed row
    by row and mapped over rows.
    """
    program, system = problem.program, problem.system

    def build() -> Callable[..., Any]:
        data = first_rows(problem)

        def forward(values: Any, row: Any, perturbations: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            w = program.constrain(values, *data)
            row = map_data(lambda a: a[None], row)
            if not perturbations:
                return program.predictor(w, row)[0], {}
            eta, record = _run(problem, w, row, RecordLinear(perturbations))
            inputs = {}
            for name, linear in plan.maps.items():
                each = (record.inputs[use][number] for use, number in linear.uses)
                inputs[name] = ops.concatenate([part.reshape(-1, linear.shape[0]) for part in each], 0)
            return eta[0], inputs

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
                for name, linear in plan.maps.items():
                    each = [at[use].reshape(len(at[use]), -1, linear.shape[1]) for use in linear.uses]
                    gradients[name] = ops.concatenate(each, 1)
            return eta, inputs, gradients, pulled["rest"]

        if kind == "predictor":
            predictor = system.vmap(lambda values, row: forward(values, row, {})[0], in_axes=(None, 0))
            return system.compile(predictor)
        return system.compile(system.vmap(factors, in_axes=(None, 0, 0)))

    return program.cached(("factors", kind, plan.sites), build)


def jacobians(
    problem: Problem, u: Values, x: Any, memory: int, positions: np.ndarray | None = None
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Rows, predictor (B, D) and its Jacobian (B, D, P) at u, for chunks of the rows of x (NumPy).

    One reverse pass per output, vectorised over rows. P is the flat vector of latent sites, or its `positions`.
    """
    where = Where.of(problem, positions)
    plan = plan_of(problem, u, where.sites)
    extra = 2 * where.size
    for part in linear_factors(problem, u, x, None, memory, where.sites, lambda width: width * extra):
        yield part.rows, part.eta, where.chosen(part.jacobian(problem, plan))
