"""The parts that a reference is made of: fits by each sampler, and the log joint in three programs.

Each part is a function of an entry, its problem and a run ("a" or "b"), and gives arrays. Seeds follow from names.
"""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from reference_annealing import Annealing
from reference_certificate import LOG_JOINT, Check
from reference_problems import FOLDER, REGIONS, Entry, Problem

import ppl_bnn as bnn
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import InputError
from ppl_bnn.posterior.approximation import Drawn
from ppl_bnn.posterior.convergence import by_arviz, mixing

# Rows of a batch of gradients.
BATCH = 500
# Nodes of the integral over inverse temperatures t = s^5, and the chains at each.
NODES, POWER, NODE_CHAINS, NODE_WARMUP, NODE_DRAWS = 16, 5.0, 2, 1000, 5000
POINTS = 1000
# Bidirectional annealing: temperatures, and particles that go backwards from the exact draw.
TEMPERATURES, BACKWARDS = 1000, 512
# Draws of each run that are stored, and those among which a truth is ranked.
STORED, RANKED = 2000, 99
Arrays = dict[str, np.ndarray]


def seed_of(name: str, part: str) -> int:
    """The seed of a part of a reference."""
    return site_seed(f"{name}/{part}", 0) % 2**31


# --- what is recorded of draws ------------------------------------------------------------------------


def recorded(posterior: Any, chosen: Problem) -> Arrays:
    """What a reference keeps of the draws of a posterior, each with axes (chain, draw).

    "f": outputs at the grid (chain, draw, G), row after row; "log_likelihood" and "log_prior" (with the Jacobian of the
    unconstrained coordinates); "virial": u . grad U for each site; "scales": the scalar random variables.
    """
    eta = posterior.predictor(chosen.inputs)
    moving = [not np.array_equal(c, np.broadcast_to(c[:, :, :1], c.shape)) for c in np.moveaxis(eta, -1, 0)]
    f = eta[..., moving].reshape(*eta.shape[:2], -1)
    u = {name: value.reshape(-1, *value.shape[2:]) for name, value in posterior.unconstrained_draws.items()}

    def densities(given: Any) -> tuple[Arrays, Arrays]:
        import jax

        program: Program = given.program

        def both(u: Any) -> Any:
            likelihood = program.log_likelihood(u, given.x, given.y).sum()
            prior = program.log_prior(u, given.x, given.y)
            return likelihood + prior, (likelihood, prior)

        def one(u: Any) -> Any:
            (_, (likelihood, prior)), slope = jax.value_and_grad(both, has_aux=True)(u)
            return likelihood, prior, {name: -(slope[name] * u[name]).sum() for name in u}

        mapped, parts = jax.jit(jax.vmap(one)), []
        count = len(next(iter(u.values())))
        for start in range(0, count, BATCH):
            part = {name: value[start : start + BATCH] for name, value in u.items()}
            parts.append(jax.tree.map(np.asarray, mapped(map_data(program.system.asarray, part))))
        likelihood, prior, slopes = jax.tree.map(lambda *each: np.concatenate(each), *parts)
        names = [site.name for site in program.latents]
        return {
            "log_likelihood": likelihood,
            "log_prior": prior,
            "virial": np.stack([slopes[name] for name in names], axis=-1),
        }, {"dimensions": np.array([program.sites[name].size for name in names]), "sites": np.array(names)}

    found, facts = posterior.with_problem(densities)
    shape = posterior.shape
    found = {name: value.reshape(*shape, *value.shape[1:]) for name, value in found.items()}
    scalars = {name: value for name, value in posterior.draws.items() if value.ndim == 2}
    scales = np.stack(list(scalars.values()), axis=-1) if scalars else np.zeros((*shape, 0))
    facts |= {"scale_names": np.array(list(scalars), dtype=str), "columns": np.flatnonzero(moving)}
    if not all(moving):
        # Parameters of the likelihood that all rows share, in the coordinates of the predictor.
        facts["shared"] = eta[:, :, 0, [not each for each in moving]]
        assert moving == sorted(moving, reverse=True)
    return {"f": f, "scales": scales, **found, **facts}


