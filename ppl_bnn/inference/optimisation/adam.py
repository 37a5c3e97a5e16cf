"""Adam on a noisy loss, with averaging of iterates and a state that can be stored.

If a loss is not finite, the loop stops and returns to the parameters of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.inference.optimisation.loops import chosen_rows, loop_of

# (parameters, seed, weight of the complexity, x, y) -> (loss, further costs), the likelihood and the complexity cost
Loss = Callable[..., tuple[Any, tuple[Any, ...]]]


@dataclass(frozen=True)
class Stretch:
    """The inputs of several steps, one entry per step: learning `rates`, weights of the complexity cost (`weights`),
    whether the iterate is `averaged`, and the rows of the batches, `indices` (steps, B) or None for all rows.
    """

    rates: np.ndarray
    averaged: np.ndarray
    weights: np.ndarray
    indices: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rates)


@dataclass
class Descent:
    """Adam over a dict of unconstrained arrays, which are passed in and out as NumPy arrays.

    `loss` maps (parameters, seed, weight of the complexity, x, y) to (loss, further costs). `batch` is the rows per
    step, None for all. If `streamed`, batches are taken from the rows in host memory, one stretch at a time.
    """

    problem: Problem
    loss: Loss
    start: Mapping[str, np.ndarray]
    batch: int | None
    streamed: bool = False
    compile_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Set up the steps, compiled if the system compiles."""

    def _arrays(self, values: Mapping[str, Any]) -> dict[str, Any]:
        asarray = self.problem.system.asarray
        return {name: asarray(np.asarray(value, dtype=float)) for name, value in values.items()}

    def _batch(self, index: np.ndarray | None) -> dict[str, Any]:
        """The inputs of `chosen_rows` for batches of the rows `index`; None for all rows."""
        if index is None:
            return {}
        if not self.streamed:
            return {"rows": index}
        inputs, targets = self.problem.inputs, self.problem.targets
        return {"x": map_data(lambda a: np.asarray(a[index]), inputs), "y": np.asarray(targets[index])}

    def begin(self, parameters: Mapping[str, np.ndarray], seed: int) -> None:
        """Discard the state and start at these parameters, with this seed of the random numbers of the loss."""
        raise NotImplementedError

    def advance(self, stretch: Stretch) -> np.ndarray:
        """Take the steps of a stretch; return (loss, further costs) of each, shape (n, 1 + costs).

        n < len(stretch) if a loss was not finite; that loss is the last row. If only the last gradient was not finite,
        the row is NaN.
        """
        raise NotImplementedError

    def average(self) -> dict[str, np.ndarray]:
        """The mean of the averaged iterates; the latest iterate if there are none yet."""
        raise NotImplementedError

    def latest(self) -> dict[str, np.ndarray]:
        """The current parameters; after a loss that was not finite, those of the last step with a finite loss."""
        raise NotImplementedError

    def failed(self) -> dict[str, np.ndarray]:
        """The parameters at which a loss was not finite. They are not finite themselves if a gradient was not."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """Everything that the next step depends on."""
        raise NotImplementedError

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a state that `state` returned."""
        raise NotImplementedError


def descent(problem: Problem, *arguments: Any, **options: Any) -> Descent:
    """The `Descent` of the system of a problem."""
    return _DESCENTS[problem.system.name](problem, *arguments, **options)


