"""Turned digits and no digits: is what Laplace gains on the last layer a gain of the posterior that it approximates?

`out_of_distribution.py` finds that a Laplace approximation of the last layer is better calibrated on turned digits than
the point it is taken at, as its source says, while sampling that same posterior predicts them worse than the point
does. That point was trained by mini-batches and is no mode of the last layer. This study settles it where everything
can be certified: the posterior of the last layer (weights W, biases b) given the features phi of a trained network,

    y_n ~ Categorical(softmax(W' phi_n + b)),    every weight and bias ~ N(0, (c gamma)^2),

whose log density is strictly concave. It has one mode, and chains have one place to go to. gamma is the scale that
the source's weight decay stands for; c runs over five factors. At each factor: the mode itself; the Laplace
approximation at that mode (all weights of the layer, full GGN, which is the Hessian here, linearised predictions); and
Hamiltonian Monte Carlo with trajectories of a quarter period and the precision of the Laplace approximation as its mass
matrix, whose R-hat and bulk ESS are taken on 200 functions of each set of images.

Sets of images: test digits; the first of them turned by 30 to 180 degrees, as one set; KMNIST; test digits with their
pixels in another order. A seed has its own training rows, test rows and network, and no row is in two seeds: seeds are
independent, and intervals are Student's t.

Quantities are those of `out_of_distribution.py`. Log evidences are those of the Laplace approximation; "the scale that
the evidence chooses" is the factor with the largest one, in each seed. Sizes, and the sampler, were set on one pilot
network whose rows were drawn otherwise; its scores had been seen when the claims were written.

    python comparisons/out_of_distribution_priors.py [--tiny] [--out DIR] [--checkpoint DIR] [--seeds N]
        [--architectures NAME ...]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, mean, read_claims
from out_of_distribution import (
    ELSEWHERE,
    LENET,
    TEST,
    TRANSFORMER,
    Sets,
    Sizes,
    Task,
    convergence,
    features,
    gamma_of,
    inputs,
    last_layer,
    network,
    rotated,
    scored,
)
from out_of_distribution import TINY as SMALLEST
from study import (
    BLACK,
    BLUE,
    VERMILION,
    Study,
    command_line,
    converged,
    kept,
    load_images,
    paired,
    panels,
    run,
)

import ppl_bnn as bnn
from ppl_bnn.core.errors import unknown_name

MODE, LAPLACE, HMC = "mode", "Laplace at the mode", "HMC"
METHODS = (MODE, LAPLACE, HMC)
TURNED, SHUFFLED = "turned", "shuffled"
# What is compared: (name in claims, set of images, score, sign of what is better).
COMPARED = (
    ("log_score", TURNED, "log_score", 1.0),
    ("ece", TURNED, "ece", -1.0),
    ("elsewhere", ELSEWHERE, "confidence", -1.0),
    ("shuffled", SHUFFLED, "confidence", -1.0),
)
WRITTEN, SMALL = 1.0, 0.125


@dataclass(frozen=True)
class PriorSizes(Sizes):
    """Sizes of the networks as in `out_of_distribution.py`; the rest is of the last layer.

    factors: of the prior scale gamma; steps: of the search for the mode; hmc: chains, warm-up and draws of each;
    predicted: how many of the draws are used in predictions.
    """

    seeds: int = 10
    factors: tuple[float, ...] = (SMALL, 0.25, WRITTEN, 2.0, 4.0)
    steps: int = 1000
    hmc: tuple[int, int, int] = (4, 150, 1000)
    predicted: int = 2000


FULL = PriorSizes()
TINY = PriorSizes(
    **vars(SMALLEST) | {"architectures": (LENET,)},
    factors=(SMALL, WRITTEN),
    steps=200,
    hmc=(2, 50, 50),
    predicted=50,
)


# --- the run ----------------------------------------------------------------------------------------


def shown_sets(
    task: Task, seen: Callable[[np.ndarray], np.ndarray]
) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """(name, features (N, H), labels) of the four sets, test digits first; no labels where there are no digits."""
    images, sizes = task.images, task.sizes
    yield TEST, seen(images.test), images.test_labels
    first, labels = images.test[: sizes.turned], images.test_labels[: sizes.turned]
    turned = np.concatenate([rotated(first, angle) for angle in sizes.angles])
    yield TURNED, seen(turned), np.tile(labels, len(sizes.angles))
    yield ELSEWHERE, seen(images.elsewhere), None
    flat = images.test.reshape(len(images.test), -1)
    order = np.random.default_rng(task.seed).permutation(flat.shape[1])
    yield SHUFFLED, seen(flat[:, order].reshape(images.test.shape)), None


def trained(task: Task) -> dict[str, np.ndarray]:
    """The weights of the network, by descent on mini-batches."""
    found = task.fit(task.descent())
    return {name: np.asarray(value[0, 0], float) for name, value in found.draws.items()}


def at_scale(
    task: Task, weights: Mapping[str, np.ndarray], phi: np.ndarray, sets: Sets, factor: float
) -> dict[str, Any]:
    """The last layer with the prior scale factor * gamma: scores of the three methods, convergence and costs."""
    sizes = task.sizes
    assert isinstance(sizes, PriorSizes)
    chains, warmup, draws = sizes.hmc
    model = partial(last_layer, classes=10, gamma=gamma_of(sizes.rows) * factor)

    def fit(method: Any) -> Any:
        return bnn.fit(model, phi, task.images.labels, method, seed=task.seed)

    begun = time.process_time()
    held = {name: weights[name] for name in ("output.weight", "output.bias")}
    mode = fit(bnn.MAP(start=held, steps=sizes.steps, learning_rate=1e-3))
    laplace = fit(bnn.Laplace(start=mode, optimise=False))
    sampler = bnn.HMC(
        chains=chains, warmup=warmup, draws=draws, start=laplace, mass_matrix="dense", adapt_mass_matrix=False
    )
    exact = fit(sampler)
    seconds = time.process_time() - begun
    return {
        "scores": {
            MODE: scored(mode.predict, sets),
            LAPLACE: scored(laplace.predict, sets),
            HMC: scored(lambda x: exact.predict(x, draws=sizes.predicted), sets),
        },
        "convergence": convergence(exact.predictor, sets),
        "log_evidence": float(laplace.info.figures["log_evidence"]),
        "gradients": exact.info.gradient_evaluations,
        "processor_seconds": seconds,
        # Laplace says whether it was taken at a mode.
        "reason": "; ".join(dict.fromkeys([*laplace.info.warnings, *exact.info.warnings])),
    }


def run_seed(
    architecture: str, seed: int, sizes: PriorSizes, checkpoint: str | Path | None, study: Study
) -> str:
    """Rows of one network for the tables; parts that are in the folder are not computed again."""
    images = load_images(sizes.table, sizes.rows, sizes.test, sizes.elsewhere, seed, disjoint=True)
    task = Task(architecture, seed, sizes, images, network(architecture, sizes, images.pixels))
    name = f"{architecture.lower()}-{seed}"
    # A part is of one architecture, whichever others are run.
    of = replace(sizes, architectures=())
    weights = kept(checkpoint, f"{name}-network", of, lambda: dict(trained(task)))

    def seen(x: np.ndarray) -> np.ndarray:
        return features(task.model, weights, inputs(architecture, x))

    phi, sets = seen(images.train), list(shown_sets(task, seen))
    for factor in sizes.factors:
        part = kept(
            checkpoint, f"{name}-{factor:g}", sizes, partial(at_scale, task, weights, phi, sets, factor)
        )
        base = {"architecture": architecture, "factor": factor, "seed": seed}
        for method, rows in part["scores"].items():
            study.tables["scores"] += [base | {"method": method} | row for row in rows]
        study.tables["convergence"] += [base | row for row in part["convergence"]]
        plain = ("log_evidence", "gradients", "processor_seconds", "reason")
        study.tables["costs"].append(base | {key: part[key] for key in plain})
        study.say(f"{architecture}, seed {seed}, {factor:g} gamma: {part['processor_seconds']:.0f} s")
    return images.what


# --- what was found ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One architecture before the referee. tables: those of the study."""

    referee: Referee
    architecture: str
    tables: Mapping[str, list[dict[str, Any]]]

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [row for row in self.tables.get(table, []) if row["architecture"] == self.architecture]

    def seeds(self) -> list[int]:
        return sorted({row["seed"] for row in self.rows("scores")})

    def factors(self) -> list[float]:
        return sorted({row["factor"] for row in self.rows("scores")})

    def values(self, method: str, of: str, score: str, factor: Mapping[int, float]) -> np.ndarray:
        """The score for each seed, at that seed's factor of the prior scale."""
        found = {
            row["seed"]: row[score]
            for row in self.rows("scores")
            if row["method"] == method and row["set"] == of and row["factor"] == factor[row["seed"]]
        }
        return np.array([found[seed] for seed in self.seeds()])

    def at(self, factor: float) -> dict[int, float]:
        return dict.fromkeys(self.seeds(), factor)

    def chosen(self) -> dict[int, float]:
        """The factor with the largest log evidence in each seed."""
        best: dict[int, dict[str, Any]] = {}
        for row in self.rows("costs"):
            if row["seed"] not in best or row["log_evidence"] > best[row["seed"]]["log_evidence"]:
                best[row["seed"]] = row
        return {seed: row["factor"] for seed, row in best.items()}

    def convergence(self, of: str, factor: Mapping[int, float] | None = None) -> dict[str, Any]:
        """Whether HMC has converged on a set in every seed, at its factor or at all, as the referee takes it."""
        rows = [
            row
            for row in self.rows("convergence")
            if row["set"] == of and (factor is None or row["factor"] == factor[row["seed"]])
        ]
        rhat, ess = max(row["rhat"] for row in rows), min(row["ess_bulk"] for row in rows)
        why = f"on this set HMC has R-hat {rhat:.3f} and bulk ESS {ess:.0f} at worst"
        return {"converged": converged(rhat, ess), "why_not": why}

    def means(self, of: str, score: str, factor: Mapping[int, float]) -> str:
        found = {method: self.values(method, of, score, factor).mean() for method in METHODS}
        return ", ".join(f"{method} {value:.4f}" for method, value in found.items())

    def measured(self, claim: str, values: np.ndarray, numbers: str, convergence: dict[str, Any]) -> None:
        key = f"{self.architecture.lower()}-{claim}"
        self.referee.measured(key, mean(values), numbers, **convergence)


