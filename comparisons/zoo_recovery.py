"""Does every model of the zoo recover itself? It draws weights, noise and targets from its prior, and finds them again.

At fixed inputs x (standard normal, as many as the default data have features) all unknowns w ~ p(w), latent variables
of rows among them, and y ~ p(y | x, w) are drawn, NUTS samples p(w | x, y), and what it says is held against the truth.
If sampler, densities and transforms are right, the truth is one more draw from the posterior: a central interval of
probability p holds it with probability p, and its rank among draws is uniform, for every model, whatever its prior.

Three kinds of quantities are looked at: f at held-out inputs, scales of the model, and the log likelihood of y. The
first two depend on y through the posterior alone. Draws from the prior pass for the posterior by their ranks, since the
truth is a draw from the prior, too (M. Modrak et al., Simulation-based calibration checking for Bayesian computation,
Bayesian Analysis, 2023). The ranks of the log likelihood tell the two apart. Draws from the prior take the place of the
posterior in a second arm, and have to be found out.

A model recovers a quantity where the interval over simulations of the coverage of its credible intervals, or of the
centre and spread of its ranks, lies within a margin of what an exact posterior has. The margin is half of what a
standard deviation does that is 20 % too small. A simulation is one unit: components of one quantity are averaged in it.
Draws that have not converged, by R-hat and ESS of the quantity itself, decide nothing: intervals are the widest that
any values in their place can give. There are 20 simulations, and 200 of models whose fit takes under five seconds.
Twenty leave nearly everything undecided. Chains have the same settings for every model but those that need more of them
or other coordinates to converge; the column `apart` says so.

Models of a thousand weights and more are asked for less, as are the ResNet and the transformer, whose gradients are
dear: an ensemble of modes fitted to such data predicts new rows better than the prior predictive does, by the log
score. Those of these two are not polished but stopped early, and have twice as many data sets: at their modes, which
know nothing of what is uncertain, five had not shown it of the ResNet. One of the large models, the wide network, is
also asked for the first at a smaller size, and spike and slab in its relaxed form, too. Where rows interact there are
no held-out inputs, and what NUTS refuses it refuses here: both are named.

    python comparisons/zoo_recovery.py [--tiny] [--only NAME ...] [--out DIR] [--checkpoint DIR]

Each model is kept in <out>/models as soon as it has finished; --checkpoint keeps its simulations too. What it cost is
`gradients_per_draw` and the processor time of a fit, `seconds_per_fit`: `seconds` are of whatever else the machine did
meanwhile. In the stored table `seconds_per_fit` is processor time for the models that were run again last: survival,
count, neal_hierarchical, evidence_framework, ordinal, student_t, one_layer_digits, autoregressive, horseshoe,
multitask and regression_mlp. Elsewhere it is wall time or unknown, so that a quick model may have 20 simulations.
These were run again after their first 20 had been seen: survival because the ranks of its log likelihood were low, the
others because they are quick, or had no such ranks.

A simulation fails if a model refuses its data, as those of a single class. To leave it out does not bias the ranks: it
is chosen by the data, and given any data the truth is one more draw from the posterior.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from claims import Estimate, Referee, Verdict, mean, read_claims, share, worst_case
from simulation_based_calibration import centre, spread
from study import BLACK, BLUE, GREY, ORANGE, Study, command_line, converged, kept, panels, stamp

import ppl_bnn as bnn
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import BNNError, InputError, UnsupportedError, unknown_name
from ppl_bnn.diagnostics.calibration import Calibration
from ppl_bnn.diagnostics.prior_draws import Prior
from ppl_bnn.posterior.convergence import mixing
from ppl_bnn.prediction.prediction import Prediction

LEVELS = (0.5, 0.9)
SECONDS_BETWEEN_WORDS = 20.0

# Kinds of parts that are kept, and where ranked draws come from.
RECOVERY, SCORE, LEFT_OUT = "recovery", "score", "left out"
POSTERIOR, PRIOR = "posterior", "prior"
F, LOG_LIKELIHOOD = "f", "log likelihood"
NEEDS = "the ranks of the log likelihood were not kept: simulate again, 200 times where a fit takes under five seconds"

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

    simulations: of each model; of those whose fit takes less than `quick_seconds` of a processor (the median of these),
    `quick_simulations`. rows, held_out: inputs with targets and without. ranked: draws among which a truth is ranked,
    thinned from all chains; ranked + 1 is a multiple of 20, so that intervals of 50 % and 90 % end between ranks.
    most_weights: up to how many a model recovers itself; beyond, `scored` data sets of `scored_rows` rows are fitted by
    `members` modes, in the system `ppl`.
    """

    simulations: int = 20
    quick_simulations: int = 200
    quick_seconds: float = 5.0
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
    quick_simulations=3,
    # Whatever else the machine does.
    quick_seconds=1e9,
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


