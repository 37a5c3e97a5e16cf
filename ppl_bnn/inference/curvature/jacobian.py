"""The Jacobian of the predictor in the flat vector, row by row, from linear maps; written once over the protocol.

The gradient of a weight (I, O) of a linear map is sum_t a_t g_t', with a_t (I,) the input of the map and g_t (O,) the
gradient at its output, over the T places and uses of the map in one row. `linear_factors` returns a and g, which
suffice for curvatures and projections; `jacobians` multiplies them out. Other sites are differentiated directly.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.protocol import System
from ppl_bnn.core.arrays import chunks, map_data, padded, row_count
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.curvature.linear_algebra import check_finite
from ppl_bnn.inference.flat_vector import (
    Values,
    Where,
    first_rows,
    latent_names,
    site_slices,
    system_values,
    untransformed,
)
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import RecordLinear, network_output, recorded_linear, used_elsewhere

# (eta (B, D), the rows) -> R (B, D, C)
Cotangents = Callable[[np.ndarray, slice], np.ndarray]


# --- linear maps: which sites they are made of ----------------------------------------------------

# A use of a linear map: its name, and the number of the use under that name.
Use = tuple[str, int]


class LinearMap(NamedTuple):
    """A weight that is a site, a matrix of `shape` (I, O) in C order, with all its uses in a run on one row.

    `bias` is the site added after each use. `uses` have the shapes of their outputs for one row.
    """

    weight: str
    bias: str | None
    shape: tuple[int, int]
    uses: dict[Use, tuple[int, ...]]

    @property
    def places(self) -> int:
        """T, the number of positions and uses per row."""
        return sum(math.prod(shape[:-1]) for shape in self.uses.values())


@dataclass(frozen=True)
class JacobianPlan:
    """How the Jacobian of some sites is computed: through linear maps, by weight, and directly for the `rest`.

    `slices` are those of all sites in their flat vector, `rest` those of the rest in `Factors.rest`. `reached` and
    `moved` are the outputs (D,) that depend on a linear map (on any site, if there is no map) and on any of the sites;
    `activations` are the numbers that a forward pass holds for one row; `eta` (1, D) is the predictor of one row.
    `last` is the weight of the map whose output is eta itself, if that weight and its bias are all the sites.
    """

    slices: dict[str, slice]
    maps: dict[str, LinearMap]
    rest: dict[str, slice]
    reached: np.ndarray
    moved: np.ndarray
    activations: int
    eta: np.ndarray
    last: str | None = None

    @property
    def rest_size(self) -> int:
        """The numbers of `Factors.rest` for one row and one cotangent."""
        return max((at.stop for at in self.rest.values()), default=0)

    @property
    def row_memory(self) -> int:
        """The bytes that a forward or a reverse derivative holds for one row: some arrays for each output of a map.

        What a network does between the sites of the `rest`, as inside of `bnn.module`, is not known.
        """
        outputs = sum(linear.places * linear.shape[1] for linear in self.maps.values())
        return 8 * 8 * (outputs + self.rest_size + self.eta.size)

    def floats(self, width: int) -> int:
        """Numbers returned for one row with `width` cotangents, and held while they are computed."""
        inputs = sum(linear.places * linear.shape[0] for linear in self.maps.values())
        outputs = sum(linear.places * linear.shape[1] for linear in self.maps.values())
        return 2 * inputs + width * (2 * (outputs + self.rest_size) + self.activations) + 2 * self.activations


def linear_maps(problem: Problem, u: Values) -> list[LinearMap]:
    """The linear maps and convolutions whose weight is a latent site without other use, in the order of their use."""
    return list(plan_of(problem, u, tuple(latent_names(problem))).maps.values())


def plan_of(problem: Problem, u: Values, sites: tuple[str, ...]) -> JacobianPlan:
    """The plan of some sites, made once for each program."""
    return problem.program.cached(("linear plan", sites), lambda: _make_plan(problem, u, sites))


def check_separable_rows(problem: Problem) -> None:
    """Raise `UnsupportedError` if a row has no Jacobian of its own."""
    coupled, expected = problem.program.coupled, "rows that do not interact"
    UnsupportedError.check(not coupled, "", expected, "bnn.coupled() in the model", "NUTS or SVI")


def _make_plan(problem: Problem, u: Values, sites: tuple[str, ...]) -> JacobianPlan:
    """Make the plan by running the model on one row.

    A weight or a bias is computed through linear maps if it is a site, its transform to the coordinates of the program
    is the identity, and it is used nowhere else.
    """
    program, system = problem.program, problem.system
    check_separable_rows(problem)
    values, slices = system_values(problem, u), site_slices(problem, sites)
    w = program.constrain(values, *first_rows(problem))
    row = map_data(lambda a: a[:1], problem.x)
    eta = system.to_numpy(program.predictor(w, row))
    check_finite("a finite predictor", eta)
    if not program.language:
        everything = np.ones(eta.shape[-1], dtype=bool)
        return JacobianPlan(slices, {}, slices, everything, everything, 256, eta)

    with RecordLinear(values=w) as record:
        run = network_output(program.model, w, row)
    same = untransformed(problem).intersection(latent_names(problem))
    added: dict[Use, tuple[int, ...]] = {}
    found = defaultdict[str, list[tuple[Use, Any]]](list)
    counts = Counter[str]()
    for use in record.uses:
        key = use.name, counts[use.name]
        counts[use.name] += 1
        added[key] = (*map(int, record.inputs[use.name][key[1]].shape[:-1]), use.matrix_shape[1])
        if use.weight in same and program.sites[use.weight].size == math.prod(use.matrix_shape):
            found[use.weight].append((key, use))
    outside = functools.partial(used_elsewhere, program.model, w, row)
    found = {weight: uses for weight, uses in found.items() if not outside([weight])}
    owners = defaultdict[str | None, set[str | None]](set)
    for use in record.uses:
        owners[use.bias].add(use.weight if use.weight in found else None)

    maps: dict[str, LinearMap] = {}
    for weight, uses in found.items():
        bias, shape = uses[0][1].bias, uses[0][1].matrix_shape
        if not (
            bias in same
            and all(use.bias == bias for _, use in uses)
            and program.sites[bias].size == shape[1]
            and owners[bias] == {weight}
            and not outside([bias])
        ):
            bias = None
        if weight in sites or bias in sites:
            maps[weight] = LinearMap(weight, bias, shape, {key: added[key] for key, _ in uses})
    mapped = {site for linear in maps.values() for site in (linear.weight, linear.bias)}
    inputs = sum(math.prod(map(int, part.shape)) for parts in record.inputs.values() for part in parts)
    activations = max(1, sum(map(math.prod, added.values())) + inputs)
    moved = depends(problem, w, row, sites)
    reached = depends(problem, w, row, [name for name in sites if name in mapped]) if maps else moved
    rest = site_slices(problem, [name for name in sites if name not in mapped])
    # The output of a map is the predictor if it is the very object: nothing comes after it.
    last = None
    if len(maps) == 1 and not rest and run.predictor is record.outputs[-1]:
        weight = record.uses[-1].weight
        last = weight if weight in slices and weight in maps and maps[weight].places == 1 else None
    return JacobianPlan(slices, maps, rest, reached, moved, activations, eta, last)


def depends(problem: Problem, w: Mapping[str, Any], row: Any, names: Sequence[str]) -> np.ndarray:
    """Which outputs (D,) depend on the sites: those that NaN in their place reaches."""
    missing = {**w, **{name: w[name] * math.nan for name in names}}
    eta = problem.system.to_numpy(problem.program.predictor(missing, row))
    return np.isnan(eta[0]) if names else np.zeros(eta.shape[-1], dtype=bool)


# --- factors of the Jacobian, row by row ----------------------------------------------------------


class SiteFactors(NamedTuple):
    """Factors of R' J for one site: gradients (B, A, p) in the site itself, for the cotangents `columns` (A,).

    A weight of a linear map has `inputs` (B, T, I), and gradients (B, A, T, O) at the output of the map.
    """

    site: str
    columns: np.ndarray
    inputs: np.ndarray | None
    gradients: np.ndarray


@dataclass(frozen=True)
class Factors:
    """Factors of R' J for some rows.

    `eta` (B, D) is the predictor; `maps` has for each linear map its inputs (B, T, I) and gradients (B, A, T, O) for
    the cotangents `active` (A,); `rest` (B, C, R) is for all C cotangents, of which `resting` reach only the rest.
    """

    plan: JacobianPlan
    rows: slice
    eta: np.ndarray
    maps: dict[str, tuple[np.ndarray, np.ndarray]]
    rest: np.ndarray
    active: np.ndarray
    resting: np.ndarray

    def by_site(self) -> Iterator[SiteFactors]:
        """The factors of each site of the plan."""
        for weight, linear in self.plan.maps.items():
            inputs, gradients = self.maps[weight]
            if weight in self.plan.slices:
                yield SiteFactors(weight, self.active, inputs, gradients)
            if linear.bias in self.plan.slices:
                yield SiteFactors(linear.bias, self.active, None, gradients.sum(2))
        for name, at in self.plan.rest.items():
            yield SiteFactors(name, np.arange(self.rest.shape[1]), None, self.rest[:, :, at])

    def jacobian(self) -> np.ndarray:
        """R' J (B, C, P): outer products of inputs and gradients, summed over places."""
        slices, rows = self.plan.slices, len(self.eta)
        jacobian = np.zeros((rows, self.rest.shape[1], max(at.stop for at in slices.values())))
        for site, columns, inputs, gradients in self.by_site():
            if inputs is None:
                jacobian[:, columns, slices[site]] = gradients
                continue
            shape = inputs.shape[-1], gradients.shape[-1]
            for number, column in enumerate(columns):
                block = jacobian[:, column, slices[site]].reshape(rows, *shape)
                if inputs.shape[1] == 1:
                    np.multiply(inputs[:, 0, :, None], gradients[:, number, 0, None, :], out=block)
                else:
                    np.matmul(inputs.transpose(0, 2, 1), gradients[:, number], out=block)
        return jacobian