def judge_posterior(case: Case, prefix: str, factor: Mapping[int, float], remark: str = "") -> None:
    """HMC is better than the mode; less sure where there are no digits."""
    for name, of, score, sign in COMPARED:
        exact, mode = (case.values(method, of, score, factor) for method in (HMC, MODE))
        case.measured(
            f"{prefix}-{name}",
            sign * (exact - mode),
            case.means(of, score, factor) + remark,
            case.convergence(of, factor),
        )


def judge_ahead(case: Case) -> None:
    """Laplace is ahead of HMC, with the prior as written."""
    factor = case.at(WRITTEN)
    for name, of, score, sign in COMPARED:
        laplace, exact = (case.values(method, of, score, factor) for method in (LAPLACE, HMC))
        case.measured(
            f"ahead-{name}",
            sign * (laplace - exact),
            case.means(of, score, factor),
            case.convergence(of, factor),
        )


def judge_every_scale(case: Case) -> None:
    """Laplace is ahead of HMC by log score on turned digits at the scale where it is least so, in each seed."""
    gains = np.array(
        [
            case.values(LAPLACE, TURNED, "log_score", case.at(factor))
            - case.values(HMC, TURNED, "log_score", case.at(factor))
            for factor in case.factors()
        ]
    )
    by_factor = ", ".join(
        f"{factor:g} gamma {gain:+.3f}"
        for factor, gain in zip(case.factors(), gains.mean(axis=1), strict=True)
    )
    case.measured("ahead-every-scale", gains.min(axis=0), by_factor, case.convergence(TURNED))


