"""Coordinates in which the curvature at the start is the same in every direction, and a kernel that moves in them.

A sampler with one step size for all directions is held to small steps by the stiffest direction and crosses the widest
one too slowly. Where the curvature differs by a factor of c between the two, it takes about sqrt(c) steps to cross it,
or c where it walks at random. Scaling each coordinate does not help where it is a combination of coordinates that is
stiff, as with collinear inputs. So the curvature of the log density is measured where chains start, by products of the
Hessian with vectors, and the kernel samples z of u = S z, with S S' close to the inverse of the curvature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ppl_bnn.inference.sampling.chains import Kernel
from ppl_bnn.inference.sampling.sampler import Target

# Directions of the curvature that are found; the others share one scale. All of them where there are no more.
RANK = 32
# Multiplications by the Hessian that turn random directions to the stiffest ones.
POWERS = 4
# The largest flat vector whose curvature is measured. Each chain keeps its own S, of RANK times as many numbers.
LARGEST = 1000
# A direction is brought in where a chain starts more standard deviations out than this, by the local curvature.
EDGE = 2.0
# What is left beyond the edge, in standard deviations, that is not worth another step.
NEAR = 0.5
ROUNDS, HALVINGS = 30, 8
# Curvatures below this share of the largest are those of rounding.
FLATTEST = 1e-10


class Whitening(NamedTuple):
    """S = rest (1 - V V') + V diag(scale) V', symmetric. directions: V (P, K), orthonormal; scale (K,); rest ()."""

    directions: Any
    scale: Any
    rest: Any

    def out(self, z: Any) -> Any:
        """u = S z."""
        return self.rest * z + self.directions @ ((self.scale - self.rest) * (self.directions.T @ z))

    def back(self, u: Any) -> Any:
        """z = S^-1 u."""
        inverse = 1.0 / self.rest
        return inverse * u + self.directions @ ((1.0 / self.scale - inverse) * (self.directions.T @ u))


def round_cost(size: int) -> int:
    """Gradients of one round of `brought_in`: a product with the Hessian counts as two."""
    rank = min(RANK, size)
    return 2 * (rank if rank == size else (POWERS + 1) * rank + 1) + HALVINGS


def gradients_of_a_start(size: int) -> tuple[float, float, float]:
    """The fewest, usual and most gradients that bringing a chain of so many coordinates in takes."""
    if size > LARGEST:
        return 0.0, 0.0, 0.0
    each = float(round_cost(size))
    return each, 3.0 * each, ROUNDS * each


class _Begun(NamedTuple):
    """Where a chain is on its way in. gradients: evaluations of the gradient, a Hessian product counted as two."""

    flat: Any
    value: Any
    gradient: Any
    whitening: Whitening
    gradients: Any
    round: Any
    moves: Any


def curvature(gradient_of: Callable[[Any], Any], flat: Any, key: Any) -> Whitening:
    """S at a point, from the absolute eigenvalues of the Hessian: |H|^(-1/2) along the stiffest directions.

    The stiffest directions by subspace iteration, exact where there are at most `RANK` coordinates. The scale of the
    other directions is that of a random one among them.
    """
    import jax
    import jax.numpy as jnp

    size = flat.shape[0]
    rank = min(RANK, size)

    def products(columns: Any) -> Any:
        """Minus the Hessian of the log density times each column."""
        # One after another: all at once would hold the network's values at all rows for each of them.
        found = jax.lax.map(lambda v: jax.jvp(gradient_of, (flat,), (v,))[1], columns.T).T
        return jnp.where(jnp.isfinite(found), -found, 0.0)

    drawn, probing = jax.random.split(key)
    if rank == size:
        basis = jnp.eye(size, dtype=flat.dtype)
    else:
        basis, _ = jnp.linalg.qr(jax.random.normal(drawn, (size, rank), flat.dtype))
        basis = jax.lax.fori_loop(0, POWERS, lambda _, q: jnp.linalg.qr(products(q))[0], basis)
    inner = basis.T @ products(basis)
    values, rotation = jnp.linalg.eigh(0.5 * (inner + inner.T))
    directions = basis @ rotation
    if rank == size:
        level = jnp.ones((), flat.dtype)
    else:
        probe = jax.random.normal(probing, (size, 1), flat.dtype)
        probe = probe - directions @ (directions.T @ probe)
        image = products(probe)
        image = image - directions @ (directions.T @ image)
        level = jnp.linalg.norm(image) / jnp.linalg.norm(probe)
    # Away from a mode curvatures may be negative, and then those nearer to zero say nothing of the posterior's width.
    least = jnp.maximum(FLATTEST * jnp.max(jnp.abs(values)), -jnp.min(values))
    least = jnp.where(least > 0.0, least, 1.0)
    return Whitening(
        directions, jnp.maximum(jnp.abs(values), least) ** -0.5, jnp.maximum(level, least) ** -0.5
    )


def brought_in(
    value_and_gradient: Callable[[Any], tuple[Any, Any]], flat: Any, key: Any
) -> tuple[Any, Whitening, Any]:
    """(where a chain begins, S there, gradient evaluations that it took).

    Directions in which the chain stands within `EDGE` standard deviations, by the local curvature and gradient, are
    left as they are; along the others it moves to that edge, by a Newton step, halved until the log density rises, and
    again from there. On a Gaussian one step arrives. So chains begin as far apart as the posterior is wide, and no
    farther. Where no step raises the density the chain stays.
    """
    import jax
    import jax.numpy as jnp

    size = flat.shape[0]
    rank = min(RANK, size)

    def gradient_of(at: Any) -> Any:
        return value_and_gradient(at)[1]

    def beyond(slope: Any, whitening: Whitening) -> Any:
        """The part of a gradient in z that lies beyond the edge: along each direction found, and in the rest."""
        along = whitening.directions.T @ slope
        rest = slope - whitening.directions @ along
        length, most = jnp.linalg.norm(rest), EDGE * (size - rank) ** 0.5
        kept = along - jnp.clip(along, -EDGE, EDGE)
        return whitening.directions @ kept + jnp.where(length > most, 1.0 - most / length, 0.0) * rest

    def goes_on(begun: _Begun) -> Any:
        return begun.moves & (begun.round < ROUNDS)

    def nearer(begun: _Begun) -> _Begun:
        whitening = curvature(gradient_of, begun.flat, jax.random.fold_in(key, begun.round))
        far = beyond(whitening.out(begun.gradient), whitening)
        step = whitening.out(far)
        shares = 0.5 ** jnp.arange(HALVINGS, dtype=flat.dtype)
        values, gradients = jax.vmap(lambda share: value_and_gradient(begun.flat + share * step))(shares)
        fine = jnp.isfinite(values) & jnp.all(jnp.isfinite(gradients), axis=-1)
        values = jnp.where(fine, values, -jnp.inf)
        best = jnp.argmax(values)
        moves = (jnp.sum(far**2) > NEAR**2) & (values[best] > begun.value)
        return _Begun(
            jnp.where(moves, begun.flat + shares[best] * step, begun.flat),
            jnp.where(moves, values[best], begun.value),
            jnp.where(moves, gradients[best], begun.gradient),
            whitening,
            begun.gradients + round_cost(size),
            begun.round + 1,
            moves,
        )

    value, gradient = value_and_gradient(flat)
    ones, none = jnp.ones((), flat.dtype), jnp.zeros((), jnp.int32)
    unknown = Whitening(jnp.zeros((size, rank), flat.dtype), jnp.ones(rank, flat.dtype), ones)
    # A chain that cannot start here is refused by its density.
    usable = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
    begun = _Begun(flat, value, gradient, unknown, none, none, usable)
    begun = jax.lax.while_loop(goes_on, nearer, begun)
    return begun.flat, begun.whitening, begun.gradients


def pooled(whitenings: Whitening) -> Whitening:
    """One S for chains that share their steps: of the mean of their curvatures S^-2; a leading axis over chains."""
    import jax
    import jax.numpy as jnp

    size = whitenings.directions.shape[1]

    def matrix(one: Whitening) -> Any:
        flat = one.rest**-2
        stiff = one.directions * (one.scale**-2 - flat)
        return stiff @ one.directions.T + flat * jnp.eye(size, dtype=dtype)

    dtype = whitenings.rest.dtype
    none = jnp.zeros((size, size), dtype)
    # One after another: a matrix for each of hundreds of chains would not fit into memory.
    total, _ = jax.lax.scan(lambda total, one: (total + matrix(one), None), none, whitenings)
    values, directions = jnp.linalg.eigh(total / len(whitenings.rest))
    return Whitening(directions, values**-0.5, jnp.ones((), dtype))


def whitened(target: Target, make: Callable[[Any], Kernel]) -> Kernel:
    """The kernel that `make` gives of a target, moving in z; starts are brought in, and u = S z is recorded.

    S goes into the state under "whitening", beside what the kernel keeps there, which must be a dict; the gradients
    that it took, under "whitening_gradients".
    """
    import jax

    bare = make(target)

    def seen(whitening: Whitening) -> Any:
        def log_density(z: Any, data: Any, scale: float = 1.0) -> Any:
            return target.log_density(whitening.out(z), data, scale)

        return _Seen(target, log_density)

    def begin(flat: Any, key: Any, data: Any) -> dict[str, Any]:
        if flat.shape[-1] > LARGEST:
            return bare.begin(flat, key, data)
        own, inner = jax.random.split(key)

        def one(flat: Any, key: Any) -> tuple[Any, Whitening, Any]:
            return brought_in(jax.value_and_grad(lambda at: target.log_density(at, data)), flat, key)

        if bare.pooled:
            keys = jax.random.split(own, flat.shape[0])
            flat, each, spent = jax.lax.map(lambda given: one(*given), (flat, keys))
            whitening = pooled(each)
            z = jax.vmap(whitening.back)(flat)
        else:
            flat, whitening, spent = one(flat, own)
            z = whitening.back(flat)
        state = make(seen(whitening)).begin(z, inner, data)
        return {**state, "whitening": whitening, "whitening_gradients": spent}

    def parted(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is kept here, nothing where the flat vector is too long, and what the kernel keeps."""
        own = {name: value for name, value in state.items() if name.startswith("whitening")}
        return own, {name: value for name, value in state.items() if name not in own}

    def step(state: dict[str, Any], data: Any) -> dict[str, Any]:
        own, inner = parted(state)
        if not own:
            return bare.step(inner, data)
        return {**make(seen(own["whitening"])).step(inner, data), **own}

    def record(state: dict[str, Any]) -> dict[str, Any]:
        own, inner = parted(state)
        kept = bare.record(inner)
        if not own:
            return kept
        out = own["whitening"].out
        return kept | {"u": jax.vmap(out)(kept["u"]) if bare.pooled else out(kept["u"])}

    return dataclasses.replace(
        bare,
        begin=begin,
        step=step,
        record=record,
        usable=lambda state: bare.usable(parted(state)[1]),
        spent=lambda state: state["whitening_gradients"].sum() / bare.cost if "whitening" in state else 0,
    )


class _Seen:
    """A target in other coordinates; all else is that of the target."""

    def __init__(self, target: Any, log_density: Callable[..., Any]):
        self._target, self.log_density = target, log_density

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)
