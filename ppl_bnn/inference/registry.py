"""The methods of the library by name, and the classes that saved posteriors may name.

A new method is one line of `MODULES` and one of `ROWS`; a new class of approximation is one line of `APPROXIMATIONS`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ppl_bnn.core.errors import unknown_name
from ppl_bnn.posterior.registered import APPROXIMATIONS, CALLS

if TYPE_CHECKING:
    from ppl_bnn.inference.method import Method

# Class name -> module.
MODULES: dict[str, str] = {
    "MAP": "ppl_bnn.inference.optimisation.map",
    "SVI": "ppl_bnn.inference.variational.svi",
    "Laplace": "ppl_bnn.inference.laplace.laplace",
    "NUTS": "ppl_bnn.inference.mcmc.nuts",
    "HMC": "ppl_bnn.inference.mcmc.hmc",
    "ChEES": "ppl_bnn.inference.mcmc.chees",
    "MEADS": "ppl_bnn.inference.mcmc.meads",
    "LAPS": "ppl_bnn.inference.mcmc.laps",
    "MCLMC": "ppl_bnn.inference.mcmc.mclmc",
    "SGLD": "ppl_bnn.inference.mcmc.sgld",
    "SGHMC": "ppl_bnn.inference.mcmc.sghmc",
    "Pathfinder": "ppl_bnn.inference.variational.pathfinder",
    "SMC": "ppl_bnn.inference.mcmc.smc",
    "SVGD": "ppl_bnn.inference.variational.svgd",
    "IVON": "ppl_bnn.inference.variational.ivon",
    "MCDropout": "ppl_bnn.inference.variational.mc_dropout",
    "Ensemble": "ppl_bnn.inference.ensembles.ensemble",
    "SWAG": "ppl_bnn.inference.optimisation.swag",
    "Stacked": "ppl_bnn.inference.ensembles.stacked",
}


@dataclass(frozen=True)
class MethodRow:
    """A method by `name` (on the command line, "laplace-kron"): a class of `MODULES` and some arguments.

    `quick` are arguments for a run of seconds whose numbers do not matter. `member` is the name of the member method of
    a method that combines fits of another one.
    """

    name: str
    class_name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    member: str | None = None

    def build(self, ppl: str, quick: bool = False, **more: Any) -> Method:
        """The method for a system; `quick` uses those settings, and `more` are arguments that take precedence."""
        settings = {**self.settings, **(self.quick if quick else {}), **more}
        if self.member is not None:
            settings.setdefault("member", row(self.member).build(ppl, quick))
        return method_class(self.class_name)(ppl=ppl, **settings)


# Variational Bayesian last layers: a matrix normal over the last layer in closed form, and a point for the rest.
_LAST_LAYER = {
    "guide": {"last_layer": "matrixnormal", "*": "delta"},
    "estimator": "closed_form",
    "divergence": "analytic",
}
_SHORT = {"draws": 12, "warmup": 15}
_MANY = {**_SHORT, "chains": 8, "superchains": 4}
_BATCHES = {**_SHORT, "chains": 2, "thinning": 3}

ROWS: dict[str, MethodRow] = {
    each.name: each
    for each in (
        MethodRow("map", "MAP", quick={"steps": 200}),
        MethodRow("svi", "SVI", quick={"steps": 200, "elbo_draws": 20}),
        MethodRow("vbll", "SVI", _LAST_LAYER, {"steps": 200, "elbo_draws": 20}),
        MethodRow("laplace", "Laplace", quick={"steps": 300}),
        MethodRow("laplace-guide", "Laplace", {"engine": "guide"}, {"steps": 300}),
        MethodRow("laplace-kron", "Laplace", {"structure": "kron"}, {"steps": 300}),
        MethodRow("laplace-diag", "Laplace", {"structure": "diag"}, {"steps": 300}),
        # A rank has no default; four is the number of weights of the smallest models.
        MethodRow("laplace-lowrank", "Laplace", {"structure": "lowrank", "rank": 4}, {"steps": 300}),
        MethodRow("nuts", "NUTS", quick={**_SHORT, "chains": 2, "max_tree_depth": 4}),
        MethodRow("hmc", "HMC", quick={**_SHORT, "chains": 1, "num_steps": 4}),
        MethodRow("chees", "ChEES", quick={**_MANY, "max_steps": 16}),
        MethodRow("meads", "MEADS", quick={**_MANY, "folds": 2, "thinning": 2}),
        MethodRow("laps", "LAPS", quick={**_MANY, "steps": 3}),
        MethodRow("mclmc", "MCLMC", quick=_BATCHES),
        MethodRow("mclmc-adjusted", "MCLMC", {"adjusted": True}, {**_SHORT, "chains": 2}),
        MethodRow("sgld", "SGLD", {"batch_size": 8}, _BATCHES),
        MethodRow("sgld-metropolis", "SGLD", {"correction": "metropolis"}, _BATCHES),
        MethodRow("sghmc", "SGHMC", {"batch_size": 8}, _BATCHES),
        MethodRow("pathfinder", "Pathfinder", quick={"max_iterations": 30, "elbo_draws": 10}),
        MethodRow("smc", "SMC", quick={"particles": 12, "runs": 2, "moves": 2, "max_leapfrog": 8}),
        MethodRow("svgd", "SVGD", quick={"steps": 200, "particles": 5}),
        MethodRow("ivon", "IVON", quick={"steps": 200, "elbo_draws": 20}),
        MethodRow("mc-dropout", "MCDropout", quick={"steps": 200}),
        MethodRow("ensemble", "Ensemble", quick={"size": 3}, member="map"),
        MethodRow("stacked", "Stacked", {"by": "validation"}, member="ensemble"),
        MethodRow(
            "swag", "SWAG", quick={"steps": 200, "collections": 5, "rank": 3, "every": 2, "burn_in": 1}
        ),
    )
}

APPROXIMATIONS.update(
    {
        "Chains": "ppl_bnn.posterior.approximation:Chains",
        "Point": "ppl_bnn.posterior.approximation:Point",
        "Drawn": "ppl_bnn.posterior.approximation:Drawn",
        "Restarts": "ppl_bnn.inference.variational.restarts:Restarts",
        "MeanField": "ppl_bnn.inference.variational.mean_field:MeanField",
        "Particles": "ppl_bnn.inference.variational.svgd:Particles",
        "Dropped": "ppl_bnn.inference.variational.mc_dropout:Dropped",
        "GuideApproximation": "ppl_bnn.inference.variational.guides:GuideApproximation",
        "LaplaceGaussian": "ppl_bnn.inference.laplace.approximation:LaplaceGaussian",
        "PathMixture": "ppl_bnn.inference.variational.pathfinder:PathMixture",
        "SWAGGaussian": "ppl_bnn.inference.optimisation.swag:SWAGGaussian",
        "Members": "ppl_bnn.inference.ensembles.members:Members",
    }
)
CALLS["distil"] = "ppl_bnn.inference.distillation:distil"


def method_class(name: str) -> type[Method]:
    """The class of a method by its class name, such as "NUTS"."""
    if name not in MODULES:
        raise unknown_name("method", name, MODULES)
    return getattr(importlib.import_module(MODULES[name]), name)


def row(name: str) -> MethodRow:
    """The row with a given name; case, spaces, hyphens and underscores do not matter.

    A method with members takes the name of the member after a hyphen, at the defaults of its class: "ensemble-swag".
    """
    if found := _found(_plain(name)):
        return found
    raise unknown_name("method", name.strip(), ROWS)


def _found(plain: str) -> MethodRow | None:
    exact = {_plain(name): each for name, each in ROWS.items()}
    if plain in exact:
        return exact[plain]
    for each in ROWS.values():
        if each.member is not None and plain.startswith(each.name):
            member = _found(plain.removeprefix(each.name))
            if member is not None:
                name = f"{each.name}-{member.name}"
                return MethodRow(name, each.class_name, quick=each.quick, member=member.name)
    return None


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
