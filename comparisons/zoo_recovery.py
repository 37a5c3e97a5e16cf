"""Does every model of the zoo recover itself? It draws weights, noise and targets from its prior, and finds them again.

At fixed inputs x (standard normal, as many as the default data have features) all unknowns w ~ p(w), latent variables
of rows among them, and y ~ p(y | x, w) are drawn, NUTS samples p(w | x, y), and what it says of f at held-out inputs
and of the scales of the model is held against the truth. If sampler, densities and transforms are right, the truth is
one more draw from the posterior, and a central credible interval of probability p holds it with probability p, for
every model, whatever its prior. Intervals that miss say that something is wrong: a density, a bijection, a sampler that
has not converged at settings one can afford.

Coverage is pooled over simulations and held-out inputs; its standard error counts simulations, since the inputs of one
have their truth and their posterior in common. The verdict needs no error: each input by itself is covered in a
binomial number of simulations, and twice the mean of the p-values of all inputs is a p-value however they depend on
each other (V. Vovk and R. Wang, Combining p-values via averaging, Biometrika 107, 2020). A model is not recovered where
the least p-value over quantities and levels is below 1 % over their number. A simulation of which the chains have not
converged in function space is counted, told, and judged with the rest: it is a draw like any other; where most have
not, nothing is said of the model. Chains have the same settings for every model but those that need more of them or
other coordinates to converge; the column `apart` says so. Twenty simulations find what is grossly wrong and no more:
each verdict says how far the intervals for f would have to be off. Ranks of the truth among draws are
`bnn.simulation_based_calibration`'s, one compiled program serving all simulations of a model.

Models of a thousand weights and more are asked for less, as are the ResNet and the transformer, whose gradients are
dear: an ensemble of modes fitted to such data predicts new rows better than the prior predictive does, by the log
score. Those of these two are not polished but stopped early, and have twice as many data sets: at their modes, which
know nothing of what is uncertain, five had not shown it of the ResNet. One of the large models, the wide network, is
also asked for the first at a smaller size, and spike and slab in its relaxed form, too. Where rows interact there are
no held-out inputs, and what NUTS refuses it refuses here: both are named.

    python comparisons/zoo_recovery.py [--tiny] [--only NAME ...] [--out DIR] [--checkpoint DIR]

Each model is kept in <out>/models as soon as it has finished; --checkpoint keeps its simulations too. What it cost is
`gradients_per_draw`: `seconds` are of whatever else the machine did meanwhile.
"""

from __future__ import annotations

import ast
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from study import (
    BLACK,
    BLUE,
    GREY,
    NOT_REPRODUCED,
    NOT_RUN,
    ORANGE,
    REPRODUCED,
    VERMILION,
    Study,
    Verdict,
    command_line,
    kept,
    paired,
    panels,
    stamp,
)

import ppl_bnn as bnn
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import BNNError, InputError, UnsupportedError, unknown_name
from ppl_bnn.diagnostics.calibration import Calibration
from ppl_bnn.diagnostics.function_space import convergence

LEVELS = (0.5, 0.9)
# Probability that a model which recovers itself is called one that does not.
ERROR_RATE = 0.01
# With fewer simulations nothing is said.
FEWEST = 10
JUDGED_ROWS = 20
SECONDS_BETWEEN_WORDS = 20.0

RECOVERED, NOT_RECOVERED, UNDECIDED = "recovered", "not recovered", "undecided"
BETTER, NOT_BETTER, LEFT_OUT = "better than its prior", "not better than its prior", "left out"

# Members of ensembles that stop early do so by this share of the rows, and are fitted to so many times the data sets.
VALIDATION, TIMES = 0.2, 2


@dataclass(frozen=True)
class Apart:
    """In what a model is asked otherwise than the others.

    chains: settings, by their names in `Sizes`, at which more of its chains converge. noncentred: the same joint
    distribution in coordinates in which scales and weights are no funnel. costly: of few weights, and with a gradient
    so dear that one simulation takes NUTS a quarter of an hour: asked for what large models are asked for. scales:
    those that are not single numbers and that data can tell; single numbers are all looked at. also: keywords of the
    model with which it is asked once more.
    """

    chains: dict[str, Any] = field(default_factory=dict)
    noncentred: bool = False
    costly: bool = False
    scales: tuple[str, ...] = ()
    also: dict[str, Any] = field(default_factory=dict)


