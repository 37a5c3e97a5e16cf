"""Make the reference posteriors, certify them, and compute their certificates again.

    python comparisons/references.py make [NAME ...] [--work DIR] [--out DIR]
    python comparisons/references.py calibrate [NAME ...] [--work DIR] [--out DIR]
    python comparisons/references.py check [NAME ...] [--out DIR]
    python comparisons/references.py list [--out DIR]
    python comparisons/references.py index

`make` runs what `references/entries.toml` asks for, everything twice, and the log joint in NumPyro, Pyro and NumPy:

- "certified": NUTS from prior draws; tempered SMC and thermodynamic integration, or adjusted MCLMC;
- "mode-weighted": NUTS from particles of each mode, in proportion to the masses that tempered SMC finds;
- "bracketed", for targets that were drawn from the prior: annealing forwards, and backwards from the exact draw.

Each part is kept in the work folder as soon as it has finished, so an interrupted run goes on where it stopped. A
reference that fails a check is stored as a record of failure: its card and certificate, without draws. `calibrate` adds
the ranks of simulated truths to a stored reference whose entry asks for them and that has none. `check` computes every
check again from the stored arrays. `index` writes what the library knows of the stored references.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from reference_certificate import (
    EVIDENCE,
    Check,
    agreement_of_marginals,
    bounds,
    convergence,
    log_mean,
    masses_of,
    mixing,
    moments,
    plain,
    pooled,
    recompute,
    scalars_of,
)
from reference_parts import (
    STORED,
    Arrays,
    annealing,
    calibration,
    integral_of,
    integration,
    joint_checks,
    log_joints,
    mclmc,
    numpy_program,
    nuts,
    nuts_in_a_mode,
    seed_of,
    smc,
)
from reference_problems import FOLDER, REGIONS, Entry, Problem, problem
from study import kept, stamp

import ppl_bnn as bnn
from ppl_bnn.backends.program import Program
from ppl_bnn.core.errors import check_known
from ppl_bnn.core.files import write_whole
from ppl_bnn.core.stored import digest
from ppl_bnn.language.likelihoods.categorical import Bernoulli, Categorical
from ppl_bnn.posterior.convergence import by_arviz
from ppl_bnn.references.folder import CARD, CERTIFICATE, DRAWS, SCHEMA
from ppl_bnn.references.library import INDEX
from ppl_bnn.references.library import Entry as Listed
from ppl_bnn.references.reference import LINKS, Reference

# Draws from the prior that are stored.
PRIOR_DRAWS = 200
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
RUNS = ("a", "b")
# What has a value for each transition of a chain.
TRANSITIONS = ("energy", "diverging", "reached_max_tree_depth")
# Chains of a simulation have mixed below this R-hat; where fewer than this share of simulations have, runs are longer.
MIXED, ENOUGH = 1.05, 0.95
SECOND = {"smc": "SMC", "mclmc": "adjusted MCLMC"}


def _save(part: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with part.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # pyright: ignore[reportArgumentType]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# --- a reference --------------------------------------------------------------------------------------


def drawn_names(found: Arrays) -> list[str]:
    """The arrays that have a value for each draw."""
    names = ["f", "scales", "log_likelihood", "log_prior", "virial"]
    return [*names, "shared"] if "shared" in found else names


def thinned(found: Arrays, count: int | None = None) -> Arrays:
    """`count` draws of each chain (`STORED` of the run), evenly spaced, and the statistics of all its transitions."""
    chains, draws = found["f"].shape[:2]
    at = np.linspace(0, draws - 1, min(draws, count or STORED // chains)).round().astype(int)
    kept = {name: found[name][:, at].astype(np.float32) for name in drawn_names(found)}
    kept |= {name: found[name] for name in TRANSITIONS}
    return kept | {"energy": found["energy"].astype(np.float32)}


def effective_sizes(stored: Arrays) -> Arrays:
    """Effective sample sizes of the stored draws for mean and standard deviation of what is graded, (rows, K).

    Those of weighted particles are no more than the effective number of these, and what is mixed from modes has the
    error of their masses, too: with masses m and mode means mu, var(mean) = sum_k m_k^2 v_k / n_k + mu' cov(m) mu.
    """
    f = stored["f"].astype(np.float64)
    g = LINKS[str(stored["link"])](f.reshape(*f.shape[:2], -1, len(stored["columns"])))
    found = {moment: by_arviz("ess", g, 0.0, method=moment) for moment in ("mean", "sd")}
    limit = np.inf
    if "forwards" in stored:
        weights = np.exp(stored["forwards"] - stored["forwards"].max(axis=1, keepdims=True))
        limit = np.sum(weights.sum(axis=1) ** 2 / np.square(weights).sum(axis=1))
    elif "mode" in stored:
        modes = np.unique(stored["mode"])
        of = [g[:, stored["mode"] == mode] for mode in modes]
        mu = np.stack([each.mean(axis=(0, 1)) for each in of])
        covariance = np.mean(
            [masses_of(*each)[1] for each in zip(stored["log_evidence"], stored["mode_shares"], strict=True)],
            axis=0,
        )
        # The mean of two sets of runs has half the variance of one.
        error = 0.5 * np.einsum("k...,kl,l...->...", mu, covariance, mu)
        limit = g.var(axis=(0, 1)) / np.maximum(error, 1e-300)
        shares = [np.mean(stored["mode"] == mode) for mode in modes]
        inside = sum(
            share**2 * each.var(axis=(0, 1)) / by_arviz("ess", each, 0.0, method="mean")
            for share, each in zip(shares, of, strict=True)
        )
        found["mean"] = g.var(axis=(0, 1)) / inside
    return {f"ess_{moment}": 1.0 / (1.0 / value + 1.0 / limit) for moment, value in found.items()}


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


class Parts:
    """The parts of one reference: each is computed once and kept in a folder, with what it cost."""

    def __init__(self, entry: Entry, chosen: Problem, work: Path):
        self.entry, self.chosen, self.folder = entry, chosen, work / entry.name
        self.cost: dict[str, Any] = {}

    def __call__(self, name: str, run: str, compute: Callable[..., Arrays], *given: Any) -> Arrays:
        def computed() -> Arrays:
            say(f"{self.entry.name}: {name}, run {run}")
            return compute(self.entry, self.chosen, run, *given)

        found = kept(self.folder, f"{name.replace(' ', '_')}_{run}", self.entry, computed)
        known = {key: float(found[key]) for key in ("seconds", "gradients") if key in found}
        self.cost[f"{name} {run}"] = {"seed": seed_of(self.entry.name, f"{name} {run}"), **known}
        return found


def _joined(parts: Sequence[Arrays], axis: int = 0) -> Arrays:
    return {name: np.concatenate([each[name] for each in parts], axis=axis) for name in parts[0]}


def _mixed(name: str, found: Arrays) -> list[Check]:
    """Convergence of a run at the grid, and of log densities and scales."""
    return [
        *convergence(f"{name}, f at the grid", found["f"]),
        *convergence(f"{name}, log likelihood, log prior and scales", scalars_of(found)),
    ]


def _second(
    name: str, found: Sequence[Arrays], pool: np.ndarray, pairs: np.ndarray
) -> tuple[Arrays, list[Check]]:
    """Moments of the two fits of a second sampler, and their marginals against the pool."""
    moments_of, checks = [], []
    for run, each in zip(RUNS, found, strict=True):
        draws = pooled(each["f"])
        moments_of.append({f"second_{what}": value[None] for what, value in moments(draws, pairs).items()})
        checks += agreement_of_marginals(f"{name}, run {run}", pool, draws)
    return _joined(moments_of) | {"second": np.array(name)}, checks


def by_chains(parts: Parts) -> tuple[Arrays, list[Check], Arrays]:
    """What is stored of a certified reference, checks that need more, and facts of the program."""
    entry, chosen = parts.entry, parts.chosen
    runs = [parts("nuts", run, nuts) for run in RUNS]
    full = [check for run, each in zip(RUNS, runs, strict=True) for check in _mixed(f"NUTS {run}", each)]
    stored = _joined([thinned(each) for each in runs])
    pool = pooled(stored["f"])
    pairs, name = chosen.pairs() * stored_outputs(stored, chosen), entry.second
    if name == "smc":
        found = [parts("smc", run, smc)["log_evidence"] for run in RUNS]
        # What SMC cannot do to the stated precision is no second sampler.
        name = "smc" if max(log_mean(each)[1] for each in found) < EVIDENCE else "mclmc"
    others = [parts(name, run, {"smc": smc, "mclmc": mclmc}[name]) for run in RUNS]
    second, checks = _second(SECOND[name], others, pool, pairs)
    if name == "smc":
        integrals = [integral_of(parts("integration", run, integration)) for run in RUNS]
        second["log_evidence"] = np.stack([each["log_evidence"] for each in others])
        second["integral"], second["integral_error"] = np.array(integrals).T
    return stored | second, full + checks, runs[0]


def by_modes(parts: Parts) -> tuple[Arrays, list[Check], Arrays]:
    """The same of a mode-weighted reference: NUTS in each mode, in proportion to the masses that SMC finds."""
    entry, chosen = parts.entry, parts.chosen
    swarms = [parts("smc", run, smc) for run in RUNS]
    label = modes_of(swarms[0]["f"], entry.modes)
    labels = [label(each["f"]) for each in swarms]
    # Not by R-hat: all chains may be in one mode.
    free = parts("nuts", "a", nuts)["f"]
    visits = np.stack([np.mean(label(free) == mode, axis=1) for mode in range(entry.modes)], axis=1)
    stay = float(np.mean(visits.max(axis=1) == 1.0))
    full = [Check.above("share of the chains from prior draws that stay in one mode", stay, 0.5)]
    shares = np.stack(
        [[[np.mean(run == mode) for mode in range(entry.modes)] for run in each] for each in labels]
    )
    evidences = np.stack([each["log_evidence"] for each in swarms])
    mass = np.mean([masses_of(*each)[0] for each in zip(evidences, shares, strict=True)], axis=0)
    counts = np.diff(np.round(np.cumsum([0.0, *mass]) * (STORED // entry.chains)).astype(int))
    thin, runs = [], []
    for run, swarm, of in zip(RUNS, swarms, labels, strict=True):
        each = []
        for mode in range(entry.modes):
            u = {name[2:]: value[of == mode] for name, value in swarm.items() if name.startswith("u.")}
            found = parts(f"mode {mode}", run, nuts_in_a_mode, mode, u)
            full += _mixed(f"NUTS {run}, mode {mode}", found)
            left = int(np.sum(label(found["f"]) != mode))
            full.append(Check.below(f"NUTS {run}, mode {mode}: draws in another mode", left, 1))
            each.append(found)
        runs += each
        # Draws of a chain are those of all modes; what has one value for each transition is stored by chain and mode.
        draws = [thinned(found, int(count)) for found, count in zip(each, counts, strict=True)]
        by_mode = [{name: found.pop(name) for name in TRANSITIONS} for found in draws]
        thin.append(_joined(draws, axis=1) | _joined(by_mode))
    stored = _joined(thin)
    mode = np.repeat(np.arange(entry.modes), counts)
    # Modes follow each other at random in a chain, and the draws of each in their order.
    mixed = np.random.default_rng(0).permutation(mode)
    order = np.empty_like(mode)
    for each in range(entry.modes):
        order[mixed == each] = np.flatnonzero(mode == each)
    stored |= {name: stored[name][:, order] for name in drawn_names(stored)}
    pool = pooled(stored["f"])
    second, checks = _second("SMC", swarms, pool, chosen.pairs() * stored_outputs(stored, chosen))
    stored |= {"mode": mixed, "mode_shares": shares, "log_evidence": evidences}
    stored |= {"chain_modes": visits, "chain_rhat": np.array(mixing(free)[0])}
    return stored | second, full + checks, runs[0]


def modes_of(f: np.ndarray, count: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function from f (..., G) to the number of its mode: the nearest centre of k-means, in standard deviations."""
    from scipy.cluster.vq import kmeans2

    flat = f.reshape(-1, f.shape[-1])
    mean, scale = flat.mean(axis=0), flat.std(axis=0)
    centres, _ = kmeans2((flat - mean) / scale, count, minit="++", seed=0)

    def label(f: np.ndarray) -> np.ndarray:
        far = [np.square((f - mean) / scale - centre).sum(axis=-1) for centre in centres]
        return np.argmin(far, axis=0)

    return label


