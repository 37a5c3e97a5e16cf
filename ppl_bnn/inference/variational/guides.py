"""Guides: a family of distributions for each part of a model, and the approximation from a fitted guide.

A guide is a list of blocks (`families/blocks.py`, `families/flows.py`), created from one specification for the sites of
a program. It draws and evaluates densities over `ops`, in the loops of both systems and in NumPy. `SVI()` uses the
systems' own AutoNormal and Trace_ELBO by default, and these guides for options that they do not provide.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

import numpy as np

from ppl_bnn.backends.protocol import Model, Site
from ppl_bnn.core.arrays import arrays_of, fields_in
from ppl_bnn.core.errors import InputError, unknown_name
from ppl_bnn.inference.variational.families.base import Array, Family, Parameters
from ppl_bnn.inference.variational.families.blocks import (
    Delta,
    FullRank,
    Gaussian,
    LowRank,
    MatrixNormal,
    Mixture,
    Normal,
    family_of,
)
from ppl_bnn.inference.variational.families.flows import InverseAutoregressive, NeuralSpline
from ppl_bnn.language import ops
from ppl_bnn.language.transforms import GaussianPrior, with_prior_scales
from ppl_bnn.posterior.approximation import Approximation, Point

__all__ = [
    "Delta",
    "FullRank",
    "Guide",
    "GuideApproximation",
    "InverseAutoregressive",
    "LowRank",
    "MatrixNormal",
    "Mixture",
    "NeuralSpline",
    "Normal",
]
# Each stratum costs one pass through the network per draw.
STRATA_LIMIT = 64
# What a file stores of each site.
STORED_OF_A_SITE = ("name", "shape", "unconstrained_shape", "local", "family")


# --- the guide --------------------------------------------------------------------------------------


def _matches(pattern: str, site: str) -> bool:
    """Whether a pattern matches a site: its name, the name of its layer, a glob for one of these, or several."""
    parts = site.split(".")
    prefixes = [".".join(parts[: index + 1]) for index in range(len(parts))]
    # A glob may have a comma of its own, as in "hidden[0,1]".
    several = [pattern, *(each.strip() for each in pattern.split(","))]
    return any(each == prefix or fnmatchcase(prefix, each) for prefix in prefixes for each in several)


@dataclass(frozen=True)
class Guide:
    """A distribution over all latent sites of a program: a product of blocks. Create one with `Guide.of`.

    Parameters are one dict "<index of the block>:<name>" -> array. Draws are dicts site -> (..., *unconstrained shape),
    in the order of the program.

    Parameters
    ----------
    sites : tuple of Site
        The latent sites, in the order of the program.
    families : tuple of (str, Family)
        The pairs (pattern, family) as specified.
    blocks : tuple of Family
        The block of each of them, for its sites.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.SVI(guide={"output": "fullrank", "*": "normal"}, steps=100, elbo_draws=10)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> [pattern for pattern, family in posterior.approximation.guide.families]
    ['output', '*']
    """

    sites: tuple[Site, ...]
    families: tuple[tuple[str, Family], ...]
    blocks: tuple[Family, ...]

    @classmethod
    def of(cls, specification: Any, sites: Iterable[Site]) -> Guide:
        """Create the guide of a specification.

        Parameters
        ----------
        specification : str, Family or dict
            A family or its name, over all sites jointly, or a dict pattern -> family. A pattern is the name of a layer
            ("output") or site ("output.bias"), a glob ("hidden*"), or several of these, separated by commas. The first
            match applies. The sites of one pattern are joint. "*" takes what is left, if anything is.
        sites : iterable of Site
            Sites of a program. Parameters without a prior are left out.

        Returns
        -------
        Guide
            The guide over the latent sites.

        Raises
        ------
        UnknownNameError
            No such family, or a pattern that matches no site.
        InputError
            A site that no pattern matches, a pattern whose sites all match earlier ones, or a family that refuses its
            sites.
        """
        sites = tuple(sites)
        latent = tuple(site for site in sites if not site.is_param)
        given = specification if isinstance(specification, Mapping) else {"*": specification}
        for pattern in given:
            if not isinstance(pattern, str):
                wanted = "names of layers, names of sites or globs as keys"
                raise InputError.of("guide", wanted, repr(pattern), "'hidden*'")
        families = tuple((pattern, family_of(each)) for pattern, each in given.items())
        taken: dict[str, str] = {}
        blocks: list[Family] = []
        for pattern, family in families:
            matched = [site for site in latent if _matches(pattern, site.name)]
            chosen = [site for site in matched if site.name not in taken]
            if not chosen and pattern == "*" and blocks:
                continue
            if not chosen:
                raise _unused(pattern, matched, taken, sites)
            taken |= {site.name: pattern for site in chosen}
            blocks += family.bind(chosen)
        missing = [site.name for site in latent if site.name not in taken]
        got, advice = f"none for {', '.join(missing)}", "'*': 'normal' as the last entry"
        InputError.check(not missing, "guide", "a family for every random variable", got, advice)
        guide = cls(latent, families, tuple(blocks))
        wanted = (
            f"at most {STRATA_LIMIT} combinations of components of mixtures, each a pass through the network"
        )
        advice = "one mixture over the sites jointly, or fewer components"
        InputError.check(guide.strata <= STRATA_LIMIT, "guide", wanted, guide.strata, advice)
        return guide

    # -- sites, sizes and blocks

    @property
    def names(self) -> tuple[str, ...]:
        """The latent sites in the order of the program."""
        return tuple(site.name for site in self.sites)

    @functools.cached_property
    def noise_size(self) -> int:
        """E, the number of standard normals per draw (and per stratum)."""
        return sum(block.noise_size for block in self.blocks)

    @functools.cached_property
    def strata(self) -> int:
        """S, the number of stratified draws in one sample: the product over the blocks."""
        return math.prod(block.strata for block in self.blocks)

    @functools.cached_property
    def block_of(self) -> dict[str, Family]:
        """The block that contains a site, by site."""
        return {name: block for block in self.blocks for name in block.names}

    def parameters_of(self, params: Parameters, index: int) -> dict[str, Array]:
        """The parameters of one block, under the names that the block uses."""
        return strip_prefix(params, f"{index}:")

    def _bound(self, params: Parameters) -> list[tuple[Family, dict[str, Array]]]:
        return [(block, self.parameters_of(params, index)) for index, block in enumerate(self.blocks)]

    def _ordered(self, u: Mapping[str, Any]) -> dict[str, Any]:
        return {name: u[name] for name in self.names}

    # -- the distribution

    def start(self, u0: Mapping[str, Any], scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Parameters at which the guide has the mean u0 and, exactly or approximately, given standard deviations.

        `scale` is a number, or by site a number or an array. `rng` is for families that must break a symmetry.
        """
        loc: dict[str, np.ndarray] = {}
        spread: dict[str, np.ndarray] = {}
        for site in self.sites:
            loc[site.name] = np.asarray(u0[site.name], dtype=float)
            if not np.all(np.isfinite(loc[site.name])):
                wanted = f"a finite location at the start for {site.name!r}"
                advice = "a point in unconstrained coordinates"
                raise InputError.of("guide", wanted, "NaN or infinity", advice)
            width = scale[site.name] if isinstance(scale, Mapping) else scale
            spread[site.name] = np.broadcast_to(np.asarray(width, dtype=float), site.unconstrained_shape)
        return {
            f"{index}:{name}": value
            for index, block in enumerate(self.blocks)
            for name, value in block.start(block.join(loc), block.join(spread), rng).items()
        }

    def draw(self, params: Parameters, eps: Array) -> tuple[dict[str, Array], list[Array]]:
        """Draws by site (..., *shape) and log q (...) per block, from standard normals eps (..., E), differentiable.

        With S > 1 strata eps is (..., S, E). Results then have an axis S, to be weighted with exp of `log_weights`;
        log q of a block with a single component may lack it.
        """
        u: dict[str, Array] = {}
        each: list[Array] = []
        at, outer = 0, 1
        for block, own in self._bound(params):
            noise = eps[..., at : at + block.noise_size]
            at += block.noise_size
            if block.strata in (1, self.strata):
                flat, log_q = block.draw(own, noise)
            else:
                flat, log_q = self._draw_within(block, own, noise, outer)
            outer *= block.strata
            u |= block.split(flat)
            each.append(log_q)
        return self._ordered(u), each

    def _draw_within(self, block: Family, own: Parameters, noise: Array, outer: int) -> tuple[Array, Array]:
        """Draws of one mixture among several: its component varies along the middle of (outer, K, inner) strata."""
        lead, inner = tuple(noise.shape[:-2]), self.strata // (outer * block.strata)
        xp = ops.namespace(noise)
        split = noise.reshape((*lead, outer, block.strata, inner, block.noise_size))
        flat, log_q = block.draw(own, xp.swapaxes(split, -3, -2))
        return (
            xp.swapaxes(flat, -3, -2).reshape((*lead, self.strata, block.size)),
            xp.swapaxes(log_q, -2, -1).reshape((*lead, self.strata)),
        )

    def log_weights(self, params: Parameters) -> Array:
        """Log probabilities (S,) of the strata."""
        weights = [block.log_weights(own) for block, own in self._bound(params) if block.strata > 1]
        if not weights:
            return self.blocks[0].log_weights(self.parameters_of(params, 0))
        return functools.reduce(lambda a, b: (a[:, None] + b).reshape(-1), weights)

    def log_prob(self, params: Parameters, u: Mapping[str, Array]) -> Array:
        """log q(u) (...) at unconstrained coordinates by site, (..., *shape)."""
        each = (block.log_prob(own, block.join(u)) for block, own in self._bound(params))
        return functools.reduce(operator.add, each)

    def _by_site(self, values: Iterable[Array | None]) -> dict[str, Any]:
        found: dict[str, Array | None] = {}
        for block, value in zip(self.blocks, values, strict=True):
            found |= dict.fromkeys(block.names) if value is None else block.split(value)
        return self._ordered(found)

    def mean(self, params: Parameters) -> dict[str, Array | None]:
        """Exact marginal means by site; None if they are not known (flows)."""
        return self._by_site(block.mean(own) for block, own in self._bound(params))

    def variance(self, params: Parameters) -> dict[str, Array | None]:
        """Exact marginal variances by site; None if they are not known (flows)."""
        return self._by_site(block.variance(own) for block, own in self._bound(params))

    @functools.cached_property
    def normal_sites(self) -> tuple[str, ...]:
        """The sites in blocks of independent normals, in the order of the program."""
        return tuple(name for name in self.names if isinstance(self.block_of[name], Normal))

    def loc_scale(self, params: Parameters) -> tuple[dict[str, Array], dict[str, Array]]:
        """Means and standard deviations of `normal_sites`, by site."""
        mean = self.mean(params)
        scale = self._by_site(
            block.scale(own) if isinstance(block, Normal) else None for block, own in self._bound(params)
        )
        return {name: mean[name] for name in self.normal_sites}, {n: scale[n] for n in self.normal_sites}

    def output_variance(self, params: Parameters, x: Array, weight: str, bias: str | None) -> Array:
        """The variance (N, O) of x W + b at fixed x (N, I), of a weight in a Gaussian block and a bias in any other."""
        found: Any = 0.0
        for block, own in self._bound(params):
            if isinstance(block, Gaussian) and {weight, bias}.intersection(block.names):
                found = found + block.output_variance(own, x, weight, bias)
        return found

    # -- in NumPy

    def sample(self, params: Parameters, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draws in NumPy, unconstrained coordinates by site with one leading axis."""
        return self._by_site(block.sample(own, count, rng) for block, own in self._bound(params))

    def centre(self, params: Parameters) -> dict[str, np.ndarray]:
        """The mean of a Gaussian, or of the largest component of a mixture, by site in NumPy."""
        return self._by_site(block.centre(own) for block, own in self._bound(params))

    def as_prior(self, params: Parameters) -> GaussianPrior:
        """The guide as a Gaussian, from parameters in NumPy; `UnsupportedError` if a block is not Gaussian."""
        parts = [block.as_prior(own) for block, own in self._bound(params)]
        mode = {name: value for part in parts for name, value in part.mode.items()}
        return GaussianPrior(
            self._ordered(mode),
            scale={name: value for part in parts for name, value in part.scale.items()},
            joint=tuple(itertools.chain.from_iterable(part.joint for part in parts)),
            kronecker={name: value for part in parts for name, value in part.kronecker.items()},
        )

    # -- in files

    def to_json(self) -> str:
        """Sites and families as JSON, without parameters."""
        sites = [{name: getattr(site, name) for name in STORED_OF_A_SITE} for site in self.sites]
        families = [[pattern, family.described()] for pattern, family in self.families]
        return json.dumps({"sites": sites, "families": families})

    @classmethod
    def from_json(cls, text: str) -> Guide:
        """The inverse of `to_json`."""
        found = json.loads(text)
        for stored in found["sites"]:
            stored |= {name: tuple(stored[name]) for name in ("shape", "unconstrained_shape")}
        sites = [Site(**stored) for stored in found["sites"]]
        return cls.of({pattern: family_of(family) for pattern, family in found["families"]}, sites)


def strip_prefix(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose names begin with a prefix, under the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _unused(pattern: str, matched: list[Site], taken: dict[str, str], sites: Sequence[Site]) -> Exception:
    """The error for a pattern that applies to no site."""
    if matched:
        earlier = sorted({taken[site.name] for site in matched})
        wanted = "patterns that each take a site, the first that matches winning"
        got = f"{pattern!r}, whose sites all go to {', '.join(map(repr, earlier))}"
        return InputError.of("guide", wanted, got, f"{pattern!r} earlier in the dict")
    without = [site.name for site in sites if site.is_param and _matches(pattern, site.name)]
    if without:
        got = f"{pattern!r}, which matches parameters without a prior only: {', '.join(without)}"
        advice = "leaving it out: they are optimised as they are"
        return InputError.of("guide", "patterns over random variables", got, advice)
    known = {site.name for site in sites if not site.is_param}
    layers = {name.rpartition(".")[0] or name for name in known}
    return unknown_name("site or layer in guide", pattern, known | layers)


# --- the approximation of a fit ---------------------------------------------------------------------


@dataclass
class GuideApproximation(Approximation):
    """A guide at its fitted parameters, in NumPy and float64, whatever the floating type of the fit.

    Parameters
    ----------
    guide : Guide
        The guide.
    parameters : dict of str to ndarray
        "<index of the block>:<name>" -> array.
    values : dict of str to ndarray
        Parameters without a prior, by site: constants of the fit, repeated in draws and absent from log q.
    prior_scales : dict of str to ndarray
        The scale of the prior by site, if the fit estimated it (`priors.EmpiricalBayes`).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.SVI(guide={"output": "fullrank", "*": "normal"}, steps=100, elbo_draws=10)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.approximation.parameters["0:loc"].shape  # ten weights and the intercept
    (11,)
    """

    guide: Guide
    parameters: dict[str, np.ndarray]
    values: dict[str, np.ndarray] = field(default_factory=dict)
    prior_scales: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def kind(self) -> Literal["chains", "iid", "point"]:  # type: ignore[override]
        """Whether the whole guide is a point ("point") or not ("iid")."""
        return "point" if all(isinstance(block, Delta) for block in self.guide.blocks) else "iid"

    @functools.cached_property
    def _exact(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(value, dtype=float) for name, value in self.parameters.items()}

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.guide.sample(self._exact, count, rng) | Point(self.values).draw(count, rng)

    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray | None:
        return None if self.kind == "point" else self.guide.log_prob(self._exact, u)

    def centre(self) -> dict[str, np.ndarray]:
        return self.guide.centre(self._exact) | dict(self.values)

    @property
    def has_centre(self) -> bool:  # type: ignore[override]
        return all(block.has_centre for block in self.guide.blocks)

    def program(self, model: Model) -> Model:
        return with_prior_scales(model, self.prior_scales) if self.prior_scales else model

    def as_prior(self) -> GaussianPrior:
        return self.guide.as_prior(self._exact)

    def arrays(self) -> dict[str, np.ndarray]:
        guide = np.frombuffer(self.guide.to_json().encode(), dtype=np.uint8)
        return arrays_of(self, ("guide",)) | {"guide": guide}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        found = fields_in(arrays)
        found["guide"] = Guide.from_json(found["guide"].tobytes().decode())
        return cls(**found)