Function = Callable[[Mapping[str, np.ndarray], np.ndarray, np.ndarray], np.ndarray]


def functions(program: Program, scales: Sequence[str], rows: int) -> dict[str, Function]:
    """What is to be found again: f, all scalar random variables and `scales`, site by site, and the log likelihood.

    eta is at `rows` inputs that have targets, and at the held-out inputs of f after them.
    """

    def f(w: Mapping[str, np.ndarray], eta: np.ndarray, y: np.ndarray) -> np.ndarray:
        eta = eta[:, rows:]
        family, parameters = program.likelihood.mixture_parameters(eta)
        if family != "NormalMixture":
            return eta[..., : program.outputs].reshape(len(eta), -1)
        # Its components have no order, so that only what all of them say together can be found again.
        weights, loc, scale = (parameters[name] for name in ("weights", "loc", "scale"))
        mean = np.sum(weights * loc, axis=-1)
        variance = np.sum(weights * (scale**2 + (loc - mean[..., None]) ** 2), axis=-1)
        return np.concatenate([mean, np.sqrt(variance)], axis=1)

    def log_likelihood(w: Mapping[str, np.ndarray], eta: np.ndarray, y: np.ndarray) -> np.ndarray:
        prediction = Prediction(*program.likelihood.mixture_parameters(eta[:, :rows]))
        targets = y.reshape(prediction.shape) if y.shape[1:] == (1,) else y
        return prediction.component_log_prob(targets).sum(axis=-1)

    def of(name: str) -> Function:
        def site(w: Mapping[str, np.ndarray], eta: np.ndarray, y: np.ndarray) -> np.ndarray:
            return w[name] if w[name].ndim == 1 else w[name].reshape(len(eta), -1)

        return site

    single = [site.name for site in program.latents if site.shape == ()]
    return {F: f, **{name: of(name) for name in [*single, *scales]}, LOG_LIKELIHOOD: log_likelihood}


@dataclass
class Clock:
    """Times between laps. A checkpoint does not depend on the fields of a dataclass that is not frozen."""

    at: float

    def lap(self, now: float) -> float:
        before, self.at = self.at, now
        return now - before