class _JaxDescent(Descent):
    """Steps over one flat vector: many small arrays would each need their own update.

    The state of the loop has this vector, the state of Adam, the sum of the averaged iterates, and the vectors at the
    latest step and at the one before.
    """

    def __post_init__(self) -> None:
        import jax
        import jax.numpy as jnp
        import numpyro
        import optax
        from jax.flatten_util import ravel_pytree

        problem, loss = self.problem, self.loss
        flat, self._unravel = ravel_pytree(self._arrays(self.start))
        unravel, adam = self._unravel, optax.scale_by_adam()
        self._initial = jax.jit(adam.init)

        def step(state: Any, given: Any, key: Any, x: Any, y: Any) -> Any:
            flat, inner, total, last, _ = state

            def at(flat: Any) -> Any:
                return loss(unravel(flat), key, given["weights"], *chosen_rows(given, x, y))

            # The handlers of a guide are used here, while the step is traced.
            with problem.system.turn, numpyro.validation_enabled(False):
                (value, costs), gradient = jax.value_and_grad(at, has_aux=True)(flat)
            update, inner = adam.update(gradient, inner)
            new = flat - given["rates"] * update
            state = new, inner, total + given["averaged"] * new, flat, last
            return state, jnp.stack([value, *costs]).astype(flat.dtype)

        data = (None, None) if self.streamed else (problem.x, problem.y)
        ones, rows = np.ones(1), None if self.batch is None else np.zeros((1, self.batch), int)
        example = self._inputs(Stretch(ones, ones, ones, rows))
        self._loop = loop_of(problem, step, self._begun(flat), example, data, seed=0, stops=True)
        self.compile_seconds = self._loop.compile_seconds
        self._count = 0

    def _begun(self, flat: Any) -> Any:
        import jax.numpy as jnp

        return flat, self._initial(flat), jnp.zeros_like(flat), flat, flat

    def begin(self, parameters: Mapping[str, np.ndarray], seed: int) -> None:
        from jax.flatten_util import ravel_pytree

        flat = ravel_pytree(self._arrays(parameters))[0]
        self._loop.state, self._loop.random = self._begun(flat), self.problem.system.seeds(seed, 1)[0]
        self._count = 0

    def _inputs(self, stretch: Stretch) -> dict[str, Any]:
        averaged = stretch.averaged.astype(float)
        given = {"rates": stretch.rates, "averaged": averaged, "weights": stretch.weights}
        return given | self._batch(stretch.indices)

    def advance(self, stretch: Stretch) -> np.ndarray:
        trail = self._loop.advance(self._inputs(stretch))
        flat, *others, last, before = self._loop.state
        # The gradient of the last step was not finite, and no later loss would show it.
        hidden = bool(np.isfinite(trail[-1, 0])) and not np.all(np.isfinite(np.asarray(flat)))
        if hidden:
            trail[-1] = np.nan
        if np.isfinite(trail[-1, 0]):
            self._count += int(stretch.averaged.sum())
        else:
            self._failed = last
            self._loop.state = (last if hidden else before, *others, last, before)
        return trail

    def _numpy(self, flat: Any) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in self._unravel(flat).items()}

    def latest(self) -> dict[str, np.ndarray]:
        return self._numpy(self._loop.state[0])

    def failed(self) -> dict[str, np.ndarray]:
        return self._numpy(self._failed)

    def average(self) -> dict[str, np.ndarray]:
        flat, _, total, *_ = self._loop.state
        return self._numpy(total / self._count if self._count else flat)

    def state(self) -> dict[str, np.ndarray]:
        import jax

        leaves = enumerate(jax.tree.leaves(self._kept()))
        found = {f"state{index}": np.asarray(leaf) for index, leaf in leaves}
        return found | {"count": np.asarray(self._count)}

    def _kept(self) -> Any:
        """The part of the carry that the next step depends on."""
        return self._loop.state[:3], self._loop.random

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
    """Steps one by one, with one fused Adam for all parameters.

    The tensors are created here, unless the loss has its own as `loss.leaves` (Pyro keeps those of guides in a store).
    """

    def __post_init__(self) -> None:
        kept = getattr(self.loss, "leaves", None)
        if kept is None:
            kept = self._arrays(self.start)
        self._leaves: dict[str, Any] = {name: leaf.requires_grad_() for name, leaf in kept.items()}
        self._begin()

    def _begin(self) -> None:
        import torch

        self._optimiser = torch.optim.Adam(list(self._leaves.values()), lr=1.0, fused=True)
        # Detached, they share the memory that the optimiser writes to.
        self._iterates = {name: leaf.detach() for name, leaf in self._leaves.items()}
        self._totals = {name: torch.zeros_like(value) for name, value in self._iterates.items()}
        # The iterates before the latest step.
        self._before = {name: value.clone() for name, value in self._iterates.items()}
        self._count = 0

    def begin(self, parameters: Mapping[str, np.ndarray], seed: int) -> None:
        self.problem.system.seeds(seed, 1)
        for name, value in self._arrays(parameters).items():
            self._iterates[name].copy_(value.reshape(self._iterates[name].shape))
        self._begin()

    def advance(self, stretch: Stretch) -> np.ndarray:
        import torch

        problem, trail = self.problem, []
        group = self._optimiser.param_groups[0]
        # Pyro warns of a NaN loss; here the loop stops at it.
        with ignored("Encountered NaN"):
            for step in range(len(stretch)):
                batch = self._batch(None if stretch.indices is None else stretch.indices[step])
                given = {name: map_data(problem.system.asarray, value) for name, value in batch.items()}
                rows = chosen_rows(given, problem.x, problem.y)
                value, costs = self.loss(self._leaves, None, float(stretch.weights[step]), *rows)
                trail.append([float(each.detach()) for each in (value, *costs)])
                if not np.isfinite(trail[-1][0]):
                    self._go_back()
                    return np.array(trail)
                value.backward()
                for name, iterate in self._iterates.items():
                    self._before[name].copy_(iterate)
                group["lr"] = float(stretch.rates[step])
                self._optimiser.step()
                self._optimiser.zero_grad()
                if stretch.averaged[step]:
                    self._count += 1
                    for name, iterate in self._iterates.items():
                        self._totals[name].add_(iterate)
        if not all(bool(torch.isfinite(each).all()) for each in self._iterates.values()):
            # The gradient of the last step was not finite, and no later loss would show it.
            self._go_back()
            trail[-1] = [np.nan] * len(trail[-1])
        return np.array(trail)

    def _go_back(self) -> None:
        """Return to the iterates before the latest step."""
        self._failed = self.latest()
        for name, iterate in self._iterates.items():
            iterate.copy_(self._before[name])

    def _numpy(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: self.problem.system.to_numpy(value).copy() for name, value in values.items()}

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

        kept: dict[str, Any] = {"count": np.asarray(self._count)}
        kept["generator"] = torch.get_rng_state().numpy().copy()
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

        for name, iterate in self._iterates.items():
            iterate.copy_(torch.from_numpy(np.array(state[f"value:{name}"])))
        self._begin()
        self._count = int(state["count"])
        torch.set_rng_state(torch.from_numpy(np.array(state["generator"], dtype=np.uint8)))
        if "generator_cuda" in state:
            torch.cuda.set_rng_state(torch.from_numpy(np.array(state["generator_cuda"], dtype=np.uint8)))
        for name, leaf in self._leaves.items():
            self._totals[name].copy_(torch.from_numpy(np.array(state[f"total:{name}"])))
            for key, value in state.items():
                if key.startswith("adam:") and key.endswith(f":{name}"):
                    # A step counter may be on the host; moments are on the device of the parameter.
                    moment = torch.from_numpy(np.array(value)).to(leaf.device)
                    self._optimiser.state[leaf][key.split(":")[1]] = moment


_DESCENTS: dict[str, type[Descent]] = {"numpyro": _JaxDescent, "pyro": _TorchDescent}
