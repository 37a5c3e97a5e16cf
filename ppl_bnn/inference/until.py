"""Rules that end a chain: `until="rhat<1.01, ess>400"`, judged on what the network computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.errors import InputError, message, unknown_name
from ppl_bnn.mixing import Mixing, distinct, mixing, probe_indices
from ppl_bnn.posterior import MEMORY
from ppl_bnn.ppl.protocol import Problem, map_data
from ppl_bnn.predictive import Prediction

# What may stand in a rule, and how it is read off the worst component of each quantity.
FIGURES: dict[str, Callable[[Mixing], float]] = {
    "rhat": lambda found: found.rhat,
    "ess": lambda found: min(found.ess_bulk, found.ess_tail),
    "ess_bulk": lambda found: found.ess_bulk,
    "ess_tail": lambda found: found.ess_tail,
    "mcse": lambda found: found.mcse,
}
LARGER_IS_BETTER = ("ess", "ess_bulk", "ess_tail")
_TERM = re.compile(r"\s*(\w+)\s*([<>])\s*([-+0-9.eE]+)\s*")


@dataclass(frozen=True)
class Rule:
    """Limits that all have to hold. terms: (figure, "<" or ">", limit)."""

    terms: tuple[tuple[str, str, float], ...]

    @classmethod
    def of(cls, text: Any) -> Rule:
        """Read a rule such as "rhat<1.01, ess>400".

        Raises
        ------
        InputError, UnknownNameError: anything else, or a limit from the wrong side.
        """
        example = "until='rhat<1.01, ess>400'"
        if not isinstance(text, str) or not text.strip():
            raise InputError("until: " + message("a rule in words", repr(text), example))
        terms = []
        for part in text.split(","):
            found = _TERM.fullmatch(part)
            if found is None:
                raise InputError(
                    "until: " + message("figure < limit or figure > limit", repr(part.strip()), example)
                )
            name, sign, number = found.groups()
            if name not in FIGURES:
                raise unknown_name("figure of a rule", name, FIGURES)
            try:
                limit = float(number)
            except ValueError:
                raise InputError(
                    "until: " + message("a number as the limit", repr(number), example)
                ) from None
            wanted = ">" if name in LARGER_IS_BETTER else "<"
            if sign != wanted:
                raise InputError(
                    "until: " + message(f"{name}{wanted}limit", repr(part.strip()), f"{name}{wanted}{number}")
                )
            terms.append((name, sign, limit))
        return cls(tuple(terms))

    def holds(self, figures: Mapping[str, float]) -> bool:
        """Whether all limits hold; a figure that is not a number holds none."""
        return all(
            figures[name] < limit if sign == "<" else figures[name] > limit
            for name, sign, limit in self.terms
        )


def watched(
    problem: Problem, rule: Rule, superchains: int | None = None
) -> Callable[[Mapping[str, np.ndarray]], tuple[bool, dict[str, float]]]:
    """u, site -> (chain, draw, ...), to whether the rule holds, and the worst figures.

    The quantities are those of `diagnostics.function_space.convergence`: the predictor at up to 50 training rows, the
    log likelihood of all of them, and each scalar random variable.
    """
    program = problem.program
    chosen = probe_indices(problem.rows, problem.seed)
    probe = map_data(lambda array: np.asarray(array)[chosen], problem.inputs)

    def look(u: Mapping[str, np.ndarray]) -> tuple[bool, dict[str, float]]:
        chains, draws = next(iter(u.values())).shape[:2]
        flat = {name: value.reshape(chains * draws, *value.shape[2:]) for name, value in u.items()}
        w = program.constrain_draws(flat, problem.x, problem.y)

        def by_chain(values: np.ndarray) -> np.ndarray:
            return values.reshape(chains, draws, *values.shape[1:])

        eta = by_chain(program.predictor_draws(w, probe, seed=0, memory=MEMORY))
        everywhere = program.predictor_draws(w, problem.inputs, seed=0, memory=MEMORY)
        family, parameters = program.likelihood.mixture_parameters(everywhere)
        density = Prediction(family, parameters).component_log_prob(problem.targets).sum(-1)
        found = [mixing(distinct(eta), superchains), mixing(by_chain(density)[..., None], superchains)]
        for name, value in w.items():
            site = program.sites[name]
            if site.shape == () and not site.is_param:
                found.append(mixing(by_chain(value)[..., None], superchains))
        judged = [each for each in found if each.components]
        figures = {
            name: float((min if name in LARGER_IS_BETTER else max)(read(each) for each in judged))
            if judged
            else np.nan
            for name, read in FIGURES.items()
        }
        return rule.holds(figures), {name: value for name, value in figures.items() if name != "ess"}

    return look