def figures_of(asked: Mapping[str, Function], x: np.ndarray) -> Callable[[Any], dict[str, float]]:
    """What the chains of one simulation say of themselves: R-hat and ESS of each quantity that is ranked.

    seconds: of a processor, since the simulation before.
    """
    clock = Clock(time.process_time())

    def figures(posterior: Any) -> dict[str, float]:
        seconds = clock.lap(time.process_time())
        eta = posterior.predictor(x)
        shape = eta.shape[:2]
        w = {name: value.reshape(-1, *value.shape[2:]) for name, value in posterior.draws.items()}
        found, each = {}, []
        for name, function in asked.items():
            values = function(w, eta.reshape(-1, *eta.shape[2:]), posterior.targets)
            mixed = mixing(values.reshape(*shape, -1))
            found |= {f"rhat of {name}": mixed.rhat, f"ess of {name}": mixed.ess_bulk}
            each.append(converged(mixed.rhat, mixed.ess_bulk))
        statistics, info = posterior.statistics, posterior.info
        return found | {
            "converged": float(all(each)),
            "divergences": float(statistics["diverging"].sum()),
            "cut_short": float(statistics["reached_max_tree_depth"].mean()),
            "gradients": float(info.gradient_evaluations or np.nan),
            "seconds": seconds,
        }

    return figures


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

    error: standard error of `share` over simulations.
    """

    quantity: str
    level: float
    share: float
    error: float
    components: int


def covered(quantity: str, ranks: np.ndarray, draws: int, level: float) -> Coverage:
    """Coverage by ranks (S, F) of all components of one quantity."""
    each = within(ranks, draws, level).mean(axis=1)
    error = float(each.std(ddof=1)) / math.sqrt(len(each)) if len(each) > 1 else math.inf
    return Coverage(quantity, level, float(each.mean()), error, ranks.shape[1])


def columns_of(found: Calibration) -> dict[str, list[int]]:
    """Quantity -> the columns of the ranks of its components."""
    groups: dict[str, list[int]] = {}
    for column, name in enumerate(found.names):
        groups.setdefault(name.partition("[")[0], []).append(column)
    return groups


def coverages(found: Calibration) -> list[Coverage]:
    """Of every quantity that varies, at every level."""
    if not found.simulations:
        return []
    return [
        covered(quantity, found.ranks[:, columns], found.draws, level)
        for quantity, columns in columns_of(found).items()
        for level in LEVELS
    ]


def rank_rows(label: str, source: str, found: Calibration) -> list[dict[str, Any]]:
    """One row for each simulation and quantity: where the truth lies among draws from `source`, mean over components.

    centre, spread: see `simulation_based_calibration.py`. covered: the share of components whose interval holds the
    truth. rhat, ess: of the quantity itself, where draws are of chains.
    """
    rows = []
    for quantity, columns in columns_of(found).items():
        for at, (number, ranks) in enumerate(zip(found.numbers, found.ranks[:, columns], strict=True)):
            row: dict[str, Any] = {"model": label, "source": source, "simulation": int(number)}
            row |= {"quantity": quantity, "components": len(columns)}
            row["centre"] = float(centre(ranks, found.draws).mean())
            row["spread"] = float(spread(ranks, found.draws).mean())
            for level in LEVELS:
                row[f"covered_{level:.0%}"] = float(within(ranks, found.draws, level).mean())
            if source == POSTERIOR:
                row |= {name: float(found.figures[f"{name} of {quantity}"][at]) for name in ("rhat", "ess")}
            rows.append(row)
    return rows


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
    asked = functions(bound(model, x[: sizes.rows]), subject.apart.scales, sizes.rows)
    nuts = bnn.NUTS(
        chains=sizes.chains,
        warmup=sizes.warmup,
        draws=sizes.draws,
        max_tree_depth=sizes.max_tree_depth,
        target_accept=sizes.target_accept,
    )

    def ranked(method: Any, count: int, folder: Path, figures: Any = None) -> Calibration:
        return bnn.simulation_based_calibration(
            model,
            x[: sizes.rows],
            method,
            simulations=count,
            draws=sizes.ranked,
            functions=asked,
            probe=x,
            figures=figures,
            seed=sizes.seed,
            progress=TimeLeft(subject.label, say),
            checkpoint=folder,
            device="cpu",
        )

    with tempfile.TemporaryDirectory() as temporary:
        # More simulations go on from those that are there.
        folder = (checkpoint or Path(temporary)) / subject.file
        figures_asked = figures_of(asked, x)
        found = ranked(nuts, sizes.simulations, folder, figures_asked)
        if found.simulations and np.median(found.figures["seconds"]) < sizes.quick_seconds:
            found = ranked(nuts, sizes.quick_simulations, folder, figures_asked)
        control = ranked(Prior(draws=sizes.ranked), found.asked, folder.with_name(f"{folder.name}-{PRIOR}"))
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
        rhat, ess = (
            np.stack([figures[f"{name} of {quantity}"] for quantity in asked]) for name in ("rhat", "ess")
        )
        row |= {
            "divergences": float(np.sum(figures["divergences"])),
            "worst_rhat": float(np.max(rhat)),
            "median_rhat": float(np.median(np.max(rhat, axis=0))),
            "least_ess": float(np.min(ess)),
            "cut_short": float(np.mean(figures["cut_short"])),
            "gradients_per_draw": float(np.mean(figures["gradients"])) / (sizes.chains * sizes.draws),
            "seconds_per_fit": float(np.median(figures["seconds"])),
        }
    shown = [F, *[part.quantity for part in parts if part.quantity not in (F, LOG_LIKELIHOOD)][:1]]
    for name, quantity in zip(("f", "scale"), shown, strict=False):
        if name == "scale":
            row["scale"] = quantity
        for part in parts:
            if part.quantity == quantity:
                row |= {f"{name}_{part.level:.0%}": part.share, f"{name}_{part.level:.0%}_error": part.error}
    return {
        "kind": RECOVERY,
        "row": row | {"reason": "; ".join(sorted(set(found.failures.values())))[:300]},
        "coverage": [vars(part) for part in parts],
        "ranks": rank_rows(subject.label, POSTERIOR, found) + rank_rows(subject.label, PRIOR, control),
        "gains": [],
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
    gains = [each["after"] - each["before"] for each in found]
    return {
        "kind": SCORE,
        "row": {
            "rows": sizes.scored_rows,
            "simulations": count,
            "method": f"Ensemble of {sizes.members} MAP{', stopped early' if costly else ''}",
            "score": float(np.mean([each["after"] for each in found])),
            "prior_score": float(np.mean([each["before"] for each in found])),
            "gain": float(np.mean(gains)),
            "gain_error": float(np.std(gains, ddof=1)) / math.sqrt(count),
        },
        "coverage": [],
        "ranks": [],
        "gains": [
            {"model": subject.label, "data_set": index} | each | {"gain": gain}
            for index, (each, gain) in enumerate(zip(found, gains, strict=True))
        ],
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
            "row": {"reason": str(error)},
            "coverage": [],
            "ranks": [],
            "gains": [],
            "seconds": 0.0,
        }
    part["row"] = {**known, **part["row"], "seconds": part["seconds"]}
    return part | {"source": subject.source, **stamp()}


# --- all of them ----------------------------------------------------------------------------------


def part_of(
    subject: Subject, sizes: Sizes, folder: Path, checkpoint: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """What is kept of a model.

    It is computed where it is not there, where the file of the model or what is asked of chains has changed, and where
    it is from before ranks were kept.
    """
    stored = stored_part(subject, folder)
    if stored is not None and (
        "ranks" not in stored
        or (stored["source"], stored["row"].get("apart", "")) != (subject.source, subject.words_of_chains)
    ):
        (folder / f"{subject.file}.json").unlink()
    return kept(folder, subject.file, sizes, lambda: one(subject, sizes, checkpoint, say))


def stored_part(subject: Subject, folder: Path) -> dict[str, Any] | None:
    """What is kept of a model, if anything is."""
    path = folder / f"{subject.file}.json"
    return json.loads(path.read_text())["part"] if path.exists() else None


# --- verdicts -------------------------------------------------------------------------------------


def of_moments(value: float, error: float, n: int) -> Estimate:
    """The mean of n units of which only mean and standard error are known: Student's t asks for no more."""
    if n < 2:
        return mean([value])
    shape = np.arange(n) - 0.5 * (n - 1)
    return mean(value + error * math.sqrt(n) * shape / shape.std(ddof=1))