def judge_share(case: Case, claim: str, factor: Mapping[int, float], remark: str = "") -> None:
    """Less than half of what Laplace gains over the mode on turned digits is gained by HMC."""
    mode, laplace, exact = (case.values(method, TURNED, "log_score", factor) for method in METHODS)
    case.measured(
        claim,
        (exact - mode) - 0.5 * (laplace - mode),
        f"gain of HMC {(exact - mode).mean():.4f}, of Laplace {(laplace - mode).mean():.4f} nats per image{remark}",
        case.convergence(TURNED, factor),
    )


def judge_near(case: Case) -> None:
    """The log score of Laplace is that of HMC within the margin, with the prior as written."""
    factor = case.at(WRITTEN)
    for of in (TEST, TURNED):
        laplace, exact = (case.values(method, of, "log_score", factor) for method in (LAPLACE, HMC))
        case.measured(
            f"near-{of}", laplace - exact, case.means(of, "log_score", factor), case.convergence(of, factor)
        )


def judge_scale(case: Case) -> None:
    """An eighth of the prior scale gains more for the mode than the posterior does at the prior as written."""
    small, written = case.at(SMALL), case.at(WRITTEN)
    mode = case.values(MODE, TURNED, "log_score", written)
    gain = case.values(HMC, TURNED, "log_score", written) - mode
    smaller = case.values(MODE, TURNED, "log_score", small) - mode
    case.measured(
        "scale",
        smaller - gain,
        f"gain of the mode by the smaller scale {smaller.mean():.4f}, of HMC over the mode {gain.mean():.4f} nats "
        "per image",
        case.convergence(TURNED, written),
    )


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    sizes = study.sizes
    note = (
        f"smaller than the source: {sizes.rows} of 60000 training rows of each seed, the last layer alone, "
        "MNIST in place of colour images"
    )
    referee = Referee(read_claims("out_of_distribution_priors"), note)
    for architecture in (LENET, TRANSFORMER):
        case = Case(referee, architecture, study.tables)
        if not case.seeds():
            for claim in referee.claims:
                if claim.startswith(architecture.lower()):
                    referee.not_run(claim, f"{architecture} was not run")
            continue
        chosen = case.chosen()
        remark = "; chosen: " + ", ".join(f"{chosen[seed]:g}" for seed in case.seeds()) + " gamma"
        judge_posterior(case, "written", case.at(WRITTEN))
        judge_posterior(case, "evidence", chosen, remark)
        judge_ahead(case)
        judge_every_scale(case)
        judge_share(case, "share-written", case.at(WRITTEN))
        judge_share(case, "share-evidence", chosen, remark)
        judge_near(case)
        judge_scale(case)
    return referee.verdicts()


