"""Adam on a noisy loss, with averaging of iterates and a state that can be stored.

If a loss is not finite, the loop stops and returns to the parameters of the step before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import rows_at, unravel
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.inference.optimisation.loops import chosen_rows, loop_of

# (parameters, seed, weight of the complexity, x, y) -> (loss, further costs), the likelihood and the complexity cost
Loss = Callable[..., tuple[Any, tuple[Any, ...]]]


@dataclass
class Descent:
    """Adam over a dict of unconstrained arrays, which are passed in and out as NumPy arrays.

    `loss` maps (parameters, seed, weight of the complexity, x, y) to (loss, further costs). It begins at `start`.
    If `streamed`, batches are taken from the rows in host memory, one stretch at a time. `key` is that of a `Loop`.
    `fused`: whether JAX updates all arrays as one. `failed` are the parameters at which a loss or its gradient was
    not finite.
    """

    problem: Problem
    loss: Loss
    start: Mapping[str, np.ndarray]
    streamed: bool = False
    key: Any = None
    fused: bool = True

    def __post_init__(self) -> None:
        data = (None, None) if self.streamed else (self.problem.x, self.problem.y)
        # From an iterate to its arrays by name.
        self._unravel: Any = dict
        state = self._begun(self.start)
        options: dict[str, Any] = {"seed": 0, "stops": True, "key": self.key, "recorded": False}
        self._loop = loop_of(self.problem, self._step, state, data, **options)
        self._count, self.failed = 0, dict[str, np.ndarray]()

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation."""
        return self._loop.compile_seconds

    def _begun(self, parameters: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
        """The state at these parameters: the iterate, that of Adam, the sum of the averaged iterates, and others."""
        raise NotImplementedError

    def _step(self, state: Any, given: Mapping[str, Any], key: Any, x: Any, y: Any) -> tuple[Any, Any]:
        """The step of the `Loop`, whose record is (loss, further costs)."""
        raise NotImplementedError

    def _go_back(self, lost: bool) -> Any:
        """Return to the step before the one that failed; the iterate that failed. `lost`: it has no next one."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """Everything that the next step depends on."""
        raise NotImplementedError

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a state that `state` returned."""
        raise NotImplementedError

    def _named(self, total: Any, count: int = 1) -> dict[str, np.ndarray]:
        """The mean of `count` iterates, or one of them, by name; in NumPy, for which nothing is compiled."""
        to_numpy = self.problem.system.to_numpy
        found = total if isinstance(total, dict) else self._unravel(to_numpy(total))
        return {name: np.asarray(to_numpy(value) / count) for name, value in found.items()}

    def _arrays(self, values: Mapping[str, Any]) -> dict[str, Any]:
        asarray = self.problem.system.asarray
        return {name: asarray(np.asarray(value, dtype=float)) for name, value in values.items()}

    def _numpy(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: np.array(self.problem.system.to_numpy(value)) for name, value in values.items()}

    def begin(self, parameters: Mapping[str, np.ndarray], seed: int) -> None:
        """Discard the state and start at these parameters, with this seed of the random numbers of the loss."""
        self._loop.state, self._loop.random = self._begun(parameters), self.problem.system.seeds(seed, 1)[0]
        self._count = 0

    def advance(
        self, rates: np.ndarray, averaged: np.ndarray, weights: np.ndarray, rows: np.ndarray | None = None
    ) -> np.ndarray:
        """Take the steps of a stretch; return (loss, further costs) of each, shape (n, 1 + costs).

        For each step: the learning rate, whether the iterate is averaged, the weight of the complexity cost, and the
        rows of its batch, (steps, B), None for all. n < steps if a loss was not finite; that loss is the last row. If
        only the last gradient was not finite, the row is NaN.
        """
        given: dict[str, Any] = {"rates": rates, "averaged": averaged.astype(float), "weights": weights}
        if self.streamed:
            inputs, targets = self.problem.inputs, self.problem.targets
            given |= {"x": rows_at(inputs, rows), "y": np.asarray(targets[rows])}
        elif rows is not None:
            given["rows"] = rows
        # Pyro warns of a NaN loss; here the loop stops at it.
        with ignored("Encountered NaN"):
            trail = self._loop.advance(given)
        # A gradient of the last step that was not finite, which no later loss would show.
        lost = np.isfinite(trail[-1, 0]) and not all(np.isfinite(a).all() for a in self.latest().values())
        if lost:
            trail[-1] = np.nan
        if np.isfinite(trail[-1, 0]):
            self._count += int(averaged.sum())
        else:
            self.failed = self._named(self._go_back(lost))
        return trail

    def average(self) -> dict[str, np.ndarray]:
        """The mean of the averaged iterates; the latest iterate if there are none yet."""
        if not self._count:
            return self.latest()
        return self._named(self._loop.state[2], self._count)

    def latest(self) -> dict[str, np.ndarray]:
        """The current parameters; after a loss that was not finite, those of the last step with a finite loss."""
        return self._named(self._loop.state[0])


def descent(problem: Problem, *arguments: Any, **options: Any) -> Descent:
    """The `Descent` of the system of a problem."""
    return _DESCENTS[problem.system.name](problem, *arguments, **options)


class _JaxDescent(Descent):
    """Steps over one flat vector if `fused`: many small arrays would each need their own update.

    The state of the loop has the iterate, the state of Adam, the sum of the averaged iterates, and the iterates at the
    latest step and at the one before.
    """

    def _begun(self, parameters: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
        import jax
        import optax

        # In NumPy, for which nothing is compiled. The flat vector has the order of JAX, which is that of the names.
        given: Any = {name: np.asarray(parameters[name], dtype=float) for name in sorted(parameters)}
        if self.fused:
            self._unravel = functools.partial(
                unravel, shapes={name: value.shape for name, value in given.items()}
            )
            given = np.concatenate([value.ravel() for value in given.values()])
        begun = jax.tree.map(self.problem.system.asarray, given)
        total = jax.tree.map(self.problem.system.asarray, jax.tree.map(np.zeros_like, given))
        self._adam = optax.scale_by_adam()
        return begun, self._adam.init(begun), total, begun, begun

    def _step(self, state: Any, given: Mapping[str, Any], key: Any, x: Any, y: Any) -> tuple[Any, Any]:
        import jax
        import jax.numpy as jnp
        import numpyro

        iterate, inner, total, last, _ = state

        def at(iterate: Any) -> Any:
            return self.loss(self._unravel(iterate), key, given["weights"], *chosen_rows(given, x, y))

        # The handlers of a guide are used here, while the step is traced.
        with self.problem.system.turn, numpyro.validation_enabled(False):
            (value, costs), gradient = jax.value_and_grad(at, has_aux=True)(iterate)
        update, inner = self._adam.update(gradient, inner)
        new = jax.tree.map(lambda a, b: a - given["rates"] * b, iterate, update)
        total = jax.tree.map(lambda a, b: a + given["averaged"] * b, total, new)
        return (new, inner, total, iterate, last), jnp.stack([value, *costs]).astype(value.dtype)

    def _go_back(self, lost: bool) -> Any:
        _, *others, last, before = self._loop.state
        self._loop.state = (last if lost else before, *others, last, before)
        return last

    def _kept(self) -> Any:
        """The part of the carry that the next step depends on."""
        return self._loop.state[:3], self._loop.random

    def state(self) -> dict[str, np.ndarray]:
        import jax

        leaves = enumerate(jax.tree.leaves(self._kept()))
        found = {f"state{index}": np.asarray(leaf) for index, leaf in leaves}
        return found | {"count": np.asarray(self._count)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        import jax
        import jax.numpy as jnp

        leaves, structure = jax.tree.flatten(self._kept())
        given = [
            jnp.asarray(state[f"state{index}"], dtype=leaf.dtype).reshape(leaf.shape)
            for index, leaf in enumerate(leaves)
        ]
        (flat, *others), key = jax.tree.unflatten(structure, given)
        self._loop.state, self._loop.random = (flat, *others, flat, flat), key
        self._count = int(state["count"])


class _TorchDescent(Descent):
    """Steps with one Adam for all parameters.

    The parameters are created here, unless the loss has its own as `loss.leaves` (Pyro keeps those of guides in a
    store). They share the memory of one flat vector. The state of the loop has this vector, the state of Adam, the sum
    of the averaged iterates, and the iterate before the latest step. A step writes to all of them.
    """

    def _begun(self, parameters: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
        import torch

        values = self._arrays(parameters)
        if not hasattr(self, "_flat"):
            self._leaves: dict[str, Any] = getattr(self.loss, "leaves", None) or values
            shapes = {name: tuple(leaf.shape) for name, leaf in self._leaves.items()}
            self._unravel = functools.partial(unravel, shapes=shapes)
            self._flat = torch.cat([leaf.detach().reshape(-1) for leaf in self._leaves.values()])
            for name, view in self._unravel(self._flat).items():
                self._leaves[name].requires_grad_().data = view
            self._gradient = self.problem.system.compile(self._loss_and_gradient)
        self._flat.copy_(torch.cat([values[name].reshape(-1) for name in self._leaves]))
        first, second, total = (torch.zeros_like(self._flat) for _ in range(3))
        # torch's optimisers count their steps in single precision.
        inner = {"first": first, "second": second, "step": torch.zeros((), dtype=torch.float32)}
        return self._flat, inner, total, self._flat.clone()

    def _loss_and_gradient(self, given: Mapping[str, Any], x: Any, y: Any) -> tuple[Any, Any]:
        """(loss, further costs) as one array, and the gradient of the loss over the flat vector."""
        import torch

        leaves = list(self._leaves.values())
        with torch.enable_grad():
            value, costs = self.loss(self._leaves, None, given["weights"], *chosen_rows(given, x, y))
            # A parameter need not be in use.
            gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        return torch.stack([value, *costs]).detach(), flat

    def _step(self, state: Any, given: Mapping[str, Any], key: Any, x: Any, y: Any) -> tuple[Any, Any]:
        from torch.optim.adam import adam

        iterate, inner, total, before = state
        record, gradient = self._gradient(dict(given), x, y)
        if not record[0].isfinite():
            return state, record
        before.copy_(iterate)
        parts = ([iterate], [gradient], [inner["first"]], [inner["second"]], [], [inner["step"]])
        constants: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
        adam(*parts, fused=True, amsgrad=False, maximize=False, lr=given["rates"], **constants)
        total.add_(iterate * given["averaged"])
        return state, record

    def _go_back(self, lost: bool) -> Any:
        iterate, *_, before = self._loop.state
        failed = (before if lost else iterate).clone()
        iterate.copy_(before)
        return failed

    def _kept(self) -> dict[str, Any]:
        """The part of the state that the next step depends on."""
        iterate, inner, total, _ = self._loop.state
        return {"iterate": iterate, "total": total, **inner}

    def state(self) -> dict[str, np.ndarray]:
        import torch

        kept = self._kept() | {"count": np.asarray(self._count), "generator": torch.get_rng_state()}
        if torch.get_default_device().type == "cuda":
            kept["generator_cuda"] = torch.cuda.get_rng_state()
        return self._numpy(kept)

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        import torch

        tensors = {name: torch.from_numpy(np.array(value)) for name, value in state.items()}
        self._count = int(state["count"])
        torch.set_rng_state(tensors["generator"])
        if "generator_cuda" in state:
            torch.cuda.set_rng_state(tensors["generator_cuda"])
        for name, array in self._kept().items():
            array.copy_(tensors[name])


_DESCENTS: dict[str, type[Descent]] = {"numpyro": _JaxDescent, "pyro": _TorchDescent}
