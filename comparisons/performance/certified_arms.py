"""The arms of `certified_answer.py`: each draws in blocks until all functions are certified, or its time is spent.

An arm is a generator of blocks. After each block the same rule judges all of its draws so far, by the library's own
diagnosis in function space: f at up to 50 training and 50 test rows, the log likelihood of either part, and the noise.
Each run is a process of its own, which is ended where a block outlasts the limit; imports are left out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from problem import by_hand_in_numpyro, in_the_language
from sampling import counted

import ppl_bnn as bnn
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import BNNError
from ppl_bnn.core.files import write_whole
from ppl_bnn.inference.sampling.stopping import Rule, Watch
from ppl_bnn.posterior.convergence import mixing

NUTS, MCLMC, LAPS = "NUTS", "MCLMC", "LAPS"
BY_HAND, BLACKJAX, BDE = "NUTS by hand", "MCLMC of BlackJAX", "bde"
ARMS = (NUTS, MCLMC, LAPS, BY_HAND, BLACKJAX, BDE)
OURS = (NUTS, MCLMC, LAPS)
# What a run may take beyond its limit before it is ended, in seconds.
GRACE = 15.0
# Integrator steps of the tuning in BlackJAX per transition of the warm-up, as many as MCLMC takes here, and per draw.
TUNING, THINNING = 10, 10


@dataclass(frozen=True)
class Sizes:
    """One run: chains, and transitions per chain (many: of methods with many short chains); the limit in seconds.

    rows: training rows at most.
    """

    rule: str = "rhat<1.01, ess>400"
    limit: float = 600.0
    chains: int = 4
    warmup: int = 1000
    draws: int = 1000
    many: tuple[int, ...] = ()
    rows: int = 2000
    seeds: int = 3


@dataclass(frozen=True)
class Task:
    """One table, standardised by its training rows, and one network of one hidden layer; classes: 0 for numbers."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    width: int
    activation: str
    classes: int = 0

    @property
    def network(self) -> tuple[list[int], str, int]:
        return [self.width], self.activation, self.classes


@dataclass(frozen=True)
class Block:
    """All draws so far, in unconstrained coordinates (chain, draw, ...), or f of a peer whose model is another.

    gradients: all so far, None where they are not known; groups: of chains with one starting point.
    """

    u: Mapping[str, np.ndarray]
    gradients: float | None
    groups: int | None = None
    f: np.ndarray | None = None


class Judge:
    """The rule, at training and at test rows, for the draws of any arm."""

    def __init__(self, task: Task, rule: str, groups: int | None):
        self.rule, self.classes = Rule.of(rule), task.classes
        self.system = system("numpyro")
        model = in_the_language(*task.network)
        self.watches = []
        with self._session() as where:
            for x, y in ((task.x, task.y), (task.x_test, task.y_test)):
                data = self.system.asarray(x), self.system.asarray(y)
                program = Program.of(self.system, model, *data, language=True)
                problem = Problem(program, *data, x, y, 0, where, "float64")
                self.watches.append(Watch(problem, self.rule, groups))

    def _session(self) -> Any:
        return self.system.session("float64", "cpu")

    def __call__(self, block: Block) -> tuple[bool, float, float]:
        """Whether the rule holds, the largest R-hat and the least ESS."""
        if block.f is not None:
            found = mixing(block.f)
            return self.rule.holds({"rhat": found.rhat, "ess": found.ess}), found.rhat, found.ess
        with self._session():
            judged = [watch(block.u) for watch in self.watches]
        each = [figures for _, figures in judged]
        least = min(min(figures["ess_bulk"], figures["ess_tail"]) for figures in each)
        return all(holds for holds, _ in judged), max(figures["rhat"] for figures in each), least

    @property
    def functions(self) -> np.ndarray:
        """f of the draws so far at the probed test rows, (draws, functions), without noise."""
        f = self.watches[1].known["f"]
        return (f if self.classes else f[..., :1]).reshape(f.shape[0] * f.shape[1], -1)


# --- the arms -------------------------------------------------------------------------------------------


def method_of(arm: str, sizes: Sizes, left: float) -> Any:
    """Our sampler at its defaults, but for the sizes, with the rule and a budget."""
    stopping: dict[str, Any] = {"until": sizes.rule, "budget": left}
    if arm == LAPS:
        return bnn.LAPS(
            **dict(zip(("chains", "superchains", "warmup", "draws"), sizes.many, strict=False)), **stopping
        )
    lengths = {"chains": sizes.chains, "warmup": sizes.warmup, "draws": sizes.draws}
    return {NUTS: bnn.NUTS, MCLMC: bnn.MCLMC}[arm](**lengths, **stopping)


def here(arm: str) -> Callable[..., Iterator[Block]]:
    """A sampler of the library: to the rule at training rows, then on in blocks where test rows need more."""

    def blocks(task: Task, sizes: Sizes, seed: int, left: Callable[[], float]) -> Iterator[Block]:
        method = method_of(arm, sizes, left())
        posterior = bnn.fit(in_the_language(*task.network), task.x, task.y, method, seed=seed)
        approximation: Any = posterior.approximation
        while True:
            yield Block(approximation.u, posterior.info.gradient_evaluations, approximation.groups)
            posterior = bnn.extend(posterior, method.draws)
            approximation = posterior.approximation

    return blocks