APART = {
    "ard_mlp": Apart(scales=("hidden0.weight.scale",)),
    "bayes_by_backprop": Apart(chains={"draws": 1000, "max_tree_depth": 10}),
    "latent_inputs": Apart(
        chains={"warmup": 1000, "draws": 6000, "target_accept": 0.99, "max_tree_depth": 10}
    ),
    "mixture_density": Apart(chains={"warmup": 1000, "draws": 4000}),
    "one_layer_digits": Apart(noncentred=True),
    "ordinal_mlp": Apart(scales=("cuts.probabilities",)),
    "resnet": Apart(costly=True),
    # In its wells chains stay; the relaxed form has slopes instead.
    "spike_and_slab": Apart(also={"relaxed": True}),
    "transformer_classifier": Apart(costly=True),
    # Of too many weights for NUTS at this price, but not at this size.
    "wide_network": Apart(also={"width": 50}),
}


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    rows, held_out: inputs with targets and without. ranked: draws among which a truth is ranked, thinned from all
    chains; ranked + 1 is a multiple of 20, so that intervals of 50 % and 90 % end between ranks. most_weights: up to
    how many a model recovers itself; beyond, `scored` data sets of `scored_rows` rows are fitted by `members` modes, in
    the system `ppl`.
    """

    simulations: int = 20
    rows: int = 100
    held_out: int = 20
    ranked: int = 199
    chains: int = 4
    warmup: int = 500
    draws: int = 500
    max_tree_depth: int = 8
    target_accept: float = 0.9
    most_weights: int = 999
    scored: int = 5
    scored_rows: int = 300
    test_rows: int = 200
    members: int = 5
    steps: int = 1000
    ppl: str = "numpyro"
    prior_draws: int = 300
    seed: int = 0


FULL = Sizes()
TINY = Sizes(
    simulations=2,
    rows=12,
    held_out=3,
    ranked=19,
    chains=2,
    warmup=15,
    draws=15,
    max_tree_depth=4,
    most_weights=100,
    scored=2,
    scored_rows=15,
    test_rows=5,
    members=2,
    steps=20,
    ppl="pyro",
    prior_draws=5,
)


@dataclass(frozen=True)
class Subject:
    """A model of the zoo, with the keywords in which it differs from its defaults."""

    name: str
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How tables call it."""
        words = ", ".join(f"{name}={value}" for name, value in self.keywords.items())
        return f"{self.name}({words})" if words else self.name

    @property
    def file(self) -> str:
        """The name of the file that it is kept in."""
        return "-".join([self.name, *self.keywords])

    @property
    def source(self) -> str:
        """SHA-256 of the code of the model's file, without its card and comments: what is kept belongs to it."""
        tree = ast.parse(bnn.zoo.models()[self.name].path.read_text(encoding="utf-8"))
        if ast.get_docstring(tree) is not None:
            del tree.body[0]
        return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()

    @property
    def model(self) -> Any:
        found = bnn.zoo.load(self.name, **self.keywords)
        return bnn.noncentred(found) if self.apart.noncentred else found

    @property
    def apart(self) -> Apart:
        return APART.get(self.name, Apart())

    @property
    def words_of_chains(self) -> str:
        """In what its chains differ from those of the others."""
        settings = [f"{name}={value}" for name, value in self.apart.chains.items()]
        return ", ".join([*settings, *(["noncentred"] if self.apart.noncentred else [])])

    @property
    def features(self) -> int:
        """As many as the default data have."""
        return bnn.data.datasets()[bnn.zoo.models()[self.name].data or ""].features


def subjects(tiny: bool) -> list[Subject]:
    """All of the zoo, with other arguments after the model that they are of; one of each kind where tiny."""
    if tiny:
        few = ("linear_regression", "empirical_bayes", "graph_convolution")
        return [*map(Subject, few), Subject("wide_network", {"width": 10})]
    found = []
    for name in bnn.zoo.models():
        found.append(Subject(name))
        if name in APART and APART[name].also:
            found.append(Subject(name, APART[name].also))
    return found