def by_brackets(parts: Parts) -> tuple[Arrays, list[Check], Arrays]:
    """The same of a bracketed reference: the particles of annealing, resampled by their weights."""
    runs = [parts("annealing", run, annealing) for run in RUNS]
    stored = _joined([{name: each[name].astype(np.float32) for name in drawn_names(each)} for each in runs])
    for name in ("forwards", "backwards"):
        stored[name] = np.stack([each[name] for each in runs])
    truth = {f"truth.{name}": value for name, value in parts.chosen.truth.items()}
    return stored | truth, [], runs[0]


BUILT = {"certified": by_chains, "mode-weighted": by_modes, "bracketed": by_brackets}


def stored_outputs(stored: Arrays, chosen: Problem) -> int:
    """Number of outputs of the network per row."""
    return stored["f"].shape[-1] // len(chosen.inputs)


def arrays_of(entry: Entry, chosen: Problem, work: Path) -> tuple[Arrays, list[Check], dict[str, Any]]:
    """All that a reference stores, the checks that need more than that, and what each part cost."""
    parts = Parts(entry, chosen, work)
    stored, full, facts = BUILT[entry.sought](parts)
    stored["sought"] = np.array(entry.sought)
    pairs = stored["pairs"] = chosen.pairs() * stored_outputs(stored, chosen)
    pool = pooled(stored["f"])
    stored |= {"quantiles": np.quantile(pool, QUANTILES, axis=0), **moments(pool, pairs)}
    stored |= {name: facts[name] for name in ("sites", "dimensions", "scale_names", "columns")}
    stored |= from_the_prior(entry, chosen, stored["columns"])
    stored |= effective_sizes(stored)
    stored |= {"x": chosen.x, "y": chosen.y}
    stored |= {f"x_{region}": value for region, value in chosen.grid.items()}
    stored |= {f"y_{region}": value for region, value in chosen.targets.items()}
    stored |= held_out(entry, chosen, stored)
    if entry.simulations:
        ranks, parts.cost["calibration"] = calibrated(entry, chosen, parts.folder)
        stored |= ranks
    full += joint_checks(kept(parts.folder, "log_joints", entry, lambda: log_joints(entry, chosen)))
    return stored, full, parts.cost