def linear_factors(
    problem: Problem,
    u: Values,
    x: Any,
    cotangents: Cotangents | None = None,
    memory: int = 2**28,
    sites: tuple[str, ...] | None = None,
    extra: int = 0,
) -> Iterator[Factors]:
    """Factors of R' J in float64 for chunks of the rows of x (NumPy).

    The gradient of a map's weight in column c is sum_t a_t g_ct' (I, O), that of its bias sum_t g_ct. R is the identity
    without `cotangents`. Reverse mode goes back no further than to `sites`, by default all latent ones. `memory` bounds
    the bytes held besides the result, of which `extra` numbers for each row and cotangent are the caller's.
    """
    system = problem.system
    plan = plan_of(problem, u, tuple(latent_names(problem)) if sites is None else sites)
    outputs = plan.eta.shape[-1]
    width = outputs if cotangents is None else np.asarray(cotangents(plan.eta, slice(0, 1))).shape[-1]
    rows = row_count(x)
    chunk = int(np.clip(memory // (8 * (plan.floats(width) + extra * width)), 1, rows))
    values = system_values(problem, u)
    for start, stop in chunks(rows, chunk):
        count = stop - start
        part = padded_rows(problem, x, start, stop, chunk)
        if cotangents is None:
            root = np.broadcast_to(np.eye(outputs), (count, outputs, outputs))
        else:
            eta = system.to_numpy(predictor_by_row(problem)(values, part))[:count]
            # Overflow here is detected later, from the gradients.
            with np.errstate(over="ignore", invalid="ignore"):
                root = np.asarray(cotangents(eta, slice(start, stop)))
        # If noise is sampled, half of all cotangents affect no weight. If it is known, they affect nothing.
        reaching = np.any(root[:, plan.reached] != 0, axis=(0, 1))
        active = np.flatnonzero(reaching) if reaching.any() else np.zeros(1, dtype=int)
        reaching[active] = True
        resting = np.flatnonzero(np.any(root[:, plan.moved] != 0, axis=(0, 1)) & ~reaching)

        def call(plan: JacobianPlan, columns: np.ndarray, root: Any = root, part: Any = part) -> Any:
            cotangent = system.asarray(padded(np.ascontiguousarray(root[:, :, columns]), chunk))
            return _factors(problem, plan)(values, part, cotangent)

        value, *arrays, direct = call(plan, active)
        maps: dict[str, Any] = {
            name: tuple(system.to_numpy(each[name])[:count].astype(float, copy=False) for each in arrays)
            for name in plan.maps
        }
        pulled = [(active, direct)]
        if plan.rest and len(resting):
            pulled.append((resting, call(replace(plan, maps={}), resting)[-1]))
        rest = np.zeros((count, width, plan.rest_size))
        for columns, each in pulled:
            for name, at in plan.rest.items():
                rest[:, columns, at] = system.to_numpy(each[name])[:count].reshape(count, len(columns), -1)
        eta = system.to_numpy(value)[:count]
        yield Factors(plan, slice(start, stop), eta, maps, rest, active, resting)


def padded_rows(problem: Problem, data: Any, start: int, stop: int, size: int) -> Any:
    """Rows start..stop of data (NumPy) as arrays of the system, padded to a chunk of the common size."""
    return map_data(lambda a: problem.system.asarray(padded(np.asarray(a[start:stop]), size)), data)


def predictor_of(
    program: Any, values: Any, sites: tuple[str, ...], x: Any, first: Any
) -> Callable[[Any], Any]:
    """eta (B, D) as a function of the flat vector of some sites."""

    def eta(flat: Any) -> Any:
        w = program.constrain({**values, **program.unravel(flat, sites)}, *first)
        return program.predictor(w, x)

    return eta


def predictor_by_row(problem: Problem) -> Callable[..., Any]:
    """The function (values, rows) -> eta (B, D), row by row, compiled once for each program."""
    program, system = problem.program, problem.system

    def one(values: Any, row: Any, first: Any) -> Any:
        w = program.constrain(values, *first)
        return program.predictor(w, map_data(lambda a: a[None], row))[0]

    def build() -> Any:
        return system.compile(system.vmap(one, in_axes=(None, 0, None)))

    # An argument, because a constant would make it another program for other data.
    first = first_rows(problem)
    return lambda values, rows: program.cached("predictor by row", build)(values, rows, first)


def _factors(problem: Problem, plan: JacobianPlan) -> Callable[..., Any]:
    """The function (values, rows, R) -> eta, inputs, gradients, rest, compiled once for each program and sites.

    It is computed row by row and mapped over rows. A plan without its linear maps has the gradients of the rest alone.
    """
    program, system = problem.program, problem.system

    def factors(values: Any, row: Any, root: Any, first: Any) -> tuple[Any, Any, Any, Any]:
        row = map_data(lambda a: a[None], row)

        def of(leaves: Any) -> tuple[Any, Any]:
            w = program.constrain({**values, **leaves["rest"]}, *first)
            if not plan.maps:
                eta = program.predictor(w, row)[0]
                return eta, (eta, {})
            perturbations = defaultdict[str, dict[int, Any]](dict)
            for (name, number), added in leaves["added"].items():
                perturbations[name][number] = added
            run, recorded = recorded_linear(program.model, w, row, perturbations)
            eta, inputs = run.predictor[0], {}
            for weight, linear in plan.maps.items():
                each = (recorded[use][number] for use, number in linear.uses)
                inputs[weight] = ops.concatenate([part.reshape(-1, linear.shape[0]) for part in each], 0)
            return eta, (eta, inputs)

        uses = [use for linear in plan.maps.values() for use in linear.uses.items()]
        added = {use: system.asarray(np.zeros(shape)) for use, shape in uses}
        leaves = {"rest": {name: values[name] for name in plan.rest}, "added": added}
        _, pullback, (eta, inputs) = system.vjp(of, leaves)
        pulled = system.vmap(pullback)(root.T)
        at, gradients = pulled["added"], {}
        for weight, linear in plan.maps.items():
            each = [at[use].reshape(len(at[use]), -1, linear.shape[1]) for use in linear.uses]
            gradients[weight] = ops.concatenate(each, 1)
        return eta, inputs, gradients, pulled["rest"]

    def build() -> Any:
        return system.compile(system.vmap(factors, in_axes=(None, 0, 0, None)))

    key, first = ("factors", tuple(plan.slices), bool(plan.maps)), first_rows(problem)
    return lambda values, rows, root: program.cached(key, build)(values, rows, root, first)


def hessian_product(
    system: System, function: Callable[..., Any], flat: Any, *arguments: Any
) -> Callable[..., Any]:
    """The function v -> H v, with H the Hessian of function(flat, *arguments) in `flat`."""

    def gradient(flat: Any) -> tuple[Any, Any]:
        value, gradient = system.value_and_grad(function)(flat, *arguments)
        return gradient, value

    # The Hessian is symmetric: its product with a vector from the left is that from the right.
    return system.vjp(gradient, flat)[1]


def jacobians(
    problem: Problem, u: Values, x: Any, memory: int, positions: np.ndarray | None = None
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Rows, predictor (B, D) and its Jacobian (B, D, P) at u, for chunks of the rows of x (NumPy).

    One reverse pass per output, vectorised over rows. P is the flat vector of latent sites, or its `positions`.
    """
    where = Where.of(problem, positions)
    for part in linear_factors(problem, u, x, None, memory, where.sites, 2 * where.size):
        yield part.rows, part.eta, where.chosen(part.jacobian())


def row_bytes(problem: Problem, u: Values, where: Where) -> int:
    """The bytes of the Jacobian of one row while it is made."""
    return 8 * 2 * plan_of(problem, u, where.sites).eta.shape[-1] * where.size