def by_hand(task: Task, sizes: Sizes, seed: int, left: Callable[[], float]) -> Iterator[Block]:
    """MCMC(NUTS(model)) as a user of NumPyro has it, with vectorised chains, run again from its last state."""
    import jax
    from numpyro.infer import MCMC

    key = jax.random.PRNGKey(seed)
    parts: list[dict[str, np.ndarray]] = []
    mcmc = MCMC(
        counted(by_hand_in_numpyro(*task.network)),
        num_warmup=sizes.warmup,
        num_samples=sizes.draws,
        num_chains=sizes.chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    while True:
        with jax.enable_x64(True):
            mcmc.run(jax.random.fold_in(key, len(parts)), task.x, task.y, extra_fields=("gradients",))
            part = {name: np.asarray(each) for name, each in mcmc.get_samples(group_by_chain=True).items()}
            gradients = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["gradients"])[:, -1].sum()
            mcmc.post_warmup_state = mcmc.last_state
        if "noise" in part:
            part["noise"] = np.log(part["noise"])
        parts.append(part)
        yield Block(joined(parts), float(gradients))


def of_blackjax(task: Task, sizes: Sizes, seed: int, left: Callable[[], float]) -> Iterator[Block]:
    """BlackJAX's MCLMC as tuned by its own function, from the starts of NumPyro; two gradients per step."""
    import blackjax
    import jax
    import jax.numpy as jnp
    from numpyro.infer.util import initialize_model

    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.PRNGKey(seed), (3, sizes.chains))
        data = (jnp.asarray(task.x), jnp.asarray(task.y))
        info = initialize_model(keys[0], by_hand_in_numpyro(*task.network), model_args=data)

        def log_density(u: Any) -> Any:
            return -info.potential_fn(u)

        kernel = blackjax.mcmc.mclmc.build_kernel()

        def tuned(position: Any, key: Any) -> Any:
            first, second = jax.random.split(key)
            state = blackjax.mcmc.mclmc.init(position, log_density, first)
            steps = round(TUNING * sizes.warmup / 0.33)  # of which BlackJAX tunes for a third
            return blackjax.mclmc_find_L_and_step_size(
                kernel, steps, state, second, logdensity_fn=log_density, diagonal_preconditioning=True
            )

        def walked(state: Any, params: Any, key: Any) -> Any:
            def step(state: Any, key: Any) -> Any:
                scale, length = params.inverse_mass_matrix, params.L
                return kernel(key, state, log_density, scale, length, params.step_size)[0], None

            def draw(state: Any, key: Any) -> Any:
                state, _ = jax.lax.scan(step, state, jax.random.split(key, THINNING))
                return state, state.position

            return jax.lax.scan(draw, state, jax.random.split(key, sizes.draws))

        state, params, spent = jax.jit(jax.vmap(tuned))(info.param_info.z, keys[1])
        walk = jax.jit(jax.vmap(walked))
    parts: list[dict[str, np.ndarray]] = []
    steps = int(spent[0])
    while True:
        with jax.enable_x64(True):
            each = jax.vmap(lambda key, number=len(parts): jax.random.fold_in(key, number))(keys[2])
            state, draws = walk(state, params, each)
            parts.append({name: np.asarray(value) for name, value in draws.items()})
        steps += THINNING * sizes.draws
        yield Block(joined(parts), 2.0 * sizes.chains * steps)


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}


_BDE = """
import json, sys
import numpy as np
import bde

settings, classes, path, out = json.loads(sys.argv[1])
data = np.load(path)
if classes:
    from bde.loss.loss import CategoricalCrossEntropy as Loss
    estimator = bde.BdeClassifier(loss=Loss(), **settings)
else:
    from bde.loss.loss import GaussianNLL as Loss
    estimator = bde.BdeRegressor(loss=Loss(), **settings)
estimator.fit(data["x"], data["y"])
np.save(out, np.asarray(estimator.predict(data["probe"], raw=True)))
"""


def of_bde(
    task: Task, sizes: Sizes, seed: int, left: Callable[[], float], python: str = ""
) -> Iterator[Block]:
    """The package bde, at the settings of its benchmark but for the network, with twice the draws each time.

    It cannot go on with a fit, so that each try begins again and all of them count. Its model has noise that depends on
    the row and other priors, and it does not count gradients.
    """
    draws = sizes.draws
    probe = np.concatenate([task.x[:50], task.x_test[:50]])
    settings = {"n_members": sizes.chains, "hidden_layers": [task.width], "activation": task.activation}
    settings |= {"epochs": 1200, "validation_split": 0.15, "lr": 1e-3, "weight_decay": 1e-4, "patience": 20}
    settings |= {"warmup_steps": 50 * sizes.warmup, "n_thinning": 10, "seed": seed}
    while True:
        with tempfile.TemporaryDirectory(prefix="ppl-bnn-") as folder:
            path, out = Path(folder) / "data.npz", Path(folder) / "f.npy"
            np.savez(path, x=task.x.astype(np.float32), y=task.y, probe=probe.astype(np.float32))
            given = json.dumps([settings | {"n_samples": 10 * draws}, task.classes, str(path), str(out)])
            subprocess.run([python or sys.executable, "-W", "ignore", "-c", _BDE, given], check=True)
            raw = np.load(out).astype(np.float64)
        yield Block({}, None, f=raw.reshape(*raw.shape[:2], -1))
        draws *= 2


