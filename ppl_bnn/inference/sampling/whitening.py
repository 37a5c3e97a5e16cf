"""Coordinates of equal curvature at the start, u = S z with S S' close to the inverse curvature, and a kernel in them.

The stiffest direction limits the step size of a sampler. If curvatures differ by a factor of c, crossing the widest
direction takes about sqrt(c) steps, or c for a random walk. Scaling coordinates does not help if a combination of them
is stiff, as with collinear inputs. The curvature is measured by Hessian-vector products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ppl_bnn.inference.sampling.chains import Kernel

# Number of directions that are resolved, at most. The others share one scale.
RANK = 32
# Multiplications by the Hessian in the subspace iteration.
POWERS = 4
# The largest flat vector that is whitened. Each chain keeps its own S, RANK times as many numbers.
LARGEST = 1000
# A chain that starts more standard deviations out than this along a direction is moved in.
EDGE = 2.0
# A distance beyond the edge, in standard deviations, that is not worth another step.
NEAR = 0.5
ROUNDS, HALVINGS = 30, 8
# Curvatures below this share of the largest are rounding errors.
FLATTEST = 1e-10


class Whitening(NamedTuple):
    """S = rest (1 - V V') + V diag(scale) V', with V = directions (P, K) orthonormal, scale (K,) and rest ()."""

    directions: Any
    scale: Any
    rest: Any

    def out(self, z: Any) -> Any:
        """u = S z."""
        return self.rest * z + self.directions @ ((self.scale - self.rest) * (self.directions.T @ z))

    def back(self, u: Any) -> Any:
        """z = S^-1 u."""
        return Whitening(self.directions, 1.0 / self.scale, 1.0 / self.rest).out(u)


def round_cost(size: int) -> int:
    """Gradients of one round of `brought_in`; a Hessian product counts as two."""
    rank = min(RANK, size)
    return 2 * (rank if rank == size else (POWERS + 1) * rank + 1) + HALVINGS


def curvature(gradient_of: Callable[[Any], Any], flat: Any, key: Any) -> Whitening:
    """S = |H|^(-1/2) at a point, from the absolute eigenvalues of the Hessian; `gradient_of` is the gradient function.

    The stiffest directions come from subspace iteration (exact for at most `RANK` coordinates). The others have the
    scale of a random direction among them.
    """
    import jax
    import jax.numpy as jnp

    size = flat.shape[0]
    rank = min(RANK, size)

    def products(columns: Any) -> Any:
        """Minus the Hessian of the log density times each column."""
        # Sequentially: all at once would hold the network's values at all rows for each column.
        found = jax.lax.map(lambda v: jax.jvp(gradient_of, (flat,), (v,))[1], columns.T).T
        return jnp.where(jnp.isfinite(found), -found, 0.0)

    drawn, probing = jax.random.split(key)
    basis, level = jnp.eye(size, dtype=flat.dtype), jnp.ones((), flat.dtype)
    if rank < size:
        basis, _ = jnp.linalg.qr(jax.random.normal(drawn, (size, rank), flat.dtype))
        basis = jax.lax.fori_loop(0, POWERS, lambda _, q: jnp.linalg.qr(products(q))[0], basis)
    inner = basis.T @ products(basis)
    values, rotation = jnp.linalg.eigh(0.5 * (inner + inner.T))
    directions = basis @ rotation
    if rank < size:
        probe = jax.random.normal(probing, (size, 1), flat.dtype)
        probe = probe - directions @ (directions.T @ probe)
        image = products(probe)
        image = image - directions @ (directions.T @ image)
        level = jnp.linalg.norm(image) / jnp.linalg.norm(probe)
    # Away from a mode curvatures may be negative. Small ones then carry no information on the posterior's width.
    least = jnp.maximum(FLATTEST * jnp.max(jnp.abs(values)), -jnp.min(values))
    least = jnp.where(least > 0.0, least, 1.0)
    return Whitening(
        directions, jnp.maximum(jnp.abs(values), least) ** -0.5, jnp.maximum(level, least) ** -0.5
    )


def brought_in(value_and_gradient: Callable[..., Any], flat: Any, key: Any) -> tuple[Any, Whitening, Any]:
    """Move the start of a chain in where it is more than `EDGE` standard deviations out, by the local curvature.

    Along such directions the chain takes Newton steps to the edge, each halved until the log density rises; the others
    are unchanged. On a Gaussian one step arrives. Returns the start, S there, and the gradient evaluations.
    """
    import jax
    import jax.numpy as jnp

    size = flat.shape[0]
    rank = min(RANK, size)

    def beyond(slope: Any, whitening: Whitening) -> Any:
        """The part of a gradient in z beyond the edge: along each resolved direction, and in the rest."""
        along = whitening.directions.T @ slope
        rest = slope - whitening.directions @ along
        length, most = jnp.linalg.norm(rest), EDGE * (size - rank) ** 0.5
        kept = along - jnp.clip(along, -EDGE, EDGE)
        return whitening.directions @ kept + jnp.where(length > most, 1.0 - most / length, 0.0) * rest

    def goes_on(carry: Any) -> Any:
        _, _, done, moves = carry
        return moves & (done < ROUNDS)

    def nearer(carry: Any) -> Any:
        here, _, done, _ = carry
        flat, value, gradient = here
        whitening = curvature(lambda at: value_and_gradient(at)[1], flat, jax.random.fold_in(key, done))
        far = beyond(whitening.out(gradient), whitening)
        step = whitening.out(far)
        shares = 0.5 ** jnp.arange(HALVINGS, dtype=flat.dtype)
        values, gradients = jax.vmap(lambda share: value_and_gradient(flat + share * step))(shares)
        fine = jnp.isfinite(values) & jnp.all(jnp.isfinite(gradients), axis=-1)
        values = jnp.where(fine, values, -jnp.inf)
        best = jnp.argmax(values)
        moves = (jnp.sum(far**2) > NEAR**2) & (values[best] > value)
        there = (flat + shares[best] * step, values[best], gradients[best])
        here = jax.tree.map(lambda new, old: jnp.where(moves, new, old), there, here)
        return here, whitening, done + 1, moves

    value, gradient = value_and_gradient(flat)
    ones, none = jnp.ones((), flat.dtype), jnp.zeros((), jnp.int32)
    unknown = Whitening(jnp.zeros((size, rank), flat.dtype), jnp.ones(rank, flat.dtype), ones)
    # A chain that cannot start here is rejected later by its density.
    usable = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
    begun: Any = ((flat, value, gradient), unknown, none, usable)
    (flat, *_), whitening, rounds, _ = jax.lax.while_loop(goes_on, nearer, begun)
    return flat, whitening, rounds * round_cost(size)


def pooled(whitenings: Whitening) -> Whitening:
    """One S for chains that share their steps, of their mean curvature S^-2 over the leading axis."""
    import jax
    import jax.numpy as jnp

    size = whitenings.directions.shape[1]

    def matrix(one: Whitening) -> Any:
        flat = one.rest**-2
        stiff = one.directions * (one.scale**-2 - flat)
        return stiff @ one.directions.T + flat * jnp.eye(size, dtype=dtype)

    dtype = whitenings.rest.dtype
    none = jnp.zeros((size, size), dtype)
    # Sequentially: a matrix for each of hundreds of chains would not fit into memory.
    total, _ = jax.lax.scan(lambda total, one: (total + matrix(one), None), none, whitenings)
    values, directions = jnp.linalg.eigh(total / len(whitenings.rest))
    return Whitening(directions, values**-0.5, jnp.ones((), dtype))


class Whitened(NamedTuple):
    """The state of a kernel that moves in z, with S and the gradients that it took."""

    inner: Any
    whitening: Whitening
    gradients: Any


def whitened(target: Any, make: Callable[[Callable[..., Any]], Kernel], wanted: bool) -> Kernel:
    """The kernel that `make` creates for the log density of a target, in the coordinates z if that is `wanted`.

    Starts are moved in, and u = S z is recorded. A target of more than `LARGEST` coordinates keeps them.
    """
    log_density = target.log_density
    bare = make(log_density)
    if not wanted or target.dimension > LARGEST:
        return bare
    import jax

    def within(whitening: Whitening) -> Kernel:
        def seen(z: Any, data: Any, scale: float = 1.0) -> Any:
            return log_density(whitening.out(z), data, scale)

        return make(seen)

    def begin(flat: Any, key: Any, data: Any) -> Whitened:
        own, inner = jax.random.split(key)

        def one(flat: Any, key: Any) -> tuple[Any, Whitening, Any]:
            return brought_in(jax.value_and_grad(lambda at: log_density(at, data)), flat, key)

        if bare.pooled:
            keys = jax.random.split(own, flat.shape[0])
            flat, each, spent = jax.lax.map(lambda given: one(*given), (flat, keys))
            whitening = pooled(each)
            z = jax.vmap(whitening.back)(flat)
        else:
            flat, whitening, spent = one(flat, own)
            z = whitening.back(flat)
        return Whitened(within(whitening).begin(z, inner, data), whitening, spent)

    def step(state: Whitened, data: Any) -> Whitened:
        return state._replace(inner=within(state.whitening).step(state.inner, data))

    def record(state: Whitened) -> dict[str, Any]:
        kept, out = bare.record(state.inner), state.whitening.out
        return kept | {"u": jax.vmap(out)(kept["u"]) if bare.pooled else out(kept["u"])}

    return dataclasses.replace(
        bare,
        begin=begin,
        step=step,
        record=record,
        usable=lambda state: bare.usable(state.inner),
        spent=lambda state: state.gradients.sum() / bare.cost,
    )
