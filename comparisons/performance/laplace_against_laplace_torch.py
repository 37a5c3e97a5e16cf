"""Laplace: curvature, tuning of the prior precision and prediction, against laplace-torch at the same weights.

The network is tanh 50-50 with 13 inputs: with one output, known noise and 1000 rows, or with 10 classes and 10 000
rows; both sides work in float64 at the same weights and predict as many rows as they were given. One figure is the time
for fitting the curvature, tuning one prior precision by the evidence (100 steps of Adam there, as its documentation has
it; MacKay's fixed point here) and predicting, linearised (for classes by the probit approximation). Compiled functions
are warm; what compiling took is printed as a fact.

That both sides do the same work is checked: at the model's own prior precision evidence and predictive variance agree,
and our tuned evidence is not below theirs.

Peak memory is that of a process of its own, less what it held before the fit; of ours once with what compiling takes,
and once more in the same process.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ratios import Ratio, alternate, keep, report

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.progress import Silent

NOISE = 0.3


@dataclass(frozen=True)
class Case:
    """One comparison. theirs: arguments of laplace-torch's `Laplace`; rounds: how often both sides are measured."""

    name: str
    task: str
    settings: dict[str, Any]
    theirs: dict[str, str]
    target: float
    rounds: int


CASES = [
    Case(
        "full",
        "regression",
        {"structure": "full"},
        {"subset_of_weights": "all", "hessian_structure": "full"},
        50.0,
        1,
    ),
    Case(
        "kron",
        "regression",
        {"structure": "kron"},
        {"subset_of_weights": "all", "hessian_structure": "kron"},
        2.0,
        5,
    ),
    Case(
        "diag",
        "regression",
        {"structure": "diag"},
        {"subset_of_weights": "all", "hessian_structure": "diag"},
        2.0,
        5,
    ),
    Case(
        "last layer",
        "regression",
        {"weights": "last_layer"},
        {"subset_of_weights": "last_layer", "hessian_structure": "full"},
        2.0,
        5,
    ),
    Case(
        "full",
        "classes",
        {"structure": "full"},
        {"subset_of_weights": "all", "hessian_structure": "full"},
        5.0,
        1,
    ),
    Case(
        "kron",
        "classes",
        {"structure": "kron"},
        {"subset_of_weights": "all", "hessian_structure": "kron"},
        1.5,
        3,
    ),
    Case(
        "diag",
        "classes",
        {"structure": "diag"},
        {"subset_of_weights": "all", "hessian_structure": "diag"},
        1.5,
        3,
    ),
]


@dataclass(frozen=True)
class Problem:
    """Data, the model in the language, and weights at which both sides are compared."""

    x: np.ndarray
    y: np.ndarray
    model: Any
    weights: dict[str, np.ndarray]
    kind: str

    @classmethod
    def make(cls, task: str, tiny: bool) -> Problem:
        rows = {"regression": 1000, "classes": 10_000}[task]
        rows, width = (40, 4) if tiny else (rows, 50)
        outputs = 1 if task == "regression" else 10
        rng = np.random.default_rng(0)
        x = rng.normal(size=(rows, 13))
        scores = np.tanh(x @ rng.normal(size=(13, outputs)) / 2.0) + 0.3 * x[:, :outputs]
        if task == "regression":
            y = scores[:, 0] + NOISE * rng.normal(size=rows)
        else:
            y = np.argmax(scores + 0.3 * rng.gumbel(size=scores.shape), axis=1)

        def model(x: Any, y: Any = None) -> None:
            f = bnn.mlp(x, [width, width, outputs], activation="tanh", prior=priors.Normal(0.0, 1.0))
            likelihood = likelihoods.Gaussian(NOISE) if outputs == 1 else likelihoods.Categorical()
            bnn.observe(y, f, likelihood)

        # Both sides expand at these weights; how near they are to a mode changes nothing in the work.
        steps = 50 if tiny else 1000
        mode = bnn.fit(model, x, y, bnn.MAP(steps=steps, polish=False))
        weights = {name: value[0, 0] for name, value in mode.draws.items()}
        return cls(x, y, model, weights, "linearised" if outputs == 1 else "probit")

    def module(self) -> Any:
        """The network as a torch module in float64."""
        import torch

        layers: list[Any] = []
        for name in ("hidden0", "hidden1", "output"):
            weight = self.weights[f"{name}.weight"]
            layer = torch.nn.Linear(*weight.shape).double()
            with torch.no_grad():
                layer.weight.copy_(torch.tensor(weight.T))
                layer.bias.copy_(torch.tensor(self.weights[f"{name}.bias"]))
            layers += [layer, torch.nn.Tanh()]
        return torch.nn.Sequential(*layers[:-1])


