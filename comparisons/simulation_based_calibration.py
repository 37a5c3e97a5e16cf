"""Is the gold standard itself calibrated, and would it be seen if it were not? One thousand simulations say.

Source: S. Talts, M. Betancourt, D. Simpson, A. Vehtari and A. Gelman (2018), Validating Bayesian inference algorithms
with simulation-based calibration. Weights, noise and data are drawn from a model, the posterior of the drawn data is
sampled, and the rank of the truth among L draws is uniform on 0..L for each function of them if the sampler is exact.

    w ~ N(0, 1 / fan-in)    noise ~ LogNormal(-1, 0.5)    y_n ~ N(f(x_n, w), noise^2)    f: one hidden layer of tanh

Ranked are f at inputs x* inside and outside the data, the noise, and the log likelihood of the data. Two methods:

- NUTS, which has to pass;
- NUTS whose draws are drawn together: every coordinate, and every output of the network, towards its mean by a factor
  of 0.8. That is a posterior with a standard deviation 20 % too small and no other fault, and it has to be found out.

How many simulations are needed to tell the two apart is in the table `power`: the same tests on the first so many of
them. A verdict of the tests has an error rate of 5 % over all functions together, for an exact method.

    python comparisons/simulation_based_calibration.py [--tiny] [--out DIR] [--checkpoint DIR] [--jobs N]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, mean, read_claims
from study import Study, command_line

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.diagnostics.calibration import Calibration
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.posterior.approximation import Chains

FACTOR = 0.8
FUNCTIONS = ("f of probe 0", "f of probe 1", "f of probe 2", "log likelihood", "noise")


@dataclass(frozen=True)
class Sizes:
    """How much is computed. ranked: draws among which a truth is ranked, thinned from all chains."""

    simulations: int = 1000
    rows: int = 20
    units: int = 3
    ranked: int = 99
    chains: int = 2
    warmup: int = 400
    draws: int = 500


FULL = Sizes()
TINY = Sizes(simulations=24, rows=6, units=1, ranked=9, chains=1, warmup=30, draws=40)


def curve(x: Any, y: Any = None, *, units: int = 3) -> None:
    """y ~ N(f(x, w), noise^2), f of one hidden layer of tanh."""
    noise = bnn.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = bnn.mlp(x, [units, 1], activation="tanh", prior=priors.Normal(0.0, "fan_in"))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


def model_and_inputs(sizes: Sizes) -> tuple[Any, np.ndarray, np.ndarray]:
    """The model, x (N, 1) on [-2, 2] without a middle, and x* (3, 1): in the middle, among the data, outside."""
    from functools import partial

    half = np.linspace(0.7, 2.0, sizes.rows // 2)
    x = np.concatenate([-half[::-1], half])[:, None]
    return partial(curve, units=sizes.units), x, np.array([[0.0], [1.4], [3.0]])


# --- a posterior that is too narrow ---------------------------------------------------------------


@dataclass
class NarrowChains(Chains):
    """Chains whose draws and outputs are drawn towards their means by `factor`. middle: the mean of each u."""

    factor: float = 1.0
    middle: dict[str, np.ndarray] = field(default_factory=dict)

    def predictor_draws(
        self, problem: Any, u: Mapping[str, np.ndarray], x: Any, kind: str, seed: int, memory: int
    ) -> np.ndarray:
        """eta of the draws as they were, drawn together around its own mean.

        The outputs of weights that are drawn together are no narrower in a network: its units can be exchanged.
        """
        before = {
            name: self.middle[name] + (value - self.middle[name]) / self.factor for name, value in u.items()
        }
        eta = super().predictor_draws(problem, before, x, kind, seed, memory)
        middle = eta.mean(axis=0)
        return middle + self.factor * (eta - middle)


@dataclass(frozen=True)
class Narrow(Method):
    """The chains of another method with `factor` times their standard deviation, in u and in the outputs."""

    inner: Any = None
    factor: float = FACTOR

    def run(self, problem: Any, progress: Any) -> Outcome:
        outcome = self.inner.run(problem, progress)
        u = outcome.approximation.u
        middle = {name: value.mean(axis=(0, 1)) for name, value in u.items()}
        narrow = {name: middle[name] + self.factor * (value - middle[name]) for name, value in u.items()}
        return replace(outcome, approximation=NarrowChains(narrow, factor=self.factor, middle=middle))


# --- the study ------------------------------------------------------------------------------------


def methods(sizes: Sizes) -> dict[str, Method]:
    """By name, the one that has to pass first."""
    # One after another: a thread for each chain of a run of milliseconds costs more than it saves.
    nuts = bnn.NUTS(
        chains=sizes.chains,
        warmup=sizes.warmup,
        draws=sizes.draws,
        chain_method="sequential",
        target_accept=0.9,
    )
    return {"NUTS": nuts, f"NUTS with {FACTOR:g} of its sd": Narrow(inner=nuts)}


def first(calibration: Calibration, count: int) -> Calibration:
    """The calibration of the first `count` simulations of another."""
    chosen = calibration.numbers < count
    return replace(
        calibration,
        numbers=calibration.numbers[chosen],
        ranks=calibration.ranks[chosen],
        truths=calibration.truths[chosen],
        asked=min(count, calibration.asked),
        failures={at: why for at, why in calibration.failures.items() if at < count},
        not_converged=0,
    )


def steps_up_to(simulations: int) -> list[int]:
    """1, 2 and 5 times powers of ten from 20 up to all of them."""
    ladder = [step for step in (20, 50, 100, 200, 500, 1000, 2000, 5000) if step < simulations]
    return [*ladder, simulations]


# What a claim begins with, and whose ranks it is about.
NAMES = {"nuts": "NUTS", "narrow": f"NUTS with {FACTOR:g} of its sd"}


def centre(ranks: np.ndarray, draws: int) -> np.ndarray:
    """The rank over the number of draws; 1/2 is its mean if ranks are uniform on 0..draws."""
    return ranks / draws


def spread(ranks: np.ndarray, draws: int) -> np.ndarray:
    """The squared distance of the rank from the middle, over its mean if ranks are uniform on 0..draws."""
    return (ranks - draws / 2.0) ** 2 / (draws * (draws + 2) / 12.0)


def judge_ranks(
    referee: Referee, name: str, rows: Sequence[Mapping[str, Any]], sizes: Sizes, tests: Mapping[str, Any]
) -> None:
    """Centre and spread of the ranks of every function of one posterior."""
    for function in FUNCTIONS:
        ranks = np.array([row[function] for row in rows], float)
        text = f"{len(ranks)} of {sizes.simulations} simulations; least p of the tests {tests[function]:.2g}"
        for kind, measure in (("centre", centre), ("spread", spread)):
            key = f"{name}-{kind}-{function.replace(' ', '-')}"
            if key in referee.claims:
                referee.measured(key, mean(measure(ranks, sizes.ranked)), text)


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    referee = Referee(read_claims("simulation_based_calibration"), f"{study.sizes.simulations} simulations")
    for name, method in NAMES.items():
        rows = [row for row in study.tables["ranks"] if row["method"] == method]
        tests = {
            row["function"]: min(row["asymmetry_p"], row["spread_p"], row["ecdf_p"])
            for row in study.tables["tests"]
            if row["method"] == method
        }
        judge_ranks(referee, name, rows, study.sizes, tests)
    return referee.verdicts()


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    jobs: int = 1,
    simulations: int | None = None,
) -> Study:
    """Run the study and write tables, figures and verdicts to `out`; see `Study.begin` for where that is.

    checkpoint: a folder in which finished simulations are kept, so that an interrupted run goes on.
    """
    sizes = TINY if tiny else FULL
    if simulations is not None:
        sizes = replace(sizes, simulations=simulations)
    study = Study.begin(sizes, "simulation_based_calibration", tiny, out)
    model, x, probe = model_and_inputs(sizes)
    found: dict[str, Calibration] = {}
    for name, method in methods(sizes).items():
        folder = None if checkpoint is None else Path(checkpoint) / method.name
        found[name] = bnn.simulation_based_calibration(
            model,
            x,
            method,
            simulations=sizes.simulations,
            draws=sizes.ranked,
            probe=probe,
            jobs=jobs,
            checkpoint=folder,
            progress=not tiny,
        )
        study.say(str(found[name]))
        short = "nuts" if name == "NUTS" else "narrow"
        for kind in ("ecdf", "histogram"):
            found[name].figure(kind).savefig(study.out / f"{short}_{kind}.png")
    study.tables["tests"] = [
        {"method": name, "function": function, **row, "verdict": each.verdict}
        for name, each in found.items()
        for function, row in each.to_dataframe().to_dict("index").items()
    ]
    study.tables["power"] = [
        {
            "method": name,
            "simulations": count,
            "verdict": part.verdict,
            "least_p": min((test.least for test in part.tests.values()), default=float("nan")),
            "threshold": part.threshold,
        }
        for name, each in found.items()
        for count in steps_up_to(sizes.simulations)
        for part in [first(each, count)]
    ]
    study.tables["ranks"] = [
        {"method": name, "simulation": int(number), **dict(zip(each.names, map(int, ranks), strict=True))}
        for name, each in found.items()
        for number, ranks in zip(each.numbers, each.ranks, strict=True)
    ]
    study.numbers = {
        name: {
            "simulations": each.simulations,
            "failures": len(each.failures),
            "mean_probability": {key: test.mean_probability for key, test in each.tests.items()},
            "spread": {key: test.spread for key, test in each.tests.items()},
        }
        for name, each in found.items()
    }
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--simulations", type=int, help="how many")
    main(**vars(parser.parse_args()))
