"""Make the reference posteriors, certify them, and compute their certificates again.

    python comparisons/references.py make [NAME ...] [--work DIR] [--out DIR]
    python comparisons/references.py check [NAME ...] [--out DIR]
    python comparisons/references.py list [--out DIR]
    python comparisons/references.py index

`make` runs what `references/entries.toml` asks for: two runs of NUTS from prior draws; two fits by tempered SMC and
thermodynamic integration, or two by adjusted MCLMC; and the log joint in NumPyro, Pyro and NumPy. Each part is kept in
the work folder as soon as it has finished, so an interrupted run goes on where it stopped. A reference that fails a
check is stored as a record of failure: its card and certificate, without draws. `check` computes every check again from
the stored arrays. `index` writes what the library knows of the stored references.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from reference_certificate import (
    EVIDENCE,
    LOG_JOINT,
    Check,
    agreement_of_marginals,
    convergence,
    log_mean,
    moments,
    plain,
    recompute,
    trajectories,
)
from reference_problems import FOLDER, REGIONS, Entry, Problem, problem
from study import kept, stamp

import ppl_bnn as bnn
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import InputError, check_known
from ppl_bnn.core.files import write_whole
from ppl_bnn.core.stored import digest
from ppl_bnn.language.likelihoods.categorical import Bernoulli, Categorical
from ppl_bnn.posterior.convergence import by_arviz
from ppl_bnn.references.library import CARD, CERTIFICATE, DRAWS, INDEX, SCHEMA
from ppl_bnn.references.library import Entry as Listed
from ppl_bnn.references.reference import LINKS, Reference

# Draws of each run that are stored, and the rows of a batch of gradients.
STORED, BATCH = 2000, 500
# Nodes of the integral over inverse temperatures t = s^5, and the chains at each.
NODES, POWER, NODE_CHAINS, NODE_WARMUP, NODE_DRAWS = 16, 5.0, 2, 1000, 5000
POINTS = 1000
# Draws from the prior that are stored.
PRIOR_DRAWS = 200
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
RUNS = ("a", "b")
SECOND = {"smc": "SMC", "mclmc": "adjusted MCLMC"}
Arrays = dict[str, np.ndarray]


def seed_of(name: str, part: str) -> int:
    """The seed of a part of a reference."""
    return site_seed(f"{name}/{part}", 0) % 2**31


def _save(part: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with part.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # pyright: ignore[reportArgumentType]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


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


def nuts(entry: Entry, chosen: Problem, run: str) -> Arrays:
    """One run of NUTS, each chain from its own draw from the prior."""
    method = bnn.NUTS(
        draws=entry.draws,
        warmup=entry.warmup,
        chains=entry.chains,
        target_accept=entry.target_accept,
        mass_matrix=entry.mass_matrix,
        max_tree_depth=12,
    )
    posterior = _fitted(entry, chosen, method, f"nuts {run}")
    statistics = {
        name: posterior.statistics[name]
        for name in ("energy", "n_steps", "diverging", "reached_max_tree_depth")
    }
    return recorded(posterior, chosen) | statistics | _cost(posterior)


def smc(entry: Entry, chosen: Problem, run: str) -> Arrays:
    """Six runs of tempered SMC, with the log evidence of each."""
    method = bnn.SMC(particles=entry.particles, moves=entry.moves, runs=6)
    posterior = _fitted(entry, chosen, method, f"smc {run}")
    history = posterior.info.history
    runs = history["run"]
    last = [history["log_normaliser"][runs == index][-1] for index in np.unique(runs)]
    return recorded(posterior, chosen) | _cost(posterior) | {"log_evidence": np.array(last)}


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
    """The module with the log joint of a model in NumPy; InputError if there is none."""
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


# --- a reference --------------------------------------------------------------------------------------


def thinned(found: Arrays) -> Arrays:
    """`STORED` draws of a run, evenly spaced in each chain, and the statistics of all its transitions."""
    chains, draws = found["f"].shape[:2]
    at = np.linspace(0, draws - 1, min(draws, STORED // chains)).round().astype(int)
    names = (
        "f",
        "scales",
        "log_likelihood",
        "log_prior",
        "virial",
        *(("shared",) if "shared" in found else ()),
    )
    kept = {name: found[name][:, at].astype(np.float32) for name in names}
    kept |= {name: found[name] for name in ("diverging", "reached_max_tree_depth")}
    return kept | {"energy": found["energy"].astype(np.float32)}


def effective_sizes(stored: Arrays) -> Arrays:
    """Effective sample sizes of the stored draws for mean and standard deviation of what is graded, (rows, K)."""
    f = stored["f"].astype(np.float64)
    g = LINKS[str(stored["link"])](f.reshape(*f.shape[:2], -1, len(stored["columns"])))
    return {f"ess_{moment}": by_arviz("ess", g, 0.0, method=moment) for moment in ("mean", "sd")}


def held_out(entry: Entry, chosen: Problem, draws: Arrays) -> Arrays:
    """The log predictive density of held targets and its Monte-Carlo standard error, row by row of each region."""
    found: Arrays = {}
    fit = bnn.fit(entry.function(), chosen.x, chosen.y, bnn.MAP(steps=1), seed=0)
    reference = Reference({"outputs": {"columns": draws["columns"].tolist()}}, {}, draws)

    def densities(given: Any) -> Arrays:
        likelihood = given.program.likelihood
        for region, y in chosen.targets.items():
            prediction = bnn.Prediction(*likelihood.mixture_parameters(reference.predictor(region)))
            each = prediction.component_log_prob(y)
            top = each.max(axis=0)
            p = np.exp(each - top)
            found[f"lpd_{region}"] = top + np.log(p.mean(axis=0))
            halves = [half.mean(axis=0) for half in np.split(p, 2)]
            found[f"lpd_halves_{region}"] = top + np.log(np.array(halves))
            found[f"lpd_error_{region}"] = p.std(axis=0) / p.mean(axis=0) / np.sqrt(len(p))
        return found

    return fit.with_problem(densities)


def from_the_prior(entry: Entry, chosen: Problem, columns: np.ndarray) -> Arrays:
    """Outputs of the network under the prior at the grid (S, G), and the name of the link."""
    fit = bnn.fit(entry.function(), chosen.x, chosen.y, bnn.MAP(steps=1), seed=0)

    def drawn(given: Any) -> Arrays:
        program: Program = given.program
        u = program.prior_draws(given.x, given.y, seed_of(entry.name, "prior"), PRIOR_DRAWS)
        w = program.constrain_draws(u, given.x, given.y)
        eta = program.predictor_draws(w, chosen.inputs)[..., columns]
        links = {Bernoulli: "sigmoid", Categorical: "softmax"}
        link = links.get(type(program.likelihood), "identity")
        return {"prior": eta.reshape(PRIOR_DRAWS, -1).astype(np.float32), "link": np.array(link)}

    return fit.with_problem(drawn)


def arrays_of(entry: Entry, chosen: Problem, work: Path) -> tuple[Arrays, list[Check], dict[str, Any]]:
    """All that a reference stores, the checks that need more than that, and what each part cost."""
    folder = work / entry.name
    runs: dict[str, Arrays] = {}
    full: list[Check] = []
    cost: dict[str, Any] = {}

    def part(name: str, run: str, compute: Callable[[Entry, Problem, str], Arrays]) -> Arrays:
        def computed() -> Arrays:
            say(f"{entry.name}: {name}, run {run}")
            return compute(entry, chosen, run)

        found = kept(folder, f"{name}_{run}", entry, computed)
        known = {key: float(found[key]) for key in ("seconds", "gradients") if key in found}
        cost[f"{name} {run}"] = {"seed": seed_of(entry.name, f"{name} {run}"), **known}
        return found

    for run in RUNS:
        found = runs[run] = part("nuts", run, nuts)
        checks = convergence(f"NUTS {run}, f at the grid", found["f"])
        scalars = [found["log_likelihood"][..., None], found["log_prior"][..., None], found["scales"]]
        checks += convergence(
            f"NUTS {run}, log likelihood, log prior and scales", np.concatenate(scalars, axis=-1)
        )
        full += checks
        for check in (*checks, *trajectories(f"NUTS {run}", found)):
            say(str(check))
    thin = [thinned(runs[run]) for run in RUNS]
    stored = {name: np.concatenate([each[name] for each in thin]) for name in thin[0]}
    rows, outputs = len(chosen.inputs), stored["f"].shape[-1] // len(chosen.inputs)
    pairs = stored["pairs"] = chosen.pairs() * outputs
    pool = stored["f"].astype(np.float64).reshape(-1, rows * outputs)
    whole = moments(pool, pairs)
    stored |= {"quantiles": np.quantile(pool, QUANTILES, axis=0), **whole}
    stored |= {name: runs["a"][name] for name in ("sites", "dimensions", "scale_names", "columns")}
    stored |= from_the_prior(entry, chosen, stored["columns"])
    stored |= effective_sizes(stored)
    stored |= {"x": chosen.x, "y": chosen.y}
    stored |= {f"x_{region}": value for region, value in chosen.grid.items()}
    stored |= {f"y_{region}": value for region, value in chosen.targets.items()}
    stored |= held_out(entry, chosen, stored)
    others, name = [], entry.second
    if name == "smc":
        found = [part("smc", run, smc)["log_evidence"] for run in RUNS]
        # What SMC cannot do to the stated precision is no second sampler.
        name = "smc" if max(log_mean(each)[1] for each in found) < EVIDENCE else "mclmc"
    for run in RUNS:
        other = part(name, run, {"smc": smc, "mclmc": mclmc}[name])
        draws = other["f"].reshape(-1, rows * outputs).astype(np.float64)
        others.append({f"second_{name}": value for name, value in moments(draws, pairs).items()})
        full += agreement_of_marginals(f"{SECOND[name]}, run {run}", pool, draws)
        if name == "smc":
            integral, error = integral_of(part("integration", run, integration))
            estimates = {"log_evidence": other["log_evidence"], "integral": integral}
            others[-1] |= estimates | {"integral_error": error}
    stored |= {name: np.stack([each[name] for each in others]) for name in others[0]}
    stored["second"] = np.array(SECOND[name])
    full += joint_checks(kept(folder, "log_joints", entry, lambda: log_joints(entry, chosen)))
    return stored, full, cost


def make(entry: Entry, work: Path, out: Path) -> str:
    """Compute what an entry asks for, judge it, and store the reference; returns its grade."""
    numpy_program(entry.model)
    chosen = problem(entry)
    stored, full, cost = arrays_of(entry, chosen, work)
    checks = recompute(stored)
    for check in [*full, *checks]:
        say(str(check))
    grade = "certified" if all(check.holds for check in [*full, *checks]) else "failed"
    say(
        f"{entry.name}: {grade}, {sum(check.holds for check in checks + full)} of {len(checks + full)} checks hold"
    )
    folder = out / entry.name
    folder.mkdir(parents=True, exist_ok=True)
    if grade == "failed":
        (folder / DRAWS).unlink(missing_ok=True)
    else:
        write_whole(folder / DRAWS, lambda part: _save(part, stored))
    programs = FOLDER / "programs"
    sources = {"log_joint.py": programs / f"{entry.model}.py", "model.stan": programs / f"{entry.model}.stan"}
    for name, source in sources.items():
        if source.exists():
            (folder / name).write_bytes(source.read_bytes())
    _write_json(folder / CARD, card(entry, chosen, stored, grade))
    files = [name for name in (CARD, DRAWS, *sources) if (folder / name).exists()]
    certificate = {
        "schema": SCHEMA,
        "grade": grade,
        "provenance": stamp(),
        "cost": cost,
        "settings": asdict(entry),
        "from the full runs": plain(full),
        "from the stored arrays": plain(checks),
        "sha256": {name: digest(folder / name) for name in files},
    }
    _write_json(folder / CERTIFICATE, certificate)
    return grade


def card(entry: Entry, chosen: Problem, stored: Arrays, grade: str) -> dict[str, Any]:
    """What a reference is of."""
    file = bnn.zoo.MODELS_FOLDER / f"{entry.model}.py"
    names = [str(name) for name in stored["sites"]]
    return {
        "schema": SCHEMA,
        "name": entry.name,
        "grade": grade,
        "model": {"name": entry.model, "arguments": dict(entry.arguments), "sha256": digest(file)},
        "weights": int(stored["dimensions"].sum()),
        "sites": dict(zip(names, stored["dimensions"].tolist(), strict=True)),
        "scales": stored["scale_names"].tolist(),
        "data": dict(chosen.source),
        "rows": len(chosen.y),
        "outputs": {"columns": stored["columns"].tolist(), "link": str(stored["link"])},
        "regions": {region: len(chosen.grid[region]) for region in REGIONS},
        "quantiles": list(QUANTILES),
        "licence": "The draws are released under the licence of this project; the data under their own, as above.",
    }


def write_index(entries: Mapping[str, Entry], out: Path) -> None:
    """Write what the library knows of the stored references: the entry of each, and the SHA-256 of its files."""
    found = {}
    for name in entries:
        if (out / name / CERTIFICATE).exists():
            files = sorted(file for file in (out / name).iterdir() if file.is_file())
            card = json.loads((out / name / CARD).read_text())
            listed = {key: value for key, value in asdict(Listed.of(card)).items() if key != "name"}
            found[name] = {"entry": listed, "sha256": {file.name: digest(file) for file in files}}
    _write_json(INDEX, found)


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


def check(name: str, folder: Path) -> bool:
    """Compute a stored certificate again; prints what differs, and returns whether nothing does."""
    certificate = json.loads((folder / CERTIFICATE).read_text())
    good = True
    for file, stated in certificate["sha256"].items():
        found = digest(folder / file)
        if found != stated:
            say(f"{name}: {file} has the SHA-256 {found}, and the certificate says {stated}")
            good = False
    if certificate["grade"] == "failed":
        return good
    with np.load(folder / DRAWS) as arrays:
        checks = recompute(arrays)
    for now, then in zip(plain(checks), certificate["from the stored arrays"], strict=True):
        same = now["name"] == then["name"] and np.isclose(now["value"], then["value"], rtol=1e-6, atol=1e-9)
        if not same or now["holds"] != then["holds"]:
            say(f"{name}: {now['name']} is {now['value']:g}, and the certificate says {then['value']:g}")
            good = False
    say(f"{name}: {'the certificate holds' if good else 'the certificate does NOT hold'}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=("make", "check", "list", "index"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    work = Path(tempfile.gettempdir()) / "references"
    parser.add_argument("--work", type=Path, default=work, help="folder for finished parts")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the references")
    options = parser.parse_args()
    entries = Entry.read()
    check_known("reference", options.names, entries)
    names = options.names or list(entries)
    if options.action == "make":
        for name in names:
            make(entries[name], options.work, options.out)
            if options.out == FOLDER:
                write_index(entries, options.out)
        return 0
    if options.action == "index":
        write_index(entries, FOLDER)
        return 0
    stored = [name for name in names if (options.out / name / CERTIFICATE).exists()]
    if options.action == "check":
        return int(sum(not check(name, options.out / name) for name in stored) > 0)
    for name in stored:
        about = json.loads((options.out / name / CARD).read_text())
        print(f"{name:<40} {about['grade']:<14} {about['weights']:>5} weights {about['rows']:>5} rows")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