class Ours:
    """bnn.Laplace on a problem whose program is compiled once."""

    def __init__(self, problem: Problem, case: Case, ppl: str):
        self.problem = problem
        settings = {"ppl": ppl, "start": problem.weights, "optimise": False, **case.settings}
        start = time.perf_counter()
        self.posterior = bnn.fit(problem.model, problem.x, problem.y, bnn.Laplace(**settings))
        self.method = bnn.Laplace(**settings, tune="global")
        self.work()
        self.first = time.perf_counter() - start
        self.tuned = self.posterior

    def work(self) -> None:
        outcome = self.posterior.with_problem(lambda problem: self.method.run(problem, Silent()))
        self.evidence = outcome.figures["log_evidence"]
        approximation = outcome.approximation
        self.prediction = self.posterior.with_problem(
            lambda problem: approximation.closed_form(problem, self.problem.x, self.problem.kind, 2**28)
        )

    def rate(self, index: int) -> float:
        start = time.perf_counter()
        self.work()
        return 1.0 / (time.perf_counter() - start)


class Theirs:
    """laplace-torch 0.3 with its recommended backend."""

    def __init__(self, problem: Problem, case: Case, steps: int):
        self.problem, self.case, self.steps = problem, case, steps
        self.network = problem.module()
        self.seconds: dict[str, float] = {}

    def fitted(self) -> Any:
        import torch
        from laplace import Laplace
        from laplace.curvature import CurvlinopsGGN

        targets = torch.tensor(self.problem.y)
        regression = self.problem.kind == "linearised"
        data = torch.utils.data.TensorDataset(
            torch.tensor(self.problem.x), targets[:, None] if regression else targets
        )
        la: Any = Laplace(
            self.network,
            "regression" if regression else "classification",
            backend=CurvlinopsGGN,
            prior_precision=1.0,
            sigma_noise=NOISE if regression else 1.0,
            **self.case.theirs,  # pyright: ignore[reportArgumentType]
        )
        la.fit(torch.utils.data.DataLoader(data, batch_size=1000))
        return la

    def predict(self, la: Any) -> Any:
        import torch

        if self.problem.kind == "linearised":
            return la(torch.tensor(self.problem.x), pred_type="glm")
        # All 10 000 rows at once would ask for 80 GB.
        parts = torch.tensor(self.problem.x).split(500)
        return torch.cat([la(part, pred_type="glm", link_approx="probit") for part in parts])

    def rate(self, index: int) -> float:
        start = time.perf_counter()
        la = self.fitted()
        fitted = time.perf_counter()
        la.optimize_prior_precision(method="marglik", n_steps=self.steps, pred_type="glm")
        tuned = time.perf_counter()
        self.evidence = float(la.log_marginal_likelihood())
        before = time.perf_counter()
        self.predict(la)
        end = time.perf_counter()
        self.seconds = {"fit": fitted - start, "tune": tuned - fitted, "predict": end - before}
        return 1.0 / (tuned - start + end - before)


class double:
    """laplace-torch makes tensors of torch's default type, and warns of its own dependencies."""

    def __enter__(self) -> None:
        import torch

        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.quiet = warnings.catch_warnings()
        self.quiet.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *exception: Any) -> None:
        import torch

        torch.set_default_dtype(self.before)
        self.quiet.__exit__(*exception)


def check(ours: Ours, theirs: Theirs) -> None:
    """The same evidence and predictive at the model's own prior, before anything is tuned."""
    la = theirs.fitted()
    evidence = float(la.log_marginal_likelihood())
    found = ours.posterior.log_evidence
    assert np.isclose(found, evidence, rtol=1e-5), (found, evidence)
    prediction = ours.posterior.predict(ours.problem.x[:20], kind=ours.problem.kind)
    whole, theirs.problem = theirs.problem, _first_rows(theirs.problem)
    result = theirs.predict(la)
    theirs.problem = whole
    if ours.problem.kind == "linearised":
        assert np.allclose(prediction.epistemic, result[1].detach().numpy()[:, 0, 0], rtol=1e-5)
    else:
        assert np.allclose(prediction.probabilities, result.detach().numpy(), rtol=1e-4, atol=1e-6)


