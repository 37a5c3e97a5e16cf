"""Convergence of chains where it means something for a network: in function space.

The weights of a network have symmetric modes (hidden units can be exchanged, signs flipped), so chains that
agree on every prediction may sit in different copies of one mode: R-hat of the weights is then large and says
nothing. Judged here are the network's outputs at probe inputs, the log likelihood and the scale parameters,
which no symmetry moves. Restarts of an approximation are compared in the same quantities, each restart as a chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.errors import UnsupportedError, message
from ppl_bnn.export import original_inputs
from ppl_bnn.posterior import MEMORY
from ppl_bnn.ppl.protocol import Problem, map_data, row_count, site_seed
from ppl_bnn.predictive import Prediction

PROBES = 50
RHAT_LIMIT = 1.01
# Between two restarts R-hat is about 1 + d^2 / 6 where their means differ by d standard deviations: here d = 0.55.
RESTART_LIMIT = 1.05
RESTART_DRAWS = 1000
ESS_PER_CHAIN = 100
FEWEST_DRAWS = 4


@dataclass(frozen=True)
class Mixing:
    """Worst and median figures over the components of one quantity.

    rhat: rank-normalised split R-hat. ess_bulk, ess_tail: effective sample sizes (tail: the smaller one of the
    5 % and 95 % quantiles). mcse: Monte-Carlo standard error of the mean, in standard deviations of the
    component. components: how many vary; constant: how many do not (a known noise, say) and are left out.
    """

    rhat: float
    rhat_median: float
    ess_bulk: float
    ess_bulk_median: float
    ess_tail: float
    ess_tail_median: float
    mcse: float
    mcse_median: float
    components: int
    constant: int


@dataclass(frozen=True)
class Convergence:
    """Convergence of chains in function space (see `convergence`).

    rhat, ess_bulk, ess_tail, mcse: the worst over all `quantities` (weights apart). reasons: what fails, in
    sentences.
    """

    converged: bool
    rhat: float
    ess_bulk: float
    ess_tail: float
    mcse: float
    chains: int
    draws: int
    probes: int
    quantities: dict[str, Mixing] = field(default_factory=dict)
    weights: Mixing | None = None
    reasons: tuple[str, ...] = ()

    @property
    def figures(self) -> dict[str, float]:
        """The worst figures by name, for tables."""
        return {"rhat": self.rhat, "ess_bulk": self.ess_bulk, "ess_tail": self.ess_tail, "mcse": self.mcse}


def convergence(
    posterior: Any, probe: Any = None, max_rows: int = PROBES, *, weights: bool = False
) -> Convergence:
    """R-hat, ESS and MCSE of the network's outputs, the log likelihood and the scales of a posterior of chains.

    Quantities: "f", the predictor eta at the probe inputs, each row and output a component (the noise, being
    the same in every row, counts there once); "log_likelihood", sum_i log p(y_i | x_i, draw) over the training
    rows; and each scalar random variable of the model, such as "noise", by its name. Components that do not
    vary over any draw are left out and counted.

    probe: inputs (M, F) in original units; default `max_rows` training rows, chosen evenly without replacement
    by a generator seeded from the seed of the fit. weights: also all sites in unconstrained coordinates, in
    `weights`; they never enter the verdict.

    Converged, after Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021, Bayesian Analysis 16), means: at
    least 2 chains (4 are advised), and for every component R-hat < 1.01 and bulk and tail ESS > 100 per chain
    (400 for 4 chains).

    Raises
    ------
    UnsupportedError: the posterior is not of chains.
    """
    if posterior.kind != "chains":
        raise UnsupportedError(
            "convergence: "
            + message(
                "a posterior of chains, whose draws depend on each other",
                f"{posterior.info.method}, of kind {posterior.kind!r}",
                "bnn.diagnose, or diagnostics.importance.pareto_k for an approximation",
            )
        )
    probe = probe_rows(posterior, max_rows) if probe is None else probe
    eta = posterior.predictor(probe)
    likelihood = posterior.log_likelihood()
    chains, draws = posterior.shape
    quantities = {
        "f": mixing(_distinct(eta)),
        "log_likelihood": mixing(likelihood.sum(axis=-1)[..., None]),
    }
    sites = posterior._with(lambda problem: problem.program.sites)
    for name, value in posterior.draws.items():
        if value.ndim == 2 and not sites[name].is_param and np.ptp(value) > 0:
            quantities[name] = mixing(value[..., None])
    judged = {name: figures for name, figures in quantities.items() if figures.components}
    reasons = _reasons(chains, draws, judged)
    if "f" not in judged:
        reasons.insert(0, "the network's outputs are the same in every draw: the chains did not move")
    flat = None
    if weights:
        unconstrained = posterior.unconstrained_draws.values()
        flat = mixing(np.concatenate([value.reshape(chains, draws, -1) for value in unconstrained], axis=-1))

    def worst(name: str, choose: Any) -> float:
        return float(choose([getattr(figures, name) for figures in judged.values()])) if judged else np.nan

    return Convergence(
        converged=not reasons,
        rhat=worst("rhat", np.max),
        ess_bulk=worst("ess_bulk", np.min),
        ess_tail=worst("ess_tail", np.min),
        mcse=worst("mcse", np.max),
        chains=chains,
        draws=draws,
        probes=row_count(probe),
        quantities=quantities,
        weights=flat,
        reasons=tuple(reasons),
    )


def probe_rows(posterior: Any, max_rows: int = PROBES) -> Any:
    """Up to `max_rows` training rows in original units, chosen evenly without replacement; the same at every call."""
    chosen = _chosen_rows(posterior, max_rows)
    return map_data(lambda array: np.asarray(array)[chosen], original_inputs(posterior))


def _chosen_rows(posterior: Any, max_rows: int) -> np.ndarray:
    rows = row_count(posterior.inputs)
    rng = np.random.default_rng(site_seed("probe", posterior.info.seed))
    return np.sort(rng.choice(rows, size=min(rows, max_rows), replace=False))


@dataclass(frozen=True)
class Agreement:
    """How fits of one approximation from different starts differ in function space (see `agreement`).

    count: how many there are. quantities: R-hat and more between them, by quantity. elbo: (count,), in the order of
    the restarts, or None where the fit does not say.
    """

    count: int
    quantities: dict[str, Mixing]
    elbo: np.ndarray | None = None

    @property
    def worst(self) -> str:
        """The quantity in which they differ most."""
        return max(self.quantities, key=lambda name: self.quantities[name].rhat)

    @property
    def rhat(self) -> float:
        """The largest R-hat between restarts; NaN where nothing varies at all."""
        return self.quantities[self.worst].rhat if self.quantities else float("nan")

    @property
    def agree(self) -> bool:
        """Whether R-hat is below 1.05 in every quantity: means at most about half a standard deviation apart."""
        return not self.quantities or self.rhat < RESTART_LIMIT


def agreement(posterior: Any, max_rows: int = PROBES, draws: int = RESTART_DRAWS) -> Agreement:
    """Compare the members of an approximation that was fitted from several starts, each taken as a chain.

    From each member `draws` draws; the quantities are those of `convergence`: the predictor and the log likelihood at
    up to `max_rows` training rows, and each scalar random variable. The draws are independent, so that R-hat above 1
    is not slow mixing: it says that the restarts ended in distributions that differ, in place or in width, by an amount
    that a single one of them would not show. Weights are no part of it: symmetric copies of one mode agree.

    Raises
    ------
    UnsupportedError: an approximation without at least two `members`.
    """
    members = list(getattr(posterior.approximation, "members", None) or ())
    if len(members) < 2:
        raise UnsupportedError(
            "agreement: "
            + message(
                "an approximation with at least two members, one per restart",
                f"{posterior.info.method} with {len(members)}",
                "SVI(restarts=5)",
            )
        )
    chosen = _chosen_rows(posterior, max_rows)
    x = map_data(lambda array: np.asarray(array)[chosen], posterior.inputs)
    y = np.asarray(posterior.targets)[chosen]
    kind = posterior._drawn_kind(None)

    def evaluated(problem: Problem) -> dict[str, np.ndarray]:
        parts: dict[str, list[np.ndarray]] = {}
        for index, member in enumerate(members):
            rng = np.random.default_rng(site_seed(f"restart {index}", posterior.info.seed))
            u = member.draw(min(draws, getattr(member, "count", draws)), rng)
            eta = member.predictor_draws(problem, u, x, kind, 0, MEMORY)
            family, parameters = problem.program.likelihood.mixture_parameters(eta)
            likelihood = Prediction(family, parameters).component_log_prob(y).sum(axis=-1)
            w = problem.program.constrain_draws(u, problem.x, problem.y)
            values = {"f": eta, "log_likelihood": likelihood} | {
                name: w[name]
                for name, site in problem.program.sites.items()
                if site.shape == () and not site.is_param
            }
            for name, value in values.items():
                parts.setdefault(name, []).append(value)
        return {name: np.stack(values) for name, values in parts.items()}

    values = posterior._with(evaluated)
    quantities = {
        name: mixing(_distinct(value) if name == "f" else value[..., None]) for name, value in values.items()
    }
    elbo = posterior.info.history.get("restart_elbo")
    return Agreement(
        count=len(members),
        quantities={name: figures for name, figures in quantities.items() if figures.components},
        elbo=None if elbo is None else np.asarray(elbo, dtype=np.float64),
    )


def mixing(draws: np.ndarray) -> Mixing:
    """Figures of components, (chain, draw, components).

    A component that is not finite, or on which each chain stands still at a place of its own, has R-hat
    infinity and ESS 0. With fewer than 4 draws per chain nothing can be said: R-hat is infinity and ESS 0 too.
    """
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

    finite = np.isfinite(draws).all(axis=(0, 1))
    varies = ~finite | (draws.max(axis=(0, 1)) > draws.min(axis=(0, 1)))
    constant = int(np.count_nonzero(~varies))
    count = int(np.count_nonzero(varies))
    if not count:
        return Mixing(*[np.nan] * 8, components=0, constant=constant)
    rhat, bulk, tail, mcse = np.full(count, np.inf), np.zeros(count), np.zeros(count), np.full(count, np.inf)
    still = (draws.max(axis=1) == draws.min(axis=1)).all(axis=0)
    usable = (finite & ~still)[varies]
    if draws.shape[1] >= FEWEST_DRAWS and usable.any():
        values = draws[..., varies][..., usable].astype(np.float64)
        axes: dict[str, Any] = {"chain_axis": 0, "draw_axis": 1}
        with np.errstate(all="ignore"):
            rhat[usable] = array_stats.rhat(values, method="rank", **axes)
            bulk[usable] = array_stats.ess(values, method="bulk", **axes)
            tail[usable] = array_stats.ess(values, method="tail", prob=(0.05, 0.95), **axes)
            mcse[usable] = array_stats.mcse(values, method="mean", **axes) / values.std(axis=(0, 1))
        # Where ArviZ has no answer, such as for a tail in which nothing varies, nothing is claimed.
        rhat, mcse = np.where(np.isnan(rhat), np.inf, rhat), np.where(np.isnan(mcse), np.inf, mcse)
        bulk, tail = np.nan_to_num(bulk, nan=0.0), np.nan_to_num(tail, nan=0.0)
    return Mixing(
        rhat=float(rhat.max()),
        rhat_median=float(np.median(rhat)),
        ess_bulk=float(bulk.min()),
        ess_bulk_median=float(np.median(bulk)),
        ess_tail=float(tail.min()),
        ess_tail_median=float(np.median(tail)),
        mcse=float(mcse.max()),
        mcse_median=float(np.median(mcse)),
        components=count,
        constant=constant,
    )


def _distinct(eta: np.ndarray) -> np.ndarray:
    """eta (chain, draw, M, D) as components (chain, draw, C); a column that is the same in all rows is taken once."""
    columns = []
    for column in np.moveaxis(eta, -1, 0):
        same = np.array_equal(column, np.broadcast_to(column[..., :1], column.shape), equal_nan=True)
        columns.append(column[..., :1] if same else column)
    return np.concatenate(columns, axis=-1)


def _reasons(chains: int, draws: int, judged: dict[str, Mixing]) -> list[str]:
    reasons = []
    if chains < 2:
        reasons.append(
            "one chain alone cannot show that it found the whole posterior: R-hat needs at least 2, better 4"
        )
    if draws < FEWEST_DRAWS:
        reasons.append(f"{draws} draws per chain are too few for R-hat and ESS")
        return reasons
    for name, figures in judged.items():
        if figures.rhat == np.inf:
            reasons.append(
                f"R-hat of {name} is infinite: a component is not finite, or stands still within chains"
            )
        elif not figures.rhat < RHAT_LIMIT:
            reasons.append(
                f"R-hat of {name} is {figures.rhat:.3f}, not below {RHAT_LIMIT}: the chains disagree"
            )
        for which, value in (("bulk", figures.ess_bulk), ("tail", figures.ess_tail)):
            if not value > ESS_PER_CHAIN * chains:
                reasons.append(
                    f"{which} ESS of {name} is {value:.0f}, not above {ESS_PER_CHAIN * chains} "
                    f"({ESS_PER_CHAIN} per chain)"
                )
    return reasons