def share_of(values: np.ndarray) -> Estimate:
    """Of values that are 0 or 1."""
    return share(round(float(values.sum())), len(values))


@dataclass(frozen=True)
class Case:
    """One model before the referee: its row of the table `recovery`, and its rows of the table `ranks`."""

    referee: Referee
    row: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]]

    @property
    def model(self) -> str:
        return self.row["model"]

    def units(self, quantity: str, source: str = POSTERIOR) -> list[Mapping[str, Any]]:
        """One row for each simulation; none where ranks were not kept."""
        return [row for row in self.ranks if (row["quantity"], row["source"]) == (quantity, source)]

    def judge(
        self,
        kind: str,
        estimate: Callable[[np.ndarray], Estimate],
        rows: Sequence[Mapping[str, Any]],
        column: str,
        highest: float = 1.0,
        numbers: str = "",
    ) -> None:
        """The evidence on a claim from a column of `rows`, one for each simulation with R-hat and ESS of the quantity.

        Its values lie between 0 and `highest`. Those whose draws have not converged may be any of these.
        """
        # A figure that is not a number may be an empty cell.
        bad = np.array(
            [not converged(each.get("rhat", math.inf), each.get("ess", 0.0)) for each in rows], bool
        )
        values = np.array([float(each[column]) for each in rows])
        found = worst_case(estimate, values, bad, 0.0, highest)
        words = (
            f"{bad.sum()} of {len(rows)} simulations have not converged and count as any value"
            if bad.any()
            else ""
        )
        self.decide(kind, found, "; ".join(filter(None, (numbers, words))), "")

    def decide(self, kind: str, estimate: Estimate, numbers: str, why_not: str) -> None:
        """The evidence on a claim. why_not: what has not converged, or is not known to have; nothing if all has."""
        key, failed = f"{self.model}-{kind}", self.row.get("failed", 0)
        left_out = f"{failed} simulation{'s' if failed > 1 else ''} failed" if failed else ""
        words = "; ".join(filter(None, (numbers, left_out)))
        if estimate.low == estimate.high:
            same = "all simulations have the same value: there is no interval"
            self.referee.undecided(key, same, words)
        else:
            self.referee.measured(key, estimate, words, converged=not why_not, why_not=why_not)