def _first_rows(problem: Problem) -> Problem:
    return Problem(problem.x[:20], problem.y[:20], problem.model, problem.weights, problem.kind)


def timed(
    case: Case,
    problems: dict[str, Problem],
    name: str,
    ppl: str,
    tiny: bool,
    rounds: int | None,
    facts: dict[str, Any],
) -> Ratio:
    """Both sides measured in turn; `problems` and `facts` are added to."""
    if case.task not in problems:
        problems[case.task] = Problem.make(case.task, tiny)
    problem = problems[case.task]
    with double():
        ours, theirs = Ours(problem, case, ppl), Theirs(problem, case, 3 if tiny else 100)
        check(ours, theirs)
        ratio = alternate(
            f"{name}: fit, tune and predict",
            case.target,
            "1/s",
            ours.rate,
            theirs.rate,
            rounds or case.rounds,
        )
    print(ratio, flush=True)
    if not tiny:
        assert ours.evidence > theirs.evidence - 0.01 * abs(theirs.evidence), (ours.evidence, theirs.evidence)
    facts[f"{name}: log evidence tuned, ours and theirs"] = f"{ours.evidence:.2f} and {theirs.evidence:.2f}"
    facts[f"{name}: ours with compiling, seconds"] = round(ours.first, 2)
    facts[f"{name}: theirs, seconds"] = ", ".join(f"{k} {v:.3g}" for k, v in theirs.seconds.items())
    return ratio


def main(
    tiny: bool = False,
    rounds: int | None = None,
    store: bool = False,
    only: str = "",
    ppl: str = "numpyro",
    memory: bool = False,
) -> dict[str, float]:
    """memory: nothing but what each side holds, which does not ask for a quiet machine."""
    ratios: list[Ratio] = []
    facts: dict[str, Any] = {}
    problems: dict[str, Problem] = {}
    for case in CASES:
        name = f"{case.task}, {case.name}, {ppl}"
        if only and not any(part in name for part in only.split(";")):
            continue
        if not memory:
            ratios.append(timed(case, problems, name, ppl, tiny, rounds, facts))
            if store:
                # What took minutes to measure is kept before the next thing is.
                keep("laplace_against_laplace_torch", ratios, facts)
        if not tiny:
            compiling, again = peak(case, "ours", ppl)
            facts[f"{name}: peak memory, MiB"] = (
                f"ours {compiling}, compiling, and {again} the second time; theirs {peak(case, 'theirs', ppl)[0]}"
            )
            if store:
                keep("laplace_against_laplace_torch", ratios, facts)
    return report("laplace_against_laplace_torch", ratios, facts, store)


_PEAK = """
import ctypes
import gc
import re
from pathlib import Path
import laplace_against_laplace_torch as script

case = next(case for case in script.CASES if case.name == {name!r} and case.task == {task!r})
problem = script.Problem.make(case.task, False)
import laplace, laplace.curvature

def resident(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def rise(action):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would be used again, and not be seen
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = resident("VmRSS")
    result = action()
    print(max(0, round(resident("VmHWM") - before)))
    return result

with script.double():
    if {side!r} == "ours":
        ours = rise(lambda: script.Ours(problem, case, {ppl!r}))
        rise(ours.work)
    else:
        rise(lambda: script.Theirs(problem, case, 2).rate(0))
"""


def peak(case: Case, side: str, ppl: str) -> list[str]:
    """MiB by which the high-water mark rises over fit, tuning and prediction: ours compiling, and once more."""
    script = _PEAK.format(name=case.name, task=case.task, side=side, ppl=ppl)
    command = [sys.executable, "-W", "ignore", "-c", script]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    if run.returncode == -signal.SIGKILL:
        return ["more than this machine has (its process was killed)"] * 2
    run.check_returncode()
    return run.stdout.split()[-2:] if side == "ours" else run.stdout.split()[-1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name holds one of these, split by ;")
    parser.add_argument("--ppl", default="numpyro")
    parser.add_argument("--memory", action="store_true", help="memory alone")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    options = parser.parse_args()
    main(options.tiny, options.rounds, options.store, options.only, options.ppl, options.memory)