def nuts(entry: Entry, chosen: Problem, run: str, part: str = "nuts", start: Any = None) -> Arrays:
    """One run of NUTS, each chain from its own draw from the prior or from `start`."""
    method = bnn.NUTS(
        draws=entry.draws,
        warmup=entry.warmup,
        chains=entry.chains,
        target_accept=entry.target_accept,
        mass_matrix=entry.mass_matrix,
        max_tree_depth=entry.max_tree_depth,
        start=start,
    )
    posterior = _fitted(entry, chosen, method, f"{part} {run}")
    statistics = {
        name: posterior.statistics[name]
        for name in ("energy", "n_steps", "diverging", "reached_max_tree_depth")
    }
    return recorded(posterior, chosen) | statistics | _cost(posterior)


def nuts_in_a_mode(entry: Entry, chosen: Problem, run: str, mode: int, u: Arrays) -> Arrays:
    """One run of NUTS, each chain from one of the given particles of a mode (S, ...)."""
    fit = bnn.fit(entry.function(), chosen.x, chosen.y, bnn.MAP(steps=1), seed=0)
    return nuts(entry, chosen, run, f"mode {mode}", replace(fit, approximation=Drawn(u)))


def smc(entry: Entry, chosen: Problem, run: str) -> Arrays:
    """Six runs of tempered SMC, with the log evidence of each."""
    method = bnn.SMC(particles=entry.particles, moves=entry.moves, runs=6)
    posterior = _fitted(entry, chosen, method, f"smc {run}")
    history = posterior.info.history
    runs = history["run"]
    last = [history["log_normaliser"][runs == index][-1] for index in np.unique(runs)]
    found = recorded(posterior, chosen) | _cost(posterior) | {"log_evidence": np.array(last)}
    if entry.sought == "mode-weighted":
        # Chains of each mode begin at particles.
        found |= {f"u.{name}": value for name, value in posterior.unconstrained_draws.items()}
    return found