def calibrated(entry: Entry, chosen: Problem, folder: Path) -> tuple[Arrays, dict[str, Any]]:
    """Ranks of simulated truths by short runs, or by long ones where short ones do not converge; and their cost."""
    for part, long in (("calibration", False), ("long calibration", True)):
        found = kept(
            folder, part, entry, lambda part=part, long=long: calibration(entry, chosen, folder, part, long)
        )
        agreed = float(np.mean(found["calibration_rhat"] < MIXED))
        say(
            f"{entry.name}, {part}: R-hat below {MIXED:g} in {agreed:.1%} of simulations, {found['seconds']:.0f} s"
        )
        if agreed >= ENOUGH:
            break
    cost = {
        "seed": seed_of(entry.name, part),
        "seconds": float(found["seconds"]),
        "commit": stamp()["commit"],
    }
    return {name: value for name, value in found.items() if name != "seconds"}, cost


def make(entry: Entry, work: Path, out: Path) -> str:
    """Compute what an entry asks for, judge it, and store the reference; returns its grade."""
    numpy_program(entry.model)
    chosen = problem(entry)
    stored, full, cost = arrays_of(entry, chosen, work)
    return store(entry, chosen, stored, plain(full), {"provenance": stamp(), "cost": cost}, out)


def calibrate(entry: Entry, work: Path, out: Path) -> str:
    """Add the ranks of simulated truths to a stored reference, and judge it with them; returns its grade.

    All else of the reference stays as it is.
    """
    folder = out / entry.name
    certificate = json.loads((folder / CERTIFICATE).read_text())
    with np.load(folder / DRAWS) as arrays:
        stored = dict(arrays)
    chosen = problem(entry)
    ranks, cost = calibrated(entry, chosen, work / entry.name)
    certificate["cost"]["calibration"] = cost
    full = certificate["from the full runs"]
    return store(entry, chosen, stored | ranks, full, certificate, out)