# --- one model ------------------------------------------------------------------------------------


def inputs(subject: Subject, rows: int, seed: int) -> np.ndarray:
    """x (rows, F), standard normal; the first rows are the same whatever their number."""
    return np.random.default_rng(seed).normal(size=(rows, subject.features))


def bound(model: Any, x: np.ndarray) -> Program:
    """The model bound to its inputs: its sites, its outputs, its likelihood."""
    chosen = system("numpyro")
    with chosen.session("float64", "cpu"):
        return Program.of(chosen, model, chosen.asarray(x), None, language=True)


def functions(program: Program, scales: Sequence[str] = ()) -> dict[str, Callable[..., np.ndarray]]:
    """What is to be found again: f at inputs, all scalar random variables, and `scales`, site by site."""

    def f(w: Mapping[str, np.ndarray], eta: np.ndarray, y: np.ndarray) -> np.ndarray:
        family, parameters = program.likelihood.mixture_parameters(eta)
        if family != "NormalMixture":
            return eta[..., : program.outputs].reshape(len(eta), -1)
        # Its components have no order, so that only what all of them say together can be found again.
        weights, loc, scale = (parameters[name] for name in ("weights", "loc", "scale"))
        mean = np.sum(weights * loc, axis=-1)
        variance = np.sum(weights * (scale**2 + (loc - mean[..., None]) ** 2), axis=-1)
        return np.concatenate([mean, np.sqrt(variance)], axis=1)

    def of(name: str) -> Callable[..., np.ndarray]:
        def site(w: Mapping[str, np.ndarray], eta: np.ndarray, y: np.ndarray) -> np.ndarray:
            return w[name] if w[name].ndim == 1 else w[name].reshape(len(eta), -1)

        return site

    single = [site.name for site in program.latents if site.shape == ()]
    return {"f": f, **{name: of(name) for name in [*single, *scales]}}


def judged(posterior: Any) -> dict[str, float]:
    """What the chains of one simulation say of themselves, in function space."""
    found = convergence(posterior, max_rows=JUDGED_ROWS)
    statistics, info = posterior.statistics, posterior.info
    return {
        "converged": float(found.converged),
        "rhat": found.rhat,
        "ess": min(found.ess_bulk, found.ess_tail),
        "divergences": float(statistics["diverging"].sum()),
        "cut_short": float(statistics["reached_max_tree_depth"].mean()),
        "gradients": float(info.gradient_evaluations or np.nan),
        "seconds": info.compile_seconds + info.run_seconds,
    }


def within(ranks: np.ndarray, draws: int, level: float) -> np.ndarray:
    """Whether truths of these ranks (S, F) among so many draws lie in their central intervals of probability `level`.

    Of the draws + 1 ranks that are equally likely a share of exactly `level` lies inside.
    """
    edge = 0.5 * (1.0 - level) * (draws + 1)
    if abs(edge - round(edge)) > 1e-9:
        raise InputError.of(
            "ranked", f"a number for which {edge:.4g} is whole", f"ranked={draws}", "ranked=19, 39, 199, ..."
        )
    return (ranks >= round(edge)) & (ranks < draws + 1 - round(edge))


@dataclass(frozen=True)
class Coverage:
    """How often intervals of probability `level` held the truth. components: numbers pooled in each simulation.

    error: standard error of `share` over simulations. p: of the hypothesis that the level is right.
    """

    quantity: str
    level: float
    share: float
    error: float
    p: float
    components: int


def covered(quantity: str, ranks: np.ndarray, draws: int, level: float) -> Coverage:
    """Coverage by ranks (S, F) of all components of one quantity."""
    from scipy.stats import binomtest

    inside = within(ranks, draws, level)
    share, error = paired(inside.mean(axis=1))
    counts, times = np.unique(inside.sum(axis=0), return_counts=True)
    each = [float(binomtest(int(count), len(ranks), level).pvalue) for count in counts]
    mean = float(np.average(each, weights=times))
    p = mean if ranks.shape[1] == 1 else min(1.0, 2.0 * mean)
    return Coverage(quantity, level, share, error, p, ranks.shape[1])


