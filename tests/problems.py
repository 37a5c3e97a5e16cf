"""Problems with a known answer, and the one list of methods that the conformance tests run over.

Whoever adds a method adds a row to `METHODS` and gets all the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.inference import registry


@dataclass(frozen=True)
class Conjugate:
    """Bayesian linear regression with known noise: y = x w + b + noise * N(0, 1), w and b ~ N(0, 1)."""

    x: np.ndarray
    y: np.ndarray
    noise: float

    @classmethod
    def make(cls, rows: int = 40, features: int = 3, noise: float = 0.5, seed: int = 1) -> Conjugate:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(rows, features)) @ np.triu(np.full((features, features), 0.6)) + 0.2
        y = x @ np.array([1.0, -0.5, 0.3])[:features] + 0.4 + noise * rng.normal(size=rows)
        return cls(x, y, noise)

    @property
    def design(self) -> np.ndarray:
        return np.column_stack([self.x, np.ones(len(self.x))])

    @property
    def precision(self) -> np.ndarray:
        return np.eye(self.design.shape[1]) + self.design.T @ self.design / self.noise**2

    @property
    def covariance(self) -> np.ndarray:
        return np.linalg.inv(self.precision)

    def precision_of(self, target: str) -> np.ndarray:
        """What is left of the precision for a Gaussian of the form that `Row.target` names."""
        precision, weights = self.precision, self.x.shape[1]
        if target == "mean field":
            return np.diag(np.diag(precision))
        if target == "independent sites":
            precision[:weights, weights:] = precision[weights:, :weights] = 0.0
        return precision

    @property
    def mean(self) -> np.ndarray:
        return self.covariance @ self.design.T @ self.y / self.noise**2

    @property
    def log_evidence(self) -> float:
        from scipy.stats import multivariate_normal

        total = self.noise**2 * np.eye(len(self.y)) + self.design @ self.design.T
        return float(multivariate_normal(np.zeros(len(self.y)), total).logpdf(self.y))

    def predictive(
        self, x: np.ndarray, covariance: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and epistemic variance of f at new inputs."""
        design = np.column_stack([x, np.ones(len(x))])
        covariance = self.covariance if covariance is None else covariance
        return design @ self.mean, np.einsum("ni,ij,nj->n", design, covariance, design)

    def model(self, x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihoods.Gaussian(self.noise))

    @staticmethod
    def flat(draws: dict[str, np.ndarray]) -> np.ndarray:
        """(chain, draw, P) of the weights, then the bias."""
        weight, bias = draws["output.weight"], draws["output.bias"]
        return np.concatenate([weight.reshape(*weight.shape[:2], -1), bias], axis=-1)


def in_both_systems(names: str, cases: Iterable[Any], once: Any) -> pytest.MarkDecorator:
    """`parametrize` over `ppl` and `cases`, of which NumPyro runs the case `once` alone.

    For tests of what is written once for both systems: Pyro runs all of it, and NumPyro compiles for seconds each time.
    """
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    first = once if isinstance(once, tuple) else (once,)
    assert first in every
    return pytest.mark.parametrize(
        f"ppl,{names}", [*(("pyro", *case) for case in every), ("numpyro", *first)]
    )


def regression_data(rows: int = 60, features: int = 2, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features))
    return x, np.sin(2.0 * x[:, 0]) + 0.5 * x[:, -1] + 0.2 * rng.normal(size=rows)


def full_rank_parameters(mean: np.ndarray, covariance: np.ndarray) -> dict[str, np.ndarray]:
    """The parameters of a full-rank block of a guide at which it is this normal."""
    root = np.linalg.cholesky(covariance)
    scale = np.diag(root)
    rho = np.log(np.expm1(scale))
    return {"loc": np.array(mean), "rho": rho, "lower": np.tril(root / scale[:, None], -1)}


def small_network(x: Any, y: Any = None) -> None:
    """3 tanh units and learned noise: the smallest network on which everything has to work."""
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    f = bnn.mlp(x, [3, 1], activation="tanh", prior=priors.Normal(0.0, "fan_in"))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


def small_classifier(x: Any, y: Any = None, *, classes: int = 3) -> None:
    f = bnn.mlp(x, [3, classes], activation="tanh", prior=priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Categorical())


