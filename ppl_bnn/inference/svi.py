"""Stochastic variational inference: the member of a family of distributions nearest to the posterior.

The guide and the evidence lower bound are the system's own; what stands here is the loop around them, written once,
and one small engine per system that takes a stretch of steps.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from ppl_bnn.errors import DivergenceError, InputError, UnsupportedError, message, unknown_name
from ppl_bnn.inference.mean_field import MeanField
from ppl_bnn.inference.method import Method, Outcome, Start, Stopwatch
from ppl_bnn.inference.optimise import starting_point
from ppl_bnn.ppl.protocol import Model, Problem, map_data, site_seed
from ppl_bnn.progress import Progress

GUIDES = ("normal",)
FINAL_RATE = 0.1
STRETCHES = 20


@dataclass(frozen=True)
class SVI(Method):
    """max_q ELBO(q) = E_q[log p(w(u), D) + log |dw/du| - log q(u)] <= log p(D), by stochastic gradients.

    guide "normal": independent normals in unconstrained coordinates, the system's own AutoNormal, under its own
    Trace_ELBO (Kucukelbir et al. 2017). Adam holds its learning rate for the first half of the steps and lowers it
    linearly to a tenth over the second; the fit is the mean of the iterates of the second half (Polyak-Ruppert
    averaging; for VI see Dhaka et al. 2020). On a Gaussian posterior its variances then scatter, relative to the
    optimum, by 2 (steps * particles)^(-1/2), as little as that many draws can tell, about a bias of the order of
    -learning_rate / 2.

    steps: of the optimiser. learning_rate: in the first half. batch_size: rows per step; the likelihood is then scaled
    by N / batch_size and the divergence from the prior counted once; None takes all rows. particles: draws of the guide
    per step. init_scale: standard deviation of the guide at the start, in unconstrained coordinates. start: the
    location at the start, a method, a posterior or a dict of constrained values; None: from the prior.
    elbo_draws: fresh draws for the ELBO that is reported. stop: None takes all steps; "plateau" begins to lower the
    learning rate as soon as the loss has reached a plateau, and lowers it over as many steps as it was held.

    Plateau: of the steps at the full learning rate, the mean loss over the last window (a tenth of `steps`) is no more
    than max(2 standard errors of the difference, 0.1 nats) below that of the window before. The figure "converged" says
    whether the loss was on a plateau when the learning rate began to fall: afterwards any loss looks flat.

    history: "loss", minus the ELBO of all rows, one estimate per step. figures: "elbo" and its standard error "elbo_se"
    in nats, estimated after the fit; "converged", 0 or 1.

    Raises
    ------
    DivergenceError: the loss left the finite numbers. UnsupportedError: mini-batches of a model whose rows cannot be
    taken apart.
    """

    guide: str = "normal"
    steps: int = 10_000
    learning_rate: float = 0.01
    batch_size: int | None = None
    particles: int = 1
    init_scale: float = 0.1
    start: Start = None
    elbo_draws: int = 1000
    stop: str | None = None

    def check(self) -> None:
        if self.guide not in GUIDES:
            raise unknown_name("guide", self.guide, GUIDES)
        self._whole("steps", self.steps, 1, "10_000")
        self._whole("particles", self.particles, 1, "1")
        self._whole("elbo_draws", self.elbo_draws, 2, "1000")
        if self.batch_size is not None:
            self._whole("batch_size", self.batch_size, 1, "128, or None for all rows")
        self._positive("learning_rate", self.learning_rate, "0.01")
        self._positive("init_scale", self.init_scale, "0.1")
        if self.stop not in (None, "plateau"):
            raise unknown_name("stop", self.stop, ("None", "plateau"))

    def _whole(self, field: str, value: object, least: int, advice: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise InputError(
                f"SVI {field}: "
                + message(f"a whole number of at least {least}", repr(value), f"{field}={advice}")
            )

    def _positive(self, field: str, value: Any, advice: str) -> None:
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not (value > 0 and math.isfinite(value)):
            raise InputError(
                f"SVI {field}: " + message("a positive number", repr(value), f"{field}={advice}")
            )

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        model = self._batched_model(problem)
        batch = None if self.batch_size == problem.rows else self.batch_size
        u0 = starting_point(problem, self.start, progress)
        engine = _ENGINES[problem.system.name](self, problem, model, u0, batch)
        losses, held = self._optimise(problem, engine, batch, progress)
        approximation = MeanField(*engine.guide())
        elbo, elbo_se = self._elbo(problem, approximation)
        converged = plateau(losses[:held], self._window)
        found = ()
        if not converged:
            found = (
                f"SVI has not converged: the loss was still falling after {held} steps at learning_rate="
                f"{self.learning_rate:g}; try steps={2 * self.steps} or a larger learning rate",
            )
        share = 1.0 if batch is None else batch / problem.rows
        return Outcome(
            approximation=approximation,
            history={"loss": losses},
            compile_seconds=engine.compile_seconds,
            run_seconds=watch() - engine.compile_seconds,
            gradient_evaluations=len(losses) * self.particles * share,
            warnings=found,
            figures={"elbo": elbo, "elbo_se": elbo_se, "converged": float(converged)},
        )

    @property
    def _stretch(self) -> int:
        return -(-self.steps // STRETCHES)

    @property
    def _window(self) -> int:
        return self.steps // 10

    def _optimise(
        self, problem: Problem, engine: _Engine, batch: int | None, progress: Progress
    ) -> tuple[np.ndarray, int]:
        """All losses, and the number of steps at the full learning rate."""
        batches = None if batch is None else batch_indices(problem.rows, batch, problem.seed)
        losses = np.empty(0)
        held, total = self.steps - self.steps // 2, self.steps
        task = progress.task(f"SVI ({problem.system.name})", self.steps)
        try:
            while len(losses) < total:
                done = len(losses)
                count = min(self._stretch, total - done)
                steps = done + np.arange(count)
                rates = schedule(self.learning_rate, steps, held, total)
                indices = None if batches is None else np.stack([next(batches) for _ in range(count)])
                latest = engine.advance(rates, steps >= held, indices)
                losses = np.concatenate([losses, latest])
                self._refuse_divergence(losses, done)
                done += count
                if self.stop == "plateau" and done < held and plateau(losses, self._window):
                    held, total = done, 2 * done
                task.update(self.steps if done == total else done, elbo=-float(latest.mean()))
        finally:
            task.close()
        return losses, held

    def _refuse_divergence(self, losses: np.ndarray, before: int) -> None:
        wrong = np.flatnonzero(~np.isfinite(losses[before:]))
        if not len(wrong):
            return
        step = before + int(wrong[0])
        so_far = "the first loss"
        if step:
            so_far = f"before: first {losses[0]:.6g}, lowest {losses[:step].min():.6g}, last {losses[step - 1]:.6g}"
        raise DivergenceError(
            "SVI: "
            + message(
                "a finite loss",
                f"{losses[step]} at step {step} ({so_far})",
                f"learning_rate={self.learning_rate / 10:g}, a smaller init_scale, or standardise=True",
            )
        )

    def _batched_model(self, problem: Problem) -> Model:
        """The native model that is given a batch of rows and scaled to all of them."""
        program = problem.program
        if self.batch_size is None or self.batch_size == problem.rows:
            return program.native
        if self.batch_size > problem.rows:
            raise InputError(
                "SVI batch_size: "
                + message(
                    f"at most the {problem.rows} rows there are", repr(self.batch_size), "batch_size=None"
                )
            )
        if program.has_local or program.coupled:
            came = "bnn.rows" if program.has_local else "bnn.coupled"
            raise UnsupportedError(
                "SVI: "
                + message(
                    "a model whose rows can be taken apart, for mini-batches",
                    f"{came} in the model",
                    "batch_size=None",
                )
            )
        if program.language:
            return problem.system.native(program.model, population=problem.rows, record=False)
        if "population" not in inspect.signature(program.native).parameters:
            raise UnsupportedError(
                "SVI: "
                + message(
                    f"a {self.ppl} model (x, y=None, *, population=None) that scales its likelihood to "
                    "`population` rows, for mini-batches",
                    "a model without that argument",
                    "batch_size=None, or plate(..., population or len(x), subsample_size=len(x))",
                )
            )
        return functools.partial(program.native, population=problem.rows)

    def _elbo(self, problem: Problem, q: MeanField) -> tuple[float, float]:
        """Mean and standard error of log p(w(u), D) + log |dw/du| - log q(u) over fresh draws."""
        rng = np.random.default_rng(site_seed("elbo", problem.seed))
        u = q.draw(self.elbo_draws, rng)
        log_joint = problem.program.log_joint_draws(u, problem.x, problem.y).astype(np.float64)
        values = log_joint - q.log_prob(u)
        if not np.all(np.isfinite(values)):
            raise DivergenceError(
                "SVI: "
                + message(
                    "a finite ELBO",
                    f"{int((~np.isfinite(values)).sum())} of {len(values)} draws without a finite log joint",
                    f"learning_rate={self.learning_rate / 10:g} or standardise=True",
                )
            )
        return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def schedule(rate: float, step: np.ndarray, held: int, total: int) -> np.ndarray:
    """The learning rate at each step: `rate` for `held` steps, then a line to FINAL_RATE of it at `total`."""
    through = np.clip((step + 1 - held) / max(1, total - held), 0.0, 1.0)
    return rate * (1.0 - (1.0 - FINAL_RATE) * through)


def plateau(losses: np.ndarray, window: int) -> bool:
    """Whether the mean of the last `window` losses is not below that of the window before, within noise.

    Within noise: by no more than max(2 standard errors of the difference, 0.1 nats). Losses of different steps come
    from different draws, so their standard error is that of independent numbers.
    """
    if window < 2 or len(losses) < 2 * window:
        return False
    before, last = losses[-2 * window : -window], losses[-window:]
    error = math.sqrt((before.var(ddof=1) + last.var(ddof=1)) / window)
    return bool(before.mean() - last.mean() <= max(2.0 * error, 0.1))


def batch_indices(rows: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Row numbers of one batch after another, for ever: permutations of all rows, end to end, cut into `size`.

    Every row comes once per epoch also where `size` does not divide the rows.
    """
    rng = np.random.default_rng(site_seed("batches", seed))
    waiting = np.empty(0, dtype=np.int64)
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, rng.permutation(rows)])
        yield waiting[:size]
        waiting = waiting[size:]


