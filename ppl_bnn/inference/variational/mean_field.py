"""Independent normals, the approximation of mean-field variational inference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.inference.propagated import propagated, propagated_moments
from ppl_bnn.language.transforms import GaussianPrior
from ppl_bnn.posterior.approximation import Approximation, Point
from ppl_bnn.prediction.prediction import Prediction


@dataclass
class MeanField(Approximation):
    """Independent normals in unconstrained coordinates, q(u) = prod_j N(u_j; loc_j, scale_j^2).

    Attributes
    ----------
    loc : dict of str to ndarray
        Means by site, for every site.
    scale : dict of str to ndarray
        Standard deviations by site, for latent sites.

    Notes
    -----
    A site without a scale is a parameter without a prior: a constant of the fit, repeated in draws and absent from log
    q. The same holds for a coordinate of scale zero, as `pruned` produces.
    """

    loc: dict[str, np.ndarray]
    scale: dict[str, np.ndarray]
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"
    kinds: ClassVar[tuple[str, ...]] = ("sampled", "propagated")
    has_centre: ClassVar[bool] = True

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        # Alphabetical, because a file returns the sites in any order and the draws must not depend on it.
        noise = {name: rng.standard_normal((count, *self.scale[name].shape)) for name in sorted(self.scale)}
        fixed = Point({name: loc for name, loc in self.loc.items() if name not in noise}).draw(count, rng)
        drawn = {name: self.loc[name] + self.scale[name] * eps for name, eps in noise.items()} | fixed
        return {name: drawn[name] for name in self.loc}

    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray:
        total: Any = 0.0
        for name, scale in self.scale.items():
            free = scale > 0
            width = np.where(free, scale, 1.0)
            z = (u[name] - self.loc[name]) / width
            each = np.where(free, -0.5 * z**2 - np.log(width) - 0.5 * math.log(2.0 * math.pi), 0.0)
            total = total + each.reshape(len(each), -1).sum(axis=1)
        return total

    def centre(self) -> dict[str, np.ndarray]:
        return dict(self.loc)

    def closed_form(self, problem: Problem, x: Any, kind: str, memory: int) -> Prediction | None:
        """The prediction of kind "propagated", from one pass of means and variances."""
        if kind != "propagated":
            return None
        return propagated(problem, *self.propagated_moments(problem, x, memory))

    def propagated_moments(self, problem: Problem, x: Any, memory: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean (N, D) and covariance (N, D, D) of the predictor, those of the network to its activations' moments."""
        variance = {name: scale**2 for name, scale in self.scale.items()}
        return propagated_moments(problem, self.loc, variance, x, memory)

    def log_alpha(self) -> dict[str, np.ndarray]:
        """The noise-to-signal ratio log(scale^2 / loc^2) of each coordinate of the latent sites.

        In variational dropout (Kingma et al. 2015), alpha = rate / (1 - rate) of the Gaussian dropout of a weight.

        Returns
        -------
        dict of str to ndarray
            log alpha by site; infinite if loc is zero.
        """
        with np.errstate(divide="ignore"):
            return {
                name: 2.0 * (np.log(scale) - np.log(np.abs(self.loc[name])))
                for name, scale in self.scale.items()
            }

    def pruned(self, threshold: float = 3.0) -> MeanField:
        """The approximation with coordinates set to zero, without spread, if their log alpha is above a threshold.

        For weights under `priors.LogUniform`. A site without such a coordinate is unchanged.

        Parameters
        ----------
        threshold : float, default 3.0
            On log alpha. At 3 a weight has a dropout rate of 0.95 or more (Molchanov et al. 2017).

        Returns
        -------
        MeanField
            The pruned approximation.
        """
        loc, scale = dict(self.loc), dict(self.scale)
        for name, ratio in self.log_alpha().items():
            noise = ratio > threshold
            loc[name] = np.where(noise, 0.0, loc[name])
            scale[name] = np.where(noise, 0.0, scale[name])
        return MeanField(loc, scale)

    def as_prior(self) -> GaussianPrior:
        return GaussianPrior({name: self.loc[name] for name in self.scale}, scale=self.scale)
