"""Stochastic gradient descent on a noisy loss: Adam, averaging of iterates, and a state that can be stored.

Both systems run the same loop, one stretch of steps at a time. In JAX a stretch is one compiled loop of any number of
steps up to its length, so it is compiled once. In torch the steps run one by one. If a loss is not finite, the loop
stops and returns to the parameters of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.inference.method import Stopwatch

# Steps between two checks of the losses.
STRETCH = 100
# (parameters, seed, weight of the complexity, x, y) -> (loss, (likelihood cost, complexity cost))
Loss = Callable[..., tuple[Any, tuple[Any, Any]]]


@dataclass(frozen=True)
class Stretch:
    """The inputs of several steps of the loop, one entry per step.

    Attributes
    ----------
    rates : ndarray
        Learning rates.
    averaged : ndarray
        Whether the iterate is part of the average.
    weights : ndarray
        Weights of the complexity cost.
    indices : ndarray or None
        Rows of the batches, shape (steps, B); None for all rows.
    """

    rates: np.ndarray
    averaged: np.ndarray
    weights: np.ndarray
    indices: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rates)


class Descent(Protocol):
    """The loop in one system. Parameters are dicts of unconstrained arrays, passed in and out as NumPy arrays.

    Attributes
    ----------
    compile_seconds : float
        Seconds of compilation so far.
    """

    compile_seconds: float

    def begin(self, parameters: Mapping[str, np.ndarray], seed: int) -> None:
        """Start at these parameters and discard the state.

        Parameters
        ----------
        parameters : mapping of str to ndarray
            Parameters by name.
        seed : int
            Seed of the random numbers of the loss.
        """
        ...

    def advance(self, stretch: Stretch) -> np.ndarray:
        """Take the steps of a stretch.

        Parameters
        ----------
        stretch : Stretch
            The inputs of the steps.

        Returns
        -------
        ndarray
            (loss, likelihood cost, complexity cost) of each step, shape (n, 3). n < len(stretch) if a loss was not
            finite; that loss is the last row. If the loss of the last step was finite and its gradient was not, the row
            is NaN.
        """
        ...

    def average(self) -> dict[str, np.ndarray]:
        """The mean of the averaged iterates; the latest iterate if there are none yet."""
        ...

    def latest(self) -> dict[str, np.ndarray]:
        """The current parameters; after a loss that was not finite, those of the last step with a finite loss."""
        ...

    def failed(self) -> dict[str, np.ndarray]:
        """The parameters at which a loss was not finite. They are not finite themselves if a gradient was not."""
        ...

    def state(self) -> dict[str, np.ndarray]:
        """Everything that the next step depends on."""
        ...

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a state that `state` returned.

        Parameters
        ----------
        state : mapping of str to ndarray
            The state.
        """
        ...


def descent(
    problem: Problem, loss: Loss, start: Mapping[str, np.ndarray], batch: int | None, streamed: bool = False
) -> Descent:
    """The loop of the system of a problem.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    loss : callable
        (parameters, seed, weight of the complexity, x, y) -> (loss, (likelihood cost, complexity cost)).
    start : mapping of str to ndarray
        Parameters of the right shapes.
    batch : int or None
        Rows per step; None for all rows.
    streamed : bool, default False
        Whether batches are taken from the rows in host memory, one stretch at a time, so that no other rows are moved.

    Returns
    -------
    Descent
        The loop.
    """
    return _DESCENTS[problem.system.name](problem, loss, start, batch, streamed)