# --- figure -----------------------------------------------------------------------------------------

STYLE = {MODE: (BLACK, "o", ":"), LAPLACE: (BLUE, "v", "-"), HMC: (VERMILION, "s", "-")}


def draw(path: Path, tables: Mapping[str, list[dict[str, Any]]], architecture: str, what: str) -> None:
    """Scores against the prior scale: a line for each method, bars of one standard error over seeds."""
    case = Case(Referee({}), architecture, tables)
    titles = {
        "log_score": "turned digits: log score,\nnats per image (higher is better)",
        "ece": "turned digits: expected\ncalibration error (lower is better)",
        "elsewhere": f"{what}: confidence\n(lower is better)",
        "shuffled": "digits, pixels shuffled: confidence\n(lower is better)",
    }
    figure, axes = panels(13.0, 4.2, len(COMPARED))
    factors = case.factors()
    for axis, (name, of, score, _) in zip(axes[0], COMPARED, strict=True):
        for method, (color, marker, line) in STYLE.items():
            found = [paired(case.values(method, of, score, case.at(factor))) for factor in factors]
            centre, error = map(np.array, zip(*found, strict=True))
            bars = np.where(np.isfinite(error), error, 0.0)
            axis.errorbar(
                factors, centre, bars, color=color, marker=marker, linestyle=line, markersize=5, label=method
            )
        axis.axvline(WRITTEN, color="#CCCCCC", linewidth=1.0, zorder=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(factors, [f"{factor:g}" for factor in factors])
        axis.set_title(titles[name], fontsize=9, loc="left")
        axis.set_xlabel("prior scale / gamma\n(grey line: as written)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    whole = max(row["rhat"] for row in case.rows("convergence"))
    figure.suptitle(
        f"{architecture}, last layer: the approximation, and the posterior that it approximates "
        f"({len(case.seeds())} networks; largest R-hat of HMC {whole:.3f})",
        fontsize=11,
    )
    figure.savefig(path)


def draw_all(study: Study) -> None:
    """The figures from the stored tables."""
    for architecture in study.sizes.architectures:
        path = study.out / f"priors_{architecture.lower()}.png"
        draw(path, study.tables, architecture, study.numbers["what is no digit"])


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    seeds: int | None = None,
    architectures: Sequence[str] | None = None,
) -> Study:
    """Run the study and write tables, figures and verdicts; the arguments are those of the command line.

    What is kept in `checkpoint` is each network, and each prior scale of it.
    """
    study = Study.begin(TINY if tiny else FULL, "out_of_distribution_priors", tiny, out, seeds=seeds)
    if architectures is not None:
        for name in architectures:
            if name not in (LENET, TRANSFORMER):
                raise unknown_name("architecture", name, (LENET, TRANSFORMER))
        study.sizes = replace(study.sizes, architectures=tuple(architectures))
    sizes = study.sizes
    study.tables = {"scores": [], "convergence": [], "costs": []}
    what = ""
    for architecture in sizes.architectures:
        for seed in range(sizes.seeds):
            what = run_seed(architecture, seed, sizes, checkpoint, study)
    study.numbers = {"what is no digit": what, "gamma": gamma_of(sizes.rows)}
    draw_all(study)
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "seeds", "figures", tiny="a few small images, in seconds")
    parser.add_argument("--architectures", nargs="+", help=f"of {LENET}, {TRANSFORMER}")
    run(parser, main, "out_of_distribution_priors", FULL, draw_all)