def coverages(found: Calibration) -> list[Coverage]:
    """Of every quantity that varies, at every level."""
    groups: dict[str, list[int]] = {}
    for column, name in enumerate(found.names):
        groups.setdefault(name.partition("[")[0], []).append(column)
    if not found.simulations:
        return []
    return [
        covered(quantity, found.ranks[:, columns], found.draws, level)
        for quantity, columns in groups.items()
        for level in LEVELS
    ]


def unseen(level: float, simulations: int, quantities: int) -> tuple[float, float]:
    """The coverages, from and to, of intervals for f that pass for intervals of `level`.

    All held-out inputs are taken to be covered alike, and `quantities` coverages to be judged in all.
    """
    from scipy.stats import binomtest

    passing = [
        count / simulations
        for count in range(simulations + 1)
        if 2.0 * binomtest(count, simulations, level).pvalue >= ERROR_RATE / quantities
    ]
    return passing[0], passing[-1]


def verdict_of(parts: Sequence[Coverage], simulations: int, not_converged: int = 0) -> str:
    """Whether a model recovers itself."""
    if simulations < FEWEST or not parts or 2 * not_converged > simulations:
        return UNDECIDED
    return RECOVERED if min(part.p for part in parts) >= ERROR_RATE / len(parts) else NOT_RECOVERED