def batch_indices(rows: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Row numbers of one batch after another, without end.

    Permutations of all rows are concatenated and cut into batches, so every row occurs once per epoch even if `size`
    does not divide the number of rows.

    Parameters
    ----------
    rows : int
        Number of rows.
    size : int
        Rows per batch.
    seed : int
        Seed of the permutations.

    Yields
    ------
    ndarray
        Row numbers, shape (size,).
    """
    rng = np.random.default_rng(site_seed("batches", seed))
    waiting = np.empty(0, dtype=np.int64)
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, rng.permutation(rows)])
        yield waiting[:size]
        waiting = waiting[size:]


class _JaxDescent:
    """A stretch as one compiled loop over one flat vector: many small arrays would each need their own update."""

    def __init__(
        self, problem: Problem, loss: Loss, start: Mapping[str, Any], batch: int | None, streamed: bool
    ):
        import jax
        import jax.numpy as jnp
        import numpyro
        import optax
        from jax.flatten_util import ravel_pytree

        watch = Stopwatch()
        self._problem, self._batch, self._streamed = problem, batch, streamed
        flat, self._unravel = ravel_pytree({name: self._array(value) for name, value in start.items()})
        unravel, adam = self._unravel, optax.scale_by_adam()
        self._initial = jax.jit(adam.init)

        def advance(
            state: Any, count: Any, rates: Any, averaged: Any, weights: Any, indices: Any, x: Any, y: Any
        ) -> Any:
            def rows(step: Any) -> tuple[Any, Any]:
                if streamed:
                    return map_data(lambda a: a[step], x), y[step]
                if batch is None:
                    return x, y
                return map_data(lambda a: a[indices[step]], x), y[indices[step]]

            def body(carry: Any) -> Any:
                step, (flat, inner, total, key), trail, _ = carry
                key, inside = jax.random.split(key)

                def at(flat: Any) -> Any:
                    return loss(unravel(flat), inside, weights[step], *rows(step))

                (value, parts), gradient = jax.value_and_grad(at, has_aux=True)(flat)
                update, inner = adam.update(gradient, inner)
                flat = flat - rates[step] * update
                total = total + averaged[step] * flat
                trail = trail.at[step].set(jnp.stack([value, *parts]).astype(trail.dtype))
                return step + 1, (flat, inner, total, key), trail, jnp.isfinite(value)

            trail = jnp.full((STRETCH, 3), jnp.nan, dtype=flat.dtype)
            step, state, trail, _ = jax.lax.while_loop(
                lambda carry: (carry[0] < count) & carry[3], body, (0, state, trail, True)
            )
            return step, state, trail

        self._seeds = problem.system.seeds
        self._start(flat, 0)
        one = np.zeros(1)
        stretch = Stretch(one, one, one, None if batch is None else np.zeros((1, batch), dtype=int))
        with problem.system.turn, numpyro.validation_enabled(False):
            lowered = jax.jit(advance).lower(*self._arguments(stretch))
        self._advance = lowered.compile()
        self.compile_seconds = watch()

    def _array(self, value: Any) -> Any:
        return self._problem.system.asarray(np.asarray(value, dtype=float))

    def _start(self, flat: Any, seed: int) -> None:
        import jax.numpy as jnp

        self._count = 0
        self._previous: tuple[Any, Stretch] | None = None
        self._state = (flat, self._initial(flat), jnp.zeros_like(flat), self._seeds(seed, 1)[0])

    def begin(self, parameters: Mapping[str, np.ndarray], seed: int) -> None:
        from jax.flatten_util import ravel_pytree

        self._start(ravel_pytree({name: self._array(value) for name, value in parameters.items()})[0], seed)

    def _arguments(self, stretch: Stretch) -> tuple[Any, ...]:
        problem, missing = self._problem, STRETCH - len(stretch)
        columns = (stretch.rates, stretch.averaged.astype(float), stretch.weights)
        padded = [self._array(np.concatenate([column, np.zeros(missing)])) for column in columns]
        indices, data = None, (problem.x, problem.y) if not self._streamed else None
        if stretch.indices is not None:
            chosen = np.concatenate([stretch.indices, np.repeat(stretch.indices[:1], missing, axis=0)])
            if self._streamed:
                data = (
                    map_data(lambda a: problem.system.asarray(np.asarray(a[chosen])), problem.inputs),
                    problem.system.asarray(np.asarray(problem.targets[chosen])),
                )
            else:
                indices = problem.system.asarray(chosen)
        return self._state, np.asarray(len(stretch)), *padded, indices, *(data or ())

    def advance(self, stretch: Stretch) -> np.ndarray:
        taken, state, trail = self._advance(*self._arguments(stretch))
        done = int(taken)
        trail = np.array(trail[:done], dtype=np.float64)
        # The gradient of the last step was not finite, and no later loss would show it.
        unsaid = bool(np.isfinite(trail[-1, 0])) and not np.all(np.isfinite(np.asarray(state[0])))
        if unsaid:
            trail[-1] = np.nan
        if not np.isfinite(trail[-1, 0]):
            self._failed = self._after(self._state, stretch, done - 1)
            state = self._failed if unsaid else self._before(stretch, done)
            done = 0
        self._previous = (self._state, stretch)
        self._state = state
        self._count += int(stretch.averaged[:done].sum())
        return trail

    def _after(self, state: Any, stretch: Stretch, count: int) -> Any:
        """The state after the first `count` steps of a stretch, computed again."""
        if count == 0:
            return state
        indices = None if stretch.indices is None else stretch.indices[:count]
        part = Stretch(stretch.rates[:count], stretch.averaged[:count], stretch.weights[:count], indices)
        return self._advance(state, *self._arguments(part)[1:])[1]

    def _before(self, stretch: Stretch, done: int) -> Any:
        """The state of the last step with a finite loss, if the loss of step `done` was not finite."""
        if done > 1:
            return self._after(self._state, stretch, done - 2)
        if self._previous is None:
            return self._state
        state, previous = self._previous
        return self._after(state, previous, len(previous) - 1)

    def latest(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in self._unravel(self._state[0]).items()}

    def failed(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in self._unravel(self._failed[0]).items()}

    def average(self) -> dict[str, np.ndarray]:
        flat, _, total, _ = self._state
        mean = total / self._count if self._count else flat
        return {name: np.asarray(value) for name, value in self._unravel(mean).items()}

    def state(self) -> dict[str, np.ndarray]:
        import jax

        leaves = jax.tree_util.tree_leaves(self._state)
        return {f"state{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)} | {
            "count": np.asarray(self._count)
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        import jax
        import jax.numpy as jnp

        leaves, structure = jax.tree_util.tree_flatten(self._state)
        given = [
            jnp.asarray(state[f"state{index}"], dtype=leaf.dtype).reshape(leaf.shape)
            for index, leaf in enumerate(leaves)
        ]
        self._state, self._previous = jax.tree_util.tree_unflatten(structure, given), None
        self._count = int(state["count"])


class _TorchDescent:
    """Steps one by one, with one fused Adam for all parameters.

    A loss with parameters of its own (Pyro keeps those of its guides in a store) provides them as `loss.leaves`,
    tensors by name. For any other loss the tensors are created here.
    """

    def __init__(
        self, problem: Problem, loss: Loss, start: Mapping[str, Any], batch: int | None, streamed: bool
    ):
        system = problem.system
        self._problem, self._loss, self._batch, self._streamed = problem, loss, batch, streamed
        self.compile_seconds = 0.0
        kept = getattr(loss, "leaves", None)
        if kept is None:
            kept = {name: system.asarray(np.asarray(value, float)) for name, value in start.items()}
        self._leaves: dict[str, Any] = {name: leaf.requires_grad_() for name, leaf in kept.items()}
        self._failed: dict[str, np.ndarray] = {}
        self._begin()

    def _begin(self) -> None:
        import torch

        self._optimiser = torch.optim.Adam(list(self._leaves.values()), lr=1.0, fused=True)
        # Detached, they share the memory that the optimiser writes to.
        self._iterates = {name: leaf.detach() for name, leaf in self._leaves.items()}
        self._totals = {name: torch.zeros_like(value) for name, value in self._iterates.items()}
        self._count = 0

    def begin(self, parameters: Mapping[str, np.ndarray], seed: int) -> None:
        self._problem.system.seeds(seed, 1)
        for name, value in parameters.items():
            iterate = self._iterates[name]
            iterate.copy_(self._problem.system.asarray(np.asarray(value, float)).reshape(iterate.shape))
        self._begin()

    def _rows(self, index: np.ndarray) -> tuple[Any, Any]:
        import torch

        problem = self._problem
        if self._streamed:
            asarray = problem.system.asarray
            return map_data(lambda a: asarray(np.asarray(a[index])), problem.inputs), asarray(
                np.asarray(problem.targets[index])
            )
        chosen = torch.as_tensor(index)
        return map_data(lambda a: a[chosen], problem.x), problem.y[chosen]

    def advance(self, stretch: Stretch) -> np.ndarray:
        trail = np.full((len(stretch), 3), np.nan)
        group = self._optimiser.param_groups[0]
        data = None if stretch.indices is not None else (self._problem.x, self._problem.y)
        before = {name: value.clone() for name, value in self._iterates.items()}
        # Pyro warns of a NaN loss; here the loop stops at it.
        with ignored("Encountered NaN"):
            for step in range(len(stretch)):
                rows = data if stretch.indices is None else self._rows(stretch.indices[step])
                assert rows is not None
                value, (likelihood, complexity) = self._loss(
                    self._leaves, None, float(stretch.weights[step]), *rows
                )
                trail[step] = [float(each.detach()) for each in (value, likelihood, complexity)]
                if not np.isfinite(trail[step, 0]):
                    self._failed = self.latest()
                    # If a gradient was not finite before the loss was, the step cannot be undone.
                    if not self._finite() or not self._undo():
                        self._go_back(before)
                    return trail[: step + 1]
                value.backward()
                group["lr"] = float(stretch.rates[step])
                self._optimiser.step()
                self._optimiser.zero_grad()
                if stretch.averaged[step]:
                    self._count += 1
                    for name, iterate in self._iterates.items():
                        self._totals[name].add_(iterate)
        if not self._finite():
            # The gradient of the last step was not finite, and no later loss would show it.
            self._failed = self.latest()
            self._go_back(before)
            trail[-1] = np.nan
        return trail

    def _finite(self) -> bool:
        import torch

        return all(bool(torch.isfinite(each).all()) for each in self._iterates.values())

    def _undo(self) -> bool:
        """Undo the latest step of Adam, up to rounding; return whether the result is finite."""
        group = self._optimiser.param_groups[0]
        first, second = group["betas"]
        for name, leaf in self._leaves.items():
            kept = self._optimiser.state.get(leaf)
            if not kept:
                continue
            count = float(kept["step"])
            size = (kept["exp_avg_sq"] / (1.0 - second**count)).sqrt() + group["eps"]
            self._iterates[name].add_(group["lr"] * kept["exp_avg"] / (1.0 - first**count) / size)
        return self._finite()

    def _go_back(self, before: Mapping[str, Any]) -> None:
        for name, iterate in self._iterates.items():
            iterate.copy_(before[name])

    def _numpy(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: self._problem.system.to_numpy(value).copy() for name, value in values.items()}

    def latest(self) -> dict[str, np.ndarray]:
        return self._numpy(self._iterates)

    def failed(self) -> dict[str, np.ndarray]:
        return self._failed

    def average(self) -> dict[str, np.ndarray]:
        if not self._count:
            return self.latest()
        return self._numpy({name: total / self._count for name, total in self._totals.items()})

    def state(self) -> dict[str, np.ndarray]:
        import torch

        kept: dict[str, Any] = {
            "count": np.asarray(self._count),
            "generator": torch.get_rng_state().numpy().copy(),
        }
        for name, leaf in self._leaves.items():
            kept[f"value:{name}"] = self._iterates[name]
            kept[f"total:{name}"] = self._totals[name]
            for part, value in self._optimiser.state.get(leaf, {}).items():
                kept[f"adam:{part}:{name}"] = value
        if torch.get_default_device().type == "cuda":
            kept["generator_cuda"] = torch.cuda.get_rng_state().numpy().copy()
        return self._numpy(kept)

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        import torch

        self._begin()
        self._count = int(state["count"])
        torch.set_rng_state(torch.from_numpy(np.array(state["generator"], dtype=np.uint8)))
        if "generator_cuda" in state:
            torch.cuda.set_rng_state(torch.from_numpy(np.array(state["generator_cuda"], dtype=np.uint8)))
        for name, leaf in self._leaves.items():
            self._iterates[name].copy_(torch.from_numpy(np.array(state[f"value:{name}"])))
            self._totals[name].copy_(torch.from_numpy(np.array(state[f"total:{name}"])))
            parts = [key for key in state if key.startswith("adam:") and key.endswith(f":{name}")]
            for key in parts:
                part = key.split(":")[1]
                # A step counter may be on the host; moments are on the device of the parameter.
                value = torch.from_numpy(np.array(state[key]))
                self._optimiser.state[leaf][part] = value.to(leaf.device)


_DESCENTS: dict[str, Any] = {"numpyro": _JaxDescent, "pyro": _TorchDescent}