def blocks_of(arm: str, python: str = "") -> Callable[..., Iterator[Block]]:
    """The blocks of an arm by its name."""
    if arm in OURS:
        return here(arm)
    if arm == BDE:
        return lambda *given: of_bde(*given, python=python)
    return {BY_HAND: by_hand, BLACKJAX: of_blackjax}[arm]


def missing(arm: str, python: str = "") -> str:
    """Why an arm cannot be run here, or nothing."""
    import importlib.util

    if arm == BDE and not python and importlib.util.find_spec("bde") is None:
        return "not installed, and no interpreter was named (--bde)"
    return ""


# --- one run --------------------------------------------------------------------------------------------


def certified(
    arm: str, task: Task, sizes: Sizes, seed: int, report: Callable[[dict[str, Any]], None], python: str = ""
) -> dict[str, Any]:
    """One run of one arm: whether, when and after how many gradients the rule held, and f of its draws.

    report: is called with the result so far, after each block.
    """
    begun = time.perf_counter()
    found: dict[str, Any] = {"solved": False, "why": "no block was finished within the limit"}
    judge: Judge | None = None

    def left() -> float:
        return max(sizes.limit - (time.perf_counter() - begun), 1e-3)

    try:
        for block in blocks_of(arm, python)(task, sizes, seed, left):
            if judge is None:
                judge = Judge(task, sizes.rule, block.groups)
            holds, rhat, ess = judge(block)
            seconds = time.perf_counter() - begun
            found = {"solved": holds and seconds <= sizes.limit, "seconds": seconds, "rhat": rhat, "ess": ess}
            if block.gradients is not None:
                found["gradients"] = block.gradients
            found["draws"] = int(np.prod(next(iter(block.u.values()), block.f).shape[:2]))
            found["why"] = "" if found["solved"] else "the rule did not hold within the limit"
            if block.f is None:
                f = judge.functions
                found |= {"mean": f.mean(axis=0).tolist(), "sd": f.std(axis=0).tolist()}
            report(found)
            if holds or seconds > sizes.limit:
                break
    except BNNError as error:
        found |= {"why": f"{type(error).__name__}: {error}"}
        report(found)
    return found


_CHILD = """
import sys
import jax, numpyro, blackjax, arviz_stats
import certified_arms

certified_arms.child(sys.argv[1])
"""


def child(folder: str) -> None:
    """What a process does: the run that `in_a_process` has described in a folder."""
    with np.load(Path(folder) / "task.npz") as stored:
        arrays = dict(stored)
    given = json.loads((Path(folder) / "given.json").read_text())
    task, sizes = Task(**arrays, **given["network"]), Sizes(**given["sizes"])

    def report(found: dict[str, Any]) -> None:
        text = json.dumps(found)
        write_whole(Path(folder) / "found.json", lambda part: part.write_text(text))

    certified(given["arm"], task, sizes, given["seed"], report, given["python"])


def in_a_process(arm: str, task: Task, sizes: Sizes, seed: int, python: str = "") -> dict[str, Any]:
    """The last result of `certified` in a fresh interpreter, which is ended `GRACE` seconds after the limit.

    The grace covers the imports of the process, which do not count.
    """
    with tempfile.TemporaryDirectory(prefix="ppl-bnn-") as folder:
        np.savez(Path(folder) / "task.npz", x=task.x, y=task.y, x_test=task.x_test, y_test=task.y_test)
        network = {"width": task.width, "activation": task.activation, "classes": task.classes}
        given = {"arm": arm, "seed": seed, "sizes": asdict(sizes), "network": network, "python": python}
        (Path(folder) / "given.json").write_text(json.dumps(given))
        # A group of its own, so that what it has started ends with it.
        command = [sys.executable, "-W", "ignore", "-c", _CHILD, folder]
        pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
        words, ended = "", False
        with subprocess.Popen(command, cwd=Path(__file__).parent, start_new_session=True, **pipes) as process:
            try:
                _, words = process.communicate(timeout=sizes.limit + GRACE)
            except subprocess.TimeoutExpired:
                ended = True
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        path = Path(folder) / "found.json"
        found = (
            json.loads(path.read_text())
            if path.exists()
            else {"solved": False, "why": "no block was finished"}
        )
    if process.returncode and not ended:
        raise RuntimeError(f"{arm}: {words.strip().splitlines()[-1] if words.strip() else 'no words'}")
    return found