def annealing(entry: Entry, chosen: Problem, run: str) -> Arrays:
    """Bidirectional annealing, with the log weights of both directions."""
    sizes = {"temperatures": TEMPERATURES, "particles": entry.particles, "backwards": BACKWARDS}
    method = Annealing(truth=chosen.truth, chains=entry.chains, draws=STORED // entry.chains, **sizes)
    posterior = _fitted(entry, chosen, method, f"annealing {run}")
    return recorded(posterior, chosen) | _cost(posterior) | dict(posterior.info.history)


def calibration(entry: Entry, chosen: Problem, work: Path, part: str, long: bool) -> Arrays:
    """Ranks of the truth in simulations from the prior at the inputs of the entry, by NUTS.

    Ranked are f at the first row of each region, the log likelihood, and the scalar random variables. Runs have two
    chains of 500 draws, or, where they are long, four of the entry's own settings. Every simulation counts: whether its
    chains mix follows from its data and the seed. `calibration_rhat` has the largest R-hat of f at these rows and of
    the log likelihood in each.
    """
    probe = np.concatenate([chosen.grid[region][:1] for region in REGIONS])
    method = bnn.NUTS(
        draws=entry.draws if long else 500,
        warmup=entry.warmup if long else 500,
        chains=4 if long else 2,
        target_accept=entry.target_accept,
        max_tree_depth=entry.max_tree_depth,
        mass_matrix=entry.mass_matrix if long else "diagonal",
        chain_method="sequential",
    )

    def mixed(posterior: Any) -> dict[str, float]:
        eta = posterior.predictor(probe)
        values = np.concatenate(
            [eta.reshape(*eta.shape[:2], -1), posterior.log_likelihood().sum(axis=-1)[..., None]], axis=-1
        )
        return {"rhat": mixing(values).rhat}

    began = time.perf_counter()
    found = bnn.simulation_based_calibration(
        entry.function(),
        chosen.x,
        method,
        simulations=entry.simulations,
        draws=RANKED,
        probe=probe,
        figures=mixed,
        seed=seed_of(entry.name, part),
        checkpoint=work / part.replace(" ", "_"),
        progress=False,
    )
    return {
        "ranks": found.ranks.astype(np.int16),
        "rank_names": np.array(found.names),
        "ranked_draws": np.array(RANKED),
        "calibration_failures": np.array(len(found.failures)),
        "calibration_rhat": found.figures["rhat"].astype(np.float32),
        "seconds": np.array(time.perf_counter() - began),
    }


def mclmc(entry: Entry, chosen: Problem, run: str) -> Arrays:
    """Adjusted microcanonical Langevin Monte Carlo, each chain from its own draw from the prior."""
    settings = {"draws": 2 * entry.draws, "warmup": 2 * entry.warmup, "chains": entry.chains}
    posterior = _fitted(entry, chosen, bnn.MCLMC(adjusted=True, **settings), f"mclmc {run}")
    return recorded(posterior, chosen) | _cost(posterior)


def _fitted(entry: Entry, chosen: Problem, method: Any, part: str) -> Any:
    return bnn.fit(entry.function(), chosen.x, chosen.y, method, seed=seed_of(entry.name, part))


def _cost(posterior: Any) -> Arrays:
    info = posterior.info
    seconds, gradients = info.compile_seconds + info.run_seconds, float(info.gradient_evaluations or 0)
    return {"seconds": np.array(seconds), "gradients": np.array(gradients)}


def integration(entry: Entry, chosen: Problem, run: str) -> Arrays:
    """Thermodynamic integration, log p(D) = integral over t in (0, 1) of E_t[log p(D | w)], by NUTS at each node.

    p_t is proportional to p(w) p(D | w)^t. The nodes are those of Gauss and Legendre in s, where t = s^POWER. Returned
    are "t", "weights", and "log_likelihood" (node, chain, draw).
    """
    seed = seed_of(entry.name, f"integration {run}")
    roots, weights = np.polynomial.legendre.leggauss(NODES)
    s = 0.5 * (roots + 1.0)
    t, weights = s**POWER, 0.5 * weights * POWER * s ** (POWER - 1.0)
    starts = bnn.fit(entry.function(), chosen.x, chosen.y, bnn.MAP(steps=1), seed=0)

    def sampled(given: Any) -> np.ndarray:
        import jax
        import jax.numpy as jnp
        from numpyro.infer import NUTS

        program: Program = given.program
        drawn = program.prior_draws(given.x, given.y, seed, NODES * NODE_CHAINS)

        def chain(t: Any, u: Any, key: Any) -> Any:
            def energy(u: Any) -> Any:
                prior = program.log_prior(u, given.x, given.y)
                return -(prior + t * program.log_likelihood(u, given.x, given.y).sum())

            kernel = NUTS(potential_fn=energy, target_accept_prob=entry.target_accept)
            state = kernel.init(key, NODE_WARMUP, u, (), {})

            def once(index: Any, carry: Any) -> Any:
                state, found = carry
                state = kernel.sample(state, (), {})
                value = program.log_likelihood(state.z, given.x, given.y).sum()
                return state, found.at[jnp.maximum(index - NODE_WARMUP, 0)].set(value)

            return jax.lax.fori_loop(0, NODE_WARMUP + NODE_DRAWS, once, (state, jnp.zeros(NODE_DRAWS)))[1]

        first = {name: program.system.asarray(value[0]) for name, value in drawn.items()}
        compiled = jax.jit(chain).lower(t[0], first, jax.random.PRNGKey(0)).compile()

        def work(index: int) -> np.ndarray:
            with program.system.session(given.dtype, given.device):
                u = {name: program.system.asarray(value[index]) for name, value in drawn.items()}
                key = jax.random.fold_in(jax.random.PRNGKey(seed), index)
                return np.asarray(compiled(jnp.asarray(t[index // NODE_CHAINS]), u, key))

        with ThreadPoolExecutor(2) as pool:
            # From the last node, whose trajectories are the longest.
            order = range(NODES * NODE_CHAINS)[::-1]
            found = list(pool.map(work, order))[::-1]
        return np.stack(found).reshape(NODES, NODE_CHAINS, NODE_DRAWS)

    began = time.perf_counter()
    values = starts.with_problem(sampled)
    return {
        "t": t,
        "weights": weights,
        "log_likelihood": values,
        "seconds": np.array(time.perf_counter() - began),
    }


def integral_of(found: Arrays) -> tuple[float, float]:
    """The log evidence by `integration` and its Monte-Carlo standard error."""
    values, weights = found["log_likelihood"], found["weights"]
    errors = [float(by_arviz("mcse", each, np.inf, method="mean")) for each in values]
    means = values.mean(axis=(1, 2))
    return float(weights @ means), float(np.sqrt(np.square(weights * np.array(errors)).sum()))


# --- the log joint, three times -----------------------------------------------------------------------


def numpy_program(model: str) -> Any:
    """The module with the log joint of a model in NumPy.

    Raises
    ------
    InputError
        There is no such module.
    """
    file = FOLDER / "programs" / f"{model}.py"
    InputError.check(file.exists(), model, f"its log joint by hand in {file}", "none", "writing it")
    specification = importlib.util.spec_from_file_location(f"reference_program_{model}", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def log_joints(entry: Entry, chosen: Problem) -> Arrays:
    """log p(w, y | x) in the coordinates of the program at prior draws and around a mode, by each of three programs."""
    found: Arrays = {}
    mode = bnn.fit(entry.function(), chosen.x, chosen.y, bnn.MAP(steps=500), seed=0)
    rng = np.random.default_rng(seed_of(entry.name, "points"))

    def points(given: Any) -> Arrays:
        drawn = given.program.prior_draws(given.x, given.y, seed_of(entry.name, "points"), POINTS // 2)
        around = {
            name: value.reshape(-1, *value.shape[2:])[0] for name, value in mode.unconstrained_draws.items()
        }
        return {
            name: np.concatenate([value, around[name] + 0.3 * rng.standard_normal(value.shape)])
            for name, value in drawn.items()
        }

    u = mode.with_problem(points)
    for ppl in ("numpyro", "pyro"):
        chosen_system = system(ppl)
        with chosen_system.session("float64", "cpu"):
            x, y = chosen_system.asarray(chosen.x), chosen_system.asarray(chosen.y)
            program = Program.of(chosen_system, entry.function(), x, y, language=True)

            def density(u: Any, x: Any, y: Any, program: Program = program) -> Any:
                return program.log_joint(u, x, y, jacobian=False)

            values = map_data(chosen_system.asarray, u)
            found[ppl] = chosen_system.to_numpy(program.mapped(density)(values, x, y))
            if ppl == "numpyro":
                w = program.constrain_draws(u, x, y)
    by_hand = numpy_program(entry.model)
    each = ({name: value[index] for name, value in w.items()} for index in range(POINTS))
    found["numpy"] = np.array([by_hand.log_joint(one, chosen.x, chosen.y, **entry.arguments) for one in each])
    return found


def joint_checks(found: Arrays) -> list[Check]:
    """The largest relative difference to NumPyro's log joint."""
    base = found["numpyro"]
    return [
        Check.below(
            f"log joint, {name} against numpyro: relative difference",
            float(np.max(np.abs(value - base) / np.maximum(np.abs(base), 1.0))),
            LOG_JOINT,
        )
        for name, value in found.items()
        if name != "numpyro"
    ]