# --- one engine per system ------------------------------------------------------------------------


class _Engine(Protocol):
    compile_seconds: float

    def advance(self, rates: np.ndarray, averaged: np.ndarray, indices: np.ndarray | None) -> np.ndarray:
        """One step per learning rate, each on all rows or on those of its row of `indices`; the losses.

        averaged: which of the iterates count for the fit.
        """
        ...

    def guide(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """(loc, scale) by the names of the program's sites, in their order, of the mean of the iterates that count."""
        ...


class _NumPyroEngine:
    """A stretch of steps as one compiled scan: always of the same length, so that there is one compilation."""

    def __init__(
        self, method: SVI, problem: Problem, model: Model, u0: Mapping[str, np.ndarray], batch: int | None
    ):
        import jax
        import jax.numpy as jnp
        import numpyro
        import optax
        from jax.flatten_util import ravel_pytree
        from numpyro.distributions import TransformedDistribution
        from numpyro.infer import SVI as Engine
        from numpyro.infer import Trace_ELBO
        from numpyro.infer.autoguide import AutoNormal
        from numpyro.primitives import Messenger

        program, system = problem.program, problem.system
        watch = Stopwatch()
        self._program, self._system, self._length = program, system, method._stretch
        self._x, self._y = problem.x, problem.y
        # softplus^-1 of the initial scale, which AutoNormal keeps on the real line.
        spread = method.init_scale + math.log(-math.expm1(-method.init_scale))
        start: dict[str, Any] = {}
        for site in program.sites.values():
            value = system.asarray(np.asarray(u0[site.name], dtype=float))
            if site.is_param:
                start[site.name] = value
            else:
                start[f"{site.name}_auto_loc"] = value
                start[f"{site.name}_auto_scale"] = system.asarray(np.full(value.shape, spread))
        # One flat vector: a dozen small arrays would each have its own compiled update.
        flat, unravel = ravel_pytree(start)
        self._unravel = unravel
        adam = optax.scale_by_adam()
        latents = program.latents
        size = sum(site.size for site in latents)

        class Noise(Messenger):
            """AutoNormal's own draws, loc + scale * eps, with all eps out of one call: a generator per site takes
            more time to compile and to run than everything else in a step."""

            def __init__(self, guide: Any, params: Mapping[str, Any], eps: Any):
                super().__init__(guide)
                self.params = params
                self.eps = program.unravel(eps, [site.name for site in latents])

            def process_message(self, msg: Any) -> None:
                if msg["type"] != "sample" or msg["name"] not in self.eps:
                    return
                name = msg["name"]
                value = self.params[f"{name}_auto_loc"] + self.params[f"{name}_auto_scale"] * self.eps[name]
                if isinstance(msg["fn"], TransformedDistribution):
                    kept = []
                    for transform in msg["fn"].transforms:
                        before = value
                        value, inner = transform.call_with_intermediates(before)
                        kept.append([before, inner])
                    msg["intermediates"] = kept
                msg["value"] = value

        def stretch(state: Any, rates: Any, averaged: Any, indices: Any, x: Any, y: Any) -> Any:
            def rows(index: Any) -> Any:
                return (x, y) if batch is None else (map_data(lambda a: a[index], x), y[index])

            # Set up while tracing: nothing of it is computed, and run as it stands it would compile each operation.
            guide = AutoNormal(model, init_scale=float(method.init_scale))
            engine = Engine(model, guide, optax.identity(), Trace_ELBO())
            engine.init(jax.random.PRNGKey(0), *rows(None if batch is None else indices[0]))
            constrain: Any = engine.constrain_fn

            def loss(flat: Any, key: Any, eps: Any, data: Any) -> Any:
                params = constrain(unravel(flat))

                def particle(eps: Any) -> Any:
                    return engine.loss.loss(key, params, model, Noise(guide, params, eps), *data)

                return jnp.mean(jax.vmap(particle)(eps)) if method.particles > 1 else particle(eps[0])

            def step(state: Any, inputs: Any) -> Any:
                flat, inner, total, key = state
                rate, weight, index = inputs
                key, for_eps, for_model = jax.random.split(key, 3)
                eps = jax.random.normal(for_eps, (method.particles, size), dtype=flat.dtype)
                value, gradient = jax.value_and_grad(loss)(flat, for_model, eps, rows(index))
                update, inner = adam.update(gradient, inner)
                flat = flat - rate * update
                return (flat, inner, total + weight * flat, key), value

            return jax.lax.scan(step, state, (rates, averaged, indices))

        self._count = 0
        self._state = (flat, jax.jit(adam.init)(flat), jnp.zeros_like(flat), system.seeds(problem.seed, 1)[0])
        none = None if batch is None else np.zeros((1, batch), dtype=int)
        arguments = (self._state, *self._padded(np.zeros(1), np.zeros(1), none), self._x, self._y)
        with numpyro.validation_enabled(False):
            self._stretch = jax.jit(stretch).lower(*arguments).compile()
        self.compile_seconds = watch()

    def _padded(
        self, rates: np.ndarray, averaged: np.ndarray, indices: np.ndarray | None
    ) -> tuple[Any, Any, Any]:
        """A last, shorter stretch goes on at learning rate zero, where steps change nothing."""
        missing = np.zeros(self._length - len(rates))
        weights = np.concatenate([averaged.astype(float), missing])
        if indices is not None:
            indices = self._system.asarray(
                np.concatenate([indices, np.repeat(indices[:1], len(missing), axis=0)])
            )
        rates = np.concatenate([rates, missing])
        return self._system.asarray(rates), self._system.asarray(weights), indices

    def advance(self, rates: np.ndarray, averaged: np.ndarray, indices: np.ndarray | None) -> np.ndarray:
        padded = self._padded(rates, averaged, indices)
        self._count += int(averaged.sum())
        self._state, losses = self._stretch(self._state, *padded, self._x, self._y)
        return np.asarray(losses, dtype=np.float64)[: len(rates)]

    def guide(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        flat, _, total, _ = self._state
        params = self._unravel(total / self._count if self._count else flat)
        loc, scale = {}, {}
        for site in self._program.sites.values():
            if site.is_param:
                loc[site.name] = np.asarray(params[site.name])
            else:
                loc[site.name] = np.asarray(params[f"{site.name}_auto_loc"])
                scale[site.name] = np.logaddexp(0.0, np.asarray(params[f"{site.name}_auto_scale"]))
        return loc, scale


class _PyroEngine:
    """Steps one by one, as Pyro takes them; one fused Adam for all parameters in place of one per parameter."""

    compile_seconds = 0.0

    def __init__(
        self, method: SVI, problem: Problem, model: Model, u0: Mapping[str, np.ndarray], batch: int | None
    ):
        import pyro
        import torch
        from pyro.infer import Trace_ELBO
        from pyro.infer.autoguide import AutoNormal, init_to_value

        program, system = problem.program, problem.system
        _refuse_nested_names([site.name for site in program.latents])
        self._program, self._system, self._model = program, system, model
        self._x, self._y, self._batch = problem.x, problem.y, batch
        torch.manual_seed(problem.seed)
        u = {name: system.asarray(np.asarray(value, dtype=float)) for name, value in u0.items()}
        with torch.no_grad():
            w = program.constrain(u, problem.x, problem.y)
        self._guide = AutoNormal(
            model,
            init_loc_fn=init_to_value(values={site.name: w[site.name] for site in program.latents}),
            init_scale=float(method.init_scale),
        )
        self._elbo = Trace_ELBO(num_particles=method.particles)
        data = self._rows(None if batch is None else np.arange(batch))
        with torch.no_grad():
            self._guide(*data)
            model(*data)
        for site in program.params:
            pyro.get_param_store()[site.name] = w[site.name]
        with pyro.poutine.trace(param_only=True) as capture, torch.no_grad():
            self._elbo.loss(model, self._guide, *data)
        values: list[Any] = [site.get("value") for site in capture.trace.nodes.values()]
        self._optimiser = torch.optim.Adam(
            [value.unconstrained() for value in values],
            lr=method.learning_rate,
            fused=True,
        )
        self._count = 0
        # Detached, they share the memory that the optimiser writes to.
        self._iterates = [value.detach() for value in self._optimiser.param_groups[0]["params"]]
        self._totals = [torch.zeros_like(value) for value in self._iterates]

    def _rows(self, index: np.ndarray | None) -> tuple[Any, Any]:
        if index is None:
            return self._x, self._y
        import torch

        chosen = torch.as_tensor(index)
        return map_data(lambda a: a[chosen], self._x), self._y[chosen]

    def advance(self, rates: np.ndarray, averaged: np.ndarray, indices: np.ndarray | None) -> np.ndarray:
        losses = np.full(len(rates), np.nan)
        group = self._optimiser.param_groups[0]
        data = self._x, self._y
        with warnings.catch_warnings():
            # Pyro warns of a loss that is not a number; here that is an error, with the step it came at.
            warnings.filterwarnings("ignore", message="Encountered NaN")
            for step, rate in enumerate(rates.tolist()):
                if indices is not None:
                    data = self._rows(indices[step])
                group["lr"] = rate
                losses[step] = self._elbo.loss_and_grads(self._model, self._guide, *data)
                if not math.isfinite(losses[step]):
                    return losses
                self._optimiser.step()
                self._optimiser.zero_grad()
                if averaged[step]:
                    for total, iterate in zip(self._totals, self._iterates, strict=True):
                        total.add_(iterate)
        self._count += int(averaged.sum())
        return losses

    def guide(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        import pyro

        if self._count:
            for total, iterate in zip(self._totals, self._iterates, strict=True):
                iterate.copy_(total / self._count)
        loc, scale = {}, {}
        for site in self._program.sites.values():
            # AutoNormal keeps "hidden0.weight" as the attribute `weight` of `hidden0`.
            if site.is_param:
                found = pyro.get_param_store()[site.name]
            else:
                found = attrgetter(site.name)(self._guide.locs)
                width = self._system.to_numpy(attrgetter(site.name)(self._guide.scales))
                scale[site.name] = width.reshape(site.unconstrained_shape).copy()
            loc[site.name] = self._system.to_numpy(found).reshape(site.unconstrained_shape).copy()
        return loc, scale


def _refuse_nested_names(names: list[str]) -> None:
    for name in names:
        for other in names:
            if other.startswith(f"{name}."):
                raise UnsupportedError(
                    "SVI: "
                    + message(
                        "site names of which none continues another after a dot (Pyro's AutoNormal keeps them as "
                        "attributes of attributes)",
                        f"{name!r} and {other!r}",
                        "another name, or ppl='numpyro'",
                    )
                )


_ENGINES: dict[str, Any] = {"numpyro": _NumPyroEngine, "pyro": _PyroEngine}