def store(
    entry: Entry,
    chosen: Problem,
    stored: Arrays,
    full: Sequence[Mapping[str, Any]],
    made: Mapping[str, Any],
    out: Path,
) -> str:
    """Judge a reference by all its checks and store it; returns its grade. made: its provenance and cost."""
    checks = recompute(stored)
    full_checks = [Check(**each) for each in full]
    every = [*full_checks, *checks]
    for check in every:
        say(str(check))
    grade = entry.sought if all(check.holds for check in every) else "failed"
    say(f"{entry.name}: {grade}, {sum(check.holds for check in every)} of {len(every)} checks hold")
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
        "provenance": made["provenance"],
        "cost": made["cost"],
        "settings": asdict(entry),
        "from the full runs": list(full),
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
        **_of_grade(stored),
        "licence": "The draws are released under the licence of this project; the data under their own, as above.",
    }


def _of_grade(stored: Arrays) -> dict[str, Any]:
    """What is known of modes and of the log evidence, and the ranks of a calibration."""
    found: dict[str, Any] = {}
    if "mode" in stored:
        each = [masses_of(*each) for each in zip(stored["log_evidence"], stored["mode_shares"], strict=True)]
        found["modes"] = {
            "masses": [mass.tolist() for mass, _ in each],
            "standard errors": [np.sqrt(np.diag(covariance)).tolist() for _, covariance in each],
            "share of each chain from a prior draw in each mode": stored["chain_modes"].tolist(),
            "R-hat of these chains": float(stored["chain_rhat"]),
        }
    if "log_evidence" in stored:
        found["log evidence"] = [log_mean(each) for each in stored["log_evidence"]]
    if "forwards" in stored:
        both = zip(stored["forwards"], stored["backwards"], strict=True)
        found["bounds of the log evidence"] = [bounds(*each) for each in both]
    if "ranks" in stored:
        found["calibration"] = {
            "simulations": len(stored["ranks"]),
            "functions": stored["rank_names"].tolist(),
            "failures": int(stored["calibration_failures"]),
        }
    return found


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
    parser.add_argument("action", choices=("make", "calibrate", "check", "list", "index"))
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
    if options.action == "calibrate":
        for name in stored:
            about = json.loads((options.out / name / CARD).read_text())
            if entries[name].simulations and about["grade"] != "failed" and "calibration" not in about:
                calibrate(entries[name], options.work, options.out)
                if options.out == FOLDER:
                    write_index(entries, options.out)
        return 0
    if options.action == "check":
        return int(sum(not check(name, options.out / name) for name in stored) > 0)
    for name in stored:
        about = json.loads((options.out / name / CARD).read_text())
        print(f"{name:<40} {about['grade']:<14} {about['weights']:>5} weights {about['rows']:>5} rows")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