def judge_coverage(case: Case, row: Mapping[str, Any]) -> None:
    """Credible intervals hold the truth as often as they say. row: of the table `coverage`."""
    level, single = f"{row['level']:.0%}", row["components"] == 1
    kind = f"{row['quantity']}-{level}"
    numbers = "" if single else f"{row['components']} components in each simulation"
    if units := case.units(row["quantity"]):
        case.judge(kind, share_of if single else mean, units, f"covered_{level}", numbers=numbers)
        return
    of_model, n = case.row, case.row["simulations"]
    estimate = share(round(row["share"] * n), n) if single else of_moments(row["share"], row["error"], n)
    # The figures that were kept are the worst of f at the training rows, of the log likelihood and of single numbers.
    rhat, ess = of_model["worst_rhat"], of_model["least_ess"]
    why = (
        f"{'' if single else 'R-hat and ESS of this quantity were not kept; '}the worst R-hat that was kept is "
        f"{rhat:.4g} and the least ESS {ess:.0f}, short of the limits in {of_model['not_converged']} of {n} simulations"
    )
    case.decide(kind, estimate, numbers, "" if single and converged(rhat, ess) else why)


def judge_likelihood(case: Case) -> None:
    """The ranks of the log likelihood are centred and spread as uniform ranks are."""
    units = case.units(LOG_LIKELIHOOD)
    for kind, highest in (("centre", 1.0), ("spread", 3.0)):
        if units:
            case.judge(f"{LOG_LIKELIHOOD}-{kind}", mean, units, kind, highest)
        else:
            case.referee.not_run(f"{case.model}-{LOG_LIKELIHOOD}-{kind}", NEEDS)