@dataclass(frozen=True)
class Row:
    """A method at a size for tests.

    target: what it aims at on the conjugate model: "mode" (a point), "posterior" (exact), "independent sites" (the
    precision without what is between sites), "mean field" (variance 1 / diag(precision)), "property" (no closed form of
    the whole: what is known of it stands in the tests of the method). quick: settings for a run whose numbers do not
    matter, as the registry has them.
    """

    name: str
    target: str
    exact: dict[str, Any]
    systems: tuple[str, ...] = ("numpyro", "pyro")

    @property
    def quick(self) -> dict[str, Any]:
        return dict(registry.ROWS[self.name].quick)

    def build(self, ppl: str, settings: dict[str, Any]) -> Any:
        cls, fixed = _CLASSES[self.name]
        return getattr(bnn, cls)(ppl=ppl, **{**fixed, **settings})


_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "map": ("MAP", {}),
    "svi": ("SVI", {}),
    "vbll": (
        "SVI",
        {
            "guide": {"last_layer": "matrixnormal", "*": "normal"},
            "estimator": "closed_form",
            "divergence": "analytic",
        },
    ),
    "laplace": ("Laplace", {}),
    "laplace-guide": ("Laplace", {"engine": "guide"}),
    "laplace-kron": ("Laplace", {"structure": "kron"}),
    "laplace-diag": ("Laplace", {"structure": "diag"}),
    "laplace-lowrank": ("Laplace", {"structure": "lowrank", "rank": 3}),
    "nuts": ("NUTS", {}),
    "hmc": ("HMC", {}),
    "chees": ("ChEES", {}),
    "meads": ("MEADS", {}),
    "laps": ("LAPS", {}),
    "mclmc": ("MCLMC", {}),
    "mclmc-adjusted": ("MCLMC", {"adjusted": True}),
    "sgld": ("SGLD", {"batch_size": 8}),
    "sgld-metropolis": ("SGLD", {"correction": "metropolis"}),
    "sghmc": ("SGHMC", {"batch_size": 8}),
    "pathfinder": ("Pathfinder", {}),
    "smc": ("SMC", {}),
    "svgd": ("SVGD", {}),
    "ivon": ("IVON", {}),
    # The one layer that all models here have.
    "mc-dropout": ("MCDropout", {"layers": ("output",)}),
    "ensemble": ("Ensemble", {"member": bnn.MAP(steps=200), "size": 3}),
    "stacked": ("Stacked", {"member": bnn.Ensemble(bnn.MAP(steps=200), size=3), "by": "validation"}),
    "swag": ("SWAG", {}),
}

METHODS: dict[str, Row] = {
    "map": Row("map", "mode", {}),
    "svi": Row("svi", "mean field", {}),
    "vbll": Row("vbll", "independent sites", {}),
    "laplace": Row("laplace", "posterior", {}),
    "laplace-guide": Row("laplace-guide", "posterior", {}),
    "laplace-kron": Row("laplace-kron", "independent sites", {}),
    "laplace-diag": Row("laplace-diag", "mean field", {}),
    # As many eigenpairs as there are weights: nothing is left out.
    "laplace-lowrank": Row("laplace-lowrank", "posterior", {"rank": 4}),
    "nuts": Row("nuts", "posterior", {"draws": 400, "warmup": 300, "chains": 2}),
    "hmc": Row("hmc", "posterior", {"draws": 600, "warmup": 300, "chains": 1, "num_steps": 4}),
    "chees": Row("chees", "posterior", {"draws": 100, "warmup": 200, "chains": 32}, ("numpyro",)),
    "meads": Row("meads", "posterior", {"draws": 100, "warmup": 200, "chains": 32}, ("numpyro",)),
    "laps": Row("laps", "posterior", {"draws": 40, "warmup": 60, "chains": 128}, ("numpyro",)),
    "mclmc": Row("mclmc", "property", {}, ("numpyro",)),
    "mclmc-adjusted": Row(
        "mclmc-adjusted", "posterior", {"draws": 1000, "warmup": 300, "chains": 4}, ("numpyro",)
    ),
    "sgld": Row("sgld", "property", {}, ("numpyro",)),
    "sgld-metropolis": Row(
        "sgld-metropolis",
        "posterior",
        {"draws": 500, "warmup": 50, "chains": 4, "thinning": 20},
        ("numpyro",),
    ),
    "sghmc": Row("sghmc", "property", {}, ("numpyro",)),
    "pathfinder": Row("pathfinder", "property", {}, systems=("numpyro",)),
    "smc": Row("smc", "posterior", {"particles": 500, "runs": 4, "moves": 5}, systems=("numpyro",)),
    "svgd": Row("svgd", "property", {}),
    "ivon": Row("ivon", "mean field", {}),
    "mc-dropout": Row("mc-dropout", "property", {}),
    "ensemble": Row("ensemble", "mode", {}),
    "stacked": Row("stacked", "property", {}, systems=("numpyro",)),
    "swag": Row("swag", "property", {}),
}
