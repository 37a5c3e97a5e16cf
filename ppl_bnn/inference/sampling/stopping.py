"""Rules that end a chain, `until="rhat<1.01, ess>400"`, evaluated in function space.

A rule is checked at multiples of `draws`, on the draws that all chains have, with the figures of `bnn.diagnose`. It
requires a budget, since it may never hold.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import InputError, check_known
from ppl_bnn.posterior.convergence import components, mixing, probe_indices, quantities
from ppl_bnn.posterior.posterior import MEMORY

# The figures of a rule: the worst of any component, and for "ess" the smaller one of the two sizes.
FIGURES = ("rhat", "ess", "ess_bulk", "ess_tail", "mcse")
LARGER_IS_BETTER = ("ess", "ess_bulk", "ess_tail")
_TERM = re.compile(r"\s*(\w+)\s*([<>])\s*([-+0-9.eE]+)\s*")


@dataclass(frozen=True)
class Rule:
    """Limits that must all hold: (figure, "<" or ">", limit) each."""

    terms: tuple[tuple[str, str, float], ...]

    @classmethod
    def of(cls, text: Any, names: Collection[str] = FIGURES) -> Rule:
        """Parse a rule such as "rhat<1.01, ess>400" over the figures `names`."""
        example = "until='rhat<1.01, ess>400'"
        words = isinstance(text, str) and text.strip()
        InputError.check(words, "until", "a rule in words", repr(text), example)
        terms = []
        for part in text.split(","):
            found = _TERM.fullmatch(part)
            if found is None:
                raise InputError.of("until", "figure < limit or figure > limit", repr(part.strip()), example)
            name, sign, number = found.groups()
            check_known("figure of a rule", [name], names)
            wanted = ">" if name in LARGER_IS_BETTER else "<"
            got, better = repr(part.strip()), f"{name}{wanted}{number}"
            InputError.check(sign == wanted, "until", f"{name}{wanted}limit", got, better)
            try:
                terms.append((name, sign, float(number)))
            except ValueError:
                raise InputError.of("until", "a number as the limit", repr(number), example) from None
        return cls(tuple(terms))

    def holds(self, figures: Mapping[str, float]) -> bool:
        """Whether all limits hold; NaN fails."""
        return all(
            figures[name] < limit if sign == "<" else figures[name] > limit
            for name, sign, limit in self.terms
        )


def check_until(method: str, until: Any, budget: Any, names: Collection[str] = FIGURES) -> Rule | None:
    """The rule of a method over the figures `names`, or None; a rule needs a budget, since it may never hold."""
    if until is None:
        return None
    rule = Rule.of(until, names)
    wanted, got = "a budget beside it, since a rule may never hold", f"until={until!r} alone"
    InputError.check(budget is not None, f"{method} until", wanted, got, "budget=600 (seconds)")
    return rule


def ending(
    method: Any, stopped: str, looks: Sequence[Mapping[str, float]], after: str, wanted: str
) -> tuple[dict[str, float], dict[str, np.ndarray], list[str]]:
    """Figures, history and warnings of a run that its "rule", its "budget" or its length `stopped`.

    `looks` are the figures at each check of the rule. `after` names what was made, `wanted` its length without a rule.
    """
    figures, warnings = {}, []
    if method.until is not None:
        figures["rule_held"] = float(stopped == "rule")
        wanted = f"until {method.until!r} held"
    if method.budget is not None:
        figures["stopped_by_budget"] = float(stopped == "budget")
    if stopped == "budget":
        warnings.append(f"the budget of {method.budget:g} s was spent after {after}, before {wanted}")
    history = {f"look_{name}": np.array([look[name] for look in looks]) for name in (*looks, {})[0]}
    return figures, history, warnings


class Watch:
    """Evaluates a rule: u, site -> (chain, draw, ...), to (whether it holds, the worst figures).

    The figures are those of the `quantities` at up to 50 training rows, and of the log likelihood of all rows. Later
    calls predict only new draws. The argument `others` adds figures from elsewhere, `superchains` is for nested R-hat.
    """

    def __init__(self, problem: Problem, rule: Rule, superchains: int | None = None):
        self.problem, self.rule, self.superchains = problem, rule, superchains
        chosen = probe_indices(problem.rows, problem.seed)
        self.probe = problem.inputs
        if len(chosen) < problem.rows:
            self.probe = map_data(lambda array: np.asarray(array)[chosen], problem.inputs)
        # Predictions so far: quantity -> (chain, draw, ...).
        self.known: dict[str, np.ndarray] = {}

    def __call__(self, u: Mapping[str, np.ndarray], **others: float) -> tuple[bool, dict[str, float]]:
        self._see(u)
        found = [mixing(value, self.superchains) for value in components(self.known).values()]
        figures = dict.fromkeys(FIGURES, np.nan) | others
        judged = [each for each in found if each.components]
        for name in FIGURES if judged else ():
            worst = min if name in LARGER_IS_BETTER else max
            read = ("ess_bulk", "ess_tail") if name == "ess" else (name,)
            figures[name] = float(worst(getattr(each, part) for each in judged for part in read))
        shown = {name: value for name, value in figures.items() if name != "ess"}
        return self.rule.holds(figures), shown

    def _see(self, u: Mapping[str, np.ndarray]) -> None:
        """Predict the new draws; draws seen before come first along their axis."""
        now = next(iter(u.values())).shape[:2]
        before = next(iter(self.known.values())).shape[:2] if self.known else (0, 0)
        if before == now:
            return
        axis = 0 if before[1] == now[1] else 1
        if before[1 - axis] != now[1 - axis] or before[axis] > now[axis]:
            # These draws are of another run.
            self.known, before = {}, (0, 0)
        seen = before[axis]
        found = self._predicted({name: np.split(value, [seen], axis)[1] for name, value in u.items()}, seen)
        self.known = {
            name: np.concatenate([self.known[name], value], axis) if self.known else value
            for name, value in found.items()
        }

    def _predicted(self, u: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        """Predict draws; `seed` is that of variables of rows, which are drawn at each prediction."""
        problem = self.problem
        program = problem.program
        lead = next(iter(u.values())).shape[:2]
        flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in u.items()}
        w = program.constrain_draws(flat, problem.x, problem.y)

        def predicted(x: Any) -> np.ndarray:
            return program.predictor_draws(w, x, seed=seed, memory=MEMORY)

        f = predicted(self.probe)
        eta = f if self.probe is problem.inputs else predicted(problem.inputs)
        found = quantities(problem, w, f, eta, problem.targets)
        return {name: value.reshape(*lead, *value.shape[1:]) for name, value in found.items()}