class TimeLeft:
    """A progress that says now and then how long the simulations that are left will take."""

    def __init__(self, label: str, say: Callable[[str], None]):
        self.label, self.say = label, say
        self.first: tuple[int, float] | None = None
        self.said = time.monotonic()

    def task(self, title: str, total: int) -> TimeLeft:
        self.total = total
        return self

    def update(self, done: int, **figures: float) -> None:
        now = time.monotonic()
        if self.first is None:
            # Those that were kept, or the one that compiled: later ones tell the time better.
            self.first = (done, now)
            return
        before, since = self.first
        if done > before and now - self.said > SECONDS_BETWEEN_WORDS:
            left = (self.total - done) * (now - since) / (done - before)
            words = ", ".join(
                f"{value:g} {name.replace('_', ' ')}" for name, value in figures.items() if value
            )
            self.say(
                f"{self.label}: {done} of {self.total}{f' ({words})' if words else ''}, {minutes(left)} left"
            )
            self.said = now

    def close(self) -> None:
        pass


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def recovered(
    subject: Subject, sizes: Sizes, checkpoint: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """The row of a model that is simulated and sampled, with its coverages."""
    sizes = replace(sizes, **subject.apart.chains)
    x = inputs(subject, sizes.rows + sizes.held_out, sizes.seed)
    model, begun = subject.model, time.perf_counter()
    program = bound(model, x[: sizes.rows])
    nuts = bnn.NUTS(
        chains=sizes.chains,
        warmup=sizes.warmup,
        draws=sizes.draws,
        max_tree_depth=sizes.max_tree_depth,
        target_accept=sizes.target_accept,
    )
    found = bnn.simulation_based_calibration(
        model,
        x[: sizes.rows],
        nuts,
        simulations=sizes.simulations,
        draws=sizes.ranked,
        functions=functions(program, subject.apart.scales),
        probe=x[sizes.rows :],
        figures=judged,
        seed=sizes.seed,
        progress=TimeLeft(subject.label, say),
        checkpoint=None if checkpoint is None else checkpoint / subject.file,
        device="cpu",
    )
    parts, figures = coverages(found), found.figures
    row: dict[str, Any] = {
        "rows": sizes.rows,
        "simulations": found.simulations,
        "failed": len(found.failures),
        "chains": sizes.chains,
        "warmup": sizes.warmup,
        "draws": sizes.draws,
        "not_converged": found.not_converged,
    }
    if subject.words_of_chains:
        row["apart"] = subject.words_of_chains
    if found.simulations:
        row |= {
            "divergences": float(np.sum(figures["divergences"])),
            "worst_rhat": float(np.max(figures["rhat"])),
            "median_rhat": float(np.median(figures["rhat"])),
            "least_ess": float(np.min(figures["ess"])),
            "cut_short": float(np.mean(figures["cut_short"])),
            "gradients_per_draw": float(np.mean(figures["gradients"])) / (sizes.chains * sizes.draws),
        }
    shown = ["f", *[part.quantity for part in parts if part.quantity != "f"][:1]]
    for name, quantity in zip(("f", "scale"), shown, strict=False):
        if name == "scale":
            row["scale"] = quantity
        for part in parts:
            if part.quantity == quantity:
                row |= {f"{name}_{part.level:.0%}": part.share, f"{name}_{part.level:.0%}_error": part.error}
    if parts:
        row |= {"least_p": min(part.p for part in parts), "threshold": ERROR_RATE / len(parts)}
    reasons = sorted(set(found.failures.values()))
    return {
        "kind": "recovery",
        "row": row
        | {
            "verdict": verdict_of(parts, found.simulations, found.not_converged),
            "reason": "; ".join(reasons)[:300],
        },
        "coverage": [vars(part) for part in parts],
        "seconds": time.perf_counter() - begun,
    }


def simulated(model: Any, x: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Targets (count, N) of `count` draws from the prior."""
    import jax
    from numpyro.infer import Predictive

    chosen = system("numpyro")
    with chosen.session("float64", "cpu"):
        draw = Predictive(bnn.as_numpyro(model), num_samples=count)
        return np.array(draw(jax.random.PRNGKey(seed), chosen.asarray(x))["y"])


def scored(
    subject: Subject, sizes: Sizes, checkpoint: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """The row of a large model: log scores of new rows, in nats per row, after and before the data."""
    model, begun = subject.model, time.perf_counter()
    x = inputs(subject, sizes.scored_rows + sizes.test_rows, sizes.seed)
    train, test = slice(sizes.scored_rows), slice(sizes.scored_rows, None)
    costly = subject.apart.costly
    count = sizes.scored * (TIMES if costly else 1)
    told = TimeLeft(subject.label, say).task("", count)
    # Where a gradient is dear the last digits of a mode, which predictions do not need, are most of the cost.
    member = bnn.MAP(
        steps=sizes.steps, polish=not costly, validation=VALIDATION if costly else None, ppl=sizes.ppl
    )
    method = bnn.Ensemble(member, size=sizes.members, ppl=sizes.ppl)

    def scores(index: int, y: np.ndarray) -> dict[str, float]:
        options: dict[str, Any] = {"seed": sizes.seed + index}
        posterior = bnn.fit(model, x[train], y[train], method, device="cpu", **options)
        prior = bnn.prior_predictive(
            model, x[train], y[train], draws=sizes.prior_draws, ppl="pyro", **options
        )
        return {
            "after": float(posterior.predict(x[test]).log_prob(y[test]).mean()),
            "before": float(prior.predict(x[test]).log_prob(y[test]).mean()),
        }

    found = []
    for index, y in enumerate(simulated(model, x, count, sizes.seed)):
        folder = None if checkpoint is None else checkpoint / subject.file
        found.append(
            kept(folder, f"{subject.source[:16]}-{index}", sizes, lambda index=index, y=y: scores(index, y))
        )
        told.update(index + 1)
    after, before = (np.array([each[name] for each in found]) for name in ("after", "before"))
    gain, error = paired(after - before)
    return {
        "kind": "score",
        "row": {
            "rows": sizes.scored_rows,
            "simulations": count,
            "method": f"Ensemble of {sizes.members} MAP{', stopped early' if costly else ''}",
            "score": float(np.mean(after)),
            "prior_score": float(np.mean(before)),
            "gain": gain,
            "gain_error": error,
            "verdict": BETTER if gain > 2.0 * error else NOT_BETTER,
        },
        "coverage": [],
        "seconds": time.perf_counter() - begun,
    }


def one(
    subject: Subject, sizes: Sizes, checkpoint: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """All that is kept of a model."""
    program = bound(subject.model, inputs(subject, sizes.rows, sizes.seed))
    weights = sum(site.size for site in program.sites.values() if not site.local)
    local = sum(site.size for site in program.sites.values() if site.local) // sizes.rows
    known = {"model": subject.label, "weights": weights, "latents_per_row": local}
    try:
        if program.coupled:
            raise UnsupportedError(
                "rows interact (bnn.coupled): f at a held-out input depends on what comes along, and has no one truth"
            )
        if weights <= sizes.most_weights and not subject.apart.costly:
            part = recovered(subject, sizes, checkpoint, say)
        else:
            part = scored(subject, sizes, checkpoint, say)
    except UnsupportedError as error:
        part = {
            "kind": LEFT_OUT,
            "row": {"verdict": LEFT_OUT, "reason": str(error)},
            "coverage": [],
            "seconds": 0.0,
        }
    part["row"] = {**known, **part["row"], "seconds": part["seconds"]}
    return part | {"source": subject.source, **stamp()}


# --- all of them ----------------------------------------------------------------------------------


def part_of(
    subject: Subject, sizes: Sizes, folder: Path, checkpoint: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """What is kept of a model, computed where it is not there or its file, or what is asked of chains, has changed."""
    stored = stored_part(subject, folder)
    if stored is not None and (stored["source"], stored["row"].get("apart", "")) != (
        subject.source,
        subject.words_of_chains,
    ):
        (folder / f"{subject.file}.json").unlink()
    return kept(folder, subject.file, sizes, lambda: one(subject, sizes, checkpoint, say))


def stored_part(subject: Subject, folder: Path) -> dict[str, Any] | None:
    """What is kept of a model, if anything is, with the verdict on its numbers."""
    path = folder / f"{subject.file}.json"
    if not path.exists():
        return None
    part = json.loads(path.read_text())["part"]
    if part["kind"] == "recovery":
        row, parts = part["row"], [Coverage(**each) for each in part["coverage"]]
        row["verdict"] = verdict_of(parts, row["simulations"], row["not_converged"])
    return part


def verdict_word(part: Mapping[str, Any]) -> Verdict:
    """The claim about a model and what became of it."""
    row = part["row"]
    label, verdict = row["model"], row["verdict"]
    if part["kind"] == LEFT_OUT:
        return Verdict(f"{label} recovers itself", NOT_RUN, f"left out: {row['reason']}")
    if part["kind"] == "score":
        return Verdict(
            f"{label}, fitted to data from its prior, predicts better than its prior",
            REPRODUCED if verdict == BETTER else NOT_REPRODUCED,
            f"{row['method']}: log score {row['score']:.3f} against {row['prior_score']:.3f} nats per row, by "
            f"{row['gain']:.3f} +- {row['gain_error']:.3f} over {row['simulations']} data sets",
        )
    words = [
        f"{each['quantity']} {each['level']:.0%}: {each['share']:.0%} +- {each['error']:.0%}"
        for each in part["coverage"]
    ]
    doubts = f"{row['not_converged']} of {row['simulations']} simulations had not converged"
    doubts += f", with {row['apart']}" if "apart" in row else ""
    known = {RECOVERED: REPRODUCED, NOT_RECOVERED: NOT_REPRODUCED}
    least = row.get("least_p", np.nan)
    lost = f"; {row['failed']} failed" if row["failed"] else ""
    limits = "; ".join(
        f"from {low:.0%} to {high:.0%} would have passed for {level:.0%}"
        for level in LEVELS
        for low, high in [unseen(level, row["simulations"], len(part["coverage"]))]
    )
    return Verdict(
        f"{label} recovers itself",
        known.get(verdict, NOT_RUN),
        f"{verdict}: {'; '.join(words)}; least p {least:.3g} (of f, {limits}); {doubts}{lost}"
        if words
        else f"{verdict}: nothing finished; {doubts}{lost}",
    )


def words_of_missing(subject: Subject) -> Verdict:
    """Of a model that is not in the folder."""
    return Verdict(
        f"{subject.label} recovers itself, or is better than its prior", NOT_RUN, "not in this run"
    )


def drawn(parts: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Coverage of f and of the scale of each model, with two standard errors, beside what is nominal."""
    rows = [part["row"] for part in parts if part["kind"] == "recovery" and "f_50%" in part["row"]]
    if not rows:
        return
    figure, axes = panels(10.0, 1.5 + 0.3 * len(rows), columns=len(LEVELS))
    for axis, level in zip(axes[0], LEVELS, strict=True):
        axis.axvline(level, color=GREY, linestyle="dashed", linewidth=1.0)
        for name, colour, marker, shift in (("f", BLUE, "o", -0.14), ("scale", ORANGE, "s", 0.14)):
            key = f"{name}_{level:.0%}"
            places = [place for place, row in enumerate(rows) if key in row]
            axis.errorbar(
                [rows[place][key] for place in places],
                [place + shift for place in places],
                xerr=[2.0 * rows[place][f"{key}_error"] for place in places],
                color=colour,
                marker=marker,
                linestyle="none",
                markersize=4,
                linewidth=1.2,
                label="f at held-out inputs" if name == "f" else "noise, or first scale",
            )
        axis.set_xlim(-0.02, 1.05)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel(f"coverage of central {level:.0%} intervals")
        axis.set_yticks(range(len(rows)))
        axis.set_yticklabels([row["model"] for row in rows] if level == LEVELS[0] else [])
    for label, row in zip(axes[0][0].get_yticklabels(), rows, strict=True):
        label.set_color({NOT_RECOVERED: VERMILION, UNDECIDED: GREY}.get(row["verdict"], BLACK))
    axes[0][1].legend(loc="lower left", fontsize=8, frameon=False)
    verdicts = {row["verdict"] for row in rows}
    legend = {NOT_RECOVERED: "red: not recovered", UNDECIDED: "grey: undecided"}
    words = [text for verdict, text in legend.items() if verdict in verdicts]
    figure.suptitle("; ".join(["with two standard errors, over simulations", *words]), fontsize=10)
    figure.savefig(path)


def tables(study: Study, parts: Sequence[Mapping[str, Any]]) -> None:
    """Rows of all models, whatever kind they are of."""
    titles = {"recovery": "recovery", "score": "scores", LEFT_OUT: "left_out"}
    for kind, title in titles.items():
        rows = [{**part["row"], "date": part["date"]} for part in parts if part["kind"] == kind]
        if rows:
            study.tables[title] = rows
    study.tables["coverage"] = [
        {"model": part["row"]["model"], **each} for part in parts for each in part["coverage"]
    ]
    study.numbers = {
        "models": len(parts),
        "verdicts": {part["row"]["model"]: part["row"]["verdict"] for part in parts},
        "least_p": {
            part["row"]["model"]: part["row"]["least_p"] for part in parts if "least_p" in part["row"]
        },
        "seed": study.sizes.seed,
        **stamp(),
    }
    for part in parts:
        study.judge(verdict_word(part))


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    only: Sequence[str] = (),
) -> Study:
    """Run the study and write tables, the figure and verdicts to `out`; see `Study.begin` for where that is.

    only: names of models, or of the files of those with other arguments; tables hold all models that are kept in `out`.
    checkpoint: a folder in which finished simulations are kept, so that a model that was interrupted goes on.
    """
    sizes = TINY if tiny else FULL
    study = Study.begin(sizes, "zoo_recovery", tiny, out)
    folder = study.out / "models"
    every = subjects(tiny)
    names = {name for subject in every for name in (subject.name, subject.file)}
    for name in only:
        if name not in names:
            raise unknown_name("model", name, names)
    wanted = [subject for subject in every if not only or subject.name in only or subject.file in only]
    begun, done = time.monotonic(), 0
    for index, subject in enumerate(wanted):
        already = stored_part(subject, folder) is not None
        part = part_of(subject, sizes, folder, None if checkpoint is None else Path(checkpoint), study.say)
        done += not already
        left = (time.monotonic() - begun) / max(done, 1) * (len(wanted) - index - 1)
        study.say(
            f"{subject.label}: {part['row']['verdict']} in {minutes(part['seconds'])}; {index + 1} of "
            f"{len(wanted)} models, {minutes(left)} left if the others take as long"
        )
    parts = [part for subject in every if (part := stored_part(subject, folder)) is not None]
    tables(study, parts)
    for subject in every:
        if stored_part(subject, folder) is None:
            study.judge(words_of_missing(subject))
    drawn(parts, study.out / "coverage.png")
    study.write()
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint")
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="these models")
    try:
        main(**vars(parser.parse_args()))
    except BNNError as problem:
        raise SystemExit(f"error: {problem}") from None