def judge_prior(case: Case) -> None:
    """Draws from the prior in place of the posterior are found out: the truth has the higher log likelihood."""
    units = case.units(LOG_LIKELIHOOD, PRIOR)
    key = f"{case.model}-{PRIOR}"
    if not units:
        case.referee.not_run(key, NEEDS)
        return
    centres = {
        name: np.mean([each["centre"] for each in case.units(name, PRIOR)]) for name in (F, LOG_LIKELIHOOD)
    }
    above = sum(each["centre"] > 0.5 for each in units)
    case.referee.measured(
        key,
        share(above, len(units)),
        f"mean rank over the number of draws {centres[LOG_LIKELIHOOD]:.2f}, that of f {centres[F]:.2f}",
    )


def judge_gain(referee: Referee, row: Mapping[str, Any], gains: Sequence[Mapping[str, Any]]) -> None:
    """An ensemble predicts better than the prior. row: of the table `scores`; gains: of each data set, if known."""
    values = [each["gain"] for each in gains if each["model"] == row["model"]]
    referee.measured(
        f"{row['model']}-gain",
        mean(values) if values else of_moments(row["gain"], row["gain_error"], row["simulations"]),
        f"{row['method']}: log score {row['score']:.3f} against {row['prior_score']:.3f} of the prior",
    )


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    claims, tables = read_claims("zoo_recovery"), study.tables
    referee = Referee(claims)
    declared = {key.partition("-")[0] for key in claims}
    for row in tables.get("recovery", ()):
        if row["model"] not in declared:
            continue
        case = Case(referee, row, [each for each in tables.get("ranks", ()) if each["model"] == row["model"]])
        for each in tables["coverage"]:
            if each["model"] == row["model"] and each["quantity"] != LOG_LIKELIHOOD:
                judge_coverage(case, each)
        judge_likelihood(case)
        judge_prior(case)
    for row in tables.get("scores", ()):
        if row["model"] in declared:
            judge_gain(referee, row, tables.get("gains", ()))
    reasons = {row["model"]: f"left out: {row['reason']}" for row in tables.get("left_out", ())}
    reasons |= {row["model"]: "no simulation finished" for row in tables.get("recovery", ())}
    for key in set(claims) - referee.evidence:
        referee.not_run(key, reasons.get(key.partition("-")[0], "not in this run"))
    return referee.verdicts()


# --- the run --------------------------------------------------------------------------------------


def drawn(parts: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Coverage of f and of the scale of each model, with two standard errors, beside what is nominal."""
    rows = [part["row"] for part in parts if part["kind"] == RECOVERY and "f_50%" in part["row"]]
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
        label.set_color(GREY if row["not_converged"] else BLACK)
    axes[0][1].legend(loc="lower left", fontsize=8, frameon=False)
    words = "with two standard errors, over simulations; grey: not all simulations have converged"
    figure.suptitle(words, fontsize=10)
    figure.savefig(path)


def tables(study: Study, parts: Sequence[Mapping[str, Any]]) -> None:
    """Rows of all models, whatever kind they are of."""
    titles = {RECOVERY: "recovery", SCORE: "scores", LEFT_OUT: "left_out"}
    for kind, title in titles.items():
        rows = [{**part["row"], "date": part["date"]} for part in parts if part["kind"] == kind]
        if rows:
            study.tables[title] = rows
    study.tables["coverage"] = [
        {"model": part["row"]["model"], **each} for part in parts for each in part["coverage"]
    ]
    for title in ("ranks", "gains"):
        if rows := [row for part in parts for row in part.get(title, ())]:
            study.tables[title] = rows
    study.numbers = {"models": len(parts), "seed": study.sizes.seed}


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
            f"{subject.label}: {part['kind']} in {minutes(part['seconds'])}; {index + 1} of "
            f"{len(wanted)} models, {minutes(left)} left if the others take as long"
        )
    parts = [part for subject in every if (part := stored_part(subject, folder)) is not None]
    tables(study, parts)
    drawn(parts, study.out / "coverage.png")
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint")
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="these models")
    try:
        main(**vars(parser.parse_args()))
    except BNNError as problem:
        raise SystemExit(f"error: {problem}") from None
